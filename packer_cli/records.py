"""What flows through the pipeline, one frozen dataclass each.

InputFile --Slice/WorkUnit--> Records --encode--> TokenBatch --fit--> Pieces
    Pieces of a window make a TokenPool, from which planned rows are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from packer_cli.storage import Stat, absolute, public, typed

Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Values = npt.NDArray[np.void]  # of carried columns together: `options.carried.fields_of` parts them

HIGHEST_ID = (1 << 31) - 1  # a token id is kept in an int32
MOST_TURNS = 1 << 16  # of a record, with --turns each
Notify = Callable[[str], None]  # hears what a user should know of
IGNORED = -100  # the label of a token that is not trained on


def wrong_ids(ids: Int64) -> npt.NDArray[np.bool_]:
    """Mark the numbers that cannot be token ids."""
    wrong: npt.NDArray[np.bool_] = (ids < 0) | (ids > HIGHEST_ID)
    return wrong


def offsets_of(lengths: Any) -> Int64:
    """int64[n + 1], where n lists of these lengths begin and end, one after another."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def turn_position(record: Any, turn: Any) -> Any:
    """The position of a document that is a turn of a record, with --turns each: `turn` counts the
    assistant's from 0. Of numbers, or of int64[n].
    """
    return record * MOST_TURNS + turn


def record_position(position: Any, turns: str) -> Any:
    """The position of the record that a document comes from; of numbers, or of int64[n]. `turns`:
    as the option of that name says.
    """
    return position // MOST_TURNS if turns == "each" else position


@dataclass(frozen=True)
class InputFile:
    """One input. `path` is as given by the user ("-" for stdin), a URL without what opens it (see
    `storage.public`); `size` as stored.

    `version`: the modification time in ns; at a URL, a number made of the version that its store
    names; for one with an index beside it, a number made of the sizes and versions of all; for a
    tokenized directory, one made of its manifest. An input has changed if its size or version has.

    `found`: at a URL, it and each file beside it, as they were then, so that no other version is
    read; empty for a local file.

    `shape`: which of the run's shapes its records have, where there are several (`Shape.members`).
    """

    index: int
    path: str
    format: str
    compression: str | None
    size: int
    version: int
    shape: str | None = None
    found: tuple[tuple[str, Stat], ...] = ()

    def __getstate__(self) -> tuple[dict[str, Any], str]:
        return self.__dict__, typed(self.path)

    def __setstate__(self, state: tuple[dict[str, Any], str]) -> None:
        """In another process, too, a URL is opened as it was given."""
        self.__dict__.update(state[0])
        public(state[1])

    def status(self, path: str | None = None) -> Stat | None:
        """It, or a file beside it, as it was found at a URL; None for a local one."""
        return dict(self.found).get(path or self.path)

    @property
    def known_as(self) -> str:
        """The name by which two runs know it: `storage.absolute`."""
        return absolute(self.path)

    def has_changed(self, now: InputFile) -> bool:
        """Tell whether it is another file `now`."""
        return (self.size, self.version) != (now.size, now.version)


class Slice(NamedTuple):
    """The part of a file that a work unit reads.

    `start` and `stop` count what the format is cut by: bytes (a line belongs to the slice in which
    it begins), row groups or documents; other files are one slice each.
    `stop` None: to the end. `weight`: about how many bytes of text it is.
    """

    file: int
    start: int
    stop: int | None
    weight: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop is None


class RowGroup(NamedTuple):
    """A row group of a file, which is read whole. `bytes`: uncompressed."""

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
    """A record that could not be read. `position` as in TokenBatch."""

    position: int
    reason: str
    tip: str = ""


@dataclass(frozen=True)
class TokenBatch:
    """Documents as flat tokens.

    ids       uint32[T]; empty where `tokens_elsewhere`
    offsets   int64[n+1]: document i is ids[offsets[i]:offsets[i+1]]; empty documents are allowed
    trained   uint8[T], 1 where the token is trained on; None: everywhere
    file      int32[n], index of the input file
    position  int64[n], byte offset in the uncompressed file, or row number for columnar files;
              with --turns each, see `turn_position`
    carried   [T], what follows each token; what follows a record is at each of its tokens; None:
              nothing, or `tokens_elsewhere`
    turns     as in `Records`
    """

    ids: UInt32
    offsets: Int64
    trained: UInt8 | None
    file: Int32
    position: Int64
    tokens_elsewhere: bool = False  # in the tokenized directory `file`, at the number `position`
    carried: Values | None = None
    turns: Int32 | None = None

    def take(self, wanted: npt.NDArray[np.bool_]) -> TokenBatch:
        """The documents that are wanted: bool[n]."""
        if wanted.all():
            return self
        lengths = np.diff(self.offsets)
        tokens = np.repeat(wanted, lengths)
        return replace(
            self,
            ids=self.ids[self.offsets[0] : self.offsets[-1]][tokens],
            offsets=offsets_of(lengths[wanted]),
            trained=None if self.trained is None else self.trained[tokens],
            file=self.file[wanted],
            position=self.position[wanted],
            carried=None if self.carried is None else self.carried[tokens],
            turns=None if self.turns is None else self.turns[wanted],
        )


