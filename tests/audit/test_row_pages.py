"""Pages of rows: what is in them is exactly the rows, and nothing of it is markup."""

from __future__ import annotations

import base64
import json
import random
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers as tiny
from audited import DEFECTS, conversations, trl
from pages import Page
from support import assert_error, heavy, jsonl, packer, random_texts, succeeds

from packer_cli.reports.page import rows_of_page
from packer_cli.reports.show import Segment, Shown
from packer_cli.result.layout import short_name
from packer_cli.tokenization.decoding import BytesDecoder, ReferenceDecoder
from packer_cli.tokenization.engines import ReferenceEngine

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e<b onclick='x'>&amp;\r\n"


def taken_apart(blob: str) -> list[list[dict[str, Any]]]:
    """The segments of each row, as the script of the page makes them of its data."""
    data = zlib.decompress(base64.b64decode(blob), -15)
    size = int.from_bytes(data[:4], "little")
    head, rest = json.loads(data[4 : 4 + size]), data[4 + size :]
    count = head["count"]
    planes = [rest[at * count : (at + 1) * count] for at in range(3)]
    numbers = [low | mid << 8 | high << 16 for low, mid, high in zip(*planes, strict=True)]
    rows, at = [], 0
    for row in head["rows"]:
        segments = []
        for length, begun, runs, tokens, *more in row["segments"]:
            units = [head["units"][number] for number in numbers[at : at + length]]
            flags = [bool((begun + turn) % 2) for turn, run in enumerate(runs) for _ in range(run)]
            at += length
            segments.append({
                "text": "".join(text for text, _, _ in units),
                "ids": [one for _, ids, _ in units for one in ids],
                "trained": [flag for flag, unit in zip(flags, units, strict=True)
                            for _ in unit[1]] if runs else None,
                "tokens": tokens,
                "more": more,
            })  # fmt: skip
        rows.append(segments)
    return rows


def blob_in(content: str) -> str:
    return re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', content)[0]


def byte_level_decoder() -> ReferenceDecoder:
    return ReferenceDecoder(ReferenceEngine(json.dumps(tiny.byte_level()).encode()), set())


@pytest.mark.parametrize("kind", ["bytes", "byte level"])
def test_text_is_exactly_the_decoders(kind: str) -> None:
    """Also where the bytes of characters are apart, or are no characters."""
    decoder = BytesDecoder() if kind == "bytes" else byte_level_decoder()
    random_ = random.Random(0)
    for number in range(30):
        ids = list("naïve 🎉 text ".encode() if number % 3 else HOSTILE.encode())
        ids += [random_.randrange(256) for _ in range(random_.randrange(40))]
        random_.shuffle(ids) if number % 5 == 0 else None
        flags = [random_.random() < 0.5] * len(ids)
        segment = Segment(0, None, pa.array(ids, pa.int32()).to_numpy(),
                          pa.array(flags).to_numpy(zero_copy_only=False))  # fmt: skip
        shown = Shown("row", number, "a", number, [segment])
        rows = rows_of_page([(shown, ())], decoder)
        ((only,),) = taken_apart(rows.blob)
        assert only["ids"] == ids
        assert only["text"] == decoder.decode(ids) or any(map(decoder.special, ids))
        assert only["trained"] == flags


def test_a_page_has_its_rows_and_leads_to_them(tmp_path: Path) -> None:
    sets = conversations(1)
    bad = sorted(DEFECTS["header-trained"](sets, 1))
    trl(sets, tmp_path / "set")
    page = tmp_path / "page.html"
    result = packer("audit", tmp_path / "set", "--html", page)
    assert result.exit_code == 1
    content = page.read_text()
    shown = [int(one) for one in re.findall(r'id="row-(\d+)"', content)]
    assert shown == sorted(shown)
    assert set(bad[:10]) <= set(shown)
    assert {int(one) for one in re.findall(r'href="#row-(\d+)"', content)} <= set(shown)
    assert "header-trained at" in content
    for row, segments in zip(shown, taken_apart(blob_in(content)), strict=True):
        assert [one["ids"] for one in segments] == [one.ids for one in sets.rows[row]]
        assert [one["trained"] for one in segments] == [one.trained for one in sets.rows[row]]
    assert len(Page(content.encode()).attributes) > 10  # every element is closed
    for address in ("http:", "https:", "url(", "@import", "src="):
        assert address not in content.replace(blob_in(content), "")


