"""Records to documents: one text each, and the spans of it that are trained on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from packer_cli.chat import limits
from packer_cli.chat.chat_template import ChatTemplate
from packer_cli.chat.messages import (
    ASSISTANT,
    OF_TRAINING,
    REASONING,
    VALUES,
    Conversation,
    MalformedError,
    Naming,
    RefusedError,
    UndecidableError,
    conversation_of,
    joined_content,
    texts_of,
    with_context,
    with_noted,
)
from packer_cli.chat.probe import kind_of_piece, summed, words_of
from packer_cli.chat.renderer import Document, Renderer
from packer_cli.chat.templates import TemplateChoice
from packer_cli.chat.turns import speakers
from packer_cli.errors import InternalError, named
from packer_cli.inputs.record_columns import value_of
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import PackConfig
from packer_cli.options.shape_rules import is_known_value, known_texts
from packer_cli.options.shapes import ARGUMENTS, Shape, Suggested, roles_for, tool_roles_in
from packer_cli.options.value_columns import MESSAGE, ValueColumn
from packer_cli.records import (
    MOST_TURNS,
    BadRecord,
    Columns,
    Int32,
    Int64,
    OmittedContent,
    Records,
    Texts,
    TrainedSpans,
    offsets_of,
    turn_position,
)
from packer_cli.result.columns import default_of
from packer_cli.tokenization.locate import NO_SPECIALS, SPELLED_OUT_TIP, Specials, spelled_out

FIX = "fix the record, or use --on-error skip"
_NESTED = "fields of the record are nested too deeply"
UNSHOWN_TIP = "use a --chat-template that shows it, or --on-unshown warn"
_MOST_SHOWN = 60  # characters
_Message = dict[str, Any]


class _ContentError(ValueError):
    """The content of a record spells out a special token, or the template leaves out some of it."""

    def __init__(self, message: str, tip: str) -> None:
        super().__init__(message)
        self.tip = tip


# why a record is bad
_REASONS = (_ContentError, MalformedError, RefusedError, UndecidableError, RecursionError)


class Composer:
    """Maker of documents from records.

    A chat template needs a worker, which can be stopped: it renders within the limits.
    """

    def __init__(
        self,
        shape: Shape,
        config: DocumentConfig,
        template: TemplateChoice | None,
        special_tokens: dict[str, Any],
        end_tokens: tuple[str, ...],
        specials: Specials = NO_SPECIALS,
    ) -> None:
        """Set up the composer.

        template    None if no template makes the texts
        end_tokens  contents of the tokens that can end a turn

        Raises InternalError for a value of --train-on that is declared, but not handled.
        """
        if config.train_on != "all":
            _answers([], config.train_on)  # an error for a value that it does not know
        kept = tool_roles_in(" ".join(template.sources)) if template else []
        self._config = replace(config, roles=(*((name, name) for name in kept), *config.roles))
        self._shape, self._template, self._specials = shape, template, specials
        self._special_tokens, self._end_tokens = special_tokens, end_tokens

    @cached_property
    def _renderers(self) -> tuple[Renderer, ...]:
        """Renderers for conversations, made in a worker; the last one is for those with tools."""
        if self._template is None:
            return ()
        limits.begin_template()
        return tuple(
            Renderer(
                ChatTemplate(source, self._special_tokens, self._config.arguments),
                self._config,
                ends_matter=bool(self._end_tokens),
            )
            for source in self._template.sources
        )

    def compose(self, records: Records) -> Records:
        """Return the records with texts and spans instead of fields; bad ones join `bad`."""
        if self._template is None:
            return self._composed(records)
        with limits.limited():
            _ = self._renderers
            return self._composed(records)

    def render(self, conversation: Conversation) -> Document:
        """Render messages through the chat template. Raises RefusedError and UndecidableError."""
        with limits.limited():
            _ = self._renderers
            limits.begin_record()
            return self._rendered(conversation)

    def _composed(self, records: Records) -> Records:
        documents, positions = list[Document](), list[int]()
        bad, specials, unread = list(records.bad), 0, dict[str, int]()
        naming = Naming(self._config.message_keys, dict(self._config.roles))
        texts, numbers = known_texts(self._shape, self._config), list[int]()
        of_messages = message_columns(self._config)
        names = [column.name for column in of_messages]
        values = [values_of_messages(Document("", []), of_messages)]
        for number, record in enumerate(records.fields or []):
            position = int(records.positions[number])
            try:
                fields = _named(record, naming, texts)
                if names:
                    fields = {name: with_noted(value, names) for name, value in fields.items()}
                if self._template is not None:
                    limits.begin_record()
                parsed = self._parsed(fields)
                spelled = self._spelled(parsed)
                specials += len(spelled)
                if spelled and self._specials.policy == "error":
                    raise _ContentError(spelled_out(spelled[0]), SPELLED_OUT_TIP)
                parts = self._documents(parsed)
                if parts[-1].left_out and self._config.on_unshown == "error":
                    raise _ContentError(_unshown_text(parts[-1]), UNSHOWN_TIP)
                self._count_unread(fields, parts[-1], unread)
                part_values = [
                    values_of_messages(document, of_messages) for document in parts if names
                ]
            except _REASONS as error:
                tip = getattr(error, "tip", "") or FIX
                is_deep = isinstance(error, RecursionError)
                bad.append(BadRecord(position, _NESTED if is_deep else str(error), tip))
                continue
            documents += parts
            values += part_values
            numbers += [number] * len(parts)
            positions += [position] * len(parts)
        if self._config.turns == "each":
            conversations = [document.conversation for document in documents]
            turns = [talk.turn or 0 if talk else 0 for talk in conversations]
            positions = list(map(turn_position, positions, turns))
        keeps = isinstance(self._config, PackConfig) and self._config.overlong == "truncate-turns"
        return replace(
            records,
            positions=np.array(positions, np.int64),
            fields=None,
            texts=Texts.of([document.text for document in documents]),
            spans=byte_spans(documents, _end_to_end(values)),
            columns={name: column[numbers] for name, column in records.columns.items()},
            turns=_turn_counts(documents, (*self._end_tokens, *self._config.turn_end)),
            specials=specials,
            unshown=[
                part for i, document in enumerate(documents) for part in _left_out(i, document)
            ],
            empty_turns=sum(document.empty_turns for document in documents),
            masked=[(i, text) for i, document in enumerate(documents) for text in document.masked],
            unread=unread,
            conversations=[document.conversation for document in documents] if keeps else None,
            bad=sorted(bad, key=lambda record: record.position),
        )

    def _parsed(self, fields: dict[str, Any]) -> Conversation | Document:
        """Return a record as messages, or as a text. Raises MalformedError."""
        template = self._config.prompt_template or ""
        conversation = conversation_of(
            fields, self._shape, template,
            lambda tools, arguments: self._renderer(tools, arguments).keep_parts,
        )  # fmt: skip
        if conversation is not None:
            return conversation
        prompt, answer = texts_of(fields, self._shape, template)
        text = prompt + answer
        spans = None if self._config.train_on == "all" else [(len(prompt), len(text))]
        return Document(text, spans)

    def _spelled(self, parsed: Conversation | Document) -> list[Any]:
        """Find special tokens in a record, also across the parts of its content."""
        if isinstance(parsed, Document):
            is_possible = self._specials.may_be_in(parsed.text)
            return self._specials.in_record(parsed.text) if is_possible else []
        in_parts = any(type(message.get("content")) is list for message in parsed.messages)
        given: Any = (parsed.messages, parsed.tools, parsed.arguments)
        if self._specials.may_be_in(_content(parsed) if in_parts else given):
            return self._specials.in_record(_content(parsed))
        return []

    def _documents(self, parsed: Conversation | Document) -> list[Document]:
        """Make at least one document of a record. Raises RefusedError and UndecidableError."""
        if isinstance(parsed, Document):
            return [parsed]
        config = self._config
        if config.train_on != "all":
            if not (answers := speakers(parsed.messages)):
                self._refuse_unknown(parsed)
            chosen = _answers(parsed.messages, config.train_on)
            if config.turns == "each" and chosen:
                return _joined([self._rendered(part) for part in _up_to_each(parsed, chosen)])
            if chosen != answers:
                parsed = replace(parsed, messages=with_context(parsed.messages, chosen))
        return [self._rendered(parsed)]

    def _refuse_unknown(self, conversation: Conversation) -> None:
        """Raise MalformedError if an unknown speaker may be the assistant."""
        source = self._renderer(conversation.tools, None).source
        roles = roles_for([message.get("role") for message in conversation.messages], source)
        if roles:
            raise MalformedError(
                f"no message is the assistant's; unknown speakers: {named(roles)}",
                f"say who speaks: {Suggested({}, roles)}",
            )

    def _rendered(self, conversation: Conversation) -> Document:
        """Raises RefusedError and UndecidableError."""
        renderer = self._renderer(conversation.tools, conversation.arguments)
        return renderer.render(conversation)

    def _renderer(self, tools: list[Any] | None, arguments: dict[str, Any] | None) -> Renderer:
        """Choose as transformers does: another template may be for conversations with tools."""
        renderer = self._renderers[-1 if tools else 0]
        return renderer.with_arguments(arguments) if arguments else renderer

    def _count_unread(
        self, fields: dict[str, Any], document: Document, unread: dict[str, int]
    ) -> None:
        """Count fields of the record that neither packer nor the template reads. INOUT unread."""
        conversation = document.conversation
        if conversation is not None:
            renderer = self._renderer(conversation.tools, conversation.arguments)
            names = renderer.unread(document.text, conversation)
            thought = fields.get(REASONING[-1])
            if thought and all(thought != m.get(REASONING[0]) for m in conversation.messages):
                names.append(self._shape.columns[REASONING[-1]])
        else:
            names = [ARGUMENTS] if fields.get(ARGUMENTS) else []
        for name in names:
            unread[name] = unread.get(name, 0) + 1


# -- A record's own content


def _named(fields: dict[str, Any], naming: Naming, texts: Collection[str]) -> dict[str, Any]:
    """Return a record with packer's names; fields in `texts` are ignored if they are not texts."""
    if naming.keys or naming.roles:
        fields = naming.applied(fields)
    for name in texts:
        if fields.get(name) is not None and not is_known_value(name, fields[name]):
            fields = {**fields, name: None}
    return fields


