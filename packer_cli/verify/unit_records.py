"""units.jsonl checked against the manifest, since `--update` relies on it.

`packed_again.py` checks a unit's counts against its inputs; this module checks that the counts of
all units add up to the manifest's figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import asdict

from packer_cli.errors import DataError
from packer_cli.packing.lower_bound import lower_bound_rows
from packer_cli.result.counts import Counts
from packer_cli.result.layout import INDEX, REJECTED, UNITS, kind_of
from packer_cli.result.manifest import DOCUMENT_TOTALS, TOTALS, Manifest, Result, Unit
from packer_cli.result.shards import Shard
from packer_cli.run.commits import UnitRecord, counts_of
from packer_cli.verify.findings import Findings
from packer_cli.verify.reading import Stored, digest_of, lines_of


def unit_records(stored: Stored) -> Iterator[UnitRecord]:
    """The records of a result's units. Raises DataError for a line that is not one."""
    decode = msgspec.json.Decoder(UnitRecord).decode
    for number, line in enumerate(lines_of(stored, UNITS), 1):
        try:
            yield decode(line)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, too
            raise DataError(f"line {number} is not the record of a unit: {error}") from error


def check_unit_records(stored: Stored, findings: Findings) -> None:
    """Add the differences between the units' records and the manifest."""
    manifest = stored.facts
    longest = manifest.config.max_length if isinstance(manifest, Manifest) else 0
    total = Counts(piece_length=np.zeros(longest + 1, np.int64))
    rejected, numbers = 0, list[int]()
    units = {one.unit: one for one in manifest.units}
    shards = {some[0].unit: some for some in manifest.shards_of_units()}
    try:
        for record in unit_records(stored):
            numbers.append(record.unit)
            counts = counts_of(record)
            if len(counts.piece_length) > longest + 1:
                raise ValueError("pieces that are longer than a row")
            if record.unit in units:
                own = shards.get(record.unit, [])
                texts = _differences(record, counts, units[record.unit], own, manifest)
                findings.add(UNITS, *(f"unit {record.unit}: {text}" for text in texts))
            total.add(counts)
            rejected += record.rejected
        figures = list(_figures(total, manifest))
    except DataError as error:
        findings.add(UNITS, error.message)
        return
    except (ValueError, OverflowError, RecursionError) as error:
        findings.add(UNITS, f"unit {(numbers or [0])[-1]}: impossible counts: {error}")
        return
    if numbers != list(units):
        findings.add(
            UNITS, f"has records of {len(numbers)} units, not of the {len(units)} in the manifest"
        )
        return
    findings.add(
        UNITS,
        *(f"{name}: {value} in all units, {listed} in the manifest"
          for name, value, listed in figures if value != listed),
    )  # fmt: skip
    size = digest_of(stored, REJECTED)[0] if REJECTED in manifest.side_files else 0
    if rejected != size:
        findings.add(
            UNITS, f"{rejected} bytes of rejected records in all units, {REJECTED} has {size}"
        )


def _differences(
    record: UnitRecord,
    counts: Counts,
    unit: Unit,
    shards: list[Shard],
    manifest: Result,
) -> list[str]:
    """How a record differs from its unit in the manifest."""
    wrong = []
    if [part[:3] for part in record.slices] != unit.slices:
        wrong.append("its slices are not those in the manifest")
    if record.shards != shards:
        wrong.append("its shards are not those in the manifest")
    if not _agree(record.tokenizer, manifest.document["tokenizer"]):
        wrong.append("its tokenizer is not that in the manifest")
    if record.reused or record.rejected_from or record.rejected < 0:
        wrong.append("is not the record of a finished result")
    digests = {index: (one.size, one.sha256) for index, one in enumerate(manifest.inputs)}
    for index, size, sha256 in record.inputs:
        if (size, sha256) != digests.get(index):
            wrong.append(f"its input {index} is not as in the manifest")
    # a document of a tokenized directory is a row of its shard
    own = {"rows": "rows", "segments": "segments", "tokens": "tokens"}
    if not isinstance(manifest, Manifest):
        own = {"documents": "rows", "tokens": "tokens", "trained_tokens": "trained_tokens"}
        shards = [shard for shard in shards if kind_of(shard.file) != INDEX]
    for name, in_shard in own.items():
        value, in_shards = getattr(counts, name), sum(getattr(shard, in_shard) for shard in shards)
        if value != in_shards:
            wrong.append(f"{name} is {value}, {in_shards} in its shards")
    if not counts.conserved():
        wrong.append(
            f"encoded_tokens is {counts.encoded_tokens}, {counts.tokens} are in rows, "
            f"{counts.truncated_tokens} truncated and {counts.dropped_tokens} dropped"
        )
    return wrong


def _agree(tokenizer: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether they agree in all that both have: earlier packers wrote less, and an update keeps
    their units.
    """
    if tokenizer is None or other is None:
        return tokenizer == other
    return all(tokenizer[name] == other[name] for name in tokenizer.keys() & other.keys())


def _figures(total: Counts, manifest: Result) -> Iterator[tuple[str, Any, Any]]:
    """(name, value by the units, value in the manifest) of every figure."""
    for name in ("rows", *TOTALS) if isinstance(manifest, Manifest) else DOCUMENT_TOTALS:
        yield name, getattr(total, name), getattr(manifest, name)
    yield "unread", total.unread, manifest.unread
    yield "unused", total.unused, manifest.unused
    for name, listed in asdict(manifest.histograms).items():
        if listed:  # an earlier packer did not count all
            yield name, getattr(total, name).tolist(), listed
    if isinstance(manifest, Manifest):
        yield from _row_figures(total, manifest)
    by_input = manifest.counted_by_input
    for index, one in enumerate(manifest.inputs):
        for name in by_input:
            yield f"{name} of {one.path}", getattr(total.file(index), name), getattr(one, name)


def _row_figures(total: Counts, manifest: Manifest) -> Iterator[tuple[str, Any, Any]]:
    config = manifest.config
    if manifest.attention_cost is not UNSET:
        for name, cost in asdict(manifest.attention_cost).items():
            counted = getattr(total, f"attention_{name}").as_json()
            yield f"attention_cost {name}", counted, asdict(cost)
    dropped = total.dropped_length
    yield "dropped_length", dropped.tolist() if dropped.any() else [], manifest.dropped_length
    bound = lower_bound_rows(
        total.piece_length,
        config.max_length,
        max_segments=config.max_segments_per_row,
        segment_multiple=config.segment_multiple,
    )
    yield "lower_bound_rows", bound, manifest.lower_bound_rows
