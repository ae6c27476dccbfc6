"""`packer pack --update`, `--add` and `--prune`: what is new is packed, what stands is kept."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import faulty, unaltered
from faults import in_place_of
from support import (
    assert_error,
    check_directory,
    contents,
    jsonl,
    move_elsewhere,
    packer,
    recover_texts,
    shard_of,
)

from packer_cli.result.layout import INPUT_TIMES

OPTIONS = ["-l", 64, "-t", "bytes", "--unit-bytes", "5k", "-o", "out"]
ONE_UNIT = "--unit-bytes 16M"
_random = random.Random(0)
TEXTS = {
    name: [f"{name} " + "x" * _random.randrange(200) for _ in range(100)] for name in "abcdefgh"
}
Change = Callable[[], object]


def path_of(name: str) -> str:
    """a.jsonl for "a"; other names are those of files, or options."""
    return f"{name}.jsonl" if name in TEXTS else name


def put(name: str, *texts: str, more: bytes = b"") -> Change:
    """Write the documents of that letter, or of other letters, or other texts, to a file."""
    held = [text for one in texts or [name] for text in TEXTS.get(one, [one])]
    return lambda: Path(path_of(name)).write_bytes(jsonl(*held) + more)


def parquet(name: str, letter: str) -> Change:
    table = pa.table({"text": TEXTS[letter][:30]})
    return lambda: pq.write_table(table, name, row_group_size=10, compression="none")


def write(name: str, content: str) -> Change:
    return lambda: Path(name).write_text(content)


def gone(*names: str) -> Change:
    return lambda: [Path(path_of(name)).unlink() for name in names]


def move(name: str, to: str) -> Change:
    return lambda: Path(path_of(name)).rename(path_of(to))


def link(name: str) -> Change:
    return lambda: os.symlink("a.jsonl", name)


def all_of(*changes: Change) -> Change:
    return lambda: [change() for change in changes]


def shard(change: Callable[[Path], object]) -> Change:
    return lambda: change(shard_of(Path("out"), 1))


def damage(path: Path) -> None:
    """Other content of the same size."""
    content = path.read_bytes()
    path.write_bytes(content[:-100] + bytes(100))


def lose_a_record() -> None:
    records = Path("out/units.jsonl")
    records.write_bytes(b"".join(records.read_bytes().splitlines(True)[:-1]))


def interrupt(*command: str) -> Change:
    """Kill a run when its first unit is packed."""
    given = ["pack", *command, *OPTIONS]
    return lambda: faulty("when_named('unit-', 1, kill)", *given).returncode == -signal.SIGKILL


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


def run(*arguments: object, again: bool = False) -> str:
    """What it says on stderr; the result is sound, and no shard that stays is touched, unless it
    is packed `again`.
    """
    before = inodes() if Path("out").exists() else {}
    done = packer("pack", *OPTIONS, *arguments)
    assert done.exit_code == 0, done.stderr
    check_directory("out")
    after = inodes()
    stay = [name for name in before.keys() & after.keys() if name.endswith(".arrow")]
    assert again or [before[name] for name in stay] == [after[name] for name in stay]
    if SAME in done.stderr:
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


class Step(NamedTuple):
    """A change of files, a command on inputs, and the documents of the result afterwards."""

    command: str
    documents: list[str]
    said: str = "out: done in "
    change: Change = lambda: None
    again: bool = False  # units are packed again, and have the shards that they had


class Refused(NamedTuple):
    """A command that is refused; what is done before it, and what it says."""

    command: str
    message: str
    tip: str = ""
    change: Change = lambda: None
    code: int = 2


SAME = "out: up to date"
UNNAMED = "would have to be packed again"
OTHER_RUN = "out: holds an unfinished run with other inputs: "
BAD = "{\n"
SCENARIOS: dict[str, list[Step | Refused]] = {
    "nothing is new": [Step("a b --update", ["a", "b"], SAME)],
    "a changed input": [Step("a b --update", ["d", "b"], change=put("a", "d"))],
    "inputs go and come back": [
        Refused("b --update", "1 input: a.jsonl (no longer exists)", "--prune", gone("a")),
        Step("b --update --prune", ["b"], "1 input: a.jsonl (not named)\n", put("a")),
        Step("b --update", ["b"], SAME),
        Step("b a --update", ["a", "b"]),
    ],
    "a number that is free": [
        Step("b --update --prune", ["b"], "out: drops 100 documents of 1 input: "),
        Step("b c --update", ["b", "c"]),
    ],
    "to the name of one that was dropped": [
        Step("b --update --prune", ["b"]),
        Step("a --update", ["b"], "1 input has moved: b.jsonl is now a.jsonl", move("b", "a")),
    ],
    "another file of equal size and time": [
        Step("a b --update", [*(one.replace("xx", "yy") for one in TEXTS["a"]), "b"],
             change=lambda: in_place_of("a.jsonl")),
    ],
    "only touched": [
        Step("a b --checksum --update", ["a", "b"], SAME, lambda: os.utime("a.jsonl", ns=(0, 1))),
        Step("a b --update", ["a", "b"], again=True),
        Step("a b --update", ["a", "b"], SAME, lambda: Path("a.jsonl").chmod(0o600)),
    ],
    "copied elsewhere": [
        Step("a b --update", ["a", "b"], SAME,
             lambda: move_elsewhere("a.jsonl", "b.jsonl", "out")),
    ],
    "a lost shard": [
        Refused("a b", "differs: shard-00001", "--update", shard(Path.unlink)),
        Step("a b --update", ["a", "b"], again=True),
    ],
    "a damaged shard": [
        Refused("a b", "is missing or damaged", change=shard(damage)),
        Refused("a b --update", "shard-00001"),
    ],
    **{f"a lost {name}": [
        Refused("a b", f"differs: {name} is missing or damaged", change=gone(f"out/{name}")),
        Step("a b --update", ["a", "b"], again=True),
    ] for name in ("dataset_info.json", "state.json", "squared_lengths.npy")},
    "damaged records": [
        Refused("a b c --update", "out/units.jsonl: its sha256 is ",
                "--overwrite", lose_a_record, code=1),
    ],
    "the command of every night": [
        Step("c --add", ["a", "b", "c"]),
        Step("c --add", ["a", "b", "c"], SAME),
        Step("d --add", ["a", "b", "c", "d"], change=gone("a", "c")),
        Step("d --add", ["a", "b", "c", "d"], SAME),
    ],
    "what is kept is not read": [
        Step("c --add", ["a", "b", "c"],
             "keeps 200 documents of 2 inputs: a.jsonl (not named), b.jsonl (no longer exists)",
             all_of(put("a", "nonsense"), gone("b"))),
    ],
    "what was kept is named again": [
        Step("c --add", ["a", "b", "c"]),
        Step("c --checksum --add", ["a", "b", "c"], SAME),
        Step("e --add", ["a", "b", "c", "e"], change=all_of(put("c", "d"), put("e"))),
        Step("c --add", ["a", "b", "d", "e"]),
    ],
    "content that the result holds": [
        Step("copy.jsonl --add", ["a", "b"],
             "has these inputs already: copy.jsonl (as a.jsonl)", put("copy.jsonl", "a")),
        Step("link.jsonl --add", ["a", "b"], SAME, link("link.jsonl")),
        Step("b ./a.jsonl --add", ["a", "b"], SAME),
        Step("c copy.jsonl --add", ["a", "b", "c"]),
        Step("a copy.jsonl --add", ["a", "b", "c", "d"], change=put("a", "d")),
    ],
    "new files with the same content": [
        Step("c copy.jsonl --add", ["a", "b", "c"],
             "has these inputs already: copy.jsonl (as c.jsonl)", put("copy.jsonl", "c")),
    ],
    "equal files by two names": [
        Step("a copy.jsonl --overwrite", ["a", "a"],
             "out: 100 documents are there more than once: copy.jsonl has the content of a.jsonl",
             put("copy.jsonl", "a")),
        Step("a copy.jsonl", ["a", "a"], "out: 100 documents are there more than once: "),
    ],
    "kept without known times": [
        Step("c --checksum --add", ["a", "b", "c"], change=write(f"out/{INPUT_TIMES}", "{}")),
        Step("a --checksum --add", ["a", "b", "c"], SAME),
    ],
    "kept in a unit that is packed anew": [
        Step(f"a b c --overwrite {ONE_UNIT}", ["a", "b", "c"]),
        Step(f"b --add {ONE_UNIT}", ["a", "changed", "c"], change=put("b", "changed")),
        Refused(f"b --add {ONE_UNIT}", "c.jsonl: is not named, is gone or ",
                "restore the file", all_of(put("b", "anew"), gone("c"))),
        Refused(f"b --add --checksum {ONE_UNIT}",
                f"c.jsonl: is not named, has changed, and {UNNAMED}",
                "to pack it as it is now, name it", put("c", "another")),
        Step(f"b c --add {ONE_UNIT}", ["a", "anew", "another"]),
    ],
    "kept in a unit whose shard is lost": [
        Step(f"a b c --overwrite {ONE_UNIT}", ["a", "b", "c"]),
        Refused(f"b --add {ONE_UNIT}", f"c.jsonl: is not named, has changed, and {UNNAMED}", "",
                all_of(lambda: shard_of().unlink(), put("c", "another"))),
        Step(f"b c --add {ONE_UNIT}", ["a", "b", "another"]),
    ],
    "equal bytes that are read in another way": [
        Step("a.txt --update --prune", [jsonl(one).decode().strip() for one in TEXTS["a"]],
             change=move("a", "a.txt")),
    ],
    "an input of another shape": [
        Step("a b q.jsonl --update", ["a", "b", "Q: 1 A: 2"],
             change=write("q.jsonl", '{"prompt": "Q: 1 ", "completion": "A: 2"}\n')),
        Step("a b q.jsonl --update", ["a", "b", "Q: 1 A: 2"], SAME),
    ],
    "columns that are kept need no file": [
        Step("d.parquet --add", ["a", "b", *TEXTS["d"][:30]], change=parquet("d.parquet", "d")),
        Step("c --add", ["a", "b", "c", *TEXTS["d"][:30]], change=gone("d.parquet")),
    ],
    # every unit reads the end of one input and the beginning of the next: all go, or none
    "inputs that hang together by their units": [
        Step("a.parquet b.parquet c.parquet --unit-bytes 2500 --overwrite",
             [*TEXTS["a"][:30], *TEXTS["b"][:30], *TEXTS["c"][:30]],
             change=all_of(*(parquet(f"{name}.parquet", name) for name in "abc"))),
        Step("a.parquet b.parquet c.parquet --unit-bytes 2500 --update",
             [*TEXTS["a"][:30], *TEXTS["b"][:30], *TEXTS["g"][:30]],
             change=parquet("c.parquet", "g"), again=True),
        Step("a.parquet b.parquet c.parquet --unit-bytes 2500 --update",
             [*TEXTS["h"][:30], *TEXTS["b"][:30], *TEXTS["g"][:30]],
             change=parquet("a.parquet", "h"), again=True),
    ],
    "small inputs that share a unit": [
        Step("1.jsonl 2.jsonl 3.jsonl 4.jsonl a --overwrite", ["1", "2", "3", "4", "a"],
             change=all_of(*(put(f"{name}.jsonl", name) for name in "1234"))),
        Step("2.jsonl 3.jsonl 4.jsonl a --update --prune", ["2", "new", "4", "a"],
             change=all_of(put("3.jsonl", "new"), gone("1.jsonl")), again=True),
    ],
    "bad records are dealt with otherwise every night": [
        Step("a --on-error skip --overwrite", ["a"], change=put("a", more=b"{\n" * 3)),
        # the limit is for what this run packs
        Refused("b --on-error skip --max-errors 2 --add", "--max-errors is 2", "",
                put("b", more=b"{\n" * 3), code=1),
        Step("b --on-error skip --max-errors 3 --add", ["a", "b"]),
        Step("c --add", ["a", "b", "c"]),
        Refused("e --add", "e.jsonl, line 1", "", write("e.jsonl", BAD), code=1),
    ],
    "an addition that was interrupted": [
        # nobody would see that the third night was never added
        Refused("d --add", f"{OTHER_RUN}c.jsonl", "remove out/.packer",
                all_of(gone("a"), interrupt("c.jsonl", "--add"))),
        Refused("b --add", f"{OTHER_RUN}c.jsonl", "first run its command again"),
        Step("c --add", ["a", "b", "c"], "out: continuing: "),
    ],
    "an update that was interrupted, and a shard that it keeps": [
        Refused("a b c --update --on-error skip --max-errors 0", "records are bad", "",
                put("c", more=b"{\n"), code=1),
        Refused("a b c --update --on-error skip", "shard-00001", "", shard(damage)),
        Step("a b c --update --on-error skip", ["a", "b", "c"], change=shard(Path.unlink),
             again=True),
    ],
    "the plain command after an update": [
        Step("a b aa.jsonl --update", ["a", "b", "c"], change=put("aa.jsonl", "c")),
        Refused("a aa.jsonl b", "out: holds a finished result of these inputs",
                "nothing need be done to have their documents"),
    ],
    "other options": [
        Refused("a b --update -l 128 --overlong drop",
                "other options: --max-length was 64, is now 128; --overlong was split, is now drop",
                "--overwrite"),
    ],
    "an update that names one new file": [
        Refused("c --update",
                "drop 200 documents of 2 inputs: a.jsonl (not named), b.jsonl (not named)",
                "--add"),
    ],
    "one file by two names": [
        Refused("link.jsonl --add", "link.jsonl: is a.jsonl in the result, by another name",
                "use the name", all_of(link("link.jsonl"), put("a", "changed"))),
        Refused("link.jsonl --update", "link.jsonl: is a.jsonl in the result", "use the name"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_comes_of_updates(result: Path, name: str) -> None:
    for step in SCENARIOS[name]:
        step.change()
        arguments = map(path_of, step.command.split())
        if isinstance(step, Refused):
            refused(*arguments, code=step.code, message=step.message, tip=step.tip)
            continue
        again = step.again or "--overwrite" in step.command
        assert step.said in run(*arguments, again=again)
        documents = [text for one in step.documents for text in TEXTS.get(one, [one])]
        assert packed() == sorted(documents)


def test_finalize_leaves_an_interrupted_update_to_its_command(result: Path) -> None:
    interrupt("c.jsonl", "--add")()
    before = contents("out")
    done = packer("finalize", "out")
    assert_error(done, 1, "out: the run that is to replace its result has not finished")
    assert "run the same command again" in done.stderr
    assert contents("out") == before
    assert "out: continuing: " in run("c.jsonl", "--add")


@pytest.mark.parametrize("how", ["--update", "--add"])
def test_inputs_that_have_moved_keep_their_units(result: Path, how: str) -> None:
    before = {name: how for name, how in inodes().items() if name.startswith("shard")}
    Path("new").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        Path("new", name).write_bytes(Path(name).read_bytes())  # a copy: at other times
        Path(name).unlink()
    said = "out: 2 inputs have moved: b.jsonl is now new/b.jsonl, a.jsonl is now new/a.jsonl\n"
    assert said in run("new/b.jsonl", "new/a.jsonl", how)
    assert packed() == sorted([*TEXTS["a"], *TEXTS["b"]])
    assert inodes().items() >= before.items()
    inputs = json.loads(Path("out/manifest.json").read_bytes())["inputs"]
    assert [one["path"] for one in inputs] == ["new/a.jsonl", "new/b.jsonl"]
    assert SAME in run("new", how)


def test_units_are_those_of_the_same_command_from_scratch(folder: Path) -> None:
    """And their rejected records, which name the file as it is called now."""
    for name in "abc":
        put(name, name, more=b"{broken\n" + jsonl("x" * 6000) + b"{\n")()
    skip = ["--on-error", "skip"]
    run("a.jsonl", "b.jsonl", *skip)
    run("a.jsonl", "b.jsonl", "c.jsonl", *skip, "--update")
    fresh = ["a.jsonl", "b.jsonl", "c.jsonl", *OPTIONS[:-1], "fresh", *skip]
    assert packer("pack", *fresh).exit_code == 0
    assert contents("fresh") == contents("out")
    move("c", "moved.jsonl")()
    run("a.jsonl", "b.jsonl", "moved.jsonl", *skip, "--update", again=True)
    lines = [Path(one, "rejected.jsonl").read_text().splitlines() for one in ("out", "fresh")]
    assert sorted(lines[0]) == sorted(one.replace("c.jsonl", "moved.jsonl") for one in lines[1])
    assert len(lines[0]) == 6


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

    put("a", "first")()
    monkeypatch.setattr("packer_cli.storage.os.stat", ticking)
    assert packer("pack", "a.jsonl", *OPTIONS).exit_code == 0
    put("a", "later")()
    assert packer("pack", "a.jsonl", *OPTIONS, "--update").exit_code == 0
    assert packed() == ["later"]


@pytest.mark.parametrize("change", ["path.unlink()", "os.truncate(path, 1000)"])
def test_a_shard_that_is_kept_but_goes_meanwhile(result: Path, change: str) -> None:
    command, before = ("a.jsonl", "b.jsonl", "c.jsonl", "--update"), contents("out")
    fault = f"lambda: [{change} for path in Path('out').glob('shard-00001-*')]"
    done = faulty(f"when_named('unit-', 1, {fault})", "pack", *command, *OPTIONS, "-q")
    assert done.returncode == 1
    lost = next(name for name in before if name.startswith("shard-00001-"))
    assert f"error: out/{lost}: is missing or cut short since the update" in done.stderr
    assert contents("out")["manifest.json"] == before["manifest.json"]
    Path("out", lost).unlink(missing_ok=True)
    assert "out: continuing: " in run(*command, again=True)
    assert packed() == sorted([*TEXTS["a"], *TEXTS["b"], *TEXTS["c"]])


@pytest.mark.parametrize("times", [None, '{"mtime_ns": []}', "[" * 100_000])
@pytest.mark.parametrize("how", [[], ["--update"]])
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
        assert SAME not in done.stderr


def test_another_tokenizer_without_files_is_refused(folder: Path) -> None:
    """Without one, padding is id 0; the built-in one pads with an id of its own."""
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text('{"input_ids": [1, 2, 3]}\n' * 50)
    options = ["-l", 64, "-q", "-o", "out"]
    assert packer("pack", "a.jsonl", *options).exit_code == 0
    both = ["pack", "a.jsonl", "b.jsonl", *options, "--update"]
    assert_error(packer(*both, "-t", "bytes"), 2, "the tokenizer was not given, is now bytes")
    assert packer(*both).exit_code == 0
    assert check_directory("out")["documents"] == 100


def test_stdin_does_not_replace_what_came_by_stdin(folder: Path) -> None:
    options = [*map(str, OPTIONS), "-q"]
    first = unaltered("pack", "-", *options, "--add", stdin=jsonl("one", "two"))
    assert first.returncode == 0, first.stderr
    for how in ("--add", "--update"):
        again = unaltered("pack", "-", *options, how, stdin=jsonl("three"))
        assert again.returncode == 2
        assert "-: stdin would replace the documents that came from stdin before" in again.stderr
    put("a", "three")()
    run("a.jsonl", "--add")
    assert packed() == ["one", "three", "two"]
    last = unaltered("pack", "-", *options, "--update", "--prune", stdin=jsonl("four"))
    assert last.returncode == 0, last.stderr
    assert packed() == ["four"]


def test_a_change_of_one_of_many_small_files_packs_few_of_them_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packer_cli.mixing.units._MOST_FILES", 4)
    for number in range(10):
        put(f"{number}.jsonl", f"{number}")()
    command = ["pack", *(f"{number}.jsonl" for number in range(10)), "-l", 64, "-t", "bytes", "-q"]
    command += ["-o", "out"]
    assert packer(*command).exit_code == 0
    units = [
        json.loads(line)["slices"] for line in Path("out/units.jsonl").read_text().splitlines()
    ]
    assert [len(slices) for slices in units] == [4, 4, 2]
    shards = {path.name for path in Path("out").glob("*.arrow")}
    put("5.jsonl", "other")()
    assert packer(*command, "--update").exit_code == 0
    assert len(shards & {path.name for path in Path("out").glob("*.arrow")}) == 2
    assert packer(*command, "--unit-bytes", "1M", "--overwrite").exit_code == 0
    assert len(list(Path("out").glob("*.arrow"))) == 1
