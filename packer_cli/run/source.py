"""Select a tokenizer and a chat template for a run, and load what turns its slices into tokens.

    choose_encoding(shape, config, ...)  TokenizerSelection, not loaded: part of a run's identity
    prepare(run, options)                InputDocuments, loaded: reads and encodes slices

Tokenized directories hold tokens: of their tokenizer only copies and figures are needed, and
nothing is loaded. Loading a tokenizer of 11 MB takes half a second, an input that is tokenized
nothing but its index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packer_cli.chat.messages import RefusedError
from packer_cli.errors import DamagedInputError, InternalError, UsageError, os_errors
from packer_cli.inputs.byte_streams import STDIN, peeking
from packer_cli.inputs.formats import beginning, reader_for
from packer_cli.inputs.selection import Selection
from packer_cli.inputs.tokenized import TokenizedInputs, opened, shape_of
from packer_cli.mixing.units import choice_of
from packer_cli.options.documents import OF_ROWS_TOO, DocumentConfig
from packer_cli.options.option import options_of
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions
from packer_cli.options.shape_rules import by_file_shape, trained_on
from packer_cli.options.shapes import TRACE, Shape, prompts_described
from packer_cli.records import (
    HIGHEST_ID,
    POSITION,
    InputFile,
    Notify,
    Records,
    Slice,
    turn_position,
)
from packer_cli.result.layout import TOKENIZER, TOKENIZER_FILES
from packer_cli.result.manifest import TokenizedManifest, TokenizerInfo, as_named, load_tokenized
from packer_cli.result.reader import check_side_file
from packer_cli.run.pool import Pool
from packer_cli.run.run_plan import RunPlan, TokenizerSelection, common_tokenizer
from packer_cli.storage import read_bytes
from packer_cli.tokenization.encoding import Encode, Encoded, Read, plain_encoder, skipping
from packer_cli.tokenization.fill_in_middle import fill_in_middle
from packer_cli.tokenization.locate import (
    BYTES,
    Specials,
    TokenizerFiles,
    choose,
    highest_id,
    locate,
)
from packer_cli.tokenization.tokenizer import Framing, Tokenizer, bytes_tokenizer, load_tokenizer
from packer_cli.tokenization.trust import FIRST_DOCUMENTS_CHARACTERS

if TYPE_CHECKING:
    from packer_cli.chat.documents import Composer
    from packer_cli.chat.messages import Conversation
    from packer_cli.chat.renderer import Document
    from packer_cli.chat.templates import TemplateChoice

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_TEXT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_TURN_END = re.compile(r"<\|(eot|eot_id|eom|eom_id|im_end|end|end_of_turn|return)\|>|<end_of_turn>")


def choose_encoding(
    shape: Shape, config: DocumentConfig, tokenizer: str | None, options: EncodingOptions
) -> TokenizerSelection:
    """Select the tokenizer and the template that the options name. Raises UsageError."""
    notify, warn = options.notify, options.warn
    chosen, origin = choose(tokenizer)
    if shape.is_of_tokens and origin == "default":
        what = "traces" if shape.kind == TRACE else "input_ids"
        notify(f"{what} found: no tokenizer needed; padding is id 0")
        return TokenizerSelection(None)
    if chosen == BYTES and origin == "default":
        warn(
            "warning: no --tokenizer given: using the built-in bytes tokenizer (UTF-8 bytes as ids)"
        )
    files = None if chosen == BYTES else locate(chosen)
    for end in config.turn_end:
        if files is not None and files.added_tokens and end not in files.added_tokens:
            warn(
                f"warning: --turn-end: {end!r} is not a token of its own, but text for tokenizer "
                f"{chosen}"
            )
    fill_in_middle(config, files)  # raises before the work what it would raise within it
    if files is not None and files.warning:
        notify(f"warning: {files.warning}; see packer tokenizer --check")
    is_text = any(one.kind == "text" for one in shape.each)
    if files is not None and is_text and config.add_eos is not False and not config.eos_token:
        _note_turn_end(files, notify)
    if not shape.is_supervised:
        return TokenizerSelection(chosen, files)
    return TokenizerSelection(chosen, files, _choose_template(shape, config, files, notify))


def _note_turn_end(files: TokenizerFiles, notify: Notify) -> None:
    """Note if EOS ends turns of conversations rather than texts."""
    from packer_cli.chat.templates import own_templates  # noqa: PLC0415

    ends, eos = [one for one in _TEXT_ENDS if one in files.added_tokens], files.eos
    if eos is None or eos in ends:
        return
    is_written = ends and any(eos in one for one in own_templates(files).values())
    if _TURN_END.fullmatch(eos) or is_written:
        tip = f"--eos-token '{ends[0]}' ends texts" if ends else "--eos-token names another"
        notify(f"texts end with EOS {eos}, which ends turns of conversations; {tip}")


def _choose_template(
    shape: Shape, config: DocumentConfig, files: TokenizerFiles | None, notify: Notify
) -> TemplateChoice | None:
    from packer_cli.chat.templates import find_template  # noqa: PLC0415

    template = find_template(config.chat_template, files)
    if not shape.members:  # else said already, with the files
        notify(f"records: {shape.described()}")
    if shape.kind == TRACE:  # it is compared with, where there is one
        return template
    if prompts := prompts_described(shape, config.prompt_template):
        notify(f"{prompts}; see --prompt-template")
    if not any(uses_template(*own) for own in by_file_shape(config, shape).values()):
        return template
    if template is None:
        raise UsageError(
            "messages need a chat template, and the tokenizer has none",
            "give one with --chat-template FILE",
        )
    if config.template_args:
        from packer_cli.chat.syntax import check_arguments  # noqa: PLC0415 jinja2 is slow
        from packer_cli.chat.templates import special_tokens  # noqa: PLC0415

        check_arguments(config.arguments, template.sources, special_tokens(files))
    how = "{% generation %} tags" if _GENERATION.search(template.source) else "turn markers"
    trained = trained_on(config, shape)
    found = "" if trained == "all" else f" (found from {how})"
    notify(f"chat template: {template.origin}; trained on: {trained}{found}")
    return template


def choose_tokenized(
    files: Sequence[InputFile], config: DocumentConfig, tokenizer: str | None
) -> tuple[Shape, TokenizerSelection]:
    """Return the shape of tokenized records, and the tokenizer that made their tokens.

    Raises UsageError for options that apply only to inputs that are not tokenized.
    """
    if not isinstance(config, PackConfig):
        raise UsageError(f"{as_named(files[0].path)}: is tokenized already", "pack it: packer pack")
    _refuse_late(files[0], config, tokenizer)
    folder = Path(files[0].path).parent
    facts = load_tokenized(folder)
    copies = {name: _kept(folder, facts, name)
              for name in TOKENIZER_FILES if name in facts.side_files}  # fmt: skip
    name = facts.tokenizer.source if facts.tokenizer else None
    known = {name: facts.side_files[name] for name in copies}
    return shape_of(files), TokenizerSelection(name, copies=copies, known=known)


def _kept(folder: Path, facts: TokenizedManifest, name: str) -> bytes:
    """Read a file of the tokenizer that a tokenized directory keeps. DataError if it changed."""
    check_side_file(folder / name, facts, name)
    with os_errors(folder / name):
        return read_bytes(folder / name)


def _refuse_late(file: InputFile, config: DocumentConfig, tokenizer: str | None) -> None:
    defaults = {one.name: one.default for one in fields(config)}
    late = [
        option.flag
        for name, option in options_of(DocumentConfig).items()
        if name not in {*OF_ROWS_TOO, "where"} and getattr(config, name) != defaults[name]
    ]
    if tokenizer is not None and choose(tokenizer)[1] == "--tokenizer":
        late.insert(0, "--tokenizer")
    why = ""
    if getattr(config, "overlong", None) == "truncate-turns":
        why = "" if late else ", and where its turns are is not known any more"
        late.append("--overlong truncate-turns")
    if late:
        raise UsageError(
            f"{', '.join(late)}: {as_named(file.path)} is tokenized already{why}",
            "leave it out, or give it with the original data",
        )


@dataclass(frozen=True)
class InputDocuments:
    """The documents of a run's inputs.

    read       yields the records of a slice
    encode     returns their tokens
    tokenizer  makes the tokens; None if the inputs hold them
    tokenized  reads tokenized directories, in the place of `read` and `encode`
    info       describes the tokenizer that makes, or has made, the tokens
    """

    read: Read
    encode: Encode
    tokenizer: Tokenizer | None = None
    tokenized: TokenizedInputs | None = None
    info: TokenizerInfo | None = None

    def confirm(self) -> None:
        """Raise InternalError if a sample of the fast engine's tokens differed."""
        if self.tokenizer is not None:
            self.tokenizer.finish()


