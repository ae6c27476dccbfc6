"""Faults of a run, from within: `altered.faulty` begins packer with a call of one of these.

at_step(12, kill)                  before its 12th call that changes the disk
at_step(3, fail, ["fsync"])        before its 3rd call of one kind
when_named("unit-", 5, cut_power)  when the 5th file of that name is in its place
while_reading("a.jsonl", change)   when some of an input, or all of it, is packed
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS = ("rename", "replace", "remove", "unlink", "rmdir", "mkdir", "fsync")
_synced = set[tuple[int, int]]()  # (inode, size) of what a loss of power leaves alone


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_soon(seconds: float) -> None:
    threading.Timer(seconds, kill).start()


def fail() -> None:
    raise OSError(5, "I/O", "out")


def cut_power(*, sizes_stay: bool = False) -> None:
    """Be killed, and have lost the second half of every file that was not brought to the disk.

    `sizes_stay`: the disk knows how long files were, and has zeros in the place of what is lost.
    """
    for path in Path().rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            if (status.st_ino, status.st_size) not in _synced:
                os.truncate(path, status.st_size // 2)
                if sizes_stay:
                    os.truncate(path, status.st_size)
    kill()


def lose_blocks() -> None:
    cut_power(sizes_stay=True)


def _safe(descriptor: int) -> None:
    status = os.fstat(descriptor)
    _synced.add((status.st_ino, status.st_size))


def at_step(step: int, act: Callable[[], None], calls: Sequence[str] = STEPS) -> None:
    """Call `act` before the so-manieth of these calls; in the end the file $STEPS says how many
    there were.
    """
    left, end, sync = step, os._exit, os.fsync
    for path in Path().rglob("*"):
        if path.is_file():
            _synced.add((path.stat().st_ino, path.stat().st_size))

    def synced(descriptor: int) -> None:
        sync(descriptor)
        _safe(descriptor)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                act()
            return call(*arguments, **options)

        return count

    def ended(code: int) -> None:
        if "STEPS" in os.environ:
            Path(os.environ["STEPS"]).write_text(str(step - left))
        end(code)

    os.fsync = synced  # type: ignore[assignment]
    for name in calls:
        setattr(os, name, counted(getattr(os, name)))
    os._exit = ended  # type: ignore[assignment]


def when_named(word: str, times: int, act: Callable[[], None]) -> None:
    """Call `act` when the so-manieth file is in its place, of those whose name has `word` in it."""
    left, rename = times, os.rename

    def renamed(source: Any, target: Any, **where: Any) -> None:
        nonlocal left
        rename(source, target, **where)
        left -= word in str(target)
        if word in str(target) and not left:
            act()

    os.rename = renamed


def while_reading(name: str, change: Callable[[], None]) -> None:
    """Call `change` when a unit has read of an input what it packs, and looks at it once more."""
    from packer_cli.run import commits

    check, done = commits.check_unchanged, list[int]()

    def checked(file: Any) -> bool:
        if file.path == name and not done:
            done.append(1)
            change()
        return check(file)

    commits.check_unchanged = checked


def in_place_of(name: str) -> None:
    """Put another file there, of equal size and time."""
    status = os.stat(name)
    Path("new").write_bytes(Path(name).read_bytes().replace(b"xx", b"yy"))
    os.utime("new", ns=(0, status.st_mtime_ns))
    os.rename("new", name)
