"""Every option that changes the bytes of the result, in one frozen object.

Two runs with equal `PackConfig`, tokenizer and inputs write identical files. Options that do not
change bytes (workers, progress, engine) are in `run_options`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from packer_cli.config.columns import COLUMNS, DEFAULT_COLUMNS, PADDED_BOUNDARIES, REQUIRED_COLUMNS
from packer_cli.config.formats import FORMATS
from packer_cli.config.option import (
    DOCUMENTS,
    INPUT,
    OUTPUT,
    ROWS,
    RUNNING,
    SUPERVISED,
    Need,
    Option,
    as_option,
    plain,
    settle,
)
from packer_cli.config.row_rules import MAX_LENGTH_LIMIT, check_row_options
from packer_cli.config.shapes import KINDS, Shape, check_fields
from packer_cli.config.shapes import OTHER_NAMES as SHAPE_NAMES
from packer_cli.config.strategies import BY_ALIAS, NAMES, keeps_order
from packer_cli.errors import UsageError

MIB, GIB = 1 << 20, 1 << 30


def _of_messages(shape: Shape, config: PackConfig) -> bool:
    return shape.is_chat or shape.of_messages or config.prompt_template == "chat"


_MESSAGES = Need("messages, which a chat template renders", _of_messages)
_SUPERVISED = Need("messages, prompts and instructions", lambda shape, config: shape.is_supervised)
_UNTRAINED = Need("records that say what is trained on", lambda shape, config: shape.kind != "text")
_TEXT = Need("records with text", lambda shape, config: shape.kind != "tokens")


@dataclass(frozen=True)
class PackConfig:
    """Options that change the result's bytes; recorded in the manifest as `config`.

    Raises UsageError from the constructor when a value cannot work.

    Beyond what --help says:

    shuffle           None: on, except for strategies that keep the input order
    overlong          None: "split" for text and tokens, "drop" for supervised shapes
    max_errors        a number of records, or a share of them (float)
    columns           in the order of the format
    fields            (a shape's own name of a field, its name in the input), where they differ
    chat_template     its source
    turn_end          also written after the last turn
    add_bos, add_eos  None: as the tokenizer does, with EOS; not around what a chat template
                      rendered
    window_tokens     tokens that one plan considers together; None: by `max_length`
    shard_bytes       a unit's shard is continued in a new part beyond this size
    segment_multiple  above 1 the column cu_seqlens_padded says where segments begin
    """

    max_length: Annotated[
        int,
        Option(
            "Tokens in a packed row: 4096, or 4k.",
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
            "Seed of the shuffle of rows, and of segments in a row.",
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
    shape: Annotated[
        str | None,
        Option(
            "What the records are:",
            INPUT,
            metavar="SHAPE",
            choices=plain(KINDS),
            unset="by the fields of the first record",
            aliases=SHAPE_NAMES,
            elsewhere=("--dataset-type", "--data-format"),
        ),
    ] = None
    fields: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "Where a field of the shape is: messages=chosen. May be repeated.",
            INPUT,
            flag="--field",
            metavar="NAME=COLUMN",
            value="fields",
        ),
    ] = ()
    input_format: Annotated[
        str | None,
        Option(
            "What the files are:",
            INPUT,
            metavar="FORMAT",
            choices=plain(FORMATS),
            unset="by file name",
            aliases={"json": "jsonl", "jsonlines": "jsonl", "ndjson": "jsonl", "txt": "text",
                     "feather": "arrow"},
        ),
    ] = None  # fmt: skip
    sample_by: Annotated[
        str,
        Option(
            "What a document of a plain text file is:",
            INPUT,
            metavar="PART",
            choices=plain(("line", "paragraph", "document")),
            aliases={"lines": "line", "file": "document", "whole": "document"},
        ),
    ] = "line"
    chat_template: Annotated[
        str | None,
        Option(
            "Template that renders messages. Default: the tokenizer's own.",
            SUPERVISED,
            first=5,
            metavar="FILE|NAME",
            needs=_MESSAGES,
        ),
    ] = None
    prompt_template: Annotated[
        str | None,
        Option(
            "How prompts become text:",
            SUPERVISED,
            metavar="NAME",
            choices={"none": "as they are", "alpaca": "", "chat": ""},
            unset="by the shape of the records",
        ),
    ] = None
    train_on: Annotated[
        str | None,
        Option(
            "Which tokens are trained on:",
            SUPERVISED,
            first=6,
            metavar="WHAT",
            choices={
                "assistant": "the default for messages",
                "last-assistant": "",
                "completion": "the default for prompts",
                "all": "the default for text",
            },
            aliases={
                "last": "last-assistant",
                "last-turn": "last-assistant",
                "assistant-only": "assistant",
                "assistants": "assistant",
                "response": "completion",
                "completion-only": "completion",
                "full": "all",
            },
            elsewhere=("--loss-on", "--train-on-inputs", "--assistant-only-loss"),
        ),
    ] = None
    turn_end: Annotated[
        tuple[str, ...],
        Option(
            "Ends the assistant's turns: trained on where it follows one. May be repeated.",
            SUPERVISED,
            metavar="TOKEN",
        ),
    ] = ()
    allow_open_turns: Annotated[
        bool,
        Option("Train on turns that the chat template does not end.", SUPERVISED, needs=_MESSAGES),
    ] = False
    keep_untrained: Annotated[
        bool, Option("Keep documents without a trained token.", SUPERVISED, needs=_UNTRAINED)
    ] = False
    add_bos: Annotated[
        bool | None,
        Option(
            "Whether each document begins with BOS. Default: as the tokenizer does.",
            DOCUMENTS,
            flag="--bos/--no-bos",
            elsewhere=("--add-bos", "--add-bos-token"),
        ),
    ] = None
    add_eos: Annotated[
        bool | None,
        Option(
            "Whether each document ends with EOS. Default: yes, but chat templates end turns "
            "themselves.",
            DOCUMENTS,
            flag="--eos/--no-eos",
            elsewhere=("--add-eos", "--append-eod", "--append-eos", "--add-eos-token"),
        ),
    ] = None
    separator: Annotated[
        str | None,
        Option("Text after each document, never trained on.", DOCUMENTS, metavar="TEXT"),
    ] = None
    eos_token: Annotated[
        str | None,
        Option("The EOS, where the tokenizer does not name one.", DOCUMENTS, metavar="TOKEN"),
    ] = None
    special_tokens_in_text: Annotated[
        str,
        Option(
            "What becomes of special tokens that a record's content spells out:",
            DOCUMENTS,
            metavar="POLICY",
            choices={"keep": "", "text": "ordinary text", "error": "a bad record"},
            needs=_TEXT,
        ),
    ] = "keep"
    on_error: Annotated[
        str,
        Option(
            "What a bad record does:",
            INPUT,
            metavar="WHAT",
            choices={"fail": "end the run", "skip": "go to rejected.jsonl"},
        ),
    ] = "fail"
    max_errors: Annotated[
        int | float | None,
        Option(
            "Fail when more records are bad: 100, or 1% of all.",
            INPUT,
            metavar="N|SHARE",
            value="count or share",
        ),
    ] = None
    max_line_bytes: Annotated[
        int, Option("Longest line, cell or text document accepted.", INPUT, value="size", least=1)
    ] = 256 * MIB
    unit_bytes: Annotated[
        int | None,
        Option(
            "Input bytes in a work unit. Default: by the size of the input.",
            RUNNING,
            value="size",
            least=1,
        ),
    ] = None
    window_tokens: int | None = None
    shard_bytes: Annotated[int, Option("Longest shard, about.", OUTPUT, value="size", least=1)] = (
        GIB
    )
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
    balance: Annotated[
        str,
        Option(
            "What is evened out between rows:",
            ROWS,
            metavar="WHAT",
            choices={"none": "", "attention": "the sum of squared segment lengths"},
        ),
    ] = "none"

    def __post_init__(self) -> None:
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
            "columns": tuple(name for name in COLUMNS if name in self.columns)
            + self._padded_boundaries,
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
        if self._padded_boundaries:  # which nobody asks for by name
            given = tuple(name for name in self.columns if name != PADDED_BOUNDARIES)
            object.__setattr__(self, "columns", given)
        settle(self)
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed: {self.seed} is not between 0 and 2**63 - 1")
        check_fields(self.renamed)
        missing = [name for name in REQUIRED_COLUMNS if name not in self.columns]
        if missing:
            raise UsageError(
                f"--columns: {', '.join(missing)} missing",
                "rows are not readable without input_ids and cu_seqlens; add them",
            )
        if self.window_tokens is not None and self.window_tokens < 1:
            raise UsageError(f"window_tokens: {self.window_tokens} is not positive")
        if self.max_errors is not None:
            if self.on_error != "skip":
                raise UsageError(
                    "--max-errors: is for --on-error skip", "without it, the first one ends the run"
                )
            if self.max_errors < 0 or (isinstance(self.max_errors, float) and self.max_errors > 1):
                raise UsageError(
                    f"--max-errors: {self.max_errors} is neither a number nor a share of records",
                    "for example 100, or 0.01 for 1% of all records",
                )

    @property
    def renamed(self) -> dict[str, str]:
        """`fields` as a dict."""
        return dict(self.fields)

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"columns": list(self.columns)}
