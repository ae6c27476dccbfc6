"""`packer pack --add`: what is new or has changed is packed, and all else is kept."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
    succeeds,
)

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


def gone(*names: str) -> Change:
    return lambda: [Path(path_of(name)).unlink() for name in names]


def move(name: str, to: str) -> Change:
    return lambda: Path(path_of(name)).rename(path_of(to))


def all_of(*changes: Change) -> Change:
    return lambda: [change() for change in changes]


def interrupt(*command: str) -> Change:
    """Kill a run when its first unit is packed."""
    given = ["pack", *command, *OPTIONS]
    return lambda: faulty("when_named('unit-', 1, kill)", *given).returncode == -signal.SIGKILL


@pytest.fixture
def result(folder: Path) -> Path:
    """Of a.jsonl and b.jsonl, several units each; c.jsonl and d.jsonl are there."""
    for name in "abcd":
        put(name)()
    succeeds("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-q")
    return folder / "out"


def inodes() -> dict[str, tuple[int, int]]:
    statuses = {path.name: path.stat() for path in Path("out").iterdir()}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in statuses.items()}


def run(*arguments: object, again: bool = False) -> str:
    """What it says on stderr; the result is sound, and no shard that stays is touched, unless it
    is packed `again`.
    """
    before = inodes() if Path("out").exists() else {}
    done = succeeds("pack", *OPTIONS, *arguments)
    check_directory("out")
    after = inodes()
    stay = [name for name in before.keys() & after.keys() if name.endswith(".arrow")]
    assert again or [before[name] for name in stay] == [after[name] for name in stay]
    if SAME in done.stderr:
        assert before == after
    succeeds("verify", "out", "-q")
    return done.stderr


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
OTHER_RUN = "out: holds an unfinished run with other inputs: "
SCENARIOS: dict[str, list[Step | Refused]] = {
    "the command of every night": [
        Step("c --add", ["a", "b", "c"], "keeps 200 documents of 2 inputs: a.jsonl, b.jsonl\n"),
        Step("c --add", ["a", "b", "c"], SAME),
        Step("d --add", ["a", "b", "c", "d"], change=gone("a", "c")),
        Step("b d --add", ["a", "b", "c", "d"], SAME),
    ],
    "changed inputs": [
        Step("a b --add", ["d", "b"],
             "inputs that have changed replace the earlier ones: a.jsonl\n", put("a", "d")),
        Step("a b --add", ["c", "e"], "replace the earlier ones: a.jsonl, b.jsonl\n",
             all_of(put("a", "c"), put("b", "e"))),
        Step("a --add", ["c", "e"], change=lambda: os.utime("a.jsonl", ns=(0, 1)), again=True),
        Step("a --add", ["c", "e"], SAME, lambda: Path("a.jsonl").chmod(0o600)),
    ],
    "what is kept is not read": [
        Step("c --add", ["a", "b", "c"], change=all_of(put("a", "nonsense"), gone("b"))),
    ],
    "moved files": [
        Step("new.jsonl b --add", ["a", "b"], "already: new.jsonl (as a.jsonl)\n",
             all_of(put("new.jsonl", "a"), gone("a"))),
        Step("new.jsonl --add", ["a", "b"], SAME),
        Step("new.jsonl a --add", ["a", "b"], "already: a.jsonl\n", put("a")),
        Step("a --add", ["a", "b"], "already: a.jsonl (as new.jsonl)\n"),
        Step("a moved.jsonl --add", ["c", "a", "b"], "replace the earlier ones: a.jsonl\n",
             all_of(move("a", "moved.jsonl"), put("a", "c"))),
    ],
    "equal bytes that are read in another way": [
        Step("a.txt --add", ["a", "b", *(jsonl(one).decode().strip() for one in TEXTS["a"])],
             change=move("a", "a.txt")),
    ],
    "equal files by two names": [
        Step("a copy.jsonl --overwrite", ["a", "a"],
             "out: 100 documents are there more than once: copy.jsonl has the content of a.jsonl",
             put("copy.jsonl", "a")),
    ],
    "an unchanged input whose unit is packed again": [
        Step(f"a b c --overwrite {ONE_UNIT}", ["a", "b", "c"]),
        Step(f"b --add {ONE_UNIT}", ["a", "changed", "c"], change=put("b", "changed")),
        Refused(f"b --add {ONE_UNIT}", "c.jsonl: is not named, is gone or has changed",
                "restore the file", all_of(put("b", "anew"), gone("c"))),
        Refused(f"b --add {ONE_UNIT}", "c.jsonl: is not named, is gone or has changed",
                "name it, to pack it as it is now", put("c", "another")),
        Step(f"b c --add {ONE_UNIT}", ["a", "anew", "another"]),
    ],
    # every unit reads the end of one input and the beginning of the next: all go, or none
    "inputs that hang together by their units": [
        Step("a.parquet b.parquet c.parquet --unit-bytes 2500 --overwrite",
             [*TEXTS["a"][:30], *TEXTS["b"][:30], *TEXTS["c"][:30]],
             change=all_of(*(parquet(f"{name}.parquet", name) for name in "abc"))),
        Step("c.parquet --unit-bytes 2500 --add",
             [*TEXTS["a"][:30], *TEXTS["b"][:30], *TEXTS["g"][:30]],
             change=parquet("c.parquet", "g"), again=True),
        Step("d --unit-bytes 2500 --add",
             [*TEXTS["a"][:30], *TEXTS["b"][:30], *TEXTS["g"][:30], "d"],
             change=gone("a.parquet", "b.parquet", "c.parquet")),
    ],
    "bad records are dealt with otherwise every night": [
        Step("a --on-error skip --overwrite", ["a"], change=put("a", more=b"{\n" * 3)),
        # the limit is for what this run packs
        Refused("b --on-error skip --max-errors 2 --add", "--max-errors is 2", "",
                put("b", more=b"{\n" * 3), code=1),
        Step("b --on-error skip --max-errors 3 --add", ["a", "b"]),
        Step("c --add", ["a", "b", "c"]),
        Refused("e --add", "e.jsonl, line 101", "", put("e", more=b"{\n"), code=1),
    ],
    "an addition that was interrupted": [
        # nobody would see that the third night was never added
        Refused("d --add", f"{OTHER_RUN}c.jsonl", "remove out/.packer",
                all_of(gone("a"), interrupt("c.jsonl", "--add"))),
        Refused("b --add", f"{OTHER_RUN}c.jsonl", "first run its command again"),
        Step("c d --add", ["a", "b", "c", "d"], "the unfinished run is discarded"),
    ],
    "an interrupted addition goes on": [
        Step("c --add", ["a", "b", "c"], "out: continuing: ", interrupt("c.jsonl", "--add")),
    ],
    "the plain command afterwards": [
        Refused("a b c", "differs: ", "pack what is new or has changed, with --add"),
        Step("aa.jsonl --add", ["a", "b", "c"], change=put("aa.jsonl", "c")),
        Refused("a aa.jsonl b", "out: the result already holds these inputs, in another order",
                "add --overwrite to pack them again"),
    ],
    "other options": [
        Refused("a b --add -l 128 --overlong drop",
                "other options: --max-length was 64, is now 128; --overlong was split, is now drop",
                "--overwrite"),
    ],
    "a lost shard": [
        Refused("c --add", "is missing", "--overwrite", lambda: shard_of(unit=1).unlink()),
        Refused("a b", "differs: shard-00001", "--overwrite"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_added(result: Path, name: str) -> None:
    for step in SCENARIOS[name]:
        step.change()
        arguments = [*map(path_of, step.command.split())]
        if isinstance(step, Refused):
            before = (result / "manifest.json").read_bytes()
            done = packer("pack", *OPTIONS, "-q", *arguments)
            assert_error(done, step.code, step.message)
            assert step.tip in done.stderr.splitlines()[1]
            assert (result / "manifest.json").read_bytes() == before
            continue
        again = step.again or "--overwrite" in step.command
        assert step.said in run(*arguments, again=again)
        documents = [text for one in step.documents for text in TEXTS.get(one, [one])]
        assert sorted(recover_texts("out")) == sorted(documents)


def test_an_input_is_its_absolute_path(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.jsonl of two folders are two inputs, and one by two ways to name it is one."""
    for name, letter in (("one", "c"), ("two", "d")):
        Path(name).mkdir()
        Path(name, "data.jsonl").write_bytes(jsonl(*TEXTS[letter]))
        monkeypatch.chdir(name)
        succeeds("pack", "data.jsonl", *OPTIONS[:-1], "../out", "--add")
        monkeypatch.chdir("..")
    run(Path("one/../one/data.jsonl").absolute(), "two/data.jsonl", "./a.jsonl", "--add")
    assert sorted(recover_texts("out")) == sorted(text for one in "abcd" for text in TEXTS[one])
    inputs = json.loads(Path("out/manifest.json").read_bytes())["inputs"]
    names = ("a.jsonl", "b.jsonl", "one/data.jsonl", "two/data.jsonl")
    assert [one["path"] for one in inputs] == [str(Path(name).absolute()) for name in names]


