"""Packing on the fly in megatron-energon (extra `energon`).

    class Encoder(BestFitPacking, DefaultTaskEncoder):
        max_length = 4096
        overlong = "split"

        @stateless
        def encode_sample(self, sample: TextSample) -> TokenSample:
            return TokenSample.derive_from(sample, input_ids=tokenize(sample.text))

    get_train_dataset(path, task_encoder=Encoder(), packing_buffer_size=1000, ...)

Samples are cut when the rows of a buffer are chosen. Energon restores its buffers by keys; the key
of a part records where it was cut.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from packer_cli.errors import DataError, needs_extra
from packer_cli.packing.plan import PackPlan, plan_packing
from packer_cli.packing.sequences import pack_sequences
from packer_cli.records import wrong_ids

try:
    import torch
    from megatron.energon import Sample, edataclass, stateless
    from megatron.energon.errors import FatalSampleError
    from megatron.energon.flavors.base_dataset import add_sample_restore_key
    from megatron.energon.wrappers.base import BaseWrapperDataset
except ModuleNotFoundError as error:
    if error.name not in ("torch", "megatron", "megatron.energon"):
        raise
    raise ImportError(needs_extra("packer_cli.energon", "energon")) from error

__all__ = ["BestFitPacking", "PackedSample", "TokenSample"]

_COUNTS = (
    "documents", "empty_documents", "tokens",
    "truncated_documents", "truncated_tokens", "dropped_documents", "dropped_tokens",
)  # fmt: skip
_PROCESSES = 1 << 12


@edataclass
class TokenSample(Sample):
    """One document.

    input_ids  int[n], n >= 0, ids in 0..2**31-1
    labels     int[n], unshifted, -100 where not trained on; None: all tokens are trained on
    """

    input_ids: torch.Tensor
    labels: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # an error here skips this sample; later it would skip all that share its row
        if self.labels is not None and len(self.labels) != len(self.input_ids):
            raise DataError(
                f"sample {self.__key__}: {len(self.labels)} labels for {len(self.input_ids)} tokens"
            )
        if wrong_ids(np.asarray(self.input_ids)).any():
            raise DataError(f"sample {self.__key__}: ids that are not in 0..2**31-1")


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


class _Cut:
    """The first part of the restore key of a part; its start and stop follow."""


class _CutSamples(BaseWrapperDataset[Any, Any]):
    """Samples that go into rows. Restores the parts of those that were cut there."""

    def __init__(self, dataset: Any, encoder: BestFitPacking, *, worker_config: Any) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self._encoder = encoder

    def __iter__(self) -> Iterator[Any]:
        return filter(self._encoder._is_wanted, self.dataset)

    def restore_sample(self, restore_key: Any) -> Any:
        if restore_key[0] != _Cut.__name__:
            return self.dataset.restore_sample(restore_key)
        _, start, stop, *whole = restore_key
        return self._encoder._part(self.dataset.restore_sample(tuple(whole)), start, stop)

    def len_worker(self, worker_idx: int | None = None) -> int:
        return int(self.dataset.len_worker(worker_idx))

    def reset_state_own(self) -> None:
        """Do nothing: the encoder keeps no state."""

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}


class BestFitPacking:
    """A mixin for `megatron.energon.TaskEncoder`; name it before the encoder among the bases.

    max_length    tokens in a row
    strategy      as in `packer_cli.plan_packing`; "wrap" cuts samples where rows end
    overlong      for samples longer than a row: "error", "split", "truncate" or "drop"
    seed          of the order of a buffer's rows, and of the samples in a row; None: the order of
                  the strategy, the longest first
    pad_token_id  of the rows' padding

    `encode_sample` (or `preencode_sample`) returns `TokenSample`s. For samples of another kind
    override `sample_length`, `cut_sample` (for "wrap", "split" and "truncate") and
    `pack_selected_samples`.

    Raises UsageError for options that cannot work. "error" raises energon's FatalSampleError:
    energon would skip other errors, and the whole buffer with them.
    """

    max_length: ClassVar[int]
    strategy: ClassVar[str] = "best-fit"
    overlong: ClassVar[str] = "error"
    seed: ClassVar[int | None] = 0
    pad_token_id: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wraps = self._plan([]).strategy == "wrap"
        # shared by all workers: each adds to its own row, or additions would be lost
        self._counts = torch.zeros(_PROCESSES, len(_COUNTS), dtype=torch.int64).share_memory_()

    def packing_counts(self) -> dict[str, int]:
        """Count the samples that this rank's workers have read since the encoder was made.

        documents        samples
        empty_documents  samples without a token
        tokens           in rows
        truncated_documents, truncated_tokens, dropped_documents, dropped_tokens
                         left out by `overlong`
        """
        return dict(zip(_COUNTS, self._counts.sum(0).tolist(), strict=True))

    def sample_length(self, sample: Any) -> int:
        """Count the tokens of a sample."""
        return len(sample.input_ids)

    def cut_sample(self, sample: Any, start: int, stop: int) -> Any:
        """Return the tokens start..stop of a sample as a new sample with the same restore key."""
        labels = None if sample.labels is None else sample.labels[start:stop]
        return dataclasses.replace(sample, input_ids=sample.input_ids[start:stop], labels=labels)

    def build_batch(
        self,
        dataset: Any,
        *,
        worker_config: Any,
        packing_buffer_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Build batches as the encoder does, from samples that can be cut."""
        if packing_buffer_size is not None:
            dataset = _CutSamples(dataset, self, worker_config=worker_config)
        return super().build_batch(  # type: ignore[misc]
            dataset, worker_config=worker_config, packing_buffer_size=packing_buffer_size, **options
        )

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Return the samples of every row, or parts of them."""
        lengths = [self.sample_length(sample) for sample in samples]
        plan = self._plan(lengths)
        self._count(
            documents=len(samples), tokens=int(plan.pieces.length.sum()),
            truncated_documents=plan.loss.truncated_documents,
            truncated_tokens=plan.loss.truncated_tokens,
        )  # fmt: skip
        columns = plan.pieces.document, plan.pieces.start, plan.pieces.length
        parts = [
            samples[i] if length == lengths[i] else self._part(samples[i], start, start + length)
            for i, start, length in zip(*(column.tolist() for column in columns), strict=True)
        ]
        rows = pairwise(plan.row_offsets.tolist())
        return [[parts[i] for i in plan.order[begin:end].tolist()] for begin, end in rows]

    @stateless
    def pack_selected_samples(self, samples: list[TokenSample]) -> PackedSample:
        """Return a row of the samples, in their order."""
        labels = None
        if any(sample.labels is not None for sample in samples):
            labels = [
                sample.input_ids if sample.labels is None else sample.labels for sample in samples
            ]
        rows = pack_sequences(
            [sample.input_ids for sample in samples], self.max_length, labels=labels,
            pad_token_id=self.pad_token_id, strategy="next-fit",
        )  # fmt: skip
        wide = ("input_ids", "labels", "position_ids")
        return PackedSample(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),  # energon's to set
            __sources__=tuple(origin for sample in samples for origin in sample.__sources__ or ()),
            attention_mask=torch.as_tensor(rows.attention_mask[0]),
            cu_seqlens=torch.as_tensor(rows.cu_seqlens[0]),
            **{name: torch.as_tensor(getattr(rows, name)[0]).long() for name in wide},
        )

    def _part(self, sample: Any, start: int, stop: int) -> Any:
        return add_sample_restore_key(
            self.cut_sample(sample, start, stop), start, stop, src=_Cut(), fail_otherwise=True
        )

    def _is_wanted(self, sample: Any) -> bool:
        """Return True if a sample goes into the buffer; others would only take its places."""
        length = self.sample_length(sample)
        if length == 0:
            self._count(documents=1, empty_documents=1)
            return False
        if length <= self.max_length or self.overlong in ("split", "truncate") or self._wraps:
            return True
        if self.overlong == "error":
            raise FatalSampleError(
                f"sample {sample.__key__} has {length} tokens, max_length is {self.max_length}; "
                'choose overlong = "split", "truncate" or "drop", or a larger max_length'
            )
        self._count(documents=1, dropped_documents=1, dropped_tokens=length)
        return False

    def _count(self, **counts: int) -> None:
        of_process = self._counts[os.getpid() % _PROCESSES]
        of_process += torch.tensor([counts.get(name, 0) for name in _COUNTS])

    def _plan(self, lengths: list[int]) -> PackPlan:
        return plan_packing(
            lengths, self.max_length, strategy=self.strategy, seed=self.seed,
            overlong=self.overlong,
        )  # fmt: skip
