"""Warnings of what a run loses or leaves out: on stderr, also with -q, in stats and on its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers as tiny
from chats import TAGS, assistant, chat, user, write
from support import check_directory, packer

LONG = "All that the answer is about. " * 10
WORDS = "word " * 40
PAIRS = [{"prompt": f"Say {i}.\n", "completion": WORDS} for i in range(9)]
TEXTS = [{"text": WORDS} for _ in range(9)]
CHATS = [chat(user("Hi"), assistant(WORDS)) for _ in range(9)]
LARGE = chat(user("Hi"), assistant("a"), user("Hi"), assistant("b" * 3000))
TEMPLATE = ("--chat-template", "t.jinja")


def save_merging(folder: str, template: str | None = None) -> None:
    """A tokenizer with tokens of several letters."""
    config = {"eos_token": tiny.EOS} | ({"chat_template": template} if template else {})
    tiny.save(Path(folder), tiny.byte_level(), tokenizer_config=config)


def warned(*arguments: Any) -> list[str]:
    """The warnings of a run with -q, which stats, its JSON and its page give, too."""
    result = packer("pack", "data.jsonl", "-l", 1024, "-t", "bytes", "-o", "out", "-q", *arguments)
    assert result.exit_code == 0, result.stderr
    lines = [line.removeprefix("packer: warning: out: ") for line in result.stderr.splitlines()]
    shown = packer("stats", "out").stdout.splitlines()
    assert [line.removeprefix("warning: ") for line in shown if "warning: " in line] == lines
    found = json.loads(packer("stats", "out", "--json").stdout)["warnings"]
    assert [f"{one['text']}; {one['way_out']}" for one in found] == lines
    assert packer("stats", "out", "--html", "page.html").exit_code == 0
    assert Path("page.html").read_text().count('class="warning"') == len(lines)
    check_directory("out")
    return lines


# records, options, a part of each warning
WARNINGS: dict[str, tuple[list[Any], tuple[str, ...], list[str]]] = {
    "nothing": (TEXTS, (), []),
    "chats": (CHATS, TEMPLATE, []),
    "rows of one token": (
        TEXTS, ("-l", 1),
        ["no token of the result is trained on; the first token of a document is never trained on"],
    ),
    "prompts and a tokenizer without a chat template": (PAIRS, (), []),
    "a dropped conversation": (
        [*CHATS, LARGE],
        TEMPLATE,
        [
            "1 of 10 documents dropped, 58.96% of the tokens: longer than --max-length 1024; "
            "--overlong truncate-turns keeps their last turns, --max-length 4096 keeps all, "
            "--max-loss 1% makes it an error"
        ],
    ),
    "a dropped answer": (
        [*PAIRS, {"prompt": "a", "completion": "b" * 3000}],
        (),
        ["longer than --max-length 1024; --max-length 4096 keeps all, --max-loss 1% makes"],
    ),
    "a dropped conversation, though only its last turns are needed": (
        [*CHATS, LARGE], (*TEMPLATE, "--overlong", "truncate-turns"),
        ["longer than --max-length 1024; --max-length 4096 keeps all, --max-loss 1% makes"],
    ),
    "less than 1% dropped": (
        [*CHATS * 80, chat(user("Hi"), assistant("b" * 1100))], TEMPLATE, [],
    ),
    "nothing to train on": (
        [*CHATS, chat(user(WORDS))],
        TEMPLATE,
        ["of the tokens: without a token to train on; --max-loss 1% makes it an error"],
    ),
    "a token across the edge": (
        [{"prompt": "The quick brown f", "completion": "ox jumps."}], ("-t", "merging"),
        ["1 token in 1 document (100.00%) hold the end of a prompt and the beginning of its "
         "answer: no prompt ends there when the model is asked; --prompt-template chat, with a "
         "--chat-template, or alpaca parts them"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNINGS)
def test_warnings(folder: Path, name: str) -> None:
    records, options, expected = WARNINGS[name]
    write(records)
    Path("t.jinja").write_text(TAGS)
    save_merging("merging")
    lines = warned(*options)
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line


def test_how_prompts_become_text_is_said(folder: Path) -> None:
    """And warned of where the tokenizer has a chat template, unless it is asked for."""
    write(PAIRS)
    save_merging("merging", TAGS)
    assert warned("-t", "merging") == [
        "prompts and answers of records of shape prompt-completion are joined as they are, though "
        "the tokenizer has a chat template; --prompt-template chat uses it"
    ]
    command = ("pack", "data.jsonl", "-l", 1024, "-t", "merging", "--overwrite", "-o", "out")
    for name, words in (("none", "as they are"), ("alpaca", "as alpaca"), ("chat", "as chat")):
        quiet = packer(*command, "-q", "--prompt-template", name)
        assert (quiet.exit_code, quiet.stderr) == (0, "")  # who asks for it knows
        result = packer(*command, "--prompt-template", name)
        assert f"packer: prompts {words}; see --prompt-template" in result.stderr.splitlines()
        assert f"prompt-completion, prompts {words}; trained on: " in packer("stats", "out").stdout
        assert packer("stats", "out", "--html", "page.html").exit_code == 0
        assert f"prompts {words}" in Path("page.html").read_text()


# records, options, what is said of columns that no option uses
NOTES = [one | {"notes": f"{i} {LONG}"} for i, one in enumerate(PAIRS)]
IGNORED: dict[str, tuple[list[Any], tuple[str, ...], list[str]]] = {
    "a text that no field is": (NOTES, (), ["warning: data: ignored text in notes; see --field"]),
    "the same, used": (NOTES, ("--field", "context=notes"), []),
    "texts within a field": (
        [one | {"more": {"notes": [LONG, LONG]}} for one in TEXTS], (),
        ["warning: data: ignored text in more; see --field"],
    ),
    "tools beside prompts": (
        [one | {"tools": [{"name": "f", "description": LONG}]} for one in PAIRS], (),
        ["warning: data: ignored text in tools; --prompt-template chat uses it"],
    ),
    "what is rendered without blanks at its ends": (
        [chat(user(f"{LONG}{i}\n"), assistant(f"{WORDS}\n"))
         | {"text": f"U: {LONG}{i}A: {WORDS.strip()}"} for i in range(9)], TEMPLATE,
        ["data: ignored column: text; see --field"],
    ),
    "short values, URLs and pictures": (
        [one | {"id": i, "url": "https://" + "a" * 200} for i, one in enumerate(PAIRS)], (),
        ["data: ignored columns: id, url; see --field"],
    ),
    "short values beside plain text": ([one | {"lang": "en"} for one in TEXTS], (), []),
    "what is used, once more": (
        [one | {"both": f"Q: {one['prompt']}A: {one['completion']}"} for one in PAIRS], (),
        ["data: ignored column: both; see --field"],
    ),
}  # fmt: skip
FORMATS: dict[str, Callable[[list[dict[str, str]]], object]] = {
    "jsonl": lambda rows: write(rows, "data.jsonl"),
    "json": lambda rows: Path("data.json").write_text(json.dumps(rows)),
    "parquet": lambda rows: pq.write_table(pa.Table.from_pylist(rows), "data.parquet"),
}


@pytest.mark.parametrize(
    ("name", "suffix"),
    [*((name, "jsonl") for name in IGNORED), *(("texts within a field", one) for one in FORMATS)],
)
def test_ignored_columns_are_named(folder: Path, name: str, suffix: str) -> None:
    """Those with text also with -q."""
    records, options, expected = IGNORED[name]
    FORMATS[suffix](records)
    Path("t.jinja").write_text(TAGS)
    command = ("tokenize", f"data.{suffix}", "-t", "bytes", "-o", "out", *options)
    lines = packer(*command).stderr.replace(f"data.{suffix}:", "data:").splitlines()
    assert [one for one in lines if "ignored" in one] == [f"packer: {one}" for one in expected]
    quiet = packer(*command, "-q", "--overwrite").stderr
    assert ("ignored" in quiet) == any("warning" in one for one in expected)
