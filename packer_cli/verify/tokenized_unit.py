"""The documents of one unit of a tokenized directory, compared with documents encoded again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from packer_cli.records import Int64, TokenBatch, UInt8
from packer_cli.result.layout import DOCUMENTS, kind_of, unnamed_shard
from packer_cli.result.shards import Shard
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.result.tokenized_tokens import Tokens


class TokenizedUnit:
    """A `documents.StoredUnit`. `tokens`: of this directory alone."""

    by_place = True

    def __init__(self, tokenized: TokenizedDirectory, tokens: Tokens, shards: list[Shard]) -> None:
        self._tokens = tokens
        names = {shard.file for shard in shards if kind_of(shard.file) == DOCUMENTS}
        files, positions, numbers = ([np.empty(0, np.int64)] for _ in range(3))
        for first, shard in zip(tokenized.firsts.tolist(), tokenized.shards, strict=False):
            if shard.file not in names:
                continue
            numbers.append(np.arange(first, first + shard.rows))
            for batch in tokenized.batches(shard):
                files.append(batch.column("file").to_numpy().astype(np.int64))
                positions.append(batch.column("position").to_numpy())
        file, position, number = map(np.concatenate, (files, positions, numbers))
        order = np.lexsort([position, file])
        self._file, self._position, self._number = file[order], position[order], number[order]
        self._lengths = tokenized.lengths
        self._chosen = tokenized.chosen if tokenized.has_pairs else np.empty(0, np.int32)

    def positions(self, file: int) -> Int64:
        """The positions of the documents of a file."""
        positions: Int64 = self._position[self._of(file)]
        return positions

    def positions_of(self, file: int, numbers: Int64) -> Int64:
        """The positions of those documents of a file that have these numbers, which ascend."""
        here = self._of(file)
        chosen: Int64 = self._position[here][np.isin(self._number[here], numbers)]
        return chosen

    def _of(self, file: int) -> slice:
        return slice(*np.searchsorted(self._file, [file, file + 1]).tolist())

    def differences(self, batch: TokenBatch) -> Iterator[tuple[int, str]]:
        """(document, how it differs) of a batch, whose documents are all of one file."""
        if not len(batch.position):
            return
        here = self._of(int(batch.file[0]))
        known, numbers = self._position[here], self._number[here]
        at = np.searchsorted(known, batch.position)
        there = at < len(known)
        there[there] = known[at[there]] == batch.position[there]
        lengths, stored = np.diff(batch.offsets), np.zeros(len(at), np.int64)
        stored[there] = self._lengths[numbers[at[there]]]
        for document in np.flatnonzero(lengths != stored).tolist():
            held = f"{stored[document]} in the result" if there[document] else "and is not there"
            yield document, f"has {lengths[document]} tokens when encoded again, {held}"
        for document in np.flatnonzero((lengths == stored) & there).tolist():
            if text := self._difference(batch, document, int(numbers[at[document]])):
                yield document, text

    def _difference(self, batch: TokenBatch, document: int, number: int) -> str:
        begin, end = batch.offsets[document : document + 2].tolist()
        first = np.zeros(1, np.int32)
        piece = first, np.array([number]), first, np.array([end - begin], np.int32)
        ids, expected = self._tokens.gather(*piece), batch.ids[begin:end]
        if not np.array_equal(ids, expected):
            at = int(np.argmax(ids != expected))
            return f"its token {at} is {ids[at]}, {expected[at]} expected when encoded again"
        there = _flags(self._tokens.gather_trained(*piece), end - begin)
        wanted = _flags(None if batch.trained is None else batch.trained[begin:end], end - begin)
        if not np.array_equal(there, wanted):
            at = int(np.argmax(there != wanted))
            what = "" if there[at] else "not "
            return f"its token {at} is {what}trained on, unlike when it is encoded again"
        chosen = None if batch.chosen is None else int(batch.chosen[document])
        if chosen is not None and chosen != self._chosen[number]:
            return f"its chosen side has {self._chosen[number]} tokens, {chosen} when encoded again"
        return ""


def _flags(trained: UInt8 | None, count: int) -> UInt8:
    """What is trained on; nothing predicts the first token."""
    flags = np.ones(count, np.uint8) if trained is None else trained.copy()
    flags[:1] = 0
    return flags


class CountingSink:
    """Takes the documents of a unit that is tokenized again; they are compared elsewhere."""

    def __init__(self, unit: int) -> None:
        self._shard = Shard.begun(unnamed_shard(DOCUMENTS, unit, 0), unit)

    def write(self, batch: TokenBatch) -> None:
        begins = batch.offsets[:-1][np.diff(batch.offsets) > 0]
        if batch.trained is None:
            self._shard.trained_tokens += len(batch.ids) - len(begins)
        else:
            trained = batch.trained.astype(bool)
            self._shard.trained_tokens += int(trained.sum()) - int(trained[begins].sum())

    def close(self) -> list[Shard]:
        return [self._shard]

    def abandon(self) -> None:
        pass
