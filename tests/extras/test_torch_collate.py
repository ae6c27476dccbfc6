"""Collators: names, types and values, spelled out on rows small enough to read."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ALL_COLUMNS, succeeds
from transformers import DataCollatorWithFlattening

from packer_cli.errors import DataError, UsageError
from packer_cli.torch import (
    PackedDataset,
    block_mask_collate,
    flash_attn_collate,
    flex_block_mask,
    padded_collate,
    separate_collate,
    varlen_collate,
)

IDS, LABELS = "input_ids", "labels"
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
INT32 = torch.int32
COLLATORS = [
    partial(varlen_collate, config=None),
    flash_attn_collate,
    partial(padded_collate, config=None),
    partial(block_mask_collate, config=None),
]


def row(ids: list[int], *lengths: int) -> dict[str, torch.Tensor]:
    """A row of documents of these lengths, the rest of `ids` padding."""
    edges = torch.tensor([0, *lengths]).cumsum(0)
    labels = torch.tensor(ids)
    labels[edges[:-1]] = -100
    labels[edges[-1] :] = -100
    mask = torch.arange(len(ids)) < edges[-1]
    return {
        IDS: torch.tensor(ids, dtype=INT32),
        LABELS: labels.int(),
        "attention_mask": mask.byte(),
        "cu_seqlens": edges.int(),
    }


#        a a a b b . . .                    c * 8
ROWS = [row([1, 2, 3, 4, 5, 0, 0, 0], 3, 2), row([6, 7, 8, 9, 6, 7, 8, 9], 8)]


def test_varlen() -> None:
    batch = varlen_collate(ROWS, config=None)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 9, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[
        -100, 2, 3, -100, 5, -100, -100, -100, -100, 7, 8, 9, 6, 7, 8, 9
    ]]  # fmt: skip
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8, 16]  # 5..8: the padding
    assert batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 8, 16]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, *[2] * 3, *[3] * 8]]
    assert batch["use_cache"] is False
    assert batch["max_length_q"] == batch["max_length_k"] == 8


def test_varlen_has_the_names_shapes_and_types_of_transformers() -> None:
    documents = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(
        documents
    )
    ours = varlen_collate([row([1, 2, 3, 4, 5], 3, 2)], config=None)
    assert ours.pop("use_cache") is False
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert (ours[name].dtype, ours[name].tolist()) == (value.dtype, value.tolist()), name
        else:
            assert ours[name] == value


def test_flash_attn_has_its_own_names() -> None:
    batch, same = flash_attn_collate(ROWS), varlen_collate(ROWS, config=None)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    assert list(batch) == [IDS, LABELS, "position_ids", "seq_idx", *names, "use_cache"]
    assert batch["cu_seqlens_q"].dtype == INT32
    assert torch.equal(batch["cu_seqlens_q"], same["cu_seq_lens_q"])
    assert batch["max_seqlen_k"] == 8


def test_padded() -> None:
    batch, same = padded_collate(ROWS, config=None), varlen_collate(ROWS, config=None)
    assert batch["input_ids"].tolist() == [r["input_ids"].tolist() for r in ROWS]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8]
    assert batch["seq_idx"].dtype == INT32
    for name in BOUNDARIES:  # those that FlashAttention flattens rows to
        assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(same[name]))
    assert batch["use_cache"] is False
    assert list(batch) == [IDS, LABELS, "position_ids", "seq_idx", *BOUNDARIES, "use_cache"]


def test_separate() -> None:
    batch = separate_collate(ROWS)
    assert batch[IDS].tolist() == [
        [1, 2, 3, 0, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0, 0, 0], [6, 7, 8, 9, 6, 7, 8, 9]
    ]  # fmt: skip
    assert batch[LABELS].tolist() == [
        [-100, 2, 3, *[-100] * 5], [-100, 5, *[-100] * 6], [-100, 7, 8, 9, 6, 7, 8, 9]
    ]  # fmt: skip
    assert batch["position_ids"].tolist() == [list(range(8))] * 3
    assert batch["use_cache"] is False
    assert separate_collate(ROWS[:1])[IDS].tolist() == [[1, 2, 3], [4, 5, 0]]


def test_names_choose() -> None:
    for collate in COLLATORS:
        batch = collate(ROWS, names=("position_ids", IDS))
        assert list(batch) == ["position_ids", IDS]


SEEN = [
    "1.......",
    "11......",
    "111.....",
    "...1....",
    "...11...",
    ".....1..",
    ".....11.",
    ".....111",
]


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".1"[int(seen)] for seen in line) for line in mask]


def config(**facts: Any) -> SimpleNamespace:
    return SimpleNamespace(**facts)


def test_block_mask() -> None:
    batch = block_mask_collate(ROWS, config=None)
    assert list(batch) == [IDS, LABELS, "position_ids", "attention_mask"]
    mask = batch["attention_mask"]
    assert (mask.shape, mask.dtype) == ((2, 1, 8, 8), torch.bool)
    assert drawn(mask[0, 0]) == SEEN
    assert torch.equal(mask[1, 0], torch.ones(8, 8).tril().bool())
    eager = config(_attn_implementation="eager", dtype=torch.bfloat16)
    added = block_mask_collate(ROWS, config=eager)["attention_mask"]
    assert torch.equal(added == 0, mask)
    assert added.min() == torch.finfo(torch.bfloat16).min


def test_models_of_which_nothing_is_known() -> None:
    """A warning, once; an error where state could pass along a row."""
    unknown = config(model_type="mine", _attn_implementation="sdpa")
    with pytest.warns(UserWarning, match=r"of mine see each other; check_isolation"):
        varlen_collate(ROWS, config=unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        varlen_collate(ROWS, config=unknown)
    recurrent = config(model_type="mine", layer_types=["conv", "full_attention"])
    with pytest.raises(UsageError, match="mine has recurrent layers") as refused:
        varlen_collate(ROWS, config=recurrent)
    assert "check_isolation" in refused.value.tip


def test_no_collator_gives_a_2d_attention_mask() -> None:
    for collate in COLLATORS:
        mask = collate(ROWS).get("attention_mask")
        assert mask is None or mask.ndim == 4


def test_positions_are_those_of_the_column_also_with_a_segment_multiple(folder: Path) -> None:
    lengths = [5, 9, 1, 16, 3, 7, 2]
    lines = [json.dumps({"input_ids": list(range(1, n + 1))}) for n in lengths]
    Path("data.jsonl").write_text("\n".join(lines))
    for multiple in (1, 4):
        out = f"out{multiple}"
        succeeds(
            "pack", "data.jsonl", "-l", 16, "-o", out, "-q", *ALL_COLUMNS,
            "--segment-multiple", multiple,
        )  # fmt: skip
        dataset = PackedDataset(out, ["input_ids", "position_ids", "cu_seqlens"])
        rows = dataset.__getitems__(range(len(dataset)))
        assert torch.equal(
            padded_collate(rows, config=None)["position_ids"],
            rows.columns["position_ids"].long(),
        )
        edges = varlen_collate(rows, config=None)["cu_seq_lens_q"]
        assert edges.diff().sum() == 16 * len(dataset)
        assert (edges % multiple == 0).all()
        for number in range(len(dataset)):  # without the padding within segments
            alone = separate_collate(dataset.__getitems__([number]))["input_ids"]
            assert alone.shape[1] == (alone != 0).sum(1).max()


def without(name: str, row: dict[str, Any] = ROWS[0]) -> dict[str, Any]:
    return {column: value for column, value in row.items() if column != name}


FREE = {"config": None}
UNKNOWN, END_TO_END = "does not know the model, and some would let", "only in rows end to end"
MORE = {**ROWS[1], "cu_seqlens_padded": ROWS[1]["cu_seqlens"]}
FLASH = config(_attn_implementation="flash_attention_2")
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (varlen_collate, ROWS, {}, UNKNOWN),
    (padded_collate, ROWS, {}, UNKNOWN),
    (block_mask_collate, ROWS, {}, UNKNOWN),
    (flex_block_mask, torch.zeros(1, 8, dtype=INT32), {}, "flex_block_mask does not know the mod"),
    (block_mask_collate, ROWS, {"config": config(layer_types=["compressed_sparse"])},
     "of an unknown kind: compressed_sparse"),
    (block_mask_collate, ROWS, {"config": FLASH}, "flash_attention_2 takes no masks"),
    (block_mask_collate, ROWS, {"config": config(_attn_implementation="flex_attention")},
     "flex_attention takes no masks of fo"),
    (block_mask_collate, ROWS,
     {"config": config(_attn_implementation="sdpa"), "form": "documents"},
     "sdpa takes no masks of form='documents'"),
    (padded_collate, ROWS,
     {"config": config(model_type="stablelm", _attn_implementation="flash_attention_2")},
     END_TO_END),
    (varlen_collate, ROWS, FREE | {"names": ["seqidx"]}, "names: 'seqidx' is not one of input_ids"),
    # rows of a ConcatDataset: boundaries or labels of some would be left out
    (varlen_collate, [ROWS[0], MORE], FREE, "some rows of a batch have cu_seqlens_padded, others"),
    (varlen_collate, [MORE, ROWS[0]], FREE, "some rows of a batch have cu_seqlens_padded, others"),
    (varlen_collate, [ROWS[0], without("labels")], FREE, "some rows of a batch have labels, othe"),
    (varlen_collate, [without("labels"), ROWS[0]], FREE, "some rows of a batch have labels, othe"),
    (varlen_collate, [without("cu_seqlens")] * 2, FREE, "rows without cu_seqlens"),
    (padded_collate, [{"cu_seqlens": ROWS[0]["cu_seqlens"]}], FREE, "rows without input_ids"),
    (varlen_collate, [], FREE, "got no rows"),
    (block_mask_collate, ROWS, FREE | {"form": "masks"}, "form: 'masks' is not one of mask, docum"),
]  # fmt: skip
TIPS = {
    UNKNOWN: "partial({}, config=model.config)",
    "names: 'seqidx' is not one of input_ids": "did you mean seq_idx?",
    "rows without cu_seqlens": "remove_unused_columns=False",
}


@pytest.mark.parametrize(("collate", "rows", "options", "message"), REFUSED)
def test_refused(collate: Any, rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        collate(rows, **options)
    assert TIPS.get(message, "").format(collate.__name__) in caught.value.tip


def test_families_that_flash_attention_keeps_apart_end_to_end() -> None:
    for attention, collate in (("sdpa", varlen_collate), ("sdpa", padded_collate),
                               ("flash_attention_2", varlen_collate)):  # fmt: skip
        collate(ROWS, config=config(model_type="stablelm", _attn_implementation=attention))


@pytest.mark.parametrize("edges", [[0, 3, 2], [0, 9], [1, 8]])
def test_boundaries_that_are_none_are_named(edges: list[int]) -> None:
    damaged = ROWS[0] | {"cu_seqlens": torch.tensor(edges, dtype=INT32)}
    for collate in COLLATORS:
        with pytest.raises(DataError, match=rf"row 1 of a batch has the boundaries \{edges}"):
            collate([ROWS[1], damaged])


def test_rows_without_boundaries_have_them_where_positions_restart() -> None:
    """As those of packer_cli.hf.pack_dataset, whose padding restarts, too."""
    positions = [[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))]
    rows = [
        {name: value for name, value in row.items() if name != "cu_seqlens"}
        | {"position_ids": torch.tensor(places, dtype=INT32)}
        for row, places in zip(ROWS, positions, strict=True)
    ]
    for collate in COLLATORS:
        collated, expected = collate(rows), collate(ROWS)
        assert collated.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(collated[name]), torch.as_tensor(value)), name
