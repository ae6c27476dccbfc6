"""Several results as one dataset: whether they go together, and batches with rows of several."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from packer_cli.errors import DataError, UsageError
from packer_cli.records import Int64
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import load
from packer_cli.result.opening import Paths
from packer_cli.result.shards import digest
from packer_cli.result.tokenized import open_tokenized
from packer_cli.torch.result_rows import ResultRows
from packer_cli.torch.rows import Lists, RowBatch

_WITH_THE_SAME = "pack them with the same options"


def check_alike(parts: Sequence[ResultRows], *, with_columns: bool) -> None:
    """Raise DataError, naming both, for results of which no batch can be made.

    `with_columns`: also where one has a column that another lacks.
    """
    first = parts[0]
    for other in parts[1:]:
        known = _properties(other)
        for name, value in _properties(first).items():
            if value != known[name]:
                raise DataError(
                    f"{first.path} and {other.path} do not go together: {name} is {value} in the "
                    f"first and {known[name]} in the second",
                    _WITH_THE_SAME,
                )
        unlike = {*first.columns_present()} ^ {*other.columns_present()}
        if with_columns and unlike:
            name = min(unlike)
            has, lacks = (first, other) if name in first.columns_present() else (other, first)
            raise DataError(
                f"{has.path} has a column {name}, {lacks.path} has none",
                f"name columns that all have: columns=[...]; or {_WITH_THE_SAME}",
            )


def _properties(part: ResultRows) -> dict[str, object]:
    """What rows of one batch must have in common, in words."""
    packed, tokenizer = part.packed, part.packed.facts.tokenizer
    return {
        "max_length": packed.max_length,
        "the label shift": packed.label_shift,
        "the segment multiple": packed.segment_multiple,
        "the tokenizer": f"{tokenizer.source}, sha256 {tokenizer.sha256}" if tokenizer else "none",
    }


def tokens_of_each(
    paths: Sequence[str | os.PathLike[str]], tokens: Paths | None
) -> list[Paths | None]:
    """For each result, those of the tokenized directories that it is a view of.

    Raises UsageError for a directory that none is a view of.
    """
    given = [tokens] if isinstance(tokens, str | os.PathLike) else list(tokens or ())
    if not given:
        return [None for _ in paths]
    digests = {os.fspath(one): digest(open_tokenized(one).path / MANIFEST)[1] for one in given}
    wanted = []
    for path in paths:
        facts = load(path)
        its = {one.sha256 for one in facts.inputs_now.values()} if facts.config.view else set()
        wanted.append([name for name, sha256 in digests.items() if sha256 in its])
    for name in digests:
        if not any(name in its for its in wanted):
            raise UsageError(
                f"tokens: none of the results is a view of {name}",
                "give the tokenized directories that the views were packed from",
            )
    return [its or None for its in wanted]


def joined_batches(batches: Sequence[RowBatch], places: Sequence[Int64]) -> RowBatch:
    """The rows of several batches as one, those of each in its places. The columns are alike."""
    if len(batches) == 1:
        return batches[0]
    order = np.argsort(np.concatenate(places))
    columns = {}
    for name, values in batches[0].columns.items():
        columns[name] = torch.empty(len(order), *values.shape[1:], dtype=values.dtype)
        for batch, rows in zip(batches, places, strict=True):
            columns[name][torch.from_numpy(rows)] = batch.columns[name]
    ragged = {
        name: Lists.joined([batch.ragged[name] for batch in batches], order)
        for name in batches[0].ragged
    }
    return RowBatch(columns, ragged)
