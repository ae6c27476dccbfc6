"""Which places see each other in packed rows, by a model's config: documents, windows, chunks.

A 4-D mask replaces all masks of a model, so it must include the model's sliding windows. A config
says in `layer_types` which of three masks each layer takes; without that, all take the second if it
has a `sliding_window`, and else the first:

    full_attention       every earlier place of the document
    sliding_attention    the last `sliding_window` of them, the place itself among them
    chunked_attention    those in the same `attention_chunk_size` places, from the document's start

Where layers differ, models of transformers take a dict of masks by these names, with None for
layers that do not attend, such as Mamba's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from packer_cli.errors import UsageError, named

_MASKED = ("full_attention", "sliding_attention", "chunked_attention")
_RECURRENT = ("linear_attention", "conv", "mamba", "mamba2", "recurrent")
_UNMASKED = (*_RECURRENT, "moe", "mlp")
# other names in configs, and layers of two parts
_PARTS = {"attention": _MASKED[:1], "hybrid": ("full_attention", "linear_attention")}


def text_config(config: Any) -> Any:
    """The part of a config that is about text, for models that also take images."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_of(config: Any) -> str | None:
    """What a model of transformers attends with: "sdpa", "eager", ...; None if not chosen yet."""
    attention: str | None = getattr(text_config(config), "_attn_implementation", None)
    return attention


def is_recurrent(config: Any) -> bool:
    """Whether a model has layers that pass state along a row: recurrent ones, convolutions."""
    kinds = {part for kind in _types(config) or () for part in _PARTS.get(kind, (kind,))}
    return not kinds.isdisjoint(_RECURRENT)


def block_masks(document_ids: Any, config: Any, mask_of: Callable[[Any, int | None], Any]) -> Any:
    """The masks of a model: one, or a dict of them by kind of layer where these differ.

    document_ids  int [b, length]
    config        the model's, or None for a model without windows
    mask_of       (ids [b, length], window) to a mask: a place may see those before it with the
                  same id, `window` of them at most, itself among them

    Raises UsageError for unknown kinds of layers, and where none attends.
    """
    kinds = _kinds(config)
    masks = {
        kind: None if kind in _UNMASKED else mask_of(*_rule(kind, document_ids, config))
        for kind in kinds
    }
    return masks if len(masks) > 1 else masks[kinds[0]]


def dense_mask(ids: Any, window: int | None) -> Any:
    """A mask bool [b, 1, length, length], True where a query may look."""
    seen = (ids[:, None, :, None] == ids[:, None, None, :]).tril_()
    return seen if window is None else seen.triu_(1 - window)


def flex_mask(ids: Any, window: int | None) -> Any:
    """FlexAttention's BlockMask of the same."""
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 slow

    def visible(row: Any, head: Any, query: Any, key: Any) -> Any:
        seen = (ids[row, query] == ids[row, key]) & (query >= key)
        return seen if window is None else seen & (query - key < window)

    rows, length = ids.shape
    return create_block_mask(visible, rows, None, length, length, device=ids.device)


def _types(config: Any) -> Any:
    """The kind of each layer, or None where a config does not say."""
    text = text_config(config)
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)


def _kinds(config: Any) -> list[str]:
    """The kinds of a model's layers, by which it looks up their masks."""
    types = _types(config)
    if types is None:
        windowed = getattr(text_config(config), "sliding_window", None) is not None
        return ["sliding_attention" if windowed else "full_attention"]
    kinds = sorted({one for kind in types for one in _PARTS.get(kind, (kind,))})
    if unknown := [kind for kind in kinds if kind not in (*_MASKED, *_UNMASKED)]:
        raise UsageError(
            f"block masks: layers of an unknown kind: {named(unknown)}",
            "padded_collate or varlen_collate, and check_isolation",
        )
    if all(kind in _UNMASKED for kind in kinds):
        raise UsageError(
            "block masks: no layer of the model attends, so masks separate nothing",
            "varlen_collate, with the kernels that transformers asks for; or separate_collate",
        )
    return kinds


def _rule(kind: str, document_ids: Any, config: Any) -> tuple[Any, int | None]:
    text = text_config(config)
    if kind == "sliding_attention":
        return document_ids, text.sliding_window
    if kind == "chunked_attention":
        return _chunks(document_ids, text.attention_chunk_size), None
    return document_ids, None


def _chunks(document_ids: Any, size: int) -> Any:
    """int64[b, length], a number for each chunk of each document of a row."""
    length = document_ids.shape[1]
    places = torch.arange(length, device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return document_ids * length + (places - first) // size
