"""Whether a manifest can be true: its options, and its figures against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.errors import UsageError
from packer_cli.result.manifest import OF_INPUTS, Manifest, Result
from packer_cli.result.shards import Shard


def document_config_of(manifest: Result) -> DocumentConfig:
    """The options of the run. Raises ValueError when no run can have them."""
    kind = PackConfig if isinstance(manifest, Manifest) else DocumentConfig
    try:
        return msgspec.convert(manifest.document["config"], kind)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    except UsageError as error:
        raise ValueError(error.message) from error


def config_of(manifest: Manifest) -> PackConfig:
    """The same of a run that packed rows."""
    config = document_config_of(manifest)
    if not isinstance(config, PackConfig):
        raise ValueError("max_length is missing")
    if list(config.columns) != manifest.config.columns:
        raise ValueError(f"columns are {', '.join(manifest.config.columns)}")
    return config


def why_incomplete(max_loss: float | None, tokens: int, truncated: int, dropped: int) -> str | None:
    """The reason to mark a result incomplete; None when --max-loss allows what was lost.

    Takes the tokens in rows, and those truncated and dropped.
    """
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


def _in_order(shards: list[Shard]) -> list[tuple[int, int]]:
    """(unit, part) as a run would give them to so many shards of the same units."""
    counts = Counter(shard.unit for shard in shards)
    return [(unit, part) for unit in sorted(counts) for part in range(counts[unit])]


def disagreements(manifest: Manifest) -> list[str]:
    """The figures of a manifest that do not agree with each other."""
    return [*_wrong_figures(manifest), *_wrong_shards(manifest), *_wrong_units(manifest)]


def _wrong_figures(manifest: Manifest) -> Iterator[str]:
    shards, inputs, histograms = manifest.shards, manifest.inputs, manifest.histograms
    slots = manifest.rows * manifest.config.max_length
    expected: list[tuple[str, object, str]] = [
        *((n, sum(getattr(s, n) for s in shards), "the sum over its shards")
          for n in ("rows", "segments", "tokens", "trained_tokens")),
        *((n, sum(getattr(i, n) for i in inputs), "the sum over its inputs")
          for n in OF_INPUTS),
        ("documents", sum(histograms.document_length), "the sum of document_length"),
        ("rows", sum(histograms.row_fill), "the sum of row_fill"),
        ("rows", sum(histograms.segments_per_row), "the sum of segments_per_row"),
        ("padding_tokens", slots - manifest.tokens, "rows x max_length - tokens"),
        ("utilization", manifest.tokens / slots, "tokens / (rows x max_length)"),
    ]  # fmt: skip
    for name, value, what in expected:
        if getattr(manifest, name) != value:
            yield f"{name} is {getattr(manifest, name)}, {what} is {value}"
    if manifest.lower_bound_rows > manifest.rows:
        yield f"lower_bound_rows is {manifest.lower_bound_rows}, above rows"


def _wrong_shards(manifest: Manifest) -> Iterator[str]:
    shards = manifest.shards
    for shard in shards:
        if not shard.file.startswith(f"shard-{shard.unit:05d}-"):
            yield f"{shard.file} is said to be of unit {shard.unit}"
    if len({shard.file for shard in shards}) < len(shards):
        yield "names a shard twice"
    elif [(shard.unit, part_of(shard.file)) for shard in shards] != _in_order(shards):
        yield "shards are not in order, or a part of a unit is left out"


def _wrong_units(manifest: Manifest) -> Iterator[str]:
    numbers = [one.unit for one in manifest.units]
    if any(a >= b for a, b in pairwise(numbers)):
        yield "units are not in order"
    if {shard.unit for shard in manifest.shards} - set(numbers):
        yield "a shard is of a unit that is not among the units"
    if any(part[0] >= len(manifest.inputs) for one in manifest.units for part in one.slices):
        yield "a unit has a slice of an input that is not among the inputs"
