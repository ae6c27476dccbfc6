"""What `packer trace` prints: a line for each segment, or a JSON object for each row."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from packer_cli.errors import one_line
from packer_cli.result.origins import origin_as_json
from packer_cli.result.wording import plural
from packer_cli.trace.counting import Step
from packer_cli.trace.finding import Search
from packer_cli.trace.results import TracedSegment
from packer_cli.trace.run import Run
from packer_cli.trace.step import Place, TracedStep

_OF_ROW = ("rank", "micro-batch", "row", "tokens")


def step_lines(traced: TracedStep, rank: int | None = None) -> Iterator[str]:
    """The table of a step, or of one of its ranks, as it is read."""
    yield from _about(traced)
    yield ""
    table = _Table(traced.run, _OF_ROW)
    yield table.title()
    rows = segments = tokens = 0
    last: Place | None = None
    for last in traced.rows(rank):
        yield from table.lines([], last, last.row.segments)
        rows += 1
        segments += len(last.row.segments)
        tokens += sum(one.tokens for one in last.row.segments)
    yield ""
    counts = plural(rows, "row"), plural(segments, "segment"), plural(tokens, "token")
    yield ", ".join(counts) + ("" if rank is None else f" on rank {rank}")
    if last is not None:
        path = one_line(shlex.quote(str(last.row.path)))
        yield f"a row as text: packer show {path} {last.row.number}"


def _about(traced: TracedStep) -> Iterator[str]:
    """What the step is."""
    run, step = traced.run, traced.step
    loop, since = run.loop, ""
    if run.begin:
        since = f" since place {run.begin:,}"
    order = "of the shards" if loop.seed is None else f"with seed {loop.seed}"
    balance = f", balance {loop.balance}" if loop.balance else ""
    ranks = plural(loop.world_size, "rank")
    batches = plural(loop.micro_batches, "batch", "batches")
    places = f"place {step.begin:,}"
    if step.end - step.begin > 1:
        places = f"places {step.begin:,} to {step.end - 1:,}"
    named = f"step {step.number:,}{since}, in epoch {step.epoch:,}"
    yield f"{named}: {places} of the order {order}{balance}"
    rows = plural(loop.batch_size, "row")
    short = "" if step.end - step.begin == run.steps.sizes.step else "; here the epoch ends"
    each = " each" if loop.world_size > 1 else ""
    yield f"{ranks} with {batches} of {rows}{each}{short}"
    if run.state is not None and step.begin < run.state.samples:
        taken, rows_of_all = traced.taken
        when = f"after {taken} of {rows_of_all} rows" if taken < rows_of_all else "after it"
        yield f"the state was saved {when}"


def found_lines(search: Search, epochs: int) -> Iterator[str]:
    """The table of where a document is."""
    yield f"{search.document}: in {plural(len(search.rows), 'row')}"
    yield ""
    table = _Table(search.run, ("step", "epoch", *_OF_ROW), epochs)
    yield table.title()
    count = dropped = 0
    for found in search.places(epochs):
        count += 1
        dropped += found.step is None
        yield from table.lines(_numbers(found.step), found.place, found.segments)
    if dropped:
        yield ""
        yield f"- in no step: batches that the loader dropped ({dropped})"
    if not count:
        until = search.run.steps.first_epoch + epochs - 1
        yield f"none of them is in what is left of epoch {until:,}: --epochs looks further"


class _Table:
    """Lines of segments in columns whose widths are known before they are read. Names come last,
    where long ones stay whole.
    """

    def __init__(self, run: Run, titles: Sequence[str], epochs: int = 1) -> None:
        paths = [one_line(str(one.path)) for one in run.results.parts]
        most = {
            "rank": run.loop.world_size - 1,
            "row": max(map(len, run.results.parts)) - 1,
            "tokens": run.results.parts[0].max_length,
            "step": run.steps.before(run.steps.first_epoch + epochs + 1),
        }
        self._titles = list(titles)
        self._widths = [max(len(one), len(f"{most.get(one, 0):,}")) for one in titles]
        self._path_width = max(map(len, paths)) if len(paths) > 1 else 0

    def title(self) -> str:
        return self._line(self._titles, "result", "document")

    def lines(
        self, before: Sequence[int | None], place: Place, segments: Sequence[TracedSegment]
    ) -> Iterator[str]:
        """The segments of a row; what is said of the row stands in the first line."""
        cells = [*map(_cell, (*before, place.rank, place.micro_batch)), str(place.row.number)]
        path = one_line(str(place.row.path))
        for one in segments:
            origin = "" if one.origin is None else str(one.origin)
            yield self._line([*cells, f"{one.tokens:,}"], path, origin)
            cells, path = [""] * len(cells), ""

    def _line(self, cells: Sequence[str], path: str, name: str) -> str:
        parts = [cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True)]
        paths = [path.ljust(self._path_width)] if self._path_width else []
        return "  ".join([*parts, *paths, name]).rstrip()


def _cell(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def step_as_json(traced: TracedStep, rank: int | None = None) -> Iterator[str]:
    """An object for each row of a step."""
    for place in traced.rows(rank):
        yield _as_json(traced.step, place, place.row.segments)


def found_as_json(search: Search, epochs: int) -> Iterator[str]:
    """An object for each row that has pieces of a document, of these alone."""
    for found in search.places(epochs):
        yield _as_json(found.step, found.place, found.segments)


def _as_json(step: Step | None, place: Place, segments: Sequence[TracedSegment]) -> str:
    number, epoch = _numbers(step)
    content = {
        "step": number,
        "epoch": epoch,
        "place": place.place,
        "rank": place.rank,
        "micro_batch": place.micro_batch,
        "result": str(place.row.path),
        "row": place.row.number,
        "segments": [
            {"segment": one.index, **origin_as_json(one.origin), "tokens": one.tokens}
            for one in segments
        ],
    }
    return json.dumps(content)


def _numbers(step: Step | None) -> tuple[int | None, int | None]:
    """(number, epoch), where there is a step."""
    return (None, None) if step is None else (step.number, step.epoch)
