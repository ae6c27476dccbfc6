"""Inputs of an earlier result that an update does not name: refused, kept or dropped.

Usually the user forgot them, or packs only one night's new files. So no document goes unless
`--prune` says so; `--add` keeps them as they are packed, whether their files still exist or not.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice
from pathlib import Path

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.formats import JSON, format_of
from packer_cli.errors import PackerError, UsageError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.input_files import input_file
from packer_cli.inputs.pairs import is_pair
from packer_cli.records import InputFile
from packer_cli.result.layout import WORK
from packer_cli.result.manifest import Input, Result
from packer_cli.result.shards import digest
from packer_cli.run.directory import work_of
from packer_cli.run.identity import RUN, load_run, may_exist

Unnamed = dict[int, Input]  # by index
_MOST_NAMED = 3


def find_unnamed(manifest: Result, current: Iterable[InputFile]) -> Unnamed:
    named = {file.path for file in current}
    return {index: one for index, one in manifest.inputs_now.items() if one.path not in named}


def find_contents(
    manifest: Result,
    current: Iterable[InputFile],
    config: DocumentConfig,
    same: Container[int],
    *,
    adding: bool,
) -> tuple[dict[int, str], dict[str, str]]:
    """Inputs by new names whose content the result holds, so that no document is there twice.

    (moved, copies): the new names of inputs, by index, that are not named any more; and, if
    `adding`, the files that are left out, with the name of their content in the result. `same`:
    the inputs that are named and have not changed. Only files of a size that the result knows are
    read.
    """
    now = manifest.inputs_now
    names, sizes = {one.path for one in now.values()}, {one.size for one in now.values()}
    new = [file for file in current if file.path not in names and file.path != STDIN]
    new = [file for file in new if file.size in sizes and not is_pair(file)]
    if not new:
        return {}, {}
    unnamed, held = find_unnamed(manifest, current), dict[tuple[object, ...], list[int]]()
    for index, one in now.items():
        if index in unnamed or index in same:
            held.setdefault((one.sha256, *_read_as(one.path, config)), []).append(index)
    moved, copies = dict[int, str](), dict[str, str]()
    for file in new:
        places = held.get((digest(file.path)[1], *_read_as(file.path, config)), [])
        free = [i for i in places if i in unnamed and i not in moved]
        if adding:
            free = [i for i in free if not may_exist(now[i].path)]
        if free:
            base = storage.base_name(file.path)
            index = min(free, key=lambda i: storage.base_name(now[i].path) != base)
            moved[index] = file.path
        elif adding and places:
            copies[file.path] = now[places[0]].path
    return moved, copies


def _read_as(path: str, config: DocumentConfig) -> tuple[str, str | None]:
    """The format, by its name, and the compression of an input: what its bytes mean."""
    name, compression = format_of(path, documents=config.whole_files)
    name = config.input_format or name or JSON
    return "jsonl" if name == JSON else name, compression


def renamed(manifest: Result, moved: dict[int, str]) -> Result:
    """The manifest of the same result, with other names of inputs."""
    inputs = [dict(one) for one in manifest.document["inputs"]]
    removed = {one["path"]: one for one in inputs if one.get("removed")}
    for index, path in moved.items():
        if path in removed:  # no two have the same name
            removed[path]["path"] = inputs[index]["path"]
        inputs[index]["path"] = path
    return manifest.of(manifest.document | {"inputs": inputs})


def moves(moved: dict[str, str]) -> str:
    """How many inputs have other names now, and the first of these."""
    plural = "s have" if len(moved) != 1 else " has"
    shown = [f"{then} is now {now}" for then, now in islice(moved.items(), _MOST_NAMED)]
    return f"{len(moved):,} input{plural} moved: {_named(shown, len(moved))}"


def left_out(copies: dict[str, str]) -> str:
    """The files that are not added, since the result holds their content."""
    shown = [f"{path} (as {held})" for path, held in islice(copies.items(), _MOST_NAMED)]
    return _named(shown, len(copies))


def refuse_loss(directory: Path, unnamed: Unnamed) -> None:
    """Raise a UsageError that names what an update would drop."""
    if unnamed:
        raise UsageError(
            f"{directory}: the update would drop {described(unnamed)}",
            "use --add to keep what is not named as it is packed, or --prune to drop its documents",
        )


def refuse_loss_of_stdin(manifest: Result, current: Iterable[InputFile]) -> None:
    """Raise UsageError if stdin would replace what came from stdin before."""
    earlier = [one.path for one in manifest.inputs_now.values()]
    if STDIN in earlier and any(file.path == STDIN for file in current):
        raise UsageError(
            "-: stdin would replace the documents that came from stdin before",
            "write the data to a file and name that, or use --prune to drop the earlier ones",
        )


def refuse_other_names(unnamed: Unnamed, current: Iterable[InputFile]) -> None:
    """Raise UsageError for an input whose name differs from the result's name for it."""
    if not unnamed:
        return
    names = {storage.identity(file.path): file.path for file in current if file.path != STDIN}
    for path in (one.path for one in unnamed.values()):
        # no file has a null byte in its name, whatever a damaged manifest says
        if path != STDIN and "\0" not in path and storage.identity(path) in names:
            raise UsageError(
                f"{names[storage.identity(path)]}: is {path} in the result, by another name",
                "use the name that the result has, from the same directory",
            )


