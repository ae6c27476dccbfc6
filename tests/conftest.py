"""What every test has: an environment of its own, and places to work in."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from copies import disks_are_not_waited_for
from hypothesis import HealthCheck, settings

from packer_cli.chat import limits
from packer_cli.errors import Interrupted
from packer_cli.inputs.tokenized import opened
from packer_cli.mixing import units
from packer_cli.run import pool

# Files in memory are made and removed sooner than those of a disk, which may be busy.
_MEMORY, _ROOM_BYTES = "/dev/shm", 4 << 30  # noqa: S108
with suppress(OSError):
    if shutil.disk_usage(_MEMORY).free > _ROOM_BYTES and os.access(_MEMORY, os.W_OK):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)
# Shells let programs in the background ignore it, and those that we start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Machines that run tests are busy: a slow example is no failure.
settings.register_profile("packer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("packer")
# xdist has a thread that does nothing but wait for messages: a fork without it is as good.
pool.has_threads = lambda: False


def _map_here(workers: pool.Pool[Any, Any], items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """As `Pool.map`, in this process: a fork would copy the tables of all memory that tests use."""
    workers._prepare()
    limits.enter_worker(memoryview(bytearray(8)).cast("q"))
    try:
        for index, item in enumerate(items):
            limits.begin_item({})
            yield index, workers._perform(item)
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


@pytest.fixture(autouse=True)
def _workers_are_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test is about workers (`forking`). Other processes than this one fork."""
    if not request.node.get_closest_marker("forking"):
        monkeypatch.setattr(pool.Pool, "map", _map_here)


@pytest.fixture(autouse=True)
def _directories_are_closed() -> Iterator[None]:
    """Each that stays open holds its files open, and a process that runs all tests may not have
    thousands.
    """
    yield
    opened.cache_clear()
    units._choice_of.cache_clear()


disks_are_not_waited_for()
# Of what tests are made nothing becomes free: it is looked through neither now nor later.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many runs were stopped (`run/test_kills.py`), and by what."""
    tried, failed = Counter[str](), 0
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if getattr(report, "when", "") == "call":
            for by_act, problems in [two for key, two in report.user_properties if key == "stops"]:
                tried.update(by_act)
                failed += problems
    if tried:
        told = ", ".join(f"{act} {count}" for act, count in tried.items())
        count = tried.total()
        terminalreporter.write_line(f"stops: {count} tried ({told}), {count - failed} held")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the developer's environment says, and whatever other tests have found."""
    monkeypatch.delenv("PACKER_TOKENIZER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, and the current one, so that tests name files like a user does."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = folder / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
