"""Packing on the fly in megatron-energon (extra `energon`).

    class Encoder(BestFitPacking, DefaultTaskEncoder):
        max_length = 4096
        overlong = "split"

        @stateless
        def encode_sample(self, sample: TextSample) -> TokenSample:
            return TokenSample.derive_from(sample, input_ids=tokenize(sample.text))

    get_train_dataset(path, task_encoder=Encoder(), packing_buffer_size=1000, ...)

Samples longer than a row are dealt with as soon as they are encoded, in a map of their own: energon
restores what it buffers by running the maps again, so no later step may make new samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from megatron.energon import MapDataset, Sample, edataclass, stateless
from megatron.energon.errors import FatalSampleError

from packer_cli.errors import UsageError
from packer_cli.packing import PackPlan, plan_packing
from packer_cli.sequences import pack_sequences
from packer_cli.strategies import canonical_name

__all__ = ["BestFitPacking", "PackedSample", "TokenSample"]


@edataclass
class TokenSample(Sample):
    """One document.

    input_ids  int[n], n >= 0, ids in 0..2**31-1
    labels     int[n], unshifted, -100 where not trained on; None: all tokens are trained on
    """

    input_ids: torch.Tensor
    labels: torch.Tensor | None = None


@edataclass
class PackedSample(Sample):
    """One row of `max_length` tokens.

    input_ids, labels, position_ids  int64[max_length], as of `packer_cli.PackedRows`: labels
                    unshifted, positions restarting in every document and in the padding
    attention_mask  uint8[max_length], 1 real, 0 padding
    cu_seqlens      int32[documents + 1], the row's boundaries [0, l0, ..., used]
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    cu_seqlens: torch.Tensor


class BestFitPacking:
    """A mixin for `megatron.energon.TaskEncoder`; name it before the encoder among the bases.

    max_length    tokens in a row
    strategy      as in `packer_cli.plan_packing`, but for "wrap", which cuts samples where rows
                  end and so has nothing that energon could restore
    overlong      for samples longer than a row: "error", "split", "truncate" or "drop"
    seed          of the order of a buffer's rows, and of the samples in a row; None: as the
                  strategy makes them, the longest first
    pad_token_id  of the rows' padding

    `encode_sample` (or `preencode_sample`) gives `TokenSample`s. For samples of another kind
    override `sample_length`, `cut_sample` (for "split" and "truncate") and
    `pack_selected_samples`.

    Raises UsageError when made with options that cannot work. What "error" finds is energon's
    FatalSampleError: others it would skip, and with them the whole buffer.
    """

    max_length: ClassVar[int]
    strategy: ClassVar[str] = "best-fit"
    overlong: ClassVar[str] = "error"
    seed: ClassVar[int | None] = 0
    pad_token_id: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if canonical_name(self.strategy) == "wrap":
            raise UsageError("strategy: wrap cuts samples where rows end", "choose next-fit")
        self._plan([])

    def sample_length(self, sample: Any) -> int:
        """Tokens of a sample."""
        return len(sample.input_ids)

    def cut_sample(self, sample: Any, start: int, stop: int) -> Any:
        """The tokens start .. stop of a sample, as a sample with the same restore key."""
        labels = None if sample.labels is None else sample.labels[start:stop]
        return dataclasses.replace(sample, input_ids=sample.input_ids[start:stop], labels=labels)

    @stateless
    def fit_sample(self, sample: Any) -> Iterator[Any]:
        """The parts of a sample that go into rows, by the policy `overlong`."""
        length = self.sample_length(sample)
        if length <= self.max_length:
            yield sample
        elif self.overlong == "error":
            raise FatalSampleError(
                f"sample {sample.__key__} has {length} tokens, max_length is {self.max_length}; "
                'choose overlong = "split", "truncate" or "drop", or a larger max_length'
            )
        elif self.overlong != "drop":
            end = length if self.overlong == "split" else self.max_length
            for start in range(0, end, self.max_length):
                yield self.cut_sample(sample, start, min(start + self.max_length, end))

    def build_encode_sample(self, dataset: Any, *, worker_config: Any) -> Any:
        """The encoder's own step, and `fit_sample` after it."""
        encoded = super().build_encode_sample(dataset, worker_config=worker_config)  # type: ignore[misc]
        return MapDataset(
            encoded, self.fit_sample, worker_config=worker_config, stateless_map_fn=True
        )

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """The samples of every row; empty ones are in none."""
        plan = self._plan([self.sample_length(sample) for sample in samples])
        return [[samples[i] for i in row] for row in plan.rows()]

    @stateless
    def pack_selected_samples(self, samples: list[TokenSample]) -> PackedSample:
        """One row of the samples, in their order."""
        labels = None
        if any(sample.labels is not None for sample in samples):
            labels = [
                sample.input_ids if sample.labels is None else sample.labels for sample in samples
            ]
        rows = pack_sequences(
            [sample.input_ids for sample in samples], self.max_length, labels=labels,
            pad_token_id=self.pad_token_id, strategy="next-fit",
        )  # fmt: skip
        return PackedSample(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),  # energon's to set
            __sources__=tuple(
                source for sample in samples if sample.__sources__ for source in sample.__sources__
            ),
            input_ids=torch.as_tensor(rows.input_ids[0]).long(),
            labels=torch.as_tensor(rows.labels[0]).long(),
            position_ids=torch.as_tensor(rows.position_ids[0]).long(),
            attention_mask=torch.as_tensor(rows.attention_mask[0]),
            cu_seqlens=torch.as_tensor(rows.cu_seqlens[0]),
        )

    def _plan(self, lengths: list[int]) -> PackPlan:
        return plan_packing(
            lengths, self.max_length, strategy=self.strategy, seed=self.seed,
            overlong=self.overlong,
        )  # fmt: skip
