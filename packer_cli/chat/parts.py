"""Find the parts of the assistant's turns that are not trained on: reasoning, tool calls, ranges.

They are found from renderings, never guessed. The part of a turn that stands for its reasoning or
its calls is what a rendering without them lacks. The edges of ranges of content are shown by marks,
characters of private use that the text does not have: the conversation is rendered once more with
them, and without the marks the text must be the same. Anything unclear is an error. Each kind of
part costs one more rendering of a conversation that has it, calls two or three for each turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate
from typing import Any

from packer_cli.chat.chat_template import Rendering
from packer_cli.chat.messages import (
    ASSISTANT,
    RANGES,
    REASONING,
    Conversation,
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
    """Finder of such parts in the renderings of one template."""

    def __init__(self, structures: Structures, config: DocumentConfig) -> None:
        self._structures, self._config = structures, config

    def find(
        self, rendering: Rendering, conversation: Conversation, trained: Collection[int],
        noted: list[_Message],
    ) -> list[Span]:  # fmt: skip
        """Return the untrained characters of messages. Raises UndecidableError."""
        spans, config, messages = list[Span](), self._config, conversation.messages
        ranged = [number for number in trained if RANGES in noted[number]]
        if ranged:
            spans += self._ranges(rendering.text, replace(conversation, messages=noted), ranged)
        thoughtful = [n for n in trained if _without_reasoning(messages[n]) != messages[n]]
        if thoughtful and not config.trains_reasoning:
            spans += self._reasoning(rendering, conversation, thoughtful)
        calling = [n for n in trained if messages[n].get("tool_calls")]
        if calling and config.train_tool_calls is False:
            spans += self._calls(rendering, conversation, calling)
        return sorted(span for span in spans if span[0] < span[1])

    def _ranges(self, text: str, conversation: Conversation, numbers: list[int]) -> list[Span]:
        """Find what ranges of messages leave out of their content."""
        ranges, cuts = list[tuple[int, int, int]](), list[tuple[int, int]]()
        messages, marked = conversation.messages, list(conversation.messages)
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
        places = self._marks(text, replace(conversation, messages=marked)) if cuts else {}
        shown, spans = {cuts[mark][0] for mark in places}, list[Span]()
        for which, (number, start, stop) in enumerate(ranges):
            if number not in shown:  # the template leaves out the content
                continue
            if not {2 * which, 2 * which + 1} <= places.keys():
                raise _undecided(f"the template does not show all of message {number}")
            content = joined_content(messages[number]["content"])
            begin, end = places[2 * which], places[2 * which + 1]
            before, after = cuts[2 * which][1], cuts[2 * which + 1][1]
            # white space around it is left out, too, if the template shows it
            while before > start and text[begin - 1] == content[before - 1]:
                begin, before = begin - 1, before - 1
            while after < stop and text[end : end + 1] == content[after]:
                end, after = end + 1, after + 1
            spans.append((begin, end))
        return spans

    def _marks(self, text: str, conversation: Conversation) -> dict[int, int]:
        """Return the place of each mark in the text, which has none itself."""
        messages = list(map(without_notes, conversation.messages))
        shown = self._rendered(replace(conversation, messages=messages)).text
        pieces = _MARKS.split(shown)
        if "".join(pieces) != text:
            raise _undecided("the template looks into their content")
        marks = [ord(mark) - _FIRST_MARK for mark in _MARKS.findall(shown)]
        if len(set(marks)) < len(marks):
            raise _undecided("the template shows their content more than once")
        return dict(zip(marks, accumulate(map(len, pieces)), strict=False))

    def _reasoning(
        self, rendering: Rendering, conversation: Conversation, numbers: list[int]
    ) -> list[Span]:
        """Find what turns have because of their reasoning."""
        # without that of all messages, so that they are rendered once
        thoughtless = [
            _without_reasoning(message) if message.get("role") == ASSISTANT else message
            for message in conversation.messages
        ]
        other_conversation = replace(conversation, messages=thoughtless)
        other = self._rendered(other_conversation)
        if other.text == rendering.text:
            return []
        written, spans = self._written(rendering, conversation), list[Span]()
        written_without = self._written(other, other_conversation)
        for number in numbers:
            full, lacking = written.get(number, []), written_without.get(number, [])
            if not says_something(thoughtless[number]):
                spans += full  # nothing would be left but its end
                continue
            if len(full) != len(lacking):
                raise _unclear("reasoning", number)
            for span, other_span in zip(full, lacking, strict=True):
                added = _added(rendering.text, span, other.text, other_span)
                if added is None:
                    raise _unclear("reasoning", number)
                spans.append(added)
        return spans

    def _calls(
        self, rendering: Rendering, conversation: Conversation, numbers: list[int]
    ) -> list[Span]:
        """Find what turns have because of their calls, without which results are refused."""
        written, text = self._written(rendering, conversation), rendering.text
        spans = list[Span]()
        for number in numbers:
            turn, message = written.get(number, []), conversation.messages[number]
            uncalled = {
                k: v for k, v in message.items() if k not in ("tool_calls", "function_call")
            } | {"content": message.get("content") or ""}
            thoughtless = _without_reasoning(message)
            thought = str(message.get("reasoning_content") or "").strip()
            keeps_thought = self._config.trains_reasoning and thought in text
            if not says_something(uncalled if keeps_thought else _without_reasoning(uncalled)):
                spans += turn
                continue
            without_thought = thoughtless if keeps_thought and thoughtless != message else None
            calls = self._of_calls(conversation.first(number), message, uncalled, without_thought)
            places = [
                (at, at + len(calls))
                for start, stop in turn
                for at in range(start, stop - len(calls) + 1)
                if calls and text.startswith(calls, at)
            ]
            if calls and len(places) != 1:
                raise _unclear("tool calls", number)
            spans += places
        return spans

    def _of_calls(
        self, before: Conversation, message: _Message, uncalled: _Message,
        thoughtless: _Message | None,
    ) -> str:  # fmt: skip
        """Return the text that the turn of a message after `before` has because of its calls."""
        texts, turns, number = list[str](), list[Span](), len(before.messages)
        for last in filter(None, (message, uncalled, thoughtless)):
            talk = replace(before, messages=[*before.messages, last])
            upto = self._rendered(talk)
            spans = self._written(upto, talk).get(number, [])
            if len(spans) != 1:
                raise _unclear("tool calls", number)
            texts.append(upto.text)
            turns += spans
        added = _added(texts[0], turns[0], texts[1], turns[1], white_space=False)
        if added is not None and thoughtless:  # some show a thought only if calls follow
            thought = _added(texts[0], turns[0], texts[2], turns[2])
            pieces = without([added], [thought]) if thought else []
            added = pieces[0] if len(pieces) == 1 else None
        if added is None:
            raise _unclear("tool calls", number)
        return texts[0][slice(*added)]

    def _written(self, rendering: Rendering, conversation: Conversation) -> dict[int, list[Span]]:
        behavior = self._structures.of(conversation)
        return dict(self._structures.find(rendering, conversation, behavior))

    def _rendered(self, conversation: Conversation) -> Rendering:
        try:
            return self._structures.template.render(conversation)
        except RefusedError as error:
            raise _undecided(str(error)) from error


def without(spans: list[Span], parts: list[Span]) -> list[Span]:
    """Return the spans without the characters of some parts; both are in order."""
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
    """Find what a span of a text has and that of the other text lacks, in one piece; else None.

    If it can be in several places, it is in the first that cuts no tag in two: of `<a>x<b><a>y`
    and `<a>y`, with spans that begin after the first `<a>`, it is `x<b>`. `white_space`: with the
    white space that follows.
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
    """Return a message without its thoughts, in fields or in its content."""
    kept = {key: value for key, value in message.items() if key not in REASONING}
    content = kept.get("content")
    if isinstance(content, str) and THOUGHT in content:
        before, _, rest = content.partition(THOUGHT)
        lead = before.rpartition("<think>")[0] if "<think>" in before else ""
        kept["content"] = lead + rest.rpartition(THOUGHT)[2].lstrip()
    return kept


def _with_marks(message: _Message, marks: list[tuple[int, int]]) -> _Message:
    """Return the message with marks in its content; marks are (before which character, number)."""
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
