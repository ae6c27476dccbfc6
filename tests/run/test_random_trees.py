"""Commands among random trees of foreign files, which they leave alone, also when they are killed.

PACKER_TREES: how many random trees of files, folders, links and pipes are tried.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from altered import faulty
from support import jsonl, packer, succeeds

from packer_cli.result.layout import ID

pytestmark = pytest.mark.usefixtures("folder")
UNRECORDED = (".packer-export",)  # what they hold is told by itself
TREES = int(os.environ.get("PACKER_TREES", "20"))


NAMES = (
    ".packer", ".packer/lock", ".packer/run.json", f".packer/{ID}/notes",
    f".packer/{ID}/run.json.part", f".packer/{'a' * 32}/lock",
    ".packer/manifest.json", ".packer/notes",
    "manifest.json", "manifest.incomplete.json", "state.json", "dataset_info.json", "units.jsonl",
    "rejected.jsonl", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "shard-00000-000.arrow", "shard-00000-000.arrow.part",
    "shard-99999-999.arrow", "notes.txt", "folder/notes.txt", ".packer-export",
    "input_ids.npy", "labels.npy", "lock", "staged.json", "result", "result/manifest.json", "old/x",
    "squared_lengths.npy", "weights.npy",
    f"{ID}/notes", f"{ID}/new/notes", f"{ID}/new/weights.npy", f"{ID}/new/train/notes",
    "train/notes", "documents-00000-000.arrow", "dataset_dict.json", "validation/notes.txt",
)  # fmt: skip
PLACES = (
    "out", "out/train", "exported", "exported.packer-partial", "out/.packer",
    "mixed", "",
)  # fmt: skip
BYTES = "-t bytes --unit-bytes 500 -q"
COMMANDS = """
pack in/a.jsonl -l 32 -o out BYTES
pack in/a.jsonl -l 32 -o out --overwrite BYTES
pack in/a.jsonl -l 32 -o out --on-error skip --overwrite BYTES
pack in/a.jsonl -l 32 -o out --add BYTES
pack in/a.jsonl in/b.jsonl -l 32 -o out --add BYTES
pack in/a.jsonl -l 32 -o file://HERE/out --overwrite BYTES
tokenize in/a.jsonl -o out --overwrite BYTES
pack tokens -l 32 -o file://HERE/out --overwrite -q
pack tokens -l 32 --view -o out --overwrite -q
pack mix.toml -o out --overwrite -q
export source --to numpy -o exported -q
export source --to parquet -o exported --overwrite -q
export source --to llamafactory -o file://HERE/exported --overwrite -q
export view --to packed -o exported --overwrite -q
""".strip().splitlines()
RECIPE = """
max_length = 32
tokenizer = "bytes"
tokenized = "mixed"
validation = {share = "30%"}
[[source]]
name = "a"
inputs = ["in/a.jsonl"]
"""


def arguments(command: str) -> list[str]:
    return command.replace("BYTES", BYTES).replace("HERE", str(Path.cwd())).split()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What packer has made: a result, an unfinished run, an export."""
    folder = tmp_path_factory.mktemp("prepared")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("in").mkdir()
        Path("in/a.jsonl").write_bytes(jsonl(*[f"text {i}" for i in range(60)]))
        Path("in/b.jsonl").write_bytes(jsonl(*[f"other {i}" for i in range(60)]))
        Path("mix.toml").write_text(RECIPE)
        for command in (
            "pack in/a.jsonl -l 32 -o source BYTES",
            "tokenize in/a.jsonl -o tokens BYTES",
            "pack tokens -l 32 --view -o view -q",
            "pack mix.toml -o halves -q",
            "export source --to numpy -o numpy -q",
            "export source --to llamafactory -o llamafactory -q",
        ):
            succeeds(*arguments(command))
        for step in (30, 80):  # amid units, and while the result is put in place
            faulty(
                f"at_step({step}, kill)", *arguments(f"pack in/a.jsonl -l 32 -o killed{step} BYTES")
            )
        faulty("at_step(18, kill)", *arguments("export source --to numpy -o killed -q"))
        assert Path("killed.packer-partial", ID, "new", "packer.json").exists()
        for unfinished in ("killed30", "killed80"):
            assert Path(unfinished, ".packer").exists()
    finally:
        os.chdir(before)
    return folder


