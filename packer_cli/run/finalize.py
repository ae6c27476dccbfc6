"""From the records of all units to a finished result: side files, manifest, replacement."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from msgspec.structs import asdict

import packer_cli
from packer_cli.config.options import PackConfig
from packer_cli.durable import write_file, written
from packer_cli.errors import DataError, InternalError, ThresholdMissed, from_os_error
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import opened
from packer_cli.mixing.choice import Choice
from packer_cli.mixing.units import choice_of, first_units_of
from packer_cli.packing.lower_bound import lower_bound_rows
from packer_cli.records import InputFile
from packer_cli.result.counts import Counts
from packer_cli.result.layout import (
    INDEX,
    INPUT_TIMES,
    MANIFEST,
    REJECTED,
    SQUARED_LENGTHS,
    UNITS,
    kind_of,
)
from packer_cli.result.manifest import (
    DOCUMENT_TOTALS,
    OF_INPUTS,
    TOKENIZED,
    TOTALS,
    DocumentHistograms,
    Histograms,
    Manifest,
    MissedShare,
    Result,
    Source,
    SourceRecords,
    TokenizedManifest,
    TrainingStage,
)
from packer_cli.result.manifest_bytes import to_bytes
from packer_cli.result.manifest_check import run_of_sides, why_incomplete
from packer_cli.result.saved_dataset import saved_dataset
from packer_cli.result.shards import FORMAT_VERSION, Shard, digest
from packer_cli.result.warnings import why_too_much_unused
from packer_cli.run import commits
from packer_cli.run import directory as output
from packer_cli.run.commits import UnitRecord
from packer_cli.run.directory import Claim
from packer_cli.run.identity import Run
from packer_cli.run.input_times import identities
from packer_cli.run.replacing import earlier_result
from packer_cli.run.squared_lengths import join

_COPY_BYTES = 1 << 20


def finalize(run: Run, claim: Claim, before_switch: Callable[[], None] = lambda: None) -> Result:
    """Put the result of `run`, every unit of which has a record, in place; gives its manifest.

    `before_switch`: called once nothing is left to do but that. Raises DataError when there is
    nothing to keep, ThresholdMissed when it would replace a good result by an incomplete one,
    InternalError when tokens are missing.
    """
    work = claim.work
    longest = 0 if run.is_to_tokenize else run.row_config.max_length
    total = Counts(piece_length=np.zeros(longest + 1, np.int64))
    digests = dict[int, commits.Digest]()
    shards, rejected, tokenizer = list[Shard](), list[UnitRecord](), None
    kept, bad, read = set[int](), 0, 0
    with written(work / UNITS) as lines:
        for record in _records(run, work):
            counts = commits.counts_of(record)
            total.add(counts)
            digests |= {index: (size, sha256) for index, size, sha256 in record.inputs}
            shards += record.shards
            tokenizer = (
                _common(tokenizer, record.tokenizer) if run.shape.members else record.tokenizer
            )
            if record.rejected:
                rejected.append(record)
            if record.reused:
                kept.add(record.unit)
            else:
                bad += counts.rejected_records
                read += counts.records
            lines.write(commits.as_line(record))
    _refuse_bad(bad, read, run.config.max_errors, claim)
    _check(total, run, rejected, claim)
    for file in run.files:
        if file.index not in digests:
            digests[file.index] = commits.read_input(work, file.index) or (0, "")
    hashes = dict[str, str]()
    identity = "".join(shard.sha256 for shard in shards)
    files = [shard.file for shard in shards if kind_of(shard.file) != INDEX]
    for name, data in saved_dataset(files, identity).items():
        write_file(work / name, data)
        hashes[name] = hashlib.sha256(data).hexdigest()
    hashes |= run.side_files
    if rejected:
        _join(rejected, claim)
        hashes[REJECTED] = digest(work / REJECTED)[1]
    hashes[UNITS] = digest(work / UNITS)[1]
    if not run.is_to_tokenize:
        join(claim, shards, kept)
        hashes[SQUARED_LENGTHS] = digest(work / SQUARED_LENGTHS)[1]
    manifest = manifest_of(run, tokenizer, digests, shards, total, hashes)
    # not part of the result's content: only --update on this machine reads it
    write_file(work / INPUT_TIMES, identities(run.files))
    write_file(work / MANIFEST, to_bytes(manifest.document))
    _refuse_incomplete(manifest, claim)
    before_switch()
    output.replace(claim)
    return manifest


def _refuse_incomplete(manifest: Result, claim: Claim) -> None:
    earlier = earlier_result(claim.folder)
    if manifest.incomplete and earlier is not None and not earlier.manifest.incomplete:
        raise ThresholdMissed(
            f"{claim.output}: {manifest.incomplete}",
            "the earlier result stays; everything is packed, and with a larger --max-loss the run "
            "finishes at once",
        )


def _records(run: Run, work: Path) -> Iterator[UnitRecord]:
    for unit in run.units:
        yield commits.require_unit(work, unit)


def _check(total: Counts, run: Run, rejected: list[UnitRecord], claim: Claim) -> None:
    if not total.conserved():
        raise InternalError(
            f"{total.encoded_tokens} tokens were encoded, but {total.tokens} placed, "
            f"{total.truncated_tokens} truncated and {total.dropped_tokens} dropped"
        )
    unused = total.looked_at_characters, total.unused
    if reason := why_too_much_unused(run.config.max_unused, *unused):
        raise DataError(
            reason,
            "name fields with --field, or leave them out of the input; everything is packed, and "
            "with a larger --max-unused the run finishes at once",
        )
    if not (total.rows or (run.is_to_tokenize and total.tokens)):
        problem = _nothing(total, run, rejected, claim)
        output.forget(claim)  # no other run would find more
        unshown = "--on-unshown, " if run.config.on_unshown == "error" else ""
        raise DataError(problem, f"check --shape, --field, {unshown}--overlong and the input")


def _refuse_bad(bad: int, read: int, limit: float | None, claim: Claim) -> None:
    """DataError for too many bad records among those that were read: an update's limit is not for
    what it keeps.
    """
    if limit is not None and bad > (limit * read if isinstance(limit, float) else limit):
        raise DataError(
            f"{bad:,} of {read:,} records are bad; --max-errors is {limit}",
            f"see {claim.work}/rejected-*.jsonl; everything is packed, and with a larger "
            "--max-errors the run finishes at once",
        )


def _nothing(total: Counts, run: Run, rejected: list[UnitRecord], claim: Claim) -> str:
    problem = f"nothing to pack: {total.empty_documents} empty, {total.dropped_documents} dropped "
    problem += f"and {total.rejected_records} rejected records, no tokens"
    if total.untrained_documents:
        problem += f"; {total.untrained_documents} of those dropped have nothing to train on"
    if rejected:
        with _rejected_part(rejected[0], claim) as lines:
            first = json.loads(lines.readline())
        file = next(one for one in run.files if one.path == first["file"])
        place, at = file.path, first["position"]
        if at is not None:
            place += f", {reader_for(file.format).describe(file, at)}"
        problem += f"; the first rejected, {place}: {first['reason']}"
    return problem


@contextmanager
def _rejected_part(record: UnitRecord, claim: Claim) -> Iterator[IO[bytes]]:
    """The file that holds the unit's rejected records, at the first of them."""
    path = claim.work / commits.rejected_name(record.unit)
    if record.reused:
        path = claim.output / REJECTED
    try:
        with open(path, "rb") as file:
            file.seek(record.rejected_from)
            yield file
    except OSError as error:
        raise from_os_error(error, path, "read") from error


