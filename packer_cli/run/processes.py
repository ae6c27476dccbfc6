"""The local executor: work units on threads, and, beyond a few of them, in further processes.

    pack_on_this_machine(run, units, ...)
        Queue       of units, taken by threads of all processes, each once
        _pack       on threads of a process
        _Helpers    processes that pack beside this one

Tokenizing, planning, filling, writing and hashing free Python's lock, but what is between them
takes about an eighth of the time of text: more than a few threads of one process wait for each
other. Four of them lose about a twentieth, and share what a process takes of memory: 107 MB for
each further worker, where processes of two threads take 195 MB for it and those of one 300.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from packer_cli.child_process import Child, settle_in
from packer_cli.errors import LostChildError
from packer_cli.interrupts import Task, run_all
from packer_cli.options.run_options import EncodingOptions
from packer_cli.progress import Progress
from packer_cli.records import WorkUnit
from packer_cli.run import commits
from packer_cli.run.identity import Run
from packer_cli.run.source import prepare
from packer_cli.run.unit import Job, UnitResult

THREADS = 4  # of a process
_THREADS_PER_STORING = 4  # one's shards take a fifth of its time to sync and hash
_NUMBER_BYTES = 8
_CANNOT_BEGIN = 1  # how an interpreter ends that cannot import us


def pack_on_this_machine(
    run: Run,
    units: Sequence[WorkUnit],
    work: Path,
    options: EncodingOptions,
    progress: Progress,
) -> None:
    """Pack `units` into the work folder, in as many processes as the workers need.
    Raises what packing a unit raises.
    """
    first, *others = _threads(run, len(units), options.workers)
    with closing(Queue(units)) as queue, ExitStack() as stack:
        queue.keep(first)
        its = replace(run, units=tuple(units))
        helpers = stack.enter_context(closing(_Helpers(its, queue, work, options, others)))
        source = prepare(run, units, replace(options, workers=first))
        stack.enter_context(closing(source))
        job = Job(run, source, work, options, progress)
        _pack(job, queue, first, helpers)
        if helpers.lost:
            left = commits.left_to_do(its, work)
            _pack(job, stack.enter_context(closing(Queue(left))), first)


def _threads(run: Run, units: int, workers: int) -> list[int]:
    """How many workers are threads of each process, of this one first."""
    # tokenized documents are gathered without Python's lock; stdin, also by the name of a device,
    # is this process's own
    own = any(os.path.abspath(file.path).startswith(("/dev/", "/proc/")) for file in run.files)
    if run.is_tokenized or own or not run.resumable or not sys.executable:
        return [workers]
    return in_processes(min(workers, max(units, THREADS)))


def in_processes(workers: int) -> list[int]:
    """How many of so many workers each process has, this one first."""
    count = -(-workers // THREADS)
    return [workers * (i + 1) // count - workers * i // count for i in range(count)]


class Queue:
    """Units that threads and processes take, each once.

    Their numbers are a file in memory, which all processes have open from one beginning: whoever
    reads one moves the place from which all others go on. Linux does that one reader at a time
    (read(2), since 3.14) for files opened by a path, as here by that of a descriptor.
    """

    def __init__(self, units: Sequence[WorkUnit], numbers: int | None = None) -> None:
        """`numbers`: the open file of another process's queue of the same units."""
        self._units, self._kept = units, deque[WorkUnit]()
        if numbers is None:
            with open(os.memfd_create("packer-units"), "wb") as file:
                file.write(np.arange(len(units), dtype="<u8").tobytes())
                file.flush()
                numbers = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
        self.numbers = numbers

    def take(self) -> WorkUnit | None:
        """The next unit; None when all are taken."""
        with suppress(IndexError):
            return self._kept.popleft()
        number = os.read(self.numbers, _NUMBER_BYTES)
        return self._units[int.from_bytes(number, "little")] if number else None

    def keep(self, count: int) -> list[WorkUnit]:
        """The next units, at most so many, which are for this process alone."""
        self._kept += [unit for _ in range(count) if (unit := self.take()) is not None]
        return [*self._kept]

    def close(self) -> None:
        os.close(self.numbers)


