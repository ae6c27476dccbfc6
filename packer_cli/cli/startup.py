"""How the process of a command starts and ends: each trick, and the time that it saves."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packer_cli.early import EarlyReference


def open_streams() -> None:
    """Make sure that descriptors 0 to 2 are open and that any name can be printed.

    Closed ones are opened on /dev/null: files of ours would otherwise get these numbers, to which
    libraries and child processes write.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
        if descriptor == 1:
            sys.stdout = open(1, "w")  # noqa: SIM115
        elif descriptor == 2:
            sys.stderr = open(2, "w")  # noqa: SIM115
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr: no name may fail to print


@contextmanager
def reference_begun_early(arguments: list[str]) -> Iterator[EarlyReference | None]:
    """A context in which the reference engine of a `packer pack` with these arguments is loading.

    Saves 0.23 of 2.6 seconds in a small run with a tokenizer of 11 MB, 0.75 of 5 seconds on busy
    cores (medians of 7 and 8 pairs), and costs no processor time: the engine loads on another core
    while this process imports.
    """
    command = arguments[1] if len(arguments) > 1 else ""
    is_idle = command in ("pack", "plan") and any(map(_is_tokenized, arguments[2:]))
    if command not in ("pack", "plan", "tokenize") or is_idle:
        yield None
        return
    from packer_cli.early import begin_reference

    with begin_reference(*_tokenizer_of(arguments)) as early:
        yield early


def _is_tokenized(argument: str) -> bool:
    """Whether it is an input that needs no tokenizer: its manifest begins with saying so."""
    folder = argument.removesuffix("manifest.json")
    with suppress(OSError, ValueError), open(os.path.join(folder, "manifest.json"), "rb") as file:
        return b'"kind": "tokenized"' in file.read(64)
    return False


def _tokenizer_of(arguments: list[str]) -> tuple[str, str]:
    """(tokenizer, its backend) of arguments that are not parsed yet."""
    values = {"--tokenizer": "", "--tokenizer-backend": "auto"}
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, rest = option.partition("=")
        name = {"-t": "--tokenizer"}.get(name, name)
        if name in values:
            values[name] = rest if equals else value
    return values["--tokenizer"], values["--tokenizer-backend"]


# Python's own is 5 ms: so long a worker whose heavy work is done waits for one that parses. Saves
# 0.11 of 6.1 s of processor time in 228 MB of text and code with two workers (median of 9 pairs by
# turns, 8 of them with the same sign); with 25 and 57 MB nothing that is not noise (10 and 5 pairs:
# -0.01 and 0.01 s). Time on the clock could not be told apart: the cores were busy.
_SWITCH_SECONDS = 0.0005


def prepare_run() -> None:
    """Save imports and waits that a run does not need; called before all that it does."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    # gigatoken gives plain arrays where awkward is missing, which we want anyway. Importing awkward
    # takes 160 ms of processor time, a twelfth of a small run (median of 8 pairs). Only here:
    # this process is ours alone.
    sys.modules.setdefault("awkward", None)  # type: ignore[arg-type]
    _share_heaps()


_M_ARENA_MAX = -8  # of glibc's malloc.h
_CORES_PER_HEAP = 4


def _share_heaps() -> None:
    """Have threads share the heaps of glibc's malloc: what one has freed, others use.

    Saves 65 of 555 MB with 66 MB of text and two workers, 42 of 809 MB with 670 MB, for the same
    processor time (medians of 3 pairs).
    """
    import ctypes

    with suppress(AttributeError, OSError, TypeError):  # another library of C
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, max(1, (os.cpu_count() or 1) // _CORES_PER_HEAP))


def end_at_once(status: int) -> None:
    """End the process without freeing its memory: nothing is left to do.

    Saves 85 ms of 2 seconds with a tokenizer of 11 MB, whose tables take that long to free (median
    of 6 pairs), and 127 ms of processor time.
    """
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
