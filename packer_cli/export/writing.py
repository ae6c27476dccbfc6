"""What a format must implement, and writers of files of at most about a gigabyte."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from packer_cli.errors import DataError
from packer_cli.export.rows import Rows
from packer_cli.records import Int32, Int64
from packer_cli.result.manifest import Result
from packer_cli.result.manifest_bytes import checksum
from packer_cli.result.parts import Parts
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.saved_dataset import saved_dataset
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


class Files(Writer):
    """A format whose files are written from beginning to end.

    They are not mapped: on a full disk, a map ends the process instead of raising an error.
    """

    def __init__(self, folder: Path, packed: Exported) -> None:
        self._folder, self._stack = folder, ExitStack()

    def _open(self, name: str, mode: str = "wb") -> IO[bytes]:
        return self._stack.enter_context(open(self._folder / name, mode))

    def close(self) -> None:
        self._stack.close()


def parts_of(folder: Path, name: str, schema: Any, start: Any = pa.ipc.new_stream) -> Parts:
    """Files of about a gigabyte; `name` formats their numbers."""
    return Parts(folder, name.format, schema, _PART_BYTES, start)


class SavedDataset(Writer):
    """A directory as `Dataset.save_to_disk` makes it, to be mapped by `load_from_disk`.

    Formats are subclasses that give the columns of some rows.
    """

    subfolder: ClassVar[str] = ""

    def __init__(self, folder: Path, packed: Exported) -> None:
        self.packed = packed
        self._folder = folder / self.subfolder
        self._folder.mkdir(exist_ok=True)
        self._parts: Parts | None = None
        self._identity = f"{checksum(packed.facts.document)}/{type(self).__name__}"

    @abstractmethod
    def columns(self, rows: Rows) -> dict[str, Any]:
        """Arrow arrays of the same length."""

    def write(self, part: Rows) -> None:
        batch = pa.RecordBatch.from_pydict(self.columns(part))
        if self._parts is None:
            self._parts = parts_of(self._folder, "data-{:05d}.arrow", batch.schema)
        self._parts.write(batch)

    def close(self) -> None:
        if self._parts is None:
            return
        self._parts.close()
        for name, content in saved_dataset(self._parts.names, self._identity).items():
            (self._folder / name).write_bytes(content)


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


def ones(count: int) -> Int32:
    """An attention mask of nothing but tokens."""
    return np.ones(count, np.int32)
