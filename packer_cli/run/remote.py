"""What is at the URL of a result: whose it is, and the marker of an unfinished upload.

    URL/.packer/publishing.json   what is being uploaded: its manifest's sha256, and its files

Only what packer's records list, the marker and manifests, is ever replaced or removed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import msgspec

from packer_cli import storage
from packer_cli.errors import DataError, PackerError, UsageError, named
from packer_cli.ownership import Listed
from packer_cli.result.layout import (
    INCOMPLETE,
    INPUT_TIMES,
    MANIFEST,
    WORK,
    is_named_by_content,
    is_result_file,
)
from packer_cli.result.manifest import Result
from packer_cli.result.manifest_bytes import looks_like_one, parse_unedited
from packer_cli.result.shards import digest
from packer_cli.run import replacing
from packer_cli.run.directory import finished
from packer_cli.run.transfer import on_threads
from packer_cli.threads import built

MARKER = f"{WORK}/publishing.json"
_MARKER_BEGINS = b'{"manifest_sha256":"'
_FETCHED_BYTES = 4 << 20


@built
class Marker(msgspec.Struct, frozen=True):
    """`manifest_sha256` "": nothing is uploaded yet. (size, sha256 or "") by name: `files` of the
    new result, and what of `earlier` ones lay there before, which goes once it is complete.
    """

    manifest_sha256: str
    files: dict[str, tuple[int, str]] = {}
    earlier: dict[str, tuple[int, str]] = {}


class Remote(NamedTuple):
    """What is at the URL. `manifest`: of a finished result, and the `files` that it lists;
    `problem`: why it cannot be used.
    """

    sizes: dict[str, int | None]
    manifest: Result | None
    files: dict[str, Listed]
    problem: str
    marker: Marker | None

    @property
    def complete(self) -> bool:
        return self.manifest is not None or bool(self.problem)

    def listed(self, name: str) -> Iterator[Listed]:
        """What packer may have written under a name, according to its records."""
        if name in self.files:
            yield self.files[name]
        for marked in (self.marker.files, self.marker.earlier) if self.marker else ():
            if name in marked:
                yield Listed(*marked[name])


def look(url: str) -> Remote:
    if storage.is_file(url):
        raise UsageError(f"{url}: exists and is not a folder", "choose another --output")
    sizes, manifest, problem = storage.sizes(url), None, ""
    for name in (MANIFEST, INCOMPLETE):
        if sizes.get(name) is not None and manifest is None:
            with storage.open_bytes(storage.join(url, name), _FETCHED_BYTES) as file:
                content = file.read()
            if looks_like_one(content):
                try:
                    manifest = parse_unedited(content)
                except DataError as error:
                    problem = error.message
                break
    files = {} if manifest is None else replacing.listed(manifest)
    return Remote(sizes, manifest, files, problem, marker_at(url) if WORK in sizes else None)


def holds(url: str, remote: Remote, own: tuple[int, str]) -> bool:
    """Whether the manifest at the URL is that of the staged result."""
    return remote.sizes.get(MANIFEST) == own[0] and digest(storage.join(url, MANIFEST)) == own


def refuse_to_replace(url: str, remote: Remote, own: str | None, overwrite: bool) -> None:
    """Raise UsageError for what must not be replaced. `own`: the manifest's digest, if known."""
    if remote.complete:
        if not overwrite:
            raise finished(url)
        if remote.problem:
            raise UsageError(
                f"{storage.join(url, MANIFEST)}: {remote.problem}, so it does not say which files "
                "are packer's",
                "choose another --output, or remove that folder yourself",
            )
    elif remote.marker is not None and remote.marker.manifest_sha256:
        if own not in (None, remote.marker.manifest_sha256) and not overwrite:
            raise UsageError(
                f"{url}: holds an unfinished upload of another result",
                "finish that with its own command, or replace it with --overwrite",
            )
    elif remote.sizes.keys() - {WORK} or (remote.marker is None and not _only_begun(url)):
        raise UsageError(
            f"{url}: is not empty, and not a result of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )


def refuse_in_the_way(url: str, remote: Remote, files: dict[str, Listed]) -> None:
    """Raise UsageError for objects that packer did not make, where the result would be."""
    blocked = [n for n in files if n in remote.sizes and not _is_own(url, n, remote)]
    if MANIFEST in remote.sizes and not remote.complete:
        blocked.append(MANIFEST)
    if blocked:
        raise UsageError(
            f"{url}: holds files that packer did not make, or that have changed: "
            f"{named(sorted(blocked))}",
            "nothing was changed; move them elsewhere, or choose another --output",
        )


def _is_own(url: str, name: str, remote: Remote) -> bool:
    return _own_digest(url, name, remote) is not None


def _own_digest(url: str, name: str, remote: Remote) -> str | None:
    """The sha256 of an object that packer's records list, or "" if it is told by something else;
    None for all others. The names of shards tell their content; others are read.
    """
    size, listed = remote.sizes[name], list(remote.listed(name))
    if size is None:
        return None
    put = remote.marker.files.get(name) if remote.marker is not None else None
    if put is not None and size < put[0] and not storage.is_put_whole(url):
        return ""  # its beginning
    if name == INPUT_TIMES and (remote.complete or listed):  # no digest covers it
        with storage.open_bytes(storage.join(url, name), _FETCHED_BYTES) as file:
            return "" if replacing.is_input_times(file.read()) else None
    digests = {file.sha256 for file in listed if file.size in (None, size)}
    if not digests or is_named_by_content(name):
        return next(iter(digests), None)
    sha256 = digest(storage.join(url, name))[1]
    return sha256 if sha256 in digests else None


def marker_at(url: str) -> Marker | None:
    """None when there is none. UsageError for one that is not packer's."""
    place = storage.join(url, MARKER)
    if not storage.is_file(place):
        return None
    try:
        with storage.open_bytes(place) as file:
            return msgspec.json.decode(file.read(), type=Marker)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UsageError(
            f"{place}: is not packer's", "move it elsewhere, or choose another --output"
        ) from None


def _only_begun(url: str) -> bool:
    """Whether packer's folder, which has no marker, holds nothing, or what a run had written of its
    marker when it was killed (of local files, which are renamed to their names).
    """
    names = storage.sizes(storage.join(url, WORK)).keys()
    if names != {_part_of(MARKER)}:
        return not names
    with storage.open_bytes(storage.join(url, f"{WORK}/{_part_of(MARKER)}")) as file:
        written = file.read(len(_MARKER_BEGINS))
    return _MARKER_BEGINS.startswith(written)


def mark(url: str, marker: Marker) -> None:
    content = msgspec.json.encode(marker)
    write(url, MARKER, [content], len(content))


def write(url: str, name: str, blocks: Iterable[bytes], size: int) -> None:
    part = storage.join(url, f"{WORK}/{_part_of(name)}")
    storage.write(storage.join(url, name), blocks, size, part)


def _part_of(name: str) -> str:
    return f"{storage.base_name(name)}.part"


def _is_part(name: str) -> bool:
    whole = name.removesuffix(".part")
    ours = is_result_file(whole) or whole in (MANIFEST, INCOMPLETE, storage.base_name(MARKER))
    return name != whole and ours


def unmark(url: str, remote: Remote) -> None:
    """Remove what an earlier result left, then the marker that lists it."""
    if remote.marker is not None:
        sizes = storage.sizes(url)
        gone = [
            name
            for name, (size, _) in remote.marker.earlier.items()
            if name not in remote.marker.files and sizes.get(name) == size
        ]
        tasks = (partial(storage.remove, storage.join(url, name)) for name in sorted(gone))
        on_threads(tasks, threading.Event())
    for name in storage.sizes(storage.join(url, WORK)):
        if _is_part(name):  # of local files, when a run was killed
            storage.remove(storage.join(url, f"{WORK}/{name}"))
    storage.remove(storage.join(url, MARKER))
    storage.remove_folder(storage.join(url, WORK))


def unmark_empty(url: str) -> None:
    with suppress(PackerError):
        if marker_at(url) == Marker(""):
            unmark(url, look(url))


@contextmanager
def reserved(url: str, remote: Remote) -> Iterator[None]:
    """Prove that the URL can be written to before the work, not after."""
    if remote.marker is None:
        mark(url, Marker(""))
    try:
        yield
    except BaseException:
        unmark_empty(url)
        raise


def is_uploaded(name: str, file: Listed, remote: Remote) -> bool:
    return is_named_by_content(name) and remote.sizes.get(name) == file.size


def earlier_files(url: str, remote: Remote) -> dict[str, tuple[int, str]]:
    """The files of an earlier result or upload at the URL, according to packer's records."""
    earlier = {
        name: (size, sha256)
        for name, size in sorted(remote.sizes.items())
        if size is not None
        if (sha256 := _own_digest(url, name, remote)) is not None
    }
    if remote.manifest is not None and remote.manifest.incomplete:
        earlier[INCOMPLETE] = remote.sizes[INCOMPLETE] or 0, ""
    return earlier
