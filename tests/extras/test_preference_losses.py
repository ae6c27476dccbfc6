"""Losses of packed pairs are TRL's own, of the same records unpacked, and so are their gradients.

TRL's trainers make their batches of the records and compute their losses with a tiny model in
float32. The same records in packed rows go through a loader, the collators and `answer_logps`. For
all of DPO's losses, TRL's code is given the packed log-probabilities in place of a model's; those
of reward models and KTO are written out here, as docs/trainers/preference.md has them.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers as tiny
import torch
from datasets import Dataset
from pair_rows import Pair, random_pairs, rows_of
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from packer_cli.torch import (
    PackedSampler,
    answer_logps,
    block_mask_collate,
    padded_collate,
    preference_collate,
    separate_collate,
    token_logps,
    unpaired_collate,
)

# what torch, transformers, TRL and datasets say of themselves
pytestmark = pytest.mark.filterwarnings("ignore", "error:::packer_cli")

VOCABULARY, L = 400, 64
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
FIELDS = [("prompt", ""), ("chosen", " "), ("rejected", " ")]
LOSSES = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
          "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
          "sigmoid_norm"]  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256, "initializer_range": 0.1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What TRL makes tokens with. Packed rows have the tokens that it makes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    special = {"eos_token": tiny.EOS, "bos_token": tiny.BOS, "pad_token": tiny.BOS}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    tiny.save(folder, tiny.byte_level(), tokenizer_config=config)
    return AutoTokenizer.from_pretrained(folder)


def causal(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def text(random: Any) -> str:
    """Of about one to a dozen tokens."""
    return " ".join(
        "".join(random.choice(list("abcdefg"), 2)) for _ in range(random.integers(1, 5))
    )


def arguments(kind: Any, folder: Path, **how: Any) -> Any:
    return kind(output_dir=str(folder), use_cpu=True, report_to="none", bf16=False,
                gradient_checkpointing=False, **how)  # fmt: skip


def gradients(model: Any) -> dict[str, Any]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert max(slope.abs().max() for slope in found.values()) > 1e-3
    return found


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    torch.testing.assert_close(found[0].detach(), expected[0].detach(), **CLOSE)
    assert found[1].keys() == expected[1].keys()
    scale = max(1, *(float(slope.abs().max()) for slope in expected[1].values()))
    for name, slope in found[1].items():
        torch.testing.assert_close(slope, expected[1][name], atol=1e-5 * scale, rtol=1e-5)


def batches(pairs: list[Pair], collate: Any, **how: Any) -> list[Any]:
    """Batches of three or four rows, the last one with fewer, in the order of the rows."""
    rows = rows_of(pairs, L, **how)
    size = 3 if len(rows) % 3 else 4
    assert len(rows) % size
    assert max(len(row["pair"]) for row in rows) >= 4
    loader = DataLoader(
        rows, batch_size=size, sampler=PackedSampler(rows, seed=None), collate_fn=collate
    )
    return list(loader)


WAYS = {
    "varlen": partial(preference_collate, config=None),
    "padded": partial(preference_collate, collate=partial(padded_collate, config=None)),
    "mask": partial(preference_collate, collate=partial(block_mask_collate, config=None)),
    "separate": partial(preference_collate, collate=separate_collate),
}
FORMS = [
    ("varlen", {}), ("varlen", {"multiple": 8}), ("varlen", {"shift": "pre"}),
    ("padded", {"multiple": 8}), ("mask", {}), ("separate", {"multiple": 4}),
]  # fmt: skip


@pytest.fixture(scope="module")
def dpo(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(trainer, its pairs) of a kind of model."""
    random = np.random.default_rng(0)
    texts = [{name: lead + text(random) for name, lead in FIELDS} for _ in range(17)]
    trainers: dict[str, Any] = {}
    for kind in ("llama", "qwen"):
        folder = tmp_path_factory.mktemp("dpo")
        trainers[kind] = DPOTrainer(
            causal(kind, 0), causal(kind, 1),
            arguments(DPOConfig, folder, beta=0.5, max_length=None, label_smoothing=0.1),
            train_dataset=Dataset.from_list(texts), processing_class=tokenizer,
        )  # fmt: skip
    records = list(trainers["llama"].train_dataset)
    pairs = [Pair(r["prompt_ids"], r["chosen_ids"], r["rejected_ids"]) for r in records]
    return trainers, pairs, records


class _Packed(torch.nn.Module):
    """What TRL's loss asks a model: the log-probability of each token, here of packed answers."""

    def __init__(self, logps: Any) -> None:
        super().__init__()
        self.logps = logps

    def forward(self, **_: Any) -> Any:
        none = torch.zeros_like(self.logps)
        return SimpleNamespace(
            log_probs=self.logps, entropy=none, mean_logits=none, is_top1=none.bool()
        )


def trls_inputs(batch: Any) -> dict[str, Any]:
    """A batch as TRL's loss takes it: all chosen answers, then all rejected ones, one place of a
    prompt each.
    """
    lengths = batch["lengths"][torch.cat([batch["chosen"], batch["rejected"]])]
    mask = (torch.arange(int(lengths.max()) + 1) <= lengths[:, None]).long()
    return {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask - (mask.cumsum(1) == 1).long() * mask,
    }


def laid_out(batch: Any, logps: Any) -> Any:
    """Log-probabilities of tokens in the same layout."""
    order = torch.cat([batch["chosen"], batch["rejected"]])
    each = logps.split(batch["lengths"].tolist())
    return torch.nn.utils.rnn.pad_sequence(
        [each[answer] for answer in order.tolist()], batch_first=True
    )


