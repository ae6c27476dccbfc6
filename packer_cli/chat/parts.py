"""Which characters of the assistant's turns are not trained on: reasoning, tool calls, ranges.

Found from renderings, never guessed. What a turn has because of its reasoning or its calls is what
a rendering without them lacks in that turn. Where ranges of content begin and end is shown by marks
in the content: characters that no text has, rendered once more, and gone from a text that is else
the same. Where that is not clear, it is an error.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate
from typing import Any

from packer_cli.chat.chat_template import ChatTemplate, Rendering
from packer_cli.chat.learned import OPEN_TAG, Span
from packer_cli.chat.messages import (
    ASSISTANT,
    DETAIL,
    REASONING,
    RefusedError,
    UndecidableError,
    joined_content,
    untrained_ranges,
    without_notes,
)
from packer_cli.chat.probe import THOUGHT
from packer_cli.chat.turns import AssistantSpans
from packer_cli.options.documents import DocumentConfig

_Message = dict[str, Any]
# A mark: its number in digits that are no characters of any text, and another that ends it.
_FIRST, _END = 0xFDD1, "\ufdef"
_MARK = re.compile("([\ufdd1-\ufdda]+)\ufdef")


class UntrainedParts:
    """Finds such parts in the renderings of one template."""

    def __init__(
        self, template: ChatTemplate, assistant: AssistantSpans, config: DocumentConfig
    ) -> None:
        self._template, self._assistant, self._config = template, assistant, config

    def find(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None,
        trained: Collection[int], noted: list[_Message],
    ) -> list[Span]:  # fmt: skip
        """Spans of characters, of the messages whose numbers are `trained`.

        `noted`: the messages with what packer notes about them, which the template never gets.
        Raises UndecidableError.
        """
        spans = list[Span]()
        ranged = [number for number in trained if DETAIL in noted[number]]
        if ranged:
            spans += self._ranges(rendering.text, noted, tools, ranged)
        config = self._config
        if not config.trains_reasoning:
            thoughtful = [n for n in trained if _without_reasoning(messages[n]) != messages[n]]
            if thoughtful:
                spans += self._reasoning(rendering, messages, tools, thoughtful)
        if config.train_tool_calls is False:
            calling = [n for n in trained if messages[n].get("tool_calls")]
            if calling:
                spans += self._calls(rendering, messages, tools, calling)
        return sorted(span for span in spans if span[0] < span[1])

    def _ranges(
        self, text: str, messages: list[_Message], tools: list[Any] | None, numbers: list[int]
    ) -> list[Span]:
        """What its ranges leave out of content."""
        cuts = list[tuple[int, int]]()  # (message, character) of every mark, in pairs
        ranges, marked = list[Span](), list(messages)
        for number in numbers:
            content = joined_content(messages[number].get("content"))
            begin, end = _edges(content)
            for start, stop in untrained_ranges(messages[number], len(content)):
                if max(start, begin) < min(stop, end):
                    ranges.append((start, stop))
                    cuts += [(number, max(start, begin)), (number, min(stop, end))]
            marks = [(at, mark) for mark, (which, at) in enumerate(cuts) if which == number]
            marked[number] = _with_marks(messages[number], marks) if marks else messages[number]
        found = self._marks(text, marked, tools) if cuts else {}
        shown = {cuts[mark][0] for mark in found}
        spans = list[Span]()
        for (start, stop), first in zip(ranges, range(0, len(cuts), 2), strict=True):
            (number, before), (_, after) = cuts[first : first + 2]
            if number not in shown:  # the template leaves out the content
                continue
            if not {first, first + 1} <= found.keys():
                raise _undecided(f"the template does not show all of message {number}")
            content, begin, end = (
                joined_content(messages[number]["content"]),
                found[first],
                found[first + 1],
            )
            # white space around it is left out, too, where the template shows it
            while before > start and text[begin - 1] == content[before - 1]:
                begin, before = begin - 1, before - 1
            while after < stop and text[end : end + 1] == content[after]:
                end, after = end + 1, after + 1
            spans.append((begin, end))
        return spans

    def _marks(
        self, text: str, messages: list[_Message], tools: list[Any] | None
    ) -> dict[int, int]:
        """Where each mark is in the text, which has none itself."""
        try:
            shown = self._template.render(list(map(without_notes, messages)), tools).text
        except RefusedError as error:
            raise _undecided(str(error)) from error
        pieces = _MARK.split(shown)
        if "".join(pieces[::2]) != text:
            raise _undecided("the template looks into their content")
        ends = accumulate(map(len, pieces[::2]))
        numbers = [_number(digits) for digits in pieces[1::2]]
        if len(set(numbers)) < len(numbers):
            raise _undecided("the template shows their content more than once")
        return dict(zip(numbers, ends, strict=False))

    def _reasoning(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None,
        numbers: list[int],
    ) -> list[Span]:  # fmt: skip
        """What turns have because of their reasoning."""
        without = [
            _without_reasoning(m) if m.get("role") == ASSISTANT else m for m in messages
        ]  # of all, so that it is rendered once
        other, what = self._rendered(without, tools), "reasoning"
        if other.text == rendering.text:
            return []
        speakers = [i for i, m in enumerate(messages) if m.get("role") == ASSISTANT]
        with_it = self._assistant.by_message(rendering, messages, tools)
        lacking = self._assistant.by_message(other, without, tools)
        spans = list[Span]()
        for number, own, others in zip(speakers, with_it, lacking, strict=True):
            if number not in numbers:
                continue
            if not _says_something(without[number]):
                spans += own  # nothing would be left but its end
                continue
            if len(own) != len(others):
                raise _unclear(what, number)
            for one, its in zip(own, others, strict=True):
                added = _added(rendering.text, one, other.text, its)
                if added is None:
                    raise _unclear(what, number)
                spans.append(added)
        return spans

    def _calls(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None,
        numbers: list[int],
    ) -> list[Span]:  # fmt: skip
        """What turns have because of their calls. Results would not go without calls, so only
        the conversation up to the turn is rendered without them.
        """
        speakers = [i for i, m in enumerate(messages) if m.get("role") == ASSISTANT]
        turns = dict(
            zip(speakers, self._assistant.by_message(rendering, messages, tools), strict=True)
        )
        spans, what = list[Span](), "tool calls"
        for number in numbers:
            message = messages[number]
            uncalled = {
                k: v for k, v in message.items() if k not in ("tool_calls", "function_call")
            }
            uncalled["content"] = uncalled.get("content") or ""
            rest = uncalled
            thought = str(message.get("reasoning_content") or "").strip()
            if not (self._config.trains_reasoning and thought in rendering.text):
                rest = _without_reasoning(uncalled)
            if not _says_something(rest):
                spans += turns[number]
                continue
            texts, own = list[str](), list[list[Span]]()
            thoughtless = _without_reasoning(message)
            keeps_thought = rest is uncalled and thoughtless != message
            for last in (message, uncalled, *[thoughtless] * keeps_thought):
                talk = [*messages[:number], last]
                upto = self._rendered(talk, tools)
                texts.append(upto.text)
                own.append(self._assistant.by_message(upto, talk, tools)[-1])
            if any(len(some) != 1 for some in own):
                raise _unclear(what, number)
            added = _added(texts[0], own[0][0], texts[1], own[1][0], white_space=False)
            if added is not None and keeps_thought:  # some show a thought only where calls follow
                thought_at = _added(texts[0], own[0][0], texts[2], own[2][0])
                pieces = [] if thought_at is None else without([added], [thought_at])
                added = pieces[0] if len(pieces) == 1 else None
            if added is None:
                raise _unclear(what, number)
            calls = texts[0][slice(*added)]
            if not calls:
                continue
            places = [
                (at, at + len(calls))
                for start, stop in turns[number]
                for at in _places(calls, rendering.text, start, stop)
            ]
            if len(places) != 1:
                raise _unclear(what, number)
            spans += places
        return spans

    def _rendered(self, messages: list[_Message], tools: list[Any] | None) -> Rendering:
        try:
            return self._template.render(messages, tools)
        except RefusedError as error:
            raise _undecided(str(error)) from error


def without(spans: list[Span], parts: list[Span]) -> list[Span]:
    """The spans, in order, without the characters of some parts, in order."""
    for begin, end in parts:
        kept = list[Span]()
        for start, stop in spans:
            if stop <= begin or end <= start:
                kept.append((start, stop))
            else:
                kept += [(start, begin)] * (start < begin) + [(end, stop)] * (end < stop)
        spans = kept
    return spans


def _added(
    text: str, span: Span, other: str, its: Span, *, white_space: bool = True
) -> Span | None:
    """What a span of a text has that the other text's lacks, in one piece; None for anything else.

    Where it may be in several places, it is the first that cuts no tag in two: of `<a>x<b><a>y`
    and `<a>y`, with spans that begin after the first `<a>`, it is `x<b>`. `white_space`: also that
    which follows it.
    """
    (start, end), (begin, at) = span, its
    if text[start:end] == other[begin:at]:
        return start, start
    while at > 0 and end > start:
        if text[end - 1] == other[at - 1]:
            end, at = end - 1, at - 1
        elif at > begin and text[end - 1].isspace():  # templates write more of it after reasoning
            end -= 1
        else:
            break
    first = start + at - begin  # before it, both have the same
    if first > end or text[start:first] != other[begin:at]:
        return None
    while first < end < span[1] and text[end] not in "<[" and text[first] == text[end]:
        if first >= start and not OPEN_TAG.search(text, start, end):
            break  # no further: reasoning and answer may begin with the same words
        first, end = first + 1, end + 1
    while white_space and end < span[1] and text[end].isspace():
        end += 1
    return max(first, start), end


def _without_reasoning(message: _Message) -> _Message:
    """A message without its thoughts, in fields or in its content."""
    kept = {key: value for key, value in message.items() if key not in REASONING}
    content = kept.get("content")
    if isinstance(content, str) and THOUGHT in content:
        before, _, rest = content.partition(THOUGHT)
        lead = before.rpartition("<think>")[0] if "<think>" in before else ""
        kept["content"] = lead + rest.rpartition(THOUGHT)[2].lstrip()
    return kept


def _says_something(message: _Message) -> bool:
    words = [joined_content(message.get("content")), *(message.get(key) for key in REASONING)]
    spoken = any(isinstance(one, str) and one.strip() for one in words)
    return spoken or bool(message.get("tool_calls"))


def _edges(content: str) -> Span:
    """Where the content begins and ends but for white space around it."""
    return len(content) - len(content.lstrip()), len(content.rstrip())


def _with_marks(message: _Message, marks: list[tuple[int, int]]) -> _Message:
    """The message with marks of these numbers in its content: (before which character, number)."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": _marked(content, marks)}
    texts = [part if isinstance(part, str) else part["text"] for part in content]
    begins = [0, *accumulate(map(len, texts))][:-1]
    own: list[list[tuple[int, int]]] = [[] for _ in texts]
    for at, number in marks:
        part = max(bisect_right(begins, at) - 1, 0)
        own[part].append((at - begins[part], number))
    new = [_marked(text, some) for text, some in zip(texts, own, strict=True)]
    return message | {
        "content": [
            text if isinstance(part, str) else part | {"text": text}
            for part, text in zip(content, new, strict=True)
        ]
    }


def _marked(text: str, marks: list[tuple[int, int]]) -> str:
    pieces, done = [], 0
    for at, number in sorted(marks):
        digits = "".join(chr(_FIRST + int(digit)) for digit in str(number))
        pieces += [text[done:at], digits, _END]
        done = at
    return "".join([*pieces, text[done:]])


def _number(digits: str) -> int:
    return int("".join(str(ord(digit) - _FIRST) for digit in digits))


def _places(part: str, text: str, start: int, stop: int) -> list[int]:
    places, at = [], text.find(part, start, stop)
    while at >= 0:
        places.append(at)
        at = text.find(part, at + 1, stop)
    return places


def _unclear(what: str, number: int) -> UndecidableError:
    return _undecided(f"the {what} of message {number} change more of its turn than one part")


def _undecided(why: str) -> UndecidableError:
    return UndecidableError(
        f"cannot tell which part of the text is not to be trained on: {why}",
        "use another --chat-template, train on all of the message, or give it weight 0",
    )
