"""Losses of values beside tokens. Packed rows have the same loss as each record by itself.

Logits at a place predict the next token, as in transformers. A value stands at the place of
its own token, like a label: a weight applies to the prediction of that token, and a teacher's
distribution is the one that predicts it. Tokens with the label -100 do not count; every document's
first token is one of them.

A batch is the dict or `PackedBatch` of a collator, on the device of the logits, with labels. Losses
are computed in float32, or in float64 for float64 logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from packer_cli.errors import UsageError
from packer_cli.records import IGNORED
from packer_cli.torch.collate import PackedBatch


def weighted_loss(
    logits: Any, batch: Any, name: str = "loss_weights", *, num_items_in_batch: Any = None
) -> Any:
    """Return the cross entropy of the trained tokens, weighted, over the sum of the weights.

    logits  [1, T, vocabulary] or [b, L, vocabulary], as input_ids are laid out
    batch   with labels and the weights
    name    of the weights: a number for each token, or one for each record; these need position_ids
    num_items_in_batch  divisor to use instead, as in transformers: the sum of the weights of all
            micro-batches of a step, a number or a tensor

    The result is a scalar, in nats a token. With weights of 1 it is the loss of the model itself;
    tokens with a weight of 0 are left out; if all weights are 0, so are the loss and its gradient.
    The divisor sums the magnitudes of negative weights. Raises UsageError if the batch has no
    labels or weights, and for logits of another shape.
    """
    values = _values_of(batch)
    targets = _targets(logits, values)
    weights = _weights(values, name, targets, logits)
    logits, targets, weights = _where_they_count(weights, logits, targets, weights)
    losses = cross_entropy(logits.to(weights.dtype), targets, reduction="none")
    return _mean(losses, weights, num_items_in_batch)


def distillation_loss(
    logits: Any,
    batch: Any,
    ids: str = "teacher_ids",
    logprobs: str = "teacher_logprobs",
    *,
    weights: str | None = None,
    num_items_in_batch: Any = None,
) -> tuple[Any, Any]:
    """Return the forward KL divergence of the student from the teacher's most likely tokens.

    logits    the student's, [1, T, vocabulary] or [b, L, vocabulary], as input_ids are laid out
    batch     with labels and, for each token, K ids and their natural log-probabilities in the
              distribution that predicts this token, at the same place as its label
    ids, logprobs  their names
    weights   the name of weights, as in `weighted_loss`; None: every trained token counts alike
    num_items_in_batch  as in `weighted_loss`

    Returns (loss, missing mass), two scalars. The loss is the mean over trained tokens of the sum
    over the K ids of p * (log p - log q), in nats: p is the teacher's probability, not normalised
    to the K ids, and q the student's in the whole vocabulary. With all ids this is the dense KL
    divergence; with fewer it is their part of it, and its gradient is that of the normalised
    divergence times their mass. The missing mass, without gradient, is the mean of 1 - sum of p.

    Raises UsageError as `weighted_loss`, and if there are not K values for every token.
    """
    values = _values_of(batch)
    targets = _targets(logits, values)
    counts = _weights(values, weights, targets, logits)
    tops, logs = _column(values, ids), _column(values, logprobs)
    if tops.shape != logs.shape or tops.ndim != 3 or tops.shape[:2] != targets.shape:
        raise UsageError(
            f"distillation_loss: {ids} {list(tops.shape)} and {logprobs} {list(logs.shape)} are "
            f"not K values for each of {list(targets.shape)} places",
            f"pack with --carry '{ids}:int32[K]' --carry '{logprobs}:float16[K]'",
        )
    student, tops, logs, counts = _where_they_count(
        counts, logits, _next(tops), _next(logs), counts
    )
    student, logs = student.to(counts.dtype), logs.to(counts.dtype)
    logs_of_student = student.gather(-1, tops.long()) - student.logsumexp(-1, keepdim=True)
    mass = logs.exp()
    losses = (mass * (logs - logs_of_student)).sum(-1)
    missing = _mean(1 - mass.sum(-1), counts, None)
    return _mean(losses, counts, num_items_in_batch), missing


def _values_of(batch: Any) -> Any:
    return vars(batch) | batch.carried if isinstance(batch, PackedBatch) else batch


def _next(values: Any, last: int = 0) -> Any:
    """Move values [rows, length, ...] to the places that predict their tokens."""
    return torch.cat([values[:, 1:], torch.full_like(values[:, :1], last)], dim=1)


def _targets(logits: Any, batch: Mapping[str, Any]) -> Any:
    """Return the token that each place is trained to predict, int64[rows, length]."""
    labels = batch.get("labels")
    if labels is None:
        raise UsageError("a loss of a batch without labels", "pack with the column labels")
    targets = _next(labels, IGNORED)
    if logits.shape[:-1] != targets.shape:
        raise UsageError(f"logits {[*logits.shape]} are not of {[*targets.shape]} places")
    return targets.long()


def _column(batch: Mapping[str, Any], name: str) -> Any:
    if (values := batch.get(name)) is None:
        raise UsageError(f"the batch has no {name}", "carry it, and do not leave it out of `names`")
    return values


def _weights(batch: Mapping[str, Any], name: str | None, targets: Any, logits: Any) -> Any:
    """Return the weights of targets, [rows, length], in the type to compute in."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    trained = targets != IGNORED
    if name is None:
        return trained.to(kind)
    values = _column(batch, name)
    if values.ndim == 1:  # of each document
        starts = _column(batch, "position_ids").flatten() == 0
        values = values[starts.cumsum(0) - 1].view_as(targets)
    if values.shape != targets.shape:
        raise UsageError(
            f"{name} {list(values.shape)}: not a weight for each of {list(targets.shape)} places, "
            "or for each document"
        )
    return _next(values).to(kind).masked_fill(~trained, 0)


def _where_they_count(weights: Any, *arrays: Any) -> Any:
    """Select values [rows, length, ...] at the places with a weight, [places, ...].

    Other places then need no memory as float32, and infinite values there cannot become nan.
    """
    counts = weights != 0
    return (values[counts] for values in arrays)


def _mean(values: Any, weights: Any, total: Any) -> Any:
    summed = (values * weights).sum()
    if total is not None:
        return summed / (total.to(summed.device) if isinstance(total, torch.Tensor) else total)
    total = weights.abs().sum()
    return summed / total.masked_fill(total == 0, 1)
