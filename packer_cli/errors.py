"""Errors, by who can fix them. The library raises them; only `cli/` prints them.

Every error has one line that names the place, what is there and what was expected, and a tip of one
line: what to do. The class decides the exit code.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches

# Control characters, line ends other than \n, and characters that are invisible or change the
# direction of writing. A zero-width joiner stays: scripts and emoji need it.
_HOSTILE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    "\U000e0000-\U000e007f]"
)


class PackerError(Exception):
    """Base of all errors that packer raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, tip: str = "") -> None:
        super().__init__(message, tip)  # both in args, so that errors survive pickling
        self.message = message
        self.tip = tip
        if tip and hasattr(self, "add_note"):  # Python 3.11: tracebacks end with it
            self.add_note(f"tip: {tip}")

    def __str__(self) -> str:
        return self.message


class DataError(PackerError):
    """Something is wrong with the input, a shard or the machine's storage (exit 1)."""


class NoSuchDirectoryError(DataError):
    """There is not a result where one was named: nothing is there, or a file (exit 2)."""

    exit_code = 2


class DamagedInputError(DataError):
    """An input that cannot be decoded to its end: with --on-error skip it is left out."""


class InputChangedError(DataError):
    """An input changed after the run began."""


class ThresholdMissed(PackerError):
    """A limit that the user set was not met (exit 1)."""


class UsageError(PackerError):
    """An option or a path that cannot work (exit 2)."""

    exit_code = 2


class InternalError(PackerError):
    """packer broke one of its own promises: a bug (exit 3)."""

    exit_code = 3

    def __init__(self, message: str, tip: str = "") -> None:
        super().__init__(
            message,
            tip or "this is a bug in packer: please report it with the command and --debug output",
        )


class Interrupted(PackerError):
    """Ctrl-C, or a termination signal (exit 130)."""

    exit_code = 130


def damaged_input(message: str, tip: str) -> DamagedInputError:
    """Return the error for an input that cannot be decoded. `tip`: how to fix it."""
    return DamagedInputError(message, f"{tip}; or leave the file out, with --on-error skip")


def needs_extra(name: str, extra: str) -> str:
    """Return the message for a missing extra, which pip adds to the packer that is installed."""
    return f"{name} needs packages that are not installed: pip install 'llm-packer[{extra}]'"


def one_of(
    option: str, value: str, allowed: Iterable[str], aliases: Mapping[str, str] | None = None
) -> UsageError:
    """Return the error for a value that is not allowed, with the nearest allowed one as a tip.

    `aliases`: by other names, the value to suggest.
    """
    allowed, aliases = list(allowed), aliases or {}
    near = nearest(value, [*allowed, *aliases])
    tip = f"did you mean {aliases.get(near, near)}?" if near else ""
    return UsageError(f"{option}: {value!r} is not one of {', '.join(allowed)}", tip)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the known name that a mistyped `name` means, or "" if none is near. Case does not
    matter, nor whether words are joined by - or _.
    """

    def plain(text: str) -> str:
        return text.lower().replace("_", "-").strip("-")

    known = {plain(candidate): candidate for candidate in names}
    near = get_close_matches(plain(name), known, 1, 0.66)
    return known[near[0]] if near else ""


def named(fields: Iterable[str], most: int = 20) -> str:
    """Return names for a message: "a, b, c and 7 more", or "none"."""
    names = list(fields)
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + others


def visible(text: str, also: str = "") -> str:
    """Return text that is safe to print: hostile characters, and those in `also`, are escaped."""
    for character in also:
        text = text.replace(character, character.encode("unicode_escape").decode())
    return _HOSTILE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return a message that contains data, such as names of files, as one line of a terminal."""
    return visible(text, also="\n\t")


def cut(text: str, most: int = 1_000) -> str:
    """Return a text of at most `most` characters: a longer one loses its middle."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 1]} … {text[2 - half :]}"


def _nearest(path: str) -> str:
    """Return a path, or the nearest folder above it that exists, whose permissions are missing."""
    while path and not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path or "."


def from_os_error(error: OSError, path: str | os.PathLike[str], doing: str) -> PackerError:
    """Return the PackerError for an OSError while `doing` ("read", "write") `path`."""
    reason = os.strerror(error.errno) if error.errno else error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        tip = "free some space or choose another --output, then run the same command again"
    elif error.errno == errno.EACCES:
        tip = f"check its permissions: ls -ld {_nearest(os.fspath(path))}"
    elif error.errno == errno.ELOOP:
        tip = "packer writes through no link of that name: move it elsewhere"
    elif error.errno == errno.ENOENT:
        tip = "check the spelling; relative paths start at the current directory"
    else:
        tip = "check the disk and the path, then run the same command again"
    return DataError(f"{os.fspath(path)}: cannot {doing}: {reason}", tip)


@contextmanager
def os_errors(path: str | os.PathLike[str], doing: str = "read") -> Iterator[None]:
    """Turn an OSError into the PackerError of `from_os_error`. It names the file that could not be
    read, which may be another than `path`.
    """
    try:
        yield
    except OSError as error:
        place = error.filename or path if doing == "read" else path
        raise from_os_error(error, place, doing) from error
