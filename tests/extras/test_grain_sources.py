"""Grain reads rows and documents of packer: shuffled, batched, in processes, and resumed."""

from __future__ import annotations

from pathlib import Path

import grain
import numpy as np
import pytest
from recipes import pack_records, run

from packer_cli import open_packed
from packer_cli.grain import DocumentSource, PackedSource
from packer_cli.torch import PackedDataset, PackedSampler

L = 32


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 90 documents of 1 to 30 tokens, which are tokenized in `tokens` beside it."""
    folder = tmp_path_factory.mktemp("packed")
    records = [{"input_ids": [number] * (1 + number * 7 % 30)} for number in range(90)]
    out = pack_records(folder, records, L)
    run("tokenize", folder / "data.jsonl", "-q", "--output", folder / "tokens")
    return out


def test_batches_of_a_shuffled_map_dataset(packed: Path) -> None:
    source = PackedSource(packed, ["input_ids", "labels"])
    batches = [*grain.MapDataset.source(source).seed(1).shuffle().batch(4)]
    rows = np.concatenate([batch["input_ids"] for batch in batches])
    assert batches[0]["labels"].shape == (4, L)
    expected = open_packed(packed).take(range(len(source))).column("input_ids").to_pylist()
    assert rows.tolist() != expected
    assert sorted(rows.tolist()) == sorted(expected)


def test_a_data_loader_with_processes_goes_on_where_it_was(packed: Path) -> None:
    """Whose checkpoints have the source's repr, and whose workers get it pickled."""
    source = DocumentSource(packed.parent / "tokens")
    assert isinstance(source, grain.sources.RandomAccessDataSource)

    def loader() -> grain.DataLoader:
        order = grain.samplers.IndexSampler(len(source), shuffle=True, seed=3, num_epochs=1)
        return grain.DataLoader(data_source=source, sampler=order, worker_count=2)

    begun = iter(loader())
    first = [next(begun)["input_ids"][0] for _ in range(20)]
    state = begun.get_state()
    rest = [document["input_ids"][0] for document in begun]
    assert sorted([*first, *rest]) == list(range(90))
    again = iter(loader())
    again.set_state(state)
    assert [document["input_ids"][0] for document in again] == rest


@pytest.mark.parametrize("balance", [None, "step", "order"])
def test_steps_are_those_of_the_sampler(packed: Path, balance: str | None) -> None:
    sizes = {"batch_size": 1, "micro_batches": 2, "balance": balance}
    if balance:
        sizes["hidden_size"] = 64
    sampler = PackedSampler(PackedDataset(packed), seed=7, rank=0, world_size=2, **sizes)
    source = PackedSource(packed)
    for step in range(12):
        for rank in range(2):
            found = source.rows_of(step, rank, world_size=2, seed=7, **sizes)
            assert found.tolist() == sampler.rows_of(step, rank).tolist()
