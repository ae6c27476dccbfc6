"""`packer plan` beside `packer pack`: what is planned is what is packed, figure by figure.

assert_planned(["data.jsonl"], [512, 1024], ["best-fit", "wrap"], "--overlong", "truncate")
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support import packer, succeeds

from packer_cli import open_packed
from packer_cli.result.rules import segments_in

# Of `packer stats`, what a result is made of rather than what is in it; and what it warns of.
_ORIGIN = {"directory", "inputs", "tokenizer", "chat_template", "config", "warnings"}


def planned(*arguments: object, **run: Any) -> dict[str, Any]:
    """The JSON of a plan that succeeds."""
    result = succeeds("plan", *arguments, "--json", "-q")
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def assert_planned(
    inputs: Sequence[object],
    lengths: Sequence[int],
    strategies: Sequence[str],
    *options: object,
    out: Path = Path("out"),
) -> dict[str, Any]:
    """Pack at every length in every way, and assert that the plan has the same figures. Gives the
    plan.
    """
    ways = ["-l", ",".join(map(str, lengths)), "--strategy", ",".join(strategies)]
    plan = planned(*inputs, *ways, *options)
    outcomes = plan["outcomes"]
    assert [(one["strategy"], one["max_length"]) for one in outcomes] == [
        (strategy, length) for strategy in strategies for length in lengths
    ]
    for outcome in outcomes:
        shutil.rmtree(out, ignore_errors=True)
        way = ["-l", outcome["max_length"], "--strategy", outcome["strategy"]]
        result = packer("pack", *inputs, *way, *options, "-q", "--json", "-o", out)
        if not outcome["rows"]:
            assert "nothing to pack" in result.stderr
            continue
        assert result.exit_code == 0, result.stderr
        figures = {k: v for k, v in json.loads(result.stdout).items() if k not in _ORIGIN}
        assert len(figures) > 25
        assert {name: outcome.get(name) for name in figures} == figures, way
        assert _of_segments(out) == {name: outcome[name] for name in _of_segments(out)}
        assert outcome["segments_per_row"] == figures["segments"] / figures["rows"]
        files = sum(path.stat().st_size for path in out.glob("shard-*.arrow"))
        assert outcome["bytes"] == files
    shutil.rmtree(out, ignore_errors=True)
    return plan


def _of_segments(directory: Path) -> dict[str, Any]:
    """What no manifest holds, from the shards: documents in several segments, and the number of
    tokens in the segment of the average token.
    """
    packed = open_packed(directory)
    parts = [
        segments_in(batch) for shard in packed.manifest["shards"] for batch in packed.batches(shard)
    ]
    file, position, _, length = np.concatenate(parts, axis=1)
    _, counts = np.unique(np.stack([file, position]), axis=1, return_counts=True)
    return {
        "cut_documents": int((counts > 1).sum()),
        "attention_span": int((length**2).sum()) / int(length.sum()),
    }
