"""Running tasks on threads: everything heavy frees the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from packer_cli.errors import Interrupted


def run_all(tasks: Iterable[Callable[[], None]], workers: int, stop: threading.Event) -> None:
    """Run the tasks on threads; on the first failure or Ctrl-C set `stop` and raise.

    The tasks that still run then are waited for, so they must look at `stop`.
    """
    queue = iter(tasks)
    with ThreadPoolExecutor(workers, thread_name_prefix="packer") as pool:
        running: set[Future[None]] = set()
        try:
            while True:
                while len(running) < workers and (task := next(queue, None)):
                    running.add(pool.submit(task))
                if not running:
                    return
                # a timeout lets the main thread see signals while it waits
                finished, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        except BaseException as error:
            stop.set()  # before the pool waits for the tasks still running
            if isinstance(error, KeyboardInterrupt):
                tip = "run the same command again to start over"
                raise Interrupted("interrupted", tip) from None
            raise
