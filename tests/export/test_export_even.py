"""`packer export --order even`: the same rows, even for processes that read them in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from exporting import table_of
from support import packer

from packer_cli import open_packed
from packer_cli.result.reader import squared_lengths

L, HIDDEN = 256, 8
SIZES = {"--ranks": 4, "--micro-batches": 3, "--batch-size": 2, "--hidden-size": HIDDEN}
EVEN = ["--order", "even", *[text for pair in SIZES.items() for text in pair]]
STEP = 4 * 3 * 2


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 rows of log-normal documents, in several shards."""
    folder = tmp_path_factory.mktemp("packed")
    random = np.random.default_rng(5)
    lengths = np.minimum(random.lognormal(3.0, 1.5, 1200).astype(int) + 2, 2000)
    lines = (json.dumps({"input_ids": random.integers(1, 1 << 20, n).tolist()}) for n in lengths)
    (folder / "data.jsonl").write_text("\n".join(lines))
    command = ["pack", folder / "data.jsonl", "-l", L, "-o", folder / "out", "-q"]
    assert packer(*command, "--overlong", "split", "--unit-bytes", "100K").exit_code == 0
    return folder / "out"


def export(directory: Path, to: str, output: Path, *options: Any) -> dict[str, list[Any]]:
    result = packer("export", directory, "--to", to, "--output", output, *options)
    assert result.exit_code == 0, result.stderr
    return table_of(output / "train" if to == "llamafactory" else output)


def unevenness(costs: Any) -> float:
    """The mean over steps of the costliest rank's cost and the mean rank's; whole steps only."""
    whole = costs[: len(costs) // STEP * STEP].reshape(-1, 3, 4, 2)  # batch i is of rank i % 4
    ranks = whole.sum(axis=(1, 3))
    return float((ranks.max(axis=1) / ranks.mean(axis=1)).mean())


@pytest.mark.parametrize("to", ["trl", "llamafactory"])
def test_rows_are_the_same_in_an_even_order(packed: Path, tmp_path: Path, to: str) -> None:
    stored, even = (export(packed, to, tmp_path / str(len(how)), *how) for how in ([], EVEN))
    before, after = (list(zip(*table.values(), strict=True)) for table in (stored, even))
    assert len(before) > 150
    assert before != after
    assert sorted(before) == sorted(after)
    number = {str(row): at for at, row in enumerate(before)}
    order = [number[str(row)] for row in after]
    costs = squared_lengths(open_packed(packed)) + 6 * HIDDEN * L
    assert unevenness(costs[order]) < 1.02 < 1.15 < unevenness(costs)


def test_columns_go_along(packed: Path, tmp_path: Path) -> None:
    found = []
    for name, how in (("stored", []), ("even", EVEN)):
        for to in ("numpy", "parquet"):
            result = packer("export", packed, "--to", to, "--output", tmp_path / name / to, *how)
            assert result.exit_code == 0, result.stderr
        table = pq.read_table(tmp_path / name / "parquet").to_pylist()
        ids = np.load(tmp_path / name / "numpy" / "input_ids.npy").tolist()
        assert [row["input_ids"] for row in table] == ids
        found.append(sorted(map(str, table)))
    assert found[0] == found[1]
    assert len(found[0]) == len(open_packed(packed))


def next_fit(table: dict[str, list[Any]], capacity: int) -> list[list[int]]:
    """Segments that axolotl puts into a bin, those without labels left out."""
    bins: list[list[int]] = []
    used = capacity
    for number, labels in enumerate(table["labels"]):
        if set(labels) == {-100}:
            continue
        if used + len(labels) > capacity:
            bins.append([])
            used = 0
        bins[-1].append(number)
        used += len(labels)
    return bins


@pytest.mark.parametrize("batch_size", [1, 2])
def test_axolotl_cannot_but_make_the_rows_again(
    packed: Path, tmp_path: Path, batch_size: int
) -> None:
    stored = export(packed, "axolotl", tmp_path / "stored")
    options = ["--order", "even", "--ranks", 4, "--batch-size", batch_size, "--hidden-size", HIDDEN]
    table = export(packed, "axolotl", tmp_path / "even", *options)
    bins = next_fit(table, batch_size * L)
    lengths = [[len(table["labels"][number]) for number in one] for one in bins]
    assert {sum(one) for one in lengths[:-1]} == {batch_size * L}

    def trained(table: dict[str, list[Any]]) -> list[Any]:
        """Tokens and labels up to the last label: what padding follows is not trained on."""
        found = []
        for ids, labels in zip(table["input_ids"], table["labels"], strict=True):
            last = max((k for k, one in enumerate(labels) if one != -100), default=0) + 1
            found.append((ids[:last], labels[:last]))
        return sorted(found)

    assert trained(table) == trained(stored)
    costs = np.array([sum(n * n for n in one) for one in lengths]) + 6 * HIDDEN * L * batch_size
    ranks = costs[: len(costs) // 4 * 4].reshape(-1, 4)
    assert (ranks.max(axis=1) / ranks.mean(axis=1)).mean() < 1.05
