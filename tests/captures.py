"""Captures of agents, for tests and for the benchmark.

    python tests/captures.py FILE BYTES

writes about so many bytes of sessions, a record for each, whose prompts grow to 8,000 tokens.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any, NamedTuple

from traces import branches_of

Json = dict[str, Any]
IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")
GYM_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TINKER_IDS = ("prompt_tokens", "sampled_tokens", "logprobs")


class Call(NamedTuple):
    """One call: what the model saw, what it sampled, and values of that."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]

    def named(self, names: tuple[str, ...] = IDS) -> Json:
        return dict(zip(names, self, strict=True))


def tree(chance: random.Random, calls: int) -> tuple[list[Json], list[Call]]:
    """A random tree of nodes, as verifiers has them, and the calls that show it, in any order.

    Each node begins with another token, or it would not be clear which one a prompt goes on with.
    """
    nodes, made = list[Json](), list[Call]()

    def add(parent: int | None, *, sampled: bool) -> int:
        ids = [1000 + len(nodes), *(chance.randrange(9) for _ in range(chance.randrange(4)))]
        logprobs = [-round(chance.random(), 6) for _ in ids] if sampled else []
        node = {"token_ids": ids, "mask": [sampled] * len(ids), "logprobs": logprobs}
        nodes.append(node | {"sampled": sampled} | ({} if parent is None else {"parent": parent}))
        return len(nodes) - 1

    for _ in range(calls):
        at = None
        if nodes and chance.random() < 0.95:
            at = chance.choice((len(nodes) - 1, chance.randrange(len(nodes))))
        if at is None or chance.random() < 0.7:
            at = add(at, sampled=False)
        prompt, sampled, logprobs = path_ids(nodes, at), list[int](), list[float]()
        for _ in range(chance.choice((0, 1, 1, 1, 2, 2))):  # others may fork between two
            at = add(at, sampled=True)
            sampled += nodes[at]["token_ids"]
            logprobs += nodes[at]["logprobs"]
        made.append(Call(prompt, sampled, logprobs))
    chance.shuffle(made)
    return nodes, made


def path_ids(nodes: list[Json], node: int | None) -> list[int]:
    """The ids from the root to a node."""
    ids = list[int]()
    while node is not None:
        ids = nodes[node]["token_ids"] + ids
        node = nodes[node].get("parent")
    return ids


def leaves(nodes: list[Json]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Ids from the root to each leaf, and log-probabilities, 0 where nothing was sampled."""
    ways = []
    for way in branches_of({"nodes": nodes}):
        each = [nodes[node]["logprobs"] or [0.0] * len(nodes[node]["token_ids"]) for node in way]
        ways.append((tuple(path_ids(nodes, way[-1])), tuple(chain.from_iterable(each))))
    return ways


def drifted(calls: list[Call]) -> list[int]:
    """The calls that drifted, by their definition: the longest prompt that theirs begins with is
    not followed by all that was sampled then, nor does theirs end within what was.
    """
    found = list[int]()
    for number, (prompt, *_) in enumerate(calls):
        before = [one for one in calls if prompt[: len(one.prompt)] == one.prompt and one.sampled]
        asked = max(
            (len(one.prompt) for one in before if len(one.prompt) < len(prompt)), default=-1
        )
        wholes = [(len(one.prompt), one.prompt + one.sampled) for one in before]
        is_followed = any(
            size < len(prompt) and (
                prompt == whole[: len(prompt)]
                or (len(whole) > asked and prompt[: len(whole)] == whole)
            )
            for size, whole in wholes
        )  # fmt: skip
        found += [number] * (asked >= 0 and not is_followed)
    return found


# name of a form -> a session as records
def _plain(name: str, calls: list[Call]) -> list[Json]:
    return [{"session_id": name, "calls": [one.named() for one in calls]}]


def _each(name: str, calls: list[Call]) -> list[Json]:
    return [{"session_id": name} | one.named() for one in calls]


def _switchyard(name: str, calls: list[Call]) -> list[Json]:
    return [
        {"uuid": str(number), "proxy_x_session_id": name, "is_valid": True,
         "messages": [{"role": "user", "content": "Go on."}], "token_count": {"prompt": 1}}
        | one.named(GYM_IDS)
        for number, one in enumerate(calls)
    ]  # fmt: skip


def _atif(name: str, calls: list[Call]) -> list[Json]:
    """With a copied step, one that no model made, and an agent's own call."""
    copied = {"source": "agent", "message": "", "is_copied_context": True,
              "metrics": Call([1], [2], [0.5]).named()}  # fmt: skip
    steps = [{"source": "user", "message": "Go on."}, copied,
             {"source": "agent", "message": "", "llm_call_count": 0}]  # fmt: skip
    for one in calls:
        metrics = {"prompt_tokens": len(one.prompt), **one.named()}
        steps.append({"source": "agent", "message": "", "metrics": metrics, "llm_call_count": 1})
    return [{"schema_version": "ATIF-v1.7", "session_id": "run", "trajectory_id": name,
             "agent": {"name": "a", "version": "1"}, "steps": steps}]  # fmt: skip


def _gym(name: str, calls: list[Call]) -> list[Json]:
    output = list[Json]()
    for number, one in enumerate(calls):
        output += [
            {"type": "reasoning", "id": f"r{number}", "summary": []},
            {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}
            | one.named(GYM_IDS),
            {"type": "function_call_output", "call_id": f"c{number}", "output": name},
        ]
    params = {"input": [{"role": "user", "content": "Go on."}]}
    return [{"responses_create_params": params, "response": {"id": name, "output": output},
             "question": "Go on.", "reward": 1.0}]  # fmt: skip


def _tinker(name: str, calls: list[Call]) -> list[Json]:
    place = {"run_id": "r", "run_attempt": None, "split": "train", "iteration": 1}
    return [
        {"cursor": number, **place, "group_idx": 0, "traj_idx": int(name), "seq_id": number,
         "policy_version": "3"} | one.named(TINKER_IDS)
        for number, one in enumerate(calls)
    ]  # fmt: skip


FORMS: dict[str, Callable[[str, list[Call]], list[Json]]] = {
    "a record a session": _plain, "a record a call": _each, "Switchyard": _switchyard,
    "ATIF": _atif, "NeMo Gym": _gym, "tinker-cookbook": _tinker,
}  # fmt: skip


def long_sessions(calls: int = 12, tokens: int = 640) -> Iterator[Json]:
    """Sessions in which a tool's result follows each answer, and few prompts drop a part of it."""
    chance = random.Random(0)

    def some() -> list[int]:
        return [chance.randrange(151_000) for _ in range(chance.randrange(1, tokens))]

    for number in count():
        ids, made = [chance.randrange(151_000) for _ in range(tokens)], list[Json]()
        for _ in range(calls):
            sampled = some()
            made.append(Call(ids, sampled, [-chance.expovariate(2) for _ in sampled]).named())
            kept = sampled if chance.random() < 0.95 else sampled[len(sampled) // 2 :]
            ids = ids + kept + some()
        yield {"session_id": f"s{number}", "calls": made, "reward": number % 2}


def main(path: str, most: int) -> None:
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        for session in long_sessions():  # more than there is room for
            size += file.write(json.dumps(session, separators=(",", ":")) + "\n")
            if size >= most:
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
