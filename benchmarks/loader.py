"""How fast do packed rows come out of a DataLoader?

66 MB of text, packed into rows of 4,096, are read from a warm page cache in random order, in
batches of 8, in one process: by PackedDataset, by `datasets` in torch format through the same
DataLoader, and by plain numpy from the same maps without any loader. All of it in the peers'
environment (peers/loader.py), which has torch. Half a minute.
"""

from __future__ import annotations

import json

import inputs
from measuring import report, run, skip
from runs import MAX_LENGTH, pack
from settings import BENCHMARKS, from_environment

LEAST, MOST = 30, 2
SAME, ALL, PLAIN = "ids, labels and mask", "every column", "a plain numpy gather"


def main() -> None:
    settings = from_environment()
    what = f"loader, rows of {MAX_LENGTH:,} in batches of 8"
    targets = {
        f"{what}: {SAME}, against datasets": f">= {LEAST} x the rows/s",
        f"{what}: {ALL}, against datasets": f">= {LEAST} x the rows/s",
        f"{what}, against {PLAIN}": f"<= {MOST} x its time",
    }
    why = inputs.missing(settings)
    if not settings.peers_python.is_file():
        why = "no peers' environment: make peers"
    if not why:
        with inputs.Output(settings) as output:
            pack(settings, inputs.once(settings), output, tokenizer=settings.tokenizer)
            script = BENCHMARKS / "peers" / "loader.py"
            found = json.loads(run([settings.peers_python, script, output]).stdout)
    if why:
        for row, target in targets.items():
            skip(row, target, why)
        return
    rates = found["rows_per_second"]
    for (row, target), columns in zip(targets.items(), ("same", "all"), strict=False):
        ours, theirs = rates[f"packer, {columns}"], rates[f"datasets, {columns}"]
        measured = f"{ours / theirs:.1f} x ({ours:,.0f} and {theirs:,.0f} rows/s)"
        report(row, target, measured, ours >= LEAST * theirs, **found)
    ours, plain = rates["packer, same"], rates["numpy, same"]
    measured = f"{plain / ours:.2f} x ({ours:,.0f} and {plain:,.0f} rows/s)"
    row, target = list(targets.items())[2]
    report(row, target, measured, plain <= MOST * ours, **found)
    for name in ("varlen_collate", "varlen_collate, int32", "padded_collate"):
        rate = rates[name]
        report(f"{what}: {name}", "", f"{rate:,.0f} rows/s, {rate * MAX_LENGTH / 1e6:,.0f} Mtok/s",
               None, rows_per_second=rate)  # fmt: skip


if __name__ == "__main__":
    main()