def prepare(run: RunPlan, options: EncodingOptions) -> InputDocuments:
    """Load what the units of a run need. Raises UsageError.

    Chat templates are only named here: each worker analyses them when it reads its first records.
    """
    if run.is_tokenized:
        # inputs that no unit reads may have gone, as with --add
        used = {part.file for unit in run.units for part in unit.slices}
        inputs = [file for file in run.files if run.row_config.mixture or file.index in used]
        return _tokenized_source(inputs, run.row_config)
    shapes = by_file_shape(run.config, run.shape)
    tokenizer = None
    if run.chosen.name is not None:
        first = run.files[run.units[0].slices[0].file]
        shape, config = shapes[first.shape]
        framing, files = _framing_of(config), run.chosen.files
        tokenizer = (
            bytes_tokenizer(framing)
            if files is None
            else load_tokenizer(
                files,
                backend=options.tokenizer_backend,
                framing=framing,
                first_documents=_first_texts(shape, config, first),
                notify=options.notify,
            )
        )
    sources = {
        name: _ShapeSource(run, shape, config, tokenizer)
        for name, (shape, config) in shapes.items()
    }
    return InputDocuments(
        read=lambda file, part: sources[file.shape].read(file, part),
        encode=lambda records, file: sources[file.shape].encode(records, file),
        tokenizer=tokenizer,
        info=common_tokenizer([source.info for source in sources.values()]),
    )


