"""Running tasks on threads: everything heavy frees the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from packer_cli.errors import Interrupted

# What a task leaves to other threads must end, too, before all is done.
Task = Callable[[], Iterable[Future[Any]] | None]


def run_all(tasks: Iterable[Task], workers: int, stop: threading.Event) -> None:
    """Run the tasks on threads; on the first failure or Ctrl-C set `stop` and raise.

    The tasks that still run then are waited for, so they must look at `stop`.
    """
    queue = iter(tasks)
    with ThreadPoolExecutor(workers, thread_name_prefix="packer") as pool:
        running: set[Future[Iterable[Future[Any]] | None]] = set()
        left: set[Future[Any]] = set()
        try:
            while True:
                while len(running) < workers and (task := next(queue, None)):
                    running.add(pool.submit(task))
                if not running and not left:
                    return
                # a timeout lets the main thread see signals while it waits
                waited: list[Future[Any]] = [*running, *left]
                finished = wait(waited, timeout=0.5, return_when=FIRST_COMPLETED).done
                for future in left & finished:
                    future.result()
                left -= finished
                for task_done in running & finished:
                    left.update(task_done.result() or ())
                running -= finished
        except BaseException as error:
            stop.set()  # before the pool waits for the tasks still running
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted") from None
            raise
