"""Where inputs and results are: local files, or URLs of any store that fsspec reaches.

The only module that tells the two apart. Local paths go straight to the operating system and fail
with OSError, as its functions do. For URLs fsspec is imported, at the first one; whatever a store
raises becomes a DataError that says what to do, and a missing package a UsageError.

What may pass (a connection that is cut, a server's error) is tried again a few times, after ever
longer waits, besides what the store's own package does.
"""

from __future__ import annotations

import errno
import glob as local_glob
import hashlib
import io
import os
import random
import stat as local_stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from packer_cli.errors import DataError, InputChangedError, PackerError, UsageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# A request takes tens of milliseconds whatever its size, and bytes that nobody needs are wasted.
AHEAD_BYTES = 1 << 20
# Of what is written at a time, and read of a whole object. S3 takes at least 5 MiB, and at most
# 10,000 parts of an object; others want multiples of 256 KiB.
_PART_BYTES = 8 << 20
_MOST_PARTS = 9_000
_MIB = 1 << 20
TIMEOUT_SECONDS = 60  # of silence in a request; s3fs has 15 by itself
_TOTAL_SECONDS = 600  # of one over HTTP: 8 MiB, the largest range, at 14 KB/s
_TRIES, _FIRST_WAIT = 3, 0.5  # seconds
_LASTING_SECONDS = 150  # after which nothing is tried again: packages of stores try by themselves
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, TypeError, ValueError)
_MAY_PASS = (408, 425, 429)  # of the answers over HTTP below 500
_LOCAL = ("file", "local")
# What stores call a state of an object, the surest first. Only the first found counts: a time
# comes in seconds from one request and in milliseconds from another.
_VERSIONS = (
    "ETag", "etag", "xet_hash", "blob_id", "generation", "Content-MD5", "mtime", "modified",
    "LastModified", "last_modified", "Last-Modified", "modify", "modificationTime", "created",
)  # fmt: skip
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "created")
_T = TypeVar("_T")


class Stat(NamedTuple):
    """`version` differs once the file has changed: its mtime in ns, or made of what a store says,
    0 of one that says nothing.

    `regular` False: a pipe, a directory and whatever else cannot be read twice. The others are 0
    for URLs.
    """

    size: int
    version: int
    regular: bool
    ctime_ns: int = 0
    device: int = 0
    inode: int = 0


def is_url(path: str) -> bool:
    """Tell whether it is a URL for fsspec: `protocol://...`, without a folder before."""
    head, separator, _ = path.partition("://")
    return bool(separator) and "/" not in head


def base_name(path: str) -> str:
    """The last part of a path, without a web address's query."""
    if path.startswith(("http://", "https://")):
        path = urlsplit(path).path
    return path.rstrip("/").rpartition("/")[2]


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def identity(path: str) -> str:
    """One name for a local file, however many it has; the file can be opened by it."""
    if not is_url(path):
        return os.path.realpath(path)
    return os.path.realpath(_store(path)[1]) if path.partition("://")[0] in _LOCAL else path


def place(output: str) -> Path | str:
    """The place of results: a local path, also of a `file://` URL, or a URL of a store."""
    if is_url(output) and output.partition("://")[0] not in _LOCAL:
        return output
    return Path(_store(output)[1] if is_url(output) else output)


def local(path: str | os.PathLike[str], doing: str) -> Path:
    """The path, for what only works on local ones. UsageError for URLs, with what is not done, and
    for what Arrow cannot open.
    """
    refuse_other_than_utf8("", os.fspath(path))
    if is_url(os.fspath(path)):
        raise UsageError(f"{path}: a URL, {doing}", "copy it to a local path, and name that")
    return Path(path)


