"""Families of models, tiny and fresh, in each collator's hands: the table of docs/training.md, and
packer_cli/torch/families.txt, which collators read.

    python tests/extras/families.py      writes both anew; test_families.py holds them to it

Every cell is run: the packed batch's logits and loss against those of its documents one by one. The
file has further model types of transformers, of which only logits are compared: those of text, and
those that also take images, as models of their own and around a model of text.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from stand_ins import pretend_flash_attention, pretend_flex_attention, pretend_kernels
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from packer_cli.errors import UsageError
from packer_cli.torch import (
    block_mask_collate,
    collate,
    flex_block_mask,
    padded_collate,
    separate_collate,
    varlen_collate,
)

V, L, WINDOW = 61, 32, 5
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = SPECIAL | {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256,
}  # fmt: skip
OPT = SPECIAL | {
    "vocab_size": V, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
         "mamba_expand": 2, "mamba_chunk_size": 16}  # fmt: skip
MAMBA2 = SPECIAL | {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
    "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 16,
}  # fmt: skip
WINDOWED = {"sliding_window": WINDOW}
SLIDING_FIRST = {"layer_types": ["sliding_attention", "full_attention"], **WINDOWED}
NEXT = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16}  # fmt: skip
LINEAR = {name: size for name, size in NEXT.items() if "expert" not in name}
KDA = {"linear_head_dim": 16, "linear_num_heads": 2,
       "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
# the third and fourth layer take the keys and values of the first and second
SHARED = WINDOWED | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": V,
}  # fmt: skip
CHUNKED = {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48,
           "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"],
           "output_router_logits": False}  # fmt: skip

EXPERTS = {
    "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 16, "output_router_logits": False,
}  # fmt: skip

PLACES = {"rope_parameters": {  # a position has a time, a height and a width
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}  # fmt: skip

# name: (class of its config, what it has beside SIZES; a whole dict of its own after None)
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Llama": (hf.LlamaConfig, SIZES),
    "Qwen2 with a window": (hf.Qwen2Config, SIZES | WINDOWED | {
        "use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3": (hf.Qwen3Config, SIZES),
    "Qwen2.5-VL": (hf.Qwen2_5_VLConfig, SIZES | PLACES),
    "Mistral with a window": (hf.MistralConfig, SIZES | WINDOWED),
    "Gemma 2": (hf.Gemma2Config, SIZES | WINDOWED | {"query_pre_attn_scalar": 16}),
    "Gemma 3": (hf.Gemma3TextConfig, SIZES | SLIDING_FIRST | {"query_pre_attn_scalar": 16}),
    "Gemma 4": (hf.Gemma4TextConfig, SIZES | SHARED | {"global_head_dim": 32}),
    "Gemma 4 with images": (hf.Gemma4Config, SIZES | SHARED | {"global_head_dim": 32}),
    "Phi-3 with a window": (hf.Phi3Config, SIZES | WINDOWED),
    "Llama 4": (hf.Llama4TextConfig, SIZES | CHUNKED),
    "gpt-oss": (hf.GptOssConfig, SIZES | WINDOWED | {
        "num_local_experts": 2, "num_experts_per_tok": 1}),
    "OPT": (hf.OPTConfig, OPT),
    "BLOOM": (hf.BloomConfig, SPECIAL | {
        "vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "GPT-NeoX": (hf.GPTNeoXConfig, SIZES),
    "LFM2": (hf.Lfm2Config, SIZES | {"layer_types": ["conv", "full_attention"]}),
    "Granite 4 hybrid": (hf.GraniteMoeHybridConfig, SIZES | MAMBA | {
        "layer_types": ["mamba", "attention"], "num_local_experts": 0,
        "shared_intermediate_size": 48}),
    "Falcon-H1": (hf.FalconH1Config, SIZES | MAMBA | {"mamba_d_ssm": 64}),
    "Qwen3-Next": (hf.Qwen3NextConfig, SIZES | NEXT),
    "Qwen 3.5 and 3.6": (hf.Qwen3_5TextConfig, SIZES | LINEAR),
    "Qwen 3.5 and 3.6 with experts": (hf.Qwen3_5MoeTextConfig, SIZES | NEXT),
    "Qwen 3.5 and 3.6 with images": (hf.Qwen3_5Config, SIZES | LINEAR),
    "Kimi Linear": (hf.KimiLinearConfig, SIZES | EXPERTS | KDA | {
        "num_key_value_heads": 2, "q_lora_rank": None}),
    "Mamba2": (hf.Mamba2Config, MAMBA2),
}  # fmt: skip
# those with layers that only kernels keep apart; FAMILIES runs them without, these with stand-ins
WITH_KERNELS = ["LFM2", "Granite 4 hybrid", "Falcon-H1", "Qwen3-Next", "Mamba2", "Kimi Linear",
                *(name for name in FAMILIES if name.startswith("Qwen 3.5"))]  # fmt: skip
ATTENTIONS = {"sdpa": "SDPA", "eager": "eager", "flex_attention": "Flex", "flash_attention_2": "FA"}
COLLATORS = ["varlen_collate", "padded_collate", "block_mask_collate", "separate_collate"]


def rows() -> list[dict[str, Any]]:
    """Documents of one token, longer than a window, a full row; with padding and without."""
    random, found = torch.Generator().manual_seed(0), []
    for lengths in ([7, 9, 12], [1, 3, 20, 8], [32], [13, 19]):
        edges = torch.tensor([0, *lengths]).cumsum(0)
        ids = torch.randint(3, V, (L,), generator=random)
        ids[edges[-1] :] = 0
        labels = torch.where(torch.rand(L, generator=random) < 0.8, ids, -100)
        labels[edges[:-1]] = -100
        labels[edges[-1] :] = -100
        row = {"input_ids": ids, "labels": labels, "cu_seqlens": edges}
        found.append({name: value.int() for name, value in row.items()})
    return found


def model_of(name: str, attention: str) -> Any:
    """A model of a family, with weights large enough that everything is seen.

    Raises ValueError for an attention that the family does not have.
    """
    return made(*FAMILIES[name], attention)


def made(kind: Any, sizes: dict[str, Any], attention: str) -> Any:
    """A model of a config. Raises ValueError as `model_of`."""
    torch.manual_seed(0)
    pretended = attention == "flash_attention_2"
    first = "eager" if pretended else attention
    model = _of_config(kind, sizes, attn_implementation=first).eval()
    if attention == "flex_attention" and any(hasattr(one, "sinks") for one in model.modules()):
        raise ValueError("FlexAttention with sinks wants a GPU")
    if attention != "eager" and not any(map(_attends, model.modules())):
        raise ValueError("nothing in it attends")
    if pretended:
        if not model._supports_flash_attn:
            raise ValueError("no FlashAttention")
        model.config._attn_implementation = attention
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def _of_config(kind: Any, sizes: dict[str, Any], **options: Any) -> Any:
    """A model of text, or what text passes through of one that also takes images."""
    sizes = deepcopy(sizes)  # configs change what they get
    if not (name := _text_part(kind)):
        return hf.AutoModelForCausalLM.from_config(kind(**sizes), **options)
    config = kind()
    setattr(config, name, type(getattr(config, name))(**sizes))
    with torch.device("meta"):
        model = hf.AutoModelForImageTextToText.from_config(config, **options)
    text = getattr(model.config, name)
    whole = [module for module in model.modules() if getattr(module, "config", None) is text]
    places = {module: place for place, module in model.named_modules() if module in whole}
    model.set_submodule(places[whole[0]], hf.AutoModel.from_config(text))
    for place, module in [*model.named_modules()]:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if place.endswith("lm_head"):
            module.to_empty(device="cpu")
        elif any(one.is_meta for one in own):
            model.set_submodule(place, torch.nn.Identity())
    return model


@cache
def _text_part(kind: Any) -> str:
    """The name of a config's part for text; "" where it is of text alone."""
    with contextlib.suppress(Exception):
        config = kind()
        for name in getattr(config, "sub_configs", {}):
            if getattr(config, name) is config.get_text_config():
                return str(name)
    return ""


