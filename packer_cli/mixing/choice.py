"""Choosing documents: how much of each source is taken, what is held out, and what is a duplicate.

    choose(directories, config) -> Choice      from the indexes of tokenized directories alone

A directory's documents that may be taken are its pool, in the seeded order of their content. The
pool is thought of as repeated without end, and a stage takes a stretch of that: what half an epoch
has, two epochs have, too, and no stretch as long as one epoch has a document twice. What is held
out depends on content only, so equal documents are on one side, whatever file they are in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from packer_cli._kernels.documents import order_keys
from packer_cli.errors import InternalError, ThresholdMissed, UsageError
from packer_cli.inputs.tokenized import Pool, order_seed
from packer_cli.options.options import TRAIN, Mixture, PackConfig
from packer_cli.packing.fitting import rooms
from packer_cli.records import Int32, Int64, UInt64, offsets_of
from packer_cli.result.manifest import Share, Source
from packer_cli.result.tokenized import TokenizedDirectory, among, repeated

Bool = npt.NDArray[np.bool_]
Stretches = dict[int, tuple[int, int]]

_ROUNDING = 1e-9
_OF_SPLIT = 0xD1B54A32D192ED03  # the split does not follow the order


@dataclass(frozen=True)
class Choice:
    """The documents of a result.

    pools    for each directory: its documents in the order in which they are taken
    stages   for each stage: place of a directory -> (start, stop) in its pool, repeated
    sources  in the order of the recipe
    shares   how near they come to what is asked of them, stage after stage; of train only
    """

    pools: list[Pool]
    stages: list[Stretches]
    sources: list[Source]
    shares: list[Share]


@dataclass
class _Taking:
    """How far a directory's pool is taken. `sums` int64[n + 1]: what documents before count for."""

    pool: Pool
    sums: Int64
    at: int = 0
    amount: float = 0.0

    @property
    def total(self) -> int:
        return int(self.sums[-1])

    def taken_until(self, place: int) -> int:
        """The amount of the documents before a place of the repeated pool."""
        whole, rest = divmod(place, len(self.pool))
        return whole * self.total + int(self.sums[rest])

    def edge(self, amount: float) -> int:
        """What the document counts for that is the last one taken, if it is more than the amount
        that is asked, or else the next.
        """
        last = self.taken_until(self.at) > amount
        return int(self.pool.amounts[(self.at - last) % len(self.pool)])

    def place_of(self, amount: float) -> int:
        """The place before which there is this amount, exact to half a document."""
        whole = int(amount // self.total)
        rest = amount - whole * self.total
        place = int(np.searchsorted(self.sums, rest))
        if place and rest - self.sums[place - 1] < self.sums[min(place, len(self.sums) - 1)] - rest:
            place -= 1
        return whole * len(self.pool) + place


def choose(directories: Sequence[TokenizedDirectory], config: PackConfig) -> Choice:
    """What the mixture of `config` takes of `directories`, which are its sources' inputs in order.

    Raises UsageError when a source has too little for what is asked of it, DataError for a
    directory that cannot be read.
    """
    mixture = config.mixture
    if mixture is None:
        raise InternalError("there is no mixture to choose by")
    # documents lie directory after directory, and directories source after source
    edges = [0, *accumulate(map(len, directories))]
    parts = [slice(*edge) for edge in pairwise(edges)]
    ends = list(accumulate(one.inputs for one in mixture.sources))
    places = [range(end - one.inputs, end) for one, end in zip(mixture.sources, ends, strict=True)]
    of_source = [slice(edges[some.start], edges[some.stop]) for some in places]
    amounts = np.concatenate([_amounts(one, config) for one in directories])
    side, held, duplicates = (np.full(edges[-1], value) for value in (True, False, False))
    in_train, is_exact = mixture.part == TRAIN, mixture.dedup == "exact"
    hashes = np.empty((edges[-1] if mixture.is_split or is_exact else 0, 2), np.uint64)
    for part, one in zip(parts if len(hashes) else (), directories, strict=False):
        hashes[part] = one.content_hashes
    if mixture.is_split:
        held = _held_out(hashes, mixture, of_source, parts, config.seed)
        own = [its for one, its in zip(mixture.sources, of_source, strict=True) if one.held_out]
        if not any((held[its] & (amounts[its] > 0)).any() for its in own):
            raise UsageError(  # whichever side is packed: before the other one is
                "the validation split is empty: no document falls into it that is not dropped",
                "hold out more",
            )
        side = ~held if in_train else held
    for amount, its in zip(mixture.sources, of_source, strict=True):
        # of the other side, what is equal to held out documents of others goes
        if not (mixture.takes(amount) if in_train else amount.held_out):
            side[its] = False
    # what has no tokens in any row has no place in an amount, and stands for no equal document
    side = side & (amounts > 0)
    if is_exact:
        duplicates[side] = repeated(hashes[side])
        side &= ~duplicates
    del hashes  # 16 bytes a document
    pools = [
        _pool(one, np.flatnonzero(side[part]), amounts[part], order_seed(config.seed, place))
        for place, (one, part) in enumerate(zip(directories, parts, strict=True))
    ]
    sources = [
        Source(
            amount.name, (some.start, some.stop),
            sum(len(pools[place].pool) for place in some),
            sum(pools[place].total for place in some),
            0.0, 0, int(held[its].sum()), int(duplicates[its].sum()),
        )
        for amount, some, its in zip(mixture.sources, places, of_source, strict=True)
    ]  # fmt: skip
    return _taken(sources, pools, mixture)


def _taken(sources: list[Source], pools: list[_Taking], mixture: Mixture) -> Choice:
    """The choice, by the amounts of every stage."""
    if mixture.part == TRAIN:
        wanted = _amounts_of(mixture, [one.available for one in sources])
    else:
        wanted = [[float(one.available) for one in sources]]
    stages: list[Stretches] = []
    taken = [[0] * len(sources) for _ in wanted]
    shares: list[Share] = []
    for stage, amounts in enumerate(wanted):
        stretches: Stretches = {}
        edges = [0] * len(sources)
        for number, (source, amount) in enumerate(zip(sources, amounts, strict=True)):
            for place in range(*source.inputs):
                pool = pools[place]
                if not pool.total:
                    continue
                pool.amount += amount * pool.total / source.available
                start, pool.at = pool.at, max(pool.at, pool.place_of(pool.amount))
                taken[stage][number] += pool.taken_until(pool.at) - pool.taken_until(start)
                edges[number] = max(edges[number], pool.edge(pool.amount))
                if pool.at > start:
                    stretches[place] = start, pool.at
        stages.append(stretches)
        if mixture.part == TRAIN:
            shares += _reached(mixture, stage, amounts, taken[stage], edges)
    done = [
        replace(source, asked=sum(one[number] for one in wanted),
                taken=sum(one[number] for one in taken))
        for number, source in enumerate(sources)
    ]  # fmt: skip
    for one in done:
        if mixture.part == TRAIN and one.asked and not one.taken:
            # the result would lack it altogether, and a word in the recipe mends that
            raise UsageError(
                f"source {one.name!r}: {one.asked:,.2f} {mixture.counted} are asked of it, "
                "and every document of it has more than twice as many: nothing of it would be "
                "taken",
                "ask for more, or leave the source out",
            )
    return Choice([one.pool for one in pools], stages, done, shares)


def _pool(directory: TokenizedDirectory, may_be: Int64, amounts: Int32, seed: int) -> _Taking:
    numbers = directory.order(seed, may_be)
    pool = Pool(numbers, amounts[numbers])
    return _Taking(pool, offsets_of(pool.amounts))


def _amounts(directory: TokenizedDirectory, config: PackConfig) -> Int32:
    """int32[n], what amounts count of each document: its tokens in rows, or those trained on.

    A document that is truncated counts all that is trained on in it: the index does not say where.
    """
    lengths, trained = directory.lengths, directory.trained
    counted = trained if config.mixture and config.mixture.count == "trained" else lengths
    if config.overlong in ("truncate", "truncate-turns") and counted is lengths:
        counted = np.minimum(lengths, config.max_length)
    overlong = lengths > config.max_length
    if directory.has_pairs:
        overlong = rooms(lengths, directory.chosen, config.segment_multiple) > config.max_length
    if config.overlong == "split-text":
        overlong &= trained < lengths - 1
    if config.overlong in ("drop", "split-text"):
        counted = np.where(overlong, 0, counted)
    if not config.keep_untrained and directory.facts.config.shape != "text":
        counted = np.where(trained == 0, 0, counted)
    return counted


def _held_out(
    hashes: UInt64, mixture: Mixture, of_source: list[slice], parts: list[slice], seed: int
) -> Bool:
    """Which documents are held out: those that the split takes of its sources, by content, and all
    that equal them.
    """
    keys, held, highest = np.empty(len(hashes), np.uint64), np.zeros(len(hashes), bool), 0
    order_keys(hashes, (seed + _OF_SPLIT) % (1 << 64), keys)
    for amount, its in zip(mixture.sources, of_source, strict=True):
        if amount.held_out:
            limit = _limit(keys[its], mixture)
            highest = max(highest, limit)
            held[its] = keys[its] <= np.uint64(limit)
    # equal documents have one key: only what another source's limit would hold out may equal it
    contents = hashes[held]
    for part in parts:
        near = np.flatnonzero((keys[part] <= np.uint64(highest)) & ~held[part])
        held[part][near] = among(hashes[part][near], contents)
    return held


def _limit(keys: UInt64, mixture: Mixture) -> int:
    """The highest key of a source's documents that are held out."""
    if mixture.validation_documents is not None:
        last = min(mixture.validation_documents, len(keys)) - 1
        return int(np.partition(keys, last)[last])
    share = mixture.validation_share or 0.0
    return min(int(share * 2.0**64), (1 << 64) - 1)


def _amounts_of(mixture: Mixture, available: Sequence[int]) -> list[list[float]]:
    """For every stage, what is taken of each source, in tokens as `mixture.count` counts them.

    `available`: of each source, in one epoch. Raises UsageError for a source that is too small.
    """
    for one, has in zip(mixture.sources, available, strict=True):
        if not has and mixture.takes(one):
            raise UsageError(
                f"source {one.name!r}: has no {mixture.counted} to take",
                "its documents are held out, dropped, duplicates, or there are none",
            )
    stages = list[list[float]]()
    for number, stage in enumerate(mixture.stages):
        shares = _shares([stage.weight_of(one) for one in mixture.sources])
        if not any(shares):
            which = f"stage {stage.name or number + 1}"
            raise UsageError(f"{which}: all weights are 0", "give one source more than 0")
        stages.append([stage.tokens * share for share in shares])
    stages = stages or [_without_stages(mixture, available)]
    amounts = [sum(column) for column in zip(*stages, strict=True)]
    for one, has, amount in zip(mixture.sources, available, amounts, strict=True):
        if one.epochs is None and amount > one.max_epochs * has * (1 + _ROUNDING):
            epochs = "1 epoch has" if one.max_epochs == 1 else f"{one.max_epochs:g} epochs have"
            raise UsageError(
                f"source {one.name!r}: too small: {amount:,.0f} {mixture.counted} are asked of "
                f"it, {epochs} {one.max_epochs * has:,.0f}",
                f"ask for less, or let it be taken more often: max_epochs = {amount / has:.2f}",
            )
    return stages


def _reached(
    mixture: Mixture,
    stage: int,
    asked: Sequence[float],
    taken: Sequence[int],
    documents: Sequence[int],
) -> list[Share]:
    """What every source reaches. `documents`: what those at the ends of what is taken count for."""
    whole, got = sum(asked), max(sum(taken), 1)
    found = []
    for one, wanted, has, document in zip(mixture.sources, asked, taken, documents, strict=True):
        off = abs(has / got - wanted / whole) if whole else 0.0
        is_own = abs(has - wanted) >= off * whole / 2
        number = stage if mixture.stages else None
        found.append(Share(one.name, number, wanted, has, off, document if is_own else 0))
    return found


def refuse_missed(mixture: Mixture, shares: Sequence[Share], most: float) -> None:
    """Raise ThresholdMissed for a share that is more than `most` off. It names the worst."""
    worst = max(shares, key=lambda one: one.off)
    if worst.off > most:
        raise ThresholdMissed(
            f"{told(mixture, worst)}, --max-share-error is {most:.2%}",
            "take more in all, choose other weights, or allow more: --max-share-error "
            f"{math.ceil(worst.off * 1000) / 10:g}%",
        )


def told(mixture: Mixture, share: Share) -> str:
    """A share that is off, in a line: asked, got, and why."""
    number = share.stage
    where = "" if number is None else f"stage {mixture.stages[number].name or number + 1}, "
    why = "since the documents of others are whole"
    if share.document:
        why = f"since documents are whole and the one at its end has {share.document:,}"
    return (
        f"{where}source {share.source!r}: {share.asked:,.0f} {mixture.counted} are asked of it, "
        f"{share.taken:,} are taken, {why}: its share is {share.off:.2%} off"
    )


def _without_stages(mixture: Mixture, available: Sequence[int]) -> list[float]:
    """Epochs and tokens as they are given; what they leave is shared by weight."""
    fixed = list[float]()
    for one, has in zip(mixture.sources, available, strict=True):
        whole = (1.0 if one.epochs is None else one.epochs) * has
        amount = whole if one.tokens is None else float(one.tokens)
        fixed.append(amount if one.weight is None else 0.0)
    shares = _shares([one.weight or 0.0 for one in mixture.sources])
    if not any(shares):
        return fixed
    if mixture.tokens is not None:
        left = mixture.tokens - sum(fixed)
        if left <= 0:
            raise UsageError(
                f"tokens: {mixture.tokens:,} in all, and sources with epochs or tokens of their "
                f"own have {sum(fixed):,.0f}: nothing is left for the weights",
                "raise tokens, or give those sources less",
            )
    else:  # the most that needs no source more often than it may be taken
        left = min(
            one.max_epochs * has / share
            for one, has, share in zip(mixture.sources, available, shares, strict=True)
            if share
        )
    return [known + left * share for known, share in zip(fixed, shares, strict=True)]


def _shares(weights: Sequence[float]) -> list[float]:
    """Shares of the whole by weight, all 0 where these are. However large weights are, their sum
    is a number.
    """
    largest = max(weights) or 1.0
    scaled = [weight / largest for weight in weights]
    total = sum(scaled) or 1.0
    return [weight / total for weight in scaled]
