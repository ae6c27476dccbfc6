"""Read and write local files, and URLs of any store that fsspec knows.

No other module distinguishes the two. Local paths go straight to the operating system and fail with
OSError. fsspec is imported at the first URL; an error of a store becomes a DataError with a tip,
and a missing package a UsageError.

User, password and query of a URL, which may be a signature, only open it. All other modules see the
URL without them, as `public` returns it, so they are never printed or written to a file.
"""

from __future__ import annotations

import errno
import glob as local_glob
import hashlib
import io
import os
import re
import stat as local_stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, cast

from packer_cli.errors import DataError, InputChangedError, PackerError, UsageError, os_errors

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# A request takes tens of milliseconds whatever its size, but bytes that are not used are wasted.
AHEAD_BYTES = 1 << 20
MOST_AT_ONCE = 1 << 30  # bytes of a file that is read as a whole
OTHER = -1  # in the place of the size of what is not a regular file
_PART_BYTES = 8 << 20  # read of a whole object at a time
TIMEOUT_SECONDS = 60  # of silence in a request over HTTP
_LOCAL = ("file", "local")
# Names by which stores give the version of an object, the most reliable first. Only the first that
# is there counts: a time comes in seconds from one request and in milliseconds from another.
_VERSIONS = (
    "ETag", "etag", "xet_hash", "blob_id", "generation", "Content-MD5", "mtime", "modified",
    "LastModified", "last_modified", "Last-Modified", "modify", "modificationTime", "created",
)  # fmt: skip
# The query of a URL, and its user and password, each at http(s) and at other stores: there, "?" may
# be part of a pattern, and "@" may follow the name of a container.
_QUERY = re.compile(r"[?#].*", re.DOTALL), re.compile(r"\?[^/?]*=.*", re.DOTALL)
# A password may hold "/", though it should be escaped; digits before a "/" are a port.
_PASSWORD = r"[^/@:]*:(?!:|\d*(?:/|$))[^@]*@"  # noqa: S105 a pattern
_USER = re.compile(rf"://({_PASSWORD}|[^/]*@)"), re.compile(rf"://({_PASSWORD})")
# (user, query) of URLs that `public` has seen, by scheme and by the URL after "://" without them:
# a password for a host by one scheme is not sent to it by another.
_typed: dict[tuple[str, str], tuple[str, str]] = {}


class Stat(NamedTuple):
    """State of a file.

    version  another number once the file has changed: its mtime in ns; at a URL, a hash of the
             store's version, 0 if it gives none
    regular  False for a pipe, a directory and others that cannot be read twice

    The others are 0 for URLs.
    """

    size: int
    version: int
    regular: bool
    device: int = 0
    inode: int = 0


def is_url(path: str) -> bool:
    """Tell a URL for fsspec, `protocol://...`, from a local path."""
    head, separator, _ = path.partition("://")
    return bool(separator) and "/" not in head


def public(text: str) -> str:
    """Return a URL as it may be shown: without user, password and query. A local path stays as it
    is, and so does a prefix of the URL, such as "@".

    This process remembers the user, password and query: the URL, and names below it, are opened
    with them.
    """
    before, is_far, _ = text.partition("://")
    if not is_far or "/" in before:
        return text
    is_other = not before.lower().endswith(("http", "https")) and "::http" not in text
    query = _QUERY[is_other].search(text)
    address = text[: query.start()] if query else text
    users = _USER[is_other].findall(address)
    shown = _USER[is_other].sub("://", address)
    scheme, _, place = shown.rstrip("/").partition("://")
    scheme = scheme.lower().removeprefix("@")
    if users:
        _typed.setdefault((scheme, place.partition("/")[0]), (users[-1], ""))
    if shown != text:
        _typed[scheme, place] = (users or [""])[-1], query[0] if query else ""
    return shown


def typed(url: str) -> str:
    """Return a URL with the user, password and query that `public` removed."""
    head, is_far, address = url.partition("://")
    place = address.rstrip("/") if is_far and _typed else ""
    scheme = head.lower().removeprefix("@")
    while place:
        if (scheme, place) in _typed:
            user, query = _typed[scheme, place]
            return f"{head}://{user}{address}{query}"
        place = place.rpartition("/")[0]
    return url


def base_name(path: str) -> str:
    """Return the last part of a path or a URL."""
    return public(path).rstrip("/").rpartition("/")[2]


