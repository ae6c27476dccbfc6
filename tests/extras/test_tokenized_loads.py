"""Tokenized directories opened with `datasets`, as they are and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import load_from_disk
from spoiling import tokenize
from support import jsonl, packer

pytestmark = pytest.mark.usefixtures("folder")


def test_all_documents_and_no_index(folder: Path) -> None:
    texts = [letter * number for number, letter in enumerate("abcdefgh", 1)]
    (folder / "a.jsonl").write_bytes(jsonl(*texts))
    tokenize("a.jsonl", "-t", "bytes", "-o", "out", "--unit-bytes", 50)
    assert len(list(Path("out").glob("documents-*"))) > 1
    dataset = load_from_disk("out")
    assert dataset.column_names == ["input_ids", "file", "position"]
    assert [bytes(ids[:-1]).decode() for ids in dataset["input_ids"]] == texts
    assert dataset["file"][:] == [0] * 8
    lines = (folder / "a.jsonl").read_bytes()
    for position, text in zip(dataset["position"], texts, strict=True):
        assert json.loads(lines[position:].splitlines()[0]) == {"text": text}


def test_what_is_trained_on(folder: Path) -> None:
    records = [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}, {"input_ids": [4, 5]}]
    records[1]["labels"] = [4, 5]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenize("a.jsonl", "-o", "out")
    dataset = load_from_disk("out")
    assert dataset["input_ids"][:] == [[1, 2, 3], [4, 5]]
    assert dataset["trained"][:] == [[1, 2], [0, 2]]
    result = packer("export", "out", "--to", "unpacked", "-o", "unpacked", "-q")
    assert result.exit_code == 0, result.stderr
    assert load_from_disk("unpacked")["labels"][:] == [[-100, 2, -100], [-100, 5]]
