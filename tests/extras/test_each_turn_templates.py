"""`--turns each` on real templates: every document is the prompt that transformers makes for its
turn, with the same arguments, and the answer as it is rendered as the last one. Arguments of whole
conversations: tokens are those of transformers with the same ones, and what the prompt for a turn
holds is not trained on.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from chats import chat_tokenizer, marked, pack_chat, positions, run
from support import recover_documents
from test_real_templates import TEMPLATES, fixed_date, loaded  # noqa: F401 a fixture
from test_unshown_templates import TOOLS
from transformers import PreTrainedTokenizerFast

from packer_cli.records import MOST_TURNS

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
MISTRAL = SHARED / "tokenizers" / "mistral_v3" / "chat_template.jinja"
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
TALKS: list[dict[str, Any]] = [
    *({"messages": messages} for messages in CONVERSATIONS[1:]),
    {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "", "reasoning_content": "ask",
             "tool_calls": [CALL | {"id": "abcdefghi"}]},
            {"role": "tool", "content": "no", "name": "rain", "tool_call_id": "abcdefghi"},
            {"role": "assistant", "content": "No.", "reasoning_content": "so not"},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "it said so"},
        ],
        "tools": TOOLS,
    },
]  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "shared/cz__chatml": {},
    "shared/trl__gemma3": {},
    "shared/trl__phi3": {},
    "shared/trl__qwen3": {},
    "axolotl/exaone4": {},
    "axolotl/phi_4": {},
    "trl/gemma4": {},
    "trl/glm4moe": {},
    "trl/gptoss": {"reasoning_effort": "high"},
    "trl/lfm2": {},
    "trl/llama3_1": {"date_string": "1 May 2025"},
    "trl/nemotron_3_nano": {},
    "trl/qwen3": {"enable_thinking": True},
    "trl/qwen3_5_think": {},
    "mistral v3": {},
}
pytestmark = pytest.mark.skipif(
    not (MISTRAL.exists() and {*CASES} - {"mistral v3"} <= TEMPLATES.keys()),
    reason="needs ../shared and the packages trl and axolotl",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that loads at once: what is asked of it here any one does."""
    return chat_tokenizer(tmp_path_factory.mktemp("t"), None)


@pytest.fixture(scope="module")
def tokenizer(source: Path) -> PreTrainedTokenizerFast:
    return loaded(source)


def path_of(name: str) -> Path:
    return MISTRAL if name == "mistral v3" else TEMPLATES[name]


def rendered(
    tokenizer: Any, name: str, record: dict[str, Any], messages: list[Any], **how: Any
) -> str:
    # packer gives these to templates as they are in the record, and under the other name
    named = [
        m | {"thinking": m["reasoning_content"]} if "reasoning_content" in m else m
        for m in messages
    ]
    text: str = tokenizer.apply_chat_template(
        named, tools=record.get("tools"), chat_template=path_of(name).read_text(),
        tokenize=False, **CASES[name], **how,
    )  # fmt: skip
    return text


def accepted(tokenizer: Any, name: str) -> list[dict[str, Any]]:
    """The conversations that the template takes, with arguments of calls as it takes them."""
    taken = []
    for talk in TALKS:
        for as_text in (False, True):
            record = copy.deepcopy(talk)
            for call in (c for m in record["messages"] for c in m.get("tool_calls") or []):
                if as_text:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            try:
                rendered(tokenizer, name, record, record["messages"])
            except Exception:  # noqa: S112 jinja2's many
                continue
            taken.append(record)
            break
    return taken


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_masks_of_every_turn(
    folder: Path, source: Path, tokenizer: Any, name: str
) -> None:
    records = accepted(tokenizer, name)
    assert len(records) > 1
    arguments = [f"--template-arg={key}={json.dumps(value)}" for key, value in CASES[name].items()]
    pack_chat(
        records, "--turns", "each", "--chat-template", path_of(name),
        "--allow-open-turns", *arguments, template=None, tokenizer=source,
    )  # fmt: skip
    ids = {place: own.tolist() for (_, place), own in recover_documents("out").items()}
    labels = {p: own.tolist() for (_, p), own in recover_documents("out", "labels").items()}
    expected = 0
    for place, record in zip(positions(records), records, strict=True):
        messages = record["messages"]
        speakers = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        for turn, number in enumerate(speakers):
            at = place * MOST_TURNS + turn
            prompt = rendered(
                tokenizer, name, record, messages[:number], add_generation_prompt=True
            )
            whole = rendered(tokenizer, name, record, messages[: number + 1])
            if at not in ids:  # dropped: the template shows nothing of the turn
                assert re.sub(r"<\|\w+\|>|</s>|\s", "", whole[len(prompt) :]) == ""
                continue
            expected += 1
            text = tokenizer.decode(ids[at])
            assert text.startswith(prompt), (name, turn)
            if whole.startswith(prompt):
                assert text == whole
            told = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            assert ids[at] == told["input_ids"]  # of the prompt and the answer
            begin = next(
                (n for n, (_, end) in enumerate(told["offset_mapping"]) if end > len(prompt)),
                len(ids[at]),
            )
            # of the prompt nothing is trained on; of the answer all but what may follow it
            trained = [n for n, label in enumerate(labels[at]) if label != -100]
            assert trained == list(range(begin, trained[-1] + 1))
            rest = tokenizer.decode(ids[at][trained[-1] + 1 :])
            assert rest.strip() in ("", tokenizer.eos_token), (name, rest)  # after the whole text
            said = messages[number]["content"].rpartition("</think>")[2].strip()
            assert said in tokenizer.decode([ids[at][n] for n in trained])
    assert expected == len(ids)


