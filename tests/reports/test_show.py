"""`packer show`: the rows asked for, and what is trained in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from showing import IN_ORDER, rewrite, show, show_json, texts_of, write_ids
from support import assert_error, jsonl, pack, packer, shard_of

pytestmark = pytest.mark.usefixtures("folder")


def test_a_row_without_colour(packed: Path) -> None:
    assert show() == (
        "⟦trained tokens⟧, others\n"
        "\n"
        "row 0 of 4: 2 segments, 14 tokens, 12 trained; shard-00000-000 row 0\n"
        "── segment 0: a.jsonl byte 0, 6 tokens, 5 trained\n"
        "f⟦irst<eos>⟧\n"
        "── segment 1: a.jsonl byte 18, 8 tokens, 7 trained\n"
        "s⟦econd\n<eos>⟧\n"
        "... 2 padding tokens\n"
    )


def test_a_later_part_of_a_document_and_a_full_row(packed: Path) -> None:
    full, end = show(2, 3).split("\n\n")[1:]
    assert full == (
        "row 2 of 4: 1 segment, 16 tokens, 15 trained; shard-00000-000 row 2\n"
        "── segment 0: a.jsonl byte 65, 16 tokens, 15 trained\n"
        "a⟦ longer one tha⟧"
    )
    assert "a.jsonl byte 65 from its token 16, 5 tokens, 4 trained\nn⟦ 16<eos>⟧\n" in end


def test_json(packed: Path) -> None:
    assert show_json() == [
        {
            "row": 0,
            "shard": shard_of().name,
            "shard_row": 0,
            "segments": [
                {
                    "segment": 0,
                    "file": "a.jsonl",
                    "position": 0,
                    "position_unit": "byte",
                    "start": 0,
                    "tokens": 6,
                    "trained_tokens": 5,
                    "text": "first<eos>",
                    "spans": [
                        {"text": "f", "trained": False},
                        {"text": "irst<eos>", "trained": True},
                    ],
                },
                {
                    "segment": 1,
                    "file": "a.jsonl",
                    "position": 18,
                    "position_unit": "byte",
                    "start": 0,
                    "tokens": 8,
                    "trained_tokens": 7,
                    "text": "second\n<eos>",
                    "spans": [
                        {"text": "s", "trained": False},
                        {"text": "econd\n<eos>", "trained": True},
                    ],
                },
            ],
            "padding": 2,
        }
    ]


def test_ids(packed: Path) -> None:
    assert show("--ids", 0, "--segment", 0).endswith("\n102 ⟦105 114 115 116 256⟧\n")
    wide = show("--ids", 2).splitlines()[-1]
    assert wide == "97 ⟦32 108 111 110 103 101 114 32 111 110 101 32 116 104 97⟧"
    segment = show_json("--ids")[0]["segments"][0]
    assert segment["text"] is None
    assert segment["spans"] == [
        {"ids": [102], "trained": False},
        {"ids": [105, 114, 115, 116, 256], "trained": True},
    ]


def test_ids_stand_16_to_a_line(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("a" * 32))
    pack("a.jsonl", "-l", 64)
    lines = show("--ids").splitlines()[4:]
    assert lines == ["97 ⟦" + " ".join(["97"] * 15), " ".join(["97"] * 16), "256⟧",
                     "... 31 padding tokens"]  # fmt: skip


def test_one_segment(packed: Path) -> None:
    assert show("--segment", 1) == show("--segment", -1)
    text = show("--segment", 1)
    assert "segment 0" not in text
    assert text.endswith("── segment 1: a.jsonl byte 18, 8 tokens, 7 trained\ns⟦econd\n<eos>⟧\n")
    (row,) = show_json("--segment", 1)
    assert [segment["segment"] for segment in row["segments"]] == [1]
    assert row["padding"] == 2


def rows_shown(*arguments: object) -> list[int]:
    return [row["row"] for row in show_json(*arguments)]


def test_which_rows(packed: Path) -> None:
    assert rows_shown() == [0]
    assert rows_shown(3, 0, 3) == [3, 0, 3]
    assert rows_shown("1-2") == [1, 2]
    assert rows_shown("1-1", "-4") == [1, 0]
    assert rows_shown(-1) == [3]
    assert rows_shown("-3--1") == [1, 2, 3]
    assert rows_shown("2--1", "--ids") == [2, 3]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["4"], "ROW: 4: there is no row 4, only 0 to 3"),
        (["-5"], "ROW: -5: there is no row -5, only 0 to 3"),
        (["0-4"], "ROW: 0-4: there is no row 4, only 0 to 3"),
        (["0", "9" * 30], "there is no row 999999999999"),
        (["2-1"], "ROW: 2-1: ends before it begins"),
        (["-1-0"], "ROW: -1-0: ends before it begins"),
        (["one"], "ROW: 'one' is not a row number"),
        (["1.5"], "ROW: '1.5' is not a row number"),
        (["1-"], "ROW: '1-' is not a row number"),
        ([""], "ROW: '' is not a row number"),
        (["²"], "ROW: '²' is not a row number"),
        (["--colour"], "ROW: '--colour' is not a row number"),
        (["--segment", "2"], "--segment: 2 is not in row 0, which has 0 to 1"),
        (["--segment", "-3"], "--segment: -3 is not in row 0, which has 0 to 1"),
    ],
)
def test_what_is_not_there(packed: Path, rows: list[str], message: str) -> None:
    assert_error(packer("show", "out", *rows), 2, message)
    assert packer("show", "out", *rows, "--json").exit_code == 2


def test_rows_are_found_in_many_shards(many_shards: Path) -> None:
    shards = sorted(path.name for path in many_shards.glob("shard-*"))
    assert len(shards) > 3
    rows = show_json("0--1")
    assert [segment["text"] for row in rows for segment in row["segments"]] == [
        f"document {n:02}<eos>" for n in range(40)
    ]
    assert sorted({row["shard"] for row in rows}) == shards
    assert [row["row"] for row in rows] == list(range(40))


def test_only_the_shard_that_is_needed_is_touched(many_shards: Path) -> None:
    first, *others = sorted(many_shards.glob("shard-*.arrow"))
    for path in others:
        path.unlink()
    assert texts_of(0) == ["document 00<eos>"]
    result = packer("show", "out", -1)
    assert_error(result, 1, f"out/{others[-1].name}: is missing")
    first.write_bytes(first.read_bytes()[:-8])
    assert_error(packer("show", "out"), 1, f"out/{first.name}: has ", " the manifest says ")
    first.write_bytes(b"x" * (first.stat().st_size + 8))
    assert_error(packer("show", "out"), 1, f"out/{first.name}: not a readable shard")


def change_shard(change: Callable[[dict[str, Any]], None], **metadata: object) -> None:
    """Rewrite the only shard: `change` its columns as lists, and what it and the manifest say."""
    (path,) = Path("out").glob("shard-*.arrow")
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        table = reader.read_all()
    columns = table.to_pydict()
    change(columns)
    known = {name: table.schema.field(name).type for name in table.schema.names}
    arrays = {
        name: pa.array(values, known.get(name, known["cu_seqlens"]))
        for name, values in columns.items()
    }
    description = json.loads(table.schema.metadata[b"packer"]) | metadata
    table = pa.table(arrays).replace_schema_metadata({"packer": json.dumps(description)})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    rewrite(lambda manifest: manifest["shards"][0].update(bytes=path.stat().st_size))
    rewrite(lambda manifest: manifest["config"].update(metadata, columns=list(columns)))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("cu_seqlens", [0, 17], "row 0: is damaged: cu_seqlens ends outside 1..16: 17"),
        ("cu_seqlens", [0, 6, 6], "cu_seqlens does not increase"),
        ("cu_seqlens", [1, 6, 14], "cu_seqlens does not begin with 0"),
        ("cu_seqlens", [0], "cu_seqlens has fewer than two boundaries"),
        ("cu_seqlens", [], "cu_seqlens has fewer than two boundaries"),
        ("cu_seqlens", [0, -3, 14], "cu_seqlens does not increase"),
        ("cu_seqlens", [0, 14], "segments does not match cu_seqlens"),
        ("segments", [{"file": 1, "position": 0, "start": 0}] * 2, "not an input of its unit: 1"),
        ("segments", [{"file": -1, "position": 0, "start": 0}] * 2, "not an input of its unit: -1"),
    ],
)
def test_damaged_rows(packed: Path, column: str, value: object, message: str) -> None:
    change_shard(lambda columns: columns[column].__setitem__(0, value))
    assert_error(packer("show", "out"), 1, f"{shard_of()}: row 0: ", message)
    assert texts_of(1) == ["third\n\nline<eos>"]


def test_segments_that_begin_at_multiples(packed: Path) -> None:
    """A segment has its real length, wherever the next one begins."""

    def spread(columns: dict[str, list[Any]]) -> None:
        for name, filler in (("input_ids", 257), ("labels", -100)):
            row = columns[name][0]
            columns[name][0] = [*row[:6], filler, filler, *row[6:14]]
        columns["cu_seqlens_padded"] = [[0, 8, 16], *columns["cu_seqlens"][1:]]

    before = show()
    change_shard(spread, segment_multiple=8)
    assert show() == before
    change_shard(lambda columns: columns["cu_seqlens_padded"].__setitem__(0, [0, 12, 20]))
    assert_error(packer("show", "out"), 1, "cu_seqlens_padded is not cu_seqlens in multiples of 8")


def test_labels_that_are_shifted(folder: Path) -> None:
    write_ids(folder / "a.jsonl", (list(b"abcd"), [0, 1, 0, 1]), (list(b"efg"), [0, 0, 1]))
    pack("a.jsonl", "-l", 8, *IN_ORDER)
    unshifted = show()
    assert "\na⟦b⟧c⟦d⟧\n" in unshifted
    assert "\nef⟦g⟧\n" in unshifted

    def shift(columns: dict[str, list[Any]]) -> None:
        columns["labels"] = [[*row[1:], -100] for row in columns["labels"]]

    change_shard(shift, label_shift="pre")
    assert show() == unshifted


def test_without_labels_all_is_plain_and_a_note_says_so(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("text"))
    pack("a.jsonl", "-l", 8, "--columns", "input_ids,cu_seqlens")
    result = packer("show", "out")
    assert result.exit_code == 0
    assert result.stderr == (
        "packer: the labels column was not written: which tokens are trained on is unknown\n"
    )
    assert result.stdout == (
        "row 0 of 1: 1 segment, 5 tokens; shard-00000-000 row 0\n"
        "── segment 0: 5 tokens\ntext<eos>\n... 3 padding tokens\n"
    )
    (segment,) = json.loads(packer("show", "out", "--json").stdout)["segments"]
    assert segment["trained_tokens"] is None
    assert segment["file"] is segment["position"] is None
    assert segment["spans"] == [{"text": "text<eos>", "trained": None}]


def test_ids_without_a_tokenizer_are_shown_as_ids(folder: Path) -> None:
    write_ids(folder / "a.jsonl", ([7, 8, 9], [0, 1, 1]))
    assert packer("pack", "a.jsonl", "-l", 4, "-q", "-o", "out").exit_code == 0
    result = packer("show", "out")
    assert result.stderr == (
        "packer: showing token ids: the data came as input_ids, without a tokenizer\n"
    )
    assert result.stdout.endswith("\n7 ⟦8 9⟧\n... 1 padding token\n")
    assert show("--ids") == result.stdout  # asked for, so there is nothing to say
