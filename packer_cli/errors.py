"""Errors, by who can fix them. The library raises them; only `cli/` prints.

Every error has one line that names the place, the value found and the expectation,
and one line (`tip`) that says what to do. The class decides the exit code.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches

# Control characters, line ends other than \n, and what changes the direction of writing or is
# never seen. A zero-width joiner stays: scripts and emoji need it.
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
    """No result is where one was named: nothing is there, or a file (exit 2)."""

    exit_code = 2


class DamagedInputError(DataError):
    """An input that cannot be decoded, or not to its end: with --on-error skip it is left out."""


class InputChangedError(DataError):
    """An input changed after the run began."""


class LostChildError(DataError):
    """A helper process ended unexpectedly.

    `code`: -N when signal N ended it; None when it does not answer, and has not ended either.
    """

    code: int | None = None


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
    """The error for an input that cannot be decoded. `tip`: how to fix it."""
    return DamagedInputError(message, f"{tip}; or leave the file out, with --on-error skip")


def needs_extra(name: str, extra: str) -> str:
    """The error when an extra is missing; pip adds it to the packer that is installed."""
    return f"{name} needs packages that are not installed: pip install 'llm-packer[{extra}]'"


def one_of(
    option: str, value: str, allowed: Iterable[str], aliases: Mapping[str, str] | None = None
) -> UsageError:
    """The error for a value that is not one of those allowed, with the nearest as a tip.

    `aliases`: other names -> the one to suggest.
    """
    allowed, aliases = list(allowed), aliases or {}
    near = nearest(value, [*allowed, *aliases])
    tip = f"did you mean {aliases.get(near, near)}?" if near else ""
    return UsageError(f"{option}: {value!r} is not one of {', '.join(allowed)}", tip)


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that somebody who wrote `name` meant, or "" where none is near.

    Near are names with about one mistake of typing in three letters at most; where there are none,
    names that have all words of the other, and those that begin like it.
    Case does not matter, nor whether words are joined by - or _.
    """
    sought, known = _plain(name), {_plain(one): one for one in names}
    near = get_close_matches(sought, known, 1, 0.7)
    near = near or get_close_matches(sought, [one for one in known if _is_part(sought, one)], 1, 0)
    return known[near[0]] if near else ""


def _is_part(one: str, other: str) -> bool:
    """Tell whether all words of one name are in the other, or both begin with nearly all of one."""
    words, others = set(one.split("-")), set(other.split("-"))
    shorter = min(len(one), len(other))
    most = -(-3 * shorter // 4)
    begins_alike = one[:most] == other[:most]
    return shorter > 2 and (words <= others or others <= words or begins_alike)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").strip("-")


def named(fields: Iterable[str], most: int = 20) -> str:
    """Field names for a message: "a, b, c and 7 more", or "none"."""
    names = list(fields)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + rest


def visible(text: str, also: str = "") -> str:
    """Text that is safe to print: hostile characters, and those in `also`, become escapes."""
    for character in also:
        text = text.replace(character, character.encode("unicode_escape").decode())
    return _HOSTILE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """A message made of data, such as names of fields and files, for one line of a terminal."""
    return visible(text, also="\n\t")


def cut(text: str, most: int = 1_000) -> str:
    """At most so many characters of a text: a longer one loses its middle."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 1]} … {text[2 - half :]}"


def _nearest(path: str) -> str:
    """A path, or the nearest folder above it that is there: what has no permissions is above."""
    while path and not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path or "."


def from_os_error(error: OSError, path: str | os.PathLike[str], doing: str) -> PackerError:
    """The PackerError for an OSError met while `doing` ("read", "write") `path`."""
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
    """Turn an OSError into the PackerError of `from_os_error`; what cannot be read may be another
    file than `path`, which the error then names.
    """
    try:
        yield
    except OSError as error:
        place = error.filename or path if doing == "read" else path
        raise from_os_error(error, place, doing) from error
