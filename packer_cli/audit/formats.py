"""Sets that others made: what a name stands for, and what its columns mean.

`FORMATS` is the table of what columns mean; the first whose columns are there is taken, or the one
that `--format` names. `open_set` finds the files of a name and the `Table` of their rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli.audit.tables import (
    LONGEST,
    MASKS,
    OF_DOCUMENTS,
    OF_TOKENS,
    Flat,
    Piece,
    Pieces,
    Table,
    arrow_piece,
    jsonl_piece,
    numbered,
    parquet_piece,
    readable,
)
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.indexed_tokens import IndexedReader
from packer_cli.options.documents import DocumentConfig
from packer_cli.records import IGNORED, InputFile, Int64, offsets_of
from packer_cli.result.layout import DATASET_DICT, SQUARED_LENGTHS, Shard
from packer_cli.result.manifest import Manifest, TokenizerInfo, is_result, load_any
from packer_cli.result.opening import View, opened
from packer_cli.result.rules import sound_batches, trained_flags
from packer_cli.result.tokenized import open_tokenized

Shift = Literal["own", "next"]
_EXPECTED = (
    "a folder of datasets, files of Parquet, Arrow or JSON lines with input_ids, .bin with .idx, "
    ".npy, .ds, or a directory of packer"
)
_WHOLE = "copy it again: it was cut short, or its parts are not of one set"


class Format(NamedTuple):
    """What the columns of a format mean.

    columns   that tell the format; with all of them it is this one
    what      says so in a line
    shift     where a token's label is: at the token itself (`own`), for trainers that shift, or
              before it (`next`), for those that do not
    by_eos    its trainer tells documents apart by EOS, whatever else says where they are
    dropped   its trainer never trains the last label of a document
    weaker    rules -> why what they find is no more than a warning here
    """

    columns: tuple[str, ...]
    what: str
    shift: Shift = "own"
    by_eos: bool = False
    dropped: bool = False
    weaker: dict[str, str] = {}  # noqa: RUF012 never changed


FORMATS = {
    "packer": Format(("segments",), "rows of packer pack"),
    "packer-tokenized": Format((), "documents of packer tokenize"),
    "megatron": Format((), "documents of Megatron-LM, which tells them apart by EOS", by_eos=True),
    "datatrove": Format((), "documents of datatrove for nanotron", by_eos=True),
    "olmo": Format((), "tokens of OLMo, which tells documents apart by EOS", by_eos=True),
    "megatron-bridge": Format(
        ("loss_mask", "seq_start_id"),
        "packed rows of Megatron-Bridge; loss_mask is that of the next token",
        shift="next",
        dropped=True,
    ),
    "seq-lens": Format(
        ("seq_lens",), "rows of NeMo Automodel or prime-rl, with shifted labels", shift="next"
    ),
    "trl": Format(
        ("seq_lengths",),
        "packed rows of TRL",
        weaker={
            "cross-document-target": "TRL leaves the first token of a document out of the loss "
            "only with padding_free=True, and older versions not even then"
        },
    ),
    "llamafactory": Format(
        ("labels", "attention_mask", "position_ids"), "rows as LLaMA-Factory and axolotl write them"
    ),
    "columns": Format((), "rows by their columns, for trainers that shift labels themselves"),
    "shifted": Format((), "rows by their columns, whose labels are shifted already", shift="next"),
}


@dataclass(frozen=True)
class Set:
    """A set that is open.

    format      one of FORMATS, by its name, and `meaning`: itself
    told        how it was told
    rows_are    "rows", or "documents" where each row is one
    tokenizer   what the set itself says of its tokenizer; None: nothing
    folder      where a tokenizer of its own may be; None: nowhere
    max_length  that of its rows, where it says so
    """

    name: str
    format: str
    meaning: Format
    told: str
    table: Table
    rows_are: Literal["rows", "documents", "unknown"] = "unknown"
    tokenizer: TokenizerInfo | None = None
    folder: Path | None = None
    max_length: int | None = None

    @property
    def says_what_is_trained(self) -> bool:
        return bool({"labels", *MASKS} & {*self.table.names})


def open_set(name: str, format_: str | None = None, max_length: int | None = None) -> Set:
    """Open a set. Raises UsageError for an unknown format or a name that stands for nothing;
    DataError for what cannot be read.
    """
    if format_ is not None and format_ not in FORMATS:
        raise one_of("--format", format_, FORMATS)
    found = _result(name) or _arrays(name, max_length) or _files(name)
    if format_ not in (None, found.format):
        meaning = FORMATS[str(format_)]
        if lacking := [one for one in meaning.columns if one not in found.table.names]:
            raise DataError(
                f"{name}: has no {', '.join(lacking)}, which {format_} sets have; columns found: "
                f"{', '.join(found.table.names)}",
                "leave --format out, or name another",
            )
        told = f"--format {format_}"
        found = replace(found, format=str(format_), meaning=meaning, told=told)
    if not found.table.rows:
        raise DataError(f"{name}: has no rows, expected {_EXPECTED}", "name another set")
    return found


# --- results of packer


def _result(name: str) -> Set | None:
    """A packed or tokenized directory, or a view, local or at a URL; None for anything else."""
    if not is_result(name):
        return None
    facts = load_any(name)
    folder = None if storage.is_url(name) else Path(name)
    if not isinstance(facts, Manifest):
        table: Table = _documents_of(Path(name))
        form: Any = ("packer-tokenized", "documents", None)
    elif facts.config.view:
        packed = opened(Path(name), facts)
        assert isinstance(packed, View)  # noqa: S101 as its manifest says

        pieces = [
            Piece(packed.place_of(one.file), one.rows, partial(_complete, packed, one))
            for one in facts.shards
        ]
        table = Pieces(pieces, [one for one in facts.config.columns if one in _READ], {})
        form = ("packer", "rows", facts.config.max_length)
    else:
        found = [arrow_piece(storage.join(name, one.file), one.rows) for one in facts.shards]
        table = _joined(found)
        form = ("packer", "rows", facts.config.max_length)
    kind, rows_are, length = form
    meaning = FORMATS[kind]
    if isinstance(facts, Manifest) and facts.config.label_shift == "pre":
        meaning = meaning._replace(shift="next")
    return Set(name, kind, meaning, "its manifest", table, rows_are, facts.tokenizer, folder,
               length)  # fmt: skip


_READ = {*OF_TOKENS, *OF_DOCUMENTS}


def _complete(packed: View, shard: Shard, spans: Int64) -> Iterator[tuple[int, Any]]:
    names = [one for one in packed.facts.config.columns if one in _READ]
    return numbered(batch.select(names) for batch in packed.batches(shard))


def _documents_of(folder: Path) -> Pieces:
    tokenized = open_tokenized(folder)

    def with_labels(batch: Any) -> Any:
        ids = batch.column("input_ids")
        if "trained" not in batch.schema.names:
            return pa.RecordBatch.from_arrays([ids], ["input_ids"])
        labels = np.where(trained_flags(batch), ids.flatten().to_numpy(), np.int32(IGNORED))
        edges = ids.offsets.to_numpy() - ids.offsets[0].as_py()
        labels[edges[:-1]] = IGNORED  # nothing predicts it
        own = pa.ListArray.from_arrays(pa.array(edges), pa.array(labels))
        return pa.RecordBatch.from_arrays([ids, own], ["input_ids", "labels"])

    def batches(number: int, spans: Int64) -> Iterator[tuple[int, Any]]:
        return numbered(with_labels(one) for one, _ in sound_batches(tokenized, number))

    pieces = [
        Piece(
            tokenized.place_of(shard.file),
            shard.rows,
            partial(batches, number),
        )
        for number, shard in enumerate(tokenized.shards)
    ]
    first = next(iter(tokenized.stored(tokenized.shards[0])))
    names = ["input_ids", *["labels"] * ("trained" in first.schema.names)]
    return Pieces(pieces, names, {})


# --- arrays of numpy: OLMo's, which have no header, and those of packer export


def _arrays(name: str, max_length: int | None) -> Set | None:
    """A .npy file, or a folder of them; None for anything else. Raises DataError."""
    if storage.kind(name) == "folder":
        with readable(name):
            names = sorted(one for one, is_folder in storage.listing(name) if not is_folder)
        arrays = [one for one in names if one.endswith(".npy")]
        if "input_ids.npy" in arrays:
            return _exported(name, arrays)
        tokens = [one for one in arrays if "mask" not in one and one != SQUARED_LENGTHS]
        if len(tokens) > 1:
            raise UsageError(
                f"{name}: has {len(tokens)} files of tokens, and one is read at a time",
                f"name one: {storage.join(name, tokens[0])}",
            )
        if not tokens:
            return None
        name = storage.join(name, tokens[0])
    if not name.endswith(".npy"):
        return None
    return _olmo(name, max_length)


def _olmo(path: str, max_length: int | None) -> Set:
    """Tokens without a header, uint16 or uint32, as `NumpyDatasetBase` of olmo_core/data reads
    them; `X.csv.gz` beside them has begin and end of each document, and `*labels_mask*` or
    `*label_mask*` a bool for each token.
    """
    folder, stem = os.path.split(path)
    size, side = storage.stat(path).size, path.removesuffix(".npy") + ".csv.gz"
    ends: Int64 | None = _ends_in(side) if storage.is_file(side) else None
    if ends is not None and (tokens := int(ends[-1])) * 2 != size and tokens * 4 != size:
        raise DataError(f"{path}: {size} bytes, expected {2 * tokens} or {4 * tokens} for the "
                        f"{tokens} tokens of {side}", _WHOLE)  # fmt: skip
    if ends is not None:
        width, told = size // max(int(ends[-1]), 1), f"its documents in {os.path.basename(side)}"
        offsets = np.append(0, ends)
    else:
        if max_length is None:
            raise UsageError(
                f"{path}: neither an array of numpy with a header nor a file with its documents "
                "beside it",
                "give --max-length, the tokens of a window; ids are then taken for uint32",
            )
        width, told = 4, "--max-length, in windows of uint32"
        if size % width:
            raise DataError(f"{path}: {size} bytes, expected a multiple of {width}", _WHOLE)
        offsets = np.append(np.arange(0, size // width, max_length), size // width)
    masks = [stem.replace("token_ids", one) for one in ("labels_mask", "label_mask")]
    there = (storage.is_file(os.path.join(folder, one)) and one != stem for one in masks)
    mask = next((one for one, is_there in zip(masks, there, strict=True) if is_there), None)
    sources = {"input_ids": (path, np.dtype(f"<u{width}"), 0)}
    if mask is not None:
        place = os.path.join(folder, mask)
        if (has := storage.stat(place).size) != int(offsets[-1]):
            raise DataError(f"{place}: {has} bytes, expected {int(offsets[-1])}", _WHOLE)
        sources["loss_mask"] = (place, np.dtype("u1"), 0)
    table = _flat(offsets, sources)
    rows_are: Any = "documents" if ends is not None else "rows"
    return Set(path, "olmo", FORMATS["olmo"], told, table, rows_are, max_length=max_length)


def _ends_in(path: str) -> Int64:
    """int64[documents], where documents end, by a file of begin, end, ... in each line."""
    ends, last = list[int](), 0
    with readable(path), storage.open_bytes(path) as raw, gzip.GzipFile(fileobj=raw) as unpacked:
        for number, line in enumerate(csv.reader(io.TextIOWrapper(unpacked, "utf-8"))):
            begin, end = int(line[0]), int(line[1]) if len(line) > 1 else -1
            if begin != last or not begin <= end < 1 << 48:
                raise ValueError(f"line {number + 1}: {begin} to {end}, expected a begin of {last}")
            ends.append(last := end)
    if not ends:
        raise DataError(f"{path}: lists no documents", _WHOLE)
    return np.array(ends, np.int64)


def _exported(folder: str, files: Sequence[str]) -> Set:
    """What `packer export --to numpy` writes: an array a column, of rows or with NAME_offsets."""
    sources, offsets = {}, dict[str, Int64]()
    for name in [one for one in (*OF_TOKENS, *OF_DOCUMENTS) if f"{one}.npy" in files]:
        path = storage.join(folder, f"{name}.npy")
        with readable(path), storage.open_lines(path) as file:
            major = np.lib.format.read_magic(file)[0]
            read = np.lib.format.read_array_header_1_0 if major == 1 else (
                np.lib.format.read_array_header_2_0)  # fmt: skip
            shape, by_columns, kind = read(file)
            begin = file.tell()
            if any(not 0 <= one <= LONGEST << 32 for one in shape) or (
                0 in shape[1:] or (by_columns and len(shape) > 1)
            ):
                raise ValueError(f"an array of {shape}, expected rows that have tokens, in C order")
        if kind.kind not in "iub" or kind.hasobject:
            continue
        count = int(np.prod(shape, dtype=np.int64))
        if storage.stat(path).size != begin + count * kind.itemsize:
            raise DataError(f"{path}: is not as long as its header says", _WHOLE)
        if len(shape) == 2:
            offsets[name] = np.arange(shape[0] + 1, dtype=np.int64) * shape[1]
        elif f"{name}_offsets.npy" in files:
            with (
                readable(path),
                storage.open_bytes(storage.join(folder, f"{name}_offsets.npy")) as beside,
            ):
                own = np.load(io.BytesIO(beside.read()), allow_pickle=False).astype(np.int64)
            if (
                own.ndim != 1
                or not len(own)
                or own[0]
                or own[-1] != count
                or (np.diff(own) < 0).any()
            ):
                raise DataError(f"{path}: its offsets do not ascend from 0 to {count}", _WHOLE)
            offsets[name] = own
        else:
            continue
        sources[name] = (path, kind, begin)
    rows = {len(one) for one in offsets.values()}
    if "input_ids" not in sources or len(rows) != 1:
        raise DataError(f"{folder}: its arrays have {sorted(rows)} offsets, expected as many for "
                        "each column", _WHOLE)  # fmt: skip
    table = Flat(offsets, sources)
    return Set(folder, "columns", FORMATS["columns"], "arrays of numpy", table)


def _flat(offsets: Int64, sources: dict[str, tuple[str, np.dtype[Any], int]]) -> Flat:
    """Documents end to end; one that is too long to be read whole becomes several rows."""
    begins, sizes = offsets[:-1], np.diff(offsets)
    parts = np.maximum(-(-sizes // LONGEST), 1)
    if int(parts.max(initial=1)) == 1:
        return Flat(dict.fromkeys(sources, offsets), sources)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    edges = np.append(np.repeat(begins, parts) + number * LONGEST, offsets[-1])
    whole = number > 0, number < np.repeat(parts, parts) - 1
    return Flat(dict.fromkeys(sources, edges), sources, whole)


# --- files of records


def _files(name: str) -> Set:
    folder = _split_of(name)
    files = find_inputs([folder], DocumentConfig())
    kinds = sorted({file.format for file in files})
    if len(kinds) > 1:
        raise DataError(f"{name}: has files of {' and '.join(kinds)}, expected one format",
                        "name the files of one")  # fmt: skip
    if files[0].compression:
        raise DataError(f"{files[0].path}: is compressed, expected {_EXPECTED}", "decompress it")
    if kinds[0] in ("megatron", "datatrove"):
        return _indexed(name, files)
    opens: Any = {"arrow": arrow_piece, "parquet": parquet_piece, "jsonl": jsonl_piece}
    if kinds[0] not in opens:
        raise DataError(f"{name}: is {kinds[0]}, expected {_EXPECTED}",
                        "texts are tokenized by packer tokenize")  # fmt: skip
    table = _joined([opens[kinds[0]](file.path) for file in files])
    for kind, one in FORMATS.items():
        if one.columns and kind != "packer" and set(one.columns) <= set(table.names):
            return Set(name, kind, one, f"its columns {', '.join(one.columns)}", table)
    return Set(name, "columns", FORMATS["columns"], "its columns", table)


def _split_of(name: str) -> str:
    """The folder of the only split of a dataset that has splits."""
    place = storage.join(name, DATASET_DICT)
    if not storage.is_file(place):
        return name
    with readable(place):
        content = json.loads(storage.read_bytes(place))
        splits = content.get("splits") if isinstance(content, dict) else None
        if not isinstance(splits, list) or not splits or not all(
            isinstance(one, str) and one and "/" not in one and one != ".." for one in splits
        ):  # fmt: skip
            raise ValueError("does not list splits")
    if len(splits) > 1:
        raise UsageError(f"{name}: has the splits {', '.join(splits)}, and one is read at a time",
                         f"name one: {storage.join(name, splits[0])}")  # fmt: skip
    return storage.join(name, splits[0])


def _joined(found: Sequence[tuple[Piece, list[str], dict[str, str]]]) -> Pieces:
    """Files as one table. Raises DataError where they do not have the same columns."""
    first, names, ignored = found[0]
    for piece, other, _ in found[1:]:
        if set(other) != set(names):
            raise DataError(
                f"{piece.place}: has {', '.join(sorted(other))}, and {first.place} has "
                f"{', '.join(sorted(names))}",
                "name files with the same columns",
            )
    return Pieces([piece for piece, *_ in found], names, ignored)


def _indexed(name: str, files: Sequence[InputFile]) -> Set:
    """Files of tokens with an index, of Megatron-LM or datatrove."""
    if len(files) > 1:
        raise UsageError(f"{name}: has {len(files)} files of tokens, and one is read at a time",
                         f"name one: {files[0].path}")  # fmt: skip
    (file,) = files
    reader = reader_for(file.format)
    assert isinstance(reader, IndexedReader)  # noqa: S101 by its format
    index = reader.index(file)
    sources = {"input_ids": (file.path, index.kind, 0)}
    if index.loss is not None:
        sources["loss_mask"] = (index.loss, np.dtype("u1"), 0)
    table = _flat(offsets_of(np.diff(index.offsets)), sources)
    return Set(name, file.format, FORMATS[file.format], "its index", table, "documents")
