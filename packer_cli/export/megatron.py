"""Megatron-LM: `documents.bin` and `documents.idx`, an `IndexedDataset` of whole documents.

`_IndexWriter` in megatron/core/datasets/indexed_dataset.py defines the index: a header of 9 bytes,
version uint64 1, the code of the token type uint8, the counts of sequences and of document
boundaries uint64, then lengths int32, byte offsets int64, and boundaries int64. Megatron cuts the
stream of documents anew, so packed rows would mean nothing to it; it has no loss mask.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from packer_cli.export.rows import Rows
from packer_cli.export.writing import Writer
from packer_cli.packed import PackedDirectory

_HEADER, _VERSION, _INT32 = b"MMIDIDX\x00\x00", 1, 4


class Megatron(Writer):
    """Token ids int32 end to end; a sequence is a document, in the order of the inputs."""

    takes = "documents"
    needs = ("segments",)
    keeps_mask = False

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        count = packed.manifest["documents"]
        header = _HEADER + struct.pack("<QBQQ", _VERSION, _INT32, count, count + 1)
        path = folder / "documents.idx"
        path.write_bytes(header)
        self._tokens = open(folder / "documents.bin", "wb")  # noqa: SIM115
        # mapped, so that an index of any length takes no memory
        self._lengths = np.memmap(path, np.int32, "r+", len(header), (count,))
        at = len(header) + self._lengths.nbytes
        self._pointers = np.memmap(path, np.int64, "r+", at, (count,))
        boundaries = np.memmap(path, np.int64, "r+", at + self._pointers.nbytes, (count + 1,))
        boundaries[:] = np.arange(count + 1)
        boundaries.flush()
        self._seen = 0

    def write(self, part: Rows) -> None:
        here = slice(self._seen, self._seen + len(part.lengths))
        self._lengths[here] = part.lengths
        self._pointers[here] = self._tokens.tell() + part.offsets[:-1] * 4
        self._tokens.write(part.ids.tobytes())
        self._seen = here.stop

    def close(self) -> None:
        self._tokens.close()
        self._lengths.flush()
        self._pointers.flush()
