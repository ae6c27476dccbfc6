"""`check_isolation`: whether a model's documents see each other, by experiment.

1. The batch goes through the model as it is.
2. Every second document of each row gets other tokens; the logits of those between them must stay.
3. The same for the others.

The first document of a row comes before everything that step 3 changes, so a change there is
noise: experts, for example, compute together what the router sends them. A change that is more
than ten times as large elsewhere is a document that saw another. This takes three forward passes,
with the same random numbers in each; the model stays in its mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from packer_cli.errors import UsageError

_BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens")
_NUMBERS = (("position_ids", 1), ("seq_idx", 0), ("document_ids", 0))  # and how they go on
_LABELS = ("labels", "shift_labels")


def check_isolation(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise UsageError if a document of the batch sees another: `check_isolation(model, batch)`.

    model  on any device, in any mode. It is called as `model(**batch)` without labels and gives
           logits [rows, length, vocabulary], as they are, first in a tuple or as `.logits`. Its
           mode, its buffers and the state of random numbers stay as they were
    batch  of a collator, on any device: input_ids int [rows, length], and what says where documents
           begin: boundaries, seq_idx, position_ids that restart. It is not changed

    Raises UsageError also for a batch in which no row has two documents, or nothing says where they
    begin, and for a model whose logits differ where nothing was changed.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise UsageError(
            "check_isolation: a batch is a dict with input_ids",
            "give it the batch of a collator of packer_cli.torch",
        )
    numbers = _document_numbers(batch)
    ids = batch["input_ids"]
    others = _other_tokens(ids)
    odd = numbers % 2 == 1
    if not bool(odd.any()):
        raise UsageError(
            "check_isolation: no row of the batch has two documents", "give it other rows"
        )
    device = next((p.device for p in getattr(model, "parameters", list)()), ids.device)
    given = {name: _to(value, device) for name, value in batch.items() if name not in _LABELS}
    with _as_it_was(model):
        before = _logits(model, given)
        scale = float(before.abs().max())
        by_even = _change(model, given, torch.where(odd, ids, others), before)
        by_odd = _change(model, given, torch.where(odd, others, ids), before)
    noise = _largest(by_odd, numbers == 0)
    seen = max(_largest(by_even, odd), _largest(by_odd, ~odd & (numbers > 0)))
    if not noise <= 0.01 * scale:
        raise UsageError(
            f"check_isolation: logits differ by {noise:.2g} before anything that was changed",
            "it cannot check a model that looks ahead, or that is random by itself",
        )
    if seen > 10 * noise + _tolerance(model) * scale:
        raise UsageError(
            f"check_isolation: documents see each other: the tokens of another change logits by "
            f"{seen:.2g}, where the largest is {scale:.2g}",
            "choose the collator by docs/training.md, and give it config=model.config",
        )


def _document_numbers(batch: Mapping[str, Any]) -> Any:
    """int64[rows, length], 0, 1, ... in each row of input_ids."""
    shape = batch["input_ids"].shape
    begins = torch.zeros(shape, dtype=torch.bool)
    begins[:, 0] = True
    known = False
    for name in _BOUNDARIES:
        if name in batch:
            begins.view(-1)[batch[name][:-1].cpu().long()] = known = True
    for name, step in _NUMBERS:
        if name in batch:
            values, known = batch[name].cpu(), True
            begins[:, 1:] |= values[:, 1:] != values[:, :-1] + step
    if not known:
        raise UsageError(
            "check_isolation: nothing in the batch says where documents begin",
            "give it the batch of a collator of packer_cli.torch",
        )
    return (begins.cumsum(dim=1) - 1).to(batch["input_ids"].device)


def _other_tokens(ids: Any) -> Any:
    """Another token in each place, taken from those in the batch."""
    values, which = torch.unique(ids, return_inverse=True)
    if len(values) < 2:
        raise UsageError(f"check_isolation: every token of the batch is {values.tolist()}")
    return values[(which + 1) % len(values)]


def _to(value: Any, device: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _to(one, device) for name, one in value.items()}
    return value.to(device) if hasattr(value, "to") else value


def _logits(model: Any, batch: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    output = model(**batch)
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, Mapping):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output


def _tolerance(model: Any) -> float:
    """The part of the largest logit that may change by rounding, even if no noise shows it."""
    floats = (p.dtype for p in getattr(model, "parameters", list)() if p.is_floating_point())
    return float(max(1e-6, *(torch.finfo(one).eps for one in set(floats) if one.itemsize == 2), 0))


def _change(model: Any, batch: dict[str, Any], ids: Any, before: Any) -> Any:
    """float32[rows, length], the largest change of each place's logits with other tokens."""
    after = _logits(model, batch | {"input_ids": ids.to(batch["input_ids"].device)})
    if after.shape[:2] != ids.shape:
        raise UsageError(
            f"check_isolation: logits are {list(after.shape)}, input_ids {list(ids.shape)}"
        )
    return after.sub_(before).abs_().amax(dim=-1).float().cpu()


def _largest(change: Any, where: Any) -> float:
    chosen = change[where.cpu()]
    return float(chosen.max()) if len(chosen) else 0.0


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Without gradients; restores buffers and random numbers at the end."""
    modules = list(model.modules()) if hasattr(model, "modules") else []
    buffers = [
        (module, name, value, None if value is None else value.clone())
        for module in modules
        for name, value in module._buffers.items()
    ]
    devices = range(torch.cuda.device_count())  # all: torch.manual_seed seeds each
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for module, name, value, copy in buffers:
                if value is not None:
                    value.copy_(copy)
                module._buffers[name] = value
