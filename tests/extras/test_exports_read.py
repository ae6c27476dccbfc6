"""`packer export`, read back with the trainers' own readers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import load_from_disk
from exporting import rows_of_segments
from recipes import pack_records, run
from support import recover_documents
from tiny_models import number_tokenizer, tiny_llama
from torch.utils.data import BatchSampler, SequentialSampler
from trainer_imports import (
    allow_llamafactory,
    axolotl_batches,
    axolotl_prepared,
    bridge_datasets,
    olmo_data,
)
from transformers import Trainer
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from packer_cli import open_packed

# those of the trainers, about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore")
L, VOCABULARY = 64, 100


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 documents of 1 to 200 tokens below 100, all trained on."""
    return pack(tmp_path_factory.mktemp("packed"), labels=False)


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents with labels of their own."""
    return pack(tmp_path_factory.mktemp("supervised"), labels=True)


def pack(folder: Path, *, labels: bool) -> Path:
    random, records = np.random.default_rng(3), []
    for length in random.integers(1, 200, 150):
        ids = random.integers(0, VOCABULARY, length)
        record = {"input_ids": ids.tolist()}
        if labels:
            record["labels"] = np.where(random.random(length) < 0.4, -100, ids).tolist()
        records.append(record)
    return pack_records(folder, records, L, "--unit-bytes", "4K")


def export(directory: Path, to: str, output: Path) -> str:
    run("export", directory, "--to", to, "--output", output)
    return str(output)


def test_trl_collates_the_boundaries(supervised: Path, tmp_path: Path) -> None:
    dataset = load_from_disk(export(supervised, "trl", tmp_path / "out"))
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    rows = rows_of_segments(supervised)
    assert len(dataset) == len(rows)
    for first in range(0, len(rows), 3):
        batch = collator([dataset[i] for i in range(first, min(first + 3, len(rows)))])
        segments = [segment for row in rows[first : first + 3] for segment in row]
        assert batch["input_ids"][0].tolist() == [t for ids, _ in segments for t in ids]
        assert batch["labels"][0].tolist() == [t for _, labels in segments for t in labels]
        assert batch["position_ids"][0].tolist() == [
            place for ids, _ in segments for place in range(len(ids))
        ]
        assert batch["cu_seq_lens_q"].diff().tolist() == [len(ids) for ids, _ in segments]


def test_trl_trains_on_it(supervised: Path, tmp_path: Path) -> None:
    dataset = load_from_disk(export(supervised, "trl", tmp_path / "out"))
    arguments = SFTConfig(
        output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2,
        padding_free=True, max_length=None, report_to="none", use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=tiny_llama(VOCABULARY, attn_implementation="eager"), args=arguments,
        train_dataset=dataset, processing_class=number_tokenizer(VOCABULARY),
    )  # fmt: skip
    assert set(trainer.train_dataset.column_names) >= {"input_ids", "labels", "seq_lengths"}
    starts = sum((batch["position_ids"] == 0).sum() for batch in trainer.get_train_dataloader())
    assert starts == open_packed(supervised).manifest["segments"]
    assert np.isfinite(trainer.train().training_loss)


def test_megatron_indexes_the_documents(packed: Path, tmp_path: Path) -> None:
    indexed = import_module("megatron.core.datasets.indexed_dataset")
    folder = export(packed, "megatron", tmp_path / "out")
    dataset = indexed.IndexedDataset(f"{folder}/documents")
    documents = [ids.tolist() for ids in recover_documents(packed).values()]
    assert len(dataset) == len(documents)
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
    assert sorted(document.tolist() for document in dataset) == sorted(documents)


def test_megatron_indexes_rows(packed: Path, tmp_path: Path) -> None:
    indexed = import_module("megatron.core.datasets.indexed_dataset")
    run("export", packed, "--to", "megatron", "--rows", "--output", tmp_path / "out")
    dataset, width = indexed.IndexedDataset(f"{tmp_path}/out/rows"), L
    rows = [[token for ids, _ in row for token in ids] for row in rows_of_segments(packed)]
    pad = open_packed(packed).facts.pad_token_id
    assert [row.tolist() for row in dataset] == [ids + [pad] * (width - len(ids)) for ids in rows]


def test_olmo_core_reads_documents_and_masks(
    supervised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lines of each document, and in instances of its own length with their labels."""
    utils, numpy_dataset = olmo_data(monkeypatch)
    folder = Path(export(supervised, "olmo", tmp_path / "out"))
    expected = load_from_disk(export(supervised, "unpacked", tmp_path / "unpacked"))
    array, kind = folder / "part-00000.npy", np.uint32
    found = list(utils.iter_document_indices(array, dtype=kind, use_array_if_local=False))
    assert [end - begin for begin, end in found] == [len(ids) for ids in expected["input_ids"]]
    dataset = numpy_dataset.NumpyFSLDataset(
        array, sequence_length=L, pad_token_id=0, eos_token_id=VOCABULARY,
        vocab_size=VOCABULARY + 1, dtype=kind, label_mask_paths=[folder / "part-00000.mask.npy"],
    )  # fmt: skip
    dataset.prepare()
    ids, labels = (
        [token for one in expected[name] for token in one] for name in ("input_ids", "labels")
    )
    assert len(dataset) == len(ids) // L
    for number, item in enumerate(dataset):
        its = slice(number * L, number * L + L)
        assert item["input_ids"].tolist() == ids[its]
        batch = {name: value[None] for name, value in item.items() if hasattr(value, "dim")}
        assert utils.get_labels(batch)[0].tolist() == [*labels[its][1:], -100]


