"""`packer pack --update`, `--add` and `--prune`: what is new is packed, what stands is kept."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import faulty, unaltered
from support import (
    assert_error,
    check_directory,
    contents,
    jsonl,
    packer,
    recover_texts,
    shard_of,
)

from packer_cli.inputs.jsonl import JsonlReader
from packer_cli.records import InputFile
from packer_cli.result.layout import INPUT_TIMES

OPTIONS = ["-l", 64, "-t", "bytes", "--unit-bytes", "5k", "-o", "out"]
UPDATE, PRUNE, ADD = ["--update"], ["--update", "--prune"], ["--add"]
_random = random.Random(0)
TEXTS = {
    name: [f"{name} " + "x" * _random.randrange(200) for _ in range(100)] for name in "abcdefgh"
}


def path_of(name: str) -> str:
    """a.jsonl for "a"; other names are those of files."""
    return f"{name}.jsonl" if name in TEXTS else name


def put(name: str, texts: str | None = None) -> Callable[[], object]:
    """Write the documents of that letter, or other texts, to a file."""
    held = jsonl(*TEXTS.get(texts or name, [texts or name]))
    return lambda: Path(path_of(name)).write_bytes(held)


def gone(*names: str) -> Callable[[], object]:
    return lambda: [Path(path_of(name)).unlink() for name in names]


def move(name: str, to: str) -> Callable[[], object]:
    return lambda: Path(path_of(name)).rename(path_of(to))


def both(*changes: Callable[[], object]) -> Callable[[], object]:
    return lambda: [change() for change in changes]


def shard(change: Callable[[Path], object]) -> Callable[[], object]:
    return lambda: change(shard_of(Path("out"), 1))


@pytest.fixture
def result(folder: Path) -> Path:
    """Of a.jsonl and b.jsonl, several units each; c.jsonl and d.jsonl are there."""
    for name in "abcd":
        put(name)()
    assert packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-q").exit_code == 0
    return folder / "out"


def inodes() -> dict[str, tuple[int, int]]:
    statuses = {path.name: path.stat() for path in Path("out").iterdir()}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in statuses.items()}


def run(*arguments: object, options: list[Any] = OPTIONS, again: bool = False) -> str:
    """What it says on stderr; the result is sound, and no shard that stays is touched, unless it
    is packed `again`.
    """
    before = inodes() if Path("out").exists() else {}
    done = packer("pack", *arguments, *options)
    assert done.exit_code == 0, done.stderr
    check_directory("out")
    after = inodes()
    stay = [name for name in before.keys() & after.keys() if name.endswith(".arrow")]
    assert again or [before[name] for name in stay] == [after[name] for name in stay]
    if "out: up to date" in done.stderr:
        assert before == after
    # what is kept without being named may be gone
    against = [] if "--add" in arguments else ["--against-inputs", "--sample", "all"]
    verified = packer("verify", "out", "-q", *against)
    assert verified.exit_code == 0, verified.stdout
    return done.stderr


def refused(*arguments: object, code: int = 2, message: str, tip: str = "") -> None:
    """One error, and nothing of the result is touched."""
    before = contents("out")
    done = packer("pack", *OPTIONS, "-q", *arguments)
    assert_error(done, code, message)
    assert tip in done.stderr.splitlines()[1]
    assert {name: data for name, data in contents("out").items() if ".packer" not in name} == {
        name: data for name, data in before.items() if ".packer" not in name
    }


def packed() -> list[str]:
    return sorted(recover_texts("out"))


def of(*names: str) -> list[str]:
    return sorted(text for name in names for text in TEXTS.get(name, [name]))


def paths() -> list[str]:
    return [one["path"] for one in json.loads(Path("out/manifest.json").read_bytes())["inputs"]]


class Step(NamedTuple):
    """A change of files, a command on inputs, and the documents of the result afterwards."""

    inputs: str
    how: list[str]
    documents: list[str]
    said: str = "out: done in "
    change: Callable[[], object] = lambda: None
    again: bool = False  # units are packed again, and have the shards that they had


SAME = "out: up to date"
SCENARIOS: dict[str, list[Step]] = {
    "nothing is new": [Step("a b", UPDATE, ["a", "b"], SAME)],
    "a new input": [Step("a b c", UPDATE, ["a", "b", "c"])],
    "a changed input": [Step("a b", UPDATE, ["d", "b"], change=put("a", "d"))],
    "inputs go and come back": [
        Step("b", PRUNE, ["b"], "out: drops 100 documents of 1 input: a.jsonl (not named)\n"),
        Step("b", UPDATE, ["b"], SAME),
        Step("b a", UPDATE, ["a", "b"]),
    ],
    "a number that is free": [Step("b", PRUNE, ["b"]), Step("b c", UPDATE, ["b", "c"])],
    "to the name of one that was dropped": [
        Step("b", PRUNE, ["b"]),
        Step("a", UPDATE, ["b"], "1 input has moved: b.jsonl is now a.jsonl", move("b", "a")),
    ],
    "another file of equal size and time": [
        Step("a b", UPDATE, [*(one.replace("xx", "yy") for one in TEXTS["a"]), "b"],
             change=lambda: in_place_of("a.jsonl")),
    ],
    "only touched": [
        Step("a b --checksum", UPDATE, ["a", "b"], SAME, lambda: os.utime("a.jsonl", ns=(0, 1))),
        Step("a b", UPDATE, ["a", "b"], again=True),
        Step("a b", UPDATE, ["a", "b"], SAME, lambda: Path("a.jsonl").chmod(0o600)),
    ],
    "a lost shard": [Step("a b", UPDATE, ["a", "b"], change=shard(Path.unlink), again=True)],
    "lost squared lengths": [
        Step("a b", UPDATE, ["a", "b"], change=gone("out/squared_lengths.npy"), again=True)
    ],
    "the command of every night": [
        Step("c", ADD, ["a", "b", "c"]),
        Step("c", ADD, ["a", "b", "c"], SAME),
        Step("d", ADD, ["a", "b", "c", "d"], change=gone("a", "c")),
        Step("d", ADD, ["a", "b", "c", "d"], SAME),
    ],
    "what is kept is not read": [
        Step("c", ADD, ["a", "b", "c"],
             "keeps 200 documents of 2 inputs: a.jsonl (not named), b.jsonl (no longer exists)",
             both(put("a", "nonsense"), gone("b"))),
    ],
    "what was kept is named again": [
        Step("c", ADD, ["a", "b", "c"]),
        Step("c --checksum", ADD, ["a", "b", "c"], SAME),
        Step("e", ADD, ["a", "b", "c", "e"], change=both(put("c", "d"), put("e"))),
        Step("c", ADD, ["a", "b", "d", "e"]),
    ],
    "content that the result holds": [
        Step("copy.jsonl", ADD, ["a", "b"], "has these inputs already: copy.jsonl (as a.jsonl)",
             put("copy.jsonl", "a")),
        Step("link.jsonl", ADD, ["a", "b"], SAME, lambda: os.symlink("a.jsonl", "link.jsonl")),
        Step("b ./a.jsonl", ADD, ["a", "b"], SAME),
        Step("c copy.jsonl", ADD, ["a", "b", "c"]),
        Step("a copy.jsonl", ADD, ["a", "b", "c", "d"], change=put("a", "d")),
    ],
    "new files with the same content": [
        Step("c copy.jsonl", ADD, ["a", "b", "c"],
             "has these inputs already: copy.jsonl (as c.jsonl)",
             put("copy.jsonl", "c")),
    ],
    "kept without known times": [
        Step("c --checksum", ADD, ["a", "b", "c"], change=lambda: Path(
            "out/input_times.json").write_text("{}")),
        Step("a --checksum", ADD, ["a", "b", "c"], SAME),
    ],
    "equal bytes that are read in another way": [
        Step("a.txt", PRUNE, [jsonl(one).decode().strip() for one in TEXTS["a"]],
             change=move("a", "a.txt")),
    ],
    "an input of another shape": [
        Step("a b q.jsonl", UPDATE, ["a", "b", "Q: 1 A: 2"], change=lambda: Path(
            "q.jsonl").write_text('{"prompt": "Q: 1 ", "completion": "A: 2"}\n')),
        Step("a b q.jsonl", UPDATE, ["a", "b", "Q: 1 A: 2"], SAME),
    ],
}  # fmt: skip


def in_place_of(name: str) -> None:
    """Put another file there, of equal size and time."""
    status, content = os.stat(name), Path(name).read_bytes()
    Path("new").write_bytes(content.replace(b"xx", b"yy"))
    os.utime("new", ns=(0, status.st_mtime_ns))
    os.rename("new", name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_comes_of_updates(result: Path, name: str) -> None:
    for step in SCENARIOS[name]:
        step.change()
        said = run(*map(path_of, step.inputs.split()), *step.how, again=step.again)
        assert step.said in said
        assert packed() == of(*step.documents)


@pytest.mark.parametrize("how", [UPDATE, PRUNE, ADD], ids=["update", "prune", "add"])
def test_inputs_that_have_moved_keep_their_units(result: Path, how: list[str]) -> None:
    before = {name: how for name, how in inodes().items() if name.startswith("shard")}
    Path("new").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        Path("new", name).write_bytes(Path(name).read_bytes())  # a copy: at other times
        Path(name).unlink()
    said = "out: 2 inputs have moved: b.jsonl is now new/b.jsonl, a.jsonl is now new/a.jsonl\n"
    assert said in run("new/b.jsonl", "new/a.jsonl", *how)
    assert packed() == of("a", "b")
    assert inodes().items() >= before.items()
    assert paths() == ["new/a.jsonl", "new/b.jsonl"]
    assert SAME in run("new", *how)


def test_units_are_those_of_the_same_command_from_scratch(result: Path) -> None:
    run("a.jsonl", "b.jsonl", "c.jsonl", *UPDATE)
    names = ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert packer("pack", *names, *OPTIONS[:-1], "fresh").exit_code == 0
    assert contents("fresh") == contents("out")


@pytest.mark.parametrize("renamed", [False, True])
def test_only_what_is_new_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    """The earlier result says what the records of the other inputs are."""
    name, field = ("body", ["--text-field", "body"]) if renamed else ("text", [])
    for path in "abc":
        Path(path_of(path)).write_text(
            "".join(json.dumps({name: text}) + "\n" for text in TEXTS[path])
        )
    assert packer("pack", "a.jsonl", "b.jsonl", *field, *OPTIONS).exit_code == 0
    times = json.loads(Path("out", INPUT_TIMES).read_bytes())
    Path("out", INPUT_TIMES).write_text(json.dumps(times | {"racy": []}))  # they are old by now
    read, fields = list[str](), JsonlReader.fields

    def noted(reader: JsonlReader, file: InputFile, config: Any) -> list[str] | None:
        read.append(file.path)
        return fields(reader, file, config)

    monkeypatch.setattr(JsonlReader, "fields", noted)
    files = ("a.jsonl", "b.jsonl", "c.jsonl")
    assert packer("pack", *files, *field, *OPTIONS, *UPDATE).exit_code == 0
    assert read == ["c.jsonl"]
    assert SAME in run(*files, *field, *UPDATE)
    assert packed() == of("a", "b", "c")


def test_small_inputs_that_share_a_unit(folder: Path) -> None:
    names = [f"{i:02d}.jsonl" for i in range(20)]
    for name in names:
        Path(name).write_bytes(jsonl(*(f"{name} {i} " + "x" * 90 for i in range(5))))
    assert packer("pack", *names, *OPTIONS).exit_code == 0
    Path(names[7]).write_bytes(jsonl("new"))
    Path(names[11]).unlink()
    before = inodes()
    names.pop(11)
    run(*names, *PRUNE)
    kept = [f"{n} {i} " + "x" * 90 for n in names if n != "07.jsonl" for i in range(5)]
    assert packed() == sorted([*kept, "new"])
    after = inodes()
    assert any(before[n] == after[n] for n in before.keys() & after.keys() if "shard" in n)


def test_inputs_that_hang_together_by_their_units(folder: Path) -> None:
    """Every unit reads the end of one input and the beginning of the next: all go, or none."""
    options = ["-l", 64, "-t", "bytes", "--unit-bytes", 2500, "-o", "out"]

    def write(name: str, texts: str) -> None:
        table = pa.table({"text": TEXTS[texts][:30]})
        pq.write_table(table, f"{name}.parquet", row_group_size=10, compression="none")

    names = [f"{name}.parquet" for name in "abcdef"]
    for name in "abcdef":
        write(name, name)
    assert packer("pack", *names, *options).exit_code == 0
    units = json.loads(Path("out/manifest.json").read_bytes())["units"]
    assert sum(len({part[0] for part in unit["slices"]}) > 1 for unit in units) > 1
    for changed, documents in (("f", "abcdeg"), ("a", "hbcdeg")):
        write(changed, documents[ord(changed) - ord("a")])
        run(*names, *UPDATE, options=options, again=True)
        assert packed() == sorted(text for one in documents for text in TEXTS[one][:30])


def test_rejected_records_of_units_that_stand_are_kept(folder: Path) -> None:
    for name in "abc":
        lines = jsonl(*TEXTS[name]) + b"{\n" + jsonl(*TEXTS["d"]) + b"{broken\n"
        Path(path_of(name)).write_bytes(lines)
    arguments = ["a.jsonl", "b.jsonl", "c.jsonl", "--on-error", "skip"]
    run(*arguments)
    Path("b.jsonl").write_bytes(jsonl(*TEXTS["b"]) + b"[]\n")
    run(*arguments, *UPDATE)
    Path("c.jsonl").rename("moved.jsonl")  # whose rejected records name it
    arguments[2] = "moved.jsonl"
    run(*arguments, *UPDATE)
    assert packer("pack", *arguments, *OPTIONS[:-1], "fresh").exit_code == 0
    lines = [Path(out, "rejected.jsonl").read_text().splitlines() for out in ("out", "fresh")]
    assert sorted(lines[0]) == sorted(lines[1])
    assert len(lines[0]) == 5


def test_how_bad_records_are_dealt_with_may_differ_from_night_to_night(folder: Path) -> None:
    for name in "ab":
        Path(path_of(name)).write_bytes(jsonl(*TEXTS[name]) + b"{\n" * 3)
    skipping = ["--on-error", "skip"]
    run("a.jsonl", *skipping)
    # the limit is for what this run packs
    few = packer("pack", "b.jsonl", *skipping, "--max-errors", 2, *OPTIONS, "-q", *ADD)
    assert_error(few, 1, "records are bad", "--max-errors is 2")
    run("b.jsonl", *skipping, "--max-errors", 3, *ADD)
    assert len(Path("out/rejected.jsonl").read_bytes().splitlines()) == 6
    put("c")()
    assert "out: 6 bad records skipped by an earlier run\n" in run("c.jsonl", *ADD)
    assert json.loads(Path("out/manifest.json").read_bytes())["rejected_records"] == 6
    Path("d.jsonl").write_bytes(b"{\n")
    before = Path("out/manifest.json").read_bytes()
    done = packer("pack", "d.jsonl", *OPTIONS, "-q", *ADD)
    assert_error(done, 1, "d.jsonl, line 1")
    assert Path("out/manifest.json").read_bytes() == before


def test_a_copy_is_what_it_was(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other inodes and times of change of status, perhaps another device: the contents tell."""
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    subprocess.run(["cp", "-a", "a.jsonl", "b.jsonl", "out", copy], check=True)
    monkeypatch.chdir(copy)
    assert SAME in run("a.jsonl", "b.jsonl", *UPDATE)


