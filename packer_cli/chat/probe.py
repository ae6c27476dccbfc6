"""Probes: conversations with marks in the place of words, to see what a template does with them.

How a conversation is rendered depends on its structure (roles, kinds of parts, names of fields,
tools, what comes before and after) and, with some templates, on its words (uses.py). A probe is a
conversation of the same structure in which marks, numbers found nowhere else, take the place of all
words. Where a mark is in the text shows whose words are where (turns.py), and a mark that is not in
it shows what the template leaves out. A probe costs one rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from packer_cli._kernels import texts
from packer_cli.chat.messages import ASSISTANT, REASONING, Conversation, joined_content
from packer_cli.records import OmittedContent

# What templates look for in words: reasoning, and results of tools in messages of the user.
THOUGHT, RESULT, RESULT_END = "</think>", "<tool_response>", "</tool_response>"
PROBED = frozenset(("role", "content", *REASONING))  # fields whose words are marks in a probe
STRUCTURE = ("role", "type")  # of messages, calls and parts: no words
_TOOLS = -1  # in the place of a message's number
_CONTENT, _REASONING, _THOUGHT_IN_CONTENT, _LEAD = "content", "reasoning", "thought", "lead"
_OF_ROLES = {"tool": "tool_results", "system": "system", "developer": "system"}
_MARK, _MARKS = "7{:06d}4951", re.compile("(?=(7[0-9]{6,7}4951))")  # found amid digits, too
_MOST_KNOWN = 1 << 12  # kinds: records may have any names of fields
_Message = dict[str, Any]
_Look = tuple[tuple[str, str], ...]  # (part that is words, "") or ("", text that is kept)
_WORDS: _Look = ((_CONTENT, ""),)


class Piece(NamedTuple):
    """A part of a conversation.

    message  its number; -1 for the tools
    part     content, reasoning, thought (in the content), lead (before that thought), or the number
             of a call or tool
    """

    message: int
    part: str | int


@dataclass(frozen=True)
class Probe:
    """A conversation of marks.

    marks   for each message, the marks of its words
    pieces  what marks stand for, those of names included
    """

    conversation: Conversation
    marks: list[list[str]]
    pieces: dict[str, Piece]

    @property
    def messages(self) -> list[_Message]:
        return self.conversation.messages

    def shown_in(self, text: str) -> set[str]:
        """Return the marks in a text, found in one pass: there may be a hundred thousand."""
        return set(_MARKS.findall(text))

    def missing_in(self, text: str) -> tuple[Piece, ...]:
        """Return the pieces with a mark that is not in the text."""
        shown = self.shown_in(text)
        return _in_order(
            piece
            for mark, piece in self.pieces.items()
            if mark not in shown and not (piece.message == _TOOLS and mark in text)
        )

    def empty_in(self, text: str, turns: Mapping[int, str]) -> tuple[int, ...]:
        """Return the numbers of the assistant's messages that have something, and a text shows
        nothing of it.

        `turns`: texts of turns, as far as they are known. The name of a call shows that call only
        there: templates repeat it beside the result.
        """
        marks, shown = self.shown_in(text), dict[int, bool]()
        for mark, (number, _) in self.pieces.items():
            if number != _TOOLS and self.messages[number].get("role") == ASSISTANT:
                is_shown = not marks.isdisjoint(self.marks[number]) or mark in turns.get(number, "")
                shown[number] = shown.get(number, False) or is_shown
        return tuple(number for number, is_shown in shown.items() if not is_shown)

    def guess(
        self, text: str, conversation: Conversation
    ) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        """Return what `missing_in` and `empty_in` do, for the text of the conversation itself.

        Words are found by themselves alone, as they are or as a JSON string has them.
        """
        missing, shown = list[Piece](), dict[int, bool]()
        messages = conversation.messages
        for piece in _in_order(self.pieces.values()):
            number = piece.message
            found = [
                words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text
                for words in _texts_of(piece, conversation)
            ]
            if not all(found):
                missing.append(piece)
            if number != _TOOLS and messages[number].get("role") == ASSISTANT:
                shown[number] = shown.get(number, False) or any(found) or not found
        return tuple(missing), tuple(number for number, is_shown in shown.items() if not is_shown)


def _in_order(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Each piece once, tools first."""
    return tuple(sorted(dict.fromkeys(pieces), key=lambda piece: piece.message))


def probe_of(
    conversation: Conversation, *, names_calls: bool = False, of_structure: bool = False
) -> Probe:
    """Return the conversation with marks in the place of its words.

    names_calls   keep the names in calls
    of_structure  put marks in the place of texts of other fields and names of tools, too, so that
                  all conversations of a structure have one probe
    """
    maker = _Maker(names_calls, of_structure)
    marked = [maker.message(message) for message in conversation.messages]
    named = [maker.tool(tool, which) for which, tool in enumerate(conversation.tools or [])]
    return Probe(Conversation(marked, named or None), maker.marks, maker.pieces)


