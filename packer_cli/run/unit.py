"""Pack one work unit: read its documents, plan rows, fill them, write shards, commit.

    UnitContext.pack_and_commit(unit)     shards on the disk, then the unit's record
    pack_unit(unit, context)              documents to rows, or to documents of `packer tokenize`

A unit is a pure function of its slices and the options. It can run in any process, be repeated
after a crash, and be compared byte for byte. It needs the memory of one window (about 4 M tokens),
whatever the size of its inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from packer_cli.errors import DamagedInputError, DataError, named
from packer_cli.inputs.byte_streams import STDIN, stdin_size
from packer_cli.inputs.discovery import check_unchanged
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.selection import Selection
from packer_cli.inputs.tokenized import TokenizedInputs
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions
from packer_cli.packing.figures import AttentionCost, squared_sums
from packer_cli.packing.fitting import (
    MAX_DOCUMENT_TOKENS,
    first_overlong,
    loss_of,
    padded,
    pieces_of,
)
from packer_cli.packing.window import PlannedRows, Window, trained_in
from packer_cli.progress import Progress
from packer_cli.records import (
    TURNS,
    BadRecord,
    Documents,
    InputFile,
    Int64,
    Records,
    Slice,
    WorkUnit,
    record_position,
)
from packer_cli.result.columns import documents_schema, stored_schema
from packer_cli.result.counts import Counts
from packer_cli.result.layout import DOCUMENTS, Shard, digest, kind_of, name_by_content
from packer_cli.result.shard_writer import DocumentWriter, LazyFile, ShardWriter
from packer_cli.run.pool import ATTEMPTS, Pool, Reporter
from packer_cli.run.run_plan import (
    RunPlan,
    UnitRecord,
    rejected_name,
    squared_lengths_name,
    write_unit,
)
from packer_cli.run.source import InputDocuments, prepare
from packer_cli.storage import is_url, sync
from packer_cli.tokenization.encoding import Read

NOWHERE = Path(os.devnull)  # in which no file can be created
_WHOLE = -1  # the position of a bad record that is a whole file
_HUGE = "the most is", "cut it in the input"
_Item = TypeVar("_Item")
_Packed = TypeVar("_Packed")


@dataclass(frozen=True)
class UnitContext:
    """Context that all units of a run share. Another process that gets it loads it again.

    folder     where a unit's files are written; NOWHERE: only figures are kept
    progress   gets figures of what is read and written
    damaged    why inputs, by index, cannot be decoded: the unit is packed without them
    """

    run: RunPlan
    folder: Path
    options: EncodingOptions
    progress: Reporter
    damaged: dict[int, str] = field(default_factory=dict)

    @classmethod
    def reporting(
        cls, run: RunPlan, folder: Path, options: EncodingOptions, progress: Progress | None = None
    ) -> UnitContext:
        """Return a context whose workers report to the `notify` and `warn` of the options, and to
        `progress`.
        """
        reporter = Reporter(options.notify, options.warn, progress)
        of_workers = EncodingOptions(
            options.workers, options.tokenizer_backend, reporter.notify, reporter.warn
        )
        return cls(run, folder, of_workers, reporter)

    def pool(
        self, perform: Callable[[_Item], _Packed], describe: Callable[[_Item], str]
    ) -> Pool[_Item, _Packed]:
        """Return workers that share this context. `perform` works on a unit, or on what `describe`
        names as one.
        """
        return Pool(
            perform,
            workers=self.options.workers,
            prepare=self.load,
            reporter=self.progress,
            describe=describe,
            attempts=ATTEMPTS if self.run.resumable else 1,  # stdin cannot be read a second time
        )

    @cached_property
    def source(self) -> InputDocuments:
        """Reads the units' documents. Loading it raises UsageError."""
        return prepare(self.run, self.options)

    def load(self) -> None:
        """Load the source."""
        _ = self.source

    @property
    def pad_token_id(self) -> int:
        """The id that rows are padded with: 0 for ids that came without a tokenizer."""
        return self.source.info.pad_token_id if self.source.info else 0

    @property
    def tokenizer_sha256(self) -> str:
        return self.source.info.sha256 if self.source.info else ""

    def file(self, name: str) -> LazyFile:
        """Return a file beside a unit's shards."""
        return LazyFile(NOWHERE if self.folder == NOWHERE else self.folder / name)

    def without_damaged(
        self, unit: WorkUnit, pack: Callable[[WorkUnit, UnitContext], _Packed]
    ) -> _Packed:
        """Call `pack` for a unit. If bad records are skipped and an input turns out to be damaged,
        call it again without that input, so that nothing depends on how much of it was readable.
        """
        self.damaged.clear()
        while True:
            try:
                return pack(unit, self)
            except _LeftOutError as error:
                self.damaged[error.index] = error.reason

    def pack(self, unit: WorkUnit) -> UnitPacker:
        """Write the unit's shards."""
        return self.without_damaged(unit, pack_unit)

    def pack_and_commit(self, unit: WorkUnit) -> UnitRecord:
        """Write the unit's shards, bring them to the disk, and write its record, last."""
        packed = self.pack(unit)
        for shard in packed.shards:
            sync(self.folder / shard.file)
            name_by_content(self.folder, shard)
        for made in (packed.sums, packed.rejected):
            if made.path is not None:
                sync(made.path)
        digests = self._digests(unit)
        self.source.confirm()
        reads_stdin = any(self.run.files[part.file].path == STDIN for part in unit.slices)
        record = UnitRecord(
            unit.index,
            unit.slices,
            packed.shards,
            packed.counts.as_json(),
            self.source.info,
            packed.rejected.size,
            self.run.identity,
            digests,
            stdin_bytes=stdin_size() if reads_stdin else 0,
            sessions=packed.sessions or UNSET,
        )
        write_unit(self.folder, record)
        return record

    def first_texts(self, wanted: tuple[Sequence[Slice], int]) -> list[str]:
        """Return the first texts of slices. `wanted`: the slices, and how many texts at most."""
        slices, most = wanted
        every = (self.source.read(self.run.files[part.file], part) for part in slices)
        texts = (records.texts or [] for records in chain.from_iterable(every))
        return [*islice(chain.from_iterable(texts), most)]

    def described(self, unit: WorkUnit) -> str:
        """Return the unit's name in messages."""
        files = self.run.files
        parts = [f"{files[part.file].path} from {part.start:,}" for part in unit.slices]
        return f"unit {unit.index} ({named(parts, 3)})"

    def _digests(self, unit: WorkUnit) -> list[tuple[int, str]]:
        """Return (file, sha256) of local inputs that the unit reads from their beginning. Raises
        InputChangedError if an input of the unit is not what it was when the run began.
        """
        found = list[tuple[int, str]]()
        begun = {part.file for part in unit.slices if not part.start}
        for index in sorted({part.file for part in unit.slices}):
            file = self.run.files[index]
            if index in begun and not (file.path == STDIN or is_url(file.path)):
                found.append((index, digest(file.path)[1]))
            check_unchanged(file)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "source"}


