"""Words for figures, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a chat template may leave out of a conversation.
UNSHOWN = ("reasoning", "content", "tool_calls", "tool_results", "tools", "system")
_DECIMAL = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def count(number: int) -> str:
    """Return 1,234."""
    return f"{number:,}"


def value(number: float) -> str:
    """Return a value of data: 1,234, -0.1235, or true."""
    if isinstance(number, bool):
        return str(number).lower()
    return f"{number:,}" if isinstance(number, int) else f"{number:.4g}"


def percent(share: float) -> str:
    """Return 81.25% for 0.8125."""
    return f"{share:.2%}"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return 1 input, 2 inputs. `nouns`: the plural, if it is more than an s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def directories(number: int) -> str:
    """Return 1 tokenized directory, 2 tokenized directories."""
    return plural(number, "tokenized directory", "tokenized directories")


def unshown(figures: Mapping[str, Any]) -> str:
    """Return what chat templates left out: "reasoning (40 turns, 600 tokens), tools (3 tokens)"."""
    parts = []
    for part in UNSHOWN:
        name = f"unshown_{part}"
        tokens, turns = plural(figures[f"{name}_tokens"], "token"), figures.get(f"{name}_turns")
        if figures[name]:
            counted = f"{plural(turns, 'turn')}, {tokens}" if turns else tokens
            parts.append(f"{part.replace('_', ' ')} ({counted})")
    return ", ".join(parts)


def size(number: int) -> str:
    """Return bytes as 1.5 MB."""
    for unit, name in _DECIMAL:
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,} bytes"
