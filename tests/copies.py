"""Processes that begin at once: copies of one that has imported what packer does.

    run = Copy(PROGRAM, [0, 1, 2])        as subprocess.Popen([python, "-c", PROGRAM])
    disks_are_not_waited_for()            here; in copies it is so

A new interpreter would import for half a second. So one does it for all, and is copied (forked) for
each program, before it has threads or open files.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

_MESSAGE_BYTES = 1 << 17  # an environment and a program
_STATUS_BYTES = 4


class Copy:
    """A process, with as much of `subprocess.Popen` as is needed here.

    It has our current directory and environment.
    """

    def __init__(self, program: str, streams: Sequence[int], arguments: Sequence[str] = ()) -> None:
        """`streams`: descriptors of stdin, stdout and stderr."""
        self.returncode: int | None = None
        self._program, self._lock = program, threading.Lock()
        message = json.dumps([program, ["-c", *arguments], dict(os.environ)]).encode()
        here = os.open(".", os.O_PATH)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._server.connect(_address())
            socket.send_fds(self._server, [message], [*streams, here])
            self.pid = int.from_bytes(self._answer(), sys.byteorder)
        finally:
            os.close(here)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:  # one thread may wait for it while another kills it
            if self.returncode is None:
                if not select.select([self._server], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self._program, timeout or 0)
                self.returncode = int.from_bytes(self._answer(), sys.byteorder, signed=True)
                self._server.close()
            return self.returncode

    def _answer(self) -> bytes:
        with suppress(ConnectionError):
            if answer := self._server.recv(_STATUS_BYTES):
                return answer
        raise AssertionError("the process that is copied has ended: see its last words on stderr")

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def disks_are_not_waited_for() -> None:
    """No test cuts the power. Waiting took a third of the time, and busy disks made it more.

    A descriptor that is none is an error as before, and tests may count calls. Processes that are
    no copies (`packer_process`) wait.
    """
    os.fsync = os.fstat  # type: ignore[assignment]


@functools.cache
def _address() -> bytes:
    """Where this process has its server, which ends with it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # a name that nobody else has
    listener.listen(64)
    with listener:
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests, and the server ends with them
        )
        atexit.register(server.communicate)
        address: bytes = listener.getsockname()
    return address


class _Server:
    """What is copied. It has one thread, and opens nothing but what it is asked by."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, lambda _: sys.exit())
        # by a descriptor of each copy: its process, and who has asked for it
        self._copies: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data(key.fd)

    def _accept(self, _: int) -> None:
        asker, _ = self._listener.accept()
        message, descriptors, *_ = socket.recv_fds(asker, _MESSAGE_BYTES, 16)
        if (process := os.fork()) == 0:
            self._close(asker)
            _become(*json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        watch = os.pidfd_open(process)
        self._copies[watch] = process, asker
        self._selector.register(watch, selectors.EVENT_READ, self._ended)
        with suppress(OSError):  # whoever has asked is gone
            asker.send(process.to_bytes(_STATUS_BYTES, sys.byteorder))

    def _ended(self, watch: int) -> None:
        self._selector.unregister(watch)
        os.close(watch)
        process, asker = self._copies.pop(watch)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with asker, suppress(OSError):
            asker.send(status.to_bytes(_STATUS_BYTES, sys.byteorder, signed=True))

    def _close(self, asker: socket.socket) -> None:
        """In a copy: all that is the server's."""
        self._selector.close()
        self._listener.close()
        asker.close()
        for watch, (_, other) in self._copies.items():
            os.close(watch)
            other.close()


def _become(
    program: str, arguments: list[str], environment: dict[str, str], descriptors: list[int]
) -> NoReturn:
    """What a new interpreter would do, to its end."""
    status, end_now = 1, os._exit  # which a program may replace
    try:
        os.setsid()
        os.fchdir(descriptors[-1])
        for number, stream in enumerate(descriptors[:-1]):
            os.dup2(stream, number)
        for descriptor in descriptors:
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
        sys.argv[:] = arguments
        os.environ.clear()
        os.environ.update(environment)
        exec(program, {"__name__": "__main__"})  # noqa: S102 a test wrote it
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        end_now(status)


def _import_all() -> None:
    """What the commands import, and what Typer makes of their declarations."""
    import numpy.ma  # noqa: F401
    import pyarrow.compute  # noqa: F401
    import rich.console
    import rich.progress
    import rich.table  # noqa: F401 all are for the copies
    import typer.main

    import packer_cli.chat.documents
    import packer_cli.cli.app
    import packer_cli.export
    import packer_cli.inputs.jsonl
    import packer_cli.plan
    import packer_cli.reports.plan
    import packer_cli.reports.show
    import packer_cli.reports.stats
    import packer_cli.reports.terminal
    import packer_cli.run.pipeline
    import packer_cli.tokenization.engines
    import packer_cli.verify

    typer.main.get_command = functools.cache(typer.main.get_command)
    commands: Any = typer.main.get_command(packer_cli.cli.app.app)
    # Typer imports more when it parses.
    commands.get_command(None, "pack").make_context("pack", ["a.jsonl", "-l", "1"])


def main(listener: int) -> None:
    _import_all()
    disks_are_not_waited_for()
    gc.freeze()
    _Server(socket.socket(fileno=listener)).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
