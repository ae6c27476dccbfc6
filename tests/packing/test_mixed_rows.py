"""best-fit needs about as few rows as best-fit-decreasing, and mixes lengths and inputs in each."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Page
from support import heavy, pack, packer

from packer_cli import PackPlan, open_packed, plan_packing
from packer_cli.options.options import NAMES, takes_input_order

# Lengths, tokens in a row, and how many percent more rows than of best-fit-decreasing are allowed.
DATA = {
    "short texts": (lambda rng: rng.lognormal(5.5, 1, 100_000), 4096, 0.1),
    "long texts": (lambda rng: rng.lognormal(6.2, 1.6, 100_000), 32768, 0.1),
    "uniform": (lambda rng: rng.integers(100, 701, 50_000), 4096, 0.3),
    "one window": (lambda rng: rng.lognormal(6.8, 0.7, 5000), 4096, 0.3),
}
SEEDED = [name for name in NAMES if not takes_input_order(name)]


def of_one_length(lengths: Any, plan: PackPlan) -> float:
    """The share of rows of three documents or more, over 80% of them within 5% of the median."""
    rows = [lengths[plan.order[a:b]] for a, b in pairwise(plan.row_offsets)]
    alike = [
        len(row) >= 3 and (abs(row - np.median(row)) <= 0.05 * np.median(row)).mean() > 0.8
        for row in rows
    ]
    return float(np.mean(alike))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("seed", [0, heavy(1)])
def test_rows_are_as_few_as_of_the_exact_order_and_not_of_one_length(data: str, seed: int) -> None:
    draw, max_length, allowed = DATA[data]
    lengths = np.clip(draw(np.random.default_rng(seed)), 1, max_length).astype(np.int32)
    mixed = plan_packing(lengths, max_length, seed=seed)
    exact = plan_packing(lengths, max_length, strategy="best-fit-decreasing", seed=seed)
    assert len(mixed) <= len(exact) * (1 + allowed / 100)
    assert of_one_length(lengths, mixed) < 0.001
    assert of_one_length(lengths, exact) > 0.2


def test_lengths_that_seldom_fit_together_are_planned_in_the_exact_order() -> None:
    lengths = np.random.default_rng(0).choice([1000, 1300], 9000)
    exact = len(plan_packing(lengths, 4096, strategy="best-fit-decreasing"))
    assert exact * 1.02 < len(plan_packing(lengths, 4096, strategy="first-fit-shuffle"))
    assert len(plan_packing(lengths, 4096)) <= exact * 1.003 + 1


def test_a_limit_of_segments_leaves_no_rows_of_short_documents() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 20_000), 1, 4096).astype(int)
    mixed, exact = (
        plan_packing(lengths, 4096, strategy=name, max_segments_per_row=12)
        for name in ("best-fit", "best-fit-decreasing")
    )
    assert len(mixed) < 0.9 * len(exact)


@pytest.mark.parametrize("strategy", SEEDED)
def test_equal_lengths_come_from_everywhere(strategy: str) -> None:
    plan = plan_packing(np.full(1000, 10), 100, strategy=strategy, seed=3)
    inputs = [len({document // 100 for document in row}) for row in plan.rows()]
    assert np.mean(inputs) > 5


def _inputs() -> list[str]:
    """Three files with the same lengths, a thousand documents in each."""
    lengths = np.random.default_rng(5).integers(20, 60, 1000).tolist()
    for name in "abc":
        Path(f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": name * length}) + "\n" for length in lengths)
        )
    return ["a.jsonl", "b.jsonl", "c.jsonl"]


@pytest.mark.parametrize("shuffle", ["--shuffle", "--no-shuffle"])
def test_rows_of_several_files(folder: Path, shuffle: str) -> None:
    pack(*_inputs(), "-l", 512, shuffle)
    Path("out").rename("mixed")
    pack(*_inputs(), "-l", 512, shuffle, "--strategy", "bfd")
    Path("out").rename("exact")
    figures = [json.loads(packer("stats", one, "--json").stdout) for one in ("mixed", "exact")]
    mixed, exact = (one["mixedness"] for one in figures)
    assert figures[0]["rows"] <= figures[1]["rows"]
    assert mixed["one_length"] == 0
    assert max(mixed["one_input"], exact["one_input"]) < 0.02
    assert 0.9 < mixed["spread"] < 1.1
    assert exact["one_length"] > 0.9
    assert exact["spread"] < 0.3
    for name in ("mixed", "exact"):
        assert packer("verify", name, "--against-inputs").exit_code == 0
    counts = open_packed("mixed").manifest["histograms"]
    many = sum(counts["segments_per_row"][2:])
    assert sum(counts["one_length"]) == sum(counts["one_input"]) == many


def test_stats_its_page_and_plan_say_how_mixed_rows_are(folder: Path) -> None:
    pack(*_inputs(), "-l", 512)
    lines = packer("stats", "out").stdout.splitlines()
    line = next(line for line in lines if line.startswith("mixed"))
    assert "of the data's spread of lengths in a row; of rows 0.00% have nearly one length" in line
    assert line.endswith("% one input")
    assert packer("stats", "out", "--html", "page.html").exit_code == 0
    page = Page(Path("page.html").read_bytes())
    assert page.table("segments within 5% of its median length")
    assert page.table("segments from one input")
    ways = "best-fit,best-fit-decreasing"
    result = packer("plan", *_inputs(), "-l", 512, "-t", "bytes", "-q", "--strategy", ways)
    mixed, exact = (line.split() for line in result.stdout.split("\n\n")[1].splitlines()[1:])
    assert int(mixed[2]) <= int(exact[2])
    assert mixed[-1] == "0.00%"
    assert float(exact[-1].strip("%")) > 90
