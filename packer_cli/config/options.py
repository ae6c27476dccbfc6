"""Every option that changes the bytes of a packed directory, in one frozen object.

Two runs with equal `PackConfig`, tokenizer and inputs write identical files. What concerns
documents rather than rows is in `documents`; options that do not change bytes (workers, progress,
engine) are in `run_options`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from packer_cli.config.columns import (
    COLUMNS,
    DEFAULT_COLUMNS,
    PADDED_BOUNDARIES,
    PAIR_COLUMNS,
    REQUIRED_COLUMNS,
)
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.mixture import Mixture
from packer_cli.config.option import (
    DOCUMENTS,
    OUTPUT,
    ROWS,
    SUPERVISED,
    Need,
    Option,
    as_option,
    plain,
)
from packer_cli.config.row_rules import MAX_LENGTH_LIMIT, check_row_options
from packer_cli.config.strategies import BY_ALIAS, NAMES, keeps_order
from packer_cli.errors import UsageError

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

    max_length: Annotated[
        int,
        Option(
            "Tokens in a packed row: 4096, or 4k, which is the same.",
            ROWS,
            first=1,
            short="-l",
            value="count",
            least=1,
            most=MAX_LENGTH_LIMIT,
            elsewhere=(
                "--seq-len", "--seq-length", "--sequence-length", "--max-seq-len",
                "--max-seq-length", "--block-size", "--context-length", "--cutoff-len",
            ),
        ),
    ]  # fmt: skip
    strategy: Annotated[
        str,
        Option(
            "How documents are put into rows:",
            ROWS,
            first=8,
            metavar="NAME",
            choices=plain(NAMES),
            aliases=BY_ALIAS,
            elsewhere=("--packing-strategy", "--packing", "--algorithm"),
        ),
    ] = "best-fit"
    seed: Annotated[
        int,
        Option(
            "Seed of the order of documents, of rows, and of segments in a row.",
            ROWS,
            metavar="N",
            value="count",
        ),
    ] = 0
    shuffle: Annotated[
        bool | None,
        Option(
            "Whether rows are shuffled. Default: yes, but next-fit and wrap keep the input order.",
            ROWS,
            flag="--shuffle/--no-shuffle",
        ),
    ] = None
    overlong: Annotated[
        str | None,
        Option(
            "What becomes of documents longer than a row:",
            DOCUMENTS,
            first=7,
            metavar="HOW",
            choices={
                "split": "the default for text",
                "truncate": "",
                "truncate-turns": "drop the oldest turns",
                "drop": "the default for messages and prompts",
                "split-text": "split what is trained on throughout, drop the rest: the default for "
                "both together",
                "error": "",
            },
            elsewhere=("--truncation", "--truncate", "--on-overlong"),
        ),
    ] = None
    force_split: Annotated[
        bool,
        Option("Let --overlong split cut messages and prompts, too.", DOCUMENTS, needs=_SUPERVISED),
    ] = False
    truncate_side: Annotated[
        str,
        Option(
            "Where --overlong truncate cuts:",
            DOCUMENTS,
            metavar="SIDE",
            choices={"right": "keep the beginning", "left": "keep the end"},
            elsewhere=("--truncation-side",),
        ),
    ] = "right"
    max_loss: Annotated[
        float | None,
        Option(
            "Exit 1 when more of the tokens were truncated or dropped: 0.01 or 1%.",
            DOCUMENTS,
            value="share",
            least=0,
            most=1,
        ),
    ] = None
    columns: Annotated[
        tuple[str, ...],
        Option(
            "Columns to write, with commas between:",
            OUTPUT,
            metavar="NAMES",
            choices=plain(COLUMNS),
            unset="all but position_ids",
            value="list",
        ),
    ] = DEFAULT_COLUMNS
    keep_untrained: Annotated[
        bool, Option("Keep documents without a trained token.", SUPERVISED, needs=_UNTRAINED)
    ] = False
    window_tokens: int | None = None
    max_segments_per_row: Annotated[
        int | None,
        Option("Close a row that has N segments.", ROWS, value="count"),
    ] = None
    segment_multiple: Annotated[
        int,
        Option(
            "Pad every segment, inside its row, to a multiple of N tokens.", ROWS, value="count"
        ),
    ] = 1
    label_shift: Annotated[
        str,
        Option(
            "Who shifts labels by one:",
            OUTPUT,
            metavar="WHEN",
            choices={"none": "the model does", "pre": "packer, inside segments"},
        ),
    ] = "none"
    view: Annotated[
        bool,
        Option(
            "Write rows as references to tokenized directories: no tokens, ready in seconds.",
            OUTPUT,
        ),
    ] = False
    balance: Annotated[
        str,
        Option(
            "What is evened out between rows:",
            ROWS,
            metavar="WHAT",
            choices={"none": "", "attention": "the sum of squared segment lengths"},
        ),
    ] = "none"
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        # which nobody asks for by name
        unasked = self._padded_boundaries + (PAIR_COLUMNS if self.has_pairs else ())
        given = tuple(name for name in self.columns if name not in unasked)
        object.__setattr__(self, "columns", given)
        super().__post_init__()
        self._check()
        strategy = self.strategy
        check_row_options(
            strategy,
            self.max_length,
            self.max_segments_per_row,
            self.segment_multiple,
            self.balance,
            as_option,
        )
        if strategy == "wrap" and self.overlong not in (None, "split"):
            raise UsageError(
                f"--overlong: {self.overlong} has no meaning with --strategy wrap",
                "wrap cuts documents at the edges of rows, whatever their length",
            )
        if self.shuffle and keeps_order(strategy):
            raise UsageError(
                f"--shuffle: would undo what --strategy {strategy} is for, rows in input order",
                "leave it out, or choose another strategy; most trainers shuffle rows themselves",
            )
        normal: dict[str, object] = {
            "columns": tuple(name for name in COLUMNS if name in self.columns) + unasked,
        }
        if self.shuffle is None:
            normal["shuffle"] = not keeps_order(strategy)
        if self.window_tokens is None:
            # A thousand rows leave best fit next to nothing to improve; four million tokens
            # keep the cost of a window's start and of its carried rows out of sight.
            normal["window_tokens"] = max(1 << 22, min(64 * self.max_length, 1 << 25))
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    @property
    def _padded_boundaries(self) -> tuple[str, ...]:
        return (PADDED_BOUNDARIES,) if self.segment_multiple > 1 else ()

    def _check(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed: {self.seed} is not between 0 and 2**63 - 1")
        missing = [name for name in REQUIRED_COLUMNS if name not in self.columns]
        if missing:
            raise UsageError(
                f"--columns: {', '.join(missing)} missing",
                "rows are not readable without input_ids and cu_seqlens; add them",
            )
        if self.window_tokens is not None and self.window_tokens < 1:
            raise UsageError(f"window_tokens: {self.window_tokens} is not positive")

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
