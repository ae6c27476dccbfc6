"""Carried columns in PyTorch: value i is with token i in every batch, in its own type; and
losses of them are those of the records one by one, and so are their gradients.

Every token of the records has an id of its own, so that a batch tells which values belong where.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import packer, succeeds
from tiny_models import tiny_llama
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader
from traces import branches_of, episodes

from packer_cli.errors import DataError, UsageError
from packer_cli.torch import (
    PackedBatch,
    PackedDataset,
    block_mask_collate,
    distillation_loss,
    flash_attn_collate,
    packed_collate_fn,
    padded_collate,
    separate_collate,
    varlen_collate,
    weighted_loss,
)

L, K, RECORDS = 64, 4, 40
TYPES = {
    "logprobs": "float32", "loss_weights": "float32", "advantages": "float16", "half": "bfloat16",
    "sampled": "bool", "age": "uint8", "step": "int64", "solved": "bool", "score": "bfloat16",
    "record_weight": "float32", "teacher_ids": f"int32[{K}]", "teacher_logprobs": f"float16[{K}]",
    "pair_of": "int32[2]", "word": "uint16[2]",
}  # fmt: skip
OF_RECORDS = ("advantages", "step", "solved", "score", "record_weight", "pair_of")
CARRY = [part for name, kind in TYPES.items() for part in ("--carry", f"{name}:{kind}")]
COLLATORS: dict[str, Any] = {
    "varlen": partial(varlen_collate, config=None),
    "flash_attn": flash_attn_collate,
    "padded": partial(padded_collate, config=None),
    "mask": partial(block_mask_collate, config=None),
    "documents": partial(block_mask_collate, config=None, form="documents"),
    "separate": separate_collate,
    "batch": packed_collate_fn,
}
FORMS: dict[str, tuple[Any, ...]] = {
    "plain": (), "multiple": ("--segment-multiple", 8), "view": ("--view",),
}  # fmt: skip


def _records() -> list[dict[str, Any]]:
    random, ids = np.random.default_rng(0), count(1)
    records = []
    for number in range(RECORDS):
        n = int(random.integers(2, 30))
        own = [next(ids) for _ in range(n)]
        trained = random.random(n) < 0.7
        teacher = torch.tensor(random.normal(size=(n, 400)) * 4).float().log_softmax(-1).topk(K)
        records.append(
            {
                "input_ids": own,
                "labels": [i if on else -100 for i, on in zip(own, trained, strict=True)],
                "logprobs": (-random.random(n) * 8).tolist(),
                "loss_weights": random.choice([0.3, 0.0, 1.0, 2.5], n).tolist(),
                "half": random.choice([0.3, -7.25, 1e20], n).tolist(),
                "sampled": (random.random(n) < 0.5).tolist(),
                "age": random.integers(0, 256, n).tolist(),
                "teacher_ids": teacher.indices.tolist(),
                "teacher_logprobs": teacher.values.tolist(),
                "advantages": float(np.float32(random.normal())),
                "step": (1 << 40) + number,
                "solved": bool(random.random() < 0.5),
                "score": float(random.normal()),
                "record_weight": [0.3, 0.0, 2.0][number % 3],
                "pair_of": [number, -number],
                "word": [[1, 65535 - i] for i in own],
            }
        )
    return records


def _typed(name: str, values: Any) -> Any:
    """Values as a tensor of the column's type, but for uint16."""
    kind = TYPES[name].partition("[")[0]
    return torch.tensor(values).to(getattr(torch, "int32" if kind == "uint16" else kind))


EXACT = _records()
VALUES = {name: [_typed(name, record[name]) for record in EXACT] for name in TYPES}
PLACES = {i: (number, place) for number, record in enumerate(EXACT)
          for place, i in enumerate(record["input_ids"])}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("carried")
    path, tokenized = folder / "records.jsonl", folder / "tokenized"
    path.write_text("".join(json.dumps(record) + "\n" for record in EXACT))
    assert packer("tokenize", path, *CARRY, "-o", tokenized).exit_code == 0
    for form, options in FORMS.items():
        given = [tokenized] if form == "view" else [path, *CARRY]
        succeeds("pack", *given, "-l", L, *options, "-o", folder / form)
    return {form: folder / form for form in FORMS}


def batches(path: Path, collate: Any, size: int = 3, **how: Any) -> list[Any]:
    dataset = PackedDataset(path)
    assert len(dataset) > 2 * size
    return list(DataLoader(dataset, batch_size=size, shuffle=True, collate_fn=collate, **how))


