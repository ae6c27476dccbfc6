"""Changes to a finished result that no digest shows: whatever holds a digest is made anew.

result = Result("out")
result.manifest["seed"] = 5          # the parsed manifest, the parsed lines of units.jsonl
result.save()
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli.packing.attention_cost import squared_sums
from packer_cli.packing.lower_bound import lower_bound_rows
from packer_cli.result.counts import Counts, FileCounts
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.manifest import TOTALS
from packer_cli.result.manifest_bytes import to_bytes
from packer_cli.result.manifest_check import why_incomplete
from packer_cli.result.reader import segments_of
from packer_cli.result.saved_dataset import saved_dataset
from packer_cli.result.squared_lengths import header

UNITS = "units.jsonl"


class Result:
    """A result that is to be changed. `name`: of its manifest's file."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        (self.name,) = (path.name for path in self.path.glob("manifest*.json"))
        self.manifest: dict[str, Any] = json.loads(self.read(self.name))
        self.records: list[dict[str, Any]] = [
            json.loads(line) for line in self.read(UNITS).splitlines()
        ]
        self.kept = set[str]()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Replace a side file or a shard; `save` leaves these bytes alone."""
        (self.path / name).write_bytes(data)
        self.kept.add(name)
        for shard in self.manifest["shards"]:
            if shard["file"] == name:
                shard.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def record(self, unit: int) -> dict[str, Any]:
        (record,) = (one for one in self.records if one["unit"] == unit)
        return record

    def add(self, name: str, more: int, unit: int = 0) -> None:
        """To a figure, of the whole and of one unit."""
        self.manifest[name] += more
        counts = self.record(unit)["counts"]
        counts[name] = counts.get(name, 0) + more
        if name in ("truncated_tokens", "dropped_tokens"):
            counts["encoded_tokens"] += more
            if "incomplete" in self.manifest:
                names = ("tokens", "truncated_tokens", "dropped_tokens")
                self.manifest["incomplete"] = why_incomplete(
                    self.manifest["config"]["max_loss"], *(self.manifest[one] for one in names)
                )

    def add_to_input(self, name: str, more: int, file: int = 0, unit: int = 0) -> None:
        """The same of one input, and of the whole."""
        self.add(name, more, unit)
        self.manifest["inputs"][file][name] += more
        files = self.record(unit)["counts"]["files"]
        (place,) = (place for place, one in enumerate(files) if one[0] == file)
        counts = FileCounts(*files[place][1:])
        setattr(counts, name, getattr(counts, name) + more)
        files[place] = [file, *counts.as_json()]

    def sum_up(self) -> None:
        """Have the totals follow from the units' records."""
        manifest, config = self.manifest, self.manifest["config"]
        total = Counts(piece_length=np.zeros(config["max_length"] + 1, np.int64))
        for record in self.records:
            total.add(Counts.from_json(record["counts"]))
        slots = total.rows * config["max_length"]
        manifest |= {name: getattr(total, name) for name in TOTALS}
        manifest |= {
            "rows": total.rows,
            "padding_tokens": slots - total.tokens,
            "utilization": total.tokens / slots,
            "lower_bound_rows": lower_bound_rows(
                total.piece_length, config["max_length"],
                max_segments=config["max_segments_per_row"],
                segment_multiple=config["segment_multiple"],
            ),
        }  # fmt: skip
        for name in manifest["histograms"]:
            manifest["histograms"][name] = getattr(total, name).tolist()
        for name in manifest.get("attention_cost", {}):
            manifest["attention_cost"][name] = getattr(total, f"attention_{name}").as_json()
        for index, one in enumerate(manifest["inputs"]):
            one.update(vars(total.file(index)))

    def save(self) -> None:
        """Write what was changed, with all that follows from it."""
        manifest, shards = self.manifest, self.manifest["shards"]
        for record in self.records:
            own = [shard for shard in shards if shard["unit"] == record["unit"]]
            record["shards"] = own
            for index, one in enumerate(record.get("inputs", [])):
                source = manifest["inputs"][one[0]]
                record["inputs"][index] = [one[0], source["size"], source["sha256"]]
        made = {UNITS: b"".join(json.dumps(record).encode() + b"\n" for record in self.records)}
        identity = "".join(shard["sha256"] for shard in shards)
        made |= saved_dataset((shard["file"] for shard in shards), identity)
        if SQUARED_LENGTHS in manifest["side_files"] and (sums := self._squared_lengths()):
            made[SQUARED_LENGTHS] = sums
        for name, data in made.items():
            if name not in self.kept:
                (self.path / name).write_bytes(data)
        manifest["side_files"] = {
            name: hashlib.sha256(self.read(name)).hexdigest() for name in manifest["side_files"]
        }
        (self.path / self.name).write_bytes(to_bytes(manifest))

    def _squared_lengths(self) -> bytes:
        """The side file of these shards; b"" if a test has damaged one."""
        sums = list[np.ndarray[Any, Any]]()
        try:
            for shard in self.manifest["shards"]:
                with pa.ipc.open_stream(self.read(shard["file"])) as batches:
                    for batch in batches:
                        _, length, offsets = segments_of(batch)
                        sums.append(squared_sums(length, offsets))
        except (pa.ArrowException, KeyError, ValueError, IndexError, OSError):
            return b""
        return header(sum(map(len, sums))) + b"".join(one.tobytes() for one in sums)
