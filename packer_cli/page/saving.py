"""Files of pages: there whole or not at all, and in the place of nothing but an earlier page."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from packer_cli.durable import put_file
from packer_cli.errors import UsageError, from_os_error
from packer_cli.page.document import START
from packer_cli.result.layout import INCOMPLETE, MANIFEST
from packer_cli.result.manifest_file import is_manifest
from packer_cli.storage import is_url

_ELSEWHERE = "nothing was changed; choose another name, or move that file"


def check_place(name: str) -> None:
    """UsageError for a name that no page can be written to. Nothing but a page is replaced."""
    if is_url(name):
        raise UsageError(
            f"--html: {name}: pages are only written to local files", "name a file here"
        )
    path = _path(name)
    if os.path.isdir(path):
        raise UsageError(f"--html: {name} is a directory", f"name a file: {path / 'page.html'}")
    if not os.path.isdir(path.parent):
        raise UsageError(f"--html: {path.parent} is no directory", f"mkdir -p {path.parent}")
    if any(is_manifest(path.parent / file) for file in (MANIFEST, INCOMPLETE)):
        raise UsageError(
            f"--html: {name} would be in a result of packer, which holds nothing else",
            f"name a file beside it: {path.parent}.html",
        )
    for file in (path, path.with_name(f"{path.name}.part")):
        _refuse_other_files(file)


def save(name: str, page: bytes) -> None:
    """Write a page where `check_place` allows one. DataError: the file system does not."""
    put_file(_path(name), page)


def _path(name: str) -> Path:
    """With the file that a link leads to, rather than the link, to be replaced."""
    return Path(os.path.realpath(name)) if os.path.islink(name) else Path(name)


def _refuse_other_files(path: Path) -> None:
    """UsageError for what is there, unless it is a page or empty."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(
                f"--html: {path} is not a regular file", "--html - writes the page to stdout"
            )
        with open(path, "rb") as file:
            begin = file.read(len(START))
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    if begin and begin != START.encode():
        raise UsageError(f"--html: {path} is there, and is not a page of packer's", _ELSEWHERE)
