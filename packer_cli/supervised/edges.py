"""Where in a turn of the assistant its own words begin and end, learned from a probe.

The marks in the template's loops give the turn. It is compared with another rule, that of
prefixes, message by message: the end of a prompt for the message is not the assistant's, and the
end of the conversation up to and with the message is. Only what follows the last mark before
is compared, so that a template may render earlier turns in another way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from typing import Any

from packer_cli.supervised.chat_template import ChatTemplate, RefusedError, Rendering, Turn
from packer_cli.supervised.probes import Probe

Span = tuple[int, int]
OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_FOLLOWING = "7999994951"


class DisagreementError(Exception):
    """The two rules disagree, or the template mixes words of several speakers."""


@dataclass(frozen=True)
class Edges:
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


class Learner:
    """Learns the edges of the turns of one probe."""

    def __init__(
        self, template: ChatTemplate, prompt: str, prompts: bool, probe: Probe,
        tools: list[Any] | None, rendering: Rendering,
    ) -> None:  # fmt: skip
        """`prompt`: what the template writes before a first answer; `prompts`: if asked to."""
        self._template, self._prompt, self._prompts = template, prompt, prompts
        self._tools = tools
        self._probe, self._text = probe, rendering.text
        self._owners = {mark: i for i, marks in enumerate(probe.marks) for mark in marks}
        self._usual_end = ""  # what follows the words of the last turn, which ends as its text does

    def edges(self, number: int, turn: Turn, inner: list[Turn]) -> Edges | None:
        """Those of message `number`; None when nothing tells where its words begin.

        Raises DisagreementError.
        """
        text, own = self._text, self._probe.marks[number]
        first = min((p for m in own if (p := text.find(m, turn.start, turn.stop)) >= 0),
                    default=turn.stop)  # fmt: skip
        last = max((p + len(m) for m in own if (p := text.rfind(m, turn.start, turn.stop)) >= 0),
                   default=-1)  # fmt: skip
        core = self._prompt.strip()
        if core and self._template.prompt_is_constant and text.startswith(self._prompt, turn.start):
            start: int | None = turn.start + len(self._prompt)
        else:
            start = self._start(number, turn, first)
        if start is None:
            start = self._after_prompt(turn, first)
        elif core and self._prompts and text.startswith(core, turn.start):
            # though no prompt for this message shows it
            start = max(start, self._after_prompt(turn, first) or start)
        if start is None:
            return None
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
            edges = Edges(header, resumes=resumes)
        elif stop >= until:
            edges = Edges(header, ending=text[until:stop])
        elif not text[stop:until].strip():
            edges = Edges(header, tail=text[stop:until])
        else:
            raise DisagreementError(
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
        here = self._place(anchor, first) if anchor else 0
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
        start = self._text.find(core, turn.start, first)
        if not core:
            return turn.start
        if start < 0:  # it may begin like that
            begins = shared(self._prompt.lstrip(), self._text[turn.start : first])
            return (
                turn.start + begins
                if self._text[turn.start : turn.start + begins].strip()
                else None
            )
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
        anchor = self._last_mark(upto, number + 1)
        own = self._probe.marks[number]
        if anchor not in own and any(mark in upto for mark in own):
            return None
        limit = len(self._text) if anchor in own else start
        here = self._place(anchor, limit) if anchor else 0
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
        own = self._probe.marks[number]
        shown = self._probe.shown_in(inside).difference(own)
        if others := [self._owners[mark] for mark in shown if mark in self._owners]:
            role = self._probe.messages[min(others)].get("role")
            raise DisagreementError(
                f"its turn holds words of another message, of role {role}: {inside!r}"
            )
        whole = self._text[turn.start : turn.stop]
        if any(mark in whole and mark not in inside for mark in own):
            raise DisagreementError(f"its turn {whole!r} has words of its own outside {inside!r}")

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
                messages, self._tools, add_generation_prompt=add_generation_prompt
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
        """Where the last such mark before `limit` ends in the whole text."""
        begin = self._text.rfind(mark, 0, limit)
        return None if begin < 0 else begin + len(mark)


def shared(a: str, b: str) -> int:
    """How many characters two texts have in common from their beginnings, no tag cut in two."""
    count = common_prefix(a, b)
    if count in (len(a), len(b)):
        return count
    tag = OPEN_TAG.search(a, 0, count)
    return tag.start() if tag else count


def _unspaced(text: str) -> str:
    return "".join(text.split())


def common_prefix(a: str, b: str) -> int:
    for i, (x, y) in enumerate(zip(a, b)):  # noqa: B905 up to the shorter one's end
        if x != y:
            return i
    return min(len(a), len(b))


def _shown(text: str, start: int, stop: int) -> str:
    return repr(f"{text[max(0, start - 40) : start]}⟦{text[start:stop]}⟧{text[stop : stop + 40]}")
