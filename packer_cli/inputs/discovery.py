"""From what the user names to input files. The order depends on the names only.

`@list.txt` stands for what that file names, one input in each line:

    # data of May
    data/a.jsonl
    data/more/*.parquet

Each line is what could stand on the command line, relative to the current directory, but for
spaces around it; blank lines and those that begin with "#" count for nothing.
"""

from __future__ import annotations

import glob
import io
import json
import shlex
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from packer_cli import storage
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.inputs.byte_streams import STDIN, refusals
from packer_cli.inputs.input_files import input_file, is_input_by_name, without_companions
from packer_cli.inputs.lines import BYTE_ORDER_MARK, invalid_utf8, other_encoding
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import COMPRESSIONS, SUFFIXES, format_named
from packer_cli.ownership import ID
from packer_cli.records import InputFile, Notify
from packer_cli.result.layout import DATASET_DICT, INCOMPLETE, MANIFEST, WORK
from packer_cli.result.manifest import TOKENIZED, as_named, holds_documents, is_manifest

_SHOWN = 3  # directories in a tip
_LIST = "@"
_LONGEST = 1 << 16  # bytes of a line: far longer than a path can be


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
        if not name.startswith(_LIST):
            paths += search.files_of(name)
            continue
        for place, one in _listed(name):
            with _placed(place):
                found = search.files_of(one)
            paths += found
            places |= dict.fromkeys(found, place)
    if config.input_format is None or format_named(config.input_format).beside:
        paths = list(without_companions(paths))
    seen: dict[Hashable, str] = {}

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
    files: list[InputFile] = []
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


@contextmanager
def _placed(place: str | None) -> Iterator[None]:
    """Errors say in which line of a list an input is, if it is in one."""
    try:
        yield
    except PackerError as error:
        if place is None:
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
    kind = storage.kind(path)
    if kind != "file":
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
        start = "patterns" if glob.has_magic(name) else "relative paths"
        if glob.has_magic(name):
            # what is below ** is files, too, which tell of their folders
            folders = [] if "**" in name else storage.glob_folders(name)
            with refusals(name):
                matches = storage.glob(name)
            if matches:
                for folder in _tokenized(folders):
                    self._leave_out(folder, TOKENIZED)
                return self._without_results(name, matches)
            if folders:
                raise UsageError(
                    f"{name}: no file matches this pattern, only directories do",
                    _name_them(_tokenized(folders)) or f"name each directory, such as {folders[0]}",
                )
        what = (
            "no file matches this pattern" if glob.has_magic(name) else "no such file or directory"
        )
        where = "" if storage.is_url(name) else f"; {start} start at the current directory"
        raise UsageError(f"{name}: {what}", f"check the spelling{where}")

    def _leave_out(self, folder: str, kind: str) -> None:
        how = "; to pack its tokens, name it" if kind == TOKENIZED else ""
        self.notify(f"{folder}: left out: it holds a result of packer{how}")

    def _without_results(self, pattern: str, matches: list[str]) -> list[str]:
        """The files that are no part of a result of ours, which has JSON lines of its own, too."""
        ours: dict[str, str] = {}
        left = []
        for path in matches:
            folder = path[: len(path) - len(storage.base_name(path))]
            shown = folder.rstrip("/") or folder or "."
            if shown not in ours:
                ours[shown] = _kind_of_result(shown, {name for name, _ in _listing(shown)})
                if ours[shown]:
                    self._leave_out(shown, ours[shown])
            if not ours[shown]:
                left.append(path)
        if not left:
            raise UsageError(
                f"{pattern}: matches only results of packer",
                _name_them([one for one, kind in ours.items() if kind == TOKENIZED])
                or "pack the original data instead",
            )
        return left

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
                what, tip = _RESULTS[kind]
                raise UsageError(f"{folder}: is a result of packer{what}", tip)
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
            if not is_folder and (
                self.config.input_format
                or is_input_by_name(
                    name, names, folder, self.notify, documents=self.config.whole_files
                )
            ):
                yield storage.join(folder, name)
        for name, is_folder in shown:
            if is_folder:
                yield from self._below(storage.join(folder, name), (*above, real))


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


def _listing(folder: str) -> list[tuple[str, bool]]:
    with refusals(folder):
        return storage.listing(folder)


_RESULTS = {
    "finished": (
        "", "name the original data, or a directory that packer tokenize has finished",
    ),
    "begun": (
        f" that is not finished: it has no {MANIFEST}",
        "run the command that writes it again, or name the original data",
    ),
}  # fmt: skip


def _kind_of_result(folder: str, names: set[str]) -> str:
    """TOKENIZED, or a key of _RESULTS, of a folder with these names; "" for no result of packer."""
    if MANIFEST in names and _tokenized([folder]):
        return TOKENIZED
    present = {MANIFEST, INCOMPLETE} & names
    if any(is_manifest(storage.join(folder, name)) for name in present):
        return "finished"
    markers = (f"{WORK}/{ID}", f"{WORK}/publishing.json")
    is_begun = WORK in names and any(storage.kind(storage.join(folder, name)) for name in markers)
    return "begun" if is_begun else ""


def _strings(path: str, key: str, inner: str | None = None) -> list[str]:
    """The list of strings under `key` of a JSON file, each inside an object if `inner`."""
    try:
        with refusals(path), storage.open_bytes(path) as file:
            content = json.loads(file.read().decode())
        values = content.get(key, []) if isinstance(content, dict) else []
        strings = [item if inner is None else item[inner] for item in values]
        if not all(isinstance(item, str) for item in strings):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"not valid JSON: {error}" if isinstance(error, ValueError) else f"damaged: {key}"
        raise DataError(f"{path}: {what}", "save the dataset again, or name its files") from error
    return strings
