"""Options that change how a run goes, never what it writes; options of commands themselves, such as
the tokenizer and the output; and sizes of training steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from packer_cli.options.option import (
    COUNT,
    PAIRS,
    OptionGroup,
    Pairs,
    Rule,
    as_option,
    choice,
    mutually_exclusive,
    needs,
    whole,
)


def _unheard(message: str) -> None:
    pass


@dataclass(frozen=True)
class Workers(OptionGroup):
    """The number of worker processes."""

    workers: Annotated[
        int, whole(0), Option(help="Work units at a time. Default: as many as cores.")
    ] = 0


@dataclass(frozen=True)
class EncodingOptions(Workers):
    """Options that change how inputs become documents, never which.

    Beyond what --help has:

    notify, warn  get one-line messages: notes, and warnings, which are never silenced
    """

    tokenizer_backend: Annotated[
        str,
        choice(("auto", "gigatoken", "tokenizers")),
        Option(help="What encodes; it never changes the result: {}."),
    ] = "auto"
    notify: Callable[[str], None] = _unheard
    warn: Callable[[str], None] = _unheard

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers == 0:
            object.__setattr__(self, "workers", len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Locking(OptionGroup):
    """Locks of the output."""

    no_lock: Annotated[
        bool, Option(help="Go on where the file system has no locks; let no other run write there.")
    ] = False


@dataclass(frozen=True)
class RunOptions(EncodingOptions, Locking):
    """Options that change how a run goes, never what it writes.

    Beyond what --help has:

    exact              with `add`: if inputs are not named any more, all is packed anew
    progress           show progress on stderr
    rank, world_size   pack only every world_size-th unit, as one of that many processes
    before_switch      called when all is packed, before a new result takes its place
    """

    overwrite: Annotated[bool, Option(help="Replace an earlier result in the output.")] = False
    add: Annotated[
        bool,
        Option(
            help="Add inputs that are new, or have changed, to the result, if there is one. All "
            "others stay as they are packed, named or not, even if their files are gone."
        ),
    ] = False
    exact: bool = False
    progress: bool = True
    engine: Annotated[
        str,
        choice({"local": "this machine", "ray": "a task per unit on a Ray cluster"}),
        Option(help="What runs the work units: {}."),
    ] = "local"
    rank: int | None = None
    world_size: int | None = None
    before_switch: Callable[[], None] = lambda: None

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        yield mutually_exclusive("--add", self.add, "--overwrite", self.overwrite)
        rank, size = self.rank, self.world_size
        known = rank is not None and size is not None
        yield not known and rank != size, "--rank and --world-size: each needs the other", ""
        yield (
            known and not 0 <= (rank or 0) < (size or 0),
            f"--rank: {rank} is not between 0 and {(size or 0) - 1}",
            "ranks are counted from 0",
        )
        yield (
            known and (self.overwrite or self.add or self.engine != "local"),
            "--rank: does not go with --overwrite, --add or --engine ray",
            "give the ranks an --output of their own, and put it in place afterwards",
        )

    @property
    def as_rank(self) -> tuple[int, int] | None:
        """(rank, world_size) of one of several processes, or None."""
        if self.rank is None or self.world_size is None:
            return None
        return self.rank, self.world_size


@dataclass(frozen=True)
class TextField(OptionGroup):
    """The field of records that holds their text."""

    text_field: Annotated[
        str | None,
        Option(metavar="COLUMN", help="Field or column that holds the text. Default: text."),
    ] = None


@dataclass(frozen=True)
class TokenizerOptions(TextField):
    """The tokenizer, and the field of records that holds their text."""

    tokenizer: Annotated[
        str | None,
        Option(
            "--tokenizer",
            "-t",
            metavar="NAME",
            help="Folder, tokenizer.json, hub name, or bytes. Default: $PACKER_TOKENIZER, then "
            "bytes.",
        ),
    ] = None


@dataclass(frozen=True)
class PackOptions(TokenizerOptions):
    """Options of commands that write results: the tokenizer, the text field and the output."""

    output: Annotated[
        str | None,
        Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Directory to write, or a URL. Default: INPUT-packed-MAX_LENGTH or "
            "INPUT-tokenized.",
        ),
    ] = None


@dataclass(frozen=True)
class ReportOptions(OptionGroup):
    """Options for reports of every command."""

    as_json: Annotated[
        bool, Option("--json", help="Print JSON instead of a table, errors too.")
    ] = False
    debug: Annotated[bool, Option(help="Show a traceback with an error.")] = False


@dataclass(frozen=True)
class ProgressOptions(ReportOptions):
    """Options for reports of commands that take long."""

    quiet: Annotated[bool, Option("--quiet", "-q", help="Show no progress and no notes.")] = False


@dataclass(frozen=True)
class RankOptions(ProgressOptions):
    """Options for the part of a run that a process does, and its reports; recipes do not have them.

    rank, world_size "auto" is read from the environment
    """

    rank: Annotated[
        str | None,
        Option(
            metavar="R|auto",
            help="Pack only every WORLD_SIZE-th unit, from the R-th on; the last rank finishes. "
            "auto: from SLURM and the like.",
        ),
    ] = None
    world_size: Annotated[
        str | None, Option(metavar="W|auto", help="How many ranks there are.")
    ] = None


@dataclass(frozen=True)
class StepOptions(OptionGroup):
    """Sizes of the steps of a training."""

    ranks: Annotated[
        int | None, COUNT, Option(metavar="W", help="How many ranks share the rows of a step.")
    ] = None
    micro_batches: Annotated[
        int, COUNT, Option(metavar="M", help="With --ranks: micro-batches of a rank in a step.")
    ] = 1
    batch_size: Annotated[
        int, COUNT, Option(metavar="B", help="With --ranks: rows in a micro-batch.")
    ] = 1
    hidden_size: Annotated[
        int | None,
        COUNT,
        Option(
            metavar="H",
            help="With --ranks: that of the model, as in its config.json, from which rows have "
            "their cost.",
        ),
    ] = None

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        for name, unset in (("micro_batches", 1), ("batch_size", 1), ("hidden_size", None)):
            is_given = getattr(self, name) != unset
            yield needs(as_option(name), is_given, "--ranks", self.ranks is not None)


@dataclass(frozen=True)
class FormatOptions(OptionGroup):
    """Options of some formats of exports."""

    names: Annotated[
        Pairs,
        PAIRS,
        Option(
            "--names",
            metavar="NEW=OLD",
            help="With --to documents: call a column otherwise, as in tokens=input_ids. May be "
            "repeated.",
        ),
    ] = ()
    weights: Annotated[
        bool,
        Option(
            "--weights",
            help="With --to documents: write loss_weights, those that are carried or 1, and 0 "
            "where a token is not trained on.",
        ),
    ] = False
    shift: Annotated[
        bool,
        Option(
            "--shift",
            help="With --to documents: write masks and weights of a token at the one before it, "
            "which predicts it.",
        ),
    ] = False
    rows: Annotated[
        bool,
        Option("--rows", help="With --to megatron: write rows with their padding, not documents."),
    ] = False
