"""Shapes of records are detected or named, and give the same documents in files of every format."""

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
    refused,
    run,
    system,
    user,
    write,
)
from dialects import CALL, HI, HI_MARKED, HI_SHAREGPT, parquet
from support import assert_error, packer, recover_documents

PAIR = "Say hi.⟦Hello<eos>⟧"


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
    texts = pack_marked([record], "--prompt-template", "chat")
    assert texts == ["<system>Be kind.</system>" + as_chat]
    own = WITH_INPUT.partition("\n\n")[0]
    assert pack_marked([record]) == [WITH_INPUT.replace(own, "Be kind.")]


ASKED = {"question": "Say hi.", "answer": "Hello"}
PASSAGE = {"context": "A passage."}
AS_CHAT = ("--prompt-template", "chat")
AS_ALPACA = ("--prompt-template", "alpaca")
ANSWER = "<assistant>⟦Hello</assistant>⟧"
# columns of well-known sets: the record, options, its text
WELL_KNOWN = {
    "context of Dolly": (
        {"instruction": "Say hi.", "context": "In French.", "response": "Salut"}, (), WITH_INPUT,
    ),
    "no context": ({"instruction": "Say hi.", "context": "", "response": "Salut"}, (),
                   WITHOUT_INPUT),
    "context": (ASKED | PASSAGE, (), "Say hi.\nA passage.⟦Hello<eos>⟧"),
    "context, as a chat": (ASKED | PASSAGE, AS_CHAT,
                           f"<user>Say hi.\nA passage.</user>{ANSWER}"),
    "context, as alpaca": (
        {"prompt": "Say hi.", "context": "In French.", "completion": "Salut"}, AS_ALPACA,
        WITH_INPUT,
    ),
    "a context that --field maps": (
        {"context": "Say hi.", "response": "Hello"}, ("--field", "prompt=context"), PAIR,
    ),
    "an answer under the name of a prompt": (
        {"prompt": "Say hi.", "question": "Hello", "answer": "other"},
        ("--field", "completion=question"), PAIR,
    ),
    "reasoning as the answer": (
        {"prompt": "Say hi.", "thinking": "Hello"}, ("--field", "completion=thinking"), PAIR,
    ),
    "a system prompt as the text": (
        {"system_prompt": "Hello"}, ("--field", "text=system_prompt"), "H⟦ello<eos>⟧",
    ),
    "a context as the system prompt": (
        ASKED | {"context": "Be kind.", "system_prompt": "other"}, ("--field", "system=context"),
        "Be kind.\n\nSay hi.⟦Hello<eos>⟧",
    ),
    "system_prompt of OpenOrca": (ASKED | {"system_prompt": "Be kind."}, (),
                                  "Be kind.\n\nSay hi.⟦Hello<eos>⟧"),
    "system_prompt, as a chat": (ASKED | {"system_prompt": "Be kind."}, AS_CHAT,
                                 f"<system>Be kind.</system><user>Say hi.</user>{ANSWER}"),
    "an empty system_prompt": (ASKED | {"system_prompt": ""}, AS_CHAT,
                               f"<user>Say hi.</user>{ANSWER}"),
    "system beside messages": ({"messages": HI, "system": "Be kind."}, (),
                               "<system>Be kind.</system>" + HI_MARKED),
    "system beside a prompt of messages": (
        {"prompt": HI[:1], "completion": HI[1:], "system": "Be kind."}, (),
        "<system>Be kind.</system>" + HI_MARKED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_columns_of_well_known_sets_are_used(folder: Path, name: str) -> None:
    record, options, expected = WELL_KNOWN[name]
    assert pack_marked([record], *options) == [expected]
    if all(isinstance(value, str) for value in record.values()):
        template = TAGS if options == AS_CHAT else None
        Path("data.csv").write_text(f"{','.join(record)}\n{','.join(record.values())}\n")
        for path in (parquet({key: [value] for key, value in record.items()}), Path("data.csv")):
            assert pack_marked(path, *options, template=template) == [expected]


THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
@pytest.mark.parametrize("kind", ["prompt-completion", "alpaca"])
def test_reasoning_beside_an_answer(folder: Path, name: str, kind: str) -> None:
    record = ASKED if kind != "alpaca" else {"instruction": "Say hi.", "output": "Hello"}
    texts = pack_marked([record | {name: "Politely."}], *AS_CHAT, template=THINKS)
    assert texts == ["<user>Say hi.</user><assistant>⟦<think>Politely.</think>Hello</assistant>⟧"]


@pytest.mark.parametrize("value", [{"title": "A"}, ["A"], True, 3])
@pytest.mark.parametrize("options", [(), AS_CHAT])
@pytest.mark.parametrize("name", ["system", "context"])
def test_known_columns_that_hold_no_text(
    folder: Path, name: str, options: tuple[str], value: Any
) -> None:
    how: dict[str, Any] = {} if options else {"template": None}
    record = ASKED | {name: value}
    expected = f"<user>Say hi.</user>{ANSWER}" if options else PAIR
    assert pack_marked([record], *options, **how) == [expected]
    mapped = ("--field", f"{name}={name}", *options)
    assert pack_marked([record | {name: type(value)()}], *mapped, **how) == [expected]
    wrong = f"data.jsonl, line 1 (byte 0): field '{name}' is {KINDS_OF[type(value)]}, expected a "
    assert_error(run([record], *mapped, **how), 1, wrong + "string")


KINDS_OF = {dict: "an object", list: "a list", bool: "true or false", int: "an integer"}
HI_TOOLS = [{"name": "rain"}]


def test_tools_beside_an_answer(folder: Path) -> None:
    shown = '<tools>[{"name": "rain"}]</tools><user>Say hi.</user>'
    template = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TAGS
    for tools in (HI_TOOLS, json.dumps(HI_TOOLS)):
        texts = pack_marked([ASKED | {"tools": tools}], *AS_CHAT, template=template)
        assert texts == [shown + ANSWER]
    pairs = {"prompt": "Say hi.", "chosen": "Hello", "rejected": "No", "tools": HI_TOOLS}
    assert pack_marked([pairs], *AS_CHAT, template=template)[0].startswith(shown + ANSWER)


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
    texts = pack_marked([talk], "--field", "conversations=talk", "--field", "system=about")
    assert texts == ["<system>Be kind.</system>" + HI_MARKED]


NESTED = [
    {"id": 1, "data": {"talk": HI, "about": {"system": "S"}, "score": [1]}},
    {"id": 2, "data": {"talk": HI, "about": {"system": None}, "score": [1]}},
]
DOTS = ("--field", "conversations=data.talk", "--field", "system=data.about.system")


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "arrow"])
def test_dots_lead_to_columns_within_others(folder: Path, form: str) -> None:
    path, table = Path(f"data.{form}"), pa.Table.from_pylist(NESTED)
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        lines = map(json.dumps, NESTED)
        path.write_text(json.dumps(NESTED) if form == "json" else "\n".join(lines))
    refused(path, 1, "no", "'data.tlk'", options=["--field", "messages=data.tlk"])
    refused(path, 1, "records have no 'date.talk'", options=["--field", "messages=date.talk"])
    assert pack_marked(path, *DOTS) == ["<system>S</system>" + HI_MARKED, HI_MARKED]
    packed = json.loads(Path("out/manifest.json").read_text())
    assert packed["config"]["shape"] == "conversations"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
