"""`packer show` of tokenized directories, and of rows packed from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from showing import show, show_json
from spoiling import arrow_file, rewrite, tokenize
from support import assert_error, jsonl, packer

pytestmark = pytest.mark.usefixtures("folder")


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


def test_what_is_trained_on(folder: Path) -> None:
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
def test_damage() -> None:
    rewrite("documents", lambda columns: columns["file"].__setitem__(0, 5))
    name = arrow_file("documents").name
    assert_error(
        packer("show", "out"), 1, f"out/{name}: document 0 is of input 5, the manifest has"
    )
    rewrite("documents", lambda columns: columns["input_ids"].__setitem__(0, [1]))
    assert_error(packer("show", "out"), 1, "out/")
