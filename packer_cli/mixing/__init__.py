"""Choosing documents: how much of each source is taken, what is held out, and what is a duplicate.

    choose(directories, config) -> Choice      from the indexes of tokenized directories alone

A directory's documents that may be taken are its pool, in the seeded order of their content. The
pool is thought of as repeated without end, and as much of its beginning is taken as is asked of it:
what half an epoch has, two epochs have, too. What is held out depends on content only, so equal
documents are on one side, whatever file they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from packer_cli._kernels.documents import order_keys
from packer_cli.errors import InternalError, UsageError
from packer_cli.inputs.tokenized import DocumentPool, order_seed
from packer_cli.options.options import TRAIN, Mixture, PackConfig
from packer_cli.records import Int32, Int64, UInt64, offsets_of
from packer_cli.result.manifest import ReachedShare, SourceStats
from packer_cli.result.tokenized import TokenizedDirectory, among, repeated

Bool = npt.NDArray[np.bool_]

_ROUNDING = 1e-9
_OF_SPLIT = 0xD1B54A32D192ED03  # the split does not follow the order


@dataclass(frozen=True)
class Choice:
    """The documents of a result.

    pools    for each directory: its documents in the order in which they are taken
    taken    place of a directory -> how many documents of its pool, repeated
    sources  in the order of the recipe
    shares   how near they come to what is asked of them; of train only
    """

    pools: list[DocumentPool]
    taken: dict[int, int]
    sources: list[SourceStats]
    shares: list[ReachedShare]


@dataclass(frozen=True)
class _SummedPool:
    """A directory's pool. `sums` int64[n + 1]: the amounts of the documents before each."""

    pool: DocumentPool
    sums: Int64

    @property
    def total(self) -> int:
        return int(self.sums[-1])

    def taken_until(self, place: int) -> int:
        """The amount of the documents before a place of the repeated pool."""
        whole, rest = divmod(place, len(self.pool))
        return whole * self.total + int(self.sums[rest])

    def edge(self, place: int, amount: float) -> int:
        """The amount of the last document before a place, if more than `amount` is taken until
        there, or else of the next.
        """
        last = self.taken_until(place) > amount
        return int(self.pool.amounts[(place - last) % len(self.pool)])

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
        held = _held_out(hashes, mixture, of_source, parts, amounts, config.seed)
        own = [its for one, its in zip(mixture.sources, of_source, strict=True) if one.held_out]
        if not any((held[its] & (amounts[its] > 0)).any() for its in own):
            raise UsageError(  # whichever side is packed: before the other one is
                "the validation split is empty: no document falls into it that is not dropped",
                "hold out more",
            )
        side = ~held if in_train else held
    for amount, its in zip(mixture.sources, of_source, strict=True):
        # of the other side, what is equal to held out documents of others goes
        if not (amount.weight != 0 if in_train else amount.held_out):
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
        SourceStats(
            amount.name, (some.start, some.stop),
            sum(len(pools[place].pool) for place in some),
            sum(pools[place].total for place in some),
            0.0, 0, int(held[its].sum()), int(duplicates[its].sum()),
        )
        for amount, some, its in zip(mixture.sources, places, of_source, strict=True)
    ]  # fmt: skip
    return _taken(sources, pools, mixture)


def _taken(sources: list[SourceStats], pools: list[_SummedPool], mixture: Mixture) -> Choice:
    """The choice, by the amounts of all sources."""
    in_train = mixture.part == TRAIN
    available = [source.available for source in sources]
    amounts = _amounts_of(mixture, available) if in_train else [*map(float, available)]
    counts = dict[int, int]()
    edges = [0] * len(sources)
    for number, (source, amount) in enumerate(zip(sources, amounts, strict=True)):
        taken = 0
        for place in range(*source.inputs):
            pool = pools[place]
            if not pool.total:
                continue
            own = amount * pool.total / source.available
            count = pool.place_of(own)
            taken += pool.taken_until(count)
            edges[number] = max(edges[number], pool.edge(count, own))
            if count:
                counts[place] = count
        sources[number] = replace(source, asked=amount, taken=taken)
        if in_train and amount and not taken:
            # the result would lack it altogether, and a word in the recipe fixes that
            raise UsageError(
                f"source {source.name!r}: none of its documents fits in {amount:,.2f} "
                f"{mixture.counted} asked: each has more than twice as many",
                "ask for more, or leave the source out",
            )
    shares = _shares_reached(sources, edges) if in_train else []
    return Choice([one.pool for one in pools], counts, sources, shares)


def _pool(directory: TokenizedDirectory, may_be: Int64, amounts: Int32, seed: int) -> _SummedPool:
    numbers = directory.order(seed, may_be)
    pool = DocumentPool(numbers, amounts[numbers])
    return _SummedPool(pool, offsets_of(pool.amounts))


def _amounts(directory: TokenizedDirectory, config: PackConfig) -> Int32:
    """int32[n], what amounts count of each document: its tokens in rows, or those trained on.

    A document that is truncated counts all that is trained on in it: the index does not say where.
    """
    lengths, trained = directory.lengths, directory.trained
    counted = trained if config.mixture and config.mixture.count == "trained" else lengths
    if config.overlong in ("truncate", "truncate-turns") and counted is lengths:
        counted = np.minimum(lengths, config.max_length)
    overlong = lengths > config.max_length
    if config.overlong == "split-text":
        overlong &= trained < lengths - 1
    if config.overlong in ("drop", "split-text"):
        counted = np.where(overlong, 0, counted)
    if directory.facts.config.shape != "text":
        counted = np.where(trained == 0, 0, counted)
    return counted