def test_a_name_with_dots_comes_before_what_they_lead_to(folder: Path, form: str) -> None:
    records = [{"a": {"b": "within"}, "a.b": "by name"}]
    path = Path(f"data.{form}")
    if form == "jsonl":
        write(records)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("a,a.b\nwithin,by name\n")
    assert pack_marked(path, "--text-field", "a.b", template=None) == ["b⟦y name<eos>⟧"]


def test_of_parquet_only_the_columns_that_dots_lead_to_are_read(folder: Path) -> None:
    records = [{"data": {"text": "short", "blob": str(i) * 2_000_000}} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(records), "data.parquet", compression="none")
    given = ("--text-field", "data.text", "--max-line-bytes", 1_000)
    assert pack_marked(Path("data.parquet"), *given, template=None) == ["s⟦hort<eos>⟧"] * 3
    assert Path("data.parquet").stat().st_size > 6_000_000


def test_records_without_what_dots_lead_to(folder: Path) -> None:
    records: list[Any] = [{"a": {"b": "c"}}, {"a": 1}, {"a": {"b": 2}}, {"a": {"b": {"c": "d"}}}]
    reasons = [
        "no field 'a.b'; fields found: a",
        "field 'a.b' is an integer, expected a string",
        "field 'a.b' is an object, expected a string",
    ]
    for record, reason in zip(records[1:], reasons, strict=True):
        refused([records[0], record], 1, reason, options=["--text-field", "a.b"], template=None)


