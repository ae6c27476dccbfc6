"""`PackedBatch`: packed rows as one object, from rows, or from documents that are packed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from packer_cli.errors import DataError, UsageError, named
from packer_cli.packing.plan import PackPlan, plan_packing
from packer_cli.packing.sequences import PackedRows, fill_plan
from packer_cli.result.mapped import Lists
from packer_cli.torch.collate import varlen_collate
from packer_cli.torch.rows import RowBatch, row_batch


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
