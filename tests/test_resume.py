"""Runs that were killed, interrupted or failed: the same command loses and repeats nothing.

PACKER_KILLS: how many processes are killed at random moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import contents, jsonl, packer, packer_script

KILLS = int(os.environ.get("PACKER_KILLS", "30"))
OPTIONS = ["-l", "256", "-t", "bytes", "-q"]
UNITS = 40  # of the inputs below


@pytest.fixture
def inputs(folder: Path) -> Path:
    """a.jsonl, which several units read, and b.jsonl, which one reads alone."""
    random_ = random.Random(0)
    for name, documents in (("a.jsonl", 2500), ("b.jsonl", 20)):
        lengths = (random_.randrange(600) for _ in range(documents))
        texts = ("".join(random_.choices("abcdefgh ", k=length)) for length in lengths)
        (folder / name).write_bytes(jsonl(*texts))
    return folder


def arguments(out: str, *more: str) -> list[str]:
    return ["pack", "a.jsonl", "b.jsonl", *OPTIONS, "--unit-bytes", "20k", *more, "-o", out]


def run(*command: str) -> str:
    """What the command says on stderr. It succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


def records(out: Path) -> dict[str, int]:
    """Which units are packed, and when they were."""
    found = {}
    for path in out.glob(".packer/unit-*.json"):
        try:
            found[path.name] = path.stat().st_mtime_ns
        except FileNotFoundError:  # the run is cleaning up
            continue
    return found


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_at_random_moments(inputs: Path, workers: str) -> None:
    run(packer_script(), *arguments("whole", "--workers", workers))
    whole, random_, in_the_middle = contents("whole"), random.Random(int(workers)), 0
    for kill in range(KILLS // 2):
        out = Path(f"out{kill}")
        command = [packer_script(), *arguments(str(out), "--workers", workers)]
        wanted, then = random_.randrange(UNITS), random_.uniform(0, 0.03)
        with quietly(command) as process:
            while len(records(out)) < wanted and process.poll() is None:
                time.sleep(0.001)
            time.sleep(then)
            process.kill()
        before = records(out)
        in_the_middle += 0 < len(before) < UNITS
        if not (out / "manifest.json").exists():
            with quietly(command) as process:
                while process.poll() is None:
                    now = records(out)  # what was packed is not packed again
                    assert all(now[name] == before[name] for name in now.keys() & before.keys())
                    time.sleep(0.01)
            assert process.returncode == 0
        assert {n: c for n, c in contents(out).items() if ".packer" not in n} == whole
    assert in_the_middle > KILLS // 5


def quietly(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


CRASHING = """
import os, sys
from pathlib import Path
from packer_cli import cli
steps = {step}
def counted(call):
    def count(*arguments, **options):
        global steps
        steps -= 1
        if not steps:
            {failure}
        return call(*arguments, **options)
    return count
for name in ("replace", "rename", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
Path.unlink = counted(Path.unlink)
if {step} < 0:
    cli.os._exit = lambda code: (print(-1 - steps, file=sys.stderr), sys.stderr.flush(), code)
cli.main()
"""


def test_killed_at_every_step_to_the_disk(inputs: Path) -> None:
    def command(out: str, step: int) -> list[str]:
        failure = "os.kill(os.getpid(), 9)"
        code = CRASHING.format(step=step, failure=failure)
        # one worker, and few units, so that every step has a number
        packing = ["pack", "a.jsonl", "b.jsonl", *OPTIONS, "--unit-bytes", "500k", "--workers", "1"]
        return [sys.executable, "-c", code, *packing, "-o", out]

    steps = int(run(*command("whole", -1)).split()[-1])
    whole = contents("whole")
    assert steps > 20
    for step in range(1, steps + 1):
        out = f"out{step}"
        killed = subprocess.run(command(out, step), capture_output=True, check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        done = packer(*command(out, 0)[3:])
        finished = "holds a finished result" in done.stderr  # it was killed while cleaning up
        assert done.exit_code == 0 or finished, (step, done.stderr)
        assert {n: c for n, c in contents(out).items() if ".packer" not in n} == whole, step


def test_the_bytes_do_not_depend_on_workers(inputs: Path) -> None:
    for workers in ("1", "2", "8"):
        run(packer_script(), *arguments(f"out{workers}", "--workers", workers))
    assert contents("out1") == contents("out2") == contents("out8")
    assert len(json.loads(Path("out1/manifest.json").read_text())["units"]) == UNITS
