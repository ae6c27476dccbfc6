"""What follows from how much was taken of each source of a recipe: epochs and shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from packer_cli.result.manifest import Manifest, Source

_NOT_COUNTS = {"path", "size", "sha256", "removed", "format"}


def shares(sources: Sequence[Source]) -> list[tuple[float, float]]:
    """(asked, reached) of every source: its share of what all have."""
    asked, reached = sum(one.asked for one in sources), sum(one.taken for one in sources)
    return [(one.asked / asked if asked else 0.0, one.taken / reached if reached else 0.0)
            for one in sources]  # fmt: skip


def sources_as_json(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """As the manifest has them, with the epochs and shares that follow."""
    return [
        asdict(one) | {"epochs": one.epochs, "share_asked": asked, "share_reached": reached}
        for one, (asked, reached) in zip(sources, shares(sources), strict=True)
    ]


def by_source(manifest: Manifest) -> list[dict[str, Any]]:
    """Sums, for every source, of each figure that the manifest has for its inputs."""
    listed, counts = manifest.document["inputs"], []
    for one in manifest.sources:
        own = listed[slice(*one.inputs)]
        names = [name for name in own[0] if name not in _NOT_COUNTS] if own else []
        sums = {name: sum(entry[name] for entry in own)
                for name in names if all(name in entry for entry in own)}  # fmt: skip
        counts.append({"name": one.name} | sums)
    return counts
