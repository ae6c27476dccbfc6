"""Opening results of `packer pack`: packed directories and views; and several of them as one, whose
rows follow one another: whether they go together, and what they are then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import numpy as np

from packer_cli import storage
from packer_cli.errors import DataError, UsageError
from packer_cli.options.options import PAIR
from packer_cli.records import Int64
from packer_cli.result.layout import MANIFEST, digest
from packer_cli.result.manifest import Manifest, TrainingStage, load
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory, squared_lengths
from packer_cli.result.tokenized import open_tokenized
from packer_cli.result.view import View

WITH_THE_SAME = "pack them with the same options"
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def open_packed(path: str | os.PathLike[str], tokens: Paths | None = None) -> PackedDirectory:
    """Open a directory written by `packer pack`, also a view.

    `tokens`: of a view, where its tokenized directories are, if they are no longer where they were
    packed from; one or several, in any order.

    Raises DataError when it is unfinished, of another format version, or when a shard is
    missing or has another size than the manifest says, and for a view whose tokenized directories
    are gone or changed; UsageError for `tokens` of what is no view.
    """
    directory = storage.local(path, "rows are only read from local directories")
    while True:
        packed = opened(directory, load(directory), tokens)
        try:
            for shard in packed.facts.shards:
                packed.check_size(shard)
        except DataError:
            if packed.replaced() is None:
                raise
            continue  # another, complete result is there by now
        return packed


def opened(path: Path, facts: Manifest, tokens: Paths | None = None) -> PackedDirectory:
    """A result whose manifest was read already, without a look at its shards."""
    given = [tokens] if isinstance(tokens, str | os.PathLike) else list(tokens or ())
    if facts.config.view:
        return View(path, facts, given)
    if given:
        raise UsageError(f"--tokens: {path} is no view: it has its tokens itself", "leave it out")
    return PackedDirectory(path, facts)


class Joined:
    """Several results as one, whose rows follow one another.

    firsts  int64[results + 1], the first row of each, and how many rows there are

    Raises DataError, naming both, for results whose rows do not go into one batch.
    """

    def __init__(self, parts: Sequence[PackedDirectory]) -> None:
        self.parts = list(parts)
        self.firsts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        first = parts[0]
        for other in parts[1:]:
            known = _properties(other)
            for name, value in _properties(first).items():
                if value != known.get(name, value):
                    raise DataError(
                        f"{first.path} and {other.path} do not go together: {name} is {value} in "
                        f"the first and {known[name]} in the second",
                        WITH_THE_SAME,
                    )

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def places(self, rows: Int64) -> tuple[Int64, Int64]:
        """(number in its result, which result) of rows."""
        which = np.searchsorted(self.firsts, rows, side="right") - 1
        return rows - self.firsts[which], which

    @property
    def fingerprint(self) -> str:
        """Digest that rows in the same order share, wherever they lie."""
        prints = [_fingerprint_of(part.facts) for part in self.parts]
        return prints[0] if len(prints) == 1 else sha256("".join(prints).encode()).hexdigest()

    @property
    def squared_lengths(self) -> Int64:
        """int64[rows], the sum of squared segment lengths of every row."""
        sums = [squared_lengths(part) for part in self.parts]
        return sums[0] if len(sums) == 1 else np.concatenate(sums)  # one is mapped

    @cached_property
    def stages(self) -> tuple[TrainingStage, ...]:
        """The recipes' stages, which hold all rows; none where no result has any, and else one for
        a result without. Raises DataError for stages that do not follow one another.
        """
        joined: list[TrainingStage] = []
        for part, first in zip(self.parts, self.firsts.tolist(), strict=False):
            its = part.facts.stages or [TrainingStage(None, 0, len(part))]
            edges = [*(one.first_row for one in its), len(part)]
            if edges != [0, *accumulate(one.rows for one in its)]:
                raise DataError(
                    f"{part.place_of(MANIFEST)}: its stages are not its {len(part)} rows, one "
                    "after another",
                    PACK_AGAIN,
                )
            joined += [TrainingStage(one.name, first + one.first_row, one.rows) for one in its]
        return tuple(joined) if any(part.facts.stages for part in self.parts) else ()


def _properties(packed: PackedDirectory) -> dict[str, object]:
    """What rows of one batch must have in common, in words."""
    tokenizer = packed.facts.tokenizer
    return {
        "max_length": packed.max_length,
        **_form_of_answers(packed.facts),
        "the label shift": packed.label_shift,
        "the segment multiple": packed.segment_multiple,
        "the tokenizer": f"{tokenizer.source}, sha256 {tokenizer.sha256}" if tokenizer else "none",
    }


def _form_of_answers(facts: Manifest) -> dict[str, object]:
    """Form of records of preference: pairs, each of two segments, or answers with a label."""
    if PAIR not in facts.config.columns:
        return {}
    labels = facts.segments == facts.documents
    return {"what the records are": "answers with a label" if labels else "pairs"}


def _fingerprint_of(facts: Manifest) -> str:
    """Digest that rows in the same order share, wherever they lie."""
    digests = "".join(shard.sha256 for shard in facts.shards)
    if facts.config.view:  # whose shards hold no tokens
        digests += "".join(one.sha256 for one in facts.inputs_now.values())
    return sha256(digests.encode()).hexdigest()


def tokens_of_each(
    paths: Sequence[str | os.PathLike[str]], tokens: Paths | None
) -> list[Paths | None]:
    """For each result, those of the tokenized directories that it is a view of; of a single result
    all of them.

    Raises UsageError for a directory that none of several is a view of.
    """
    given = [tokens] if isinstance(tokens, str | os.PathLike) else list(tokens or ())
    if not given:
        return [None for _ in paths]
    if len(paths) == 1:
        return [given]
    digests = {os.fspath(one): digest(open_tokenized(one).path / MANIFEST)[1] for one in given}
    wanted = []
    for path in paths:
        facts = load(path)
        its = {one.sha256 for one in facts.inputs_now.values()} if facts.config.view else set()
        wanted.append([name for name, sha256 in digests.items() if sha256 in its])
    for name in digests:
        if not any(name in its for its in wanted):
            raise UsageError(
                f"tokens: none of the results is a view of {name}",
                "give the tokenized directories that the views were packed from",
            )
    return [its or None for its in wanted]
