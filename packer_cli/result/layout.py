"""Files of a result: their names, and descriptions of shards that need not be opened for it. Does
not import Arrow, so `stats` is instant.

A shard's name ends in the beginning of its content's digest. So shards of two results never share
a name unless they share every byte, both can lie in one directory, and a manifest put in the place
of another switches from all files of the one to all of the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from packer_cli import storage
from packer_cli.errors import os_errors

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
# Of a result that missed --max-loss: whole, but not to be taken for a good one.
INCOMPLETE = "manifest.incomplete.json"
PART = ".part"  # ends the name of a file that is being written
WORK = ".packer"  # in the output, while a run writes, and after one that failed
ID = "dd4cbd969ee4cf0b968a8b865edeed7a"  # packer's folder in there: nobody else gives that name
UPLOADING = f"{WORK}/uploading.json"  # at a URL
REJECTED = "rejected.jsonl"
UNITS = "units.jsonl"
SQUARED_LENGTHS = "squared_lengths.npy"  # of rows, not of documents
STATE, INFO = "state.json", "dataset_info.json"  # what makes it one that `datasets` loads
DATASET_DICT = "dataset_dict.json"  # beside results that are splits of one dataset
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "chat_template.tool_use.jinja"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE, TOOL_TEMPLATE)
# All but shards and manifests. Only these, and only as a manifest lists them, are ever replaced.
SIDE_FILES = frozenset({STATE, INFO, REJECTED, UNITS, SQUARED_LENGTHS, *TOKENIZER_FILES})

ROWS, DOCUMENTS, INDEX = "shard", "documents", "index"  # what files of Arrow data hold
_UNIT_AND_PART, _DIGEST = "-[0-9]{5,20}-[0-9]{3,20}", "-[0-9a-f]{16}"
_SHARD_PART = rf"({ROWS}|{DOCUMENTS}|{INDEX}){_UNIT_AND_PART}"
SHARD_NAME = rf"{_SHARD_PART}({_DIGEST})?\.arrow"  # which has no digest as long as it is written
_SHARD_PATTERN = rf"^{_SHARD_PART}{_DIGEST}\.arrow\Z"
SIDE_FILE_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z"

_SIDE_FILE_NAMES = "|".join(map(re.escape, sorted({*SIDE_FILES, MANIFEST, INCOMPLETE})))
ResultFile = Annotated[
    str, Meta(pattern=rf"^({_SHARD_PART}{_DIGEST}\.arrow|{_SIDE_FILE_NAMES})\Z")
]  # the name of a file of a result, a manifest included

MISSING = "is missing"
_HASH_BYTES = 1 << 20
_FETCHED_BYTES = 4 << 20
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Measured = tuple[Count, int | float, int | float, float]  # count, minimum, maximum and sum
AtLeastOne = Annotated[int, Meta(ge=1, le=1 << 53)]
_Kind = TypeVar("_Kind")


def built(kind: type[_Kind]) -> type[_Kind]:
    """Let msgspec gather what it knows of a class, which it does without a lock when it first uses
    a type: two threads that do so at once end the process.
    """
    msgspec.json.Decoder(kind)
    return kind


@built
class Shard(Struct, omit_defaults=True, rename={"values": "carried"}):
    """Description of a finished file in the manifest and the records of units.

    values  of each carried column, without padding; {} for views, whose shards have none
    """

    file: Annotated[str, Meta(pattern=_SHARD_PATTERN, max_length=100)]
    unit: Count
    rows: AtLeastOne
    segments: AtLeastOne
    tokens: AtLeastOne
    trained_tokens: Count
    bytes: AtLeastOne
    sha256: str
    values: dict[str, Measured] = {}

    @classmethod
    def begun(cls, file: str, unit: int) -> Shard:
        """Return a shard that is being written: nothing is counted yet."""
        return cls(file, unit, 0, 0, 0, 0, 0, "")


def add_measured(total: dict[str, Measured], more: Mapping[str, Measured]) -> None:
    """Add measured values of columns to a total. INOUT total."""
    for name, (count, low, high, values) in more.items():
        before = total.get(name, (0, low, high, 0.0))
        total[name] = (
            before[0] + count, min(before[1], low), max(before[2], high), before[3] + values,
        )  # fmt: skip


def unnamed_shard(kind: str, unit: int, part: int) -> str:
    """Return the name of a shard that has no digest yet."""
    return f"{kind}-{unit:05d}-{part:03d}.arrow"


def named_by_digest(unnamed: str, sha256: str) -> str:
    """Return the name of a shard that was called `unnamed`."""
    return f"{unnamed.removesuffix('.arrow')}-{sha256[:16]}.arrow"


def is_named_by_content(name: str) -> bool:
    """True for the name of a shard, which ends in a digest of its content."""
    return bool(re.match(_SHARD_PATTERN, name))


def is_result_file(name: str) -> bool:
    """True if a packed directory may have a file of this name, apart from its manifest."""
    return name in SIDE_FILES or is_named_by_content(name)


def kind_of(shard: str) -> str:
    """Return ROWS, DOCUMENTS or INDEX for the name of a shard."""
    return shard.partition("-")[0]


def short_name(shard: str) -> str:
    """Return the part of a shard's name that is unique in its directory."""
    return re.sub(r"-[0-9a-f]{16}\.arrow\Z", "", shard)


