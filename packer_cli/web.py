"""Read files over HTTP. Every range comes from the version that was found first, and is the range
that was requested: fsspec accepts any answer, also a compressed one.
"""

from __future__ import annotations

import errno
import re
from typing import Any

from aiohttp import ClientTimeout
from fsspec.implementations.http import HTTPFileSystem
from fsspec.spec import AbstractBufferedFile

_PART, _BEYOND = 206, 416  # status: a part of the file is sent; it would lie beyond the end
_SPAN = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class Web(HTTPFileSystem):  # type: ignore[misc]
    """A file system that raises errors of aiohttp, FileNotFoundError, and OSErrors: EBUSY for
    another version.
    """

    def __init__(self, seconds: float, **options: Any) -> None:
        """`seconds`: longest wait of a request for its server."""
        waits = ClientTimeout(total=None, connect=seconds, sock_read=seconds)
        super().__init__(**{"client_kwargs": {"timeout": waits}} | options)

    async def _info(self, url: str, **options: Any) -> dict[str, Any]:
        return {"name": url, "type": "file"} | (await self._range(url, 0, 1))[0]

    async def _cat_file(
        self, url: str, start: int, end: int, expected: dict[str, Any], **options: Any
    ) -> bytes:
        return (await self._range(url, start, end, expected))[1]

    async def _range(
        self, url: str, start: int, end: int, expected: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Return facts of a file, and its bytes start .. end, fewer at its end.

        expected  facts of the version to read; None: any
        """
        session, options = await self.set_session(), dict(self.kwargs)
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        options["headers"] = options.get("headers", {}) | headers
        async with session.get(self.encode_url(url), **options) as answer:
            if answer.status != _BEYOND:
                self._raise_not_found_for_status(answer, url)
            begin, stop, size = 0, answer.content_length or 0, answer.content_length
            if span := _SPAN.fullmatch(answer.headers.get("Content-Range", "")):
                size = int(span[3])
                begin, stop = (int(span[1]), int(span[2]) + 1) if span[1] else (start, start)
            elif answer.status in (_PART, _BEYOND):
                raise OSError(errno.EIO, "the server does not name the part it sends")
            now = {name: answer.headers.get(name, "") for name in ("ETag", "Last-Modified")}
            now |= {"size": size, "ETag": now["ETag"].removeprefix("W/")}
            if expected and any(expected[name] != now[name] for name in ("ETag", "size")):
                raise OSError(errno.EBUSY, "another version")
            wanted = min(end, size or 0)
            if start < wanted and (begin != start or stop < wanted):
                reason = f"bytes {start} to {wanted} were requested, {begin} to {stop} came"
                raise OSError(errno.EIO, reason)
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise OSError(errno.EIO, "the server compresses what it sends")
            return now, await answer.content.readexactly(max(0, wanted - start))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _WebFile(self, path, mode, cache_type="none")


class _WebFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end, expected=self.details))
