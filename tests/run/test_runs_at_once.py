"""Runs that begin and end at once, and readers beside them, which never mix two results.

PACKER_TREES: with 400, runs stop at every fourth step and not at every eighth, with more than 1000
at every step.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from altered import unaltered
from support import jsonl, packer_script

from packer_cli import open_packed
from packer_cli.errors import DataError
from packer_cli.options.run_options import RunOptions
from packer_cli.run.place import InUseError, own_folder, remove_own

pytestmark = pytest.mark.usefixtures("folder")
TREES = int(os.environ.get("PACKER_TREES", "30"))
OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
EACH = 1 if TREES > 1000 else 4 if TREES >= 400 else 8  # of the steps at which two runs are stopped


holders = list[Path]()


def begin(parent: Path) -> None:
    with suppress(InUseError), own_folder(parent, ".packer", parent, RunOptions()):
        holders.append(parent)
        assert holders.count(parent) == 1
        holders.remove(parent)


def begin_and_end(parent: Path) -> None:
    with suppress(InUseError), own_folder(parent, ".packer", parent, RunOptions()) as own:
        holders.append(parent)
        assert holders.count(parent) == 1
        holders.remove(parent)
        remove_own(own)


class Interleaved(threading.Thread):
    """A call that stops before one of its steps on the disk until it is told to go on."""

    def __init__(self, call: Callable[[Path], None], parent: Path, step: int) -> None:
        super().__init__(daemon=True)
        self.call, self.parent, self.left, self.error = call, parent, step, None
        self.stopped, self.may_go_on = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self.call(self.parent)
        except Exception as error:
            self.error = error
        self.stopped.set()

    def count(self) -> None:
        self.left -= 1
        if not self.left:
            self.stopped.set()
            self.may_go_on.wait()


@pytest.mark.parametrize("first", [begin, begin_and_end])
@pytest.mark.parametrize("there", [False, True])
def test_runs_that_begin_and_end_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: bool, first: Callable[[Path], None]
) -> None:
    """The first stops at any step, the other at any of its own, then each goes on to its end."""

    def counted(call: Any) -> Any:
        def count(*arguments: Any, **options: Any) -> Any:
            if isinstance(thread := threading.current_thread(), Interleaved):
                thread.count()
            return call(*arguments, **options)

        return count

    monkeypatch.setattr("packer_cli.run.place._SECONDS", 0)
    for name in ("mkdir", "open", "rename", "unlink", "rmdir", "lstat", "listdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for number in itertools.count(1, EACH):
        for other in itertools.count(1 + number % EACH, EACH):
            place = folder / f"{number}-{other}"
            place.mkdir()
            if there:
                begin(place)
            one = Interleaved(first, place, number)
            two = Interleaved(begin_and_end, place, other)
            one.start()
            one.stopped.wait()
            two.start()
            two.stopped.wait()
            for thread in (one, two):
                thread.may_go_on.set()
                thread.join()
            assert (one.error, two.error) == (None, None), (number, other)
            begin(place)
            assert (place / ".packer").exists(), (number, other)
            if two.left > 0:
                break
        if one.left > 0:
            return


def test_readers_never_mix_two_results(folder: Path) -> None:
    """Readings while runs replace the result: one or the other, whole, or an error."""
    for name, letter in (("x.jsonl", "x"), ("y.jsonl", "y")):
        Path(name).write_bytes(jsonl(*[letter * (i % 40 + 1) for i in range(300)]))
    options = ["-l", "32", "-t", "bytes", "-q", "--unit-bytes", "800", "-o", "out", "--overwrite"]
    command = [packer_script(), "pack", "x.jsonl", *options]
    assert subprocess.run(command, check=False).returncode == 0
    failures = list[str]()

    def replace() -> None:
        for name in ("y.jsonl", "x.jsonl") * (4 if TREES >= 400 else 2):
            done = unaltered("pack", name, *options)
            failures.extend([done.stderr] * bool(done.returncode))

    thread = threading.Thread(target=replace)
    thread.start()
    found, readings, replaced = set[str](), 0, 0
    try:
        while thread.is_alive():
            readings += 1
            try:
                packed = open_packed("out")
                path = Path(packed.manifest["inputs"][0]["path"]).name
                letters = set[int]()
                for shard in packed.manifest["shards"]:
                    for batch in packed.batches(shard):
                        letters |= set(batch.column("input_ids").values.to_pylist())
            except DataError as error:
                if "was replaced by another result while it was read" not in error.message:
                    raise
                replaced += 1
                continue
            found.add(path)
            assert letters - {256, 257} == {ord(path[0])}
    finally:
        thread.join()
    assert not failures
    assert found == {"x.jsonl", "y.jsonl"}
    assert replaced < readings / 2
