"""Bytes of a file: opening, hashing and decompressing."""

from __future__ import annotations

import hashlib
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, Protocol

from packer_cli import storage
from packer_cli.errors import DamagedInputError, Interrupted, damaged_input, from_os_error
from packer_cli.records import InputFile, Records, Stretch

STDIN = "-"
BLOCK_BYTES = 4 << 20
OVERRUN_BYTES = 64 << 10  # read at a time beyond where a slice or a file ends
_STORED_BYTES = 1 << 16
_STDIN_SECONDS = 0.5  # between two looks, while waiting for stdin, whether the run has stopped
_TESTERS = {"gzip": "gzip", "zstd": "zstd", "bz2": "bzip2", "xz": "xz", "lz4": "lz4"}


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Source:
    """An opened file: `read` gives its plain bytes, `consumed` the stored bytes used for them."""

    def __init__(self, raw: IO[bytes] | _Hashed, stream: _Readable) -> None:
        self._raw = raw
        self._reported = raw.tell()
        self.read = stream.read

    def consumed(self) -> int:
        """Bytes of the stored (perhaps compressed) file read since the last call."""
        try:
            position = self._raw.tell()
        except ValueError:  # closed by the decompressor at its end
            return 0
        new, self._reported = position - self._reported, position
        return new

    def end(self) -> Records:
        """The end of a slice: no records, but the stretches that were read of the file."""
        stretches = [self._raw.stretch()] if isinstance(self._raw, _Hashed) else []
        return Records.end(stretches, self.consumed())


class _Hashed(io.RawIOBase):
    """A file whose bytes are hashed as they are read, so that the digest is of what is packed.

    `size`: that it had when it was found. Room for a block is only made where there may be one:
    for a small file that takes longer than to read it.
    """

    def __init__(self, raw: IO[bytes], size: int) -> None:
        self._raw, self._size = raw, size
        self._begin = self._position = raw.tell()
        self._sha = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        most = max(self._size - self._position, 0) + OVERRUN_BYTES
        data = self._raw.read(min(size, most))
        self._sha.update(data)
        self._position += len(data)
        return data

    def tell(self) -> int:
        return self._position

    def stretch(self) -> Stretch:
        """All that was read, as one stretch."""
        return Stretch(self._begin, self._position - self._begin, self._sha.hexdigest())


