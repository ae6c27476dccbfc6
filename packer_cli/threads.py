"""Running tasks on threads: everything heavy frees the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec

from packer_cli.errors import Interrupted
from packer_cli.interrupts import as_flag

# Work that a task leaves to other threads must end, too, before all is done.
Task = Callable[[], Iterable[Future[Any]] | None]
_Kind = TypeVar("_Kind")
_LOOK_SECONDS = 0.2  # between two looks for Ctrl-C


def built(kind: type[_Kind]) -> type[_Kind]:
    """The class, with all that msgspec knows of its fields. msgspec gathers that when it first
    meets a type, without a lock: two threads that do so at once end the process.
    """
    msgspec.json.Decoder(kind)
    return kind


def run_all(
    tasks: Iterable[Task],
    workers: int,
    stop: threading.Event,
    end_waits: Callable[[], None] = lambda: None,
    *,
    wait_seconds: float | None = None,
) -> None:
    """Run the tasks on threads; on the first failure or Ctrl-C set `stop` and raise.

    It waits for the tasks that still run then, at most `wait_seconds`, so they must look at `stop`;
    `end_waits` is called to end what they may be waiting for.
    """
    queue = iter(tasks)
    with as_flag() as interrupted, ExitStack() as stack:
        pool = ThreadPoolExecutor(workers, "packer")
        stack.callback(pool.shutdown, wait=wait_seconds is None)
        running: set[Future[Iterable[Future[Any]] | None]] = set()
        left: set[Future[Any]] = set()
        try:
            while True:
                while len(running) < workers and (task := next(queue, None)):
                    running.add(pool.submit(task))
                if not running and not left:
                    return
                waited: list[Future[Any]] = [*running, *left]
                finished = wait(waited, _LOOK_SECONDS, FIRST_COMPLETED).done
                if interrupted():
                    raise Interrupted("interrupted")
                for future in left & finished:
                    future.result()
                left -= finished
                for task_done in running & finished:
                    left.update(task_done.result() or ())
                running -= finished
        except BaseException as error:
            stop.set()  # before the pool waits for the tasks still running
            end_waits()
            if wait_seconds is not None:
                wait([*running, *left], wait_seconds)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted") from None
            raise
