"""Which options go with records of preference: a pair's two sides lie whole in one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from packer_cli.config.columns import PAIR_COLUMNS
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import UsageError

_Config = TypeVar("_Config", bound=DocumentConfig)
_WHOLE = "one side, or a part of one, would be trained on without what it is compared with"


def refuse_pairs_among(shapes: Sequence[Shape], tip: str = "") -> None:
    """UsageError where some of these records are of preference and others are not."""
    others = [shape.kind for shape in shapes if not shape.has_pairs]
    if others and len(others) < len(shapes):
        raise UsageError(
            f"records of preference and of {others[0]} cannot lie in one result: losses of "
            "preference need rows of pairs alone",
            tip or "pack them with two commands",
        )


def refuse_labels_among_pairs(has_labels: Iterable[bool]) -> None:
    """UsageError where some records of preference are answers with a label and others are pairs."""
    if len({*has_labels}) > 1:
        raise UsageError(
            "pairs and answers with a label cannot lie in one result: losses of pairs need both "
            "sides of each, those of labels estimate with other prompts' answers",
            "pack them with two commands",
        )


def with_pair_columns(config: _Config, shape: Shape) -> _Config:
    """With the columns pair and side exactly where the records are of preference."""
    if not isinstance(config, PackConfig):
        return config
    columns = tuple(name for name in config.columns if name not in PAIR_COLUMNS)
    return replace(config, columns=columns + PAIR_COLUMNS * shape.has_pairs)


def overlong_of_pairs(config: PackConfig) -> str:
    """What becomes of pairs longer than a row. UsageError for what would part them."""
    if config.strategy == "wrap":
        raise UsageError(
            f"--strategy: wrap cuts documents, and a pair must stay whole: {_WHOLE}",
            "choose another strategy, such as best-fit",
        )
    if config.overlong not in (None, "drop", "error"):
        raise UsageError(
            f"--overlong: {config.overlong} is not for records of preference: {_WHOLE}",
            "choose drop or error, or a larger --max-length",
        )
    if config.force_split:
        raise UsageError(
            f"--force-split: a pair must stay whole: {_WHOLE}",
            "leave it out, or give a larger --max-length",
        )
    if config.balance != "none":
        raise UsageError(
            "--balance: attention is not for records of preference: exchanges would part pairs",
            "leave it out",
        )
    if config.max_segments_per_row == 1:
        raise UsageError(
            "--max-segments-per-row: a pair has two segments, and 1 is the limit",
            "give 2 or more, or leave it out",
        )
    return config.overlong or "drop"
