"""Collators: packed rows to what a model takes, so that no document sees another.

None of them gives a 2-D attention_mask: FlashAttention in transformers takes one as the word that
rows are single, padded documents, and lets the documents in a row see each other. The padding at
a row's end is a document of its own instead, which no label trains on. Models of transformers need
use_cache=False: filling a cache, they do not look at positions, and documents see each other.

    varlen_collate      every row end to end, with boundaries: for FlashAttention; SDPA and
                        FlexAttention in transformers find them by the positions
    flash_attn_collate  the same under flash-attn's own names
    padded_collate      rows as they are: for SDPA and FlexAttention in transformers. Not for
                        FlashAttention, which looks at positions in a batch of one row only
    block_mask_collate  rows with a mask, or the numbers to make one of: for any attention

They take a `RowBatch` or a list of rows; all but `rows` is for functools.partial. `dtype` is that
of input_ids, labels and position_ids: int64 is what losses take, int32 is half the bytes to a GPU
for `to_device`, which widens them there. Labels that were stored shifted are `shift_labels`.
Each raises UsageError for rows without input_ids or cu_seqlens, and for another dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from packer_cli._kernels import gathering
from packer_cli.errors import one_of
from packer_cli.records import Int32
from packer_cli.torch.rows import RowBatch, row_batch

_TOKENS = ("input_ids", "labels", "shift_labels")


def varlen_collate(rows: Any, *, dtype: Any = torch.int64) -> dict[str, Any]:
    """The rows end to end, T = b * max_length tokens, in the names and types of transformers.

    input_ids, labels, position_ids  [1, T] of `dtype`; positions restart in every document
    cu_seq_lens_q, cu_seq_lens_k     int32[documents + 1], the same tensor
    max_length_q, max_length_k       int, the longest document
    """
    batch = row_batch(rows)
    boundaries, longest = batch.boundaries()
    found = _tokens(batch, dtype) | {"position_ids": _positions(batch, boundaries, dtype)}
    edges = torch.from_numpy(boundaries)
    return {name: values.view(1, -1) for name, values in found.items()} | {
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": longest,
        "max_length_k": longest,
    }


_FLASH_ATTN_NAMES = {
    "cu_seq_lens_q": "cu_seqlens_q",
    "cu_seq_lens_k": "cu_seqlens_k",
    "max_length_q": "max_seqlen_q",
    "max_length_k": "max_seqlen_k",
}


def flash_attn_collate(rows: Any, *, dtype: Any = torch.int64) -> dict[str, Any]:
    """As `varlen_collate`, with the names of flash_attn_varlen_func: cu_seqlens_q, max_seqlen_q."""
    found = varlen_collate(rows, dtype=dtype)
    return {_FLASH_ATTN_NAMES.get(name, name): value for name, value in found.items()}


def padded_collate(rows: Any, *, dtype: Any = torch.int64) -> dict[str, Any]:
    """input_ids, labels, position_ids [b, max_length] of `dtype`; positions restart in every
    document and in the padding.
    """
    batch = row_batch(rows)
    return _tokens(batch, dtype) | {"position_ids": _positions(batch, batch.boundaries()[0], dtype)}


def block_mask_collate(
    rows: Any, *, form: str = "mask", mask_dtype: Any = torch.bool, dtype: Any = torch.int64
) -> dict[str, Any]:
    """As `padded_collate`, with what says who may see whom.

    form "mask"       attention_mask [b, 1, max_length, max_length], for SDPA: True where a query
                      may look. With a floating `mask_dtype` 0 there and its lowest elsewhere,
                      which is added to scores: eager attention in transformers adds whatever it
                      gets, so never give it the boolean one. max_length squared bytes a row.
    form "documents"  document_ids int32[b, max_length]: 0, 1, ... in each row, the padding last.
                      `flex_block_mask` makes FlexAttention's mask of them, on their device.

    Raises UsageError for another form.
    """
    batch = row_batch(rows)
    if form not in ("mask", "documents"):
        raise one_of("form", form, ("mask", "documents"))
    boundaries, _ = batch.boundaries()
    found = _tokens(batch, dtype) | {"position_ids": _positions(batch, boundaries, dtype)}
    documents = _document_ids(batch, boundaries)
    if form == "documents":
        return found | {"document_ids": documents}
    allowed = (documents[:, None, :, None] == documents[:, None, None, :]).tril_()
    if mask_dtype != torch.bool:
        lowest = torch.finfo(mask_dtype).min
        allowed = torch.zeros(allowed.shape, dtype=mask_dtype).masked_fill_(~allowed, lowest)
    return found | {"attention_mask": allowed}


def flex_block_mask(document_ids: Any) -> Any:
    """FlexAttention's BlockMask: causal within each document.

    document_ids  int [b, length], on the device that attends. transformers takes the result as
    attention_mask with attn_implementation="flex_attention".
    """
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 slow

    def visible(row: Any, head: Any, query: Any, key: Any) -> Any:
        same = document_ids[row, query] == document_ids[row, key]
        return same & (query >= key)

    rows, length = document_ids.shape
    return create_block_mask(visible, rows, None, length, length, device=document_ids.device)


def _tokens(batch: RowBatch, dtype: Any) -> dict[str, Any]:
    """Columns of tokens [b, max_length], without a copy where they are of `dtype` already."""
    if dtype not in (torch.int64, torch.int32):
        raise one_of("dtype", str(dtype), ("torch.int64", "torch.int32"))
    return {name: batch.columns[name].to(dtype) for name in _TOKENS if name in batch.columns}


def _positions(batch: RowBatch, boundaries: Int32, dtype: Any) -> Any:
    """Positions [b, max_length] in each document, as the column position_ids has them."""
    positions = torch.empty(int(boundaries[-1]), dtype=dtype)
    gathering.count_positions(boundaries, positions.numpy())
    return positions.view(-1, batch.max_length)


def _document_ids(batch: RowBatch, boundaries: Int32) -> Any:
    """int32[b, max_length], the number of each place's document in its row."""
    over_all = np.repeat(
        np.arange(len(boundaries) - 1, dtype=np.int32), np.diff(boundaries)
    ).reshape(-1, batch.max_length)
    return torch.from_numpy(over_all - over_all[:, :1])
