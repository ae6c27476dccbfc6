"""Both engines of a tokenizer, and what packing with either gives."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import tiny_tokenizers as tiny
from support import check_directory, contents, packer

from packer_cli.records import Int64, UInt32
from packer_cli.tokenization.engines import FastEngine, ReferenceEngine

TRIGGER = "¤→¤"


def as_lists(encoded: tuple[UInt32, Int64]) -> list[list[int]]:
    ids, offsets = encoded
    assert ids.dtype == np.uint32
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    return [part.tolist() for part in np.split(ids, offsets[1:-1])] if len(offsets) > 1 else []


LOADED: dict[str, tuple[FastEngine, ReferenceEngine]] = {}


def both_engines(make: Callable[[], tiny.Json]) -> tuple[FastEngine, ReferenceEngine]:
    if make.__name__ not in LOADED:
        content = as_json(make())
        LOADED[make.__name__] = FastEngine(content), ReferenceEngine(content)
    return LOADED[make.__name__]


def as_json(document: tiny.Json) -> bytes:
    return json.dumps(document).encode()


def packed_by(backend: str, name: str) -> dict[str, bytes]:
    command = ["pack", "data.jsonl", "-l", "64", "-t", "tok", "-o", name]
    result = packer(*command, "--tokenizer-backend", backend)
    assert result.exit_code == 0, result.stderr
    check_directory(name)
    return contents(name)
