"""PackedSampler: one order for any number of ranks, plain or in even steps, in every loader."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from recipes import run
from torch import distributed
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from packer_cli.errors import DataError, UsageError
from packer_cli.torch import PackedDataset, PackedSampler, varlen_collate

L, ROWS = 64, 1000
SMALL = {"block_rows": 16, "window_blocks": 4}
SIZES = {"batch_size": 2, "micro_batches": 3, "hidden_size": 1}
WORLD, BATCH, MICRO = 4, 2, 3
STEP = WORLD * BATCH * MICRO
BALANCES = [None, "step", "order"]
of_any_balance = pytest.mark.parametrize("balance", BALANCES)
stateful = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
collate = partial(varlen_collate, config=None)


def lines(count: int, seed: int) -> str:
    """Documents of long-tailed lengths, so that rows of one document and rows of many are there."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(2, 1.3, count), 1, L).astype(int)
    return "".join(json.dumps({"input_ids": random.integers(1, 60, length).tolist()}) + "\n"
                   for length in lengths)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A packed directory, by length so that rows cost unlike much, and a view."""
    folder = tmp_path_factory.mktemp("results")
    for name, seed in (("a", 0), ("b", 1)):
        (folder / f"{name}.jsonl").write_text(lines(3000, seed))
    how = ("--unit-bytes", "20K", "--strategy", "bfd")
    run("pack", folder / "a.jsonl", "-l", L, "-o", folder / "packed", *how)
    run("tokenize", folder / "b.jsonl", "-o", folder / "tokens")
    run("pack", folder / "tokens", "-l", L, "--view", "-o", folder / "view")
    return [folder / "packed", folder / "view"]


@pytest.fixture(scope="module")
def dataset(results: list[Path]) -> PackedDataset:
    return PackedDataset(results[0])


def ranks(
    dataset: Any, world: int = WORLD, balance: str | None = None, **options: Any
) -> list[PackedSampler]:
    chosen = SMALL | (SIZES if balance else {}) | options
    return [
        PackedSampler(dataset, rank=rank, world_size=world, balance=balance, **chosen)
        for rank in range(world)
    ]


def together(samplers: list[PackedSampler], most: int | None = None) -> list[int]:
    """The rows of one iteration of all ranks in the order of turns; `most` rows of each."""
    shares = [list(islice(sampler, most)) for sampler in samplers]
    turns = max(map(len, shares))
    return [rows[turn] for turn in range(turns) for rows in shares if turn < len(rows)]


def steps_of(samplers: list[PackedSampler], size: int = STEP) -> list[list[list[int]]]:
    """Of the next iteration: [step][rank][row]."""
    shares = [list(sampler) for sampler in samplers]
    most = size // len(samplers)
    count = -(-len(shares[0]) // most)
    return [[rows[most * step : most * (step + 1)] for rows in shares] for step in range(count)]


def rows_in(steps: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(row for rows in step for row in rows) for step in steps]


def unevenness(dataset: PackedDataset, steps: list[list[list[int]]]) -> float:
    """The costliest rank's share of the mean rank's, mean over steps."""
    costs = 6 * L + dataset.squared_lengths
    sums = [[costs[rows].sum() for rows in step] for step in steps]
    return float(np.mean([max(one) / np.mean(one) for one in sums]))


# --- one order ---


def test_an_epoch_is_every_row_once_and_no_epoch_is_like_another() -> None:
    sampler = PackedSampler(ROWS, **SMALL)
    epochs = [list(sampler) for _ in range(3)]
    for rows in epochs:
        assert sorted(rows) == list(range(ROWS))
        assert len(sampler) == ROWS
    assert epochs[0] != epochs[1] != epochs[2]
    assert list(PackedSampler(ROWS, **SMALL)) == epochs[0]
    assert list(PackedSampler(ROWS, seed=1, **SMALL)) != epochs[0]
    assert list(PackedSampler(ROWS, seed=None)) == list(range(ROWS))


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("world", [2, 3, 5, 7])
def test_ranks_stripe_one_order(world: int, even: bool) -> None:
    """Nothing is repeated or skipped over the epochs of a run, and no rank waits for another."""
    one = PackedSampler(ROWS, **SMALL)
    endless = list(chain.from_iterable(list(one) for _ in range(4)))
    samplers, taken = ranks(ROWS, world, even=even), []
    for epoch in range(3):
        assert {sampler.epoch for sampler in samplers} == {epoch}
        lengths = [len(sampler) for sampler in samplers]
        rows = together(samplers)
        assert len(rows) == sum(lengths)
        assert max(lengths) - min(lengths) == (not even and ROWS % world > 0)
        taken += rows
    assert taken == endless[: len(taken)]
    assert 3 * ROWS - world < len(taken) <= 3 * ROWS


@of_any_balance
def test_iterations_and_epochs(dataset: PackedDataset, balance: Any) -> None:
    """One that is left begins again; one that ends at its last row, asking for no row too many, is
    an epoch; epochs may be set.
    """
    one, other = (ranks(dataset, 3, balance)[1] for _ in range(2))
    epochs = [list(one) for _ in range(3)]
    assert list(islice(other, 10)) == list(islice(other, 10)) == epochs[0][:10]
    assert other.state_dict()["samples"] == 30
    for epoch in range(3):
        assert list(islice(other, len(other))) == epochs[epoch]
    for epoch in (2, 0, 1, 1):
        other.set_epoch(epoch)
        assert list(other) == epochs[epoch]
    fresh = ranks(dataset, 3, balance)[1]
    deque(fresh, 0)
    state = fresh.state_dict()
    state["samples"] += 15
    if balance is None:
        other.load_state_dict(state)
        other.set_epoch(1)  # it is in there
        assert list(other) == epochs[1][5:]
        other.load_state_dict(state)
        with pytest.raises(UsageError, match="after a state of epoch 1 was loaded"):
            other.set_epoch(0)


def test_it_prints_what_it_is() -> None:
    assert repr(PackedSampler(100, seed=3, rank=1, world_size=2)) == (
        "PackedSampler(rows=100, seed=3, block_rows=256, window_blocks=64, rank=1, world_size=2, "
        "batch_size=1, micro_batches=1, epoch=0)"
    )


def test_rows_of_one_rank_count_for_all() -> None:
    samplers = ranks(ROWS, 3)
    together(samplers)  # 999 rows
    together(samplers, most=100)
    assert [sampler.state_dict(rows=7)["samples"] for sampler in samplers] == [999 + 21] * 3
    assert samplers[0].state_dict(rows=1000)["samples"] == 1998
    samplers[0].load_state_dict(samplers[1].state_dict(rows=7))
    assert samplers[0].state_dict(rows=0)["samples"] == 999 + 21


def test_several_ranks_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under torchrun, above init_process_group, where each would take all rows."""
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "is_initialized", lambda: True)
        patch.setattr(distributed, "get_world_size", lambda: 2)
        with pytest.raises(UsageError, match=r"torch\.distributed runs 2 ranks"):
            PackedSampler(8)
        assert len(PackedSampler(8, rank=0, world_size=1)) == 8
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"torch\.distributed runs 2 ranks"):
        PackedSampler(8)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(PackedSampler(8)) == 8


