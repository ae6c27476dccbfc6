"""Manifests: inputs, outputs and configuration of a finished result.

    load(directory) -> Manifest     packed rows, also at a URL
    load_tokenized(directory)       tokenized documents
    load_any(directory)             either
    load_as_is(directory)           also an incomplete result, or half of a replaced split

A manifest holds nothing that differs between two runs of the same command: no times, no host, no
number of workers. It is written last, so its presence means that the run is complete. A side of a
recipe's split has its other side beside it, of the same run: halves of two runs may both have the
same document.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, to_builtins

import packer_cli
from packer_cli import storage
from packer_cli.errors import (
    DataError,
    NoSuchDirectoryError,
    PackerError,
    UsageError,
    from_os_error,
    os_errors,
)
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_of
from packer_cli.options.options import TRAIN, VALIDATION, PackConfig
from packer_cli.options.shapes import MIXED, Shape, joined, shape_named
from packer_cli.packing.figures import AttentionCost
from packer_cli.result.counts import DocumentTotals, InputTotals, Totals
from packer_cli.result.layout import (
    FORMAT_VERSION,
    INCOMPLETE,
    MANIFEST,
    SIDE_FILE_PATTERN,
    STATE,
    UNITS,
    WORK,
    AtLeastOne,
    Count,
    Shard,
    built,
    is_named_by_content,
)

if TYPE_CHECKING:
    from typing_extensions import Self

TOKENIZED = "tokenized"
# Options that decide whether a run may end well, not what a unit's shards hold: its record says
# which bad records it has skipped.
LIMITS = ("max_loss", "max_errors", "on_error")
DOCUMENT_TOTALS, TOTALS = DocumentTotals.__struct_fields__, Totals.__struct_fields__
_OWN = InputTotals.__struct_fields__
OF_INPUTS = (*_OWN[:4], *_OWN[5:11], _OWN[4], *_OWN[11:])  # what is trained on comes after losses
_ANEW = "move the directory away, and pack the data again"
_WHAT_TO_GIVE = "give the --output of a packer pack or packer tokenize run"
_WAITS, _WAIT_SECONDS = 40, 0.05  # for the other side, while a run puts both in their places
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_CLOSE = 0.001  # shares of the whole that are farther off are reported
_Powers = Annotated[list[Count], Meta(min_length=32, max_length=32)]
_Shares = Annotated[list[Count], Meta(min_length=21, max_length=21)]


class TokenizerInfo(Struct, frozen=True):
    """Tokenizer that encoded the documents. `sha256` "": the built-in bytes. `prefix` and `suffix`
    are put around every document; unset if documents have different ones.
    """

    source: str
    sha256: str
    vocab_size: Count
    bos_token_id: _Id | None
    eos_token_id: _Id | None
    pad_token_id: _Id
    bos_token: str | None = None
    eos_token: str | None = None
    prefix: list[_Id] | UnsetType = UNSET
    suffix: list[_Id] | UnsetType = UNSET


class DocumentHistograms(Struct, frozen=True):
    """Histograms of `Counts` over documents."""

    document_length: _Powers


class Histograms(DocumentHistograms, frozen=True):
    """Histograms of `Counts` over documents and rows."""

    row_fill: _Shares
    segments_per_row: _Powers
    one_length: _Shares
    one_input: _Shares


class AttentionCosts(Struct, frozen=True):
    """Cost of attention without balancing, and with it."""

    before: AttentionCost
    after: AttentionCost


class Input(InputTotals, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec's may
    """An input, and the totals of its records.

    path     as `storage.absolute` returns it
    version  as in `InputFile`
    sha256   "" for stdin and URLs
    format   of a tokenized directory, whose manifest's name does not show it
    shape    the `Shape.name` of its records, if inputs have different ones
    """

    path: str
    size: Count
    version: int
    sha256: str
    format: str | None = None
    shape: str | None = None

    @property
    def name(self) -> str:
        """Path for messages: from the current directory on, and a directory, not its manifest."""
        path = storage.shown(self.path)
        return (os.path.dirname(path) or ".") if self.format == TOKENIZED else path

    def format_then(self, input_format: str | None) -> str | None:
        """Return the format of a run with this --input-format; None for stdin without one."""
        return self.format or input_format or format_of(self.path)[0]


class SourceStats(Struct, frozen=True, omit_defaults=True):
    """A source of a recipe, or a tier of one. Amounts count tokens by `config.mixture.count`.

    inputs               first and last + 1 of its inputs
    documents, available  in one epoch: without those held out, dropped or equal to others
    asked, taken         amount that the recipe asks for, and that was taken
    held_out_documents   held out for validation
    duplicate_documents  left out because an equal one was taken
    filtered_documents   of inputs that were tokenized before, left out by conditions
    tiers                of a source, each counted by itself
    tier, where          of a tier: its number, from 1, and its conditions
    """

    name: str
    inputs: tuple[Count, Count]
    documents: Count
    available: Count
    asked: float
    taken: Count
    held_out_documents: Count
    duplicate_documents: Count
    filtered_documents: Count = 0
    tiers: list[SourceStats] = []
    tier: Count = 0
    where: tuple[str, ...] | UnsetType = UNSET

    @property
    def epochs(self) -> float:
        """Times that its documents were taken."""
        return self.taken / self.available if self.available else 0.0

    @property
    def portions(self) -> list[SourceStats]:
        """Its tiers, or itself if it has none."""
        return self.tiers or [self]


class ReachedShare(Struct, frozen=True, omit_defaults=True):
    """Share of the whole that a source, or a tier of one, reaches with whole documents.

    asked, taken  as in `SourceStats`
    tier          as in `SourceStats`
    off           difference of its share of the whole from the one asked
    document      amount of the last document taken: with one more, or without it, the source would
                  be farther off; 0 if other sources cause the difference
    """

    source: str
    asked: float
    taken: Count
    off: float
    document: Count
    tier: Count = 0

    @property
    def name(self) -> str:
        """The source, with the number of its tier."""
        return f"{self.source}, tier {self.tier}" if self.tier else self.source

    @property
    def is_missed(self) -> bool:
        """True if the share is so far off that it is reported."""
        return self.off > _CLOSE


class SourceRecords(Struct, frozen=True):
    """Counts of tokenizing a source of a recipe. Each record is read once, however often its
    documents are taken, and for both sides of a split.

    totals  `DOCUMENT_TOTALS` of its tokenized directories, without those that are 0
    unread  fields that nothing reads, as in `Counts`
    """

    name: str
    totals: dict[str, Count]
    unread: dict[str, Count] = {}


class Unit(Struct, frozen=True):
    """A work unit. `slices`: (input, start, stop) as in `records.Slice`."""

    unit: Count
    slices: list[tuple[Count, Count, Count | None]]


class Result(Totals, frozen=True, kw_only=True, dict=True):  # type: ignore[misc]  # msgspec's may
    """Manifest of any result. Values are checked to have these types.

    `of` makes it and keeps the whole document, with anything that newer packers have added.
    """

    format_version: int
    packer_version: str
    config: DocumentConfig
    tokenizer: TokenizerInfo | None
    documents: Count
    tokens: AtLeastOne
    trained_tokens: Count
    unread: dict[str, Count] = {}
    first_drifted: list[Count] = []
    histograms: DocumentHistograms
    inputs: list[Input]
    units: list[Unit]
    shards: Annotated[list[Shard], Meta(min_length=1)]
    side_files: dict[Annotated[str, Meta(pattern=SIDE_FILE_PATTERN)], str] = {}
    side_file_bytes: dict[str, Count] = {}
    incomplete: str | None = None
    sha256: str | None = None
    counted_by_input: ClassVar[tuple[str, ...]]  # totals of which every input has its part
    command: ClassVar[str]  # that makes such results: pack or tokenize
    options: ClassVar[type[DocumentConfig]] = DocumentConfig  # of the run

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """Make a manifest of plain JSON values. Raises ValueError if readers cannot use it."""
        try:
            config = _config(document.get("config"), cls.options)
            manifest = msgspec.convert(document | {"config": config}, cls)
        except (OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error
        manifest.__dict__["document"] = document
        return manifest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self.document,)

    @property
    def document(self) -> dict[str, Any]:
        """The whole file as plain JSON values, also those that this packer does not know."""
        content: dict[str, Any] = self.__dict__["document"]
        return content

    @property
    def pad_token_id(self) -> int:
        """Id in the padding of rows: 0 for ids that came without a tokenizer."""
        return self.tokenizer.pad_token_id if self.tokenizer else 0

    @property
    def tokenizer_sha256(self) -> str:
        """Digest of the tokenizer, as shards have it; "" for ids and built-in bytes."""
        return self.tokenizer.sha256 if self.tokenizer else ""

    @property
    def data_digests(self) -> list[str]:
        """Digests that identify the data: of shards, and of a view's inputs, which hold tokens."""
        inputs = self.inputs if getattr(self.config, "view", False) else []
        return [shard.sha256 for shard in self.shards] + [one.sha256 for one in inputs]

    def shards_of_units(self) -> list[list[Shard]]:
        """Return the shards of each unit; all pieces of a document lie in one unit."""
        return [list(shards) for _, shards in groupby(self.shards, lambda shard: shard.unit)]


