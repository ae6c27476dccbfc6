"""Documents, tokens and trained tokens of whole files, counted by transformers and by packer.

Every file of ../shared/data with conversations, prompts or instructions goes through the real
command line. transformers renders and tokenizes the same records, and what is trained on is found
here, with nothing of packer:

* templates with {% generation %}: the assistant's mask of transformers;
* others: what stands between the headers of the format. It must be the text up to and with each
  message of the assistant, less the text up to it with the generation prompt, wherever such texts
  begin the whole one; templates that look ahead make others;
* prompts: the completion's characters, and EOS.

Turns with tool calls of which a template shows nothing but their end are not trained on.

Characters become tokens by the tokenizer's offsets. The tests skip without ../shared.

Each case takes every k-th record, about BUDGET bytes of its file. PACKER_COUNTS=all takes all of
them, many minutes; `-o junit_family=xunit1 --junitxml FILE` keeps the figures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import packer_script
from test_chat import SHARED, TOKENIZERS, Message, messages_of, tokenizer
from tokenizers import Tokenizer

BUDGET = 40_000
LENGTH = 1 << 17  # nothing is too long
CHATS = ("chat_glaive_toolcall", "chat_oasst_en100", "chat_sgd_toolcalls", "chat_tau_airline")
PROMPTS = ("sft_dolly_hhrlhf_small", "sft_gpteacher", "sft_gsm8k_train", "sft_t0_p3_prompts")
# Each tokenizer with the templates of its family; None: its own, which for llama3_1 is trl__llama3.
TEMPLATES = [
    ("qwen3", None), ("qwen3", "trl__qwen3"), ("qwen3", "trl__qwen3_training"),
    ("llama3_1", None), ("llama3_1", "trl__llama3_training"), ("mistral_v3", None),
]  # fmt: skip
# What the assistant wrote, the end of its turn included.
HEADERS = {
    "qwen3": r"<\|im_start\|>assistant\n(.*?)(?=<\|im_start\|>|\Z)",
    "llama3_1": r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"
    r"(.*?)(?=<\|start_header_id\|>|\Z)",
    "mistral_v3": r"\[/(?:INST|TOOL_RESULTS)\](.*?</s>)"
    r"(?= ?\[(?:INST|AVAILABLE_TOOLS|TOOL_RESULTS)\]|\Z)",
}
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)

pytestmark = pytest.mark.skipif(
    not (SHARED / "data").is_dir(), reason=f"needs the data and tokenizers in {SHARED}"
)
Spans = list[tuple[int, int]]
# (tokens, trained tokens, how they were found), None for a record that the template refuses
Found = tuple[int, int, str] | None


def lines_of(name: str) -> list[bytes]:
    path = SHARED / "data" / f"{name}.jsonl.zst"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    with pa.input_stream(str(path), compression="zstd") as source:
        lines = [line for line in source.read().split(b"\n") if line]
    everything = os.environ.get("PACKER_COUNTS") == "all"
    return lines if everything else lines[:: max(1, sum(map(len, lines)) // BUDGET)]


def count_by_packer(lines: list[bytes], name: str, *options: object) -> dict[str, Any]:
    """What `packer pack --json` prints, or of an error only how many records it rejected."""
    with open("records.jsonl", "wb") as file:
        file.writelines(line + b"\n" for line in lines)
    command = [
        packer_script(), "pack", "records.jsonl", "-l", LENGTH, "-o", "out", "-q", "--json",
        "-t", SHARED / "tokenizers" / name, "--keep-untrained", "--on-error", "skip", *options,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, check=False, timeout=1800)
    if nothing := re.search(rb'"nothing to pack: 0 empty, 0 dropped and (\d+) ', done.stderr):
        return Counter(rejected_records=int(nothing[1]))
    assert done.returncode == 0, done.stderr.decode()
    return dict(json.loads(done.stdout))


def compare(
    lines: list[bytes],
    name: str,
    count: Callable[[dict[str, Any]], Found],
    options: list[object],
    record_property: Callable[[str, object], None],
) -> None:
    found = [count(json.loads(line)) for line in lines]
    accepted = [one for one in found if one]
    expected = {
        "documents": len(accepted),
        "tokens": sum(tokens for tokens, _, _ in accepted),
        "trained_tokens": sum(trained for _, trained, _ in accepted),
        "untrained_documents": sum(not trained for _, trained, _ in accepted),
        "rejected_records": len(found) - len(accepted),
        "dropped_documents": 0,
        "truncated_documents": 0,
    }
    record_property("found by", dict(Counter(how for _, _, how in accepted)))
    record_property("transformers", expected)
    printed = count_by_packer(lines, name, *options)
    actual = {key: printed[key] for key in expected}
    record_property("packer", actual)
    assert actual == expected


@cache
def plain_tokenizer(name: str) -> Tokenizer:
    """It adds no BOS."""
    config = json.loads((SHARED / "tokenizers" / name / "tokenizer.json").read_text())
    return Tokenizer.from_str(json.dumps({**config, "post_processor": None}))


def flags_of(text: str, spans: Spans, name: str) -> tuple[list[int], list[bool]]:
    """(tokens of a text, which of them have a character in a span)."""
    encoded = plain_tokenizer(name).encode(text, add_special_tokens=False)
    before = np.zeros(len(text) + 1, dtype=np.int64)
    for start, end in spans:
        before[start + 1 : end + 1] = 1
    before = before.cumsum()  # how many of the first i characters are in a span
    offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
    return encoded.ids, (before[offsets[:, 1]] > before[offsets[:, 0]]).tolist()


@cache
def template_source(template: str | None) -> str | None:
    path = SHARED / "chat_templates" / f"{template}.jinja"
    return path.read_text() if template else None


def render(messages: list[Message], name: str, **options: Any) -> str:
    return str(tokenizer(name).apply_chat_template(messages, tokenize=False, **options))


def by_prefixes(whole: str, messages: list[Message], name: str, **options: Any) -> Spans | None:
    """The assistant's parts of a text, None where the texts of prefixes do not begin it."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            after = render(messages[: i + 1], name, **options)
            if not whole.startswith(after):
                return None
            before = render(messages[:i], name, add_generation_prompt=True, **options)
        except Exception:  # what a template raises for an odd prefix
            return None
        if not after.startswith(before):
            return None
        spans.append((len(before), len(after)))
    return spans


