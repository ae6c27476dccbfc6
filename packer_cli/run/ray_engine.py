"""Packing on a Ray cluster: one task per work unit; only paths and records travel.

    packer pack ... --engine ray      extra: ray

Ray's workers read the inputs and write the output directory themselves, so all machines must see
both under the same paths. Each has a pool of one worker (`pool.py`), which limits what templates
may take. A Ray worker that dies is replaced, and its task tried again, by Ray.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import packer_cli
from packer_cli.errors import DataError, Interrupted, PackerError, UsageError, needs_extra
from packer_cli.options.run_options import EncodingOptions, RunOptions
from packer_cli.progress import Progress
from packer_cli.records import WorkUnit
from packer_cli.run.pool import Pool, Reporter
from packer_cli.run.run_plan import RUN, RunPlan, UnitRecord
from packer_cli.run.unit import UnitContext

_RETRIES = 3
_AHEAD = 2  # tasks for each core, so that no core is ever idle
_SECONDS = 0.5
_CONNECT_SECONDS = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def pack_on_ray(
    run: RunPlan, units: Sequence[WorkUnit], work: Path, options: RunOptions, progress: Progress
) -> Generator[UnitRecord, None, None]:
    """Pack `units` into the work folder. Raises UsageError without Ray, DataError for a unit
    whose worker was lost too often, and what packing a unit raises.
    """
    silent = EncodingOptions(1, options.tokenizer_backend)
    context = UnitContext(run, work.resolve(), silent, Reporter())
    queue, running = iter(units), dict[Any, WorkUnit]()
    with _connected() as (ray, interrupted):
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_pack_unit)
        # not the run itself, which may name a million units: a worker fetches it once
        place = ray.put((context, Path.cwd()))  # where relative paths of inputs begin
        setup = packer_cli.__version__, place  # looking a version up takes a millisecond
        most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        options.notify(f"packing {len(units)} units on Ray, {most // _AHEAD} cores")
        while True:
            while len(running) < most and (unit := next(queue, None)):
                running[task.remote(setup, unit)] = unit
            if not running:
                return
            done_now = ray.wait(list(running), timeout=_SECONDS)[0]
            if interrupted():
                raise Interrupted("interrupted")
            for done in done_now:
                unit = running.pop(done)
                try:
                    record: UnitRecord = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, PackerError) else error) from None
                except ray.exceptions.RayError as error:  # a worker or a machine was lost too often
                    raise DataError(
                        f"unit {unit.index}: Ray could not run it: {str(error).splitlines()[0]}",
                        "see Ray's logs for why; run the same command again to continue",
                    ) from error
                tokens = record.counts.get("tokens", 0)
                slots = tokens if run.is_to_tokenize else record.rows * run.row_config.max_length
                progress.read(unit.weight, record.counts.get("documents", 0))
                progress.wrote(tokens, slots)
                yield record


@contextmanager
def _connected() -> Iterator[tuple[Any, Callable[[], bool]]]:
    """Connect to the cluster that RAY_ADDRESS names, if any. Yields Ray, and what returns True once
    the run is to end: an exception out of a signal's handler would leave Ray's locks taken.

    Raises UsageError.
    """
    address = os.environ.get("RAY_ADDRESS")
    try:
        import ray  # noqa: PLC0415 an extra
    except ImportError:
        raise UsageError(
            "--engine ray: Ray is not installed", needs_extra("--engine ray", "ray")
        ) from None
    _refuse_unreachable(address)
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {one: signal.getsignal(one) for one in _SIGNALS} if is_main else {}
    came = list[int]()
    try:
        ray.init(
            address,
            log_to_driver=False,
            include_dashboard=False if address is None else None,
            logging_level=logging.ERROR,
        )
        for number, handler in handlers.items():  # Ray has taken SIGTERM for itself
            if handler is signal.default_int_handler:
                signal.signal(number, lambda number, frame: came.append(number))
        yield ray, lambda: bool(came)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if ray.is_initialized():
            raise
        raise UsageError(
            f"--engine ray: {address}: {str(error).splitlines()[0]}",
            "check that the cluster runs: ray status",
        ) from error
    finally:
        # Ray ends the workers of a driver that has gone; ray.cancel(force=True) beside that aborts
        # the whole process now and then (task_manager.cc, "unexpected system state", Ray 2.60)
        ray.shutdown()
        for number, handler in handlers.items():
            if handler is not None:  # one that is not of Python cannot be set again
                signal.signal(number, handler)


def _refuse_unreachable(address: str | None) -> None:
    """Raise UsageError at once; Ray itself would retry for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise UsageError(
            f"RAY_ADDRESS: {address}: {error.strerror or error}", "check that it runs: ray status"
        ) from error


_pools: dict[Any, Pool[WorkUnit, UnitRecord]] = {}


def _pack_unit(setup: tuple[str, Any], unit: WorkUnit) -> UnitRecord:
    """Pack a unit, in a Ray worker. `setup`: packer's version, and a reference to the context and
    the directory; as an argument of its own, Ray would fetch it for every unit.

    The worker's process keeps the loaded tokenizer for the units to come.
    """
    version, place = setup
    if place not in _pools:
        import ray  # noqa: PLC0415 an extra

        if version != packer_cli.__version__:
            raise DataError(
                f"this worker has packer {packer_cli.__version__}, the run {version}",
                "install the same packer on all machines",
            )
        context, directory = ray.get(place)
        if not (context.folder / RUN).is_file():
            raise DataError(
                f"{context.folder}/{RUN}: cannot be read by this worker",
                "the output must be a directory that all machines see",
            )
        for old in list(_pools):
            _pools.pop(old).close()
        os.chdir(directory)
        _pools[place] = Pool(
            context.pack_and_commit, prepare=context.load, describe=context.described
        )
    ((_, record),) = _pools[place].map([unit])
    return record
