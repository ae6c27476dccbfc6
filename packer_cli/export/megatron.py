"""Megatron-LM: `documents.bin` and `documents.idx`, an `IndexedDataset` of whole documents.

`_IndexWriter` in megatron/core/datasets/indexed_dataset.py defines the index: a header of 9 bytes,
version uint64 1, the code of the token type uint8, the counts of sequences and of document
boundaries uint64, then lengths int32, byte offsets int64, and boundaries int64. Megatron cuts the
stream of documents itself, so packed rows would mean nothing to it; it has no loss mask.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from packer_cli.export.rows import Rows
from packer_cli.export.writing import Exported, Files

_HEADER, _VERSION, _INT32 = b"MMIDIDX\x00\x00", 1, 4


class Megatron(Files):
    """Token ids int32 end to end; a sequence is a document, in the order of the inputs."""

    takes = "documents"
    needs = ("segments",)
    keeps_mask = False

    def __init__(self, folder: Path, packed: Exported) -> None:
        super().__init__(folder, packed)
        count = packed.facts.documents
        header = _HEADER + struct.pack("<QBQQ", _VERSION, _INT32, count, count + 1)
        (folder / "documents.idx").write_bytes(header)
        self._tokens = self._open("documents.bin")
        # the index has three parts, each written from its own offset on
        at, self._index = len(header), []
        for size in (4 * count, 8 * count, 8 * (count + 1)):
            self._index.append(self._open("documents.idx", "r+b"))
            self._index[-1].seek(at)
            at += size
        self._seen = 0
        self._index[2].write(bytes(8))

    def write(self, part: Rows) -> None:
        before, self._seen = self._seen, self._seen + len(part.lengths)
        lengths, pointers, boundaries = self._index
        lengths.write(part.lengths.astype("<i4").tobytes())
        pointers.write((self._tokens.tell() + part.offsets[:-1] * 4).astype("<i8").tobytes())
        boundaries.write(np.arange(before + 1, self._seen + 1, dtype="<i8").tobytes())
        self._tokens.write(part.ids.astype("<i4").tobytes())
