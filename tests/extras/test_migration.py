"""docs/migration.md: both columns run, print the same, and make the same rows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl

from packer_cli.errors import DataError

ROOT = Path(__file__).parents[2]
PAGE, *_ = (ROOT / "docs" / "migration.md").read_text().partition("## Mixtures")  # test_mixtures.py
_CELL = re.compile(r"<td>\n\n```python\n(.*?)```\n\n</td>", re.S)
# (section, left, right) of each job, the section without its #
JOBS = [
    (section.splitlines()[0].strip("# "), *_CELL.findall(section))
    for section in re.split(r"^(?=##)", PAGE, flags=re.M)
    if "<table>" in section
]
# the peers', about themselves
pytestmark = pytest.mark.filterwarnings("ignore", "error:::packer_cli")

Names = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _without_shims() -> Iterator[None]:
    """fast_axolotl, once imported, puts modules of its own in axolotl's place."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "axolotl"]:
        del sys.modules[name]


def run(code: str, capsys: pytest.CaptureFixture[str]) -> tuple[Names, str]:
    names: Names = {"__name__": "page"}
    capsys.readouterr()
    exec(compile(code, "migration.md", "exec", dont_inherit=True), names)  # noqa: S102
    return names, capsys.readouterr().out


def in_order(left: Names, right: Names) -> None:
    ours, theirs = right["rows"], left["rows"]
    assert theirs["input_ids"] == ours.input_ids.tolist()
    assert theirs["attention_mask"] == ours.attention_mask.tolist()
    first = ours.position_ids == 0
    assert np.where(first, -100, theirs["labels"]).tolist() == ours.labels.tolist()


def with_an_eos(left: Names, right: Names) -> None:
    ours, theirs = right["rows"], left["rows"]
    assert (len(ours.input_ids), len(theirs["input_ids"])) == (13, 19)
    assert ours.plan.metrics.lower_bound_rows == 13
    found = np.sort(ours.input_ids[ours.attention_mask == 1])
    ids, mask = (np.array(theirs[name]) for name in ("input_ids", "attention_mask"))
    assert found.tolist() == np.sort(ids[mask == 1]).tolist()
    assert len(right["pack_sequences"]([[1] * 63], 64, eos_token_id=99).input_ids) == 1
    with pytest.raises(DataError, match="document 0 has 65 tokens"):
        right["pack_sequences"]([[1] * 64], 64, eos_token_id=99)
    with pytest.raises(BaseException, match="capacity overflow"):  # pyo3's panic is no Exception
        left["pack_sequences"]([[1] * 63], 64, 0, 99)


def wrapped(left: Names, right: Names) -> None:
    theirs, ours = left["rows"]["input_ids"][:], right["rows"]["input_ids"][:]
    assert ours[:-1] == theirs
    by_trl = trl.pack_dataset(left["documents"], 64, strategy="wrapped")["input_ids"][:]
    assert by_trl[:-1] == theirs
    assert ours[-1][: len(by_trl[-1])] == by_trl[-1]


COMPARE = {
    "Rows in order": in_order,
    "With an EOS after each": with_an_eos,
    "Wrapped rows: group_texts and TRL": wrapped,
}


def test_the_page_has_all_jobs() -> None:
    assert [title for title, *_ in JOBS] == [
        "Plans", "One at a time", "A dataset", "Tensors", *COMPARE
    ]  # fmt: skip
    assert PAGE.count("```python") == 2 * len(JOBS)


@pytest.mark.parametrize(("title", "left", "right"), JOBS, ids=[title for title, *_ in JOBS])
def test_both_columns(
    title: str, left: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, printed = run(right, capsys)
    assert printed
    if "seqpacker" in left:
        assert printed == PRINTED_BY_SEQPACKER[title]
        pytest.importorskip("seqpacker", reason="seqpacker does not install here")
    theirs, expected = run(left, capsys)
    assert printed == expected
    if title in COMPARE:
        COMPARE[title](theirs, ours)


# What its documentation and its sources (0.1.3) say that the left column prints.
PRINTED_BY_SEQPACKER = {
    "Plans": "4 0.952\n8\n",
    "One at a time": "[[0, 1], [2, 3], [4]]\n",
    "A dataset": "[6, 7, -100, 9, -100, -100, -100, -100]\n",
    "Tensors": "[[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 11, 12, 0]]\n",
}
