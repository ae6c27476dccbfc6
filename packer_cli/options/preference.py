"""Preference records, which have good and bad answers, for DPO, KTO and the like.

Packed as they are, bad answers would be learned like good ones. So such records are refused unless
--field names the answer to train on; the other answers are then left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from packer_cli.errors import DataError, UsageError, named
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import (
    KINDS,
    MESSAGE_KEYS,
    Shape,
    Suggested,
    find_shape,
    lacks_answer,
    may_hold,
    messages_in,
    options_for,
    role_of,
    value_at,
)

# fields that hold the answer of a record: --field maps one of them to name the good answer
_ANSWERS = ("messages", "conversations", "completion", "output", "text")
_PROMPTS = (
    "prompt", "question", "query", "input", "instruction", "conversations", "conversation",
    "messages", "context", "problem", "dialogue", "dialog", "history",
)  # fmt: skip
_ANSWER = "(response|answer|completion|output|message|conversation|text)s?"
_MEANINGS = {
    "good": f"({_ANSWER}_)?(chosen|preferred|accepted)(_{_ANSWER})?",
    "bad": f"({_ANSWER}_)?(rejected|dispreferred|non_preferred)(_{_ANSWER})?",
    "ranked": "completions|responses|answers|candidates|outputs|generations",
    "one of several": f"{_ANSWER}_?([abjk]|[0-9])",
    "label": "label|kto_tag|kto_label|desirable|is_desirable",
}
_RANK = re.compile(".*(rank|score|reward|rating).*", re.IGNORECASE)


@cache
def _meaning(name: str) -> str:
    """Return the key in `_MEANINGS` of a field's name, or ""."""
    patterns = _MEANINGS.items()
    return next((key for key, pattern in patterns if re.fullmatch(pattern, name.lower())), "")


def is_of_preference(name: str) -> bool:
    """Tell by the name of a field if records with it may be preference records."""
    return bool(_meaning(name))


def names_answer(config: DocumentConfig, names: Collection[str] | None = None) -> bool:
    """Tell if --field names the answer to train on, one of the fields `names` if they are given."""
    columns = [column for key, column in config.renamed.items() if key in _ANSWERS]
    return any(names is None or may_hold(names, column) for column in columns)


def refuse_preference(
    where: str, record: Mapping[str, Any], first: Collection[str], config: DocumentConfig
) -> None:
    """Raise UsageError for preference records, unless --field names the answer.

    record  the first value of each field that records have
    first   fields of the first record, which decides on the shape
    """
    shape = _shape_of(first, config.shape, config.renamed)
    if names_answer(config, record) or (shape is not None and shape.is_of_tokens):
        return
    fields = _fields_of_answers(record, shape)
    if fields:
        problem = f"{named(fields)}): no option says which answers to train on"
        tip = "add {} to train on the good ones; DPO trainers tokenize pairs by themselves"
    elif labels := [
        name
        for name, value in record.items()
        if _meaning(name) == "label" and type(value) is bool and name not in config.value_columns
        if shape is not None and shape.is_composed
    ]:
        problem = f"{labels[0]} is true or false): bad answers would be trained on like good ones"
        tip = f"keep the records whose {labels[0]} is true, and pack these with {{}}"
    else:
        return
    record = {name: messages_in(value) or value for name, value in record.items()}
    option = next(_fitting(record, first, shape, config), None)
    tip = tip.format(option) if option else 'write the good answers as {"messages": [...]}'
    raise UsageError(
        f"{where}: preference records ({problem}", tip if option else f"{tip} and pack these"
    )


def _fields_of_answers(record: Mapping[str, Any], shape: Shape | None) -> list[str]:
    """Return the fields of good and bad answers, or of several. `shape`: of the record."""
    fields = dict[str, list[str]]()
    for name, value in record.items():
        if isinstance(value, str | list | dict):
            fields.setdefault(_meaning(name), []).append(name)
    good, several = fields.get("good", []), fields.get("one of several", [])
    bad = [name for name in record if _meaning(name) == "bad"]
    bad = [name for name in bad if name in fields.get("bad", ()) or (good and record[name] is None)]
    if bad:
        return [*good, *bad]
    if shape is not None and not _lacks_answer(record, shape):
        return []
    ranked = [name for name in fields.get("ranked", ()) if _are_ranked(record[name], record)]
    return good or ranked or (several if len(several) > 1 else [])


