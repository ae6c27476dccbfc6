"""`PackedTrainerMixin`: packed rows in transformers' Trainer and in TRL's SFTTrainer.

The Trainer gets its batches from `get_train_dataloader`. The mixin returns those of a
`PackedSampler` for this process, which Accelerate does not distribute again:

1. An epoch of the Trainer is one of the sampler's, always with the same number of batches.
2. A callback begins the sampler's epochs and counts the steps that were trained on: loaders read
   ahead, so more rows were drawn from the sampler.
3. Every checkpoint has the sampler's state, with the callback's in trainer_state.json. A run goes
   on from there on any number of processes.

Needs transformers, so `packer_cli.torch` imports it on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, Literal

from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState, TrainerCallback

from packer_cli.errors import DataError, UsageError
from packer_cli.torch.collate import varlen_collate
from packer_cli.torch.dataset import PackedDataset
from packer_cli.torch.isolation import text_config
from packer_cli.torch.sampler import PackedSampler


class PackedTrainerMixin:
    """A mixin that trains on packed rows: `class PackedTrainer(PackedTrainerMixin, Trainer): pass`.

    Takes the arguments of Trainer or SFTTrainer, with `train_dataset=PackedDataset(...)`.

    * Each process gets its share of the rows, in the order of a `PackedSampler`. Its seed is
      `data_seed` of the arguments, or else `seed`, or None if train_sampling_strategy is
      "sequential".
    * `packed_balance`, an attribute of the class, is the sampler's `balance`: "step" deals the rows
      of a step to processes and micro-batches so that none waits for another. Costs depend on
      `hidden_size` of the model's config; without it there is no balance.
    * The default `data_collator` is `varlen_collate` with the model's config.
    * `remove_unused_columns` is ignored: all columns stay.
    * Every checkpoint has the position. `resume_from_checkpoint=True` goes on behind it, on any
      number of processes, if a step has as many rows as before: the Trainer counts steps. The rows
      of a step are per_device_train_batch_size * gradient_accumulation_steps * processes.

    If the number of rows is not a multiple of the processes, at most one row for each process is
    left out of an epoch, or begins the next one.

    Raises UsageError for a model without a config or collator, for several GPUs in one process, for
    context and sequence parallelism, for other sampling strategies, and on resuming from a
    checkpoint that has no position or steps of another number of rows; DataError for a checkpoint
    of other data.
    """

    packed_balance: Literal["step", "order"] | None = "step"

    def __init__(
        self: Any,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *more: Any,
        **named: Any,
    ) -> None:
        _check_task(self)
        collate, taken = data_collator or varlen_collate, train_dataset
        of_trl = any(kind.__module__.partition(".")[0] == "trl" for kind in type(self).__mro__)
        if of_trl and isinstance(train_dataset, PackedDataset):
            # SFTTrainer takes only a data set of `datasets`, and looks at the first row
            from datasets import Dataset  # noqa: PLC0415 only for TRL

            names = [name for name in ("input_ids", "labels") if name in train_dataset[0]]
            taken = Dataset.from_dict({name: [train_dataset[0][name].tolist()] for name in names})
            if hasattr(args, "dataset_kwargs"):
                args.dataset_kwargs = (args.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
        super().__init__(model, args, collate, taken, *more, **named)  # type: ignore[call-arg]
        self.train_dataset = train_dataset
        self.args.remove_unused_columns = False
        if data_collator is None:
            if (config := getattr(self.model, "config", None)) is None:
                raise UsageError(
                    f"data_collator: none given, and {type(self.model).__name__} has no config",
                    "data_collator=partial(varlen_collate, config=None) for a model of your own",
                )
            self.data_collator = partial(varlen_collate, config=config)
        self.add_callback(PackedPosition())

    def get_train_dataloader(self: Any) -> Any:
        """Return the batches of this process. The Trainer moves them to its device."""
        args = self.args
        sizes = self._train_batch_size, args.gradient_accumulation_steps
        balance: dict[str, Any] = {}
        text = text_config(getattr(self.model, "config", None))
        if self.packed_balance and (hidden_size := getattr(text, "hidden_size", None)) is not None:
            balance = {"balance": self.packed_balance, "hidden_size": hidden_size}
        rank, world_size = _share_of(self)
        sampler = PackedSampler(
            self.train_dataset, seed=_seed_of(args), rank=rank, world_size=world_size,
            batch_size=sizes[0], micro_batches=sizes[1], **balance,
        )  # fmt: skip
        batches = Batches(sampler, drop_last=args.dataloader_drop_last)
        return DataLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )


class Batches:
    """A batch sampler whose epochs all have the same number of batches, as the Trainer expects.

    sampler    of this process, with the sizes of steps; the last step of an epoch may have fewer
               batches, and its last batch fewer rows
    drop_last  leave out a last batch with fewer rows
    trained    steps of this epoch, which the callback counts

    Raises DataError if an epoch has no batch.
    """

    def __init__(self, sampler: PackedSampler, *, drop_last: bool = False) -> None:
        self.sampler, sizes, rows = sampler, sampler.sizes, len(sampler)
        batch_size, micro_batches = sizes.batch_size, sizes.micro_batches
        self._batch_size, self._micro_batches = batch_size, micro_batches
        self._count = rows // batch_size if drop_last else -(-rows // batch_size)
        if not self._count:
            raise DataError(
                f"an epoch has {rows} rows for each process, fewer than a batch of {batch_size}",
                "train with smaller batches, or without dataloader_drop_last",
            )
        self._steps = -(-self._count // micro_batches)
        self._rows_per_step = sizes.rows
        self._to_skip = 0  # steps that the Trainer skips in the next epoch,
        self._skipped = self.trained = 0  # steps that it skips and has trained on in this one

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        """Yield row numbers. Batches that the Trainer skips are empty."""
        skipped = self._skipped * self._micro_batches
        yield from ([] for _ in range(skipped))
        rows = iter(self.sampler)
        for _ in range(skipped, self._count):
            yield list(islice(rows, self._batch_size))

    def restore(self, state: dict[str, Any], steps: int) -> None:
        """Go on after a `state_dict` that was saved after `steps` steps of the run.

        Raises UsageError if the Trainer would count the steps wrong.
        """
        expected = state["rows_per_step"]
        if self._rows_per_step != expected:
            raise UsageError(
                f"the checkpoint's steps had {expected} rows, those of this run have "
                f"{self._rows_per_step}: the Trainer counts steps, and would count wrong",
                "set per_device_train_batch_size, gradient_accumulation_steps and the number of "
                f"processes so that their product is {expected}",
            )
        saved, sampler = state["sampler"], self.sampler
        sampler.load_state_dict(saved)
        epoch, within = divmod(steps, self._steps)
        place = epoch * sampler.rows + within * self._rows_per_step
        # an epoch begins with rows that the processes could not share in the one before
        if not 0 <= place - saved["samples"] < self._rows_per_step:
            raise UsageError(
                f"the checkpoint is at row {saved['samples']} of the run, the Trainer expects row "
                f"{place}: it counts {self._steps} steps an epoch",
                "resume on as many processes as the run began with",
            )
        if sampler.epoch < epoch:  # fewer processes could share rows of it, but it is over
            samples = saved["samples"] + len(sampler) * sampler.world_size
            sampler.load_state_dict(saved | {"samples": samples, "dealt": ()})
        self._to_skip = within

    def next_epoch(self) -> None:
        """Begin an epoch of the Trainer."""
        # as after a checkpoint at the end of the last epoch; some of its rows may not be drawn
        self.sampler.load_state_dict(self.sampler.state_dict(rows=sys.maxsize))
        self._skipped, self._to_skip, self.trained = self._to_skip, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training, for `restore`."""
        ended = self._skipped + self.trained == self._steps
        rows = self.trained * self._micro_batches * self._batch_size
        state = self.sampler.state_dict(rows=sys.maxsize if ended else rows)
        return {"sampler": state, "rows_per_step": self._rows_per_step}


