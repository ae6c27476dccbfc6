"""`packer trace --find`: the steps that had a document, and why one is in no row."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from altered import unaltered
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from support import assert_error, jsonl, pack, packer

from packer_cli.trace import find

pytestmark = pytest.mark.usefixtures("folder")
IN_ORDER = ["--no-shuffle", "--strategy", "next-fit"]
ONE_RANK = ("--ranks", 1, "--no-shuffle")


def found(document: str, *arguments: object, directory: str = "out") -> str:
    result = packer("trace", directory, "--find", document, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return str(result.stdout)


def found_json(document: str, *arguments: object, directory: str = "out") -> list[dict[str, Any]]:
    text = found(document, *arguments, "--json", directory=directory)
    return [json.loads(line) for line in text.splitlines()]


def places(rows: Iterable[dict[str, Any]]) -> list[tuple[int, ...]]:
    names = ("step", "epoch", "rank", "micro_batch", "row")
    return [tuple(one[name] for name in names) for one in rows]


@pytest.fixture
def packed(folder: Path) -> None:
    """Rows of 16 bytes: first + second | third | a longer one | its end + 5 | the sixth one."""
    texts = ["first", "second\n", "third\n\nline", "a longer one than 16", "5", "the sixth one"]
    (folder / "data").mkdir()
    (folder / "data/a.jsonl").write_bytes(jsonl(*texts))
    pack("data/a.jsonl", "-l", 16, *IN_ORDER)


@pytest.mark.usefixtures("packed")
def test_every_piece_of_a_document() -> None:
    options = ("--ranks", 2, "--micro-batches", 2, "--no-shuffle")
    assert found("data/a.jsonl:65", *options) == (
        "data/a.jsonl byte 65: in 2 rows\n"
        "\n"
        "step  epoch  rank  micro-batch  row  tokens  document\n"
        "   0      0     0            1    2      16  data/a.jsonl byte 65\n"
        "   0      0     1            1    3       5  data/a.jsonl byte 65 from its token 16\n"
    )
    for name in ("a.jsonl:65", "a.jsonl byte 65", "/data/a.jsonl:65", "data/a.jsonl byte 65"):
        assert found(name, *options) == found("data/a.jsonl:65", *options)
    rows = found_json("a.jsonl:65", *options, "--epochs", 2)
    assert places(rows) == [(0, 0, 0, 1, 2), (0, 0, 1, 1, 3), (1, 1, 1, 1, 2), (2, 1, 0, 0, 3)]
    assert rows[1]["segments"] == [
        {"segment": 0, "file": "data/a.jsonl", "position": 65, "position_unit": "byte",
         "start": 16, "tokens": 5}
    ]  # fmt: skip


@pytest.mark.usefixtures("packed")
def test_a_row_that_is_left_over_begins_the_next_epoch() -> None:
    assert places(found_json("a.jsonl:112", "--ranks", 2, "--no-shuffle")) == [(2, 1, 0, 0, 4)]


@pytest.mark.usefixtures("packed")
def test_a_row_whose_batch_the_loader_dropped_is_in_no_step() -> None:
    options = ("--ranks", 1, "--batch-size", 2, "--drop-last", "--no-shuffle")
    (row,) = found_json("a.jsonl:112", *options)
    assert places([row]) == [(None, None, None, None, 4)]
    assert row["place"] == 4
    table = found("a.jsonl:112", *options).splitlines()
    assert table[3].split()[:5] == ["-", "-", "-", "-", "4"]
    assert table[-1] == "- in no step: batches that the loader dropped (1)"


def test_names_that_are_unclear(folder: Path) -> None:
    for name in ("a/x.jsonl", "b/x.jsonl", "b/yy.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(jsonl("text"))
    pack("a", "b", "-l", 16, *IN_ORDER)
    many = packer("trace", "out", "--find", "x.jsonl:0", *ONE_RANK)
    assert_error(many, 2, "--find: 'x.jsonl' may be a/x.jsonl or b/x.jsonl")
    assert "tip: give more of the path" in many.stderr
    assert len(found_json("b/x.jsonl:0", *ONE_RANK)) == 1
    unknown = packer("trace", "out", "--find", "y.jsonl:0", *ONE_RANK)
    assert_error(unknown, 2, "--find: no input is 'y.jsonl' or ends with it")
    assert "b/yy.jsonl" in unknown.stderr
    far = packer("trace", "out", "--find", "zzzzzz:0", *ONE_RANK)
    assert far.stderr.endswith("tip: packer stats DIR --by input lists inputs\n")
    part = packer("trace", "out", "--find", "l:0", *ONE_RANK)
    assert_error(part, 2, "--find: no input is 'l'")
    for name in ("x.jsonl", "x.jsonl:", "x.jsonl:-1", ":7", "x.jsonl:²", f"x.jsonl:{2**63}"):
        result = packer("trace", "out", "--find", name, *ONE_RANK)
        assert_error(result, 2, "is not FILE:POSITION")


def test_stdin(folder: Path) -> None:
    result = unaltered("pack", "-", "-l", 8, "-q", "-o", "out", stdin=jsonl("one"))
    assert result.returncode == 0
    assert found("stdin:0", *ONE_RANK) == found("-:0", *ONE_RANK)
    assert "stdin byte 0\n" in found("stdin byte 0", *ONE_RANK)


def absence(document: str, *arguments: object, directory: str = "out") -> tuple[str, str]:
    """(why it is in no row, the tip)."""
    result = packer("trace", directory, "--find", document, *ONE_RANK, *arguments)
    assert_error(result, 1, f"is in no row of {directory}: ")
    error, tip = result.stderr.splitlines()
    return error.partition(f" of {directory}: ")[2], tip.removeprefix("tip: ")


@pytest.mark.usefixtures("packed")
def test_a_place_in_the_middle_of_a_document() -> None:
    assert absence("a.jsonl:70") == (
        "every document of this input is in rows, and none begins there",
        "the nearest documents in rows begin at byte 65 and byte 98",
    )
    assert absence("a.jsonl:999")[1] == "the nearest documents in rows begin at byte 112"


def test_what_was_left_out(folder: Path) -> None:
    """A rejected record is named; what was dropped, and what was empty, is counted."""
    lines = [b'{"text": "one"}', b'{"text": 5}', b'{"text": ""}', b'{"text": "longer than 8"}']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    pack("a.jsonl", "-l", 8, "--overlong", "drop", "--on-error", "skip")
    assert absence("a.jsonl:16")[0].startswith("it was rejected: ")
    assert absence("a.jsonl:41")[0] == (
        "left out of its input or source: dropped as longer than a row (1), without tokens (1), "
        "rejected (1)"
    )


def test_what_tokenized_directories_tell(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("one", "longer than 8", "two") + b'\n{"text": 5}')
    tokenized = packer(
        "tokenize", "a.jsonl", "-t", "bytes", "-o", "tokens", "-q", "--on-error", "skip"
    )
    assert tokenized.exit_code == 0, tokenized.stderr
    view = packer("pack", "tokens", "-l", 8, "--overlong", "drop", "--view", "-q", "-o", "out")
    assert view.exit_code == 0, view.stderr
    assert found("a.jsonl:0", *ONE_RANK).startswith("a.jsonl byte 0: in 1 row\n")
    assert places(found_json("tokens:0", *ONE_RANK)) == places(found_json("a.jsonl:0", *ONE_RANK))
    assert found("tokens document 2", *ONE_RANK).startswith("tokens document 2: in 1 row\n")
    for name in ("a.jsonl:16", "tokens:1"):
        assert absence(name)[0] == "it has 14 tokens, and documents longer than a row were dropped"
    rejected = json.loads((folder / "tokens/rejected.jsonl").read_text())["position"]
    assert absence(f"a.jsonl:{rejected}")[0].startswith("it was rejected: ")
    (folder / "tokens").rename(folder / "moved")
    assert found("a.jsonl:0", *ONE_RANK, "--tokens", "moved").startswith("a.jsonl byte 0: in 1 row")


def test_documents_of_recipes(folder: Path) -> None:
    """By the first input; those taken twice are found twice, those held out on the other side."""
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, max_length=512, validation_share=0.1))
    shown = packer("show", "out/train", "0--1", "--json").stdout.splitlines()
    rows: dict[tuple[str, int], list[int]] = {}
    for line in shown:
        row = json.loads(line)
        for one in row["segments"]:
            rows.setdefault((one["file"], one["position"]), []).append(row["row"])
    twice = next(key for key, its in rows.items() if key[0] == "chat.jsonl" and len({*its}) > 1)
    path, position = twice
    its = found_json(f"{path}:{position}", *ONE_RANK, directory="out/train")
    assert sorted(one["row"] for one in its) == sorted({*rows[twice]})
    assert {segment["source"] for one in its for segment in one["segments"]} == {"chat"}
    other = packer("show", "out/validation", "0", "--json").stdout
    held = json.loads(other)["segments"][0]
    name = f"{held['file']}:{held['position']}"
    why, _ = absence(name, directory="out/train")
    assert why.startswith("it is in row 0 of ")
    assert why.endswith("out/validation, the other side of the split")
    in_rows = {position for file, position in rows if file == "code.jsonl"}
    every, at = [], 0
    for line in Path("code.jsonl").read_bytes().splitlines(keepends=True):
        every.append(at)
        at += len(line)
    absent = [one for one in every if one not in in_rows]
    whys = [absence(f"code.jsonl:{one}", directory="out/train")[0] for one in absent[:40]]
    assert {one.partition(" of ")[0].rstrip("0123456789") for one in whys} == {
        "it is in row ",
        "left out",
    }
    assert "not taken, as code has 0.67 epochs" in max(whys, key=len)
    assert absence("code.jsonl:1", directory="out/train") == (
        "no document begins there",
        f"the nearest documents begin at byte 0 and byte {every[1]}",
    )


@pytest.mark.usefixtures("packed")
def test_from_python() -> None:
    first, second = find("out", "a.jsonl:65", world_size=2, batch_size=2, seed=None)
    assert (first.step.number, first.place.row.number) == (0, 2)
    assert [one.origin.start for one in (*first.segments, *second.segments)] == [0, 16]
