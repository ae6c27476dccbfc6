"""PackedDataset in DataLoaders: the rows of the shards, in any process, and errors in time."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import packer, random_ids
from torch.utils.data import DataLoader, Subset

import packer_cli.torch
from packer_cli import open_packed
from packer_cli.errors import DataError, UsageError
from packer_cli.result.reader import PackedDirectory, ragged_of, rows_of
from packer_cli.torch import PackedDataset, padded_collate, varlen_collate

L = 64
FIXED = {
    "input_ids": torch.int32,
    "labels": torch.int32,
    "attention_mask": torch.uint8,
    "position_ids": torch.int32,
}


@pytest.mark.parametrize("name", packer_cli.torch.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert len(inspect.getdoc(getattr(packer_cli.torch, name)) or "") > 40


def tokenized(folder: Path) -> Path:
    """The documents of data.jsonl."""
    result = packer("tokenize", folder / "data.jsonl", "-o", folder / "tokens", "-q")
    assert result.exit_code == 0, result.stderr
    return folder / "tokens"


@pytest.fixture(scope="module", params=["packed", "view"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 900 rows of 64 tokens in several shards, packed and as a view."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "data.jsonl").write_text(random_ids(1200))
    source, how = folder / "data.jsonl", list[str]()
    if request.param == "view":
        source, how = tokenized(folder), ["--view"]
    result = packer(
        "pack", source, "-l", L, "-o", folder / "out", "-q", "--position-ids",
        "--unit-bytes", "100K", *how,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert len(open_packed(folder / "out").manifest["shards"]) > 2
    return folder / "out"


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(packed, tmp_path / "copy")
    return tmp_path / "copy"


def stored(directory: Path) -> dict[str, Any]:
    """Every row, by the reader of packer alone: name -> array, and the rows' boundaries."""
    opened = open_packed(directory)
    batches = [b for shard in opened.manifest["shards"] for b in opened.batches(shard)]
    columns: dict[str, Any] = {
        name: np.concatenate([rows_of(batch.column(name)) for batch in batches]) for name in FIXED
    }
    columns["cu_seqlens"] = []
    for batch in batches:
        values, edges = ragged_of(batch.column("cu_seqlens"))
        columns["cu_seqlens"] += np.split(values[: edges[-1]], edges[1:-1])
    return columns


