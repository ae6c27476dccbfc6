"""The page of planned rows: a line for each outcome, and charts that show the same figures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from pages import Page, assert_stands_alone

from packer_cli.page.axes import Mark, marks
from packer_cli.page.document import page
from packer_cli.page.histograms import document_lengths
from packer_cli.page.plan import Outcome, PlanReport, plan_page

FILL = [1, *[0] * 18, 9, 90]
OUTCOME = Outcome(
    max_length=4096,
    strategy="best-fit",
    overlong="split",
    rows=100,
    lower_bound_rows=99,
    documents=500,
    segments=550,
    tokens=400_000,
    bytes=3_700_000,
    row_fill=FILL,
)
LENGTHS = [0] * 8 + [300, 200] + [0] * 22


def page_of(*outcomes: Outcome, **more: Any) -> Page:
    report = PlanReport(
        title="data.jsonl",
        made_from=[("made from", "1 input, 2.0 MB")],
        documents=500,
        tokens=400_000,
        document_length=LENGTHS,
        outcomes=outcomes,
        **more,
    )
    content = plan_page(report)
    assert_stands_alone(content)
    return Page(content)


def tables(page: Page) -> list[list[list[str]]]:
    """Those with a line for each outcome."""
    return [table for table in page.tables if table[0][0] == "max_length"]


def test_a_line_for_each_length() -> None:
    outcomes = [
        replace(OUTCOME, max_length=2048, rows=200, lower_bound_rows=196, cut_documents=7),
        replace(OUTCOME, attention_span=812.4, attention_share=0.0312, steps=13),
    ]
    page = page_of(*outcomes)
    rows, losses, fill = tables(page)
    assert rows == [
        ["max_length", "rows", "utilization", "above the lower bound", "segments in a row",
         "on disk", "attention span in tokens", "attention in a step's cost", "steps"],
        ["2,048", "200", "97.66%", "2.04%", "2.75", "3.7 MB", "", "", ""],
        ["4,096", "100", "97.66%", "1.01%", "5.50", "3.7 MB", "812", "3.12%", "13"],
    ]  # fmt: skip
    assert losses == [["max_length", "documents cut"], ["2,048", "7"], ["4,096", "0"]]
    assert fill[1:] == [[name, "1", "0", "0", "0", "9", "90"] for name in ("2,048", "4,096")]
    assert page.boxes["documents"][0] == "500"
    assert page.boxes["tokens"][0] == "400,000"
    assert page.table("tokens") == [["256-511", "300", "60.00%"], ["512-1,023", "200", "40.00%"]]
    assert "sample" not in page.boxes


def test_what_is_lost() -> None:
    truncating = replace(
        OUTCOME, overlong="truncate", truncated_documents=3, truncated_tokens=1_234,
        truncated_trained_tokens=1_000,
    )  # fmt: skip
    dropping = replace(
        OUTCOME, overlong="drop", dropped_documents=4, dropped_tokens=56_789,
        dropped_trained_tokens=50_000,
    )  # fmt: skip
    _, losses, _ = tables(page_of(truncating, dropping))
    assert losses == [
        ["max_length", "documents truncated", "tokens cut off", "documents dropped",
         "tokens dropped", "trained tokens lost"],
        ["4,096, truncate", "3", "1,234", "0", "0", "1,000"],
        ["4,096, drop", "0", "0", "4", "56,789", "50,000"],
    ]  # fmt: skip


def test_that_nothing_is_lost_is_said() -> None:
    page = page_of(OUTCOME)
    assert "No document is cut, truncated or dropped." in page.text
    assert len(tables(page)) == 2


def test_strategies_are_curves_with_names() -> None:
    outcomes = [
        replace(OUTCOME, strategy=strategy, max_length=length)
        for strategy in ("best-fit", "next-fit")
        for length in (4096, 131072)
    ]
    page = page_of(*outcomes)
    assert [line[0] for line in tables(page)[0][1:]] == [
        "4,096, best-fit", "131,072, best-fit", "4,096, next-fit", "131,072, next-fit",
    ]  # fmt: skip
    assert "best-fit, 4,096: 97.66%" in page.tips
    assert "next-fit, 131,072: 3.05%" in page.tips
    assert [title for title in page.charts if "row fill" in title] == [
        f"Histogram of row fill, {line[0]}" for line in tables(page)[0][1:]
    ]


def test_of_a_sample_standard_errors_are_shown() -> None:
    outcome = replace(OUTCOME, standard_errors={"rows": 12.4, "utilization": 0.0012})
    page = page_of(outcome, sample=0.05)
    assert tables(page)[0][1][1:3] == ["100 ± 12", "97.66% ± 0.12%"]
    assert page.boxes["sample"][0] == "5.00%"


@pytest.mark.parametrize("utilization", [1.0, 0.99999, 0.5, 0.0001])
def test_every_utilization_is_in_the_chart(utilization: float) -> None:
    rows = 10**9
    tokens = int(rows * 4096 * utilization)
    page = page_of(replace(OUTCOME, rows=rows, lower_bound_rows=1, tokens=tokens))
    places = [float(value) for name, value in page.attributes if name == "y" and "." in value]
    assert all(0 <= place <= 250 for place in places)
    assert f"best-fit, 4,096: {utilization:.2%}" in page.tips


def test_a_length_for_which_nothing_is_left() -> None:
    nothing = replace(
        OUTCOME, max_length=8, rows=0, lower_bound_rows=0, documents=0, segments=0, tokens=0,
        bytes=0, row_fill=[0] * 21, dropped_documents=500, dropped_tokens=400_000,
    )  # fmt: skip
    rows, _, fill = tables(page_of(nothing, OUTCOME))
    assert rows[1] == ["8", "0", "0.00%", "0.00%", "0.00", "0 bytes"]
    assert fill[1] == ["8", *["0"] * 6]
    assert "There are no rows." in page_of(nothing).text


CLOSE = [Mark(0.3 + 0.05 * i, f"{2 ** (i + 10):,}") for i in range(10)]


@pytest.mark.parametrize(
    "shown",
    [CLOSE, CLOSE[:5], CLOSE[:1], [Mark(1.0, "max_length 4,096")], [Mark(0.0, "1"), *CLOSE[:3]]],
)
def test_no_line_of_a_mark_crosses_a_label(shown: list[Mark]) -> None:
    """On a phone, where a chart is some 250 pixels wide. A line goes down from its own label."""
    drawn, _ = marks(shown, height=100)
    lines = [dict(re.findall(r'([\w-]+)="([^"]*)"', one)) for one in drawn[::2]]
    labels = [dict(re.findall(r'([\w-]+)="([^"]*)"', one)) for one in drawn[1::2]]
    for mark, label in zip(shown, labels, strict=True):
        at, width = mark.at * 253, len(mark.label) * 6.6
        begin, end = (at - width, at) if label["text-anchor"] == "end" else (at, at + width)
        assert -30 < begin < end < 260
        for other, line in zip(shown, lines, strict=True):
            if other is not mark and begin < other.at * 253 < end:
                assert float(line["y1"]) >= float(label["y"])


def test_documents_without_rows() -> None:
    """As of a tokenized directory, whose documents are in no rows yet."""
    content = page("tokens", document_lengths(LENGTHS, []), footer="tokenized")
    assert_stands_alone(content)
    shown = Page(content)
    assert shown.table("tokens") == [["256-511", "300", "60.00%"], ["512-1,023", "200", "40.00%"]]
    assert "Dashed" not in shown.text
    nothing = Page(page("tokens", document_lengths([0] * 32, []), footer="tokenized"))
    assert "There are no documents." in nothing.text
