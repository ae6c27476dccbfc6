"""Limits for rendering a record, which the kernel enforces: no template gets around them.

Processor time: a timer's signal ends this process, even amid a power of huge numbers, which would
hold up Python for hours. The process that waits for it finds the record noted. Time in which
the process is paused does not count.

Memory: beyond the limit there is none, and Python raises MemoryError.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from packer_cli.child_process import note

TIME_IS_UP = signal.SIGPROF
TEMPLATE = -1  # noted in the place of a record
# Text, spans and copies of a record take a few times its own size, which is in memory already.
_TIMES, _ROOM_BYTES = 4, 1 << 30


class RecordLimits:
    """For a process of one thread that renders. `seconds`: for each record."""

    def __init__(self, seconds: float) -> None:
        signal.signal(TIME_IS_UP, signal.SIG_DFL)
        self._seconds = seconds

    @contextmanager
    def held(self) -> Iterator[None]:
        """Limit memory; `begin` says where each record begins."""
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [_TIMES * _used_bytes() + _ROOM_BYTES, soft, hard]
        least = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def begin(self, record: int) -> None:
        """The time of `record`, a position or any other number, runs from now on."""
        note(record)
        signal.setitimer(signal.ITIMER_PROF, self._seconds)


def _used_bytes() -> int:
    """What RLIMIT_DATA counts, and stacks."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGESIZE")
