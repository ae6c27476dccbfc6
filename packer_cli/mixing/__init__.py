"""Choose documents for a mixture: take an amount of each source, hold out a split, drop duplicates.

    choose(directories, config) -> Choice      from the indexes of tokenized directories alone

The documents of a directory that may be taken are its pool, in a seeded order of their content. An
amount is the beginning of the pool, repeated without end. So two epochs contain all that half an
epoch contains. If its source has tiers, a directory has a pool for each of them. The split depends
on content only, so equal documents are on one side of it, whatever file they are in. Memory is a
few dozen bytes a document.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, structs

from packer_cli._kernels.documents import order_keys
from packer_cli.errors import InternalError, UsageError
from packer_cli.inputs.selection import Selection, first_bits
from packer_cli.inputs.tokenized import DocumentPool, new_conditions, order_seed
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import TRAIN, Amount, Mixture, PackConfig
from packer_cli.records import Int32, Int64, UInt8, UInt64, offsets_of
from packer_cli.result.manifest import ReachedShare, SourceStats
from packer_cli.result.tokenized import TokenizedDirectory

Bool = npt.NDArray[np.bool_]

_ROUNDING = 1e-9
_SUMMED = ("documents", "available", "asked", "taken", "held_out_documents", "duplicate_documents")
_OF_SPLIT = 0xD1B54A32D192ED03  # the split does not follow the order


@dataclass(frozen=True)
class Choice:
    """The documents of a result.

    pools    of each directory: one for each tier of its source, or only one
    sources  in the order of the recipe
    shares   shares that sources and tiers reach; empty for the validation split
    """

    pools: list[list[DocumentPool]]
    sources: list[SourceStats]
    shares: list[ReachedShare]


@dataclass(frozen=True)
class _Stretch:
    """Documents of a directory that have one amount: all, or a tier of its source.

    number     of the directory
    documents  int64[n], ascending
    """

    number: int
    documents: Int64


@dataclass(frozen=True)
class _SummedPool:
    """A pool of a directory. `sums` int64[n + 1]: amount of the documents before each."""

    pool: DocumentPool
    sums: Int64

    @property
    def total(self) -> int:
        return int(self.sums[-1])

    def taken_until(self, place: int) -> int:
        """Return the amount of the documents before a place of the repeated pool."""
        epochs, number = divmod(place, len(self.pool))
        return epochs * self.total + int(self.sums[number])

    def edge(self, place: int, amount: float) -> int:
        """Return the amount of the last document before a place if more than `amount` is taken up
        to there, or else that of the next one.
        """
        last = self.taken_until(place) > amount
        return int(self.pool.amounts[(place - last) % len(self.pool)])

    def place_of(self, amount: float) -> int:
        """Return the place before which the pool has this amount, exact to half a document."""
        epochs = int(amount // self.total)
        left = amount - epochs * self.total
        place = int(np.searchsorted(self.sums, left))
        if place and left - self.sums[place - 1] < self.sums[min(place, len(self.sums) - 1)] - left:
            place -= 1
        return epochs * len(self.pool) + place


def choose(directories: Sequence[TokenizedDirectory], config: PackConfig) -> Choice:
    """Choose documents of `directories`, the inputs of the mixture's sources in order.

    Raises UsageError if a source or a tier has too little for the amount asked, DataError for a
    directory that cannot be read.
    """
    mixture = config.mixture
    if mixture is None:
        raise InternalError("there is no mixture to choose by")
    # documents lie source after source and tier after tier, in these directory after directory
    portions, (by_portion, filtered) = mixture.portions, _stretches(directories, mixture)
    stretches = [*chain.from_iterable(by_portion)]
    edges = [0, *accumulate(len(stretch.documents) for stretch in stretches)]
    parts = [slice(*edge) for edge in pairwise(edges)]
    ranges = [slice(*edge) for edge in pairwise([0, *accumulate(map(len, by_portion))])]
    of_portion = [slice(edges[part.start], edges[part.stop]) for part in ranges]
    each = [_amounts(directory, config) for directory in directories]
    amounts = np.concatenate([each[stretch.number][stretch.documents] for stretch in stretches])
    side, held, duplicates = (np.full(edges[-1], value) for value in (True, False, False))
    in_train, is_exact = mixture.part == TRAIN, mixture.dedup == "exact"
    hashes = np.empty((edges[-1] if mixture.is_split or is_exact else 0, 2), np.uint64)
    for part, stretch in zip(parts if len(hashes) else (), stretches, strict=False):
        hashes[part] = directories[stretch.number].content_hashes[stretch.documents]
    if mixture.is_split:
        held = _held_out(hashes, mixture, of_portion, parts, amounts, config.seed)
        split = [
            documents
            for portion, documents in zip(portions, of_portion, strict=True)
            if portion.held_out
        ]
        if not any((held[documents] & (amounts[documents] > 0)).any() for documents in split):
            raise UsageError(  # whichever side is packed: before the other one is
                "the validation split is empty: no document falls into it that is not dropped",
                "hold out more",
            )
        side = ~held if in_train else held
    for portion, documents in zip(portions, of_portion, strict=True):
        # others give this part nothing, not even equals of held out documents
        if not (portion.weight != 0 if in_train else portion.held_out):
            side[documents] = False
    # a document without tokens in any row counts for nothing, and is not a duplicate's original
    side = side & (amounts > 0)
    if is_exact:
        duplicates[side] = _repeated(hashes[side])
        side &= ~duplicates
    del hashes  # 16 bytes a document
    pools = [
        _pool(directories[stretch.number], stretch.documents[side[part]], each[stretch.number],
              order_seed(config.seed, stretch.number))
        for stretch, part in zip(stretches, parts, strict=True)
    ]  # fmt: skip
    pools_of_portion = [pools[part] for part in ranges]
    stats = [
        SourceStats(
            portion.name, (its_stretches[0].number, its_stretches[-1].number + 1),
            sum(len(pool.pool) for pool in its_pools),
            sum(pool.total for pool in its_pools),
            0.0, 0, int(held[documents].sum()), int(duplicates[documents].sum()),
            tier=portion.tier, where=portion.where if portion.tier else UNSET,
        )
        for portion, documents, its_stretches, its_pools in zip(
            portions, of_portion, by_portion, pools_of_portion, strict=True
        )
    ]  # fmt: skip
    choice = _taken(stats, pools_of_portion, mixture)
    return replace(choice, sources=_with_tiers(choice.sources, filtered, mixture))


def _stretches(
    directories: Sequence[TokenizedDirectory], mixture: Mixture
) -> tuple[list[list[_Stretch]], list[int]]:
    """Return the documents of all that has an amount of its own, in the order of the mixture's
    portions, and how many documents of each source are in none of its tiers.
    """
    by_portion, filtered = list[list[_Stretch]](), list[int]()
    inputs = pairwise([0, *accumulate(source.inputs for source in mixture.sources)])
    for source, numbers in zip(mixture.sources, inputs, strict=True):
        tiers = {number: _tiers(directories[number], source) for number in range(*numbers)}
        by_portion += [
            [_Stretch(number, np.flatnonzero(of == tier)) for number, of in tiers.items()]
            for tier in range(len(source.portions))
        ]
        filtered.append(sum(int((of == len(source.portions)).sum()) for of in tiers.values()))
    return by_portion, filtered


def _tiers(directory: TokenizedDirectory, source: Amount) -> UInt8:
    """Return the tier of each document of a source, uint8[n], from 0; of one that fits none, as
    many as there are.
    """
    conditions = tuple(tier.where for tier in source.tiers)
    new = new_conditions(directory, DocumentConfig(where=source.where, tiers=conditions))
    has_stored = conditions and not new.tiers
    tiers = directory.tiers if has_stored else np.zeros(len(directory), np.uint8)
    if (selection := Selection.of(new)) is not None:
        fits = selection.of_stored(directory)
        tiers = first_bits(fits) if new.tiers else tiers
        tiers[fits == 0] = len(source.portions)
    return tiers


def _taken(stats: list[SourceStats], pools: list[list[_SummedPool]], mixture: Mixture) -> Choice:
    """Take the amounts of all sources and tiers. `pools`: of each, in its directories.

    Raises UsageError if one of them would have no document.
    """
    in_train = mixture.part == TRAIN
    available = [portion.available for portion in stats]
    amounts = _amounts_of(mixture, available) if in_train else [*map(float, available)]
    of_directories = defaultdict[int, list[DocumentPool]](list)
    edges = [0] * len(stats)
    for number, (portion, amount) in enumerate(zip(stats, amounts, strict=True)):
        taken = 0
        for directory, pool in enumerate(pools[number], portion.inputs[0]):
            count = 0
            if pool.total:
                share = amount * pool.total / portion.available
                count = pool.place_of(share)
                taken += pool.taken_until(count)
                edges[number] = max(edges[number], pool.edge(count, share))
            of_directories[directory].append(replace(pool.pool, taken=count))
        stats[number] = structs.replace(portion, asked=amount, taken=taken)
        if in_train and amount and not taken:
            # the result would lack it altogether, and a word in the recipe fixes that
            raise UsageError(
                f"{mixture.portions[number].label}: none of its documents fits in {amount:,.2f} "
                f"{mixture.counted} asked: each has more than twice as many",
                "ask for more, or leave it out",
            )
    shares = _shares_reached(stats, edges) if in_train else []
    return Choice([*of_directories.values()], stats, shares)


def _with_tiers(
    stats: Sequence[SourceStats], filtered: Sequence[int], mixture: Mixture
) -> list[SourceStats]:
    """Return the sources of all that has an amount of its own, with their `filtered` documents."""
    left, sources = iter(stats), list[SourceStats]()
    for source, number in zip(mixture.sources, filtered, strict=True):
        portions = [*islice(left, len(source.portions))]
        sums = {name: sum(getattr(portion, name) for portion in portions) for name in _SUMMED}
        sources.append(
            SourceStats(
                source.name, portions[0].inputs, **sums, filtered_documents=number,
                tiers=portions if source.tiers else [],
            )
        )  # fmt: skip
    return sources


def _pool(directory: TokenizedDirectory, may_be: Int64, amounts: Int32, seed: int) -> _SummedPool:
    numbers = directory.order(seed, may_be)
    pool = DocumentPool(numbers, amounts[numbers])
    return _SummedPool(pool, offsets_of(pool.amounts))


def _amounts(directory: TokenizedDirectory, config: PackConfig) -> Int32:
    """Return what amounts count of each document, int32[n]: its tokens in rows, or trained tokens.

    A truncated document counts all its trained tokens: the index does not have their places.
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
    of_portion: list[slice],
    parts: list[slice],
    amounts: Int32,
    seed: int,
) -> Bool:
    """Mark the documents that are held out, bool[n]: those that the split takes of its sources and
    their tiers, by content, and all that equal them. One that would have no document left is not
    split.
    """
    keys, held, highest = np.empty(len(hashes), np.uint64), np.zeros(len(hashes), bool), 0
    order_keys(hashes, (seed + _OF_SPLIT) % (1 << 64), keys)
    available = [int(amounts[documents].sum(dtype=np.int64)) for documents in of_portion]
    asked = _amounts_of(mixture, available)
    for number, (portion, documents) in enumerate(zip(mixture.portions, of_portion, strict=True)):
        if not portion.held_out:
            continue
        taken = min(asked[number] / max(available[number], 1), 1.0)
        limit = np.uint64(_limit(keys[documents], mixture, taken))
        in_split = keys[documents] <= limit
        if portion.weight == 0 or (amounts[documents][~in_split] > 0).any():
            held[documents], highest = in_split, max(highest, int(limit))
    # equal documents have equal keys: only those up to the highest limit may equal a held out one
    contents = hashes[held]
    for part in parts:
        near = np.flatnonzero((keys[part] <= np.uint64(highest)) & ~held[part])
        held[part][near] = _among(hashes[part][near], contents)
    return held


