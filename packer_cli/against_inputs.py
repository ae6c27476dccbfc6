"""`packer verify --against-inputs`: documents read and encoded again, and found in the rows.

The readers, the encoder and the policies are those of a run, so what they get wrong twice is not
seen here; what was lost, moved or changed since is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from packer_cli.config import PackConfig
from packer_cli.counts import Counts
from packer_cli.discovery import input_file
from packer_cli.encoding import Encode
from packer_cli.errors import Interrupted, PackerError
from packer_cli.packed import PackedDirectory, rows_of, segments_of
from packer_cli.readers import detect_shape, reader_for
from packer_cli.readers.byte_streams import STDIN
from packer_cli.records import IGNORED, InputFile, Int32, Int64, Records, Slice, TokenBatch
from packer_cli.shapes import Shape
from packer_cli.shards import digest
from packer_cli.source import encode_again, framing_of
from packer_cli.threads import run_all
from packer_cli.tokenization import Tokenizer, bytes_tokenizer, load_tokenizer
from packer_cli.tokenization.locate import TEMPLATE, TOOL_TEMPLATE, TokenizerFiles, locate
from packer_cli.unit import pieces_of

if TYPE_CHECKING:
    from packer_cli.verify import Findings

_MOST = 20  # differing documents that are named, of one input in one unit
_Notify = Callable[[str], None]


def compare_inputs(
    packed: PackedDirectory,
    config: PackConfig,
    findings: Findings,
    workers: int,
    sample: int | None,
    seed: int,
    stop: threading.Event,
    notify: _Notify,
) -> None:
    """Add to `findings` every input that changed, and every document that is not as it was."""
    files = _unchanged(packed, config, findings, workers, stop, notify)
    findings.documents_compared, findings.inputs_compared = 0, len(files)
    if "segments" not in config.columns:
        notify("documents are not compared: the column segments was not written")
        return
    if not files:
        return
    shape = detect_shape(list(files.values()), config)
    tokenizer, tokenizer_files = _tokenizer(packed, shape, config, fast=sample is None)
    with closing(tokenizer) if tokenizer else nullcontext():
        template = packed.path / TEMPLATE
        # two of them are what the tokenizer in the directory has
        named = template.is_file() and not (packed.path / TOOL_TEMPLATE).is_file()
        used = replace(config, chat_template=str(template) if named else None)
        encode = encode_again(shape, used, tokenizer, tokenizer_files)
        documents = sum(packed.manifest["inputs"][file]["documents"] for file in files)
        everything = sample is None or sample >= documents
        wanted = None if everything else _shares(packed.manifest, set(files), sample or 0, seed)
        chosen = {unit for unit, _ in wanted or ()}
        comparison = _Comparison(packed, config, shape, encode, files, findings, stop)
        tasks = [
            partial(comparison.compare_unit, unit, wanted, seed)
            for unit in packed.manifest["units"]
            if wanted is None or unit["unit"] in chosen
        ]
        run_all(tasks, workers, stop)
        if tokenizer:
            tokenizer.finish()


def _unchanged(
    packed: PackedDirectory,
    config: PackConfig,
    findings: Findings,
    workers: int,
    stop: threading.Event,
    notify: _Notify,
) -> dict[int, InputFile]:
    """The inputs that are what they were; the others become problems."""
    files: dict[int, InputFile] = {}

    def check(index: int, said: dict[str, Any]) -> None:
        path = said["path"]
        try:
            file = input_file(index, path, config)
            size, sha256 = file.size, said["sha256"]
            if size == said["size"]:
                size, sha256 = digest(path, stop.is_set)
        except PackerError as error:
            findings.add(path, f"an input that cannot be read: {error.message}")
            return
        if size != said["size"]:
            findings.add(path, f"has {size} bytes, it had {said['size']} when it was packed")
        elif sha256 != said["sha256"]:
            findings.add(
                path, f"its sha256 is {sha256}, it was {said['sha256']} when it was packed"
            )
        else:
            files[index] = file

    inputs = [one for one in enumerate(packed.manifest["inputs"]) if not one[1].get("removed")]
    if any(said["path"] == STDIN for _, said in inputs):
        notify("-: came from stdin, which cannot be read again: not compared")
    run_all((partial(check, *one) for one in inputs if one[1]["path"] != STDIN), workers, stop)
    return dict(sorted(files.items()))


def _tokenizer(
    packed: PackedDirectory, shape: Shape, config: PackConfig, *, fast: bool
) -> tuple[Tokenizer | None, TokenizerFiles | None]:
    """The tokenizer that the directory keeps; the reference engine, unless it is to be `fast`."""
    said = packed.manifest["tokenizer"]
    if said is None:
        return None, None
    framing = framing_of(config)
    if not said["sha256"]:
        return bytes_tokenizer(framing), None
    files = locate(str(packed.path))
    backend = "auto" if fast else "tokenizers"
    return load_tokenizer(files, backend=backend, framing=framing), files


def _shares(
    manifest: dict[str, Any], files: set[int], sample: int, seed: int
) -> dict[tuple[int, int], int]:
    """How many documents to take of which (unit, file): even over files, then over its units."""
    rng = np.random.default_rng(seed)
    units: dict[int, list[int]] = {}
    for unit in manifest["units"]:
        for file in {part[0] for part in unit["slices"]} & files:
            units.setdefault(file, []).append(unit["unit"])
    order = rng.permutation(sorted(units)).tolist()
    order.sort(key=lambda file: manifest["inputs"][file]["documents"])  # the least first
    shares: dict[tuple[int, int], int] = {}
    left = sample
    for number, file in enumerate(order):
        documents = manifest["inputs"][file]["documents"]
        share = min(documents, -(-left // (len(order) - number)))
        left -= share
        among = rng.permutation(units[file]).tolist()
        for place, unit in enumerate(among):
            count = share // len(among) + (place < share % len(among))
            if count:
                shares[unit, file] = count
    return shares


class _Unit(NamedTuple):
    """The segments of a unit, sorted by file, position and start.

    rows  for each batch (shard, its first row's number, input_ids, labels or None)
    """

    file: Int64
    position: Int64
    start: Int64
    length: Int64
    batch: Int64
    row: Int64
    begin: Int64
    rows: list[tuple[str, int, Int32, Int32 | None]]


def _load(packed: PackedDirectory, shards: list[dict[str, Any]]) -> _Unit:
    parts: list[Any] = []
    rows: list[tuple[str, int, Int32, Int32 | None]] = []
    for shard in shards:
        first_row = 0
        for batch in packed.batches(shard):
            begin, length, offsets = segments_of(batch)
            struct = batch.column("segments").values
            file, position, start = (struct.field(i).to_numpy().astype(np.int64) for i in range(3))
            row = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
            number = np.full(len(row), len(rows))
            parts.append(np.stack([file, position, start, length, number, row, begin]))
            labels = rows_of(batch.column("labels")) if "labels" in batch.schema.names else None
            rows.append((shard["file"], first_row, rows_of(batch.column("input_ids")), labels))
            first_row += batch.num_rows
    nothing = np.empty((7, 0), np.int64)  # a unit may have lost all its documents
    file, position, start, length, number, row, begin = np.concatenate([nothing, *parts], axis=1)
    order = np.lexsort((start, position, file))
    return _Unit(
        file[order], position[order], start[order], length[order],
        number[order], row[order], begin[order], rows,
    )  # fmt: skip


class _Comparison:
    """Compares units, one after the other on each thread."""

    def __init__(
        self,
        packed: PackedDirectory,
        config: PackConfig,
        shape: Shape,
        encode: Encode,
        files: dict[int, InputFile],
        findings: Findings,
        stop: threading.Event,
    ) -> None:
        self._packed = packed
        by_unit = groupby(packed.manifest["shards"], key=lambda shard: shard["unit"])
        self._shards = {unit: list(shards) for unit, shards in by_unit}
        self._config = config
        self._shape = shape
        self._encode = encode
        self._files = files
        self._findings = findings
        self._stop = stop

    def compare_unit(
        self, about: dict[str, Any], wanted: dict[tuple[int, int], int] | None, seed: int
    ) -> None:
        """All documents of a unit, or as many of each file as `wanted` says."""
        number = about["unit"]
        unit = _load(self._packed, self._shards.get(number, []))
        slices = [Slice(file, start, stop, 0) for file, start, stop in about["slices"]]
        for index in sorted({part.file for part in slices} & self._files.keys()):
            file = self._files[index]
            first, last = np.searchsorted(unit.file, [index, index + 1])
            positions = np.unique(unit.position[first:last])
            if wanted is None:
                parts = [part for part in slices if part.file == index]
                self._compare_file(unit, file, positions, self._read(file, parts))
            elif count := min(wanted.get((number, index), 0), len(positions)):
                rng = np.random.default_rng([seed, number, index])
                chosen = np.sort(rng.choice(positions, count, replace=False))
                self._compare_file(unit, file, chosen, self._find(file, chosen))

    def _read(self, file: InputFile, parts: list[Slice]) -> Iterator[Records]:
        for part in parts:
            for records in reader_for(file.format).read(file, part, self._shape, self._config):
                if self._stop.is_set():
                    raise Interrupted("stopped")
                yield records

    def _find(self, file: InputFile, positions: Int64) -> Iterator[Records]:
        """The records at these positions, in order; reads no more than the format makes it."""
        left = set(positions.tolist())
        for records in self._read(file, _parts(file, positions)):
            found = np.flatnonzero(np.isin(records.positions, positions))
            if len(found):
                yield records.take(found)
                left -= set(records.positions[found].tolist())
            if not left:
                return

    def _compare_file(
        self, unit: _Unit, file: InputFile, positions: Int64, records: Iterator[Records]
    ) -> None:
        missing = set(positions.tolist())
        problems: list[str] = []
        compared = differing = 0
        for some in records:
            batch, _ = self._encode(some, file, Counts())
            expected = None
            if self._config.strategy != "wrap":
                pieces, _ = pieces_of(batch, self._config)
                edges = np.searchsorted(pieces.document, np.arange(len(batch.position) + 1))
                expected = (pieces, edges)
            for document, position in enumerate(batch.position.tolist()):
                missing.discard(position)
                compared += 1
                if text := self._difference(unit, file.index, batch, document, expected):
                    differing += 1
                    if len(problems) < _MOST:
                        place = reader_for(file.format).describe(file, position)
                        problems.append(f"{place}: {text}")
        if differing > len(problems):
            problems.append(f"{differing - len(problems)} more documents differ")
        if missing:
            place = reader_for(file.format).describe(file, min(missing))
            problems.append(f"{place}: no document begins there, {len(missing)} like this")
        self._findings.add(file.path, *problems)
        with self._findings.lock:
            before = self._findings.documents_compared or 0
            self._findings.documents_compared = before + compared

    def _difference(
        self,
        unit: _Unit,
        file: int,
        batch: TokenBatch,
        document: int,
        expected: tuple[Any, Int64] | None,
    ) -> str:
        """How a document and its pieces in the rows differ; "" for not at all."""
        position = int(batch.position[document])
        first, last = np.searchsorted(unit.file, [file, file + 1])
        low, high = first + np.searchsorted(unit.position[first:last], [position, position + 1])
        found = [(int(unit.start[i]), int(unit.length[i])) for i in range(low, high)]
        begin, end = (int(batch.offsets[document + i]) for i in (0, 1))
        if expected is None:
            reached = 0
            for start, length in found:
                if start != reached:
                    break
                reached += length
            if reached != end - begin:
                return f"has {end - begin} tokens when encoded again, {reached} of them in rows"
        else:
            pieces, edges = expected
            here = slice(edges[document], edges[document + 1])
            wanted = list(zip(pieces.start[here].tolist(), pieces.length[here].tolist(),
                              strict=True))  # fmt: skip
            if found != wanted:
                return (
                    f"is packed as {_shown(found)} of its tokens, {_shown(wanted)} expected "
                    "when encoded again"
                )
        for i in range(low, high):
            if text := self._piece_difference(unit, i, batch, begin):
                return text
        return ""

    def _piece_difference(self, unit: _Unit, i: int, batch: TokenBatch, begin: int) -> str:
        shard, first_row, ids, labels = unit.rows[unit.batch[i]]
        row, place, length = (int(one[i]) for one in (unit.row, unit.begin, unit.length))
        source = slice(begin + int(unit.start[i]), begin + int(unit.start[i]) + length)
        expected = batch.ids[source].astype(np.int32)
        trained = np.ones(length, bool)
        if batch.trained is not None:
            trained = batch.trained[source].astype(bool)
        trained[0] = False  # nothing before it in the row predicts it
        values = [("input_ids", ids, expected)]
        if labels is not None:
            wanted = np.where(trained, expected, np.int32(IGNORED))
            if self._config.label_shift == "pre":
                wanted = np.append(wanted[1:], np.int32(IGNORED))
            values.append(("labels", labels, wanted))
        for name, column, wanted in values:
            here = column[row, place : place + length]
            if not np.array_equal(here, wanted):
                at = int(np.argmax(here != wanted))
                return (
                    f"{name} has {here[at]} at place {place + at} of row {first_row + row} of "
                    f"{shard}, {wanted[at]} expected when encoded again"
                )
        return ""


def _parts(file: InputFile, positions: Int64) -> list[Slice]:
    """The least of a file that holds the records at these positions."""
    if file.format == "jsonl" and not file.compression:
        return [Slice(file.index, at, at + 1, 0) for at in positions.tolist()]
    if file.format == "parquet":
        from packer_cli.readers.columnar import ParquetReader  # noqa: PLC0415

        edges = np.cumsum(ParquetReader().row_group_rows(file))
        groups = np.unique(np.searchsorted(edges, positions, side="right")).tolist()
        return [Slice(file.index, group, group + 1, 0) for group in groups if group < len(edges)]
    return [Slice(file.index, 0, None, 0)]


def _shown(pieces: list[tuple[int, int]]) -> str:
    shown = [f"{start}-{start + length}" for start, length in pieces[:5]]
    return ", ".join(shown) + " ..." * (len(pieces) > 5) if shown else "none"