def tree(random_: random.Random, prepared: Path) -> None:
    """What packer has made, in some of the places, and foreign things in and around them."""
    for name in ("in", "source", "tokens", "view"):
        shutil.copytree(prepared / name, name)
    Path("mix.toml").write_text(RECIPE)
    made = {
        "out": ("source", "killed30", "killed80", "tokens", "halves"),
        "exported": ("numpy", "llamafactory", "source"),
        "exported.packer-partial": ("killed.packer-partial",),
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
    """Foreign files, folders, links and pipes, and files of results that somebody has changed, by
    where they are and what they are.
    """
    foreign = {
        "important/file": seen(Path("important/file")),
        "thesis.tex": seen(Path("thesis.tex")),
    }
    for _ in range(random_.randrange(1, 6)):
        path = Path(random_.choice(PLACES), random_.choice(NAMES))
        if any(parent.is_symlink() or parent.exists() > parent.is_dir() for parent in path.parents):
            continue
        if path.is_dir() and not path.is_symlink():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        kind = random_.randrange(5)
        if path.name == "run.json.part":  # a file of that name would be packer's
            kind = 3
        if kind == 0:
            path.mkdir()
            path = path / "inside"
        if kind < 2:
            path.write_bytes(b"mine: " + random_.randbytes(8).hex().encode())
        elif kind == 2:
            os.mkfifo(path)
        else:
            target = random_.choice(["important", "important/file", "thesis.tex", "nowhere"])
            path.symlink_to(Path.cwd() / target)
        foreign[str(path)] = seen(path)
    result = Path(random_.choice(("out", "exported")))
    if files := [path for path in sorted(result.rglob("*")) if is_recorded(path)]:
        path = random_.choice(files)
        path.write_bytes(path.read_bytes() + b"!")
        foreign[str(path)] = seen(path)
    return {name: what for name, what in foreign.items() if seen(Path(name)) == what}


def is_recorded(path: Path) -> bool:
    """Whether it is a file whose size packer has recorded, in its place."""
    is_plain = path.is_file() and not path.is_symlink() and path.stat().st_size > 0
    return is_plain and ".packer" not in path.parts and path.name not in UNRECORDED


def seen(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_fifo():
        return "pipe"
    return path.read_bytes().decode("latin-1") if path.is_file() else "nothing"


def test_random_trees(folder: Path, prepared: Path) -> None:
    """Every command, killed at some step or not: every foreign byte is where it was."""
    ended: dict[int, Counter[str]] = {0: Counter(), 1: Counter(), 2: Counter()}
    for number in range(TREES):
        random_ = random.Random(number)
        place = folder / "tree"
        place.mkdir()
        os.chdir(place)
        tree(random_, prepared)
        foreign = plant(random_)
        for _ in range(random_.randrange(1, 4)):
            line = random_.choice(COMMANDS)
            command, error = arguments(line), ""
            if random_.random() < 0.3:
                faulty(f"at_step({random_.randrange(1, 220)}, kill)", *command)
            else:
                done = packer(*command)
                error = done.stderr
                assert done.exit_code in ended, (number, line, error)
                ended[done.exit_code][line] += 1
            for name, what in foreign.items():
                assert seen(Path(name)) == what, (number, line, name, what, error)
        os.chdir(folder)
        shutil.rmtree(place)
    for code in (0, 2):
        assert ended[code].total() > TREES // 8
        assert TREES < 3000 or ended[code].keys() == {*COMMANDS}
