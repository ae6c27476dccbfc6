"""`packer_cli.energon` in megatron-energon's hands: its loader, its save and its restore."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.jsonl.jsonl_prepare import JsonlPreparator

from packer_cli.energon import BestFitPacking, PackedSample, TokenSample
from packer_cli.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # energon's, of torch and of itself
L, SAMPLES = 64, 300


@pytest.fixture(autouse=True)
def _workers_end() -> Iterator[None]:
    """Those of loaders that are left before their end; torch would wait 5 seconds for each."""
    yield
    for process in active_children():
        process.terminate()


@stateless
def cook(sample: dict[str, Any]) -> TokenSample:
    record = sample["json"]
    labels = torch.tensor(record["labels"]) if "labels" in record else None
    return TokenSample(
        **basic_sample_keys(sample), input_ids=torch.tensor(record["input_ids"]), labels=labels
    )


class Encoder(BestFitPacking, DefaultTaskEncoder):  # type: ignore[misc]
    max_length = L
    cookers = (Cooker(cook),)


def encoder(**options: Any) -> Encoder:
    return type("Chosen", (Encoder,), options)()


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    """1 to 150 tokens each; the first token is the document's number, in two digits of 1000."""
    random = np.random.default_rng(2)
    return [
        [1000 + i, *random.integers(0, 1000, n - 1).tolist()]
        for i, n in enumerate(random.integers(1, 150, SAMPLES))
    ]


@pytest.fixture(scope="module")
def path(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("energon") / "data.jsonl"
    every = [[], *documents, []]
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in every))
    assert JsonlPreparator.prepare_dataset(path) == SAMPLES + 2
    return path


def loader(path: Path, task_encoder: Any, *, workers: int = 0, repeat: bool = False) -> Any:
    dataset = get_train_dataset(
        path, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=None, packing_buffer_size=50, shuffle_buffer_size=20,
        max_samples_per_sequence=None, task_encoder=task_encoder, repeat=repeat,
    )  # fmt: skip
    return get_savable_loader(dataset, checkpoint_every_sec=0, checkpoint_every_min_n_samples=1)


def pieces(row: PackedSample) -> Iterator[tuple[int, ...]]:
    edges = row.cu_seqlens.tolist()
    assert row.input_ids.shape == row.labels.shape == row.attention_mask.shape == (L,)
    assert row.attention_mask.tolist() == [1] * edges[-1] + [0] * (L - edges[-1])
    for begin, end in pairwise(edges):
        ids = row.input_ids[begin:end].tolist()
        assert row.position_ids[begin:end].tolist() == list(range(end - begin))
        assert row.labels[begin:end].tolist() == [-100, *ids[1:]]
        yield tuple(ids)


def expected_pieces(documents: list[list[int]], overlong: str) -> Counter[tuple[int, ...]]:
    cut = {
        "split": lambda ids: [ids[i : i + L] for i in range(0, len(ids), L)],
        "truncate": lambda ids: [ids[:L]],
        "drop": lambda ids: [ids] if len(ids) <= L else [],
    }[overlong]
    return Counter(tuple(piece) for ids in documents for piece in cut(ids))


@pytest.mark.parametrize(
    ("overlong", "workers"), [("split", 0), ("split", 2), ("truncate", 2), ("drop", 0)]
)
def test_every_sample_once(
    path: Path, documents: list[list[int]], overlong: str, workers: int
) -> None:
    """And what is left out is counted."""
    chosen = encoder(overlong=overlong)
    rows = list(loader(path, chosen, workers=workers))
    found = Counter(piece for row in rows for piece in pieces(row))
    assert found == expected_pieces(documents, overlong)
    used = sum(int(row.attention_mask.sum()) for row in rows)
    assert used > 0.9 * len(rows) * L
    long = [len(ids) for ids in documents if len(ids) > L]
    truncated = [length - L for length in long] if overlong == "truncate" else []
    dropped = long if overlong == "drop" else []
    assert chosen.packing_counts() == {
        "documents": SAMPLES + 2,
        "empty_documents": 2,
        "tokens": used,
        "truncated_documents": len(truncated),
        "truncated_tokens": sum(truncated),
        "dropped_documents": len(dropped),
        "dropped_tokens": sum(dropped),
    }


def test_labels_are_kept() -> None:
    samples = [
        TokenSample(__key__="a", __restore_key__=(), input_ids=torch.tensor([1, 2, 3]),
                    labels=torch.tensor([-100, -100, 3])),
        TokenSample(__key__="b", __restore_key__=(), input_ids=torch.tensor([4, 5])),
    ]  # fmt: skip
    row = encoder(max_length=6, pad_token_id=9).pack_selected_samples(samples)
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 9]
    assert row.labels.tolist() == [-100, -100, 3, -100, 5, -100]
    assert row.cu_seqlens.tolist() == [0, 3, 5]
    assert row.__key__ == "a,b"


def test_an_overlong_sample_ends_the_run(path: Path) -> None:
    with pytest.raises(
        FatalSampleError, match=r"has \d+ tokens, max_length is 64; choose overlong"
    ):
        list(loader(path, encoder()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "tetris"}, "'tetris' is not one of"),
        ({"overlong": "ignore"}, "overlong: 'ignore' is not one of"),
        ({"max_length": 0}, "max_length: 0 is not between"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encoder(**options)


def ids_of(rows: Any, count: int) -> list[list[int]]:
    return [row.input_ids.tolist() for row, _ in zip(rows, range(count), strict=False)]


@pytest.mark.parametrize(("workers", "before"), [(0, 7), (2, 61)])
@pytest.mark.parametrize("options", [{"overlong": "split"}, {"strategy": "wrap"}], ids=str)
def test_restored_where_it_was_saved(
    path: Path, workers: int, before: int, options: dict[str, Any]
) -> None:
    """With cut samples in the buffers, within a buffer and at its edges."""
    saved = loader(path, encoder(**options), workers=workers, repeat=True)
    rows = iter(saved)
    for _ in range(before):
        next(rows)
    state = saved.save_state_rank()
    expected = ids_of(rows, 80)
    again = loader(path, encoder(**options), workers=workers, repeat=True)
    again.restore_state_rank(state)
    assert ids_of(iter(again), 80) == expected


@pytest.mark.parametrize("options", [{"overlong": "split"}, {"strategy": "wrap"}], ids=str)
def test_a_row_is_restored_by_its_key(path: Path, options: dict[str, Any]) -> None:
    source = loader(path, encoder(**options))
    rows = [row for row, _ in zip(source, range(30), strict=False)]
    again = loader(path, encoder(**options))
    for row in rows:
        assert torch.equal(again.restore_sample(row.__restore_key__).input_ids, row.input_ids)


def test_a_sample_that_cannot_be_packed_is_skipped_alone(tmp_path: Path) -> None:
    """Not with all that would have shared its row."""
    good = [{"input_ids": [i, i], "labels": [i, i]} for i in range(1, 20)]
    bad = [{"input_ids": [50, 51], "labels": [50]}, {"input_ids": [60, -60]}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*good[:9], *bad, *good[9:]]))
    JsonlPreparator.prepare_dataset(path)
    found = [ids for row in loader(path, encoder()) for ids in ids_alone(row)]
    assert sorted(found) == [(i, i) for i in range(1, 20)]


def ids_alone(row: PackedSample) -> list[tuple[int, ...]]:
    return [tuple(row.input_ids[a:b].tolist()) for a, b in pairwise(row.cu_seqlens.tolist())]
