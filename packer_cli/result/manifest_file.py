"""The manifest of a result: its file's bytes, and the file of a directory or at a URL.

    load(directory) -> Manifest     of packed rows
    load_tokenized(directory)       of tokenized documents
    load_any(directory)             of either
    load_as_is(directory)           also of one that nobody should read rows from

It holds nothing that differs between two runs of the same command: no times, no host, no number of
workers. It is written last, so its presence means that the run is complete. A side of a recipe's
split has its other side beside it, of the same run: halves of two runs may have documents of one in
both.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import msgspec
from msgspec import Struct

from packer_cli import storage
from packer_cli.errors import DataError, NoSuchDirectoryError, PackerError, from_os_error
from packer_cli.options.options import TRAIN, VALIDATION
from packer_cli.result.layout import FORMAT_VERSION, INCOMPLETE, MANIFEST, WORK
from packer_cli.result.manifest import TOKENIZED, Manifest, Result, TokenizedManifest

_FETCHED_BYTES = 4 << 20
_ANEW = "pack the data again"
_WHAT_TO_GIVE = "give the --output of a packer pack or packer tokenize run"
_WAITS, _WAIT_SECONDS = 40, 0.05  # for the other side, while a run puts both in their places


def load(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest of a packed directory or a view that is finished, or of one at a URL. DataError
    when there is none, this packer cannot read it, or it is a side of a split whose other side is
    of another run, or not finished.
    """
    manifest = load_any(directory)
    if not isinstance(manifest, Manifest):
        name = os.fspath(directory)
        raise DataError(
            f"{name}: holds tokenized documents, not packed rows",
            f"pack them: packer pack {name} --max-length 4096",
        )
    return manifest


def load_tokenized(directory: str | os.PathLike[str]) -> TokenizedManifest:
    """The manifest of a tokenized directory that is finished. Raises as `load`."""
    manifest = load_any(directory)
    if not isinstance(manifest, TokenizedManifest):
        raise DataError(
            f"{os.fspath(directory)}: holds packed rows, not tokenized documents",
            "give the --output of a packer tokenize run",
        )
    return manifest


def load_as_is(directory: str | os.PathLike[str]) -> Manifest | TokenizedManifest:
    """The manifest of a result of any kind, also of one that is marked incomplete, and of a side of
    a split whatever the other side is. Raises DataError where there is none, or it is damaged.
    """
    return _load(os.fspath(directory), incomplete_too=True)


def load_any(
    directory: str | os.PathLike[str], *, incomplete_too: bool = False
) -> Manifest | TokenizedManifest:
    """The manifest of a finished result of any kind. Raises as `load`.

    `incomplete_too`: also of one that is marked incomplete; its `incomplete` says why.
    """
    name = os.fspath(directory)
    for _ in range(_WAITS):
        manifest = _load(name, incomplete_too=incomplete_too)
        other = _other_side(name, manifest)
        if other is None or _same_run(manifest, other):
            return manifest
        if not any(storage.kind(storage.join(one, WORK)) for one in (name, other)):
            break
        time.sleep(_WAIT_SECONDS)
    raise DataError(
        f"{name} and {other} are not of one run, so documents of one may be in the other, too",
        "a run that was to replace both was interrupted: run the same packer pack again; or pack "
        "the recipe anew with --overwrite",
    )


def _other_side(name: str, manifest: Result) -> str | None:
    """Where the other side of a split is to be; None for what is no side, or lies by itself."""
    side = manifest.side if isinstance(manifest, Manifest) else None
    named = name.rstrip("/")
    if not storage.is_url(name) and os.path.basename(named) != side:
        named = os.path.abspath(name)
    folder, _, last = named.rpartition("/")
    if side is None or last != side:
        return None
    other = VALIDATION if side == TRAIN else TRAIN
    return f"{folder}/{other}" if folder or named.startswith("/") else other


class _Half(Struct):
    """What there is to know of the other side."""

    config: dict[str, Any]
    run: str = ""


_HALF = msgspec.json.Decoder(_Half)


