"""Find the input files that a user names, in an order that depends on the names only; and check
that a file is still what it was when the run began.

`@list.txt` stands for the inputs that this file lists, one in each line:

    # data of May
    data/a.jsonl
    data/more/*.parquet

A line is what could stand on the command line, relative to the current directory. Spaces around it,
blank lines and lines that begin with "#" do not count.

An input may be two files: tokens, and an index beside them. Only the first is listed as an input.
If either changes, the input has changed.
"""

from __future__ import annotations

import glob
import hashlib
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

import msgspec

from packer_cli import storage
from packer_cli.errors import (
    DamagedInputError,
    DataError,
    InputChangedError,
    PackerError,
    UsageError,
    os_errors,
)
from packer_cli.inputs.byte_streams import (
    BYTE_ORDER_MARK,
    STDIN,
    invalid_utf8,
)
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import (
    COMPRESSIONS,
    FORMATS,
    JSON,
    SUFFIXES,
    belongs_to,
    companion,
    format_named,
    format_of,
)
from packer_cli.records import InputFile, Notify
from packer_cli.result.layout import (
    DATASET_DICT,
    ID,
    INCOMPLETE,
    MANIFEST,
    STATE,
    UPLOADING,
    WORK,
    digest,
)
from packer_cli.result.manifest import TOKENIZED, as_named, holds_documents, is_manifest

_Named = tuple[str, str]  # the line of a list that names an input, or "", and the input
_FROM = "; relative paths and patterns start at the current directory"
_SHOWN = 40  # characters of a line
_LIST = "@"
_LONGEST = 1 << 16  # bytes of a line: far longer than a path can be
_VERSION_BYTES = 7


def find_inputs(
    inputs: list[str], config: DocumentConfig, notify: Notify = lambda message: None
) -> list[InputFile]:
    """Find the files behind files, directories, globs, "-" and lists, in the order named; those of
    one directory or glob are sorted.

    All but "-" may be URLs; "@FILE" is a list of the others. `notify` gets a line for each result
    that is left out. Raises UsageError for paths that do not exist, unknown formats, and files
    named twice; DataError for files that cannot be read.
    """
    search, paths = _Search(config, notify), list[_Named]()
    for name in map(storage.public, inputs):
        for place, listed in _listed(name) if name.startswith(_LIST) else [("", name)]:
            with _placed(place):
                paths += ((place, path) for path in search.files_of(listed))
    if config.input_format is None or format_named(config.input_format).beside:
        paths = list(_without_companions(paths))
    seen = dict[Hashable, str]()

    def refuse_twice(key: Hashable, path: str) -> None:
        if key in seen:
            raise UsageError(
                f"{as_named(path)}: the same file as {as_named(seen[key])}; it would be packed "
                "twice",
                "name each input once; URLs that differ only after ? are one input",
            )
        seen[key] = path

    files = list[InputFile]()
    for place, path in paths:
        with _placed(place):
            refuse_twice(path if path == STDIN else storage.identity(path), path)
            file, status = _described(len(files), path, config)
            if status and status.inode:  # a file may have several names
                refuse_twice((status.device, status.inode), path)
        files.append(file)
    if not files:
        raise UsageError("no input files found", "name at least one file, directory or glob")
    return files


