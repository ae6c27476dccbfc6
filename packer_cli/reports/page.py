"""A report as an HTML page: one file that loads nothing else.

The page is `page.html.jinja`, which escapes all values: anyone may have named the inputs. Its file
is written whole or not at all, and replaces nothing but an earlier page.

Rows of tokens are coloured by what is trained on, with boundaries, and ids on hover. There may be
millions of tokens, so a page does not have an element for each: rows are written as numbers of
units, compressed, and the script of the page makes the elements of a row when it is opened. A unit
is a token with its text, or several tokens that have a text only together, such as the bytes of a
character. The texts of a segment's units, end to end, are exactly what the tokenizer decodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import packer_cli
from packer_cli.errors import UsageError, cut, one_line, os_errors
from packer_cli.options.option import refuse
from packer_cli.reports import PageRow, PageRows, Report
from packer_cli.reports.show import Shown, values_shown
from packer_cli.result.layout import INCOMPLETE, MANIFEST, short_name
from packer_cli.result.manifest import is_manifest
from packer_cli.result.wording import count, percent, plural
from packer_cli.storage import OTHER, is_url, put_file, size_of
from packer_cli.tokenization.decoding import Decoder

# What every page begins with: the sign that packer may replace it.
_START = b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n' + (
    b'<meta name="generator" content="packer">\n'
)
_PAGE, _SCRIPT = "page.html.jinja", "rows.js"  # the latter is run on pages of rows alone
_MOST_CHARACTERS = 90  # of a name
_BROKEN = "\ufffd"  # stands for a character whose bytes are in several tokens
MOST_TOKENS = 200 << 15
_OPEN_TOKENS = 1 << 12  # of the first rows, so that the page opens at once


def page(report: Report) -> bytes:
    """Return the page as a file's content, with what UTF-8 cannot write escaped."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {
        "count": count,
        "percent": percent,
        "shortened": partial(cut, most=_MOST_CHARACTERS),
    }
    source, script = (
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in (_PAGE, _SCRIPT)
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.from_string(source).render(
        report=report,
        blob=Markup(report.rows.blob if report.rows else ""),  # noqa: S704 it is base64
        script=Markup(script),  # noqa: S704 ours
        script_digest=f"sha256-{digest}",
    )
    return text.encode("utf-8", "backslashreplace")


def check_place(name: str) -> None:
    """Raise UsageError for a name that no page can be written to. Only a page may be replaced."""
    path = _path(name)
    folder = path.parent
    in_result = any(is_manifest(folder / file) for file in (MANIFEST, INCOMPLETE))
    refuse([
        (is_url(name), f"--html: {name}: pages are only written to local files",
         "name a file here"),
        (os.path.isdir(path), f"--html: {name} is a directory",
         f"name a file: {path / 'page.html'}"),
        (not os.path.isdir(folder), f"--html: {folder} is no directory", f"mkdir -p {folder}"),
        (in_result, f"--html: {name} would be in a result of packer, which holds nothing else",
         f"name a file beside it: {folder}.html"),
    ])  # fmt: skip
    for file in (path, path.with_name(f"{path.name}.part")):
        _refuse_other_files(file)


def save(name: str, content: bytes) -> None:
    """Write a page in one step, after `check_place`. Raises DataError if it cannot be written."""
    put_file(_path(name), content)


def _path(name: str) -> Path:
    """Return the path of the page; for a link, of its target, which is replaced."""
    return Path(os.path.realpath(name)) if os.path.islink(name) else Path(name)


def _refuse_other_files(path: Path) -> None:
    """Raise UsageError if a file is there, unless it is a page or empty."""
    with os_errors(path):
        if (size := size_of(path)) is None:
            return
        if size == OTHER:  # a link beside the page is not packer's
            raise UsageError(
                f"--html: {path} is not a regular file", "--html - writes the page to stdout"
            )
        with open(path, "rb") as file:
            begin = file.read(len(_START))
    if begin and begin != _START:
        raise UsageError(
            f"--html: {path} is there, and is not a page of packer's",
            "nothing was changed; choose another name, or move that file",
        )


# Rows of tokens


@dataclass
class _Units:
    """The units of a page, each once: (text, ids, whether it is special)."""

    decoder: Decoder | None
    numbers: dict[tuple[str, tuple[int, ...], bool], int] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)

    def number(self, text: str, ids: Sequence[int], special: bool = False) -> int:
        return self.numbers.setdefault((text, tuple(ids), special), len(self.numbers))

    def of(self, ids: list[int]) -> list[tuple[int, int]]:
        """Return (unit, number of its tokens) of a segment."""
        if self.decoder is None:
            return [(self.number(f"{token} ", [token]), 1) for token in ids]
        units, begin = list[tuple[int, int]](), 0
        names = {token: self.decoder.special(token) for token in {*ids}}
        for special, run in groupby(ids, key=lambda token: names[token] is not None):
            tokens = list(run)
            if special:
                units += [(self.number(str(names[token]), [token], True), 1) for token in tokens]
            else:
                units += self._of_text(tokens, ids[begin - 1] if begin else None)
            begin += len(tokens)
        return units

    def _of_text(self, ids: list[int], before: int | None) -> list[tuple[int, int]]:
        """Return units whose texts, end to end, are the decoded ids."""
        assert self.decoder is not None  # noqa: S101 as above
        whole = self.decoder.decode(ids, before)
        pieces = [self._text(token) for token in ids]
        if before is None and ids:
            pieces[0] = self.decoder.decode(ids[:1])
        if "".join(pieces) == whole:
            return [
                (self.number(text, [token]), 1) for text, token in zip(pieces, ids, strict=True)
            ]
        groups = _together(ids, pieces)
        if len(groups) < len(ids):  # the bytes of characters
            texts = [
                pieces[at] if len(group) == 1
                else self.decoder.decode(group, ids[at - 1] if at else before)
                for at, group in groups
            ]  # fmt: skip
            if "".join(texts) == whole:
                pairs = zip(texts, groups, strict=True)
                return [(self.number(text, group), len(group)) for text, (_, group) in pairs]
        middle = next((at for at, _ in groups if at >= len(ids) // 2), 0)
        if middle:
            left, right = ids[:middle], ids[middle:]
            halves = self.decoder.decode(left, before), self.decoder.decode(right, left[-1])
            if "".join(halves) == whole:
                return self._of_text(left, before) + self._of_text(right, left[-1])
        return [(self.number(whole, ids), len(ids))]

    def _text(self, token: int) -> str:
        """Return the text of a token in the middle of a text."""
        if token not in self._texts:
            assert self.decoder is not None  # noqa: S101 as above
            self._texts[token] = self.decoder.decode([token], token)
        return self._texts[token]


def _together(ids: list[int], pieces: list[str]) -> list[tuple[int, list[int]]]:
    """Return (place, tokens), with neighbors that have parts of characters together."""
    groups = list[tuple[int, list[int]]]()
    broken = False
    for at, (token, text) in enumerate(zip(ids, pieces, strict=True)):
        is_broken = _BROKEN in text
        if broken and is_broken:
            groups[-1][1].append(token)
        else:
            groups.append((at, [token]))
        broken = is_broken
    return groups


def rows_report(title: str, shown: Sequence[Shown], decoder: Decoder | str) -> Report:
    """Report rows alone, on a page."""
    rows = rows_of_page([(row, ()) for row in shown], decoder)
    return Report(title, made_by=f"packer {packer_cli.__version__}, packer show", rows=rows)


def rows_of_page(shown: Sequence[tuple[Shown, Sequence[str]]], decoder: Decoder | str) -> PageRows:
    """Return rows for a page, each with remarks: findings in it, or why it is there.

    `decoder`: a text says why there is none. At most MOST_TOKENS are shown; rows beyond are left
    out, and counted.
    """
    why = decoder if isinstance(decoder, str) else ""
    units, numbers, contents = (
        _Units(None if isinstance(decoder, str) else decoder),
        list[int](),
        list[dict[str, Any]](),
    )
    rows, tokens = list[PageRow](), 0
    for row, about in shown:
        length = sum(len(segment.ids) for segment in row.segments)
        if tokens + length > MOST_TOKENS:
            continue
        tokens += length
        segments = []
        for segment in row.segments:
            in_segment = units.of(segment.ids.tolist())
            flags = segment.trained
            firsts = np.cumsum([0, *(count for _, count in in_segment[:-1])])
            trained = [] if flags is None else flags[firsts[: len(in_segment)]].tolist()
            runs = [len(list(run)) for _, run in groupby(trained)]
            begun = int(trained[0]) if trained else -1
            origin = "" if segment.origin is None else str(segment.origin)
            more = "; ".join(filter(None, [origin, values_shown(segment)]))
            segments.append([len(in_segment), begun, runs, len(segment.ids), *[more] * bool(more)])
            numbers += [number for number, _ in in_segment]
        contents.append({"segments": segments, "padding": row.padding})
        labelled = [part.trained for part in row.segments if part.trained is not None]
        counts = plural(length, "token")
        if labelled:
            counts += f", {sum(int(flags.sum()) for flags in labelled):,} trained"
        documents = plural(len(row.segments), "document")
        place = f"{short_name(row.shard)} {row.what} {row.in_shard}"
        is_open = not rows or tokens <= _OPEN_TOKENS
        rows.append(PageRow(row.index, f"{documents}, {counts}; {place}", tuple(about), is_open))
    left_out = len(shown) - len(rows)
    return PageRows(rows, _blob(units, numbers, contents), why, left_out)


def _blob(units: _Units, numbers: list[int], contents: list[dict[str, Any]]) -> str:
    """Return the data for the script: a length, JSON of that many bytes, then three planes of
    bytes: the numbers of units, the most frequent first, so that high bytes are nearly all alike.
    """
    flat = np.array(numbers, np.int64)
    counts = np.bincount(flat, minlength=len(units.numbers))
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    every = list(units.numbers)
    table = [
        [every[number][0], list(every[number][1]), int(every[number][2])]
        for number in order.tolist()
    ]
    head = json.dumps({"units": table, "rows": contents, "count": len(flat)}).encode()
    ranks = rank[flat] if len(flat) else flat
    planes = [(ranks >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8, 16)]
    data = len(head).to_bytes(4, "little") + head + b"".join(planes)
    squeezed = zlib.compressobj(9, zlib.DEFLATED, -15)
    return base64.b64encode(squeezed.compress(data) + squeezed.flush()).decode()
