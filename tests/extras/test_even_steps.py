"""Even steps: within steps and in windows, resumed with other sizes, in everyone's loaders."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import pack_sources, write_sources
from support import packer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from packer_cli.config.mixture import Stage
from packer_cli.errors import DataError, UsageError
from packer_cli.torch import PackedDataset, PackedSampler, varlen_collate

L = 64
SMALL = {"block_rows": 8, "window_blocks": 4}
SIZES = {"batch_size": 2, "micro_batches": 3, "hidden_size": 1}
WORLD, BATCH, MICRO = 4, 2, 3
STEP = WORLD * BATCH * MICRO


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
    commands = [
        ["pack", "a.jsonl", "-l", L, "-o", "packed", "--unit-bytes", "20K", "--strategy", "bfd"],
        ["tokenize", "b.jsonl", "-o", "tokens"],
        ["pack", "tokens", "-l", L, "--view", "-o", "view"],
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in commands:
            done = packer(*command, "-q")
            assert done.exit_code == 0, done.stderr
    return [folder / "packed", folder / "view"]


@pytest.fixture(scope="module")
def dataset(results: list[Path]) -> PackedDataset:
    return PackedDataset(results[0])


def ranks(
    dataset: Any, world: int = WORLD, balance: str | None = "step", **options: Any
) -> list[PackedSampler]:
    chosen = SMALL | (SIZES if balance else {}) | options
    return [
        PackedSampler(dataset, rank=rank, world_size=world, balance=balance, **chosen)
        for rank in range(world)
    ]


def steps_of(samplers: list[PackedSampler], size: int = STEP) -> list[list[list[int]]]:
    """Of the next iteration: [step][rank][row]."""
    shares = [list(sampler) for sampler in samplers]
    most = size // len(samplers)
    count = -(-len(shares[0]) // most)
    return [[rows[most * step : most * (step + 1)] for rows in shares] for step in range(count)]


def taken(samplers: list[PackedSampler], most: int | None = None) -> list[int]:
    """The rows of the next iteration, `most` of each rank."""
    return [row for sampler in samplers for row in islice(sampler, most)]


def rows_in(steps: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(row for rows in step for row in rows) for step in steps]


def unevenness(dataset: PackedDataset, steps: list[list[list[int]]]) -> float:
    """The costliest rank's share of the mean rank's, mean over steps."""
    costs = 6 * L + dataset.squared_lengths
    sums = [[costs[rows].sum() for rows in step] for step in steps]
    return float(np.mean([max(one) / np.mean(one) for one in sums]))


def test_squared_lengths_are_those_of_the_rows(results: list[Path]) -> None:
    for paths in (results[0], results[1], results):
        dataset = PackedDataset(paths)
        found = [int(np.square(np.diff(row["cu_seqlens"])).sum()) for row in dataset]
        assert dataset.squared_lengths.tolist() == found


def test_a_balanced_step_has_the_rows_of_the_plain_one_at_even_costs(
    dataset: PackedDataset,
) -> None:
    plain, even = ranks(dataset, balance=None), ranks(dataset)
    for _ in range(3):
        assert [len(sampler) for sampler in even] == [len(sampler) for sampler in plain]
        before, after = steps_of(plain), steps_of(even)
        assert rows_in(before) == rows_in(after)
        assert before != after
        assert unevenness(dataset, before) > 1.15 > 1.1 > unevenness(dataset, after)


def test_rows_of_like_cost_meet_in_a_window(dataset: PackedDataset) -> None:
    plain, even = ranks(dataset, balance=None), ranks(dataset, balance="order", window=4)
    before, after = steps_of(plain), steps_of(even)
    assert rows_in(before) != rows_in(after)
    assert Counter(chain(*rows_in(before))) == Counter(chain(*rows_in(after)))
    within = steps_of(ranks(dataset))
    assert unevenness(dataset, after) < unevenness(dataset, within)
    assert [len(rows) for rows in after[0]] == [BATCH * MICRO] * WORLD


@pytest.mark.parametrize("balance", ["step", "order"])
def test_a_run_is_the_same_twice_and_goes_on_at_any_row(
    dataset: PackedDataset, balance: str
) -> None:
    whole = [steps_of(ranks(dataset, balance=balance)), steps_of(ranks(dataset, balance=balance))]
    assert whole[0] == whole[1]
    endless = [[*one, *one] for one in ranks(dataset, balance=balance)]
    for rows in (0, 1, 5, 6, 13, len(endless[0]) // 2):
        samplers = ranks(dataset, balance=balance)
        for sampler, share in zip(samplers, endless, strict=True):
            assert list(islice(sampler, rows)) == share[:rows]
            state = json.loads(json.dumps(sampler.state_dict()))
            assert state["dealt"] == [[0, WORLD, BATCH, MICRO]]
            again = ranks(dataset, balance=balance)[sampler.rank]
            again.load_state_dict(state)
            assert [*again, *again][: len(share) - rows] == share[rows:]


@pytest.mark.parametrize("balance", ["step", "order"])
def test_a_run_goes_on_with_other_sizes(dataset: PackedDataset, balance: str) -> None:
    """In the middle of steps and windows, and again before those are over."""
    rows: list[int] = []
    state: dict[str, Any] | None = None
    epochs = 0
    for world, batch, micro, most in ((4, 2, 3, 7), (3, 1, 5, 2), (8, 2, 1, 9), (1, 4, 2, 30),
                                      (2, 1, 1, None), (2, 1, 1, None)):  # fmt: skip
        options = {"batch_size": batch, "micro_batches": micro}
        samplers = ranks(dataset, world, balance=balance, **options)
        for sampler in samplers:
            if state:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        rows += taken(samplers, most)
        state = samplers[0].state_dict()
        epochs = samplers[0].epoch
    assert state is not None
    assert state["samples"] == len(rows)
    assert len(state["dealt"]) == 1
    plain = PackedSampler(dataset, **SMALL)
    expected = [row for _ in range(3) for row in plain]
    assert Counter(rows) == Counter(expected[: len(rows)])
    assert epochs == 2


def test_a_sampler_pickles_where_it_is(dataset: PackedDataset) -> None:
    for balance in (None, "step", "order"):
        one = ranks(dataset, balance=balance)[1]
        rows = iter(one)
        begun = list(islice(rows, 7))
        again = pickle.loads(pickle.dumps(one))  # noqa: S301
        assert again.state_dict() == one.state_dict()
        assert list(again) == begun + list(rows)


def test_epochs_that_are_set(dataset: PackedDataset) -> None:
    one, other = (ranks(dataset, world=3)[1] for _ in range(2))
    epochs = [list(one) for _ in range(3)]
    for epoch in (2, 0, 1, 1):
        other.set_epoch(epoch)
        assert list(other) == epochs[epoch]


def test_stages_follow_one_another(tmp_path: Path) -> None:
    stages = (
        Stage(6_000, (("letters", 1.0), ("digits", 0.0), ("signs", 0.0)), "begin"),
        Stage(20_000, (("letters", 1.0), ("digits", 1.0), ("signs", 1.0)), "end"),
    )
    staged = pack_sources(
        tmp_path / "out", write_sources(tmp_path, 600),
        {name: {"weight": 1.0} for name in ("letters", "digits", "signs")},
        max_length=L, unit_bytes=10_000, mixture={"stages": stages},
    )  # fmt: skip
    dataset = PackedDataset(staged)
    border = dataset.stages[1].first_row
    assert border > STEP
    for balance in ("step", "order"):
        steps = rows_in(steps_of(ranks(dataset, balance=balance)))
        of_both = [step for step in steps if step[0] < border <= step[-1]]
        assert len(of_both) == (border % STEP > 0)
        before = [row for step in steps[: border // STEP] for row in step]
        assert max(before) < border
        assert len(set(chain(*steps))) == len(dataset) // WORLD * WORLD


def test_several_results_are_balanced_together(results: list[Path]) -> None:
    dataset = PackedDataset(results)
    before = steps_of(ranks(dataset, balance=None))
    after = steps_of(ranks(dataset))
    assert rows_in(before) == rows_in(after)
    assert unevenness(dataset, before) > 1.15 > 1.1 > unevenness(dataset, after)


# --- loaders ---


def loader(
    dataset: PackedDataset, sampler: PackedSampler, kind: Any = DataLoader, workers: int = 0
) -> Any:
    collate = partial(varlen_collate, config=None)
    return kind(dataset, BATCH, sampler=sampler, collate_fn=collate, num_workers=workers)


def numbers(dataset: PackedDataset) -> Callable[[Any], list[int]]:
    """The rows of a batch, by their tokens."""
    known = {bytes(row["input_ids"].numpy().astype(np.int64).data): number
             for number, row in enumerate(dataset)}  # fmt: skip
    assert len(known) == len(dataset)
    return lambda batch: [known[bytes(ids.numpy().data)] for ids in batch["input_ids"].view(-1, L)]


@pytest.mark.parametrize("balance", ["step", "order"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers(dataset: PackedDataset, balance: str, workers: int) -> None:
    read = numbers(dataset)
    sampler, one = (ranks(dataset, balance=balance)[2] for _ in range(2))
    batches = [read(batch) for batch in islice(loader(dataset, sampler, workers=workers), 7)]
    rows = list(one)
    assert batches == [rows[2 * n : 2 * n + 2] for n in range(7)]
    again = ranks(dataset, balance=balance)[2]
    again.load_state_dict(sampler.state_dict(rows=7 * BATCH))
    rest = [row for batch in loader(dataset, again, workers=workers) for row in read(batch)]
    assert rest == rows[14:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("balance", ["step", "order"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_with_other_sizes(
    dataset: PackedDataset, balance: str, workers: int
) -> None:
    read = numbers(dataset)
    first = [loader(dataset, one, StatefulDataLoader, workers)
             for one in ranks(dataset, balance=balance)]  # fmt: skip
    rows = [row for one in first for batch in islice(one, 4) for row in read(batch)]
    state = first[0].state_dict()
    for sampler in ranks(dataset, 3, balance=balance, micro_batches=2):
        again = loader(dataset, sampler, StatefulDataLoader, workers)
        again.load_state_dict(state)
        rows += [row for batch in again for row in read(batch)]
    plain = list(PackedSampler(dataset, **SMALL))
    assert Counter(rows) == Counter(plain[: len(rows)])
    assert len(plain) - len(rows) < 3


# --- training ---


def gradients(dataset: PackedDataset, steps: list[list[list[int]]]) -> list[torch.Tensor]:
    """Of the sum of all tokens' losses over the micro-batches of the first step, in their order."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    for rows in steps[0]:
        for first in range(0, len(rows), BATCH):
            batch = varlen_collate(dataset.__getitems__(rows[first : first + BATCH]), config=config)
            labels = batch.pop("labels")
            logits = model(**batch).logits[0, :-1]
            cross_entropy(logits, labels[0, 1:], reduction="sum").backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_the_gradients_of_a_step_are_those_of_the_plain_one(dataset: PackedDataset) -> None:
    before = steps_of(ranks(dataset, balance=None))
    after = steps_of(ranks(dataset))
    assert before[0] != after[0]
    pairs = list(zip(gradients(dataset, before), gradients(dataset, after), strict=True))
    assert len(pairs) > 10
    for plain, balanced in pairs:
        assert plain.abs().max() > 0.01
        torch.testing.assert_close(balanced, plain, rtol=1e-6, atol=1e-6 * float(plain.abs().max()))
    others = gradients(dataset, after[1:])
    assert not torch.allclose(others[0], pairs[0][0], rtol=1e-6)


