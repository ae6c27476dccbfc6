"""to_device: the same batches, wide, on a GPU where there is one and without a copy on a CPU; and
attention that only a GPU has. Without one those tests are skipped, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from packer_cli.errors import UsageError
from packer_cli.torch import (
    PackedBatch,
    PackingIterableDataset,
    block_mask_collate,
    device,
    flash_attn_collate,
    flex_block_mask,
    packed_collate_fn,
    to_device,
    varlen_collate,
)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def batches(**options: Any) -> list[dict[str, Any]]:
    rows = list(PackingIterableDataset([range(n) for n in range(1, 60)], 64, seed=None))
    collate = partial(varlen_collate, config=None, **options)
    return [collate(rows[k : k + 1 + k % 3]) for k in range(len(rows) - 3)]  # of several sizes


def test_on_a_cpu_nothing_is_copied() -> None:
    given = batches()
    moved = list(to_device(given, "cpu"))
    assert len(moved) == len(given)
    for before, after in zip(given, moved, strict=True):
        assert list(before) == list(after)
        for name, value in before.items():
            assert after[name] is value


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
def test_masks_of_several_kinds_go_along(where: str) -> None:
    kinds = SimpleNamespace(
        layer_types=["full_attention", "sliding_attention", "conv"], sliding_window=3
    )
    rows = list(PackingIterableDataset([range(n) for n in range(1, 60)], 64))
    given = [block_mask_collate(rows[k : k + 2], config=kinds) for k in range(4)]
    for batch, before in zip(to_device(given, where), given, strict=True):
        assert list(batch) == list(before)
        masks = batch["attention_mask"]
        assert masks.pop("conv") is None
        for name, mask in masks.items():
            assert mask.device.type == where
            assert torch.equal(mask.cpu(), before["attention_mask"][name])


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
def test_packed_batches_stay_what_they_are(where: str) -> None:
    rows = list(PackingIterableDataset([range(n) for n in range(1, 60)], 64))
    given = [packed_collate_fn(rows[k : k + 2]) for k in range(4)]
    for batch, before in zip(to_device(given, where), given, strict=True):
        assert isinstance(batch, PackedBatch)
        assert batch.input_ids.device.type == batch.cu_seqlens.device.type == where
        assert all(same(vars(batch)[name], value) for name, value in vars(before).items())


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_depth_less_one_batches_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """With a GPU that is pretended: what it is events, in which order."""
    events: list[str] = []

    def event() -> Any:
        return SimpleNamespace(
            synchronize=lambda: events.append("waited"), record=lambda: events.append("sent")
        )

    stream = SimpleNamespace(wait_event=lambda event: events.append("step"))
    pretended = {
        "device": nullcontext, "Stream": object, "Event": event, "stream": nullcontext,
        "current_device": lambda: 0, "current_stream": lambda device: stream,
    }  # fmt: skip
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device._Slot, "_pinned", lambda self, name, value: SimpleNamespace(
        to=lambda device, non_blocking: value.clone()
    ))  # fmt: skip
    given = batches(dtype=torch.int32)
    for step, (batch, wide) in enumerate(
        zip(to_device(iter(given), "cuda", depth=depth), batches(), strict=True)
    ):
        assert all(same(batch[name], value) for name, value in wide.items())
        assert batch["cu_seq_lens_q"] is batch["cu_seq_lens_k"]
        assert events.count("step") == step + 1
        assert events.count("sent") == min(step + depth, len(given))


@gpu
def test_what_is_on_the_gpu_already_is_not_read_before_it_is_written() -> None:
    def given() -> Iterator[dict[str, Any]]:
        for k in range(20):
            torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
            there = torch.full((1 << 16,), k, dtype=torch.int32, device="cuda")
            yield {"input_ids": there, "labels": torch.full((8,), k, dtype=torch.int32)}

    for k, batch in enumerate(to_device(given(), "cuda")):
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert (batch["input_ids"] == k).all()
        assert (batch["labels"] == k).all()


def same(value: Any, expected: Any) -> bool:
    if not torch.is_tensor(expected):
        return bool(value == expected)
    return value.dtype == expected.dtype and torch.equal(value.cpu(), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("depth", [2, 3, 100])
@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=gpu)])
def test_narrow_batches_become_the_wide_ones(device: str, depth: int, pinned: bool) -> None:
    narrow = batches(dtype=torch.int32)
    if pinned:
        narrow = [
            {name: v.pin_memory() if torch.is_tensor(v) else v for name, v in batch.items()}
            for batch in narrow
        ]
    moved = list(to_device(iter(narrow), torch.device(device), depth=depth))
    for wide, batch in zip(batches(), moved, strict=True):
        assert all(same(batch[name], value) for name, value in wide.items())
        assert batch["cu_seq_lens_q"].device.type == device


@gpu
def test_buffers_are_not_written_to_while_they_are_read() -> None:
    """Thousands of batches through two buffers, each checked on the GPU after many more came."""
    given = [{"input_ids": torch.full((1 << 18,), k, dtype=torch.int32)} for k in range(2000)]
    wrong = [
        (batch["input_ids"] != k).sum() for k, batch in enumerate(to_device(given, "cuda", depth=2))
    ]
    assert torch.stack(wrong).sum() == 0


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="depth: 1 is less than 2"):
        to_device([], "cpu", depth=1)
    with pytest.raises(UsageError, match="meta is neither a CPU nor CUDA"):
        to_device([], "meta")


# --- attention on a GPU ---

HEADS, HEAD, L = 4, 64, 512


def packed_rows() -> list[Any]:
    return list(PackingIterableDataset([range(n) for n in range(1, 200, 3)], L, seed=None))


def one_by_one(q: Any, k: Any, v: Any, edges: list[int]) -> Any:
    """[tokens, heads, head size], each document attended to by itself."""
    seen = [
        scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in (q, k, v)), is_causal=True)
        for a, b in pairwise(edges)
    ]
    return torch.cat(seen, dim=1).transpose(0, 1)


def query_key_value(tokens: int, kind: Any) -> list[Any]:
    torch.manual_seed(0)
    shape = (tokens, HEADS, HEAD)
    return [torch.randn(shape, device="cuda", dtype=kind, requires_grad=True) for _ in range(3)]


def assert_equal_with_gradients(
    found: Any, alone: Any, inputs: list[Any], tolerance: float
) -> None:
    torch.testing.assert_close(found, alone, rtol=tolerance, atol=tolerance)
    weights = torch.randn_like(alone)
    gradients = [torch.autograd.grad(x, inputs, weights) for x in (found, alone)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@gpu
def test_flash_attention_is_that_of_documents_alone() -> None:
    batch = next(iter(to_device([flash_attn_collate(packed_rows()[:3])], "cuda")))
    q, k, v = query_key_value(3 * L, torch.bfloat16)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    found = varlen_attn(q, k, v, *(batch[name] for name in names), window_size=(-1, 0))
    alone = one_by_one(q, k, v, batch["cu_seqlens_q"].tolist())
    assert_equal_with_gradients(found, alone, [q, k, v], 2e-2)


@gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
def test_flex_attention_is_that_of_documents_alone() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    rows = packed_rows()[:1]
    collate = partial(block_mask_collate, config=None, form="documents")
    batch = next(iter(to_device([collate(rows)], "cuda")))
    mask = flex_block_mask(batch["document_ids"], config=None)
    q, k, v = query_key_value(L, torch.float32)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    found = torch.compile(flex_attention)(*heads_first, block_mask=mask)[0].transpose(0, 1)
    edges = varlen_collate(rows, config=None)["cu_seq_lens_q"].tolist()
    assert_equal_with_gradients(found, one_by_one(q, k, v, edges), [q, k, v], 1e-2)
