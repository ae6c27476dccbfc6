"""The pages of recipes: bars and a table of what each source is asked for and reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from pages import Page, assert_stands_alone
from support import packer

from packer_cli.reports.page import page
from packer_cli.reports.report import Report, Section, SourceLine, table_of_sources

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
    assert "Sources, in shares of tokens" in drawn.text
    (shares, left_out) = [table for table in drawn.tables if table[0][0] == "source"]
    assert [line[0] for line in shares[1:]] == ["web", "code", "chat"]
    columns = ["source", "documents", "tokens", "trained", "epochs", "asked", "reached"]
    assert shares[0] == [*columns, "asked, and below it reached"]
    parts = [float(cell[:-1]) for line in shares[1:] for cell in line[5:7]]
    widths = [float(width[:-1]) for width in drawn.widths[: len(parts)]]
    assert widths == pytest.approx([100 * part / max(parts) for part in parts], abs=0.1)
    assert left_out[0] == ["source", "held out", "duplicates"]
    assert "Documents left out" in drawn.text


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
    for length in (64, 128):
        assert f"Sources at max_length {length}, in shares of tokens" in drawn.text
    tables = [table for table in drawn.tables if table[0][0] == "source"]
    assert [[line[0] for line in table[1:]] for table in tables] == [["web", "code"]] * 2


def test_names_are_escaped_and_many_sources_stay_a_small_page() -> None:
    lines = [SourceLine(f"<b>{i}</b>" + "x" * 200, {}, 1.0, 1 / 300, 1 / 300) for i in range(300)]
    content = page(Report("title", sections=[Section("", [table_of_sources("", lines)])]))
    assert_stands_alone(content)
    drawn = Page(content)
    assert "b" not in drawn.tags
    assert len(drawn.table("source")) == 300
    assert len(content) < 300_000
