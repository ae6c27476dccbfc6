"""Packing while training reads: rows, batches of rows, and positions that can be gone back to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from packer_cli import plan_packing
from packer_cli.errors import DataError, UsageError
from packer_cli.options.options import NAMES
from packer_cli.torch import (
    PackedBatch,
    PackingIterableDataset,
    pack_result_to_tensors,
    packed_collate_fn,
    padded_collate,
)

L = 32


def documents(count: int, longest: int = L, seed: int = 0) -> list[Any]:
    """Document k has the tokens 1000 k, 1000 k + 1, ...: every token is known again."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    return [np.arange(1000 * k, 1000 * k + n) for k, n in enumerate(lengths)]


def tokens_of(rows: list[Any]) -> Counter[int]:
    return Counter(
        token for row in rows for token in row["input_ids"][row["attention_mask"] == 1].tolist()
    )


@pytest.mark.parametrize("strategy", NAMES)
def test_every_token_is_in_a_row_once(strategy: str) -> None:
    source = documents(300, 5 * L)
    rows = list(PackingIterableDataset(source, L, 20, strategy))
    assert tokens_of(rows) == Counter(np.concatenate(source).tolist())
    for row in rows:
        assert row["input_ids"].shape == row["labels"].shape == (L,)
        edges = row["cu_seqlens"].tolist()
        for begin, end in pairwise(edges):
            ids = row["input_ids"][begin:end]
            assert (ids.diff() == 1).all()  # a piece of one document
            assert row["labels"][begin:end].tolist() == [-100, *ids[1:].tolist()]


def test_labels_come_along_also_through_the_row_that_waits() -> None:
    source = [
        {"input_ids": ids, "labels": np.where(ids % 3 == 0, ids, -100)} for ids in documents(200)
    ]
    for row in PackingIterableDataset(source, L, 10):
        first = torch.zeros(L, dtype=torch.bool)
        first[row["cu_seqlens"][:-1].long()] = True
        trained = (row["input_ids"] % 3 == 0) & (row["attention_mask"] == 1) & ~first
        assert torch.equal(row["labels"], torch.where(trained, row["input_ids"], -100))


def same_rows(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x
    )


@pytest.mark.parametrize("given", [0, 1, 7, 40, 10_000])
@pytest.mark.parametrize("strategy", ["best-fit", "wrap"])
def test_it_goes_on_after_any_row(given: int, strategy: str) -> None:
    source = documents(150, 2 * L)
    whole = list(PackingIterableDataset(source, L, 16, strategy))
    dataset = PackingIterableDataset(source, L, 16, strategy)
    before = list(islice(dataset, given))
    state = json.loads(json.dumps(dataset.state_dict()))
    again = PackingIterableDataset(source, L, 16, strategy)
    again.load_state_dict(state)
    after = list(again)
    if given > len(whole):  # the end: the next epoch
        assert same_rows(after, whole)
    else:
        assert same_rows(before + after, whole)
    assert same_rows(list(again), whole)


def test_a_position_of_other_options_is_refused() -> None:
    state = PackingIterableDataset([], L, 16).state_dict()
    with pytest.raises(DataError, match="the position has buffer_size 16, this data set 17"):
        PackingIterableDataset([], L, 17).load_state_dict(state)


def stateful(count: int, buffer_size: int, workers: int, **how: Any) -> Any:
    dataset = PackingIterableDataset(documents(count), L, buffer_size)
    collate = partial(padded_collate, config=None)
    return StatefulDataLoader(dataset, 4, collate_fn=collate, num_workers=workers, **how)


