"""PackedSampler: one order for any number of ranks, resumed on any other, in everyone's loaders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from support import packer
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from packer_cli.errors import DataError, UsageError
from packer_cli.torch import PackedDataset, PackedSampler, varlen_collate

ROWS = 1000
SMALL = {"block_rows": 16, "window_blocks": 4}


def ranks(world: int, rows: int = ROWS, **options: Any) -> list[PackedSampler]:
    return [PackedSampler(rows, rank=r, world_size=world, **SMALL, **options) for r in range(world)]


def together(samplers: list[PackedSampler], most: int | None = None) -> list[int]:
    """The rows of one iteration of all ranks in the order of steps; `most` rows of each."""
    shares = [list(islice(sampler, most)) for sampler in samplers]
    steps = max(map(len, shares))
    return [rows[step] for step in range(steps) for rows in shares if step < len(rows)]


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


def test_the_order_is_the_same_with_every_version() -> None:
    """A run that is resumed after an upgrade goes on in its own order."""
    assert list(PackedSampler(12, block_rows=2, window_blocks=3)) == [
        11, 4, 9, 10, 5, 8, 7, 3, 1, 6, 0, 2
    ]  # fmt: skip


def test_a_window_reads_whole_blocks() -> None:
    rows = list(PackedSampler(1024, **SMALL))
    for first in range(0, 1024, 64):
        assert len({row // 16 for row in rows[first : first + 64]}) == 4
    neighbours = sum(b == a + 1 for a, b in pairwise(rows))
    assert neighbours < 50


@pytest.mark.parametrize("world", [2, 4, 5, 8])
def test_ranks_stripe_one_order(world: int) -> None:
    samplers = ranks(world)
    assert together(samplers) == list(PackedSampler(ROWS, **SMALL))
    assert {len(sampler) for sampler in samplers} == {ROWS // world}


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("world", [3, 7])
def test_ranks_that_do_not_divide_the_rows(world: int, even: bool) -> None:
    """Nothing is repeated or skipped over the epochs of a run, and no rank waits for another."""
    one = PackedSampler(ROWS, **SMALL)
    endless = list(chain.from_iterable(list(one) for _ in range(4)))
    samplers, taken = ranks(world, even=even), []
    for epoch in range(3):
        assert {sampler.epoch for sampler in samplers} == {epoch}
        lengths = [len(sampler) for sampler in samplers]
        rows = together(samplers)
        assert len(rows) == sum(lengths)
        assert max(lengths) - min(lengths) == (not even)
        taken += rows
    assert taken == endless[: len(taken)]
    assert 3 * ROWS - world < len(taken) <= 3 * ROWS


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 8), (1, 5), (8, 1), (2, 2)])
def test_a_run_resumes_on_another_number_of_ranks(before: int, after: int) -> None:
    one = PackedSampler(ROWS, **SMALL)
    endless = [row for _ in range(3) for row in one]
    samplers = ranks(before)
    taken = together(samplers, most=37)
    state = json.loads(json.dumps(samplers[0].state_dict()))
    assert state["samples"] == 37 * before
    resumed = ranks(after)
    for sampler in resumed:
        sampler.load_state_dict(state)
    taken += together(resumed)
    taken += together(resumed)
    assert taken == endless[: len(taken)]
    assert len(taken) > 2 * ROWS - after


def test_an_iteration_that_was_left_begins_again() -> None:
    sampler = PackedSampler(ROWS, **SMALL)
    first = list(islice(sampler, 10))
    assert list(islice(sampler, 10)) == first
    assert sampler.state_dict()["samples"] == 10


def test_an_iteration_that_ends_at_its_last_row_is_an_epoch() -> None:
    """As `for _, batch in zip(range(len(loader)), loader)` does, asking for no row too many."""
    one, sampler = PackedSampler(ROWS, **SMALL), PackedSampler(ROWS, **SMALL)
    for epoch in range(3):
        assert list(islice(sampler, len(sampler))) == list(one)
        assert sampler.state_dict()["samples"] == ROWS * (epoch + 1)


def test_epochs_that_are_set() -> None:
    one = PackedSampler(ROWS, **SMALL)
    epochs = [list(one) for _ in range(3)]
    sampler = PackedSampler(ROWS, **SMALL)
    for epoch in (2, 0, 1, 1):
        sampler.set_epoch(epoch)
        assert list(sampler) == epochs[epoch]
    sampler.load_state_dict({**one.state_dict(), "samples": ROWS + 5})
    sampler.set_epoch(1)  # it is in there
    assert list(sampler) == epochs[1][5:]
    sampler.load_state_dict({**one.state_dict(), "samples": ROWS + 5})
    with pytest.raises(UsageError, match="after a state of epoch 1 was loaded"):
        sampler.set_epoch(0)


def test_bad_input() -> None:
    with pytest.raises(DataError, match="9 ranks share 8 rows: some would get none"):
        PackedSampler(8, rank=0, world_size=9)
    assert list(PackedSampler(8, rank=7, world_size=8, seed=None)) == [7]
    with pytest.raises(UsageError, match="give both or none"):
        PackedSampler(8, rank=0)
    with pytest.raises(UsageError, match="rank: 2 is not between 0 and world_size - 1, 1"):
        PackedSampler(8, rank=2, world_size=2)
    with pytest.raises(UsageError, match="block_rows: 0"):
        PackedSampler(8, block_rows=0)
    with pytest.raises(DataError, match="state has rows 9, this sampler 8"):
        PackedSampler(8).load_state_dict(PackedSampler(9).state_dict())


def test_several_ranks_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(UsageError, match=r"torch\.distributed runs 2 ranks"):
        PackedSampler(8)
    assert len(PackedSampler(8, rank=0, world_size=1)) == 8


def test_several_ranks_must_be_given_before_they_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, above init_process_group, each would take all rows."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"torch\.distributed runs 2 ranks"):
        PackedSampler(8)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(PackedSampler(8)) == 8


# --- in the loaders of others ---


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """80 rows of 16 tokens; the first token of each is its number."""
    folder = tmp_path_factory.mktemp("packed")
    lines = (json.dumps({"input_ids": [row] * 16}) for row in range(80))
    (folder / "data.jsonl").write_text("\n".join(lines))
    result = packer("pack", folder / "data.jsonl", "-l", 16, "-o", folder / "out", "-q")
    assert result.exit_code == 0, result.stderr
    return PackedDataset(folder / "out")


def rows_of(batch: dict[str, Any]) -> list[int]:
    return batch["input_ids"].view(-1, 16)[:, 0].tolist()


def expected_rows(dataset: PackedDataset, epochs: int = 1) -> list[int]:
    one = PackedSampler(dataset, **SMALL)
    return [int(dataset[row]["input_ids"][0]) for _ in range(epochs) for row in one]


def test_a_state_of_other_data_is_refused(dataset: PackedDataset) -> None:
    """As many rows of the same documents, packed with another seed, are not the same rows."""
    state = PackedSampler(dataset).state_dict()
    PackedSampler(len(dataset)).load_state_dict(state)
    PackedSampler(dataset).load_state_dict(PackedSampler(len(dataset)).state_dict())
    with pytest.raises(DataError, match="the sampler's state has data another, this sampler"):
        PackedSampler(dataset).load_state_dict(state | {"data": "another"})


def test_a_plain_loader_is_resumed_on_more_ranks(dataset: PackedDataset) -> None:
    sampler = PackedSampler(dataset, **SMALL)
    loader = DataLoader(
        dataset, 4, sampler=sampler, collate_fn=partial(varlen_collate, config=None)
    )
    taken = [row for batch in islice(loader, 5) for row in rows_of(batch)]
    state = sampler.state_dict()
    assert state["samples"] == 20
    rest = []
    for rank in range(2):
        again = PackedSampler(dataset, rank=rank, world_size=2, **SMALL)
        again.load_state_dict(state)
        loader = DataLoader(
            dataset, 4, sampler=again, collate_fn=partial(varlen_collate, config=None)
        )
        rest.append([row for batch in loader for row in rows_of(batch)])
    assert len(rest[0]) == len(rest[1]) == 30
    taken += chain.from_iterable(zip(*rest, strict=True))
    assert taken == expected_rows(dataset)


def test_a_plain_loader_that_reads_ahead_is_told_where_it_is(dataset: PackedDataset) -> None:
    sampler = PackedSampler(dataset, **SMALL)
    loader = DataLoader(
        dataset, 4, sampler=sampler, collate_fn=partial(varlen_collate, config=None), num_workers=2
    )
    taken = [row for batch in islice(loader, 5) for row in rows_of(batch)]
    assert sampler.state_dict()["samples"] > 20
    again = PackedSampler(dataset, **SMALL)
    again.load_state_dict(sampler.state_dict(rows=5 * 4))
    loader = DataLoader(dataset, 4, sampler=again, collate_fn=partial(varlen_collate, config=None))
    taken += [row for batch in loader for row in rows_of(batch)]
    assert taken == expected_rows(dataset)


@pytest.mark.parametrize(("epoch", "steps"), [(0, 3), (0, 14), (1, 1), (1, 13), (2, 14)])
def test_rows_are_counted_within_an_epoch(dataset: PackedDataset, epoch: int, steps: int) -> None:
    """80 rows are 13 batches of 6 and one of 2: all steps times their size would be too many."""
    sampler, again = (PackedSampler(dataset, **SMALL) for _ in range(2))
    for _ in range(epoch):
        list(sampler)
    loader = DataLoader(
        dataset, 6, sampler=sampler, collate_fn=partial(varlen_collate, config=None), num_workers=1
    )
    taken = [row for batch in islice(loader, steps) for row in rows_of(batch)]
    again.load_state_dict(sampler.state_dict(rows=steps * 6))
    taken += [int(dataset[row]["input_ids"][0]) for row in again]
    assert taken == expected_rows(dataset, epoch + 2)[80 * epoch :][: len(taken)]
    assert len(taken) == (80 if steps < 14 else 160)


def test_rows_of_one_rank_count_for_all() -> None:
    samplers = ranks(3)
    together(samplers)  # 999 rows
    together(samplers, most=100)
    assert [sampler.state_dict(rows=7)["samples"] for sampler in samplers] == [999 + 21] * 3
    assert samplers[0].state_dict(rows=1000)["samples"] == 1998
    with pytest.raises(UsageError, match="rows: -4 is negative"):
        samplers[0].state_dict(rows=-4)
    samplers[0].load_state_dict(samplers[1].state_dict(rows=7))
    assert samplers[0].state_dict(rows=0)["samples"] == 999 + 21


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [5, 20])
def test_a_stateful_loader_goes_on_where_it_was(
    dataset: PackedDataset, workers: int, steps: int
) -> None:
    def loader() -> Any:
        sampler = PackedSampler(dataset, **SMALL)
        return StatefulDataLoader(
            dataset,
            4,
            sampler=sampler,
            collate_fn=partial(varlen_collate, config=None),
            num_workers=workers,
        )

    first = loader()
    taken = [row for batch in islice(first, steps) for row in rows_of(batch)]
    again = loader()
    again.load_state_dict(first.state_dict())
    for _ in range(2):
        taken += [row for batch in again for row in rows_of(batch)]
    assert taken == expected_rows(dataset, 3)[: len(taken)]
    assert len(taken) in (160, 240)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_accelerate_gives_each_epoch_its_order(
    dataset: PackedDataset, accelerator: Accelerator
) -> None:
    sampler = PackedSampler(dataset, rank=0, world_size=1, **SMALL)
    loader = accelerator.prepare(
        DataLoader(dataset, 4, sampler=sampler, collate_fn=partial(varlen_collate, config=None))
    )
    taken = [row for _ in range(2) for batch in loader for row in rows_of(batch)]
    assert taken == expected_rows(dataset, 2)


def test_accelerate_deals_the_batches_of_one_order_to_processes(dataset: PackedDataset) -> None:
    shards = [
        list(BatchSamplerShard(BatchSampler(PackedSampler(dataset, **SMALL), 4, False), 2, process))
        for process in range(2)
    ]
    dealt = chain.from_iterable(chain.from_iterable(zip(*shards, strict=True)))
    assert list(dealt) == list(PackedSampler(dataset, **SMALL))


class Reading(TrainerCallback):
    """Stops a training like an interruption."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.stop


