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
    CALLS,
    CHATML,
    PROMPT,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    marked,
    pack_chat,
    pack_marked,
    refused,
    user,
)
from conversations import STRUCTURES, Json, foreign_words, own_words
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
# The last answer stands behind the loop over all others, as with Nemotron Nano 2.
AFTER_THE_LOOP = (
    "{% set ns = namespace(last=none) %}{% if messages[-1].role == 'assistant' %}"
    "{% set ns.last = messages[-1] %}{% set messages = messages[:-1] %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "<|end|>{% endfor %}"
    "{% if ns.last is not none %}<|assistant|>{{ ns.last.content }}" +
    CALLS.replace("m.", "ns.last.") + "<|end|>{% endif %}" + PROMPT
)  # fmt: skip
# Calls have an id, but not those of the last message, as with Apriel 1.5.
IDS_BUT_THE_LAST = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function | tojson }}{% if not loop.last or m is not sameas messages[-1] %}"
    "#{{ c.id }}{% endif %}</call>{% endfor %}<|end|>{% endfor %}" + PROMPT
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
    "the last turn after the loop": AFTER_THE_LOOP,
    "ids of calls but the last": IDS_BUT_THE_LAST,
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

    whole, marked, done = render(messages), "", 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            try:
                before, after = render(messages[:i], prompt=True), render(messages[: i + 1])
            except TemplateError:
                return None
            if not (whole.startswith(after) and after.startswith(before)) or done > len(before):
                return None
            said = whole[len(before) : len(after)]
            is_empty = message.get("tool_calls") and not message["content"] and "city" not in said
            marked += whole[done : len(before)] + (said if is_empty else f"⟦{said}⟧")
            done = len(after)
    return (marked + whole[done:]).replace("⟦⟧", "").replace("⟧⟦", "")


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
        trained = " ".join(part.partition("⟧")[0] for part in text.split("⟦")[1:])
        assert not [words for words in foreign_words(record) if words in trained], (key, text)
        lost = [words for words in own_words(record) if words in text and words not in trained]
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
    texts = pack_marked(
        [
            chat(user("Rain?"), call, tool),
            chat(user("Rain?"), call, tool, assistant("No.")),
            chat(user("Rain?"), call, tool, user("So?"), assistant("No.")),
            chat(user("Rain?"), assistant("Look.", tool_calls=[called]), tool, assistant("No.")),
        ],
        template=RESULTS_BY_INDEX,
    )
    assert texts == [
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
    [text] = pack_marked([silent], template=ENDS_AT_THE_NEXT)
    assert text.count("⟦") == 1
    assert text.endswith("⟦ Ciao<|eom|>⟧")


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
        text = pack_marked(order, template=REASONING)[-1]
        assert text == (
            "<|start|>user\nHi<|end|>\n<|start|>assistant\n⟦<think>\nHm<|end|>\n⟧"
            "<|start|>user\nSo?<|end|>\n<|start|>assistant\n<think>\n⟦\n</think>\n\nNo.<|end|>\n⟧"
        )


def test_the_last_answer_behind_the_loop(folder: Path) -> None:
    """It is trained on as all others are, and by itself with last-assistant."""
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    text = "<|user|>Hi<|end|><|assistant|>{}<|user|>Bye<|end|><|assistant|>⟦Ciao<|end|>⟧"
    assert pack_marked([record], template=AFTER_THE_LOOP) == [text.format("⟦Hello<|end|>⟧")]
    assert pack_marked([record], "--train-on", "last-assistant", template=AFTER_THE_LOOP) == [
        text.format("Hello<|end|>")
    ]
    record["messages"][3]["weight"] = 0
    [text] = pack_marked([record], template=AFTER_THE_LOOP)
    assert text.count("⟦") == 1
    assert "⟦Hello<|end|>⟧" in text


def test_a_template_that_needs_tools(folder: Path) -> None:
    """As those called tool_use of Hermes and Command R: conversations without are refused."""
    template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + TAGS
    with_tools = STRUCTURES["a call, its result, an answer"]
    refused([chat(user("Hi"), assistant("Hello"))], 1, "line 1", "not iterable", template=template)
    open_turns = "{% for t in tools %}{% endfor %}" + TAGS.replace("</{{ m.role }}>", "")
    refused(
        [with_tools], 2, "does not end the assistant's turn", template=open_turns,
        tokenizer=chat_tokenizer(folder / "t"),
    )  # fmt: skip
    [text] = pack_marked([with_tools], template=template)
    assert text == (
        "[get_weather]<user>user0 speaks</user><assistant></assistant>"
        "<tool>tool2 speaks</tool><assistant>⟦assistant3 speaks</assistant>⟧"
    )
