"""What makes tokens of a run's slices, and what all kinds of it are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.run_options import EncodingOptions
from packer_cli.config.shape_rules import by_file_shape
from packer_cli.config.shapes import Shape
from packer_cli.early import EarlyReference
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import TokenizedInputs
from packer_cli.records import InputFile, Notify, Records, Slice, turn_position
from packer_cli.tokenization.encoding import Encode, Encoded, Read, plain_encoder
from packer_cli.tokenization.fill_in_middle import fill_in_middle
from packer_cli.tokenization.locate import TokenizerFiles
from packer_cli.tokenization.specials import Specials
from packer_cli.tokenization.tokenizer import (
    Framing,
    Tokenizer,
    TokenizerInfo,
    bytes_tokenizer,
    load_tokenizer,
)

if TYPE_CHECKING:
    from packer_cli.supervised.processes import ComposingProcesses


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


def read_plainly(
    shape: Shape, config: DocumentConfig, file: InputFile, part: Slice
) -> Iterator[Records]:
    """The records of a slice, as they are stored."""
    return reader_for(file.format).read(file, part, shape, config)


def plain_encode(
    tokenizer: Tokenizer | None,
    files: TokenizerFiles | None,
    config: DocumentConfig,
    highest: int | None = None,
) -> Encode:
    """Makes tokens of texts. `highest`: the highest id, where records are tokens already."""
    fim = fill_in_middle(config, files)
    encode = plain_encoder(tokenizer, highest, specials_of(files, config), fim)
    return _counting_turns(encode) if config.turns == "each" else encode


def _counting_turns(encode: Encode) -> Encode:
    """The same beside conversations that become a document for each answer."""

    def encode_one_each(records: Records, file: InputFile) -> Encoded:
        encoded = encode(records, file)
        position = turn_position(encoded.batch.position, 0)
        return encoded._replace(batch=replace(encoded.batch, position=position))

    return encode_one_each


def specials_of(files: TokenizerFiles | None, config: DocumentConfig) -> Specials:
    """What is done with names of special tokens in texts."""
    return Specials(files.specials if files else (), config.special_tokens_in_text)


def loaded_tokenizer(
    files: TokenizerFiles | None,
    config: DocumentConfig,
    options: EncodingOptions,
    first_documents: Iterable[str],
    early: EarlyReference | None,
    notify: Notify,
) -> Tokenizer:
    """The tokenizer of `files`; the built-in one for None. Raises UsageError."""
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


def uses_template(shape: Shape, config: DocumentConfig) -> bool:
    """Whether a chat template makes the texts; `config` as `for_shape` gives it."""
    return shape.is_chat or config.prompt_template == "chat"
