"""Measuring: best-of-N times, whole processes with their peak memory, and the row reported.

A script prints one JSON line for every row of the table; run.py collects them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAMPLE_SECONDS = 0.01
# Some machines' shells set these. The first would make every run compile an editable install's
# sources again, which an installed one never does; the other would change what is packed.
_NOT_INHERITED = ("PYTHONDONTWRITEBYTECODE", "PACKER_TOKENIZER")


def best_of(count: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of `count` calls."""
    return min(seconds_of(work) for _ in range(count))


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def on_one_core() -> None:
    """Keep this thread, and those it starts from now on, on one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@dataclass(frozen=True)
class Finished:
    """A process that ended: wall `seconds`, those of a processor that it and the processes that it
    waited for have taken, its stdout, and with `watch` (see `run`) the bytes of memory of its tree
    in equal steps of time, and the processor time of the process itself.
    """

    seconds: float
    processor_seconds: float
    stdout: str
    peaks: Sequence[int] = ()
    root_seconds: float = 0.0

    @property
    def peak(self) -> int:
        return max(self.peaks, default=0)


def run(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    watch: bool = False,
    settle: bool = True,
) -> Finished:
    """Run a command to its end, timed from its start to its exit.

    With `watch` the memory of its whole tree is read many times: the sum of the proportional set
    sizes, which count a page that processes share once.
    `settle` first waits until the disk has what earlier runs wrote. Raises SystemExit with the
    command's last words when it fails.
    """
    if settle:
        os.sync()
    inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    begun, used = time.perf_counter(), _processor_seconds()
    child = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**inherited, **(environment or {})},
    )
    tree = _TreePeak(child.pid) if watch else None
    out, err = child.communicate() if tree is None else tree.during(child.communicate)
    seconds = time.perf_counter() - begun
    if child.returncode:
        words = err.decode(errors="replace").strip().splitlines()[-3:]
        raise SystemExit(f"{Path(command[0]).name} ended with {child.returncode}: {words}")
    used = _processor_seconds() - used
    if tree is None:
        return Finished(seconds, used, out.decode())
    return Finished(seconds, used, out.decode(), tree.peaks, tree.root_seconds)


def _processor_seconds() -> float:
    """What children that have ended took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class _TreePeak:
    """Reads the memory of a process tree, and the processor time of its root, while something else
    goes on.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self.peaks = list[int]()
        self.root_seconds = 0.0

    def during(self, work: Callable[[], Any]) -> Any:
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            return work()
        finally:
            self._over.set()
            watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.peaks.append(sum(map(_proportional, _tree(self._pid))))
            self.root_seconds = max(self.root_seconds, _own_seconds(self._pid))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # grows while it is read
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
                found.extend(map(int, children.split()))
        except OSError:  # it ended meanwhile
            continue
    return found


def _proportional(pid: int) -> int:
    """Bytes of memory of a process: its own, and its part of what it shares with others."""
    try:
        sizes = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it ended meanwhile
        return 0
    return sum(int(line.split()[1]) for line in sizes.splitlines() if line[:4] == "Pss:") * 1024


def _own_seconds(pid: int) -> float:
    """Processor time of a process, without the children that it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(
    what: str,
    target: str,
    measured: str,
    reached: bool | None,
    **detail: Any,
) -> None:
    """Print a row. `reached` None: a figure without a target. `detail`: anything JSON holds."""
    row = {"what": what, "target": target, "measured": measured, "reached": reached}
    print(json.dumps(row | {"detail": detail}), flush=True)


def skip(what: str, target: str, why: str) -> None:
    """Print a row that could not be measured."""
    row = {"what": what, "target": target, "measured": "", "reached": None, "skipped": why}
    print(json.dumps(row), flush=True)


def say(message: str) -> None:
    """Progress, for whoever watches."""
    print(message, file=sys.stderr, flush=True)
