"""From slices to tokens: the source that a run needs, loaded.

Only a run with something to encode calls `prepare`; `source_again` is for comparing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.run_options import EncodingOptions
from packer_cli.config.shapes import Shape
from packer_cli.early import EarlyReference
from packer_cli.errors import DamagedInputError
from packer_cli.inputs.formats import beginning, reader_for
from packer_cli.records import InputFile, Notify, WorkUnit
from packer_cli.run.chosen import Chosen
from packer_cli.run.identity import Run
from packer_cli.run.source import Source, loaded_tokenizer, plain_encode, read_plainly
from packer_cli.run.supervised_source import supervised_again, supervised_source
from packer_cli.tokenization.agreement import FIRST_DOCUMENTS_CHARACTERS
from packer_cli.tokenization.encoding import plain_encoder
from packer_cli.tokenization.locate import TokenizerFiles, highest_id
from packer_cli.tokenization.tokenizer import Tokenizer


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
    plain_read = partial(read_plainly, shape, config)
    if chosen.name is None:
        return Source(plain_read, plain_encoder(None))
    if shape.is_supervised:
        return supervised_source(run, chosen, units, options, early, notify)
    first: Iterable[str] = _first_texts(run.files[units[0].slices[0].file], shape, config)
    tokenizer = loaded_tokenizer(chosen.files, config, options, first, early, notify)
    highest = None
    if shape.kind == "tokens":
        files = chosen.files
        highest = highest_id(files.json) if files else tokenizer.info.vocab_size - 1
    encode = plain_encode(tokenizer, chosen.files, config, highest)
    return Source(plain_read, encode, tokenizer)


def _first_texts(file: InputFile, shape: Shape, config: DocumentConfig) -> list[str]:
    """Some texts from the beginning of the input, to check the fast engine."""
    if shape.kind != "text":
        return []
    reader = reader_for(file.format)
    part = beginning(file, FIRST_DOCUMENTS_CHARACTERS)
    with suppress(DamagedInputError):  # which the unit that reads it meets, too
        for records in reader.read(file, part, shape, config, peek=True):
            return records.texts or []
    return []


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
    if shape.is_supervised and tokenizer is not None:
        return supervised_again(shape, config, tokenizer, files, seconds)
    return Source(partial(read_plainly, shape, config), plain_encode(tokenizer, files, config))
