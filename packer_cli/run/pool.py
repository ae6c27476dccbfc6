"""Forked workers: a function is called for many items, on as many cores as there are workers.

    with closing(Pool(perform, workers=4, prepare=load)) as pool:
        for index, result in pool.map(items):       in the order in which they are done

The parent loads what all items need, then forks. So loading happens once, workers share that
memory, and no lock is shared: N workers use N cores. A worker that packs text has 120 MB of its
own (`benchmarks/every_core.py`). The parent only hands out items, and reports what workers send.

A worker that dies, or is killed because memory ran out, costs the item it was working on. A new
worker repeats that, three times at most. A worker that a chat template holds up is replaced once
for each record that takes too long (`chat/limits.py`).

Forking needs a parent of one thread: another thread may hold a lock, which no thread of the child
would release. A program that has threads (a notebook, a Ray worker) starts one new interpreter,
which loads what is needed and forks in its place.

Nothing is left behind when the parent is killed: the kernel kills the workers with it, and the
interpreter ends with the connection.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, NoReturn, TypeVar

from packer_cli.chat import limits
from packer_cli.errors import DataError, InternalError, Interrupted, PackerError, os_errors
from packer_cli.inputs import byte_streams
from packer_cli.progress import Progress
from packer_cli.records import Notify

ATTEMPTS = 3
_NOTE_BYTES = 8
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_FORK_SAFE = "jemalloc_bg_thd"  # a thread of Arrow's allocator, which takes care of forks itself
# Our own path: -c alone would import modules that lie in the current directory.
_PROGRAM = f"""
import sys
sys.path[:] = {{path!r}}
from {__name__} import serve
serve({{descriptor}})
"""
T = TypeVar("T")
R = TypeVar("R")


def tune_process() -> None:
    """Save imports, threads and waits that a run does not need, in a process that is ours alone."""
    # gigatoken gives plain arrays where awkward is missing, which we want anyway. Importing awkward
    # takes 160 ms of processor time, a twelfth of a small run (median of 8 pairs).
    sys.modules.setdefault("awkward", None)  # type: ignore[arg-type]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _do_nothing(*_: object) -> None:
    """Report nothing, or prepare nothing."""


class Reporter:
    """Notes, warnings and progress of a run. Workers send theirs to the parent, which repeats no
    message.
    """

    def __init__(
        self,
        notify: Notify = _do_nothing,
        warn: Notify = _do_nothing,
        progress: Progress | None = None,
    ) -> None:
        self._receivers = {"notify": notify, "warn": warn}
        self._progress, self._reported = progress, set[tuple[str, str]]()
        self._send: Callable[[Any], object] | None = None

    def send_to(self, send: Callable[[Any], object]) -> None:
        """Send everything, in a worker, instead of reporting it."""
        self._send = send

    def receive(self, kind: str, *values: Any) -> None:
        """Report a message or progress, or send it to the parent."""
        if self._send is not None:
            self._send((kind, *values))
        elif kind in self._receivers:
            if (kind, *values) not in self._reported:
                self._reported.add((kind, *values))
                self._receivers[kind](*values)
        elif self._progress is not None:
            getattr(self._progress, kind)(*values)

    def notify(self, message: str) -> None:
        self.receive("notify", message)

    def warn(self, message: str) -> None:
        self.receive("warn", message)

    def read(self, size: int, documents: int) -> None:
        """As `Progress.read`."""
        self.receive("read", size, documents)

    def wrote(self, tokens: int, slots: int) -> None:
        """As `Progress.wrote`."""
        self.receive("wrote", tokens, slots)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reporter_here, ()


_here = Reporter()  # of an interpreter that forks for a program with threads


def _reporter_here() -> Reporter:
    """Return the reporter of this process: the program's own is unpickled as it."""
    return _here


