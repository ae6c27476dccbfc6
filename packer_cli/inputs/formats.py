"""A format of inputs is a `Reader`, which turns slices of a file into `Records`.

Adding one: CONTRIBUTING.md. The table of formats is `options/formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

from packer_cli.errors import DataError
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import STDIN, open_source
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_named
from packer_cli.options.shape_rules import known_texts, used_columns
from packer_cli.options.shapes import INSIDE, Shape, value_at
from packer_cli.records import BadRecord, Documents, Group, InputFile, LookedAt, Records, Slice

_COMPRESSION_RATIO = 4  # of text, about


class Reader:
    """A format. Whatever it opens may be a URL, and memory does not depend on the size of a file.

    holds_tokens  records can be token ids
    """

    holds_tokens = False

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        """The names of fields in the first record; None when there is none."""
        raise NotImplementedError

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        """The records of a slice in the file's order, in batches, and the stretches that were
        read.
        """
        raise NotImplementedError

    def describe(self, file: InputFile, position: int) -> str:
        """The place of a record, in words; it may read the file, so it is for errors only."""
        raise NotImplementedError

    def weight(self, file: InputFile) -> int:
        """About how many bytes of text a file has."""
        return file.size * (_COMPRESSION_RATIO if file.compression else 1)

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        """A file as about so many slices of about one weight; none where it is read whole."""
        return []

    def groups(self, file: InputFile) -> list[Group] | None:
        """The row groups that slices count; None where they count something else."""
        return None

    def documents(self, file: InputFile) -> Documents | None:
        """The documents that slices count; None where they count something else."""
        return None


class LineReader(Reader):
    """A format of lines: positions are byte offsets in the uncompressed file."""

    def describe(self, file: InputFile, position: int) -> str:
        """Such as "line 17 (byte 1234)": people want line numbers, so the lines before count."""
        if file.path == STDIN:
            return f"byte {position}"
        line, left = 1, position
        with open_source(file) as source:
            while left and (chunk := source.read(byte_streams.BLOCK_BYTES)[:left]):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"line {line} (byte {position})"

    def refused(self, file: InputFile, bad: BadRecord) -> DataError:
        """The error that ends a run at a bad record."""
        place = self.describe(file, bad.position)
        return DataError(f"{file.path}, {place}: {bad.reason}", bad.tip)


class DocumentReader(Reader):
    """A format of token ids, whose slices count documents from 0."""

    holds_tokens = True

    def documents(self, file: InputFile) -> Documents:
        raise NotImplementedError

    def edges(self, file: InputFile, parts: int) -> Sequence[int]:
        """Documents, from 0 to their count, between which lie about as many bytes each."""
        raise NotImplementedError

    def describe(self, file: InputFile, position: int) -> str:
        return f"document {position}"

    def weight(self, file: InputFile) -> int:
        return self.documents(file).bytes

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        edges = self.edges(file, parts)
        each = max(1, self.weight(file)) // max(len(edges) - 1, 1)
        return [Slice(file.index, a, b, each) for a, b in pairwise(edges)]


@cache
def reader_for(name: str) -> Reader:
    """The reader of a format; imports only what that format needs. UsageError for no format."""
    module, reader = format_named(name).reader.split(".")
    made: Reader = getattr(import_module(f"packer_cli.inputs.{module}"), reader)()
    return made


def beginning(file: InputFile, size: int) -> Slice:
    """The first `size` bytes of a file, where slices count bytes; else all of it, of which the
    first records are read soon.
    """
    cut = format_named(file.format).counts_bytes
    return Slice(file.index, 0, size if cut else None, 0)


# --- a look at what nothing uses

FIRST = 64  # records of a slice that are all looked at
_EACH = 64  # one of so many of the others
_LONG = 100  # characters of a text: names, dates, languages and the like are shorter
_TELLING = 20  # characters that no other text has by chance


class Sample:
    """Some records of a slice, for what they hold beside what is used: the first ones, and a few of
    all others, so that it costs next to nothing.
    """

    def __init__(self, shape: Shape, config: DocumentConfig) -> None:
        texts = {shape.columns[own] for own in known_texts(shape, config)}
        # by column, whether its value counts only where it is text
        self._used = {name: name in texts for name in used_columns(shape, config)}
        self._passed = 0
        self._is_none = shape.is_of_tokens

    def of(self, count: int, fields: Callable[[int], Mapping[str, Any] | None]) -> LookedAt:
        """The content of the next `count` records. `fields` gives all fields of one, by its index;
        None where it cannot be read.
        """
        if self._is_none:
            return LookedAt()
        first, self._passed = self._passed, self._passed + count
        wanted = [*range(min(max(FIRST - first, 0), count))]
        wanted += range(max(-first % _EACH, FIRST - first), count, _EACH)
        records = [record for index in wanted if (record := fields(index)) is not None]
        unused = dict[str, int]()
        characters = sum(self._look_at(record, unused) for record in records)
        return LookedAt(len(records), characters, unused)

    def _look_at(self, record: Mapping[str, Any], unused: dict[str, int]) -> int:
        """The number of a record's characters; those of long texts that nothing uses join `unused`.

        Words count rather than a URL, a digest or a picture; not all languages have spaces. A text
        that says what is used once more, or is a rendering of it, is no loss.
        """
        own, whole = list[str](), set[str]()
        for column, is_text in self._used.items():
            value = value_at(record, column)
            if isinstance(value, str) or not is_text:
                own += _texts(value)
                whole.add(column)
        characters = sum(map(len, own))
        longest = max(own, key=len, default="").strip()
        joined = "\n".join(own)
        for name in record.keys() - whole:
            value = record[name]
            is_plain = isinstance(value, str)
            if is_plain and value.lstrip()[:1] + value.rstrip()[-1:] in ("{}", "[]"):  # it is JSON
                is_plain = False
            for text in _texts(value):
                characters += len(text)
                is_short = len(text) < _LONG or (" " not in text and text.isascii())
                is_used = text.strip() in joined or (len(longest) >= _TELLING and longest in text)
                if not is_short and not is_used:
                    key = name if is_plain else name + INSIDE
                    unused[key] = unused.get(key, 0) + len(text)
        return characters


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
