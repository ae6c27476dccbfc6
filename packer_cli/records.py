"""The data that flows through a run, one frozen dataclass each.

    InputFile --Slice/WorkUnit--> Records --encode--> Documents --fit--> Pieces --cut--> Documents

The last documents each fit into a row: planned rows are filled from those of a window. A value that
a record brings is a column of its Documents; no step between the reader that finds it and the
writer that stores it depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import filling
from packer_cli.storage import absolute, public, typed

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]

HIGHEST_ID = (1 << 31) - 1  # a token id is kept in an int32
MOST_TURNS = 1 << 16  # of a record, with --turns each
Notify = Callable[[str], None]  # gets messages for the user
IGNORED = -100  # the label of a token that is not trained on


def wrong_ids(ids: Int64) -> npt.NDArray[np.bool_]:
    """Mark the numbers that cannot be token ids."""
    wrong: npt.NDArray[np.bool_] = (ids < 0) | (ids > HIGHEST_ID)
    return wrong


def offsets_of(lengths: Any) -> Int64:
    """Return where n lists of these lengths begin and end if they lie end to end, int64[n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def turn_position(record: Any, turn: Any) -> Any:
    """Return the position of a document that is one turn of a record, with --turns each.

    `record` is the position of the record, `turn` counts the assistant's turns from 0: numbers, or
    int64[n].
    """
    return record * MOST_TURNS + turn


def record_position(position: Any, turns: str) -> Any:
    """Return the position of the record that a document comes from: a number, or int64[n].

    `turns`: value of the option --turns.
    """
    return position // MOST_TURNS if turns == "each" else position


@dataclass(frozen=True)
class InputFile:
    """One input.

    path     as the user names it, "-" for stdin; a URL has no password or query (`storage.public`)
    size     in bytes, as stored
    version  the modification time in ns; at a URL, a hash of the store's version; with an index
             beside the file, a hash of the sizes and versions of both; for a tokenized directory, a
             hash of its manifest. An input has changed if its size or version has.
    shape    name of its shape if the run has several (`Shape.members`)
    """

    index: int
    path: str
    format: str
    compression: str | None
    size: int
    version: int
    shape: str | None = None

    def __getstate__(self) -> tuple[dict[str, Any], str]:
        return self.__dict__, typed(self.path)

    def __setstate__(self, state: tuple[dict[str, Any], str]) -> None:
        """Remember in another process, too, with what password and query a URL is opened."""
        self.__dict__.update(state[0])
        public(state[1])

    @property
    def known_as(self) -> str:
        """Name by which two runs recognize the input: `storage.absolute`."""
        return absolute(self.path)

    def has_changed(self, now: InputFile) -> bool:
        """Tell whether the file `now` differs."""
        return (self.size, self.version) != (now.size, now.version)


class Slice(NamedTuple):
    """Part of a file that a work unit reads.

    start, stop  in the units of the format: bytes (a line belongs to the slice in which it begins),
                 row groups or documents; other files are one slice. stop None: to the end
    weight       bytes of text, about
    """

    file: int
    start: int
    stop: int | None
    weight: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop is None


class RowGroup(NamedTuple):
    """A row group of a file, which is read as a whole. `bytes`: uncompressed."""

    rows: int
    bytes: int


@dataclass(frozen=True)
class DocumentCounts:
    """Number of documents in a file, and the bytes of their tokens, at four a token."""

    count: int
    bytes: int


@dataclass(frozen=True)
class WorkUnit:
    """Slices that one worker packs into one shard: the unit of parallelism, resume and reuse."""

    index: int
    slices: tuple[Slice, ...]

    @property
    def weight(self) -> int:
        return sum(part.weight for part in self.slices)


@dataclass(frozen=True)
class BadRecord:
    """A record that could not be read. `position` as POSITION of `Documents`."""

    position: int
    reason: str
    tip: str = ""


Columns = Mapping[str, Any]
TRAINED, FILE, POSITION, START = "trained", "file", "position", "start"
TURNS, TIER = "\0turns", "\0tier"  # as no field of a record is called


@dataclass(frozen=True)
class Documents:
    """n documents as flat tokens, with columns of values beside them. A column that is absent
    costs nothing.

    ids           uint32[T]; None if they are still in the tokenized directories that FILE and
                  POSITION name
    offsets       int64[n+1] from 0: document i is ids[offsets[i]:offsets[i+1]]; it may be empty
    of_tokens     name -> [T] or [T, K], values of each token
    of_documents  name -> [n] or [n, K], values of each document

    Names of columns that packer itself reads; all others belong to the user:

    TRAINED   of tokens, uint8: 1 if the document says to train on it; absent: on all
    FILE      of documents, int32, index of the input file
    POSITION  of documents, int64, byte offset in the uncompressed file, or row number in columnar
              files; with --turns each, see `turn_position`
    START     of documents, int32, index of the first token in the document it was cut from
    TURNS     of documents, int32[n, 2] as in `Records`; not kept by `concat` if some lack it
    TIER      of documents, uint8, number of the tier of its source that it belongs to, from 0
    """

    ids: UInt32 | None
    offsets: Int64
    of_tokens: Columns = field(default_factory=dict)
    of_documents: Columns = field(default_factory=dict)

    @classmethod
    def of(cls, ids: UInt32 | None, offsets: Int64, trained: UInt8 | None = None) -> Documents:
        """Return documents with no other column than TRAINED."""
        return cls(ids, offsets, {} if trained is None else {TRAINED: trained})

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> Int32:
        """int32[n], tokens of each document, for documents of fewer than 2**31."""
        return np.diff(self.offsets).astype(np.int32)

    @property
    def token_ids(self) -> UInt32:
        """The ids, of documents that have them."""
        if self.ids is None:
            raise ValueError("the ids are still in tokenized directories")
        return self.ids

    @property
    def trained(self) -> UInt8 | None:
        return self.of_tokens.get(TRAINED)

    @property
    def file(self) -> Int32:
        file: Int32 = self.of_documents[FILE]
        return file

    @property
    def position(self) -> Int64:
        position: Int64 = self.of_documents[POSITION]
        return position

    @property
    def start(self) -> Int32:
        start: Int32 = self.of_documents[START]
        return start

    def token_values(self, name: str) -> Any:
        """Return a column as [T] or [T, K]. A document's value stands for each of its tokens."""
        if name in self.of_tokens:
            return self.of_tokens[name]
        return np.repeat(self.of_documents[name], np.diff(self.offsets), axis=0)

    def beside(self, of_tokens: Columns, of_documents: Columns) -> Documents:
        """Return the documents with further columns, which replace columns of the same names."""
        kept = {name: own for name, own in self.of_documents.items() if name not in of_tokens}
        return replace(
            self, of_tokens={**self.of_tokens, **of_tokens}, of_documents={**kept, **of_documents}
        )

    def take(self, documents: Int64) -> Documents:
        """Return the documents of these numbers, in this order, with a copy of their values."""
        return self._gathered(documents, self.offsets[:-1][documents], self.lengths[documents])

    def cut(self, pieces: Pieces) -> Documents:
        """Return pieces as documents of their own, with their START.

        Token values are not copied if the pieces lie end to end and are most of what is here.
        """
        length = pieces.length
        if len(length) == len(self) and np.array_equal(length, np.diff(self.offsets)):
            return self.beside({}, {START: np.zeros(len(self), np.int32)})
        begin, ends = pieces.begin, pieces.begin + length
        first, stop = (int(begin[0]), int(ends[-1])) if len(begin) else (0, 0)
        if 2 * (stop - first) < self.offsets[-1] or not np.array_equal(begin[1:], ends[:-1]):
            made = self._gathered(pieces.document, begin, length)
        else:
            made = Documents(
                None if self.ids is None else self.ids[first:stop],
                offsets_of(length),
                {name: values[first:stop] for name, values in self.of_tokens.items()},
                {name: values[pieces.document] for name, values in self.of_documents.items()},
            )
        return made.beside({}, {START: pieces.start})

    def _gathered(self, document: Int64, begin: Int64, length: Int32) -> Documents:
        offsets = offsets_of(length)

        def gathered(values: Any) -> Any:
            found = np.empty((int(offsets[-1]), *values.shape[1:]), values.dtype)
            filling.gather_pieces(bytes_of(values), value_bytes(values), begin, length,
                                  bytes_of(found))  # fmt: skip
            return found

        return Documents(
            None if self.ids is None else gathered(self.ids),
            offsets,
            {name: gathered(values) for name, values in self.of_tokens.items()},
            {name: values[document] for name, values in self.of_documents.items()},
        )

    @classmethod
    def concat(cls, parts: Sequence[Documents], room: UInt32 | None = None) -> Documents:
        """Return all documents as one table; the only one itself.

        `room`: uint32, memory for the ids if they fit. Columns of documents that not all parts have
        are left out.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        offsets = offsets_of(np.concatenate([np.diff(part.offsets) for part in parts]))
        ids = [part.ids for part in parts if part.ids is not None]
        out = None if room is None or len(room) < offsets[-1] else room[: offsets[-1]]
        names = dict.fromkeys(name for part in parts for name in part.of_tokens)
        shared = [name for name in first.of_documents if name not in names]
        return cls(
            np.concatenate(ids, out=out) if ids else None,
            offsets,
            {
                name: np.concatenate([
                    np.ones(int(part.offsets[-1]), np.uint8)
                    if name == TRAINED and part.trained is None
                    else part.token_values(name)
                    for part in parts
                ])
                for name in names
            },
            {
                name: np.concatenate([part.of_documents[name] for part in parts])
                for name in shared
                if all(name in part.of_documents for part in parts)
            },
        )  # fmt: skip

    def repeat(self, times: int) -> Documents:
        """Return all documents so many times, one after another."""
        return self.concat([self] * times)


def bytes_of(values: Any) -> UInt8:
    """Return the memory of a contiguous array as uint8, without a copy."""
    flat: UInt8 = values.reshape(-1).view(np.uint8)
    return flat


def value_bytes(values: Any) -> int:
    """Return the bytes of one value, [K] of an array [n, K]."""
    return int(values.itemsize * math.prod(values.shape[1:]))


@dataclass(frozen=True)
class TrainedSpans:
    """Spans of bytes that are trained on, in the UTF-8 texts of n documents, in order.

    offsets     int64[n+1]: document i has the spans offsets[i]..offsets[i+1]
    begin, end  int64[spans]
    columns     name -> [spans] or [spans, K], values of the tokens of each span
    """

    offsets: Int64
    begin: Int64
    end: Int64
    columns: Columns = field(default_factory=dict)


class OmittedContent(NamedTuple):
    """Content of a record that a chat template omits.

    record  index in the batch
    what    its kind, one of `result.wording.UNSHOWN`
    turns   number of messages it belongs to; 0 for tools
    text    all of it
    """

    record: int
    what: str
    turns: int
    text: str


class Texts(Sequence[str]):
    """Texts in UTF-8, end to end, for kernels and the fast engine. A text becomes a str only when
    it is indexed.

    data     uint8[B], the texts, each with a byte 0xFF after it, which does not occur in UTF-8
    offsets  int64[n + 1]: text i is data[offsets[i] : offsets[i + 1] - 1]
    """

    def __init__(self, data: UInt8, offsets: Int64) -> None:
        self.data, self.offsets = data, offsets

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Return texts as they are, or copied. Raises UnicodeError for a lone surrogate."""
        if isinstance(texts, Texts):
            return texts
        encoded = [text.encode() for text in texts]
        data = np.frombuffer(b"\xff".join([*encoded, b""]), np.uint8)
        return cls(data, offsets_of([len(text) + 1 for text in encoded]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin, end = self.offsets[index], self.offsets[index + 1] - 1
        return self.data[begin:end].tobytes().decode()

    def take(self, wanted: Int64) -> Texts:
        """Return the texts at indices, int64[m], in this order, as a copy."""
        begin, sizes = self.offsets[:-1][wanted], np.diff(self.offsets)[wanted]
        offsets = offsets_of(sizes)
        data = np.empty(int(offsets[-1]), np.uint8)
        filling.gather_pieces(self.data, 1, begin, sizes.astype(np.int32), data)
        return Texts(data, offsets)

    def clear(self) -> None:
        """Free the memory of the texts."""
        self.data, self.offsets = self.data[:0].copy(), np.zeros(1, np.int64)


class Filtered(NamedTuple):
    """Numbers of records, or documents, that conditions left out.

    tokens   of these, as far as they are known
    lacks    how many of these lack the field of a condition
    differs  how many have a value of another type
    """

    documents: int = 0
    tokens: int = 0
    lacks: int = 0
    differs: int = 0


_NONE_FILTERED = Filtered()


@dataclass(frozen=True)
class Records:
    """A batch of records of one file, before encoding: texts, tokens already, or fields.

    positions  int64[n], as POSITION of `Documents`
    texts      n strings, for records that are one text
    documents  n documents, for records that are token ids; without FILE and POSITION
    spans      trained parts of the texts; None: all of them
    turns      int32[n, 2], the assistant's trained turns in each text, and those without an end
               token; None: not counted
    specials   number of special tokens in the records' own content; None: not counted yet
    unshown    content that the chat template omits
    empty_turns    number of the assistant's turns that the chat template leaves empty
    masked     texts of the assistant that flags and options exclude from training, each with the
               index of its record
    unread     by name: how often a field is there that nothing reads
    conversations  that the texts were rendered from, if they are needed again; None: they are not
    fields     n dicts from the shape's own names to values, for all other shapes
    columns    name -> [n] or [n, K], values of each record that follow it into its documents
    sessions   digests of the sessions of calls that begin in the slice, in its last batch
    empty      number of records without tokens, which are not among the n
    filtered   records that conditions left out, which are not among the n
    bad        records that could not be read, which are not among the n
    consumed   bytes of the file, as stored on disk, that were read for these records
    """

    positions: Int64
    texts: list[str] | Texts | None = None
    documents: Documents | None = None
    spans: TrainedSpans | None = None
    turns: Int32 | None = None
    unshown: list[OmittedContent] = field(default_factory=list)
    empty_turns: int = 0
    masked: list[tuple[int, str]] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)
    specials: int | None = None
    conversations: list[Any] | None = None
    fields: list[dict[str, Any]] | None = None
    columns: Columns = field(default_factory=dict)
    sessions: list[int] = field(default_factory=list)
    empty: int = 0
    filtered: Filtered = _NONE_FILTERED
    bad: list[BadRecord] = field(default_factory=list)
    consumed: int = 0

    def take(self, wanted: Int64, bad: Sequence[BadRecord] = ()) -> Records:
        """Return the records at ascending indices, int64[m], with what is said of those that are
        not among the n, and more `bad` ones. For records that are not composed yet.
        """
        texts = self.texts
        return replace(
            self,
            positions=self.positions[wanted],
            texts=texts.take(wanted) if isinstance(texts, Texts) else _items(texts, wanted),
            documents=None if self.documents is None else self.documents.take(wanted),
            fields=_items(self.fields, wanted),
            columns={name: values[wanted] for name, values in self.columns.items()},
            bad=sorted([*self.bad, *bad], key=lambda record: record.position),
        )


def _items(values: list[Any] | None, wanted: Int64) -> list[Any] | None:
    return None if values is None else [values[i] for i in wanted.tolist()]


@dataclass(frozen=True)
class Pieces:
    """Documents, or parts of them, that each fit into one row.

    document  int64[p], index into the batch they were cut from
    begin     int64[p], first token in the batch's ids
    length    int32[p], 1..max_length
    start     int32[p], index of the first token in its document
    """

    document: Int64
    begin: Int64
    length: Int32
    start: Int32

    def __len__(self) -> int:
        return len(self.length)

    def take(self, wanted: npt.NDArray[np.bool_]) -> Pieces:
        """Return the pieces that bool[p] `wanted` marks."""
        return Pieces(
            self.document[wanted], self.begin[wanted], self.length[wanted], self.start[wanted]
        )
