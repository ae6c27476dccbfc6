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
from msgspec.structs import asdict, astuple

from packer_cli.packing.figures import squared_sums
from packer_cli.result.counts import Counts, InputTotals
from packer_cli.result.layout import SQUARED_LENGTHS, saved_dataset
from packer_cli.result.manifest import Manifest, to_bytes, why_incomplete
from packer_cli.result.reader import segments_of, squares_header
from packer_cli.run.finalize import totals_of_rows

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
        self.manifest[name] = self.manifest.get(name, 0) + more
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
        counts = InputTotals(*files[place][1:])
        setattr(counts, name, getattr(counts, name) + more)
        files[place] = [file, *astuple(counts)]

    def sum_up(self) -> None:
        """Have the totals follow from the units' records."""
        config = Manifest.of(self.manifest).config
        total = Counts(piece_length=np.zeros(config.max_length + 1, np.int64))
        for record in self.records:
            total.add(Counts.from_json(record["counts"]))
        self.manifest |= totals_of_rows(config, total)
        for index, one in enumerate(self.manifest["inputs"]):
            one.update(asdict(total.file(index)))

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
        files = [shard["file"] for shard in shards if not shard["file"].startswith("index")]
        made |= saved_dataset(files, identity)
        if SQUARED_LENGTHS in manifest["side_files"] and (sums := self._squared_lengths()):
            made[SQUARED_LENGTHS] = sums
        for name, data in made.items():
            if name not in self.kept:
                (self.path / name).write_bytes(data)
        manifest["side_files"] = {
            name: hashlib.sha256(self.read(name)).hexdigest() for name in manifest["side_files"]
        }
        manifest["side_file_bytes"] = {
            name: len(self.read(name)) for name in manifest["side_files"]
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
        return squares_header(sum(map(len, sums))) + b"".join(one.tobytes() for one in sums)
