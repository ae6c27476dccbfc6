"""HTML and SVG from text, all of which is escaped: names of inputs are anybody's."""

from __future__ import annotations

import html
from collections.abc import Iterable

from packer_cli.errors import one_line


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Text as HTML, in one line, without characters that hide or turn around what follows."""
    return text if isinstance(text, Markup) else Markup(html.escape(one_line(text)))


def joined(parts: Iterable[str]) -> Markup:
    return Markup("".join(map(escaped, parts)))


def element(tag: str, *content: str, **attributes: str | float) -> Markup:
    """`class_` is the attribute class, and `text_anchor` is text-anchor."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value != ""
    )
    return Markup(f"<{tag}{named}>{joined(content)}</{tag}>")


def _attribute(value: str | float) -> str:
    return escaped(value if isinstance(value, str) else f"{value:.6g}")


def shortened(text: str, most: int = 90) -> str:
    """A name in one line, of at most so many characters: a longer one loses its middle."""
    text = one_line(text)
    if len(text) <= most:
        return text
    begin = (most - 1) // 3
    return f"{text[:begin]}…{text[begin + 1 - most :]}"
