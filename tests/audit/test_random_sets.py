"""Random sets, whose counts are held to a slow twin."""

from __future__ import annotations

import tempfile
from pathlib import Path

from audited import ASSISTANT, WRITERS, Sets, audited, conversations, found
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_audit import slow, spans_of, spoiled

PACKED = [one for one in WRITERS if one.packed and one.labels and one.name != "seq-lens"]


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.sampled_from(PACKED))
def test_counts_are_those_of_a_slow_twin(seed: int, writer: object) -> None:
    assert isinstance(writer, type(WRITERS[0]))
    sets = spoiled(seed)
    expected = slow(sets)
    with tempfile.TemporaryDirectory() as folder:
        writer.write(sets, Path(folder) / "set")
        report = audited(Path(folder) / writer.path)
    findings = found(report)
    for ignored in ("overlap", "dominant-token"):
        findings.pop(ignored, None)
    assert {rule for rule in expected if rule in report["not_applied"]} == set()
    assert findings == {rule: len(rows) for rule, rows in expected.items()}
    for one in report["findings"]:
        if one["rule"] in expected:
            assert [each["row"] for each in one["examples"]] == sorted(expected[one["rule"]])[:10]


def test_the_twin_knows_what_an_answer_is() -> None:
    one = conversations(0).rows[0][0]
    begins = [begin for begin, _, _ in spans_of(one, Sets([[one]]).labels(0))]
    assert begins == [at + 2 for at, token in enumerate(one.ids) if token == ASSISTANT]
