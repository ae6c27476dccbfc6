"""Conversations reduced to their structure: what matters to a template besides the words.

A probe is a conversation of the same structure with marks (numbers found nowhere else) in the
place of all words, so that the text that a template makes of it shows whose words are where.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from packer_cli.supervised.messages import ASSISTANT, REASONING

_Message = dict[str, Any]
# Two things that templates look for in the words themselves: reasoning, and results of tools
# that a user's message holds.
THOUGHT, RESULT = "</think>", "<tool_response>"
PROBED = frozenset(("role", "content", *REASONING))  # fields with no words but marks in a probe


@dataclass(frozen=True)
class Probe:
    """A conversation of marks; `marks[i]`: those of message i."""

    messages: list[_Message]
    marks: list[list[str]]

    def shown_in(self, text: str) -> set[str]:
        """The marks that a text has, looked for all at once: there may be a hundred thousand."""
        digits = _digits(self.messages)
        return set(re.findall(f"(?=(7[0-9]{{{digits}}}[0-2]4951))", text))  # also amid digits


def probe_of(messages: list[_Message]) -> Probe:
    """The conversation with marks in the place of its words."""
    marks: list[list[str]] = []
    digits = _digits(messages)
    return Probe([_marked(m, f"{i:0{digits}d}", marks) for i, m in enumerate(messages)], marks)


def _digits(messages: list[_Message]) -> int:
    """Of the numbers of messages: all marks are of one length, so that none begins another."""
    return max(5, len(str(len(messages))))


def _marked(message: _Message, number: str, marks: list[list[str]]) -> _Message:
    content, reasoning, call = (f"7{number}{part}4951" for part in range(3))
    used, marked, role = set[str](), dict(message), message.get("role")

    def words(text: str, mark: str) -> str:
        look = look_of(text, role)
        if look == text:
            return text
        if type(look) is tuple:
            lead, opened, thought, answer = look
            used.update([mark] * (lead or answer) + [reasoning] * thought)
            opening = f"{mark}\n" * lead + "<think>" * opened
            return f"{opening}\n{reasoning * thought}\n{THOUGHT}\n\n{mark * answer}"
        used.add(mark)
        return f"{RESULT}{mark}</tool_response>" if look == RESULT else mark

    for key in REASONING:
        if isinstance(text := message.get(key), str) and text.strip():
            marked[key] = reasoning
            used.add(reasoning)
    value = message.get("content")
    if isinstance(value, str):
        marked["content"] = words(value, content)
    elif isinstance(value, list):
        marked["content"] = [_part(part, words, content) for part in value]
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_call(item, call, used) for item in calls]
    marks.append(sorted(used))
    return marked


def look_of(text: str, role: Any) -> Any:
    """What of a text a probe keeps: itself, where it is blank; how its thought looks, if it is the
    assistant's; RESULT where it is that of a tool; None for words alone.
    """
    if not _has_words(text):
        return text
    if role == ASSISTANT and THOUGHT in text:
        return thought_in(text)
    return RESULT if text.lstrip().startswith(RESULT) else None


def thought_in(content: str) -> tuple[bool, bool, bool, bool]:
    """How content with `</think>` looks, split as templates do: (whether words come before the
    thought, `<think>` opens it, it has words, and words follow it).
    """
    before, _, rest = content.partition(THOUGHT)
    lead, opening, thought = before.rpartition("<think>")
    answer = rest.rpartition(THOUGHT)[2]
    return _has_words(lead), bool(opening), _has_words(thought), _has_words(answer)


def _has_words(text: str) -> bool:
    return bool(text) and not text.isspace()


def _part(part: Any, words: Any, mark: str) -> Any:
    return (
        part | {"text": words(part["text"], mark)} if isinstance(part, dict) else words(part, mark)
    )


def _call(call: _Message, mark: str, used: set[str]) -> _Message:
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _call(function, mark, used)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, RecursionError):
            decoded = None
        used.add(mark)
        marked = _arguments(decoded, mark) if isinstance(decoded, dict) else None
        return call | {"arguments": msgspec.json.encode(marked).decode() if marked else mark}
    if isinstance(arguments, dict):
        used.add(mark)
        return call | {"arguments": _arguments(arguments, mark)}
    return call


def _arguments(arguments: dict[str, Any], mark: str) -> dict[str, Any]:
    texts = {key: mark for key, value in arguments.items() if isinstance(value, str)}
    return arguments | (texts or {"a": mark})
