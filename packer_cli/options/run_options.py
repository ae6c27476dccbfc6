"""Every option that changes how a run goes, never what it writes; those of commands themselves:
which tokenizer, which text, and where the result goes; and the sizes of training steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from packer_cli.options.option import Count, Options, Rule, apart, option, options_of


def _unheard(message: str) -> None:
    pass


@dataclass(frozen=True)
class EncodingOptions(Options):
    """Options that change how inputs become documents, never which.

    Beyond what --help says:

    notify, warn  hear one-line messages for the user, and those that nobody should miss
    stop          once it is set, work ends as soon as it can
    """

    workers: Count = option(
        0,
        "Work units at a time. Default: as many as cores.",
        least=0,
        elsewhere="--num-workers --num-proc --jobs --threads",
    )
    tokenizer_backend: str = option(
        "auto",
        "What encodes; it never changes the result:",
        choices=("auto", "gigatoken", "tokenizers"),
    )
    notify: Callable[[str], None] = _unheard
    warn: Callable[[str], None] = _unheard
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers == 0:
            object.__setattr__(self, "workers", len(os.sched_getaffinity(0)))

    def for_another_process(self, workers: int) -> dict[str, Any]:
        """The options that another process can be given, by name, with so many workers."""
        names = options_of(EncodingOptions)
        return {name: getattr(self, name) for name in names} | {"workers": workers}


@dataclass(frozen=True)
class RunOptions(EncodingOptions):
    """Options that change how a run goes, never what it writes.

    Beyond what --help says:

    exact              with `add`: where inputs are not named any more, all is packed anew
    progress           show progress on stderr
    rank, world_size   pack only every world_size-th unit, as one of that many processes
    before_switch      called when all is packed, before a new result takes its place
    """

    overwrite: bool = option(False, "Replace an earlier result in the output.", elsewhere="--force")
    add: bool = option(
        False,
        "Add inputs that are new, or have changed, to the result, if there is one. All others stay "
        "as they are packed, named or not, even if their files are gone.",
        elsewhere="--append --update --resume",
    )
    no_lock: bool = option(
        False, "Go on where the file system has no locks; let no other run write there."
    )
    exact: bool = False
    progress: bool = True
    engine: str = option(
        "local",
        "What runs the work units:",
        choices={"local": "this machine", "ray": "a task per unit on a Ray cluster"},
    )
    rank: int | None = None
    world_size: int | None = None
    before_switch: Callable[[], None] = lambda: None

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        yield apart("--add", self.add, "--overwrite", self.overwrite)
        rank, size = self.rank, self.world_size
        known = rank is not None and size is not None
        yield not known and rank != size, "--rank and --world-size: each needs the other", ""
        yield (
            known and not 0 <= (rank or 0) < (size or 0),
            f"--rank: {rank} is not between 0 and {(size or 0) - 1}",
            "ranks are counted from 0",
        )
        yield (
            known and (self.overwrite or self.add or self.engine != "local"),
            "--rank: does not go with --overwrite, --add or --engine ray",
            "give the ranks an --output of their own, and put it in place afterwards",
        )

    @property
    def as_rank(self) -> tuple[int, int] | None:
        """(rank, world_size) of one of several processes, None of a single one."""
        if self.rank is None or self.world_size is None:
            return None
        return self.rank, self.world_size


@dataclass(frozen=True)
class PackOptions(Options):
    """Options of commands themselves: which tokenizer, which text, and where the result goes."""

    tokenizer: str | None = option(
        None,
        "Folder, tokenizer.json, hub name, or bytes. Default: $PACKER_TOKENIZER, then bytes.",
        short="-t",
        metavar="NAME",
        elsewhere="--model --tokenizer-path --tokenizer-name --tokenizer-model",
    )
    text_field: str | None = option(
        None,
        "Field or column that holds the text. Default: text.",
        metavar="COLUMN",
        elsewhere="--text-column --text-key --json-keys",
    )
    output: str | None = option(
        None,
        "Directory to write, or a URL. Default: INPUT-packed-MAX_LENGTH or INPUT-tokenized.",
        short="-o",
        metavar="DIR",
        elsewhere="--out --output-dir --save-dir --output-path --output-prefix",
    )


@dataclass(frozen=True)
class Reporting(Options):
    """How every command reports."""

    as_json: bool = option(False, "Print JSON instead of a table, errors too.", flag="--json")
    debug: bool = option(False, "Show a traceback with an error.")


@dataclass(frozen=True)
class Progress(Reporting):
    """How commands report that take long."""

    quiet: bool = option(False, "Show no progress and no notes.", short="-q")


@dataclass(frozen=True)
class OneRun(Progress):
    """Which part of a run a process does, and how it reports: no recipe says that.

    rank, world_size  "auto" is read from the environment
    """

    rank: str | None = option(
        None,
        "Pack only every WORLD_SIZE-th unit, from the R-th on; the last rank finishes. auto: "
        "from SLURM and the like.",
        metavar="R|auto",
    )
    world_size: str | None = option(None, "How many ranks there are.", metavar="W|auto")


@dataclass(frozen=True)
class StepOptions(Options):
    """Sizes of the steps of a training."""

    ranks: Count | None = option(
        None,
        "How many ranks share the rows of a step.",
        metavar="W",
        elsewhere="--world-size --gpus --num-gpus --nproc --dp-size",
    )
    micro_batches: Count = option(
        1,
        "With --ranks: micro-batches of a rank in a step.",
        metavar="M",
        goes_with=("ranks", None),
        elsewhere="--gradient-accumulation-steps --accumulate",
    )
    batch_size: Count = option(
        1,
        "With --ranks: rows in a micro-batch.",
        metavar="B",
        goes_with=("ranks", None),
        elsewhere="--micro-batch-size --per-device-train-batch-size",
    )
    hidden_size: Count | None = option(
        None,
        "With --ranks: that of the model, as in its config.json, from which rows have their cost.",
        metavar="H",
        goes_with=("ranks", None),
    )

    @property
    def without_hidden_size(self) -> Rule:
        """The rule of commands that compare what rows cost."""
        is_missing = self.ranks is not None and self.hidden_size is None
        return is_missing, "--ranks needs --hidden-size", "add --hidden-size, or leave --ranks out"
