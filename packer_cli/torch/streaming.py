"""`PackingIterableDataset`: documents packed into rows while training reads them.

1. Read `buffer_size` documents, plan them together, shuffle the rows.
2. Yield all rows but the emptiest, whose documents begin the next buffer.
3. At the end of the source yield that one, too.

A position has the number of documents before the buffer, the documents that wait for it (at most
one row of tokens) and the number of its rows that were yielded. To go on, the same buffer is read
and planned again. Needs the memory of one buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from packer_cli.errors import DataError
from packer_cli.options.options import canonical_name, keeps_order
from packer_cli.packing.sequences import pack_sequences
from packer_cli.steps import whole_size
from packer_cli.torch.collate import batch_of_rows, documents_of
from packer_cli.torch.dataset import RowBatch
from packer_cli.torch.sampler import share_of_ranks


class PackingIterableDataset(IterableDataset):  # type: ignore[misc]  # torch is not typed here
    """Packed rows of a source of documents, for a DataLoader and every collator of this package.

    source       an iterable that yields all documents each time: sequences of token ids, or dicts
                 with input_ids and perhaps labels, unshifted
    max_length   tokens in a row
    buffer_size  documents planned together; a few hundred rows' worth packs about as well as all
    strategy     as in `plan_packing`; so are `overlong`, and `seed`: None leaves rows as planned
    rank, world_size   as for `PackedSampler`; ranks may get different numbers of rows, so
                 end training after a number of steps

    Documents are distributed to ranks and to a DataLoader's workers one by one, unless the source
    is a torch IterableDataset, which distributes them to workers itself. A row is a dict of
    input_ids, labels, position_ids int32[max_length], attention_mask uint8[max_length] and
    cu_seqlens int32.

    `state_dict()` after a row and `load_state_dict()` go on with the next one; the source is then
    read again from its beginning, without packing. Each worker of a DataLoader has its own
    position, which StatefulDataLoader keeps and restores; a plain one with workers cannot.
    Accelerate and the Trainer need rank=0, world_size=1 and dispatch_batches=False: dispatching
    cuts the first rank's batches at their first dimension, boundaries of documents included.

    Raises UsageError for invalid options and, while iterating, DataError for an empty source or an
    invalid document.
    """

    def __init__(
        self,
        source: Iterable[Any],
        max_length: int,
        buffer_size: int = 1000,
        strategy: str = "best-fit",
        *,
        overlong: str = "split",
        seed: int | None = 0,
        pad_token_id: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        buffer_size = whole_size("buffer_size", buffer_size)
        self._source = source
        self._options: dict[str, Any] = {
            "max_length": max_length,
            "strategy": canonical_name(strategy),
            "overlong": overlong,
            "pad_token_id": pad_token_id,
        }
        pack_sequences([], **self._options)  # raises now what it would raise in the first step
        self._rank, self._world_size = share_of_ranks(rank, world_size)
        # all that rows depend on, other than the source
        self._order = self._options | {"buffer_size": buffer_size, "seed": seed}
        self._order |= {"rank": self._rank, "world_size": self._world_size}
        self._begin = self._now = _START

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._order.items())
        return f"PackingIterableDataset({options})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._now = self._begin  # until the first row, also in a worker that has ended
        return self._rows()

    def _rows(self) -> Iterator[dict[str, Any]]:
        if self._begin["workers"] not in (None, _workers()):
            raise DataError(
                f"the position was saved by one of {self._begin['workers']} workers, which had "
                f"other documents than one of {_workers()}",
                "resume with as many workers, and several only in a StatefulDataLoader, which "
                "keeps a position of each",
            )
        read, waited, yielded = (self._begin[name] for name in ("documents", "waiting", "rows"))
        documents, size = islice(self._share(), read, None), self._order["buffer_size"]
        last = False
        while not last:
            fresh = list(islice(documents, size))
            last = len(fresh) < size
            batch, numbers, waiting = self._packed([*waited, *fresh], read, last)
            for row in range(yielded, len(numbers)):
                self._now = _START | {"documents": read, "waiting": waited, "rows": row + 1}
                yield batch[numbers[row]]
            read, waited, yielded = read + len(fresh), waiting, 0
        self._begin = _START
        if get_worker_info() is None:
            self._now = self._begin
        # A worker that ends before others stays at its end: StatefulDataLoader starts it once more.

    def _share(self) -> Iterator[Any]:
        """Yield the documents of this rank and worker."""
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        least = self._world_size
        if isinstance(self._source, IterableDataset):
            least = 1 if number == 0 else 0  # the first worker gets some if there are any
            workers, number = 1, 0
        parts, mine = self._world_size * workers, self._rank * workers + number
        index = -1
        for index, document in enumerate(self._source):
            if index % parts == mine:
                yield document
        if index + 1 < least:
            raise DataError(
                f"the source has {index + 1} documents for {self._world_size} ranks",
                "give one that can be iterated again, such as a list or a dataset, and has more",
            )

    def _packed(
        self, documents: list[Any], read: int, last: bool
    ) -> tuple[RowBatch, list[int], list[Any]]:
        """Return (rows, numbers of those to yield, documents for the next buffer)."""
        ids, labels = documents_of(documents)
        seed = self._order["seed"]
        if seed is not None:
            digest = hashlib.sha256(f"{seed}/{read}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little") >> 1
        rows = pack_sequences(ids, labels=labels, seed=seed, **self._options)
        batch, plan = batch_of_rows(rows), rows.plan
        numbers = list(range(len(plan)))
        if last or not numbers:
            return batch, numbers, []
        # the emptiest row waits for more documents, or the last if the strategy keeps the order
        waits = numbers[-1] if keeps_order(plan.strategy) else int(plan.row_tokens.argmin())
        if plan.row_tokens[waits] == plan.max_length:
            return batch, numbers, []
        numbers.remove(waits)
        row = batch[waits]
        spans = [slice(*edges) for edges in pairwise(row["cu_seqlens"].tolist())]
        # in plain lists: they become part of the position
        names = ("input_ids", "labels")
        return batch, numbers, [{n: row[n][span].tolist() for n in names} for span in spans]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last row, in plain numbers and lists."""
        return {**self._now, "workers": _workers(), **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a position. Raises DataError if it was saved with other options."""
        for name, value in self._order.items():
            if state.get(name) != value:
                raise DataError(
                    f"the position has {name} {state.get(name)}, this data set {value}",
                    "resume with the options that the run began with",
                )
        self._begin = self._now = {name: state[name] for name in _START}


# A position: documents before the buffer, those that waited for it, rows given of it; and how many
# workers shared the documents when it was saved.
_START: dict[str, Any] = {"documents": 0, "waiting": [], "rows": 0, "workers": None}


def _workers() -> int:
    worker = get_worker_info()
    return worker.num_workers if worker else 1
