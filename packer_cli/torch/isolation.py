"""Isolation of documents in packed rows: masks, a table of model families, and an experiment.

Masks. A 4-D mask replaces all masks of a model, so it must include the model's sliding windows.
`layer_types` of a config names one of three masks for each layer; without it, all layers take the
second if there is a `sliding_window`, and else the first. Each place sees

    full_attention       all earlier places of its document and itself
    sliding_attention    the last `sliding_window` of these
    chunked_attention    those in the same chunk: `attention_chunk_size` places, counted from the
                         document's start

If layers differ, models of transformers take a dict of masks by these names, with None for layers
that do not attend, such as Mamba's.

Families. `check_suitable` refuses what would silently let documents see each other: attention that
finds documents by positions (SDPA, eager and FlexAttention) in families that ignore positions;
convolutions and recurrent layers that do not get `seq_idx`; and masks that an attention does not
take. `families.txt` lists a `model_type` in one of four groups, found by running a tiny model
(tests/extras/families.py):

    positions    positions are enough for every kind of attention
    end-to-end   FlashAttention also needs rows end to end
    boundaries   it needs FlashAttention or masks
    never        no packed row is right

A model that is not in the table is refused if it has recurrent layers, and otherwise warned about.

Experiment. `check_isolation` replaces the tokens of every second document of each row, and in
another copy those of the others: logits of the documents in between must not change. The first
document of a row precedes everything that the second copy changes, so a change there is noise:
experts, for example, compute together the tokens that the router sends them. If logits elsewhere
change more than ten times as much, one document has seen another. This takes three forward passes.

Then it looks for the reason. If documents are apart in a batch without the values that make
transformers ignore boundaries (`_REMEDIES`), these are the reason. Otherwise a layer is: the first
whose output changes though its input does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from packer_cli.errors import UsageError, named
from packer_cli.options.option import refuse

_BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens")
_LABELS = ("labels", "shift_labels")
_NUMBERS = (("position_ids", 1), ("seq_idx", 0), ("document_ids", 0))  # and how they go on


def check_isolation(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise UsageError if a document of the batch sees another, and say what in the batch or which
    layer is the reason: `check_isolation(model, batch)`.

    model  on any device, in any mode. It is called as `model(**batch)` without labels and returns
           logits [rows, length, vocabulary], by themselves, first in a tuple or as `.logits`. Its
           mode, its buffers and the state of random numbers are restored
    batch  of a collator, on any device: input_ids int [rows, length], and boundaries, seq_idx or
           position_ids that restart. It is not changed

    Raises UsageError also if no row has two documents or their boundaries are missing, and if
    logits differ before anything that was changed.
    """
    numbers = _document_numbers(batch)
    ids = batch["input_ids"]
    values, which = torch.unique(ids, return_inverse=True)
    if len(values) < 2:
        raise UsageError(f"check_isolation: every token of the batch is {values.tolist()}")
    replaced = values[(which + 1) % len(values)]  # another token in each place
    odd = numbers % 2 == 1
    if not bool(odd.any()):
        raise UsageError(
            "check_isolation: no row of the batch has two documents: packing is off, or each fills "
            "a row",
            "give it other rows",
        )
    parameters = list(getattr(model, "parameters", list)())
    device = next((parameter.device for parameter in parameters), ids.device)
    halves = {p.dtype for p in parameters if p.is_floating_point() and p.itemsize == 2}
    # share of the largest value that rounding may change, even if the noise is 0
    tolerance = max(1e-6, *(torch.finfo(dtype).eps for dtype in halves), 0)
    inputs = {name: _to(value, device) for name, value in batch.items() if name not in _LABELS}
    copies = [tokens.to(device) for tokens in (ids, torch.where(odd, ids, replaced),
                                               torch.where(odd, replaced, ids))]  # fmt: skip
    places = numbers.cpu()

    def changes(batch: dict[str, Any]) -> _Changes:
        return _Changes.of(
            (_logits(model, batch | {"input_ids": tokens}) for tokens in copies), places
        )

    def is_remedied_by(names: Iterable[str]) -> bool:
        try:
            return not changes(_remedied(inputs, names, numbers)).exceed(tolerance)
        except Exception:  # a model of your own, which may not take the other batch
            return False

    with _restored(model):
        logits = changes(inputs)
        if not logits.noise <= 0.01 * logits.scale:
            raise UsageError(
                f"check_isolation: logits differ by {logits.noise:.2g} before anything that was "
                "changed",
                "it cannot check a model that looks ahead, or that is random by itself",
            )
        if not logits.exceed(tolerance):
            return
        tip = "choose the collator by docs/training.md, and give it config=model.config"
        if is_remedied_by(needed := [*_REMEDIES]):
            for name in _REMEDIES:
                if is_remedied_by(fewer := [remedy for remedy in needed if remedy != name]):
                    needed = fewer
            reason = f" because of {' and '.join(needed)}"
            tip = f"{'; '.join(_REMEDIES[name] for name in needed)}; or {tip}"
        else:
            runs = [_projections(model, inputs | {"input_ids": tokens}) for tokens in copies]
            layer = next((
                name for name in runs[0] if [
                    _Changes.of((run[name][end] for run in runs), places).exceed(tolerance)
                    for end in (0, 1)
                ] == [False, True]
            ), "")  # fmt: skip
            reason = layer and f", first in {layer}"
    raise UsageError(
        f"check_isolation: documents see each other{reason}: the tokens of another change logits "
        f"by {logits.seen:.2g}, and the largest is {logits.scale:.2g}",
        tip,
    )


