"""PackedDataset gives the rows of the shards, whatever they lie in: one table of all forms."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import TOKENS_OF, pack_sources, run, write_sources
from support import ALL_COLUMNS, random_ids
from torch.utils.data import DataLoader, Subset

import packer_cli.torch
from packer_cli import open_packed
from packer_cli.errors import DataError, UsageError
from packer_cli.torch import PackedDataset, PackedSampler, padded_collate

L = 64
TYPES = {
    "input_ids": torch.int32, "labels": torch.int32, "attention_mask": torch.uint8,
    "position_ids": torch.int32, "cu_seqlens": torch.int32, "source": torch.int32,
}  # fmt: skip
SMALL = {"block_rows": 16, "window_blocks": 4}
NAMES = tuple(TOKENS_OF)


def pack(source: Path, out: Path, *more: object) -> Path:
    run("pack", source, "-l", L, "-o", out, *more)
    return out


def collate(rows: Any) -> Any:
    return padded_collate(rows, config=None)


@dataclass
class Form:
    """A dataset of `paths`, and what is in the local directories of the same results."""

    paths: list[Any]
    directories: list[Path]
    how: dict[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ("input_ids", "labels", "attention_mask", "cu_seqlens",
                                "position_ids")  # fmt: skip

    def open(self, **more: Any) -> PackedDataset:
        return PackedDataset(self.paths, **self.how, **more)

    def rows(self) -> list[dict[str, Any]]:
        """Every row, by the reader of packer alone."""
        found = []
        for directory in self.directories:
            opened = open_packed(directory)
            source = [k for k, one in enumerate(opened.facts.sources) for _ in range(*one.inputs)]
            for shard in opened.facts.shards:
                for batch in opened.batches(shard):
                    for row in batch.to_pylist():
                        segments = row.pop("segments")
                        if source:
                            row["source"] = [source[one["file"]] for one in segments]
                        found.append({name: row[name] for name in self.columns})
        return found


@pytest.fixture(scope="module")
def folder_of_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`packed` in several shards, `other`, and a `view`; a `recipe`'s rows of three sources."""
    folder = tmp_path_factory.mktemp("results")
    for name, count in (("packed", 400), ("other", 60), ("viewed", 90)):
        (folder / f"{name}.jsonl").write_text(random_ids(count))
    pack(folder / "packed.jsonl", folder / "packed", *ALL_COLUMNS, "--unit-bytes", "20K")
    assert len(open_packed(folder / "packed").facts.shards) > 3
    pack(folder / "other.jsonl", folder / "other", *ALL_COLUMNS)
    run("tokenize", folder / "viewed.jsonl", "-o", folder / "tokens")
    pack(folder / "tokens", folder / "view", *ALL_COLUMNS, "--view")
    files = write_sources(folder, 60)
    for name, view in (("recipe", False), ("recipe-view", True)):
        pack_sources(
            folder / name, files, {"signs": {"epochs": 2.0}}, max_length=L, view=view,
            unit_bytes=9_000,
        )  # fmt: skip
    return folder


FORMS = ("packed", "view", "url", "joined", "recipe", "recipe-view")


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, folder_of_results: Path) -> Form:
    name, folder = request.param, folder_of_results
    cache = {"cache": folder / "cache"}
    if name == "url":
        return Form([f"local://{folder}/packed"], [folder / "packed"], cache)
    if name == "joined":
        local = [folder / one for one in ("packed", "view", "other")]
        return Form([*local[:2], f"local://{folder}/other"], local, cache)
    columns = ("input_ids", "labels", "cu_seqlens", "source")
    if "recipe" in name:
        return Form([folder / name], [folder / name], {"columns": columns}, columns)
    return Form([folder / name], [folder / name])


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: values.tolist() for name, values in row.items()}