def as_dict(batch: Any) -> dict[str, Any]:
    return vars(batch) | batch.carried if isinstance(batch, PackedBatch) else batch


def assert_values(batch: dict[str, Any]) -> set[int]:
    """Each value is that of its token or document, and 0 elsewhere; the records that were there."""
    ids = batch["input_ids"]
    at = [PLACES.get(i) for i in ids.flatten().tolist()]
    document = ((batch["position_ids"].flatten() == 0).cumsum(0) - 1).tolist()
    owners: list[int | None] = [None] * (document[-1] + 1)
    for place, owner in zip(at, document, strict=True):
        owners[owner] = place[0] if place else owners[owner]
    for name, own in VALUES.items():
        if name in OF_RECORDS:
            expected = [torch.zeros_like(own[0]) if one is None else own[one] for one in owners]
            shape: tuple[int, ...] = (len(owners),)
        else:
            zero = torch.zeros_like(own[0][0])
            expected = [own[place[0]][place[1]] if place else zero for place in at]
            shape = tuple(ids.shape)
        assert batch[name].dtype == own[0].dtype, name
        assert batch[name].shape == (*shape, *expected[0].shape), name
        assert torch.equal(batch[name].reshape(-1, *expected[0].shape), torch.stack(expected)), name
    return {one for one in owners if one is not None}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("collate", COLLATORS)
def test_every_value_is_at_its_token(results: dict[str, Path], form: str, collate: str) -> None:
    seen = set()
    for batch in batches(results[form], COLLATORS[collate]):
        seen |= assert_values(as_dict(batch))
    assert seen == {*range(RECORDS)}


def test_rows_have_their_own_types(results: dict[str, Path]) -> None:
    dataset = PackedDataset(results["plain"])
    for row in (dataset[0], next(iter(dataset.__getitems__([0, 1])))):
        number = PLACES[int(row["input_ids"][0])][0]
        for name, own in VALUES.items():
            value = own[number][None] if name in OF_RECORDS else own[number]
            assert row[name].dtype == value.dtype
            assert torch.equal(row[name][: len(value)], value), name


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_one_segment(folder: Path, form: str) -> None:
    Path("one.jsonl").write_text(json.dumps(EXACT[0]))
    given: list[Any] = ["one.jsonl", *CARRY]
    if form == "view":
        assert packer("tokenize", *given, "-o", "tokenized").exit_code == 0
        given = ["tokenized"]
    assert packer("pack", *given, "-l", L, *FORMS[form], "-o", "out").exit_code == 0
    row = PackedDataset("out")[0]
    for name in OF_RECORDS:
        assert row[name].equal(VALUES[name][0][None]), name


def test_other_tensors_of_rows_are_no_carried_columns(results: dict[str, Path]) -> None:
    dataset = PackedDataset(results["plain"], columns=["input_ids", "labels", "cu_seqlens"])
    rows = [dataset[i] | {"number": torch.tensor(i), "other": torch.zeros(L + 3)} for i in range(2)]
    assert not {"number", "other", *TYPES} & varlen_collate(rows, config=None).keys()


def test_names_and_columns_choose(results: dict[str, Path]) -> None:
    dataset = PackedDataset(results["plain"], columns=["input_ids", "cu_seqlens", "score"])
    assert [name for name in dataset[0] if name in TYPES] == ["score"]
    batch = varlen_collate(dataset.__getitems__([0]), config=None, names=["input_ids", "score"])
    assert [*batch] == ["input_ids", "score"]
    assert batch["score"].dtype == torch.bfloat16


def test_workers_and_devices(results: dict[str, Path]) -> None:
    """What a batch has goes with it: from processes that open the data set anew, to devices."""
    made = batches(
        results["view"], packed_collate_fn, num_workers=1, multiprocessing_context="spawn"
    )
    for collate in (COLLATORS["varlen"], packed_collate_fn):
        here = batches(results["plain"], collate, num_workers=2)
        assert {n for batch in here for n in assert_values(as_dict(batch))} == {*range(RECORDS)}
        made += here
    for batch in made:
        assert_values(as_dict(batch))
    moved = made[0].to("meta").carried
    assert {name: value.device.type for name, value in moved.items()} == dict.fromkeys(
        TYPES, "meta"
    )


def test_carried_columns_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory that is pretended, as only a GPU has it."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    batch = PackedBatch(torch.zeros(1), None, 1, None, None, None, carried={"x": torch.zeros(1)})
    assert batch.pin_memory().carried == {"x": torch.ones(1)}