def test_a_field_that_is_not_there(folder: Path) -> None:
    parts = ("data.jsonl", "no 'chosen'", "fields found: messages")
    refused([chat(*HI)], 1, *parts, options=["--field", "messages=chosen"])
    options = ["--field", "system=about"]
    parts = ("data.jsonl", "records of shape text have no field 'system', which --field maps")
    refused([{"text": "Hi", "about": "me"}], 1, *parts, options=options)
    parts = ("data.jsonl", "fit none of", "fields found: foo")
    refused([{"foo": 1}], 1, *parts)
    refused([{"prompt": "Hi"}], 1, "fit none of", "prompt+completion", "fields found: prompt")
    refused([{"text": "Hi"}], 1, "fit none of: messages", options=["--shape", "messages"])
    failed = run([{"chosen": "Hi"}], "--shape", "preference")
    assert_error(failed, 1, "fit none of: chosen+rejected, ", "fields found: chosen")
    assert "tip: map other fields with --field NAME=COLUMN, or choose another --shape" in (
        failed.stderr
    )


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--shape", "chat"], ("--shape", "'chat' is not one of messages, ")),
        (["--field", "message=chosen"], ("--field", "'message' is not one of ")),
        (
            ["--field", "system=a", "--field", "tools=a"],
            ("--field: maps 'a' to 'system' and to 'tools'",),
        ),
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


OPENAI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
RENAMED = [{"speaker": "Ann", "utterance": "Hi"}, {"speaker": "Agent", "utterance": "Hello"}]
LONG = "Something that is longer than a name."
# a record, and the options that the tip must name
TIPS: dict[str, tuple[Any, str]] = {
    "dialogue": ({"dialogue": OPENAI}, "--field messages=dialogue"),
    "Messages": ({"id": "3", "Messages": OPENAI}, "--field messages=Messages"),
    "ShareGPT": ({"talk": HI_SHAREGPT}, "--field messages=talk"),
    "JSON text": ({"dialogue": json.dumps(OPENAI)}, "--field messages=dialogue"),
    "nested": ({"data": {"n": 1, "messages": OPENAI}}, "--field messages=data.messages"),
    "keys": (
        {"talk": RENAMED},
        "--field messages=talk --field role=speaker --field content=utterance --role Ann=user "
        "--role Agent=assistant",
    ),
    "roles": (
        {"talk": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]},
        "--field messages=talk --role human=user --role gpt=assistant",
    ),
    "keys of messages": (
        {"messages": [{"speaker": "human", "text": "Hi"}, {"speaker": "gpt", "text": "Hello"}]},
        "--field role=speaker --field content=text",
    ),
    "content": ({"id": "x", "content": "Hello"}, "--field text=content"),
    "TEXT": ({"TEXT": "Hello", "url": "http://a"}, "--field text=TEXT"),
    "one long": ({"id": "x", "prose": LONG, "date": "today"}, "--field text=prose"),
    "problem": (
        {"problem": "Say hi.", "solution": "Hello", "level": 3},
        "--field prompt=problem --field completion=solution",
    ),
    "inputs": (
        {"inputs": "Say hi.", "targets": "Hello"},
        "--field prompt=inputs --field completion=targets",
    ),
    "Alpaca": (
        {"Instruction": "Say hi.", "Input": "", "Output": "Hello"},
        "--field instruction=Instruction --field output=Output --field input=Input",
    ),
    "by position": (
        {"a title": LONG, "id": "3", "b": LONG},
        "--field 'prompt=a title' --field completion=b",
    ),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", TIPS)
