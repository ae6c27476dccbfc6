"""The chunks of columns in the footer of a Parquet file, found without Arrow.

pyarrow has them, too, but it aborts the process that asks for a chunk of a damaged footer. Footers
and the headers of pages are structs of Thrift's compact protocol: fields, each with its type and
the distance of its number from that of the field before.
"""

from __future__ import annotations

from typing import NamedTuple

# numbers of fields: of a footer, a row group, a chunk, its meta data, and the header of a page
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3
_PATH, _SIZE, _PAGES, _DICTIONARY = 3, 6, 9, 11
_KIND, _PAGE_SIZE, _OF_DICTIONARY, _VALUES = 1, 2, 7, 1
_DICTIONARY_PAGE = 2
# what the functions raise for damage
DAMAGE = (IndexError, KeyError, ValueError, RecursionError)


class Chunk(NamedTuple):
    """A column's part of a row group.

    path        the names that lead to the column, with dots between them
    size        bytes once it is decompressed
    dictionary  where in the file its dictionary begins; None if it has none
    """

    path: str
    size: int
    dictionary: int | None


def row_groups_in(footer: bytes) -> list[int]:
    """Find where in a footer each row group is described."""
    return _list(footer, _struct(footer, 0)[0][_ROW_GROUPS])[0]


def chunks_in(footer: bytes, row_group: int) -> list[Chunk]:
    """Return the chunks of the row group that is described there."""
    chunks = list[Chunk]()
    for column in _list(footer, _struct(footer, row_group)[0][_COLUMNS])[0]:
        places = _struct(footer, _struct(footer, column)[0][_META_DATA])[0]
        names = list[str]()
        for place in _list(footer, places[_PATH])[0]:
            length, begin = _number(footer, place)
            names.append(footer[begin : begin + length].decode())
        dictionary = None
        if _DICTIONARY in places:  # some writers have 0 there
            dictionary = _value(footer, places[_DICTIONARY]) or _value(footer, places[_PAGES])
        chunks.append(Chunk(".".join(names), _value(footer, places[_SIZE]), dictionary))
    return chunks


def dictionary_in(header: bytes) -> tuple[int, int]:
    """Return the decompressed bytes of a dictionary and the number of its values, by the header of
    its page; 0, 0 for another page.
    """
    places, _ = _struct(header, 0)
    if _value(header, places[_KIND]) != _DICTIONARY_PAGE:
        return 0, 0
    values = _struct(header, places[_OF_DICTIONARY])[0][_VALUES]
    return _value(header, places[_PAGE_SIZE]), _value(header, values)


def _value(data: bytes, at: int) -> int:
    """An integer that is not negative: those are stored doubled."""
    return _number(data, at)[0] >> 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits in a byte, and where it ends."""
    value = shift = 0
    while (byte := data[at]) > 127 and shift < 64:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1


def _struct(data: bytes, at: int) -> tuple[dict[int, int], int]:
    """Where the value of each field of a struct begins, by number, and where the struct ends."""
    places, number = dict[int, int](), 0
    while head := data[at]:
        at += 1
        if head > 15:
            number += head >> 4
        else:
            number, at = _value(data, at), _number(data, at)[1]
        places[number] = at
        at = _after(data, at, head & 15)
    return places, at + 1


def _list(data: bytes, at: int) -> tuple[list[int], int]:
    """Where each item of a list begins, and where the list ends."""
    size, kind, at = data[at] >> 4, data[at] & 15, at + 1
    if size == 15:
        size, at = _number(data, at)
    places = list[int]()
    for _ in range(size):
        places.append(at)
        at = _after(data, at, kind) if kind > 2 else at + 1
    return places, at


def _after(data: bytes, at: int, kind: int) -> int:
    """Where a value of this type ends."""
    if kind < 4:  # 1 and 2 are true and false
        return at + (kind == 3)
    if kind == 7:  # a float
        return at + 8
    if kind == 8:
        length, at = _number(data, at)
        return at + length
    if kind in (9, 10):
        return _list(data, at)[1]
    if kind == 12:
        return _struct(data, at)[1]
    if kind > 6:  # maps, which Parquet does not have
        raise ValueError(f"type {kind}")
    return _number(data, at)[1]
