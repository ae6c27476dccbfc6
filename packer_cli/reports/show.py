"""`packer show`: rows of packed directories, documents of tokenized ones, and the rows of a step.

Only the manifest and the mapped pages of these rows are read, so it is instant on any size. In the
terminal trained tokens are green and the others dim, or in brackets without color. Text from data
is hostile: no control character of it reaches the terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.segment import Segment as Piece
from rich.segment import Segments
from rich.style import Style

from packer_cli.errors import DataError, UsageError, from_os_error, visible
from packer_cli.packing.labels import trained_flags
from packer_cli.records import FILE, IGNORED, POSITION, START, Documents, Int32, Int64, offsets_of
from packer_cli.reports import Aligned, Cell, Report, Section, Table
from packer_cli.reports.terminal import is_plain
from packer_cli.result.columns import as_numbers, rows_of, segments_of, values_in
from packer_cli.result.layout import short_name
from packer_cli.result.opening import Origin, Origins, input_origin, origin_as_json, sound_row
from packer_cli.result.reader import Joined, PackedDirectory
from packer_cli.result.rules import sources_of
from packer_cli.result.tokenized import TokenizedDirectory, Tokens
from packer_cli.result.wording import plural, value
from packer_cli.steps import Order, Schedule, Steps, StepSizes, row_costs
from packer_cli.storage import read_bytes
from packer_cli.tokenization.decoding import Decoder

_ROWS = re.compile(r"(-?\d+)(?:-(-?\d+))?", re.ASCII)


@dataclass(frozen=True)
class Segment:
    """One segment of a row, or all of a document.

    origin   None when the column segments was not written
    ids      int32[tokens]
    trained  bool[tokens], or None when the column labels was not written
    values  by name: what follows the record, or [tokens], what follows each token; K of these are
             lists
    """

    index: int
    origin: Origin | None
    ids: Int32
    trained: npt.NDArray[np.bool_] | None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shown:
    """A row or a document.

    what      "row" or "document", with its number over all shards and in its shard
    segments  of a document: all of it
    padding   positions without a token
    """

    what: str
    index: int
    shard: str
    in_shard: int
    segments: list[Segment]
    padding: int = 0


def numbers_of(texts: list[str], rows: int, what: str) -> Iterator[int]:
    """Return row or document numbers from "7", "-1" (the last) and "3-5". Raises UsageError."""
    ranges = []
    for text in texts:
        match = _ROWS.fullmatch(text)
        if not match:
            raise UsageError(
                f"ROW: {text!r} is not a {what} number",
                f"{what}s are written like 7, -1 (the last) or 3-5; options: packer show --help",
            )
        numbers = [int(number) for number in match.groups() if number is not None]
        for number in numbers:
            if not -rows <= number < rows:
                raise UsageError(
                    f"ROW: {text}: there is no {what} {number}, only 0 to {rows - 1}",
                    f"{what}s count from 0 over all shards, negative ones from the end",
                )
        first, last = numbers[0] % rows, numbers[-1] % rows
        if first > last:
            raise UsageError(f"ROW: {text}: ends before it begins", "write the lower row first")
        ranges.append(range(first, last + 1))
    return (row for chosen in ranges for row in chosen)


def pick(row: Shown, segment: int) -> list[Segment]:
    """Return one segment of a row, by a number that may be negative. Raises UsageError."""
    count = len(row.segments)
    if not -count <= segment < count:
        raise UsageError(
            f"--segment: {segment} is not in row {row.index}, which has 0 to {count - 1}",
            "segments count from 0, negative ones from the end",
        )
    return [row.segments[segment]]


def read_row(packed: PackedDirectory, index: int, origins: Origins | None = None) -> Shown:
    """Find a row and take it apart. DataError when its shard is missing or damaged."""
    shard, in_shard = packed.find(index)
    batch = sound_row(packed, index)
    trained, ids = None, rows_of(batch.column("input_ids"))[0]
    begins, lengths, _ = segments_of(batch)
    if "labels" in batch.schema.names:
        trained = rows_of(batch.column("labels"))[0] != IGNORED
    places: list[Any] = [None] * len(begins)
    if "segments" in batch.schema.names:
        places = (origins or Origins(packed.facts)).of(sources_of(batch))
    columns = packed.facts.config.value_columns.items()
    values = {name: as_numbers(column, values_in(batch, column)) for name, column in columns}
    segments = []
    for number, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        inside = slice(begin, begin + length)
        flags = None if trained is None else trained[inside]
        here = {
            name: values[name][number] if column.is_of_segments else values[name][0, inside]
            for name, column in columns
        }
        segments.append(Segment(number, places[number], ids[inside], flags, here))
    padding = packed.max_length - int(lengths.sum())
    return Shown("row", index, shard.file, in_shard, segments, padding=padding)


def read_document(tokenized: TokenizedDirectory, tokens: Tokens, index: int) -> Shown:
    """Find a document. `tokens`: of this directory alone. Raises DataError as `read_row` does."""
    number = int(np.searchsorted(tokenized.firsts, index, side="right")) - 1
    shard, facts = tokenized.shards[number], tokenized.facts
    file, position = tokenized.places(np.array([index], np.int64))[:, 0].tolist()
    length, first = tokenized.lengths[index : index + 1], np.zeros(1, np.int32)
    trained = tokens.trained_of(np.array([index]), first, length)
    flags = trained_flags(trained, np.zeros(1, np.int64), int(length[0]))
    origin = input_origin(facts.inputs[file], facts.config, position)
    places = {FILE: first, POSITION: np.array([index]), START: first}
    document = tokens.fetch(Documents(None, offsets_of(length), {}, places))
    values = {
        name: as_numbers(column, document.of_documents[name])[0]
        if column.is_of_segments
        else as_numbers(column, document.of_tokens[name])
        for name, column in tokenized.value_columns.items()
    }
    whole = Segment(0, origin, document.token_ids.view(np.int32), flags, values)
    in_shard = index - int(tokenized.firsts[number])
    return Shown("document", index, shard.file, in_shard, [whole])


class _Span(NamedTuple):
    """Tokens next to each other that are all trained or all not, all special or all not."""

    begin: int
    ids: list[int]
    text: str
    trained: bool | None
    special: bool


def _spans(segment: Segment, decoder: Decoder | None, *, whole: bool = False) -> list[_Span]:
    """Cut a segment where special changes and, unless it is a `whole`, where trained does."""
    ids, trained = segment.ids.tolist(), None if whole else segment.trained
    flags = [None] * len(ids) if trained is None else trained.tolist()
    names = {token: decoder.special(token) if decoder else None for token in {*ids}}
    special = [names[token] is not None for token in ids]
    spans, begin = list[_Span](), 0
    for (flag, is_special), run in groupby(zip(flags, special, strict=True)):
        tokens, text = ids[begin : begin + len([*run])], ""
        if is_special:
            text = "".join(str(names[token]) for token in tokens)
        elif decoder is not None:
            text = decoder.decode(tokens, ids[begin - 1] if begin else None)
        spans.append(_Span(begin, tokens, text, flag, is_special))
        begin += len(tokens)
    return spans


def _trained_in(segments: Sequence[Segment]) -> int | None:
    """Count their trained tokens; None if these are not known."""
    flags = [segment.trained for segment in segments if segment.trained is not None]
    return sum(int(np.count_nonzero(trained)) for trained in flags) if flags else None


def as_json(shown: Shown, segments: list[Segment], decoder: Decoder | None) -> dict[str, Any]:
    """Return an object of segments of a row, or of a document; without a decoder, ids, not text."""
    what = shown.what
    place = {what: shown.index, "shard": shown.shard, f"shard_{what}": shown.in_shard}
    if what == "row":
        contents = [{"segment": segment.index} | _content(segment, decoder) for segment in segments]
        return place | {"segments": contents, "padding": shown.padding}
    document = _content(shown.segments[0], decoder)
    del document["start"]
    return place | document


def _content(segment: Segment, decoder: Decoder | None) -> dict[str, Any]:
    """Return a segment's origin, and its tokens as text or ids."""
    spans: list[dict[str, Any]] = []
    for trained, group in groupby(_spans(segment, decoder), key=lambda span: span.trained):
        run = list(group)
        ids = [token for span in run for token in span.ids]
        content = {"text": "".join(span.text for span in run)} if decoder else {"ids": ids}
        spans.append(content | {"trained": trained})
    text = "".join(span.text for span in _spans(segment, decoder, whole=True))
    values = {name: _plain(values) for name, values in segment.values.items()}
    return {
        **origin_as_json(segment.origin),
        "tokens": len(segment.ids),
        "trained_tokens": _trained_in([segment]),
        "text": text if decoder else None,
        "spans": spans,
        **({"carried": values} if values else {}),
    }


