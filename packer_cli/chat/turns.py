"""Which characters of a rendered conversation the assistant wrote, end of turn included.

With `{% generation %}` in the template: what is inside the tags, as in transformers. Without, as in
most templates, the loop over the messages tells where each turn begins and ends, and what of it is
the assistant's is learned from probes (learned.py): once for each structure of conversations, so
that most take one rendering. Where the words of a record may matter to the template
(word_looks.py), the real prompt for each of its turns decides where that begins. Where no loop
shows the turns, the conversation is rendered up to and without the message, and the texts are
compared. Where that is not clear either, or the two disagree, it is an error: never a guess.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from packer_cli.chat.chat_template import Rendering, Turn
from packer_cli.chat.learned import (
    Span,
    Structures,
    Told,
    Turns,
    are_messages,
    are_nested,
    common_prefix,
    inner_turns,
    numbered,
    shared,
)
from packer_cli.chat.messages import ASSISTANT, RefusedError, undecidable

_Message = dict[str, Any]


class AssistantSpans:
    """Finds the assistant's spans in the renderings of one template."""

    def __init__(self, structures: Structures) -> None:
        self._structures, self._template = structures, structures.template

    def find(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None, told: Told,
        *, last_only: bool, empty: Collection[int] = (), silent: Collection[int] = (),
    ) -> list[Span]:  # fmt: skip
        """Spans of characters to train on, in order.

        `silent`: ids of messages that are not trained on; `last_only`: only the last assistant
        message is. `empty`: ids of messages of which the text shows nothing; they have none.
        Raises UndecidableError.
        """
        spans, turns, speakers = self._found(
            rendering, messages, tools, told, turns_matter=bool(empty or silent or last_only)
        )
        spans = _chosen(spans, turns, speakers, silent, last_only=last_only)
        if not empty:
            return spans
        if last_only and not turns:
            speakers = speakers[-1:]
        return _without_empty(spans, turns, speakers, empty)

    def by_message(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None
    ) -> list[list[Span]]:
        """The spans of each message of the assistant, in order. Raises UndecidableError."""
        told = self._structures.of(messages, tools)
        spans, turns, speakers = self._found(rendering, messages, tools, told, turns_matter=True)
        if len(turns) == len(speakers):
            # what ends a turn may follow it
            begins = [*(turn.start for turn in turns[1:]), len(rendering.text) + 1]
            own = [[s for s in spans if turn.start <= s[0] < begin]
                   for turn, begin in zip(turns, begins, strict=True)]  # fmt: skip
            if sum(map(len, own)) == len(spans):
                return own
        if len(spans) == len(speakers):
            return [[span] for span in spans]
        raise undecidable("no loop of the template shows which of its turns are whose")

    def _found(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None, told: Told,
        *, turns_matter: bool,
    ) -> tuple[list[Span], list[Turn], list[_Message]]:  # fmt: skip
        """(the spans, the turns that they were told by, the messages of the assistant).

        `turns_matter`: not only to those that need them, for they take time to find.
        """
        speakers = [message for message in messages if message.get("role") == ASSISTANT]
        if not speakers:
            return [], [], []
        if self._template.marks_generation:
            if wrong := told.learned.refusal or told.learned.mistagged:
                raise undecidable(wrong)
            if not turns_matter:
                return rendering.generated, [], speakers
        turns = [turn for turn in rendering.turns if turn.message.get("role") == ASSISTANT]
        if self._template.marks_generation:
            return rendering.generated, turns, speakers
        known = numbered(turns, messages)
        if known is None or are_nested(turns):
            parts = [[span] for span in self._by_prefixes(rendering.text, messages, tools)]
            turns = [Turn(*p[0], m) for p, m in zip(parts, speakers, strict=True)]
        else:
            parts = self._by_turns(rendering, known, messages, tools, told)
            if len(known) < len(speakers):
                alone = self._outside_loops(rendering.text, known, messages, tools, told)
                parts = sorted([*parts, *([turn[:2]] for turn in alone)])
                turns = sorted([*turns, *alone], key=lambda turn: turn.stop)
        spans = [span for part in parts for span in part]
        return spans, turns, speakers

    def _by_turns(
        self, rendering: Rendering, turns: Turns, messages: list[_Message],
        tools: list[Any] | None, told: Told,
    ) -> list[list[Span]]:  # fmt: skip
        """The spans of each turn."""
        text, inner = rendering.text, inner_turns(rendering.turns, turns)
        parts: list[list[Span]] = []
        for number, turn in turns.items():
            within = inner.get(number, [])
            unseen = f"no loop of the template shows the turn of message {number}"
            edges = told.learned.edges.get(number, unseen)
            spans = None if isinstance(edges, str) else edges.spans(text, turn, within)
            if spans is None and told.is_shared:  # fields of its own may be shown
                edges = self._structures.learn(messages, tools).edges.get(number, edges)
                spans = None if isinstance(edges, str) else edges.spans(text, turn, within)
            if told.words:
                spans = self._by_prompt(spans, text, number, turn, messages, tools, bool(within))
            if spans is None and isinstance(edges, str):
                raise undecidable(edges)
            if spans is None:
                raise undecidable(f"message {number} is not rendered as others like it are")
            parts.append(spans)
        return parts

    def _by_prompt(
        self, spans: list[Span] | None, text: str, number: int, turn: Turn,
        messages: list[_Message], tools: list[Any] | None, holds_others: bool,
    ) -> list[Span] | None:  # fmt: skip
        """The spans of a turn, from where the real prompt for it ends, as far as that is known.

        `spans`: by its probe, None where the turn is not as that tells; `holds_others`: whether
        there are turns of others within it.
        """
        if not self._structures.prompts:
            return spans
        if spans is not None and self._template.prompt_is_constant:
            asks = self._structures.prompt
            start = turn.start + shared(asks, text[turn.start : turn.start + len(asks)])
            return _from_prompt(spans, text, turn, start, exact=start == turn.start + len(asks))
        before = messages[:number]
        try:
            prompt = self._template.render(before, tools, add_generation_prompt=True).text
            start = shared(prompt, text)
            if start < turn.start:  # what comes before is rendered otherwise by now
                plain = self._template.render(before, tools).text
                asks = prompt[common_prefix(plain, prompt) :]
                start = turn.start + shared(asks, text[turn.start : turn.start + len(asks)])
        except RefusedError:
            return spans
        if spans is not None:
            return _from_prompt(spans, text, turn, start, exact=start == len(prompt))
        if holds_others or not text[turn.start : start].strip():
            return None
        try:
            after = self._template.render(messages[: number + 1], tools).text
        except RefusedError:
            return None
        stop = len(after) if text.startswith(after) else turn.stop
        return [(start, max(start, stop))]

    def _outside_loops(
        self, text: str, turns: Turns, messages: list[_Message], tools: list[Any] | None, told: Told
    ) -> list[Turn]:
        """The assistant's turns that the text has, and no loop: many templates leave turns out,
        and some write the last one after the loop over all others.
        """
        if told.learned.refusal:
            raise undecidable(told.learned.refusal)
        return [
            Turn(*self._by_prefix(text, number, messages, tools), messages[number])
            for number in told.learned.shown
            if number not in turns
        ]

    def _by_prefixes(
        self, text: str, messages: list[_Message], tools: list[Any] | None
    ) -> list[Span]:
        return [
            self._by_prefix(text, number, messages, tools)
            for number, message in enumerate(messages)
            if message.get("role") == ASSISTANT
        ]

    def _by_prefix(
        self, text: str, number: int, messages: list[_Message], tools: list[Any] | None
    ) -> Span:
        try:
            before = self._template.render(
                messages[:number], tools, add_generation_prompt=True
            ).text
            after = self._template.render(messages[: number + 1], tools).text
        except RefusedError as error:
            raise undecidable(str(error)) from error
        if not (text.startswith(before) and text.startswith(after)):
            raise undecidable("the template renders messages differently later on")
        if len(before) >= len(after):
            raise undecidable(f"message {number} leaves no trace")
        return len(before), len(after)


