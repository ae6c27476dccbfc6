"""Every option that changes the bytes of a packed directory, in one frozen object.

Two runs with equal `PackConfig`, tokenizer and inputs write identical files. What concerns
documents rather than rows is in `documents`; options that do not change bytes (workers, progress,
engine) are in `run_options`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from types import SimpleNamespace
from typing import Any

from packer_cli.errors import UsageError
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import (
    Count,
    Names,
    Options,
    Rule,
    Share,
    Tokens,
    Weight,
    apart,
    in_terms_of_fields,
    option,
    options_of,
    plain_int,
    refuse,
)

# The columns of a row.
COLUMNS = ("input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids")
DEFAULT_COLUMNS = COLUMNS[:5]
REQUIRED_COLUMNS = ("input_ids", "cu_seqlens")
VIEW_COLUMNS = ("cu_seqlens", "segments")  # what a view stores, from which all others follow
PADDED_BOUNDARIES = "cu_seqlens_padded"  # written exactly when there is a segment multiple

# The packing strategies and their aliases. The loops are in `_kernels/`; `packing/plan.py`
# calls them. Adding one: CONTRIBUTING.md.
ALIASES: dict[str, tuple[str, ...]] = {
    "best-fit": (),
    "best-fit-decreasing": ("bfd", "obfd"),
    "first-fit": ("ffd",),
    "online-best-fit": ("bf",),
    "online-first-fit": ("ff",),
    "worst-fit": ("wf",),
    "first-fit-shuffle": ("ffs",),
    "next-fit": ("nf",),
    "harmonic": ("hk",),
    "mffd": (),
    "wrap": ("wrapped",),
}
NAMES = tuple(ALIASES)
_KEEPS_ORDER = ("next-fit", "wrap")
_TAKES_INPUT_ORDER = (
    *_KEEPS_ORDER, "online-best-fit", "online-first-fit", "worst-fit", "harmonic",
)  # fmt: skip


def canonical_name(name: str) -> str:
    """The strategy's full name for a name or alias; UsageError for an unknown one."""
    return str(checked_values(strategy=name).strategy)


def keeps_order(name: str) -> bool:
    """Whether rows hold the documents in input order, so that a shuffle would undo it."""
    return name in _KEEPS_ORDER


def takes_input_order(name: str) -> bool:
    """Whether documents are placed as they come; otherwise in a seeded order, or by length."""
    return name in _TAKES_INPUT_ORDER


# How much of each source there is

TRAIN, VALIDATION = "train", "validation"
_HOW_MUCH = "How much {}: 2B, 200M, 500k (500,000)."
_MOST_EPOCHS = 10_000  # each has work units of its own


def max_epochs(default: float | None) -> Any:
    """The field of that name: of a source, and of all sources of a recipe."""
    about = "The most of a source that weight or tokens may take. Default: 1."
    return option(default, about, least=0, most=_MOST_EPOCHS)


@dataclass(frozen=True)
class Amount(Options):
    """How much of a source is taken. At most one of `weight`, `epochs` and `tokens` is given; none
    is one epoch.

    weight    against the other weights, of what epochs and tokens of others leave
    tokens    as many, in whole epochs and a fraction of one
    inputs    how many of the run's inputs it is; those of the sources follow one another
    held_out  whether documents of it go to the validation split
    """

    name: str = option(MISSING, "What the source is called in all reports.")
    weight: Weight | None = option(None, "Its share, against the weights of other sources.")
    epochs: float | None = option(
        None, "How often all of it is taken; a fraction chooses documents.", most=_MOST_EPOCHS
    )
    tokens: Tokens | None = option(None, _HOW_MUCH.format("of it is taken"))
    max_epochs: float = max_epochs(1.0)
    inputs: int = 1
    held_out: bool = True

    def _rules(self) -> Iterator[Rule]:
        given = [name for name in ("weight", "epochs", "tokens") if getattr(self, name) is not None]
        yield len(given) > 1, f"has {' and '.join(given)}", "an amount is given in one way"
        yield (
            not self.name.strip() or re.search(r"^\.|[/\\\x00-\x1f\x7f]", self.name),
            f"name: {self.name!r} cannot be the name of a directory",
            "tokens of a source are kept under its name: use letters, digits and dashes",
        )
        for name in ("epochs", "max_epochs"):
            value = getattr(self, name)
            tip = "1 is all of the source, once; to take nothing, leave the source out"
            yield value is not None and value <= 0, f"{name}: {value} is not positive", tip


