"""Captures as the classes of other packages write them. Packages that are not there are skipped:
Harbor needs Python 3.12, NeMo Gym Python 3.13 and an openai of its own.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from captures import GYM_IDS, TINKER_IDS, Call, Json, leaves, tree
from support import check_directory, recover_documents, succeeds

pytestmark = pytest.mark.usefixtures("folder")

Tree = tuple[list[Json], list[Call]]


def _atif(trees: list[Tree], module: Any) -> str:
    """Two trajectories in each, one of a sub-agent, with steps of others and a copied one."""

    def trajectory(number: int, **more: Any) -> Any:
        steps = [{"source": "user", "message": "Go on."},
                 {"source": "agent", "message": "", "is_copied_context": True,
                  "metrics": module.Metrics(**Call([1], [2], [-1]).named())}]  # fmt: skip
        for call in trees[number][1]:
            metrics = module.Metrics(prompt_tokens=len(call.prompt), **call.named())
            steps.append({"source": "agent", "message": "", "metrics": metrics})
        return module.Trajectory(
            schema_version="ATIF-v1.7", trajectory_id=f"t{number}", session_id="run",
            agent=module.Agent(name="a", version="1"),
            steps=[module.Step(step_id=n + 1, **step) for n, step in enumerate(steps)], **more,
        )  # fmt: skip

    lines = [
        trajectory(number, subagent_trajectories=[trajectory(number + 1)])
        for number in range(0, len(trees), 2)
    ]
    text = "".join(one.model_dump_json(exclude_none=True) + "\n" for one in lines)
    Path("calls.jsonl").write_text(text)
    return "calls.jsonl"


def _tinker(trees: list[Tree], schema: Any) -> str:
    """Rows of the store."""
    rows = [
        {"cursor": number, "run_id": "r", "split": "train", "iteration": 1, "group_idx": at // 4,
         "traj_idx": at % 4, "seq_id": number, "metadata": "{}"} | call.named(TINKER_IDS)
        for at, (_, calls) in enumerate(trees)
        for number, call in enumerate(calls)
    ]  # fmt: skip
    arrow = schema.render_arrow_schema(schema.WIRE_ROWS_COLUMNS)
    pq.write_table(pa.Table.from_pylist(rows, arrow), "calls.parquet", row_group_size=5)
    return "calls.parquet"


def _gym(trees: list[Tree], module: Any) -> str:
    """Rollouts in which each call has two items."""
    lines = []
    for number, (_, calls) in enumerate(trees):
        output = list[Any]()
        for call in calls:
            output += [
                module.NeMoGymResponseReasoningItem(id="r", type="reasoning", summary=[]),
                module.NeMoGymResponseFunctionToolCallForTraining(
                    call_id="c", name="f", arguments="{}", **call.named(GYM_IDS)
                ),
                module.NeMoGymFunctionCallOutput(call_id="c", output="Done."),
            ]
        response = module.NeMoGymResponse(
            id=str(number), created_at=0, model="m", object="response", output=output,
            parallel_tool_calls=False, tool_choice="auto", tools=[],
        )  # fmt: skip
        params = module.NeMoGymResponseCreateParamsNonStreaming(input="Go on.")
        lines.append({"responses_create_params": params.model_dump(exclude_unset=True),
                      "response": response.model_dump(mode="json"), "reward": 1.0})  # fmt: skip
    Path("calls.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return "calls.jsonl"


WRITERS: dict[str, Callable[[list[Tree], Any], str]] = {
    "atif": _atif,
    "harbor.models.trajectories": _atif,
    "tinker_cookbook.capture.store.schema": _tinker,
    "nemo_gym.openai_utils": _gym,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_packages_write_gives_back_the_trees(name: str) -> None:
    module = pytest.importorskip(name, exc_type=ImportError)  # it may lack what it needs itself
    trees = [tree(random.Random(number), 6) for number in range(20)]
    path = WRITERS[name](trees, module)
    succeeds("pack", path, "-l", 4096, "--carry", "logprobs:float32", "-q", "-o", "out",
             "--unit-bytes", "4k")  # fmt: skip
    facts = check_directory("out")
    ids, logprobs = recover_documents("out"), recover_documents("out", "logprobs")
    found = Counter(
        (tuple(ids[key].tolist()), tuple(round(x, 6) for x in logprobs[key].tolist()))
        for key in ids
    )
    expected = Counter(leaf for nodes, _ in trees for leaf in leaves(nodes))
    assert found <= expected
    assert expected.total() == found.total() + facts["untrained_documents"]
    assert (facts["sessions"], facts["calls"]) == (20, 120)
