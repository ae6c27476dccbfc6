"""Find the characters of a rendered conversation that the assistant wrote, end of turn included.

With `{% generation %}` tags, that is what is inside the tags, as in transformers. Most templates
have none. There the loop over the messages shows where each turn begins and ends, and the probe of
a structure (probe.py) shows, once, which part of it is the assistant's. The part is checked against
a second rule, that of prefixes: the assistant begins where the prompt for the message ends, and
ends where the conversation up to the message ends. Only what follows the last mark before is
compared, so a template may render earlier turns in another way.

If the words of a record may matter to the template (uses.py), the real prompt for each turn decides
where the assistant begins. If no loop shows the turns, the conversation is rendered up to and
without the message, and the texts are compared. If that is unclear as well, or the rules disagree,
it is an error, never a guess.

So the result for a record is a function of that record, the template and the options alone: results
of other records are used only if they are known to be rendered alike. A structure takes a handful
of renderings, once; a record with words that may matter takes one more for each of its turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from typing import Any, NamedTuple

from packer_cli.chat import limits
from packer_cli.chat.chat_template import ChatTemplate, Rendering, Turn
from packer_cli.chat.messages import ASSISTANT, Conversation, RefusedError, undecidable
from packer_cli.chat.probe import PROBED, STRUCTURE, Piece, Probe, kinds_of, probe_of, structure_of
from packer_cli.chat.syntax import is_constant_prompt, mentions_in
from packer_cli.chat.uses import Uses, watching

PROBE = "\ue000probe\ue001"
OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
Span = tuple[int, int]
_FOLLOWING = "7999994952"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}},
               "required": ["a"]}  # fmt: skip
_FUNCTION = {"name": "f", "description": "d", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]  # for templates that refuse to go without
_MOST_KEPT = 1 << 12  # structures; with more, all are learned anew
_Message = dict[str, Any]
_Turns = dict[int, Turn]  # by the numbers of their messages


class AssistantSpan(NamedTuple):
    """Trained characters of one message of the assistant.

    number  of the message; -1 if the spans of all messages are together
    spans   (start, stop) of characters, in order
    """

    number: int
    spans: list[Span]


@dataclass(frozen=True)
class TemplateBehavior:
    """Behavior of a template for a conversation, learned from its probe.

    refusal    why the template does not render it; "" if it does, else all that follows is empty
    missing    pieces that the text leaves out
    empty      numbers of the assistant's messages that have something, and the text shows nothing
    edges      of the assistant's turns, by the numbers of their messages
    shown      numbers of the assistant's messages that the text shows
    mistagged  what is wrong with the template's `{% generation %}` tags; "" if nothing is
    uses       how the template uses words, for a structure
    words      whether the words of this conversation may matter
    """

    refusal: str = ""
    missing: tuple[Piece, ...] = ()
    empty: tuple[int, ...] = ()
    edges: dict[int, _Edges] = field(default_factory=dict)
    shown: tuple[int, ...] = ()
    mistagged: str = ""
    uses: Uses = field(default_factory=Uses)
    words: bool = False


class Structures:
    """Behaviors of one template with the same arguments, by structures of conversations.

    mentions  names and texts in the template: it reads no other key
    talk      a question and its answer, with the tools that they take
    prompt    what the template writes before a first answer
    prompts   whether it does so only if it is asked to
    The last three are known only if turns have to be found.
    """

    def __init__(self, template: ChatTemplate, *, find_turns: bool) -> None:
        """Raises UndecidableError if turns have to be found, and the template renders no question
        with its answer.
        """
        self.template, self._find_turns = template, find_turns
        self.mentions = mentions_in(template.tree)
        self.prompt_is_constant = is_constant_prompt(template.tree)
        self.prompt, self.prompts = "", False
        self.talk = Conversation([])
        if find_turns and not template.marks_generation:
            self.talk, question = _question(template)
            self.prompt, self.prompts = _generation_prompt(*question)
        self._fields = frozenset((*self.mentions, *PROBED, *STRUCTURE))
        self._known: dict[Any, TemplateBehavior] = {}

    def of(self, conversation: Conversation) -> TemplateBehavior:
        """Return how the template renders a conversation, learned or known."""
        structure = self._structure(conversation)
        behavior = self._known.get(structure)
        if behavior is None:
            behavior = self._keep(structure, self.of_structure(conversation))
        if not behavior.uses.find(conversation):
            return behavior
        fields = [
            {k: v for k, v in message.items() if k not in PROBED or type(v) is list}
            for message in conversation.messages
        ]
        key = structure, repr(fields), repr(conversation.tools)
        return self._known.get(key) or self._keep(
            key, replace(self.learn(conversation), words=True)
        )

    def _keep(self, key: Any, behavior: TemplateBehavior) -> TemplateBehavior:
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[key] = behavior
        return behavior

    def _structure(self, conversation: Conversation) -> Any:
        """All that the rendering of a conversation's probe depends on, but for words that matter.

        Texts in other fields of the assistant, such as a name, may stand around its words.
        """
        known = self.mentions
        fields = [
            (number, key,
             value if is_own and type(value) is str else structure_of(value, known, key))
            for number, message in enumerate(conversation.messages)
            if len(message) > 2 or type(message.get("content")) is list
            for is_own in (message.get("role") == ASSISTANT,)
            for key, value in message.items()
            if key in known and (key not in PROBED or type(value) is list)
        ]  # fmt: skip
        kinds = kinds_of(conversation.messages)
        return structure_of(conversation.tools, known), kinds, tuple(fields)

    def of_structure(self, conversation: Conversation) -> TemplateBehavior:
        """Learn from the probe that all conversations of this structure have."""
        probe = probe_of(conversation, of_structure=True)
        uses = self._uses(probe)
        if not uses.deep:  # else each conversation has a probe of its own
            try:
                return replace(self._learn(probe), uses=uses)
            except RefusedError:
                uses.deep = True
        return TemplateBehavior(uses=uses)

    def _uses(self, probe: Probe) -> Uses:
        """Note how the template uses the words of messages and tools."""
        uses = Uses(self._fields)
        watched, template = uses.watched(probe.conversation), watching(self.template)
        try:
            template.render(watched)
        except RefusedError:
            uses.deep = True
        if self.prompts and not self.prompt_is_constant:
            for number in speakers(probe.messages):
                if not uses.deep:
                    with suppress(RefusedError):
                        template.render(watched.first(number), add_generation_prompt=True)
        return uses

    def learn(self, conversation: Conversation) -> TemplateBehavior:
        """Learn from the conversation's own probe."""
        with limits.probing():
            try:
                return self._learn(probe_of(conversation))
            except RefusedError:
                try:  # some take calls of certain tools only
                    return self._learn(probe_of(conversation, names_calls=True))
                except RefusedError as error:
                    why, numbers = str(error), speakers(conversation.messages)
                    return TemplateBehavior(why, edges=dict.fromkeys(numbers, _Edges(why=why)))

    def _learn(self, probe: Probe) -> TemplateBehavior:
        """Learn from a probe. Raises RefusedError."""
        rendering = self.template.render(probe.conversation)
        turns = _numbered(_assistants(rendering), probe.messages) or {}
        behavior = TemplateBehavior(
            missing=probe.missing_in(rendering.text),
            empty=probe.empty_in(rendering.text, _texts_of_turns(rendering, turns)),
        )
        if not self._find_turns:
            return behavior
        if self.template.marks_generation:
            return replace(behavior, mistagged=_mistagged(probe, rendering))
        shown = probe.shown_in(rendering.text)
        return replace(
            behavior,
            edges=_Learner(self, probe, rendering).all_edges(),
            shown=tuple(
                number
                for number in speakers(probe.messages)
                if not shown.isdisjoint(probe.marks[number])
            ),
        )

    def find(
        self, rendering: Rendering, conversation: Conversation, behavior: TemplateBehavior, *,
        by_message: bool = True,
    ) -> list[AssistantSpan]:  # fmt: skip
        """Find what the assistant wrote, in order. Raises UndecidableError."""
        messages = conversation.messages
        if not (numbers := speakers(messages)):
            return []
        turns = _assistants(rendering)
        if self.template.marks_generation:
            if wrong := behavior.refusal or behavior.mistagged:
                raise undecidable(wrong)
            if not by_message:
                return [AssistantSpan(-1, rendering.generated)]
            return _by_tags(rendering.generated, turns, messages)
        known = _numbered(turns, messages)
        if known is None or _are_nested(turns):
            return [self._by_prefix(rendering.text, number, conversation) for number in numbers]
        written = self._by_turns(rendering, known, conversation, behavior)
        if len(known) < len(numbers):  # many templates leave turns out
            if behavior.refusal:
                raise undecidable(behavior.refusal)
            outside = [number for number in behavior.shown if number not in known]
            written += [self._by_prefix(rendering.text, number, conversation) for number in outside]
            written.sort(key=lambda span: span.spans)
        return written

    def rearranges(self, rendering: Rendering, messages: list[_Message]) -> bool:
        """Tell whether turns are messages that the template made itself."""
        known = {id(message) for message in messages}
        return not all(id(turn.message) in known for turn in _assistants(rendering))

    def _by_turns(
        self, rendering: Rendering, turns: _Turns, conversation: Conversation,
        behavior: TemplateBehavior,
    ) -> list[AssistantSpan]:  # fmt: skip
        """Find the spans in turns that loops show."""
        text, inner = rendering.text, _inner_turns(rendering.turns, turns)
        written = list[AssistantSpan]()
        for number, turn in turns.items():
            within = inner.get(number, [])
            unseen = f"no loop of the template shows the turn of message {number}"
            edges = behavior.edges.get(number, _Edges(why=unseen))
            spans = edges.spans(text, turn, within)
            if spans is None and not behavior.words:  # its own fields may be shown
                edges = self.learn(conversation).edges.get(number, edges)
                spans = edges.spans(text, turn, within)
            is_other = spans is None and not edges.why
            if (behavior.words or is_other) and self.prompts:
                spans = self._by_prompt(spans, text, number, turn, conversation, bool(within))
            if spans is None:
                why = f"message {number} is not rendered as others like it are"
                raise undecidable(edges.why or why)
            written.append(AssistantSpan(number, spans))
        return written

    def _by_prompt(
        self, spans: list[Span] | None, text: str, number: int, turn: Turn,
        conversation: Conversation, holds_others: bool,
    ) -> list[Span] | None:  # fmt: skip
        """The spans of a turn, from the end of the real prompt for it, if that is known.

        spans         by its probe; None if the turn is not as the probe shows it
        holds_others  whether there are turns of others within the turn
        """
        if spans is not None and self.prompt_is_constant:  # a long conversation takes no longer
            prompt = self.prompt
            start = turn.start + shared(prompt, text[turn.start : turn.start + len(prompt)])
            return _from_prompt(spans, text, turn, start, exact=start == turn.start + len(prompt))
        before = conversation.first(number)
        try:
            prompt = self.template.render(before, add_generation_prompt=True).text
            start = shared(prompt, text)
            if start < turn.start:  # what comes before is rendered in another way by now
                plain = self.template.render(before).text
                asking = prompt[common_prefix(plain, prompt) :]
                start = turn.start + shared(asking, text[turn.start : turn.start + len(asking)])
            if spans is not None:
                return _from_prompt(spans, text, turn, start, exact=start == len(prompt))
            if holds_others or not text[turn.start : start].strip():
                return None
            after = self.template.render(conversation.first(number + 1)).text
        except RefusedError:
            return spans
        return [(start, max(start, len(after) if text.startswith(after) else turn.stop))]

    def _by_prefix(self, text: str, number: int, conversation: Conversation) -> AssistantSpan:
        """Find the span of a turn that no loop shows: some write the last one after the loop."""
        try:
            prompt = self.template.render(conversation.first(number), add_generation_prompt=True)
            before, after = prompt.text, self.template.render(conversation.first(number + 1)).text
        except RefusedError as error:
            raise undecidable(str(error)) from error
        if not (text.startswith(before) and text.startswith(after)):
            raise undecidable("the template renders messages differently later on")
        if len(before) >= len(after):
            raise undecidable(f"message {number} leaves no trace")
        return AssistantSpan(number, [(len(before), len(after))])


