"""Conversations as transformers renders, tokenizes and masks them, token for token.

Templates, tokenizers and chats are the real ones of ../shared; the tests skip without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import check_directory, recover_documents, succeeds
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


@cache
def conversations() -> tuple[list[list[bytes]], list[tuple[list[Message], list[Any] | None]]]:
    """(lines of each file of CHATS, of every line the messages as transformers wants them with the
    tools).
    """
    files, found = [lines_of(name)[:MOST] for name in CHATS], []
    for record in map(json.loads, chain(*files)):
        tools = record.get("tools") or None
        tools = json.loads(tools) if isinstance(tools, str) else tools
        found.append((messages_of(record), tools or None))
    return files, found


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


def packed(files: list[list[bytes]], name: str, *options: str) -> tuple[Any, Any, Any]:
    """Files of lines: (manifest, ids by file and position, labels by file and position)."""
    paths = [Path(f"{number}.jsonl") for number in range(len(files))]
    for path, lines in zip(paths, files, strict=True):
        path.write_bytes(b"\n".join(lines) + b"\n")
    succeeds(
        "pack", *paths, "-l", LENGTH, "-t", SHARED / "tokenizers" / name, "-o", "out", "-q",
        "--on-error", "skip", "--overwrite", *options,
    )  # fmt: skip
    manifest = check_directory("out")
    by_place = [
        {place: tokens.tolist() for place, tokens in found.items()}
        for found in (recover_documents("out"), recover_documents("out", "labels"))
    ]
    return manifest, *by_place


def places(files: list[list[bytes]]) -> Iterator[tuple[int, int]]:
    """(file, position) of each line."""
    for number, lines in enumerate(files):
        at = 0
        for line in lines:
            yield number, at
            at += len(line) + 1


def trained(ids: list[int], mask: list[int]) -> list[int]:
    return [-100, *(i if m else -100 for i, m in zip(ids[1:], mask[1:], strict=True))]


def matrix(templates: list[str]) -> list[tuple[str | None, str]]:
    """Every tokenizer with its own template, and the other templates with one each in turn."""
    own = [(None, name) for name in TOKENIZERS]
    return own + [(one, TOKENIZERS[k % len(TOKENIZERS)]) for k, one in enumerate(templates)]


@pytest.mark.parametrize(("template", "name"), matrix(TEMPLATES))
@pytest.mark.usefixtures("folder")
def test_ids_and_generation_masks(template: str | None, name: str) -> None:
    path = SHARED / "chat_templates" / f"{template}.jinja"
    source = path.read_text() if template else None
    has_tags = "{%- generation %}" in (source or "")
    options = ["--chat-template", str(path)] if template else []
    if not has_tags:
        options += ["--train-on", "all"]
    files, found = conversations()
    expected = [theirs(m, tools, name, source, has_tags) for m, tools in found]
    manifest, ids, labels = packed(files, name, *options)
    assert manifest["rejected_records"] == expected.count(None)
    assert manifest["documents"] == len(expected) - expected.count(None)
    for place, one, (messages, _) in zip(places(files), expected, found, strict=True):
        if one is None:
            assert place not in ids
            continue
        assert ids[place] == one["input_ids"]
        mask = [1] * len(one["input_ids"])
        if has_tags:
            mask = without_empty(one["input_ids"], one["assistant_masks"], messages, name)
        assert labels[place] == trained(one["input_ids"], mask)


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


@pytest.mark.parametrize(("template", "name"), matrix(["cz__chatml", "cz__llama-3-instruct"]))
@pytest.mark.usefixtures("folder")
def test_turns_without_tags(template: str | None, name: str) -> None:
    """Where renderings of prefixes nest, what is trained on is the differences between them."""
    path = SHARED / "chat_templates" / f"{template}.jinja"
    source = path.read_text() if template else None
    files, found = conversations()
    options = ["--chat-template", str(path)] if template else []
    _, ids, labels = packed(files, name, *options)
    for place, (messages, tools) in zip(places(files), found, strict=True):
        if place not in ids:
            continue
        if all(isinstance(m.get("content"), str) for m in messages):
            mask = by_prefixes(messages, tools, name, source)
            assert mask is None or labels[place] == trained(ids[place], mask)


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
@pytest.mark.usefixtures("folder")
def test_prompts(name: str, as_chat: bool) -> None:
    """The completion is trained on, and the end; as a chat, what the template makes of it."""
    files = [lines[:: len(lines) // 50] for lines in map(lines_of, PROMPTS)]
    how = ("--prompt-template", "chat") if as_chat else ()
    _, ids, labels = packed(files, name, *how)
    assert len(ids) == sum(map(len, files))
    for place, line in zip(places(files), chain(*files), strict=True):
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
        assert ids[place] == expected
        assert labels[place] == trained(expected, mask)
