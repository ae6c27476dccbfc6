"""`--turns each`: every answer is a document of its own, after the prompt that asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import (
    CALL,
    CHATML,
    REWRITTEN,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    marked_pieces,
    pack_chat,
    refused,
    run,
    system,
    user,
    write,
)
from support import assert_error, check_directory, packer

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


def test_every_answer_is_rendered_as_the_last_one(folder: Path) -> None:
    pack_chat([THOUGHTS], template=LAST_THOUGHT)
    assert marked_pieces("out") == [
        "<system>S</system><user>q0</user><assistant>⟦a0</assistant>⟧"
        "<user>q1</user><assistant>⟦<think>t1</think>a1</assistant>⟧"
    ]
    before = "<system>S</system><user>q0</user><assistant>"
    texts = each(THOUGHTS)
    assert texts == [
        f"{before}⟦<think>t0</think>a0</assistant>⟧",
        f"{before}a0</assistant><user>q1</user><assistant>⟦<think>t1</think>a1</assistant>⟧",
    ]
    manifest = check_directory("out")
    assert manifest["repeated_tokens"] == len(before)
    assert manifest["unshown_documents"] == 0  # each thought is in one of them
    assert (manifest["documents"], manifest["trained_turns"]) == (2, 2)


def test_which_turns(folder: Path) -> None:
    record = chat(
        user("q"), assistant("look", tool_calls=[CALL]), {"role": "tool", "content": "wet"},
        assistant("yes"), user("so?"), assistant("so"),
    )  # fmt: skip
    answers = [text[text.index("⟦") :] for text in each(record)]
    call = '⟦look<call>{"name": "rain", "arguments": {"city": "Oslo"}}</call></assistant>⟧'
    assert answers == [call, "⟦yes</assistant>⟧", "⟦so</assistant>⟧"]
    assert [t[t.index("⟦") :] for t in each(record, "--train-on", "final")] == answers[1:]
    assert [t[t.index("⟦") :] for t in each(record, "--train-on", "last-assistant")] == answers[2:]


def test_nobody_asked_for_the_first_message(folder: Path) -> None:
    record = chat(system("S"), assistant("Hi"), user("q"), assistant("a"))
    assert each(record) == [
        "<system>S</system><assistant>Hi</assistant><user>q</user><assistant>⟦a</assistant>⟧"
    ]
    manifest = check_directory("out")
    assert manifest["untrained_documents"] == 1
    kept = each(record, "--keep-untrained")
    assert kept[0] == "<system>S</system><assistant>Hi</assistant>"


def test_a_conversation_without_an_answer_is_counted(folder: Path) -> None:
    pack_chat([chat(user("q")), chat(user("q"), assistant("a"))], *EACH, template=LAST_THOUGHT)
    assert check_directory("out")["untrained_documents"] == 1


def test_flags_say_which_turns_are_not_trained_on(folder: Path) -> None:
    record = chat(user("q0"), assistant("a0", weight=0), user("q1"), assistant("a1", weight=1))
    assert each(record) == [
        "<user>q0</user><assistant>a0</assistant><user>q1</user><assistant>⟦a1</assistant>⟧"
    ]
    manifest = check_directory("out")
    assert manifest["untrained_documents"] == manifest["masked_documents"] == 1
    assert manifest["masked_tokens"] == len("a0</assistant>")


def test_a_prompt_that_ends_in_other_white_space(folder: Path) -> None:
    """The prompt is as it is asked for, and the answer as it is rendered."""
    template = TAGS.replace("<assistant>{% endif", "<assistant>\n{% endif")
    assert each(chat(user("q"), assistant("a")), template=template) == [
        "<user>q</user><assistant>\n⟦a</assistant>⟧"
    ]


def test_a_prompt_that_goes_on_otherwise_is_an_error(folder: Path) -> None:
    template = TAGS.replace("<assistant>{% endif", "<assistant><think>{% endif")
    records = [chat(user("q"), assistant("a"))]
    refused(
        records, 1, "data.jsonl, line 1 (byte 0)",
        "the prompt for message 1 goes on in '<think>'", options=EACH, template=template,
    )  # fmt: skip
    assert run(records, template=template).exit_code == 0


def test_a_prompt_that_shows_more_than_the_text_with_the_answer(folder: Path) -> None:
    """As gpt-oss does: thoughts before a call are gone once there is an answer."""
    shown = "m.reasoning_content and not (messages[-1].role == 'assistant' and not loop.last)"
    template = LAST_THOUGHT.replace("m.reasoning_content and loop.last", shown)
    record = chat(
        user("q"), assistant("", reasoning_content="ask", tool_calls=[CALL]),
        {"role": "tool", "content": "wet"}, assistant("yes", reasoning_content="so"),
    )  # fmt: skip
    call = '<think>ask</think><call>{"name": "rain", "arguments": {"city": "Oslo"}}</call>'
    assert each(record, template=template) == [
        f"<user>q</user><assistant>⟦{call}</assistant>⟧",
        f"<user>q</user><assistant>{call}</assistant><tool>wet</tool><assistant>"
        "⟦<think>so</think>yes</assistant>⟧",
    ]


# As gpt-oss does: thoughts before a call are gone once there is an answer.
FORGETS = LAST_THOUGHT.replace(
    "m.reasoning_content and loop.last",
    "m.reasoning_content and not (messages[-1].role == 'assistant' and not loop.last)",
)
ASKED = chat(
    user("q"), assistant("", reasoning_content="ask", tool_calls=[CALL]),
    {"role": "tool", "content": "wet"},
)  # fmt: skip


def test_an_answer_put_to_its_prompt_is_whole_though_its_beginning_is_untrained(
    folder: Path,
) -> None:
    answers = (
        (assistant("yes", reasoning_content="so"), "<think>so</think>⟦yes</assistant>⟧"),
        (
            assistant("say <assistant>yes", train_detail=[
                {"begin_offset": 15, "end_offset": 17, "train": True},
            ]),
            "say <assistant>⟦yes</assistant>⟧",
        ),
    )  # fmt: skip
    for answer, marked in answers:
        record = chat(*ASKED["messages"], answer)
        text = each(record, "--no-train-reasoning", template=FORGETS)[-1]
        assert text.endswith(f"</call></assistant><tool>wet</tool><assistant>{marked}")
        assert "<think>ask</think>" in text


# As Mistral's: what the system says is in the user's last message, while that is the last one.
# Nothing asks for the answer.
INSTRUCTIONS = (
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_a_prompt_with_what_the_system_says_before_the_last_question(folder: Path) -> None:
    record = chat(system("S"), user("q0"), assistant("a0"), user("q1"), assistant("a1"))
    assert each(record, template=INSTRUCTIONS) == [
        "[INST] S\n\nq0[/INST]⟦ a0</s>⟧",
        "[INST] q0[/INST] a0</s>[INST] S\n\nq1[/INST]⟦ a1</s>⟧",
    ]
    assert check_directory("out")["unshown_documents"] == 0


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
    assert ": sound; " in checked.stdout
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
    updated = packer("pack", "data.jsonl", "more.jsonl", "-o", "one", *how, "--update",
                     "--unit-bytes", 3000)  # fmt: skip
    assert updated.exit_code == 0, updated.stderr
    assert check_directory("one")["documents"] == 2 * check_directory("two")["documents"] == 300
    other = packer("pack", "data.jsonl", "more.jsonl", "-o", "one", *how[:-2], "--update",
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
    assert "out: 44 tokens repeated (23.16%): " in made.stderr, made.stderr
    assert "repeated" in packer("stats", "out").stdout


@pytest.mark.parametrize(
    ("record", "options", "parts"),
    [
        ({"text": "Hi"}, EACH, ("--turns: is for conversations; the records' shape is text",)),
        ({"prompt": "a", "completion": "b"}, EACH, ("--turns: is for conversations",)),
        (THOUGHTS, (*EACH, "--train-on", "all"), ("--turns each: --train-on all trains on",)),
        (THOUGHTS, ("--turns", "some"), ("--turns", "some")),
    ],
)
def test_what_it_is_not_for(folder: Path, record: Any, options: Any, parts: Any) -> None:
    assert_error(run([record], *options), 2, *parts)


def test_what_cannot_be_told_is_an_error(folder: Path) -> None:
    record = chat(user("q"), assistant("a", weight=0))
    refused([record], 1, "rearranges", options=EACH, template=REWRITTEN)