# --- what cannot be ---


def test_options_that_do_not_go_together(dataset: PackedDataset) -> None:
    for name in ("batch_size", "micro_batches", "hidden_size", "window"):
        with pytest.raises(UsageError, match=f"{name}: is only for balance"):
            PackedSampler(dataset, **{name: 2})
    with pytest.raises(UsageError, match="cost: is only for balance"):
        PackedSampler(dataset, cost=lambda sums: sums)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("balance: 'even' is not one of step, order", {"balance": "even"}),
        ("balance: 'step' without batch_size", {"batch_size": None}),
        ("hidden_size and cost: neither given", {"hidden_size": None}),
        ("hidden_size and cost: both given", {"cost": lambda sums: sums}),
        ("hidden_size: 0 is less than 1", {"hidden_size": 0}),
        ("batch_size: 2.0 is not a whole number", {"batch_size": 2.0}),
        ("batch_size: 0 is less than 1", {"batch_size": 0}),
        ("micro_batches: -1 is less than 1", {"micro_batches": -1}),
        ('window: is only for balance="order"', {"window": 8}),
        ("window: 0 is less than 1", {"balance": "order", "window": 0}),
        ("balance: 'step' with even=False", {"even": False}),
        ("cost: is -1.0 for row 0", {"hidden_size": None, "cost": lambda sums: -1 + 0 * sums}),
    ]
    for message, options in cases:
        with pytest.raises(UsageError, match=message) as caught:
            PackedSampler(dataset, **({"balance": "step"} | SIZES | options))
        assert "\n" not in caught.value.message


