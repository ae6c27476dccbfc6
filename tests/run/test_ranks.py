"""Several processes that pack one result together, by the command line."""

from __future__ import annotations

import fcntl
import json
import pkgutil
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from altered import faulty, unaltered
from support import assert_error, contents, jsonl, packer, random_texts, succeeds, work_folder

from packer_cli.run import place

OPTIONS = ["-l", "64", "-t", "bytes", "--unit-bytes", "5k"]


@pytest.fixture(autouse=True)
def inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a.jsonl, which several units read, b.jsonl, and a whole result of both."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, documents in (("a.jsonl", 300), ("b.jsonl", 10)):
        (folder / name).write_bytes(jsonl(*random_texts(documents)))
    succeeds("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", "whole")


def rank(number: int, size: int, *more: str, out: str = "out") -> list[str]:
    names = ["pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", out]
    return [*names, "--rank", str(number), "--world-size", str(size), *more]


def four_at_once(out: str) -> None:
    """Run all ranks of four as processes; each must succeed."""
    with ThreadPoolExecutor(4) as threads:
        ranks = list(threads.map(lambda n: unaltered(*rank(n, 4, out=out)), range(4)))
    assert [one.returncode for one in ranks] == [0] * 4, [one.stderr for one in ranks]
    assert contents(out) == contents("whole")


def test_one_after_the_other() -> None:
    """Until the last has come, there is no result."""
    for number in (2, 0, 1):
        assert packer("stats", "out").exit_code > 0
        done = succeeds(*rank(number, 3))
        if number != 1:
            assert "units are not packed" in done.stderr
            assert re.search(r"^packer: out: this rank is done in \d+\.\d s$", done.stderr, re.M)
            assert done.stdout == ""
    assert re.search(r"^packer: out: done in \d+\.\d s$", done.stderr, re.M), done.stderr
    assert contents("out") == contents("whole")


def test_all_at_once() -> None:
    for attempt in range(2):
        four_at_once(f"out{attempt}")


# what the last rank is about to do, for the so-manieth time, when another finishes
MOMENTS = {
    "packer_cli.run.pipeline.finish_if_last": 0,
    "packer_cli.run.pipeline.left_to_do": 1,
    "packer_cli.run.pipeline.locked_output": 1,
}


@pytest.mark.parametrize("name", MOMENTS)
def test_a_rank_that_ends_as_another_finishes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, calls = pkgutil.resolve_name(name), count()

    def called(*given: Any, **how: Any) -> Any:
        if next(calls) == MOMENTS[name]:
            assert unaltered(*rank(0, 2)).returncode == 0
        return call(*given, **how)

    succeeds(*rank(0, 2))
    monkeypatch.setattr(name, called)
    assert "out: done in " in succeeds(*rank(1, 2)).stderr
    assert contents("out") == contents("whole")


def test_the_command_of_any_rank_finishes_what_was_killed() -> None:
    units = len(json.loads(Path("whole/manifest.json").read_bytes())["units"])
    succeeds(*rank(0, 2))
    last = f"when_named('unit-', {units // 2}, kill)"
    assert faulty(last, *rank(1, 2, "--workers", "1")).returncode == -signal.SIGKILL
    assert not Path("out/manifest.json").exists()
    assert "out: done in " in succeeds(*rank(0, 2)).stderr
    assert contents("out") == contents("whole")
    lost = packer(*rank(0, 1, "--overlong", "drop", "--max-loss", "0.01", out="lost"))
    assert (lost.exit_code, "of the tokens were lost" in lost.stderr) == (1, True)


def test_ranks_must_agree() -> None:
    succeeds(*rank(0, 2))
    differs = "out: holds an unfinished run that differs: --max-length was 64, is now 32"
    assert_error(packer(*rank(1, 2, "-l", "32")), 2, differs)
    Path("b.jsonl").write_bytes(jsonl("new"))
    assert_error(packer(*rank(1, 2)), 2, "b.jsonl has changed")


