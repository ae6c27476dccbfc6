"""One work unit: every token that was encoded goes into a row or is counted as lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import DataError, Interrupted
from packer_cli.progress import Progress
from packer_cli.records import BadRecord, InputFile, LookedAt, Slice, Stretch, TokenBatch, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.shards import Shard
from packer_cli.run.rows import pack_unit
from packer_cli.run.unit import Job, UnitResult
from packer_cli.tokenization.encoding import Encoded

LENGTH = 16
FILES = [InputFile(i, "-", "jsonl", None, 0, 0) for i in range(2)]  # "-": never looked at again
UNIT = WorkUnit(3, tuple(Slice(i, 0, None, 1) for i in range(2)))
# file -> batch -> lengths of documents
CASES = st.lists(
    st.lists(st.lists(st.integers(0, 3 * LENGTH), max_size=8), max_size=4), min_size=2, max_size=2
)


class Rows:
    """Takes the rows of a unit and keeps them as lists of tokens."""

    rows_at_once = 1

    def __init__(self) -> None:
        self.rows: list[list[list[int]]] = []
        self.trained, self.closed, self.abandoned = 0, False, False

    def write(self, stock: Any, order: Any, row_offsets: Any) -> None:
        for begin, end in pairwise(row_offsets.tolist()):
            row = []
            for piece in order[begin:end].tolist():
                at = slice(stock.begin[piece], stock.begin[piece] + stock.length[piece])
                row.append(stock.ids[at].tolist())
                self.trained += len(row[-1]) if stock.trained is None else stock.trained[at].sum()
            self.rows.append(row)

    def close(self) -> list[Shard]:
        self.closed = True
        if not self.rows:
            return []
        return [Shard("x", UNIT.index, len(self.rows), 1, 1, int(self.trained), 1, "")]

    def abandon(self) -> None:
        self.abandoned = True


def encode(records: Any, file: InputFile) -> Encoded:
    """A batch whose tokens say which document they are of; the odd ones are trained on."""
    lengths = records.lengths
    ids = np.repeat(np.arange(records.first, records.first + len(lengths)), lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    trained = (ids % 2).astype(np.uint8) if records.supervised else None
    batch = TokenBatch(
        ids.astype(np.uint32), offsets, trained, np.full(len(lengths), file.index, np.int32),
        np.arange(len(lengths), dtype=np.int64),
    )  # fmt: skip
    return Encoded(batch, records.bad, Counts(trained_turns=1))


def job_of(
    case: list[list[list[int]]], config: PackConfig, folder: Path, **how: Any
) -> tuple[Job, list[int]]:
    """With the lengths of all documents, by number."""
    lengths = [length for file in case for batch in file for length in batch]
    numbers = iter(range(len(lengths)))

    def read(file: InputFile, part: Slice) -> Iterator[Any]:
        for number, batch in enumerate(case[part.file]):
            first = next(numbers, 0)
            for _ in batch[1:]:
                next(numbers)
            yield SimpleNamespace(
                lengths=np.array(batch, np.int64),
                first=first, supervised=how.get("supervised", False), bad=how.get("bad", []),
                consumed=1, stretches=[Stretch(number, 1, "")], looked_at=LookedAt(),
            )  # fmt: skip

    shape = Shape("tokens")
    progress = Progress(0, show=False)
    return Job(FILES, config, shape, None, None, read, encode, folder, progress), lengths


def row_config(job: Job) -> PackConfig:
    assert isinstance(job.config, PackConfig)
    return job.config


def without_empty_batches(case: list[list[list[int]]]) -> list[list[list[int]]]:
    return [[batch for batch in file if batch] for file in case]


def packed(case: Any, config: PackConfig, folder: Path, **how: Any) -> tuple[UnitResult, Rows, Any]:
    job, lengths = job_of(without_empty_batches(case), config, folder, **how)
    rows = Rows()
    result = pack_unit(UNIT, job, row_config(job), rows)
    assert rows.closed
    assert rows.abandoned
    return result, rows, lengths


def tokens_by_document(rows: Rows) -> dict[int, int]:
    tokens = dict[int, int]()
    for row in rows.rows:
        for segment in row:
            assert len(set(segment)) == 1
            tokens[segment[0]] = tokens.get(segment[0], 0) + len(segment)
    return tokens


# how a length is cut, by --overlong
KEPT = {
    "split": lambda length: length,
    "truncate": lambda length: min(length, LENGTH),
    "drop": lambda length: length if length <= LENGTH else 0,
}


@pytest.mark.parametrize("strategy", ["best-fit", "next-fit", "harmonic"])
@pytest.mark.parametrize("overlong", KEPT)
@given(case=CASES, window=st.sampled_from([1, 40, 1 << 20]))
def test_every_token_is_packed_or_counted_as_lost(
    case: list[list[list[int]]], window: int, overlong: str, strategy: str
) -> None:
    config = PackConfig(LENGTH, strategy, overlong=overlong, window_tokens=window)
    result, rows, lengths = packed(case, config, Path())
    kept = [KEPT[overlong](length) for length in lengths]
    assert tokens_by_document(rows) == {i: size for i, size in enumerate(kept) if size}
    counts = result.counts
    assert counts.conserved()
    assert counts.encoded_tokens == sum(lengths)
    assert (counts.tokens, counts.trained_tokens) == (sum(kept), sum(kept))
    assert counts.rows == len(rows.rows)
    assert counts.segments == sum(map(len, rows.rows))
    assert counts.documents == sum(size > 0 for size in kept)
    assert counts.empty_documents == lengths.count(0)
    assert counts.truncated_tokens + counts.dropped_tokens == sum(lengths) - sum(kept)
    assert counts.row_fill.sum() == len(rows.rows)
    assert (counts.piece_length * np.arange(len(counts.piece_length))).sum() == sum(kept)
    assert sum(one.tokens for one in counts.files.values()) == sum(kept)
    assert sum(one.documents for one in counts.files.values()) == counts.documents
    assert sum(one.empty_documents for one in counts.files.values()) == counts.empty_documents


@given(case=CASES, window=st.sampled_from([1, 40]))
def test_wrap_fills_every_row_but_the_last(case: list[list[list[int]]], window: int) -> None:
    result, rows, lengths = packed(case, PackConfig(LENGTH, "wrap", window_tokens=window), Path())
    stream = [token for row in rows.rows for segment in row for token in segment]
    assert stream == [i for i, length in enumerate(lengths) for _ in range(length)]
    assert all(sum(map(len, row)) == LENGTH for row in rows.rows[:-1])
    assert result.counts.conserved()


@given(case=CASES)
def test_documents_without_a_trained_token_are_left_out(case: list[list[list[int]]]) -> None:
    for keep in (False, True):
        config = PackConfig(LENGTH, overlong="drop", keep_untrained=keep)
        result, rows, lengths = packed(case, config, Path(), supervised=True)
        fits = {i: size for i, size in enumerate(lengths) if 0 < size <= LENGTH}
        # nothing predicts the first token of a document, so one alone is not trained on
        expected = {i: n for i, n in fits.items() if keep or (i % 2 and n > 1)}
        assert tokens_by_document(rows) == expected
        assert result.counts.trained_tokens == sum(n for i, n in expected.items() if i % 2)
        assert result.counts.untrained_documents == (0 if keep else len(fits) - len(expected))
        assert result.counts.conserved()


@given(case=CASES)
def test_the_same_unit_gives_the_same_rows(case: list[list[list[int]]]) -> None:
    first, second = (packed(case, PackConfig(LENGTH, window_tokens=40), Path()) for _ in range(2))
    assert first[1].rows == second[1].rows
    assert first[0].counts.as_json() == second[0].counts.as_json()


def test_what_a_unit_has_read(tmp_path: Path) -> None:
    result, _, _ = packed([[[3], [4]], [[5]]], PackConfig(LENGTH), tmp_path)
    stretches = {0: [Stretch(0, 1, ""), Stretch(1, 1, "")], 1: [Stretch(0, 1, "")]}
    assert result.stretches == stretches
    assert result.counts.trained_turns == 3  # what the encoder counts is added up
    assert (result.rejected, result.unit) == (None, UNIT)


def test_bad_records_are_lines_of_the_units_own_file(tmp_path: Path) -> None:
    bad = [BadRecord(7, "no text"), BadRecord(9, "no JSON")]
    config = PackConfig(LENGTH, on_error="skip")
    result, _, _ = packed([[[3]], [[5]]], config, tmp_path, bad=bad)
    assert result.rejected == tmp_path / "rejected-00003.jsonl"
    lines = [json.loads(line) for line in result.rejected.read_text().splitlines()]
    expected = [{"file": "-", "position": one.position, "reason": one.reason} for one in bad]
    assert lines == expected * 2
    assert result.counts.rejected_records == 4
    assert [one.rejected_records for one in result.counts.files.values()] == [2, 2]


def test_the_first_bad_record_ends_the_run(tmp_path: Path) -> None:
    job, _ = job_of([[[3]], [[5]]], PackConfig(LENGTH), tmp_path, bad=[BadRecord(7, "no text")])
    rows = Rows()
    with pytest.raises(DataError, match=r"-, .*7.*: no text"):
        pack_unit(UNIT, job, row_config(job), rows)
    assert (rows.closed, rows.abandoned) == (False, True)
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_is_too_long_is_named(tmp_path: Path) -> None:
    config = PackConfig(LENGTH, overlong="error")
    job, _ = job_of([[[3, 17]], []], config, tmp_path)
    with pytest.raises(DataError, match="the document has 17 tokens, --max-length is 16"):
        pack_unit(UNIT, job, row_config(job), Rows())


def test_a_unit_that_is_told_to_stop(tmp_path: Path) -> None:
    job, _ = job_of([[[3]], [[5]]], PackConfig(LENGTH), tmp_path)
    job.stop.set()
    rows = Rows()
    with pytest.raises(Interrupted):
        pack_unit(UNIT, job, row_config(job), rows)
    assert (rows.rows, rows.closed, rows.abandoned) == ([], False, True)
