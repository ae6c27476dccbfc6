"""How do other packers' plans compare, in time and in rows, on the same lengths?

TRL's `_pack_bfd` on 200,000 documents (about 10 seconds), seqpacker where it installs, both in
the peers' environment (peers/plan.py), packer here, each in a process of its own.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from measuring import best_of, report, run, skip
from plan_speed import log_normal_lengths
from settings import BENCHMARKS, from_environment

from packer_cli import plan_packing

DOCUMENTS, MAX_LENGTH = 200_000, 4096
PEERS = ("TRL _pack_bfd", "seqpacker")


def main() -> None:
    settings = from_environment()
    name = f"plan, {DOCUMENTS // 1000}k documents, L = {MAX_LENGTH}"
    if settings.quick or not settings.peers_python.is_file():
        why = "quick" if settings.quick else "no peers' environment: make peers"
        for peer in PEERS:
            skip(f"{name}, against {peer}", "faster, no more rows", why)
        return
    lengths = log_normal_lengths(DOCUMENTS, MAX_LENGTH)
    ours = best_of(10, lambda: plan_packing(lengths, MAX_LENGTH)) / DOCUMENTS * 1e9
    rows = len(plan_packing(lengths, MAX_LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lengths.npy")
        np.save(path, lengths)
        script = BENCHMARKS / "peers" / "plan.py"
        command: list[str | Path] = [settings.peers_python, script, path, str(MAX_LENGTH)]
        found = json.loads(run(command).stdout)
    for peer in PEERS:
        what = f"{name}, against {peer}"
        theirs = found[peer]
        if "skipped" in theirs:
            skip(what, "faster, no more rows", theirs["skipped"])
            continue
        ratio = theirs["ns_a_document"] / ours
        report(
            what,
            "faster, no more rows",
            f"{ratio:,.0f} x ({ours:.1f} and {theirs['ns_a_document']:,.0f} ns), "
            f"{rows:,} and {theirs['rows']:,} rows",
            ratio > 1 and rows <= theirs["rows"],
            ratio=ratio,
            ns_a_document=ours,
            rows=rows,
            theirs=theirs,
        )


if __name__ == "__main__":
    main()
