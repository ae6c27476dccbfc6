"""Packing on a Ray cluster: one task per work unit; only paths and records travel.

    packer pack ... --engine ray      extra: ray

The workers read the inputs and write the output directory themselves, so all machines must see
both under the same paths. A worker that dies is replaced, and its task tried again, by Ray.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import packer_cli
from packer_cli.errors import DataError, Interrupted, PackerError, UsageError, needs_extra
from packer_cli.interrupts import as_flag, handled_as_before
from packer_cli.options.run_options import EncodingOptions, RunOptions
from packer_cli.progress import Progress
from packer_cli.records import WorkUnit
from packer_cli.run.identity import RUN, Run
from packer_cli.run.processes import Packed
from packer_cli.run.source import prepare
from packer_cli.run.unit import Job

_RETRIES = 3
_AHEAD = 2  # tasks for each core, so that no core is ever idle
_SECONDS = 0.5
_CONNECT_SECONDS = 10.0


def pack_on_ray(
    run: Run,
    units: Sequence[WorkUnit],
    work: Path,
    options: RunOptions,
    progress: Progress,
) -> None:
    """Pack `units` into the work folder. Raises UsageError without Ray, DataError for a unit
    whose worker was lost too often, and what packing a unit raises.
    """
    # not the run itself, which may name a million units: a worker fetches it once
    its = options.for_another_process(workers=1)
    queue, running = iter(units), dict[Any, WorkUnit]()
    with _connected() as ray, as_flag() as interrupted:
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_pack_unit)
        place = ray.put(_Told(run, work.resolve(), Path.cwd(), its))
        told = packer_cli.__version__, place  # looking a version up takes a millisecond
        most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        options.notify(f"packing {len(units)} units on Ray, {most // _AHEAD} cores")
        while True:
            while len(running) < most and (unit := next(queue, None)):
                running[task.remote(told, unit)] = unit
            if not running:
                return
            done_now = ray.wait(list(running), timeout=_SECONDS)[0]
            if interrupted():
                raise Interrupted("interrupted")
            for done in done_now:
                unit = running.pop(done)
                try:
                    packed = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, PackerError) else error) from None
                except ray.exceptions.RayError as error:  # a worker or a machine was lost too often
                    raise DataError(
                        f"unit {unit.index}: Ray could not run it: {str(error).splitlines()[0]}",
                        "see Ray's logs for why; run the same command again to continue",
                    ) from error
                packed.show(progress)


@contextmanager
def _connected() -> Iterator[Any]:
    """Ray, connected to the cluster that RAY_ADDRESS names, if any. Raises UsageError."""
    address = os.environ.get("RAY_ADDRESS")
    try:
        import ray  # noqa: PLC0415 an extra
    except ImportError:
        raise UsageError(
            "--engine ray: Ray is not installed", needs_extra("--engine ray", "ray")
        ) from None
    _refuse_unreachable(address)
    try:
        with handled_as_before():  # Ray takes SIGTERM for itself
            ray.init(
                address,
                log_to_driver=False,
                include_dashboard=False if address is None else None,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"--engine ray: {address}: {str(error).splitlines()[0]}",
            "check that the cluster runs: ray status",
        ) from error
    try:
        yield ray
    finally:
        # Ray ends the workers of a driver that has gone; ray.cancel(force=True) beside that aborts
        # the whole process now and then (task_manager.cc, "unexpected system state", Ray 2.60)
        ray.shutdown()


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


class _Told(NamedTuple):
    """All that a worker needs to know about a run. `directory`: from which its inputs are named."""

    run: Run
    folder: Path
    directory: Path
    options: dict[str, Any]  # of `EncodingOptions`


_jobs: dict[Any, Job] = {}


def _pack_unit(told: tuple[str, Any], unit: WorkUnit) -> Packed:
    """In a Ray worker: pack a unit. `told`: packer's version, and a reference to what to know, not
    as an argument of its own, for Ray would fetch it for every unit.

    The worker's process keeps the loaded tokenizer for the units to come.
    """
    version, place = told
    if place not in _jobs:
        import ray  # noqa: PLC0415 an extra

        if version != packer_cli.__version__:
            raise DataError(
                f"this worker has packer {packer_cli.__version__}, the run {version}",
                "install the same packer on all machines",
            )
        its: _Told = ray.get(place)
        if not (its.folder / RUN).is_file():
            raise DataError(
                f"{its.folder}/{RUN}: cannot be read by this worker",
                "the output must be a directory that all machines see",
            )
        for old in list(_jobs):
            _jobs.pop(old).source.close()
        os.chdir(its.directory)
        silent, options = Progress(0, show=False), EncodingOptions(**its.options)
        source = prepare(its.run, [unit], options)
        _jobs[place] = Job(its.run, source, its.folder, options, silent)
    result = _jobs[place].pack(unit)
    _jobs[place].commit(result)
    return Packed.of(result, _jobs[place].run)