class _Changes(NamedTuple):
    """The largest changes of values at places that keep their tokens.

    seen   after places of another document that were changed
    noise  before everything that was changed
    scale  the largest value itself
    """

    seen: float
    noise: float
    scale: float

    @classmethod
    def of(cls, values: Iterator[Any], numbers: Any) -> _Changes:
        """Compare values [rows, length, n]: first as they are, then with other tokens in even
        documents, then with other tokens in odd ones. The last two are overwritten.
        """
        before = next(values)
        scale = float(before.abs().max())
        by_even, by_odd = (after.sub_(before).abs_().amax(dim=-1).float().cpu() for after in values)
        odd = numbers % 2 == 1
        seen = max(_largest(by_even, odd), _largest(by_odd, ~odd & (numbers > 0)))
        return cls(seen, _largest(by_odd, numbers == 0), scale)

    def exceed(self, tolerance: float) -> bool:
        """Return True if one document has seen another."""
        return self.seen > 10 * self.noise + tolerance * self.scale


# what makes models of transformers ignore boundaries
_REMEDIES = {
    "attention_mask": "leave the 2-D attention_mask out",
    "use_cache": "add use_cache=False",
    "position_ids": "let position_ids restart in each document",
}


def _remedied(batch: dict[str, Any], names: Iterable[str], numbers: Any) -> dict[str, Any]:
    """Return the batch with these remedies."""
    batch = dict(batch)
    if "attention_mask" in names and getattr(batch.get("attention_mask"), "ndim", 0) == 2:
        del batch["attention_mask"]
    if "use_cache" in names:
        batch["use_cache"] = False
    if "position_ids" in names:
        batch["position_ids"] = _places_within(numbers).to(batch["input_ids"].device)
    return batch


