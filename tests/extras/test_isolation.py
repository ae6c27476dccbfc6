"""`check_isolation`: what it finds, what it must leave as it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from families import rows
from tiny_models import tiny_llama

from packer_cli.errors import UsageError
from packer_cli.torch import (
    block_mask_collate,
    check_isolation,
    flash_attn_collate,
    padded_collate,
    separate_collate,
    varlen_collate,
)

Batch = dict[str, Any]
COLLATORS = [
    partial(varlen_collate, config=None),
    partial(padded_collate, config=None),
    partial(block_mask_collate, config=None),
]
LEAK = "documents see each other"


def llama(**more: Any) -> Any:
    return tiny_llama(61, **more)


def with_cache(batch: Batch) -> Batch:
    return batch | {"use_cache": True}


def with_a_mask(batch: Batch) -> Batch:
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def with_positions_that_go_on(batch: Batch) -> Batch:
    return batch | {"position_ids": torch.arange(32).expand_as(batch["input_ids"])}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("collate", COLLATORS)
def test_what_is_right_passes(collate: Any, mode: str) -> None:
    model = getattr(llama(attention_dropout=0.3), mode)()
    check_isolation(model, collate(rows()))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("wrong", [with_cache, with_a_mask, with_positions_that_go_on])
def test_what_is_wrong_is_reported(wrong: Any, mode: str) -> None:
    model = getattr(llama(attention_dropout=0.3), mode)()
    with pytest.raises(UsageError, match=LEAK) as caught:
        check_isolation(model, wrong(padded_collate(rows(), config=None)))
    assert "docs/training.md" in caught.value.tip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype: Any) -> None:
    model = llama(initializer_range=0.2).to(dtype)
    check_isolation(model, padded_collate(rows(), config=None))
    with pytest.raises(UsageError, match=LEAK):
        check_isolation(model, with_a_mask(padded_collate(rows(), config=None)))


class Remembers(torch.nn.Module):
    """A model of one's own that keeps count, and leaves a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(61, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Any, **_: Any) -> Any:
        self.calls += 1
        return (self.drop(self.words(input_ids)),)


def test_everything_is_as_it_was() -> None:
    model = Remembers().train()
    model.drop.eval()  # part of it frozen
    modes = [module.training for module in model.modules()]
    batch = flash_attn_collate(rows(), dtype=torch.int32)
    kept = {k: v.clone() if hasattr(v, "clone") else v for k, v in batch.items()}
    state, before = torch.get_rng_state(), model.calls
    check_isolation(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls is before
    assert model.calls == 0
    assert [module.training for module in model.modules()] == modes
    assert model.words.weight.grad is None
    assert batch.keys() == kept.keys()
    for name, value in kept.items():
        assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(value)), name


class Counts(torch.nn.Module):
    """Random by itself: another number in each call."""

    calls = 0

    def forward(self, input_ids: Any, **_: Any) -> Any:
        self.calls += 1
        return torch.full((*input_ids.shape, 3), self.calls)


class LooksAhead(torch.nn.Module):
    def forward(self, input_ids: Any, **_: Any) -> Any:
        return (input_ids + 9 * input_ids.sum(dim=1, keepdim=True).sin())[..., None].float()


@pytest.mark.parametrize("model", [Counts(), LooksAhead()])
def test_what_it_cannot_tell(model: Any) -> None:
    with pytest.raises(UsageError, match="before anything that was changed"):
        check_isolation(model, varlen_collate(rows(), config=None))


def test_batches_that_say_nothing() -> None:
    alone = [row for row in rows() if len(row["cu_seqlens"]) == 2]
    for batch in (padded_collate(alone, config=None), separate_collate(rows())):
        with pytest.raises(UsageError, match="no row of the batch has two documents"):
            check_isolation(llama(), batch)
    with pytest.raises(UsageError, match="nothing in the batch says where documents begin"):
        check_isolation(llama(), {"input_ids": torch.ones(1, 8)})
    same = [{"input_ids": torch.ones(4), "cu_seqlens": torch.tensor([0, 2, 4])}]
    with pytest.raises(UsageError, match="every token of the batch is"):
        check_isolation(llama(), padded_collate(same, config=None))
