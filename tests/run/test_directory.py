"""The output directory: what may be written to, what may be removed, and what a failure leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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

from packer_cli.ownership import Folder, own_folder

pytestmark = pytest.mark.usefixtures("folder")
OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")


@pytest.fixture
def data(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_bytes(jsonl("first", "second"))
    return path


def test_the_default_output_is_named_after_the_input(folder: Path) -> None:
    (folder / "data").mkdir()
    inputs = {
        "data/a.jsonl": "a-packed-16",
        "data/b.jsonl.gz": "b-packed-16",
        "data/c.tar": "c.tar-packed-16",
        "data": "data-packed-16",
        "data/*.jsonl": "data-packed-16",
        "-": "stdin-packed-16",
    }
    from packer_cli.cli.pack import default_output

    assert {name: str(default_output([name], "packed-16")) for name in inputs} == inputs
    (folder / "data" / "a.jsonl").write_bytes(jsonl("a"))
    assert packer("pack", "data/a.jsonl", "-l", 16, "-q").exit_code == 0
    assert recover_texts("a-packed-16") == ["a"]


@pytest.mark.parametrize("command", ["pack", "tokenize"])
@pytest.mark.parametrize("more", [[], ["-q"], ["--json"], ["--rank", 0, "--world-size", 1]])
def test_the_same_command_again_does_nothing(data: Path, command: str, more: list[object]) -> None:
    arguments = [command, "a.jsonl", "-t", "bytes", "-o", "out", *more]
    arguments += ["-l", 16] if command == "pack" else []
    first = packer(*arguments)
    before, times = contents("out"), [path.stat() for path in Path("out").iterdir()]
    again = packer(*arguments)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    said = "already finished" if "--rank" in more else "up to date"
    assert (f"out: {said}\n" in again.stderr) == ("-q" not in more)
    assert contents("out") == before
    assert [path.stat() for path in Path("out").iterdir()] == times


def test_a_finished_result_is_not_replaced_unasked(data: Path) -> None:
    """The message says what differs, and the tip names --update where that works."""
    pack("a.jsonl", "-l", 16)
    before = contents(Path("out"))

    def refused(*arguments: object, differs: str, update: bool) -> None:
        done = packer("pack", *arguments, "-t", "bytes", "-q", "-o", "out")
        assert_error(done, 2, f"out: holds a finished result that differs: {differs}")
        tip = done.stderr.splitlines()[1]
        assert ("--update" in tip, "--overwrite" in tip) == (update, True)
        assert contents(Path("out")) == before

    refused("a.jsonl", "-l", 8, differs="--max-length was 16, is now 8", update=False)
    differs = "--on-error was fail, is now skip"
    refused("a.jsonl", "-l", 16, "--on-error", "skip", differs=differs, update=False)
    Path("b.jsonl").write_bytes(jsonl("b"))
    refused("a.jsonl", "b.jsonl", "-l", 16, differs="b.jsonl is new", update=True)
    differs = "a.jsonl is not named now; b.jsonl is new"
    refused("b.jsonl", "-l", 16, differs=differs, update=True)
    (shard,) = Path("out").glob("shard-*")
    shard.rename("elsewhere")
    before, whole = contents(Path("out")), before
    refused("a.jsonl", "-l", 16, differs=f"{shard.name} is missing", update=True)
    Path("elsewhere").rename(shard)
    before = whole
    content = Path("a.jsonl").read_bytes()
    Path("a.jsonl").write_bytes(content + content)
    refused("a.jsonl", "-l", 16, differs="a.jsonl has changed", update=True)


def test_overwrite_replaces_a_result_and_leaves_other_files(data: Path) -> None:
    pack("a.jsonl", "-l", 4, "--unit-bytes", 1)
    assert len(list(Path("out").glob("shard-*.arrow"))) > 1
    Path("out/notes.txt").write_text("mine")
    Path("other.jsonl").write_bytes(jsonl("new"))
    pack("other.jsonl", "-l", 16, "--overwrite")
    assert recover_texts("out") == ["new"]
    assert sorted(contents(Path("out"))) == [
        "dataset_info.json", "input_times.json", "manifest.json", "notes.txt",
        shard_of().name, "squared_lengths.npy", "state.json", "units.jsonl",
    ]  # fmt: skip


def test_outputs_that_cannot_be(data: Path) -> None:
    Path("out").write_bytes(b"mine")
    result = packer("pack", "a.jsonl", *OPTIONS, "--overwrite")
    assert_error(result, 2, "out: exists and is not a directory")
    assert Path("out").read_bytes() == b"mine"
    result = packer("pack", "a.jsonl", *OPTIONS[:-1], "a.jsonl/out")
    assert_error(result, 1, "a.jsonl: cannot write: Not a directory")


@pytest.mark.parametrize("output", ["data", "."])
def test_inputs_inside_the_output(folder: Path, output: str) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_bytes(jsonl("a"))
    for name in ("data", "data/a.jsonl"):
        result = packer("pack", name, *OPTIONS[:-1], output, "--overwrite")
        assert_error(result, 2, f"{output}: the input data/a.jsonl lies inside the output")
    assert contents(folder) == {"data/a.jsonl": jsonl("a")}


def test_an_output_inside_an_input_directory_is_no_input(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_bytes(jsonl("a"))
    for _ in range(2):
        result = packer("pack", "data", *OPTIONS[:-1], "data/out", "--overwrite")
        assert result.exit_code == 0, result.stderr
        assert recover_texts("data/out") == ["a"]


def test_two_runs_do_not_write_to_one_directory(data: Path) -> None:
    with at_work(Path("out")):
        before = contents("out")
        result = packer("pack", "a.jsonl", *OPTIONS)
        assert_error(result, 1, "out: another run is writing there")
        assert contents("out") == before
    result = packer("pack", "a.jsonl", *OPTIONS)  # the lock went with its holder
    assert result.exit_code == 0
    check_directory("out")


@contextmanager
def at_work(output: Path) -> Iterator[None]:
    """As if a run were at work in the directory."""
    output.mkdir()
    with Folder(output) as folder, own_folder(folder, ".packer", output):
        yield


def test_a_lock_that_went_with_its_run_is_no_lock(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, calls = fcntl.flock, []

    def after_the_other_run_ended(file: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            shutil.rmtree("out/.packer")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_other_run_ended)
    assert packer("pack", "a.jsonl", *OPTIONS).exit_code == 0
    assert calls.count(fcntl.LOCK_EX | fcntl.LOCK_NB) == 2  # a second time, in a new folder
    check_directory("out")


def test_a_file_system_without_locks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for quiet in ([], ["-q"]):
        result = packer("pack", "a.jsonl", "-l", 16, "-t", "bytes", "-o", "out", *quiet)
        assert_error(result, 1, "out: cannot be locked: No locks available")
        assert "--no-lock" in result.stderr
        assert not Path("out/manifest.json").exists()
    result = packer("pack", "a.jsonl", *OPTIONS, "--no-lock")
    assert result.exit_code == 0, result.stderr
    check_directory("out")


REPLACING = """
import os
from packer_cli.cli.app import main
rename = os.rename
def moved(name, new, **at):
    if at and name.startswith("shard") and at["src_dir_fd"] != at["dst_dir_fd"]:
        os.rename = rename
        {failure}
    rename(name, new, **at)