def _attends(module: Any) -> bool:
    return "Attention" in type(module).__name__


def documents(packed: list[dict[str, Any]]) -> Iterator[tuple[int, slice]]:
    for number, row in enumerate(packed):
        for begin, end in pairwise(row["cu_seqlens"].tolist()):
            yield number, slice(begin, end)


@cache
def alone(name: str) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """One by one in eager attention: (each document's logits [length, V], the losses of its trained
    tokens, gradients of the mean loss).
    """
    model, logits, losses, packed = model_of(name, "eager"), [], [], rows()
    for number, place in documents(packed):
        ids = packed[number]["input_ids"][place].long()
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        losses.append(losses_of(logits[-1], packed[number]["labels"][place]))
    torch.cat(losses).mean().backward()
    slopes = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [one.detach() for one in logits], [one.detach() for one in losses], slopes


def losses_of(logits: Any, labels: Any) -> Any:
    """Of the tokens of a document that are trained on."""
    trained = labels[1:] != -100
    return torch.nn.functional.cross_entropy(
        logits[:-1][trained], labels[1:][trained].long(), reduction="none"
    )


def batch_of(collator: str, attention: str, config: Any) -> dict[str, Any]:
    """What a user gives to the model. Raises UsageError where the collator refuses the config."""
    if collator == "separate_collate":
        return separate_collate(rows())
    if collator == "block_mask_collate":
        if attention != "flex_attention":
            return block_mask_collate(rows(), config=config)
        batch = block_mask_collate(rows(), config=config, form="documents")
        made = flex_block_mask(batch.pop("document_ids"), config=config)
        return batch | {"attention_mask": made}
    collate: Any = varlen_collate if collator == "varlen_collate" else padded_collate
    return collate(rows(), config=config)  # type: ignore[no-any-return]


