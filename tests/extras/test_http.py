"""Inputs and results at http://: whatever a server does wrong, the right rows or one error."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import http_server
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.config import conf
from http_server import FAULTS, LIE, Server
from support import (
    assert_error,
    digest,
    jsonl,
    packer,
    packer_script,
    random_ids,
    recover_texts,
    started,
)

from packer_cli import storage
from packer_cli.errors import DataError, PackerError
from packer_cli.result import cached
from packer_cli.torch import PackedDataset

TEXTS = [f"text {i} " + "ab" * (i % 50) for i in range(2000)]


def _parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=300, compression="none")


FORMS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(*TEXTS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(*TEXTS))),
    "a.parquet": _parquet,
}


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Of an empty folder; requests to it may take half a second."""
    waits = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.5)}}
    monkeypatch.setitem(conf, "http", waits)
    monkeypatch.setattr(storage, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(storage, "TIMEOUT_SECONDS", 1)  # of what Retry-After asks for
    (folder / "there").mkdir()
    with http_server.serving(folder / "there") as server:
        yield server


# Faults that end in the right rows, wherever they are; or in what is compared by digest, or is read
# in one go from its beginning. All others, and these elsewhere, end in an error.
HARMLESS = {
    "a weak ETag", "no ETag", "500 once", "503 with Retry-After", "HEAD refused", "HEAD dropped",
    "503 with a Retry-After of 5,000 digits",
}  # fmt: skip
OF_NO_SHARD = {"another total", "another ETag in one range"}
WHOLE_ONLY = {"ranges ignored", "chunks in place of ranges", LIE}
CHANGED = ("cannot read: it changed", "if nothing does, copy it to a local path")
NO_PARTS = ("the server sends no parts of it", "copy it to a local path")
# what errors of inputs say, and advise, where the range that is wrong must be found as it comes
SAID = {
    "another total": CHANGED, "another ETag in one range": CHANGED,
    "an ETag for each edge": CHANGED, "a stale edge": CHANGED,
    "a stale edge without ETags": CHANGED, "a redirect to another version": CHANGED,
    "another span": (" were asked for, bytes ", "check the network"),
    "a longer body": (" bytes came, said to be ", "check the network"),
    "ranges ignored": NO_PARTS, "chunks in place of ranges": NO_PARTS,
    "chunks, and no size at all": ("the server does not tell its size", "copy it to a local path"),
}  # fmt: skip


def _is_of(fault: str, message: str) -> bool:
    """Whether an error is due to a fault: a request that waits is not answered by its server."""
    waits = fault.startswith("no answer") or fault == "a trickle"
    return ("imeout" in message) == waits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_inputs(server: Server, form: str, fault: str) -> None:
    """An error keeps nothing that is wrong: the same command goes on once the server is well."""
    FORMS[form](server.folder / form)
    server.fault = FAULTS[fault]
    command = ("pack", f"{server.url}/{form}", "-l", 64, "-t", "bytes", "-q", "-o", "out",
               "--unit-bytes", 20_000, "--workers", 2)  # fmt: skip
    result = packer(*command)
    is_read_in_one_go = form == "a.jsonl.gz" and fault in WHOLE_ONLY
    if fault in HARMLESS or is_read_in_one_go:
        assert result.exit_code == 0, result.stderr
    else:
        code = 2 if fault == "chunks, and no size at all" else 1
        assert_error(result, code, f"{server.url}/{form}: ")
        assert all(part in result.stderr for part in SAID.get(fault, ()))
        assert _is_of(fault, result.stderr)
        assert not Path("out/manifest.json").exists()
        server.fault = None
        result = packer(*command)
        assert result.exit_code == 0, result.stderr
    assert recover_texts("out") == TEXTS


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About ten shards."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "data.jsonl").write_text(random_ids(400, longest=90))
    options = ("-l", 64, "-q", "--unit-bytes", "15K", "-o", folder / "there")
    assert packer("pack", folder / "data.jsonl", *options).exit_code == 0
    return folder / "there"


@pytest.fixture
def result(server: Server, packed: Path) -> Server:
    server.folder = packed
    return server


@pytest.mark.parametrize(
    "fault", [one for one in FAULTS if one != LIE]
)  # nothing but it tells what a result is
def test_results(result: Server, packed: Path, fault: str) -> None:
    """Their manifests, without which nothing tells what a result is. All requests are late ones."""
    result.fault, result.first = FAULTS[fault], 1
    found = packer("stats", result.url, "--json")
    if fault not in HARMLESS | WHOLE_ONLY:
        assert _is_of(fault, found.stderr)
        assert found.exit_code in (1, 2)
        assert len(found.stderr.splitlines()) == 1
    else:
        assert found.exit_code == 0, found.stderr
        expected = json.loads(packer("stats", packed, "--json").stdout)
        assert json.loads(found.stdout) == expected | {"directory": result.url}


@pytest.mark.parametrize(("fault", "limit"), [*zip(FAULTS, cycle([None, 120_000]))])
def test_the_cache(
    result: Server, packed: Path, fault: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "RANGE_BYTES", 4000)
    local = PackedDataset(packed)

    def all_rows() -> Any:
        dataset = PackedDataset(result.url, cache="cache", cache_bytes=limit)
        parts = [dataset.__getitems__([row]) for row in range(0, len(dataset), 7)]
        return torch.cat([part.columns["input_ids"] for part in parts])

    expected = local.__getitems__(range(0, len(local), 7)).columns["input_ids"]
    result.fault = FAULTS[fault]
    failed, rows = None, expected
    try:
        rows = all_rows()
    except PackerError as error:
        failed = error
    assert (failed is None) == (fault in HARMLESS | OF_NO_SHARD)
    assert torch.equal(rows, expected)
    assert failed is None or (_is_of(fault, failed.message) and failed.tip)
    for path in Path("cache").rglob("shard-*"):
        assert path.name == f"shard-{digest(path)[1]}"
    result.fault = None
    assert torch.equal(all_rows(), expected)


@pytest.mark.parametrize(
    ("fault", "limit"),
    [("no answer from the beginning", "TIMEOUT_SECONDS"), ("a trickle", "_TOTAL_SECONDS")],
)
def test_requests_have_a_time_limit_of_packers_own(
    packed: Path, fault: str, limit: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """For silence, and in all; and there are only so many requests."""
    monkeypatch.setattr(storage, limit, 0.1)
    monkeypatch.setattr(storage, "_FIRST_WAIT", 0.001)
    with http_server.serving(packed) as server:
        server.fault, server.first = FAULTS[fault], 1
        with pytest.raises(DataError, match=r"cannot read: .*[tT]imeout.*tried 3 times"):
            PackedDataset(server.url, cache="cache")


@pytest.mark.parametrize("answered", [0, 1, 2, 3])
def test_ctrl_c_is_heard_while_a_server_is_waited_for(server: Server, answered: int) -> None:
    """Which asks to be asked again in a minute, of a look at the file, or of its content."""
    jsonl_of_parts = jsonl(*TEXTS) * 10
    (server.folder / "a.jsonl").write_bytes(jsonl_of_parts)
    asked = threading.Event()

    def be_busy(answer: http_server.Answer) -> None:
        if answer.method == "GET" and answer.number >= answered:
            answer.becomes(503, **{"Retry-After": "60"})
            asked.set()

    server.fault = be_busy
    command = (packer_script(), "pack", f"{server.url}/a.jsonl", "-l", "64", "-t", "bytes",
               "--unit-bytes", "200k", "--workers", "2", "-o", "out")  # fmt: skip
    with started(*command, stderr=subprocess.PIPE) as process:
        assert asked.wait(60)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=40)
    assert process.returncode == 130
    assert said.decode().splitlines()[-2].endswith("stopped: interrupted")


@pytest.mark.parametrize(
    "address", ["https://127.0.0.1:{}", "http://127.0.0.1:9", "http://no-such-host.invalid"]
)
def test_what_cannot_be_reached(result: Server, address: str) -> None:
    """Encryption that fails, a port that nobody listens at, a name that nobody has."""
    url = address.format(result.url.rpartition(":")[2])
    packing = packer("pack", f"{url}/a.jsonl", "-l", 64, "-t", "bytes", "-q", "-o", "out")
    assert_error(packing, 1, f"{url}/a.jsonl: cannot read: ", "(tried 3 times)")
    with pytest.raises(DataError, match=r"cannot read: .*\(tried 3 times\)"):
        PackedDataset(url, cache="cache")
