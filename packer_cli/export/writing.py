"""What a format must implement, and writers of files of at most about a gigabyte."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from packer_cli.errors import DataError
from packer_cli.records import Int64
from packer_cli.result.manifest import Result
from packer_cli.result.parts import Parts
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.squared_lengths import squared_lengths

_PART_BYTES = 1 << 30
_MOST_VALUES = (1 << 31) - 1


class Exported(Protocol):
    """What is exported: a `PackedDirectory`, or a `TokenizedDirectory` to writers of documents."""

    path: Path

    @property
    def facts(self) -> Result: ...


class Writer(ABC):
    """One format, written into an empty folder.

    takes       what `write` is given: "batches", the record batches of the shards; "shards", these
                as the manifest describes them, to be read by the writer; "rows",
                `Rows` in their order; "documents", `Rows` of one whole document each, in the
                order of the inputs
    needs       columns that the directory must have
    keeps_mask  whether the format can say which tokens are not trained on
    keeps_pairs  whether it can say which of two answers is the chosen one
    """

    takes: ClassVar[str] = "rows"
    needs: ClassVar[tuple[str, ...]] = ()
    keeps_mask: ClassVar[bool] = True
    keeps_pairs: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, folder: Path, packed: Exported) -> None: ...

    @classmethod
    def squared_lengths(cls, packed: PackedDirectory) -> Int64:
        """int64[rows], what attention costs in each row as it is read; -1: the reader drops it."""
        return squared_lengths(packed)

    @abstractmethod
    def write(self, part: Any) -> None:
        """Append a part. Raises OSError when it cannot be written."""

    @abstractmethod
    def close(self) -> None:
        """Close all files; also called after a failure."""


def parts_of(folder: Path, name: str, schema: Any, start: Callable[..., Any]) -> Parts:
    """Files of about a gigabyte; `name` formats their numbers."""
    return Parts(folder, name.format, schema, _PART_BYTES, start)


def lists(offsets: Int64, values: Any) -> Any:
    """An Arrow list array; `offsets` int64[rows + 1] into `values`.

    Raises DataError for more values than offsets of 32 bits can count.
    """
    if len(values) > _MOST_VALUES:
        raise DataError(
            f"documents of {len(values)} tokens are too long for this format",
            "cut them before they are packed, or choose --to megatron or nanotron",
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype("int32")), pa.array(values))
