"""Captures: calls in any order become the leaves of their tree, each sampled token is trained on
once, and what cannot be a call is refused by name.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docs_runner
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from captures import FORMS, Call, Json, drifted, leaves, tree
from support import assert_error, check_directory, packer, recover_documents, succeeds

pytestmark = pytest.mark.usefixtures("folder")

LOGPROBS = ("--carry", "logprobs:float32")
# forms with a record for each call -> the last field that tells sessions apart
SESSION_FIELDS = {"a record a call": "session_id", "Switchyard": "proxy_x_session_id",
                  "tinker-cookbook": "traj_idx"}  # fmt: skip


def write(path: str, records: Sequence[Json]) -> None:
    if path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist([*records]), path, row_group_size=3)
    elif path.endswith(".json"):
        Path(path).write_text(json.dumps(records))
    else:
        Path(path).write_text("".join(json.dumps(one) + "\n" for one in records))


def run(*arguments: Any) -> Json:
    succeeds("pack", *arguments, "-l", 4096, "-q", "-o", "out", "--overwrite")
    return check_directory("out")


def documents() -> list[tuple[list[int], list[float], list[float]]]:
    """Ids, weights and log-probabilities of each, in input order."""
    columns = ("input_ids", "loss_weights", "logprobs")
    found = [recover_documents("out", name) for name in columns]
    return [tuple(one[key].tolist() for one in found) for key in sorted(found[0])]  # type: ignore[misc]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "json"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_of_random_trees_give_back_the_trees(form: str, ending: str) -> None:
    """However the file is cut, and on several workers."""
    chance = random.Random(form + ending)
    trees = [tree(chance, chance.randrange(1, 14)) for _ in range(40)]
    records = [one for number, (_, calls) in enumerate(trees)
               for one in FORMS[form](str(number), calls)]  # fmt: skip
    write(f"calls.{ending}", records)
    for cut in (("--unit-bytes", "2k", "--workers", 3), ()):
        facts = run(f"calls.{ending}", *LOGPROBS, *cut)
        found = documents()
        ways = Counter((ids, probs) for nodes, _ in trees for ids, probs in leaves(nodes))
        assert facts["branches"] == ways.total() == len(found) + facts["untrained_documents"]
        rounded = Counter(
            (tuple(ids), tuple(round(x, 6) for x in probs)) for ids, _, probs in found
        )
        assert rounded <= ways
        pairs = [pair for _, weights, probs in found for pair in zip(weights, probs, strict=True)]
        once = Counter(round(prob, 6) for weight, prob in pairs if weight == 1)
        sampled = Counter(prob for nodes, _ in trees for node in nodes for prob in node["logprobs"])
        assert once == sampled
        assert {weight for _, weights, _ in found for weight in weights} <= {0, 1}
    assert facts["sessions"] == facts["traces"] == len(trees)
    assert facts["calls"] == sum(len(calls) for _, calls in trees)
    assert facts.get("drifted_calls", 0) == sum(len(drifted(calls)) for _, calls in trees)
    if ending == "jsonl":
        succeeds("verify", "out", "--against-inputs")


A = Call([1, 2], [3, 4], [-1, -2])
# name -> calls, (ids, weights) of each document, drifted calls
MERGED: dict[str, tuple[list[Call], list[tuple[list[int], list[int]]], int]] = {
    "a call goes on": (
        [A, Call([1, 2, 3, 4, 5], [6], [-3])], [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])], 0,
    ),
    "in another order": (
        [Call([1, 2, 3, 4, 5], [6], [-3]), A], [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])], 0,
    ),
    "two answers, which begin with the same": (
        [A, Call([1, 2], [3, 5], [-3, -4])],
        [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 3, 5], [0, 0, 1, 1])], 0,
    ),
    "the same answer twice, and what follows it": (
        [A, A, Call([1, 2, 3, 4, 5], [6], [-3])],
        [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])], 0,
    ),
    "an answer that another one begins with, and what follows it": (
        [Call([1, 2, 3, 4, 9], [6], [-6]), Call([1, 2], [3, 4, 5], [-3, -4, -5]), A],
        [([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), ([1, 2, 3, 4, 9, 6], [0, 0, 1, 1, 0, 1])], 0,
    ),
    "an answer goes on where it was cut": (
        [A, Call([1, 2, 3], [7], [-3])],
        [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 3, 7], [0, 0, 0, 1])], 0,
    ),
    "a prompt without what was sampled": (
        [A, Call([1, 2, 9, 5], [6], [-3]), Call([1, 2, 9, 5, 6, 7], [8], [-4])],
        [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 9, 5, 6, 7, 8], [0, 0, 0, 0, 1, 0, 1])], 1,
    ),
    "a prompt without the end of what was sampled": (
        [A, Call([1, 2, 3, 5], [6], [-3])],
        [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 3, 5, 6], [0, 0, 0, 0, 1])], 1,
    ),
    "another beginning": (
        [A, Call([1, 9], [6], [-3])], [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 9, 6], [0, 0, 1])], 0,
    ),
    "nothing sampled": (
        [A, Call([1, 2, 3, 4, 5], [], [])], [([1, 2, 3, 4, 5], [0, 0, 1, 1, 0])], 0,
    ),
    "no prompt": ([Call([], [3, 4, 5], [-1, -2, -3])], [([3, 4, 5], [1, 1, 1])], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_calls_are_merged(name: str) -> None:
    calls, expected, drift = MERGED[name]
    write("a.jsonl", [{"calls": [one.named() for one in calls]}])
    facts = run("a.jsonl", *LOGPROBS)
    assert sorted((ids, weights) for ids, weights, _ in documents()) == sorted(expected)
    assert facts.get("drifted_calls", 0) == drift


def test_sub_agents_are_sessions_of_their_own() -> None:
    """With the reward of the whole, and a sub-agent whose calls have no ids."""
    (whole,), (agent,), (other,) = (FORMS["ATIF"](name, [A]) for name in "abc")
    del other["steps"][-1]["metrics"]["prompt_token_ids"]
    record = whole | {"subagent_trajectories": [agent, other], "extra": {"reward": 0.5}}
    write("a.jsonl", [record, {"session_id": "s", "calls": [A.named()], "extra": {"reward": 1}}])
    facts = run("a.jsonl", "--field", "reward=extra.reward", "--carry", "reward:float32")
    assert [facts[name] for name in ("sessions", "calls", "calls_without_ids")] == [3, 3, 1]
    rewards = json.loads(packer("stats", "out", "--json").stdout)["carried"]["reward"]
    assert [rewards[name] for name in ("values", "minimum", "maximum")] == [3, 0.5, 1]
    assert rewards["mean"] == pytest.approx(2 / 3)


def test_a_session_of_several_records_has_the_last_values_of_its_calls() -> None:
    calls = [{"session_id": "s", "logprobs": [-1, -2], "advantage": 0.5, "reward": reward}
             | A._replace(prompt=[1, 2, *own]).named()
             for reward, own in ((None, []), (0.25, [5]), (None, [6]))]  # fmt: skip
    write("a.parquet", [*calls, calls[0] | {"session_id": "t", "reward": 0.0}])
    facts = run("a.parquet", "--carry", "advantages:float32", "--carry", "reward:float32",
                "--where", "reward >= 0.2")  # fmt: skip
    assert (facts["traces"], facts["filtered_traces"]) == (1, 1)
    advantages = recover_documents("out", "advantages").values()
    assert sorted(one.tolist() for one in advantages) == [
        [0, 0, 0, 0.5, 0.5], [0, 0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5],
    ]  # fmt: skip
    rewards = json.loads(packer("stats", "out", "--json").stdout)["carried"]["reward"]
    assert (rewards["minimum"], rewards["maximum"]) == (0.25, 0.25)


def test_fields_of_the_same_names_that_mean_something_else() -> None:
    """In records of one call, with a session and without."""
    more = {"response": "Yes.", "steps": [1], "calls": {"n": 5}, "prompt_tokens": 2}
    calls = [more | A.named(), more | Call([1, 2, 3, 4, 5], [6], [-3]).named()]
    write("a.jsonl", [*calls, *({"session_id": "s"} | one for one in calls)])
    facts = run("a.jsonl")
    assert [facts[name] for name in ("traces", "sessions", "calls")] == [3, 1, 2]


def test_such_fields_do_not_part_a_session_where_work_units_begin() -> None:
    """In columns, not all of which are read to find out where a session begins."""
    more = {"response": {"id": "x"}, "steps": [1], "calls": [{"n": 5}], "session_id": "s"}
    prompts = [[1, 2, *range(3, 3 + number)] for number in range(7)]
    write("a.parquet", [more | Call(ids, [ids[-1] + 1], [-1]).named() for ids in prompts])
    facts = run("a.parquet", "--unit-bytes", 1)
    assert len(facts["units"]) == 3
    assert [facts[name] for name in ("traces", "calls", "trained_tokens")] == [1, 7, 7]


def test_a_record_of_all_calls_does_not_go_on_behind_a_work_unit() -> None:
    """A call that follows it there is another session, though it is called the same."""
    ids = ("prompt_token_ids", "completion_token_ids")
    calls = [dict(zip(ids, pair, strict=True)) for pair in (([1], [2]), ([1, 3], [4]), ([5], [6]))]
    whole = {"session_id": "s", "calls": calls[:1]} | dict.fromkeys(ids)
    one = {"session_id": "s", "calls": None}
    rows = [
        whole,
        one | calls[1],
        whole | {"session_id": "t"},
        one | {"session_id": "t"} | calls[2],
    ]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet", row_group_size=1)
    for unit in (1, "1M"):
        assert run("a.parquet", "--unit-bytes", unit, "--overwrite")["documents"] == 4


def test_what_is_not_a_call_stays_a_trace_of_its_own() -> None:
    """Though it has a session, or the number of a trajectory, as others have."""
    nodes = [{"token_ids": [1, 2], "mask": [False, True], "sampled": True}]
    flat = {"prompt_ids": [1], "completion_ids": [2], "traj_idx": 0}
    session = {"session_id": "s"}
    records = [session | {"nodes": nodes}, session | {"traces": [{"nodes": nodes}]}]
    write("a.jsonl", [*records, flat, flat | {"traj_idx": 1}] * 2)
    facts = run("a.jsonl")
    assert (facts["traces"], facts.get("sessions", 0)) == (8, 0)


def test_fields_of_other_names() -> None:
    calls = [{"chat": {"id": "s"}, "seen": one.prompt, "out": one.sampled, "lp": one.logprobs}
             for one in (A, Call([1, 2, 3, 4, 5], [6], [-3]))]  # fmt: skip
    write("a.jsonl", calls)
    fields = {"session_id": "chat.id", "prompt_ids": "seen", "completion_ids": "out",
              "logprobs": "lp"}  # fmt: skip
    run("a.jsonl", *LOGPROBS, *(x for pair in fields.items() for x in ("--field", "=".join(pair))))
    assert documents() == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0, 0, -1, -2, 0, -3])]


def test_what_stats_tell_of_calls() -> None:
    more = [Call([1, 2, 9, 5], [6], [-3]).named(), {"prompt_token_ids": None}]
    write("a.jsonl", [{"calls": [A.named()]}, {"calls": [A.named(), *more]}])
    run("a.jsonl")
    position = len(json.dumps({"calls": [A.named()]})) + 1
    told = packer("stats", "out").stdout
    for line in (
        r"calls +3  of 2 sessions, merged where one goes on from another",
        r"no ids +1  calls without token ids: not trained on",
        rf"drifted +1  .*; the first: call 1 at position {position} of a.jsonl",
    ):
        assert re.search(f"^{line}$", told, re.M)
    assert json.loads(packer("stats", "out", "--json").stdout)["first_drifted"] == [0, position, 1]


# what is wrong -> record, options, what is said
BAD: dict[str, tuple[Json, tuple[str, ...], str]] = {
    "no ids": (
        {"calls": [A.named() | {"prompt_token_ids": None}, {"completion_token_ids": 5}]}, (),
        "no lists of token ids, expected a prompt and what was sampled",
    ),
    "empty lists": (
        {"calls": [Call([], [], []).named()]}, (),
        "no lists of token ids, expected a prompt and what was sampled",
    ),
    "no steps with ids": (
        {"schema_version": "ATIF-v1.2", "steps": [{"source": "agent", "message": "Hi"}]}, (),
        "no lists of token ids, expected a prompt and what was sampled",
    ),
    "an id that is none": (
        {"calls": [A.named(), A.named() | {"completion_token_ids": [3, -1]}]}, (),
        "the session, call 1: completion_ids: Expected `int` >= 0 - at `$[1]`",
    ),
    "other logprobs": (
        {"calls": [A.named() | {"logprobs": [-1]}]}, LOGPROBS,
        "the session, call 0: logprobs has 1 values, expected 2",
    ),
    "no logprobs": (
        {"calls": [A.named(), A.named() | {"logprobs": None}]}, LOGPROBS,
        "the session, call 1 has no logprobs, expected 2, one for each sampled token",
    ),
    "calls that are none": ({"calls": [5]}, (), "calls: Expected `object`, got `int` - at `$[0]`"),
    "no calls": ({"calls": 5}, (), "no lists of token ids, expected a prompt and what was sampled"),
    "no items": (
        {"responses_create_params": {}, "response": {"output": None}}, (),
        "response.output: Expected `array`, got `null`",
    ),
    "metrics that are none": (
        {"schema_version": "ATIF-v1.4", "steps": [{"source": "agent", "metrics": [1]}]}, (),
        "the trajectory: metrics: Expected `object`, got `array`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_capture_is_a_bad_record(name: str) -> None:
    """Named by itself, and left out among good ones."""
    record, options, said = BAD[name]
    good = {"session_id": "s", "calls": [A.named()]}
    write("a.jsonl", [good, record, good])
    command = ["pack", "a.jsonl", "-l", 64, "-o", "out", "-q", *options]
    assert_error(packer(*command), 1, "a.jsonl, line 2 (byte ", said)
    succeeds(*command, "--on-error", "skip")
    assert check_directory("out")["rejected_records"] == 1
    assert len(recover_documents("out")) == 2


@pytest.mark.parametrize("cut", ["1m", "1k"])
@pytest.mark.parametrize("form", SESSION_FIELDS)
def test_a_session_that_comes_back_is_an_error(form: str, cut: str) -> None:
    """In the same work unit, and in another one, but not in another file. It can be sorted."""
    chance, field = random.Random(0), SESSION_FIELDS[form]
    records = [one for name in map(str, range(40)) for one in FORMS[form](name, tree(chance, 5)[1])]
    write("a.jsonl", [*records, records[2]])
    command = ["pack", "-l", 4096, "-o", "out", "-q", "--unit-bytes", cut, "--overwrite"]
    session = '["r",null,"train",1,0,0]' if field == "traj_idx" else '"0"'
    result = packer(*command, "a.jsonl")
    assert_error(result, 1, f"a.jsonl, line {len(records) + 1} (byte ", f"session {session}, which")
    assert re.search(rf"jq -sc 'sort_by\(.*\.{field}\)\[\]'", result.stderr)
    write("b.jsonl", sorted([*records, records[2]], key=lambda one: str(one[field])))
    write("c.jsonl", records)
    succeeds(*command, "b.jsonl", "c.jsonl")
    assert check_directory("out")["sessions"] == 80


def test_the_page_runs() -> None:
    docs_runner.run(docs_runner.page("docs/carried.md", "## Captures", "## Distillation"))
