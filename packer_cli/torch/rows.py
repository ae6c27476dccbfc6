"""Packed rows on their way from a dataset to a collator, and where documents begin in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packer_cli._kernels import gathering
from packer_cli.config.columns import PADDED_BOUNDARIES, PAIR, SIDE
from packer_cli.errors import DataError, UsageError
from packer_cli.records import Int32, Int64
from packer_cli.result.mapped import Lists
from packer_cli.result.reader import PACK_AGAIN

SOURCE = "source"
RAGGED = ("cu_seqlens", PADDED_BOUNDARIES, SOURCE, PAIR, SIDE)


@dataclass(frozen=True)
class RowBatch:
    """b rows, gathered at once. Iterating gives a dict for each row.

    columns  name -> tensor [b, L] as stored: input_ids, labels, position_ids int32,
             attention_mask uint8
    ragged   name -> the rows' boundaries: cu_seqlens, cu_seqlens_padded; and numbers of each
             segment: `source`; in rows of pairs `pair` and `side`
    """

    columns: dict[str, Any]
    ragged: dict[str, Lists]

    @classmethod
    def joined(cls, batches: Sequence[RowBatch], places: Sequence[Int64]) -> RowBatch:
        """The rows of several batches of alike columns, those of each in its places."""
        if len(batches) == 1:
            return batches[0]
        order = np.argsort(np.concatenate(places))
        columns = {}
        for name, values in batches[0].columns.items():
            together = np.empty((len(order), *values.shape[1:]), values.numpy().dtype)
            for batch, rows in zip(batches, places, strict=True):
                together[rows] = batch.columns[name].numpy()  # a quarter of the time of torch's
            columns[name] = torch.from_numpy(together)
        ragged = {
            name: Lists.joined([batch.ragged[name] for batch in batches], order)
            for name in batches[0].ragged
        }
        return cls(columns, ragged)

    def __len__(self) -> int:
        return len(next(iter((self.columns or self.ragged).values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: values[index] for name, values in self.columns.items()}
        return row | {name: torch.from_numpy(lists[index]) for name, lists in self.ragged.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def max_length(self) -> int:
        return int(self.columns["input_ids"].shape[1])

    def boundaries(self) -> tuple[Int32, int]:
        """(int32[k + 1] where documents begin in the rows end to end, 0, ..., b * max_length;
        the tokens of the longest).

        The padding at a row's end is a document of its own, so that every place belongs to one.
        A segment's own padding (`--segment-multiple`) is the end of its segment. Raises DataError
        for invalid boundaries, UsageError for more tokens than int32 counts.
        """
        if len(self) * self.max_length > np.iinfo(np.int32).max:
            raise UsageError(
                f"a batch of {len(self)} rows of {self.max_length} tokens: boundaries count up to "
                "2**31 - 1",
                "choose a smaller batch",
            )
        own = self.ragged.get(PADDED_BOUNDARIES) or self.ragged["cu_seqlens"]
        edges = np.empty(len(own.values) + 1, np.int32)
        count, longest = gathering.join_boundaries(own.values, own.ends, self.max_length, edges)
        if count < 0:
            raise DataError(
                f"row {longest} of a batch has the boundaries {own[longest].tolist()}: they do "
                f"not ascend from 0 to {self.max_length} at most",
                PACK_AGAIN,
            )
        return edges[:count], longest

    def sources(self, documents: Int64) -> Int32 | None:
        """int32[k], the source of each of documents[row] documents of the rows, -1 of padding,
        which is a row's last; None where rows do not say. Raises DataError where they say more, or
        less.
        """
        own = self.ragged.get(SOURCE)
        if own is None:
            return None
        sizes = np.diff(own.ends)
        padding = documents - sizes
        if ((padding < 0) | (padding > 1)).any():
            row = int(((padding < 0) | (padding > 1)).argmax())
            raise DataError(
                f"row {row} of a batch has {documents[row]} documents, and sources of {sizes[row]}",
                PACK_AGAIN,
            )
        sources = np.full(int(documents.sum()), -1, np.int32)
        begins = np.cumsum(documents) - documents
        sources[np.arange(len(own.values)) + np.repeat(begins - own.ends[:-1], sizes)] = own.values
        return sources


def row_batch(rows: Any, *, of_pairs: bool = False) -> RowBatch:
    """What a collator is given, as a RowBatch: one already, or rows as dicts of tensors.

    Rows without boundaries, such as those of `packer_cli.hf`, have them where positions restart.
    Raises UsageError for rows without input_ids or boundaries, of unlike columns, and for rows of
    pairs unless the collator is for them: their labels are also on answers to be unlearned.
    """
    if not len(rows):
        raise UsageError("a collator of packed rows got no rows")
    if isinstance(rows, RowBatch):
        batch = rows
    else:
        if not all(isinstance(row, Mapping) for row in rows):
            raise UsageError("a collator of packed rows got something other than rows")
        if unlike := {name for row in rows for name in row.keys() ^ rows[0].keys()}:
            raise UsageError(
                f"some rows of a batch have {min(unlike)}, others do not",
                "pack datasets that are trained on together with the same options",
            )
        batch = RowBatch(
            {name: torch.stack([torch.as_tensor(row[name]) for row in rows])
             for name in rows[0] if name not in (*RAGGED, "segments")},
            {name: Lists.of([row[name] for row in rows]) for name in RAGGED if name in rows[0]},
        )  # fmt: skip
    if "cu_seqlens" not in batch.ragged and "position_ids" in batch.columns:
        starts = [np.flatnonzero(row == 0) for row in batch.columns["position_ids"].numpy()]
        edges = Lists.of([np.append(row, batch.max_length) for row in starts])
        batch = RowBatch(batch.columns, {**batch.ragged, "cu_seqlens": edges})
    for name, values in (("input_ids", batch.columns), ("cu_seqlens", batch.ragged)):
        if name not in values:
            raise UsageError(
                f"rows without {name}" + (" or position_ids" if name == "cu_seqlens" else ""),
                "PackedDataset gives it unless `columns` leaves it out; transformers.Trainer "
                "removes it unless remove_unused_columns=False",
            )
    of_both = {PAIR, SIDE} & batch.ragged.keys()
    if of_pairs and len(of_both) < 2:
        raise UsageError(
            "rows without pair and side, for a collator of pairs",
            "pack with --shape preference; varlen_collate takes other rows",
        )
    if of_both and not of_pairs:
        raise of_pairs_error("rows of pairs, for a collator of other rows")
    return batch


def of_pairs_error(what: str) -> UsageError:
    """Pairs where plain training would learn both sides of them."""
    return UsageError(
        f"{what}: a model would be trained on rejected answers, too",
        "preference_collate; unpaired_collate for records with a label",
    )
