"""Every option that changes the bytes of a packed directory, in one frozen object.

Two runs with equal `PackConfig`, tokenizer and inputs write identical files. What concerns
documents rather than rows is in `documents`; options that do not change bytes (workers, progress,
engine) are in `run_options`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

from typer import Option

from packer_cli.errors import UsageError
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import (
    COUNT,
    NUMBER,
    SHARE,
    TOKENS,
    WEIGHT,
    OptionGroup,
    Rule,
    choice,
    in_terms_of_fields,
    mutually_exclusive,
    names,
    options_of,
    plain_int,
    refuse,
    whole,
)

# The columns of a row, with the type of their values. Columns of "int32" and "uint8" have
# max_length values in each row, the others as many as it has boundaries or segments.
COLUMNS = {
    "input_ids": "int32",
    "labels": "int32",
    "attention_mask": "uint8",
    "cu_seqlens": "boundary",
    "segments": "segment",
    "position_ids": "int32",
}
DEFAULT_COLUMNS = tuple(COLUMNS)[:5]
REQUIRED_COLUMNS = ("input_ids", "cu_seqlens")
VIEW_COLUMNS = ("cu_seqlens", "segments")  # stored by a view; all others follow from these
PADDED_BOUNDARIES = "cu_seqlens_padded"  # written exactly when there is a segment multiple


class Strategy(NamedTuple):
    """A packing strategy, as far as options and plans have to know it.

    aliases          other names
    kernel           function of `_kernels/one_by_one.pyx` that chooses a row for each document;
                     "" if `packing/plan.py` has a planner for the strategy
    order            in which documents are placed: "input", "seeded" or "longest first"
    keeps_order      rows hold the documents in input order, so that a shuffle would undo it
    allows_limit     rows may be closed by --max-segments-per-row
    allows_balance   rows may exchange documents, for --balance
    """

    aliases: tuple[str, ...] = ()
    kernel: str = ""
    order: str = "seeded"
    keeps_order: bool = False
    allows_limit: bool = True
    allows_balance: bool = True


# Adding one: CONTRIBUTING.md.
STRATEGIES = {
    "best-fit": Strategy(),
    "best-fit-decreasing": Strategy(("bfd", "obfd")),
    "first-fit": Strategy(("ffd",), "first_fit", "longest first"),
    "online-best-fit": Strategy(("bf",), "best_fit", "input"),
    "online-first-fit": Strategy(("ff",), "first_fit", "input"),
    "worst-fit": Strategy(("wf",), "worst_fit", "input"),
    "first-fit-shuffle": Strategy(("ffs",), "first_fit"),
    "next-fit": Strategy(("nf",), "next_fit", "input", keeps_order=True, allows_balance=False),
    "harmonic": Strategy(("hk",), order="input", allows_balance=False),
    "mffd": Strategy(allows_limit=False),
    # next fit over pieces that `packing/fitting.py` cuts where rows end
    "wrap": Strategy(
        ("wrapped",), "next_fit", "input",
        keeps_order=True, allows_limit=False, allows_balance=False,
    ),
}  # fmt: skip
ALIASES = {name: strategy.aliases for name, strategy in STRATEGIES.items()}
NAMES = tuple(STRATEGIES)


def canonical_name(name: str) -> str:
    """Return a strategy's full name for a name or alias. Raises UsageError for an unknown one."""
    return str(checked_values(strategy=name).strategy)


def keeps_order(name: str) -> bool:
    """Tell if rows hold the documents in input order, so that a shuffle would undo it."""
    return STRATEGIES[name].keeps_order


# How much of each source there is

TRAIN, VALIDATION = "train", "validation"
_HOW_MUCH = "How much {}: 2B, 200M, 500k (500,000)."
_MOST_EPOCHS = 10_000  # each has work units of its own
_MOST_TIERS = 64


# of a source, and of all sources of a recipe
MAX_EPOCHS = replace(NUMBER, least=0, most=_MOST_EPOCHS)
ABOUT_MAX_EPOCHS = Option(help="The most of a source that weight or tokens may take. Default: 1.")


