"""Open files, decompress them, and cut them into lines in bounded memory.

A byte order mark of UTF-8 is not part of the text. A file that begins with the mark of another
encoding, that is compressed under another name, or that is a Git LFS pointer ends the run: it has
no records. Memory holds a few blocks of 4 MB, or the longest line.
"""

from __future__ import annotations

import codecs
import io
import os
import re
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
from packer_cli.errors import DataError, damaged_input, from_os_error
from packer_cli.options.formats import COMPRESSIONS
from packer_cli.records import BadRecord, InputFile, Int64

STDIN = "-"
BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 256 << 20  # of a line, cell or text document
CUT = "cut it into parts, or use --on-error skip"
OVERRUN_BYTES = 64 << 10  # read at a time beyond where a slice or a file ends
_STORED_BYTES = 1 << 16
_PLAIN_BYTES = 1 << 18  # that a decompressor gives at once
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
_BEGINNING_BYTES = 64  # of a file, which show its compression
_NOT_IN_TEXT = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_LINE_END = ord("\n")
_IS_SPACE = np.isin(np.arange(256), [*b" \t\n\r\v\f"])
_Read = Callable[[int], bytes]


class OpenInput:
    """An opened file: `read` returns plain bytes, `consumed` counts the stored ones behind them."""

    def __init__(self, path: str, raw: IO[bytes] | _Stdin, read: _Read) -> None:
        self.path = path
        self._raw = raw
        self._reported = raw.tell()
        self.read = read

    def consumed(self) -> int:
        """Return the stored, perhaps compressed bytes that were read since the last call."""
        position = self._raw.tell()
        new, self._reported = position - self._reported, position
        return new


