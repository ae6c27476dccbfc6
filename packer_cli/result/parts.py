"""Files of record batches: opened when they are needed, ended when they are full, let go of after a
failure. Every writer of shards and of exports writes through these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from packer_cli.errors import PackerError, from_os_error
from packer_cli.result.layout import PART, unnamed_shard
from packer_cli.result.shards import Shard


class Parts:
    """Files in `folder`, a new one as soon as the last has `limit` bytes.

    name    of the file of a number: 0, 1, ...
    start   makes an Arrow or Parquet writer of a file and a schema
    opened  the file of a name, open to be written; None: in `folder`

    Raises OSError where a file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        name: Callable[[int], str],
        schema: Any,
        limit: int,
        start: Callable[..., Any],
        opened: Callable[[str], Any] | None = None,
    ) -> None:
        self._folder, self._name, self._limit, self._start = folder, name, limit, start
        self._opened = opened or (lambda name: pa.OSFile(str(folder / name), "wb"))
        self._open: tuple[Any, Any] | None = None  # the file and its writer
        self.schema = schema
        self.names: list[str] = []

    @property
    def full(self) -> bool:
        """Whether the open file gets no more batches."""
        return self._open is not None and self._open[0].tell() >= self._limit

    def write(self, batch: Any, **how: Any) -> None:
        """Append a record batch. `how`: for the writer."""
        if self.full:
            self.close()
        if self._open is None:
            self.names.append(self._name(len(self.names)))
            sink = self._opened(self.names[-1])
            self._open = sink, self._start(sink, self.schema)
        self._open[1].write_batch(batch, **how)

    def close(self) -> None:
        """End the open file; the next batch begins another."""
        if self._open is not None:
            (sink, writer), self._open = self._open, None
            try:
                writer.close()
            finally:
                sink.close()

    def abandon(self) -> None:
        """Let go of the open file after a failure, which is the one to report."""
        if self._open is not None:
            (sink, _), self._open = self._open, None
            with suppress(OSError):
                sink.close()


class LazyFile:
    """A file that is there once something is written to it. `path`: None until then.

    Raises DataError, which names the file, where it cannot be written.
    """

    def __init__(self, name: Path) -> None:
        self._name = name
        self._file: Any = None
        self.path: Path | None = None

    def write(self, data: Any) -> None:
        """Append bytes, or a buffer of them."""
        try:
            if self._file is None:
                self._file, self.path = open(self._name, "wb"), self._name  # noqa: SIM115
            self._file.write(data)
        except OSError as error:
            raise from_os_error(error, self._name, "write") from error

    def close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            raise from_os_error(error, self._name, "write") from error

    def abandon(self) -> None:
        """Let go of the file after a failure."""
        with suppress(PackerError):  # the failure itself is the one to report
            self.close()


class ShardParts(Parts):
    """The shards of one unit, counted. Sizes, digests and names by these are the caller's to find.

    Raises DataError, which names the shard, where one cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        unit: int,
        kind: str,
        schema: Any,
        limit: int,
        opened: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__(
            folder, lambda part: unnamed_shard(kind, unit, part) + PART, schema, limit,
            pa.ipc.new_stream, opened,
        )  # fmt: skip
        self._unit = unit
        self.shards: list[Shard] = []

    def write_rows(self, batch: Any, segments: int, tokens: int, trained_tokens: int) -> None:
        """Append a record batch with so many segments, tokens and trained tokens in its rows."""
        with self._named():
            self.write(batch)
        if len(self.shards) < len(self.names):
            self.shards.append(Shard.begun(self.names[-1], self._unit))
        shard = self.shards[-1]
        shard.rows += batch.num_rows
        shard.segments += segments
        shard.tokens += tokens
        shard.trained_tokens += trained_tokens

    def close(self) -> None:
        with self._named():
            super().close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise from_os_error(error, self._folder / self.names[-1], "write") from error
