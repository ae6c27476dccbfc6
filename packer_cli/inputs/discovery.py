"""From what the user names to input files, in an order that depends on the names only; and whether
one is still what it was when the run began.

`@list.txt` stands for what that file names, one input in each line:

    # data of May
    data/a.jsonl
    data/more/*.parquet

Each line is what could stand on the command line, relative to the current directory, but for
spaces around it; blank lines and those that begin with "#" count for nothing.

Some inputs are several files: one of tokens, and an index and the like beside it. Only the first is
an input; the others are looked at with it: one that changes changes the input.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import shlex
import sys
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from packer_cli import storage
from packer_cli.errors import (
    DamagedInputError,
    DataError,
    InputChangedError,
    PackerError,
    UsageError,
)
from packer_cli.inputs.byte_streams import (
    BYTE_ORDER_MARK,
    STDIN,
    invalid_utf8,
    other_encoding,
    refusals,
)
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import (
    COMPRESSIONS,
    FORMATS,
    JSON,
    SUFFIXES,
    belongs_to,
    companions,
    format_named,
    format_of,
)
from packer_cli.ownership import ID
from packer_cli.records import InputFile, Notify
from packer_cli.result.layout import DATASET_DICT, DOCUMENTS_SHARD, INCOMPLETE, MANIFEST, WORK
from packer_cli.result.manifest import TOKENIZED, as_named, holds_documents, is_manifest

_SHOWN = 3  # directories in a tip
_LIST = "@"
_LONGEST = 1 << 16  # bytes of a line: far longer than a path can be
_TICK_NS = 2_000_000_000  # the coarsest clock of any file system in use: FAT's
_VERSION_BYTES = 7


def find_inputs(
    inputs: list[str], config: DocumentConfig, notify: Notify = lambda message: None
) -> list[InputFile]:
    """The files behind files, directories, globs, "-" and lists, in the order named, sorted within.

    All but "-" may be URLs; "@FILE" is a list of the others. `notify` hears what is left
    out. Raises UsageError for paths that do not exist, unknown formats, and files named twice;
    DataError for what cannot be read.
    """
    paths, places, search = list[str](), dict[str, str](), _Search(config, notify)
    for name in inputs:
        for place, one in _listed(name) if name.startswith(_LIST) else [("", name)]:
            with _placed(place):
                found = search.files_of(one)
            paths += found
            places |= dict.fromkeys(found, place)
    if config.input_format is None or format_named(config.input_format).beside:
        paths = list(_without_companions(paths))
    seen = dict[Hashable, str]()

    def refuse_twice(key: Hashable, path: str) -> None:
        if key in seen:
            raise UsageError(
                f"{as_named(path)}: the same file as {as_named(seen[key])}; it would be packed "
                "twice",
                "name each input once",
            )
        seen[key] = path

    for path in [STDIN] * paths.count(STDIN):  # before any of it is read
        refuse_twice(path, path)
    files = list[InputFile]()
    for index, path in enumerate(paths):
        with _placed(places.get(path)):
            if path != STDIN:
                refuse_twice(storage.identity(path), path)
            file = input_file(index, path, config)
            if file.inode:  # a file that has several names
                refuse_twice((file.device, file.inode), path)
        files.append(file)
    if not files:
        raise UsageError("no input files found", "name at least one file, directory or glob")
    return files


# --- lists


@contextmanager
def _placed(place: str | None) -> Iterator[None]:
    """Errors say in which line of a list an input is, if it is in one."""
    try:
        yield
    except PackerError as error:
        if not place:
            raise
        raise type(error)(f"{place}: {error.message}", error.tip) from error


def _listed(name: str) -> Iterator[tuple[str, str]]:
    """(place, input) of each line of the list `name`, which begins with "@".

    Raises UsageError for what is no input of a list; DataError for what cannot be read.
    """
    path, count = name.removeprefix(_LIST), 0
    if path in ("", STDIN):
        raise UsageError(
            f"{name}: expected a file that lists inputs",
            "write the list to a file, so that the command can be repeated: ... > list.txt; "
            "packer pack @list.txt",
        )
    if (kind := storage.kind(path)) != "file":
        what = "a directory, expected a file that lists inputs" if kind else "no such file"
        raise UsageError(f"{path}: {what}", f"check the spelling; an input named so is ./@{path}")
    with refusals(path), storage.open_bytes(path) as raw, io.BufferedReader(raw) as file:
        if found := other_encoding(file.peek(len(BYTE_ORDER_MARK))):
            raise DataError(f"{path}: begins with {found[0]}", found[1])
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
            place = f"{path}, line {number}"
            one = _decoded(line.removeprefix(BYTE_ORDER_MARK * (number == 1)), place).strip()
            if not one or one.startswith("#"):
                continue
            if one == STDIN or one.startswith(_LIST):
                what = "stdin" if one == STDIN else "a list"
                raise UsageError(
                    f"{place}: {one} is {what}, expected a file, folder, glob or URL",
                    f"name {what} on the command line; a file of that name is ./{one}",
                )
            count += 1
            yield place, one
    if not count:
        raise UsageError(f"{path}: lists no inputs", "name one input in each line")


def _decoded(line: bytes, place: str) -> str:
    if len(line) == _LONGEST or b"\0" in line:
        what = "a NUL byte" if b"\0" in line else f"a line of {_LONGEST} bytes or more"
        raise DataError(
            f"{place}: {what}, expected the name of an input",
            "name one input in each line; data is named without @",
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        what, tip = invalid_utf8(error, line, "line")
        raise DataError(f"{place}: {what}", tip) from error


# --- folders and patterns


@dataclass(frozen=True)
class _Search:
    """The files behind names. `notify` hears what is left out."""

    config: DocumentConfig
    notify: Notify

    def files_of(self, name: str) -> list[str]:
        """The files that one name stands for; UsageError for none."""
        kind = None if name == STDIN else storage.kind(name)
        if name == STDIN or kind == "file":
            return [name]
        if kind == "folder":
            return self._of_folder(name)
        if glob.has_magic(name):
            return self._of_pattern(name)
        where = "" if storage.is_url(name) else "; relative paths start at the current directory"
        raise UsageError(f"{name}: no such file or directory", f"check the spelling{where}")

    def _of_pattern(self, pattern: str) -> list[str]:
        """The files that match and are no part of a result of ours, which has JSON lines, too."""
        # what is below ** is files, too, which tell of their folders
        folders = [] if "**" in pattern else storage.glob_folders(pattern)
        with refusals(pattern):
            matches = storage.glob(pattern)
        tokenized, left, kinds = _tokenized(folders), list[str](), dict[str, str]()
        for folder in tokenized if matches else ():
            self._leave_out(folder, TOKENIZED)
        for path in matches:
            folder = path[: len(path) - len(storage.base_name(path))]
            shown = folder.rstrip("/") or folder or "."
            if shown not in kinds:
                kinds[shown] = _kind_of_result(shown, {name for name, _ in _listing(shown)})
                if kinds[shown]:
                    self._leave_out(shown, kinds[shown])
            if not kinds[shown]:
                left.append(path)
        if left:
            return left
        if matches:
            tokenized = [one for one, kind in kinds.items() if kind == TOKENIZED]
            what, tip = "matches only results of packer", "pack the original data instead"
        elif folders:
            what = "no file matches this pattern, only directories do"
            tip = f"name each directory, such as {folders[0]}"
        else:
            what = "no file matches this pattern"
            tip = "check the spelling; patterns start at the current directory"
        raise UsageError(f"{pattern}: {what}", _name_them(tokenized) or tip)

    def _leave_out(self, folder: str, kind: str) -> None:
        how = "; to pack its tokens, name it" if kind == TOKENIZED else ""
        self.notify(f"{folder}: left out: it holds a result of packer{how}")

    def _of_folder(self, name: str) -> list[str]:
        if files := list(self._below(name)):
            return files
        documents = _Search(replace(self.config, sample_by="document"), lambda message: None)
        if not self.config.whole_files and any(documents._below(name)):
            raise UsageError(
                f"{name}: no data files in this directory, only prose or source code",
                "to pack each file as one document, add --sample-by document; in a recipe, "
                'sample_by = "document" to this source',
            )
        within = (storage.join(name, one) for one, is_folder in _listing(name) if is_folder)
        raise UsageError(
            f"{name}: no input files in this directory",
            _name_them(sorted(_tokenized(within)))
            or f"files are recognized by their endings: {', '.join(SUFFIXES)}, also with "
            f"{', '.join(COMPRESSIONS)}",
        )

    def _below(self, folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
        """The input files of a folder, then those of the folders in it. Results of ours are not
        inputs; the files of a Hugging Face dataset are those that it names.
        """
        content, real = sorted(_listing(folder)), storage.identity(folder)
        names = {name for name, _ in content}
        if kind := _kind_of_result(folder, names):
            if above:
                self._leave_out(folder, kind)
                return
            if kind != TOKENIZED:
                raise UsageError(
                    f"{folder}: is a result of packer{kind}",
                    "name the original data, or a directory that packer tokenize has finished",
                )
            yield storage.join(folder, MANIFEST)
            return
        if real in above:  # a symbolic link to a folder above
            return
        if DATASET_DICT in names:
            splits = _strings(storage.join(folder, DATASET_DICT), "splits")
            first = storage.join(folder, (splits or ["train"])[0])
            raise UsageError(
                f"{folder}: a dataset with several splits: {', '.join(splits)}",
                f"name the one to pack, for example {first}",
            )
        if {"state.json", "dataset_info.json"} <= names:
            yield from _files_of_dataset(folder)
            return
        shown = [one for one in content if not one[0].startswith(".")]
        for name, is_folder in shown:
            if not is_folder and (self.config.input_format or self._is_input(name, names, folder)):
                yield storage.join(folder, name)
        for name, is_folder in shown:
            if is_folder:
                yield from self._below(storage.join(folder, name), (*above, real))

    def _is_input(self, name: str, names: set[str], folder: str) -> bool:
        """True where a file of a folder with these names is an input, as far as the names tell.

        An index without what it belongs to is one, so that somebody is told. A lone file with the
        ending of a pair may be anything, unless there are other pairs.
        """
        file_format, compression = format_of(name, documents=self.config.whole_files)
        if file_format is None:
            main = belongs_to(name)
            kind = format_of(main)[0] if main else None
            return bool(main and kind and main not in names and companions(main, kind)[0] == name)
        beside = companions(name, file_format)
        has_pairs = compression is None and any(map(belongs_to, names))
        if not beside or beside[0] in names or has_pairs:
            return True
        path = storage.join(folder, name)
        self.notify(f"{path}: left out: there is no {beside[0]} beside it")
        return False


def _tokenized(folders: Iterable[str]) -> list[str]:
    """The folders that are tokenized directories."""
    return [one for one in folders if holds_documents(storage.join(one, MANIFEST))]


def _name_them(tokenized: list[str]) -> str:
    """A tip for tokenized directories that were found but not named, or ""."""
    if not tokenized:
        return ""
    shown = " ".join(shlex.quote(one) for one in tokenized[:_SHOWN])
    more = " ..." if len(tokenized) > _SHOWN else ""
    return f"name each tokenized directory: packer pack {shown}{more}"


def _listing(folder: str) -> list[tuple[str, bool]]:
    with refusals(folder):
        return storage.listing(folder)


def _kind_of_result(folder: str, names: set[str]) -> str:
    """TOKENIZED, or words for another result of packer, of a folder with these names; "" for none
    of packer's.
    """
    if MANIFEST in names and _tokenized([folder]):
        return TOKENIZED
    present = {MANIFEST, INCOMPLETE} & names
    if any(is_manifest(storage.join(folder, name)) for name in present):
        return ", not of packer tokenize"
    markers = (f"{WORK}/{ID}", f"{WORK}/publishing.json")
    is_begun = WORK in names and any(storage.kind(storage.join(folder, name)) for name in markers)
    return f" that is not finished: it has no {MANIFEST}" if is_begun else ""


def _files_of_dataset(folder: str) -> Iterator[str]:
    """The files that a Hugging Face dataset names. DataError for files elsewhere."""
    state = storage.join(folder, "state.json")
    for file in _strings(state, "_data_files", "filename"):
        if "/" in file or file in ("", ".", ".."):
            raise DataError(
                f"{state}: names {file!r} as a file of the dataset, expected one in its folder",
                "save the dataset again, or name its files",
            )
        yield storage.join(folder, file)


def _strings(path: str, key: str, inner: str | None = None) -> list[str]:
    """The list of strings under `key` of a JSON file, each inside an object if `inner`."""
    try:
        with refusals(path), storage.open_bytes(path) as file:
            content = json.loads(file.read().decode())
        strings = [item if inner is None else item[inner] for item in content.get(key, [])]
        if not all(isinstance(item, str) for item in strings):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"not valid JSON: {error}" if isinstance(error, ValueError) else f"damaged: {key}"
        raise DataError(f"{path}: {what}", "save the dataset again, or name its files") from error
    return strings


# --- one input


def input_file(index: int, path: str, config: DocumentConfig) -> InputFile:
    """The description of an input. UsageError or DataError when it cannot be read."""
    if path == STDIN:
        if sys.stdin is None:
            raise UsageError("-: stdin is closed", "pipe data to it, or name a file")
        name = config.input_format or JSON
        if not format_named(name).streamed:
            raise UsageError(f"-: {name} cannot be read from stdin", "name the file instead")
        return _of_content(InputFile(index, path, name, None, 0, 0))
    file_format, compression = _format_of(path, config)
    storage.refuse_other_than_utf8("", path)
    file = InputFile(index, path, file_format, compression, 0, 0)
    with refusals(path):
        file, is_regular, latest = _as_it_is(file)
        if not is_regular:
            raise UsageError(
                f"{path}: not a regular file, so it cannot be read twice",
                "pipe it to stdin: COMMAND | packer pack - ...",
            )
        storage.open_bytes(path).close()
    return _of_content(replace(file, racy=bool(file.inode) and latest > time.time_ns() - _TICK_NS))


def _format_of(path: str, config: DocumentConfig) -> tuple[str, str | None]:
    """(format, compression) of an input; a tokenized directory is named by its manifest. UsageError
    where the name does not tell, or the format is not read so.
    """
    name = storage.base_name(path)
    if name == MANIFEST and holds_documents(path):
        return TOKENIZED, None
    if DOCUMENTS_SHARD.match(name):
        folder = path[: -len(name)].rstrip("/") or "."
        raise UsageError(
            f"{path}: is a shard of a tokenized directory, and not to be packed without the others",
            f"name the directory: packer pack {folder}; if that has no {MANIFEST}, tokenize again",
        )
    by_name, compression = format_of(path, documents=config.whole_files)
    file_format = config.input_format or by_name
    if file_format is None and format_of(path, documents=True)[0]:
        raise UsageError(
            f"{path}: may be one document or one in each line",
            "add --sample-by document, or --input-format text",
        )
    if file_format is None:
        raise UsageError(
            f"{path}: cannot tell the format from the name",
            f"give it with --input-format: {', '.join(FORMATS)}",
        )
    if compression and not format_named(file_format).streamed:
        raise UsageError(
            f"{path}: {file_format} files are not read through {compression}", "decompress it first"
        )
    return file_format, compression


def _of_content(file: InputFile) -> InputFile:
    """The file; as JSON lines if it is JSON and holds no array. Raises DataError."""
    if file.format != JSON:
        return file
    from packer_cli.inputs.jsonl import holds_array  # noqa: PLC0415

    try:
        return file if holds_array(file) else replace(file, format="jsonl")
    except DamagedInputError:  # whoever reads its records says so
        return replace(file, format="jsonl")


def _as_it_is(file: InputFile, *, again: bool = False) -> tuple[InputFile, bool, int]:
    """The file as it is now, whether it is regular, and when it, or what belongs to it, last
    changed. Raises OSError, for URLs PackerError; DataError where the index is not there.
    """
    status = storage.stat(file.path, again=again)
    each, version = [status], status.version
    if beside := companions(file.path, file.format):
        if not storage.is_file(beside[0]):
            raise _alone(file.path, beside[0])
        each += [storage.stat(one, again=again) for one in beside if storage.is_file(one)]
        versions = repr([(one.size, one.version) for one in each])
        digest = hashlib.sha256(versions.encode()).digest()
        version = int.from_bytes(digest[:_VERSION_BYTES], "big")
    changed_at = max(one.ctime_ns for one in each)
    now = replace(
        file, size=status.size, mtime_ns=version,
        ctime_ns=changed_at, device=status.device, inode=status.inode,
    )  # fmt: skip
    return now, status.regular, max(changed_at, *(one.version for one in each))


def check_unchanged(file: InputFile) -> bool:
    """True where a file is surely what it was when the run began; False where its contents
    must tell. Raises InputChangedError when it is surely another.
    """
    if file.path == STDIN:
        return True
    with refusals(file.path):
        now, _, _ = _as_it_is(file, again=True)
    if file.has_changed(now):
        raise changed(file, f"{file.size} bytes, now {now.size}")
    return file.looks_like(now)


def changed(file: InputFile, how: str) -> InputChangedError:
    """The error for an input that is not what it was when the run began."""
    return InputChangedError(
        f"{file.path}: changed while it was read ({how})",
        "wait until nothing writes to it, then run again",
    )


def is_pair(file: InputFile) -> bool:
    return bool(file.format and companions(file.path, file.format))


def _without_companions(paths: list[str]) -> Iterator[str]:
    """The paths, and for each index and the like the file that it belongs to, named once.

    Raises DataError where that is not there.
    """
    named = set(paths)
    for path in paths:
        main = belongs_to(path)
        if main is None:
            yield path
        elif main not in named:
            named.add(main)
            if not storage.is_file(main):
                raise _alone(path, main)
            yield main


def _alone(path: str, other: str) -> DataError:
    return DataError(
        f"{path}: expected {storage.base_name(other)} beside it, there is none",
        "copy that there, too: neither means anything without the other",
    )
