"""What documents that are tokens already need: the tokenizer's copies and figures, none loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import options_of
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import UsageError, from_os_error
from packer_cli.inputs.tokenized import TokenizedInputs, shape_of
from packer_cli.records import InputFile
from packer_cli.result.layout import TOKENIZER_FILES
from packer_cli.result.manifest import load_tokenized
from packer_cli.run.encoder import Chosen, Notify, Source
from packer_cli.run.identity import Run
from packer_cli.tokenization.encoding import plain_encoder
from packer_cli.tokenization.locate import choose
from packer_cli.tokenization.tokenizer import TokenizerInfo

# Those that make sense for documents that are tokens already.
_STILL = {"unit_bytes", "shard_bytes"}


def choose_tokenized(
    files: Sequence[InputFile], config: DocumentConfig, tokenizer: str | None, notify: Notify
) -> tuple[Shape, Chosen]:
    """What the records are, and the tokenizer that has made the tokens. UsageError for options
    that come too late.
    """
    if not isinstance(config, PackConfig):
        raise UsageError(f"{files[0].path}: is tokenized already", "pack it: packer pack")
    _refuse_late(files[0], config, tokenizer)
    folder = Path(files[0].path).parent
    facts = load_tokenized(folder)
    try:
        copies = {
            name: (folder / name).read_bytes()
            for name in TOKENIZER_FILES
            if name in facts.side_files
        }
    except OSError as error:
        raise from_os_error(error, folder, "read") from error
    name = facts.tokenizer.source if facts.tokenizer else None
    hashes = {name: facts.side_files[name] for name in copies}
    notify(f"documents are tokenized already, with {name or 'no tokenizer'}")
    shape = shape_of(files, config.overlong)
    return shape, Chosen(name, copies=copies, copied_hashes=hashes)


def refuse_view(config: DocumentConfig) -> None:
    """UsageError for a view of inputs that hold no tokens."""
    if isinstance(config, PackConfig) and config.view:
        raise UsageError(
            "--view: rows can only refer to stored tokens, and the inputs are not tokenized",
            "packer tokenize INPUT -o DIR first, then packer pack DIR --view",
        )


def _refuse_late(file: InputFile, config: DocumentConfig, tokenizer: str | None) -> None:
    late = []
    if tokenizer is not None and choose(tokenizer)[1] == "--tokenizer":
        late.append("--tokenizer")
    defaults = {one.name: one.default for one in fields(config)}
    for name, option in options_of(DocumentConfig).items():
        if name not in _STILL and getattr(config, name) != defaults[name]:
            late.append(option.name(name))
    if isinstance(config, PackConfig) and config.overlong == "truncate-turns":
        late.append("--overlong truncate-turns")
    if late:
        raise UsageError(
            f"{', '.join(late)}: {file.path} is tokenized already, and where its turns are is not "
            "known any more"
            if late == ["--overlong truncate-turns"]
            else f"{', '.join(late)}: {file.path} is tokenized already",
            "give it to packer tokenize, or leave it out",
        )


def tokenized_source(run: Run) -> Source:
    """The documents of the run's inputs, in the order of its seed."""
    seed = run.row_config.seed if run.config.documents_shuffled else None
    inputs = TokenizedInputs(run.files, seed)
    return Source(
        _nothing, plain_encoder(None), tokenized=inputs, info=_info(inputs.facts[0].tokenizer)
    )


def _nothing(file: InputFile, part: Any) -> Any:
    raise NotImplementedError(f"{file.path}: its documents are tokens already")


def _info(tokenizer: Any) -> TokenizerInfo | None:
    """As the tokenizer itself would give it."""
    if tokenizer is None:
        return None
    around = {name: tuple(getattr(tokenizer, name) or ()) for name in ("prefix", "suffix")}
    return TokenizerInfo(**(asdict(tokenizer) | around))
