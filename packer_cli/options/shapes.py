"""The shapes of records, and the fields of each. Adding one: CONTRIBUTING.md.

The names of the fields in a file's first record give the shape of all its records, unless --shape
names it. `--field NAME=COLUMN` says that a field has another name in the input, such as
messages=chosen. Dots in it lead into objects, as data.messages does, unless a field has that very
name. Where no shape fits, the values of the record often tell which --field and --role options it
needs: `options_for`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from packer_cli.errors import DataError, UsageError, named, one_of

CHAT = ("messages", "conversations")
PREFERENCE = "preference"
LABEL = "label"  # whether an answer is a good one, in records of preference
MIXED = "mixed"  # the kind of several shapes that have different ones
ARGUMENTS = "chat_template_kwargs"  # arguments of the template, for one record
# of messages; the names of all other fields are those of records
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "train")
_OF_MESSAGES = " of messages"
ABSENT = object()  # what `value_at` finds where there is nothing
_Names = dict[str, tuple[str, ...]]
INSIDE = ".*"  # after the name of a field: texts within its value, which is an object or a list
CONTEXT, SYSTEM, REASONING = "context", "system", "reasoning"  # fields beside prompt and answer


@dataclass(frozen=True)
class Shape:
    """What the records are. `columns`: the field's own name -> its name in the input.

    `of_messages`: a prompt and its completion are messages themselves. `of_supervised`: some are
    tokens of records that say what of them is trained on. `of_text`: others are of text.
    `of_pairs`: they are tokens of records of preference.
    `members`: the shapes of a run's files, by what `described` gives, where there are several; this
    one then stands for all of them.
    """

    kind: str
    columns: dict[str, str] = field(default_factory=dict)
    of_messages: bool = False
    of_supervised: bool = False
    of_text: bool = False
    of_pairs: bool = False
    members: dict[str, Shape] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.kind in CHAT

    @property
    def has_pairs(self) -> bool:
        """Whether the records are of preference: answers that are chosen or rejected."""
        return self.kind == PREFERENCE or self.of_pairs

    @property
    def has_labels(self) -> bool:
        """Whether records of preference are single answers with a label, as far as is known."""
        return self.kind == PREFERENCE and "label" in self.columns

    @property
    def is_supervised(self) -> bool:
        """Whether the records show what to train on, so that most must stay whole."""
        return self.kind not in ("text", "tokens")

    @property
    def stays_whole(self) -> bool:
        """Whether a part of a record would be trained on without what it answers."""
        return self.is_supervised or self.of_supervised

    @property
    def train_on(self) -> tuple[str, ...]:
        """What can be trained on, the default first."""
        if self.is_chat:
            return ("assistant", "last-assistant", "final", "all")
        if self.kind == PREFERENCE:
            return ("completion",)
        return ("completion", "all") if self.is_supervised else ("all",)

    @property
    def prompt_templates(self) -> tuple[str, ...]:
        """How a prompt can become text, the default first."""
        if self.of_messages:
            return ("chat",)
        if self.kind == "alpaca":
            return ("alpaca", "chat")
        prompts = self.kind in ("prompt-completion", PREFERENCE)
        return ("none", "alpaca", "chat") if prompts else ("none",)

    @property
    def required(self) -> list[str]:
        """The own names of the fields that every record must have."""
        forms = _FORMS.get(self.kind) or (KINDS[self.kind],)
        owns = [[names[0] for names in form.required] for form in forms]
        return next((own for own in owns if self.columns.keys() >= {*own}), owns[0])

    @property
    def optional(self) -> list[str]:
        """The own names of the fields that a record may have."""
        return [own for own in self.columns if own not in self.required]

    @property
    def name(self) -> str:
        """What it is but for the names of fields, on which no option depends: see `shape_named`."""
        return self.kind + (_OF_MESSAGES if self.of_messages else "")

    @property
    def each(self) -> list[Shape]:
        """The shapes of files, or this one alone."""
        return list(self.members.values()) or [self]

    def described(self) -> str:
        """For people: "prompt-completion (prompt=question, completion=answer)"."""
        other = [f"{own}={name}" for own, name in self.columns.items() if own != name]
        other += self.members
        return f"{self.name} ({', '.join(other)})" if other else self.name

    def of(self, file_shape: str | None) -> Shape:
        """The shape of a file, by `InputFile.shape`."""
        return self if file_shape is None else self.members[file_shape]


def kinds_of(shape: Shape) -> str:
    """For people: "messages", or "messages, alpaca" where there are several."""
    return ", ".join(dict.fromkeys(one.kind for one in shape.each))


def prompt_templates(shape: Shape, given: str | None) -> dict[str, str]:
    """How prompts become text, by the shapes of records that have any. `given`: --prompt-template,
    which is for those that know it.
    """
    return {
        one.name: given if given in one.prompt_templates else one.prompt_templates[0]
        for one in shape.each
        if one.is_supervised and not one.is_chat
    }


def prompts_described(shape: Shape, given: str | None) -> str:
    """For people: "prompts as they are"; "" where records have none."""
    words = {
        name: "as they are" if template == "none" else f"as {template}"
        for name, template in prompt_templates(shape, given).items()
    }
    if len({*words.values()}) > 1:
        return ", ".join(f"prompts of {name} {how}" for name, how in words.items())
    return f"prompts {next(iter(words.values()))}" if words else ""


def joined(members: dict[str, Shape]) -> Shape:
    """One shape that stands for several."""
    kinds = {member.kind for member in members.values()}
    return Shape(kinds.pop() if len(kinds) == 1 else MIXED, members=members)


def shape_named(name: str) -> Shape:
    """The shape of that `name`, without the names of its fields."""
    return Shape(name.removesuffix(_OF_MESSAGES), of_messages=name.endswith(_OF_MESSAGES))


def shape_again(name: str, renamed: dict[str, str]) -> Shape | None:
    """The shape of records that `name` was found for, with --field `renamed`; None where the name
    does not tell what the input calls its fields.
    """
    kind = KINDS.get(name)
    if kind is None or kind.others or name in _FORMS:
        return None
    if any(len(names) > 1 for names in kind.required):
        return None
    required = [names[0] for names in kind.required]
    return Shape(name, {own: renamed.get(own, own) for own in (*required, *kind.optional)})


@dataclass(frozen=True)
class _Kind:
    """The required fields, each with its possible names in step, and the optional ones.

    others  names that an optional field may have, too
    """

    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()
    others: _Names = field(default_factory=dict)


# What well-known sets call optional fields: OpenOrca, Dolly, and sets made by models that reason.
_SYSTEM: _Names = {SYSTEM: ("system_prompt",)}
_REASONING: _Names = {REASONING: ("reasoning_content", "thinking")}
_INPUT: _Names = {"input": (CONTEXT,)}
# Fields beside a prompt and its answer that only a chat template has a place for.
ONLY_IN_CHATS = frozenset(("tools", REASONING, *_REASONING[REASONING]))
# In the order in which they are tried: the most specific shape comes first.
KINDS = {
    "messages": _Kind((("messages",),), ("tools", SYSTEM, ARGUMENTS)),
    "conversations": _Kind(
        (("conversations", "conversation"),), ("tools", SYSTEM, ARGUMENTS), _SYSTEM
    ),
    "prompt-completion": _Kind(
        (("prompt", "question", "query", "input"), ("completion", "answer", "response", "output")),
        ("tools", CONTEXT, SYSTEM, REASONING, ARGUMENTS),
        _SYSTEM | _REASONING,
    ),
    "alpaca": _Kind(
        (("instruction",), ("output", "response")),
        ("input", SYSTEM, REASONING, ARGUMENTS),
        _INPUT | _SYSTEM | _REASONING,
    ),
    "text": _Kind((("text",),)),
    PREFERENCE: _Kind(
        (("chosen",), ("rejected",)),
        ("prompt", "input", CONTEXT, "tools", SYSTEM, ARGUMENTS),
        {"prompt": ("question", "query", "instruction")} | _SYSTEM,
    ),
    "tokens": _Kind((("input_ids",),), ("labels", "attention_mask")),
}
# Fields that no shape requires.
OPTIONAL = frozenset(own for kind in KINDS.values() for own in kind.optional) - {"prompt"}
# Records of preference are pairs, or single answers with a label, which only --shape asks for.
_FORMS = {
    PREFERENCE: (
        KINDS[PREFERENCE],
        _Kind((("messages",), (LABEL,)), ("tools", SYSTEM, ARGUMENTS), _SYSTEM),
        _Kind(
            (*KINDS["prompt-completion"].required, (LABEL,)),
            ("tools", CONTEXT, SYSTEM, ARGUMENTS),
            _SYSTEM,
        ),
    )
}
# what other tools call them
OTHER_NAMES = {
    "messages": ("openai", "chatml"),
    "conversations": ("sharegpt",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "instruct"),
    "text": ("pretrain",),
    "tokens": ("input-ids", "pretokenized"),
    PREFERENCE: ("dpo", "kto"),
}
FIELDS = sorted({names[0] for k in KINDS.values() for names in k.required}
                | {name for k in KINDS.values() for name in k.optional}
                | {LABEL, *MESSAGE_KEYS})  # fmt: skip


def find_shape(
    fields: list[str], wanted: str | None, renamed: dict[str, str], where: str, *, tokens: bool
) -> Shape:
    """The shape of a record with these field names.

    `wanted`: --shape, or None to detect it; `renamed`: --field. `tokens`: whether the format can
    hold lists of ids. Raises DataError when no shape fits, naming the fields found.
    """
    if absent := [name for name in renamed.values() if not may_hold(fields, name)]:
        raise DataError(
            f"{where}: records have no '{absent[0]}'; fields found: {named(fields)}",
            "name the right field with --text-field, or with --field NAME=COLUMN",
        )
    kinds = [wanted] if wanted else [k for k in KINDS if tokens or k != "tokens"]
    # some forms are those of records only where --shape asks for them
    forms = [
        (kind, form)
        for kind in kinds
        for form in (_FORMS.get(kind, (KINDS[kind],)) if wanted else (KINDS[kind],))
    ]
    fitting = [
        Shape(kind, columns)
        for kind, form in forms
        # an alpaca record's input and output alone look like a prompt and its completion
        if wanted or kind != "prompt-completion" or "instruction" not in fields
        if (columns := _columns(form, fields, renamed)) is not None
    ]
    for shape in fitting:
        if renamed.keys() <= shape.columns.keys():
            return shape
    if fitting:
        shape = fitting[0]
        other = next(own for own in renamed if own not in shape.columns)
        raise DataError(
            f"{where}: records of shape {shape.kind} have no field '{other}', which --field maps",
            f"leave it out; fields of that shape: {named(shape.columns)}",
        )
    expected = ", ".join("+".join(names[0] for names in form.required) for _, form in forms)
    text = "name the text with --text-field, or " if wanted in (None, "text") else ""
    other = ", or choose another --shape" if wanted else ""
    raise DataError(
        f"{where}: the records' fields fit none of: {expected}; fields found: {named(fields)}",
        f"{text}map other fields with --field NAME=COLUMN{other}",
    )


def fits_a_shape(fields: list[str], wanted: str | None, renamed: dict[str, str]) -> bool:
    """Whether `find_shape` would find one."""
    try:
        find_shape(fields, wanted, renamed, "", tokens=True)
    except DataError:
        return False
    return True


def _columns(kind: _Kind, fields: list[str], renamed: dict[str, str]) -> dict[str, str] | None:
    """Own name of a field -> its name in the input; None where a required one is not there."""
    mapped = {*renamed.values()}
    free = {*fields} - mapped

    def column_of(own: str, names: Iterable[str]) -> str | None:
        return renamed.get(own) or next((name for name in names if name in free), None)

    columns = {names[0]: column_of(names[0], names) for names in kind.required}
    if any(column is None or not may_hold(fields, column) for column in columns.values()):
        return None
    free.difference_update(column for column in columns.values() if column)
    for own in kind.optional:
        column = column_of(own, (own, *kind.others.get(own, ())))
        # other records may have fields that the first one lacks
        if column or own not in mapped.union(fields):
            columns[own] = column or own
    return {own: column for own, column in columns.items() if column}


def may_hold(fields: Collection[str], column: str) -> bool:
    """Whether records with these fields may have the column: one of its name, or of the beginning
    of it up to a dot.
    """
    dots = (at for at, character in enumerate(column) if character == ".")
    return column in fields or any(column[:at] in fields for at in dots)


def value_at(record: Any, column: str) -> Any:
    """What a record has there; ABSENT where it has nothing. A field of that very name comes first,
    then dots lead into objects.
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
    """UsageError for a field's own name that neither a shape nor a message has, and for a column of
    several fields.
    """
    first = dict[tuple[bool, str], str]()
    for own, column in renamed:
        if own not in FIELDS:
            raise one_of("--field", own, FIELDS)
        other = first.setdefault((own in MESSAGE_KEYS, column), own)
        if other != own:
            raise UsageError(
                f"--field: maps '{column}' to '{other}' and to '{own}'", "leave one of them out"
            )


