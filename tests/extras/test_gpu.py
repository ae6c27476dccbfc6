"""What only a GPU shows; without one these tests are skipped, and say so. test_torch_device.py and
test_equivalence.py have more, with what stands in for a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from packer_cli.torch import (
    PackingIterableDataset,
    block_mask_collate,
    flash_attn_collate,
    flex_block_mask,
    to_device,
    varlen_collate,
)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
flash = pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn is not installed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEADS, HEAD, L = 4, 64, 512


def packed_rows() -> list[Any]:
    return list(PackingIterableDataset([range(n) for n in range(1, 200, 3)], L, seed=None))


@gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_to_device_gives_what_copies_give(pinned: bool) -> None:
    """Against a pageable copy of each tensor, and one that is pinned first."""
    rows = packed_rows()
    batches = [rows[k : k + 2] for k in range(len(rows) - 2)]
    wide = [varlen_collate(one, config=None) for one in batches]
    narrow = (varlen_collate(one, config=None, dtype=torch.int32) for one in batches)
    for moved, batch in zip(to_device(narrow, "cuda"), wide, strict=True):
        for name, value in batch.items():
            if torch.is_tensor(value):
                copy = value.pin_memory().to("cuda", non_blocking=True) if pinned else value.cuda()
                assert torch.equal(moved[name], copy), name


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
@flash
def test_flash_attention_is_that_of_documents_alone() -> None:
    from flash_attn import flash_attn_varlen_func

    batch = next(iter(to_device([flash_attn_collate(packed_rows()[:3])], "cuda")))
    q, k, v = query_key_value(3 * L, torch.bfloat16)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    found = flash_attn_varlen_func(q, k, v, *(batch[name] for name in names), causal=True)
    alone = one_by_one(q, k, v, batch["cu_seqlens_q"].tolist())
    assert_equal_with_gradients(found, alone, [q, k, v], 2e-2)


@gpu
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_the_replay_of_steps_runs(device: str) -> None:
    """With tiny sizes: its figures say nothing here."""
    import json

    sizes = {"length": 512, "hidden": 64, "ranks": 4, "steps": 12}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    script = BENCHMARKS / "peers" / "even_steps_gpu.py"
    done = subprocess.run(
        [sys.executable, script, "--device", device, *options],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["rows"] == 48
    assert (found["device"] == "CPU") == (device == "cpu")
    assert 1 <= found["even order"][0] <= found["random order"][0] < 4
    assert 1 <= found["even order"][1] < 4
