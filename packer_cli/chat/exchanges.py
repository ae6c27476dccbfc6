"""What a record asks, and what it answers: its fields, of any shape, as a conversation or as texts.

    {"messages": [..]}                                     a conversation as it is
    {"prompt": .., "completion": ..}                       text, or lists of messages
    {"instruction": .., "input": .., "output": ..}         Alpaca's

Prompts are texts, unless a chat template is to render them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packer_cli.chat.messages import (
    ASSISTANT,
    REASONING,
    Conversation,
    MalformedError,
    is_switch,
    kind_of,
    parse_messages,
    parse_tools,
    with_context,
)
from packer_cli.chat.syntax import parse_arguments
from packer_cli.options.shapes import (
    ARGUMENTS,
    CONTEXT,
    HISTORY,
    SYSTEM,
    Shape,
    list_in,
    messages_in,
    turns_in,
)
from packer_cli.options.shapes import REASONING as REASONING_FIELD

_Fields = dict[str, Any]
_Message = dict[str, Any]
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
    fields: _Fields, shape: Shape, prompt_template: str,
    keeps_parts: Callable[[list[Any] | None, _Fields | None], bool],
) -> Conversation | None:  # fmt: skip
    """A record as messages; None where it becomes text without a template.

    `keeps_parts`: whether the template for such tools and arguments takes content in parts.
    Raises MalformedError.
    """
    columns = shape.columns
    arguments = parse_arguments(fields.get(ARGUMENTS), columns.get(ARGUMENTS, ARGUMENTS))
    if not (shape.is_chat or shape.of_messages or prompt_template == "chat"):
        return None
    tools = parse_tools(fields.get("tools"), columns.get("tools", ""))
    keep_parts = keeps_parts(tools, arguments)
    if shape.is_chat:
        own = shape.required[0]
        messages = parse_messages(fields[own], columns[own], keep_parts=keep_parts)
    else:
        if shape.of_messages:
            is_talk = not isinstance(fields["prompt"], str) or bool(
                messages_in(fields["prompt"], certain=True)
            )
            prompt, completion = (
                [{"role": role, "content": fields[own]}]
                if isinstance(fields[own], str)
                and not (is_talk and messages_in(fields[own], certain=True))
                else parse_messages(fields[own], columns[own], keep_parts=keep_parts)
                for own, role in (("prompt", "user"), ("completion", ASSISTANT))
            )
        else:
            question, more, answer = _texts(fields, shape)
            prompt = [{"role": "user", "content": _with_more(question, more)}]
            completion = [{"role": ASSISTANT, "content": answer}]
        if earlier := _earlier(fields, shape):
            earlier = parse_messages(earlier, columns[HISTORY], keep_parts=keep_parts)
        messages = [*with_context([*earlier, *prompt]), *completion]
        _think(completion, _optional_text(fields, REASONING_FIELD, shape))
    system = _optional_text(fields, SYSTEM, shape)
    if system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, tools, arguments)


def _think(completion: list[_Message], reasoning: str) -> None:
    """Give the only answer of a completion the reasoning that stands beside it."""
    own = [one for one in completion if one.get("role") == ASSISTANT]
    if len(own) != 1 or own[0].get(REASONING[0]) or "</think>" in str(own[0].get("content")):
        return
    if reasoning and not is_switch(reasoning):
        own[0] |= dict.fromkeys(REASONING[:2], reasoning)


def _earlier(fields: _Fields, shape: Shape) -> list[_Message]:
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


def texts_of(fields: _Fields, shape: Shape, prompt_template: str) -> tuple[str, str]:
    """The prompt of a record and its answer. Raises MalformedError."""
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
    own, blank, rest = (ALPACA_WITH_INPUT if more else ALPACA).partition("\n\n")
    return (system or own) + blank + rest.format(instruction=prompt, input=more), answer


def _texts(fields: _Fields, shape: Shape) -> tuple[str, str, str]:
    """(a prompt, what it is about, its answer)."""
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
