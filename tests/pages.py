"""Pages as a browser takes them apart: boxes, tables, bars, and what they ask for elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "br", "wbr", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """boxes     title -> (figure, meaning), of the headline figures
    tables       each a list of lines, of the texts of their cells
    widths       of the bars, in their order
    tags         how often each is there
    attributes   (name, value) of every element
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.boxes: dict[str, tuple[str, str]] = {}
        self.tables: list[list[list[str]]] = []
        self.widths: list[str] = []
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self._box: list[str] = []
        self.feed(content.decode())
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        elif tag in ("dt", "dd"):
            self._box.append("")
        elif tag == "rect":
            self.widths.append(dict(attrs)["width"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "div" and len(self._box) == 3:
            title, figure, meaning = self._box
            self.boxes.setdefault(title, (figure, meaning))
            self._box = []

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            return
        self.text += data
        if inside in ("th", "td"):
            self.tables[-1][-1][-1] += data
        elif inside in ("dt", "dd"):
            self._box[-1] += data

    def table(self, first: str) -> list[list[str]]:
        """The lines below the head of the only table whose head begins with this."""
        (table,) = [table for table in self.tables if table[0][0] == first]
        return table[1:]

    def table_of_facts(self) -> dict[str, str]:
        """What -> how it was, of what the page is made from."""
        (pairs,) = [table for table in self.tables if table[0][0] == "made from"]
        return dict(pairs)


def assert_stands_alone(content: bytes) -> None:
    """It asks for nothing from elsewhere, and nothing in it is run."""
    page = Page(content)
    assert not {"script", "link", "img", "iframe", "object", "a", "base", "form"} & page.tags.keys()
    names = {name for name, _ in page.attributes}
    assert not {"href", "src", "style", "action"} & names
    assert not [name for name in names if name.startswith("on")]
    for address in (b"://", b"url(", b"@import"):
        assert address not in content
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
