"""The sampler in processes that really train together: two of them, on a CPU, over gloo.

The test starts this file under torchrun; `main` is what each process runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from seeing import Seeing
from support import packer
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from packer_cli.errors import UsageError
from packer_cli.torch import PackedDataset, PackedSampler, varlen_collate

ROWS, L = 80, 16
SMALL: dict[str, Any] = {"block_rows": 16, "window_blocks": 4}


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """80 rows of 16 tokens, the first of each its number; two epochs of these in their order."""
    folder = tmp_path_factory.mktemp("packed")
    lines = (json.dumps({"input_ids": [row] * L}) for row in range(ROWS))
    (folder / "data.jsonl").write_text("\n".join(lines))
    assert packer("pack", folder / "data.jsonl", "-l", L, "-o", folder / "out", "-q").exit_code == 0
    dataset = PackedDataset(folder / "out")
    one = PackedSampler(dataset, **SMALL)
    return folder, [int(dataset[row]["input_ids"][0]) for _ in range(2) for row in one]


@pytest.fixture(scope="module")
def rows_by_way(order: tuple[Path, list[int]]) -> dict[str, list[int]]:
    """What two processes have trained on, in the order of steps, by the name of the way."""
    folder, _ = order
    # not the current directory: in a checkout it holds the sources, without their kernels
    paths = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         __file__, folder],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows: dict[str, list[int]] = json.loads((folder / "rows.json").read_text())
    return rows


@pytest.mark.parametrize("way", ["a loop", "accelerate", "trainer"])
def test_rows_are_trained_on_in_one_order(
    order: tuple[Path, list[int]], rows_by_way: dict[str, list[int]], way: str
) -> None:
    _, expected = order
    assert rows_by_way[way] == expected[: len(rows_by_way[way])]
    assert len(rows_by_way[way]) == {"a loop": 152, "accelerate": 160, "trainer": 128}[way]


# --- in each of the processes ---


def by_steps(seen: list[list[int]], stripes: bool = False) -> list[int]:
    """The rows of all processes: of each step their batches, or stripes of them."""
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, seen)
    steps = (zip(*step, strict=True) if stripes else step for step in zip(*everyone, strict=True))
    return [row for step in steps for rows in step for row in rows]


def a_loop(dataset: PackedDataset) -> list[int]:
    """One process alone, interrupted; then two, with workers that read ahead, into the next epoch.

    76 rows are left of the first epoch.
    """
    with pytest.raises(UsageError, match=r"torch\.distributed runs 2 ranks"):
        PackedSampler(dataset)
    state: list[Any] = [None]
    alone = Seeing(ROWS, L)
    if distributed.get_rank() == 0:
        sampler = PackedSampler(dataset, rank=0, world_size=1, **SMALL)
        loader = DataLoader(
            dataset, 4, sampler=sampler, collate_fn=partial(varlen_collate, config=None)
        )
        for batch in islice(loader, 1):
            alone(**batch)
        state = [sampler.state_dict()]
    distributed.broadcast_object_list(state)
    model = Seeing(ROWS, L)
    together = DistributedDataParallel(model)
    sampler = PackedSampler(
        dataset, rank=distributed.get_rank(), world_size=distributed.get_world_size(), **SMALL
    )
    sampler.load_state_dict(state[0])
    loader = DataLoader(
        dataset, 4, sampler=sampler, collate_fn=partial(varlen_collate, config=None), num_workers=1
    )
    for batch in loader:
        together(**batch).loss.backward()
    for step, batch in enumerate(loader, start=1):
        together(**batch).loss.backward()
        if step == 9:
            break
    assert sampler.state_dict(rows=9 * 4)["samples"] == ROWS + 9 * 8
    first = [alone.seen]
    distributed.broadcast_object_list(first)
    return list(chain.from_iterable(first[0])) + by_steps(model.seen, stripes=True)


def with_accelerate(dataset: PackedDataset) -> list[int]:
    accelerator = Accelerator(cpu=True)
    sampler = PackedSampler(dataset, rank=0, world_size=1, **SMALL)
    model = Seeing(ROWS, L)
    loader, together = accelerator.prepare(
        DataLoader(dataset, 4, sampler=sampler, collate_fn=partial(varlen_collate, config=None)),
        model,
    )
    for _ in range(2):
        for batch in loader:
            accelerator.backward(together(**batch).loss)
    return by_steps(model.seen)


class PackedTrainer(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> PackedSampler:
        return PackedSampler(self.train_dataset, rank=0, world_size=1, **SMALL)


class SamplersEpoch(TrainerCallback):
    """Accelerate hides a sampler that it prepares from the Trainer's set_epoch."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        train_dataloader.set_epoch(int(state.epoch))


class Interruption(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step == 13


def with_the_trainer(dataset: PackedDataset, folder: Path) -> list[int]:
    """Interrupted in its second epoch and resumed; 10 steps are an epoch."""
    seen = []
    for resume in (False, True):
        options = TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=4, max_steps=16, use_cpu=True,
            report_to="none", remove_unused_columns=False, disable_tqdm=True,
            dataloader_pin_memory=False, save_strategy="no",
        )  # fmt: skip
        model = Seeing(ROWS, L)
        trainer = PackedTrainer(
            model=model, args=options, train_dataset=dataset,
            data_collator=partial(varlen_collate, config=None),
            callbacks=[SamplersEpoch(), *([] if resume else [Interruption()])],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        seen += model.seen
    return by_steps(seen)


def main() -> None:
    folder = Path(sys.argv[1])
    distributed.init_process_group("gloo")
    dataset = PackedDataset(folder / "out")
    rows = {
        "a loop": a_loop(dataset),
        "accelerate": with_accelerate(dataset),
        "trainer": with_the_trainer(dataset, folder / "trained"),
    }
    if distributed.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
