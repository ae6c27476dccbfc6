"""Options that concern inputs and documents: what is read, and what becomes tokens of it.

`packer tokenize` has these; `packer pack` has those of rows besides: see `options`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from packer_cli.config.formats import FILE_FORMATS
from packer_cli.config.option import (
    DOCUMENTS,
    INPUT,
    OUTPUT,
    RUNNING,
    SUPERVISED,
    Need,
    Option,
    plain,
    settle,
)
from packer_cli.config.shapes import KINDS, MESSAGE_KEYS, Shape, check_fields
from packer_cli.config.shapes import OTHER_NAMES as SHAPE_NAMES
from packer_cli.config.values import arguments_of
from packer_cli.errors import UsageError

MIB, GIB = 1 << 20, 1 << 30


def _of_messages(shape: Shape, config: DocumentConfig) -> bool:
    return shape.is_chat or shape.of_messages or config.prompt_template == "chat"


_MESSAGES = Need("messages, which a chat template renders", _of_messages)
_CONVERSATIONS = Need("conversations", lambda shape, config: shape.is_chat)
_KEYS = Need(
    "messages where it names their role or content",
    lambda shape, config: not config.message_keys or shape.is_chat or shape.of_messages,
)
_SPEAKERS = Need("messages", lambda shape, config: shape.is_chat or shape.of_messages)
_TEXT = Need("records with text", lambda shape, config: shape.kind != "tokens")
_PLAIN = Need("plain text", lambda shape, config: shape.kind == "text")


@dataclass(frozen=True, kw_only=True)
class DocumentConfig:
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
    """

    shape: Annotated[
        str | None,
        Option(
            "What the records are:",
            INPUT,
            metavar="SHAPE",
            choices=plain(KINDS),
            unset="by the fields of each file's first record",
            aliases=SHAPE_NAMES,
            elsewhere=("--dataset-type", "--data-format"),
        ),
    ] = None
    fields: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "Where a field of the shape is: messages=chosen, or in messages: role=speaker. May be "
            "repeated.",
            INPUT,
            flag="--field",
            metavar="NAME=COLUMN",
            value="fields",
            needs=_KEYS,
        ),
    ] = ()
    roles: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "Which role a speaker of messages has: human=user. May be repeated.",
            INPUT,
            flag="--role",
            metavar="NAME=ROLE",
            value="fields",
            needs=_SPEAKERS,
            elsewhere=("--roles",),
        ),
    ] = ()
    input_format: Annotated[
        str | None,
        Option(
            "What the files are:",
            INPUT,
            metavar="FORMAT",
            choices=plain(FILE_FORMATS),
            unset="by file name",
            aliases={"jsonlines": "jsonl", "ndjson": "jsonl", "txt": "text",
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
    template_args: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "Sets a variable of the chat template: enable_thinking=false. JSON, or else text. May "
            "be repeated.",
            SUPERVISED,
            flag="--template-arg",
            key="template_args",
            metavar="NAME=VALUE",
            value="arguments",
            needs=_MESSAGES,
            elsewhere=("--chat-template-kwargs", "--template-kwargs"),
        ),
    ] = ()
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
                "final": "answers without tool calls",
                "completion": "the default for prompts",
                "all": "the default for text",
            },
            aliases={
                "last": "last-assistant",
                "last-turn": "last-assistant",
                "final-answer": "final",
                "final-answers": "final",
                "assistant-only": "assistant",
                "assistants": "assistant",
                "response": "completion",
                "completion-only": "completion",
                "full": "all",
            },
            elsewhere=("--loss-on", "--train-on-inputs", "--assistant-only-loss"),
        ),
    ] = None
    turns: Annotated[
        str,
        Option(
            "What a conversation becomes:",
            SUPERVISED,
            metavar="HOW",
            choices={"all": "one document", "each": "one for each answer, as it is prompted for"},
            aliases={"one": "all", "every": "each"},
            needs=_CONVERSATIONS,
        ),
    ] = "all"
    train_reasoning: Annotated[
        bool | None,
        Option(
            "Whether reasoning is trained on. Default: yes, but not with --train-on final.",
            SUPERVISED,
            flag="--train-reasoning/--no-train-reasoning",
            needs=_MESSAGES,
        ),
    ] = None
    train_tool_calls: Annotated[
        bool | None,
        Option(
            "Whether tool calls are trained on. Default: yes.",
            SUPERVISED,
            flag="--train-tool-calls/--no-train-tool-calls",
            needs=_MESSAGES,
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
    on_unshown: Annotated[
        str,
        Option(
            "What becomes of records of which the chat template leaves something out:",
            SUPERVISED,
            metavar="POLICY",
            choices={"warn": "counted", "error": "a bad record"},
            needs=_MESSAGES,
        ),
    ] = "warn"
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
    fim_rate: Annotated[
        float,
        Option(
            "Share of texts rearranged to fill in the middle: 0.5 or 50%.",
            DOCUMENTS,
            value="share",
            least=0,
            most=1,
            needs=_PLAIN,
        ),
    ] = 0.0
    fim_spm_rate: Annotated[
        float,
        Option(
            "Share of these that have the suffix first.",
            DOCUMENTS,
            value="share",
            least=0,
            most=1,
            needs=_PLAIN,
        ),
    ] = 0.5
    fim_tokens: Annotated[
        tuple[str, ...],
        Option(
            "Tokens before the beginning, the end and the middle. Default: the tokenizer's own.",
            DOCUMENTS,
            metavar="PRE,SUF,MID",
            value="list",
            needs=_PLAIN,
        ),
    ] = ()
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
    max_unused: Annotated[
        float | None,
        Option(
            "Fail when more of the records' text is in fields that nothing uses: 0.01 or 1%.",
            INPUT,
            value="share",
            least=0,
            most=1,
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
    shard_bytes: Annotated[int, Option("Longest shard, about.", OUTPUT, value="size", least=1)] = (
        GIB
    )

    def __post_init__(self) -> None:
        settle(self)
        check_fields(self.fields)
        self._check_fill_in_middle()
        arguments_of(self.template_args)
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

    def _check_fill_in_middle(self) -> None:
        if self.fim_tokens and len(set(self.fim_tokens)) != 3:
            raise UsageError(
                f"--fim-tokens: {','.join(self.fim_tokens)} are not three different tokens",
                "name those before the beginning, the end and the middle of a text",
            )
        idle = self.fim_tokens or self.fim_spm_rate != 0.5
        if idle and not self.fim_rate:
            option = "--fim-tokens" if self.fim_tokens else "--fim-spm-rate"
            raise UsageError(f"{option}: is for --fim-rate", "give --fim-rate 0.5 besides")

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
        """`template_args` as a dict of values."""
        return arguments_of(self.template_args)

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

    @property
    def least_unit_tokens(self) -> int:
        """How long a work unit should be at least."""
        return 0

    @property
    def documents_shuffled(self) -> bool:
        """Whether those of tokenized directories are taken in a seeded order."""
        return False

    @property
    def shortens_conversations(self) -> bool:
        """Whether those that are too long lose their oldest turns."""
        return False

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)
