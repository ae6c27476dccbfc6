"""Conversations of every dialect, as the messages that chat templates know.

    {"role": "user", "content": "..."}                   OpenAI style: as it is
    {"from": "gpt", "value": "..."}                      ShareGPT style: renamed
    {"from": "function_call", "value": '{"name": ..}'}   becomes an assistant's tool call
    {"role": "tool_call", "content": '{"name": ..}'}     becomes one, too, as all roles of ShareGPT
    {"function_call": {"name": ..}, ...}                 becomes one
    {"speaker": "..", "text": ".."}                      renamed as --field and --role say
    content: null, a string, or a list of text parts
    tool_calls: a list of objects, or JSON text of one

As transformers does, fields that are null are left out of a message; and so are `reasoning` and
`thinking` that are switches, such as "on" or true.

Records themselves may say what of them is trained on, by flags of messages and ranges of content,
which only take away from what `--train-on` chooses:

    {"weight": 0}                  OpenAI, Mistral: 0 or 1
    {"train": false}               axolotl; also "training"
    {"loss": false}                ms-swift, ChatGLM; "loss_weight" of LLaMA-Factory: 0 or 1
    {"masking": true}              the other way round; also "masked"
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": true}]}
                                   axolotl: characters of the content, the last one included; of
                                   the content only what such a range says is trained on, and of
                                   a message with an empty list, nothing
    {"content": [{"type": "text", "text": "..", "weight": 0}]}
                                   any of the flags, of a part of the content
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from packer_cli._kernels.texts import is_plain
from packer_cli.errors import DataError, named
from packer_cli.options.shapes import CALLS, PLAIN_ROLES, messages_in, role_of

# flags, and whether what has 1 or true there is trained on
_FLAGS = dict.fromkeys(("weight", "train", "training", "loss", "loss_weight"), True) | {
    "masking": False, "masked": False
}  # fmt: skip
_DETAIL = "train_detail"
# Notes of packer, and no fields of the record: a message that the user's choice leaves untrained,
# which no flag can say; [from, to] of the characters of its content that are not trained on; and
# the values of its trained tokens, by name.
CONTEXT, RANGES, VALUES = "\0context", "\0ranges", "\0values"
_NOTES = frozenset((CONTEXT, RANGES))  # of parsed messages: no record may bring its own
_UNSHOWN = frozenset((*_NOTES, VALUES))
OF_TRAINING = frozenset((*_FLAGS, _DETAIL, *_UNSHOWN))
_UNTRAINED = re.compile(rb"\0+")
_Range = list[int]  # [from, to]; no tuple, which a copy with marks would make a list
_Message = dict[str, Any]
_JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_WAY_OUT = "use a template with {% generation %} tags (--chat-template), or --train-on all"
_NAMING = "where other keys hold them: --field role=KEY --field content=KEY"
_ELSEWHERE = ("text", "message", "parts")  # other names for content, which no template shows
ASSISTANT = "assistant"
REASONING = ("reasoning_content", "thinking", "reasoning")  # templates read the first two
_PARSED = frozenset(("function_call", "tool_calls", *REASONING, *OF_TRAINING))

# What packer reads of a message, and names that tie calls to results.
KNOWN_KEYS = frozenset(
    ("role", "content", *REASONING, *OF_TRAINING, "tool_calls", "function_call", "tool_call_id",
     "name", "id")
)  # fmt: skip


# fields of records that may hold messages, and those in which text is JSON of them
_OF_MESSAGES = ("messages", "conversations", "prompt", "completion")
_AS_TEXT = _OF_MESSAGES[:2]
# what `reasoning` and `thinking` of a message say of how it was made
_SWITCHES = frozenset(
    ("on", "off", "true", "false", "yes", "no", "none", "low", "medium", "high", "auto", "enabled",
     "disabled", "minimal", "think", "/think", "no_think", "/no_think")
)  # fmt: skip
_THOUGHTS = frozenset(("text", "content", "thinking", "reasoning"))  # of an object in their place
_SENTENCE = re.compile("(detailed )?(thinking|reasoning) (on|off)", re.IGNORECASE)
# what a key is renamed to, as one whose role is named anew speaks ShareGPT; and what that hides
_RENAMED = {"role": "from"}
_HIDDEN = {"role": ("role", "from"), "content": ("content", "value")}


@dataclass(frozen=True)
class Conversation:
    """A record as messages. `arguments`: its own ones for the chat template.

    `turn`: where only its last message is trained on, as the answer to the prompt of all before:
    the number of that answer among those of the record.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    arguments: dict[str, Any] | None = None
    turn: int | None = None


