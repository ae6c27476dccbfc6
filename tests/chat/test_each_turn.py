"""`--turns each`: every answer is a document of its own, after the prompt that asks for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chats import (
    CHATML,
    assistant,
    chat,
    chat_tokenizer,
    marked_pieces,
    pack_chat,
    system,
    user,
    write,
)
from support import check_directory, packer

from packer_cli import open_packed

# Only the last thought is shown, as with Qwen 3.
LAST_THOUGHT = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>"
    "{% endfor %}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THOUGHTS = chat(
    system("S"), user("q0"), assistant("a0", reasoning_content="t0"),
    user("q1"), assistant("a1", reasoning_content="t1"),
)  # fmt: skip
EACH = ("--turns", "each")
LOOP = ("--ranks", 1, "--no-shuffle")


def each(record: Any, *options: Any, template: str = LAST_THOUGHT) -> list[str]:
    pack_chat([record], *EACH, *options, template=template)
    return marked_pieces("out")


def test_places_name_the_turn(folder: Path) -> None:
    records = [chat(user("q"), assistant("a")), THOUGHTS]
    write(records)
    place = len(json.dumps(records[0])) + 1
    pack_chat(records, *EACH, "--no-shuffle", template=LAST_THOUGHT)
    shown = packer("show", "out", 0).stdout
    assert f"data.jsonl byte {place} turn 1, " in shown
    assert "data.jsonl byte 0 turn 0, " in shown
    as_json = json.loads(packer("show", "out", 0, "--json").stdout.splitlines()[0])
    turns = [(one["position"], one["turn"]) for one in as_json["segments"]]
    assert sorted(turns) == [(0, 0), (place, 0), (place, 1)]
    stored = open_packed("out").manifest["config"]["turns"]
    assert stored == "each"
    for name, pieces in ((f"data.jsonl:{place}", 2), (f"data.jsonl byte {place} turn 1", 1)):
        found = packer("trace", "out", "--find", name, *LOOP, "--json")
        assert found.exit_code == 0, found.stderr
        one = json.loads(found.stdout.splitlines()[0])
        assert found.stdout.count('"turn": ') >= pieces, one
    missing = packer("trace", "out", "--find", "data.jsonl:3", *LOOP)
    assert f"{place}" in missing.stdout + missing.stderr


@pytest.mark.parametrize("sample", ["all", "5"])
def test_verify_finds_the_turns_again(folder: Path, sample: str) -> None:
    records = [THOUGHTS, chat(user("q"), assistant("a"))] * 30
    pack_chat(records, *EACH, template=LAST_THOUGHT)
    checked = packer("verify", "out", "--against-inputs", "--sample", sample)
    assert checked.exit_code == 0, checked.stdout
    assert ": OK; " in checked.stdout
    for way in ("turns", "train_on"):
        path = Path("out/manifest.json")
        kept = path.read_text()
        assert f'"{way}"' in kept


def test_workers_units_and_updates(folder: Path) -> None:
    records = [THOUGHTS, chat(user("q"), assistant("a"))] * 100
    write(records[:100])
    how = ("--chat-template", "t.jinja", "-l", 512, "-t", "bytes", "-q", *EACH)
    Path("t.jinja").write_text(LAST_THOUGHT)
    made = packer("pack", "data.jsonl", "-o", "one", *how, "--workers", 1, "--unit-bytes", 3000)
    assert made.exit_code == 0, made.stderr
    made = packer("pack", "data.jsonl", "-o", "two", *how, "--workers", 2, "--unit-bytes", 3000)
    assert made.exit_code == 0, made.stderr
    assert check_directory("one") == check_directory("two")
    write(records[100:], "more.jsonl")
    updated = packer("pack", "data.jsonl", "more.jsonl", "-o", "one", *how, "--add",
                     "--unit-bytes", 3000)  # fmt: skip
    assert updated.exit_code == 0, updated.stderr
    assert check_directory("one")["documents"] == 2 * check_directory("two")["documents"] == 300
    other = packer("pack", "data.jsonl", "more.jsonl", "-o", "one", *how[:-2], "--add",
                   "--unit-bytes", 3000)  # fmt: skip
    assert other.exit_code != 0
    assert "turns" in other.stderr


def test_too_long_turns_lose_their_oldest_ones(folder: Path) -> None:
    record = chat(*(m for i in range(4) for m in (user(f"q{i}"), assistant(f"a{i}"))))
    one = len("<user>q0</user><assistant>a0</assistant>")
    texts = each(record, "-l", 2 * one, "--overlong", "truncate-turns")
    assert texts[-1] == (
        "<user>q2</user><assistant>a2</assistant><user>q3</user><assistant>⟦a3</assistant>⟧"
    )
    assert [text.count("<user>") for text in texts] == [1, 2, 2, 2]


def test_tokenized_directories_have_turns_too(folder: Path) -> None:
    write([THOUGHTS] * 3)
    Path("t.jinja").write_text(LAST_THOUGHT)
    made = packer("tokenize", "data.jsonl", "-o", "tokens", "-t", "bytes", *EACH,
                  "--chat-template", "t.jinja")  # fmt: skip
    assert made.exit_code == 0, made.stderr
    place = len(json.dumps(THOUGHTS)) + 1
    assert f"data.jsonl byte {place} turn 1, " in packer("show", "tokens", 3).stdout
    checked = packer("verify", "tokens", "--against-inputs", "--sample", "2")
    assert checked.exit_code == 0, checked.stdout
    made = packer("pack", "tokens", "-o", "out", "-l", 256, "--no-shuffle")
    assert made.exit_code == 0, made.stderr
    shown = "".join(packer("show", "out", row).stdout for row in range(3))
    assert f"data.jsonl byte {place} turn 0 (document 2 of tokens)" in shown
    found = packer("trace", "out", "--find", f"data.jsonl:{place}", *LOOP)
    assert found.exit_code == 0, found.stderr
    checked = packer("verify", "out", "--against-inputs", "--sample", "all")
    assert checked.exit_code == 0, checked.stdout


def test_tokens_across_the_edge_are_counted_as_they_are(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", CHATML)
    pack_chat([THOUGHTS], *EACH, template=None, tokenizer=tokenizer)
    manifest = check_directory("out")
    rows = [batch for shard in manifest["shards"] for batch in open_packed("out").batches(shard)]
    assert sum(len(rows) for rows in rows) == manifest["rows"]
    assert manifest["repeated_tokens"] > 0


def test_the_report_says_how_much_is_repeated(folder: Path) -> None:
    write([THOUGHTS])
    Path("t.jinja").write_text(LAST_THOUGHT)
    made = packer("pack", "data.jsonl", "-o", "out", "-l", 256, "-t", "bytes", *EACH,
                  "--chat-template", "t.jinja")  # fmt: skip
    for said in (made.stdout, packer("stats", "out").stdout):
        assert re.search(r"\nrepeated +44 +tokens", said), said
