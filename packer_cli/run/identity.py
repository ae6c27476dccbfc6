"""What a run is: its inputs, options, tokenizer and units. Equal runs write equal bytes.

    Run -> .packer/run.json, before any unit is packed

Whoever packs a unit (this process, a rank, a Ray worker, the same command after a crash) works
from an equal Run, or gets an error that says how the two differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

import packer_cli
from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import InternalError, UsageError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.records import InputFile, WorkUnit
from packer_cli.result.layout import TOKENIZER
from packer_cli.result.manifest import TOKENIZED
from packer_cli.result.manifest_check import LIMITS

RUN = "run.json"
IsSame = Callable[[InputFile, InputFile], bool]
_OPTIONS = {
    "fields": "--field", "roles": "--role", "template_args": "--template-arg", "add_bos": "--bos",
    "add_eos": "--eos",
}  # fmt: skip
_MOST_NAMED = 3


@dataclass(frozen=True)
class Run:
    """All that a run's bytes depend on.

    config      as `shape_rules.for_shape` gives it
    files       by index; those without a format were removed since the last update
    units       by ascending index
    tokenizer   as it was named; None where none is needed
    side_files  name -> sha256 of what the result keeps of the tokenizer and the chat template
    """

    config: DocumentConfig
    shape: Shape
    files: tuple[InputFile, ...]
    units: tuple[WorkUnit, ...]
    tokenizer: str | None
    side_files: dict[str, str]
    packer_version: str = packer_cli.__version__

    @property
    def row_config(self) -> PackConfig:
        """Its options, of a run that packs rows."""
        if not isinstance(self.config, PackConfig):
            raise InternalError("a run that tokenizes has no options of rows")
        return self.config

    @property
    def is_to_tokenize(self) -> bool:
        """Whether it writes documents rather than rows."""
        return not isinstance(self.config, PackConfig)

    @property
    def is_tokenized(self) -> bool:
        """Whether its inputs are tokenized directories."""
        return any(file.format == TOKENIZED for file in self.files)

    @property
    def resumable(self) -> bool:
        """Whether its inputs can be read a second time."""
        return all(file.path != STDIN for file in self.files)

    def to_bytes(self) -> bytes:
        return sealed(msgspec.json.encode(self))


def load_run(path: Path) -> Run | None:
    """The run that `to_bytes` wrote; None when there is none that this packer can read."""
    try:
        return run_of(msgspec.json.decode(unsealed(path.read_bytes())))
    except (OSError, LookupError, ValueError, TypeError, RecursionError, UsageError):
        return None


def run_of(content: dict[str, Any]) -> Run:
    """The run that these JSON values describe. Raises LookupError, ValueError, TypeError or
    UsageError when they describe none.
    """
    kind = PackConfig if "max_length" in content["config"] else DocumentConfig
    config = msgspec.convert(content["config"], kind)
    return replace(msgspec.convert(content, Run), config=config)


def sealed(content: bytes) -> bytes:
    """The content, after a first line that holds its checksum."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unsealed(data: bytes) -> bytes:
    """The data that was sealed. Raises ValueError when it has changed since."""
    seal, _, content = data.partition(b"\n")
    if seal != hashlib.sha256(content).hexdigest().encode():
        raise ValueError("not what was written")
    return content


def differences(old: Run, new: Run, is_same: IsSame) -> list[str]:
    """How the runs differ, for people; [] when units of the one are units of the other.

    `is_same`: whether the other run would pack the same from an input of the first.
    """
    differing = differing_packers(old.packer_version, new.packer_version)
    differing += differing_options(old.config, new.config)
    if old.shape != new.shape:
        differing.append(f"records were {old.shape.described()}, are now {new.shape.described()}")
    differing += differing_tokenizers(old.tokenizer, old.side_files, new.tokenizer, new.side_files)
    differing += _differing_files(old.files, new.files, is_same)
    if not differing and old.units != new.units:
        differing.append("the work units are cut in another way")
    return differing


def differing_packers(old: str, new: str) -> list[str]:
    """How the versions of packer differ, if they do: another one may write other bytes."""
    return [f"packer was {old}, is now {new}"] if old != new else []


def differing_options(
    old: DocumentConfig, new: DocumentConfig, *, limits: bool = False
) -> list[str]:
    """The options that differ, each as "--name was OLD, is now NEW". `limits`: also those on which
    no unit's bytes depend.
    """
    differing = []
    if type(old) is not type(new):
        kinds = "documents were tokenized", "rows were packed"
        return [f"{kinds[isinstance(old, PackConfig)]}, now it is the other"]
    for item in fields(new):
        before, now = getattr(old, item.name), getattr(new, item.name)
        if before != now and (limits or item.name not in LIMITS):
            option = _OPTIONS.get(item.name, f"--{item.name.replace('_', '-')}")
            differing.append(f"{option} was {_shown(before)}, is now {_shown(now)}")
    return differing


def differing_tokenizers(
    old: str | None, old_files: dict[str, str], new: str | None, new_files: dict[str, str]
) -> list[str]:
    """How tokenizer and template differ: by the content of their files, whatever their names."""
    names = old_files.keys() | new_files.keys()
    differ = sorted(name for name in names if old_files.get(name) != new_files.get(name))
    if differ:
        return [f"another tokenizer: {' and '.join(differ)} differ"]
    # it has no files of its own, so its name identifies it
    if old != new and TOKENIZER not in new_files:
        return [f"the tokenizer was {_shown(old)}, is now {_shown(new)}"]
    return []


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join("=".join(v) if isinstance(v, tuple) else v for v in value) or "not given"
    return str(value)


def may_exist(path: str) -> bool:
    """Whether an input exists; for URLs, which would take a request, this is assumed."""
    return path == STDIN or storage.is_url(path) or storage.kind(path) is not None


def _differing_files(
    old: tuple[InputFile, ...], new: tuple[InputFile, ...], is_same: IsSame
) -> list[str]:
    before, now = ({file.path: file for file in files} for files in (old, new))
    differing = [
        f"{path} {'is not named now' if may_exist(path) else 'is gone'}"
        for path in before
        if path not in now
    ]
    differing += [f"{path} is new" for path in now if path not in before]
    for path in before.keys() & now.keys():
        a, b = before[path], now[path]
        if (a.format, a.compression) != (b.format, b.compression):
            differing.append(f"{path} was read as {a.format}, is now {b.format}")
        elif not is_same(a, b):
            sizes = f": {a.size:,} bytes then, {b.size:,} now" if a.size != b.size else ""
            differing.append(f"{path} was written to{sizes}")
    if not differing and [(a.index, a.path) for a in old] != [(b.index, b.path) for b in new]:
        differing.append("the inputs are named in another order")
    if len(differing) > _MOST_NAMED:
        differing[_MOST_NAMED:] = [f"and {len(differing) - _MOST_NAMED} more inputs differ"]
    return sorted(differing[:_MOST_NAMED]) + differing[_MOST_NAMED:]
