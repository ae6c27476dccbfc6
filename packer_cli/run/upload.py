"""Results at a URL: packed in a temporary directory, then uploaded, the manifest last.

    URL/.packer/uploading.json   the names of packer's files, from before the work until its end
    URL/shard-..., side files
    URL/manifest.json            completes the result; then files that only the earlier one has go

Stores replace an object in one step, and shards are named by their content: the rows of an earlier
result are readable until the manifest is another. Only what the earlier manifest or an interrupted
upload lists is replaced or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from packer_cli import storage
from packer_cli.errors import PackerError, ThresholdMissed, UsageError, from_os_error
from packer_cli.options.option import refuse
from packer_cli.options.run_options import RunOptions
from packer_cli.ownership import InUseError, in_the_way
from packer_cli.progress import Progress
from packer_cli.result.layout import MANIFEST, WORK, is_result_file
from packer_cli.result.manifest import Result, looks_like_one
from packer_cli.run import destination as output
from packer_cli.run.additions import refuse_other_result
from packer_cli.run.identity import Run

_MARKER = f"{WORK}/uploading.json"
_AT_ONCE = 8  # files


def check_options(url: str, options: RunOptions) -> None:
    """Raise UsageError for options that do not work with a URL."""
    refuse((
        (not url.partition("://")[2].strip("/"), f"--output: {url}: names no folder",
         "for example s3://bucket/folder"),
        (options.add, f"--add: {url}: a URL, and only local results can be added to",
         "add to a local copy and upload that, or pack everything again with --overwrite"),
        (options.as_rank, f"--rank: {url}: a URL, and ranks only share local directories",
         "give the ranks a directory that all of them see, then upload it, manifest.json last"),
    ))  # fmt: skip
    storage.check_writable(url)


def publish(
    url: str, run: Run, options: RunOptions, pack: Callable[[Path, RunOptions], Result]
) -> Result:
    """Pack `run` into a temporary directory by `pack`, and upload the result; returns its manifest.

    Raises UsageError, before anything is packed, for what must not be replaced; ThresholdMissed for
    a result that is marked incomplete, which is not uploaded.
    """
    output.refuse_inputs_inside(url, run.files)
    there = _look(url)
    if there.result and not options.overwrite:
        refuse_other_result(url, there.result.manifest, run)
        options.notify(f"{url}: up to date")
        if there.own <= {*there.result.files, MANIFEST}:
            there.clean(there.own)  # at most the marker of its own upload
        else:  # interrupted or going on, nobody can tell
            options.notify(
                f"{url}: another upload into it was interrupted, or is going on; --overwrite "
                "removes what it has left there"
            )
        return there.result.manifest
    there.refuse_foreign(output.names_of(run))
    there.mark(())  # which shows that the URL can be written to
    try:
        with TemporaryDirectory(prefix="packer-") as folder:
            place = Path(folder, "result")
            manifest = pack(place, replace(options, before_switch=lambda: None))
            if manifest.incomplete:
                raise ThresholdMissed(
                    f"{url}: {manifest.incomplete}",
                    "nothing is uploaded: pack with another --overlong, --max-length or --max-loss",
                )
            there.upload(place, manifest, options)
    except OSError as error:
        raise from_os_error(error, error.filename or url, "write") from error
    finally:
        if not there.is_marked:  # nothing was uploaded
            with suppress(PackerError):
                there.clean(there.own)
    return manifest


@dataclass
class _Place:
    """A URL, as it was found.

    sizes      bytes of the objects by name, None of what is none
    result     the finished one
    own        names of packer's files
    is_marked  an upload was interrupted, or is going on
    """

    url: str
    sizes: dict[str, int | None]
    result: output.ExistingResult | None
    own: set[str]
    is_marked: bool

    def refuse_foreign(self, names: Iterable[str]) -> None:
        """Raise UsageError for files of others, where files with these names are to be."""
        foreign = self.sizes.keys() - self.own - {WORK}
        if foreign and not (self.result or self.is_marked):
            raise UsageError(
                f"{self.url}: is not empty, and not a result of packer",
                "choose another --output; --overwrite only replaces what packer made",
            )
        if blocked := foreign.intersection(names):
            raise in_the_way(self.url, blocked)

    def mark(self, names: Iterable[str]) -> None:
        content = msgspec.json.encode(sorted({*self.own, *names} - {MANIFEST}))
        storage.write(storage.join(self.url, _MARKER), content)

    def upload(self, folder: Path, manifest: Result, options: RunOptions) -> None:
        """Upload a result, in place of the one that was found."""
        shards = {one.file: one.bytes for one in manifest.shards}
        side = manifest.side_file_bytes
        self.refuse_foreign(new := {*shards, *side, MANIFEST})
        self.mark(new)
        self.is_marked = True
        total = sum(shards.values()) + sum(side.values())
        with Progress(total, show=options.progress, doing="uploading") as progress:
            for files in (shards, side):  # the side files last: an earlier result has such, too
                for begin in range(0, len(files), _AT_ONCE):
                    some = sorted(files)[begin : begin + _AT_ONCE]
                    storage.upload([folder / name for name in some], self.url)
                    progress.read(sum(files[name] for name in some), 0)
        options.before_switch()
        if _content(_look(self.url)) != _content(self):
            raise InUseError(
                f"{self.url}: another run has put its result there meanwhile",
                "run the same command again, which compares with that result",
            )
        storage.write(storage.join(self.url, MANIFEST), (folder / MANIFEST).read_bytes())
        self.clean(new)

    def clean(self, kept: Iterable[str]) -> None:
        """Remove packer's other files than those that are `kept`, and the marker."""
        for name in sorted(self.own.intersection(self.sizes).difference(kept)):
            storage.remove(storage.join(self.url, name))
        storage.remove(storage.join(self.url, _MARKER))
        storage.remove_folder(storage.join(self.url, WORK))


def _content(place: _Place) -> bytes | None:
    return place.result.content if place.result else None


def _look(url: str) -> _Place:
    if storage.is_file(url):
        raise UsageError(f"{url}: exists and is not a folder", "choose another --output")
    place, marker = storage.join(url, MANIFEST), storage.join(url, _MARKER)
    sizes, result, own = storage.sizes(url), None, set[str]()
    if sizes.get(MANIFEST) and looks_like_one(content := storage.read_bytes(place)):
        result = output.relied_on(place, content)
        files = result.files.items()
        own = {name for name, size in files if size == sizes.get(name)}
        own |= {MANIFEST}
    is_marked = WORK in sizes and storage.is_file(marker)
    if is_marked:
        try:
            listed = msgspec.json.decode(storage.read_bytes(marker), type=list[str])
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise UsageError(
                f"{marker}: is not packer's", "move it elsewhere, or choose another --output"
            ) from None
        own.update(filter(is_result_file, listed))
    return _Place(url, sizes, result, own, is_marked)