def _join(rejected: list[UnitRecord], claim: Claim) -> None:
    """Write the rejected records of all units, which may be many, as one file."""
    with written(claim.work / REJECTED) as whole:
        for record in rejected:
            with _rejected_part(record, claim) as part:
                left = record.rejected
                while data := part.read(min(left, _COPY_BYTES)):
                    whole.write(data)
                    left -= len(data)
            if left:
                raise DataError(
                    f"{claim.output}: the rejected records of unit {record.unit} are cut short",
                    "to pack everything again, use --overwrite",
                )


def manifest_of(
    run: Run,
    tokenizer: dict[str, Any] | None,
    digests: dict[int, tuple[int, str]],
    shards: list[Shard],
    counts: Counts,
    side_files: dict[str, str],
) -> Result:
    """Of a finished run. `side_files`: name -> sha256."""
    # a run that fails on bad records may keep units whose own were skipped
    skipped = {"on_error": "skip"} if counts.rejected_records else {}
    begin = {
        "format_version": FORMAT_VERSION,
        "packer_version": packer_cli.__version__,
        "config": run.config.as_json() | {"shape": run.shape.kind} | skipped,
        "tokenizer": tokenizer,
    }
    by_input = _counted_by_input(run, counts)
    end = {
        "inputs": [_input(run, file, *digests[file.index], counts, by_input) for file in run.files],
        "units": [
            {"unit": unit.index, "slices": [[s.file, s.start, s.stop] for s in unit.slices]}
            for unit in run.units
        ],
        "shards": [asdict(shard) for shard in shards],
        "side_files": side_files,
    }
    if run.is_to_tokenize:
        kind = {"kind": TOKENIZED}
        return TokenizedManifest.of(kind | begin | _of_documents(counts) | end)
    tables = tables_of(run.files, run.row_config, shards)
    mixed: dict[str, Any] = {name: [asdict(one) for one in table] for name, table in tables.items()}
    if run.row_config.mixture and run.row_config.mixture.is_split:
        mixed |= {"run": run_of_sides(begin | end)}
    return Manifest.of(begin | totals_of_rows(run.row_config, counts) | mixed | end)


