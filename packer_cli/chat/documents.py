"""Records to documents: one text each, and the spans of it that are trained on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from packer_cli.chat.chat_template import ChatTemplate
from packer_cli.chat.messages import (
    ASSISTANT,
    DETAIL,
    FLAGS,
    REASONING,
    MalformedError,
    Naming,
    RefusedError,
    UndecidableError,
    joined_content,
    parse_messages,
    parse_tools,
    with_context,
)
from packer_cli.chat.pairs import (
    MEND,
    Side,
    messages_of,
    once,
    optional_text,
    parted,
    text_of,
    with_more,
    without_bad,
)
from packer_cli.chat.probe import kind_of_piece, summed, words_of
from packer_cli.chat.renderer import Conversation, Document, Renderer
from packer_cli.chat.syntax import parse_arguments
from packer_cli.chat.templates import TemplateChoice
from packer_cli.errors import DataError, UsageError
from packer_cli.inputs.formats import reader_for
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shape_rules import known_texts
from packer_cli.options.shapes import ARGUMENTS, CONTEXT, SYSTEM, Shape
from packer_cli.options.shapes import REASONING as REASONING_FIELD
from packer_cli.records import (
    MOST_TURNS,
    BadRecord,
    InputFile,
    Int64,
    LeftOut,
    Records,
    Slice,
    Spans,
    turn_position,
)
from packer_cli.tokenization.specials import (
    NO_SPECIALS,
    SPELLED_OUT_TIP,
    Span,
    Specials,
    is_marked,
    spelled_out,
    unmarked,
)

UNSHOWN_TIP = "use a --chat-template that shows it, or --on-unshown warn"
_MOST_SHOWN = 60  # characters
_OF_TRAINING = {*FLAGS, DETAIL}
_Message = dict[str, Any]

# Taori et al. 2023, Stanford Alpaca: the prompts that the data were made for.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


class SpelledOutError(ValueError):
    """The content of a record spells out a special token."""

    tip = SPELLED_OUT_TIP


class UnshownError(ValueError):
    """The chat template leaves out something of a record."""

    tip = UNSHOWN_TIP


# why a record is bad
_REASONS = (SpelledOutError, UnshownError, MalformedError, RefusedError, UndecidableError)


@dataclass(frozen=True)
class Composer:
    """Makes documents of records. Safe to share between threads.

    renderers   for conversations, the last one for those with tools
    end_tokens  contents of the tokens that can end a turn
    """

    shape: Shape
    config: DocumentConfig
    renderers: tuple[Renderer, ...] = ()
    end_tokens: tuple[str, ...] = ()
    specials: Specials = NO_SPECIALS

    def read(self, file: InputFile, part: Slice) -> Iterator[Records]:
        """The records of a slice with texts and spans in the place of fields."""
        reader = reader_for(file.format)
        for records in reader.read(file, part, self.shape, self.config):
            yield self.compose(records)

    def compose(
        self, records: Records, begin: Callable[[int], None] = lambda position: None
    ) -> Records:
        """Records that cannot be a document join `bad`.

        `begin` hears the position of each record before it is composed; it may raise RefusedError.
        """
        records = self._named(records)
        documents: list[Document] = []
        bad, specials, unread = list(records.bad), 0, dict[str, int]()
        counts = np.zeros(len(records.positions), np.int64)  # how many documents each becomes
        for i, fields in enumerate(records.fields or []):
            try:
                begin(int(records.positions[i]))
                given, content, render = self._parsed(fields)
                spelled = []
                if self.specials.may_be_in(given):
                    spelled = self.specials.in_record(content())
                specials += len(spelled)
                if spelled and self.specials.policy == "error":
                    raise SpelledOutError(spelled_out(spelled[0]))
                own = render()
                if own[-1].left_out and self.config.on_unshown == "error":
                    raise UnshownError(unshown_text(own[-1]))
                documents += own
                counts[i] = len(own)
                self._count_unread(fields, own[-1], unread)
            except _REASONS as error:
                tip = getattr(error, "tip", "") or MEND
                bad.append(BadRecord(int(records.positions[i]), str(error), tip))
        bad.sort(key=lambda record: record.position)
        if records.sides is not None and bad:
            documents, counts = without_bad(records.positions, documents, counts, bad)
        again = self.config.shortens_conversations
        positions = np.repeat(records.positions, counts)
        if self.config.turns == "each":
            positions = _positions_of(positions, documents)
        return Records(
            positions,
            texts=[document.text for document in documents],
            spans=byte_spans(documents),
            turns=turn_counts(documents, self.end_tokens),
            specials=specials,
            controls=controls_of(documents),
            unshown=[
                part
                for number, document in enumerate(documents)
                if document.left_out
                for part in left_out_of(number, document)
            ],
            empty_turns=sum(document.empty_turns for document in documents),
            masked=masked_of(documents),
            unread=unread,
            sides=None if records.sides is None else np.repeat(records.sides, counts),
            conversations=[document.conversation for document in documents] if again else None,
            bad=bad if records.sides is None else once(bad),
            looked_at=records.looked_at,
            consumed=records.consumed,
            digest=records.digest,
        )

    def _named(self, records: Records) -> Records:
        """Records with the names that are known here, and each side of a pair as one of its own."""
        naming = Naming(self.config.message_keys, dict(self.config.roles))
        if naming.keys or naming.roles:
            records = replace(records, fields=list(map(naming.applied, records.fields or [])))
        names = known_texts(self.shape, self.config)
        if names and records.fields:
            records = replace(records, fields=[_without(one, names) for one in records.fields])
        if self.shape.has_pairs:
            return parted(records, self.shape)
        return records

    def _parsed(
        self, fields: dict[str, Any]
    ) -> tuple[Any, Callable[[], Any], Callable[[], list[Document]]]:
        """All that a record holds, and functions that give its own content and its documents.

        It is parsed and put together first: JSON text may escape anything, and special tokens may
        begin in a prompt and end in what follows it.
        """
        conversation = self._conversation(fields)
        if conversation is not None:
            given: Any = conversation.messages, conversation.tools, conversation.arguments
            if any(type(message.get("content")) is list for message in conversation.messages):
                given = _content(conversation)  # parts may spell one out together
            return given, partial(_content, conversation), partial(self._documents, conversation)
        document = self._of_fields(fields)
        return document.text, lambda: document.text, lambda: [document]

    def _documents(self, conversation: Conversation) -> list[Document]:
        """At least one. Raises RefusedError and UndecidableError."""
        config = self.config
        if config.turns == "each" or config.train_on == "final":
            chosen = _answers(conversation.messages, config.train_on)
            if config.turns == "each" and chosen:
                return _joined([self.render(one) for one in _up_to_each(conversation, chosen)])
            conversation = _only_trained_on(conversation, chosen)
        return [self.render(conversation)]

    def _of_fields(self, fields: dict[str, Any]) -> Document:
        """The document of a prompt and completion, without a template. Raises MalformedError."""
        shape, system = self.shape, optional_text(fields, SYSTEM, self.shape)
        if shape.has_pairs:
            prompt, completion, *_ = fields["side"]
            more = ""
        else:
            asked, answer = _exchanged(shape)
            prompt, completion = self._text(fields, asked), self._text(fields, answer)
            more = _more(fields, shape)
        if self.config.prompt_template == "alpaca":
            prompt = _alpaca(prompt, more, system)
        else:
            prompt = "\n\n".join(filter(None, (system, with_more(prompt, more))))
        text = prompt + completion
        spans = None if self.config.train_on == "all" else [(len(prompt), len(text))]
        ordinary = self.specials.policy == "text" and self.specials.in_text(text)
        return Document(text, spans, controls=[] if ordinary else None)

    def render(self, conversation: Conversation) -> Document:
        """The document of messages, through the chat template.

        If the policy makes text of special tokens, it is rendered with a mark inside each of the
        record's, too, which tells them from those that the template writes.

        Raises RefusedError and UndecidableError.
        """
        renderer = self._renderer_of(conversation)
        document = renderer.render(conversation)
        if self.specials.policy != "text":
            return document
        given = conversation.messages, conversation.tools, conversation.arguments
        messages, tools, arguments = map(self.specials.marked, given)
        if any(
            self.specials.in_text(joined_content(message.get("content"))) for message in messages
        ):
            raise RefusedError("parts of its content spell out a special token together")
        if (messages, tools, arguments) == given:
            return document
        if any(map(is_marked, given)):
            raise RefusedError("its content has U+FDD0, which no text should have")
        messages = [_with_ranges_moved(message) for message in messages]
        conversation = replace(conversation, messages=messages, tools=tools, arguments=arguments)
        marked = self._renderer_of(conversation).render(conversation)
        if unmarked(marked.text, marked.spans) != (document.text, document.spans):
            raise RefusedError(
                "the chat template looks for special tokens in the record's content, or escapes "
                "them: they cannot be made text"
            )
        _, controls = unmarked(marked.text, self.specials.controls(marked.text))
        return replace(document, controls=controls)

    def _renderer_of(self, conversation: Conversation) -> Renderer:
        return self._renderer(conversation.tools, conversation.arguments)

    def _renderer(self, tools: list[Any] | None, arguments: dict[str, Any] | None) -> Renderer:
        """Choose as transformers does: another template may be for conversations with tools."""
        if not self.renderers:
            raise UsageError(
                "messages need a chat template, and the tokenizer has none",
                "give one with --chat-template FILE",
            )
        renderer = self.renderers[-1 if tools else 0]
        return renderer.with_arguments(arguments) if arguments else renderer

    def _count_unread(
        self, fields: dict[str, Any], document: Document, unread: dict[str, int]
    ) -> None:
        """Count fields of the record that nobody reads. INOUT unread."""
        conversation = document.conversation
        if conversation is not None:
            names = self._renderer_of(conversation).unread(document.text, conversation)
        else:
            names = [ARGUMENTS] if fields.get(ARGUMENTS) else []
        for name in names:
            unread[name] = unread.get(name, 0) + 1

    def _conversation(self, fields: dict[str, Any]) -> Conversation | None:
        kind, columns = self.shape.kind, self.shape.columns
        arguments = parse_arguments(fields.get(ARGUMENTS), columns.get(ARGUMENTS, ARGUMENTS))
        if kind == "alpaca" and self.config.prompt_template == "chat":
            return self._exchange(fields, arguments)
        if self.shape.is_chat:
            own, tools = self.shape.required[0], self._tools(fields)
            keep_parts = self._renderer(tools, arguments).keep_parts
            messages = parse_messages(fields[own], columns[own], keep_parts=keep_parts)
            return self._with_system(Conversation(messages, tools, arguments), fields)
        if self.shape.has_pairs:
            side = self._of_side(fields, arguments)
            return side and self._with_system(side, fields)
        if kind != "prompt-completion":
            return None
        if self.shape.of_messages:
            prompt = self._side(fields, "prompt", "user", arguments)
            completion = self._side(fields, "completion", ASSISTANT, arguments)
            messages = [*with_context(prompt), *completion]
            conversation = Conversation(messages, self._tools(fields), arguments)
            return self._with_system(conversation, fields)
        if self.config.prompt_template == "chat":
            return self._exchange(fields, arguments)
        return None

    def _exchange(self, fields: dict[str, Any], arguments: dict[str, Any] | None) -> Conversation:
        """The conversation of a prompt, with what belongs to it, and its answer."""
        asked, answer = _exchanged(self.shape)
        question = with_more(self._text(fields, asked), _more(fields, self.shape))
        exchange = _exchange(question, self._text(fields, answer), self._tools(fields), arguments)
        if reasoning := optional_text(fields, REASONING_FIELD, self.shape):
            exchange.messages[-1] |= dict.fromkeys(REASONING[:2], reasoning)
        return self._with_system(exchange, fields)

    def _with_system(self, conversation: Conversation, fields: dict[str, Any]) -> Conversation:
        """Put the record's system field first, unless the conversation begins with another one."""
        messages, system = conversation.messages, optional_text(fields, SYSTEM, self.shape)
        if system and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system})
        return conversation

    def _of_side(
        self, fields: dict[str, Any], arguments: dict[str, Any] | None
    ) -> Conversation | None:
        """The conversation of one side of a record of preference, if it is one."""
        side: Side = fields["side"]
        if self.shape.of_messages:
            tools = self._tools(fields)
            keep_parts = self._renderer(tools, arguments).keep_parts
            return Conversation(messages_of(side, keep_parts=keep_parts), tools, arguments)
        if self.config.prompt_template == "chat":
            return _exchange(side.prompt, side.answer, self._tools(fields), arguments)
        return None

    def _side(
        self, fields: dict[str, Any], own: str, role: str, arguments: dict[str, Any] | None
    ) -> list[_Message]:
        if isinstance(fields[own], str):
            return [{"role": role, "content": fields[own]}]
        name = self.shape.columns[own]
        keep_parts = self._renderer(self._tools(fields), arguments).keep_parts
        return parse_messages(fields[own], name, keep_parts=keep_parts)

    def _tools(self, fields: dict[str, Any]) -> list[Any] | None:
        return parse_tools(fields.get("tools"), self.shape.columns.get("tools", ""))

    def _text(self, fields: dict[str, Any], own: str) -> str:
        return text_of(fields, own, self.shape)


