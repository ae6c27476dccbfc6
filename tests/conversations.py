"""Conversations of every structure, each message with words of its own: a battery for templates.

    STRUCTURES["a call"]  ->  {"messages": [...], "tools": [...]}

The words of message 3 of the assistant are "assistant3 speaks", in whatever field they are, so
that a test finds in a text whose they are.
"""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
                "required": ["city"],
            },
        },
    }
]


def words(role: str, number: int) -> str:
    """What a message says."""
    return f"{role}{number} speaks"


class _Talk:
    """Makes messages that number themselves."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add(self, kind: str) -> None:
        """`kind`: a letter of `STRUCTURES`."""
        i = len(self.messages)
        role = {"s": "system", "u": "user", "p": "user", "t": "tool"}.get(kind, "assistant")
        text = words(role, i)
        message: Json = {"role": role, "content": text}
        if kind in "pP":
            message["content"] = [{"type": "text", "text": text}]
        if kind in "cdC":
            calls = [_call(text, 10 * i + k) for k in range(2 if kind == "d" else 1)]
            message |= {"content": text if kind == "C" else "", "tool_calls": calls}
        if kind in "rR":
            message["reasoning_content"] = f"thought {text}"
        if kind == "R":
            message |= {"content": "", "tool_calls": [_call(text, 10 * i)]}
        if kind in "hw":
            lead = "Well. " if kind == "w" else ""
            message["content"] = f"{lead}<think>\nthought {text}\n</think>\n\n{text}"
        if kind == "e":
            message["content"] = ""
        if kind == "t":
            before = [m for m in self.messages if m.get("tool_calls")]
            results = sum(
                m["role"] == "tool" for m in self.messages[self.messages.index(before[-1]) :]
            )
            message |= {
                "tool_call_id": before[-1]["tool_calls"][results]["id"],
                "name": "get_weather",
            }
        self.messages.append(message)


def _call(city: str, number: int) -> Json:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


# s system, u user, a assistant, t a tool's result; of the assistant: c a call, d two calls,
# C a call with content, r reasoning, R reasoning and a call, h <think> in the content, w words
# before it, e empty content; p and P: the user's and the assistant's content in parts.
_KINDS = {
    "one turn": "ua",
    "one turn, a system message": "sua",
    "two turns": "uaua",
    "three turns, a system message": "suauaua",
    "the user last": "uau",
    "the assistant first": "aua",
    "the assistant twice": "uaa",
    "the assistant twice, then more": "uaaua",
    "the user twice": "uua",
    "a system message in between": "uasua",
    "an empty answer": "ue",
    "an empty answer, then more": "ueua",
    "content in parts": "pP",
    "content in parts, two turns": "pPpP",
    "reasoning": "ur",
    "reasoning in both turns": "urur",
    "reasoning in the first turn": "urua",
    "reasoning in the last turn": "uaur",
    "reasoning in the content": "uh",
    "reasoning in the content, two turns": "uhuh",
    "reasoning in the content, then none": "uhua",
    "words before reasoning": "uw",
    "words before reasoning, two turns": "uwuw",
}
_WITH_TOOLS = {
    "tools, and none called": "ua",
    "a call": "uc",
    "a call and its result": "uct",
    "a call, its result, an answer": "ucta",
    "a call, its result, an answer, a system message": "sucta",
    "a call with content, its result, an answer": "uCta",
    "a call with content and its result": "uCt",
    "two calls one after the other": "uctcta",
    "parallel calls": "udtta",
    "parallel calls, results last": "udtt",
    "an answer, then a call": "uaucta",
    "a call, then another turn": "uctaua",
    "two turns with calls": "uctaucta",
    "reasoning and a call": "uRta",
    "reasoning, a call, reasoning": "uRtr",
    "reasoning and calls, two turns": "uRtruRtr",
}


def _made(kinds: str, tools: list[Json] | None) -> Json:
    talk = _Talk()
    for kind in kinds:
        talk.add(kind)
    return {"messages": talk.messages} | ({"tools": tools} if tools else {})


STRUCTURES = {name: _made(kinds, None) for name, kinds in _KINDS.items()}
STRUCTURES |= {name: _made(kinds, TOOLS) for name, kinds in _WITH_TOOLS.items()}


def plain(record: Json) -> Json:
    """The record as every template takes it: content in one piece, all keys there."""
    messages = [
        m if isinstance(m["content"], str) else m | {"content": m["content"][0]["text"]}
        for m in record["messages"]
    ]
    return record | {"messages": messages}


def with_text_arguments(record: Json) -> Json:
    """The same with the arguments of calls as JSON text, as OpenAI gives them."""
    copy = json.loads(json.dumps(record))
    for message in copy["messages"]:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return dict(copy)


def foreign_words(record: Json) -> list[str]:
    """What others than the assistant say."""
    return [
        words(m["role"], i) for i, m in enumerate(record["messages"]) if m["role"] != "assistant"
    ]


def own_words(record: Json) -> list[str]:
    """What the assistant says, by message."""
    return [
        words("assistant", i) for i, m in enumerate(record["messages"]) if m["role"] == "assistant"
    ]
