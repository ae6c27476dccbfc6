"""Files of token ids end to end, with an index of where documents end: Megatron-LM's, datatrove's.

Positions are numbers of documents, and so are the starts and stops of slices. The index is read
once and held, 8 bytes a document; of the tokens a few megabytes at a time.

Megatron-LM: `X.bin` of token ids, `X.idx` of sequences and documents. `_IndexWriter` in
megatron/core/datasets/indexed_dataset.py defines the index: a header of 9 bytes, version uint64 1,
the code of the token type uint8, the counts of sequences and of document boundaries uint64, then
lengths int32 in tokens, begins int64 in bytes, and boundaries int64 in sequences, the first of
which is 0. A document may be several sequences. What follows, a mode int8 for each sequence, tells
text from other things; here all must be text, 0.

datatrove: `X.ds` of token ids, `X.ds.index` of where documents end. `TokenizedFile` in
datatrove/pipeline/tokens/tokenizer.py defines them: tokens of 2 or 4 bytes, unsigned; ends uint64,
in tokens. `X.ds.loss`, if it is there, has a byte for each token, 1 where it is trained on. The
first line of `X.ds.metadata`, if it is there, ends with `|` and the bytes of a token (older ones do
not); otherwise the sizes of the file and of its last end tell them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from packer_cli import storage
from packer_cli._kernels import inputs as kernels
from packer_cli.errors import DataError
from packer_cli.inputs.byte_streams import BLOCK_BYTES, Source, open_source, refusals
from packer_cli.inputs.formats import DocumentReader
from packer_cli.inputs.token_columns import faultless, parts_of, token_records
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import companions
from packer_cli.options.shapes import Shape
from packer_cli.records import (
    IGNORED,
    BadRecord,
    Documents,
    InputFile,
    Int64,
    Records,
    Slice,
    UInt8,
)

_BYTES_PER_TOKEN = 4
_SKIP = "mend the document, or use --on-error skip"
_OVERLONG = "raise --max-line-bytes, or use --on-error skip"
_DAMAGED = "it was cut short or is damaged: copy it again, or write the dataset again"
_COPY_AGAIN = "they are not of one dataset, or one was cut short: copy or write both again"


@dataclass(frozen=True)
class TokenIndex:
    """The places of a file's documents.

    kind     the integers that the tokens are stored as
    offsets  int64[documents + 1], in tokens: document i is offsets[i]..offsets[i + 1]
    loss     the file that says what is trained on, a byte a token; None: everything
    """

    kind: np.dtype[Any]
    offsets: Int64
    loss: str | None = None


class IndexedReader(DocumentReader):
    """A format with an index, which each reads its own way."""

    def read_index(self, file: InputFile) -> TokenIndex:
        """Read and checked; raises DataError where it is not that of the file."""
        raise NotImplementedError

    def index(self, file: InputFile) -> TokenIndex:
        where = file.path if storage.is_url(file.path) else os.path.abspath(file.path)
        return _index(self, where, file)

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        is_empty = len(self.index(file).offsets) == 1
        return None if is_empty else [config.renamed.get("input_ids", "input_ids")]

    def documents(self, file: InputFile) -> Documents:
        offsets = self.index(file).offsets
        return Documents(len(offsets) - 1, int(offsets[-1]) * _BYTES_PER_TOKEN)

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
        begin, size, longest = int(offsets[0]), index.kind.itemsize, config.max_line_bytes
        with (
            open_source(file, begin * size) as source,
            _opened(file, index.loss, begin) if index.loss else nullcontext() as loss,
        ):
            sizes = np.diff(offsets) * size
            for first, last in parts_of(sizes, sizes, longest, max(len(sizes), 1)):
                tokens = int(offsets[last] - offsets[first])
                position = part.start + first
                if tokens * size > longest:
                    for at in range(0, tokens * size, BLOCK_BYTES):  # so that all is hashed
                        _exactly(file.path, source, min(tokens * size - at, BLOCK_BYTES))
                    if loss is not None:
                        loss.seek(tokens, os.SEEK_CUR)
                    reason = f"the document is longer than {longest} bytes"
                    bad = [BadRecord(position, reason, _OVERLONG)]
                    yield Records(np.empty(0, np.int64), bad=bad, consumed=source.consumed())
                    continue
                ids = np.frombuffer(_exactly(file.path, source, tokens * size), index.kind)
                own = offsets[first : last + 1] - offsets[first]
                flags = None
                if loss is not None:
                    flags = np.frombuffer(_exactly(str(index.loss), loss, tokens), np.uint8)
                    _check_flags(str(index.loss), flags, own, position)
                yield _records(ids, own, flags, position, source.consumed())
            yield source.end()


@lru_cache(maxsize=8)  # many units read one file
def _index(reader: IndexedReader, where: str, file: InputFile) -> TokenIndex:
    return reader.read_index(file)


@contextmanager
def _opened(file: InputFile, path: str, begin: int = 0) -> Iterator[IO[bytes]]:
    """A file beside one of tokens, as it was found. I/O errors become DataErrors."""
    with refusals(path), storage.open_bytes(path, BLOCK_BYTES, file.status(path)) as opened:
        opened.seek(begin)
        yield opened


def _exactly(path: str, source: Source | IO[bytes], size: int) -> bytes:
    """So many bytes, which the index has promised."""
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


def _numbers(opened: IO[bytes], kind: str, count: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The next `count` numbers of an index, some at a time, each with the number of the first."""
    size, at = np.dtype(kind).itemsize, 0
    while at < count:
        some = np.frombuffer(opened.read(min((count - at) * size, BLOCK_BYTES)), kind)
        if not len(some):
            raise OSError("the file was cut short while it was read")
        yield at, some
        at += len(some)


