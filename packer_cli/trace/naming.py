"""Documents by name: FILE:POSITION, as `packer trace` and `packer show` print them, to what rows
refer to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from packer_cli.errors import UsageError
from packer_cli.records import MOST_TURNS, Int64, turn_position
from packer_cli.result.manifest import TOKENIZED
from packer_cli.result.origins import place_in, unit_of
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.trace.results import Results

_DOCUMENT = re.compile(
    r"(.+)(?::| byte | row | document )(\d+)(?: turn (\d{1,5}))?", re.ASCII | re.DOTALL
)
_MOST_NAMES = 5


@dataclass(frozen=True)
class Candidate:
    """An input that a name may mean: `number` in the result `part`.

    turns   as --turns of the run that read it
    within  where it is one of the inputs of a tokenized directory: that directory, and its number
            there
    """

    path: str
    unit: str
    part: int
    number: int
    turns: str = "all"
    within: tuple[TokenizedDirectory, int] | None = None

    def positions(self, position: int, turn: int | None = None) -> Int64:
        """int64[n], the positions by which rows refer to the documents at a position of it, or to
        one of a record's turns.
        """
        own = np.array([position], np.int64)
        if self.turns == "each":
            turns = np.arange(MOST_TURNS) if turn is None else np.array([turn], np.int64)
            own = turn_position(position, turns)
        if self.within is None:
            return own
        directory, file = self.within
        documents, positions = directory.documents_of(file)
        found: Int64 = documents[np.isin(positions, own)]
        return found


@dataclass(frozen=True)
class Named:
    """A document: the position in an input, which several results may have read.

    `turn`: of a record that is several documents, None for all of them.
    """

    path: str
    position: int
    candidates: tuple[Candidate, ...]
    turn: int | None = None

    def __str__(self) -> str:
        return place_in(self.path, self.candidates[0].unit, self.position, self.turn)


def named(results: Results, text: str) -> Named:
    """The document that a text names. Raises UsageError for a text that is not FILE:POSITION, and
    for a FILE that no result has read, or several of which end so.
    """
    match = _DOCUMENT.fullmatch(text)
    if not match or int(match[2]) >= (1 << 63) // (MOST_TURNS if match[3] else 1):
        raise UsageError(
            f"--find: {text!r} is not FILE:POSITION",
            "for example data.jsonl:65, as packer trace and packer show name documents",
        )
    file, every = match[1], list(_candidates(results))
    file = "-" if file == "stdin" and all(one.path != file for one in every) else file
    paths = list(dict.fromkeys(one.path for one in every))
    chosen = [path for path in paths if path == file] or [
        path
        for path in paths
        if path.endswith(f"/{file.removeprefix('./')}") or file.endswith(f"/{path}")
    ]
    if len(chosen) > 1:
        raise UsageError(
            f"--find: {file!r} may be {_listed(chosen)}", "give more of the path: it may be any end"
        )
    if not chosen:
        raise _unknown(file, paths)
    its = tuple(one for one in every if one.path == chosen[0])
    return Named(chosen[0], int(match[2]), its, None if match[3] is None else int(match[3]))


def _candidates(results: Results) -> Iterator[Candidate]:
    for part, packed in enumerate(results.parts):
        config = packed.facts.config
        for number, one in packed.facts.inputs_now.items():
            if one.format != TOKENIZED:
                unit = unit_of(one, config.input_format)
                yield Candidate(one.path, unit, part, number, config.turns)
                continue
            yield Candidate(os.path.dirname(one.path), "document", part, number)
            directory = results.origins[part].tokenized(number)
            if directory is None:
                continue
            facts = directory.facts
            for file, first in enumerate(facts.inputs):
                unit = unit_of(first, facts.config.input_format)
                yield Candidate(
                    first.path, unit, part, number, facts.config.turns, (directory, file)
                )


def _unknown(file: str, paths: Iterable[str]) -> UsageError:
    names = {os.path.basename(path): path for path in paths} | {path: path for path in paths}
    near = dict.fromkeys(
        names[one]
        for part in (file, os.path.basename(file))
        for one in get_close_matches(part, names, _MOST_NAMES)
    )
    tip = f"did you mean {_listed(near)}?" if near else "packer stats DIR --by input lists inputs"
    return UsageError(f"--find: no input is {file!r} or ends with it", tip)


def _listed(paths: Iterable[str]) -> str:
    names = list(paths)
    rest = len(names) - _MOST_NAMES
    shown = [*names[:_MOST_NAMES], *([f"{rest} more"] if rest > 0 else [])]
    return " or ".join(shown)
