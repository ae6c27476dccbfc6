"""The table of docs/training.md is what its collators do, for every family in it, and packed
training is unpacked training. `python tests/extras/families.py` writes the table anew.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from families import (
    ATTENTIONS,
    COLLATORS,
    FILE,
    HEAD,
    PAGE,
    alone,
    batch_of,
    cases,
    difference,
    documents,
    file_of,
    had,
    judged,
    laid_out,
    line,
    losses_of,
    model_of,
    outcomes,
    rows,
    standing_in,
    types,
)
from support import heavy
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

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PLAIN = {
    "varlen_collate": partial(varlen_collate, config=None),
    "padded_collate": partial(padded_collate, config=None),
}
CASES = cases()
IDS = [name + (", kernels" if kernels else "") for name, kernels in CASES]


def lines_of_the_page() -> dict[str, str]:
    """The line of each family, as if it had one of its own."""
    page = PAGE.read_text().split(HEAD)
    assert len(page) == 2
    shared = [one for one in page[1].split("\n\n")[0].splitlines() if one][1:]
    parts = [one.removeprefix("| ").split(" | ", 1) for one in shared]
    return {name: f"| {name} | {cells}" for names, cells in parts for name in names.split("; ")}


def test_the_page_names_each_family() -> None:
    assert sorted(lines_of_the_page()) == sorted(IDS)


@pytest.mark.parametrize(("name", "kernels"), CASES, ids=IDS)
def test_the_table_of_the_page(name: str, kernels: bool) -> None:
    """Logits and losses of documents that were packed are those of the documents alone;
    `check_isolation` agrees, with the config and without.
    """
    with standing_in(name, kernels):
        found = outcomes(name)
        made = line(name, kernels, found)
        assert made == lines_of_the_page()[IDS[CASES.index((name, kernels))]]
        assert "DIFFERS" not in made
        for collator in COLLATORS[:-1]:
            for attention, outcome in found[collator].items():
                if outcome == "equal":
                    model = had(name, attention)
                    check_isolation(model, batch_of(collator, attention, model.config))
                elif outcome and collator in PLAIN:
                    is_found_out(name, attention, collator)


@pytest.mark.parametrize("part", [0, *map(heavy, range(1, 8))])
def test_the_groups_of_model_types(part: int) -> None:
    """Those of the table, and every eighth of transformers' others."""
    known = {name: group for line in FILE.read_text().splitlines()
             for group, *names in [line.split()] for name in names}  # fmt: skip
    assert FILE.read_text() == file_of(known)
    some = sorted(types())[part::8]
    assert judged(some) == {name: known[name] for name in some if name in known}


def is_found_out(name: str, attention: str, collator: str) -> None:
    """Without the config, what was refused leaks, and that is said; or transformers raises."""
    model, batch = had(name, attention), PLAIN[collator](rows())
    try:
        leak = difference(name, model, collator, batch)
    except ValueError as error:
        assert "packed sequences apart" in str(error) or "batch size" in str(error)  # noqa: PT017
        return
    assert leak > 0.1
    with pytest.raises(UsageError, match=r"documents see each other, first in \S+ \(\w+\):"):
        check_isolation(model, batch)


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_packed_training_is_unpacked_training(name: str, attention: str, collator: str) -> None:
    if (attention, collator) == ("flash_attention_2", "block_mask_collate"):
        return  # which takes no masks
    _, losses, slopes = alone(name)
    packed = rows()
    with standing_in(name, kernels=False):
        model = model_of(name, attention)
        found = model(**batch_of(collator, attention, model.config))
        labels = [packed[number]["labels"][place] for number, place in documents(packed)]
        pairs = zip(laid_out(collator, found.logits), labels, strict=True)
        each = [losses_of(*one) for one in pairs]
        torch.testing.assert_close(torch.cat(each), torch.cat(losses), atol=1e-5, rtol=0)
        found.loss.backward()
    for parameter, slope in model.named_parameters():
        torch.testing.assert_close(slope.grad, slopes[parameter], atol=1e-4, rtol=0)


# check_isolation: what it finds, and what it must leave as it was


Batch = dict[str, Any]
COLLATIONS = [
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
@pytest.mark.parametrize("collate", COLLATIONS)
def test_what_is_right_passes(collate: Any, mode: str) -> None:
    model = getattr(llama(attention_dropout=0.3), mode)()
    check_isolation(model, collate(rows()))


def with_all_of_these(batch: Batch) -> Batch:
    return with_cache(with_a_mask(with_positions_that_go_on(batch)))


WRONG = {
    with_cache: ["use_cache"],
    with_a_mask: ["attention_mask"],
    with_positions_that_go_on: ["position_ids"],
    with_all_of_these: ["attention_mask", "use_cache", "position_ids"],
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_batch_is_reported(wrong: Any, mode: str) -> None:
    model = getattr(llama(attention_dropout=0.3), mode)()
    because = f"{LEAK} because of {' and '.join(WRONG[wrong])}: the tokens of another change"
    with pytest.raises(UsageError, match=because) as caught:
        check_isolation(model, wrong(padded_collate(rows(), config=None)))
    assert "docs/training.md" in caught.value.tip
    assert all(name in caught.value.tip for name in WRONG[wrong])


LAYERS = {
    "BLOOM": r"transformer.h.0.self_attention \(BloomAttention\)",
    "OPT": r"model.decoder.layers.0.self_attn \(OPTAttention\)",
    "Mamba2": r"backbone.layers.0.mixer \(Mamba2Mixer\)",
    "LFM2": r"model.layers.0.conv \(Lfm2ShortConv\)",
    "Qwen 3.5 and 3.6": r"model.layers.0.linear_attn \(Qwen3_5GatedDeltaNet\)",
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_through_which_documents_see_each_other(name: str) -> None:
    """Given what packers of other tools give, positions alone."""
    batch = padded_collate(rows(), config=None, names=["input_ids", "position_ids", "use_cache"])
    model = model_of(name, "eager")
    with pytest.raises(UsageError, match=f"{LEAK}, first in {LAYERS[name]}: the tokens"):
        check_isolation(model, batch)
    assert not any(module._forward_hooks for module in model.modules())


def test_packing_that_is_off_is_reported() -> None:
    """Gemma 4 in the batches of trainers that pad each document, or cut it."""
    model, batch = model_of("Gemma 4", "sdpa"), with_a_mask(padded_collate(rows(), config=None))
    names = "input_ids, labels, attention_mask"
    with pytest.raises(UsageError, match=f"no boundaries of documents: it has {names}"):
        check_isolation(model, {name: batch[name] for name in names.split(", ")})
    with pytest.raises(UsageError, match=f"{LEAK} because of attention_mask"):
        check_isolation(model, batch)
    with pytest.raises(UsageError, match="no row of the batch has two documents: packing is off"):
        check_isolation(model, separate_collate(rows()))


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
    batch = flash_attn_collate(rows())
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
    with pytest.raises(UsageError, match="the batch has no boundaries of documents"):
        check_isolation(llama(), {"input_ids": torch.ones(1, 8)})
    same = [{"input_ids": torch.ones(4), "cu_seqlens": torch.tensor([0, 2, 4])}]
    with pytest.raises(UsageError, match="every token of the batch is"):
        check_isolation(llama(), padded_collate(same, config=None))
