"""`packer verify` of tokenized directories, and of rows packed from them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spoiling import arrow_file, edit, flip, rewrite, tokenize
from support import assert_error, jsonl, packer, shard_of
from verifying import assert_sound, changed, forge, problems

pytestmark = pytest.mark.usefixtures("folder")

TEXTS = [f"{'text' * (i % 7)} number {i}" for i in range(40)]


def two_texts(folder: Path) -> list[str]:
    """Two directories, one of several units and parts, with an empty document and a bad record."""
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS, "") + b"{broken\n" + jsonl("last"))
    (folder / "b.jsonl").write_bytes(jsonl(*TEXTS[::-3], "x" * 300))
    (folder / "c.jsonl").write_bytes(jsonl("another file"))
    tokenize(
        "a.jsonl", "c.jsonl", "-t", "bytes", "-o", "ta", "--on-error", "skip",
        "--unit-bytes", 400, "--shard-bytes", 200,
    )  # fmt: skip
    tokenize("b.jsonl", "-t", "bytes", "-o", "tb")
    return ["ta", "tb"]


def ids(folder: Path) -> list[str]:
    records = [
        {"input_ids": list(range(i, 2 * i + 1)),
         "labels": [-100 if k % 3 else k for k in range(i, 2 * i + 1)]}
        for i in range(1, 40)
    ]  # fmt: skip
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    tokenize("a.jsonl", "-o", "ta", "--unit-bytes", 2000)
    return ["ta"]


SOURCES: dict[str, Callable[[Path], list[str]]] = {"texts": two_texts, "ids": ids}


@pytest.mark.parametrize("source", SOURCES)
def test_sound_tokenized_directories(folder: Path, source: str) -> None:
    for name in SOURCES[source](folder):
        os.rename(name, "out")
        documents = json.loads(Path("out/manifest.json").read_bytes())["documents"]
        assert f", {documents} document" in assert_sound()
        for sample in (5, "all"):
            text = assert_sound("--against-inputs", "--sample", sample)
            assert "tokenized again: the same documents" in text
        os.rename("out", name)


PACKS: dict[str, list[object]] = {
    "shuffled": [],
    "next-fit": ["--strategy", "next-fit", "--seed", 3],
    "without segments": ["--columns", "input_ids,labels,cu_seqlens"],
    "view": ["--view"],
    "several units": ["--unit-bytes", 500, "--seed", 1],
}


WAYS = [("ids", "shuffled"), *(("texts", pack) for pack in PACKS)]


@pytest.mark.parametrize(("source", "pack"), WAYS)
def test_sound_packs(folder: Path, source: str, pack: str) -> None:
    names = SOURCES[source](folder)
    result = packer("pack", *names, "-l", 64, *PACKS[pack], "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
    assert_sound()
    for sample in (6, "all"):
        text = assert_sound("--against-inputs", "--sample", sample)
        assert "packed again: the same rows" in text


# Damage to a tokenized directory


@pytest.fixture
def tokenized(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    tokenize("a.jsonl", "-t", "bytes", "-o", "out")
    return folder / "out"


@pytest.mark.usefixtures("tokenized")
def test_a_column_whose_name_is_no_text() -> None:
    path = arrow_file("documents")
    forge(path, path.read_bytes().replace(b"input_ids", b"input\xffids"))
    assert f"out: {path.name}: not a readable shard: " in "".join(problems())


def set_at(column: str, at: int, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][at] = value

    return change


def swapped(column: str) -> Callable[[dict[str, list[Any]]], None]:
    """Those of documents 4 and 5: the sum stays."""

    def change(columns: dict[str, list[Any]]) -> None:
        values = columns[column]
        values[4], values[5] = values[5], values[4]

    return change


@pytest.mark.usefixtures("tokenized")
@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("documents", set_at("position", 3, 0), "its document 3 is at 0 of a.jsonl, not after"),
        ("documents", set_at("file", 3, 7), "document 3: is of input 7, there are 1"),
        ("documents", set_at("input_ids", 2, [999]), "document 2: holds the id 999, the tok"),
        ("documents", set_at("input_ids", 2, []), "document 2: has no tokens"),
        (
            "documents",
            set_at("input_ids", 2, [1, 2]),
            "document 2: its length is 2, the index says",
        ),
        ("index", set_at("length", 5, 1), "the sum of length is "),
        ("index", swapped("trained_tokens"), "document 4: its trained_tokens is "),
        ("index", set_at("content_hash", 5, bytes(16)), "document 5: its content_hash is not"),
    ],
)
def test_damage_in_documents_with_the_digests_of_it(
    kind: str, change: Callable[[dict[str, list[Any]]], None], text: str
) -> None:
    rewrite(kind, change)
    lines = [line for line in problems() if "units.jsonl" not in line and ".json:" not in line]
    assert any(text in line for line in lines), lines


@pytest.mark.parametrize(
    ("stretches", "text"),
    [
        ([2, 1], "document 0: its trained is [2, 1], not ascending within its 2 tokens"),
        ([0, 1, 2], "document 0: its trained has an odd number of edges"),
    ],
)
def test_damaged_stretches(folder: Path, stretches: list[int], text: str) -> None:
    (folder / "a.jsonl").write_text('{"input_ids": [1, 2], "labels": [-100, 2]}\n')
    tokenize("a.jsonl", "-o", "out")
    assert_sound()
    rewrite("documents", set_at("trained", 0, stretches))
    assert any(text in line for line in problems())


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("logprobs", [0.5], "document 1: has 1 values of logprobs, and 2 tokens"),
        ("logprobs", [0.5, np.nan], "document 1: logprobs holds a value that is not finite: nan"),
        ("logprobs", [0.5, 3.5], "holds other values of logprobs"),
        ("won", 3, "document 1: won holds neither 0 nor 1: 3"),
    ],
)
def test_damaged_carried_values(folder: Path, column: str, value: Any, text: str) -> None:
    records = [{"input_ids": [1], "logprobs": [-0.5], "won": True},
               {"input_ids": [2, 3], "logprobs": [-0.5, -0.25], "won": False}]  # fmt: skip
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    tokenize("a.jsonl", "-o", "out", "--carry", "logprobs:float32", "--carry", "won:bool")
    assert_sound("--against-inputs", "--sample", "all")
    rewrite("documents", set_at(column, 1, value))
    assert any(text in line for line in problems()), problems()


@pytest.mark.usefixtures("tokenized")
def test_manifest_that_names_no_index() -> None:
    edit(lambda manifest: manifest["shards"].pop())
    for command in (
        ["verify", "out", "-q"], ["pack", "out", "-l", 64, "-o", "rows", "-q"], ["show", "out"]
    ):  # fmt: skip
        assert_error(packer(*command), 1, "out/manifest.json: ", "followed by its index")
    assert not Path("rows").exists()


# Packs whose tokenized directories changed


@pytest.fixture
def packed(folder: Path) -> Path:
    assert two_texts(folder) == ["ta", "tb"]
    assert packer("pack", "ta", "tb", "-l", 64, "-q", "-o", "out").exit_code == 0
    return folder / "out"


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("sample", ["5", "all"])
def test_tokenized_directories_that_changed(sample: str) -> None:
    how = ["--against-inputs", "--sample", sample]
    path = arrow_file("documents", "ta")
    flip(path, path.stat().st_size // 2)
    (line,) = problems(*how)
    assert line.startswith(f"out: {path}: its sha256 is ")
    flip(path, path.stat().st_size // 2)
    assert_sound(*how)
    tokenize("b.jsonl", "-t", "bytes", "-o", "tb", "--no-eos", "--overwrite")
    (line,) = problems(*how)
    assert "tb/manifest.json: " in line
    shutil.rmtree("tb")
    (line,) = problems(*how)
    assert line.startswith("out: tb: ")


@pytest.mark.usefixtures("packed")
def test_rows_are_held_against_documents_and_documents_against_their_inputs() -> None:
    Path("b.jsonl").write_bytes(Path("b.jsonl").read_bytes().replace(b"number", b"numbex"))
    assert_sound("--against-inputs", "--sample", "all")
    result = packer("verify", "tb", "--against-inputs")
    assert (result.exit_code, result.stdout.count("b.jsonl: its sha256 is ")) == (1, 1)


@pytest.mark.usefixtures("packed")
def test_rows_that_hold_other_tokens_than_the_documents() -> None:
    path = shard_of()
    path.write_bytes(changed(path, "input_ids", 3, ord("z")))
    forge(path, changed(path, "labels", 3, ord("z")))
    (line,) = problems("--against-inputs", "--sample", "all")
    assert ": row 0: its inputs give another input_ids" in line


@pytest.mark.usefixtures("tokenized")
def test_documents_that_are_not_those_of_the_inputs() -> None:
    def change(columns: dict[str, list[Any]]) -> None:
        for number in range(4, len(columns["position"])):
            columns["position"][number] += 1

    rewrite("documents", change)
    assert_sound()
    (line,) = problems("--against-inputs")
    assert ": document 4: its inputs give another position" in line
