"""Several processes that pack one result together, by the command line."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from altered import faulty, unaltered
from support import (
    assert_error,
    contents,
    jsonl,
    packer,
    work_folder,
)

from packer_cli.ownership import Folder, claim
from packer_cli.run import destination

OPTIONS = ["-l", "64", "-t", "bytes", "--unit-bytes", "5k"]


@pytest.fixture(autouse=True)
def inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a.jsonl, which several units read, b.jsonl, and a whole result of both."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    random_ = random.Random(0)
    for name, documents in (("a.jsonl", 600), ("b.jsonl", 10)):
        texts = ("x" * random_.randrange(200) for _ in range(documents))
        (folder / name).write_bytes(jsonl(*texts))
    assert packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", "whole").exit_code == 0


def rank(number: int, size: int, out: str = "out", *more: str) -> list[str]:
    names = ["pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", out]
    return [*names, "--rank", str(number), "--world-size", str(size), *more]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_one_after_the_other(order: tuple[int, ...]) -> None:
    for number in order:
        assert not Path("out/manifest.json").exists()
        done = packer(*rank(number, 3))
        assert done.exit_code == 0, done.stderr
        if number != order[-1]:
            assert "units are not packed" in done.stderr
            assert re.search(r"^packer: out: this rank is done in \d+\.\d s$", done.stderr, re.M)
            assert done.stdout == ""
    assert re.search(r"^packer: out: done in \d+\.\d s$", done.stderr, re.M), done.stderr
    assert contents("out") == contents("whole")


def test_a_rank_that_looks_as_another_makes_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    find, looks = destination.find_own, count()

    def looked(folder: Folder, name: str) -> Path | None:
        before = find(folder, name)
        if next(looks) == 1:  # after that for a result that is being put in place
            os.close(claim(folder, name).descriptor)
        return before

    monkeypatch.setattr(destination, "find_own", looked)
    done = packer(*rank(0, 1))
    assert done.exit_code == 0, done.stderr
    assert contents("out") == contents("whole")


def four_at_once(out: str) -> None:
    """Run all ranks of four as processes; each must succeed."""
    with ThreadPoolExecutor(4) as threads:
        ranks = list(threads.map(lambda number: unaltered(*rank(number, 4, out)), range(4)))
    assert [one.returncode for one in ranks] == [0] * 4, [one.stderr for one in ranks]


def test_all_at_once() -> None:
    for attempt in range(3):
        out = f"out{attempt}"
        four_at_once(out)
        assert contents(out) == contents("whole")


def test_a_rank_that_is_lost_is_run_again() -> None:
    assert packer(*rank(0, 2)).exit_code == 0
    done = packer("finalize", "out")
    assert_error(done, 1, "out: ", "units are not packed")
    assert packer("stats", "out").exit_code == 1
    assert packer(*rank(1, 2)).exit_code == 0
    assert contents("out") == contents("whole")
    assert_error(packer("finalize", "out"), 2, "out: is already finished")


def test_finalize_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "packer_cli.run.pipeline.finalize_if_last", lambda *arguments, **options: None
    )
    for number in (0, 1):
        assert packer(*rank(number, 2)).exit_code == 0
    assert not Path("out/manifest.json").exists()
    done = packer("finalize", "out", "--json")
    rows = json.loads(Path("out/manifest.json").read_bytes())["rows"]
    assert json.loads(done.stdout)["rows"] == rows
    assert contents("out") == contents("whole")
    losing = ["--overlong", "drop", "--max-loss", "0.01"]
    assert packer(*rank(0, 1, "lost", *losing)).exit_code == 0
    done = packer("finalize", "lost")
    assert (done.exit_code, "of the tokens were lost" in done.stderr) == (1, True)
    assert not Path("lost/manifest.json").exists()


def test_ranks_must_agree() -> None:
    assert packer(*rank(0, 2)).exit_code == 0
    done = packer(*rank(1, 2), "-l", "32")
    assert_error(
        done, 2, "out: holds an unfinished run that differs: --max-length was 64, is now 32"
    )
    Path("b.jsonl").write_bytes(jsonl("new"))
    assert_error(packer(*rank(1, 2)), 2, "b.jsonl has changed")


AUTO = ["--rank", "auto", "--world-size", "auto"]
ARRAY = "SLURM_ARRAY_TASK_"


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({f"{ARRAY}ID": "1", f"{ARRAY}COUNT": "2"}, AUTO[:2]),
        ({f"{ARRAY}ID": "8", f"{ARRAY}COUNT": "2", f"{ARRAY}MIN": "7"}, AUTO[2:]),
        ({f"{ARRAY}ID": "12", f"{ARRAY}COUNT": "2", f"{ARRAY}MIN": "7", f"{ARRAY}STEP": "5"}, AUTO),
        ({"RANK": "1", "WORLD_SIZE": "2"}, AUTO),
        ({"JOB_COMPLETION_INDEX": "1"}, ["--world-size", "2"]),
        ({f"{ARRAY}ID": "1", f"{ARRAY}COUNT": "2"}, []),  # a scheduler alone makes no ranks
    ],
)
def test_ranks_of_schedulers(
    environment: dict[str, str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        assert packer(*rank(0, 2)).exit_code == 0
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", "out", *given)
    assert done.exit_code == 0, done.stderr
    assert contents("out") == contents("whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "2", "--world-size", "2"], "--rank: 2 is not between 0 and 1"),
        (["--rank", "1"], "--world-size: not given, and none of SLURM_ARRAY_TASK_COUNT"),
        (["--rank", "x", "--world-size", "2"], "--rank: 'x' is not a number"),
        (["--rank", "auto", "--world-size", "auto"], "--rank: not given, and none of SLURM_ARRAY"),
        (["--rank", "0", "--world-size", "2", "--overwrite"], "--rank: does not go with"),
    ],
)
def test_what_makes_no_rank(options: list[str], message: str) -> None:
    assert_error(packer("pack", "a.jsonl", *OPTIONS, "-o", "out", *options), 2, message)
    assert not Path("out").exists()


def test_ranks_of_another_world_size_are_refused_meanwhile() -> None:
    """Both would write the shards of some units at the same time."""
    import fcntl

    assert packer(*rank(0, 2)).exit_code == 0
    with open(work_folder() / "rank-1-of-2.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = packer(*rank(0, 1))
        assert_error(done, 1, "out: ranks of another --world-size than 1 are at work")
        assert_error(packer(*rank(1, 2)), 1, "out: another run is writing there")
    assert packer(*rank(0, 1)).exit_code == 0
    assert contents("out") == contents("whole")


def test_a_rank_that_comes_late_has_nothing_to_do() -> None:
    names = ["b.jsonl", "--rank", "0", "--world-size", "2"]
    assert packer("pack", *OPTIONS, "-o", "out", *names).exit_code == 0
    before = contents("out")
    names[2] = "1"
    done = packer("pack", *OPTIONS, "-o", "out", *names)
    assert done.exit_code == 0
    assert "out: already finished" in done.stderr
    assert contents("out") == before
    assert not Path("out/.packer").exists()
    Path("b.jsonl").write_bytes(jsonl("other"))
    assert_error(packer("pack", *OPTIONS, "-q", "-o", "out", *names), 2, "holds a finished result")
    done = packer("pack", *OPTIONS, "-q", "-o", "out", *names, "-l", "32")
    assert_error(done, 2, "--max-length was 64, is now 32")
    assert contents("out") == before
    assert not Path("out/.packer").exists()


def test_stdin_is_not_for_ranks() -> None:
    for options in (["--rank", "0", "--world-size", "2"], ["--engine", "ray"]):
        done = packer("pack", "-", "--shape", "text", *OPTIONS, "-o", "out", *options)
        assert_error(done, 2, "does not go with stdin")
        assert not Path("out").exists()


@pytest.fixture
def ended(inputs: None) -> Path:
    """An output whose last rank was killed while putting the result in place."""
    assert packer(*rank(0, 2)).exit_code == 0
    killed = faulty("when_named('replacing.json', 1, kill)", *rank(1, 2))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (work_folder() / "replacing.json").exists()
    return Path("out")


def test_killed_while_putting_the_result_in_place(ended: Path) -> None:
    subprocess.run(["cp", "-a", "out", "copy"], check=True)
    assert packer("finalize", "copy").exit_code == 0
    assert contents("copy") == contents("whole")
    assert packer(*rank(0, 2)).exit_code == 0
    assert contents("out") == contents("whole")


def test_all_come_back_after_that(ended: Path) -> None:
    """Only one of them may put the result in place."""
    for attempt in range(2):
        out = f"again{attempt}"
        subprocess.run(["cp", "-a", "out", out], check=True)
        four_at_once(out)
        assert contents(out) == contents("whole")
