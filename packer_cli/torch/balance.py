"""What a sampler needs for even steps: options that go together, and the costs of a data set."""

from __future__ import annotations

from collections.abc import Sized

from packer_cli.errors import UsageError
from packer_cli.steps.costs import Cost, Float64, row_costs
from packer_cli.steps.schedule import Balance


def check_options(
    balance: Balance | None, batch_size: int | None, *, even: bool, **others: object
) -> None:
    """Raise UsageError for options of balance without it, and for what balance does not go with."""
    if balance is None:
        given = {"batch_size": batch_size, **others}
        for name, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{name}: is only for balance, which is None",
                    'give balance="step" or balance="order" too, or leave it out',
                )
    elif batch_size is None:
        raise UsageError(
            f"balance: {balance!r} without batch_size",
            "give the rows of a micro-batch, as to the DataLoader, and micro_batches=, how many of "
            "them make a step",
        )
    elif not even:
        raise UsageError(
            f"balance: {balance!r} with even=False: ranks would get different numbers of rows",
            "leave out even=False; the rows left over begin the next epoch",
        )
    elif balance != "order" and others.get("window") is not None:
        raise UsageError(
            f'window: is only for balance="order", which is {balance!r}', "leave it out"
        )


def costs_of(rows: int | Sized, hidden_size: int | None, cost: Cost | None) -> Float64:
    """float64[rows], what each row of a data set costs.

    Raises UsageError for what has no costs, such as a number of rows, and as `row_costs`.
    """
    squared_lengths = getattr(rows, "squared_lengths", None)
    if squared_lengths is None:
        what = "a number of rows" if isinstance(rows, int) else f"a {type(rows).__name__}"
        raise UsageError(
            f"balance: {what} does not say what each row costs", "give the PackedDataset itself"
        )
    return row_costs(squared_lengths, rows.max_length, hidden_size, cost)  # type: ignore[union-attr]
