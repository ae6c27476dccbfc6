"""Options that concern inputs and documents: what is read, and what becomes tokens of it.

`packer tokenize` has these; `packer pack` has those of rows besides: see `options`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from packer_cli.errors import UsageError
from packer_cli.options.carried import Carried, carried_columns
from packer_cli.options.formats import FILE_FORMATS
from packer_cli.options.option import (
    Arguments,
    Count,
    Need,
    Options,
    Pairs,
    Rule,
    Share,
    Size,
    Whole,
    option,
)
from packer_cli.options.shapes import KINDS, MESSAGE_KEYS, OTHER_NAMES, TRACE, check_fields

MIB, GIB = 1 << 20, 1 << 30


MESSAGES = Need(
    "records that a chat template renders",
    lambda shape, config: shape.is_chat or shape.of_messages or config.prompt_template == "chat",
)
_TEMPLATED = Need(  # traces are compared with what it gives
    MESSAGES.what, lambda shape, config: shape.kind == TRACE or MESSAGES.is_met(shape, config)
)
_CONVERSATIONS = Need("chat records", lambda shape, config: shape.is_chat)
_KEYS = Need(
    "chat records if it names the role or content of messages",
    lambda shape, config: not config.message_keys or shape.is_chat or shape.of_messages,
)
_SPEAKERS = Need("chat records", lambda shape, config: shape.is_chat or shape.of_messages)
_TEXT = Need("records with text", lambda shape, config: not shape.is_of_tokens)
_TRACES = Need("traces", lambda shape, config: shape.kind == TRACE)
_PLAIN = Need("plain text", lambda shape, config: shape.kind == "text")


@dataclass(frozen=True, kw_only=True)
class DocumentConfig(Options):
    """Options that decide which documents there are, and which tokens they have.

    Raises UsageError from the constructor when a value cannot work.

    Beyond what --help says:

    max_errors        a number of records, or a share of them (float)
    fields            (own name of a field, or of a key of messages, its name in the input), where
                      they differ
    roles             (name of a speaker, its role), beyond those that are known
    chat_template     its source
    template_args     (name, value as JSON text), by name
    train_reasoning   None: unless only final answers are trained on
    train_tool_calls  None: yes
    turn_end          also written after the last turn
    add_bos, add_eos  None: as the tokenizer does, with EOS; not around what a chat template
                      rendered
    shard_bytes       a unit's shard is continued in a new part beyond this size
    carry             as `carried` says; for runs with /record or the like, as records have told
    carry_default     (name, JSON text)
    """

    shape: str | None = option(
        None,
        "What the records are:",
        metavar="SHAPE",
        choices=tuple(KINDS),
        unset="by the fields of each file's first record",
        aliases=OTHER_NAMES,
        elsewhere="--dataset-type --data-format",
    )
    fields: Pairs = option(
        (),
        "Where a field of the shape is: messages=chosen, or in messages: role=speaker. May be "
        "repeated.",
        flag="--field",
        metavar="NAME=COLUMN",
        needs=_KEYS,
    )
    roles: Pairs = option(
        (),
        "Which role a speaker of messages has: human=user. May be repeated.",
        flag="--role",
        metavar="NAME=ROLE",
        needs=_SPEAKERS,
        elsewhere="--roles",
    )
    input_format: str | None = option(
        None,
        "What the files are:",
        metavar="FORMAT",
        choices=FILE_FORMATS,
        unset="by file name",
        meant={"jsonl": ("jsonlines", "ndjson"), "text": ("txt",), "arrow": ("feather",)},
    )
    sample_by: str = option(
        "line",
        "What a document of a plain text file is:",
        choices=("line", "paragraph", "document"),
        meant={"document": ("file", "whole")},
    )
    chat_template: str | None = option(
        None,
        "Template that renders messages. Default: the tokenizer's own.",
        metavar="FILE|NAME",
        needs=_TEMPLATED,
    )
    template_args: Arguments = option(
        (),
        "Sets a variable of the chat template: enable_thinking=false. JSON, or else text. May "
        "be repeated.",
        flag="--template-arg",
        key="template_args",
        metavar="NAME=VALUE",
        needs=_TEMPLATED,
        elsewhere="--chat-template-kwargs --template-kwargs",
    )
    prompt_template: str | None = option(
        None,
        "How prompts become text:",
        choices={"none": "as they are", "alpaca": "", "chat": ""},
        unset="by the shape of the records",
    )
    train_on: str | None = option(
        None,
        "Which tokens are trained on:",
        choices={
            "assistant": "the default for messages",
            "last-assistant": "",
            "final": "answers without tool calls",
            "completion": "the default for prompts",
            "all": "the default for text",
        },
        meant={
            "last-assistant": ("last", "last-turn"),
            "completion": ("response",),
            "all": ("full",),
        },
        elsewhere="--loss-on --train-on-inputs --assistant-only-loss",
    )
    turns: str = option(
        "all",
        "What a conversation becomes:",
        choices={"all": "one document", "each": "one for each answer, as it is prompted for"},
        meant={"all": ("one",), "each": ("every",)},
        needs=_CONVERSATIONS,
    )
    train_reasoning: bool | None = option(
        None,
        "Whether reasoning is trained on. Default: yes, but not with --train-on final.",
        needs=MESSAGES,
    )
    train_tool_calls: bool | None = option(
        None, "Whether tool calls are trained on. Default: yes.", needs=MESSAGES
    )
    turn_end: tuple[str, ...] = option(
        (),
        "Ends the assistant's turns: trained on where it follows one. May be repeated.",
        metavar="TOKEN",
        needs=MESSAGES,
    )
    allow_open_turns: bool = option(
        False, "Train on turns that the chat template does not end.", needs=MESSAGES
    )
    on_unshown: str = option(
        "warn",
        "What happens to records that the chat template truncates:",
        choices={"warn": "counted", "error": "a bad record"},
        needs=MESSAGES,
    )
    add_bos: bool | None = option(
        None,
        "Whether each document begins with BOS. Default: as the tokenizer does.",
        flag="--bos/--no-bos",
        elsewhere="--add-bos --add-bos-token",
    )
    add_eos: bool | None = option(
        None,
        "Whether each document ends with EOS. Default: yes, but chat templates end turns "
        "themselves.",
        flag="--eos/--no-eos",
        elsewhere="--add-eos --append-eod --append-eos --add-eos-token",
    )
    eos_token: str | None = option(
        None, "The EOS, where the tokenizer does not name one.", metavar="TOKEN"
    )
    special_tokens_in_text: str = option(
        "keep",
        "What becomes of special tokens that a record's content spells out:",
        choices={"keep": "counted", "error": "a bad record"},
        needs=_TEXT,
    )
    fim_rate: Share = option(
        0.0, "Share of texts rearranged to fill in the middle: 0.5 or 50%.", needs=_PLAIN
    )
    fim_spm_rate: Share = option(
        0.5,
        "Share of these that have the suffix first.",
        needs=_PLAIN,
        goes_with=("fim_rate", None),
    )
    carry: tuple[str, ...] = option(
        (),
        "A field whose values follow a record, or each of its tokens, into rows: reward:float32, "
        "or topk:int32[8] for 8 values each. May be repeated.",
        metavar="NAME:TYPE",
    )
    carry_default: Arguments = option(
        (),
        "The value of --carry where a record or source has none. May be repeated.",
        metavar="NAME=VALUE",
    )
    min_reward: float | None = option(
        None, "Leave out traces with a lower reward.", metavar="X", needs=_TRACES
    )
    max_age: Whole | None = option(
        None,
        "Leave out traces during which the policy took more steps.",
        metavar="N",
        needs=_TRACES,
    )
    on_error: str = option(
        "fail",
        "What a bad record does:",
        choices={"fail": "end the run", "skip": "go to rejected.jsonl"},
    )
    max_errors: Count | Share | None = option(
        None,
        "Fail when more records are bad: 100, or 1% of all.",
        metavar="N|SHARE",
        goes_with=("on_error", "skip"),
    )
    unit_bytes: Size | None = option(
        None, "Input bytes in a work unit. Default: by the size of the input."
    )
    shard_bytes: Size = option(GIB, "Longest shard, about.")

    def _rules(self) -> Iterator[Rule]:
        check_fields(self.fields)
        self.arguments, self.carried  # noqa: B018 raise for those that cannot be read
        most = self.max_errors
        yield (
            most is not None and (most < 0 or (most > 1 and isinstance(most, float))),
            f"--max-errors: {most} is neither a number nor a share of records",
            "for example 100, or 0.01 for 1% of all records",
        )

    @property
    def carried(self) -> dict[str, Carried]:
        """The carried columns, by name."""
        return carried_columns(tuple(self.carry))

    @property
    def renamed(self) -> dict[str, str]:
        """The names in the input of fields of records, by their own."""
        return {own: name for own, name in self.fields if own not in MESSAGE_KEYS}

    @property
    def message_keys(self) -> dict[str, str]:
        """The names in the input of keys of messages, by their own."""
        return {own: name for own, name in self.fields if own in MESSAGE_KEYS}

    @property
    def arguments(self) -> dict[str, object]:
        """`template_args` as a dict of values. UsageError for text that is not JSON."""
        values: dict[str, object] = {}
        for name, text in self.template_args:
            try:
                values[name] = json.loads(text)
            except (ValueError, RecursionError):
                raise UsageError(f"--template-arg: {name}: {text!r} is not JSON") from None
        return values

    @property
    def trains_reasoning(self) -> bool:
        """Whether the assistant's reasoning is trained on, where the assistant is."""
        return self.train_on != "final" if self.train_reasoning is None else self.train_reasoning

    @property
    def trains_all_parts(self) -> bool:
        """Whether all kinds of what the assistant says are trained on."""
        return self.trains_reasoning and self.train_tool_calls is not False

    @property
    def whole_files(self) -> bool:
        """Whether each file of plain text is one document."""
        return self.sample_by == "document"

    def as_json(self) -> dict[str, object]:
        """For manifests, which are what they were before columns could be carried, and traces left
        out.
        """
        options = dataclasses.asdict(self)
        unused = {"carry", "carry_default"} if not self.carry else set[str]()
        unused |= {name for name in ("min_reward", "max_age") if options[name] is None}
        return {name: value for name, value in options.items() if name not in unused}
