"""Read Megatron-LM's datasets: token ids end to end in `X.bin`, and document ends in `X.idx`.

Positions and slices count documents. The index is read once and held, 8 bytes a document. Tokens
are read a few megabytes at a time.

`_IndexWriter` in megatron/core/datasets/indexed_dataset.py defines the index: a header of 9 bytes,
version uint64 1, the code of the token type uint8, the counts of sequences and of document
boundaries uint64, then lengths int32 in tokens, begins int64 in bytes, and boundaries int64 in
sequences, beginning with 0. A document may be several sequences. The modes at the end, int8 for
each sequence, mark other things than text; all must be 0, text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli import storage
from packer_cli.errors import DataError, InternalError, os_errors
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import BLOCK_BYTES, OpenInput, open_source, other_content
from packer_cli.inputs.formats import DocumentReader, FirstRecords
from packer_cli.inputs.record_columns import ReadColumns, parts_of, records_of
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import companion
from packer_cli.options.shapes import Shape
from packer_cli.records import (
    BadRecord,
    DocumentCounts,
    InputFile,
    Int64,
    Records,
    Slice,
    offsets_of,
)

_BYTES_PER_TOKEN = 4
_SKIP = "fix the document, or use --on-error skip"
_DAMAGED = "it was cut short or is damaged: copy it again, or write the dataset again"
_COPY_AGAIN = "they are not of one dataset, or one was cut short: copy or write both again"
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
# The codes of integers; 6 and 7 are floating point.
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {kind: code for code, kind in TOKEN_TYPES.items()}


def header(kind: str, sequences: int, boundaries: int) -> bytes:
    """Return the header of an index. `kind`: type of the tokens, a value of TOKEN_TYPES."""
    return _HEADER.pack(MAGIC, VERSION, _CODES[kind], sequences, boundaries)


def sections(sequences: int, boundaries: int) -> tuple[int, int, int]:
    """Return the bytes of the arrays after the header: lengths, begins, boundaries."""
    return 4 * sequences, 8 * sequences, 8 * boundaries


class TokenIndex(NamedTuple):
    """Places of a file's documents.

    kind     data type of the tokens
    offsets  int64[documents + 1], in tokens: document i is offsets[i]..offsets[i + 1]
    """

    kind: np.dtype[Any]
    offsets: Int64


class MegatronReader(DocumentReader):
    """Reader of datasets: a document is one of the index, with its sequences end to end."""

    def index(self, file: InputFile) -> TokenIndex:
        """Read and check the index. Raises DataError if it does not belong to the file."""
        return _index(storage.identity(file.path), file)

    def first(self, file: InputFile, config: DocumentConfig) -> FirstRecords | None:
        if not self.documents(file).count:
            return None
        return FirstRecords([config.renamed.get("input_ids", "input_ids")])

    def documents(self, file: InputFile) -> DocumentCounts:
        offsets = self.index(file).offsets
        return DocumentCounts(len(offsets) - 1, int(offsets[-1]) * _BYTES_PER_TOKEN)

    def edges(self, file: InputFile, parts: int) -> list[int]:
        offsets = self.index(file).offsets
        even = np.linspace(0, int(offsets[-1]), parts + 1).astype(np.int64)[1:-1]
        inner = np.searchsorted(offsets, even).tolist()
        return sorted({0, *inner, len(offsets) - 1})

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        index = self.index(file)
        stop = len(index.offsets) - 1 if part.stop is None else part.stop
        offsets = index.offsets[part.start : stop + 1]
        size, longest = index.kind.itemsize, byte_streams.MAX_LINE_BYTES
        with open_source(file, int(offsets[0]) * size) as source:
            sizes = np.diff(offsets) * size
            for first, last in parts_of(sizes, sizes, longest, max(len(sizes), 1)):
                left = int(offsets[last] - offsets[first]) * size
                position = part.start + first
                if left > longest:
                    while left:  # a few megabytes at a time, to the next document
                        left -= len(_exactly(file.path, source, min(left, BLOCK_BYTES)))
                    reason = f"the document is longer than {longest} bytes"
                    bad = [BadRecord(position, reason, byte_streams.CUT)]
                    yield Records(np.empty(0, np.int64), bad=bad, consumed=source.consumed())
                    continue
                ids = np.frombuffer(_exactly(file.path, source, left), index.kind)
                ends = offsets[first : last + 1] - offsets[first]
                positions = np.arange(position, position + len(ends) - 1, dtype=np.int64)
                lists = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(ids))
                columns = ReadColumns(positions, {"input_ids": lists}, {}, [])
                yield records_of(columns, shape, config, _SKIP, source.consumed())


@lru_cache(maxsize=8)  # many units read one file
def _index(where: str, file: InputFile) -> TokenIndex:
    path = companion(file.path, file.format)
    if path is None:
        raise InternalError(f"{file.path}: {file.format} has no index")
    with os_errors(path), storage.open_bytes(path, BLOCK_BYTES) as opened:
        data = opened.read()
    kind, sequences, boundaries = _read_header(path, data)
    sizes = sections(sequences, boundaries)
    begins_at, edges_at, modes_at = (_HEADER.size + size for size in np.cumsum(sizes).tolist())
    lengths = np.frombuffer(data, "<i4", sequences, _HEADER.size)
    begins = np.frombuffer(data, "<i8", sequences, begins_at)
    edges = np.frombuffer(data, "<i8", boundaries, edges_at)

    where, problem = f"{path}, sequence", "tokens: {}, expected 0 or more"
    _refuse_first(where, lengths, lengths < 0, problem)
    ends = offsets_of(lengths)  # in tokens
    problem = "begins at byte {}, expected the end of the one before"
    _refuse_first(where, begins, begins != ends[:-1] * kind.itemsize, problem)
    if not boundaries or data[modes_at:].strip(b"\0"):
        problem = "modes other than 0, which are not text" if boundaries else "no boundaries"
        raise DataError(f"{path}: has {problem}", "only datasets of text can be packed")
    wrong = (edges < np.append(0, edges[:-1])) | (edges > sequences)
    wrong[0] |= edges[0] != 0
    wrong[-1] |= edges[-1] != sequences
    expected = f"0 first, and no less than before up to {sequences}, the last"
    problem = f"is at sequence {{}}, expected {expected}"
    _refuse_first(f"{path}, boundary", edges, wrong, problem)
    if (whole := int(ends[-1]) * kind.itemsize) != file.size:
        problem = f"{file.path}: {file.size} bytes, expected {whole} by {path}"
        raise DataError(problem, _COPY_AGAIN)
    return TokenIndex(kind, ends[edges])


def _read_header(path: str, data: bytes) -> tuple[np.dtype[Any], int, int]:
    """Return the type of tokens, and the counts of sequences and boundaries, of an index."""
    if content := other_content(data):
        raise DataError(f"{path}: {content[0]}", content[1])
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        problem = f"{path}: begins with {data[: len(MAGIC)]!r}, expected {MAGIC!r} and a header"
        raise DataError(problem, "only datasets of Megatron-LM are read")
    _, version, code, sequences, boundaries = _HEADER.unpack_from(data)
    if version != VERSION or code not in TOKEN_TYPES:
        known = ", ".join(f"{code} ({np.dtype(kind)})" for code, kind in TOKEN_TYPES.items())
        raise DataError(
            f"{path}: version {version} and tokens of type code {code}, expected version "
            f"{VERSION} and one of {known}",
            "write the dataset again, for example with Megatron-LM's tools/preprocess_data.py",
        )
    expected = _HEADER.size + sum(sections(sequences, boundaries))
    if len(data) not in (expected, expected + sequences):
        raise DataError(
            f"{path}: {len(data)} bytes, expected {expected} for {sequences} sequences and "
            f"{boundaries} boundaries of documents",
            _DAMAGED,
        )
    return np.dtype(TOKEN_TYPES[code]), sequences, boundaries


def _refuse_first(
    where: str, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], problem: str
) -> None:
    """Raise DataError for the first wrong value. `problem` has {} in its place."""
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DataError(f"{where} {first}: {problem.format(values[first])}", _DAMAGED)


def _exactly(path: str, source: OpenInput, size: int) -> bytes:
    """Read `size` bytes, which the index promises. Raises DataError if the file is shorter."""
    data = source.read(size)
    while len(data) < size:
        more = source.read(size - len(data))
        if not more:
            raise DataError(
                f"{path}: ends {size - len(data)} bytes before the documents do: it was cut short",
                "wait until nothing writes to it, then run again",
            )
        data += more
    return data
