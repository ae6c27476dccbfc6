"""A Python process of our own that does work beside this one, on another core.

    child = Child("module:make", ...)     make(...) is made in the child: an object
    child.ask("method", *arguments)       its method's result
    child.stream("method", *arguments)    what its generator method gives, computed ahead

Spawned, not forked. Messages are pickles over the child's stdin and stdout, length first. It
ends when its stdin does, so it cannot outlive the run, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any

from packer_cli.errors import DataError, InternalError, PackerError

_PIPE_BYTES = 1 << 20
_AHEAD = 4  # results of a stream that wait to be fetched
_LAST_BREATH = 5.0  # seconds between a child's last answer and its end
_Answer = tuple[str, Any]  # ("value", v), ("error", exception), ("item", v) or ("end", None)


class LostChildError(DataError):
    """The child's process has ended, though nobody asked it to."""


class Child:
    """Not safe to share between threads: who asks must wait for the answer."""

    def __init__(self, make: str, *arguments: Any) -> None:
        """`make`: "module:name". Errors of making come out of the first call."""
        self._name = make.partition(":")[2]
        # Our own path: -c alone would import modules that lie in the current directory. A session
        # of its own: Ctrl-C reaches the run only, which then ends the child.
        # Arguments of megabytes go through a file: a pipe would hold us up until the child reads.
        with tempfile.TemporaryFile() as file:
            pickle.dump((make, arguments), file, protocol=pickle.HIGHEST_PROTOCOL)
            file.seek(0)
            # Above 2: those are the child's own, whatever of ours was closed.
            begin = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
        start = (
            f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as me; me.serve({begin})"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[begin],
            )
        finally:
            os.close(begin)
        # Who reads or writes a pipe needs the GIL anew for every piece of this size.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self._process.stdout or -1, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def ask(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.answer()

    def begin(self, method: str, *arguments: Any) -> None:
        """Ask without waiting; every `begin` needs one `answer`, or one `items`."""
        self._send((method, arguments))

    def answer(self) -> Any:
        """The answer to the oldest question. Raises what the method raised."""
        kind, value = self._receive()
        if kind == "error":
            raise value
        return value

    def items(self) -> Iterator[Any]:
        """The answers of a generator method, to the last one."""
        while True:
            kind, value = self._receive()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send(self, message: object) -> None:
        # a child that has ended is noticed by who waits for its answer
        with contextlib.suppress(OSError, ValueError):
            _write(self._process.stdin, message)

    def _receive(self) -> _Answer:
        try:
            answer: _Answer = _read(self._process.stdout)
        except (OSError, EOFError, ValueError) as error:
            raise self._lost() from error
        return answer

    def _lost(self) -> LostChildError:
        """Why there is no answer: the child is ending, if it has not ended yet."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_BREATH)
        code = self._process.returncode
        how = f"ended, code {code}"
        if code is not None and code < 0:  # nothing in here does that to itself
            how = f"was ended from outside, by signal {-code}"
        return LostChildError(
            f"the process of {self._name} {how}",
            "the machine may have run out of memory: use fewer --workers",
        )


def _write(pipe: IO[bytes] | None, message: object) -> None:
    if pipe is None:
        raise OSError("no pipe")
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(struct.pack("<q", len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> Any:
    header = pipe.read(8) if pipe else b""
    if len(header) < 8 or pipe is None:
        raise EOFError
    size = struct.unpack("<q", header)[0]
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)  # noqa: S301 both ends are this file


def serve(begin: int) -> None:
    """The child: make what that file says, then answer until stdin ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints must not get among the answers
    made: Any = None
    problem: Exception | None = None
    try:
        with open(begin, "rb") as file:
            make, arguments = pickle.load(file)  # noqa: S301 written above
        # the garbage of a child is freed at once; looking for cycles finds none
        gc.set_threshold(100_000, 50, 50)
        module, _, name = make.partition(":")
        made = getattr(importlib.import_module(module), name)(*arguments)
    except BaseException as error:
        problem = _sendable(error)
    while True:
        try:
            method, arguments = _read(requests)
        except EOFError:
            return
        for answer in _answers(made, problem, method, arguments):
            _write(answers, answer)


def _answers(
    made: Any, problem: Exception | None, method: str, arguments: Any
) -> Iterator[_Answer]:
    if problem is not None:
        yield "error", problem
        return
    try:
        result = getattr(made, method)(*arguments)
        if isinstance(result, Iterator):
            yield from _ahead(result)
            yield "end", None
        else:
            yield "value", result
    except BaseException as error:
        yield "error", _sendable(error)


def _ahead(items: Iterator[Any]) -> Iterator[_Answer]:
    """The items, made by a thread that goes on while they are sent."""
    made: queue.Queue[tuple[bool, Any]] = queue.Queue(_AHEAD)

    def work() -> None:
        try:
            for item in items:
                made.put((True, item))
            made.put((False, None))
        except BaseException as error:
            made.put((False, error))

    threading.Thread(target=work, daemon=True).start()
    while True:
        more, value = made.get()
        if not more:
            if value is not None:
                raise value
            return
        yield "item", value


def _sendable(error: BaseException) -> Exception:
    """What went wrong, as something that can be pickled."""
    if isinstance(error, PackerError | MemoryError):
        return error
    return InternalError(f"{type(error).__name__}: {error}")