def tables_of(
    files: Sequence[InputFile], config: PackConfig, shards: Sequence[Shard]
) -> dict[str, list[Any]]:
    """What a manifest says of the sources and stages of a recipe, by the names of its lists; {}
    without a recipe.
    """
    choice = choice_of(files, config)
    if choice is None:
        return {}
    first_units, rows = first_units_of(files, config), [0] * len(choice.stages)
    for shard in shards:
        rows[bisect_right(first_units, shard.unit) - 1] += shard.rows
    named = config.mixture.stages if config.mixture else ()
    stages = [
        TrainingStage(stage.name, sum(rows[:number]), rows[number])
        for number, stage in enumerate(named)
    ]
    return {
        "sources": sources_of(choice),
        "stages": stages,
        "missed_shares": [MissedShare(**vars(one)) for one in choice.shares if one.is_missed],
        "source_records": [
            _records_of(one.amount.name, [opened(files[place]).facts for place in one.places])
            for one in choice.sources
        ],
    }


def _records_of(name: str, directories: Sequence[TokenizedManifest]) -> SourceRecords:
    sums = {total: sum(getattr(one, total) for one in directories) for total in DOCUMENT_TOTALS}
    unread = Counter[str]()
    for one in directories:
        unread.update(one.unread)
    totals = {total: figure for total, figure in sums.items() if figure}
    return SourceRecords(name, totals, dict(sorted(unread.items())))


def sources_of(choice: Choice) -> list[Source]:
    """What a manifest says of the sources."""
    return [
        Source(
            one.amount.name, (one.places.start, one.places.stop), one.documents, one.available,
            one.asked, one.taken, one.held_out, one.duplicates,
        )
        for one in choice.sources
    ]  # fmt: skip


def _of_documents(counts: Counts) -> dict[str, Any]:
    return {
        **{name: getattr(counts, name) for name in DOCUMENT_TOTALS},
        **_named(counts),
        "histograms": {
            name: getattr(counts, name).tolist() for name in DocumentHistograms.__struct_fields__
        },
    }


def totals_of_rows(config: PackConfig, counts: Counts) -> dict[str, Any]:
    """What a manifest says of all rows."""
    slots = counts.rows * config.max_length
    lost = counts.truncated_tokens, counts.dropped_tokens
    incomplete = why_incomplete(config.max_loss, counts.tokens, *lost)
    return {
        "rows": counts.rows,
        **{name: getattr(counts, name) for name in TOTALS},
        **_named(counts),
        **_dropped(counts),
        "padding_tokens": slots - counts.tokens,
        "utilization": counts.tokens / slots if slots else 0.0,
        "lower_bound_rows": lower_bound_rows(
            counts.piece_length,
            config.max_length,
            max_segments=config.max_segments_per_row,
            segment_multiple=config.segment_multiple,
        ),
        "histograms": {
            name: getattr(counts, name).tolist() for name in Histograms.__struct_fields__
        },
        **_attention_cost(config, counts),
        **({"incomplete": incomplete} if incomplete else {}),
    }


def _named(counts: Counts) -> dict[str, Any]:
    """Totals by the names of fields, where there are any."""
    totals = {"unread": counts.unread, "unused": counts.unused}
    return {name: dict(sorted(total.items())) for name, total in totals.items() if total}


def _dropped(counts: Counts) -> dict[str, Any]:
    lengths = counts.dropped_length
    return {"dropped_length": lengths.tolist()} if lengths.any() else {}


def _common(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """The tokenizer of units whose files have several shapes: with what is around all documents."""
    if one is None or other is None:
        return other
    around = {name for name in ("prefix", "suffix") if one.get(name) != other.get(name)}
    return {name: value for name, value in other.items() if name not in around}


def _counted_by_input(run: Run, counts: Counts) -> list[str]:
    """The totals that each input has its part of. An update may have kept units whose records an
    earlier packer wrote, without the losses and the trained tokens of each input.
    """
    totals = DOCUMENT_TOTALS if run.is_to_tokenize else TOTALS

    def is_whole(name: str) -> bool:
        parts = (getattr(one, name) for one in counts.files.values())
        return bool(sum(parts) == getattr(counts, name))

    return [name for name in OF_INPUTS if name in totals and is_whole(name)]


def _input(
    run: Run, file: InputFile, size: int, sha256: str, counts: Counts, by_input: list[str]
) -> dict[str, Any]:
    own = counts.file(file.index)
    figures = {name: getattr(own, name) for name in by_input}
    entry = {"path": file.path, "size": size, "sha256": sha256, **figures}
    if file.format == TOKENIZED:
        entry["format"] = TOKENIZED
    if file.shape is not None:
        entry["shape"] = run.shape.of(file.shape).name
    return entry if file.format else entry | {"removed": True}


def _attention_cost(config: PackConfig, counts: Counts) -> dict[str, Any]:
    if config.balance == "none":
        return {}
    before, after = counts.attention_before.as_json(), counts.attention_after.as_json()
    return {"attention_cost": {"before": before, "after": after}}