def laid_out(collator: str, logits: Any) -> list[Any]:
    """Each document's logits in a batch of `rows`."""
    packed = rows()
    if collator == "separate_collate":
        lengths = [place.stop - place.start for _, place in documents(packed)]
        return [one[:n] for one, n in zip(logits, lengths, strict=True)]
    by_row = logits.reshape(len(packed), L, V)
    return [by_row[number, place] for number, place in documents(packed)]


def difference(name: str, model: Any, collator: str, batch: dict[str, Any]) -> float:
    """The largest, of logits and of the loss, between documents packed and alone."""
    expected, losses, _ = alone(name)
    with torch.no_grad():
        found = model(**batch)
    pairs = zip(laid_out(collator, found.logits), expected, strict=True)
    loss = found.loss.item() - torch.cat(losses).mean().item()
    return max(abs(loss), *(float((a - b).abs().max()) for a, b in pairs))


EQUAL = 2e-5  # logits are as large as 5; float32


@cache
def had(name: str, attention: str) -> Any:
    """`model_of`, or None."""
    try:
        return model_of(name, attention)
    except (ValueError, ImportError):
        return None


def outcome(name: str, attention: str, collator: str) -> str:
    """ "equal", "refused" by the collator or by transformers, "DIFFERS"; "" where there is none."""
    model = had(name, attention)
    if model is None:
        return ""
    if attention == "flash_attention_2" and collator == "block_mask_collate":
        return ""
    try:
        batch = batch_of(collator, attention, model.config)
        found = difference(name, model, collator, batch)
    except (UsageError, ValueError):
        return "refused"
    return "equal" if found < EQUAL else "DIFFERS"


@contextlib.contextmanager
def standing_in(name: str, kernels: bool) -> Iterator[None]:
    """With FlashAttention, FlexAttention uncompiled, and a family's kernels where wanted."""
    with torch.compiler.set_stance("force_eager"), pytest.MonkeyPatch.context() as patch:
        pretend_flash_attention(patch)
        pretend_flex_attention(patch)
        if kernels:
            pretend_kernels(model_of(name, "eager"), patch)
        yield


def cell(outcomes: dict[str, str]) -> str:
    """{"sdpa": "equal", ...} as the page says it."""
    by: dict[str, list[str]] = {}
    for attention, one in outcomes.items():
        if one:
            by.setdefault(one, []).append(ATTENTIONS[attention])
    if len(by) == 1:
        return next(iter(by))
    return "; ".join(f"{', '.join(names)}: {one}" for one, names in sorted(by.items())) or "–"


