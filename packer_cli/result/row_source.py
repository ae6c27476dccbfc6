"""`RowSource`: rows of packed directories by their paths, for readers in Python.

Nothing is read but manifests until rows are taken; each process maps shards on first use, and
copies those at a URL into a local folder first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any

import numpy as np

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.options.value_columns import ValueColumn
from packer_cli.records import Int32, Int64
from packer_cli.result.layout import MANIFEST
from packer_cli.result.opening import Paths, View, open_packed, tokens_of_each
from packer_cli.result.reader import (
    CACHE,
    WITH_THE_SAME,
    Joined,
    Lists,
    PackedDirectory,
    described,
)

SOURCE = "source"


def number_of(what: str, index: int, count: int) -> int:
    """Return the number of one of `count` rows or documents, which an index below 0 counts from
    the end. Raises IndexError.
    """
    if not -count <= (plain := as_index(index)) < count:
        raise IndexError(f"{what} {plain} of {count}")
    return plain % count


class RowSource:
    """Rows of packed directories and views, in the order of their shards.

    path, columns, tokenizer_sha256, tokens, cache   as in `packer_cli.torch.PackedDataset`, and so
    are the errors. It pickles as its paths, and threads may share it.
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
            raise UsageError(
                f"{type(self).__name__}: got no path", "give the --output of packer pack"
            )
        # absolute: shards are mapped later, perhaps by a worker elsewhere
        self.paths: tuple[Path | str, ...] = tuple(
            storage.public(name).rstrip("/") if storage.is_url(name) else Path(name).absolute()
            for name in (os.fspath(place) for place in paths)
        )
        self._cache = None if cache is None else storage.local(cache, CACHE).absolute()
        self._tokens = tokens_of_each(paths, tokens)
        self._known: list[str | None] = [None] * len(paths)  # digests
        results = self._results.parts
        for number, (place, packed) in enumerate(zip(self.paths, results, strict=True)):
            self._known[number] = packed.digest
            if isinstance(packed, View):
                directories = packed.directories.values()
                self._tokens[number] = [directory.path.absolute() for directory in directories]
            if tokenizer_sha256 is not None:
                _check_tokenizer(place, packed.facts.tokenizer, str(tokenizer_sha256))
        self.columns = _columns_of(self.paths, results, columns)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {
            "urls": [storage.typed(p) for p in self.paths if isinstance(p, str)]
        }
        state.pop("_results", None)  # each process opens them once, on first use
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the paths, and the credentials that URLs were typed with."""
        for url in state.pop("urls"):
            storage.public(url)
        self.__dict__.update(state)

    @cached_property
    def _results(self) -> Joined:
        """The opened results. Raises DataError if one was replaced by another result."""
        parts: list[PackedDirectory] = []
        for path, tokens, known in zip(self.paths, self._tokens, self._known, strict=True):
            parts.append(packed := open_packed(path, tokens, self._cache))
            if known not in (None, packed.digest):
                raise DataError(
                    f"{packed.place_of(MANIFEST)}: changed since the dataset was opened",
                    "open it again; pack into a new directory while one is in use",
                )
        return Joined(parts)

    @property
    def fingerprint(self) -> str:
        """Digest of the rows and their order, the same in every place that they are copied to."""
        return self._results.fingerprint

    @property
    def max_length(self) -> int:
        """Tokens in a row, L."""
        return self._results.parts[0].max_length

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of the recipe's sources, in its order, which the column `source` is an index of.

        Each name is there once, also if results are joined. Empty without a recipe.
        """
        names = [source.name for packed in self._results.parts for source in packed.facts.sources]
        return tuple(dict.fromkeys(names))

    @property
    def squared_lengths(self) -> Int64:
        """Attention's cost of each row, int64[rows]: the sum of its squared segment lengths."""
        return self._results.squared_lengths

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        places = [*map(str, self.paths)]
        tokens = sum(packed.facts.tokens for packed in self._results.parts)
        return described(self, places if len(places) > 1 else places[0], tokens)

    def result_of(self, row: int) -> tuple[Path | str, int]:
        """Return a row's directory and its number there, as `packer show` takes it.

        Raises IndexError.
        """
        (number,), (result,) = self._results.places(self.numbers([row]))
        return self.paths[result], int(number)

    @property
    def value_columns(self) -> dict[str, ValueColumn]:
        """The carried columns among `columns`, by name."""
        columns = self._results.parts[0].facts.config.value_columns
        return {name: column for name, column in columns.items() if name in self.columns}

    def gather(self, rows: Sequence[int]) -> dict[str, Any]:
        """Copy rows, as `RowReader.gather` returns them; rows count from the end below 0.

        Raises IndexError.
        """
        numbers = self.numbers(rows)
        names = ["file" if name == SOURCE else name for name in self.columns]
        values = self._results.gather(numbers, names)
        if "file" not in values:
            return values
        inputs = values.pop("file")
        results = np.repeat(self._results.places(numbers)[1], np.diff(inputs.ends))
        return values | {SOURCE: Lists(self._source_of_input[results, inputs.values], inputs.ends)}

    def numbers(self, rows: Sequence[int]) -> Int64:
        """Return the numbers of rows, counted from the first. Raises IndexError."""
        count = len(self)
        numbers = (number_of("row", row, count) for row in rows)
        return np.fromiter(numbers, np.int64, len(rows))

    @cached_property
    def _source_of_input(self) -> Int32:
        """Index of each input's source, int32[results, inputs], -1 if it has none."""
        results = self._results.parts
        numbers = np.full(
            (len(results), max(len(one.facts.inputs) for one in results)), -1, np.int32
        )
        for number, packed in enumerate(results):
            for source in packed.facts.sources:
                numbers[number, slice(*source.inputs)] = self.sources.index(source.name)
        return numbers


