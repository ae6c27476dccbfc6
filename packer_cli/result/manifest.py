"""manifest.json: what went in, what came out, under which configuration.

    load(directory) -> Manifest              of packed rows
    load_tokenized(directory)                of tokenized documents
    load_any, parse(data), parse_unedited    of either
    to_bytes(document)                 the file's bytes

Written last, so its presence means that the run is complete. It holds nothing that differs
between two runs of the same command: no times, no host, no number of workers.
"""

from __future__ import annotations

import hashlib
import os
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from packer_cli import storage
from packer_cli.config.formats import format_of
from packer_cli.config.mixture import TRAIN, VALIDATION
from packer_cli.config.row_rules import MAX_LENGTH_LIMIT
from packer_cli.errors import DataError, NoSuchDirectoryError, PackerError, from_os_error
from packer_cli.records import UNSHOWN
from packer_cli.result.layout import INCOMPLETE, MANIFEST, SIDE_FILE_PATTERN, WORK
from packer_cli.result.shards import FORMAT_VERSION, AtLeastOne, Count, Shard

if TYPE_CHECKING:
    from typing_extensions import Self

TOKENIZED = "tokenized"
_FETCHED_BYTES = 4 << 20
_ANEW = "pack the data again"

_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH_LIMIT)]
_Powers = Annotated[list[Count], Meta(min_length=32, max_length=32)]


class Config(Struct, frozen=True):
    """The options that readers need. `manifest_check.config_of` gives all of them.

    Those with a default are ones that results of earlier packers do not name. What depends on the
    shape is None where inputs have several, see `Input.shape`.
    """

    max_length: _Length
    columns: list[str]
    strategy: str
    shape: str
    segment_multiple: _Length = 1
    label_shift: str = "none"
    max_segments_per_row: _Length | None = None
    view: bool = False
    input_format: str | None = None
    prompt_template: str | None = None
    chat_template: str | None = None
    train_on: str | None = "all"
    fields: list[tuple[str, str]] = []
    turns: str = "all"


class Tokenizer(Struct, frozen=True):
    """What encoded the documents. `sha256` "": the built-in bytes. `prefix` and `suffix`, which
    are put around every document, are unset where an earlier packer did not record them.
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
    """As in `Counts`."""

    document_length: _Powers


class Histograms(DocumentHistograms, frozen=True):
    """As in `Counts`."""

    row_fill: Annotated[list[Count], Meta(min_length=21, max_length=21)]
    segments_per_row: _Powers


class Cost(Struct, frozen=True):
    """`AttentionCost.as_json()` of all rows."""

    rows: AtLeastOne
    sum: AtLeastOne
    sum_of_squares: int  # beyond 64 bits for long rows
    max: Count


class AttentionCosts(Struct, frozen=True):
    """Without balancing, and with it."""

    before: Cost
    after: Cost


class Input(Struct, frozen=True):
    """An input, and the counts of its records. `removed`: an update has dropped it. `format`: of
    tokenized directories, whose manifests' names do not tell. `shape`: the `Shape.name` of its
    records, where not all inputs have the same. What is trained on in rows, and was lost on the
    way to them, is unset where no rows were packed, and in results of earlier packers.
    """

    path: str
    size: Count
    sha256: str
    documents: Count
    tokens: Count
    empty_documents: Count
    rejected_records: Count
    removed: bool = False
    format: str | None = None
    shape: str | None = None
    truncated_documents: Count | UnsetType = UNSET
    truncated_tokens: Count | UnsetType = UNSET
    dropped_documents: Count | UnsetType = UNSET
    dropped_tokens: Count | UnsetType = UNSET
    untrained_documents: Count | UnsetType = UNSET
    untrained_tokens: Count | UnsetType = UNSET
    trained_tokens: Count | UnsetType = UNSET
    unshown_documents: Count | UnsetType = UNSET
    unshown_tokens: Count | UnsetType = UNSET

    def format_then(self, input_format: str | None) -> str | None:
        """What it was read as, with the run's --input-format; None for stdin without one."""
        return self.format or input_format or format_of(self.path)[0]


