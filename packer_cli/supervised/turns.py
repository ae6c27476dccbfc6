"""Which characters of a rendered conversation the assistant wrote, end of turn included.

With `{% generation %}` in the template: what is inside the tags, as in transformers. Without,
as in most templates, the loop over the messages tells where each turn begins and ends, and what of
it is the assistant's is learned from probes (edges.py): once for every structure of a conversation,
so that most take one rendering. Where the words of a record may matter to the template
(word_looks.py), the real prompt for each of its turns decides where that begins. Where no loop
shows the turns, the conversation is rendered up to and without the message, and the texts are
compared. Where that is not clear either, or the two disagree, it is an error: never a guess.

So what is told of a record is a function of that record, the template and the options: what was
told of others is taken only for what is known to be rendered alike.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise, product
from typing import Any

from packer_cli.errors import DataError
from packer_cli.supervised.chat_template import ChatTemplate, RefusedError, Rendering, Turn
from packer_cli.supervised.edges import (
    DisagreementError,
    Edges,
    Learner,
    Span,
    common_prefix,
    shared,
)
from packer_cli.supervised.messages import ASSISTANT
from packer_cli.supervised.probes import PROBED, probe_of

PROBE = "\ue000probe\ue001"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}},
               "required": ["a"]}  # fmt: skip
_FUNCTION = {"name": "f", "description": "d", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]  # for templates that take no talk without
_Message = dict[str, Any]
_Turns = dict[int, Turn]  # by the numbers of their messages
_Told = dict[int, Edges | str]  # of turns: their edges, or why they have none
_MOST_KEPT = 1 << 12  # structures; what is learned begins anew beyond


class UndecidableError(DataError):
    """Nothing shows which part of the text is the assistant's."""

    position = 0