def refuse_other_than_utf8(option: str, path: str) -> None:
    """UsageError for a path that neither Arrow nor a manifest can hold. `option`: goes before."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{option}{os.fsencode(path)!r}: the name is not UTF-8",
            "use a name that is UTF-8",
        ) from None


def kind(path: str) -> Literal["file", "folder"] | None:
    """The kind of a path now; "file" is anything but a folder. Raises PackerError for URLs."""
    if not is_url(path):
        if os.path.isdir(path):
            return "folder"
        return "file" if os.path.exists(path) else None
    return _answered(path, lambda: _kind(path))


def _kind(url: str) -> Literal["file", "folder"] | None:
    store, name = _store(url)
    store.invalidate_cache()  # what an earlier run in this process has seen
    try:
        return "folder" if store.info(name)["type"] == "directory" else "file"
    except FileNotFoundError:
        return None


def stat(path: str, *, again: bool = False) -> Stat:
    """The status of a file; for URLs from its folder's listing, unless asked `again`.

    Raises OSError, for URLs PackerError.
    """
    if not is_url(path):
        status = os.stat(path)
        regular = local_stat.S_ISREG(status.st_mode)
        times = status.st_mtime_ns, regular, status.st_ctime_ns
        return Stat(status.st_size, *times, status.st_dev, status.st_ino)
    store, name = _answered(path, lambda: _store(path))
    if again:
        store.invalidate_cache(name)
    return _stat(path, _answered(path, lambda: store.info(name)))


def _stat(path: str, info: dict[str, Any]) -> Stat:
    if info["size"] is None:
        raise UsageError(f"{path}: the server does not tell its size", "copy it to a local path")
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    version = version.strip('"')  # which some stores leave out in their listings
    digest = hashlib.sha256(version.encode()).digest() if version else b""
    return Stat(info["size"], int.from_bytes(digest[:7], "big"), info["type"] == "file")


def listing(folder: str) -> list[tuple[str, bool]]:
    """(name, whether it is a folder) of all in a folder. Raises OSError, for URLs PackerError."""
    if not is_url(folder):
        return [(name, os.path.isdir(os.path.join(folder, name))) for name in os.listdir(folder)]
    entries = _answered(folder, lambda: _entries(folder))
    return [(name, info["type"] == "directory") for name, info in entries]


def _entries(url: str) -> list[tuple[str, dict[str, Any]]]:
    store, own = _store(url)
    return [
        (base_name(info["name"]), info)
        for info in store.ls(own, detail=True)
        if info["name"].rstrip("/") != own.rstrip("/")  # an object that stands for the folder
    ]


def is_file(path: str) -> bool:
    """Raises PackerError for URLs."""
    return kind(path) == "file" if is_url(path) else os.path.isfile(path)


def objects(url: str) -> dict[str, Stat | None]:
    """List a folder at a URL as it is now, by name; None for folders.

    {} when there is none. Raises PackerError.
    """
    return _answered(url, lambda: _objects(url))


def _objects(url: str) -> dict[str, Stat | None]:
    _store(url)[0].invalidate_cache()
    try:
        entries = _entries(url)
    except FileNotFoundError:
        return {}
    return {
        name: None if info["type"] == "directory" else _stat(url, info) for name, info in entries
    }


def sizes(url: str) -> dict[str, int | None]:
    """The sizes of `objects`."""
    return {name: found and found.size for name, found in objects(url).items()}


def put_after(url: str, name: str) -> set[str]:
    """Names in a folder at a URL of what is younger than `name`, where a store tells ages."""
    ages = {one: _put_at(info) for one, info in _answered(url, lambda: _entries(url))}
    return {one for one, age in ages.items() if age > ages.get(name, sys.maxsize)}


def _put_at(info: dict[str, Any]) -> float:
    """Seconds since 1970; 0 where a store does not tell, or not in a form that is known."""
    found = next((info[key] for key in _TIMES if info.get(key)), 0)
    found = found.timestamp() if isinstance(found, datetime) else found
    return float(found) if isinstance(found, int | float) else 0


def part_bytes(size: int) -> int:
    """Bytes of a file of this size that `write` holds in memory, twice."""
    return max(_PART_BYTES, -(-size // _MOST_PARTS // _MIB) * _MIB)


def write(url: str, blocks: Iterable[bytes], size: int) -> None:
    """Make an object of about `size` bytes. Raises PackerError, and what `blocks` raise.

    Then nothing is at the URL, or what was before; where stores have no such thing as a whole
    object (sftp, memory in tests), perhaps its beginning.
    """
    with _asking(url, "write"):
        store, name = _store(url)
        options = {"block_size": part_bytes(size)}
        try:
            file = store.open(name, "wb", **options)
        except FileNotFoundError:
            if not name.startswith("/"):  # no folder is missing, but the bucket: it is not made
                raise
            store.makedirs(name.rpartition("/")[0], exist_ok=True)
            file = store.open(name, "wb", **options)
        try:
            for block in blocks:
                file.write(block)
            file.close()
        except BaseException:
            _take_back(file)
            raise


def _take_back(file: Any) -> None:
    """End writing an object that is not whole: to close it would make it look so."""
    with suppress(Exception):
        file.discard()
    try:
        file.closed = True
    except AttributeError:  # a file that is there already
        with suppress(Exception):
            file.close()


def remove(url: str) -> None:
    """Remove an object, if it is there. Raises PackerError."""
    with _asking(url, "remove"), suppress(FileNotFoundError):
        store, name = _store(url)
        store.rm_file(name)


def remove_folder(url: str) -> None:
    """Remove an empty folder, where stores have folders; failures are ignored."""
    with suppress(Exception):
        store, name = _store(url)
        if name.startswith("/"):  # others have none, and might take it for a bucket
            store.rmdir(name)


def glob(pattern: str) -> list[str]:
    """Paths that match and are no folders, sorted. Raises OSError for a folder that
    cannot be listed, for URLs PackerError.
    """
    if not is_url(pattern):
        _refuse_unlistable(pattern)
        matches = local_glob.glob(pattern, recursive=True)
        return sorted(path for path in matches if not os.path.isdir(path))
    store, own = _answered(pattern, lambda: _store(pattern))
    # names have lost what made the pattern a URL: scheme, host
    head = pattern.rstrip("/").removesuffix(own)
    entries = _answered(pattern, lambda: store.glob(own, detail=True))
    return sorted(head + name for name, info in entries.items() if info["type"] == "file")


def _refuse_unlistable(pattern: str) -> None:
    """OSError for a folder in which the pattern looks for names: Python's glob passes over it."""
    parts = pattern.split("/")
    for place, part in enumerate(parts):
        if local_glob.has_magic(part):
            above = "/".join([*parts[: place + (part == "**")], ""]) or os.curdir
            for folder in local_glob.glob(above, recursive=True):
                os.scandir(folder).close()