class Source(Struct, frozen=True):
    """A source of a recipe. `amount` and `available` count tokens as `config.mixture.count` says.

    inputs               first and last + 1 of its inputs
    documents, available  in one epoch: without those held out, dropped or equal to others
    asked, taken         how much was asked for, and chosen
    held_out_documents   which are held out for validation
    duplicate_documents  left out: an equal one is there
    """

    name: str
    inputs: tuple[Count, Count]
    documents: Count
    available: Count
    asked: float
    taken: Count
    held_out_documents: Count
    duplicate_documents: Count

    @property
    def epochs(self) -> float:
        """How often its documents were taken."""
        return self.taken / self.available if self.available else 0.0


class TrainingStage(Struct, frozen=True):
    """A stage of a recipe: rows one after another, in the order in which they are stored."""

    name: str | None
    first_row: Count
    rows: Count


class Unit(Struct, frozen=True):
    """A work unit. `slices`: (input, start, stop) as in `records.Slice`."""

    unit: Count
    slices: list[tuple[Count, Count, Count | None]]


class DocumentsConfig(Struct, frozen=True):
    """The options of a tokenized directory that readers need."""

    shape: str
    chat_template: str | None = None
    prompt_template: str | None = None
    train_on: str | None = "all"
    input_format: str | None = None
    fields: list[tuple[str, str]] = []
    turns: str = "all"


class Result(Struct, frozen=True, kw_only=True, dict=True):
    """What the manifests of all results have, whose values are checked to have the types here.

    Made by `of`, which keeps the whole document, with what newer packers have added to it. Totals
    are those of the same names in `Counts`; one that earlier packers did not know has a default.
    """

    format_version: int
    packer_version: str
    tokenizer: Tokenizer | None
    documents: Count
    tokens: AtLeastOne
    trained_tokens: Count
    rejected_records: Count
    empty_documents: Count
    trained_turns: Count
    turns_without_end: Count
    double_bos_documents: Count
    empty_turns: Count = 0
    unshown_documents: Count = 0
    unshown_tokens: Count = 0
    unshown_reasoning: Count = 0
    unshown_reasoning_turns: Count = 0
    unshown_reasoning_tokens: Count = 0
    unshown_content: Count = 0
    unshown_content_turns: Count = 0
    unshown_content_tokens: Count = 0
    unshown_tool_calls: Count = 0
    unshown_tool_calls_turns: Count = 0
    unshown_tool_calls_tokens: Count = 0
    unshown_tool_results: Count = 0
    unshown_tool_results_turns: Count = 0
    unshown_tool_results_tokens: Count = 0
    unshown_tools: Count = 0
    unshown_tools_tokens: Count = 0
    unshown_system: Count = 0
    unshown_system_turns: Count = 0
    unshown_system_tokens: Count = 0
    unread: dict[str, Count] = {}
    special_tokens_in_text: Count = 0
    fim_documents: Count = 0
    masked_documents: Count = 0
    masked_tokens: Count = 0
    repeated_tokens: Count = 0
    histograms: DocumentHistograms
    inputs: list[Input]
    units: list[Unit]
    shards: Annotated[list[Shard], Meta(min_length=1)]
    side_files: dict[Annotated[str, Meta(pattern=SIDE_FILE_PATTERN)], str] = {}
    incomplete: str | None = None
    sha256: str | None = None

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """Raises ValueError for what no reader can work with."""
        try:
            manifest = msgspec.convert(document, cls)
        except (OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error
        manifest.__dict__["document"] = document
        return manifest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self.document,)

    @property
    def document(self) -> dict[str, Any]:
        """The whole file as plain JSON values, with those that this packer does not know."""
        content: dict[str, Any] = self.__dict__["document"]
        return content

    @property
    def pad_token_id(self) -> int:
        """The id in the padding of rows: 0 for ids that came without a tokenizer."""
        return self.tokenizer.pad_token_id if self.tokenizer else 0

    @property
    def counted_by_input(self) -> tuple[str, ...]:
        """The totals of which every input has its part."""
        return tuple(
            name for name in OF_INPUTS
            if hasattr(self, name)
            and all(getattr(one, name) is not UNSET for one in self.inputs)
        )  # fmt: skip

    @property
    def inputs_now(self) -> dict[int, Input]:
        """By index, without those that an update has dropped."""
        return {index: one for index, one in enumerate(self.inputs) if not one.removed}

    def shards_of_units(self) -> list[list[Shard]]:
        """A document's pieces lie in one unit, perhaps in several of its shards."""
        return [list(shards) for _, shards in groupby(self.shards, lambda shard: shard.unit)]


