"""The page of `packer stats --html`: what the table shows, with charts, in one file."""

from __future__ import annotations

from heapq import nlargest
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from packer_cli.page.document import boxes, facts, page, section, table
from packer_cli.page.histograms import (
    document_lengths,
    like_segments,
    row_fill,
    segments_per_row,
)
from packer_cli.page.markup import Markup, element, joined, shortened
from packer_cli.page.sources import Portion, sources
from packer_cli.result.manifest import Input, Manifest
from packer_cli.result.sources import by_source, shares
from packer_cli.result.warnings import warnings_of
from packer_cli.result.wording import count, size
from packer_cli.stats.headline import Line, headline, losses
from packer_cli.stats.origin import origin_lines
from packer_cli.stats.sources import (
    MISSED,
    RECORDS,
    counted,
    left_out_rows,
    missed_rows,
    record_rows,
    stage_rows,
)

if TYPE_CHECKING:
    from packer_cli.stats.waiting import Prediction

MOST_INPUTS = 100  # that are listed: a page stays small
_ALWAYS = ("truncated", "dropped")


def stats_page(directory: Path | str, manifest: Manifest, steps: Prediction | None = None) -> bytes:
    """The page as a file's content. `steps`: what steps of training would cost."""
    histograms = manifest.histograms
    lines = [*headline(manifest), *losses(manifest, always=_ALWAYS)]
    return page(
        str(directory),
        *_warnings(manifest),
        boxes(_titled(lines)),
        section("Made from", facts(origin_lines(manifest))),
        *_sources(manifest),
        section(
            "Document lengths",
            document_lengths(histograms.document_length, [manifest.config.max_length]),
        ),
        section("Row fill", row_fill(histograms.row_fill)),
        section("Segments in a row", segments_per_row(histograms.segments_per_row)),
        *_mixedness(manifest),
        *(
            [section("Steps", element("p", steps.title()), _with_names_first(steps.rows()))]
            if steps
            else []
        ),
        section("Inputs", *_inputs(list(manifest.inputs_now.values()))),
        footer=f"packed by packer {manifest.packer_version}",
    )


def _mixedness(manifest: Manifest) -> list[Markup]:
    """Whether rows hold like documents, where rows have enough for that to mean anything."""
    lengths, inputs = manifest.histograms.one_length, manifest.histograms.one_input
    charts = [like_segments("length", "within 5% of its median length", lengths)]
    if len(manifest.inputs_now) > 1:
        charts.append(like_segments("input", "from one input", inputs))
    return [section("How mixed rows are", *charts)] if any(lengths) else []


def _sources(manifest: Manifest) -> list[Markup]:
    """Of a recipe: shares, what is left out, and stages."""
    if not manifest.sources:
        return []
    portions = [
        Portion(source.name, own["documents"], own["tokens"], own.get("trained_tokens"),
                source.epochs, *of_all)
        for source, own, of_all in zip(
            manifest.sources, by_source(manifest), shares(manifest.sources), strict=True
        )
    ]  # fmt: skip
    others = [
        joined((element("h3", title), _with_names_first(rows)))
        for title, rows in (
            (MISSED.format(counted(manifest)).capitalize(), missed_rows(manifest)),
            (RECORDS.capitalize(), record_rows(manifest)),
            ("Documents left out", left_out_rows(manifest)), ("Stages", stage_rows(manifest)),
        )
        if rows
    ]  # fmt: skip
    return [section("Sources", sources("sources", portions, counted(manifest)), *others)]


def _with_names_first(rows: list[list[str]]) -> Markup:
    """A table of lines whose names come last in the terminal."""
    head, *lines = ((name, *figures) for *figures, name in rows)
    return table("", head, lines)


def _warnings(manifest: Manifest) -> list[Markup]:
    texts = [f"Marked incomplete: {manifest.incomplete}"] if manifest.incomplete else []
    texts += [str(one) for one in warnings_of(manifest)]
    return [element("p", text, class_="warning") for text in texts]


def _titled(lines: list[Line]) -> list[Line]:
    """With the title of the line before in the place of an empty one."""
    return [lines[0], *(b if b.title else b._replace(title=a.title) for a, b in pairwise(lines))]


def _inputs(inputs: list[Input]) -> list[Markup]:
    """A line for each, in their order; of many, for those with the most tokens."""
    largest = nlargest(MOST_INPUTS, range(len(inputs)), key=lambda index: inputs[index].tokens)
    listed = [inputs[index] for index in sorted(largest)]
    rows = [(shortened(one.path), *_figures([one])) for one in listed]
    rest = [inputs[index] for index in sorted(set(range(len(inputs))) - set(largest))]
    text = Markup()
    if rest:
        rows.append((f"{count(len(rest))} other inputs", *_figures(rest)))
        text = element(
            "p", f"Listed: the {count(len(listed))} of {count(len(inputs))} inputs with the most "
            f"tokens. Not listed: {count(len(rest))}; packer stats --by input lists them.",
        )  # fmt: skip
    return [text, table("", ("input", "documents", "tokens", "empty", "rejected", "size"), rows)]


def _figures(inputs: list[Input]) -> list[str]:
    names = ("documents", "tokens", "empty_documents", "rejected_records")
    totals = [count(sum(getattr(one, name) for one in inputs)) for name in names]
    return [*totals, size(sum(one.size for one in inputs))]
