"""Bytes of a file: opening, decompressing, and cutting into lines in bounded memory.

A byte order mark of UTF-8 is not text. A file that begins with the mark of another encoding, is
compressed under another name or is a Git LFS pointer ends the run: none of its bytes is a record.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import select
import shlex
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packer_cli import storage
from packer_cli.errors import DataError, Interrupted, damaged_input, from_os_error
from packer_cli.options.formats import COMPRESSIONS
from packer_cli.records import BadRecord, InputFile, Int64

STDIN = "-"
BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 256 << 20  # of a line, cell or text document
CUT = "cut it into parts, or use --on-error skip"
OVERRUN_BYTES = 64 << 10  # read at a time beyond where a slice or a file ends
_STORED_BYTES = 1 << 16
_PLAIN_BYTES = 1 << 18  # that a decompressor gives at once
_STDIN_SECONDS = 0.5  # between two looks, while waiting for stdin, whether the run has stopped
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
_MARKS = {  # the longer ones first, of which others are the beginning
    b"\xff\xfe\0\0": "UTF-32LE",
    b"\0\0\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}
COMPRESSED = re.compile(  # how data of each compression begins
    rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<xz>\xfd7zXZ\0)|(?P<lz4>\x04\x22\x4d\x18)"
    rb"|(?P<bz2>BZh[1-9](?:1AY&SY|\x17rE8P\x90))",
    re.DOTALL,
)
_GIT_LFS = b"version https://git-lfs.github.com/spec/"
_BEGINNING_BYTES = 64  # of a file, which tell what it is
_NOT_IN_TEXT = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_LINE_END = ord("\n")
_IS_SPACE = np.isin(np.arange(256), [*b" \t\n\r\v\f"])
_Read = Callable[[int], bytes]


class OpenInput:
    """An opened file: `read` gives its plain bytes, `consumed` the stored bytes used for them."""

    def __init__(self, path: str, raw: IO[bytes] | _Stdin, read: _Read) -> None:
        self.path = path
        self._raw = raw
        self._reported = raw.tell()
        self.read = read

    def consumed(self) -> int:
        """Bytes of the stored (perhaps compressed) file read since the last call."""
        position = self._raw.tell()
        new, self._reported = position - self._reported, position
        return new


class _Stdin:
    """stdin, whose first bytes are read twice: to see what they are, and then by the run.

    remember  what is read now is read again
    """

    remember = False

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        self._seen = io.BytesIO()
        self._position = 0

    def rewind(self) -> None:
        self._seen.seek(0)
        self._position = 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        data = self._seen.read(size)
        if len(data) < size:
            fresh = self._fresh(size - len(data))
            if self.remember:
                self._seen.write(fresh)
            data += fresh
        self._position += len(data)
        return data

    def _fresh(self, size: int) -> bytes:
        """Read as many bytes as asked for: batches must not depend on the pipe.

        Never waits in a read, which nothing could end: not Ctrl-C, not a failure elsewhere.
        """
        descriptor, parts = sys.stdin.fileno(), list[bytes]()
        while size:
            while not select.select([descriptor], [], [], _STDIN_SECONDS)[0]:
                if self._stopped():
                    raise Interrupted("stopped")
            part = os.read(descriptor, size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


_stdin = _Stdin()


def begin_stdin(stopped: Callable[[], bool]) -> None:
    """Begin a run: reading from stdin ends with Interrupted once `stopped` says so."""
    global _stdin  # noqa: PLW0603 a process has one
    _stdin = _Stdin(stopped)


def stdin_size() -> int:
    """How many bytes the run has read from stdin."""
    return _stdin.tell()


@contextmanager
def peeking() -> Iterator[None]:
    """Within this context, what is read of stdin will be read again."""
    before, _stdin.remember = _stdin.remember, True
    try:
        yield
    finally:
        _stdin.remember = before


@contextmanager
def open_source(file: InputFile, start: int = 0) -> Iterator[OpenInput]:
    """Open at byte `start` (0 for compressed files). I/O errors become DataErrors."""
    how = file.compression
    try:
        if file.path == STDIN:
            _stdin.rewind()
            yield OpenInput(STDIN, _stdin, _stdin.read)
            return
        # decompressors read little at a time, and everything in the end
        ahead = BLOCK_BYTES if how else storage.AHEAD_BYTES
        with storage.open_bytes(file.path, ahead, file.status()) as raw:
            if how and not file.size:
                raise EOFError  # not even an empty file compresses to no bytes
            if how:
                how = _stored_as(raw.read(_BEGINNING_BYTES), how)
            raw.seek(start)
            read = _decompressed(how, raw) if how else _reading(raw, file.size)
            yield OpenInput(file.path, raw, read)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise from_os_error(error, file.path, "read") from error
        # lzma is imported only where needed
        known = isinstance(error, EOFError | OSError | zlib.error)
        if not known and type(error).__name__ != "LZMAError":
            raise
        damage, tip = f"not valid {how} data: {error}", "fetch or write it again"
        if isinstance(error, EOFError) or "truncated" in str(error).lower():
            damage = f"the {how} data ends too early; the file was cut short"
        elif "too much memory" in str(error):
            damage = "its zstd window is larger than 128 MiB, which needs as much memory to read"
            tip = f"decompress it: zstd -d --long=31 {shlex.quote(file.path)}, and pack that"
        raise damaged_input(f"{file.path}: {damage}", tip) from error


def next_size(stop: int | None, position: int) -> int:
    """Bytes to read next: to a slice's end and some more, where its last record ends, or on to it
    in small steps.
    """
    left = BLOCK_BYTES if stop is None else max(stop - position, 0) + OVERRUN_BYTES
    return min(left, BLOCK_BYTES)


def _reading(raw: IO[bytes], size: int) -> _Read:
    """A function that reads, and makes no more room than the file may fill: for a small file that
    takes longer than to read it.
    """

    def read(wanted: int) -> bytes:
        return raw.read(min(wanted, max(size - raw.tell(), 0) + OVERRUN_BYTES))

    return read


def _stored_as(beginning: bytes, named: str) -> str | None:
    """Return the compression of a file that begins so: `named` by its ending, another one, or None
    for plain text. A web server that is asked for a `.gz` may decompress it on the way.
    """
    if found := COMPRESSED.match(beginning):
        return found.lastgroup
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return named
    return named if _NOT_IN_TEXT.search(beginning) else None


def _decompressed(compression: str, raw: IO[bytes]) -> _Read:
    """A function that reads as many plain bytes, or some more than that."""
    if compression in ("zstd", "lz4"):
        import pyarrow as pa  # noqa: PLC0415

        # Arrow's streams raise on data cut short, read concatenated frames, and free the GIL.
        exact: _Read = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression).read
        return exact
    blocks = _of_streams(raw, compression)

    def read(size: int) -> bytes:
        parts = list[bytes]()
        while size > 0 and (block := next(blocks, None)) is not None:
            parts.append(block)
            size -= len(block)
        return b"".join(parts)

    return read


def _of_streams(raw: IO[bytes], compression: str) -> Iterator[bytes]:
    """Plain bytes of gzip, xz or bz2 streams end to end, empty ones too, at which Arrow fails in
    bz2. Python's own readers pass over damage after the first stream.
    """
    from bz2 import BZ2Decompressor  # noqa: PLC0415
    from lzma import FORMAT_XZ, LZMADecompressor  # noqa: PLC0415

    decompressor: Any = {
        "gzip": partial(zlib.decompressobj, 16 + zlib.MAX_WBITS),
        "xz": partial(LZMADecompressor, FORMAT_XZ),
        "bz2": BZ2Decompressor,
    }[compression]
    padding = b"" if compression == "bz2" else b"\0"  # between streams: of tapes, and in blocks
    stored = raw.read(_STORED_BYTES)
    while stored:
        stream = decompressor()
        while not stream.eof:
            is_over = False
            # zlib gives back what it has not read, the others keep it
            if not stored and getattr(stream, "needs_input", True):
                stored = raw.read(_STORED_BYTES)
                is_over = not stored
            block = stream.decompress(stored, _PLAIN_BYTES)
            if is_over and not (block or stream.eof):  # lzma may need input only after nothing
                raise EOFError
            yield block
            stored = getattr(stream, "unconsumed_tail", b"")
        stored = stream.unused_data.lstrip(padding)
        while not stored and (more := raw.read(_STORED_BYTES)):
            stored = more.lstrip(padding)


# --- lines


class Lines(NamedTuple):
    """Whole lines: `data` begins at byte `offset` of the uncompressed file.

    `data` None: one line longer than the limit, skipped.
    """

    offset: int
    data: bytes | None


def too_long(position: int, what: str = "line") -> BadRecord:
    tip = f"{CUT}; does the file have line ends?"
    return BadRecord(position, f"the {what} is longer than {MAX_LINE_BYTES} bytes", tip)


def read_lines(source: OpenInput, start: int, stop: int | None) -> Iterator[Lines]:
    """The lines that begin in [start, stop), in blocks; the file's last may lack its newline.
    DataError for a file in another encoding.

    The source must stand at max(start - 1, 0): the byte before the slice tells whether a line
    begins exactly at `start`. Memory is bounded by the block and the longest line accepted;
    lines up to a block may exceed MAX_LINE_BYTES, which the caller checks line by line.
    """
    position = offset = max(start - 1, 0)
    held = bytearray()  # the beginning of a line, which grows without a copy of itself
    seeking, is_last = start > 0, False  # the line that goes on is another slice's, or overlong
    while not is_last and (chunk := source.read(next_size(stop, position))):
        if not position and (found := other_content(chunk)):
            raise DataError(f"{source.path}: {found[0]}", found[1])
        base, begin, end = position, 0, len(chunk)
        position += end
        if seeking:
            begin = chunk.find(b"\n") + 1
            seeking = not begin
            begin = begin or end
            if stop is not None and base + begin >= stop:
                return  # no line begins in the slice
            if begin == end:
                continue
        if stop is not None and position >= stop:
            newline = chunk.find(b"\n", max(begin, stop - 1 - base)) + 1
            end, is_last = newline or end, newline > 0
        if not held:
            offset = base + begin
        view = memoryview(chunk)
        if newline := chunk.rfind(b"\n", begin, end) + 1:
            yield Lines(offset, drain(held, view[begin:newline]))
            offset = base + newline
            held += view[newline:end]
        else:
            held += view[begin:end]
        if len(held) > MAX_LINE_BYTES + 1:  # of which a CR at the end may be no part
            yield Lines(offset, None)
            seeking = True
            held.clear()
    if held:
        yield Lines(offset, drain(held))


def cut(offset: int, data: bytes) -> tuple[Int64, Int64, Int64]:
    """Where the lines of a block begin in the file, and where they begin and end in the block,
    without their newlines and a byte order mark: int64[n] each.
    """
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _LINE_END)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    begins = np.concatenate([[0], ends[:-1] + 1])
    positions = begins + offset
    if not offset and data.startswith(BYTE_ORDER_MARK):
        begins[0] = len(BYTE_ORDER_MARK)
    return positions, begins, ends


def nonblank(data: bytes, begins: Int64, ends: Int64) -> npt.NDArray[np.bool_]:
    """Which lines of a block, as `cut` gives them, hold more than white space."""
    codes, some = np.frombuffer(data, np.uint8), begins < ends
    if _IS_SPACE[codes[begins[some]]].any():
        some &= np.logical_or.reduceat(~_IS_SPACE[codes], begins)
    return some


def drain(held: bytearray, more: bytes | memoryview = b"") -> bytes:
    """The bytes of `held`, which is empty afterwards, and `more`."""
    whole = b"".join((held, more))
    held.clear()
    return whole


def invalid_utf8(error: UnicodeDecodeError, data: bytes, what: str) -> tuple[str, str]:
    """The reason and tip for bytes of a line, or whatever it is, that are no text."""
    return (
        f"invalid UTF-8 at byte {error.start} of the {what}: 0x{data[error.start]:02x}",
        "convert it: iconv -f ORIGINAL_ENCODING -t utf-8",
    )


def other_content(beginning: bytes) -> tuple[str, str] | None:
    """Say what a file is that is not text in UTF-8, by its first bytes, with a tip."""
    for mark, name in _MARKS.items():
        if beginning.startswith(mark):
            what = f"begins with the byte order mark of {name}, expected UTF-8"
            return what, f"convert it: iconv -f {name[:6]} -t UTF-8 FILE > NEW_FILE"
    if found := COMPRESSED.match(beginning):
        ending = next(end for end, name in COMPRESSIONS.items() if name == found.lastgroup)
        tip = f"let its name end in {ending}; decompress what goes to stdin"
        return f"is {found.lastgroup} data, expected text in UTF-8", tip
    if beginning.startswith(_GIT_LFS):
        return "is a Git LFS pointer, not the file", "fetch it: git lfs install && git lfs pull"
    return None
