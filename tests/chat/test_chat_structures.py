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
    marked_by_place,
    pack_chat,
    pack_marked,
    positions,
    refused,
    user,
)
from conversations import STRUCTURES, Json, foreign_words, own_words, plain
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
    "merged turns": {"the assistant twice", "the assistant twice, then more"}
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


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_constructions_and_structures(folder: Path, name: str) -> None:
    template, undecided = CONSTRUCTIONS[name], UNDECIDED.get(name, set())
    records = {key: plain(record) for key, record in STRUCTURES.items()}
    manifest = pack_chat(list(records.values()), "--on-error", "skip", template=template)
    assert manifest["rejected_records"] == len(undecided)
    texts = {place: text for (place, _), text in marked_by_place("out").items()}
    compared = 0
    for (key, record), place in zip(records.items(), positions([*records.values()]), strict=True):
        text = texts.get(place)
        if text is None:  # undecided, or dropped, as nothing in it is trained on
            continue
        trained = " ".join(part.partition("⟧")[0] for part in text.split("⟦")[1:])
        assert not [words for words in foreign_words(record) if words in trained], (key, text)
        lost = [words for words in own_words(record) if words in text and words not in trained]
        assert not lost, (key, text)
        expected = None if name in NO_PREFIXES else by_prefixes(record, template)
        compared += expected is not None
        assert expected in (None, text.replace("⟧⟦", "")), key
    assert compared >= (0 if name in NO_PREFIXES else 5)


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
