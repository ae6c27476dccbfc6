"""What `packer verify` is asked to compare, and what it has found."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packer_cli.errors import DataError, Interrupted
from packer_cli.records import Notify
from packer_cli.result.layout import digest
from packer_cli.result.wording import plural

# A kind of problem, and what to do about it; {} is the command that makes such results.
DAMAGED, FOREIGN, CHANGED, DIFFERENT = TIPS = {
    "a damaged result": "copy the directory again, or move what is damaged and {} again with "
    "--overwrite",
    "foreign files": "move them elsewhere: trainers may take them for part of the result",
    "changed inputs": "restore them, or name them after --against-inputs if they have moved, or "
    "need credentials, which no manifest keeps; or run packer {} --add with them as they are now",
    "a result that differs from what its inputs and options give": "{} again with --overwrite; if "
    "that differs, too, report it as a bug in packer",
}


class Problem(NamedTuple):
    """A problem, the file that it is in, and its kind: one of `TIPS`."""

    file: str
    problem: str
    kind: str = DAMAGED


class Findings:
    """What was checked, and all that is wrong. Threads add to it under `lock`.

    command  that made the result: pack or tokenize
    stop     set when the check is to end early
    figures  what was checked: shards, their bytes, tokens, and rows or documents; and
             `units_packed_again`, None where inputs were not asked for
    """

    def __init__(
        self,
        command: str,
        notify: Notify = lambda message: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.command, self.notify, self.stop = command, notify, stop or threading.Event()
        self.lock = threading.Lock()
        self.problems: list[Problem] = []
        self._held = "document" if command == "tokenize" else "row"
        self.figures: dict[str, int | None] = dict.fromkeys(
            ("shards", "bytes", f"{self._held}s", "tokens"), 0
        )
        self.figures["units_packed_again"] = None

    def add(self, file: str, *texts: str, kind: str = DAMAGED) -> None:
        with self.lock:
            self.problems.extend(Problem(file, text, kind) for text in texts)

    def count(self, figure: str, more: int) -> None:
        with self.lock:
            self.figures[figure] = (self.figures.get(figure) or 0) + more

    def stop_if_asked(self) -> None:
        """Raise Interrupted once `stop` is set."""
        if self.stop.is_set():
            raise Interrupted("stopped")

    def is_as_listed(
        self, name: str, path: Path | str, sha256: str, size: int | None = None,
        kind: str = DAMAGED,
    ) -> bool:  # fmt: skip
        """Whether a file is there with its digest and size; if not, that is added as a problem."""
        try:
            now = digest(path, self.stop.is_set, size)
            self.stop_if_asked()
            text = f"its sha256 is {now[1]}, the manifest says {sha256}"
            if size not in (None, now[0]):
                text = f"has {now[0]} bytes, the manifest says {size}"
            elif now[1] == sha256:
                return True
        except DataError as error:
            text = error.message.removeprefix(f"{path}: ")
        self.add(name, text, kind=kind)
        return False

    def lines(self, directory: Path) -> list[str]:
        """A line for each problem, or one that says what was checked."""
        if self.problems:
            return [f"{directory}: {one.file}: {one.problem}" for one in sorted(self.problems)]
        shards, held = self.figures["shards"] or 0, self.figures[f"{self._held}s"] or 0
        line = f"{directory}: {plural(shards, 'shard')}, {plural(held, self._held)}: OK"
        if (units := self.figures["units_packed_again"]) is not None:
            again = "tokenized" if self.command == "tokenize" else "packed"
            line += f"; {plural(units, 'unit')} {again} again: the same {self._held}s"
        return [line]

    def tip(self) -> str:
        """What to do about every kind of problem that there is."""
        kinds = sorted({problem.kind for problem in self.problems})
        tips = [TIPS[kind].format(self.command) for kind in kinds]
        named = "; ".join(f"{kind}: {tip}" for kind, tip in zip(kinds, tips, strict=True))
        return tips[0] if len(tips) == 1 else named

    def as_json(self) -> dict[str, Any]:
        problems = [
            {"file": file, "problem": problem, "tip": TIPS[kind].format(self.command)}
            for file, problem, kind in sorted(self.problems)
        ]
        return {"ok": not problems, "problems": problems, **self.figures}


class Against(NamedTuple):
    """What a result is compared with.

    inputs  where inputs are now, if not where the manifest says
    sample  how many documents the units that are packed again have; None: all units are
    seed    of the sample
    """

    inputs: Sequence[str] = ()
    sample: int | None = None
    seed: int = 0
