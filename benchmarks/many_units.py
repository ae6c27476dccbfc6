"""What does a run of a million work units cost at its end: finalize, the manifest, stats?

The units are not packed: a million copies of the record of one real unit of 16 MB (text,
L = 4096), each with a shard of one byte. That stands for 16 TB of text. Minutes, a million files.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

import msgspec
from measuring import report, run, say, seconds_of
from settings import CHECKOUT, Settings, from_environment

from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import RunOptions
from packer_cli.options.shapes import Shape
from packer_cli.records import InputFile, Slice, WorkUnit
from packer_cli.result.layout import ID, ROWS, WORK, named_by_digest, unnamed_shard
from packer_cli.result.layout import UNITS as RECORDS
from packer_cli.result.manifest import load_any
from packer_cli.run.pipeline import finish_if_last
from packer_cli.run.run_plan import (
    RUN,
    RunPlan,
    TokenizerSelection,
    UnitRecord,
    read_units,
    sealed,
    squared_lengths_name,
)

UNITS = 1_000_000
MOST_GB = 8.0


def _record(settings: Settings, folder: Path) -> UnitRecord:
    """Of a real unit: sample_data many times over."""
    sample = (CHECKOUT / "sample_data" / "documents.jsonl").read_bytes()
    data = folder / "data.jsonl"
    data.write_bytes(sample * ((16 << 20) // len(sample)))
    result = folder / "packed"
    run([settings.packer, "pack", data, "-l", "4096", "-t", "bytes", "-q", "-o", result])
    return next(read_units(result, load_any(result)))


def _simulate(record: UnitRecord, destination: Path, count: int) -> None:
    """A work folder in which `count` such units are packed."""
    size = 1 << 24
    config = PackConfig(max_length=4096, train_on="all", overlong="split", prompt_template="none")
    files = tuple(InputFile(i, f"data/{i:07d}.jsonl", "jsonl", None, size, 0) for i in range(count))
    units = tuple(WorkUnit(i, (Slice(i, 0, None, size),)) for i in range(count))
    made = RunPlan(
        config, Shape("text", {"text": "text"}), files, units, TokenizerSelection("bytes")
    )
    work = destination / WORK / ID
    work.mkdir(parents=True)
    (work / RUN).write_bytes(made.to_bytes())
    counts = record.counts | {"files": []}
    costs = destination.parent / "costs"  # of as many rows, for all units one file
    costs.write_bytes(bytes(8 * sum(shard.rows for shard in record.shards)))
    for unit in units:
        name = named_by_digest(unnamed_shard(ROWS, unit.index, 0), record.shards[0].sha256)
        shards = [msgspec.structs.replace(record.shards[0], file=name, unit=unit.index, bytes=1)]
        found = msgspec.structs.replace(
            record,
            unit=unit.index,
            slices=unit.slices,
            shards=shards,
            counts=counts | {"files": [[unit.index, *record.counts["files"][0][1:]]]},
            run=made.identity,
            digests=[(unit.index, "0" * 64)],
        )
        (work / f"unit-{unit.index:05d}.json").write_bytes(sealed(msgspec.json.encode(found)))
        (work / name).write_bytes(b"0")
        os.link(costs, work / squared_lengths_name(unit.index))


def main() -> None:
    settings = from_environment()
    count = 2000 if settings.quick else UNITS
    settings.cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="units-", dir=settings.cache))
    try:
        record = _record(settings, folder)
        say(f"making {count:,} units")
        _simulate(record, folder / "out", count)
        os.sync()
        seconds = seconds_of(lambda: finish_if_last(folder / "out", RunOptions()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        manifest = (folder / "out" / "manifest.json").stat().st_size
        units = (folder / "out" / RECORDS).stat().st_size
        stats = run([settings.packer, "stats", folder / "out"], settle=False).seconds
    finally:
        shutil.rmtree(folder)
    report(
        f"finalize of {count:,} units",
        "" if settings.quick else f"<= {MOST_GB:.0f} GB",
        f"{seconds:.0f} s, {peak / 1e9:.1f} GB; manifest {manifest / 1e6:.0f} MB, "
        f"units.jsonl {units / 1e6:.0f} MB; then stats {stats:.1f} s",
        None if settings.quick else peak <= MOST_GB * 1e9,
        seconds=seconds,
        peak_bytes=peak,
        manifest_bytes=manifest,
        units_bytes=units,
        stats_seconds=stats,
    )


if __name__ == "__main__":
    main()
