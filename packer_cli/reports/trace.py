"""`packer trace`: a step, or the places of a document, as a table with a line for each segment."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from packer_cli.errors import one_line
from packer_cli.reports.report import Part, Report, Section, Table, Text
from packer_cli.result.origins import origin_as_json
from packer_cli.result.wording import count, plural
from packer_cli.trace import Found, Run, Search, TracedStep


def step_report(traced: TracedStep, rank: int | None = None) -> Report:
    """Report what was in a step, or in one of its ranks."""
    run, step, loop = traced.run, traced.step, traced.run.loop
    found, size = list(traced.found(rank)), step.end - step.begin
    places = f"places {step.begin:,} to {step.end - 1:,}" if size > 1 else f"place {step.begin:,}"
    since = f" since place {run.begin:,}" if run.begin else ""
    order = "of the shards" if loop.seed is None else f"with seed {loop.seed}"
    balance = f", balance {loop.balance}" if loop.balance else ""
    each = " each" if loop.world_size > 1 else ""
    short = "" if size == run.steps.grid.sizes.rows else "; here the epoch ends"
    about = [
        f"step {step.number:,}{since}, in epoch {step.epoch:,}: {places} of the order "
        f"{order}{balance}",
        f"{plural(loop.world_size, 'rank')} with {plural(loop.micro_batches, 'batch', 'batches')} "
        f"of {plural(loop.batch_size, 'row')}{each}{short}",
    ]
    if run.state is not None and step.begin < run.state.samples:
        taken, of_all = traced.taken
        when = f"after {taken} of {of_all} rows" if taken < of_all else "after it"
        about.append(f"the state was saved {when}")
    segments = [segment for one in found for segment in one.segments]
    tokens = plural(sum(one.tokens for one in segments), "token")
    text = f"{plural(len(found), 'row')}, {plural(len(segments), 'segment')}, {tokens}"
    text += "" if rank is None else f" on rank {rank}"
    if found:
        last = found[-1].place.row
        path = one_line(shlex.quote(str(last.path)))
        text += f"\na row as text: packer show {path} {last.number}"
    return _report(about, _table(run, found, with_steps=False), text)


def found_report(search: Search, epochs: int) -> Report:
    """Report where a document was."""
    found, text = list(search.places(epochs)), ""
    if dropped := sum(one.step is None for one in found):
        text = f"- in no step: batches that the loader dropped ({dropped})"
    if not found:
        until = search.run.steps.first_epoch + epochs - 1
        text = f"none of them is in what is left of epoch {until:,}: --epochs looks further"
    about = [f"{search.document}: in {plural(len(search.rows), 'row')}"]
    return _report(about, _table(search.run, found, with_steps=True), text)


def as_rows(found: Iterable[Found]) -> Iterator[dict[str, Any]]:
    """Objects for programs, one for each row that was found."""
    for one in found:
        place, step = one.place, one.step
        yield {
            "step": step and step.number,
            "epoch": step and step.epoch,
            "place": place.place,
            "rank": place.rank,
            "micro_batch": place.micro_batch,
            "result": str(place.row.path),
            "row": place.row.number,
            "segments": [
                {"segment": its.index, **origin_as_json(its.origin), "tokens": its.tokens}
                for its in one.segments
            ],
        }


def _report(about: list[str], table: Table, text: str) -> Report:
    parts: list[Part] = [table, *([Text(text, only_page=False)] if text else [])]
    return Report(about[0], [], {}, "", about=about[1:], sections=[Section("", parts)])


def _table(run: Run, found: Sequence[Found], *, with_steps: bool) -> Table:
    """A line for each segment; what is said of the row stands in the first."""
    several, lines = len(run.parts) > 1, []
    for one in found:
        numbers = [one.place.rank, one.place.micro_batch]
        if with_steps:
            numbers = [*((one.step.number, one.step.epoch) if one.step else (None, None)), *numbers]
        cells = ["-" if number is None else count(number) for number in numbers]
        cells.append(str(one.place.row.number))
        path = [str(one.place.row.path)] * several
        for its in one.segments:
            name = "" if its.origin is None else str(its.origin)
            lines.append([name, *cells, count(its.tokens), *path])
            cells, path = [""] * len(cells), [""] * len(path)
    head = ["document", *["step", "epoch"] * with_steps, "rank", "micro-batch", "row", "tokens"]
    result = ["result"] * several
    return Table("", [*head, *result], lines, text=result)