def _content(conversation: Conversation) -> list[Any]:
    """Return a record's content, without the second names that parsing gives to parts of it."""
    messages = map(_without_second_names, conversation.messages)
    return [*messages, conversation.tools, conversation.arguments]


def _without_second_names(message: _Message) -> _Message:
    calls = message.get("tool_calls") or [{}]
    message = message | {"content": joined_content(message.get("content"))}
    first = {
        **dict.fromkeys(REASONING[1:], message.get("reasoning_content")),
        "function_call": calls[0].get("function"),
    }
    return {k: v for k, v in message.items() if k not in first or v != first[k]}


# -- `--turns each`: a document for each answer, with all that comes before it as its prompt.
# So every answer is rendered as the last one, after the same text as when it is asked for, whatever
# a template leaves out of earlier turns.


def _answers(messages: list[_Message], train_on: str | None) -> list[int]:
    """Return the numbers of the messages that --train-on chooses, in order."""
    answers = speakers(messages)
    match train_on:
        case "assistant" | "completion":
            return answers
        case "last-assistant":
            return answers[-1:]
        case "final":  # those that call no tool, and after which the assistant does not go on
            roles = [message.get("role") for message in messages] + [None]
            return [
                n
                for n in answers
                if not messages[n].get("tool_calls") and roles[n + 1] not in (ASSISTANT, "tool")
            ]
    raise InternalError(f"--train-on {train_on}: nothing says which answers it chooses")