def _plain(values: Any) -> Any:
    """Return values as Python has them, floats with as few digits as they need."""
    if values.dtype.kind == "f":
        values = values.astype(str).astype(np.float64)
    return values.tolist()


def values_shown(segment: Segment) -> str:
    """Return the values of a segment, in words: "reward 0.5; logprobs -2.1 to -0.1, mean -0.7"."""
    parts = []
    for name, values in segment.values.items():
        if values.ndim == 0:
            parts.append(f"{visible(name)} {value(values.item())}")
        else:
            low, high = (value(extreme.item()) for extreme in (values.min(), values.max()))
            mean = value(float(values.mean(dtype=np.float64)))
            parts.append(f"{visible(name)} {low} to {high}, mean {mean}")
    return "; ".join(parts)


class Printer:
    """Printer of rows or documents on stdout, with a legend before the first.

    rows     their number in the result
    decoder  None: token ids instead of text
    labels   whether it is known what is trained on
    """

    def __init__(self, rows: int, decoder: Decoder | None, *, labels: bool) -> None:
        self._rows, self._decoder = rows, decoder
        self._console = Console(highlight=False)
        self._coloured = bool(self._console.color_system) and not self._console.no_color
        self._ascii = is_plain()
        self._open, self._close = ("[[", "]]") if self._ascii else ("⟦", "⟧")
        self._pieces: list[Piece] = []
        if labels and self._coloured:
            self._add("trained tokens", "green")
            self._add(", others, ", "dim")
            self._add("special ones", "reverse")
            self._add("\n\n")
        elif labels:
            self._add(f"{self._open}trained tokens{self._close}, others\n\n")

    def print(self, shown: Shown, segments: list[Segment]) -> None:
        """Print segments of a row, with its padding if these are all; or a document."""
        of_row, every = shown.what == "row", shown.segments
        about = f"{plural(len(every), 'segment')}, {_counts(every)}" if of_row else _about(every[0])
        self._add(f"{shown.what} {shown.index} of {self._rows:,}", "bold")
        place = f"{visible(short_name(shown.shard))} {shown.what} {shown.in_shard}"
        self._add(f": {about}; {place}\n")
        rule = "--" if self._ascii else "──"
        for segment in segments:
            if of_row:
                self._add(f"{rule} segment {segment.index}", "bold cyan")
                self._add(f": {_about(segment)}\n", "cyan")
            if segment.values:
                self._add(f"   {values_shown(segment)}\n", "cyan")
            self._print_tokens(_spans(segment, self._decoder))
        if shown.padding and segments is every:
            self._add(f"... {plural(shown.padding, 'padding token')}\n", "dim")
        self._console.print(Segments(self._pieces), soft_wrap=True, end="")
        self._pieces = [Piece("\n")]  # between rows

    def _print_tokens(self, spans: list[_Span]) -> None:
        brackets, text = "" if self._coloured else self._open[0] + self._close[0], ""
        for trained, run in groupby(spans, key=lambda span: span.trained):
            style = "" if trained is None else "green" if trained else "dim"
            before, after = ("", "")
            if trained and not self._coloured:
                before, after = self._open, self._close
            for span in run:
                are_ids = self._decoder is None
                self._add((" " if are_ids and span.begin else "") + before)
                text = " ".join(map(str, span.ids)) if are_ids else visible(span.text, brackets)
                self._add(text, f"{style} reverse" if span.special else style, data=True)
                before = ""
            self._add(after)
            text = after or text
        if not text.endswith("\n"):
            self._add("\n")

    def _add(self, text: str, style: str = "", *, data: bool = False) -> None:
        """Add text line by line, since pagers end a style there. Line ends in `data` are made
        visible.
        """
        look = Style.parse(style) if style and self._coloured else None
        mark = "↵" if data and self._decoder and self._coloured and not self._ascii else ""
        *lines, last = text.split("\n")
        for line in lines:
            self._pieces += [Piece(line + mark, look), Piece("\n")]
        if last:
            self._pieces.append(Piece(last, look))


