"""Ctrl-C and SIGTERM: an exception while the main thread works alone, a flag while others work;
and `run_all`, which has tasks done by threads until then.

An exception out of a signal's handler may come between any two steps of what the main thread does,
and leave a lock taken for which another thread then waits for ever. Code that waits for threads
does so inside `as_flag`, and looks at the flag. Of a destructor Python drops it: `interruptible`.

A flag waits until threads look at it, and a tokenizer may work on one text for minutes. A process
that is all ours soon ends without them, by `end_late`: a run may be killed at any moment.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from packer_cli.errors import Interrupted

if TYPE_CHECKING:
    from concurrent.futures import Future

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SECONDS = 0.01  # until a destructor has ended
Handler = Callable[[int, Any], object]
_GRACE_SECONDS = 1.5
_LOOK_SECONDS = 0.2  # between two looks for Ctrl-C
_may_end_late = False
Task = Callable[[], object]


def end_late(end: Handler) -> None:
    """Call `end` when threads still work a while after a signal, instead of waiting."""
    global _may_end_late  # noqa: PLW0603 a process has one such timer
    signal.signal(signal.SIGALRM, end)
    _may_end_late = True


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, both signals raise KeyboardInterrupt; one that is ignored (nohup, `&` in a script)
    stays ignored. One that comes inside a destructor, where it raises nothing, is sent again.
    """
    before = sys.unraisablehook

    def look(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        at_end = signal.getsignal(signal.SIGALRM)

        def again(number: int, frame: object) -> None:
            signal.signal(signal.SIGALRM, at_end)
            signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)

    with ExitStack() as stack:
        for number in NUMBERS:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None:
                stack.callback(signal.signal, number, handler)
                signal.signal(number, signal.default_int_handler)
        stack.callback(setattr, sys, "unraisablehook", before)
        sys.unraisablehook = look
        yield


@contextmanager
def handled_as_before() -> Iterator[None]:
    """Restore both handlers at the end, whatever a library sets inside."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.getsignal(number)) for number in NUMBERS]
    try:
        yield
    finally:
        for number, handler in before:
            if handler is not None:  # one that is not of Python cannot be set again
                signal.signal(number, handler)


class _Flag:
    interrupted = False

    def __call__(self, number: int, frame: object) -> None:
        if _may_end_late and not self.interrupted:
            signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS)
        self.interrupted = True


@contextmanager
def as_flag() -> Iterator[Callable[[], bool]]:
    """Inside, what would raise KeyboardInterrupt makes the function that is given return True.

    KeyboardInterrupt is raised at the end when there was a signal, and nothing else is raised.
    """
    handlers = [signal.getsignal(number) for number in NUMBERS]
    for handler in handlers:
        if isinstance(handler, _Flag):  # inside another one, which raises
            yield lambda flag=handler: flag.interrupted  # type: ignore[misc]
            return
    flag = _Flag()
    raising = [n for n, h in zip(NUMBERS, handlers, strict=True) if h is signal.default_int_handler]
    if threading.current_thread() is not threading.main_thread():
        raising = []  # nor are there any signals for it
    for number in raising:
        signal.signal(number, flag)
    try:
        yield lambda: flag.interrupted
    finally:
        for number in raising:
            signal.signal(number, signal.default_int_handler)
        if _may_end_late and flag.interrupted:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if flag.interrupted:
        raise KeyboardInterrupt


def run_all(
    tasks: Iterable[Task],
    workers: int,
    stop: threading.Event,
    end_waits: Callable[[], None] = lambda: None,
) -> None:
    """Run the tasks on threads; on the first failure or Ctrl-C set `stop` and raise.

    It waits for the tasks that still run then, so they must look at `stop`; `end_waits` is called
    to end what they may be waiting for.
    """
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait  # noqa: PLC0415 slow

    queue = iter(tasks)
    with as_flag() as interrupted, ThreadPoolExecutor(workers, "packer") as pool:
        running: set[Future[object]] = set()
        try:
            while True:
                while len(running) < workers and (task := next(queue, None)):
                    running.add(pool.submit(task))
                if not running:
                    return
                finished, running = wait(running, _LOOK_SECONDS, FIRST_COMPLETED)
                if interrupted():
                    raise Interrupted("interrupted")
                for future in finished:
                    future.result()
        except BaseException as error:
            stop.set()  # before the pool waits for the tasks still running
            end_waits()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted") from None
            raise