class Manifest(Result, frozen=True, kw_only=True, dict=True):
    """The description of a packed directory, or a view."""

    config: Config
    rows: AtLeastOne
    segments: AtLeastOne
    unpacked_rows: AtLeastOne
    truncated_documents: Count
    truncated_tokens: Count
    truncated_trained_tokens: Count
    dropped_documents: Count
    dropped_tokens: Count
    dropped_trained_tokens: Count
    untrained_documents: Count
    untrained_tokens: Count
    padding_tokens: int
    utilization: float
    lower_bound_rows: AtLeastOne
    histograms: Histograms
    attention_cost: AttentionCosts | UnsetType = UNSET
    sources: list[Source] = []
    stages: list[TrainingStage] = []

    def source_of(self, file: int) -> str | None:
        """The name of the recipe's source that an input belongs to."""
        return next(
            (one.name for one in self.sources if one.inputs[0] <= file < one.inputs[1]), None
        )

    @property
    def is_from_tokenized(self) -> bool:
        """Whether the inputs are tokenized directories: manifests, whose documents are tokens."""
        names = {storage.base_name(one.path) for one in self.inputs}
        return self.config.shape == "tokens" and names == {MANIFEST}


class TokenizedManifest(Result, frozen=True, kw_only=True, dict=True):
    """The description of a tokenized directory. Its `shards` are those of the documents, each
    followed by the index of the same documents.
    """

    kind: Literal["tokenized"]
    config: DocumentsConfig


# Of each kind of thing that chat templates leave out: documents, messages and tokens.
OF_UNSHOWN = tuple(
    f"unshown_{what}{of}" for what in UNSHOWN for of in ("", "_turns", "_tokens")
    if (what, of) != ("tools", "_turns")
)  # fmt: skip
_OF_RESULTS = (
    "documents", "tokens", "trained_tokens", "rejected_records", "empty_documents",
    "trained_turns", "turns_without_end", "empty_turns", "double_bos_documents",
    "unshown_documents", "unshown_tokens", *OF_UNSHOWN, "special_tokens_in_text",
    "fim_documents", "masked_documents", "masked_tokens", "repeated_tokens",
)  # fmt: skip
_OF_ROWS = (
    "segments", "unpacked_rows", "truncated_documents", "truncated_tokens",
    "truncated_trained_tokens", "dropped_documents", "dropped_tokens", "dropped_trained_tokens",
    "untrained_documents", "untrained_tokens",
)  # fmt: skip
DOCUMENT_TOTALS, TOTALS = _OF_RESULTS, (*_OF_RESULTS, *_OF_ROWS)
OF_INPUTS = tuple(name for name in Input.__struct_fields__ if name in TOTALS)


def to_bytes(document: dict[str, Any]) -> bytes:
    """Indented two levels deep: diffs stay readable, a million shards stay one line each.

    Ends with the manifest's own checksum.
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
    """The sha256 of its keys and values as compact JSON, without the checksum itself."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether this is a manifest of ours, of any version."""
    try:
        with storage.open_bytes(os.fspath(path)) as file:
            return looks_like_one(file.read())
    except (OSError, DataError):
        return False


def holds_documents(path: str) -> bool:
    """Whether this is the manifest of a tokenized directory."""
    try:
        with storage.open_bytes(path) as file:
            content = msgspec.json.decode(file.read())
    except (OSError, DataError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == TOKENIZED


def as_named(path: str) -> str:
    """An input as its user knows it: a tokenized directory rather than its manifest."""
    if storage.base_name(path) == MANIFEST and holds_documents(path):
        return os.path.dirname(path) or "."
    return path


def looks_like_one(data: bytes) -> bool:
    """Whether this is the content of a manifest of ours, of any version, damaged or not."""
    try:
        content = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"format_version", "packer_version"} <= content.keys()


