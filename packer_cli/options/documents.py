"""Options that concern inputs and documents: what is read, and what becomes tokens of it.

`packer tokenize` has these; `packer pack` has those of rows besides: see `options`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated

from typer import Option

from packer_cli.errors import UsageError
from packer_cli.options.formats import FILE_FORMATS
from packer_cli.options.option import (
    ARGUMENTS,
    COUNT_OR_SHARE,
    PAIRS,
    SHARE,
    SIZE,
    OptionGroup,
    Pairs,
    Rule,
    choice,
    needs,
)
from packer_cli.options.shapes import KINDS, MESSAGE_KEYS, OTHER_NAMES, TRAIN_ON, check_fields
from packer_cli.options.value_columns import ValueColumn, value_columns_of
from packer_cli.options.where import condition_of

if TYPE_CHECKING:
    from typing_extensions import Self

MIB, GIB = 1 << 20, 1 << 30
# Options of documents that runs of rows from tokenized documents have, too.
DEFAULTS = "carry_default"
OF_ROWS_TOO = frozenset({"unit_bytes", "shard_bytes", DEFAULTS})
BY_NAME = ("fields", "roles", "template_args", DEFAULTS)  # (name, value) pairs


@dataclass(frozen=True, kw_only=True)
class DocumentConfig(OptionGroup):
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
    carry             as in `value_columns`; a run adds /record or the like from the first records
    carry_default     (name, JSON text)
    tiers             of a recipe's source: conditions of each; a document is of the first it fits
    """

    shape: Annotated[
        str | None,
        choice(tuple(KINDS), aliases=OTHER_NAMES),
        Option(
            metavar="SHAPE",
            help="What the records are: {}. Default: by the fields of each file's first record.",
        ),
    ] = None
    fields: Annotated[
        Pairs,
        PAIRS,
        Option(
            "--field",
            metavar="NAME=COLUMN",
            help="Where a field of the shape is: messages=chosen, or in messages: role=speaker. "
            "May be repeated.",
        ),
    ] = ()
    roles: Annotated[
        Pairs,
        PAIRS,
        Option(
            "--role",
            metavar="NAME=ROLE",
            help="Which role a speaker of messages has: human=user. May be repeated.",
        ),
    ] = ()
    input_format: Annotated[
        str | None,
        choice(FILE_FORMATS),
        Option(metavar="FORMAT", help="What the files are: {}. Default: by file name."),
    ] = None
    sample_by: Annotated[
        str,
        choice(("line", "paragraph", "document")),
        Option(help="What a document of a plain text file is: {}."),
    ] = "line"
    chat_template: Annotated[
        str | None,
        Option(
            metavar="FILE|NAME",
            help="Template that renders messages. Default: the tokenizer's own.",
        ),
    ] = None
    template_args: Annotated[
        Pairs,
        ARGUMENTS,
        Option(
            "--template-arg",
            metavar="NAME=VALUE",
            help="Sets a variable of the chat template: enable_thinking=false. JSON, or else text."
            " May be repeated.",
        ),
    ] = ()
    prompt_template: Annotated[
        str | None,
        choice({"none": "as they are", "alpaca": "", "chat": ""}),
        Option(help="How prompts become text: {}. Default: by the shape of the records."),
    ] = None
    train_on: Annotated[
        str | None,
        choice(TRAIN_ON),
        Option(help="Which tokens are trained on: {}."),
    ] = None
    turns: Annotated[
        str,
        choice({"all": "one document", "each": "one for each answer, as it is prompted for"}),
        Option(help="What a conversation becomes: {}."),
    ] = "all"
    train_reasoning: Annotated[
        bool | None,
        Option(
            help="Whether reasoning is trained on. Default: yes, but not with --train-on final."
        ),
    ] = None
    train_tool_calls: Annotated[
        bool | None, Option(help="Whether tool calls are trained on. Default: yes.")
    ] = None
    turn_end: Annotated[
        tuple[str, ...],
        Option(
            metavar="TOKEN",
            help="Ends the assistant's turns: trained on where it follows one. May be repeated.",
        ),
    ] = ()
    allow_open_turns: Annotated[
        bool, Option(help="Train on turns that the chat template does not end.")
    ] = False
    on_unshown: Annotated[
        str,
        choice({"warn": "counted", "error": "a bad record"}),
        Option(help="What happens to records that the chat template truncates: {}."),
    ] = "warn"
    add_bos: Annotated[
        bool | None,
        Option(
            "--bos/--no-bos",
            help="Whether each document begins with BOS. Default: as the tokenizer does.",
        ),
    ] = None
    add_eos: Annotated[
        bool | None,
        Option(
            "--eos/--no-eos",
            help="Whether each document ends with EOS. Default: yes, but chat templates end turns "
            "themselves.",
        ),
    ] = None
    eos_token: Annotated[
        str | None, Option(metavar="TOKEN", help="The EOS, where the tokenizer does not name one.")
    ] = None
    special_tokens_in_text: Annotated[
        str,
        choice({"keep": "counted", "error": "a bad record"}),
        Option(help="What becomes of special tokens that a record's content spells out: {}."),
    ] = "keep"
    fim_rate: Annotated[
        float, SHARE, Option(help="Share of texts rearranged to fill in the middle: 0.5 or 50%.")
    ] = 0.0
    fim_spm_rate: Annotated[
        float, SHARE, Option(help="Share of these that have the suffix first.")
    ] = 0.5
    carry: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME:TYPE",
            help="A field whose values follow a record, or each of its tokens, into rows: "
            "reward:float32, or topk:int32[8] for 8 values each. May be repeated.",
        ),
    ] = ()
    carry_default: Annotated[
        Pairs,
        ARGUMENTS,
        Option(
            metavar="NAME=VALUE",
            help="The value of --carry where a record or source has none. May be repeated.",
        ),
    ] = ()
    where: Annotated[
        tuple[str, ...],
        Option(
            metavar="CONDITION",
            help="Leave out what it does not hold for: 'score >= 0.8', 'lang in [\"en\", \"de\"]', "
            "'license exists'; 'tokens >= 64' is about documents. May be repeated: all hold.",
        ),
    ] = ()
    tiers: tuple[tuple[str, ...], ...] = ()
    on_error: Annotated[
        str,
        choice({"fail": "end the run", "skip": "go to rejected.jsonl"}),
        Option(help="What a bad record does: {}."),
    ] = "fail"
    max_errors: Annotated[
        int | float | None,
        COUNT_OR_SHARE,
        Option(metavar="N|SHARE", help="Fail when more records are bad: 100, or 1% of all."),
    ] = None
    unit_bytes: Annotated[
        int | None,
        SIZE,
        Option(help="Input bytes in a work unit. Default: by the size of the input."),
    ] = None
    shard_bytes: Annotated[int, SIZE, Option(help="Longest shard, about.")] = GIB

    def _rules(self) -> Iterator[Rule]:
        check_fields(self.fields)
        # these raise for what cannot be read
        self.arguments, self.value_columns, self.where_fields  # noqa: B018
        most, rate = self.max_errors, DocumentConfig.fim_spm_rate
        yield needs("--fim-spm-rate", self.fim_spm_rate != rate, "--fim-rate", self.fim_rate)
        skips = self.on_error == "skip"
        yield needs("--max-errors", most is not None, "--on-error skip", skips)
        yield (
            most is not None and (most < 0 or (most > 1 and isinstance(most, float))),
            f"--max-errors: {most} is neither a number nor a share of records",
            "for example 100, or 0.01 for 1% of all records",
        )

    @property
    def value_columns(self) -> dict[str, ValueColumn]:
        """Columns that `--carry` names, by name."""
        return value_columns_of(tuple(self.carry), tuple(self.carry_default))

    @property
    def where_fields(self) -> list[str]:
        """Fields of records that conditions name."""
        conditions = map(condition_of, chain(self.where, *self.tiers))
        return [*dict.fromkeys(one.field for one in conditions if not one.is_of_document)]

    @property
    def beside(self) -> list[str]:
        """Fields of records whose values are read beside what becomes tokens."""
        return [*dict.fromkeys((*self.value_columns, *self.where_fields))]

    def without_other_defaults(self) -> Self:
        """Return the options without `--carry-default` of columns that they do not name."""
        own = tuple(one for one in self.carry_default if one[0] in self.value_columns)
        return dataclasses.replace(self, carry_default=own)

    @property
    def renamed(self) -> dict[str, str]:
        """Names in the input of fields of records, by the names of the shape."""
        return {key: name for key, name in self.fields if key not in MESSAGE_KEYS}

    @property
    def message_keys(self) -> dict[str, str]:
        """Names in the input of keys of messages, by the names of the shape."""
        return {key: name for key, name in self.fields if key in MESSAGE_KEYS}

    @property
    def arguments(self) -> dict[str, object]:
        """`template_args` as a dict of values. Raises UsageError for text that is not JSON."""
        values: dict[str, object] = {}
        for name, text in self.template_args:
            try:
                values[name] = json.loads(text)
            except (ValueError, RecursionError):
                raise UsageError(f"--template-arg: {name}: {text!r} is not JSON") from None
        return values

    @property
    def trains_reasoning(self) -> bool:
        """True if reasoning is trained on in messages that are trained on."""
        return self.train_on != "final" if self.train_reasoning is None else self.train_reasoning

    @property
    def trains_all_parts(self) -> bool:
        """True if reasoning, content and tool calls of the assistant are all trained on."""
        return self.trains_reasoning and self.train_tool_calls is not False

    @property
    def whole_files(self) -> bool:
        """True if each file of plain text is one document."""
        return self.sample_by == "document"

    def as_json(self) -> dict[str, object]:
        """Return the options for a manifest; unused ones of columns and conditions are left out."""
        options = dataclasses.asdict(self)
        unused = {"carry", "carry_default"} if not self.carry else set[str]()
        unused |= {name for name in ("where", "tiers") if not options[name]}
        return {name: value for name, value in options.items() if name not in unused}
