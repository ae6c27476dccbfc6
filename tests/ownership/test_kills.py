"""Whatever is written, a kill at any step leaves the earlier one or the new one, and the same
command goes on to the bytes of a run that nobody disturbed.

PACKER_KILLS: about how many steps of each command are tried.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from owning import killed
from shop import OTHERS, TEXTS
from support import contents, jsonl, packer

from packer_cli import open_packed
from packer_cli.result.layout import digest
from packer_cli.result.manifest import is_manifest

KILLS = int(os.environ.get("PACKER_KILLS", "8"))
_PACK = ("pack", "a.jsonl", "-l", 64)
COMMANDS: dict[str, tuple[object, ...]] = {
    "pack": _PACK,
    "tokenize": ("tokenize", "a.jsonl"),
    "stdin": ("pack", "-", "-l", 64),
    "export": ("export", "source", "--to", "trl"),
}
MORE = ("-t", "bytes", "--unit-bytes", 9000, "--workers", 1)


@pytest.fixture(autouse=True)
def _inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", str(folder / "steps"))
    Path("a.jsonl").write_bytes(jsonl(*TEXTS[:200]))
    Path("b.jsonl").write_bytes(jsonl(*OTHERS[:200]))
    assert packer("pack", "a.jsonl", "-l", 64, *MORE, "-q", "-o", "source").exit_code == 0


@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
@pytest.mark.parametrize("earlier", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize(
    ("what", "store"),
    [("pack", ""), ("export", ""), ("pack", "disk"), ("tokenize", "disk"), ("stdin", "disk")],
)
def test_killed_at_any_step(what: str, store: str, earlier: bool, copied: bool) -> None:
    """`copied`: what a kill left is copied, so inodes and times tell nothing any more."""
    if copied and (store or not earlier or what == "export"):
        return
    old = made(what, store, "old", "b.jsonl") if earlier else {}
    whole = made(what, store, "whole", "a.jsonl")
    assert old != whole
    steps = int(Path("steps").read_text())
    assert steps > 10
    unfinished = 0
    for step in range(1, steps + 1, max(1, steps // KILLS)):
        if earlier:
            shutil.copytree("old", "out", copy_function=shutil.copy2)
        given = command(what, store, "out", "a.jsonl", earlier)
        done = killed(given, step, stdin()).returncode
        assert done == -signal.SIGKILL or step > steps - 5
        if copied:
            shutil.copytree("out", "copy", copy_function=shutil.copy2)
            shutil.rmtree("out")
            Path("copy").rename("out")
        left = contents("out") if Path("out").exists() else {}
        unfinished += left not in (old, whole)
        if what == "export":
            assert left in (old, whole), step
        elif is_manifest("out/manifest.json"):
            assert left["manifest.json"] in (old.get("manifest.json"), whole["manifest.json"]), step
            if what == "pack":
                for shard in open_packed("out").facts.shards:
                    assert digest(Path("out", shard.file)) == (shard.bytes, shard.sha256), step
        again = killed(given, 0, stdin())
        may_refuse = what in ("stdin", "export") and "holds a finished" in again.stderr
        assert again.returncode == 0 or may_refuse, (step, again.stderr)
        assert contents("out") == whole, step
        assert {path.name for path in Path().iterdir()} <= KNOWN, step
        shutil.rmtree("out")
    assert unfinished or what == "export"


KNOWN = {"a.jsonl", "b.jsonl", "source", "old", "whole", "out", "steps"}


def made(what: str, store: str, out: str, source: str) -> dict[str, bytes]:
    """What the command writes that is not killed; of the exports one is of another format."""
    given = command(what, store, out, source, False)
    given = [("numpy" if out == "old" else one) if one == "trl" else one for one in given]
    assert killed(given, 0, stdin(source)).returncode == 0
    return contents(out)


def command(what: str, store: str, out: str, source: str, overwrite: bool) -> list[object]:
    given = [source if one == "a.jsonl" else one for one in COMMANDS[what]]
    more: list[object] = [*MORE] if what != "export" else []
    more += ["--staging", "staging"] if store else []
    more += ["--overwrite"] if overwrite else []
    return [*given, *more, "-q", "-o", f"{store}://{Path.cwd()}/{out}" if store else out]


def stdin(source: str = "a.jsonl") -> bytes:
    return Path(source).read_bytes()
