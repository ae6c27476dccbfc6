"""Segments back to documents, against the same by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from support import jsonl, pack

from packer_cli import open_packed
from packer_cli.result.rules import documents_of, segments_in, sources_of

# (file, position, start, length) of four documents, the pieces of which lie anywhere
SEGMENTS = np.array(
    [(1, 0, 4, 2), (0, 70, 0, 4), (1, 0, 0, 4), (0, 70, 4, 4), (0, 9, 0, 1), (0, 70, 8, 1),
     (1, 70, 0, 3)]
).T  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_documents_of_a_unit(seed: int) -> None:
    shuffled = SEGMENTS[:, np.random.default_rng(seed).permutation(SEGMENTS.shape[1])]
    documents = documents_of(shuffled)
    assert documents.first.tolist() == [0, 1, 4, 6, 7]
    assert documents.tokens.tolist() == [1, 9, 6, 3]
    assert documents.segments.T.tolist() == sorted(SEGMENTS.T.tolist())
    assert np.array_equal(shuffled[:, documents.order], documents.segments)
    for whole in (True, False):
        assert np.array_equal(documents.expected_starts(whole=whole), documents.segments[2])


def test_pieces_that_do_not_join_up() -> None:
    without = documents_of(np.delete(SEGMENTS, 3, axis=1))  # tokens 4 to 8 of the second document
    wrong = without.segments[2] != without.expected_starts(whole=False)
    assert np.flatnonzero(wrong).tolist() == [2]
    assert without.expected_starts(whole=True)[2] == 4
    cut = documents_of(np.delete(SEGMENTS, 2, axis=1))  # the first tokens of another
    assert (cut.segments[2] == cut.expected_starts(whole=False)).all()
    assert np.flatnonzero(cut.segments[2] != cut.expected_starts(whole=True)).tolist() == [4]


def test_a_unit_that_has_lost_all() -> None:
    documents = documents_of(np.empty((4, 0), np.int64))
    assert (documents.first.tolist(), documents.tokens.tolist()) == ([0], [])


@pytest.mark.parametrize("options", [[], ["--segment-multiple", 4]])
def test_segments_of_a_batch_and_of_a_slice_of_it(folder: Path, options: list[object]) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*("x" * n for n in range(1, 40))))
    pack("a.jsonl", "-l", 16, *options)
    packed = open_packed("out")
    [batch] = packed.batches(packed.facts.shards[0])
    named = [tuple(one.values()) for row in batch["segments"].to_pylist() for one in row]
    lengths = [b - a for row in batch["cu_seqlens"].to_pylist() for a, b in itertools.pairwise(row)]
    segments = segments_in(batch)
    assert [tuple(one) for one in segments[:3].T.tolist()] == named
    assert segments[3].tolist() == lengths
    parts = [segments_in(batch.slice(row, 3)) for row in range(0, batch.num_rows, 3)]
    assert np.array_equal(np.concatenate(parts, axis=1), segments)


def test_rows_that_do_not_say_where_from(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("a", "bc"))
    pack("a.jsonl", "-l", 16, "--columns", "input_ids,cu_seqlens")
    packed = open_packed("out")
    [batch] = packed.batches(packed.facts.shards[0])
    assert sources_of(batch).tolist() == [[0, 0]] * 3
    assert sorted(segments_in(batch)[3].tolist()) == [2, 3]