# --- even steps ---


def test_balanced_steps_are_even(results: list[Path]) -> None:
    """Those of one result, of several; with the rows of the plain step, or within a window."""
    for paths in (results[0], results):
        dataset = PackedDataset(paths)
        found = [int(np.square(np.diff(row["cu_seqlens"])).sum()) for row in dataset]
        assert dataset.squared_lengths.tolist() == found
        plain, even = ranks(dataset), ranks(dataset, balance="step")
        for _ in range(2):
            assert [len(sampler) for sampler in even] == [len(sampler) for sampler in plain]
            before, after = steps_of(plain), steps_of(even)
            assert rows_in(before) == rows_in(after)
            assert before != after
            assert unevenness(dataset, before) > 1.15 > 1.1 > unevenness(dataset, after)
    dataset = PackedDataset(results[0])
    ways: dict[str | None, dict[str, Any]] = {None: {}, "step": {}, "order": {"window": 8}}
    plain, even, windows = (
        steps_of(ranks(dataset, balance=how, block_rows=8, **more)) for how, more in ways.items()
    )
    assert Counter(chain(*rows_in(plain))) == Counter(chain(*rows_in(windows)))
    assert unevenness(dataset, windows) < unevenness(dataset, even)
    assert [len(rows) for rows in windows[0]] == [BATCH * MICRO] * WORLD


# --- the rows of a step ---


