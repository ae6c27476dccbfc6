"""The sources of a recipe in pages: what each is asked for and reaches, as bars and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from packer_cli.page.charts import svg
from packer_cli.page.document import table
from packer_cli.page.markup import Markup, element, joined, shortened
from packer_cli.result.wording import count, percent, plural

_MOST_BARS = 40  # a page stays small; the table has all
_WIDEST = 78.0  # percent of the chart, which leaves room for the figure beside the longest bar
_CLOSE = 0.0001
_LINE, _BAR, _NAME = 58, 13, 17  # pixels down: of a source, of a bar, of its name above
_LONGEST = 40  # characters of a name above its bars


class Portion(NamedTuple):
    """What rows have of a source. `asked` and `reached`: shares. `trained_tokens`: None where
    they are not known.
    """

    name: str
    documents: int
    tokens: int
    trained_tokens: int | None
    epochs: float
    asked: float
    reached: float


def sources(name: str, portions: Sequence[Portion], counted: str, of: str = "") -> Markup:
    """A chart with its legend, and a table. `name`: of this chart in the page; `counted`: what
    shares are of; `of`: which rows they are about, where there are several.
    """
    largest = sorted(portions, key=lambda one: -one.reached)[:_MOST_BARS]
    shown = [one for one in portions if one in largest]
    caption = _caption(portions, counted)
    if len(shown) < len(portions):
        caption += f" Drawn: the {count(len(shown))} largest of {count(len(portions))}."
    title = f"Shares of sources{of and ', '}{of}"
    chart = svg(name, title, caption, _LINE * len(shown), _bars(shown), below=0)
    heading = element("h3", of) if of else Markup()
    figure = element("figure", heading, element("figcaption", caption), _legend(), chart)
    return joined((figure, _table(portions)))


def _caption(portions: Sequence[Portion], counted: str) -> str:
    farthest = max(portions, key=lambda one: abs(one.reached - one.asked))
    off = abs(farthest.reached - farthest.asked)
    reached = f"Farthest from what is asked: {shortened(farthest.name, _LONGEST)}, by {off:.2%}."
    if off < _CLOSE:
        reached = f"Each is within {_CLOSE:.2%} of what is asked."
    return f"{plural(len(portions), 'source')}, in shares of {counted}. {reached}"


def _bars(shown: Sequence[Portion]) -> list[Markup]:
    widest = max(max(one.asked, one.reached) for one in shown) or 1.0
    drawn = []
    for number, one in enumerate(shown):
        top = number * _LINE
        drawn.append(
            element("text", shortened(one.name, _LONGEST), class_="source", x=0, y=top + _NAME - 5)
        )
        for place, (kind, share) in enumerate((("asked", one.asked), ("bar", one.reached))):
            y = top + _NAME + place * (_BAR + 2)
            what = "asked" if kind == "asked" else "reached"
            tip = element("title", f"{one.name}: {percent(share)} {what}")
            wide = _WIDEST * share / widest
            drawn += [
                element("rect", tip, class_=kind, x=0, y=y, width=f"{wide:.2f}%", height=_BAR),
                element("text", percent(share), class_="tick", x=f"{wide:.2f}%", dx=5,
                        y=y + _BAR - 3),
            ]  # fmt: skip
    return drawn


def _legend() -> Markup:
    items = []
    for kind, what in (("asked", "asked"), ("bar", "reached")):
        sample = element(
            "svg", element("rect", class_=kind, x=1, y=2, width=22, height=10),
            width=24, height=14, aria_hidden="true",
        )  # fmt: skip
        items.append(element("li", sample, " ", what))
    return element("ul", *items, class_="legend")


def _table(portions: Sequence[Portion]) -> Markup:
    known = all(one.trained_tokens is not None for one in portions)
    rows = [
        (shortened(one.name), count(one.documents), count(one.tokens),
         *([count(one.trained_tokens or 0)] if known else []),
         f"{one.epochs:.2f}", percent(one.asked), percent(one.reached))
        for one in portions
    ]  # fmt: skip
    head = ("source", "documents", "tokens", *(["trained"] if known else []), "epochs",
            "asked", "reached")  # fmt: skip
    return table("", head, rows)
