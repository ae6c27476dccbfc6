"""From slices to tokens: the reader, the tokenizer, and all between them.

A tokenizer and a template are chosen first (`choose_encoding`): they are part of a run's identity.
`prepare` loads them and all else, and only a run with something to encode calls it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packer_cli.config.documents import MIB, DocumentConfig
from packer_cli.config.formats import format_named
from packer_cli.config.run_options import JINJA2, SECONDS_PER_RECORD, EncodingOptions
from packer_cli.config.shape_rules import by_file_shape, trained_on
from packer_cli.config.shapes import Shape
from packer_cli.early import EarlyReference
from packer_cli.errors import UsageError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.formats import beginning, reader_for
from packer_cli.inputs.tokenized import TokenizedInputs
from packer_cli.records import InputFile, Records, Slice, WorkUnit
from packer_cli.result.layout import TEMPLATE, TOKENIZER, TOOL_TEMPLATE
from packer_cli.run.identity import Run
from packer_cli.tokenization.agreement import FIRST_DOCUMENTS_CHARACTERS
from packer_cli.tokenization.encoding import Encode, Encoded, Read, plain_encoder
from packer_cli.tokenization.fill_in_middle import fill_in_middle
from packer_cli.tokenization.locate import BYTES, TokenizerFiles, choose, highest_id, locate
from packer_cli.tokenization.rebuilt import rebuilt_otherwise
from packer_cli.tokenization.specials import Specials
from packer_cli.tokenization.tokenizer import (
    Framing,
    Tokenizer,
    TokenizerInfo,
    bytes_tokenizer,
    load_tokenizer,
)

if TYPE_CHECKING:
    from packer_cli.supervised.documents import Composer
    from packer_cli.supervised.processes import ComposingProcesses
    from packer_cli.supervised.renderer import Conversation, Document
    from packer_cli.supervised.templates import TemplateChoice

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
Notify = Callable[[str], None]
_Render = Callable[["Conversation"], "Document"]


@dataclass(frozen=True)
class Chosen:
    """The tokenizer and the template of a run, before anything is loaded.

    name      of the tokenizer; None where none is needed
    files     of the tokenizer; None for the built-in one
    template  the chat template, where one is used
    copies, copied_hashes  of the side files, by name, where they were chosen before
    """

    name: str | None
    files: TokenizerFiles | None = None
    template: TemplateChoice | None = None
    copies: dict[str, bytes] = field(default_factory=dict, repr=False)
    copied_hashes: dict[str, str] = field(default_factory=dict)

    @property
    def side_files(self) -> dict[str, bytes]:
        """The files that a result keeps of them, so that it explains itself."""
        contents = dict(self.copies)
        if self.files is not None:
            contents = {TOKENIZER: self.files.json, **self.files.companions}
        if self.template is not None:
            contents[TEMPLATE] = self.template.source.encode()
            contents.pop(TOOL_TEMPLATE, None)
            if self.template.tool_use is not None:
                contents[TOOL_TEMPLATE] = self.template.tool_use.encode()
        return contents

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The sha256 of each side file; that of tokenizer.json, megabytes, is known already."""
        known = self.copied_hashes if self.files is None else {TOKENIZER: self.files.sha256}
        return {
            name: known.get(name) or hashlib.sha256(content).hexdigest()
            for name, content in self.side_files.items()
        }


def chosen_for(run: Run, work: Path) -> Chosen:
    """The same, from what the run's work folder keeps: for whoever joins it later or elsewhere."""
    from packer_cli.supervised.templates import TemplateChoice  # noqa: PLC0415

    files, template = None, None
    if run.tokenizer not in (None, BYTES):
        files = replace(locate(str(work)), source=run.tokenizer or "")
    if TEMPLATE in run.side_files:
        kept = [
            (work / name).read_text(encoding="utf-8") if name in run.side_files else None
            for name in (TEMPLATE, TOOL_TEMPLATE)
        ]
        template = TemplateChoice(kept[0] or "", TEMPLATE, kept[1])
    return Chosen(run.tokenizer, files, template)


