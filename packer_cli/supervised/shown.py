"""What of a conversation its chat template shows, and what it leaves out without a word.

A template may drop the reasoning of earlier turns, calls, results, tools or system messages. What
it drops depends on what a message has and on what is around it, not on the words. So a conversation
of marks (numbers found nowhere else) in the place of its words is rendered: what has its mark in
the text is shown, however it is stripped, escaped or dumped, and all else is not.

One probe serves all conversations of the same structure, and each of its messages serves those
with the same surroundings. Conversations that are put together from such messages are checked:
their words must be in the text, or not, as expected; else they get a probe of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

import msgspec

from packer_cli.records import LeftOut
from packer_cli.supervised.chat_template import ChatTemplate, RefusedError
from packer_cli.supervised.kinds import Kind, kinds_of
from packer_cli.supervised.messages import ASSISTANT, REASONING, joined_content
from packer_cli.supervised.probes import RESULT, THOUGHT, thought_in

_Message = dict[str, Any]
_MOST_KINDS, _MOST_KEPT = 1 << 9, 1 << 14  # what is learned begins anew beyond
_NOTHING: tuple[Any, ...] = ((), False)
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


class Shown:
    """What one template shows, with the same arguments. Safe to share between threads."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known = _Known()

    def missing(self, text: str, messages: list[_Message], tools: list[Any] | None) -> Missing:
        """What `text` does not show of the conversation that it is rendered from."""
        known = self._known
        if len(known.numbers) > _MOST_KINDS or len(known.structures) > _MOST_KEPT:
            known = self._known = _Known()
        structure = len(tools) if tools else 0, kinds_of(messages)
        if structure not in known.structures:
            numbers = known.numbered(structure[1])
            found = self._found(text, messages, tools, (structure[0], *numbers), known)
            known.structures[structure] = found
        else:
            found = known.structures[structure]
        return _guessed(text, messages, tools) if found is None else found

    def _found(
        self,
        text: str,
        messages: list[_Message],
        tools: list[Any] | None,
        structure: tuple[int, ...],
        known: _Known,
    ) -> Missing | None:
        """What a text of such a structure does not show; None where no probe tells."""
        around = _surroundings(structure)
        alike = [known.around.get(one) for one in around]
        if None not in alike:
            found = _joined_from(alike)
            if _fits(text, messages, found.pieces):
                return found
        pieces = self._probed(messages, tools)
        if pieces is None:
            return None
        found = Missing(pieces, _empty(pieces, messages))
        for number, one in enumerate(around, _TOOLS):
            parts = tuple(part for message, part in pieces if message == number)
            known.around[one] = parts, number in found.empty
        return found

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


class _Known:
    """What was learned. `structures`: of whole conversations, None where the template refuses
    their probe; `around`: of their messages, by what is around them, as `numbers` of kinds.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.fresh = count()  # of which no two threads get the same
        self.structures: dict[tuple[int, tuple[Kind, ...]], Missing | None] = {}
        self.around: dict[tuple[int, ...], tuple[tuple[str | int, ...], bool]] = {}

    def numbered(self, kinds: tuple[Kind, ...]) -> list[int]:
        """The numbers of kinds. Those that are alike to all that is shown have the same."""
        numbers = list[int]()
        for kind in kinds:
            number = self.numbers.get(kind.shown)
            if number is None:
                number = self.numbers.setdefault(kind.shown, next(self.fresh))
            numbers.append(number)
        return numbers


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


def _joined_from(alike: list[Any]) -> Missing:
    """What is missing of a conversation, from what is of its tools and messages."""
    if all(one == _NOTHING for one in alike):
        return Missing()
    pieces, empty = list[Piece](), list[int]()
    for number, (parts, is_empty) in enumerate(alike, _TOOLS):
        pieces += [Piece(number, part) for part in parts]
        empty += [number] * is_empty
    return Missing(tuple(pieces), tuple(empty))


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


def _surroundings(structure: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What is around the tools and each message: its neighbors, and as bits of a number, which
    kinds of messages come before and after it at all.
    """
    tools, *kinds = structure
    following, after = list[int](), 0
    for kind in reversed(kinds):
        following.append(after)
        after |= 1 << kind
    following.reverse()
    around: list[tuple[int, ...]] = [(tools, after, kinds[-1])]
    before, last = 0, -1
    for kind, next_kind, after in zip(kinds, [*kinds[1:], -1], following, strict=True):
        around.append((tools > 0, kind, last, next_kind, before, after))
        before |= 1 << kind
        last = kind
    return around


def _fits(text: str, messages: list[_Message], left_out: tuple[Piece, ...]) -> bool:
    """Whether the text has words just of what is said to be shown, as far as templates write them
    as they are.
    """
    missing, at = set(left_out), 0
    for number, message in enumerate(messages):
        content, role = message.get("content"), message.get("role")
        told = list[tuple[str, str]]()
        if len(message) > 2 and _has_words(message.get("reasoning_content")):
            told.append((_REASONING, message["reasoning_content"]))
        is_thought = role == ASSISTANT and type(content) is str and THOUGHT in content
        if type(content) is str and role != "tool" and not is_thought:
            told.append((_CONTENT, content))
        for part, words in told:
            stripped = words.strip()
            place = text.find(stripped, at)  # they come in order, mostly
            if place < 0:
                place = text.find(stripped)
            elif stripped:
                at = place
            if stripped and ((number, part) in missing) == (place >= 0):
                return False
    return True


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
