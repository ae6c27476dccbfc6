"""Whether a manifest can be true: its options, and its figures against each other."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from typing import Any

import msgspec

from packer_cli.config.columns import PAIR
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import MIXED, Shape, joined, shape_named
from packer_cli.errors import UsageError
from packer_cli.result.layout import DOCUMENTS, INDEX, ROWS, kind_of
from packer_cli.result.manifest import Manifest, Result
from packer_cli.result.shards import Shard

# Options that decide whether a run may end well, not what a unit's shards hold: its record says
# which bad records it has skipped.
LIMITS = ("max_loss", "max_errors", "max_unused", "on_error")
_COUNTED = ("rows", "tokens", "trained_tokens")


def document_config_of(manifest: Result) -> DocumentConfig:
    """The options of the run. Raises ValueError when no run can have them."""
    kind = PackConfig if isinstance(manifest, Manifest) else DocumentConfig
    config = manifest.document["config"]
    if config["shape"] == MIXED:  # each input has its own, and none was asked for
        config = config | {"shape": None}
    try:
        return msgspec.convert(config, kind)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    except UsageError as error:
        raise ValueError(error.message) from error


def run_of_sides(document: dict[str, Any]) -> str:
    """What the manifests of both sides of a split have in common, and no other's: a digest of the
    options and the inputs. `document`: either of them.
    """
    config = {name: one for name, one in document["config"].items() if name not in LIMITS}
    config["mixture"] = {name: one for name, one in config["mixture"].items() if name != "part"}
    inputs = [one["sha256"] for one in document["inputs"]]
    content = msgspec.json.encode([document["packer_version"], config, inputs], order="sorted")
    return hashlib.sha256(content).hexdigest()


def shape_of(manifest: Result) -> Shape:
    """What the records are, but for the names of their fields."""
    config = manifest.document["config"]
    names = dict.fromkeys(one.shape for one in manifest.inputs_now.values() if one.shape)
    if names:
        return joined({name: shape_named(name) for name in names})
    # only the inputs show whether the prompts are messages, and tokens those of both kinds
    both = config["shape"] == "tokens" and config.get("overlong") == "split-text"
    of_pairs = config["shape"] == "tokens" and PAIR in config.get("columns", ())
    return Shape(
        config["shape"],
        of_messages=config.get("prompt_template") == "chat",
        of_supervised=both or of_pairs,
        of_text=both,
        of_pairs=of_pairs,
    )


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


def disagreements(manifest: Result) -> list[str]:
    """The figures of a manifest that do not agree with each other."""
    wrong = [*_wrong_figures(manifest), *_wrong_shards(manifest), *_wrong_units(manifest)]
    if isinstance(manifest, Manifest) and manifest.run:
        expected = run_of_sides(manifest.document) if manifest.side else ""
        if manifest.run != expected:
            wrong.append(f"run is {manifest.run!r}, by config and inputs it is {expected!r}")
    return wrong


def _wrong_figures(manifest: Result) -> Iterator[str]:
    listed = manifest.histograms.document_length
    expected: list[tuple[str, object, str]] = [
        *((n, sum(getattr(i, n) for i in manifest.inputs), "the sum over its inputs")
          for n in manifest.counted_by_input),
        ("documents", sum(listed), "the sum of document_length"),
        *(_rows_expected(manifest) if isinstance(manifest, Manifest)
          else _documents_expected(manifest)),
    ]  # fmt: skip
    for name, value, what in expected:
        if getattr(manifest, name) != value:
            yield f"{name} is {getattr(manifest, name)}, {what} is {value}"
    if isinstance(manifest, Manifest) and manifest.lower_bound_rows > manifest.rows:
        yield f"lower_bound_rows is {manifest.lower_bound_rows}, above rows"


def _rows_expected(manifest: Manifest) -> Iterator[tuple[str, object, str]]:
    histograms, slots = manifest.histograms, manifest.rows * manifest.config.max_length
    for name in ("rows", "segments", "tokens", "trained_tokens"):
        yield name, _sum(manifest.shards, name), "the sum over its shards"
    yield "rows", sum(histograms.row_fill), "the sum of row_fill"
    yield "rows", sum(histograms.segments_per_row), "the sum of segments_per_row"
    yield "padding_tokens", slots - manifest.tokens, "rows x max_length - tokens"
    yield "utilization", manifest.tokens / slots, "tokens / (rows x max_length)"


def _documents_expected(manifest: Result) -> Iterator[tuple[str, object, str]]:
    for kind in (DOCUMENTS, INDEX):
        shards = [shard for shard in manifest.shards if kind_of(shard.file) == kind]
        what = "the sum over its shards" if kind == DOCUMENTS else "the sum over its indexes"
        yield "documents", _sum(shards, "rows"), what
        yield "tokens", _sum(shards, "tokens"), what
        yield "trained_tokens", _sum(shards, "trained_tokens"), what


def _sum(shards: list[Shard], name: str) -> int:
    return sum(getattr(shard, name) for shard in shards)


def _wrong_shards(manifest: Result) -> Iterator[str]:
    shards, of_rows = manifest.shards, isinstance(manifest, Manifest)
    kinds = [ROWS] if of_rows else [DOCUMENTS, INDEX]
    for shard in shards:
        if not shard.file.startswith(tuple(f"{kind}-{shard.unit:05d}-" for kind in kinds)):
            yield f"{shard.file} is said to be of unit {shard.unit}"
    if len({shard.file for shard in shards}) < len(shards):
        yield "names a shard twice"
        return
    if not of_rows and (wrong := wrong_pairs(shards)):
        yield wrong
        return
    of_kind = [shard for shard in shards if kind_of(shard.file) == kinds[0]]
    if [(shard.unit, part_of(shard.file)) for shard in of_kind] != _in_order(of_kind):
        yield "shards are not in order, or a part of a unit is left out"


def wrong_pairs(shards: list[Shard]) -> str:
    """What is wrong where each shard of documents is to be followed by their index; "" if nothing
    is.
    """
    for first, second in zip_longest(shards[::2], shards[1::2]):
        names = [one.file.split("-")[:3] if one else [] for one in (first, second)]
        if names[0] != [DOCUMENTS, *names[1][1:]] or names[1][:1] != [INDEX]:
            return f"{first.file} is not a shard of documents that is followed by its index"
        if any(getattr(first, name) != getattr(second, name) for name in ("unit", *_COUNTED)):
            return f"{second.file} is not said to hold as much as {first.file}"
    return ""


def _wrong_units(manifest: Result) -> Iterator[str]:
    numbers = [one.unit for one in manifest.units]
    if any(a >= b for a, b in pairwise(numbers)):
        yield "units are not in order"
    if {shard.unit for shard in manifest.shards} - set(numbers):
        yield "a shard is of a unit that is not among the units"
    if any(part[0] >= len(manifest.inputs) for one in manifest.units for part in one.slices):
        yield "a unit has a slice of an input that is not among the inputs"
