"""Collators: packed rows to the inputs of a model, so that no document sees another.

`model(**batch)` is right as it is, whichever of these a model of transformers looks at:

    use_cache                          False: models that fill a cache ignore positions
    position_ids                       restart in every document: SDPA, eager and FlexAttention
    cu_seq_lens_q, max_length_q, ...   boundaries: FlashAttention, flash-linear-attention
    seq_idx                            the number of a place's document: Mamba's and convolutions'
                                       kernels; without these kernels transformers refuses it

None of them gives a 2-D attention_mask: with one, FlashAttention in transformers takes a row for a
single, padded document, and lets the documents in it see each other. Instead, the padding at a
row's end is a document of its own, which no label trains on.

    varlen_collate      every row end to end
    padded_collate      rows as they are
    block_mask_collate  rows with masks: for families that do not look at positions, and for models
                        of your own
    separate_collate    every document a row of its own: for any model, at the price of padding
    flash_attn_collate  as varlen_collate, under flash-attn's own names

They take a `RowBatch` or a list of rows. The other parameters are for functools.partial:

    config   the model's, `partial(varlen_collate, config=model.config)`: a collator that would let
             its documents see each other raises UsageError, see `masks`. None for a model of
             your own, of which nothing is known: `check_isolation` checks it
    dtype    of input_ids, labels and position_ids: int64 is what losses take, int32 is half the
             bytes to a GPU for `to_device`, which widens them there
    names    of the values to give, for a model of your own that takes fewer; None: all

Labels that were stored shifted are named `shift_labels`. Of rows with the column `source`, a batch
says the source of each, a number that counts `PackedDataset.sources`, or -1 for padding:

    source_ids        int32, of every token, in the shape of input_ids
    document_sources  int32[documents], of every document that the batch has boundaries of

Each collator raises UsageError for rows without input_ids or cu_seqlens, for rows of pairs, which
`preference_collate` takes, for another dtype, for unknown `names`, and where a config is needed and
none is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from packer_cli._kernels import gathering
from packer_cli.config.columns import PADDED_BOUNDARIES
from packer_cli.errors import DataError, UsageError, named, one_of
from packer_cli.packing.plan import PackPlan, plan_packing
from packer_cli.packing.sequences import PackedRows, fill_plan
from packer_cli.records import IGNORED, Int32
from packer_cli.result.mapped import Lists
from packer_cli.torch.masks import (
    attention_of,
    block_masks,
    check_suitable,
    dense_mask,
    flex_mask,
    text_config,
)
from packer_cli.torch.rows import RowBatch, row_batch

_TOKENS = ("input_ids", "labels", "shift_labels")
_OF_DOCUMENTS = "document_sources"  # not `source`, which losses of transformers take for logits
NOT_GIVEN: Any = object()


def varlen_collate(
    rows: Any,
    *,
    config: Any = NOT_GIVEN,
    dtype: Any = torch.int64,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The rows end to end, T = b * max_length tokens, with the names and types of transformers.

    input_ids, labels, position_ids  [1, T] of `dtype`; positions restart in every document
    seq_idx                          int32[1, T], 0, 1, ... for each document
    cu_seq_lens_q, cu_seq_lens_k     int32[documents + 1], the same tensor
    max_length_q, max_length_k       int, the longest document
    use_cache                        False
    """
    check_suitable("varlen_collate", _known(config, "varlen_collate"))
    batch = row_batch(rows)
    boundaries, longest = batch.boundaries()
    columns = _tokens(batch, dtype) | {"position_ids": _positions(batch, boundaries, dtype)}
    columns |= {"seq_idx": _numbered(boundaries, row=int(boundaries[-1]))}
    columns |= _source_ids(batch, boundaries)
    flat = {name: values.view(1, -1) for name, values in columns.items()}
    return _named(flat | _boundaries(batch, boundaries, longest), names)


_FLASH_ATTN_NAMES = {
    "cu_seq_lens_q": "cu_seqlens_q",
    "cu_seq_lens_k": "cu_seqlens_k",
    "max_length_q": "max_seqlen_q",
    "max_length_k": "max_seqlen_k",
}


