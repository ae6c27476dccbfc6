"""Files that are damaged, out of reach, or change while they are read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import COMPRESSORS, assert_error, jsonl, pack, packer, recover_texts

from packer_cli.inputs import byte_streams

pytestmark = pytest.mark.usefixtures("folder")
OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
GOOD = b'{"text": "good"}\n'
CUT = "data ends too early; the file was cut short"
DAMAGE: dict[str, tuple[Callable[[bytes, bytes], bytes], str]] = {
    "cut in the middle": (lambda packed, plain: packed[: len(packed) // 2], CUT),
    "cut by one byte": (lambda packed, plain: packed[:-1], CUT),
    "cut in a second member": (lambda packed, plain: packed + packed[: len(packed) // 2], CUT),
    "no bytes at all": (lambda packed, plain: b"", CUT),
    "garbage after": (lambda packed, plain: packed + b"garbage after the end", "not valid "),
    "not compressed": (lambda packed, plain: plain, "not valid "),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("ending", COMPRESSORS)
def test_damaged_compressed_files(folder: Path, ending: str, case: str) -> None:
    damage, message = DAMAGE[case]
    plain = jsonl(*(os.urandom(20).hex() for _ in range(200)))
    name = f"a.jsonl.{ending}"
    (folder / name).write_bytes(damage(COMPRESSORS[ending](plain), plain))
    for on_error in ("fail", "skip"):  # a damaged file is not a bad record
        result = packer("pack", name, *OPTIONS, "--on-error", on_error)
        assert_error(result, 1, f"{name}: ", message)
    assert not Path("out").exists()


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_empty_members_are_no_damage(folder: Path, ending: str) -> None:
    compress, name = COMPRESSORS[ending], f"a.jsonl.{ending}"
    parts = [b"", jsonl("one"), b"", b"", jsonl("two"), b""]
    (folder / name).write_bytes(b"".join(map(compress, parts)))
    pack(name, "-l", 16)
    assert recover_texts("out") == ["one", "two"]


PARQUET = {
    "empty": ("a.parquet", b"", "a.parquet: not a readable parquet file: Parquet file size is 0"),
    "not Parquet": ("a.parquet", b"PAR1 no PAR1", "a.parquet: not a readable parquet file"),
    "empty Arrow": ("a.arrow", b"", "a.arrow: no end marker of an Arrow stream"),
    "cut Arrow file": ("a.arrow", b"ARROW1xxxx", "a.arrow: not a readable arrow file"),
    "not Arrow": ("a.arrow", b"something else", "a.arrow: no end marker of an Arrow stream"),
    "false Arrow": ("a.arrow", b"x" * 9 + b"\xff" * 4 + bytes(4), "a.arrow: not a readable arrow"),
}


@pytest.mark.parametrize("case", PARQUET)
def test_damaged_columnar_files(folder: Path, case: str) -> None:
    name, data, message = PARQUET[case]
    (folder / name).write_bytes(data)
    assert_error(packer("pack", name, *OPTIONS), 1, message)
    assert not Path("out").exists()


@pytest.mark.parametrize("cut", [1, 8, 9, 100, 400])
def test_a_cut_arrow_stream_is_not_read_short(folder: Path, cut: int) -> None:
    table = pa.table({"text": ["a" * 50, "b" * 50, "c" * 50]})
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    data = (folder / "a.arrow").read_bytes()
    (folder / "a.arrow").write_bytes(data[:-cut])
    assert_error(packer("pack", "a.arrow", *OPTIONS), 1, "a.arrow: ", "cut short")


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


def test_an_unreadable_file(as_nobody: Path) -> None:
    path = as_nobody / "a.jsonl"
    path.write_bytes(GOOD)
    path.chmod(0)
    result = packer("pack", path, "-l", 16, "-t", "bytes", "-q", "-o", as_nobody / "out")
    assert_error(result, 1, f"{path}: cannot read: Permission denied")


def test_an_unreadable_directory(as_nobody: Path) -> None:
    inner = as_nobody / "data" / "inner"
    inner.mkdir(parents=True)
    (as_nobody / "data" / "a.jsonl").write_bytes(GOOD)
    inner.chmod(0)
    options = ["-l", 16, "-t", "bytes", "-q", "-o", as_nobody / "out"]
    result = packer("pack", as_nobody / "data", *options)
    assert_error(result, 1, f"{inner}: cannot read: Permission denied")


def test_a_file_that_fails_while_it_is_read() -> None:
    result = packer("pack", "/proc/self/mem", "--input-format", "text", *OPTIONS)
    assert_error(result, 1, "/proc/self/mem: cannot read: Input/output error")


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Do something to the inputs once the first of their documents are being encoded."""
    from packer_cli.tokenization import encoding

    monkeypatch.setattr(byte_streams, "BLOCK_BYTES", 64)

    def prepare(action: Callable[[], Any]) -> None:
        encode, pending = encoding.token_batch, [action]

        def meddling(*arguments: Any) -> Any:
            if pending:
                pending.pop()()
            return encode(*arguments)

        monkeypatch.setattr(encoding, "token_batch", meddling)

    return prepare


