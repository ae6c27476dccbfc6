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
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    must not write to them again. Raises UsageError for a depth below 2, or a device other than a
    CPU or CUDA.

    On a GPU the loader is depth - 1 batches ahead of training, and its state and its sampler's are,
    too: `PackedSampler.state_dict(rows=...)`.
    """
    device = torch.device(device)
    if depth < 2:
        raise UsageError(f"depth: {depth} is less than 2: no copy would overlap a step")
    if device.type == "cpu":
        return (_each_tensor(batch, _widened) for batch in loader)
    if device.type != "cuda":
        raise UsageError(f"to_device: {device} is neither a CPU nor CUDA")
    return _ahead(loader, device, depth)


def _each_tensor(batch: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """A batch with other tensors: `change` takes the name of each, and in dicts in the batch (masks
    of several kinds, the inputs of a batch of pairs) its names from the outermost on.
    """
    changed = dict(vars(batch) if isinstance(batch, PackedBatch) else batch)
    for key, value in changed.items():
        if isinstance(value, torch.Tensor):
            changed[key] = change(f"{name}/{key}", value)
        elif isinstance(value, Mapping):
            changed[key] = _each_tensor(value, change, f"{name}/{key}")
    return PackedBatch(**changed) if isinstance(batch, PackedBatch) else changed


def _widened(name: str, tensor: Any) -> Any:
    return tensor.long() if name.rpartition("/")[2] in _WIDENED else tensor


def _ahead(loader: Iterable[Any], device: Any, depth: int) -> Iterator[Any]:
    with torch.cuda.device(device):
        device = torch.device("cuda", torch.cuda.current_device())  # whichever is current later
        stream = torch.cuda.Stream()
        ring = deque(_Slot(stream) for _ in range(depth))
    on_their_way: deque[tuple[Any, Any]] = deque()
    for batch in loader:
        ring.rotate(-1)
        on_their_way.append(ring[0].send(batch, device))
        if len(on_their_way) == depth:
            yield _arrived(*on_their_way.popleft(), device)
    while on_their_way:
        yield _arrived(*on_their_way.popleft(), device)


def _arrived(batch: Any, copied: Any, device: Any) -> Any:
    step = torch.cuda.current_stream(device)
    step.wait_event(copied)

    def kept(name: str, tensor: Any) -> Any:
        if tensor.device == device:
            tensor.record_stream(step)  # or its memory could be reused while the step reads it
        return _widened(name, tensor)  # here, on the step's stream, also what was on the GPU

    return _each_tensor(batch, kept)


class _Slot:
    """One set of pinned buffers, and the event after which it may be written to again."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._copied = torch.cuda.Event()
        self._buffers: dict[str, Any] = {}

    def send(self, batch: Any, device: Any) -> tuple[Any, Any]:
        """Start copying; (the batch on the device, the event that says it is there)."""
        self._copied.synchronize()
        sent: dict[int, Any] = {}  # by id: cu_seq_lens_q and _k are the same tensor

        def copied(name: str, tensor: Any) -> Any:
            if tensor.is_cuda:
                return tensor  # this stream could read it before it is written
            if id(tensor) not in sent:
                pinned = tensor if tensor.is_pinned() else self._pinned(name, tensor)
                sent[id(tensor)] = pinned.to(device, non_blocking=True)
            return _widened(name, sent[id(tensor)])

        with torch.cuda.stream(self._stream):
            moved = _each_tensor(batch, copied)
            self._copied.record()
        return moved, self._copied

    def _pinned(self, name: str, tensor: Any) -> Any:
        """The tensor in the buffer of this name, which grows when it is too small."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != tensor.dtype or buffer.numel() < tensor.numel():
            buffer = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
            self._buffers[name] = buffer
        place = buffer[: tensor.numel()].view(tensor.shape)
        return place.copy_(tensor)
