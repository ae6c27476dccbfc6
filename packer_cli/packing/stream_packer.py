"""`StreamPacker`: lengths one at a time, every row as soon as it is closed.

Only strategies with few open rows can do so: next-fit has one, harmonic (Lee and Lee 1985) one
for each class of lengths, and next-fit is harmonic with a single class. The others pack better, a
buffer at a time: `plan_packing`, or `packer_cli.torch.PackingIterableDataset` for the tokens.
"""

from __future__ import annotations

from operator import index

from packer_cli.config.strategies import canonical_name
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.packing.planning import HARMONIC_CLASSES, check_max_length

_CLASSES = {"next-fit": 1, "harmonic": HARMONIC_CLASSES}


class StreamPacker:
    """The rows that `plan_packing` makes of the same lengths, in the order in which they close.

        packer = StreamPacker(4096)
        for document in documents:
            for row in packer.add(len(document)):
                ...  # a list of document numbers, counted from 0 in the order of `add`
        for row in packer.finish():
            ...

    max_length  tokens in a row
    strategy    "next-fit" or "harmonic", or an alias of these
    documents   how many were added, empty ones included, which are in no row

    Raises UsageError for another strategy, a max_length outside 1..2**24, or documents after
    the end.
    """

    def __init__(self, max_length: int, strategy: str = "next-fit") -> None:
        name = canonical_name(strategy)
        if name not in _CLASSES:
            raise one_of("strategy of a StreamPacker", strategy, _CLASSES)
        check_max_length(max_length)
        self.max_length, self.strategy, self.documents = max_length, name, 0
        self._classes = _CLASSES[name]
        # class -> documents in its open row, and how many more tokens fit
        self._rows: dict[int, list[int]] = {}
        self._space: dict[int, int] = {}
        self._finished = False

    def add(self, length: int) -> list[list[int]]:
        """Place the next document; the rows that this closes, two at most.

        Raises DataError for a length outside 0..max_length: cut or leave out such a document.
        """
        if self._finished:
            raise UsageError("add() after finish()", "make a new StreamPacker")
        length = index(length)
        if not 0 <= length <= self.max_length:
            raise DataError(
                f"document {self.documents} has {length} tokens, max_length is {self.max_length}",
                "cut it or leave it out, or choose a larger max_length",
            )
        self.documents += 1
        if not length:
            return []
        # class j < classes: lengths in (max_length / (j + 1), max_length / j], exactly j to a row
        kind = min(self.max_length // length, self._classes)
        closed = self._close(kind) if length > self._space.get(kind, 0) else []
        row = self._rows.setdefault(kind, [])
        row.append(self.documents - 1)
        self._space[kind] = self._space.get(kind, self.max_length) - length
        if not self._space[kind] or len(row) == kind < self._classes:
            closed += self._close(kind)
        return closed

    def finish(self) -> list[list[int]]:
        """The rows that are still open, the oldest first; no more documents can be added."""
        self._finished = True
        return sorted(row for kind in list(self._rows) for row in self._close(kind))

    def _close(self, kind: int) -> list[list[int]]:
        self._space.pop(kind, None)
        row = self._rows.pop(kind, None)
        return [row] if row else []
