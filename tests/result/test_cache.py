"""Results at URLs through a cache: the rows of the local directory, in bounds, or an error."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import shutil
import signal
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from disk import LocalStore
from hypothesis import given, settings
from hypothesis import strategies as st
from support import packer, random_ids, wait_for

from packer_cli import open_packed, storage
from packer_cli.errors import DataError, UsageError
from packer_cli.result import cached
from packer_cli.result.cached import Cache, CachedDirectory, Foresight, open_cached
from packer_cli.result.reader import PackedDirectory

FORK = multiprocessing.get_context("fork")


class Bucket(LocalStore):
    """A store of objects in local files, read by requests; a test can disturb them."""

    protocol = "bucket"
    requests: ClassVar[list[str]] = []
    disturb: ClassVar[Callable[[str, bytes], bytes]] = staticmethod(lambda path, content: content)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        name = os.path.basename(path)
        Bucket.requests.append(name)
        with open("/".join([os.path.dirname(path), "..", "requests"]), "a") as log:
            log.write(name + "\n")  # of other processes, too
        return Bucket.disturb(name, super().cat_file(path, start, end, **options))


@pytest.fixture(autouse=True)
def _store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    monkeypatch.setattr(Bucket, "requests", [])
    monkeypatch.setattr(Bucket, "disturb", staticmethod(lambda path, content: content))
    monkeypatch.setattr(storage, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(cached, "RANGE_BYTES", 2000)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About twenty shards of 5 to 20 KB."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "data.jsonl").write_text(random_ids(900, longest=90))
    pack(folder / "data.jsonl", folder / "out")
    assert len(open_packed(folder / "out").facts.shards) > 10
    return folder / "out"


def pack(data: Path, out: Path, *more: object) -> None:
    options = ("-l", 64, "-q", "--unit-bytes", "15K", "-o", out, *more)
    result = packer("pack", data, *options)
    assert result.exit_code == 0, result.stderr


@pytest.fixture
def place(packed: Path, folder: Path) -> Path:
    """A copy that is the bucket's content."""
    shutil.copytree(packed, folder / "bucket" / "out")
    return folder / "bucket" / "out"


@pytest.fixture
def url(place: Path) -> str:
    return f"bucket://{place}"


def opened(url: str, limit: int | None = None) -> CachedDirectory:
    return open_cached(url, Cache(Path("cache").absolute(), limit))


def content(result: PackedDirectory, number: int) -> list[Any]:
    return [batch.to_pydict() for batch in result.stored(result.facts.shards[number])]


def holds(result: CachedDirectory, number: int) -> bool:
    return result.cache.holds(result.wanted(result.facts.shards[number]))


def files() -> dict[str, int]:
    """What is in the cache's own folder, with sizes."""
    return {path.name: path.stat().st_size for path in Path("cache").rglob("*") if path.is_file()}


def shards_fetched() -> list[str]:
    return [name for name in Bucket.requests if name.startswith("shard")]


def test_rows_are_those_of_the_local_directory_and_fetched_once(packed: Path, url: str) -> None:
    result, local = opened(url), open_packed(packed)
    for number in range(len(local.facts.shards)):
        assert content(result, number) == content(local, number)
    fetched = shards_fetched()
    assert len(fetched) > 2 * len(local.facts.shards)  # in ranges
    again = opened(url)
    for number in range(len(local.facts.shards)):
        assert content(again, number) == content(local, number)
    assert shards_fetched() == fetched
    assert not [name for name in files() if name.endswith(".part")]


