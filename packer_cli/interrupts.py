"""Ctrl-C and SIGTERM: an exception while the main thread works alone, a flag while others work.

An exception out of a signal's handler may come between any two steps of what the main thread does,
and leave a lock taken for which another thread then waits for ever. Code that waits for threads
does so inside `as_flag`, and looks at the flag. Of a destructor Python drops it: see `sent_again`.

A flag waits until threads look at it, and a tokenizer may work on one text for minutes. A process
that is all ours soon ends without them, by `end_late`: a run may be killed at any moment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SECONDS = 0.01  # until a destructor has ended
Handler = Callable[[int, Any], object]
_GRACE_SECONDS = 1.5
_may_end_late = False


def end_late(end: Handler) -> None:
    """Call `end` when threads still work a while after a signal, instead of waiting."""
    global _may_end_late  # noqa: PLW0603 a process has one such timer
    signal.signal(signal.SIGALRM, end)
    _may_end_late = True


@contextmanager
def handled(handle: Handler) -> Iterator[None]:
    """Handle both signals so; one that is ignored (nohup, `&` in a script) stays ignored."""
    with ExitStack() as stack:
        for number in NUMBERS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN and before is not None:
                stack.callback(signal.signal, number, before)
                signal.signal(number, handle)
        yield


@contextmanager
def sent_again() -> Iterator[None]:
    """Send an interrupt again that came inside a destructor, where it raises nothing."""
    before = sys.unraisablehook

    def look(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        seconds = _SECONDS
        while True:
            again = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            try:
                again.start()  # on a busy machine it takes longer than `seconds`,
                return
            except KeyboardInterrupt:  # and here, too, the interrupt would be dropped
                seconds *= 2

    sys.unraisablehook = look
    try:
        yield
    finally:
        sys.unraisablehook = before


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
    """A handler that only remembers the signal."""

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


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, both raise KeyboardInterrupt, even one that comes inside a destructor."""
    with handled(signal.default_int_handler), sent_again():
        yield