def test_masks_of_parts_with_tools(folder: Path, source: Path, tokenizer: Any) -> None:
    """Of Qwen 3's own template: no word of the reasoning, no character of a call."""
    records = accepted(tokenizer, "shared/trl__qwen3")
    how = ("--chat-template", TEMPLATES["shared/trl__qwen3"], "--turns", "each")
    pack_chat(records, *how, "--no-train-reasoning", "--no-train-tool-calls",
              template=None, tokenizer=source)  # fmt: skip
    for text in marked("out"):
        inside = "".join(part.partition("⟧")[0] for part in text.split("⟦")[1:])
        assert "rain" not in inside
        thoughts = [m.get("reasoning_content") for r in records for m in r["messages"]]
        assert not any(thought and thought in inside for thought in thoughts)
    shown = marked("out")
    assert sum("⟦<|im_end|>" in text or "<|im_end|>\n⟧" in text for text in shown) > 5


def test_a_prompt_in_a_thought_that_the_answer_has_not(folder: Path, source: Path) -> None:
    """DeepSeek V3's template begins a thought in its prompt, and shows none."""
    how = ("--chat-template", TEMPLATES["trl/deepseekv3"], "--turns", "each")
    result = run([TALKS[0]], *how, template=None, tokenizer=source)
    assert result.exit_code == 1
    assert "the prompt for message 1 goes on in '<think>" in result.stderr
    assert not Path("out").exists()


# --- arguments ---

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "shared/trl__qwen3": [{"enable_thinking": False}, {"enable_thinking": True}],
    "shared/trl__qwen3_training": [{"enable_thinking": False}],
    "trl/qwen3": [{"enable_thinking": False}],
    "trl/qwen3_5_think": [{"enable_thinking": False}, {"enable_thinking": True}],
    "trl/glm4moe": [{"enable_thinking": False}],
    "trl/gptoss": [{"reasoning_effort": "high"}, {"model_identity": "You are Ada."}],
    "trl/nemotron_3_nano": [{"enable_thinking": False}, {"truncate_history_thinking": False}],
    "trl/llama3_1": [{"date_string": "1 May 2025"}],
}  # fmt: skip
GIVEN = [(name, given) for name, every in ARGUMENTS.items() for given in every]


@pytest.mark.parametrize(("name", "given"), GIVEN)
@pytest.mark.parametrize("own", [False, True])
def test_arguments_are_those_of_transformers(
    folder: Path, source: Path, tokenizer: Any, name: str, given: dict[str, Any], own: bool
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
        records, "--chat-template", TEMPLATES[name], "--allow-open-turns",
        *([] if own else options), template=None, tokenizer=source,
    )  # fmt: skip
    found = {place: ids.tolist() for (_, place), ids in recover_documents("out").items()}
    assert [found[place] for place in positions(records)] == expected


def test_masks_without_thinking(folder: Path, source: Path, tokenizer: Any) -> None:
    """What a prompt without thinking begins, as far as the turn goes on like it, is not learned."""
    template = TEMPLATES["shared/trl__qwen3"].read_text(encoding="utf-8")
    records = [{"messages": messages} for messages in CONVERSATIONS]
    off = ("--template-arg", "enable_thinking=false")
    pack_chat(records, *off, "--chat-template", TEMPLATES["shared/trl__qwen3"], template=None,
              tokenizer=source)  # fmt: skip
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