@pytest.mark.parametrize(
    ("kind", "way", "form"), [("qwen", "varlen", {}), *(("llama", *one) for one in FORMS)], ids=str
)
def test_dpo(dpo: Any, kind: str, way: str, form: dict[str, Any]) -> None:
    """Each batch of a loader: TRL's losses of packed answers, and of its own batch of the same."""
    trainers, pairs, records = dpo
    trainer, done = trainers[kind], 0
    model, reference = trainer.model, trainer.ref_model
    found_batches = batches(pairs, WAYS[way], **form)
    for batch in found_batches:
        inputs, count = batch["inputs"], len(batch["chosen"])
        theirs = trainer.data_collator(records[done : done + count])
        done += count
        for loss in LOSSES if (kind, way, form) == ("llama", "varlen", {}) else LOSSES[:3]:
            trainer.loss_types = [loss]
            trainer.model, trainer.ref_model = model, reference
            expected = trainer._compute_loss(model, theirs, False)
            expected.backward()
            slopes = gradients(model)
            packed = token_logps(model(**inputs).logits, batch)
            with torch.no_grad():
                old = token_logps(reference(**inputs).logits, batch)
            trainer.ref_model = _Packed(laid_out(batch, old))
            found = trainer._compute_loss(
                _Packed(laid_out(batch, packed)), trls_inputs(batch), False
            )
            found.backward()
            trainer.ref_model = reference
            assert_same((found, gradients(model)), (expected, slopes))
    assert done == len(records)


@pytest.mark.parametrize("form", [{}, {"multiple": 8}], ids=str)
def test_reward_models(tokenizer: Any, tmp_path: Path, form: dict[str, Any]) -> None:
    pairs = random_pairs(17, VOCABULARY)
    records = [{"chosen_ids": p.prompt + p.chosen, "rejected_ids": p.prompt + (p.rejected or [])}
               for p in pairs]  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    trainer = RewardTrainer(
        model, arguments(RewardConfig, tmp_path, max_length=None, center_rewards_coefficient=0.01),
        train_dataset=Dataset.from_list(records), processing_class=tokenizer,
    )  # fmt: skip
    done = 0
    for batch in batches(pairs, WAYS["varlen"], **form):
        chosen, rejected = batch["chosen"], batch["rejected"]
        theirs = trainer.data_collator(records[done : done + len(chosen)])
        done += len(chosen)
        expected = trainer.compute_loss(model, theirs)
        expected.backward()
        slopes = gradients(model)
        hidden = model.base_model(**batch["inputs"]).last_hidden_state.flatten(0, 1)
        scores = model.score(hidden[batch["last_tokens"]])[:, 0]
        found = -logsigmoid(scores[chosen] - scores[rejected]).mean()
        found = found + 0.01 * (scores[chosen] + scores[rejected]).square().mean()
        found.backward()
        assert_same((found, gradients(model)), (expected, slopes))
    assert done == len(records)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("form", [{}, {"multiple": 8}], ids=str)
def test_kto(tokenizer: Any, tmp_path: Path, loss: str, form: dict[str, Any]) -> None:
    """The KL term, too: TRL pairs each prompt of a batch with the answer before it."""
    random = np.random.default_rng(0)
    texts = [
        {
            "prompt": text(random),
            "completion": " " + text(random),
            "label": bool(random.random() < 0.5),
        }
        for _ in range(30)
    ]
    model, reference = causal("llama", 1), causal("llama", 0)

    def trainer_of(records: list[Any]) -> Any:
        how = {"desirable_weight": 1.5, "per_device_train_batch_size": len(records)}
        return KTOTrainer(
            copy.deepcopy(model), copy.deepcopy(reference),
            arguments(KTOConfig, tmp_path, beta=0.5, max_length=None, loss_type=loss, **how),
            train_dataset=Dataset.from_list(records), processing_class=tokenizer,
        )  # fmt: skip

    pairs = [
        Pair(r["prompt_ids"], r["completion_ids"], None, r["label"])
        for r in trainer_of(texts).train_dataset
    ]
    kl_seen, done = [], 0
    for batch in batches(pairs, partial(unpaired_collate, config=None, mismatched=True), **form):
        desirable, count = batch["desirable"], len(batch["lengths"])
        trainer = trainer_of(texts[done : done + count])
        done += count
        theirs = trainer.data_collator(list(trainer.train_dataset))
        expected = trainer._compute_loss(trainer.model, theirs, False)
        expected.backward()

        with torch.no_grad():
            old = answer_logps(reference(**batch["inputs"]).logits, batch)
            others = batch["mismatched"]
            kl = answer_logps(model(**others["inputs"]).logits, others)
            kl = kl - answer_logps(reference(**others["inputs"]).logits, others)
            kl = kl.mean().clamp(min=0)
        ratios = answer_logps(model(**batch["inputs"]).logits, batch) - old
        kl_seen.append(float(kl))
        kl = kl if loss == "kto" else 0
        good = 1.5 * (1 - torch.sigmoid(0.5 * (ratios[desirable] - kl)))
        bad = 1 - torch.sigmoid(0.5 * (kl - ratios[~desirable]))
        found = torch.cat([good, bad]).mean()
        found.backward()
        assert_same((found, gradients(model)), (expected, gradients(trainer.model)))
    assert done == len(pairs)
    assert max(kl_seen) > 0  # clamped in no batch but some