class UnitPacker:
    """Reads the documents of a unit, and makes shards of them.

    shards     when all documents are added
    counts     totals of records, documents and rows
    rejected   lines of bad records; the first one ends the run unless they are skipped
    sums       squared lengths of rows
    sessions   (file, digest) of sessions of calls that other units may have, too
    progress   gets figures of what is read and written
    is_sample  parts of files are read, so damage in the rest of a file is unknown
    """

    is_sample = False

    def __init__(self, unit: WorkUnit, context: UnitContext) -> None:
        self.unit, self.context, self.counts = unit, context, Counts()
        self.shards, self.progress = list[Shard](), context.progress
        self.read: Read = context.source.read
        self.sessions = list[tuple[int, int]]()
        self.rejected = context.file(rejected_name(unit.index))
        self.sums = context.file(squared_lengths_name(unit.index))

    def add(self, batch: Documents) -> None:
        raise NotImplementedError

    def close(self) -> list[Shard]:
        """Write what is left. Return the shards, whose trained tokens are counted."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Close files after a failure."""
        self.rejected.abandon()
        self.sums.abandon()

    def documents(self) -> Iterator[Documents]:
        """Yield the documents of the unit."""
        tokenized = self.context.source.tokenized
        return self._encoded() if tokenized is None else self._tokenized(tokenized)

    def _encoded(self) -> Iterator[Documents]:
        context = self.context
        left_out = set[int]()
        for part in self.unit.slices:
            file = context.run.files[part.file]
            if part.file in context.damaged:
                if part.file not in left_out:  # a sample has several slices of it
                    self._reject(file, [BadRecord(_WHOLE, context.damaged[part.file])])
                    for figures in (self.counts, self.counts.file(file.index)):
                        figures.rejected_files += 1
                left_out.add(part.file)
                continue
            for records in self._decoded(file, part):
                batch, bad, more = context.source.encode(records, file)
                self.counts.add(more)
                self.sessions += ((file.index, digest) for digest in records.sessions)
                if bad:
                    self._reject(file, bad)
                if records.empty:
                    for figures in (self.counts, self.counts.file(file.index)):
                        figures.empty_documents += records.empty
                self.progress.read(records.consumed, len(batch.position))
                del records  # neither these nor their tokens are held while the next are read
                if len(batch.position):
                    yield batch
                del batch

    def _tokenized(self, tokenized: TokenizedInputs) -> Iterator[Documents]:
        selection = Selection.of(self.context.run.config)
        for batch in tokenized.read(self.unit):
            self.progress.read(0, len(batch.position))
            if selection is not None:
                batch, filtered = selection.documents(batch, partial(tokenized.stored, batch))  # noqa: PLW2901
                self.counts.add_filtered(filtered)
            yield batch
        self.progress.read(self.unit.weight, 0)

    def _decoded(self, file: InputFile, part: Slice) -> Iterator[Records]:
        """Yield the records of a slice. Raises _LeftOutError for an input to be left out."""
        try:
            yield from self.read(file, part)
        except DamagedInputError as error:
            check_unchanged(file)  # a file being written to looks cut short; that is the cause
            if self.context.run.config.on_error == "fail" or file.path == STDIN:
                raise
            if not (part.is_whole or self.is_sample):  # others may have packed the rest of it
                raise DataError(
                    f"{error.message}; only files that one work unit reads are skipped",
                    "fetch or write it again, leave it out, or give --unit-bytes more than it has",
                ) from error
            reason = error.message.removeprefix(f"{file.path}: ")
            raise _LeftOutError(part.file, reason) from error

    def _reject(self, file: InputFile, bad: list[BadRecord]) -> None:
        if self.context.run.config.on_error == "fail":
            check_unchanged(file)  # a file being written to looks cut short; that is the cause
            place = reader_for(file.format).describe(file, bad[0].position)
            raise DataError(f"{file.path}, {place}: {bad[0].reason}", bad[0].tip)
        for record in bad:
            position = None if record.position == _WHOLE else record.position
            line = {"file": file.known_as, "position": position, "reason": record.reason}
            self.rejected.write(msgspec.json.encode(line) + b"\n")
        for figures in (self.counts, self.counts.file(file.index)):
            figures.rejected_records += len(bad)