class HashedFile(io.RawIOBase):
    """A file that is read in several places, whose bytes are hashed as they are read."""

    def __init__(self, path: str) -> None:
        """Raises OSError, for URLs PackerError."""
        self._raw = storage.open_bytes(path)
        self._position = 0
        self._runs = dict[int, tuple[int, Any]]()  # where one ends -> its begin and digest
        self._ended = list[Stretch]()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = self._raw.seek(offset, whence)
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        data = self._raw.read(size)
        begin, sha = self._runs.pop(self._position, None) or (self._position, hashlib.sha256())
        sha.update(data)
        self._position += len(data)
        if self._position in self._runs:  # read once more
            self._ended += self._stretches()
            self._runs.clear()
        self._runs[self._position] = begin, sha
        return data

    def stretches(self) -> list[Stretch]:
        """All that was read; stretches that were read twice are there twice."""
        return self._ended + self._stretches()

    def _stretches(self) -> list[Stretch]:
        return [Stretch(at, end - at, sha.hexdigest()) for end, (at, sha) in self._runs.items()]

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Stdin(io.RawIOBase):
    """stdin, whose first bytes are read twice: to see what they are, and then by the run."""

    def __init__(self) -> None:
        self.begin(lambda: False)

    def begin(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._seen = io.BytesIO()
        self._position = 0
        self._sha = hashlib.sha256()
        self.remember = True

    def rewind(self) -> None:
        self._seen.seek(0)
        self._position = 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        data = self._seen.read(size)
        if not data or 0 < len(data) < size:
            fresh = self._fresh(size - len(data) if size > 0 else size)
            if self.remember:
                self._seen.write(fresh)
            data += fresh
        self._position += len(data)
        if not self.remember:
            self._sha.update(data)
        return data

    def _fresh(self, size: int) -> bytes:
        """As many bytes as asked for, where there are: batches must not depend on the pipe.

        Never waits in a read, which nothing could end: not Ctrl-C, not a failure elsewhere.
        """
        descriptor, parts = sys.stdin.fileno(), list[bytes]()
        while size:
            while not select.select([descriptor], [], [], _STDIN_SECONDS)[0]:
                if self._stopped():
                    raise Interrupted("stopped")
            part = os.read(descriptor, size if size > 0 else BLOCK_BYTES)
            if not part:
                break
            parts.append(part)
            size -= len(part) if size > 0 else 0
        return b"".join(parts)

    def digest(self) -> tuple[int, str]:
        return self._position, self._sha.hexdigest()


_stdin = _Stdin()


def begin_stdin(stopped: Callable[[], bool]) -> None:
    """Begin a run: reading from stdin ends with Interrupted once `stopped` says so."""
    _stdin.begin(stopped)


def stdin_digest() -> tuple[int, str]:
    """(size, sha256) of what the run has read from stdin."""
    return _stdin.digest()


@contextmanager
def open_source(file: InputFile, start: int = 0, *, peek: bool = False) -> Iterator[Source]:
    """Open at byte `start` (0 for compressed files). I/O errors become DataErrors.

    `peek`: what is read of stdin now will be read again by the run.
    """
    try:
        if file.path == STDIN:
            _stdin.rewind()
            _stdin.remember = peek
            yield Source(_stdin, _stdin)  # type: ignore[arg-type]
            return
        # decompressors read little at a time, and everything in the end
        ahead = BLOCK_BYTES if file.compression else storage.AHEAD_BYTES
        with storage.open_bytes(file.path, ahead) as raw:
            if file.compression and not file.size:
                raise EOFError  # not even an empty file compresses to no bytes
            raw.seek(start)
            hashed = _Hashed(raw, file.size)
            yield Source(hashed, _decompressed(file.compression, hashed))
    except EOFError as error:
        raise _cut_short(file) from error
    except OSError as error:
        if error.errno is not None:
            raise from_os_error(error, file.path, "read") from error
        if "truncated" in str(error).lower():
            raise _cut_short(file) from error
        raise _damaged(file, error) from error
    except Exception as error:
        if type(error).__name__ != "LZMAError":  # lzma is imported only where needed
            raise
        raise _damaged(file, error) from error


def _cut_short(file: InputFile) -> DamagedInputError:
    return damaged_input(
        f"{file.path}: the {file.compression} data ends too early; the file was cut short",
        f"fetch or write it again; to check it: {_TESTERS[file.compression or 'gzip']} -t FILE",
    )


def _damaged(file: InputFile, error: Exception) -> DamagedInputError:
    return damaged_input(
        f"{file.path}: not valid {file.compression} data: {error}",
        f"fetch or write it again; to check it: {_TESTERS[file.compression or 'gzip']} -t FILE",
    )


def _decompressed(compression: str | None, raw: _Hashed) -> _Readable:
    if compression is None:
        return raw
    if compression in ("xz", "bz2"):
        return _Streams(raw, compression)
    import pyarrow as pa  # noqa: PLC0415

    # Arrow's streams raise on data cut short, read concatenated members, and free the GIL.
    stream: _Readable = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
    return stream


class _Streams:
    """xz or bz2 streams end to end, empty ones too, at which Arrow fails in bz2.

    Python's own readers pass over damage after the first stream.
    """

    def __init__(self, raw: _Hashed, compression: str) -> None:
        from bz2 import BZ2Decompressor  # noqa: PLC0415
        from lzma import FORMAT_XZ, LZMADecompressor  # noqa: PLC0415

        self._raw = raw
        self._is_xz = compression == "xz"
        self._new_stream: Callable[[], Any] = (
            partial(LZMADecompressor, FORMAT_XZ) if self._is_xz else BZ2Decompressor
        )
        self._stream: Any = self._new_stream()  # None between streams
        self._stored = b""

    def read(self, size: int, /) -> bytes:
        """1 to `size` plain bytes; none only at the end of the last stream."""
        data = b""
        while not data:
            if not self._stored and (self._stream is None or self._stream.needs_input):
                self._stored = self._raw.read(_STORED_BYTES)
                if not self._stored and self._stream is not None:
                    raise EOFError
                if not self._stored:
                    break
            if self._stream is None:
                if self._is_xz:
                    self._stored = self._stored.lstrip(b"\0")  # streams may be padded
                if not self._stored:
                    continue
                self._stream = self._new_stream()
            data, self._stored = self._stream.decompress(self._stored, size), b""
            if self._stream.eof:
                self._stored, self._stream = self._stream.unused_data, None
        return data