def outcomes(name: str) -> dict[str, dict[str, str]]:
    """By collator and attention, where a family's kernels stand in or not."""
    return {
        collator: {one: outcome(name, one, collator) for one in ATTENTIONS}
        for collator in COLLATORS
    }


def line(name: str, kernels: bool, found: dict[str, dict[str, str]]) -> str:
    had = ", ".join(ATTENTIONS[one] for one in ATTENTIONS if found["separate_collate"][one])
    cells = [name + (", kernels" if kernels else ""), had, *map(cell, found.values())]
    return f"| {' | '.join(cells)} |"


def cases() -> list[tuple[str, bool]]:
    return [(name, kernels) for name in FAMILIES for kernels in (False, True)
            if not kernels or name in WITH_KERNELS]  # fmt: skip


# sizes of model types beside those of FAMILIES, the first with which a model is small and runs
FURTHER = SIZES | EXPERTS | {
    "num_key_value_heads": 2, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 256,
    "d_model": 32, "num_layers": 2, "num_heads": 2, "ffn_dim": 48, "n_layers": 2, "n_heads": 2,
    "q_lora_rank": 16, "rotary_dim": 8,
}  # fmt: skip
# of those that need their own
PARTICULAR: dict[str, dict[str, Any]] = {
    "bailing_hybrid": FURTHER | KDA,
    "bamba": FURTHER | MAMBA | {"attn_layer_indices": [1], "attn_rotary_emb": 16},
    "codegen": FURTHER | {"n_head": 4},
    "gemma3n_text": SIZES | SHARED | {
        "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    "glm5_next_text": FURTHER | KDA | {
        "layer_types": ["linear_attention", "indexed_attention"], "head_dim": 0,
        "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "index_topk": 32, "index_kpool": 1,
        "index_head_dim": 16, "index_n_heads": 2, "hc_mult": 2, "mlp_layer_types": ["dense"] * 2},
    "lfm2_moe": FURTHER | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mimo_v2_flash": FURTHER | SLIDING_FIRST | {"num_key_value_heads": 1},
    "zamba2": SPECIAL | {
        "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "n_mamba_heads": 4,
        "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "intermediate_size": 48,
        "num_attention_heads": 2, "chunk_size": 16, "adapter_rank": 4},
}  # fmt: skip
WAYS: list[dict[str, Any]] = [
    FURTHER, {k: v for k, v in FURTHER.items() if k != "head_dim"}, SIZES,
    FURTHER | {"qk_rope_head_dim": 8}, FURTHER | PLACES,
]  # fmt: skip
MOST_PARAMETERS = 2_000_000


def types() -> dict[str, dict[Any, list[dict[str, Any]]]]:
    """By `model_type`, that of the part for text, the classes of configs and the sizes to try."""
    found: dict[str, dict[Any, list[dict[str, Any]]]] = {}
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
    for kind in [kind for kind, _ in FAMILIES.values()] + [hf.CONFIG_MAPPING[n] for n in names]:
        part = _text_part(kind)
        name = getattr(kind(), part).model_type if part else kind.model_type
        ways = [sizes for family, sizes in FAMILIES.values() if family.model_type == name][:1]
        ways += [PARTICULAR[name]] if name in PARTICULAR else []
        found.setdefault(name, {})[kind] = ways or WAYS
    return found


def group_of(kind: Any, ways: list[dict[str, Any]]) -> str:
    """What keeps documents of a type apart, as `isolation` says; "" where that cannot be told."""
    for sizes in ways:
        with contextlib.suppress(Exception):
            logits = _logits_alone(kind, sizes)
            return _group_of(kind, sizes, logits)
    return ""


