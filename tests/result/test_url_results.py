"""Rows of results at URLs: those of the local directory, from copies that are compared once."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support import random_ids, succeeds

from packer_cli import open_packed
from packer_cli.errors import DataError, UsageError
from packer_cli.result.reader import PackedDirectory, squared_lengths

URL = "memory://bucket/out"
STORE = fsspec.filesystem("memory")


def upload(directory: str) -> None:
    MemoryFileSystem.store.clear()
    for path in Path(directory).iterdir():
        STORE.pipe_file(f"memory://bucket/{directory}/{path.name}", path.read_bytes())


@pytest.fixture
def shard(folder: Path) -> str:
    """The name of one of several shards of a result, in out/ and at URL."""
    Path("a.jsonl").write_text(random_ids(300, longest=90))
    succeeds("pack", "a.jsonl", "-l", 64, "--unit-bytes", "15K", "-o", "out", "-q")
    upload("out")
    shards = open_packed("out").facts.shards
    assert len(shards) > 3
    return str(shards[1].file)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each object was copied."""
    found, get_file = Counter[str](), MemoryFileSystem.get_file

    def counted(self: Any, path: str, *how: Any, **more: Any) -> None:
        found[path.rpartition("/")[2]] += 1
        time.sleep(0.01)
        get_file(self, path, *how, **more)

    monkeypatch.setattr(MemoryFileSystem, "get_file", counted)
    return found


def rows(packed: PackedDirectory) -> Any:
    return packed.take(np.arange(len(packed)))


def test_each_shard_is_copied_once_whoever_reads_it(shard: str, fetched: Counter[str]) -> None:
    expected = rows(open_packed("out"))

    def read(_: int) -> bool:
        packed = open_packed(URL, cache="cache")
        is_equal = bool((squared_lengths(packed) == squared_lengths(open_packed("out"))).all())
        return is_equal and rows(packed).equals(expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))
    assert len(fetched) > 4
    assert {*fetched.values()} == {1}
    (copies,) = Path("cache").iterdir()
    for path in copies.iterdir():
        if path.suffix != ".part":  # that another thread was about to write
            assert path.read_bytes() == Path("out", path.name).read_bytes()
    assert read(0)
    assert {*fetched.values()} == {1}


def test_what_is_fetched_later_is_not_fetched_now(shard: str, fetched: Counter[str]) -> None:
    packed = open_packed(URL, cache="cache")
    assert not fetched
    packed.take(np.array([0]))
    assert fetched.total() == 1


def test_the_usual_place(shard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, place in (("XDG_CACHE_HOME", "here", "here/packer"), ("HOME", ".", ".cache")):
        monkeypatch.setenv(name, value)
        rows(open_packed(URL))
        assert list(Path(place).rglob(shard))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_what_is_not_the_manifests_is_never_read(shard: str) -> None:
    content = bytearray(Path("out", shard).read_bytes())
    content[-100] ^= 1
    STORE.pipe_file(f"{URL}/{shard}", bytes(content))
    with pytest.raises(DataError, match=f"{URL}/{shard}: its sha256 is .*, the manifest says"):
        rows(open_packed(URL, cache="cache"))
    assert not list(Path("cache").rglob(shard))
    STORE.rm_file(f"{URL}/{shard}")
    with pytest.raises(DataError, match=f"{URL}/{shard}: cannot read: no such file"):
        rows(open_packed(URL, cache="cache"))
    STORE.put_file(f"out/{shard}", f"/bucket/out/{shard}")
    packed = open_packed(URL, cache="cache")
    rows(packed)
    (copy,) = Path("cache").rglob(shard)
    os.truncate(copy, 100)  # as a power loss leaves it
    assert rows(open_packed(URL, cache="cache")).equals(rows(open_packed("out")))


def test_a_result_that_is_replaced_while_it_is_read(shard: str) -> None:
    packed = open_packed(URL, cache="cache")
    shutil.rmtree("out")
    succeeds("pack", "a.jsonl", "-l", 32, "-o", "out", "-q")
    upload("out")
    for read in (rows, squared_lengths):
        with pytest.raises(DataError, match=f"{URL}: was replaced by another result"):
            read(packed)
    assert rows(open_packed(URL, cache="cache")).equals(rows(open_packed("out")))


def test_what_is_refused(shard: str) -> None:
    with pytest.raises(UsageError, match="and cache= names a local directory"):
        open_packed(URL, cache="memory://cache")
    with pytest.raises(DataError, match="memory://bucket/no: no such directory"):
        open_packed("memory://bucket/no")
    Path("cache").write_bytes(b"mine")
    with pytest.raises(DataError, match="cannot write: Not a directory"):
        rows(open_packed(URL, cache="cache"))
    for command in ("tokenize a.jsonl -o tokens -q", "pack tokens -l 64 --view -o view -q"):
        succeeds(*command.split())
    upload("view")
    with pytest.raises(UsageError, match="memory://bucket/view: a view, which is only read from"):
        open_packed("memory://bucket/view")
