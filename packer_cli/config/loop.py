"""How a training loop takes rows: what `PackedSampler` and the loader around it are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from packer_cli.config.option import Option, settle
from packer_cli.errors import UsageError

_MOST = 1 << 30
_WINDOW = 64


@dataclass(frozen=True)
class Loop:
    """A loop that takes rows with `PackedSampler`, from a `DataLoader(..., batch_size=batch_size)`
    on each rank, and steps after every `micro_batches` batches and at the end of an epoch.

    seed        of the sampler; None: rows in the order of the shards
    uneven      the sampler's even=False
    drop_last   as the loader has it
    trainer     every epoch has as many batches as the first, where rows give some one more
    cost        the sampler's function, where it has no hidden_size

    Raises UsageError for a size below 1, and for values that exclude one another.
    """

    world_size: Annotated[
        int,
        Option(
            "Ranks that shared the rows: the sampler's world_size.",
            flag="--ranks",
            first=4,
            metavar="W",
            value="count",
            least=1,
            most=_MOST,
            elsewhere=("--world-size", "--num-gpus", "--nproc", "--dp-size"),
        ),
    ]
    batch_size: Annotated[
        int,
        Option(
            "Rows in a batch of a rank: the loader's batch_size.",
            metavar="B",
            first=5,
            value="count",
            least=1,
            most=_MOST,
            elsewhere=("--per-device-train-batch-size", "--micro-batch-size"),
        ),
    ] = 1
    micro_batches: Annotated[
        int,
        Option(
            "Batches of a rank in a step: gradient accumulation.",
            metavar="M",
            first=6,
            value="count",
            least=1,
            most=_MOST,
            elsewhere=("--gradient-accumulation-steps", "--accumulate"),
        ),
    ] = 1
    seed: Annotated[
        int | None, Option("The sampler's seed. Default: 0.", first=7, metavar="S", value="count")
    ] = 0
    uneven: Annotated[bool, Option("The sampler had even=False.")] = False
    drop_last: Annotated[bool, Option("The loader had drop_last=True.")] = False
    trainer: Annotated[
        bool,
        Option("The loop was a Trainer with PackedTrainerMixin, whose epochs are equally long."),
    ] = False
    balance: Annotated[
        Literal["step", "order"] | None,
        Option(
            "The sampler's, where it had one:",
            metavar="HOW",
            choices={
                "step": "rows of a step dealt evenly",
                "order": "rows of like cost in a step",
            },
        ),
    ] = None
    hidden_size: Annotated[
        int | None,
        Option("With --balance: the sampler's.", metavar="H", value="count", least=1),
    ] = None
    window: Annotated[
        int,
        Option("With --balance order: the sampler's.", metavar="STEPS", value="count", least=1),
    ] = _WINDOW
    block_rows: Annotated[int, Option("The sampler's.", metavar="N", value="count", least=1)] = 256
    window_blocks: Annotated[int, Option("The sampler's.", metavar="N", value="count", least=1)] = (
        64
    )
    cost: Any = None

    def __post_init__(self) -> None:
        settle(self)
        known = (self.hidden_size is not None) + (self.cost is not None)
        if self.balance is None and known:
            raise UsageError(
                "--hidden-size: without --balance costs do not matter",
                "add --balance, or leave it out",
            )
        if self.balance != "order" and self.window != _WINDOW:
            raise UsageError(
                "--window: is for --balance order", "add --balance order, or leave it out"
            )
        if self.balance is not None and known != 1:
            raise UsageError(
                f"--balance {self.balance}: what rows cost is {'twice' if known else 'not'} said",
                "add --hidden-size or, in Python, cost=, as the sampler had it",
            )
        if self.balance is not None and self.uneven:
            raise UsageError("--uneven: a sampler that balances gives every rank the same number")
        if self.trainer and self.uneven:
            raise UsageError("--uneven: a Trainer gives every rank the same number of rows")