@pytest.mark.parametrize("name", packer_cli.torch.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert len(inspect.getdoc(getattr(packer_cli.torch, name)) or "") > 40


def test_rows_are_those_of_the_shards(form: Form) -> None:
    dataset, expected = form.open(), form.rows()
    assert (len(dataset), dataset.max_length) == (len(expected), L)
    assert [plain(row) for row in dataset] == expected
    assert plain(dataset[-1]) == expected[-1]
    tokens = sum(row["cu_seqlens"][-1] for row in expected)
    assert f"rows={len(expected)}, max_length={L}, tokens={tokens})" in repr(dataset)
    assert str(dataset.paths[0]) in repr(dataset)
    assert {name: values.dtype for name, values in dataset[0].items()} == {
        name: TYPES[name] for name in form.columns
    }
    for row in (0, len(dataset) // 2, -1):
        path, number = dataset.result_of(row)
        alone = PackedDataset(path, **(form.how if str(path).startswith("local:") else {}))
        assert torch.equal(alone[number]["input_ids"], dataset[row]["input_ids"])


def test_a_batch_is_gathered_in_any_order_and_its_tensors_may_be_written_to(form: Form) -> None:
    dataset, expected = form.open(), form.rows()
    chosen = np.random.default_rng(1).integers(-len(expected), len(expected), 300).tolist()
    batch = dataset.__getitems__(chosen)
    assert [plain(row) for row in batch] == [expected[row] for row in chosen]
    for values in batch.columns.values():
        values.zero_()
    assert plain(dataset[0]) == expected[0]
    for row in (len(expected), -len(expected) - 1, 2**63, -(2**80)):
        with pytest.raises(IndexError, match=f"row {row} of {len(expected)}"):
            dataset[row]
        with pytest.raises(IndexError):
            dataset.result_of(row)


@pytest.mark.parametrize("how", ["no workers", "fork"])
def test_loaders_give_every_row_once_in_one_order(form: Form, how: str) -> None:
    dataset, expected = form.open(), form.rows()
    workers = {} if how == "no workers" else {"num_workers": 2, "multiprocessing_context": how}
    order = list(PackedSampler(dataset, **SMALL))
    assert sorted(order) == list(range(len(expected)))
    loader: Any = DataLoader(
        dataset, 7, sampler=PackedSampler(dataset, **SMALL), collate_fn=collate, **workers
    )
    batches = list(loader)
    for name in ("input_ids", "labels"):
        found = torch.cat([batch[name] for batch in batches]).tolist()
        assert found == [expected[row][name] for row in order]
    if "source" in form.columns:
        rows = dataset.__getitems__(order)
        found = torch.cat([batch["source_ids"] for batch in batches])
        assert torch.equal(found, collate(rows)["source_ids"])


def test_it_pickles_as_its_paths_and_is_the_same_elsewhere(
    form: Form, folder_of_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers change the directory, workers may start in another."""
    monkeypatch.chdir(folder_of_results)
    paths = [path.name if isinstance(path, Path) else path for path in form.paths]
    dataset = PackedDataset(paths, **form.how)
    dataset[0]
    dataset.note = "a subclass may hold more"
    pickled = pickle.dumps(dataset)
    at_urls = [path for path in form.paths if isinstance(path, str)]
    assert len(pickled) < 2500 + 5000 * len(at_urls)  # whose manifests go along
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)  # noqa: S301
    assert [plain(again[row]) for row in (3, -1)] == [plain(dataset[row]) for row in (3, -1)]
    for name in ("fingerprint", "sources", "paths", "note"):
        assert getattr(again, name) == getattr(dataset, name)


def test_threads_may_share_a_dataset(form: Form) -> None:
    """While one maps a shard others gather, as with torchdata's ParallelMapper."""
    expected = torch.tensor([row["input_ids"] for row in form.rows()])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def is_right(dataset: PackedDataset, seed: int) -> bool:
        rows = np.random.default_rng(seed).permutation(len(dataset))
        parts = [dataset.__getitems__(rows[k : k + 16]) for k in range(0, len(rows), 16)]
        return torch.equal(torch.cat([part.columns["input_ids"] for part in parts]), expected[rows])

    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(partial(is_right, form.open()), range(8)))
    finally:
        sys.setswitchinterval(before)


def test_chosen_columns_and_a_subset(folder_of_results: Path) -> None:
    dataset = PackedDataset(folder_of_results / "packed", ["labels", "input_ids"])
    batch = next(iter(DataLoader(dataset, batch_size=3)))
    assert list(batch) == ["labels", "input_ids"]
    whole = PackedDataset(folder_of_results / "packed")
    assert torch.equal(batch["labels"], torch.stack([whole[row]["labels"] for row in range(3)]))
    (batch,) = DataLoader(Subset(whole, [5, 3]), batch_size=2, collate_fn=collate)
    assert batch["input_ids"].tolist() == [whole[row]["input_ids"].tolist() for row in (5, 3)]


# --- what cannot be opened ---


def _edited(copy: Path, **changes: Any) -> None:
    path = copy / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _text(folder: Path) -> Path:
    (folder / "text.jsonl").write_text('{"text": "one"}\n' * 9)
    return pack(folder / "text.jsonl", folder / "text", "-t", "bytes")


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "PackedDataset: got no path"),
    ("packed", {"columns": ["label"]}, "columns: 'label' is not one of input_ids, labels"),
    ("packed", {"columns": ["source"]}, "'source': .*packed has no record of the sources"),
    (["recipe", "few"], {"columns": ["attention_mask"]}, "columns: 'attention_mask' is not one of"),
    ("text", {"tokenizer_sha256": "0" * 64}, "its tokenizer is bytes, sha256 .*; tokenizer_sha256"),
    ("packed", {"tokens": "tokens"}, "packed is not a view"),
    ("packed", {"cache": "s3://b/c"}, "s3://b/c: a URL, and cache= names a local directory"),
    (["packed", "long"], {}, "max_length is 64 in the first and 128 in the second"),
    (["packed", "multiple"], {}, "the segment multiple is 1 in the first and 8 in the second"),
    (["recipe", "few"], {}, "recipe has a column attention_mask, .*few has none"),
    (["packed", "text"], {}, "the tokenizer is none in the first and bytes, sha256"),
]  # fmt: skip


