"""The shapes of records, and the fields of each. Adding one: CONTRIBUTING.md.

The names of the fields in a file's first record decide the shape of all its records, unless --shape
names it. `--field NAME=COLUMN` maps a field that has another name in the input, such as
messages=chosen. Dots in it lead into objects, as in data.messages, unless a field has that very
name. If no shape fits, the values of the record often show which --field and --role options it
needs: `options_for`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from packer_cli.errors import DataError, UsageError, named, one_of

CHAT = ("messages", "conversations")
TRACE = "trace"
MIXED = "mixed"  # the kind of several shapes that have different ones
ARGUMENTS = "chat_template_kwargs"  # arguments of the template, for one record
# of messages; the names of all other fields are those of records
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "train")
_OF_MESSAGES = " of messages"
# Lists of 0 and 1 beside input_ids: 1 for trained tokens.
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
ABSENT = object()  # returned by `value_at` for a value that is missing
_Names = dict[str, tuple[str, ...]]
# Values of --train-on, with their meaning in --help. `Shape.train_on` has those of each shape.
TRAIN_ON = {
    "assistant": "the default for messages",
    "last-assistant": "",
    "final": "answers without tool calls",
    "completion": "the default for prompts",
    "all": "the default for text",
}
# fields beside prompt and answer
CONTEXT, SYSTEM, REASONING, HISTORY = "context", "system", "reasoning", "history"


@dataclass(frozen=True)
class Shape:
    """The shape of records. `columns`: name of a field in the shape -> its name in the input.

    `of_messages`: a prompt and its completion are messages themselves. `of_supervised`: some are
    tokens of records that mark what is trained on. `of_text`: others are of text. `members`: the
    shapes of a run's files, by `described`, if there are several; this one then stands for all of
    them.
    """

    kind: str
    columns: dict[str, str] = field(default_factory=dict)
    of_messages: bool = False
    of_supervised: bool = False
    of_text: bool = False
    members: dict[str, Shape] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.kind in CHAT

    @property
    def is_supervised(self) -> bool:
        """True if the records mark what to train on, so that most must stay whole."""
        return self.kind not in ("text", "tokens")

    @property
    def is_of_tokens(self) -> bool:
        """True if the records hold token ids, which become documents as they are."""
        return self.kind in ("tokens", TRACE)

    @property
    def is_composed(self) -> bool:
        """True if texts are composed of several fields: of messages, prompts and the like."""
        return self.is_supervised and not self.is_of_tokens

    @property
    def stays_whole(self) -> bool:
        """True if a part of a record would be trained on without what it answers."""
        return self.is_supervised or self.of_supervised

    @property
    def train_on(self) -> tuple[str, ...]:
        """Values of --train-on, the default first."""
        if self.is_chat:
            return ("assistant", "last-assistant", "final", "all")
        if self.kind == TRACE:
            return ("completion",)
        return ("completion", "all") if self.is_supervised else ("all",)

    @property
    def prompt_templates(self) -> tuple[str, ...]:
        """Values of --prompt-template, the default first."""
        if self.of_messages:
            return ("chat",)
        if self.kind == "alpaca":
            return ("alpaca", "chat")
        return ("none", "alpaca", "chat") if self.kind == "prompt-completion" else ("none",)

    @property
    def required(self) -> list[str]:
        """Fields that every record must have."""
        if self.kind == TRACE:  # a file may have records of all forms
            return []
        return [names[0] for names in KINDS[self.kind].required]

    @property
    def optional(self) -> list[str]:
        """Fields that a record may have."""
        return [key for key in self.columns if key not in self.required]

    @property
    def name(self) -> str:
        """The kind, without names of fields, on which no option depends: see `shape_named`."""
        return self.kind + (_OF_MESSAGES if self.of_messages else "")

    @property
    def each(self) -> list[Shape]:
        """The shapes of files, or this one alone."""
        return list(self.members.values()) or [self]

    def described(self) -> str:
        """Return it in words: "prompt-completion (prompt=question, completion=answer)"."""
        other = [f"{key}={name}" for key, name in self.columns.items() if key != name]
        other += self.members
        return f"{self.name} ({', '.join(other)})" if other else self.name

    def of(self, file_shape: str | None) -> Shape:
        """Return the shape of a file, by `InputFile.shape`."""
        return self if file_shape is None else self.members[file_shape]


def kinds_of(shape: Shape) -> str:
    """Return kinds in words: "messages", or "messages, alpaca" for several."""
    return ", ".join(dict.fromkeys(member.kind for member in shape.each))


def prompt_templates(shape: Shape, template: str | None) -> dict[str, str]:
    """Return how prompts become text, by shape; `template` counts for those that know it."""
    return {
        member.name: template if template in member.prompt_templates else member.prompt_templates[0]
        for member in shape.each
        if member.is_composed and not member.is_chat
    }


def prompts_described(shape: Shape, template: str | None) -> str:
    """Return how prompts become text, in words; "" for records without prompts."""
    words = {
        name: "as they are" if chosen == "none" else f"as {chosen}"
        for name, chosen in prompt_templates(shape, template).items()
    }
    if len({*words.values()}) > 1:
        return ", ".join(f"prompts of {name} {form}" for name, form in words.items())
    return f"prompts {next(iter(words.values()))}" if words else ""


def joined(members: dict[str, Shape]) -> Shape:
    """Return one shape that stands for several."""
    kinds = {member.kind for member in members.values()}
    return Shape(kinds.pop() if len(kinds) == 1 else MIXED, members=members)


def shape_named(name: str) -> Shape:
    """Return the shape of that `name`, without the names of its fields."""
    return Shape(name.removesuffix(_OF_MESSAGES), of_messages=name.endswith(_OF_MESSAGES))


def names_in_traces(shape: Shape) -> dict[str, list[str]]:
    """Return field of traces -> its names: a file may have records of all forms."""
    taken = {*shape.columns.values()}
    return {
        key: [column, *(name for name in known if column in known and name not in taken)]
        for key, known in _TRACE.items()
        if (column := shape.columns.get(key)) is not None
    }


def shape_again(name: str, renamed: dict[str, str]) -> Shape | None:
    """Return the shape that `name` was found for; None if the input names its fields."""
    kind = KINDS.get(name)
    if kind is None or kind.others or name in _FORMS:
        return None
    if any(len(names) > 1 for names in kind.required):
        return None
    required = [names[0] for names in kind.required]
    return Shape(name, {key: renamed.get(key, key) for key in (*required, *kind.optional)})


@dataclass(frozen=True)
class _Kind:
    """The required fields, each with its possible names in step, and the optional ones."""

    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()
    others: _Names = field(default_factory=dict)  # names that an optional field may have, too


# Names of optional fields in well-known sets: OpenOrca, Dolly, and sets made by reasoning models.
_SYSTEM: _Names = {SYSTEM: ("system_prompt",)}
_REASONING: _Names = {REASONING: ("reasoning_content", "thinking")}
_INPUT: _Names = {"input": (CONTEXT,)}
# Fields beside a prompt and its answer that only a chat template has a place for.
ONLY_IN_CHATS = frozenset(("tools", REASONING, *_REASONING[REASONING]))
# Names in verl, TRL, SkyRL, prime-rl and others for a prompt and its completion as ids, and in
# Switchyard, ATIF, NeMo Gym and tinker-cookbook for the calls of a session.
_TRACE: _Names = {
    "traces": ("traces",),
    "nodes": ("nodes",),
    "session_id": ("session_id", "proxy_x_session_id"),
    "calls": ("calls",),
    "steps": ("steps",),
    "response": ("response",),
    "prompt_ids": ("prompt_ids", "prompt_token_ids", "prompt_tokens"),
    "completion_ids": ("completion_ids", "completion_token_ids", "response_ids",
                       "generation_token_ids", "sampled_tokens"),
    "prompt_mask": ("prompt_mask",),
    "completion_mask": ("completion_mask", "response_mask", "loss_mask", "loss_masks", "tool_mask",
                        "env_mask"),
    "logprobs": ("logprobs", "completion_logprobs", "response_logprobs", "rollout_log_probs",
                 "rollout_logprobs", "generation_log_probs"),
    "advantages": ("advantages", "advantage"),
    "reference_logprobs": ("reference_logprobs", "ref_logprobs", "ref_log_prob"),
    "loss_weights": ("loss_weights",),
    "reward": ("reward",),
    "age": ("age",),
}  # fmt: skip
IN_TRACES = ("reward", "age")  # fields that may lie within a trace of an episode
# what tells the sessions of tinker-cookbook apart
TRAJECTORY = ("run_id", "run_attempt", "split", "iteration", "group_idx", "traj_idx")
# What else is read of traces and of their episodes.
FACTS_OF_TRACES = ("rewards", "agent", "run", "tools", "subagent_trajectories", *TRAJECTORY)


def _of_traces(*required: str) -> _Kind:
    """Return the form of traces with these fields; other records may have all others."""
    return _Kind(
        tuple(_TRACE.get(key, (key,)) for key in required),
        tuple(key for key in _TRACE if key not in required),
        {key: names[1:] for key, names in _TRACE.items()},
    )


# In the order in which they are tried: the most specific shape comes first.
KINDS = {
    "messages": _Kind((("messages",),), ("tools", SYSTEM, ARGUMENTS)),
    "conversations": _Kind(
        (("conversations", "conversation"),), ("tools", SYSTEM, ARGUMENTS), _SYSTEM
    ),
    "prompt-completion": _Kind(
        (("prompt", "question", "query", "input"), ("completion", "answer", "response", "output")),
        ("tools", CONTEXT, SYSTEM, REASONING, HISTORY, ARGUMENTS),
        _SYSTEM | _REASONING,
    ),
    "alpaca": _Kind(
        (("instruction",), ("output", "response")),
        ("input", SYSTEM, REASONING, HISTORY, ARGUMENTS),
        _INPUT | _SYSTEM | _REASONING,
    ),
    "text": _Kind((("text",),)),
    "tokens": _Kind((("input_ids",),), ("labels", "attention_mask", *MASKS)),
    TRACE: _of_traces("traces"),
}
# Fields that no shape requires.
OPTIONAL = frozenset(key for kind in KINDS.values() for key in kind.optional)
# Traces have several forms. The last two say more about a record than any other shape.
_FORMS = {
    TRACE: (
        KINDS[TRACE],
        _of_traces("nodes"),
        _of_traces("prompt_ids", "completion_ids"),
        _of_traces("calls"),
        _of_traces("schema_version", "steps"),
        _of_traces("session_id", "prompt_ids", "completion_ids"),
        _of_traces("responses_create_params", "response"),
    )
}
_UNMISTAKABLE = 2
# names that other tools have for shapes
OTHER_NAMES = {
    "messages": ("openai", "chatml"),
    "conversations": ("sharegpt",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "instruct"),
    "text": ("pretrain",),
    "tokens": ("input-ids", "pretokenized"),
    TRACE: ("traces", "rollout"),
}
FIELDS = sorted({names[0] for k in KINDS.values() for names in k.required}
                | {name for k in KINDS.values() for name in k.optional}
                | {*MESSAGE_KEYS})  # fmt: skip


def find_shape(
    fields: list[str], wanted: str | None, renamed: dict[str, str], where: str, *, tokens: bool
) -> Shape:
    """Return the shape of a record with these field names.

    `wanted`: --shape, or None to detect it; `renamed`: --field; `tokens`: whether the format can
    hold lists of ids. Raises DataError if no shape fits, naming the fields found.
    """
    if absent := [name for key, name in renamed.items()
                  if key not in IN_TRACES and not may_hold(fields, name)]:  # fmt: skip
        raise DataError(
            f"{where}: records have no '{absent[0]}'; fields found: {named(fields)}",
            "name the right field with --text-field, or with --field NAME=COLUMN",
        )
    if wanted and Shape(wanted).is_of_tokens and not tokens:
        raise DataError(
            f"{where}: records of shape {wanted} hold lists, and its format has none",
            "convert it to JSON lines or Parquet, or choose another --shape",
        )
    kinds = [wanted] if wanted else [k for k in KINDS if tokens or not Shape(k).is_of_tokens]
    forms = [(kind, form) for kind in kinds for form in _FORMS.get(kind, (KINDS[kind],))]
    first = [form for form in forms if form[0] == TRACE][-_UNMISTAKABLE:]
    free = {*fields} - {*renamed.values()}
    fitting = [
        Shape(kind, columns)
        for kind, form in (*first, *forms)
        # an alpaca record's input and output alone look like a prompt and its completion
        if wanted or kind != "prompt-completion" or "instruction" not in free
        if (columns := _columns(form, fields, renamed)) is not None
    ]
    for shape in fitting:
        if renamed.keys() <= shape.columns.keys():
            return shape
    if fitting:
        shape = fitting[0]
        other = next(key for key in renamed if key not in shape.columns)
        raise DataError(
            f"{where}: records of shape {shape.kind} have no field '{other}', which --field maps",
            f"leave it out; fields of that shape: {named(shape.columns)}",
        )
    needed = (form.required for kind, form in forms if (kind, form) not in first)
    expected = ", ".join("+".join(names[0] for names in required) for required in needed)
    text = "name the text with --text-field, or " if wanted in (None, "text") else ""
    other = ", or choose another --shape" if wanted else ""
    raise DataError(
        f"{where}: the records' fields fit none of: {expected}; fields found: {named(fields)}",
        f"{text}map other fields with --field NAME=COLUMN{other}",
    )


def fits_a_shape(fields: list[str], wanted: str | None, renamed: dict[str, str]) -> bool:
    """Tell if `find_shape` would find one."""
    try:
        find_shape(fields, wanted, renamed, "", tokens=True)
    except DataError:
        return False
    return True


def _columns(kind: _Kind, fields: list[str], renamed: dict[str, str]) -> dict[str, str] | None:
    """Return field -> its name in the input; None if a required one is missing."""
    mapped = {*renamed.values()}
    free = {*fields} - mapped

    def column_of(key: str, names: Iterable[str]) -> str | None:
        return renamed.get(key) or next((name for name in names if name in free), None)

    columns = {names[0]: column_of(names[0], names) for names in kind.required}
    if any(column is None or not may_hold(fields, column) for column in columns.values()):
        return None
    free.difference_update(column for column in columns.values() if column)
    for key in kind.optional:
        column = column_of(key, (key, *kind.others.get(key, ())))
        # other records may have fields that the first one lacks
        if column or key not in mapped.union(fields):
            columns[key] = column or key
    return {key: column for key, column in columns.items() if column}


def may_hold(fields: Collection[str], column: str) -> bool:
    """Tell if records with these fields may have the column, perhaps within one of them."""
    dots = (at for at, character in enumerate(column) if character == ".")
    return column in fields or any(column[:at] in fields for at in dots)


def value_at(record: Any, column: str) -> Any:
    """Return the value of a record there, or ABSENT. A field of that very name comes first, then
    dots lead into objects.
    """
    if not isinstance(record, dict):
        return ABSENT
    if column in record:
        return record[column]
    for at, character in enumerate(column):
        if character == "." and column[:at] in record:
            value = value_at(record[column[:at]], column[at + 1 :])
            if value is not ABSENT:
                return value
    return ABSENT


def check_fields(renamed: Iterable[tuple[str, str]]) -> None:
    """Raise UsageError for an unknown field, and for a column that is mapped twice."""
    first = dict[tuple[bool, str], str]()
    for key, column in renamed:
        if key not in FIELDS:
            raise one_of("--field", key, FIELDS)
        other = first.setdefault((key in MESSAGE_KEYS, column), key)
        if other != key:
            raise UsageError(
                f"--field: maps '{column}' to '{other}' and to '{key}'", "leave one of them out"
            )


# Options for the first record of a file that no shape fits: a list of objects with a speaker and a
# text is a conversation; texts with well-known names are a prompt and its answer, or a text.

_ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "participant")
_TEXT_KEYS = ("content", "value", "text", "message", "utterance", "body", "msg")
_SAID = ("content", "value", "tool_calls", "function_call")
# The roles that templates know, and those of other dialects; in any case, but for templates.
PLAIN_ROLES = frozenset(("user", "assistant", "system", "developer", "tool"))
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "observation": "tool", "function": "tool", "function_response": "tool",
    "tool_response": "tool", "ipython": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # roles of a call that the assistant makes
_KNOWN_ROLES = PLAIN_ROLES.union(ROLES, CALLS)
_MEANT = dict.fromkeys(("customer", "client", "prompter", "student", "player"), "user")
_MEANT |= dict.fromkeys(("ai", "agent", "chatbot", "teacher", "npc"), "assistant")
# shape -> field -> its names elsewhere, in lower case
_CALLED: dict[str, _Names] = {
    "alpaca": {"instruction": ("instruction",), "output": ("output", "response")},
    "prompt-completion": {
        "prompt": ("prompt", "question", "query", "problem", "instruction", "inputs", "input",
                   "source", "request", "human", "user", "task", "q", "messages", "context",
                   "conversations", "conversation", "history", "dialogue", "dialog"),
        "completion": ("completion", "answer", "response", "output", "outputs", "solution",
                       "targets", "target", "reply", "assistant", "a"),
    },
    "text": {"text": ("text", "content", "raw_content", "body", "document", "article", "code",
                      "markdown", "story")},
}  # fmt: skip


ANSWERS = frozenset(_CALLED["prompt-completion"]["completion"])


@dataclass(frozen=True)
class Suggested:
    """Values of --field and --role that suit a record."""

    fields: dict[str, str]
    roles: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the options as typed: `--field messages=dialogue --role Agent=assistant`."""
        return " ".join(
            f"{flag} {shlex.quote(f'{key}={other}')}"
            for flag, pairs in (("--field", self.fields), ("--role", self.roles))
            for key, other in pairs.items()
        )