def test_units_are_those_of_one_command(folder: Path) -> None:
    """In input order, and without an earlier result, when it is a plain run."""
    for name in "abc":
        put(name, name, more=b"{broken\n" + jsonl("x" * 6000) + b"{\n")()
    skip = ["--on-error", "skip", "--no-shuffle", "--add"]
    run("a.jsonl", "b.jsonl", *skip)
    run("c.jsonl", *skip)
    succeeds("pack", "a.jsonl", "b.jsonl", "c.jsonl", *OPTIONS[:-1], "fresh", *skip[:3])
    assert contents("fresh") == contents("out")


@pytest.mark.parametrize("change", ["path.unlink()", "os.truncate(path, 1000)"])
def test_a_shard_that_is_kept_but_goes_meanwhile(result: Path, change: str) -> None:
    before = contents("out")
    shutil.copytree("out", "copy")
    fault = f"lambda: [{change} for path in Path('out').glob('shard-00001-*')]"
    done = faulty(f"when_named('unit-', 1, {fault})", "pack", "c.jsonl", "--add", *OPTIONS, "-q")
    assert done.returncode == 1
    lost = next(name for name in before if name.startswith("shard-00001-"))
    assert f"error: out/{lost}: is missing or cut short since the run began" in done.stderr
    assert contents("out")["manifest.json"] == before["manifest.json"]
    shutil.copy(Path("copy", lost), "out")
    assert "out: continuing: " in run("c.jsonl", "--add", again=True)


