"""The table of documents: its four operations, with columns of tokens and of documents."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer_cli.packing.fitting import fit
from packer_cli.records import FILE, TRAINED, Documents, offsets_of


class Plain(NamedTuple):
    """A document as Python has it: ids, trained flags, two values a token, and one of its own."""

    ids: list[int]
    trained: list[int]
    pairs: list[list[int]]
    file: int


@st.composite
def plain_documents(draw: st.DrawFn) -> list[Plain]:
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    tokens = iter(range(1000))
    return [
        Plain(
            ids := [next(tokens) for _ in range(size)],
            draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)),
            [[token, -token] for token in ids],
            number,
        )
        for number, size in enumerate(sizes)
    ]


def table(documents: list[Plain], *, has_flags: bool = True) -> Documents:
    def flat(name: str, *shape: int) -> Any:
        values = [value for one in documents for value in getattr(one, name)]
        return np.array(values, np.int64).reshape(-1, *shape)

    of_tokens = {TRAINED: flat("trained").astype(np.uint8)} if has_flags else {}
    return Documents(
        flat("ids").astype(np.uint32),
        offsets_of([len(one.ids) for one in documents]),
        of_tokens | {"pairs": flat("pairs", 2)},
        {FILE: np.array([one.file for one in documents], np.int32)},
    )


def plain(documents: Documents) -> list[Plain]:
    edges, pairs = documents.offsets.tolist(), documents.of_tokens["pairs"]
    flags = np.ones(edges[-1], int) if documents.trained is None else documents.trained
    return [
        Plain(documents.token_ids[a:b].tolist(), flags[a:b].tolist(), pairs[a:b].tolist(), file)
        for a, b, file in zip(edges, edges[1:], documents.file.tolist(), strict=False)
    ]


@given(plain_documents(), st.data())
def test_documents_are_taken_joined_and_repeated(
    documents: list[Plain], data: st.DataObject
) -> None:
    whole = table(documents)
    order = data.draw(st.lists(st.integers(0, len(documents) - 1), max_size=9))
    assert plain(whole.take(np.array(order, np.int64))) == [documents[i] for i in order]
    assert plain(whole.repeat(3)) == documents * 3
    # who does not say what is trained on trains on everything
    every = [one._replace(trained=[1] * len(one.ids)) for one in documents]
    joined = Documents.concat([whole, table(documents, has_flags=False)])
    assert plain(joined) == documents + every
    assert joined.token_values(FILE).tolist() == [
        one.file for one in documents * 2 for _ in one.ids
    ]


@given(plain_documents(), st.integers(1, 6), st.sampled_from(["split", "truncate", "drop"]))
def test_documents_are_cut(documents: list[Plain], length: int, overlong: str) -> None:
    whole = table(documents)
    pieces = fit(whole.offsets, length, overlong)
    cut = whole.cut(pieces)
    parts = zip(
        pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True
    )
    assert plain(cut) == [
        Plain(*(values[start : start + size] for values in documents[i][:3]), documents[i].file)
        for i, start, size in parts
    ]
    assert cut.start.tolist() == pieces.start.tolist()