def open_bytes(
    path: str, ahead: int = AHEAD_BYTES, found: Stat | None = None
) -> io.FileIO | io.BufferedReader:
    """A new file object for each caller, unbuffered if local.

    Of a URL, at least `ahead` bytes are fetched at a time, if given of the version that was
    `found`. Raises OSError, also for what is no regular file: a pipe may wait for ever, and a
    device never end. Raises PackerError for URLs, sometimes only from reading.
    """
    if is_url(path):
        return io.BufferedReader(_Remote(path, found), ahead)
    file = open(path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115
    if local_stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(None, "not a regular file", path)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def open_lines(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open as `open_bytes`, to be read line by line."""
    return io.BufferedReader(open_bytes(os.fspath(path)))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file. Raises as `open_bytes` does."""
    with open_bytes(os.fspath(path)) as file:
        return file.read()


def ranges(url: str, spans: Sequence[tuple[int, int]], size: int) -> list[bytes]:
    """The bytes begin .. end of an object for each span, one request each, at the same time where
    the store's package can. Raises PackerError, also for an object that ends before.

    `size`: how many bytes it should have; the span up to there comes with one more if it has more.
    """
    return _answered(url, lambda: _ranges(url, spans, size))


def _ranges(url: str, spans: Sequence[tuple[int, int]], size: int) -> list[bytes]:
    store, name = _store(url)
    begins = [begin for begin, _ in spans]
    ends = [end + (end == size) for _, end in spans]
    parts: list[bytes] = store.cat_ranges([name] * len(spans), begins, ends, on_error="raise")
    for (begin, end), most, part in zip(spans, ends, parts, strict=True):
        if not end <= begin + len(part) <= most:
            raise OSError(
                errno.EIO, f"bytes {begin} to {end} were asked for, {len(part)} bytes came"
            )
    return parts


def open_arrow(path: str, found: Stat | None = None) -> Any:
    """Open a file for Arrow; not mapped, since who cuts short a mapped file kills us."""
    import pyarrow as pa  # noqa: PLC0415

    if not is_url(path):
        return pa.OSFile(path)
    return pa.PythonFile(open_bytes(path, found=found), mode="r")


class _Remote(io.RawIOBase):
    """An object of a store; each read is one request. The first also opens it: one more."""

    def __init__(self, url: str, found: Stat | None) -> None:
        self._url, self._found = url, found
        self._file: Any = None
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset += _answered(self._url, lambda: int(self._opened().seek(0, os.SEEK_END)))
        self._position = offset + (self._position if whence == os.SEEK_CUR else 0)
        return self._position

    def readall(self) -> bytes:
        """As the base class, which would make a request for every 8 KiB."""
        return b"".join(iter(lambda: self.read(_PART_BYTES), b""))

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read as many bytes as there are: batches must not depend on a server's portions."""
        filled = _answered(self._url, lambda: self._fill(memoryview(buffer)))
        self._position += filled
        return filled

    def _fill(self, view: memoryview) -> int:
        file, filled = self._opened(), 0
        file.seek(self._position)
        while filled < len(view) and (part := file.read(len(view) - filled)):
            if len(part) > len(view) - filled:
                raise OSError(errno.EIO, f"{len(part)} bytes came, more than were asked for")
            view[filled : filled + len(part)] = part
            filled += len(part)
        end = self._position + filled
        if filled < len(view) and end < (getattr(file, "size", None) or 0):
            raise OSError(errno.EIO, f"it ends at byte {end} of {file.size}")
        return filled

    def _opened(self) -> Any:
        if self._file is None:
            store, name = _store(self._url)
            file = store.open(name, "rb", cache_type="none")
            # files of stores keep what they were opened as, and ask for that version
            now = _stat(self._url, getattr(file, "details", None) or store.info(name))
            if self._found not in (None, now):
                raise OSError(errno.EBUSY, "another version")
            # memory:// gives out the object itself, whose position would be everybody's
            self._file = io.BytesIO(file.getvalue()) if isinstance(file, io.BytesIO) else file
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def _store(url: str) -> tuple[Any, str]:
    """The file system for a URL, and the URL's path in it."""
    try:
        import fsspec  # noqa: PLC0415 slow, and not needed for local files
    except ImportError as error:
        raise UsageError(
            f"{url}: fsspec is needed for URLs, and is not installed",
            "pip install fsspec, or copy the data to a local path",
        ) from error
    protocol = url.partition("://")[0]
    try:
        system = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise UsageError(
            f"{url}: {protocol}:// needs a package that is not installed", str(error)
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{url}: unknown protocol {protocol}",
            "use one that fsspec has, such as s3, gs, hf or https; or copy it to a local path",
        ) from error
    names = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    if "http" in names:
        from packer_cli.web import Web  # noqa: PLC0415 as above

        system = Web
    # not url_to_fs: it takes "::" in a name for a chain of file systems
    options = _patience(names) | system._get_kwargs_from_urls(url)
    store = system(**options)
    if "s3" in names:
        store.retries = 1  # around those of botocore, and inside ours: a silent one took minutes
    return store, cast("str", system._strip_protocol(url))


def _patience(names: Iterable[str]) -> dict[str, Any]:
    """Options for a server that says nothing, or little, where its package would wait longer than
    `TIMEOUT_SECONDS`, or that sends another version; but for what the user has set for fsspec.
    """
    from fsspec.config import conf  # noqa: PLC0415 as above

    options: dict[str, Any] = {}
    if "http" in names:
        from aiohttp import ClientTimeout  # noqa: PLC0415 fsspec needs it for these

        waits = ClientTimeout(
            total=_TOTAL_SECONDS, connect=TIMEOUT_SECONDS, sock_read=TIMEOUT_SECONDS
        )
        options = {"client_kwargs": {"timeout": waits}}
    elif "gs" in names:
        options = {"requests_timeout": TIMEOUT_SECONDS}
    elif "s3" in names:
        options = {"local_expiry_check": True}  # not left to servers, some of which do not
    chosen = {option for name in names for option in conf.get(name, {})}
    return {option: value for option, value in options.items() if option not in chosen}


def _answered(url: str, ask: Callable[[], _T]) -> _T:
    """What a store answers, asked again if that may help. Raises PackerError."""
    begun = time.monotonic()
    for attempt in range(1, _TRIES + 1):
        try:
            with _asking(url):
                return ask()
        except DataError as error:
            cause = error.__cause__
            if cause is None or _lasts(error, cause):
                raise
            if attempt == _TRIES or time.monotonic() - begun > _LASTING_SECONDS:
                times = f" (tried {attempt} times)" if attempt > 1 else ""
                raise DataError(f"{error.message}{times}", error.tip) from error
            longest = _FIRST_WAIT * 2**attempt
            wait = random.uniform(longest / 2, longest)  # noqa: S311 apart from other processes
            headers = getattr(cause, "headers", None) or {}
            if (asked := headers.get("Retry-After", "")).isdecimal():
                wait = max(wait, min(int(asked[:9]), TIMEOUT_SECONDS))
        time.sleep(wait)
    raise AssertionError


def _lasts(error: DataError, cause: BaseException) -> bool:
    """Whether asking again would be of no use."""
    if isinstance(error, InputChangedError) or isinstance(cause, (*_LASTING, PackerError)):
        return True
    status = getattr(cause, "status", None)
    is_final = isinstance(status, int) and status < 500 and status not in _MAY_PASS
    return is_final or "credential" in type(cause).__name__.lower()


@contextmanager
def _asking(url: str, doing: str = "read") -> Iterator[None]:
    """Turn errors of stores into PackerError: their own, their network library's, OSErrors."""
    try:
        yield
    except PackerError:
        raise
    except NotImplementedError as error:
        if doing == "read":
            raise _explained(error, url, doing) from error
        raise UsageError(
            f"{url}: cannot {doing} at {url.partition('://')[0]}://",
            "choose a store that can be written to, or a local directory",
        ) from error
    except Exception as error:
        raise _explained(error, url, doing) from error


def _explained(error: Exception, url: str, doing: str) -> DataError:
    protocol, name = url.partition("://")[0], type(error).__name__
    text = getattr(error, "strerror", None) or str(error) or name
    if hasattr(error, "status") and hasattr(error, "message"):  # aiohttp would name the URL again
        text = f"{error.status} {error.message}" if error.status else name
    reason = text.splitlines()[0]
    if getattr(error, "errno", None) == errno.EBUSY or name == "FileExpired":
        tip = "wait until nothing writes to it, then run again; if nothing does, copy it to a local"
        return InputChangedError(f"{url}: cannot {doing}: it changed", f"{tip} path")
    if isinstance(error, FileNotFoundError):
        reason = "no such file" if doing == "read" else "no such bucket or folder"
    return DataError(
        f"{url}: cannot {doing}: {reason}",
        f"check the network, the address and the credentials for {protocol}://, then run the same "
        "command again",
    )