class PackedPosition(ExportableState, TrainerCallback):  # type: ignore[misc]
    """A callback that keeps the batches and the Trainer's checkpoints at the same position."""

    def __init__(self) -> None:
        self._batches: Any = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Go on after a checkpoint."""
        self._batches = train_dataloader.batch_sampler
        if not state.global_step:
            return
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        if "position" not in saved:
            raise UsageError(
                f"the checkpoint of step {state.global_step} has no position of packed rows",
                "resume from one that a trainer with PackedTrainerMixin wrote",
            )
        self._batches.restore(saved["position"], state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the sampler's epoch."""
        self._batches.next_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        self._batches.trained += 1

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint saves."""
        position = {"position": self._batches.state_dict()} if self._batches else {}
        return {"args": {}, "attributes": position}


def _seed_of(args: Any) -> int | None:
    """Return the sampler's seed; None if rows stay in their order."""
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy == "sequential":
        return None
    if strategy != "random":
        raise UsageError(
            f"train_sampling_strategy: {strategy!r} is for rows of unequal length",
            "leave it out: packed_balance evens out what packed rows cost",
        )
    seed: int = args.seed if args.data_seed is None else args.data_seed
    return seed


def _share_of(trainer: Any) -> tuple[int, int]:
    """Return (rank, world_size) of this process's rows: tensor-parallel processes share them."""
    args = trainer.args
    if args.n_gpu > 1:
        raise UsageError(
            f"{args.n_gpu} GPUs in one process: the Trainer would cut packed batches apart",
            f"start a process for each: torchrun --nproc-per-node {args.n_gpu} ...",
        )
    sizes = {name: getattr(trainer, f"get_{name}_size", lambda: 1)() for name in ("tp", "cp", "sp")}
    if sizes["cp"] > 1 or sizes["sp"] > 1:
        raise UsageError(
            "context and sequence parallelism cut rows, and PackedTrainerMixin does not",
            "train with data and tensor parallelism",
        )
    return args.process_index // sizes["tp"], args.world_size // sizes["tp"]


def _check_task(trainer: Any) -> None:
    """Raise UsageError for a trainer of TRL that pads and tokenizes by itself."""
    kinds = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    if kinds and "SFTTrainer" not in kinds:
        raise UsageError(
            f"PackedTrainerMixin: {kinds[0]} computes losses of padded batches, not of packed rows",
            "give it the records themselves, without the mixin",
        )
