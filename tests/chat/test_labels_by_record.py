"""What is trained on is a function of the record, the template and the options alone.

Templates have modes by a word, a number, a length or a distance, and write them into the prompt for
an answer. Conversations are packed in random orders, by runs of one unit and of many, with one
worker and with two: each of them has the same tokens and labels every time. They are those of a
slow oracle, which renders the real prompt for each turn.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from chats import CALLS, Json, assistant, chat, pack_marked, system, user
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What begins an answer follows the mode, in turns and in prompts: `{mode}`, of message `i`.
_TURNS = (
    "{% for m in messages %}{% set i = loop.index0 %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}MODE{% endif %}{{ m.content }}" + CALLS + "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{% set i = messages | length %}<|assistant|>MODE{% endif %}"
)
_SMOLLM3 = (  # as that of SmolLM3
    "{% set ns = namespace(mode='/think') %}{% if messages[0].role == 'system' %}"
    "{% set said = messages[0].content %}{% if '/no_think' in said %}"
    "{% set ns.mode = '/no_think' %}{% elif '/think' in said %}{% set ns.mode = '/think' %}"
    "{% endif %}"
    "<|im_start|>system\n{{ said.replace('/no_think', '').replace('/think', '').rstrip() }}"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{% if ns.mode == '/no_think' %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content.lstrip('\n') }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if ns.mode == '/no_think' %}<think>\n\n</think>\n{% endif %}{% endif %}"
)


def _mode(when: str, text: str = "<brief>") -> str:
    return _TURNS.replace("MODE", "{% if " + when + " %}" + text + "{% endif %}")


TEMPLATES = {
    "by number": _mode("i >= 4"),
    "by number, in prompts alone": _mode("i >= 4").replace("{% if i >= 4 %}", "{% if true %}", 1),
    "by a word of the system": _SMOLLM3,
    "by a word at its beginning": _mode("messages[0].content.startswith('Be')"),
    "by a word of a question": _mode("'ja' in messages[i - 1].content"),
    "by a piece": _mode("messages[0].content.split('/')[1] is defined"),
    "by a variable": "{% set word = '/no' %}{% set ns = namespace(on=false) %}"
    "{% for m in messages[:1] %}"
    "{% set text = m.content %}{% if word in text %}{% set ns.on = true %}{% endif %}{% endfor %}"
    + _mode("ns.on"),
    "by equality": _mode("messages[0].content == 'ja'"),
    "by the length of words": _mode("messages[0].content | length > 12"),
    "by a character": _mode("messages[0].content[0] > 'k'"),
    "by the same words twice": _mode("messages[0].content == messages[i - 1].content"),
    "by a field": _mode("messages[0].name == 'ann'"),
    "by a name in the header": _mode("messages[0].name", "<{{ messages[0].name }}>"),
    "by a weight, the message left out": _mode("false").replace(
        "<|{{ m.role }}|>", "{% if m.role == 'system' and m.weight %}{{ m.name }}{% continue %}"
        "{% endif %}<|{{ m.role }}|>", 1,
    ),
    "by the number of tools": _mode("tools and tools | length > 1"),
    "by the type of a tool": _mode("tools and tools[0].function.parameters.type == 'object'"),
    "by an argument of a call": _mode(
        "i > 2 and messages[i - 2].tool_calls "
        "and messages[i - 2].tool_calls[0].function.arguments.hide"
    ),
    "in any case": _mode("'be kind' in messages[0].content | lower"),
    "by words put together": _mode("('x' ~ messages[0].content) == 'xja'"),
    "by words joined": _mode("'ja' in messages[:1] | map(attribute='content') | join('|')"),
    "by counting characters": "{% set ns = namespace(n=0) %}{% for c in messages[0].content %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}" + _mode("ns.n > 12"),
    "by reasoning far away": _mode(
        "messages[:i] | selectattr('reasoning_content') | list | length"
    ),
    "by calls far away": _mode("messages[:i] | selectattr('tool_calls') | list | length"),
    "by what changed": "{% set ns = namespace(same=false) %}{% for m in messages[:2] %}"
    "{% if not loop.changed(m.content) %}{% set ns.same = true %}{% endif %}{% endfor %}"
    + _mode("ns.same and i > 1"),
    "by distance": "{% set ns = namespace(last=-9) %}" + _mode("i - ns.last > 2").replace(
        "<|{{ m", "{% if 'ja' in m.content %}{% set ns.last = i %}{% endif %}<|{{ m", 1
    ),
}  # fmt: skip


_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": kind, "most": most}}}
    for kind in ("object", "string") for most in (2, 3)
]  # fmt: skip


def talks(count: int, seed: int) -> list[Json]:
    """Random conversations, many of them alike but for a word or a length."""
    rng = random.Random(seed)
    words = [
        "Be kind",
        "ja",
        "no",
        "yes",
        "a long sentence of words",
        "/no_think",
        "x/no y",
        "/think",
    ]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.choice((1, 1, 2))))

    made = list[Json]()
    for _ in range(count):
        messages: list[Json] = [system(text())] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 4)):
            more: Json = {}
            if rng.random() < 0.2:
                more["reasoning_content"] = text()
            if rng.random() < 0.2:
                arguments = rng.choice(({}, {"hide": True}, {"hide": False}))
                more["tool_calls"] = [
                    {"type": "function", "function": {"name": "f", "arguments": arguments}}
                ]
            messages += [user(text()), assistant(text(), **more)]
        if rng.random() < 0.3:
            messages[0]["name"] = rng.choice(("ann", "anna", "bob"))
        if rng.random() < 0.3:
            messages[0]["brief"] = rng.random() < 0.5
        if rng.random() < 0.3:
            messages[0]["weight"] = rng.choice((0, 1))
        made.append(chat(*messages))
        if rng.random() < 0.3:
            made[-1]["tools"] = rng.choices(_TOOLS, k=rng.choice((1, 2)))
    return made


@cache
def _compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = json.dumps
    return environment.from_string(template)


def oracle(template: str, record: Json) -> str:
    """The text, with ⟦⟧ from where the real prompt for each turn ends to where the turn does."""

    def text(count: int, *, prompt: bool = False) -> str:
        messages = record["messages"][:count]
        given = {"messages": messages, "tools": record.get("tools")}
        return str(_compiled(template).render(**given, add_generation_prompt=prompt))

    shown, at = "", 0
    whole = text(len(record["messages"]))
    for i, message in enumerate(record["messages"]):
        if message["role"] == "assistant":
            prompt, after = text(i, prompt=True), text(i + 1)
            plain = text(i)
            assert whole.startswith(plain)
            assert whole.startswith(after)
            start = len(prompt) if whole.startswith(prompt) else len(plain) + len("<|assistant|>")
            shown += f"{whole[at:start]}⟦{whole[start : len(after)]}⟧"
            at = len(after)
    return shown + whole[at:]


def by_record(records: list[Json], template: str, *options: Any) -> dict[str, str]:
    """What is trained on, by record."""
    texts = pack_marked(records, "-l", 4096, *options, template=template)
    keys = [json.dumps(record, sort_keys=True) for record in records]
    return dict(zip(keys, texts, strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
def test_labels_depend_on_the_record_alone(folder: Any, name: str) -> None:
    template, records = TEMPLATES[name], talks(40, seed=len(name))
    told = {json.dumps(one, sort_keys=True): oracle(template, one) for one in records}
    for seed, options in enumerate((["--workers", 1], ["--workers", 2, "--unit-bytes", "2K"])):
        random.Random(seed).shuffle(records)
        assert by_record(records, template, *options) == told


WHOLE_MESSAGES = "{% for m in messages %}<|{{ m.role }}|>{{ m | tojson }}<|end|>{% endfor %}" + (
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ASKED, _SAID = user("Hi"), assistant("Yes")
_AGAIN = [_ASKED, assistant("No"), user("Bye"), _SAID]


def test_a_template_gets_the_flags_of_records(folder: Any) -> None:
    record = {"messages": [_ASKED, assistant("No", train=True), _SAID]}
    [text] = pack_marked([record], "--train-on", "final", template=WHOLE_MESSAGES)
    assert '{"role": "assistant", "content": "No", "train": true}' in text


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"prompt": _AGAIN[:3], "completion": [_SAID]}, []),
        ({"messages": [_ASKED, assistant("No"), _SAID]}, ["--train-on", "final"]),
        (chat(_ASKED, assistant([{"type": "text", "text": "Yes", "weight": 0},
                                 {"type": "text", "text": "!"}])), []),
    ],
)  # fmt: skip
def test_a_template_gets_messages_without_notes(
    folder: Any, record: Json, options: list[str]
) -> None:
    for text in pack_marked([record], *options, template=WHOLE_MESSAGES):
        plain = text.replace("⟦", "").replace("⟧", "")
        assert '"train"' not in plain
        assert "train_detail" not in plain
        assert '{"role": "user", "content": "Hi"}' in plain


# As Gemma 4 has it: a thought stands in the text only where a call follows.
_THOUGHT_WITH_CALL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls and m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}" + CALLS + "{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_thought_before_a_call_is_not_part_of_it(folder: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = assistant("So.", reasoning_content="ask", tool_calls=[call])
    record = chat(user("Rain?"), said, {"role": "tool", "content": "wet"}, assistant("Yes."))
    [text] = pack_marked([record], "--no-train-tool-calls", template=_THOUGHT_WITH_CALL)
    assert text == (
        '<|user|>Rain?<|end|><|assistant|>⟦<think>ask</think>⟧<call>{"name": "f", "arguments": {}}'
        "</call>⟦So.<|end|>⟧<|tool|>wet<|end|><|assistant|>⟦Yes.<|end|>⟧"
    )