@dataclass(frozen=True)
class Mixture(Options):
    """The amounts of all sources of a recipe. Raises UsageError where they make no sense.

    tokens                None: by the sources
    count                 "trained": tokens that are trained on only
    validation_share      of the documents of every source, by content; None: no such split
    validation_documents  or as many of every source
    part                  which side of the split this result is
    dedup                 of equal documents, within and across sources, one is taken
    """

    sources: tuple[Amount, ...]
    tokens: Tokens | None = option(
        None,
        "How much there is in all: 2B, 200M, 500k (500,000). What epochs and tokens of sources "
        "leave of it is shared by weight. Default: the most that needs no source more than "
        "max_epochs times.",
    )
    count: str = option("tokens", "What amounts count:", choices=("tokens", "trained"))
    validation_share: float | None = None
    validation_documents: int | None = None
    part: str = TRAIN
    dedup: str = option(
        "none",
        "Which documents are left out as duplicates:",
        choices={"none": "", "exact": "all but one of equal ones, whatever their source"},
    )

    @property
    def is_split(self) -> bool:
        """Whether documents are held out for validation."""
        return self.validation_share is not None or self.validation_documents is not None

    @property
    def counted(self) -> str:
        """What amounts count, in words."""
        return "trained tokens" if self.count == "trained" else "tokens"

    def _rules(self) -> Iterator[Rule]:
        names = [one.name for one in self.sources]
        for one in self.sources:
            source, times = f"source {one.name!r}", names.count(one.name)
            yield times > 1, f"{source}: {times} have this name", "give each a name of its own"
        weights = [one.weight for one in self.sources if one.weight is not None]
        are_none = weights and not any(weights)
        yield are_none, "weight: all weights are 0", "give one source more than 0"
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

    max_length: Count = option(
        MISSING,
        "Tokens in a packed row: 4096, or 4k, which is the same.",
        short="-l",
        most=MAX_LENGTH_LIMIT,
        elsewhere="--seq-len --seq-length --sequence-length --max-seq-len --max-seq-length "
        "--block-size --context-length --cutoff-len",
    )
    strategy: str = option(
        "best-fit",
        "How documents are put into rows:",
        choices=NAMES,
        aliases=ALIASES,
        elsewhere="--packing-strategy --packing --algorithm",
    )
    seed: Count = option(
        0,
        "Seed of the order of documents, of rows, and of segments in a row.",
        least=0,
        most=(1 << 63) - 1,
    )
    shuffle: bool | None = option(
        None, "Whether rows are shuffled. Default: yes, but next-fit and wrap keep the input order."
    )
    overlong: str | None = option(
        None,
        "What becomes of documents longer than a row:",
        choices={
            "split": "the default for text; never for messages and prompts",
            "truncate": "",
            "truncate-turns": "drop the oldest turns",
            "drop": "the default for messages and prompts",
            "split-text": "split what is trained on throughout, drop the rest: the default for "
            "both together",
            "error": "",
        },
        elsewhere="--truncation --truncate --on-overlong",
    )
    truncate_side: str = option(
        "right",
        "Where --overlong truncate cuts:",
        choices={"right": "keep the beginning", "left": "keep the end"},
        elsewhere="--truncation-side",
    )
    max_loss: Share | None = option(
        None, "Exit 1 when more of the tokens were truncated or dropped: 0.01 or 1%."
    )
    columns: Names = option(
        DEFAULT_COLUMNS,
        "Columns to write, with commas between:",
        choices=COLUMNS,
        unset="all but position_ids",
    )
    window_tokens: int | None = None
    max_segments_per_row: Count | None = option(
        None, "Close a row that has N segments.", most=MAX_LENGTH_LIMIT
    )
    segment_multiple: Count = option(
        1, "Pad every segment, inside its row, to a multiple of N tokens."
    )
    view: bool = option(
        False, "Write rows as references to tokenized directories: no tokens, ready in seconds."
    )
    balance: str = option(
        "none",
        "What is evened out between rows:",
        choices={"none": "", "attention": "the sum of squared segment lengths"},
    )
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        # which nobody asks for by name
        padded = (PADDED_BOUNDARIES,) if self.segment_multiple > 1 else ()
        unasked = padded + tuple(self.carried)
        given = tuple(name for name in self.columns if name not in unasked)
        object.__setattr__(self, "columns", given)
        super().__post_init__()
        columns = tuple(name for name in COLUMNS if name in self.columns) + unasked
        object.__setattr__(self, "columns", columns)
        if self.shuffle is None:
            object.__setattr__(self, "shuffle", not keeps_order(self.strategy))
        if self.window_tokens is None:
            # A thousand rows leave best fit next to nothing to improve; four million tokens
            # keep the cost of a window's start and of its carried rows out of sight.
            tokens = max(1 << 22, min(64 * self.max_length, 1 << 25))
            carried = sum(one.bytes for one in self.carried.values())
            tokens = max(self.max_length, 32 * tokens // max(32, 4 + carried))
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
        yield apart(f"--overlong {self.overlong}", is_cut, named, strategy == "wrap")
        yield apart("--shuffle", self.shuffle, named, keeps_order(strategy))

    @property
    def least_unit_tokens(self) -> int:
        """Enough that a work unit's unfilled last row is noise; a view's rows are small."""
        rows = _ROWS_PER_UNIT * self.max_length
        return max(rows, _VIEW_TOKENS) if self.view else rows

    def as_json(self) -> dict[str, object]:
        return super().as_json() | {"columns": list(self.columns)}


# Strategies that reach what they promise only without these options.
_UNLIMITED, _UNBALANCED = ("wrap", "mffd"), (*_KEEPS_ORDER, "harmonic")


def _row_rules(options: Any) -> Iterator[Rule]:
    """`options`: a `PackConfig`, or the arguments of a function by its names."""
    most, strategy = options.max_segments_per_row, options.strategy
    named, is_balanced = f"--strategy {strategy}", options.balance != "none"
    yield apart("--max-segments-per-row", most is not None, named, strategy in _UNLIMITED)
    yield apart("--balance", is_balanced, named, strategy in _UNBALANCED)
    length, multiple = options.max_length, options.segment_multiple
    rest = length % multiple
    yield (
        rest,
        f"--segment-multiple: --max-length {length} is not a multiple of {multiple}",
        f"use {length - rest or multiple} tokens a row",
    )


def checked_row_options(**values: Any) -> Any:
    """Options of rows, given to a function by their fields, as plain values. UsageError for values
    that are not allowed, also those of another type, or do not go together.
    """
    options = checked_values(**values)
    try:
        refuse(_row_rules(options))
    except UsageError as error:
        raise in_terms_of_fields(error) from None
    return options


def checked_values(**values: Any) -> SimpleNamespace:
    """Names and whole numbers, each of which may be left out where None is the default."""
    options, found = options_of(PackConfig), dict[str, Any]()
    for name, value in values.items():
        one, own = options[name], value
        if one.choices:
            own = value if isinstance(value, str) else repr(value)
        elif value is not None or one.default is not None:
            own = plain_int(name, value)
        found[name] = one.checked(name, own)
    return SimpleNamespace(**found)
