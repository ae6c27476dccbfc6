"""`packer show --step`: the rows and documents of a training step, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from approving import assert_approved
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from showing import IN_ORDER, TEXTS
from support import assert_error, jsonl, pack, packer, succeeds

from packer_cli.result.opening import open_packed
from packer_cli.result.reader import Joined
from packer_cli.steps import Order, Schedule, Steps, StepSizes, row_costs

pytestmark = pytest.mark.usefixtures("folder")
SIZES = ("--ranks", 2, "--batch-size", 2, "--micro-batches", 2)


def step(*arguments: object, directory: str = "out") -> str:
    result = packer("show", directory, *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return str(result.stdout)


def step_json(*arguments: object, directory: str = "out") -> list[dict[str, Any]]:
    lines = step(*arguments, "--json", directory=directory).splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def many_rows() -> int:
    """How many rows there are."""
    Path("a.jsonl").write_bytes(jsonl(*(str(n) * (n % 23 + 1) for n in range(200))))
    return int(pack("a.jsonl", "-l", 16, "--unit-bytes", 2000)["rows"])


def test_the_table_and_the_same_as_json() -> None:
    Path("a.jsonl").write_bytes(jsonl(*TEXTS, "5", "the sixth one"))
    pack("a.jsonl", "-l", 16, *IN_ORDER)
    command = ("--step", 1, "--ranks", 1, "--batch-size", 3)
    assert_approved("show --step", step(*command), step(*command, "--json"))


@pytest.mark.parametrize("balance", [None, "step", "order"])
def test_steps_are_those_of_the_schedule(many_rows: int, balance: Any) -> None:
    """With all that `packer show` says of their rows."""
    joined = Joined([open_packed("out")])
    costs = row_costs(joined.squared_lengths, 16, hidden_size=1)
    sizes = StepSizes(2, 2, 2)
    steps = Steps(Schedule(Order(many_rows, 5), sizes, balance=balance, costs=costs))
    options = ["--seed", 5, *(["--balance", balance, "--hidden-size", 1] if balance else [])]
    for number in (0, 3, 400):
        found = step_json("--step", number, *SIZES, *options)
        expected = [(number, rank, i // 2, row) for rank, rows in enumerate(steps.rows_of(number))
                    for i, row in enumerate(rows.tolist())]  # fmt: skip
        named = ("step", "rank", "micro_batch", "row")
        assert [tuple(one[name] for name in named) for one in found] == expected
        shown = packer("show", "out", *(one["row"] for one in found), "--json").stdout
        for one, line in zip(found, shown.splitlines(), strict=True):
            for segment, whole in zip(one["segments"], json.loads(line)["segments"], strict=True):
                assert segment.items() <= whole.items()


def test_documents_are_named_by_their_first_inputs_and_sources() -> None:
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, max_length=512))
    found = step_json("--step", 3, *SIZES)
    assert {segment["source"] for one in found for segment in one["segments"]} == {*IN_SHARES}
    succeeds("pack", "mix-tokenized/web", "-l", 512, "--view", "-o", "view", "-q")
    (row,) = step_json("--step", 3, "--ranks", 1, directory="view")
    assert {one["tokenized"] for one in row["segments"]} == {"mix-tokenized/web"}
    Path("mix-tokenized/web").rename("moved")
    command = ("--step", 3, "--ranks", 1)
    assert_error(packer("show", "view", *command), 1, "mix-tokenized/web is gone")
    assert step_json(*command, "--tokens", "moved", directory="view") == [row]


def test_rows_without_the_column_segments() -> None:
    Path("a.jsonl").write_bytes(jsonl("one", "two"))
    pack("a.jsonl", "-l", 16, "--columns", "input_ids,cu_seqlens")
    (row,) = step_json("--step", 0, "--ranks", 1)
    assert [(one["file"], one["tokens"]) for one in row["segments"]] == [(None, 4)] * 2


# A Trainer's checkpoint; tests/extras/test_trainer_mixin.py has one that was really saved


def write_checkpoint(done: int, **state: Any) -> None:
    position = {"sampler": state, "rows_per_step": 8}
    callbacks = {"PackedPosition": {"args": {}, "attributes": {"position": position}}}
    content = {"global_step": done, "stateful_callbacks": callbacks}
    Path("trainer_state.json").write_text(json.dumps(content))


@pytest.fixture
def plain_state(many_rows: int) -> dict[str, Any]:
    order = Order(many_rows, 7).options()
    return order | {"samples": 24, "data": Joined([open_packed("out")]).fingerprint}


def test_a_checkpoint_has_the_numbers(plain_state: dict[str, Any]) -> None:
    write_checkpoint(3, **plain_state)
    last = step("--checkpoint", ".", *SIZES)
    assert last == step("--step", 2, "--seed", 7, *SIZES)
    first = step("--checkpoint", ".", "--step", 0, *SIZES)
    assert first == step("--step", 0, "--seed", 7, *SIZES)
    sizes = {"balance": "step", "cost": 1, "dealt": [[0, 2, 2, 2]]}
    write_checkpoint(3, **plain_state, **sizes)
    balanced = ("--seed", 7, "--balance", "step", "--hidden-size", 1)
    assert step("--checkpoint", ".") == step("--step", 2, *SIZES, *balanced)


def test_epochs_of_a_trainer_have_as_many_batches_as_the_first(many_rows: int) -> None:
    """Of rows that give some epochs a row more for each rank, and so a batch."""
    ranks = 2 if many_rows % 2 else 3
    batch = many_rows // ranks
    options = ("--ranks", ranks, "--batch-size", batch)
    loop = [len(step_json("--step", number, *options)) for number in range(4)]
    assert {batch * ranks} < {*loop}
    epochs = Schedule(Order(many_rows, 0), StepSizes(ranks, batch)).grid
    state = Order(many_rows, 0).options() | {"data": Joined([open_packed("out")]).fingerprint}
    for number in range(4):
        write_checkpoint(number + 1, **state, samples=epochs.epoch(number).end)
        assert len(step_json("--checkpoint", ".", *options)) == batch * ranks


REFUSED = [
    ({"rows": 6}, "the checkpoint has rows 6, a run over out with these sizes would have "),
    ({"data": "x"}, "the checkpoint has data x, a run"),
    ({"block_rows": 8}, "the checkpoint has block_rows 8, a run"),
    ({"samples": 20}, "the checkpoint has samples 20, a run"),
    ({"balance": "step", "cost": 1, "dealt": [[8, 2, 2, 2]]}, "dealt [[8, 2, 2, 2]], a run"),
    ({"balance": "step"}, "trainer_state.json: has no position of packed rows"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[repr(one) for one, _ in REFUSED])
def test_checkpoints_of_other_runs(
    plain_state: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    write_checkpoint(3, **plain_state | change)
    assert_error(packer("show", "out", "--checkpoint", ".", *SIZES), 1, message)
