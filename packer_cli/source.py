"""What reads a slice and makes tokens of it: reader, tokenizer, and all between.

A tokenizer and a template are chosen first (`choose_encoding`): runs are told apart by them.
Loading them and all else, `prepare`, is left to those who have something to encode.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packer_cli.config import MIB, PackConfig, RunOptions
from packer_cli.early import EarlyReference
from packer_cli.encoding import Encode, Read, plain_encoder
from packer_cli.errors import UsageError
from packer_cli.readers import reader_for
from packer_cli.readers.byte_streams import STDIN
from packer_cli.records import InputFile, Records, Slice, WorkUnit
from packer_cli.run import Run
from packer_cli.shapes import Shape
from packer_cli.tokenization import Framing, Tokenizer, bytes_tokenizer, load_tokenizer
from packer_cli.tokenization.agreement import FIRST_DOCUMENTS_CHARACTERS
from packer_cli.tokenization.locate import (
    BYTES,
    TEMPLATE,
    TOOL_TEMPLATE,
    TokenizerFiles,
    choose,
    highest_id,
    locate,
)

if TYPE_CHECKING:
    from packer_cli.supervised.documents import Composer
    from packer_cli.supervised.processes import ComposingProcesses
    from packer_cli.supervised.templates import TemplateChoice

# Below this, rendering takes no longer than the start of a process.
_WORTH_A_PROCESS = MIB
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Chosen:
    """What makes tokens of records, before anything of it is loaded.

    name      of the tokenizer; None where none is needed
    files     of the tokenizer; None for the built-in one
    template  the chat template, where one is used
    """

    name: str | None
    files: TokenizerFiles | None = None
    template: TemplateChoice | None = None

    @property
    def side_files(self) -> dict[str, bytes]:
        """What a result keeps of them, so that it explains itself."""
        found: dict[str, bytes] = {}
        if self.files is not None:
            found = {"tokenizer.json": self.files.json, **self.files.companions}
        if self.template is not None:
            found[TEMPLATE] = self.template.source.encode()
            found.pop(TOOL_TEMPLATE, None)
            if self.template.tool_use is not None:
                found[TOOL_TEMPLATE] = self.template.tool_use.encode()
        return found

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The sha256 of each side file; that of tokenizer.json, megabytes, is known already."""
        known = {} if self.files is None else {"tokenizer.json": self.files.sha256}
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
    """`read` gives the records of a slice, `encode` makes tokens of them."""

    read: Read
    encode: Encode
    tokenizer: Tokenizer | None = None
    processes: ComposingProcesses | None = field(default=None, repr=False)

    def close(self) -> None:
        if self.tokenizer is not None:
            self.tokenizer.close()
        if self.processes is not None:
            self.processes.close()


def choose_encoding(
    shape: Shape, config: PackConfig, tokenizer: str | None, notify: Notify
) -> Chosen:
    """What `tokenizer` and the options name. `notify` hears what was chosen. Raises UsageError."""
    chosen, origin = choose(tokenizer)
    if shape.kind == "tokens" and origin == "default":
        notify("input_ids found: no tokenizer needed; padding is id 0")
        return Chosen(None)
    if chosen == BYTES and origin == "default":
        notify("no --tokenizer given: using the built-in bytes tokenizer (UTF-8 bytes as ids)")
    files = None if chosen == BYTES else locate(chosen)
    if not shape.is_supervised:
        return Chosen(chosen, files)
    from packer_cli.supervised.templates import find_template  # noqa: PLC0415

    found = find_template(config.chat_template, files)
    notify(f"records: {shape.described()}")
    renders = shape.is_chat or config.prompt_template == "chat"
    if renders and found is None:
        raise UsageError(
            "messages need a chat template, and the tokenizer has none",
            "give one with --chat-template FILE",
        )
    if renders and found:
        how = "its {% generation %} tags" if _GENERATION.search(found.source) else "its turns"
        told = "" if config.train_on == "all" else f", told by {how}"
        notify(f"chat template: {found.origin}; trained on: {config.train_on}{told}")
    return Chosen(chosen, files, found)


