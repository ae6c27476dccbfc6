"""Where segments came from, many at a time, and where documents of tokenized directories are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import jsonl, packer

from packer_cli import open_packed
from packer_cli.errors import DataError
from packer_cli.result.origins import Origin, Origins
from packer_cli.result.rules import sources_of
from packer_cli.result.tokenized import TokenizedDirectory, open_tokenized


@pytest.fixture
def tokenized(folder: Path) -> TokenizedDirectory:
    """40 documents of two files, in several shards."""
    for name in "ab":
        (folder / f"{name}.jsonl").write_bytes(jsonl(*(f"{name}{n:02}" for n in range(20))))
    done = packer(
        "tokenize", "a.jsonl", "b.jsonl", "-t", "bytes", "-q", "-o", "tokens", "--unit-bytes", 90
    )
    assert done.exit_code == 0, done.stderr
    directory = open_tokenized("tokens")
    assert len(directory.shards) > 5
    return directory


def test_places_of_documents_in_any_order(tokenized: TokenizedDirectory) -> None:
    documents = np.random.default_rng(0).integers(0, 40, 100)
    file, position = tokenized.places(documents)
    assert file.tolist() == (documents // 20).tolist()
    assert position.tolist() == (documents % 20 * 16).tolist()
    assert tokenized.place(21) == (1, 16)
    assert tokenized.places(documents[:0]).shape == (2, 0)
    for number in (0, 1):
        numbers, positions = tokenized.documents_of(number)
        assert numbers.tolist() == list(range(20 * number, 20 * number + 20))
        assert positions.tolist() == list(range(0, 320, 16))
    assert tokenized.documents_of(2).shape == (2, 0)


@pytest.mark.parametrize("absent", [-1, 40, 2**62])
def test_documents_that_are_not_there(tokenized: TokenizedDirectory, absent: int) -> None:
    with pytest.raises(
        DataError, match=f"tokens: has no document {absent}, expected numbers below"
    ):
        tokenized.places(np.array([3, absent]))


def test_segments_of_several_inputs_keep_their_order(tokenized: TokenizedDirectory) -> None:
    done = packer("pack", "tokens", "-l", 8, "-q", "-o", "out")
    assert done.exit_code == 0, done.stderr
    packed = open_packed("out")
    (shard,) = packed.facts.shards
    segments = np.concatenate([sources_of(one) for one in packed.stored(shard)], axis=1)
    found = Origins(packed.facts).of(segments)
    for origin, document in zip(found, segments[1].tolist(), strict=True):
        path, place = f"{'ab'[document // 20]}.jsonl", document % 20 * 16
        assert origin == Origin(path, place, "byte", 0, ("tokens", document))
    assert str(found[0]).endswith(f" (document {segments[1][0]} of tokens)")
