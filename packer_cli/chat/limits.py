"""Limits of what a chat template may use for one record: 10 s of processor time, and memory.

A template is a program, and may run for ever. Only the kernel can stop it, even amid a power of
huge numbers, so templates render in the workers of `run/pool.py`. A timer of processor time kills
the worker; time in which the process is paused does not count. Beyond the limit of memory Python
raises MemoryError.

Each worker counts the renderings of the item that it works on. The number of the current one lies
in memory that the parent shares, so the parent knows which rendering killed a worker. An item is a
pure function: when it is repeated, the rendering with that number is refused.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from packer_cli.chat.messages import RefusedError
from packer_cli.errors import InternalError, UsageError

TIME_IS_UP = signal.SIGPROF
SECONDS_PER_RECORD = 10.0  # of processor time: a conversation of 10 MB takes about one
_COMPILING = -1  # the number of what precedes the first rendering: the template is analysed
# Text, spans and copies of a record take a few times its own size, which is in memory already.
_TIMES, _ROOM_BYTES = 4, 1 << 30

_note: memoryview | None = None  # int64[1], shared with the parent; None: not in a worker
_refused: Mapping[int, str] = {}
_renderings = 0


def enter_worker(note: memoryview) -> None:
    """Enable rendering in this process. `note`: int64[1], memory that the parent reads."""
    global _note  # noqa: PLW0603 a process has one timer
    _note = note
    signal.signal(TIME_IS_UP, signal.SIG_DFL)


def begin_item(refused: Mapping[int, str]) -> None:
    """Count renderings from 0 again. `refused`: those that take too long, and why."""
    global _refused, _renderings
    _refused, _renderings = refused, 0


def begin_template() -> None:
    """Start the time in which the template is analysed."""
    _start_timer(_COMPILING)


def begin_record() -> None:
    """Start the time of the next record. Raises RefusedError if it is known to take too long."""
    global _renderings
    number, _renderings = _renderings, _renderings + 1
    if number in _refused:
        raise RefusedError(_refused[number])
    _start_timer(number)


@contextmanager
def probing() -> Iterator[None]:
    """A context in which the template renders messages of packer's own, which have a time of their
    own: a template that takes too long for them makes no record bad, but ends the run.
    """
    if _note is None:
        yield
        return
    number = _note[0]
    _start_timer(_COMPILING)
    try:
        yield
    finally:
        _start_timer(number)


def reason_of(number: int) -> str:
    """Return why a rendering is refused. Raises UsageError if the template itself is too slow."""
    took = f"takes more than {SECONDS_PER_RECORD:g} s"
    if number == _COMPILING:
        raise UsageError(
            f"the chat template {took} for a question and its answer",
            "fix the template, or name another one with --chat-template",
        )
    return f"the chat template {took}"


def _start_timer(number: int) -> None:
    if _note is None:
        raise InternalError("a chat template was about to render outside of a worker")
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_RECORD)
    _note[0] = number  # after the time of the record before has ended


@contextmanager
def limited() -> Iterator[None]:
    """Limit the memory of this process, and stop the time of the last record at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm", "rb") as file:  # what RLIMIT_DATA counts, and stacks
        used = int(file.read().split()[5]) * os.sysconf("SC_PAGESIZE")
    limits = [_TIMES * used + _ROOM_BYTES, soft, hard]
    least = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
