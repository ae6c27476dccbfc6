"""Which template a conversation takes, what is said of it, what is refused, and where turns end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import (
    CALLS,
    PROMPT,
    TAGS,
    TWO,
    TWO_MARKED,
    assistant,
    chat,
    chat_tokenizer,
    marked,
    pack_chat,
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


MARK = "\ufeff"


@pytest.mark.parametrize("where", ["beside", "named", "marked", "config"])
def test_the_template_of_a_json_file(folder: Path, where: str) -> None:
    """`chat_template.json` is what processors save; byte order marks are no part of a template."""
    tokenizer = chat_tokenizer(folder / "t", TAGS if where == "marked" else None)
    files = {"beside": tokenizer / "chat_template.json", "marked": tokenizer / "own.jinja"}
    content = TAGS if where == "marked" else json.dumps({"chat_template": TAGS})
    path = files.get(where, folder / "model.json")
    path.write_text(MARK * (where != "named") + content)
    options = () if where == "beside" else ("--chat-template", path)
    [text] = pack_marked(
        [chat(user("a"), assistant("b"))], *options, template=None, tokenizer=tokenizer
    )
    assert text == "<user>a</user><assistant>⟦b</assistant>⟧"
    assert Path("out/chat_template.jinja").read_text() == TAGS


def test_a_json_file_without_a_template(folder: Path) -> None:
    (folder / "model.json").write_text('{"chat_templates": {}}')
    message = "model.json is JSON without a 'chat_template'"
    options = ("--chat-template", "model.json")
    refused([chat(user("a"), assistant("b"))], 2, message, options=options)


def test_a_template_that_is_named_is_for_all(folder: Path) -> None:
    how: Json = {
        "template": None,
        "tokenizer": chat_tokenizer(folder / "t", None, chat_template=NAMED),
    }
    options = ("--chat-template", "default")
    [text] = pack_marked([with_tools(), chat(user("a"), assistant("b"))], *options, **how)
    assert text == "<user>a</user><assistant>⟦b</assistant>⟧"  # nothing is shown of the call
    assert not Path("out/chat_template.tool_use.jinja").exists()
    result = packer(
        "pack", write([with_tools()]), "-l", 512, "-t", how["tokenizer"], "-o", "out", "--overwrite"
    )
    assert "chat template: the tokenizer's own, tool_use for tools; trained on" in result.stderr


# What is said of it


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


# Where turns end: in tokens that are named, in nothing, or where the next turn begins


OPEN = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + PROMPT


def test_turns_that_end_in_nothing(folder: Path) -> None:
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    result = run([record], **how)
    assert result.exit_code == 2
    assert "does not end the assistant's turn, where another turn follows" in result.stderr
    assert "--turn-end TOKEN" in result.stderr
    assert "--allow-open-turns" in result.stderr
    assert pack_chat([record], "--train-on", "all", **how)["documents"] == 1
    manifest = pack_chat([record], "--allow-open-turns", **how)
    assert (manifest["trained_turns"], manifest["turns_without_end"]) == (2, 2)
    [text] = marked("out")
    assert text == "<|user|>\nHi<|assistant|>⟦\nHello⟧<|user|>\nBye<|assistant|>⟦\nCiao⟧"


def test_the_token_that_ends_turns_can_be_named(folder: Path) -> None:
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    manifest = pack_chat([record], "--turn-end", "<|user|>", **how)
    [text] = marked("out")
    assert text == ("<|user|>\nHi<|assistant|>⟦\nHello<|user|>⟧\nBye<|assistant|>⟦\nCiao<|user|>⟧")
    assert (manifest["trained_turns"], manifest["turns_without_end"]) == (2, 0)
    assert manifest["config"]["turn_end"] == ["<|user|>"]
    assert run([record], "--turn-end", "", **how).exit_code == 2
    assert run([record], "--turn-end", "x", "--train-on", "all", **how).exit_code == 2


@pytest.mark.parametrize("end", ["<|im_start|>", "<|im_end|>"])
def test_a_named_token_that_follows_no_turn_is_an_error(folder: Path, end: str) -> None:
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"))
    parts = (
        f"--turn-end: {end} does not follow the assistant's turn",
        "where another turn follows",
    )
    refused([record], 2, *parts, options=["--turn-end", end], **how)
    assert pack_chat([record], "--turn-end", end, "--allow-open-turns", **how)["documents"] == 1


def test_a_named_end_that_is_no_token_is_a_warning(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", None)
    record = chat(user("Hi"), assistant("Hello"))
    template = OPEN.replace("<|{{ m.role }}|>", "<|im_{{ 'start' if m.role == 'user' else 'x' }}|>")
    for end, warned in (("<|im_start|>", False), ("<|im_st", True)):
        result = run([record], "--turn-end", end, template=template, tokenizer=tokenizer)
        assert result.exit_code == 0, result.stderr
        assert ("is not a token of its own" in result.stderr) == warned


def test_prompts_through_a_template_have_ends_of_turns_too(folder: Path) -> None:
    record = {"prompt": "Hi", "completion": "Hello"}
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    assert run([record], "--prompt-template", "chat", **how).exit_code == 2
    options = ["--prompt-template", "chat", "--turn-end", "<|user|>"]
    expected = "<|user|>\nHi<|assistant|>⟦\nHello<|user|>⟧"
    assert pack_marked([record], *options, **how) == [expected]
    Path("out").rename("kept")
    refused(
        [record], 2, "--turn-end applies only to records", options=["--turn-end", "<|user|>"], **how
    )


def test_a_special_token_that_the_template_needs(folder: Path) -> None:
    record = chat(user("Hi"), assistant("Hello"))
    for options in ([], ["--train-on", "all"]):
        parts = ("the chat template needs bos_token, and the tokenizer names none",)
        refused([record], 2, *parts, options=options, template="{{ bos_token + '' }}" + TAGS)


def test_a_last_turn_without_an_end(folder: Path) -> None:
    template = TAGS.replace("</{{ m.role }}>", "{% if not loop.last %}</{{ m.role }}>{% endif %}")
    how: Json = {"template": template, "tokenizer": chat_tokenizer(folder / "t", None)}
    result = run([chat(user("Hi"), assistant("Hello"))], **how)
    assert result.exit_code == 2
    assert "turn, the last one" in result.stderr


def test_ends_are_found_behind_white_space(folder: Path) -> None:
    """Which is learned, too: it is written before the end."""
    how: Json = {"tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    between = OPEN.replace("{% endfor %}", "{{ '' if loop.last else '\\n' }}{% endfor %}", 1)
    expected = "<|user|>\nHi\n<|assistant|>⟦\nHello\n<|user|>⟧\nBye\n<|assistant|>⟦\nCiao<|user|>⟧"
    assert pack_marked([record], "--turn-end", "<|user|>", template=between, **how) == [expected]