# -- `--turns each`: a document for each answer, with all that comes before it as its prompt.
# So every answer is rendered as the last one, after the same text as when it is asked for, whatever
# a template leaves out of earlier turns.


def _answers(messages: list[_Message], train_on: str | None) -> list[int]:
    """The numbers of the messages that --train-on chooses, in order."""
    speakers = [n for n, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if train_on == "last-assistant":
        return speakers[-1:]
    if train_on == "final":
        return [number for number in speakers if _ends_exchange(messages, number)]
    return speakers


def _only_trained_on(conversation: Conversation, chosen: Collection[int]) -> Conversation:
    """The conversation with these of the assistant's messages trained on, and no others."""
    return replace(conversation, messages=with_context(conversation.messages, chosen))


def _up_to_each(conversation: Conversation, chosen: list[int]) -> list[Conversation]:
    """The conversations up to each of some messages of the assistant. Raises MalformedError."""
    messages = conversation.messages
    speakers = [n for n, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if len(speakers) > MOST_TURNS:
        raise MalformedError(
            f"has {len(speakers):,} messages of the assistant; --turns each takes {MOST_TURNS:,}"
        )
    context = [_without_flags(message) for message in messages]
    return [
        replace(conversation, messages=[*context[:number], messages[number]], turn=turn)
        for turn, number in enumerate(speakers)
        if number in chosen
    ]


def _joined(documents: list[Document]) -> list[Document]:
    """The documents of a record: what one leaves out and another shows is not left out, and the
    rest is told by the last.
    """
    own = [set(document.left_out) for document in documents]
    sizes = [len(d.conversation.messages) if d.conversation else 0 for d in documents]
    left_out = dict.fromkeys(
        piece
        for document in documents
        for piece in document.left_out
        if all(piece in some for some, size in zip(own, sizes, strict=True) if size > piece.message)
    )
    last = replace(documents[-1], left_out=tuple(sorted(left_out, key=lambda p: p.message)))
    return [*(replace(document, left_out=()) for document in documents[:-1]), last]


def _positions_of(records: Int64, documents: list[Document]) -> Int64:
    """int64[n], of documents that come from these positions of records, int64[n]."""
    turns = [d.conversation.turn or 0 if d.conversation else 0 for d in documents]
    own = [turn_position(at, turn) for at, turn in zip(records.tolist(), turns, strict=True)]
    return np.array(own, np.int64)


def _ends_exchange(messages: list[_Message], number: int) -> bool:
    """Whether an answer is final: it calls no tool, and the assistant does not go on."""
    following = messages[number + 1 : number + 2]
    goes_on = any(message.get("role") in (ASSISTANT, "tool") for message in following)
    return not (messages[number].get("tool_calls") or goes_on)


def _without_flags(message: _Message) -> _Message:
    if _OF_TRAINING.isdisjoint(message):
        return message
    return {key: value for key, value in message.items() if key not in _OF_TRAINING}


# -- What documents hold


def placed(error: UndecidableError, file: InputFile) -> DataError:
    """An error that names the place of its record."""
    place = reader_for(file.format).describe(file, error.position)
    return DataError(f"{file.path}, {place}: {error.message}", error.tip)


def left_out_of(number: int, document: Document) -> list[LeftOut]:
    """What the text of the document, the batch's `number`-th, does not show."""
    conversation = document.conversation
    if conversation is None:
        return []
    return summed(number, document.left_out, conversation.messages, conversation.tools)


def unshown_text(document: Document) -> str:
    """The first thing that the text does not show, for people."""
    conversation, piece = document.conversation, document.left_out[0]
    if conversation is None or piece.message < 0:
        return "the chat template does not show its tools"
    what = kind_of_piece(piece, conversation.messages).replace("_", " ")
    words = " ".join(words_of(piece, conversation.messages, conversation.tools).split())
    shown = words if len(words) <= _MOST_SHOWN else f"{words[:_MOST_SHOWN]}…"
    return f"the chat template does not show the {what} of message {piece.message}: {shown!r}"


def masked_of(documents: list[Document]) -> list[tuple[int, str]]:
    """What flags and options leave untrained: (index of the document, a text)."""
    return [(number, text) for number, document in enumerate(documents) for text in document.masked]


def turn_counts(documents: list[Document], end_tokens: tuple[str, ...]) -> tuple[int, int]:
    """(trained turns of the assistant, those of them that end in none of `end_tokens`)."""
    turns = [
        document.text[start:stop]
        for document in documents
        if document.conversation is not None
        for start, stop in document.turns or []
    ]
    if not end_tokens:  # a tokenizer without special tokens cannot end a turn otherwise
        return len(turns), 0
    without, usual = 0, end_tokens[0]  # of hundreds, most turns end in the same
    for turn in map(str.rstrip, turns):
        if not turn.endswith(usual):
            end = next(filter(turn.endswith, end_tokens), None)
            without, usual = without + (end is None), end or usual
    return len(turns), without


def make_composer(
    shape: Shape,
    config: DocumentConfig,
    template: TemplateChoice | None,
    special_tokens: dict[str, Any],
    end_tokens: tuple[str, ...],
    specials: Specials = NO_SPECIALS,
) -> Composer:
    """A composer, here or in a child: its arguments can be pickled, a compiled template cannot."""
    sources = [] if template is None else [template.source, template.tool_use]
    renders = shape.is_chat or config.prompt_template == "chat"
    renderers = tuple(
        Renderer(
            ChatTemplate(source, special_tokens, config.arguments),
            config,
            ends_matter=bool(end_tokens),
        )
        for source in sources
        if source is not None and renders
    )
    return Composer(shape, config, renderers, (*end_tokens, *config.turn_end), specials)


def _content(conversation: Conversation) -> list[Any]:
    """The record's own content, without the second names that parsing gives to parts of it."""
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


def _with_ranges_moved(message: _Message) -> _Message:
    """A message with marks in its content, with its ranges of characters as if they were none."""
    if not message.get(DETAIL):
        return message
    places = [i for i, c in enumerate(joined_content(message.get("content"))) if not is_marked(c)]
    moved = [
        one | {edge: places[one[edge]] for edge in ("begin_offset", "end_offset")}
        for one in message[DETAIL]
    ]
    return message | {DETAIL: moved}


def _exchange(
    question: str, answer: str, tools: list[Any] | None, arguments: dict[str, Any] | None
) -> Conversation:
    messages: list[_Message] = [
        {"role": "user", "content": question}, {"role": ASSISTANT, "content": answer},
    ]  # fmt: skip
    return Conversation(messages, tools, arguments)


def _without(fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A record whose fields of these names have texts or nothing."""
    for name in names:
        value = fields.get(name)
        if value is not None and type(value) is not str:
            fields = {**fields, name: None}
    return fields


def _exchanged(shape: Shape) -> tuple[str, str]:
    """The own names of what is asked, and of its answer."""
    return ("instruction", "output") if shape.kind == "alpaca" else ("prompt", "completion")


def _more(fields: dict[str, Any], shape: Shape) -> str:
    """What an instruction or a prompt is about."""
    return optional_text(fields, "input" if shape.kind == "alpaca" else CONTEXT, shape)


def _alpaca(instruction: str, more: str, system: str) -> str:
    """The text of a prompt; a system prompt takes the place of Alpaca's own."""
    template = ALPACA_WITH_INPUT if more else ALPACA
    own, blank, rest = template.partition("\n\n")
    return (system or own) + blank + rest.format(instruction=instruction, input=more)


def controls_of(documents: list[Document]) -> dict[int, list[Span]]:
    """The `controls` of the documents that have any, by index."""
    return {i: d.controls for i, d in enumerate(documents) if d.controls is not None}


def byte_spans(documents: list[Document]) -> Spans | None:
    """The spans of all documents in UTF-8 bytes of their texts; None when all is trained."""
    if all(document.spans is None for document in documents):
        return None
    counts, edges = [], []
    for document in documents:
        spans = [(0, len(document.text))] if document.spans is None else document.spans
        counts.append(len(spans))
        edges.extend(spans if document.text.isascii() else _in_bytes(document.text, spans))
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    flat: Int64 = np.array(edges, np.int64).reshape(-1, 2)
    return Spans(offsets, np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1]))


def _in_bytes(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    converted, done, size = [], 0, 0
    length: Callable[[str], int] = lambda part: len(part.encode("utf-8", "surrogatepass"))  # noqa: E731
    for start, stop in spans:
        size += length(text[done:start])
        end = size + length(text[start:stop])
        converted.append((size, end))
        done, size = stop, end
    return converted