class Packed(NamedTuple):
    """What is told of a unit that another process has packed."""

    size: int
    documents: int
    tokens: int
    slots: int
    rejected: int

    @classmethod
    def of(cls, result: UnitResult, run: Run) -> Packed:
        counts = result.counts
        slots = counts.tokens if run.is_to_tokenize else counts.rows * run.row_config.max_length
        figures = counts.documents, counts.tokens, slots, counts.rejected_records
        return cls(result.unit.weight, *figures)

    def show(self, progress: Progress) -> None:
        progress.read(self.size, self.documents)
        progress.wrote(self.tokens, self.slots)


def _pack(
    job: Job,
    units: Queue,
    threads: int,
    helpers: _Helpers | None = None,
    packed: Callable[[UnitResult], object] = lambda result: None,
) -> None:
    """Pack what is left in the queue on so many threads; raise what the first failure raises.
    `packed` hears of each unit; `helpers` pack from the same queue.
    """
    # beside those that pack, threads bring shards to the disk and hash them
    looping = threads + (-(-threads // _THREADS_PER_STORING) if threads > 1 else 0)
    packing = threading.Semaphore(threads)

    def pack_and_commit() -> None:
        while True:
            with packing:
                job.stop_if_asked()
                if (unit := units.take()) is None:
                    return
                result = job.pack(unit)
            job.commit(result)
            packed(result)

    def stop() -> None:
        job.source.stop()
        if helpers is not None:
            helpers.stop()

    waiting = helpers.waits(job) if helpers is not None else []
    every: list[Task] = [*waiting, *[pack_and_commit] * looping]
    run_all(every, len(waiting) + looping, job.options.stop, stop)


class _Helpers:
    """Processes that pack units beside this one, as many at a time as they have threads. They end
    with it.
    """

    def __init__(
        self, run: Run, units: Queue, work: Path, options: EncodingOptions, threads: Sequence[int]
    ) -> None:
        """`threads`: how many each process has. Raises DataError where no more can begin."""
        self._notify, self._warn = cache(options.notify), cache(options.warn)  # all say the same
        self.lost = False
        self._children = list[Child]()
        try:
            for count in threads:
                arguments = run, work, options.for_another_process(count)
                child = Child(f"{__name__}:Helper", *arguments, inherited=(units.numbers,))
                self._children.append(child)
                child.begin("pack")
        except BaseException:
            self.close()
            raise

    def waits(self, job: Job) -> list[Task]:
        """For each process, what waits until it has packed its last unit, and raises its errors."""
        return [partial(self._wait, child, job) for child in self._children]

    def _wait(self, child: Child, job: Job) -> None:
        try:
            for told in child.items():
                if isinstance(told, Packed):
                    job.count_rejected(told.rejected)
                    told.show(job.progress)
                else:
                    hear, message = told
                    (self._warn if hear == "warn" else self._notify)(message)
        except LostChildError as error:
            job.stop_if_asked()
            if error.code == _CANNOT_BEGIN:
                raise
            self.lost = True
            self._warn(f"warning: {error.message}; what it was packing is packed again")

    def stop(self) -> None:
        """End all now, even if threads wait for them."""
        for child in self._children:
            child.kill()

    def close(self) -> None:
        for child in self._children:
            child.close()


class Helper:
    """Packs units of a queue, of which it has the `numbers`; made in a process of its own."""

    def __init__(self, numbers: int, run: Run, work: Path, options: dict[str, Any]) -> None:
        settle_in()
        self._run, self._units = run, Queue(run.units, numbers)
        self._work, self._options = work, EncodingOptions(**options)

    def pack(self) -> Iterator[Packed | tuple[str, str]]:
        """What it has packed, unit by unit, until the queue is empty; and its notes and warnings,
        as ("notify", message) and ("warn", message).
        """
        first = self._units.keep(self._options.workers)
        if not first:
            return
        told: SimpleQueue[Packed | tuple[str, str] | None] = SimpleQueue()
        options = replace(
            self._options,
            notify=lambda message: told.put(("notify", message)),
            warn=lambda message: told.put(("warn", message)),
        )
        source = prepare(self._run, first, options)
        job = Job(self._run, source, self._work, options, Progress(0, show=False))

        def tell(result: UnitResult) -> None:
            told.put(Packed.of(result, self._run))

        with closing(source), ThreadPoolExecutor(1) as pool:
            packing = pool.submit(_pack, job, self._units, options.workers, packed=tell)
            packing.add_done_callback(lambda _: told.put(None))
            while (one := told.get()) is not None:
                yield one
            packing.result()
