"""Rows of tokens on a page: coloured by what is trained on, with boundaries, and ids on hover.

A page may have millions of tokens, so it holds no element for each: `pack` writes the rows as
numbers of units, compressed, and the script of the page makes elements of a row when it is opened.
A unit is a token with its text, or some tokens of which only all together have one, such as the
bytes of a character. The texts of a segment's units, end to end, are just what the tokenizer says.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

import packer_cli
from packer_cli.reports.report import PageRow, Report, Rows
from packer_cli.reports.show import Shown, carried_in
from packer_cli.result.wording import plural
from packer_cli.tokenization.decoding import Decoder

_BROKEN = "\ufffd"  # of a character, not all of whose bytes are in a token
MOST_TOKENS = 200 << 15
_OPEN_TOKENS = 1 << 12  # of the first rows, so that the page opens at once


@dataclass
class _Units:
    """The units of a page, each once: (text, ids, whether it is special)."""

    decoder: Decoder | None
    numbers: dict[tuple[str, tuple[int, ...], bool], int] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)

    def number(self, text: str, ids: Sequence[int], special: bool = False) -> int:
        return self.numbers.setdefault((text, tuple(ids), special), len(self.numbers))

    def of(self, ids: list[int]) -> list[tuple[int, int]]:
        """(unit, how many tokens it has) of a segment."""
        if self.decoder is None:
            return [(self.number(f"{one} ", [one]), 1) for one in ids]
        units, begin = list[tuple[int, int]](), 0
        names = {one: self.decoder.special(one) for one in {*ids}}
        for special, run in groupby(ids, key=lambda one: names[one] is not None):
            tokens = list(run)
            if special:
                units += [(self.number(str(names[one]), [one], True), 1) for one in tokens]
            else:
                units += self._of_text(tokens, ids[begin - 1] if begin else None)
            begin += len(tokens)
        return units

    def _of_text(self, ids: list[int], before: int | None) -> list[tuple[int, int]]:
        """Units whose texts are what the decoder makes of all ids."""
        assert self.decoder is not None  # noqa: S101 as above
        whole = self.decoder.decode(ids, before)
        pieces = [self._text(one) for one in ids]
        if before is None and ids:
            pieces[0] = self.decoder.decode(ids[:1])
        if "".join(pieces) == whole:
            return [(self.number(text, [one]), 1) for text, one in zip(pieces, ids, strict=True)]
        groups = _together(ids, pieces)
        if len(groups) < len(ids):  # the bytes of characters
            texts = [
                pieces[at] if len(own) == 1
                else self.decoder.decode(own, ids[at - 1] if at else before)
                for at, own in groups
            ]  # fmt: skip
            if "".join(texts) == whole:
                pairs = zip(texts, groups, strict=True)
                return [(self.number(text, own), len(own)) for text, (_, own) in pairs]
        middle = next((at for at, _ in groups if at >= len(ids) // 2), 0)
        if middle:
            left, right = ids[:middle], ids[middle:]
            halves = self.decoder.decode(left, before), self.decoder.decode(right, left[-1])
            if "".join(halves) == whole:
                return self._of_text(left, before) + self._of_text(right, left[-1])
        return [(self.number(whole, ids), len(ids))]

    def _text(self, token: int) -> str:
        """What a token is in the middle of a text."""
        if token not in self._texts:
            assert self.decoder is not None  # noqa: S101 as above
            self._texts[token] = self.decoder.decode([token], token)
        return self._texts[token]


def _together(ids: list[int], pieces: list[str]) -> list[tuple[int, list[int]]]:
    """(place, tokens): tokens next to each other that have parts of characters are one."""
    groups = list[tuple[int, list[int]]]()
    broken = False
    for at, (one, text) in enumerate(zip(ids, pieces, strict=True)):
        is_broken = _BROKEN in text
        if broken and is_broken:
            groups[-1][1].append(one)
        else:
            groups.append((at, [one]))
        broken = is_broken
    return groups


def rows_report(title: str, shown: Sequence[Shown], decoder: Decoder | str) -> Report:
    """A page of rows alone."""
    rows = rows_of_page([(one, ()) for one in shown], decoder)
    return Report(title, made_by=f"packer {packer_cli.__version__}, packer show", rows=rows)


def rows_of_page(shown: Sequence[tuple[Shown, Sequence[str]]], decoder: Decoder | str) -> Rows:
    """Rows for a page, each with words about it: what was found in it, or why it is there.

    `decoder`: words say why there is none. At most MOST_TOKENS are shown; rows beyond are left out,
    and counted.
    """
    why = decoder if isinstance(decoder, str) else ""
    units, numbers, contents = (
        _Units(None if isinstance(decoder, str) else decoder),
        list[int](),
        list[dict[str, Any]](),
    )
    rows, tokens = list[PageRow](), 0
    for one, about in shown:
        length = sum(len(segment.ids) for segment in one.segments)
        if tokens + length > MOST_TOKENS:
            continue
        tokens += length
        segments = []
        for segment in one.segments:
            own = units.of(segment.ids.tolist())
            flags = segment.trained
            firsts = np.cumsum([0, *(count for _, count in own[:-1])])
            trained = [] if flags is None else flags[firsts[: len(own)]].tolist()
            runs = [len(list(run)) for _, run in groupby(trained)]
            begun = int(trained[0]) if trained else -1
            about_it = [carried_in(segment)] if segment.carried else []
            segments.append([len(own), begun, runs, len(segment.ids), *about_it])
            numbers += [number for number, _ in own]
        contents.append({"segments": segments, "padding": one.padding})
        labelled = [part.trained for part in one.segments if part.trained is not None]
        counts = plural(length, "token")
        if labelled:
            counts += f", {sum(int(flags.sum()) for flags in labelled):,} trained"
        what = plural(len(one.segments), "document")
        is_open = not rows or tokens <= _OPEN_TOKENS
        rows.append(PageRow(one.index, f"{what}, {counts}", tuple(about), is_open))
    left_out = len(shown) - len(rows)
    return Rows(rows, _blob(units, numbers, contents), why, left_out)


def _blob(units: _Units, numbers: list[int], contents: list[dict[str, Any]]) -> str:
    """What the script takes apart: a length, JSON of that many bytes, then three planes of bytes:
    the numbers of units, the most frequent first, whose high bytes are nearly all alike.
    """
    flat = np.array(numbers, np.int64)
    counts = np.bincount(flat, minlength=len(units.numbers))
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    every = list(units.numbers)
    table = [[every[one][0], list(every[one][1]), int(every[one][2])] for one in order.tolist()]
    head = json.dumps({"units": table, "rows": contents, "count": len(flat)}).encode()
    ranks = rank[flat] if len(flat) else flat
    planes = [(ranks >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8, 16)]
    data = len(head).to_bytes(4, "little") + head + b"".join(planes)
    squeezed = zlib.compressobj(9, zlib.DEFLATED, -15)
    return base64.b64encode(squeezed.compress(data) + squeezed.flush()).decode()
