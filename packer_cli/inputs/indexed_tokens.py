"""Files of token ids end to end, with an index of where documents end: what such formats share.

Positions are numbers of documents, and so are the starts and stops of slices. The index is read
once and held, 8 bytes a document; of the tokens a few megabytes at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from packer_cli import storage
from packer_cli._kernels import inputs as kernels
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import DataError, from_os_error
from packer_cli.inputs.byte_streams import BLOCK_BYTES, Source, open_source
from packer_cli.inputs.token_columns import check_tokens, clipped, faultless
from packer_cli.records import (
    IGNORED,
    BadRecord,
    Documents,
    Group,
    InputFile,
    Int64,
    Records,
    Slice,
)

_BATCH_BYTES = 4 << 20
_BYTES_PER_TOKEN = 4
_SKIP = "mend the document, or use --on-error skip"
_OVERLONG = "raise --max-line-bytes, or use --on-error skip"
COPY_AGAIN = "they are not of one dataset, or one was cut short: copy or write both again"


@dataclass(frozen=True)
class TokenIndex:
    """Where the documents of a file are.

    kind     the integers that the tokens are stored as
    offsets  int64[documents + 1], in tokens: document i is offsets[i]..offsets[i + 1]
    loss     the file that says what is trained on, a byte a token; None: everything
    """

    kind: np.dtype[Any]
    offsets: Int64
    loss: str | None = None


class IndexedReader:
    """What such formats share; each says what its index is."""

    holds_tokens = True

    def read_index(self, file: InputFile) -> TokenIndex:
        """Read and checked; raises DataError where it is not that of the file."""
        raise NotImplementedError

    def index(self, file: InputFile) -> TokenIndex:
        where = file.path if storage.is_url(file.path) else os.path.abspath(file.path)
        return _index(self, where, file)

    def fields(self, file: InputFile, config: PackConfig) -> list[str] | None:
        is_empty = len(self.index(file).offsets) == 1
        return None if is_empty else [config.renamed.get("input_ids", "input_ids")]

    def describe(self, file: InputFile, position: int) -> str:
        return f"document {position}"

    def groups(self, file: InputFile) -> list[Group]:
        return []

    def documents(self, file: InputFile) -> Documents:
        offsets = self.index(file).offsets
        return Documents(len(offsets) - 1, int(offsets[-1]) * _BYTES_PER_TOKEN)

    def edges(self, file: InputFile, parts: int) -> list[int]:
        offsets = self.index(file).offsets
        even = np.linspace(0, int(offsets[-1]), parts + 1).astype(np.int64)[1:-1]
        inner = np.searchsorted(offsets, even).tolist()
        return sorted({0, *inner, len(offsets) - 1})

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: PackConfig, *, peek: bool = False
    ) -> Iterator[Records]:
        index = self.index(file)
        stop = len(index.offsets) - 1 if part.stop is None else part.stop
        offsets = index.offsets[part.start : stop + 1]
        size, longest = index.kind.itemsize, config.max_line_bytes
        with (
            open_source(file, int(offsets[0]) * size) as source,
            _loss_from(index, int(offsets[0])) as loss,
        ):
            for first, last in _batches(offsets, size, longest):
                tokens = int(offsets[last] - offsets[first])
                position = part.start + first
                if tokens * size > longest:
                    _pass_over(file, source, loss, tokens, size)
                    reason = f"the document is longer than {longest} bytes"
                    bad = [BadRecord(position, reason, _OVERLONG)]
                    yield Records(np.empty(0, np.int64), bad=bad, consumed=source.consumed())
                    continue
                ids = np.frombuffer(_exactly(file.path, source, tokens * size), index.kind)
                own = offsets[first : last + 1] - offsets[first]
                flags = None if loss is None else _flags(index, loss, own, position)
                yield _records(ids, own, flags, position, source.consumed())
            yield source.end()


@lru_cache(maxsize=8)  # many units read one file
def _index(reader: IndexedReader, where: str, file: InputFile) -> TokenIndex:
    return reader.read_index(file)


@contextmanager
def open_index(path: str) -> Iterator[tuple[IO[bytes], int]]:
    """An index opened, and its size. I/O errors become DataErrors."""
    try:
        size = storage.stat(path).size
        with storage.open_bytes(path, BLOCK_BYTES) as opened:
            yield opened, size
    except OSError as error:
        raise from_os_error(error, path, "read") from error


def numbers(opened: IO[bytes], kind: str, count: int) -> Iterator[npt.NDArray[Any]]:
    """The next `count` numbers of an index, some at a time."""
    size = np.dtype(kind).itemsize
    while count:
        some = np.frombuffer(opened.read(min(count * size, BLOCK_BYTES)), kind)
        if not len(some):
            raise OSError("the file was cut short while it was read")
        count -= len(some)
        yield some


def _batches(offsets: Int64, size: int, longest: int) -> Iterator[tuple[int, int]]:
    """(first, last) of documents together; one longer than `longest` bytes is alone."""
    count = len(offsets) - 1
    filled = (offsets[1:] - offsets[0]) * size // _BATCH_BYTES
    alone = np.flatnonzero(np.diff(offsets) * size > longest)
    full = np.flatnonzero(np.diff(filled)) + 1
    return pairwise(np.unique(np.concatenate([[0], full, alone, alone + 1, [count]])).tolist())


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


def _pass_over(
    file: InputFile, source: Source, loss: IO[bytes] | None, tokens: int, size: int
) -> None:
    """Read, so that the digest is of all bytes, but hold no more than a block."""
    left = tokens * size
    while left:
        left -= len(_exactly(file.path, source, min(left, BLOCK_BYTES)))
    if loss is not None:
        loss.seek(tokens, os.SEEK_CUR)


@contextmanager
def _loss_from(index: TokenIndex, token: int) -> Iterator[IO[bytes] | None]:
    if index.loss is None:
        yield None
        return
    try:
        with storage.open_bytes(index.loss) as opened:
            opened.seek(token)
            yield opened
    except OSError as error:
        raise from_os_error(error, index.loss, "read") from error


def _flags(
    index: TokenIndex, loss: IO[bytes], offsets: Int64, position: int
) -> npt.NDArray[np.uint8]:
    path = str(index.loss)
    flags = np.frombuffer(_exactly(path, loss, int(offsets[-1])), np.uint8)
    if kernels.count_real(flags) < 0:
        wrong = int(np.flatnonzero(flags > 1)[0])
        document = int(np.searchsorted(offsets, wrong, side="right")) - 1
        raise DataError(
            f"{path}, document {position + document}: byte {wrong - int(offsets[document])} is "
            f"{flags[wrong]}, expected 0 or 1",
            "write it again, or remove it to train on everything",
        )
    return flags


def _records(
    ids: npt.NDArray[Any],
    offsets: Int64,
    flags: npt.NDArray[np.uint8] | None,
    first: int,
    consumed: int,
) -> Records:
    positions = np.arange(first, first + len(offsets) - 1, dtype=np.int64)
    tokens = faultless(ids, offsets, None, None)
    if tokens is not None:
        return Records(positions, tokens=(*tokens[:2], flags), consumed=consumed)
    values = clipped(ids)
    labels = None if flags is None else np.where(flags, values, IGNORED)
    tokens, reasons = check_tokens(values, offsets, labels, None)
    bad = [BadRecord(first + i, reasons[i], _SKIP) for i in sorted(reasons)]
    return Records(np.delete(positions, list(reasons)), tokens=tokens, bad=bad, consumed=consumed)
