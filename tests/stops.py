"""A command is stopped before one of the operations by which it changes files, and what then is
there is looked at; the same command goes on to the bytes of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from altered import faulty
from support import contents, jsonl, packer, random_texts, succeeds

from packer_cli.result.layout import digest

# PACKER_KILLS: about how many steps of each command are tried.
KILLS = int(os.environ.get("PACKER_KILLS", "3"))
# Of faults.py, in turn: every other one leaves the run no time to tidy up.
ACTS = ("kill", "interrupt", "cut_power", "fill_disk", "lose_blocks", "terminate", "kill", "fail")
WRITING = r"error: (mix\.toml, source '.': )?\S+: cannot [a-z]+: "
_ENDS = {  # exit codes, and lines that say why
    "interrupt": (130, "stopped: interrupted"),
    "terminate": (130, "stopped: interrupted"),
    "fill_disk": (1, WRITING + "No space left on device"),
    "fail": (1, WRITING + "Input/output error"),
}
PACK, TOKENIZE = "pack {} -l 64 -t bytes", "tokenize {} -t bytes"
A, B, AB, BC = "in/a.jsonl", "in/b.jsonl", "in/a.jsonl in/b.jsonl", "in/b.jsonl in/c.jsonl"


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make in/ with files, tokenized directories, rows and a view, in the directory where commands
    run, and tmp/ for what is temporary.
    """
    monkeypatch.setattr("packer_cli.result.manifest._WAITS", 1)
    monkeypatch.setenv("STEPS", str(folder / "steps"))
    monkeypatch.setenv("TMPDIR", str(folder / "work" / "tmp"))
    for name in ("in", "tmp"):
        (folder / "work" / name).mkdir(parents=True)
    monkeypatch.chdir("work")
    for number, name in enumerate(("a", "b", "c")):
        texts = random_texts(90 - 30 * number, 120, number, f"{name} ")
        Path(f"in/{name}.jsonl").write_bytes(jsonl(*texts))
    Path("in/bad.jsonl").write_bytes(b"{\n" + Path(A).read_bytes())
    Path("in/lengths.csv").write_text("\n".join(["n", *(str(n % 61) for n in range(20_000))]))
    made = {
        "a": TOKENIZE.format(A), "b": TOKENIZE.format(B), "rows": PACK.format(A),
        "view": "pack in/a -l 64 --view",
    }  # fmt: skip
    for name, command in made.items():
        succeeds(*command.split(), "-q", "-o", f"in/{name}")


class Kind(NamedTuple):
    """A command, and the one that has made what is there before; `out`: where it writes to."""

    command: str
    earlier: str = ""
    out: str = "out"
    finished_is_refused: bool = False  # by the same command again

    @property
    def is_export(self) -> bool:
        """True for an output that is there all at once: an export, or the file of a plan."""
        return self.command.startswith(("export", "plan"))

    @property
    def is_recipe(self) -> bool:
        return "mix.toml" in self.command

    def arguments(self, command: str) -> list[str]:
        units = [] if self.is_export else ["--unit-bytes", "3k", "--workers", "1"]
        return [*command.split(), *units, "-o", *self.out.replace("HERE", os.getcwd()).split()]


