"""Every option that changes the bytes of a packed directory, in one frozen object.

Two runs with equal `PackConfig`, tokenizer and inputs write identical files. What concerns
documents rather than rows is in `documents`; options that do not change bytes (workers, progress,
engine) are in `run_options`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from packer_cli.errors import UsageError, one_of
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.mixture import Mixture
from packer_cli.options.option import (
    DOCUMENTS,
    OUTPUT,
    ROWS,
    SUPERVISED,
    Count,
    Names,
    Need,
    Rule,
    Share,
    in_terms_of_fields,
    option,
    options_of,
    refuse,
)

# The columns of a row.
COLUMNS = ("input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids")
DEFAULT_COLUMNS = COLUMNS[:5]
REQUIRED_COLUMNS = ("input_ids", "cu_seqlens")
VIEW_COLUMNS = ("cu_seqlens", "segments")  # what a view stores, from which all others follow
PADDED_BOUNDARIES = "cu_seqlens_padded"  # written exactly when there is a segment multiple
PAIR, SIDE = PAIR_COLUMNS = ("pair", "side")  # written exactly for records of preference
OF_SEGMENTS = ("segments", *PAIR_COLUMNS)  # with a value for each segment

# The packing strategies and their aliases. The loops are in `_kernels/`; `packing/planning.py`
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


def view_columns(columns: Sequence[str]) -> list[str]:
    """What a view stores of these columns."""
    return [*VIEW_COLUMNS, *(name for name in PAIR_COLUMNS if name in columns)]


def canonical_name(name: str) -> str:
    """The strategy's full name for a name or alias; UsageError for an unknown one."""
    spelled = name.lower().replace("_", "-")
    for own, aliases in ALIASES.items():
        if spelled in (own, *aliases):
            return own
    raise one_of("strategy", name, NAMES)


def keeps_order(name: str) -> bool:
    """Whether rows hold the documents in input order, so that a shuffle would undo it."""
    return name in _KEEPS_ORDER


def takes_input_order(name: str) -> bool:
    """Whether documents are placed as they come; otherwise in a seeded order, or by length."""
    return name in _TAKES_INPUT_ORDER


