"""Every defect is found in each format that can have it, in just the rows that have it, and nothing
is found in sound sets.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from audited import DEFECTS, WRITERS, Sets, Writer, audited, conversations, found

SEED = 3
IDS = [one.write.__name__ for one in WRITERS]


@pytest.mark.parametrize("writer", WRITERS, ids=IDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_is_found_in_a_sound_set(tmp_path: Path, writer: Writer, seed: int) -> None:
    sets = conversations(seed)
    writer.write(sets, tmp_path / "set")
    report = audited(tmp_path / writer.path)
    assert found(report) == {}
    assert report["format"] == writer.name
    assert report["documents"] == len(sets.documents())
    spare = len(sets.documents()) * (writer.name == "megatron-bridge")
    assert report["tokens"] == sum(len(one.ids) for _, one in sets.documents()) + spare


CASES = [
    pytest.param(writer, rule, id=f"{writer.write.__name__}-{rule}")
    for writer in WRITERS
    for rule in DEFECTS
    if rule not in writer.cannot
]


@pytest.mark.parametrize(("writer", "rule"), CASES)
def test_a_planted_defect_is_found_in_its_rows(tmp_path: Path, writer: Writer, rule: str) -> None:
    sets = conversations(SEED)
    if not writer.packed:  # a document a row, whatever row it was in
        sets = Sets([[one] for _, one in sets.documents()], [[] for _ in sets.documents()])
    expected = DEFECTS[rule](sets, SEED)
    assert expected
    writer.write(sets, tmp_path / "set")
    report = audited(tmp_path / writer.path)
    findings = found(report)
    assert findings.pop(rule, 0) == len(expected), report
    assert findings == {}, report  # what is planted brings nothing else along
    (own,) = [one for one in report["findings"] if one["rule"] == rule]
    assert [one["row"] for one in own["examples"]] == sorted(expected)[:10]
