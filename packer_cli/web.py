"""Files over HTTP, every range of the version that was found. fsspec's own reader takes whatever a
server answers, and calls each of its errors a file that is missing.

An edge that holds another version, a proxy's page, and a server that sends other bytes than those
asked for, or fewer, end in errors. Of a server without ranges only the beginning is read.
"""

from __future__ import annotations

import errno
import re
import sys
from typing import Any

from aiohttp import ClientError
from fsspec.implementations.http import HTTPFileSystem, _file_info
from fsspec.spec import AbstractBufferedFile

from packer_cli.errors import DataError

_SPAN = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_PARTIAL, _GONE, _OTHER_VERSION, _BEYOND = 206, (404, 410), 412, 416


class Web(HTTPFileSystem):  # type: ignore[misc]
    """Errors are those of aiohttp, FileNotFoundError, and OSErrors: EBUSY for another version."""

    async def _info(self, url: str, **options: Any) -> dict[str, Any]:
        """As HEAD says, or GET, whose body is not read, where a server refuses HEAD."""
        session, found = await self.set_session(), dict[str, Any]()
        for method in ("head", "get"):
            try:
                found = await _file_info(
                    self.encode_url(url), session, method, **self.kwargs, **options
                )
            except ClientError as error:  # a server may drop what it does not know
                if method == "get" and getattr(error, "status", None) in _GONE:
                    raise FileNotFoundError(url) from error
                if method == "get":
                    raise
            if found.get("size") is not None:
                break
        return {"name": url, "size": None, **found, "type": "file"}

    async def _cat_file(
        self,
        url: str,
        start: int | None = None,
        end: int | None = None,
        found: dict[str, Any] | None = None,
        **options: Any,
    ) -> bytes:
        """The bytes start .. end, fewer at the end of the file. `found`: its `info`, earlier."""
        if start is None or end is None:
            return bytes(await super()._cat_file(url, start, end, **options))
        options = {**self.kwargs, **options}
        headers = {
            **options.pop("headers", {}),
            "Range": f"bytes={start}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        found = found or {}
        if (etag := found.get("ETag", "")).startswith('"'):  # weak ones never match
            headers["If-Match"] = etag
        session = await self.set_session()
        async with session.get(self.encode_url(url), headers=headers, **options) as answer:
            if answer.status == _OTHER_VERSION:
                raise OSError(errno.EBUSY, "another version")
            if answer.status == _BEYOND:
                return b""
            self._raise_not_found_for_status(answer, url)
            begin, stop, size = _place(answer)
            _refuse_other_version(found, answer, size)
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise OSError(errno.EIO, "the server compresses what it sends")
            if answer.status != _PARTIAL and start:
                raise DataError(
                    f"{url}: the server sends no parts of it", "copy it to a local path"
                )
            wanted = min(end, stop) - start
            if begin != start or (answer.status == _PARTIAL and stop - start != wanted):
                span = f"bytes {start} to {end} were asked for, bytes {begin} to {stop} came"
                raise OSError(errno.EIO, span)
            if stop < sys.maxsize:
                return bytes(await answer.content.readexactly(wanted))
            data = bytearray()  # it does not say how much it sends
            while part := await answer.content.read(wanted - len(data)):
                data += part
            return bytes(data)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            raise NotImplementedError
        return _File(self, path, mode, cache_type="none")


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end, found=self.details))


def _place(answer: Any) -> tuple[int, int, int | None]:
    """Where in the file its content begins and ends, and the size of the file, where it says so."""
    length = int(answer.headers.get("Content-Length", sys.maxsize))
    if answer.status != _PARTIAL:
        return 0, length, None if length == sys.maxsize else length
    span = _SPAN.fullmatch(answer.headers.get("Content-Range", ""))
    if span is None:
        raise OSError(errno.EIO, "the server does not say which part it sends")
    begin, last = int(span[1]), int(span[2])
    if length not in (last + 1 - begin, sys.maxsize):
        raise OSError(errno.EIO, f"{length} bytes came, said to be {begin} to {last + 1}")
    return begin, last + 1, None if span[3] == "*" else int(span[3])


def _refuse_other_version(found: dict[str, Any], answer: Any, size: int | None) -> None:
    """Raise OSError where an answer is of another version than `found`."""
    pairs: list[tuple[Any, Any]] = [(found.get("size"), size)]
    for name in ("ETag", "Last-Modified"):  # the second only where one of both has no ETag
        before, now = found.get(name, ""), answer.headers.get(name, "")
        if before and now:
            pairs.append((before.removeprefix("W/"), now.removeprefix("W/")))
            break
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise OSError(errno.EBUSY, "another version")
