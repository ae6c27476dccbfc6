"""Views: rows that refer to documents of tokenized directories, read as rows of a packed directory.

Every reader gets complete rows, which are those that the same command without --view would have
written, byte for byte: the kernel that fills rows takes tokens from the mapped documents to their
places. What references say is checked each time, since files may change while they are mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli._kernels import filling, gathering
from packer_cli.errors import DataError
from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.records import IGNORED, Int32, Int64
from packer_cli.result.layout import MANIFEST, Shard, digest
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PARTS, Lists, Mapped, PackedDirectory, as_batch, in_parts
from packer_cli.result.rules import segments_in
from packer_cli.result.shard_writer import PADDED, rows_per_batch
from packer_cli.result.tokenized import TokenizedDirectory, Tokens, open_tokenized

_PROBLEMS = {
    1: "cu_seqlens does not ascend from 0 to {} at most",
    2: "segments are not as many as its boundaries less one",
    3: "refers to a document that its tokenized directories do not have",
    4: "refers to tokens beyond the end of a document",
}
_WHERE = "say where it is now: --tokens DIR, or tokens=[DIR] in Python"


class Pieces(NamedTuple):
    """The segments of b rows.

    boundaries             `Lists` of b
    row_offsets            int64[b + 1]: row i has the pieces row_offsets[i]:row_offsets[i + 1]
    number, start, length  int64, int32, int32[p]: a piece's document, first token in it, tokens
    address                int64[p], of its first token in memory
    """

    boundaries: Lists
    row_offsets: Int64
    number: Int64
    start: Int32
    length: Int32
    address: Int64


class View(PackedDirectory):
    """A finished view, whose tokenized directories are there, as they were.

    directories  by the number of the input
    """

    def __init__(
        self, path: Path, facts: Manifest, tokens: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        """`tokens`: where tokenized directories are now. Raises DataError for those that are gone
        or changed.
        """
        super().__init__(path, facts)
        self.directories = _directories(path, facts, tokens)
        self._tokens = Tokens(self.directories)

    def _complete(self, shard: Shard) -> Iterator[Any]:
        return (batch for batch, _ in self.counted(shard))

    def counted(self, shard: Shard) -> Iterator[tuple[Any, int]]:
        """The complete record batches of a shard, each with the number of its trained tokens.
        Raises as `batches`.
        """
        kinds, step = self._schema(), rows_per_batch(self.max_length)
        with self._readable(shard):
            for first, stored in self._numbered(shard):
                mapped = self._nothing_mapped().added(first, [stored])
                for begin in range(first, first + stored.num_rows, step):
                    rows = np.arange(begin, min(begin + step, first + stored.num_rows))
                    columns, trained = self._filled(mapped, rows, in_parts(kinds.names))
                    yield as_batch(columns, kinds), trained

    def segments(self, shard: Shard) -> Int64:
        """int64[4, segments] of a shard, see `documents.py`, without a look at their tokens.
        Raises as `batches`.
        """
        found = []
        with self._readable(shard):
            for first, stored in self._numbered(shard):
                mapped = self._nothing_mapped().added(first, [stored])
                self._pieces(mapped, np.arange(first, first + stored.num_rows))  # which checks them
                found.append(segments_in(stored))
        return np.concatenate(found, axis=1)

    def taken(self, segments: Int64) -> tuple[Int32, Int32]:
        """(ids, labels) int32 of such segments, end to end; labels are unshifted."""
        file, position = segments[:2]
        start, length = segments[2:].astype(np.int32, order="C")
        number = self._tokens.numbered(file, position)
        ids = self._tokens.gather(file, position, start, length).view(np.int32)
        trained = self._tokens.trained_of(number, start, length)
        labels = ids.copy() if trained is None else np.where(trained, ids, np.int32(IGNORED))
        labels[np.cumsum(length) - length] = IGNORED  # nothing predicts a segment's first token
        return ids, labels

    def _gathered(self, mapped: Mapped, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        """Columns that are stored alone are not filled, nor checked."""
        if all(name in self.stored_columns or name in PARTS for name in columns):
            return super()._gathered(mapped, rows, columns)
        return self._filled(mapped, rows, columns)[0]

    def _filled(
        self, mapped: Mapped, rows: Int64, columns: Sequence[str]
    ) -> tuple[dict[str, Any], int]:
        """(columns of rows that are mapped, how many tokens are trained on). Raises ArrowInvalid
        for a row that is not sound.
        """
        config, found = self.facts.config, self._pieces(mapped, rows)
        boundaries, ends = found.boundaries.values, found.boundaries.ends
        out: dict[str, Any] = {name: np.empty((len(rows), self.max_length), kind)
               for name, kind in PADDED.items() if name in columns}  # fmt: skip
        padded = np.empty_like(boundaries) if config.segment_multiple > 1 else None
        trained = filling.fill_rows(
            None, self._tokens.trained_of(found.number, found.start, found.length), found.address,
            found.length, np.arange(len(found.number)), found.row_offsets, self.max_length,
            self.facts.pad_token_id,
            out.get("input_ids"), out.get("labels"), out.get("attention_mask"),
            out.get("position_ids"), boundaries, np.empty(len(rows) + 1, np.int32),
            config.label_shift == "pre", config.segment_multiple, padded, True,
        )  # fmt: skip
        out["cu_seqlens"] = found.boundaries
        if padded is not None:
            out[PADDED_BOUNDARIES] = Lists(padded, ends)
        of_rows = {n: out[n] if n in out else mapped.gather(rows, n) for n in columns}
        return of_rows, trained

    def _pieces(self, mapped: Mapped, rows: Int64) -> Pieces:
        """What b rows that are mapped refer to. Raises ArrowInvalid for one that is not sound."""
        config, boundaries = self.facts.config, mapped.gather(rows, "cu_seqlens")
        count = max(0, len(boundaries.values) - len(rows))
        row_offsets = np.empty(len(rows) + 1, np.int64)
        number, address = np.empty((2, count), np.int64)
        start, length = np.empty((2, count), np.int32)
        row, problem = gathering.find_pieces(
            rows, mapped.firsts, mapped.segments, boundaries.values, boundaries.ends,
            self._tokens.documents, self._tokens.spans.tokens, config.max_length,
            config.segment_multiple, row_offsets, number, start, length, address,
        )  # fmt: skip
        if problem:
            text = _PROBLEMS[problem].format(config.max_length)
            raise pa.ArrowInvalid(f"row {rows[row]}: {text}")
        return Pieces(boundaries, row_offsets, number, start, length, address)


def _directories(
    view: Path, facts: Manifest, given: Sequence[str | os.PathLike[str]]
) -> dict[int, TokenizedDirectory]:
    """The tokenized directories by the numbers of the inputs."""
    expected = {one.sha256 for one in facts.inputs_now.values()}
    found: dict[str, TokenizedDirectory] = {}
    for name in given:
        directory = open_tokenized(name)
        sha256 = digest(directory.path / MANIFEST)[1]
        if sha256 not in expected:
            raise DataError(
                f"{name}: is not a tokenized directory of the view {view}: the sha256 of its "
                f"manifest is {sha256}, expected {' or '.join(sorted(expected))}",
                "give the one that the view was packed from",
            )
        found[sha256] = directory
    for one in facts.inputs_now.values():
        if one.sha256 not in found:
            found[one.sha256] = open_tokenized(_recorded(view, one.path, one.sha256))
    return {number: found[one.sha256] for number, one in facts.inputs_now.items()}


def _recorded(view: Path, path: str, expected: str) -> Path:
    """The tokenized directory of an input, where the view's manifest says. Raises DataError.

    A relative path is tried from the current directory, from the view, and from the folder that the
    view is in: the usual place of who packed it. The digest tells whether it is the right one.
    """
    other = ""
    for place in dict.fromkeys([Path(path), view / path, view.absolute().parent / path]):
        if storage.is_file(str(place)):
            sha256 = digest(place)[1]
            if sha256 == expected:
                return place.parent
            other = other or sha256
    folder = Path(path).parent
    if other:
        raise DataError(
            f"{view}: its tokenized directory {folder} has changed: the sha256 of {MANIFEST} is "
            f"{other}, expected {expected}",
            f"if what the view was packed from is elsewhere, {_WHERE}; or pack it again",
        )
    looked = "" if folder.is_absolute() else ", from here and from the view"
    raise DataError(
        f"{view}: its tokenized directory {folder} is gone{looked}: expected its {MANIFEST} "
        f"with the sha256 {expected}",
        _WHERE,
    )