@dataclass(frozen=True)
class Amount(OptionGroup):
    """Amount of a source, or of one of its tiers, that is taken. At most one of `weight`, `epochs`
    and `tokens` is set; without any it is one epoch.

    name      of the source
    weight    share of what epochs and tokens of others leave, against all other weights
    tokens    as many, in whole epochs and a fraction of one
    inputs    number of the run's inputs; those of the sources follow one another
    held_out  whether its documents may go to the validation split
    where     conditions that all its documents meet
    tiers     amounts of its tiers, which it has instead of an amount of its own
    tier      number of a tier, from 1; 0: the whole source
    """

    name: str
    weight: Annotated[
        float | None, WEIGHT, Option(help="Its share, against the weights of all others.")
    ] = None
    epochs: Annotated[
        float | None,
        replace(NUMBER, most=_MOST_EPOCHS),
        Option(help="How often all of it is taken; a fraction chooses documents."),
    ] = None
    tokens: Annotated[int | None, TOKENS, Option(help=_HOW_MUCH.format("of it is taken"))] = None
    max_epochs: Annotated[float, MAX_EPOCHS, ABOUT_MAX_EPOCHS] = 1.0
    inputs: int = 1
    held_out: bool = True
    where: tuple[str, ...] = ()
    tiers: tuple[Amount, ...] = ()
    tier: int = 0

    @property
    def label(self) -> str:
        """Its name in messages."""
        source = f"source {self.name!r}"
        return f"{source}, {tier_label(self.tier, self.where)}" if self.tier else source

    @property
    def portions(self) -> tuple[Amount, ...]:
        """Its tiers, or itself if it has none."""
        return self.tiers or (self,)

    def _rules(self) -> Iterator[Rule]:
        amounts = [
            name for name in ("weight", "epochs", "tokens") if getattr(self, name) is not None
        ]
        amounts += ["tiers"] * bool(self.tiers)
        yield len(amounts) > 1, f"has {' and '.join(amounts)}", "an amount is given in one way"
        yield (
            len(self.tiers) > _MOST_TIERS,
            f"has {len(self.tiers)} tiers, the most is {_MOST_TIERS}",
            "join some of them",
        )
        yield (
            not self.name.strip() or re.search(r"^\.|[/\\\x00-\x1f\x7f]", self.name),
            f"name: {self.name!r} cannot be the name of a directory",
            "tokens of a source are kept under its name: use letters, digits and dashes",
        )
        for name in ("epochs", "max_epochs"):
            value = getattr(self, name)
            tip = "1 is all of it, once; to take nothing, leave it out"
            yield value is not None and value <= 0, f"{name}: {value} is not positive", tip


def tier_label(number: int, where: Iterable[str]) -> str:
    """Name a tier, numbered from 1, and its conditions."""
    return f"tier {number} ({' and '.join(where) or 'all others'})"


