"""Lists of inputs: `@list.txt` stands for what that file names, one input in each line.

    # data of May
    data/a.jsonl
    data/more/*.parquet

Each line is what could stand on the command line, relative to the current directory, but for
spaces around it; blank lines and those that begin with "#" count for nothing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

from packer_cli import storage
from packer_cli.errors import DataError, PackerError, UsageError, from_os_error
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.encodings import BYTE_ORDER_MARK, other_encoding

LIST = "@"
_LONGEST = 1 << 16  # bytes of a line: far longer than a path can be


def is_list(name: str) -> bool:
    return name.startswith(LIST)


def inputs_listed(name: str) -> Iterator[tuple[str, str]]:
    """(place, input) of each line of the list `name`, which begins with "@".

    Raises UsageError for what is no input of a list; DataError for what cannot be read.
    """
    path, count = name.removeprefix(LIST), 0
    if path in ("", STDIN):
        raise UsageError(
            f"{name}: expected a file that lists inputs",
            "write the list to a file, so that the command can be repeated: ... > list.txt; "
            "packer pack @list.txt",
        )
    for number, line in enumerate(_lines(path), 1):
        place = f"{path}, line {number}"
        one = _decoded(line, place).strip()
        if not one or one.startswith("#"):
            continue
        if one == STDIN or is_list(one):
            what = "stdin" if one == STDIN else "a list"
            raise UsageError(
                f"{place}: {one} is {what}, expected a file, folder, glob or URL",
                f"name {what} on the command line; a file of that name is ./{one}",
            )
        count += 1
        yield place, one
    if not count:
        raise UsageError(f"{path}: lists no inputs", "name one input in each line")


@contextmanager
def placed(place: str | None) -> Iterator[None]:
    """Errors say in which line of a list an input is, if it is in one."""
    try:
        yield
    except PackerError as error:
        if place is None:
            raise
        raise type(error)(f"{place}: {error.message}", error.tip) from error


def _lines(path: str) -> Iterator[bytes]:
    kind = storage.kind(path)
    if kind != "file":
        what = "a directory, expected a file that lists inputs" if kind else "no such file"
        raise UsageError(f"{path}: {what}", f"check the spelling; an input named so is ./@{path}")
    try:
        with storage.open_bytes(path) as raw, io.BufferedReader(raw) as file:
            beginning = file.peek(len(BYTE_ORDER_MARK))
            if found := other_encoding(beginning):
                raise DataError(f"{path}: begins with {found[0]}", found[1])
            if beginning.startswith(BYTE_ORDER_MARK):
                file.read(len(BYTE_ORDER_MARK))
            while line := file.readline(_LONGEST):
                yield line
    except OSError as error:
        raise from_os_error(error, path, "read") from error


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
        raise DataError(
            f"{place}: invalid UTF-8 at byte {error.start} of the line: 0x{line[error.start]:02x}",
            "convert it: iconv -f ORIGINAL_ENCODING -t utf-8",
        ) from error