class _Maker:
    """Makes the messages of a probe, one after another."""

    def __init__(self, names_calls: bool, of_structure: bool) -> None:
        self._names_calls, self._of_structure = names_calls, of_structure
        self.marks: list[list[str]] = []
        self.pieces: dict[str, Piece] = {}
        self._count = 0

    def _mark(self, piece: Piece | None) -> str:
        mark = _MARK.format(self._count)
        self._count += 1
        if piece is not None:
            self.pieces[mark] = piece
        return mark

    def _mark_words(self, part: str | int, *, is_piece: bool = True) -> str:
        """Return a new mark for words of the message."""
        mark = self._mark(Piece(len(self.marks) - 1, part) if is_piece else None)
        self.marks[-1].append(mark)
        return mark

    def message(self, message: _Message) -> _Message:
        self.marks.append([])
        role = message.get("role")
        is_own = role == ASSISTANT  # texts of its fields may stand around its words
        marked = {
            key: value
            if key in PROBED or (is_own and type(value) is str)
            else self._other(value, key)
            for key, value in message.items()
        }
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._words(content, role)
        elif isinstance(content, list):
            marked["content"] = [
                self._other(part) | {"text": self._words(part["text"], role)}
                if isinstance(part, dict)
                else self._words(part, role)
                for part in content
            ]
        thoughts = [key for key in REASONING if has_words(message.get(key))]
        if thoughts:
            marked |= dict.fromkeys(thoughts, self._mark_words(_REASONING))
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call, which) for which, call in enumerate(calls)]
        return marked

    def _words(self, text: str, role: Any) -> str:
        pieces = _look_of(text, role)
        return "".join(self._mark_words(part) if part else kept for part, kept in pieces)

    def _call(self, call: _Message, which: int) -> _Message:
        if isinstance(function := call.get("function"), dict):
            return dict(self._other(call), function=self._call(function, which))
        marked = dict(self._other(call))
        if has_words(call.get("name")) and not self._names_calls:
            # not its words: templates repeat the name beside the result
            marked["name"] = self._mark(Piece(len(self.marks) - 1, which))
        arguments = call.get("arguments")
        if isinstance(arguments, str):
            try:
                decoded = msgspec.json.decode(arguments)
            except (msgspec.MsgspecError, RecursionError):
                decoded = None
            mark = self._mark_words(which, is_piece=has_words(arguments))
            named = _arguments(decoded, mark) if isinstance(decoded, dict) else None
            marked["arguments"] = msgspec.json.encode(named).decode() if named else mark
        elif isinstance(arguments, dict):
            mark = self._mark_words(which, is_piece=bool(arguments))
            marked["arguments"] = _arguments(arguments, mark)
        return marked

    def _other(self, value: Any, key: str = "") -> Any:
        """Return the value of another field, which only the probe of a structure changes."""
        if not self._of_structure:
            return value
        if isinstance(value, str):
            return self._mark(None) if has_words(value) and key not in STRUCTURE else value
        if isinstance(value, list | tuple):
            return [self._other(item, key) for item in value]
        return (
            {k: self._other(v, k) for k, v in value.items()} if isinstance(value, dict) else value
        )

    def tool(self, tool: Any, which: int) -> Any:
        """Mark the name of a tool, by which it is found in a text."""
        if not isinstance(tool, dict):
            return tool
        if isinstance(function := tool.get("function"), dict):
            return self._other(tool) | {"function": self.tool(function, which)}
        name: Any = tool.get("name")
        if not has_words(name):
            return self._other(tool)
        if not self._of_structure:
            self.pieces[name] = Piece(_TOOLS, which)
            return tool
        return self._other(tool) | {"name": self._mark(Piece(_TOOLS, which))}


def _arguments(arguments: dict[str, Any], mark: str) -> dict[str, Any]:
    texts = {
        key: mark
        for key, value in arguments.items()
        if isinstance(value, str) and key not in STRUCTURE
    }
    return arguments | (texts or {mark: mark}) if arguments else {}


def _look_of(text: str, role: Any) -> _Look:
    """Return what a probe keeps of a text, between parts that are words: a blank text itself, the
    form of the assistant's thought, and the edges of a tool's result.
    """
    if not has_words(text):
        return (("", text),)
    if role == ASSISTANT and THOUGHT in text:
        lead, opening, thought, answer = parted(text)
        return (
            *[(_LEAD, ""), ("", "\n")] * has_words(lead),
            ("", f"{opening}\n"),
            *[(_THOUGHT_IN_CONTENT, "")] * has_words(thought),
            ("", f"\n{THOUGHT}\n\n"),
            *[(_CONTENT, "")] * has_words(answer),
        )
    if not text.lstrip().startswith(RESULT):
        return _WORDS
    begin, end = "\n" * text[0].isspace(), "\n" * text[-1].isspace()
    end = RESULT_END * text.rstrip().endswith(RESULT_END) + end
    return ("", begin + RESULT), *_WORDS, ("", end)


