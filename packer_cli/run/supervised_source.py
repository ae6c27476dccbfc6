"""The source of supervised records: rendered by templates, in processes beside the run.

Texts in other files of the same run come from it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from packer_cli.config.documents import MIB, DocumentConfig
from packer_cli.config.formats import format_named
from packer_cli.config.run_options import JINJA2, SECONDS_PER_RECORD, EncodingOptions
from packer_cli.config.shape_rules import by_file_shape
from packer_cli.config.shapes import Shape
from packer_cli.early import EarlyReference
from packer_cli.errors import DamagedInputError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.formats import beginning, reader_for
from packer_cli.records import InputFile, Notify, Records, Slice, WorkUnit
from packer_cli.run.chosen import Chosen
from packer_cli.run.identity import Run
from packer_cli.run.source import (
    Source,
    framed_for,
    loaded_tokenizer,
    plain_encode,
    read_plainly,
    specials_of,
    uses_template,
)
from packer_cli.tokenization.agreement import FIRST_DOCUMENTS_CHARACTERS
from packer_cli.tokenization.encoding import Encode, Encoded, Read
from packer_cli.tokenization.locate import TokenizerFiles
from packer_cli.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from packer_cli.supervised.documents import Composer
    from packer_cli.supervised.processes import ComposingProcesses
    from packer_cli.supervised.renderer import Conversation, Document
    from packer_cli.supervised.templates import TemplateChoice

_Render = Callable[["Conversation"], "Document"]


def supervised_source(
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
    rendered = {name: parts[name] for name, one in own.items() if uses_template(*one)}
    processes = None
    if rendered:
        processes = _processes(options.max_seconds_per_record, rendered, notify)
    reads, renders = dict[str | None, Read](), dict[str | None, _Render]()
    for name, (shape, config) in own.items():
        reads[name] = partial(read_plainly, shape, config)
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
        tokenizer = loaded_tokenizer(files, own[file.shape][1], options, first, early, notify)
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
        name: SupervisedEncoder(
            renders[name], config, tokenizers[name], glued=not uses_template(shape, config)
        )
        if name in renders
        else plain_encode(tokenizers[name], files, config)
        for name, (shape, config) in own.items()
    }


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


def _first_composed(file: InputFile, read: Read) -> Iterator[str]:
    """Some texts from the beginning, to check the fast engine; where a few can be read alone."""
    if _has_first(file):
        with suppress(DamagedInputError):  # which the unit that reads it meets, too
            for records in read(file, beginning(file, FIRST_DOCUMENTS_CHARACTERS)):
                yield from records.texts or []


def _has_first(file: InputFile) -> bool:
    return format_named(file.format).counts_bytes and file.path != STDIN


def supervised_again(
    shape: Shape,
    config: DocumentConfig,
    tokenizer: Tokenizer,
    files: TokenizerFiles | None,
    seconds: float | None,
) -> Source:
    """As `encoder.source_again`, of supervised records and texts in other files."""
    from packer_cli.supervised.templates import find_template  # noqa: PLC0415

    template = find_template(config.chat_template, files)
    own = by_file_shape(config, shape)
    parts = {name: _composer_parts(*one, files, template)
             for name, one in own.items() if one[0].is_supervised}  # fmt: skip
    # no record was too slow for the run, whose limit may have been another, on a faster machine
    processes = _processes(seconds or 6 * SECONDS_PER_RECORD, parts)
    renders: dict[str | None, _Render] = {name: partial(processes.render, name) for name in parts}
    encoders = _encoders(own, framed_for(tokenizer, config, shape)[0], renders, files)

    def read_again(file: InputFile, part: Slice) -> Iterator[Records]:
        return read_plainly(*own[file.shape], file, part)

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
    used = template if uses_template(shape, config) else None
    specials = specials_of(files, config)
    return shape, config, used, special_tokens(files), end_tokens, specials, engine
