"""Every option that changes the bytes of the result, in one frozen object.

Two runs with equal `PackConfig`, tokenizer and inputs write identical files. Options that
do not change bytes (workers, progress, engine) are `RunOptions`.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from packer_cli.errors import UsageError
from packer_cli.strategies import canonical_name, keeps_order

MAX_LENGTH_LIMIT = 1 << 24
COLUMNS = ("input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids")
DEFAULT_COLUMNS = COLUMNS[:5]
REQUIRED_COLUMNS = ("input_ids", "cu_seqlens")
OVERLONG_POLICIES = ("split", "truncate", "drop", "error")
ERROR_POLICIES = ("fail", "skip")
SAMPLE_BY = ("line", "paragraph", "document")
INPUT_FORMATS = ("jsonl", "parquet", "arrow", "text", "csv", "tsv")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option}: {value!r} is not one of {', '.join(allowed)}")


@dataclass(frozen=True)
class PackConfig:
    """Options that change the result's bytes; recorded in the manifest as `config`.

    Raises UsageError from the constructor when a value cannot work.

    max_length        tokens in a row, 1..2**24
    strategy          a name or alias from `strategies.py`
    seed              of the shuffle of rows and of segments in a row, 0..2**63-1
    shuffle           None: on, except for strategies that keep the input order
    overlong          what happens to documents longer than a row
    columns           which columns are written, in the order of the format
    text_field        field or column that holds the text
    input_format      None: by file name
    sample_by         what one document is in a plain text file
    add_eos           append the tokenizer's EOS to every document that lacks it
    eos_token         the EOS, where the tokenizer does not say
    on_error          a bad record ends the run ("fail") or goes to rejected.jsonl ("skip")
    max_line_bytes    longest line, cell, paragraph or text document accepted
    unit_bytes        input bytes in a work unit; None: by the size of the input
    window_tokens     tokens that one plan considers together
    shard_bytes       a unit's shard is continued in a new part beyond this size
    """

    max_length: int
    strategy: str = "best-fit"
    seed: int = 0
    shuffle: bool | None = None
    overlong: str = "split"
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    text_field: str = "text"
    input_format: str | None = None
    sample_by: str = "line"
    add_eos: bool = True
    eos_token: str | None = None
    on_error: str = "fail"
    max_line_bytes: int = 256 * MIB
    unit_bytes: int | None = None
    window_tokens: int | None = None
    shard_bytes: int = GIB

    def __post_init__(self) -> None:
        if not 1 <= self.max_length <= MAX_LENGTH_LIMIT:
            raise UsageError(
                f"--max-length: {self.max_length} is not between 1 and {MAX_LENGTH_LIMIT}",
                "use the context length of the model that will train, for example 4096",
            )
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed: {self.seed} is not between 0 and 2**63 - 1")
        _one_of("--overlong", self.overlong, OVERLONG_POLICIES)
        _one_of("--on-error", self.on_error, ERROR_POLICIES)
        _one_of("--sample-by", self.sample_by, SAMPLE_BY)
        if self.input_format is not None:
            _one_of("--input-format", self.input_format, INPUT_FORMATS)
        for name in self.columns:
            _one_of("--columns", name, COLUMNS)
        missing = [name for name in REQUIRED_COLUMNS if name not in self.columns]
        if missing:
            raise UsageError(
                f"--columns: {', '.join(missing)} missing",
                "rows are not readable without input_ids and cu_seqlens; add them",
            )
        for option in ("max_line_bytes", "shard_bytes", "unit_bytes", "window_tokens"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"--{option.replace('_', '-')}: {value} is not positive")
        strategy = canonical_name(self.strategy)
        if strategy == "wrap" and self.overlong != "split":
            raise UsageError(
                f"--overlong: {self.overlong} has no meaning with --strategy wrap",
                "wrap cuts documents at the edges of rows, whatever their length",
            )
        if self.shuffle and keeps_order(strategy):
            raise UsageError(
                f"--shuffle: would undo what --strategy {strategy} is for, rows in input order",
                "leave it out, or choose another strategy; most trainers shuffle rows themselves",
            )
        normal: dict[str, object] = {
            "strategy": strategy,
            "columns": tuple(name for name in COLUMNS if name in self.columns),
        }
        if self.shuffle is None:
            normal["shuffle"] = not keeps_order(strategy)
        if self.window_tokens is None:
            # A thousand rows leave best fit next to nothing to improve; four million tokens
            # keep the cost of a window's start and of its carried rows out of sight.
            normal["window_tokens"] = max(1 << 22, min(64 * self.max_length, 1 << 25))
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"columns": list(self.columns)}


@dataclass(frozen=True)
class RunOptions:
    """Options that change how a run goes, never what it writes.

    workers            work units packed at the same time
    tokenizer_backend  "auto", "gigatoken" or "tokenizers"
    overwrite          replace an earlier result in the output directory
    progress           show progress on stderr
    """

    workers: int = 0
    tokenizer_backend: str = "auto"
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        _one_of("--tokenizer-backend", self.tokenizer_backend, ("auto", "gigatoken", "tokenizers"))
        if self.workers < 0:
            raise UsageError(f"--workers: {self.workers} is negative")
        if self.workers == 0:
            object.__setattr__(self, "workers", len(os.sched_getaffinity(0)))