def test_sizes_of_numpy_make_states_that_json_can_hold(dataset: PackedDataset) -> None:
    sizes = {name: np.int64(size) for name, size in SIZES.items()}
    places = {"rank": np.int64(0), "world_size": np.int64(2)}
    sampler = PackedSampler(
        dataset,
        balance="order",
        window=np.int64(8),
        **sizes,
        **places,  # type: ignore[arg-type]
    )
    next(iter(sampler))
    state = sampler.state_dict()
    other = PackedSampler(dataset, balance="order", window=8, rank=0, world_size=2, **SIZES)
    next(iter(other))
    assert json.loads(json.dumps(state)) == other.state_dict()


def test_what_has_no_costs(dataset: PackedDataset) -> None:
    with pytest.raises(UsageError, match="a number of rows does not say what each row costs"):
        PackedSampler(100, balance="step", **SIZES)
    with pytest.raises(UsageError, match="a Subset does not say what each row costs"):
        PackedSampler(Subset(dataset, range(50)), balance="step", **SIZES)
    with pytest.raises(DataError, match="9999 ranks share"):
        PackedSampler(dataset, balance="step", rank=0, world_size=9999, **SIZES)


def test_states_of_another_balance_are_refused(dataset: PackedDataset) -> None:
    plain, step, order = (ranks(dataset, balance=balance)[0] for balance in (None, "step", "order"))
    assert set(plain.state_dict()) == {
        "samples", "data", "rows", "seed", "block_rows", "window_blocks", "stages",
    }  # fmt: skip
    for one, other, message in (
        (step, plain, "balance step, this sampler None"),
        (step, order, "balance step, this sampler order"),
        (order, ranks(dataset, balance="order", window=9)[0], "window 64, this sampler 9"),
        (step, ranks(dataset, hidden_size=2)[0], "cost 1, this sampler 2"),
    ):
        with pytest.raises(DataError, match=message):
            other.load_state_dict(one.state_dict())
    own = [ranks(dataset, hidden_size=None, cost=cost)[0]
           for cost in (lambda sums: sums, lambda sums: sums + 1, lambda sums: sums)]  # fmt: skip
    own[2].load_state_dict(own[0].state_dict())
    with pytest.raises(DataError, match=r"cost [0-9a-f]{64}, this sampler"):
        own[1].load_state_dict(own[0].state_dict())


def test_a_plain_run_goes_on_balanced(dataset: PackedDataset) -> None:
    plain = ranks(dataset, balance=None)
    rows = taken(plain, 5)
    balanced = ranks(dataset, balance="order")
    for sampler in balanced:
        sampler.load_state_dict(plain[0].state_dict())
    rows += taken(balanced)
    expected = [row for one in (PackedSampler(dataset, **SMALL),) for row in one]
    assert Counter(rows) == Counter(expected[: len(rows)])
    assert balanced[0].state_dict()["dealt"] == [[20, WORLD, BATCH, MICRO]]
