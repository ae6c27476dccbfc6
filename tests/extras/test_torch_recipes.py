"""What a recipe's result says to training: the source of each segment, and where stages begin."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import TOKENS_OF, pack_sources, write_sources
from support import packer
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from packer_cli import open_packed
from packer_cli.config.mixture import Stage
from packer_cli.errors import DataError, UsageError
from packer_cli.result.documents import sources_of
from packer_cli.torch import (
    PackedDataset,
    PackedSampler,
    block_mask_collate,
    flash_attn_collate,
    packed_collate_fn,
    padded_collate,
    separate_collate,
    to_device,
    varlen_collate,
)

L = 64
NAMES = tuple(TOKENS_OF)
WITH_SOURCE = ["input_ids", "labels", "cu_seqlens", "source"]
SMALL = {"block_rows": 8, "window_blocks": 4}
STAGES = (
    Stage(6_000, (("letters", 1.0), ("digits", 0.0), ("signs", 0.0)), "begin"),
    Stage(30_000, (("letters", 1.0), ("digits", 1.0), ("signs", 1.0)), "middle"),
    Stage(3_000, (("letters", 0.0), ("digits", 0.0), ("signs", 1.0)), "end"),
)


@pytest.fixture(scope="module", params=["packed", "view"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def mixed(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred rows that hold documents of three sources."""
    folder = tmp_path_factory.mktemp("mixed")
    return pack_sources(
        folder / "out", write_sources(folder), {"signs": {"epochs": 2.0}}, max_length=L,
        view=kind == "view", unit_bytes=20_000,
    )  # fmt: skip