@pytest.mark.parametrize("name", ["rows", "view", "tokens"])
@pytest.mark.usefixtures("folder")
def test_documents_have_their_files_and_places(name: str) -> None:
    texts = [*dict.fromkeys(random_texts(80))]
    for file, own in (("a.jsonl", texts[::2]), ("b.jsonl", texts[1::2])):
        Path(file).write_bytes(jsonl(*own))
    for command in (
        ["tokenize", "a.jsonl", "b.jsonl", "-t", "bytes", "-o", "tokens"],
        ["pack", "tokens", "-l", 64, "-o", "rows"],
        ["pack", "tokens", "-l", 64, "--view", "-o", "view"],
        ["audit", name, "--html", "audit.html"],
    ):
        succeeds(*command)
    numbers = re.findall(r'id="row-(\d+)"', Path("audit.html").read_text())
    succeeds("show", name, *numbers, "--html", "show.html")
    shown = [
        json.loads(line) for line in packer("show", name, *numbers, "--json").stdout.splitlines()
    ]
    expected = [[one["position"] for one in row.get("segments", [row])] for row in shown]
    for page in ("audit.html", "show.html"):
        content = Path(page).read_text()
        rows = [[one["more"][0] for one in row] for row in taken_apart(blob_in(content))]
        assert [[int(one.split()[2]) for one in row] for row in rows] == expected
        assert {one.split()[0] for row in rows for one in row} == {"a.jsonl", "b.jsonl"}
        assert all(f"; {short_name(row['shard'])} " in content for row in shown)


def test_rows_of_other_tools_have_their_file_and_place(tmp_path: Path) -> None:
    trl(conversations(1), tmp_path / "set")
    for command in ("audit", "show"):
        packer(command, tmp_path / "set", "--html", tmp_path / "page.html")
        content = (tmp_path / "page.html").read_text()
        assert re.search(r'id="row-0".*; data-0\.arrow row 0</span>', content)


def test_nothing_of_a_set_is_markup(tmp_path: Path) -> None:
    name = tmp_path / "<b>&'\".parquet"
    pq.write_table(pa.table({"input_ids": [[*HOSTILE.encode(), 256]] * 3}), name)
    for command in (["audit", name, "-t", "bytes"], ["show", name, "-t", "bytes"]):
        packer(*command, "--html", tmp_path / "page.html")
        content = (tmp_path / "page.html").read_text()
        scripts = re.findall(r"<script[^>]*>", content)
        assert scripts == ['<script type="text/plain" id="data">', "<script>"]
        assert "<b>&'" not in content
        assert "\x1b" not in content
        assert taken_apart(blob_in(content))[0][0]["text"] == HOSTILE + "<eos>"


def test_the_script_is_the_one_that_is_allowed(tmp_path: Path) -> None:
    import hashlib

    trl(conversations(1), tmp_path / "set")
    packer("show", tmp_path / "set", "--html", tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text()
    script = re.findall(r"<script>(.*?)</script>", content, re.S)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in content or f"'sha256-{digest}'" in content
    assert content.count('id="row-') == 20


@pytest.mark.parametrize("rows", [8, heavy(200)])
def test_a_page_of_long_rows_stays_small(tmp_path: Path, rows: int) -> None:
    """200 rows of 32k tokens are at most 15 MB; of a few, as much of it as their share, and each
    token that is there once.
    """
    random_ = np.random.default_rng(0)
    ids = random_.zipf(1.2, (rows, 1 << 15)).clip(0, 50_000).astype(np.int32)
    labels = np.where(np.arange(1 << 15) % 4000 < 1000, -100, ids)
    table = pa.table({"input_ids": list(ids), "labels": list(labels)})
    pq.write_table(table, tmp_path / "a.parquet")
    succeeds("show", tmp_path / "a.parquet", f"0-{rows - 1}", "--html", tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text()
    assert content.count('id="row-') == rows
    assert len(content) < 15e6 * rows / 200 + 1e6 * (rows < 200)


def test_html_goes_with_rows_alone(tmp_path: Path) -> None:
    trl(conversations(1), tmp_path / "set")
    command = ["show", tmp_path / "set", "--html", tmp_path / "page.html"]
    assert_error(packer(*command, "--segment", 0), 2, "--html")
    assert_error(packer("show", tmp_path / "set", "--html", tmp_path), 2, "is a directory")
