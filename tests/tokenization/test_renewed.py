"""An object is renewed for what the process has grown while it was used, and never in use."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from packer_cli.tokenization import renewed
from packer_cli.tokenization.renewed import Renewed, resident

MB = 1 << 20


class Cache:
    made: list[Cache]

    def __init__(self) -> None:
        self.users = 0
        assert not any(other.users for other in Cache.made)
        Cache.made.append(self)


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    Cache.made = []


def used(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many were made when the process had these sizes in MB, a look at a time."""
    left = iter(sizes)
    monkeypatch.setattr(renewed, "resident", lambda: next(left) * MB)
    cache = Renewed(Cache)
    for _ in sizes:
        with cache.using(renewed._LOOK_AFTER):
            pass
    return len(Cache.made)


def test_it_is_renewed_once_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    settling = [100 + 10 * i for i in range(16)]  # not counted
    assert used([*settling, *[250 + 128] * 100], monkeypatch) == 1
    Cache.made.clear()
    assert used([*settling, *[250 + 129] * 8], monkeypatch) == 2


def test_what_comes_and_goes_is_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert used([*[200] * 16, *[900, 900, 900, 300] * 20], monkeypatch) == 1


def test_a_new_one_settles_before_it_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    # what the old one leaves behind would otherwise have every new one renewed at once
    assert used([*[200] * 16, *[400] * 8, *[400] * 100], monkeypatch) == 2


def test_nobody_has_it_while_it_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewed, "resident", lambda: None)
    monkeypatch.setattr(renewed, "_MOST_USED", 50)
    monkeypatch.setattr(renewed, "_LOOK_AFTER", 0)
    cache, counting = Renewed(Cache), threading.Lock()

    def use(_: int) -> None:
        with cache.using(1) as one:
            for step in (1, -1):
                with counting:
                    one.users += step

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(5000)))
    assert len(Cache.made) == 1 + 5000 // 51


def test_more_threads_may_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewed, "resident", lambda: 200 * MB)
    cache = Renewed(Cache)
    with cache.using(1), cache.using(renewed._SETTLED):
        pass
    monkeypatch.setattr(renewed, "resident", lambda: (200 + 2 * 128) * MB)
    for _ in range(100):
        with cache.using(renewed._LOOK_AFTER):
            pass
    assert len(Cache.made) == 1


def test_the_size_of_this_process_is_seen() -> None:
    before = resident()
    if before is None:
        pytest.skip("no /proc here")
    with mmap.mmap(-1, 256 * MB) as held:  # pages of its own, and none of those that malloc keeps
        np.frombuffer(held, np.uint8)[:] = 1
        assert (resident() or 0) - before > 200 * MB