MAX_LENGTH_LIMIT = 1 << 24
_ROWS_PER_UNIT, _VIEW_TOKENS = 1024, 1 << 26
_SUPERVISED = Need("messages, prompts and instructions", lambda shape, config: shape.is_supervised)
_UNTRAINED = Need("records that say what is trained on", lambda shape, config: shape.kind != "text")


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
        ROWS,
        first=1,
        short="-l",
        most=MAX_LENGTH_LIMIT,
        elsewhere="--seq-len --seq-length --sequence-length --max-seq-len --max-seq-length "
        "--block-size --context-length --cutoff-len",
    )
    strategy: str = option(
        "best-fit",
        "How documents are put into rows:",
        ROWS,
        first=8,
        choices=NAMES,
        aliases=ALIASES,
        elsewhere="--packing-strategy --packing --algorithm",
    )
    seed: Count = option(
        0,
        "Seed of the order of documents, of rows, and of segments in a row.",
        ROWS,
        least=0,
        most=(1 << 63) - 1,
    )
    shuffle: bool | None = option(
        None,
        "Whether rows are shuffled. Default: yes, but next-fit and wrap keep the input order.",
        ROWS,
    )
    overlong: str | None = option(
        None,
        "What becomes of documents longer than a row:",
        DOCUMENTS,
        first=7,
        choices={
            "split": "the default for text",
            "truncate": "",
            "truncate-turns": "drop the oldest turns",
            "drop": "the default for messages and prompts",
            "split-text": "split what is trained on throughout, drop the rest: the default for "
            "both together",
            "error": "",
        },
        elsewhere="--truncation --truncate --on-overlong",
    )
    force_split: bool = option(
        False, "Let --overlong split cut messages and prompts, too.", DOCUMENTS, needs=_SUPERVISED
    )
    truncate_side: str = option(
        "right",
        "Where --overlong truncate cuts:",
        DOCUMENTS,
        choices={"right": "keep the beginning", "left": "keep the end"},
        elsewhere="--truncation-side",
    )
    max_loss: Share | None = option(
        None,
        "Exit 1 when more of the tokens were truncated or dropped: 0.01 or 1%.",
        DOCUMENTS,
    )
    columns: Names = option(
        DEFAULT_COLUMNS,
        "Columns to write, with commas between:",
        OUTPUT,
        choices=COLUMNS,
        unset="all but position_ids",
    )
    keep_untrained: bool = option(
        False, "Keep documents without a trained token.", SUPERVISED, needs=_UNTRAINED
    )
    window_tokens: int | None = None
    max_segments_per_row: Count | None = option(
        None, "Close a row that has N segments.", ROWS, most=MAX_LENGTH_LIMIT
    )
    segment_multiple: Count = option(
        1, "Pad every segment, inside its row, to a multiple of N tokens.", ROWS
    )
    label_shift: str = option(
        "none",
        "Who shifts labels by one:",
        OUTPUT,
        choices={"none": "the model does", "pre": "packer, inside segments"},
    )
    view: bool = option(
        False,
        "Write rows as references to tokenized directories: no tokens, ready in seconds.",
        OUTPUT,
    )
    balance: str = option(
        "none",
        "What is evened out between rows:",
        ROWS,
        choices={"none": "", "attention": "the sum of squared segment lengths"},
    )
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        # which nobody asks for by name
        padded = (PADDED_BOUNDARIES,) if self.segment_multiple > 1 else ()
        unasked = padded + (PAIR_COLUMNS if self.has_pairs else ())
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
            object.__setattr__(self, "window_tokens", tokens)

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        strategy = self.strategy
        yield from _row_rules(**{name: getattr(self, name) for name in _OF_ROWS})
        yield (
            not {*REQUIRED_COLUMNS} <= {*self.columns},
            f"--columns: {' and '.join(REQUIRED_COLUMNS)} are needed",
            "rows are not readable without them",
        )
        window = self.window_tokens
        yield window is not None and window < 1, f"window_tokens: {window} is not positive", ""
        yield (
            strategy == "wrap" and self.overlong not in (None, "split"),
            f"--overlong: {self.overlong} has no meaning with --strategy wrap",
            "wrap cuts documents at the edges of rows, whatever their length",
        )
        yield (
            self.shuffle and keeps_order(strategy),
            f"--shuffle: would undo what --strategy {strategy} is for, rows in input order",
            "leave it out, or choose another strategy; most trainers shuffle rows themselves",
        )

    @property
    def least_unit_tokens(self) -> int:
        """A thousand rows, so that the unfilled last one is noise; a view's are small."""
        rows = _ROWS_PER_UNIT * self.max_length
        return max(rows, _VIEW_TOKENS) if self.view else rows

    @property
    def has_pairs(self) -> bool:
        """Whether the records are of preference, as `for_shape` says."""
        return {*PAIR_COLUMNS} <= {*self.columns}

    @property
    def documents_shuffled(self) -> bool:
        return bool(self.shuffle)

    @property
    def shortens_conversations(self) -> bool:
        return self.overlong == "truncate-turns"

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"columns": list(self.columns)}


_OF_ROWS = (
    "strategy", "max_length", "max_segments_per_row", "segment_multiple", "balance",
)  # fmt: skip
_ANOTHER = "choose another strategy, such as best-fit"
_UNLIMITED = {
    "wrap": "wrap fills every row to its end, whatever the number of segments",
    "mffd": "with a limit mffd would not keep within 71/60 of the fewest rows",
}
_UNBALANCED = {
    "next-fit": "next-fit keeps the order of documents",
    "wrap": "wrap keeps the order of documents",
    "harmonic": "harmonic puts documents of similar length together",
}


def _row_rules(
    strategy: str,
    max_length: int,
    max_segments_per_row: int | None,
    segment_multiple: int,
    balance: str,
) -> Iterator[Rule]:
    yield (
        max_segments_per_row is not None and strategy in _UNLIMITED,
        f"--max-segments-per-row: {_UNLIMITED.get(strategy)}",
        _ANOTHER,
    )
    rest = max_length % segment_multiple
    yield (
        rest,
        f"--segment-multiple: --max-length {max_length} is not a multiple of {segment_multiple}",
        f"use {max_length - rest or segment_multiple} tokens a row",
    )
    yield (
        balance != "none" and strategy in _UNBALANCED,
        f"--balance: {_UNBALANCED.get(strategy)}, exchanges would undo it",
        _ANOTHER,
    )


def check_row_options(**values: Any) -> None:
    """UsageError where options of rows, given to a function by their fields, do not go together."""
    try:
        options = options_of(PackConfig)
        checked = {name: options[name].checked(name, value) for name, value in values.items()}
        refuse(_row_rules(**checked))
    except UsageError as error:
        raise in_terms_of_fields(error) from None