# --- lists


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Within this context, errors name the line of a list that an input is in, if it is in one."""
    try:
        yield
    except PackerError as error:
        if not place:
            raise
        raise type(error)(f"{place}: {error.message}", error.tip) from error


def _listed(name: str) -> Iterator[_Named]:
    """Yield the place and the input of each line of a list. Raises UsageError or DataError."""
    path, count = name.removeprefix(_LIST), 0
    if path in ("", STDIN) or storage.kind(path) != "file":
        raise UsageError(
            f"{name}: no such file, expected one that lists inputs",
            f"check the spelling; an input named so is ./{name}",
        )
    with os_errors(path), storage.open_lines(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
            place = f"{path}, line {number}"
            try:
                path_or_glob = line.removeprefix(BYTE_ORDER_MARK * (number == 1)).decode().strip()
            except UnicodeDecodeError as error:
                reason, tip = invalid_utf8(error, line, "line")
                raise DataError(f"{place}: {reason}", tip) from error
            if not path_or_glob or path_or_glob.startswith("#"):
                continue
            path_or_glob = storage.public(path_or_glob)
            is_other = path_or_glob == STDIN or path_or_glob.startswith(_LIST)
            if is_other or "\0" in path_or_glob or len(line) == _LONGEST:
                raise UsageError(
                    f"{place}: {path_or_glob[:_SHOWN]!r}: expected a file, folder, glob or URL",
                    "name stdin and lists on the command line, and data without @; "
                    "a file that is called so is ./NAME",
                )
            count += 1
            yield place, path_or_glob
    if not count:
        raise UsageError(f"{path}: lists no inputs", "name one input in each line")


# --- folders and patterns


@dataclass(frozen=True)
class _Search:
    """A search for the files behind names. `notify` gets a line for each result left out."""

    config: DocumentConfig
    notify: Notify

    def files_of(self, name: str) -> list[str]:
        """Return the files that one name stands for. Raises UsageError if there are none."""
        kind = "file" if name == STDIN else storage.kind(name)
        if kind == "file":
            return [name]
        if kind is None and glob.has_magic(name):
            return self._of_pattern(name)
        if kind is None:
            raise UsageError(f"{name}: no such file or directory", f"check the spelling{_FROM}")
        if files := list(self._below(name)):
            return files
        raise UsageError(
            f"{name}: no input files in this directory",
            "name each tokenized directory; files are recognized by their endings: "
            f"{', '.join(SUFFIXES)}, also with {', '.join(COMPRESSIONS)}; with --sample-by "
            "document, also prose and source code",
        )

    def _of_pattern(self, pattern: str) -> list[str]:
        """Return the files that match, without those of results of packer, which has JSON lines."""
        with os_errors(pattern):
            matches = storage.glob(pattern)
        folders = {path: _folder_of(path) for path in matches}
        results = set[str]()
        for folder in dict.fromkeys(folders.values()):
            if kind := _kind_of_result(folder, {name for name, _ in _listing(folder)}):
                self._leave_out(folder, kind)
                results.add(folder)
        if paths := [path for path in matches if folders[path] not in results]:
            return paths
        problem = "matches only results of packer" if matches else "no file matches this pattern"
        raise UsageError(
            f"{pattern}: {problem}", f"name directories without a pattern, also tokenized{_FROM}"
        )

    def _leave_out(self, folder: str, kind: str) -> None:
        advice = "; to pack its tokens, name it" if kind == TOKENIZED else ""
        self.notify(f"{folder}: left out: it holds a result of packer{advice}")

    def _below(self, folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield the input files of a folder and of those below, without results."""
        content, real = sorted(_listing(folder)), storage.identity(folder)
        names = {name for name, _ in content}
        if kind := _kind_of_result(folder, names):
            if above:
                self._leave_out(folder, kind)
                return
            if kind != TOKENIZED:
                raise UsageError(
                    f"{folder}: is a result of packer {kind}",
                    "name the original data, or a directory that packer tokenize has finished",
                )
            yield storage.join(folder, MANIFEST)
            return
        if real in above:  # a symbolic link to a folder above
            return
        if DATASET_DICT in names:
            raise UsageError(
                f"{folder}: a dataset with several splits", "name the folder of the one to pack"
            )
        if {STATE, "dataset_info.json"} <= names:
            yield from _shards_of_dataset(folder)
            return
        content = [entry for entry in content if not entry[0].startswith(".")]
        has_pairs = any(map(belongs_to, names))
        for name, is_folder in content:
            if not is_folder and (
                self.config.input_format or self._is_input(folder, name, names, has_pairs)
            ):
                yield storage.join(folder, name)
        for name, is_folder in content:
            if is_folder:
                yield from self._below(storage.join(folder, name), (*above, real))

    def _is_input(self, folder: str, name: str, names: set[str], has_pairs: bool) -> bool:
        """Tell from the `names` in a folder whether one of its files is an input. `has_pairs`: some
        name is that of an index.

        An index without its file is one, so that the user sees an error. A lone file with the
        ending of a pair may be anything, unless there are other pairs.
        """
        file_format, compression = format_of(name, documents=self.config.whole_files)
        if file_format is None:
            main = belongs_to(name)
            return main is not None and main not in names
        beside = companion(name, file_format)
        if not beside or beside in names or (compression is None and has_pairs):
            return True
        path = storage.join(folder, name)
        self.notify(f"{path}: left out: there is no {beside} beside it")
        return False


def _folder_of(path: str) -> str:
    folder = path[: -len(storage.base_name(path))]
    return folder.rstrip("/") or folder or "."


def _listing(folder: str) -> list[tuple[str, bool]]:
    with os_errors(folder):
        return storage.listing(folder)


def _kind_of_result(folder: str, names: set[str]) -> str:
    """Return TOKENIZED, or words for another result of packer; "" if the folder is neither."""
    if MANIFEST in names and holds_documents(storage.join(folder, MANIFEST)):
        return TOKENIZED
    present = {MANIFEST, INCOMPLETE} & names
    if any(is_manifest(storage.join(folder, name)) for name in present):
        return "pack"
    markers = (f"{WORK}/{ID}", UPLOADING)
    is_begun = WORK in names and any(storage.kind(storage.join(folder, name)) for name in markers)
    return "that is not finished" if is_begun else ""


class _DatasetFile(msgspec.Struct):
    filename: Annotated[str, msgspec.Meta(pattern=r"^[^/]+\Z")]


class _SavedState(msgspec.Struct, rename={"shards": "_data_files"}):
    shards: list[_DatasetFile]