def _are_ranked(answers: Any, record: Mapping[str, Any]) -> bool:
    """Tell if these are several answers with a rank or score each, in them or in another field."""
    if not isinstance(answers, list) or len(answers) < 2:
        return False
    ranks = [value for name, value in record.items() if _RANK.match(name)]
    return any(isinstance(value, list) and len(value) == len(answers) for value in ranks) or all(
        isinstance(answer, dict) and any(map(_RANK.match, answer)) for answer in answers
    )


def _fitting(
    record: Mapping[str, Any], first: Collection[str], shape: Shape | None, config: DocumentConfig
) -> Iterator[str]:
    """Yield options, as they are typed, that make a shape fit and train on the good answer."""
    for suggested in _ways(record, shape):
        fields = {key: name for key, name in suggested.fields.items() if key not in MESSAGE_KEYS}
        for wanted in dict.fromkeys((config.shape, None)):
            fit = _shape_of(first, wanted, {**config.renamed, **fields})
            if fit is not None and fields.keys() <= fit.columns.keys():
                values = [value_at(record, fit.columns[name]) for name in fit.required]
                are_texts = all(isinstance(value, str) for value in values)
                as_chat = config.chat_template and "chat" in fit.prompt_templates and are_texts
                yield (
                    f"--shape {fit.kind} " * (wanted != config.shape)
                    + str(suggested)
                    + " --prompt-template chat" * bool(as_chat)
                )


def _ways(record: Mapping[str, Any], shape: Shape | None) -> Iterator[Suggested]:
    """Yield candidates for --field, the best first. `shape`: of the record without any."""
    good = next((name for name in record if _meaning(name) == "good"), None)
    as_it_is = None  # the answer in the field where the shape has it
    if shape is not None and not _lacks_answer(record, shape):
        as_it_is = Suggested({shape.required[-1]: shape.columns[shape.required[-1]]})
    if good is None:
        if as_it_is is not None:
            yield as_it_is
        return
    value, prompts = record[good], list(_prompts(record))
    if isinstance(value, dict):
        good, value = f"{good}.messages", value.get("messages")
    conversation = options_for({good: value}, "messages")
    if conversation is not None and not (prompts and _is_answer(value)):
        yield conversation
    if isinstance(value, str) and isinstance(record.get("instruction"), str):
        yield Suggested({"output": good})
    for fields in prompts:
        is_known = fields["prompt"] in KINDS["prompt-completion"].required[0]
        yield Suggested({"completion": good} if is_known else fields | {"completion": good})
    if as_it_is is not None and shape is not None and shape.is_chat:
        yield as_it_is
    if isinstance(value, str) and not prompts:
        yield Suggested({"text": good})


def _lacks_answer(record: Mapping[str, Any], shape: Shape) -> bool:
    """Tell if a record is messages without an answer of the assistant."""
    return shape.is_chat and lacks_answer(value_at(record, shape.columns[shape.required[0]]))


def _is_answer(messages: Any, index: int = 0) -> bool:
    """Tell if the message at an index is the assistant's: the first one of an answer alone is."""
    message = messages[index] if isinstance(messages, list) else None
    return (
        isinstance(message, dict)
        and role_of(message.get("role", message.get("from"))) == "assistant"
    )


def _prompts(record: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield values of --field that name a prompt."""
    for name in _PROMPTS:
        value = record.get(name)
        if isinstance(value, str | list) and value and not _is_answer(value, -1):
            yield {"prompt": name}
        elif isinstance(value, dict) and isinstance(value.get("messages"), list):
            tools = {"tools": f"{name}.tools"} if value.get("tools") else {}
            yield {"prompt": f"{name}.messages"} | tools


def _shape_of(fields: Iterable[str], shape: str | None, renamed: Mapping[str, str]) -> Shape | None:
    try:
        return find_shape([*fields], shape, dict(renamed), "", tokens=True)
    except DataError:
        return None
