"""How a training loop takes rows: what `PackedSampler` and the loader around it are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from packer_cli.options.option import Count, Options, Rule, Whole, option

_MOST = 1 << 30
_WINDOW = 64


@dataclass(frozen=True)
class Sizes(Options):
    """Sizes of a training whose steps are predicted or made even."""

    ranks: Count | None = option(
        None,
        "How many ranks share the rows of a step, which waits for the costliest of them.",
        goes_with=("hidden_size", None),
        elsewhere="--world-size --gpus",
    )
    micro_batches: Count = option(
        1,
        "With --ranks: micro-batches of a rank in a step.",
        goes_with=("ranks", None),
        elsewhere="--gradient-accumulation-steps",
    )
    batch_size: Count = option(
        1,
        "With --ranks: rows in a micro-batch.",
        goes_with=("ranks", None),
        elsewhere="--micro-batch-size --per-device-train-batch-size",
    )
    hidden_size: Count | None = option(
        None,
        "With --ranks: that of the model, as in its config.json.",
        goes_with=("ranks", None),
    )


@dataclass(frozen=True)
class Loop(Options):
    """A loop that takes rows with `PackedSampler`, from a `DataLoader(..., batch_size=batch_size)`
    on each rank, and steps after every `micro_batches` batches and at the end of an epoch.

    seed        of the sampler; None: rows in the order of the shards
    uneven      the sampler's even=False
    drop_last   as the loader has it
    trainer     every epoch has as many batches as the first, where rows give some one more
    cost        the sampler's function, where it has no hidden_size

    Raises UsageError for a size below 1, and for values that exclude one another.
    """

    world_size: Count = option(
        MISSING,
        "Ranks that shared the rows: the sampler's world_size.",
        flag="--ranks",
        first=4,
        metavar="W",
        most=_MOST,
        elsewhere="--world-size --num-gpus --nproc --dp-size",
    )
    batch_size: Count = option(
        1,
        "Rows in a batch of a rank: the loader's batch_size.",
        metavar="B",
        first=5,
        most=_MOST,
        elsewhere="--per-device-train-batch-size --micro-batch-size",
    )
    micro_batches: Count = option(
        1,
        "Batches of a rank in a step: gradient accumulation.",
        metavar="M",
        first=6,
        most=_MOST,
        elsewhere="--gradient-accumulation-steps --accumulate",
    )
    seed: Whole | None = option(0, "The sampler's seed. Default: 0.", first=7, metavar="S")
    uneven: bool = option(False, "The sampler had even=False.")
    drop_last: bool = option(False, "The loader had drop_last=True.")
    trainer: bool = option(
        False, "The loop was a Trainer with PackedTrainerMixin, whose epochs are equally long."
    )
    balance: Literal["step", "order"] | None = option(
        None,
        "The sampler's, where it had one:",
        choices={"step": "rows of a step dealt evenly", "order": "rows of like cost in a step"},
    )
    hidden_size: Count | None = option(
        None, "With --balance: the sampler's.", metavar="H", goes_with=("balance", None)
    )
    window: Count = option(
        _WINDOW,
        "With --balance order: the sampler's.",
        metavar="STEPS",
        goes_with=("balance", "order"),
    )
    block_rows: Count = option(256, "The sampler's.")
    window_blocks: Count = option(64, "The sampler's.")
    cost: Any = None

    def _rules(self) -> Iterator[Rule]:
        known = (self.hidden_size is not None) + (self.cost is not None)
        yield known and not self.balance, "cost needs --balance", "add --balance"
        yield (
            self.balance and known != 1,
            f"--balance {self.balance}: what rows cost is {'twice' if known else 'not'} said",
            "add --hidden-size or, in Python, cost=, as the sampler had it",
        )
        yield (
            self.balance and self.uneven,
            "--uneven: a sampler that balances gives every rank the same number",
            "leave it out",
        )
        yield (
            self.trainer and self.uneven,
            "--uneven: a Trainer gives every rank the same number of rows",
            "leave it out",
        )
