"""Records of units: what was written is read again, and anything else counts as none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from packer_cli.errors import DataError, InternalError
from packer_cli.records import Slice, Stretch, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.layout import ROWS, named_by_digest, unnamed_shard
from packer_cli.result.shards import Shard
from packer_cli.run import commits
from packer_cli.run.commits import UnitRecord

UNIT = WorkUnit(5, (Slice(0, 10, None, 7), Slice(2, 0, 3, 9)))
SHA256 = "ab" * 32
SIZES = (70, 30)
REJECTED_5, SUMS_5 = commits.rejected_name(5), commits.squared_lengths_name(5)


def shard_name(unit: int, part: int) -> str:
    return named_by_digest(unnamed_shard(ROWS, unit, part), SHA256)


def record_of(unit: WorkUnit = UNIT) -> UnitRecord:
    shards = [
        Shard(shard_name(unit.index, part), unit.index, 2, 3, 20, 10, size, SHA256)
        for part, size in enumerate(SIZES)
    ]
    return UnitRecord(
        unit.index, commits.slices_of(unit), shards, Counts(documents=3, tokens=40).as_json(),
        tokenizer={"kind": "bytes"}, rejected=12, inputs=[(2, 100, SHA256)],
        stretches=[(0, 10, 90, SHA256)],
    )  # fmt: skip


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work folder, as deep in a result as one is, with the files of a unit and its record."""
    folder = tmp_path / "out/.packer/id"
    folder.mkdir(parents=True)
    put_files(folder)
    commits.write_unit(folder, record_of())
    return folder


def put_files(folder: Path) -> None:
    for part, size in enumerate(SIZES):
        (folder / shard_name(UNIT.index, part)).write_bytes(bytes(size))
    (folder / REJECTED_5).write_bytes(bytes(12))
    (folder / SUMS_5).write_bytes(bytes(8 * 2 * len(SIZES)))


def test_a_record_survives(work: Path) -> None:
    record = commits.read_unit(work, UNIT)
    assert record == record_of() == commits.require_unit(work, UNIT)
    assert record.work_unit == UNIT
    assert commits.counts_of(record).as_json() == {"documents": 3, "tokens": 40}


def test_a_record_that_is_cut_off_is_none(work: Path) -> None:
    (path,) = work.glob(commits.UNIT_RECORDS)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert commits.read_unit(work, UNIT) is None, size
    path.write_bytes(whole)
    assert commits.read_unit(work, UNIT) == record_of()


def test_a_record_with_any_byte_changed_is_none(work: Path) -> None:
    (path,) = work.glob(commits.UNIT_RECORDS)
    whole = path.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        assert commits.read_unit(work, UNIT) is None, place


def test_a_record_that_is_not_there_is_none(work: Path) -> None:
    assert commits.read_unit(work, WorkUnit(6, UNIT.slices)) is None
    with pytest.raises(InternalError, match="unit 6 was packed, but its files"):
        commits.require_unit(work, WorkUnit(6, UNIT.slices))


@pytest.mark.parametrize(
    "slices", [UNIT.slices[:1], UNIT.slices[::-1], (UNIT.slices[0], Slice(2, 0, 4, 9)), ()]
)
def test_a_record_of_other_slices_is_none(work: Path, slices: tuple[Slice, ...]) -> None:
    assert commits.read_unit(work, WorkUnit(UNIT.index, slices)) is None


@pytest.mark.parametrize("name", [shard_name(5, 0), shard_name(5, 1), REJECTED_5, SUMS_5])
@pytest.mark.parametrize("change", [-1, 1, None])
def test_files_of_another_size_are_not_those_of_the_unit(
    work: Path, name: str, change: int | None
) -> None:
    path = work / name
    size = path.stat().st_size
    path.unlink()
    if change is not None:
        path.write_bytes(bytes(size + change))
    assert commits.read_unit(work, UNIT) is None
    assert commits.read_unit_record(work / "unit-00005.json") == record_of()


@pytest.mark.parametrize("shard", [{"file": shard_name(6, 0)}, {"unit": 6}])
def test_a_record_with_the_shards_of_another_unit_is_none(
    work: Path, shard: dict[str, object]
) -> None:
    first, second = record_of().shards
    commits.write_unit(work, replace(record_of(), shards=[replace(first, **shard), second]))
    (work / shard_name(6, 0)).write_bytes(bytes(SIZES[0]))
    assert commits.read_unit(work, UNIT) is None
    commits.write_unit(work, replace(record_of(), shards=[second, first]))
    assert commits.read_unit(work, UNIT) is None


def test_reused_shards_stay_beside_the_result(work: Path) -> None:
    record = replace(record_of(), reused=True)
    commits.write_unit(work, record)
    for path in (*work.glob("shard-*"), work / REJECTED_5, work / SUMS_5):
        path.unlink()
    assert commits.read_unit(work, UNIT) is None
    put_files(work.parents[1])
    assert commits.read_unit(work, UNIT) == record
    for name in (REJECTED_5, SUMS_5):  # which are parts of side files there
        (work.parents[1] / name).unlink()
    assert commits.read_unit(work, UNIT) == record


def test_digests_and_stretches_of_all_records(work: Path) -> None:
    other = WorkUnit(7, (Slice(0, 0, 10, 7),))
    commits.write_unit(
        work, replace(record_of(other), inputs=[], stretches=[(0, 0, 10, "cd" * 32)])
    )
    commits.write_input(work, 0, 100, "ef" * 32)
    assert commits.digests_in(work) == {2: (100, SHA256), 0: (100, "ef" * 32)}
    stretches = {index: sorted(some, key=lambda one: one.offset)
                 for index, some in commits.stretches_in(work).items()}  # fmt: skip
    assert stretches == {0: [Stretch(0, 10, "cd" * 32), Stretch(10, 90, SHA256)]}
    assert commits.read_input(work, 0) == (100, "ef" * 32)
    path = work / "input-00000.json"
    path.write_bytes(path.read_bytes()[:-1])
    (work / "unit-00007.json").write_bytes(b"{}")
    assert commits.read_input(work, 0) is None
    assert commits.digests_in(work) == {2: (100, SHA256)}
    assert commits.stretches_in(work) == {0: [Stretch(10, 90, SHA256)]}


@given(st.lists(st.integers(0, 1 << 20), max_size=5, unique=True))
def test_lines_of_a_finished_result(
    tmp_path_factory: pytest.TempPathFactory, units: list[int]
) -> None:
    """They do not tell which units a run has reused, nor what is of use to that run alone."""
    path = tmp_path_factory.getbasetemp() / "units.jsonl"
    records = [record_of(WorkUnit(unit, UNIT.slices)) for unit in units]
    reused = [replace(one, reused=True, rejected_from=9) for one in records]
    lines = [commits.as_line(one) for one in records]
    assert lines == [commits.as_line(one) for one in reused]
    path.write_bytes(b"".join(lines))
    assert [*commits.read_units(path)] == [replace(one, stretches=[]) for one in records]


def test_lines_that_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "units.jsonl"
    path.write_bytes(commits.as_line(record_of()) + b"{}\n")
    with pytest.raises(ValueError, match="missing required field"):
        list(commits.read_units(path))
    path.unlink()
    with pytest.raises(DataError, match="cannot read"):
        list(commits.read_units(path))


def test_counts_that_cannot_be(work: Path) -> None:
    damaged = replace(record_of(), counts={"documents": "many"})
    assert msgspec.json.decode(commits.as_line(damaged))["unit"] == 5
    with pytest.raises(DataError, match="the record of unit 5 is damaged: documents is 'many'"):
        commits.counts_of(damaged)
