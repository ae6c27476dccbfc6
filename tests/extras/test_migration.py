"""Pages of docs/ that need extras run, and both columns of docs/migration.md give the same."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import docs_runner
import numpy as np
import pytest
import trl

import packer_cli.hf
import packer_cli.torch
from packer_cli.errors import DataError

ROOT = Path(__file__).parents[2]
PAGE, *_ = (ROOT / "docs" / "migration.md").read_text().partition("## Names of fields")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)
ROWS = re.findall(r"^\| ([^|`]+) \| `([^|]+)` \| `([^|]+)` \|$", PAGE, re.M)
# the peers', about themselves
pytestmark = pytest.mark.filterwarnings("ignore", "error:::packer_cli")

LENGTHS_1_TO_39 = [[n] * n for n in range(1, 40)]
# What its documentation and its sources (0.1.3) say of the calls in its column.
GIVEN_BY_SEQPACKER = {
    "rows": 4,
    "how full they are": 0.952,
    "one at a time": [],
    "a dataset": [5, 6, 7, 8, 9, 0, 0, 0],
    "tensors": [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 11, 12, 0]],
}


@pytest.fixture(scope="module")
def fast_axolotl() -> Iterator[Any]:
    """Once imported, it has modules of its own in axolotl's place."""
    yield import_module("fast_axolotl")
    for name in [name for name in sys.modules if name.split(".")[0] == "axolotl"]:
        del sys.modules[name]


def value_of(call: str, **modules: Any) -> Any:
    names = {"packer_cli": packer_cli, **modules}
    for example in EXAMPLES:
        exec(example, names)  # noqa: S102
    return eval(call, names)  # noqa: S307


def test_the_page_has_all_jobs() -> None:
    ours = ["rows in order", "their labels", "with an EOS after each"]
    assert [job for job, *_ in ROWS] == [*GIVEN_BY_SEQPACKER, *ours]


@pytest.mark.parametrize(("job", "theirs", "ours"), ROWS, ids=[job for job, *_ in ROWS])
def test_both_columns(fast_axolotl: Any, job: str, theirs: str, ours: str) -> None:
    given = value_of(ours)
    if "seqpacker" in theirs:
        assert given == GIVEN_BY_SEQPACKER[job]
        seqpacker = pytest.importorskip("seqpacker", reason="seqpacker does not install here")
        for part in ("hf_utils", "torch_utils"):
            pytest.importorskip(f"seqpacker.{part}")
        assert value_of(theirs, seqpacker=seqpacker) == given
    else:
        assert value_of(theirs, fast_axolotl=fast_axolotl) == given


def test_with_an_eos_after_each(fast_axolotl: Any) -> None:
    ours = packer_cli.pack_sequences(LENGTHS_1_TO_39, 64, eos_token_id=99)
    theirs = fast_axolotl.pack_sequences(LENGTHS_1_TO_39, 64, 0, 99)
    assert (len(ours.input_ids), len(theirs["input_ids"])) == (13, 19)
    assert ours.plan.metrics.lower_bound_rows == 13
    ids, mask = (np.array(theirs[name]) for name in ("input_ids", "attention_mask"))
    found = np.sort(ours.input_ids[ours.attention_mask == 1])
    assert found.tolist() == np.sort(ids[mask == 1]).tolist()
    assert len(packer_cli.pack_sequences([[1] * 63], 64, eos_token_id=99).input_ids) == 1
    with pytest.raises(DataError, match="document 0 has 65 tokens"):
        packer_cli.pack_sequences([[1] * 64], 64, eos_token_id=99)
    with pytest.raises(BaseException, match="capacity overflow"):  # pyo3's panic is no Exception
        fast_axolotl.pack_sequences([[1] * 63], 64, 0, 99)


def test_wrapped_rows() -> None:
    def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = [one for document in examples["input_ids"] for one in document]
        blocks = [ids[i : i + 64] for i in range(0, len(ids) // 64 * 64, 64)]
        return {"input_ids": blocks, "labels": blocks}

    documents = datasets.Dataset.from_dict({"input_ids": LENGTHS_1_TO_39})
    ours = packer_cli.hf.pack_dataset(documents["input_ids"], 64, strategy="wrap")["input_ids"][:]
    theirs = documents.map(group_texts, batched=True)["input_ids"][:]
    assert ours[:-1] == theirs
    by_trl = trl.pack_dataset(documents, 64, strategy="wrapped")["input_ids"][:]
    assert by_trl[:-1] == theirs
    assert ours[-1][: len(by_trl[-1])] == by_trl[-1]


# Pages that print what they show


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("page", "begin", "end"),
    [
        ("README.md", "### 1. Pack text", "## Recipes"),
        ("docs/training.md", "", ""),
        ("docs/carried.md", "", ""),
        ("docs/plan.md", "## Lengths of samples", ""),
        ("docs/python.md", "", ""),
        ("docs/export.md", "", ""),
    ],
    ids=lambda value: Path(str(value)).name,
)
def test_a_page_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, page: str, begin: str, end: str
) -> None:
    docs_runner.prepare(monkeypatch)
    docs_runner.run(docs_runner.page(page, begin, end), skip=["DIR"])