@pytest.fixture(scope="module")
def unlike(folder_of_results: Path) -> Path:
    """Results that do not go with `packed`."""
    folder = folder_of_results
    files = {name: folder / f"{name}.jsonl" for name in NAMES}
    columns = ("input_ids", "labels", "cu_seqlens")
    pack_sources(folder / "few", files, max_length=L, columns=columns)
    _text(folder)
    for name, options in (("long", ["-l", 128]), ("multiple", ["--segment-multiple", 8])):
        pack(folder / "other.jsonl", folder / name, *options)
    return folder


@pytest.mark.parametrize(("names", "how", "message"), WRONG)
def test_what_is_refused(
    unlike: Path, monkeypatch: pytest.MonkeyPatch, names: Any, how: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(unlike)
    with pytest.raises((DataError, UsageError), match=message):
        PackedDataset(names, **how)


# --- what changes while it is open ---


def test_a_result_that_changed_since_it_was_pickled(
    folder_of_results: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder_of_results / "packed", tmp_path / "copy")
    other = folder_of_results / "other"
    state = PackedSampler(PackedDataset([copy, other])).state_dict()
    PackedSampler(PackedDataset([copy, other])).load_state_dict(state)
    pickled = [pickle.dumps(PackedDataset(paths)) for paths in (copy, [other, copy])]
    _edited(copy, sha256="another")
    for one in pickled:
        with pytest.raises(DataError, match=r"copy/manifest\.json: changed since the dataset was"):
            len(pickle.loads(one))  # noqa: S301
    with pytest.raises(DataError, match="the sampler's state has data"):
        PackedSampler(PackedDataset([other, copy])).load_state_dict(state)


def test_a_directory_that_is_packed_again_while_it_is_open(folder: Path) -> None:
    """Other rows may be as many and have as many bytes: nothing of theirs is read."""
    (folder / "data.jsonl").write_text(random_ids(300))
    arguments = ["pack", "data.jsonl", "-l", L, "-o", "out", "--unit-bytes", "20K"]
    run(*arguments)
    dataset, fingerprint = PackedDataset("out"), PackedDataset("out").fingerprint
    first = dataset[0]["input_ids"]
    os.utime("out/manifest.json")  # that alone is no change
    assert dataset[len(dataset) // 2]["input_ids"].any()
    run(*arguments, "--seed", 5, "--overwrite")
    assert torch.equal(dataset[0]["input_ids"], first)  # its shard is mapped
    with pytest.raises(DataError, match="was replaced by another result while it was read"):
        dataset[-1]
    assert PackedDataset("out").fingerprint != fingerprint
    run(*arguments, "--overwrite")
    assert PackedDataset("out").fingerprint == fingerprint


class TestAView:
    """What a packed directory does not have: tokens elsewhere."""

    @pytest.fixture
    def view(self, folder: Path) -> Path:
        (folder / "data.jsonl").write_text(random_ids(200))
        run("tokenize", "data.jsonl", "-o", "tokens")
        return pack(Path("tokens"), Path("view"), "--view")

    def test_its_tokens_are_found_where_they_are(self, view: Path) -> None:
        expected = PackedDataset(view)[3]["labels"]
        pack(Path("data.jsonl"), Path("packed"))
        Path("tokens").rename("moved")
        with pytest.raises(DataError, match="its tokenized directory tokens is gone"):
            PackedDataset(view)
        for paths in ([view], [view, "packed"]):
            again = pickle.loads(pickle.dumps(PackedDataset(paths, tokens="moved")))  # noqa: S301
            assert torch.equal(again[3]["labels"], expected)
        Path("x.jsonl").write_text(random_ids(5))
        run("tokenize", "x.jsonl", "-o", "other")
        two = PackedDataset([view, "packed"], tokens=["moved", "other"])  # the view takes its own
        assert torch.equal(two[3]["labels"], expected)

    def test_other_tokens_are_other_rows(self, view: Path) -> None:
        before = PackedDataset(view).fingerprint
        Path("data.jsonl").write_text(random_ids(200).replace("7", "8"))
        run("tokenize", "data.jsonl", "-o", "tokens", "--overwrite")
        pack(Path("tokens"), view, "--view", "--overwrite")
        assert PackedDataset(view).fingerprint != before
