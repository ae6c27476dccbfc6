"""How fast do batches get to the GPU: by to_device, pageable, and pinned anew for each batch?

The same 64 batches of 8 rows of 4,096 tokens, collated before the clock starts; int64 for the two
usual ways, int32 for to_device, which widens on the GPU. In the peers' environment
(peers/to_device.py); without a GPU it says so. A few seconds.
"""

from __future__ import annotations

import json

from measuring import report, run, skip
from settings import BENCHMARKS, from_environment

WHAT = "batches of 8 x 4,096 tokens to the GPU"


def main() -> None:
    settings = from_environment()
    why = "" if settings.peers_python.is_file() else "no peers' environment: make peers"
    found = {}
    if not why:
        script = BENCHMARKS / "peers" / "to_device.py"
        found = json.loads(run([settings.peers_python, script]).stdout)
        why = found.get("skipped", "")
    for way in ("pageable", "pinned for each batch"):
        if why:
            skip(f"{WHAT}, against {way}", "faster", why)
            continue
        ours, theirs = found["to_device"], found[way]
        measured = f"{ours / theirs:.1f} x ({ours / 1e6:,.0f} and {theirs / 1e6:,.0f} Mtok/s)"
        report(f"{WHAT}, against {way}", "faster", measured, ours > theirs,
               gpu=found["gpu"], tokens_per_second=ours, theirs=theirs)  # fmt: skip


if __name__ == "__main__":
    main()
