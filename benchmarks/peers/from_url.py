"""Rows a second of a packed directory at s3://, from a server on this machine.

python from_url.py DIR    prints {"cold": rate, ...}, or {"skipped": why}
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from packer_cli.torch import PackedDataset, PackedSampler

try:
    import boto3
    import moto.server  # noqa: F401 it is started as a process
    import s3fs
except ImportError as error:
    print(json.dumps({"skipped": f"the peers' environment has no {error.name}: make peers"}))
    sys.exit()

URL, BATCH, ROUNDS = "s3://bucket/out", 8, 25


def rates(directory: Path) -> dict[str, Any]:
    """cold, warm, local: rows a second of one process in the sampler's order; fetched: of s3fs
    alone, which asks for the same shards one after another, as rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        remote = PackedDataset(URL, cache=f"{folder}/cache")
        rows = drained(remote)
        cold = rows / (time.perf_counter() - begun)
        rounds: dict[str, float] = {"local": 0, "warm": 0}
        datasets = {
            "local": PackedDataset(directory),
            "warm": PackedDataset(URL, cache=f"{folder}/cache"),
        }
        for _ in range(ROUNDS):  # in turn, so that a busy moment meets both
            for name, dataset in datasets.items():
                begun = time.perf_counter()
                drained(dataset)
                rounds[name] = max(rounds[name], rows / (time.perf_counter() - begun))
    seconds, size = fetched(directory)
    return {"cold": cold, "fetched": rows / seconds, "row_bytes": size / rows, **rounds}


def drained(dataset: Any) -> int:
    sampler = PackedSampler(dataset)
    loader = DataLoader(dataset, BATCH, sampler=sampler, collate_fn=lambda batch: batch)
    return sum(len(batch) for batch in loader)


def fetched(directory: Path) -> tuple[float, int]:
    """(seconds, bytes) of fetching all shards."""
    store = s3fs.S3FileSystem()
    begun, size = time.perf_counter(), 0
    for path in directory.glob("*.arrow"):
        size += len(store.cat_file(f"bucket/out/{path.name}"))
    return time.perf_counter() - begun, size


def upload(directory: Path) -> None:
    bucket = boto3.resource("s3").Bucket("bucket")
    for _ in range(600):
        with suppress(Exception):  # until the server answers
            bucket.create()
            break
        time.sleep(0.1)
    for path in directory.iterdir():
        if path.is_file():
            bucket.upload_file(str(path), f"out/{path.name}")


def main() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        directory = Path(sys.argv[1])
        upload(directory)
        print(json.dumps(rates(directory)))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
