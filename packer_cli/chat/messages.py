"""Records as conversations: messages of every dialect as chat templates know them, and the fields
of other shapes as messages or texts. It costs a look at each message; most need no change.

    {"messages": [..]}                                     a conversation as it is
    {"prompt": .., "completion": ..}                       texts, or lists of messages
    {"instruction": .., "input": .., "output": ..}         Alpaca's

Prompts are texts, unless a chat template is to render them. Messages have many dialects:

    {"role": "user", "content": "..."}                   OpenAI style: as it is
    {"from": "gpt", "value": "..."}                      ShareGPT style: renamed
    {"from": "function_call", "value": '{"name": ..}'}   becomes an assistant's tool call
    {"role": "tool_call", "content": '{"name": ..}'}     becomes one, too, as all roles of ShareGPT
    {"function_call": {"name": ..}, ...}                 becomes one
    {"speaker": "..", "text": ".."}                      renamed as --field and --role say
    content: null, a string, or a list of text parts
    tool_calls: a list of objects, or JSON text of one

As in transformers, fields that are null are left out of a message. So are `reasoning` and
`thinking` that are switches, such as "on" or true.

Flags of messages and ranges of content in a record restrict what `--train-on` chooses:

    {"weight": 0}                  OpenAI, Mistral: 0 or 1
    {"train": false}               axolotl; also "training"
    {"loss": false}                ms-swift, ChatGLM; "loss_weight" of LLaMA-Factory: 0 or 1
    {"masking": true}              the other way round; also "masked"
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": true}]}
                                   axolotl: characters of the content, the last one included; only
                                   such ranges of the content are trained on, and nothing of a
                                   message with an empty list
    {"content": [{"type": "text", "text": "..", "weight": 0}]}
                                   any of the flags, for a part of the content
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from packer_cli._kernels.texts import is_plain
from packer_cli.errors import DataError, named
from packer_cli.options import shapes
from packer_cli.options.shapes import (
    ARGUMENTS,
    CALLS,
    HISTORY,
    PLAIN_ROLES,
    SYSTEM,
    Shape,
    list_in,
    messages_in,
    role_of,
    turns_in,
)

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
PASSED = ("messages", "tools", "add_generation_prompt")  # variables of templates
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
    """A record as messages.

    arguments  of the record, for the chat template
    turn       with `--turns each`, the number of its last message among the answers of the record:
               only that one is trained on, and all before is its prompt
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    arguments: dict[str, Any] | None = None
    turn: int | None = None

    def first(self, count: int) -> Conversation:
        """Return the conversation of the first messages."""
        return replace(self, messages=self.messages[:count])


class RefusedError(ValueError):
    """The template cannot render these messages: they are a bad record."""


class UndecidableError(DataError):
    """Nothing shows which part of the text is the assistant's. `position`: of its record."""

    position = 0


def undecidable(why: str, way_out: str = _WAY_OUT) -> UndecidableError:
    """Return the error. It is not a constructor: pickle calls that with the whole message."""
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
    """A role that --role gives: it is not looked up again among names of speakers."""

    __slots__ = ()


