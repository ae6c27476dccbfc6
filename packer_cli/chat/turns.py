"""Which characters of a rendered conversation the assistant wrote, end of turn included.

With `{% generation %}` in the template: what is inside the tags, as in transformers. Without, as in
most templates, the loop over the messages tells where each turn begins and ends, and what of it is
the assistant's is learned from a probe (probe.py) of each structure, once. There the turn is
compared with another rule, that of prefixes: the end of a prompt for the message is not the
assistant's, and the end of the conversation up to and with the message is. Only what follows the
last mark before is compared, so that a template may render earlier turns in another way.

Where the words of a record may matter to the template (uses.py), the real prompt for each of its
turns decides where that begins. Where no loop shows the turns, the conversation is rendered up to
and without the message, and the texts are compared. Where that is not clear either, or the two
disagree, it is an error: never a guess.

So what is told of a record is a function of that record, the template and the options alone: what
was told of others is taken only for what is known to be rendered alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from typing import Any, NamedTuple

from packer_cli.chat.chat_template import ChatTemplate, Rendering, Turn
from packer_cli.chat.messages import ASSISTANT, RefusedError, undecidable
from packer_cli.chat.probe import PROBED, STRUCTURE, Piece, Probe, kinds_of, probe_of, told_of
from packer_cli.chat.syntax import is_constant_prompt, mentions_in
from packer_cli.chat.uses import Uses, watching

PROBE = "\ue000probe\ue001"
OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
Span = tuple[int, int]
_FOLLOWING = "7999994952"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}},
               "required": ["a"]}  # fmt: skip
_FUNCTION = {"name": "f", "description": "d", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]  # for templates that take no talk without
_MOST_KEPT = 1 << 12  # structures; what is learned begins anew beyond
_Message = dict[str, Any]
_Turns = dict[int, Turn]  # by the numbers of their messages


class Said(NamedTuple):
    """What the assistant says in one message: its `number`, where its turn begins, and `spans` of
    characters. The number is -1 for all messages together, where it was not asked for.
    """

    number: int
    begin: int
    spans: list[Span]


@dataclass(frozen=True)
class Learned:
    """What the probe of a conversation tells.

    refusal    why the template does not render it, "" when it does: then nothing else is told
    missing    the pieces that the text leaves out
    empty      numbers of messages of the assistant of which it shows nothing, though they have
               something
    edges      of the assistant's turns, by their messages' numbers, or why they have none
    shown      numbers of the assistant's messages of which the text shows something
    mistagged  what is wrong with the template's `{% generation %}` tags, "" for nothing
    uses       of a structure: how the template uses words
    """

    refusal: str = ""
    missing: tuple[Piece, ...] = ()
    empty: tuple[int, ...] = ()
    edges: dict[int, _Edges | str] = field(default_factory=dict)
    shown: tuple[int, ...] = ()
    mistagged: str = ""
    uses: Uses = field(default_factory=Uses)


class Told(NamedTuple):
    """What is told of one conversation. `words`: whether they may matter to the template."""

    words: bool
    learned: Learned


class Structures:
    """What the probes of conversations tell of one template, with the same arguments, and what the
    assistant says in its renderings. Safe to share between threads.

    talk, tools  a question and its answer, and the tools that they take
    prompt       what the template writes before a first answer
    prompts      whether it does so if it is asked to
                 All of these only where turns have to be found.
    mentions     all names and texts in the template: it reads no key but these
    """

    def __init__(self, template: ChatTemplate, *, find_turns: bool) -> None:
        """Raises UndecidableError when turns have to be found, and the template renders no question
        with its answer.
        """
        self.template, self._find_turns = template, find_turns
        self.mentions = mentions_in(template.tree)
        self.prompt_is_constant = is_constant_prompt(template.tree)
        self.prompt, self.prompts = "", False
        self.talk: list[_Message] = []
        self.tools: list[Any] | None = None
        if find_turns and not template.marks_generation:
            self.talk, self.tools, question = _question(template)
            self.prompt, self.prompts = _generation_prompt(*question)
        self._fields = frozenset((*self.mentions, *PROBED, *STRUCTURE))
        self._known: dict[Any, Learned] = {}

    def of(self, messages: list[_Message], tools: list[Any] | None) -> Told:
        """What is told of a conversation."""
        structure = self._structure(messages, tools)
        learned = self._known.get(structure)
        if learned is None:
            learned = self._keep(structure, self.of_structure(messages, tools))
        if not learned.uses.find(messages, tools):
            return Told(False, learned)
        others = [
            {k: v for k, v in message.items() if k not in PROBED or type(v) is list}
            for message in messages
        ]
        own = structure, repr(others), repr(tools)
        return Told(True, self._known.get(own) or self._keep(own, self.learn(messages, tools)))

    def _keep(self, key: Any, learned: Learned) -> Learned:
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[key] = learned
        return learned

    def _structure(self, messages: list[_Message], tools: list[Any] | None) -> Any:
        """All that the rendering of a conversation's probe depends on, but for words that matter.
        What the assistant's own fields say, such as a name, may stand around its words.
        """
        known = self.mentions
        others = [
            (number, key, value if is_own and type(value) is str else told_of(value, known, key))
            for number, message in enumerate(messages)
            if len(message) > 2 or type(message.get("content")) is list
            for is_own in (message.get("role") == ASSISTANT,)
            for key, value in message.items()
            if key in known and (key not in PROBED or type(value) is list)
        ]
        return told_of(tools, known), kinds_of(messages), tuple(others)

    def of_structure(self, messages: list[_Message], tools: list[Any] | None) -> Learned:
        """What the probe tells that all conversations of this structure have."""
        probe = probe_of(messages, tools, of_structure=True)
        uses = self._uses(probe)
        if uses.deep:  # then each is asked itself
            return Learned(uses=uses)
        try:
            return replace(self._learn(probe), uses=uses)
        except RefusedError:
            uses.deep = True
            return Learned(uses=uses)

    def _uses(self, probe: Probe) -> Uses:
        """How the template uses the words of messages and tools."""
        uses = Uses(self._fields)
        messages, tools = uses.watch_messages(probe.messages), uses.watch(probe.tools)
        template = watching(self.template)
        try:
            template.render(messages, tools)
        except RefusedError:
            uses.deep = True
        if self.prompts and not self.prompt_is_constant:
            for number in speakers(probe.messages):
                if not uses.deep:
                    with suppress(RefusedError):
                        template.render(messages[:number], tools, add_generation_prompt=True)
        return uses

    def probe(self, messages: list[_Message], tools: list[Any] | None) -> Probe:
        """The conversation with marks in the place of words."""
        return probe_of(messages, tools)

    def learn(self, messages: list[_Message], tools: list[Any] | None) -> Learned:
        """What the conversation's own probe tells."""
        try:
            return self._learn(self.probe(messages, tools))
        except RefusedError:
            try:  # some take calls of certain tools only
                return self._learn(probe_of(messages, tools, names_calls=True))
            except RefusedError as error:
                return Learned(str(error), edges=dict.fromkeys(speakers(messages), str(error)))

    def _learn(self, probe: Probe) -> Learned:
        """What a probe tells. Raises RefusedError."""
        rendering = self.template.render(probe.messages, probe.tools)
        turns = _numbered(_assistants(rendering), probe.messages) or {}
        learned = Learned(
            missing=probe.missing_in(rendering.text),
            empty=probe.empty_in(rendering.text, _texts_of_turns(rendering, turns)),
        )
        if not self._find_turns:
            return learned
        if self.template.marks_generation:
            return replace(learned, mistagged=_mistagged(probe, rendering))
        shown, own = probe.shown_in(rendering.text), speakers(probe.messages)
        return replace(
            learned,
            edges=_Learner(self, probe, rendering).all_edges(),
            shown=tuple(n for n in own if not shown.isdisjoint(probe.marks[n])),
        )

    def find(
        self, rendering: Rendering, messages: list[_Message], tools: list[Any] | None, told: Told,
        *, whose: bool = True,
    ) -> list[Said]:  # fmt: skip
        """What the assistant says, in order. `whose`: not only what, but also in which message.

        Raises UndecidableError.
        """
        own = speakers(messages)
        if not own:
            return []
        text, learned = rendering.text, told.learned
        if self.template.marks_generation:
            if wrong := learned.refusal or learned.mistagged:
                raise undecidable(wrong)
            if not whose:
                return [Said(-1, 0, rendering.generated)]
            return _by_tags(rendering.generated, _assistants(rendering), messages)
        turns = _assistants(rendering)
        known = _numbered(turns, messages)
        if known is None or _are_nested(turns):
            return [self._by_prefix(text, number, messages, tools) for number in own]
        said = self._by_turns(rendering, known, messages, tools, told)
        if len(known) < len(own):  # many templates leave turns out
            if learned.refusal:
                raise undecidable(learned.refusal)
            outside = [number for number in learned.shown if number not in known]
            said += [self._by_prefix(text, number, messages, tools) for number in outside]
            said.sort(key=lambda one: one.spans)
        return said

    def rearranges(self, rendering: Rendering, messages: list[_Message]) -> bool:
        """Whether the template's turns are none of the messages, but made of them."""
        known = {id(message) for message in messages}
        return not all(id(turn.message) in known for turn in _assistants(rendering))

    def _by_turns(
        self, rendering: Rendering, turns: _Turns, messages: list[_Message],
        tools: list[Any] | None, told: Told,
    ) -> list[Said]:  # fmt: skip
        text, inner = rendering.text, _inner_turns(rendering.turns, turns)
        said = list[Said]()
        for number, turn in turns.items():
            within = inner.get(number, [])
            unseen = f"no loop of the template shows the turn of message {number}"
            edges = told.learned.edges.get(number, unseen)
            spans = None if isinstance(edges, str) else edges.spans(text, turn, within)
            if spans is None and not told.words:  # fields of its own may be shown
                edges = self.learn(messages, tools).edges.get(number, edges)
                spans = None if isinstance(edges, str) else edges.spans(text, turn, within)
            is_known = spans is not None or isinstance(edges, str)
            if (told.words or not is_known) and self.prompts:
                spans = self._by_prompt(spans, text, number, turn, messages, tools, bool(within))
            if spans is None:
                other = f"message {number} is not rendered as others like it are"
                raise undecidable(edges if isinstance(edges, str) else other)
            said.append(Said(number, turn.start, spans))
        return said

    def _by_prompt(
        self, spans: list[Span] | None, text: str, number: int, turn: Turn,
        messages: list[_Message], tools: list[Any] | None, holds_others: bool,
    ) -> list[Span] | None:  # fmt: skip
        """The spans of a turn, from where the real prompt for it ends, as far as that is known.

        `spans`: by its probe, None where the turn is not as that tells; `holds_others`: whether
        there are turns of others within it.
        """
        if spans is not None and self.prompt_is_constant:  # a long talk takes no longer
            asks = self.prompt
            start = turn.start + shared(asks, text[turn.start : turn.start + len(asks)])
            return _from_prompt(spans, text, turn, start, exact=start == turn.start + len(asks))
        before = messages[:number]
        try:
            prompt = self.template.render(before, tools, add_generation_prompt=True).text
            start = shared(prompt, text)
            if start < turn.start:  # what comes before is rendered otherwise by now
                plain = self.template.render(before, tools).text
                asks = prompt[common_prefix(plain, prompt) :]
                start = turn.start + shared(asks, text[turn.start : turn.start + len(asks)])
            if spans is not None:
                return _from_prompt(spans, text, turn, start, exact=start == len(prompt))
            if holds_others or not text[turn.start : start].strip():
                return None
            after = self.template.render(messages[: number + 1], tools).text
        except RefusedError:
            return spans
        return [(start, max(start, len(after) if text.startswith(after) else turn.stop))]

    def _by_prefix(
        self, text: str, number: int, messages: list[_Message], tools: list[Any] | None
    ) -> Said:
        """What is said in a turn that no loop shows, as some write the last one after the loop."""
        try:
            before = self.template.render(messages[:number], tools, add_generation_prompt=True).text
            after = self.template.render(messages[: number + 1], tools).text
        except RefusedError as error:
            raise undecidable(str(error)) from error
        if not (text.startswith(before) and text.startswith(after)):
            raise undecidable("the template renders messages differently later on")
        if len(before) >= len(after):
            raise undecidable(f"message {number} leaves no trace")
        return Said(number, len(before), [(len(before), len(after))])


