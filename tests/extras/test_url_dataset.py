"""PackedDataset at s3://: the rows of the local directory, by loaders, ranks and after faults."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import s3_server
import torch
from recipes import pack_records, run
from s3fs import S3FileSystem
from torch.utils.data import DataLoader

from packer_cli import open_packed, storage
from packer_cli.errors import DataError, UsageError
from packer_cli.result import cached
from packer_cli.result.cached import Foresight
from packer_cli.steps.schedule import Order
from packer_cli.torch import PackedDataset, PackedSampler, padded_collate

L = 64
URL = "s3://bucket/some/out"
SMALL: dict[str, Any] = {"block_rows": 16, "window_blocks": 4}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, s3_server.Proxy]]:
    """The URL of a server, and the proxy before it. One for all: fsspec remembers where it was."""
    with s3_server.server() as endpoint:
        proxy = s3_server.Proxy(endpoint)
        S3FileSystem.clear_instance_cache()
        yield endpoint, proxy
        S3FileSystem.clear_instance_cache()
        proxy.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 650 rows in two dozen shards."""
    random = np.random.default_rng(0)
    records = [{"input_ids": random.integers(0, 50_000, n).tolist()}
               for n in random.integers(1, 90, 900)]  # fmt: skip
    out = pack_records(tmp_path_factory.mktemp("packed"), records, L, "--unit-bytes", "15K")
    assert len(open_packed(out).facts.shards) > 10
    return out


@pytest.fixture
def proxy(
    servers: tuple[str, s3_server.Proxy],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    packed: Path,
) -> Iterator[s3_server.Proxy]:
    """Before a bucket that holds the result at URL."""
    endpoint, proxy = servers
    s3_server.point_to(proxy.endpoint, folder, monkeypatch)
    monkeypatch.setattr(storage, "_FIRST_WAIT", 0.001)
    proxy.undisturbed()
    with s3_server.empty_bucket(endpoint) as proxy.bucket:
        upload(proxy, packed)
        yield proxy
        proxy.undisturbed()


def upload(proxy: s3_server.Proxy, folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            put(proxy, path.name, path.read_bytes())


def put(proxy: s3_server.Proxy, name: str, content: bytes) -> None:
    proxy.bucket.put_object(Key=f"some/out/{name}", Body=content)


def of_shards(proxy: s3_server.Proxy) -> Counter[str]:
    """How often each shard was asked for."""
    return Counter(one for one in proxy.requests if "shard-" in one)


def ids(dataset: PackedDataset, sampler: Any = None, workers: int = 0, **more: Any) -> Any:
    """input_ids of all rows, as a loader gives them."""
    loader = DataLoader(
        dataset, 4, sampler=sampler, num_workers=workers,
        collate_fn=partial(padded_collate, config=None), **more,
    )  # fmt: skip
    return torch.cat([batch["input_ids"] for batch in loader])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("limit", [None, 200_000])
def test_rows_are_those_of_the_local_directory(
    proxy: s3_server.Proxy, packed: Path, workers: int, limit: int | None
) -> None:
    """In the sampler's order, for two epochs, and the second run asks for the manifest alone."""
    local, dataset = PackedDataset(packed), PackedDataset(URL, cache="cache", cache_bytes=limit)
    assert dataset.fingerprint == local.fingerprint
    assert dataset.paths == (URL,)
    assert dataset.result_of(500)[0] == URL
    mine, theirs = (PackedSampler(one, **SMALL) for one in (dataset, local))
    for _ in range(2):
        assert torch.equal(ids(dataset, mine, workers), ids(local, theirs))
        assert mine.state_dict() == theirs.state_dict()
    if limit is None:
        assert set(of_shards(proxy).values()) == {1}
        proxy.requests.clear()
        again = PackedDataset(URL, cache="cache")
        assert torch.equal(ids(again, workers=workers), ids(local))
        assert {one.split()[1] for one in proxy.requests} == {"some/out/manifest.json"}
    else:
        assert size_of("cache") <= limit


def size_of(folder: str) -> int:
    """Of packer's files in a cache."""
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in found)


def test_balanced_steps(proxy: s3_server.Proxy, packed: Path) -> None:
    """Costs are a file of the result; the cache keeps it, too."""
    local, dataset = PackedDataset(packed), PackedDataset(URL, cache="cache", cache_bytes=400_000)
    options: dict[str, Any] = {
        "balance": "order", "batch_size": 2, "micro_batches": 2, "hidden_size": 8, "window": 4,
        "rank": 1, "world_size": 2, **SMALL,
    }  # fmt: skip
    assert list(PackedSampler(dataset, **options)) == list(PackedSampler(local, **options))
    assert np.array_equal(dataset.squared_lengths, local.squared_lengths)
    assert ids(dataset, PackedSampler(dataset, **options)).any()
    assert size_of("cache") <= 400_000


