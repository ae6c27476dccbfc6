"""The reference engine in a process of its own, so that checking the fast one is free.

Both engines hold the GIL while they load (a third of a second each for 128k tokens), and the
reference encodes tens of times slower. Beside the run, on another core, it costs no time: it
loads while the fast engine loads, and each sample is compared while the next batch is encoded.
"""

from __future__ import annotations

import threading
from typing import Any

from packer_cli.child_process import Child, LostChildError
from packer_cli.early import REFERENCE_ENGINE, EarlyReference
from packer_cli.errors import InternalError
from packer_cli.records import Int64, UInt32
from packer_cli.tokenization.engines import Description, ReferenceEngine

_ATTEMPTS = 3


class ReferenceProcess:
    """`ReferenceEngine` in a child; `check` does not wait for the answer. Thread-safe."""

    name = ReferenceEngine.name

    def __init__(self, tokenizer_json: bytes, early: EarlyReference | None = None) -> None:
        """Start loading, unless `early` did; errors of loading come out of the first call."""
        self._lock = threading.Lock()
        self._pending: str | None = None
        self._json = tokenizer_json
        self._difference: InternalError | None = None
        begun = early.take(tokenizer_json) if early else None
        self._child = begun or Child(REFERENCE_ENGINE, tokenizer_json)

    def describe(self, tokens: list[str]) -> Description:
        description: Description = self._ask("describe", tokens)
        return description

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        ids, offsets = self._ask("encode", texts)
        return ids, offsets

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets = self._ask("offsets", text)
        return ids, offsets

    def check(self, text: str, ids: UInt32) -> None:
        """Have `ids` compared; a difference is raised by a later `check`, or by `finish`."""
        with self._lock:
            self._settle()
            self._child.begin("encode", [text])
            self._pending = text
            self._expected = ids

    def finish(self) -> None:
        """Wait for the last comparison. Raises InternalError when any found a difference."""
        with self._lock:
            self._settle()

    def close(self) -> None:
        self._child.close()

    def _settle(self) -> None:
        text, self._pending = self._pending, None
        if text is not None:
            ids, _ = self._answer("encode", [text])
            if ids.tobytes() != self._expected.tobytes():
                self._difference = InternalError(
                    f"the engines gigatoken and tokenizers differ on the text {text[:80]!r}",
                    "run again with --tokenizer-backend tokenizers, and please report the text",
                )
        if self._difference is not None:  # for every caller: nothing may be committed
            raise self._difference

    def _ask(self, name: str, argument: object) -> Any:
        with self._lock:
            self._settle()
            self._child.begin(name, argument)
            return self._answer(name, argument)

    def _answer(self, name: str, argument: object) -> Any:
        """The answer of the child. One that is lost, perhaps out of memory, is replaced and asked
        again: no sample may be skipped.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._child.answer()
            except LostChildError:
                self._child.close()
                self._child = Child(REFERENCE_ENGINE, self._json)
                self._child.begin(name, argument)
        return self._child.answer()
