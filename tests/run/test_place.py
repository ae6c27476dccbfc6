"""The output: what may be written to, what may be removed, and what a failure leaves. Nothing that
packer did not write is ever touched.

tests/run/test_random_trees.py tries random trees of such files, tests/run/test_kills.py kills.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from altered import altered
from spoiling import edit
from support import (
    assert_error,
    check_directory,
    contents,
    jsonl,
    pack,
    packer,
    recover_texts,
    shard_of,
    succeeds,
    work_folder,
)

from packer_cli.cli.pack import default_output
from packer_cli.options.run_options import RunOptions
from packer_cli.result.layout import ID
from packer_cli.run.place import own_folder

pytestmark = pytest.mark.usefixtures("folder")
OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
IN_THE_WAY = "holds files that packer did not make, or that have changed: "


@pytest.fixture
def data(folder: Path) -> Path:
    Path("a.jsonl").write_bytes(jsonl("first", "second"))
    Path("b.jsonl").write_bytes(jsonl("third"))
    Path("bad.jsonl").write_bytes(jsonl("good", "x" * 2000, "y" * 2000) + b"{")
    return folder


def touched() -> dict[str, tuple[int, int]]:
    """When each file of the result was written, and as which."""
    return {one.name: (one.stat().st_ino, one.stat().st_mtime_ns) for one in Path("out").iterdir()}


def test_the_default_output_is_named_after_the_input(folder: Path) -> None:
    Path("data").mkdir()
    inputs = {
        "data/a.jsonl": "a-packed-16", "data/b.jsonl.gz": "b-packed-16",
        "naïve[red].jsonl": "naïvered-packed-16", "data/c.tar": "c.tar-packed-16",
        "data": "data-packed-16", "data/*.jsonl": "data-packed-16",
        "-": "stdin-packed-16", "s3://bucket/train-*.parquet": "train--packed-16",
        "https://host/a/data.jsonl.zst?token=a/b.c": "data-packed-16",
    }  # fmt: skip
    assert {name: str(default_output([name], "packed-16")) for name in inputs} == inputs
    Path("data/a.jsonl").write_bytes(jsonl("a"))
    succeeds("pack", "data/a.jsonl", "-l", 16, "-q")
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
    pack("b.jsonl", "-l", 16, "--overwrite")
    assert recover_texts("out") == ["third"]
    assert sorted(contents("out")) == [
        "dataset_info.json", "manifest.json", "notes.txt",
        shard_of().name, "squared_lengths.npy", "state.json", "units.jsonl",
    ]  # fmt: skip


# Files of others


def put(name: str, content: bytes = b"mine") -> Callable[[], object]:
    def write() -> None:
        path = Path("out", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return write


def linked(name: str, target: str) -> Callable[[], object]:
    def link() -> None:
        Path("out", name).parent.mkdir(parents=True, exist_ok=True)
        Path("out", name).symlink_to(Path(target).absolute())

    return link


def unfinished() -> None:
    """A run that has packed some of its units, and a manifest of somebody else beside it."""
    assert packer("pack", "bad.jsonl", *OPTIONS, "--unit-bytes", 500, "--workers", 1).exit_code == 1
    assert any(work_folder().glob("unit-*"))
    put("manifest.json")()


def add_to_shard() -> None:
    with shard_of().open("ab") as file:
        file.write(b"mine")


SKIP = "bad.jsonl --on-error skip --unit-bytes 500 --workers 1"
# whether there is a result before, what is put there, the command, and the error or ""
FOREIGN: dict[str, tuple[bool, Callable[[], object], str, str]] = {
    "no name of this run": (True, put("tokenizer.json"), "b.jsonl --overwrite", ""),
    "nor when it adds": (True, put("special_tokens_map.json"), "a.jsonl b.jsonl --add", ""),
    "a shard of no result": (True, put("shard-99999-999.arrow"), "b.jsonl --overwrite", ""),
    "a shard with another size": (True, add_to_shard, "b.jsonl --overwrite", ""),
    "a name of this run": (
        True, put("rejected.jsonl"), f"{SKIP} --overwrite", f"{IN_THE_WAY}rejected.jsonl",
    ),
    "a folder of that name": (
        True, put("rejected.jsonl/mine"), f"{SKIP} --overwrite", f"{IN_THE_WAY}rejected.jsonl",
    ),
    "a link of that name": (
        True, linked("rejected.jsonl", "a.jsonl"), f"{SKIP} --overwrite", "rejected.jsonl",
    ),
    "the manifest of an incomplete result": (
        True, put("manifest.incomplete.json"), "b.jsonl --overwrite --max-loss 10%",
        f"{IN_THE_WAY}manifest.incomplete.json",
    ),
    "a side file with another size": (
        True, put("units.jsonl"), "b.jsonl --overwrite", f"{IN_THE_WAY}units.jsonl",
    ),
    "a manifest that was edited": (
        True, lambda: edit(lambda manifest: manifest.update(rows=99), signed=False),
        "b.jsonl --overwrite", "out/manifest.json: was edited, so it does not say which files",
    ),
    "a manifest beside a run": (False, unfinished, SKIP, f"{IN_THE_WAY}manifest.json"),
    "a manifest beside a run that is replaced": (
        False, unfinished, f"{SKIP} --overwrite", f"{IN_THE_WAY}manifest.json",
    ),
    "a folder of others": (False, put("notes"), "a.jsonl", "is not empty, and not a result of"),
    "another .packer": (True, put(".packer/notes"), "b.jsonl --overwrite", "changed: notes"),
    "a .packer that is a file": (True, put(".packer"), "b.jsonl --overwrite", "not a directory"),
    "a .packer that is a link": (
        True, linked(".packer", "."), "b.jsonl --overwrite", "is not a directory",
    ),
    "a file in packer's folder": (
        True, put(f".packer/{ID}/notes"), "b.jsonl --overwrite", f"{IN_THE_WAY}notes",
    ),
    "a link in packer's folder": (
        True, linked(f".packer/{ID}/run.json", "a.jsonl"), "b.jsonl --overwrite",
        f"{IN_THE_WAY}run.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others(data: Path, name: str) -> None:
    """What is in the way is named before anything is changed, and all else stays as it is."""
    has_result, make, command, error = FOREIGN[name]
    if has_result:
        pack("a.jsonl", "-l", 16)
    before = contents("out") if has_result else {}
    make()
    put_there, names = contents("out"), {*os.listdir("out")}
    mine = {path: put_there[path] for path in put_there if put_there[path] != before.get(path)}
    done = packer("pack", *command.split(), *OPTIONS)
    if error:
        assert_error(done, 2, error)
        assert contents("out").items() >= put_there.items()
        assert {*os.listdir("out")} == names
    else:
        assert done.exit_code == 0, done.stderr
        assert contents("out").items() >= mine.items()
    assert Path("a.jsonl").read_bytes() == jsonl("first", "second")


@pytest.mark.parametrize("name", ["../victim.txt", "/etc/victim", "a/b", "..", "", "notes.txt"])
def test_a_crafted_journal_touches_nothing(data: Path, name: str) -> None:
    work = Path("out/.packer", ID)
    work.mkdir(parents=True)
    for path in ("victim.txt", "out/notes.txt"):
        Path(path).write_bytes(b"mine")
    (work / "manifest.json").write_bytes(b"")
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    journal = {"new": {name: 6, "manifest.json": 0}, "old": {name: 4}, "sha256": digest}
    (work / "replacing.json").write_bytes(json.dumps(journal).encode())
    for rank in ([], ["--rank", "0", "--world-size", "1"]):
        packer("pack", "a.jsonl", *OPTIONS, *rank)
        assert [Path(one).read_bytes() for one in ("victim.txt", "out/notes.txt")] == [b"mine"] * 2
    assert {path.name for path in Path().iterdir()} == {
        "a.jsonl", "b.jsonl", "bad.jsonl", "out", "victim.txt",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["../../x.arrow", "/x.arrow", "a/../../x.arrow"])
def test_a_dataset_names_only_its_own_files(data: Path, name: str) -> None:
    Path("set").mkdir()
    Path("set/dataset_info.json").write_text("{}")
    Path("set/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert_error(packer("pack", "set", *OPTIONS), 1, "set/state.json: does not say what the")


def test_outputs_that_cannot_be(data: Path) -> None:
    Path("out").write_bytes(b"mine")
    result = packer("pack", "a.jsonl", *OPTIONS, "--overwrite")
    assert_error(result, 2, "out: exists and is not a directory")
    assert Path("out").read_bytes() == b"mine"
    result = packer("pack", "a.jsonl", *OPTIONS[:-1], "a.jsonl/out")
    assert_error(result, 1, "a.jsonl: cannot write: Not a directory")


def test_inputs_and_outputs_inside_each_other(folder: Path) -> None:
    Path("data").mkdir()
    Path("data/a.jsonl").write_bytes(jsonl("a"))
    for output in ("data", "."):
        for name in ("data", "data/a.jsonl"):
            result = packer("pack", name, *OPTIONS[:-1], output, "--overwrite")
            assert_error(result, 2, f"{output}: the input data/a.jsonl lies inside the output")
    assert contents(folder) == {"data/a.jsonl": jsonl("a")}
    for _ in range(2):  # the output is no input
        succeeds("pack", "data", *OPTIONS[:-1], "data/out", "--overwrite")
        assert recover_texts("data/out") == ["a"]


# Locks


COMMANDS = {  # and where packer's folder is while each runs
    "pack a.jsonl -l 16 -t bytes -q -o out": "out/.packer",
    "export rows --to trl -q -o out": "out.packer-partial",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_another_run_and_a_file_system_without_locks(
    data: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    succeeds("pack", "a.jsonl", "-l", 16, "-t", "bytes", "-q", "-o", "rows")
    place, arguments = Path(COMMANDS[command]), command.split()
    place.parent.mkdir(exist_ok=True)
    with own_folder(place.parent, place.name, Path("out"), RunOptions()):
        before = contents(".")
        assert_error(packer(*arguments), 1, "out: another run is writing there")
        assert contents(".") == before
    succeeds(*arguments)
    assert not place.exists()
    shutil.rmtree("out")

    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    result = packer(*arguments)
    assert_error(result, 1, "out: cannot be locked: No locks available")
    assert "--no-lock" in result.stderr
    assert not [path for path in Path("out").glob("*") if path.name != ".packer"]
    succeeds(*arguments, "--no-lock")


# What a failure leaves


def test_a_failed_run_leaves_no_directory_of_its_own(data: Path) -> None:
    command = ["pack", "bad.jsonl", *OPTIONS]
    assert packer(*command).exit_code == 1
    assert not Path("out").exists()
    Path("out").mkdir()
    assert packer(*command).exit_code == 1
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
        Path("a.jsonl").write_bytes(content)
        done = altered(SMALL_FILES, *command.split(), *skip, "out")
        assert done.returncode == 1
        error = done.stderr.splitlines()[0]
        assert error.startswith("error: out/.packer/"), done.stderr
        assert error.endswith(f"{failing}: cannot write: File too large"), done.stderr


def test_new_parents_are_brought_to_the_disk(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, synced = os.fsync, set[int]()

    def record(descriptor: Any) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    succeeds("pack", "a.jsonl", *OPTIONS[:-1], "x/y/out")
    assert {Path(name).stat().st_ino for name in (".", "x", "x/y", "x/y/out")} <= synced


# Results that lose too much

LOSING = ("-t", "bytes", "-l", 16, "-o", "out", "-q", "--overlong", "truncate", "--no-eos")


@pytest.fixture
def long(folder: Path) -> tuple[object, ...]:
    """The command for 40 tokens, of which truncating to 16 loses 4."""
    Path("a.jsonl").write_bytes(jsonl("a" * 20, "b" * 10, "c" * 10))
    return ("pack", "a.jsonl", *LOSING)


def test_a_run_that_loses_too_much_is_marked_incomplete(long: tuple[object, ...]) -> None:
    result = packer(*long, "--max-loss", "0.09")
    assert result.exit_code == 1
    error, tip = result.stderr.splitlines()
    assert error.startswith("error: out: 0.1000 of the tokens were lost, 4 truncated and 0 dropped")
    assert tip.startswith("tip: the output is kept, marked incomplete")
    assert "truncated" in result.stdout
    assert not Path("out/manifest.json").exists()
    assert json.loads(Path("out/manifest.incomplete.json").read_bytes())["truncated_tokens"] == 4
    assert_error(packer("show", "out"), 1, "out: is marked incomplete: 0.1000 of the tokens")
    stats = succeeds("stats", "out")
    assert "out is marked incomplete: 0.1000" in stats.stderr
    assert_error(packer(*long), 2, "out: holds a finished result")
    for much in ("0.1", "10%"):
        succeeds(*long, "--overwrite", "--max-loss", much)
        assert check_directory("out")["truncated_tokens"] == 4
    assert not Path("out/manifest.incomplete.json").exists()


def test_add_looks_at_what_is_lost_when_nothing_is_new(long: tuple[object, ...]) -> None:
    succeeds(*long)
    before = touched()
    assert_error(packer(*long, "--add", "--max-loss", "0.09"), 1, "0.1000 of the tokens were lost")
    succeeds(*long, "--add", "--max-loss", "0.1")
    assert check_directory("out")["config"]["max_loss"] == 0.1
    assert touched()[shard_of().name] == before[shard_of().name]
    before = touched()
    succeeds(*long, "--add", "--max-loss", "0.1")
    assert touched() == before


@pytest.mark.parametrize("how", ["--overwrite", "--add"])
def test_an_incomplete_result_replaces_no_good_one(data: Path, how: str) -> None:
    losing = ("--overlong", "drop", "--max-loss", "0.1")
    pack("a.jsonl", "-l", 16, *losing)
    before = contents("out")
    Path("long.jsonl").write_bytes(jsonl("x" * 100))
    command = ["pack", "a.jsonl", "long.jsonl", *OPTIONS, how]
    result = packer(*command, *losing)
    assert_error(result, 1, "of the tokens were lost, 0 truncated and 101 dropped")
    assert "the earlier result stays" in result.stderr
    assert {n: c for n, c in contents("out").items() if ".packer" not in n} == before
    succeeds(*command, *losing[:2], "--max-loss", "1")
    assert json.loads(Path("out/manifest.json").read_bytes())["dropped_documents"] == 1
