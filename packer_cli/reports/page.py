"""A report as a page for a browser: one file that asks for nothing from elsewhere.

The page is `page.html.jinja`, which escapes whatever it is given: names of inputs are anybody's.
Its file is there whole or not at all, and in the place of nothing but an earlier page.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from functools import partial
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from packer_cli.errors import UsageError, cut, from_os_error, one_line
from packer_cli.options.option import refuse
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
_PAGE, _SCRIPT = "page.html.jinja", "rows.js"  # the latter is run on pages of rows alone
_MOST_CHARACTERS = 90  # of a name


def page(report: Report) -> bytes:
    """The page as a file's content. Characters that UTF-8 cannot write are escaped, as \\udc80."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {
        "count": count,
        "percent": percent,
        "shortened": partial(cut, most=_MOST_CHARACTERS),
    }
    source, script = (
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in (_PAGE, _SCRIPT)
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.from_string(source).render(
        report=report,
        blob=Markup(report.rows.blob if report.rows else ""),  # noqa: S704 it is base64
        script=Markup(script),  # noqa: S704 ours
        script_digest=f"sha256-{digest}",
    )
    return text.encode("utf-8", "backslashreplace")


def check_place(name: str) -> None:
    """UsageError for a name that no page can be written to. Nothing but a page is replaced."""
    path = _path(name)
    folder = path.parent
    in_result = any(is_manifest(folder / file) for file in (MANIFEST, INCOMPLETE))
    refuse([
        (is_url(name), f"--html: {name}: pages are only written to local files",
         "name a file here"),
        (os.path.isdir(path), f"--html: {name} is a directory",
         f"name a file: {path / 'page.html'}"),
        (not os.path.isdir(folder), f"--html: {folder} is no directory", f"mkdir -p {folder}"),
        (in_result, f"--html: {name} would be in a result of packer, which holds nothing else",
         f"name a file beside it: {folder}.html"),
    ])  # fmt: skip
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