def prepare(
    run: Run,
    chosen: Chosen,
    units: Sequence[WorkUnit],
    options: RunOptions,
    early: EarlyReference | None,
    notify: Notify,
) -> Source:
    """Load what `run` needs for `units`. `notify` hears which engine is used. Raises UsageError."""
    shape, config = run.shape, run.config

    def plain_read(file: InputFile, part: Slice) -> Iterator[Records]:
        return reader_for(file.format).read(file, part, shape, config)

    if chosen.name is None:
        return Source(plain_read, plain_encoder(None))
    if shape.is_supervised:
        return _supervised(run, chosen, units, options, early, notify)
    first = _first_texts(run.files[units[0].slices[0].file], shape, config)
    tokenizer = _tokenizer(chosen.files, config, options, first, early, notify)
    highest = None
    if shape.kind == "tokens":
        files = chosen.files
        highest = highest_id(files.json) if files else tokenizer.info.vocab_size - 1
    return Source(plain_read, plain_encoder(tokenizer, highest), tokenizer)


def _supervised(
    run: Run,
    chosen: Chosen,
    units: Sequence[WorkUnit],
    options: RunOptions,
    early: EarlyReference | None,
    notify: Notify,
) -> Source:
    from packer_cli.supervised.encoder import SupervisedEncoder  # noqa: PLC0415
    from packer_cli.supervised.processes import ComposingProcesses  # noqa: PLC0415

    shape, config, located = run.shape, run.config, chosen.files
    parts = _composer_parts(shape, config, located, chosen.template)

    @cache
    def composer() -> Composer:
        from packer_cli.supervised.documents import make_composer  # noqa: PLC0415 jinja2 is slow

        return make_composer(*parts)

    renders = shape.is_chat or config.prompt_template == "chat"
    processes = None
    total = sum(part.weight for unit in units for part in unit.slices)
    first: list[str] = []
    if renders and options.workers > 1 and total >= _WORTH_A_PROCESS and run.resumable:
        processes = ComposingProcesses(*parts)
        for unit in units[: options.workers]:
            processes.start(run.files[unit.slices[0].file], unit.slices[0])
    else:
        first = _first_composed(run.files[units[0].slices[0].file], composer())
    try:
        tokenizer = _tokenizer(located, config, options, first, early, notify)
    except BaseException:
        if processes is not None:
            processes.close()
        raise
    read = processes.read if processes else composer().read
    return Source(read, SupervisedEncoder(composer, tokenizer), tokenizer, processes)


def _composer_parts(
    shape: Shape,
    config: PackConfig,
    files: TokenizerFiles | None,
    template: TemplateChoice | None,
) -> tuple[Any, ...]:
    """The arguments of `make_composer`."""
    from packer_cli.supervised.templates import special_tokens  # noqa: PLC0415

    end_tokens = tuple(files.added_tokens) if files else ()
    return shape, config, template, special_tokens(files), end_tokens


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
    from packer_cli.supervised.templates import find_template  # noqa: PLC0415

    found = find_template(config.chat_template, files)
    composer = make_composer(*_composer_parts(shape, config, files, found))
    encode = SupervisedEncoder(lambda: composer, tokenizer)
    return lambda records, file, counts: encode(composer.compose(records), file, counts)


def _beginning(file: InputFile) -> Slice:
    stop = None if file.format == "parquet" else FIRST_DOCUMENTS_CHARACTERS
    return Slice(file.index, 0, stop, 0)


def _first_texts(file: InputFile, shape: Shape, config: PackConfig) -> list[str]:
    """Some texts from the beginning of the input, for checking the fast engine."""
    if shape.kind != "text":
        return []
    reader = reader_for(file.format)
    for records in reader.read(file, _beginning(file), shape, config, peek=True):
        return records.texts or []
    return []


def _first_composed(file: InputFile, composer: Composer) -> list[str]:
    """The same for records that must be composed first; only where a few can be read alone."""
    if file.format != "jsonl" or file.path == STDIN:
        return []
    for records in composer.read(file, _beginning(file)):
        return records.texts or []
    return []
