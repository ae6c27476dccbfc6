"""`packer export` of tokenized directories: formats of documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exporting import files_of, nothing_at, table_of
from spoiling import arrow_file, rewrite, tokenize
from support import assert_error, jsonl, pack, packer

from packer_cli.export import FORMATS
from packer_cli.export.rows import documents

pytestmark = pytest.mark.usefixtures("folder")


def export(to: str) -> None:
    result = packer("export", "tokens", "--to", to, "-o", to, "-q")
    assert result.exit_code == 0, result.stderr


@pytest.fixture
def tokens(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*(letter * 9 for letter in "abcdefgh")))
    tokenize("a.jsonl", "-t", "bytes", "-o", "tokens", "--unit-bytes", 60)


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("to", ["megatron", "nanotron", "unpacked"])
def test_documents_are_those_of_rows_that_are_unpacked(to: str) -> None:
    export(to)
    pack("a.jsonl", "-l", 16, "--unit-bytes", 60, "--columns", "input_ids,cu_seqlens,segments")
    result = packer("export", "out", "--to", to, "-o", "again", "-q")
    assert result.exit_code == 0, result.stderr
    if to == "unpacked":
        assert table_of(Path(to)) == table_of(Path("again"))
        return
    assert files_of(Path(to)) == files_of(Path("again"))
    for name in files_of(Path(to)):
        assert (Path(to) / name).read_bytes() == (Path("again") / name).read_bytes()


def test_labels_say_what_is_trained_on(folder: Path) -> None:
    records = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, -100, 4]},
        {"input_ids": [5, 6], "labels": [5, 6]},
        {"input_ids": [7], "labels": [-100]},
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenize("a.jsonl", "-o", "tokens")
    export("unpacked")
    assert table_of(Path("unpacked")) == {
        "input_ids": [[1, 2, 3, 4], [5, 6], [7]],
        "labels": [[-100, 2, -100, 4], [-100, 6], [-100]],
    }
    result = packer("export", "tokens", "--to", "megatron", "-o", "m", "-q")
    assert_error(result, 2, "tokens: 1 of its tokens are not to be trained on, which --to megatron")
    assert nothing_at("m")


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize(
    "to", [name for name, one in FORMATS.items() if one.takes is not documents]
)
def test_formats_of_rows(to: str) -> None:
    result = packer("export", "tokens", "--to", to, "-o", "o", "-q")
    assert_error(result, 2, f"tokens: holds documents, and --to {to} is a format of rows")
    assert nothing_at("o")


@pytest.mark.usefixtures("tokens")
def test_damage() -> None:
    rewrite("documents", lambda columns: columns["input_ids"].__setitem__(1, [3] * 10), "tokens")
    result = packer("export", "tokens", "--to", "unpacked", "-o", "o", "-q")
    name = arrow_file("documents", "tokens").name
    assert_error(
        result, 1, f"tokens/{name}: document 1: its content_hash is not that of its tokens"
    )
    assert nothing_at("o")
