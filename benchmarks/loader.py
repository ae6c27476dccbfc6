"""How fast do packed rows come out of a DataLoader?

66 MB of text, packed into rows of 4,096, are read from a warm page cache in random order, in
batches of 8, in one process: by PackedDataset, by `datasets` in torch format through the same
DataLoader, and by plain numpy from the same maps without any loader; by PackedDataset from a view
of the same text, tokenized. All of it in the peers' environment (peers/loader.py), which has torch.
Half a minute.
"""

from __future__ import annotations

import json
from pathlib import Path

import inputs
from measuring import report, run, skip
from runs import MAX_LENGTH, pack
from settings import BENCHMARKS, Settings, from_environment

MOST, OF_SHARDS = 2, 0.5
SAME, ALL, PLAIN = "ids, labels and mask", "every column", "a plain numpy gather"


def main() -> None:
    settings = from_environment()
    what = f"loader, rows of {MAX_LENGTH:,} in batches of 8"
    targets = {
        f"{what}: {SAME}, against datasets": "",
        f"{what}: {ALL}, against datasets": "",
        f"{what}, against {PLAIN}": f"<= {MOST} x its time",
        f"{what}: {SAME}, from a view": f">= {OF_SHARDS} x the rows/s from shards",
        f"{what}: {ALL}, from a view": f">= {OF_SHARDS} x the rows/s from shards",
    }
    why = inputs.missing(settings)
    if not settings.peers_python.is_file():
        why = "no peers' environment: make peers"
    if not why:
        with inputs.Output(settings) as output:
            pack(settings, inputs.once(settings), output, tokenizer=settings.tokenizer)
            view = view_of(settings, output.parent)
            script = BENCHMARKS / "peers" / "loader.py"
            found = json.loads(run([settings.peers_python, script, output, view]).stdout)
    if why:
        for row, target in targets.items():
            skip(row, target, why)
        return
    rates = found["rows_per_second"]
    for (row, target), columns in zip(targets.items(), ("same", "all"), strict=False):
        ours, theirs = rates[f"packer, {columns}"], rates[f"datasets, {columns}"]
        measured = f"{ours / theirs:.1f} x ({ours:,.0f} and {theirs:,.0f} rows/s)"
        report(row, target, measured, None, **found)
    ours, plain = rates["packer, same"], rates["numpy, same"]
    measured = f"{plain / ours:.2f} x ({ours:,.0f} and {plain:,.0f} rows/s)"
    row, target = list(targets.items())[2]
    report(row, target, measured, plain <= MOST * ours, **found)
    for (row, target), columns in zip(list(targets.items())[3:], ("same", "all"), strict=True):
        view, shards = rates[f"view, {columns}"], rates[f"packer, {columns}"]
        measured = f"{view / shards:.2f} x ({view:,.0f} and {shards:,.0f} rows/s)"
        report(row, target, measured, view >= OF_SHARDS * shards, **found)
    for name in ("varlen_collate", "padded_collate"):
        rate = rates[name]
        report(f"{what}: {name}", "", f"{rate:,.0f} rows/s, {rate * MAX_LENGTH / 1e6:,.0f} Mtok/s",
               None, rows_per_second=rate)  # fmt: skip


def view_of(settings: Settings, folder: Path) -> Path:
    """The same text tokenized, and a view of it."""
    tokens, view = folder / "tokens", folder / "view"
    begin: list[str | Path] = [settings.packer, "tokenize", *inputs.once(settings)]
    run([*begin, "--tokenizer", settings.tokenizer, "--output", tokens, "--quiet"])
    length = ["--max-length", str(MAX_LENGTH)]
    run([settings.packer, "pack", tokens, *length, "--view", "--output", view, "--quiet"])
    return view


if __name__ == "__main__":
    main()
