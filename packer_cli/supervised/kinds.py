"""Kinds of messages: what of a message, besides its words, may decide how it is rendered.

Whoever takes conversations for alike asks here, so that each message is looked at once for all:
turns.py (whose turns have the same edges), shown.py (of whom a template leaves out the same) and
agreement.py (what was never rendered before). A kind is an object, and the same one for messages
of the same kind, so that conversations are compared by their tuples of kinds.
"""

from __future__ import annotations

from typing import Any

from packer_cli._kernels import looking
from packer_cli.supervised.messages import ASSISTANT, REASONING
from packer_cli.supervised.probes import RESULT, THOUGHT, thought_in

_Message = dict[str, Any]
_MOST_KNOWN = 1 << 12  # kinds: names of fields are the record's own


class Kind:
    """A kind of message."""

    __slots__ = ()


_kinds: dict[Any, Kind] = {}


def kinds_of(messages: list[_Message]) -> tuple[Kind, ...]:
    """The kinds of messages. Those that agreement.py tells apart are of different kinds, too."""
    if len(_kinds) > _MOST_KNOWN:
        _kinds.clear()
    kinds: tuple[Kind, ...] = looking.kinds_of(messages, _kinds, _made)
    return kinds


def _made(message: _Message, key: Any) -> Kind:
    """The kind of a message of that `looking.key_of`."""
    if key is None:
        content = message.get("content")
        looks = _shown(message), _look(message), _calls(message)
        key = None, tuple(message), type(content), content == "", *looks
    return _kinds.setdefault(key, Kind())


def _calls(message: _Message) -> tuple[Any, ...]:
    """Of what type each call is, or its arguments are."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return (type(calls),)
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return tuple(
        type(function.get("arguments")) if isinstance(function, dict) else type(call)
        for call, function in zip(calls, functions, strict=True)
    )


def _look(message: _Message) -> tuple[Any, ...]:
    """(role, how the content looks, whether there is reasoning, how many calls, two for more)."""
    content, role = message.get("content"), message.get("role")
    look: Any = type(content)
    if look is str:
        if not content or content.isspace():
            look = "blank"
        elif role == ASSISTANT and THOUGHT in content:
            look = thought_in(content)
        elif role == "user" and RESULT in content and content.lstrip().startswith(RESULT):
            look = "result"
    if role != ASSISTANT:
        return role, look, None, None
    tool_calls = message.get("tool_calls")
    calls = None if tool_calls is None else min(len(tool_calls), 2)
    for key in REASONING:
        if key in message:
            return role, look, bool(message[key]), calls
    return role, look, None, calls


def _shown(message: _Message) -> Any:
    """What of a message may decide what a template shows of it and of others."""
    content, role = message.get("content"), message.get("role")
    if type(content) is str:
        if not content or content.isspace():
            look: Any = "blank"
        elif THOUGHT in content and role == ASSISTANT:
            look = thought_in(content)
        elif content.startswith(RESULT):
            look = "result"
        elif len(message) == 2:
            return role
        else:
            look = "words"
    elif type(content) is list:
        look = tuple(_has_words(part if isinstance(part, str) else part.get("text"))
                     for part in content)  # fmt: skip
    else:
        look = None
    calls = message.get("tool_calls")
    kinds = tuple(map(_shown_call, calls)) if calls else calls is None
    reasoning = message.get("reasoning_content")
    return role, look, reasoning is not None and _has_words(reasoning), kinds


def _shown_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return type(call)
    function = call.get("function")
    if type(function) is dict:
        call = function
    arguments = call.get("arguments")
    return function is call, "name" in call, type(arguments), not arguments


def _has_words(text: Any) -> bool:
    return isinstance(text, str) and bool(text) and not text.isspace()
