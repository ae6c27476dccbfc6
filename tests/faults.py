"""Faults of a run, from within: `altered.faulty` begins packer with a call of one of these.

at_step(12, kill)                  before its 12th operation that changes files
when_named("unit-", 5, cut_power)  when the 5th file of that name is in its place
while_reading("a.jsonl", change)   when some of an input, or all of it, is packed

Operations are those that Python tells an audit hook of, and writes and syncs, which are told here.
Arrow writes shards and tables past Python: what it wrote is torn, lost or refused at the sync that
follows.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GROW = {"open", "os.mkdir", "told.write", "told.fsync"}  # need space
_CHANGE = {*_GROW, "os.rename", "os.remove", "os.rmdir", "os.truncate"}
_run = os.getpid()  # workers are forked from it, and share what follows
_synced = os.memfd_create("synced")  # lines (inode, size) of what a loss of power leaves alone
_shared = memoryview(mmap.mmap(-1, 24)).cast("q")
_LEFT, _FULL, _DONE = 0, 1, 2  # in it: events that are left, a full disk, a change that was made


def kill() -> None:
    os.kill(_run, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_soon(seconds: float) -> None:
    if os.fork() == 0:
        time.sleep(seconds)
        kill()


def interrupt() -> None:
    _signal(signal.SIGINT)


def terminate() -> None:
    _signal(signal.SIGTERM)


def _signal(number: int) -> None:
    os.kill(_run, number)
    if os.getpid() != _run:  # which ends this worker
        signal.pause()


def _is_last() -> bool:
    """True at the event that was to be waited for, in whatever process it is."""
    _shared[_LEFT] -= 1
    return _shared[_LEFT] == 0


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def fill_disk() -> None:
    """From now on there is no space for anything new."""
    _shared[_FULL] = 1


def cut_power(*, sizes_stay: bool = False) -> None:
    """Be killed, and have lost the second half of every file that was not brought to the disk.

    `sizes_stay`: the disk knows how long files were, and has zeros in the place of what is lost.
    """
    synced = set(os.pread(_synced, os.fstat(_synced).st_size, 0).splitlines())
    for path in Path().rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            if b"%d %d" % (status.st_ino, status.st_size) not in synced:
                os.truncate(path, status.st_size // 2)
                if sizes_stay:
                    os.truncate(path, status.st_size)
    kill()


def lose_blocks() -> None:
    cut_power(sizes_stay=True)


def _safe(file: int | Path) -> None:
    status = os.stat(file)
    os.write(_synced, b"%d %d\n" % (status.st_ino, status.st_size))


def fail_sync(number: int) -> None:
    """The so-manieth sync to the disk fails, and the second half of the file is lost."""
    _shared[_LEFT], sync = number, os.fsync

    def synced(descriptor: int) -> None:
        if not _is_last():
            sync(descriptor)
            return
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            os.truncate(f"/proc/self/fd/{descriptor}", status.st_size // 2)
        fail()

    os.fsync = synced  # type: ignore[assignment]


def at_step(step: int, act: Callable[[], None]) -> None:
    """Call `act` before the so-manieth operation that changes files; at 0, the file $STEPS says in
    the end how many there were.
    """
    _shared[_LEFT], end = step, os._exit
    sys.dont_write_bytecode = True  # only the first run would have to
    for path in Path().rglob("*"):
        if path.is_file():
            _safe(path)
    _tell()

    def count(event: str, about: tuple[Any, ...]) -> None:
        if event not in _CHANGE or (event == "open" and not _creates(*about)):
            return
        if _is_last():
            act()
        if _shared[_FULL] and event in _GROW:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def ended(code: int) -> None:
        if step == 0 and "STEPS" in os.environ:
            Path(os.environ["STEPS"]).write_text(str(-_shared[_LEFT]))
        end(code)

    sys.addaudithook(count)
    os._exit = ended  # type: ignore[assignment]


def _creates(file: Any, mode: Any, flags: int) -> bool:
    return bool(flags & os.O_CREAT) and str(file) != os.devnull


class _Told(io.FileIO):
    def write(self, data: Any) -> int:
        sys.audit("told.write")
        return super().write(data)


def _tell() -> None:
    """Have audit hooks told of writes and syncs."""
    sync, plain = os.fsync, builtins.open

    def synced(descriptor: int) -> None:
        sys.audit("told.fsync")
        sync(descriptor)
        _safe(descriptor)

    def opened(file: Any, mode: str = "r", *others: Any, **how: Any) -> Any:
        if "b" not in mode or mode == "rb" or str(file) == os.devnull:
            return plain(file, mode, *others, **how)
        raw = _Told(file, mode, how.get("closefd", True))
        return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    os.fsync = synced  # type: ignore[assignment]
    builtins.open = io.open = opened


def when_named(word: str, times: int, act: Callable[[], None]) -> None:
    """Call `act` when the so-manieth file is in its place, of those whose name has `word` in it."""
    _shared[_LEFT], rename = times, os.rename

    def renamed(source: Any, target: Any, **where: Any) -> None:
        rename(source, target, **where)
        if word in str(target) and _is_last():
            act()

    os.rename = renamed


def while_reading(name: str, change: Callable[[], None]) -> None:
    """Call `change` when a unit has read of an input what it packs, and looks at it once more."""
    from packer_cli.run import unit

    check = unit.check_unchanged

    def checked(file: Any) -> bool:
        if file.path == name and not _shared[_DONE]:
            _shared[_DONE] = 1
            change()
        return check(file)

    unit.check_unchanged = checked
