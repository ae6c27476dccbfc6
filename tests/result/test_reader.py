"""Results as readers have them: rows by number, their figures, and the manifest."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spoiling import edit
from support import (
    ALL_COLUMNS,
    assert_error,
    contents,
    jsonl,
    pack,
    packer,
    random_ids,
    squared_lengths_by_hand,
    succeeds,
)
from varied_results import texts

from packer_cli import open_packed
from packer_cli.errors import DataError, UsageError
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.manifest import load
from packer_cli.result.reader import (
    HEADER_BYTES,
    Joined,
    PackedDirectory,
    squared_lengths,
    squares_header,
)

FORMS: dict[str, list[object]] = {
    "plain": ["-l", 64],
    "all columns": ["-l", 64, *ALL_COLUMNS, "--segment-multiple", 8],
    "few columns": ["-l", 64, "--columns", "input_ids,cu_seqlens"],
}


@pytest.fixture(scope="module", params=FORMS)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[PackedDirectory]:
    """A packed directory, itself through a URL, and where there is one a view of the same rows."""
    folder = tmp_path_factory.mktemp("results")
    data, options = folder / "data.jsonl", [*FORMS[request.param], "-q"]
    data.write_text(random_ids(300, longest=90))
    succeeds("tokenize", data, "-o", folder / "tokens", "-q")
    for name, more in (("out", []), ("view", ["--view"])):
        done = packer("pack", folder / "tokens", "-o", folder / name, *options, *more)
        if "--columns" in options and more:
            continue
        assert done.exit_code == 0, done.stderr
    fsspec.filesystem("memory").put(str(folder / "out"), f"{folder}/out", recursive=True)
    remote = open_packed(f"memory:/{folder}/out", cache=folder / "cache")
    views = [open_packed(folder / "view")] if (folder / "view/manifest.json").exists() else []
    return [open_packed(folder / "out"), remote, *views]


def other_length(packed: PackedDirectory) -> Path:
    """A result of longer rows beside this one."""
    output = packed.path.parent / "longer"
    succeeds("pack", packed.path.parent / "tokens", "-l", 128, "-q", "--overwrite", "-o", output)
    return output


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


def test_rows_of_joined_results_in_any_order(results: list[PackedDirectory]) -> None:
    joined, one = Joined(results), len(results[0])
    assert len(joined) == one * len(results)
    order = np.random.default_rng(1).permutation(len(joined))[:99]
    assert joined.take(order) == results[0].take(order % one)  # all of them have the same rows
    with pytest.raises(IndexError, match=f"row {len(joined)} of {len(joined)}"):
        joined.take([len(joined)])
    with pytest.raises(DataError, match="do not go together: max_length is"):
        Joined([results[0], open_packed(other_length(results[0]))])


@pytest.mark.parametrize(
    "rows", [range(2, 5), (0, 0), [np.int8(1)], np.array([3, 1], np.uint16), []]
)
def test_rows_by_any_integers(results: list[PackedDirectory], rows: Any) -> None:
    expected = all_rows(results[0]).take(pa.array([*map(int, rows)], pa.int64()))
    for packed in results:
        assert packed.take(rows).equals(expected)
        for row, batch in zip(map(int, rows), expected.to_pylist(), strict=True):
            for number in (row, np.int64(row), row - len(packed)):
                own = packed[number]
                assert [*own] == expected.schema.names
                parts = own.pop("segments", {})
                assert {name: one.tolist() for name, one in own.items()} == {
                    n: batch[n] for n in own
                }
                assert [
                    dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)
                ] == (batch.get("segments", []))


@pytest.mark.parametrize(("rows", "error", "message"), [
    ([0, -1], IndexError, "row -1 of "), ([10**6], IndexError, "row 1000000 of "),
    (np.array([1 << 63], np.uint64), IndexError, "row 9223372036854775808 of "),
    *((rows, UsageError, "rows: .*expected row numbers")
      for rows in (1, [1.0], ["1"], [[1]], [True], None)),
])  # fmt: skip
def test_rows_that_are_not_there(
    results: list[PackedDirectory], rows: Any, error: type[Exception], message: str
) -> None:
    for packed in results:
        with pytest.raises(error, match=message):
            packed.take(rows)
        for number in (len(packed), -len(packed) - 1):
            with pytest.raises(IndexError, match=f"row {number} of {len(packed)}"):
                packed[number]
        with pytest.raises(UsageError, match=r"row: 1\.5 is not a whole number"):
            packed[1.5]  # type: ignore[index]
        figures = f"rows={len(packed)}, max_length=64, tokens={packed.facts.tokens})"
        assert repr(packed) == f"{type(packed).__name__}({packed.where!r}, {figures}"


def test_a_shard_without_a_column_that_the_manifest_names(folder: Path) -> None:
    Path("data.jsonl").write_text(random_ids(20))
    succeeds("pack", "data.jsonl", "-l", 64, "-o", "out", "-q")
    packed = open_packed("out")
    columns = (*packed.facts.config.columns, "position_ids")
    object.__setattr__(packed.facts.config, "columns", columns)
    with pytest.raises(DataError, match=r"has the columns .*, not .*, position_ids"):
        packed.take(np.array([0]))


# squared_lengths.npy, as it is written and read


def some_rows() -> list[int]:
    Path("a.jsonl").write_bytes(jsonl(*texts(0, 60)))
    pack("a.jsonl", "-l", 64)
    return squared_lengths_by_hand("out")


def test_squared_lengths_are_mapped(folder: Path) -> None:
    """`check_directory` compares them with the rows of every result."""
    expected = some_rows()
    packed = open_packed("out")
    sums = squared_lengths(packed)
    assert (sums.dtype, sums.tolist()) == (np.int64, expected)
    assert not sums.flags.owndata
    assert not sums.flags.writeable
    Path("a.jsonl").write_bytes(jsonl(*texts(9, 69)))
    pack("a.jsonl", "-l", 64, "--overwrite")  # with a file of the same name
    with pytest.raises(DataError, match="was replaced by another result while it was read"):
        squared_lengths(packed)


@pytest.mark.parametrize("rows", [1, 1 << 53])
def test_the_header_has_one_length(rows: int) -> None:
    assert len(squares_header(rows)) == HEADER_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda path: path.write_bytes(b""), "has 0 bytes, the manifest says "),
     (lambda path: np.save(path, np.load(path) + 1), "its sha256 is "),
     (Path.unlink, "cannot read: No such file or directory")],
)  # fmt: skip
def test_a_file_of_squared_lengths_that_is_not_the_manifests(
    folder: Path, change: Callable[[Path], object], message: str
) -> None:
    some_rows()
    path = Path("out", SQUARED_LENGTHS)
    change(path)
    with pytest.raises(DataError, match=re.escape(f"{path}: {message}")):
        squared_lengths(open_packed("out"))


# The manifest: typed, with all that a newer packer has added to it


ADDED = {"since": "0.9", "more": [1, None, {"x": 0.5}]}


@pytest.fixture
def newer(folder: Path) -> dict[str, Any]:
    """The manifest of `out`, as a packer that says more has written it."""
    (folder / "a.jsonl").write_bytes(jsonl(*(f"text {i}" for i in range(20))))
    pack("a.jsonl", "-l", 16, "--balance", "attention", "--unit-bytes", 60)
    edit(_add)
    manifest: dict[str, Any] = json.loads(Path("out/manifest.json").read_text())
    return manifest


def _add(manifest: dict[str, Any]) -> None:
    places = [manifest, manifest["config"], manifest["tokenizer"], manifest["histograms"]]
    places += [manifest["attention_cost"], manifest["attention_cost"]["after"]]
    places += [one for name in ("inputs", "units", "shards") for one in manifest[name]]
    for place in places:
        items = list(place.items())
        place.clear()
        place.update(dict([*items[:1], ("added", ADDED), *items[1:]]))  # not at the end


def test_what_a_newer_packer_adds_is_kept(newer: dict[str, Any]) -> None:
    packed, manifest = open_packed("out"), load("out")
    assert packed.manifest == manifest.document == newer
    assert manifest.config.max_length == newer["config"]["max_length"] == 16
    assert [shard.file for shard in manifest.shards] == [one["file"] for one in newer["shards"]]
    for again in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):  # noqa: S301 ours
        assert (again.manifest, again.facts, len(again)) == (newer, packed.facts, len(packed))
    for typed, plain in zip(packed.facts.shards, newer["shards"], strict=True):
        assert list(packed.batches(typed)) == list(packed.batches(plain))
    for by, name in (("shard", "shards"), ("input", "inputs")):
        content = json.loads(packer("stats", "out", "--json", "--by", by).stdout)
        assert content[f"by_{by}"] == newer[name]
        assert all(content[one] == newer[one] for one in ("config", "tokenizer", "histograms"))


def test_and_the_result_is_used_like_any(newer: dict[str, Any]) -> None:
    for command in (("verify", "out", "--against-inputs", "--sample", "all", "-q"),
                    ("stats", "out", "--deep"), ("show", "out", "0"),
                    ("export", "out", "--to", "trl", "-o", "e", "-q")):  # fmt: skip
        assert packer(*command).exit_code == 0, command
    pack_again = "pack", "a.jsonl", "-l", 8, "-t", "bytes", "-o", "out", "--overwrite", "-q"
    path = Path("out/manifest.json")
    text = path.read_text()
    path.write_text(text.replace('"since": "0.9"', '"since": "0.8"', 1))
    # the checksum covers what was added: without it, nobody knows whose the files are
    assert_error(packer(*pack_again), 2, "manifest.json: was edited, so it does not say which")
    path.write_text(text)
    succeeds(*pack_again)
    assert "added" not in contents("out")["manifest.json"].decode()