def test_joined_results_carry_the_same(results: dict[str, Path], folder: Path) -> None:
    joined = PackedDataset([results["plain"], results["view"]])
    seen = DataLoader(joined, 5, shuffle=True, collate_fn=packed_collate_fn)
    assert {n for batch in seen for n in assert_values(as_dict(batch))} == {*range(RECORDS)}
    records = results["plain"].parent / "records.jsonl"
    assert packer("pack", records, "-l", L, "--carry", "age:uint8", "-o", "other").exit_code == 0
    with pytest.raises(
        DataError, match="columns of values is advantages:float16/record, age:uint8"
    ):
        PackedDataset([results["plain"], "other"])


def test_names_that_a_batch_has_are_refused(folder: Path) -> None:
    Path("r.jsonl").write_text('{"input_ids": [1, 2], "use_cache": 1, "document_ids": [3, 4]}\n')
    for name in ("use_cache:uint8", "document_ids:int32"):
        assert not packer("pack", "r.jsonl", "-l", 8, "--carry", name, "-o", name[:3]).exit_code
        for collate in COLLATORS.values():
            with pytest.raises(
                UsageError, match=f"the carried column {name.partition(':')[0]} has"
            ):
                collate(PackedDataset(name[:3]).__getitems__([0]))


# Losses


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(len(PLACES) + 1, attn_implementation="sdpa").double()


def gradients(model: Any, loss: Any) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters()}
    assert max(slope.abs().max() for slope in found.values()) > 1e-3
    return found


def inputs_of(batch: Any) -> dict[str, Any]:
    """What a model sees of a batch: no labels, nor any carried column."""
    if isinstance(batch, PackedBatch):
        return {n: vars(batch)[n] for n in ("input_ids", "position_ids")} | {"use_cache": False}
    left_out = ("labels", *TYPES)
    return {name: value for name, value in batch.items() if name not in left_out}


def one_by_one(model: Any, records: Any) -> Any:
    """(number, the logits that predict its tokens after the first, which of them are trained)."""
    for number in sorted(records):
        ids = torch.tensor(EXACT[number]["input_ids"])
        trained = torch.tensor(EXACT[number]["labels"])[1:] >= 0
        yield number, model(input_ids=ids[None]).logits[0, :-1], ids[1:], trained