# Options for records that no shape fits: a list of objects, each with a short name and a text, is a
# conversation; of texts, two with known names or by position are a prompt and its answer, and a
# single long one is text.

# by which others call them, in lower case; what says most comes first
_ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "participant", "who", "user", "name")
_TEXT_KEYS = ("content", "value", "text", "message", "utterance", "body", "msg")
_PROMPTS = ("prompt", "question", "query", "problem", "instruction", "inputs", "input", "source",
            "request", "human", "user", "task", "q")  # fmt: skip
_ANSWERS = ("completion", "answer", "response", "output", "outputs", "solution", "targets",
            "target", "reply", "assistant", "a")  # fmt: skip
_TEXTS = ("text", "content", "raw_content", "body", "document", "article", "code", "markdown",
          "story")  # fmt: skip
_ROLES = {
    "user": ("user", "human", "customer", "client", "questioner", "prompter", "student",
             "patient"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai", "agent", "chatbot",
                  "answerer", "teacher", "doctor"),
}  # fmt: skip
# roles that need no --role, by the key of the speaker: in OpenAI style, and in ShareGPT style
_OPENAI_ROLES = frozenset(("user", "assistant", "system", "tool", "developer", "function"))
_KNOWN_ROLES = _OPENAI_ROLES | {
    "human", "gpt", "chatgpt", "bot", "model", "observation", "function_response", "ipython",
    "function_call", "tool_call",
}  # fmt: skip
_NO_TEXTS = frozenset(("id", "name", "type", "tool_call_id"))
# what stands beside a prompt or a text
_BESIDE = frozenset(
    ("title", "context", "system", "system_prompt", "reasoning", "reasoning_content", "thinking")
)
_NAME = 40  # characters of a speaker's name at most
_LONG = 20  # of a text at least, if it is to be more than a name or a number
_Given = dict[str, dict[str, str]]  # --field and --role -> their pairs