def loops() -> Iterator[tuple[dict[str, Any], bool]]:
    """(options of a sampler, whether the loader has drop_last), drawn at random."""
    random = np.random.default_rng(0)
    for _ in range(40):
        world, batch, micro, seed = random.integers((1, 1, 1, 0), (4, 5, 4, 99)).tolist()
        options = {"world_size": world, "batch_size": batch, "micro_batches": micro, "seed": seed}
        balance = random.choice(["", "step", "order"])
        if balance:
            options |= {"balance": str(balance), "hidden_size": 1}
        else:
            options |= {"even": bool(random.random() < 0.5)}
        yield options | ({"window": 3} if balance == "order" else {}), bool(random.random() < 0.4)


def read_steps(
    samplers: list[PackedSampler], batch_size: int, micro_batches: int, **how: Any
) -> Iterator[list[list[int]]]:
    """The rows of each rank, step after step and epoch after epoch, as real loaders give them."""
    loaders = [DataLoader(range(sampler.rows), batch_size, sampler=sampler, **how,
                          collate_fn=list) for sampler in samplers]  # fmt: skip
    while True:
        epoch = [iter(loader) for loader in loaders]
        while any(step := [[*chain(*islice(one, micro_batches))] for one in epoch]):
            yield step


@pytest.mark.parametrize(("options", "drop_last"), [*loops()])
def test_rows_of_a_step_are_those_that_loaders_read(
    dataset: PackedDataset, options: dict[str, Any], drop_last: bool
) -> None:
    """From the run's beginning, and from a state on, for other ranks."""
    sizes = {name: options[name] for name in ("batch_size", "micro_batches")}
    some = [PackedSampler(dataset, **SMALL | options | {"rank": rank})
            for rank in range(options["world_size"])]  # fmt: skip
    count = 3 * len(dataset) // (options["world_size"] * sizes["batch_size"]) + 3
    for number, step in enumerate(islice(read_steps(some, **sizes, drop_last=drop_last), count)):
        if number % 7 == 0 or number > count - 5:
            for rank, rows in enumerate(step):
                found = some[0].rows_of(number, rank, drop_last=drop_last)
                assert (found.dtype, found.tolist()) == (np.int64, rows), (number, rank)
    done = some[0].state_dict()
    again = [PackedSampler(dataset, **SMALL | options | {"rank": rank, "world_size": 2})
             for rank in range(2)]  # fmt: skip
    for sampler in again:
        sampler.load_state_dict(done)
    for number, step in enumerate(islice(read_steps(again, **sizes, drop_last=drop_last), 40)):
        assert [again[1].rows_of(number, rank, drop_last=drop_last).tolist()
                for rank in range(2)] == step, number  # fmt: skip


def test_steps_that_do_not_exist(dataset: PackedDataset) -> None:
    sampler = PackedSampler(dataset, batch_size=len(dataset) + 1, micro_batches=2)
    assert sampler.rows_of(0, 0).tolist() == [*PackedSampler(dataset, seed=0)]
    for step, rank, drop_last, message in (
        (-1, 0, False, "step: -1 is negative"),
        (0, 1, False, "rank: 1 is not between 0 and world_size - 1, 0"),
        (0, 0, True, "no epoch has a batch of"),
    ):
        with pytest.raises((UsageError, DataError), match=message):
            sampler.rows_of(step, rank, drop_last=drop_last)


# --- what cannot be ---

BALANCED: dict[str, Any] = {"balance": "step"} | SIZES
OWN = BALANCED | {"hidden_size": None}
NO_COST = r"cost: returned no array of \d+ finite costs"
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("hidden_size: is only for balance", {"hidden_size": 2}),
    ("give both or none", {"rank": 0}),
    ("rank: 2 is not between 0 and world_size - 1, 1", {"rank": 2, "world_size": 2}),
    ("9999 ranks share .* rows: some would get none", {"rank": 0, "world_size": 9999}),
    ("balance: 'even' is not one of step, order", BALANCED | {"balance": "even"}),
    ("balance: 'step' without batch_size", BALANCED | {"batch_size": None}),
    ("hidden_size and cost: neither given", OWN),
    ("balance: 'step' with even=False", BALANCED | {"even": False}),
    (NO_COST, OWN | {"cost": lambda sums: sums[1:]}),
]


@pytest.mark.parametrize(("message", "options"), WRONG, ids=[message for message, _ in WRONG])
def test_refused(dataset: PackedDataset, message: str, options: dict[str, Any]) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        PackedSampler(dataset, **options)


