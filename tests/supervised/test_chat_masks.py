"""Which characters of a conversation are trained on, by templates of every construction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import (
    CHATML,
    REWRITTEN,
    TAGS,
    TWO,
    TWO_MARKED,
    assistant,
    chat,
    chat_tokenizer,
    pack_chat,
    pack_marked,
    refused,
    run,
    system,
    user,
    write,
)
from support import packer

GENERATION = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}!{% endgeneration %}</s>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


# Which characters


def test_generation_tags_say_what_is_trained_on(folder: Path) -> None:
    expected = "<user>Hi<assistant>⟦Hello!⟧</s><user>Bye<assistant>⟦Ciao!⟧</s>"
    assert pack_marked([TWO], template=GENERATION) == [expected]
    last = expected.replace("⟦Hello!⟧", "Hello!")
    assert pack_marked([TWO], "--train-on", "last-assistant", template=GENERATION) == [last]


def test_without_tags_the_header_is_not_trained_and_the_end_is(folder: Path) -> None:
    assert pack_marked([TWO]) == [TWO_MARKED]
    assert pack_marked([chat(user("Hi"), assistant("Hello"))], template=CHATML) == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>\n⟧"
    ]


def test_which_way_was_taken_is_said(folder: Path) -> None:
    for template, told in ((TAGS, "its turns"), (GENERATION, "its {% generation %} tags")):
        Path("t.jinja").write_text(template)
        options = ["--chat-template", "t.jinja"]
        command = ("pack", write([TWO]), "-l", 512, "-t", "bytes", "-o", "out", "--overwrite")
        result = packer(*command, *options)
        line = f"packer: chat template: t.jinja; trained on: assistant, told by {told}"
        assert line in result.stderr.splitlines()


def test_train_on(folder: Path) -> None:
    [last] = pack_marked([TWO], "--train-on", "last-assistant")
    assert last == TWO_MARKED.replace("⟦Hello</assistant>⟧", "Hello</assistant>")
    [everything] = pack_marked([TWO], "--train-on", "all")
    plain = TWO_MARKED.replace("⟦", "").replace("⟧", "")
    assert everything == f"<⟦{plain[1:]}⟧"


def test_the_last_assistant_need_not_be_the_last_message(folder: Path) -> None:
    record = chat(assistant("A"), user("B"), assistant("C"), user("D"))
    [text] = pack_marked([record], "--train-on", "last-assistant")
    assert text == (
        "<assistant>A</assistant><user>B</user><assistant>⟦C</assistant>⟧<user>D</user>"
    )


@pytest.mark.parametrize(
    "flags", [{"weight": 0}, {"train": False}, {"train": 0}, {"weight": 0.0}, {"weight": False}]
)
@pytest.mark.parametrize("template", [TAGS, GENERATION])
def test_messages_that_are_not_to_be_trained_on(
    folder: Path, flags: dict[str, Any], template: str
) -> None:
    record = chat(user("Hi"), assistant("Hello", **flags), user("Bye"), assistant("Ciao"))
    [text] = pack_marked([record], template=template)
    assert "⟦Hello" not in text
    assert "⟦Ciao" in text
    assert text.count("⟦") == 1


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        ({"weight": 1}, True),
        ({"train": True}, True),
        ({"weight": 1, "train": False}, False),
        ({"weight": 0, "train": True}, False),
        ({"weight": None}, True),
    ],
)
def test_weight_and_train_together(folder: Path, flags: dict[str, Any], trained: bool) -> None:
    record = chat(user("Hi"), assistant("Hello", **flags), user("Bye"), assistant("Ciao"))
    assert ("⟦Hello" in pack_marked([record])[0]) == trained


def test_weights_of_others_do_not_make_them_trained(folder: Path) -> None:
    record = chat(system("S"), user("Hi", weight=1), assistant("Hello"))
    assert pack_marked([record]) == [
        "<system>S</system><user>Hi</user><assistant>⟦Hello</assistant>⟧"
    ]


def test_the_last_of_the_assistant_without_weight(folder: Path) -> None:
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao", weight=0))
    manifest = pack_chat([record], "--train-on", "last-assistant", "--keep-untrained")
    assert manifest["trained_tokens"] == 0


def test_a_system_message_that_the_template_puts_first(folder: Path) -> None:
    """As llama and gemma do: the rest of the loop has another list."""
    template = (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
        "{% endif %}{% for m in rest %}{% if loop.first %}[{{ first }}]{% endif %}"
        "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    record = chat(system("S"), user("Hi"), assistant("Hello"), user("X"), assistant("Y", weight=0))
    assert pack_marked([record], template=template) == [
        "[S]<user>Hi</user><assistant>⟦Hello</assistant>⟧<user>X</user><assistant>Y</assistant>"
    ]


def test_an_answer_that_looks_like_the_template(folder: Path) -> None:
    record = chat(user("Say <assistant> twice"), assistant("<assistant><assistant></assistant>"))
    assert pack_marked([record]) == [
        "<user>Say <assistant> twice</user>"
        "<assistant>⟦<assistant><assistant></assistant></assistant>⟧"
    ]


def test_an_empty_answer_still_teaches_to_stop(folder: Path) -> None:
    record = chat(user("Hi"), assistant(""))
    assert pack_marked([record]) == ["<user>Hi</user><assistant>⟦</assistant>⟧"]


def test_multi_byte_characters_everywhere(folder: Path) -> None:
    record = chat(user("naïve 👍🏽"), assistant("日本語 café"), user("é"), assistant("ß"))
    expected = (
        "<user>naïve 👍🏽</user><assistant>⟦日本語 café</assistant>⟧"
        "<user>é</user><assistant>⟦ß</assistant>⟧"
    )
    assert pack_marked([record]) == [expected]
    tokenizer = chat_tokenizer(folder / "t", TAGS)
    assert pack_marked([record], template=None, tokenizer=tokenizer) == [expected]


# Templates that make it hard

MACRO = (
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LOOP_IN_MACRO = (
    "{% macro all(list) %}{% for m in list %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
    "{% endfor %}{% endmacro %}{{ all(messages) }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BY_NUMBER = (
    "{% for i in range(messages | length) %}<{{ messages[i].role }}>{{ messages[i].content }}"
    "</{{ messages[i].role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


UNSEEN = BY_NUMBER.replace("messages[i]", "messages[i + 0]")  # no loop shows the turns


@pytest.mark.parametrize("template", [MACRO, LOOP_IN_MACRO, BY_NUMBER, UNSEEN])
def test_macros_and_prefixes(folder: Path, template: str) -> None:
    """A loop that calls a macro is a loop; where there is none to see, prefixes are compared."""
    assert pack_marked([TWO], template=template) == [TWO_MARKED]
    weighted = chat(user("Hi"), assistant("Hello", weight=0), user("Bye"), assistant("Ciao"))
    silent = TWO_MARKED.replace("⟦Hello</assistant>⟧", "Hello</assistant>")
    assert pack_marked([weighted], template=template) == [silent]
    assert pack_marked([TWO], "--train-on", "last-assistant", template=template) == [silent]


def test_messages_that_the_template_rewrites(folder: Path) -> None:
    upper = TWO_MARKED.replace("Hello", "HELLO").replace("Ciao", "CIAO")
    upper = upper.replace("Hi", "HI").replace("Bye", "BYE")
    assert pack_marked([TWO], template=REWRITTEN) == [upper]


def test_weights_and_a_template_that_rearranges_messages(folder: Path) -> None:
    record = chat(user("Hi"), assistant("Hello", weight=0), user("Bye"), assistant("Ciao"))
    refused(
        [TWO, record], 1, "data.jsonl, line 2 (byte ", "messages have weights", "rearranges",
        template=REWRITTEN,
    )  # fmt: skip
    assert pack_chat([record], "--train-on", "all", template=REWRITTEN)["documents"] == 1


UNDECIDABLE = {
    "earlier turns change": (
        LOOP_IN_MACRO.replace("{{ m.content }}", "{{ m.content }}{{ list | length }}"),
        "renders messages differently later on",
    ),
    "no trace": (
        LOOP_IN_MACRO.replace("<{{ m.role }}>", "").replace("</{{ m.role }}>", "")
        .replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}")
        .replace("<assistant>", ""),
        "leaves no trace",
    ),
    "reversed": (
        "{% for i in range(messages | length) %}{{ messages[-1 - i].content }}{% endfor %}",
        "renders messages differently later on",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDECIDABLE)
def test_what_cannot_be_decided_ends_the_run_or_is_rejected(folder: Path, name: str) -> None:
    template, why = UNDECIDABLE[name]
    record = json.dumps(chat(user("Hi")))
    Path("data.jsonl").write_text(f"{record}\n{json.dumps(TWO)}\n")
    told = "cannot tell which part of the text is the assistant's"
    place = f"data.jsonl, line 2 (byte {len(record) + 1})"
    refused(Path("data.jsonl"), 1, place, told, why, template=template)
    options = ["--on-error", "skip", "--keep-untrained"]
    manifest = pack_chat(Path("data.jsonl"), *options, template=template)
    assert (manifest["documents"], manifest["rejected_records"]) == (1, 1)
    [rejected] = map(json.loads, Path("out/rejected.jsonl").read_text().splitlines())
    assert rejected["position"] == len(record) + 1
    assert told in rejected["reason"]
    assert why in rejected["reason"]


def test_a_template_that_refuses_every_question(folder: Path) -> None:
    template = TAGS + "{% if messages | length < 3 %}{{ raise_exception('too few') }}{% endif %}"
    result = run([TWO], template=template)
    assert result.exit_code == 1, result.stderr
    assert "refuses a question and its answer" in result.stderr
    assert "tip: use a template that renders them" in result.stderr
    assert not Path("out").exists()


RESULTS_INSIDE = (  # results of tools, in the turn of the assistant that called them
    "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}"
    "{% for t in messages[loop.index:] %}{% if t.role != 'tool' %}{% break %}{% endif %}"
    "[{{ t.content }}]{% endfor %}</{{ m.role }}>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_results_of_tools_inside_a_turn_are_not_trained_on(folder: Path) -> None:
    tool = {"role": "tool", "content": "sunny"}
    record = chat(user("Rain?"), assistant("look"), tool, assistant("No."))
    assert pack_marked([record], template=RESULTS_INSIDE) == [
        "<user>Rain?</user><assistant>⟦look⟧[sunny]</assistant><assistant>⟦No.</assistant>⟧"
    ]
    assert pack_marked([TWO], template=RESULTS_INSIDE) == [TWO_MARKED]


def test_the_last_of_tags_that_no_loop_shows(folder: Path) -> None:
    tagged = (
        "{% for i in range(messages | length) %}{% set m = messages[i + 0] %}<{{ m.role }}>"
        "{% if m.role == 'user' or m.name %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    record = chat(*TWO["messages"][:-1], assistant("Ciao", name="untagged"))
    options = ["--train-on", "last-assistant"]
    refused([record], 1, "line 1", "which of its tags", template=tagged, options=options)
    [text] = pack_marked([TWO], *options, template=tagged)
    assert text == "<user>Hi<assistant>Hello<user>Bye<assistant>⟦Ciao⟧"


def test_generation_tags_inside_a_macro(folder: Path) -> None:
    template = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    )
    refused([TWO], 2, "does not compile", "{% generation %} inside a macro", template=template)


def test_a_template_cannot_reach_out_of_its_sandbox(folder: Path) -> None:
    template = TAGS + "{{ ''.__class__.__mro__ }}"
    refused([TWO], 1, template=template)


def test_the_date_is_always_the_same(folder: Path) -> None:
    [text] = pack_marked([TWO], template="{{ strftime_now('%d %b %Y') }}" + TAGS)
    assert text == "01 Jan 2024" + TWO_MARKED


def test_the_template_of_the_tokenizer(folder: Path) -> None:
    named = [
        {"name": "default", "template": TAGS},
        {"name": "loud", "template": TAGS.replace("m.content", "m.content | upper")},
    ]
    tokenizer = chat_tokenizer(folder / "named", None, chat_template=named)
    how = {"template": None, "tokenizer": tokenizer}
    assert pack_marked([TWO], **how) == [TWO_MARKED]
    assert "⟦HELLO" in pack_marked([TWO], "--chat-template", "loud", **how)[0]
    broken = chat_tokenizer(folder / "broken", None, chat_template=[{**named[0], "template": 5}])
    assert "the tokenizer has none" in run([TWO], template=None, tokenizer=broken).stderr
    no_default = chat_tokenizer(folder / "several", None, chat_template=named[1:] * 2)
    result = run([TWO], template=None, tokenizer=no_default)
    assert result.exit_code == 2
    assert "several chat templates: loud" in result.stderr
    (no_default / "chat_template.jinja").write_text(TAGS)  # wins over the configuration
    assert pack_marked([TWO], template=None, tokenizer=no_default) == [TWO_MARKED]
    assert Path("out/chat_template.jinja").read_text() == TAGS
