"""Conversations to documents: a text made by a chat template, and the spans to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packer_cli.config.documents import DocumentConfig
from packer_cli.errors import UsageError
from packer_cli.supervised.chat_template import ChatTemplate, RefusedError
from packer_cli.supervised.edges import Span
from packer_cli.supervised.messages import ASSISTANT
from packer_cli.supervised.turns import PROBE, AssistantSpans, UndecidableError

_PARTS_PROBE = "\ue000part\ue001"


@dataclass(frozen=True)
class Conversation:
    """A record as messages."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


@dataclass(frozen=True)
class Document:
    """A text; `spans` of characters to train on, None for all of it.

    `conversation` is what the text was rendered from, where it was. `controls`: the characters
    where special tokens are, None for wherever the tokenizer finds one.
    """

    text: str
    spans: list[Span] | None
    conversation: Conversation | None = None
    controls: list[Span] | None = None


class Renderer:
    """Renders conversations through one template. Safe to share between threads."""

    def __init__(
        self, template: ChatTemplate, config: DocumentConfig, *, ends_matter: bool
    ) -> None:
        """`ends_matter`: whether the tokenizer has tokens that could end a turn.

        Raises UndecidableError for a template that renders no question and answer, UsageError for
        one whose turns have no end.
        """
        self._template, self._config = template, config
        self._assistant = AssistantSpans(template) if config.train_on != "all" else None
        self.keep_parts = _shows_parts(template)
        self.notice = template.notice
        if self._assistant is not None and ends_matter and not config.allow_open_turns:
            _refuse_open_turns(template, self._assistant, config.turn_end)

    def render(self, conversation: Conversation) -> Document:
        """Raises RefusedError and UndecidableError."""
        messages, tools = conversation.messages, conversation.tools
        try:
            rendering = self._template.render(messages, tools)
        except RefusedError:
            # many templates need content, which APIs leave out of messages with tool calls
            filled = [m if "content" in m else m | {"content": ""} for m in messages]
            if filled == messages:
                raise
            messages = filled
            rendering = self._template.render(messages, tools)
        if self._assistant is None:
            return Document(rendering.text, None, conversation)
        last_only = self._config.train_on == "last-assistant"
        text = rendering.text
        spans = self._assistant.find(rendering, messages, tools, last_only=last_only)
        if self._config.turn_end:
            text, spans = _ended(text, spans, self._config.turn_end)
        # an empty answer has no byte, but there may be a token across the place where it would be
        spans = [(start, stop) for start, stop in spans if start < stop]
        return Document(text, spans, conversation)

    def leaves_out_tools(self, conversation: Conversation) -> bool:
        """Whether the conversation has tools or tool calls that the template never looks at."""
        if conversation.tools and "tools" not in self._template.source:
            return True
        if "tool_calls" in self._template.source:
            return False
        return any(message.get("tool_calls") for message in conversation.messages)


def _ended(text: str, spans: list[Span], ends: tuple[str, ...]) -> tuple[str, list[Span]]:
    """With the tokens that end turns in their spans, and after the last one if nothing follows."""
    ended = []
    for start, stop in spans:
        end = next((end for end in ends if text.startswith(end, stop)), "")
        if start < stop == len(text) and not text.endswith(ends):
            text, end = text + ends[0], ends[0]
        ended.append((start, stop + len(end) if start < stop else stop))
    return text, ended


def _refuse_open_turns(
    template: ChatTemplate, assistant: AssistantSpans, ends: tuple[str, ...]
) -> None:
    where = _open_turn(template, assistant, ends)
    if where and ends:
        raise UsageError(
            f"--turn-end: {' or '.join(ends)} does not follow the assistant's turn, {where}: the "
            "model would not learn to stop",
            "name the token that begins the next turn, or insist with --allow-open-turns",
        )
    if where:
        raise UsageError(
            f"the chat template does not end the assistant's turn, {where}: the model would "
            "not learn to stop",
            "name the token that ends it with --turn-end TOKEN, such as the one that begins the "
            "next turn, or insist with --allow-open-turns",
        )


def _open_turn(template: ChatTemplate, assistant: AssistantSpans, ends: tuple[str, ...]) -> str:
    """Where the template does not end a turn of the assistant, for people; "" for nowhere.

    Of templates with `{% generation %}` tags, "": the tags decide.
    """
    for messages in ([*assistant.talk, *assistant.talk], list(assistant.talk)):
        talk = [dict(message) for message in messages]
        try:
            rendering = template.render(talk)
            spans = assistant.find(rendering, talk, None, last_only=False)
        except (RefusedError, UndecidableError):
            continue
        text, spans = _ended(rendering.text, spans, ends) if ends else (rendering.text, spans)
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
