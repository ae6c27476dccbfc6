"""Real files and real tokenizers: every document found again, whole, from the shards alone; and
what is planned is what is packed.

What is expected comes from `tokenizers` itself and from reading the files here, without packer.
The quick tests pack the first documents of every file at once, the slow ones (make test-slow)
every whole file with every tokenizer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planning import assert_planned
from support import check_directory, heavy, packer, succeeds
from tokenizers import Tokenizer

from packer_cli import open_packed
from packer_cli.result.columns import rows_of
from packer_cli.result.rules import documents_of, segments_in
from packer_cli.tokenization.locate import locate
from packer_cli.tokenization.tokenizer import load_tokenizer
from packer_cli.tokenization.trust import BATTERY

SHARED = Path(__file__).resolve().parents[2] / "shared"
pytestmark = pytest.mark.skipif(
    not (SHARED / "data").is_dir(), reason=f"needs the real data and tokenizers in {SHARED}"
)

# name -> (BOS that begins every document or None, EOS that ends it), from TOKENIZERS.md
TOKENIZERS: dict[str, tuple[int | None, int]] = {
    "gpt2": (None, 50256),
    "llama3_1": (128000, 128009),
    "qwen3": (None, 151645),
    "mistral_v3": (1, 2),
    "t5": (None, 1),
}
LIGHT = ["gpt2", "mistral_v3", "t5", heavy("llama3_1"), heavy("qwen3")]
FILES = [
    "code_python.jsonl.zst",
    "multi_udhr.jsonl.zst",
    "multi_xquad_contexts.jsonl.zst",
    "text_linux_doc.jsonl.zst",
    "text_tinyshakespeare.jsonl.zst",
    "text_wikitext2_lines.jsonl.zst",
    "parquet/text_linux_doc_largestring_zstd.parquet",
    "parquet/text_wikitext2_lines_with_nulls.parquet",
]
EXCERPT_BYTES = 60_000
Array = np.ndarray[Any, np.dtype[Any]]
Tokens = tuple[Array, Array]  # flat ids, offsets[documents + 1]


def records_of(path: Path) -> Iterator[tuple[int, str | None]]:
    """Position (byte offset of the line, or row number) and text of every record."""
    if path.suffix == ".parquet":
        yield from enumerate(pq.read_table(path, columns=["text"]).column(0).to_pylist())
        return
    position = 0
    with pa.input_stream(path, compression="zstd" if path.suffix == ".zst" else None) as stream:
        for line in stream.read().split(b"\n"):
            if line.strip():
                yield position, json.loads(line)["text"]
            position += len(line) + 1


def encoded(tokenizer: Tokenizer, name: str, texts: list[str]) -> Tokens:
    """BOS where the tokenizer has one, the text's tokens, EOS: neither of them twice."""
    bos, eos = TOKENIZERS[name]
    flat, lengths = [], [0]
    for first in range(0, len(texts), 256):  # an encoding takes a hundred times its text's memory
        documents = []
        for encoding in tokenizer.encode_batch_fast(
            texts[first : first + 256], add_special_tokens=False
        ):
            ids = encoding.ids
            if ids and bos is not None and ids[0] != bos:
                ids.insert(0, bos)
            if ids and ids[-1] != eos:
                ids.append(eos)
            documents.append(ids)
        lengths += map(len, documents)
        flat.append(np.fromiter(chain.from_iterable(documents), np.int64))
    return np.concatenate(flat), np.cumsum(lengths)


def recovered(directory: Path) -> tuple[Array, Tokens]:
    """(file and position [2, documents], their tokens), in that order, from the shards."""
    packed = open_packed(directory)
    ids, segments = [], []
    for shard in packed.manifest["shards"]:
        for batch in packed.batches(shard):
            real = rows_of(batch.column("attention_mask")) == 1
            ids.append(rows_of(batch.column("input_ids"))[real])
            segments.append(segments_in(batch))
    lengths = np.concatenate(segments, axis=1)[3]
    order, (file, position, start, length), first = documents = documents_of(np.hstack(segments))
    assert np.array_equal(start, documents.expected_starts(whole=True)), "pieces do not join up"
    begin, end = (np.cumsum(lengths) - lengths)[order], np.cumsum(length)
    place = np.repeat(begin - (end - length), length) + np.arange(end[-1])
    offsets = np.append(0, end[first[1:] - 1])
    return np.stack([file, position])[:, first[:-1]], (np.concatenate(ids)[place], offsets)


