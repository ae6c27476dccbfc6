"""`packer show`: what is asked for as text, what is trained in it, and nothing hostile."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tiny_tokenizers
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from showing import IN_ORDER, on_terminal, show, show_json, texts_of, write_ids
from spoiling import arrow_file, edit, rewrite, tokenize
from support import assert_error, jsonl, pack, packer, packer_process, packer_script, shard_of
from tokenizers import Tokenizer

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
    (row,) = show_json()
    first, second = row.pop("segments")
    assert row == {"row": 0, "shard": shard_of().name, "shard_row": 0, "padding": 2}
    assert first == {
        "segment": 0, "file": "a.jsonl", "position": 0, "position_unit": "byte", "start": 0,
        "tokens": 6, "trained_tokens": 5, "text": "first<eos>",
        "spans": [{"text": "f", "trained": False}, {"text": "irst<eos>", "trained": True}],
    }  # fmt: skip
    assert (second["segment"], second["position"], second["text"]) == (1, 18, "second\n<eos>")


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


ABSENT = {
    "4": "ROW: 4: there is no row 4, only 0 to 3",
    "-5": "ROW: -5: there is no row -5, only 0 to 3",
    "0-4": "ROW: 0-4: there is no row 4, only 0 to 3",
    "2-1": "ROW: 2-1: ends before it begins",
    "one": "ROW: 'one' is not a row number",
    "²": "ROW: '²' is not a row number",
    "--segment=2": "--segment: 2 is not in row 0, which has 0 to 1",
    "--segment=-3": "--segment: -3 is not in row 0, which has 0 to 1",
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


def change_shard(change: Callable[[dict[str, Any]], None], **metadata: object) -> None:
    """Rewrite the only shard: `change` its columns as lists, and what it and the manifest say."""
    (path,) = Path("out").glob("shard-*.arrow")
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        table = reader.read_all()
    columns = table.to_pydict()
    change(columns)
    known = {name: table.schema.field(name) for name in table.schema.names}
    fields = [known.get(name, known["cu_seqlens"].with_name(name)) for name in columns]
    description = json.loads(table.schema.metadata[b"packer"]) | metadata
    schema = pa.schema(fields, {"packer": json.dumps(description)})
    table = pa.Table.from_pydict(columns, schema)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    edit(lambda manifest: manifest["shards"][0].update(bytes=path.stat().st_size))
    edit(lambda manifest: manifest["config"].update(metadata, columns=list(columns)))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("cu_seqlens", [0, 17], "row 0: is damaged: cu_seqlens ends outside 1..16: 17"),
        ("cu_seqlens", [0, 14], "segments does not match cu_seqlens"),
        ("segments", [{"file": 1, "position": 0, "start": 0}] * 2, "not an input of its unit: 1"),
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


# Texts, and how they are shown


def pack_with(document: tiny_tokenizers.Json, name: str, length: int = 64, **files: Any) -> None:
    tokenizer = tiny_tokenizers.save(
        Path("tok"), document, tokenizer_config={"eos_token": "</s>"}, **files
    )
    result = packer("pack", name, "-l", length, "-t", tokenizer, "-q", "-o", "out", *IN_ORDER)
    assert result.exit_code == 0, result.stderr


NASTY = "The quick  brown fox\n\n  naïve café, Привет 你好 👍🏽 don't"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram"])
def test_texts_come_back(folder: Path, kind: str) -> None:
    document = getattr(tiny_tokenizers, kind)()
    if kind != "byte_level":
        document["decoder"] = {
            "sentencepiece": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "unigram": {
                "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True,
            },
        }[kind]  # fmt: skip
    text = NASTY if kind != "unigram" else "The quick brown fox jumps."
    (folder / "a.jsonl").write_bytes(jsonl(text, text))
    pack_with(document, "a.jsonl", 400)
    assert texts_of() == [text + "</s>"] * 2
    first, rest = show_json()[0]["segments"][0]["spans"]
    assert first["trained"] is False
    assert rest["trained"] is True
    assert first["text"] + rest["text"] == text + "</s>"  # no space was lost between them


def test_only_cut_characters_are_unreadable(folder: Path) -> None:
    """Also where the tokens of a whole text are bytes: the library would give up all of them."""
    (folder / "a.jsonl").write_bytes(jsonl("ᐅᕝᕙᓗ"))
    fallback = tiny_tokenizers.sentencepiece()
    fallback["normalizer"] = None
    fallback["decoder"] = {"type": "ByteFallback"}
    pack_with(fallback, "a.jsonl")
    assert show().splitlines()[4] == "�⟦��ᕝᕙᓗ</s>⟧"
    assert texts_of() == ["ᐅᕝᕙᓗ</s>"]


@pytest.fixture
def any_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let packer pack ids that the tokenizer does not have, as other versions may have done."""
    monkeypatch.setattr(
        "packer_cli.tokenization.encoding._refuse_ids_above", lambda *arguments: None
    )


