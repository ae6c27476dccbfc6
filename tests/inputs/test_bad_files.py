"""Files that are damaged, out of reach, or change while they are read. What --on-error skip leaves
out: run/test_damaged_files.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import COMPRESSORS, assert_error, jsonl, pack, packer, recover_texts

from packer_cli.inputs import byte_streams

pytestmark = pytest.mark.usefixtures("folder")
OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_empty_members_are_no_damage(ending: str) -> None:
    parts = [b"", jsonl("one"), b"", b"", jsonl("two"), b""]
    Path(f"a.jsonl.{ending}").write_bytes(b"".join(map(COMPRESSORS[ending], parts)))
    pack(f"a.jsonl.{ending}", "-l", 16)
    assert recover_texts("out") == ["one", "two"]


def stream(table: Any, **how: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, **how)
    return bytes(sink.getvalue().to_pybytes())


STREAM = stream(pa.table({"text": ["a" * 50, "b" * 50, "c" * 50]}), max_chunksize=1)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.parquet", b"", "not a readable parquet file: Parquet file size is 0"),
        ("a.parquet", b"PAR1 no PAR1", "not a readable parquet file"),
        ("a.arrow", b"", "no end marker of an Arrow stream"),
        ("a.arrow", b"ARROW1xxxx", "not a readable arrow file"),
        ("a.arrow", b"something else", "no end marker of an Arrow stream"),
        ("a.arrow", b"x" * 9 + b"\xff" * 4 + bytes(4), "not a readable arrow"),
        *(("a.arrow", STREAM[:-cut], "cut short") for cut in (1, 8, 9, 100, 400)),
    ],
)
def test_damaged_columnar_files(name: str, data: bytes, message: str) -> None:
    Path(name).write_bytes(data)
    assert_error(packer("pack", name, *OPTIONS), 1, f"{name}: ", message)
    assert not Path("out").exists()


def test_offsets_of_arrow_that_lead_nowhere() -> None:
    """Arrow reads such a file without a word; what goes by its offsets would read anywhere."""

    def lists(values: Any, offsets: list[int]) -> Any:
        edges = pa.py_buffer(np.array(offsets, np.int32))
        kind = pa.list_(values.type)
        return pa.Array.from_buffers(kind, len(offsets) - 1, [None, edges], children=[values])

    offsets = pa.py_buffer(np.array([0, 1, -9, 2], np.int32))
    texts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"ab"))
    ids = pa.array(np.arange(100, dtype=np.int32))
    mask = pa.array((np.arange(100) < 99).astype(np.int8))
    wrong: list[dict[str, Any]] = [{"text": texts}]
    wrong += [
        {"input_ids": lists(ids, edges), "attention_mask": lists(mask, edges)}
        for edges in ([0, 80, 20, 100], [0, 300, 100], [0, 100, 60])
    ]
    for columns in wrong:
        batch = pa.RecordBatch.from_arrays([*columns.values()], [*columns])
        with pa.ipc.new_file("a.arrow", batch.schema) as writer:
            writer.write_batch(batch)
        for command in (
            ("pack", "-l", 64),
            ("pack", "-l", 64, "--on-error", "skip"),
            ("tokenize",),
        ):
            result = packer(*command, "a.arrow", "-t", "bytes", "-q", "-o", "out")
            assert_error(result, 1, "a.arrow: not a readable arrow file: ")


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A world-readable directory, visited without the rights of root."""
    import packer_cli.run.pipeline  # noqa: F401 root's own modules may be out of nobody's reach

    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)  # noqa: S103 nobody writes here too
        was = os.geteuid()
        try:
            if was == 0:
                os.seteuid(65534)
            yield Path(name)
        finally:
            os.seteuid(was)


def test_what_may_not_be_read_or_written(as_nobody: Path) -> None:
    os.chdir(as_nobody)
    Path("a.jsonl").write_bytes(GOOD)
    for folder in ("data/inner", "locked/tok", "kept"):
        Path(folder).mkdir(parents=True)
    Path("data/a.jsonl").write_bytes(GOOD)
    Path("data/b.jsonl").write_bytes(GOOD)
    for name in ("data/b.jsonl", "data/inner", "locked"):
        Path(name).chmod(0)
    Path("kept").chmod(0o555)
    plain = ("-t", "bytes", "-o", "out")
    for command, message in (
        (("pack", "data/b.jsonl", *plain), "data/b.jsonl: cannot read: Permission denied"),
        (("pack", "data", *plain), "data/inner: cannot read: Permission denied"),
        (
            ("pack", "a.jsonl", "-t", "bytes", "-o", "kept/out"),
            "kept/out: cannot write: Permission",
        ),
        (("pack", "a.jsonl", "-t", "bytes", "-o", "kept/new/out"), "kept/new: cannot write: Perm"),
        (("pack", "a.jsonl", "-t", "bytes", "-o", "locked/out"), "locked/out: cannot write: Perm"),
        (("pack", "a.jsonl", "-t", "locked"), "locked/tokenizer.json: cannot read: Permission"),
    ):
        result = packer(*command, "-l", 16, "-q")
        assert_error(result, 1, f"error: {message}")
    assert result.stderr.endswith("ls -ld locked\n")  # what is there
    assert_error(packer("stats", "locked/tok"), 1, "locked/tok: cannot read: Permission denied")


def test_a_file_that_fails_while_it_is_read() -> None:
    result = packer("pack", "/proc/self/mem", "--input-format", "text", *OPTIONS)
    assert_error(result, 1, "/proc/self/mem: cannot read: Input/output error")


def grow() -> None:
    with open("a.jsonl", "ab") as file:  # in one step: the input is hashed meanwhile
        file.write(GOOD)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (grow, "a.jsonl: changed while it was read (340 bytes, now 357)"),
        # and is not called bad JSON
        (lambda: os.truncate("a.jsonl", 200), "a.jsonl: changed while it was read (340 bytes, now"),
        (lambda: os.unlink("b.jsonl"), "b.jsonl: cannot read: No such file or directory"),
    ],
)
def test_a_file_that_changes_once_the_first_documents_are_encoded(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[], None], message: str
) -> None:
    from packer_cli.tokenization import encoding

    encode, pending = encoding.token_batch, [action]

    def meddling(*arguments: Any) -> Any:
        if pending:
            pending.pop()()
        return encode(*arguments)

    monkeypatch.setattr(byte_streams, "BLOCK_BYTES", 64)
    monkeypatch.setattr(encoding, "token_batch", meddling)
    Path("a.jsonl").write_bytes(GOOD * 20)
    Path("b.jsonl").write_bytes(GOOD)
    assert_error(packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "--workers", 1), 1, message)
    assert not Path("out").exists()


def test_an_arrow_file_cut_while_it_is_read() -> None:
    table = pa.table({"text": ["x" * 10_000] * 1000})
    with pa.ipc.new_file("a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    script = (
        "import os\n"
        "from packer_cli.cli import app as cli\n"
        "from packer_cli.tokenization import encoding\n"
        "encode = encoding.token_batch\n"
        "def cut(*given): os.truncate('a.arrow', 4096); return encode(*given)\n"
        "encoding.token_batch = cut; cli.main()"
    )
    command = [sys.executable, "-c", script, "pack", "a.arrow", "-l", "8", "-t", "bytes", "-q"]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 1  # not SIGBUS
    assert done.stderr.startswith(b"error: a.arrow: ")