def _from_prompt(
    spans: list[Span], text: str, turn: Turn, start: int, *, exact: bool
) -> list[Span]:
    """The spans of a turn whose prompt ends at `start`; `exact`: as far as it goes."""
    if not text[turn.start : start].strip():
        return spans
    first, *others = spans
    return [(start if exact else max(first[0], start), max(start, first[1])), *others]


def _chosen(
    spans: list[Span], turns: list[Turn], speakers: list[_Message], silent: Collection[int],
    *, last_only: bool,
) -> list[Span]:  # fmt: skip
    """The spans, as far as their messages are to be trained on."""
    if last_only and turns:
        if are_messages(turns, speakers) and turns[-1].message is not speakers[-1]:
            return []  # the template leaves out the last answer: nothing else takes its place
        begin = turns[-1].start
        spans = [span for span in spans if span[0] >= begin]
    elif last_only and speakers:
        if len(spans) != len(speakers):  # nothing shows whose they are
            raise undecidable("no loop of the template shows which of its tags are the last")
        spans = spans[-1:]
    if not silent:
        return spans
    if not turns or not are_messages(turns, speakers):
        raise undecidable(
            "messages have weights, or not all are trained on, and the template rearranges messages"
        )
    quiet = [turn for turn in turns if id(turn.message) in silent]
    return [s for s in spans if not any(t.start <= s[0] < t.stop for t in quiet)]


def _without_empty(
    spans: list[Span], turns: list[Turn], speakers: list[_Message], empty: Collection[int]
) -> list[Span]:
    """The spans without those of messages that are rendered as nothing."""
    if turns and are_messages(turns, speakers):
        silent = [turn for turn in turns if id(turn.message) in empty]
    elif len(turns) == len(speakers):
        pairs = zip(turns, speakers, strict=True)
        silent = [turn for turn, message in pairs if id(message) in empty]
    elif len(spans) == len(speakers):
        told = zip(spans, speakers, strict=True)
        return [span for span, message in told if id(message) not in empty]
    else:
        raise undecidable("it leaves a turn empty, and no loop of it shows which one")
    # what ends an empty turn may follow it, and then no other turn begins there
    begins = {turn.start for turn in turns}
    return [
        span
        for span in spans
        if not any(t.start <= span[0] < t.stop + (t.stop not in begins) for t in silent)
    ]
