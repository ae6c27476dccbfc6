"""How much memory a run takes does not depend on how much it reads, by the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import altered
from support import heavy, jsonl

pytestmark = pytest.mark.usefixtures("folder")

# The peak of this program alone: what getrusage says begins with the process it was forked from.
_RUN = """
import os, re, sys
from packer_cli.cli import app as cli
os._exit = sys.exit  # or nothing could be asked afterwards
try:
    cli.main()
finally:
    print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""


def peak_mib(*arguments: object, code: int = 0) -> int:
    """MiB of memory that `packer pack` took at most, which ends with this code."""
    return peak_of("pack", *arguments, "-t", "bytes", code=code)


def peak_of(*arguments: object, before: str = "", code: int = 0) -> int:
    """The same of any command that writes a result. `before`: a program to run first."""
    options = ["-q", "--json", "--overwrite", "-o", "out", "--workers", "1"]
    done = altered(before + _RUN, *map(str, arguments), *options)
    assert done.returncode == code, done.stderr
    return int(done.stdout.splitlines()[-1]) >> 10


Write = Callable[[str, int], object]  # so many of something, to a file or folder of that name


def lines(*texts: str) -> Write:
    return lambda name, count: Path(name).write_bytes(jsonl(*texts) * count)


def cells(name: str, count: int) -> None:
    """A cell of a dictionary that is in all rows: 900 kB each, in a file of 200 kB."""
    pq.write_table(pa.table({"text": ["x" * 900_000] * count}), name)
    assert Path(name).stat().st_size < 200_000


def unpacked_fields(name: str, count: int) -> None:
    """Nested values take ten times their size as objects."""
    Path(name).write_text(json.dumps({"text": "a", "n": [1] * count}) + "\n")


def long_rows(name: str, rows: int) -> None:
    table = pa.table({"text": [f"{i}{'x' * 200_000}" for i in range(rows)]})
    if name.endswith("parquet"):
        pq.write_table(table, name, write_batch_size=8, use_dictionary=False)
    else:
        with pa.ipc.new_file(name, table.schema) as writer:
            writer.write_table(table, max_chunksize=8)


def one_document(before: str, character: str, after: str) -> Write:
    """Its bytes, its text and its tokens are not held any longer than they are needed."""
    return lambda name, count: Path(name).write_text(
        f"{before}{character}{'x' * count}{after}", encoding="utf-8"
    )


def array(name: str, count: int) -> None:
    record = json.dumps({"text": "x" * 10_000}).encode()
    Path(name).write_bytes(b"[" + b",\n".join([record] * count) + b"]")


def documents(name: str, count: int) -> None:
    Path(name).mkdir()
    for number in range(count):
        (Path(name) / f"{number}.py").write_bytes(b"x" * 40_000)


class Input(NamedTuple):
    """What is written few and many times, and how many MiB the many may take more than the few."""

    write: Write
    ending: str
    few: int
    many: int
    most: float
    options: str = ""


SHORT = "-l 64 --overlong truncate"
LARGE = "-l 4096"
MIB = 1 << 20
INPUTS = {
    # 200 MB of tokens more are left out
    "truncated": Input(lines("short", "x" * 10_000), ".jsonl", 1000, 6000, 60,
                       f"{SHORT} --unit-bytes 1G"),
    # a number for each of 2**18 lengths would be 160 MB
    "units": Input(lines("x" * 100), ".jsonl", 5, 85, 60,
                   f"-l {1 << 18} --unit-bytes 100 --columns input_ids,cu_seqlens"),
    "cells": Input(cells, ".parquet", 20, 200, 100, SHORT),
    # of the 18 MB of the line
    "unpacked fields": Input(unpacked_fields, ".jsonl", 10, 6_000_000, 4 * 18, "-l 64"),
    # 120 MB of text, four times as much as tokens
    "long rows": Input(long_rows, ".parquet", 40, 600, 60, f"{SHORT} --unit-bytes 1G"),
    "long batches": Input(long_rows, ".arrow", 40, 600, 60, f"{SHORT} --unit-bytes 1G"),
    # the tokens, before and after EOS is put behind them
    "a document": Input(one_document('{"text": "', "x", '"}'), ".jsonl", 1, 40 * MIB, 40 * 9.5,
                        LARGE),
    # a text of 4 bytes a character, its UTF-8, the tokens
    "a wide document": Input(one_document('{"text": "', "🧙", '"}'), ".jsonl", 1, 40 * MIB, 40 * 11,
                             LARGE),
    # and a buffer of Python's csv, as wide as the text
    "a wide cell": Input(one_document("text\n", "🧙", ""), ".csv", 1, 40 * MIB, 40 * 16, LARGE),
    "an array": Input(array, ".json", 1000, 6000, 80, f"{SHORT} --unit-bytes 1G"),
    "files": Input(documents, "", 50, 1500, 40, f"{SHORT} --sample-by document"),
}  # fmt: skip
HEAVY = ("long batches", "a wide document", "a wide cell")


@pytest.mark.parametrize("name", [heavy(one) if one in HEAVY else one for one in INPUTS])
def test_much_takes_as_little_as_few(name: str) -> None:
    given = INPUTS[name]
    peaks = list[int]()
    for count in (given.few, given.many):
        given.write(f"{count}{given.ending}", count)
        peaks.append(peak_mib(f"{count}{given.ending}", *given.options.split()))
    assert peaks[1] < peaks[0] + given.most


def write_many(name: str, documents: int) -> None:
    """A megabyte for every thousand documents."""
    with open(name, "wb") as file:
        for first in range(0, documents, 1000):
            numbers = range(first, first + 1000)
            file.write(jsonl(*(f"{n} " * (1000 // (len(str(n)) + 1)) for n in numbers)))


@pytest.mark.parametrize("orders", [("--shuffle",), heavy(("--shuffle", "--no-shuffle"))])
def test_tokenized_directories_take_no_more_memory_the_larger_they_are(
    orders: tuple[str, ...],
) -> None:
    """Neither to write nor to pack, though packing takes documents from anywhere."""
    peaks: dict[tuple[str, ...], int] = {}
    for name, documents in (("few", 15_000), ("many", 50_000)):
        write_many(f"{name}.jsonl", documents)
        units = ["--unit-bytes", "8M"]
        peaks["tokenize", name] = peak_of("tokenize", f"{name}.jsonl", "-t", "bytes", *units)
        Path("out").rename(name)
        for order in orders:
            # the limit of mapped pages, made small for the test
            before = "import packer_cli.result.tokenized as t; t._MOST_MAPPED = 16 << 20"
            peaks[order, name] = peak_of("pack", name, "-l", 2048, *units, order, before=before)
    for what in ("tokenize", *orders):
        assert peaks[what, "many"] < peaks[what, "few"] + 60, peaks  # of 140 MB of tokens more