class _Stdin:
    """stdin, whose first bytes are read twice: to see what they are, and then by the run.

    remember  what is read now is read again
    """

    remember = False

    def __init__(self, seen: bytes = b"") -> None:
        self.seen = io.BytesIO(seen)
        self.position = 0

    def rewind(self) -> None:
        self.seen.seek(0)
        self.position = 0

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        data = self.seen.read(size)
        if len(data) < size:
            fresh = self._fresh(size - len(data))
            if self.remember:
                self.seen.write(fresh)
            data += fresh
        self.position += len(data)
        return data

    def _fresh(self, size: int) -> bytes:
        """Read as many bytes as asked for: batches must not depend on the pipe."""
        descriptor, parts = sys.stdin.fileno(), list[bytes]()
        while size:
            part = os.read(descriptor, size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


_stdin = _Stdin()


def begin_stdin(seen: bytes = b"") -> None:
    """Begin a run. `seen`: what another process has read of stdin, to see what it is."""
    global _stdin  # noqa: PLW0603 a process has one
    _stdin = _Stdin(seen)


def seen_of_stdin() -> bytes:
    """Return what was read of stdin to see what it is."""
    return _stdin.seen.getvalue()


def stdin_size() -> int:
    """Return how many bytes the run has read from stdin in this process."""
    return _stdin.position


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
    """Open a file at byte `start`, 0 if it is compressed. Raises DataError."""
    compression = file.compression
    try:
        if file.path == STDIN:
            _stdin.rewind()
            yield OpenInput(STDIN, _stdin, _stdin.read)
            return
        # decompressors read little at a time, and everything in the end
        ahead = BLOCK_BYTES if compression else storage.AHEAD_BYTES
        with storage.open_bytes(file.path, ahead) as raw:
            if compression and not file.size:
                raise EOFError  # even an empty file compresses to some bytes
            if compression:
                compression = _stored_as(raw.read(_BEGINNING_BYTES), compression)
            raw.seek(start)
            plain = _reading(raw, file.size)
            read = _decompressed(compression, raw) if compression else plain
            yield OpenInput(file.path, raw, read)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise from_os_error(error, file.path, "read") from error
        # lzma is imported only if it is needed
        is_damage = isinstance(error, EOFError | OSError | zlib.error)
        if not is_damage and type(error).__name__ != "LZMAError":
            raise
        damage, tip = f"not valid {compression} data: {error}", "fetch or write it again"
        if isinstance(error, EOFError) or "truncated" in str(error).lower():
            damage = f"the {compression} data ends too early; the file was cut short"
        elif "too much memory" in str(error):
            damage = "its zstd window is larger than 128 MiB, which needs as much memory to read"
            tip = f"decompress it: zstd -d --long=31 {shlex.quote(file.path)}, and pack that"
        raise damaged_input(f"{file.path}: {damage}", tip) from error


def next_size(stop: int | None, position: int) -> int:
    """Return how many bytes to read next: up to a slice's end, then in small steps."""
    left = BLOCK_BYTES if stop is None else max(stop - position, 0) + OVERRUN_BYTES
    return min(left, BLOCK_BYTES)


def _reading(raw: IO[bytes], size: int) -> _Read:
    """Return a function that reads. It allocates no more than the file may fill: allocating a block
    takes longer than reading a small file.
    """

    def read(wanted: int) -> bytes:
        return raw.read(min(wanted, max(size - raw.tell(), 0) + OVERRUN_BYTES))

    return read


def _stored_as(beginning: bytes, named: str) -> str | None:
    """Return the compression that the first bytes show; None for text, by the name if in doubt."""
    if match := COMPRESSED.match(beginning):
        return match.lastgroup
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return named
    return named if _NOT_IN_TEXT.search(beginning) else None


def _decompressed(compression: str, raw: IO[bytes]) -> _Read:
    """Return a function that reads a number of plain bytes, or a few more."""
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
    """Yield the plain bytes of gzip, xz or bz2 streams that lie end to end.

    Python's own readers ignore damage after the first stream, and Arrow fails at empty bz2 streams.
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

    data  None for one line that is longer than the limit, which is skipped
    """

    offset: int
    data: bytes | None


def too_long(position: int, unit: str = "line") -> BadRecord:
    """Return the bad record for a line, or another unit, that is longer than the limit."""
    tip = f"{CUT}; does the file have line ends?"
    return BadRecord(position, f"the {unit} is longer than {MAX_LINE_BYTES} bytes", tip)


def read_lines(source: OpenInput, start: int, stop: int | None) -> Iterator[Lines]:
    """Yield the lines that begin in [start, stop), in blocks. The last one may lack its newline.

    source  stands at max(start - 1, 0): the byte before the slice shows whether a line begins at
            `start`

    Memory is one block and the longest line accepted. Lines within a block may exceed
    MAX_LINE_BYTES; callers check each line. Raises DataError for a file in another encoding.
    """
    position = offset = max(start - 1, 0)
    held = bytearray()  # the beginning of a line, which grows without a copy of itself
    seeking, is_last = start > 0, False  # seeking: the current line is another slice's, or overlong
    while not is_last and (chunk := source.read(next_size(stop, position))):
        if not position and (content := other_content(chunk)):
            raise DataError(f"{source.path}: {content[0]}", content[1])
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
        if len(held) > MAX_LINE_BYTES + 1:  # a CR at the end may not count
            yield Lines(offset, None)
            seeking = True
            held.clear()
    if held:
        yield Lines(offset, drain(held))


def cut(offset: int, data: bytes) -> tuple[Int64, Int64, Int64]:
    """Return positions of lines in the file, and begins and ends in the block, int64[n] each."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _LINE_END)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    begins = np.concatenate([[0], ends[:-1] + 1])
    positions = begins + offset
    if not offset and data.startswith(BYTE_ORDER_MARK):
        begins[0] = len(BYTE_ORDER_MARK)
    return positions, begins, ends


def nonblank(data: bytes, begins: Int64, ends: Int64) -> npt.NDArray[np.bool_]:
    """Mark the lines of a block that hold more than white space, bool[n]. The ends are by `cut`."""
    codes, is_nonblank = np.frombuffer(data, np.uint8), begins < ends
    if _IS_SPACE[codes[begins[is_nonblank]]].any():
        is_nonblank &= np.logical_or.reduceat(~_IS_SPACE[codes], begins)
    return is_nonblank


def drain(held: bytearray, more: bytes | memoryview = b"") -> bytes:
    """Return the bytes of `held`, which becomes empty, and `more`."""
    whole = b"".join((held, more))
    held.clear()
    return whole


def invalid_utf8(error: UnicodeDecodeError, data: bytes, unit: str) -> tuple[str, str]:
    """Return the reason and the tip for bytes of a line, or another unit, that are not UTF-8."""
    return (
        f"invalid UTF-8 at byte {error.start} of the {unit}: 0x{data[error.start]:02x}",
        "convert it: iconv -f ORIGINAL_ENCODING -t utf-8",
    )


def other_content(beginning: bytes) -> tuple[str, str] | None:
    """Return what a file is by its first bytes, and a tip, if it is not text in UTF-8."""
    for mark, name in _MARKS.items():
        if beginning.startswith(mark):
            content = f"begins with the byte order mark of {name}, expected UTF-8"
            return content, f"convert it: iconv -f {name[:6]} -t UTF-8 FILE > NEW_FILE"
    if match := COMPRESSED.match(beginning):
        ending = next(end for end, name in COMPRESSIONS.items() if name == match.lastgroup)
        tip = f"let its name end in {ending}; decompress what goes to stdin"
        return f"is {match.lastgroup} data, expected text in UTF-8", tip
    if beginning.startswith(_GIT_LFS):
        return "is a Git LFS pointer, not the file", "fetch it: git lfs install && git lfs pull"
    return None