@dataclass(frozen=True)
class TrainedSpans:
    """Spans of bytes that are trained on, of the UTF-8 texts of n documents, in order.

    offsets     int64[n+1]: document i has the spans offsets[i]..offsets[i+1]
    begin, end  int64[spans]
    carried     [spans], what follows the tokens of each; None: nothing that others do not have
    """

    offsets: Int64
    begin: Int64
    end: Int64
    carried: Values | None = None


class OmittedContent(NamedTuple):
    """Something of one kind in a record that a chat template does not show.

    record  its index in the batch
    what    one of `result.wording.UNSHOWN`
    turns   how many messages it is of; 0 for tools, which are none
    text    all of it
    """

    record: int
    what: str
    turns: int
    text: str


class Texts(Sequence[str]):
    """Texts in UTF-8, end to end, as kernels and the fast engine take them: none of them is a str
    before it is asked for.

    data     uint8[B], the texts, each with a byte 0xFF after it, which no UTF-8 has
    offsets  int64[n + 1]: text i is data[offsets[i] : offsets[i + 1] - 1]
    """

    def __init__(self, data: UInt8, offsets: Int64) -> None:
        self.data, self.offsets = data, offsets

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """The texts themselves, or a copy of them. Raises UnicodeError for a lone surrogate."""
        if isinstance(texts, Texts):
            return texts
        encoded = [text.encode() for text in texts]
        data = np.frombuffer(b"\xff".join([*encoded, b""]), np.uint8)
        return cls(data, offsets_of([len(one) + 1 for one in encoded]))

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

    def clear(self) -> None:
        """Let go of the texts."""
        self.data, self.offsets = self.data[:0].copy(), np.zeros(1, np.int64)


@dataclass(frozen=True)
class Records:
    """A batch of records of one file, before encoding: texts, tokens already, or fields.

    positions  int64[n], as in TokenBatch
    texts      n strings, for records that are one text
    tokens     (ids, offsets, trained) as in TokenBatch, for records that are token ids
    spans      of the texts, what is trained on; None: everything
    turns      int32[n, 2], the assistant's trained turns in each text, and those without an end
               token; None: not counted
    specials   special tokens in the records' own content; None: not looked for yet
    unshown    what the chat template left out of the records
    empty_turns    turns of the assistant that it left empty
    masked     what of the assistant flags and options leave untrained, each text with its record
    unread     fields of records that nothing reads, and how many times they are there
    conversations  what the texts were rendered from, where that is needed once more
    fields     n dicts from the shape's own names to values, for all other shapes
    carried    [n] what follows each record, or of token ids [T] what follows each token
    empty      how many more have no token; they are not among the n
    bad        records that could not be read; nor are they
    consumed   bytes of the file (as stored on disk) read so far, for progress
    """

    positions: Int64
    texts: list[str] | Texts | None = None
    tokens: tuple[UInt32, Int64, UInt8 | None] | None = None
    spans: TrainedSpans | None = None
    turns: Int32 | None = None
    unshown: list[OmittedContent] = field(default_factory=list)
    empty_turns: int = 0
    masked: list[tuple[int, str]] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)
    specials: int | None = None
    conversations: list[Any] | None = None
    fields: list[dict[str, Any]] | None = None
    carried: Values | None = None
    empty: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    consumed: int = 0

    def take(self, wanted: Int64) -> Records:
        """The records of the given indices, ascending, without the bad ones."""

        def of(values: Sequence[Any] | None) -> list[Any] | None:
            return None if values is None else [values[i] for i in wanted.tolist()]

        tokens, carried = None, self.carried
        if self.tokens is not None:
            ids, offsets, trained = self.tokens
            lengths = np.diff(offsets)
            chosen = np.zeros(len(lengths), bool)
            chosen[wanted] = True
            keep = np.repeat(chosen, lengths)
            trained = None if trained is None else trained[keep]
            tokens = ids[keep], offsets_of(lengths[wanted]), trained
            carried = None if carried is None else carried[keep]
        elif carried is not None:
            carried = carried[wanted]
        return Records(
            self.positions[wanted], texts=of(self.texts), tokens=tokens, fields=of(self.fields),
            carried=carried,
        )  # fmt: skip


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
        """The pieces where bool[p] `wanted` is set."""
        return Pieces(
            self.document[wanted], self.begin[wanted], self.length[wanted], self.start[wanted]
        )


@dataclass(frozen=True)
class TokenPool:
    """The tokens and pieces that rows are filled from.

    ids       uint32[T]; None where the tokens are in a tokenized directory
    trained   uint8[T] or None (all trained)
    begin     int64[p], first token of each piece in ids and trained
    length    int32[p], its tokens
    start     int32[p], index of that token in its document
    file      int32[p], position int64[p]: where the document came from
    carried   [T] as in TokenBatch; None: nothing, or where the tokens are
    """

    ids: UInt32 | None
    trained: UInt8 | None
    begin: Int64
    length: Int32
    start: Int32
    file: Int32
    position: Int64
    carried: Values | None = None
