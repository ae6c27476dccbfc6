"""Which characters of a rendered conversation the assistant wrote, end of turn included.

With `{% generation %}` in the template: what is inside the tags, as in transformers. Without,
as in most templates, the loop over the messages tells where each turn begins and ends; what the
template writes before the assistant may speak (the generation prompt) is not the assistant's.
Where the template keeps that from us, the conversation is rendered up to and without the turn,
and the texts are compared. Where that does not tell either, it is an error: never a guess.
"""

from __future__ import annotations

from typing import Any

from packer_cli.errors import DataError
from packer_cli.supervised.chat_template import ChatTemplate, RefusedError, Rendering, Turn
from packer_cli.supervised.messages import has_flags, is_trained

ASSISTANT = "assistant"
_PROBE = "\ue000probe\ue001"
_Span = tuple[int, int]


class UndecidableError(DataError):
    """It cannot be told which part of the text is the assistant's."""

    position = 0


class AssistantSpans:
    """Finds the assistant's spans in the renderings of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._prompt = "" if template.marks_generation else _generation_prompt(template)

    def find(
        self, rendering: Rendering, messages: list[dict[str, Any]], tools: list[Any] | None,
        *, last_only: bool,
    ) -> list[_Span]:  # fmt: skip
        """Spans of characters to train on, in order.

        Messages whose `weight` or `train` is 0 have none; `last_only`: only the last assistant
        message's. Raises UndecidableError.
        """
        speakers = [message for message in messages if message.get("role") == ASSISTANT]
        if not speakers:
            return []
        turns = [turn for turn in rendering.turns if turn.message.get("role") == ASSISTANT]
        if self._template.marks_generation:
            return self._chosen(rendering.generated, turns, speakers, last_only)
        spans = [self._without_prompt(rendering.text, turn) for turn in turns]
        if not turns or any(start < 0 for start, _ in spans) or _nested(rendering.turns):
            spans = self._by_prefixes(rendering.text, messages, tools)
            turns = [Turn(a, b, m) for (a, b), m in zip(spans, speakers, strict=True)]
        return self._chosen(spans, turns, speakers, last_only)

    def _chosen(
        self, spans: list[_Span], turns: list[Turn], speakers: list[dict[str, Any]], last_only: bool
    ) -> list[_Span]:
        """The spans, as far as their messages are to be trained on."""
        if last_only and turns:
            if _are_messages(turns, speakers) and turns[-1].message is not speakers[-1]:
                return []  # the template leaves out the last answer: nothing else takes its place
            begin = turns[-1].start
            spans = [span for span in spans if span[0] >= begin]
        elif last_only:
            if len(spans) != len(speakers):  # whose they are, nothing tells
                raise _undecidable("no loop of the template shows which of its tags are the last")
            spans = spans[-1:]
        if not any(has_flags(message) for message in speakers):
            return spans
        if all(is_trained(message) for message in speakers):
            return spans
        if not turns or not _are_messages(turns, speakers):
            raise _undecidable("messages have weights, and the template rearranges messages")
        silent = [turn for turn in turns if not is_trained(turn.message)]
        return [s for s in spans if not any(t.start <= s[0] < t.stop for t in silent)]

    def _without_prompt(self, text: str, turn: Turn) -> _Span:
        """The turn without the generation prompt before it; (-1, -1) when that is not there."""
        core = self._prompt.strip()
        if not core:
            return turn.start, turn.stop
        start = text.find(core, turn.start, turn.stop)
        if start < 0:
            return -1, -1
        start += len(core)
        # templates may end the prompt in more white space than the turn has there
        rest = self._prompt[len(self._prompt.rstrip()) :]
        while rest and text.startswith(rest[0], start):
            start, rest = start + 1, rest[1:]
        return start, turn.stop

    def _by_prefixes(
        self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> list[_Span]:
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != ASSISTANT:
                continue
            try:
                before = self._template.render(messages[:i], tools, add_generation_prompt=True).text
                after = self._template.render(messages[: i + 1], tools).text
            except RefusedError as error:
                raise _undecidable(str(error)) from error
            if not (text.startswith(before) and text.startswith(after)):
                raise _undecidable("the template renders messages differently later on")
            if len(before) >= len(after):
                raise _undecidable(f"message {i} leaves no trace")
            spans.append((len(before), len(after)))
        return spans


def _undecidable(why: str) -> UndecidableError:
    """Not a constructor of the class: that one must take what pickle gives it again."""
    return UndecidableError(
        f"the assistant's part of the text cannot be told: {why}",
        "use a template with {% generation %} tags (--chat-template), or --train-on all",
    )


def _nested(turns: list[Turn]) -> bool:
    """Whether a turn holds another one, and one of the two is the assistant's.

    As with results of tools that the template writes into the turn that called them.
    """
    outer = None
    for turn in sorted(turns, key=lambda turn: (turn.start, -turn.stop)):
        if outer is None or turn.start >= outer.stop:
            outer = turn
        elif ASSISTANT in (turn.message["role"], outer.message["role"]):
            return True
    return False


def _are_messages(turns: list[Turn], messages: list[dict[str, Any]]) -> bool:
    """Whether the template's turns are the messages themselves, not made of them."""
    known = {id(message) for message in messages}
    return all(id(turn.message) in known for turn in turns)


def _generation_prompt(template: ChatTemplate) -> str:
    """What the template writes before the assistant's own words, "" for nothing at all."""
    user = {"role": "user", "content": _PROBE}
    try:
        plain = template.render([user]).text
        prompted = template.render([user], add_generation_prompt=True).text
        answered = template.render([user, {"role": ASSISTANT, "content": _PROBE}])
    except RefusedError as error:
        raise _undecidable(f"the template refuses a question and its answer: {error}") from error
    shared = _common_prefix(plain, prompted)  # what ends a text may be left out of a prompt
    prompt = prompted[shared:]
    if prompt.strip() or len(prompted) != len(plain):
        return prompt
    turns = [turn for turn in answered.turns if turn.message.get("role") == ASSISTANT]
    if len(turns) != 1 or answered.text.count(_PROBE) != 2:
        return ""
    header = answered.text[turns[0].start : answered.text.rindex(_PROBE)]
    return header if header.strip() else ""


def _common_prefix(a: str, b: str) -> int:
    for i, (x, y) in enumerate(zip(a, b)):  # noqa: B905 up to the shorter one's end
        if x != y:
            return i
    return min(len(a), len(b))
