"""In Hugging Face's hands: datasets maps the result, transformers finds its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tiny_tokenizers as tiny
from datasets import Dataset, load_from_disk
from recipes import pack_records, run
from support import check_directory, jsonl, random_ids
from tiny_tokenizers import BOS, EOS
from transformers import AutoTokenizer

from packer_cli import open_packed

L = 512
COLUMNS = "input_ids,labels,attention_mask,cu_seqlens,segments,position_ids"
FIXED = {
    "input_ids": "int32",
    "labels": "int32",
    "attention_mask": "uint8",
    "position_ids": "int32",
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 2,000 rows of 512 tokens, 13 MB, in many shards."""
    folder = tmp_path_factory.mktemp("packed")
    records = map(json.loads, random_ids(2200, longest=900).splitlines())
    pack_records(folder, records, L, "--columns", COLUMNS, "--unit-bytes", "1M")
    assert len(check_directory(folder / "out")["shards"]) > 3
    return folder / "out"


def table_of(directory: Path) -> Any:
    """All rows, read with Arrow alone."""
    shards = open_packed(directory).manifest["shards"]
    return pa.concat_tables(
        pa.ipc.open_stream(pa.memory_map(str(directory / shard["file"]))).read_all()
        for shard in shards
    )


def test_datasets_maps_the_rows_of_the_shards(packed: Path) -> None:
    """And copies nothing of them into memory."""
    table, size = table_of(packed), sum(one.stat().st_size for one in packed.glob("*.arrow"))
    before = pa.total_allocated_bytes()
    dataset = load_from_disk(str(packed))
    mapped = {Path(file["filename"]).name for file in dataset.cache_files}
    assert mapped == {shard.name for shard in packed.glob("*.arrow")}
    chunks = [chunk for name in FIXED for chunk in dataset.data.column(name).chunks]
    views = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks]
    assert sum(view.nbytes for view in views) == len(dataset) * L * 13
    assert pa.total_allocated_bytes() - before < size / 100
    assert dataset.column_names == COLUMNS.split(",")
    assert len(dataset) == table.num_rows == open_packed(packed).manifest["rows"]
    for name, kind in FIXED.items():
        feature = dataset.features[name]
        assert (feature.feature.dtype, feature.length) == (kind, L)
    for name in dataset.column_names:
        ours = table.column(name).cast(dataset.data.schema.field(name).type)
        assert dataset.data.column(name).combine_chunks().equals(ours.combine_chunks())
    as_torch = dataset.with_format("torch")[:4]
    assert as_torch["input_ids"].tolist() == table["input_ids"][:4].to_pylist()
    assert as_torch["labels"].min() == -100


def test_datasets_with_the_same_first_shard_are_told_apart(folder: Path) -> None:
    """Dataset.map caches by fingerprint: equal ones would mix up the results."""
    found = []
    for last in ("y", "z"):
        Path("data.jsonl").write_bytes(jsonl("x" * 3000, last))
        run("pack", "data.jsonl", "-l", 64, "-t", "bytes", "-o", last, "--unit-bytes", "1K")
        found.append(load_from_disk(last)._fingerprint)
        first = open_packed(last).manifest["shards"][0]["sha256"]
        found.append(first)
    assert found[1] == found[3]
    assert found[0] != found[2]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_saved_dataset_as_input_gives_the_rows_of_its_jsonl(folder: Path, shards: int) -> None:
    texts = [f"document {i} " * (i % 17) for i in range(200)]
    dataset = Dataset.from_dict({"text": texts, "extra": range(200)})
    dataset.save_to_disk("saved", num_shards=shards)
    Path("data.jsonl").write_bytes(jsonl(*texts))
    for source, out in (("saved", "a"), ("data.jsonl", "b")):
        run("pack", source, "-l", 128, "-t", "bytes", "-o", out)
        check_directory(out)
    columns = ["input_ids", "labels", "attention_mask", "cu_seqlens"]
    a, b = (table_of(Path(out)).select(columns).combine_chunks() for out in "ab")
    assert a.equals(b)


def test_transformers_loads_the_copied_tokenizer(folder: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": BOS}
    tiny.save(folder / "tok", tiny.byte_level(), tokenizer_config=config)
    Path("data.jsonl").write_bytes(jsonl("the quick brown fox"))
    run("pack", "data.jsonl", "-l", 32, "-t", "tok", "-o", "out")
    tokenizer = AutoTokenizer.from_pretrained("./out")
    (row,) = load_from_disk("out")
    ids = [
        token for token, real in zip(row["input_ids"], row["attention_mask"], strict=True) if real
    ]
    assert ids == [*tokenizer.encode("the quick brown fox"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == f"the quick brown fox{EOS}"