def test_stdin_does_not_replace_what_came_by_stdin(folder: Path) -> None:
    options = [*map(str, OPTIONS), "-q", "--add"]
    first = unaltered("pack", "-", *options, stdin=jsonl("one", "two"))
    assert first.returncode == 0, first.stderr
    again = unaltered("pack", "-", *options, stdin=jsonl("three"))
    assert again.returncode == 2
    assert "-: stdin would replace the documents that came from stdin before" in again.stderr
    put("a", "three")()
    run("a.jsonl", "--add")
    assert sorted(recover_texts("out")) == ["one", "three", "two"]
    assert json.loads(Path("out/manifest.json").read_bytes())["inputs"][0]["size"] == 32


def test_a_change_of_one_of_many_small_files_packs_few_of_them_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packer_cli.mixing.units._MOST_SLICES", 4)
    for number in range(10):
        put(f"{number}.jsonl", f"{number}")()
    command = ["pack", *(f"{number}.jsonl" for number in range(10)), "-l", 64, "-t", "bytes", "-q"]
    command += ["-o", "out"]
    succeeds(*command)
    units = [
        json.loads(line)["slices"] for line in Path("out/units.jsonl").read_text().splitlines()
    ]
    assert [len(slices) for slices in units] == [4, 4, 2]
    shards = {path.name for path in Path("out").glob("*.arrow")}
    put("5.jsonl", "other")()
    succeeds(*command, "--add")
    assert len(shards & {path.name for path in Path("out").glob("*.arrow")}) == 2


def test_another_tokenizer_without_files_is_refused(folder: Path) -> None:
    """Without one, padding is id 0; the built-in one pads with an id of its own."""
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text('{"input_ids": [1, 2, 3]}\n' * 50)
    options = ["-l", 64, "-q", "-o", "out"]
    succeeds("pack", "a.jsonl", *options)
    add = ["pack", "b.jsonl", *options, "--add"]
    assert_error(packer(*add, "-t", "bytes"), 2, "the tokenizer was not given, is now bytes")
