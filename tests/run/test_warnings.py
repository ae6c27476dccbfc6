"""Warnings of what a run loses or leaves out: on stderr, also with -q, in stats and on its page."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers as tiny
from chats import TAGS, assistant, chat, user, write
from support import assert_error, check_directory, packer

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
    "less than 1% dropped": (
        [*CHATS * 80, chat(user("Hi"), assistant("b" * 1100))], TEMPLATE, [],
    ),
    "nothing to train on": (
        [*CHATS, chat(user(WORDS))],
        TEMPLATE,
        ["of the tokens: without a token to train on; --keep-untrained keeps them"],
    ),
    "a text that no field is": (
        [one | {"notes": f"{i} {LONG}"} for i, one in enumerate(PAIRS)],
        (),
        ["nothing uses the text in notes (59.33%), of 9 records looked at; "
            "--field context=notes puts it below the prompt, --max-unused 1% makes it an error"],
    ),
    "texts within a field": (
        [one | {"more": {"notes": [LONG, LONG]}} for one in TEXTS],
        (),
        ["nothing uses the text in more (75.00%), of 9 records looked at; --text-field more"],
    ),
    "short values, URLs and pictures": (
        [one | {"id": i, "lang": "en", "url": "https://" + "a" * 200} for i, one in
         enumerate(PAIRS)], (), [],
    ),
    "what is used, once more": (
        [one | {"text": f"Q: {one['prompt']}A: {one['completion']}"} for one in PAIRS]
        + [PAIRS[0] | {"text": WORDS}], ("--shape", "prompt-completion"), [],
    ),
    "reasoning without a chat template": (
        [one | {"reasoning": LONG} for one in PAIRS],
        (),
        ["; --prompt-template chat uses it, --max-unused 1% makes it an error"],
    ),
    "a token across the edge": (
        [{"prompt": "The quick brown f", "completion": "ox jumps."}], ("-t", "merging"),
        ["1 token in 1 document (100.00%) hold the end of a prompt and the beginning of its"],
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


def test_raw_prompts_where_there_is_a_chat_template(folder: Path) -> None:
    write(PAIRS)
    save_merging("merging", TAGS)
    [line] = warned("-t", "merging")
    assert line == (
        "prompts and answers of records of shape prompt-completion are joined as they are, though "
        "the tokenizer has a chat template; --prompt-template chat uses it"
    )
    quiet = ("pack", "data.jsonl", "-l", 1024, "-t", "merging", "-q", "--overwrite", "-o", "out")
    asked = packer(*quiet, "--prompt-template", "none")
    assert (asked.exit_code, asked.stderr) == (0, "")  # who asks for it knows
    chats = packer(*quiet, "--prompt-template", "chat")
    assert (chats.exit_code, chats.stderr) == (0, "")


def test_how_prompts_become_text_is_said(folder: Path) -> None:
    Path("t.jinja").write_text(TAGS)
    for options, words in (
        ((), "prompts as they are"),
        (("--prompt-template", "alpaca"), "prompts as alpaca"),
        (("--prompt-template", "chat", *TEMPLATE), "prompts as chat"),
    ):
        write(PAIRS)
        result = packer("pack", "data.jsonl", "-l", 1024, "-t", "bytes", "-o", "out",
                        "--overwrite", *options)  # fmt: skip
        assert f"packer: {words}; see --prompt-template" in result.stderr.splitlines()
        assert f"prompt-completion, {words}; trained on: " in packer("stats", "out").stdout
        assert packer("stats", "out", "--html", "page.html").exit_code == 0
        assert words in Path("page.html").read_text()


def _write_csv(rows: list[dict[str, str]]) -> None:
    with open("data.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


FORMATS: dict[str, Callable[[list[dict[str, str]]], object]] = {
    "jsonl": lambda rows: write(rows, "data.jsonl"),
    "json": lambda rows: Path("data.json").write_text(json.dumps(rows)),
    "parquet": lambda rows: pq.write_table(pa.Table.from_pylist(rows), "data.parquet"),
    "arrow": lambda rows: pa.feather.write_feather(
        pa.Table.from_pylist(rows), "data.arrow", compression="uncompressed"
    ),
    "csv": _write_csv,
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_sample_of_records_is_looked_at(folder: Path, suffix: str) -> None:
    """All of the first 64, and one of 64 afterwards; where columns are read, the first ones."""
    FORMATS[suffix]([{**PAIRS[0], "notes": f"{i} {LONG}"} for i in range(200)])
    options = ("-l", 1024, "-t", "bytes", "-o", "out", "-q")
    result = packer("pack", f"data.{suffix}", *options)
    number = 64 if suffix in ("parquet", "arrow") else 67
    assert "nothing uses the text in notes (59.4" in result.stderr
    assert f", of {number} records looked at; " in result.stderr
    result = packer("verify", "out", "--against-inputs", "--sample", "all")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("command", [("pack", "-l", 1024), ("tokenize",), ("plan", "-l", 1024)])
def test_max_unused(folder: Path, command: tuple[Any, ...]) -> None:
    write([one | {"notes": f"{i} {LONG}"} for i, one in enumerate(PAIRS)])
    name, *options = command
    output = () if name == "plan" else ("-o", "out")
    arguments = (name, "data.jsonl", *options, *output, "-t", "bytes", "-q")
    result = packer(*arguments, "--max-unused", "10%")
    assert_error(
        result, 1, "0.5933 of the text of records is in fields that nothing uses, notes; "
        "--max-unused is 0.1",
    )  # fmt: skip
    assert not Path("out").exists() or not Path("out/manifest.json").exists()
    assert packer(*arguments, "--max-unused", "60%").exit_code == 0
    if name != "plan":
        assert json.loads(Path("out/manifest.json").read_text())["unused"] == {"notes": 2718}
        assert packer("verify", "out").exit_code == 0
