"""Records of every shape and dialect as documents: ⟦what is trained on⟧, and what is refused."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import unaltered
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
from support import assert_error, line_limit, packer, succeeds

HI = [user("Hi"), assistant("Hello")]
HI_MARKED = "<user>Hi</user><assistant>⟦Hello</assistant>⟧"
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
CALLED = f"<call>{json.dumps(CALL)}</call>"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}
TOOLS = f"<tools>{json.dumps([TOOL])}</tools>\n"
ASKED = {"question": "Say hi.", "answer": "Hello"}
PAIR = "Say hi.⟦Hello<eos>⟧"
ANSWER = "<assistant>⟦Hello</assistant>⟧"
AS_CHAT, AS_ALPACA = "--prompt-template chat", "--prompt-template alpaca"
KIND, IN_FRENCH = "<system>Be kind.</system>", "<user>Say hi.\nIn French.</user>"
ALPACA = {"instruction": "Say hi.", "input": "In French.", "output": "Salut"}
SALUT = {"instruction": "Say hi.", "output": "Salut"}
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSay hi.\n\n### Input:\nIn French.\n\n### Response:\n⟦Salut<eos>⟧"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\nSay hi.\n\n### Response:\n⟦Salut<eos>⟧"
)
OWN_SYSTEM = WITH_INPUT.replace(WITH_INPUT.partition("\n\n")[0], "Be kind.")
CONTENT_PARTS = [{"type": "text", "text": "Hel"}, {"text": "l"}, "o"]
SPOKEN = [{"speaker": "human", "text": "Hi"}, {"speaker": "gpt", "text": "Hello"}]
SPEAKER_TEXT = "--field role=speaker --field content=text"
MANY = {"messages": HI, "text": "Plain", "prompt": "Say hi.", "completion": "Hello"}

# the record, options, its document
CASES: dict[str, tuple[Any, str, str]] = {
    "messages": ({"messages": HI}, "", HI_MARKED),
    "messages as JSON text": ({"messages": json.dumps(HI)}, "", HI_MARKED),
    "conversations": ({"conversations": SHAREGPT}, "", HI_MARKED),
    "conversations in OpenAI style": ({"conversations": HI}, "", HI_MARKED),
    "role and value": (chat({"role": "user", "value": "Hi"}, HI[1]), "", HI_MARKED),
    "question": (ASKED, "", PAIR),
    "alpaca": (ALPACA, "", WITH_INPUT),
    "alpaca without input": (SALUT, "", WITHOUT_INPUT),
    "alpaca with a system prompt": (ALPACA | {"system": "Be kind."}, "", OWN_SYSTEM),
    "context of Dolly": ({"instruction": "Say hi.", "context": "In French.", "response": "Salut"},
                         "", WITH_INPUT),
    "context": (ASKED | {"context": "A passage."}, "", "Say hi.\nA passage.⟦Hello<eos>⟧"),
    "context, as alpaca": ({"prompt": "Say hi.", "context": "In French.", "completion": "Salut"},
                           AS_ALPACA, WITH_INPUT),
    "a context that --field maps": ({"context": "Say hi.", "response": "Hello"},
                                    "--field prompt=context", PAIR),
    "system_prompt of OpenOrca": (ASKED | {"system_prompt": "Be kind."}, "", "Be kind.\n\n" + PAIR),
    "system": ({"conversations": SHAREGPT, "system": "Be kind."}, "", KIND + HI_MARKED),
    "system that is no text": ({"conversations": SHAREGPT, "system": ["No"]}, "", HI_MARKED),
    "the conversation's own system": (
        {"system": "No", "conversations": [{"from": "system", "value": "Be kind."}, *SHAREGPT]},
        "", KIND + HI_MARKED),
    "system beside a prompt of messages": (
        {"prompt": HI[:1], "completion": HI[1:], "system": "Be kind."}, "", KIND + HI_MARKED),
    "a context that is no text": (ASKED | {"context": {"title": "A"}}, "", PAIR),
    "shape text": (MANY, "--shape text", "P⟦lain<eos>⟧"),
    "shape openai": ({"conversations": SHAREGPT[:1], "messages": HI},
                     "--shape openai --train-on last-assistant", HI_MARKED),
    "shape sharegpt": ({"conversations": SHAREGPT, "messages": HI[:1]},
                       "--shape sharegpt --train-on last-assistant", HI_MARKED),
    "keys": ({"messages": SPOKEN}, SPEAKER_TEXT, HI_MARKED),
    "keys in prompts": ({"prompt": SPOKEN[:1], "completion": SPOKEN[1:]}, SPEAKER_TEXT, HI_MARKED),
    "keys before those that are known": (
        {"messages": [one | {"role": "x", "content": "y"} for one in SPOKEN]}, SPEAKER_TEXT,
        HI_MARKED),
    "roles": (chat({"role": "Ann", "content": "Hi"}, {"role": "Bo", "content": "Hello"}),
              "--role Ann=user --role Bo=assistant", HI_MARKED),
    "a role of the template's own": (
        chat({"role": "observation", "content": "3 C"}, *HI), "--role observation=observation",
        "<observation>3 C</observation>" + HI_MARKED),
    "content in parts": (chat(user([{"type": "text", "text": "Hi"}]), assistant(CONTENT_PARTS)), "",
                         HI_MARKED),
    "a prompt of messages": (
        {"prompt": [user("Hi"), assistant("Yes?"), user("Bye")], "completion": "Ciao"}, "",
        "<user>Hi</user><assistant>Yes?</assistant><user>Bye</user><assistant>⟦Ciao</assistant>⟧"),
    "a completion of messages": ({"prompt": "Hi", "completion": HI[1:]}, "", HI_MARKED),
    "a prompt and its completion as JSON text": (
        {"prompt": json.dumps(HI[:1]), "completion": json.dumps(HI[1:])}, "", HI_MARKED),
    "a prompt as JSON text": ({"prompt": json.dumps(HI[:1]), "answer": "Hello"}, "", HI_MARKED),
    "a completion that is one message": ({"prompt": "Hi", "completion": HI[1]}, "", HI_MARKED),
    "an answer that is JSON text of messages": (
        {"prompt": "Hi", "completion": json.dumps(HI[1:])}, "--prompt-template chat",
        HI_MARKED.replace("Hello", json.dumps(HI[1:]))),
    "a prompt that is JSON text of something else": (
        {"prompt": '{"author": "Ann"}', "completion": "Hello"}, "--prompt-template chat",
        HI_MARKED.replace("Hi", '{"author": "Ann"}')),
    "earlier turns beside a prompt of messages": (
        {"prompt": HI[:1], "completion": "Hello", "history": [["a", "b"]]}, "",
        f"<user>a</user><assistant>b</assistant>{HI_MARKED}"),
    "a prompt that is one message": ({"prompt": json.dumps(HI[0]), "completion": "Hello"}, "",
                                     HI_MARKED),
    "keys in JSON text": ({"prompt": json.dumps(SPOKEN[:1]), "completion": json.dumps(SPOKEN[1:])},
                          SPEAKER_TEXT, HI_MARKED),
    "messages that are JSON text each": (chat(*map(json.dumps, HI)), "", HI_MARKED),
    "a column of JSON text": ({"dialogue": json.dumps(SHAREGPT)}, "--field messages=dialogue",
                              HI_MARKED),
    "a prompt that is no JSON of messages": (
        {"prompt": '[{"a": 1}]', "completion": "Hello"}, "", '[{"a": 1}]⟦Hello<eos>⟧'),
}  # fmt: skip
SPEAKERS = {
    "user": ("human", "User"),
    "assistant": ("gpt", "chatgpt", "bot", "model", "Assistant", "GPT"),
    "tool": ("observation", "function", "function_response", "tool_response", "ipython"),
}
CASES |= {
    f"speaker {speaker} in {key}": (
        {"messages": [{key: speaker, content: "So."}, *HI]},
        "",
        (f"<{role}>So.</{role}>" if role != "assistant" else "<assistant>⟦So.</assistant>⟧")
        + HI_MARKED,
    )
    for role, speakers in SPEAKERS.items()
    for speaker in speakers
    for key, content in (("from", "value"), ("role", "content"))
}


@pytest.mark.parametrize("name", CASES)
def test_a_record_is_a_document(folder: Path, name: str) -> None:
    record, options, expected = CASES[name]
    given = shlex.split(options)
    how = {} if "<user>" in expected else {"template": None}
    assert pack_marked([record], *given, **how) == [expected]
    config = json.loads(Path("out/manifest.json").read_text())["config"]
    named = ["=".join(pair) for pair in config["fields"] + config["roles"]]
    assert sorted(named) == sorted(one for one in given if "=" in one)
    if all(isinstance(value, str) for value in record.values()):
        with open("data.csv", "w", newline="") as file:
            csv.writer(file).writerows([record.keys(), record.values()])
        pq.write_table(pa.table({key: [value] for key, value in record.items()}), "data.parquet")
        for path in (Path("data.parquet"), Path("data.csv")):
            assert pack_marked(path, *given, **how) == [expected]


# The record, and its text from the first trained token on: conversations with calls of tools.
TURNS = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Weather?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "sunny"},
    {"from": "gpt", "value": "Sunny."},
]
CALLS = {
    **{f"roles of ShareGPT under {key}": (
        {"conversations": [{key: one["from"], text: one["value"]} for one in TURNS]},
        f"{CALLED}<|im_end|>\n⟧<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
        "⟦Sunny.<|im_end|>\n⟧") for key, text in (("from", "value"), ("role", "content"))},
    "flags of ShareGPT": (
        {"conversations": [*TURNS[:2], TURNS[2] | {"train": False},
                           {"from": "gpt", "value": "Hello", "weight": 0},
                           {"from": "gpt", "value": "Bye", "weight": 1}]},
        "Bye<|im_end|>\n⟧"),
    "several at once": ({"conversations": [SHAREGPT[0], {"from": "tool_call",
                                                         "value": json.dumps([CALL, CALL])}]},
                        f"{CALLED * 2}<|im_end|>\n⟧"),
    "an object": ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": CALL}]},
                  f"{CALLED}<|im_end|>\n⟧"),
    **{f"{key} as {kind}": (chat(user("?"), assistant(None, **{key: value})),
                            f"{CALLED}<|im_end|>\n⟧")
       for key, calls in (("function_call", CALL),
                          ("tool_calls", [{"type": "function", "function": CALL}]))
       for kind, value in (("values", calls), ("JSON text", json.dumps(calls)))},
    "without content": (chat(user("?"), {"role": "assistant", "tool_calls": [{"function": CALL}]}),
                        f"{CALLED}<|im_end|>\n⟧"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_in_every_dialect(folder: Path, name: str) -> None:
    record, expected = CALLS[name]
    [text] = pack_marked([record], template=CHATML)
    assert text.partition("⟦")[2] == expected
    assert ("system\nBe brief.<|im_end|>" in text) == ("Be brief." in json.dumps(record))


@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], TOOL, None, "[]"]
)
def test_tools_in_every_form(folder: Path, tools: Any) -> None:
    shown, plain = pack_marked([chat(*HI, tools=tools), chat(*HI)], template=CHATML)
    assert shown == (TOOLS if tools not in (None, "", [], "[]") else "") + plain
    columns = {"messages": [HI, HI], "tools": [json.dumps([TOOL]), None]}
    pq.write_table(pa.table(columns), "data.parquet")
    assert pack_marked(Path("data.parquet"), template=CHATML) == [TOOLS + plain, plain]
    template = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}" + TAGS
    texts = pack_marked([ASKED | {"tools": tools}], *AS_CHAT.split(), template=template)
    assert texts == [shown[: shown.index("<|im_start|>")] + f"<user>Say hi.</user>{ANSWER}"]


THINKS = TAGS.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}",
)


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
@pytest.mark.parametrize("record", [ASKED, {"instruction": "Say hi.", "output": "Hello"}])
def test_reasoning_beside_an_answer(folder: Path, name: str, record: Any) -> None:
    thought = "<user>Say hi.</user><assistant>⟦<think>Politely.</think>Hello</assistant>⟧"
    texts = pack_marked([record | {name: "Politely."}], *AS_CHAT.split(), template=THINKS)
    assert texts == [thought]
    talk = {"prompt": [user("Say hi.")], "completion": "Hello", name: "Politely."}
    talks = [talk, talk | {"completion": [assistant("Hello")]}]
    assert pack_marked(talks, template=THINKS) == [thought] * 2
    written = assistant("Hello", reasoning_content="Politely.")
    other = talk | {"completion": [written], name: "Something else."}
    Path("thinks.jinja").write_text(THINKS)
    how = ("-l", 512, "-t", "bytes", "-o", "out", "--chat-template", "thinks.jinja", "--overwrite")
    said = packer("pack", write([talk, other]), *how).stderr
    assert f"neither packer nor the chat template reads {name} (1)" in said
    assert marked("out") == [thought] * 2


SWITCHES = ["on", "OFF", "/no_think", None, True, 1]


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_switches_are_no_reasoning(folder: Path, name: str, form: str) -> None:
    switches = SWITCHES if form == "jsonl" else SWITCHES[:4]  # a column of Parquet has one type
    plain = "<user>Say hi.</user><assistant>⟦Hello</assistant>⟧"

    def packed(records: list[Any], *options: str) -> set[str]:
        data = records if form == "jsonl" else in_form(form, records)
        return {*pack_marked(data, *options, template=THINKS)}

    for record in (ASKED, {"instruction": "Say hi.", "output": "Hello"}):
        given = [record | {name: one} for one in (*switches, "detailed thinking on")]
        assert packed(given, *AS_CHAT.split()) == {plain}
    beside = {"prompt": [user("Say hi.")], "completion": "Hello"}
    assert packed([beside | {name: one} for one in (*switches, "detailed thinking on")]) == {plain}
    talks = [chat(user("Say hi."), assistant("Hello", **{name: one})) for one in switches]
    assert packed(talks) == {plain}


def test_unknown_speakers_are_named_with_the_roles_that_help(folder: Path) -> None:
    talks = [
        [{"role": "customer", "content": "Hi"}, assistant("Hello")],
        [{"from": "Ann", "value": "Hi"}, {"from": "The Owl", "value": "Hello"}],
    ]
    third = chat(user("Hi"), {"role": "environment", "content": "12"}, assistant("Hello"))
    assert "say who they are: --role environment=tool\n" in run([third]).stderr
    warning = "unknown speakers: customer; say who they are: --role customer=user\n"
    for record in (chat(*talks[0]), {"prompt": talks[0][:1], "completion": "Hello"}):
        result = run([record])
        assert result.exit_code == 0
        assert warning in result.stderr
        assert "unknown" not in run([record], template=f"{{# 'customer' #}}{TAGS}").stderr
        assert "unknown" not in run([record], "--role", "customer=user").stderr
    assert marked("out") == [HI_MARKED]
    for record in (
        {"conversations": talks[1]},
        {"prompt": talks[1][:1], "completion": talks[1][1:]},
    ):
        result = run([record, chat(*HI)] if "prompt" not in record else [record])
        assert result.exit_code == 1
        error, tip = result.stderr.splitlines()[-2:]
        assert error.endswith("no message is the assistant's; unknown speakers: Ann, The Owl")
        options = shlex.split(tip.partition("speaks: ")[2])
        assert pack_marked([record], *options) == [HI_MARKED]


EARLIER = [["Hi", "Hello"], ["Bye", "Ciao"]]
TURNED = (
    "<user>Hi</user><assistant>Hello</assistant><user>Bye</user><assistant>Ciao</assistant>"
    "<user>Say hi.</user><assistant>⟦Hello</assistant>⟧"
)


EARLIER_MESSAGES = [
    {"from": speaker, "value": text}
    for turn in EARLIER
    for speaker, text in zip(("human", "gpt"), turn, strict=True)
]


@pytest.mark.parametrize(
    "history",
    [EARLIER, json.dumps(EARLIER), EARLIER_MESSAGES, json.dumps(EARLIER_MESSAGES),
     [], None, "long ago"],
)  # fmt: skip
@pytest.mark.parametrize("record", [ASKED, {"instruction": "Say hi.", "output": "Hello"}])
def test_history_becomes_earlier_turns_or_is_refused(
    folder: Path, record: Any, history: Any
) -> None:
    has_turns = "Ciao" in str(history)
    expected = TURNED if has_turns else TURNED[TURNED.index("<user>Say") :]
    for form in ("jsonl", "parquet"):
        path = in_form(form, [record | {"history": history}])
        assert pack_marked(path, *AS_CHAT.split(), template=TAGS) == [expected]
        result = run(path, template=None)
        assert result.exit_code == has_turns
        said = "field 'history' has earlier messages (4), and such prompts have no place for them"
        assert (said in result.stderr) == has_turns
    text = (
        "The patient came with a headache, and left the hospital after two days without any help."
    )
    said = run([record | {"history": text * 2}]).stderr
    assert "ignored text in history" in said
    for other in (["Hi", "Hello"], [["Hi", None]], [{"q": "Hi", "a": "Hello"}]):
        said = run([record | {"history": other}], *AS_CHAT.split()).stderr
        assert "field 'history' is a list of neither messages nor questions with their" in said


# how a template writes the arguments of a call
ARGUMENTS = {
    "dumped": "{{ c.function.arguments | tojson }}",
    "as text": "{{ c.function.arguments }}",
    "joined": "{{ '' + c.function.arguments }}",
    "of either type": "{{ c.function.arguments if c.function.arguments is string "
    "else c.function.arguments | tojson }}",
    "dumped with the call": "{{ c.function | tojson }}",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_calls_are_written_as_one_object(folder: Path, name: str) -> None:
    one = f"{{% for c in m.tool_calls or [] %}}<call>{ARGUMENTS[name]}</call>{{% endfor %}}"
    template = TAGS.replace("{{ m.content }}", "{{ m.content or '' }}" + one)
    arguments = {"city": "Zürich", "days": [1, 2.5]}
    for given in (arguments, json.dumps(arguments)):
        call = {"function": {"name": "rain", "arguments": given}, "type": "function", "id": "1"}
        talk = [user("Hi"), assistant(None, tool_calls=[call]), user("So?"), assistant("Yes.")]
        [text] = pack_marked([chat(*talk)], template=template)
        written = json.loads(text.partition("<call>")[2].partition("</call>")[0])
        assert (written if name != "dumped with the call" else written["arguments"]) == arguments
    odd = {"function": {"name": "rain", "arguments": "not JSON"}}
    odd_talk = chat(user("Hi"), assistant("So", tool_calls=[odd]))
    [text] = pack_marked([odd_talk], "--train-on", "all", template=template)
    assert "not JSON" in text


def test_templates_that_take_content_otherwise(folder: Path) -> None:
    strict = TAGS.replace("{{ m.content }}", "{{ '[' + m['content'] + ']' }}")
    silent = {"role": "assistant", "tool_calls": []}
    [text] = pack_marked([chat(user("Hi"), silent)], template=strict)
    assert text == "<user>[Hi]</user><assistant>⟦[]</assistant>⟧"
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for shown in ("{{ m.content[0].text }}", "{{ m.content }}"):  # the user's parts only
        template = TAGS.replace(
            "{{ m.content }}",
            "{% if m.content is string %}{{ m.content }}{% elif m.role == 'user' %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% else %}"
            + shown
            + "{% endif %}",
        )
        record = chat(user([{"type": "text", "text": "Hi"}]), assistant(parts))
        assert pack_marked([record], template=template) == [HI_MARKED]


def test_other_keys_of_messages(folder: Path) -> None:
    called = {"role": "assistant", "content": "", "calls": [{"function": CALL}]}
    fields = ("--field", "tool_calls=calls", "--field", "train=learn")
    turns = [user("Hi"), assistant("Hm", learn=False), called]
    [text] = pack_marked([chat(*turns)], *fields, template=CHATML)
    assert text.split("⟦")[1:] == [f"{CALLED}<|im_end|>\n⟧"]


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"messages": HI}, "messages"),
        ({"conversation": SHAREGPT}, "conversations (conversations=conversation)"),
        (ASKED, "prompt-completion (prompt=question, completion=answer)"),
        ({"prompt": HI[:1], "answer": HI[1:]}, "prompt-completion of messages (completion=answer)"),
        (ALPACA, "alpaca"),
    ],
)
def test_what_was_detected_is_said_and_stored(folder: Path, record: Any, shape: str) -> None:
    write([record])
    Path("tags.jinja").write_text(TAGS)
    is_chat = "messages" in shape or "conversations" in shape
    template = ["--chat-template", "tags.jinja"] if is_chat else []
    result = packer("pack", "data.jsonl", "-l", 512, "-t", "bytes", "-o", "out", *template)
    assert f"packer: records: {shape}" in result.stderr.splitlines()
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["config"]["shape"] == shape.split(" ", maxsplit=1)[0]


# In other files

NESTED = [
    {"id": 1, "data": {"talk": HI, "about": {"system": "S"}, "score": [1]}},
    {"id": 2, "data": {"talk": HI, "about": {"system": None}, "score": [1]}},
]


def in_form(form: str, records: list[Any]) -> Path:
    """A file of records in some format."""
    path, table = Path(f"data.{form}"), pa.Table.from_pylist(records)
    if form == "parquet":
        pq.write_table(table, path)
    elif form in ("arrow", "arrows"):
        make = pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream
        with make(path.with_suffix(".arrow"), table.schema) as writer:
            writer.write_table(table)
    elif form in ("csv", "tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="," if form == "csv" else "\t")
            writer.writerows([records[0].keys(), *(one.values() for one in records)])
    else:
        lines = map(json.dumps, records)
        path.write_text(json.dumps(records) if form == "json" else "\n".join(lines))
    return path if form != "arrows" else path.with_suffix(".arrow")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_dots_lead_to_columns_within_others(folder: Path, form: str) -> None:
    path = in_form(form, NESTED)
    refused(path, 1, "no", "'data.tlk'", options=["--field", "messages=data.tlk"])
    refused(path, 1, "records have no 'date.talk'", options=["--field", "messages=date.talk"])
    dots = ("--field", "conversations=data.talk", "--field", "system=data.about.system")
    assert pack_marked(path, *dots) == ["<system>S</system>" + HI_MARKED, HI_MARKED]
    packed = json.loads(Path("out/manifest.json").read_text())
    assert packed["config"]["shape"] == "conversations"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
def test_a_name_with_dots_comes_before_what_they_lead_to(folder: Path, form: str) -> None:
    path = in_form(form, [{"a": "within" if form == "csv" else {"b": "within"}, "a.b": "by name"}])
    assert pack_marked(path, "--text-field", "a.b", template=None) == ["b⟦y name<eos>⟧"]


def test_of_parquet_only_the_columns_that_dots_lead_to_are_read(folder: Path) -> None:
    records = [{"data": {"text": "short", "blob": str(i) * 2_000_000}} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(records), "data.parquet", compression="none")
    with line_limit(1_000):
        texts = pack_marked(Path("data.parquet"), "--text-field", "data.text", template=None)
    assert texts == ["s⟦hort<eos>⟧"] * 3


def test_parquet_gives_what_json_lines_give(folder: Path) -> None:
    function = dict(sorted(CALL.items()))  # the order that older versions of Arrow give to fields
    call = assistant(None, tool_calls=[{"type": "function", "function": function}])
    conversations = [
        [system("Be brief."), *HI],
        [user("Weather?"), call, {"role": "tool", "content": "sunny", "name": "weather"},
         assistant("Sunny.", weight=0)],
        [user("naïve 👍🏽"), assistant("日本語")],
    ]  # fmt: skip
    records = [{"messages": one} for one in conversations]
    expected = pack_marked(records, template=CHATML)
    assert '<call>{"arguments": {"city": "Oslo"}, "name": "weather"}</call>' in expected[1]
    assert "⟦Sunny" not in expected[1]
    assert pack_marked(in_form("parquet", records), template=CHATML) == expected


@pytest.mark.parametrize("form", ["csv", "tsv", "arrow", "arrows", "parquet"])
def test_other_files_give_what_json_lines_give(folder: Path, form: str) -> None:
    pairs = [{"id": 1, "completion": "Hello", "prompt": "Say hi."},
             {"id": 2, "completion": '"a\nb"', "prompt": "Say hi."}]  # fmt: skip
    expected = [PAIR, 'Say hi.⟦"a\nb"<eos>⟧']
    assert pack_marked(in_form(form, pairs), template=None) == expected
    for talk in ({"messages": json.dumps(HI)}, {"conversations": json.dumps(SHAREGPT)}):
        assert pack_marked(in_form(form, [{"id": 1, **talk, "tools": ""}])) == [HI_MARKED]
    if form not in ("csv", "tsv"):
        path = in_form(form, [{"conversations": SHAREGPT}, {"conversations": None}])
        assert pack_marked(path, "--on-error", "skip") == [HI_MARKED]


# As datasets 4.8 and later keep values of unlike types: JSON of an extension type, at any depth
JSON = pa.json_()
CONTENT = pa.struct([("role", pa.string()), ("content", JSON), ("tool_calls", pa.list_(JSON))])
A_MAP = pa.map_(pa.string(), pa.string())
A_CALL = pa.struct([("function", pa.struct([("name", pa.string()), ("arguments", A_MAP)]))])
MAPPED = pa.struct([("role", pa.string()), ("content", pa.string()),
                    ("tool_calls", pa.list_(A_CALL))])  # fmt: skip
A_TOOL = pa.struct([("type", pa.string()), ("function", pa.struct(
    [("name", pa.string()), ("parameters", A_MAP)]))])  # fmt: skip
IN_BYTES = pa.map_(pa.binary(), pa.binary())
TALKS = [
    [user("It says \"hi\", and {3}"), assistant([{"type": "text", "text": "Hel"}, {"text": "lo"}])],
    [user([{"type": "text", "text": "Rain?"}]), assistant("So:", tool_calls=[{"function": CALL}]),
     {"role": "tool", "content": "[1, 2]"}, assistant("Yes.")],
]  # fmt: skip
ARROW_JSON: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "messages": ([chat(*one) for one in TALKS], {"messages": pa.list_(JSON)}, ""),
    "contents": ([chat(*one) for one in TALKS], {"messages": pa.list_(CONTENT)}, ""),
    "columns": ([chat(*one, tools=[TOOL]) for one in TALKS], {"messages": JSON, "tools": JSON}, ""),
    "tools": ([chat(*TALKS[1], tools=[TOOL | {"strict": None}])],
              {"messages": JSON, "tools": pa.list_(JSON)}, ""),
    "a prompt of either kind": ([{"prompt": one[:1], "completion": one[1:]} for one in TALKS],
                                {"prompt": JSON, "completion": pa.list_(JSON)}, ""),
    "dots": ([{"data": {"talk": one}} for one in TALKS], {"data": JSON},
             "--field messages=data.talk"),
    "dots in structs": ([{"data": {"of": {"talk": one}}} for one in TALKS],
                        {"data": pa.struct([("of", JSON)])}, "--field messages=data.of.talk"),
    "texts": ([{"text": one} for one in ("Say", '"Say"')], {"text": JSON}, ""),
    "maps": ([chat(user("Rain?"), assistant("So:", tool_calls=[{"function": CALL}]), tools=[TOOL])],
             {"messages": pa.list_(MAPPED), "tools": pa.list_(A_TOOL)}, ""),
    "bytes": ([chat(*one) for one in (HI, HI)], {"messages": pa.list_(IN_BYTES)}, ""),
    "texts in bytes": ([{"text": one} for one in ("Say", "naïve")], {"text": pa.binary()}, ""),
    "a system prompt": ([chat(*HI, system="Be kind.")], {"messages": JSON, "system": JSON}, ""),
}  # fmt: skip


def as_stored(value: Any, kind: Any) -> Any:
    """A value with JSON text in the places of that type."""
    if value is None or kind == JSON:
        return None if value is None else json.dumps(value)
    if pa.types.is_binary(kind):
        return value.encode()
    if pa.types.is_map(kind):
        own = kind.key_type, kind.item_type
        return [tuple(map(as_stored, pair, own)) for pair in value.items()]
    if pa.types.is_list(kind):
        return [as_stored(one, kind.value_type) for one in value]
    if pa.types.is_struct(kind):
        return {field.name: as_stored(value.get(field.name), field.type) for field in kind}
    return value


def storage(kind: Any) -> Any:
    """The type with text in the places of JSON, in which Python values become arrays."""
    if pa.types.is_list(kind):
        return pa.list_(storage(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, storage(field.type)) for field in kind])
    return pa.string() if kind == JSON else kind


def with_json(records: list[Any], kinds: dict[str, Any]) -> Any:
    """A table of records whose columns have these types."""
    columns = {name: [as_stored(one.get(name), kind) for one in records]
               for name, kind in kinds.items()}  # fmt: skip
    return pa.table(
        {
            name: pa.array(own, storage(kinds[name])).cast(kinds[name])
            for name, own in columns.items()
        }
    )


@pytest.mark.parametrize("form", ["parquet", "arrow", "saved"])
@pytest.mark.parametrize("name", ARROW_JSON)
def test_json_of_arrow_is_what_json_lines_give(folder: Path, name: str, form: str) -> None:
    records, kinds, options = ARROW_JSON[name]
    template = (
        None if name.startswith("texts") else "{{ tools | tojson if tools else '' }}\n" + CHATML
    )
    expected = pack_marked(write(records), *shlex.split(options), template=template)
    path, table = Path(f"data.{form}"), with_json(records, kinds)
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    else:  # by Dataset.save_to_disk
        path.mkdir()
        state = {"_data_files": [{"filename": "data.arrow"}]}
        for beside in ("state.json", "dataset_info.json"):
            Path(path, beside).write_text(json.dumps(state))
        with pa.ipc.new_stream(path / "data.arrow", table.schema) as file:
            file.write_table(table)
    assert pack_marked(path, *shlex.split(options), template=template) == expected


def test_json_of_arrow_that_is_not_valid_is_a_bad_record(folder: Path) -> None:
    table = with_json([chat(*HI)] * 2, {"messages": pa.list_(JSON)})
    broken = pa.array([["{"], *table["messages"].to_pylist()[1:]]).cast(pa.list_(JSON))
    pq.write_table(pa.table({"messages": broken}), "data.parquet")
    assert_error(run(Path("data.parquet")), 1, "row 0", "the messages holds JSON that is not valid")
    assert pack_marked(Path("data.parquet"), "--on-error", "skip") == [HI_MARKED]
    cells = pa.array(['{"of": 1.5}', "{bad", '{"of": bad}']).cast(JSON)
    pq.write_table(pa.table({"text": ["a", "b", "c"], "reward": cells}), "text.parquet")
    command = ("pack", "text.parquet", "-l", 9, "-t", "bytes", "-o", "text", "--carry-default",
               "reward.of=0", "--carry", "reward.of:float32")  # fmt: skip
    assert_error(packer(*command), 1, "row 1", "the reward.of holds JSON that is not valid")
    succeeds(*command, "--on-error", "skip")
    manifest = json.loads(Path("text/manifest.json").read_bytes())
    assert (manifest["documents"], manifest["rejected_records"]) == (1, 2)


def test_compressed_and_from_stdin(folder: Path) -> None:
    lines = write([chat(*HI)]).read_bytes()
    Path("data.jsonl.gz").write_bytes(gzip.compress(lines))
    assert pack_marked(Path("data.jsonl.gz")) == [HI_MARKED]
    pairs = [{"prompt": HI[:1], "completion": HI[1:]}, {"prompt": "Hi", "completion": "Hello"}]
    assert pack_marked(pairs) == [HI_MARKED] * 2  # the first tells what prompts are
    lines += write([chat(*HI)]).read_bytes()
    Path("tags.jinja").write_text(TAGS)
    options = ("-l", 512, "-t", "bytes", "-o", "stdin", "--chat-template", "tags.jinja")
    assert unaltered("pack", "-", *options, stdin=lines).returncode == 0
    assert marked("stdin") == [HI_MARKED] * 2


def test_a_field_is_for_the_files_that_have_it(folder: Path) -> None:
    write([ASKED], "a.jsonl")
    write([{"picked": HI, "text": "Hi"}], "b.jsonl")
    Path("tags.jinja").write_text(TAGS)
    command = ("pack", "a.jsonl", "b.jsonl", "-l", 512, "-t", "bytes", "-o", "out", "-q",
               "--chat-template", "tags.jinja")  # fmt: skip
    succeeds(*command, "--field", "messages=picked")
    assert marked("out") == [PAIR, HI_MARKED]
    succeeds("verify", "out", "--against-inputs")
    done = packer(*command, "--field", "messages=pick", "--overwrite")
    assert_error(done, 1, "a.jsonl: records have no 'pick'; fields found: question, answer")


def test_a_field_that_the_first_record_lacks(folder: Path) -> None:
    records = [ASKED, ASKED | {"more": {"about": "A passage."}}]
    passage = "Say hi.\nA passage.⟦Hello<eos>⟧"
    assert pack_marked(records, "--field", "context=more.about") == [PAIR, passage]
    wrong = run(records, "--field", "context=more.abuot")
    assert_error(wrong, 1, "records have no 'more.abuot'; fields found: question, answer")


# What is refused: the record, options, and what the error says.

FIELD = "--field messages=chosen"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "a field that is not there": (chat(*HI), FIELD, "no 'chosen'; fields found: messages"),
    "a field of another shape": ({"text": "Hi", "about": "me"}, "--field system=about",
                                 "records of shape text have no field 'system', which --field m"),
    "no shape": ({"foo": 1}, "", "fit none of"),
    "another shape": ({"text": "Hi"}, "--shape messages", "fit none of: messages"),
    "messages is a number": ({"messages": 5}, "", "field 'messages' is an integer"),
    "no messages": ({"messages": []}, "", "field 'messages' has no messages"),
    "bad JSON": ({"messages": "[{"}, "", "field 'messages' is text that is not valid JSON"),
    "message is text": (chat("Hi"), "", "messages[0] is a string, expected an object"),
    "no role": (chat({"content": "Hi"}), "", "messages[0].role is missing"),
    "role is a number": (chat({"role": 1, "content": ""}), "", "messages[0].role is an integer"),
    "content is a number": (chat(HI[0], assistant(3)), "", "messages[1].content is an integer"),
    "no content": (chat({"role": "user"}, HI[1]), "",
                   "messages[0] is the user's and has no content"),
    "an empty answer": (chat(user("Hi"), {"role": "assistant"}), "",
                        "messages[1] is the assistant's and has neither content nor tool calls"),
    "text in place of content": (chat(user("Hi"), {"role": "assistant", "text": "Hello"}), "",
                                 "messages[1] has 'text', expected 'role' and"),
    "an image": (chat(user([{"type": "text", "text": "See:"}, {"type": "image", "image": "x"}])),
                 "", "messages[0].content[1] is of type 'image'; only text can be packed"),
    "a part without text": (chat(user([{"type": "text"}])), "", "content[0] is without a text"),
    "weight": (chat(HI[0], assistant("Hi", weight=2)), "",
               "messages[1].weight is 2, expected 0 or 1"),
    "train": (chat(assistant("Hi", train="no")), "", "train is 'no', expected 0 or 1"),
    "tools is a number": (chat(*HI, tools=5), "", "field 'tools' is an integer"),
    "calls are text": (chat(user("Hi"), assistant(None, tool_calls="no")), "",
                       "messages[1].tool_calls' is text that is not valid"),
    "no call": (chat(user("Hi"), assistant(None, function_call={"a": 1})), "",
                "messages[1].function_call is not a call"),
    "a call without a name": (chat({"from": "function_call", "value": '{"arguments": {}}'}), "",
                              "messages[0].value is not a call"),
    "prompt is a number": ({"prompt": 5, "completion": "a"}, "", "field 'prompt' is an integer"),
    "completion is null": ({"prompt": "a", "completion": None}, "", "'completion' is null"),
    "instruction is null": ({"instruction": None, "output": "a"}, "", "'instruction' is null"),
    "system is a list": (ASKED | {"system": ["a"]}, "--field system=system",
                         "field 'system' is a list, expected a string"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_record_is_one_line_of_error(folder: Path, name: str) -> None:
    record, options, message = REFUSED[name]
    fits = name not in list(REFUSED)[:4]
    place = "data.jsonl, line 1 (byte 0): " if fits else "data.jsonl: "
    refused([record], 1, place, message, options=shlex.split(options))


def test_later_records_that_do_not_fit_are_bad_records(folder: Path) -> None:
    records = [chat(*HI), {"text": "Hi"}, chat(*HI), {"messages": 5}, ["a"]]
    place = positions(records)
    assert_error(run(records), 1, f"data.jsonl, line 2 (byte {place[1]}): no field 'messages'")
    manifest = pack_chat(records, "--on-error", "skip")
    assert (manifest["documents"], manifest["rejected_records"]) == (2, 3)
    rejected = [json.loads(line) for line in Path("out/rejected.jsonl").read_text().splitlines()]
    assert [one["position"] for one in rejected] == [place[1], place[3], place[4]]
    assert rejected[0]["reason"] == "no field 'messages'; fields found: text"
    assert rejected[1]["reason"] == "field 'messages' is an integer, expected a list of messages"
    path = in_form("parquet", [chat(*HI), chat(), chat(*HI)])
    place = "data.parquet, row group 0, row 1"
    assert_error(run(path), 1, place, "field 'messages' has no messages")


@pytest.mark.parametrize(
    "failing",
    ["raise_exception('user first')", "1 // (messages | length - 3)", "nothing.at.all"],
)
def test_a_record_that_the_template_fails_on_is_a_bad_record(folder: Path, failing: str) -> None:
    template = "{% if messages | length == 3 %}{{ " + failing + " }}{% endif %}" + TAGS
    records = [chat(*HI), chat(*HI, user("Bye"))]
    assert "the chat template" in run(records, template=template).stderr
    assert pack_marked(records, "--on-error", "skip", template=template) == [HI_MARKED]


LONG = "Something that is longer than a name."
RENAMED = [{"speaker": "Ann", "utterance": "Hi"}, {"speaker": "Agent", "utterance": "Hello"}]
# a record, and the options that the tip must name
TIPS: dict[str, tuple[Any, str]] = {
    "dialogue": ({"dialogue": HI}, "--field messages=dialogue"),
    "Messages": ({"id": "3", "Messages": HI}, "--field messages=Messages"),
    "ShareGPT": ({"talk": SHAREGPT}, "--field messages=talk"),
    "JSON text": ({"dialogue": json.dumps(HI)}, "--field messages=dialogue"),
    "nested": ({"data": {"n": 1, "messages": HI}}, "--field messages=data.messages"),
    "keys": ({"talk": RENAMED}, "--field messages=talk --field role=speaker "
             "--field content=utterance --role Ann=user --role Agent=assistant"),
    "roles": ({"talk": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]},
              "--field messages=talk"),
    "a question of messages": ({"task": HI[:1], "solution": "Hello"},
                               "--field prompt=task --field completion=solution"),
    "a context of messages": ({"context": HI[:1], "response": HI[1:]},
                              "--field prompt=context --field completion=response"),
    "messages without an answer": ({"messages": HI[:1], "answer": "Hello"},
                                   "--field prompt=messages --field completion=answer"),
    "content": ({"id": "x", "content": "Hello"}, "--field text=content"),
    "TEXT": ({"TEXT": "Hello", "url": "http://a"}, "--field text=TEXT"),
    "problem": ({"problem": "Say hi.", "solution": "Hello", "level": 3},
                "--field prompt=problem --field completion=solution"),
    "inputs": ({"inputs": "Say hi.", "targets": "Hello"},
               "--field prompt=inputs --field completion=targets"),
    "Alpaca": ({"Instruction": "Say hi.", "Input": "", "Output": "Hello"},
               "--field instruction=Instruction --field output=Output --field input=Input"),
}  # fmt: skip


@pytest.mark.parametrize("case", TIPS)
def test_a_tip_names_the_options_that_work(folder: Path, case: str) -> None:
    record, options = TIPS[case]
    template = TAGS if "[{" in json.dumps(record).replace("\\", "") else None
    for form in ("jsonl", "parquet"):
        path = in_form(form, [record] * 2)
        result = run(path, template=template)
        assert result.exit_code == 1
        assert result.stderr.strip().rpartition("tip: ")[2].endswith(options), result.stderr
    assert pack_chat(path, *shlex.split(options), template=template)["documents"]
    assert "⟦" in marked("out")[0]


@pytest.mark.parametrize(
    "record",
    [
        {"a": "x", "b": "y", "c": "z"},
        {"context": LONG, "question": LONG, "answers": {"text": ["x"]}},
    ],
)
def test_a_record_that_tells_nothing_has_the_general_tip(folder: Path, record: Any) -> None:
    assert "tip: name the text with --text-field, or map" in run([record], template=None).stderr
