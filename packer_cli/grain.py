"""Rows and documents as data sources of Grain, in numpy arrays.

    grain.MapDataset.source(PackedSource("out"))          rows of packed directories and views
    grain.MapDataset.source(DocumentSource("tokens"))     documents of a tokenized directory

Both are what Grain calls a `RandomAccessDataSource`, which other loaders take as well: they have
`len`, are read by numbers, pickle as their paths, and print the same in every process, as
checkpoints of Grain's `DataLoader` need it. Neither needs Grain or torch.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import numpy as np

from packer_cli.errors import DataError
from packer_cli.packing.labels import trained_flags
from packer_cli.records import FILE, POSITION, START, Documents, Int64, offsets_of
from packer_cli.result.columns import as_numbers
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import checksum
from packer_cli.result.row_source import RowSource, number_of
from packer_cli.result.tokenized import TokenizedDirectory, Tokens, open_tokenized
from packer_cli.steps import Balance, Order, Schedule, Steps, StepSizes, check_rank, row_costs
from packer_cli.storage import local

__all__ = ["DocumentSource", "PackedSource"]


class PackedSource(RowSource):
    """Rows of packed directories and views, in the order of their shards.

    path, columns, tokens, cache   as in `packer_cli.torch.PackedDataset`, and so are the errors

    `source[i]` is a dict of arrays: input_ids, labels, position_ids int32[L], attention_mask
    uint8[L], cu_seqlens int32[segments + 1], and the carried columns, bfloat16 as float32. Labels
    are not shifted: a token's own id, or -100.
    """

    _steps: tuple[tuple[object, ...], Steps] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in super().__getstate__().items() if name != "_steps"}

    def __getitem__(self, row: int) -> dict[str, Any]:
        values = {name: one[0] for name, one in self.gather([row]).items()}
        for name, column in self.value_columns.items():
            values[name] = as_numbers(column, values[name])
        return values

    def rows_of(
        self,
        step: int,
        rank: int = 0,
        *,
        world_size: int = 1,
        batch_size: int = 1,
        micro_batches: int = 1,
        seed: int | None = 0,
        balance: Balance | None = None,
        hidden_size: int | None = None,
    ) -> Int64:
        """Return the rows that a rank takes in a step, int64[n], in the order of its batches.

        step   from 0; counting goes on over epochs, each of which has an order of its own
        others  as in `packer_cli.torch.PackedSampler`, which takes the same rows; balance needs
                the `hidden_size` of the model

        Raises UsageError for sizes below 1, a rank that is out of range, and balance without
        hidden_size; DataError for more ranks than rows.
        """
        options = world_size, batch_size, micro_batches, seed, balance, hidden_size
        check_rank(rank, world_size)
        known = self._steps  # one read: other threads may ask for other steps
        if known is None or known[0] != options:
            costs = None
            if balance is not None:
                costs = row_costs(self.squared_lengths, self.max_length, hidden_size)
            sizes = StepSizes(world_size, batch_size, micro_batches)
            schedule = Schedule(Order(len(self), seed), sizes, balance=balance, costs=costs)
            known = self._steps = options, Steps(schedule)
        return known[1].rows_of(step)[rank]


class DocumentSource:
    """Documents of a tokenized directory, in its order.

    `source[i]` is a dict of arrays: input_ids int32[n], loss_mask uint8[n], 1 where a token is
    trained on, which the first one never is, and the carried columns, bfloat16 as float32: values
    of tokens [n], or [n, K], and those of records as they are.

    Raises UsageError for a URL; DataError if the directory is not finished or damaged, and in
    another process also if it has changed since the source was pickled.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local(path, "and documents are read from local directories only").absolute()
        self._digest: str | None = None
        self._digest = checksum(self._opened[0].facts.document)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_digest": self._digest}

    @cached_property
    def _opened(self) -> tuple[TokenizedDirectory, Tokens]:
        directory = open_tokenized(self.path)
        if self._digest not in (None, checksum(directory.facts.document)):
            raise DataError(
                f"{self.path / MANIFEST}: changed since the source was opened",
                "open it again; tokenize into a new directory while one is in use",
            )
        return directory, Tokens({0: directory}, directory.value_columns.values())

    def __len__(self) -> int:
        return len(self._opened[0])

    def __repr__(self) -> str:
        facts = self._opened[0].facts
        return f"DocumentSource({str(self.path)!r}, {facts.documents:,} documents, {self._digest})"

    def __getitem__(self, document: int) -> dict[str, Any]:
        directory, tokens = self._opened
        number = number_of("document", document, len(directory))
        at, start = np.array([number]), np.zeros(1, np.int32)
        offsets = offsets_of(directory.lengths[number : number + 1])
        where = {FILE: np.zeros(1, np.int32), POSITION: at, START: start}
        found = tokens.fetch(Documents(None, offsets, {}, where))
        trained = tokens.trained_of(at, start, found.lengths)
        values: dict[str, Any] = {
            "input_ids": found.token_ids.view(np.int32),
            "loss_mask": trained_flags(trained, offsets[:-1], int(offsets[-1])).view(np.uint8),
        }
        for name, column in directory.value_columns.items():
            if column.is_of_segments:
                values[name] = as_numbers(column, found.of_documents[name])[0]
            else:
                values[name] = as_numbers(column, found.of_tokens[name])
        return values
