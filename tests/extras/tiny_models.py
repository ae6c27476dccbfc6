"""Tiny models and tokenizers of transformers, with random weights that are the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_tokenizers as tiny
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tiny_llama(vocab_size: int = 400, **how: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=vocab_size, num_attention_heads=2, **sizes | how)
    return LlamaForCausalLM(config)


def number_tokenizer(count: int) -> Any:
    """Of the words "0", "1", ..."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(count)}, unk_token="0"))  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0")  # noqa: S106


def save_my_model(folder: Path, **how: Any) -> None:
    """A model and its tokenizer, as pages name it."""
    special = {"eos_token": tiny.EOS, "bos_token": tiny.BOS, "pad_token": tiny.EOS}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    tiny.save(folder / "my-model", tiny.byte_level(), tokenizer_config=config)
    tiny_llama(**how).save_pretrained(folder / "my-model")