def written(options: Mapping[str, Mapping[str, str]]) -> str:
    """Options as they are typed: `--field messages=dialogue --role Agent=assistant`."""
    return " ".join(
        f"{flag} {shlex.quote(f'{one}={other}')}"
        for flag, pairs in options.items()
        for one, other in pairs.items()
    )


def options_for(record: Mapping[str, Any], shape: str | None) -> _Given:
    """The options that a record needs; {} where it does not tell. `shape`: --shape."""
    if shape in (None, "messages", "conversations"):
        for column, messages in _conversations(record):
            names, key = key_options(messages[0]), _keys(messages)
            roles = dict[str, str]()
            for speaker, own in _speakers(messages, key[0] if key else "role").items():
                roles[speaker] = own or ("assistant" if "user" in roles.values() else "user")
            fields = {shape or "messages": column} | names.get("--field", {})
            return {"--field": fields} | ({"--role": roles} if roles else {})
    texts = {name: value for name, value in record.items() if isinstance(value, str)}
    for kind, fields in (
        (PREFERENCE, _named(record, chosen=("chosen", "preferred", "accepted"),
                            rejected=("rejected", "dispreferred"))),
        ("alpaca", _named(texts, instruction=("instruction",), output=("output", "response"))),
        ("prompt-completion", _named(texts, prompt=_PROMPTS, completion=_ANSWERS)),
        ("text", _named(texts, text=_TEXTS)),
        ("prompt-completion", _by_position(texts, ("prompt", "completion"))),
        ("text", _by_position(texts, ("text",))),
    ):  # fmt: skip
        if fields and shape in (None, kind):
            more = _named(texts, input=("input",)) if kind == "alpaca" else {}
            return {"--field": fields | more}
    return {}


