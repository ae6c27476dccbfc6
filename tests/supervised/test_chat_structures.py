"""Templates of every construction, with conversations of every structure.

The templates are small ones, made as real ones are; tests/extras has the real ones. What is trained
on is held against a second rule, that of prefixes, which is written here once more.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chats import (
    CHATML,
    TAGS,
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
from conversations import STRUCTURES, TOOLS, Json, foreign_words, own_words
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from support import packer

CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# Results of tools written inside the model's turn, by a loop over indices, as Gemma 4 does.
RESULTS_BY_INDEX = (
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set before = messages[loop.index0 - 1].role if loop.index0 else '' %}"
    "{% set again = m.role == 'assistant' and before == 'tool' %}"
    "{% if not again %}<|{{ m.role }}|>{% endif %}"
    + CALLS
    + "{% set ns = namespace(found=false) %}"
    "{% for k in range(loop.index0 + 1, messages | length) %}"
    "{% if not ns.stopped and messages[k].role == 'tool' and m.tool_calls %}"
    "<|result|>{{ messages[k].content }}<result|>{% set ns.found = true %}"
    "{% else %}{% set ns.stopped = true %}{% endif %}{% endfor %}"
    "{{ m.content }}{% if m.tool_calls and not ns.found %}<|result|>"
    "{% elif m.content or not ns.found %}<|end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|>{% endif %}"
)
# The end of a turn stands at the beginning of the next one, as with Jamba 1.5.
ENDS_AT_THE_NEXT = (
    "{% for m in messages %}{% if not loop.first %}<|eom|>{% endif %}<|bom|><|{{ m.role }}|> "
    "{{ m.content }}" + CALLS + "{% endfor %}<|eom|>"
    "{% if add_generation_prompt %}<|bom|><|assistant|>{% endif %}"
)
# The prompt opens a thought, which earlier turns have lost, as with Qwen 3.5.
REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% set content = m.content.split('</think>')[-1] | trim %}{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% endif %}{{ content }}" + CALLS + "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)
# Everything in one expression, nothing in earlier turns, as with DeepSeek V3.
NAMESPACES = (
    "{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% elif m.role == 'system' %}"
    "{{ m.content }}{% elif m.role == 'tool' %}{% set ns.tool = true %}"
    "{{ '<|output|>' + m.content + '<|/output|>' }}{% else %}"
    "{% if ns.tool %}{% set ns.tool = false %}{{ m.content }}{% else %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] }}{% endif %}" + CALLS + "<|eos|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
MACROS = (
    "{% macro said(m) %}{{ m.content }}" + CALLS + "{% endmacro %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ said(m) }}<|end|>\n{% endfor %}" + PROMPT
)
# Messages of the same role become one, in a list of the template's own.
MERGED = (
    "{% set ns = namespace(all=[]) %}{% for m in messages %}"
    "{% if ns.all and ns.all[-1].role == m.role %}"
    "{% set ns.all = ns.all[:-1] + [{'role': m.role, 'content': ns.all[-1].content ~ m.content}] %}"
    "{% else %}{% set ns.all = ns.all + [{'role': m.role, 'content': m.content}] %}{% endif %}"
    "{% endfor %}{% for m in ns.all %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + PROMPT
)
RESULTS_BY_SLICE = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}" + CALLS +
    "<|end|>{% for t in messages[loop.index:] %}{% if t.role != 'tool' %}{% break %}{% endif %}"
    "<|tool|>{{ t.content }}<|end|>{% endfor %}{% endif %}{% endfor %}" + PROMPT
)  # fmt: skip
ALWAYS_PROMPTS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "<|end|>{% endfor %}"
    "<|assistant|>"
)
SEPARATED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "<|end|>"
    "{% if not loop.last %}\n\n{% endif %}{% endfor %}" + PROMPT
)
CONSTRUCTIONS = {
    "plain": CHATML,
    "results inside turns, by index": RESULTS_BY_INDEX,
    "results inside turns, by slice": RESULTS_BY_SLICE,
    "ends at the next turn": ENDS_AT_THE_NEXT,
    "reasoning of the last turn only": REASONING,
    "namespaces": NAMESPACES,
    "macros": MACROS,
    "merged turns": MERGED,
    "always a prompt": ALWAYS_PROMPTS,
    "separators between turns": SEPARATED,
    "indices": TAGS.replace("in messages", "in range(messages | length)")
    .replace("m.", "messages[m]."),
}  # fmt: skip
# Their prompts, or the ends of their texts, are not what the whole text goes on with.
NO_PREFIXES = ("namespaces", "always a prompt", "separators between turns")
# Structures of which packer says that it cannot tell, by construction: all others are decided.
UNDECIDED: dict[str, set[str]] = {
    "merged turns": {
        "the assistant twice",
        "the assistant twice, then more",
    },
}


@cache
def compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template)


def by_prefixes(record: Json, template: str) -> str | None:
    """The text, what each message of the assistant adds in ⟦⟧; None where prefixes do not nest."""
    messages, tools = record["messages"], record.get("tools")

    def render(some: list[Json], prompt: bool = False) -> str:
        return str(compiled(template).render(
            messages=some, tools=tools, add_generation_prompt=prompt
        ))  # fmt: skip

    whole, found, done = render(messages), "", 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            try:
                before, after = render(messages[:i], prompt=True), render(messages[: i + 1])
            except TemplateError:
                return None
            if not (whole.startswith(after) and after.startswith(before)) or done > len(before):
                return None
            found += whole[done : len(before)] + f"⟦{whole[len(before) : len(after)]}⟧"
            done = len(after)
    return (found + whole[done:]).replace("⟦⟧", "").replace("⟧⟦", "")


def plain(record: Json) -> Json:
    """The record as every template takes it: content in one piece, all keys there."""
    messages = [
        m if isinstance(m["content"], str) else m | {"content": m["content"][0]["text"]}
        for m in record["messages"]
    ]
    return record | {"messages": messages}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_constructions_and_structures(folder: Path, name: str) -> None:
    template, undecided = CONSTRUCTIONS[name], UNDECIDED.get(name, set())
    records = {key: plain(record) for key, record in STRUCTURES.items()}
    options = ["--on-error", "skip", "--keep-untrained"]
    manifest = pack_chat(list(records.values()), *options, template=template)
    assert manifest["rejected_records"] == len(undecided)
    told = [key for key in records if key not in undecided]
    compared = 0
    for key, text in zip(told, marked("out"), strict=True):
        record = records[key]
        said = " ".join(part.partition("⟧")[0] for part in text.split("⟦")[1:])
        assert not [words for words in foreign_words(record) if words in said], (key, text)
        lost = [words for words in own_words(record) if words in text and words not in said]
        assert not lost, (key, text)
        expected = None if name in NO_PREFIXES else by_prefixes(record, template)
        compared += expected is not None
        assert expected in (None, text.replace("⟧⟦", "")), key
    assert compared >= (0 if name in NO_PREFIXES else 5)


# What a wrong label would be


def test_results_of_tools_in_the_turn_of_the_assistant_are_not_trained_on(folder: Path) -> None:
    called = {
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
    }
    call = assistant("", tool_calls=[called])
    tool = {"role": "tool", "content": "SECRET"}
    json_call = '<call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</call>'
    begin = f"<|user|>Rain?<|end|>\n<|assistant|>⟦{json_call}<|result|>⟧SECRET<result|>"
    found = pack_marked(
        [
            chat(user("Rain?"), call, tool),
            chat(user("Rain?"), call, tool, assistant("No.")),
            chat(user("Rain?"), call, tool, user("So?"), assistant("No.")),
            chat(user("Rain?"), assistant("Look.", tool_calls=[called]), tool, assistant("No.")),
        ],
        template=RESULTS_BY_INDEX,
    )
    assert found == [
        begin,
        begin + "⟦No.<|end|>\n⟧",
        begin + "<|user|>So?<|end|>\n<|assistant|>⟦No.<|end|>\n⟧",
        begin.replace("<|result|>⟧", "⟧<|result|>") + "⟦Look.<|end|>\nNo.<|end|>\n⟧",
    ]


def test_words_of_others_in_a_turn_that_no_loop_shows(folder: Path) -> None:
    """The template writes the user's next message into the turn of the assistant."""
    template = TAGS.replace(
        "{{ m.content }}",
        "{{ m.content }}{% if m.role == 'assistant' and not loop.last %}"
        "({{ (messages | last).content }}){% endif %}",
    )
    record = chat(user("Hi"), assistant("Hello"), user("Bye"))
    refused(
        [record], 1, "line 1", "holds words of another message, of role user", template=template
    )
    assert pack_chat([chat(user("Hi"), assistant("Hello"))], template=template)["documents"] == 1


