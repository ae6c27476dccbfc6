"""datatrove's tokenized files: `X.ds` of token ids, `X.ds.index` of where documents end.

`TokenizedFile` in datatrove/pipeline/tokens/tokenizer.py defines them: tokens of 2 or 4 bytes,
unsigned; ends uint64, in tokens. `X.ds.loss`, if it is there, has a byte for each token, 1 where it
is trained on. The first line of `X.ds.metadata`, if it is there, ends with `|` and the bytes of a
token (older ones do not); otherwise the sizes of the file and of its last end tell them.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from packer_cli import storage
from packer_cli.config.formats import companions
from packer_cli.errors import DataError, from_os_error
from packer_cli.inputs.indexed_tokens import (
    COPY_AGAIN,
    IndexedReader,
    TokenIndex,
    numbers,
    open_index,
)
from packer_cli.records import InputFile, Int64

_TOKEN_SIZES = (2, 4)
_END_BYTES = 8
_METADATA_BYTES = 1 << 16
_ANEW = "it was cut short or is damaged: copy or write it again"


class DatatroveReader(IndexedReader):
    """Tokens uint16 or uint32."""

    def read_index(self, file: InputFile) -> TokenIndex:
        path, loss, metadata = companions(file.path, file.format)
        offsets = _offsets(path)
        tokens = int(offsets[-1])
        size = _token_size(file, path, metadata, tokens)
        if not storage.is_file(loss):
            return TokenIndex(np.dtype(f"<u{size}"), offsets)
        found = storage.stat(loss).size
        if found != tokens:
            raise DataError(
                f"{loss}: {found} bytes, expected {tokens}, one for each token of {file.path}",
                f"{COPY_AGAIN}; or remove it, to train on everything",
            )
        return TokenIndex(np.dtype(f"<u{size}"), offsets, loss)


def _offsets(path: str) -> Int64:
    with open_index(path) as (opened, size):
        if size % _END_BYTES:
            raise DataError(
                f"{path}: {size} bytes, expected a multiple of {_END_BYTES}, as many for each "
                "document",
                _ANEW,
            )
        offsets = np.zeros(size // _END_BYTES + 1, np.int64)
        at = 0
        for ends in numbers(opened, "<u8", size // _END_BYTES):
            wrong = np.flatnonzero((ends >> 62 > 0) | (ends < np.append(offsets[at], ends[:-1])))
            if len(wrong):
                place = int(wrong[0])
                raise DataError(
                    f"{path}, document {at + place}: ends at token {ends[place]}, before it begins "
                    "or far beyond any file; expected ascending ends",
                    _ANEW,
                )
            offsets[at + 1 : at + 1 + len(ends)] = ends
            at += len(ends)
    return offsets


def _token_size(file: InputFile, index: str, metadata: str, tokens: int) -> int:
    """Bytes of a token: as the metadata says, or whichever makes file and index agree."""
    told = _told_size(metadata)
    possible = _TOKEN_SIZES if told is None else (told,)
    if told is not None and told not in _TOKEN_SIZES:
        raise DataError(
            f"{metadata}: tokens of {told} bytes, expected 2 or 4",
            "write it again, or remove it, and the sizes of the files tell",
        )
    for size in possible:
        if tokens * size == file.size:
            return size
    if file.size % possible[0]:
        raise DataError(
            f"{file.path}: {file.size} bytes, expected a multiple of {possible[0]}, the bytes of a "
            "token",
            _ANEW,
        )
    expected = " or ".join(str(tokens * size) for size in possible)
    raise DataError(
        f"{file.path}: {file.size} bytes, expected {expected} for the {tokens} tokens of {index}",
        COPY_AGAIN,
    )


def _told_size(metadata: str) -> int | None:
    if not storage.is_file(metadata):
        return None
    try:
        with storage.open_bytes(metadata) as opened:
            line = opened.read(_METADATA_BYTES).split(b"\n")[0]
    except OSError as error:
        raise from_os_error(error, metadata, "read") from error
    with suppress(ValueError):
        return int(line.rpartition(b"|")[2]) if b"|" in line else None
    return None
