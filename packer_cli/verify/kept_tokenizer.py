"""The tokenizer in a result: to encode with again, and to check the manifest against."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shape_rules import by_file_shape
from packer_cli.config.shapes import Shape
from packer_cli.result.manifest import Result
from packer_cli.run.source import framing_of
from packer_cli.tokenization.locate import TokenizerFiles, locate
from packer_cli.tokenization.tokenizer import (
    Tokenizer,
    TokenizerInfo,
    bytes_tokenizer,
    load_tokenizer,
)
from packer_cli.verify.reading import Stored


def kept_tokenizer(
    stored: Stored, shape: Shape, config: DocumentConfig, *, fast: bool
) -> tuple[Tokenizer | None, TokenizerFiles | None]:
    """The tokenizer and its files.

    It uses the reference engine, whose own offsets show what is trained on, unless `fast` is set
    and everything is trained on. Raises UsageError and DataError.
    """
    if stored.facts.tokenizer is None:
        return None, None
    first = next(iter(by_file_shape(config, shape).values()))[1]
    framing, supervised = framing_of(first), shape.is_supervised
    if not stored.facts.tokenizer.sha256:
        tokenizer, files = bytes_tokenizer(framing), None
    else:
        files = locate(str(stored.path))
        backend = "auto" if fast and not supervised else "tokenizers"
        tokenizer = load_tokenizer(files, backend=backend, framing=framing)
    return tokenizer, files


def other_tokenizer(manifest: Result, own: TokenizerInfo | None) -> Iterator[str]:
    """The errors in the manifest's description of the tokenizer."""
    if own is None:
        return
    listed = manifest.document["tokenizer"]
    info = msgspec.json.decode(msgspec.json.encode(own.as_json()))
    # the source says where it was, not what it is; older results lack some of the names
    for name in sorted(info.keys() & listed.keys() - {"source"}):
        value = info[name]
        if listed[name] != value:
            yield f"tokenizer: {name} is {listed[name]}, its files give {value}"
