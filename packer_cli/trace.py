"""`packer trace`: which documents were in a step of a training run, and in which step one was.

    trace(paths, step=..., world_size=...)     a step's rows, by rank and micro-batch
    find(paths, "a.jsonl:65", world_size=...)  where a document was

A run's rows follow from its options, so nothing of the run is needed but these, or a state of its
sampler: `Steps` counts steps as a loop does, `Schedule` has the rows of their places, and of rows
only boundaries and sources are read. Without torch.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from packer_cli.errors import DataError, UsageError, named
from packer_cli.options.option import options_of, refuse_missing
from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.options.run_options import Loop
from packer_cli.records import MOST_TURNS, Int64, record_position, turn_position
from packer_cli.result.layout import REJECTED, AtLeastOne, Count
from packer_cli.result.manifest import TOKENIZED, other_side
from packer_cli.result.opening import (
    Joined,
    Paths,
    View,
    open_packed,
    tokens_of_each,
)
from packer_cli.result.origins import Origin, Origins, place_in, sound_rows, turn_of, unit_of
from packer_cli.result.reader import PackedDirectory, segments_of
from packer_cli.result.rules import segments_in, sources_of
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.steps.schedule import Grid, Order, Schedule, StepSizes, digest_of, row_costs
from packer_cli.storage import open_lines

__all__ = ["Found", "Place", "Run", "TracedStep", "find", "trace"]

_COLUMNS = ("cu_seqlens", PADDED_BOUNDARIES, "segments")
_PLACES_AT_ONCE = 1 << 20  # whose rows are looked at together
_DOCUMENT = re.compile(
    r"(.+)(?::| byte | row | document )(\d{1,18})(?: (?:turn|branch) (\d{1,5}))?",
    re.ASCII | re.DOTALL,
)
_NONE = np.iinfo(np.int64).max  # a position that no document has
_LOSSES = {
    "dropped_documents": "dropped as longer than a row",
    "untrained_documents": "without a token to train on",
    "empty_documents": "without tokens",
    "rejected_records": "rejected",
    "held_out_documents": "held out",
    "duplicate_documents": "equal to others",
}
SAVE_STATE = "save it so: json.dump(sampler.state_dict(), file)"


@dataclass(frozen=True)
class TracedSegment:
    """One segment of a row. `origin` None: the result has no column `segments`."""

    index: int
    tokens: int
    origin: Origin | None


class TracedRow(NamedTuple):
    """A row: its number in the result `path`, as `packer show` takes it."""

    path: Path
    number: int
    segments: tuple[TracedSegment, ...]


class Place(NamedTuple):
    """A row's place in the order, the rank and the micro-batch that took it, counted
    from 0; None where the loader dropped it.
    """

    place: int
    rank: int | None
    micro_batch: int | None
    row: TracedRow


class Step(NamedTuple):
    """A step: the places `begin` .. `end`, of which a loader may have dropped some. It and its
    epoch are counted from 0.
    """

    number: int
    epoch: int
    begin: int
    end: int


class Found(NamedTuple):
    """A row that has pieces of a document, and the step that took it; None where the loader
    dropped its batch.
    """

    step: Step | None
    place: Place
    segments: tuple[TracedSegment, ...]


def trace(
    paths: Paths,
    *,
    step: int | None = None,
    state: Any = None,
    tokens: Paths | None = None,
    **loop: Any,
) -> TracedStep:
    """The rows of a step of a training run that read `paths` with `PackedSampler`.

    step    its number; 0 is the first, and an epoch follows the other
    state   a sampler's `state_dict()`. With `step`, steps count from there, as in a run that was
            resumed from it. Without, the step is the one that it was saved in or after.
    tokens  of views: where their tokenized directories are now
    loop    fields of `options.run_options.Loop`: world_size, batch_size, micro_batches, seed, ...

    Raises UsageError for options that are missing or do not fit, and DataError for results that
    cannot be read, a state of others, and fewer rows than ranks.
    """
    if step is None and state is None:
        raise UsageError("which step is not said", "give --step, or --state with a sampler's state")
    if step is not None and step < 0:
        raise UsageError(f"--step: {step} is negative", "steps count from 0, the first one")
    run = Run(paths, state=state, resumed=step is not None, tokens=tokens, **loop)
    if step is not None:
        return TracedStep(run, run.steps.of(step))
    last = run.steps.last_before(run.state.samples) if run.state else None
    if last is None:
        raise DataError(
            "the state was saved before the first step, or the first that it knows of",
            "--step 0 shows the one that follows",
        )
    return TracedStep(run, last)


def find(paths: Paths, document: str, *, epochs: int = 1, **run: Any) -> list[Found]:
    """Find the pieces of a document in a training run, in the order in which it takes them.

    document  "FILE:POSITION": the input, or an end of its path that no other has, and the position
              as `packer show` gives it
    epochs    that are gone through, the one that a `state` is in with what is left of it
    run       state, tokens and the fields of a `Loop`, as `trace` takes them

    Raises as `trace`; besides, UsageError for a name that no input has, and DataError for a
    document that is in no row: why, where the results tell.
    """
    if epochs < 1:
        raise UsageError(f"epochs: {epochs} is not positive")
    return list(Search(Run(paths, **run), document).places(epochs))


class Run:
    """A training run over results, from its beginning, or from a sampler's state on. Rows are
    numbered over all results, in their order.

    paths, tokens   the results, as `PackedDataset` takes them
    state           a sampler's `state_dict()`; what it knows need not be given
    resumed         the run is one that goes on from the state, whose steps count from there; else
                    it is the one that saved it
    given           fields of a `Loop`

    Raises UsageError for options that are missing or do not fit, DataError for results that cannot
    be read, a state of others, and fewer rows than ranks.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        state: Any = None,
        resumed: bool = True,
        tokens: Paths | None = None,
        **given: Any,
    ) -> None:
        names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not names:
            raise UsageError("there is no result to trace", "give the --output of packer pack")
        its_tokens = tokens_of_each(names, tokens)
        self.rows_of = Joined([open_packed(*one) for one in zip(names, its_tokens, strict=True)])
        self.parts, self.firsts = self.rows_of.parts, self.rows_of.firsts
        self.said = [
            f"{one.path}: was packed without the column segments: which documents are in rows is "
            "unknown"
            for one in self.parts
            if "segments" not in one.stored_columns
        ]
        self.origins = [
            Origins(one.facts, one.directories if isinstance(one, View) else None)
            for one in self.parts
        ]
        self.state = None if state is None else State.of(state)
        self.begin = 0  # where steps begin to count
        if self.state is not None:
            self.state.refuse_others(data=self.rows_of.fingerprint, rows=len(self.rows_of))
            given = self.state.loop(given, same=not resumed)
            self.begin = self.state.samples if resumed else self.state.begin
        refuse_missing(Loop, given)
        self.loop = Loop(**given)
        self.steps = Steps(len(self.rows_of), self.loop, self.begin)

    @cached_property
    def schedule(self) -> Schedule:
        """The rows of places. Raises UsageError for costs that are not those of the state."""
        loop, state, costs = self.loop, self.state, None
        if loop.balance is not None:
            sums, max_length = self.rows_of.squared_lengths, self.parts[0].max_length
            costs = row_costs(sums, max_length, loop.hidden_size, loop.cost)
            if state and isinstance(state.cost, str) and state.cost != digest_of(costs):
                raise UsageError(
                    "the costs of rows are not those that the sampler's state was saved with",
                    "give the function that the sampler had, cost=... in Python",
                )
        order = Order(len(self.rows_of), loop.seed, loop.block_rows, loop.window_blocks)
        return Schedule(
            order, self.steps.grid.sizes, balance=loop.balance, window=loop.window, costs=costs,
            begin=self.begin, dealt=state.dealt if state else (),
        )  # fmt: skip

    def placed(self, step: Step | None, place: int, row: TracedRow) -> Place:
        """A row in a place that a step has; None: in one that the loader dropped."""
        if step is None:
            return Place(place, None, None, row)
        number, rank = divmod(place - step.begin, self.loop.world_size)
        return Place(place, rank, number // self.loop.batch_size, row)

    def notes(self) -> Iterator[str]:
        """Notes of what cannot be told of the rows read so far, each once."""
        for notes in (self.said, *(one.notes for one in self.origins)):
            yield from notes
            notes.clear()

    def rows(self, numbers: Int64) -> list[TracedRow]:
        """The rows of some numbers, in the same order. Raises DataError for what is damaged."""
        found: list[Any] = [None] * len(numbers)
        own, parts = self.rows_of.places(numbers)
        for part in np.unique(parts).tolist():
            here, packed = np.flatnonzero(parts == part), self.parts[part]
            columns = [name for name in _COLUMNS if name in packed.stored_columns]
            batch = sound_rows(packed, own[here], columns)
            segments, edges = segments_in(batch), segments_of(batch)[2].tolist()
            origins: list[Any] = [None] * segments.shape[1]
            if "segments" in columns:
                origins = self.origins[part].of(segments[:3])
            every = list(zip(segments[3].tolist(), origins, strict=True))
            for place, (begin, end) in zip(here.tolist(), pairwise(edges), strict=True):
                pieces = tuple(TracedSegment(i, *one) for i, one in enumerate(every[begin:end]))
                found[place] = TracedRow(packed.path, int(own[place]), pieces)
        return found


class TracedStep:
    """A step of a run. `step` has its number, its epoch and its places."""

    def __init__(self, run: Run, step: Step) -> None:
        self.run, self.step = run, step
        run.said += [self.doubt] if self.doubt else []

    @property
    def taken(self) -> tuple[int, int]:
        """Its rows that were taken when the state was saved, and all of its rows, counted."""
        places, state = self.run.steps.places(self.step), self.run.state
        return int((places < state.samples).sum()) if state else len(places), len(places)

    @property
    def doubt(self) -> str:
        """A sentence on what is not certain of its rows, or ""."""
        state = self.run.state
        first_known = state.dealt[0][0] if state and state.dealt else 0
        if not state or not first_known or self.step.end > state.samples:
            return ""
        return (
            f"the run went on at place {first_known:,} with other sizes: a step or window "
            "that this interrupted had other rows, which the state does not tell any more"
        )

    def found(self, rank: int | None = None) -> Iterator[Found]:
        """Rows with all of their segments, as `Search.places` gives those of a document."""
        for place in self.rows(rank):
            yield Found(self.step, place, place.row.segments)

    def rows(self, rank: int | None = None) -> Iterator[Place]:
        """Rows by rank and then in the order of the rank's batches; of one rank alone.

        Raises UsageError for a rank that there is not, DataError for rows that cannot be read.
        """
        run, begin, ranks = self.run, self.step.begin, self.run.loop.world_size
        if rank is not None and not 0 <= rank < ranks:
            raise UsageError(f"--rank: {rank} is not between 0 and {ranks - 1}, of --ranks {ranks}")
        places = run.steps.places(self.step)
        its = (places - begin) % ranks
        places = places[np.argsort(its, kind="stable") if rank is None else its == rank]
        rows = run.rows(run.schedule.rows_at(begin, self.step.end)[places - begin])
        yield from map(partial(run.placed, self.step), places.tolist(), rows)


class Steps:
    """The places of the order that make each step, as a loop counts steps.

    Epochs and steps are those of `Grid`; here steps have numbers. The loop over `rows` rows began,
    or was resumed, at the place `begin`. The last step of an epoch may have fewer batches, and its
    last batch fewer rows, unless the loader drops such a batch. A Trainer's epochs all have as many
    batches as the first: it leaves out the last one of an epoch that has one more.

    Raises DataError for more ranks than rows, and for a loader that drops all of an epoch.
    """

    def __init__(self, rows: int, loop: Loop, begin: int = 0) -> None:
        self._rows, self._loop = rows, loop
        sizes = StepSizes(loop.world_size, loop.batch_size, loop.micro_batches)
        self.grid = Grid(rows, begin, sizes, even=not loop.uneven)
        self.first_epoch = self.grid.epoch_of(begin)
        if not self._batches(0, rows // loop.world_size):
            raise DataError(
                f"an epoch has {rows // loop.world_size} rows for each rank, and a loader that "
                f"drops batches of fewer than {loop.batch_size} rows has no batch",
                "use smaller batches",
            )
        # Epochs are of two lengths, in a pattern that begins anew after as many as there are ranks.
        counts = [self._count(self.first_epoch + k) for k in range(loop.world_size + 1)]
        self._first, self._later = counts[0], np.cumsum([0, *counts[1:]])

    def before(self, epoch: int) -> int:
        """The steps before an epoch."""
        if epoch == self.first_epoch:
            return 0
        periods, rest = divmod(epoch - self.first_epoch - 1, self._loop.world_size)
        return self._first + periods * int(self._later[-1]) + int(self._later[rest])

    def of(self, number: int) -> Step:
        """The step of a number. The loop goes on for ever."""
        epochs = range(self.first_epoch, self.first_epoch + number + 2)
        epoch = epochs[bisect_right(epochs, number, key=self.before) - 1]
        place = self.grid.epoch(epoch).begin
        place += (number - self.before(epoch)) * self.grid.sizes.rows
        return Step(number, epoch, *self.grid.step_at(place))

    def last_before(self, place: int) -> Step | None:
        """The step in or after which a loop had taken the places before this one; None: there was
        none.
        """
        if place <= self.grid.begin:
            return None
        epoch = self.grid.epoch_of(place - 1)
        within = (place - 1 - self.grid.epoch(epoch).begin) // self.grid.sizes.rows
        number = self.before(epoch) + min(within, self._count(epoch) - 1)
        return self.of(number) if number >= 0 else None

    def at(self, place: int) -> Step | None:
        """The step that took a place; None for what the loader dropped."""
        step = self.last_before(place + 1)
        return step if step is not None and place in self.places(step) else None

    def places(self, step: Step) -> Int64:
        """int64[n], the places of a step, ascending, without those that the loader dropped."""
        places = np.arange(step.begin, step.end)
        begin, end = self.grid.epoch(step.epoch)
        row, rank = np.divmod(places - begin, self._loop.world_size)
        of_rank = -(-(end - begin - rank) // self._loop.world_size)
        taken: Int64 = places[row < self._batches(begin, of_rank) * self._loop.batch_size]
        return taken

    def _count(self, epoch: int) -> int:
        """The steps of an epoch."""
        begin, end = self.grid.epoch(epoch)
        batches = self._batches(begin, -(-(end - begin) // self._loop.world_size))
        return -(-int(batches) // self._loop.micro_batches)

    def _batches(self, begin: int, of_rank: Any) -> Any:
        """The batches of an epoch that the loop begins at a place, with so many rows of a rank; for
        arrays of them, too.
        """
        loop, size = self._loop, self._loop.batch_size
        up = 0 if loop.drop_last else size - 1
        if not loop.trainer:
            return (of_rank + up) // size
        most = (self._rows // loop.world_size + up) // size
        # steps of the epoch that a run has behind it which goes on from a state
        first = (begin + loop.world_size - 1) // self._rows * self._rows
        done = -(-(begin - first) // self.grid.sizes.rows)
        return np.minimum((of_rank + up) // size, max(most - done * loop.micro_batches, 0))


@dataclass(frozen=True)
class _Input:
    """An input that a name may mean: `number` in the result `part`.

    turns   as --turns of the run that read it; `turn_is` "branch" where they are branches
    within  where it is one of the inputs of a tokenized directory: that directory, and its number
            there
    """

    path: str
    unit: str
    part: int
    number: int
    turns: str = "all"
    within: tuple[TokenizedDirectory, int] | None = None
    turn_is: str = "turn"

    def positions(self, position: int, turn: int | None = None) -> Int64:
        """int64[n], the positions by which rows refer to the documents at a position of it, or to
        one of a record's turns.
        """
        own = np.array([position], np.int64)
        if self.turns == "each":
            turns = np.arange(MOST_TURNS) if turn is None else np.array([turn], np.int64)
            own = turn_position(position, turns)
        if self.within is None:
            return own
        documents, positions = self.within[0].documents_of(self.within[1])
        found: Int64 = documents[np.isin(positions, own)]
        return found


class Search:
    """A document in the rows of a run. Of shards whose units read its input, only the column
    `segments` is read; then the order of the run is gone through.

    document  what the name means
    rows      int64[n], the rows that have pieces of it, ascending

    Raises UsageError for a name that is none, DataError for a document that is in no row, and for
    results that do not say where segments come from.
    """

    def __init__(self, run: Run, text: str) -> None:
        self.run = run
        for packed in run.parts:
            if "segments" not in packed.stored_columns:
                raise DataError(
                    f"{packed.path}: was packed without the column segments, by which documents "
                    "are found",
                    "pack again with that column; packer trace --step names rows",
                )
        inputs, position, turn = _named(run, text)
        self.document = place_in(inputs[0].path, inputs[0].unit, position, turn, inputs[0].turn_is)
        self._pieces: dict[int, list[int]] = {}  # of each row, by the numbers of its segments
        for one in inputs:
            sought, first = one.positions(position, turn), int(run.firsts[one.part])
            for segments in _segments_of(run.parts[one.part], one.number):
                rows, its, _ = segments[:, np.isin(segments[2], sought)].tolist()
                for row, segment in zip(rows, its, strict=True):
                    self._pieces.setdefault(first + row, []).append(segment)
        self.rows: Int64 = np.array(sorted(self._pieces), np.int64)
        if not len(self.rows):
            raise _absent(run, self.document, inputs, position)

    def places(self, epochs: int = 1) -> Iterator[Found]:
        """Yield where those rows are in the next epochs, in the order in which the run takes them.

        Raises DataError for rows that cannot be read.
        """
        run = self.run
        end = (run.steps.first_epoch + epochs) * int(run.firsts[-1])
        read = dict(zip(self.rows.tolist(), run.rows(self.rows), strict=True))
        for begin in range(run.begin, end, _PLACES_AT_ONCE):
            rows = run.schedule.rows_at(begin, min(begin + _PLACES_AT_ONCE, end))
            for within in np.flatnonzero(np.isin(rows, self.rows)).tolist():
                number, place = int(rows[within]), begin + within
                row, step = read[number], run.steps.at(place)
                pieces = tuple(row.segments[piece] for piece in sorted(self._pieces[number]))
                yield Found(step, run.placed(step, place, row), pieces)


def _named(run: Run, text: str) -> tuple[list[_Input], int, int | None]:
    """(inputs of one path, position, turn) that a text names, as `packer trace` and `packer show`
    print them; several results may have read it, and turn None is all of a record's.

    Raises UsageError for a text that is not FILE:POSITION, and for a FILE that no result has read,
    or several of which end so.
    """
    match = _DOCUMENT.fullmatch(text)
    if not match or (match[3] and int(match[2]) >= (1 << 63) // MOST_TURNS):
        raise UsageError(
            f"--find: {text!r} is not FILE:POSITION",
            "for example data.jsonl:65, as packer trace and packer show name documents",
        )
    file, every = match[1], list(_inputs(run))
    paths = list(dict.fromkeys(one.path for one in every))
    file = "-" if file == "stdin" and file not in paths else file
    chosen = [path for path in paths if path == file] or [
        path
        for path in paths
        if path.endswith(f"/{file.removeprefix('./')}") or file.endswith(f"/{path}")
    ]
    if not chosen:
        tip = "packer stats DIR --by input lists inputs"
        raise UsageError(f"--find: no input is {file!r} or ends with it", tip)
    if len(chosen) > 1:
        raise UsageError(f"--find: {file!r} may be {named(chosen, 5)}", "give more of the path")
    its = [one for one in every if one.path == chosen[0]]
    return its, int(match[2]), None if match[3] is None else int(match[3])


def _inputs(run: Run) -> Iterator[_Input]:
    """Inputs of the run's results; of tokenized ones the directory, and its own inputs."""
    for part, packed in enumerate(run.parts):
        config = packed.facts.config
        for number, one in packed.facts.inputs_now.items():
            if one.format != TOKENIZED:
                unit = unit_of(one, config.input_format)
                yield _Input(one.path, unit, part, number, config.turns, turn_is=turn_of(config))
                continue
            yield _Input(os.path.dirname(one.path), "document", part, number)
            directory = run.origins[part].tokenized(number)
            if directory is not None:
                its = directory.facts.config
                for file, first in enumerate(directory.facts.inputs):
                    unit = unit_of(first, its.input_format)
                    yield _Input(
                        first.path, unit, part, number, its.turns, (directory, file), turn_of(its)
                    )


def _segments_of(packed: PackedDirectory, number: int) -> Iterator[Int64]:
    """int64[3, s] (row, number in the row, position) of the segments of an input, of one record
    batch after the other. Only units that read the input are looked at. Raises DataError.
    """
    units = {
        one.unit for one in packed.facts.units if any(part[0] == number for part in one.slices)
    }
    first = 0
    for shard in packed.facts.shards:
        at, first = first, first + shard.rows
        if shard.unit in units:
            packed.check_size(shard)
            for stored in packed.stored(shard):
                file, position, _ = sources_of(stored)
                places, edges = np.flatnonzero(file == number), segments_of(stored)[2]
                rows = np.searchsorted(edges, places, side="right") - 1
                yield np.stack([at + rows, places - edges[rows], position[places]])
                at += stored.num_rows


# Documents that are in no row


def _absent(run: Run, document: str, inputs: list[_Input], position: int) -> DataError:
    """The error for a document that is in no row: why, as far as results tell, and the documents
    next to the position, as it may be in the middle of one.
    """
    why = next((why for one in inputs for why in _reasons(run, one, position)), "")
    if not why:
        counted = ", ".join(text for one in inputs for text in _losses(run, one))
        why = "every document of this input is in rows, and none begins there"
        why = f"left out of its input or source: {counted}" if counted else why
    tip = "packer stats DIR --by input counts what is in rows, and what is not"
    for one in inputs:
        if near := _nearest(run, one, position):
            places = " and ".join(f"{one.unit} {place}" for place in near)
            tip = f"the nearest documents{'' if one.within else ' in rows'} begin at {places}"
            break
    names = ", ".join(str(one.path) for one in run.parts)
    return DataError(f"{document}: is in no row of {names}: {why}", tip)


def _reasons(run: Run, one: _Input, position: int) -> Iterator[str]:
    """Reasons why a document is in no row, where a result or its tokenized directory tells."""
    packed, documents = run.parts[one.part], one.positions(position)
    try:  # the run that read the input may have rejected the record
        with open_lines((one.within[0] if one.within else packed).path / REJECTED) as lines:
            for record in map(json.loads, lines):
                if record["file"] == one.path and record["position"] in (position, None):
                    yield f"it was rejected: {record['reason']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # packer verify tells what is wrong with the file
    if one.within is not None and not len(documents):
        yield "no document begins there"
    source, beside = packed.facts.inputs[one.number], other_side(str(packed.path), packed.facts)
    if beside is not None:
        try:
            other = open_packed(beside)
            number = [part.sha256 for part in other.facts.inputs].index(source.sha256)
            for rows, _, positions in _segments_of(other, number):
                for row in rows[np.isin(positions, documents)]:
                    yield f"it is in row {row} of {other.path}, the other side of the split"
        except (DataError, ValueError):
            pass  # it tells nothing
    directory = run.origins[one.part].tokenized(one.number) if source.format else None
    if directory is not None and source.dropped_documents:
        longest = int(directory.lengths[documents[documents < len(directory)]].max(initial=0))
        if longest > packed.max_length:
            yield f"it has {longest:,} tokens, and documents longer than a row were dropped"


def _losses(run: Run, one: _Input) -> Iterator[str]:
    """Counts of what was left out of the input, and of its source."""
    facts = run.parts[one.part].facts
    sources = [its for its in facts.sources if its.inputs[0] <= one.number < its.inputs[1]]
    first = [one.within[0].facts.inputs[one.within[1]]] if one.within else []
    for counted in (facts.inputs[one.number], *first, *sources):
        for name, words in _LOSSES.items():
            number = getattr(counted, name, None)
            if isinstance(number, int) and number:  # not all are counted everywhere
                yield f"{words} ({number:,})"
    for its in sources:
        if its.epochs < 1:
            yield f"not taken, as {its.name} has {its.epochs:.2f} epochs"


def _nearest(run: Run, one: _Input, position: int) -> list[int]:
    """The positions of documents next to one, below and above it. Of an input that a result has
    read itself, of those in rows; of a tokenized directory's, where none is at the position.
    """
    if one.within is not None:
        stored = [one.within[0].documents_of(one.within[1])[1]]
    else:
        stored = [its[2] for its in _segments_of(run.parts[one.part], one.number)]
    below, above = -1, _NONE
    for some in stored:  # of each batch of rows in turn, as all of an input's would fill memory
        its = record_position(some, one.turns)
        if one.within is not None and position in its:
            return []
        below = max(below, int(its[its < position].max(initial=-1)))
        above = min(above, int(its[its > position].min(initial=_NONE)))
    return [place for place in (below, above) if 0 <= place < _NONE]


class State(msgspec.Struct, frozen=True):
    """A sampler's `state_dict()`: what it says of the run that saved it; the last four are there
    where it balances.

    samples  the rows that all ranks had taken
    cost     the hidden size, or the digest of the costs that a function gave
    dealt    (place, world_size, batch_size, micro_batches) of those that dealt the rows from each
             place on, as far as rows to come depend on it
    """

    samples: Count
    rows: Count
    seed: int | None
    block_rows: AtLeastOne
    window_blocks: AtLeastOne
    data: str | None = None
    balance: Literal["step", "order"] | None = None
    window: AtLeastOne = 64
    cost: AtLeastOne | str | None = None
    dealt: list[tuple[Count, AtLeastOne, AtLeastOne, AtLeastOne]] = []

    def refuse_others(self, **rows: Any) -> None:
        """DataError where these are not the rows of the state; `data` is not in all states."""
        for name, value in rows.items():
            its = getattr(self, name)
            if its != value and not (name == "data" and its is None):
                raise DataError(
                    f"the state has {name} {its}, the result has {value}",
                    "name the results that the run read, in its order",
                )

    @classmethod
    def of(cls, content: Any) -> State:
        """The state that `content` is, or that it holds, as checkpoints of the Trainer do. Raises
        DataError for what is no state.
        """
        saved = list(_states_in(content))
        if any(one != saved[0] for one in saved):
            raise DataError(
                f"the file holds {len(saved)} states of samplers, which differ", "give one of them"
            )
        try:
            return msgspec.convert(saved[0] if saved else content, cls)
        except msgspec.ValidationError as error:
            reason = f"the state is not one of a PackedSampler: {error}"
            raise DataError(reason, SAVE_STATE) from error

    @property
    def begin(self) -> int:
        """The place from which on the run that saved it had these sizes, as far as it tells."""
        return self.dealt[-1][0] if self.dealt else 0

    def loop(self, given: Mapping[str, Any], *, same: bool) -> dict[str, Any]:
        """The fields of a `Loop` that are given, and those that the state knows.

        `same`: the loop is the one that saved the state, not one that goes on from it.
        Raises UsageError for one that is given and that the state has otherwise.
        """
        fixed = {name: getattr(self, name) for name in ("seed", "block_rows", "window_blocks")}
        if self.balance is not None:
            fixed |= {"balance": self.balance, "window": self.window}
            fixed |= {"hidden_size": self.cost} if isinstance(self.cost, int) else {}
        names = ("world_size", "batch_size", "micro_batches")
        sizes = dict(zip(names, self.dealt[-1][1:], strict=True)) if self.dealt else {}
        for name, value in (fixed | (sizes if same else {})).items():
            if given.get(name, value) != value:
                option = options_of(Loop)[name].name(name)
                raise UsageError(
                    f"{option}: {given[name]}, and the state has {value}", "leave it out"
                )
        return sizes | dict(given) | fixed


def _states_in(content: Any) -> Iterator[Any]:
    if isinstance(content, dict) and content.keys() >= {"samples", "rows", "block_rows"}:
        yield content
    elif isinstance(content, dict | list):
        for one in content.values() if isinstance(content, dict) else content:
            yield from _states_in(one)
