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
    run,
    user,
    write,
)
from conversations import TOOLS, Json
from support import assert_error, packer

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
SPACED = OPEN.replace("{% endfor %}", "{{ '' if loop.last else '\\n' }}{% endfor %}", 1)
ONE, ASKED = chat(user("Hi"), assistant("Hello")), {"prompt": "Hi", "completion": "Hello"}
ENDED_BY_USER = ("--turn-end", "<|user|>")

# id: (record, template, options, what is trained on, turns and those of them without an end)
ENDS: dict[str, tuple[Json, str, tuple[str, ...], str, tuple[int, int]]] = {
    "nothing": (TWO, OPEN, ("--allow-open-turns",),
                "<|user|>\nHi<|assistant|>⟦\nHello⟧<|user|>\nBye<|assistant|>⟦\nCiao⟧", (2, 2)),
    "the next turn": (
        TWO, OPEN, ENDED_BY_USER,
        "<|user|>\nHi<|assistant|>⟦\nHello<|user|>⟧\nBye<|assistant|>⟦\nCiao<|user|>⟧", (2, 0)),
    "white space before it, which is learned": (
        TWO, SPACED, ENDED_BY_USER,
        "<|user|>\nHi\n<|assistant|>⟦\nHello\n<|user|>⟧\nBye\n<|assistant|>⟦\nCiao<|user|>⟧",
        (2, 0)),
    "prompts through a template": (
        ASKED, OPEN, ("--prompt-template", "chat", *ENDED_BY_USER),
        "<|user|>\nHi<|assistant|>⟦\nHello<|user|>⟧", (1, 0)),
    "one that does not follow": (
        ONE, OPEN, ("--turn-end", "<|im_end|>", "--allow-open-turns"),
        "<|user|>\nHi<|assistant|>⟦\nHello<|im_end|>⟧", (1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_what_turns_end_in(folder: Path, case: str) -> None:
    record, template, options, expected, turns = ENDS[case]
    tokenizer = chat_tokenizer(folder / "t", None)
    manifest = pack_chat([record], *options, template=template, tokenizer=tokenizer)
    assert marked("out") == [expected]
    assert (manifest["trained_turns"], manifest["turns_without_end"]) == turns
    assert manifest["config"]["turn_end"] == [end for end in options if end.startswith("<|")]


WITHOUT_LAST = TAGS.replace("</{{ m.role }}>", "{% if not loop.last %}</{{ m.role }}>{% endif %}")
# id: (records, template, options, exit code, parts of the error)
REFUSED: dict[str, tuple[Json, str, tuple[str, ...], int, tuple[str, ...]]] = {
    "a JSON file without a template": (
        ONE, TAGS, ("--chat-template", "model.json"), 2,
        ("model.json is JSON without a 'chat_template'",)),
    "every question": (
        TWO, TAGS + "{% if messages | length < 3 %}{{ raise_exception('few') }}{% endif %}", (), 1,
        ("refuses a question and its answer", "tip: use a template that renders them")),
    "generation tags inside a macro": (
        TWO, "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}", (), 2,
        ("does not compile", "{% generation %} inside a macro")),
    **{f"a token that the tokenizer lacks, {options}": (
        ONE, "{{ bos_token + '' }}" + TAGS, options, 2,
        ("the chat template needs bos_token, and the tokenizer names none",))
       for options in ((), ("--train-on", "all"))},
    "turns that end in nothing": (
        TWO, OPEN, (), 2,
        ("does not end the assistant's turn, where another turn follows", "--turn-end TOKEN",
         "--allow-open-turns")),
    "prompts that end in nothing": (
        ASKED, OPEN, ("--prompt-template", "chat"), 2, ("does not end", "--turn-end")),
    "a last turn without an end": (ONE, WITHOUT_LAST, (), 2, ("turn, the last one",)),
    "an empty end": (TWO, OPEN, ("--turn-end", ""), 2, ("--turn-end",)),
    "an end where all is trained on": (
        TWO, OPEN, ("--turn-end", "x", "--train-on", "all"), 2, ("--turn-end",)),
    "an end without a template": (ASKED, OPEN, ENDED_BY_USER, 2, ("applies only to records",)),
    **{f"{end} that does not follow": (
        ONE, OPEN, ("--turn-end", end), 2,
        (f"--turn-end: {end} does not follow the assistant's turn", "where another turn follows"))
       for end in ("<|im_start|>", "<|im_end|>")},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_templates_and_ends_that_are_refused(folder: Path, case: str) -> None:
    record, template, options, code, parts = REFUSED[case]
    (folder / "model.json").write_text('{"chat_templates": {}}')
    # without the named token, or with no template at all, an option decides
    tokenizer = "bytes" if "bos_token" in template else chat_tokenizer(folder / "t", None)
    result = run([record], *options, template=template, tokenizer=tokenizer)
    assert_error(result, code, parts[0])
    assert [part for part in parts if part not in result.stderr] == []
    assert not Path("out").exists()


def test_a_named_end_that_is_no_token_is_a_warning(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", None)
    record = chat(user("Hi"), assistant("Hello"))
    template = OPEN.replace("<|{{ m.role }}|>", "<|im_{{ 'start' if m.role == 'user' else 'x' }}|>")
    for end, warned in (("<|im_start|>", False), ("<|im_st", True)):
        result = run([record], "--turn-end", end, template=template, tokenizer=tokenizer)
        assert result.exit_code == 0, result.stderr
        assert ("is not a token of its own" in result.stderr) == warned
