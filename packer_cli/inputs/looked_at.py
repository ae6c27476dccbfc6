"""What records hold beside what is used: counted in a sample, so that it costs next to nothing.

The first records of a slice are looked at, and a few of all others; where columns are read by name,
the first records of a file alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shape_rules import known_texts, used_columns
from packer_cli.config.shapes import INSIDE, Shape, value_at
from packer_cli.records import LookedAt

FIRST = 64  # records of a slice that are all looked at
_EACH = 64  # one of so many of the others
_LONG = 100  # characters of a text: names, dates, languages and the like are shorter
_TELLING = 20  # characters that no other text has by chance
_JSON = ("{}", "[]")
_Fields = Callable[[int], Mapping[str, Any] | None]


class Sample:
    """The records of a slice that are looked at, as they come."""

    def __init__(self, shape: Shape, config: DocumentConfig) -> None:
        texts = {shape.columns[own] for own in known_texts(shape, config)}
        self._used = {name: name in texts for name in used_columns(shape, config)}
        self._passed = 0
        self._is_none = shape.kind == "tokens"

    def passes(self) -> bool:
        """Whether the next record is not looked at; it is passed over then."""
        is_passed = self._passed >= FIRST and self._passed % _EACH != 0
        self._passed += is_passed
        return is_passed

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


def _look_at(record: Mapping[str, Any], used: Mapping[str, bool], unused: dict[str, int]) -> int:
    """How many characters a record has; those of long texts that nothing uses join `unused`.
    `used`: by column, whether its value counts only where it is text.
    """
    own, whole = list[str](), set[str]()
    for column, is_text in used.items():
        value = value_at(record, column)
        if isinstance(value, str) or not is_text:
            own += _texts(value)
            whole.add(column)
    characters = sum(map(len, own))
    longest = max(own, key=len, default="").strip()
    joined = "\n".join(own)
    for name in record.keys() - whole:
        value = record[name]
        key = name if _is_plain(value) else name + INSIDE
        for text in _texts(value):
            characters += len(text)
            if len(text) >= _LONG and _is_prose(text) and not _repeats(text, joined, longest):
                unused[key] = unused.get(key, 0) + len(text)
    return characters


def _is_plain(value: Any) -> bool:
    """Whether it is text, and none of JSON."""
    return isinstance(value, str) and (value.lstrip()[:1] + value.rstrip()[-1:]) not in _JSON


def _is_prose(text: str) -> bool:
    """Whether it is words rather than a URL, a digest or a picture; not all languages have
    spaces.
    """
    return " " in text or not text.isascii()


def _repeats(text: str, joined: str, longest: str) -> bool:
    """Whether what is used says it already, or it is what is used, written once more; renderings
    strip what they show.
    """
    return (len(longest) >= _TELLING and longest in text) or text.strip() in joined


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
