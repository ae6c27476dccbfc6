"""Megatron-LM's indexed datasets: `X.bin` of token ids, `X.idx` of sequences and documents.

`_IndexWriter` in megatron/core/datasets/indexed_dataset.py defines the index: a header of 9 bytes,
version uint64 1, the code of the token type uint8, the counts of sequences and of document
boundaries uint64, then lengths int32 in tokens, begins int64 in bytes, and boundaries int64 in
sequences, the first of which is 0. A document may be several sequences. What follows, a mode int8
for each sequence, tells text from other things; here all must be text, 0.
"""

from __future__ import annotations

import struct
from typing import IO, Any

import numpy as np

from packer_cli.config.formats import companions
from packer_cli.errors import DataError
from packer_cli.inputs.indexed_tokens import (
    COPY_AGAIN,
    IndexedReader,
    TokenIndex,
    numbers,
    open_index,
)
from packer_cli.records import InputFile, Int64

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
# The codes of integers; 6 and 7 are floating point.
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {kind: code for code, kind in TOKEN_TYPES.items()}
_ANEW = "write the dataset again, for example with Megatron-LM's tools/preprocess_data.py"


def header(kind: str, sequences: int, boundaries: int) -> bytes:
    """How an index begins. `kind`: of the tokens, one of TOKEN_TYPES."""
    return _HEADER.pack(MAGIC, VERSION, _CODES[kind], sequences, boundaries)


def sections(sequences: int, boundaries: int) -> tuple[int, int, int]:
    """Bytes of what follows the header: lengths, begins, boundaries."""
    return 4 * sequences, 8 * sequences, 8 * boundaries


class MegatronReader(IndexedReader):
    """A document is one of the index's, all its sequences end to end."""

    def read_index(self, file: InputFile) -> TokenIndex:
        path = companions(file.path, file.format)[0]
        with open_index(path) as (opened, size):
            kind, sequences, boundaries = _read_header(path, opened.read(_HEADER.size))
            _check_size(path, size, sequences, boundaries)
            ends = _sequence_ends(path, opened, kind.itemsize, sequences)
            if int(ends[-1]) * kind.itemsize != file.size:
                raise DataError(
                    f"{file.path}: {file.size} bytes, expected {int(ends[-1]) * kind.itemsize} by "
                    f"{path}",
                    COPY_AGAIN,
                )
            offsets = _document_ends(path, opened, ends, boundaries)
            if any(map(np.any, numbers(opened, "<i1", size - opened.tell()))):
                raise DataError(
                    f"{path}: has sequences of a mode other than 0, which are no text",
                    "only datasets of text can be packed",
                )
        return TokenIndex(kind, offsets)


def _read_header(path: str, data: bytes) -> tuple[np.dtype[Any], int, int]:
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise DataError(
            f"{path}: begins with {data[: len(MAGIC)]!r} and has {len(data)} bytes of a header, "
            f"expected {MAGIC!r} and {_HEADER.size}",
            f"only datasets of Megatron-LM are read; {_ANEW}",
        )
    _, version, code, sequences, boundaries = _HEADER.unpack(data)
    if version != VERSION:
        raise DataError(f"{path}: version {version}, expected {VERSION}", _ANEW)
    if code not in TOKEN_TYPES:
        known = ", ".join(f"{code} ({np.dtype(kind)})" for code, kind in TOKEN_TYPES.items())
        raise DataError(f"{path}: tokens of type code {code}, expected one of {known}", _ANEW)
    return np.dtype(TOKEN_TYPES[code]), sequences, boundaries


def _check_size(path: str, size: int, sequences: int, boundaries: int) -> None:
    expected = _HEADER.size + sum(sections(sequences, boundaries))
    if size not in (expected, expected + sequences):
        raise DataError(
            f"{path}: {size} bytes, expected {expected} for {sequences} sequences and "
            f"{boundaries} boundaries of documents",
            f"it was cut short or is damaged: copy it again; {_ANEW}",
        )


def _sequence_ends(path: str, opened: IO[bytes], token_size: int, sequences: int) -> Int64:
    """int64[sequences + 1] in tokens, from 0: where each sequence begins, and the last one ends."""
    ends = np.zeros(sequences + 1, np.int64)
    at = 0
    for lengths in numbers(opened, "<i4", sequences):
        _refuse(path, "sequence", at, lengths < 0, lengths, "tokens: {}, expected 0 or more")
        np.cumsum(lengths, out=ends[at + 1 : at + 1 + len(lengths)])
        ends[at + 1 : at + 1 + len(lengths)] += ends[at]
        at += len(lengths)
    at = 0
    for begins in numbers(opened, "<i8", sequences):
        expected = ends[at : at + len(begins)] * token_size
        text = "begins at byte {}, expected {}, the end of the one before"
        _refuse(path, "sequence", at, begins != expected, begins, text, expected)
        at += len(begins)
    return ends


def _document_ends(path: str, opened: IO[bytes], ends: Int64, boundaries: int) -> Int64:
    """int64[boundaries] in tokens."""
    sequences = len(ends) - 1
    offsets = np.empty(max(boundaries, 1), np.int64)
    at = before = 0
    for edges in numbers(opened, "<i8", boundaries):
        wrong = (edges < np.append(before, edges[:-1])) | (edges > sequences)
        if at == 0:
            wrong[0] |= edges[0] != 0
        text = f"is at sequence {{}}, expected 0 first, and no less than before up to {sequences}"
        _refuse(path, "boundary", at, wrong, edges, text)
        offsets[at : at + len(edges)] = ends[edges]
        at, before = at + len(edges), int(edges[-1])
    if not boundaries or before != sequences:
        raise DataError(
            f"{path}: the last of {boundaries} boundaries of documents is at sequence {before}, "
            f"expected {sequences}, the number of sequences",
            _ANEW,
        )
    return offsets


def _refuse(
    path: str, what: str, first: int, wrong: Any, values: Any, text: str, expected: Any = None
) -> None:
    """DataError for the first of some numbers of the index that is wrong."""
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        shown = text.format(values[at], None if expected is None else expected[at])
        raise DataError(f"{path}, {what} {first + at}: {shown}", _ANEW)