def test_a_copy_of_a_killed_process_holds_no_lock(url: str) -> None:
    result, copy = opened(url), Path("copy").absolute()

    def die(name: str, block: bytes) -> bytes:
        if os.fork() == 0:
            copy.with_suffix(".part").write_text(str(os.getpid()))
            copy.with_suffix(".part").rename(copy)
            time.sleep(60)
            os._exit(0)
        assert wait_for(copy.exists)
        os.kill(os.getpid(), signal.SIGKILL)
        return block

    def fetch() -> None:
        Bucket.disturb = staticmethod(die)
        content(result, 0)

    process = FORK.Process(target=fetch)
    process.start()
    process.join()  # without a time, since the copy keeps its pipe
    try:
        assert result.cache.try_to_fetch(result.wanted(result.facts.shards[0]))
    finally:
        os.kill(int(copy.read_text()), signal.SIGKILL)


@settings(max_examples=25)
@given(st.data())
def test_any_order_in_any_room(packed: Path, data: st.DataObject) -> None:
    """Reading in any order, with errors of the store in between, gives the rows of the local
    directory, or the error; the cache never grows beyond its bound.
    """
    shutil.rmtree("bucket", ignore_errors=True)
    shutil.rmtree("cache", ignore_errors=True)
    shutil.copytree(packed, "bucket/out")
    local = open_packed(packed)
    sizes = [shard.bytes for shard in local.facts.shards]
    least = max(sizes) + 20_000  # and the manifest
    limit = data.draw(st.integers(least, sum(sizes) + 20_000))
    fails: list[bool] = []
    said: list[str] = []

    def disturb(name: str, found: bytes) -> bytes:
        if name.startswith("shard") and fails and fails.pop():
            raise OSError("cut")
        return found

    Bucket.disturb = staticmethod(disturb)
    results = [opened(f"bucket://{Path('bucket/out').absolute()}", limit) for _ in range(2)]
    numbers = st.integers(0, len(sizes) - 1)
    for number in data.draw(st.lists(numbers, max_size=30)):
        fails[:] = data.draw(st.lists(st.booleans(), max_size=8))
        try:
            rows = content(results[data.draw(st.integers(0, 1))], number)
        except DataError as error:
            said.append(error.message)
        else:
            assert rows == content(local, number)
        assert sum(files().values()) <= limit
    assert all("cannot read: cut (tried 3 times)" in one for one in said)


