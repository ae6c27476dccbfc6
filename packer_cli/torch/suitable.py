"""Whether a collator suits a model, as far as its config and the code of transformers show.

Whatever would silently let documents see each other is refused:

1. SDPA, eager and FlexAttention know documents by their positions only, and some families of
   models make their masks without positions.
2. Convolutions and recurrent layers know documents by `seq_idx` only, and some families do not hand
   it down to their kernels, or have kernels that take none.
3. FlashAttention takes no 4-D mask, FlexAttention no mask of numbers.

Which families these are is read from the code of the installed transformers: see `_Code`. Only the
model itself can show the rest: see `check_isolation`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packer_cli.errors import UsageError
from packer_cli.torch.masks import attention_of, is_recurrent, text_config

_BY_POSITIONS = ("sdpa", "eager", "flex_attention", None)


def check_suitable(collator: str, config: Any, form: str = "") -> None:
    """Raise UsageError if documents of a model with this config would see each other.

    collator  its name; `form` is that of block_mask_collate. With no config, nothing is checked.
    """
    if config is None:
        return
    attention, code = attention_of(config), _code_of(config)
    kind = getattr(text_config(config), "model_type", type(config).__name__)
    if is_recurrent(config) and not code.follows_numbers:
        raise UsageError(
            f"{collator}: layers of {kind} look at no boundaries, and documents would see each "
            "other",
            "separate_collate",
        )
    if collator == "block_mask_collate":
        _check_form(attention, form)
    elif attention in _BY_POSITIONS and not code.follows_positions:
        raise UsageError(
            f"{collator}: in {kind}, {attention or 'attention'} does not look at positions, "
            "and documents would see each other",
            "block_mask_collate with config=, or FlashAttention, or separate_collate",
        )


def _check_form(attention: str | None, form: str) -> None:
    if attention not in _BY_POSITIONS:
        raise UsageError(
            f"block_mask_collate: {attention} takes no masks", "varlen_collate or padded_collate"
        )
    taken = "documents" if attention == "flex_attention" else "mask"
    if attention is not None and form != taken:
        raise UsageError(
            f"block_mask_collate: {attention} takes no masks of form={form!r}", f"form={taken!r}"
        )


@dataclass(frozen=True)
class _Code:
    """What is read from a family's modeling_*.py.

    follows_positions  each `forward` passes positions to what makes its masks; where none makes
                       any, there is no attention, or one of its own that ignores positions
    follows_numbers    seq_idx reaches kernels that take it, and what stands in for kernels that
                       are not installed refuses it
    """

    follows_positions: bool = True
    follows_numbers: bool = True


def _code_of(config: Any) -> _Code:
    """What the code of a config's family shows; for a model of your own, no problem."""
    module = sys.modules.get(type(text_config(config)).__module__)
    path = Path(getattr(module, "__file__", None) or "")
    if not path.name.startswith("configuration_"):
        return _Code()
    return _read(path.with_name(path.name.replace("configuration_", "modeling_")))


@cache
def _read(path: Path) -> _Code:
    if not path.is_file():
        return _Code()
    code = path.read_text(encoding="utf-8")
    tree = ast.parse(code)
    makers = [
        function
        for function in _functions(tree)
        if function.name in ("forward", "_create_attention_masks")
        and any(_makes_causal_mask(node) for node in ast.walk(function))
    ]
    kernels = "use_kernel_func_from_hub_with_fallback" in code
    # kernels of the first Mamba scan without looking at seq_idx
    follows_numbers = kernels and "selective_scan_fn" not in code and _passes_kwargs_on(tree)
    if not makers:
        return _Code(follows_positions=follows_numbers, follows_numbers=follows_numbers)
    by_positions = all("position_ids" in _arguments(function) for function in makers)
    return _Code(by_positions, follows_numbers)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _makes_causal_mask(node: ast.AST) -> bool:
    name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
    return (name.startswith("create_") and "causal_mask" in name) or name == "mask_function"


def _arguments(function: ast.FunctionDef) -> set[str]:
    """The names of the arguments that a function passes to what makes masks."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _makes_causal_mask(node):
            names |= {one.arg for one in node.keywords if one.arg}
        elif isinstance(node, ast.Dict):
            keys = {str(one.value) for one in node.keys if isinstance(one, ast.Constant)}
            names |= (
                keys if "inputs_embeds" in keys else set()
            )  # arguments of several masks, made once
    return names


def _passes_kwargs_on(tree: ast.AST) -> bool:
    """Whether a causal language model passes its **kwargs on to its layers."""
    forwards = [
        function
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("ForCausalLM")
        for function in _functions(node)
        if function.name == "forward"
    ]
    return all(any(_passes_kwargs(node) for node in ast.walk(one)) for one in forwards)


def _passes_kwargs(node: ast.AST) -> bool:
    """self.model(..., **kwargs), but not the loss function's call."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr != "loss_function"
        and any(one.arg is None for one in node.keywords)
    )
