"""packer: raw training data in, packed, memory-mappable shards out.

Importing this package loads none of torch, datasets, ray or transformers, and its own
modules only when a name is used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing takes as long to import as all else before Ctrl-C is handled
if TYPE_CHECKING:
    from packer_cli.packing.plan import PackMetrics as PackMetrics
    from packer_cli.packing.plan import PackPlan as PackPlan
    from packer_cli.packing.plan import StreamPacker as StreamPacker
    from packer_cli.packing.plan import plan_packing as plan_packing
    from packer_cli.packing.sequences import PackedRows as PackedRows
    from packer_cli.packing.sequences import pack_sequences as pack_sequences
    from packer_cli.result.opening import open_packed as open_packed
    from packer_cli.result.reader import PackedDirectory as PackedDirectory

    __version__: str

_HOMES = {
    "PackMetrics": "packing.plan",
    "PackPlan": "packing.plan",
    "plan_packing": "packing.plan",
    "PackedRows": "packing.sequences",
    "pack_sequences": "packing.sequences",
    "StreamPacker": "packing.plan",
    "PackedDirectory": "result.reader",
    "open_packed": "result.opening",
}
__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 slow to import

        return version("llm-packer")
    if name in _HOMES:
        try:
            return getattr(import_module(f"packer_cli.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("packer_cli._kernels"):
                raise
            raise ImportError(
                "packer_cli here is the source tree, whose kernels are not built: start Python "
                "in another directory, or install with pip install --editable ."
            ) from None
    raise AttributeError(f"module 'packer_cli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
