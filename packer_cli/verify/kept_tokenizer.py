"""The tokenizer that a result keeps: to encode again, and to hold the manifest against."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PackedDirectory
from packer_cli.run.encoder import framing_of
from packer_cli.tokenization.locate import TokenizerFiles, locate
from packer_cli.tokenization.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer


def kept_tokenizer(
    packed: PackedDirectory, shape: Shape, config: PackConfig, *, fast: bool
) -> tuple[Tokenizer | None, TokenizerFiles | None]:
    """The tokenizer and its files. With the reference engine, whose own offsets say what is
    trained on, unless it is to be `fast` and everything is trained on. Raises UsageError and
    DataError.
    """
    if packed.facts.tokenizer is None:
        return None, None
    framing, supervised = framing_of(config), shape.is_supervised
    if not packed.facts.tokenizer.sha256:
        tokenizer, files = bytes_tokenizer(framing), None
    else:
        files = locate(str(packed.path))
        backend = "auto" if fast and not supervised else "tokenizers"
        tokenizer = load_tokenizer(files, backend=backend, framing=framing)
    return tokenizer, files


def other_tokenizer(manifest: Manifest, tokenizer: Tokenizer | None) -> Iterator[str]:
    """What the manifest says of the tokenizer that it is not."""
    if tokenizer is None:
        return
    listed = manifest.document["tokenizer"]
    info = msgspec.json.decode(msgspec.json.encode(tokenizer.info.as_json()))
    # the source is where it was, not what it is; older results do not say all of it
    for name in sorted(info.keys() & listed.keys() - {"source"}):
        value = info[name]
        if listed[name] != value:
            yield f"tokenizer: {name} is {listed[name]}, that of its files is {value}"
