"""Paths in a recipe, which begin at its folder, as paths that begin at the current directory."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

from packer_cli import storage
from packer_cli.config.formats import format_of
from packer_cli.errors import UsageError

_STDIN = "-"
_LIST = "@"  # before the name of a file of names


class Paths:
    """Paths of one recipe."""

    def __init__(self, recipe: str) -> None:
        self.recipe, self.folder = recipe, os.path.dirname(recipe)

    def resolved(self, field: str, value: Any) -> Any:
        """The value of a field, made a path from the current directory where it is one."""
        if field == "inputs":
            return tuple(map(self._input, value))
        if field in ("output", "tokenized", "staging"):
            return self._path(value)
        if field == "tokenizer":
            return self._tokenizer(value)
        return self._template(value) if field == "chat_template" else value

    def refuse_itself(self, place: str, inputs: Sequence[str], *, every: bool) -> None:
        """UsageError for inputs that the recipe is among. `every`: of a folder, all files are
        inputs, not only those that are by their names.
        """
        own = os.path.realpath(self.recipe)
        read = every or format_of(own)[0] is not None
        for name in inputs:
            if name == _STDIN or storage.is_url(name) or not self._holds(name, own, read=read):
                continue
            raise UsageError(
                f"{place}: inputs: {name!r} {'is' if os.path.isfile(name) else 'holds'} the recipe "
                "itself",
                "name the data only, or keep the recipe elsewhere",
            )

    @staticmethod
    def _holds(name: str, own: str, *, read: bool) -> bool:
        if os.path.isdir(name):
            folder = os.path.realpath(name)
            return read and os.path.commonpath([folder, own]) == folder
        matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        return any(os.path.realpath(one) == own for one in matches)

    def _path(self, name: str) -> str:
        """From the current directory; what does not depend on a folder stays as it is."""
        if not name or name == _STDIN or storage.is_url(name) or name.startswith("~"):
            return name
        return os.path.join(self.folder, name)

    def _input(self, name: str) -> str:
        if name.startswith(_LIST):
            return _LIST + self._path(name[1:])
        path = self._path(name)
        if path != name and glob.has_magic(self.folder) and not os.path.exists(path):
            return os.path.join(glob.escape(self.folder), name)  # only the name is a pattern
        return path

    def _tokenizer(self, name: str) -> str:
        """A path where it looks like one or is there, else a name of the hub."""
        is_path = name.startswith((".", "/")) or os.path.exists(self._path(name))
        return self._path(name) if is_path and name != "bytes" else name

    def _template(self, name: str) -> str:
        """A path, but for the name of one of the tokenizer's templates."""
        is_path = "/" in name or "." in name or os.path.exists(self._path(name))
        return self._path(name) if is_path else name