def test_rows_are_those_of_the_shards(packed: Path) -> None:
    dataset, expected = PackedDataset(packed), stored(packed)
    assert len(dataset) == len(expected["input_ids"]) > 500
    assert dataset.max_length == L
    for row in (0, 1, len(dataset) // 2, len(dataset) - 1, -1):
        tensors = dataset[row]
        assert set(tensors) == {*FIXED, "cu_seqlens"}
        for name, values in tensors.items():
            assert values.dtype == FIXED.get(name, torch.int32)
            assert values.tolist() == expected[name][row].tolist()


def test_a_batch_is_gathered_whole_and_its_tensors_may_be_written_to(packed: Path) -> None:
    dataset, expected = PackedDataset(packed), stored(packed)
    chosen = np.random.default_rng(1).permutation(len(dataset))
    batch = dataset.__getitems__(chosen.tolist())
    for name, values in batch.columns.items():
        assert torch.equal(values, torch.from_numpy(expected[name][chosen]))
        values.zero_()
    for k, row in enumerate(batch):
        assert row["cu_seqlens"].tolist() == expected["cu_seqlens"][chosen[k]].tolist()
        assert torch.equal(batch[k - len(batch)]["cu_seqlens"], row["cu_seqlens"])
        row["cu_seqlens"].zero_()
    assert torch.equal(dataset[0]["input_ids"], torch.from_numpy(expected["input_ids"][0]))


@pytest.mark.parametrize("row", [10**6, -(10**6), 2**63, -(2**80)])
def test_a_row_that_is_not_there_is_an_index_error(packed: Path, row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of"):
        PackedDataset(packed)[row]


def test_threads_may_share_a_dataset(folder: Path) -> None:
    """While one maps a shard others gather, as with torchdata's ParallelMapper."""
    (folder / "data.jsonl").write_text(random_ids(1200))
    arguments = ["-l", L, "-o", "out", "-q", "--position-ids", "--unit-bytes", "5K"]
    assert packer("pack", "data.jsonl", *arguments).exit_code == 0
    expected = torch.from_numpy(stored(Path("out"))["input_ids"])
    assert len(open_packed("out").manifest["shards"]) > 50
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def is_right(dataset: PackedDataset, seed: int) -> bool:
        rows = np.random.default_rng(seed).permutation(len(dataset))
        parts = [dataset.__getitems__(rows[k : k + 16]) for k in range(0, len(rows), 16)]
        return torch.equal(torch.cat([part.columns["input_ids"] for part in parts]), expected[rows])

    try:
        for _ in range(3):
            with ThreadPoolExecutor(8) as pool:
                assert all(pool.map(partial(is_right, PackedDataset("out")), range(8)))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("how", ["no workers", "fork", "spawn"])
def test_loaders_give_every_row_once_in_order(packed: Path, how: str) -> None:
    dataset, expected = PackedDataset(packed), stored(packed)
    workers: dict[str, Any] = {}
    if how != "no workers":
        workers = {"num_workers": 2, "multiprocessing_context": how}
    batches = list(
        DataLoader(
            dataset, batch_size=7, collate_fn=partial(padded_collate, config=None), **workers
        )
    )
    for name in ("input_ids", "labels", "position_ids"):
        values = torch.cat([batch[name] for batch in batches])
        assert torch.equal(values, torch.from_numpy(expected[name]).long())


def test_chosen_columns_stack_by_the_default_collator_too(packed: Path) -> None:
    dataset = PackedDataset(packed, ["labels", "input_ids"])
    batch = next(iter(DataLoader(dataset, batch_size=3)))
    assert list(batch) == ["labels", "input_ids"]
    assert torch.equal(batch["labels"], torch.from_numpy(stored(packed)["labels"][:3]))


def test_a_subset_is_a_dataset(packed: Path) -> None:
    loader = DataLoader(
        Subset(PackedDataset(packed), [5, 3]),
        batch_size=2,
        collate_fn=partial(padded_collate, config=None),
    )
    (batch,) = loader
    assert torch.equal(batch["input_ids"].int(), torch.from_numpy(
        stored(packed)["input_ids"][[5, 3]]
    ))  # fmt: skip


def test_a_relative_path_holds_elsewhere(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers and configuration tools change the directory, workers may start in another."""
    monkeypatch.chdir(packed.parent)
    dataset, pickled = PackedDataset(packed.name), pickle.dumps(PackedDataset(packed.name))
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)  # noqa: S301
    assert torch.equal(dataset[3]["input_ids"], again[3]["input_ids"])


def test_a_url_needs_a_cache_and_a_local_path_none(packed: Path) -> None:
    with pytest.raises(UsageError, match="s3://bucket/rows: a URL, and no cache= says where"):
        PackedDataset("s3://bucket/rows")
    for options in ({"cache": "cache"}, {"cache_bytes": 1 << 30}):
        with pytest.raises(UsageError, match=f"{packed} is local and read in place"):
            PackedDataset(packed, **options)
    with pytest.raises(UsageError, match="a cache is a local directory"):
        PackedDataset("s3://bucket/rows", cache="s3://bucket/cache")
    with pytest.raises(UsageError, match="cache_bytes: 0 is less than 1"):
        PackedDataset("s3://bucket/rows", cache="cache", cache_bytes=0)


def test_it_pickles_as_its_path(packed: Path) -> None:
    dataset = PackedDataset(packed)
    dataset[0]
    assert len(pickle.dumps(dataset)) < 1000
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert torch.equal(again[3]["input_ids"], dataset[3]["input_ids"])


def test_shifted_labels_never_pass_as_labels(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(random_ids(50))
    arguments = ["pack", tmp_path / "data.jsonl", "-l", L, "-q"]
    for out, options in (("plain", []), ("shifted", ["--label-shift", "pre"])):
        assert packer(*arguments, "-o", tmp_path / out, *options).exit_code == 0
    plain, shifted = (PackedDataset(tmp_path / name) for name in ("plain", "shifted"))
    assert "labels" not in shifted[0]
    batch = varlen_collate(shifted.__getitems__(range(len(shifted))), config=None)
    assert "labels" not in batch
    expected = varlen_collate(plain.__getitems__(range(len(plain))), config=None)["labels"]
    assert torch.equal(batch["shift_labels"][:, :-1], expected[:, 1:])


def error_of(path: Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        PackedDataset(path, **options)
    assert caught.value.tip
    return caught.value


def test_a_directory_still_being_written(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    (copy / ".packer").mkdir()
    assert "the run that writes it has not finished" in error_of(copy).message


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "no such directory" in error_of(tmp_path / "nothing").message


def test_a_missing_shard(copy: Path) -> None:
    shard = sorted(copy.glob("*.arrow"))[1]
    shard.unlink()
    assert error_of(copy).message == f"{shard}: is missing"


def test_a_shard_cut_short(copy: Path) -> None:
    shard = sorted(copy.glob("*.arrow"))[-1]
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size // 2)
    message = error_of(copy).message
    assert message == f"{shard}: has {size // 2} bytes, the manifest says {size}"


def edit(copy: Path, **changes: Any) -> None:
    path = copy / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_another_format_version(copy: Path) -> None:
    edit(copy, format_version=99)
    assert "format version 99, this packer reads 1" in error_of(copy).message


def test_an_empty_data_set(copy: Path) -> None:
    edit(copy, rows=0, shards=[])
    assert "rows" in error_of(copy).message


def test_another_tokenizer(folder: Path) -> None:
    (folder / "data.jsonl").write_text('{"text": "one"}\n')
    assert packer("pack", "data.jsonl", "-l", 8, "-t", "bytes", "-o", "out", "-q").exit_code == 0
    digest = open_packed("out").manifest["tokenizer"]["sha256"]
    assert len(PackedDataset("out", tokenizer_sha256=digest.upper())) == 1
    with pytest.raises(UsageError, match=r"'tok/tokenizer.json' is not a digest"):
        PackedDataset("out", tokenizer_sha256="tok/tokenizer.json")
    error = error_of(Path("out"), tokenizer_sha256="0" * 64)
    assert error.message.startswith(
        f"{folder / 'out'}: was packed with bytes, sha256 {digest}; the trainer's"
    )


def test_token_ids_of_no_tokenizer(packed: Path) -> None:
    assert "without a tokenizer" in error_of(packed, tokenizer_sha256="0" * 64).message


def test_a_column_that_is_not_there(packed: Path) -> None:
    with pytest.raises(UsageError, match="columns: 'label' is not one of input_ids, labels"):
        PackedDataset(packed, ["label"])
    with pytest.raises(UsageError, match="columns: is empty; the directory has input_ids, labels"):
        PackedDataset(packed, [])


def test_a_directory_that_changed_while_it_was_open(copy: Path) -> None:
    pickled = pickle.dumps(PackedDataset(copy))
    edit(copy, sha256="another")
    with pytest.raises(DataError, match="changed since the dataset was opened"):
        len(pickle.loads(pickled))  # noqa: S301


class TestAView:
    """What a packed directory does not have: tokens elsewhere."""

    @pytest.fixture
    def view(self, folder: Path) -> Path:
        (folder / "data.jsonl").write_text(random_ids(200))
        tokenized(folder)
        result = packer("pack", "tokens", "-l", L, "--view", "-o", "view", "-q")
        assert result.exit_code == 0, result.stderr
        return Path("view")

    def test_its_tokens_are_found_where_they_are(self, view: Path) -> None:
        expected = PackedDataset(view)[3]["labels"]
        Path("tokens").rename("moved")
        with pytest.raises(DataError, match="its tokenized directory tokens is gone"):
            PackedDataset(view)
        dataset = PackedDataset(view, tokens="moved")
        assert torch.equal(dataset[3]["labels"], expected)
        again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
        assert torch.equal(again[3]["labels"], expected)

    def test_workers_elsewhere_find_them(
        self, view: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
    ) -> None:
        dataset = pickle.dumps(PackedDataset(view))
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        assert len(pickle.loads(dataset)[0]["input_ids"]) == L  # noqa: S301

    def test_other_tokens_are_other_rows(self, view: Path) -> None:
        before = PackedDataset(view).fingerprint
        Path("data.jsonl").write_text(random_ids(200).replace("7", "8"))
        for arguments in (["tokenize", "data.jsonl", "-o", "tokens"],
                          ["pack", "tokens", "-l", str(L), "--view", "-o", "view"]):  # fmt: skip
            assert packer(*arguments, "-q", "--overwrite").exit_code == 0
        assert PackedDataset(view).fingerprint != before

    def test_references_that_are_changed_while_they_are_mapped(self, view: Path) -> None:
        dataset = PackedDataset(view)
        dataset[0]
        (shard,) = open_packed(view).facts.shards
        with open(view / shard.file, "r+b") as file:
            data = file.read()
            file.seek(len(data) // 2)
            file.write(b"\xff" * (len(data) // 4))
        with pytest.raises(DataError, match="view: row"):
            dataset.__getitems__(range(len(dataset)))


def test_a_directory_that_is_packed_again_while_it_is_open(folder: Path) -> None:
    """Other rows may be as many and have as many bytes: nothing of theirs is read."""
    (folder / "data.jsonl").write_text(random_ids(300))
    arguments = ["pack", "data.jsonl", "-l", L, "-o", "out", "-q", "--unit-bytes", "20K"]
    assert packer(*arguments).exit_code == 0
    dataset, fingerprint = PackedDataset("out"), PackedDataset("out").fingerprint
    first = dataset[0]["input_ids"]
    os.utime("out/manifest.json")  # that alone is no change
    assert dataset[len(dataset) // 2]["input_ids"].any()
    assert packer(*arguments, "--seed", 5, "--overwrite").exit_code == 0
    assert torch.equal(dataset[0]["input_ids"], first)  # its shard is mapped
    with pytest.raises(DataError, match="was replaced by another result while it was read"):
        dataset[-1]
    assert PackedDataset("out").fingerprint != fingerprint
    assert packer(*arguments, "--overwrite").exit_code == 0
    assert PackedDataset("out").fingerprint == fingerprint


def test_a_directory_that_is_packed_again_while_a_shard_is_mapped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "data.jsonl").write_text(random_ids(300))
    arguments = ["pack", "data.jsonl", "-l", L, "-o", "out", "-q"]
    assert packer(*arguments).exit_code == 0
    dataset, stored = PackedDataset("out"), PackedDirectory.stored

    def packed_again(self: PackedDirectory, shard: dict[str, Any]) -> Any:
        monkeypatch.setattr(PackedDirectory, "stored", stored)
        assert packer(*arguments, "--seed", 5, "--overwrite").exit_code == 0
        return stored(self, shard)

    monkeypatch.setattr(PackedDirectory, "stored", packed_again)
    with pytest.raises(DataError, match="was replaced by another result while it was read"):
        dataset[0]


def test_a_shard_lost_on_the_way_is_named_by_the_worker_that_wants_it(copy: Path) -> None:
    dataset = PackedDataset(copy)
    shutil.rmtree(copy)
    loader = DataLoader(
        dataset, batch_size=2, collate_fn=partial(padded_collate, config=None), num_workers=1
    )
    message = r"(?s)shard-00000-000-\w+\.arrow: is missing\ntip: copy the directory again"
    with pytest.raises(DataError, match=message):
        next(iter(loader))
