"""Several processes, perhaps on several machines, that pack one result together.

    packer pack ... --rank R --world-size W     packs every W-th unit, from the R-th on

They share nothing but the output directory. The last one to end finds that all units have a
record, and finishes; `packer finalize DIR` does the same by hand.
"""

from __future__ import annotations

import os
from pathlib import Path

from packer_cli.errors import DataError, UsageError
from packer_cli.locks import InUseError
from packer_cli.records import Notify
from packer_cli.result.manifest import Result
from packer_cli.result.manifest_file import load_any
from packer_cli.run import directory as output
from packer_cli.run.finalize import finalize
from packer_cli.run.identity import RUN, Run, load_run
from packer_cli.run.replacing import REPLACING
from packer_cli.run.worker import left_to_do

_AUTO = "auto"
# (rank, world size, rank of the first, step) as job schedulers and launchers say them.
_VARIABLES = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN",
     "SLURM_ARRAY_TASK_STEP"),
    ("SLURM_PROCID", "SLURM_NTASKS", "", ""),
    ("RANK", "WORLD_SIZE", "", ""),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "", ""),
    ("JOB_COMPLETION_INDEX", "", "", ""),
)  # fmt: skip


def find_rank(rank: str | None, world_size: str | None) -> dict[str, int | None]:
    """The options `rank` and `world_size`; "auto" is read from the environment.

    Nothing is looked up unless one of them is given: a job array in which every task packs a
    file of its own must not lose all but a share of it. Raises UsageError.
    """
    if rank is None and world_size is None:
        return {"rank": None, "world_size": None}
    numbers: dict[str, int | None] = {}
    for place, name, given in ((0, "rank", rank), (1, "world_size", world_size)):
        option = f"--{name.replace('_', '-')}"
        if given is not None and given != _AUTO:
            numbers[name] = _number(option, given)
            continue
        known = [names for names in _VARIABLES if names[place] in os.environ]
        if not known:
            tried = ", ".join(names[place] for names in _VARIABLES if names[place])
            raise UsageError(
                f"{option}: not given, and none of {tried} is set",
                "give numbers, such as --rank 0 --world-size 4, or start this in a job array",
            )
        numbers[name] = _from_environment(known[0][place])
        if name == "rank" and known[0][2] in os.environ:
            numbers[name] = _from_environment(known[0][place]) - _from_environment(known[0][2])
        if name == "rank" and known[0][3] in os.environ:  # --array=0-6:2
            numbers[name] = (numbers[name] or 0) // max(1, _from_environment(known[0][3]))
    return numbers


def _from_environment(name: str) -> int:
    return _number(name, os.environ[name])


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{name}: {text!r} is not a number")
    return int(text)


def finalize_if_last(destination: Path, notify: Notify, *, no_lock: bool = False) -> Result | None:
    """The manifest, if no other rank is working and all units are packed."""
    work = output.work_of(destination)
    # checked before locking, or a rank that begins now would find it locked
    if work and (run := load_run(work / RUN)) and (missing := _missing(run, work)):
        notify(f"{destination}: {missing} are still to be packed by other ranks")
        return None
    try:
        with output.claimed(
            destination, [], may_replace=True, notify=notify, no_lock=no_lock
        ) as claim:
            run = load_run(claim.work / RUN)
            if run is None:  # another rank was the last
                return load_any(destination, incomplete_too=True, half_too=True)
            return None if _missing(run, claim.work) else finalize(run, claim)
    except InUseError:
        notify(f"{destination}: other ranks are at work; the last one finishes")
        return None


def finalize_now(destination: Path, *, no_lock: bool = False) -> Result:
    """The manifest of what ranks have packed. Raises DataError when units are missing."""
    work = output.work_of(destination)
    if not work or not ((work / RUN).is_file() or (work / REPLACING).is_file()):
        load_any(destination, incomplete_too=True, half_too=True)  # raises, if anything is wrong
        raise UsageError(f"{destination}: is already finished", "see packer stats")
    with output.claimed(
        destination, [], may_replace=True, notify=lambda message: None, no_lock=no_lock
    ) as claim:
        if claim.ended is not None:
            return load_any(destination, incomplete_too=True, half_too=True)
        run = load_run(claim.work / RUN)
        if run is None:
            raise DataError(
                f"{claim.work / RUN}: cannot be read by this packer",
                "use the version of packer that packed it",
            )
        if missing := _missing(run, claim.work):
            raise DataError(
                f"{destination}: {missing} are not packed",
                "run the failed ranks again; the last one finishes",
            )
        return finalize(run, claim)


def _missing(run: Run, work: Path) -> str:
    units, inputs = left_to_do(run, work)
    if units:
        return f"{len(units)} of {len(run.units)} units"
    return f"the digests of {len(inputs)} inputs" if inputs else ""
