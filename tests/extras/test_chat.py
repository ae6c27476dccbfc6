"""Conversations as transformers renders, tokenizes and masks them, token for token.

Templates, tokenizers and chats are the real ones of ../shared; the tests skip without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import check_directory, packer, recover_documents
from transformers import PreTrainedTokenizerFast

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
TOKENIZERS = ("qwen3", "llama3_1", "mistral_v3")
CHATS = ("chat_glaive_toolcall", "chat_oasst_en100", "chat_sgd_toolcalls", "chat_tau_airline")
PROMPTS = ("sft_dolly_hhrlhf_small", "sft_gpteacher", "sft_gsm8k_train", "sft_t0_p3_prompts")
TEMPLATES = sorted(path.stem for path in SHARED.glob("chat_templates/*.jinja"))
MOST = 30  # conversations of each file
LENGTH = 1 << 17  # nothing is too long

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="../shared is not there")
Message = dict[str, Any]


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    folder = SHARED / "tokenizers" / name
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {key: config[key] for key in ("bos_token", "eos_token", "pad_token")
               if isinstance(config.get(key), str)}  # fmt: skip
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)
    loaded.chat_template = config["chat_template"]
    return loaded


def records(name: str) -> Iterator[tuple[bytes, list[Message], list[Any] | None]]:
    """(line, messages as transformers wants them, tools)."""
    for line in lines_of(name)[:MOST]:
        record = json.loads(line)
        tools = record.get("tools") or None
        tools = json.loads(tools) if isinstance(tools, str) else tools
        yield line, messages_of(record), tools or None


def lines_of(name: str) -> list[bytes]:
    path = SHARED / "data" / f"{name}.jsonl.zst"
    with pa.input_stream(str(path), compression="zstd") as source:
        return [line for line in source.read().split(b"\n") if line]


def messages_of(record: dict[str, Any]) -> list[Message]:
    if "messages" in record:
        return record["messages"]
    roles = {"human": "user", "gpt": "assistant", "observation": "tool"}
    messages = []
    for turn in record["conversations"]:
        if turn["from"] == "function_call":
            call = {"type": "function", "function": json.loads(turn["value"])}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            role = roles.get(turn["from"], turn["from"])
            messages.append({"role": role, "content": turn["value"]})
    return messages


def theirs(
    messages: list[Message], tools: list[Any] | None, name: str, template: str | None, mask: bool
) -> dict[str, Any] | None:
    """What transformers makes of a conversation, None where the template refuses it.

    Where a template fails on a message without content, it gets an empty one.
    """
    for filled in (messages, [{**m, "content": m.get("content") or ""} for m in messages]):
        try:
            return dict(
                tokenizer(name).apply_chat_template(
                    filled, tools=tools, chat_template=template, return_dict=True,
                    return_assistant_tokens_mask=mask,
                )
            )  # fmt: skip
        except Exception:  # noqa: S112 jinja2's many
            continue
    return None


def packed(folder: Path, lines: list[bytes], name: str, *options: str) -> tuple[Any, Any, Any]:
    """(manifest, ids by position, labels by position)."""
    (folder / "chat.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    result = packer(
        "pack", "chat.jsonl", "-l", LENGTH, "-t", SHARED / "tokenizers" / name, "-o", "out", "-q",
        "--on-error", "skip", "--keep-untrained", "--overwrite", *options,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    manifest = check_directory("out")
    by_position = [
        {position: tokens.tolist() for (_, position), tokens in found.items()}
        for found in (recover_documents("out"), recover_documents("out", "labels"))
    ]
    return manifest, *by_position


def positions(lines: list[bytes]) -> Iterator[int]:
    at = 0
    for line in lines:
        yield at
        at += len(line) + 1


def trained(ids: list[int], mask: list[int]) -> list[int]:
    return [-100, *(i if m else -100 for i, m in zip(ids[1:], mask[1:], strict=True))]


def matrix(templates: list[str]) -> list[tuple[str | None, str]]:
    """Every tokenizer with its own template, and the other templates with one each in turn."""
    own = [(None, name) for name in TOKENIZERS]
    return own + [(one, TOKENIZERS[k % len(TOKENIZERS)]) for k, one in enumerate(templates)]


@pytest.mark.parametrize(("template", "name"), matrix(TEMPLATES))
@pytest.mark.parametrize("chat", CHATS)
def test_ids_and_generation_masks(folder: Path, template: str | None, chat: str, name: str) -> None:
    path = SHARED / "chat_templates" / f"{template}.jinja"
    source = path.read_text() if template else None
    has_tags = "{%- generation %}" in (source or "")
    options = ["--chat-template", str(path)] if template else []
    if not has_tags:
        options += ["--train-on", "all"]
    found = list(records(chat))
    lines = [line for line, _, _ in found]
    expected = [theirs(m, tools, name, source, has_tags) for _, m, tools in found]
    if not any(expected):
        result = packer("pack", "chat.jsonl", "-l", 8, "-t", SHARED / "tokenizers" / name)
        assert result.exit_code
        return
    manifest, ids, labels = packed(folder, lines, name, *options)
    assert manifest["rejected_records"] == expected.count(None)
    assert manifest["documents"] == len(expected) - expected.count(None)
    talks = [messages for _, messages, _ in found]
    for position, one, messages in zip(positions(lines), expected, talks, strict=True):
        if one is None:
            assert position not in ids
            continue
        assert ids[position] == one["input_ids"]
        mask = [1] * len(one["input_ids"])
        if has_tags:
            mask = without_empty(one["input_ids"], one["assistant_masks"], messages, name)
        assert labels[position] == trained(one["input_ids"], mask)


def is_empty(message: Message, said: str) -> bool:
    """Whether a template shows nothing of a call in what it writes for the message."""
    calls = message.get("tool_calls")
    return bool(calls and not message.get("content") and calls[0]["function"]["name"] not in said)


def without_empty(ids: list[int], mask: list[int], messages: list[Message], name: str) -> list[int]:
    """The mask without turns of which the template shows nothing: they teach to say nothing."""
    speakers = (message for message in messages if message["role"] == "assistant")
    kept: list[int] = []
    for flag, group in groupby(mask):
        size = len(list(group))
        said = tokenizer(name).decode(ids[len(kept) : len(kept) + size])
        kept += [int(flag and not is_empty(next(speakers), said))] * size
    return kept


def by_prefixes(
    messages: list[Message], tools: list[Any] | None, name: str, template: str | None
) -> list[int] | None:
    """The mask of assistant turns from renderings of prefixes; None where they don't nest."""

    def render(some: list[Message], **options: Any) -> str:
        return str(tokenizer(name).apply_chat_template(
            some, tools=tools, chat_template=template, tokenize=False, **options
        ))  # fmt: skip

    whole = render(messages)
    encoded = tokenizer(name)(whole, add_special_tokens=False, return_offsets_mapping=True)
    mask = [0] * len(encoded["input_ids"])
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = render(messages[:i], add_generation_prompt=True)
            after = render(messages[: i + 1])
        except Exception:
            return None
        if not (whole.startswith(before) and whole.startswith(after)):
            return None
        if is_empty(message, after[len(before) :]):
            continue
        for t, (start, end) in enumerate(encoded["offset_mapping"]):
            if start < len(after) and end > len(before) and end > start:
                mask[t] = 1
    return mask


