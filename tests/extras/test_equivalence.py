"""Packed training equals unpacked training: the same losses of tokens, and the same gradients.

Tiny Llama- and Qwen-type models of transformers with random weights in float32 read the same
documents alone, one by one, and packed, through every collator and way of attention. The tests at
the end give `check` labels and positions that are wrong, which it must refuse. test_families.py
holds logits of many families, and test_isolation.py what documents see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import pretend_flash_attention
from support import packer, recover_documents
from torch.nn.functional import cross_entropy, pad
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import is_flash_attn_2_available

from packer_cli import open_packed
from packer_cli.result.reader import segments_of
from packer_cli.torch import (
    PackedDataset,
    block_mask_collate,
    flex_block_mask,
    padded_collate,
    varlen_collate,
)

# torch deprecates what transformers and its own compiler still use for FlexAttention
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

VOCABULARY, L = 61, 64
LOSS, GRADIENT = 1e-5, 1e-4
Batch = dict[str, Any]
Collate = Callable[[Any], Batch]


def block_mask(rows: Any) -> Batch:
    return block_mask_collate(rows, config=None)


def additive_mask(rows: Any) -> Batch:
    return block_mask_collate(rows, config=SimpleNamespace(_attn_implementation="eager"))


def flex_documents(rows: Any) -> Batch:
    batch = block_mask_collate(rows, config=None, form="documents")
    return batch | {"attention_mask": flex_block_mask(batch.pop("document_ids"), config=None)}


def positions_alone(rows: Any) -> Batch:
    """What is left of varlen_collate for who knows no boundaries: they follow from positions."""
    names = ("input_ids", "labels", "position_ids", "use_cache")
    return varlen_collate(rows, names=names, config=None)


PRETENDED = "flash_attention_2, pretended"  # its functions in plain torch, called by transformers
# (collator, attn_implementation)
WAYS = [
    (partial(varlen_collate, config=None), "sdpa"),
    (partial(varlen_collate, config=None), "eager"),
    (positions_alone, "sdpa"),
    (partial(padded_collate, config=None), "sdpa"),
    (partial(padded_collate, config=None), "eager"),
    (partial(padded_collate, config=None), "flex_attention"),
    (block_mask, "sdpa"),
    (additive_mask, "sdpa"),
    (additive_mask, "eager"),
    (flex_documents, "flex_attention"),
    (partial(varlen_collate, config=None), PRETENDED),
    (partial(padded_collate, config=None), PRETENDED),
    (positions_alone, PRETENDED),
]
IDS = [f"{getattr(made, 'func', made).__name__}-{attention}" for made, attention in WAYS]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen rows: documents of one token, full rows, cut documents, untrained tokens."""
    folder = tmp_path_factory.mktemp("packed")
    random = np.random.default_rng(0)
    lines = []
    for n in [1, 1, L, L, 2 * L + 5, *random.integers(2, L, 25)]:
        ids = random.integers(1, VOCABULARY, n)
        labels = np.where(random.random(n) < 0.7, ids, -100)
        lines.append(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    result = packer("pack", folder / "data.jsonl", "-l", L, "-o", folder / "out", "-q")
    assert result.exit_code == 0, result.stderr
    assert recover_documents(folder / "out")
    return folder / "out"


def model_of(kind: str, attention: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 256,
        "attn_implementation": "eager" if attention == PRETENDED else attention,
    }  # fmt: skip
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).train()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).train()
    if attention == PRETENDED:
        model.config._attn_implementation = "flash_attention_2"
    return model


def documents(directory: Path) -> Iterator[tuple[Any, Any]]:
    """(ids, labels) of every segment, in the order of rows, taken from the shards alone."""
    opened = open_packed(directory)
    for shard in opened.manifest["shards"]:
        for batch in opened.batches(shard):
            ids, labels = (
                np.array(batch.column(name).to_pylist()) for name in ("input_ids", "labels")
            )
            begins, lengths, of_row = segments_of(batch)
            for row in range(len(ids)):
                for k in range(of_row[row], of_row[row + 1]):
                    here = slice(begins[k], begins[k] + lengths[k])
                    yield torch.tensor(ids[row, here]), torch.tensor(labels[row, here])


def losses(logits: Any, labels: Any) -> Any:
    """The loss of every place by the label of the next, 0 where that is -100; as transformers."""
    following = pad(labels, (0, 1), value=-100)[..., 1:]
    return cross_entropy(logits.flatten(0, -2), following.flatten(), reduction="none")


