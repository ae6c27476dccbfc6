"""Any stretch of a mixture's rows has the sources in their shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import heavy, succeeds
from tokenizing import tokenize

from packer_cli import open_packed
from packer_cli.result.columns import segments_of
from packer_cli.result.rules import segments_in

pytestmark = pytest.mark.usefixtures("folder")

Float = npt.NDArray[np.float64]

# source -> share, mean length
SOURCES = {"short": (0.5, 30), "middle": (0.3, 250), "long": (0.2, 1500)}
SPREAD = 0.5  # of log-normal lengths
STRETCHES = 100


def tokenized_sources(tokens: int) -> None:
    """A tokenized directory for each source, of about so many tokens, more than its share."""
    for number, (name, (share, mean)) in enumerate(SOURCES.items()):
        random = np.random.default_rng(number)
        count = int(1.2 * share * tokens / mean)
        lengths = random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
        edges = np.concatenate([[0], np.cumsum(np.clip(lengths, 1, 1 << 16).astype(np.int32))])
        ids = random.integers(0, 256, edges[-1], dtype=np.int32)
        documents = pa.ListArray.from_arrays(edges.astype(np.int32), ids)
        pq.write_table(pa.table({"input_ids": documents}), f"{name}.parquet")
        tokenize(f"{name}.parquet", out=name)


def recipe(tokens: int, max_length: int) -> str:
    lines = [f"tokens = {tokens}", f"max_length = {max_length}", "view = true"]
    for name, (share, _) in SOURCES.items():
        lines += ["[[source]]", f'name = "{name}"', f'inputs = ["{name}"]', f"weight = {share}"]
    return "\n".join(lines)


def tokens_of_rows(directory: str) -> tuple[Float, Float]:
    """(tokens[rows, sources], and for each source the sum of its documents' squared tokens)."""
    packed, rows, segments = open_packed(directory), [], []
    sources = len(SOURCES)
    for shard in packed.facts.shards:
        for batch in packed.stored(shard):
            found = segments_in(batch)
            row = np.repeat(np.arange(len(batch)), np.diff(segments_of(batch)[2]))
            places = row * sources + found[0]
            sums = np.bincount(places, found[3], len(batch) * sources)
            rows.append(sums.reshape(len(batch), sources))
            segments.append(found)
    source, document, _, length = np.concatenate(segments, axis=1)
    every, which = np.unique(source << 40 | document, return_inverse=True)
    squares = np.bincount(which, length) ** 2
    return np.concatenate(rows), np.bincount(every >> 40, squares, sources)


@pytest.mark.parametrize(("max_length", "tokens"), [(2048, 5_000_000), heavy(1024, 10_000_000)])
def test_stretches_have_the_sources_in_their_shares(max_length: int, tokens: int) -> None:
    """Within 3 standard errors of what chance would give, in each hundredth of the rows.

    Were a stretch's documents drawn at random, a source's share p of its tokens would be a ratio
    of two sums over them, of a document's l tokens if it is of the source, and of l. The variance
    of such a ratio is n E[(z - p)² l²] / T² with n documents and T tokens in the stretch, and z of
    a document 1 if it is of the source and else 0: (1 - p)² times the squares of the source's
    documents, and p² times those of all others, a hundredth of both.
    """
    tokenized_sources(tokens)
    Path("mix.toml").write_text(recipe(tokens, max_length))
    succeeds("pack", "mix.toml", "-q", "-o", "out")
    rows, squares = tokens_of_rows("out")
    share = rows.sum(axis=0) / rows.sum()
    assert share == pytest.approx([share for share, _ in SOURCES.values()], abs=0.001)
    variance = (1 - share) ** 2 * squares + share**2 * (squares.sum() - squares)
    error = np.sqrt(variance / STRETCHES) / (rows.sum() / STRETCHES)
    edges = np.linspace(0, len(rows), STRETCHES + 1).astype(int)
    stretches = np.add.reduceat(rows, edges[:-1])
    found = stretches / stretches.sum(axis=1, keepdims=True)
    away = np.abs(found - share) / error
    assert away.max() < 3, f"stretch {int(away.argmax()) // len(SOURCES)}: {away.max():.1f}"
