"""Several results as one dataset: rows, order, sources and stages of all, and what does not fit."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import pack_sources, write_sources
from support import packer
from torch.utils.data import DataLoader

from packer_cli.config.mixture import Stage
from packer_cli.errors import DataError, UsageError
from packer_cli.torch import PackedDataset, PackedSampler, padded_collate, varlen_collate

L = 32
SMALL = {"block_rows": 8, "window_blocks": 4}


def lines(count: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    return "".join(
        json.dumps({"input_ids": random.integers(1, 1000, random.integers(1, L)).tolist()}) + "\n"
        for _ in range(count)
    )


def packed(folder: Path, name: str, *options: object, count: int = 100, seed: int = 0) -> Path:
    (folder / f"{name}.jsonl").write_text(lines(count, seed))
    done = packer("pack", folder / f"{name}.jsonl", "-l", L, "-o", folder / name, "-q", *options)
    assert done.exit_code == 0, done.stderr
    return folder / name


@pytest.fixture(scope="module")
def folder_of_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packed directories, `a` and `b`, and a view `c`."""
    folder = tmp_path_factory.mktemp("results")
    packed(folder, "a", "--unit-bytes", "5K")
    packed(folder, "b", count=40, seed=1)
    (folder / "c.jsonl").write_text(lines(60, 2))
    done = packer("tokenize", folder / "c.jsonl", "-o", folder / "tokens", "-q")
    assert done.exit_code == 0, done.stderr
    done = packer("pack", folder / "tokens", "-l", L, "--view", "-o", folder / "c", "-q")
    assert done.exit_code == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def results(folder_of_results: Path) -> list[Path]:
    return [folder_of_results / name for name in "abc"]


def apart(paths: list[Path]) -> list[dict[str, Any]]:
    return [row for path in paths for row in PackedDataset(path)]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_rows_are_those_of_each_in_turn(results: list[Path]) -> None:
    expected, dataset = apart(results), PackedDataset(results)
    assert len(dataset) == len(expected)
    assert dataset.max_length == L
    assert dataset.paths == tuple(results)
    assert all(map(same, dataset, expected))
    assert same(dataset[-1], expected[-1])
    order = np.random.default_rng(0).integers(-len(expected), len(expected), 500)
    batch = dataset.__getitems__(order.tolist())
    assert all(same(row, expected[k]) for row, k in zip(batch, order, strict=True))
    for row in (len(expected), -len(expected) - 1, 2**70):
        with pytest.raises(IndexError, match=f"row {row} of {len(expected)}"):
            dataset[row]


def test_it_says_which_result_a_row_is_of(results: list[Path]) -> None:
    dataset = PackedDataset(results)
    for row in range(len(dataset)):
        path, number = dataset.result_of(row)
        assert same(dataset[row], PackedDataset(path)[number])
    assert dataset.result_of(-1) == (results[-1], len(PackedDataset(results[-1])) - 1)
    assert PackedDataset(results[0]).result_of(3) == (results[0], 3)
    with pytest.raises(IndexError):
        dataset.result_of(len(dataset))


@pytest.mark.parametrize("how", ["no workers", "fork", "spawn"])
def test_loaders_give_every_row_once_in_one_order(results: list[Path], how: str) -> None:
    dataset, expected = PackedDataset(results), apart(results)
    workers: dict[str, Any] = {}
    if how != "no workers":
        workers = {"num_workers": 2, "multiprocessing_context": how}
    order = list(PackedSampler(dataset, **SMALL))
    assert sorted(order) == list(range(len(expected)))
    loader = DataLoader(
        dataset, 7, sampler=PackedSampler(dataset, **SMALL),
        collate_fn=partial(padded_collate, config=None), **workers,
    )  # fmt: skip
    found = torch.cat([batch["input_ids"] for batch in loader])
    assert torch.equal(found, torch.stack([expected[row]["input_ids"] for row in order]).long())


def test_a_state_tells_when_results_changed(results: list[Path], tmp_path: Path) -> None:
    state = PackedSampler(PackedDataset(results)).state_dict()
    PackedSampler(PackedDataset(results)).load_state_dict(state)
    other = packed(tmp_path, "b", "--seed", 7, count=40, seed=1)
    for changed in ([results[0], other, results[2]], [*results[1:], results[0]]):
        with pytest.raises(DataError, match="the sampler's state has data"):
            PackedSampler(PackedDataset(changed)).load_state_dict(state)


def test_it_pickles_as_its_paths(results: list[Path]) -> None:
    dataset = PackedDataset(results)
    dataset[0]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    again = pickle.loads(pickled)  # noqa: S301
    assert same(again[len(dataset) - 1], dataset[-1])
    assert again.fingerprint == dataset.fingerprint


def test_a_worker_is_told_of_a_result_that_changed(tmp_path: Path) -> None:
    paths = [packed(tmp_path, "a"), packed(tmp_path, "b", seed=1)]
    pickled = pickle.dumps(PackedDataset(paths))
    packed(tmp_path, "b", "--overwrite", seed=2)
    with pytest.raises(DataError, match=r"b/manifest\.json: changed since the dataset was opened"):
        len(pickle.loads(pickled))  # noqa: S301