AUTO = ["--rank", "auto", "--world-size", "auto"]
ARRAY = "SLURM_ARRAY_TASK_"
# environment, and what is given
SCHEDULERS = [
    ({f"{ARRAY}ID": "1", f"{ARRAY}COUNT": "2"}, AUTO[:2]),
    ({f"{ARRAY}ID": "8", f"{ARRAY}COUNT": "2", f"{ARRAY}MIN": "7"}, AUTO[2:]),
    ({f"{ARRAY}ID": "12", f"{ARRAY}COUNT": "2", f"{ARRAY}MIN": "7", f"{ARRAY}STEP": "5"}, AUTO),
    ({"RANK": "1", "WORLD_SIZE": "2"}, AUTO),
    ({"JOB_COMPLETION_INDEX": "1"}, ["--world-size", "2"]),
    ({f"{ARRAY}ID": "1", f"{ARRAY}COUNT": "2"}, []),  # a scheduler alone makes no ranks
]


@pytest.mark.parametrize(("environment", "given"), SCHEDULERS)
def test_ranks_of_schedulers(
    environment: dict[str, str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        succeeds(*rank(0, 2))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = succeeds("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", "out", *given).stderr
    assert contents("out") == contents("whole")
    assert (f"packer: rank 1 of 2, from {next(iter(environment))}" in said) == bool(given)


@pytest.mark.parametrize(("step", "problem"), [("x", "'x', is not a number"), ("0", "ranks are")])
def test_odd_steps_of_a_scheduler(step: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ID": "4", "COUNT": "2", "STEP": step}.items():
        monkeypatch.setenv(f"{ARRAY}{name}", value)
    result = packer("pack", "a.jsonl", *OPTIONS, "-o", "out", *AUTO)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_ranks_of_another_world_size_are_refused_meanwhile() -> None:
    """Both would write the shards of some units at the same time."""
    succeeds(*rank(0, 2))
    with open(work_folder() / "rank-1-of-2.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = packer(*rank(0, 1))
        assert_error(done, 1, "out: ranks of another --world-size than 1 are at work")
        assert_error(packer(*rank(1, 2)), 1, "out: another run is writing there")
    succeeds(*rank(0, 1))
    assert contents("out") == contents("whole")


def test_a_rank_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    succeeds(*rank(0, 2))
    with open(work_folder() / "begin.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        naps = list[float]()

        def nap(seconds: float) -> None:
            naps.append(seconds)
            if sum(naps) > 11:
                fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(place.time, "sleep", nap)
        said = succeeds(*rank(1, 2)).stderr
    assert said.count(": waiting for another rank, which holds begin.lock there") == 1
    assert contents("out") == contents("whole")


def test_a_rank_that_comes_late_has_nothing_to_do() -> None:
    """Nor after an update, whose units are not those of a run of all inputs."""
    command = ["pack", *OPTIONS, "-o", "out", "b.jsonl"]
    late = [*command, "--rank", "1", "--world-size", "2"]
    succeeds(*command, "--rank", "0", "--world-size", "2")
    before = contents("out")
    assert "out: already finished" in succeeds(*late).stderr
    assert_error(packer(*late, "-q", "-l", "32"), 2, "--max-length was 64, is now 32")
    assert contents("out") == before
    assert not Path("out/.packer").exists()
    Path("c.jsonl").write_bytes(jsonl("more"))
    succeeds(*command[:-1], "c.jsonl", "--add")
    assert_error(packer(*command, "c.jsonl"), 2, "already holds these inputs, in another order")
    assert "out: already finished" in succeeds(*late, "c.jsonl").stderr
    Path("b.jsonl").write_bytes(jsonl("other"))
    assert_error(packer(*late, "c.jsonl", "-q"), 2, "holds a finished result")


def test_killed_while_putting_the_result_in_place() -> None:
    """Any rank goes on with it; of all at once one."""
    succeeds(*rank(0, 2))
    killed = faulty("when_named('replacing.json', 1, kill)", *rank(1, 2))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    subprocess.run(["cp", "-a", "out", "by all"], check=True)
    four_at_once("by all")
    succeeds(*rank(0, 2))
    assert contents("out") == contents("whole")
