"""What `packer verify` reports: problems, what to do about each kind, and what was checked."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Remedy(NamedTuple):
    """A kind of problem, and what to do about it; {} is the command that makes such results."""

    kind: str
    tip: str


DAMAGED = Remedy("a damaged result", "copy the directory again, or {} again with --overwrite")
FOREIGN = Remedy(
    "foreign files", "move them elsewhere: trainers may take them for part of the result"
)
CHANGED = Remedy(
    "changed inputs",
    "restore them, or run packer {} --update on the inputs as they are now; its --prune removes "
    "documents of inputs that are gone",
)
DIFFERENT = Remedy(
    "a result that differs from what its inputs and options give",
    "{} again with --overwrite; if that is not sound either, report it as a bug in packer",
)
STALE = Remedy(
    "tokenized documents that are not those of their inputs",
    "restore the inputs, or tokenize them again and pack again, both with --overwrite",
)


_INTERNAL = {"lock", "command"}


class Problem(NamedTuple):
    """A problem, the file that it is in, and what to do about it."""

    file: str
    problem: str
    remedy: Remedy = DAMAGED


@dataclass
class Findings:
    """What was checked, and all that is wrong. Threads add to it under `lock`.

    command              that made the result: pack or tokenize
    documents            of a tokenized directory; other results have rows
    documents_compared   of the inputs, encoded again
    records_drawn        of those, the ones that were drawn from the inputs and not from the rows
    documents_traced     of tokenized directories, encoded again from their own inputs
    units_packed_again   with `--sample all`: their rows and figures were made again
    """

    command: str = "pack"
    problems: list[Problem] = field(default_factory=list)
    shards: int = 0
    bytes: int = 0
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    documents_compared: int | None = None
    inputs_compared: int | None = None
    records_drawn: int | None = None
    documents_traced: int | None = None
    units_packed_again: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, file: str, *texts: str, remedy: Remedy = DAMAGED) -> None:
        with self.lock:
            self.problems.extend(Problem(file, text, remedy) for text in texts)

    def count(self, figure: str, more: int) -> None:
        """Add to one of the figures."""
        with self.lock:
            setattr(self, figure, (getattr(self, figure) or 0) + more)

    def lines(self, directory: Path) -> list[str]:
        """A line for each problem, or one that says what was checked."""
        if self.problems:
            return [f"{directory}: {one.file}: {one.problem}" for one in sorted(self.problems)]
        held = _counted(self.rows, "row") if self.rows else _counted(self.documents, "document")
        line = f"{directory}: {_counted(self.shards, 'shard')}, {held}: sound"
        if self.documents_compared is not None and self.inputs_compared is not None:
            documents = _counted(self.documents_compared, "document")
            inputs = _counted(self.inputs_compared, "input")
            read = "encoded again" if self.documents_traced is None else "read again"
            line += f"; {documents} of {inputs} {read}: the same"
        if self.records_drawn:
            line += f"; {_counted(self.records_drawn, 'record')} drawn from the inputs: found"
        if self.documents_traced:
            traced = _counted(self.documents_traced, "document")
            line += f"; {traced} encoded again from what was tokenized: the same"
        if self.units_packed_again:
            units, same = _counted(self.units_packed_again, "unit"), "packed again: the same rows"
            if self.command == "tokenize":
                same = "tokenized again: the same documents"
            line += f"; {units} {same}"
        return [line]

    def tip(self) -> str:
        """What to do about every kind of problem that there is."""
        remedies = sorted({problem.remedy for problem in self.problems})
        if len(remedies) == 1:
            return self._tip(remedies[0])
        return "; ".join(f"{remedy.kind}: {self._tip(remedy)}" for remedy in remedies)

    def _tip(self, remedy: Remedy) -> str:
        return remedy.tip.format(self.command)

    def as_json(self) -> dict[str, Any]:
        other = {"documents", "documents_traced"} if self.command == "pack" else {"rows"}
        if self.documents_traced is not None:
            other.discard("documents_traced")
        figures = {
            name: value for name, value in vars(self).items() if name not in _INTERNAL | other
        }
        figures["problems"] = [
            {"file": one.file, "problem": one.problem, "tip": self._tip(one.remedy)}
            for one in sorted(self.problems)
        ]
        return {"ok": not self.problems} | figures


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"