def options_for(record: Mapping[str, Any], shape: str | None) -> Suggested | None:
    """Return the options that a record needs, or None if nothing in it shows them."""
    talks = list(_conversations(record))
    if shape in (None, *CHAT):
        for column, messages in talks:
            options = _options_for_messages(shape or "messages", column, messages)
            if options is not None:
                return options
    texts = {name: value for name, value in record.items() if isinstance(value, str)}
    for kind, names in _CALLED.items():
        there = {**texts, **dict(talks)} if kind == "prompt-completion" else texts
        columns = {key: _called(there, known) for key, known in names.items()}
        if shape in (None, kind) and all(columns.values()):
            more = {"input": _called(texts, ("input",))} if kind == "alpaca" else {}
            return Suggested({key: column for key, column in (columns | more).items() if column})
    return None


def _options_for_messages(
    key: str, column: str, messages: list[dict[str, Any]]
) -> Suggested | None:
    """Return options for a conversation of the assistant with another speaker, or None."""
    role, text = _called(messages[0], _ROLE_KEYS), _called(messages[0], _TEXT_KEYS)
    if not (role and text):
        return None
    speakers = [message.get(role) for message in messages]
    roles = roles_for(speakers)
    known_roles = {roles.get(str(speaker), role_of(speaker)) for speaker in speakers}
    if "assistant" not in known_roles or len(known_roles) < 2:
        return None
    fields = {key: column}
    fields |= {"role": role} if role not in ("role", "from") else {}
    fields |= {"content": text} if text not in ("content", "value") else {}
    return Suggested(fields, roles)