class RefusedError(ValueError):
    """The template cannot render these messages: they are a bad record."""


class UndecidableError(DataError):
    """Nothing shows which part of the text is the assistant's."""

    position = 0


def undecidable(why: str, way_out: str = _WAY_OUT) -> UndecidableError:
    """The error. No constructor of the class: pickle calls that with the whole message."""
    return UndecidableError(
        f"cannot tell which part of the text is the assistant's: {why}", way_out
    )


class MalformedError(ValueError):
    """The record does not fit its shape. `tip`: what may help, beside fixing it."""

    def __init__(self, message: str, tip: str = "") -> None:
        super().__init__(message, tip)  # both in args, so that errors survive pickling
        self.tip = tip

    def __str__(self) -> str:
        return str(self.args[0])


class _GivenRole(str):
    """A role that --role gives: it stays as it is, whatever else that name may mean."""

    __slots__ = ()


@dataclass(frozen=True)
class Naming:
    """How the input names keys of messages and speakers, where options say so.

    keys   own name -> name in the input
    roles  speaker -> role
    """

    keys: Mapping[str, str]
    roles: Mapping[str, str]

    def applied(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a record with the names that `parse_messages` knows."""
        own = fields.copy()
        for name in _OF_MESSAGES:
            value = own.get(name)
            if name in _AS_TEXT and isinstance(value, str):
                try:
                    value = msgspec.json.decode(value)
                except _JSON_ERRORS:
                    continue
            elif isinstance(value, str | dict):
                keys = self.keys.values()
                if name != "completion" or messages_in(fields.get("prompt"), *keys, certain=True):
                    value = messages_in(value, *keys, certain=True)
            if value and isinstance(value, list):
                value = [*map(_decoded, value)]
                own[name] = [self._message(one) if isinstance(one, dict) else one for one in value]
        return own

    def _message(self, item: dict[str, Any]) -> dict[str, Any]:
        there = {key: own for own, key in self.keys.items() if key in item}
        hidden = {name for own in there.values() for name in _HIDDEN.get(own, (own,))}
        message = {
            _RENAMED.get(there[key], there[key]) if key in there else key: value
            for key, value in item.items()
            if key in there or key not in hidden
        }
        for key in ("role", "from"):
            speaker = message.get(key)
            if isinstance(speaker, str) and speaker in self.roles:
                message[key] = _GivenRole(self.roles[speaker])
        return message


def with_noted(messages: Any, names: Collection[str]) -> Any:
    """Messages with what these names say of each as a note, VALUES, too, which no template sees. A
    flag among them says whether a message is trained on: where its value is not 0.
    """
    if isinstance(messages, str):
        with suppress(*_JSON_ERRORS):
            messages = msgspec.json.decode(messages)
    if not isinstance(messages, list):
        return messages
    messages = [*map(_decoded, messages)]
    noted = list[Any]()
    for one in messages:
        if isinstance(one, dict) and not one.keys().isdisjoint(names):
            values = {name: one[name] for name in names if name in one}
            flags = {name: bool(value) for name, value in values.items()
                     if name in _FLAGS and type(value) in (int, float)}  # fmt: skip
            noted.append(one | flags | {VALUES: values})
        else:
            noted.append(one)
    return noted


def parse_messages(value: Any, name: str, *, keep_parts: bool) -> list[dict[str, Any]]:
    """The messages in a field called `name`: a list of dicts, JSON text of one, or a list of texts.

    `keep_parts`: leave lists of text parts to the template; else they become one string.
    Raises MalformedError.
    """
    if isinstance(value, str):
        value = parse_json(value, name)
    if isinstance(value, dict) and messages_in(value):
        value = [value]
    if not isinstance(value, list):
        raise MalformedError(f"field '{name}' is {kind_of(value)}, expected a list of messages")
    if not value:
        raise MalformedError(f"field '{name}' has no messages")
    return [
        item  # as most are
        if is_plain(item, _PARSED) and item["role"] in PLAIN_ROLES
        else _message(item, f"{name}[{i}]", keep_parts)
        for i, item in enumerate(value)
    ]


def _decoded(item: Any) -> Any:
    """An object that is JSON text, as a message or a tool of a list may be; else as it is."""
    if isinstance(item, str) and item.lstrip().startswith("{"):
        with suppress(*_JSON_ERRORS):
            return msgspec.json.decode(item)
    return item


def _message(item: Any, where: str, keep_parts: bool) -> dict[str, Any]:
    item = _decoded(item)
    if not isinstance(item, dict):
        raise MalformedError(f"{where} is {kind_of(item)}, expected an object")
    message = {k: value for k, value in item.items() if value is not None and k not in _NOTES}
    message = _without_switches(_as_openai(message, item, where), where)
    message |= _tool_calls(message, where)
    role, content = _role_of(message, item, where), message.get("content")
    _check_flags(message, where)
    ranges = _ranges_of(message, where)
    if isinstance(content, list):
        texts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        ranges = _ranges_of_parts(content, texts)
        if not keep_parts:
            message["content"] = "".join(texts)
    elif content is not None and not isinstance(content, str):
        raise MalformedError(
            f"{where}.content is {kind_of(content)}, expected a string or a list of parts"
        )
    elif content is None and (other := [key for key in _ELSEWHERE if key in message]):
        raise MalformedError(
            f"{where} has '{other[0]}', expected 'role' and 'content', or 'from' and 'value'",
            _NAMING,
        )
    elif content is None and role == "user":
        # rendered, it would be an empty question, or the word None
        raise MalformedError(f"{where} is the user's and has no content", _NAMING)
    if ranges:
        message[RANGES] = ranges
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:  # even "": a template may ask whether there is any
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    contents = ("content", "tool_calls", *REASONING)
    if role == "assistant" and is_trained(message) and not any(key in message for key in contents):
        # rendered, it would be an empty answer, and trained on
        raise MalformedError(
            f"{where} is the assistant's and has neither content nor tool calls: an empty answer"
        )
    return message


def _as_openai(message: dict[str, Any], item: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with OpenAI's names of fields and roles, whatever dialect the item speaks."""
    if "role" not in message and "from" in message:
        value = message.pop("value", None)
        said = {} if value is None else {"content": value}
        message = {"role": message.pop("from"), **said, **message}
    elif "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    if "role" not in message:
        return message
    role = message["role"]
    if isinstance(role, str) and role.lower() in CALLS and "tool_calls" not in message:
        content = f"{where}.{'value' if 'value' in item else 'content'}"
        calls = _calls(message.get("content"), content)
        return message | {"role": ASSISTANT, "content": "", "tool_calls": calls}
    return message | {"role": role_of(role)}


def _without_switches(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message without the fields of reasoning that hold no thought, but say how it was made."""
    for key in REASONING:
        thought = message.get(key, "")
        has_thoughts = isinstance(thought, dict) and not _THOUGHTS.isdisjoint(thought)
        if isinstance(thought, list) or has_thoughts:
            kind = kind_of(thought)
            raise MalformedError(f"{where}.{key} is {kind}, expected a string")
        is_switch_word = key != REASONING[0] and str(thought).lower() in _SWITCHES
        if not isinstance(thought, str) or is_switch_word:
            message = {name: value for name, value in message.items() if name != key}
    return message


def _role_of(message: dict[str, Any], item: dict[str, Any], where: str) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        problem = f"is {kind_of(role)}, expected a string"
        if "role" not in message:
            problem = f"is missing; keys found: {named(key for key in item if key != VALUES)}"
        raise MalformedError(f"{where}.role {problem}", _NAMING)
    return role


def _tool_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message's calls as templates know them, if it has any."""
    if message.get("function_call") and not message.get("tool_calls"):  # OpenAI's first way
        return {"tool_calls": _calls(message["function_call"], f"{where}.function_call")}
    if "tool_calls" in message:
        return {"tool_calls": _listed(message["tool_calls"], f"{where}.tool_calls")}
    return {}


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    calls = _listed(value, where)
    if not calls or not all(isinstance(call.get("name"), str) for call in calls):
        raise MalformedError(f"{where} is not a call: expected a JSON object with a name")
    return [{"type": "function", "function": call} for call in calls]


def _listed(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects, from a list, from one object, or from JSON text of either."""
    if isinstance(value, str):
        value = parse_json(value, where) if value.strip() else []
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, dict) for item in items):
        raise MalformedError(f"{where} is not a call: expected a JSON object, or a list of them")
    return items


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in (None, "text") or not isinstance(text, str):
        what = f"of type {kind!r}" if kind not in (None, "text") else "without a text"
        raise MalformedError(f"{where} is {what}; only text can be packed")
    if isinstance(part, dict):
        _check_flags(part, where)
    return text


def parse_tools(value: Any, name: str) -> list[Any] | None:
    """Tools as a list, or None when there are none: a list, one object, or JSON text of that."""
    if isinstance(value, str):
        value = parse_json(value, name) if value.strip() else None
    if isinstance(value, dict):
        value = [value]
    if value is not None and not isinstance(value, list):
        raise MalformedError(f"field '{name}' is {kind_of(value)}, expected a list of tools")
    return [*map(_decoded, value)] if value else None


def parse_json(text: str, name: str) -> Any:
    """The value that a field's text is JSON of. Raises MalformedError."""
    try:
        return msgspec.json.decode(text)
    except _JSON_ERRORS as error:
        raise MalformedError(f"field '{name}' is text that is not valid JSON: {error}") from None


def joined_content(content: Any) -> str:
    """The text of content, which may be a list of parts; "" for none."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def says_something(message: _Message) -> bool:
    """Whether a message has words, reasoning or calls."""
    words = [joined_content(message.get("content")), *(message.get(key) for key in REASONING)]
    spoken = any(isinstance(one, str) and one.strip() for one in words)
    return spoken or bool(message.get("tool_calls"))


def with_context(messages: list[dict[str, Any]], trained_on: Collection[int] = ()) -> list[Any]:
    """Messages of which the assistant's are not trained on, but for those of these numbers."""
    return [
        one | {CONTEXT: True} if one.get("role") == ASSISTANT and number not in trained_on else one
        for number, one in enumerate(messages)
    ]


def is_switch(reasoning: str) -> bool:
    """Tell whether a text beside a prompt says how the answer was made, and is not a thought."""
    text = reasoning.strip()
    return text.lower() in _SWITCHES or _SENTENCE.fullmatch(text) is not None


def kind_of(value: object) -> str:
    kinds = {str: "a string", int: "an integer", float: "a number", bool: "true or false",
             dict: "an object", list: "a list", type(None): "null"}  # fmt: skip
    return kinds.get(type(value), type(value).__name__)


def without_notes(message: _Message) -> _Message:
    """The message as its chat template gets it: with what the record has, and no more."""
    if _UNSHOWN.isdisjoint(message):
        return message
    return {key: value for key, value in message.items() if key not in _UNSHOWN}


def any_flags(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any of the messages says something of being trained on."""
    return not all(map(OF_TRAINING.isdisjoint, messages))


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether its flags leave a message, or a part of one, to be trained on. Nulls say nothing."""
    flags = ((message.get(flag), trained) for flag, trained in _FLAGS.items())
    return message.get(_DETAIL) != [] and all(
        value is None or bool(value) == trained for value, trained in flags
    )


def _check_flags(message: Mapping[str, Any], where: str) -> None:
    for flag in _FLAGS:
        value = message.get(flag)
        if value is not None and (isinstance(value, str | list | dict) or value not in (0, 1)):
            raise MalformedError(f"{where}.{flag} is {value!r}, expected 0 or 1, or false or true")


def _ranges_of(message: _Message, where: str) -> list[_Range]:
    """The characters of content that the message's own ranges do not train on."""
    if _DETAIL not in message:
        return []
    given, content, where = message[_DETAIL], message.get("content"), f"{where}.{_DETAIL}"
    if not isinstance(given, list) or not isinstance(content, str):
        raise MalformedError(
            f"{where} is {type(given).__name__}, expected a list of ranges, of content that is a "
            "string"
        )
    trained = bytearray(len(content) if given else 0)
    for number, one in enumerate(given):
        if not isinstance(one, dict) or one.get("train") not in (0, 1):
            raise MalformedError(
                f"{where}[{number}] is {one!r}, expected begin_offset, end_offset and train, 0 or 1"
            )
        begin, end = one.get("begin_offset"), one.get("end_offset")
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(content):
            raise MalformedError(
                f"{where}[{number}] is of the characters {begin} to {end}, expected some of the "
                f"{len(content)} of the content, from 0 on"
            )
        trained[begin : end + 1] = bytes([bool(one["train"])]) * (end + 1 - begin)
    return [list(found.span()) for found in _UNTRAINED.finditer(trained)]


def _ranges_of_parts(parts: list[Any], texts: list[str]) -> list[_Range]:
    """The characters of content that is made of parts which are not trained on."""
    flags = [not isinstance(part, dict) or is_trained(part) for part in parts]
    trained = b"".join(bytes([flag]) * len(text) for flag, text in zip(flags, texts, strict=True))
    return [list(found.span()) for found in _UNTRAINED.finditer(trained)]
