"""`PackedDataset`: directories of `packer pack` as a map-style dataset.

Rows are gathered from memory-mapped shards, a whole batch at a time; nothing else is ever read
into memory. Those of a view are filled from memory-mapped documents. Shards are mapped in the
process that reads them, on first use; those of a result at a URL are fetched into a cache before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packer_cli import storage
from packer_cli.config.columns import PADDED_BOUNDARIES, PAIR, SIDE
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.records import Int32, Int64
from packer_cli.result.cache import Cache
from packer_cli.result.cached import open_cached
from packer_cli.result.foresight import Foresight
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import Manifest, TrainingStage
from packer_cli.result.mapped import Lists
from packer_cli.result.opening import (
    WITH_THE_SAME,
    Paths,
    check_alike,
    fingerprint_of,
    joined_fingerprint,
    joined_stages,
    open_packed,
    stages_of,
    tokens_of_each,
)
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory
from packer_cli.result.squared_lengths import squared_lengths
from packer_cli.result.view import View
from packer_cli.torch.rows import SOURCE, RowBatch

SHIFTED = "shift_labels"


class PackedDataset:
    """The rows of a packed directory or a view, in the order of its shards; or of several of them,
    joined one after another.

    path      the --output of `packer pack`, or a list of them, packed directories and views: they
              must be alike in max_length, label shift, segment multiple and tokenizer. A packed
              directory may be a URL that fsspec reads, such as s3://bucket/out
    columns   which columns rows have, of those in the directory, and "source" of a recipe's
              results; None: all but `segments` and `source`. Rows of pairs always have `pair` and
              `side`, so that no collator takes them for others
    tokenizer_sha256   digest of the tokenizer.json that training uses; checked when given
    tokens    of a view: where its tokenized directories are, if no longer where they were packed
              from; one or several, in any order
    cache     of a URL, the local directory in which its shards are kept: for all processes of the
              machine, and for the next run. They share it
    cache_bytes   how large the cache may get; None: as large as the results are

    `dataset[i]` is a dict of tensors: input_ids, labels, position_ids int32[L], attention_mask
    uint8[L], cu_seqlens int32[segments + 1], source int32[segments], which counts `sources`; of
    pairs also pair int32[segments] and side int8[segments].
    `dataset.__getitems__([i, ...])`, which DataLoader calls, is a `RowBatch` for the collators of
    this package. Labels that the directory holds already shifted (`--label-shift pre`) are named
    shift_labels, never labels.

    It pickles as its paths, and threads may share it. A request that fails is repeated; rows of
    shards that are not what the manifest says are never given.

    Raises DataError when a directory is not finished, of another format version, packed with
    another tokenizer or changed since it was pickled, a shard is missing or cut short, a tokenized
    directory of a view is gone or changed, joined results are not alike, or something at a URL
    cannot be fetched or has changed; UsageError for a column that is not there, a URL without a
    cache, or a cache that is too small.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        *,
        tokenizer_sha256: str | None = None,
        tokens: Paths | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        if not paths:
            raise UsageError("PackedDataset: got no path", "give the --output of packer pack")
        kept = _cache_of(paths, cache, cache_bytes)
        its_tokens = tokens_of_each(paths, tokens)
        self._parts = [_Part(*one, kept) for one in zip(paths, its_tokens, strict=True)]
        _check_alike(self._parts, with_columns=columns is None)
        self.columns = self._chosen(columns)
        if tokenizer_sha256 is not None:
            for part in self._parts:
                _check_tokenizer(part, tokenizer_sha256)

    @cached_property
    def foresight(self) -> Foresight | None:
        """What a sampler tells which rows come next; None where all results are local."""
        caches = [part.cache for part in self._parts if part.cache is not None]
        return Foresight([part.packed for part in self._parts], caches[0]) if caches else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "foresight"}

    @property
    def paths(self) -> tuple[Path | str, ...]:
        """The directories; URLs as they were given."""
        return tuple(part.path for part in self._parts)

    @property
    def fingerprint(self) -> str:
        """The same for the same rows in the same order, wherever they lie."""
        return joined_fingerprint([fingerprint_of(part.facts) for part in self._parts])

    @property
    def max_length(self) -> int:
        """Tokens in a row, L."""
        return self._parts[0].packed.max_length

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The names that the column `source` counts: of the recipe's sources, in its order. Of
        joined results each name is there once. Empty without a recipe.
        """
        return tuple(dict.fromkeys(one.name for part in self._parts for one in part.facts.sources))

    @cached_property
    def stages(self) -> tuple[TrainingStage, ...]:
        """The stages of a recipe (name, first_row, rows), which follow one another; empty where
        there are none. Of joined results those of each in turn, where one without is one stage.
        """
        found = [stages_of(part.packed) for part in self._parts]
        return joined_stages(found, list(map(len, self._parts)))

    @property
    def squared_lengths(self) -> Int64:
        """int64[rows], what attention costs in each row: the sum of its squared segment lengths."""
        found = [squared_lengths(part.packed) for part in self._parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    @cached_property
    def _ends(self) -> Int64:
        """int64[results], the first row after each."""
        return np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def result_of(self, row: int) -> tuple[Path | str, int]:
        """The directory that a row is of, and its number there, as `packer show` takes it.

        Raises IndexError.
        """
        (number,), (part,) = self._places(self._numbers_of([row]))
        return self._parts[part].path, int(number)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> RowBatch:
        """The rows with these numbers, copied into one tensor for each column."""
        wanted = self._numbers_of(rows)
        if len(self._parts) == 1:
            return self._parts[0].gather(wanted, self.columns)
        numbers, parts = self._places(wanted)
        taken = [(part, np.flatnonzero(parts == part)) for part in np.unique(parts).tolist()]
        batches = [self._gathered(part, numbers[places]) for part, places in taken]
        return RowBatch.joined(batches, [places for _, places in taken])

    def _numbers_of(self, rows: Sequence[int]) -> Int64:
        """Rows as numbers from 0 on. Raises IndexError."""
        count = len(self)
        try:
            wanted = np.fromiter(map(as_index, rows), np.int64, len(rows))
        except OverflowError:
            raise IndexError(f"row {max(rows, key=abs)} of {count}") from None
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < count:
            given = wanted.copy()
            wanted[wanted < 0] += count
            absent = (wanted < 0) | (wanted >= count)
            if absent.any():
                raise IndexError(f"row {given[absent][0]} of {count}")
        return wanted

    def _places(self, wanted: Int64) -> tuple[Int64, Int64]:
        """(number in its result, which result) of rows."""
        parts = np.searchsorted(self._ends, wanted, side="right")
        return wanted - np.concatenate([[0], self._ends])[parts], parts

    def _gathered(self, part: int, rows: Int64) -> RowBatch:
        """Rows of one of several results, whose sources have the numbers of all."""
        batch = self._parts[part].gather(rows, self.columns)
        if (own := batch.ragged.get(SOURCE)) is not None:
            batch.ragged[SOURCE] = Lists(self._among_all[part][own.values], own.ends)
        return batch

    @cached_property
    def _among_all(self) -> list[Int32]:
        """Of each result, the numbers of its sources among all."""
        return [np.array([self.sources.index(one.name) for one in part.facts.sources], np.int32)
                for part in self._parts]  # fmt: skip

    def _chosen(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        present = self._parts[0].columns
        if columns is None:
            return present
        if isinstance(columns, str):
            columns = [columns]
        if not columns:
            raise UsageError(f"columns: is empty; the directory has {', '.join(present)}")
        for part in self._parts:
            for name in columns:
                part.check_column(name)
        both = [PADDED_BOUNDARIES] if "cu_seqlens" in columns else []
        always = [name for name in (*both, PAIR, SIDE) if name in present]
        return tuple(dict.fromkeys([*columns, *always]))


def _cache_of(
    paths: Sequence[str | os.PathLike[str]],
    cache: str | os.PathLike[str] | None,
    cache_bytes: int | None,
) -> Cache | None:
    """The cache for the URLs among these; None when there are none."""
    url = next((os.fspath(path) for path in paths if storage.is_url(os.fspath(path))), None)
    if url is None:
        if cache is not None or cache_bytes is not None:
            raise UsageError(
                f"{'cache' if cache is not None else 'cache_bytes'}: is for results at URLs, "
                f"{os.fspath(paths[0])} is local and read in place",
                "leave it out",
            )
        return None
    if cache is None:
        raise UsageError(
            f"{url}: a URL, and no cache= says where its shards are kept",
            'PackedDataset(url, cache="/a/local/directory"), with room for the result or '
            "cache_bytes=",
        )
    if cache_bytes is not None and cache_bytes < 1:
        raise UsageError(f"cache_bytes: {cache_bytes} is less than 1")
    return Cache(storage.local(cache, "a cache is a local directory").absolute(), cache_bytes)


class _Part:
    """One result of a dataset, opened once in each process. It pickles as its path."""

    def __init__(self, path: str | os.PathLike[str], tokens: Paths | None, cache: Cache | None):
        name = os.fspath(path)
        self.cache = cache if storage.is_url(name) else None
        if self.cache is not None and tokens:
            raise UsageError(f"tokens: {name} is no view: it has its tokens itself", "leave it out")
        # absolute: shards are mapped later, perhaps by a worker elsewhere
        self.path: Path | str = (
            storage.local(path, "rows are only read from local directories").absolute()
            if self.cache is None
            else name.rstrip("/")
        )
        self._tokens, self._digest = tokens, ""
        packed = self.packed
        self._digest = packed.digest
        if isinstance(packed, View):
            self._tokens = [one.path.absolute() for one in packed.directories.values()]

    def __getstate__(self) -> dict[str, Any]:
        return {n: self.__dict__[n] for n in ("path", "cache", "_tokens", "_digest")}

    @cached_property
    def packed(self) -> PackedDirectory:
        if self.cache is not None:
            return open_cached(str(self.path), self.cache, self._digest or None)
        packed = open_packed(self.path, self._tokens)
        if self._digest not in ("", packed.digest):
            raise DataError(
                f"{packed.place_of(MANIFEST)}: changed since the dataset was opened",
                "open it again; pack into a new directory while one is in use",
            )
        return packed

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def facts(self) -> Manifest:
        return self.packed.facts

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that rows may get, but for `source`."""
        return tuple(name for name in self.facts.config.columns if name != "segments")

    def check_column(self, name: str) -> None:
        """Raise UsageError where rows cannot have a column."""
        if name != SOURCE:
            if name not in self.columns:
                raise one_of("columns", name, self.columns)
        elif not self.facts.sources:
            raise UsageError(
                f"columns: {SOURCE!r}: {self.path} has no sources, since no recipe made it",
                "leave it out, or pack a recipe",
            )
        elif "segments" not in self.facts.config.columns:
            raise UsageError(
                f"columns: {SOURCE!r}: {self.path} was packed without the column segments, by "
                "which sources are found",
                "leave it out, or pack again with that column",
            )

    def gather(self, rows: Int64, columns: Sequence[str]) -> RowBatch:
        """Rows 0 <= row < len(self), copied into one tensor for each column."""
        if SOURCE in columns:
            columns = ["file" if name == SOURCE else name for name in columns]
        try:
            found = self.packed.gather(rows, columns)
        except ValueError as error:  # changed while it was mapped
            raise DataError(f"{self.path}: {error}", PACK_AGAIN) from error
        fixed, ragged = {}, {}
        for name, values in found.items():
            if name == "file":
                ragged[SOURCE] = Lists(self._sources_of(values.values), values.ends)
            elif isinstance(values, Lists):
                ragged[name] = values
            else:
                shifted = name == "labels" and self.packed.label_shift == "pre"
                fixed[SHIFTED if shifted else name] = torch.from_numpy(values)
        return RowBatch(fixed, ragged)

    @cached_property
    def _source_of_input(self) -> Int32:
        """int32[inputs + 1], the number of each input's source; -1: none."""
        numbers = np.full(len(self.facts.inputs) + 1, -1, np.int32)
        for number, one in enumerate(self.facts.sources):
            numbers[slice(*one.inputs)] = number
        return numbers

    def _sources_of(self, inputs: Int32) -> Int32:
        """The numbers of the sources of inputs. Raises DataError for one of no source."""
        known = self._source_of_input
        sources = known[np.clip(inputs, -1, len(known) - 1)]
        if len(sources) and sources.min() < 0:
            raise DataError(
                f"{self.path}: a segment is of input {inputs[sources < 0][0]}, which no source in "
                f"{MANIFEST} has",
                PACK_AGAIN,
            )
        return sources


