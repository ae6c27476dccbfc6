"""`PackedTrainerMixin`: every row once an epoch, in the sampler's order, whoever goes on with it.

For processes that really train together the test starts this file under torchrun; `main` is what
each of them runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import pack_records
from support import packer
from torch import distributed
from transformers import (
    BloomConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from packer_cli.errors import DataError, UsageError
from packer_cli.torch import PackedDataset, PackedSampler, PackedTrainerMixin, varlen_collate

# those of the trainers, about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore", "error:::packer_cli")
ROWS, L = 82, 16
STEPS = 11  # of an epoch: ten of 8 rows and one of 2
STOP = 14  # in the second epoch


class Seeing(LlamaForCausalLM):
    """Notes the rows that it is given, by their first tokens. Each new one has the same weights.

    vocab_size  above the rows' numbers
    length      of a row
    """

    def __init__(self, vocab_size: int, length: int) -> None:
        torch.manual_seed(0)
        super().__init__(LlamaConfig(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2,
        ))  # fmt: skip
        self.length = length
        self.seen: list[list[int]] = []

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        self.seen.append(input_ids.view(-1, self.length)[:, 0].tolist())
        return super().forward(input_ids=input_ids, **options)


class PackedTrainer(PackedTrainerMixin, Trainer):
    pass


class Interruption(TrainerCallback):
    """Saves after a step, and stops."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step == self._step


OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "num_train_epochs": 2, "use_cpu": True, "report_to": "none",
    "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no",
    "optim": "sgd", "learning_rate": 0.1,  # Adam would make much of rounding
}  # fmt: skip


