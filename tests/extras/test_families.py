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
    EQUAL,
    HEAD,
    PAGE,
    alone,
    batch_of,
    cases,
    difference,
    documents,
    had,
    laid_out,
    line,
    losses_of,
    model_of,
    outcomes,
    rows,
    standing_in,
)
from torch.nn.functional import pad

from packer_cli.errors import UsageError
from packer_cli.torch import check_isolation, padded_collate, varlen_collate

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


def is_found_out(name: str, attention: str, collator: str) -> None:
    """Without the config, what was refused leaks, and that is said; or transformers raises."""
    model, batch = had(name, attention), PLAIN[collator](rows())
    try:
        leak = difference(name, model, collator, batch)
    except ValueError as error:
        assert "packed sequences apart" in str(error) or "batch size" in str(error)  # noqa: PT017
        return
    assert leak > 0.1
    with pytest.raises(UsageError, match="documents see each other: the tokens of another change"):
        check_isolation(model, batch)


@pytest.mark.parametrize("kind", ["LFM2", "Granite 4 hybrid", "Falcon-H1", "Qwen3-Next"])
def test_kernels_that_are_missing_are_asked_for(kind: str) -> None:
    """seq_idx in the batch: transformers raises rather than letting documents see each other."""
    for collate in PLAIN.values():
        with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
            had(kind, "eager")(**collate(rows()))


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


def test_labels_that_are_stored_shifted() -> None:
    """As docs/training.md gives them to a model of transformers."""
    model, batch = had("Llama", "sdpa"), PLAIN["varlen_collate"](rows())
    shifted = batch | {"shift_labels": following(batch["labels"]), "labels": None}
    loss = model(**(shifted | {"labels": shifted["shift_labels"]})).loss
    assert loss.item() == pytest.approx(model(**batch).loss.item(), abs=EQUAL)


def following(labels: Any) -> Any:
    return pad(labels, (0, 1), value=-100)[..., 1:]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda batch: {"position_ids": torch.arange(32).expand(len(batch["input_ids"]), -1)},
        lambda batch: {"labels": following(batch["labels"])},
        lambda batch: {"labels": batch["input_ids"]},
    ],
    ids=["positions go on", "shifted twice", "first tokens trained"],
)
def test_what_has_been_seen_elsewhere_differs(wrong: Any) -> None:
    batch = PLAIN["padded_collate"](rows())
    assert difference("Llama", had("Llama", "sdpa"), "padded_collate", batch | wrong(batch)) > 1e-3
