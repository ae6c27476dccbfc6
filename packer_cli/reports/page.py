"""A report as a page for a browser: one file that asks for nothing from elsewhere.

The page is `page.html.jinja`, which escapes whatever it is given: names of inputs are anybody's.
Its file is there whole or not at all, and in the place of nothing but an earlier page.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from packer_cli.errors import UsageError, from_os_error, one_line
from packer_cli.ownership import put_file
from packer_cli.reports.report import Report
from packer_cli.result.layout import INCOMPLETE, MANIFEST
from packer_cli.result.manifest import is_manifest
from packer_cli.result.wording import count, percent
from packer_cli.storage import is_url

# What every page begins with: the sign that packer may replace it.
_START = b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n' + (
    b'<meta name="generator" content="packer">\n'
)
_MOST_CHARACTERS = 90  # of a name


def page(report: Report) -> bytes:
    """The page as a file's content. Characters that UTF-8 cannot write are escaped, as \\udc80."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {"count": count, "percent": percent, "shortened": _shortened}
    source = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    text = environment.from_string(source).render(report=report)
    return text.encode("utf-8", "backslashreplace")


def _shortened(name: str) -> str:
    """A name in one line: a longer one loses its middle."""
    name = one_line(name)
    if len(name) <= _MOST_CHARACTERS:
        return name
    begin = _MOST_CHARACTERS // 3
    return f"{name[:begin]}…{name[begin + 1 - _MOST_CHARACTERS :]}"


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


def save(name: str, content: bytes) -> None:
    """Write a page where `check_place` allows one. DataError: the file system does not."""
    put_file(_path(name), content)


def _path(name: str) -> Path:
    """The path of the page; of a link, that of the file it leads to, which is replaced."""
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
            begin = file.read(len(_START))
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    if begin and begin != _START:
        raise UsageError(
            f"--html: {path} is there, and is not a page of packer's",
            "nothing was changed; choose another name, or move that file",
        )
