"""Labels are held against the reference, not against the code that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
from forged_changes import untrain
from forging import Result
from support import packer
from varied_results import write_chat

from packer_cli.records import UInt8
from packer_cli.tokenization import tokenizer as tokenization


def test_labels_are_those_of_the_reference_and_not_of_the_code_that_made_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever tells trained tokens may be wrong while packing: verify does not ask it."""
    right = tokenization.mark_trained

    def wrong(*arguments: Any) -> UInt8:
        trained = right(*arguments)
        if trained.any():
            trained[np.flatnonzero(trained)[-1]] = 0
        return trained

    monkeypatch.setattr(tokenization, "mark_trained", wrong)
    assert packer("pack", *write_chat(folder), "-q", "-o", "out").exit_code == 0
    for sample in ("all", 50):
        checked = packer("verify", "out", "--against-inputs", "--sample", sample, "-q")
        assert checked.exit_code == 1, checked.stdout
        assert "labels has -100 at place " in checked.stdout


TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TURNS
ENDS = ("--turn-end", "<|user|>", "--turn-end", "<|tool|>")
AS_TEXT = ("--special-tokens-in-text", "text")
CONVERSATIONS: dict[str, tuple[str, ...]] = {
    "ends of turns": ENDS,
    "ends of turns, special tokens as text": (*ENDS, *AS_TEXT),
    "open turns, the last answer": ("--allow-open-turns", "--train-on", "last-assistant"),
    "shortened": (*ENDS, "--overlong", "truncate-turns", "-l", "150"),
    "shortened, special tokens as text": (
        *ENDS, *AS_TEXT, "--overlong", "truncate-turns", "-l", "150"
    ),
    "prompts through a template": (*ENDS, *AS_TEXT, "--prompt-template", "chat"),
}  # fmt: skip


def spelling_out(number: int) -> dict[str, Any]:
    """With special tokens in all that people say, and tools in every second."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "<|user|>"}}}
    messages = [
        {"role": "user", "content": "one " * (number * 7 % 40)},
        {"role": "assistant", "content": f"a{number} <|im_end|>"},
        {"role": "user", "content": f"two {number}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"<|im_end|>r{number}"},
        {"role": "assistant", "content": f"done {number}"},
    ]
    return {"messages": messages} | ({"tools": [call]} if number % 2 else {})


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_of_every_kind_are_sound_and_a_lost_label_is_found(
    folder: Path, name: str
) -> None:
    named = [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": WITH_TOOLS}]
    document = tiny_tokenizers.byte_level()
    for number, content in enumerate(("<|user|>", "<|assistant|>", "<|tool|>", "<|im_end|>"), 400):
        tiny_tokenizers.with_added_token(document, content, number)
    config = {"eos_token": tiny_tokenizers.EOS, "chat_template": named}
    tokenizer = tiny_tokenizers.save(folder / "tok", document, tokenizer_config=config)
    records = [spelling_out(number) for number in range(20)]
    if "prompts" in name:
        records = [{"prompt": f"q{i}<|im_end|>", "completion": f"a{i}"} for i in range(20)]
    for file, some in (("a.jsonl", records[:10]), ("b.jsonl", records)):  # the second by --update
        Path("data").mkdir(exist_ok=True)
        (Path("data") / file).write_text("".join(json.dumps(one) + "\n" for one in some))
        options = ["-l", 400] if "-l" not in CONVERSATIONS[name] else []
        packed = packer(
            "pack", "data", "-t", tokenizer, "-o", "out", "-q", "--update", *options,
            *CONVERSATIONS[name],
        )  # fmt: skip
        assert packed.exit_code == 0, packed.stderr
    for sample in ("all", 20):
        checked = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert checked.exit_code == 0, checked.stdout + checked.stderr
    result = Result("out")
    untrain(result)
    result.save()
    for sample in ("all", 50):
        checked = packer("verify", "out", "--against-inputs", "--sample", sample, "-q")
        assert checked.exit_code == 1, checked.stdout
        assert "labels has -100 at place " in checked.stdout