def _held_out(
    hashes: UInt64,
    mixture: Mixture,
    of_source: list[slice],
    parts: list[slice],
    amounts: Int32,
    seed: int,
) -> Bool:
    """Which documents are held out: those that the split takes of its sources, by content, and all
    that equal them. A source that would have nothing left stays in train.
    """
    keys, held, highest = np.empty(len(hashes), np.uint64), np.zeros(len(hashes), bool), 0
    order_keys(hashes, (seed + _OF_SPLIT) % (1 << 64), keys)
    available = [int(amounts[its].sum(dtype=np.int64)) for its in of_source]
    taken = _amounts_of(mixture, available)
    for amount, its, has, asked in zip(mixture.sources, of_source, available, taken, strict=True):
        if not amount.held_out:
            continue
        limit = np.uint64(_limit(keys[its], mixture, min(asked / max(has, 1), 1.0)))
        found = keys[its] <= limit
        if amount.weight == 0 or (amounts[its][~found] > 0).any():
            held[its], highest = found, max(highest, int(limit))
    # equal documents have one key: only what another source's limit would hold out may equal it
    contents = hashes[held]
    for part in parts:
        near = np.flatnonzero((keys[part] <= np.uint64(highest)) & ~held[part])
        held[part][near] = among(hashes[part][near], contents)
    return held


def _limit(keys: UInt64, mixture: Mixture, taken: float) -> int:
    """The highest key of a source's documents that are held out. `taken`: the share of them that
    the mixture takes.
    """
    if mixture.validation_documents is not None:
        last = min(mixture.validation_documents, len(keys)) - 1
        return int(np.partition(keys, last)[last])
    share = (mixture.validation_share or 0.0) * taken
    return min(int(share * 2.0**64), (1 << 64) - 1)


def _amounts_of(mixture: Mixture, available: Sequence[int]) -> list[float]:
    """What is taken of each source, in tokens as `mixture.count` counts them: epochs and tokens as
    they are given; what they leave is shared by weight.

    `available`: of each source, in one epoch. Raises UsageError for a source that is too small.
    """
    for one, has in zip(mixture.sources, available, strict=True):
        if not has and one.weight != 0:
            raise UsageError(
                f"source {one.name!r}: has no {mixture.counted} to take",
                "its documents are held out, dropped, duplicates, or there are none",
            )
    fixed = list[float]()
    for one, has in zip(mixture.sources, available, strict=True):
        whole = (1.0 if one.epochs is None else one.epochs) * has
        amount = whole if one.tokens is None else float(one.tokens)
        fixed.append(amount if one.weight is None else 0.0)
    shares = _shares([one.weight or 0.0 for one in mixture.sources])
    left = _left_for_weights(mixture, available, fixed, shares) if any(shares) else 0.0
    amounts = [known + left * share for known, share in zip(fixed, shares, strict=True)]
    for one, has, amount in zip(mixture.sources, available, amounts, strict=True):
        if one.epochs is None and amount > one.max_epochs * has * (1 + _ROUNDING):
            epochs = "1 epoch has" if one.max_epochs == 1 else f"{one.max_epochs:g} epochs have"
            raise UsageError(
                f"source {one.name!r}: too small: {amount:,.0f} {mixture.counted} are asked of "
                f"it, {epochs} {one.max_epochs * has:,.0f}",
                f"ask for less, or let it be taken more often: max_epochs = {amount / has:.2f}",
            )
    return amounts


def _left_for_weights(
    mixture: Mixture, available: Sequence[int], fixed: Sequence[float], shares: Sequence[float]
) -> float:
    """How much the sources with a weight have together. `fixed`: what each of the others has."""
    if mixture.tokens is None:  # the most that needs no source more often than it may be taken
        return min(
            one.max_epochs * has / share
            for one, has, share in zip(mixture.sources, available, shares, strict=True)
            if share
        )
    left = mixture.tokens - sum(fixed)
    if left <= 0:
        raise UsageError(
            f"tokens: {mixture.tokens:,} in all, and sources with epochs or tokens of their "
            f"own have {sum(fixed):,.0f}: nothing is left for the weights",
            "raise tokens, or give those sources less",
        )
    return left


def _shares(weights: Sequence[float]) -> list[float]:
    """Shares of the whole by weight, all 0 if these are. However large weights are, their sum is a
    number.
    """
    largest = max(weights) or 1.0
    scaled = [weight / largest for weight in weights]
    total = sum(scaled) or 1.0
    return [weight / total for weight in scaled]


def _shares_reached(sources: Sequence[SourceStats], edges: Sequence[int]) -> list[ReachedShare]:
    """How near every source comes to its share. `edges`: the amount of the document at its end."""
    whole = sum(one.asked for one in sources)
    got = max(sum(one.taken for one in sources), 1)
    found = []
    for one, document in zip(sources, edges, strict=True):
        off = abs(one.taken / got - one.asked / whole) if whole else 0.0
        is_own = abs(one.taken - one.asked) >= off * whole / 2
        found.append(ReachedShare(one.name, one.asked, one.taken, off, document if is_own else 0))
    return found


def missed_share(mixture: Mixture, share: ReachedShare) -> str:
    """A line on a share that is off: asked, taken, and why."""
    what = f"source {share.source!r}: takes {share.taken:,} of {share.asked:,.0f} {mixture.counted}"
    why = "documents of other sources are not split"
    if share.document:
        why = f"documents are not split, and its last one has {share.document:,}"
    return f"{what} asked: {why}; its share is {share.off:.2%} off"
