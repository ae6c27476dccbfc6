"""Reading and rendering conversations in processes beside the run.

Rendering holds the GIL, and is most of the work on conversations; so is loading a tokenizer, a
third of a second. Each worker has a child that reads its slices and gives texts and spans; the
first ones begin before the tokenizer is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from packer_cli.child import Child
from packer_cli.records import InputFile, Records, Slice

_MAKE = "packer_cli.supervised.documents:make_composer"
_Request = tuple[InputFile, Slice]


class ComposingProcesses:
    """`Composer.read` of children. Thread-safe; each reader has a child of its own."""

    def __init__(self, *composer: Any) -> None:
        """`composer`: the arguments of `make_composer`."""
        self._composer = composer
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._ahead: dict[_Request, Child] = {}
        self._all: list[Child] = []

    def start(self, file: InputFile, part: Slice) -> None:
        """Begin to read a slice that `read` will ask for."""
        child = self._child()
        child.begin("read", file, part)
        with self._lock:
            self._ahead[file, part] = child

    def read(self, file: InputFile, part: Slice) -> Iterator[Records]:
        with self._lock:
            child = self._ahead.pop((file, part), None)
        if child is None:
            child = self._child()
            child.begin("read", file, part)
        yield from child.items()
        with self._lock:  # not after a failure: it may have more to say
            self._idle.append(child)

    def close(self) -> None:
        for child in self._all:
            child.close()

    def _child(self) -> Child:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            child = Child(_MAKE, *self._composer)
            self._all.append(child)
            return child
