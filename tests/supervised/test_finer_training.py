"""What of the assistant is trained on: without reasoning, without calls, final answers, flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import (
    CALL,
    CALLS,
    RESULT,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    marked_pieces,
    pack_chat,
    pack_marked,
    refused,
    run,
    system,
    user,
    write,
)
from support import assert_error, check_directory, packer

CALLED = '<call>{"name": "rain", "arguments": {"city": "Oslo"}}</call>'
THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content | trim }}" + CALLS + "</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Qwen 3: an empty thought where there is none.
ALWAYS_THINKS = THINKS.replace(
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}",
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}",
)
# As gpt-oss: a turn of its own for the thought.
CHANNELS = (
    "{% for m in messages %}{% if m.reasoning_content %}<|start|>{{ m.role }}<|channel|>analysis"
    "<|message|>{{ m.reasoning_content }}<|end|>{% endif %}<|start|>{{ m.role }}<|channel|>final"
    "<|message|>{{ m.content }}<|return|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
WITHOUT = "--no-train-reasoning"


def one(record: Any, *options: Any, template: str = THINKS) -> str:
    """The text of the answers, from the first of them on."""
    [text] = pack_marked([record], *options, template=template)
    return text[text.index("assistant") - 1 :]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (THINKS, "<assistant><think>hm</think>⟦Yes</assistant>⟧"),
        (ALWAYS_THINKS, "<assistant>⟦<think>\n⟧hm\n⟦</think>\n\nYes</assistant>⟧"),
        (TAGS, "<assistant>⟦Yes</assistant>⟧"),
    ],
)
def test_without_reasoning(folder: Path, template: str, text: str) -> None:
    record = chat(user("Hi"), assistant("Yes", thinking="hm"))
    assert one(record, WITHOUT, template=template) == text
    masked = text.replace("<assistant>", "", 1).replace("⟦", "⟧").split("⟧")[::2]
    assert check_directory("out")["masked_tokens"] == len("".join(masked))
    assert one(record, template=template).replace("⟦", "").replace("⟧", "") == text.replace(
        "⟦", ""
    ).replace("⟧", "")


def test_reasoning_in_a_turn_of_its_own(folder: Path) -> None:
    record = chat(user("q2"), assistant("a", thinking="thought 2"))
    [text] = pack_marked([record], WITHOUT, template=CHANNELS)
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>thought 2<|end|>⟦<|start|>assistant"
        "<|channel|>final<|message|>a<|return|>⟧"
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("<think>hm</think>Yes", "<think>hm</think>⟦Yes</assistant>⟧"),
        ("<think>\nhm\n</think>\n\nYes", "<think>\nhm\n</think>\n\n⟦Yes</assistant>⟧"),
        ("hm</think>Yes", "hm</think>⟦Yes</assistant>⟧"),
        ("Well. <think>hm</think>Yes", "⟦Well. ⟧<think>hm</think>⟦Yes</assistant>⟧"),
        ("Yes", "⟦Yes</assistant>⟧"),
        ("Yes, Yes <think>Yes</think>Yes", "⟦Yes, Yes ⟧<think>Yes</think>⟦Yes</assistant>⟧"),
    ],
)
def test_thoughts_in_the_content(folder: Path, content: str, text: str) -> None:
    assert one(chat(user("Hi"), assistant(content)), WITHOUT) == f"<assistant>{text}"


@pytest.mark.parametrize(
    ("answer", "thought"),
    [("The end", "The start"), ("hm hm", "hm"), ("a\n</b>", "a</b"), ("[1] y", "[1] x")],
)
def test_reasoning_that_begins_as_the_answer_does(folder: Path, answer: str, thought: str) -> None:
    """Where the prompt for an answer begins the thought, and a turn without one has no tags."""
    template = THINKS.replace("<think>", "<think>\n").replace("</think>", "\n</think>\n\n")
    template = template.replace("<assistant>{% endif", "<assistant><think>\n{% endif")
    record = chat(user("Hi"), assistant(answer, thinking=thought), user("So?"), assistant("Yes"))
    [text] = pack_marked([record], WITHOUT, template=template)
    assert f"{thought}\n</think>\n\n⟦{answer}</assistant>⟧" in text
    assert text.endswith("<assistant>⟦Yes</assistant>⟧")


def test_a_turn_of_nothing_else_is_not_trained_on(folder: Path) -> None:
    record = chat(user("Hi"), assistant("", thinking="hm"), user("So?"), assistant("Yes"))
    assert one(record, WITHOUT) == (
        "<assistant><think>hm</think></assistant><user>So?</user><assistant>⟦Yes</assistant>⟧"
    )
    assert check_directory("out")["trained_turns"] == 1


def test_without_tool_calls(folder: Path) -> None:
    record = chat(
        user("Rain?"), assistant("Look", tool_calls=[CALL]), RESULT,
        assistant("", thinking="hm", tool_calls=[CALL, CALL]), RESULT, RESULT,
        assistant("", tool_calls=[CALL]), RESULT, assistant("Yes"),
    )  # fmt: skip
    tool = "<tool>wet</tool>"
    assert one(record, "--no-train-tool-calls") == (
        f"<assistant>⟦Look⟧{CALLED}⟦</assistant>⟧{tool}"
        f"<assistant>⟦<think>hm</think>⟧{CALLED}{CALLED}⟦</assistant>⟧{tool}{tool}"
        f"<assistant>{CALLED}</assistant>{tool}<assistant>⟦Yes</assistant>⟧"
    )
    assert check_directory("out")["trained_turns"] == 3
    assert one(record, "--no-train-tool-calls", WITHOUT) == (
        f"<assistant>⟦Look⟧{CALLED}⟦</assistant>⟧{tool}"
        f"<assistant><think>hm</think>{CALLED}{CALLED}</assistant>{tool}{tool}"
        f"<assistant>{CALLED}</assistant>{tool}<assistant>⟦Yes</assistant>⟧"
    )


def test_only_final_answers(folder: Path) -> None:
    record = chat(
        user("Rain?"), assistant("Look", tool_calls=[CALL]), RESULT,
        assistant("Yes", thinking="hm"), user("So?"), assistant("One"), assistant("Two"),
    )  # fmt: skip
    before = f"<assistant>Look{CALLED}</assistant><tool>wet</tool><assistant>"
    after = "</assistant>⟧<user>So?</user><assistant>One</assistant><assistant>⟦Two</assistant>⟧"
    assert one(record, "--train-on", "final") == f"{before}<think>hm</think>⟦Yes{after}"
    with_it = one(record, "--train-on", "final", "--train-reasoning")
    assert with_it == f"{before}⟦<think>hm</think>Yes{after}"


def test_a_template_that_changes_more_is_an_error(folder: Path) -> None:
    template = THINKS.replace(
        "{{ m.content | trim }}", "{{ m.content | upper if m.reasoning_content else m.content }}"
    )
    refused(
        [chat(user("Hi"), assistant("Yes", thinking="hm"))], 1, "data.jsonl, line 1 (byte 0)",
        "the reasoning of message 1 change more", options=[WITHOUT], template=template,
    )  # fmt: skip


FLAGS = ({"weight": 0}, {"train": False}, {"training": 0}, {"loss": False}, {"loss_weight": 0.0},
         {"masking": True}, {"masked": 1}, {"train_detail": []})  # fmt: skip
YES = ({"weight": 1.0}, {"train": True}, {"loss": True}, {"masking": 0}, {"masked": False},
       {"weight": None})  # fmt: skip


@pytest.mark.parametrize("flag", [*FLAGS, *YES])
def test_flags_of_messages(folder: Path, flag: Any) -> None:
    record = chat(user("Hi", **flag), assistant("Yes", **flag), user("So"), assistant("Ok"))
    first = "Yes</assistant>" if flag in FLAGS else "⟦Yes</assistant>⟧"
    assert one(record) == f"<assistant>{first}<user>So</user><assistant>⟦Ok</assistant>⟧"
    manifest = check_directory("out")
    assert manifest["masked_documents"] == (flag in FLAGS)
    assert manifest["masked_tokens"] == (15 if flag in FLAGS else 0)
    assert "unread" not in manifest


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ({"weight": 0.5}, "messages[1].weight is 0.5, expected 0 or 1"),
        ({"loss": "no"}, "messages[1].loss is 'no', expected 0 or 1"),
        ({"masking": [1]}, "messages[1].masking is [1], expected 0 or 1"),
        ({"train_detail": {}}, "messages[1].train_detail is dict, expected a list of ranges"),
        ({"train_detail": [3]}, "messages[1].train_detail[0] is 3, expected begin_offset, end_"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": True}]},
         "train_detail[0] is of the characters 0 to 3, expected some of the 3 of the content"),
        ({"train_detail": [{"begin_offset": 2, "end_offset": 1, "train": True}]},
         "train_detail[0] is of the characters 2 to 1"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": 2}]}, "and train, 0 or 1"),
        ({"content": [{"type": "text", "text": "Yes", "weight": 3}]},
         "messages[1].content[0].weight is 3, expected 0 or 1"),
    ],
)  # fmt: skip
def test_flags_that_say_nothing(folder: Path, flag: Any, problem: str) -> None:
    refused([chat(user("Hi"), assistant("Yes") | flag)], 1, "line 1 (byte 0)", problem)


def detail(*ranges: tuple[int, int, Any]) -> dict[str, Any]:
    names = ("begin_offset", "end_offset", "train")
    return {"train_detail": [dict(zip(names, own, strict=True)) for own in ranges]}


@pytest.mark.parametrize(
    ("content", "ranges", "text"),
    [
        ("abcdef", [(0, 1, True), (2, 3, False), (4, 5, 1)], "⟦ab⟧cd⟦ef</assistant>⟧"),
        ("abcdef", [(1, 2, True)], "a⟦bc⟧def⟦</assistant>⟧"),
        ("abcdef", [(0, 5, True)], "⟦abcdef</assistant>⟧"),
        ("abcdef", [(0, 5, False)], "abcdef⟦</assistant>⟧"),
        ("abcdef", [(0, 5, True), (2, 2, False)], "⟦ab⟧c⟦def</assistant>⟧"),
        ("  ab cd  ", [(0, 4, False), (5, 8, True)], "ab ⟦cd</assistant>⟧"),
        ("  ab cd  ", [(0, 4, True), (5, 8, False)], "⟦ab ⟧cd⟦</assistant>⟧"),
        ("ä€😀z", [(0, 1, False), (2, 3, True)], "ä€⟦😀z</assistant>⟧"),
    ],
)
def test_ranges_of_the_content(folder: Path, content: str, ranges: Any, text: str) -> None:
    record = chat(user("Hi"), assistant(content, **detail(*ranges)))
    assert one(record) == f"<assistant>{text}"
    assert one(record, "--template-engine", "jinja2") == f"<assistant>{text}"


def test_ranges_beside_special_tokens_that_are_text(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", TAGS)
    record = chat(user("q"), assistant("a<|im_end|>bcd", **detail((0, 0, True), (12, 12, True))))
    how = ("--special-tokens-in-text", "text")
    [text] = pack_marked([record], *how, template=None, tokenizer=tokenizer)
    assert text.endswith("<assistant>⟦a⟧<|im_end|>b⟦c⟧d⟦</assistant>⟧")
    assert check_directory("out")["special_tokens_in_text"] == 1


def test_white_space_that_the_template_shows(folder: Path) -> None:
    template = THINKS.replace(" | trim", "")
    record = chat(user("Hi"), assistant("  ab  ", **detail((0, 2, False), (3, 5, True))))
    assert one(record, template=template) == "<assistant>  a⟦b  </assistant>⟧"
    record = chat(user("Hi"), assistant("  ab  ", **detail((0, 2, True), (3, 5, False))))
    assert one(record, template=template) == "<assistant>⟦  a⟧b  ⟦</assistant>⟧"


def test_flags_of_parts(folder: Path) -> None:
    parts = [{"type": "text", "text": "on "}, {"type": "text", "text": "off", "weight": 0},
             {"type": "text", "text": " on", "train": True}]  # fmt: skip
    as_parts = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}</{{ m.role }}>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    for template in (TAGS, as_parts):
        text = one(chat(user("Hi"), assistant(parts)), template=template)
        assert text == "<assistant>⟦on ⟧off⟦ on</assistant>⟧"


def test_a_template_that_looks_into_the_content(folder: Path) -> None:
    record = chat(user("Hi"), assistant("abcdef", **detail((0, 2, True))))
    for way in ("{{ m.content }} {{ m.content | length }}", "{{ m.content }}{{ m.content }}"):
        template = TAGS.replace("{{ m.content }}", way)
        refused([record], 1, "not to be trained on: the template ", template=template)


def test_content_that_is_not_shown(folder: Path) -> None:
    template = TAGS.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% endif %}.")
    first = assistant("abc", **detail((0, 0, True)))
    record = chat(user("Hi"), first, user("So"), assistant("def", **detail((0, 0, True))))
    [text] = pack_marked([record], template=template)
    assert text.endswith("<assistant>d⟧ef⟦.</assistant>⟧".replace("<assistant>d", "<assistant>⟦d"))


def test_dialects_and_parquet(folder: Path) -> None:
    talk = [
        {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "abc", **detail((0, 0, 1))},
        {"from": "human", "value": "So"}, {"from": "gpt", "value": "def", "weight": 0},
    ]  # fmt: skip
    expected = "<assistant>⟦a⟧bc⟦</assistant>⟧<user>So</user><assistant>def</assistant>"
    assert one({"conversations": talk}) == expected
    roles = {"human": "user", "gpt": "assistant"}
    same = [
        {"role": roles[m["from"]], "content": m["value"]}
        | {name: m.get(name) for name in ("train_detail", "weight")}
        for m in talk
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": same}]), "data.parquet")
    Path("t.jinja").write_text(THINKS)
    made = packer("pack", "data.parquet", "-o", "out", "-l", 256, "-t", "bytes", "--overwrite",
                  "--chat-template", "t.jinja")  # fmt: skip
    assert made.exit_code == 0, made.stderr
    assert marked_pieces("out")[0].endswith(expected)


def test_the_prompts_of_completions_are_not_counted(folder: Path) -> None:
    record = {"prompt": [user("Hi"), assistant("Yes"), user("So")],
              "completion": [assistant("Ok", thinking="hm")]}  # fmt: skip
    assert one(record, WITHOUT) == (
        "<assistant>Yes</assistant><user>So</user><assistant><think>hm</think>⟦Ok</assistant>⟧"
    )
    assert check_directory("out")["masked_tokens"] == len("<think>hm</think>")


def test_tokens_verify_tokenize_and_stats(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", THINKS)
    records = [
        chat(system("S"), user("Hi"),
             assistant("Well, yes", thinking="hm hm", **detail((0, 3, 1)))),
        chat(user("Hi"), assistant("Look", tool_calls=[CALL]), RESULT,
             assistant("Yes", loss=False)),
    ]  # fmt: skip
    options = (WITHOUT, "--no-train-tool-calls")
    pack_chat(records * 20, *options, template=None, tokenizer=tokenizer)
    for sample in ("all", "3"):
        checked = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert checked.exit_code == 0, checked.stdout
    write(records * 20)
    made = packer("tokenize", "data.jsonl", "-o", "tokens", "-t", tokenizer, *options)
    assert made.exit_code == 0, made.stderr
    checked = packer("verify", "tokens", "--against-inputs")
    assert checked.exit_code == 0, checked.stdout
    assert "masked" in packer("stats", "tokens").stdout
    assert packer("pack", "tokens", "-o", "again", "-l", 2048).exit_code == 0
    assert check_directory("again")["trained_tokens"] == check_directory("out")["trained_tokens"]


@pytest.mark.parametrize("option", [WITHOUT, "--train-reasoning", "--no-train-tool-calls"])
def test_what_they_are_not_for(folder: Path, option: str) -> None:
    record = chat(user("Hi"), assistant("Yes"))
    assert_error(run([record], option, "--train-on", "all"), 2, option, "--train-on all")
    assert_error(run([{"text": "Hi"}], option), 2, f"{option}: is for messages")


def test_recipes_have_the_keys(folder: Path) -> None:
    write([chat(user("Hi"), assistant("Yes", thinking="hm"))])
    Path("t.jinja").write_text(THINKS)
    Path("r.toml").write_text(
        'max_length = 256\ntokenizer = "bytes"\noutput = "out"\nchat_template = "t.jinja"\n'
        'turns = "each"\ntrain_reasoning = false\ntrain_tool_calls = true\n'
        'tokenized = "tokens"\n[[source]]\nname = "a"\ninputs = ["data.jsonl"]\nweight = 1\n'
    )
    made = packer("pack", "r.toml")
    assert made.exit_code == 0, made.stderr
    [manifest] = Path("tokens").rglob("manifest.json")
    config = json.loads(manifest.read_text())["config"]
    names = ("turns", "train_reasoning", "train_tool_calls")
    assert [config[name] for name in names] == ["each", False, True]


def test_nulls_in_parts_say_nothing(folder: Path) -> None:
    """Rows of Parquet have every field in every part, if any part has it."""
    parts = [
        {"type": "text", "text": "a", "train": None, "weight": None},
        {"type": "text", "text": "b", "train": False, "weight": None},
        {"type": "text", "text": "c", "train": None, "weight": 0},
        {"type": "text", "text": "d", "train": True, "weight": None},
    ]
    record = chat(user([{"type": "text", "text": "Hi"}]), assistant(parts))
    pq.write_table(pa.Table.from_pylist([record]), "data.parquet")
    for data in ([record], Path("data.parquet")):
        [text] = pack_marked(data, template=THINKS)
        assert text.endswith("<assistant>⟦a⟧bc⟦d</assistant>⟧")
        assert check_directory("out")["masked_tokens"] == 2