def assert_same(model: Any, found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    slopes = gradients(model, found)
    for name, slope in gradients(model, expected).items():
        torch.testing.assert_close(slopes[name], slope, atol=tolerance, rtol=0)


WAYS = [("plain", way) for way in ("varlen", "padded", "mask", "separate")]
WAYS += [
    ("multiple", "varlen"),
    ("view", "padded"),
    ("view", "batch"),
]


def in_some_batches(results: dict[str, Path], form: str, way: str) -> Any:
    torch.manual_seed(0)
    return batches(results[form], COLLATORS[way])[:2]


def records_in(batch: Any) -> set[int]:
    return {PLACES[i][0] for i in as_dict(batch)["input_ids"].flatten().tolist() if i}


@pytest.mark.parametrize(("form", "way"), WAYS)
@pytest.mark.parametrize("name", ["loss_weights", "record_weight"])
def test_weighted_loss(
    results: dict[str, Path], model: Any, form: str, way: str, name: str
) -> None:
    for batch in in_some_batches(results, form, way):
        found = weighted_loss(model(**inputs_of(batch)).logits, batch, name)
        losses, weights = [], []
        for number, logits, ids, trained in one_by_one(model, records_in(batch)):
            own = VALUES[name][number].double()
            own = own[1:] if own.ndim else own.expand(len(ids))
            weights.append(own[trained])
            losses.append(cross_entropy(logits, ids, reduction="none")[trained])
        weight, loss = torch.cat(weights), torch.cat(losses)
        assert len(weight[weight == torch.tensor(0.3).double()]) > 0
        assert_same(model, found, (weight * loss).sum() / weight.sum())
        again = weighted_loss(
            model(**inputs_of(batch)).logits, batch, name, num_items_in_batch=torch.tensor(7)
        )
        torch.testing.assert_close(again, (weight * loss).sum() / 7)


@pytest.mark.parametrize("way", ["varlen", "padded"])
def test_the_loss_of_traces_is_that_of_their_nodes(folder: Path, model: Any, way: str) -> None:
    """Each sampled token counts once, however many branches have it, with weights or without."""
    records = list(episodes(40, tokens=5))
    losses = []
    for trace in (one for record in records for one in record["traces"]):
        nodes, seen = trace["nodes"], set[int]()
        for node in nodes:
            node["token_ids"] = [1 + i % len(PLACES) for i in node["token_ids"]]
        for path in branches_of(trace):
            ids = torch.tensor([i for n in path for i in nodes[n]["token_ids"]])
            own = torch.tensor(
                [on and n not in seen for n in path for on in nodes[n]["mask"]], dtype=torch.bool
            )
            seen.update(path)
            logits = model(input_ids=ids[None]).logits[0, :-1]
            losses.append(cross_entropy(logits, ids[1:], reduction="none")[own[1:]])
    Path("t.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert packer("pack", "t.jsonl", "-l", 256, "-o", "out").exit_code == 0
    dataset = PackedDataset("out")
    assert json.loads(Path("out/manifest.json").read_text())["shared_tokens"] > 100
    batch = COLLATORS[way](dataset.__getitems__(range(len(dataset))))
    expected = torch.cat(losses).mean()
    plain = model(**inputs_of(batch), labels=batch["labels"]).loss  # in float32
    torch.testing.assert_close(plain.double(), expected, atol=1e-6, rtol=0)
    assert_same(model, weighted_loss(model(**inputs_of(batch)).logits, batch), expected)


def test_weights_of_0_count_nothing(results: dict[str, Path]) -> None:
    batch, _ = in_some_batches(results, "plain", "varlen")
    logits = torch.randn(*batch["input_ids"].shape, len(PLACES) + 1, requires_grad=True)
    found = weighted_loss(logits, batch | {"none": torch.zeros_like(batch["loss_weights"])}, "none")
    found.backward()
    assert found == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    # even where a token is impossible
    weights, labels = batch["loss_weights"], batch["labels"]
    place = int(((weights == 0) & (labels >= 0)).flatten().nonzero()[0, 0])
    with torch.no_grad():
        logits[0, place - 1, labels[0, place]] = -torch.inf
    logits.grad = None
    found = weighted_loss(logits, batch)
    found.backward()
    assert found.isfinite()
    assert logits.grad.isfinite().all()
    # negative ones do not turn the loss around
    signed = torch.where(torch.arange(weights.numel()) % 2 == 0, -3.0, 1.0).view_as(weights)
    found = weighted_loss(logits.detach().nan_to_num(), batch | {"signed": signed}, "signed")
    assert found < 0


@pytest.mark.parametrize(("form", "way"), WAYS)
def test_distillation(results: dict[str, Path], model: Any, form: str, way: str) -> None:
    """Against dense distributions of the same K probabilities, and 0 elsewhere."""
    for batch in in_some_batches(results, form, way):
        logits = model(**inputs_of(batch)).logits
        found, missing = distillation_loss(logits, batch)
        weighted, _ = distillation_loss(logits, batch, weights="loss_weights")
        losses, lacks, weights = [], [], []
        for number, logits, _, trained in one_by_one(model, records_in(batch)):
            dense = torch.zeros_like(logits)
            values = VALUES["teacher_logprobs"][number][1:].double().exp()
            dense.scatter_(-1, VALUES["teacher_ids"][number][1:].long(), values)
            each = kl_div(logits.log_softmax(-1), dense, reduction="none").sum(-1)
            losses.append(each[trained])
            lacks.append(1 - dense.sum(-1)[trained])
            weights.append(VALUES["loss_weights"][number][1:].double()[trained])
        loss, weight = torch.cat(losses), torch.cat(weights)
        torch.testing.assert_close(
            weighted, (weight * loss).sum() / weight.sum(), atol=1e-4, rtol=0
        )
        assert_same(model, found, loss.mean(), 1e-4)
        assert missing > 0.01
        assert not missing.requires_grad
        torch.testing.assert_close(missing, torch.cat(lacks).mean(), atol=1e-6, rtol=0)


def test_what_losses_cannot_use_is_refused() -> None:
    batch = {"labels": torch.ones(1, 4).long(), "loss_weights": torch.ones(1, 4),
             "teacher_ids": torch.ones(1, 4, 2).int(), "teacher_logprobs": torch.ones(1, 4, 3),
             "wide": torch.ones(1, 4, 2)}  # fmt: skip
    logits = torch.zeros(1, 4, 9)
    with pytest.raises(UsageError, match=r"logits \[1, 3, 9\] are not of \[1, 4\] places"):
        weighted_loss(logits[:, 1:], batch)
    with pytest.raises(UsageError, match="the batch has no other"):
        weighted_loss(logits, batch, "other")
    with pytest.raises(UsageError, match=r"wide \[1, 4, 2\]: not a weight"):
        weighted_loss(logits, batch, "wide")
    with pytest.raises(UsageError, match=r"teacher_logprobs \[1, 4, 3\] are not K values"):
        distillation_loss(logits, batch)
