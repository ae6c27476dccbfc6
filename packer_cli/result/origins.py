"""Where segments came from: of which input, or through which tokenized directory, and from where in
it. One wording for people and one for programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, one_line
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_named
from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.options.shapes import TRACE
from packer_cli.records import MOST_TURNS, Int64, record_position
from packer_cli.result.layout import MANIFEST, digest
from packer_cli.result.manifest import TOKENIZED, Input, Manifest
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory
from packer_cli.result.rules import RowLimits, broken_boundaries, broken_sources
from packer_cli.result.tokenized import AGAIN, TokenizedDirectory, open_tokenized


@dataclass(frozen=True)
class Origin:
    """Where a segment came from. `position` counts `unit`s: "byte", "row" or "document".

    start      the segment's first token in its document
    tokenized  (directory, number of the document) where it came through a tokenized directory
    name       of the recipe's source
    turn       of the assistant, or branch of traces, counted from 0, where the document is one of
               several of a record; `turn_is` says which
    """

    file: str
    position: int
    unit: str
    start: int
    tokenized: tuple[str, int] | None = None
    name: str | None = None
    turn: int | None = None
    turn_is: str = "turn"

    def __str__(self) -> str:
        """For people, safe to print: web: a.jsonl byte 65 turn 2 from its token 16."""
        named = "" if self.name is None else f"{one_line(self.name)}: "
        through = ""
        if self.tokenized is not None:
            directory, number = self.tokenized
            through = f" (document {number} of {one_line(directory)})"
        start = f" from its token {self.start}" if self.start else ""
        of_record = "" if self.turn is None else f" {self.turn_is} {self.turn}"
        file = "stdin" if self.file == "-" else one_line(self.file)
        return f"{named}{file} {self.unit} {self.position}{of_record}{through}{start}"


def origin_as_json(origin: Origin | None) -> dict[str, Any]:
    """None: the result does not say."""
    if origin is None:
        return dict.fromkeys(("file", "position", "position_unit", "start"))
    through = origin.tokenized
    return {
        **({} if origin.name is None else {"source": origin.name}),
        "file": origin.file,
        "position": origin.position,
        "position_unit": origin.unit,
        **({} if origin.turn is None else {origin.turn_is: origin.turn}),
        **({"tokenized": through[0], "document": through[1]} if through else {}),
        "start": origin.start,
    }


class Origins:
    """Where the segments of a result came from: through tokenized directories to the first inputs.

    notes  why there is none for some tokenized directories
    """

    def __init__(
        self, manifest: Manifest, found: Mapping[int, TokenizedDirectory] | None = None
    ) -> None:
        """`found`: the tokenized directories that are open already, by the numbers of inputs."""
        self._manifest = manifest
        self._tokenized: dict[int, TokenizedDirectory | None] = dict(found or {})
        self.notes: list[str] = []

    def of(self, segments: Int64) -> list[Origin]:
        """Origins of segments int64[3, n]: file, position and start, of `rules.sources_of`.

        Raises DataError for a document that its tokenized directory does not have.
        """
        file, position, start = segments
        origins: list[Any] = [None] * len(file)
        for number in np.unique(file).tolist():
            here = np.flatnonzero(file == number)
            name = self._manifest.source_of(number)
            its = self._of_input(number, position[here])
            for place, origin, first in zip(here.tolist(), its, start[here].tolist(), strict=True):
                origins[place] = replace(origin, start=first, name=name)
        return origins

    def _of_input(self, number: int, positions: Int64) -> list[Origin]:
        one, config = self._manifest.inputs[number], self._manifest.config
        if one.format != TOKENIZED:
            return [input_origin(one, config, at) for at in positions.tolist()]
        folder = one.name
        tokenized = self._tokenized_in(number)
        if tokenized is None:
            return [Origin(folder, at, "document", 0) for at in positions.tolist()]
        facts = tokenized.facts
        found = []
        for document, file, place in zip(
            positions.tolist(), *tokenized.places(positions).tolist(), strict=True
        ):
            if not 0 <= file < len(facts.inputs):
                raise DataError(
                    f"{tokenized.path / MANIFEST}: document {document} is of input {file}, the "
                    f"manifest has {len(facts.inputs)}",
                    AGAIN,
                )
            first = input_origin(facts.inputs[file], facts.config, place)
            found.append(replace(first, tokenized=(folder, document)))
        return found

    def _tokenized_in(self, number: int) -> TokenizedDirectory | None:
        """The tokenized directory that is an input, if it is still the one that the rows came
        from.
        """
        if number not in self._tokenized:
            one, found = self._manifest.inputs[number], None
            why = f"{one.name}: was changed since"
            try:
                if digest(storage.shown(one.path)) == (one.size, one.sha256):
                    found = open_tokenized(one.name)
            except (DataError, UsageError) as error:
                why = error.message
            if found is None:
                self.notes.append(f"which inputs were tokenized is unknown: {why}")
            self._tokenized[number] = found
        return self._tokenized[number]


def sound_rows(packed: PackedDirectory, rows: Int64, columns: Sequence[str] | None = None) -> Any:
    """Rows as a batch whose segments can be taken apart. Raises DataError for the first of them
    that is damaged.

    columns  only these, of those that are stored; None: complete rows
    """
    limits = RowLimits.of(packed.facts)
    if columns is not None and PADDED_BOUNDARIES not in columns:  # as in views
        limits = replace(limits, segment_multiple=1)
    cause: Exception | None = None
    try:
        batch = packed.take(rows, columns)
        broken = broken_boundaries(batch, limits)
        if not broken and "segments" in batch.schema.names:
            broken = broken_sources(batch, np.arange(len(packed.facts.inputs)))
        if not broken:
            return batch
        number, reason = int(rows[broken[0].row]), f"{broken[0].rule}{broken[0].detail}"
    except (ValueError, KeyError, pa.ArrowException) as error:
        cause, number = error, int(rows[0])
        reason = str(error).removeprefix(f"row {number}: ")  # it has another number in its shard
    shard, row = packed.find(number)
    place = f"{packed.path / shard.file}: row {row}"
    raise DataError(f"{place}: is damaged: {reason}", PACK_AGAIN) from cause


def input_origin(one: Input, config: DocumentConfig, position: int) -> Origin:
    """A place in an input that was not tokenized before."""
    record, turn = record_position(position, config.turns), None
    if config.turns == "each":
        turn = position % MOST_TURNS
    kind = one.format_then(config.input_format)
    unit = format_named(kind).counted_in if kind else "byte"  # stdin
    turn_is = "branch" if config.shape == TRACE else "turn"
    return Origin(one.name, record, unit, 0, turn=turn, turn_is=turn_is)
