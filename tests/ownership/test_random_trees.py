"""Commands among random trees of foreign files, which they leave alone, also when they are killed.

PACKER_TREES: how many random trees of files, folders and links are tried.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from owning import killed
from support import jsonl, packer

from packer_cli.ownership import ID

pytestmark = pytest.mark.usefixtures("folder")
TREES = int(os.environ.get("PACKER_TREES", "30"))


NAMES = (
    ".packer", ".packer/lock", ".packer/run.json", f".packer/{ID}/notes",
    f".packer/{ID}/run.json.part", f".packer/{'a' * 32}/lock",
    ".packer/manifest.json", ".packer/notes",
    "manifest.json", "manifest.incomplete.json", "state.json", "dataset_info.json", "units.jsonl",
    "input_times.json", "rejected.jsonl", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "shard-00000-000.arrow", "shard-00000-000.arrow.part",
    "shard-99999-999.arrow", "notes.txt", "folder/notes.txt", ".packer-export.json",
    "input_ids.npy", "labels.npy", "lock", "staged.json", "result", "result/manifest.json", "old/x",
    "publishing.json", ".packer/publishing.json", "squared_lengths.npy",
)  # fmt: skip
PLACES = ("out", "staging", "remote", "exported", "exported.packer-partial", "out/.packer", "")
COMMANDS: tuple[tuple[str, ...], ...] = (
    *(("pack", "in/a.jsonl", "-o", "out", *more)
      for more in ((), ("--overwrite",), ("--on-error", "skip", "--overwrite"), ("--add",))),
    ("pack", "in/a.jsonl", "in/b.jsonl", "-o", "out", "--update"),
    ("pack", "in/b.jsonl", "-o", "out", "--update", "--prune"),
    ("pack", "in/a.jsonl", "-o", "disk://HERE/remote", "--staging", "staging"),
    ("pack", "in/b.jsonl", "-o", "disk://HERE/remote", "--staging", "staging", "--overwrite"),
    ("finalize", "out"),
    ("export", "source", "--to", "numpy", "-o", "exported"),
    ("export", "source", "--to", "parquet", "-o", "exported", "--overwrite"),
)  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What packer has made: a result, an unfinished run, an export, a staging directory."""
    folder = tmp_path_factory.mktemp("prepared")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("in").mkdir()
        Path("in/a.jsonl").write_bytes(jsonl(*[f"text {i}" for i in range(60)]))
        Path("in/b.jsonl").write_bytes(jsonl(*[f"other {i}" for i in range(60)]))
        options = ["-l", "32", "-t", "bytes", "-q", "--unit-bytes", "500"]
        assert packer("pack", "in/a.jsonl", *options, "-o", "source").exit_code == 0
        command = ["export", "source", "--to", "numpy", "-q", "-o", "export"]
        assert packer(*command).exit_code == 0
        for step in (30, 80):  # amid units, and while the result is put in place
            killed(["pack", "in/a.jsonl", *options, "-o", f"killed{step}"], step)
        remote = ["-o", f"disk://{folder}/remote", "--staging", "staging"]
        killed(["pack", "in/a.jsonl", *options, *remote], 120)  # amid its upload
        for unfinished in ("killed30", "killed80", "staging", "remote"):
            assert Path(unfinished, ".packer").exists()
    finally:
        os.chdir(before)
    return folder


def tree(random_: random.Random, prepared: Path) -> None:
    """What packer has made, in some of the places, and foreign things in and around them."""
    shutil.copytree(prepared / "in", "in")
    shutil.copytree(prepared / "source", "source")
    made = {
        "out": ("source", "killed30", "killed80"),
        "exported": ("export",),
        "staging": ("staging",),
        "remote": ("remote", "source"),
    }
    for place, sources in made.items():
        source = prepared / random_.choice(sources)
        if random_.random() < 0.6 and source.exists():
            shutil.copytree(source, place, symlinks=True)
        elif random_.random() < 0.5:
            Path(place).mkdir()
    Path("important").mkdir()
    Path("important/file").write_bytes(b"important")
    Path("thesis.tex").write_bytes(b"thesis")


def plant(random_: random.Random) -> dict[str, str]:
    """Foreign files, folders and links, by where they are and what they are."""
    foreign = {
        "important/file": seen(Path("important/file")),
        "thesis.tex": seen(Path("thesis.tex")),
    }
    for _ in range(random_.randrange(1, 6)):
        path = Path(random_.choice(PLACES), random_.choice(NAMES))
        if any(parent.is_symlink() or parent.is_file() for parent in path.parents):
            continue
        if path.is_dir() and not path.is_symlink():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        kind = random_.randrange(4)
        if path.name == "run.json.part":  # a file of that name would be packer's
            kind = 3
        if kind == 0:
            path.mkdir()
            path = path / "inside"
        if kind < 2:
            path.write_bytes(b"mine: " + random_.randbytes(8).hex().encode())
        else:
            target = random_.choice(["important", "important/file", "thesis.tex", "nowhere"])
            path.symlink_to(Path.cwd() / target)
        foreign[str(path)] = seen(path)
    return {name: what for name, what in foreign.items() if seen(Path(name)) == what}


def seen(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    return path.read_bytes().decode("latin-1") if path.is_file() else "nothing"


def test_random_trees(folder: Path, prepared: Path) -> None:
    """Every command, killed at some step or not: every foreign byte is where it was."""
    succeeded, refused = 0, 0
    for number in range(TREES):
        random_ = random.Random(number)
        place = folder / "tree"
        place.mkdir()
        os.chdir(place)
        tree(random_, prepared)
        foreign = plant(random_)
        for _ in range(random_.randrange(1, 4)):
            command = [part.replace("HERE", str(place)) for part in random_.choice(COMMANDS)]
            command += ["-l", "32", "-t", "bytes", "--unit-bytes", "500"] * (command[0] == "pack")
            command += ["-q"] * (command[0] != "finalize")
            if random_.random() < 0.3:
                killed(command, random_.randrange(1, 220))
                done = None
            else:
                done = packer(*command)
                assert done.exit_code in (0, 1, 2), (number, command, done.stderr)
                succeeded += done.exit_code == 0
                refused += done.exit_code == 2
            for name, what in foreign.items():
                error = "" if done is None else done.stderr
                assert seen(Path(name)) == what, (number, command, name, what, error)
        os.chdir(folder)
        shutil.rmtree(place)
    assert succeeded > TREES // 8
    assert refused > TREES // 8
