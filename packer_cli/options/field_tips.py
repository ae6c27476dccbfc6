"""Which --field and --role options a record of no known shape needs, told by its values' kinds.

A list of objects, each with a short name and a text, is a conversation; of texts, two with known
names or by position are a prompt and its answer, and a single long one is text.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

# by which others call them, in lower case; what says most comes first
_ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "participant", "who", "user", "name")
_TEXT_KEYS = ("content", "value", "text", "message", "utterance", "body", "msg")
_PROMPTS = ("prompt", "question", "query", "problem", "instruction", "inputs", "input", "source",
            "request", "human", "user", "task", "q")  # fmt: skip
_ANSWERS = ("completion", "answer", "response", "output", "outputs", "solution", "targets",
            "target", "reply", "assistant", "a")  # fmt: skip
_TEXTS = ("text", "content", "raw_content", "body", "document", "article", "code", "markdown",
          "story")  # fmt: skip
_CHOSEN, _REJECTED = ("chosen", "preferred", "accepted"), ("rejected", "dispreferred")
_ROLES = {
    "user": ("user", "human", "customer", "client", "questioner", "prompter", "student",
             "patient"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai", "agent", "chatbot",
                  "answerer", "teacher", "doctor"),
}  # fmt: skip
_KNOWN_ROLES = frozenset(
    ("user", "assistant", "system", "tool", "developer", "human", "gpt", "chatgpt", "bot", "model",
     "observation", "function_response", "function", "ipython", "function_call", "tool_call")
)  # fmt: skip
_OPENAI_ROLES = frozenset(("user", "assistant", "system", "tool", "developer", "function"))
_NO_TEXTS = frozenset(("id", "name", "type", "tool_call_id"))
_ASKED = _PROMPTS[:5]
# what stands beside a prompt or a text
_BESIDE = frozenset(
    ("title", "context", "system", "system_prompt", "reasoning", "reasoning_content", "thinking")
)
_NAME = 40  # characters of a speaker's name at most
_LONG = 20  # of a text at least, if it is to be more than a name or a number


def written(options: Mapping[str, Mapping[str, str]]) -> str:
    """Options as they are typed: `--field messages=dialogue --role Agent=assistant`."""
    return " ".join(
        f"{flag} {shlex.quote(f'{one}={other}')}"
        for flag, pairs in options.items()
        for one, other in pairs.items()
    )


def options_for(record: Mapping[str, Any], shape: str | None) -> dict[str, dict[str, str]]:
    """`--field` and `--role` -> their pairs; {} where the record does not tell.

    `shape`: --shape.
    """
    if shape in (None, "messages", "conversations"):
        for column, messages in _conversations(record):
            own = _of_messages(messages)
            return {**own, "--field": {shape or "messages": column, **own["--field"]}}
    texts = {name: value for name, value in record.items() if isinstance(value, str)}
    for kind, fields in (
        ("preference", _named(record, chosen=_CHOSEN, rejected=_REJECTED)),
        ("alpaca", _named(texts, instruction=("instruction",), output=("output", "response"))),
        ("prompt-completion", _named(texts, prompt=_PROMPTS, completion=_ANSWERS)),
        ("text", _named(texts, text=_TEXTS)),
        ("prompt-completion", _by_position(texts, ("prompt", "completion"))),
        ("text", _by_position(texts, ("text",))),
    ):
        if fields and shape in (None, kind):
            more = _named(texts, input=("input",)) if kind == "alpaca" else {}
            return {"--field": fields | more}
    return {}


def key_options(message: Any) -> dict[str, dict[str, str]]:
    """`--field` options for the keys of a message that has no role or no content; {} likewise."""
    if not isinstance(message, dict) or (keys := _keys([message])) is None:
        return {}
    fields = {
        own: key
        for own, key, known in zip(
            ("role", "content"), keys, (("role", "from"), ("content", "value")), strict=True
        )
        if key not in known
    }
    return {"--field": fields} if fields else {}


def _conversations(record: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Columns that hold a list of messages, or JSON text of one; also in objects."""
    for name, value in record.items():
        messages = _parsed(value)
        if isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
            if messages and _keys(messages) is not None:
                yield name, messages
        elif isinstance(value, dict):
            yield from ((f"{name}.{inner}", own) for inner, own in _conversations(value))


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _of_messages(messages: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The options for keys of messages and roles of speakers, where they have other names."""
    role, _ = _keys(messages) or ("role", "content")
    roles = dict[str, str]()
    for speaker, own in _speakers(messages, role).items():
        roles[speaker] = own or ("assistant" if "user" in roles.values() else "user")
    fields = key_options(messages[0]).get("--field", {})
    return {"--field": fields} | ({"--role": roles} if roles else {})


def _speakers(messages: list[dict[str, Any]], role: str) -> dict[str, str]:
    """Speakers that are not known -> the roles that their names tell, or ""."""
    known = _OPENAI_ROLES if role == "role" else _KNOWN_ROLES
    names = [one for one in (message.get(role) for message in messages) if isinstance(one, str)]
    return {
        name: next((own for own, others in _ROLES.items() if name.lower() in others), "")
        for name in names
        if name not in known
    }


def role_options(value: Any, role: str | None) -> dict[str, dict[str, str]]:
    """`--role` for the speakers of messages whose names tell their roles; {} where there are none.
    `role`: the key that --field names.
    """
    messages = _parsed(value)
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return {}
    key = role or ("role" if any("role" in one for one in messages) else "from")
    roles = {name: own for name, own in _speakers(messages, key).items() if own}
    return {"--role": roles} if roles else {}


def _keys(messages: list[dict[str, Any]]) -> tuple[str, str] | None:
    """The keys of speakers, which all messages have, and of texts; None where there are none."""
    first = messages[0]
    texts = [key for key, value in first.items() if isinstance(value, str)]
    names = [key for key in texts if all(_is_name(one.get(key)) for one in messages)]
    role = _first_of(names, _ROLE_KEYS)
    rest = [key for key in texts if key != role and key not in _NO_TEXTS]
    text = _first_of(rest, _TEXT_KEYS) or max(rest, key=lambda key: len(first[key]), default=None)
    return None if role is None or text is None else (role, text)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _NAME


def _first_of(names: list[str], known: tuple[str, ...]) -> str | None:
    by_name = {name.lower(): name for name in reversed(names)}
    return next((by_name[one] for one in known if one in by_name), None)


def _named(values: Mapping[str, Any], **known: tuple[str, ...]) -> dict[str, str]:
    """Own name of a field -> the column with one of the known names; {} where one has none."""
    found = {own: _first_of(list(values), names) for own, names in known.items()}
    fields = {own: name for own, name in found.items() if name is not None}
    return fields if len(fields) == len(known) else {}


def _by_position(texts: Mapping[str, str], own: tuple[str, ...]) -> dict[str, str]:
    """The columns of long texts, if there are as many; or else of all texts. What is known to be
    asked is asked, and what stands beside a prompt is neither.
    """
    texts = {name: text for name, text in texts.items() if name.lower() not in _BESIDE}
    asked = [name for name in texts if name.lower() in _ASKED]
    long = [name for name, text in texts.items() if len(text) >= _LONG and " " in text.strip()]
    for names in (long, list(texts)):
        if len(names) == len(own) and asked in ([], names[:-1]):
            return dict(zip(own, names, strict=True))
    return {}