@dataclass(frozen=True)
class Mixture(OptionGroup):
    """The amounts of all sources of a recipe. Raises UsageError if they make no sense.

    tokens                None: the sum of the sources
    count                 "trained": only tokens that are trained on
    validation_share      of the documents of every source, by content; None: no such split
    validation_documents  or as many of every source
    part                  the side of the split that this result is
    dedup                 of equal documents, within and across sources, one is taken
    """

    sources: tuple[Amount, ...]
    tokens: Annotated[
        int | None,
        TOKENS,
        Option(
            help="How much there is in all: 2B, 200M, 500k (500,000). What epochs and tokens of "
            "sources leave of it is shared by weight. Default: the most that needs no source "
            "more than max_epochs times."
        ),
    ] = None
    count: Annotated[str, choice(("tokens", "trained")), Option(help="What amounts count: {}.")] = (
        "tokens"
    )
    validation_share: float | None = None
    validation_documents: int | None = None
    part: str = TRAIN
    dedup: Annotated[
        str,
        choice({"none": "", "exact": "all but one of equal ones, whatever their source"}),
        Option(help="Which documents are left out as duplicates: {}."),
    ] = "none"

    @property
    def portions(self) -> tuple[Amount, ...]:
        """All that has an amount of its own: tiers, and sources without them."""
        return tuple(chain.from_iterable(source.portions for source in self.sources))

    @property
    def is_split(self) -> bool:
        """True if documents are held out for validation."""
        return self.validation_share is not None or self.validation_documents is not None

    @property
    def counted(self) -> str:
        """The unit of amounts, in words."""
        return "trained tokens" if self.count == "trained" else "tokens"

    def _rules(self) -> Iterator[Rule]:
        names = [source.name for source in self.sources]
        for amount in self.sources:
            source, times = f"source {amount.name!r}", names.count(amount.name)
            yield times > 1, f"{source}: {times} have this name", "give each a name of its own"
        weights = [one.weight for one in self.portions if one.weight is not None]
        are_none = weights and not any(weights)
        yield are_none, "weight: all weights are 0", "give one of them more than 0"
        yield (
            self.tokens is not None and not weights,
            "tokens: says how much there is in all, but no source has a weight",
            "leave it out, or give sources a weight",
        )


# Rows

MAX_LENGTH_LIMIT = 1 << 24
_ROWS_PER_UNIT, _VIEW_TOKENS = 1024, 1 << 26