@dataclass(frozen=True)
class Source:
    """`read` gives the records of a slice, `encode` makes tokens of them.

    `tokenized`: where documents are tokens already, which neither is asked for. `info`: of the
    tokenizer that makes, or has made, the tokens.
    """

    read: Read
    encode: Encode
    tokenizer: Tokenizer | None = None
    processes: ComposingProcesses | None = field(default=None, repr=False)
    tokenized: TokenizedInputs | None = None
    info: TokenizerInfo | None = None

    def __post_init__(self) -> None:
        if self.info is None and self.tokenizer is not None:
            object.__setattr__(self, "info", self.tokenizer.info)

    def stop(self) -> None:
        """End the processes that threads may be waiting for; `close` must still be called."""
        if self.processes is not None:
            self.processes.stop()

    def close(self) -> None:
        if self.tokenizer is not None:
            self.tokenizer.close()
        if self.processes is not None:
            self.processes.close()


def choose_encoding(
    shape: Shape, config: DocumentConfig, tokenizer: str | None, notify: Notify, warn: Notify
) -> Chosen:
    """What `tokenizer` and the options name. `notify` hears what was chosen, `warn` what was most
    likely not meant. Raises UsageError.
    """
    chosen, origin = choose(tokenizer)
    if shape.kind == "tokens" and origin == "default":
        notify("input_ids found: no tokenizer needed; padding is id 0")
        return Chosen(None)
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
    if files is not None and (warning := rebuilt_otherwise(files)):
        notify(f"warning: {warning}; see packer tokenizer --check")
    if not shape.is_supervised:
        return Chosen(chosen, files)
    from packer_cli.supervised.templates import find_template  # noqa: PLC0415

    template = find_template(config.chat_template, files)
    if not shape.members:  # else said already, with the files
        notify(f"records: {shape.described()}")
    renders = any(_renders(*own) for own in by_file_shape(config, shape).values())
    if renders and template is None:
        raise UsageError(
            "messages need a chat template, and the tokenizer has none",
            "give one with --chat-template FILE",
        )
    if renders and template:
        _check_arguments(config, template, files)
        how = "its {% generation %} tags" if _GENERATION.search(template.source) else "its turns"
        trained = trained_on(config, shape)
        told = "" if trained == "all" else f", told by {how}"
        notify(f"chat template: {template.origin}; trained on: {trained}{told}")
    return Chosen(chosen, files, template)


def _check_arguments(
    config: DocumentConfig, template: TemplateChoice, files: TokenizerFiles | None
) -> None:
    """UsageError for arguments that the templates do not read."""
    if not config.template_args:
        return
    from packer_cli.supervised.arguments import check_arguments  # noqa: PLC0415 jinja2 is slow
    from packer_cli.supervised.templates import special_tokens  # noqa: PLC0415

    sources = [template.source, *([template.tool_use] if template.tool_use else [])]
    check_arguments(config.arguments, sources, special_tokens(files))


def prepare(
    run: Run,
    chosen: Chosen,
    units: Sequence[WorkUnit],
    options: EncodingOptions,
    early: EarlyReference | None,
    notify: Notify,
) -> Source:
    """Load what `run` needs for `units`. `notify` hears which engine is used. Raises UsageError."""
    shape, config = run.shape, run.config

    plain_read = partial(_plain_read, shape, config)
    if chosen.name is None:
        return Source(plain_read, plain_encoder(None))
    if shape.is_supervised:
        return _supervised(run, chosen, units, options, early, notify)
    first: Iterable[str] = _first_texts(run.files[units[0].slices[0].file], shape, config)
    tokenizer = _tokenizer(chosen.files, config, options, first, early, notify)
    highest = None
    if shape.kind == "tokens":
        files = chosen.files
        highest = highest_id(files.json) if files else tokenizer.info.vocab_size - 1
    encode = _plain_encoder(tokenizer, chosen.files, config, highest)
    return Source(plain_read, encode, tokenizer)


def _plain_read(
    shape: Shape, config: DocumentConfig, file: InputFile, part: Slice
) -> Iterator[Records]:
    return reader_for(file.format).read(file, part, shape, config)


