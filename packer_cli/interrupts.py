"""Ctrl-C and SIGTERM end a command by KeyboardInterrupt, at whatever step it is.

So nothing may be left in a state that the next run cannot go on from. The workers of a run get no
signal: the parent ends them (`run/pool.py`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SECONDS = 0.1  # until a destructor has ended, on a busy machine, too


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
