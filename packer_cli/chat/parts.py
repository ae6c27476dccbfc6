"""Which characters of the assistant's turns are not trained on: reasoning, tool calls, ranges.

Found from renderings, never guessed. What a turn has because of its reasoning or its calls is what
a rendering without them lacks in that turn. Where ranges of content begin and end is shown by marks
in the content: characters of private use that the text has not, rendered once more, and gone from a
text that is else the same. Where that is not clear, it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import accumulate
from typing import Any

from packer_cli.chat.chat_template import Rendering
from packer_cli.chat.messages import (
    ASSISTANT,
    RANGES,
    REASONING,
    RefusedError,
    UndecidableError,
    joined_content,
    says_something,
    without_notes,
)
from packer_cli.chat.probe import THOUGHT
from packer_cli.chat.turns import OPEN_TAG, Span, Structures
from packer_cli.options.documents import DocumentConfig

_Message = dict[str, Any]
_FIRST_MARK, _MOST_MARKS = 0x100000, 0xFFFE
_MARKS = re.compile("[\U00100000-\U0010fffd]")


class UntrainedParts:
    """Finds such parts in the renderings of one template."""

    def __init__(self, structures: Structures, config: DocumentConfig) -> None:
        self._structures, self._config = structures, config

    def find(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None,
        trained: Collection[int], noted: list[_Message],
    ) -> list[Span]:  # fmt: skip
        """Spans of characters, of the messages whose numbers are `trained`.

        `noted`: the messages with what packer notes about them, which the template never gets.
        Raises UndecidableError.
        """
        spans, config = list[Span](), self._config
        ranged = [number for number in trained if RANGES in noted[number]]
        if ranged:
            spans += self._ranges(rendering.text, noted, tools, ranged)
        thoughtful = [n for n in trained if _without_reasoning(messages[n]) != messages[n]]
        if thoughtful and not config.trains_reasoning:
            spans += self._reasoning(rendering, messages, tools, thoughtful)
        calling = [n for n in trained if messages[n].get("tool_calls")]
        if calling and config.train_tool_calls is False:
            spans += self._calls(rendering, messages, tools, calling)
        return sorted(span for span in spans if span[0] < span[1])

    def _ranges(
        self, text: str, messages: list[_Message], tools: list[Any] | None, numbers: list[int]
    ) -> list[Span]:
        """What its ranges leave out of content."""
        ranges, cuts = list[tuple[int, int, int]](), list[tuple[int, int]]()
        marked = list(messages)
        for number in numbers:
            content, first = joined_content(messages[number].get("content")), len(cuts)
            # templates take away the white space around content, and a mark would keep it
            begin, end = len(content) - len(content.lstrip()), len(content.rstrip())
            for start, stop in messages[number][RANGES]:
                if max(start, begin) < min(stop, end):
                    ranges.append((number, start, stop))
                    cuts += [(number, max(start, begin)), (number, min(stop, end))]
            if cuts[first:]:
                marks = [(at, mark) for mark, (_, at) in enumerate(cuts[first:], first)]
                marked[number] = _with_marks(messages[number], marks)
        found = self._marks(text, marked, tools) if cuts else {}
        shown, spans = {cuts[mark][0] for mark in found}, list[Span]()
        for which, (number, start, stop) in enumerate(ranges):
            if number not in shown:  # the template leaves out the content
                continue
            if not {2 * which, 2 * which + 1} <= found.keys():
                raise _undecided(f"the template does not show all of message {number}")
            content = joined_content(messages[number]["content"])
            begin, end = found[2 * which], found[2 * which + 1]
            before, after = cuts[2 * which][1], cuts[2 * which + 1][1]
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
        shown = self._rendered(list(map(without_notes, messages)), tools).text
        pieces = _MARKS.split(shown)
        if "".join(pieces) != text:
            raise _undecided("the template looks into their content")
        marks = [ord(mark) - _FIRST_MARK for mark in _MARKS.findall(shown)]
        if len(set(marks)) < len(marks):
            raise _undecided("the template shows their content more than once")
        return dict(zip(marks, accumulate(map(len, pieces)), strict=False))

    def _reasoning(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None,
        numbers: list[int],
    ) -> list[Span]:  # fmt: skip
        """What turns have because of their reasoning."""
        without = [
            _without_reasoning(m) if m.get("role") == ASSISTANT else m for m in messages
        ]  # of all, so that it is rendered once
        other = self._rendered(without, tools)
        if other.text == rendering.text:
            return []
        said = self._said(rendering, messages, tools)
        lacking, spans = self._said(other, without, tools), list[Span]()
        for number in numbers:
            own, others = said.get(number, []), lacking.get(number, [])
            if not says_something(without[number]):
                spans += own  # nothing would be left but its end
                continue
            if len(own) != len(others):
                raise _unclear("reasoning", number)
            for one, its in zip(own, others, strict=True):
                added = _added(rendering.text, one, other.text, its)
                if added is None:
                    raise _unclear("reasoning", number)
                spans.append(added)
        return spans

    def _calls(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None,
        numbers: list[int],
    ) -> list[Span]:  # fmt: skip
        """What turns have because of their calls. Results would not go without calls, so only
        the conversation up to the turn is rendered without them.
        """
        said, text, spans = self._said(rendering, messages, tools), rendering.text, list[Span]()
        for number in numbers:
            own, message = said.get(number, []), messages[number]
            uncalled = {
                k: v for k, v in message.items() if k not in ("tool_calls", "function_call")
            } | {"content": message.get("content") or ""}
            thoughtless = _without_reasoning(message)
            thought = str(message.get("reasoning_content") or "").strip()
            keeps_thought = self._config.trains_reasoning and thought in text
            if not says_something(uncalled if keeps_thought else _without_reasoning(uncalled)):
                spans += own
                continue
            without_thought = thoughtless if keeps_thought and thoughtless != message else None
            calls = self._of_calls(messages[:number], message, uncalled, without_thought, tools)
            places = [
                (at, at + len(calls))
                for start, stop in own
                for at in range(start, stop - len(calls) + 1)
                if calls and text.startswith(calls, at)
            ]
            if calls and len(places) != 1:
                raise _unclear("tool calls", number)
            spans += places
        return spans

    def _of_calls(
        self, before: list[_Message], message: _Message, uncalled: _Message,
        thoughtless: _Message | None, tools: list[Any] | None,
    ) -> str:  # fmt: skip
        """What the turn of a message that follows `before` has because of its calls."""
        texts, own = list[str](), list[Span]()
        for last in filter(None, (message, uncalled, thoughtless)):
            talk = [*before, last]
            upto = self._rendered(talk, tools)
            spans = self._said(upto, talk, tools).get(len(before), [])
            if len(spans) != 1:
                raise _unclear("tool calls", len(before))
            texts.append(upto.text)
            own += spans
        added = _added(texts[0], own[0], texts[1], own[1], white_space=False)
        if added is not None and thoughtless:  # some show a thought only where calls follow
            thought = _added(texts[0], own[0], texts[2], own[2])
            pieces = without([added], [thought]) if thought else []
            added = pieces[0] if len(pieces) == 1 else None
        if added is None:
            raise _unclear("tool calls", len(before))
        return texts[0][slice(*added)]

    def _said(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None
    ) -> dict[int, list[Span]]:
        told = self._structures.of(messages, tools)
        said = self._structures.find(rendering, messages, tools, told)
        return {one.number: one.spans for one in said}

    def _rendered(self, messages: list[_Message], tools: list[Any] | None) -> Rendering:
        try:
            return self._structures.template.render(messages, tools)
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


def _with_marks(message: _Message, marks: list[tuple[int, int]]) -> _Message:
    """The message with marks of these numbers in its content: (before which character, number)."""
    if marks[-1][1] >= _MOST_MARKS or _MARKS.search(joined_content(message["content"])):
        raise _undecided("it has too many ranges, or characters of private use")
    if isinstance(message["content"], str):
        return message | {"content": _marked(message["content"], marks)}
    parts, begin = [], 0
    for number, part in enumerate(message["content"], 1):
        text = part if isinstance(part, str) else part["text"]
        end = begin + len(text)
        is_last = number == len(message["content"])
        own = [(at - begin, mark) for at, mark in marks if begin <= at and (at < end or is_last)]
        new = _marked(text, own)
        parts.append(new if isinstance(part, str) else part | {"text": new})
        begin = end
    return message | {"content": parts}


def _marked(text: str, marks: list[tuple[int, int]]) -> str:
    for at, number in sorted(marks, reverse=True):
        text = text[:at] + chr(_FIRST_MARK + number) + text[at:]
    return text


def _unclear(what: str, number: int) -> UndecidableError:
    return _undecided(f"the {what} of message {number} change more of its turn than one part")


def _undecided(why: str) -> UndecidableError:
    return UndecidableError(
        f"cannot tell which part of the text is not to be trained on: {why}",
        "use another --chat-template, train on all of the message, or give it weight 0",
    )
