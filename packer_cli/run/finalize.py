"""Finish a run: from the records of all its units to a manifest, and the result in its place.

    finalize(run, output) -> Result        in a directory
    publish(run, url, ...) -> Result       at a URL

The records are read one after another; memory holds the counts and what the manifest lists, about
a kilobyte a unit.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import merge
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET, to_builtins
from msgspec.structs import asdict

import packer_cli
from packer_cli import storage
from packer_cli.errors import (
    DataError,
    InternalError,
    PackerError,
    ThresholdMissed,
    UsageError,
    from_os_error,
    os_errors,
)
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.discovery import check_unchanged
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import opened
from packer_cli.mixing.units import choice_of
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import refuse
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import RunOptions
from packer_cli.packing.figures import lower_bound_rows
from packer_cli.records import InputFile, Slice
from packer_cli.result.counts import OF_TRACES, Counts
from packer_cli.result.existing import listed, look
from packer_cli.result.layout import (
    FORMAT_VERSION,
    INDEX,
    MANIFEST,
    REJECTED,
    SQUARED_LENGTHS,
    UNITS,
    Shard,
    digest,
    kind_of,
    saved_dataset,
)
from packer_cli.result.manifest import (
    DOCUMENT_TOTALS,
    TOKENIZED,
    TOTALS,
    DocumentHistograms,
    Histograms,
    Manifest,
    Result,
    SourceRecords,
    TokenizedManifest,
    TokenizerInfo,
    run_of_sides,
    to_bytes,
    why_incomplete,
)
from packer_cli.result.reader import HEADER_BYTES, squares_header
from packer_cli.run.compare import names_of, refuse_other_result
from packer_cli.run.place import LockedOutput, announce, clean_url, discard, switch, upload
from packer_cli.run.run_plan import (
    RunPlan,
    UnitRecord,
    as_line,
    common_tokenizer,
    read_unit,
    rejected_name,
    squared_lengths_name,
)
from packer_cli.storage import size_of, write_file, written

_COPY_BYTES = 1 << 20


def finalize(run: RunPlan, output: LockedOutput) -> Result:
    """Put the result of `run`, whose units all have records, in its place; returns its manifest.

    Raises DataError if nothing is packed, ThresholdMissed if an incomplete result would replace a
    good one, InternalError if tokens are missing.
    """
    work, state = output.work, look(output.path)
    totals = _RunTotals(run, output)
    with written(work / UNITS) as lines:
        for record in merge(_kept(run, output), _packed(run, work), key=attrgetter("unit")):
            totals.add(record)
            lines.write(as_line(record))
    digests = totals.digests
    _check(totals)
    for file in run.files:  # a URL has a version; of a recipe, no unit may have read a beginning
        if file.index not in digests and file.path != STDIN and not storage.is_url(file.path):
            digests[file.index] = digest(file.path)[1]
            check_unchanged(file)
    manifest = _manifest_of(totals, _side_files(totals))
    if manifest.incomplete and state.result and not state.result.incomplete:
        raise ThresholdMissed(
            f"{output.path}: {manifest.incomplete}",
            "the earlier result stays; everything is packed, and with a larger --max-loss the run "
            "finishes at once",
        )
    content = to_bytes(manifest.document)
    switch(output, state.journal(manifest, content), content)
    return manifest


def _packed(run: RunPlan, work: Path) -> Iterator[UnitRecord]:
    """Yield the records of the units that this run has packed."""
    for unit in run.units:
        record = read_unit(work, unit, run.identity)
        if record is None:
            raise InternalError(
                f"unit {unit.index} was packed, but its files in {work} are not right"
            )
        yield record


def _kept(run: RunPlan, output: LockedOutput) -> Iterator[UnitRecord]:
    """Yield the records of the units that stay. Raises DataError if a shard of them is lost."""
    for record in run.kept:
        for shard in record.shards:
            if size_of(output.path / shard.file) != shard.bytes:
                raise DataError(
                    f"{output.path / shard.file}: is missing or cut short since the run began",
                    "restore it, and run the same command again; or pack everything again with "
                    "--overwrite",
                )
        yield record


class _FilePart(NamedTuple):
    """Bytes of a file that a unit has written beside its shards."""

    path: Path
    start: int
    size: int


class _RunTotals:
    """The records of all units, added up.

    units      their slices, as the manifest lists them
    counts     of all documents and rows
    digests    sha256 of inputs, by index
    rejected   where the rejected records of units lie
    squares    where the squared lengths of their rows lie
    sessions   (file, digest) of sessions of calls, uint64[sessions, 2] of each unit
    bad, read  records of the units that this run has packed
    """

    def __init__(self, run: RunPlan, output: LockedOutput) -> None:
        self.run, self.output = run, output
        longest = 0 if run.is_to_tokenize else run.row_config.max_length
        self.counts = Counts(piece_length=np.zeros(longest + 1, np.int64))
        self.digests = dict[int, str]()
        self.sessions = [np.empty((0, 2), np.uint64)]
        self.units, self.shards = list[dict[str, Any]](), list[Shard]()
        self.rejected, self.squares = list[_FilePart](), list[_FilePart]()
        self.tokenizer: TokenizerInfo | None = None
        self.bad = self.read = self.stdin_bytes = 0

    def add(self, record: UnitRecord) -> None:
        """Add the record of a unit."""
        counts = Counts.from_json(record.counts)
        self.counts.add(counts)
        self.digests |= dict(record.digests)
        if record.sessions is not UNSET:
            self.sessions.append(np.array(record.sessions, np.uint64))
        slices = [part[:3] for part in record.slices]
        self.units.append({"unit": record.unit, "slices": slices})
        self.shards += record.shards
        self.tokenizer = common_tokenizer([record.tokenizer, self.tokenizer])
        self.stdin_bytes += record.stdin_bytes
        folder, rejected_from, squares_from = self.output.work, 0, 0
        rejected, squares = rejected_name(record.unit), squared_lengths_name(record.unit)
        if record.before is not None:
            folder, rejected, squares = self.output.path, REJECTED, SQUARED_LENGTHS
            rejected_from, rows = record.before
            squares_from = HEADER_BYTES + 8 * rows
        else:
            self.bad += counts.rejected_records
            self.read += counts.records
        if record.rejected:
            self.rejected.append(_FilePart(folder / rejected, rejected_from, record.rejected))
        if record.rows:
            self.squares.append(_FilePart(folder / squares, squares_from, 8 * record.rows))


def _check(totals: _RunTotals) -> None:
    """Raise DataError for too many bad records among those that are new, or if nothing is left."""
    counts, run, work = totals.counts, totals.run, totals.output.work
    later = "everything is packed, and with a larger limit the run finishes at once"
    tip = f"see {work}/rejected-*.jsonl; {later}"
    check_limits(run.config, counts, totals.bad, totals.read, tip)
    _refuse_scattered_sessions(totals)
    if counts.rows or (run.is_to_tokenize and counts.tokens):
        return
    problem, tip = nothing_to_pack(counts, run.config)
    if counts.untrained_documents:
        problem += f"; {counts.untrained_documents} of those dropped have nothing to train on"
    if totals.rejected:
        path, start, size = totals.rejected[0]
        first = json.loads(path.read_bytes()[start : start + size].partition(b"\n")[0])
        file = next((file for file in run.files if file.known_as == first["file"]), None)
        place, position = storage.shown(first["file"]), first["position"]
        if file is not None and position is not None:  # no file: it has moved since
            place += f", {reader_for(file.format).describe(file, position)}"
        problem += f"; the first rejected, {place}: {first['reason']}"
    discard(work)  # no other run would find more
    raise DataError(problem, tip)


def _refuse_scattered_sessions(totals: _RunTotals) -> None:
    """Raise DataError for a session whose calls stand in several places of a file."""
    from packer_cli.chat.captures import SessionReader  # noqa: PLC0415 other records need none

    sessions, times = np.unique(np.concatenate(totals.sessions), axis=0, return_counts=True)
    for index in np.unique(sessions[times > 1][:, 0]).tolist():
        file = totals.run.files[index]
        reader = SessionReader(file, totals.run.shape.of(file.shape), totals.run.config)
        for _ in reader.read(Slice(index, 0, None, file.size)):  # finds the place
            pass


def nothing_to_pack(counts: Counts, config: DocumentConfig) -> tuple[str, str]:
    """Return the message and the tip for a run that leaves no tokens."""
    lost = f"{counts.empty_documents} empty, {counts.dropped_documents} dropped and"
    lost += f" {counts.rejected_records} rejected records"
    lost += f", {counts.filtered_traces} traces left out" if counts.filtered_traces else ""
    filtered = counts.filtered_documents
    if filtered:
        lost += f", {filtered} documents left out by --where"
        lost += f" ({counts.filtered_without_field} lack its field,"
        lost += f" {counts.filtered_of_other_type} have another type in it)"
    also = "--on-unshown, " if config.on_unshown == "error" else ""
    also += "--where, " if filtered or counts.filtered_traces else ""
    return (
        f"nothing to pack: {lost}, no tokens",
        f"check --shape, --field, --role, {also}--overlong and the input",
    )


def check_limits(config: DocumentConfig, counts: Counts, bad: int, read: int, tip: str) -> None:
    """Raise DataError if more of the records that were `read` are `bad` than the options allow;
    InternalError if an encoded token is neither in a row nor known to be lost.
    """
    limit = config.max_errors
    if limit is not None and bad > (limit * read if isinstance(limit, float) else limit):
        raise DataError(f"{bad:,} of {read:,} records are bad; --max-errors is {limit}", tip)
    if not counts.conserved():
        raise InternalError(
            f"{counts.encoded_tokens} tokens were encoded, but {counts.tokens} placed, "
            f"{counts.truncated_tokens} truncated and {counts.dropped_tokens} dropped"
        )


def _side_files(totals: _RunTotals) -> dict[str, str]:
    """Write the files that a result has beside its shards; returns their sha256 by name."""
    run, work, shards = totals.run, totals.output.work, totals.shards
    files = [shard.file for shard in shards if kind_of(shard.file) != INDEX]
    dataset = saved_dataset(files, "".join(shard.sha256 for shard in shards))
    for name, content in dataset.items():
        write_file(work / name, content)
    joined = [UNITS]
    if totals.rejected:
        _join(work / REJECTED, totals.rejected)
        joined = [REJECTED, UNITS]
    if not run.is_to_tokenize:
        header = squares_header(sum(shard.rows for shard in shards))
        _join(work / SQUARED_LENGTHS, totals.squares, header)
        joined.append(SQUARED_LENGTHS)
    hashes = {name: digest(work / name)[1] for name in (*dataset, *joined)}
    first = {name: hashes.pop(name) for name in dataset}
    return first | run.chosen.hashes | hashes


def _join(path: Path, parts: Iterable[_FilePart], head: bytes = b"") -> None:
    """Write what units have written beside their shards, which may be much, as one file."""
    with written(path) as whole:
        whole.write(head)
        for source, start, left in parts:
            with os_errors(source), open(source, "rb") as file:
                file.seek(start)
                while data := file.read(min(left, _COPY_BYTES)):
                    whole.write(data)
                    left -= len(data)  # noqa: PLW2901
            if left:
                tip = "to pack everything again, use --overwrite"
                raise DataError(f"{source}: is cut short", tip)


def publish(
    run: RunPlan, url: str, options: RunOptions, pack: Callable[[Path, RunOptions], Result]
) -> Result:
    """Pack `run` into a temporary directory by `pack`, and upload the result; returns its manifest.

    Raises UsageError, before anything is packed, for what must not be replaced; ThresholdMissed for
    a result that is marked incomplete, which is not uploaded.
    """
    state = look(url)
    if state.result and not options.overwrite:
        refuse_other_result(url, state.result, run)
        options.notify(f"{url}: up to date")
        if state.owned.keys() <= {*listed(state.result), MANIFEST}:
            clean_url(state, state.owned)  # at most the journal of its own upload
        else:  # interrupted or going on: there is no way to know
            options.notify(
                f"{url}: another upload into it was interrupted, or is going on; --overwrite "
                "removes what it has left there"
            )
        return state.result
    state.refuse_foreign(names_of(run))
    announce(state)  # which shows that the URL can be written to
    is_uploading = state.is_begun
    try:
        with TemporaryDirectory(prefix="packer-") as folder:
            local = Path(folder, "result")
            manifest = pack(local, dataclasses.replace(options, before_switch=lambda: None))
            if manifest.incomplete:
                raise ThresholdMissed(
                    f"{url}: {manifest.incomplete}",
                    "nothing is uploaded: pack with another --overlong, --max-length or --max-loss",
                )
            journal = state.journal(manifest, (local / MANIFEST).read_bytes())
            is_uploading = True
            upload(state, local, journal, options)
    except OSError as error:
        raise from_os_error(error, error.filename or url, "write") from error
    finally:
        if not is_uploading:
            with suppress(PackerError):
                clean_url(state, state.owned)
    return manifest


def check_url(url: str, options: RunOptions) -> None:
    """Raise UsageError for a URL that is only read, and for options that need a directory."""
    refuse((
        (not url.partition("://")[2].strip("/"), f"--output: {url}: names no folder",
         "for example s3://bucket/folder"),
        (options.add, f"--add: {url}: a URL, and only local results can be added to",
         "add to a local copy and upload that, or pack everything again with --overwrite"),
        (options.as_rank, f"--rank: {url}: a URL, and ranks only share local directories",
         "give the ranks a directory that all of them see, then upload it, manifest.json last"),
    ))  # fmt: skip
    storage.check_writable(url)
    if storage.is_file(url):
        raise UsageError(f"{url}: exists and is not a folder", "choose another --output")


def _manifest_of(totals: _RunTotals, side_files: dict[str, str]) -> Result:
    """Return the manifest of a finished run. `side_files`: their sha256, by name."""
    run, counts = totals.run, totals.counts
    # a run that fails on bad records may keep units that have skipped some
    skipped = {"on_error": "skip"} if counts.rejected_records else {}
    begin = {
        "format_version": FORMAT_VERSION,
        "packer_version": packer_cli.__version__,
        "config": run.config.as_json() | {"shape": run.shape.kind} | skipped,
        "tokenizer": to_builtins(totals.tokenizer),
    }
    work = totals.output.work
    end = {
        "inputs": [_input(totals, file) for file in run.files],
        "units": totals.units,
        "shards": to_builtins(totals.shards),
        "side_files": side_files,
        "side_file_bytes": {name: (work / name).stat().st_size for name in side_files},
    }
    if run.is_to_tokenize:
        kind = {"kind": TOKENIZED}
        return TokenizedManifest.of(kind | begin | totals_of_documents(counts) | end)
    mixed = _mixture_tables(run.files, run.row_config)
    if run.row_config.mixture and run.row_config.mixture.is_split:
        mixed |= {"run": run_of_sides(begin | end)}
    return Manifest.of(begin | totals_of_rows(run.row_config, counts) | mixed | end)


def _mixture_tables(files: Sequence[InputFile], config: PackConfig) -> dict[str, Any]:
    """Return the lists of a manifest that describe a recipe's sources; {} without a recipe."""
    choice, records = choice_of(files, config), list[SourceRecords]()
    if choice is None:
        return {}
    for source in choice.sources:
        facts = [opened(file).facts for file in files[slice(*source.inputs)]]
        sums = {total: sum(getattr(one, total) for one in facts) for total in DOCUMENT_TOTALS}
        unread = sum((Counter(one.unread) for one in facts), Counter[str]())
        totals = {total: figure for total, figure in sums.items() if figure}
        records.append(SourceRecords(source.name, totals, dict(sorted(unread.items()))))
    return {
        "sources": to_builtins(choice.sources),
        "missed_shares": to_builtins([share for share in choice.shares if share.is_missed]),
        "source_records": [*map(asdict, records)],
    }


