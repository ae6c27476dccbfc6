"""What documents that are tokens already need: the tokenizer's copies and figures, none loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import options_of
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.inputs.tokenized import TokenizedInputs, opened, shape_of
from packer_cli.mixing.units import choice_of
from packer_cli.records import HIGHEST_ID, InputFile, Notify
from packer_cli.result.layout import TOKENIZER, TOKENIZER_FILES
from packer_cli.result.manifest import TokenizedManifest
from packer_cli.result.manifest_file import as_named, load_tokenized
from packer_cli.result.tokenized import AGAIN
from packer_cli.run import commits
from packer_cli.run.chosen import Chosen
from packer_cli.run.identity import Run
from packer_cli.run.source import Source
from packer_cli.tokenization.encoding import plain_encoder
from packer_cli.tokenization.locate import choose, highest_id
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
        raise UsageError(f"{as_named(files[0].path)}: is tokenized already", "pack it: packer pack")
    _refuse_late(files[0], config, tokenizer)
    folder = Path(files[0].path).parent
    facts = load_tokenized(folder)
    copies = {name: _kept(folder, facts, name)
              for name in TOKENIZER_FILES if name in facts.side_files}  # fmt: skip
    name = facts.tokenizer.source if facts.tokenizer else None
    hashes = {name: facts.side_files[name] for name in copies}
    notify(f"documents are tokenized already, with {name or 'no tokenizer'}")
    shape = shape_of(files)
    return shape, Chosen(name, copies=copies, copied_hashes=hashes)


def _kept(folder: Path, facts: TokenizedManifest, name: str) -> bytes:
    """What a tokenized directory keeps of its tokenizer. DataError where that is another by now."""
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise from_os_error(error, folder / name, "read") from error
    found, expected = hashlib.sha256(data).hexdigest(), facts.side_files[name]
    if found != expected:
        raise DataError(
            f"{folder / name}: its sha256 is {found}, the manifest says {expected}", AGAIN
        )
    return data


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
        name = as_named(file.path)
        raise UsageError(
            f"{', '.join(late)}: {name} is tokenized already, and where its turns are is not "
            "known any more"
            if late == ["--overlong truncate-turns"]
            else f"{', '.join(late)}: {name} is tokenized already",
            "give it to packer tokenize, or leave it out",
        )


def tokenized_source(run: Run, work: Path) -> Source:
    """The documents of the run's inputs, in the order of its seed. Inputs are not opened that only
    units read that an update keeps: they need not be there any more.
    """
    seed = run.row_config.seed if run.config.documents_shuffled else None
    records = ((unit, commits.read_unit(work, unit)) for unit in run.units)
    read = {part.file for unit, record in records if record is None or not record.reused
            for part in unit.slices}  # fmt: skip
    if run.row_config.mixture:
        read = {file.index for file in run.files}
    files = [run.files[index] for index in sorted(read)]
    choice = choice_of(run.files, run.config)
    pools = choice.pools if choice else None
    inputs = TokenizedInputs(files, seed, _highest_id(files[0]), pools)
    return Source(
        _nothing,
        plain_encoder(None),
        tokenized=inputs,
        info=_info([one.tokenizer for one in inputs.facts]),
    )


def _highest_id(file: InputFile) -> int:
    """The highest id of the tokenizer that made an input."""
    folder, facts = Path(file.path).parent, opened(file).facts
    if TOKENIZER in facts.side_files:
        return highest_id(_kept(folder, facts, TOKENIZER))
    return facts.tokenizer.vocab_size - 1 if facts.tokenizer else HIGHEST_ID


def _nothing(file: InputFile, part: Any) -> Any:
    raise NotImplementedError(f"{file.path}: its documents are tokens already")


def _info(tokenizers: Sequence[Any]) -> TokenizerInfo | None:
    """As the tokenizer itself would give it; what is around documents, only if all agree."""
    if tokenizers[0] is None:
        return None
    first = tokenizers[0]
    around: dict[str, Any] = dict.fromkeys(("prefix", "suffix"))
    for name in around:
        values = [getattr(one, name) for one in tokenizers]
        if values[0] is not UNSET and all(value == values[0] for value in values):
            around[name] = tuple(values[0])
    return TokenizerInfo(**(asdict(first) | around))
