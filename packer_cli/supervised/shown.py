"""What of a conversation its chat template shows, and what it leaves out without a word.

A template may drop the reasoning of earlier turns, calls, results, tools or system messages. What
it drops depends on what a message has and on what is around it, not on the words. So a conversation
of marks (numbers found nowhere else) in the place of its words is rendered: what has its mark in
the text is shown, however it is stripped, escaped or dumped, and all else is not.

One probe serves all conversations of the same structure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from packer_cli.records import LeftOut
from packer_cli.supervised.chat_template import ChatTemplate, RefusedError
from packer_cli.supervised.kinds import Kind, kinds_of
from packer_cli.supervised.messages import ASSISTANT, REASONING, joined_content
from packer_cli.supervised.probes import RESULT, THOUGHT, thought_in

_Message = dict[str, Any]
_MOST_KEPT = 1 << 12  # what is learned begins anew beyond
_TOOLS = -1  # in the place of a message's number
_CONTENT, _REASONING, _THOUGHT_IN_CONTENT = "content", "reasoning", "thought"
_OF_ROLES = {"tool": "tool_results", "system": "system", "developer": "system"}


class Piece(NamedTuple):
    """A part of a conversation. `message`: its number, -1 for the tools; `part`: content,
    reasoning, thought (in the content), or the number of a call or tool.
    """

    message: int
    part: str | int


class Missing(NamedTuple):
    """What a text does not show of its conversation. `empty`: numbers of messages of the assistant
    of which it shows nothing, though they have something.
    """

    pieces: tuple[Piece, ...] = ()
    empty: tuple[int, ...] = ()


_UNKNOWN = Missing()


class Shown:
    """What one template shows, with the same arguments. Safe to share between threads."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        # of structures, None where the template refuses their probe
        self._known: dict[tuple[int, tuple[Kind, ...]], Missing | None] = {}

    def missing(self, text: str, messages: list[_Message], tools: list[Any] | None) -> Missing:
        """What `text` does not show of the conversation that it is rendered from."""
        structure = len(tools) if tools else 0, kinds_of(messages)
        found = self._known.get(structure, _UNKNOWN)
        if found is _UNKNOWN:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            pieces = self._probed(messages, tools)
            found = None if pieces is None else Missing(pieces, _empty(pieces, messages))
            self._known[structure] = found
        return _guessed(text, messages, tools) if found is None else found

    def _probed(
        self, messages: list[_Message], tools: list[Any] | None
    ) -> tuple[Piece, ...] | None:
        """By a conversation of marks; None where the template refuses it."""
        marks = _Marks()
        marked = [marks.message(message, number) for number, message in enumerate(messages)]
        named = [marks.tool(tool, number) for number, tool in enumerate(tools or [])]
        filled = [one if "content" in one else one | {"content": ""} for one in marked]
        for tried in (marked, filled):
            try:
                text = self._template.render(tried, named or None).text
            except RefusedError:
                continue
            shown = set(_MARKS.findall(text))
            return _in_order(piece for mark, piece in marks.pieces if mark not in shown)
        return None


def _guessed(text: str, messages: list[_Message], tools: list[Any] | None) -> Missing:
    """What is missing by the words alone, which tell nothing of other conversations."""
    pieces = _in_order(
        piece
        for piece in _pieces(messages, tools)
        if not _is_in(text, words_of(piece, messages, tools))
    )
    return Missing(pieces, _empty(pieces, messages))


