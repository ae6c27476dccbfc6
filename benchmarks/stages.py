"""Which stage of `packer pack` is the limit, and how fast is each one alone, on one core?

The real pipeline packs 670 MB (see pack_large.py) with one worker, so that only one stage runs
at a time, on one core. Its functions are wrapped in clocks; time in a wrapped function called
by another counts for the inner one only. MB/s are of input text. Half a minute.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import inputs
from measuring import on_one_core, report, skip
from packer_cli._kernels import filling
from runs import MAX_LENGTH
from settings import Settings, from_environment

from packer_cli.inputs.jsonl import JsonlReader
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import RunOptions
from packer_cli.packing.window import Window
from packer_cli.result import shard_writer
from packer_cli.run import commits, pipeline, source, unit
from packer_cli.tokenization.tokenizer import Tokenizer

READ, TOKENIZE, PLAN, FILL, WRITE, HASH = STAGES = (
    "read + parse", "tokenize", "plan", "fill", "write + fsync", "sha256 of input and output",
)  # fmt: skip
_LOAD = "loading the tokenizer"
_OTHER = "start, end, counting"


class Clocks:
    """Exclusive seconds by stage, for one thread at a time."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running = [_OTHER]
        self._since = time.perf_counter()

    def _change(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def wrap(self, stage: str, owner: Any, name: str) -> None:
        """Replace a function of a module or class by one that is timed."""
        function = getattr(owner, name)
        setattr(owner, name, self.timed(stage, function))

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **options: Any) -> Any:
            self._change()
            self._running.append(stage)
            try:
                return function(*args, **options)
            finally:
                self._change()
                self._running.pop()

        return clocked

    def wrap_iterator(self, stage: str, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def clocked(*args: Any, **options: Any) -> Iterator[Any]:
            step = self.timed(stage, function(*args, **options).__next__)
            while True:
                try:
                    item = step()
                except StopIteration:
                    return
                yield item

        setattr(owner, name, clocked)

    def stop(self) -> None:
        self._change()


def _clocked_pipeline() -> Clocks:
    clocks = Clocks()
    for name in ("locate", "load_tokenizer"):
        clocks.wrap(_LOAD, source, name)
    clocks.wrap_iterator(READ, JsonlReader, "read")
    for name in ("encode_bare", "surrounded"):
        clocks.wrap(TOKENIZE, Tokenizer, name)
    for owner, name in ((unit, "pieces_of"), (Window, "add"), (Window, "rows")):
        clocks.wrap(PLAN, owner, name)
    clocks.wrap(FILL, filling, "fill_rows")
    for name in ("write", "close"):
        clocks.wrap(WRITE, shard_writer.ShardWriter, name)
    clocks.wrap(WRITE, os, "fsync")
    clocks.wrap(HASH, commits, "_digest_holding")
    return clocks


class _Inline(Executor):
    """Instead of threads: every task runs at once, so that stages do not overlap."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def submit(self, task: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(task(*args, **options))
        return future


def _pin_workers() -> None:
    """The thread that packs keeps to one core; the process that checks it does not."""
    pack_unit = unit.pack_unit

    def pinned(*args: Any) -> Any:
        on_one_core()
        return pack_unit(*args)

    unit.pack_unit = pinned  # type: ignore[assignment]


def _measure(settings: Settings, files: list[Path]) -> dict[str, float]:
    _pin_workers()
    concurrent.futures.ThreadPoolExecutor = _Inline  # type: ignore[misc, assignment]
    os.sync()
    config = PackConfig(max_length=MAX_LENGTH)
    if settings.quick:  # an input in several units, whose digest is a stage of its own
        config = replace(config, unit_bytes=1 << 20)
    with inputs.Output(settings) as output:
        clocks = _clocked_pipeline()
        pipeline.pack(
            [str(path) for path in files], output, config,
            RunOptions(workers=1, progress=False), str(settings.tokenizer),
        )  # fmt: skip
        clocks.stop()
    return clocks.seconds


def main() -> None:
    settings = from_environment()
    if why := inputs.missing(settings):
        skip("stages of pack, each alone", "", why)
        return
    files = inputs.tenfold(settings)
    seconds, size = _measure(settings, files), inputs.size(files)
    unseen = [stage for stage in STAGES if stage not in seconds]
    if unseen:
        raise SystemExit(f"the pipeline never called: {', '.join(unseen)}")
    limit = max(STAGES, key=seconds.__getitem__)
    for stage in (*STAGES, _LOAD, _OTHER):
        rate = size / seconds[stage] / 1e6
        measured = f"{seconds[stage]:.2f} s"
        if stage in STAGES:
            measured = f"{rate:,.0f} MB/s ({measured})" + " <- the limit" * (stage == limit)
        name = f"stage alone, one core: {stage}"
        report(name, "", measured, None, mb_s=rate, seconds=seconds[stage])


if __name__ == "__main__":
    main()
