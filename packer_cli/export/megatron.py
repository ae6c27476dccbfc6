"""Megatron-LM: `documents.bin` and `documents.idx`, an `IndexedDataset` of whole documents.

`packer_cli/inputs/megatron.py` says what the index is. Megatron cuts the stream of documents anew,
so packed rows would mean nothing to it; it has no loss mask.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from packer_cli.export.rows import Rows
from packer_cli.export.writing import Exported, Files
from packer_cli.inputs.megatron import header, sections

_TOKENS = "<i4"


class Megatron(Files):
    """Token ids int32 end to end; a sequence is a document, in the order of the inputs."""

    takes = "documents"
    needs = ("segments",)
    keeps_mask = False

    def __init__(self, folder: Path, packed: Exported) -> None:
        super().__init__(folder, packed)
        count = packed.facts.documents
        begin = header(_TOKENS, count, count + 1)
        (folder / "documents.idx").write_bytes(begin)
        self._tokens = self._open("documents.bin")
        # the index has three parts, each written from its own offset on
        at, self._index = len(begin), []
        for size in sections(count, count + 1):
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
        self._tokens.write(part.ids.astype(_TOKENS).tobytes())