def _up_to_each(conversation: Conversation, chosen: list[int]) -> list[Conversation]:
    """Return the conversations up to each of these answers. Raises MalformedError."""
    messages, answers = conversation.messages, speakers(conversation.messages)
    if len(answers) > MOST_TURNS:
        raise MalformedError(
            f"has {len(answers):,} messages of the assistant; --turns each takes {MOST_TURNS:,}"
        )
    context = [
        {key: value for key, value in message.items() if key not in OF_TRAINING}
        for message in messages
    ]
    return [
        replace(conversation, messages=[*context[:number], messages[number]], turn=turn)
        for turn, number in enumerate(answers)
        if number in chosen
    ]


def _joined(documents: list[Document]) -> list[Document]:
    """Return the documents of a record, the last one with what the record leaves out: pieces that
    all documents leave out that could show them.
    """
    omitted = [set(document.left_out) for document in documents]
    sizes = [len(d.conversation.messages) if d.conversation else 0 for d in documents]
    left_out = dict.fromkeys(
        piece
        for document in documents
        for piece in document.left_out
        if all(
            piece in pieces
            for pieces, size in zip(omitted, sizes, strict=True)
            if size > piece.message
        )
    )
    last = replace(documents[-1], left_out=tuple(sorted(left_out, key=lambda p: p.message)))
    return [*(replace(document, left_out=()) for document in documents[:-1]), last]


