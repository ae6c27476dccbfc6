"""Datasets that Megatron-LM's own writer has made, packed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from support import check_directory, recover_documents, succeeds

# those of the writers, about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore")
DOCUMENTS = [
    np.random.default_rng(i).integers(0, 60_000, length).tolist()
    for i, length in enumerate([3, 1, 0, 200, 64, 65, 17] * 5)
]


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
    succeeds("pack", f"{prefix}-3.idx", "-l", 64, "-q", "-o", tmp_path / "out")
    check_directory(tmp_path / "out")
    found = [tokens.tolist() for tokens in recover_documents(tmp_path / "out").values()]
    assert found == [document for document in DOCUMENTS[::2] + DOCUMENTS[1::2] if document]
