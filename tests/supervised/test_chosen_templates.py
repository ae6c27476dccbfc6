"""Which template a conversation takes, which of its tokens count, and what it tells of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import (
    CALLS,
    PROMPT,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    pack_chat,
    pack_marked,
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


# Tokens


@pytest.mark.parametrize("options", [(), ("--strategy", "wrap")])
def test_a_record_whose_only_trained_token_is_its_first(
    folder: Path, options: tuple[str, ...]
) -> None:
    first = {"input_ids": [72, 105, 33], "labels": [72, -100, -100]}
    second = {"input_ids": [72, 105, 33], "labels": [72, 105, -100]}
    manifest = pack_chat([first, second], *options, template=None)
    assert (manifest["documents"], manifest["untrained_documents"]) == (1, 1)
    assert manifest["trained_tokens"] == 1
    assert pack_chat([first, second], *options, "--keep-untrained", template=None)["documents"] == 2


def test_a_prompt_that_ends_every_text_is_no_end_of_a_turn(folder: Path) -> None:
    """Command A: what no prompt holds is learned, and what the next turn begins with is not."""
    template = (
        "{% for m in messages %}<|turn|><|{{ m.role }}|>"
        "{% if m.role == 'assistant' %}<|says|>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "<|turn|><|assistant|>"
    )
    talk = chat(user("a"), assistant("b"), user("c"), assistant("d"))
    (text,) = pack_marked([talk], template=template)
    turns = "<|turn|><|user|>{}<|end|><|turn|><|assistant|>⟦<|says|>{}<|end|>⟧"
    assert text == turns.format("a", "b") + turns.format("c", "d") + "<|turn|><|assistant|>"


# What one conversation teaches is no verdict on others

RESULTS_ARE_OBJECTS = (
    "{% for m in messages %}{% if m.role == 'tool' and '{' not in m.content %}"
    "{{ raise_exception('no object') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + PROMPT
)
RESULTS_IN_TAGS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% if not loop.last and messages[loop.index].role == 'tool' %}"
    "{{ messages[loop.index].content }}{% endif %}<|end|>{% endgeneration %}"
    "{% elif m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [RESULTS_ARE_OBJECTS, RESULTS_IN_TAGS])
@pytest.mark.parametrize("last", [False, True])
def test_a_conversation_of_which_nothing_can_be_told_says_nothing_of_others(
    folder: Path, template: str, last: bool
) -> None:
    """Else what is rejected would depend on the order of records, and on that of threads."""
    good = chat(user("a"), assistant("b"), user("c"), assistant("d"))
    bad = chat(*good["messages"], {"role": "tool", "content": "{}"})
    records = [good, bad] if last else [bad, good]
    manifest = pack_chat(records, "--on-error", "skip", template=template)
    assert (manifest["documents"], manifest["rejected_records"]) == (1, 1)


@pytest.mark.parametrize("name", ["thinking", "reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("reasoning", "shown"), [("", "<think></think>b"), ("x", "<think>x</think>b"), (None, "b")]
)
def test_empty_reasoning_is_reasoning(
    folder: Path, name: str, reasoning: str | None, shown: str
) -> None:
    """As in transformers, where every template finds it under either name, and null is none."""
    for read in ("thinking", "reasoning_content"):
        template = TAGS.replace(
            "{{ m.content }}",
            f"{{% if m.{read} is defined %}}<think>{{{{ m.{read} }}}}</think>{{% endif %}}"
            "{{ m.content }}",
        )
        record = chat(user("a"), assistant("b", **{name: reasoning}))
        (text,) = pack_marked([record], template=template)
        assert text == f"<user>a</user><assistant>⟦{shown}</assistant>⟧"