@built
class Manifest(Result, frozen=True, kw_only=True, dict=True):  # type: ignore[misc]  # msgspec's may
    """Manifest of a packed directory, or a view."""

    counted_by_input = OF_INPUTS
    command = "pack"
    options = PackConfig
    config: PackConfig
    rows: AtLeastOne
    segments: AtLeastOne
    unpacked_rows: AtLeastOne
    dropped_length: list[Count] = []
    padding_tokens: int
    utilization: float
    lower_bound_rows: AtLeastOne
    histograms: Histograms
    attention_cost: AttentionCosts | UnsetType = UNSET
    sources: list[SourceStats] = []
    missed_shares: list[ReachedShare] = []
    source_records: list[SourceRecords] = []
    run: str = ""  # of a side of a split: `manifest_check.run_of_sides`

    @property
    def side(self) -> str | None:
        """Side of a recipe's split; None without a split."""
        mixture = self.config.mixture
        return mixture.part if mixture and mixture.is_split else None

    def source_of(self, file: int) -> str | None:
        """Return the name of the recipe's source that an input belongs to."""
        return next(
            (one.name for one in self.sources if one.inputs[0] <= file < one.inputs[1]), None
        )

    @property
    def by_source(self) -> list[dict[str, Any]]:
        """The totals of each source's inputs."""
        return by_source(self.sources, self.inputs.__getitem__, self.counted_by_input)

    @property
    def is_from_tokenized(self) -> bool:
        """True if the inputs are tokenized directories."""
        return all(one.format == TOKENIZED for one in self.inputs)


