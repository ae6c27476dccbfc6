"""Pages in headless Chromium: nothing in its console; text, colours, hover, phones and paper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audited import DEFECTS, conversations, trl
from browser import CHROMIUM, Browser
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from support import jsonl, packer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing, and make chromium has not "
                       "installed it: pages are not opened in a browser"),
]  # fmt: skip
TEXTS = [
    "kernel\n/\nroot",
    "\n\nnaïve 🎉 \u202e</span><script>x</script>\t&amp;",
    "a" * 300,
    "b\r\n",
]
TRAINED, DARK_TRAINED = "rgb(201, 236, 208)", "rgb(29, 74, 43)"
# What a reader sees of each document: its line, and of each token the text, colour and hover.
SEEN = """[...document.querySelectorAll("details.row")].map(row => {
    row.open = true;
    row.dispatchEvent(new Event("toggle"));
    return [...row.querySelectorAll(".words")].map(words => [
        words.previousSibling.textContent,
        [...words.children].map(one =>
            [one.textContent, getComputedStyle(one).backgroundColor, one.title])]);
})"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind, by its name."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prompts = [{"prompt": text, "completion": f"{text}\nend"} for text in TEXTS]
        Path("prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in prompts))
        Path("texts.jsonl").write_bytes(jsonl(*TEXTS * 20))
        write_sources()
        pack_mixed(recipe_of(IN_SHARES, validation_share=0.1, dedup="exact"))
        sets = conversations(1)
        DEFECTS["header-trained"](sets, 1)
        trl(sets, Path("set"))
        for command in (
            ["pack", "prompts.jsonl", "-t", "bytes", "-l", 512, "-o", "rows"],
            ["pack", "texts.jsonl", "-t", "bytes", "-l", 64, "-o", "texts"],
            ["show", "rows", "--html", "show.html"],
            ["stats", "texts", "--html", "stats.html"],
            ["stats", "out/train", "--html", "mixed.html"],
            ["plan", "texts.jsonl", "-t", "bytes", "-l", "64,128", "--html", "plan.html"],
            ["audit", "set", "--html", "audit.html"],
        ):
            assert packer(*command).exit_code == (command[0] == "audit")
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.started(tmp_path_factory.mktemp("browser")) as started:
        yield started


KINDS = ("show", "stats", "mixed", "plan", "audit")


@pytest.mark.parametrize("kind", KINDS)
def test_pages_fit_phones_screens_and_paper(
    pages: dict[str, Path], browser: Browser, kind: str
) -> None:
    """Nothing is wider than the screen, and nothing is in the console."""
    for width in (320, 390, 800, 1600):
        browser.open(pages[kind], width=width)
        browser.run(SEEN)
        assert browser.run("document.documentElement.scrollWidth") <= width
        hidden = """[...document.querySelectorAll("h1, h2, dd, summary, td, .words")].filter(
            one => one.getBoundingClientRect().right > innerWidth + 1).length"""
        assert browser.run(hidden) == 0 or width > 640
    browser.open(pages[kind], dark=True)
    browser.media("print", dark=True)
    ink = "(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))"
    assert browser.run(ink) == ["rgb(27, 31, 36)", "rgb(255, 255, 255)"]
    assert browser.printed().startswith(b"%PDF-")
    assert browser.complaints == []


def test_rows_are_drawn_as_the_data_has_them(pages: dict[str, Path], browser: Browser) -> None:
    shown = packer("show", pages["show"].parent / "rows", "--json")
    expected = [json.loads(line) for line in shown.stdout.splitlines()]
    for dark, colour in ((False, TRAINED), (True, DARK_TRAINED)):
        browser.open(pages["show"], dark=dark)
        rows: Any = browser.run(SEEN)
        for row, own in zip(rows, expected, strict=True):
            place = 0
            for (line, tokens), one in zip(row, own["segments"], strict=True):
                assert f"prompts.jsonl byte {one['position']}" in line
                assert "".join(text for text, _, _ in tokens) == one["text"]
                green = [text for text, background, _ in tokens if background == colour]
                trained = [span["text"] for span in one["spans"] if span["trained"]]
                assert "".join(green) == "".join(trained)
                for _, _, title in tokens:
                    *ids, _, at = title.split()
                    assert int(at) == place
                    place += len(ids)
    assert browser.complaints == []


def test_line_ends_are_marked_where_they_are(pages: dict[str, Path], browser: Browser) -> None:
    """Each behind the text of its line; what is copied has none."""
    browser.open(pages["show"])
    kernel = "[...document.querySelectorAll('.words')].find(one => /^kernel/.test(one.textContent))"
    edges: Any = browser.run(f"""(({{children}}) => [...children].slice(0, 8).map(one =>
        [one.textContent, ...(box => [box.left, box.right, box.top])(one.getClientRects()[0])]
    ))({kernel})""")
    text, left, right, top = zip(*edges, strict=True)
    assert "".join(text) == "kernel\n/"
    assert top[6] == top[5] < top[7]
    assert left[6] >= right[5]  # the mark stands behind the letters
    assert left[7] == left[0]
    marks = """[...document.querySelectorAll(".words i")].map(one =>
        [one.textContent, getComputedStyle(one, "::before").content].join())"""
    assert {*browser.run(marks)} == {'\n,"↵"'}
    assert "↵" not in browser.run("document.querySelector('.words').textContent")


def test_hover_and_links(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["show"])
    look = "getComputedStyle(document.querySelector('.words span')).outlineStyle"
    assert browser.run(look) == "none"
    browser.hover(".words span")
    assert browser.run(look) == "solid"
    assert browser.run("document.querySelector('.words span:hover').title") == "98 at 0"
    browser.open(pages["audit"])
    name = browser.run("[...document.querySelectorAll('td a')].at(-1).hash")
    browser.run("[...document.querySelectorAll('td a')].at(-1).click()")
    row = f"document.querySelector('{name}')"
    assert browser.run(f"{row}.open && {row}.getBoundingClientRect().top < innerHeight")
    assert browser.complaints == []
