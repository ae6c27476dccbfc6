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
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from altered import faulty
from stops import AB, BC, KILLS, PACK, TOKENIZE, WRITING, A, B, Kind, Stops, prepare
from support import contents, heavy, succeeds

from packer_cli.export import FORMATS
from packer_cli.result.layout import digest

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
PLAN = "plan in/lengths.csv --lengths n -l 64"
KINDS = {
    "new": Kind(PACK.format(AB)),
    "overwrite": Kind(PACK.format(AB) + " --overwrite", PACK.format(BC)),
    "add": Kind(PACK.format("in/c.jsonl") + " --add", PACK.format(AB)),
    "skip": Kind(PACK.format("in/bad.jsonl") + " --on-error skip --overwrite", PACK.format(B)),
    "stdin": Kind(PACK.format("-"), finished_is_refused=True),
    "tokenize": Kind(TOKENIZE.format(AB)),
    "tokenize, add": Kind(TOKENIZE.format(B) + " --add", TOKENIZE.format(A)),
    "tokens": Kind("pack in/a in/b -l 64"),
    "view": Kind("pack in/a in/b -l 64 --view --overwrite", "pack in/a -l 64 --view"),
    "recipe": Kind("pack mix.toml"),
    "recipe, overwrite": Kind("pack mix.toml --seed 7 --overwrite", "pack mix.toml"),
    "file URL": Kind(PACK.format(AB) + " --overwrite", PACK.format(BC), "file://HERE/out"),
    "export, overwrite": Kind("export in/rows --to trl --overwrite", "export in/rows --to numpy"),
    "plan": Kind(PLAN, out="out.parquet", finished_is_refused=True),
    "plan, overwrite": Kind(PLAN + " --overwrite", PLAN + " --seed 1", "out.parquet"),
}
SYNCED = ("add", "recipe", "export, trl")
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


@pytest.mark.parametrize("name", ["overwrite", *map(heavy, SYNCED)])
def test_every_sync_may_fail(inputs: Path, name: str) -> None:
    """What has not come to the disk is not taken as written, nor is it by the next command.

    Of three syncs of a run one fails, each of them where a hundred steps are tried.
    """
    kind = (KINDS | EXPORTS)[name]
    if kind.is_recipe:
        Path("mix.toml").write_text(RECIPE)
    command, out = kind.arguments(kind.command), Path("out")
    if kind.earlier:
        assert faulty("", *kind.arguments(kind.earlier), "-q").returncode == 0
        shutil.copytree(out, "earlier")
    assert faulty("", *command, "-q").returncode == 0
    whole, failed, held = contents(out), 0, 0
    for number in count(1, 1 if KILLS >= 100 or kind.is_export else 3):
        shutil.rmtree(out)
        if kind.earlier:
            shutil.copytree("earlier", out)
        done = faulty(f"fail_sync({number})", *command, "-q")
        failed += done.returncode
        held = 0 if done.returncode else held + 1
        if done.returncode:
            assert re.fullmatch(f"{WRITING}Input/output error\ntip: .+\n", done.stderr), done.stderr
        else:  # only cleaning up has failed, or there are no more
            assert contents(out).items() >= whole.items()
        for manifest in out.glob("manifest.json"):
            for shard in json.loads(manifest.read_bytes())["shards"]:
                assert digest(out / shard["file"])[1] == shard["sha256"]
        again = faulty("", *command, "-q")
        refused = kind.finished_is_refused and "holds a finished" in again.stderr
        assert again.returncode == 0 or refused, again.stderr
        assert contents(out) == whole
        if held == 2:
            break
    assert failed >= 4


@pytest.mark.parametrize("command", [PACK.format(AB), heavy(TOKENIZE.format(AB))])
def test_killed_at_random_moments_of_two_workers(
    inputs: Path, command: str, record_property: Callable[[str, object], None]
) -> None:
    """What was packed is not packed again."""
    random_, in_the_middle = random.Random(0), 0
    options = ["--unit-bytes", "1k", "--workers", "2", "-o"]
    succeeds(*command.split(), *options, "whole")
    units = len(json.loads(Path("whole/manifest.json").read_bytes())["units"])
    for kill in range(max(KILLS // 2, 20)):
        if in_the_middle and kill >= KILLS // 2:  # on a busy machine, one comes when all is packed
            break
        again = [*command.split(), *options, f"out{kill}"]
        unit, then = random_.randrange(1, units // 2), random_.uniform(0, 0.02)
        faulty(f"when_named('unit-', {unit}, lambda: kill_soon({then}))", *again)
        packed = len(list(Path(f"out{kill}").glob(".packer/*/unit-*.json")))
        in_the_middle += 0 < packed < units
        done = succeeds(*again)
        told = f"continuing: {packed} of {units} units are already packed"
        assert told in done.stderr or not 0 < packed < units
        assert contents(f"out{kill}") == contents("whole")
    assert in_the_middle
    record_property("stops", ({"kill": kill}, 0))


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
        succeeds(*then.split(), "-q", "-o", "out")
        assert left() == []
        shutil.rmtree("out")
    assert seen


@pytest.mark.parametrize(
    "command",
    [
        "verify out", "stats in/rows", "show in/view 0", "show in/rows --step 0 --ranks 2",
        "plan in/a.jsonl -l 64 -t bytes",
    ],
)  # fmt: skip
def test_what_only_reads_leaves_nothing(inputs: Path, command: str) -> None:
    skipped = PACK.format("in/bad.jsonl") + " --on-error skip -q -o out"
    succeeds(*skipped.split())
    done = faulty("at_step(1, kill)", *command.split())
    assert done.returncode == 0, done.stderr
