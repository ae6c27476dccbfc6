"""Conversations to documents: a text made by a chat template, and the spans to train on."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from packer_cli.chat.chat_template import ChatTemplate, Rendering
from packer_cli.chat.messages import (
    ASSISTANT,
    CONTEXT,
    KNOWN_KEYS,
    RANGES,
    VALUES,
    Conversation,
    RefusedError,
    UndecidableError,
    any_flags,
    is_trained,
    undecidable,
    without_notes,
)
from packer_cli.chat.parts import UntrainedParts, without
from packer_cli.chat.probe import Piece
from packer_cli.chat.syntax import reads_of
from packer_cli.chat.turns import (
    PROBE,
    Said,
    Span,
    Structures,
    Told,
    common_prefix,
    speakers,
)
from packer_cli.errors import UsageError
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import ARGUMENTS
from packer_cli.options.value_columns import MESSAGE

_MOST_KEPT = 256  # renderers, by arguments of records
_MOST_SHOWN = 40  # characters
_PARTS_PROBE = "\ue000part\ue001"
_ARGUMENTS_PROBE = {"a\ue000": "b"}


@dataclass(frozen=True)
class Document:
    """A text; `spans` of characters to train on, None for all of it.

    `conversation` is what the text was rendered from, where it was. `left_out`: what of the
    conversation the text does not show; `empty_turns`: turns of the assistant of which it shows
    nothing, and which are not trained on. `turns`: the characters of the assistant's turns that
    are trained on at least in part, None for `spans`; `masked`: what of the assistant is not
    trained on because of flags and options. `speakers`: the number of the message that each span is
    of, if messages have values.
    """

    text: str
    spans: list[Span] | None
    conversation: Conversation | None = None
    left_out: tuple[Piece, ...] = ()
    empty_turns: int = 0
    turns: list[Span] | None = None
    masked: Sequence[str] = ()
    speakers: Sequence[int] = ()


class Renderer:
    """Renders conversations through one template. Safe to share between threads."""

    def __init__(
        self, template: ChatTemplate, config: DocumentConfig, *, ends_matter: bool
    ) -> None:
        """`ends_matter`: whether the tokenizer has tokens that could end a turn.

        Raises UndecidableError for a template that renders no question and answer, UsageError for
        one whose turns have no end.
        """
        self._template, self._config, self._ends_matter = template, config, ends_matter
        self._others: dict[bytes, Renderer] = {}  # by arguments
        self._finds_turns = config.train_on != "all"
        self.structures = Structures(template, find_turns=self._finds_turns)
        self._trains_all = config.trains_all_parts
        self._has_values = any(one.of == MESSAGE for one in config.value_columns.values())
        self._parts = UntrainedParts(self.structures, config)
        self.keep_parts = _shows_parts(template)
        if self._finds_turns and ends_matter and not config.allow_open_turns:
            _refuse_open_turns(self.structures, config.turn_end)

    @property
    def source(self) -> str:
        """The chat template."""
        return self._template.source

    def with_arguments(self, arguments: dict[str, Any]) -> Renderer:
        """The renderer of this template with a record's own arguments. Raises RefusedError and
        UndecidableError.
        """
        try:
            key = msgspec.json.encode(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise RefusedError(f"{ARGUMENTS}: {error}") from None
        if key in self._others:
            return self._others[key]
        if wrong := reads_of(self._template.source).wrong_flag(arguments):
            raise RefusedError(f"{ARGUMENTS}.{wrong}")
        template = self._template.with_arguments(arguments)
        try:
            made = Renderer(template, self._config, ends_matter=self._ends_matter)
        except UsageError as error:
            raise RefusedError(f"with its {ARGUMENTS}: {error.message}") from error
        if len(self._others) >= _MOST_KEPT:
            self._others.clear()
        self._others[key] = made
        return made

    def render(self, conversation: Conversation) -> Document:
        """Raises RefusedError and UndecidableError."""
        conversation = self._with_arguments(conversation)
        noted, tools = conversation.messages, conversation.tools
        flagged = any_flags(noted)
        messages = list(map(without_notes, noted)) if flagged else noted
        try:
            rendering = self._template.render(messages, tools)
        except RefusedError:
            # many templates need content, which APIs leave out of messages with tool calls
            filled = [m if "content" in m else m | {"content": ""} for m in messages]
            if filled == messages:
                raise
            messages = filled
            rendering = self._template.render(messages, tools)
        told = self.structures.of(messages, tools)
        left_out, empty = self._missing(told, rendering.text, messages, tools)
        document = Document(rendering.text, None, conversation, left_out=left_out)
        if not self._finds_turns:
            return document
        all_own = own = speakers(noted)
        if conversation.turn is not None:
            own = own[-1:]
        asked = trained = set(own)
        if flagged:
            asked = {number for number in own if CONTEXT not in noted[number]}
            trained = {number for number in asked if is_trained(noted[number])}
        if len(trained) < len(own) and self.structures.rearranges(rendering, messages):
            raise undecidable(
                "messages have weights, or not all are trained on, and the template rearranges "
                "messages"
            )
        said = self.structures.find(
            rendering, messages, tools, told,
            whose=bool(empty) or len(trained) < len(all_own) or self._has_values,
        )  # fmt: skip
        spans_asked, spans = (
            [span for one in said if one.number < 0 or one.number in some for span in one.spans]
            for some in (asked.difference(empty), trained.difference(empty))
        )
        empty_turns = [
            n
            for n in empty
            if n in trained
            or (conversation.turn is None and is_trained(noted[n]) and CONTEXT not in noted[n])
        ]
        document = replace(document, spans=spans, empty_turns=len(empty_turns))
        begin = next((start for start, stop in spans if start < stop), 0)
        document = self._trimmed(document, spans_asked, rendering, messages, trained)
        if conversation.turn is None:
            return self._with_speakers(document, said) if self._has_values else document
        document = self._prompted(document, begin, messages, tools)
        return replace(document, speakers=[len(messages) - 1] * len(document.spans or []))

    @cached_property
    def _type_of_arguments(self) -> type | None:
        """What the arguments of calls must be, so that the template writes a JSON object or its own
        form of one: text, or an object, which others dump once more or write as Python does; None
        if it writes either, or neither.
        """
        given: list[Any] = [msgspec.json.encode(_ARGUMENTS_PROBE).decode(), _ARGUMENTS_PROBE]
        right = [type(one) for one in given if _shows_arguments(self._template, one)]
        return right[0] if len(right) == 1 else None

    def _with_arguments(self, conversation: Conversation) -> Conversation:
        """The conversation with the arguments of its calls as the template is to get them."""
        messages = conversation.messages
        if all(not one.get("tool_calls") for one in messages) or self._type_of_arguments is None:
            return conversation
        converted = [
            one | {"tool_calls": [_converted(call, self._type_of_arguments) for call in calls]}
            if (calls := one.get("tool_calls"))
            else one
            for one in messages
        ]
        return replace(conversation, messages=converted)

    def _with_speakers(self, document: Document, said: list[Said]) -> Document:
        """The document with the message of each of its spans, which are within what was said."""
        whole = sorted((span[0], one.number) for one in said for span in one.spans)
        begins = [begin for begin, _ in whole]
        places = [bisect_right(begins, start) - 1 for start, _ in document.spans or []]
        return replace(document, speakers=[whole[place][1] for place in places])

    def _trimmed(
        self, document: Document, asked: list[Span], rendering: Rendering,
        messages: list[dict[str, Any]], trained: set[int],
    ) -> Document:  # fmt: skip
        """The document with the ends of its turns, and without parts that are not trained on.

        `asked`: the spans that would be but for flags; `trained`: the numbers of messages that are.
        """
        conversation, text, turns = document.conversation, document.text, document.spans or []
        noted, tools = (conversation.messages, conversation.tools) if conversation else ([], None)
        is_whole = turns == asked
        if self._config.turn_end:
            text, turns = _ended(text, turns, self._config.turn_end)
        # an empty answer has no byte, but there may be a token across the place where it would be
        turns = spans = [(start, stop) for start, stop in turns if start < stop]
        if not self._trains_all or any(RANGES in noted[n] for n in trained):
            parts = self._parts.find(rendering, messages, tools, trained, noted)
            spans = without(spans, parts)
            turns = [turn for turn in turns if without([turn], spans) != [turn]]
            is_whole = is_whole and not parts
        masked = [] if is_whole else without(asked, spans)
        shown = [text[start:stop] for start, stop in masked]
        return replace(document, text=text, spans=spans, turns=turns, masked=shown)

    def _missing(
        self, told: Told, text: str, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        """What the text of a conversation leaves out, and which messages are empty without it."""
        missing, empty = told.learned.missing, told.learned.empty
        if not told.learned.refusal and not (told.words and empty):
            return missing, empty
        guessed, blank = self.structures.probe(messages, tools).guess(text, messages, tools)
        if told.learned.refusal:
            return guessed, blank
        shown = {*empty}.difference(blank)  # of the record, though not of its probe
        left_out = (one for one in missing if one.message not in shown)
        return tuple(left_out), tuple(number for number in empty if number not in shown)

    def _prompted(
        self, document: Document, begin: int, messages: list[dict[str, Any]],
        tools: list[Any] | None,
    ) -> Document:  # fmt: skip
        """A document of which only the last message is trained on, as the prompt for it and what
        follows it. `begin`: where its turn does, though that may not be trained on.

        Raises UndecidableError where the prompt ends otherwise than what is before it.
        """
        before, number = messages[:-1], len(messages) - 1
        if all(message.get("role") in ("system", "developer") for message in before):
            return replace(document, spans=[], turns=[])  # nobody has spoken: it answers nothing
        try:
            prompt = self._template.render(before, tools, add_generation_prompt=True).text
            plain = self._template.render(before, tools).text
        except RefusedError as error:
            raise undecidable(f"as a prompt for message {number}, {error}") from error
        text, end = document.text, prompt[common_prefix(plain, prompt) :].strip()
        if text.startswith(prompt):
            return _shifted(document, len(prompt), len(prompt))
        if not document.spans:
            return document
        end = end or _from_words(before[-1], prompt).strip()  # nothing asks for the answer
        if end and text[:begin].rstrip().endswith(end):
            told, _ = self._missing(self.structures.of(before, tools), plain, before, tools)
            own = [piece for piece in document.left_out if piece.message == number]
            whole = replace(document, text=prompt + text[begin:], left_out=(*told, *own))
            return _shifted(whole, begin, len(prompt))
        same = common_prefix(text, prompt)
        raise undecidable(
            f"the prompt for message {number} goes on in {prompt[same:][:_MOST_SHOWN]!r}, and "
            f"the text with the message in {text[same:][:_MOST_SHOWN]!r}",
            "use --turns all, or another --template-arg or --chat-template",
        )

    def unread(self, text: str, conversation: Conversation) -> list[str]:
        """Names of its fields that neither packer nor the template reads; each as often as it is
        there. `text`: made of it, which may hold whole messages as JSON.
        """
        source, names = self._template.source, list[str]()
        for message in conversation.messages:
            if not message.keys() <= KNOWN_KEYS:
                names += [
                    f"messages.{key}"
                    for key in message.keys()
                    - KNOWN_KEYS
                    - self.structures.mentions
                    - message.get(VALUES, {}).keys()
                    if f'"{key}"' not in text
                ]
        if conversation.arguments:
            unread = conversation.arguments.keys() - reads_of(source).names
            names += [f"{ARGUMENTS}.{name}" for name in unread]
        return names


def _shifted(document: Document, begin: int, now: int) -> Document:
    """Keep the spans from character `begin` on, which is at `now` in its text."""

    def moved(spans: Sequence[Span]) -> list[Span]:
        return [
            (max(start, begin) - begin + now, stop - begin + now)
            for start, stop in spans
            if stop > begin
        ]

    return replace(document, spans=moved(document.spans or []), turns=moved(document.turns or []))


def _from_words(message: dict[str, Any], text: str) -> str:
    """The end of a text, from the words of its last message on; "" where it has them not."""
    content = message.get("content")
    words = content.strip() if isinstance(content, str) else ""
    return text[text.rfind(words) :] if words and words in text else ""


def _ended(text: str, spans: list[Span], ends: tuple[str, ...]) -> tuple[str, list[Span]]:
    """Put the tokens that end turns into their spans, and after the last one if nothing follows."""
    ended = []
    for start, stop in spans:
        end = next((end for end in ends if text.startswith(end, stop)), "")
        if start < stop == len(text) and not text.endswith(ends):
            text, end = text + ends[0], ends[0]
        ended.append((start, stop + len(end) if start < stop else stop))
    return text, ended


def _refuse_open_turns(structures: Structures, ends: tuple[str, ...]) -> None:
    what = "the chat template does not end"
    tip = "name the token that ends it with --turn-end TOKEN, such as the one that begins the next"
    if ends:
        what = f"--turn-end: {' or '.join(ends)} does not follow"
        tip = "name the token that begins the next"
    if where := _open_turn(structures, ends):
        raise UsageError(
            f"{what} the assistant's turn, {where}: the model would not learn to stop",
            f"{tip} turn, or insist with --allow-open-turns",
        )


def _open_turn(structures: Structures, ends: tuple[str, ...]) -> str:
    """Where the template does not end a turn of the assistant, for people; "" for nowhere.

    Of templates with `{% generation %}` tags, "": the tags decide.
    """
    template, tools = structures.template, structures.tools
    for messages in ([*structures.talk, *structures.talk], structures.talk):
        talk = [dict(message) for message in messages]
        try:
            rendering, told = template.render(talk, tools), structures.of(talk, tools)
            said = structures.find(rendering, talk, tools, told)
        except (RefusedError, UndecidableError):
            continue
        text, spans = rendering.text, [span for one in said for span in one.spans]
        if ends:
            text, spans = _ended(text, spans, ends)
        turns = [text[start:stop].partition(PROBE) for start, stop in spans]
        for number, (_, mark, end) in enumerate(turns, 1):
            if mark and not end.strip():
                return "the last one" if number == len(turns) else "where another turn follows"
        return ""
    return ""


def _shows_parts(template: ChatTemplate) -> bool:
    """Whether the template writes content that is a list of parts, whoever speaks.

    Many write nothing then, or those of the user only.
    """
    parts = [{"type": "text", "text": _PARTS_PROBE}] * 2  # some show the first one only
    messages = [{"role": role, "content": parts} for role in ("user", ASSISTANT)]
    try:
        text = template.render(messages).text
    except RefusedError:
        return False
    return text.count(_PARTS_PROBE) == 4 and "'text'" not in text


def _shows_arguments(template: ChatTemplate, arguments: Any) -> bool:
    """Whether the template shows the arguments of a call, and neither dumps their text once more
    nor writes them as Python does.
    """
    function = {"name": "f", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    asked, answer = {"role": "user", "content": "?"}, {"role": ASSISTANT, "content": ""}
    try:
        text = template.render([asked, answer | {"tool_calls": [call]}]).text
    except RefusedError:
        return False
    (name,) = _ARGUMENTS_PROBE
    return name in text and f"'{name}'" not in text and f'\\"{name}' not in text


def _converted(call: dict[str, Any], kind: type) -> dict[str, Any]:
    """A call, or its function, whose arguments are of that type, if they can be."""
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _converted(function, kind)}
    arguments = call.get("arguments")
    if kind is str and isinstance(arguments, dict):
        return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    if kind is dict and isinstance(arguments, str):
        with suppress(msgspec.DecodeError):
            decoded = msgspec.json.decode(arguments)
            return call | {"arguments": decoded} if isinstance(decoded, dict) else call
    return call
