"""Agent traces: the ids of every branch are those of its nodes, each sampled token is trained on
once, and what cannot be a trace is refused by name.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import chat_tokenizer
from support import assert_error, check_directory, packer, recover_documents, succeeds
from traces import Json, branches_of, episodes

from packer_cli.records import MOST_TURNS
from packer_cli.tokenization.locate import locate
from packer_cli.tokenization.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("folder")

COLUMNS = ("logprobs:float32", "advantages:float32", "reward:float32", "metrics.turns:int32",
           "run.work.step:int32")  # fmt: skip
CARRY = tuple(option for one in COLUMNS for option in ("--carry", one))
SPREAD = ("logprobs", "advantages")


def write(path: str, records: list[Json]) -> list[int]:
    """The position of each record."""
    if path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(records), path)
        return [*range(len(records))]
    lines = [json.dumps(one) + "\n" for one in records]
    Path(path).write_text("".join(lines))
    return np.cumsum([0, *map(len, lines[:-1])]).tolist()  # type: ignore[no-any-return]


def run(*arguments: Any) -> Json:
    succeeds("pack", *arguments, "-l", 4096, "-q", "-o", "out", "--overwrite")
    return check_directory("out")


def spread(node: Json, name: str) -> list[float]:
    values = iter(node.get(name) or ())
    return [next(values) if on else 0.0 for on in node["mask"]]


def assert_branches(records: list[Json], places: list[int], columns: tuple[str, ...]) -> int:
    """Hold every document to the nodes of its branch; how many there are."""
    found = {name: recover_documents("out", name)
             for name in ("input_ids", "labels", "loss_weights", *columns)}  # fmt: skip
    count, seen = 0, dict.fromkeys(found["input_ids"], 0)
    for place, record in zip(places, records, strict=True):
        number = 0
        for trace in record.get("traces", [record]):
            weights: dict[tuple[int, int], float] = defaultdict(float)
            for path in branches_of(trace):
                key, nodes = (0, place * MOST_TURNS + number), [trace["nodes"][n] for n in path]
                number += 1
                own = [key_ for n in path for key_ in _tokens_of(trace["nodes"], n)]
                if key not in seen:  # nothing of its own
                    assert all(weights[one] for one in own if _is_sampled(trace, one))
                    continue
                count += 1
                ids = [i for one in nodes for i in one["token_ids"]]
                assert found["input_ids"][key].tolist() == ids
                labels, its = found["labels"][key], found["loss_weights"][key]
                assert (labels != -100).tolist() == (its != 0).tolist()
                assert labels[labels != -100].tolist() == np.array(ids)[labels != -100].tolist()
                for one, weight in zip(own, its.tolist(), strict=True):
                    weights[one] += weight
                for name in columns:
                    expected = [value for one in nodes for value in spread(one, name)]
                    assert found[name][key].tolist() == np.array(expected, np.float32).tolist()
            every = [t for n in range(len(trace["nodes"])) for t in _tokens_of(trace["nodes"], n)]
            assert all(weights[one] == _is_sampled(trace, one) for one in every)
    assert count == len(seen)
    return count


def _tokens_of(nodes: list[Json], number: int) -> list[tuple[int, int]]:
    return [(number, at) for at in range(len(nodes[number]["token_ids"]))]


def _is_sampled(trace: Json, token: tuple[int, int]) -> bool:
    sampled: bool = trace["nodes"][token[0]]["mask"][token[1]]
    return sampled


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_every_branch_is_its_nodes(form: str) -> None:
    """Of 500 branches, packed at once and from tokenized documents, on several workers."""
    records = [*episodes(500)]
    if form == "parquet":  # Arrow has no objects without keys
        records = [without_empty(one) for one in records[:100]]
    path = f"traces.{form}"
    places = write(path, records)
    facts = run(path, *CARRY, "--unit-bytes", "50k", "--workers", 3)
    assert facts["branches"] == sum(len(branches_of(t)) for one in records for t in one["traces"])
    count = assert_branches(records, places, SPREAD)
    assert facts["branches"] == count + facts["untrained_documents"]
    assert facts["traces"] == sum(len(one["traces"]) for one in records)
    assert facts["shared_tokens"] == sum(map(shared_tokens, records))
    succeeds("tokenize", path, *CARRY, "-q", "-o", "tokenized")
    succeeds("pack", "tokenized", "-l", 4096, "-q", "-o", "again")
    for out in ("out", "tokenized", "again"):
        succeeds("verify", out, "--against-inputs")
    check_directory("again")


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_empty(v) for k, v in value.items() if v not in ({}, [], None)}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


def shared_tokens(record: Json) -> int:
    total = 0
    for trace in record["traces"]:
        paths = [n for path in branches_of(trace) for n in path]
        sizes = [len(one["token_ids"]) for one in trace["nodes"]]
        total += sum(sizes[n] for n in paths) - sum(sizes[n] for n in {*paths})
    return total


def nodes_of(*nodes: Json) -> Json:
    """A trace; a node without a mask is sampled throughout if it has a parent."""
    made = []
    for one in nodes:
        sampled = one.get("parent") is not None
        mask = [sampled] * len(one.get("token_ids") or ())
        made.append({"mask": mask, "sampled": sampled} | one)
    return {"nodes": made}


ROOT = {"token_ids": [1, 2]}
FLAT = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5]}
FORK = nodes_of(ROOT, {"parent": 0, "token_ids": [3]}, {"parent": 1, "token_ids": [4]},
                {"parent": 1, "token_ids": [5]})  # fmt: skip


def weighted(*streams: Json) -> Json:
    """`FORK` with weights of its nodes."""
    nodes = [one | {"loss_weights": its} for one, its in zip(FORK["nodes"], streams, strict=True)]
    return {"nodes": nodes}


NAMED = ("--carry", "loss_weights.b:float32")
TWO = weighted({"a": [0, 0], "b": [0.5, 0]}, *({"a": [1], "b": [2]},) * 2, {"a": [1], "b": [0]})
# name -> record, options, by branch: ids, and of what is asked for its values
DOCUMENTS: dict[str, tuple[Json, tuple[str, ...], list[Any]]] = {
    "the flat form": (FLAT, (), [([1, 2, 3, 4, 5], [0, 0, 1, 1, 1])]),
    "masks of numbers": (
        FLAT | {"prompt_mask": [0, 0], "completion_mask": [1, 0, 1], "logprobs": [-1, -2, -3]},
        ("--carry", "logprobs:float32"),
        [([1, 2, 3, 4, 5], [0, 0, -1, 0, -3])],
    ),
    "verl": (
        {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 0],
         "rollout_log_probs": [-1, -2]},
        ("--carry", "logprobs:float32"), [([1, 2, 3], [0, -1, 0])],
    ),
    "TRL": (FLAT | {"tool_mask": [1, 0, 1]}, (), [([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])]),
    "rewards that are numbers": (
        FLAT | {"rewards": {"a": 0.0, "b": None}},
        ("--carry", "loss_weights:float32", "--where", "reward >= 0"),
        [([1, 2, 3, 4, 5], [0, 0, 1, 1, 1])],
    ),
    "one advantage": (
        FLAT | {"advantage": 0.5}, ("--carry", "advantages:float32"),
        [([1, 2, 3, 4, 5], [0, 0, 0.5, 0.5, 0.5])],
    ),
    "the beginning is trained on once": (FORK, (), [([1, 2, 3, 4], [0, 0, 1, 1]),
                                                    ([1, 2, 3, 5], [0, 0, 0, 1])]),
    "several roots": (
        nodes_of(ROOT, ROOT, {"parent": 1, "token_ids": [3]}, {"parent": 0, "token_ids": [4]}), (),
        [([1, 2, 3], [0, 0, 1]), ([1, 2, 4], [0, 0, 1])],
    ),
    "one stream of weights": (
        weighted({"a": [0, 0.5]}, {"a": [2]}, {"a": [1]}, {"a": [-1]}), (),
        [([1, 2, 3, 4], [0, 0.5, 2, 1]), ([1, 2, 3, 5], [0, 0, 0, -1])],
    ),
    "a stream by name": (TWO, NAMED, [([1, 2, 3, 4], [0.5, 0, 2, 2])]),
    "a node without a value": (
        {"nodes": [*FORK["nodes"][:2], FORK["nodes"][2] | {"logprobs": [-4]}]},
        ("--carry", "logprobs:float32", "--carry-default", "logprobs=-7"),
        [([1, 2, 3, 4], [0, 0, -7, -4])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_of_a_record(name: str) -> None:
    record, options, expected = DOCUMENTS[name]
    write("a.jsonl", [record])
    run("a.jsonl", *options)
    column = options[1].partition(":")[0] if options else "loss_weights"
    ids, values = recover_documents("out"), recover_documents("out", column)
    assert [(ids[key].tolist(), values[key].tolist()) for key in sorted(ids)] == [*expected]


LOGPROBS = ("--carry", "logprobs:float32")
# what is wrong -> record, options, what is said
BAD: dict[str, tuple[Json, tuple[str, ...], str]] = {
    "no ids": (nodes_of(ROOT, {"parent": 0}), (), "the trace, node 1 has no token_ids"),
    "two parents": (
        nodes_of(ROOT, {"parent": [0, 1], "token_ids": [3]}), (), "node 1 has 2 parents",
    ),
    "no such parent": (
        nodes_of(ROOT, {"parent": 2, "token_ids": [3]}), (),
        "node 1: parent is 2, expected the number of a node, 0 to 1",
    ),
    "a cycle": (
        nodes_of(ROOT, {"parent": 2, "token_ids": [3]}, {"parent": 1, "token_ids": [3]}), (),
        "node 1 is in a cycle",
    ),
    "another mask": (
        nodes_of(ROOT, {"parent": 0, "token_ids": [3], "mask": [True, False]}), (),
        "node 1: mask has 2 values, token_ids 1",
    ),
    "other logprobs": (
        nodes_of(ROOT, {"parent": 0, "token_ids": [3, 4], "logprobs": [-1]}), LOGPROBS,
        "node 1: logprobs has 1 values, mask, of those that are true, 2",
    ),
    "no logprobs": (FORK, LOGPROBS, "node 1 has no logprobs, expected 1"),
    "other weights": (
        weighted({"a": [0, 0]}, {"a": [1, 1]}, {}, {}), (), "node 1: loss_weights has 2 values",
    ),
    "two streams": (TWO, (), "several loss_weights: a, b"),
    "no such stream": (FORK, NAMED, "node 1 has no loss_weights.b, expected 1, one for"),
    "an id that is none": (
        nodes_of(ROOT, {"parent": 0, "token_ids": [-1]}), (),
        "node 1: token_ids: Expected `int` >= 0 - at `$[0]`",
    ),
    "a reward of words": (
        FORK | {"rewards": {"a": {"score": "high"}}}, ("--where", "reward >= 0"),
        "a reward is 'high' times 1.0, expected two numbers",
    ),
    "no metric": (FORK, ("--carry", "metrics.x:int32"), "the trace: no value of 'metrics.x'"),
    "not of a type": (
        FLAT | {"logprobs": [-1, -2, -1e9]}, ("--carry", "logprobs:float16"),
        "logprobs holds -1000000000.0, which no float16 is",
    ),
    "no completion": ({"prompt_ids": [1], "completion_ids": None}, (),
                      "no lists of token ids, expected a prompt and what was sampled"),
    "a mask of 2": (
        FLAT | {"completion_mask": [1, 2, 1]}, (),
        "call 0: completion_mask: Expected `int` <= 1 - at `$[1]`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_a_bad_record(name: str) -> None:
    """Named by itself, and left out among good ones."""
    record, options, said = BAD[name]
    good = FLAT | {"reward": 1.0, "age": 0, "logprobs": [-1, -2, -3], "metrics": {"x": 1}}
    good |= {"loss_weights": {"b": [0, 1, 1]}} if options == NAMED else {}
    write("a.jsonl", [good, record, good])
    command = ["pack", "a.jsonl", "-l", 64, "-o", "out", "-q", *options]
    assert_error(packer(*command), 1, "a.jsonl, line 2 (byte ", said)
    succeeds(*command, "--on-error", "skip")
    assert check_directory("out")["rejected_records"] == 1
    assert len(recover_documents("out")) == 2


def _rewarded(score: float, **more: Any) -> Json:
    return FORK | {"rewards": {"a": {"score": score, "weight": 0.5}, "b": None}} | more


EPISODE = {
    "run": {"work": {"policy": {"start": 3, "end": 5}}},
    "traces": [_rewarded(1.0), _rewarded(3.0, metrics={"x": 0.25}, age=9), _rewarded(2.0, age=1),
               _rewarded(9.0, agent={"trainable": False}, nodes=[{"token_ids": []}])],
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "branches"),
    [
        ((), [0, 1, 2, 3, 4, 5]),
        (("--where", "reward >= 1"), [2, 3, 4, 5]),
        (("--where", "age <= 1"), [4, 5]),
        (("--where", "age <= 2"), [0, 1, 4, 5]),
        (("--where", "reward >= 1.2", "--where", "age <= 20"), [2, 3]),
    ],
)
def test_traces_are_left_out_and_counted(options: tuple[str, ...], branches: list[int]) -> None:
    """A branch keeps its number, whatever is left out beside it."""
    write("a.jsonl", [EPISODE])
    facts = run("a.jsonl", *options)
    assert sorted(position for _, position in recover_documents("out")) == branches
    assert facts["filtered_traces"] == 4 - len(branches) // 2
    told = packer("stats", "out").stdout
    assert re.search(rf"^traces +{facts['filtered_traces']}  left out by --where", told, re.M)
    assert f"with {len(branches):,} branches" in told


def test_records_of_all_forms_in_one_file() -> None:
    """What a later record calls its mask counts, too."""
    sampled = {"parent": 0, "token_ids": [5], "sampled": True, "mask": [True]}
    records: list[Json] = [
        {"prompt_ids": [1], "completion_ids": [2, 3], "completion_mask": [0, 1]},
        {"prompt_ids": [1], "completion_ids": [2, 3]},
        {"prompt_token_ids": [1], "response_ids": [2, 3], "response_mask": [1, 0]},
        {"nodes": [{"token_ids": [4]}, sampled]},
    ]
    names = dict.fromkeys(name for one in records for name in one)
    write("a.parquet", [dict.fromkeys(names) | one for one in records])  # a row has all columns
    run("a.parquet")
    weights = [one.tolist() for _, one in sorted(recover_documents("out", "loss_weights").items())]
    assert weights == [[0, 0, 1], [0, 1, 1], [0, 1, 0], [0, 1]]


def test_other_fields_tell_rewards_and_ages() -> None:
    write("a.jsonl", [FLAT | {"info": {"score": score}} for score in (1, 2)])
    fields = (
        "--field",
        "reward=info.score",
        "--where",
        "reward >= 1.5",
        "--carry",
        "reward:float32",
    )
    assert run("a.jsonl", *fields)["filtered_traces"] == 1
    shown = json.loads(packer("show", "out", 0, "--json").stdout)
    assert "branch 0" in packer("show", "out", 0).stdout
    assert shown["segments"][0]["branch"] == 0


@pytest.mark.parametrize(
    ("files", "options", "code", "said"),
    [
        (("a.jsonl",), ("--turns", "each"), 2, "--turns applies only to chat records"),
        (("a.jsonl",), ("--eos",), 2, "are not for token ids"),
        (("a.jsonl", "text.jsonl"), (), 1, "text.jsonl: holds text, a.jsonl holds trace"),
        (("a.jsonl",), ("--carry", "logprobs:float32/record"), 2, "a value of each token"),
        (("a.jsonl",), ("--carry", "reward:float32/token"), 2, "a value of each record"),
        (("a.jsonl",), ("--carry", "loss_weights:bool"), 2, "loss_weights has floats"),
        (("a.jsonl",), ("--overlong", "split"), 2, "records of shape trace must not be cut"),
        (("a.csv",), ("--shape", "trace"), 1, "records of shape trace hold lists"),
    ],
)
def test_what_does_not_go_with_traces(
    files: tuple[str, ...], options: tuple[str, ...], code: int, said: str
) -> None:
    write("a.jsonl", [FLAT])
    write("text.jsonl", [{"text": "a"}])
    Path("a.csv").write_text("prompt_ids,completion_ids\n1,2\n")
    assert_error(packer("pack", *files, "-l", 64, "-q", "-o", "out", *options), code, said)


def test_records_of_ids_beside_traces_have_the_weight_1() -> None:
    """What the tip says; with 0 they would not be trained on."""
    write("a.jsonl", [FLAT])
    write("b.jsonl", [{"input_ids": [1, 2], "labels": [-100, 2]}])
    for name in "ab":
        succeeds("tokenize", f"{name}.jsonl", "-q", "-o", name)
    command = ["pack", "a", "b", "-l", 64, "-q", "-o", "out"]
    refused = packer(*command)
    assert_error(refused, 2, "a carries loss_weights, b does not")
    default = refused.stderr.rpartition("--carry-default ")[2].strip()
    succeeds(*command, "--carry-default", default)
    assert sorted(one.tolist() for one in recover_documents("out", "loss_weights").values()) == [
        [0, 0, 1, 1, 1], [1, 1],
    ]  # fmt: skip


def test_what_fits_another_shape_is_no_trace_unless_it_is_asked_for() -> None:
    both = FLAT | {"prompt": "a", "completion": "b"}
    write("a.jsonl", [both])
    assert "traces" not in run("a.jsonl", "-t", "bytes")
    assert run("a.jsonl", "--shape", "trace")["traces"] == 1


def test_a_template_that_gives_other_ids_is_told(tmp_path: Path) -> None:
    """Of ids that the template gives, of a turn that was cut off, and of a word put otherwise; and
    of calls of tools as verifiers has them, of some that the model wrote badly, and a message that
    is none. A branch that lacks a message is not compared.
    """
    folder = chat_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(locate(str(folder)))
    call = {"id": "1", "name": "rain", "arguments": '{"at": "Oslo"}'}
    written = '<call>{"name": "rain", "arguments": {"at": "Oslo"}}</call>'
    said = [("Yes.", "Yes.<|im_end|>"), ("Yes.", "Yes."), ("Yes.", "Ye" + "s!<|im_end|>"),
            ([call], f"{written}<|im_end|>"), (7, "Yes.<|im_end|>"),
            ([call | {"arguments": '{"at": Oslo'}], f"{written}<|im_end|>"),
            ([7], f"{written}<|im_end|>")]  # fmt: skip
    asked, records = "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n", []
    for answer, text in said:
        ids = [tokenizer.encode_bare([one])[0].tolist() for one in (asked, text)]
        message = {"role": "assistant", "content": "" if isinstance(answer, list) else answer}
        message |= {"tool_calls": answer} if isinstance(answer, list) else {}
        records.append(nodes_of(
            {"token_ids": ids[0], "message": {"role": "user", "content": "Rain?"}},
            {"parent": 0, "token_ids": ids[1], "message": message},
        ))  # fmt: skip
    without = {"parent": 0, "token_ids": [5]}  # nothing to render
    records.append(nodes_of(records[0]["nodes"][0], without))
    write("a.jsonl", records)
    facts = run("a.jsonl", "-t", folder)
    assert (facts["compared_branches"], facts["drifted_branches"]) == (7, 4)
    assert "of 7 branches compared" in packer("stats", "out").stdout
    succeeds("verify", "out", "--against-inputs")


def test_a_run_that_leaves_out_all_traces_says_so() -> None:
    write("a.jsonl", [EPISODE])
    result = packer("pack", "a.jsonl", "-l", 64, "-q", "-o", "out", "--where", "reward >= 99")
    assert_error(
        result, 1, "0 rejected records, 4 traces left out, 6 documents left out by --where"
    )
    assert "check --shape, --field, --role, --where" in result.stderr