def problem_of(path: Path, shard: Shard) -> str:
    """Describe why a file cannot be the shard, without reading it; "" if it can be."""
    try:
        status = path.stat()
    except OSError:
        return MISSING
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size != shard.bytes:
        return f"has {status.st_size} bytes, the manifest says {shard.bytes}"
    if shard.rows > shard.bytes:  # room for rows is asked for by their number
        return f"cannot hold the {shard.rows} rows that the manifest says in {shard.bytes} bytes"
    return ""


def name_by_content(folder: Path, shard: Shard) -> None:
    """Find a written shard's size and digest, and name its file by these. INOUT shard."""
    written = folder / shard.file
    shard.bytes, shard.sha256 = digest(written)
    shard.file = named_by_digest(shard.file.removesuffix(PART), shard.sha256)
    with os_errors(written, "write"):
        os.rename(written, folder / shard.file)


def difference(path: str | os.PathLike[str], sha256: str, size: int | None = None) -> str:
    """Describe how a file differs from the listed one; "" if it does not. Raises DataError."""
    actual_size, actual = digest(path, size)
    if size not in (None, actual_size):
        return f"has {actual_size} bytes, the manifest says {size}"
    return "" if actual == sha256 else f"its sha256 is {actual}, the manifest says {sha256}"


def digest(path: str | os.PathLike[str], listed: int | None = None) -> tuple[int, str]:
    """Return (size, sha256) of a file, or URL. Raises DataError if it cannot be read.

    `listed`: a file of another size is not read, for it may be sparse, and larger than any disk.
    """
    with os_errors(path):
        status = storage.stat(os.fspath(path)) if listed is not None else None
        if status is not None and status.regular and status.size != listed:
            return status.size, ""
    sha, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_HASH_BYTES))
    with os_errors(path), storage.open_bytes(os.fspath(path), _FETCHED_BYTES) as file:
        while count := file.readinto(buffer):
            sha.update(buffer[:count])
            size += count
    return size, sha.hexdigest()


def saved_dataset(files: Iterable[str], identity: str) -> dict[str, bytes]:
    """Return the files, by name, with which `datasets.load_from_disk` opens a directory of Arrow
    streams.

    files     names of the streams, in their order
    identity  distinguishes the data from all others: `datasets` keeps what it derives from them
              under its fingerprint
    """
    state: dict[str, object] = {
        "_data_files": [{"filename": file} for file in files],
        "_fingerprint": hashlib.sha256(identity.encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"description": "", "features": None}
    return {STATE: json.dumps(state, indent=1).encode(), INFO: json.dumps(info, indent=1).encode()}
