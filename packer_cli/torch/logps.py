"""What a model says of the answers in rows of pairs: log-probabilities of their tokens, and sums.

What takes the memory of preference training is the logits, tokens x vocabulary. Next to them there
is only their gradient: log-probabilities are taken at the places of answers, of a few hundred of
them at a time, in float32, and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from packer_cli.errors import UsageError

_AT_ONCE = 1 << 25  # logits in float32: 128 MiB


def answer_logps(logits: Any, batch: Mapping[str, Any]) -> Any:
    """float32[answers], the log-probability of each answer: the sum of those of its tokens.

    Arguments and errors as in `token_logps`.
    """
    tokens = token_logps(logits, batch)
    sums = tokens.new_zeros(len(batch["lengths"]))
    return sums.index_add(0, batch["answers"], tokens)


def token_logps(logits: Any, batch: Mapping[str, Any]) -> Any:
    """float32[tokens], the log-probability of each token of the answers, in their order.

    logits  [..., vocabulary], of all places of batch["inputs"]: `model(**batch["inputs"]).logits`;
            or of batch["places"] only, as models of transformers give them with `logits_to_keep`
    batch   of `preference_collate` or `unpaired_collate`, on the same device

    float64 for logits in float64. Gradients are those of log_softmax; there are no second ones.
    Raises UsageError for logits of other places.
    """
    flat, places = logits.flatten(0, -2), batch["places"]
    if len(flat) == len(places):
        places = None
    elif len(flat) != batch["inputs"]["input_ids"].numel():
        raise UsageError(
            f"token_logps: logits {list(logits.shape)} are neither of the "
            f"{batch['inputs']['input_ids'].numel()} places of inputs nor of the {len(places)} "
            "that predict answers",
            'model(**batch["inputs"]).logits of the same batch',
        )
    return _TokenLogps.apply(flat, places, batch["targets"])


class _TokenLogps(torch.autograd.Function):  # type: ignore[misc]
    """log_softmax(logits[places])[targets], without holding more than a part of it."""

    @staticmethod
    def forward(ctx: Any, logits: Any, places: Any, targets: Any) -> Any:
        kind = torch.promote_types(logits.dtype, torch.float32)
        found = torch.empty(len(targets), dtype=kind, device=logits.device)
        sums = torch.empty_like(found)
        for here, of_places in _parts(logits, places, targets):
            part = logits[of_places].to(kind)
            sums[here] = part.logsumexp(dim=-1)
            found[here] = part.gather(1, targets[here, None])[:, 0] - sums[here]
        ctx.save_for_backward(logits, places, targets, sums)
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slopes: Any) -> Any:
        logits, places, targets, sums = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for here, of_places in _parts(logits, places, targets):
            slope = slopes[here, None]
            part = (logits[of_places].to(sums.dtype) - sums[here, None]).exp_().mul_(-slope)
            part.scatter_add_(1, targets[here, None], slope)
            gradient[of_places] = part.to(gradient.dtype)
        return gradient, None, None


def _parts(logits: Any, places: Any, targets: Any) -> Iterator[tuple[slice, Any]]:
    """(which targets, the places of their logits), a part at a time."""
    most = max(1, _AT_ONCE // logits.shape[-1])
    for begin in range(0, len(targets), most):
        here = slice(begin, min(begin + most, len(targets)))
        yield here, here if places is None else places[here]
