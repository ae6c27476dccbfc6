"""What real templates leave out: the table of docs/supervised.md, measured by packer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import chat_tokenizer, marked, run
from support import check_directory
from test_real_templates import TEMPLATES

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "supervised.md"
FAMILIES = {
    "ChatML": "shared/cz__chatml",
    "DeepSeek V3": "trl/deepseekv3",
    "EXAONE 4": "axolotl/exaone4",
    "Gemma 3": "shared/trl__gemma3",
    "Gemma 4": "trl/gemma4",
    "GLM 4.5": "trl/glm4moe",
    "gpt-oss": "trl/gptoss",
    "LFM2": "trl/lfm2",
    "Llama 3": "shared/trl__llama3",
    "Llama 3.1": "trl/llama3_1",
    "Mistral v3": "",
    "Nemotron 3 Nano": "trl/nemotron_3_nano",
    "Phi 3": "shared/trl__phi3",
    "Phi 4": "axolotl/phi_4",
    "Qwen 3": "shared/trl__qwen3",
    "Qwen 3, for training (TRL)": "shared/trl__qwen3_training",
    "Qwen 3.5": "trl/qwen3_5_think",
}
MISTRAL = SHARED / "tokenizers" / "mistral_v3" / "chat_template.jinja"
pytestmark = pytest.mark.skipif(
    not (MISTRAL.exists() and {*FAMILIES.values()} - {""} <= TEMPLATES.keys()),
    reason="needs ../shared and the packages trl and axolotl",
)
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


def measured(record: dict[str, Any], template: Path, tokenizer: Path) -> dict[str, int] | None:
    """The turns of each kind that are left out; None where the template refuses it."""
    how = ("--chat-template", template, "--train-on", "all")
    if run([record], *how, template=None, tokenizer=tokenizer).exit_code:
        return None
    manifest = check_directory("out")
    return {
        what: manifest[f"unshown_{what}_turns"] if what != "tools" else 0
        for what in ("reasoning", "content", "tool_calls", "tool_results", "tools", "system")
        if manifest[f"unshown_{what}"]
    }


def cells(template: Path, tokenizer: Path) -> list[str]:
    """The cells of the table after the name."""
    of_three = {0: "all", 2: "the last", 3: "none", None: "refused"}
    shown = []
    for thoughts in ({"reasoning_content": "thought {}"},
                     {"content": "<think>\nthought {}\n</think>\n\nanswer"}):  # fmt: skip
        lost = measured({"messages": turns(**thoughts)}, template, tokenizer)
        if lost is not None:  # and the text says the same
            [text] = marked("out")
            there = sum(f"thought {i}" in text for i in range(3))
            assert there == 3 - lost.get("reasoning", 0)
        shown.append(of_three[None if lost is None else lost.get("reasoning", 0)])
    for arguments in ({"city": "Oslo"}, json.dumps({"city": "Oslo"})):
        lost = measured(call(arguments), template, tokenizer)
        if lost is not None:
            thoughts_lost = lost.pop("reasoning", 0)
            names = ", ".join(name.replace("_", " ") for name in lost)
            return [*shown, {0: "both", 1: "one", 2: "none"}[thoughts_lost], names or "nothing"]
    return [*shown, "refused", "refused"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_the_page(folder: Path, family: str) -> None:
    template = TEMPLATES[FAMILIES[family]] if FAMILIES[family] else MISTRAL
    row = " | ".join([family, *cells(template, chat_tokenizer(folder / "t", None))])
    assert f"| {row} |" in PAGE.read_text().splitlines(), row
