"""The benchmarks' rows say what was measured, and of how much."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(("ours", "ratio", "reached"), [(8.0, 25.5, True), (8.5, 24.0, False)])
def test_ten_times_the_text_is_held_against_ten_times_the_peers_tenth(
    ours: float,
    ratio: float,
    reached: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark: Any = importlib.import_module("pack_vs_trl")
    settings: Any = importlib.import_module("settings")
    measured = {"once": (2.0, 1000), "tenfold": (ours, 10_000)}
    for name in measured:
        monkeypatch.setattr(benchmark.inputs, name, lambda settings, name=name: [name])
    monkeypatch.setattr(benchmark.inputs, "missing", lambda settings: "")
    monkeypatch.setattr(benchmark.inputs, "size", len)
    monkeypatch.setattr(benchmark, "_ours", lambda settings, files: measured[files[0]])
    monkeypatch.setattr(benchmark, "_theirs", lambda settings, files: (20.4, 1001))
    monkeypatch.setattr(
        benchmark, "from_environment", lambda: settings.Settings(peers_python=Path(__file__))
    )
    benchmark.main()
    once, tenfold = map(json.loads, capsys.readouterr().out.splitlines())
    assert once["what"] == benchmark.WHAT
    assert once["measured"].startswith("10.2 x")
    assert tenfold["what"] == "pack 670 MB of text, against TRL's way on a tenth of it"
    assert tenfold["target"] == ">= 25 x, with the tenth's time times ten"
    assert tenfold["measured"] == f"{ratio} x ({ours:.2f} s, and 10 x 20.4 s)"
    assert tenfold["reached"] is reached
