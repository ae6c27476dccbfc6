"""Packing through the command line, and reading the result back, for every test file.

    result = packer("pack", path, "-l", 64)      in this process
    result = packer_process("pack", path)        the installed `packer` script
    check_directory(out)                         every invariant, a recount, the digests
    recover_documents(out)                       {(file, position): tokens} from the shards alone

Results are read with the library, as its users read them.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import json
import lzma
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from typer import testing
from typer.testing import CliRunner, Result

from packer_cli import open_packed
from packer_cli.cli.app import app
from packer_cli.inputs import byte_streams
from packer_cli.options.options import COLUMNS
from packer_cli.result.columns import rows_of, segments_of
from packer_cli.result.layout import digest
from packer_cli.result.rules import RowLimits, broken_rules, documents_of, segments_in
from packer_cli.verify import recount

BYTES_EOS = 256
ALL_COLUMNS = ("--columns", ",".join(COLUMNS))
# Typer makes its commands anew for each call, which takes longer than some of them do.
testing._get_command = functools.cache(testing._get_command)


def line_limit(size: int) -> Any:
    """A context in which lines, cells and documents of text may have so many bytes."""
    return patch.object(byte_streams, "MAX_LINE_BYTES", size)


def heavy(*values: object) -> Any:
    """Of parameters: for `make test-heavy`, which has the larger or further forms of a test."""
    return pytest.param(*values, marks=pytest.mark.heavy)


def _by_arrow(codec: str) -> Callable[[bytes], bytes]:
    return lambda data: pa.Codec(codec).compress(data, asbytes=True)


# file ending -> what makes such a file of plain bytes
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": _by_arrow("zstd"),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lz4": _by_arrow("lz4"),
}


def packer(*arguments: object) -> Result:
    """Run `packer` in this process; an exception that is not an exit is raised."""
    command = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, command, prog_name="packer")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeeds(*arguments: object) -> Result:
    """Run `packer` in this process, with success."""
    result = packer(*arguments)
    assert result.exit_code == 0, result.output
    return result


def packer_script() -> str:
    """The installed `packer`: of the environment that runs the tests."""
    beside = Path(sys.executable).with_name("packer")
    command = str(beside) if beside.exists() else shutil.which("packer")
    assert command, "packer is not installed"
    return command


def packer_process(
    *arguments: object, stdin: bytes = b"", **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run the `packer` script as a process of its own."""
    command = [packer_script(), *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, timeout=300, check=False, **options
    )


def pack(*arguments: object) -> dict[str, Any]:
    """Pack with the bytes tokenizer into `out`, check the result, give its manifest."""
    result = packer("pack", *arguments, "-t", "bytes", "-q", "--json", "-o", "out")
    assert result.exit_code == 0, result.stderr
    return check_directory("out")


def shard_of(directory: Path | str = "out", unit: int = 0, part: int = 0) -> Path:
    """The shard of a unit: its name ends in its content's digest."""
    (shard,) = Path(directory).glob(f"shard-{unit:05d}-{part:03d}-*.arrow")
    return shard


def work_folder(directory: Path | str = "out") -> Path:
    """Where an interrupted run has left what it packed."""
    (folder,) = Path(directory).glob(".packer/*/")
    return folder


def contents(directory: Path | str) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file()
    }


def inputs_of(manifest: dict[str, Any]) -> list[str]:
    """The paths of a manifest's inputs, from the current directory on."""
    return [one["path"].removeprefix(f"{os.getcwd()}/") for one in manifest["inputs"]]


def assert_error(result: Result, code: int, *parts: str, kind: str = "error") -> None:
    """One line that says what is wrong, with all of `parts`, and one that says what to do.

    With --json, both in an object.
    """
    assert result.exit_code == code, result.stderr
    lines = result.stderr.splitlines()
    if lines[-1].startswith("{"):
        problem = json.loads(lines[-1])
        assert problem["exit_code"] == code
        lines[-1:] = [f"{kind}: {problem['error']}", f"tip: {problem['tip']}"]
    assert [line.split(":")[0] for line in lines] == [kind, "tip"], result.stderr
    for part in parts:
        assert part in lines[0]
    assert len(lines[1]) > len("tip: ")
    assert result.stdout == ""


def broken_invariants(batch: Any, max_length: int, pad_token_id: int, **how: Any) -> list[str]:
    """What is wrong with the rows of a batch, a message per broken rule. `how`: as `RowLimits`."""
    return [
        str(broken) for broken in broken_rules(batch, RowLimits(max_length, pad_token_id, **how))
    ]


