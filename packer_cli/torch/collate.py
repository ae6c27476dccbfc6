"""Collators: packed rows to the inputs of a model, so that no document sees another.

`model(**batch)` is right for models of transformers, which use one or several of these:

    use_cache                          False: models that fill a cache ignore positions
    position_ids                       restart in every document: SDPA, eager and FlexAttention
    cu_seq_lens_q, max_length_q, ...   boundaries: FlashAttention, flash-linear-attention
    seq_idx                            the number of a place's document: kernels of Mamba and of
                                       convolutions; without these kernels transformers refuses it

No batch has a 2-D attention_mask: with one, FlashAttention in transformers takes a row for a single
padded document, and lets the documents in it see each other. Instead, the padding at a row's end is
a document of its own, with labels of -100.

    varlen_collate      every row end to end
    padded_collate      rows as they are
    block_mask_collate  rows with masks: for families that ignore positions, and for models of your
                        own
    separate_collate    every document as a row of its own: for any model, at the price of padding
    flash_attn_collate  as varlen_collate, under flash-attn's own names

They take a `RowBatch` or a list of rows. The other parameters are for functools.partial:

    config   the model's: a collator that would let its documents see each other raises UsageError.
             None for a model of your own, which is not checked: call `check_isolation`
    names    of the values to return, for a model of your own that takes fewer; None: all

If rows have the column `source`, a batch has indexes of `PackedDataset.sources`, -1 for padding:

    source_ids        int32, of every token, in the shape of input_ids
    document_sources  int32[documents], of every document that the batch has boundaries for

A batch has the columns of `--carry` under their names, in their types. Columns of tokens have the
shape of input_ids, or [.., K] with K values a token; columns of records are [documents] or
[documents, K], for every document that position_ids count. They are 0 on padding, and in padding
documents. If a model does not take them, `names` leaves them out.

Each collator raises UsageError for rows without input_ids or cu_seqlens, for unknown `names`, for a
carried column with the name of another value of the batch, and for a missing config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from packer_cli._kernels import gathering
from packer_cli.errors import UsageError, one_of
from packer_cli.packing.plan import PackPlan
from packer_cli.packing.sequences import PackedRows, fill_plan, pack_sequences
from packer_cli.records import IGNORED
from packer_cli.result.reader import Lists
from packer_cli.torch.dataset import RowBatch, row_batch
from packer_cli.torch.isolation import (
    attention_of,
    block_masks,
    check_suitable,
    dense_mask,
    flex_mask,
    text_config,
)

_TOKENS = ("input_ids", "labels")
_OF_DOCUMENTS = "document_sources"  # not `source`, which losses of transformers take for logits
# names that carried columns cannot have, though only some batches use them
_RESERVED = (
    _OF_DOCUMENTS, "source_ids", "document_ids", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
    "max_seqlen_k",
)  # fmt: skip
NOT_GIVEN: Any = object()


def varlen_collate(
    rows: Any, *, config: Any = NOT_GIVEN, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Lay rows end to end, T = b * max_length tokens, with the names and types of transformers.

    input_ids, labels, position_ids  int64[1, T]; positions restart in every document
    seq_idx                          int32[1, T], 0, 1, ... for each document
    cu_seq_lens_q, cu_seq_lens_k     int32[documents + 1], the same tensor
    max_length_q, max_length_k       int, the longest document
    use_cache                        False
    """
    columns, edges = _laid_out(rows, "varlen_collate", config, end_to_end=True)
    return _named(columns | edges, names)


_FLASH_ATTN_NAMES = {
    "cu_seq_lens_q": "cu_seqlens_q",
    "cu_seq_lens_k": "cu_seqlens_k",
    "max_length_q": "max_seqlen_q",
    "max_length_k": "max_seqlen_k",
}