@dataclass(frozen=True)
class PackConfig(DocumentConfig):
    """Options that change the result's bytes; recorded in the manifest as `config`.

    Raises UsageError from the constructor when a value cannot work.

    Beyond what --help says:

    shuffle           None: on, except for strategies that keep the input order
    overlong          None: "split" for text and tokens, "drop" for supervised shapes, "split-text"
                      where there are both
    columns           in the order of the format
    window_tokens     tokens that one plan considers together; None: by `max_length`
    segment_multiple  above 1 the column cu_seqlens_padded says where segments begin
    mixture           how much of each source is taken; None: all of all inputs
    """

    max_length: Annotated[
        int,
        whole(1, MAX_LENGTH_LIMIT),
        Option(
            "--max-length", "-l", help="Tokens in a packed row: 4096, or 4k, which is the same."
        ),
    ]
    strategy: Annotated[
        str, choice(NAMES, aliases=ALIASES), Option(help="How documents are put into rows: {}.")
    ] = "best-fit"
    seed: Annotated[
        int,
        whole(0, (1 << 63) - 1),
        Option(help="Seed of the order of documents, of rows, and of segments in a row."),
    ] = 0
    shuffle: Annotated[
        bool | None,
        Option(
            help="Whether rows are shuffled. Default: yes, but next-fit and wrap keep the input "
            "order."
        ),
    ] = None
    overlong: Annotated[
        str | None,
        choice(
            {
                "split": "the default for text; never for messages and prompts",
                "truncate": "",
                "truncate-turns": "drop the oldest turns",
                "drop": "the default for messages and prompts",
                "split-text": "split what is trained on throughout, drop the rest: the default for "
                "both together",
                "error": "",
            }
        ),
        Option(help="What becomes of documents longer than a row: {}."),
    ] = None
    truncate_side: Annotated[
        str,
        choice({"right": "keep the beginning", "left": "keep the end"}),
        Option(help="Where --overlong truncate cuts: {}."),
    ] = "right"
    max_loss: Annotated[
        float | None,
        SHARE,
        Option(help="Exit 1 when more of the tokens were truncated or dropped: 0.01 or 1%."),
    ] = None
    columns: Annotated[
        tuple[str, ...],
        names(COLUMNS),
        Option(help="Columns to write, with commas between: {}. Default: all but position_ids."),
    ] = DEFAULT_COLUMNS
    window_tokens: int | None = None
    max_segments_per_row: Annotated[
        int | None, whole(1, MAX_LENGTH_LIMIT), Option(help="Close a row that has N segments.")
    ] = None
    segment_multiple: Annotated[
        int, COUNT, Option(help="Pad every segment, inside its row, to a multiple of N tokens.")
    ] = 1
    view: Annotated[
        bool,
        Option(
            help="Write rows as references to tokenized directories: no tokens, ready in seconds."
        ),
    ] = False
    balance: Annotated[
        str,
        choice({"none": "", "attention": "the sum of squared segment lengths"}),
        Option(help="What is evened out between rows: {}."),
    ] = "none"
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        # columns that are written without being named in --columns
        padded = (PADDED_BOUNDARIES,) if self.segment_multiple > 1 else ()
        unasked = padded + tuple(self.value_columns)
        named = tuple(name for name in self.columns if name not in unasked)
        object.__setattr__(self, "columns", named)
        super().__post_init__()
        columns = tuple(name for name in COLUMNS if name in self.columns) + unasked
        object.__setattr__(self, "columns", columns)
        if self.shuffle is None:
            object.__setattr__(self, "shuffle", not keeps_order(self.strategy))
        if self.window_tokens is None:
            # A thousand rows leave best fit next to nothing to improve; four million tokens
            # keep the cost of a window's start and of the rows it keeps back out of sight.
            tokens = max(1 << 22, min(64 * self.max_length, 1 << 25))
            more = sum(column.bytes for column in self.value_columns.values())
            tokens = max(self.max_length, 32 * tokens // max(32, 4 + more))
            object.__setattr__(self, "window_tokens", tokens)

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        strategy = self.strategy
        yield from _row_rules(self)
        yield (
            not {*REQUIRED_COLUMNS} <= {*self.columns},
            f"--columns: {' and '.join(REQUIRED_COLUMNS)} are needed",
            "rows are not readable without them",
        )
        named, is_cut = f"--strategy {strategy}", self.overlong not in (None, "split")
        yield mutually_exclusive(f"--overlong {self.overlong}", is_cut, named, strategy == "wrap")
        yield mutually_exclusive("--shuffle", self.shuffle, named, keeps_order(strategy))

    @property
    def least_unit_tokens(self) -> int:
        """Tokens of the smallest work unit: its unfilled last row is noise."""
        rows = _ROWS_PER_UNIT * self.max_length
        return max(rows, _VIEW_TOKENS) if self.view else rows

    def as_json(self) -> dict[str, object]:
        return super().as_json() | {"columns": list(self.columns)}


def _row_rules(options: Any) -> Iterator[Rule]:
    """Yield rules for options of rows. `options`: a `PackConfig`, or an object with its names."""
    named, strategy = f"--strategy {options.strategy}", STRATEGIES[options.strategy]
    is_limited, is_balanced = options.max_segments_per_row is not None, options.balance != "none"
    yield mutually_exclusive("--max-segments-per-row", is_limited, named, not strategy.allows_limit)
    yield mutually_exclusive("--balance", is_balanced, named, not strategy.allows_balance)
    length, multiple = options.max_length, options.segment_multiple
    excess = length % multiple
    yield (
        excess,
        f"--segment-multiple: --max-length {length} is not a multiple of {multiple}",
        f"use {length - excess or multiple} tokens a row",
    )


def checked_row_options(**values: Any) -> Any:
    """Return options of rows as plain values. Raises UsageError."""
    options = checked_values(**values)
    try:
        refuse(_row_rules(options))
    except UsageError as error:
        raise in_terms_of_fields(error) from None
    return options


def checked_values(**values: Any) -> SimpleNamespace:
    """Return names and whole numbers as plain values. None is allowed if it is the default."""
    options, checked = options_of(PackConfig), dict[str, Any]()
    for name, value in values.items():
        option, plain = options[name], value
        if option.format.choices:
            plain = value if isinstance(value, str) else repr(value)
        elif value is not None or option.default is not None:
            plain = plain_int(name, value)
        checked[name] = option.check(name, plain)
    return SimpleNamespace(**checked)