def test_states_of_another_balance_are_refused(dataset: PackedDataset) -> None:
    plain, step, order = (ranks(dataset, balance=balance)[0] for balance in BALANCES)
    assert set(plain.state_dict()) == {
        "samples", "data", "rows", "seed", "block_rows", "window_blocks",
    }  # fmt: skip
    for one, other, message in (
        (step, plain, "balance step, this sampler None"),
        (step, order, "balance step, this sampler order"),
        (order, ranks(dataset, balance="order", window=9)[0], "window 64, this sampler 9"),
        (step, ranks(dataset, balance="step", hidden_size=2)[0], "cost 1, this sampler 2"),
    ):
        with pytest.raises(DataError, match=message):
            other.load_state_dict(one.state_dict())
    own = [ranks(dataset, balance="step", hidden_size=None, cost=cost)[0]
           for cost in (lambda sums: sums, lambda sums: sums + 1, lambda sums: sums)]  # fmt: skip
    own[2].load_state_dict(own[0].state_dict())
    with pytest.raises(DataError, match=r"cost [0-9a-f]{64}, this sampler"):
        own[1].load_state_dict(own[0].state_dict())
    plainly = plain.state_dict()
    PackedSampler(len(dataset), **SMALL).load_state_dict(plainly)  # of rows that have no name
    plain.load_state_dict(PackedSampler(len(dataset), **SMALL).state_dict())
    for change, message in (({"data": "another"}, "data another"), ({"rows": 9}, "rows 9, this")):
        with pytest.raises(DataError, match=f"the sampler's state has {message}"):
            plain.load_state_dict(plainly | change)


# --- in the loaders of others ---


def numbers(dataset: PackedDataset) -> Callable[[Any], list[int]]:
    """The rows of a batch, by their tokens."""
    known = {bytes(row["input_ids"].numpy().astype(np.int64).data): number
             for number, row in enumerate(dataset)}  # fmt: skip
    assert len(known) == len(dataset)
    return lambda batch: [known[bytes(ids.numpy().data)] for ids in batch["input_ids"].view(-1, L)]


loaders = pytest.mark.parametrize(("balance", "workers"), [(None, 0), (None, 2), ("order", 2)])


@loaders
def test_a_loader_that_reads_ahead_is_told_where_it_is(
    dataset: PackedDataset, balance: Any, workers: int
) -> None:
    read = numbers(dataset)
    sampler, one = (ranks(dataset, balance=balance)[2] for _ in range(2))

    def batches(own: PackedSampler) -> Iterator[list[int]]:
        loader: Any = DataLoader(
            dataset, BATCH, sampler=own, collate_fn=collate, num_workers=workers
        )
        return map(read, loader)

    rows = list(one)
    assert list(islice(batches(sampler), 7)) == [rows[2 * n : 2 * n + 2] for n in range(7)]
    if workers:
        assert sampler.state_dict()["samples"] > 7 * BATCH * WORLD
    again = ranks(dataset, balance=balance)[2]
    again.load_state_dict(sampler.state_dict(rows=7 * BATCH))
    assert [row for batch in batches(again) for row in batch] == rows[14:]


@stateful
@loaders
def test_a_stateful_loader_goes_on_with_other_sizes(
    dataset: PackedDataset, balance: Any, workers: int
) -> None:
    read = numbers(dataset)

    def loader(sampler: PackedSampler) -> Any:
        return StatefulDataLoader(
            dataset, BATCH, sampler=sampler, collate_fn=collate, num_workers=workers
        )

    first = [loader(one) for one in ranks(dataset, balance=balance)]
    rows = [row for one in first for batch in islice(one, 4) for row in read(batch)]
    state = first[0].state_dict()
    for sampler in ranks(dataset, 3, balance, **({"micro_batches": 2} if balance else {})):
        again = loader(sampler)
        again.load_state_dict(state)
        rows += [row for batch in again for row in read(batch)]
    plain = list(PackedSampler(dataset, **SMALL))
    assert Counter(rows) == Counter(plain[: len(rows)])
    assert len(plain) - len(rows) < 3


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_accelerate_gives_each_epoch_its_order(
    dataset: PackedDataset, accelerator: Accelerator
) -> None:
    read, one = numbers(dataset), PackedSampler(dataset, **SMALL)
    sampler = PackedSampler(dataset, rank=0, world_size=1, **SMALL)
    loader = accelerator.prepare(DataLoader(dataset, 4, sampler=sampler, collate_fn=collate))
    taken = [row for _ in range(2) for batch in loader for row in read(batch)]
    assert taken == [*one, *one]