def _same_run(manifest: Manifest | TokenizedManifest, other: str) -> bool:
    """Whether the side at `other` is of the run of `manifest`, or is not there at all."""
    try:
        paths = [storage.join(other, name) for name in (MANIFEST, INCOMPLETE)]
        path = next((one for one in paths if storage.is_file(one)), None)
        if path is None:
            return not _begun(other)
        with storage.open_bytes(path, _FETCHED_BYTES) as file:
            half = _HALF.decode(file.read())
    except (PackerError, OSError, ValueError, RecursionError):
        return True  # it says itself what is wrong with it
    mixture = half.config.get("mixture")
    is_side = isinstance(mixture, dict) and mixture.get("part") == storage.base_name(other)
    return not is_side or half.run == getattr(manifest, "run", "")


def _load(name: str, *, incomplete_too: bool) -> Manifest | TokenizedManifest:
    path = storage.join(name, MANIFEST)
    if storage.is_file(path):
        return _read(path)
    incomplete = storage.join(name, INCOMPLETE)
    if not storage.is_file(incomplete):
        raise _no_result(name)
    manifest = _read(incomplete)
    if not incomplete_too:
        raise DataError(
            f"{name}: is marked incomplete: {manifest.incomplete}",
            "pack again with --overwrite and another --overlong, --max-length or --max-loss",
        )
    return manifest


def _read(path: str) -> Manifest | TokenizedManifest:
    try:
        with storage.open_bytes(path, _FETCHED_BYTES) as file:
            return parse(file.read())
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except DataError as error:
        raise DataError(f"{path}: {error.message}", error.tip) from error


def _no_result(name: str) -> PackerError:
    if storage.kind(name) != "folder":
        if not storage.is_url(name) and (hidden := _hidden(name)):
            return hidden
        what = "not a directory" if storage.kind(name) else "no such directory"
        return NoSuchDirectoryError(f"{name}: {what}", _WHAT_TO_GIVE)
    if storage.kind(storage.join(name, WORK)) == "folder":
        return DataError(
            f"{name}: has no {MANIFEST}: the run that writes it has not finished",
            "run the same command again: packer pack, or packer tokenize",
        )
    if parts := splits_of(name):
        return DataError(
            f"{name}: holds a result for each side of its split, {TRAIN} and {VALIDATION}",
            f"give one of them: {' or '.join(parts)}",
        )
    return DataError(
        f"{name}: has no {MANIFEST}: not packed by packer",
        _WHAT_TO_GIVE,
    )


def _hidden(path: str) -> PackerError | None:
    """The error for what is in a folder that may not be looked into."""
    try:
        os.stat(path)
    except PermissionError as error:
        return from_os_error(error, path, "read")
    except OSError:
        pass
    return None


def splits_of(directory: str | os.PathLike[str]) -> list[str]:
    """The sides of a split, where a directory holds a result for each; [] for any other."""
    name = os.fspath(directory)
    if _begun(name):
        return []
    parts = [storage.join(name, part) for part in (TRAIN, VALIDATION)]
    return parts if any(map(_begun, parts)) else []


def _begun(name: str) -> bool:
    """Whether a directory holds a result, or the beginning of one."""
    if any(storage.is_file(storage.join(name, one)) for one in (MANIFEST, INCOMPLETE)):
        return True
    return storage.kind(storage.join(name, WORK)) == "folder"


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether this is a manifest of ours, of any version."""
    try:
        with storage.open_regular(os.fspath(path)) as file:
            return looks_like_one(file.read())
    except (OSError, DataError):
        return False


def holds_documents(path: str) -> bool:
    """Whether this is the manifest of a tokenized directory."""
    try:
        with storage.open_regular(path) as file:
            content = msgspec.json.decode(file.read())
    except (OSError, DataError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == TOKENIZED


def as_named(path: str) -> str:
    """An input as its user knows it: a tokenized directory rather than its manifest."""
    if storage.base_name(path) == MANIFEST and holds_documents(path):
        return os.path.dirname(path) or "."
    return path


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
    """`parse`, with a DataError for a manifest that is not as a packer has written it: nobody may
    remove files because such a one names them.
    """
    manifest = parse(data)
    if manifest.sha256 != checksum(manifest.document):
        raise DataError("was edited", _ANEW)
    return manifest