def test_a_tip_names_the_options_that_work(folder: Path, case: str, count: int) -> None:
    record, options = TIPS[case]
    template = TAGS if "[{" in json.dumps(record).replace("\\", "") else None
    path = write([record] * count)
    result = run(path, template=template)
    assert result.exit_code == 1
    tip = result.stderr.strip().rpartition("tip: ")[2]
    assert tip.endswith(options), result.stderr
    assert pack_chat(path, *shlex.split(options), template=template)["documents"]
    assert "⟦" in marked("out")[0]


@pytest.mark.parametrize("form", ["parquet", "csv", "json"])
def test_a_tip_for_files_of_other_formats(folder: Path, form: str) -> None:
    path, record = Path(f"data.{form}"), {"problem": "Say hi.", "solution": "Hello"}
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        path.write_text(json.dumps([record]) if form == "json" else "problem,solution\nx,y\n")
    tip = run(path, template=None).stderr
    assert tip.endswith("tip: add --field prompt=problem --field completion=solution\n")


TELLS_NOTHING = [
    {"a": 1},
    {"a": "x", "b": "y", "c": "z"},
    {"a": [1], "b": [2]},
    {"title": "A", "question": LONG},
    {"context": LONG, "question": LONG, "answers": {"text": ["x"]}},  # SQuAD
]


@pytest.mark.parametrize("key", ["role", "from"])
def test_speakers_that_no_role_is_known_of(folder: Path, key: str) -> None:
    names = ("human", "bot") if key == "role" else ("User", "Assistant")
    text = "content" if key == "role" else "value"
    said = zip(names, ("Hi", "Hello"), strict=True)
    record = {"messages": [{key: name, text: words} for name, words in said]}
    result = run([record])
    assert_error(result, 1, "nothing to pack", "1 of those dropped have nothing to train on")
    tip = f"add --role {names[0]}=user --role {names[1]}=assistant"
    assert result.stderr.splitlines()[-1] == f"tip: {tip}"
    assert pack_marked([record], *tip.split()[1:]) == [HI_MARKED]


@pytest.mark.parametrize("record", TELLS_NOTHING)
def test_a_record_that_tells_nothing_has_the_general_tip(folder: Path, record: Any) -> None:
    assert "tip: name the text with --text-field, or map" in run([record], template=None).stderr


def test_a_field_is_for_the_files_that_have_it(folder: Path) -> None:
    write([{"question": "Say hi.", "answer": "Hello"}], "a.jsonl")
    write([{"chosen": HI, "rejected": HI[:1]}], "b.jsonl")
    Path("tags.jinja").write_text(TAGS)
    command = ("pack", "a.jsonl", "b.jsonl", "-l", 512, "-t", "bytes", "-o", "out", "-q",
               "--chat-template", "tags.jinja")  # fmt: skip
    done = packer(*command, "--field", "messages=chosen")
    assert done.exit_code == 0, done.stderr
    assert marked("out") == [PAIR, HI_MARKED]
    assert packer("verify", "out", "--against-inputs").exit_code == 0
    done = packer(*command, "--field", "messages=chose", "--overwrite")
    assert_error(done, 1, "a.jsonl: records have no 'chose'; fields found: question, answer")


def test_a_field_that_the_first_record_lacks(folder: Path) -> None:
    records = [ASKED, ASKED | {"more": {"about": "A passage."}}]
    passage = "Say hi.\nA passage.⟦Hello<eos>⟧"
    assert pack_marked(records, "--field", "context=more.about") == [PAIR, passage]
    wrong = run(records, "--field", "context=more.abuot")
    assert_error(wrong, 1, "records have no 'more.abuot'; fields found: question, answer")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"conversations": HI_SHAREGPT}, "<system>S</system>" + HI_MARKED),
        (
            {"instruction": "Hi", "output": "Hello"},
            "<system>S</system><user>Hi</user><assistant>⟦Hello</assistant>⟧",
        ),
    ],
)
def test_one_field_that_is_mapped_leaves_the_others(folder: Path, record: Any, text: str) -> None:
    options = ("--prompt-template", "chat") if "output" in record else ()
    record = record | {"system_prompt": "S"}
    assert pack_marked([record], "--field", "system=system_prompt", *options) == [text]


# In other files


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
    assert unaltered("pack", "-", *options, stdin=lines).returncode == 0
    assert marked("stdin") == [HI_MARKED]