def _conversations(record: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield columns that hold messages, or JSON text of them; also in objects."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", messages) for inner, messages in _conversations(value))
        elif messages := messages_in(value):
            yield name, messages


def messages_in(value: Any, *keys: str, certain: bool = False) -> list[dict[str, Any]]:
    """Return the messages that a value is, or is JSON text of, or the only one; else none.

    keys     of messages, that also name a speaker
    certain  of JSON text, take only what has known speakers and texts: it may also be the JSON that
             an answer is to give
    """
    messages, known = list_in(value), (*_ROLE_KEYS, *keys)
    if not all(isinstance(message, dict) and _called(message, known) for message in messages):
        return []
    if not certain or not isinstance(value, str):
        return messages
    are_said = all(
        (speaker := message.get(key, "")) and (key in keys or str(speaker).lower() in _KNOWN_ROLES)
        for message in messages
        for key in [_called(message, ("role", "from", *keys)) or ""]
    )
    have_text = all({*_SAID, *keys}.intersection(message) for message in messages)
    return messages if are_said and have_text else []


def lacks_answer(value: Any) -> bool:
    """Tell if a value is messages without an answer of the assistant."""
    speakers = [role_of(message.get("role", message.get("from"))) for message in messages_in(value)]
    return bool(speakers) and all(name in ("user", "system", "developer") for name in speakers)


