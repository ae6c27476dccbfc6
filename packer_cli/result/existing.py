"""The contents of an output, a directory or a URL: the finished result, the files that packer
wrote, and files of others, which are never touched.

    look(place) -> OutputState    costs a stat of each file, and the manifest is read
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, named
from packer_cli.result.layout import (
    ID,
    INCOMPLETE,
    MANIFEST,
    UPLOADING,
    WORK,
    ResultFile,
    is_named_by_content,
    is_result_file,
)
from packer_cli.result.manifest import Result, checksum, is_manifest, parse
from packer_cli.storage import OTHER

MANIFESTS = (MANIFEST, INCOMPLETE)
_MOST_NAMED = 5


@dataclass(frozen=True)
class OutputState:
    """The contents of an output, a directory or a URL.

    sizes     in bytes, by name; storage.OTHER if it is not a file
    owned     sizes of the files that packer wrote: in the result, or in uploads that have begun
    is_begun  a run has a folder there, or an upload has begun
    result    the manifest of the finished result, and its bytes as `content`
    """

    place: Path | str
    sizes: dict[str, int]
    owned: dict[str, int]
    is_begun: bool
    result: Result | None = None
    content: bytes = b""

    def refuse_foreign(self, names: Iterable[str], new: Mapping[str, int] | None = None) -> None:
        """Raise UsageError for an output that is not packer's, and for files that packer did not
        write where files with these names are to be. `new`: shards that may be there already.
        """
        foreign = {name for name, size in self.sizes.items() if size != self.owned.get(name)}
        if foreign - {WORK} and not (self.result or self.is_begun):
            raise UsageError(
                f"{self.place}: is not empty, and not a result of packer",
                "choose another --output; --overwrite only replaces what packer made",
            )
        coming = (new or {}).items()
        shards = {name for name, size in coming
                  if size == self.sizes.get(name) and is_named_by_content(name)}  # fmt: skip
        if blocked := foreign.intersection(names) - shards:
            raise in_the_way(self.place, blocked)

    def journal(self, manifest: Result, content: bytes) -> Journal:
        """Return the files that come and go with a result. Raises UsageError for foreign ones."""
        new = listed(manifest) | {INCOMPLETE if manifest.incomplete else MANIFEST: len(content)}
        self.refuse_foreign(new, new)
        return Journal(new, self.owned, hashlib.sha256(content).hexdigest())


class Journal(msgspec.Struct):
    """Sizes by name of the files of a new result, its manifest last, and of those that it replaces.

    sha256  of the new manifest
    """

    new: dict[ResultFile, int]
    old: dict[ResultFile, int]
    sha256: str


def look(place: Path | str) -> OutputState:
    """Look at an output. Raises UsageError for a manifest that was edited, and if it cannot be read
    OSError or, for URLs, PackerError.
    """
    name, owned = str(place), dict[str, int]()
    sizes, result, content = storage.sizes(name), None, b""
    for manifest in MANIFESTS:
        if result is None and sizes.get(manifest, OTHER) != OTHER:
            path = storage.join(name, manifest)
            content = storage.read_bytes(path)
            if is_manifest(path):
                result = _unedited(path, content)
                owned = listed(result) | {manifest: len(content)}
    if not storage.is_url(name):
        is_begun = find_own(Path(place), WORK) is not None
        return OutputState(place, sizes, owned, is_begun, result, content)
    marker = storage.join(name, UPLOADING)
    is_begun = WORK in sizes and storage.is_file(marker)
    if is_begun:
        try:
            journal = msgspec.json.decode(storage.read_bytes(marker), type=Journal)
        except ValueError:
            raise not_ours(marker, "is not packer's") from None
        names = filter(is_result_file, journal.new | journal.old)
        owned |= {file: sizes[file] for file in names if file in sizes}
    return OutputState(place, sizes, owned, is_begun, result, content)


def _unedited(path: str, content: bytes) -> Result:
    try:
        manifest = parse(content)
        if manifest.sha256 != checksum(manifest.document):
            raise DataError("was edited")
    except DataError as error:
        raise UsageError(
            f"{path}: {error.message}, so it does not say which files are packer's",
            "choose another --output, or remove what lies there yourself",
        ) from error
    return manifest


def listed(manifest: Result) -> dict[str, int]:
    """Return the files that a manifest lists, with their sizes: shards, then side files."""
    files = {shard.file: shard.bytes for shard in manifest.shards} | manifest.side_file_bytes
    return {name: size for name, size in files.items() if is_result_file(name)}


def holds_result(output: Path) -> bool:
    """True if there is a finished result, even one that is marked incomplete."""
    return any(is_manifest(output / name) for name in MANIFESTS)


def find_own(parent: Path, name: str) -> Path | None:
    """Find packer's folder `name/ID`; None without one. Raises UsageError for others there."""
    folder = parent / name
    for path in (folder, folder / ID):
        with suppress(FileNotFoundError):  # also one that another rank removes now
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise not_ours(path, "is not a directory")
    names = storage.sizes(str(folder)).keys()
    if foreign := names - {ID}:
        raise in_the_way(folder, foreign)
    return folder / ID if names else None


def in_the_way(folder: Path | str, names: Iterable[str]) -> UsageError:
    """The error for files that packer did not write where it would write or remove some."""
    return UsageError(
        f"{folder}: holds files that packer did not make, or that have changed: "
        f"{named(sorted(names), _MOST_NAMED)}",
        "nothing was changed; move them elsewhere, or choose another --output",
    )


def not_ours(path: Path | str, why: str) -> UsageError:
    return UsageError(
        f"{path}: {why}, so packer does not write in it",
        "move it elsewhere, or choose another --output",
    )
