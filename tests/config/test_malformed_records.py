"""Records that do not fit their shape are bad records, named by place and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import (
    TAGS,
    assistant,
    chat,
    pack_chat,
    pack_marked,
    positions,
    refused,
    run,
    user,
    write,
)
from dialects import HI, HI_MARKED, parquet
from support import assert_error

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
        "messages[0].value is not a call",
    ),
    "a call of bad JSON": (
        chat({"from": "function_call", "value": "weather()"}),
        "field 'messages[0].value' is text that is not valid JSON",
    ),
    "prompt is a number": ({"prompt": 5, "completion": "a"}, "field 'prompt' is an integer"),
    "completion is null": ({"prompt": "a", "completion": None}, "field 'completion' is null"),
    "completion is an empty list": ({"prompt": "a", "completion": []}, "has no messages"),
    "instruction is null": (
        {"instruction": None, "output": "a"},
        "field 'instruction' is null",
    ),
    "output is an object": ({"instruction": "a", "output": {}}, "field 'output' is an object"),
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


def test_a_record_of_another_file_s_shape_is_a_bad_record(folder: Path) -> None:
    write([chat(*HI)], "a.jsonl")
    records = [{"prompt": "Hi", "completion": "Hello"}, chat(*HI)]
    write(records, "b.jsonl")
    result = run("a.jsonl", "b.jsonl")
    place = positions(records)[1]
    assert_error(result, 1, f"b.jsonl, line 2 (byte {place}): no field 'prompt'")
    manifest = pack_chat("a.jsonl", "b.jsonl", "--on-error", "skip")
    assert (manifest["documents"], manifest["rejected_records"]) == (2, 1)


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
