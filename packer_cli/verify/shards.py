"""Every shard of a result read once: its digest, the rules of its rows, its figures.

Shards are hashed while their rows are checked, units on threads.
"""

from __future__ import annotations

import threading
from typing import IO, Any

import msgspec
import numpy as np
import pyarrow as pa

from packer_cli.config.options import PackConfig
from packer_cli.errors import Interrupted, PackerError
from packer_cli.progress import Progress
from packer_cli.records import Int64
from packer_cli.result.counts import Counts
from packer_cli.result.documents import Documents, documents_of, segments_in
from packer_cli.result.layout import MANIFEST, TOKENIZER
from packer_cli.result.reader import PackedDirectory, first_line, metadata_of
from packer_cli.result.recount import count_documents, count_rows, differences
from packer_cli.result.rules import Broken, RowLimits, broken_rules, broken_sources
from packer_cli.result.shard_writer import schema
from packer_cli.result.shards import Shard
from packer_cli.result.view_writer import view_schema
from packer_cli.tokenization.engines import BytesEngine
from packer_cli.tokenization.locate import highest_id
from packer_cli.verify.findings import Findings
from packer_cli.verify.reading import (
    Hashed,
    Stored,
    content_of,
    digest_of,
    is_file,
    open_shard,
    path_of,
)
from packer_cli.verify.squared_lengths import SumChecks

_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_CHUNK_TOKENS = 1 << 16  # that the rules look at together: they stay in the cache


