"""The manifest of a result, from its directory or at a URL.

    load(directory) -> Manifest     of packed rows
    load_tokenized(directory)       of tokenized documents
    load_any(directory)             of either

It is written last, so its presence means that the run is complete.
"""

from __future__ import annotations

import os

import msgspec

from packer_cli import storage
from packer_cli.config.mixture import TRAIN, VALIDATION
from packer_cli.errors import DataError, NoSuchDirectoryError, PackerError, from_os_error
from packer_cli.result.layout import INCOMPLETE, MANIFEST, WORK
from packer_cli.result.manifest import TOKENIZED, Manifest, TokenizedManifest
from packer_cli.result.manifest_bytes import looks_like_one, parse

_FETCHED_BYTES = 4 << 20
_WHAT_TO_GIVE = "give the --output of a packer pack or packer tokenize run"


def load(directory: str | os.PathLike[str], *, incomplete_too: bool = False) -> Manifest:
    """The manifest of a packed directory or a view that is finished, or of one at a URL. DataError
    when there is none, or this packer cannot read it.

    `incomplete_too`: also of one that is marked incomplete; its `incomplete` says why.
    """
    manifest = load_any(directory, incomplete_too=incomplete_too)
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


def load_any(
    directory: str | os.PathLike[str], *, incomplete_too: bool = False
) -> Manifest | TokenizedManifest:
    """The manifest of a finished result of any kind. Raises as `load`."""
    name = os.fspath(directory)
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
        with storage.open_bytes(os.fspath(path)) as file:
            return looks_like_one(file.read())
    except (OSError, DataError):
        return False


def holds_documents(path: str) -> bool:
    """Whether this is the manifest of a tokenized directory."""
    try:
        with storage.open_bytes(path) as file:
            content = msgspec.json.decode(file.read())
    except (OSError, DataError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == TOKENIZED


def as_named(path: str) -> str:
    """An input as its user knows it: a tokenized directory rather than its manifest."""
    if storage.base_name(path) == MANIFEST and holds_documents(path):
        return os.path.dirname(path) or "."
    return path
