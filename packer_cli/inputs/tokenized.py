"""Read tokenized directories: documents that are tokens already, in any order.

    OUT/manifest.json   stands for such a directory as an input; a document's position is its number

To plan, a run reads only lengths and trained flags: `TokenizedInputs.read`. Tokens are fetched
piece by piece when rows are written. By default documents come in one seeded order over all
directories: each directory is ordered by a seeded hash of its documents' content, slices count
documents in this order, and every unit has the same share of every directory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli._kernels.documents import hash_documents
from packer_cli.errors import DataError, UsageError, named
from packer_cli.inputs.formats import DocumentReader, FirstRecords
from packer_cli.inputs.record_columns import batches_of
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import Shape
from packer_cli.options.value_columns import (
    RECORD,
    TOKEN,
    ValueColumn,
    is_of_loss,
)
from packer_cli.options.where import OF_DOCUMENTS
from packer_cli.packing.labels import trained_tokens
from packer_cli.records import (
    FILE,
    HIGHEST_ID,
    POSITION,
    DocumentCounts,
    Documents,
    InputFile,
    Int32,
    Int64,
    Records,
    Slice,
    UInt32,
    UInt64,
    WorkUnit,
    offsets_of,
)
from packer_cli.result.columns import check_defaults
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import TOKENIZED, TokenizedManifest, as_named
from packer_cli.result.manifest import shape_of as shape_of_result
from packer_cli.result.tokenized import AGAIN, TokenizedDirectory, Tokens, open_tokenized

Float64 = npt.NDArray[np.float64]

_BYTES_PER_TOKEN = 4
_OF_INPUT = 0x9E3779B97F4A7C15  # between the seeds of two inputs


@dataclass(frozen=True)
class DocumentPool:
    """Documents that are taken of an input, in their order, which is repeated without end.

    numbers  int64[n], documents
    amounts  int32[n], at least 1: amount of each in the share of its source
    taken    how many are taken of the repeated pool
    """

    numbers: Int64
    amounts: Int32
    taken: int = 0

    def __len__(self) -> int:
        return len(self.numbers)


def order_seed(seed: int, index: int) -> int:
    """Return the seed of an input's order: equal documents of two inputs have different places."""
    return (seed + index * _OF_INPUT) % (1 << 64)


@lru_cache(maxsize=1024)  # a recipe may have hundreds
def opened(file: InputFile) -> TokenizedDirectory:
    """Open the tokenized directory that an input stands for."""
    return open_tokenized(file.path.removesuffix(MANIFEST) or ".")