def _from_prompt(
    spans: list[Span], text: str, turn: Turn, start: int, *, exact: bool
) -> list[Span]:
    """The spans of a turn whose prompt ends at `start`; `exact`: as far as it goes."""
    if not text[turn.start : start].strip():
        return spans
    (begin, end), *others = spans
    return [(start if exact else max(begin, start), max(start, end)), *others]


def speakers(messages: Iterable[_Message]) -> list[int]:
    """The numbers of the assistant's messages."""
    return [n for n, message in enumerate(messages) if message.get("role") == ASSISTANT]


def _by_tags(spans: list[Span], turns: list[Turn], messages: list[_Message]) -> list[Said]:
    """The spans of `{% generation %}` tags, by the turns that they are in."""
    own, known = speakers(messages), _numbered(turns, messages)
    if known is not None:
        # what ends a turn may follow it
        ends = [*(turn.start for turn in turns[1:]), turns[-1].stop + 1]
        said = [
            Said(number, turn.start, [span for span in spans if turn.start <= span[0] < end])
            for (number, turn), end in zip(known.items(), ends, strict=True)
        ]
        if sum(len(one.spans) for one in said) == len(spans):
            return said
    if len(spans) != len(own):
        raise undecidable("no loop of the template shows which of its tags are whose")
    return [Said(number, span[0], [span]) for number, span in zip(own, spans, strict=True)]


