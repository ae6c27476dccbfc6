"""An object that threads use together, made anew when the process has grown too much.

For a library that remembers what it has seen, and cannot be told to forget it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

_Made = TypeVar("_Made")

# Growth counts from here on: by then windows and buffers have the size that they keep.
_SETTLED = 1 << 26
_MOST_GROWN = 128 << 20  # bytes for each thread that uses the object
_MOST_USED = 1 << 30  # where the system does not say how large the process is
_LOOK_AFTER = 1 << 22
_LOOKS = 8  # what windows take comes and goes: the least of so many looks is what stays


def resident() -> int | None:
    """Bytes of memory that this process has, or None where the system does not say."""
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


class Renewed(Generic[_Made]):
    """`using` gives the object to any number of threads at once."""

    def __init__(self, make: Callable[[], _Made]) -> None:
        """Raises what `make` raises."""
        self._make = make
        self._turn = threading.Condition()
        self._users = self._most_users = 0
        self._made: _Made | None = None
        self._renewing = False
        self._renew()

    @contextmanager
    def using(self, amount: int) -> Iterator[_Made]:
        """The object, to use `amount` of it, whatever the caller counts. Whoever keeps it longer
        keeps its memory. Raises what `make` raises.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._renewing)
            self._used += amount
            made = self._made
            if made is None or self._is_due():
                made = None
                made = self._renew()
            self._users += 1
            self._most_users = max(self._most_users, self._users)
        try:
            yield made
        finally:
            del made  # before the others hear of it
            with self._turn:
                self._users -= 1
                self._turn.notify_all()

    def _renew(self) -> _Made:
        """The old one is gone, with all of its memory, before the new one takes any."""
        with self._turn:
            self._renewing = True
            try:
                self._turn.wait_for(lambda: not self._users)
                self._made = None
                self._used = self._next_look = 0
                self._looks = deque[int](maxlen=_LOOKS)
                self._settled: int | None = None
                made = self._made = self._make()
                return made
            finally:
                self._renewing = False
                self._turn.notify_all()

    def _is_due(self) -> bool:
        if self._used < self._next_look:
            return False
        self._next_look = self._used + _LOOK_AFTER
        size = resident()
        if size is None:
            return self._used > _MOST_USED
        self._looks.append(size)
        if self._used < _SETTLED:
            return False
        if self._settled is None:
            self._settled = max(self._looks)
        return min(self._looks) > self._settled + _MOST_GROWN * self._most_users