def _from_prompt(
    spans: list[Span], text: str, turn: Turn, start: int, *, exact: bool
) -> list[Span]:
    """The spans of a turn whose prompt ends at `start`; not `exact`: no sooner than there."""
    if not text[turn.start : start].strip():
        return spans
    (begin, end), *others = spans
    return [(start if exact else max(begin, start), max(start, end)), *others]


def speakers(messages: Iterable[_Message]) -> list[int]:
    """Return the numbers of the assistant's messages."""
    return [n for n, message in enumerate(messages) if message.get("role") == ASSISTANT]


def _by_tags(spans: list[Span], turns: list[Turn], messages: list[_Message]) -> list[AssistantSpan]:
    """Find the messages of the spans of `{% generation %}` tags, by the turns that they are in."""
    numbers, known = speakers(messages), _numbered(turns, messages)
    if known is not None:
        # what ends a turn may follow it
        ends = [*(turn.start for turn in turns[1:]), turns[-1].stop + 1]
        written = [
            AssistantSpan(number, [span for span in spans if turn.start <= span[0] < end])
            for (number, turn), end in zip(known.items(), ends, strict=True)
        ]
        if sum(len(found.spans) for found in written) == len(spans):
            return written
    if len(spans) != len(numbers):
        raise undecidable("no loop of the template shows which of its tags are whose")
    return [AssistantSpan(number, [span]) for number, span in zip(numbers, spans, strict=True)]


