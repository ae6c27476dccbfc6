"""An HTTP server of files in a folder, and what such servers do wrong."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LIE = "an edge that lies about its version"
LATER = "/later"  # begins the address of another version of each file
_SLOW, _STEP = 30.0, 0.1  # seconds: longer than any request may take, and between two bytes


@dataclass
class Answer:
    """What the server is about to say. A fault changes it.

    number   of the request, of those for content of this file, from 0
    whole    all of the file, of which `body` is a part
    cut      bytes of the body after which the connection is closed
    instead  sent in place of all of this, the first of it `wait` seconds later
    chunked  without its length
    """

    method: str
    path: str
    number: int
    begin: int
    whole: bytes
    body: bytes
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    instead: bytes | None = None
    wait: float = 0.0
    chunked: bool = False

    @property
    def is_late(self) -> bool:
        """Of the content, from the middle on."""
        return self.method == "GET" and self.number > 0

    def becomes(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.status, self.body, self.headers = status, body, headers

    def of(self, whole: bytes, etag: str) -> None:
        """The same part of other content."""
        self.whole, self.headers["ETag"] = whole, etag
        if self.status == 206:
            self.body = whole[self.begin : self.begin + len(self.body)]
            last = self.begin + len(self.body) - 1
            self.headers["Content-Range"] = f"bytes {self.begin}-{last}/{len(whole)}"
        else:
            self.body = whole


def _later(answer: Answer) -> bytes:
    """Another version, of another size, whose rows would be found among others."""
    return answer.whole.replace(b"a", b"Z") + answer.whole[-200:]


def _stale(answer: Answer) -> None:
    if answer.number % 2 and answer.method == "GET":
        answer.of(_later(answer), '"stale"')


def _lie(answer: Answer) -> None:
    if answer.number % 2 and answer.method == "GET":
        answer.of(answer.whole.replace(b"ab", b"AB"), answer.headers["ETag"])


def _header(name: str, value: Callable[[Answer], str | None]) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        found = value(answer)
        answer.headers.pop(name, None)
        if found is not None:
            answer.headers[name] = found

    return change


def _late(change: Callable[[Answer], Any]) -> Callable[[Answer], None]:
    def changed(answer: Answer) -> None:
        if answer.is_late:
            change(answer)

    return changed


def _once(change: Callable[[Answer], Any]) -> Callable[[Answer], None]:
    return _late(lambda answer: answer.number == 1 and change(answer))


def _wrong_total(answer: Answer) -> None:
    if answer.status == 206:
        answer.headers["Content-Range"] = answer.headers["Content-Range"] + "5"


def _other_span(answer: Answer) -> None:
    if answer.status == 206:
        begin = 7 if answer.begin == 0 else 0
        answer.body = answer.whole[begin : begin + len(answer.body)]
        last = begin + len(answer.body) - 1
        answer.headers["Content-Range"] = f"bytes {begin}-{last}/{len(answer.whole)}"


def _whole(answer: Answer) -> None:
    answer.status, answer.body = 200, answer.whole
    answer.headers.pop("Content-Range", None)


def _gzip(answer: Answer) -> None:
    answer.status, answer.body = 200, gzip.compress(answer.whole)
    answer.headers["Content-Encoding"] = "gzip"


def _set(**values: Any) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        for name, value in values.items():
            setattr(answer, name, value)

    return change


def _redirect(answer: Answer) -> None:
    answer.becomes(302, Location=LATER + answer.path)


def _busy(answer: Answer) -> None:
    if answer.path < "/shard-00001":  # each is waited for
        answer.becomes(503, **{"Retry-After": "1"})


def _chunked(answer: Answer) -> None:
    if answer.method == "GET":
        _whole(answer)
        answer.chunked = True


def _page(answer: Answer) -> None:
    answer.becomes(200, b"<html>a sign-in page</html>" * 99, **{"Content-Type": "text/html"})


# what a server does wrong -> how its answer changes
FAULTS: dict[str, Callable[[Answer], Any]] = {
    "another total": _late(_wrong_total),
    "another ETag in one range": _once(lambda answer: answer.headers.update(ETag='"other"')),
    "an ETag for each edge": _header("ETag", lambda answer: f'"edge {answer.number % 3}"'),
    "a weak ETag": _header("ETag", lambda answer: f"W/{answer.headers['ETag']}"),
    "no ETag": _header("ETag", lambda answer: None),
    "a stale edge": _stale,
    "a stale edge without ETags": lambda answer: (_stale(answer), answer.headers.pop("ETag")),
    LIE: _lie,
    "ranges ignored": _whole,
    "another span": _late(_other_span),
    "a body cut short": _late(lambda answer: _set(cut=len(answer.body) // 2)(answer)),
    "a connection closed at once": _late(_set(instead=b"")),
    "a longer body": _late(lambda answer: _set(body=answer.body + b"{}\n")(answer)),
    "an empty body": _late(_set(body=b"")),
    "500 once": _once(lambda answer: answer.becomes(500)),
    "500 for good": _late(lambda answer: answer.becomes(500)),
    "500 from the beginning": lambda answer: answer.becomes(500),
    "503 with Retry-After": _once(_busy),
    "503 with a Retry-After of 5,000 digits": _once(
        lambda answer: answer.becomes(503, **{"Retry-After": "9" * 5000})
    ),
    "404 in the middle": _late(lambda answer: answer.becomes(404)),
    "403 in the middle": _late(lambda answer: answer.becomes(403)),
    "403 from the beginning": lambda answer: answer.becomes(403),
    "a redirect to another version": _late(_redirect),
    "a redirect to itself": _late(lambda answer: answer.becomes(302, Location=answer.path)),
    "no answer": _late(_set(instead=b"", wait=_SLOW)),
    "no answer from the beginning": _set(instead=b"", wait=_SLOW),
    "a trickle": _late(_set(wait=_STEP)),
    "garbage": _late(_set(instead=b"\0\1\2 this is no HTTP\r\n\r\n")),
    "gzip on the fly": _late(_gzip),
    "an HTML page": _late(_page),
    "HEAD refused": lambda answer: answer.method == "HEAD" and answer.becomes(405),
    "HEAD dropped": lambda answer: answer.method == "HEAD" and _set(instead=b"")(answer),
    "chunks in place of ranges": _chunked,
    "chunks, and no size at all": lambda answer: (_whole(answer), _set(chunked=True)(answer)),
}  # fmt: skip


class Server:
    """`url` is of the files in `folder`.

    fault   what it does wrong
    first   the number of the first request for each file's content
    """

    def __init__(self, folder: Path) -> None:
        self.fault: Callable[[Answer], Any] | None = None
        self.folder, self.first, self._asked = folder, 0, dict[str, int]()
        self._lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with suppress(OSError):
                    server.serve(self)

            do_HEAD = do_GET  # noqa: N815 as http.server calls it

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def serve(self, handler: Any) -> None:
        answer = self._answer(handler)
        if self.fault and not answer.path.startswith(LATER):
            self.fault(answer)
        handler.close_connection = True
        if answer.instead is not None:
            time.sleep(answer.wait)
            handler.connection.sendall(answer.instead)
            return
        handler.send_response_only(answer.status)
        size = {"Content-Length": str(len(answer.body))}
        if answer.chunked:
            size = {"Transfer-Encoding": "chunked"}
            answer.body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer.body), answer.body)
        for name, value in (size | {"Connection": "close"} | answer.headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        if answer.method == "HEAD":
            return
        for at in range(len(answer.body)) if answer.wait else ():
            handler.connection.sendall(answer.body[at : at + 1])
            time.sleep(answer.wait)
        if not answer.wait:
            handler.connection.sendall(answer.body[: answer.cut])

    def _answer(self, handler: Any) -> Answer:
        """As it should be."""
        path, method = handler.path, handler.command
        try:
            whole = (self.folder / path.removeprefix(LATER).lstrip("/")).read_bytes()
        except OSError:
            return Answer(method, path, 0, 0, b"", b"", 404)
        with self._lock:
            number = self._asked.get(path, self.first)
            self._asked[path] = number + (method == "GET")
        etag = '"first"'
        answer = Answer(method, path, number, 0, whole, whole, 200, {"ETag": etag})
        if path.startswith(LATER):
            answer.of(_later(answer), '"later"')
        if handler.headers.get("If-Match", answer.headers["ETag"]) != answer.headers["ETag"]:
            answer.becomes(412)
        elif asked := handler.headers.get("Range"):
            begin, _, last = asked.removeprefix("bytes=").partition("-")
            answer.begin, size = int(begin), len(answer.whole)
            if answer.begin >= size:
                answer.becomes(416, **{"Content-Range": f"bytes */{size}"})
                return answer
            answer.status = 206
            answer.body = answer.whole[answer.begin : int(last) + 1]
            last = answer.begin + len(answer.body) - 1
            answer.headers["Content-Range"] = f"bytes {answer.begin}-{last}/{size}"
        return answer

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.close()
