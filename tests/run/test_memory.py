"""How much memory a run takes does not depend on how much it reads, by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import altered
from support import assert_error, heavy, jsonl, packer

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


@pytest.mark.parametrize("overlong", ["truncate", heavy("drop")])
def test_what_is_truncated_or_dropped_is_not_kept(folder: Path, overlong: str) -> None:
    short, long = jsonl("short"), jsonl("x" * 10_000)
    for name, count in (("few.jsonl", 1000), ("many.jsonl", 6000)):
        (folder / name).write_bytes((short + long) * count)
    options = ["-l", 64, "--overlong", overlong, "--unit-bytes", "1G"]
    few, many = (peak_mib(name, *options) for name in ("few.jsonl", "many.jsonl"))
    assert many < few + 60  # 200 MB of tokens more are left out


def test_units_leave_nothing_behind(folder: Path) -> None:
    options = ["-l", 1 << 18, "--unit-bytes", 100, "--columns", "input_ids,cu_seqlens"]
    for name, count in (("few.jsonl", 5), ("many.jsonl", 85)):
        (folder / name).write_bytes(jsonl(*["x" * 100] * count))
    few, many = (peak_mib(name, *options) for name in ("few.jsonl", "many.jsonl"))
    assert many < few + 60  # a number for each of 2**18 lengths would be 160 MB


@pytest.mark.parametrize("rows", [200, heavy(600)])  # 180 MB of text, 540 MB
def test_a_cell_of_a_dictionary_that_is_in_all_rows(folder: Path, rows: int) -> None:
    for count in (20, rows):
        pq.write_table(pa.table({"text": ["x" * 900_000] * count}), folder / f"{count}.parquet")
    assert (folder / f"{rows}.parquet").stat().st_size < 200_000
    options = ["-l", 64, "--overlong", "truncate"]
    few, many = (peak_mib(f"{count}.parquet", *options) for count in (20, rows))
    assert many < few + 100


@pytest.mark.parametrize(
    ("how", "size"),
    [
        ({"use_dictionary": True}, 100_000_000),
        heavy({"use_dictionary": True}, 300_000_000),
        heavy({"data_page_version": "2.0"}, 300_000_000),
    ],
)
def test_a_cell_too_long_for_memory_is_never_decompressed(
    folder: Path, how: dict[str, Any], size: int
) -> None:
    """Told by its page's header: 300 MB take a few kilobytes in the file."""
    how = {"use_dictionary": False, "compression": "zstd"} | how
    small, huge = pa.table({"text": ["a", "b"]}), pa.table({"text": ["x" * size]})
    with pq.ParquetWriter("a.parquet", small.schema, **how) as writer:
        for table in (small, huge, small):
            writer.write_table(table)
    pq.write_table(small, "few.parquet", **how)
    pq.write_table(pa.concat_tables([small, huge]), "beside.parquet", **how)
    options = ["-l", 64, "--max-line-bytes", "1M", "--on-error", "skip"]
    few = peak_mib("few.parquet", *options)
    for name, group in (("a.parquet", 1), ("beside.parquet", 0)):
        command = ["pack", name, "-t", "bytes", "-q", *options, "-o", "other"]
        message = f"{name}, row group {group}: text is longer than 1048576 bytes: {size // 100}"
        assert_error(packer(*command), 1, message)
        assert peak_mib(name, *options, code=1) < few + 60


def test_fields_that_are_not_packed_take_no_memory(folder: Path) -> None:
    """Nested values take ten times their size as objects."""
    for name, count in (("few.jsonl", 10), ("many.jsonl", 15_000_000)):
        (folder / name).write_text(json.dumps({"text": "a", "n": [1] * count}) + "\n")
    few, many = (peak_mib(name, "-l", 64) for name in ("few.jsonl", "many.jsonl"))
    assert many < few + 4 * 45  # of the 45 MB of the line


