"""Every option that changes the bytes of the result, in one frozen object.

Two runs with equal `PackConfig`, tokenizer and inputs write identical files. Options that
do not change bytes (workers, progress, engine) are `RunOptions`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

from packer_cli.config.formats import FORMATS
from packer_cli.config.shapes import Shape, check_options
from packer_cli.config.strategies import canonical_name, keeps_order
from packer_cli.errors import UsageError, one_of

MAX_LENGTH_LIMIT = 1 << 24
COLUMNS = ("input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids")
DEFAULT_COLUMNS = COLUMNS[:5]
PADDED_BOUNDARIES = "cu_seqlens_padded"  # written exactly when there is a segment multiple
BALANCES = ("none", "attention")
REQUIRED_COLUMNS = ("input_ids", "cu_seqlens")
_CHOICES = {
    "label_shift": ("none", "pre"),
    "overlong": ("split", "truncate", "truncate-turns", "drop", "error"),
    "truncate_side": ("right", "left"),
    "train_on": ("assistant", "last-assistant", "completion", "all"),
    "prompt_template": ("none", "alpaca", "chat"),
    "on_error": ("fail", "skip"),
    "special_tokens_in_text": ("keep", "text", "error"),
    "sample_by": ("line", "paragraph", "document"),
    "input_format": tuple(FORMATS),
}
_UNLIMITED = {
    "wrap": "wrap fills every row to its end, whatever the number of segments",
    "mffd": "with a limit mffd would not keep within 71/60 of the fewest rows",
}
_UNBALANCED = {
    "next-fit": "next-fit keeps the order of documents, exchanges would undo it",
    "wrap": "wrap keeps the order of documents, exchanges would undo it",
    "harmonic": "harmonic puts documents of similar length together, exchanges would undo it",
}

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
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


def _as_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class PackConfig:
    """Options that change the result's bytes; recorded in the manifest as `config`.

    Raises UsageError from the constructor when a value cannot work.

    max_length        tokens in a row, 1..2**24
    strategy          a name or alias from `strategies.py`
    seed              of the shuffle of rows and of segments in a row, 0..2**63-1
    shuffle           None: on, except for strategies that keep the input order
    overlong          what happens to documents longer than a row; None: "split" for text and
                      tokens, "drop" for supervised shapes
    force_split       let "split" cut supervised documents
    truncate_side     where "truncate" cuts: "right" keeps the beginning, "left" the end
    max_errors        a run that rejects more records fails: a number, or a share of them (float)
    max_loss          a run that truncates or drops more than this share of the tokens fails
    columns           which columns are written, in the order of the format
    shape             the shape of the records; None: by the fields of the first one
    fields            (a shape's own name of a field, its name in the input), where they differ
    input_format      None: by file name
    sample_by         what one document is in a plain text file
    chat_template     source of the template that renders messages, when one is needed
    prompt_template   how a prompt or an instruction becomes text: "none", "alpaca" or "chat";
                      None: by the shape
    train_on          "assistant", "last-assistant", "completion" or "all"; None: by the shape
    turn_end          tokens that end the assistant's turns where they follow one, and after the
                      last one
    allow_open_turns  train on turns that the chat template ends in nothing
    keep_untrained    keep documents without a trained token
    add_bos, add_eos  put the tokenizer's BOS or EOS around every document that lacks it; None: as
                      the tokenizer does, with EOS; not around what a chat template rendered
    separator         text after every document, never trained on
    eos_token         the EOS, where the tokenizer does not say
    special_tokens_in_text  what becomes of special tokens that a record's own content spells out:
                      "keep" them, make ordinary "text" of them, or "error": it is a bad record
    on_error          a bad record ends the run ("fail") or goes to rejected.jsonl ("skip")
    max_line_bytes    longest line, cell, paragraph or text document accepted
    unit_bytes        input bytes in a work unit; None: by the size of the input
    window_tokens     tokens that one plan considers together
    shard_bytes       a unit's shard is continued in a new part beyond this size
    max_segments_per_row  a row that has as many is closed; None: any number
    segment_multiple  every segment is padded inside its row to a multiple of this; above 1 the
                      column cu_seqlens_padded says where segments begin
    balance           "attention": segments are exchanged between equally full rows until the
                      sums of squared segment lengths are about even; "none"
    label_shift       "pre": labels are shifted inside their segments; "none": the model shifts
    """

    max_length: int
    strategy: str = "best-fit"
    seed: int = 0
    shuffle: bool | None = None
    overlong: str | None = None
    force_split: bool = False
    truncate_side: str = "right"
    max_loss: float | None = None
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    shape: str | None = None
    fields: tuple[tuple[str, str], ...] = ()
    input_format: str | None = None
    sample_by: str = "line"
    chat_template: str | None = None
    prompt_template: str | None = None
    train_on: str | None = None
    turn_end: tuple[str, ...] = ()
    allow_open_turns: bool = False
    keep_untrained: bool = False
    add_bos: bool | None = None
    add_eos: bool | None = None
    separator: str | None = None
    eos_token: str | None = None
    special_tokens_in_text: str = "keep"
    on_error: str = "fail"
    max_errors: int | float | None = None
    max_line_bytes: int = 256 * MIB
    unit_bytes: int | None = None
    window_tokens: int | None = None
    shard_bytes: int = GIB
    max_segments_per_row: int | None = None
    segment_multiple: int = 1
    label_shift: str = "none"
    balance: str = "none"

    def __post_init__(self) -> None:
        self._check()
        strategy = canonical_name(self.strategy)
        check_row_options(
            strategy,
            self.max_length,
            self.max_segments_per_row,
            self.segment_multiple,
            self.balance,
            _as_option,
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
            "strategy": strategy,
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
        if not 1 <= self.max_length <= MAX_LENGTH_LIMIT:
            raise UsageError(
                f"--max-length: {self.max_length} is not between 1 and {MAX_LENGTH_LIMIT}",
                "use the context length of the model that will train, for example 4096",
            )
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed: {self.seed} is not between 0 and 2**63 - 1")
        check_options(self.shape, self.renamed)
        for name, allowed in _CHOICES.items():
            if (chosen := getattr(self, name)) is not None:
                _one_of(f"--{name.replace('_', '-')}", chosen, allowed)
        for name in self.columns:
            _one_of("--columns", name, COLUMNS + self._padded_boundaries)
        missing = [name for name in REQUIRED_COLUMNS if name not in self.columns]
        if missing:
            raise UsageError(
                f"--columns: {', '.join(missing)} missing",
                "rows are not readable without input_ids and cu_seqlens; add them",
            )
        for option in ("max_line_bytes", "shard_bytes", "unit_bytes", "window_tokens"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"--{option.replace('_', '-')}: {value} is not positive")
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
        if self.max_loss is not None and not 0 <= self.max_loss <= 1:
            raise UsageError(f"--max-loss: {self.max_loss} is not between 0 and 1", "1% is 0.01")

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

    workers            work units packed at the same time
    max_seconds_per_record  of processor time for rendering a record; beyond it is bad. Longer
                       may find fewer bad records, and changes no other
    tokenizer_backend  "auto", "gigatoken" or "tokenizers"
    overwrite          replace an earlier result in the output directory
    update             bring it up to date: pack only what is new or has changed
    add                an update that keeps the inputs which are not named, as they are packed
    prune              let an update drop the inputs which are not named
    checksum           tell changed inputs by their contents, not by size and time of change
    no_lock            go on where the file system has no locks
    progress           show progress on stderr
    engine             "local": threads of this process; "ray": tasks of a Ray cluster
    ray_address        of a cluster that runs already; None: one is started
    rank, world_size   pack every world_size-th unit only, as one of so many processes
    """

    workers: int = 0
    max_seconds_per_record: float = SECONDS_PER_RECORD
    tokenizer_backend: str = "auto"
    overwrite: bool = False
    update: bool = False
    add: bool = False
    prune: bool = False
    checksum: bool = False
    no_lock: bool = False
    progress: bool = True
    engine: str = "local"
    ray_address: str | None = None
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        _one_of("--engine", self.engine, ("local", "ray"))
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
        _one_of("--tokenizer-backend", self.tokenizer_backend, ("auto", "gigatoken", "tokenizers"))
        if not 0 < self.max_seconds_per_record <= _MOST_SECONDS:
            raise UsageError(
                f"--max-seconds-per-record: {self.max_seconds_per_record:g} is not between "
                f"0 and {_MOST_SECONDS}",
                "a record takes milliseconds; the default is 60",
            )
        if self.workers < 0:
            raise UsageError(f"--workers: {self.workers} is negative")
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
