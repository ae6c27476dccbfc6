"""Conversations in every dialect become the same messages: tools, roles, content, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from altered import unaltered
from chats import (
    CHATML,
    TAGS,
    assistant,
    chat,
    marked,
    pack_marked,
    refused,
    run,
    user,
    write,
)
from dialects import CALL, HI, HI_MARKED, HI_SHAREGPT, parquet
from support import assert_error, packer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}


# Tools


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER]), WEATHER])
def test_tools_as_a_list_an_object_and_json_text(folder: Path, tools: Any) -> None:
    text = pack_marked([chat(*HI, tools=tools)], template=CHATML)[0]
    assert text.startswith(f"<tools>{json.dumps([WEATHER])}</tools>\n<|im_start|>user\nHi")


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools(folder: Path, tools: Any) -> None:
    texts = pack_marked([chat(*HI, tools=tools), chat(*HI)], template=CHATML)
    assert texts[0] == texts[1]
    assert "tools" not in texts[0]


def test_tools_in_a_parquet_column_of_json_text(folder: Path) -> None:
    columns = {"messages": [HI, HI], "tools": [json.dumps([WEATHER]), None]}
    first, second = pack_marked(parquet(columns), template=CHATML)
    assert first == f"<tools>{json.dumps([WEATHER])}</tools>\n" + second


# ShareGPT


def test_roles_of_sharegpt(folder: Path) -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "Sunny."},
    ]
    [text] = pack_marked([{"conversations": turns}], template=CHATML)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦<call>{json.dumps(CALL)}</call><|im_end|>\n⟧"
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n⟦Sunny.<|im_end|>\n⟧"
    )


@pytest.mark.parametrize(
    ("speaker", "role"),
    [
        ("chatgpt", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("assistant", "assistant"),
        ("user", "user"),
        ("human", "user"),
        ("function_response", "tool"),
        ("tool", "tool"),
    ],
)
def test_other_names_of_speakers(folder: Path, speaker: str, role: str) -> None:
    turns = [{"from": speaker, "value": "So."}, {"from": "gpt", "value": "Yes."}]
    [text] = pack_marked([{"conversations": turns}])
    assert text.replace("⟦", "").replace("⟧", "").startswith(f"<{role}>So.</{role}>")
    assert ("⟦So." in text) == (role == "assistant")


def test_flags_of_sharegpt_messages(folder: Path) -> None:
    turns = [
        HI_SHAREGPT[0],
        {"from": "function_call", "value": json.dumps(CALL), "train": False},
        {"from": "gpt", "value": "Hello", "weight": 0},
        {"from": "gpt", "value": "Bye", "weight": 1},
    ]
    [text] = pack_marked([{"conversations": turns}], template=CHATML)
    assert text.split("⟦")[1:] == ["Bye<|im_end|>\n⟧"]


def test_several_calls_at_once(folder: Path) -> None:
    turns = [HI_SHAREGPT[0], {"from": "tool_call", "value": json.dumps([CALL, CALL])}]
    [text] = pack_marked([{"conversations": turns}], template=CHATML)
    assert text.endswith(f"⟦{f'<call>{json.dumps(CALL)}</call>' * 2}<|im_end|>\n⟧")


def test_the_system_field(folder: Path) -> None:
    own = [{"from": "system", "value": "Own."}, *HI_SHAREGPT]
    records = [
        {"system": "Be kind.", "conversations": HI_SHAREGPT},
        {"system": "", "conversations": HI_SHAREGPT},
        {"system": None, "conversations": HI_SHAREGPT},
        {"system": "Be kind.", "conversations": own},
    ]
    assert pack_marked(records) == [
        "<system>Be kind.</system>" + HI_MARKED,
        HI_MARKED,
        HI_MARKED,
        "<system>Own.</system>" + HI_MARKED,
    ]


# Keys and speakers with other names

SPOKEN = [{"speaker": "human", "text": "Hi"}, {"speaker": "gpt", "text": "Hello"}]
SPEAKER_TEXT = ("--field", "role=speaker", "--field", "content=text")
NAMED_ANEW: dict[str, tuple[Any, tuple[str, ...]]] = {
    "keys": ({"messages": SPOKEN}, SPEAKER_TEXT),
    "of JSON text": ({"messages": json.dumps(SPOKEN)}, SPEAKER_TEXT),
    "of another column": ({"talk": SPOKEN}, ("--field", "messages=talk", *SPEAKER_TEXT)),
    "of prompts": ({"prompt": SPOKEN[:1], "completion": SPOKEN[1:]}, SPEAKER_TEXT),
    "one key": ({"messages": [one | {"role": one["speaker"]} for one in SPOKEN]},
                ("--field", "content=text", "--role", "human=user", "--role", "gpt=assistant")),
    "before others": ({"messages": [one | {"role": "x", "content": "y"} for one in SPOKEN]},
                      SPEAKER_TEXT),
    "roles": ({"messages": [{"role": "Ann", "content": "Hi"}, {"role": "Bo", "content": "Hello"}]},
              ("--role", "Ann=user", "--role", "Bo=assistant")),
    "roles of ShareGPT": ({"conversations": [{"from": "A", "value": "Hi"},
                                             {"from": "B", "value": "Hello"}]},
                          ("--role", "A=user", "--role", "B=assistant")),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED_ANEW)
def test_keys_and_speakers_are_named_by_options(folder: Path, case: str) -> None:
    record, options = NAMED_ANEW[case]
    assert pack_marked([record], *options) == [HI_MARKED]
    config = json.loads(Path("out/manifest.json").read_text())["config"]
    given = [option for pair in config["fields"] + config["roles"] for option in ["=".join(pair)]]
    assert sorted(given) == sorted(options[1::2])
    said = packer("stats", "out").stdout
    assert all(f"{options[i]} {options[i + 1]}" in said for i in range(0, len(options), 2))
    assert packer("verify", "out", "--against-inputs").exit_code == 0


def test_other_keys_of_messages(folder: Path) -> None:
    called = {"role": "assistant", "content": "", "calls": [{"function": CALL}]}
    fields = ("--field", "tool_calls=calls", "--field", "train=learn")
    turns = [user("Hi"), assistant("Hm", learn=False), called]
    [text] = pack_marked([chat(*turns)], *fields, template=CHATML)
    assert text.split("⟦")[1:] == [f"<call>{json.dumps(CALL)}</call><|im_end|>\n⟧"]


def test_sides_of_pairs_have_the_same_names(folder: Path) -> None:
    pair = {"prompt": SPOKEN[:1], "chosen": SPOKEN[1:], "rejected": [SPOKEN[1] | {"text": "No"}]}
    assert len(pack_marked([pair], "--shape", "preference", *SPEAKER_TEXT)) == 1
    expected = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    before = Path("out/manifest.json").read_bytes()
    plain = {"prompt": expected[:1], "chosen": expected[1:], "rejected": [assistant("No")]}
    pack_marked([plain], "--shape", "preference")
    tokens = [json.loads(one)["tokens"] for one in (before, Path("out/manifest.json").read_bytes())]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--field", "role=x"), ("--field: is for messages where it names", "shape is text")),
        (("--role", "x=user"), ("--role: is for messages", "the records' shape is text")),
        (("--role", "user"), ("--role: 'user' is not NAME=ROLE",)),
    ],
)
def test_names_in_messages_need_messages(folder: Path, options: Any, parts: Any) -> None:
    refused([{"text": "Hi"}], 2, *parts, options=options, template=None)


def test_names_in_messages_in_a_recipe(folder: Path) -> None:
    write([{"messages": SPOKEN}])
    Path("tags.jinja").write_text(TAGS)
    Path("mix.toml").write_text(
        'max_length = 64\ntokenizer = "bytes"\n[[source]]\nname = "a"\ninputs = ["data.jsonl"]\n'
        'epochs = 1\nchat_template = "tags.jinja"\nfield = {role = "speaker", content = "text"}\n'
        'role = {human = "user"}\n'
    )
    done = packer("pack", "mix.toml", "-o", "mixed", "-q")
    assert done.exit_code == 0, done.stderr
    planned = packer("plan", "data.jsonl", "-l", 64, "-t", "bytes", "--chat-template",
                     "tags.jinja", *SPEAKER_TEXT, "--role", "gpt=assistant", "--json")  # fmt: skip
    assert json.loads(planned.stdout)["outcomes"][0]["trained_tokens"] == 17


# Content


def test_content_that_is_null_or_missing(folder: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    records = [chat(user("Weather?"), call), chat(user("Weather?"), call | {"content": None})]
    expected = f"⟦<call>{json.dumps(CALL)}</call><|im_end|>\n⟧"
    for text in pack_marked(records, template=CHATML):
        assert text.endswith(expected)


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_an_answer_without_anything_in_it_is_no_answer(
    folder: Path, content: dict[str, None]
) -> None:
    empty = {"role": "assistant", **content}
    place = "messages[1] is the assistant's and has neither content nor tool calls"
    refused([chat(user("Hi"), empty)], 1, place)
    [text] = pack_marked([chat(user("Hi"), empty | {"weight": 0}, assistant("Yo"))], template=TAGS)
    assert text == "<user>Hi</user><assistant></assistant><assistant>⟦Yo</assistant>⟧"


@pytest.mark.parametrize("message", [{}, {"content": None}, {"txt": "Hi"}])
def test_a_user_without_content_is_a_bad_record(folder: Path, message: dict[str, Any]) -> None:
    record = chat({"role": "user", **message}, assistant("Hello"))
    result = run([record])
    assert_error(result, 1, "messages[0] is the user's and has no content")
    assert ("tip: add --field content=txt" in result.stderr) == ("txt" in message)
    assert pack_marked([record, chat(*HI)], "--on-error", "skip") == [HI_MARKED]


def test_a_template_that_needs_content_gets_an_empty_one(folder: Path) -> None:
    strict = TAGS.replace("{{ m.content }}", "{{ '[' + m['content'] + ']' }}")
    silent = {"role": "assistant", "tool_calls": []}
    [text] = pack_marked([chat(user("Hi"), silent)], template=strict)
    assert text == "<user>[Hi]</user><assistant>⟦[]</assistant>⟧"


@pytest.mark.parametrize("key", ["function_call", "tool_calls"])
def test_calls_in_the_ways_that_apis_had(folder: Path, key: str) -> None:
    calls = [{"type": "function", "function": CALL}]
    [expected] = pack_marked([chat(user("?"), assistant("", tool_calls=calls))], template=CHATML)
    assert "⟦<call>" in expected
    value = {"function_call": CALL, "tool_calls": calls}[key]
    for how in (value, json.dumps(value)):
        record = chat(user("?"), assistant(None, **{key: how}))
        assert pack_marked([record], template=CHATML) == [expected]
    speakers = [{"from": "human", "value": "?"}, {"from": "function_call", "value": CALL}]
    assert pack_marked([{"conversations": speakers}], template=CHATML) == [expected]


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (assistant(None, tool_calls="no"), "messages[1].tool_calls' is text that is not valid"),
        (assistant(None, tool_calls=["no"]), "messages[1].tool_calls is not a call"),
        (assistant(None, function_call={"a": 1}), "messages[1].function_call is not a call"),
        ({"from": "function_call", "value": ""}, "messages[1].value is not a call"),
        ({"role": "assistant", "text": "Hello"}, "messages[1] has 'text', expected 'role' and"),
        ({"from": "gpt", "text": "Hello"}, "messages[1] has 'text', expected 'role' and"),
    ],
)
def test_what_the_template_would_not_show(folder: Path, message: Any, part: str) -> None:
    """An empty answer would be trained on in its place."""
    refused([chat(user("Hi"), message)], 1, "data.jsonl, line 1 (byte 0)", part)


def test_role_and_value(folder: Path) -> None:
    mixed = [{"role": "user", "value": "Hi"}, {"role": "assistant", "value": "Hello"}]
    assert pack_marked([chat(*mixed)]) == [HI_MARKED]


def test_a_system_field_that_is_no_text(folder: Path) -> None:
    record = {"conversations": HI_SHAREGPT, "system": ["Be brief."]}
    refused([record], 1, "line 1 (byte 0): field 'system' is a list, expected a string")


@pytest.mark.parametrize("shown", ["{{ m.content[0].text }}", "{{ m.content }}"])
def test_a_template_that_shows_parts_of_the_user_only(folder: Path, shown: str) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% elif m.role == 'user' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% else %}" + shown + "{% endif %}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    record = chat(user([{"type": "text", "text": "Hi"}]), assistant(parts))
    assert pack_marked([record], template=template) == [HI_MARKED]


def test_content_as_text_parts(folder: Path) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"text": "l"}, "o"]
    records = [chat(user([{"type": "text", "text": "Hi"}]), assistant(parts))]
    assert pack_marked(records) == [HI_MARKED]


def test_a_template_for_parts_gets_the_parts(folder: Path) -> None:
    template = TAGS.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}",
    )
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    [text] = pack_marked([chat(user("Hi"), assistant(parts))], template=template)
    assert text == "<user>Hi</user><assistant>⟦(Hel)(lo)</assistant>⟧"


# Prompts and completions that are messages


def test_conversational_prompt_and_completion(folder: Path) -> None:
    first = [user("Hi"), assistant("Yes?"), user("Bye")]
    expected = (
        "<user>Hi</user><assistant>Yes?</assistant><user>Bye</user><assistant>⟦Ciao</assistant>"
    )
    for completion in ([assistant("Ciao")], "Ciao"):
        record = {"prompt": first, "completion": completion}
        assert pack_marked([record]) == [expected + "⟧"]
    record = {"prompt": "Hi", "completion": [assistant("Hello")]}
    assert pack_marked([record]) == [HI_MARKED]


def test_the_first_pair_tells_whether_prompts_are_messages(folder: Path) -> None:
    texts = {"prompt": "Hi", "completion": "Hello"}
    messages = {"prompt": HI[:1], "completion": HI[1:]}
    assert pack_marked([messages, texts]) == [HI_MARKED] * 2
    wrong = "field 'prompt' is a list, expected a string"
    assert_error(run([texts, messages], template=None), 1, "data.jsonl, line 2 (byte ", wrong)
    columns = {"prompt": [HI[:1]], "completion": [HI[1:]]}
    assert pack_marked(parquet(columns)) == [HI_MARKED]
    lines = b"".join(json.dumps(one).encode() + b"\n" for one in (messages, texts))
    Path("tags.jinja").write_text(TAGS)
    options = ("-l", 512, "-t", "bytes", "-o", "stdin", "--chat-template", "tags.jinja")
    assert unaltered("pack", "-", *options, stdin=lines).returncode == 0
    assert marked("stdin") == [HI_MARKED] * 2