def _columns_of(
    paths: Sequence[Path | str], results: Sequence[PackedDirectory], chosen: Sequence[str] | None
) -> tuple[str, ...]:
    """Return the columns of rows.

    Raises UsageError for a column that a result lacks, and DataError if none are chosen and results
    have different columns.
    """
    stored = [[n for n in packed.facts.config.columns if n != "segments"] for packed in results]
    first = stored[0]
    for path, packed, columns in zip(paths, results, stored, strict=True):
        if chosen is None and (unlike := {*first} ^ {*columns}):
            name = min(unlike)
            has, lacks = (paths[0], path) if name in first else (path, paths[0])
            raise DataError(
                f"{has} has a column {name}, {lacks} has none",
                f"name columns that all have: columns=[...]; or {WITH_THE_SAME}",
            )
        for name in chosen or ():
            if name not in (*columns, SOURCE):
                raise one_of("columns", name, columns)
            facts = packed.facts
            if name == SOURCE and not (facts.sources and "segments" in facts.config.columns):
                raise UsageError(
                    f"columns: {SOURCE!r}: {path} has no record of the sources of its segments",
                    "leave it out, or pack a recipe with the column segments",
                )
    if chosen is None:
        return tuple(first)
    has_both = "cu_seqlens" in chosen and PADDED_BOUNDARIES in first
    return tuple(dict.fromkeys([*chosen, *[PADDED_BOUNDARIES] * has_both]))


def _check_tokenizer(path: Path | str, tokenizer: Any, expected: str) -> None:
    """Raise DataError if rows were packed with another tokenizer, or none."""
    if tokenizer is None or tokenizer.sha256 != expected.lower():
        name = "none" if tokenizer is None else f"{tokenizer.source}, sha256 {tokenizer.sha256}"
        raise DataError(
            f"{path}: its tokenizer is {name}; tokenizer_sha256 is {expected}",
            "pack again with --tokenizer set to the trainer's; sha256sum tokenizer.json prints its "
            "digest, which may change when a tokenizer is only saved again",
        )
