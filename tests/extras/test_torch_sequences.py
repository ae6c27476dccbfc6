"""pack_sequences on torch tensors: tensors in, tensors out, the same rows as from lists."""

from __future__ import annotations

import pytest
import torch

from packer_cli import pack_sequences

FOUR = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
NAMES = ("input_ids", "labels", "attention_mask", "position_ids")


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_tensors_give_the_rows_of_lists(kind: torch.dtype) -> None:
    tensors = [torch.tensor(sequence, dtype=kind) for sequence in FOUR]
    options = {"strategy": "next-fit", "eos_token_id": 99, "return_spans": True}
    packed = pack_sequences(tensors, 8, labels=tensors, **options)
    expected = pack_sequences(FOUR, 8, labels=FOUR, **options)
    for name in NAMES:
        tensor = getattr(packed, name)
        assert isinstance(tensor, torch.Tensor)
        assert tensor.tolist() == getattr(expected, name).tolist()
    assert (packed.input_ids.dtype, packed.attention_mask.dtype) == (torch.int32, torch.uint8)
    assert all(isinstance(part, torch.Tensor) for part in packed.cu_seqlens)
    assert [p.tolist() for p in packed.cu_seqlens] == [p.tolist() for p in expected.cu_seqlens]
    assert packed.spans == expected.spans