os.rename = moved
main()
"""
FAILURES = {
    "SIGTERM": ("os.kill(os.getpid(), 15)", 130, "stopped: interrupted"),
    "I/O error": ("raise OSError(5, 'I/O')", 1, "error: out: cannot write: Input/output"),
}


def test_a_failed_run_leaves_no_directory_of_its_own(data: Path) -> None:
    Path("bad.jsonl").write_bytes(jsonl("good") + b"{")
    assert packer("pack", "bad.jsonl", *OPTIONS).exit_code == 1
    assert not Path("out").exists()
    Path("out").mkdir()
    assert packer("pack", "bad.jsonl", *OPTIONS).exit_code == 1
    assert os.listdir("out") == []


# Programs that are packer, but may write no file of more than 6,000 bytes; whose shards fail when
# they are written, and again when they are closed.
SMALL_FILES = """
import resource, signal
from packer_cli.__main__ import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
main()
"""
FAILING_TWICE = """
import pyarrow
from packer_cli.__main__ import main
class Failing:
    closed = False
    def writable(self):
        return True
    def tell(self):
        return 0
    def write(self, data):
        raise OSError(28, "No space left on device")
    def close(self):
        raise OSError(5, "Input/output error")
pyarrow.OSFile = lambda path, mode: Failing()
main()
"""


@pytest.mark.parametrize(
    ("records", "failing"), [(1, "rejected-00000.jsonl"), (100, ".arrow.part")]
)
@pytest.mark.parametrize("command", [["pack", "-l", "64"], ["tokenize"]], ids=["pack", "tokenize"])
def test_the_first_file_that_cannot_be_written_is_named(
    folder: Path, command: list[str], records: int, failing: str
) -> None:
    """Rejected records are in a buffer until their file is closed."""
    (folder / "a.jsonl").write_bytes(jsonl(*["some words " * 20] * records) + b"{broken\n" * 50)
    command = [*command, "a.jsonl", "-t", "bytes", "-q", "--on-error", "skip", "-o", "out"]
    done = altered(SMALL_FILES, *command)
    assert done.returncode == 1
    error = done.stderr.splitlines()[0]
    assert error.startswith("error: out/.packer/"), done.stderr
    assert error.endswith(f"{failing}: cannot write: File too large"), done.stderr


@pytest.mark.parametrize(
    "command",
    [["pack", "tokens", "--view", "-l", "16"], ["pack", "a.jsonl", "-l", "16", "-t", "bytes"],
     ["tokenize", "a.jsonl", "-t", "bytes"]],
    ids=["view", "pack", "tokenize"],
)  # fmt: skip
def test_the_failure_that_came_first_is_reported(data: Path, command: list[str]) -> None:
    assert packer("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens").exit_code == 0
    done = altered(FAILING_TWICE, *command, "-q", "-o", "out")
    assert done.returncode == 1
    assert "-00000-000.arrow.part: cannot write: No space left on device\n" in done.stderr
