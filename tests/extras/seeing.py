"""A tiny model that notes which rows it is trained on, in whichever process."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Seeing(LlamaForCausalLM):
    """Notes the rows that it is given, by their first tokens. Each new one has the same weights.

    vocab_size  above the rows' numbers
    length      of a row
    """

    def __init__(self, vocab_size: int, length: int) -> None:
        torch.manual_seed(0)
        super().__init__(LlamaConfig(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2,
        ))  # fmt: skip
        self.length = length
        self.seen: list[list[int]] = []

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        self.seen.append(input_ids.view(-1, self.length)[:, 0].tolist())
        return super().forward(input_ids=input_ids, **options)