def _shards_of_dataset(folder: str) -> Iterator[str]:
    """Return the files that a saved Hugging Face dataset lists in its folder."""
    state = storage.join(folder, STATE)
    try:
        with os_errors(state):
            dataset = msgspec.json.decode(storage.read_bytes(state), type=_SavedState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{state}: does not say what the dataset's files are: {error}"
        raise DataError(problem, "save the dataset again, or name its files") from error
    return (storage.join(folder, file.filename) for file in dataset.shards)


# --- one input


def input_file(index: int, path: str, config: DocumentConfig) -> InputFile:
    """Describe an input. Raises UsageError or DataError if it cannot be read."""
    return _described(index, path, config)[0]


def _described(
    index: int, path: str, config: DocumentConfig
) -> tuple[InputFile, storage.Stat | None]:
    """Describe an input. Return that with the status of the file, None for stdin."""
    if path == STDIN:
        if sys.stdin is None:
            raise UsageError("-: stdin is closed", "pipe data to it, or name a file")
        name = config.input_format or JSON
        if not format_named(name).streamed:
            raise UsageError(f"-: {name} cannot be read from stdin", "name the file instead")
        return _of_content(InputFile(index, path, name, None, 0, 0)), None
    file_format, compression = _format_of(path, config)
    storage.refuse_other_than_utf8("", path)
    file = InputFile(index, path, file_format, compression, 0, 0)
    with os_errors(path):
        file, status = _as_it_is(file)
        if not status.regular:
            raise UsageError(
                f"{path}: not a regular file, so it cannot be read twice",
                "pipe it to stdin: COMMAND | packer pack - ...",
            )
        storage.open_bytes(path).close()
    return _of_content(file), status


def _format_of(path: str, config: DocumentConfig) -> tuple[str, str | None]:
    """Return format and compression of an input; a manifest stands for a tokenized directory."""
    if storage.base_name(path) == MANIFEST and holds_documents(path):
        return TOKENIZED, None
    by_name, compression = format_of(path, documents=config.whole_files)
    file_format = config.input_format or by_name
    if file_format is None:
        raise UsageError(
            f"{path}: cannot tell the format from the name",
            f"give it with --input-format: {', '.join(FORMATS)}; or pack prose and source code "
            "with --sample-by document",
        )
    if compression and not format_named(file_format).streamed:
        raise UsageError(
            f"{path}: {file_format} files are not read through {compression}", "decompress it first"
        )
    return file_format, compression


def _of_content(file: InputFile) -> InputFile:
    """Return the file; as JSON lines if it is JSON that is not an array. Raises DataError."""
    if file.format != JSON:
        return file
    from packer_cli.inputs.jsonl import holds_array  # noqa: PLC0415

    try:
        return file if holds_array(file) else replace(file, format="jsonl")
    except DamagedInputError:  # reading its records raises it again
        return replace(file, format="jsonl")


def _as_it_is(file: InputFile, *, again: bool = False) -> tuple[InputFile, storage.Stat]:
    """Return the file as it is now, and its status. Raises OSError or PackerError."""
    status = storage.stat(file.path, again=again)
    version = status.version
    if beside := companion(file.path, file.format):
        if not storage.is_file(beside):
            raise _alone(file.path, beside)
        each = status, storage.stat(beside, again=again)
        versions = repr([(part.size, part.version) for part in each])
        version = _number_of(hashlib.sha256(versions.encode()).hexdigest())
    elif file.format == TOKENIZED:  # tokenized again, it is the same if its documents are
        version = _version_by_content(file.path, status)
    return replace(file, size=status.size, version=version), status


@lru_cache(maxsize=1024)  # a recipe may have hundreds, which each unit looks at
def _version_by_content(path: str, status: storage.Stat) -> int:
    return _number_of(digest(path)[1])


def _number_of(sha256: str) -> int:
    return int(sha256[: 2 * _VERSION_BYTES], 16)


def check_unchanged(file: InputFile) -> None:
    """Raise InputChangedError for a file that is not what it was when the run began."""
    if file.path == STDIN:
        return
    with os_errors(file.path):
        now, _ = _as_it_is(file, again=True)
    if file.has_changed(now):
        change = (
            "its modification time"
            if file.size == now.size
            else f"{file.size} bytes, now {now.size}"
        )
        raise InputChangedError(
            f"{file.path}: changed while it was read ({change})",
            "wait until nothing writes to it, then run again",
        )


def _without_companions(paths: list[_Named]) -> Iterator[_Named]:
    """Yield the inputs; in place of an index the file that it belongs to, once."""
    named = {path for _, path in paths}
    for place, path in paths:
        main = belongs_to(path)
        if main is None or main not in named:
            if main and not storage.is_file(main):
                raise _alone(path, main)
            named.add(main or path)
            yield place, main or path


def _alone(path: str, other: str) -> DataError:
    return DataError(
        f"{path}: expected {storage.base_name(other)} beside it, there is none",
        "copy that there, too: one cannot be read without the other",
    )