def _mistagged(probe: Probe, rendering: Rendering) -> str:
    """Describe tags that hold words of others; "" if none does."""
    tagged = " ".join(rendering.text[start:stop] for start, stop in rendering.generated)
    in_tags = probe.shown_in(tagged)
    for message, marks in zip(probe.messages, probe.marks, strict=True):
        if message.get("role") != ASSISTANT and not in_tags.isdisjoint(marks):
            return f"its {{% generation %}} tags hold words of role {message.get('role')}"
    return ""


# -- Turns, by the template's loops


def _assistants(rendering: Rendering) -> list[Turn]:
    return [turn for turn in rendering.turns if turn.message.get("role") == ASSISTANT]


def _numbered(turns: list[Turn], messages: list[_Message]) -> _Turns | None:
    """The assistant's turns by the numbers of their messages; None if these are not known.

    A template that makes new messages must make as many.
    """
    numbers = speakers(messages)
    number_of = {id(messages[number]): number for number in numbers}
    found = {number_of.get(id(turn.message), -1): turn for turn in turns}
    if len(turns) != len(numbers):
        return found if turns and -1 not in found and len(found) == len(turns) else None
    if -1 not in found and list(found) != numbers:
        return None  # in another order, or one of them twice
    return dict(zip(numbers, turns, strict=True))