def test_a_file_that_grows_while_it_is_read(folder: Path, meddle: Any) -> None:
    path = folder / "a.jsonl"
    path.write_bytes(GOOD * 20)

    def grow() -> None:
        with open(path, "ab") as file:  # in one step: the input is hashed meanwhile
            file.write(GOOD)

    meddle(grow)
    message = "a.jsonl: changed while it was read (340 bytes, now 357)"
    assert_error(packer("pack", "a.jsonl", *OPTIONS), 1, message)
    assert not Path("out").exists()


def test_a_file_cut_while_it_is_read_is_not_called_bad_json(folder: Path, meddle: Any) -> None:
    path = folder / "a.jsonl"
    path.write_bytes(GOOD * 20)
    meddle(lambda: os.truncate(path, 200))
    message = "a.jsonl: changed while it was read (340 bytes, now 200)"
    assert_error(packer("pack", "a.jsonl", *OPTIONS), 1, message)


def test_a_file_removed_before_its_turn(folder: Path, meddle: Any) -> None:
    (folder / "a.jsonl").write_bytes(GOOD * 20)
    (folder / "b.jsonl").write_bytes(GOOD)
    meddle((folder / "b.jsonl").unlink)
    result = packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "--workers", 1)
    assert_error(result, 1, "b.jsonl: cannot read: No such file or directory")


def _locked(folder: Path) -> Path:
    """A folder that others may not look into."""
    locked = folder / "locked"
    locked.mkdir()
    (locked / "tok").mkdir()
    locked.chmod(0)
    return locked


@pytest.mark.parametrize("missing", ["out", "new/out"])
def test_an_output_that_may_not_be_written_is_named_once(as_nobody: Path, missing: str) -> None:
    path = as_nobody / "a.jsonl"
    path.write_bytes(GOOD)
    locked = _locked(as_nobody)
    locked.chmod(0o555)
    os.chdir(as_nobody)
    result = packer("pack", path, "-l", 16, "-t", "bytes", "-q", "-o", f"locked/{missing}")
    first = Path("locked", missing.partition("/")[0])
    assert_error(result, 1, f"error: {first}: cannot write: Permission denied")
    assert result.stderr.endswith("ls -ld locked\n")  # what is there


def test_a_folder_that_may_not_be_looked_into(as_nobody: Path) -> None:
    path = as_nobody / "a.jsonl"
    path.write_bytes(GOOD)
    locked = _locked(as_nobody)
    options = ["-l", 16, "-q", "-o", as_nobody / "out"]
    result = packer("pack", path, "-t", locked, *options)
    assert_error(result, 1, f"{locked}/tokenizer.json: cannot read: Permission denied")
    result = packer("pack", path, "-t", "bytes", *options[:-1], locked / "out")
    assert_error(result, 1, f"error: {locked}/out: cannot write: Permission denied")
    result = packer("stats", locked / "tok")
    assert_error(result, 1, f"{locked}/tok: cannot read: Permission denied")
    assert result.stderr.endswith(f"ls -ld {locked}\n")