def test_what_was_written_just_before_is_compared_by_contents(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that ticks rarely: nothing but the contents differ afterwards."""
    stat = os.stat
    still = ("st_mtime_ns", "st_ctime_ns", "st_ino")
    first: dict[str, os.stat_result] = {}

    class Ticking:
        def __init__(self, status: os.stat_result, then: os.stat_result) -> None:
            self._status, self._then = status, then

        def __getattr__(self, name: str) -> Any:
            return getattr(self._then if name in still else self._status, name)

    def ticking(path: Any, *more: Any, **how: Any) -> Any:
        status = stat(path, *more, **how)
        if str(path) != "a.jsonl":
            return status
        return Ticking(status, first.setdefault("a.jsonl", status))

    put("a.jsonl", "first")()
    monkeypatch.setattr("packer_cli.storage.os.stat", ticking)
    assert packer("pack", "a.jsonl", *OPTIONS).exit_code == 0
    put("a.jsonl", "later")()
    assert packer("pack", "a.jsonl", *OPTIONS, *UPDATE).exit_code == 0
    assert packed() == ["later"]


@pytest.mark.parametrize(
    "times",
    [None, "", "[]", '{"mtime_ns": 5}', '{"mtime_ns": []}', '{"mtime_ns": {}}', "[" * 100_000],
)
@pytest.mark.parametrize("how", [[], UPDATE])
def test_without_times_contents_are_compared(
    result: Path, times: str | None, how: list[str]
) -> None:
    path = Path("out/input_times.json")
    before = path.read_bytes()
    path.unlink()
    if times is not None:
        path.write_text(times)
    command = ["pack", "a.jsonl", "b.jsonl", *OPTIONS, *how]
    assert SAME in packer(*command).stderr
    if times is None:
        assert json.loads(path.read_text())["inputs"] == json.loads(before)["inputs"]
        in_place_of("a.jsonl")
        done = packer(*command)
        assert done.exit_code == (0 if how else 2), done.stderr
        assert how or "a.jsonl has changed" in done.stderr
        assert "up to date" not in done.stderr


@pytest.mark.parametrize("name", ["dataset_info.json", "state.json", "squared_lengths.npy"])
def test_a_lost_side_file_is_written_again(result: Path, name: str) -> None:
    before = contents("out")
    Path("out", name).unlink()
    refused("a.jsonl", "b.jsonl", message=f"differs: {name} is missing or damaged")
    assert SAME not in run("a.jsonl", "b.jsonl", *UPDATE)
    assert contents("out") == before


def damage(path: Path) -> None:
    """Other content of the same size."""
    content = path.read_bytes()
    path.write_bytes(content[:-100] + bytes(100))


@pytest.mark.parametrize("how", ["--update", "--overwrite"])
def test_what_an_unfinished_update_would_keep_is_looked_at_again(result: Path, how: str) -> None:
    Path("c.jsonl").write_bytes(jsonl(*TEXTS["c"]) + b"{\n")
    command = ["pack", "a.jsonl", "b.jsonl", "c.jsonl", *OPTIONS, "-q", "--on-error", "skip"]
    assert_error(packer(*command, "--max-errors", 0, *UPDATE), 1, "records are bad")
    one = shard_of(result, 1)
    content = one.read_bytes()
    damage(one)
    assert_error(packer(*command, how), 2, one.name)
    one.unlink()
    assert packer(*command, how).exit_code == 0
    assert one.read_bytes() == content
    assert packer("verify", "out", "-q", "--against-inputs").exit_code == 0


AB, LINK = ("a.jsonl", "b.jsonl"), lambda: os.symlink("a.jsonl", "link.jsonl")
REFUSED: dict[str, tuple[tuple[object, ...], Callable[[], object], int, str, str]] = {
    "other options": (
        (*AB, *UPDATE, "-l", 128, "--overlong", "drop"), lambda: None, 2,
        "other options: --max-length was 64, is now 128; --overlong was split, is now drop",
        "--overwrite",
    ),
    "an update that names one new file": (
        ("c.jsonl", *UPDATE), lambda: None, 2,
        "drop 200 documents of 2 inputs: a.jsonl (not named), b.jsonl (not named)", "--add",
    ),
    "a file that is gone": (
        ("b.jsonl", *UPDATE), gone("a"), 2, "1 input: a.jsonl (no longer exists)", "--prune",
    ),
    "one file by two names": (
        ("link.jsonl", *ADD), both(LINK, put("a", "changed")), 2,
        "link.jsonl: is a.jsonl in the result, by another name", "use the name",
    ),
    "the same, updated": (
        ("link.jsonl", *UPDATE), both(LINK, put("a", "changed")), 2,
        "link.jsonl: is a.jsonl in the result", "use the name",
    ),
    "a damaged shard": (AB, shard(damage), 2, "is missing or damaged", ""),
    "a damaged shard, updated": ((*AB, *UPDATE), shard(damage), 2, "shard-00001", ""),
    "damaged records": (
        (*AB, "c.jsonl", *UPDATE), lambda: Path("out/units.jsonl").write_bytes(
            b"".join(Path("out/units.jsonl").read_bytes().splitlines(True)[:-1])),
        1, "out/units.jsonl: damaged: not what the manifest says", "--overwrite",
    ),
    "add and prune": (("c.jsonl", *ADD, "--prune"), lambda: None, 2, "--add and --prune: ", ""),
    "add and overwrite": (("c.jsonl", *ADD, "--overwrite"), lambda: None, 2, "--add and --ov", ""),
    "prune alone": (("c.jsonl", "--prune"), lambda: None, 2, "--prune needs --update", ""),
    "checksum alone": (("c.jsonl", "--checksum"), lambda: None, 2, "--checksum needs --update", ""),
    "update and overwrite": (
        (*AB, *UPDATE, "--overwrite"), lambda: None, 2, "--update and --overwrite", "",
    ),
    "add and ranks": (
        ("c.jsonl", *ADD, "--rank", 0, "--world-size", 2), lambda: None, 2, "--rank: does not", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(result: Path, name: str) -> None:
    arguments, change, code, message, tip = REFUSED[name]
    change()
    refused(*arguments, code=code, message=message, tip=tip)


def test_a_url_cannot_be_added_to(result: Path) -> None:
    done = packer("pack", "c.jsonl", *OPTIONS[:-1], "memory://out", *ADD)
    assert_error(done, 2, "--add: memory://out: a URL")


def test_only_the_first_of_many_inputs_are_named(folder: Path) -> None:
    names = [f"{i:02}.jsonl" for i in range(12)]
    for name in names:
        put(name)()
    assert packer("pack", *names, *OPTIONS).exit_code == 0
    message = (
        "drop 11 documents of 11 inputs: 00.jsonl (not named), 01.jsonl (not named), "
        "02.jsonl (not named) and 8 more"
    )
    refused(names[-1], *UPDATE, message=message, tip="--add")


def test_a_result_of_another_version_is_refused(
    result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packer_cli.__version__", "9.9")
    refused(*AB, *UPDATE, message="out: was packed by packer ", tip="--overwrite")
    refused(*AB, message="holds a finished result that differs: packer was ", tip="--overwrite")


def test_the_plain_command_after_an_update_has_nothing_to_do(result: Path) -> None:
    put("aa.jsonl", "c")()
    names = ["a.jsonl", "aa.jsonl", "b.jsonl"]
    run(*names, *UPDATE)
    tip = "tip: nothing need be done to have their documents"
    refused(*names, message="out: holds a finished result of these inputs", tip=tip)


def test_another_tokenizer_without_files_is_refused(folder: Path) -> None:
    """Without one, padding is id 0; the built-in one pads with an id of its own."""
    for name in AB:
        Path(name).write_text('{"input_ids": [1, 2, 3]}\n' * 50)
    options = ["-l", 64, "-q", "-o", "out"]
    assert packer("pack", "a.jsonl", *options).exit_code == 0
    done = packer("pack", *AB, *options, *UPDATE, "-t", "bytes")
    assert_error(done, 2, "the tokenizer was not given, is now bytes")
    run(*AB, *UPDATE, options=options)


KILLED = "when_named('unit-', 1, kill)"


def test_an_interrupted_addition_goes_on(result: Path) -> None:
    Path("a.jsonl").unlink()
    command = ["pack", "c.jsonl", *map(str, OPTIONS), *ADD]
    assert faulty(KILLED, *command).returncode == -9
    assert packed() == of("a", "b")
    # nobody would see that the third night was never added
    message = "out: holds an unfinished run with other inputs: c.jsonl"
    refused("d.jsonl", *ADD, message=message, tip="remove out/.packer")
    refused("b.jsonl", *ADD, message=message, tip="first run its command again")
    again = unaltered(*command)
    assert again.returncode == 0, again.stderr
    assert "out: continuing: " in again.stderr
    assert packed() == of("a", "b", "c")
    check_directory("out")


def test_an_interrupted_first_night_is_not_forgotten(folder: Path) -> None:
    for name in "ab":
        put(name)()
    assert faulty(KILLED, "pack", "a.jsonl", *map(str, OPTIONS), *ADD).returncode == -9
    message = "out: holds an unfinished run with other inputs: a.jsonl"
    refused("b.jsonl", *ADD, message=message, tip="first run its command again")
    for name in AB:
        run(name, *ADD)
    assert packed() == of("a", "b")


@pytest.mark.parametrize("checksum", [[], ["--checksum"]])
@pytest.mark.parametrize("shard_lost", [False, True])
def test_kept_inputs_of_a_unit_that_is_packed_anew(
    folder: Path, checksum: list[str], shard_lost: bool
) -> None:
    """They are read again, or named where they cannot be."""
    names = [f"{i}.jsonl" for i in range(4)]
    for i, name in enumerate(names):
        put(name, f"text {i}")()
    assert packer("pack", *names, *OPTIONS, "--unit-bytes", "16M").exit_code == 0
    options = [*OPTIONS, "--unit-bytes", "16M"]
    put(names[1], "changed")()
    run(names[1], *ADD, options=options)
    assert packed() == ["changed", "text 0", "text 2", "text 3"]
    if shard_lost:
        next(Path("out").glob("shard-*")).unlink()
    else:
        put(names[1], "changed again")()
    Path(names[2]).unlink()
    arguments = [names[1], *ADD, *checksum, "--unit-bytes", "16M"]
    message = f"{names[2]}: is not named, no longer exists, and would have to be packed again"
    refused(*arguments, message=message, tip="restore the file")
    put(names[2], "quite another")()
    message = f"{names[2]}: is not named, has changed, and would have to be packed again"
    refused(*arguments, message=message, tip="to pack it as it is now, name it")
    run(names[1], names[2], *ADD, *checksum, options=options)
    changed = "changed" if shard_lost else "changed again"
    assert packed() == sorted([changed, "quite another", "text 0", "text 3"])


def test_kept_inputs_without_known_times_count_as_changed(folder: Path) -> None:
    for name in "abc":
        put(name)()
    options = [*OPTIONS, "--unit-bytes", "16M"]
    run(*AB, options=options)
    Path("out/input_times.json").write_text("{}")
    run("c.jsonl", "--checksum", *ADD, options=options)
    message = "b.jsonl: is not named, has changed, and would have to be packed again"
    refused("a.jsonl", *ADD, "--unit-bytes", "16M", message=message, tip="--checksum")
    assert SAME in run("a.jsonl", *ADD, "--checksum", options=options)
    run(*AB, *ADD, options=options, again=True)
    assert packed() == of("a", "b", "c")


def test_content_that_is_named_twice_is_warned_of(result: Path) -> None:
    put("copy.jsonl", "a")()
    for how in (["--overwrite"], []):
        done = packer("pack", "a.jsonl", "copy.jsonl", *OPTIONS, "-q", *how)
        assert done.exit_code == 0
        assert done.stderr == (
            "packer: warning: out: 100 documents are there more than once: copy.jsonl has the "
            "content of a.jsonl; name one of such files\n"
        )


def test_stdin_does_not_replace_what_came_by_stdin(folder: Path) -> None:
    options = [*map(str, OPTIONS), "-q"]
    first = unaltered("pack", "-", *options, "--add", stdin=jsonl("one", "two"))
    assert first.returncode == 0, first.stderr
    for how in ("--add", "--update"):
        again = unaltered("pack", "-", *options, how, stdin=jsonl("three"))
        assert again.returncode == 2
        assert "-: stdin would replace the documents that came from stdin before" in again.stderr
    put("a.jsonl", "three")()
    run("a.jsonl", *ADD)
    assert packed() == ["one", "three", "two"]
    last = unaltered("pack", "-", *options, "--update", "--prune", stdin=jsonl("four"))
    assert last.returncode == 0, last.stderr
    assert packed() == ["four"]


def test_parquet_that_is_kept_needs_no_file(result: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS["d"]}), "d.parquet", row_group_size=10)
    run("d.parquet", *ADD)
    Path("d.parquet").unlink()
    run("c.jsonl", *ADD)
    assert packed() == of("a", "b", "c", "d")
