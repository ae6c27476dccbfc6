"""Every option that changes how a run goes, and never what it writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from packer_cli.config.option import OUTPUT, RUNNING, Option, plain, settle
from packer_cli.errors import UsageError

SECONDS_PER_RECORD = 10.0  # of processor time: a conversation of 10 MB takes about one
JINJA2 = "jinja2"  # the engine of templates that defines what is right
_MOST_SECONDS = 1_000_000  # the kernel's timers take little more


@dataclass(frozen=True)
class EncodingOptions:
    """Options that change how inputs become documents, never which.

    Beyond what --help says:

    max_seconds_per_record  longer may find fewer bad records, and changes no other
    """

    workers: Annotated[
        int,
        Option(
            "Work units at a time. Default: as many as cores.",
            RUNNING,
            first=9,
            value="count",
            least=0,
            elsewhere=("--num-workers", "--num-proc", "--jobs", "--threads"),
        ),
    ] = 0
    max_seconds_per_record: Annotated[
        float,
        Option(
            "Processor time to render a record; one that needs more is bad.",
            RUNNING,
            metavar="SECONDS",
        ),
    ] = SECONDS_PER_RECORD
    tokenizer_backend: Annotated[
        str,
        Option(
            "What encodes; it never changes the result:",
            RUNNING,
            metavar="NAME",
            choices=plain(("auto", "gigatoken", "tokenizers")),
        ),
    ] = "auto"
    template_engine: Annotated[
        str,
        Option(
            "What renders chat templates; it never changes the result:",
            RUNNING,
            metavar="NAME",
            choices=plain(("auto", "compiled", JINJA2)),
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        settle(self)
        if not 0 < self.max_seconds_per_record <= _MOST_SECONDS:
            raise UsageError(
                f"--max-seconds-per-record: {self.max_seconds_per_record:g} is not between "
                f"0 and {_MOST_SECONDS}",
                f"a record takes milliseconds; the default is {SECONDS_PER_RECORD:g}",
            )
        if self.workers == 0:
            object.__setattr__(self, "workers", len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class RunOptions(EncodingOptions):
    """Options that change how a run goes, never what it writes.

    Beyond what --help says:

    add                an update that keeps the inputs which are not named, as they are packed
    progress           show progress on stderr
    rank, world_size   pack only every world_size-th unit, as one of that many processes
    """

    overwrite: Annotated[
        bool,
        Option(
            "Replace an earlier result in the output.", OUTPUT, first=10, elsewhere=("--force",)
        ),
    ] = False
    update: Annotated[
        bool,
        Option(
            "Pack only inputs that are new or have changed. All others must be named, too: see "
            "--add and --prune.",
            OUTPUT,
        ),
    ] = False
    add: Annotated[
        bool,
        Option(
            "Add these inputs to the result, if there is one; those that it has already and that "
            "are not named stay as they are packed, even if their files are gone.",
            OUTPUT,
            elsewhere=("--append",),
        ),
    ] = False
    prune: Annotated[
        bool, Option("With --update: drop the documents of inputs that are not named.", OUTPUT)
    ] = False
    checksum: Annotated[
        bool,
        Option(
            "With --update or --add: compare contents of files, not when they were changed.", OUTPUT
        ),
    ] = False
    no_lock: Annotated[
        bool,
        Option("Go on where the file system has no locks; let no other run write there.", RUNNING),
    ] = False
    progress: bool = True
    engine: Annotated[
        str,
        Option(
            "What runs the work units:",
            RUNNING,
            metavar="NAME",
            choices={"local": "this machine", "ray": "a task per unit on a Ray cluster"},
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        Option(
            "Address of a Ray cluster that runs. Default: Ray's own choice.",
            RUNNING,
            metavar="ADDRESS",
        ),
    ] = None
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray_address is not None and self.engine != "ray":
            raise UsageError("--ray-address: is for --engine ray")
        if (self.rank is None) != (self.world_size is None):
            raise UsageError("--rank and --world-size: each needs the other")
        if self.rank is not None and self.world_size is not None:
            if not 0 <= self.rank < self.world_size:
                raise UsageError(
                    f"--rank: {self.rank} is not between 0 and {self.world_size - 1}",
                    "ranks are counted from 0",
                )
            if self.overwrite or self.update or self.add or self.engine != "local":
                raise UsageError(
                    "--rank: does not go with --overwrite, --update, --add or --engine ray",
                    "give the ranks an --output of their own, and put it in place afterwards",
                )
        self._check_update()

    def _check_update(self) -> None:
        name = "--add" if self.add else "--update"
        if self.add and self.prune:
            raise UsageError(
                "--add and --prune: one keeps the inputs that are not named, the other drops them",
                "leave one of them out",
            )
        object.__setattr__(self, "update", self.update or self.add)
        if self.update and self.overwrite:
            raise UsageError(f"{name} and --overwrite: one keeps what the other replaces")
        for option, given in (("--checksum", self.checksum), ("--prune", self.prune)):
            if given and not self.update:
                raise UsageError(f"{option}: is for --update", "leave it out, or add --update")

    @property
    def unnamed(self) -> str:
        """What becomes of an earlier result's inputs that are not named: "kept", "dropped", or
        the run is "refused".
        """
        if self.add:
            return "kept"
        # ranks only check whether their result is finished already
        return "dropped" if self.prune or self.as_rank else "refused"

    @property
    def as_rank(self) -> tuple[int, int] | None:
        """(rank, world_size) of one of several processes, None of a single one."""
        if self.rank is None or self.world_size is None:
            return None
        return self.rank, self.world_size