@pytest.mark.usefixtures("any_ids")
def test_special_and_unknown_tokens(folder: Path) -> None:
    document = tiny_tokenizers.byte_level()
    document = tiny_tokenizers.with_added_token(document, "<|im_start|>", 500)
    tokenizer = Tokenizer.from_str(json.dumps(document))
    user = tokenizer.encode("user\n").ids
    answer = tokenizer.encode("yes it is").ids
    ids = [0, 500, *user, *answer, 1, 99_999]
    flags = [0] * (2 + len(user)) + [1] * (len(answer) + 1) + [0]
    write_ids(folder / "a.jsonl", (ids, flags))
    pack_with(document, "a.jsonl")
    assert (
        show()
        .split("trained\n")[1]
        .startswith("<s><|im_start|>user\n⟦yes it is</s>⟧<id 99999>\n...")
    )
    (segment,) = show_json()[0]["segments"]
    assert segment["spans"] == [
        {"text": "<s><|im_start|>user\n", "trained": False},
        {"text": "yes it is</s>", "trained": True},
        {"text": "<id 99999>", "trained": False},
    ]


def test_an_id_below_0_in_a_damaged_row(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("text"))
    pack_with(tiny_tokenizers.byte_level(), "a.jsonl")
    whole = texts_of(0)[0]
    change_shard(lambda columns: columns["input_ids"][0].__setitem__(0, -5))
    assert texts_of(0) == ["<id -5>" + whole[1:]]


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


def test_a_tokenizer_that_cannot_be_loaded(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("text"))
    pack_with(tiny_tokenizers.byte_level(), "a.jsonl")
    (folder / "out" / "tokenizer.json").write_bytes(b"{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    edit(lambda manifest: manifest["tokenizer"].update(sha256=digest))
    message = "out/tokenizer.json: cannot be loaded: "
    assert_error(packer("show", "out"), 1, message)


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
    text = on_terminal("show", "out")
    assert text.startswith("\x1b[32mtrained tokens\x1b[0m\x1b[2m, others, \x1b[0m")
    assert "\n\x1b[2mf\x1b[0m\x1b[32mirst\x1b[0m\x1b[7;32m<eos>\x1b[0m\n" in text
    assert "\x1b[2ms\x1b[0m\x1b[32mecond↵\x1b[0m\n\x1b[7;32m<eos>\x1b[0m\n" in text
    assert "⟦" not in text
    without = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert without.split("\n", 1)[1].replace("↵", "") == show().split("\n", 1)[1].replace(
        "⟦", ""
    ).replace("⟧", "")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_without_colour(packed: Path, environment: dict[str, str]) -> None:
    assert on_terminal("show", "out", **environment) == show()


def test_pipes(packed: Path) -> None:
    result = packer_process("show", "out", env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert result.stdout.decode() == show()
    (row,) = packer_process("show", "out", "--json").stdout.splitlines()
    assert json.loads(row) == show_json()[0]


def test_an_encoding_without_brackets(packed: Path) -> None:
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
    text = show("0", "-1")
    assert text.splitlines()[2:] == [
        "document 0 of 3: a.jsonl byte 0, 6 tokens, 5 trained; documents-00000-000 document 0",
        "f⟦irst<eos>⟧",
        "",
        "document 2 of 3: b.jsonl byte 0, 6 tokens, 5 trained; documents-00003-000 document 0",
        "t⟦hird<eos>⟧",
    ]
    assert show().splitlines()[3] == "f⟦irst<eos>⟧"
    assert show("1", "--ids").splitlines()[3] == "115 ⟦101 99 111 110 100 256⟧"


@pytest.mark.usefixtures("tokenized")
def test_documents_as_json() -> None:
    (document,) = show_json("1")
    assert document == {
        "document": 1,
        "shard": sorted(Path("out").glob("documents-*"))[1].name,
        "shard_document": 0,
        "file": "a.jsonl",
        "position": 31,
        "position_unit": "byte",
        "tokens": 7,
        "trained_tokens": 6,
        "text": "second<eos>",
        "spans": [{"text": "s", "trained": False}, {"text": "econd<eos>", "trained": True}],
    }


def test_what_documents_are_trained_on(folder: Path) -> None:
    records = [{"input_ids": [1, 2, 3, 4], "labels": [-100, 2, -100, 4]}, {"input_ids": [5, 6]}]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records[:1])))
    tokenize("a.jsonl", "-o", "out")
    (document,) = json.loads("[" + packer("show", "out", "--json").stdout + "]")
    assert document["spans"] == [
        {"ids": [1], "trained": False}, {"ids": [2], "trained": True},
        {"ids": [3], "trained": False}, {"ids": [4], "trained": True},
    ]  # fmt: skip