class _ShapeSource:
    """Reads and encodes the inputs that have one shape of records."""

    def __init__(
        self, run: RunPlan, shape: Shape, config: DocumentConfig, tokenizer: Tokenizer | None
    ) -> None:
        """`tokenizer`: None for token ids of an unknown one. Raises UsageError if it lacks a token
        that goes around documents.
        """
        self._shape, self._config, self._files = shape, config, run.chosen.files
        self._tokenizer = None if tokenizer is None else tokenizer.framed(_framing_of(config))
        composer = None if tokenizer is None else self._composer(run)
        selection, encode = Selection.of(config), self._encoder(composer)
        self.encode = encode if selection is None else _selecting(encode, selection)
        # a trace holds its ids: its messages are only compared with them
        self._compose = None if composer is None or shape.kind == TRACE else composer.compose

    @property
    def info(self) -> TokenizerInfo | None:
        """A description of the tokenizer, with the tokens around these documents."""
        return None if self._tokenizer is None else self._tokenizer.info

    def read(self, file: InputFile, part: Slice) -> Iterator[Records]:
        """Yield the records of a slice: conversations and prompts as texts with spans."""
        if self._shape.kind == TRACE:
            from packer_cli.chat.captures import SessionReader  # noqa: PLC0415 texts need none

            return SessionReader(file, self._shape, self._config).read(part)
        records = reader_for(file.format).read(file, part, self._shape, self._config)
        return records if self._compose is None else map(self._compose, records)

    def _composer(self, run: RunPlan) -> Composer | _ComposerElsewhere | None:
        """Return what makes texts of conversations and prompts; None if there are none."""
        shape, config, template = self._shape, self._config, run.chosen.template
        if shape.kind == TRACE and template is not None:  # to compare its messages with its ids
            shape = Shape("messages")
            config = DocumentConfig(train_on="all", template_args=config.template_args)
        elif not shape.is_composed:
            return None
        from packer_cli.chat.documents import Composer  # noqa: PLC0415 jinja2 is slow
        from packer_cli.chat.templates import special_tokens  # noqa: PLC0415

        files, renders = self._files, uses_template(shape, config)
        end_tokens = tuple(files.added_tokens) if files else ()
        composer = Composer(
            shape, config, template if renders else None, special_tokens(files), end_tokens,
            self._specials(config),
        )  # fmt: skip
        return composer if run.resumable or not renders else _ComposerElsewhere(composer)

    def _encoder(self, composer: Composer | _ComposerElsewhere | None) -> Encode:
        shape, config, tokenizer = self._shape, self._config, self._tokenizer
        if shape.is_composed and composer is not None and tokenizer is not None:
            from packer_cli.chat.encoder import SupervisedEncoder  # noqa: PLC0415

            glued = not uses_template(shape, config)
            supervised = SupervisedEncoder(composer.render, config, tokenizer, glued=glued)
            return skipping(supervised, tokenizer, config.turns)
        highest = None
        if shape.is_of_tokens and tokenizer is not None:
            files = self._files
            highest = highest_id(files.json) if files else tokenizer.info.vocab_size - 1
        fim = fill_in_middle(config, self._files)
        encode = plain_encoder(tokenizer, highest, self._specials(config), fim)
        if tokenizer is not None:
            encode = skipping(encode, tokenizer)
        if shape.kind == TRACE:
            from packer_cli.chat.traces import TraceEncoder  # noqa: PLC0415 texts need none

            render = None if composer is None else composer.render
            return TraceEncoder(shape, config, encode, render, tokenizer)
        # beside conversations that become a document for each answer
        return _first_turns(encode) if config.turns == "each" else encode

    def _specials(self, config: DocumentConfig) -> Specials:
        files = self._files
        return Specials(files.specials if files else (), config.special_tokens_in_text)