class ShardChecks:
    """Checks units, and adds up what is in them."""

    def __init__(
        self,
        packed: PackedDirectory,
        config: PackConfig,
        findings: Findings,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        facts, tokenizer = packed.facts, packed.facts.tokenizer
        self._packed = packed
        self._config = config
        self._findings = findings
        self._progress = progress
        self._stop = stop
        sha256 = tokenizer.sha256 if tokenizer else ""
        self._schema = (
            view_schema(config, sha256)
            if config.view
            else schema(config, facts.pad_token_id, sha256)
        )
        self._limits = RowLimits.of(facts, highest_of(packed, findings))
        self._files = {
            unit.unit: np.unique([part[0] for part in unit.slices]).astype(np.int64)
            for unit in facts.units
        }
        self._sums = SumChecks(packed, findings)
        self._counts = Counts()
        self._complete = True  # whether every row was counted

    def check_unit(self, shards: list[Shard]) -> None:
        """The shards of one unit, and its documents, whose pieces lie in any of them."""
        counts = Counts()
        of_shards = [self._check_shard(shard, counts) for shard in shards]
        parts = [part for parts in of_shards if parts for part in parts]
        if None not in of_shards and parts:
            documents = documents_of(np.concatenate(parts, axis=1))
            count_documents(documents, counts, self._packed.max_length)
            _count_inputs(documents, counts)
            where = shards[0].file if len(shards) == 1 else f"unit {shards[0].unit}"
            self._findings.add(where, *self._gaps(documents))
        with self._findings.lock:
            self._counts.add(counts)

    def _check_shard(self, shard: Shard, counts: Counts) -> list[Int64] | None:
        """The segments of each batch, see `result.documents`; None if not sound."""
        path, name = path_of(self._packed, shard.file), shard.file
        rules: dict[str, Broken] = {}
        texts: list[str] = []
        parts: list[Int64] = []
        mine = Counts()
        try:
            with open_shard(self._packed, shard) as file:
                self._check_bytes(file, shard, rules, mine, parts, texts)
        except Interrupted:
            raise
        except PackerError as error:
            texts.append(error.message.removeprefix(f"{path}: "))
        except OSError as error:
            texts.append(f"cannot be read: {error.strerror or error}")
        texts += [str(broken) for broken in rules.values()]
        figures = ["rows", "segments", "tokens"]
        figures += ["trained_tokens"] if "labels" in self._config.columns else []
        if not texts:
            texts += [
                f"holds {value} {figure}, the manifest says {listed}"
                for figure in figures
                if (value := getattr(mine, figure)) != (listed := getattr(shard, figure))
            ]
        self._findings.add(name, *texts)
        with self._findings.lock:
            self._complete = self._complete and not texts
            self._findings.shards += 1
            self._findings.bytes += shard.bytes
            self._findings.rows += mine.rows
            self._findings.tokens += mine.tokens
        counts.add(mine)
        return None if texts else parts

    def _check_bytes(
        self,
        file: IO[bytes],
        shard: Shard,
        rules: dict[str, Broken],
        counts: Counts,
        parts: list[Int64],
        texts: list[str],
    ) -> None:
        """Read an open shard once: its schema, its batches and its digest."""
        hashed = Hashed(file, shard.bytes, self._stop)
        try:
            for stored in self._packed.stored_batches(pa.PythonFile(hashed, mode="r")):
                if not counts.rows:
                    texts += schema_differences(stored.schema, self._schema)
                first_row = counts.rows
                counts.rows += stored.num_rows
                if stored.schema.names != self._schema.names:
                    self._complete = False
                    break
                for batch in self._packed.filled(stored, first_row):
                    self._check_batch(batch, first_row, shard, rules, counts, parts)
                    first_row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            texts.append(f"not a readable shard: {first_line(error)}")
        if (digest := hashed.digest()) != shard.sha256:
            texts.append(f"its sha256 is {digest}, the manifest says {shard.sha256}")
        if hashed.end != _STREAM_END:
            texts.append("does not end with the end marker of an Arrow stream")

    def _check_batch(
        self,
        batch: Any,
        first_row: int,
        shard: Shard,
        rules: dict[str, Broken],
        counts: Counts,
        parts: list[Int64],
    ) -> None:
        config = self._config
        step = max(1, _CHUNK_TOKENS // config.max_length)
        broken = [
            one._replace(row=begin + one.row)
            for begin in range(0, batch.num_rows, step)
            for one in broken_rules(batch.slice(begin, step), self._limits)
        ]
        if not broken and "segments" in config.columns:
            broken = broken_sources(batch, self._files.get(shard.unit, np.empty(0, np.int64)))
            parts.append(segments_in(batch))
        tokens = 0
        if not broken:
            more = count_rows(batch, config.max_length)
            more.rows, tokens = 0, more.tokens  # rows count, sound or not
            counts.add(more)
            self._sums.compare(batch, shard, first_row)
        for one in broken:
            before = rules.get(one.rule)
            at = one._replace(row=first_row + one.row)
            rules[one.rule] = before._replace(rows=before.rows + one.rows) if before else at
        self._progress.read(batch.nbytes, 0)
        self._progress.wrote(tokens, batch.num_rows * config.max_length)

    def _gaps(self, documents: Documents) -> list[str]:
        """Documents whose pieces do not follow each other from their first token on."""
        file, position, start, _ = documents.segments
        expected = documents.expected_starts(whole=self._config.truncate_side != "left")
        wrong = start != expected
        if not wrong.any():
            return []
        at = int(np.argmax(wrong))
        source = self._packed.facts.inputs[file[at]].path
        return [
            f"the document at position {position[at]} of {source} has a piece from token "
            f"{start[at]}, expected from {expected[at]} ({np.count_nonzero(wrong)} pieces)"
        ]

    def check_totals(self) -> None:
        """Check the manifest's figures, if every shard could be counted."""
        self._sums.report()
        if not self._complete:
            return
        wrong = differences(self._counts, self._packed)
        if "segments" in self._config.columns:
            for index, one in enumerate(self._packed.facts.inputs):
                counted = self._counts.file(index)
                wrong += [
                    f"{name} of the input {one.path}: {value} in the shards, "
                    f"{listed} in the manifest"
                    for name in ("documents", "tokens")
                    if (value := getattr(counted, name)) != (listed := getattr(one, name))
                ]
        self._findings.add(MANIFEST, *wrong)


def schema_differences(written: Any, expected: Any) -> list[str]:
    """How the Arrow schema of a shard and the one that packer writes differ."""
    theirs, ours = metadata_of(written), metadata_of(expected)
    texts = [
        f"its metadata has {key} {theirs.get(key)!r}, the manifest says {ours.get(key)!r}"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    ]
    if not written.equals(expected):
        names = ", ".join(expected.names)
        texts.append(
            f"has the columns {', '.join(written.names)}, not {names}"
            if written.names != expected.names
            else "has a column that may be null"
        )
    elif not texts and written.metadata != expected.metadata:
        texts.append("its metadata is not written as packer writes it")
    return texts


def _count_inputs(documents: Documents, counts: Counts) -> None:
    """Add the documents and tokens of each input."""
    files, first = np.unique(documents.segments[0][documents.first[:-1]], return_index=True)
    tokens = np.add.reduceat(documents.tokens, first)
    some = np.diff(first, append=len(documents.first) - 1)
    for index, number, length in zip(files.tolist(), some.tolist(), tokens.tolist(), strict=True):
        of_file = counts.file(index)
        of_file.documents += number
        of_file.tokens += length


def highest_of(packed: Stored, findings: Findings) -> int | None:
    """The highest id that the tokenizer gives; None when that is not known."""
    tokenizer = packed.facts.tokenizer
    if tokenizer is None:
        return None
    if not tokenizer.sha256:
        return BytesEngine.VOCAB_SIZE - 1
    try:
        if not is_file(packed, TOKENIZER) or digest_of(packed, TOKENIZER)[1] != tokenizer.sha256:
            return None  # reported already
        return highest_id(content_of(packed, TOKENIZER))
    except (PackerError, OSError):
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        findings.add(TOKENIZER, f"is not a tokenizer: {error}")
        return None
