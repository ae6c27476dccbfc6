"""`squared_lengths.npy`: of every row, in the order of the shards, the sum of its segments' squared
lengths.

    squared_lengths(packed)      int64[rows]: the file, mapped, or made from the shards

That is what attention costs in a row. Results of packers before 0.2 have no such file, and the
same figures follow from the boundaries in their shards. The file is of numpy's format 1.0:

    128 bytes                    the header
    8 bytes for each row         int64, little-endian
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator

import numpy as np

from packer_cli.errors import DataError, from_os_error
from packer_cli.packing.attention_cost import squared_sums
from packer_cli.records import Int64
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory, segments_of
from packer_cli.result.rules import RowLimits, broken_cu_seqlens
from packer_cli.result.shards import MISSING, Shard

HEADER_BYTES = 128
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][a-zA-Z][0-9]+)', 'fortran_order': (?:True|False), "
    rb"'shape': \(([0-9, ]*)\)", re.DOTALL,
)  # fmt: skip


def squared_lengths(packed: PackedDirectory, *, compared: bool = False) -> Int64:
    """int64[rows]: the sum of squared segment lengths of every row, in the order of the shards.

    Read-only where it is mapped. Raises DataError for a side file that is not the manifest's, for
    shards that cannot be read where there is none, and when another result has taken the place of
    this one: the file has the same name in all of them, so its digest is compared, unless it is
    `compared` already.
    """
    if SQUARED_LENGTHS not in packed.facts.side_files:
        return np.concatenate([*counted(packed, packed.facts.shards)])
    path = packed.local(SQUARED_LENGTHS)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        sums = _array_in(content, path, packed.facts.rows)
        if not compared:
            _check_digest(content, path, packed.facts)
        return sums
    except FileNotFoundError:
        raise packed.replaced() or DataError(f"{path}: {MISSING}", PACK_AGAIN) from None
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except DataError as error:
        raise packed.replaced() or error from None


def parsed(content: bytes, place: str, facts: Manifest) -> Int64:
    """int64[rows] in the content of the side file at `place`. Raises DataError when it is not what
    the manifest says.
    """
    sums = _array_in(content, place, facts.rows)
    _check_digest(content, place, facts)
    return sums


def _array_in(content: bytes | mmap.mmap, place: str | os.PathLike[str], rows: int) -> Int64:
    data = np.frombuffer(content, np.uint8)
    expected = HEADER_BYTES + 8 * rows
    if data.size != expected or data[:HEADER_BYTES].tobytes() != header(rows):
        raise DataError(
            f"{os.fspath(place)}: holds {_described(data[:HEADER_BYTES].tobytes())} in "
            f"{data.size} bytes, expected <i8[{rows}] in {expected}",
            PACK_AGAIN,
        )
    sums: Int64 = data[HEADER_BYTES:].view("<i8")
    return sums


def _check_digest(
    content: bytes | mmap.mmap, place: str | os.PathLike[str], facts: Manifest
) -> None:
    sha256, listed = hashlib.sha256(content).hexdigest(), facts.side_files.get(SQUARED_LENGTHS)
    if sha256 != listed:
        raise DataError(
            f"{os.fspath(place)}: its sha256 is {sha256}, the manifest says {listed}", PACK_AGAIN
        )


def header(rows: int) -> bytes:
    """How a file of so many rows begins: as numpy itself writes it."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({rows},), }}"
    size = HEADER_BYTES - len(_MAGIC) - 2
    return _MAGIC + size.to_bytes(2, "little") + text.ljust(size - 1).encode() + b"\n"


def counted(packed: PackedDirectory, shards: Iterable[Shard]) -> Iterator[Int64]:
    """The same figures from the boundaries in shards, a record batch at a time; of a view without
    its tokenized directories. Raises DataError for a shard that cannot be read.
    """
    limits = RowLimits.of(packed.facts)
    for shard in shards:
        for batch in packed.stored(shard):
            if broken := broken_cu_seqlens(batch, limits):
                raise DataError(
                    f"{packed.place_of(shard.file)}: is damaged: "
                    f"{broken[0].rule}{broken[0].detail}",
                    PACK_AGAIN,
                )
            _, length, offsets = segments_of(batch)
            yield squared_sums(length, offsets)


def _described(begin: bytes) -> str:
    """What a file that begins so holds."""
    found = _HEADER.match(begin)
    if found is None:
        return "no array of numpy's format 1.0"
    kind, shape = (part.decode() for part in found.groups())
    return f"{kind}[{shape.rstrip(',')}]"
