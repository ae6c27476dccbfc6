"""Arguments of real templates: tokens and masks are those of transformers with the same ones.

The masks come from prefixes: what the prompt for a turn holds is not trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import marked, pack_chat, positions
from support import recover_documents
from test_real_templates import TEMPLATES, fixed_date  # noqa: F401 a fixture
from transformers import PreTrainedTokenizerFast

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
QWEN3 = SHARED / "tokenizers" / "qwen3"
END = "<|im_end|>"
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Oslo"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    ],
    [
        message
        for i in range(3)
        for message in (
            {"role": "user", "content": f"{i}+1?"},
            {"role": "assistant", "content": f"it is {i + 1}", "reasoning_content": f"add {i}"},
        )
    ],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "<think>\n\n</think>\n\n6"},
    ],
    [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [CALL]},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "No.", "reasoning_content": "so not"},
    ],
]
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "shared/trl__qwen3": [{"enable_thinking": False}, {"enable_thinking": True}],
    "shared/trl__qwen3_training": [{"enable_thinking": False}],
    "trl/qwen3": [{"enable_thinking": False}],
    "trl/qwen3_5_think": [{"enable_thinking": False}, {"enable_thinking": True}],
    "trl/glm4moe": [{"enable_thinking": False}],
    "trl/deepseekv3": [],
    "trl/gptoss": [{"reasoning_effort": "high"}, {"model_identity": "You are Ada."}],
    "trl/nemotron_3_nano": [{"enable_thinking": False}, {"truncate_history_thinking": False}],
    "trl/llama3_1": [{"date_string": "1 May 2025"}],
}  # fmt: skip
CASES = [(name, given) for name, all_ in ARGUMENTS.items() if name in TEMPLATES for given in all_]
pytestmark = pytest.mark.skipif(
    not (CASES and QWEN3.exists()), reason="needs ../shared and the package trl"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(QWEN3 / "tokenizer.json"), eos_token=END)


@pytest.mark.parametrize(("name", "given"), CASES)
@pytest.mark.parametrize("own", [False, True])
def test_tokens_are_those_of_transformers(
    folder: Path, tokenizer: Any, name: str, given: dict[str, Any], own: bool
) -> None:
    template = TEMPLATES[name].read_text(encoding="utf-8")
    expected, records = [], list[Any]()
    for messages in CONVERSATIONS:
        try:
            expected.append(
                tokenizer.apply_chat_template(
                    messages, chat_template=template, return_dict=True, **given
                )["input_ids"]
            )
        except Exception:  # noqa: S112 jinja2's many
            continue
        records.append({"messages": messages} | ({"chat_template_kwargs": given} if own else {}))
    assert len(records) > 2
    plain = [tokenizer.apply_chat_template(record["messages"], chat_template=template,
             add_generation_prompt=True, tokenize=False, **how) for record in records
             for how in (given, {})]  # fmt: skip
    assert plain[::2] != plain[1::2] or given.get("enable_thinking")  # it changes something
    options = [f"--template-arg={key}={json.dumps(value)}" for key, value in given.items()]
    pack_chat(
        records, "--chat-template", TEMPLATES[name], "--keep-untrained", "--allow-open-turns",
        *([] if own else options), template=None, tokenizer=QWEN3,
    )  # fmt: skip
    found = {place: ids.tolist() for (_, place), ids in recover_documents("out").items()}
    assert [found[place] for place in positions(records)] == expected


def test_masks_without_thinking(folder: Path, tokenizer: Any) -> None:
    """What a prompt without thinking begins, as far as the turn goes on like it, is not learned."""
    template = TEMPLATES["shared/trl__qwen3"].read_text(encoding="utf-8")
    records = [{"messages": messages} for messages in CONVERSATIONS]
    off = ("--template-arg", "enable_thinking=false")
    pack_chat(records, *off, "--chat-template", TEMPLATES["shared/trl__qwen3"], template=None,
              tokenizer=QWEN3)  # fmt: skip
    for text, record in zip(marked("out"), records, strict=True):
        messages = record["messages"]
        whole = text.replace("⟦", "").replace("⟧", "")
        prompt = tokenizer.apply_chat_template(
            messages[:-1], chat_template=template, tokenize=False, add_generation_prompt=True,
            enable_thinking=False,
        )  # fmt: skip
        last = text[text.rindex("⟦") :]
        if whole.startswith(prompt):  # nothing was thought
            assert whole[len(prompt) :].strip() == last.strip("⟦⟧\n")
        else:
            assert "</think>\n\n" in last
            assert not last.startswith("⟦<think>")
    assert [text.count("⟦") for text in marked("out")] == [1, 1, 3, 2, 2]
