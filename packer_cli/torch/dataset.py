"""`PackedDataset`: directories of `packer pack` as a map-style dataset, and `RowBatch`: its rows on
their way to a collator.

Rows are gathered from memory-mapped shards, a whole batch at a time; nothing else is ever read
into memory. Those of a view are filled from memory-mapped documents. Shards are mapped in the
process that reads them, on first use; those of a result at a URL are copied into a folder before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packer_cli import storage
from packer_cli._kernels import gathering
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.records import Int32, Int64
from packer_cli.result.layout import MANIFEST
from packer_cli.result.opening import (
    CACHE,
    WITH_THE_SAME,
    Joined,
    Paths,
    View,
    open_packed,
    tokens_of_each,
)
from packer_cli.result.reader import PACK_AGAIN, Lists, PackedDirectory, described

SOURCE = "source"
RAGGED = ("cu_seqlens", PADDED_BOUNDARIES, SOURCE)
_FIXED = ("input_ids", "labels", "attention_mask", "position_ids")


class PackedDataset:
    """The rows of a packed directory or a view, in the order of its shards; or of several of them,
    joined one after another.

    path      the --output of `packer pack`, or a list of them, packed directories and views: they
              must be alike in max_length, segment multiple and tokenizer. A packed
              directory may be a URL that fsspec reads, such as s3://bucket/out
    columns   which columns rows have, of those in the directory, and "source" of a recipe's
              results; None: all but `segments` and `source`
    tokenizer_sha256   digest of the tokenizer.json that training uses; checked when given
    tokens    of a view: where its tokenized directories are, if no longer where they were packed
              from; one or several, in any order
    cache     of a URL, the local folder for copies of its shards, which all processes of the
              machine share. None: ~/.cache/packer, or below XDG_CACHE_HOME

    `dataset[i]` is a dict of tensors: input_ids, labels, position_ids int32[L], attention_mask
    uint8[L], cu_seqlens int32[segments + 1], source int32[segments], which counts `sources`.
    Columns of `--carry` have their own types, bfloat16 and bool among them, but for uint16, which
    is int32: those of tokens [L], or [L, K] where each has K values, with 0 on padding; those of
    records [segments] or [segments, K]. Value i is that of token i.
    `dataset.__getitems__([i, ...])`, which DataLoader calls, is a `RowBatch` for the collators of
    this package.

    It pickles as its paths, and threads may share it. Rows of shards that are not what the manifest
    says are never given.

    Raises DataError when a directory is not finished, of another format version, packed with
    another tokenizer or changed since it was pickled, a shard is missing or cut short, a tokenized
    directory of a view is gone or changed, joined results are not alike, or something at a URL
    cannot be fetched or has changed; UsageError for a column that is not there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        *,
        tokenizer_sha256: str | None = None,
        tokens: Paths | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        if not paths:
            raise UsageError("PackedDataset: got no path", "give the --output of packer pack")
        # absolute: shards are mapped later, perhaps by a worker elsewhere
        self.paths: tuple[Path | str, ...] = tuple(
            storage.public(name).rstrip("/") if storage.is_url(name) else Path(name).absolute()
            for name in (os.fspath(one) for one in paths)
        )
        self._cache = None if cache is None else storage.local(cache, CACHE).absolute()
        self._tokens = tokens_of_each(paths, tokens)
        self._known: list[str | None] = [None] * len(paths)  # digests
        results = self._results.parts
        for number, (place, packed) in enumerate(zip(self.paths, results, strict=True)):
            self._known[number] = packed.digest
            if isinstance(packed, View):
                found = [one.path.absolute() for one in packed.directories.values()]
                self._tokens[number] = found
            if tokenizer_sha256 is not None:
                _check_tokenizer(place, packed.facts.tokenizer, str(tokenizer_sha256))
        self.columns = _columns_of(self.paths, results, columns)

    def __getstate__(self) -> dict[str, Any]:
        opened = "_results"  # each process opens them once, on first use
        own = {name: value for name, value in self.__dict__.items() if name != opened}
        return own | {"urls": [storage.typed(one) for one in self.paths if isinstance(one, str)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """URLs are opened as they were given, in another process, too."""
        for url in state.pop("urls"):
            storage.public(url)
        self.__dict__.update(state)

    @cached_property
    def _results(self) -> Joined:
        """Raises DataError where one is another result by now."""
        found: list[PackedDirectory] = []
        for path, tokens, known in zip(self.paths, self._tokens, self._known, strict=True):
            found.append(packed := open_packed(path, tokens, self._cache))
            if known not in (None, packed.digest):
                raise DataError(
                    f"{packed.place_of(MANIFEST)}: changed since the dataset was opened",
                    "open it again; pack into a new directory while one is in use",
                )
        return Joined(found)

    @property
    def fingerprint(self) -> str:
        """Digest that rows in the same order share, wherever they lie."""
        return self._results.fingerprint

    @property
    def max_length(self) -> int:
        """Tokens in a row, L."""
        return self._results.parts[0].max_length

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The names that the column `source` counts: of the recipe's sources, in its order. Of
        joined results each name is there once. Empty without a recipe.
        """
        every = [one.name for packed in self._results.parts for one in packed.facts.sources]
        return tuple(dict.fromkeys(every))

    @property
    def squared_lengths(self) -> Int64:
        """int64[rows], what attention costs in each row: the sum of its squared segment lengths."""
        return self._results.squared_lengths

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        places = [*map(str, self.paths)]
        tokens = sum(one.facts.tokens for one in self._results.parts)
        return described(self, places if len(places) > 1 else places[0], tokens)

    def result_of(self, row: int) -> tuple[Path | str, int]:
        """The directory that a row is of, and its number there, as `packer show` takes it.

        Raises IndexError.
        """
        (number,), (result,) = self._places([row])
        return self.paths[result], int(number)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> RowBatch:
        """The rows with these numbers, copied into one tensor for each column."""
        numbers, results = self._places(rows)
        chosen = np.unique(results).tolist() or [0]
        places = [np.flatnonzero(results == one) for one in chosen]
        pairs = zip(chosen, places, strict=True)
        batches = [self._gathered(result, numbers[here]) for result, here in pairs]
        return RowBatch.joined(batches, places)

    def _places(self, rows: Sequence[int]) -> tuple[Int64, Int64]:
        """(number in its result, which result) of rows. Raises IndexError."""
        count = len(self)

        def number(row: int) -> int:
            if not -count <= (plain := as_index(row)) < count:
                raise IndexError(f"row {plain} of {count}")
            return plain % count

        return self._results.places(np.fromiter(map(number, rows), np.int64, len(rows)))

    def _gathered(self, result: int, rows: Int64) -> RowBatch:
        """Rows of one of the results. Raises DataError for what is damaged."""
        packed, path = self._results.parts[result], self.paths[result]
        names = ["file" if name == SOURCE else name for name in self.columns]
        try:
            found = packed.gather(rows, names)
        except ValueError as error:  # changed while it was mapped
            raise DataError(f"{path}: {error}", PACK_AGAIN) from error
        carried = {}
        for name, one in packed.facts.config.carried.items():
            if name in found:
                carried[name] = getattr(torch, "int32" if one.type == "uint16" else one.type)
                found[name] = _with_signs(found[name], np.int32 if one.type == "uint16" else None)
        ragged = {name: found[name] for name in names if isinstance(found[name], Lists)}
        fixed = {name: torch.from_numpy(found[name]) for name in names if name not in ragged}
        if "file" in ragged:
            inputs = ragged.pop("file")
            ragged[SOURCE] = Lists(self._source_of_input[result][inputs.values], inputs.ends)
        return RowBatch(fixed, ragged, carried)

    @cached_property
    def _source_of_input(self) -> list[Int32]:
        """int32[inputs] of each result, the number of each input's source."""
        found = []
        for packed in self._results.parts:
            numbers = np.full(len(packed.facts.inputs), -1, np.int32)
            for one in packed.facts.sources:
                numbers[slice(*one.inputs)] = self.sources.index(one.name)
            found.append(numbers)
        return found


def _with_signs(stored: Any, numbers: Any = None) -> Any:
    """What is stored as uint16, as int16, or where it is `numbers` as these: with unsigned ones
    torch can do little.
    """
    if isinstance(stored, Lists):
        return Lists(_with_signs(stored.values, numbers), stored.ends)
    if numbers is not None:
        return stored.astype(numbers)
    return stored.view(np.int16) if stored.dtype == np.uint16 else stored


def _columns_of(
    paths: Sequence[Path | str], results: Sequence[PackedDirectory], chosen: Sequence[str] | None
) -> tuple[str, ...]:
    """The columns that rows get. Raises UsageError for one that a result lacks, and DataError for
    results of unlike columns where none are chosen.
    """
    every = [[n for n in one.facts.config.columns if n != "segments"] for one in results]
    first = every[0]
    for path, packed, own in zip(paths, results, every, strict=True):
        if chosen is None and (unlike := {*first} ^ {*own}):
            name = min(unlike)
            has, lacks = (paths[0], path) if name in first else (path, paths[0])
            raise DataError(
                f"{has} has a column {name}, {lacks} has none",
                f"name columns that all have: columns=[...]; or {WITH_THE_SAME}",
            )
        for name in chosen or ():
            if name not in (*own, SOURCE):
                raise one_of("columns", name, own)
            its = packed.facts
            if name == SOURCE and not (its.sources and "segments" in its.config.columns):
                raise UsageError(
                    f"columns: {SOURCE!r}: {path} does not say the sources of its segments",
                    "leave it out, or pack a recipe with the column segments",
                )
    if chosen is None:
        return tuple(first)
    has_both = "cu_seqlens" in chosen and PADDED_BOUNDARIES in first
    return tuple(dict.fromkeys([*chosen, *[PADDED_BOUNDARIES] * has_both]))


def _check_tokenizer(path: Path | str, tokenizer: Any, expected: str) -> None:
    """Raise DataError where rows were packed with another tokenizer, or none."""
    if tokenizer is None or tokenizer.sha256 != expected.lower():
        its = "none" if tokenizer is None else f"{tokenizer.source}, sha256 {tokenizer.sha256}"
        raise DataError(
            f"{path}: its tokenizer is {its}; tokenizer_sha256 is {expected}",
            "pack again with --tokenizer set to the trainer's, of which sha256sum tokenizer.json "
            "prints the digest; one that was only saved again may have another",
        )


@dataclass(frozen=True)
class RowBatch:
    """b rows, gathered at once. Iterating gives a dict for each row.

    columns  name -> tensor [b, L] as stored: input_ids, labels, position_ids int32,
             attention_mask uint8
    ragged   name -> the rows' boundaries: cu_seqlens, cu_seqlens_padded; and numbers of each
             segment: `source`
    carried  name -> its type in torch, of carried columns: those of tokens are among `columns`, of
             [b, L] or [b, L, K], those of records in `ragged`, all as stored (bfloat16 as int16)
    """

    columns: dict[str, Any]
    ragged: dict[str, Lists]
    carried: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def joined(cls, batches: Sequence[RowBatch], places: Sequence[Int64]) -> RowBatch:
        """The rows of several batches of alike columns, those of each in its places."""
        if len(batches) == 1:  # all of them, in order
            return batches[0]
        order = np.argsort(np.concatenate(places))
        columns = {}
        for name, values in batches[0].columns.items():
            together = np.empty((len(order), *values.shape[1:]), values.numpy().dtype)
            for batch, rows in zip(batches, places, strict=True):
                together[rows] = batch.columns[name].numpy()  # a quarter of the time of torch's
            columns[name] = torch.from_numpy(together)
        ragged = {
            name: Lists.joined([batch.ragged[name] for batch in batches], order)
            for name in batches[0].ragged
        }
        return cls(columns, ragged, batches[0].carried)

    def __len__(self) -> int:
        return len(next(iter((self.columns or self.ragged).values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: values[index] for name, values in self.columns.items()}
        row |= {name: torch.from_numpy(lists[index]) for name, lists in self.ragged.items()}
        return row | {name: row[name].view(kind) for name, kind in self.carried.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def max_length(self) -> int:
        return int(self.columns["input_ids"].shape[1])

    def boundaries(self) -> tuple[Int32, int]:
        """(int32[k + 1] where documents begin in the rows end to end, 0, ..., b * max_length;
        the tokens of the longest).

        The padding at a row's end is a document of its own, so that every place belongs to one.
        A segment's own padding (`--segment-multiple`) is the end of its segment. Raises DataError
        for invalid boundaries.
        """
        own = self.ragged.get(PADDED_BOUNDARIES) or self.ragged["cu_seqlens"]
        edges = np.empty(len(own.values) + 1, np.int32)
        count, longest = gathering.join_boundaries(own.values, own.ends, self.max_length, edges)
        if count < 0:
            raise DataError(
                f"row {longest} of a batch has the boundaries {own[longest].tolist()}: they do "
                f"not ascend from 0 to {self.max_length} at most",
                PACK_AGAIN,
            )
        return edges[:count], longest

    def segments(self) -> tuple[Int64, Int64, Int64]:
        """int64[s] each: (the row, where it begins and ends in the rows end to end) of segments,
        without any padding. Raises as `boundaries`.
        """
        self.boundaries()
        real = self.ragged["cu_seqlens"]
        laid = self.ragged.get(PADDED_BOUNDARIES, real)
        row = np.repeat(np.arange(len(self)), np.diff(real.ends) - 1)
        begin = np.delete(laid.values, laid.ends[1:] - 1) + row * self.max_length
        return row, begin, begin + np.delete(np.diff(real.values), real.ends[1:-1] - 1)

    def sources(self, documents: Int64) -> Int32 | None:
        """int32[k], the source of each of documents[row] documents of the rows, -1 of padding,
        which is a row's last; None where rows do not say.
        """
        own = self.ragged.get(SOURCE)
        return None if own is None else _of_documents(own, documents, -1)

    def carried_by_tokens(self) -> dict[str, Any]:
        """The carried columns of tokens, tensors [b, L] or [b, L, K], without a copy."""
        kinds = self.carried.items()
        return {name: self.columns[name].view(kind) for name, kind in kinds if name in self.columns}

    def carried_by_documents(self, documents: Int64) -> dict[str, Any]:
        """The carried columns of records, tensors [k] or [k, K], of documents as in `sources`, with
        0 for padding.
        """
        kinds = [(name, kind) for name, kind in self.carried.items() if name in self.ragged]
        return {
            name: torch.from_numpy(_of_documents(self.ragged[name], documents, 0)).view(kind)
            for name, kind in kinds
        }


def _of_documents(lists: Lists, documents: Int64, padding: int) -> Any:
    """[k], or [k, K], the values of each row's segments, and `padding` for its documents beyond."""
    values, sizes = lists.values, np.diff(lists.ends)
    found = np.full((int(documents.sum()), *values.shape[1:]), padding, values.dtype)
    begins = np.cumsum(documents) - documents
    found[np.arange(len(values)) + np.repeat(begins - lists.ends[:-1], sizes)] = values
    return found


def row_batch(rows: Any) -> RowBatch:
    """What a collator is given, as a RowBatch: one already, or rows as dicts of tensors.

    Rows without boundaries, such as those of `packer_cli.hf`, have them where positions restart.
    Raises UsageError for rows without input_ids or boundaries, and of unlike columns.
    """
    if not len(rows):
        raise UsageError("a collator of packed rows got no rows")
    batch = rows if isinstance(rows, RowBatch) else _stacked(rows)
    columns, ragged = batch.columns, batch.ragged
    if "cu_seqlens" not in ragged and "position_ids" in columns:
        starts = [np.flatnonzero(row == 0) for row in columns["position_ids"].numpy()]
        edges = Lists.of([np.append(row, batch.max_length) for row in starts])
        batch = RowBatch(columns, ragged := {**ragged, "cu_seqlens": edges}, batch.carried)
    for name, values in (("input_ids", columns), ("cu_seqlens", ragged)):
        if name not in values:
            raise UsageError(
                f"rows without {name}" + (" or position_ids" if name == "cu_seqlens" else ""),
                "PackedDataset gives it unless `columns` leaves it out; transformers.Trainer "
                "removes it unless remove_unused_columns=False",
            )
    return batch


def _stacked(rows: Any) -> RowBatch:
    if unlike := {name for row in rows for name in row.keys() ^ rows[0].keys()}:
        raise UsageError(
            f"some rows of a batch have {min(unlike)}, others do not",
            "pack datasets that are trained on together with the same options",
        )
    batch = RowBatch({}, {name: Lists.of([row[name] for row in rows])
                          for name in RAGGED if name in rows[0]})  # fmt: skip
    segments = [len(row["cu_seqlens"]) - 1 for row in rows] if "cu_seqlens" in rows[0] else []
    for name in (one for one in rows[0] if one not in (*RAGGED, "segments")):
        values = [torch.as_tensor(row[name]) for row in rows]
        sizes = [len(one) if one.ndim else -1 for one in values]
        of_tokens = sizes == [len(row.get("input_ids", ())) for row in rows]
        if name not in _FIXED and (of_tokens or sizes == segments):  # as a PackedDataset gives it
            batch.carried[name] = values[0].dtype
        if of_tokens or name not in batch.carried:
            batch.columns[name] = torch.stack(values)
            continue
        stored = torch.cat(values)
        stored = stored.view(torch.int16) if stored.dtype == torch.bfloat16 else stored
        batch.ragged[name] = Lists(stored.numpy(), np.cumsum([0, *sizes]))
    return batch
