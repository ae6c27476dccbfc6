"""Kernels that need a GPU, in plain torch: what they compute from what a collator gives them.

They are put where transformers calls them, so that all it does around them is its own. What they
refuse, they refuse; speed and rounding are not theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flex_attention as flex


def attend(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None,
    causal: bool,
    window: Any,
    softcap: float,
    sinks: Any,
) -> Any:
    """Attention of flash-attn's [..., length, heads, head_dim]; sinks [heads] or None."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen.triu(-window[0]) if window[0] >= 0 else seen
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        beside = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, beside], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).transpose(-3, -2)


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0, s_aux: Any = None,
) -> Any:  # fmt: skip
    return attend(q, k, v, softmax_scale, causal, window_size, softcap, s_aux)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0, softmax_scale: Any = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0, s_aux: Any = None,
) -> Any:  # fmt: skip
    """What it computes, and what it does not check."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist()
    assert (cu_seqlens_q[0], cu_seqlens_q[-1]) == (0, len(q))
    assert cu_seqlens_q.diff().max() <= min(max_seqlen_q, max_seqlen_k)
    spans = [slice(begin, end) for begin, end in pairwise(cu_seqlens_q.tolist())]
    how = (softmax_scale, causal, window_size, softcap, s_aux)
    return torch.cat([attend(q[s], k[s], v[s], *how) for s in spans])


def pretend_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = (
        flash_attn_func, flash_attn_varlen_func, None,
        flash_utils._pad_input, flash_utils._unpad_input,
    )  # fmt: skip
    process = flash_utils._lazy_define_process_function(flash_attn_varlen_func)
    monkeypatch.setattr(
        flash_utils, "lazy_import_flash_attention", lambda *_, **__: (functions, (process, dict))
    )


def flex_attention(
    q: Any, k: Any, v: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    **_: Any,
) -> Any:  # fmt: skip
    """FlexAttention of [b, heads, length, head_dim], which compiles for a minute or two."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if block_mask is not None:
        rows, _, length, _ = scores.shape
        seen = create_mask(block_mask.mask_mod, rows, 1, length, length, device="cpu")
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def pretend_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex.WrappedFlexAttention, "__call__", lambda _: flex_attention)


def runs(numbers: Any) -> Iterator[slice]:
    """The stretches of one number in a row of `seq_idx`."""
    edges = (numbers.diff().nonzero().flatten() + 1).tolist()
    yield from (slice(begin, end) for begin, end in pairwise([0, *edges, len(numbers)]))


def causal_conv1d_fn(whole: Callable[..., Any], x: Any, *given: Any, **how: Any) -> Any:
    """causal-conv1d: x [b, channels, length], seq_idx int32[b, length]."""
    if (numbers := how.pop("seq_idx", None)) is None:
        return whole(x, *given, **how)
    assert (numbers.dtype, numbers.shape) == (torch.int32, (x.shape[0], x.shape[2]))
    return torch.cat([
        torch.cat([whole(x[r:r + 1, :, s], *given, **how) for s in runs(row)], dim=2)
        for r, row in enumerate(numbers)
    ])  # fmt: skip


def mamba_chunk_scan_combined(
    whole: Callable[..., Any], x: Any, dt: Any, a: Any, b: Any, c: Any, **how: Any
) -> Any:
    """mamba-ssm: x, dt, b and c [b, length, ...], seq_idx int32[b, length]."""
    if (numbers := how.pop("seq_idx", None)) is None:
        return whole(x, dt, a, b, c, **how)
    assert (numbers.dtype, numbers.shape) == (torch.int32, x.shape[:2])
    return torch.cat([
        torch.cat([
            whole(x[r:r + 1, s], dt[r:r + 1, s], a, b[r:r + 1, s], c[r:r + 1, s], **how)
            for s in runs(row)
        ], dim=1)
        for r, row in enumerate(numbers)
    ])  # fmt: skip


def chunk_gated_delta_rule(
    whole: Callable[..., Any], q: Any, k: Any, v: Any, *, g: Any, beta: Any, **how: Any
) -> Any:
    """flash-linear-attention: [b, length, ...], and boundaries for batches of one row only."""
    if (edges := how.pop("cu_seqlens", None)) is None:
        return whole(q, k, v, g=g, beta=beta, **how)
    if len(q) != 1:
        raise ValueError(f"The batch size is expected to be 1 rather than {len(q)}")
    found = [
        whole(q[:, s], k[:, s], v[:, s], g=g[:, s], beta=beta[:, s], **how)[0]
        for s in (slice(begin, end) for begin, end in pairwise(edges.tolist()))
    ]
    return torch.cat(found, dim=1), None


KERNELS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "mamba2_chunk_scan": mamba_chunk_scan_combined,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_gated_delta_rule,
}


def pretend_kernels(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the model's family calls, around the torch that stands in for them already."""
    module = sys.modules[type(model).__module__]
    for name, kernel in KERNELS.items():
        if (wrapped := getattr(module, name, None)) is not None:
            while hasattr(wrapped, "__wrapped__"):
                wrapped = wrapped.__wrapped__
            monkeypatch.setattr(module, name, partial(_given_what_it_takes, kernel, wrapped))


_OF_KERNELS = {"seq_idx", "cu_seqlens"}


def _given_what_it_takes(kernel: Any, whole: Any, *given: Any, **how: Any) -> Any:
    """As transformers leaves out what a kernel has no name for."""
    code = whole.__code__
    takes = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *_OF_KERNELS}
    return kernel(whole, *given, **{name: v for name, v in how.items() if name in takes})
