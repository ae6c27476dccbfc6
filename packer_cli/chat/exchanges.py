"""What a record asks, and what it answers: its fields, of any shape, as a conversation or as texts.

    {"messages": [..]}                                     a conversation as it is
    {"prompt": .., "completion": ..}                       text, or lists of messages
    {"instruction": .., "input": .., "output": ..}         Alpaca's
    {"prompt": "..", "chosen": "..", "rejected": ".."}     records of preference: two sides,
    {"chosen": [..], "rejected": [..]}                     or two conversations with one beginning
    {"prompt": .., "completion": .., "label": true}        an answer that is desirable, or is not
    {"messages": [..], "label": false}                     the same: what follows the last user

Prompts are texts, unless a chat template is to render them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

from packer_cli.chat.messages import (
    ASSISTANT,
    REASONING,
    Conversation,
    MalformedError,
    kind_of,
    parse_messages,
    parse_tools,
    says_something,
    with_context,
)
from packer_cli.chat.syntax import parse_arguments
from packer_cli.options.shapes import ARGUMENTS, CONTEXT, SYSTEM, Shape
from packer_cli.options.shapes import REASONING as REASONING_FIELD

_Fields = dict[str, Any]
_Message = dict[str, Any]
_CONTENT = ("content", "value")
_BOTH = "expected both as text, or both as messages"
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


class Side(NamedTuple):
    """One answer of a record of preference.

    prompt, answer  text, or messages as they are in the record; a prompt of None is the beginning
                    of the answer's messages
    prompt_column, column  that they are in
    is_good         chosen, or labelled true
    """

    prompt: Any
    answer: Any
    prompt_column: str
    column: str
    is_good: bool


def conversation_of(
    fields: _Fields, shape: Shape, side: Side | None, prompt_template: str,
    keeps_parts: Callable[[list[Any] | None, _Fields | None], bool],
) -> Conversation | None:  # fmt: skip
    """A record, or one side of it, as messages; None where it becomes text without a template.

    `keeps_parts`: whether the template for such tools and arguments takes content in parts.
    Raises MalformedError.
    """
    columns = shape.columns
    arguments = parse_arguments(fields.get(ARGUMENTS), columns.get(ARGUMENTS, ARGUMENTS))
    if not (shape.is_chat or shape.of_messages or prompt_template == "chat"):
        return None
    tools = parse_tools(fields.get("tools"), columns.get("tools", ""))
    if shape.is_chat:
        own = shape.required[0]
        keep_parts = keeps_parts(tools, arguments)
        messages = parse_messages(fields[own], columns[own], keep_parts=keep_parts)
    elif shape.of_messages and side is not None:
        messages = _messages_of(side, keep_parts=keeps_parts(tools, arguments))
    elif shape.of_messages:
        prompt, completion = (
            [{"role": role, "content": fields[own]}]
            if isinstance(fields[own], str)
            else parse_messages(fields[own], columns[own], keep_parts=keeps_parts(tools, arguments))
            for own, role in (("prompt", "user"), ("completion", ASSISTANT))
        )
        messages = [*with_context(prompt), *completion]
    else:
        question, more, answer = _texts(fields, shape, side)
        messages = [
            {"role": "user", "content": _with_more(question, more)},
            {"role": ASSISTANT, "content": answer},
        ]
        if side is None and (reasoning := _optional_text(fields, REASONING_FIELD, shape)):
            messages[-1] |= dict.fromkeys(REASONING[:2], reasoning)
    system = _optional_text(fields, SYSTEM, shape)
    if system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, tools, arguments)


def texts_of(
    fields: _Fields, shape: Shape, side: Side | None, prompt_template: str
) -> tuple[str, str]:
    """The prompt of a record, or of one side of it, and its answer. Raises MalformedError."""
    system = _optional_text(fields, SYSTEM, shape)
    prompt, more, answer = _texts(fields, shape, side)
    if prompt_template != _ALPACA:
        return "\n\n".join(filter(None, (system, _with_more(prompt, more)))), answer
    own, blank, rest = (ALPACA_WITH_INPUT if more else ALPACA).partition("\n\n")
    return (system or own) + blank + rest.format(instruction=prompt, input=more), answer


def _texts(fields: _Fields, shape: Shape, side: Side | None) -> tuple[str, str, str]:
    """(a prompt, what it is about, its answer)."""
    if side is not None:
        return side.prompt, "", side.answer
    asked, more, answer = ("prompt", CONTEXT, "completion")
    if shape.kind == _ALPACA:
        asked, more, answer = ("instruction", "input", "output")
    prompt, said = _text(fields, asked, shape), _text(fields, answer, shape)
    return prompt, _optional_text(fields, more, shape), said


def _with_more(prompt: str, more: str | None) -> str:
    """A prompt with what it is about, on a line of its own."""
    return f"{prompt}\n{more}" if more else prompt


def _text(fields: _Fields, own: str, shape: Shape) -> str:
    value = fields.get(own)
    if not isinstance(value, str):
        raise MalformedError(f"field '{shape.columns[own]}' is {kind_of(value)}, expected a string")
    return value


def _optional_text(fields: _Fields, own: str, shape: Shape) -> str:
    return _text(fields, own, shape) if fields.get(own) else ""


# -- Records of preference


def sides_of(fields: _Fields, shape: Shape) -> list[Side]:
    """The chosen and the rejected side of a record, or its only one. Raises MalformedError."""
    if "label" in shape.columns:
        return [_labelled(fields, shape)]
    names = [shape.columns[own] for own in ("chosen", "rejected")]
    answers: list[Any] = [fields.get(own) for own in ("chosen", "rejected")]
    _check_both(names, answers, shape)
    if answers[0] == answers[1]:
        raise MalformedError(
            f"fields '{names[0]}' and '{names[1]}' are equal, expected two different answers"
        )
    prompt, prompt_name = _prompt(fields, shape, answers)
    if prompt is None:
        prompt_name = names[0]
        shared = _shared(*answers)
        if not shared:
            raise MalformedError(
                f"there is no prompt, and '{names[0]}' and '{names[1]}' share no beginning; "
                "expected a prompt, or two conversations with the same beginning"
            )
        prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
    elif isinstance(prompt, list) and prompt and answers[0][: len(prompt)] == prompt:
        raise MalformedError(
            f"field '{names[0]}' begins with the messages of the prompt, expected those of the "
            "answer alone"
        )
    for name, answer in zip(names, answers, strict=True):
        _check_not_empty(name, answer)
    both = zip(answers, names, (True, False), strict=True)
    return [Side(prompt, answer, prompt_name, name, good) for answer, name, good in both]


def _prompt(fields: _Fields, shape: Shape, answers: list[Any]) -> tuple[Any, str]:
    """The prompt of a pair and its field; None where both sides begin with it."""
    prompt, name = fields.get("prompt"), shape.columns.get("prompt", "")
    more = fields.get("input")
    if prompt is None:  # an input alone is what is asked
        prompt, name, more = more or None, shape.columns.get("input", ""), None
    if prompt is None:
        if fields.get(CONTEXT) and isinstance(answers[0], str):
            raise MalformedError(
                f"there is a '{shape.columns[CONTEXT]}' and no prompt that it is put after; if it "
                f"is the prompt, give --field prompt={shape.columns[CONTEXT]}"
            )
        return None, name
    if isinstance(prompt, str) and isinstance(answers[0], str):
        more = more and _text(fields, "input", shape)
        return _with_more(_with_more(prompt, more), _optional_text(fields, CONTEXT, shape)), name
    if isinstance(prompt, str):
        # many files repeat a question of both conversations, the first or the last one, as text
        shared = answers[0][: _shared(*answers)]
        if prompt in [one.get(key) for one in shared if isinstance(one, dict) for key in _CONTENT]:
            return None, name
    _check_alike(name, prompt, shape.columns["chosen"], answers[0])
    return prompt, name


def _labelled(fields: _Fields, shape: Shape) -> Side:
    label = fields.get("label")
    if not isinstance(label, bool):
        shown = "" if label is None else f" {label!r}"
        raise MalformedError(
            f"field '{shape.columns['label']}' is {kind_of(label)}{shown}, expected true or false"
        )
    if "messages" in shape.columns:
        name = shape.columns["messages"]
        return Side(None, fields.get("messages"), name, name, label)
    names = [shape.columns[own] for own in ("prompt", "completion")]
    prompt, answer = (fields.get(own) for own in ("prompt", "completion"))
    _check_both(names, [prompt, answer], shape)
    _check_not_empty(names[1], answer)
    if isinstance(prompt, str):
        prompt = _with_more(prompt, _optional_text(fields, CONTEXT, shape))
    return Side(prompt, answer, names[0], names[1], label)


def _check_both(names: list[str], values: list[Any], shape: Shape) -> None:
    """Raises MalformedError unless both are text or both are messages, as in the file's first
    record, which has chosen how all of them become text.
    """
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str | list):
            raise MalformedError(
                f"field '{name}' is {kind_of(value)}, expected text, or a list of messages"
            )
    _check_alike(names[0], values[0], names[1], values[1])
    if isinstance(values[0], list) != shape.of_messages:
        first = "messages" if shape.of_messages else "text"
        raise MalformedError(
            f"field '{names[0]}' is {kind_of(values[0])}, and {first} in the file's first record; "
            "expected the same in all of its records"
        )


def _check_alike(name: str, value: Any, other_name: str, other: Any) -> None:
    if type(value) is not type(other):
        raise MalformedError(
            f"field '{name}' is {kind_of(value)}, '{other_name}' is {kind_of(other)}; {_BOTH}"
        )


def _check_not_empty(name: str, answer: Any) -> None:
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise MalformedError(f"field '{name}' is an empty answer, expected one with text")


def _shared(chosen: Any, rejected: Any) -> int:
    """How many messages, or characters, both begin with; each keeps one of its own at least.

    Of text, a space before the answers is the answers'.
    """
    most = min(len(chosen), len(rejected)) - 1
    # beginnings are compared whole: a character at a time takes longer than tokenizing them
    shared = bisect_left(range(1, most + 1), True, key=lambda n: chosen[:n] != rejected[:n])
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    return shared


def _messages_of(side: Side, *, keep_parts: bool) -> list[_Message]:
    """The messages of a side, of which only the answer's are trained on. Raises MalformedError."""
    answer = parse_messages(side.answer, side.column, keep_parts=keep_parts)
    if side.prompt is None:
        users = [number for number, message in enumerate(answer) if message["role"] == "user"]
        first = users[-1] + 1 if users else 0
        prompt, answer = answer[:first], answer[first:]
    else:
        prompt = side.prompt and parse_messages(
            side.prompt, side.prompt_column, keep_parts=keep_parts
        )
    own = [message for message in answer if message["role"] == ASSISTANT]
    if not own:
        raise MalformedError(
            f"field '{side.column}' has no message of the assistant after the prompt, expected an "
            "answer"
        )
    if not any(map(says_something, own)):
        raise MalformedError(f"field '{side.column}' is an empty answer, expected one with content")
    return [*with_context(prompt), *answer]
