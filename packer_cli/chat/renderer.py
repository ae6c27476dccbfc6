"""Render conversations to documents: the text of a chat template, and the spans to train on.

It costs one rendering for most conversations, and some more, once, for each of their structures.
"""

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
from packer_cli.chat.probe import Piece, probe_of
from packer_cli.chat.syntax import reads_of
from packer_cli.chat.turns import (
    PROBE,
    AssistantSpan,
    Span,
    Structures,
    TemplateBehavior,
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
    """A text, and what to train on.

    spans         (start, stop) of characters to train on; None for all of them
    conversation  that the text was rendered from; None if no template was used
    left_out      pieces of the conversation that the text does not show
    empty_turns   number of the assistant's turns that the text does not show, so they are not
                  trained on
    turns         (start, stop) of the assistant's turns that are trained on at least in part; None
                  for `spans`
    masked        texts of the assistant that are not trained on because of flags and options
    speakers      for each span, the number of its message; empty unless messages have values
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
    """Renders conversations through one template."""

    def __init__(
        self, template: ChatTemplate, config: DocumentConfig, *, ends_matter: bool
    ) -> None:
        """`ends_matter`: whether the tokenizer has tokens that could end a turn.

        Raises UndecidableError if the template renders no question with its answer, UsageError if
        its turns have no end.
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
        """Return the renderer for a record's own arguments. Raises RefusedError."""
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
            renderer = Renderer(template, self._config, ends_matter=self._ends_matter)
        except UsageError as error:
            raise RefusedError(f"with its {ARGUMENTS}: {error.message}") from error
        if len(self._others) >= _MOST_KEPT:
            self._others.clear()
        self._others[key] = renderer
        return renderer

    def render(self, conversation: Conversation) -> Document:
        """Raises RefusedError and UndecidableError."""
        conversation = shown = self._with_arguments(conversation)
        noted = conversation.messages
        if flagged := any_flags(noted):
            shown = replace(conversation, messages=list(map(without_notes, noted)))
        try:
            rendering = self._template.render(shown)
        except RefusedError:
            # many templates need content, which APIs leave out of messages with tool calls
            filled = [m if "content" in m else m | {"content": ""} for m in shown.messages]
            if filled == shown.messages:
                raise
            shown = replace(shown, messages=filled)
            rendering = self._template.render(shown)
        behavior = self.structures.of(shown)
        left_out, empty = self._missing(behavior, rendering.text, shown)
        document = Document(rendering.text, None, conversation, left_out=left_out)
        if not self._finds_turns:
            return document
        every = numbers = speakers(noted)
        if conversation.turn is not None:
            numbers = numbers[-1:]
        chosen = trained = set(numbers)
        if flagged:
            chosen = {number for number in numbers if CONTEXT not in noted[number]}
            trained = {number for number in chosen if is_trained(noted[number])}
        if len(trained) < len(numbers) and self.structures.rearranges(rendering, shown.messages):
            raise undecidable(
                "messages have weights, or not all are trained on, and the template rearranges "
                "messages"
            )
        written = self.structures.find(
            rendering, shown, behavior,
            by_message=bool(empty) or len(trained) < len(every) or self._has_values,
        )  # fmt: skip
        chosen_spans, spans = (
            [span for number, spans in written if number < 0 or number in kept for span in spans]
            for kept in (chosen.difference(empty), trained.difference(empty))
        )
        empty_turns = [
            n
            for n in empty
            if n in trained
            or (conversation.turn is None and is_trained(noted[n]) and CONTEXT not in noted[n])
        ]
        document = replace(document, spans=spans, empty_turns=len(empty_turns))
        begin = next((start for start, stop in spans if start < stop), 0)
        document = self._trimmed(document, chosen_spans, rendering, shown, trained)
        if conversation.turn is None:
            return self._with_speakers(document, written) if self._has_values else document
        document = self._prompted(document, begin, shown)
        return replace(document, speakers=[len(noted) - 1] * len(document.spans or []))

    @cached_property
    def _type_of_arguments(self) -> type | None:
        """The type of calls' arguments, str or dict, of which the template writes a JSON object or
        its own form of one; None if it takes both, or neither. Other templates dump texts once
        more, or write objects as Python does.
        """
        arguments: list[Any] = [msgspec.json.encode(_ARGUMENTS_PROBE).decode(), _ARGUMENTS_PROBE]
        types = [type(value) for value in arguments if _shows_arguments(self._template, value)]
        return types[0] if len(types) == 1 else None

    def _with_arguments(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the arguments of its calls as the template takes them."""
        messages = conversation.messages
        if not any(m.get("tool_calls") for m in messages) or self._type_of_arguments is None:
            return conversation
        converted = [
            message | {"tool_calls": [_converted(call, self._type_of_arguments) for call in calls]}
            if (calls := message.get("tool_calls"))
            else message
            for message in messages
        ]
        return replace(conversation, messages=converted)

    def _with_speakers(self, document: Document, written: list[AssistantSpan]) -> Document:
        """Return the document with the message of each of its spans, which lie within `written`."""
        whole = sorted((span[0], number) for number, spans in written for span in spans)
        begins = [begin for begin, _ in whole]
        places = [bisect_right(begins, start) - 1 for start, _ in document.spans or []]
        return replace(document, speakers=[whole[place][1] for place in places])

    def _trimmed(
        self, document: Document, chosen: list[Span], rendering: Rendering, shown: Conversation,
        trained: set[int],
    ) -> Document:  # fmt: skip
        """Return the document with the ends of its turns, and without parts that are not trained
        on.

        chosen   spans that are trained on, flags aside
        shown    the conversation as the template got it
        trained  numbers of the messages that are trained on
        """
        text, turns = document.text, document.spans or []
        noted = document.conversation.messages if document.conversation else []
        is_whole = turns == chosen
        if self._config.turn_end:
            text, turns = _ended(text, turns, self._config.turn_end)
        # an empty answer has no byte, but there may be a token across the place where it would be
        turns = spans = [(start, stop) for start, stop in turns if start < stop]
        if not self._trains_all or any(RANGES in noted[n] for n in trained):
            parts = self._parts.find(rendering, shown, trained, noted)
            spans = without(spans, parts)
            turns = [turn for turn in turns if without([turn], spans) != [turn]]
            is_whole = is_whole and not parts
        masked = [] if is_whole else without(chosen, spans)
        texts = [text[start:stop] for start, stop in masked]
        return replace(document, text=text, spans=spans, turns=turns, masked=texts)

    def _missing(
        self, behavior: TemplateBehavior, text: str, conversation: Conversation
    ) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        """Return what the text leaves out, and the numbers of messages that it does not show."""
        missing, empty = behavior.missing, behavior.empty
        if not behavior.refusal and not (behavior.words and empty):
            return missing, empty
        guessed, blank = probe_of(conversation).guess(text, conversation)
        if behavior.refusal:
            return guessed, blank
        shown = {*empty}.difference(blank)  # by the record, though not by its probe
        left_out = (piece for piece in missing if piece.message not in shown)
        return tuple(left_out), tuple(number for number in empty if number not in shown)

    def _prompted(self, document: Document, begin: int, shown: Conversation) -> Document:
        """Return a document that trains on its last message only: the prompt for it, and its turn,
        which begins at `begin`, though that may not be trained on.

        Raises UndecidableError if the prompt ends in another way than the text before the turn.
        """
        number = len(shown.messages) - 1
        before = shown.first(number)
        if all(message.get("role") in ("system", "developer") for message in before.messages):
            return replace(document, spans=[], turns=[])  # it answers nothing
        try:
            prompt = self._template.render(before, add_generation_prompt=True).text
            plain = self._template.render(before).text
        except RefusedError as error:
            raise undecidable(f"as a prompt for message {number}, {error}") from error
        text, end = document.text, prompt[common_prefix(plain, prompt) :].strip()
        if text.startswith(prompt):
            return _shifted(document, len(prompt), len(prompt))
        if not document.spans:
            return document
        end = end or _from_words(before.messages[-1], prompt).strip()  # nothing asks for the answer
        if end and text[:begin].rstrip().endswith(end):
            missing, _ = self._missing(self.structures.of(before), plain, before)
            last = [piece for piece in document.left_out if piece.message == number]
            whole = replace(document, text=prompt + text[begin:], left_out=(*missing, *last))
            return _shifted(whole, begin, len(prompt))
        same = common_prefix(text, prompt)
        raise undecidable(
            f"the prompt for message {number} goes on in {prompt[same:][:_MOST_SHOWN]!r}, and "
            f"the text with the message in {text[same:][:_MOST_SHOWN]!r}",
            "use --turns all, or another --template-arg or --chat-template",
        )

    def unread(self, text: str, conversation: Conversation) -> list[str]:
        """Return the names of fields that neither packer nor the template reads, each as often as
        the conversation has it. `text`: its rendering, which may hold whole messages as JSON.
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
    """Keep the spans from character `begin` on, which is character `now` of the text."""

    def moved(spans: Sequence[Span]) -> list[Span]:
        return [
            (max(start, begin) - begin + now, stop - begin + now)
            for start, stop in spans
            if stop > begin
        ]

    return replace(document, spans=moved(document.spans or []), turns=moved(document.turns or []))


def _from_words(message: dict[str, Any], text: str) -> str:
    """The end of a text, from the words of its last message on; "" if it does not have them."""
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
    """Describe the turn of the assistant that the template does not end; "" if there is none."""
    for times in (2, 1):
        messages = [dict(message) for message in structures.talk.messages * times]
        talk = replace(structures.talk, messages=messages)
        try:
            rendering = structures.template.render(talk)
            written = structures.find(rendering, talk, structures.of(talk))
        except (RefusedError, UndecidableError):
            continue
        text, spans = rendering.text, [span for _, spans in written for span in spans]
        if ends:
            text, spans = _ended(text, spans, ends)
        turns = [text[start:stop].partition(PROBE) for start, stop in spans]
        for number, (_, mark, end) in enumerate(turns, 1):
            if mark and not end.strip():
                return "the last one" if number == len(turns) else "where another turn follows"
        return ""
    return ""


def _shows_parts(template: ChatTemplate) -> bool:
    """Tell whether the template writes content that is a list of parts, for all roles."""
    parts = [{"type": "text", "text": _PARTS_PROBE}] * 2  # some show the first one only
    messages = [{"role": role, "content": parts} for role in ("user", ASSISTANT)]
    try:
        text = template.render(Conversation(messages)).text
    except RefusedError:
        return False
    return text.count(_PARTS_PROBE) == 4 and "'text'" not in text


def _shows_arguments(template: ChatTemplate, arguments: Any) -> bool:
    """Tell whether the template writes the arguments of a call as an object."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    asked, answer = {"role": "user", "content": "?"}, {"role": ASSISTANT, "content": ""}
    try:
        messages: list[dict[str, Any]] = [asked, answer | {"tool_calls": [call]}]
        text = template.render(Conversation(messages)).text
    except RefusedError:
        return False
    (name,) = _ARGUMENTS_PROBE
    return name in text and f"'{name}'" not in text and f'\\"{name}' not in text


def _converted(call: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return a call, or its function, with arguments of that type, if they can be."""
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