def parse(data: bytes) -> Manifest | TokenizedManifest:
    """The manifest of a result of any kind. Raises DataError, which does not name the file, for
    what this packer cannot read.
    """
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
        raise DataError(f"damaged: {error}", anew) from error


def parse_unedited(data: bytes) -> Result:
    """The same, and DataError for one that is not as a packer has written it: nobody may remove
    files because such a one names them.
    """
    manifest = parse(data)
    if manifest.sha256 != checksum(manifest.document):
        raise DataError("was edited", _ANEW)
    return manifest


def load(directory: str | os.PathLike[str], *, incomplete_too: bool = False) -> Manifest:
    """The manifest of a packed directory or a view that is finished, or of one at a URL. DataError
    when there is none, or this packer cannot read it.

    `incomplete_too`: also of one that is marked incomplete; its `incomplete` says why.
    """
    manifest = load_any(directory, incomplete_too=incomplete_too)
    if not isinstance(manifest, Manifest):
        name = os.fspath(directory)
        raise DataError(
            f"{name}: holds tokenized documents, not packed rows",
            f"pack them: packer pack {name} --max-length 4096",
        )
    return manifest


def load_tokenized(directory: str | os.PathLike[str]) -> TokenizedManifest:
    """The manifest of a tokenized directory that is finished. Raises as `load`."""
    manifest = load_any(directory)
    if not isinstance(manifest, TokenizedManifest):
        raise DataError(
            f"{os.fspath(directory)}: holds packed rows, not tokenized documents",
            "give the --output of a packer tokenize run",
        )
    return manifest


def load_any(
    directory: str | os.PathLike[str], *, incomplete_too: bool = False
) -> Manifest | TokenizedManifest:
    """The manifest of a finished result of any kind. Raises as `load`."""
    name = os.fspath(directory)
    path = storage.join(name, MANIFEST)
    if storage.is_file(path):
        return _read(path)
    incomplete = storage.join(name, INCOMPLETE)
    if not storage.is_file(incomplete):
        raise _no_result(name)
    manifest = _read(incomplete)
    if not incomplete_too:
        raise DataError(
            f"{name}: is marked incomplete: {manifest.incomplete}",
            "pack again with --overwrite and another --overlong, --max-length or --max-loss",
        )
    return manifest


def _read(path: str) -> Manifest | TokenizedManifest:
    try:
        with storage.open_bytes(path, _FETCHED_BYTES) as file:
            return parse(file.read())
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except DataError as error:
        raise DataError(f"{path}: {error.message}", error.tip) from error


def _hidden(path: str) -> PackerError | None:
    """The error for what is in a folder that may not be looked into."""
    try:
        os.stat(path)
    except PermissionError as error:
        return from_os_error(error, path, "read")
    except OSError:
        pass
    return None


def splits_of(directory: str | os.PathLike[str]) -> list[str]:
    """The sides of a split, where a directory holds a result for each; [] for any other."""
    name = os.fspath(directory)
    if _begun(name):
        return []
    parts = [storage.join(name, part) for part in (TRAIN, VALIDATION)]
    return parts if any(map(_begun, parts)) else []


def _begun(name: str) -> bool:
    """Whether a directory holds a result, or the beginning of one."""
    if any(storage.is_file(storage.join(name, one)) for one in (MANIFEST, INCOMPLETE)):
        return True
    return storage.kind(storage.join(name, WORK)) == "folder"


_WHAT_TO_GIVE = "give the --output of a packer pack or packer tokenize run"


def _no_result(name: str) -> PackerError:
    if storage.kind(name) != "folder":
        if not storage.is_url(name) and (hidden := _hidden(name)):
            return hidden
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
    return DataError(
        f"{name}: has no {MANIFEST}: not packed by packer",
        _WHAT_TO_GIVE,
    )
