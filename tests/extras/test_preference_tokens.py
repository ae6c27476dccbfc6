"""Pairs and labelled answers have the tokens that TRL's trainers for DPO and KTO make of the same
records, and labels on the same answers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chats import write
from datasets import Dataset, load_from_disk
from support import check_directory, packer
from transformers import PreTrainedTokenizerFast

from packer_cli import open_packed

pytest.importorskip("trl")
SHARED = Path(__file__).resolve().parents[2].parent / "shared"
QWEN3 = SHARED / "tokenizers" / "qwen3"
LLAMA3 = SHARED / "tokenizers" / "llama3_1"
TEMPLATES = SHARED / "chat_templates"
pytestmark = pytest.mark.skipif(not TEMPLATES.exists(), reason="needs ../shared")

TOKENIZERS = {
    "qwen3": (QWEN3, "trl__qwen3.jinja", "<|im_end|>"),
    "llama3": (LLAMA3, "trl__llama3.jinja", "<|eot_id|>"),
    "qwen3 training": (QWEN3, "trl__qwen3_training.jinja", "<|im_end|>"),
    "phi3": (LLAMA3, "trl__phi3.jinja", "<|eot_id|>"),
}
# what the files beside the tokenizers name
BOS = {"llama3": "<|begin_of_text|>", "phi3": "<|begin_of_text|>"}


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


QUESTION, TURNS = [ask("What is 2+2?")], [ask("Hi"), say("Hello! What can I do?"), ask("Sum it.")]
TEXT = [
    {"prompt": "The sky is", "chosen": " blue, mostly.", "rejected": " green"},
    {"prompt": "Q: 2+2?\nA:", "chosen": " 4", "rejected": " It depends on what you mean — né?"},
]
EXPLICIT = [
    {"prompt": QUESTION, "chosen": [say("4")], "rejected": [say("It is five, I think.")]},
    {"prompt": TURNS, "chosen": [say("It is 3.")], "rejected": [say("No.\n\nNever.")]},
    {"prompt": [{"role": "system", "content": "Be kind."}, *QUESTION],
     "chosen": [say("It is 4, dear.")], "rejected": [say("4!")]},
]  # fmt: skip
IMPLICIT = [
    {name: [*one["prompt"], *one[name]] for name in ("chosen", "rejected")} for one in EXPLICIT
]
WITHOUT_PROMPT = [
    {
        "chosen": "\n\nHuman: 2+2?\n\nAssistant: Four.",
        "rejected": "\n\nHuman: 2+2?\n\nAssistant: No",
    }
]
PAIRS = {"text": TEXT, "explicit": EXPLICIT, "implicit": IMPLICIT, "text alone": WITHOUT_PROMPT}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    folder, template, end = TOKENIZERS[name]
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=end, pad_token=end,
        bos_token=BOS.get(name),
        chat_template=(TEMPLATES / template).read_text(),
    )  # fmt: skip


def packed_sides(records: list[Any], name: str, *, is_chat: bool) -> dict[int, list[Any]]:
    """By the number of the record: (ids, labels, side) of its segments."""
    folder, template, end = TOKENIZERS[name]
    write(records)
    how = ["--chat-template", TEMPLATES / template] if is_chat else ["--eos-token", end]
    done = packer("pack", "data.jsonl", "--shape", "preference", "-l", 512, "-t", folder, "-o",
                  "out", "-q", "--overwrite", *how)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    check_directory("out")
    sizes = [len(json.dumps(one)) + 1 for one in records]
    numbers = {sum(sizes[:i]): i for i in range(len(sizes))}
    found: dict[int, list[Any]] = {}
    rows = load_from_disk("out")
    assert {"pair", "side"} <= {*rows.column_names}
    for row in rows:
        edges = zip(row["cu_seqlens"], row["cu_seqlens"][1:], strict=False)
        for segment, side, (begin, end_) in zip(row["segments"], row["side"], edges, strict=True):
            part = row["input_ids"][begin:end_], row["labels"][begin:end_], side
            found.setdefault(numbers[segment["position"]], []).append(part)
    assert open_packed("out").manifest["documents"] == len(records)
    return found


def prepared(trainer: Any, records: list[Any], tokenizer: Any) -> list[Any]:
    """What the trainer makes of the records before it trains."""
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    own = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    made = trainer._prepare_dataset(own, Dataset.from_list(records), tokenizer, args, "train")
    return list(made)


def assert_same(part: Any, prompt: list[int], answer: list[int], side: int, newline: bool) -> None:
    """The tokens are the trainer's; so is what is trained on, but for the newline that a template
    writes after the end of a turn, which packer may leave out.
    """
    ids, labels, own_side = part
    assert own_side == side
    assert ids == prompt + answer
    trained = [i for i, label in enumerate(labels) if label != -100]
    assert all(labels[i] == ids[i] for i in trained)
    last = len(ids) - newline * (trained[-1] != len(ids) - 1)
    assert trained == list(range(len(prompt), last))


# templates make no difference to text
CASES = [(name, kind) for name in TOKENIZERS for kind in PAIRS
         if "text" not in kind or name in ("qwen3", "llama3")]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_pairs_are_those_of_dpo(folder: Path, name: str, kind: str) -> None:
    from trl import DPOTrainer

    records, tokenizer = PAIRS[kind], tokenizer_of(name)
    is_chat = not isinstance(records[0]["chosen"], str)
    found = packed_sides(records, name, is_chat=is_chat)
    for number, one in enumerate(prepared(DPOTrainer, records, tokenizer)):
        chosen, rejected = found[number]
        assert_same(chosen, one["prompt_ids"], one["chosen_ids"], 1, is_chat)
        assert_same(rejected, one["prompt_ids"], one["rejected_ids"], 0, is_chat)


@pytest.mark.parametrize(("name", "kind"), [c for c in CASES if c[1] in ("text", "explicit")])
def test_answers_with_a_label_are_those_of_kto(folder: Path, name: str, kind: str) -> None:
    from trl import KTOTrainer

    records = [
        {"prompt": one["prompt"], "completion": one[side], "label": side == "chosen"}
        for one in PAIRS[kind]
        for side in ("chosen", "rejected")
    ]
    tokenizer, is_chat = tokenizer_of(name), kind == "explicit"
    found = packed_sides(records, name, is_chat=is_chat)
    made = prepared(KTOTrainer, records, tokenizer)
    for number, one in enumerate(made):
        (part,) = found[number]
        assert_same(part, one["prompt_ids"], one["completion_ids"], int(one["label"]), is_chat)
    if is_chat:  # the same as whole conversations
        whole = [{"messages": [*one["prompt"], *one["completion"]], "label": one["label"]}
                 for one in records]  # fmt: skip
        assert packed_sides(whole, name, is_chat=True) == found
