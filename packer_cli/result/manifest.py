"""What a manifest says: what went in, what came out, under which configuration.

`manifest_bytes.py` makes a file of it, and `manifest_file.py` finds that of a result.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from packer_cli import storage
from packer_cli.config.formats import format_of
from packer_cli.config.row_rules import MAX_LENGTH_LIMIT
from packer_cli.result.counts import Counts
from packer_cli.result.layout import MANIFEST, SIDE_FILE_PATTERN
from packer_cli.result.shards import AtLeastOne, Count, Shard
from packer_cli.threads import built

if TYPE_CHECKING:
    from typing_extensions import Self

TOKENIZED = "tokenized"
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH_LIMIT)]
_Powers = Annotated[list[Count], Meta(min_length=32, max_length=32)]
_Shares = Annotated[list[Count], Meta(min_length=21, max_length=21)]


class DocumentsConfig(Struct, frozen=True, kw_only=True):
    """The options of a tokenized directory that readers need. `manifest_check` gives all of them.

    Those with a default are ones that results of earlier packers do not name. What depends on the
    shape is None where inputs have several, see `Input.shape`.
    """

    shape: str
    chat_template: str | None = None
    prompt_template: str | None = None
    train_on: str | None = "all"
    input_format: str | None = None
    fields: list[tuple[str, str]] = []
    roles: list[tuple[str, str]] = []
    template_args: list[tuple[str, str]] = []
    turn_end: list[str] = []
    turns: str = "all"


class Config(DocumentsConfig, frozen=True, kw_only=True):
    """Those of packed rows."""

    max_length: _Length
    columns: list[str]
    strategy: str
    overlong: str | None = None
    segment_multiple: _Length = 1
    label_shift: str = "none"
    max_segments_per_row: _Length | None = None
    view: bool = False
    mixture: dict[str, Any] | None = None


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
    """As in `Counts`; those with a default are ones that earlier packers did not count."""

    row_fill: _Shares
    segments_per_row: _Powers
    one_length: _Shares = []
    one_input: _Shares = []


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
    rejected_files: Count | UnsetType = UNSET

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


class MissedShare(Struct, frozen=True):
    """A source whose share whole documents do not come near to: `mixing.shares.Reached`."""

    source: str
    stage: Count | None
    asked: float
    taken: Count
    off: float
    document: Count


class SourceRecords(Struct, frozen=True):
    """What tokenizing a source of a recipe has counted, of records that were read once each,
    however often its documents are taken, and on whichever side of a split they are.

    totals  `DOCUMENT_TOTALS` of its tokenized directories, without those that are 0
    unread  as theirs
    """

    name: str
    totals: dict[str, Count]
    unread: dict[str, Count] = {}


class TrainingStage(Struct, frozen=True):
    """A stage of a recipe: rows one after another, in the order in which they are stored."""

    name: str | None
    first_row: Count
    rows: Count


class Unit(Struct, frozen=True):
    """A work unit. `slices`: (input, start, stop) as in `records.Slice`."""

    unit: Count
    slices: list[tuple[Count, Count, Count | None]]


class Result(Struct, frozen=True, kw_only=True, dict=True):
    """What the manifests of all results have, whose values are checked to have the types here.

    Made by `of`, which keeps the whole document, with what newer packers have added to it. Totals
    are those of the same names in `Counts`; one that earlier packers did not know has a default.
    """

    format_version: int
    packer_version: str
    config: DocumentsConfig
    tokenizer: Tokenizer | None
    documents: Count
    tokens: AtLeastOne
    trained_tokens: Count
    rejected_records: Count
    empty_documents: Count
    trained_turns: Count
    turns_without_end: Count
    empty_turns: Count = 0
    double_bos_documents: Count
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
    rejected_files: Count = 0
    edge_tokens: Count = 0
    looked_at_records: Count = 0
    looked_at_characters: Count = 0
    unused: dict[str, Count] = {}
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


@built
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
    dropped_length: list[Count] = []
    length_squares: int = 0  # beyond 64 bits for long rows
    length_squares_in_rows: int = 0
    padding_tokens: int
    utilization: float
    lower_bound_rows: AtLeastOne
    histograms: Histograms
    attention_cost: AttentionCosts | UnsetType = UNSET
    sources: list[Source] = []
    stages: list[TrainingStage] = []
    missed_shares: list[MissedShare] = []
    source_records: list[SourceRecords] = []
    run: str = ""  # of a side of a split: `manifest_check.run_of_sides`

    @property
    def side(self) -> str | None:
        """Which side of a recipe's split it is, if it has one."""
        mixture = self.config.mixture or {}
        is_split = any(mixture.get(f"validation_{how}") for how in ("share", "documents"))
        return str(mixture["part"]) if is_split else None

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


@built
class TokenizedManifest(Result, frozen=True, kw_only=True, dict=True):
    """The description of a tokenized directory. Its `shards` are those of the documents, each
    followed by the index of the same documents.
    """

    kind: Literal["tokenized"]


# What both say in one figure: `Counts` for a unit, the manifest for the whole run.
_SUMS = {one.name for one in fields(Counts) if one.type == "int"} - {"rows"}
DOCUMENT_TOTALS = tuple(name for name in Result.__struct_fields__ if name in _SUMS)
TOTALS = tuple(name for name in Manifest.__struct_fields__ if name in _SUMS)
OF_INPUTS = tuple(name for name in Input.__struct_fields__ if name in TOTALS)