def refuse_to_forget(directory: Path, files: Iterable[InputFile]) -> None:
    """UsageError for an unfinished run with inputs that are not among `files`: nobody would notice
    that they were never packed.
    """
    work = work_of(directory)
    unfinished = load_run(work / RUN) if work else None
    if unfinished is None:
        return
    there = {file.path for file in files}
    lost = [file.path for file in unfinished.files if file.format and file.path not in there]
    if lost:
        raise UsageError(
            f"{directory}: holds an unfinished run with other inputs: {_named(lost)}",
            "first run its command again, which continues it; to give these inputs up, remove "
            f"{directory / WORK}",
        )


def kept_file(index: int, one: Input, config: DocumentConfig, mtime_ns: int) -> InputFile:
    """An input as it was when packed."""
    compression = format_of(one.path)[1]
    file_format = one.format_then(config.input_format) or "jsonl"
    return InputFile(index, one.path, file_format, compression, one.size, mtime_ns)


def read_again(unnamed: Unnamed, config: DocumentConfig) -> list[InputFile]:
    """Kept inputs that must be packed again. UsageError for those that can no longer be read."""
    files = []
    for index, one in unnamed.items():
        if one.path == STDIN:
            raise _lost(one.path, "came by stdin")
        try:
            files.append(input_file(index, one.path, config))
        except PackerError as error:
            reason = "cannot be read" if may_exist(one.path) else "no longer exists"
            raise _lost(one.path, reason) from error
    return files


def refuse_changed(files: Iterable[InputFile], same: set[int], *, checksum: bool) -> None:
    """Raise UsageError for kept inputs that must be packed again and have changed."""
    tip = "" if checksum else "to compare contents rather than times, --checksum; "
    for file in files:
        if file.index not in same:
            raise _lost(file.path, "has changed", f"{tip}to pack it as it is now, name it; ")


def described(unnamed: Unnamed) -> str:
    """How many documents and inputs, and the first of these with why they are among them."""
    documents = sum(one.documents for one in unnamed.values())
    paths = (one.path for one in unnamed.values())
    shown = [
        f"{path} ({'not named' if may_exist(path) else 'no longer exists'})"
        for path in islice(paths, _MOST_NAMED)
    ]
    plural = "s" * (len(unnamed) != 1)
    return (
        f"{documents:,} document{'s' * (documents != 1)} of {len(unnamed):,} input{plural}: "
        + _named(shown, len(unnamed))
    )


def _lost(path: str, reason: str, tip: str = "") -> UsageError:
    return UsageError(
        f"{path}: is not named, {reason}, and would have to be packed again: its unit holds "
        "another input that has changed, or a lost shard",
        f"{tip}to keep its documents, restore the file, or leave out the changed inputs of that "
        "unit; to drop everything that is not named, use --update --prune",
    )


def _named(shown: list[str], count: int | None = None) -> str:
    rest = (len(shown) if count is None else count) - _MOST_NAMED
    return ", ".join(shown[:_MOST_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")