def gradients(model: Any) -> dict[str, Any]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@cache
def unpacked(kind: str, directory: Path) -> tuple[Any, float, dict[str, Any]]:
    """(loss of every trained token in the order of rows, their mean, gradients of the mean)."""
    model = model_of(kind, "eager")
    found = [losses(model(input_ids=ids[None], use_cache=False).logits, labels[None])[
        labels.roll(-1)[None].flatten() != -100] if len(ids) > 1 else torch.zeros(0)
        for ids, labels in documents(directory)]  # fmt: skip
    together = torch.cat(found)
    model.zero_grad()
    together.mean().backward()
    return together.detach(), together.mean().item(), gradients(model)


def check(kind: str, attention: str, directory: Path, collate: Collate) -> None:
    """Assert that packed training is unpacked training: per token, in the mean, in gradients.

    FlexAttention has no backward on a CPU: there it is held to losses, on a GPU to gradients too.
    """
    model = model_of(kind, attention)
    device = "cuda" if attention == "flex_attention" and torch.cuda.is_available() else "cpu"
    learns = attention != "flex_attention" or device == "cuda"
    expected, mean, slopes = unpacked(kind, directory)
    dataset = PackedDataset(directory)
    batch = moved(collate(dataset.__getitems__(range(len(dataset)))), device)
    with torch.set_grad_enabled(learns):
        found = model.to(device)(**batch)
    assert found.loss.item() == pytest.approx(mean, abs=LOSS)  # first, for labels that are wrong
    each = losses(found.logits, batch["labels"])
    trained = pad(batch["labels"], (0, 1), value=-100)[..., 1:].flatten() != -100
    assert trained.sum() == len(expected)
    torch.testing.assert_close(each[trained].detach().cpu(), expected, atol=LOSS, rtol=0)
    if learns:
        found.loss.backward()
        for name, slope in gradients(model).items():
            torch.testing.assert_close(slope.cpu(), slopes[name], atol=GRADIENT, rtol=0)


def moved(batch: Batch, device: str) -> Batch:
    return {name: v.to(device) if hasattr(v, "to") else v for name, v in batch.items()}


@pytest.mark.parametrize("kind", ["llama", "qwen"])
@pytest.mark.parametrize(("collate", "attention"), WAYS, ids=IDS)
def test_packed_equals_unpacked(
    monkeypatch: pytest.MonkeyPatch, packed: Path, kind: str, collate: Collate, attention: str
) -> None:
    if attention == PRETENDED:
        pretend_flash_attention(monkeypatch)
    check(kind, attention, packed, collate)


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_labels_that_are_stored_shifted(packed: Path, tmp_path: Path, kind: str) -> None:
    """As docs/training.md gives them to a model of transformers."""
    result = packer(
        "pack", packed.parent / "data.jsonl", "-l", L, "-o", tmp_path / "out", "-q",
        "--label-shift", "pre",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    dataset = PackedDataset(tmp_path / "out")
    batch = varlen_collate(dataset.__getitems__(range(len(dataset))), config=None)
    loss = model_of(kind, "sdpa")(**batch, labels=batch["shift_labels"]).loss
    _, mean, _ = unpacked(kind, packed)
    assert loss.item() == pytest.approx(mean, abs=LOSS)


def test_flash_attention(packed: Path) -> None:
    if not (torch.cuda.is_available() and is_flash_attn_2_available()):
        pytest.skip("FlashAttention needs a GPU and flash-attn, which are not here")
    bounds = {"atol": 2e-2, "rtol": 0}  # it computes in bfloat16
    flash = model_of("llama", "flash_attention_2").cuda().bfloat16()
    expected, *_ = unpacked("llama", packed)
    dataset = PackedDataset(packed)
    batch = moved(varlen_collate(dataset.__getitems__(range(len(dataset))), config=None), "cuda")
    each = losses(flash(**batch).logits.float(), batch["labels"])
    trained = pad(batch["labels"], (0, 1), value=-100)[..., 1:].flatten() != -100
    torch.testing.assert_close(each[trained].cpu(), expected, **bounds)


# --- collators that are wrong, as they have been seen elsewhere ---


def only_the_mask_restarts(rows: Any) -> Batch:
    """Nothing leaks, but positions go on through the row; rotary ones hide it well."""
    return block_mask(rows) | {"position_ids": torch.arange(L).expand(len(rows), L) * 2}


def labels_shifted_twice(rows: Any) -> Batch:
    batch = padded_collate(rows, config=None)
    return batch | {"labels": pad(batch["labels"], (0, 1), value=-100)[:, 1:]}


def first_tokens_trained(rows: Any) -> Batch:
    """Labels that are the ids: each document's first token is predicted from another's last."""
    batch = padded_collate(rows, config=None)
    return batch | {"labels": batch["input_ids"]}


@pytest.mark.parametrize(
    "wrong", [only_the_mask_restarts, labels_shifted_twice, first_tokens_trained]
)
def test_a_wrong_collator_is_found(packed: Path, wrong: Collate) -> None:
    with pytest.raises(AssertionError):
        check("llama", "sdpa", packed, wrong)
