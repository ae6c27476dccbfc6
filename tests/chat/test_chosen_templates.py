"""Which template a conversation takes, what is said of it, and templates that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import (
    CALLS,
    TAGS,
    TWO,
    TWO_MARKED,
    assistant,
    chat,
    chat_tokenizer,
    pack_marked,
    refused,
    run,
    user,
    write,
)
from conversations import TOOLS, Json
from support import packer

# Which template

WITH_CALLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TAGS.replace(
    "{{ m.content }}", "{{ m.content }}" + CALLS
)
NAMED = [{"name": "default", "template": TAGS}, {"name": "tool_use", "template": WITH_CALLS}]


def with_tools() -> Json:
    function = {"name": "rain", "arguments": {"city": "Oslo"}}
    call = assistant("", tool_calls=[{"type": "function", "function": function}])
    return chat(user("Rain?"), call, tools=TOOLS)


@pytest.mark.parametrize("kept", ["in the configuration", "in files"])
def test_conversations_with_tools_take_the_template_for_tools(folder: Path, kept: str) -> None:
    if kept == "in files":  # as transformers saves them now
        tokenizer = chat_tokenizer(folder / "t", None)
        (tokenizer / "chat_template.jinja").write_text(TAGS)
        (tokenizer / "additional_chat_templates").mkdir()
        (tokenizer / "additional_chat_templates/tool_use.jinja").write_text(WITH_CALLS)
    else:
        tokenizer = chat_tokenizer(folder / "t", None, chat_template=NAMED)
    records = [with_tools(), chat(user("Hi"), assistant("Hello"))]
    how: Json = {"template": None, "tokenizer": tokenizer}
    first, second = pack_marked(records, **how)
    call = '<call>{"name": "rain", "arguments": {"city": "Oslo"}}</call>'
    assert first.startswith("<tools>[")
    assert first.endswith(f"<user>Rain?</user><assistant>⟦{call}</assistant>⟧")
    assert second == "<user>Hi</user><assistant>⟦Hello</assistant>⟧"
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["unshown_documents"] == manifest["unshown_tools"] == 0
    assert {"chat_template.jinja", "chat_template.tool_use.jinja"} <= manifest["side_files"].keys()
    assert Path("out/chat_template.tool_use.jinja").read_text() == WITH_CALLS
    checked = packer("verify", "out", "--against-inputs")
    assert checked.exit_code == 0, checked.stdout + checked.stderr
    again = pack_marked(records, template=None, tokenizer=Path("out").rename("earlier"))
    assert again == [first, second]  # what a result keeps does the same


def test_a_template_that_is_named_is_for_all(folder: Path) -> None:
    how: Json = {
        "template": None,
        "tokenizer": chat_tokenizer(folder / "t", None, chat_template=NAMED),
    }
    options = ("--chat-template", "default", "--keep-untrained")
    [text] = pack_marked([with_tools()], *options, **how)
    assert text == "<user>Rain?</user><assistant></assistant>"  # nothing is shown of the call
    assert not Path("out/chat_template.tool_use.jinja").exists()
    result = packer(
        "pack", write([with_tools()]), "-l", 512, "-t", how["tokenizer"], "-o", "out", "--overwrite"
    )
    assert "chat template: the tokenizer's own, tool_use for tools; trained on" in result.stderr


# What is said of it

GENERATION = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}!{% endgeneration %}</s>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def test_which_way_was_taken_is_said(folder: Path) -> None:
    for template, told in ((TAGS, "its turns"), (GENERATION, "its {% generation %} tags")):
        Path("t.jinja").write_text(template)
        options = ["--chat-template", "t.jinja"]
        command = ("pack", write([TWO]), "-l", 512, "-t", "bytes", "-o", "out", "--overwrite")
        result = packer(*command, *options)
        line = f"packer: chat template: t.jinja; trained on: assistant, told by {told}"
        assert line in result.stderr.splitlines()


def test_a_template_that_refuses_every_question(folder: Path) -> None:
    template = TAGS + "{% if messages | length < 3 %}{{ raise_exception('too few') }}{% endif %}"
    result = run([TWO], template=template)
    assert result.exit_code == 1, result.stderr
    assert "refuses a question and its answer" in result.stderr
    assert "tip: use a template that renders them" in result.stderr
    assert not Path("out").exists()


def test_generation_tags_inside_a_macro(folder: Path) -> None:
    template = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    )
    refused([TWO], 2, "does not compile", "{% generation %} inside a macro", template=template)


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