@pytest.fixture(scope="module")
def staged(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staged")
    return pack_sources(
        folder / "out", write_sources(folder, 600), {name: {"weight": 1.0} for name in NAMES},
        max_length=L, view=kind == "view", unit_bytes=10_000, mixture={"stages": STAGES},
    )  # fmt: skip


def source_of(tokens: Any) -> int:
    """The number of the source whose characters these are, the end of the document left out."""
    characters = {chr(token) for token in tokens if token < 256}
    (number,) = (k for k, name in enumerate(NAMES) if characters <= set(TOKENS_OF[name]))
    return number


def documents_of(row: dict[str, Any]) -> Iterator[Any]:
    for begin, end in pairwise(row["cu_seqlens"].tolist()):
        yield row["input_ids"][begin:end].tolist()


def test_each_segment_knows_its_source(mixed: Path) -> None:
    dataset = PackedDataset(mixed, WITH_SOURCE)
    assert dataset.sources == NAMES
    seen = set()
    for row in dataset:
        assert row["source"].dtype == torch.int32
        assert row["source"].tolist() == [source_of(one) for one in documents_of(row)]
        seen |= set(row["source"].tolist())
    assert seen == {0, 1, 2}


def test_the_source_is_that_of_the_segments_input(mixed: Path) -> None:
    opened = open_packed(mixed)
    inputs = [
        sources_of(batch)[0]
        for shard in opened.manifest["shards"] for batch in opened.batches(shard)
    ]  # fmt: skip
    dataset = PackedDataset(mixed, "source")
    assert dataset.columns == ("source",)
    found = dataset.__getitems__(range(len(dataset))).ragged["source"].values
    assert found.tolist() == np.concatenate(inputs).tolist()


def test_without_asking_rows_are_as_ever(mixed: Path) -> None:
    assert "source" not in PackedDataset(mixed)[0]
    batch = varlen_collate(PackedDataset(mixed).__getitems__([0, 1]), config=None)
    assert not {"document_sources", "source_ids"} & set(batch)


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


def test_rows_without_boundaries_have_sources_too(mixed: Path) -> None:
    """Positions say where documents begin, and then the padding is one of them."""
    rows = PackedDataset(mixed, WITH_SOURCE).__getitems__(range(20))
    expected = padded_collate(rows, config=None)["source_ids"]
    positions = padded_collate(rows, config=None)["position_ids"].int()
    given = [
        {"input_ids": row["input_ids"], "position_ids": positions[k], "source": row["source"]}
        for k, row in enumerate(rows)
    ]
    assert torch.equal(padded_collate(given, config=None)["source_ids"], expected)
    given[3]["source"] = given[3]["source"][:-2]
    with pytest.raises(DataError, match="row 3 of a batch has"):
        padded_collate(given, config=None)


def test_other_ways_to_the_model_keep_sources(mixed: Path) -> None:
    rows = PackedDataset(mixed, WITH_SOURCE).__getitems__(range(20))
    expected = padded_collate(rows, config=None)["source_ids"]
    batch = packed_collate_fn(rows)
    assert torch.equal(batch.source_ids, expected)
    (moved,) = to_device([batch], "cpu")
    assert torch.equal(moved.source_ids, expected)
    assert packed_collate_fn(PackedDataset(mixed).__getitems__([0])).source_ids is None
    named = varlen_collate(rows, config=None, names=["input_ids", "source_ids"])
    assert list(named) == ["input_ids", "source_ids"]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_say_sources(mixed: Path, how: str) -> None:
    dataset = PackedDataset(mixed, WITH_SOURCE)
    loader = DataLoader(
        dataset, 7, collate_fn=partial(padded_collate, config=None), num_workers=2,
        multiprocessing_context=how,
    )  # fmt: skip
    found = torch.cat([batch["source_ids"] for batch in loader])
    rows = dataset.__getitems__(range(len(dataset)))
    assert torch.equal(found, padded_collate(rows, config=None)["source_ids"])


def test_results_without_sources(folder: Path) -> None:
    Path("data.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert packer("pack", "data.jsonl", "-l", 8, "-t", "bytes", "-o", "out", "-q").exit_code == 0
    assert PackedDataset("out").sources == PackedDataset("out").stages == ()
    with pytest.raises(UsageError, match=r"columns: 'source': .*out has no sources") as caught:
        PackedDataset("out", WITH_SOURCE)
    assert "pack a recipe" in str(caught.value.tip)


def test_results_without_segments(tmp_path: Path) -> None:
    out = pack_sources(
        tmp_path / "out", write_sources(tmp_path, 20), max_length=L,
        columns=("input_ids", "labels", "cu_seqlens"),
    )  # fmt: skip
    with pytest.raises(UsageError, match="packed without the column segments"):
        PackedDataset(out, WITH_SOURCE)
    assert PackedDataset(out).sources == NAMES


def test_a_segment_of_no_source(mixed: Path, tmp_path: Path) -> None:
    """A manifest whose sources leave an input out is damaged; nothing is made up."""
    shutil.copytree(mixed, tmp_path / "copy")
    path = tmp_path / "copy" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["sources"] = manifest["sources"][:2]
    path.write_text(json.dumps(manifest))
    tokens = [mixed.parent / "mix-tokenized" / name for name in NAMES]
    how = {"tokens": tokens} if manifest["config"].get("view") else {}
    dataset = PackedDataset(tmp_path / "copy", WITH_SOURCE, **how)
    with pytest.raises(DataError, match=r"a segment is of input 2, which no source in manifest"):
        dataset.__getitems__(range(len(dataset)))


# --- stages ---


def test_a_dataset_knows_where_its_stages_begin(staged: Path) -> None:
    dataset = PackedDataset(staged, WITH_SOURCE)
    assert [one.name for one in dataset.stages] == ["begin", "middle", "end"]
    assert dataset.stages[0].first_row == 0
    assert sum(one.rows for one in dataset.stages) == len(dataset)
    allowed = [{0}, {0, 1, 2}, {2}]
    for stage, sources in zip(dataset.stages, allowed, strict=True):
        rows = dataset.__getitems__(range(stage.first_row, stage.first_row + stage.rows))
        assert set(rows.ragged["source"].values.tolist()) == sources


def stage_of(dataset: PackedDataset, row: int) -> int:
    (number,) = (k for k, one in enumerate(dataset.stages)
                 if one.first_row <= row < one.first_row + one.rows)  # fmt: skip
    return number


def test_an_epoch_goes_through_the_stages(staged: Path) -> None:
    dataset = PackedDataset(staged)
    sampler = PackedSampler(dataset, **SMALL)
    epochs = [list(sampler) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for rows in epochs:
        assert sorted(rows) == list(range(len(dataset)))
        stages = [stage_of(dataset, row) for row in rows]
        assert stages == sorted(stages)
        for stage in dataset.stages:
            own = rows[stage.first_row : stage.first_row + stage.rows]
            assert own != sorted(own)
    assert list(PackedSampler(dataset, seed=None)) == list(range(len(dataset)))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("even", [True, False])
def test_ranks_and_resuming_keep_the_stages(
    staged: Path, before: int, after: int, even: bool
) -> None:
    dataset = PackedDataset(staged)
    one = PackedSampler(dataset, **SMALL)
    endless = [row for _ in range(2) for row in one]

    def ranks(world: int) -> list[PackedSampler]:
        return [PackedSampler(dataset, rank=rank, world_size=world, even=even, **SMALL)
                for rank in range(world)]  # fmt: skip

    for steps in (1, 17, dataset.stages[1].first_row // before, len(dataset) // before - 1):
        first = ranks(before)
        shares = [list(islice(sampler, steps)) for sampler in first]
        taken = list(chain.from_iterable(zip(*shares, strict=True)))
        state = json.loads(json.dumps(first[0].state_dict(rows=steps)))
        rest = ranks(after)
        for sampler in rest:
            sampler.load_state_dict(state)
        shares = [list(sampler) for sampler in rest]
        longest = max(map(len, shares))
        taken += [rows[k] for k in range(longest) for rows in shares if k < len(rows)]
        assert taken == endless[: len(taken)]
        assert len(taken) > len(dataset) - after


@pytest.mark.parametrize("workers", [0, 2])
def test_stages_come_in_order_through_a_loader(staged: Path, workers: int) -> None:
    dataset = PackedDataset(staged, WITH_SOURCE)
    sampler = PackedSampler(dataset, **SMALL)
    loader = DataLoader(
        dataset, 4, sampler=sampler, collate_fn=partial(padded_collate, config=None),
        num_workers=workers, drop_last=True,
    )  # fmt: skip
    steps = [set(batch["document_sources"].tolist()) - {-1} for batch in loader]
    assert len(steps) == len(dataset) // 4
    middle, end = (one.first_row for one in dataset.stages[1:])
    assert set().union(*steps[: middle // 4]) == {0}
    assert set().union(*steps[-(-middle // 4) : end // 4]) == {0, 1, 2}
    assert set().union(*steps[-(-end // 4) :]) == {2}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_stateful_loader_goes_on_in_its_stage(staged: Path) -> None:
    dataset = PackedDataset(staged)

    def loader() -> Any:
        return StatefulDataLoader(
            dataset, 4, sampler=PackedSampler(dataset, **SMALL), num_workers=2,
            collate_fn=partial(padded_collate, config=None),
        )  # fmt: skip

    whole = [batch["input_ids"] for batch in loader()]
    first = loader()
    taken = [batch["input_ids"] for batch in islice(first, 30)]
    again = loader()
    again.load_state_dict(first.state_dict())
    taken += [batch["input_ids"] for batch in again]
    assert all(map(torch.equal, taken, whole))
    assert len(taken) == len(whole)


def test_a_state_of_other_stages_is_refused(staged: Path) -> None:
    dataset = PackedDataset(staged)
    state = PackedSampler(dataset).state_dict()
    assert state["stages"] == [one.rows for one in dataset.stages]
    with pytest.raises(DataError, match="the sampler's state has stages"):
        PackedSampler(len(dataset)).load_state_dict(state)
    earlier = PackedSampler(len(dataset)).state_dict()
    del earlier["stages"]  # as packers that knew no stages wrote it
    PackedSampler(len(dataset)).load_state_dict(earlier)
    with pytest.raises(DataError, match="stages None, this sampler"):
        PackedSampler(dataset).load_state_dict(earlier)


def test_stages_that_are_not_the_rows(staged: Path, tmp_path: Path) -> None:
    shutil.copytree(staged, tmp_path / "copy")
    path = tmp_path / "copy" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stages"][1]["first_row"] += 1
    path.write_text(json.dumps(manifest))
    tokens = [staged.parent / "mix-tokenized" / name for name in NAMES]
    how = {"tokens": tokens} if manifest["config"].get("view") else {}
    with pytest.raises(DataError, match=r"its stages are not its .* rows, one after another"):
        PackedSampler(PackedDataset(tmp_path / "copy", **how))


def test_pickled_datasets_have_sources_and_stages(staged: Path) -> None:
    dataset = PackedDataset(staged, WITH_SOURCE)
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert (again.sources, again.stages) == (dataset.sources, dataset.stages)
    assert torch.equal(again[-1]["source"], dataset[-1]["source"])
