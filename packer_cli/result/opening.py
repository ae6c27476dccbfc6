"""Open results of `packer pack`, also views, and find where their segments came from.

    open_packed(path) -> PackedDirectory       also of views and URLs
    View                                       complete rows, from references to documents
    Origins(manifest).of(segments)             inputs and places of segments

A view refers to documents of tokenized directories, and reads as rows of a packed directory. Every
reader gets complete rows, which are those that the same command without --view would have written,
byte for byte: the kernel that fills rows takes tokens from the mapped documents to their places.
References are checked each time, since files may change while they are mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli._kernels import gathering
from packer_cli.errors import DataError, UsageError, named, one_line
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_named
from packer_cli.options.options import VIEW_COLUMNS
from packer_cli.options.shapes import TRACE
from packer_cli.records import (
    FILE,
    MOST_TURNS,
    POSITION,
    START,
    Documents,
    Int64,
    offsets_of,
    record_position,
)
from packer_cli.result.columns import PADDED, PARTS, rows_per_batch
from packer_cli.result.layout import MANIFEST, Shard, digest
from packer_cli.result.manifest import TOKENIZED, Input, Manifest, load
from packer_cli.result.reader import (
    PACK_AGAIN,
    CopiedDirectory,
    Lists,
    Mapped,
    PackedDirectory,
    as_batch,
    in_parts,
)
from packer_cli.result.rules import RowLimits, broken_boundaries, broken_sources, segments_in
from packer_cli.result.shard_writer import fill_rows, values_in_rows
from packer_cli.result.tokenized import TokenizedDirectory, Tokens, open_tokenized

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_PROBLEMS = {  # by the codes of `gathering.find_pieces`
    1: "cu_seqlens does not ascend from 0 to {} at most",
    2: "segments are not as many as its boundaries less one",
    3: "refers to a document that its tokenized directories do not have",
    4: "refers to tokens beyond the end of a document",
}
_WHERE = "say where it is now: --tokens DIR, or tokens=[DIR] in Python"


def open_packed(
    path: str | os.PathLike[str],
    tokens: Paths | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> PackedDirectory:
    """Open a directory written by `packer pack`, also a view, or one at a URL.

    tokens  tokenized directories of a view, in any order, if they are no longer where they were
            packed from
    cache   local folder for copies of files at a URL; default: ~/.cache/packer, or below
            XDG_CACHE_HOME

    Raises DataError if the result is unfinished, of another format version, or if a shard is
    missing or has another size than the manifest says, and for a view whose tokenized directories
    are gone or changed; UsageError for `tokens` of a result that is not a view, and for a view at a
    URL.
    """
    if storage.is_url(os.fspath(path)):
        url = storage.public(os.fspath(path)).rstrip("/")
        return CopiedDirectory(url, load(url), cache)
    directory = storage.local(path, "rows are only read from local directories")
    while True:
        packed = opened(directory, load(directory), tokens)
        try:
            for shard in packed.facts.shards:
                packed.check_size(shard)
        except DataError:
            if packed.replaced() is None:
                raise
            continue  # another, complete result is there by now
        return packed


def opened(path: Path, facts: Manifest, tokens: Paths | None = None) -> PackedDirectory:
    """Open a local result whose manifest was read already, without looking at its shards."""
    directories = [tokens] if isinstance(tokens, str | os.PathLike) else list(tokens or ())
    if facts.config.view:
        return View(path, facts, directories)
    if directories:
        raise UsageError(
            f"--tokens: {path} is not a view: it has its tokens itself", "leave it out"
        )
    return PackedDirectory(path, facts)


def tokens_of_each(
    paths: Sequence[str | os.PathLike[str]], tokens: Paths | None
) -> list[Paths | None]:
    """Give tokenized directories to each result that is a view; it takes its own."""
    is_single = len(paths) == 1
    return [tokens if is_single or (tokens and load(path).config.view) else None for path in paths]


# --- views


class View(PackedDirectory):
    """A finished view whose tokenized directories are there, as they were.

    directories  by the number of the input
    """

    def __init__(
        self, path: Path, facts: Manifest, tokens: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        """Look for tokenized directories in `tokens`, too. Raises DataError for others."""
        super().__init__(path, facts)
        self.directories = _directories(path, facts, tokens)
        self._columns = facts.config.value_columns
        self._tokens = Tokens(self.directories, self._columns.values())

    def _complete(self, shard: Shard) -> Iterator[Any]:
        return (batch for batch, _ in self.counted(shard))

    def counted(self, shard: Shard) -> Iterator[tuple[Any, int]]:
        """Yield the complete record batches of a shard, each with its number of trained tokens."""
        kinds, step = self._schema(), rows_per_batch(self.facts.config)
        with self._readable(shard):
            for stored, mapped, first in self._mapped_batches(shard):
                last = first + stored.num_rows
                for begin in range(first, last, step):
                    rows = np.arange(begin, min(begin + step, last))
                    columns, trained = self._filled(mapped, rows, in_parts(kinds.names))
                    yield as_batch(columns, kinds), trained

    def segments(self, shard: Shard) -> Int64:
        """Return the segments of a shard, int64[4, segments] as in `rules`, after checking each."""
        segments = []
        with self._readable(shard):
            for stored, mapped, first in self._mapped_batches(shard):
                self._filled(mapped, np.arange(first, first + stored.num_rows), ())  # checks them
                segments.append(segments_in(stored))
        return np.concatenate(segments, axis=1)

    def _mapped_batches(self, shard: Shard) -> Iterator[tuple[Any, Mapped, int]]:
        """Yield the stored batches of a shard, also mapped, and the number of their first row."""
        first = 0
        for stored in self.stored(shard):
            yield stored, Mapped.of(stored.schema, first, [stored]), first
            first += stored.num_rows

    def fetch(self, segments: Int64) -> Documents:
        """Return segments, int64[4, n] as in `rules`, as documents with all their columns."""
        file, position = segments[:2]
        start, length = segments[2:].astype(np.int32, order="C")
        trained = self._tokens.trained_of(self._tokens.numbered(file, position), start, length)
        places = {FILE: file, POSITION: position, START: start}
        return self._tokens.fetch(
            Documents.of(None, offsets_of(length), trained).beside({}, places)
        )

    def _gathered(self, mapped: Mapped, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        """Columns that are stored alone are not filled, nor checked."""
        if all(name in VIEW_COLUMNS or name in PARTS for name in columns):
            return super()._gathered(mapped, rows, columns)
        return self._filled(mapped, rows, columns)[0]

    def _filled(
        self, mapped: Mapped, rows: Int64, columns: Sequence[str]
    ) -> tuple[dict[str, Any], int]:
        """Return (columns of mapped rows, number of trained tokens). Raises ArrowInvalid."""
        config, lists = self.facts.config, mapped.gather(rows, "cu_seqlens")
        boundaries, count = lists.values, max(0, len(lists.values) - len(rows))
        # of the segments: documents, where in memory their tokens begin, places in the document
        row_offsets = np.empty(len(rows) + 1, np.int64)
        number, address = np.empty((2, count), np.int64)
        start, length = np.empty((2, count), np.int32)
        row, problem = gathering.find_pieces(
            rows, mapped.firsts, mapped.addresses["segments"], boundaries, lists.ends,
            self._tokens.documents, self._tokens.spans.tokens, self.max_length,
            config.segment_multiple, row_offsets, number, start, length, address,
        )  # fmt: skip
        if problem:
            text = _PROBLEMS[problem].format(self.max_length)
            raise pa.ArrowInvalid(f"row {rows[row]}: {text}")
        out: dict[str, Any] = {name: np.empty((len(rows), self.max_length), kind)
               for name, kind in PADDED.items() if name in columns}  # fmt: skip
        order = np.arange(count)
        filled, trained_tokens = fill_rows(
            out, None, self._tokens.trained_of(number, start, length), address, length,
            order, row_offsets, config, self.facts.pad_token_id, by_address=True,
        )  # fmt: skip
        if any(name in self._columns for name in columns):
            pieces = Documents.of(None, offsets_of(length)).beside({}, {START: start})
            pieces = self._tokens.with_columns(pieces, number)
            for name, values in values_in_rows(config, pieces, order, row_offsets).items():
                of_segments = self._columns[name].is_of_segments
                filled[name] = Lists(values, row_offsets) if of_segments else values
        of_rows = {n: filled[n] if n in filled else mapped.gather(rows, n) for n in columns}
        return of_rows, trained_tokens


def _directories(
    view: Path, facts: Manifest, given: Sequence[str | os.PathLike[str]]
) -> dict[int, TokenizedDirectory]:
    """Open a view's tokenized directories, some from those `given`, by the numbers of inputs."""
    opened = {digest(one.path / MANIFEST)[1]: one for one in map(open_tokenized, given)}
    for one in facts.inputs:
        if one.sha256 not in opened:
            opened[one.sha256] = open_tokenized(_recorded(view, one.path, one.sha256, given))
    return {number: opened[one.sha256] for number, one in enumerate(facts.inputs)}