def join(folder: str, name: str) -> str:
    """Return the path or URL of a name in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def identity(path: str) -> str:
    """Return one name for a file, however it was named; the file can be opened by it."""
    if not is_url(path):
        return os.path.realpath(path)
    return os.path.realpath(_store(path)[1]) if path.partition("://")[0] in _LOCAL else path


def absolute(path: str) -> str:
    """Return a local path from the root. A URL and "-" stay as they are."""
    return path if path == "-" or is_url(path) else os.path.abspath(path)


def shown(path: str) -> str:
    """Return a path for people: relative to the current directory, if it is below that."""
    relative = path.removeprefix(os.path.join(os.getcwd(), ""))
    return relative if relative not in {"", "-"} else path  # "-" would be stdin


def place(output: str) -> Path | str:
    """Return where a result goes: a local path, also for a `file://` URL, or a URL of a store."""
    if is_url(output) and output.partition("://")[0] not in _LOCAL:
        return public(output)
    return Path(_store(output)[1] if is_url(output) else output)


def local(path: str | os.PathLike[str], doing: str) -> Path:
    """Return a local path. Raises UsageError for a URL, saying what is not done with it, and for a
    name that Arrow cannot open.
    """
    refuse_other_than_utf8("", os.fspath(path))
    if is_url(os.fspath(path)):
        raise UsageError(
            f"{public(os.fspath(path))}: a URL, {doing}", "copy it to a local path, and name that"
        )
    return Path(path)


def refuse_other_than_utf8(option: str, path: str) -> None:
    """Raise UsageError for a path that Arrow or a manifest cannot hold. `option` goes before it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{option}{os.fsencode(path)!r}: the name is not UTF-8", "use a name that is UTF-8"
        ) from None


def kind(path: str) -> Literal["file", "folder"] | None:
    """Return the kind of a path now, None if nothing is there; "file" is anything but a folder.

    Raises PackerError for URLs.
    """
    if not is_url(path):
        if os.path.isdir(path):
            return "folder"
        return "file" if os.path.exists(path) else None
    with _explained(path):
        store, name = _store(path)
        store.invalidate_cache()  # an earlier run in this process may have filled it
        try:
            return "folder" if store.info(name)["type"] == "directory" else "file"
        except FileNotFoundError:
            return None


def stat(path: str, *, again: bool = False) -> Stat:
    """Return the state of a file. At a URL it may come from a listing of its folder, unless `again`
    is set. Raises OSError, for URLs PackerError.
    """
    if not is_url(path):
        status = os.stat(path)
        regular = local_stat.S_ISREG(status.st_mode)
        return Stat(status.st_size, status.st_mtime_ns, regular, status.st_dev, status.st_ino)
    with _explained(path):
        store, name = _store(path)
        if again:
            store.invalidate_cache(name)
        return _stat(path, store.info(name))


def _stat(path: str, info: dict[str, Any]) -> Stat:
    if info["size"] is None:
        raise UsageError(f"{path}: the server does not report its size", "copy it to a local path")
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    version = version.strip('"')  # which some stores leave out in their listings
    digest = hashlib.sha256(version.encode()).digest() if version else b""
    return Stat(info["size"], int.from_bytes(digest[:7], "big"), info["type"] == "file")


def listing(folder: str) -> list[tuple[str, bool]]:
    """Return the names in a folder, each with whether it is a folder. Raises OSError, for URLs
    PackerError.
    """
    if not is_url(folder):
        return [(name, os.path.isdir(os.path.join(folder, name))) for name in os.listdir(folder)]
    with _explained(folder):
        return [(name, info["type"] == "directory") for name, info in _entries(folder)]