def _mistagged(probe: Probe, rendering: Rendering) -> str:
    """What is wrong with tags that hold words of others."""
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
    """The assistant's turns with the numbers of their messages; None when that cannot be told.

    A template that makes new messages must make as many.
    """
    own = speakers(messages)
    numbers = {id(messages[number]): number for number in own}
    some = {numbers.get(id(turn.message), -1): turn for turn in turns}
    if len(turns) != len(own):
        return some if turns and -1 not in some and len(some) == len(turns) else None
    if -1 not in some and list(some) != own:
        return None  # in another order, or one of them twice
    return dict(zip(own, turns, strict=True))


def _inner_turns(turns: list[Turn], outer: _Turns) -> dict[int, list[Turn]]:
    """The turns of others that lie in each of some turns, where any do."""
    if not _are_nested(turns):
        return {}
    others = [turn for turn in turns if turn.message.get("role") != ASSISTANT]
    return {
        number: [one for one in others if turn.start <= one.start and one.stop <= turn.stop]
        for number, turn in outer.items()
    }


def _texts_of_turns(rendering: Rendering, turns: _Turns) -> dict[int, str]:
    """The texts of some turns, up to the turns of others that lie in them."""
    inner = _inner_turns(rendering.turns, turns)
    ends = {number: others[0].start for number, others in inner.items() if others}
    return {
        number: rendering.text[turn.start : ends.get(number, turn.stop)]
        for number, turn in turns.items()
    }