def _recorded(
    view: Path, path: str, expected: str, given: Sequence[str | os.PathLike[str]]
) -> Path:
    """Find the tokenized directory of an input by the path in the view's manifest. `given`: others.

    If both were moved, or are on another machine, it is looked for from a folder that both lie in:
    the ends of the path are tried from the view and from all folders above it. The digest decides
    whether it is the right one. Raises DataError if there is none.
    """
    recorded, problem = Path(path), "is gone"
    folders, parts = (view.absolute(), *view.absolute().parents), recorded.parts
    moved = (
        above.joinpath(*parts[first:]) for above in folders for first in range(1, len(parts) - 1)
    )
    for place in filter(os.path.isfile, (recorded, *moved)):
        if digest(place)[1] == expected:
            return Path(storage.shown(str(place.parent)))
        problem = "has changed"
    if given:
        problem += f", and is not {named(map(str, given))}"
    folder = storage.shown(str(recorded.parent))
    raise DataError(
        f"{view}: its tokenized directory {folder} {problem}: expected its {MANIFEST} with the "
        f"sha256 {expected}",
        _WHERE,
    )


# --- origins of segments


@dataclass(frozen=True)
class Origin:
    """The place that a segment came from. `position` counts `unit`s: "byte", "row" or "document".

    start      the segment's first token in its document
    tokenized  (directory, number of the document) if it came through a tokenized directory
    name       of the recipe's source
    turn       of the assistant, or branch of traces, counted from 0, if the record became several
               documents; `turn_is` says which
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
        """Return a text that is safe to print: web: a.jsonl byte 65 turn 2 from its token 16."""
        source = "" if self.name is None else f"{one_line(self.name)}: "
        through = ""
        if self.tokenized is not None:
            directory, number = self.tokenized
            through = f" (document {number} of {one_line(directory)})"
        start = f" from its token {self.start}" if self.start else ""
        of_record = "" if self.turn is None else f" {self.turn_is} {self.turn}"
        file = "stdin" if self.file == "-" else one_line(self.file)
        return f"{source}{file} {self.unit} {self.position}{of_record}{through}{start}"


def origin_as_json(origin: Origin | None) -> dict[str, Any]:
    """Return an origin for programs. None: the result does not have it."""
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
    """Finds the origins of a result's segments, through tokenized directories to the first inputs.

    notes  why some tokenized directories have none
    """

    def __init__(
        self, manifest: Manifest, directories: Mapping[int, TokenizedDirectory] | None = None
    ) -> None:
        """`directories`: tokenized directories that are open already, by the numbers of inputs."""
        self._manifest = manifest
        self._tokenized: dict[int, TokenizedDirectory | None] = dict(directories or {})
        self.notes: list[str] = []

    def of(self, segments: Int64) -> list[Origin]:
        """Return the origins of segments int64[3, n]: file, position, start. Raises DataError."""
        file, position, start = segments
        origins: list[Any] = [None] * len(file)
        for number in np.unique(file).tolist():
            here = np.flatnonzero(file == number)
            name = self._manifest.source_of(number)
            whole = self._of_input(number, position[here])
            for place, origin, first in zip(
                here.tolist(), whole, start[here].tolist(), strict=True
            ):
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
        facts, places = tokenized.facts, tokenized.places(positions).tolist()
        return [
            replace(
                input_origin(facts.inputs[file], facts.config, place), tokenized=(folder, document)
            )
            for document, file, place in zip(positions.tolist(), *places, strict=True)
        ]

    def _tokenized_in(self, number: int) -> TokenizedDirectory | None:
        """Return the tokenized directory that is an input, unless it was changed since."""
        if number not in self._tokenized:
            one, directory = self._manifest.inputs[number], None
            why = f"{one.name}: was changed since"
            try:
                if digest(storage.shown(one.path)) == (one.size, one.sha256):
                    directory = open_tokenized(one.name)
            except (DataError, UsageError) as error:
                why = error.message
            if directory is None:
                self.notes.append(f"which inputs were tokenized is unknown: {why}")
            self._tokenized[number] = directory
        return self._tokenized[number]


def input_origin(one: Input, config: DocumentConfig, position: int) -> Origin:
    """Return the origin of a document of an input that was not tokenized before."""
    record, turn = record_position(position, config.turns), None
    if config.turns == "each":
        turn = position % MOST_TURNS
    kind = one.format_then(config.input_format)
    unit = format_named(kind).counted_in if kind else "byte"  # stdin
    turn_is = "branch" if config.shape == TRACE else "turn"
    return Origin(one.name, record, unit, 0, turn=turn, turn_is=turn_is)


def sound_row(packed: PackedDirectory, number: int) -> Any:
    """Copy a row into a batch whose segments can be located. Raises DataError if it is damaged."""
    cause: Exception | None = None
    try:
        batch = packed.take([number])
        broken = broken_boundaries(batch, RowLimits.of(packed.facts))
        if not broken and "segments" in batch.schema.names:
            broken = broken_sources(batch, np.arange(len(packed.facts.inputs)))
        if not broken:
            return batch
        reason = f"{broken[0].rule}{broken[0].detail}"
    except (ValueError, KeyError, pa.ArrowException) as error:
        cause, reason = error, str(error).removeprefix(f"row {number}: ")
    shard, row = packed.find(number)  # where it has another number
    place = f"{packed.path / shard.file}: row {row}"
    raise DataError(f"{place}: is damaged: {reason}", PACK_AGAIN) from cause