def flash_attn_collate(rows: Any, *, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Collate like `varlen_collate`, with the names of flash_attn_varlen_func: cu_seqlens_q, ..."""
    batch = varlen_collate(rows, config=None)
    return _named({_FLASH_ATTN_NAMES.get(name, name): v for name, v in batch.items()}, names)


def padded_collate(
    rows: Any, *, config: Any = NOT_GIVEN, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Stack rows as they are.

    input_ids, labels, position_ids  int64[b, max_length]; positions restart in every
                                     document and in the padding
    seq_idx                          int32[b, max_length], 0, 1, ... in each row, the padding last

    All else is as in `varlen_collate`: boundaries count tokens of the rows end to end, as
    FlashAttention in transformers lays them.
    """
    columns, edges = _laid_out(rows, "padded_collate", config)
    return _named(columns | edges, names)


def block_mask_collate(
    rows: Any, *, config: Any = NOT_GIVEN, form: str = "mask", names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Collate like `padded_collate`, with masks of the places that see each other.

    config  model.config: the masks include its sliding windows and chunks, and replace the model's
            masks. None for a model of your own without these: the batch then has input_ids,
            labels, position_ids and the mask. Required.

    form "mask"       attention_mask [b, 1, max_length, max_length], True for the places that a
                      query sees, for SDPA. Eager attention in transformers adds masks to scores:
                      0 for these places and the lowest value for others, in the model's type. If
                      layers differ, a dict of such masks by kind of layer. max_length squared
                      bytes per row and mask.
    form "documents"  document_ids int32[b, max_length]: 0, 1, ... in each row, the padding last.
                      `flex_block_mask` makes FlexAttention's masks from them, on their device.

    Raises UsageError for another form, for a config whose attention takes no such mask, and for
    layers of an unknown kind.
    """
    if form not in ("mask", "documents"):
        raise one_of("form", form, ("mask", "documents"))
    columns, edges = _laid_out(rows, "block_mask_collate", config, form)
    documents = columns.pop("seq_idx")
    if config is not None:
        columns |= {"seq_idx": documents} | edges
    if form == "documents":
        return _named(columns | {"document_ids": documents}, names)
    kind = torch.bool  # for SDPA; eager attention adds masks to scores, in the model's type
    if config is not None and attention_of(config) == "eager":
        dtype = getattr(text_config(config), "dtype", None)
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        kind = dtype if is_float else torch.float32
    masks = block_masks(documents, config, partial(dense_mask, kind=kind))
    return _named(columns | {"attention_mask": masks}, names)


def flex_block_mask(document_ids: Any, *, config: Any = NOT_GIVEN) -> Any:
    """Make FlexAttention's BlockMask: causal within each document, with a model's windows.

    document_ids  int [b, length], on the device that attends
    config        model.config, or None for a model of your own without windows

    Returns a mask, or a dict of masks by kind of layer if these differ. transformers takes it as
    attention_mask with attn_implementation="flex_attention". Raises UsageError without config, and
    for layers of an unknown kind.
    """
    return block_masks(document_ids, _known(config, "flex_block_mask"), flex_mask)


def separate_collate(rows: Any) -> dict[str, Any]:
    """Make every document a row of its own, for models that ignore all kinds of boundaries.

    input_ids, labels, position_ids  int64[documents, longest], padded at the end with 0 and
                                     labels of -100; positions go on in the padding
    use_cache                        False

    The padding of packed rows is left out. One long document among many short ones makes a large
    batch: documents * longest tokens.
    """
    batch = row_batch(rows)
    row, begins, ends = batch.segments()
    longest = int((ends - begins).max())
    taken = begins[:, None] + np.arange(longest)
    inside = torch.from_numpy(taken < ends[:, None])
    taken = torch.from_numpy(taken).clamp_(max=len(batch) * batch.max_length - 1)
    columns = {
        name: _apart(values, taken, inside, IGNORED if "labels" in name else 0)
        for name, values in _tokens(batch).items()
    }
    positions = torch.arange(longest).expand(len(begins), longest).contiguous()
    documents = np.bincount(row, minlength=len(batch))
    sources = batch.sources(documents)
    if sources is not None:
        columns[_OF_DOCUMENTS] = torch.from_numpy(sources)
        columns["source_ids"] = torch.where(inside, columns[_OF_DOCUMENTS][:, None], -1)
    carried = {name: _apart(values, taken, inside, 0)
               for name, values in batch.token_values().items()}  # fmt: skip
    carried |= batch.document_values(documents)
    return with_carried(columns | {"position_ids": positions, "use_cache": False}, carried)


def _apart(values: Any, taken: Any, inside: Any, padding: int) -> Any:
    """Return values at the places `taken`, [documents, longest] or [documents, longest, K], with
    `padding` for those that are not `inside` a document.
    """
    outside = ~inside.view(*inside.shape, *(1 for _ in values.shape[2:]))
    return values.flatten(0, 1)[taken].masked_fill_(outside, padding)


def with_carried(batch: dict[str, Any], carried: dict[str, Any]) -> dict[str, Any]:
    """Add carried columns to a batch. Raises UsageError if a name is in use."""
    for name in carried:
        if name in batch or name in _RESERVED:
            raise UsageError(
                f"the carried column {name} has the name of another value of a batch",
                "leave it out by columns=[...], or pack again with another --carry",
            )
    return batch | carried


def _laid_out(
    rows: Any, collator: str, config: Any, form: str = "", *, end_to_end: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (columns [b, max_length], boundaries of documents in the rows end to end).

    With `end_to_end`, columns are [1, T], and documents are counted over all rows. Raises
    UsageError if a model with this config would not use these boundaries.
    """
    check_suitable(collator, _known(config, collator), form)
    batch = row_batch(rows)
    boundaries, longest = batch.boundaries()
    begins, sizes = boundaries[:-1], np.diff(boundaries)
    columns, edges = _tokens(batch), dict[str, Any]()
    positions = torch.empty(int(boundaries[-1]), dtype=torch.int64)
    gathering.count_positions(boundaries, positions.numpy())
    row = int(boundaries[-1]) if end_to_end else batch.max_length
    numbers = np.arange(len(begins)) - np.searchsorted(begins, begins // row * row)
    numbers = np.repeat(numbers.astype(np.int32), sizes)
    columns |= {"position_ids": positions, "seq_idx": torch.from_numpy(numbers)}
    documents = np.bincount(begins // batch.max_length, minlength=len(batch))
    sources = batch.sources(documents)
    if sources is not None:
        columns["source_ids"] = torch.from_numpy(np.repeat(sources, sizes))
        edges[_OF_DOCUMENTS] = torch.from_numpy(sources)
    shape = (1, -1) if end_to_end else (-1, batch.max_length)
    edges["cu_seq_lens_q"] = edges["cu_seq_lens_k"] = torch.from_numpy(boundaries)
    edges |= {"max_length_q": longest, "max_length_k": longest, "use_cache": False}
    columns = {name: values.view(shape) for name, values in columns.items()}
    carried = {name: values.reshape(*shape, *values.shape[2:])
               for name, values in batch.token_values().items()}  # fmt: skip
    carried |= batch.document_values(documents)
    with_carried(edges, carried)  # which raises
    return with_carried(columns, carried), edges


def _known(config: Any, collator: str) -> Any:
    """Return the config. Raises UsageError if none was given: many models ignore positions."""
    if config is NOT_GIVEN:
        raise UsageError(
            f"{collator} does not know the model, and some would let documents see each other",
            f"partial({collator}, config=model.config); config=None for a model of your own",
        )
    return config


def _tokens(batch: RowBatch) -> dict[str, Any]:
    """Return the columns of tokens, int64[b, max_length]."""
    return {name: batch.columns[name].long() for name in _TOKENS if name in batch.columns}


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
                    each document's first token. None if rows have none
    attention_mask  int64[b, max_length], 1 real, 0 padding, to count tokens. Attention that gets
                    only this mask lets documents see each other. None if rows have none
    source_ids      int32[b, max_length], the source of every token, -1 for padding; None if rows
                    have no column `source`
    carried         name -> column of `--carry`: [b, max_length] for tokens, [documents] for
                    records, [.., K] with K values each; 0 on padding
    """

    input_ids: Any
    cu_seqlens: Any
    max_seqlen: int
    position_ids: Any
    labels: Any
    attention_mask: Any
    source_ids: Any = None
    carried: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    def to(self, device: Any, *, non_blocking: bool = False) -> PackedBatch:
        """Copy to another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """Copy to pinned memory; DataLoader calls it with pin_memory=True."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> PackedBatch:
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        carried = {name: change(value) for name, value in self.carried.items()}
        return replace(
            self, carried=carried, **{name: change(value) for name, value in tensors.items()}
        )


def packed_collate_fn(
    examples: Any,
    *,
    max_length: int | None = None,
    strategy: str = "best-fit",
    seed: int | None = None,
    overlong: str = "error",
    pad_token_id: int = 0,
) -> PackedBatch:
    """Collate packed rows, or documents that are packed first, into a PackedBatch.

    examples    packed rows, of `PackedDataset`, `PackingIterableDataset` or `packer_cli.hf`: dicts
                with cu_seqlens or position_ids; or documents: sequences of token ids, or
                {"input_ids": ..., "labels": ...} with unshifted labels or none
    max_length  of the rows that documents are packed into; the other options are those of
                `plan_packing`. Use functools.partial for a DataLoader

    Raises UsageError for documents without max_length, and what plan_packing raises.
    """
    # rows have boundaries or positions of documents, also those of `packer_cli.hf`
    if isinstance(examples, RowBatch) or any(
        isinstance(row, Mapping) and not row.keys().isdisjoint(("cu_seqlens", "position_ids"))
        for row in examples
    ):
        return _of_rows(row_batch(examples))
    if max_length is None:
        raise UsageError(
            "packed_collate_fn got documents and no max_length",
            "functools.partial(packed_collate_fn, max_length=...)",
        )
    ids, labels = documents_of(examples)
    rows = pack_sequences(
        ids, max_length, labels=labels, strategy=strategy, seed=seed, overlong=overlong,
        pad_token_id=pad_token_id,
    )  # fmt: skip
    return _of_rows(batch_of_rows(rows))


def pack_result_to_tensors(
    plan: PackPlan,
    token_ids: Sequence[Any],
    *,
    labels: Sequence[Any] | None = None,
    pad_token_id: int = 0,
) -> PackedBatch:
    """Fill the rows of a plan, as tensors.

    plan       of the lengths of token_ids, by `plan_packing`
    token_ids  the documents: lists, 1-d integer arrays or tensors
    labels     for each document, unshifted, -100 where not trained on; None: every token is

    Raises DataError for a plan of other lengths, and for values that are not token ids.
    """
    rows = fill_plan(plan, token_ids, labels=labels, pad_token_id=pad_token_id)
    return _of_rows(batch_of_rows(rows))


def documents_of(examples: Sequence[Any]) -> tuple[list[Any], list[Any] | None]:
    """Return (token ids, labels) of documents; labels are None if no document has any."""
    documents = [row if isinstance(row, Mapping) else {"input_ids": row} for row in examples]
    ids = [document["input_ids"] for document in documents]
    labels = [document.get("labels") for document in documents]
    if all(values is None for values in labels):
        return ids, None
    pairs = zip(ids, labels, strict=True)
    return ids, [tokens if values is None else values for tokens, values in pairs]


def batch_of_rows(rows: PackedRows) -> RowBatch:
    """Return rows in memory in the form of rows from shards."""
    names = ("input_ids", "labels", "attention_mask", "position_ids")
    columns = {name: torch.as_tensor(getattr(rows, name)) for name in names}
    return RowBatch(columns, {"cu_seqlens": Lists.of(rows.cu_seqlens)})


def _of_rows(batch: RowBatch) -> PackedBatch:
    collated, mask = varlen_collate(batch, config=None), batch.columns.get("attention_mask")
    shape = len(batch), batch.max_length

    def as_rows(name: str) -> Any:
        return collated[name].view(shape) if name in collated else None

    return PackedBatch(
        as_rows("input_ids"),
        collated["cu_seq_lens_q"],
        collated["max_length_q"],
        as_rows("position_ids"),
        as_rows("labels"),
        None if mask is None else mask.long(),
        as_rows("source_ids"),
        {name: collated[name] for name in batch.kinds} | batch.token_values(),
    )
