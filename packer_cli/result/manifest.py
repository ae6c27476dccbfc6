"""manifest.json: what went in, what came out, under which configuration.

Written last, so its presence means that the run is complete. It holds nothing that differs
between two runs of the same command: no times, no host, no number of workers.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import msgspec

from packer_cli import storage
from packer_cli.errors import DataError, NoSuchDirectoryError, from_os_error
from packer_cli.result.layout import INCOMPLETE, MANIFEST, WORK
from packer_cli.result.manifest_check import misfit
from packer_cli.result.shards import FORMAT_VERSION

_FETCHED_BYTES = 4 << 20
TOTALS = (
    "documents", "segments", "tokens", "trained_tokens", "unpacked_rows",
    "truncated_documents", "truncated_tokens", "truncated_trained_tokens",
    "dropped_documents", "dropped_tokens", "dropped_trained_tokens",
    "untrained_documents", "untrained_tokens", "rejected_records", "empty_documents",
    "trained_turns", "turns_without_end", "double_bos_documents", "unshown_tools",
    "special_tokens_in_text",
)  # fmt: skip


def to_bytes(manifest: dict[str, Any]) -> bytes:
    """Indented two levels deep: diffs stay readable, a million shards stay one line each.

    Ends with the manifest's own checksum.
    """
    manifest = manifest | {"sha256": checksum(manifest)}
    lines = []
    for key, value in manifest.items():
        if isinstance(value, list) and value:
            items = ",\n  ".join(msgspec.json.encode(item).decode() for item in value)
            text = f"[\n  {items}\n ]"
        else:
            text = msgspec.json.encode(value).decode()
        lines.append(f' "{key}": {text}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def checksum(manifest: dict[str, Any]) -> str:
    """The sha256 of all it says, but for that: of the keys and values as compact JSON."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether this is a manifest of ours, of any version."""
    try:
        with storage.open_bytes(os.fspath(path)) as file:
            return looks_like_one(file.read())
    except (OSError, DataError):
        return False


def looks_like_one(data: bytes) -> bool:
    """Whether this is the content of a manifest of ours, of any version, damaged or not."""
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(content, dict) and {"format_version", "packer_version"} <= content.keys()


def unusable(data: bytes) -> str:
    """Why nobody may go by what a manifest says; "" when it is as this packer has written it."""
    try:
        manifest = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"not valid JSON: {error}"
    found = manifest.get("format_version") if isinstance(manifest, dict) else None
    if found != FORMAT_VERSION:
        return f"format version {found!r}, this packer reads {FORMAT_VERSION}"
    if problem := misfit(manifest):
        return f"damaged: {problem}"
    return "" if manifest.get("sha256") == checksum(manifest) else "was edited"


def decode(data: bytes) -> dict[str, Any]:
    """A manifest that is not `unusable`."""
    return dict(msgspec.json.decode(data))


def load(directory: str | os.PathLike[str], *, incomplete_too: bool = False) -> dict[str, Any]:
    """The manifest of a finished directory, or of one at a URL. DataError when there is none, or
    it is not usable.

    `incomplete_too`: also of one that is marked incomplete; its "incomplete" says why.
    """
    name = os.fspath(directory)
    path, incomplete = storage.join(name, MANIFEST), storage.join(name, INCOMPLETE)
    if not storage.is_file(path):
        if storage.kind(name) != "folder":
            what = "not a directory" if storage.kind(name) else "no such directory"
            raise NoSuchDirectoryError(f"{name}: {what}", "give the --output of a packer pack run")
        if not storage.is_file(incomplete):
            unfinished = storage.kind(storage.join(name, WORK)) == "folder"
            why = (
                "the run that writes it has not finished" if unfinished else "not packed by packer"
            )
            raise DataError(
                f"{name}: has no {MANIFEST}: {why}",
                "run packer pack again" if unfinished else "give the --output of a packer pack run",
            )
        if not incomplete_too:
            raise DataError(
                f"{name}: is marked incomplete: "
                f"{load(name, incomplete_too=True).get('incomplete')}",
                "pack again with --overwrite and another --overlong, --max-length or --max-loss",
            )
        path = incomplete
    try:
        with storage.open_bytes(path, _FETCHED_BYTES) as file:
            manifest = msgspec.json.decode(file.read())
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}", "pack the data again") from error
    found = manifest.get("format_version") if isinstance(manifest, dict) else None
    if found != FORMAT_VERSION:
        raise DataError(
            f"{path}: format version {found!r}, this packer reads {FORMAT_VERSION}",
            "use the packer that wrote it, or pack the data again",
        )
    if problem := misfit(manifest):
        raise DataError(f"{path}: damaged: {problem}", "pack the data again")
    return dict(manifest)