def _inner_turns(turns: list[Turn], outer: _Turns) -> dict[int, list[Turn]]:
    """The turns of others within each of the outer turns; {} if there are none at all."""
    if not _are_nested(turns):
        return {}
    others = [turn for turn in turns if turn.message.get("role") != ASSISTANT]
    return {
        number: [other for other in others if turn.start <= other.start and other.stop <= turn.stop]
        for number, turn in outer.items()
    }


def _texts_of_turns(rendering: Rendering, turns: _Turns) -> dict[int, str]:
    """The texts of turns, up to the turns of others within them."""
    inner = _inner_turns(rendering.turns, turns)
    ends = {number: others[0].start for number, others in inner.items() if others}
    return {
        number: rendering.text[turn.start : ends.get(number, turn.stop)]
        for number, turn in turns.items()
    }


def _are_nested(turns: list[Turn]) -> bool:
    return any(b.start < a.stop for a, b in pairwise(turns))


# -- Edges, learned from a probe


@dataclass(frozen=True)
class _Edges:
    """The text around the assistant's words in one kind of turn.

    header   what the turn begins with, and is not the assistant's
    ending   what follows the turn, and ends it
    tail     white space at the end of the turn that is not the assistant's
    resumes  whether the assistant goes on after the results of tools that the turn holds
    why      reason why none of this is known
    """

    header: str = ""
    ending: str = ""
    tail: str = ""
    resumes: bool = False
    why: str = ""

    def spans(self, text: str, turn: Turn, inner: list[Turn]) -> list[Span] | None:
        """The assistant's part of such a turn; None if the turn is not of this kind.

        `inner`: the turns of others within the turn, in order.
        """
        stop = inner[0].start if inner else turn.stop
        if self.why or not text.startswith(self.header, turn.start, stop):
            return None
        if not text.startswith(self.ending, stop) or not text.endswith(self.tail, turn.start, stop):
            return None
        start = turn.start + len(self.header)
        spans = [(start, max(start, stop + len(self.ending) - len(self.tail)))]
        if inner and self.resumes:
            spans.append((inner[-1].stop, turn.stop))
        return spans


