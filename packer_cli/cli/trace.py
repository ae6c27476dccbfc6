"""`packer trace`: which documents were in a step of a training run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packer_cli.cli.reports import LOCAL_ONLY, TokensOf, print_note
from packer_cli.errors import DataError, from_os_error
from packer_cli.options.option import Count, Rule, Values, apart, option, refuse
from packer_cli.options.run_options import Loop, Reporting

if TYPE_CHECKING:
    from packer_cli.trace import Run


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
    from packer_cli.reports.trace import as_rows, found_report, step_report
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
        found, report = search.places(options.epochs), partial(found_report, search, options.epochs)
        run = search.run
    else:
        traced = traced_step(paths, step=options.step, **how)
        found, report = traced.found(options.rank), partial(step_report, traced, options.rank)
        run = traced.run
    if options.as_json:
        for row in as_rows(found):
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
