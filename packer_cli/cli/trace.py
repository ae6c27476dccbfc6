"""`packer trace`: which documents were in a step of a training run, or the places of a document."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packer_cli.cli.reports import LOCAL_ONLY, TokensOf, print_note
from packer_cli.errors import DataError, from_os_error, one_line
from packer_cli.options.option import Count, Rule, Values, apart, option, refuse
from packer_cli.options.run_options import Loop, Reporting
from packer_cli.reports.report import Part, Report, Section, Table, Text
from packer_cli.result.wording import count, plural

if TYPE_CHECKING:
    from packer_cli.trace import Found, Run, Search, TracedStep


@dataclass(frozen=True)
class TraceOptions(TokensOf, Reporting):
    """Options of `packer trace`, beside those of the loop."""

    step: Count | None = option(
        None, "Show this step. 0 is the first; some trainers call it 1.", least=0, most=10**12
    )
    find: str | None = option(
        None,
        "Show the steps that had this document: an input, or the end of its path, and a "
        "position as shown.",
        metavar="FILE:POSITION",
    )
    epochs: Count = option(
        1,
        "With --find: go through this many epochs.",
        metavar="K",
        most=10**6,
        goes_with=("find", None),
    )
    state: str | None = option(
        None,
        "A JSON file with a sampler's state_dict(), such as a Trainer's trainer_state.json. "
        "Alone: show the step that it was saved in or after. With --step or --find: of a run "
        "that went on from it, with steps counted from there.",
        metavar="FILE",
    )
    rank: Count | None = option(None, "Show this rank alone.", metavar="R", least=0)
    no_shuffle: bool = option(False, "The sampler had seed=None.")

    def _rules(self) -> Iterator[Rule]:
        is_search = self.find is not None
        yield apart("--step", self.step is not None, "--find", is_search)
        yield apart("--rank", self.rank is not None, "--find", is_search)


def trace(
    names: Annotated[
        list[str],
        typer.Argument(metavar="DIR", help="What the run read: packed directories and views."),
    ],
    options: TraceOptions,
    loop: Annotated[Values, Loop],
) -> None:
    """Show which documents were in a step of a training run, or which steps had a document.

    For runs that take rows with PackedSampler. Give its options as the run had them.

    Example: packer trace documents-packed-1024 --step 41 --ranks 2
    """
    refuse([apart("--seed", "seed" in loop, "--no-shuffle", options.no_shuffle)])
    from packer_cli.reports.terminal import print_report
    from packer_cli.storage import local
    from packer_cli.trace import Run, Search
    from packer_cli.trace import trace as traced_step

    how: Values = {
        "state": None if options.state is None else _read_state(options.state),
        "tokens": options.tokens,
        **loop,
        **({"seed": None} if options.no_shuffle else {}),
    }
    paths = [local(name, LOCAL_ONLY) for name in names]
    if options.find is not None:
        search = Search(Run(paths, **how), options.find)
        found, report = (
            search.places(options.epochs),
            partial(_found_report, search, options.epochs),
        )
        run = search.run
    else:
        traced = traced_step(paths, step=options.step, **how)
        found, report = traced.found(options.rank), partial(_step_report, traced, options.rank)
        run = traced.run
    if options.as_json:
        for row in _as_rows(found):
            _print_notes(run)
            print(json.dumps(row))
        return
    told = report()
    _print_notes(run)
    print_report(told)


def _print_notes(run: Run) -> None:
    for note in run.notes():
        print_note(note)


def _read_state(path: str) -> Any:
    """The content of a JSON file. Raises DataError."""
    from packer_cli.storage import read_bytes
    from packer_cli.trace import SAVE_STATE

    try:
        return json.loads(read_bytes(path))
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON: {error}", SAVE_STATE) from error


def _step_report(traced: TracedStep, rank: int | None = None) -> Report:
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
    return _told(about, _table(run, found, with_steps=False), text)


def _found_report(search: Search, epochs: int) -> Report:
    """Report where a document was."""
    found, text = list(search.places(epochs)), ""
    if dropped := sum(one.step is None for one in found):
        text = f"- in no step: batches that the loader dropped ({dropped})"
    if not found:
        until = search.run.steps.first_epoch + epochs - 1
        text = f"none of them is in what is left of epoch {until:,}: --epochs looks further"
    about = [f"{search.document}: in {plural(len(search.rows), 'row')}"]
    return _told(about, _table(search.run, found, with_steps=True), text)


def _as_rows(found: Iterable[Found]) -> Iterator[dict[str, Any]]:
    """Objects for programs, one for each row that was found."""
    from packer_cli.result.origins import origin_as_json

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


def _told(about: list[str], table: Table, text: str) -> Report:
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
