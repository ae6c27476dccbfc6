"""From what the user names to input files. The order depends on the names only."""

from __future__ import annotations

import glob
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.formats import COMPRESSIONS, SUFFIXES, format_named
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.input_files import input_file
from packer_cli.inputs.lists import inputs_listed, is_list, placed
from packer_cli.inputs.pairs import is_input_by_name, without_companions
from packer_cli.ownership import MARKER as OWNER
from packer_cli.records import InputFile, Notify
from packer_cli.result.layout import DATASET_DICT, INCOMPLETE, MANIFEST, WORK
from packer_cli.result.manifest_file import as_named, holds_documents, is_manifest

_Key = TypeVar("_Key")

_SHOWN = 3  # directories in a tip


def find_inputs(
    inputs: list[str], config: DocumentConfig, notify: Notify = lambda message: None
) -> list[InputFile]:
    """The files behind files, directories, globs, "-" and lists, in the order named, sorted within.

    All but "-" may be URLs; "@FILE" is a list of the others. `notify` hears what is left
    out. Raises UsageError for paths that do not exist, unknown formats, and files named twice;
    DataError for what cannot be read.
    """
    paths, places = list[str](), dict[str, str]()
    for place, name in _named(inputs):
        with placed(place):
            found = _expand(name, config, notify)
        paths += found
        if place is not None:
            places |= dict.fromkeys(found, place)
    if config.input_format is None or format_named(config.input_format).beside:
        paths = list(without_companions(paths))
    seen: dict[str, str] = {}
    linked: dict[tuple[int, int], str] = {}
    files: list[InputFile] = []
    if paths.count(STDIN) > 1:  # before any of it is read
        _refuse_twice({STDIN: STDIN}, STDIN, STDIN)
    for index, path in enumerate(paths):
        with placed(places.get(path)):
            _refuse_twice(seen, path if path == STDIN else storage.identity(path), path)
            file = input_file(index, path, config)
            if file.inode:  # a file that has several names
                _refuse_twice(linked, (file.device, file.inode), path)
        files.append(file)
    if not files:
        raise UsageError("no input files found", "name at least one file, directory or glob")
    return files


def _refuse_twice(seen: dict[_Key, str], key: _Key, path: str) -> None:
    if key in seen:
        raise UsageError(
            f"{as_named(path)}: the same file as {as_named(seen[key])}; it would be packed twice",
            "name each input once",
        )
    seen[key] = path


def _named(inputs: list[str]) -> Iterator[tuple[str | None, str]]:
    """(place, input) of those named; the place of those that lists name."""
    for name in inputs:
        if is_list(name):
            yield from inputs_listed(name)
        else:
            yield None, name


def _expand(name: str, config: DocumentConfig, notify: Notify) -> list[str]:
    if name == STDIN:
        return [name]
    kind = storage.kind(name)
    if kind == "folder":
        return _directory(name, config, notify)
    if kind == "file":
        return [name]
    url = storage.is_url(name)
    if glob.has_magic(name):
        # what is below ** is files, too, which tell of their folders
        folders = [] if "**" in name else storage.glob_folders(name)
        if matches := _matches(name):
            for folder in _tokenized(folders):
                notify(_left_out(folder, is_tokenized=True))
            return _without_results(name, matches, notify)
        if folders:
            raise UsageError(
                f"{name}: no file matches this pattern, only directories do",
                _name_them(_tokenized(folders)) or f"name each directory, such as {folders[0]}",
            )
        raise UsageError(
            f"{name}: no file matches this pattern",
            f"check the spelling{'' if url else '; patterns start at the current directory'}",
        )
    raise UsageError(
        f"{name}: no such file or directory",
        f"check the spelling{'' if url else '; relative paths start at the current directory'}",
    )


def _tokenized(folders: Iterable[str]) -> list[str]:
    """Those that are tokenized directories."""
    return [one for one in folders if holds_documents(storage.join(one, MANIFEST))]


def _left_out(folder: str, *, is_tokenized: bool) -> str:
    how = "; to pack its tokens, name it" if is_tokenized else ""
    return f"{folder}: left out: it holds a result of packer{how}"


def _name_them(tokenized: Sequence[str]) -> str:
    """A tip for tokenized directories that were found but not named, or ""."""
    if not tokenized:
        return ""
    shown = " ".join(shlex.quote(one) for one in tokenized[:_SHOWN])
    more = " ..." if len(tokenized) > _SHOWN else ""
    return f"name each tokenized directory: packer pack {shown}{more}"


def _matches(pattern: str) -> list[str]:
    try:
        return storage.glob(pattern)
    except OSError as error:
        raise from_os_error(error, error.filename or pattern, "read") from error