@built
class TokenizedManifest(Result, frozen=True, kw_only=True, dict=True):  # type: ignore[misc]  # msgspec's may
    """Manifest of a tokenized directory. Each shard of documents is followed by its index."""

    counted_by_input = tuple(
        name for name in OF_INPUTS if name in DOCUMENT_TOTALS and name != "trained_tokens"
    )
    command = "tokenize"
    kind: Literal["tokenized"]


def sources_as_json(sources: Sequence[SourceStats]) -> list[dict[str, Any]]:
    """Return sources as in the manifest, with their epochs and their shares of the whole."""
    asked = sum(source.asked for source in sources) or 1
    reached = sum(source.taken for source in sources) or 1

    def as_json(source: SourceStats) -> dict[str, Any]:
        values: dict[str, Any] = to_builtins(source)
        if source.tiers:
            values["tiers"] = [*map(as_json, source.tiers)]
        return values | {
            "epochs": source.epochs,
            "share_asked": source.asked / asked,
            "share_reached": source.taken / reached,
        }

    return [*map(as_json, sources)]


def by_source(
    sources: Sequence[SourceStats], inputs: Callable[[int], Any], names: Iterable[str]
) -> list[dict[str, Any]]:
    """Sum totals of each source's inputs. `inputs`: returns those of one, by its number."""
    return [
        {"name": one.name}
        | {name: sum(getattr(inputs(i), name) for i in range(*one.inputs)) for name in names}
        for one in sources
    ]


def _config(given: Any, kind: type[DocumentConfig]) -> DocumentConfig:
    """Return the options, without a shape if each input has its own. Raises ValueError."""
    try:
        if isinstance(given, dict) and given.get("shape") == MIXED:  # none was asked for
            given = given | {"shape": None}
        config = msgspec.convert(given, kind)
    except (OverflowError, UsageError, msgspec.ValidationError) as error:
        raise ValueError(f"config: {error}") from error
    if "shape" not in given:
        raise ValueError("config: has no shape")
    return config


def shape_of(manifest: Result) -> Shape:
    """Return the shape of the records, without the names of their fields."""
    config = manifest.document["config"]
    names = dict.fromkeys(one.shape for one in manifest.inputs if one.shape)
    if names:
        return joined({name: shape_named(name) for name in names})
    # only the inputs show whether the prompts are messages, and tokens those of both kinds
    both = config["shape"] == "tokens" and config.get("overlong") == "split-text"
    return Shape(
        config["shape"],
        of_messages=config.get("prompt_template") == "chat",
        of_supervised=both,
        of_text=both,
    )


def run_of_sides(document: dict[str, Any]) -> str:
    """Return a digest that only the manifests of both sides of a split share; `document` is one."""
    config = {name: one for name, one in document["config"].items() if name not in LIMITS}
    config["mixture"] = {name: one for name, one in config["mixture"].items() if name != "part"}
    inputs = [one["sha256"] for one in document["inputs"]]
    content = msgspec.json.encode([document["packer_version"], config, inputs], order="sorted")
    return hashlib.sha256(content).hexdigest()


