"""What every test has: an environment of its own, and places to work in."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from copies import children_are_copies, disks_are_not_waited_for
from hypothesis import HealthCheck, settings

# Shells let programs in the background ignore it, and those that we start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Machines that run tests are busy: a slow example is no failure.
settings.register_profile("packer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("packer")
# The children of runs in this process need not import everything again.
children_are_copies()
disks_are_not_waited_for()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the developer's environment says."""
    monkeypatch.delenv("PACKER_TOKENIZER", raising=False)


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