def _limit(keys: UInt64, mixture: Mixture, taken: float) -> int:
    """Return the highest key of a source's documents that are held out. `taken`: the share of the
    source that the mixture takes, 0..1.
    """
    if mixture.validation_documents is not None:
        last = min(mixture.validation_documents, len(keys)) - 1
        return int(np.partition(keys, last)[last])
    share = (mixture.validation_share or 0.0) * taken
    return min(int(share * 2.0**64), (1 << 64) - 1)


def _amounts_of(mixture: Mixture, available: Sequence[int]) -> list[float]:
    """Return the amount that is asked of each source and tier, in tokens as `mixture.count` counts
    them.

    Those with epochs or tokens get these; the others share what is left, by weight. `available`:
    amount of each in one epoch. Raises UsageError for one that is too small.
    """
    portions = mixture.portions
    for portion, has in zip(portions, available, strict=True):
        if not has and portion.weight != 0:
            raise UsageError(
                f"{portion.label}: has no {mixture.counted} to take",
                "its documents are held out, dropped, duplicates, or there are none",
            )
    fixed = list[float]()
    for portion, has in zip(portions, available, strict=True):
        whole = (1.0 if portion.epochs is None else portion.epochs) * has
        amount = whole if portion.tokens is None else float(portion.tokens)
        fixed.append(amount if portion.weight is None else 0.0)
    shares = _shares([portion.weight or 0.0 for portion in portions])
    left = _left_for_weights(mixture, available, fixed, shares) if any(shares) else 0.0
    amounts = [known + left * share for known, share in zip(fixed, shares, strict=True)]
    for portion, has, amount in zip(portions, available, amounts, strict=True):
        most = portion.max_epochs * has
        if portion.epochs is None and amount > most * (1 + _ROUNDING):
            times = portion.max_epochs
            epochs = "1 epoch has" if times == 1 else f"{times:g} epochs have"
            raise UsageError(
                f"{portion.label}: too small: {amount:,.0f} {mixture.counted} asked, "
                f"{epochs} {most:,.0f}",
                f"ask for less, or let it be taken more often: max_epochs = {amount / has:.2f}",
            )
    return amounts


