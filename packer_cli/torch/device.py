"""`to_device`: batches on the GPU before the step that needs them.

1. A batch is copied into one of `depth` sets of pinned buffers, which are used again and again:
   pinning memory is far slower than copying it.
2. From there it goes to the GPU on a stream of its own, and int32 tokens become int64 there, so
   that half the bytes cross the bus.
3. The step's stream waits for that, the step's thread does not.

On a CPU there is nothing to move: tensors stay as they are, but int32 tokens are widened. The same
goes for tensors that are on a GPU already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from packer_cli.errors import UsageError
from packer_cli.torch.collate import PackedBatch

# What losses and embeddings index by. Boundaries stay int32, as FlashAttention takes them.
_WIDENED = ("input_ids", "labels", "shift_labels", "position_ids")


def to_device(loader: Iterable[Any], device: Any, *, depth: int = 3) -> Iterator[Any]:
    """The batches of a loader, on a device: `PackedBatch`, or dicts of tensors and of other values,
    which stay as they are.

    device  "cuda", "cuda:1", "cpu" or a torch.device
    depth   sets of pinned buffers; depth - 1 batches are on their way while a step runs

    input_ids, labels, shift_labels and position_ids come as int64, so give collators
    dtype=torch.int32. Tensors that are pinned already are copied from where they are, so a loader
    must not write to them again. Raises UsageError for a depth below 2, a device other than a CPU
    or CUDA, or batches of something else.

    On a GPU the loader is depth - 1 batches ahead of training, and its state and its sampler's are,
    too: `PackedSampler.state_dict(rows=...)`.
    """
    device = torch.device(device)
    if depth < 2:
        raise UsageError(f"depth: {depth} is less than 2: no copy would overlap a step")
    if device.type == "cpu":
        return (_like(batch, _widened(_named(batch))) for batch in loader)
    if device.type != "cuda":
        raise UsageError(f"to_device: {device} is neither a CPU nor CUDA")
    return _ahead(loader, device, depth)


def _named(batch: Any) -> dict[Any, Any]:
    """A batch's values by name, the same objects for as long as they are sent.

    A name is (name,), and (name, name in it, ...) in dicts in the batch: masks of several kinds,
    the inputs of a batch of pairs.
    """
    if isinstance(batch, PackedBatch):
        return dict(_paths(vars(batch)))
    if isinstance(batch, Mapping):
        return dict(_paths(batch))
    raise UsageError(
        f"to_device: a batch is a {type(batch).__name__}, neither a dict nor a PackedBatch",
        "give the loader a collator of packer_cli.torch",
    )


def _paths(batch: Mapping[Any, Any], outer: Any = ()) -> Iterator[tuple[Any, Any]]:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _paths(value, (*outer, name))
        else:
            yield (*outer, name), value


def _like(batch: Any, values: dict[Any, Any]) -> Any:
    content: dict[str, Any] = {}
    for (*outer, name), value in values.items():
        inner = content
        for one in outer:
            inner = inner.setdefault(one, {})
        inner[name] = value
    return PackedBatch(**content) if isinstance(batch, PackedBatch) else content


def _widened(batch: dict[Any, Any]) -> dict[Any, Any]:
    return {
        name: value.long() if name[-1] in _WIDENED and isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _ahead(loader: Iterable[Any], device: Any, depth: int) -> Iterator[dict[str, Any]]:
    with torch.cuda.device(device):
        device = torch.device("cuda", torch.cuda.current_device())  # whichever is current later
        stream = torch.cuda.Stream()
        ring = deque(_Slot(stream) for _ in range(depth))
    on_their_way: deque[tuple[Any, dict[Any, Any], Any]] = deque()
    for batch in loader:
        ring.rotate(-1)
        on_their_way.append((batch, *ring[0].send(_named(batch), device)))
        if len(on_their_way) == depth:
            yield _arrived(*on_their_way.popleft(), device)
    while on_their_way:
        yield _arrived(*on_their_way.popleft(), device)


def _arrived(batch: Any, sent: dict[Any, Any], copied: Any, device: Any) -> Any:
    step = torch.cuda.current_stream(device)
    step.wait_event(copied)
    for value in sent.values():
        if isinstance(value, torch.Tensor) and value.device == device:
            value.record_stream(step)  # or its memory could be reused while the step reads it
    return _like(batch, _widened(sent))  # here, on the step's stream, also what was on the GPU


class _Slot:
    """One set of pinned buffers, and the event after which it may be written to again."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._copied = torch.cuda.Event()
        self._buffers: dict[Any, Any] = {}

    def send(self, batch: dict[Any, Any], device: Any) -> tuple[dict[Any, Any], Any]:
        """Start copying; (the batch on the device, the event that says it is there)."""
        self._copied.synchronize()
        sent: dict[int, Any] = {}  # by id: cu_seq_lens_q and _k are the same tensor
        moved = {}
        with torch.cuda.stream(self._stream):
            for name, value in batch.items():
                if not isinstance(value, torch.Tensor) or value.is_cuda:
                    moved[name] = value  # this stream could read it before it is written
                    continue
                if id(value) not in sent:
                    pinned = value if value.is_pinned() else self._pinned(name, value)
                    sent[id(value)] = pinned.to(device, non_blocking=True)
                moved |= _widened({name: sent[id(value)]})
            self._copied.record()
        return moved, self._copied

    def _pinned(self, name: Any, value: Any) -> Any:
        """The value in the buffer of this name, which grows when it is too small."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != value.dtype or buffer.numel() < value.numel():
            buffer = torch.empty(value.numel(), dtype=value.dtype, pin_memory=True)
            self._buffers[name] = buffer
        place = buffer[: value.numel()].view(value.shape)
        return place.copy_(value)