def ids_of(loader: Any) -> list[Any]:
    return [batch["input_ids"] for batch in loader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize(("workers", "steps"), [(0, 0), (0, 11), (2, 11)])
def test_a_stateful_loader_goes_on_where_it_was(workers: int, steps: int) -> None:
    whole, first, again = (
        ids_of(stateful(300, 16, workers)),
        *(stateful(300, 16, workers) for _ in range(2)),
    )
    batches = ids_of(islice(first, steps))
    again.load_state_dict(first.state_dict())
    assert torch.equal(torch.cat(batches + ids_of(again)), torch.cat(whole))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_ended_before_the_other_gives_nothing_again(persistent: bool) -> None:
    """Its position is that of its end, not of the next epoch: torchdata starts it once more."""
    first, again = (stateful(61, 8, 2, persistent_workers=persistent) for _ in range(2))
    whole = ids_of(first)
    batches = ids_of(islice(first, len(whole) - 1))
    again.load_state_dict(first.state_dict())
    assert torch.equal(torch.cat(batches + ids_of(again)), torch.cat(whole))
    assert torch.equal(torch.cat(ids_of(again)), torch.cat(whole))


def test_a_position_of_other_workers_is_refused() -> None:
    """Each would leave out as many documents of its own share as one had read of all."""
    dataset = PackingIterableDataset(documents(100), L, 8)
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())
    message = "saved by one of 1 workers, which had other documents than one of 2"
    with pytest.raises(DataError, match=message):
        next(iter(DataLoader(dataset, 1, num_workers=2, collate_fn=list)))
    assert len(list(DataLoader(dataset, 1, num_workers=1, collate_fn=list))) > 1


class OwnShare(IterableDataset):  # type: ignore[misc]
    """A source that deals its documents out to workers itself, as those of `datasets` do."""

    def __init__(self, count: int = 100) -> None:
        self._documents = documents(count)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        yield from self._documents[info.id :: info.num_workers] if info else self._documents


@pytest.mark.parametrize("source", [documents(100), OwnShare()], ids=["list", "IterableDataset"])
def test_workers_and_ranks_share_the_documents(source: Any) -> None:
    rows = []
    for rank in range(2):
        dataset = PackingIterableDataset(source, L, 8, rank=rank, world_size=2)
        rows += [row for (row,) in DataLoader(dataset, 1, num_workers=2, collate_fn=list)]
    assert tokens_of(rows) == Counter(np.concatenate(documents(100)).tolist())


def test_a_source_with_nothing_for_a_worker() -> None:
    """Such as a data set of `datasets` in one shard."""
    source = OwnShare(1)
    (row,) = DataLoader(PackingIterableDataset(source, L), 1, num_workers=2, collate_fn=list)
    assert tokens_of(row) == Counter(documents(1)[0].tolist())
    with pytest.raises(DataError, match="the source has 0 documents"):
        list(DataLoader(PackingIterableDataset(OwnShare(0), L), 1, num_workers=2))


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "the source has 0 documents for 1 ranks"),
    (documents(2), {"rank": 0, "world_size": 3}, "the source has 2 documents for 3 ranks"),
    ([], {"buffer_size": 0}, "buffer_size: 0"),
    ([[1], [0.5]], {}, "sequence 1: expected a flat sequence of integers"),
]


@pytest.mark.parametrize(("source", "how", "message"), WRONG)
def test_refused(source: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, UsageError), match=message):
        next(iter(PackingIterableDataset(source, **{"max_length": L, **how})))


# --- PackedBatch ---

FOUR = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
EXPECTED = {
    "input_ids": [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 11, 12, 0]],
    "labels": [[-100, 2, 3, -100, 5, -100, -100, -100], [-100, 7, 8, 9, -100, 11, 12, -100]],
    "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 0]],
    "attention_mask": [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]],
}


def assert_expected(batch: PackedBatch) -> None:
    for name, values in EXPECTED.items():
        assert getattr(batch, name).tolist() == values
        assert getattr(batch, name).dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 12, 15, 16]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 4
    assert len(batch) == 2


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_plan_and_its_documents_become_tensors(make: Any) -> None:
    plan = plan_packing([3, 2, 4, 3], 8, strategy="next-fit")
    batch = pack_result_to_tensors(plan, [make(one) for one in FOUR])
    assert_expected(batch)
    assert_expected(batch.to("cpu"))


@pytest.mark.parametrize("lengths", [[3, 2, 4], [2, 3, 4, 3], [3, 2, 4, 2], [3, 2, 4, 4]])
def test_a_plan_of_other_documents(lengths: list[int]) -> None:
    with pytest.raises(
        DataError, match="the plan was made for other lengths than these sequences have"
    ):
        pack_result_to_tensors(plan_packing(lengths, 8), FOUR)


def test_documents_are_packed_by_the_collator() -> None:
    collate = partial(packed_collate_fn, max_length=8, strategy="next-fit")
    for examples in (FOUR, [{"input_ids": one} for one in FOUR]):
        (batch,) = DataLoader(examples, batch_size=4, collate_fn=collate)
        assert_expected(batch)
    with pytest.raises(UsageError, match="got documents and no max_length"):
        packed_collate_fn(FOUR)