def _in_order(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Each piece once, tools first, however it was learned."""
    return tuple(sorted(dict.fromkeys(pieces), key=lambda piece: piece.message))


_MARKS = re.compile("(?=(7[0-9]{7}4951))")  # also amid other digits


class _Marks:
    """Marks for the pieces of one conversation."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, Piece]] = []

    def _of(self, number: int, part: str | int) -> str:
        mark = f"7{len(self.pieces):07d}4951"
        self.pieces.append((mark, Piece(number, part)))
        return mark

    def message(self, message: _Message, number: int) -> _Message:
        marked = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._content(content, message.get("role"), number)
        elif isinstance(content, list):
            marked["content"] = [self._part(part, number) for part in content]
        if _has_words(message.get("reasoning_content")):
            mark = self._of(number, _REASONING)
            marked |= {key: mark for key in REASONING if key in message}
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call, number, i) for i, call in enumerate(calls)]
        return marked

    def _content(self, content: str, role: Any, number: int) -> str:
        if not _has_words(content):
            return content
        if role == ASSISTANT and THOUGHT in content:
            lead, opened, thought, answer = thought_in(content)
            before = f"{self._of(number, _CONTENT)}\n" if lead else ""
            inner = self._of(number, _THOUGHT_IN_CONTENT) if thought else ""
            after = self._of(number, _CONTENT) if answer else ""
            return f"{before}{'<think>' * opened}\n{inner}\n{THOUGHT}\n\n{after}"
        mark = self._of(number, _CONTENT)
        return f"{RESULT}{mark}</tool_response>" if content.lstrip().startswith(RESULT) else mark

    def _part(self, part: Any, number: int) -> Any:
        if isinstance(part, str):
            return self._content(part, None, number)
        return part | {"text": self._content(part["text"], None, number)}

    def _call(self, call: _Message, number: int, which: int) -> _Message:
        if isinstance(function := call.get("function"), dict):
            return call | {"function": self._call(function, number, which)}
        marked = dict(call)
        if _has_words(call.get("name")):
            marked["name"] = self._of(number, which)
        arguments = call.get("arguments")
        if isinstance(arguments, dict) and arguments:
            marked["arguments"] = dict.fromkeys(arguments, self._of(number, which))
        elif _has_words(arguments):
            as_object = {"a": self._of(number, which)}
            marked["arguments"] = json.dumps(as_object)
        return marked

    def tool(self, tool: Any, which: int) -> Any:
        """With its name marked, which is all that is told of it."""
        if not isinstance(tool, dict):
            return tool
        if isinstance(function := tool.get("function"), dict):
            return tool | {"function": self.tool(function, which)}
        return tool | {"name": self._of(_TOOLS, which)} if _has_words(tool.get("name")) else tool


def _pieces(messages: list[_Message], tools: list[Any] | None) -> list[Piece]:
    marks = _Marks()
    for number, message in enumerate(messages):
        marks.message(message, number)
    for number, tool in enumerate(tools or []):
        marks.tool(tool, number)
    return list(dict.fromkeys(piece for _, piece in marks.pieces))


def words_of(piece: Piece, messages: list[_Message], tools: list[Any] | None) -> str:
    """The text of a piece; calls and tools as JSON."""
    if piece.message == _TOOLS:
        return _as_json((tools or [])[int(piece.part)])
    message = messages[piece.message]
    if isinstance(piece.part, int):
        call = message["tool_calls"][piece.part]
        return _as_json(call.get("function", call))
    if piece.part == _REASONING:
        return str(message["reasoning_content"])
    content = joined_content(message["content"])
    if message.get("role") != ASSISTANT or THOUGHT not in content:
        return content
    before, _, rest = content.partition(THOUGHT)
    lead, _, thought = before.rpartition("<think>")
    return thought if piece.part == _THOUGHT_IN_CONTENT else lead + rest.rpartition(THOUGHT)[2]


def summed(
    record: int, pieces: tuple[Piece, ...], messages: list[_Message], tools: list[Any] | None
) -> list[LeftOut]:
    """The pieces of a record, together by what they are."""
    by_kind: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_kind.setdefault(kind_of_piece(piece, messages), []).append(piece)
    return [
        LeftOut(
            record,
            what,
            len({piece.message for piece in some} - {_TOOLS}),
            "\n".join(words_of(piece, messages, tools) for piece in some),
        )
        for what, some in by_kind.items()
    ]


def kind_of_piece(piece: Piece, messages: list[_Message]) -> str:
    """One of `records.UNSHOWN`."""
    if piece.message == _TOOLS:
        return "tools"
    if isinstance(piece.part, int):
        return "tool_calls"
    if piece.part != _CONTENT:
        return "reasoning"
    return _OF_ROLES.get(messages[piece.message].get("role", ""), "content")


def _empty(pieces: tuple[Piece, ...], messages: list[_Message]) -> tuple[int, ...]:
    """Numbers of the assistant's messages of which a text without these pieces shows nothing."""
    missing: dict[int, set[str | int]] = {}
    for number, part in pieces:
        missing.setdefault(number, set()).add(part)
    return tuple(
        number
        for number, parts in missing.items()
        if number != _TOOLS
        and messages[number].get("role") == ASSISTANT
        and {part for _, part in _pieces([messages[number]], None)} <= parts
    )


def _is_in(text: str, words: str) -> bool:
    """Whether the text has the words, as they are or as a JSON string has them."""
    words = words.strip()
    return words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text


def _has_words(text: Any) -> bool:
    return isinstance(text, str) and bool(text) and not text.isspace()


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)
