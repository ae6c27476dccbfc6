"""`packer show` of recipes: every segment says which source it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from support import packer

_FILES = {"web/a.jsonl": "web", "web/b.jsonl": "web", "code.jsonl": "code", "chat.jsonl": "chat"}


@pytest.fixture(autouse=True)
def _packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, max_length=512))


def _segments(*arguments: object) -> list[dict[str, Any]]:
    result = packer("show", "out", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return [one for line in result.stdout.splitlines() for one in json.loads(line)["segments"]]


def test_segments_name_their_source() -> None:
    segments = _segments("0-9")
    assert {one["source"] for one in segments} == {"web", "code", "chat"}
    for one in segments:
        assert one["source"] == _FILES[one["file"]]
        assert one["tokenized"] == f"mix-tokenized/{one['source']}"


def test_lines_of_segments_begin_with_their_source() -> None:
    result = packer("show", "out", 0)
    titles = [line for line in result.stdout.splitlines() if line.startswith("── segment ")]
    for title, one in zip(titles, _segments(0), strict=True):
        assert title.startswith(f"── segment {one['segment']}: {one['source']}: {one['file']} ")


def test_results_without_a_recipe_name_none() -> None:
    packer("pack", "web", "-l", 512, "-t", "bytes", "-q", "-o", "plain")
    segments = json.loads(packer("show", "plain", "--json").stdout)["segments"]
    assert not [one for one in segments if "source" in one]
    first = next(
        line for line in packer("show", "plain").stdout.splitlines() if " segment 0" in line
    )
    assert first.startswith(f"── segment 0: {segments[0]['file']} byte ")