def _without_results(pattern: str, matches: list[str], notify: Notify) -> list[str]:
    """The files that are no part of a result of ours, which has JSON lines of its own, too."""
    ours: dict[str, bool] = {}
    left = []
    for path in matches:
        folder = path[: len(path) - len(storage.base_name(path))]
        if folder not in ours:
            shown = folder.rstrip("/") or folder or "."
            names = {name for name, _ in _listing(shown)} | {storage.base_name(shown)}
            ours[folder] = _is_ours(shown, names)  # or the work folder itself
            if ours[folder]:
                notify(_left_out(shown, is_tokenized=bool(_tokenized([shown]))))
        if not ours[folder]:
            left.append(path)
    if not left:
        raise UsageError(
            f"{pattern}: matches only results of packer",
            _name_them(_tokenized(folder.rstrip("/") or "." for folder in ours))
            or "pack the original data instead",
        )
    return left


def _directory(name: str, config: DocumentConfig, notify: Notify) -> list[str]:
    files = list(_files_below(name, config, notify, ()))
    if not files:
        documents = replace(config, sample_by="document")
        if not config.whole_files and any(_files_below(name, documents, lambda message: None, ())):
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
    return files


def _files_below(
    folder: str, config: DocumentConfig, notify: Notify, above: tuple[str, ...]
) -> Iterator[str]:
    """The input files of a folder, then those of the folders in it. Results of ours are not
    inputs; the files of a Hugging Face dataset are those that it names.
    """
    content, real = sorted(_listing(folder)), storage.identity(folder)
    names = {name for name, _ in content}
    if _is_ours(folder, names):
        manifest = storage.join(folder, MANIFEST)
        is_tokenized = MANIFEST in names and holds_documents(manifest)
        if above:
            notify(_left_out(folder, is_tokenized=is_tokenized))
            return
        if not is_tokenized:
            raise _is_result(folder, names)
        yield manifest
        return
    if real in above:  # a symbolic link to a folder above
        return
    if DATASET_DICT in names:
        splits = _strings(storage.join(folder, DATASET_DICT), "splits")
        raise UsageError(
            f"{folder}: a dataset with several splits: {', '.join(splits)}",
            f"name the one to pack, for example {storage.join(folder, (splits or ['train'])[0])}",
        )
    if {"state.json", "dataset_info.json"} <= names:
        yield from _files_of_dataset(folder)
        return
    shown = [one for one in content if not one[0].startswith(".")]
    for name, is_folder in shown:
        if is_folder:
            continue
        if config.input_format or is_input_by_name(
            name, names, folder, notify, documents=config.whole_files
        ):
            yield storage.join(folder, name)
    for name, is_folder in shown:
        if is_folder:
            yield from _files_below(storage.join(folder, name), config, notify, (*above, real))


def _files_of_dataset(folder: str) -> Iterator[str]:
    """The files that a Hugging Face dataset names. DataError for files elsewhere."""
    state = storage.join(folder, "state.json")
    files = _strings(state, "_data_files", "filename")
    for file in files:
        if "/" in file or file in ("", ".", ".."):
            raise DataError(
                f"{state}: names {file!r} as a file of the dataset, expected one in its folder",
                "save the dataset again, or name its files",
            )
    yield from (storage.join(folder, file) for file in files)


def _is_result(folder: str, names: set[str]) -> UsageError:
    if {MANIFEST, INCOMPLETE} & names:
        return UsageError(
            f"{folder}: is a result of packer",
            "name the original data, or a directory that packer tokenize has finished",
        )
    return UsageError(
        f"{folder}: is a result of packer that is not finished: it has no {MANIFEST}",
        "run the command that writes it again, or name the original data",
    )


def _listing(folder: str) -> list[tuple[str, bool]]:
    try:
        return storage.listing(folder)
    except OSError as error:
        raise from_os_error(error, folder, "read") from error


def _is_ours(folder: str, names: set[str]) -> bool:
    """Whether a folder with these names is a result of packer, finished or not."""
    present = {MANIFEST, INCOMPLETE} & names
    if any(is_manifest(storage.join(folder, name)) for name in present):
        return True
    markers = (f"{WORK}/{OWNER}", f"{WORK}/publishing.json")
    return WORK in names and any(storage.is_file(storage.join(folder, name)) for name in markers)


def _strings(path: str, key: str, inner: str | None = None) -> list[str]:
    """The list of strings under `key` of a JSON file, each inside an object if `inner`."""
    try:
        with storage.open_bytes(path) as file:
            content = json.loads(file.read().decode())
        values = content.get(key, []) if isinstance(content, dict) else []
        strings = [item if inner is None else item[inner] for item in values]
        if not all(isinstance(item, str) for item in strings):
            raise TypeError
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"not valid JSON: {error}" if isinstance(error, ValueError) else f"damaged: {key}"
        raise DataError(f"{path}: {what}", "save the dataset again, or name its files") from error
    return strings