class PackedTrainer(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> PackedSampler:
        return PackedSampler(self.train_dataset, rank=0, world_size=1, **SMALL)


def train(dataset: PackedDataset, folder: Path, stop: int | None, resume: bool) -> list[int]:
    seen: list[int] = []

    def collate(rows: Any) -> dict[str, Any]:
        batch = varlen_collate(rows, config=None)
        seen.extend(rows_of(batch))
        return batch

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    options = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=30, save_steps=25,
        logging_steps=10, use_cpu=True, report_to="none", remove_unused_columns=False,
        disable_tqdm=True, dataloader_pin_memory=False, save_only_model=False,
    )  # fmt: skip
    trainer = PackedTrainer(
        model=LlamaForCausalLM(config), args=options, train_dataset=dataset,
        data_collator=collate, callbacks=[Reading(stop)],
    )  # fmt: skip
    outcome = trainer.train(resume_from_checkpoint=resume)
    assert torch.isfinite(torch.tensor(outcome.training_loss))
    return seen


def test_the_trainer_trains_and_resumes_in_the_order(
    dataset: PackedDataset, tmp_path: Path
) -> None:
    expected = expected_rows(dataset, 2)
    seen = train(dataset, tmp_path, stop=25, resume=False)
    assert seen[:100] == expected[:100]
    resumed = train(dataset, tmp_path, stop=None, resume=True)
    assert resumed[:20] == expected[100:120]  # the loader of accelerate reads one batch ahead


def test_a_trainer_that_removes_columns_is_told(dataset: PackedDataset, tmp_path: Path) -> None:
    options = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True
    )
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    trainer = PackedTrainer(
        model=LlamaForCausalLM(config), args=options, train_dataset=dataset,
        data_collator=partial(varlen_collate, config=None),
    )  # fmt: skip
    with pytest.raises(UsageError, match="rows without cu_seqlens") as caught:
        trainer.train()
    assert "remove_unused_columns=False" in caught.value.tip