@pytest.mark.usefixtures("tokenized")
def test_documents_that_are_not_there() -> None:
    assert_error(packer("show", "out", 3), 2, "ROW: 3: there is no document 3, only 0 to 2")
    assert_error(packer("show", "out", "x"), 2, "ROW: 'x' is not a document number")
    assert_error(packer("show", "out", "--segment", 0), 2, "--segment: is for rows")


@pytest.mark.usefixtures("tokenized")
def test_rows_say_where_their_documents_were_first() -> None:
    Path("out").rename("tokens")
    result = packer("pack", "tokens", "-l", 16, "--no-shuffle", "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
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


@pytest.mark.usefixtures("tokenized")
def test_damaged_documents() -> None:
    rewrite("documents", lambda columns: columns["file"].__setitem__(0, 5))
    name = arrow_file("documents").name
    assert_error(
        packer("show", "out"), 1, f"out/{name}: document 0 is of input 5, the manifest has"
    )
    rewrite("documents", lambda columns: columns["input_ids"].__setitem__(0, [1]))
    assert_error(packer("show", "out"), 1, "out/")


_FILES = {"web/a.jsonl": "web", "web/b.jsonl": "web", "code.jsonl": "code", "chat.jsonl": "chat"}


def test_segments_of_a_recipe_name_their_source() -> None:
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, max_length=512))
    segments = [one for row in show_json("0-9") for one in row["segments"]]
    assert {one["source"] for one in segments} == {"web", "code", "chat"}
    for one in segments:
        assert one["source"] == _FILES[one["file"]]
        assert one["tokenized"] == f"mix-tokenized/{one['source']}"
    titles = [line for line in show(0).splitlines() if line.startswith("── segment ")]
    for title, one in zip(titles, segments, strict=False):
        assert title.startswith(f"── segment {one['segment']}: {one['source']}: {one['file']} ")
    assert not [one for row in show_json(0) for one in row["segments"] if "source" not in one]


@pytest.mark.usefixtures("carried")
def test_carried_columns() -> None:
    summary = "   logprobs -1.5 to -0.5, mean -1; top 1 to 9, mean 5; reward 1\n"
    for name in ("out", "view"):
        text = packer("show", name).stdout
        assert f"(document 0 of tokens), 3 tokens, 2 trained\n{summary}1 ⟦2 3⟧\n" in text
        assert "logprobs -2 to 0.3, mean -0.85; top 2 to 1,200, mean 302.5; reward 0.5\n" in text
        row = json.loads(packer("show", name, "--json").stdout)
        first, second = (segment["carried"] for segment in row["segments"])
        assert first == {"logprobs": [-0.5, -1.5, -1], "top": [[1, 9]] * 3, "reward": 1}
        assert second == {"logprobs": [-2, 0.3], "top": [[2, 1200], [3, 5]], "reward": 0.5}
        assert json.loads(packer("show", "tokens", 1, "--json").stdout)["carried"] == second
        page = packer("show", name, "--html", "-").stdout
        data = re.search(r'id="data"[^>]*>([^<]+)<', page)
        assert data
        assert summary.strip().encode() in zlib.decompress(base64.b64decode(data[1]), -15)
    assert packer("show", "tokens").stdout.split("\n", 3)[3].startswith(summary)
