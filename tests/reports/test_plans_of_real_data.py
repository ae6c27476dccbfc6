"""Real files: what is planned of them is what is packed, at every length and in every way.

The quick tests take the first documents of every file, the slow ones (make test-slow) every whole
file with every tokenizer.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planning import assert_planned
from support import packer
from test_real_data import FILES, SHARED, TOKENIZERS

pytestmark = [
    pytest.mark.skipif(
        not (SHARED / "data").is_dir(), reason=f"needs the real data and tokenizers in {SHARED}"
    ),
    pytest.mark.usefixtures("folder"),
]
EXCERPT_BYTES = 40_000


def excerpt(file: str, folder: Path) -> Path:
    """The first documents of a file, in one of the same kind without compression."""
    source, target = SHARED / "data" / file, folder / Path(file).name.removesuffix(".zst")
    if source.suffix == ".parquet":
        table = pq.ParquetFile(source).read_row_group(0)
        pq.write_table(table.slice(0, 60), target, row_group_size=25)
        return target
    with pa.input_stream(source, compression="zstd") as stream:
        content = stream.read(4_000_000)[:EXCERPT_BYTES]
    end = content.rfind(b"\n") + 1
    target.write_bytes(content[:end] if end else _first_line(source))
    return target


def _first_line(source: Path) -> bytes:
    with pa.input_stream(source, compression="zstd") as stream:
        content: bytes = stream.read(1 << 26)
    return content[: content.index(b"\n") + 1]


def test_the_first_documents_of_every_file(folder: Path) -> None:
    files = [excerpt(file, folder) for file in FILES]
    options = ["-t", SHARED / "tokenizers" / "gpt2", "--on-error", "skip"]
    assert_planned(files, [300, 2048], ["best-fit", "wrap"], *options, "--unit-bytes", "100k")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_file_with_every_tokenizer(folder: Path, name: str, file: str) -> None:
    options = ["-t", SHARED / "tokenizers" / name, "--on-error", "skip"]
    ways = ["best-fit", "next-fit", "wrap"]
    path = SHARED / "data" / file
    raw = assert_planned([path], [1000, 8192], ways, *options)
    assert packer("tokenize", path, *options, "-o", "tokens", "-q", "--json").exit_code == 0
    tokenized = assert_planned(["tokens"], [2048], ways)
    assert tokenized["tokens"] == raw["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drop", "truncate", "truncate-turns"])
def test_real_conversations(folder: Path, how: str) -> None:
    options = ["-t", SHARED / "tokenizers" / "qwen3", "--overlong", how, "--on-error", "skip"]
    path = SHARED / "data" / "chat_oasst_en100.jsonl.zst"
    assert_planned([path], [256, 2048], ["best-fit", "next-fit"], *options)
