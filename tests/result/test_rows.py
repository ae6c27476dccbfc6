"""Rows by number: of packed directories, views and results at URLs, the same from all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from disk import LocalStore
from hypothesis import given
from hypothesis import strategies as st
from support import packer, random_ids

from packer_cli import open_packed
from packer_cli.errors import DataError
from packer_cli.result.cached import Cache, open_cached
from packer_cli.result.reader import PackedDirectory

PAIRS = [
    {"prompt": "a" * (n % 7), "chosen": "b" * (n % 5 + 1), "rejected": "c" * (n % 3 + 1)}
    for n in range(120)
]
FORMS: dict[str, list[object]] = {
    "plain": ["-l", 64],
    "all columns": ["-l", 64, "--position-ids", "--segment-multiple", 8, "--label-shift", "pre"],
    "few columns": ["-l", 64, "--columns", "input_ids,cu_seqlens"],
    "pairs": ["-l", 64, "--shape", "preference", "-t", "bytes"],
}


class Store(LocalStore):
    protocol = "rows"


@pytest.fixture(scope="module", params=FORMS)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[PackedDirectory]:
    """A packed directory, itself through a URL, and where there is one a view of the same rows."""
    folder = tmp_path_factory.mktemp("results")
    data, options = folder / "data.jsonl", [*FORMS[request.param], "-q"]
    pairs = request.param == "pairs"
    data.write_text("\n".join(map(json.dumps, PAIRS)) if pairs else random_ids(300, longest=90))
    of_documents = ["--shape", "preference", "-t", "bytes"] if pairs else []
    done = packer("tokenize", data, "-o", folder / "tokens", "-q", *of_documents)
    assert done.exit_code == 0, done.stderr
    options = [one for one in options if one not in of_documents]
    for name, more in (("out", []), ("view", ["--view"])):
        done = packer("pack", folder / "tokens", "-o", folder / name, *options, *more)
        if "--columns" in options and more:
            continue
        assert done.exit_code == 0, done.stderr
    fsspec.register_implementation("rows", Store, clobber=True)
    remote = open_cached(f"rows://{folder / 'out'}", Cache(folder / "cache"))
    views = [open_packed(folder / "view")] if (folder / "view/manifest.json").exists() else []
    return [open_packed(folder / "out"), remote, *views]


def all_rows(packed: PackedDirectory) -> Any:
    batches = [batch for shard in packed.facts.shards for batch in packed.batches(shard)]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


@given(st.data())
def test_rows_in_any_order(results: list[PackedDirectory], data: st.DataObject) -> None:
    expected = all_rows(results[0])
    numbers = data.draw(st.lists(st.integers(0, expected.num_rows - 1), min_size=1, max_size=40))
    names = data.draw(st.none() | st.lists(st.sampled_from(expected.schema.names), min_size=1))
    wanted = expected.take(pa.array(numbers))
    if names is not None:
        wanted = wanted.select([name for name in expected.schema.names if name in names])
    for packed in results:
        taken = packed.take(np.array(numbers), names)
        taken.validate(full=True)
        assert taken.equals(wanted)
        assert taken.schema.metadata == expected.schema.metadata


def test_a_negative_row(results: list[PackedDirectory]) -> None:
    for packed in results:
        with pytest.raises(IndexError, match="row -1 of"):
            packed.take(np.array([0, -1]))


def test_a_shard_without_a_column_that_the_manifest_names(folder: Path) -> None:
    Path("data.jsonl").write_text(random_ids(20))
    assert packer("pack", "data.jsonl", "-l", 64, "-o", "out", "-q").exit_code == 0
    packed = open_packed("out")
    columns = (*packed.facts.config.columns, "position_ids")
    object.__setattr__(packed.facts.config, "columns", columns)
    with pytest.raises(DataError, match=r"has the columns .*, not .*, position_ids"):
        packed.take(np.array([0]))