def flash_attn_collate(
    rows: Any, *, dtype: Any = torch.int64, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """As `varlen_collate`, with the names of flash_attn_varlen_func: cu_seqlens_q, max_seqlen_q."""
    batch = varlen_collate(rows, config=None, dtype=dtype)
    return _named({_FLASH_ATTN_NAMES.get(name, name): v for name, v in batch.items()}, names)


def padded_collate(
    rows: Any,
    *,
    config: Any = NOT_GIVEN,
    dtype: Any = torch.int64,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The rows as they are.

    input_ids, labels, position_ids  [b, max_length] of `dtype`; positions restart in every
                                     document and in the padding
    seq_idx                          int32[b, max_length], 0, 1, ... in each row, the padding last
    The rest as in `varlen_collate`: boundaries are those in the rows end to end, as FlashAttention
    in transformers lays them.
    """
    check_suitable("padded_collate", _known(config, "padded_collate"))
    batch = row_batch(rows)
    boundaries, longest = batch.boundaries()
    columns = _padded(batch, boundaries, dtype) | _boundaries(batch, boundaries, longest)
    return _named(columns, names)


def block_mask_collate(
    rows: Any,
    *,
    config: Any = NOT_GIVEN,
    form: str = "mask",
    mask_dtype: Any = None,
    dtype: Any = torch.int64,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """As `padded_collate`, with masks that say which places see each other.

    config  model.config: its sliding windows and chunks are put into the masks, which replace the
            model's own. None for a model of your own without any: the batch then has input_ids,
            labels, position_ids and the mask. Must be given.

    form "mask"       attention_mask [b, 1, max_length, max_length]: True where a query may look,
                      for SDPA. With a floating `mask_dtype`, 0 there and its lowest value
                      elsewhere, which eager attention in transformers adds to scores; None takes
                      what the config's attention needs. Where layers differ, a dict of such masks
                      by kind of layer, as models of transformers take it. max_length squared bytes
                      per row and mask.
    form "documents"  document_ids int32[b, max_length]: 0, 1, ... in each row, the padding last.
                      `flex_block_mask` makes FlexAttention's masks of them, on their device.

    Raises UsageError for another form, and for a config whose attention takes no such mask or has
    layers of an unknown kind.
    """
    if form not in ("mask", "documents"):
        raise one_of("form", form, ("mask", "documents"))
    check_suitable("block_mask_collate", _known(config, "block_mask_collate"), form)
    batch = row_batch(rows)
    boundaries, longest = batch.boundaries()
    columns = _padded(batch, boundaries, dtype)
    documents = columns.pop("seq_idx")
    if config is not None:
        columns |= {"seq_idx": documents} | _boundaries(batch, boundaries, longest)
    if form == "documents":
        return _named(columns | {"document_ids": documents}, names)
    kind = _mask_dtype(config) if mask_dtype is None else mask_dtype
    masks = block_masks(documents, config, lambda *rule: _added(dense_mask(*rule), kind))
    return _named(columns | {"attention_mask": masks}, names)


def flex_block_mask(document_ids: Any, *, config: Any = NOT_GIVEN) -> Any:
    """FlexAttention's BlockMask: causal within each document, with a model's windows and chunks.

    document_ids  int [b, length], on the device that attends. transformers takes the result as
                  attention_mask with attn_implementation="flex_attention"
    config        model.config, or None for a model of your own without windows. Where layers
                  differ, the result is a dict of masks by kind of layer

    Raises UsageError without config, and for layers of an unknown kind.
    """
    return block_masks(document_ids, _known(config, "flex_block_mask"), flex_mask)


def separate_collate(rows: Any, *, dtype: Any = torch.int64) -> dict[str, Any]:
    """Every document a row of its own, for models that look at no boundaries of any kind.

    input_ids, labels, position_ids  [documents, longest] of `dtype`, padded at the end with 0 and
                                     labels of -100; positions count on
    use_cache                        False

    The rows' own padding is left out. One long document among many short ones makes a large batch:
    documents * longest tokens.
    """
    batch = row_batch(rows)
    edges = _documents(batch)
    longest = int((edges[:, 1] - edges[:, 0]).max())
    places = edges[:, :1] + np.arange(longest)
    inside = torch.from_numpy(places < edges[:, 1:])
    places = torch.from_numpy(places).clamp_(max=len(batch) * batch.max_length - 1)
    columns = {
        name: torch.where(inside, values.reshape(-1)[places], IGNORED if "labels" in name else 0)
        for name, values in _tokens(batch, dtype).items()
    }
    positions = torch.arange(longest, dtype=dtype).expand(len(edges), longest).contiguous()
    sources = batch.sources(np.bincount(edges[:, 0] // batch.max_length, minlength=len(batch)))
    if sources is not None:
        columns[_OF_DOCUMENTS] = torch.from_numpy(sources)
        columns["source_ids"] = torch.where(inside, columns[_OF_DOCUMENTS][:, None], -1)
    return columns | {"position_ids": positions, "use_cache": False}


def _known(config: Any, what: str) -> Any:
    """The config, if one was given. Nothing is assumed about a model: many ignore positions."""
    if config is NOT_GIVEN:
        raise UsageError(
            f"{what} does not know the model, and some would let documents see each other",
            f"partial({what}, config=model.config); config=None for a model of your own",
        )
    return config


def _tokens(batch: RowBatch, dtype: Any) -> dict[str, Any]:
    """Columns of tokens [b, max_length], without a copy where they are of `dtype` already."""
    if dtype not in (torch.int64, torch.int32):
        raise one_of("dtype", str(dtype), ("torch.int64", "torch.int32"))
    return {name: batch.columns[name].to(dtype) for name in _TOKENS if name in batch.columns}


def _padded(batch: RowBatch, boundaries: Int32, dtype: Any) -> dict[str, Any]:
    """Everything [b, max_length]."""
    return _tokens(batch, dtype) | {
        "position_ids": _positions(batch, boundaries, dtype),
        "seq_idx": _numbered(boundaries, batch.max_length).view(-1, batch.max_length),
        **_source_ids(batch, boundaries),
    }


def _positions(batch: RowBatch, boundaries: Int32, dtype: Any) -> Any:
    """Positions [b, max_length] in each document, as the column position_ids has them."""
    positions = torch.empty(int(boundaries[-1]), dtype=dtype)
    gathering.count_positions(boundaries, positions.numpy())
    return positions.view(-1, batch.max_length)


def _numbered(boundaries: Int32, row: int) -> Any:
    """int32[T], the number of each place's document, counted from 0 every `row` places."""
    begins = boundaries[:-1]
    numbers = np.arange(len(begins)) - np.searchsorted(begins, begins // row * row)
    return torch.from_numpy(np.repeat(numbers.astype(np.int32), np.diff(boundaries)))


def _sources(batch: RowBatch, boundaries: Int32) -> Int32 | None:
    """int32[documents] in the rows end to end, where rows say it."""
    rows = boundaries[:-1] // batch.max_length
    return batch.sources(np.bincount(rows, minlength=len(batch)))


def _source_ids(batch: RowBatch, boundaries: Int32) -> dict[str, Any]:
    """The same of every token, [b, max_length]."""
    sources = _sources(batch, boundaries)
    if sources is None:
        return {}
    of_tokens = torch.from_numpy(np.repeat(sources, np.diff(boundaries)))
    return {"source_ids": of_tokens.view(-1, batch.max_length)}


def _boundaries(batch: RowBatch, boundaries: Int32, longest: int) -> dict[str, Any]:
    edges, sources = torch.from_numpy(boundaries), _sources(batch, boundaries)
    return {
        **({} if sources is None else {_OF_DOCUMENTS: torch.from_numpy(sources)}),
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }


def _documents(batch: RowBatch) -> Any:
    """int64[documents, 2], where each begins and ends in the rows end to end, padding left out."""
    batch.boundaries()  # raises for invalid ones
    own = batch.ragged.get(PADDED_BOUNDARIES) or batch.ragged["cu_seqlens"]
    edges = [own[row].astype(np.int64) + row * batch.max_length for row in range(len(own))]
    return np.concatenate([np.stack([one[:-1], one[1:]], axis=1) for one in edges])


def _mask_dtype(config: Any) -> Any:
    """The dtype of masks by default: eager attention adds them, SDPA takes booleans."""
    if config is None or attention_of(config) != "eager":
        return torch.bool
    kind = getattr(text_config(config), "dtype", None)
    return kind if isinstance(kind, torch.dtype) and kind.is_floating_point else torch.float32


def _added(seen: Any, dtype: Any) -> Any:
    """A boolean mask as one of `dtype`, to be added to scores unless that is bool."""
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def _named(batch: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    for name in names or ():
        if name not in batch:
            raise one_of("names", name, batch)
    return batch if names is None else {name: batch[name] for name in names}


@dataclass(frozen=True)
class PackedBatch:
    """b packed rows.

    input_ids       int64[b, max_length]
    cu_seqlens      int32[documents + 1], boundaries in the rows end to end, as flash-attn takes
                    them; the padding at a row's end is a document of its own
    max_seqlen      int, the longest document
    position_ids    int64[b, max_length], restarting at 0 in every document and in the padding
    labels          int64[b, max_length], unshifted; -100 on padding, on untrained tokens and on
                    each document's first token. None where rows have none
    attention_mask  int64[b, max_length], 1 real, 0 padding: to count tokens with. Attention that
                    gets nothing else lets documents see each other. None where rows have none
    source_ids      int32[b, max_length], the source of every token, -1 of padding; None where rows
                    have no column `source`
    """

    input_ids: Any
    cu_seqlens: Any
    max_seqlen: int
    position_ids: Any
    labels: Any
    attention_mask: Any
    source_ids: Any = None

    def __len__(self) -> int:
        return len(self.input_ids)

    def to(self, device: Any, *, non_blocking: bool = False) -> PackedBatch:
        """The same on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same in pinned memory; DataLoader calls it with pin_memory=True."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> PackedBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        return PackedBatch(**moved)


def packed_collate_fn(
    examples: Any,
    *,
    max_length: int | None = None,
    strategy: str = "best-fit",
    seed: int | None = None,
    overlong: str = "error",
    pad_token_id: int = 0,
) -> PackedBatch:
    """A collator. Packed rows become a PackedBatch; documents are packed first.

    examples    packed rows, of `PackedDataset`, `PackingIterableDataset` or `packer_cli.hf`: dicts
                with cu_seqlens or position_ids; or documents: sequences of token ids, or
                {"input_ids": ..., "labels": ...} with unshifted labels or none
    max_length  of the rows that documents are packed into, as many as it takes; the other options
                as in `plan_packing`. functools.partial gives them to a DataLoader

    Raises UsageError for documents without max_length, and what plan_packing raises.
    """
    if isinstance(examples, RowBatch) or any(map(_is_row, examples)):
        return _of_rows(row_batch(examples))
    if max_length is None:
        raise UsageError(
            "packed_collate_fn got documents and no max_length",
            "functools.partial(packed_collate_fn, max_length=...)",
        )
    ids, labels = documents_of(examples)
    plan = plan_packing(
        [len(one) for one in ids], max_length, strategy=strategy, seed=seed, overlong=overlong
    )
    return pack_result_to_tensors(plan, ids, labels=labels, pad_token_id=pad_token_id)


def pack_result_to_tensors(
    plan: PackPlan,
    token_ids: Sequence[Any],
    *,
    labels: Sequence[Any] | None = None,
    pad_token_id: int = 0,
) -> PackedBatch:
    """The rows of a plan as tensors.

    plan       of the lengths of token_ids, by `plan_packing`
    token_ids  the documents: lists, 1-d integer arrays or tensors
    labels     for each document, unshifted, -100 where not trained on; None: every token is

    Raises DataError for a plan of other lengths, and for values that are not token ids.
    """
    rows = fill_plan(plan, token_ids, labels=labels, pad_token_id=pad_token_id)
    return _of_rows(batch_of_rows(rows))


def _is_row(example: Any) -> bool:
    """Whether it says where documents begin in it, as rows do, also those of `packer_cli.hf`."""
    return isinstance(example, Mapping) and not example.keys().isdisjoint(
        ("cu_seqlens", "position_ids")
    )


def documents_of(examples: Sequence[Any]) -> tuple[list[Any], list[Any] | None]:
    """(token ids, labels) of documents; labels None when no document has any."""
    if not any(isinstance(one, Mapping) for one in examples):
        return list(examples), None
    for number, one in enumerate(examples):
        if isinstance(one, Mapping) and "input_ids" not in one:
            raise DataError(
                f"document {number} has no input_ids, only {named(map(str, one))}",
                "give token ids: tokenize text first",
            )
    ids = [one["input_ids"] if isinstance(one, Mapping) else one for one in examples]
    labels = [one.get("labels") if isinstance(one, Mapping) else None for one in examples]
    if all(one is None for one in labels):
        return ids, None
    return ids, [one if given is None else given for one, given in zip(ids, labels, strict=True)]


def batch_of_rows(rows: PackedRows) -> RowBatch:
    """Rows in memory, in the form of rows from shards."""
    names = ("input_ids", "labels", "attention_mask", "position_ids")
    columns = {name: torch.as_tensor(getattr(rows, name)) for name in names}
    return RowBatch(columns, {"cu_seqlens": Lists.of(rows.cu_seqlens)})


def _of_rows(batch: RowBatch) -> PackedBatch:
    collated, mask = varlen_collate(batch, config=None), batch.columns.get("attention_mask")

    def as_rows(name: str) -> Any:
        return collated[name].view(len(batch), -1) if name in collated else None

    return PackedBatch(
        as_rows("input_ids"),
        collated["cu_seq_lens_q"],
        collated["max_length_q"],
        as_rows("position_ids"),
        as_rows("labels"),
        None if mask is None else mask.long(),
        as_rows("source_ids"),
    )
