"""The layout of --help: options in sections, nothing cut off, no name broken at a dash."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from packer_cli.config.option import FIRST, GROUPS, RUNNING

_OTHERS = "Options"
_COLUMN = 30  # where the help begins


def write_parameters(ctx: Any, formatter: Any) -> None:
    """Write the arguments, then the options by group, the most used first."""
    sections: dict[str, list[tuple[str, str]]] = {
        name: [] for name in ("Arguments", FIRST, _OTHERS, *GROUPS[1:])
    }
    for parameter in ctx.command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            sections[_section(ctx, parameter)].append(_described(parameter, record))
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                write_rows(formatter, rows)


def _section(ctx: Any, parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    own = _OTHERS if ctx.parent is None else RUNNING  # --help itself
    if parameter.name != "help":
        own = _OTHERS
    return getattr(parameter, "rich_help_panel", None) or own


def _plain(record: tuple[str, str]) -> tuple[str, str]:
    """The record without the type that Typer adds where there is no metavar."""
    names, text = record
    return names.partition(" <")[0], text.replace("  [required]", "")


def _described(parameter: Any, record: tuple[str, str]) -> tuple[str, str]:
    names, text = _plain(record)
    needed = parameter.required and parameter.param_type_name == "option"
    return names, f"{text} Required." if needed else text


def write_rows(formatter: Any, rows: Iterable[tuple[str, str]]) -> None:
    """Write two columns; a name too long for its column has its help on the next line."""
    margin = " " * formatter.current_indent
    for names, text in rows:
        lines = textwrap.wrap(
            text,
            max(20, formatter.width - _COLUMN),
            break_on_hyphens=False,
            break_long_words=False,
        )
        head = f"{margin}{names}"
        if len(head) <= _COLUMN - 2 and lines:
            head = f"{head:<{_COLUMN}}{lines.pop(0)}"
        formatter.write("\n".join([head, *(" " * _COLUMN + line for line in lines)]) + "\n")
