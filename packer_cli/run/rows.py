"""Packing one work unit: its documents fitted, planned, filled and written as rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from packer_cli.config.options import PackConfig
from packer_cli.packing.attention_cost import AttentionCost, squared_sums
from packer_cli.packing.fitting import (
    MAX_DOCUMENT_TOKENS,
    Untrained,
    cut_stream,
    fit,
    loss_of,
    padded,
    trained_documents,
    without_overlong,
    without_untrained,
)
from packer_cli.packing.pairs import item_lengths, pieces_of_pairs
from packer_cli.packing.window import PlannedRows, SourceWindows, Window, gathered, trained_of
from packer_cli.records import Int64, Pieces, Stock, Stretch, TokenBatch, WorkUnit
from packer_cli.result.counts import Counts, fill_histogram, powers_histogram
from packer_cli.result.shard_writer import ShardWriter, schema
from packer_cli.result.shards import Shard
from packer_cli.result.view_writer import ViewWriter
from packer_cli.run.squared_lengths import UnitSums
from packer_cli.run.unit import Job, Rejections, UnitResult, documents_of, refuse_longer

# What `fit` does where a document of these policies is still too long.
_POLICIES = {"error": "split", "split-text": "split", "truncate-turns": "drop"}
_OVERLONG = "choose --overlong {}, or a larger --max-length"
_HUGE = "cut it in the input"


class RowWriter(Protocol):
    """Where the rows of a unit go. `close` gives the shards, whose trained tokens are counted.

    rows_at_once  how many rows `write` is given together, where tokens are fetched for it; 0: it
                  needs no tokens
    """

    @property
    def rows_at_once(self) -> int: ...
    def write(self, stock: Stock, order: Int64, row_offsets: Int64) -> None: ...
    def close(self) -> list[Shard]: ...
    def abandon(self) -> None: ...


def pack_unit(
    unit: WorkUnit, job: Job, config: PackConfig, writer: RowWriter | None = None
) -> UnitResult:
    """Read the unit's documents and write its shards. Raises Interrupted once `job.stop` is set.

    `writer`: takes the rows instead of shards.
    """
    rejections = Rejections(unit, job)
    sums = UnitSums(job.folder, unit.index) if writer is None else None
    rows = UnitRows(unit, job, config, writer or _writer(unit, job, config), sums)
    stretches: dict[int, list[Stretch]] = {part.file: [] for part in unit.slices}
    try:
        for batch in documents_of(unit, job, rejections, rows.counts, stretches):
            rows.add(batch)
            del batch  # the window holds what goes into rows, and frees it when written
        shards = rows.close()
        rejections.close()
    finally:
        rows.abandon()
        rejections.abandon()
    path = sums.path if sums else None
    return UnitResult(unit, shards, rows.counts, rejections.path, stretches, path)


def _writer(unit: WorkUnit, job: Job, config: PackConfig) -> RowWriter:
    if config.view:
        return ViewWriter(job.folder, unit.index, config, job.tokenizer_sha256)
    arrow = schema(config, job.pad_token_id, job.tokenizer_sha256)
    return ShardWriter(job.folder, unit.index, config, arrow, job.pad_token_id)


class UnitRows:
    """The rows of one unit, planned window by window.

    counts         of what has gone into them
    cut_documents  those of which rows hold several segments
    """

    def __init__(
        self,
        unit: WorkUnit,
        job: Job,
        config: PackConfig,
        writer: RowWriter,
        sums: UnitSums | None = None,
    ) -> None:
        """`sums`: takes the squared lengths of rows that are kept."""
        self._job = job
        self._config = config
        self._writer = writer
        self._sums = sums
        self._window: Window | SourceWindows = Window(config, unit.index)
        if config.mixture and not config.mixture.mix_within_rows:
            self._window = SourceWindows(config, config.mixture, unit.index)
        self._stream_position = 0
        self.counts = Counts()
        self.cut_documents = 0

    def add(self, batch: TokenBatch) -> None:
        """Raises DataError for documents that may not be cut or are too long to number."""
        config = self._config
        self._refuse_overlong(batch)
        if config.strategy == "wrap":
            pieces, untrained = _wrapped(batch, config, self._stream_position)
            taken = padded(pieces.length, config.segment_multiple)
            self._stream_position += int(taken.sum())
        else:
            pieces, untrained = pieces_of(batch, config)
        self.counts.add_untrained(batch.file, untrained)
        self.counts.add_loss(loss_of(pieces, batch.offsets, batch.trained))
        _count_documents(self.counts, batch, pieces, config.max_length)
        if batch.chosen is None:  # the sides of a pair are not parts of a text
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
        if self._sums is not None:
            self._sums.close()
        self.counts.trained_tokens = sum(shard.trained_tokens for shard in shards)
        return shards

    def abandon(self) -> None:
        """Let go of files after a failure."""
        self._writer.abandon()
        if self._sums is not None:
            self._sums.abandon()

    def _refuse_overlong(self, batch: TokenBatch) -> None:
        config, shape = self._config, self._job.shape
        if config.overlong == "error":
            others = "drop, truncate or truncate-turns" if shape.is_chat else "drop or truncate"
            others = others if shape.stays_whole else "split, truncate or drop"
            others = "drop" if shape.has_pairs else others
            tip = _OVERLONG.format(others)
            refuse_longer(
                batch, self._job, config.max_length, "--max-length is", tip, config.segment_multiple
            )
        elif config.overlong in ("split", "split-text") or config.truncate_side != "right":
            refuse_longer(batch, self._job, MAX_DOCUMENT_TOKENS, "the most is", _HUGE)
        # or else pieces begin at 0

    def _write(self, planned: PlannedRows) -> None:
        stock, order, row_offsets = planned.stock, planned.order, planned.row_offsets
        self._job.stop_if_asked()
        for rows in self._with_tokens(stock, order, row_offsets):
            self._writer.write(*rows)
        lengths = stock.length[order]
        if self._sums is not None:
            self._sums.add(squared_sums(lengths, row_offsets))
        whole = lengths if stock.side is None else item_lengths(lengths, stock.start[order] == 0)
        used = np.zeros(len(order) + 1, np.int64)
        np.cumsum(lengths, out=used[1:])
        count, max_length = len(row_offsets) - 1, self._config.max_length
        more = Counts(
            segments=len(order),
            rows=count,
            tokens=int(used[-1]),
            row_fill=fill_histogram(np.diff(used[row_offsets]), max_length),
            segments_per_row=powers_histogram(np.diff(row_offsets)),
            piece_length=np.bincount(whole, minlength=max_length + 1).astype(np.int64, copy=False),
        )
        more.add_trained(stock.file[order], trained_of(stock, order))
        more.add_mixedness(lengths, stock.file[order], row_offsets)
        if planned.unbalanced is not None:
            more.attention_before = planned.unbalanced
            more.attention_after = AttentionCost.of(lengths, row_offsets)
        self.counts.add(more)
        self._job.progress.wrote(more.tokens, count * max_length)

    def _with_tokens(
        self, stock: Stock, order: Int64, row_offsets: Int64
    ) -> Iterator[tuple[Stock, Int64, Int64]]:
        """The rows as the writer takes them. Tokens that lie elsewhere are fetched a few rows at a
        time, so that a window holds none.
        """
        step, tokenized = self._writer.rows_at_once, self._job.tokenized
        if stock.ids is not None or not step or tokenized is None:
            yield stock, order, row_offsets
            return
        for first in range(0, len(row_offsets) - 1, step):
            self._job.stop_if_asked()
            edges = row_offsets[first : first + step + 1]
            pieces = order[edges[0] : edges[-1]]
            ids = tokenized.tokens.gather(
                stock.file[pieces], stock.position[pieces], stock.start[pieces],
                stock.length[pieces],
            )  # fmt: skip
            yield gathered(stock, pieces, ids), np.arange(len(pieces)), edges - edges[0]


def pieces_of(batch: TokenBatch, config: PackConfig) -> tuple[Pieces, Untrained]:
    """The pieces that go into rows, except for "wrap", and the documents left out as untrained."""
    if batch.chosen is not None:
        return pieces_of_pairs(
            batch, config.max_length, config.segment_multiple, keep_untrained=config.keep_untrained
        )
    policy = _POLICIES.get(config.overlong or "", config.overlong or "")
    pieces = fit(batch.offsets, config.max_length, policy, config.truncate_side)
    if config.overlong == "split-text" and batch.trained is not None:
        pieces = without_overlong(pieces, batch.offsets, batch.trained, config.max_length)
    if batch.trained is None or config.keep_untrained:
        return pieces, Untrained()
    return without_untrained(pieces, batch.offsets, batch.trained)


def _wrapped(batch: TokenBatch, config: PackConfig, position: int) -> tuple[Pieces, Untrained]:
    documents, untrained = None, Untrained()
    if batch.trained is not None and not config.keep_untrained:
        documents, untrained = trained_documents(batch.offsets, batch.trained)
    multiple = config.segment_multiple
    return cut_stream(batch.offsets, config.max_length, position, multiple, documents), untrained


def _count_documents(counts: Counts, batch: TokenBatch, pieces: Pieces, max_length: int) -> None:
    lengths = np.diff(batch.offsets)
    placed = np.bincount(pieces.document, weights=pieces.length, minlength=len(lengths))
    placed = placed.astype(np.int64)
    counts.documents += int((placed > 0).sum())
    counts.unpacked_rows += int((-(-placed // max_length)).sum())
    counts.empty_documents += int((lengths == 0).sum())
    counts.encoded_tokens += int(lengths.sum())
    counts.document_length += powers_histogram(placed[placed > 0])
    counts.add_dropped(lengths[(lengths > max_length) & (placed == 0)])
    counts.add_files(batch.file, lengths, placed)
