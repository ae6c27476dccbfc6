"""How many bytes shards have that nobody writes: a stream's parts have known sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli.config.columns import OF_SEGMENTS
from packer_cli.records import Int64

_ALIGNMENT = 8  # every buffer of a record batch begins at a multiple of these bytes


class ShardSizes:
    """Sizes of Arrow IPC streams of rows with this schema.

    end     bytes of a shard after its last batch
    around  and before its first, together
    """

    end = 8

    def __init__(self, schema: Any) -> None:
        self._fields = [(field.name, field.type) for field in schema]
        self.around = schema.serialize().size + self.end
        example = _row_of_one_token(schema)
        one = np.ones(1, np.int64)
        fields = [(field.name, field.type) for field in example.schema]
        buffers = int(_buffers(fields, one, one)[0])
        # what describes a batch has the same size in all batches
        self._described = int(pa.ipc.get_record_batch_size(example)) - buffers

    def batches(self, rows: Int64, segments: Int64) -> Int64:
        """int64[n]: bytes of n batches of `rows` int64[n] with `segments` int64[n]."""
        return _buffers(self._fields, rows, segments) + self._described


def _buffers(fields: list[tuple[str, Any]], rows: Int64, segments: Int64) -> Int64:
    """int64[n]: bytes of all columns' buffers."""
    total = np.zeros(len(rows), np.int64)
    for name, kind in fields:
        boundaries = 0 if name in OF_SEGMENTS else rows  # one more in each row
        for size in _sizes(kind, rows, segments + boundaries):
            total += size
    return total


def _sizes(kind: Any, rows: Int64, values: Int64) -> list[Int64]:
    """Of the buffers of a column, whose lists have so many `values`."""
    if pa.types.is_fixed_size_list(kind):
        return [_aligned(rows * kind.list_size, kind.value_type)]
    offsets = _aligned(rows + 1, pa.int32())
    if pa.types.is_struct(kind.value_type):
        parts = (kind.value_type.field(i).type for i in range(kind.value_type.num_fields))
        return [offsets, *(_aligned(values, part) for part in parts)]
    return [offsets, _aligned(values, kind.value_type)]


def _aligned(values: Int64, kind: Any) -> Int64:
    size: Int64 = values * (kind.bit_width // 8)
    return size + -size % _ALIGNMENT


def _row_of_one_token(schema: Any) -> Any:
    """A batch with a schema like this one, whose row has one token instead of max_length."""
    arrays = []
    for field in schema:
        kind = field.type
        if pa.types.is_fixed_size_list(kind):
            arrays.append(pa.array([[0]], pa.list_(kind.value_field, 1)))
        elif pa.types.is_struct(kind.value_type):
            arrays.append(pa.array([[{"file": 0, "position": 0, "start": 0}]], kind))
        else:
            arrays.append(pa.array([[0] if field.name in OF_SEGMENTS else [0, 1]], kind))
    return pa.record_batch(arrays, names=schema.names)