def count_conversation(
    messages: list[Message], tools: Any, name: str, template: str | None
) -> Found:
    # A template that fails on a message without content gets an empty one.
    for filled in (messages, [{**m, "content": m.get("content") or ""} for m in messages]):
        source = template_source(template)
        options: dict[str, Any] = {"tools": tools, "chat_template": source}
        tags = "{%- generation %}" in (source or "")
        try:
            encoded = tokenizer(name).apply_chat_template(
                filled, return_dict=True, return_assistant_tokens_mask=tags, **options
            )
        except Exception:  # noqa: S112 jinja2's many
            continue
        ids = encoded["input_ids"]
        whole = render(filled, name, **options)
        between = [match.span(1) for match in re.finditer(HEADERS[name], whole, re.DOTALL)]
        speakers = [message for message in filled if message["role"] == "assistant"]
        assert len(speakers) == len(between)
        empty = [
            span
            for span, message in zip(between, speakers, strict=True)
            if message.get("tool_calls")
            and re.fullmatch(r"(<\|\w+\|>|</s>)?\s*", whole[slice(*span)])
        ]
        if tags:
            left_out = sum(flags_of(whole, empty, name)[1])
            return len(ids), sum(encoded["assistant_masks"][1:]) - left_out, "tags"
        spans = by_prefixes(whole, filled, name, **options)
        assert spans is None or spans == between
        shown = [span for span in between if span not in empty]
        again, flags = flags_of(whole, shown, name)
        assert again == ids
        return len(ids), sum(flags[1:]), "headers" if spans is None else "headers and prefixes"
    return None


def count_prompt(prompt: str, completion: str, name: str) -> Found:
    ids = tokenizer(name)(prompt + completion)["input_ids"]
    span = (len(prompt), len(prompt) + len(completion))
    again, flags = flags_of(prompt + completion, [span], name)
    has_bos = len(ids) - len(again)
    assert ids[has_bos:] == again
    return len(ids) + 1, sum(flags[1 - has_bos :]) + 1, "offsets"  # and EOS


def alpaca(record: dict[str, Any]) -> str:
    given = record["input"]
    more = ", paired with an input that provides further context" if given else ""
    return ALPACA.format(more, record["instruction"], f"### Input:\n{given}\n\n" if given else "")


def asked(record: dict[str, Any]) -> str:
    """The prompt, before any template."""
    if "instruction" in record:
        return "\n".join(filter(None, (record["instruction"], record["input"])))
    return str(record.get("prompt") or record["question"])


def answered(record: dict[str, Any]) -> str:
    return str(record.get("completion") or record.get("answer") or record.get("output"))


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
@pytest.mark.parametrize("data", CHATS)
@pytest.mark.usefixtures("folder")
def test_conversations(data: str, name: str, template: str | None, record_property: Any) -> None:
    def count(record: dict[str, Any]) -> Found:
        tools = record.get("tools") or None
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return count_conversation(messages_of(record), tools or None, name, template)

    path = SHARED / "chat_templates" / f"{template}.jinja"
    options: list[object] = ["--chat-template", path] if template else []
    compare(lines_of(data), name, count, options, record_property)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("data", PROMPTS)
@pytest.mark.usefixtures("folder")
def test_prompts(data: str, name: str, record_property: Any) -> None:
    def count(record: dict[str, Any]) -> Found:
        prompt = alpaca(record) if "instruction" in record else asked(record)
        return count_prompt(prompt, answered(record), name)

    compare(lines_of(data), name, count, [], record_property)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("data", PROMPTS)
@pytest.mark.usefixtures("folder")
def test_prompts_as_chats(data: str, name: str, record_property: Any) -> None:
    def count(record: dict[str, Any]) -> Found:
        said = ("user", asked(record)), ("assistant", answered(record))
        messages = [{"role": role, "content": content} for role, content in said]
        return count_conversation(messages, None, name, None)

    compare(lines_of(data), name, count, ["--prompt-template", "chat"], record_property)