def check_directory(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Assert all that a finished directory promises; gives its manifest."""
    packed = open_packed(directory)
    manifest = packed.manifest
    pad = manifest["tokenizer"]["pad_token_id"] if manifest["tokenizer"] else 0
    how = {
        "max_segments": manifest["config"]["max_segments_per_row"],
        "segment_multiple": manifest["config"]["segment_multiple"],
        "columns": (*packed.facts.config.value_columns.values(),),
    }
    for shard in manifest["shards"]:
        assert digest(packed.path / shard["file"]) == (shard["bytes"], shard["sha256"])
        for batch in packed.batches(shard):
            assert broken_invariants(batch, packed.max_length, pad, **how) == []
            assert batch.schema.names == manifest["config"]["columns"]
            assert all(column.null_count == 0 for column in batch.columns)
    recount(Path(directory))
    side_file = packed.path / "squared_lengths.npy"
    assert np.load(side_file).tolist() == squared_lengths_by_hand(directory)
    assert digest(side_file)[1] == manifest["side_files"][side_file.name]
    slots = manifest["rows"] * packed.max_length
    assert manifest["tokens"] + manifest["padding_tokens"] == slots
    assert sum(one["documents"] for one in manifest["inputs"]) == manifest["documents"]
    assert sum(one["tokens"] for one in manifest["inputs"]) == manifest["tokens"]
    assert manifest["lower_bound_rows"] <= manifest["rows"]
    histograms = manifest["histograms"]
    assert sum(histograms["row_fill"]) == sum(histograms["segments_per_row"]) == manifest["rows"]
    assert sum(histograms["document_length"]) == manifest["documents"]
    assert not (packed.path / ".packer").exists()
    return manifest


def squared_lengths_by_hand(directory: str | os.PathLike[str]) -> list[int]:
    """Of each row, in the order of the shards, from every one of its boundaries."""
    packed, sums = open_packed(directory), list[int]()
    for shard in packed.facts.shards:
        for batch in packed.stored(shard):
            for boundaries in batch.column("cu_seqlens").to_pylist():
                sums.append(sum((end - begin) ** 2 for begin, end in pairwise(boundaries)))
    return sums


def recover_documents(
    directory: str | os.PathLike[str], column: str = "input_ids", unit: int | None = None
) -> dict[tuple[int, int], np.ndarray[Any, np.dtype[np.int32]]]:
    """Every document found again from the shards: (file, position) -> its tokens, or labels.

    `unit`: of this work unit alone; a recipe may take a document in several. The pieces of a
    document are put together in the order of their starts, and must join up.
    """
    packed = open_packed(directory)
    pieces, segments = [], [np.empty((4, 0), np.int64)]
    for shard in packed.manifest["shards"]:
        for batch in packed.batches(shard) if unit in (None, shard["unit"]) else ():
            values = rows_of(batch.column(column))
            begins, lengths, of_row = segments_of(batch)
            rows = np.repeat(np.arange(len(values)), np.diff(of_row))
            for row, begin, length in zip(rows, begins, lengths, strict=True):
                pieces.append(values[row, begin : begin + length].copy())
            segments.append(segments_in(batch))
    order, (file, position, start, _), first = documents = documents_of(np.concatenate(segments, 1))
    assert np.array_equal(start, documents.expected_starts(whole=True)), "pieces do not join up"
    return {
        (int(file[begin]), int(position[begin])): np.concatenate(
            [pieces[number] for number in order[begin:end]]
        )
        for begin, end in pairwise(first.tolist())
    }


def recover_texts(directory: str | os.PathLike[str]) -> list[str]:
    """The documents of a bytes-tokenizer result in input order, each ended by EOS."""
    texts = []
    for place, tokens in recover_documents(directory).items():
        assert tokens[-1] == BYTES_EOS, f"{place} does not end with EOS"
        texts.append(bytes(tokens[:-1].astype(np.uint8)).decode())
    return texts


def jsonl(*texts: str) -> bytes:
    """{"text": ...} lines."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def random_texts(documents: int, longest: int = 200, seed: int = 0, begin: str = "") -> list[str]:
    """Texts of fewer letters than `longest`."""
    random_ = random.Random(seed)
    lengths = (random_.randrange(longest) for _ in range(documents))
    return [begin + "".join(random_.choices("abcdefgh ", k=length)) for length in lengths]


def random_ids(documents: int, longest: int = 90, seed: int = 0) -> str:
    """{"input_ids": ...} lines of documents with fewer tokens than `longest`."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, documents)
    return "\n".join(
        json.dumps({"input_ids": generator.integers(0, 50_000, n).tolist()}) for n in lengths
    )


@contextmanager
def started(*command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which ends at the latest with the block, also when that fails."""
    with subprocess.Popen(command, **options) as run:
        try:
            yield run
        finally:
            run.kill()


def wait_for(what: Callable[[], object], seconds: float = 300) -> bool:
    """Whether it comes true. Machines are busy: only what hangs takes all of these seconds."""
    give_up = time.monotonic() + seconds
    while not (value := what()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return bool(value)


def children_of(process: int) -> set[int]:
    """The processes that any of its threads has begun, and that are not waited for yet."""
    numbers = set[int]()
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            numbers |= set(map(int, path.read_text().split()))
    return numbers


def processor_seconds(process: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0