class _DisagreementError(Exception):
    """The two rules disagree, or the template mixes words of several speakers."""


class _Learner:
    """Learns the edges of the turns of one probe."""

    def __init__(self, structures: Structures, probe: Probe, rendering: Rendering) -> None:
        self._structures, self._prompt = structures, structures.prompt
        self._probe, self._rendering, self._text = probe, rendering, rendering.text
        self._owners = {mark: i for i, marks in enumerate(probe.marks) for mark in marks}
        self._usual_end = ""  # what follows the words of the last turn, which ends as its text does

    def all_edges(self) -> dict[int, _Edges]:
        """Return the edges of the assistant's turns by numbers of messages."""
        turns = _numbered(_assistants(self._rendering), self._probe.messages) or {}
        inner = _inner_turns(self._rendering.turns, turns)
        edges = dict[int, _Edges]()
        for number in reversed(turns):  # the last one first: it shows how turns end
            try:
                edges[number] = self._edges(number, turns[number], inner.get(number, []))
            except _DisagreementError as error:
                edges[number] = _Edges(why=str(error))
        return edges

    def _edges(self, number: int, turn: Turn, inner: list[Turn]) -> _Edges:
        """Edges of the turn of message `number`. Raises _DisagreementError."""
        text, marks = self._text, self._probe.marks[number]
        begins = [text.find(mark, turn.start, turn.stop) for mark in marks]
        ends = [text.rfind(mark, turn.start, turn.stop) + len(mark) for mark in marks]
        ends = [end for begin, end in zip(begins, ends, strict=True) if begin >= 0]
        first = min((begin for begin in begins if begin >= 0), default=turn.stop)
        last = max(ends, default=-1)
        core = self._prompt.strip()
        is_constant = bool(core) and self._structures.prompt_is_constant
        if is_constant and text.startswith(self._prompt, turn.start):
            start: int | None = turn.start + len(self._prompt)
        else:
            start = self._start(number, turn, first)
        if start is None:
            start = self._after_prompt(turn, first)
        elif core and self._structures.prompts and text.startswith(core, turn.start):
            # though no prompt for this message shows it
            start = max(start, self._after_prompt(turn, first) or start)
        if start is None:
            raise _DisagreementError(
                f"message {number} does not begin as the template's prompt ends"
            )
        resumes = bool(inner) and last > inner[-1].start
        until = inner[0].start if inner else turn.stop
        header = text[turn.start : start]
        end = text[max(start, last) : until]
        stop: int | None = until
        # what ends like the last turn needs no rendering of the conversation up to it
        if not self._usual_end or inner or not end.endswith(self._usual_end):
            stop = (
                self._stop_before_results(number, until)
                if resumes
                else self._stop(number, start, until, header)
            )
        if number + 1 == len(self._probe.messages) and stop == until == len(text):
            self._usual_end = end.strip() and end
        if stop is None:
            edges = _Edges(header, resumes=resumes)
        elif stop >= until:
            edges = _Edges(header, ending=text[until:stop], resumes=resumes)
        elif not text[stop:until].strip():
            edges = _Edges(header, tail=text[stop:until])
        else:
            raise _DisagreementError(
                f"by its turns it is {_excerpt(text, start, until)}, by prefixes of the "
                f"conversation {_excerpt(text, start, stop)}"
            )
        self._check(number, turn, edges.spans(text, turn, inner) or [])
        return edges

    def _start(self, number: int, turn: Turn, first: int) -> int | None:
        """Find where the assistant begins, by the prompt for the message, within its turn."""
        before = self._render(number, add_generation_prompt=True)
        if before is None:
            return None
        anchor = self._last_mark(before, number)
        here = self._place(anchor, first)
        if here is None:
            return None
        rest = _after(anchor, before)
        start = here + shared(rest, self._text[here:first])
        if not self._structures.prompts and not self._text[turn.start : start].strip():
            return None  # a template that writes no prompts shows nothing
        if start < turn.start:
            return None
        if start - here == len(rest):
            return start
        # the prompt goes on differently: fine if something else gives the place, too
        is_edge = start in (first, turn.start) or self._text[start:].lstrip().startswith(("<", "["))
        return start if is_edge and (anchor or self._text[here:start].strip()) else None

    def _after_prompt(self, turn: Turn, first: int) -> int | None:
        """Find where the assistant begins, by the prompt for a first answer."""
        core = self._prompt.strip()
        if not core:
            return turn.start
        start = self._text.find(core, turn.start, first)
        if start < 0:  # it may begin like that
            stop = turn.start + shared(self._prompt.lstrip(), self._text[turn.start : first])
            return stop if self._text[turn.start : stop].strip() else None
        start += len(core)
        # templates may end the prompt in more white space than the turn has there
        rest = self._prompt[len(self._prompt.rstrip()) :]
        while rest and self._text.startswith(rest[0], start):
            start, rest = start + 1, rest[1:]
        return start

    def _stop(self, number: int, start: int, until: int, header: str) -> int | None:
        """Find where the assistant ends, by the conversation up to and with the message.

        `until`: where it ends by its turn, which begins with `header`.
        """
        upto = self._render(number + 1)
        if upto is None:
            return None
        anchor, marks = self._last_mark(upto, number + 1), self._probe.marks[number]
        if anchor not in marks and any(mark in upto for mark in marks):
            return None
        here = self._place(anchor, len(self._text) if anchor in marks else start)
        if here is None:
            return None
        rests = [_after(anchor, upto)]
        if not self._structures.prompts and header.strip():  # a prompt that was not asked for
            rests = [rests[0].removesuffix(header)]
        if number + 1 == len(self._probe.messages):
            followed = self._render(number + 1, followed=True)
            if followed is not None and anchor and anchor in followed:
                rests.append(_after(anchor, followed))
        same = min(shared(rest, self._text[here:]) for rest in rests)
        if anchor not in marks and (same < len(rests[0]) and here + same < until):
            return None  # in an empty answer, end and beginning look alike
        begin = here if anchor in marks else start
        if here + same < until and self._ends_alike(rests, same, here + same, until):
            return until
        if len(rests) > 1 and here + same == begin and not self._text[begin:until].strip():
            same = len(rests[0])  # the end of the text is the only end that the turn has
        # with nothing in common, the turn goes on in another way than it ends
        return here + same if same and here + same >= start else None

    def _stop_before_results(self, number: int, until: int) -> int | None:
        """Find where the assistant stops for results that its turn holds, if its words go on after
        them: what ends the conversation up to the message also begins the results, at `until`.
        """
        upto = self._render(number + 1)
        if upto is None:
            return None
        end = _after(self._last_mark(upto, number + 1), upto)
        return until + len(end) if end.strip() and self._text.startswith(end, until) else None

    def _ends_alike(self, rests: list[str], same: int, stop: int, until: int) -> bool:
        """Tell whether the turn and the conversation up to the message, which go on differently
        from `stop` on, have the same end, white space aside: `"id": 7}</call><end>` and
        `}</call><end>`.

        `rests`: what is compared, whose first `same` characters are the same: that conversation,
        and perhaps the one with another message behind.
        """
        ending = _unspaced(self._text[stop:until])
        end, *followed = (_unspaced(rest[same:].partition(_FOLLOWING)[0]) for rest in rests)
        return bool(end) and ending.endswith(end) and all(ending in rest for rest in followed)

    def _check(self, number: int, turn: Turn, spans: list[Span]) -> None:
        """Check that the spans hold all words of the message that the text has, and no others."""
        inside = " ".join(self._text[start:stop] for start, stop in spans)
        shown = self._probe.shown_in(inside).difference(self._probe.marks[number])
        if others := [self._owners[mark] for mark in shown if mark in self._owners]:
            role = self._probe.messages[min(others)].get("role")
            raise _DisagreementError(
                f"its turn holds words of another message, of role {role}: {inside!r}"
            )
        whole = self._text[turn.start : turn.stop]
        if any(mark in whole and mark not in inside for mark in self._probe.marks[number]):
            raise _DisagreementError(f"its turn {whole!r} has words of its own outside {inside!r}")

    def _render(
        self, count: int, *, add_generation_prompt: bool = False, followed: bool = False
    ) -> str | None:
        """The text of the first messages, perhaps followed by another; None if it is refused."""
        conversation = self._probe.conversation.first(count)
        if count == len(self._probe.messages) and not (add_generation_prompt or followed):
            return self._text
        if followed:
            conversation.messages.append({"role": "user", "content": _FOLLOWING})
        try:
            return self._structures.template.render(
                conversation, add_generation_prompt=add_generation_prompt
            ).text
        except RefusedError:
            return None

    def _last_mark(self, text: str, count: int) -> str:
        """The last mark in a text of `count` messages; "" if there is none."""
        last, at = "", -1
        for mark in chain.from_iterable(reversed(self._probe.marks[:count])):
            if (later := text.rfind(mark, at + 1)) >= 0:  # behind the last so far, which is short
                last, at = mark, later
        return last

    def _place(self, mark: str, limit: int) -> int | None:
        """Find the end of the last such mark before `limit` in the whole text; 0 without a mark."""
        begin = self._text.rfind(mark, 0, limit) if mark else 0
        return None if begin < 0 else begin + len(mark)