def totals_of_documents(counts: Counts) -> dict[str, Any]:
    """Return the totals of all documents of a tokenized directory, for its manifest."""
    return _totals(counts, DOCUMENT_TOTALS, DocumentHistograms)


def totals_of_rows(config: PackConfig, counts: Counts) -> dict[str, Any]:
    """Return the totals of all rows, for a manifest."""
    slots = counts.rows * config.max_length
    lost = counts.truncated_tokens, counts.dropped_tokens
    totals = {"rows": counts.rows, **_totals(counts, TOTALS, Histograms)}
    histograms = totals.pop("histograms")
    if counts.dropped_length.any():
        totals["dropped_length"] = counts.dropped_length.tolist()
    totals |= {
        "padding_tokens": slots - counts.tokens,
        "utilization": counts.tokens / slots if slots else 0.0,
        "lower_bound_rows": lower_bound_rows(
            counts.piece_length,
            config.max_length,
            max_segments=config.max_segments_per_row,
            segment_multiple=config.segment_multiple,
        ),
        "histograms": histograms,
    }
    if config.balance != "none":
        before, after = asdict(counts.attention_before), asdict(counts.attention_after)
        totals["attention_cost"] = {"before": before, "after": after}
    if incomplete := why_incomplete(config.max_loss, counts.tokens, *lost):
        totals["incomplete"] = incomplete
    return totals


def _totals(counts: Counts, names: Iterable[str], histograms: Any) -> dict[str, Any]:
    return {
        **{
            name: figure
            for name in names
            if (figure := getattr(counts, name)) or name not in OF_TRACES
        },
        **({"unread": dict(sorted(counts.unread.items()))} if counts.unread else {}),
        **({"first_drifted": counts.first_drifted} if counts.first_drifted else {}),
        "histograms": {
            name: getattr(counts, name).tolist() for name in histograms.__struct_fields__
        },
    }


def _input(totals: _RunTotals, file: InputFile) -> dict[str, Any]:
    run, counts = totals.run, totals.counts.file(file.index)
    kind = TokenizedManifest if run.is_to_tokenize else Manifest
    figures = {name: getattr(counts, name) for name in kind.counted_by_input}
    size = file.size or (totals.stdin_bytes if file.path == STDIN else 0)
    known = {"path": file.known_as, "size": size, "version": file.version}
    entry = known | {"sha256": totals.digests.get(file.index, ""), **figures}
    if file.format == TOKENIZED:
        entry["format"] = TOKENIZED
    if file.shape is not None:
        entry["shape"] = run.shape.of(file.shape).name
    return entry
