"""A manifest as the bytes of its file: written, recognized, read.

It holds nothing that differs between two runs of the same command: no times, no host, no number of
workers.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from packer_cli.errors import DataError
from packer_cli.result.manifest import TOKENIZED, Manifest, Result, TokenizedManifest
from packer_cli.result.shards import FORMAT_VERSION

_ANEW = "pack the data again"


def to_bytes(document: dict[str, Any]) -> bytes:
    """Indented two levels deep: diffs stay readable, a million shards stay one line each.

    Ends with the manifest's own checksum.
    """
    document = document | {"sha256": checksum(document)}
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            items = ",\n  ".join(msgspec.json.encode(item).decode() for item in value)
            text = f"[\n  {items}\n ]"
        else:
            text = msgspec.json.encode(value).decode()
        lines.append(f' "{key}": {text}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def checksum(document: dict[str, Any]) -> str:
    """The sha256 of its keys and values as compact JSON, without the checksum itself."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def looks_like_one(data: bytes) -> bool:
    """Whether this is the content of a manifest of ours, of any version, damaged or not."""
    try:
        content = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"format_version", "packer_version"} <= content.keys()


def parse(data: bytes) -> Manifest | TokenizedManifest:
    """The manifest of a result of any kind. Raises DataError, which does not name the file, for
    what this packer cannot read.
    """
    try:
        document = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}", _ANEW) from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"format version {version!r}, this packer reads {FORMAT_VERSION}",
            f"use the packer that wrote it, or {_ANEW}",
        )
    is_tokenized = document.get("kind") == TOKENIZED
    try:
        return TokenizedManifest.of(document) if is_tokenized else Manifest.of(document)
    except ValueError as error:
        anew = "tokenize the data again" if is_tokenized else _ANEW
        raise DataError(f"damaged: {error}", anew) from error


def parse_unedited(data: bytes) -> Result:
    """The same, and DataError for one that is not as a packer has written it: nobody may remove
    files because such a one names them.
    """
    manifest = parse(data)
    if manifest.sha256 != checksum(manifest.document):
        raise DataError("was edited", _ANEW)
    return manifest
