"""What records hold beside what is used: counted in a sample, so that it costs next to nothing.

The first records of a slice are looked at, and a few of all others; where columns are read by name,
the first records of a file alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shape_rules import used_columns
from packer_cli.config.shapes import Shape
from packer_cli.records import LookedAt

FIRST = 64  # records of a slice that are all looked at
_EACH = 64  # one of so many of the others
_LONG = 100  # characters of a text: names, dates, languages and the like are shorter
_TELLING = 20  # characters that no other text has by chance
_Fields = Callable[[int], Mapping[str, Any] | None]


class Sample:
    """The records of a slice that are looked at, as they come."""

    def __init__(self, shape: Shape, config: DocumentConfig) -> None:
        self._used = used_columns(shape, config)
        self._passed = 0
        self._is_none = shape.kind == "tokens"

    def of(self, count: int, fields: _Fields) -> LookedAt:
        """What the next `count` records hold. `fields` gives all of those of one of them, by its
        index; None where it cannot be read.
        """
        first, self._passed = self._passed, self._passed + count
        if self._is_none:
            return LookedAt()
        number = characters = 0
        unused = dict[str, int]()
        for index in _wanted(first, count):
            if (record := fields(index)) is not None:
                number += 1
                characters += _look_at(record, self._used, unused)
        return LookedAt(number, characters, unused)


def together(samples: Sequence[LookedAt]) -> LookedAt:
    """What they hold together."""
    unused = Counter[str]()
    for one in samples:
        unused.update(one.unused)
    characters = sum(one.characters for one in samples)
    return LookedAt(sum(one.records for one in samples), characters, dict(unused))


def _wanted(first: int, count: int) -> Iterator[int]:
    """Indices among the next `count` records of a slice of which `first` have passed."""
    yield from range(min(max(FIRST - first, 0), count))
    yield from range(max(-first % _EACH, FIRST - first), count, _EACH)


def _look_at(record: Mapping[str, Any], used: frozenset[str], unused: dict[str, int]) -> int:
    """How many characters a record has; those of long texts that nothing uses join `unused`."""
    own = [text for name in record.keys() & used for text in _texts(record[name])]
    characters = sum(map(len, own))
    longest = max(own, key=len, default="")
    for name in record.keys() - used:
        for text in _texts(record[name]):
            characters += len(text)
            if len(text) >= _LONG and _is_prose(text) and not _repeats(text, own, longest):
                unused[name] = unused.get(name, 0) + len(text)
    return characters


def _is_prose(text: str) -> bool:
    """Whether it is words rather than a URL, a digest or a picture; not all languages have
    spaces.
    """
    return " " in text or not text.isascii()


def _repeats(text: str, own: list[str], longest: str) -> bool:
    """Whether what is used says it already, or it is what is used, written once more."""
    if len(longest) >= _TELLING and longest in text:
        return True
    return any(text in one for one in own)


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