def flip_last(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def cut(path: Path) -> None:
    os.truncate(path, 9)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


# (accident to shard 3, whether while it is fetched, what is said, the tip)
FAULTS: dict[str, tuple[Callable[[Path], object], bool, str, str]] = {
    "other content": (flip_last, False, ": its sha256 is ", "remove the object and upload it"),
    "longer": (lengthen, False, " bytes, the manifest says ", "remove the object and upload it"),
    "shorter": (cut, False, ": has 9 bytes, the manifest says ", "remove the object and upload"),
    "not there": (Path.unlink, False, ": is missing", "upload the result again"),
    "grows": (lengthen, True, ": its sha256 is ", "remove the object and upload it"),
    "cut short": (cut, True, " were asked for, ", "check the network"),
    "gone": (Path.unlink, True, ": cannot read: no such file", "check the network"),
}  # fmt: skip


class TestFaults:
    @pytest.fixture
    def shard(self, place: Path) -> Path:
        return place / open_packed(place).facts.shards[3].file

    def fault(self, url: str, tip: str = "") -> str:
        """The error of reading shard 3; nothing of it stays."""
        with pytest.raises(DataError) as caught:
            content(opened(url), 3)
        assert tip in caught.value.tip
        assert not [name for name in files() if name.endswith(".part")]
        return caught.value.message

    def disturb(
        self, shard: Path, accident: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An accident just before the shard is fetched, once the result is open."""

        def disturbed(name: str, found: bytes) -> bytes:
            if name == shard.name and Bucket.requests.count(name) == 1:
                accident(shard)
                raise OSError("cut")
            return found

        monkeypatch.setattr(Bucket, "disturb", staticmethod(disturbed))

    @pytest.mark.parametrize("name", FAULTS)
    def test_an_object_that_is_not_what_the_manifest_says(
        self, url: str, shard: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accident, is_late, message, tip = FAULTS[name]
        whole = shard.read_bytes()
        if is_late:
            self.disturb(shard, accident, monkeypatch)
        else:
            accident(shard)
        said = self.fault(url, tip)
        assert said.startswith(f"{url}/{shard.name}")
        assert message in said
        shard.write_bytes(whole)
        assert content(opened(url), 3)

    def test_a_connection_that_is_cut_for_good(
        self, url: str, shard: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def disturb(name: str, found: bytes) -> bytes:
            if name == shard.name:
                raise ConnectionResetError("connection reset")
            return found

        monkeypatch.setattr(Bucket, "disturb", staticmethod(disturb))
        said = self.fault(url, "check the network")
        assert said == f"{url}/{shard.name}: cannot read: connection reset (tried 3 times)"

    def test_another_result_meanwhile(
        self, url: str, packed: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pack(packed.parent / "data.jsonl", Path("other").absolute(), "--seed", 5)

        def replace(shard: Path) -> None:
            shutil.rmtree(shard.parent)
            shutil.copytree("other", shard.parent)

        self.disturb(shard, replace, monkeypatch)
        assert self.fault(url) == f"{url}: was replaced by another result while it was read"

    def test_no_result(self, url: str, place: Path) -> None:
        (place / "manifest.json").unlink()
        with pytest.raises(DataError, match=r"has no manifest\.json"):
            opened(url)
        with pytest.raises(DataError, match="no such directory"):
            opened(url + "/nothing")


def test_a_full_disk(url: str, small_disk: Path, packed: Path) -> None:
    """It is refused at the beginning; one that fills later is an error, and nothing stays of the
    shard.
    """
    _on_a_small_disk(url, small_disk, packed)
    gc.collect()  # closes what is open there


def _on_a_small_disk(url: str, disk: Path, packed: Path) -> None:
    limited = open_cached(url, Cache(disk / "cache", 120_000))
    with pytest.raises(UsageError, match=r"the result has .*, and the disk has ") as caught:
        open_cached(url, Cache(disk / "cache"))
    assert "give cache_bytes=" in caught.value.tip
    (disk / "other").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
    with pytest.raises(DataError, match=r"cache: .*: cannot write: No space left"):
        content(limited, 0)
    names = [path.name for path in (disk / "cache").rglob("*")]
    assert not [name for name in names if name.startswith("shard")]
    (disk / "other").unlink()
    for number in range(len(limited.facts.shards)):
        assert content(limited, number) == content(open_packed(packed), number)


def test_a_bound_that_holds_no_shard(url: str) -> None:
    with pytest.raises(UsageError, match="cache_bytes: 10,000 bytes do not hold the largest shard"):
        opened(url, 10_000)


def test_foreign_files(url: str) -> None:
    """Beside packer's folder they stay, a folder of its name is refused, and so are they in it."""
    Path("cache/packer-cache").mkdir(parents=True)
    Path("cache/mine").write_text("mine")
    Path("cache/packer-cache/shard-1").write_text("mine")
    with pytest.raises(UsageError, match="packer-cache: is not packer's own folder") as caught:
        opened(url)
    tip = "move them elsewhere, or choose another cache=; if an older packer left it, remove it"
    assert caught.value.tip == tip
    Path("cache/packer-cache/shard-1").unlink()
    content(opened(url), 0)
    (inside,) = {path.parent for path in Path("cache").rglob("shard-*")}
    (inside / "notes").write_text("mine")
    with pytest.raises(UsageError, match="holds files that packer did not make: notes"):
        opened(url)
    assert (inside / "notes").read_text() == Path("cache/mine").read_text() == "mine"


class TestTrust:
    """Nothing is read that this cache has not written, unless its content is right."""

    @pytest.fixture
    def shard(self, url: str) -> Path:
        """Shard 0 in the cache."""
        result = opened(url)
        content(result, 0)
        return result.cache.path(result.wanted(result.facts.shards[0]))

    @pytest.mark.parametrize("keeps_times", [False, True])
    def test_flipped_bytes_are_fetched_again(
        self, packed: Path, url: str, shard: Path, keeps_times: bool
    ) -> None:
        status = shard.stat()
        whole = shard.read_bytes()
        shard.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
        if keeps_times:  # to the second, as archives do
            os.utime(shard, (status.st_atime, int(status.st_mtime)))
        assert content(opened(url), 0) == content(open_packed(packed), 0)
        assert shard.read_bytes() == whole

    def test_where_times_have_no_nanoseconds_everything_is_compared(
        self, packed: Path, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        utime = os.utime

        def coarse(path: Any, ns: tuple[int, int], **more: Any) -> None:
            utime(path, ns=(ns[0], ns[1] // 10**9 * 10**9), **more)

        monkeypatch.setattr(os, "utime", coarse)
        for _ in range(2):
            result = opened(url)
            assert content(result, 0) == content(open_packed(packed), 0)
        (fetched,) = Counter(shards_fetched()).values()
        assert fetched == -(-result.facts.shards[0].bytes // 2000)  # once

    @pytest.mark.parametrize("mode", [0o775, 0o757])
    def test_a_folder_in_which_others_may_write(self, url: str, shard: Path, mode: int) -> None:
        shard.parent.chmod(mode)
        with pytest.raises(UsageError, match="others may write") as caught:
            opened(url)
        assert f"chmod go-w {shard.parent}" in caught.value.tip
        shard.parent.chmod(0o755)
        content(opened(url), 0)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
    def test_a_folder_of_somebody_else(self, url: str, shard: Path) -> None:
        os.chown(shard.parent.parent, 12345, -1)
        with pytest.raises(UsageError, match="belongs to another user"):
            opened(url)

    def test_a_umask_that_lets_groups_write(self, url: str) -> None:
        before = os.umask(0o002)
        try:
            content(opened(url), 0)
        finally:
            os.umask(before)
        content(opened(url), 0)
        (shard,) = Path("cache").rglob("shard-*")
        assert [stat.S_IMODE(one.stat().st_mode) for one in shard.parents[:2]] == [0o700, 0o700]


def test_two_results_share_a_cache(packed: Path, url: str, place: Path) -> None:
    pack(packed.parent / "data.jsonl", place.parent / "other", "--seed", 5)
    other = f"bucket://{place.parent}/other"
    limit = 150_000
    one, two = opened(url, limit), opened(other, limit)
    for number in range(len(one.facts.shards)):
        assert content(one, number) == content(open_packed(packed), number)
        assert content(two, number) == content(open_packed(place.parent / "other"), number)
        assert sum(files().values()) <= limit


def test_what_is_not_used_goes_first(url: str) -> None:
    result = opened(url, 120_000)
    content(result, 0)
    shards = result.facts.shards
    for number in range(1, len(shards)):
        result.cache.touch([result.wanted(shards[0])])
        content(result, number)
    assert holds(result, 0)
    assert not holds(result, 1)


def _read_all(url: str, limit: int | None, expected: list[Any]) -> None:
    result = opened(url, limit)
    order = np.random.default_rng(os.getpid()).permutation(len(expected))
    assert all(content(result, number) == expected[number] for number in order)


def joined(processes: list[Any]) -> list[int | None]:
    for one in processes:
        one.join(60)
    return [one.exitcode for one in processes]


@pytest.mark.parametrize("limit", [None, 120_000])
def test_processes_at_once(packed: Path, url: str, place: Path, limit: int | None) -> None:
    """Each shard is fetched once for all of them, where the cache holds the result."""
    local = open_packed(packed)
    expected = [content(local, number) for number in range(len(local.facts.shards))]
    given = (url, limit, expected)
    processes = [FORK.Process(target=_read_all, args=given) for _ in range(4)]
    for one in processes:
        one.start()
    assert joined(processes) == [0] * 4
    fetched = (place.parent / "requests").read_text().splitlines()
    if limit is None:
        ranges = sum(-(-shard.bytes // 2000) for shard in local.facts.shards)
        assert len([name for name in fetched if name.startswith("shard")]) == ranges


def test_processes_that_are_killed(packed: Path, url: str, place: Path) -> None:
    """Whatever they leave, the next ones read the right rows, and wait for nobody."""
    local, limit = open_packed(packed), 120_000
    expected = [content(local, number) for number in range(len(local.facts.shards))]
    log = place.parent / "requests"
    for seen in range(1, 80, 7):
        processes = [FORK.Process(target=_read_all, args=(url, limit, expected)) for _ in range(2)]
        log.write_text("")
        for one in processes:
            one.start()
        while len(log.read_text().splitlines()) < seen and any(p.is_alive() for p in processes):
            time.sleep(0.001)
        os.kill(processes[0].pid or 0, signal.SIGKILL)
        assert joined(processes) in ([-9, 0], [0, 0])
    result = opened(url, limit)
    for number in range(len(expected)):
        assert content(result, number) == expected[number]
    assert not [name for name in files() if name.endswith(".part")]


def rows_of(result: CachedDirectory, first: int = 0, last: int | None = None) -> Any:
    """The rows of some shards, in their order."""
    ends = np.cumsum([0, *(shard.rows for shard in result.facts.shards)])
    return np.arange(ends[first], ends[-1] if last is None else ends[last])


class TestForesight:
    def test_shards_are_fetched_as_far_as_there_is_room(self, url: str) -> None:
        result = opened(url, 120_000)
        shards, foresight = result.facts.shards, Foresight([result], result.cache)
        room = 120_000 - result.side_bytes
        fitting = int((np.cumsum([shard.bytes for shard in shards]) <= room).sum())
        assert 3 < fitting < len(shards)
        foresight.coming(rows_of(result))
        assert wait_for(lambda: all(holds(result, number) for number in range(fitting)))
        foresight.coming(rows_of(result, 2, fitting))
        assert wait_for(lambda: not threads())
        assert all(holds(result, number) for number in range(fitting))

    def test_what_another_process_fetches_is_tried_again(self, url: str) -> None:
        result = opened(url)
        wanted = result.wanted(result.facts.shards[0])
        part = result.cache.path(wanted).with_suffix(".part")
        with open(part, "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            Foresight([result], result.cache).coming(rows_of(result, 0, 1))
            time.sleep(0.2)
            assert threads()
            part.unlink()
        assert wait_for(lambda: holds(result, 0))

    def test_a_copy_of_the_process_fetches_by_itself(self, packed: Path, url: str) -> None:
        """Threads and locks of the first process, in the middle of fetching, hold up nobody."""
        begun, go_on = threading.Event(), threading.Event()

        def disturb(name: str, found: bytes) -> bytes:
            if threading.current_thread().name == "packer-ahead":
                begun.set()
                go_on.wait(60)
            return found

        result = opened(url)
        Bucket.disturb = staticmethod(disturb)
        foresight = Foresight([result], result.cache)
        foresight.coming(rows_of(result))
        assert begun.wait(30)
        number = len(result.facts.shards) - 1  # which no thread has begun
        expected = content(open_packed(packed), number)

        def copy() -> None:
            go_on.set()  # its own
            assert content(result, number) == expected
            foresight.coming(rows_of(result, 5))
            os._exit(7)

        child = FORK.Process(target=copy)
        child.start()
        assert joined([child]) == [7]
        go_on.set()
        assert wait_for(lambda: not threads())

    def test_a_word_about_what_is_fetched_often(self, url: str) -> None:
        result = opened(url, 110_000)
        with pytest.warns(UserWarning, match="an epoch fetches shards about"):
            Foresight([result], result.cache).check_order(2, 2)


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "packer-ahead"]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert wait_for(lambda: not threads())
