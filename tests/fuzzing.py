"""Damages a result in one of many ways and reads it by every command; run by test_fuzz.py.

    python tests/fuzzing.py DIR FIRST COUNT

Prints a line before each mutation, so that a crash has a name, and a line for each failure: an
exception, an exit code of ours (3), or damage that verify does not see. The number of a mutation
is its seed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from typer.testing import CliRunner

from packer_cli.cli.app import app
from packer_cli.result.manifest import to_bytes

MANIFEST = "manifest.json"
SIDE_FILES = (
    "units.jsonl",
    "state.json",
    "dataset_info.json",
    "rejected.jsonl",
    "squared_lengths.npy",
)
COMMANDS = (
    ("verify", "-q", "--workers", "1"),
    ("verify", "-q", "--workers", "1", "--against-inputs", "--sample", "all"),
    ("stats", "--deep"),
    ("stats", "--by", "shard"),
    ("stats", "--json", "--by", "input"),
    ("show", "0", "-1"),
    ("show", "--ids", "--json", "0"),
    ("show", "--step", "0", "--ranks", "1", "--batch-size", "4"),
)
NUMBERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 7, 8, 64)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**53, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.5, 1e308,
    "", "x", "\0", "\n", "../../../etc/passwd", "/dev/zero", "\u2028", "a" * 5000, [], {}, [[]],
    [0], [None], {"a": {}}, ["x"], [2**63],
)  # fmt: skip
MEMORY = 16 << 30  # of addresses; Arrow reserves more than it uses
RESIDENT_KB = 1 << 20
PROCESSOR_SECONDS = 60  # for a mutation; then SIGPROF ends this process


def messages(data: bytes) -> list[tuple[int, int, int]]:
    """(begin, end of the header, end) of every message of a sound stream."""
    source, edges, begin = pa.BufferReader(data), [], 0
    for message in pa.ipc.MessageReader.open_stream(source):
        end = source.tell()
        edges.append((begin, end - (len(message.body) if message.body else 0), end))
        begin = end
    return edges


def mutate_shard(data: bytes, parts: list[tuple[int, int, int]], rng: random.Random) -> bytes:
    out = bytearray(data)
    begin, header, end = rng.choice(parts)

    def anywhere() -> int:
        """Most often in the header of a message, where the sizes are."""
        return rng.randrange(begin, header) if rng.random() < 0.7 else rng.randrange(len(data))

    kind = rng.randrange(4)
    if kind == 0:
        for _ in range(rng.choice((1, 1, 2, 8))):
            out[anywhere()] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[rng.choice((begin, header, end, rng.randrange(len(data)), len(data) - 8)) :]
    elif kind == 2:  # a number of a header, or of the data
        size = rng.choice((2, 4, 8))
        at = anywhere() // size * size
        number = rng.choice(NUMBERS) % (1 << 8 * size)
        out[at : at + size] = number.to_bytes(size, "little")
    else:  # messages in another order, twice, or left out
        order = [rng.choice(parts) for _ in range(rng.randrange(1, 5))]
        out = bytearray(b"".join(data[a:c] for a, _, c in order) + data[-8:])
    return bytes(out)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON document."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """One or two values of a document that are others, gone or there twice."""
    content = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        container, key = rng.choice(list(places(content)))
        change = rng.randrange(8)
        if change == 0:
            del container[key]
        elif change == 1 and isinstance(container, list):
            container[key:key] = copy.deepcopy(container[key : key + 1])
        elif change == 2 and isinstance(container[key], int):
            container[key] += rng.choice((-1, 1, 100))
        else:
            container[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(content).encode()


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bits that are others, or some bytes that are gone."""
    if rng.random() < 0.5:
        out = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        return bytes(out)
    at, size = rng.randrange(len(data)), rng.choice((1, 8, 64, len(data)))
    return data[:at] + data[at + size :]


def mutate_manifest(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(10)
    if kind < 2:
        return mutate_bytes(data, rng)
    if kind == 2:
        at = rng.randrange(len(data))
        return data[:at] + rng.choice((b"[" * 100_000, b"1" * 5000, b"\0", b"\xff", b"9e999"))
    manifest = json.loads(mutate_json(data, rng))
    return to_bytes(manifest) if rng.random() < 0.7 else json.dumps(manifest).encode()


def mutate_lines(data: bytes, rng: random.Random) -> bytes:
    """A side file of JSON, or of JSON lines."""
    lines = data.splitlines(keepends=True)
    with suppress(ValueError):
        json.loads(data)
        lines = [data]
    at = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[rng.randrange(len(lines))])
    else:
        lines[at] = mutate_json(lines[at], rng) + b"\n"
    return b"".join(lines)


def signed(files: dict[str, bytes], name: str) -> bytes:
    """The manifest with the size and digest that a file has now, as a forger would."""
    manifest = json.loads(files[MANIFEST])
    sha256 = hashlib.sha256(files[name]).hexdigest()
    if name in manifest["side_files"]:
        manifest["side_files"][name] = sha256
    else:
        (entry,) = (shard for shard in manifest["shards"] if shard["file"] == name)
        entry.update(bytes=len(files[name]), sha256=sha256)
    return to_bytes(manifest)


def mutated(good: dict[str, bytes], rng: random.Random) -> tuple[str, dict[str, bytes], bool]:
    """(what was changed, the files, whether verify must see it)."""
    files = dict(good)
    if rng.random() < 0.4:
        files[MANIFEST] = mutate_manifest(good[MANIFEST], rng)
        return MANIFEST, files, False
    if rng.random() < 0.3:
        name = rng.choice(SIDE_FILES)
        mutate = mutate_bytes if name.endswith(".npy") else mutate_lines
        files[name] = mutate(good[name], rng)
        files[MANIFEST] = signed(files, name)
        return name, files, False
    name = rng.choice(sorted(file for file in good if file.endswith(".arrow")))
    files[name] = mutate_shard(good[name], messages(good[name]), rng)
    forged = rng.random() < 0.7
    if forged and files[name]:
        files[MANIFEST] = signed(files, name)
    return name, files, not forged and files[name] != good[name]


def peak_kb() -> int:
    """Of this process alone: what getrusage says begins with the process it was forked from."""
    return int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0])


def main(directory: Path, first: int, count: int) -> None:
    good = {path.name: path.read_bytes() for path in directory.iterdir()}
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in range(first, first + count):
        print("begin", number, flush=True)
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
        name, files, visible = mutated(good, random.Random(number))
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "out")
            shutil.copytree(directory, target)
            for changed in {name, MANIFEST}:
                (target / changed).write_bytes(files[changed])
            for command, *options in COMMANDS:
                result = CliRunner().invoke(app, [command, str(target), *options])
                wrong = result.exit_code not in (0, 1, 2) or not isinstance(
                    result.exception, SystemExit | None
                )
                unseen = command == "verify" and visible and result.exit_code != 1
                if wrong or unseen or "out of memory" in result.stderr:
                    output = (result.stderr or repr(result.exception))[:500]
                    print("failed", number, name, command, *options, repr(output), flush=True)
        used = peak_kb()
        if used > RESIDENT_KB:
            print("failed", number, name, f"used {used} kB of memory", flush=True)
            return
    print("end", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
