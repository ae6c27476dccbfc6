"""`packer stats --html`: the page shows the figures of `--json`, whatever the inputs are called."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from altered import unaltered
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from pages import Page, assert_stands_alone
from spoiling import edit
from support import assert_error, jsonl, pack, packer, succeeds

from packer_cli.errors import DataError
from packer_cli.storage import put_file

pytestmark = pytest.mark.usefixtures("folder")

TEXTS = ["a" * 15, "b" * 7, "c" * 3, "d" * 3, "e" * 9, "f" * 9, "g" * 40, ""]


def written() -> Page:
    """The page of `out`, and that its name is printed instead of the table."""
    result = packer("stats", "out", "--html", "page.html")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "wrote page.html\n", "")
    content = Path("page.html").read_bytes()
    assert_stands_alone(content)
    return Page(content)


def test_the_figures_are_those_of_json() -> None:
    Path("a.jsonl").write_bytes(jsonl(*TEXTS) + b"{\n")
    Path("b.jsonl").write_bytes(jsonl(*TEXTS[:3] * 50))
    pack("a.jsonl", "b.jsonl", "-l", 16, "--overlong", "drop", "--on-error", "skip")
    page = written()
    f: Any = json.loads(packer("stats", "out", "--by", "input", "--json").stdout)
    names = {"documents": "documents", "padding": "padding_tokens", "dropped": "dropped_documents",
             "empty": "empty_documents", "rejected": "rejected_records"}  # fmt: skip
    assert {one: page.boxes[one][0] for one in names} == {
        one: f"{f[name]:,}" for one, name in names.items()
    }
    assert page.boxes["utilization"][0] == f"{f['utilization']:.2%}"
    for first, name in (("tokens", "document_length"), ("full", "row_fill"),
                        ("segments", "segments_per_row")):  # fmt: skip
        counts = [line[1:3] for line in page.table(first)]
        known = [count for count in f["histograms"][name] if count]
        assert counts == [[f"{count:,}", f"{count / sum(known):.2%}"] for count in known]
    figures = ("documents", "tokens", "empty_documents", "rejected_records")
    assert [line[:5] for line in page.table("input")] == [
        [Path(one["path"]).name, *(f"{one[n]:,}" for n in figures)] for one in f["by_input"]
    ]
    assert page.table_of_facts()["options"].endswith(" --overlong drop --on-error skip")
    (marked,) = [line for line in page.table("tokens") if line[3]]
    assert (marked[0], marked[3]) == ("16-31", "▴ max_length 16")
    assert all(0 < float(width[:-1]) <= 100 for width in page.widths)


HOSTILE = [
    "<script>alert(1)<",
    "\"onload='x.jsonl",
    "a\nb\u202ec&amp;.jsonl",
    "ends in &lt.jsonl",
    "style>body{display:none}",
    "name " * 40 + "end.jsonl",
]


def test_names_stay_text() -> None:
    Path(HOSTILE[0]).mkdir()
    inputs = [f"{HOSTILE[0]}/script>.jsonl", *HOSTILE[1:]]
    for name in inputs:
        Path(name).write_bytes(jsonl("text"))
    out = "<b>&\"'out"
    succeeds("pack", *(f"./{name}" for name in inputs), "-l", 8, "--input-format", "jsonl",
                    "-t", "bytes", "-q", "-o", out)  # fmt: skip
    succeeds("stats", out, "--html", "page.html")
    content = Path("page.html").read_bytes()
    assert_stands_alone(content)
    page = Page(content)
    shown = {name.removeprefix("./") for name, *_ in page.table("input")}
    (long,) = (name for name in shown if "…" in name)
    assert shown - {long} == {inputs[0], *HOSTILE[1:2], *HOSTILE[3:5], "a\\nb\\u202ec&amp;.jsonl"}
    assert long.startswith("name name")
    assert long.endswith("name end.jsonl")
    assert len(long) < 100
    assert page.tags.keys() & {"b", "script"} == set()
    assert out in page.text


def test_of_many_inputs_the_largest_are_listed() -> None:
    Path("a.jsonl").write_bytes(jsonl(*TEXTS))
    pack("a.jsonl", "-l", 16)
    path = "/data/" + "<very> long & \u202ehostile name " * 9
    forged = [{"path": f"{path}{i}.jsonl", "tokens": 10**12 + i} for i in range(10_000)]
    edit(lambda manifest: manifest.update(inputs=[manifest["inputs"][0] | one for one in forged]))
    page = written()
    assert Path("page.html").stat().st_size < 200_000
    *listed, rest = page.table("input")
    assert len(listed) == 100
    assert [line[2] for line in listed] == [f"{10**12 + i:,}" for i in range(9_900, 10_000)]
    tokens = sum(10**12 + i for i in range(9_900))
    assert rest[:3] == ["9,900 other inputs", f"{9_900 * int(listed[0][1]):,}", f"{tokens:,}"]


def test_an_incomplete_result_says_so() -> None:
    Path("a.jsonl").write_bytes(jsonl("a" * 99, "b"))
    packed = packer("pack", "a.jsonl", "-l", 16, "--overlong", "drop", "--max-loss", 0, "-t",
                    "bytes", "-o", "out")  # fmt: skip
    assert packed.exit_code == 1
    result = succeeds("stats", "out", "--html", "-")
    page = Page(result.stdout_bytes)
    assert "Marked incomplete: " in page.text
    assert page.boxes["dropped"][0] == "1"


def packed() -> None:
    Path("a.jsonl").write_bytes(jsonl(*TEXTS))
    pack("a.jsonl", "-l", 16)


def test_a_page_is_the_same_each_time_and_replaces_an_earlier_one() -> None:
    packed()
    written()
    first = Path("page.html").read_bytes()
    Path("page.html").write_bytes(first[:1000])
    written()
    assert Path("page.html").read_bytes() == first
    assert sorted(os.listdir()) == ["a.jsonl", "out", "page.html"]
    result = unaltered("stats", "out", "--html", "-")
    assert (result.returncode, result.stdout.encode(), result.stderr) == (0, first, "")


def test_json_goes_beside_a_page() -> None:
    packed()
    result = packer("stats", "out", "--html", "page.html", "--json", "--by", "input")
    assert result.stdout == packer("stats", "out", "--json", "--by", "input").stdout
    assert result.stderr == "packer: wrote page.html\n"
    assert_stands_alone(Path("page.html").read_bytes())


PLACES = {
    "pages": "pages is a directory",
    "a.jsonl/page.html": "a.jsonl is no directory",
    "a.jsonl": "a.jsonl is there, and is not a page of packer's",
    "other.html": "other.html is there, and is not a page of packer's",
    "out/page.html": "out/page.html would be in a result of packer",
    "pipe": "pipe is not a regular file",
    "s3://bucket/page.html": "s3://bucket/page.html: pages are only written to local",
    "": "is empty",
}


def test_where_no_page_is_written() -> None:
    packed()
    Path("pages").mkdir()
    Path("other.html").write_text("<!DOCTYPE html>\n<html><body>mine</body></html>\n")
    os.mkfifo("pipe")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for name, message in PLACES.items():
        assert_error(packer("stats", "out", "--html", name), 2, f"--html: {message}")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("leads", ["to nothing", "to an empty file", "to a page"])
def test_a_link_beside_a_page_is_not_followed(leads: str) -> None:
    packed()
    succeeds("stats", "out", "--html", "page.html")
    content = b"" if leads == "to an empty file" else Path("page.html").read_bytes()
    if leads != "to nothing":
        Path("mine").write_bytes(content)
    Path("page.html.part").symlink_to("mine")
    message = "--html: page.html.part is not a regular file"
    assert_error(packer("stats", "out", "--html", "page.html"), 2, message)
    assert Path("mine").exists() == (leads != "to nothing")
    assert leads == "to nothing" or Path("mine").read_bytes() == content
    with pytest.raises(DataError, match="Too many levels of symbolic links"):
        put_file(Path("page.html"), b"")  # one that is made after that look
    assert Path("page.html.part").is_symlink()


# Sources of recipes


def test_the_page_of_a_result_has_its_sources() -> None:
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, validation_share=0.1, dedup="exact"))
    drawn = Page(packer("stats", "out/train", "--html", "-").stdout_bytes)
    (shares, left_out) = [table for table in drawn.tables if table[0][0] == "source"]
    assert [line[0] for line in shares[1:]] == ["web", "code", "chat"]
    parts = [float(cell[:-1]) for line in shares[1:] for cell in line[5:7]]
    widths = [float(width[:-1]) for width in drawn.widths[: len(parts)]]
    assert widths == pytest.approx([100 * part / max(parts) for part in parts], abs=0.1)
    assert left_out[0] == ["source", "held out", "duplicates"]
