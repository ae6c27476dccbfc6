"""Inputs of several kinds, and options that lose, reject, shorten and balance what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tiny_tokenizers
from support import ALL_COLUMNS, jsonl

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def texts(begin: int, end: int) -> list[str]:
    return [f"{i}: " + "naïve café 日本 " * (i % 5) + "x" * (i * 7 % 23) for i in range(begin, end)]


def write_mixed(folder: Path) -> list[object]:
    """Several formats and units, bad and empty records, documents that are cut."""
    bad = b'{"txt": 1}\n{"text": ""}\nnot json\n'
    (folder / "a.jsonl").write_bytes(jsonl(*texts(0, 40)) + bad + jsonl(*texts(40, 60)))
    (folder / "b.jsonl").write_bytes(jsonl(*texts(60, 80)) + bad)
    pq.write_table(pa.table({"text": texts(80, 110)}), folder / "c.parquet", row_group_size=6)
    (folder / "d.txt").write_text("".join(f"{text}\n\n" for text in texts(110, 120)))
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(),
        tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"},
    )  # fmt: skip
    return ["a.jsonl", "b.jsonl", "c.parquet", "d.txt", "-t", "tok", "-l", 32, "--on-error", "skip",
            "--overlong", "truncate", "--unit-bytes", 900]  # fmt: skip


def conversation(i: int) -> dict[str, Any]:
    turns = [
        {"role": role, "content": f"{role} {i} " + "wörter " * (i * 3 % (7 + turn))}
        for turn in range(1 + i % 4) for role in ("user", "assistant")
    ]  # fmt: skip
    if i % 9 == 8:  # nothing to train on
        turns = [turn | {"train": 0} if turn["role"] == "assistant" else turn for turn in turns]
    return {"messages": turns, "tools": [{"name": "f"}] if i % 7 == 6 else None}


def write_chat(folder: Path) -> list[object]:
    """Conversations that are shortened, dropped or untrained; balanced rows of shifted labels."""
    lines = [json.dumps(conversation(i)).encode() + b"\n" for i in range(60)]
    (folder / "a.jsonl").write_bytes(b"".join(lines))
    (folder / "t.jinja").write_text(TEMPLATE)
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(),
        tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"},
    )  # fmt: skip
    return ["a.jsonl", "-t", "tok", "--chat-template", "t.jinja", "-l", 128, "--unit-bytes", 4000,
            "--overlong", "truncate-turns", "--balance", "attention",
            "--segment-multiple", 4, "--max-segments-per-row", 2, *ALL_COLUMNS,
            "--max-loss", 0.9]  # fmt: skip


CARRY = ("--carry", "logprobs:float32", "--carry", "rank:int32", "--carry", "top:int32[2]",
         "--carry", "good:bool", "--carry", "weight:bfloat16", "--carry", "reward:float16",
         "--carry-default", "reward=2")  # fmt: skip


def carrying(i: int) -> dict[str, Any]:
    """A record of token ids with values of them and of itself; some have no reward."""
    size = 2 + i * 7 % 40
    record = {
        "input_ids": [*range(i, i + size)],
        "logprobs": [-(i + place) / 8 for place in range(size)],
        "rank": [*range(size)],
        "top": [[place, i] for place in range(size)],
        "good": [(i + place) % 3 == 0 for place in range(size)],
        "weight": [1 + place / 4 for place in range(size)],
    }
    return record | ({"reward": i / 4} if i % 5 else {})


def write_carried(folder: Path) -> list[object]:
    lines = [json.dumps(carrying(i)) + "\n" for i in range(60)]
    (folder / "a.jsonl").write_text("".join(lines))
    return ["a.jsonl", "-l", 32, "--unit-bytes", 5000, "--segment-multiple", 4, *CARRY]