def test_automodel_collates_the_rows(supervised: Path, tmp_path: Path) -> None:
    collate = import_module("nemo_automodel.components.datasets.utils").packed_sequence_thd_collater
    dataset = load_from_disk(export(supervised, "automodel", tmp_path / "out"))
    rows = rows_of_segments(supervised)
    for first in range(0, len(rows), 3):
        own = rows[first : first + 3]
        batch = collate([dataset[number] for number in range(first, first + len(own))])
        assert batch["qkv_format"] == "thd"
        for at, row in enumerate(own):
            lengths = [len(ids) for ids, _ in row]
            seen = [one for one in batch["seq_lens"][at].tolist() if one >= 0]
            padded = [one for one in batch["seq_lens_padded"][at].tolist() if one >= 0]
            assert seen == lengths
            assert sum(padded) == L
            ids = [token for ids, _ in row for token in ids]
            targets = [token for _, labels in row for token in [*labels[1:], -100]]
            assert batch["input_ids"][at].tolist()[: len(ids)] == ids
            assert batch["labels"][at].tolist() == targets + [-100] * (L - len(targets))


def test_datasets_maps_what_was_unpacked(supervised: Path, tmp_path: Path) -> None:
    dataset = load_from_disk(export(supervised, "unpacked", tmp_path / "out"))
    documents = [ids.tolist() for ids in recover_documents(supervised).values()]
    assert sorted(dataset["input_ids"][:]) == sorted(documents)
    lengths = dataset.map(lambda row: {"n": len(row["labels"])})["n"][:]
    assert sorted(lengths) == sorted(map(len, documents))


