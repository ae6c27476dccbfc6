"""Running `packer show`, and packer on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import tempfile
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from altered import begun
from support import packer

IN_ORDER = ["--no-shuffle", "--strategy", "next-fit"]
TEXTS = ["first", "second\n", "third\n\nline", "a longer one than 16"]


def show(*arguments: object) -> str:
    result = packer("show", "out", *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return str(result.stdout)


def show_json(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in show(*arguments, "--json").splitlines()]


def texts_of(*arguments: object) -> list[str]:
    return [segment["text"] for row in show_json(*arguments) for segment in row["segments"]]


def write_ids(path: Path, *documents: tuple[list[int], list[int]]) -> None:
    """Documents of ids, and for each the ids' trained flags."""
    lines = []
    for ids, trained in documents:
        labels = [token if flag else -100 for token, flag in zip(ids, trained, strict=True)]
        lines.append(json.dumps({"input_ids": ids, "labels": labels}))
    path.write_text("\n".join(lines))


def _terminal(columns: int) -> tuple[int, int]:
    """(what is read, what a program writes to)."""
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return terminal, child


def stderr_on_terminal(columns: int, *arguments: object) -> tuple[str, str]:
    """What packer, which succeeds, writes to its stdout, and to its stderr, a terminal."""
    terminal, child = _terminal(columns)
    with tempfile.TemporaryFile("w+") as output:
        run = begun(arguments, stdout=output.fileno(), stderr=child)
        os.close(child)
        shown = _read(terminal)
        assert run.wait(300) == 0, shown
        output.seek(0)
        return output.read(), shown


def on_terminal(*arguments: object, **environment: str) -> str:
    """What packer sends to a terminal of 80 columns."""
    terminal, child = _terminal(80)
    without = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    base = {name: value for name, value in os.environ.items() if name not in without}
    with patch.dict(os.environ, base | {"TERM": "xterm-256color"} | environment, clear=True):
        run = begun(arguments, stdout=child)
    os.close(child)
    sent = _read(terminal)
    assert run.wait(300) == 0
    return sent.replace("\r\n", "\n")


def _read(terminal: int) -> str:
    sent = b""
    with suppress(OSError):  # how Linux says that the other side is gone
        while data := os.read(terminal, 1 << 16):
            sent += data
    os.close(terminal)
    return sent.decode()