def test_a_disagreement_shows_both(folder: Path) -> None:
    """What the turn goes on with where it is not the last one: nobody can say whose it is."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% if not loop.last %}<|more|>{% endif %}{% endfor %}" + PROMPT
    )
    record = chat(user("Hi"), assistant("Hello"), user("Bye"))
    parts = ("line 1", "by its turns it is", "<|end|><|more|>⟧", "by prefixes", "<|end|>⟧<|more|>")
    refused([record], 1, *parts, template=template)
    options = ["--on-error", "skip"]
    single = chat(user("Hi"), assistant("Hello"))
    manifest = pack_chat([record, single, record], *options, template=template)
    assert (manifest["documents"], manifest["rejected_records"]) == (1, 2)


def test_tags_around_words_of_others(folder: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    record = chat(user("Rain?"), assistant("Look."), {"role": "tool", "content": "SECRET"})
    refused([record], 1, "line 1", "tags hold words of role tool", template=template)
    assert pack_marked([chat(user("Rain?"), assistant("No."))], template=template) == [
        "<user>Rain?<assistant>⟦No.⟧"
    ]


def test_ends_that_stand_at_the_next_turn_are_trained_on(folder: Path) -> None:
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    assert pack_marked([record], template=ENDS_AT_THE_NEXT) == [
        "<|bom|><|user|> Hi<|eom|><|bom|><|assistant|>⟦ Hello<|eom|>⟧"
        "<|bom|><|user|> Bye<|eom|><|bom|><|assistant|>⟦ Ciao<|eom|>⟧"
    ]
    silent = chat(user("Hi"), assistant("Hello", weight=0), user("Bye"), assistant("Ciao"))
    [found] = pack_marked([silent], template=ENDS_AT_THE_NEXT)
    assert found.count("⟦") == 1
    assert found.endswith("⟦ Ciao<|eom|>⟧")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "namespaces",
            "<|User|>Hi<|Assistant|>⟦Hello<|eos|>⟧<|User|>Bye<|Assistant|>⟦Ciao<|eos|>⟧",
        ),
        (
            "always a prompt",
            "<|user|>Hi<|end|><|assistant|>⟦Hello<|end|>⟧"
            "<|user|>Bye<|end|><|assistant|>⟦Ciao<|end|>⟧<|assistant|>",
        ),
        (
            "separators between turns",
            "<|user|>Hi<|end|>\n<|assistant|>⟦Hello<|end|>⟧\n"
            "<|user|>Bye<|end|>\n<|assistant|>⟦Ciao<|end|>⟧",
        ),
    ],
)
def test_templates_whose_prefixes_tell_nothing(folder: Path, name: str, expected: str) -> None:
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    assert pack_marked([record], template=CONSTRUCTIONS[name]) == [expected]


def test_words_that_look_like_a_header(folder: Path) -> None:
    """An earlier turn whose words are what the prompt ends in: they are the assistant's."""
    record = chat(user("Hi"), assistant("<think>\nHm"), user("So?"), assistant("No."))
    for order in ([record], [chat(user("Hi"), assistant("A")), record]):
        found = pack_marked(order, template=REASONING)[-1]
        assert found == (
            "<|start|>user\nHi<|end|>\n<|start|>assistant\n⟦<think>\nHm<|end|>\n⟧"
            "<|start|>user\nSo?<|end|>\n<|start|>assistant\n<think>\n⟦\n</think>\n\nNo.<|end|>\n⟧"
        )


