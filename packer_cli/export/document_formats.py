"""Formats of documents that trainers pack themselves: Parquet for many, arrays for OLMo-core.

Parts have about a gigabyte, and whole documents. Nothing is held but a row group of 64 MB.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packer_cli.errors import UsageError, named, one_line, one_of
from packer_cli.export.formats import PART_BYTES, Exported, Tables, Writer, arrow, eos_of, lists
from packer_cli.export.rows import UnpaddedRows, documents, has_labels
from packer_cli.options.run_options import FormatOptions
from packer_cli.options.value_columns import LOSS_WEIGHTS
from packer_cli.packing.labels import trained_flags
from packer_cli.records import HIGHEST_ID, IGNORED, Int32, Int64
from packer_cli.result.columns import as_numbers, lists_of
from packer_cli.result.layout import TOKENIZER
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PackedDirectory, check_side_file
from packer_cli.storage import read_bytes
from packer_cli.tokenization.locate import highest_id

_GROUP_BYTES = 64 << 20
_HIGHEST_OF_TWO_BYTES = (1 << 16) - 1


def loss_mask(rows: UnpaddedRows) -> Any:
    """Return uint8[T]: 1 where a token is trained on, which the first of a document never is."""
    if rows.labels is not None:
        return (rows.labels != IGNORED).astype(np.uint8)
    return trained_flags(None, rows.segment_offsets[:-1], len(rows.ids)).view(np.uint8)


def at_predicting_token(values: Any, offsets: Int64) -> Any:
    """Return values [T] of tokens at the token before each, and 0 at the last of a document.

    offsets  int64[documents + 1]
    """
    shifted = np.zeros_like(values)
    shifted[:-1] = values[1:]
    shifted[offsets[1:] - 1] = 0
    return shifted


def untrained_within(exported: Exported) -> int:
    """Count the tokens that are not trained on, apart from the first of each document."""
    facts = exported.facts
    if isinstance(exported, PackedDirectory) and not has_labels(exported):
        return 0  # or the export is refused
    return facts.tokens - facts.documents - facts.trained_tokens


class DocumentParquet(Tables):
    """input_ids list<int32>, loss_mask list<uint8>, and carried columns under their names;
    loss_weights list<float32> with `weights`, or with `shift` if they are carried.

    These are the columns of skyrl/train/dataset/pretokenized.py of SkyRL, which takes the mask at
    the token itself, and with `shift` and `weights` those of `PrebuiltLmDatasetFormat` in
    levanter/data/text/formats.py, which takes weights at the predicting token.
    """

    takes = staticmethod(documents)
    needs = ("segments",)
    keeps_values = True
    takes_options = ("names", "weights", "shift")
    file_name = "part-{:05d}.parquet"

    @staticmethod
    def start(sink: Any, schema: Any) -> pq.ParquetWriter:
        """Open a Parquet file; a dictionary of ids would be larger than they are."""
        return pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False)

    @classmethod
    def notes(cls, exported: Exported, options: FormatOptions) -> Iterator[str]:
        yield from super().notes(exported, options)
        columns = exported.facts.config.value_columns
        names = ["input_ids", "loss_mask", *columns]
        if options.weights and LOSS_WEIGHTS not in names:
            names.append(LOSS_WEIGHTS)
        for _, old in options.names:
            if old not in names:
                raise one_of("--names", old, names)
        renamed = {old: new for new, old in options.names}
        if len(renamed) < len(options.names):
            raise UsageError("--names: a column has two names", "name each column once")
        new_names = [renamed.get(name, name) for name in names]
        if twice := sorted({name for name in new_names if new_names.count(name) > 1}):
            raise UsageError(f"--names: two columns would be called {named(twice)}", "rename both")
        weights, flag = columns.get(LOSS_WEIGHTS), "--weights" if options.weights else "--shift"
        if weights and weights.count is not None and (options.weights or options.shift):
            raise UsageError(
                f"{flag}: {weights} has several values for a token",
                f"leave out {flag}, and name what a trainer weights by in the trainer",
            )
        if untrained := untrained_within(exported):
            mask = renamed.get("loss_mask", "loss_mask")
            yield (
                f"{untrained:,} tokens have {mask} 0: a trainer that reads ids alone, such as "
                "MaxText, trains on them, too"
            )

    def __init__(self, folder: Path, exported: Any, **how: Any) -> None:
        super().__init__(folder, exported, **how)
        self._renamed = {old: new for new, old in self.options.names}
        self._group, self._group_bytes = list[Any](), 0

    @property
    def is_shifted(self) -> bool:
        return self.options.shift

    def columns(self, rows: UnpaddedRows) -> dict[str, Any]:
        given, offsets, mask = self.options, rows.offsets, loss_mask(rows)
        columns = {"input_ids": lists(offsets, rows.ids), "loss_mask": mask}
        for name, column in self.exported.facts.config.value_columns.items():
            columns[name] = as_numbers(column, rows.values(column))
            if column.is_of_segments and name == LOSS_WEIGHTS and (given.weights or given.shift):
                columns[name] = np.repeat(columns[name], rows.lengths)
            elif column.is_of_segments:
                columns[name] = arrow(columns[name])
        if given.weights or (given.shift and LOSS_WEIGHTS in columns):
            weights = columns.get(LOSS_WEIGHTS, np.float32(1))
            columns[LOSS_WEIGHTS] = np.multiply(mask, weights, dtype=np.float32)
        if given.shift:
            for name in {"loss_mask", LOSS_WEIGHTS} & columns.keys():
                columns[name] = at_predicting_token(columns[name], offsets)
        return {
            self._renamed.get(name, name): lists(offsets, values)
            if isinstance(values, np.ndarray)
            else values
            for name, values in columns.items()
        }

    def write(self, part: UnpaddedRows) -> None:
        batch = self.batch(part)
        ends = np.cumsum(_bytes_of_each(batch))
        begin = 0
        while begin < len(batch):
            before = int(ends[begin - 1]) if begin else 0
            stop = int(np.searchsorted(ends, before + _GROUP_BYTES - self._group_bytes, "right"))
            if not self._group:
                stop = max(stop, begin + 1)  # a document that fills more than a group
            if stop > begin:
                self._group.append(batch.slice(begin, stop - begin))
                self._group_bytes += int(ends[stop - 1]) - before
            if stop < len(batch):
                self._write_group()
            begin = stop

    def _write_group(self) -> None:
        if self._group:
            [batch] = pa.Table.from_batches(self._group).combine_chunks().to_batches()
            self._group, self._group_bytes = [], 0
            self.write_batch(batch)

    def close(self) -> None:
        try:
            self._write_group()
        finally:
            super().close()


def _bytes_of_each(batch: Any) -> Int64:
    """Return the bytes of each row of a batch, int64[rows]: its values, and offsets of lists."""
    sizes = np.zeros(len(batch), np.int64)
    for column in batch.columns:
        if pa.types.is_list(column.type):
            lengths = np.diff(column.offsets.to_numpy().astype(np.int64))
            sizes += lengths * _width(column.values.type) + 4
        else:
            sizes += _width(column.type)
    return sizes


def _width(kind: Any) -> int:
    """Return the bytes of a value of an Arrow type, or of a fixed number of values."""
    count, item = 1, kind
    if pa.types.is_fixed_size_list(kind):
        count, item = kind.list_size, kind.value_type
    return count * max(int(item.bit_width) // 8, 1)


def _ids_of(exported: Exported) -> Iterator[tuple[Int32, Int64]]:
    """Yield the ids int32[T] of documents, with their offsets int64[n + 1], unchecked."""
    if isinstance(exported, PackedDirectory):
        yield from ((part.ids, part.offsets) for part in documents(exported, lambda size: None))
        return
    for shard in exported.shards:
        yield from (lists_of(batch, "input_ids") for batch in exported.stored(shard))


def _highest_id_of(exported: Exported) -> int:
    """Return the highest id of a vocabulary, which may have gaps. Raises DataError."""
    facts = exported.facts
    if TOKENIZER not in facts.side_files:
        return facts.tokenizer.vocab_size - 1 if facts.tokenizer else HIGHEST_ID
    check_side_file(exported.path / TOKENIZER, facts, TOKENIZER)
    return highest_id(read_bytes(exported.path / TOKENIZER))


class Olmo(Writer):
    """part-NNNNN.npy, token ids end to end without a header, uint16 or uint32 by vocabulary;
    part-NNNNN.csv.gz, a line for each document without a header: first token, last + 1, id
    FILE:POSITION, source, position; and part-NNNNN.mask.npy, a bool for each token without a
    header, if tokens other than the first of documents are not trained on.

    The files are those that the Dolma toolkit writes; `NumpyFSLDataset` and its siblings in
    olmo_core/data/numpy_dataset.py read them, with `label_mask_paths`. They find documents by their
    EOS (`iter_document_indices` in olmo_core/data/utils.py), or by the .csv.gz.
    """

    takes = staticmethod(documents)
    needs = ("segments",)

    @classmethod
    def notes(cls, exported: Exported, options: FormatOptions) -> Iterator[str]:
        yield from super().notes(exported, options)
        eos, unended, within = eos_of(exported), 0, 0
        for ids, offsets in _ids_of(exported):
            last = offsets[1:] - 1
            counts = np.diff(np.searchsorted(np.flatnonzero(ids == eos), offsets))
            is_ended = ids[last] == eos
            unended += len(last) - int(is_ended.sum())
            within += int((counts > is_ended).sum())
        what = "readers that find documents by EOS, as OLMo-core does without their .csv.gz,"
        if eos < 0:
            yield f"no EOS is known: {what} may join or cut them"
        elif unended:
            yield f"{unended:,} documents do not end in EOS: {what} join them with the next"
        if within:
            yield f"{within:,} documents have EOS before their end: {what} cut them there"

    def __init__(self, folder: Path, exported: Any, **how: Any) -> None:
        super().__init__(folder, exported, **how)
        facts = exported.facts
        is_small = _highest_id_of(exported) <= _HIGHEST_OF_TWO_BYTES
        self._type = np.dtype("<u2" if is_small else "<u4")
        self._has_mask = untrained_within(exported) > 0
        self._names = [one_line(one.name) for one in facts.inputs]  # readers take it by lines
        sources = facts.source_of if isinstance(facts, Manifest) else lambda file: None
        self._sources = [one_line(sources(n) or name) for n, name in enumerate(self._names)]
        self._stack, self._parts, self._tokens = ExitStack(), 0, 0
        self._files: list[IO[bytes]] = []

    def write(self, part: UnpaddedRows) -> None:
        if self._tokens * self._type.itemsize >= PART_BYTES:
            self.close()
        if not self._files:
            self._begin()
        ids, index, *mask = self._files
        ids.write(part.ids.astype(self._type).data)
        index.write(self._lines(part).encode())
        for file in mask:
            file.write(loss_mask(part).data)
        self._tokens += len(part.ids)

    def _begin(self) -> None:
        name = f"part-{self._parts:05d}"
        endings = [".npy", ".csv.gz", *([".mask.npy"] if self._has_mask else [])]
        for ending in endings:
            file: Any = open(self.folder / (name + ending), "wb")  # noqa: SIM115
            self._stack.enter_context(file)
            if ending == ".csv.gz":
                file = self._stack.enter_context(gzip.GzipFile("", "wb", 1, file, mtime=0))
            self._files.append(file)
        self._parts, self._tokens = self._parts + 1, 0

    def _lines(self, part: UnpaddedRows) -> str:
        text = io.StringIO()
        assert part.origins is not None  # noqa: S101 documents have them
        file, position = part.origins.tolist()
        offsets = (part.offsets + self._tokens).tolist()
        csv.writer(text, lineterminator="\n").writerows(
            (begin, end, f"{self._names[of]}:{at}", self._sources[of], at)
            for begin, end, of, at in zip(offsets, offsets[1:], file, position, strict=False)
        )
        return text.getvalue()

    def close(self) -> None:
        self._files = []
        self._stack.close()