def _refuse_first(
    where: str, at: int, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], problem: str
) -> None:
    """DataError for the first wrong value, if there is one. `where`: before its number, which
    begins at `at`; `problem`: with {} where the value goes.
    """
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DataError(f"{where} {at + first}: {problem.format(values[first])}", _DAMAGED)


def _check_flags(path: str, flags: UInt8, offsets: Int64, first: int) -> None:
    """DataError for what is no flag of a token. `first`: the number of the first document."""
    if kernels.count_real(flags) < 0:
        wrong = int(np.flatnonzero(flags > 1)[0])
        document = int(np.searchsorted(offsets, wrong, side="right")) - 1
        raise DataError(
            f"{path}, document {first + document}: byte {wrong - int(offsets[document])} is "
            f"{flags[wrong]}, expected 0 or 1",
            "write it again, or remove it to train on everything",
        )


def _records(
    ids: npt.NDArray[Any], offsets: Int64, flags: UInt8 | None, first: int, consumed: int
) -> Records:
    positions = np.arange(first, first + len(offsets) - 1, dtype=np.int64)
    if (tokens := faultless(ids, offsets, None, None)) is not None:
        return Records(positions, tokens=(*tokens[:2], flags), consumed=consumed)
    labels = None if flags is None else np.where(flags, ids.astype(np.int64), IGNORED)
    rows = [(ids[a:b].tolist(), None if labels is None else labels[a:b].tolist(), None)
            for a, b in pairwise(offsets.tolist())]  # fmt: skip
    return token_records(rows, positions, _SKIP, consumed)


# --- Megatron-LM

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
# The codes of integers; 6 and 7 are floating point.
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {kind: code for code, kind in TOKEN_TYPES.items()}


def header(kind: str, sequences: int, boundaries: int) -> bytes:
    """The beginning of an index. `kind`: of the tokens, one of TOKEN_TYPES."""
    return _HEADER.pack(MAGIC, VERSION, _CODES[kind], sequences, boundaries)


def sections(sequences: int, boundaries: int) -> tuple[int, int, int]:
    """Bytes of what follows the header: lengths, begins, boundaries."""
    return 4 * sequences, 8 * sequences, 8 * boundaries


class MegatronReader(IndexedReader):
    """A document is one of the index's, all its sequences end to end."""

    def read_index(self, file: InputFile) -> TokenIndex:
        path = companions(file.path, file.format)[0]
        with _opened(file, path) as opened:
            size = storage.stat(path).size
            kind, sequences, boundaries = _read_header(path, opened.read(_HEADER.size), size)
            ends = np.zeros(sequences + 1, np.int64)  # in tokens
            where, problem = f"{path}, sequence", "tokens: {}, expected 0 or more"
            for at, lengths in _numbers(opened, "<i4", sequences):
                _refuse_first(where, at, lengths, lengths < 0, problem)
                stop = at + 1 + len(lengths)
                ends[at + 1 : stop] = ends[at] + np.cumsum(lengths, dtype=np.int64)
            problem = "begins at byte {}, expected the end of the one before"
            for at, begins in _numbers(opened, "<i8", sequences):
                expected = ends[at : at + len(begins)] * kind.itemsize
                _refuse_first(where, at, begins, begins != expected, problem)
            offsets, before = np.zeros(max(boundaries, 1), np.int64), 0
            problem = (
                "is at sequence {}, expected 0 first, and no less than before up to "
                f"{sequences}, the last"
            )
            for at, edges in _numbers(opened, "<i8", boundaries):
                wrong = (edges < np.append(before, edges[:-1])) | (edges > sequences)
                wrong[:1] |= at == 0 and edges[0] != 0
                wrong[-1:] |= at + len(edges) == boundaries and edges[-1] != sequences
                _refuse_first(f"{path}, boundary", at, edges, wrong, problem)
                offsets[at : at + len(edges)], before = ends[edges], int(edges[-1])
            if not boundaries or np.frombuffer(opened.read(), np.int8).any():
                what = "modes other than 0, which are no text" if boundaries else "no boundaries"
                raise DataError(f"{path}: has {what}", "only datasets of text can be packed")
        if (whole := int(ends[-1]) * kind.itemsize) != file.size:
            what = f"{file.path}: {file.size} bytes, expected {whole} by {path}"
            raise DataError(what, _COPY_AGAIN)
        return TokenIndex(kind, offsets)