def _left_for_weights(
    mixture: Mixture, available: Sequence[int], fixed: Sequence[float], shares: Sequence[float]
) -> float:
    """Return the amount that all with a weight share. `fixed`: amounts of the others."""
    if mixture.tokens is None:  # as much as possible without exceeding max_epochs of any of them
        return min(
            portion.max_epochs * has / share
            for portion, has, share in zip(mixture.portions, available, shares, strict=True)
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
    """Return shares of the whole by weight; all 0 if the weights are."""
    total = sum(weights) or 1.0
    if math.isinf(total):  # near the largest float
        return _shares([weight / max(weights) for weight in weights])
    return [weight / total for weight in weights]


def _shares_reached(stats: Sequence[SourceStats], edges: Sequence[int]) -> list[ReachedShare]:
    """Compare the share of every source and tier with the share asked. `edges`: amount of the last
    document that was taken of each.
    """
    whole = sum(portion.asked for portion in stats)
    got = max(sum(portion.taken for portion in stats), 1)
    reached = list[ReachedShare]()
    for portion, document in zip(stats, edges, strict=True):
        asked, taken = portion.asked, portion.taken
        off = abs(taken / got - asked / whole) if whole else 0.0
        is_cause = abs(taken - asked) >= off * whole / 2  # else other sources are
        last = document if is_cause else 0
        reached.append(ReachedShare(portion.name, asked, taken, off, last, portion.tier))
    return reached


def missed_share(mixture: Mixture, share: ReachedShare) -> str:
    """Return a message about a share that is off: asked, taken, and why."""
    amounts = f"{share.taken:,} of {share.asked:,.0f} {mixture.counted} asked"
    reason = "documents of other sources are not split"
    if share.document:
        reason = f"documents are not split, and its last one has {share.document:,}"
    labels = {(portion.name, portion.tier): portion.label for portion in mixture.portions}
    label = labels[share.source, share.tier]
    return f"{label}: takes {amounts}: {reason}; its share is {share.off:.2%} off"


def _repeated(hashes: UInt64) -> Bool:
    """Mark hashes, uint64[n, 2], that equal an earlier one."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    ordered, marked = hashes[order], np.zeros(len(hashes), bool)
    marked[order[1:]] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return marked


def _among(hashes: UInt64, contents: UInt64) -> Bool:
    """Mark hashes, uint64[n, 2], that equal one of the contents uint64[m, 2]."""
    values, known = (
        pa.Array.from_buffers(pa.binary(16), len(some), [None, pa.py_buffer(some)])
        for some in (hashes, contents)
    )
    marked: Bool = pc.is_in(values, value_set=known).to_numpy(zero_copy_only=False)
    return marked
