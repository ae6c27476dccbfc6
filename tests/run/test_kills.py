"""Whatever is written, a kill or a loss of power at any step leaves the earlier result or the new
one, touches nothing of others, and the same command goes on to the bytes of an undisturbed run.

PACKER_KILLS: about how many steps of each command are tried.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from altered import faulty
from support import contents, heavy, jsonl, packer, random_texts

from packer_cli.result.layout import digest

KILLS = int(os.environ.get("PACKER_KILLS", "4"))
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


class Kind(NamedTuple):
    """A command, and the one that has made what is there before; `out`: where it writes to."""

    command: str
    earlier: str = ""
    out: str = "out"
    finished_is_refused: bool = False  # by the same command again


ACTS = ("kill", "cut_power", "lose_blocks")  # of faults.py
AT_URL = "disk://HERE/out --staging staging"
PACK, TOKENIZE = ("pack {} -l 64 -t bytes", "tokenize {} -t bytes")
A, B, AB, BC = "in/a.jsonl", "in/b.jsonl", "in/a.jsonl in/b.jsonl", "in/b.jsonl in/c.jsonl"
KINDS = {
    "new": Kind(PACK.format(AB)),
    "overwrite": Kind(PACK.format(AB) + " --overwrite", PACK.format(BC)),
    "update": Kind(PACK.format(f"{A} {BC}") + " --update", PACK.format(AB)),
    "prune": Kind(PACK.format(BC) + " --update --prune", PACK.format(AB)),
    "add": Kind(PACK.format("in/c.jsonl") + " --add", PACK.format(AB)),
    "skip": Kind(PACK.format("in/bad.jsonl") + " --on-error skip --overwrite", PACK.format(B)),
    "stdin": Kind(PACK.format("-"), finished_is_refused=True),
    "tokenize": Kind(TOKENIZE.format(AB)),
    "tokenize, add": Kind(TOKENIZE.format(B) + " --add", TOKENIZE.format(A)),
    "tokens": Kind("pack in/a in/b -l 64"),
    "view": Kind("pack in/a in/b -l 64 --view --overwrite", "pack in/a -l 64 --view"),
    "recipe": Kind("pack mix.toml"),
    "recipe, overwrite": Kind("pack mix.toml --seed 7 --overwrite", "pack mix.toml"),
    "export": Kind("export in/rows --to trl", finished_is_refused=True),
    "export, overwrite": Kind("export in/rows --to trl --overwrite", "export in/rows --to numpy"),
    "URL": Kind(PACK.format(AB), out=AT_URL),
    "URL, overwrite": Kind(PACK.format(AB) + " --overwrite", PACK.format(BC), AT_URL),
    "URL, tokenize": Kind(TOKENIZE.format(AB), out=AT_URL),
    "URL, stdin": Kind(PACK.format("-"), out=AT_URL, finished_is_refused=True),
}


@pytest.fixture
def inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """in/ with files, tokenized directories and rows, in the directory where commands run."""
    monkeypatch.setattr("packer_cli.result.manifest._WAITS", 1)
    monkeypatch.setenv("STEPS", str(folder / "steps"))
    (folder / "work" / "in").mkdir(parents=True)
    monkeypatch.chdir("work")
    for number, name in enumerate(("a", "b", "c")):
        texts = random_texts(90 - 30 * number, 120, number, f"{name} ")
        Path(f"in/{name}.jsonl").write_bytes(jsonl(*texts))
    Path("in/bad.jsonl").write_bytes(b"{\n" + Path(A).read_bytes())
    done = [packer(*TOKENIZE.format(one).split(), "-q", "-o", one[:4]) for one in (A, B)]
    done.append(packer(*PACK.format(A).split(), "-q", "-o", "in/rows"))
    assert [one.exit_code for one in done] == [0] * 3
    yield folder
    os.chdir(folder)


def arguments(kind: Kind, command: str) -> list[str]:
    where = kind.out.replace("HERE", str(Path.cwd())).split()
    units = [] if command.startswith("export") else ["--unit-bytes", "3k", "--workers", "1"]
    return [*command.split(), *units, "-o", *where]


def undisturbed(kind: Kind, command: str) -> dict[str, bytes]:
    """What all of the files are afterwards."""
    done = faulty("at_step(0, kill)", *arguments(kind, command), "-q", stdin=Path(A).read_bytes())
    assert done.returncode == 0, done.stderr
    return there()


def there() -> dict[str, bytes]:
    """Every file, but for times: of tokenized sources, which every run writes anew."""
    files = contents(".")
    return {name: files[name] for name in files if "mix.toml" not in files or "times" not in name}


def put_back(start: Path) -> None:
    """What was there before the first command, and the inputs as they are."""
    for path in Path().iterdir():
        if path.name != "in":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(start, ".", dirs_exist_ok=True)


def assert_readable(kind: Kind, known: list[dict[str, bytes]]) -> bool:
    """A reader finds a result that is known, all of it, or is refused where it may be. Whether
    there is one.
    """
    files = there()
    if kind.command.startswith("export"):
        out = {name: data for name, data in files.items() if name.startswith("out/")}
        assert out in [{n: one[n] for n in one if n.startswith("out/")} for one in (*known, {})]
        return bool(out)
    manifests = [name for name in files if re.fullmatch("out/([a-z]+/)?manifest.json", name)]
    for name in manifests:
        assert files[name] in [one.get(name) for one in known]
        for shard in json.loads(files[name])["shards"]:
            assert digest(Path(name).parent / shard["file"]) == (shard["bytes"], shard["sha256"])
    told = packer("stats", "out", "--json")
    is_recipe = "mix.toml" in kind.command
    if told.exit_code:
        assert is_recipe or not kind.earlier, told.stderr
        assert re.search("are not of one run|has not finished|no such dir|no manifest", told.stderr)
        assert not is_recipe or "out/dataset_dict.json" not in files
    elif is_recipe:
        runs = [[one[name] for name in manifests if name in one] for one in known]
        assert [files[name] for name in manifests] in runs
    return not told.exit_code


def assert_no_leftovers() -> None:
    """Every shard that is in the output belongs to the result."""
    for manifest in Path("out").rglob("manifest.json"):
        listed = {shard["file"] for shard in json.loads(manifest.read_bytes())["shards"]}
        assert listed == {path.name for path in manifest.parent.glob("*.arrow")}
    assert not [*Path().rglob(".packer")]


def steps_tried(steps: int) -> list[int]:
    """Most are of the second half, in which results change places."""
    half, each = steps // 2, max(1, steps // KILLS)
    return [*range(1, half, 2 * each), *reversed(range(steps, half, -each))]


@pytest.mark.parametrize("name", KINDS)
def test_killed_at_every_step(inputs: Path, name: str) -> None:
    kind = KINDS[name]
    Path("notes.txt").write_bytes(b"mine")
    if "mix.toml" in kind.command:
        Path("mix.toml").write_text(RECIPE)
    if kind.earlier:
        undisturbed(kind, kind.earlier)
    if kind.earlier and not kind.command.startswith("export"):
        Path("out/notes.txt").write_bytes(b"mine")
    old = there()
    shutil.copytree(".", inputs / "start", ignore=shutil.ignore_patterns("in"))
    whole = undisturbed(kind, kind.command)
    assert whole != old
    assert {one: whole[one] for one in old if "notes.txt" in one} == {
        one: b"mine" for one in old if "notes.txt" in one
    }
    if not kind.command.startswith("export"):
        assert_no_leftovers()
    steps = int((inputs / "steps").read_text())
    assert steps > 10
    readable, unfinished, command = 0, 0, arguments(kind, kind.command)
    tried = steps_tried(steps)
    for number, step in enumerate(tried):
        put_back(inputs / "start")
        act = ACTS[(number + len(name)) % len(ACTS)]
        killed = faulty(f"at_step({step}, {act})", *command, "-q", stdin=Path(A).read_bytes())
        assert killed.returncode == -signal.SIGKILL, (step, killed.stderr)
        if number % 3 == 2:  # a copy: inodes and times tell nothing any more
            shutil.copytree(".", inputs / "copy", ignore=shutil.ignore_patterns("in"))
            put_back(inputs / "copy")
            shutil.rmtree(inputs / "copy")
        readable += assert_readable(kind, [old, whole])
        unfinished += there() not in (old, whole)
        packed = len(list(Path("out").glob(".packer/*/unit-*.json")))
        again = faulty("at_step(0, kill)", *command, stdin=Path(A).read_bytes())
        refused = kind.finished_is_refused and "holds a finished" in again.stderr
        assert again.returncode == 0 or refused, (step, act, again.stderr)
        if told := re.search(r"out: continuing: (\d+) of \d+ units", again.stderr):
            assert int(told[1]) >= packed, step
        assert there() == whole, (step, act)
        assert not [*Path().rglob(".packer")], (step, act)
    assert readable >= (len(tried) // 2 if kind.earlier else 1)
    assert unfinished


@pytest.mark.parametrize("command", [PACK.format(AB), heavy(TOKENIZE.format(AB))])
def test_killed_at_random_moments_of_two_workers(inputs: Path, command: str) -> None:
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


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails(inputs: Path, call: str) -> None:
    command = [*PACK.format(AB).split(), "--unit-bytes", "3k", "--workers", "1", "-o"]
    assert packer(*command, "whole").exit_code == 0
    for step in (5, 15):
        failed = faulty(f"at_step({step}, fail, [{call!r}])", *command, "out", "-q")
        assert failed.returncode == 1, failed.stderr
        assert failed.stderr.startswith("error: out"), failed.stderr
        assert "Input/output error" in failed.stderr
        assert not Path("out/manifest.json").exists()
        assert packer(*command, "out").exit_code == 0
        assert contents("out") == contents("whole")
        shutil.rmtree("out")