def why_incomplete(max_loss: float | None, tokens: int, truncated: int, dropped: int) -> str | None:
    """Return the reason to mark a result incomplete, from numbers of tokens; None if it is not."""
    lost = (truncated + dropped) / max(tokens + truncated + dropped, 1)
    if max_loss is None or lost <= max_loss:
        return None
    return (
        f"{lost:.4f} of the tokens were lost, {truncated:,} truncated and {dropped:,} dropped; "
        f"--max-loss is {max_loss}"
    )


# The file


def load(directory: str | os.PathLike[str]) -> Manifest:
    """Load the manifest of a finished packed directory or view, also at a URL.

    Raises DataError if there is none, if this packer cannot read it, and if it is a side of a split
    whose other side is of another run, or not finished.
    """
    manifest = load_any(directory)
    if not isinstance(manifest, Manifest):
        name = os.fspath(directory)
        raise DataError(
            f"{name}: holds tokenized documents, not packed rows",
            f"pack them: packer pack {name} --max-length 4096",
        )
    return manifest


def load_tokenized(directory: str | os.PathLike[str]) -> TokenizedManifest:
    """Load the manifest of a finished tokenized directory. Raises as `load`."""
    manifest = load_any(directory)
    if not isinstance(manifest, TokenizedManifest):
        raise DataError(
            f"{os.fspath(directory)}: holds packed rows, not tokenized documents",
            "give the --output of a packer tokenize run",
        )
    return manifest


def load_as_is(directory: str | os.PathLike[str]) -> Manifest | TokenizedManifest:
    """Load any manifest, also an incomplete one, or without looking at the other side of a split.
    Raises DataError if there is none, or if it is damaged.
    """
    name = os.fspath(directory)
    path = _manifest_in(name)
    if path is None:
        raise _no_result(name)
    with os_errors(path):
        content = storage.read_bytes(path)
    try:
        return parse(content)
    except DataError as error:
        raise DataError(f"{path}: {error.message}", error.tip) from error


def _manifest_in(name: str) -> str | None:
    """Return the path of a result's manifest, also of one that is marked incomplete."""
    paths = (storage.join(name, one) for one in (MANIFEST, INCOMPLETE))
    return next(filter(storage.is_file, paths), None)


def load_any(
    directory: str | os.PathLike[str], *, incomplete_too: bool = False
) -> Manifest | TokenizedManifest:
    """Load the manifest of a finished result of any kind. Raises as `load`.

    `incomplete_too`: also of one that is marked incomplete; `incomplete` is the reason.
    """
    name = os.fspath(directory)
    for _ in range(_WAITS):
        manifest = load_as_is(name)
        if manifest.incomplete and not incomplete_too:
            raise DataError(
                f"{name}: is marked incomplete: {manifest.incomplete}",
                "pack again with --overwrite and another --overlong, --max-length or --max-loss",
            )
        other = other_side(name, manifest)
        if other is None or _same_run(manifest, other):
            return manifest
        if not any(storage.kind(storage.join(one, WORK)) for one in (name, other)):
            break
        time.sleep(_WAIT_SECONDS)
    raise DataError(
        f"{name} and {other} come from different runs and may overlap",
        "a run that was to replace both was interrupted: run the same packer pack again; or pack "
        "the recipe anew with --overwrite",
    )


def replaced(directory: str | os.PathLike[str], manifest: Result) -> DataError | None:
    """Return the error to raise if another result has taken the place of this manifest's."""
    try:
        now = load_as_is(directory).sha256
    except DataError:
        return None
    if now == manifest.sha256:
        return None
    name = os.fspath(directory)
    return DataError(f"{name}: was replaced by another result while it was read", "read it again")


def other_side(name: str, manifest: Result) -> str | None:
    """Return the path of the other side of a split; None for results that are none, or moved."""
    side = manifest.side if isinstance(manifest, Manifest) else None
    folder, _, last = storage.absolute(name).rstrip("/").rpartition("/")
    if side is None or last != side:
        return None
    return storage.shown(f"{folder}/{VALIDATION if side == TRAIN else TRAIN}")


def _same_run(manifest: Manifest | TokenizedManifest, other: str) -> bool:
    """True if the side at `other` is of the run of `manifest`, or missing."""
    try:
        half = load_as_is(other)
    except (PackerError, OSError):  # it is not there, or says itself what is wrong with it
        return bool(_manifest_in(other)) or not _begun(other)
    if not isinstance(half, Manifest) or half.side != storage.base_name(other):
        return True
    return half.run == getattr(manifest, "run", "")


