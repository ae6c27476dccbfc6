"""Pack token sequences into a `datasets.Dataset`, in memory (extra `hf`).

The columns are those that `transformers` models take, all fixed_size_list[max_length]:

    input_ids       int32, padded with pad_token_id
    attention_mask  uint8, 1 real, 0 padding
    labels          int32, unshifted: the token, or -100 on padding, on untrained tokens and on
                    each document's first token
    position_ids    int32, restarting at 0 in every document and in the padding

Train on them with a collator of `packer_cli.torch`. Without one, documents see each other: a model
of transformers ignores positions if it gets the attention_mask, or lacks `use_cache=False`.
`check_isolation` of `packer_cli.torch` finds out if they do.

Tokens go from flat arrays to Arrow buffers and never become Python objects. For data that does not
fit into memory use `packer pack`; `datasets.load_from_disk` maps its directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli.errors import DataError, UsageError, needs_extra
from packer_cli.packing.plan import PackPlan
from packer_cli.packing.sequences import PackedRows, fill_plan, pack_sequences

try:
    from datasets import Dataset
except ModuleNotFoundError as error:
    if error.name != "datasets":
        raise
    raise ImportError(needs_extra("packer_cli.hf", "hf")) from error

__all__ = ["pack_dataset", "pack_dataset_from_result"]
_COLUMNS = ("input_ids", "attention_mask", "labels", "position_ids")


def pack_dataset(
    token_ids: Any,
    max_length: int,
    *,
    labels: Any = None,
    pad_token_id: int = 0,
    strategy: str = "best-fit",
    seed: int | None = None,
    overlong: str = "error",
    eos_token_id: int | None = None,
) -> Dataset:
    """Pack n token sequences into rows of `max_length`.

    token_ids    lists, 1-d integer arrays or tensors of ids in 0..2**31-1; or a column: an Arrow
                 list array, or dataset["input_ids"], read without a Python list
    labels       per sequence, unshifted; -100 where not trained on. None: all are trained on
    All else is as in `packer_cli.pack_sequences`. To learn what `overlong` leaves out, make a plan,
    which has it as `loss`, and use `pack_dataset_from_result`.

    Works inside `Dataset.map(..., batched=True)`, which takes Arrow tables:
    `lambda batch: pack_dataset(batch["input_ids"], 4096).data.table`.

    Raises UsageError for unknown options and DataError, naming the sequence, for ids out of range,
    labels of another length, and (under "error") sequences longer than a row.
    """
    rows = pack_sequences(
        _arrays(token_ids), max_length, labels=None if labels is None else _arrays(labels),
        pad_token_id=pad_token_id, strategy=strategy, seed=seed, overlong=overlong,
        eos_token_id=eos_token_id,
    )  # fmt: skip
    return _dataset(rows)


def pack_dataset_from_result(
    plan: PackPlan, token_ids: Any, *, labels: Any = None, pad_token_id: int = 0
) -> Dataset:
    """Fill the rows of a plan that `packer_cli.plan_packing` made from the sequences' lengths.

    Arguments, columns and errors are as in `pack_dataset`; DataError also for a plan of other
    lengths.
    """
    labels = None if labels is None else _arrays(labels)
    return _dataset(fill_plan(plan, _arrays(token_ids), labels=labels, pad_token_id=pad_token_id))


def _arrays(sequences: Any) -> Sequence[Any]:
    """Return a column as a list of views, one per row, and anything else unchanged."""
    if isinstance(sequences, Dataset):
        raise UsageError("expected a column, got a whole Dataset", 'give one: dataset["input_ids"]')
    if isinstance(getattr(sequences, "source", None), Dataset):  # dataset["input_ids"]
        sequences = sequences.source.with_format("arrow")[:][sequences.column_name]
    if not isinstance(sequences, pa.ChunkedArray | pa.Array):
        as_given: Sequence[Any] = sequences
        return as_given
    if not hasattr(pa.array([], sequences.type), "value_lengths"):
        raise DataError(f"expected a column of lists of token ids, got {sequences.type}")
    views: list[Any] = []
    for chunk in getattr(sequences, "chunks", [sequences]):
        values = chunk.flatten()
        if chunk.null_count or values.null_count:
            raise DataError("sequences are or hold nulls", "leave them out: Dataset.filter")
        views += np.split(values.to_numpy(), np.cumsum(chunk.value_lengths()))[:-1]
    return views


def _dataset(rows: PackedRows) -> Dataset:
    columns = {name: np.asarray(getattr(rows, name)) for name in _COLUMNS}
    width = rows.plan.max_length
    lists = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width)
        for name, values in columns.items()
    }
    return Dataset(pa.table(lists))
