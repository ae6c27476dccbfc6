"""`packer verify` finds every edit of the manifest, whether its checksum was made anew or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import assert_error, packer
from verifying import first, problems

from packer_cli.result.manifest_bytes import to_bytes

pytestmark = pytest.mark.usefixtures("folder")


def rewrite(change: Callable[[dict[str, Any]], Any], *, signed: bool = True) -> None:
    """Change the manifest; `signed`: with a new checksum, as a forger would."""
    path = Path("out/manifest.json")
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_bytes(to_bytes(manifest) if signed else json.dumps(manifest).encode())


TOTALS = (
    "rows", "documents", "segments", "tokens", "trained_tokens", "padding_tokens", "utilization",
    "lower_bound_rows", "empty_documents", "rejected_records",
)  # fmt: skip
LOST = ("truncated_documents", "truncated_tokens", "dropped_documents", "dropped_tokens")


@pytest.mark.parametrize("name", [*TOTALS, *LOST])
def test_an_edited_total(packed: Path, name: str) -> None:
    edit = lambda manifest: manifest.update({name: manifest[name] + 1})  # noqa: E731
    before = Path("out/manifest.json").read_bytes()
    rewrite(edit, signed=False)
    lines = problems()
    assert any(line.startswith("out: manifest.json: was edited: ") for line in lines)
    if name in TOTALS:  # the others show in the checksum only
        Path("out/manifest.json").write_bytes(before)
        rewrite(edit)
        lines = problems()
        assert any(re.match(f"out: manifest.json: {name}( is|:) ", line) for line in lines), lines


@pytest.mark.parametrize("name", ["rows", "segments", "tokens", "trained_tokens", "bytes"])
def test_an_edited_shard_entry(packed: Path, name: str) -> None:
    rewrite(lambda manifest: manifest["shards"][0].update({name: 5}))
    assert any(f"out: {first()}: " in line and "the manifest says 5" in line for line in problems())


@pytest.mark.parametrize("name", ["document_length", "row_fill", "segments_per_row"])
def test_an_edited_histogram(packed: Path, name: str) -> None:
    rewrite(lambda manifest: manifest["histograms"][name].reverse())
    assert any(f"out: manifest.json: {name}: [" in line for line in problems())


@pytest.mark.parametrize("name", ["documents", "tokens"])
def test_figures_moved_between_inputs(packed: Path, name: str) -> None:
    def move(manifest: dict[str, Any]) -> None:
        manifest["inputs"][0][name] -= 1
        manifest["inputs"][1][name] += 1

    rewrite(move)
    assert [line.split(":")[2] for line in problems()] == [
        f" {name} of the input a.jsonl", f" {name} of the input b.jsonl"
    ]  # fmt: skip


def test_a_wrong_digest(packed: Path) -> None:
    rewrite(lambda manifest: manifest["shards"][0].update(sha256="0" * 64))
    (line,) = problems()
    assert line.endswith("the manifest says " + "0" * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["config"].update(seed=5), "was edited"),
        (lambda m: m["inputs"][0].update(path="c.jsonl"), "was edited"),
        (lambda m: m.pop("side_files"), "a foreign file"),
        (lambda m: m["shards"].append(m["shards"][0]), "names a shard twice"),
        (lambda m: m["shards"][0].update(unit=3), "is said to be of unit 3"),
        (lambda m: m["units"].clear(), "a shard is of a unit that is not among the units"),
        (lambda m: m["units"].append(m["units"][0]), "units are not in order"),
        (lambda m: m["inputs"].pop(), "a slice of an input that is not among the inputs"),
    ],
)
def test_other_edits(packed: Path, change: Callable[[Any], Any], message: str) -> None:
    rewrite(change, signed=False)
    assert any(message in line for line in problems())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["shards"][0].update(file="../a"), "damaged: Expected `str` matching regex"),
        (lambda m: m["shards"][0].pop("rows"), "damaged: Object missing required field `rows`"),
        (lambda m: m["config"].update(max_length=1 << 40), "damaged: Expected `int` <= 16777216"),
        (lambda m: m["config"].update(seed=-1), "damaged: config: --seed: -1 is not between"),
        (lambda m: m["config"].update(seed="x"), "damaged: config: Expected `int`"),
        (lambda m: m.update(rows=0), "damaged: Expected `int` >= 1 - at `$.rows`"),
    ],
)
def test_a_manifest_of_no_use(packed: Path, change: Callable[[Any], Any], message: str) -> None:
    rewrite(change)
    assert_error(packer("verify", "out"), 1, f"out/manifest.json: {message}")


def test_a_fim_rate_that_no_run_with_its_tokenizer_has(packed: Path) -> None:
    rewrite(lambda manifest: manifest["config"].update(fim_rate=0.5))
    result = packer("verify", "out", "--against-inputs", "-q")
    assert result.exit_code == 1
    assert "manifest.json: damaged: config: --fim-rate: needs three tokens" in result.stdout