@dataclass(frozen=True)
class Naming:
    """Names of keys and speakers in the input, from options.

    keys   packer's name -> name in the input
    roles  speaker -> role
    """

    keys: Mapping[str, str]
    roles: Mapping[str, str]

    def applied(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a record with the names that `parse_messages` knows."""
        renamed = fields.copy()
        for name in _OF_MESSAGES:
            value = renamed.get(name)
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
                renamed[name] = [
                    self._message(item) if isinstance(item, dict) else item
                    for item in map(_decoded, value)
                ]
        return renamed

    def _message(self, item: dict[str, Any]) -> dict[str, Any]:
        there = {key: name for name, key in self.keys.items() if key in item}
        hidden = {name for known in there.values() for name in _HIDDEN.get(known, (known,))}
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
    """Note values of these names in messages, under VALUES; flags that are 0 leave untrained."""
    if isinstance(messages, str):
        with suppress(*_JSON_ERRORS):
            messages = msgspec.json.decode(messages)
    if not isinstance(messages, list):
        return messages
    messages = [*map(_decoded, messages)]
    noted = list[Any]()
    for message in messages:
        if isinstance(message, dict) and not message.keys().isdisjoint(names):
            values = {name: message[name] for name in names if name in message}
            flags = {name: bool(value) for name, value in values.items()
                     if name in _FLAGS and type(value) in (int, float)}  # fmt: skip
            noted.append(message | flags | {VALUES: values})
        else:
            noted.append(message)
    return noted


def parse_messages(value: Any, name: str, *, keep_parts: bool) -> list[dict[str, Any]]:
    """Return the messages in a field called `name`: a list of objects, or JSON text of one.

    `keep_parts`: leave lists of text parts to the template; otherwise they become one string.
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
    """Decode a message or a tool that is JSON text of an object; anything else stays as it is."""
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
    """Return the message with OpenAI's names of fields and roles."""
    if "role" not in message and "from" in message:
        value = message.pop("value", None)
        text = {} if value is None else {"content": value}
        message = {"role": message.pop("from"), **text, **message}
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
    """Return the message without fields of reasoning that are switches. Raises MalformedError."""
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
    """Return the field of the message's calls as templates know it; {} without calls."""
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
    """Return a list of objects, from a list, from one object, or from JSON text of either."""
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
    """Return tools, from a list, one object, or JSON text of either; None if there are none."""
    if isinstance(value, str):
        value = parse_json(value, name) if value.strip() else None
    if isinstance(value, dict):
        value = [value]
    if value is not None and not isinstance(value, list):
        raise MalformedError(f"field '{name}' is {kind_of(value)}, expected a list of tools")
    return [*map(_decoded, value)] if value else None


def parse_json(text: str, name: str) -> Any:
    """Decode a field's text. Raises MalformedError."""
    try:
        return msgspec.json.decode(text)
    except _JSON_ERRORS as error:
        raise MalformedError(f"field '{name}' is text that is not valid JSON: {error}") from None


def parse_arguments(value: Any, field: str) -> dict[str, Any] | None:
    """Return the arguments of a record for its template: an object, or JSON text of one; None if
    there are none. Nulls are left out, as in messages. Raises MalformedError.
    """
    if isinstance(value, str) and value.strip():
        value = parse_json(value, field)
    if value is None or value == "":
        return None
    if not isinstance(value, dict):
        raise MalformedError(f"field '{field}' is {kind_of(value)}, expected an object")
    for name in PASSED:
        if name in value:
            raise MalformedError(f"{field}.{name}: packer passes it to the chat template itself")
    return {name: argument for name, argument in value.items() if argument is not None} or None


def joined_content(content: Any) -> str:
    """Return the text of content, which may be a list of parts; "" without content."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def says_something(message: _Message) -> bool:
    """Tell whether a message has words, reasoning or calls."""
    texts = [joined_content(message.get("content")), *(message.get(key) for key in REASONING)]
    has_words = any(isinstance(text, str) and text.strip() for text in texts)
    return has_words or bool(message.get("tool_calls"))


def with_context(messages: list[dict[str, Any]], trained_on: Collection[int] = ()) -> list[Any]:
    """Return the messages, with a note at those of the assistant whose numbers are not these."""
    return [
        message | {CONTEXT: True}
        if message.get("role") == ASSISTANT and number not in trained_on
        else message
        for number, message in enumerate(messages)
    ]


def is_switch(reasoning: str) -> bool:
    """Tell whether a text beside a prompt is a setting, such as "high", and not a thought."""
    text = reasoning.strip()
    return text.lower() in _SWITCHES or _SENTENCE.fullmatch(text) is not None


def kind_of(value: object) -> str:
    kinds = {str: "a string", int: "an integer", float: "a number", bool: "true or false",
             dict: "an object", list: "a list", type(None): "null"}  # fmt: skip
    return kinds.get(type(value), type(value).__name__)


def without_notes(message: _Message) -> _Message:
    """Return the message as its chat template gets it, without packer's notes."""
    if _UNSHOWN.isdisjoint(message):
        return message
    return {key: value for key, value in message.items() if key not in _UNSHOWN}


def any_flags(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether any of the messages has a flag or a range for training."""
    return not all(map(OF_TRAINING.isdisjoint, messages))


def is_trained(message: Mapping[str, Any]) -> bool:
    """Tell whether the flags of a message, or of a part of one, let it be trained on."""
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
    """Return the characters of content that the ranges of the message leave out."""
    if _DETAIL not in message:
        return []
    details, content, where = message[_DETAIL], message.get("content"), f"{where}.{_DETAIL}"
    if not isinstance(details, list) or not isinstance(content, str):
        raise MalformedError(
            f"{where} is {type(details).__name__}, expected a list of ranges, of content that is a "
            "string"
        )
    trained = bytearray(len(content) if details else 0)
    for number, detail in enumerate(details):
        if not isinstance(detail, dict) or detail.get("train") not in (0, 1):
            raise MalformedError(
                f"{where}[{number}] is {detail!r}, expected begin_offset, end_offset and train, 0 "
                "or 1"
            )
        begin, end = detail.get("begin_offset"), detail.get("end_offset")
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(content):
            raise MalformedError(
                f"{where}[{number}] is of the characters {begin} to {end}, expected some of the "
                f"{len(content)} of the content, from 0 on"
            )
        trained[begin : end + 1] = bytes([bool(detail["train"])]) * (end + 1 - begin)
    return [list(match.span()) for match in _UNTRAINED.finditer(trained)]


def _ranges_of_parts(parts: list[Any], texts: list[str]) -> list[_Range]:
    """Return the characters of content in parts that are not trained on."""
    flags = [not isinstance(part, dict) or is_trained(part) for part in parts]
    trained = b"".join(bytes([flag]) * len(text) for flag, text in zip(flags, texts, strict=True))
    return [list(match.span()) for match in _UNTRAINED.finditer(trained)]


# -- Fields of any shape

_ALPACA = "alpaca"
# Taori et al. 2023, Stanford Alpaca: the prompts that the data were made for.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


def conversation_of(
    fields: _Message, shape: Shape, prompt_template: str,
    keeps_parts: Callable[[list[Any] | None, _Message | None], bool],
) -> Conversation | None:  # fmt: skip
    """Return a record as messages; None if it becomes text without a template.

    `keeps_parts`: tells whether the template for such tools and arguments takes content in parts.
    Raises MalformedError.
    """
    columns = shape.columns
    arguments = parse_arguments(fields.get(ARGUMENTS), columns.get(ARGUMENTS, ARGUMENTS))
    if not (shape.is_chat or shape.of_messages or prompt_template == "chat"):
        return None
    tools = parse_tools(fields.get("tools"), columns.get("tools", ""))
    keep_parts = keeps_parts(tools, arguments)
    if shape.is_chat:
        name = shape.required[0]
        messages = parse_messages(fields[name], columns[name], keep_parts=keep_parts)
    else:
        if shape.of_messages:
            is_talk = not isinstance(fields["prompt"], str) or bool(
                messages_in(fields["prompt"], certain=True)
            )
            prompt, completion = (
                [{"role": role, "content": fields[name]}]
                if isinstance(fields[name], str)
                and not (is_talk and messages_in(fields[name], certain=True))
                else parse_messages(fields[name], columns[name], keep_parts=keep_parts)
                for name, role in (("prompt", "user"), ("completion", ASSISTANT))
            )
        else:
            question, more, answer = _texts(fields, shape)
            prompt = [{"role": "user", "content": _with_more(question, more)}]
            completion = [{"role": ASSISTANT, "content": answer}]
        if earlier := _earlier(fields, shape):
            earlier = parse_messages(earlier, columns[HISTORY], keep_parts=keep_parts)
        messages = [*with_context([*earlier, *prompt]), *completion]
        _think(completion, _optional_text(fields, shapes.REASONING, shape))
    system = _optional_text(fields, SYSTEM, shape)
    if system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, tools, arguments)


def _think(completion: list[_Message], reasoning: str) -> None:
    """Give the only answer of a completion the reasoning that stands beside it."""
    answers = [message for message in completion if message.get("role") == ASSISTANT]
    if len(answers) != 1 or not reasoning or is_switch(reasoning):
        return
    (answer,) = answers
    if not answer.get(REASONING[0]) and "</think>" not in str(answer.get("content")):
        answer |= dict.fromkeys(REASONING[:2], reasoning)


def _earlier(fields: _Message, shape: Shape) -> list[_Message]:
    """Return the messages before the prompt. Raises MalformedError for a list of anything else."""
    history = fields.get(HISTORY)
    turns = turns_in(history)
    if list_in(history) and not turns:
        raise MalformedError(
            f"field '{shape.columns[HISTORY]}' is a list of neither messages nor questions with "
            "their answers",
            "write it as [[QUESTION, ANSWER], ...], or remove the field",
        )
    return turns


def texts_of(fields: _Message, shape: Shape, prompt_template: str) -> tuple[str, str]:
    """Return the prompt of a record and its answer. Raises MalformedError."""
    if turns := _earlier(fields, shape):
        raise MalformedError(
            f"field '{shape.columns[HISTORY]}' has earlier messages ({len(turns)}), and such "
            "prompts have no place for them",
            "--prompt-template chat uses them; otherwise remove the field",
        )
    system = _optional_text(fields, SYSTEM, shape)
    prompt, more, answer = _texts(fields, shape)
    if prompt_template != _ALPACA:
        return "\n\n".join(filter(None, (system, _with_more(prompt, more)))), answer
    preamble, blank, template = (ALPACA_WITH_INPUT if more else ALPACA).partition("\n\n")
    return (system or preamble) + blank + template.format(instruction=prompt, input=more), answer


def _texts(fields: _Message, shape: Shape) -> tuple[str, str, str]:
    """(a prompt, its input or context, its answer)."""
    asked, more, answer = ("prompt", shapes.CONTEXT, "completion")
    if shape.kind == _ALPACA:
        asked, more, answer = ("instruction", "input", "output")
    prompt, completion = _text(fields, asked, shape), _text(fields, answer, shape)
    return prompt, _optional_text(fields, more, shape), completion


def _with_more(prompt: str, more: str | None) -> str:
    """Return a prompt with its input or context on a line of its own."""
    return f"{prompt}\n{more}" if more else prompt


def _text(fields: _Message, name: str, shape: Shape) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise MalformedError(
            f"field '{shape.columns[name]}' is {kind_of(value)}, expected a string"
        )
    return value


def _optional_text(fields: _Message, name: str, shape: Shape) -> str:
    return _text(fields, name, shape) if fields.get(name) else ""
