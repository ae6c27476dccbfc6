"""Whether a manifest can be true: its types, and its figures against each other.

A manifest may come from anywhere. Whoever has loaded one may rely on the types here.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from packer_cli.config.options import MAX_LENGTH_LIMIT, PackConfig
from packer_cli.errors import UsageError
from packer_cli.result.layout import SHARD_PATTERN, SIDE_FILE_PATTERN

_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Some = Annotated[int, Meta(ge=1, le=1 << 53)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Powers = Annotated[list[_Count], Meta(min_length=32, max_length=32)]


class _Tokenizer(Struct):
    source: str
    sha256: str
    vocab_size: _Count
    bos_token_id: _Id | None
    eos_token_id: _Id | None
    pad_token_id: _Id
    bos_token: str | None = None
    eos_token: str | None = None
    prefix: list[_Id] = []
    suffix: list[_Id] = []


class _Histograms(Struct):
    document_length: _Powers
    row_fill: Annotated[list[_Count], Meta(min_length=21, max_length=21)]
    segments_per_row: _Powers


class _Cost(Struct):
    rows: _Some
    sum: _Some
    sum_of_squares: int  # beyond 64 bits for long rows
    max: _Count


class _AttentionCost(Struct):
    before: _Cost
    after: _Cost


class _Input(Struct):
    path: str
    size: _Count
    sha256: str
    documents: _Count
    tokens: _Count
    empty_documents: _Count
    rejected_records: _Count
    removed: bool = False


class _Unit(Struct):
    unit: _Count
    slices: list[tuple[_Count, _Count, _Count | None]]


class _Shard(Struct):
    file: Annotated[str, Meta(pattern=SHARD_PATTERN, max_length=100)]
    unit: _Count
    rows: _Some
    segments: _Some
    tokens: _Some
    trained_tokens: _Count
    bytes: _Some
    sha256: str


class _Config(Struct):
    max_length: Annotated[int, Meta(ge=1, le=MAX_LENGTH_LIMIT)]
    columns: list[str]
    strategy: str
    shape: str
    segment_multiple: Annotated[int, Meta(ge=1, le=MAX_LENGTH_LIMIT)] = 1
    label_shift: str = "none"
    max_segments_per_row: Annotated[int, Meta(ge=1, le=MAX_LENGTH_LIMIT)] | None = None
    input_format: str | None = None
    prompt_template: str | None = None
    chat_template: str | None = None
    fields: list[tuple[str, str]] = []


class _Manifest(Struct):
    config: _Config
    tokenizer: _Tokenizer | None
    rows: _Some
    documents: _Count
    segments: _Some
    tokens: _Some
    trained_tokens: _Count
    truncated_documents: _Count
    truncated_tokens: _Count
    dropped_documents: _Count
    dropped_tokens: _Count
    rejected_records: _Count
    empty_documents: _Count
    unpacked_rows: _Some
    truncated_trained_tokens: _Count
    dropped_trained_tokens: _Count
    untrained_documents: _Count
    untrained_tokens: _Count
    trained_turns: _Count
    turns_without_end: _Count
    double_bos_documents: _Count
    unshown_tools: _Count
    padding_tokens: int
    utilization: float
    lower_bound_rows: _Some
    histograms: _Histograms
    inputs: list[_Input]
    units: list[_Unit]
    shards: Annotated[list[_Shard], Meta(min_length=1)]
    attention_cost: _AttentionCost | None = None
    side_files: dict[Annotated[str, Meta(pattern=SIDE_FILE_PATTERN)], str] = {}
    special_tokens_in_text: _Count = 0  # none in older results
    incomplete: str | None = None
    sha256: str | None = None


def misfit(manifest: dict[str, Any]) -> str:
    """What has a type or a value that no reader can work with; "" for nothing."""
    try:
        msgspec.convert(manifest, _Manifest)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        return str(error)
    if manifest.get("attention_cost", {}) is None:
        return "Expected `object`, got `null` - at `$.attention_cost`"
    return ""


def config_of(manifest: dict[str, Any]) -> PackConfig:
    """The options of the run. Raises ValueError when no run could have had them."""
    try:
        config = msgspec.convert(manifest["config"], PackConfig)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(str(error)) from error
    except UsageError as error:
        raise ValueError(error.message) from error
    if list(config.columns) != manifest["config"]["columns"]:
        raise ValueError(f"columns are {', '.join(manifest['config']['columns'])}")
    return config


def why_incomplete(max_loss: float | None, figures: dict[str, Any]) -> str | None:
    """What marks a result incomplete; None when no more was lost than --max-loss allows."""
    tokens, truncated, dropped = (
        figures[name] for name in ("tokens", "truncated_tokens", "dropped_tokens")
    )
    lost = (truncated + dropped) / max(tokens + truncated + dropped, 1)
    if max_loss is None or lost <= max_loss:
        return None
    return (
        f"{lost:.4f} of the tokens were lost, {truncated:,} truncated and {dropped:,} dropped; "
        f"--max-loss is {max_loss}"
    )


def part_of(shard: str) -> int:
    """Which part of its unit a shard of this name is."""
    return int(shard.split("-")[2].partition(".")[0])


def _in_order(shards: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(unit, part) as a run would give them to so many shards of the same units."""
    counts = Counter(shard["unit"] for shard in shards)
    return [(unit, part) for unit in sorted(counts) for part in range(counts[unit])]