class TokenizedReader(DocumentReader):
    """Reader of directories: documents are numbered as they were tokenized."""

    def first(self, file: InputFile, config: DocumentConfig) -> FirstRecords | None:
        return FirstRecords(["input_ids"]) if len(opened(file)) else None

    def documents(self, file: InputFile) -> DocumentCounts:
        tokenized = opened(file)
        return DocumentCounts(len(tokenized), _BYTES_PER_TOKEN * tokenized.facts.tokens)

    def edges(self, file: InputFile, parts: int) -> list[int]:
        count = len(opened(file))
        return sorted({count * part // parts for part in range(parts + 1)})

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        """Yield nothing: `TokenizedInputs` reads the documents."""
        return iter(())

    def describe(self, file: InputFile, position: int) -> str:
        tokenized = opened(file)
        number, place = tokenized.places(np.array([position], np.int64))[:, 0].tolist()
        return f"document {position} ({tokenized.facts.inputs[number].name} at {place})"


class TokenizedInputs:
    """Documents of all inputs of a run.

    tokens  of the documents, fetched by piece
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        seed: int | None,
        highest: int = HIGHEST_ID,
        pools: Sequence[Sequence[DocumentPool]] | None = None,
        columns: Iterable[ValueColumn] = (),
    ) -> None:
        """Open all directories.

        seed     of the order; None: documents come as they were tokenized
        highest  the highest id that a token may have
        pools    documents to take of each file. Slices count them from the first pool on
        columns  as in `Tokens`
        """
        self._files = {file.index: file for file in files}
        self._directories = {file.index: opened(file) for file in files}
        self._seed, self._is_mixed = seed, seed is not None or pools is not None
        self._pools = dict(zip(self._files, map(list, pools or ()), strict=False))
        self.tokens = _CheckedTokens(self._directories, highest, columns)

    @property
    def facts(self) -> list[TokenizedManifest]:
        return [directory.facts for directory in self._directories.values()]

    def read(self, unit: WorkUnit) -> Iterator[Documents]:
        """Yield the unit's documents in batches, without tokens."""
        parts = [(part.file, self._numbers(part)) for part in unit.slices]
        file = np.concatenate([np.full(len(numbers), index, np.int32) for index, numbers in parts])
        number = np.concatenate([numbers for _, numbers in parts])
        lengths = np.concatenate([self._directories[index].lengths[numbers]
                                  for index, numbers in parts])  # fmt: skip
        if self._is_mixed and len(parts) > 1:  # every stretch has all parts in their shares
            order = np.argsort(np.concatenate([*map(self._places, unit.slices)]), kind="stable")
            file, number, lengths = file[order], number[order], lengths[order]
        for begin, end in batches_of(lengths):
            yield self._batch(file[begin:end], number[begin:end], lengths[begin:end])

    def stored(self, batch: Documents, name: str) -> Any:
        """Return the values of a column of records for documents, [n], or [n, K]."""
        parts, order = list[Any](), list[Int64]()
        for index in np.unique(batch.file).tolist():
            here = np.flatnonzero(batch.file == index)
            parts.append(self._directories[index].carried_at(name, batch.position[here]))
            order.append(here)
        return np.concatenate(parts)[np.argsort(np.concatenate(order))]

    def _in_pool(self, part: Slice) -> tuple[DocumentPool, Int64]:
        """Return the pool of a slice's documents, and their places in it, int64[n]. All documents
        in the seeded order are a pool, if none were chosen.
        """
        if part.file not in self._pools:
            order = self._directories[part.file].order(order_seed(self._seed or 0, part.file))
            ones = np.ones(len(order), np.int32)
            self._pools[part.file] = [DocumentPool(order, ones, len(order))]
        firsts = [0, *accumulate(pool.taken for pool in self._pools[part.file])]
        number = bisect_right(firsts, part.start) - 1
        pool, stop = self._pools[part.file][number], part.stop
        places = np.arange(part.start, firsts[number + 1] if stop is None else stop)
        return pool, (places - firsts[number]) % len(pool)

    def _numbers(self, part: Slice) -> Int64:
        """Return the numbers of a slice's documents, int64[n]."""
        if not self._is_mixed:
            stop = len(self._directories[part.file]) if part.stop is None else part.stop
            return np.arange(part.start, stop)
        pool, places = self._in_pool(part)
        return pool.numbers[places]

    def _places(self, part: Slice) -> Float64:
        """Return places in the unit of the documents of a slice, by amount, float64[n], 0 to 1."""
        pool, in_pool = self._in_pool(part)
        amounts = pool.amounts[in_pool]
        before = np.cumsum(amounts, dtype=np.int64)
        places: Float64 = (before - amounts / 2) / before[-1]
        return places

    def _batch(self, file: Int32, number: Int64, lengths: Int32) -> Documents:
        offsets = offsets_of(lengths)
        numbered = self.tokens.numbered(file, number)
        trained = self.tokens.trained_of(numbered, np.zeros_like(lengths), lengths)
        if trained is not None:
            counts = trained_tokens(trained, offsets[:-1], offsets[1:]).astype(np.int32)
            self.tokens.compare("trained_tokens", file, number, counts)
        return Documents.of(None, offsets, trained).beside({}, {FILE: file, POSITION: number})


class _CheckedTokens(Tokens):
    """Tokens of a run's inputs, compared with their content hashes and the highest id."""

    def __init__(
        self,
        directories: Mapping[int, TokenizedDirectory],
        highest: int,
        columns: Iterable[ValueColumn],
    ) -> None:
        super().__init__(directories, columns)
        self._highest = highest
        # of all documents, which of those that are cut have been looked at
        self._checked = np.zeros(int(self.documents[:, 1].sum()), bool)

    def gather(
        self, directory: Int32 | Int64, document: Int64, start: Int32, length: Int32
    ) -> UInt32:
        ids = super().gather(directory, document, start, length)
        if ids.max(initial=0) > self._highest:
            at = int(np.argmax(ids > self._highest))
            piece = int(np.searchsorted(np.cumsum(length, dtype=np.int64), at, side="right"))
            path = self._directories[int(directory[piece])].path
            raise DataError(
                f"{path}: its document {document[piece]} holds the id {ids[at].view(np.int32)}, "
                f"expected 0 to {self._highest}",
                f"damaged: {AGAIN}; packer verify {path} says where",
            )
        self._check(directory, document, length, ids)
        return ids

    def _check(self, directory: Int32 | Int64, document: Int64, length: Int32, ids: UInt32) -> None:
        """Raise DataError for documents that do not have their content hash."""
        number = self.numbered(directory, document)
        whole = length == self._lengths_of(directory, document)
        if whole.any():
            hashes = _hashed(ids, length)[whole]
            self.compare("content_hash", directory[whole], document[whole], hashes)
        fresh = np.flatnonzero(~(whole | self._checked[number]))
        if not len(fresh):
            return
        cut = fresh[np.unique(number[fresh], return_index=True)[1]]
        lengths = self._lengths_of(directory[cut], document[cut])
        for begin, end in batches_of(lengths):
            part = cut[begin:end]
            where = directory[part], document[part]
            zeros = np.zeros(len(part), np.int32)
            whole_ids = super().gather(*where, zeros, lengths[begin:end])
            self.compare("content_hash", *where, _hashed(whole_ids, lengths[begin:end]))
        self._checked[number[cut]] = True

    def _lengths_of(self, directory: Int32 | Int64, document: Int64) -> Int32:
        lengths = np.empty(len(document), np.int32)
        for index in np.unique(directory).tolist():
            here = directory == index
            lengths[here] = self._directories[index].lengths[document[here]]
        return lengths

    def compare(
        self, name: str, directory: Int32 | Int64, document: Int64, values: Int32 | UInt64
    ) -> None:
        """Raise DataError for a document whose value differs from the index of its directory."""
        for index in np.unique(directory).tolist():
            here = directory == index
            listed = self._directories[index].indexed_at(name, document[here])
            differ = np.flatnonzero((values[here] != listed).reshape(len(listed), -1).any(1))
            if len(differ):
                path = self._directories[index].path
                raise DataError(
                    f"{path}: its document {document[here][differ[0]]} has another {name} than its "
                    "index says",
                    f"damaged: {AGAIN}; packer verify {path} says where",
                )


def _hashed(ids: UInt32, lengths: Int32) -> UInt64:
    hashes = np.empty((len(lengths), 2), np.uint64)
    hash_documents(ids, offsets_of(lengths), hashes)
    return hashes


def is_tokenized(files: Sequence[InputFile]) -> bool:
    """Tell whether inputs are tokenized directories. Raises UsageError if they do not agree."""
    tokenized = [file for file in files if file.format == TOKENIZED]
    if not tokenized:
        return False
    others = [file for file in files if file.format != TOKENIZED]
    if others:
        raise UsageError(
            f"{as_named(tokenized[0].path)} is tokenized, {others[0].path} is not",
            "tokenize the others, too: packer tokenize",
        )
    first = opened(tokenized[0]).facts.tokenizer
    for file in tokenized[1:]:
        other = opened(file).facts.tokenizer
        if _same(first) != _same(other):
            raise UsageError(
                f"{as_named(tokenized[0].path)} was tokenized with {_named(first)}, "
                f"{as_named(file.path)} with {_named(other)}",
                "tokenize all of them with one tokenizer",
            )
    return True


def _same(tokenizer: Any) -> Any:
    """Return the properties by which tokenizers differ."""
    return tokenizer and (tokenizer.sha256, tokenizer.vocab_size, tokenizer.pad_token_id)


def _named(tokenizer: Any) -> str:
    if tokenizer is None:
        return "no tokenizer"
    return f"{tokenizer.source} (sha256 {tokenizer.sha256[:12] or 'none'})"


def with_columns_of(files: Sequence[InputFile], config: DocumentConfig) -> DocumentConfig:
    """Return the options of a run that packs tokenized directories with their columns of values.

    Raises UsageError if directories have different columns, or if one lacks a column that has no
    default.
    """
    places, columns = dict[str, str](), dict[str, ValueColumn]()
    for file in files:
        for name, column in opened(file).value_columns.items():
            if not column.is_of_segments:
                column = replace(column, of=TOKEN)  # noqa: PLW2901
            place, first = places.setdefault(name, file.path), columns.setdefault(name, column)
            if {column.of, first.of} == {TOKEN, RECORD}:  # each token gets the record's value
                column = first = columns[name] = replace(first, of=TOKEN)  # noqa: PLW2901
            if column != first:
                raise UsageError(
                    f"{as_named(place)} carries {first}, {as_named(file.path)} carries {column}",
                    "tokenize both with the same --carry",
                )
    for name, place in places.items():
        lacking = [file.path for file in files if name not in opened(file).value_columns]
        if lacking and name not in dict(config.carry_default):
            raise UsageError(
                f"{as_named(place)} carries {name}, {as_named(lacking[0])} does not",
                f"tokenize it with --carry {columns[name]}, or say what it has: "
                f"--carry-default {name}={int(is_of_loss(name))}",
            )
    check_defaults(columns, config)
    return replace(config, carry=tuple(map(str, columns.values())))


def new_conditions(directory: TokenizedDirectory, config: DocumentConfig) -> DocumentConfig:
    """Return the conditions of options that a directory was not tokenized with."""
    known = directory.facts.config
    return DocumentConfig(
        where=() if known.where == config.where else config.where,
        tiers=() if known.tiers == config.tiers else config.tiers,
    )


def check_stored(files: Sequence[InputFile], fields: Iterable[str]) -> None:
    """Raise UsageError for fields of conditions that tokenized directories do not keep."""
    for file, name in product(files, fields):
        columns = opened(file).value_columns
        if name in columns and columns[name].is_of_segments:
            continue
        has = f"has {name} of tokens" if name in columns else f"does not keep {name}"
        kept = [*OF_DOCUMENTS, *(one.name for one in columns.values() if one.is_of_segments)]
        raise UsageError(
            f"{as_named(file.path)}: {has}, and conditions on documents can be on {named(kept)}",
            "filter when you tokenize, or tokenize with --carry NAME:TYPE/record",
        )


def shape_of(files: Sequence[InputFile]) -> Shape:
    """Return the shape of the records of tokenized directories."""
    shapes = [shape_of_result(opened(file).facts) for file in files]
    kinds = [member for shape in shapes for member in shape.each]
    return Shape(
        "tokens",
        {"input_ids": "input_ids"},
        of_supervised=any(member.is_supervised for member in kinds),
        of_text=not all(member.is_supervised for member in kinds),
    )
