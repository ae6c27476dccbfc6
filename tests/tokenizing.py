"""Tokenized directories through the command line, and read back with Arrow alone.

tokenize("a.jsonl", out="tokens")      runs `packer tokenize`, gives all that was written
documents_in("tokens")                 [(input, position, tokens, what is trained on), ...]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from support import succeeds

from packer_cli.result.layout import digest

Json = dict[str, Any]
Document = tuple[int, int, list[int], list[int] | None]


def tokenize(*arguments: object, out: str = "tokens", tokenizer: str | None = "bytes") -> Json:
    """The manifest of what `packer tokenize` writes, which is checked."""
    named = [] if tokenizer is None else ["-t", tokenizer]
    succeeds("tokenize", *arguments, *named, "-q", "-o", out)
    return check_tokenized(out)


def batches_in(directory: str, kind: str) -> list[Any]:
    """The record batches of all shards of a kind, in the manifest's order."""
    manifest = json.loads(Path(directory, "manifest.json").read_bytes())
    names = [one["file"] for one in manifest["shards"] if one["file"].startswith(kind)]
    return [
        batch for name in names for batch in pa.ipc.open_stream(Path(directory, name).read_bytes())
    ]


def documents_in(directory: str) -> list[Document]:
    """All documents, in order: (input, position, tokens, [start, stop, ...] or None)."""
    return [
        (row["file"], row["position"], row["input_ids"], row.get("trained"))
        for batch in batches_in(directory, "documents")
        for row in batch.to_pylist()
    ]


def texts_in(directory: str) -> list[str]:
    """Of the bytes tokenizer, in order, without EOS."""
    return [bytes(ids[:-1]).decode() for _, _, ids, _ in documents_in(directory)]


def check_tokenized(directory: str) -> Json:
    """Assert what a tokenized directory promises; gives its manifest."""
    manifest: Json = json.loads(Path(directory, "manifest.json").read_bytes())
    assert manifest["kind"] == "tokenized"
    for shard in manifest["shards"]:
        assert digest(Path(directory, shard["file"])) == (shard["bytes"], shard["sha256"])
    documents = documents_in(directory)
    index = [row for batch in batches_in(directory, "index") for row in batch.to_pylist()]
    assert [len(ids) for _, _, ids, _ in documents] == [one["length"] for one in index]
    counted = [trained_of(ids, trained)[1:].sum() for _, _, ids, trained in documents]
    assert counted == [one["trained_tokens"] for one in index]
    assert len(documents) == manifest["documents"]
    assert sum(one["length"] for one in index) == manifest["tokens"]
    assert sum(counted) == manifest["trained_tokens"]
    assert min(one["length"] for one in index) > 0
    assert sum(one["documents"] for one in manifest["inputs"]) == len(documents)
    assert sum(one["tokens"] for one in manifest["inputs"]) == manifest["tokens"]
    assert not Path(directory, ".packer").exists()
    return manifest


def trained_of(ids: list[int], trained: list[int] | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """1 where a token is trained on. None: everywhere."""
    if trained is None:
        return np.ones(len(ids), bool)
    assert trained == sorted(trained)
    assert len(set(trained)) == len(trained), "stretches that touch are two"
    flags = np.zeros(len(ids), bool)
    for start, stop in zip(trained[::2], trained[1::2], strict=True):
        assert start < stop <= len(ids)
        flags[start:stop] = True
    return flags
