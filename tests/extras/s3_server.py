"""A local S3 server, and a proxy before it that counts requests and can disturb their answers."""

from __future__ import annotations

import http.client
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def server() -> Iterator[str]:
    """The URL of an S3 server."""
    running = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


def point_to(endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an S3 server the one that this process and its children find."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@contextmanager
def empty_bucket(endpoint: str | None = None) -> Iterator[Any]:
    """A bucket of this server, or else of the one that is found."""
    found = boto3.resource("s3", endpoint_url=endpoint).Bucket("bucket")
    found.create()
    yield found
    found.objects.all().delete()
    found.delete()


class Proxy:
    """`endpoint` leads to a server.

    bucket     what is behind it, reached directly, where a test says so
    requests   "GET key" of all, in their order
    disturb    by key: gives "" (leave it), "500", "cut" (in the middle of the content), "reset" or
               "stale" (of another version)
    """

    def __init__(self, behind: str) -> None:
        self.bucket: Any = None
        self.undisturbed()
        address = behind.removeprefix("http://")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                key = self.path.partition("?")[0].removeprefix("/bucket").lstrip("/")
                proxy.requests.append(f"{self.command} {key}")
                how = proxy.disturb(key)
                if how == "reset":
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.close_connection = True
                    return
                connection = http.client.HTTPConnection(address, timeout=60)
                connection.request(self.command, self.path, headers=dict(self.headers))
                answer = connection.getresponse()
                content = answer.read()
                if how == "stale" and self.command == "GET":
                    answer.headers.replace_header("ETag", '"another"')
                    content = content.replace(b"a", b"Z")
                self.send_response(500 if how == "500" else answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                        self.send_header(name, value)
                if answer.getheader("content-length") is None:
                    self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if how == "cut" else content)
                self.close_connection = self.close_connection or how == "cut"
                connection.close()

            do_HEAD = do_GET  # noqa: N815 as http.server calls it

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def undisturbed(self) -> None:
        self.requests: list[str] = []
        self.disturb: Callable[[str], str] = lambda key: ""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
