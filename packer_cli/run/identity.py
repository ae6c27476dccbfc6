"""Identify a run by its inputs, options, tokenizer and units. Equal runs write equal bytes.

    RunPlan -> .packer/run.json, before any unit is packed

Each process that packs a unit (a worker, a rank, a Ray worker, the same command after a crash)
works from an equal RunPlan, or gets an error that says how the two differ. A plan of a million
units takes seconds to write and to read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import packer_cli
from packer_cli import storage
from packer_cli.errors import InternalError, UsageError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.mixing.units import work_units
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import as_option, options_of
from packer_cli.options.options import Mixture, PackConfig
from packer_cli.options.shapes import Shape
from packer_cli.records import InputFile, WorkUnit
from packer_cli.result.layout import TEMPLATE, TOKENIZER, TOOL_TEMPLATE
from packer_cli.result.manifest import LIMITS, TOKENIZED

if TYPE_CHECKING:
    from packer_cli.chat.templates import TemplateChoice
    from packer_cli.tokenization.locate import TokenizerFiles

RUN = "run.json"
OTHER_ORDER = "the inputs are named in another order"
_MOST_NAMED = 3
_KEYS = {
    "validation_share": "[validation] share",
    "validation_documents": "[validation] documents",
    "held_out": "is in [validation]:",
}


@dataclass(frozen=True)
class TokenizerSelection:
    """Tokenizer and chat template of a run, not loaded.

    name      the tokenizer as the user named it; None if the inputs hold token ids
    files     files of the tokenizer; None for the built-in one
    template  the chat template, if one is used
    copies    contents of side files, by name, if another run has selected them
    known     sha256 of side files, which are not hashed again
    """

    name: str | None
    files: TokenizerFiles | None = None
    template: TemplateChoice | None = None
    copies: dict[str, bytes] = field(default_factory=dict, repr=False)
    known: dict[str, str] = field(default_factory=dict)

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
        """The sha256 of each side file, by name."""
        known = self.known | ({TOKENIZER: self.files.sha256} if self.files else {})
        new = {n: content for n, content in self.side_files.items() if n not in known}
        return known | {n: hashlib.sha256(content).hexdigest() for n, content in new.items()}


@dataclass(frozen=True)
class RunPlan:
    """All that a run's bytes depend on.

    config  as `shape_rules.for_shape` gives it
    files   by index
    units   by ascending index
    """

    config: DocumentConfig
    shape: Shape
    files: tuple[InputFile, ...]
    units: tuple[WorkUnit, ...]
    chosen: TokenizerSelection
    packer_version: str = field(default_factory=lambda: packer_cli.__version__)

    @property
    def row_config(self) -> PackConfig:
        """Its options, of a run that packs rows."""
        if not isinstance(self.config, PackConfig):
            raise InternalError("a run that tokenizes has no options of rows")
        return self.config

    @property
    def is_to_tokenize(self) -> bool:
        """True if it writes documents rather than rows."""
        return not isinstance(self.config, PackConfig)

    @property
    def is_tokenized(self) -> bool:
        """True if its inputs are tokenized directories."""
        return any(file.format == TOKENIZED for file in self.files)

    @property
    def resumable(self) -> bool:
        """True if its inputs can be read a second time."""
        return all(file.path != STDIN for file in self.files)

    @cached_property
    def identity(self) -> str:
        """Digest of all that the bytes of its units depend on, but for their slices."""
        options = {one.name: getattr(self.config, one.name) for one in fields(self.config)}
        files = [
            (one.known_as, one.format, one.compression, one.size, one.version,
             one.shape)
            for one in self.files
        ]  # fmt: skip
        content = (
            self.packer_version, {n: one for n, one in options.items() if n not in LIMITS},
            self.shape, files, sorted(self.chosen.hashes.items()),
            None if TOKENIZER in self.chosen.hashes else self.chosen.name,
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()

    def cut(self) -> RunPlan:
        """The run with its inputs cut into work units."""
        return replace(self, units=tuple(work_units(self.files, self.config)))

    def to_bytes(self) -> bytes:
        """The content of its record."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        del own["chosen"]
        own |= {"tokenizer": self.chosen.name, "side_files": self.chosen.hashes}
        return sealed(msgspec.json.encode(own))


def load_run(path: Path) -> RunPlan | None:
    """The run that `to_bytes` wrote; None when there is none that this packer can read."""
    try:
        content = msgspec.json.decode(unsealed(storage.read_bytes(path)))
        kinds: dict[str, Any] = {
            "config": PackConfig if "max_length" in content["config"] else DocumentConfig,
            "shape": Shape, "files": tuple[InputFile, ...], "units": tuple[WorkUnit, ...],
            "packer_version": str, "tokenizer": str | None, "side_files": dict[str, str],
        }  # fmt: skip
        own = {name: msgspec.convert(content[name], kind) for name, kind in kinds.items()}
    except (OSError, LookupError, ValueError, TypeError, RecursionError, UsageError):
        return None
    return RunPlan(
        chosen=TokenizerSelection(own.pop("tokenizer"), known=own.pop("side_files")), **own
    )


