"""How reports write figures and name the buckets of histograms: the same in every one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from packer_cli.errors import one_line
from packer_cli.records import UNSHOWN

_BINARY = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k"))
_DECIMAL = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Bucket(NamedTuple):
    """Of a histogram. `edge`: its least value as an axis shows it; "" where it has no room."""

    label: str
    number: int
    edge: str


def count(number: int) -> str:
    """1,234."""
    return f"{number:,}"


def percent(share: float) -> str:
    """81.25%, for 0.8125."""
    return f"{share:.2%}"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """1 input, 2 inputs. `nouns`: the plural, where it is more than an s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def directories(number: int) -> str:
    """1 tokenized directory, 2 tokenized directories."""
    return plural(number, "tokenized directory", "tokenized directories")


def unshown(figures: Mapping[str, Any]) -> str:
    """What chat templates left out, by the totals: "reasoning (40 turns, 600 tokens), tools (30
    tokens)".
    """
    parts = []
    for what in UNSHOWN:
        name = f"unshown_{what}"
        tokens, turns = plural(figures[f"{name}_tokens"], "token"), figures.get(f"{name}_turns")
        if figures[name]:
            counted = f"{plural(turns, 'turn')}, {tokens}" if turns else tokens
            parts.append(f"{what.replace('_', ' ')} ({counted})")
    return ", ".join(parts)


def size(number: int) -> str:
    """Bytes as 1.5 MB."""
    for unit, name in _DECIMAL:
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,} bytes"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of figures in columns, the first row being their titles. Names come last, where long
    ones stay whole and move no figure.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(figures, widths, strict=True)),
                   one_line(name)])
        for *figures, name in rows
    ]  # fmt: skip


def above_bound(rows: int, lower_bound: int) -> str:
    """How far rows are from the fewest possible."""
    over = rows - lower_bound
    if not over:
        return "no packer can do better"
    return f"at most {over:,} ({over / lower_bound:.2%}) could be saved"


def power_buckets(counts: Sequence[int]) -> list[Bucket]:
    """Of a histogram whose bucket i holds 2**i up to 2**(i+1) - 1."""
    return [
        Bucket(f"{2**i:,}" if i == 0 else f"{2**i:,}-{2 ** (i + 1) - 1:,}", number, _binary(2**i))
        for i, number in enumerate(counts)
    ]


def fill_buckets(counts: Sequence[int]) -> list[Bucket]:
    """Of a histogram in steps of five percent, whose last bucket is of full rows."""
    *partly, full = counts
    buckets = [
        Bucket(f"{5 * i}-{5 * i + 5}%", number, "" if i % 5 else f"{5 * i}%")
        for i, number in enumerate(partly)
    ]
    return [*buckets, Bucket("full", full, "full")]


def _binary(number: int) -> str:
    for unit, suffix in _BINARY:
        if number >= unit and number % unit == 0:
            return f"{number // unit}{suffix}"
    return str(number)
