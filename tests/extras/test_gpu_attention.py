"""Attention that only a GPU has. Without one, these tests are skipped."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from packer_cli.torch import (
    PackingIterableDataset,
    block_mask_collate,
    flash_attn_collate,
    flex_block_mask,
    varlen_collate,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

HEADS, HEAD, L = 4, 64, 512


def packed_rows() -> list[Any]:
    return list(PackingIterableDataset([range(n) for n in range(1, 200, 3)], L, seed=None))


def on_gpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: v.cuda() if torch.is_tensor(v) else v for name, v in batch.items()}


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


def test_flash_attention_is_that_of_documents_alone() -> None:
    batch = on_gpu(flash_attn_collate(packed_rows()[:3]))
    q, k, v = query_key_value(3 * L, torch.bfloat16)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    found = varlen_attn(q, k, v, *(batch[name] for name in names), window_size=(-1, 0))
    alone = one_by_one(q, k, v, batch["cu_seqlens_q"].tolist())
    assert_equal_with_gradients(found, alone, [q, k, v], 2e-2)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
def test_flex_attention_is_that_of_documents_alone() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    rows = packed_rows()[:1]
    collate = partial(block_mask_collate, config=None, form="documents")
    batch = on_gpu(collate(rows))
    mask = flex_block_mask(batch["document_ids"], config=None)
    q, k, v = query_key_value(L, torch.float32)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    found = torch.compile(flex_attention)(*heads_first, block_mask=mask)[0].transpose(0, 1)
    edges = varlen_collate(rows, config=None)["cu_seq_lens_q"].tolist()
    assert_equal_with_gradients(found, one_by_one(q, k, v, edges), [q, k, v], 1e-2)
