"""The histograms that pages show: document lengths, row fill, segments in a row, and like ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from packer_cli.page.axes import Mark
from packer_cli.page.charts import histogram
from packer_cli.page.document import buckets_table, chart_with_table
from packer_cli.page.markup import Markup
from packer_cli.result.wording import Bucket, count, fill_buckets, percent, power_buckets

_LEAST_BUCKETS = 6  # or a bar would be as wide as the chart


def document_lengths(counts: Sequence[int], max_lengths: Sequence[int]) -> Markup:
    """Documents by length, int[32] by powers of two, with the lengths of rows, if any, marked."""
    ends = [max(length - 1, 1).bit_length() - 1 for length in max_lengths]
    first, buckets = _used(power_buckets(counts), ends)
    prefix = "max_length " if len(max_lengths) == 1 else ""
    marks = [
        Mark((math.log2(length) - first) / len(buckets), f"{prefix}{count(length)}")
        for length in sorted(max_lengths)
    ]
    caption = described = _most_often(buckets, " tokens", "documents")
    if marks:
        dashed = "max_length" if len(marks) == 1 else "the lengths of rows compared"
        caption += f" Dashed: {dashed}."
        described += f" Dashed: {', '.join(mark.label for mark in marks)}."
    chart = histogram(
        "document-length", "Histogram of document lengths", described, buckets,
        "tokens in a document (1k is 1,024)", marks,
    )  # fmt: skip
    return chart_with_table(chart, caption, buckets_table("documents", "tokens", buckets))


def row_fill_chart(
    counts: Sequence[int], name: str = "row-fill", of: str = "", height: float = 180
) -> Markup:
    """Rows by how full they are, int[21] in steps of five percent; `of`: which rows."""
    buckets = fill_buckets(counts)
    title = f"Histogram of row fill{of and ', '}{of}"
    described, axis = row_fill_caption(counts), "tokens in a row, of max_length"
    return histogram(name, title, described, buckets, axis, height=height)


def row_fill_caption(counts: Sequence[int]) -> str:
    buckets = fill_buckets(counts)
    return _most_often(buckets, "" if buckets[-1] == _peak(buckets) else " full", "rows")


def row_fill(counts: Sequence[int]) -> Markup:
    """The chart and its figures."""
    figures = buckets_table("rows", "full", fill_buckets(counts))
    return chart_with_table(row_fill_chart(counts), row_fill_caption(counts), figures)


def segments_per_row(counts: Sequence[int]) -> Markup:
    """Rows by their number of segments, int[32] by powers of two."""
    _, buckets = _used(power_buckets(counts))
    one = _peak(buckets).label == "1"
    caption = _most_often(buckets, " segment" if one else " segments", "rows")
    title = "Histogram of segments in a row"
    chart = histogram("segments-per-row", title, caption, buckets, "segments in a row")
    return chart_with_table(chart, caption, buckets_table("rows", "segments", buckets))


def like_segments(what: str, like: str, counts: Sequence[int]) -> Markup:
    """Rows by the share of their segments that are alike, int[21] in steps of five percent."""
    *partly, full = fill_buckets(counts)
    buckets = [*partly, full._replace(label="all", edge="all")]
    caption = _most_often(buckets, f" {like}", "rows with four segments or more")
    axis = f"share of a row's segments {like}"
    chart = histogram(f"one-{what}", f"Histogram of rows of one {what}", caption, buckets, axis)
    return chart_with_table(chart, caption, buckets_table("rows", like, buckets))


def _used(buckets: list[Bucket], also: Sequence[int] = ()) -> tuple[int, list[Bucket]]:
    """The number of the first bucket that is shown, and all to the last. `also`: shown, too."""
    shown = [i for i, bucket in enumerate(buckets) if bucket.number] + list(also) or [0]
    first = min(*shown, len(buckets) - _LEAST_BUCKETS)
    return first, buckets[first : max(*shown, first + _LEAST_BUCKETS - 1) + 1]


def _peak(buckets: Sequence[Bucket]) -> Bucket:
    return max(buckets, key=lambda bucket: bucket.number)


def _most_often(buckets: Sequence[Bucket], unit: str, noun: str) -> str:
    peak, whole = _peak(buckets), sum(bucket.number for bucket in buckets)
    if not whole:
        return f"There are no {noun}."
    share = percent(peak.number / whole)
    return f"Most often {peak.label}{unit}: {count(peak.number)} of the {noun} ({share})."