def _are_nested(turns: list[Turn]) -> bool:
    """Whether one of the turns holds another one."""
    return any(b.start < a.stop for a, b in pairwise(turns))


# -- Edges, learned from a probe


@dataclass(frozen=True)
class _Edges:
    """What lies around the assistant's words in one kind of turn.

    header   what the turn begins with, and is not the assistant's
    ending   what follows the turn, and ends it
    tail     white space that the turn ends in, and is not the assistant's
    resumes  whether the assistant goes on after the results of tools that the turn holds
    """

    header: str
    ending: str = ""
    tail: str = ""
    resumes: bool = False

    def spans(self, text: str, turn: Turn, inner: list[Turn]) -> list[Span] | None:
        """The assistant's part of such a turn; None when the turn is not of this kind.

        `inner`: the turns of others that it holds, in order.
        """
        stop = inner[0].start if inner else turn.stop
        if not text.startswith(self.header, turn.start, stop):
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
        self._template = structures.template
        self._prompt, self._prompts = structures.prompt, structures.prompts
        self._is_constant = structures.prompt_is_constant
        self._probe, self._rendering, self._text = probe, rendering, rendering.text
        self._owners = {mark: i for i, marks in enumerate(probe.marks) for mark in marks}
        self._usual_end = ""  # what follows the words of the last turn, which ends as its text does

    def all_edges(self) -> dict[int, _Edges | str]:
        """Edges of the assistant's turns, by their messages' numbers, or why they have none."""
        turns = _numbered(_assistants(self._rendering), self._probe.messages) or {}
        inner = _inner_turns(self._rendering.turns, turns)
        told: dict[int, _Edges | str] = {}
        for number in reversed(turns):  # the last one first: it tells how turns end
            try:
                told[number] = self._edges(number, turns[number], inner.get(number, []))
            except _DisagreementError as error:
                told[number] = str(error)
        return told

    def _edges(self, number: int, turn: Turn, inner: list[Turn]) -> _Edges:
        """Edges of the turn of message `number`. Raises _DisagreementError."""
        text, own = self._text, self._probe.marks[number]
        first = min((p for m in own if (p := text.find(m, turn.start, turn.stop)) >= 0),
                    default=turn.stop)  # fmt: skip
        last = max((p + len(m) for m in own if (p := text.rfind(m, turn.start, turn.stop)) >= 0),
                   default=-1)  # fmt: skip
        core = self._prompt.strip()
        if core and self._is_constant and text.startswith(self._prompt, turn.start):
            start: int | None = turn.start + len(self._prompt)
        else:
            start = self._start(number, turn, first)
        if start is None:
            start = self._after_prompt(turn, first)
        elif core and self._prompts and text.startswith(core, turn.start):
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
            stop = None if resumes else self._stop(number, start, until, header)
        if number + 1 == len(self._probe.messages) and stop == until == len(text):
            self._usual_end = end.strip() and end
        if stop is None:
            edges = _Edges(header, resumes=resumes)
        elif stop >= until:
            edges = _Edges(header, ending=text[until:stop])
        elif not text[stop:until].strip():
            edges = _Edges(header, tail=text[stop:until])
        else:
            raise _DisagreementError(
                f"by its turns it is {_shown(text, start, until)}, by prefixes of the conversation "
                f"{_shown(text, start, stop)}"
            )
        self._check(number, turn, edges.spans(text, turn, inner) or [])
        return edges

    def _start(self, number: int, turn: Turn, first: int) -> int | None:
        """Where the assistant begins by the prompt for the message, within its turn."""
        before = self._render(number, add_generation_prompt=True)
        if before is None:
            return None
        anchor = self._last_mark(before, number)
        here = self._place(anchor, first)
        if here is None:
            return None
        rest = before[before.rfind(anchor) + len(anchor) :] if anchor else before
        start = here + shared(rest, self._text[here:first])
        if not self._prompts and not self._text[turn.start : start].strip():
            return None  # a template that writes no prompts tells nothing
        if start < turn.start:
            return None
        if start - here == len(rest):
            return start
        # the prompt goes on differently: fine where something else gives the place, too
        told = start in (first, turn.start) or self._text[start:].lstrip().startswith(("<", "["))
        return start if told and (anchor or self._text[here:start].strip()) else None

    def _after_prompt(self, turn: Turn, first: int) -> int | None:
        """Where the assistant begins by the prompt for a first answer."""
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
        """Where the assistant ends, by the conversation up to and with the message.

        `until`: where it ends by its turn, which begins with `header`.
        """
        upto = self._render(number + 1)
        if upto is None:
            return None
        anchor, own = self._last_mark(upto, number + 1), self._probe.marks[number]
        if anchor not in own and any(mark in upto for mark in own):
            return None
        here = self._place(anchor, len(self._text) if anchor in own else start)
        if here is None:
            return None
        rests = [upto[upto.rfind(anchor) + len(anchor) :] if anchor else upto]
        if not self._prompts and header.strip():  # a prompt, though nobody asked for one
            rests = [rests[0].removesuffix(header)]
        if number + 1 == len(self._probe.messages):
            followed = self._render(number + 1, followed=True)
            if followed is not None and anchor and anchor in followed:
                rests.append(followed[followed.rfind(anchor) + len(anchor) :])
        same = min(shared(rest, self._text[here:]) for rest in rests)
        if anchor not in own and (same < len(rests[0]) and here + same < until):
            return None  # in an empty answer, end and beginning look alike
        begin = here if anchor in own else start
        if here + same < until and self._ends_alike(rests, same, here + same, until):
            return until
        if len(rests) > 1 and here + same == begin and not self._text[begin:until].strip():
            same = len(rests[0])  # the end of the text is the only end that the turn has
        # with nothing in common, the turn goes on otherwise than it ends
        return here + same if same and here + same >= start else None

    def _ends_alike(self, rests: list[str], shared: int, stop: int, until: int) -> bool:
        """Whether the turn, which goes on otherwise than the conversation up to the message from
        `stop` on, ends as that does in `until`, white space aside: `"id": 7}</call><end>` as
        `}</call><end>`.

        `rests`: what is compared, from where `shared` characters are the same: that conversation,
        and perhaps the same with another message behind.
        """
        ending = _unspaced(self._text[stop:until])
        end, *followed = (_unspaced(rest[shared:].partition(_FOLLOWING)[0]) for rest in rests)
        return bool(end) and ending.endswith(end) and all(ending in rest for rest in followed)

    def _check(self, number: int, turn: Turn, spans: list[Span]) -> None:
        """All words of the message that the text has are in the spans, and no others."""
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
        messages = self._probe.messages[:count]
        if count == len(self._probe.messages) and not (add_generation_prompt or followed):
            return self._text
        if followed:
            messages = [*messages, {"role": "user", "content": _FOLLOWING}]
        try:
            return self._template.render(
                messages, self._probe.tools, add_generation_prompt=add_generation_prompt
            ).text
        except RefusedError:
            return None

    def _last_mark(self, text: str, count: int) -> str:
        """The last mark in a text of `count` messages, "" for none."""
        last, at = "", -1
        for mark in chain.from_iterable(reversed(self._probe.marks[:count])):
            if (later := text.rfind(mark, at + 1)) >= 0:  # behind the last so far, which is short
                last, at = mark, later
        return last

    def _place(self, mark: str, limit: int) -> int | None:
        """Where the last such mark before `limit` ends in the whole text; 0 without a mark."""
        begin = self._text.rfind(mark, 0, limit) if mark else 0
        return None if begin < 0 else begin + len(mark)


def shared(a: str, b: str) -> int:
    """How many characters two texts have in common from their beginnings, no tag cut in two."""
    count = common_prefix(a, b)
    if count in (len(a), len(b)):
        return count
    tag = OPEN_TAG.search(a, 0, count)
    return tag.start() if tag else count


def common_prefix(a: str, b: str) -> int:
    """How many characters two texts have in common from their beginnings."""
    for i, (x, y) in enumerate(zip(a, b)):  # noqa: B905 up to the shorter one's end
        if x != y:
            return i
    return min(len(a), len(b))


def _unspaced(text: str) -> str:
    return "".join(text.split())


def _shown(text: str, start: int, stop: int) -> str:
    return repr(f"{text[max(0, start - 40) : start]}⟦{text[start:stop]}⟧{text[stop : stop + 40]}")


# -- The prompt for an answer


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
    prompt = prompted[common_prefix(plain, prompted) :]  # what ends a text may be left out of it
    if prompt.strip() or len(prompted) != len(plain):
        return prompt, True
    turns = _assistants(answered)
    if len(turns) != 1 or answered.text.count(PROBE) != 2:
        return "", False
    header = answered.text[turns[0].start : answered.text.rindex(PROBE)]
    return (header if header.strip() else ""), False
