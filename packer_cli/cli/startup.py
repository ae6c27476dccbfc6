"""What makes the process of a command start and end well: each trick, and what it buys."""

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
    """Have 0 to 2 open, and any name printable.

    What was closed is opened to nothing, or files of ours would get the numbers 0 to 2, which
    libraries and children write to.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
        if descriptor == 1:
            sys.stdout = open(1, "w")  # noqa: SIM115
        elif descriptor == 2:
            sys.stderr = open(2, "w")  # noqa: SIM115
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: no name may end a run


@contextmanager
def reference_begun_early(arguments: list[str]) -> Iterator[EarlyReference | None]:
    """Inside, a `packer pack` of these arguments has its reference engine loading.

    Buys 0.23 of 2.6 seconds of a small run with a tokenizer of 11 MB, 0.75 of 5 seconds on busy
    cores (medians of 7 and 8 pairs), and costs no processor time: it loads on another core while
    this process imports.
    """
    if arguments[1:2] != ["pack"]:
        yield None
        return
    from packer_cli.early import begin_reference

    with begin_reference(*_tokenizer_of(arguments)) as early:
        yield early


def _tokenizer_of(arguments: list[str]) -> tuple[str, str]:
    """(tokenizer, its backend) of arguments that are not parsed yet."""
    values = {"--tokenizer": "", "--tokenizer-backend": "auto"}
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, rest = option.partition("=")
        name = {"-t": "--tokenizer"}.get(name, name)
        if name in values:
            values[name] = rest if equals else value
    return values["--tokenizer"], values["--tokenizer-backend"]


def prepare_run() -> None:
    """Before anything that a run imports."""
    # gigatoken gives plain arrays where awkward is missing, which we want anyway. Importing it
    # takes 160 ms of processor time, a twelfth of a small run (median of 8 pairs). Only here:
    # this process is ours alone.
    sys.modules.setdefault("awkward", None)  # type: ignore[arg-type]


def end_at_once(status: int) -> None:
    """Without freeing what the process has: nothing is left to do.

    Buys 85 ms of 2 seconds with a tokenizer of 11 MB, whose tables take that long to be freed
    (median of 6 pairs); 127 ms of processor time.
    """
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
