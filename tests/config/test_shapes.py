"""Every shape of records, however it is written down, becomes the documents it should."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import (
    CHATML,
    TAGS,
    assistant,
    chat,
    marked,
    pack_chat,
    pack_marked,
    positions,
    refused,
    run,
    system,
    user,
    write,
)
from support import assert_error, packer, packer_process, recover_documents

HI = [user("Hi"), assistant("Hello")]
HI_MARKED = "<user>Hi</user><assistant>⟦Hello</assistant>⟧"
HI_SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
PAIR = "Say hi.⟦Hello<eos>⟧"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}


DETECTED = {
    "text": ({"text": "Hello"}, "H⟦ello<eos>⟧"),
    "messages": ({"messages": HI}, HI_MARKED),
    "messages before text": ({"text": "other", "messages": HI}, HI_MARKED),
    "conversations": ({"conversations": HI_SHAREGPT}, HI_MARKED),
    "conversation": ({"conversation": HI_SHAREGPT}, HI_MARKED),
    "conversations in OpenAI style": ({"conversations": HI}, HI_MARKED),
    "messages in ShareGPT style": ({"messages": HI_SHAREGPT}, HI_MARKED),
    "prompt": ({"prompt": "Say hi.", "completion": "Hello"}, PAIR),
    "question": ({"question": "Say hi.", "answer": "Hello"}, PAIR),
    "query": ({"query": "Say hi.", "response": "Hello"}, PAIR),
    "input": ({"input": "Say hi.", "output": "Hello"}, PAIR),
    "mixed names": ({"question": "Say hi.", "output": "Hello"}, PAIR),
}


@pytest.mark.parametrize("name", DETECTED)
def test_detection(folder: Path, name: str) -> None:
    record, expected = DETECTED[name]
    assert pack_marked([record]) == [expected]


ALPACA = {"instruction": "Say hi.", "input": "In French.", "output": "Salut"}
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSay hi.\n\n### Input:\nIn French.\n\n### Response:\n⟦Salut<eos>⟧"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\nSay hi.\n\n### Response:\n⟦Salut<eos>⟧"
)


def test_alpaca(folder: Path) -> None:
    without = [
        {"instruction": "Say hi.", "output": "Salut"},
        ALPACA | {"input": ""},
        ALPACA | {"input": None},
    ]
    assert pack_marked([ALPACA, *without]) == [WITH_INPUT, *[WITHOUT_INPUT] * 3]
    response = {"instruction": "Say hi.", "response": "Salut"}
    assert pack_marked([response]) == [WITHOUT_INPUT]
    as_chat = "<user>Say hi.\nIn French.</user><assistant>⟦Salut</assistant>⟧"
    assert pack_marked([ALPACA], "--prompt-template", "chat") == [as_chat]
    record = ALPACA | {"system": "Be kind."}
    found = pack_marked([record], "--prompt-template", "chat")
    assert found == ["<system>Be kind.</system>" + as_chat]
    assert pack_marked([record]) == [WITH_INPUT]  # the prompt of Alpaca has no place for it


def test_ids_with_labels(folder: Path) -> None:
    record = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    write([record])
    assert packer("pack", "data.jsonl", "-l", 8, "-o", "out", "-q").exit_code == 0
    assert recover_documents("out", "labels")[0, 0].tolist() == [-100, -100, 7, 8]


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"messages": HI}, "messages"),
        ({"conversation": HI_SHAREGPT}, "conversations (conversations=conversation)"),
        (
            {"question": "a", "answer": "b"},
            "prompt-completion (prompt=question, completion=answer)",
        ),
        ({"prompt": HI[:1], "answer": HI[1:]}, "prompt-completion of messages (completion=answer)"),
        (ALPACA, "alpaca"),
    ],
)
def test_what_was_detected_is_said_and_stored(folder: Path, record: Any, shape: str) -> None:
    write([record])
    Path("tags.jinja").write_text(TAGS)
    is_chat = shape.startswith(("messages", "conversations")) or "of messages" in shape
    template = ["--chat-template", "tags.jinja"] if is_chat else []
    result = packer("pack", "data.jsonl", "-l", 512, "-t", "bytes", "-o", "out", *template)
    assert result.exit_code == 0
    assert f"packer: records: {shape}" in result.stderr.splitlines()
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["config"]["shape"] == shape.split(" ", maxsplit=1)[0]


def test_shape_overrides_detection(folder: Path) -> None:
    record = {"messages": HI, "text": "Plain", "prompt": "Say hi.", "completion": "Hello"}
    assert pack_marked([record]) == [HI_MARKED]
    assert pack_marked([record], "--shape", "text", template=None) == ["P⟦lain<eos>⟧"]
    shape = ("--shape", "prompt-completion")
    assert pack_marked([record], *shape, template=None) == [PAIR]
    both = {"instruction": "Say hi.", "input": "Hi", "output": "Hello"}
    assert pack_marked([both], "--shape", "prompt-completion") == ["Hi⟦Hello<eos>⟧"]


def test_field_names_columns(folder: Path) -> None:
    preference = {"prompt": "Hi", "chosen": HI, "rejected": [user("Hi"), assistant("No")]}
    assert pack_marked([preference], "--field", "messages=chosen") == [HI_MARKED]
    record = {"q": "Say hi.", "a": "Hello", "text": "other"}
    fields = ("--field", "prompt=q", "--field", "completion=a")
    assert pack_marked([record], *fields) == [PAIR]
    talk = {"talk": HI_SHAREGPT, "about": "Be kind."}
    found = pack_marked([talk], "--field", "conversations=talk", "--field", "system=about")
    assert found == ["<system>Be kind.</system>" + HI_MARKED]


def test_a_field_that_is_not_there(folder: Path) -> None:
    parts = ("data.jsonl", "no 'chosen'", "fields found: messages")
    refused([chat(*HI)], 1, *parts, options=["--field", "messages=chosen"])
    parts = ("data.jsonl", "fit none of", "fields found: foo")
    refused([{"foo": 1}], 1, *parts)
    refused([{"prompt": "Hi"}], 1, "fit none of", "prompt+completion", "fields found: prompt")
    refused([{"text": "Hi"}], 1, "fit none of: messages", options=["--shape", "messages"])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--shape", "chat"], ("--shape", "'chat' is not one of messages, ")),
        (["--field", "message=chosen"], ("--field", "'message' is not one of ")),
        (["--train-on", "completion"], ("--train-on: completion", "messages")),
        (["--prompt-template", "alpaca"], ("--prompt-template: alpaca", "messages")),
        (["--chat-template", "nowhere"], ("--chat-template", "'nowhere' is not a file")),
    ],
)
def test_options_that_do_not_fit(folder: Path, options: list[str], parts: tuple[str, ...]) -> None:
    refused([chat(*HI)], 2, *parts, options=options, template=None)


def test_messages_need_a_template(folder: Path) -> None:
    refused([chat(*HI)], 2, "need a chat template", template=None)
    pair = {"prompt": HI[:1], "completion": HI[1:]}
    refused([pair], 2, "need a chat template", template=None)


def test_a_template_that_does_not_compile(folder: Path) -> None:
    refused([chat(*HI)], 2, "does not compile", template="{% for %}")


# In other files


def parquet(columns: dict[str, Any], schema: Any = None) -> Path:
    pq.write_table(pa.table(columns, schema=schema), "data.parquet")
    return Path("data.parquet")


def test_json_text_in_the_place_of_lists(folder: Path) -> None:
    records = [{"messages": json.dumps(HI)}, {"messages": HI}]
    assert pack_marked(records) == [HI_MARKED] * 2
    assert pack_marked(parquet({"messages": [json.dumps(HI)]})) == [HI_MARKED]
    sharegpt = {"conversations": [json.dumps(HI_SHAREGPT)]}
    assert pack_marked(parquet(sharegpt)) == [HI_MARKED]


def test_parquet_gives_what_json_lines_give(folder: Path) -> None:
    function = dict(sorted(CALL.items()))  # the order that older versions of Arrow give to fields
    call = assistant(None, tool_calls=[{"type": "function", "function": function}])
    tool = {"role": "tool", "content": "sunny", "name": "weather"}
    conversations = [
        [system("Be brief."), *HI],
        [user("Weather?"), call, tool, assistant("Sunny.", weight=0)],
        [user("naïve 👍🏽"), assistant("日本語")],
    ]
    expected = pack_marked([{"messages": m} for m in conversations], template=CHATML)
    assert len(expected) == 3
    assert '<call>{"arguments": {"city": "Oslo"}, "name": "weather"}</call>' in expected[1]
    assert "⟦Sunny" not in expected[1]
    assert pack_marked(parquet({"messages": conversations}), template=CHATML) == expected


def test_parquet_columns_of_pairs_and_instructions(folder: Path) -> None:
    pairs = {"question": ["Say hi."], "answer": ["Hello"], "id": [1]}
    assert pack_marked(parquet(pairs), template=None) == [PAIR]
    alpaca = {
        "instruction": ["Say hi."] * 2,
        "input": ["In French.", None],
        "output": ["Salut"] * 2,
    }
    assert pack_marked(parquet(alpaca), template=None) == [WITH_INPUT, WITHOUT_INPUT]


@pytest.mark.parametrize(("name", "comma"), [("data.csv", ","), ("data.tsv", "\t")])
def test_csv_of_prompts_and_completions(folder: Path, name: str, comma: str) -> None:
    lines = [["id", "completion", "prompt"], ["1", "Hello", "Say hi."], ["2", '"a\nb"', "Say hi."]]
    Path(name).write_text("".join(comma.join(line) + "\n" for line in lines))
    assert pack_marked(Path(name), template=None) == [PAIR, "Say hi.⟦a\nb<eos>⟧"]


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_csv_with_conversations_as_json_text(folder: Path, column: str) -> None:
    talk = {"messages": HI, "conversations": HI_SHAREGPT}[column]
    with open("data.csv", "w", newline="") as file:
        csv.writer(file).writerows([["id", column, "tools"], ["1", json.dumps(talk), ""]])
    assert pack_marked(Path("data.csv")) == [HI_MARKED]


@pytest.mark.parametrize("form", ["file", "stream"])
def test_arrow_gives_what_json_lines_give(folder: Path, form: str) -> None:
    table = pa.table({"conversations": [HI_SHAREGPT, None]})
    make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with make("data.arrow", table.schema) as writer:
        writer.write_table(table)
    assert pack_marked(Path("data.arrow"), "--on-error", "skip") == [HI_MARKED]


def test_compressed_and_from_stdin(folder: Path) -> None:
    lines = write([chat(*HI)]).read_bytes()
    Path("data.jsonl.gz").write_bytes(gzip.compress(lines))
    assert pack_marked(Path("data.jsonl.gz")) == [HI_MARKED]
    Path("tags.jinja").write_text(TAGS)
    options = ("-l", 512, "-t", "bytes", "-o", "stdin", "--chat-template", "tags.jinja")
    assert packer_process("pack", "-", *options, stdin=lines).returncode == 0
    assert marked("stdin") == [HI_MARKED]


# Tools


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER]), WEATHER])
def test_tools_as_a_list_an_object_and_json_text(folder: Path, tools: Any) -> None:
    found = pack_marked([chat(*HI, tools=tools)], template=CHATML)[0]
    assert found.startswith(f"<tools>{json.dumps([WEATHER])}</tools>\n<|im_start|>user\nHi")


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools(folder: Path, tools: Any) -> None:
    found = pack_marked([chat(*HI, tools=tools), chat(*HI)], template=CHATML)
    assert found[0] == found[1]
    assert "tools" not in found[0]


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
    [found] = pack_marked([{"conversations": turns}], template=CHATML)
    assert found == (
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
    [found] = pack_marked([{"conversations": turns}])
    assert found.replace("⟦", "").replace("⟧", "").startswith(f"<{role}>So.</{role}>")
    assert ("⟦So." in found) == (role == "assistant")


def test_flags_of_sharegpt_messages(folder: Path) -> None:
    turns = [
        HI_SHAREGPT[0],
        {"from": "function_call", "value": json.dumps(CALL), "train": False},
        {"from": "gpt", "value": "Hello", "weight": 0},
        {"from": "gpt", "value": "Bye", "weight": 1},
    ]
    [found] = pack_marked([{"conversations": turns}], template=CHATML)
    assert found.split("⟦")[1:] == ["Bye<|im_end|>\n⟧"]


def test_several_calls_at_once(folder: Path) -> None:
    turns = [HI_SHAREGPT[0], {"from": "tool_call", "value": json.dumps([CALL, CALL])}]
    [found] = pack_marked([{"conversations": turns}], template=CHATML)
    assert found.endswith(f"⟦{f'<call>{json.dumps(CALL)}</call>' * 2}<|im_end|>\n⟧")


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


# Content


def test_content_that_is_null_or_missing(folder: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    records = [chat(user("Weather?"), call), chat(user("Weather?"), call | {"content": None})]
    expected = f"⟦<call>{json.dumps(CALL)}</call><|im_end|>\n⟧"
    for found in pack_marked(records, template=CHATML):
        assert found.endswith(expected)


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_an_answer_without_anything_in_it_is_no_answer(
    folder: Path, content: dict[str, None]
) -> None:
    empty = {"role": "assistant", **content}
    place = "messages[1] is the assistant's and has neither content nor tool calls"
    refused([chat(user("Hi"), empty)], 1, place)
    [found] = pack_marked([chat(user("Hi"), empty | {"weight": 0}, assistant("Yo"))], template=TAGS)
    assert found == "<user>Hi</user><assistant></assistant><assistant>⟦Yo</assistant>⟧"


def test_a_template_that_needs_content_gets_an_empty_one(folder: Path) -> None:
    strict = TAGS.replace("{{ m.content }}", "{{ '[' + m['content'] + ']' }}")
    silent = {"role": "assistant", "tool_calls": []}
    [found] = pack_marked([chat(user("Hi"), silent)], template=strict)
    assert found == "<user>[Hi]</user><assistant>⟦[]</assistant>⟧"


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
        (assistant(None, tool_calls=["no"]), "messages[1].tool_calls is no call"),
        (assistant(None, function_call={"a": 1}), "messages[1].function_call is no call"),
        ({"from": "function_call", "value": ""}, "messages[1].value is no call"),
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
    [found] = pack_marked([chat(user("Hi"), assistant(parts))], template=template)
    assert found == "<user>Hi</user><assistant>⟦(Hel)(lo)</assistant>⟧"


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
    wrong = "field 'prompt' is list, expected a string"
    assert_error(run([texts, messages], template=None), 1, "data.jsonl, line 2 (byte ", wrong)
    columns = {"prompt": [HI[:1]], "completion": [HI[1:]]}
    assert pack_marked(parquet(columns)) == [HI_MARKED]
    lines = b"".join(json.dumps(one).encode() + b"\n" for one in (messages, texts))
    Path("tags.jinja").write_text(TAGS)
    options = ("-l", 512, "-t", "bytes", "-o", "stdin", "--chat-template", "tags.jinja")
    assert packer_process("pack", "-", *options, stdin=lines).returncode == 0
    assert marked("stdin") == [HI_MARKED] * 2


# Bad records

MALFORMED = {
    "messages is a number": ({"messages": 5}, "field 'messages' is an integer"),
    "messages is null": ({"messages": None}, "field 'messages' is null"),
    "messages is an object": ({"messages": {}}, "field 'messages' is an object"),
    "no messages": ({"messages": []}, "field 'messages' has no messages"),
    "bad JSON": ({"messages": "[{"}, "field 'messages' is text that is not valid JSON"),
    "JSON of no list": ({"messages": "5"}, "field 'messages' is an integer"),
    "message is text": (chat("Hi"), "messages[0] is a string, expected an object"),
    "message is null": (chat(HI[0], None), "messages[1] is null, expected an object"),
    "no role": (chat({"content": "Hi"}), "messages[0].role is missing"),
    "role is a number": (chat({"role": 1, "content": ""}), "messages[0].role is an integer"),
    "from is a number": (chat({"from": 1, "value": ""}), "messages[0].role is an integer"),
    "content is a number": (chat(HI[0], assistant(3)), "messages[1].content is an integer"),
    "content is an object": (chat(user({"text": "Hi"})), "messages[0].content is an object"),
    "an image": (
        chat(user([{"type": "text", "text": "See:"}, {"type": "image", "image": "x.png"}])),
        "messages[0].content[1] is of type 'image'; only text can be packed",
    ),
    "a part without text": (chat(user([{"type": "text"}])), "content[0] is without a text"),
    "a part that is a number": (chat(user([5])), "content[0] is without a text"),
    "weight": (chat(HI[0], assistant("Hi", weight=2)), "messages[1].weight is 2, expected 0 or 1"),
    "train": (chat(assistant("Hi", train="no")), "messages[0].train is 'no', expected 0 or 1"),
    "weight is a list": (chat(assistant("Hi", weight=[])), "messages[0].weight is []"),
    "tools is a number": (chat(*HI, tools=5), "field 'tools' is an integer"),
    "tools is bad JSON": (chat(*HI, tools="{"), "field 'tools' is text that is not valid JSON"),
    "tools is JSON of a number": (chat(*HI, tools="5"), "field 'tools' is an integer"),
    "a call without a name": (
        chat({"from": "function_call", "value": '{"arguments": {}}'}),
        "messages[0].value is no call",
    ),
    "a call of bad JSON": (
        chat({"from": "function_call", "value": "weather()"}),
        "field 'messages[0].value' is text that is not valid JSON",
    ),
    "prompt is a number": ({"prompt": 5, "completion": "a"}, "field 'prompt' is int"),
    "completion is null": ({"prompt": "a", "completion": None}, "field 'completion' is null"),
    "completion is an empty list": ({"prompt": "a", "completion": []}, "has no messages"),
    "instruction is null": (
        {"instruction": None, "output": "a"},
        "field 'instruction' is null",
    ),
    "input is a list": ({"instruction": "a", "input": [], "output": "a"}, "field 'input' is list"),
    "output is an object": ({"instruction": "a", "output": {}}, "field 'output' is dict"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_field_is_one_line_of_error(folder: Path, name: str) -> None:
    record, reason = MALFORMED[name]
    refused([record], 1, "data.jsonl, line 1 (byte 0): ", reason)


def test_a_later_record_that_does_not_fit_is_a_bad_record(folder: Path) -> None:
    records = [chat(*HI), {"text": "Hi"}, chat(*HI), {"messages": 5}, ["a"]]
    place = positions(records)
    assert_error(run(records), 1, f"data.jsonl, line 2 (byte {place[1]}): no field 'messages'")
    manifest = pack_chat(records, "--on-error", "skip")
    assert manifest["documents"] == 2
    assert manifest["rejected_records"] == 3
    rejected = [json.loads(line) for line in Path("out/rejected.jsonl").read_text().splitlines()]
    assert [one["position"] for one in rejected] == [place[1], place[3], place[4]]
    assert rejected[0]["reason"] == "no field 'messages'; fields found: text"
    assert rejected[1]["reason"] == "field 'messages' is an integer, expected a list of messages"


def test_a_bad_row_of_parquet_is_named(folder: Path) -> None:
    path = parquet({"messages": [HI, [], HI]})
    refused(path, 1, "data.parquet, row group 0, row 1", "field 'messages' has no messages")
    assert pack_chat(path, "--on-error", "skip")["rejected_records"] == 1


def test_other_files_of_another_shape_have_bad_records(folder: Path) -> None:
    write([chat(*HI)], "a.jsonl")
    write([{"prompt": "Hi", "completion": "Hello"}], "b.jsonl")
    result = run("a.jsonl", "b.jsonl")
    assert_error(result, 1, "b.jsonl, line 1 (byte 0): no field 'messages'")
    assert pack_chat("a.jsonl", "b.jsonl", "--on-error", "skip")["documents"] == 1


def test_a_record_that_the_template_refuses_is_a_bad_record(folder: Path) -> None:
    picky = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    records = [chat(*HI), chat(assistant("Hello"))]
    how = {"template": picky + TAGS}
    parts = (f"line 2 (byte {positions(records)[1]})", "the chat template refuses it: user first")
    refused(records, 1, *parts, **how)
    assert pack_marked(records, "--on-error", "skip", **how) == [HI_MARKED]


@pytest.mark.parametrize(
    "failing",
    ["1 // (messages | length - 3)", "range(10 ** 9)", "messages[0].content + 1", "nothing.at.all"],
)
def test_a_record_that_the_template_fails_on_is_a_bad_record(folder: Path, failing: str) -> None:
    template = "{% if messages | length == 3 %}{{ " + failing + " }}{% endif %}" + TAGS
    records = [chat(*HI), chat(*HI, user("Bye"))]
    assert "the chat template" in run(records, template=template).stderr
    assert pack_marked(records, "--on-error", "skip", template=template) == [HI_MARKED]
