"""Inputs and results at http://: whatever a server does wrong, the right rows or one error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
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
from support import assert_error, digest, jsonl, packer, random_ids, recover_texts

from packer_cli import storage
from packer_cli.errors import DataError
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
    """Of an empty folder; requests to it may take half a second, and a third in silence."""
    for name, seconds in (
        ("TIMEOUT_SECONDS", 0.3),
        ("_TOTAL_SECONDS", 0.5),
        ("_FIRST_WAIT", 0.001),
    ):
        monkeypatch.setattr(storage, name, seconds)
    (folder / "there").mkdir()
    with http_server.serving(folder / "there") as server:
        yield server


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
    if result.exit_code:
        assert_error(result, 1, f"{server.url}/{form}: ")
        assert _is_of(fault, result.stderr)
        assert not Path("out/manifest.json").exists()
        server.fault = None
        result = packer(*command)
        assert result.exit_code == 0, result.stderr
    else:
        assert fault not in NEVER
    assert recover_texts("out") == TEXTS


# what cannot end in anything but an error
NEVER = {"another total", "a stale edge", "500 for good", "403 in the middle", "no answer"}


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


@pytest.mark.parametrize("fault", FAULTS.keys() - {LIE})  # nothing but it tells what a result is
def test_results(result: Server, packed: Path, fault: str) -> None:
    """Their manifests: all requests are late ones."""
    result.fault, result.first = FAULTS[fault], 1
    found = packer("stats", result.url, "--json")
    if found.exit_code:
        assert _is_of(fault, found.stderr)
        assert found.exit_code in (1, 2)
        assert len(found.stderr.splitlines()) == 1
    else:
        expected = json.loads(packer("stats", packed, "--json").stdout)
        assert json.loads(found.stdout) == expected | {"directory": result.url}


@pytest.mark.parametrize("limit", [None, 120_000])
@pytest.mark.parametrize("fault", FAULTS)
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
    except DataError as error:
        failed = error
    assert torch.equal(rows, expected)
    assert failed is None or (_is_of(fault, failed.message) and failed.tip)
    for path in Path("cache").rglob("shard-*"):
        assert path.name == f"shard-{digest(path)[1]}"
    result.fault = None
    assert torch.equal(all_rows(), expected)


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


def test_a_timeout_that_is_set_for_fsspec_goes_before(
    result: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.5)}}
    monkeypatch.setitem(conf, "http", waits)
    monkeypatch.setattr(storage, "TIMEOUT_SECONDS", 60)
    monkeypatch.setattr(storage, "_TOTAL_SECONDS", 600)
    result.fault = FAULTS["no answer from the beginning"]
    found = packer("stats", result.url)
    assert_error(found, 1, f"{result.url}/manifest.json: cannot read: ", "imeout")
