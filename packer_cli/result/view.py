"""Views: rows that refer to documents of tokenized directories, read as rows of a packed directory.

Every reader gets complete rows, which are those that the same command without --view would have
written, byte for byte: they are filled from the mapped documents by the kernel that fills rows.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli.config.columns import OF_SEGMENTS, PADDED_BOUNDARIES
from packer_cli.errors import DataError
from packer_cli.records import IGNORED, Int32, Int64
from packer_cli.result.documents import segments_in
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shard_writer import fixed, ragged, rows_per_batch, schema
from packer_cli.result.shards import Shard, digest
from packer_cli.result.tokenized import TokenizedDirectory, open_tokenized
from packer_cli.result.tokenized_tokens import Tokens
from packer_cli.result.view_rows import ViewRows

_WHERE = "say where it is now: --tokens DIR, or tokens=[DIR] in Python"


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
        self._tokens, self._documents = Tokens(list(self.directories.values())), self._numbers()
        self.rows = ViewRows(facts, self._tokens, self._documents)

    def _numbers(self) -> Int64:
        """int64[inputs, 2], the first document of each input over all, and how many there are."""
        counts = [
            len(self.directories[number]) if number in self.directories else 0
            for number in range(len(self.facts.inputs))
        ]
        return np.stack([np.cumsum([0, *counts[:-1]]), counts], axis=1).astype(np.int64)

    def filled(self, stored: Any, first_row: int = 0) -> Iterator[Any]:
        return (batch for batch, _ in self._counted(stored, first_row))

    def counted(self, shard: Shard) -> Iterator[tuple[Any, int]]:
        """The complete record batches of a shard, each with the number of its trained tokens.
        Raises as `batches`.
        """
        return self._mapped(shard, self._read_counted)

    def _read_counted(self, source: Any) -> Generator[tuple[Any, int], None, int]:
        rows = 0
        for stored in self.stored_batches(source):
            yield from self._counted(stored, rows)
            rows += stored.num_rows
        return rows

    def segments(self, shard: Shard) -> Int64:
        """int64[4, segments] of a shard, see `documents.py`, without a look at their tokens.
        Raises as `batches`.
        """
        return np.concatenate(list(self._mapped(shard, self._read_segments)), axis=1)

    def _read_segments(self, source: Any) -> Generator[Int64, None, int]:
        rows = 0
        for stored in self.stored_batches(source):
            numbers = np.arange(rows, rows + stored.num_rows)
            self.rows.added(rows, [stored]).pieces(numbers)  # which checks them
            yield segments_in(stored)
            rows += stored.num_rows
        return rows

    def taken(self, segments: Int64) -> tuple[Int32, Int32]:
        """(ids, labels) int32 of such segments, end to end; labels are unshifted."""
        file, position, start, length = segments
        pieces = (
            self._documents[file, 0] + position,
            start.astype(np.int32),
            length.astype(np.int32),
        )
        ids, trained = self._tokens.ids_of(*pieces).view(np.int32), self._tokens.trained_of(*pieces)
        labels = ids.copy() if trained is None else np.where(trained, ids, np.int32(IGNORED))
        labels[np.cumsum(length) - length] = IGNORED  # nothing predicts a segment's first token
        return ids, labels

    def _counted(self, stored: Any, first_row: int) -> Iterator[tuple[Any, int]]:
        sha256 = self.facts.tokenizer.sha256 if self.facts.tokenizer else ""
        kinds = schema(self.facts.config, self.facts.pad_token_id, sha256)
        rows, step = self.rows.added(first_row, [stored]), rows_per_batch(self.max_length)
        for begin in range(0, stored.num_rows, step):
            some = stored.slice(begin, step)
            numbers = np.arange(first_row + begin, first_row + begin + some.num_rows)
            values, trained = rows.fill(numbers, kinds.names)
            columns = [
                some.column(name)
                if name in OF_SEGMENTS
                else ragged(kinds.field(name).type, values[name][1].astype(np.int32),
                            [values[name][0]])
                if name in ("cu_seqlens", PADDED_BOUNDARIES)
                else fixed(kinds.field(name).type, values[name])
                for name in kinds.names
            ]  # fmt: skip
            yield pa.RecordBatch.from_arrays(columns, schema=kinds), trained


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
