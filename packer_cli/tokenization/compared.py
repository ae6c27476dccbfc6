"""The characters on which the fast engine has been compared with the reference, and is trusted.

Before the first text with a character is trusted, both engines encode that character in the
contexts that split words. Where they differ, its texts go to the reference for ever, as do those
with characters that Unicode versions class differently (`unsettled.py`). So tokens never depend on
which worker met a character first, nor on whether a run was interrupted.

What it costs: a look at every character that is not Latin-1, a fraction of a nanosecond each, and
about 10 µs of the reference's time for each character that the texts have, once.
"""

from __future__ import annotations

import threading

import numpy as np

from packer_cli._kernels import texts as kernels
from packer_cli.records import Notify, UInt8
from packer_cli.tokenization.agreement import LATIN_1, differing, in_contexts
from packer_cli.tokenization.engines import Engine
from packer_cli.tokenization.unsettled import settled

_TRUSTED, _NEW, _NEVER = 0, 1, 2
_SURROGATES = slice(0xD800, 0xE000)  # alone, no engine takes them
_AT_A_TIME = 64  # characters in one text: most groups have none that differs
_SCANNED = 1 << 18  # characters of a text at a time: each takes 14 bytes, and a text may be long


class ComparedCharacters:
    """The characters of a pair of engines that agree on Latin-1. Safe to share between threads."""

    def __init__(self, fast: Engine, reference: Engine, notify: Notify) -> None:
        """`notify` gets a line about the first characters on which the engines differ."""
        self._fast = fast
        self._reference = reference
        self._notify = notify
        self._told = False
        self._lock = threading.Lock()
        # uint8[0x110000]. Others read it while it changes: only to _TRUSTED, and for good.
        self._states = np.where(settled(), _NEW, _NEVER).astype(np.uint8)
        self._states[: len(LATIN_1)] = _TRUSTED
        self._states[_SURROGATES] = _TRUSTED

    def untrusted(self, texts: list[str]) -> list[int]:
        """Which texts only the reference is to encode, ascending."""
        numbers = np.flatnonzero(self._search(texts))
        if not len(numbers):
            return []
        doubtful = [texts[i] for i in numbers]
        self._compare("".join(doubtful))
        untrusted: list[int] = numbers[self._search(doubtful) > 0].tolist()
        return untrusted

    def _search(self, texts: list[str]) -> UInt8:
        flags = np.zeros(len(texts), np.uint8)
        kernels.find_in_texts(texts, self._states, flags)
        return flags

    def _compare(self, text: str) -> None:
        """Compare the engines on all characters of the text that are new."""
        present = np.zeros(len(self._states), bool)
        for begin in range(0, len(text), _SCANNED):
            part = text[begin : begin + _SCANNED].encode("utf-32-le", "surrogatepass")
            present[np.frombuffer(part, np.uint32)] = True
        with self._lock:
            new = np.flatnonzero(present & (self._states == _NEW)).astype(np.uint32)
            if not len(new):
                return
            different = self._differing(new.tobytes().decode("utf-32-le"))
            self._states[np.setdiff1d(new, [ord(one) for one in different])] = _TRUSTED
            self._states[[ord(one) for one in different]] = _NEVER
            if different and not self._told:
                self._told = True
                named = ", ".join(f"U+{ord(one):04X}" for one in different[:3])
                self._notify(
                    f"texts with {named}{', ...' * (len(different) > 3)} go to the slower "
                    "tokenizers engine: gigatoken differs from it there"
                )

    def _differing(self, new: str) -> str:
        """Those characters on which the engines differ, among some that differ at least."""
        groups = [new[i : i + _AT_A_TIME] for i in range(0, len(new), _AT_A_TIME)]
        different = self._different(groups)
        alone = self._different([one for group in different for one in group]) if different else []
        together = [one for one in different if not set(one) & set(alone)]  # none of it alone
        return "".join([*alone, *together])

    def _different(self, groups: list[str]) -> list[str]:
        """Those in whose contexts the engines differ."""
        texts = [in_contexts(group) for group in groups]
        numbers = differing(texts, self._fast.encode(texts), self._reference.encode(texts))
        return [groups[i] for i in numbers]
