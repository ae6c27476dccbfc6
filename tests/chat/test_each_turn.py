"""`--turns each`: every answer is a document of its own, after the prompt that asks for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chats import (
    assistant,
    chat,
    marked_pieces,
    pack_chat,
    system,
    user,
    write,
)
from support import check_directory, packer, succeeds

from packer_cli.chat.documents import Composer
from packer_cli.errors import InternalError
from packer_cli.options.options import PackConfig
from packer_cli.options.shapes import Shape

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


@pytest.mark.parametrize("sample", ["all", "5"])
def test_verify_finds_the_turns_again(folder: Path, sample: str) -> None:
    records = [THOUGHTS, chat(user("q"), assistant("a"))] * 30
    pack_chat(records, *EACH, template=LAST_THOUGHT)
    succeeds("verify", "out", "--against-inputs", "--sample", sample)


def test_workers_units_and_additions(folder: Path) -> None:
    records = [THOUGHTS, chat(user("q"), assistant("a"))] * 50
    write(records)
    how = ("--chat-template", "t.jinja", "-l", 512, "-t", "bytes", "-q", "--unit-bytes", 3000)
    Path("t.jinja").write_text(LAST_THOUGHT)
    for out, workers in (("one", 1), ("two", 2)):
        succeeds("pack", "data.jsonl", "-o", out, *how, *EACH, "--workers", workers)
    assert check_directory("one") == check_directory("two")
    write(records[:20], "more.jsonl")
    add = ("pack", "data.jsonl", "more.jsonl", "-o", "one", *how, "--add")
    succeeds(*add, *EACH)
    assert check_directory("one")["documents"] == 150 + 30
    other = packer(*add)
    assert (other.exit_code, "turns" in other.stderr) == (2, True)


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
    succeeds("tokenize", "data.jsonl", "-o", "tokens", "-t", "bytes", *EACH,
                  "--chat-template", "t.jinja")  # fmt: skip
    place = len(json.dumps(THOUGHTS)) + 1
    assert f"data.jsonl byte {place} turn 1, " in packer("show", "tokens", 3).stdout
    succeeds("verify", "tokens", "--against-inputs", "--sample", "2")
    succeeds("pack", "tokens", "-o", "out", "-l", 256, "--no-shuffle")
    shown = "".join(packer("show", "out", row).stdout for row in range(3))
    assert f"data.jsonl byte {place} turn 0 (document 2 of tokens)" in shown
    succeeds("verify", "out", "--against-inputs", "--sample", "all")


def test_the_report_says_how_much_is_repeated(folder: Path) -> None:
    pack_chat([THOUGHTS], *EACH, template=LAST_THOUGHT)
    assert re.search(r"\nrepeated +44 +tokens", packer("stats", "out").stdout)


@pytest.mark.parametrize("kind", ["messages", "prompt-completion"])
def test_a_value_of_train_on_that_nothing_handles_is_an_error(kind: str) -> None:
    """Whoever declares one, and forgets what it chooses, does not train on everything."""
    config = PackConfig(max_length=8)
    object.__setattr__(config, "train_on", "first")  # as if it were declared
    with pytest.raises(InternalError, match="--train-on first: nothing says"):
        Composer(Shape(kind), config, None, {}, ())
