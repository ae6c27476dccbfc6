"""Suggestions for options and commands that do not exist."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from packer_cli.errors import nearest

_NO = "--no-"
# names of similar commands in other tools
_COMMANDS = {
    "inspect": "show",
    "view": "show",
    "head": "show",
    "print": "show",
    "info": "stats",
    "stat": "stats",
    "check": "verify",
    "validate": "verify",
    "convert": "export",
    "merge": "finalize",
    "find": "trace",
    "where": "trace",
    "preprocess": "pack",
}


def suggested(error: Any, other_options: Mapping[str, str]) -> str:
    """The option or command nearest to a name that click does not know, or "".

    `other_options`: names in other tools -> the options of ours.
    """
    ctx = getattr(error, "ctx", None)
    if ctx is None:
        return ""
    if name := getattr(error, "possibilities", None) is not None and error.option_name:
        mine = [flag for one in ctx.command.params for flag in (*one.opts, *one.secondary_opts)]
        return _nearest(name, {flag: flag for flag in mine} | dict(other_options))
    if unknown := re.match(r"No such command '(.*)'", error.format_message()):
        mine = list(ctx.command.list_commands(ctx))
        return _nearest(unknown[1], {name: name for name in mine} | _COMMANDS)
    return ""


def elsewhere(error: Any) -> str:
    """A tip for an option that only other commands have, or ""."""
    group = getattr(getattr(error, "ctx", None), "parent", None)
    if group is None or type(error).__name__ != "NoSuchOption":
        return ""
    having = [
        f"packer {name}"
        for name, command in group.command.commands.items()
        if any(error.option_name in one.opts for one in command.params)
    ]
    return f"it is an option of {', '.join(having)}" if having else ""


def missing(error: Any) -> str:
    """A tip for a required option that is not given, or ""."""
    option: Any = getattr(error, "param", None)
    if type(error).__name__ != "MissingParameter" or option.param_type_name != "option":
        return ""
    return f"add {option.opts[0]} {option.metavar}. {option.help}"


def _nearest(name: str, names: Mapping[str, str]) -> str:
    """The nearest name; one without --no- says the opposite of one with it, and comes last."""
    negated = name.lower().replace("_", "-").startswith(_NO)
    alike = [one for one in names if one.startswith(_NO) == negated]
    near = nearest(name, alike) or nearest(name, names)
    return names[near] if near else ""
