"""`packer export --order even`, dealt by Accelerate and by the trainers' own samplers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from datasets import load_from_disk
from recipes import pack_records, run
from tiny_models import number_tokenizer
from torch.utils.data import BatchSampler, SequentialSampler
from trainer_imports import allow_llamafactory, axolotl_batches, axolotl_prepared
from transformers import Trainer

# those of the trainers, about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore")
L, HIDDEN, RANKS, MICRO, BATCH = 256, 8, 4, 3, 2


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 rows of log-normal documents, not all of which are trained on everywhere."""
    random, records = np.random.default_rng(5), []
    for length in np.minimum(random.lognormal(3.0, 1.5, 1200).astype(int) + 4, 2000):
        ids = random.integers(1, 100, length).tolist()
        labels = [-100 if place < length // 3 else one for place, one in enumerate(ids)]
        records.append({"input_ids": ids, "labels": labels})
    return pack_records(tmp_path_factory.mktemp("packed"), records, L, "--overlong", "split")


def exported(packed: Path, to: str, output: Path, *, micro_batches: int = MICRO) -> Any:
    run(
        "export", packed, "--to", to, "--output", output, "--order", "even", "--ranks", RANKS,
        "--micro-batches", micro_batches, "--batch-size", BATCH, "--hidden-size", HIDDEN,
    )  # fmt: skip
    return load_from_disk(str(output))


def unevenness(costs: list[list[float]], micro_batches: int) -> float:
    """By the costs of each process's batches: max over mean of processes, mean over steps."""
    whole = min(map(len, costs)) // micro_batches * micro_batches
    sums = np.array([one[:whole] for one in costs]).reshape(RANKS, -1, micro_batches).sum(axis=2)
    assert sums.shape[1] > 5
    return float((sums.max(axis=0) / sums.mean(axis=0)).mean())


def shards(batches: Any, **how: Any) -> list[list[Any]]:
    return [list(BatchSamplerShard(batches, RANKS, process, **how)) for process in range(RANKS)]


@pytest.mark.parametrize("to", ["llamafactory", "trl"])
def test_processes_of_accelerate_are_even(packed: Path, tmp_path: Path, to: str) -> None:
    dataset = exported(packed, to, tmp_path / "out")
    dataset = dataset["train"] if to == "llamafactory" else dataset
    if to == "trl":
        lengths = dataset["seq_lengths"]
    else:
        lengths = [np.unique(row, return_counts=True)[1] for row in dataset["attention_mask"]]
    cost = [6 * HIDDEN * L + sum(int(n) ** 2 for n in one) for one in lengths]
    dealt = shards(BatchSampler(SequentialSampler(dataset), BATCH, drop_last=False))
    assert {row for one in dealt for batch in one for row in batch} == set(range(len(dataset)))
    costs = [[sum(cost[row] for row in batch) for batch in one] for one in dealt]
    assert unevenness(costs, MICRO) < 1.03
    shuffled = np.random.default_rng(0).permutation(len(cost))
    dealt = shards(BatchSampler(shuffled.tolist(), BATCH, drop_last=False))
    costs = [[sum(cost[row] for row in batch) for batch in one] for one in dealt]
    assert unevenness(costs, MICRO) > 1.1


def test_axolotl_deals_the_rows(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader, which drops segments and may shuffle, and its sampler, by the settings named."""
    monkeypatch.chdir(tmp_path)
    rows = exported(packed, "axolotl", tmp_path / "out", micro_batches=1)
    settings, dataset = axolotl_prepared(
        monkeypatch, number_tokenizer(100), base_model="my-model",
        datasets=[{"path": str(tmp_path / "out"), "type": None}], sequence_len=L, val_set_size=0,
        sample_packing=True, pad_to_sequence_len=True, micro_batch_size=BATCH, num_epochs=1,
        gradient_accumulation_steps=1, learning_rate=1e-5, output_dir="trained",
        attn_implementation="flash_attention_2", curriculum_sampling=True,
        sample_packing_sequentially=True,
    )  # fmt: skip
    assert [ids for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True)
            if set(labels) != {-100}] == list(dataset["input_ids"])  # fmt: skip
    lengths = np.array([len(ids) for ids in dataset["input_ids"]])
    sampler = axolotl_batches(
        dataset, BATCH * L, sequential=settings.sample_packing_sequentially, drop_last=True
    )
    dealt = shards(sampler, even_batches=False)
    bins = [lengths[batch[0]] for one in dealt for batch in one]
    assert sum(int(one.sum()) < BATCH * L for one in bins) <= 1  # the last one
    costs = [
        [6 * HIDDEN * L * BATCH + float((lengths[batch[0]].astype(float) ** 2).sum())
         for batch in one]
        for one in dealt
    ]  # fmt: skip
    assert unevenness(costs, 1) < 1.05


def test_trainers_have_settings_that_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pages name: disable_shuffling, and train_sampling_strategy of transformers."""
    allow_llamafactory(monkeypatch)
    kind = import_module("llamafactory.train.sft.trainer").CustomSeq2SeqTrainer
    trainer = SimpleNamespace(
        finetuning_args=SimpleNamespace(disable_shuffling=True), train_dataset=range(9)
    )
    assert list(kind._get_train_sampler(trainer)) == list(range(9))
    trainer = SimpleNamespace(
        args=SimpleNamespace(train_sampling_strategy="sequential"), train_dataset=range(9)
    )
    assert list(Trainer._get_train_sampler(trainer)) == list(range(9))
