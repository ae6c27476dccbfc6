"""Tokenized directories as others read them: `datasets`, and the hashes of the package mmh3."""

from __future__ import annotations

from pathlib import Path

import datasets
import mmh3
import numpy as np
import pytest
from packer_cli._kernels import documents as kernels
from tokenizing import documents_in, tokenize

pytestmark = pytest.mark.usefixtures("folder")


def test_content_hashes() -> None:
    random_ = np.random.default_rng(0)
    offsets = np.cumsum(np.arange(70), dtype=np.int64)
    ids = random_.integers(0, 1 << 32, offsets[-1], dtype=np.uint32)
    out = np.zeros((len(offsets) - 1, 2), np.uint64)
    kernels.hash_documents(ids, offsets, out)
    for found, begin, end in zip(out.tolist(), offsets[:-1], offsets[1:], strict=True):
        data = ids[begin:end].astype("<u4").tobytes()
        assert tuple(found) == mmh3.hash64(data, signed=False, x64arch=True)


def test_datasets_opens_it() -> None:
    Path("a.jsonl").write_text('{"prompt": "2+2?", "completion": " 4"}\n' * 30)
    tokenize("a.jsonl", "--unit-bytes", "500")
    loaded = datasets.load_from_disk("tokens")
    assert set(loaded.column_names) == {"input_ids", "trained", "file", "position"}
    rows = [(row["file"], row["position"], row["input_ids"], row["trained"]) for row in loaded]
    assert rows == documents_in("tokens")
