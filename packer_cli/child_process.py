"""A helper Python process that works beside this one, on another core.

    child = Child("module:make", ...)     make(...) is made in the child: an object
    child.begin("method", *arguments)     calls its method without waiting: `answer` gives the
                                          result, `items` what a generator gives, computed ahead

Spawned, not forked, by ourselves: multiprocessing's `Process` would import the caller's script
once more. Messages go over its `Connection`s, through pipes that nobody else has an end of: what is
unpickled is what our other end has pickled.

The kernel kills a child when the process that made it ends, however that ends, and whatever the
child is doing: one pipe, on which nothing is ever sent, asks for that signal when it closes.
(PR_SET_PDEATHSIG would ask for it when the *thread* that made the child ends.)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import mmap
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from packer_cli.errors import DataError, InternalError, LostChildError, PackerError

_PIPE_BYTES = 1 << 20
_AHEAD = 4  # results of a generator that wait to be fetched
_LAST_BREATH = 5.0  # seconds between a child's last answer and its end
_NOTE_BYTES = 8
# ("value", v), ("error", exception), ("item", v) or ("end", None)
_Answer = tuple[str, Any]
# Our own path: -c alone would import modules that lie in the current directory.
_BEGINNING = f"""
import sys
sys.path[:] = {{path!r}}
from {__name__} import serve
serve{{descriptors}}
"""


class Child:
    """Not safe to share between threads, but for `kill`: who asks must wait for the answer."""

    def __init__(self, make: str, *arguments: Any, inherited: Sequence[int] = ()) -> None:
        """`make`: "module:name". Errors of making come out of the first call. `inherited`: open
        files that the child has, too; their numbers there are the first arguments.
        """
        self._name = make.partition(":")[2]
        begin = os.memfd_create("packer")
        with open(begin, "wb", closefd=False) as file:  # a pipe would hold us up if it is large
            file.write(bytes(_NOTE_BYTES))
            pickle.dump((make, arguments), file, protocol=pickle.HIGHEST_PROTOCOL)
        self._noted = mmap.mmap(begin, _NOTE_BYTES)
        requests, asking = _pipe()
        answering, answers = _pipe()
        lifeline, held = _pipe()
        theirs = (begin, requests, answers, lifeline)
        self._requests = Connection(asking, readable=False)
        self._answers = Connection(answering, writable=False)
        self._lifeline = Connection(held, readable=False)
        try:
            self._process = spawn(*theirs, *inherited)
        except OSError as error:
            raise DataError(
                f"the process of {self._name} cannot begin: {error.strerror}",
                "use fewer --workers, or raise the limits of processes and open files: ulimit -a",
            ) from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def begin(self, method: str, *arguments: Any) -> None:
        """Ask without waiting; each `begin` needs one `answer` or one `items`."""
        with contextlib.suppress(OSError):  # `answer` notices that it has ended
            self._requests.send((method, arguments))

    def answer(self) -> Any:
        """The answer to the oldest question. Raises what the method raised."""
        return self._receive()[1]

    def items(self) -> Iterator[Any]:
        """The answers of a generator method, to the last one."""
        while (answer := self._receive())[0] == "item":
            yield answer[1]

    @property
    def noted(self) -> int:
        """The number that the child noted last; it can be read after the child's end, too."""
        return int.from_bytes(self._noted[:], sys.byteorder, signed=True)

    def kill(self) -> None:
        """End it; a thread that waits for an answer gets LostChildError."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        for end in (self._requests, self._answers, self._lifeline):
            end.close()

    def _receive(self) -> _Answer:
        try:
            answer: _Answer = self._answers.recv()
        except (OSError, EOFError) as error:  # the child is ending, if it has not ended yet
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_BREATH)
            code = self._process.returncode
            how = f"ended, code {code}"
            if code is not None and code < 0:  # no code in here does that to itself
                how = f"was ended from outside, by signal {-code}"
            tip = "the machine may have run out of memory: use fewer --workers"
            if code == 1:  # an exception at its beginning: it cannot import packer
                tip = "if packages have changed since the run began, run the same command again"
            lost = LostChildError(f"the process of {self._name} {how}", tip)
            lost.code = code
            raise lost from error
        if answer[0] == "error":
            raise answer[1]
        return answer


def spawn(*descriptors: int) -> subprocess.Popen[bytes]:
    """A new interpreter that serves. Of a session of its own: Ctrl-C reaches the run only, which
    then ends the child.
    """
    program = _BEGINNING.format(path=sys.path, descriptors=descriptors)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=descriptors,
    )


def _pipe() -> tuple[int, int]:
    """(end to read from, end to write to) of a large pipe: each piece needs the GIL anew."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # not every user may have as much
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reading, writing