def test_tokens_of_views_that_moved(folder_of_results: Path, tmp_path: Path) -> None:
    expected = apart([folder_of_results / "a", folder_of_results / "c"])
    for name in ("a", "c", "tokens"):
        (folder_of_results / name).rename(tmp_path / name)
    (tmp_path / "tokens").rename(tmp_path / "moved")
    try:
        paths = [tmp_path / "a", tmp_path / "c"]
        dataset = PackedDataset(paths, tokens=tmp_path / "moved")
        assert all(map(same, pickle.loads(pickle.dumps(dataset)), expected))  # noqa: S301
        (tmp_path / "x.jsonl").write_text(lines(5, 5))
        arguments = ["tokenize", tmp_path / "x.jsonl", "-o", tmp_path / "other", "-q"]
        assert packer(*arguments).exit_code == 0
        with pytest.raises(UsageError, match=r"tokens: none of the results is a view of .*other"):
            PackedDataset(paths, tokens=[tmp_path / "moved", tmp_path / "other"])
    finally:
        (tmp_path / "moved").rename(tmp_path / "tokens")
        for name in ("a", "c", "tokens"):
            (tmp_path / name).rename(folder_of_results / name)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["-l", 64], "max_length is 32 in the first and 64 in the second"),
        (["--label-shift", "pre"], "the label shift is none in the first and pre in the second"),
        (["--segment-multiple", "8"], "the segment multiple is 1 in the first and 8 in the second"),
        (["--position-ids"], "other has a column position_ids, .*a has none"),
    ],
)
def test_results_that_do_not_go_together(
    results: list[Path], tmp_path: Path, options: list[object], what: str
) -> None:
    other = packed(tmp_path, "other", *options)
    with pytest.raises(DataError, match=what) as caught:
        PackedDataset([results[0], other])
    assert str(results[0]) in caught.value.message
    assert str(other) in caught.value.message
    assert caught.value.tip


def test_columns_that_all_have(results: list[Path], tmp_path: Path) -> None:
    other = packed(tmp_path, "other", "--position-ids")
    chosen = ["input_ids", "cu_seqlens"]
    rows = PackedDataset([other, results[0]], chosen)
    assert set(rows[0]) == set(rows[-1]) == set(chosen)
    with pytest.raises(UsageError, match="columns: 'position_ids' is not one of"):
        PackedDataset([other, results[0]], ["position_ids"])


def test_another_tokenizer(folder: Path, results: list[Path]) -> None:
    Path("text.jsonl").write_text('{"text": "one"}\n' * 9)
    assert packer("pack", "text.jsonl", "-l", L, "-t", "bytes", "-o", "t", "-q").exit_code == 0
    with pytest.raises(DataError, match="the tokenizer is none in the first and bytes, sha256"):
        PackedDataset([results[0], "t"])


def test_no_results() -> None:
    with pytest.raises(UsageError, match="PackedDataset: got no path"):
        PackedDataset([])


# --- of recipes ---


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("recipes")
    files = write_sources(folder, 300)
    stages = tuple(Stage(4000, ((name, 1.0),), name) for name in ("signs", "letters"))
    weights = {name: {"weight": 0.0} for name in files}
    signs = {"signs": files["signs"]}
    return [
        pack_sources(folder / "staged", files, weights, max_length=64,
                     mixture={"stages": stages}),
        pack_sources(folder / "signs", signs, max_length=64, view=True),
    ]  # fmt: skip


class TestRecipes:
    """Sources have one number in all results, and stages go on after one another."""

    def test_sources_have_the_same_numbers(self, recipes: list[Path]) -> None:
        columns = ["input_ids", "cu_seqlens", "source"]
        dataset = PackedDataset(recipes[::-1], columns)
        assert dataset.sources == ("signs", "letters", "digits")
        batch = varlen_collate(dataset.__getitems__(range(len(dataset))), config=None)
        for number, characters in enumerate(["+-*/", "abc"]):
            of_it = batch["input_ids"][batch["source_ids"] == number].tolist()
            assert {chr(token) for token in of_it if token < 256} == set(characters)

    def test_stages_go_on(self, recipes: list[Path]) -> None:
        dataset = PackedDataset(recipes)
        assert [one.name for one in dataset.stages] == ["signs", "letters", None]
        first, second, last = dataset.stages
        assert (second.first_row, last.first_row) == (first.rows, first.rows + second.rows)
        assert last.rows == len(PackedDataset(recipes[1]))
        rows = list(PackedSampler(dataset, **SMALL))
        for stage in dataset.stages:
            its = range(stage.first_row, stage.first_row + stage.rows)
            assert sorted(rows[its.start : its.stop]) == list(its)

    def test_one_without_sources(self, recipes: list[Path], folder: Path) -> None:
        Path("text.jsonl").write_text('{"text": "one"}\n' * 9)
        assert packer("pack", "text.jsonl", "-l", 64, "-t", "bytes", "-o", "t", "-q").exit_code == 0
        assert len(PackedDataset([recipes[0], "t"]).sources) == 3
        with pytest.raises(UsageError, match=r"'source': .*/t has no sources"):
            PackedDataset([recipes[0], "t"], ["input_ids", "cu_seqlens", "source"])
