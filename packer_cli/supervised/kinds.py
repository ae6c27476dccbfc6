"""Kinds of messages: what of a message, besides its words, may decide how it is rendered.

Whoever takes conversations for alike asks here, so that each message is looked at once for all:
turns.py (whose turns have the same edges), shown.py (of whom a template leaves out the same) and
agreement.py (what was never rendered before). A kind is an object, and the same one for messages
of the same kind, so that conversations are compared by their tuples of kinds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from packer_cli._kernels import looking
from packer_cli.supervised.messages import REASONING
from packer_cli.supervised.probes import look_of

_Message = dict[str, Any]
STRUCTURE = ("role", "type")  # of messages, calls and parts: no words
_DICT = "{}"
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
        reasoning = tuple(_look(message.get(name), None) for name in REASONING)
        looks = _look(message.get("content"), message.get("role")), reasoning
        key = None, message.get("role"), tuple(message), looks, _calls(message.get("tool_calls"))
    return _kinds.setdefault(key, Kind())


def _look(content: Any, role: Any) -> Any:
    """What a probe keeps of content, or of reasoning: it may decide how that and others look."""
    if isinstance(content, list):
        return tuple(_look(p if isinstance(p, str) else p.get("text"), role) for p in content)
    return (look_of(content, role),) if isinstance(content, str) else type(content)


def _calls(calls: Any) -> Any:
    return tuple(map(_call, calls)) if isinstance(calls, list | tuple) else type(calls)


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return type(call)
    function = call.get("function")
    if type(function) is dict:
        call = function
    arguments = call.get("arguments")
    return function is call, "name" in call, type(arguments), not arguments


def told_of(value: Any, known: Collection[str], key: str = "") -> Any:
    """What of a value that a probe keeps as it is may decide how a conversation is rendered, for a
    template that knows some fields: all but words, and these of `type`.
    """
    if isinstance(value, str):
        return value if key in STRUCTURE else bool(value)
    if isinstance(value, list | tuple):
        return tuple(told_of(one, known, key) for one in value)
    if isinstance(value, dict):
        inner = ((name, told_of(one, known, name)) for name, one in value.items()
                 if name in known or isinstance(one, dict))  # fmt: skip
        return _DICT, *((name, told) for name, told in inner if told != (_DICT,) or name in known)
    return repr(value)
