"""The output directory: what may be written to, what may be removed, and what a failure leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from altered import altered
from support import (
    assert_error,
    check_directory,
    contents,
    jsonl,
    pack,
    packer,
    recover_texts,
    shard_of,
)

from packer_cli.cli.pack import default_output
from packer_cli.options.run_options import RunOptions
from packer_cli.run.place import own_folder

pytestmark = pytest.mark.usefixtures("folder")
OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")


@pytest.fixture
def data(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_bytes(jsonl("first", "second"))
    return path


def touched() -> dict[str, tuple[int, int]]:
    """When each file of the result was written, and as which."""
    return {one.name: (one.stat().st_ino, one.stat().st_mtime_ns) for one in Path("out").iterdir()}


def test_the_default_output_is_named_after_the_input(folder: Path) -> None:
    (folder / "data").mkdir()
    inputs = {
        "data/a.jsonl": "a-packed-16", "data/b.jsonl.gz": "b-packed-16",
        "data/c.tar": "c.tar-packed-16", "data": "data-packed-16", "data/*.jsonl": "data-packed-16",
        "-": "stdin-packed-16", "s3://bucket/train-*.parquet": "train--packed-16",
        "https://host/a/data.jsonl.zst?token=a/b.c": "data-packed-16",
    }  # fmt: skip
    assert {name: str(default_output([name], "packed-16")) for name in inputs} == inputs
    (folder / "data" / "a.jsonl").write_bytes(jsonl("a"))
    assert packer("pack", "data/a.jsonl", "-l", 16, "-q").exit_code == 0
    assert recover_texts("a-packed-16") == ["a"]


@pytest.mark.parametrize(
    ("command", "more"),
    [("pack", []), ("pack", ["--json"]), ("pack", ["--rank", 0, "--world-size", 1]),
     ("tokenize", ["-q"])],
)  # fmt: skip
def test_the_same_command_again_does_nothing(data: Path, command: str, more: list[object]) -> None:
    arguments = [command, "a.jsonl", "-t", "bytes", "-o", "out", *more]
    arguments += ["-l", 16] if command == "pack" else []
    first = packer(*arguments)
    before, times = contents("out"), touched()
    again = packer(*arguments)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    said = "already finished" if "--rank" in more else "up to date"
    assert (f"out: {said}\n" in again.stderr) == ("-q" not in more)
    assert contents("out") == before
    assert touched() == times


# what is done to inputs or the result, the command, how it differs, and whether --add would do
OTHERS: dict[str, tuple[Callable[[], object], list[object], str, bool]] = {
    "length": (lambda: None, ["a.jsonl", "-l", 8], "--max-length was 16, is now 8", False),
    "one more": (lambda: None, ["a.jsonl", "b.jsonl"], "b.jsonl is new", True),
    "another": (lambda: None, ["b.jsonl"], "a.jsonl is not named now; b.jsonl is new", True),
    "a lost shard": (lambda: shard_of().unlink(), ["a.jsonl"], ".arrow is missing", False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_finished_result_is_not_replaced_unasked(data: Path, name: str) -> None:
    """The message says what differs, and the tip names --add where that works."""
    change, command, differs, update = OTHERS[name]
    Path("b.jsonl").write_bytes(jsonl("b"))
    pack("a.jsonl", "-l", 16)
    change()
    before = contents("out")
    done = packer("pack", *OPTIONS, *command)
    assert_error(done, 2, "out: holds a finished result that differs: ", differs)
    tip = done.stderr.splitlines()[1]
    assert ("--add" in tip, "--overwrite" in tip) == (update, True)
    assert contents("out") == before


def test_overwrite_replaces_a_result_and_leaves_other_files(data: Path) -> None:
    pack("a.jsonl", "-l", 4, "--unit-bytes", 1)
    assert len(list(Path("out").glob("shard-*.arrow"))) > 1
    Path("out/notes.txt").write_text("mine")
    Path("other.jsonl").write_bytes(jsonl("new"))
    pack("other.jsonl", "-l", 16, "--overwrite")
    assert recover_texts("out") == ["new"]
    assert sorted(contents("out")) == [
        "dataset_info.json", "manifest.json", "notes.txt",
        shard_of().name, "squared_lengths.npy", "state.json", "units.jsonl",
    ]  # fmt: skip


def test_outputs_that_cannot_be(data: Path) -> None:
    Path("out").write_bytes(b"mine")
    result = packer("pack", "a.jsonl", *OPTIONS, "--overwrite")
    assert_error(result, 2, "out: exists and is not a directory")
    assert Path("out").read_bytes() == b"mine"
    result = packer("pack", "a.jsonl", *OPTIONS[:-1], "a.jsonl/out")
    assert_error(result, 1, "a.jsonl: cannot write: Not a directory")


def test_inputs_and_outputs_inside_each_other(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_bytes(jsonl("a"))
    for output in ("data", "."):
        for name in ("data", "data/a.jsonl"):
            result = packer("pack", name, *OPTIONS[:-1], output, "--overwrite")
            assert_error(result, 2, f"{output}: the input data/a.jsonl lies inside the output")
    assert contents(folder) == {"data/a.jsonl": jsonl("a")}
    for _ in range(2):  # the output is no input
        result = packer("pack", "data", *OPTIONS[:-1], "data/out", "--overwrite")
        assert result.exit_code == 0, result.stderr
        assert recover_texts("data/out") == ["a"]


def test_two_runs_do_not_write_to_one_directory(data: Path) -> None:
    Path("out").mkdir()
    with own_folder(Path("out"), ".packer", Path("out"), RunOptions()):
        before = contents("out")
        result = packer("pack", "a.jsonl", *OPTIONS)
        assert_error(result, 1, "out: another run is writing there")
        assert contents("out") == before
    assert packer("pack", "a.jsonl", *OPTIONS).exit_code == 0  # the lock went with its holder
    check_directory("out")


def test_a_file_system_without_locks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    result = packer("pack", "a.jsonl", *OPTIONS)
    assert_error(result, 1, "out: cannot be locked: No locks available")
    assert "--no-lock" in result.stderr
    assert not Path("out/manifest.json").exists()
    assert packer("pack", "a.jsonl", *OPTIONS, "--no-lock").exit_code == 0
    check_directory("out")


def test_a_failed_run_leaves_no_directory_of_its_own(data: Path) -> None:
    Path("bad.jsonl").write_bytes(jsonl("good") + b"{")
    assert packer("pack", "bad.jsonl", *OPTIONS).exit_code == 1
    assert not Path("out").exists()
    Path("out").mkdir()
    assert packer("pack", "bad.jsonl", *OPTIONS).exit_code == 1
    assert os.listdir("out") == []


# A program that is packer, but may write no file of more than 6,000 bytes.
SMALL_FILES = """
import resource, signal
from packer_cli.__main__ import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
main()
"""


@pytest.mark.parametrize("command", ["pack a.jsonl -l 16 -t bytes", "tokenize a.jsonl -t bytes"])
def test_the_file_that_cannot_be_written_is_named(folder: Path, command: str) -> None:
    """Rejected records are in a buffer until their file is closed."""
    skip = ["-q", "--on-error", "skip", "-o"]
    for records, bad, failing in ((1, 50, "rejected-00000.jsonl"), (100, 5, ".arrow.part")):
        content = jsonl(*["some words " * 20] * records) + b"{broken\n" * bad
        (folder / "a.jsonl").write_bytes(content)
        done = altered(SMALL_FILES, *command.split(), *skip, "out")
        assert done.returncode == 1
        error = done.stderr.splitlines()[0]
        assert error.startswith("error: out/.packer/"), done.stderr
        assert error.endswith(f"{failing}: cannot write: File too large"), done.stderr


LOSING = ("-t", "bytes", "-l", 16, "-o", "out", "-q", "--overlong", "truncate", "--no-eos")


def test_a_run_that_loses_too_much_is_marked_incomplete(folder: Path) -> None:
    """40 tokens, of which truncating to 16 loses 4."""
    (folder / "a.jsonl").write_bytes(jsonl("a" * 20, "b" * 10, "c" * 10))
    command = ("pack", "a.jsonl", *LOSING)
    result = packer(*command, "--max-loss", "0.09")
    assert result.exit_code == 1
    error, tip = result.stderr.splitlines()
    assert error.startswith("error: out: 0.1000 of the tokens were lost, 4 truncated and 0 dropped")
    assert tip.startswith("tip: the output is kept, marked incomplete")
    assert "truncated" in result.stdout
    assert not Path("out/manifest.json").exists()
    assert json.loads(Path("out/manifest.incomplete.json").read_bytes())["truncated_tokens"] == 4
    assert_error(packer("show", "out"), 1, "out: is marked incomplete: 0.1000 of the tokens")
    stats = packer("stats", "out")
    assert stats.exit_code == 0
    assert "out is marked incomplete: 0.1000" in stats.stderr
    assert_error(packer(*command), 2, "out: holds a finished result")
    for much in ("0.1", "10%"):
        assert packer(*command, "--overwrite", "--max-loss", much).exit_code == 0
        assert check_directory("out")["truncated_tokens"] == 4
    assert not Path("out/manifest.incomplete.json").exists()


def test_add_looks_at_what_is_lost_when_nothing_is_new(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("a" * 20, "b" * 10, "c" * 10))
    assert packer("pack", "a.jsonl", *LOSING).exit_code == 0
    before = touched()
    update = ("pack", "a.jsonl", *LOSING, "--add")
    assert_error(packer(*update, "--max-loss", "0.09"), 1, "out: 0.1000 of the tokens were lost")
    assert packer(*update, "--max-loss", "0.1").exit_code == 0
    assert check_directory("out")["config"]["max_loss"] == 0.1
    assert touched()[shard_of().name] == before[shard_of().name]
    before = touched()
    assert packer(*update, "--max-loss", "0.1").exit_code == 0
    assert touched() == before
