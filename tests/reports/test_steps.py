"""`packer stats --ranks`: how long steps wait for their costliest rank."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import Result
from support import assert_error, jsonl, packer, squared_lengths_by_hand

from packer_cli.steps import schedule
from packer_cli.steps.schedule import Order, Schedule, StepSizes

pytestmark = pytest.mark.usefixtures("folder")
L, HIDDEN = 256, 4
SIZES = ("--ranks", 8, "--micro-batches", 2, "--batch-size", 3, "--hidden-size", HIDDEN)
STEP = 8 * 2 * 3


def long_tailed(count: int, seed: int = 0) -> bytes:
    random_ = random.Random(seed)
    lengths = (min(int(random_.lognormvariate(3, 1.5)), L - 1) for _ in range(count))
    return jsonl(*("x" * length for length in lengths))


@pytest.fixture
def out(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(long_tailed(2000))
    result = packer("pack", "a.jsonl", "-l", L, "-t", "bytes", "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
    return folder / "out"


def predicted(directory: object = "out", *sizes: object) -> dict[str, Any]:
    result = packer("stats", directory, *(sizes or SIZES), "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    steps: dict[str, Any] = json.loads(result.stdout)["steps"]
    return steps


def by_hand(balance: Any, ranks: int, micro_batches: int, batch_size: int) -> tuple[float, float]:
    """(mean over steps of costliest / mean, time of all steps), rank by rank."""
    costs = np.array(squared_lengths_by_hand("out"), np.float64) + 6 * HIDDEN * L
    sizes = StepSizes(ranks, batch_size, micro_batches)
    schedule = Schedule(Order(len(costs)), sizes, balance=balance, costs=costs)
    size, ratios, longest, means = ranks * micro_batches * batch_size, [], 0.0, 0.0
    for step in range(len(costs) // size):
        rows = schedule.rows_at(step * size, (step + 1) * size)
        own = [sum(costs[row] for row in rows[rank::ranks]) for rank in range(ranks)]
        ratios.append(max(own) / (sum(own) / ranks))
        longest, means = longest + max(own), means + sum(own) / ranks
    return sum(ratios) / len(ratios), longest / means


@pytest.mark.parametrize("sizes", [(8, 2, 3), (16, 1, 1), (3, 5, 1), (1, 4, 2)])
def test_it_is_what_the_steps_cost(out: Path, sizes: tuple[int, int, int]) -> None:
    options = zip(("--ranks", "--micro-batches", "--batch-size"), sizes, strict=True)
    found = predicted("out", *(part for pair in options for part in pair), "--hidden-size", HIDDEN)
    rows, step = len(squared_lengths_by_hand("out")), int(np.prod(sizes))
    assert {name: found[name] for name in found if not isinstance(found[name], dict)} == {
        "ranks": sizes[0], "micro_batches": sizes[1], "batch_size": sizes[2],
        "hidden_size": HIDDEN, "rows_per_step": step, "steps": rows // step,
        "steps_counted": rows // step,
    }  # fmt: skip
    ratio, time = by_hand(None, *sizes)
    assert found["random"] == {"max_over_mean": pytest.approx(ratio)}
    for balance in ("step", "order"):
        even, less = by_hand(balance, *sizes)
        assert found[balance] == {
            "max_over_mean": pytest.approx(even),
            "time_saved": pytest.approx(1 - less / time, abs=1e-12),
        }
    if sizes == (8, 2, 3):
        assert 1 <= found["step"]["max_over_mean"] < found["random"]["max_over_mean"] - 0.1
        assert found["step"]["time_saved"] > 0.1
    if sizes[0] == 1:
        assert found["random"]["max_over_mean"] == 1


def test_the_table_says_what_the_numbers_are(out: Path) -> None:
    found = predicted()
    result = packer("stats", "out", *SIZES)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    (begin,) = (number for number, line in enumerate(lines) if "costliest rank" in line)
    steps = found["steps"]
    assert lines[begin] == (
        "a step waits for its costliest rank: 8 ranks × 2 micro-batches × 3 rows, hidden size "
        f"{HIDDEN} ({steps} steps)"
    )
    table = [line.split(None, 2) for line in lines[begin + 2 : begin + 5]]
    assert table[0] == [f"{found['random']['max_over_mean']:.3f}", "random", "order"]
    for line, name in zip(table[1:], ("step", "order"), strict=True):
        ratio, saved, meaning = line
        assert (ratio, saved) == (
            f"{found[name]['max_over_mean']:.3f}", f"{found[name]['time_saved']:.2%}"
        )  # fmt: skip
        assert meaning.startswith(f'balance="{name}": ')
    assert packer("stats", "out", *SIZES).stdout == result.stdout
    assert "costliest" not in packer("stats", "out").stdout


def test_of_many_steps_some_are_counted(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--ranks", 2, "--hidden-size", HIDDEN)
    all_of_them = predicted("out", *sizes)
    monkeypatch.setattr(schedule, "_MOST_ROWS", 2 * 2 * 64)
    assert all_of_them["steps"] > 2 * 64 + 1
    some = predicted("out", *sizes)
    assert (some["steps"], some["steps_counted"]) == (all_of_them["steps"], 2 * 64)
    for name in ("random", "step", "order"):
        expected = pytest.approx(all_of_them[name]["max_over_mean"], abs=0.05)
        assert some[name]["max_over_mean"] == expected
    assert "steps, 128 of them counted)" in packer("stats", "out", *sizes).stdout


def test_a_page_has_it(out: Path) -> None:
    found = predicted()
    assert packer("stats", "out", *SIZES, "--html", "page.html").exit_code == 0
    page = Path("page.html").read_text()
    assert f"{found['random']['max_over_mean']:.3f}" in page
    assert f"{found['step']['time_saved']:.2%}" in page


def test_a_url(out: Path) -> None:
    assert predicted(f"file://{out}") == predicted()


def test_a_view_needs_no_tokens(out: Path) -> None:
    assert packer("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens").exit_code == 0
    for name, more in (("view", ["--view"]), ("rows", [])):
        assert packer("pack", "tokens", "-l", L, *more, "-q", "-o", name).exit_code == 0
    shutil.rmtree("tokens")
    assert predicted("view") == predicted("rows")


RECIPE = """
max-length = 256
tokenizer = "bytes"
[validation]
share = 0.1
[[source]]
name = "a"
inputs = ["a.jsonl"]
weight = 1
"""


def test_both_sides_of_a_split(out: Path) -> None:
    Path("mix.toml").write_text(RECIPE)
    done = packer("pack", "mix.toml", "-q", "-o", "both")
    assert done.exit_code == 0, done.stderr
    small = ("--ranks", 2, "--hidden-size", HIDDEN)
    result = json.loads(packer("stats", "both", *small, "--json").stdout)
    for side in ("train", "validation"):
        assert result[side]["steps"] == predicted(f"both/{side}", *small)
    rows = result["validation"]["rows"]
    large = ("--ranks", rows + 1, "--hidden-size", HIDDEN)
    told = packer("stats", "both", *large, "--json")
    assert told.exit_code == 0, told.stderr
    assert f"both/validation: has {rows} rows, a step of {rows + 1} ranks" in told.stderr
    result = json.loads(told.stdout)
    assert "steps" not in result["validation"]
    assert result["train"]["steps"] == predicted("both/train", *large)


def test_steps_that_cannot_be_had(out: Path) -> None:
    rows = Result("out").manifest["rows"]
    result = packer("stats", "out", "--ranks", rows + 1, "--hidden-size", HIDDEN)
    many = f"a step of {rows + 1} ranks x 1 micro-batch x 1 row takes {rows + 1}"
    assert_error(result, 1, "out: has", f"{rows} rows, {many}")
    assert packer("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens").exit_code == 0
    result = packer("stats", "tokens", *SIZES)
    assert_error(result, 2, "--ranks: tokens holds documents, which are not in rows yet")
