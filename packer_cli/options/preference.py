"""Preference records, which have good and bad answers, for DPO, KTO and the like.

Packed as they are, bad answers would be learned like good ones. So such records are refused unless
--field names the answer to train on; the other answers are then left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
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
    may_hold,
    messages_in,
    options_for,
    value_at,
)

# Fields that hold the answer of a record: --field maps one of them to name the good answer.
_ANSWERS = frozenset(("messages", "conversations", "completion", "output", "text"))
_PROMPTS = (
    "prompt", "question", "query", "input", "instruction", "conversations", "conversation",
    "messages", "context",
)  # fmt: skip
_ASSISTANTS = frozenset(("assistant", "gpt", "model", "bot", "chatbot", "ai"))
_LABELS = frozenset(("label", "kto_tag", "kto_label", "desirable", "is_desirable"))
# Names that records later in a file may have.
WELL_KNOWN = (
    "chosen", "rejected", "rejected_response", "rejected_messages", "preferred_output",
    "non_preferred_output", "label", "kto_tag",
)  # fmt: skip
_OF_ANSWERS = "(_(response|answer|completion|output|message|conversation|text)s?)?"
_RANKED = re.compile("completions|responses|answers|candidates|outputs|generations")
_RANK = re.compile(".*(rank|score|reward|rating).*")
_OF = "((response|answer|completion|output|message|conversation|text)s?_)?"
_GOOD = re.compile(f"{_OF}(chosen|preferred|accepted){_OF_ANSWERS}")
_BAD = re.compile(f"{_OF}(rejected|dispreferred|non_preferred){_OF_ANSWERS}")
_EITHER = re.compile(
    "(response|answer|completion|output|message|conversation|text)s?_?([abjk]|[01])"
)


@cache
def _meaning(name: str) -> str:
    """Return the meaning of a field by its name: answers that are "good", "bad", "ranked" or
    "either" of several, a "label", or "".
    """
    name = name.lower()
    matches = {
        "good": _GOOD.fullmatch(name), "bad": _BAD.fullmatch(name),
        "ranked": _RANKED.fullmatch(name), "either": _EITHER.fullmatch(name),
        "label": name in _LABELS,
    }  # fmt: skip
    return next((meaning for meaning, match in matches.items() if match), "")


def may_be_preference(names: Collection[str]) -> bool:
    """Tell by the names of fields if records may be preference records."""
    return any(map(_meaning, names))


def preference_fields(
    record: Mapping[str, Any], config: DocumentConfig, used: Collection[str]
) -> list[str]:
    """Return the fields that make a record a preference record; [] if it is not, or if --field
    names the answer. `used`: fields that are columns of values, which a label may be.
    """
    if not may_be_preference(record) or names_answer(config, record):
        return []
    shape = _shape_of(record, config.shape, config.renamed)
    if shape is not None and shape.is_of_tokens:
        return []
    held = {name: value for name, value in record.items() if isinstance(value, str | list | dict)}
    good = [name for name in held if _meaning(name) == "good"]
    among = record if good else held
    if bad := [name for name in among if _meaning(name) == "bad" and _may_be_answer(record[name])]:
        return [*good, *bad]
    labels = [
        name
        for name, value in record.items()
        if _meaning(name) == "label" and type(value) is bool and name not in used
    ]
    if shape is not None:
        return labels if shape.is_composed else []
    either = [name for name in held if _meaning(name) == "either"]
    ranked = [name for name in held if _meaning(name) == "ranked" and _are_ranked(record[name])]
    return good or ranked or (either if len(either) > 1 else [])


def _are_ranked(answers: Any) -> bool:
    """Tell if these are several answers with a rank or score each."""
    items = answers if isinstance(answers, list) else []
    return bool(items) and all(isinstance(o, dict) and any(map(_RANK.match, o)) for o in items)


def names_answer(config: DocumentConfig, names: Collection[str] | None = None) -> bool:
    """Tell if --field names the answer to train on, one of the fields `names` if they are given."""
    columns = [column for key, column in config.renamed.items() if key in _ANSWERS]
    return any(names is None or may_hold(names, column) for column in columns)


def _may_be_answer(value: Any) -> bool:
    return value is None or isinstance(value, str | list | dict)


def preference_error(
    where: str, record: Mapping[str, Any], fields: list[str], config: DocumentConfig
) -> UsageError:
    """Return the error for such records; its tip names the --field that packs the good answers.
    `fields`: from `preference_fields`.
    """
    if _meaning(fields[-1]) == "label":
        problem = f"{fields[0]} is true or false): bad answers would be trained on like good ones"
        tip = f"keep the records whose {fields[0]} is true, and pack these with {{}}"
    else:
        problem = f"{named(fields)}): no option says which answers to train on"
        tip = "add {} to train on the good ones; DPO trainers tokenize pairs by themselves"
    message = f"{where}: preference records ({problem}"
    record = {name: messages_in(value) or value for name, value in record.items()}
    option = next(_fitting(record, config), None)
    if option is None:
        return UsageError(message, 'write the good answers as {"messages": [...]} and pack these')
    return UsageError(message, tip.format(option))


def _fitting(record: Mapping[str, Any], config: DocumentConfig) -> Iterator[str]:
    """Yield options, as they are typed, that make a shape fit and train on the good answer."""
    renamed = config.renamed
    for suggested in _ways(record, _shape_of(record, config.shape, renamed)):
        for wanted in dict.fromkeys((config.shape, None)):
            fields = {
                key: name for key, name in suggested.fields.items() if key not in MESSAGE_KEYS
            }
            shape = _shape_of(record, wanted, {**renamed, **fields})
            if shape is not None and fields.keys() <= shape.columns.keys():
                values = [value_at(record, shape.columns[name]) for name in shape.required]
                of_texts = "chat" in shape.prompt_templates and all(
                    isinstance(v, str) for v in values
                )
                yield (
                    f"--shape {shape.kind} " * (wanted != config.shape)
                    + str(suggested)
                    + " --prompt-template chat" * bool(config.chat_template and of_texts)
                )


def _ways(record: Mapping[str, Any], shape: Shape | None) -> Iterator[Suggested]:
    """Yield candidates for --field, the best first. `shape`: of the record without any."""
    good = next((name for name in record if _meaning(name) == "good"), None)
    as_it_is = None  # the answer in the field where the shape has it
    if shape is not None:
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


def _is_answer(messages: Any, index: int = 0) -> bool:
    """Tell if the message at an index of a list is the assistant's. The first message of an answer
    without its prompt is.
    """
    message = messages[index] if isinstance(messages, list) else None
    role = message.get("role", message.get("from")) if isinstance(message, dict) else ""
    return str(role).lower() in _ASSISTANTS


def _prompts(record: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield values of --field that name a prompt."""
    for name in _PROMPTS:
        value = record.get(name)
        if isinstance(value, str | list) and value and not _is_answer(value, -1):
            yield {"prompt": name}
        elif isinstance(value, dict) and isinstance(value.get("messages"), list):
            yield {"prompt": f"{name}.messages"} | (
                {"tools": f"{name}.tools"} if value.get("tools") else {}
            )


def _shape_of(
    record: Mapping[str, Any], shape: str | None, renamed: Mapping[str, str]
) -> Shape | None:
    try:
        return find_shape([*record], shape, dict(renamed), "", tokens=True)
    except DataError:
        return None