def pack_unit(
    unit: WorkUnit, context: UnitContext, unit_packer: UnitPacker | None = None
) -> UnitPacker:
    """Read the unit's documents and write its shards, or have `unit_packer` take them."""
    if unit_packer is None and context.run.is_to_tokenize:
        unit_packer = UnitDocuments(unit, context)
    elif unit_packer is None:
        unit_packer = UnitRows(unit, context, context.run.row_config)
    try:
        for batch in unit_packer.documents():
            unit_packer.add(batch)
            del batch  # the window holds what goes into rows, and frees it when written
        unit_packer.shards = unit_packer.close()
        unit_packer.rejected.close()
        unit_packer.sums.close()
    finally:
        unit_packer.abandon()
    return unit_packer


class _LeftOutError(Exception):
    """An input of a unit that cannot be decoded, though what was read of it seemed right."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


def _refuse_longer(
    batch: Documents, context: UnitContext, most: int, most_is: str, tip: str
) -> None:
    """Raise DataError for a document of more than `most` tokens."""
    document = first_overlong(batch.offsets, most)
    if document < 0:
        return
    file = context.run.files[batch.file[document]]
    position = record_position(int(batch.position[document]), context.run.config.turns)
    place = reader_for(file.format).describe(file, position)
    length = batch.offsets[document + 1] - batch.offsets[document]
    what = f"the document has {length} tokens, {most_is} {most}"
    raise DataError(f"{file.path}, {place}: {what}", tip)


class UnitDocuments(UnitPacker):
    """The documents of one unit, written as they come."""

    def __init__(self, unit: WorkUnit, context: UnitContext) -> None:
        super().__init__(unit, context)
        config = context.run.config
        schema = documents_schema(
            context.tokenizer_sha256,
            has_trained=context.run.shape.kind != "text",
            columns=config.value_columns.values(),
        )
        self._writer = DocumentWriter(context.folder, unit.index, config, schema)

    def add(self, batch: Documents) -> None:
        """Raises DataError for documents that are too long to number."""
        _refuse_longer(batch, self.context, MAX_DOCUMENT_TOKENS, *_HUGE)
        lengths = np.diff(batch.offsets)
        tokens = int(lengths.sum())
        self.counts.tokens += tokens
        self.counts.add_documents(batch.file, lengths, lengths)
        self.counts.add_turns(batch.of_documents.get(TURNS))
        self._writer.write(batch)
        self.progress.wrote(tokens, tokens)

    def close(self) -> list[Shard]:
        shards = self._writer.close()
        own = (shard for shard in shards if kind_of(shard.file) == DOCUMENTS)
        self.counts.trained_tokens = sum(shard.trained_tokens for shard in own)
        return shards

    def abandon(self) -> None:
        super().abandon()
        self._writer.abandon()


class RowWriter(Protocol):
    """Takes the rows of a unit. `close` gives the shards, whose trained tokens are counted.

    rows_at_once  how many rows `write` is given together, where tokens are fetched for it; 0: it
                  needs no tokens
    """

    @property
    def rows_at_once(self) -> int: ...
    def write(self, documents: Documents, order: Int64, row_offsets: Int64) -> None: ...
    def close(self) -> list[Shard]: ...
    def abandon(self) -> None: ...


class UnitRows(UnitPacker):
    """Plans and writes the rows of one unit, window by window.

    `cut_documents`: number of documents that are cut into several segments.
    """

    def __init__(
        self,
        unit: WorkUnit,
        context: UnitContext,
        config: PackConfig,
        writer: RowWriter | None = None,
    ) -> None:
        """`writer`: takes the rows instead of shards."""
        super().__init__(unit, context)
        self._config = config
        arrow = stored_schema(config, context.pad_token_id, context.tokenizer_sha256)
        self._writer = writer or ShardWriter(
            context.folder, unit.index, config, arrow, context.pad_token_id
        )
        self._window = Window(config, unit.index)
        self._stream_position = 0
        self.cut_documents = 0

    def add(self, batch: Documents) -> None:
        """Raises DataError for documents that may not be cut or are too long to number."""
        config, counts = self._config, self.counts
        self._refuse_overlong(batch)
        pieces, untrained = pieces_of(batch, config, self._stream_position)
        if config.strategy == "wrap":
            self._stream_position += int(padded(pieces.length, config.segment_multiple).sum())
        counts.add_untrained(batch.file, untrained)
        counts.add_loss(loss_of(pieces, batch.offsets, batch.trained))
        lengths = np.diff(batch.offsets)
        placed = np.bincount(pieces.document, weights=pieces.length, minlength=len(lengths))
        placed = placed.astype(np.int64)
        counts.unpacked_rows += int((-(-placed // config.max_length)).sum())
        counts.add_dropped(lengths[(lengths > config.max_length) & (placed == 0)])
        counts.add_documents(batch.file, lengths, placed)
        turns = batch.of_documents.get(TURNS)
        counts.add_turns(None if turns is None else turns[placed > 0])
        self.cut_documents += int((np.bincount(pieces.document) > 1).sum())
        self._window.add(batch, pieces)
        del batch, pieces
        if self._window.tokens >= (config.window_tokens or 0):
            self._write(self._window.rows())

    def close(self) -> list[Shard]:
        """Plan and write what is left."""
        if self._window.tokens:
            self._write(self._window.rows(last=True))
        shards = self._writer.close()
        self.counts.trained_tokens = sum(shard.trained_tokens for shard in shards)
        return shards

    def abandon(self) -> None:
        super().abandon()
        self._writer.abandon()

    def _refuse_overlong(self, batch: Documents) -> None:
        config, shape = self._config, self.context.run.shape
        if config.overlong == "error":
            others = "drop, truncate or truncate-turns" if shape.is_chat else "drop or truncate"
            others = others if shape.stays_whole else "split, truncate or drop"
            tip = f"choose --overlong {others}, or a larger --max-length"
            _refuse_longer(batch, self.context, config.max_length, "--max-length is", tip)
        elif config.overlong in ("split", "split-text") or config.truncate_side != "right":
            _refuse_longer(batch, self.context, MAX_DOCUMENT_TOKENS, *_HUGE)
        # or else pieces begin at 0

    def _write(self, planned: PlannedRows) -> None:
        documents, order, row_offsets = planned.documents, planned.order, planned.row_offsets
        for rows in self._with_tokens(documents, order, row_offsets):
            self._writer.write(*rows)
        lengths, file = documents.lengths[order], documents.file[order]
        self.sums.write(squared_sums(lengths, row_offsets).astype("<i8", copy=False).data)
        max_length = self._config.max_length
        more = Counts.of_rows(lengths, file, row_offsets, max_length)
        more.add_trained(file, trained_in(documents, order))
        if planned.unbalanced is not None:
            more.attention_before = planned.unbalanced
            more.attention_after = AttentionCost.of(lengths, row_offsets)
        self.counts.add(more)
        self.progress.wrote(more.tokens, more.rows * max_length)

    def _with_tokens(
        self, documents: Documents, order: Int64, row_offsets: Int64
    ) -> Iterator[tuple[Documents, Int64, Int64]]:
        """The rows as the writer takes them. Tokens that lie elsewhere are fetched a few rows at a
        time, so that a window holds none.
        """
        step, tokenized = self._writer.rows_at_once, self.context.source.tokenized
        if documents.ids is not None or not step or tokenized is None:
            yield documents, order, row_offsets
            return
        for first in range(0, len(row_offsets) - 1, step):
            edges = row_offsets[first : first + step + 1]
            rows = tokenized.tokens.fetch(documents.take(order[edges[0] : edges[-1]]))
            yield rows, np.arange(len(rows)), edges - edges[0]
