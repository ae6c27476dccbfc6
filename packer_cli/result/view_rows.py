"""`ViewRows`: rows of mapped record batches of a view, filled from mapped documents.

Nothing is copied but what the rows hold: each token goes from its document into the columns of its
row. What references say is checked each time, since files may change while they are mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from packer_cli._kernels import filling, gathering
from packer_cli.config.columns import PADDED_BOUNDARIES
from packer_cli.records import Int32, Int64
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import ragged_of
from packer_cli.result.shard_writer import PADDED
from packer_cli.result.tokenized_tokens import Tokens

_FIRST, _END, _EDGES, _BOUNDARIES, _LISTS, _FILES = 0, 1, 2, 3, 4, 5
_FIELDS = 9  # of a span
_PROBLEMS = {
    1: "cu_seqlens does not ascend from 0 to {} at most",
    2: "segments are not as many as its boundaries less one",
    3: "refers to a document that its tokenized directories do not have",
    4: "refers to tokens beyond the end of a document",
}


class ViewPieces(NamedTuple):
    """The segments of b rows.

    boundaries, ends       int32[k], int64[b + 1]: row i has boundaries[ends[i]:ends[i + 1]]
    row_offsets            int64[b + 1]: row i has the pieces row_offsets[i]:row_offsets[i + 1]
    number, start, length  int64, int32, int32[p]: a piece's document, first token in it, tokens
    address                int64[p], of its first token in memory
    """

    boundaries: Int32
    ends: Int64
    row_offsets: Int64
    number: Int64
    start: Int32
    length: Int32
    address: Int64


class ViewRows:
    """Spans of rows, in ascending order. An object never changes, so threads may share it."""

    def __init__(self, facts: Manifest, tokens: Tokens, documents: Int64) -> None:
        """`documents` int64[inputs, 2]: the first document of each input among those of `tokens`,
        and how many it has.
        """
        self._facts = facts
        self._tokens = tokens
        self._documents = documents
        self._spans = np.empty((_FIELDS, 0), np.int64)  # see `_span_of`
        self._mapped: list[Any] = []  # the batches that own this memory

    def added(self, first: int, batches: Sequence[Any]) -> ViewRows:
        """These spans and new ones: the rows of record batches, of which the first is `first`."""
        more = ViewRows(self._facts, self._tokens, self._documents)
        spans = []
        for batch in batches:
            spans.append(_span_of(first, batch))
            first += batch.num_rows
        at = int(np.searchsorted(self._spans[_FIRST], spans[0][_FIRST])) if spans else 0
        new = np.array(spans, np.int64).reshape(-1, _FIELDS).T
        more._spans = np.concatenate([self._spans[:, :at], new, self._spans[:, at:]], axis=1)
        more._mapped = [*self._mapped, *batches]
        return more

    def first_absent(self, rows: Int64) -> int:
        """The place in `rows` of the first that is in no span; -1 when all are here."""
        absent: int = gathering.first_absent(rows, self._spans[_FIRST], self._spans[_END])
        return absent

    def pieces(self, rows: Int64) -> ViewPieces:
        """What b rows that are all here refer to. Raises ArrowInvalid for one that is not sound."""
        config, spans = self._facts.config, self._spans
        firsts = spans[_FIRST]
        boundaries, ends = self._lists(rows, _EDGES, _BOUNDARIES)
        count = max(0, len(boundaries) - len(rows))
        row_offsets = np.empty(len(rows) + 1, np.int64)
        number, address = np.empty((2, count), np.int64)
        start, length = np.empty((2, count), np.int32)
        row, problem = gathering.find_pieces(
            rows, firsts, spans[_LISTS:], boundaries, ends, self._documents,
            self._tokens.spans.tokens, config.max_length, config.segment_multiple, row_offsets,
            number, start, length, address,
        )  # fmt: skip
        if problem:
            text = _PROBLEMS[problem].format(config.max_length)
            raise pa.ArrowInvalid(f"row {rows[row]}: {text}")
        return ViewPieces(boundaries, ends, row_offsets, number, start, length, address)

    def files(self, rows: Int64) -> tuple[Int32, Int64]:
        """The input of each segment of b rows that are all here: row i has
        values[ends[i]:ends[i + 1]].
        """
        return self._lists(rows, _LISTS, _FILES)

    def _lists(self, rows: Int64, offsets: int, values: int) -> tuple[Int32, Int64]:
        """(values int32, ends int64[b + 1]) of lists, by the fields that have their addresses."""
        spans, ends = self._spans, np.empty(len(rows) + 1, np.int64)
        gathering.count_values(rows, spans[_FIRST], spans[offsets], ends)
        found = np.empty(ends[-1], np.int32)
        gathering.gather_values(rows, spans[_FIRST], spans[offsets], spans[values], ends, found)
        return found, ends

    def fill(self, rows: Int64, columns: Sequence[str]) -> tuple[dict[str, Any], int]:
        """Columns of b rows that are all here: an array [b, max_length], of boundaries (values,
        ends int64[b + 1]); and how many tokens are trained on. Raises as `pieces`.
        """
        config, found = self._facts.config, self.pieces(rows)
        length, multiple, boundaries = config.max_length, config.segment_multiple, found.boundaries
        out: dict[str, Any] = {name: np.empty((len(rows), length), kind)
               for name, kind in PADDED.items() if name in columns}  # fmt: skip
        padded = np.empty_like(boundaries) if multiple > 1 else None
        edges = np.empty(len(rows) + 1, np.int32)
        trained = filling.fill_rows(
            None, self._tokens.trained_of(found.number, found.start, found.length), found.address,
            found.length, np.arange(len(found.number)), found.row_offsets, length,
            self._facts.pad_token_id,
            out.get("input_ids"), out.get("labels"), out.get("attention_mask"),
            out.get("position_ids"), boundaries, edges, config.label_shift == "pre", multiple,
            padded, True,
        )  # fmt: skip
        out |= {"cu_seqlens": (boundaries, found.ends), PADDED_BOUNDARIES: (padded, found.ends)}
        return out, trained


def _span_of(first: int, batch: Any) -> list[int]:
    """The first row of a batch and the first after it; the addresses of the offsets and values of
    its boundaries; those of its lists of segments, see `find_pieces`.
    """
    boundaries, edges = ragged_of(batch.column("cu_seqlens"))
    segments = batch.column("segments")
    parts = [
        segments.values.field(i).to_numpy() for i in range(segments.type.value_type.num_fields)
    ]
    arrays = [edges, boundaries, segments.offsets.to_numpy(), *parts]
    addresses = [array.ctypes.data for array in arrays]
    return [first, first + batch.num_rows, *addresses, len(segments.values)]