def _projections(model: Any, batch: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (input, output) of each module, "name (class)", as one number for each place,
    float32[rows, length, 1], in the order in which modules return.
    """
    shape, ends = batch["input_ids"].shape, dict[str, tuple[Any, Any]]()

    def projection(values: Iterable[Any]) -> Any:
        for value in values:
            if torch.is_tensor(value) and value.is_floating_point() and value.shape[:2] == shape:
                flat = value.float().reshape(*shape, -1)
                weights = torch.arange(flat.shape[-1], device=flat.device).cos()
                return (flat @ weights)[..., None].cpu()
        return torch.zeros(*shape, 1)

    def keep(name: str, module: Any, args: Any, named_args: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        key = f"{name} ({type(module).__name__})"
        ends[key] = projection((*args, *named_args.values())), projection(outputs)

    hooks = [
        module.register_forward_hook(partial(keep, name), with_kwargs=True)
        for name, module in getattr(model, "named_modules", list)()
    ]
    try:
        _logits(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return ends


def _document_numbers(batch: Mapping[str, Any]) -> Any:
    """Number the documents of each row 0, 1, ...: int64[rows, length]."""
    shape = batch["input_ids"].shape
    begins = torch.zeros(shape, dtype=torch.bool)
    begins[:, 0] = True
    known = False
    for name in _BOUNDARIES:
        if name in batch:
            begins.view(-1)[batch[name][:-1].cpu().long()] = known = True
    for name, step in _NUMBERS:
        if name in batch:
            values, known = batch[name].cpu(), True
            begins[:, 1:] |= values[:, 1:] != values[:, :-1] + step
    if not known:
        raise UsageError(
            f"check_isolation: the batch has no boundaries of documents: it has {named(batch)}",
            "give it the batch of a collator of packer_cli.torch",
        )
    return (begins.cumsum(dim=1) - 1).to(batch["input_ids"].device)


def _to(value: Any, device: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _to(part, device) for name, part in value.items()}
    return value.to(device) if hasattr(value, "to") else value


def _logits(model: Any, batch: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    output = model(**batch)
    if hasattr(output, "logits"):
        return output.logits
    return output[0] if isinstance(output, tuple) else output


def _largest(change: Any, places: Any) -> float:
    chosen = change[places.cpu()]
    return float(chosen.max()) if len(chosen) else 0.0


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """A context without gradients that restores buffers and random numbers."""
    buffers = [
        (module, name, value, value.clone())
        for module in getattr(model, "modules", list)()
        for name, value in module._buffers.items()
        if value is not None
    ]
    devices = range(torch.cuda.device_count())  # all: torch.manual_seed seeds each
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for module, name, value, copy in buffers:
                module._buffers[name] = value.copy_(copy)


_BY_POSITIONS = ("sdpa", "eager", "flex_attention", None)


def check_suitable(collator: str, config: Any, form: str = "") -> None:
    """Raise UsageError if documents of a model with this config would see each other.

    collator  its name
    config    None: nothing is checked
    form      of block_mask_collate
    """
    if config is None:
        return
    attention, masked, wanted = attention_of(config), collator == "block_mask_collate", "mask"
    kind = getattr(text_config(config), "model_type", type(config).__name__)
    kept_apart_by = _families().get(kind, "")
    if attention == "flex_attention":
        wanted = "documents"
    blind = f"{attention or 'attention'} ignores positions"
    apart = ", and documents would see each other"
    is_unknown = not kept_apart_by
    refuse([
        (
            kept_apart_by == "never",
            f"{collator}: layers of {kind} ignore boundaries{apart}",
            "separate_collate",
        ),
        (
            is_unknown and is_recurrent(config),
            f"{collator}: {kind} has recurrent layers, and it is unknown if they use boundaries",
            "separate_collate; or config=None, and check_isolation(model, batch) to find out",
        ),
        (
            kept_apart_by == "end-to-end" and collator == "padded_collate"
            and attention not in _BY_POSITIONS,
            f"{collator}: {attention} of {kind} keeps documents apart only in rows end to end",
            "varlen_collate",
        ),
        (
            masked and attention not in _BY_POSITIONS,
            f"{collator}: {attention} takes no masks",
            "varlen_collate or padded_collate",
        ),
        (
            masked and attention is not None and form != wanted,
            f"{collator}: {attention} takes no masks of form={form!r}",
            f"form={wanted!r}",
        ),
        (
            not masked and attention in _BY_POSITIONS and kept_apart_by == "boundaries",
            f"{collator}: in {kind}, {blind}{apart}",
            "block_mask_collate with config=, or FlashAttention, or separate_collate",
        ),
    ])  # fmt: skip
    if is_unknown and not masked:
        _warn(f"{collator}: it is unknown if documents of {kind} see each other; "
              "check_isolation(model, batch) of packer_cli.torch finds out")  # fmt: skip


@cache
def _warn(text: str) -> None:
    """Warn once in a process."""
    warnings.warn(text, stacklevel=4)


@cache
def _families() -> dict[str, str]:
    """Return model_type -> the group of its family, as above."""
    lines = Path(__file__).with_name("families.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split() for line in lines)
    return {name: group for group, *names in rows for name in names}


_MASKED = ("full_attention", "sliding_attention", "chunked_attention")
_RECURRENT = ("linear_attention", "conv", "mamba", "mamba2", "recurrent")
_UNMASKED = (*_RECURRENT, "moe", "mlp")
# other names in configs, and layers of two parts
_PARTS = {"attention": _MASKED[:1], "hybrid": ("full_attention", "linear_attention")}


def text_config(config: Any) -> Any:
    """Return the part of a config for text, if a model also takes images."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_of(config: Any) -> str | None:
    """Return the attention of a model of transformers: "sdpa", "eager", ...; None if not set."""
    attention: str | None = getattr(text_config(config), "_attn_implementation", None)
    return attention


def is_recurrent(config: Any) -> bool:
    """Return True if a model has recurrent or convolution layers, which pass state along a row."""
    kinds = {part for kind in _types(config) or () for part in _PARTS.get(kind, (kind,))}
    return not kinds.isdisjoint(_RECURRENT)


def block_masks(document_ids: Any, config: Any, mask_of: Callable[[Any, int | None], Any]) -> Any:
    """Make the masks of a model: one, or a dict by kind of layer if these differ.

    document_ids  int [b, length]
    config        the model's, or None for a model without windows
    mask_of       (ids [b, length], window) to a mask: a place may see earlier places with the same
                  id and itself, `window` of them at most

    Raises UsageError for unknown kinds of layers, and if no layer attends.
    """
    kinds, text, masks = _kinds(config), text_config(config), dict[str, Any]()
    for kind in kinds:
        if kind in _UNMASKED:
            masks[kind] = None
        elif kind == "chunked_attention":
            masks[kind] = mask_of(_chunks(document_ids, text.attention_chunk_size), None)
        else:
            window = text.sliding_window if kind == "sliding_attention" else None
            masks[kind] = mask_of(document_ids, window)
    return masks if len(masks) > 1 else masks[kinds[0]]


def dense_mask(ids: Any, window: int | None, kind: Any = torch.bool) -> Any:
    """Make a mask [b, 1, length, length]: True for the places that a query may see. If `kind` is a
    type of floats, the mask is to be added to scores.
    """
    seen = (ids[:, None, :, None] == ids[:, None, None, :]).tril_()
    seen = seen if window is None else seen.triu_(1 - window)
    if kind == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=kind).masked_fill_(~seen, torch.finfo(kind).min)