def _first_turns(encode: Encode) -> Encode:
    """Return the encoder with documents at the first turn of their records."""

    def encode_first(records: Records, file: InputFile) -> Encoded:
        encoded = encode(records, file)
        position = turn_position(encoded.batch.position, 0)
        return encoded._replace(batch=encoded.batch.beside({}, {POSITION: position}))

    return encode_first


def _selecting(encode: Encode, selection: Selection) -> Encode:
    """Return the encoder without the documents that conditions leave out, which it counts."""

    def encode_selected(records: Records, file: InputFile) -> Encoded:
        encoded = encode(records, file)
        batch, filtered = selection.documents(encoded.batch)
        encoded.counts.add_filtered(records.filtered)
        encoded.counts.add_filtered(filtered)
        return encoded._replace(batch=batch)

    return encode_selected


class _ComposerElsewhere:
    """Composes in a worker of its own what this process reads: records of stdin cannot be read
    again if a template holds up the worker.
    """

    def __init__(self, composer: Composer) -> None:
        self._composer = composer
        self._pool = Pool(self._perform, describe=lambda item: STDIN)

    def compose(self, records: Records) -> Records:
        """Do as `Composer.compose`."""
        return self._in_worker("compose", records)  # type: ignore[no-any-return]

    def render(self, conversation: Conversation) -> Document:
        """Do as `Composer.render`. Raises RefusedError."""
        document = self._in_worker("render", conversation)
        if isinstance(document, str):
            raise RefusedError(document)
        return document  # type: ignore[no-any-return]

    def _in_worker(self, method: str, argument: Any) -> Any:
        ((_, result),) = self._pool.map([(method, argument)])
        return result

    def _perform(self, item: tuple[str, Any]) -> Any:
        """Return the result of a method, or why the template refuses, in a worker."""
        method, argument = item
        try:
            return getattr(self._composer, method)(argument)
        except RefusedError as error:
            return str(error)


def _first_texts(shape: Shape, config: DocumentConfig, file: InputFile) -> Iterator[str]:
    """Yield texts from the beginning of the input, to check the fast engine. Of records that a
    template renders, what they hold.
    """
    if shape.is_of_tokens:
        return
    part = beginning(file, FIRST_DOCUMENTS_CHARACTERS)
    with peeking(), suppress(DamagedInputError):  # which the unit that reads it meets, too
        for records in reader_for(file.format).read(file, part, shape, config):
            yield from records.texts or _strings_in(records.fields or [])
            if part.stop is None:  # the rest is the whole input
                return


def _strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in fields of records, except for names of fields."""
    if isinstance(value, str):
        yield value.encode("utf-8", "replace").decode()  # half of a surrogate pair is a bad record
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(item)


def uses_template(shape: Shape, config: DocumentConfig) -> bool:
    """Return True if a chat template makes the texts. `config`: with defaults of `for_shape`."""
    return shape.is_chat or config.prompt_template == "chat"


def _framing_of(config: DocumentConfig) -> Framing:
    """Return the tokens around every document. `config`: with the defaults of `for_shape`."""
    return Framing(config.add_bos, bool(config.add_eos), config.eos_token)


def _tokenized_source(files: Sequence[InputFile], config: PackConfig) -> InputDocuments:
    """Open tokenized directories, whose documents come in the order of the options' seed."""
    seed, choice = config.seed if config.shuffle else None, choice_of(files, config)
    folder, facts = Path(files[0].path).parent, opened(files[0]).facts
    highest = facts.tokenizer.vocab_size - 1 if facts.tokenizer else HIGHEST_ID
    if TOKENIZER in facts.side_files:
        highest = highest_id(_kept(folder, facts, TOKENIZER))
    inputs = TokenizedInputs(
        files, seed, highest, choice.pools if choice else None, config.value_columns.values()
    )

    def read(file: InputFile, part: Slice) -> Iterator[Records]:
        raise InternalError(f"{file.path} holds documents, not records")

    info = common_tokenizer([one.tokenizer for one in inputs.facts])
    return InputDocuments(read, plain_encoder(None), tokenized=inputs, info=info)