def parted(content: str) -> tuple[str, str, str, str]:
    """Split content with `</think>` as templates do: what comes before the thought, the `<think>`
    that opens it or "", the thought, and what follows it.
    """
    before, _, after = content.partition(THOUGHT)
    lead, opening, thought = before.rpartition("<think>")
    return lead, opening, thought, after.rpartition(THOUGHT)[2]


def has_words(text: Any) -> bool:
    """Tell whether a value is a text that is not blank."""
    return isinstance(text, str) and bool(text) and not text.isspace()


# -- What makes conversations alike

_kinds: dict[Any, object] = {}


def kinds_of(messages: list[_Message]) -> tuple[object, ...]:
    """Return the kind of each message: the same object for all that are rendered alike."""
    if len(_kinds) > _MOST_KNOWN:
        _kinds.clear()
    kinds: tuple[object, ...] = texts.kinds_of(messages, _kinds, _new_kind)
    return kinds


def _new_kind(message: _Message, key: Any) -> object:
    """Return the kind of a message that has this key; None: one that `texts` does not know."""
    if key is None:
        reasoning = tuple(_look(message.get(name), None) for name in REASONING)
        looks = _look(message.get("content"), message.get("role")), reasoning
        calls = message.get("tool_calls")
        called = tuple(map(_call, calls)) if isinstance(calls, list | tuple) else type(calls)
        key = None, message.get("role"), tuple(message), looks, called
    return _kinds.setdefault(key, object())


def _look(content: Any, role: Any) -> Any:
    """Return what a probe keeps of content, or of reasoning."""
    if isinstance(content, list):
        return tuple(_look(p if isinstance(p, str) else p.get("text"), role) for p in content)
    return (_look_of(content, role),) if isinstance(content, str) else type(content)


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return type(call)
    function = call.get("function")
    inner = function if type(function) is dict else call
    arguments = inner.get("arguments")
    return function is inner, "name" in inner, type(arguments), not arguments


def structure_of(value: Any, known: Collection[str], key: str = "") -> Any:
    """Return the structure of a value that a probe keeps: all but words may decide how a template
    that knows these fields renders it, and so may the words of `role` and `type`.
    """
    if isinstance(value, str):
        return value if key in STRUCTURE or not has_words(value) else True
    if isinstance(value, list | tuple):
        return tuple(structure_of(item, known, key) for item in value)
    if isinstance(value, dict):
        inner = ((name, structure_of(item, known, name)) for name, item in value.items()
                 if name in known or isinstance(item, dict))  # fmt: skip
        return bool(value), *(
            (name, structure) for name, structure in inner if name in known or len(structure) > 1
        )
    return repr(value)


# -- Pieces, for people and counts


def words_of(piece: Piece, conversation: Conversation) -> str:
    """Return the text of a piece; calls and tools as JSON."""
    if piece.message == _TOOLS:
        return _as_json((conversation.tools or [])[int(piece.part)])
    message = conversation.messages[piece.message]
    if isinstance(piece.part, int):
        call = message["tool_calls"][piece.part]
        return _as_json(call.get("function", call))
    if piece.part == _REASONING:
        return next(str(message[key]) for key in REASONING if has_words(message.get(key)))
    content = joined_content(message["content"])
    if message.get("role") != ASSISTANT or THOUGHT not in content:
        return content
    lead, _, thought, answer = parted(content)
    return {_THOUGHT_IN_CONTENT: thought, _LEAD: lead}.get(str(piece.part), answer)


def _texts_of(piece: Piece, conversation: Conversation) -> list[str]:
    """Return the texts that show a piece: words, the name of a tool, or a whole call."""
    if not isinstance(piece.part, int):
        return [words_of(piece, conversation).strip()]
    is_tool = piece.message == _TOOLS
    calls = None if is_tool else conversation.messages[piece.message]["tool_calls"]
    called = (calls or conversation.tools or [])[piece.part]
    function = called.get("function", called)
    arguments = None if is_tool else function.get("arguments")
    values = arguments.values() if isinstance(arguments, dict) else [arguments]
    return [text for text in (function.get("name"), *values) if isinstance(text, str)]


def summed(
    record: int, pieces: tuple[Piece, ...], conversation: Conversation
) -> list[OmittedContent]:
    """Add up the pieces that the text of a record leaves out, by their kinds."""
    by_kind: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_kind.setdefault(kind_of_piece(piece, conversation.messages), []).append(piece)
    return [
        OmittedContent(
            record,
            kind,
            len({piece.message for piece in alike} - {_TOOLS}),
            "\n".join(words_of(piece, conversation) for piece in alike),
        )
        for kind, alike in by_kind.items()
    ]


def kind_of_piece(piece: Piece, messages: list[_Message]) -> str:
    """Return one of `result.wording.UNSHOWN`."""
    if piece.message == _TOOLS:
        return "tools"
    if isinstance(piece.part, int):
        return "tool_calls"
    if piece.part not in (_CONTENT, _LEAD):
        return "reasoning"
    return _OF_ROLES.get(messages[piece.message].get("role", ""), "content")


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)