def train(
    packed: Path, output: Path, *, stop: int | None = None, resume: bool = False, **options: Any
) -> Any:
    """The trainer, after training."""
    trainer = PackedTrainer(
        model=Seeing(ROWS, L),
        args=TrainingArguments(output_dir=str(output), **OPTIONS | options),
        train_dataset=PackedDataset(packed),
        callbacks=[Interruption(stop)] if stop else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """82 rows of 16 tokens, each of them the number of its row; of one to eight documents."""
    rows = [([row] * (16 >> row % 4), 1 << row % 4) for row in range(ROWS)]
    records = [{"input_ids": ids} for ids, documents in rows for _ in range(documents)]
    return pack_records(tmp_path_factory.mktemp("p"), records, L, "--strategy", "next-fit")


@pytest.fixture(scope="module")
def epochs(packed: Path) -> list[list[int]]:
    """The rows of two epochs in the order of the sampler with the Trainer's default seed: balance
    leaves those of a step in it.
    """
    dataset = PackedDataset(packed)
    sampler = PackedSampler(dataset, seed=42)
    return [[int(dataset[row]["input_ids"][0]) for row in sampler] for _ in range(2)]


def steps_of(seen: list[list[int]], micro_batches: int) -> list[list[int]]:
    """Rows of each step of one process, sorted. An epoch has 21 batches of a micro-batch each."""
    cuts = [*range(0, 21, micro_batches), 21]
    batches = [[epoch + a, epoch + b] for epoch in (0, 21) for a, b in pairwise(cuts) if a < b]
    return [sorted(chain(*seen[a:b])) for a, b in batches if a < len(seen)]


def expected_steps(epochs: list[list[int]]) -> list[list[int]]:
    return [sorted(rows[k : k + 8]) for rows in epochs for k in range(0, ROWS, 8)]


@pytest.fixture(scope="module")
def uninterrupted(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two epochs in one process, with two micro-batches of 4 rows in a step."""
    return train(packed, tmp_path_factory.mktemp("run"), gradient_accumulation_steps=2)


def test_every_row_is_seen_once_in_an_epoch(uninterrupted: Any, epochs: list[list[int]]) -> None:
    assert steps_of(uninterrupted.model.seen, 2) == expected_steps(epochs)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS))
    assert uninterrupted.state.global_step == uninterrupted.state.max_steps == 2 * STEPS
    assert uninterrupted.state.epoch == 2


def assert_same_training(trainer: Any, other: Any) -> None:
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, other.model.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("stop", "workers"), [(5, 0), (STEPS, 0), (STOP, 2)])
def test_a_resumed_run_goes_on_exactly(
    packed: Path, tmp_path: Path, epochs: list[list[int]], uninterrupted: Any, stop: int,
    workers: int,
) -> None:  # fmt: skip
    how = {"gradient_accumulation_steps": 2, "dataloader_num_workers": workers}
    first = train(packed, tmp_path, stop=stop, **how)
    assert first.state.global_step == stop
    shown = packer("show", packed, "--checkpoint", tmp_path / f"checkpoint-{stop}", "--json")
    rows = [json.loads(line)["row"] for line in shown.stdout.splitlines()]
    last = steps_of(first.model.seen, 2)[-1]
    assert sorted(int(PackedDataset(packed)[row]["input_ids"][0]) for row in rows) == last
    second = train(packed, tmp_path, resume=True, **how)
    assert steps_of(first.model.seen + second.model.seen, 2) == expected_steps(epochs)
    assert second.state.global_step == 2 * STEPS
    assert_same_training(second, uninterrupted)


@pytest.fixture(scope="module")
def of_two(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where a run of two processes stopped; what these saw, and when they went on for one."""
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    before = train(packed, alone, stop=STOP, gradient_accumulation_steps=2).model.seen
    # not the current directory: in a checkout it holds the sources, without their kernels
    paths = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         __file__, packed, alone, together],
        env=environment, cwd=together, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return together, json.loads((together / "seen.json").read_text()) | {"alone": before}


def of_both(seen: list[list[list[int]]]) -> list[list[int]]:
    """Rows of each step of two processes, sorted."""
    assert len(seen[0]) == len(seen[1])
    return [sorted(chain(*step)) for step in zip(*seen, strict=True)]


def test_one_process_goes_on_from_two(
    packed: Path, of_two: tuple[Path, dict[str, Any]], epochs: list[list[int]], uninterrupted: Any
) -> None:
    folder, seen = of_two
    before = of_both(seen["began"])
    assert before == expected_steps(epochs)[:STOP]
    trainer = train(packed, folder, resume=True, gradient_accumulation_steps=2)
    after = trainer.model.seen  # pairs of batches, and a last one
    steps = [sorted(chain(*after[k : k + 2])) for k in range(0, 15, 2)]
    assert steps == expected_steps(epochs)[STOP:]
    assert trainer.state.global_step == 2 * STEPS
    assert_same_training(trainer, uninterrupted)


def test_two_processes_go_on_from_one(
    of_two: tuple[Path, dict[str, Any]], epochs: list[list[int]]
) -> None:
    _, seen = of_two
    assert steps_of(seen["alone"], 2) == expected_steps(epochs)[:STOP]
    assert of_both(seen["resumed"]) == expected_steps(epochs)[STOP:]
    assert seen["steps"] == 2 * STEPS


@pytest.mark.parametrize("balance", ["step", "order", None])
def test_balance_is_an_attribute(packed: Path, tmp_path: Path, balance: Any) -> None:
    class Balanced(PackedTrainer):
        packed_balance = balance

    options = TrainingArguments(output_dir=str(tmp_path), **OPTIONS)
    trainer = Balanced(Seeing(ROWS, L), options, train_dataset=PackedDataset(packed))
    batches = trainer.get_train_dataloader().batch_sampler
    batches.next_epoch()
    assert sorted(chain(*batches)) == list(range(ROWS))
    state = batches.sampler.state_dict()
    assert state.get("balance") == balance
    assert state.get("cost") == (balance and 16)


def test_the_sampling_strategy_is_not_passed_over(packed: Path, tmp_path: Path) -> None:
    trainer = train(packed, tmp_path, max_steps=3, train_sampling_strategy="sequential")
    dataset = PackedDataset(packed)
    stored = [int(dataset[row]["input_ids"][0]) for row in range(12)]
    assert [sorted(rows) for rows in trainer.model.seen] == [
        sorted(stored[k : k + 4]) for k in (0, 4, 8)
    ]
    trainer.args.train_sampling_strategy = "group_by_length"
    with pytest.raises(UsageError, match="'group_by_length' is for rows of unequal length"):
        trainer.get_train_dataloader()


def test_runs_that_cannot_go_on_are_refused(packed: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"gradient_accumulation_steps": 2}
    train(packed, tmp_path, stop=5, **how)
    with pytest.raises(UsageError, match="steps had 8 rows, those of this run have 4"):
        train(packed, tmp_path, resume=True)
    with pytest.raises(DataError, match="the sampler's state has seed 42, this sampler 43"):
        train(packed, tmp_path, resume=True, seed=43, **how)


def test_a_checkpoint_without_a_position_is_refused(packed: Path, tmp_path: Path) -> None:
    options = TrainingArguments(
        output_dir=str(tmp_path), remove_unused_columns=False, max_steps=2, **OPTIONS
    )
    plain = Trainer(
        model=Seeing(ROWS, L), args=options, train_dataset=PackedDataset(packed),
        data_collator=partial(varlen_collate, config=None), callbacks=[Interruption(2)],
    )  # fmt: skip
    plain.train()
    with pytest.raises(UsageError, match="checkpoint of step 2 has no position of packed rows"):
        train(packed, tmp_path, resume=True)


def test_the_last_batch_can_be_dropped(packed: Path, tmp_path: Path) -> None:
    trainer = train(packed, tmp_path, dataloader_drop_last=True, dataloader_num_workers=1)
    assert [len(rows) for rows in trainer.model.seen] == [4] * 40
    assert trainer.state.global_step == 40
    with pytest.raises(DataError, match="82 rows for each process, fewer than a batch of 100"):
        train(packed, tmp_path, dataloader_drop_last=True, per_device_train_batch_size=100)


def test_without_a_collator_the_models_config_chooses(packed: Path, tmp_path: Path) -> None:
    trainer = train(packed, tmp_path, max_steps=1, remove_unused_columns=True)
    batch = next(iter(trainer.get_train_dataloader()))
    assert {0, 16, 32, 48, 64} < set(batch["cu_seq_lens_q"].tolist())
    assert trainer.data_collator.keywords["config"] is trainer.model.config
    trainer.data_collator = partial(varlen_collate, config=BloomConfig())
    with pytest.raises(UsageError, match="layers of bloom ignore boundaries"):
        next(iter(trainer.get_train_dataloader()))

    def not_of_transformers() -> Any:
        return PackedTrainer(
            torch.nn.Linear(2, 2), TrainingArguments(output_dir=str(tmp_path), **OPTIONS),
            train_dataset=PackedDataset(packed),
        )  # fmt: skip

    with pytest.raises(UsageError, match="Linear has no config"):
        not_of_transformers()


def test_what_would_cut_rows_is_refused(packed: Path, tmp_path: Path) -> None:
    trainer = train(packed, tmp_path, max_steps=1)
    trainer.get_cp_size = lambda: 2
    with pytest.raises(UsageError, match="context and sequence parallelism"):
        trainer.get_train_dataloader()
    trainer.args._n_gpu = 2
    with pytest.raises(UsageError, match="2 GPUs in one process"):
        trainer.get_train_dataloader()


# --- in each of two processes ---


def main() -> None:
    packed, alone, together = map(Path, sys.argv[1:])
    began = train(packed, together, stop=STOP)
    resumed = train(packed, alone, resume=True)
    seen: dict[str, Any] = {"steps": resumed.state.global_step}
    for name, trainer in (("began", began), ("resumed", resumed)):
        seen[name] = [None] * 2
        distributed.all_gather_object(seen[name], trainer.model.seen)
    if distributed.get_rank() == 0:
        (together / "seen.json").write_text(json.dumps(seen))
    distributed.barrier()
    os._exit(0)  # torch may wait for ever when it frees what its processes had in common


if __name__ == "__main__":
    main()
