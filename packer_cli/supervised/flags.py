"""What records themselves say of what is trained on: flags of messages, and ranges of content.

    {"weight": 0}                  OpenAI, Mistral: 0 or 1
    {"train": false}               axolotl; also "training"
    {"loss": false}                ms-swift, ChatGLM; "loss_weight" of LLaMA-Factory: 0 or 1
    {"masking": true}              the other way round; also "masked"
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": true}]}
                                   axolotl: characters of the content, the last one included; of
                                   the content only what such a range says is trained on, and of
                                   a message with an empty list, nothing
    {"content": [{"type": "text", "text": "..", "weight": 0}]}
                                   any of the flags, of a part of the content

Flags only take away from what `--train-on` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_TRAINED = ("weight", "train", "training", "loss", "loss_weight")
_MASKED = ("masking", "masked")
DETAIL = "train_detail"
FLAGS = (*_TRAINED, *_MASKED)
CONTEXT = "\0context"  # a note of packer, and no field of the record
_OF_TRAINING = frozenset((*FLAGS, DETAIL, CONTEXT))
_EDGES = ("begin_offset", "end_offset")
_Message = dict[str, Any]
_Range = tuple[int, int]


class Noted(list[dict[str, Any]]):
    """Ranges that packer made of the flags of parts, and no field of the record."""


def without_notes(message: _Message) -> _Message:
    """The message as its chat template gets it: with what the record has, and no more."""
    if is_context(message):
        message = {key: value for key, value in message.items() if key != CONTEXT}
    if isinstance(message.get(DETAIL), Noted):
        message = {key: value for key, value in message.items() if key != DETAIL}
    return message


def as_context(message: _Message) -> _Message:
    """The same message, not trained on by the choice of the user, which no flag can say."""
    return message | {CONTEXT: True}


def any_flags(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any of the messages says something of being trained on."""
    return not all(map(_OF_TRAINING.isdisjoint, messages))


def is_context(message: Mapping[str, Any]) -> bool:
    """Whether `as_context` made it."""
    return CONTEXT in message


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether its flags leave a message, or a part of one, to be trained on. Nulls say nothing."""
    return not (
        message.get(DETAIL) == []
        or any(message.get(flag) is not None and not message[flag] for flag in _TRAINED)
        or any(message.get(flag) for flag in _MASKED)
    )


def wrong_flag(message: Mapping[str, Any]) -> str:
    """What is wrong with the flags of a message, or of a part of one; "" for nothing."""
    for flag in FLAGS:
        value = message.get(flag)
        if value is not None and (isinstance(value, str | list | dict) or value not in (0, 1)):
            return f"{flag} is {value!r}, expected 0 or 1, or false or true"
    return ""


def wrong_detail(message: _Message) -> str:
    """What is wrong with the ranges of a message; "" for nothing."""
    ranges, content = message.get(DETAIL), message.get("content")
    if ranges is None:
        return ""
    if not isinstance(ranges, list) or not isinstance(content, str):
        what = "a list of ranges, of content that is a string"
        return f"{DETAIL} is {type(ranges).__name__}, expected {what}"
    for number, one in enumerate(ranges):
        where = f"{DETAIL}[{number}]"
        if not isinstance(one, dict) or one.get("train") not in (0, 1):
            return f"{where} is {one!r}, expected begin_offset, end_offset and train, 0 or 1"
        begin, end = (one.get(name) for name in _EDGES)
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(content):
            return (
                f"{where} is of the characters {begin} to {end}, expected some of the "
                f"{len(content)} of the content, from 0 on"
            )
    return ""


def detail_of(parts: list[Any], texts: list[str]) -> dict[str, Any]:
    """The ranges of content that is made of parts, as a field; {} where all are trained on."""
    ranges, at = Noted(), 0
    for part, text in zip(parts, texts, strict=True):
        if text:
            trained = not isinstance(part, dict) or is_trained(part)
            ranges.append({"begin_offset": at, "end_offset": at + len(text) - 1, "train": trained})
        at += len(text)
    return {} if all(one["train"] for one in ranges) else {DETAIL: ranges}


def untrained_ranges(message: _Message, length: int) -> list[_Range]:
    """Of the content's `length` characters, from .. to of those that its ranges leave out."""
    if DETAIL not in message:
        return []
    trained = bytearray(length)
    for one in message[DETAIL]:
        begin, stop = one["begin_offset"], one["end_offset"] + 1
        trained[begin:stop] = (b"\1" if one["train"] else b"\0") * (stop - begin)
    ranges, at = [], 0
    while (begin := trained.find(0, at)) >= 0:
        at = trained.find(1, begin)
        at = length if at < 0 else at
        ranges.append((begin, at))
        if at == length:
            break
    return ranges
