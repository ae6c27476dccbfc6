"""Files on their way to a store: several at a time, each checked while it is read."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

from packer_cli.errors import DataError, Interrupted, from_os_error
from packer_cli.interrupts import as_flag
from packer_cli.progress import Progress

_THREADS = 8
_MOST_BYTES = 128 << 20  # of parts in memory, counted once
_BLOCK_BYTES = 1 << 20
_WAIT_SECONDS = 1.2  # for threads to undo what they have begun to write


def blocks_of(
    path: Path, sha256: str, stop: threading.Event, progress: Progress
) -> Iterator[bytes]:
    """A staged file's content. DataError when it is not what was packed, Interrupted to stop."""
    sha = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if stop.is_set():
                    raise Interrupted("interrupted")
                sha.update(block)
                yield block
                progress.read(len(block), 0)
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    if sha256 not in ("", sha.hexdigest()):
        raise DataError(
            f"{path}: has changed since it was packed: its sha256 differs",
            "remove the directory, check its disk, and run the same command again",
        )


def on_threads(
    tasks: Iterable[Callable[[], None]], stop: threading.Event, part_bytes: int = 1
) -> None:
    """Run the tasks, each of which holds `part_bytes` in memory; on the first failure or Ctrl-C set
    `stop` and raise.

    A request may take minutes, so threads in the middle of one are not waited for for long: they
    write nothing after it, and end with the process.
    """
    queue, lock, errors = iter(tasks), threading.Lock(), list[BaseException]()
    ended = SimpleQueue[None]()  # join would take an interrupted wait for the thread's end

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    task = next(queue, None)
                if task is None:
                    return
                task()
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            ended.put(None)

    running = count = min(_THREADS, max(1, _MOST_BYTES // part_bytes))
    with as_flag() as interrupted:
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()
        while running and not stop.is_set():
            running -= _one_ended(ended, 0.2)
            if interrupted():
                errors.insert(0, Interrupted("interrupted"))
                stop.set()
        end = time.monotonic() + _WAIT_SECONDS
        while running and (left := end - time.monotonic()) > 0:
            running -= _one_ended(ended, left)
        if errors:
            raise errors[0]


def _one_ended(ended: SimpleQueue[None], seconds: float) -> bool:
    try:
        ended.get(timeout=seconds)
    except Empty:
        return False
    return True