def _counts(segments: Sequence[Segment]) -> str:
    text = plural(sum(len(segment.ids) for segment in segments), "token")
    trained = _trained_in(segments)
    return text if trained is None else f"{text}, {trained:,} trained"


def _about(segment: Segment) -> str:
    counts = _counts([segment])
    return counts if segment.origin is None else f"{segment.origin}, {counts}"


# Training steps

SIZES = ("world_size", "batch_size", "micro_batches")


def read_checkpoint(checkpoint: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Read a checkpoint of a Trainer with PackedTrainerMixin, a directory.

    Returns options of its PackedSampler (the SIZES only with balance), the sampler's state, and the
    number of steps done. Raises DataError.
    """
    path = Path(checkpoint, "trainer_state.json")
    try:
        content = json.loads(read_bytes(str(path)))
        state = content["stateful_callbacks"]["PackedPosition"]["attributes"]["position"]["sampler"]
        sampler = {"seed": state["seed"]}
        if "balance" in state:
            sampler |= {"balance": state["balance"], "hidden_size": state["cost"]}
            sampler |= zip(SIZES, state["dealt"][-1][1:], strict=True)
        return sampler, state, content["global_step"]
    except OSError as error:
        raise from_os_error(error, str(path), "read") from error
    except (ValueError, LookupError, TypeError) as error:
        tip = "give a checkpoint that a Trainer with PackedTrainerMixin wrote"
        raise DataError(f"{path}: has no position of packed rows", tip) from error


def rows_of_step(
    packed: PackedDirectory,
    step: int,
    sampler: dict[str, Any],
    state: dict[str, Any] | None = None,
    done: int = 0,
) -> list[Int64]:
    """Return the row numbers of each rank in a step, int64[n].

    sampler      options of a PackedSampler: seed, SIZES, balance, hidden_size
    state, done  of a checkpoint, as `read_checkpoint` returns them

    Raises UsageError for options that do not fit, DataError for the state of another run.
    """
    joined, sizes = Joined([packed]), StepSizes(*(sampler[name] for name in SIZES))
    balance, costs = sampler.get("balance"), None
    if balance:
        costs = row_costs(joined.squared_lengths, packed.max_length, sampler["hidden_size"])
    order = Order(len(packed), sampler["seed"])
    schedule = Schedule(order, sizes, balance=balance, costs=costs)
    if state is None:
        return Steps(schedule).rows_of(step)
    # all epochs of a Trainer have as many batches as the first
    batches = -(-(len(packed) // sizes.world_size) // sizes.batch_size)
    steps = Steps(schedule, most_batches=batches)
    expected = schedule.options() | {"data": joined.fingerprint, "samples": steps.begin_of(done)}
    expected |= {"dealt": schedule.history(expected["samples"])} if balance else {}
    for name, wanted in expected.items():
        if state.get(name) != wanted:
            raise DataError(
                f"the checkpoint has {name} {state.get(name)}, a run over {packed.path} with these "
                f"sizes would have {wanted}",
                "give that run's rows and sizes; PackedSampler.rows_of also knows other options",
            )
    return steps.rows_of(step)


def step_report(
    step: int, sampler: dict[str, Any], rows: Iterable[tuple[int, int, Shown]]
) -> Report:
    """Report a line for each segment; the first one has the rank, micro-batch and row."""
    lines = list[dict[str, Cell]]()
    for rank, micro_batch, row in rows:
        place = [Aligned(number) for number in (rank, micro_batch, row.index)]
        for segment in row.segments:
            names = ("document", "rank", "micro-batch", "row", "tokens")
            values: list[Cell] = [str(segment.origin or ""), *place, len(segment.ids)]
            lines.append(dict(zip(names, values, strict=True)))
            place = [Aligned("")] * len(place)
    options = ", ".join(f"{name}={value!r}" for name, value in sampler.items())
    title = f"step {step:,} of PackedSampler(dataset, {options})"
    return Report(title, sections=[Section("", [Table("", lines)])])
