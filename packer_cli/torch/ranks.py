"""Which rank this is, of how many: given by the caller wherever a guess could be wrong."""

from __future__ import annotations

import os
from operator import index as as_index

from packer_cli.errors import UsageError


def share_of_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world_size) as given, or (0, 1) where there is only one rank.

    Under torch.distributed either guess would be silently wrong for someone: Accelerate and the
    Trainer distribute batches themselves, a loop of your own does not.
    """
    if (rank is None) != (world_size is None):
        raise UsageError("rank and world_size: give both or none")
    if rank is None or world_size is None:
        ranks = _ranks_running()
        if ranks > 1:
            raise UsageError(
                f"rank and world_size: not given, and torch.distributed runs {ranks} ranks",
                "rank=dist.get_rank(), world_size=dist.get_world_size(); with Accelerate and the "
                "Trainer, which distribute batches themselves, rank=0, world_size=1",
            )
        return 0, 1
    rank, world_size = as_index(rank), as_index(world_size)  # plain ints: states are JSON
    if not 0 <= rank < world_size:
        raise UsageError(f"rank: {rank} is not between 0 and world_size - 1, {world_size - 1}")
    return rank, world_size


def _ranks_running() -> int:
    import torch.distributed as dist  # noqa: PLC0415 slow

    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    started = os.environ.get("WORLD_SIZE", "")  # by torchrun and others, before it is initialized
    return int(started) if started.isdecimal() else 1