def turns_in(value: Any) -> list[dict[str, Any]]:
    """Return messages of earlier turns, which are pairs of texts or messages; else none."""
    turns = list_in(value)
    if not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        for turn in turns
    ):
        return messages_in(value)
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def list_in(value: Any) -> list[Any]:
    """Return a list as it is, of JSON text, or of the only object; empty for anything else."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value if isinstance(value, list) else [value] if isinstance(value, dict) else []


def _called(record: Iterable[str], known: Iterable[str]) -> str | None:
    """Return the column with the first of these names that is there, in any case."""
    by_name = {name.lower(): name for name in record}
    return next((by_name[name] for name in known if name in by_name), None)


def role_of(speaker: Any) -> Any:
    """Return the role of a speaker, as templates know it; an unknown speaker stays."""
    if type(speaker) is not str or speaker in PLAIN_ROLES:
        return speaker
    name = speaker.lower()
    return (
        "assistant" if name in CALLS else name if name in PLAIN_ROLES else ROLES.get(name, speaker)
    )


def roles_for(speakers: Iterable[Any], template: str = "") -> dict[str, str]:
    """Return the roles that --role is to give to unknown speakers that the template does not name.

    They follow from their names; otherwise the first one is the user, and one that speaks beside a
    user and an assistant is a tool.
    """
    speakers = [speaker for speaker in speakers if isinstance(speaker, str)]
    there = {role_of(speaker) for speaker in speakers}
    roles = dict[str, str]()
    for name in speakers:
        if name.lower() not in _KNOWN_ROLES and not _quotes(template, name):
            other = "assistant" if "user" in there.union(roles.values()) else "user"
            if there.issuperset(("user", "assistant")):
                other = "tool"  # whose text is not trained on
            roles.setdefault(name, _MEANT.get(name.lower(), other))
    return roles


def tool_roles_in(template: str) -> list[str]:
    """Return other names of tools that a template compares roles with, and keeps as they are, like
    "observation" for GLM; none if it compares them with "tool".
    """
    names = [name for name, role in ROLES.items() if role == "tool"]
    compared = [name for name in (*names, "tool") if _quotes(template, name, r"role\W[^%}]*")]
    return [] if "tool" in compared else compared


def _quotes(template: str, name: str, before: str = "") -> bool:
    """Tell whether a template quotes a name, after what the pattern `before` matches."""
    return re.search(f"""{before}['"]{re.escape(name)}['"]""", template) is not None