def _group_of(kind: Any, sizes: dict[str, Any], logits: list[Any]) -> str:
    def leak(attention: str, *collators: str) -> bool | None:
        """Whether documents see each other in any batch, with kernels or without."""
        every = product(collators, (False, True))
        found = {_leak(kind, sizes, logits, attention, *how) for how in every}
        return True if True in found else False if False in found else None

    of_positions = {leak(one, *COLLATORS[:2]) for one in ("sdpa", "eager")} - {None}
    masks = {leak(one, "block_mask_collate") for one in ("sdpa", "eager")} - {None}
    varlen, padded = (leak("flash_attention_2", one) for one in COLLATORS[:2])
    if of_positions == {False} and varlen is not True:
        return "end-to-end" if padded is True else "positions"
    if of_positions == {True} and True not in (varlen, padded) and masks == {False}:
        return "boundaries"
    return "never" if True in of_positions else ""


def _small(kind: Any, sizes: dict[str, Any], attention: str) -> Any:
    with torch.device("meta"):
        model = _of_config(kind, sizes)
    if sum(one.numel() for one in model.parameters()) > MOST_PARAMETERS:
        raise ValueError("a large model")
    return made(kind, sizes, attention)


def _logits_alone(kind: Any, sizes: dict[str, Any]) -> list[Any]:
    model, packed = _small(kind, sizes, "eager"), rows()
    with torch.no_grad():
        return [
            model(input_ids=packed[n]["input_ids"][place].long()[None], use_cache=False).logits[0]
            for n, place in documents(packed)
        ]


def _leak(
    kind: Any,
    sizes: dict[str, Any],
    alone: list[Any],
    attention: str,
    collator: str,
    kernels: bool,
) -> bool | None:
    """Whether documents see each other; None if nothing is computed, or too little to tell."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Exception):
        patch.setattr(collate, "check_suitable", lambda *_: None)
        model = _small(kind, sizes, attention)
        if kernels:
            pretend_kernels(model, patch)
        batch = batch_of(collator, attention, model.config)
        seen = _largest(model, batch, alone)
        plain = {"input_ids": torch.stack([row["input_ids"] for row in rows()]).long()}
        if seen < 1e-3 and _largest(model, plain | {"use_cache": False}, alone) < 1e-2:
            return None  # nor without any boundaries
        return True if seen > 1e-2 else False if seen < 1e-3 else None
    return None


def _largest(model: Any, batch: dict[str, Any], alone: list[Any]) -> float:
    given = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        found = laid_out("", model(**given).logits)
    return max(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True))


GROUPS = ("positions", "end-to-end", "boundaries", "never")


def judged(names: list[str]) -> dict[str, str]:
    """The groups of model types, of those that could be run: the strictest of its classes'."""
    every, found = types(), dict[str, str]()
    for name in names:
        with standing_in(next(iter(FAMILIES)), kernels=False):
            groups = [group_of(kind, ways) for kind, ways in every[name].items()]
        found[name] = max(groups, key=("", *GROUPS).index)
    return {name: group for name, group in found.items() if group}


def file_of(found: dict[str, str]) -> str:
    """The content of families.txt."""
    return "".join(
        f"{group} {line}\n"
        for group in GROUPS
        for line in textwrap.wrap(
            " ".join(sorted(name for name, own in found.items() if own == group)),
            80, break_on_hyphens=False,
        )
    )  # fmt: skip


HEAD = "| family | attention | " + " | ".join(f"`{one}`" for one in COLLATORS) + " |"
PAGE = Path(__file__).parents[2] / "docs" / "training.md"
FILE = Path(__file__).parents[2] / "packer_cli" / "torch" / "families.txt"


def table() -> str:
    families: dict[str, list[str]] = {}  # those with the same cells share a line
    for name, kernels in cases():
        with standing_in(name, kernels):
            family, cells = line(name, kernels, outcomes(name)).removeprefix("| ").split(" | ", 1)
            families.setdefault(cells, []).append(family)
    lines = (f"| {'; '.join(names)} | {cells}" for cells, names in families.items())
    return "\n".join([HEAD, "|---" * (len(COLLATORS) + 2) + "|", *lines])


if __name__ == "__main__":
    torch.set_num_threads(1)
    before, after = re.split(rf"{re.escape(HEAD)}\n(?:\|.*\n)*", PAGE.read_text())
    PAGE.write_text(f"{before}{table()}\n{after}")
    FILE.write_text(file_of(judged([*types()])))
