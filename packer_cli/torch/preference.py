"""Collators of rows of pairs (`--shape preference`): the inputs of a model, and where answers are.

A batch is a dict. Its "inputs" are those of `varlen_collate` or another collator, without labels:
`model(**batch["inputs"])`. What a loss needs is beside them, so `model(**batch)` is an error, and
never trains on rejected answers. S answers of K tokens in P pairs, in the order of rows:

    inputs         dict for the model, int64 [1, T] and what keeps documents apart
    places         int64[K], where logits predict the tokens of answers, in [T], rows end to end
    targets        int64[K], these tokens
    answers        int64[K], which answer each is of
    lengths        int64[S], tokens of each answer that are trained on
    last_tokens    int64[S], the place of the last token of prompt and answer, where reward models
                   have the score
    desirable      bool[S], of each answer: chosen, or a label that is true
    chosen         int64[P], which answers are chosen, and
    rejected       int64[P], of the same pairs rejected; both of `preference_collate` only
    mismatched     a batch of other prompts, of `unpaired_collate(..., mismatched=True)` only

Columns of `--carry` are beside them by their names: those of records [S], and those of tokens [K],
the values of `targets`; either with another dimension where there are several each. `mismatched`
has none.

`answer_logps` gives the log-probabilities of the S answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from packer_cli.errors import DataError, UsageError
from packer_cli.options.options import PAIR, SIDE
from packer_cli.records import IGNORED, Int64
from packer_cli.result.reader import PACK_AGAIN, Lists
from packer_cli.torch.collate import NOT_GIVEN, varlen_collate, with_carried
from packer_cli.torch.dataset import RowBatch, row_batch

Collate = Callable[[RowBatch], dict[str, Any]]
_LABELS = ("labels", "shift_labels")


def preference_collate(
    rows: Any, *, config: Any = NOT_GIVEN, collate: Collate | None = None
) -> dict[str, Any]:
    """A batch of pairs, for DPO and its kin, and for reward models.

    rows     of `PackedDataset`, packed with `--shape preference`
    config   the model's; None for a model of your own. Must be given where `collate` is not
    collate  what makes the inputs; None: `partial(varlen_collate, config=config)`. For other
             families `partial(block_mask_collate, config=model.config)`, or `separate_collate`

    Raises UsageError for rows that are not of pairs, or of records with a label, and whatever
    `collate` raises; DataError for pairs without two sides.
    """
    batch = _Answers(row_batch(rows, of_pairs=True))
    return batch.collated(_collate(config, collate)) | batch.pairs()


def unpaired_collate(
    rows: Any,
    *,
    config: Any = NOT_GIVEN,
    collate: Collate | None = None,
    mismatched: bool = False,
) -> dict[str, Any]:
    """A batch of answers that are desirable or not, for KTO and its kin: of records with a label,
    or of pairs, of which each side counts for itself. Arguments and errors as for
    `preference_collate`; UsageError, too, for a batch of both.

    mismatched  also give, as another batch, each prompt with the answer of the record before it,
                the first with that of the last. KTO estimates its KL term by their
                log-probabilities. It has as many tokens, in one row. Raises UsageError for a batch
                of one record
    """
    batch, how = _Answers(row_batch(rows, of_pairs=True)), _collate(config, collate)
    batch.sides()  # raises for unlike records
    collated = batch.collated(how) | {"desirable": batch.desirable}
    if not mismatched:
        return collated
    return collated | {"mismatched": _Answers(batch.mismatched()).collated(how)}


def _collate(config: Any, collate: Collate | None) -> Collate:
    if collate is None:
        return partial(varlen_collate, config=config)
    if config is not NOT_GIVEN:
        raise UsageError(
            "config and collate: `collate` makes the inputs, and knows the model by itself",
            "leave config out: collate=partial(block_mask_collate, config=model.config)",
        )
    return collate


class _Answers:
    """The answers of rows of pairs, and where they are in the rows end to end.

    rows, begins, ends  int64[S], as `RowBatch.segments` has prompts with their answers
    pair, side    int64[S], bool[S], as rows have them; `desirable` is `side` as a tensor
    targets       int64[K], the places of tokens that are trained on
    answers       int64[K], the answer that each is of
    """

    def __init__(self, batch: RowBatch) -> None:
        self.batch = batch
        self.rows, self.begins, self.ends = batch.segments()
        sizes = np.bincount(self.rows, minlength=len(batch))
        pair, side = batch.ragged[PAIR], batch.ragged[SIDE]
        alike = all(np.array_equal(np.diff(one.ends), sizes) for one in (pair, side))
        if not alike or not np.isin(side.values, (0, 1)).all():
            raise DataError("pair and side are not a number and 0 or 1 of each segment", PACK_AGAIN)
        self.pair, self.side = pair.values.astype(np.int64), side.values == 1
        self.desirable = torch.from_numpy(self.side)
        name = next((name for name in _LABELS if name in batch.columns), None)
        if name is None:
            raise UsageError(
                "rows of pairs without labels: nothing says which tokens are answers",
                "PackedDataset gives them unless `columns` leaves them out",
            )
        trained = np.flatnonzero(batch.columns[name].numpy() != IGNORED)
        self.targets: Int64 = trained + (name == "shift_labels")
        self.answers = np.searchsorted(self.begins, self.targets, side="right") - 1
        inside = self.targets > self.begins[self.answers]  # its first token is predicted by none
        if not (inside & (self.targets < self.ends[self.answers])).all():
            raise DataError("a label is on no token, or on the first of a segment", PACK_AGAIN)
        self.lengths = np.bincount(self.answers, minlength=len(self.begins))
        if not self.lengths.all():  # its log-probability would be 0, the highest
            row = self.rows[self.lengths.argmin()]
            raise DataError(
                f"row {row} of a batch has an answer without a token that is trained on", PACK_AGAIN
            )

    def sides(self) -> int:
        """How many answers a record has: 2, or 1 where all have a label. UsageError for both."""
        records = np.stack([self.rows, self.pair])
        counts = np.unique(records, axis=1, return_counts=True)[1]
        if (counts != counts[0]).any():
            raise UsageError(
                "unpaired_collate: a batch has pairs, and answers with a label beside them",
                "train on them one after the other: losses estimate with other records of a batch",
            )
        return int(counts[0])

    def pairs(self) -> dict[str, Any]:
        """desirable, chosen and rejected. Raises for answers without another side."""
        order = np.lexsort((~self.side, self.pair, self.rows))  # of a pair the chosen one first
        chosen, rejected = order[::2], order[1::2]
        if (
            len(order) % 2
            or not (
                (self.rows[chosen] == self.rows[rejected])
                & (self.pair[chosen] == self.pair[rejected])
                & (self.side[chosen] > self.side[rejected])
            ).all()
        ):
            raise UsageError(
                "preference_collate: not every answer has another side, chosen or rejected",
                "unpaired_collate takes records with a label",
            )
        both = {"chosen": chosen, "rejected": rejected}
        return {"desirable": self.desirable} | {n: torch.from_numpy(v) for n, v in both.items()}

    def collated(self, collate: Collate) -> dict[str, Any]:
        """A batch without what pairs say: see above."""
        batch, plain = self.batch, (*_LABELS, PAIR, SIDE)
        inputs = collate(
            RowBatch(
                {name: v for name, v in batch.columns.items() if name not in plain},
                {name: v for name, v in batch.ragged.items() if name not in plain},
            )
        )
        # where segments begin in the inputs, end to end: as in the rows, unless each has its own
        starts, shape = self.begins, tuple(inputs["input_ids"].shape)
        if shape not in ((1, len(batch) * batch.max_length), (len(batch), batch.max_length)):
            starts = np.arange(len(self.begins)) * shape[-1]
        moved = starts - self.begins
        ids = batch.columns["input_ids"].numpy().reshape(-1)
        numbers = {
            "places": self.targets - 1 + moved[self.answers],
            "targets": ids[self.targets].astype(np.int64),
            "answers": self.answers,
            "lengths": self.lengths,
            "last_tokens": self.ends - 1 + moved,
        }
        made = {"inputs": inputs} | {n: torch.from_numpy(v) for n, v in numbers.items()}
        carried = batch.carried_by_documents(np.bincount(self.rows, minlength=len(batch)))
        of_tokens = batch.carried_by_tokens().items()
        carried |= {name: values.flatten(0, 1)[self.targets] for name, values in of_tokens}
        return with_carried(made, carried)

    def mismatched(self) -> RowBatch:
        """One row of each prompt with the answer of the record before it. A prompt ends at the
        first token that is trained on.
        """
        count, sides = len(self.begins), self.sides()
        if count < 2 * sides:
            raise UsageError(
                "mismatched: a batch of one record has no answers to other prompts",
                "train with more rows in a batch, and drop_last=True",
            )
        firsts = self.targets[np.searchsorted(self.targets, self.begins)]
        places, edges = [], [0]
        for answer in range(count):
            other = answer - sides  # of another record, and each answer once
            places.append(np.arange(self.begins[answer], firsts[answer]))
            places.append(np.arange(firsts[other], self.ends[other]))
            edges.append(edges[-1] + len(places[-1]) + len(places[-2]))
        taken = torch.from_numpy(np.concatenate(places))
        ids = self.batch.columns["input_ids"].reshape(-1)
        labels = torch.full_like(ids, IGNORED)
        labels[self.targets] = ids[self.targets]
        columns = {"input_ids": ids[taken][None], "labels": labels[taken][None]}
        answers = {PAIR: Lists.of([self.pair]), SIDE: Lists.of([self.side])}
        return RowBatch(columns, {"cu_seqlens": Lists.of([edges])} | answers)


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
