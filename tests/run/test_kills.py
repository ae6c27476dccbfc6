"""Whatever is written, and whatever stops it before an operation that changes files (a kill, a loss
of power, a signal, a full disk, a disk that fails): the earlier result or the new one is there,
nothing of others is touched, and the same command goes on to the bytes of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from altered import faulty
from support import contents, heavy, jsonl, packer, random_texts

from packer_cli.export.formats import FORMATS
from packer_cli.result.layout import digest

# PACKER_KILLS: about how many steps of each command are tried.
KILLS = int(os.environ.get("PACKER_KILLS", "3"))
# Of faults.py, in turn: every other one leaves the run no time to tidy up.
ACTS = ("kill", "interrupt", "cut_power", "fill_disk", "lose_blocks", "terminate", "kill", "fail")
_WRITING = r"error: (mix\.toml, source '.': )?\S+: cannot [a-z]+: "
_ENDS = {  # exit codes, and lines that say why
    "interrupt": (130, "stopped: interrupted"),
    "terminate": (130, "stopped: interrupted"),
    "fill_disk": (1, _WRITING + "No space left on device"),
    "fail": (1, _WRITING + "Input/output error"),
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
    made = {
        "a": TOKENIZE.format(A), "b": TOKENIZE.format(B), "rows": PACK.format(A),
        "view": "pack in/a -l 64 --view",
    }  # fmt: skip
    for name, command in made.items():
        assert packer(*command.split(), "-q", "-o", f"in/{name}").exit_code == 0


class Kind(NamedTuple):
    """A command, and the one that has made what is there before; `out`: where it writes to."""

    command: str
    earlier: str = ""
    out: str = "out"
    finished_is_refused: bool = False  # by the same command again

    @property
    def is_export(self) -> bool:
        return self.command.startswith("export")

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
        self.kind, self._copy, self._start = kind, folder / "copy", folder / "start"
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
            out = {name: data for name, data in files.items() if name.startswith("out/")}
            assert out in [{n: one[n] for n in one if n.startswith("out/")} for one in (*known, {})]
            return bool(out)
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
            refused = "are not of one run|has not finished|no such dir|no manifest"
            assert re.search(refused, told.stderr), told.stderr
            assert not self.kind.is_recipe or "out/dataset_dict.json" not in files
        elif self.kind.is_recipe:
            runs = [[one[name] for name in manifests if name in one] for one in known]
            assert [files[name] for name in manifests] in runs
        return not told.exit_code


def there() -> dict[str, bytes]:
    """Every file and folder, but for times of tokenized sources, which every run writes anew, and
    what is left of objects that were never put.
    """
    found = contents(".") | {f"{path}/": b"" for path in Path().rglob("*") if path.is_dir()}
    is_recipe = "mix.toml" in found
    return {
        name: data
        for name, data in found.items()
        if not (name.startswith("tmp/put-") or (is_recipe and "times" in name))
    }


RECIPE = """
max_length = 64
tokenizer = "bytes"
tokenized = "tokens"
validation = {share = "30%"}
[[source]]
name = "a"
inputs = ["in/a.jsonl"]
epochs = 1
[[source]]
name = "b"
inputs = ["in/b.jsonl"]
epochs = 3
"""
AT_URL, STAGED = "disk://HERE/out", "disk://HERE/out --staging staging"
KINDS = {
    "new": Kind(PACK.format(AB)),
    "overwrite": Kind(PACK.format(AB) + " --overwrite", PACK.format(BC)),
    "update": Kind(PACK.format(f"{A} {BC}") + " --update", PACK.format(AB)),
    "prune": Kind(PACK.format(BC) + " --update --prune", PACK.format(AB)),
    "add": Kind(PACK.format("in/c.jsonl") + " --add", PACK.format(AB)),
    "skip": Kind(PACK.format("in/bad.jsonl") + " --on-error skip --overwrite", PACK.format(B)),
    "stdin": Kind(PACK.format("-"), finished_is_refused=True),
    "tokenize": Kind(TOKENIZE.format(AB)),
    "tokenize, update": Kind(TOKENIZE.format(AB) + " --update", TOKENIZE.format(A)),
    "tokenize, add": Kind(TOKENIZE.format(B) + " --add", TOKENIZE.format(A)),
    "tokens": Kind("pack in/a in/b -l 64"),
    "view": Kind("pack in/a in/b -l 64 --view --overwrite", "pack in/a -l 64 --view"),
    "recipe": Kind("pack mix.toml"),
    "recipe, overwrite": Kind("pack mix.toml --seed 7 --overwrite", "pack mix.toml"),
    "file URL": Kind(PACK.format(AB) + " --overwrite", PACK.format(BC), "file://HERE/out"),
    "URL": Kind(PACK.format(AB), out=AT_URL),
    "URL, overwrite": Kind(PACK.format(AB) + " --overwrite", PACK.format(BC), STAGED),
    "URL, tokenize": Kind(TOKENIZE.format(AB), out=STAGED),
    "URL, stdin": Kind(PACK.format("-"), out=AT_URL, finished_is_refused=True),
    "export, overwrite": Kind("export in/rows --to trl --overwrite", "export in/rows --to numpy"),
}
EXPORTS = {
    f"export, {to}": Kind(
        f"export in/{'view' if to == 'packed' else 'rows'} --to {to}", finished_is_refused=True
    )
    for to in FORMATS
}


@pytest.fixture
def inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    prepare(folder, monkeypatch)
    yield folder
    os.chdir(folder)


def assert_no_leftovers() -> None:
    """Every shard that is in the output belongs to the result."""
    for manifest in Path("out").rglob("manifest.json"):
        listed = {shard["file"] for shard in json.loads(manifest.read_bytes())["shards"]}
        assert listed == {path.name for path in manifest.parent.glob("*.arrow")}
    assert not [*Path().rglob(".packer")]


@pytest.mark.parametrize("name", [*KINDS, *map(heavy, EXPORTS)])
def test_stopped_at_every_step(
    inputs: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    kind = (KINDS | EXPORTS)[name]
    Path("notes.txt").write_bytes(b"mine")
    if kind.is_recipe:
        Path("mix.toml").write_text(RECIPE)
    stops = Stops(kind, inputs)
    mine = {one: b"mine" for one in stops.old if "notes.txt" in one}
    assert {one: stops.whole[one] for one in mine} == mine
    if not kind.is_export:
        assert_no_leftovers()
    assert stops.steps > 10
    stops.try_all(record_property)
    assert stops.problems == []
    assert stops.readable >= (stops.tried.total() // 2 if kind.earlier else 1)
    assert stops.unfinished


@pytest.mark.parametrize("command", [PACK.format(AB), heavy(TOKENIZE.format(AB))])
def test_killed_at_random_moments_of_two_workers(
    inputs: Path, command: str, record_property: Callable[[str, object], None]
) -> None:
    """What was packed is not packed again."""
    random_, in_the_middle = random.Random(0), 0
    options = ["--unit-bytes", "1k", "--workers", "2", "-o"]
    assert packer(*command.split(), *options, "whole").exit_code == 0
    units = len(json.loads(Path("whole/manifest.json").read_bytes())["units"])
    for kill in range(KILLS // 2):
        again = [*command.split(), *options, f"out{kill}"]
        unit, then = random_.randrange(1, units // 2), random_.uniform(0, 0.02)
        faulty(f"when_named('unit-', {unit}, lambda: kill_soon({then}))", *again)
        packed = len(list(Path(f"out{kill}").glob(".packer/*/unit-*.json")))
        in_the_middle += 0 < packed < units
        done = packer(*again)
        assert done.exit_code == 0, done.stderr
        told = f"continuing: {packed} of {units} units are already packed"
        assert told in done.stderr or not 0 < packed < units
        assert contents(f"out{kill}") == contents("whole")
    assert in_the_middle
    record_property("stops", ({"kill": KILLS // 2}, 0))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (PACK.format(A), TOKENIZE.format(B)), (TOKENIZE.format(A), "export in/rows --to trl"),
        (PACK.format(A), "pack mix.toml"),
        ("export in/rows --to trl", "export in/rows --to numpy"),
    ],
)  # fmt: skip
def test_what_a_kill_at_the_beginning_leaves_goes_with_another_command(
    inputs: Path, first: str, then: str
) -> None:
    Path("mix.toml").write_text(RECIPE)
    seen = 0

    def left() -> list[Path]:
        return [path for path in Path().rglob("*.packer*") if path.is_dir()]

    for step in (3, 4, 5, 8):
        assert faulty(f"at_step({step}, kill)", *first.split(), "-o", "out").returncode == -9
        seen += bool(left())
        done = packer(*then.split(), "-q", "-o", "out")
        assert done.exit_code == 0, done.stderr
        assert left() == []
        shutil.rmtree("out")
    assert seen


@pytest.mark.parametrize(
    "command",
    [
        "verify out --against-inputs --sample all", "stats in/rows", "show in/view 0",
        "trace in/rows --step 0 --ranks 2", "plan in/a.jsonl -l 64 -t bytes",
    ],
)  # fmt: skip
def test_what_only_reads_leaves_nothing(inputs: Path, command: str) -> None:
    skipped = PACK.format("in/bad.jsonl") + " --on-error skip -q -o out"
    assert packer(*skipped.split()).exit_code == 0
    done = faulty("at_step(1, kill)", *command.split())
    assert done.returncode == 0, done.stderr
