"""`packer show`: what is asked for as text, what is trained in it, and nothing hostile."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from approving import assert_approved
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from showing import IN_ORDER, on_terminal, show, show_json, texts_of, write_ids
from spoiling import edit, rewrite, tokenize
from support import (
    assert_error,
    jsonl,
    pack,
    packer,
    packer_process,
    packer_script,
    shard_of,
    succeeds,
)

pytestmark = pytest.mark.usefixtures("folder")


def test_rows_without_colour(packed: Path) -> None:
    """Also a full one, and a later part of a document; as token ids; one segment."""
    assert show("--segment", 1) == show("--segment", -1)
    ways: list[tuple[object, ...]] = [(), (2, 3), ("--ids", 0, 2), ("--segment", 1)]
    assert_approved("show", *(show(*way) for way in ways))


def test_json(packed: Path) -> None:
    (row,) = show_json()
    first, second = row.pop("segments")
    assert row == {"row": 0, "shard": shard_of().name, "shard_row": 0, "padding": 2}
    assert first == {
        "segment": 0, "file": "a.jsonl", "position": 0, "position_unit": "byte", "start": 0,
        "tokens": 6, "trained_tokens": 5, "text": "first<eos>",
        "spans": [{"text": "f", "trained": False}, {"text": "irst<eos>", "trained": True}],
    }  # fmt: skip
    (alone,) = show_json("--segment", 1)
    assert (alone["segments"], alone["padding"]) == ([second], 2)
    segment = show_json("--ids")[0]["segments"][0]
    assert segment["text"] is None
    assert segment["spans"] == [
        {"ids": [102], "trained": False},
        {"ids": [105, 114, 115, 116, 256], "trained": True},
    ]


@pytest.mark.parametrize(
    ("given", "shown"),
    [([], [0]), ([3, 0, 3], [3, 0, 3]), (["1-2"], [1, 2]), (["1-1", "-4"], [1, 0]), ([-1], [3]),
     (["-3--1"], [1, 2, 3]), (["2--1", "--ids"], [2, 3])],
)  # fmt: skip
def test_which_rows(packed: Path, given: list[object], shown: list[int]) -> None:
    assert [row["row"] for row in show_json(*given)] == shown


ABSENT = {
    "4": "ROW: 4: there is no row 4, only 0 to 3",
    "-5": "ROW: -5: there is no row -5, only 0 to 3",
    "0-4": "ROW: 0-4: there is no row 4, only 0 to 3",
    "2-1": "ROW: 2-1: ends before it begins",
    "²": "ROW: '²' is not a row number",
    "--segment=2": "--segment: 2 is not in row 0, which has 0 to 1",
}


def test_what_is_not_there(packed: Path) -> None:
    for row, message in ABSENT.items():
        assert_error(packer("show", "out", row), 2, message)


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


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("cu_seqlens", [0, 17], "row 0: is damaged: cu_seqlens ends outside 1..16: 17"),
        ("cu_seqlens", [0, 14], "segments does not match cu_seqlens"),
        ("segments", [{"file": 1, "position": 0, "start": 0}] * 2, "not an input of its unit: 1"),
    ],
)
def test_damaged_rows(packed: Path, column: str, value: object, message: str) -> None:
    rewrite("shard", lambda columns: columns[column].__setitem__(0, value))
    assert_error(packer("show", "out"), 1, f"{shard_of()}: row 0: ", message)
    assert texts_of(1) == ["third\n\nline<eos>"]


def test_without_labels_all_is_plain_and_a_note_says_so(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("text"))
    pack("a.jsonl", "-l", 8, "--columns", "input_ids,cu_seqlens")
    result = packer("show", "out")
    assert (result.exit_code, result.stdout.splitlines()[2]) == (0, "text<eos>")
    assert result.stderr == (
        "packer: the labels column was not written: which tokens are trained on is unknown\n"
    )
    (segment,) = json.loads(packer("show", "out", "--json").stdout)["segments"]
    assert segment["trained_tokens"] is None
    assert segment["file"] is segment["position"] is None
    assert segment["spans"] == [{"text": "text<eos>", "trained": None}]


def test_ids_without_a_tokenizer_are_shown_as_ids(folder: Path) -> None:
    write_ids(folder / "a.jsonl", ([7, 8, 9], [0, 1, 1]))
    succeeds("pack", "a.jsonl", "-l", 4, "-q", "-o", "out")
    result = packer("show", "out")
    assert result.stderr == (
        "packer: showing token ids: the data came as input_ids, without a tokenizer\n"
    )
    assert result.stdout.endswith("\n7 ⟦8 9⟧\n... 1 padding token\n")
    assert show("--ids") == result.stdout  # asked for, so there is nothing to say


# Texts, and how they are shown


def pack_with(document: tiny_tokenizers.Json, name: str, length: int = 64, **files: Any) -> None:
    tokenizer = tiny_tokenizers.save(
        Path("tok"), document, tokenizer_config={"eos_token": "</s>"}, **files
    )
    succeeds("pack", name, "-l", length, "-t", tokenizer, "-q", "-o", "out", *IN_ORDER)


NASTY = "The quick  brown fox\n\n  naïve café, Привет 你好 👍🏽 don't"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_texts_come_back(folder: Path, kind: str) -> None:
    document = getattr(tiny_tokenizers, kind)()
    if kind == "sentencepiece":
        document["decoder"] = {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]}  # fmt: skip
    (folder / "a.jsonl").write_bytes(jsonl(NASTY, NASTY))
    pack_with(document, "a.jsonl", 400)
    assert texts_of() == [NASTY + "</s>"] * 2
    spans = show_json()[0]["segments"][0]["spans"]  # no space was lost between them
    assert "".join(one["text"] for one in spans) == NASTY + "</s>"


def test_only_cut_characters_are_unreadable(folder: Path) -> None:
    """Also where the tokens of a whole text are bytes: the library would give up all of them."""
    (folder / "a.jsonl").write_bytes(jsonl("ᐅᕝᕙᓗ"))
    fallback = tiny_tokenizers.sentencepiece()
    fallback["normalizer"] = None
    fallback["decoder"] = {"type": "ByteFallback"}
    pack_with(fallback, "a.jsonl")
    assert show().splitlines()[4] == "�⟦��ᕝᕙᓗ</s>⟧"
    assert texts_of() == ["ᐅᕝᕙᓗ</s>"]


def test_the_tokenizer_is_gone_or_another(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("text"))
    pack_with(tiny_tokenizers.byte_level(), "a.jsonl")
    text = show()
    path = folder / "out" / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content + b"\n")
    assert_error(packer("show", "out"), 1, "out/tokenizer.json: its sha256 is ", "the manifest")
    ids = show("--ids")
    path.unlink()
    result = packer("show", "out")
    assert result.stderr == (
        "packer: showing token ids: out/tokenizer.json: cannot be read: No such file or directory\n"
    )
    assert result.stdout == ids != text
    path.write_bytes(b"{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    edit(lambda manifest: manifest["tokenizer"].update(sha256=digest))
    assert_error(packer("show", "out"), 1, "out/tokenizer.json: cannot be loaded: ")


HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\x00\u202e\u2028\ufeff ⟦x⟧ [bold]\ttab \\x1b"


def test_hostile_text_stays_harmless(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(HOSTILE))
    (folder / "a.jsonl").rename(folder / "a\x1b[31m\n.jsonl")
    pack("a\x1b[31m\n.jsonl", "-l", 128)
    text = show()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e\ufeff]", text)
    head, shown = text.splitlines()[3:5]
    assert head.startswith("── segment 0: a\\x1b[31m\\n.jsonl byte 0, ")
    assert shown == (
        r"\x1b⟦[31mred\x1b]0;title\x07\x9b2J\r\x00\u202e\u2028\ufeff \u27e6x\u27e7 [bold]"
        "\ttab \\x1b<eos>⟧"
    )
    raw = packer("show", "out", "--json").stdout
    assert raw.isascii()
    assert raw.isprintable() or raw.count("\n") == 1
    assert texts_of() == [HOSTILE + "<eos>"]


def test_colours_on_a_terminal(packed: Path) -> None:
    assert_approved("show in color", on_terminal("show", "out"))
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert on_terminal("show", "out", **environment) == show()


def test_pipes(packed: Path) -> None:
    result = packer_process("show", "out", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0
    text = result.stdout.decode("ascii")
    assert "\n-- segment 0: a.jsonl byte 0, 6 tokens, 5 trained\nf[[irst<eos>]]\n" in text


def test_a_reader_that_leaves(many_shards: Path) -> None:
    command = f"{packer_script()} show out 0--1 | head -n 1"
    result = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout == "⟦trained tokens⟧, others\n"
    assert result.stderr == ""


# Documents, and what they came through


@pytest.fixture
def tokenized(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("first", "", "second"))
    (folder / "b.jsonl").write_bytes(jsonl("third"))
    tokenize("a.jsonl", "b.jsonl", "-t", "bytes", "-o", "out", "--unit-bytes", 20)


@pytest.mark.usefixtures("tokenized")
def test_documents_as_text() -> None:
    assert_approved("show of documents", show("0", "-1"), show("1", "--ids"))


@pytest.mark.usefixtures("tokenized")
def test_documents_as_json() -> None:
    (document,) = show_json("1")
    assert document == {
        "document": 1, "shard": sorted(Path("out").glob("documents-*"))[1].name,
        "shard_document": 0, "file": "a.jsonl", "position": 31, "position_unit": "byte",
        "tokens": 7, "trained_tokens": 6, "text": "second<eos>",
        "spans": [{"text": "s", "trained": False}, {"text": "econd<eos>", "trained": True}],
    }  # fmt: skip
    write_ids(Path("a.jsonl"), ([1, 2, 3, 4], [0, 1, 0, 1]))
    tokenize("a.jsonl", "-o", "of-ids")
    spans = json.loads(packer("show", "of-ids", "--json").stdout)["spans"]
    assert [(*one["ids"], one["trained"]) for one in spans] == [
        (1, False), (2, True), (3, False), (4, True)
    ]  # fmt: skip


@pytest.mark.usefixtures("tokenized")
def test_documents_that_are_not_there() -> None:
    assert_error(packer("show", "out", 3), 2, "ROW: 3: there is no document 3, only 0 to 2")
    assert_error(packer("show", "out", "x"), 2, "ROW: 'x' is not a document number")
    assert_error(packer("show", "out", "--segment", 0), 2, "--segment: is for rows")


@pytest.mark.usefixtures("tokenized")
def test_rows_say_where_their_documents_were_first() -> None:
    Path("out").rename("tokens")
    succeeds("pack", "tokens", "-l", 16, "--no-shuffle", "-q", "-o", "out")
    found = {}
    for row in show_json("0", "-1"):
        for one in row["segments"]:
            place = one["file"], one["position"], one["position_unit"]
            found[one["text"]] = *place, one["tokenized"], one["document"]
    assert found == {
        "first<eos>": ("a.jsonl", 0, "byte", "tokens", 0),
        "second<eos>": ("a.jsonl", 31, "byte", "tokens", 1),
        "third<eos>": ("b.jsonl", 0, "byte", "tokens", 2),
    }
    assert ": a.jsonl byte 0 (document 0 of tokens), 6 tokens, 5 trained" in show("0", "-1")
    tokenize("b.jsonl", "-t", "bytes", "-o", "tokens", "--overwrite")
    changed = packer("show", "out", 0)
    assert "which inputs were tokenized is unknown: tokens: was changed since" in changed.stderr
    assert "tokens document 0, 6 tokens" in changed.stdout
    shutil.rmtree("tokens")
    gone = packer("show", "out", 0)
    assert "packer: which inputs were tokenized is unknown: tokens" in gone.stderr
    assert "tokens document 0, 6 tokens" in gone.stdout


_FILES = {"web/a.jsonl": "web", "web/b.jsonl": "web", "code.jsonl": "code", "chat.jsonl": "chat"}


def test_segments_of_a_recipe_name_their_source() -> None:
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, max_length=512))
    segments = [one for row in show_json("0-9") for one in row["segments"]]
    assert {one["source"] for one in segments} == {"web", "code", "chat"}
    for one in segments:
        assert one["source"] == _FILES[one["file"]]
        assert one["tokenized"] == f"mix-tokenized/{one['source']}"
    source, file = segments[0]["source"], segments[0]["file"]
    assert f"\n── segment 0: {source}: {file} " in show(0)


@pytest.mark.usefixtures("carried")
def test_carried_columns() -> None:
    assert_approved("show of carried columns", *(packer("show", name).stdout
                                                 for name in ("out", "tokens")))  # fmt: skip
    for name in ("out", "view"):
        assert packer("show", name).stdout == packer("show", "out").stdout
        row = json.loads(packer("show", name, "--json").stdout)
        first, second = (segment["carried"] for segment in row["segments"])
        assert first == {"logprobs": [-0.5, -1.5, -1], "top": [[1, 9]] * 3, "reward": 1}
        assert second == {"logprobs": [-2, 0.3], "top": [[2, 1200], [3, 5]], "reward": 0.5}
        assert json.loads(packer("show", "tokens", 1, "--json").stdout)["carried"] == second


def test_segments_that_begin_at_multiples(folder: Path) -> None:
    """A segment has its real length, wherever the next one begins."""
    Path("a.jsonl").write_text(jsonl("first", "second").decode())
    pack("a.jsonl", "-l", 32, "--segment-multiple", 8, *IN_ORDER)
    assert texts_of(0) == ["first<eos>", "second<eos>"]
