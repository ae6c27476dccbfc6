"""The sizes of the decompressed pages of a Parquet column, from their headers.

A cell of a gigabyte may be a page of a few kilobytes: what would not fit into memory must be known
before Arrow makes room for it. Arrow itself gives no page headers, so this reads them: Thrift's
compact protocol, of which only the sizes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from packer_cli import storage

_HEADER_BYTES = 1 << 16
# Stores take a request for each page.
_MOST_FETCHED = 64 << 20
_KIND, _DECOMPRESSED, _STORED = 1, 2, 3
_DICTIONARY = 2
_DETAILS = (5, 7, 8)  # of a data page, of a dictionary, of a data page of version 2


class Page(NamedTuple):
    """`size`: bytes once decompressed. `values`: how many it has, for nested columns of leaves."""

    size: int
    values: int
    is_dictionary: bool


def pages(path: str, chunk: Any) -> Iterator[Page]:
    """The pages of a column chunk (of the footer); none further where a header cannot be read."""
    first_only = storage.is_url(path) and chunk.total_compressed_size > _MOST_FETCHED
    place = chunk.dictionary_page_offset or chunk.data_page_offset
    end = place + chunk.total_compressed_size
    with storage.open_bytes(path) as file:
        while place < end:
            file.seek(place)
            header = _Header(file.read(_HEADER_BYTES))
            try:
                fields = header.struct()
                values = next(fields[name][1] for name in _DETAILS if name in fields)
                page = Page(fields[_DECOMPRESSED], values, fields[_KIND] == _DICTIONARY)
                place += header.place + max(fields[_STORED], 0)
            except (IndexError, KeyError, TypeError, StopIteration, RecursionError):
                return  # Arrow says what is wrong with it
            yield page
            if first_only:
                return


class _Header:
    """A struct of Thrift's compact protocol: numbers and structs by the numbers of their fields."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._number()
            fields[number] = self._value(kind & 15)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):  # true and false
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._number()
        if kind == 7:
            self.place += 8
        elif kind == 8:
            size = self._unsigned()
            self.place += size
        elif kind == 12:
            return self.struct()
        else:  # lists, sets and maps: page headers have none
            raise KeyError(kind)
        return None

    def _byte(self) -> int:
        self.place += 1
        return self._data[self.place - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _number(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
