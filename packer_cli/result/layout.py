"""The names of files in a packed directory, against which names in other files are checked.

A shard's name ends in the beginning of its content's digest. So shards of two results never share
a name unless they share every byte, both can lie in one directory, and a manifest put in the place
of another switches from all files of the one to all of the other.
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
# Of a result that missed --max-loss: whole, but nobody must mistake it for a good one.
INCOMPLETE = "manifest.incomplete.json"
PART = ".part"  # ends the name of a file that is being written
WORK = ".packer"  # in the output, while a run writes, and after one that failed
REJECTED = "rejected.jsonl"
UNITS = "units.jsonl"
INPUT_TIMES = "input_times.json"
SQUARED_LENGTHS = "squared_lengths.npy"  # of rows, not of documents
STATE, INFO = "state.json", "dataset_info.json"  # what makes it one that `datasets` loads
DATASET_DICT = "dataset_dict.json"  # beside results that are splits of one dataset
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "chat_template.tool_use.jinja"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE, TOOL_TEMPLATE)
# All but shards and manifests. Only these, and only as a manifest lists them, are ever replaced.
SIDE_FILES = frozenset(
    {STATE, INFO, REJECTED, UNITS, INPUT_TIMES, SQUARED_LENGTHS, *TOKENIZER_FILES}
)

ROWS, DOCUMENTS, INDEX = "shard", "documents", "index"  # what files of Arrow data hold
_UNIT_AND_PART, _DIGEST = "-[0-9]{5,20}-[0-9]{3,20}", "-[0-9a-f]{16}"
# Packers before 0.2 wrote names without the digest.
SHARD_NAME = rf"({ROWS}|{DOCUMENTS}|{INDEX}){_UNIT_AND_PART}({_DIGEST})?\.arrow"
SHARD_PATTERN = rf"^{SHARD_NAME}\Z"
SIDE_FILE_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z"
_SHARD = re.compile(SHARD_PATTERN)
DOCUMENTS_SHARD = re.compile(rf"^{DOCUMENTS}{_UNIT_AND_PART}{_DIGEST}\.arrow\Z")


def unnamed_shard(kind: str, unit: int, part: int) -> str:
    """What a shard is called until it has a digest, and was called before 0.2."""
    return f"{kind}-{unit:05d}-{part:03d}.arrow"


def named_by_digest(unnamed: str, sha256: str) -> str:
    """The name of a shard that was called `unnamed`."""
    return f"{unnamed.removesuffix('.arrow')}-{sha256[:16]}.arrow"


def is_named_by_content(name: str) -> bool:
    """Whether a name is that of a shard, and tells its bytes by their digest."""
    found = _SHARD.match(name)
    return found is not None and found[2] is not None


def kind_of(shard: str) -> str:
    """What a shard of this name holds: ROWS, DOCUMENTS or an INDEX."""
    return shard.partition("-")[0]


def short_name(shard: str) -> str:
    """For people: what tells it from the other shards of its directory."""
    return re.sub(r"(-[0-9a-f]{16})?\.arrow\Z", "", shard)


def is_shard_of(name: str, unit: int, part: int, sha256: str) -> bool:
    """Whether a shard may be called so: by this packer, or by one before 0.2."""
    unnamed = unnamed_shard(kind_of(name), unit, part)
    return name in (named_by_digest(unnamed, sha256), unnamed)


def is_result_file(name: str) -> bool:
    """Whether a packed directory may have a file of this name, its manifests excepted."""
    return name in SIDE_FILES or bool(_SHARD.match(name))
