"""Every option that changes the bytes of the result, in one frozen object.

Two runs with equal `PackConfig`, tokenizer and inputs write identical files. Options that
do not change bytes (workers, progress, engine) are `RunOptions`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

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
    options_of,
    plain,
    settle,
)
from packer_cli.config.shapes import KINDS, Shape, check_fields
from packer_cli.config.shapes import OTHER_NAMES as SHAPE_NAMES
from packer_cli.config.strategies import BY_ALIAS, NAMES, keeps_order
from packer_cli.errors import UsageError, one_of

MAX_LENGTH_LIMIT = 1 << 24
COLUMNS = ("input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids")
DEFAULT_COLUMNS = COLUMNS[:5]
PADDED_BOUNDARIES = "cu_seqlens_padded"  # written exactly when there is a segment multiple
BALANCES = ("none", "attention")
REQUIRED_COLUMNS = ("input_ids", "cu_seqlens")
_UNLIMITED = {
    "wrap": "wrap fills every row to its end, whatever the number of segments",
    "mffd": "with a limit mffd would not keep within 71/60 of the fewest rows",
}
_UNBALANCED = {
    "next-fit": "next-fit keeps the order of documents, exchanges would undo it",
    "wrap": "wrap keeps the order of documents, exchanges would undo it",
    "harmonic": "harmonic puts documents of similar length together, exchanges would undo it",
}

MIB, GIB = 1 << 20, 1 << 30
SECONDS_PER_RECORD = 60.0
_MOST_SECONDS = 1_000_000  # the kernel's timers take little more


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise one_of(option, value, allowed)


def check_row_options(
    strategy: str,
    max_length: int,
    max_segments: int | None,
    segment_multiple: int,
    balance: str,
    spelled: Callable[[str], str],
) -> None:
    """UsageError when these cannot be had together. `spelled`: a name as its user wrote it."""
    name = spelled("max_segments_per_row")
    if max_segments is not None:
        if not 1 <= max_segments <= MAX_LENGTH_LIMIT:
            raise UsageError(f"{name}: {max_segments} is not between 1 and {MAX_LENGTH_LIMIT}")
        if strategy in _UNLIMITED:
            raise UsageError(
                f"{name}: {_UNLIMITED[strategy]}", "choose another strategy, such as best-fit"
            )
    name = spelled("segment_multiple")
    if segment_multiple < 1:
        raise UsageError(f"{name}: {segment_multiple} is not positive")
    if max_length % segment_multiple:
        raise UsageError(
            f"{name}: {spelled('max_length')} {max_length} is not a multiple of {segment_multiple}",
            f"use {max_length - max_length % segment_multiple or segment_multiple} tokens a row",
        )
    _one_of(spelled("balance"), balance, BALANCES)
    if balance != "none" and strategy in _UNBALANCED:
        raise UsageError(
            f"{spelled('balance')}: {_UNBALANCED[strategy]}",
            "choose another strategy, such as best-fit",
        )


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

    Beyond what --help says of them:

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
        Option(
            "Train on turns that the chat template ends in nothing.", SUPERVISED, needs=_MESSAGES
        ),
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

    def refuse_idle(self, shape: Shape) -> None:
        """UsageError for an option that was given and means nothing for records of this shape."""
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        for name, option in options_of(PackConfig).items():
            given = getattr(self, name) != defaults[name]
            if given and option.needs and not option.needs.is_met(shape, self):
                raise UsageError(
                    f"{option.name(name)}: is for {option.needs.what}; the records' shape is "
                    f"{shape.kind}",
                    "leave it out, or name what the records are with --shape and --field",
                )

    def for_shape(self, shape: Shape) -> PackConfig:
        """With every option set that depends on the shape of the records.

        Raises UsageError when the options do not go with the shape.
        """
        supervised = shape.is_supervised
        train_on = self.train_on or shape.train_on[0]
        if train_on not in shape.train_on:
            raise UsageError(
                f"--train-on: {train_on} is not for records of shape {shape.kind}",
                f"choose {' or '.join(shape.train_on)}",
            )
        overlong = self.overlong or ("drop" if supervised else "split")
        if supervised and self.strategy == "wrap":
            overlong = "split"
        if supervised and overlong == "split" and not self.force_split:
            raise UsageError(
                f"records of shape {shape.kind} are not to be cut: a part would be trained on "
                "without what it answers",
                "choose --overlong drop, truncate or truncate-turns, or insist with --force-split",
            )
        if overlong == "truncate-turns" and not shape.is_chat:
            raise UsageError(
                f"--overlong: truncate-turns is for messages, the records are {shape.kind}",
                "choose drop or truncate",
            )
        if "" in self.turn_end:
            raise UsageError("--turn-end: is empty", "name a token, such as <|im_end|>")
        if self.turn_end and train_on == "all":
            raise UsageError("--turn-end: is for --train-on assistant, not all", "leave it out")
        templates = shape.prompt_templates
        prompt_template = self.prompt_template or templates[0]
        if prompt_template not in templates:
            raise UsageError(
                f"--prompt-template: {prompt_template} is not for records of shape {shape.kind}",
                f"choose {' or '.join(templates)}",
            )
        if self.turn_end and not shape.is_chat and prompt_template != "chat":
            raise UsageError(
                f"--turn-end: records of shape {shape.kind} have no turns without a chat template",
                "leave it out, or give --prompt-template chat",
            )
        if shape.kind == "tokens" and (self.add_bos or self.add_eos or self.separator):
            raise UsageError(
                "--bos, --eos and --separator are not for input_ids, which are packed as they are",
                "leave them out, or put the tokens into the input",
            )
        # a chat template writes BOS and the ends of turns itself
        as_they_are = shape.is_chat or prompt_template == "chat" or shape.kind == "tokens"
        return dataclasses.replace(
            self,
            train_on=train_on,
            overlong=overlong,
            prompt_template=prompt_template,
            add_bos=False if as_they_are and self.add_bos is None else self.add_bos,
            add_eos=not as_they_are if self.add_eos is None else self.add_eos,
        )

    @property
    def renamed(self) -> dict[str, str]:
        """`fields` as a dict."""
        return dict(self.fields)

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"columns": list(self.columns)}


@dataclass(frozen=True)
class RunOptions:
    """Options that change how a run goes, never what it writes.

    Beyond what --help says of them:

    max_seconds_per_record  longer may find fewer bad records, and changes no other
    add                an update that keeps the inputs which are not named, as they are packed
    progress           show progress on stderr
    rank, world_size   pack every world_size-th unit only, as one of so many processes
    """

    workers: Annotated[
        int,
        Option(
            "Work units at a time. Default: as many as cores.",
            RUNNING,
            first=9,
            value="count",
            least=0,
            elsewhere=("--num-workers", "--num-proc", "--jobs", "--threads"),
        ),
    ] = 0
    max_seconds_per_record: Annotated[
        float,
        Option(
            "Processor time to render a record; one that needs more is bad.",
            RUNNING,
            metavar="SECONDS",
        ),
    ] = SECONDS_PER_RECORD
    tokenizer_backend: Annotated[
        str,
        Option(
            "What encodes; it never changes the result:",
            RUNNING,
            metavar="NAME",
            choices=plain(("auto", "gigatoken", "tokenizers")),
        ),
    ] = "auto"
    overwrite: Annotated[
        bool,
        Option(
            "Replace an earlier result in the output.", OUTPUT, first=10, elsewhere=("--force",)
        ),
    ] = False
    update: Annotated[
        bool,
        Option(
            "Pack only inputs that are new or have changed. All others must be named, too: see "
            "--add and --prune.",
            OUTPUT,
        ),
    ] = False
    add: Annotated[
        bool,
        Option(
            "Add these inputs to the result, if there is one; those that it has already and that "
            "are not named stay as they are packed, even if their files are gone.",
            OUTPUT,
            elsewhere=("--append",),
        ),
    ] = False
    prune: Annotated[
        bool, Option("With --update: drop the documents of inputs that are not named.", OUTPUT)
    ] = False
    checksum: Annotated[
        bool,
        Option(
            "With --update or --add: compare contents of files, not when they were changed.", OUTPUT
        ),
    ] = False
    no_lock: Annotated[
        bool,
        Option("Go on where the file system has no locks; let no other run write there.", RUNNING),
    ] = False
    progress: bool = True
    engine: Annotated[
        str,
        Option(
            "What runs the work units:",
            RUNNING,
            metavar="NAME",
            choices={"local": "this machine", "ray": "a task per unit on a Ray cluster"},
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        Option(
            "Address of a Ray cluster that runs. Default: Ray's own choice.",
            RUNNING,
            metavar="ADDRESS",
        ),
    ] = None
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        settle(self)
        if self.ray_address is not None and self.engine != "ray":
            raise UsageError("--ray-address: is for --engine ray")
        if (self.rank is None) != (self.world_size is None):
            raise UsageError("--rank and --world-size: one is nothing without the other")
        if self.rank is not None and self.world_size is not None:
            if not 0 <= self.rank < self.world_size:
                raise UsageError(
                    f"--rank: {self.rank} is not between 0 and {self.world_size - 1}",
                    "ranks are counted from 0",
                )
            if self.overwrite or self.update or self.add or self.engine != "local":
                raise UsageError(
                    "--rank: does not go with --overwrite, --update, --add or --engine ray",
                    "give the ranks an --output of their own, and put it in place afterwards",
                )
        if not 0 < self.max_seconds_per_record <= _MOST_SECONDS:
            raise UsageError(
                f"--max-seconds-per-record: {self.max_seconds_per_record:g} is not between "
                f"0 and {_MOST_SECONDS}",
                "a record takes milliseconds; the default is 60",
            )
        self._check_update()
        if self.workers == 0:
            object.__setattr__(self, "workers", len(os.sched_getaffinity(0)))

    def _check_update(self) -> None:
        name = "--add" if self.add else "--update"
        if self.add and self.prune:
            raise UsageError(
                "--add and --prune: one keeps the inputs that are not named, the other drops them",
                "leave one of them out",
            )
        object.__setattr__(self, "update", self.update or self.add)
        if self.update and self.overwrite:
            raise UsageError(f"{name} and --overwrite: one keeps what the other replaces")
        for option, given in (("--checksum", self.checksum), ("--prune", self.prune)):
            if given and not self.update:
                raise UsageError(f"{option}: is for --update", "leave it out, or add --update")

    @property
    def unnamed(self) -> str:
        """What becomes of an earlier result's inputs that are not named: "kept", "dropped", or
        the run is "refused".
        """
        if self.add:
            return "kept"
        # ranks only ask whether they are at work on what is finished already
        return "dropped" if self.prune or self.as_rank else "refused"

    @property
    def as_rank(self) -> tuple[int, int] | None:
        """(rank, world_size) of one of several processes, None to the only one."""
        if self.rank is None or self.world_size is None:
            return None
        return self.rank, self.world_size