def _no_result(name: str) -> PackerError:
    try:
        if not storage.is_url(name):
            os.stat(storage.join(name, MANIFEST))
    except PermissionError as error:
        return from_os_error(error, name, "read")
    except OSError:
        pass  # it is missing: reported below
    if storage.kind(name) != "folder":
        what = "not a directory" if storage.kind(name) else "no such directory"
        return NoSuchDirectoryError(f"{name}: {what}", _WHAT_TO_GIVE)
    if storage.kind(storage.join(name, WORK)) == "folder":
        return DataError(
            f"{name}: has no {MANIFEST}: the run that writes it has not finished",
            "run the same command again: packer pack, or packer tokenize",
        )
    if parts := splits_of(name):
        return DataError(
            f"{name}: holds a result for each side of its split, {TRAIN} and {VALIDATION}",
            f"give one of them: {' or '.join(parts)}",
        )
    if any(map(storage.is_file, (storage.join(name, file) for file in (UNITS, STATE)))):
        return DataError(
            f"{name}: has no {MANIFEST}: an incomplete copy of a result, or its manifest is lost",
            f"copy the directory again, or {_ANEW}",
        )
    return DataError(f"{name}: has no {MANIFEST}: not packed by packer", _WHAT_TO_GIVE)


def splits_of(directory: str | os.PathLike[str]) -> list[str]:
    """Return the sides of a split if a directory holds a result for each; else []."""
    name = os.fspath(directory)
    if _begun(name):
        return []
    parts = [storage.join(name, part) for part in (TRAIN, VALIDATION)]
    return parts if any(map(_begun, parts)) else []


def _begun(name: str) -> bool:
    """True if a directory holds a result, or the beginning of one."""
    return bool(_manifest_in(name)) or storage.kind(storage.join(name, WORK)) == "folder"


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """True for a manifest of packer, of any version, damaged or not."""
    return {"format_version", "packer_version"} <= _object(os.fspath(path)).keys()


def is_result(name: str) -> bool:
    """True if packer has written this directory, judged by its manifest or the names of shards."""
    if is_manifest(storage.join(name, MANIFEST)):
        return True
    folder = Path(name)
    local = not storage.is_url(name) and folder.is_dir()
    return local and any(is_named_by_content(one.name) for one in folder.iterdir())


def holds_documents(path: str) -> bool:
    """True for the manifest of a tokenized directory."""
    return _object(path).get("kind") == TOKENIZED


def _object(path: str) -> dict[str, Any]:
    """Return the JSON object in a file; {} for anything else, and if it cannot be read."""
    try:
        content = msgspec.json.decode(storage.read_bytes(path))
    except (OSError, DataError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def as_named(path: str) -> str:
    """Return an input as its user knows it: a tokenized directory instead of its manifest."""
    if storage.base_name(path) == MANIFEST and holds_documents(path):
        return os.path.dirname(path) or "."
    return path


def to_bytes(document: dict[str, Any]) -> bytes:
    """Write a manifest as JSON, indented two levels deep: diffs stay readable, and a million shards
    have a line each. Its own checksum comes last.
    """
    document = document | {"sha256": checksum(document)}
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            items = ",\n  ".join(msgspec.json.encode(item).decode() for item in value)
            text = f"[\n  {items}\n ]"
        else:
            text = msgspec.json.encode(value).decode()
        lines.append(f' "{key}": {text}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def checksum(document: dict[str, Any]) -> str:
    """Return the sha256 of a manifest's keys and values as compact JSON, without the checksum."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def parse(data: bytes) -> Manifest | TokenizedManifest:
    """Parse a manifest of any kind. Raises DataError, which does not name the file."""
    try:
        document = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}", _ANEW) from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"format version {version!r}, this packer reads {FORMAT_VERSION}",
            f"use the packer that wrote it, or {_ANEW}",
        )
    is_tokenized = document.get("kind") == TOKENIZED
    try:
        return TokenizedManifest.of(document) if is_tokenized else Manifest.of(document)
    except ValueError as error:
        anew = "tokenize the data again" if is_tokenized else _ANEW
        writer, reader = document.get("packer_version"), packer_cli.__version__
        if writer != reader:  # it may have options that this one does not know
            raise DataError(
                f"of packer {writer}, which this packer {reader} cannot read: {error}",
                f"use the packer that wrote it, or {anew}",
            ) from error
        raise DataError(f"damaged: {error}", anew) from error