def _entries(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the names in a folder, each with what the store knows of it."""
    store, folder = _store(url)
    return [
        (base_name(info["name"]), info)
        for info in store.ls(folder, detail=True)
        if info["name"].rstrip("/") != folder.rstrip("/")  # an object that stands for the folder
    ]


def is_file(path: str) -> bool:
    """Tell whether a file is there. Raises PackerError for URLs."""
    return kind(path) == "file" if is_url(path) else os.path.isfile(path)


def sizes(folder: str) -> dict[str, int]:
    """Return the sizes in bytes of all files in a folder as it is now, by name; OTHER for what is
    not a regular file. {} if there is no such folder. Raises OSError, for URLs PackerError.
    """
    if not is_url(folder):
        with suppress(FileNotFoundError, NotADirectoryError):
            entries = {name: size_of(os.path.join(folder, name)) for name in os.listdir(folder)}
            return {name: size for name, size in entries.items() if size is not None}
        return {}
    with _explained(folder):
        _store(folder)[0].invalidate_cache()
        with suppress(FileNotFoundError):
            return {
                name: info["size"] if info["type"] == "file" else OTHER
                for name, info in _entries(folder)
            }
        return {}


def size_of(path: str | os.PathLike[str]) -> int | None:
    """Return the size of a local file in bytes, OTHER for a link, a folder and the like, None if
    nothing is there.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_size if local_stat.S_ISREG(status.st_mode) else OTHER


def check_writable(url: str) -> None:
    """Raise UsageError for a URL of a kind that is only read."""
    with _explained(url, "write"):
        if "http" in _store(url)[0].protocol:
            raise NotImplementedError


def write(url: str, content: bytes) -> None:
    """Write an object at a URL. Raises PackerError."""
    with _explained(url, "write"):
        store, name = _store_to_write(url)
        store.pipe_file(name, content)


def upload(files: Sequence[Path], folder: str) -> None:
    """Copy files into a folder at a URL, at once if its package can. Raises PackerError."""
    with _explained(folder, "write"):
        places = [_store_to_write(join(folder, file.name)) for file in files]
        places[0][0].put([*map(str, files)], [name for _, name in places])


def _store_to_write(url: str) -> tuple[Any, str]:
    """Return `_store`, after making the folder of the object. Stores without folders would take it
    for a bucket.
    """
    store, name = _store(url)
    if name.startswith("/"):
        store.makedirs(name.rpartition("/")[0], exist_ok=True)
    return store, name


def download(url: str, path: Path) -> None:
    """Copy an object to a local file. Raises PackerError."""
    with _explained(url):
        store, name = _store(url)
        store.get_file(name, str(path))


def remove(url: str) -> None:
    """Remove an object, if it is there. Raises PackerError."""
    with _explained(url, "remove"), suppress(FileNotFoundError):
        store, name = _store(url)
        store.rm_file(name)


def remove_folder(url: str) -> None:
    """Remove an empty folder, if the store has folders. Failures are ignored."""
    with suppress(Exception):
        store, name = _store(url)
        if name.startswith("/"):  # others have none, and might take it for a bucket
            store.rmdir(name)


def glob(pattern: str) -> list[str]:
    """Return the files that match, sorted. Raises OSError for a folder that cannot be listed, for
    URLs PackerError.
    """
    if not is_url(pattern):
        _refuse_unlistable(pattern)
        matches = local_glob.glob(pattern, recursive=True)
        return sorted(path for path in matches if not os.path.isdir(path))
    with _explained(pattern):
        store, name = _store(pattern)
        # stores return names without scheme and host
        head = typed(pattern).rstrip("/").removesuffix(name)
        entries = store.glob(name, detail=True)
    return sorted(public(head + name) for name, info in entries.items() if info["type"] == "file")


def _refuse_unlistable(pattern: str) -> None:
    """Raise OSError for a folder that the pattern needs and that cannot be listed: Python's glob
    skips it.
    """
    parts = pattern.split("/")
    for place, part in enumerate(parts):
        if local_glob.has_magic(part):
            above = "/".join([*parts[: place + (part == "**")], ""]) or os.curdir
            for folder in local_glob.glob(above, recursive=True):
                os.scandir(folder).close()


def open_bytes(path: str, ahead: int = AHEAD_BYTES) -> io.FileIO | io.BufferedReader:
    """Open a file, unbuffered if it is local. `ahead`: bytes that a URL is read by, at least.

    Raises OSError, also if it is not a regular file: a pipe may wait for ever, and a device never
    end. Raises PackerError for URLs, sometimes only when it is read.
    """
    if is_url(path):
        return io.BufferedReader(_Remote(path), ahead)
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
    """Return the content of a file. Raises as `open_bytes`, and OSError for a local file above
    MOST_AT_ONCE: it may be sparse.
    """
    with open_bytes(os.fspath(path)) as file:
        if isinstance(file, io.FileIO) and os.fstat(file.fileno()).st_size > MOST_AT_ONCE:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return file.read()


def open_arrow(path: str) -> Any:
    """Open a file for Arrow. It is not mapped: if a mapped file is cut short, its readers die."""
    import pyarrow as pa  # noqa: PLC0415

    if not is_url(path):
        return pa.OSFile(path)
    return pa.PythonFile(open_bytes(path), mode="r")


# Local files that are complete or absent, also after a power loss


def no_link(path: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`. Raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, and sync it at the end. Raises DataError, also for a link."""
    with os_errors(path, "write"), open(path, "wb", opener=no_link) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it to the disk. Raises DataError."""
    with written(path) as file:
        file.write(content)


def put_file(path: Path, content: bytes) -> None:
    """Write or replace a file in one step: readers see all of it or none. Raises DataError."""
    with replacing(path, path.with_name(f"{path.name}.part")) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, part: Path) -> Iterator[IO[bytes]]:
    """Open the file `part` to write, which becomes `path` at the end, in one step. If that fails,
    it is removed. Raises DataError.
    """
    with written(part) as file:
        try:
            yield file
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    with os_errors(path, "write"):
        os.rename(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file or a directory to the disk. Raises DataError."""
    with os_errors(path, "write"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(path: Path) -> None:
    """Make a directory and those above it, synced. Raises NotADirectoryError below a file."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():  # no other run has made it meanwhile
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    if os.access(path.parent, os.R_OK):
        sync(path.parent)


class _Remote(io.RawIOBase):
    """An object of a store. Each read is one request; the first takes one more, to open it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._file: Any = None  # until it is open, for `close`
        with _explained(url):
            store, name = _store(url)
            file = store.open(name, "rb", cache_type="none")
        # memory:// returns the object itself, whose position all readers would share
        self._file = io.BytesIO(file.getvalue()) if isinstance(file, io.BytesIO) else file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with _explained(self._url):
            return int(self._file.seek(offset, whence))

    def readall(self) -> bytes:
        """Read to the end; the base class would make a request for every 8 KiB."""
        return b"".join(iter(lambda: self.read(_PART_BYTES), b""))

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the buffer or reach the end: batches must not depend on the portions of a server."""
        view, filled = memoryview(buffer), 0
        with _explained(self._url):
            while filled < len(view) and (part := self._file.read(len(view) - filled)):
                view[filled : filled + len(part)] = part
                filled += len(part)
            end, size = self._file.tell(), getattr(self._file, "size", None) or 0
            if filled < len(view) and end < size:
                raise OSError(errno.EIO, f"it ends at byte {end} of {size}")
        return filled

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


def _store(url: str) -> tuple[Any, str]:
    """Return the file system for a URL, and the URL's path in it. Raises UsageError."""
    try:
        import fsspec  # noqa: PLC0415 slow, and not needed for local files
    except ImportError as error:
        raise UsageError(
            f"{url}: fsspec is needed for URLs, and is not installed",
            "pip install fsspec, or copy the data to a local path",
        ) from error
    protocol, url = url.partition("://")[0], typed(url)
    try:
        system = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise UsageError(
            f"{public(url)}: {protocol}:// needs a package that is not installed", str(error)
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{public(url)}: unknown protocol {protocol}",
            "use one that fsspec has, such as s3, gs, hf or https; or copy it to a local path",
        ) from error
    options = system._get_kwargs_from_urls(url)
    if "http" in system.protocol:
        from packer_cli.web import Web  # noqa: PLC0415 as above

        system, options = Web, options | {"seconds": TIMEOUT_SECONDS}
    # not url_to_fs: it takes "::" in a name for a chain of file systems
    store = system(**options)
    return store, cast("str", system._strip_protocol(url))


@contextmanager
def _explained(url: str, doing: str = "read") -> Iterator[None]:
    """Turn errors of stores into PackerError: their own, their network library's, OSErrors."""
    try:
        yield
    except PackerError:
        raise
    except NotImplementedError as error:
        if doing == "read":
            raise _explanation(error, url, doing) from error
        raise UsageError(
            f"{url}: cannot {doing} at {url.partition('://')[0]}://",
            "choose a store that can be written to, or a local directory",
        ) from error
    except Exception as error:
        # a traceback would show what opens the URL
        raise _explanation(error, url, doing) from (error if typed(url) == url else None)


def _explanation(error: Exception, url: str, doing: str) -> DataError:
    protocol, name = url.partition("://")[0], type(error).__name__
    if getattr(error, "errno", None) == errno.EBUSY or name == "FileExpired":
        tip = "wait until nothing writes to it, then run again; if nothing does, copy it to a local"
        return InputChangedError(f"{url}: cannot {doing}: it changed", f"{tip} path")
    reason = getattr(error, "strerror", None) or str(error) or name
    if hasattr(error, "status") and hasattr(error, "message"):  # aiohttp would name the URL again
        reason = f"{error.status} {error.message}" if error.status else name
    elif isinstance(error, FileNotFoundError):
        reason = "no such file" if doing == "read" else "no such bucket or folder"
    elif "timeout" in name.lower():
        reason = f"no answer within {TIMEOUT_SECONDS} seconds ({name})"
    elif typed(url) != url:  # the text of an error may show it
        reason = name
    return DataError(
        f"{url}: cannot {doing}: {reason.splitlines()[0]}",
        f"check the network, the address and the credentials for {protocol}://, then run the same "
        "command again",
    )