class Stops:
    """Runs of a kind of command, in a directory that is as it is now before each.

    tried     stops, by what stopped them
    problems  what did not hold
    readable  after how many a result was there; unfinished: neither the earlier one nor the new
    """

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self._copy = kind, folder / "copy"
        self._start = folder / "start"
        self._command = kind.arguments(kind.command)
        if kind.earlier:
            self._undisturbed(kind.earlier)
        if kind.earlier and not kind.is_export:
            Path("out/notes.txt").write_bytes(b"mine")
        self.old = there()
        shutil.copytree(".", self._start, ignore=shutil.ignore_patterns("in"))
        self.whole = self._undisturbed(kind.command)
        self.steps = int(Path(os.environ["STEPS"]).read_text())
        self.tried, self.problems = Counter[str](), list[str]()
        self.readable, self.unfinished = 0, 0

    def _undisturbed(self, command: str) -> dict[str, bytes]:
        """What all of the files are afterwards."""
        done = self._run("at_step(0, kill)", *self.kind.arguments(command), "-q")
        assert done.returncode == 0, done.stderr
        return there()

    def _run(self, fault: str, *command: str) -> subprocess.CompletedProcess[str]:
        return faulty(fault, *command, stdin=Path(A).read_bytes())

    def try_all(self, record_property: Callable[[str, object], None]) -> None:
        """Most steps are of the second half, in which results change places; where there are fewer
        than KILLS, each is tried again with other acts.
        """
        half, each = self.steps // 2, max(1, self.steps // KILLS)
        steps = [*range(1, half, 2 * each), *reversed(range(self.steps, half, -each))]
        steps *= max(1, KILLS // self.steps)
        first = 2 * sum(map(ord, self.kind.command + self.kind.out)) + 1
        for number, step in enumerate(steps, first):
            act = ACTS[number % len(ACTS)]
            self.tried[act] += 1
            try:
                self._try(step, act, is_copied=number % 3 == 2)
            except AssertionError as error:
                self.problems.append(f"{act} at {step} of {self.steps}: {error}")
        record_property("stops", (dict(self.tried), len(self.problems)))

    def _try(self, step: int, act: str, *, is_copied: bool) -> None:
        self._put_back(self._start)
        stopped = self._run(f"at_step({step}, {act})", *self._command, "-q")
        code, said = _ENDS.get(act, (-signal.SIGKILL, ""))
        if code == 1 and stopped.returncode == 0:  # only cleaning up has failed
            assert self.whole.items() <= there().items()
        else:
            assert stopped.returncode == code, stopped
            assert re.fullmatch(f"{said}\ntip: .+\n" if said else "", stopped.stderr), stopped
        if is_copied:  # inodes and times tell nothing any more
            shutil.copytree(".", self._copy, ignore=shutil.ignore_patterns("in"))
            self._put_back(self._copy)
            shutil.rmtree(self._copy)
        self.readable += self._is_readable()
        self.unfinished += there() not in (self.old, self.whole)
        packed = len(list(Path("out").glob(".packer/*/unit-*.json")))
        again = self._run("at_step(0, kill)", *self._command)
        refused = self.kind.finished_is_refused and "holds a finished" in again.stderr
        assert again.returncode == 0 or refused, again.stderr
        if told := re.search(r"out: continuing: (\d+) of \d+ units", again.stderr):
            assert int(told[1]) >= packed, again.stderr
        now = there()
        assert now == self.whole, sorted(
            name for name in {*now, *self.whole} if now.get(name) != self.whole.get(name)
        )

    def _put_back(self, start: Path) -> None:
        """What was there before the first command, and the inputs as they are."""
        for path in Path().iterdir():
            if path.name != "in":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(start, ".", dirs_exist_ok=True)

    def _is_readable(self) -> bool:
        """A reader finds a result that is known, all of it, or is refused where it may be. Whether
        there is one.
        """
        files, known = there(), [self.old, self.whole]
        if self.kind.is_export:
            parts = [
                {name: one[name] for name in one if name.split("/")[0] == self.kind.out}
                for one in (files, *known, {})
            ]
            assert parts[0] in parts[1:]
            return bool(parts[0])
        manifests = [name for name in files if re.fullmatch("out/([a-z]+/)?manifest.json", name)]
        for name in manifests:
            assert files[name] in [one.get(name) for one in known]
            for shard in json.loads(files[name])["shards"]:
                assert digest(Path(name).parent / shard["file"]) == (
                    shard["bytes"],
                    shard["sha256"],
                )
        told = packer("stats", "out", "--json")
        if told.exit_code:
            assert self.kind.is_recipe or not self.kind.earlier, told.stderr
            refused = "come from different runs|has not finished|no such dir|no manifest"
            assert re.search(refused, told.stderr), told.stderr
            assert not self.kind.is_recipe or "out/dataset_dict.json" not in files
        elif self.kind.is_recipe:
            runs = [[one[name] for name in manifests if name in one] for one in known]
            assert [files[name] for name in manifests] in runs
        return not told.exit_code


def there() -> dict[str, bytes]:
    """Every file and folder, but for what is left of objects that were never put."""
    found = contents(".") | {f"{path}/": b"" for path in Path().rglob("*") if path.is_dir()}
    return {name: data for name, data in found.items() if not name.startswith("tmp/put-")}
