"""Episodes of agents as the verifiers package writes them, for tests and for the benchmark.

    python tests/traces.py FILE BYTES TOKENS

writes about so many bytes of them, with so many tokens in a node on average.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
WORDS = [
    "read",
    "the",
    "file",
    "and",
    "say",
    "what",
    "is",
    "in",
    "it",
    "run",
    "all",
    "tests",
    "again",
]


def node(chance: random.Random, parent: int | None, tokens: int, *, sampled: bool) -> Json:
    """A message. Of a sampled one the beginning is the template's, and the rest the model's."""
    size = chance.randrange(1, 2 * tokens)
    own = chance.randrange(1, size + 1) if sampled else 0
    ids = [chance.randrange(1, 151_000) for _ in range(size)]
    words = " ".join(chance.choice(WORDS) for _ in range(size))
    made: Json = {} if parent is None else {"parent": parent}
    made |= {
        "message": {"role": "assistant" if sampled else "user", "content": words},
        "sampled": sampled,
        "timestamp": 1.76e9,
        "token_ids": ids,
        "mask": [False] * (size - own) + [True] * own,
        "is_content": [],
        "logprobs": [-chance.expovariate(2) for _ in range(own)],
    }
    if sampled:
        made["advantages"] = [chance.choice((-0.5, 0.25, 1.5))] * own
    return made


def trace(chance: random.Random, number: int, tokens: int, turns: int = 6) -> Json:
    """A graph of messages: a question, answers with what tools say, and forks anywhere."""
    nodes = [node(chance, None, tokens, sampled=False)]
    for _ in range(chance.randrange(1, turns)):
        parent = len(nodes) - 1 if chance.random() < 0.7 else chance.randrange(len(nodes))
        nodes.append(node(chance, parent, tokens, sampled=True))
        if chance.random() < 0.5:
            nodes.append(node(chance, len(nodes) - 1, tokens, sampled=False))
            if chance.random() < 0.9:  # or nobody answers
                nodes.append(node(chance, len(nodes) - 1, tokens, sampled=True))
    return {
        "version": 1, "id": f"t{number}", "task": {"type": "Task", "data": {"prompt": "do it"}},
        "agent": {"config": {}, "name": "solver", "trainable": True}, "tools": [], "nodes": nodes,
        "rewards": {"right": {"score": number % 3 / 2, "weight": 1.0}, "short": None},
        "metrics": {"turns": len(nodes)}, "info": {}, "ok": True, "errors": [],
    }  # fmt: skip


def episodes(branches: int, tokens: int = 20, seed: int = 0) -> Iterator[Json]:
    """Episodes of one or two traces, until they have so many branches."""
    chance, number = random.Random(seed), 0
    while branches > 0:
        own = [trace(chance, number + i, tokens) for i in range(chance.randrange(1, 3))]
        number += len(own)
        branches -= sum(len(branches_of(one)) for one in own)
        work = {"type": "train", "step": number, "policy": {"start": 5, "end": 5 + number % 4}}
        yield {"id": f"e{number}", "env": {"id": "shell"}, "ok": True, "errors": [],
               "run": {"type": "train", "id": "r", "work": work}, "traces": own}  # fmt: skip


def branches_of(trace: Json) -> list[list[int]]:
    """The nodes of each branch from the root on, in the order of leaves."""
    nodes = trace["nodes"]
    parents = {one.get("parent") for one in nodes}
    paths = list[list[int]]()
    for leaf in range(len(nodes)):
        if leaf not in parents:
            path = [leaf]
            while (parent := nodes[path[0]].get("parent")) is not None:
                path.insert(0, parent)
            paths.append(path)
    return paths


def main(path: str, most: int, tokens: int) -> None:
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        for one in episodes(most, tokens):  # more branches than there is room for
            size += file.write(json.dumps(one, separators=(",", ":")) + "\n")
            if size >= most:
                return


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
