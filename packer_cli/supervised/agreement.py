"""Holding a template's plain Python (template_code.py) to jinja2, as the fast tokenizer is held.

At the start both render a battery: conversations of every structure, and with every field that the
template asks for. A difference then means that jinja2 is used. Later each record with something
new in its structure is rendered by both, each that goes another way through the template than all
before it, and one of every `_EVERY` others; a difference then stops the run, because rows already
written may be wrong.
What the code fails on is left to jinja2 each time: errors are always jinja2's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from jinja2 import nodes

from packer_cli.supervised.kinds import kinds_of

_EVERY = 256
# With records that are all of different structure, most are rendered once only.
_ALWAYS, _ONE_IN = 256, 16
_MOST_FIELDS = 20

Message = dict[str, Any]
Talk = tuple[list[Message], list[Any] | None, bool]  # messages, tools, generation prompt

_TEXT = " Grüße, 你好 👋🏽 <b>&amp;\"'\\</b>\n"
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d é", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "enum": ["x", "y"]}, "b": {
        "type": ["integer", "null"], "description": "b"}}, "required": ["a"]}}}]  # fmt: skip
_FUNCTION = {"name": "f", "arguments": {"a": "x", "b": [1, 2.5, None, True]}}
_CALL = {"id": "call00001", "type": "function", "function": _FUNCTION}
_TEXT_CALL = _CALL | {"function": {"name": "f", "arguments": '{"a": "x"}'}}
_PARTS = [{"type": "text", "text": "p"}, {"type": "text", "text": _TEXT}]


def _says(role: str, content: Any = _TEXT, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _result(**more: Any) -> Message:
    return _says("tool", '{"r": 1}', tool_call_id="call00001", name="f", **more)


_USER, _ANSWER, _SYSTEM = _says("user"), _says("assistant"), _says("system")
_CALLS: list[Message] = [
    _says("assistant", "", tool_calls=[_CALL]),
    _says("assistant", _TEXT, tool_calls=[_TEXT_CALL, _CALL]),
    {"role": "assistant", "tool_calls": [_CALL]},
    _says("assistant", None, tool_calls=[_CALL["function"]]),
]
_TALKS: list[tuple[list[Message], list[Any] | None]] = [
    ([_USER], None),
    ([_USER, _ANSWER], None),
    ([_SYSTEM, _USER, _ANSWER, _USER, _ANSWER], None),
    ([_SYSTEM, _USER, _ANSWER], _TOOLS),
    ([_USER, _ANSWER, _USER, _ANSWER], [*_TOOLS, _TOOLS[0]["function"]]),
    ([_ANSWER, _USER, _ANSWER, _ANSWER], None),
    ([_says("developer"), _USER, _USER, _ANSWER], None),
    ([_says("user", ""), _says("assistant", " \n")], None),
    ([_says("user", _PARTS), _says("assistant", _PARTS)], None),
    ([_says("system", _PARTS), _says("user", _PARTS[:1]), _says("assistant")], None),
    ([_USER, {"role": "assistant"}], None),
    ([_USER, _says("assistant", None)], None),
    ([_USER, _says("assistant", 5), _says("user", 2.5), _says("assistant", True)], None),
    ([_USER, _says("assistant", "<think>\nwhy\n</think>\n\nso"), _USER, _ANSWER], None),
    ([_USER, _says("assistant", thinking="t", reasoning_content="t"), _USER,
      _says("assistant", thinking="", reasoning_content="")], None),
    ([_says("narrator"), _USER, _says("critic"), _ANSWER], None),
    *(([_USER, call, _result(), _ANSWER, _USER, _ANSWER], tools)
      for call in _CALLS for tools in (None, _TOOLS)),
    ([_USER, _CALLS[0], _result(), _result(), _CALLS[1], _result(), _ANSWER], _TOOLS),
    ([_SYSTEM, _USER, _CALLS[1], _result(), _says("user", "<tool_response>r</tool_response>")],
     None),
    ([_USER, _says("assistant", _TEXT, reasoning_content="t", thinking="t",
      tool_calls=[_CALL]), _says("tool", [{"type": "text", "text": "r"}])], _TOOLS),
]  # fmt: skip


def battery(tree: nodes.Template) -> Iterator[Talk]:
    """Conversations of every structure, and some with the fields that the template asks for."""
    for prompt in (False, True):
        for messages, tools in _TALKS:
            yield messages, tools, prompt
    for field in islice(_fields(tree), _MOST_FIELDS):
        for value in ("v", None, True, [{"type": "text", "text": "v"}]):
            yield [message | {field: value} for message in (_USER, _ANSWER)], None, False


def _fields(tree: nodes.Template) -> Iterator[str]:
    seen = {"role"}
    asked: Iterator[Any] = tree.find_all((nodes.Getattr, nodes.Getitem))
    for node in asked:
        key = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
        if type(key) is str and key not in seen:
            seen.add(key)
            yield key


def differs_at_start(
    code: Callable[[Talk], Any], jinja2: Callable[[Talk], Any], talks: list[Talk]
) -> str | None:
    """What the two render differently (shortened), or None when they agree.

    `code` gives None for what it leaves to jinja2, and jinja2 None for what it refuses.
    """
    for talk in talks:
        rendered = code(talk)
        if rendered is not None and not rendered.is_like(jinja2(talk)):
            return repr(talk[0])[:80]
    return None


class Samples:
    """Which records are rendered by both. Depends on those before in this process alone."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._count = self._new = 0

    def wants(self, messages: list[Message], tools: list[Any] | None, ways: bytes) -> bool:
        """`ways`: those that the record took through the template."""
        self._count += 1
        if self._count % _EVERY == 1:
            return True
        structure: set[Any] = {*kinds_of(messages), bool(tools), ways}
        if structure <= self._seen or self._new > _ALWAYS + self._count // _ONE_IN:
            return False
        self._seen |= structure
        self._new += 1
        return True