def flex_mask(ids: Any, window: int | None) -> Any:
    """Make FlexAttention's BlockMask by the rule of `dense_mask`."""
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 slow

    def visible(row: Any, head: Any, query: Any, key: Any) -> Any:
        seen = (ids[row, query] == ids[row, key]) & (query >= key)
        return seen if window is None else seen & (query - key < window)

    rows, length = ids.shape
    return create_block_mask(visible, rows, None, length, length, device=ids.device)


def _types(config: Any) -> Any:
    """Return the kind of each layer, or None if a config does not list them."""
    text = text_config(config)
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)


def _kinds(config: Any) -> list[str]:
    """Return the kinds of a model's layers, the keys of its masks."""
    types = _types(config)
    if types is None:
        windowed = getattr(text_config(config), "sliding_window", None) is not None
        return ["sliding_attention" if windowed else "full_attention"]
    kinds = sorted({part for kind in types for part in _PARTS.get(kind, (kind,))})
    if unknown := [kind for kind in kinds if kind not in (*_MASKED, *_UNMASKED)]:
        raise UsageError(
            f"block masks: layers of an unknown kind: {named(unknown)}",
            "padded_collate or varlen_collate, and check_isolation",
        )
    if all(kind in _UNMASKED for kind in kinds):
        raise UsageError(
            "block masks: no layer of the model attends, so masks separate nothing",
            "varlen_collate, with the kernels that transformers asks for; or separate_collate",
        )
    return kinds


def _chunks(document_ids: Any, size: int) -> Any:
    """Number the chunks of each document of a row: int64[b, length]."""
    return document_ids * document_ids.shape[1] + _places_within(document_ids) // size


def _places_within(document_ids: Any) -> Any:
    """Number the places of each document of a row: int64[b, length]."""
    length = document_ids.shape[1]
    places = torch.arange(length, device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values