class Pool(Generic[T, R]):
    """Calls `perform` for items in workers. The first error of an item ends the pool.

    perform   gets an item, and returns a result that can be pickled
    workers   how many items are worked on at a time
    prepare   loads what all items need; called before the first fork
    reporter  gets what workers report
    describe  names an item in messages
    attempts  how often an item may be begun whose worker is lost
    may_run_here  a program with threads performs items itself; else it pickles them, `perform`,
                  `prepare` and `describe`
    """

    def __init__(
        self,
        perform: Callable[[T], R],
        *,
        workers: int = 1,
        prepare: Callable[[], object] = _do_nothing,
        reporter: Reporter | None = None,
        describe: Callable[[T], str] = str,
        attempts: int = ATTEMPTS,
        may_run_here: bool = False,
    ) -> None:
        self._perform, self._prepare, self._describe = perform, prepare, describe
        self._workers, self._attempts = workers, attempts
        self._reporter = reporter or Reporter()
        self._may_run_here = may_run_here
        self._idle = list[_Worker]()
        self._interpreter: _Interpreter | None = None

    def map(self, items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        """Yield (index, result) of each item when it is done. Raises what `perform` raises,
        DataError for an item whose worker is lost again and again, and Interrupted for Ctrl-C.

        Closing the iterator kills the workers that have not done their items.
        """
        try:
            if not has_threads():
                self._prepare()
            if not has_threads():  # nor has it any now
                yield from self.map_forked(items)
            elif self._may_run_here:
                yield from enumerate(map(self._perform, items))
            else:
                yield from self._map_apart(items)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None

    def close(self) -> None:
        """End idle workers, and the interpreter of a program that has threads."""
        for worker in self._idle:
            worker.end()
        if self._interpreter is not None:
            self._interpreter.kill()

    def map_forked(
        self, items: Sequence[T], control: Connection | None = None
    ) -> Generator[tuple[int, R], None, None]:
        """As `map`, in forks of this process, which has prepared what they need. `control`: from
        the program in whose place it forks.
        """
        waiting, done = deque(map(_Attempt, range(len(items)))), list[tuple[int, R]]()
        workers = dict[Any, _Worker]()
        try:
            while waiting or workers or done:
                while waiting and len(workers) < self._workers:
                    with _blocked_signals():  # or Ctrl-C could leave a worker behind
                        was_idle = bool(self._idle)
                        worker = (
                            self._idle.pop()
                            if was_idle
                            else _Worker(
                                self._perform, self._reporter, [*workers, *filter(None, [control])]
                            )
                        )
                        if not worker.begin(waiting[0], items[waiting[0].index]) and was_idle:
                            worker.end()
                            continue
                        workers[worker.connection] = worker
                    waiting.popleft()
                yield from done  # while the workers go on
                done.clear()
                for ready in wait([*workers, *filter(None, [control])]) if workers else ():
                    if ready is control:
                        raise SystemExit  # the program has ended: it sends nothing now
                    worker = workers[ready]
                    kind, *values = worker.receive()
                    if kind == "error":
                        raise values[0]
                    if kind not in ("done", "lost"):
                        self._reporter.receive(kind, *values)
                        continue
                    del workers[ready]
                    if kind == "done":
                        self._idle.append(worker)
                        done.append((worker.attempt.index, values[0]))
                    else:
                        self._learn_from(worker, items[worker.attempt.index])
                        waiting.appendleft(worker.attempt)
        finally:
            with _blocked_signals():
                for worker in workers.values():
                    worker.end()

    def _map_apart(self, items: Sequence[T]) -> Generator[tuple[int, R], None, None]:
        if self._interpreter is None:
            self._interpreter = _Interpreter(self)
        try:
            yield from self._interpreter.map(items, self._reporter)
        except BaseException:  # it has ended
            self._interpreter = None
            raise

    def _learn_from(self, lost: _Worker, item: T) -> None:
        """Note why an attempt has failed. Raises DataError if there are no more attempts."""
        attempt = lost.attempt
        if lost.code == -limits.TIME_IS_UP and lost.noted not in attempt.refused:
            attempt.refused[lost.noted] = limits.reason_of(lost.noted)
            return
        attempt.losses += 1
        how = f"was killed by signal {-lost.code}" if lost.code < 0 else f"ended, code {lost.code}"
        what = f"{self._describe(item)}: a worker {how}"
        if attempt.losses < self._attempts:
            again = f"its work is done again, attempt {attempt.losses + 1} of {self._attempts}"
            self._reporter.warn(f"warning: {what}; {again}")
            return
        raise DataError(
            what + (f", {attempt.losses} times" if attempt.losses > 1 else ""),
            "if memory ran out, use fewer --workers",
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_interpreter": None, "_idle": []}


def has_threads() -> bool:
    """True if this process has a thread beside this one that forbids to fork."""
    names = list[str]()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    return len([name for name in names if name != _FORK_SAFE]) > 1


@contextmanager
def _blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Attempt:
    """An item by its `index`, how many workers were `losses` on it, and the renderings that are
    `refused`, with the reasons (`chat/limits.py`).
    """

    index: int
    refused: dict[int, str] = field(default_factory=dict)
    losses: int = 0


class _Worker:
    """A forked process that performs one item after another.

    attempt  what it performs
    code     how it has ended: an exit code, or -N for signal N
    noted    the rendering that it has begun last
    """

    attempt: _Attempt

    def __init__(
        self, perform: Callable[[Any], Any], reporter: Reporter, others: Sequence[Connection]
    ) -> None:
        """`others`: connections of the parent that a worker has no use for. Signals are blocked,
        or an exception out of a handler would come up in the worker.

        Raises DataError if no process can begin.
        """
        self.code, self._has_ended = 0, False
        try:
            self._note = mmap.mmap(-1, _NOTE_BYTES)
            self.connection, theirs = Pipe()
            parent = os.getpid()
            with warnings.catch_warnings():  # of CPython 3.12, about the allocator's thread
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError as error:
            raise DataError(
                f"a worker cannot begin: {error.strerror}",
                "use fewer --workers, or raise the limits of processes and open files: ulimit -a",
            ) from error
        if self._pid == 0:
            _work(parent, theirs, [self.connection, *others], perform, reporter, self._note)
        theirs.close()

    @property
    def noted(self) -> int:
        return int.from_bytes(self._note[:], sys.byteorder, signed=True)

    def begin(self, attempt: _Attempt, item: Any) -> bool:
        """Hand out an item. Returns False if the worker has died."""
        self.attempt = attempt
        try:
            self.connection.send((item, attempt.refused))
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Any, ...]:
        """Return its next message, or ("lost",) if it has died."""
        try:
            return self.connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.end()
            return ("lost",)

    def end(self) -> None:
        """Kill it, if it has not ended: what it has not committed is packed again."""
        with _blocked_signals():
            if self._has_ended:
                return
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # a program may wait for all of its children
                self.code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._has_ended = True
            self.connection.close()


def _work(
    parent: int,
    connection: Connection,
    others: Sequence[Connection],
    perform: Callable[[Any], Any],
    reporter: Reporter,
    note: mmap.mmap,
) -> NoReturn:
    """Perform items until the parent hands out no more, in a forked process."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before it was asked for that
            os._exit(0)
        for other in others:
            other.close()
        for number in _SIGNALS:  # reach the parent, too, which ends the workers
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*_SIGNALS, limits.TIME_IS_UP])
        gc.freeze()  # what is shared stays untouched, and so shared
        gc.set_threshold(100_000, 50, 50)  # garbage is freed at once; few cycles are ever made
        sys.stdout = sys.stderr  # what a library prints is seen, and not taken for our output
        limits.enter_worker(memoryview(note).cast("q"))
        reporter.send_to(connection.send)
        while True:
            item, refused = connection.recv()
            limits.begin_item(refused)
            connection.send(("done", perform(item)))
            del item
    except BaseException as error:
        with suppress(OSError):  # the parent has ended
            connection.send(("error", _sendable(error)))
    finally:
        os._exit(0)


class _Interpreter:
    """A new interpreter, in which a pool forks for a program that has threads."""

    def __init__(self, pool: Pool[Any, Any]) -> None:
        self._connection, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
        with theirs, os_errors(sys.executable, "run"):
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        self._send((byte_streams.seen_of_stdin(), pool))

    def map(
        self, items: Sequence[Any], reporter: Reporter
    ) -> Generator[tuple[int, Any], None, None]:
        try:
            self._send(items)
            while True:
                try:
                    kind, *values = self._connection.recv()
                except (EOFError, OSError) as error:
                    raise DataError(
                        f"the interpreter that packs has ended, code {self._process.wait()}",
                        "if memory ran out, use fewer --workers; if packages have changed since "
                        "the run began, run the same command again",
                    ) from error
                if kind == "end":
                    return
                if kind == "error":
                    raise values[0]
                if kind == "result":
                    yield values[0], values[1]
                else:
                    reporter.receive(kind, *values)
        except BaseException:  # it may have more to say, which nothing waits for
            self.kill()
            raise

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with suppress(OSError):  # `map` notices that it has ended
            self._connection.send_bytes(data)


def serve(descriptor: int) -> None:
    """Map items for the program at the other end of a connection, until it ends."""
    tune_process()
    control = Connection(descriptor)
    _here.send_to(control.send)
    try:
        seen, pool = control.recv()
        byte_streams.begin_stdin(seen)
        pool._prepare()
        while True:
            for index, result in pool.map_forked(control.recv(), control):
                control.send(("result", index, result))
            control.send(("end",))
    except Exception as error:
        with suppress(OSError):  # the program has ended
            control.send(("error", _sendable(error)))


def _sendable(error: BaseException) -> Exception:
    """Return the error in a form that can be pickled."""
    if isinstance(error, OSError) and error.errno is not None:  # not of a class of its own
        return OSError(error.errno, error.strerror, error.filename)
    if isinstance(error, PackerError | MemoryError):
        return error
    unknown = InternalError(f"{type(error).__name__}: {error}")
    if hasattr(unknown, "add_note"):  # since Python 3.11; --debug shows it
        unknown.add_note("".join(traceback.format_exception(error)))
    return unknown
