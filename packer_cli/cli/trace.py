"""`packer trace`: which documents were in a step of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from packer_cli.cli.declared import Partly
from packer_cli.cli.shared import LOCAL_ONLY, Debug, TokensOf, print_note
from packer_cli.config.loop import Loop
from packer_cli.config.option import Option
from packer_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from packer_cli.trace import Run


def trace(
    names: Annotated[
        list[str],
        typer.Argument(metavar="DIR", help="What the run read: packed directories and views."),
    ],
    loop: Partly[Loop],
    step: Annotated[
        int | None,
        Option(
            "Show this step. 0 is the first; some trainers call it 1.",
            metavar="N",
            value="count",
            first=1,
            least=0,
            most=10**12,
        ),
    ] = None,
    find: Annotated[
        str | None,
        Option(
            "Show the steps that had this document: an input, or the end of its path, and a "
            "position as shown.",
            metavar="FILE:POSITION",
            first=2,
        ),
    ] = None,
    epochs: Annotated[
        int,
        Option(
            "With --find: go through this many epochs.",
            metavar="K",
            value="count",
            least=1,
            most=10**6,
        ),
    ] = 1,
    state: Annotated[
        str | None,
        Option(
            "A JSON file with a sampler's state_dict(), such as a Trainer's trainer_state.json. "
            "Alone: show the step that it was saved in or after. With --step or --find: of a run "
            "that went on from it, with steps counted from there.",
            metavar="FILE",
            first=3,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        Option("Show this rank alone.", metavar="R", value="count", least=0),
    ] = None,
    no_shuffle: Annotated[bool, Option("The sampler had seed=None.")] = False,
    tokens: TokensOf = (),
    as_json: Annotated[bool, Option("Print a JSON object for each row.", flag="--json")] = False,
    debug: Debug = False,
) -> None:
    """Show which documents were in a step of a training run, or which steps had a document.

    For runs that take rows with PackedSampler. Give its options as the run had them.

    Example: packer trace documents-packed-1024 --step 41 --ranks 2
    """
    if step is not None and find is not None:
        raise UsageError("--step and --find: are two questions", "ask one of them")
    if find is not None and rank is not None:
        raise UsageError("--rank: is for --step and --state", "leave it out: the ranks are shown")
    if find is None and epochs != 1:
        raise UsageError("--epochs: is for --find", "leave it out: a step is in one epoch")
    if no_shuffle and "seed" in loop.values:
        raise UsageError(
            "--seed and --no-shuffle: exclude one another", "give what the sampler had"
        )
    from packer_cli.storage import local
    from packer_cli.trace import drawing
    from packer_cli.trace.finding import search
    from packer_cli.trace.state import read_state
    from packer_cli.trace.step import trace as traced_step

    how: dict[str, Any] = {
        "state": None if state is None else read_state(state),
        "tokens": tokens,
        **loop.values,
        **({"seed": None} if no_shuffle else {}),
    }
    paths = [local(name, LOCAL_ONLY) for name in names]
    if find is not None:
        found = search(paths, find, **how)
        show = drawing.found_as_json if as_json else drawing.found_lines
        _print(show(found, epochs), found.run)
        return
    traced = traced_step(paths, step=step, **how)
    if rank is not None:
        traced.run.refuse_rank(rank)
    if traced.doubt:
        print_note(traced.doubt)
    shown = drawing.step_as_json if as_json else drawing.step_lines
    _print(shown(traced, rank), traced.run)


def _print(lines: Iterator[str], run: Run) -> None:
    for packed in run.results.parts:
        if "segments" not in packed.facts.config.columns:
            print_note(
                f"{packed.path}: was packed without the column segments: which documents are in "
                "rows is unknown"
            )
    for line in lines:
        for note in run.results.notes():
            print_note(note)
        print(line)
