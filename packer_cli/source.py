"""What reads a slice and makes tokens of it: reader, tokenizer, and all between, made ready."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from packer_cli.config import MIB, PackConfig, RunOptions
from packer_cli.early import EarlyReference
from packer_cli.encoding import Encode, Read, plain_encoder
from packer_cli.errors import UsageError
from packer_cli.readers import reader_for
from packer_cli.readers.byte_streams import STDIN
from packer_cli.records import InputFile, Records, Slice, WorkUnit
from packer_cli.shapes import Shape
from packer_cli.tokenization import Framing, Tokenizer, bytes_tokenizer, load_tokenizer
from packer_cli.tokenization.agreement import FIRST_DOCUMENTS_CHARACTERS
from packer_cli.tokenization.locate import BYTES, TokenizerFiles, choose, locate

if TYPE_CHECKING:
    from packer_cli.supervised.documents import Composer
    from packer_cli.supervised.processes import ComposingProcesses

# Below this, rendering takes no longer than the start of a process.
_WORTH_A_PROCESS = MIB
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """`read` gives the records of a slice, `encode` makes tokens of them.

    template  source of the chat template that was used
    """

    read: Read
    encode: Encode
    tokenizer: Tokenizer | None = None
    tokenizer_files: TokenizerFiles | None = None
    template: str | None = None
    processes: ComposingProcesses | None = field(default=None, repr=False)

    def close(self) -> None:
        if self.tokenizer is not None:
            self.tokenizer.close()
        if self.processes is not None:
            self.processes.close()


def prepare(
    files: list[InputFile],
    units: list[WorkUnit],
    shape: Shape,
    config: PackConfig,
    options: RunOptions,
    tokenizer_name: str | None,
    early: EarlyReference | None,
    notify: Notify,
) -> Source:
    """Make a source for all units. `notify` hears what was chosen. Raises UsageError."""

    def plain_read(file: InputFile, part: Slice) -> Iterator[Records]:
        return reader_for(file.format).read(file, part, shape, config)

    chosen, origin = choose(tokenizer_name)
    if shape.kind == "tokens" and origin == "default":
        notify("input_ids found: no tokenizer needed; padding is id 0")
        return Source(plain_read, plain_encoder(None))
    if chosen == BYTES and origin == "default":
        notify("no --tokenizer given: using the built-in bytes tokenizer (UTF-8 bytes as ids)")
    located = None if chosen == BYTES else locate(chosen)
    if not shape.is_supervised:
        first = _first_texts(files, shape, config)
        tokenizer = _tokenizer(located, config, options, first, early, notify)
        return Source(plain_read, plain_encoder(tokenizer), tokenizer, located)
    return _supervised(files, units, shape, config, options, located, early, notify)


def _supervised(
    files: list[InputFile],
    units: list[WorkUnit],
    shape: Shape,
    config: PackConfig,
    options: RunOptions,
    located: TokenizerFiles | None,
    early: EarlyReference | None,
    notify: Notify,
) -> Source:
    from packer_cli.supervised.encoder import SupervisedEncoder  # noqa: PLC0415
    from packer_cli.supervised.processes import ComposingProcesses  # noqa: PLC0415
    from packer_cli.supervised.templates import find_template, special_tokens  # noqa: PLC0415

    found = find_template(config.chat_template, located)
    template = found[0] if found else None
    end_tokens = tuple(located.added_tokens) if located else ()
    parts = (shape, config, template, special_tokens(located), end_tokens)

    @cache
    def composer() -> Composer:
        from packer_cli.supervised.documents import make_composer  # noqa: PLC0415 jinja2 is slow

        return make_composer(*parts)

    notify(f"records: {shape.described()}")
    renders = shape.is_chat or config.prompt_template == "chat"
    if renders and found is None:
        raise UsageError(
            "messages need a chat template, and the tokenizer has none",
            "give one with --chat-template FILE",
        )
    if renders and found:
        how = "its {% generation %} tags" if _GENERATION.search(found[0]) else "its turns"
        told = "" if config.train_on == "all" else f", told by {how}"
        notify(f"chat template: {found[1]}; trained on: {config.train_on}{told}")
    processes = None
    total = sum(part.weight for unit in units for part in unit.slices)
    is_stdin = any(file.path == STDIN for file in files)  # only this process has it
    first: list[str] = []
    if renders and options.workers > 1 and total >= _WORTH_A_PROCESS and not is_stdin:
        processes = ComposingProcesses(*parts)
        for unit in units[: options.workers]:
            processes.start(files[unit.slices[0].file], unit.slices[0])
    else:
        first = _first_composed(files, composer())
    try:
        tokenizer = _tokenizer(located, config, options, first, early, notify)
    except BaseException:
        if processes is not None:
            processes.close()
        raise
    read = processes.read if processes else composer().read
    encode = SupervisedEncoder(composer, tokenizer)
    return Source(read, encode, tokenizer, located, template, processes)


def _tokenizer(
    files: TokenizerFiles | None,
    config: PackConfig,
    options: RunOptions,
    first_documents: list[str],
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


def framing_of(config: PackConfig) -> Framing:
    """What goes around every document; `config` as `for_shape` gives it."""
    return Framing(config.add_bos, bool(config.add_eos), config.eos_token, config.separator)


def encode_again(
    shape: Shape, config: PackConfig, tokenizer: Tokenizer | None, files: TokenizerFiles | None
) -> Encode:
    """What makes tokens of records as readers give them, whatever the shape: to compare."""
    if not shape.is_supervised or tokenizer is None:
        return plain_encoder(tokenizer)
    from packer_cli.supervised.documents import make_composer  # noqa: PLC0415 jinja2 is slow
    from packer_cli.supervised.encoder import SupervisedEncoder  # noqa: PLC0415
    from packer_cli.supervised.templates import find_template, special_tokens  # noqa: PLC0415

    found = find_template(config.chat_template, files)
    end_tokens = tuple(files.added_tokens) if files else ()
    template = found[0] if found else None
    composer = make_composer(shape, config, template, special_tokens(files), end_tokens)
    encode = SupervisedEncoder(lambda: composer, tokenizer)
    return lambda records, file, counts: encode(composer.compose(records), file, counts)


def _beginning(file: InputFile) -> Slice:
    stop = None if file.format == "parquet" else FIRST_DOCUMENTS_CHARACTERS
    return Slice(file.index, 0, stop, 0)


def _first_texts(files: list[InputFile], shape: Shape, config: PackConfig) -> list[str]:
    """Some texts from the beginning of the input, for checking the fast engine."""
    if shape.kind != "text":
        return []
    reader = reader_for(files[0].format)
    for records in reader.read(files[0], _beginning(files[0]), shape, config, peek=True):
        return records.texts or []
    return []


def _first_composed(files: list[InputFile], composer: Composer) -> list[str]:
    """The same for records that must be composed first; only where a few can be read alone."""
    if files[0].format != "jsonl" or files[0].path == STDIN:
        return []
    for records in composer.read(files[0], _beginning(files[0])):
        return records.texts or []
    return []