# -- What documents hold


def _left_out(number: int, document: Document) -> list[OmittedContent]:
    """Add up what the text of a document does not show; `number`: of the document in its batch."""
    conversation = document.conversation
    if conversation is None or not document.left_out:
        return []
    return summed(number, document.left_out, conversation)


def _unshown_text(document: Document) -> str:
    """Describe the first piece that the text does not show."""
    conversation, piece = document.conversation, document.left_out[0]
    if conversation is None or piece.message < 0:
        return "the chat template does not show its tools"
    what = kind_of_piece(piece, conversation.messages).replace("_", " ")
    words = " ".join(words_of(piece, conversation).split())
    shown = words if len(words) <= _MOST_SHOWN else f"{words[:_MOST_SHOWN]}…"
    return f"the chat template does not show the {what} of message {piece.message}: {shown!r}"


def _turn_counts(documents: list[Document], end_tokens: tuple[str, ...]) -> Int32:
    """Count trained turns, and those without an end token, by document: int32[n, 2]."""
    counts = np.zeros((len(documents), 2), np.int32)
    for number, document in enumerate(documents):
        if document.conversation is None or not document.turns:
            continue
        turns = [document.text[start:stop].rstrip() for start, stop in document.turns]
        # a tokenizer without special tokens cannot end a turn otherwise
        without = [turn for turn in turns if end_tokens and not turn.endswith(end_tokens)]
        counts[number] = len(turns), len(without)
    return counts


def message_columns(config: DocumentConfig) -> list[ValueColumn]:
    """Return the columns of values that messages have."""
    return [column for column in config.value_columns.values() if column.of == MESSAGE]


def values_of_messages(document: Document, columns: list[ValueColumn]) -> Columns:
    """Return the values of messages in these columns, by name [spans], for each span of a document.

    Raises MalformedError.
    """
    spans = [None] if document.spans is None else document.spans
    values = {
        column.name: np.zeros((len(spans), *column.dtype.shape), column.dtype.base)
        for column in columns
    }
    messages = document.conversation.messages if document.conversation else []
    no_messages: list[int | None] = [None] * len(spans)
    for at, number in enumerate(document.speakers or no_messages):
        noted = {} if number is None else messages[number].get(VALUES, {})
        for column in columns:
            name = column.name
            if name not in noted and column.default is not None:
                values[name][at] = default_of(column)
                continue
            try:
                values[name][at] = value_of(column, noted.get(name), column.dtype.shape)
            except ValueError as error:
                where = "" if number is None else f"message {number}: "
                raise MalformedError(f"{where}{error}") from error
    return values


def _end_to_end(parts: list[Columns]) -> Columns:
    """Return the columns of all parts, which have the same ones."""
    names = parts[0] if parts else ()
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def byte_spans(documents: list[Document], columns: Columns | None = None) -> TrainedSpans | None:
    """Return the spans of all documents, in bytes of UTF-8; None if all is trained."""
    if all(document.spans is None for document in documents):
        return None
    counts, edges = [], list[int]()
    for document in documents:
        spans = [(0, len(document.text))] if document.spans is None else document.spans
        counts.append(len(spans))
        own = [edge for span in spans for edge in span]
        edges += own if document.text.isascii() else _in_bytes(document.text, own)
    flat: Int64 = np.array(edges, np.int64)
    return TrainedSpans(offsets_of(counts), flat[::2].copy(), flat[1::2].copy(), columns or {})


def _in_bytes(text: str, edges: list[int]) -> list[int]:
    """Places in a text, in order, in bytes."""
    places, done, size = [], 0, 0
    for edge in edges:
        size += len(text[done:edge].encode("utf-8", "surrogatepass"))
        places.append(size)
        done = edge
    return places