def test_megatron_bridge_collates_the_packed_rows(
    supervised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`collate_fn` of the real class; `GPTSFTPackedParquetDataset`, which is newer, inherits it."""
    folder = Path(export(supervised, "megatron-bridge", tmp_path / "out"))
    table = pq.read_table(sorted(folder.glob("*.idx.parquet"))).to_pylist()
    kind = bridge_datasets(monkeypatch).GPTSFTPackedDataset
    dataset = kind.__new__(kind)  # whose __init__ opens an .npy file
    vars(dataset).update(
        tokenizer=SimpleNamespace(eos_id=VOCABULARY), answer_only_loss=True, pad_to_max_length=True,
        max_seq_length=L, return_cu_seqlen=True, pad_cu_seqlens=False, _pad_seq_to_mult=1,
        get_attention_mask_from_fusion=True,
    )  # fmt: skip
    for item, row in zip(table, rows_of_segments(supervised), strict=True):
        item["seq_boundaries"] = [*item["seq_start_id"], len(item["input_ids"])]
        batch = dataset.collate_fn([item])
        ids, lengths = [token for one, _ in row for token in one], [len(one) for one, _ in row]
        assert batch["tokens"][0, : len(ids)].tolist() == ids
        edges = batch["cu_seqlens"][0, : len(row) + 1]
        assert edges.diff().tolist() == lengths
        assert batch["position_ids"][0, : len(ids)].tolist() == [
            place for length in lengths for place in range(length)
        ]
        labels = [label for _, own in row for label in own][1:]
        targets = torch.where(batch["loss_mask"][0].bool(), batch["labels"][0], -100)
        assert targets[: len(labels)].tolist() == labels
        assert set(targets[len(labels) :].tolist()) <= {-100}


# Rows in an even order


# those of the trainers, about themselves and each other
LENGTH, HIDDEN, RANKS, MICRO, BATCH = 256, 8, 4, 3, 2


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 rows of log-normal documents, not all of which are trained on everywhere."""
    random, records = np.random.default_rng(5), []
    for length in np.minimum(random.lognormal(3.0, 1.5, 1200).astype(int) + 4, 2000):
        ids = random.integers(1, 100, length).tolist()
        labels = [-100 if place < length // 3 else one for place, one in enumerate(ids)]
        records.append({"input_ids": ids, "labels": labels})
    return pack_records(tmp_path_factory.mktemp("packed"), records, LENGTH, "--overlong", "split")


def exported(many_rows: Path, to: str, output: Path, *, micro_batches: int = MICRO) -> Any:
    run(
        "export", many_rows, "--to", to, "--output", output, "--order", "even", "--ranks", RANKS,
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
def test_processes_of_accelerate_are_even(many_rows: Path, tmp_path: Path, to: str) -> None:
    dataset = exported(many_rows, to, tmp_path / "out")
    dataset = dataset["train"] if to == "llamafactory" else dataset
    if to == "trl":
        lengths = dataset["seq_lengths"]
    else:
        lengths = [np.unique(row, return_counts=True)[1] for row in dataset["attention_mask"]]
    cost = [6 * HIDDEN * LENGTH + sum(int(n) ** 2 for n in one) for one in lengths]
    dealt = shards(BatchSampler(SequentialSampler(dataset), BATCH, drop_last=False))
    assert {row for one in dealt for batch in one for row in batch} == set(range(len(dataset)))
    costs = [[sum(cost[row] for row in batch) for batch in one] for one in dealt]
    assert unevenness(costs, MICRO) < 1.03
    shuffled = np.random.default_rng(0).permutation(len(cost))
    dealt = shards(BatchSampler(shuffled.tolist(), BATCH, drop_last=False))
    costs = [[sum(cost[row] for row in batch) for batch in one] for one in dealt]
    assert unevenness(costs, MICRO) > 1.1


def test_axolotl_deals_the_rows(
    many_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader, which drops segments and may shuffle, and its sampler, by the settings named."""
    monkeypatch.chdir(tmp_path)
    rows = exported(many_rows, "axolotl", tmp_path / "out", micro_batches=1)
    settings, dataset = axolotl_prepared(
        monkeypatch, number_tokenizer(100), base_model="my-model",
        datasets=[{"path": str(tmp_path / "out"), "type": None}], sequence_len=LENGTH,
        val_set_size=0, sample_packing=True, pad_to_sequence_len=True, micro_batch_size=BATCH,
        num_epochs=1,
        gradient_accumulation_steps=1, learning_rate=1e-5, output_dir="trained",
        attn_implementation="flash_attention_2", curriculum_sampling=True,
        sample_packing_sequentially=True,
    )  # fmt: skip
    assert [ids for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True)
            if set(labels) != {-100}] == list(dataset["input_ids"])  # fmt: skip
    lengths = np.array([len(ids) for ids in dataset["input_ids"]])
    sampler = axolotl_batches(
        dataset, BATCH * LENGTH, sequential=settings.sample_packing_sequentially, drop_last=True
    )
    dealt = shards(sampler, even_batches=False)
    bins = [lengths[batch[0]] for one in dealt for batch in one]
    assert sum(int(one.sum()) < BATCH * LENGTH for one in bins) <= 1  # the last one
    costs = [
        [6 * HIDDEN * LENGTH * BATCH + float((lengths[batch[0]].astype(float) ** 2).sum())
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