@pytest.mark.parametrize("ending", ["parquet", heavy("arrow")])
def test_long_rows_of_columns_are_not_read_by_the_thousand(folder: Path, ending: str) -> None:
    text = "x" * 200_000
    for name, rows in (("few", 40), ("many", 600)):
        table = pa.table({"text": [f"{i}{text}" for i in range(rows)]})
        if ending == "parquet":
            pq.write_table(table, f"{name}.parquet", write_batch_size=8, use_dictionary=False)
        else:
            with pa.ipc.new_file(f"{name}.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=8)
    options = ["-l", 64, "--overlong", "truncate", "--unit-bytes", "1G"]
    few, many = (peak_mib(f"{name}.{ending}", *options) for name in ("few", "many"))
    assert many < few + 60  # 120 MB of text, four times as much as tokens


@pytest.mark.parametrize(
    ("name", "character", "most"),
    [
        ("a.jsonl", "x", 9.5),  # the tokens, before and after EOS is put behind them
        heavy("a.jsonl", "🧙", 11),  # a text of 4 bytes a character, its UTF-8, the tokens
        heavy("a.txt", "🧙", 11),
        heavy("a.csv", "🧙", 16),  # and a buffer of Python's csv, as wide as the text
    ],
)
def test_one_very_large_document(folder: Path, name: str, character: str, most: float) -> None:
    """Its bytes, its text and its tokens are not held any longer than they are needed."""
    around = {"a.jsonl": ('{"text": "', '"}'), "a.txt": ("", ""), "a.csv": ("text\n", "")}
    before, after = around[name]
    (folder / "few.jsonl").write_bytes(jsonl("a"))
    (folder / name).write_text(f"{before}{character}{'x' * (40 << 20)}{after}", encoding="utf-8")
    few, one = (
        peak_mib(file, "-l", 4096, "--max-line-bytes", "1G") for file in ("few.jsonl", name)
    )
    assert one < few + 40 * most


def write_many(name: str, documents: int) -> None:
    """A megabyte for every thousand documents."""
    with open(name, "wb") as file:
        for first in range(0, documents, 1000):
            file.write(
                jsonl(*(f"{n} " * (1000 // (len(str(n)) + 1)) for n in range(first, first + 1000)))
            )


@pytest.mark.parametrize("orders", [("--shuffle",), heavy(("--shuffle", "--no-shuffle"))])
def test_tokenized_directories_take_no_more_memory_the_larger_they_are(
    folder: Path, orders: tuple[str, ...]
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
            command = ["pack", name, "-l", 2048, *units, order]
            peaks[order, name] = peak_of(*command, before=before)
    for what in ("tokenize", *orders):
        assert peaks[what, "many"] < peaks[what, "few"] + 60, peaks  # of 140 MB of tokens more


@pytest.mark.parametrize("records", [6000, heavy(60_000)])  # 60 MB, 600 MB
@pytest.mark.parametrize("unit_bytes", ["1G", "16M"])  # one unit, or several that are found first
def test_an_array_of_json_is_not_held(folder: Path, records: int, unit_bytes: str) -> None:
    record = json.dumps({"text": "x" * 10_000}).encode()
    for name, count in (("few.json", 1000), ("many.json", records)):
        (folder / name).write_bytes(b"[" + b",\n".join([record] * count) + b"]")
    options = ["-l", 64, "--overlong", "truncate", "--unit-bytes", unit_bytes]
    few, many = (peak_mib(name, *options) for name in ("few.json", "many.json"))
    assert many < few + 80  # of 600 MB; the tokens and rows of 60,000 records are kept, about 40


def test_thousands_of_documents_are_not_held(folder: Path) -> None:
    for name, count in (("few", 50), ("many", 1500)):
        (folder / name).mkdir()
        for number in range(count):
            (folder / name / f"{number}.py").write_bytes(b"x" * 40_000)
    options = ["-l", 64, "--overlong", "truncate", "--sample-by", "document"]
    few, many = (peak_mib(name, *options) for name in ("few", "many"))
    assert many < few + 40  # 60 MB of text