class AssistantSpans:
    """Finds the assistant's spans in the renderings of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        """Raises UndecidableError when the template renders no question with its answer."""
        self._template = template
        self._prompt, self._prompted = "", False
        # a question and its answer, and the tools that they take, where turns have to be found
        self.talk: list[_Message] = []
        self.tools: list[Any] | None = None
        if not template.marks_generation:
            self.talk, self.tools, question = _question(template)
            self._prompt, self._prompted = _generation_prompt(*question)
        # of structures: the edges of their turns, and which turns the text has and no loop
        self._learned: dict[Any, _Told] = {}
        self._outside: dict[Any, list[int]] = {}
        self._tagged: dict[Any, str] = {}  # what is wrong with the template's tags, "" for nothing

    def find(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None,
        *, last_only: bool, empty: Collection[int] = (), silent: Collection[int] = (),
    ) -> list[Span]:  # fmt: skip
        """Spans of characters to train on, in order.

        `silent`: ids of messages that are not trained on; `last_only`: only the last assistant
        message is. `empty`: ids of messages of which the text shows nothing; they have none.
        Raises UndecidableError.
        """
        spans, turns, speakers = self._found(
            rendering, messages, tools, turns_matter=bool(empty or silent or last_only)
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
        spans, turns, speakers = self._found(rendering, messages, tools, turns_matter=True)
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
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None,
        *, turns_matter: bool,
    ) -> tuple[list[Span], list[Turn], list[_Message]]:  # fmt: skip
        """(the spans, the turns that they were told by, the messages of the assistant).

        `turns_matter`: not only to those that need them, for they take time to find.
        """
        speakers = [message for message in messages if message.get("role") == ASSISTANT]
        if not speakers:
            return [], [], []
        if self._template.marks_generation:
            self._check_tags(messages, tools)
            if not turns_matter:
                return rendering.generated, [], speakers
        turns = [turn for turn in rendering.turns if turn.message.get("role") == ASSISTANT]
        if self._template.marks_generation:
            return rendering.generated, turns, speakers
        numbered = _numbered(turns, messages)
        if numbered is None or _nested(turns):
            parts = [[span] for span in self._by_prefixes(rendering.text, messages, tools)]
            turns = [Turn(*p[0], m) for p, m in zip(parts, speakers, strict=True)]
        else:
            parts = self._by_turns(rendering, numbered, messages, tools)
            if len(numbered) < len(speakers):
                alone = self._outside_loops(rendering.text, numbered, messages, tools)
                parts = sorted([*parts, *([turn[:2]] for turn in alone)])
                turns = sorted([*turns, *alone], key=lambda turn: turn.stop)
        spans = [span for part in parts for span in part]
        return spans, turns, speakers

    def _by_turns(
        self, rendering: Rendering, turns: _Turns, messages: list[_Message],
        tools: list[Any] | None,
    ) -> list[list[Span]]:  # fmt: skip
        """The spans of each turn."""
        text = rendering.text
        words, structure = self._template.structure_of(messages, tools)
        inner = _inner(rendering.turns, turns)
        learned = self._learned.get(structure)
        if learned is None:
            learned = self._learn(messages, tools)
            if structure is not None and _is_of_all(learned, messages):
                _keep(self._learned, structure, learned)
        parts: list[list[Span]] = []
        for number, turn in turns.items():
            within = inner.get(number, [])
            told = learned.get(
                number, f"no loop of the template shows the turn of message {number}"
            )
            spans = None if isinstance(told, str) else told.spans(text, turn, within)
            if spans is None and structure is not None:  # fields of its own may be shown
                told = self._learn(messages, tools).get(number, told)
                spans = None if isinstance(told, str) else told.spans(text, turn, within)
            if words:
                spans = self._by_prompt(spans, text, number, turn, messages, tools, bool(within))
            if spans is None and isinstance(told, str):
                raise undecidable(told)
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
        if not self._prompted:
            return spans
        if spans is not None and self._template.prompt_is_constant:
            asks = self._prompt
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

    def _learn(self, messages: list[_Message], tools: list[Any] | None) -> _Told:
        """What a probe tells of each turn of the assistant."""
        probe = probe_of(messages)
        speakers = [n for n, message in enumerate(messages) if message.get("role") == ASSISTANT]
        try:
            rendering = self._template.render(probe.messages, tools)
        except RefusedError as error:
            return dict.fromkeys(speakers, str(error))
        turns = [turn for turn in rendering.turns if turn.message.get("role") == ASSISTANT]
        numbered = _numbered(turns, probe.messages) or {}
        inner = _inner(rendering.turns, numbered)
        learner = Learner(self._template, self._prompt, self._prompted, probe, tools, rendering)
        told: _Told = {}
        for number in reversed(numbered):  # the last one first: it tells how turns end
            try:
                edges = learner.edges(number, numbered[number], inner.get(number, []))
            except DisagreementError as error:
                told[number] = str(error)
                continue
            why = f"message {number} does not begin as the template's prompt ends"
            told[number] = edges or why
        return told

    def _outside_loops(
        self, text: str, turns: _Turns, messages: list[_Message], tools: list[Any] | None
    ) -> list[Turn]:
        """The assistant's turns that the text has, and no loop: many templates leave turns out,
        and some write the last one after the loop over all others.
        """
        _, structure = self._template.structure_of(messages, tools)
        numbers = self._outside.get(structure)
        if numbers is None:
            probe = probe_of(messages)
            try:
                shown = probe.shown_in(self._template.render(probe.messages, tools).text)
            except RefusedError as error:
                raise undecidable(str(error)) from error
            numbers = [
                number
                for number, message in enumerate(messages)
                if message.get("role") == ASSISTANT and not shown.isdisjoint(probe.marks[number])
            ]
            if structure is not None:
                _keep(self._outside, structure, numbers)
        return [
            Turn(*self._by_prefix(text, number, messages, tools), messages[number])
            for number in numbers
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

    def _check_tags(self, messages: list[_Message], tools: list[Any] | None) -> None:
        """Raises UndecidableError when the template's tags hold words of others."""
        _, structure = self._template.structure_of(messages, tools)
        why = self._tagged.get(structure)
        if why is None:
            why = self._wrongly_tagged(messages, tools) or ""
            if structure is not None:
                _keep(self._tagged, structure, why)
        if why:
            raise undecidable(why)

    def _wrongly_tagged(self, messages: list[_Message], tools: list[Any] | None) -> str | None:
        probe = probe_of(messages)
        try:
            rendering = self._template.render(probe.messages, tools)
        except RefusedError as error:
            return str(error)
        tagged = " ".join(rendering.text[start:stop] for start, stop in rendering.generated)
        in_tags = probe.shown_in(tagged)
        for message, marks in zip(probe.messages, probe.marks, strict=True):
            if message.get("role") != ASSISTANT and not in_tags.isdisjoint(marks):
                return f"its {{% generation %}} tags hold words of role {message.get('role')}"
        return None


def _from_prompt(
    spans: list[Span], text: str, turn: Turn, start: int, *, exact: bool
) -> list[Span]:
    """The spans of a turn whose prompt ends at `start`; `exact`: as far as it goes."""
    if not text[turn.start : start].strip():
        return spans
    first, *others = spans
    return [(start if exact else max(first[0], start), max(start, first[1])), *others]


def _keep(known: dict[Any, Any], structure: Any, told: Any) -> None:
    if len(known) >= _MOST_KEPT:
        known.clear()
    known[structure] = told


def _is_of_all(told: _Told, messages: list[_Message]) -> bool:
    """Whether all conversations of a structure have such edges: none holds a name or the like."""
    for number, edges in told.items():
        message = messages[number]
        if len(message) > 2 and isinstance(edges, Edges):
            around = edges.header + edges.ending
            if any(
                isinstance(value, str) and value and value in around
                for key, value in message.items()
                if key not in PROBED
            ):
                return False
    return True


_WAY_OUT = "use a template with {% generation %} tags (--chat-template), or --train-on all"