_M_ARENA_MAX = -8  # of glibc's malloc.h
_CORES_PER_HEAP = 4


def settle_in() -> None:
    """Save imports and waits that a run does not need, in a process that is ours alone."""
    # gigatoken gives plain arrays where awkward is missing, which we want anyway. Importing awkward
    # takes 160 ms of processor time, a twelfth of a small run (median of 8 pairs).
    sys.modules.setdefault("awkward", None)  # type: ignore[arg-type]
    # Threads share the heaps of glibc's malloc: what one has freed, others use. Saves 65 of 555 MB
    # with 66 MB of text and two workers, 42 of 809 MB with 670 MB, for the same processor time
    # (medians of 3 pairs).
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another library of C
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, max(1, (os.cpu_count() or 1) // _CORES_PER_HEAP))


_note: memoryview | None = None  # of a child


def note(number: int) -> None:
    """Leave a number (int64) for the process that made this child, should the child be lost."""
    if _note is not None:
        _note[0] = number


def serve(begin: int, requests: int, answers: int, lifeline: int, *inherited: int) -> None:
    """The child: make what that file says, then answer until there are no more requests."""
    global _note  # noqa: PLW0603 a process has one
    _die_with(lifeline)
    sys.stdout = sys.stderr  # so that what a library prints is seen
    made: Any = None
    problem: Exception | None = None
    asked, answering = Connection(requests, writable=False), Connection(answers, readable=False)
    try:
        with open(begin, "r+b") as file:
            _note = memoryview(mmap.mmap(begin, _NOTE_BYTES)).cast("q")
            file.seek(_NOTE_BYTES)
            make, arguments = pickle.load(file)  # noqa: S301 written by `_beginning`
            file.truncate(_NOTE_BYTES)
        # the garbage of a child is freed at once; looking for cycles finds none
        gc.set_threshold(100_000, 50, 50)
        module, _, name = make.partition(":")
        made = getattr(importlib.import_module(module), name)(*inherited, *arguments)
    except BaseException as error:
        problem = _sendable(error)
    while True:
        try:
            request = asked.recv_bytes()
        except EOFError:
            return
        for answer in _answers(made, problem, request):
            answering.send(answer)


def _die_with(lifeline: int) -> None:
    """Have the kernel kill this process when the other end of the pipe closes."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it has closed already
        os._exit(0)


def _answers(made: Any, problem: Exception | None, request: bytes) -> Iterator[_Answer]:
    if problem is not None:
        yield "error", problem
        return
    try:
        method, arguments = pickle.loads(request)  # noqa: S301 of `Child.begin`
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
    """The error, in a form that can be pickled."""
    if isinstance(error, PackerError | MemoryError | OSError):
        return error
    if isinstance(error, ImportError):  # the run has imported it
        return DataError(
            f"packer's helper process cannot import what it needs: {error}",
            "if packages have changed since the run began, run the same command again; otherwise "
            "install packer anew",
        )
    unknown = InternalError(f"{type(error).__name__}: {error}")
    if hasattr(unknown, "add_note"):  # since Python 3.11; --debug shows it
        unknown.add_note("".join(traceback.format_exception(error)))
    return unknown
