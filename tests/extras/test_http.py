"""Inputs and results at http://: whatever a server does wrong, the right rows or one error."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import fsspec
import http_server
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.config import conf
from http_server import FAULTS, Server
from support import jsonl, packer, recover_texts

from packer_cli import open_packed, storage
from packer_cli.errors import PackerError
from packer_cli.torch import PackedDataset

TEXTS = [f"text {i} " + "ab" * (i % 50) for i in range(2000)]
SECONDS = 0.5  # that a request may take


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
    waits = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=SECONDS)}}
    monkeypatch.setitem(conf, "http", waits)
    fsspec.get_filesystem_class("http").clear_instance_cache()
    (folder / "there").mkdir()
    with http_server.serving(folder / "there") as server:
        yield server


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_inputs(server: Server, monkeypatch: pytest.MonkeyPatch, form: str, fault: str) -> None:
    FORMS[form](server.folder / form)
    monkeypatch.setattr(Server, "fault", staticmethod(FAULTS[fault]))
    command = ["pack", f"{server.url}/{form}", "-l", 64, "-t", "bytes", "-q", "-o", "out"]
    begun = time.monotonic()
    result = packer(*command, "--unit-bytes", 20_000, "--workers", 2)
    took = time.monotonic() - begun
    print("COL", form, "|", fault, "|", result.exit_code, f"{took:.1f}", "|", result.stderr)
    if result.exit_code:
        assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error", "tip"]
        assert result.exit_code == 1 or "from the beginning" in fault
    else:
        assert recover_texts("out") == TEXTS
        return
    monkeypatch.setattr(Server, "fault", staticmethod(lambda answer: None))
    again = packer(*command, "--unit-bytes", 20_000)
    print("COL", "   again", again.exit_code, again.stderr)
    assert again.exit_code == 0
    assert recover_texts("out") == TEXTS
