"""Documents encoded again and compared with their pieces in the rows, or as they are stored."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.errors import Interrupted
from packer_cli.inputs.formats import reader_for
from packer_cli.packing.fitting import trained_documents
from packer_cli.records import (
    IGNORED,
    InputFile,
    Int64,
    Records,
    TokenBatch,
    UInt8,
    UInt32,
    record_position,
)
from packer_cli.run.rows import pieces_of
from packer_cli.tokenization.encoding import Encode, Encoded
from packer_cli.verify.findings import DIFFERENT, Findings
from packer_cli.verify.rows import UnitRows

_MOST = 20  # differing documents that are reported for one input of one unit


class StoredUnit(Protocol):
    """What a result holds of one unit's documents: `PackedUnit` or `TokenizedUnit`."""

    def positions(self, file: int) -> Int64: ...
    def differences(self, batch: TokenBatch) -> Iterator[tuple[int, str]]: ...


class Documents:
    """Compares documents of one unit. `encode` is an `encoding.Encode` that also compares.

    Rows that do not say where their segments come from are not compared here.
    """

    def __init__(
        self,
        unit: StoredUnit,
        config: DocumentConfig,
        encode: Encode,
        findings: Findings,
        stop: threading.Event,
    ) -> None:
        self._unit = unit
        self._config = config
        self._encode = encode
        self._findings = findings
        self._stop = stop
        self._problems: dict[str, list[str]] = defaultdict(list)
        self._compared: dict[int, list[Int64]] = defaultdict(list)
        self.differing = 0

    def encode(self, records: Records, file: InputFile) -> Encoded:
        """Encode as a run does, and compare every document."""
        if self._stop.is_set():
            raise Interrupted("stopped")
        encoded = self._encode(records, file)
        batch, bad, _ = encoded
        self.compare(batch, file)
        if bad and self._config.on_error == "fail":
            self._differs_at(file, bad[0].position, f"a bad record: {bad[0].reason}")
        return encoded

    def compare(self, batch: TokenBatch, file: InputFile) -> None:
        """Compare documents, all of one file."""
        self._compared[file.index].append(batch.position)
        for document, text in self._unit.differences(batch):
            self._differs(file, int(batch.position[document]), text)

    def expect(self, file: InputFile, positions: Int64) -> None:
        """Report documents in the rows, at these positions, that were not compared."""
        nothing = np.empty(0, np.int64)
        missing = np.setdiff1d(positions, np.concatenate([nothing, *self._compared[file.index]]))
        if len(missing):
            count = len(missing)
            self._differs(file, int(missing[0]), f"no document begins there ({count} in all)")

    def finish(self) -> int:
        """Add the problems to the findings; return how many documents were compared."""
        for path, texts in self._problems.items():
            left = len(texts) - _MOST
            texts = texts[:_MOST] + [f"{left} more documents differ"] * (left > 0)  # noqa: PLW2901
            self._findings.add(path, *texts, remedy=DIFFERENT)
        return sum(len(some) for parts in self._compared.values() for some in parts)

    def _differs(self, file: InputFile, document: int, text: str) -> None:
        """Of the document at a position."""
        self._differs_at(file, record_position(document, self._config.turns), text)

    def _differs_at(self, file: InputFile, position: int, text: str) -> None:
        self.differing += 1
        place = reader_for(file.format).describe(file, position)
        self._problems[file.path].append(f"{place}: {text}")


class PackedUnit:
    """The rows of a unit as documents are compared with them."""

    def __init__(self, rows: UnitRows, config: PackConfig) -> None:
        self._rows = rows
        self._config = config

    def positions(self, file: int) -> Int64:
        """The positions of the documents of a file, each once."""
        return self._rows.positions(file)

    def differences(self, batch: TokenBatch) -> Iterator[tuple[int, str]]:
        """(document, how it differs) of a batch, whose documents are all of one file."""
        if not self._rows.by_place:
            return
        expected, wanted = None, np.diff(batch.offsets)
        if self._config.strategy != "wrap":
            pieces, _ = pieces_of(batch, self._config)
            edges = np.searchsorted(pieces.document, np.arange(len(batch.position) + 1))
            expected = (pieces, edges)
        elif batch.trained is not None and not self._config.keep_untrained:
            kept, _ = trained_documents(batch.offsets, batch.trained)
            wanted = np.where(np.isin(np.arange(len(wanted)), kept), wanted, 0)
        for document in range(len(batch.position)):
            text = self._difference(batch, document, expected, int(wanted[document]))
            if text:
                yield document, text

    def _difference(
        self,
        batch: TokenBatch,
        document: int,
        expected: tuple[Any, Int64] | None,
        tokens: int,
    ) -> str:
        """How a document and its pieces in the rows differ; "" if they do not.

        `tokens`: how many of its tokens are to be in rows, where `expected` lists no pieces.
        """
        unit, position = self._rows, int(batch.position[document])
        of_document = unit.pieces(int(batch.file[document]), position)
        packed = [(int(unit.start[i]), int(unit.length[i])) for i in of_document]
        begin = int(batch.offsets[document])
        if expected is None:
            reached = 0
            for start, length in packed:
                if start != reached:
                    break
                reached += length
            if reached != tokens:
                return f"has {tokens} tokens when encoded again, {reached} of them in rows"
        else:
            pieces, edges = expected
            here = slice(edges[document], edges[document + 1])
            wanted = list(zip(pieces.start[here].tolist(), pieces.length[here].tolist(),
                              strict=True))  # fmt: skip
            if packed != wanted:
                return (
                    f"is packed as {_shown(packed)} of its tokens, {_shown(wanted)} expected "
                    "when encoded again"
                )
        for i in of_document:
            text = piece_difference(
                unit, i, batch.ids, batch.trained, begin + int(unit.start[i]), self._config
            )
            if batch.chosen is not None and not text:
                expected_side = int(unit.start[i] < batch.chosen[document])
                if unit.side(i) != expected_side:
                    text = f"side is {unit.side(i)}, {expected_side} expected when encoded again"
            if text:
                return text
        return ""


def piece_difference(
    unit: UnitRows, i: int, ids: UInt32, trained: UInt8 | None, begin: int, config: PackConfig
) -> str:
    """How segment `i` of a unit and the tokens from `begin` on differ; "" if they do not.

    ids uint32[T], trained uint8[T] or None, as in a TokenBatch.
    """
    shard, first_row, in_rows, labels = unit.batches[unit.batch[i]]
    row, place, length = (int(one[i]) for one in (unit.row, unit.begin, unit.length))
    source = slice(begin, begin + length)
    expected = ids[source].astype(np.int32)
    values = [("input_ids", in_rows, expected)]
    if labels is not None:
        flags = np.ones(length, bool) if trained is None else trained[source].astype(bool)
        flags[0] = False  # nothing before it in the row predicts it
        wanted = np.where(flags, expected, np.int32(IGNORED))
        if config.label_shift == "pre":
            wanted = np.append(wanted[1:], np.int32(IGNORED))
        values.append(("labels", labels, wanted))
    for name, column, wanted in values:
        here = column[row, place : place + length]
        if not np.array_equal(here, wanted):
            at = int(np.argmax(here != wanted))
            return (
                f"{name} has {here[at]} at place {place + at} of row {first_row + row} of "
                f"{shard}, {wanted[at]} expected when encoded again"
            )
    return ""


def _shown(pieces: list[tuple[int, int]]) -> str:
    shown = [f"{start}-{start + length}" for start, length in pieces[:5]]
    return ", ".join(shown) + " ..." * (len(pieces) > 5) if shown else "none"
