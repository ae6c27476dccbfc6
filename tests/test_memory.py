"""How much memory a run takes does not depend on how much it reads, by the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import jsonl

pytestmark = pytest.mark.usefixtures("folder")

# The peak of this program alone: what getrusage says begins with the process it was forked from.
_RUN = """
import re, sys
from packer_cli import cli
cli.os._exit = sys.exit  # or nothing could be asked afterwards
try:
    cli.main()
finally:
    print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""


def peak_mib(*arguments: object) -> int:
    """MiB of memory that `packer pack` took at most."""
    options = ["-t", "bytes", "-q", "--json", "--overwrite", "-o", "out", "--workers", "1"]
    command = [sys.executable, "-c", _RUN, "pack", *map(str, arguments), *options]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return int(done.stdout.splitlines()[-1]) >> 10


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
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


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
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
