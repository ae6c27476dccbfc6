"""Why a document is in no row, as far as its results tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from packer_cli.config.mixture import TRAIN, VALIDATION
from packer_cli.errors import DataError
from packer_cli.records import record_position
from packer_cli.result.layout import REJECTED
from packer_cli.result.opening import open_packed
from packer_cli.result.reader import PackedDirectory
from packer_cli.trace.naming import Candidate, Named
from packer_cli.trace.results import Results
from packer_cli.trace.rows import nearest_positions, rows_with

_LOSSES = {
    "dropped_documents": "dropped as longer than a row",
    "untrained_documents": "without a token to train on",
    "empty_documents": "without tokens",
    "rejected_records": "rejected",
}
_LEFT_OUT = {"held_out_documents": "held out", "duplicate_documents": "equal to others"}


def absent(results: Results, document: Named) -> DataError:
    """The error for a document that is in no row."""
    names = ", ".join(str(one.path) for one in results.parts)
    why = next(filter(None, (_why(results, one, document.position)
                             for one in document.candidates)), "")  # fmt: skip
    counted = [text for one in document.candidates for text in _losses(results, one)]
    if not why and counted:
        why = f"left out of its input or source: {', '.join(counted)}"
    why = why or "every document of this input is in rows, and none begins there"
    return DataError(f"{document}: is in no row of {names}: {why}", _tip(results, document))


def _why(results: Results, one: Candidate, position: int) -> str:
    """Why, where a result tells, or the tokenized directory that it refers to."""
    packed = results.parts[one.part]
    why = _rejected(packed, one, position)
    if not why and one.within is not None and not len(one.positions(position)):
        return "no document begins there"
    return why or _other_side(packed, one, position) or _too_long(results, one, position)


def _rejected(packed: PackedDirectory, one: Candidate, position: int) -> str:
    """Whether the run that read the input rejected the record."""
    directory = packed.path if one.within is None else one.within[0].path
    try:
        with open(directory / REJECTED, "rb") as lines:
            for line in lines:
                record = json.loads(line)
                if record["file"] == one.path and record["position"] in (position, None):
                    return f"it was rejected: {record['reason']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # packer verify tells what is wrong with the file
    return ""


def _other_side(packed: PackedDirectory, one: Candidate, position: int) -> str:
    """Whether it is on the other side of a split."""
    sides = {TRAIN: VALIDATION, VALIDATION: TRAIN}
    path = packed.path.absolute()
    if "mixture" not in packed.manifest["config"] or path.name not in sides:
        return ""
    try:
        other = open_packed(packed.path.parent / sides[path.name])
        inputs = [part.sha256 for part in other.facts.inputs]
        number = inputs.index(packed.facts.inputs[one.number].sha256)
        rows = rows_with(other, {number: one.positions(position)})
    except (DataError, ValueError):
        return ""
    return (
        f"it is in row {rows[0]} of {other.path}, the other side of the split" if len(rows) else ""
    )


def _too_long(results: Results, one: Candidate, position: int) -> str:
    """Whether a tokenized directory says that it is longer than a row, and such were dropped."""
    packed = results.parts[one.part]
    source = packed.facts.inputs[one.number]
    directory = results.origins[one.part].tokenized(one.number) if source.format else None
    if directory is None or not source.dropped_documents:
        return ""
    documents = one.positions(position)
    longest = int(directory.lengths[documents[documents < len(directory)]].max(initial=0))
    if longest <= packed.max_length:
        return ""
    return f"it has {longest:,} tokens, and documents longer than a row were dropped"


def _losses(results: Results, one: Candidate) -> Iterator[str]:
    """What was left out of the input, and of its source."""
    facts = results.parts[one.part].facts
    yield from _counted(facts.inputs[one.number], _LOSSES)
    if one.within is not None:
        directory, file = one.within
        yield from _counted(directory.facts.inputs[file], _LOSSES)
    for source in facts.sources:
        if source.inputs[0] <= one.number < source.inputs[1]:
            yield from _counted(source, _LEFT_OUT)
            if source.epochs < 1:
                yield f"not taken, as {source.name} has {source.epochs:.2f} epochs"


def _counted(figures: Any, names: dict[str, str]) -> Iterator[str]:
    for name, words in names.items():
        number = getattr(figures, name)
        if isinstance(number, int) and number:  # earlier packers did not count all
            yield f"{words} ({number:,})"


def _tip(results: Results, document: Named) -> str:
    """The documents next to the position: perhaps it is in the middle of one."""
    for one in document.candidates:
        if near := _nearest(results, one, document.position):
            places = " and ".join(f"{one.unit} {place}" for place in near)
            rows = "" if one.within else " in rows"
            return f"the nearest documents{rows} begin at {places}"
    return "packer stats DIR --by input counts what is in rows, and what is not"


def _nearest(results: Results, one: Candidate, position: int) -> list[int]:
    """The positions of documents next to one, below and above it. Of an input that a result has
    read itself, of those in rows; of a tokenized directory's, where none is at the position.
    """
    if one.within is None:
        return nearest_positions(results.parts[one.part], one.number, position)
    stored = one.within[0].documents_of(one.within[1])[1]
    positions = np.unique(record_position(stored, one.turns))
    at = int(np.searchsorted(positions, position))
    near: list[int] = positions[max(at - 1, 0) : at + 1].tolist()
    return [] if position in near else near