# Turns without an end

OPEN = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + PROMPT


def test_turns_that_end_in_nothing(folder: Path) -> None:
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    result = run([record], **how)
    assert result.exit_code == 2
    assert "ends the assistant's turn in nothing, where another turn follows" in result.stderr
    assert "--turn-end TOKEN" in result.stderr
    assert "--allow-open-turns" in result.stderr
    assert pack_chat([record], "--train-on", "all", **how)["documents"] == 1
    manifest = pack_chat([record], "--allow-open-turns", **how)
    assert (manifest["trained_turns"], manifest["turns_without_end"]) == (2, 2)
    [found] = marked("out")
    assert found == "<|user|>\nHi<|assistant|>⟦\nHello⟧<|user|>\nBye<|assistant|>⟦\nCiao⟧"


def test_the_token_that_ends_turns_can_be_named(folder: Path) -> None:
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    manifest = pack_chat([record], "--turn-end", "<|user|>", **how)
    [found] = marked("out")
    assert found == ("<|user|>\nHi<|assistant|>⟦\nHello<|user|>⟧\nBye<|assistant|>⟦\nCiao<|user|>⟧")
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
        assert ("is no token of its own" in result.stderr) == warned


def test_prompts_through_a_template_have_ends_of_turns_too(folder: Path) -> None:
    record = {"prompt": "Hi", "completion": "Hello"}
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    assert run([record], "--prompt-template", "chat", **how).exit_code == 2
    options = ["--prompt-template", "chat", "--turn-end", "<|user|>"]
    expected = "<|user|>\nHi<|assistant|>⟦\nHello<|user|>⟧"
    assert pack_marked([record], *options, **how) == [expected]
    Path("out").rename("kept")
    refused([record], 2, "--turn-end: records of", options=["--turn-end", "<|user|>"], **how)


def test_ends_are_found_behind_white_space(folder: Path) -> None:
    """Which is learned, too: it is written before the end."""
    how: Json = {"tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    between = OPEN.replace("{% endfor %}", "{{ '' if loop.last else '\\n' }}{% endfor %}", 1)
    expected = "<|user|>\nHi\n<|assistant|>⟦\nHello\n<|user|>⟧\nBye\n<|assistant|>⟦\nCiao<|user|>⟧"
    assert pack_marked([record], "--turn-end", "<|user|>", template=between, **how) == [expected]


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
    assert "in nothing, the last one" in result.stderr


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
    assert manifest["unshown_tools"] == 0
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
    [found] = pack_marked([with_tools()], "--chat-template", "default", **how)
    assert found == "<user>Rain?</user><assistant>⟦</assistant>⟧"
    assert not Path("out/chat_template.tool_use.jinja").exists()
    result = packer(
        "pack", write([with_tools()]), "-l", 512, "-t", how["tokenizer"], "-o", "out", "--overwrite"
    )
    assert "chat template: the tokenizer, tool_use for tools; trained on" in result.stderr


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