def test_faults_for_a_while(
    proxy: s3_server.Proxy, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # its retries wait longest; others are left
    S3FileSystem.clear_instance_cache()
    seen: Counter[str] = Counter()

    def disturb(key: str) -> str:
        seen[key] += 1
        return ("500", "cut", "reset")[seen[key] % 3] if seen[key] < 3 else ""

    proxy.disturb = disturb
    dataset = PackedDataset(URL, cache="cache")
    assert torch.equal(ids(dataset, workers=2), ids(PackedDataset(packed)))
    assert max(seen.values()) >= 3  # what failed twice was asked for again
    S3FileSystem.clear_instance_cache()


def test_an_s3_that_never_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package tries again by itself, and so do we, but not each try of the one for each of the
    other: 75 requests of 15 seconds.
    """
    monkeypatch.setattr(S3FileSystem, "read_timeout", 0.1)
    monkeypatch.setattr(storage, "_FIRST_WAIT", 0.001)
    S3FileSystem.clear_instance_cache()
    asked = list[socket.socket]()

    def serve() -> None:
        with suppress(OSError):
            while True:
                asked.append(server.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=serve, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        s3_server.point_to(endpoint, folder, monkeypatch)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        with pytest.raises(DataError, match=r"cannot read: .*[tT]imeout.*tried 3 times"):
            PackedDataset(URL, cache="cache")
        server.shutdown(socket.SHUT_RDWR)
    assert len(asked) == 2 * 3
    for connection in asked:
        connection.close()
    S3FileSystem.clear_instance_cache()


def test_a_view_stays_local(proxy: s3_server.Proxy) -> None:
    Path("data.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    run("tokenize", "data.jsonl", "-o", "tokens")
    run("pack", "tokens", "-l", 8, "--view", "-o", "view")
    upload(proxy, Path("view"))
    with pytest.raises(UsageError, match=f"{URL}: a view, which is only read from a local"):
        PackedDataset(URL, cache="cache")


class TestRoom:
    def test_an_order_that_does_not_fit(self, proxy: s3_server.Proxy) -> None:
        dataset = PackedDataset(URL, cache="cache", cache_bytes=60_000)
        with pytest.raises(UsageError, match="would be fetched over and over") as caught:
            PackedSampler(dataset)
        assert "give cache_bytes=" in caught.value.tip
        with pytest.raises(UsageError, match=r"fetched for .* bytes of rows: the order asks for"):
            ids(dataset, shuffle=True, generator=torch.Generator().manual_seed(0))

    def test_one_rank_of_many_reads_little_of_each_shard(
        self, proxy: s3_server.Proxy, packed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That is no waste: its sampler's order fits, whoever fetches the shards."""
        monkeypatch.setattr(Foresight, "coming", lambda self, rows: None)  # as if it were too slow
        dataset = PackedDataset(URL, cache="cache", cache_bytes=150_000)
        both = dataset, PackedDataset(packed)
        share = {"rank": 0, "world_size": 64, "block_rows": 16, "window_blocks": 2}
        samplers = [PackedSampler(one, **share) for one in both]
        rows = [[ids(one, sampler) for _ in range(12)]
                for one, sampler in zip(both, samplers, strict=True)]  # fmt: skip
        assert torch.equal(*map(torch.cat, rows))

    def test_what_has_left_the_cache_is_let_go(
        self, proxy: s3_server.Proxy, packed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or the disk would not have its space back."""
        monkeypatch.setattr(cached, "_LOOK_SECONDS", 0.0)
        dataset, local = (
            PackedDataset(URL, cache="cache", cache_bytes=100_000),
            PackedDataset(packed),
        )
        for first in range(0, len(local), 50):
            rows = range(first, min(first + 50, len(local)))
            got, expected = dataset.__getitems__(rows), local.__getitems__(rows)
            assert torch.equal(got.columns["input_ids"], expected.columns["input_ids"])
        maps, here = Path("/proc/self/maps").read_text().splitlines(), str(Path("cache").absolute())
        mapped = {line.split()[-2] for line in maps if "(deleted)" in line and here in line}
        assert len(mapped) <= 1  # the one that made room for the last

    def test_threads_may_share_a_dataset(
        self, proxy: s3_server.Proxy, packed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While one lets go of shards, others gather from them."""
        monkeypatch.setattr(cached, "_LOOK_SECONDS", 0.0)
        monkeypatch.setattr(cached, "_TURNS", 1000)  # each has an order of its own
        dataset = PackedDataset(URL, cache="cache", cache_bytes=200_000)
        local = PackedDataset(packed)

        def is_right(seed: int) -> bool:
            rows = list(PackedSampler(local, seed=seed, **SMALL))
            parts = [dataset.__getitems__(rows[k : k + 16]) for k in range(0, len(rows), 16)]
            found = torch.cat([part.columns["input_ids"] for part in parts])
            return torch.equal(found, local.__getitems__(rows).columns["input_ids"])

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(is_right, range(4)))

    def test_a_window_never_needs_more_than_the_bound_that_is_checked(
        self, proxy: s3_server.Proxy, packed: Path
    ) -> None:
        shards = open_packed(packed).facts.shards
        ends = np.cumsum([shard.rows for shard in shards])
        sizes = np.array([shard.bytes for shard in shards])
        dataset = PackedDataset(URL, cache="cache", cache_bytes=1 << 30)
        foresight = dataset.foresight
        assert foresight is not None
        for block_rows, window_blocks in ((4, 3), (16, 4), (50, 2), (100, 1)):
            blocks = foresight.largest_blocks(block_rows)
            bound = int(blocks[:window_blocks].sum())
            rows = len(dataset) // block_rows * block_rows  # a shorter block would shift windows
            order, size = Order(rows, 0, block_rows, window_blocks), block_rows * window_blocks
            for epoch in range(3):
                for first in range(0, rows, size):
                    places = epoch * rows + first, epoch * rows + min(first + size, rows)
                    window = order.rows_at(*places)
                    used = np.unique(np.searchsorted(ends, window, side="right"))
                    assert sizes[used].sum() <= bound


def test_a_finished_process_ends(proxy: s3_server.Proxy) -> None:
    """Also in the middle of fetching ahead, without a word."""
    script = (
        "from packer_cli.torch import PackedDataset, PackedSampler\n"
        f"dataset = PackedDataset('{URL}', cache='cache')\n"
        "sampler = PackedSampler(dataset)\n"
        "print(next(iter(sampler)) >= 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    shutil.rmtree("cache")