def key_options(message: Any) -> _Given:
    """`--field` options for the keys of a message that has no role or no content; {} likewise."""
    keys = _keys([message]) if isinstance(message, dict) else None
    known = {"role": ("role", "from"), "content": ("content", "value")}
    fields = {
        own: key for own, key in zip(known, keys or (), strict=False) if key not in known[own]
    }
    return {"--field": fields} if fields else {}


def role_options(value: Any, role: str | None) -> _Given:
    """`--role` for the speakers of messages whose names tell their roles; {} where there are none.
    `role`: the key that --field names.
    """
    messages = _parsed(value)
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return {}
    key = role or ("role" if any("role" in one for one in messages) else "from")
    roles = {name: own for name, own in _speakers(messages, key).items() if own}
    return {"--role": roles} if roles else {}


def _conversations(record: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Columns that hold a list of messages, or JSON text of one; also in objects."""
    for name, value in record.items():
        messages = _parsed(value)
        if isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
            if messages and _keys(messages) is not None:
                yield name, messages
        elif isinstance(value, dict):
            yield from ((f"{name}.{inner}", own) for inner, own in _conversations(value))


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _speakers(messages: list[dict[str, Any]], key: str) -> dict[str, str]:
    """Speakers that are not known -> the roles that their names tell, or ""."""
    known = _OPENAI_ROLES if key == "role" else _KNOWN_ROLES
    names = [one for one in (message.get(key) for message in messages) if isinstance(one, str)]
    return {
        name: next((own for own, others in _ROLES.items() if name.lower() in others), "")
        for name in names
        if name not in known
    }


def _keys(messages: list[dict[str, Any]]) -> tuple[str, str] | None:
    """The keys of speakers, which all messages have, and of texts; None where there are none."""
    first = messages[0]
    texts = [key for key, value in first.items() if isinstance(value, str)]
    names = [key for key in texts if all(_is_name(one.get(key)) for one in messages)]
    role = _first_of(names, _ROLE_KEYS)
    rest = [key for key in texts if key != role and key not in _NO_TEXTS]
    text = _first_of(rest, _TEXT_KEYS) or max(rest, key=lambda key: len(first[key]), default=None)
    return None if role is None or text is None else (role, text)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _NAME


def _first_of(names: list[str], known: tuple[str, ...]) -> str | None:
    by_name = {name.lower(): name for name in reversed(names)}
    return next((by_name[one] for one in known if one in by_name), None)


def _named(values: Mapping[str, Any], **known: tuple[str, ...]) -> dict[str, str]:
    """Own name of a field -> the column with one of the known names; {} where one has none."""
    found = {own: _first_of(list(values), names) for own, names in known.items()}
    fields = {own: name for own, name in found.items() if name is not None}
    return fields if len(fields) == len(known) else {}


def _by_position(texts: Mapping[str, str], own: tuple[str, ...]) -> dict[str, str]:
    """The columns of long texts, if there are as many; or else of all texts. What is known to be
    asked is asked, and what stands beside a prompt is neither.
    """
    texts = {name: text for name, text in texts.items() if name.lower() not in _BESIDE}
    asked = [name for name in texts if name.lower() in _PROMPTS[:5]]
    long = [name for name, text in texts.items() if len(text) >= _LONG and " " in text.strip()]
    for names in (long, list(texts)):
        if len(names) == len(own) and asked in ([], names[:-1]):
            return dict(zip(own, names, strict=True))
    return {}
