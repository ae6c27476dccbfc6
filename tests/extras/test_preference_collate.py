"""Collators of pairs: values spelled out, and what they and all others refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pair_rows import Pair, random_pairs, rows_of
from tiny_models import tiny_llama
from torch.utils.data import DataLoader

from packer_cli.errors import DataError, UsageError
from packer_cli.torch import (
    PackedSampler,
    answer_logps,
    block_mask_collate,
    flash_attn_collate,
    packed_collate_fn,
    padded_collate,
    preference_collate,
    separate_collate,
    to_device,
    token_logps,
    unpaired_collate,
    varlen_collate,
)
from packer_cli.torch import preference as scoring

pytestmark = pytest.mark.filterwarnings("ignore", "error:::packer_cli")
PAIRS = [Pair([1, 2], [3, 4], [5]), Pair([6], [7], [8, 9])]
LABELLED = [Pair([1, 2], [3], None, True), Pair([4], [5, 6], None, False), Pair([7], [8])]
of_pairs = partial(preference_collate, config=None)
unpaired = partial(unpaired_collate, config=None)


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items() if torch.is_tensor(value)}


def test_a_batch_of_pairs() -> None:
    #       1 2 3 4 | 1 2 5 | 6 7 | . . .     6 7 | 6 8 9 | . . . . . . .
    rows = [*rows_of(PAIRS[:1], 12), *rows_of(PAIRS[1:], 12)]
    batch = of_pairs(rows)
    assert lists(batch) == {
        "places": [1, 2, 5, 12, 14, 15],
        "targets": [3, 4, 5, 7, 8, 9],
        "answers": [0, 0, 1, 2, 3, 3],
        "lengths": [2, 1, 1, 2],
        "last_tokens": [3, 6, 13, 16],
        "desirable": [True, False, True, False],
        "chosen": [0, 2],
        "rejected": [1, 3],
    }
    inputs = batch["inputs"]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 7, 12, 14, 17, 24]
    assert inputs["position_ids"].tolist()[0][:8] == [0, 1, 2, 3, 0, 1, 2, 0]
    assert all(value.dtype in (torch.int64, torch.bool) for name, value in batch.items()
               if name != "inputs")  # fmt: skip


def test_a_batch_of_labelled_answers() -> None:
    batch = unpaired(rows_of(LABELLED, 12))
    assert lists(batch) == {
        "places": [1, 3, 4, 6],
        "targets": [3, 5, 6, 8],
        "answers": [0, 1, 1, 2],
        "lengths": [1, 2, 1],
        "last_tokens": [2, 5, 7],
        "desirable": [True, False, True],
    }
    assert lists(unpaired(rows_of(PAIRS, 12))).keys() == lists(batch).keys()


def test_mismatched_answers_are_of_other_prompts_and_each_is_there_once() -> None:
    others = unpaired(rows_of(LABELLED, 12), mismatched=True)["mismatched"]
    assert others["inputs"]["input_ids"].tolist() == [[1, 2, 8, 4, 3, 7, 5, 6]]
    assert others["inputs"]["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]
    assert lists(others)["targets"] == [8, 3, 5, 6]
    #  both sides of a pair have the same prompt
    others = unpaired(rows_of(PAIRS, 12), mismatched=True)["mismatched"]
    assert others["inputs"]["input_ids"].tolist() == [[1, 2, 7, 1, 2, 8, 9, 6, 3, 4, 6, 5]]
    for alone in (rows_of(PAIRS[:1], 12), rows_of(LABELLED[:1], 12)):
        with pytest.raises(UsageError, match="a batch of one record has no answers to other"):
            unpaired(alone, mismatched=True)


@pytest.mark.parametrize(
    "collate",
    [
        partial(varlen_collate, config=None), flash_attn_collate,
        partial(padded_collate, config=None), partial(block_mask_collate, config=None),
        separate_collate, packed_collate_fn,
    ],
)  # fmt: skip
@pytest.mark.parametrize("records", [PAIRS, LABELLED])
def test_collators_of_other_rows_refuse_pairs(collate: Any, records: list[Pair]) -> None:
    with pytest.raises(UsageError, match=r"rows of pairs.*trained on rejected answers") as caught:
        collate(rows_of(records, 12))
    assert "preference_collate" in caught.value.tip


def changed(**columns: Any) -> list[Any]:
    """The row of PAIRS with other values in a column, or, for None, without it."""
    (row,) = rows_of(PAIRS, 12)
    made = dict(row)
    for name, values in columns.items():
        del made[name]
        if values is not None:
            made[name] = torch.as_tensor(values, dtype=row[name].dtype)
    return [made]


# the labels of all answers but the last two; and a row without any
FEWER = [row["labels"].tolist()[: row["cu_seqlens"][2]] + [-100] * 7 for row in rows_of(PAIRS, 12)]
NO_ANSWER = "of a batch has an answer without a token"  # it would be the likeliest of all
BOTH = "a batch has pairs, and answers with a label beside"
NOT_EACH = "pair and side are not a number and 0 or 1 of each segment"
NO_SIDE = "not every answer has another side"
WRONG: list[tuple[Any, list[Any], str]] = [
    (of_pairs, changed(side=None), "rows without pair and side"),
    (partial(varlen_collate, config=None), changed(pair=None), "rows of pairs, for a collator of"),
    (of_pairs, rows_of(LABELLED, 12), NO_SIDE),
    (of_pairs, changed(side=[1, 0, 0, 0]), NO_SIDE),
    (preference_collate, rows_of(PAIRS, 12), "does not know the model"),
    (partial(of_pairs, collate=separate_collate), rows_of(PAIRS, 12), "config and collate"),
    (of_pairs, changed(labels=None), "without labels"),
    (unpaired, [*rows_of(PAIRS, 12), *rows_of(LABELLED, 12)], BOTH),
    (partial(unpaired, mismatched=True), [*rows_of(PAIRS, 12), *rows_of(LABELLED, 12)], BOTH),
    (of_pairs, changed(side=[1, 0, 2, 0]), NOT_EACH),
    (of_pairs, changed(pair=[0, 0, 1, 1, 2]), NOT_EACH),
    (of_pairs, changed(labels=[9] * 12), "a label is on no token, or on the first of a segment"),
    *((how, rows, f"row {number} {NO_ANSWER}") for how in (of_pairs, unpaired)
      for number, rows in enumerate((changed(labels=FEWER[0][:12]),
                                     [*rows_of(PAIRS, 12), *changed(labels=[-100] * 12)]))),
]  # fmt: skip


@pytest.mark.parametrize(("collate", "rows", "message"), WRONG)
def test_refused(collate: Any, rows: list[Any], message: str) -> None:
    with pytest.raises((UsageError, DataError), match=message) as caught:
        collate(rows)
    assert message != NO_SIDE or "unpaired_collate" in caught.value.tip


def test_a_model_given_the_whole_batch_does_not_train() -> None:
    batch = of_pairs(rows_of(PAIRS, 12))
    with pytest.raises((ValueError, TypeError)):
        tiny_llama()(**batch)
    assert tiny_llama()(**batch["inputs"]).loss is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 40, 1 << 25])
def test_log_probabilities(monkeypatch: pytest.MonkeyPatch, dtype: Any, at_once: int) -> None:
    """Against log_softmax of everything; a part of the places at a time, or all."""
    monkeypatch.setattr(scoring, "_AT_ONCE", at_once)
    batch = of_pairs(rows_of(PAIRS, 12))
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = (5 * torch.randn(1, 12, 10)).to(dtype).requires_grad_()
    plain = logits[0].to(wide).log_softmax(-1)[batch["places"], batch["targets"]]
    each = token_logps(logits, batch)
    assert each.dtype == wide
    torch.testing.assert_close(each, plain)
    sums = answer_logps(logits, batch)
    expected = torch.stack([part.sum() for part in plain.split(batch["lengths"].tolist())])
    torch.testing.assert_close(sums, expected)
    weights = torch.randn(len(sums), dtype=wide)
    (found,) = torch.autograd.grad(sums @ weights, logits)
    (slope,) = torch.autograd.grad(expected @ weights, logits)
    assert found.dtype == dtype
    torch.testing.assert_close(found, slope)
    kept = logits[:, batch["places"]]
    torch.testing.assert_close(answer_logps(kept, batch), sums)
    with pytest.raises(UsageError, match=r"neither of the 12 places of inputs nor of the 6 that"):
        answer_logps(logits[:, :-1], batch)


def test_large_logits_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in float32 beside: only parts of them, and their gradient."""
    monkeypatch.setattr(scoring, "_AT_ONCE", 1 << 16)
    (pair,) = random_pairs(1, 9)
    batch = of_pairs(rows_of([pair._replace(chosen=[1] * 500, rejected=[2] * 400)], 1024))
    vocabulary = 1_000
    logits = torch.zeros(1, 1024, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    largest: list[int] = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = function(*args, **(kwargs or {}))
            if torch.is_tensor(made) and made.dtype == torch.float32:
                largest.append(made.numel())
            return made

    with Watching():
        answer_logps(logits, batch).sum().backward()
    assert largest
    assert max(largest) <= 1 << 16 < logits.numel()


def test_batches_go_through_workers_and_to_devices() -> None:
    rows = rows_of(random_pairs(20, 61), 64)
    narrow = partial(varlen_collate, config=None, dtype=torch.int32)
    collate = partial(unpaired_collate, collate=narrow, mismatched=True)
    sampler = PackedSampler(rows, seed=3)
    loader = DataLoader(rows, batch_size=2, sampler=sampler, collate_fn=collate, num_workers=1)
    order = list(PackedSampler(rows, seed=3))
    for number, batch in enumerate(to_device(loader, "cpu")):
        expected = unpaired([rows[i] for i in order[2 * number :][:2]], mismatched=True)
        assert_equal(batch, expected)


def assert_equal(batch: Any, expected: Any) -> None:
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_equal(batch[name], value)
        elif torch.is_tensor(value):
            assert torch.equal(batch[name], value), name
            assert batch[name].dtype == value.dtype, name
        else:
            assert batch[name] == value