def _check_alike(parts: Sequence[_Part], *, with_columns: bool) -> None:
    """Raise DataError, naming both, for results of which no batch can be made.

    `with_columns`: also where one has a column that another lacks. Pairs and other rows never go
    together.
    """
    check_alike([part.packed for part in parts])
    first = parts[0]
    for other in parts[1:]:
        unlike = {*first.columns} ^ {*other.columns}
        if not with_columns:
            unlike &= {PAIR, SIDE}
        if unlike:
            name = min(unlike)
            has, lacks = (first, other) if name in first.columns else (other, first)
            raise DataError(
                f"{has.path} has a column {name}, {lacks.path} has none",
                f"name columns that all have: columns=[...]; or {WITH_THE_SAME}",
            )


def _check_tokenizer(part: _Part, expected: str) -> None:
    if not re.fullmatch("([0-9a-fA-F]{64})?", expected):
        raise UsageError(
            f"tokenizer_sha256: {expected!r} is not a digest",
            "sha256sum tokenizer.json prints it",
        )
    tokenizer = part.facts.tokenizer
    if tokenizer is None:
        description = "was packed from token ids, without a tokenizer"
    elif tokenizer.sha256 == expected.lower():
        return
    else:
        description = f"was packed with {tokenizer.source}, sha256 {tokenizer.sha256}"
    raise DataError(
        f"{part.path}: {description}; the trainer's tokenizer has {expected}",
        "pack again with --tokenizer set to the trainer's; one that was only saved again may "
        "have another digest and the same tokens",
    )