def assert_recovered(directory: Path, files: list[Path], encode: Callable[..., Tokens]) -> None:
    """Every document of `files` is in the shards, token by token, and nothing else."""
    manifest = check_directory(directory)
    records = [(i, *record) for i, file in enumerate(files) for record in records_of(file)]
    ids, offsets = encode([text for _, _, text in records if text is not None])
    places = [(file, position) for file, position, text in records if text is not None]
    full = np.diff(offsets) > 0
    assert manifest["rejected_records"] == len(records) - len(places)
    assert manifest["empty_documents"] == len(places) - full.sum()
    documents, (packed_ids, packed_offsets) = recovered(directory)
    assert np.array_equal(documents, np.array(places)[full].T)
    assert np.array_equal(packed_offsets, offsets[np.append(True, full)])
    assert np.array_equal(packed_ids, ids)


@pytest.fixture(scope="module", params=TOKENIZERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def encode(name: str) -> Callable[[list[str]], Tokens]:
    tokenizer = Tokenizer.from_file(str(SHARED / "tokenizers" / name / "tokenizer.json"))
    return lambda texts: encoded(tokenizer, name, texts)


@pytest.fixture(scope="module")
def excerpts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The first documents of every file, in uncompressed files of the same kind."""
    folder = tmp_path_factory.mktemp("excerpts")
    made = []
    for file in FILES:
        source = SHARED / "data" / file
        target = folder / source.name.replace(".zst", "")
        if source.suffix == ".parquet":
            table = pq.ParquetFile(source).read_row_group(0, columns=["text"])
            lengths = [len(text or "") for text in table.column(0).to_pylist()]
            rows = max(1, int((np.cumsum(lengths) < EXCERPT_BYTES).sum()))
            pq.write_table(table.slice(0, rows), target, row_group_size=1 + rows // 3)
        else:
            with pa.input_stream(source, compression="zstd") as stream:
                content = stream.read(EXCERPT_BYTES)
            target.write_bytes(content[: content.rindex(b"\n") + 1])
        made.append(target)
    return made


@pytest.mark.parametrize("name", LIGHT, indirect=True)
def test_the_tokenizer_equals_its_reference(
    name: str, encode: Callable[[list[str]], Tokens], excerpts: list[Path]
) -> None:
    texts = [*BATTERY, ""]
    for file in excerpts:
        texts += [text[:3000] for _, text in list(records_of(file))[::7] if text is not None]
    tokenizer = load_tokenizer(locate(str(SHARED / "tokenizers" / name)))
    ids, offsets, _ = tokenizer.encode(texts)
    trusted = "ReferenceEngine" if name == "t5" else "TrustedEngine"
    assert type(tokenizer.engine).__name__ == trusted
    expected_ids, expected_offsets = encode(texts)
    assert np.array_equal(offsets, expected_offsets)
    assert np.array_equal(ids, expected_ids)


@pytest.mark.parametrize("name", LIGHT, indirect=True)
def test_the_first_documents_of_every_file_are_recovered(
    name: str, encode: Callable[[list[str]], Tokens], excerpts: list[Path], tmp_path: Path
) -> None:
    out, tokenizer = tmp_path / "out", SHARED / "tokenizers" / name
    succeeds(
        "pack", *excerpts, "-l", 1000, "-t", tokenizer, "-o", out, "-q", "--on-error", "skip",
        "--unit-bytes", "24K",
    )  # fmt: skip
    assert_recovered(out, excerpts, encode)
    assert len(open_packed(out).manifest["units"]) > len(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_every_document_of_a_whole_file_is_recovered(
    file: str,
    name: str,
    encode: Callable[[list[str]], Tokens],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    out, source = tmp_path / "out", SHARED / "data" / file
    options = ["--on-error", "skip"] if "nulls" in file else []
    tokenizer = SHARED / "tokenizers" / name
    began = time.perf_counter()
    result = packer("pack", source, "-l", 4096, "-t", tokenizer, "-o", out, "-q", *options)
    record_property("seconds", round(time.perf_counter() - began, 2))
    assert result.exit_code == 0, result.stderr
    assert_recovered(out, [source], encode)
    manifest = open_packed(out).manifest
    for figure in ("documents", "tokens", "rows", "lower_bound_rows", "utilization"):
        record_property(figure, manifest[figure])
    assert manifest["rows"] <= 1.002 * manifest["lower_bound_rows"] + 1


def test_plans_of_the_first_documents_of_every_file(folder: Path, excerpts: list[Path]) -> None:
    options = ["-t", SHARED / "tokenizers" / "gpt2", "--on-error", "skip", "--unit-bytes", "100k"]
    assert_planned(excerpts, [300, 2048], ["best-fit", "wrap"], *options)
