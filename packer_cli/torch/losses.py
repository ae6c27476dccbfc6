"""Losses of carried values, the same of packed rows as of each record by itself.

Logits at a place predict the next token, as in transformers. A carried value is at the place of
its own token: a weight weighs the prediction of that token, and a teacher's distribution is the
one for that token, as its label is. Tokens with the label -100, every document's first one among
them, count nothing.

A batch is what a collator of this package gives, on the device of the logits: a dict with labels,
or a `PackedBatch`. Losses are computed in float32, or as float64 logits in theirs.
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
    """The cross entropy of the trained tokens, each times its weight, over the sum of the weights.

    logits  [1, T, vocabulary] or [b, L, vocabulary], as input_ids are laid out
    batch   with labels and the weights
    name    of the weights: a number for each token, or for each record, and so for all its tokens;
            batches then need position_ids
    num_items_in_batch  what to divide by instead, as in transformers: the sum of the weights of all
            micro-batches of a step, a number or a tensor

    A scalar, in nats a token. With weights of 1 it is the loss of the model itself; tokens with a
    weight of 0 are left out, and where all have 0 the loss is 0, and so is its gradient. Where
    weights are negative, their magnitudes are summed. Raises UsageError where the batch has no
    labels or no such weights, and for logits of other places.
    """
    given = _named(batch)
    targets = _targets(logits, given)
    weights = _weights(given, name, targets, logits)
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
    """The forward KL divergence, teacher from student, over the teacher's most likely tokens.

    logits    the student's, [1, T, vocabulary] or [b, L, vocabulary], as input_ids are laid out
    batch     with labels, and for each token the K ids and their K log-probabilities, natural ones,
              of the distribution that predicts this token: of the same place as its label
    ids, logprobs  their names
    weights   the name of weights, as in `weighted_loss`; None: every trained token counts alike
    num_items_in_batch  as in `weighted_loss`

    (loss, missing mass), two scalars. The loss is the mean over trained tokens of the sum over the
    K ids of p * (log p - log q), in nats: p is the teacher's probability as given, not normalised
    to the K, and q the student's among the whole vocabulary. Over all ids this is the dense KL
    divergence; over fewer it is their part of it, and its gradient is that of the normalised one
    times their mass. The missing mass, without gradient, is the mean of 1 - sum of p.

    Raises UsageError as `weighted_loss`, and where there are not K values for every token.
    """
    given = _named(batch)
    targets = _targets(logits, given)
    counts = _weights(given, weights, targets, logits)
    tops, logs = _carried(given, ids), _carried(given, logprobs)
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


def _named(batch: Any) -> Any:
    return vars(batch) | batch.carried if isinstance(batch, PackedBatch) else batch


def _next(values: Any, last: int = 0) -> Any:
    """Values [rows, length, ...] at the places that predict their tokens."""
    return torch.cat([values[:, 1:], torch.full_like(values[:, :1], last)], dim=1)


def _targets(logits: Any, given: Mapping[str, Any]) -> Any:
    """int64[rows, length], what each place is trained to predict."""
    labels = given.get("labels")
    if labels is None:
        raise UsageError("a loss of a batch without labels", "pack with the column labels")
    targets = _next(labels, IGNORED)
    if logits.shape[:-1] != targets.shape:
        raise UsageError(f"logits {[*logits.shape]} are not of {[*targets.shape]} places")
    return targets.long()


def _carried(given: Mapping[str, Any], name: str) -> Any:
    if (values := given.get(name)) is None:
        raise UsageError(f"the batch has no {name}", "carry it, and do not leave it out of `names`")
    return values


def _weights(given: Mapping[str, Any], name: str | None, targets: Any, logits: Any) -> Any:
    """[rows, length] of what targets count, in the type to compute in."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    trained = targets != IGNORED
    if name is None:
        return trained.to(kind)
    values = _carried(given, name)
    if values.ndim == 1:  # of each document
        starts = _carried(given, "position_ids").flatten() == 0
        values = values[starts.cumsum(0) - 1].view_as(targets)
    if values.shape != targets.shape:
        raise UsageError(
            f"{name} {list(values.shape)}: not a weight for each of {list(targets.shape)} places, "
            "or for each document"
        )
    return _next(values).to(kind).masked_fill(~trained, 0)


def _where_they_count(weights: Any, *given: Any) -> Any:
    """Values [rows, length, ...] at the places of a weight, [places, ...]: others need no memory as
    float32, and what is infinite there becomes no nan.
    """
    counts = weights != 0
    return (values[counts] for values in given)


def _mean(values: Any, weights: Any, total: Any) -> Any:
    summed = (values * weights).sum()
    if total is not None:
        return summed / (total.to(summed.device) if isinstance(total, torch.Tensor) else total)
    total = weights.abs().sum()
    return summed / total.masked_fill(total == 0, 1)
