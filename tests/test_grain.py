"""Data sources of Grain: rows and documents in numpy arrays, the same wherever they are opened."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import jsonl, random_texts, succeeds
from varied_results import CARRY, write_carried

from packer_cli import open_packed
from packer_cli.errors import DataError, UsageError
from packer_cli.grain import DocumentSource, PackedSource


@pytest.fixture(scope="module", autouse=True)
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, a view and documents with carried columns of every type."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = write_carried(folder)
        succeeds("pack", *options, "-q", "-o", "packed")
        succeeds("tokenize", "a.jsonl", *CARRY, "-q", "-o", "tokens")
        succeeds("pack", "tokens", "-l", 32, "--view", "-q", "-o", "view")
        for name in ("packed", "view"):
            succeeds("export", name, "--to", "parquet", "-q", "-o", f"{name}-rows")
        succeeds("export", "tokens", "--to", "documents", "-q", "-o", "documents")
    return folder


@pytest.mark.parametrize("name", ["packed", "view"])
def test_rows_are_those_of_the_directory(results: Path, name: str) -> None:
    source, packed = PackedSource(results / name), open_packed(results / name)
    assert len(source) == len(packed) > 3
    assert set(source.columns) == set(packed.facts.config.columns) - {"segments"}
    expected = pq.read_table(results / f"{name}-rows/packed-00000.parquet").to_pylist()
    for row in (*range(len(source)), -1):
        found = {column: value.tolist() for column, value in source[row].items()}
        assert found == {column: expected[row][column] for column in source.columns}
    with pytest.raises(IndexError):
        source[len(source)]


def test_documents_are_those_of_the_export(results: Path) -> None:
    source = DocumentSource(results / "tokens")
    expected = pq.read_table(results / "documents/part-00000.parquet").to_pylist()
    assert len(source) == len(expected)
    for document in (*range(len(source)), -1):
        found = {name: value.tolist() for name, value in source[document].items()}
        assert found == expected[document]
        assert source[document]["input_ids"].dtype == np.int32
    with pytest.raises(IndexError):
        source[-len(source) - 1]


def test_documents_at_a_url_are_refused() -> None:
    with pytest.raises(UsageError, match="s3://b/tokens: a URL, and documents are read from local"):
        DocumentSource("s3://b/tokens")


@pytest.mark.parametrize("kind", [PackedSource, DocumentSource])
def test_they_are_pickled_as_their_paths(tmp_path: Path, kind: type) -> None:
    """Another process prints the same, and does not read what has taken their place."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(*random_texts(30)))
    command = ["pack", "-l", 64] if kind is PackedSource else ["tokenize"]
    command += [tmp_path / "a.jsonl", "-t", "bytes", "-q", "-o", tmp_path / "out"]
    succeeds(*command)
    source = kind(tmp_path / "out")
    assert len(source[0]) > 1  # something is mapped
    saved = pickle.dumps(source)
    assert len(saved) < 1000
    again = pickle.loads(saved)  # noqa: S301 our own
    assert repr(again) == repr(source)
    assert str(tmp_path / "out") in repr(source)
    assert again[3]["input_ids"].tolist() == source[3]["input_ids"].tolist()
    (tmp_path / "a.jsonl").write_bytes(jsonl(*random_texts(31)))
    succeeds(*command, "--overwrite")
    with pytest.raises(DataError, match="changed since"):
        len(pickle.loads(saved))  # noqa: S301


@pytest.mark.parametrize("balance", [{}, {"balance": "order", "hidden_size": 64}])
def test_steps(results: Path, balance: dict[str, object]) -> None:
    """Ranks share the rows of an epoch; another seed is another order."""
    source = PackedSource(results / "packed")
    sizes = {"world_size": 2, "batch_size": 1, "micro_batches": 2, **balance}
    each = len(source) // 2
    taken = [
        row for step in range(-(-each // 2)) for rank in range(2)
        for row in source.rows_of(step, rank, **sizes).tolist()
    ]  # fmt: skip
    assert len(taken) == len({*taken}) == each * 2
    assert taken != sorted(taken)
    other = source.rows_of(0, 0, **sizes, seed=1).tolist()
    assert source.rows_of(0, 0, **sizes).tolist() == taken[: len(other)] != other
    assert "_steps" not in pickle.loads(pickle.dumps(source)).__dict__  # noqa: S301


@pytest.mark.parametrize(
    "options",
    [{"rank": 1}, {"world_size": 0}, {"batch_size": 0}, {"balance": "step"}, {"step": -1}],
)
def test_steps_that_are_refused(results: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        PackedSource(results / "packed").rows_of(**({"step": 0} | options))


def test_sources_of_a_recipe(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(*random_texts(9)))
    tables = "".join(f'[[source]]\nname = "{name}1"\ninputs = ["{name}.jsonl"]\n' for name in "ab")
    (tmp_path / "mix.toml").write_text(tables)
    succeeds("pack", tmp_path / "mix.toml", "-t", "bytes", "-l", 64, "-q", "-o", tmp_path / "out")
    source = PackedSource(tmp_path / "out", ["input_ids", "source"])
    found = [int(one) for row in range(len(source)) for one in source[row]["source"]]
    assert source.sources == ("a1", "b1")
    assert {*found} == {0, 1}
    assert json.loads((tmp_path / "out/manifest.json").read_text())["segments"] == len(found)
