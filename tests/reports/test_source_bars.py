"""The pages of recipes: bars and a table of what each source is asked for and reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from pages import Page, assert_stands_alone
from support import packer

from packer_cli.options.options import Stage
from packer_cli.reports.page import page
from packer_cli.reports.report import Report, Section, Share, Shares, Table

_STAGED = {"web": {"weight": 0.6}, "code": {"weight": 0.3}, "chat": {"weight": 0.1}}


def _stats_page(directory: str) -> Page:
    result = packer("stats", directory, "--html", "page.html")
    assert result.exit_code == 0, result.stderr
    content = Path("page.html").read_bytes()
    assert_stands_alone(content)
    return Page(content)


@pytest.mark.usefixtures("folder")
def test_the_page_of_a_result_has_its_sources() -> None:
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, validation_share=0.1, dedup="exact"))
    drawn = _stats_page("out/train")
    assert "Shares of sources" in drawn.charts
    (shares, left_out) = [table for table in drawn.tables if table[0][0] == "source"]
    assert [line[0] for line in shares[1:]] == ["web", "code", "chat"]
    assert shares[0] == ["source", "documents", "tokens", "trained", "epochs", "asked", "reached"]
    for name, *_, asked, reached in shares[1:]:
        assert f"{name}: {asked} asked" in drawn.tips
        assert f"{name}: {reached} reached" in drawn.tips
    assert left_out[0] == ["source", "held out", "duplicates"]
    assert "Documents left out" in drawn.text


@pytest.mark.usefixtures("folder")
def test_the_page_lists_stages() -> None:
    write_sources()
    stages = Stage(200_000), Stage(100_000, (("chat", 0.2),), "end")
    (manifest,) = pack_mixed(recipe_of(_STAGED, stages=stages))
    assert manifest is not None
    first = manifest.stages[0].rows
    assert _stats_page("out").table("stage") == [
        ["1", "0", f"{first:,}"], ["end", f"{first:,}", f"{manifest.rows - first:,}"]
    ]  # fmt: skip


@pytest.mark.usefixtures("folder")
def test_results_without_a_recipe_have_no_such_section() -> None:
    write_sources()
    packer("pack", "web", "-l", 64, "-t", "bytes", "-q", "-o", "out")
    assert "Sources" not in _stats_page("out").text


@pytest.mark.usefixtures("folder")
def test_the_page_of_a_plan_has_sources_for_each_length() -> None:
    write_sources()
    toml = "".join(
        f'[[source]]\nname = "{name}"\ninputs = ["{inputs}"]\nweight = {weight}\n'
        for name, inputs, weight in (("web", "web", 0.6), ("code", "code.jsonl", 0.4))
    )
    Path("mix.toml").write_text(f'max_length = 64\ntokenizer = "bytes"\n{toml}')
    assert packer("pack", "mix.toml", "-q", "-o", "mix-packed-64").exit_code == 0
    result = packer("plan", "mix.toml", "-l", "64,128", "-q", "--html", "page.html")
    assert result.exit_code == 0, result.stderr
    content = Path("page.html").read_bytes()
    assert_stands_alone(content)
    drawn = Page(content)
    assert {"Shares of sources, max_length 64", "Shares of sources, max_length 128"} <= {
        *drawn.charts
    }
    tables = [table for table in drawn.tables if table[0][0] == "source"]
    assert [[line[0] for line in table[1:]] for table in tables] == [["web", "code"]] * 2


def _page_of(shares: list[Share]) -> Page:
    head = ["source", "asked", "reached"]
    rows = [[one.name, f"{one.asked:.2%}", f"{one.reached:.2%}"] for one in shares]
    part = Shares(shares, Table("", head, rows), "tokens")
    content = page(Report("title", [], {}, "", sections=[Section("Sources", [part])]))
    assert_stands_alone(content)
    return Page(content)


def test_names_are_escaped_and_many_sources_stay_a_small_page() -> None:
    drawn = _page_of([Share(f"<b>{i}</b>" + "x" * 200, 1 / 300, 1 / 300) for i in range(300)])
    assert "b" not in drawn.tags
    assert "Drawn: the 40 largest of 300." in drawn.text
    assert len(drawn.table("source")) == 300
    assert "Each is within 0.01% of what is asked." in drawn.text


def test_the_source_that_is_farthest_from_its_share_is_named() -> None:
    drawn = _page_of([Share("web", 0.75, 0.80), Share("code", 0.25, 0.20)])
    assert "Farthest from what is asked: web, by 5.00%." in drawn.text