def _supervised(
    run: Run,
    chosen: Chosen,
    units: Sequence[WorkUnit],
    options: EncodingOptions,
    early: EarlyReference | None,
    notify: Notify,
) -> Source:
    """Of supervised records, and of texts in other files of the same run."""
    own, files = by_file_shape(run.config, run.shape), chosen.files
    engine = options.template_engine
    parts = {n: _composer_parts(*one, files, chosen.template, engine) for n, one in own.items()}
    rendered = {name: parts[name] for name, one in own.items() if _renders(*one)}
    processes = None
    if rendered:
        processes = _processes(options.max_seconds_per_record, rendered, notify)
    reads, renders = dict[str | None, Read](), dict[str | None, _Render]()
    for name, (shape, config) in own.items():
        reads[name] = partial(_plain_read, shape, config)
        if processes is not None and name in rendered:
            reads[name], renders[name] = processes.read, partial(processes.render, name)
        elif shape.is_supervised:
            from packer_cli.supervised.documents import make_composer  # noqa: PLC0415 jinja2 is slow

            composer = make_composer(*parts[name])
            reads[name], renders[name] = composer.read, composer.render
    begin = [(run.files[unit.slices[0].file], unit.slices[0]) for unit in units[: options.workers]]
    file, first = begin[0][0], iter(tuple[str]())
    if file.shape not in rendered:
        first = _first_composed(file, reads[file.shape])
    elif sum(part.weight for unit in units for part in unit.slices) < MIB and _has_first(file):
        # soon read: the first documents choose the engine, too, once it has been loaded
        if files and options.tokenizer_backend != "tokenizers":
            begin = [(file, beginning(file, FIRST_DOCUMENTS_CHARACTERS))]
        first = _first_composed(file, reads[file.shape])
    try:
        for ahead, part in begin if run.resumable else ():
            if processes and ahead.shape in rendered:
                processes.start(ahead, part)
        tokenizer = _tokenizer(files, own[file.shape][1], options, first, early, notify)
        tokenizers, info = framed_for(tokenizer, run.config, run.shape)
    except BaseException:
        if processes:
            processes.close()
        raise
    if processes and not run.resumable:
        reads |= {name: partial(_read_here, *own[name], processes) for name in rendered}
    encoders = _encoders(own, tokenizers, renders, files)

    def read(file: InputFile, part: Slice) -> Iterator[Records]:
        return reads[file.shape](file, part)

    def encode(records: Records, file: InputFile) -> Encoded:
        return encoders[file.shape](records, file)

    return Source(read, encode, tokenizer, processes, info=info)


def _processes(
    seconds: float,
    composers: dict[str | None, tuple[Any, ...]],
    notify: Notify = lambda message: None,
) -> ComposingProcesses:
    from packer_cli.supervised.processes import ComposingProcesses  # noqa: PLC0415

    return ComposingProcesses(seconds, composers, notify)


def _encoders(
    own: dict[str | None, tuple[Shape, Any]],
    tokenizers: dict[str | None, Tokenizer],
    renders: dict[str | None, _Render],
    files: TokenizerFiles | None,
) -> dict[str | None, Encode]:
    """By `InputFile.shape`, as all parameters. `renders`: as `Composer.render`, of those shapes
    that are supervised.
    """
    from packer_cli.supervised.encoder import SupervisedEncoder  # noqa: PLC0415

    return {
        name: SupervisedEncoder(renders[name], config, tokenizers[name])
        if name in renders
        else _plain_encoder(tokenizers[name], files, config)
        for name, (_, config) in own.items()
    }


def framed_for(
    tokenizer: Tokenizer, config: DocumentConfig, shape: Shape
) -> tuple[dict[str | None, Tokenizer], TokenizerInfo]:
    """The tokenizer by `InputFile.shape`, with what goes around documents of each shape; and what
    all have in common. `config` as `for_shape` gives it. Raises UsageError, and closes it then.
    """
    if not shape.members:
        return {None: tokenizer}, tokenizer.info
    tokenizers = dict[str | None, Tokenizer]()
    try:
        for name, (_, own) in by_file_shape(config, shape).items():
            tokenizers[name] = tokenizer.framed(framing_of(own))
    except BaseException:
        tokenizer.close()
        raise
    info, *others = (one.info for one in tokenizers.values())
    prefix, suffix = info.prefix, info.suffix
    for other in others:
        prefix = prefix if prefix == other.prefix else None
        suffix = suffix if suffix == other.suffix else None
    return tokenizers, replace(info, prefix=prefix, suffix=suffix)


def _renders(shape: Shape, config: DocumentConfig) -> bool:
    """Whether a chat template makes the texts; `config` as `for_shape` gives it."""
    return shape.is_chat or config.prompt_template == "chat"


def _read_here(
    shape: Shape,
    config: DocumentConfig,
    processes: ComposingProcesses,
    file: InputFile,
    part: Slice,
) -> Iterator[Records]:
    """Rendered in other processes, but read in this one, which has the stdin."""
    from packer_cli.supervised.documents import placed  # noqa: PLC0415 jinja2 is slow
    from packer_cli.supervised.turns import UndecidableError  # noqa: PLC0415

    for records in reader_for(file.format).read(file, part, shape, config):
        try:
            yield processes.compose(records, file.shape)
        except UndecidableError as error:
            raise placed(error, file) from error