def _after(mark: str, text: str) -> str:
    """Return the text after the last such mark; all of it without a mark."""
    return text[text.rfind(mark) + len(mark) :] if mark else text


def shared(a: str, b: str) -> int:
    """Return how many first characters two texts have in common, no tag cut in two."""
    count = common_prefix(a, b)
    if count in (len(a), len(b)):
        return count
    tag = OPEN_TAG.search(a, 0, count)
    return tag.start() if tag else count


def common_prefix(a: str, b: str) -> int:
    """Return how many first characters two texts have in common."""
    for i, (x, y) in enumerate(zip(a, b)):  # noqa: B905 up to the shorter one's end
        if x != y:
            return i
    return min(len(a), len(b))


def _unspaced(text: str) -> str:
    return "".join(text.split())


def _excerpt(text: str, start: int, stop: int) -> str:
    return repr(f"{text[max(0, start - 40) : start]}⟦{text[start:stop]}⟧{text[stop : stop + 40]}")


# -- The prompt for an answer


def _question(template: ChatTemplate) -> tuple[Conversation, tuple[str, str, Rendering]]:
    """Return (a question and its answer, the texts of the question alone, with the prompt for its
    answer, and of both).

    Raises UndecidableError if the template takes none.
    """
    refusals = []
    # some take parts only, and some, such as those called tool_use, nothing without tools
    for tools, content in product((None, _TOOLS), (PROBE, [{"type": "text", "text": PROBE}])):
        messages = [{"role": role, "content": content} for role in ("user", ASSISTANT)]
        talk = Conversation(messages, tools)
        try:
            plain = template.render(talk.first(1)).text
            prompted = template.render(talk.first(1), add_generation_prompt=True).text
            return talk, (plain, prompted, template.render(talk))
        except RefusedError as error:
            refusals.append(error)
    why = f"the template refuses a question and its answer: {refusals[0]}"
    way_out = "use a template that renders them (--chat-template), or --train-on all"
    raise undecidable(why, way_out) from refusals[0]


def _generation_prompt(plain: str, prompted: str, answered: Rendering) -> tuple[str, bool]:
    """Return (the text before the assistant's words, whether the template writes it as a prompt).

    The text is "" if there is none; templates without prompts write it in turns alone.
    """
    prompt = prompted[common_prefix(plain, prompted) :]  # what ends a text may be left out of it
    if prompt.strip() or len(prompted) != len(plain):
        return prompt, True
    turns = _assistants(answered)
    if len(turns) != 1 or answered.text.count(PROBE) != 2:
        return "", False
    header = answered.text[turns[0].start : answered.text.rindex(PROBE)]
    return (header if header.strip() else ""), False
