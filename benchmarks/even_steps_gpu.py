"""Do steps take as long as their costs say, on a GPU, in random and in even order?

512 rows of 32,768 tokens, log-normal documents, each timed through a transformer block of width
4,096, forward and backward; 64 simulated ranks with a row each wait for the slowest. In the peers'
environment (peers/even_steps_gpu.py), with flash-attn where it is installed; without a GPU it says
so. A minute.

    python benchmarks/even_steps_gpu.py --device cpu --length 512 --hidden 64 --ranks 8

does the same with tiny sizes on a CPU: a test of this benchmark, and no figure for a GPU.
"""

from __future__ import annotations

import json
import sys

from measuring import report, run, skip
from settings import BENCHMARKS, from_environment

WHAT = "steps of 64 simulated ranks through a transformer block, costliest against mean rank"


def main() -> None:
    settings, options = from_environment(), sys.argv[1:]
    why = "" if settings.peers_python.is_file() else "no peers' environment: make peers"
    found = {}
    if not why:
        script = BENCHMARKS / "peers" / "even_steps_gpu.py"
        found = json.loads(run([settings.peers_python, script, *options]).stdout)
        why = found.get("skipped", "")
    for order in ("random order", "even order"):
        if why:
            skip(f"{WHAT}, {order}", "as predicted", why)
            continue
        predicted, measured = found[order]
        note = "" if "--device" not in options else f", on a {found['device']} with {options}"
        report(f"{WHAT}, {order}{note}", "as predicted",
               f"predicted {predicted:.2f}, measured {measured:.2f}",
               abs(measured / predicted - 1) < 0.1, **found)  # fmt: skip


if __name__ == "__main__":
    main()