def _composer_parts(
    shape: Shape,
    config: DocumentConfig,
    files: TokenizerFiles | None,
    template: TemplateChoice | None,
    engine: str = JINJA2,
) -> tuple[Any, ...]:
    """The arguments of `make_composer`."""
    from packer_cli.supervised.templates import special_tokens  # noqa: PLC0415

    end_tokens = tuple(files.added_tokens) if files else ()
    used = template if _renders(shape, config) else None
    specials = _specials(files, config)
    return shape, config, used, special_tokens(files), end_tokens, specials, engine


def _plain_encoder(
    tokenizer: Tokenizer | None,
    files: TokenizerFiles | None,
    config: DocumentConfig,
    highest: int | None = None,
) -> Encode:
    fim = fill_in_middle(config, files)
    return plain_encoder(tokenizer, highest, _specials(files, config), fim)


def _specials(files: TokenizerFiles | None, config: DocumentConfig) -> Specials:
    return Specials(files.specials if files else (), config.special_tokens_in_text)


def _tokenizer(
    files: TokenizerFiles | None,
    config: DocumentConfig,
    options: EncodingOptions,
    first_documents: Iterable[str],
    early: EarlyReference | None,
    notify: Notify,
) -> Tokenizer:
    framing = framing_of(config)
    if files is None:
        return bytes_tokenizer(framing)
    return load_tokenizer(
        files,
        backend=options.tokenizer_backend,
        framing=framing,
        first_documents=first_documents,
        early=early,
        notify=notify,
    )


def framing_of(config: DocumentConfig) -> Framing:
    """What goes around every document; `config` as `for_shape` gives it."""
    return Framing(config.add_bos, bool(config.add_eos), config.eos_token, config.separator)


def source_again(
    shape: Shape,
    config: DocumentConfig,
    tokenizer: Tokenizer | None,
    files: TokenizerFiles | None,
    seconds: float | None,
) -> Source:
    """Makes tokens of records as readers give them, whatever the shape: to compare.

    The caller closes `tokenizer`. `seconds`: what a record may take to render; None: the
    default.
    """
    if not shape.is_supervised or tokenizer is None:
        read = partial(_plain_read, shape, config)
        return Source(read, _plain_encoder(tokenizer, files, config))
    from packer_cli.supervised.templates import find_template  # noqa: PLC0415

    template = find_template(config.chat_template, files)
    own = by_file_shape(config, shape)
    parts = {name: _composer_parts(*one, files, template)
             for name, one in own.items() if one[0].is_supervised}  # fmt: skip
    processes = _processes(seconds or SECONDS_PER_RECORD, parts)
    renders: dict[str | None, _Render] = {name: partial(processes.render, name) for name in parts}
    encoders = _encoders(own, framed_for(tokenizer, config, shape)[0], renders, files)

    def read_again(file: InputFile, part: Slice) -> Iterator[Records]:
        return _plain_read(*own[file.shape], file, part)

    def compose_and_encode(records: Records, file: InputFile) -> Encoded:
        if file.shape in parts:
            records = processes.compose(records, file.shape)
        return encoders[file.shape](records, file)

    return Source(read_again, compose_and_encode, None, processes)


def composer_of(shape: Shape, config: DocumentConfig, files: TokenizerFiles | None) -> Composer:
    """Makes documents of supervised records, in this process and without limits."""
    from packer_cli.supervised.documents import make_composer  # noqa: PLC0415 jinja2 is slow
    from packer_cli.supervised.templates import find_template  # noqa: PLC0415

    template = find_template(config.chat_template, files)
    return make_composer(*_composer_parts(shape, config, files, template))


def _first_texts(file: InputFile, shape: Shape, config: DocumentConfig) -> list[str]:
    """Some texts from the beginning of the input, for checking the fast engine."""
    if shape.kind != "text":
        return []
    reader = reader_for(file.format)
    part = beginning(file, FIRST_DOCUMENTS_CHARACTERS)
    for records in reader.read(file, part, shape, config, peek=True):
        return records.texts or []
    return []


def _first_composed(file: InputFile, read: Read) -> Iterator[str]:
    """The same for records that must be composed first; only where a few can be read alone."""
    if _has_first(file):
        for records in read(file, beginning(file, FIRST_DOCUMENTS_CHARACTERS)):
            yield from records.texts or []


def _has_first(file: InputFile) -> bool:
    return format_named(file.format).counts_bytes and file.path != STDIN
