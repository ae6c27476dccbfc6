"""What of the assistant is trained on: without reasoning, without calls, final answers, flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from chats import (
    CALL,
    CALLS,
    RESULT,
    assistant,
    chat,
    chat_tokenizer,
    marked_pieces,
    pack_chat,
    pack_marked,
    system,
    user,
    write,
)
from support import check_directory, packer, succeeds

THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content | trim }}" + CALLS + "</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT = "--no-train-reasoning"


def one(record: Any, *options: Any, template: str = THINKS) -> str:
    """The text of the answers, from the first of them on."""
    [text] = pack_marked([record], *options, template=template)
    return text[text.index("assistant") - 1 :]


def detail(*ranges: tuple[int, int, Any]) -> dict[str, Any]:
    names = ("begin_offset", "end_offset", "train")
    return {"train_detail": [dict(zip(names, own, strict=True)) for own in ranges]}


def test_dialects_and_parquet(folder: Path) -> None:
    talk = [
        {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "abc", **detail((0, 0, 1))},
        {"from": "human", "value": "So"}, {"from": "gpt", "value": "def", "weight": 0},
    ]  # fmt: skip
    expected = "<assistant>⟦a⟧bc⟦</assistant>⟧<user>So</user><assistant>def</assistant>"
    assert one({"conversations": talk}) == expected
    roles = {"human": "user", "gpt": "assistant"}
    same = [
        {"role": roles[m["from"]], "content": m["value"]}
        | {name: m.get(name) for name in ("train_detail", "weight")}
        for m in talk
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": same}]), "data.parquet")
    Path("t.jinja").write_text(THINKS)
    succeeds("pack", "data.parquet", "-o", "out", "-l", 256, "-t", "bytes", "--overwrite",
                  "--chat-template", "t.jinja")  # fmt: skip
    assert marked_pieces("out")[0].endswith(expected)


def test_tokens_verify_tokenize_and_stats(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", THINKS)
    records = [
        chat(system("S"), user("Hi"),
             assistant("Well, yes", thinking="hm hm", **detail((0, 3, 1)))),
        chat(user("Hi"), assistant("Look", tool_calls=[CALL]), RESULT,
             assistant("Yes", loss=False)),
    ]  # fmt: skip
    options = (WITHOUT, "--no-train-tool-calls")
    pack_chat(records * 20, *options, template=None, tokenizer=tokenizer)
    for sample in ("all", "3"):
        succeeds("verify", "out", "--against-inputs", "--sample", sample)
    write(records * 20)
    succeeds("tokenize", "data.jsonl", "-o", "tokens", "-t", tokenizer, *options)
    succeeds("verify", "tokens", "--against-inputs")
    assert "masked" in packer("stats", "tokens").stdout
    succeeds("pack", "tokens", "-o", "again", "-l", 2048)
    assert check_directory("again")["trained_tokens"] == check_directory("out")["trained_tokens"]


def test_recipes_have_the_keys(folder: Path) -> None:
    write([chat(user("Hi"), assistant("Yes", thinking="hm"))])
    Path("t.jinja").write_text(THINKS)
    Path("r.toml").write_text(
        'max_length = 256\ntokenizer = "bytes"\noutput = "out"\nchat_template = "t.jinja"\n'
        'turns = "each"\ntrain_reasoning = false\ntrain_tool_calls = true\n'
        'tokenized = "tokens"\n[[source]]\nname = "a"\ninputs = ["data.jsonl"]\nweight = 1\n'
    )
    succeeds("pack", "r.toml")
    [manifest] = Path("tokens").rglob("manifest.json")
    config = json.loads(manifest.read_text())["config"]
    names = ("turns", "train_reasoning", "train_tool_calls")
    assert [config[name] for name in names] == ["each", False, True]
