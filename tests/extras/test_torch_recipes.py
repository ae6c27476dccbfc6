"""The source of each segment, which the result of a recipe gives to training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from recipes import TOKENS_OF, pack_sources, write_sources

from packer_cli.torch import (
    PackedDataset,
    block_mask_collate,
    flash_attn_collate,
    packed_collate_fn,
    padded_collate,
    separate_collate,
    varlen_collate,
)

L = 64
WITH_SOURCE = ["input_ids", "labels", "cu_seqlens", "source"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred rows that hold documents of three sources."""
    folder = tmp_path_factory.mktemp("mixed")
    return pack_sources(
        folder / "out", write_sources(folder), {"signs": {"epochs": 2.0}}, max_length=L,
        unit_bytes=20_000,
    )  # fmt: skip


COLLATORS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "varlen": partial(varlen_collate, config=None),
    "flash": flash_attn_collate,
    "padded": partial(padded_collate, config=None),
    "mask": partial(block_mask_collate, config=None),
    "separate": separate_collate,
}


@pytest.mark.parametrize("rows_as", ["batch", "list"])
@pytest.mark.parametrize("name", COLLATORS)
def test_collators_say_the_source_of_every_token(mixed: Path, name: str, rows_as: str) -> None:
    dataset = PackedDataset(mixed, WITH_SOURCE)
    rows: Any = dataset.__getitems__(range(40, 60))
    if rows_as == "list":
        rows = [rows[k] for k in range(len(rows))]
    batch = COLLATORS[name](rows)
    ids, numbers = batch["input_ids"], batch["source_ids"]
    assert numbers.shape == ids.shape
    assert numbers.dtype == torch.int32
    for number, of_it in enumerate(TOKENS_OF.values()):
        found = {chr(token) for token in ids[numbers == number].tolist() if token < 256}
        assert found == set(of_it)
    real = sum(int(row["cu_seqlens"][-1]) for row in rows)
    assert int((numbers >= 0).sum()) == real < numbers.numel()


def test_sources_of_documents_go_with_their_boundaries(mixed: Path) -> None:
    batch = varlen_collate(PackedDataset(mixed, WITH_SOURCE).__getitems__(range(20)), config=None)
    edges, sources = batch["cu_seq_lens_q"].tolist(), batch["document_sources"]
    assert sources.dtype == torch.int32
    assert len(sources) == len(edges) - 1
    for (begin, end), source in zip(pairwise(edges), sources.tolist(), strict=True):
        assert set(batch["source_ids"][0, begin:end].tolist()) == {source}
    assert -1 in sources.tolist()  # the padding is a document of its own


def test_other_ways_to_the_model_keep_sources(mixed: Path) -> None:
    rows = PackedDataset(mixed, WITH_SOURCE).__getitems__(range(20))
    expected = padded_collate(rows, config=None)["source_ids"]
    batch = packed_collate_fn(rows)
    assert torch.equal(batch.source_ids, expected)
    assert packed_collate_fn(PackedDataset(mixed).__getitems__([0])).source_ids is None
    named = varlen_collate(rows, config=None, names=["input_ids", "source_ids"])
    assert list(named) == ["input_ids", "source_ids"]


def test_sources_of_joined_results(mixed: Path) -> None:
    """A source has one number in all."""
    alone = pack_sources(
        mixed.parent / "alone", {"signs": mixed.parent / "signs.jsonl"}, max_length=L, view=True
    )
    dataset = PackedDataset([alone, mixed], WITH_SOURCE)
    assert dataset.sources == ("signs", "letters", "digits")
    batch = varlen_collate(dataset.__getitems__(range(len(dataset))), config=None)
    for number, name in enumerate(dataset.sources):
        of_it = batch["input_ids"][batch["source_ids"] == number].tolist()
        assert {chr(token) for token in of_it if token < 256} == set(TOKENS_OF[name])


@pytest.mark.parametrize("view", [False, True])
def test_datasets_opens_both_sides_of_a_split(tmp_path: Path, view: bool) -> None:
    out = pack_sources(
        tmp_path / "out", write_sources(tmp_path), max_length=L, view=view,
        mixture={"validation_share": 0.2},
    )  # fmt: skip
    loaded = load_from_disk(str(out))
    assert list(loaded) == ["train", "validation"]
    for part, theirs in loaded.items():
        ours = PackedDataset(out / part)
        assert len(ours) == len(theirs) > 5
        names = ["cu_seqlens"] if view else ["cu_seqlens", "input_ids", "labels"]
        for row in (0, len(ours) - 1):  # a view has references to tokens
            assert {n: ours[row][n].tolist() for n in names} == {n: theirs[row][n] for n in names}
