"""Rows of pairs, laid by hand: what `--shape preference` writes, for tests of what reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

IGNORED, PAD = -100, 0
Tokens = list[int]


class Pair(NamedTuple):
    """A record with two answers, or, where `rejected` is None, one with a label."""

    prompt: Tokens
    chosen: Tokens
    rejected: Tokens | None = None
    label: bool = True

    @property
    def sides(self) -> list[tuple[Tokens, int]]:
        """(answer, side)."""
        if self.rejected is None:
            return [(self.chosen, int(self.label))]
        return [(self.chosen, 1), (self.rejected, 0)]


def random_pairs(
    count: int, vocabulary: int, seed: int = 0, *, labelled: bool = False
) -> list[Pair]:
    """Pairs of uneven lengths, some answers one token long; if `labelled`, records with a label."""
    random = np.random.default_rng(seed)

    def tokens(most: int) -> Tokens:
        return random.integers(1, vocabulary, random.integers(1, most)).tolist()

    if labelled:
        return [
            Pair(tokens(9), tokens(12), None, bool(random.random() < 0.5)) for _ in range(count)
        ]
    return [Pair(tokens(9), tokens(12), tokens(12)) for _ in range(count)]


def rows_of(
    pairs: Sequence[Pair], length: int, multiple: int = 1, shift: str = "none"
) -> list[Any]:
    """Rows of `length` with as many pairs each as fit, as `PackedDataset` gives them."""
    rows: list[list[Pair]] = [[]]
    room = length
    for pair in pairs:
        size = sum(_up(len(pair.prompt) + len(answer), multiple) for answer, _ in pair.sides)
        assert size <= length
        if size > room:
            rows.append([])
            room = length
        room -= size
        rows[-1].append(pair)
    return [_row(pairs, length, multiple, shift) for pairs in rows]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _row(pairs: Sequence[Pair], length: int, multiple: int, shift: str) -> dict[str, Any]:
    ids, labels = np.full(length, PAD), np.full(length, IGNORED)
    real, padded, numbers, sides = [0], [0], list[int](), list[int]()
    for number, pair in enumerate(pairs):
        for answer, side in pair.sides:
            begin, size = padded[-1], len(pair.prompt) + len(answer)
            ids[begin : begin + size] = pair.prompt + answer
            labels[begin + len(pair.prompt) : begin + size] = answer
            real.append(real[-1] + size)
            padded.append(begin + _up(size, multiple))
            numbers.append(number)
            sides.append(side)
    name = "labels"
    if shift == "pre":
        name, labels = "shift_labels", np.append(labels[1:], IGNORED)
    row = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        name: torch.tensor(labels, dtype=torch.int32),
        "cu_seqlens": torch.tensor(real, dtype=torch.int32),
        "pair": torch.tensor(numbers, dtype=torch.int32),
        "side": torch.tensor(sides, dtype=torch.int8),
    }
    return row | (
        {"cu_seqlens_padded": torch.tensor(padded, dtype=torch.int32)} if multiple > 1 else {}
    )
