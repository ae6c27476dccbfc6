"""Sets that the real packages have written are audited: each defect, and nothing in sound ones."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from audited import (
    BOS,
    DEFECTS,
    EOS,
    IGNORED,
    LENGTH,
    PAD,
    Document,
    Sets,
    audited,
    conversations,
    found,
)
from datasets import Dataset
from tiny_models import number_tokenizer
from trainer_imports import allow_llamafactory, axolotl_prepared
from trl import pack_dataset

# those of the packages, about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore")
# What is planted, and whether a document has it; packages move documents to other rows.
PLANTED: dict[str, Callable[[Document], bool]] = {
    "eos-untrained": lambda one: one.ids[-1] == EOS and not one.trained[-1],
    "bos-doubled": lambda one: one.ids[:2] == [BOS, BOS],
    "labels-differ": lambda one: bool(one.labels),
}
RULES = (None, *PLANTED)


def a_set(rule: str | None) -> Sets:
    """Rows of one document each, as they are before they are packed."""
    made = conversations(7)
    if rule:
        assert DEFECTS[rule](made, 7)
    documents = [one for _, one in made.documents()]
    return Sets([[one] for one in documents], [[] for _ in documents])


def records(sets: Sets) -> dict[str, list[Any]]:
    rows = range(len(sets.rows))
    return {"input_ids": [*map(sets.ids, rows)], "labels": [*map(sets.labels, rows)]}


def document(ids: list[int], labels: list[int]) -> Document:
    trained = [label != IGNORED for label in labels]
    other = {at: label for at, label in enumerate(labels) if label not in (IGNORED, ids[at])}
    return Document(list(ids), trained, other)


def packed_rows(dataset: Any) -> Sets:
    """The documents of rows, by what the package says of them."""
    rows = []
    for row in dataset:
        edges = np.cumsum([0, *row["seq_lengths"]]).tolist()
        rows.append([document(row["input_ids"][a:b], row["labels"][a:b])
                     for a, b in pairwise(edges)])  # fmt: skip
    return Sets(rows, [[] for _ in rows])


def assert_finds(
    path: Path, sets: Sets, rule: str | None, but: tuple[str, ...] = ()
) -> dict[str, Any]:
    report = audited(path, "--max-length", LENGTH)
    rows = sum(any(map(PLANTED[rule], row)) for row in sets.rows) if rule else 0
    findings = found(report)
    for ignored in ("overlap", *but):
        findings.pop(ignored, None)
    assert findings == ({rule: rows} if rows and rule not in report["not_applied"] else {})
    assert rule in findings or rule is None or rule in report["not_applied"]
    assert report["tokens"] >= sum(len(one.ids) for _, one in sets.documents())
    return report


@pytest.mark.parametrize("rule", RULES)
def test_trl_packs(tmp_path: Path, rule: str | None) -> None:
    dataset = pack_dataset(Dataset.from_dict(records(a_set(rule))), LENGTH, "bfd")
    dataset.save_to_disk(str(tmp_path / "set"), num_shards=2)
    report = assert_finds(tmp_path / "set", packed_rows(dataset), rule)
    assert report["format"] == "trl"


def test_trl_wraps(tmp_path: Path) -> None:
    sets = a_set(None)
    ids = {"input_ids": records(sets)["input_ids"]}
    pack_dataset(Dataset.from_dict(ids), 64, "wrapped").save_to_disk(str(tmp_path / "set"))
    report = audited(tmp_path / "set")
    assert found(report) == {}
    assert {"no-eos", "cut", "bos-missing"} <= report["not_applied"].keys()


@pytest.mark.parametrize("rule", RULES)
def test_datasets_saves_documents(tmp_path: Path, rule: str | None) -> None:
    sets = a_set(rule)
    dataset = Dataset.from_dict(records(sets))
    dataset.save_to_disk(str(tmp_path / "set"), num_shards=3)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.to_json(str(tmp_path / "a.jsonl"))
    for name in ("set", "a.parquet", "a.jsonl"):
        assert_finds(tmp_path / name, sets, rule, ("duplicate-rows", "no-eos", "cut"))


@pytest.mark.parametrize("neat", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_llamafactory_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str | None, neat: bool
) -> None:
    allow_llamafactory(monkeypatch)
    kind = import_module("llamafactory.data.processor.supervised").PackedSupervisedDatasetProcessor
    sets, columns = a_set(rule), records(a_set(rule))
    encoded = iter(zip(columns["input_ids"], columns["labels"], strict=True))
    processor = kind.__new__(kind)
    processor.tokenizer = SimpleNamespace(pad_token_id=PAD)
    processor.data_args = SimpleNamespace(cutoff_len=LENGTH, neat_packing=neat)
    monkeypatch.setattr(kind, "_encode_data_example", lambda *_, **__: next(encoded))
    count = len(sets.rows)
    empty = {
        name: [None] * count for name in ("_system", "_tools", "_images", "_videos", "_audios")
    }
    made = processor.preprocess_dataset(
        {"_prompt": [[{}]] * count, "_response": [[{}]] * count, **empty}
    )
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    dataset = Dataset.from_dict({name: made[name] for name in names})
    dataset.save_to_disk(str(tmp_path / "set"))
    rows = []
    for row in dataset:
        begins = [at for at, place in enumerate(row["position_ids"]) if not place]
        end = len(row["position_ids"]) - next(
            n for n, one in enumerate(reversed(row["position_ids"])) if one
        )
        edges = [*(at for at in begins if at < end), end]
        rows.append([document(row["input_ids"][a:b], row["labels"][a:b])
                     for a, b in pairwise(edges)])  # fmt: skip
    expected = Sets(rows, [[] for _ in rows])
    # a row has padding at its end, so that none is full of tokens
    report = assert_finds(tmp_path / "set", expected, rule, ("cut", "no-eos", "bos-missing"))
    assert report["format"] == "llamafactory"


@pytest.mark.parametrize("rule", [None, "eos-untrained"])
def test_axolotl_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str | None
) -> None:
    columns = records(a_set(rule))
    columns["attention_mask"] = [[1] * len(ids) for ids in columns["input_ids"]]
    Dataset.from_dict(columns).to_json(str(tmp_path / "a.jsonl"))
    tokenizer = number_tokenizer(300)
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    _, dataset = axolotl_prepared(
        monkeypatch, tokenizer, base_model=str(tmp_path / "tokenizer"),
        datasets=[{"path": str(tmp_path / "a.jsonl"), "ds_type": "json", "type": ""}],
        dataset_prepared_path=str(tmp_path / "prepared"), sequence_len=LENGTH, sample_packing=True,
        micro_batch_size=1, gradient_accumulation_steps=1, learning_rate=1e-4,
    )  # fmt: skip
    rows = [[document(row["input_ids"], row["labels"])] for row in dataset]
    sets = Sets(rows, [[] for _ in rows])
    assert "position_ids" in dataset.column_names
    report = assert_finds(tmp_path / "prepared", sets, rule, ("duplicate-rows", "no-eos", "cut"))
    assert report["format"] == "llamafactory"


@pytest.mark.parametrize("rule", RULES)
def test_megatron_writes(tmp_path: Path, rule: str | None) -> None:
    indexed = import_module("megatron.core.datasets.indexed_dataset")
    sets = a_set(rule)
    builder = indexed.IndexedDatasetBuilder(f"{tmp_path}/set.bin", dtype=np.int32)
    for row in range(len(sets.rows)):
        builder.add_item(torch.tensor(sets.ids(row)))
        builder.end_document()
    builder.finalize(f"{tmp_path}/set.idx")
    report = assert_finds(tmp_path / "set.bin", sets, rule, ("no-eos", "cut"))
    assert report["format"] == "megatron"
