"""Many workers: units that several processes take from one queue, each once, whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support import (
    assert_error,
    children_of,
    contents,
    jsonl,
    packer,
    packer_script,
    random_texts,
    wait_for,
)

from packer_cli.run.processes import Queue

OPTIONS = ["-l", 64, "--unit-bytes", 5000, "-o"]
LOST = re.compile(
    r"warning: the process of Helper was ended from outside, by signal 9; what it was packing"
)


@pytest.fixture
def data(folder: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(jsonl(*random_texts(3000)))
    return path


def test_what_a_lost_process_was_packing_is_packed_again(data: Path) -> None:
    command = [packer_script(), "pack", data.name, "-t", "bytes", "--workers", "9"]
    with subprocess.Popen(
        [*command, *map(str, OPTIONS), "out"], stderr=subprocess.PIPE, text=True
    ) as run:
        assert wait_for(lambda: len(children_of(run.pid)) == 2)
        os.kill(children_of(run.pid).pop(), signal.SIGKILL)
        _, stderr = run.communicate(timeout=300)
    assert run.returncode == 0, stderr
    assert LOST.search(stderr)
    assert packer("pack", data.name, "-t", "bytes", "--workers", 1, *OPTIONS, "one").exit_code == 0
    assert contents("out") == contents("one")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_run(data: Path, number: signal.Signals) -> None:
    command = [packer_script(), "pack", data.name, "-t", "bytes", "--workers", "9", "-q"]
    with subprocess.Popen([*command, *map(str, OPTIONS), "out"], stderr=subprocess.PIPE) as run:
        assert wait_for(lambda: len(children_of(run.pid)) == 2)
        children = children_of(run.pid)
        run.send_signal(number)
        run.communicate(timeout=300)
    assert run.returncode in ({-9} if number == signal.SIGKILL else {0, 130, 143})
    assert wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert packer("pack", data.name, "-t", "bytes", "--workers", 9, *OPTIONS, "out").exit_code == 0
    assert packer("pack", data.name, "-t", "bytes", "--workers", 1, *OPTIONS, "one").exit_code == 0
    assert contents("out") == contents("one")


def test_other_processes_pack_as_this_one(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["pack", data.name, "-t", "bytes", "--workers"]
    assert packer(*command, 1, *OPTIONS, "one").exit_code == 0
    monkeypatch.setattr(Queue, "take", lambda queue: None)  # here, so that others take all
    assert packer(*command, 9, *OPTIONS, "out").exit_code == 0
    assert contents("out") == contents("one")
    data.write_bytes(data.read_bytes() + b"{}\n" * 30)
    result = packer(*command, 9, *OPTIONS, "other")
    assert_error(result, 1, "data.jsonl, line 3001 ", "no field 'text'")
    skip = ["--on-error", "skip", "--max-errors", 7]
    result = packer(*command, 40, *OPTIONS, "some", *skip)
    assert_error(result, 1, "records are bad so far; --max-errors is 7")


def test_a_file_of_this_process_alone(data: Path) -> None:
    """By a name that means another file elsewhere."""
    command = [packer_script(), "pack", "/dev/fd/0", "--input-format", "jsonl", "-t", "bytes", "-q"]
    with open(data, "rb") as file:
        whole = [*command, *map(str, OPTIONS), "out", "--workers", "9"]
        done = subprocess.run(whole, stdin=file, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_stdin_is_read_by_this_process(data: Path) -> None:
    command = [packer_script(), "pack", data.name, "-", "-t", "bytes", "-q", "--workers"]
    for workers in ("9", "1"):
        subprocess.run(
            [*command, workers, *map(str, OPTIONS), f"by-{workers}"],
            input=jsonl("some text"), check=True, capture_output=True,
        )  # fmt: skip
    assert contents("by-9") == contents("by-1")