def sealed(content: bytes) -> bytes:
    """The content, after a first line that holds its checksum."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unsealed(data: bytes) -> bytes:
    """Return the data that was sealed. Raises ValueError if it has changed."""
    seal, _, content = data.partition(b"\n")
    if seal != hashlib.sha256(content).hexdigest().encode():
        raise ValueError("not what was written")
    return content


def differences(old: RunPlan, new: RunPlan) -> list[str]:
    """Describe how runs differ, in phrases for users; [] if their identities are equal."""
    if old.identity == new.identity:
        return []
    differing = differing_origin(old, new)
    if old.shape != new.shape:
        differing.append(f"records were {old.shape.described()}, are now {new.shape.described()}")
    return differing + differing_files(old.files, new.files)


def differing_origin(old: RunPlan, new: RunPlan, *, limits: bool = False) -> list[str]:
    """Describe how runs differ in packer, options and tokenizer, which may change bytes.

    `limits`: as in `differing_options`.
    """
    then, now = old.packer_version, new.packer_version
    differing = [f"packer was {then}, is now {now}"] if then != now else []
    differing += differing_options(old.config, new.config, limits=limits)
    return differing + differing_tokenizers(old.chosen, new.chosen)


def refuse_other_packer(directory: Path, then: str, tip: str) -> None:
    """Raise UsageError for a result of another version, which may make other bytes."""
    now = str(packer_cli.__version__)
    if then != now:
        raise UsageError(
            f"{directory}: was packed by packer {then}, and this is packer {now}, which may make "
            "other documents and rows of the same inputs",
            tip,
        )


def differing_options(
    old: DocumentConfig, new: DocumentConfig, *, limits: bool = False
) -> list[str]:
    """List the options that differ, each as "--name was OLD, is now NEW".

    `limits`: include options that change no unit's bytes.
    """
    differing = []
    if type(old) is not type(new):
        kinds = "documents were tokenized", "rows were packed"
        return [f"{kinds[isinstance(old, PackConfig)]}, now it is the other"]
    for item in fields(new):
        before, now = getattr(old, item.name), getattr(new, item.name)
        if item.name == "mixture":
            differing += _differing_amounts(before, now)
        elif before != now and (limits or item.name not in LIMITS):
            name = option_named(item.name)
            differing.append(f"{name} was {_shown(before)}, is now {_shown(now)}")
    return differing


def _differing_amounts(old: Mixture | None, new: Mixture | None) -> list[str]:
    """List the keys of a recipe that differ, each with its source."""
    if old is None or new is None:
        return [] if old is new else [f"it was {'not ' if new else ''}packed from a recipe"]
    before, now = ({one.name: one for one in its.sources} for its in (old, new))
    differing = [f'source "{name}" is not named now' for name in before if name not in now]
    differing += [f'source "{name}" is new' for name in now if name not in before]
    sources = [(f'source "{name}": ', before[name], now[name]) for name in now if name in before]
    for place, one, other in [*sources, ("", old, new)]:
        differing += [
            f"{place}{_KEYS.get(key, key)} {_shown(getattr(other, key))}, was {_shown(value)}"
            for key, value in vars(one).items()
            if key != "sources" and value != getattr(other, key)
        ]
    if not differing and [*before] != [*now]:
        return ["the sources are named in another order"]
    return differing


def option_named(field: str) -> str:
    """Return the option of a field as a user writes it."""
    option = options_of(PackConfig).get(field)
    return option.flag if option else as_option(field)


def differing_tokenizers(old: TokenizerSelection, new: TokenizerSelection) -> list[str]:
    """Describe how tokenizers and templates differ in the contents of their files."""
    names = old.hashes.keys() | new.hashes.keys()
    differ = sorted(name for name in names if old.hashes.get(name) != new.hashes.get(name))
    if differ:
        return [f"another tokenizer: {' and '.join(differ)} differ"]
    # it has no files of its own, so its name identifies it
    if old.name != new.name and TOKENIZER not in new.hashes:
        return [f"the tokenizer was {_shown(old.name)}, is now {_shown(new.name)}"]
    return []


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ",".join("=".join(v) if isinstance(v, tuple) else v for v in value) or "not given"
    return str(value)


def _may_exist(path: str) -> bool:
    """True if an input exists; for URLs, which would take a request, this is assumed."""
    return path == STDIN or storage.is_url(path) or storage.kind(path) is not None


def differing_files(old: Sequence[InputFile], new: Sequence[InputFile]) -> list[str]:
    """Describe how inputs differ. `old`: inputs without a format if that is unknown."""
    before, now = ({file.known_as: file for file in files} for files in (old, new))
    differing = [
        f"{file.path} {'is not named now' if _may_exist(file.path) else 'is gone'}"
        for path, file in before.items()
        if path not in now
    ]
    differing += [f"{file.path} is new" for path, file in now.items() if path not in before]
    for path in before.keys() & now.keys():
        a, b = before[path], now[path]
        if a.format and (a.format, a.compression) != (b.format, b.compression):
            differing.append(f"{b.path} was read as {a.format}, is now {b.format}")
        elif a.has_changed(b):
            sizes = f": {a.size:,} bytes then, {b.size:,} now" if a.size != b.size else ""
            differing.append(f"{b.path} has changed{sizes}")
    if not differing and [*before] != [*now]:
        differing.append(OTHER_ORDER)
    if len(differing) > _MOST_NAMED:
        differing[_MOST_NAMED:] = [f"and {len(differing) - _MOST_NAMED} more inputs differ"]
    return sorted(differing[:_MOST_NAMED]) + differing[_MOST_NAMED:]
