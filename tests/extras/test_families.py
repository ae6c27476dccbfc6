"""The table of docs/training.md is what its collators do, for every family in it.

`python tests/extras/families.py` writes the table anew.
"""

from __future__ import annotations

from functools import partial

import pytest
from families import (
    ATTENTIONS,
    COLLATORS,
    HEAD,
    PAGE,
    batch_of,
    cases,
    difference,
    had,
    line,
    outcome,
    rows,
    standing_in,
)

from packer_cli.errors import UsageError
from packer_cli.torch import check_isolation, padded_collate, varlen_collate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PLAIN = {
    "varlen_collate": partial(varlen_collate, config=None),
    "padded_collate": partial(padded_collate, config=None),
}
CASES = cases()
IDS = [name + (", kernels" if kernels else "") for name, kernels in CASES]


def lines_of_the_page() -> dict[str, str]:
    """The line of each family, as if it had one of its own."""
    page = PAGE.read_text().split(HEAD)
    assert len(page) == 2
    shared = [one for one in page[1].split("\n\n")[0].splitlines() if one][1:]
    parts = [one.removeprefix("| ").split(" | ", 1) for one in shared]
    return {name: f"| {name} | {cells}" for names, cells in parts for name in names.split("; ")}


def test_the_page_names_each_family() -> None:
    assert sorted(lines_of_the_page()) == sorted(IDS)


@pytest.mark.parametrize(("name", "kernels"), CASES, ids=IDS)
def test_the_table_of_the_page(name: str, kernels: bool) -> None:
    """Logits and losses of documents that were packed are those of the documents alone."""
    made = line(name, kernels)
    assert made == lines_of_the_page()[IDS[CASES.index((name, kernels))]]
    assert "DIFFERS" not in made


@pytest.mark.parametrize(("name", "kernels"), CASES, ids=IDS)
def test_what_is_refused_would_leak_and_the_rest_does_not(name: str, kernels: bool) -> None:
    """`check_isolation` agrees with the comparison, with the config and without."""
    with standing_in(name, kernels):
        for attention in ATTENTIONS:
            if (model := had(name, attention)) is None:
                continue
            for collator in COLLATORS[:-1]:
                found = outcome(name, attention, collator)
                if found == "equal":
                    check_isolation(model, batch_of(collator, attention, model.config))
                elif found and collator in PLAIN:
                    is_found_out(name, attention, collator)


def is_found_out(name: str, attention: str, collator: str) -> None:
    """Without the config, what was refused leaks, and that is said; or transformers raises."""
    model, batch = had(name, attention), PLAIN[collator](rows())
    try:
        leak = difference(name, model, collator, batch)
    except ValueError as error:
        assert "packed sequences apart" in str(error) or "batch size" in str(error)  # noqa: PT017
        return
    assert leak > 0.1
    with pytest.raises(UsageError, match="documents see each other: the tokens of another change"):
        check_isolation(model, batch)


@pytest.mark.parametrize("kind", ["LFM2", "Granite 4 hybrid", "Falcon-H1", "Qwen3-Next"])
def test_kernels_that_are_missing_are_asked_for(kind: str) -> None:
    """seq_idx in the batch: transformers raises rather than letting documents see each other."""
    for collate in PLAIN.values():
        with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
            had(kind, "eager")(**collate(rows()))