def undecidable(why: str, way_out: str = _WAY_OUT) -> UndecidableError:
    """The error. No constructor of the class: pickle calls that with the whole message."""
    return UndecidableError(
        f"cannot tell which part of the text is the assistant's: {why}", way_out
    )


def _chosen(
    spans: list[Span], turns: list[Turn], speakers: list[_Message], silent: Collection[int],
    *, last_only: bool,
) -> list[Span]:  # fmt: skip
    """The spans, as far as their messages are to be trained on."""
    if last_only and turns:
        if _are_messages(turns, speakers) and turns[-1].message is not speakers[-1]:
            return []  # the template leaves out the last answer: nothing else takes its place
        begin = turns[-1].start
        spans = [span for span in spans if span[0] >= begin]
    elif last_only and speakers:
        if len(spans) != len(speakers):  # nothing shows whose they are
            raise undecidable("no loop of the template shows which of its tags are the last")
        spans = spans[-1:]
    if not silent:
        return spans
    if not turns or not _are_messages(turns, speakers):
        raise undecidable(
            "messages have weights, or not all are trained on, and the template rearranges messages"
        )
    quiet = [turn for turn in turns if id(turn.message) in silent]
    return [s for s in spans if not any(t.start <= s[0] < t.stop for t in quiet)]


def _without_empty(
    spans: list[Span], turns: list[Turn], speakers: list[_Message], empty: Collection[int]
) -> list[Span]:
    """The spans without those of messages that are rendered as nothing."""
    if turns and _are_messages(turns, speakers):
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


def _numbered(turns: list[Turn], messages: list[_Message]) -> _Turns | None:
    """The assistant's turns with the numbers of their messages; None when that cannot be told.

    A template that makes new messages must make as many.
    """
    speakers = [i for i, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if len(turns) != len(speakers):
        numbers = {id(messages[i]): i for i in speakers}
        numbered = {numbers.get(id(turn.message), -1): turn for turn in turns}
        return numbered if turns and -1 not in numbered and len(numbered) == len(turns) else None
    numbered = dict(zip(speakers, turns, strict=True))
    if any(turn.message is not messages[i] for i, turn in numbered.items()) and _are_messages(
        turns, messages
    ):
        return None  # in another order, or one of them twice
    return numbered


def _inner(turns: list[Turn], outer: _Turns) -> dict[int, list[Turn]]:
    """The turns of others that lie in each of some turns, where any do."""
    if all(a.stop <= b.start for a, b in pairwise(turns)):
        return {}
    return {
        number: [
            one
            for one in turns
            if turn.start <= one.start
            and one.stop <= turn.stop
            and one.message.get("role") != ASSISTANT
        ]
        for number, turn in outer.items()
    }


def _nested(turns: list[Turn]) -> bool:
    """Whether one of the assistant's turns holds another one."""
    return any(b.start < a.stop for a, b in pairwise(turns))


def _are_messages(turns: list[Turn], messages: list[_Message]) -> bool:
    """Whether the template's turns are the messages themselves, not made of them."""
    known = {id(message) for message in messages}
    return all(id(turn.message) in known for turn in turns)


def _question(
    template: ChatTemplate,
) -> tuple[list[_Message], list[Any] | None, tuple[str, str, Rendering]]:
    """(a question and its answer, the tools that go with them, the texts of the question alone,
    with the prompt for its answer, and of both).

    Raises UndecidableError when the template takes none.
    """
    refusals = []
    # some take parts only, and some, such as those called tool_use, nothing without tools
    for tools, content in product((None, _TOOLS), (PROBE, [{"type": "text", "text": PROBE}])):
        talk = [{"role": "user", "content": content}, {"role": ASSISTANT, "content": content}]
        try:
            plain = template.render(talk[:1], tools).text
            prompted = template.render(talk[:1], tools, add_generation_prompt=True).text
            return talk, tools, (plain, prompted, template.render(talk, tools))
        except RefusedError as error:
            refusals.append(error)
    why = f"the template refuses a question and its answer: {refusals[0]}"
    way_out = "use a template that renders them (--chat-template), or --train-on all"
    raise undecidable(why, way_out) from refusals[0]


def _generation_prompt(plain: str, prompted: str, answered: Rendering) -> tuple[str, bool]:
    """(what the template writes before the assistant's own words, whether it does when asked to).

    The first is "" for nothing at all; templates that cannot be asked write it in any turn.
    """
    shared = common_prefix(plain, prompted)  # what ends a text may be left out of a prompt
    prompt = prompted[shared:]
    if prompt.strip() or len(prompted) != len(plain):
        return prompt, True
    turns = [turn for turn in answered.turns if turn.message.get("role") == ASSISTANT]
    if len(turns) != 1 or answered.text.count(PROBE) != 2:
        return "", False
    header = answered.text[turns[0].start : answered.text.rindex(PROBE)]
    return (header if header.strip() else ""), False
