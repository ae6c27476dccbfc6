"""What does everything cost that starts from a tokenized directory?

A view of a billion tokens in 2 million documents, and of 20 million documents: the index is made
here, of log-normal lengths with a mean of 500, and no token exists. Then 670 MB of text, tokenized
(170 million tokens): packed again at another length as a view and as shards, against packing the
text, and against a plain sequential write and fsync of as many bytes. Whole processes, llama3_1.
Two minutes; 4 GB of disk.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import pyarrow as pa
from measuring import report, run, say, skip
from runs import pack
from settings import Settings, from_environment

from packer_cli.records import Int32
from packer_cli.result.columns import HASH_BYTES, INDEX_SCHEMA
from packer_cli.result.layout import (
    DOCUMENTS,
    FORMAT_VERSION,
    INDEX,
    Shard,
    digest,
    named_by_digest,
    unnamed_shard,
)
from packer_cli.result.manifest import TOKENIZED, TokenizedManifest, to_bytes

SIZES = ((2_000_000, 2.0, 0.0), (20_000_000, 20.0, 1.5))  # documents, most seconds, most GB
LENGTH, MEAN = 4096, 500
LEAST_OF_DISK, LEAST_VIEW, RUNS = 0.8, 3.0, 3
_SIGMA = 1.2


def _lengths(count: int) -> Int32:
    mean = np.log(MEAN) - _SIGMA**2 / 2
    lengths = np.random.default_rng(0).lognormal(mean, _SIGMA, count)
    return np.clip(lengths, 1, 1 << 17).astype(np.int32)


def index_alone(folder: Path, count: int, hashes: bytes | None = None) -> int:
    """A tokenized directory of so many documents without their tokens; how many these would be.

    `hashes`: of their contents, 16 bytes each; None: all different.
    """
    folder.mkdir(parents=True)
    lengths = _lengths(count)
    tokens = int(lengths.sum(dtype=np.int64))
    if hashes is None:
        hashes = np.random.default_rng(1).bytes(HASH_BYTES * count)
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(lengths),
            pa.array(lengths - 1),
            pa.Array.from_buffers(pa.binary(HASH_BYTES), count, [None, pa.py_buffer(hashes)]),
        ],
        schema=INDEX_SCHEMA,
    )
    index = folder / unnamed_shard(INDEX, 0, 0)
    with pa.OSFile(str(index), "wb") as sink, pa.ipc.new_stream(sink, INDEX_SCHEMA) as stream:
        stream.write_batch(batch)
    size, sha256 = digest(index)
    index = index.rename(folder / named_by_digest(index.name, sha256))
    nobody_knows = "0" * 64
    documents = folder / named_by_digest(unnamed_shard(DOCUMENTS, 0, 0), nobody_knows)
    with open(documents, "wb") as file:
        file.truncate(4 * tokens)  # a hole: nobody may read it
    figures: dict[str, Any] = {"unit": 0, "rows": count, "segments": count, "tokens": tokens,
               "trained_tokens": tokens - count}  # fmt: skip
    shards = [
        Shard(documents.name, bytes=4 * tokens, sha256=nobody_knows, **figures),
        Shard(index.name, bytes=size, sha256=sha256, **figures),
    ]
    nothing = dict.fromkeys(
        ("rejected_records", "empty_documents", "trained_turns", "turns_without_end",
         "double_bos_documents", "unshown_tools"), 0
    )  # fmt: skip
    powers = [0] * 32
    manifest = TokenizedManifest.of(
        {
            "format_version": FORMAT_VERSION, "packer_version": "0", "kind": TOKENIZED,
            "config": {"shape": "text"}, "tokenizer": None, "documents": count, "tokens": tokens,
            "trained_tokens": tokens - count, **nothing, "inputs": [], "units": [],
            "shards": [{f: getattr(s, f) for f in Shard.__struct_fields__} for s in shards],
            "histograms": {"document_length": powers},
        }
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(to_bytes(manifest.document))
    return tokens


def _view_of_index(settings: Settings, count: int, most: float, most_gb: float) -> None:
    with inputs.Output(settings) as output:
        tokens = index_alone(output.parent / "tokens", count)
        command: list[str | Path] = [
            settings.packer, "pack", output.parent / "tokens", "--max-length", str(LENGTH),
            "--view", "--output", output, "--overwrite", "--quiet", "--json",
        ]  # fmt: skip
        found = [run(command, watch=True) for _ in range(RUNS)]
        figures = json.loads(found[0].stdout)
        size = sum(path.stat().st_size for path in output.glob("shard-*.arrow"))
    best, peak = min(one.seconds for one in found), max(one.peak for one in found)
    bytes_a_segment = size / figures["segments"]
    limit = f"<= {most:.0f} s" + (f", <= {most_gb} GB" if most_gb else "")
    report(
        f"a view of {tokens / 1e9:.1f} billion tokens in {count // 1_000_000} million documents",
        f"{limit}, <= 24 bytes a segment",
        f"{best:.2f} s, {peak / 1e9:.2f} GB, {bytes_a_segment:.1f} bytes",
        best <= most and bytes_a_segment <= 24 and (not most_gb or peak <= most_gb * 1e9),
        seconds=[one.seconds for one in found],
        utilization=figures["utilization"],
        view_bytes=size,
    )


def plain_write(path: Path, size: int) -> float:
    """Seconds to write and fsync so many bytes, one after the other."""
    block = os.urandom(1 << 20)
    os.sync()
    begun = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(size >> 20):
            file.write(block)
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def _again(settings: Settings) -> None:
    files, quick = inputs.tenfold(settings), settings.quick
    size = "20" if quick else "670"
    with inputs.Output(settings) as output:
        tokens = output.parent / "tokens"
        command: list[str | Path] = [settings.packer, "tokenize", *files, "--output", tokens]
        run([*command, "--tokenizer", settings.tokenizer, "--quiet", "--json"])
        raw, view, shards, disk, peak = [], [], [], [], 0
        for _ in range(1 if quick else RUNS):
            packed = pack(settings, files, output, tokenizer=settings.tokenizer, max_length=2048)
            raw.append(packed.finished.seconds)
            again: list[str | Path] = [
                settings.packer, "pack", tokens, "--max-length", "2048", "--output", output,
                "--overwrite", "--quiet", "--json",
            ]  # fmt: skip
            view.append(run([*again, "--view"]).seconds)
            done = run(again, watch=True)
            shards.append(done.seconds)
            peak = max(peak, done.peak)
            written = sum(path.stat().st_size for path in output.glob("shard-*.arrow"))
            disk.append(plain_write(output.parent / "plain", written))
            (output.parent / "plain").unlink()
            say(f"text {raw[-1]:.2f} s, view {view[-1]:.2f} s, shards {shards[-1]:.2f} s, "
                f"plain write {disk[-1]:.2f} s")  # fmt: skip
    ratio = min(raw) / min(view)
    report(
        f"{size} MB of text at another length: a view, against packing the text again",
        "" if quick else f">= {LEAST_VIEW:.0f} x as fast",
        f"{ratio:.1f} x ({min(view):.2f} and {min(raw):.2f} s)",
        None if quick else ratio >= LEAST_VIEW,
        view_seconds=view, raw_seconds=raw,
    )  # fmt: skip
    share = max(d / s for d, s in zip(disk, shards, strict=True))
    report(
        f"{size} MB of text at another length: shards, against a plain write of as many bytes",
        "" if quick else f">= {LEAST_OF_DISK} x its speed, <= 1 GB of memory",
        f"{share:.2f} x ({written / min(shards) / 1e6:.0f} MB/s), {peak / 1e9:.2f} GB",
        None if quick else share >= LEAST_OF_DISK and peak <= 1e9,
        shard_seconds=shards, plain_seconds=disk, bytes=written,
    )  # fmt: skip


def main() -> None:
    settings = from_environment()
    for count, most, most_gb in SIZES[: 1 if settings.quick else None]:
        _view_of_index(settings, count, most, most_gb)
    if why := inputs.missing(settings):
        skip("packing again from a tokenized directory", "", why)
        return
    _again(settings)


if __name__ == "__main__":
    main()
