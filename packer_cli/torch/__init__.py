"""Packed rows in PyTorch: from the shards, or packed on the fly, to the model. Extra: `torch`.

PackedDataset, PackedSampler     finished directories, and an order of their rows
varlen_collate, ...              rows to a model's arguments
weighted_loss, ...               losses of values beside tokens
check_isolation                  whether a model's documents see each other
PackedTrainerMixin               all of it for transformers' Trainer and TRL's
PackingIterableDataset           documents packed while training reads them

Importing `packer_cli` alone imports none of it.
"""

from __future__ import annotations

from typing import Any

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    from packer_cli.errors import needs_extra

    raise ImportError(needs_extra("packer_cli.torch", "torch")) from error

from packer_cli.torch.collate import (
    PackedBatch,
    block_mask_collate,
    flash_attn_collate,
    flex_block_mask,
    pack_result_to_tensors,
    packed_collate_fn,
    padded_collate,
    separate_collate,
    varlen_collate,
)
from packer_cli.torch.dataset import PackedDataset
from packer_cli.torch.isolation import check_isolation
from packer_cli.torch.losses import distillation_loss, weighted_loss
from packer_cli.torch.sampler import PackedSampler
from packer_cli.torch.streaming import PackingIterableDataset

__all__ = [
    "PackedBatch",
    "PackedDataset",
    "PackedSampler",
    "PackedTrainerMixin",
    "PackingIterableDataset",
    "block_mask_collate",
    "check_isolation",
    "distillation_loss",
    "flash_attn_collate",
    "flex_block_mask",
    "pack_result_to_tensors",
    "packed_collate_fn",
    "padded_collate",
    "separate_collate",
    "varlen_collate",
    "weighted_loss",
]


def __getattr__(name: str) -> Any:
    if name == "PackedTrainerMixin":  # which needs transformers
        from packer_cli.torch.trainer import PackedTrainerMixin  # noqa: PLC0415

        return PackedTrainerMixin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