def _read_header(path: str, data: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """The type of tokens, and the counts of sequences and boundaries. `size`: of the file."""
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise DataError(
            f"{path}: begins with {data[: len(MAGIC)]!r} and has {len(data)} bytes of a header, "
            f"expected {MAGIC!r} and {_HEADER.size}",
            "only datasets of Megatron-LM are read",
        )
    _, version, code, sequences, boundaries = _HEADER.unpack(data)
    if version != VERSION or code not in TOKEN_TYPES:
        known = ", ".join(f"{code} ({np.dtype(kind)})" for code, kind in TOKEN_TYPES.items())
        raise DataError(
            f"{path}: version {version} and tokens of type code {code}, expected version "
            f"{VERSION} and one of {known}",
            "write the dataset again, for example with Megatron-LM's tools/preprocess_data.py",
        )
    expected = _HEADER.size + sum(sections(sequences, boundaries))
    if size not in (expected, expected + sequences):
        raise DataError(
            f"{path}: {size} bytes, expected {expected} for {sequences} sequences and "
            f"{boundaries} boundaries of documents",
            _DAMAGED,
        )
    return np.dtype(TOKEN_TYPES[code]), sequences, boundaries


# --- datatrove

_TOKEN_SIZES = (2, 4)
_END_BYTES = 8
_METADATA_BYTES = 1 << 16


class DatatroveReader(IndexedReader):
    """Tokens uint16 or uint32."""

    def read_index(self, file: InputFile) -> TokenIndex:
        path, loss, metadata = companions(file.path, file.format)
        with _opened(file, path) as opened:
            size = storage.stat(path).size
            if size % _END_BYTES:
                what = f"{path}: {size} bytes, expected a multiple of {_END_BYTES}"
                raise DataError(what, _DAMAGED)
            offsets = np.zeros(size // _END_BYTES + 1, np.int64)
            problem = "ends at token {}, before it begins or far beyond any file"
            for at, ends in _numbers(opened, "<u8", size // _END_BYTES):
                wrong = (ends >> 62 > 0) | (ends < np.append(offsets[at].astype("<u8"), ends[:-1]))
                _refuse_first(f"{path}, document", at, ends, wrong, problem)
                offsets[at + 1 : at + 1 + len(ends)] = ends
        tokens = int(offsets[-1])
        kind = np.dtype(f"<u{_token_size(file, path, metadata, tokens)}")
        if not storage.is_file(loss):
            return TokenIndex(kind, offsets)
        if (found := storage.stat(loss).size) != tokens:
            raise DataError(
                f"{loss}: {found} bytes, expected {tokens}, one for each token of {file.path}",
                f"{_COPY_AGAIN}; or remove it, to train on everything",
            )
        return TokenIndex(kind, offsets, loss)


def _token_size(file: InputFile, index: str, metadata: str, tokens: int) -> int:
    """Bytes of a token: as the metadata says, or whichever makes file and index agree."""
    possible: tuple[int, ...] = _TOKEN_SIZES
    if storage.is_file(metadata):
        with _opened(file, metadata) as opened:
            line = opened.read(_METADATA_BYTES).split(b"\n")[0]
        with suppress(ValueError):
            possible = (int(line.rpartition(b"|")[2]),) if b"|" in line else possible
    if not set(possible) <= set(_TOKEN_SIZES):
        raise DataError(
            f"{metadata}: tokens of {possible[0]} bytes, expected 2 or 4",
            "write it again, or remove it, and the sizes of the files tell",
        )
    for size in possible:
        if tokens * size == file.size:
            return size
    expected = " or ".join(str(tokens * size) for size in possible)
    raise DataError(
        f"{file.path}: {file.size} bytes, expected {expected} for the {tokens} tokens of {index}",
        _COPY_AGAIN,
    )
