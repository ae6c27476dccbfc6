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
from support import check_directory, packer, succeeds

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
    result = succeeds(
        "pack", "data.jsonl", "-l", 1024, "-t", "bytes", "-o", "out", "-q", *arguments
    )
    lines = [line.removeprefix("packer: warning: out: ") for line in result.stderr.splitlines()]
    shown = packer("stats", "out").stdout.splitlines()
    assert [line.removeprefix("warning: ") for line in shown if "warning: " in line] == lines
    found = json.loads(packer("stats", "out", "--json").stdout)["warnings"]
    assert [f"{one['text']}; {one['way_out']}" for one in found] == lines
    succeeds("stats", "out", "--html", "page.html")
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
        ["1 token in 1 document (100.00%) straddle a prompt and its answer, so at inference the "
         "prompt is tokenized differently; --prompt-template chat, with a --chat-template, or "
         "alpaca avoids this"],
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


def test_prompts_of_several_formats_are_counted(folder: Path) -> None:
    write(PAIRS)
    write([*CHATS, *CHATS], "chats.jsonl")
    write([{"instruction": "Say hi.", "output": "Hi"}] * 7, "alpaca.jsonl")
    write(TEXTS, "texts.jsonl")
    save_merging("merging", TAGS)
    assert warned("alpaca.jsonl", "chats.jsonl", "texts.jsonl", "-t", "merging") == [
        "prompts take 3 formats: as they are in 9 documents, Alpaca's in 7 documents, the chat "
        "template's in 18 documents; --prompt-template chat gives all of them one"
    ]
    assert warned("alpaca.jsonl", "--overwrite") == [
        "prompts take 2 formats: as they are in 9 documents, Alpaca's in 7 documents; "
        "--prompt-template alpaca gives all of them one"
    ]
    assert warned("alpaca.jsonl", "--overwrite", "--prompt-template", "alpaca") == []
    Path("t.jinja").write_text(TAGS)
    chat_for_all = ("--overwrite", *TEMPLATE, "--prompt-template", "chat")
    assert warned("alpaca.jsonl", "chats.jsonl", *chat_for_all) == []


ALIKE = " of the rows with four segments or more hold documents of "


@pytest.mark.parametrize("strategy", ["best-fit-decreasing", "best-fit"])
def test_rows_of_one_length(folder: Path, strategy: str) -> None:
    write([{"text": "a" * (30 + number * 7919 % 200)} for number in range(2000)])
    lines = [line.partition("%")[2] for line in warned("--strategy", strategy)]
    told = f"{ALIKE}nearly one length; --strategy best-fit mixes lengths"
    assert lines == ([told] if strategy == "best-fit-decreasing" else [])


@pytest.mark.parametrize("texts", [400, 4000])
def test_rows_of_one_input(folder: Path, texts: int) -> None:
    """Where most of the data is one input, rows of it are no wonder."""
    write([{"text": "a" * 90}] * texts)
    write([{"text": "b" * 90}] * 400, "other.jsonl")
    lines = [line.partition("%")[2] for line in warned("other.jsonl", "--strategy", "next-fit")]
    told = f"{ALIKE}one input; shuffle records across inputs before, or name the inputs as sources"
    assert lines == ([f"{told} of a recipe"] if texts == 400 else [])


TURN_ENDS = {
    "a turn's end": ("<|eot_id|>", (), "", "--eos-token '<|end_of_text|>' ends texts"),
    "by the template": ("</turn>", (), "{% for m in messages %}{{ m.content }}</turn>{% endfor %}",
                        "--eos-token '<|end_of_text|>' ends texts"),
    "a text's end": ("<|end_of_text|>", (), "{{ messages[0].content }}<|end_of_text|>", ""),
    "another is named": ("<|eot_id|>", ("--eos-token", "<|end_of_text|>"), "", ""),
    "none is added": ("<|eot_id|>", ("--no-eos",), "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", TURN_ENDS)
def test_texts_that_end_with_the_end_of_a_turn(folder: Path, case: str) -> None:
    eos, options, template, tip = TURN_ENDS[case]
    tokenizer = tiny.byte_level()
    for number, name in enumerate({eos, "<|end_of_text|>"}, 900):
        tokenizer = tiny.with_added_token(tokenizer, name, number)
    config = {"eos_token": eos} | ({"chat_template": template} if template else {})
    tiny.save(Path("own"), tokenizer, tokenizer_config=config)
    write(TEXTS)
    result = packer("pack", "data.jsonl", "-l", 64, "-t", "own", "-o", "out", *options)
    note = f"texts end with EOS {eos}, which ends turns of conversations; {tip}"
    assert (f"packer: {note}" in result.stderr.splitlines()) == bool(tip), result.stderr


def test_a_rerun_repeats_no_note(folder: Path) -> None:
    """Nor says how long it took to do nothing; what is wrong with the result is said again."""
    write([one | {"tree": 1, "extra": "x"} for one in [*CHATS, LARGE]])
    Path("t.jinja").write_text(TAGS)
    command = ["pack", "data.jsonl", "-l", 1024, "-t", "bytes", *TEMPLATE, "-o", "out"]
    first, again = packer(*command).stderr.splitlines(), packer(*command).stderr.splitlines()
    assert any("tree" in line for line in first)
    assert any("(found from turn markers)" in line for line in first)
    warnings = [line for line in first if "warning" in line]
    assert again == ["packer: out: up to date", *warnings]
    write([{"text": WORDS}], "other.jsonl")
    Path("mix.toml").write_text(
        'tokenizer = "bytes"\nmax_length = 64\n'
        '[[source]]\nname = "a"\ninputs = ["data.jsonl"]\nchat_template = "t.jinja"\n'
        '[[source]]\nname = "b"\ninputs = ["other.jsonl"]\n'
    )
    command = ["pack", "mix.toml", "-o", "mixed", "--overlong", "truncate"]
    first, again = packer(*command).stderr.splitlines(), packer(*command).stderr.splitlines()
    assert sum("tree" in line for line in first) == 1
    places = ["mix-tokenized/a", "mix-tokenized/b", "mixed"]
    assert [line for line in again if "warning" not in line] == [
        f"packer: {place}: up to date" for place in places
    ]
    assert [line for line in first if ": done in" in line and line.split(": ")[1] in places] == [
        line for line in first if ": done in" in line
    ]


def test_how_prompts_become_text_is_said(folder: Path) -> None:
    """And warned of where the tokenizer has a chat template, unless it is asked for."""
    write(PAIRS)
    save_merging("merging", TAGS)
    assert warned("-t", "merging") == [
        "prompts and answers of prompt-completion records are concatenated without the chat "
        "template; add --prompt-template chat to use it"
    ]
    command = ("pack", "data.jsonl", "-l", 1024, "-t", "merging", "--overwrite", "-o", "out")
    for name, words in (("none", "as they are"), ("alpaca", "as alpaca"), ("chat", "as chat")):
        quiet = packer(*command, "-q", "--prompt-template", name)
        assert (quiet.exit_code, quiet.stderr) == (0, "")  # who asks for it knows
        result = packer(*command, "--prompt-template", name)
        assert f"packer: prompts {words}; see --prompt-template" in result.stderr.splitlines()
        assert f"prompt-completion, prompts {words}; trained on: " in packer("stats", "out").stdout
        succeeds("stats", "out", "--html", "page.html")
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
    "tools beside messages": (
        [one | {"tools": [{"name": "f", "description": LONG}]} for one in CHATS], TEMPLATE, [],
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