def disagreements(manifest: dict[str, Any]) -> list[str]:
    """The figures of a manifest that do not agree with each other."""
    shards, inputs = manifest["shards"], manifest["inputs"]
    slots = manifest["rows"] * manifest["config"]["max_length"]
    histograms = manifest["histograms"]
    expected: list[tuple[str, object, str]] = [
        *((n, sum(s[n] for s in shards), "the sum over its shards")
          for n in ("rows", "segments", "tokens", "trained_tokens")),
        *((n, sum(i[n] for i in inputs), "the sum over its inputs")
          for n in ("documents", "tokens", "empty_documents", "rejected_records")),
        ("documents", sum(histograms["document_length"]), "the sum of document_length"),
        ("rows", sum(histograms["row_fill"]), "the sum of row_fill"),
        ("rows", sum(histograms["segments_per_row"]), "the sum of segments_per_row"),
        ("padding_tokens", slots - manifest["tokens"], "rows x max_length - tokens"),
        ("utilization", manifest["tokens"] / slots, "tokens / (rows x max_length)"),
    ]  # fmt: skip
    wrong = [
        f"{name} is {manifest[name]}, {what} is {value}"
        for name, value, what in expected
        if manifest[name] != value
    ]
    if manifest["lower_bound_rows"] > manifest["rows"]:
        wrong.append(f"lower_bound_rows is {manifest['lower_bound_rows']}, above rows")
    files = [shard["file"] for shard in shards]
    wrong += [
        f"{shard['file']} is said to be of unit {shard['unit']}"
        for shard in shards
        if not shard["file"].startswith(f"shard-{shard['unit']:05d}-")
    ]
    if len(set(files)) < len(files):
        wrong.append("names a shard twice")
    elif [(shard["unit"], part_of(shard["file"])) for shard in shards] != _in_order(shards):
        wrong.append("shards are not in order, or a part of a unit is left out")
    numbers = [unit["unit"] for unit in manifest["units"]]
    if any(a >= b for a, b in pairwise(numbers)):
        wrong.append("units are not in order")
    if {shard["unit"] for shard in shards} - set(numbers):
        wrong.append("a shard is of a unit that is not among the units")
    if any(part[0] >= len(inputs) for unit in manifest["units"] for part in unit["slices"]):
        wrong.append("a unit has a slice of an input that is not among the inputs")
    return wrong
