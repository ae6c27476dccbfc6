"""Conversations reduced to their structure: what matters to a template besides the words.

A probe is a conversation of the same structure with marks (numbers found nowhere else) in the
place of all words, so that the text that a template makes of it shows whose words are where.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from packer_cli.supervised.messages import ASSISTANT, REASONING

_Message = dict[str, Any]
_Kind = tuple[Any, ...]
_MOST_KNOWN = 128  # conversations, each of about 8 kB
# Two things that templates look for in the words themselves: reasoning, and results of tools
# that a user's message holds.
THOUGHT, RESULT = "</think>", "<tool_response>"


@dataclass(frozen=True)
class Probe:
    """A conversation of marks; `marks[i]`: those of message i."""

    messages: list[_Message]
    marks: list[list[str]]


def probe_of(messages: list[_Message]) -> Probe:
    """The conversation with marks in the place of its words."""
    marks: list[list[str]] = []
    return Probe([_marked(m, i, marks) for i, m in enumerate(messages)], marks)


def _marked(message: _Message, number: int, marks: list[list[str]]) -> _Message:
    content, reasoning, call = (f"7{number:05d}{part}4951" for part in range(3))
    used, marked = set[str](), dict(message)

    def words(text: str, mark: str) -> str:
        if not text.strip():
            return text
        if THOUGHT in text:
            lead, opened, thought, answer = thought_in(text)
            used.update([mark] * (lead or answer) + [reasoning] * thought)
            opening = f"{mark}\n" * lead + "<think>" * opened
            return f"{opening}\n{reasoning * thought}\n{THOUGHT}\n\n{mark * answer}"
        used.add(mark)
        return f"{RESULT}{mark}</tool_response>" if text.lstrip().startswith(RESULT) else mark

    for key in REASONING:
        if isinstance(message.get(key), str):
            marked[key] = words(message[key].replace(THOUGHT, ""), reasoning)
    value = message.get("content")
    if isinstance(value, str):
        marked["content"] = words(value, content)
    elif isinstance(value, list):
        marked["content"] = [_part(part, words, content) for part in value]
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_call(item, call, used) for item in calls]
    marks.append(sorted(used))
    return marked


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


def contexts(messages: list[_Message], tools: list[Any] | None) -> dict[int, tuple[Any, ...]]:
    """What is around each message of the assistant, as far as a template is likely to look.

    That is its own kind, and those of its neighbours up to the next ones that are no results of
    tools; whether a user's message follows, and whether calls went before. Messages with equal
    contexts are taken to be rendered alike.
    """
    return _around(tuple(map(_kind, messages)), bool(tools))[0]


def distinct_contexts(messages: list[_Message], tools: list[Any] | None) -> frozenset[Any]:
    """The different ones among `contexts`."""
    return _around(tuple(map(_kind, messages)), bool(tools))[1]


@lru_cache(_MOST_KNOWN)
def _around(
    kinds: tuple[_Kind, ...], tools: bool
) -> tuple[dict[int, tuple[Any, ...]], frozenset[Any]]:
    """Both, of the kinds of messages. Nobody may change them."""
    following, last_user = _following(kinds), -1
    for i in range(len(kinds) - 1, -1, -1):
        if kinds[i][0] == "user":
            last_user = i
            break
    around: dict[int, tuple[Any, ...]] = {}
    begins, called = (kinds[0][0] == "system", tools), False
    results, before = 0, None
    for i, kind in enumerate(kinds):
        role = kind[0]
        if role == ASSISTANT:
            around[i] = (begins, called, results, before, kind, following[i], i > last_user)
            called = called or bool(kind[3])
        if role == "tool":
            results = min(results + 1, 2)
        else:
            results, before = 0, kind
    return around, frozenset(around.values())


def _following(kinds: tuple[_Kind, ...]) -> list[tuple[int, Any]]:
    """For each message, how many results of tools follow it, two for more, and the kind behind."""
    following: list[tuple[int, Any]] = []
    now: tuple[int, Any] = (0, None)
    for kind in reversed(kinds):
        following.append(now)
        now = (min(now[0] + 1, 2), now[1]) if kind[0] == "tool" else (0, kind)
    following.reverse()
    return following


def _kind(message: _Message) -> _Kind:
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
        return role, look
    tool_calls = message.get("tool_calls")
    calls = None if tool_calls is None else min(len(tool_calls), 2)
    for key in REASONING:
        if key in message:
            return role, look, bool(message[key]), calls
    return role, look, None, calls
