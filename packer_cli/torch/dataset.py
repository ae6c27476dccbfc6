"""`PackedDataset`, the rows of packed directories as a map-style dataset, and `RowBatch`.

Rows are gathered from memory-mapped shards, a whole batch at a time; nothing else is read into
memory. Rows of a view are filled from memory-mapped documents. Each process maps shards on first
use. Shards at a URL are copied into a local folder first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from packer_cli._kernels import gathering
from packer_cli.errors import DataError, UsageError
from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.records import Int32, Int64
from packer_cli.result.reader import PACK_AGAIN, Lists
from packer_cli.result.row_source import SOURCE, RowSource

RAGGED = ("cu_seqlens", PADDED_BOUNDARIES, SOURCE)
_FIXED = ("input_ids", "labels", "attention_mask", "position_ids")


class PackedDataset(RowSource):
    """Rows of packed directories and views, in the order of their shards.

    path      the --output of `packer pack`, or a list of these to read one after another. Their
              max_length, segment multiple and tokenizer must be the same. A packed directory may
              be a URL that fsspec reads, such as s3://bucket/out
    columns   names of columns in the directory, and "source" for results of a recipe; None: all
              but `segments` and `source`
    tokenizer_sha256   digest of the tokenizer.json that training uses, to be compared
    tokens    the tokenized directories of a view, if they are not where they were packed from; one
              or several, in any order
    cache     local folder for copies of the shards at a URL, which all processes of the machine
              share. None: ~/.cache/packer, or below XDG_CACHE_HOME

    `dataset[i]` is a dict of tensors: input_ids, labels, position_ids int32[L], attention_mask
    uint8[L], cu_seqlens int32[segments + 1], source int32[segments], an index of `sources`.
    Columns of values keep their types, bfloat16 and bool included, except uint16, which becomes
    int32. Values of tokens are [L], or [L, K] with K values each, and 0 on padding; values of
    records are [segments] or [segments, K]. Value i belongs to token i.
    `dataset.__getitems__([i, ...])`, which DataLoader calls, is a `RowBatch` for the collators of
    this package.

    It pickles as its paths, and threads may share it. A shard that differs from the manifest is
    never read.

    Raises DataError if a directory is not finished, has another format version or tokenizer or has
    changed since it was pickled; if a shard is missing or cut short; if a tokenized directory of a
    view is missing or changed; if joined results differ in what must be the same; or if something
    at a URL cannot be fetched or has changed. Raises UsageError for an unknown column.
    """

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> RowBatch:
        """Copy rows into one tensor for each column."""
        values, kinds = self.gather(rows), dict[str, Any]()
        for name, column in self.value_columns.items():
            kinds[name] = getattr(torch, "int32" if column.type == "uint16" else column.type)
            values[name] = _signed(values[name], widen=column.type == "uint16")
        ragged = {name: one for name, one in values.items() if isinstance(one, Lists)}
        fixed = {name: torch.from_numpy(one) for name, one in values.items() if name not in ragged}
        return RowBatch(fixed, ragged, kinds)


def _signed(stored: Any, *, widen: bool) -> Any:
    """Convert uint16, which few functions of torch take: bits of bfloat16 to int16, and with
    `widen` numbers to int32.
    """
    if isinstance(stored, Lists):
        return Lists(_signed(stored.values, widen=widen), stored.ends)
    if widen:
        return stored.astype(np.int32)
    return stored.view(np.int16) if stored.dtype == np.uint16 else stored


@dataclass(frozen=True)
class RowBatch:
    """b rows, gathered together. Iterating gives a dict for each row.

    columns  name -> tensor [b, L] as stored: input_ids, labels, position_ids int32,
             attention_mask uint8; columns of values of tokens [b, L] or [b, L, K]
    ragged   name -> lists of different lengths: the boundaries cu_seqlens and cu_seqlens_padded,
             the `source` of each segment; columns of values of records
    kinds    name of a column of values -> its type in torch; bfloat16 is stored as int16
    """

    columns: dict[str, Any]
    ragged: dict[str, Lists]
    kinds: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter((self.columns or self.ragged).values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: values[index] for name, values in self.columns.items()}
        row |= {name: torch.from_numpy(lists[index]) for name, lists in self.ragged.items()}
        return row | {name: row[name].view(kind) for name, kind in self.kinds.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def max_length(self) -> int:
        return int(self.columns["input_ids"].shape[1])

    def boundaries(self) -> tuple[Int32, int]:
        """Return the boundaries of documents in the rows end to end, int32[k + 1], and the tokens
        of the longest document.

        The padding at a row's end is a document of its own, so that every place belongs to one.
        The padding of a segment (`--segment-multiple`) is the end of its document. Raises DataError
        for invalid boundaries.
        """
        stored = self.ragged.get(PADDED_BOUNDARIES) or self.ragged["cu_seqlens"]
        edges = np.empty(len(stored.values) + 1, np.int32)
        count, longest = gathering.join_boundaries(
            stored.values, stored.ends, self.max_length, edges
        )
        if count < 0:
            raise DataError(
                f"row {longest} of a batch has the boundaries {stored[longest].tolist()}: they do "
                f"not ascend from 0 to {self.max_length} at most",
                PACK_AGAIN,
            )
        return edges[:count], longest

    def segments(self) -> tuple[Int64, Int64, Int64]:
        """Return (row, begin, end) of the segments in the rows end to end, int64[s] each.

        Padding is left out. Raises as `boundaries`.
        """
        self.boundaries()
        real = self.ragged["cu_seqlens"]
        laid = self.ragged.get(PADDED_BOUNDARIES, real)
        row = np.repeat(np.arange(len(self)), np.diff(real.ends) - 1)
        begin = np.delete(laid.values, laid.ends[1:] - 1) + row * self.max_length
        return row, begin, begin + np.delete(np.diff(real.values), real.ends[1:-1] - 1)

    def sources(self, documents: Int64) -> Int32 | None:
        """Return the source of each document, int32[k], -1 for padding; None if it is unknown.

        documents  int64[b], the number of documents of each row, including its padding
        """
        stored = self.ragged.get(SOURCE)
        return None if stored is None else _of_documents(stored, documents, -1)

    def token_values(self) -> dict[str, Any]:
        """Return the columns of values of tokens, tensors [b, L] or [b, L, K], without a copy."""
        kinds = self.kinds.items()
        return {name: self.columns[name].view(kind) for name, kind in kinds if name in self.columns}

    def document_values(self, documents: Int64) -> dict[str, Any]:
        """Return the columns of values of records, tensors [k] or [k, K], 0 for padding.

        documents  as in `sources`
        """
        kinds = [(name, kind) for name, kind in self.kinds.items() if name in self.ragged]
        return {
            name: torch.from_numpy(_of_documents(self.ragged[name], documents, 0)).view(kind)
            for name, kind in kinds
        }


def _of_documents(lists: Lists, documents: Int64, padding: int) -> Any:
    """Lay out values of segments by documents, [k] or [k, K]: those behind the segments of a row
    have the value `padding`.
    """
    values, sizes = lists.values, np.diff(lists.ends)
    laid_out = np.full((int(documents.sum()), *values.shape[1:]), padding, values.dtype)
    begins = np.cumsum(documents) - documents
    laid_out[np.arange(len(values)) + np.repeat(begins - lists.ends[:-1], sizes)] = values
    return laid_out


def row_batch(rows: Any) -> RowBatch:
    """Return rows of a collator as a RowBatch.

    rows  a RowBatch, or dicts of tensors. If they have no boundaries, such as those of
          `packer_cli.hf`, a document begins where positions restart

    Raises UsageError for rows without input_ids or boundaries, and for rows of different columns.
    """
    if not len(rows):
        raise UsageError("a collator of packed rows got no rows")
    batch = rows if isinstance(rows, RowBatch) else _stacked(rows)
    columns, ragged = batch.columns, batch.ragged
    if "cu_seqlens" not in ragged and "position_ids" in columns:
        starts = [np.flatnonzero(row == 0) for row in columns["position_ids"].numpy()]
        edges = Lists.of([np.append(row, batch.max_length) for row in starts])
        batch = RowBatch(columns, ragged := {**ragged, "cu_seqlens": edges}, batch.kinds)
    for name, values in (("input_ids", columns), ("cu_seqlens", ragged)):
        if name not in values:
            raise UsageError(
                f"rows without {name}" + (" or position_ids" if name == "cu_seqlens" else ""),
                "PackedDataset gives it unless `columns` leaves it out; transformers.Trainer "
                "removes it unless remove_unused_columns=False",
            )
    return batch


def _stacked(rows: Any) -> RowBatch:
    if unlike := {name for row in rows for name in row.keys() ^ rows[0].keys()}:
        raise UsageError(
            f"some rows of a batch have {min(unlike)}, others do not",
            "pack datasets that are trained on together with the same options",
        )
    batch = RowBatch({}, {name: Lists.of([row[name] for row in rows])
                          for name in RAGGED if name in rows[0]})  # fmt: skip
    segments = [len(row["cu_seqlens"]) - 1 for row in rows] if "cu_seqlens" in rows[0] else []
    for name in [column for column in rows[0] if column not in (*RAGGED, "segments")]:
        values = [torch.as_tensor(row[name]) for row in rows]
        sizes = [len(of_row) if of_row.ndim else -1 for of_row in values]
        of_tokens = sizes == [len(row.get("input_ids", ())) for row in rows]
        if name not in _FIXED and (of_tokens or sizes == segments):  # as a PackedDataset gives it
            batch.kinds[name] = values[0].dtype
        if of_tokens or name not in batch.kinds:
            batch.columns[name] = torch.stack(values)
            continue
        stored = torch.cat(values)
        stored = stored.view(torch.int16) if stored.dtype == torch.bfloat16 else stored
        batch.ragged[name] = Lists(stored.numpy(), np.cumsum([0, *sizes]))
    return batch