@pytest.mark.parametrize(
    ("template", "name"), matrix(["cz__chatml", "cz__llama-3-instruct", "trl__phi3"])
)
@pytest.mark.parametrize("chat", CHATS)
def test_turns_without_tags(folder: Path, template: str | None, chat: str, name: str) -> None:
    """Trained is what the assistant said, and the end of its turns; nothing that others said.

    Where renderings of prefixes nest, it is exactly the differences between them.
    """
    path = SHARED / "chat_templates" / f"{template}.jinja"
    source = path.read_text() if template else None
    found = list(records(chat))[:40]
    lines = [line for line, _, _ in found]
    if not any(theirs(m, tools, name, source, False) for _, m, tools in found):
        pytest.skip("the template refuses all of them")
    options = ["--chat-template", str(path)] if template else []
    _, ids, labels = packed(folder, lines, name, *options)
    for position, (_, messages, tools) in zip(positions(lines), found, strict=True):
        if position not in ids:
            continue
        flags = [label != -100 for label in labels[position]]
        check_turns(ids[position], flags, messages, name)
        if all(isinstance(m.get("content"), str) for m in messages) and template != "trl__phi3":
            mask = by_prefixes(messages, tools, name, source)  # phi3 ends every text in EOS
            assert mask is None or labels[position] == trained(ids[position], mask)


def check_turns(ids: list[int], flags: list[bool], messages: list[Message], name: str) -> None:
    pairs = zip(flags, ids, strict=True)
    runs = [(flag, [i for _, i in group]) for flag, group in groupby(pairs, itemgetter(0))]
    parts = [(flag, tokenizer(name).decode(run)) for flag, run in runs]
    said = "\n".join(text for flag, text in parts if flag)
    others = "\n".join(text for flag, text in parts if not flag)
    places = {"assistant": 0, "user": 0}
    for message in messages:
        role, content = message["role"], message.get("content")
        if role in places and isinstance(content, str) and len(content) > 20:
            text = said if role == "assistant" else others
            places[role] = text.find(content.strip()[:60].strip(), places[role]) + 1
            assert places[role], content
    for flag, text in parts:
        if flag:
            assert text.rstrip().endswith(("<|im_end|>", "<|eot_id|>", "</s>", "<|end|>")), text


ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)


def texts_of(record: dict[str, Any], as_chat: bool) -> tuple[str, str]:
    """The prompt and the answer of a record."""
    answer = str(record.get("completion") or record.get("answer") or record.get("output"))
    if "instruction" not in record:
        return str(record.get("prompt") or record["question"]), answer
    asked, given = record["instruction"], record["input"]
    if as_chat:
        return "\n".join(filter(None, (asked, given))), answer
    more = ", paired with an input that provides further context" if given else ""
    return ALPACA.format(more, asked, f"### Input:\n{given}\n\n" if given else ""), answer


@pytest.mark.parametrize("as_chat", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("data", PROMPTS)
def test_prompts(folder: Path, data: str, name: str, as_chat: bool) -> None:
    """The completion is trained on, and the end; as a chat, what the template makes of it."""
    whole = lines_of(data)
    lines = whole[:: len(whole) // 50]
    how = ("--prompt-template", "chat") if as_chat else ()
    _, ids, labels = packed(folder, lines, name, *how)
    assert len(ids) == len(lines)
    for position, line in zip(positions(lines), lines, strict=True):
        prompt, answer = texts_of(json.loads(line), as_chat)
        if as_chat:
            said = {"user": prompt, "assistant": answer}
            messages = [{"role": role, "content": text} for role, text in said.items()]
            encoded = theirs(messages, None, name, None, False)
            assert encoded
            expected = encoded["input_ids"]
            mask = by_prefixes(messages, None, name, None)
            assert mask is not None
        else:
            told = tokenizer(name)(prompt + answer, return_offsets_mapping=True)
            expected = [*told["input_ids"], tokenizer(name).eos_token_id]
            mask = [*(int(end > len(prompt)) for _, end in told["offset_mapping"]), 1]
        assert ids[position] == expected
        assert labels[position] == trained(expected, mask)
