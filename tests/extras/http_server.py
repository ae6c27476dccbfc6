"""An HTTP server of files in a folder, and what such servers do wrong."""

from __future__ import annotations

import base64
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Answer:
    """What the server is about to say. A fault changes it.

    number  of the request for content of this file, from 0
    whole   all of the file, of which `body` is a part, from `begin` on
    cut     bytes of the body after which the connection is closed
    wait    seconds before the answer
    """

    path: str
    number: int
    begin: int
    whole: bytes
    body: bytes
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    wait: float = 0.0

    def becomes(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.status, self.body, self.headers = status, body, headers

    def of(self, whole: bytes, etag: str) -> None:
        """The same part of other content."""
        self.whole, self.body = whole, whole[self.begin : self.begin + len(self.body)]
        self.headers["ETag"] = etag
        self.says(self.begin, len(whole))

    def says(self, begin: int, size: int) -> None:
        """Which part it is, and of how many bytes."""
        self.headers["Content-Range"] = f"bytes {begin}-{begin + len(self.body) - 1}/{size}"


class Server:
    """`url` is of the files in `folder`.

    fault  what it does wrong
    key    (user:password, query) that every request must have
    asked  how often each file was asked for
    """

    def __init__(self, folder: Path) -> None:
        self.fault: Callable[[Answer], Any] | None = None
        self.key: tuple[str, str] | None = None
        self.folder, self.asked, self._lock, server = folder, Counter[str](), threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with suppress(OSError):
                    server.serve(self)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def serve(self, handler: Any) -> None:
        answer = self._answer(handler)
        if self.fault:
            self.fault(answer)
        time.sleep(answer.wait)
        handler.send_response_only(answer.status)
        size = {"Content-Length": str(len(answer.body))}
        for name, value in (size | answer.headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(answer.body[: answer.cut])

    def _answer(self, handler: Any) -> Answer:
        """As it should be."""
        path, _, query = handler.path.partition("?")
        if self.key:
            basic = f"Basic {base64.b64encode(self.key[0].encode()).decode()}"
            if (handler.headers.get("Authorization"), query) != (basic, self.key[1]):
                return Answer(path, 0, 0, b"", b"", 403)
        try:
            whole = (self.folder / path.lstrip("/")).read_bytes()
        except OSError:
            return Answer(path, 0, 0, b"", b"", 404)
        with self._lock:
            self.asked[path] += 1
        answer = Answer(path, self.asked[path] - 1, 0, whole, whole, 200, {"ETag": '"first"'})
        if asked := handler.headers.get("Range"):
            begin, _, last = asked.removeprefix("bytes=").partition("-")
            answer.begin, answer.body = int(begin), whole[int(begin) : int(last) + 1]
            answer.status = 206 if answer.body else 416
            answer.says(answer.begin, len(whole))
            if not answer.body:
                answer.headers["Content-Range"] = f"bytes */{len(whole)}"
        return answer

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.close()
