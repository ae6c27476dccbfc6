"""Datasets that Megatron-LM's and datatrove's own writers have made, packed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from support import check_directory, packer, recover_documents

from packer_cli import open_packed

# those of the writers, about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore")
DOCUMENTS = [
    np.random.default_rng(i).integers(0, 60_000, length).tolist()
    for i, length in enumerate([3, 1, 0, 200, 64, 65, 17] * 5)
]


def documents_packed(path: Path, tmp_path: Path) -> list[list[int]]:
    result = packer("pack", path, "-l", 64, "-q", "--keep-untrained", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    check_directory(tmp_path / "out")
    documents = recover_documents(tmp_path / "out")
    there = [i for i, document in enumerate(DOCUMENTS) if document]
    assert [position for _, position in documents] == there
    return [documents[0, i].tolist() if i in there else [] for i in range(len(DOCUMENTS))]


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("multimodal", [False, True])
def test_megatron(tmp_path: Path, kind: type, multimodal: bool) -> None:
    indexed = import_module("megatron.core.datasets.indexed_dataset")
    prefix, modes = f"{tmp_path}/data", [0] if multimodal else None
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=kind, multimodal=multimodal)
    for document in DOCUMENTS[::2]:
        for part in np.array_split(np.array(document, np.int64), 3):  # sequences of a document
            builder.add_item(torch.tensor(part))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    # and one merged with it, as tools/merge_datasets.py does
    other = indexed.IndexedDatasetBuilder(f"{prefix}-2.bin", dtype=kind, multimodal=multimodal)
    for document in DOCUMENTS[1::2]:
        other.add_document(torch.tensor(document, dtype=torch.int64), [len(document)], modes)
    other.finalize(f"{prefix}-2.idx")
    merged = indexed.IndexedDatasetBuilder(f"{prefix}-3.bin", dtype=kind, multimodal=multimodal)
    merged.add_index(prefix)
    merged.add_index(f"{prefix}-2")
    merged.finalize(f"{prefix}-3.idx")
    result = packer("pack", f"{prefix}-3.idx", "-l", 64, "-q", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    check_directory(tmp_path / "out")
    found = [tokens.tolist() for tokens in recover_documents(tmp_path / "out").values()]
    assert found == [document for document in DOCUMENTS[::2] + DOCUMENTS[1::2] if document]


@pytest.mark.parametrize("token_size", [2, 4])
@pytest.mark.parametrize("with_metadata", [False, True])
def test_datatrove(tmp_path: Path, token_size: int, with_metadata: bool) -> None:
    tokenizer = import_module("datatrove.pipeline.tokens.tokenizer")
    file = tokenizer.TokenizedFile(
        str(tmp_path), "data.ds", token_size=token_size, save_loss_metadata=True,
        tokenizer_name_or_path="gpt2" if with_metadata else None, save_final_metadata=with_metadata,
    )  # fmt: skip
    for document in DOCUMENTS:
        file.write(document, np.arange(len(document)) % 3 > 0)
    file.close()
    shuffled = file.copy("again", np.arange(len(DOCUMENTS)))
    assert documents_packed(tmp_path / shuffled.filename, tmp_path) == DOCUMENTS
    packed = open_packed(tmp_path / "out")
    for shard in packed.manifest["shards"]:
        for batch in packed.batches(shard):
            ids = np.array(batch.column("input_ids").to_pylist())
            labels = np.array(batch.column("labels").to_pylist())
            segments, edges = (
                batch.column(name).to_pylist() for name in ("segments", "cu_seqlens")
            )
            for row in range(len(ids)):
                for segment, begin, end in zip(
                    segments[row], edges[row], edges[row][1:], strict=False
                ):
                    index = np.arange(segment["start"], segment["start"] + end - begin)
                    trained = index % 3 > 0
                    trained[0] = False  # nothing in the row predicts it
                    expected = np.where(trained, ids[row, begin:end], -100)
                    assert labels[row, begin:end].tolist() == expected.tolist()
