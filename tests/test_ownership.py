"""Nothing that packer did not make is ever touched, and readers never mix two results.

PACKER_TREES: how many random trees of files, folders and links are tried.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from altered import altered, unaltered
from support import (
    assert_error,
    contents,
    jsonl,
    pack,
    packer,
    packer_script,
    recover_texts,
    work_folder,
)

from packer_cli import open_packed
from packer_cli.errors import DataError
from packer_cli.locks import InUseError, locked_folder
from packer_cli.ownership import Folder, claim, remove_leftovers
from packer_cli.result.manifest import to_bytes
from packer_cli.run.identity import sealed

pytestmark = pytest.mark.usefixtures("folder")
TREES = int(os.environ.get("PACKER_TREES", "100"))
EACH = 1 if TREES > 1000 else 4  # of the steps at which two runs are stopped
OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
TEXTS = ["first", "second"]


@pytest.fixture
def data(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    (folder / "b.jsonl").write_bytes(jsonl("third"))
    return folder


# --- each as it was found


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"], ["--update"]], ids=["", "over", "up"])
def test_a_folder_called_dot_packer_is_not_packers(data: Path, overwrite: list[str]) -> None:
    for name in ("notes", "lock", "run.json", "unit-00000.json", "owner.json"):
        Path("out/.packer").mkdir(parents=True)
        Path("out/.packer", name).write_bytes(b"mine")
        result = packer("pack", "a.jsonl", *OPTIONS, *overwrite)
        assert_error(result, 2, "out/.packer: has no owner.json of packer's")
        assert contents("out") == {f".packer/{name}": b"mine"}
        shutil.rmtree("out")


def test_links_are_not_followed(data: Path) -> None:
    Path("important").mkdir()
    Path("important/file").write_bytes(b"mine")
    Path("out").mkdir()
    Path("out/.packer").symlink_to("../important")
    assert_error(packer("pack", "a.jsonl", *OPTIONS), 2, "out/.packer: is no directory")
    Path("out/.packer").unlink()
    Path("out/.packer").mkdir()
    Path("thesis.tex").write_bytes(b"mine")
    Path("out/.packer/lock").symlink_to("../../thesis.tex")
    assert_error(packer("pack", "a.jsonl", *OPTIONS), 2, "out/.packer: has no owner.json")
    assert contents("important") == {"file": b"mine"}
    assert Path("thesis.tex").read_bytes() == b"mine"


def test_a_link_in_packers_own_folder_is_not_followed(data: Path) -> None:
    Path("thesis.tex").write_bytes(b"mine")
    Path("out").mkdir()
    with Folder(Path("out")) as folder:
        own = claim(folder, ".packer")
        for name in ("lock", "run.json.part", "shard-00000-000.arrow.part", "notes"):
            place = own.inside.path / name
            place.symlink_to(Path("thesis.tex").resolve())
            result = packer("pack", "a.jsonl", *OPTIONS, "--overwrite")
            assert result.exit_code != 0, name
            assert place.is_symlink()
            place.unlink()
        own.close()
    assert Path("thesis.tex").read_bytes() == b"mine"


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_a_staging_directory_of_somebody_else(data: Path, overwrite: list[str]) -> None:
    Path("s/old").mkdir(parents=True)
    Path("s/result").mkdir()
    for name in ("s/lock", "s/old/x", "s/result/y"):
        Path(name).write_bytes(b"mine")
    before = contents("s")
    url = f"file://{Path.cwd()}/out"
    command = ["pack", "a.jsonl", *OPTIONS[:-1], url, "--staging", "s", *overwrite]
    assert_error(
        packer(*command), 2, "--staging: s: is neither empty nor left by an interrupted upload"
    )
    assert contents("s") == before


def crafted(side_files: dict[str, str]) -> bytes:
    """A manifest that is packer's in all but its side files."""
    pack("a.jsonl", "-l", 16)
    manifest = json.loads(Path("out/manifest.json").read_bytes())
    shutil.rmtree("out")
    manifest.pop("sha256")
    return to_bytes(manifest | {"side_files": side_files})


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", ["../victim.txt", "/etc/victim", "a/b", "..", "", ".hidden"])
def test_a_crafted_directory_writes_nowhere_else(data: Path, name: str, marked: bool) -> None:
    Path("victim.txt").write_bytes(b"mine")
    manifest = crafted({name: hashlib.sha256(b"theirs").hexdigest()})
    Path("out").mkdir()
    place = Path("out/.packer")
    if marked:
        with Folder(Path("out")) as folder:
            own = claim(folder, ".packer")
            own.close()
        place = work_folder()
    else:
        place.mkdir()
    (place / "manifest.json").write_bytes(manifest)
    (place / "replacing.json").write_bytes(sealed(b"{}"))
    for command in (("finalize", "out"), ("pack", "a.jsonl", *OPTIONS), ("finalize", "out")):
        packer(*command)
        assert Path("victim.txt").read_bytes() == b"mine"
        assert {path.name for path in Path().iterdir()} == {
            "a.jsonl",
            "b.jsonl",
            "out",
            "victim.txt",
        }


@pytest.mark.parametrize("name", ["../../x.arrow", "/x.arrow", "a/../../x.arrow"])
def test_a_dataset_names_only_its_own_files(data: Path, name: str) -> None:
    Path("set").mkdir()
    Path("set/dataset_info.json").write_text("{}")
    Path("set/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert_error(packer("pack", "set", *OPTIONS), 1, "set/state.json: ", repr(name))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "rejected.jsonl", "shard-99999-999.arrow"]
)
def test_a_file_with_a_name_of_packers_stays(data: Path, name: str) -> None:
    pack("a.jsonl", "-l", 16)
    Path("out", name).write_bytes(b"mine")
    pack_again = packer("pack", "a.jsonl", *OPTIONS, "--overwrite", "--on-error", "skip")
    if name == "rejected.jsonl":  # it is in the way, should there be any
        assert_error(
            pack_again, 2, "out: holds files that packer did not make, or that have changed: ", name
        )
    assert Path("out", name).read_bytes() == b"mine"


def test_a_file_of_a_result_that_its_user_changed_stays(data: Path) -> None:
    pack("a.jsonl", "-l", 16)
    for name in ("units.jsonl", "state.json"):
        whole = Path("out", name).read_bytes()
        Path("out", name).write_bytes(b"mine")
        result = packer("pack", "b.jsonl", *OPTIONS, "--overwrite")
        assert_error(
            result, 2, f"out: holds files that packer did not make, or that have changed: {name}"
        )
        assert Path("out", name).read_bytes() == b"mine"
        Path("out", name).write_bytes(whole)
    assert recover_texts("out") == TEXTS
    shard = next(Path("out").glob("*.arrow"))
    data_ = bytearray(shard.read_bytes())
    data_[-20] ^= 1
    shard.write_bytes(data_)
    pack("b.jsonl", "-l", 16, "--overwrite")  # under another name, so nothing is in the way
    assert shard.read_bytes() == data_


def test_a_changed_file_stays_whatever_became_of_its_times(data: Path) -> None:
    """As after `chmod -R`, a backup by hard links, or a copy: all have new times of status."""
    pack("a.jsonl", "-l", 16)
    Path("out/state.json").write_bytes(b"mine")
    shutil.copystat("out/manifest.json", "out/state.json")
    Path("out/dataset_info.json").write_bytes(b"mine, too")
    for name in ("dataset_info.json", "state.json", "manifest.json"):
        time.sleep(0.02)
        Path("out", name).chmod(0o600)
    result = packer("pack", "b.jsonl", *OPTIONS, "--overwrite")
    assert_error(result, 2, "or that have changed: dataset_info.json, state.json")
    assert Path("out/state.json").read_bytes() == b"mine"
    assert Path("out/dataset_info.json").read_bytes() == b"mine, too"


def test_a_copied_result_is_still_packers(data: Path) -> None:
    pack("a.jsonl", "-l", 16)
    for copy in (shutil.copy, shutil.copy2):
        shutil.copytree("out", "copy", copy_function=copy)
        shutil.rmtree("out")
        Path("copy").rename("out")
        before = {path.name for path in Path("out").glob("*.arrow")}
        pack("b.jsonl", "-l", 16, "--overwrite")
        assert not before & {path.name for path in Path("out").iterdir()}
        pack("a.jsonl", "-l", 16, "--overwrite")


def test_a_directory_copied_after_a_kill_is_gone_on_with(data: Path) -> None:
    """Inodes and times are others, so the contents tell what is packer's."""
    pack("a.jsonl", "-l", 16)
    Path("out").rename("earlier")
    command = ["pack", "a.jsonl", "b.jsonl", *OPTIONS, "--overwrite"]
    step = 0
    while True:
        step += 1
        shutil.copytree("earlier", "killed", copy_function=shutil.copy2)
        Path("killed").rename("out")
        killed(command, step)
        ended = not Path("out/.packer").exists() and step > 20
        shutil.copytree("out", "copy", copy_function=shutil.copy2)
        shutil.rmtree("out")
        Path("copy").rename("out")
        result = packer(*command)
        assert result.exit_code == 0, (step, result.stderr)
        assert packer("verify", "out", "-q").exit_code == 0, step
        assert recover_texts("out") == [*TEXTS, "third"]
        assert len(list(Path("out").glob("*.arrow"))) == 1
        shutil.rmtree("out")
        if ended:
            return


def test_a_manifest_of_somebody_else_beside_an_unfinished_run(data: Path) -> None:
    Path("bad.jsonl").write_bytes(jsonl("x" * 100) * 20 + b"{")
    # one worker: units before the bad one are packed
    command = ["pack", "bad.jsonl", *OPTIONS, "--unit-bytes", 500, "--workers", 1]
    assert packer(*command).exit_code == 1
    assert work_folder().exists()
    Path("out/manifest.json").write_bytes(b"mine")
    for more in ([], ["--overwrite"], ["--on-error", "skip"]):
        result = packer(*command, *more)
        assert_error(
            result, 2, "out: holds files that packer did not make, or that have changed: manifest"
        )
        assert Path("out/manifest.json").read_bytes() == b"mine"


def test_obstacles_are_found_before_the_earlier_result_goes(data: Path) -> None:
    pack("a.jsonl", "-l", 16)
    before = contents("out")
    Path("out/rejected.jsonl").mkdir()
    Path("bad.jsonl").write_bytes(jsonl("new") + b"{\n")
    command = ["pack", "bad.jsonl", *OPTIONS, "--on-error", "skip", "--overwrite"]
    for _ in range(2):
        assert_error(packer(*command), 2, "or that have changed: rejected.jsonl")
        assert contents("out") == before
    Path("out/rejected.jsonl").rmdir()
    assert packer(*command).exit_code == 0
    assert recover_texts("out") == ["new"]


def test_a_work_folder_on_another_disk(data: Path, small_disk: Path) -> None:
    pack("a.jsonl", "-l", 16)
    before = contents("out")
    Path("out/.packer").symlink_to(small_disk)
    result = packer("pack", "b.jsonl", *OPTIONS, "--overwrite")
    assert_error(result, 2, "out/.packer: is no directory")
    Path("out/.packer").unlink()
    assert contents("out") == before


@pytest.mark.parametrize("how", ["--overwrite", "--update"])
def test_a_missed_threshold_replaces_no_good_result(data: Path, how: str) -> None:
    losing = ("--overlong", "drop", "--max-loss", "0.1")
    pack("a.jsonl", "-l", 16, *losing)
    before = contents("out")
    Path("long.jsonl").write_bytes(jsonl("x" * 100))
    named = ["a.jsonl", "long.jsonl"]
    result = packer("pack", *named, *OPTIONS, *losing, how)
    assert_error(result, 1, "of the tokens were lost, 0 truncated and 101 dropped")
    assert "the earlier result stays" in result.stderr
    assert {n: c for n, c in contents("out").items() if ".packer" not in n} == before
    assert recover_texts("out") == TEXTS
    result = packer("pack", *named, *OPTIONS, *losing[:2], "--max-loss", "1", how)
    assert result.exit_code == 0, result.stderr
    assert json.loads(Path("out/manifest.json").read_bytes())["dropped_documents"] == 1


def test_new_parents_are_brought_to_the_disk(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, synced = os.fsync, set[int]()

    def record(descriptor: Any) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    assert packer("pack", "a.jsonl", *OPTIONS[:-1], "x/y/out").exit_code == 0
    assert {Path(name).stat().st_ino for name in (".", "x", "x/y", "x/y/out")} <= synced


def test_a_result_is_sound_when_its_work_folder_comes_back(data: Path) -> None:
    """As after a power loss right at the end."""
    pack("a.jsonl", "-l", 16)
    with Folder(Path("out")) as folder:
        own = claim(folder, ".packer")
        own.close()
    Path("out/.packer").rename("out/.packer-" + own.identity)
    assert packer("verify", "out", "-q").exit_code == 0
    assert recover_texts("out") == TEXTS
    pack("a.jsonl", "-l", 16, "--overwrite")
    assert not list(Path("out").glob(".packer*"))


@pytest.mark.parametrize("content", [b"mine", b'{"inputs": [], "notes": [1]}', None])
def test_input_times_of_somebody_else_at_a_url(data: Path, content: bytes | None) -> None:
    """No digest covers it, so what is in it tells whose it is."""
    url = f"file://{Path.cwd()}/remote"
    command = ["pack", "a.jsonl", *OPTIONS[:-1], url, "--staging", "s"]
    assert packer(*command).exit_code == 0
    place = Path("remote/input_times.json")
    place.unlink()
    if content is None:
        Path("thesis.tex").write_bytes(b"mine")
        place.symlink_to(Path("thesis.tex").resolve())
    else:
        place.write_bytes(content)
    command[1] = "b.jsonl"
    result = packer(*command, "--overwrite")
    assert_error(
        result, 2, "remote: holds files that packer did not make, or that have changed: input_times"
    )
    assert place.is_symlink() if content is None else place.read_bytes() == content


# --- runs that begin and end at once

OWN = re.compile("lock")


def begin(parent: Folder) -> None:
    claim(parent, ".packer").close()


def begin_and_end(parent: Folder) -> None:
    with suppress(InUseError), locked_folder(parent, ".packer", parent.path) as own:
        own.remove(OWN)
        remove_leftovers(parent, ".packer", OWN)


class Interleaved(threading.Thread):
    """A call that stops before one of its steps on the disk until it is told to go on."""

    def __init__(self, call: Callable[[Folder], None], parent: Folder, step: int) -> None:
        super().__init__(daemon=True)
        self.call, self.parent, self.left, self.error = call, parent, step, None
        self.stopped, self.may_go_on = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self.call(self.parent)
        except Exception as error:
            self.error = error
        self.stopped.set()

    def count(self) -> None:
        self.left -= 1
        if not self.left:
            self.stopped.set()
            self.may_go_on.wait()


@pytest.mark.parametrize("first", [begin, begin_and_end])
@pytest.mark.parametrize("there", [False, True])
def test_runs_that_begin_and_end_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: bool, first: Callable[[Folder], None]
) -> None:
    """The first stops at any step, the other at any of its own, then each goes on to its end."""

    def counted(call: Any) -> Any:
        def count(*arguments: Any, **options: Any) -> Any:
            if isinstance(thread := threading.current_thread(), Interleaved):
                thread.count()
            return call(*arguments, **options)

        return count

    for name in ("mkdir", "open", "rename", "unlink", "rmdir", "stat", "listdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for number in itertools.count(1, EACH):
        for other in itertools.count(1 + number % EACH, EACH):
            place = folder / f"{number}-{other}"
            place.mkdir()
            with Folder(place) as parent:
                if there:
                    begin(parent)
                one = Interleaved(first, parent, number)
                two = Interleaved(begin_and_end, parent, other)
                one.start()
                one.stopped.wait()
                two.start()
                two.stopped.wait()
                for thread in (one, two):
                    thread.may_go_on.set()
                    thread.join()
                assert (one.error, two.error) == (None, None), (number, other)
                begin(parent)
                assert [name for name in parent.names() if name == ".packer"], (number, other)
            if two.left > 0:
                break
        if one.left > 0:
            return


@pytest.mark.parametrize("marker", [b"[" * 200_000, b"[1]", b'"id"', b'{"id": 3}', b"\xff"])
def test_a_marker_that_is_none(data: Path, marker: bytes) -> None:
    Path("out/.packer").mkdir(parents=True)
    Path("out/.packer/owner.json").write_bytes(marker)
    assert_error(packer("pack", "a.jsonl", *OPTIONS), 2, "out/.packer: has no owner.json of packer")


def test_thousands_of_runs_leave_no_descriptor_open(data: Path) -> None:
    def run() -> int:
        for name in ("a.jsonl", "b.jsonl"):
            assert packer("pack", name, *OPTIONS, "--overwrite").exit_code == 0
            assert packer("pack", name, *OPTIONS).exit_code == 2
        command = ["export", "out", "--to", "numpy", "-q", "-o", "exported", "--overwrite"]
        assert packer(*command).exit_code == 0
        return len(os.listdir("/proc/self/fd"))

    run()
    before = run()
    for _ in range(5):
        assert run() == before


# --- readers beside runs that replace


def test_readers_never_mix_two_results(data: Path) -> None:
    """Readings while runs replace the result: one or the other, whole, or an error."""
    for name, letter in (("x.jsonl", "x"), ("y.jsonl", "y")):
        Path(name).write_bytes(jsonl(*[letter * (i % 40 + 1) for i in range(300)]))
    options = ["-l", "32", "-t", "bytes", "-q", "--unit-bytes", "800", "-o", "out", "--overwrite"]
    command = [packer_script(), "pack", "x.jsonl", *options]
    assert subprocess.run(command, check=False).returncode == 0
    failures = list[str]()

    def replace() -> None:
        for name in ("y.jsonl", "x.jsonl") * 4:
            done = unaltered("pack", name, *options)
            failures.extend([done.stderr] * bool(done.returncode))

    thread = threading.Thread(target=replace)
    thread.start()
    found, readings, replaced = set[str](), 0, 0
    try:
        while thread.is_alive():
            readings += 1
            try:
                packed = open_packed("out")
                path = packed.manifest["inputs"][0]["path"]
                letters = set[int]()
                for shard in packed.manifest["shards"]:
                    for batch in packed.batches(shard):
                        letters |= set(batch.column("input_ids").values.to_pylist())
            except DataError as error:
                if "was replaced by another result while it was read" not in error.message:
                    raise
                replaced += 1
                continue
            found.add(path)
            assert letters - {256, 257} == {ord(path[0])}
    finally:
        thread.join()
    assert not failures
    assert found == {"x.jsonl", "y.jsonl"}
    assert replaced < readings / 2


# --- random trees

NAMES = (
    ".packer", ".packer/lock", ".packer/run.json", ".packer/owner.json", ".packer/replacing.json",
    ".packer/manifest.json", ".packer/notes", f".packer-{'0' * 32}/x", f".packer/{'a' * 32}/lock",
    "manifest.json", "manifest.incomplete.json", "state.json", "dataset_info.json", "units.jsonl",
    "input_times.json", "rejected.jsonl", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "shard-00000-000.arrow", "shard-00000-000.arrow.part",
    "shard-99999-999.arrow", "notes.txt", "folder/notes.txt", ".packer-export.json",
    "input_ids.npy", "labels.npy", "lock", "staged.json", "result", "result/manifest.json", "old/x",
    "publishing.json", ".packer/publishing.json",
)  # fmt: skip
PLACES = ("out", "staging", "remote", "exported", "exported.packer-partial", "out/.packer", "")
COMMANDS: tuple[tuple[str, ...], ...] = (
    *(("pack", "in/a.jsonl", "-o", "out", *more)
      for more in ((), ("--overwrite",), ("--on-error", "skip", "--overwrite"), ("--add",))),
    ("pack", "in/a.jsonl", "in/b.jsonl", "-o", "out", "--update"),
    ("pack", "in/b.jsonl", "-o", "out", "--update", "--prune"),
    ("pack", "in/a.jsonl", "-o", "file://HERE/remote", "--staging", "staging"),
    ("pack", "in/b.jsonl", "-o", "file://HERE/remote", "--staging", "staging", "--overwrite"),
    ("finalize", "out"),
    ("export", "source", "--to", "numpy", "-o", "exported"),
    ("export", "source", "--to", "parquet", "-o", "exported", "--overwrite"),
)  # fmt: skip
# A program that is packer, but is killed at one of its steps on the disk, if it gets there.
CRASHING = """
import os
step = {step}
def counted(call):
    def count(*arguments, **options):
        global step
        step -= 1
        if not step:
            os.kill(os.getpid(), 9)
        return call(*arguments, **options)
    return count
for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
from packer_cli.cli import app as cli
cli.main()
"""


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
        for step in (30, 50):  # amid units, and while the result is put in place
            killed(["pack", "in/a.jsonl", *options, "-o", f"killed{step}"], step)
        remote = ["-o", f"file://{folder}/remote", "--staging", "staging"]
        killed(["pack", "in/a.jsonl", *options, *remote], 90)
        for unfinished in ("killed30/.packer", "killed50/.packer", "staging/result"):
            assert Path(unfinished).exists()
    finally:
        os.chdir(before)
    return folder


def killed(command: list[str], step: int) -> None:
    """Run it in a process of its own."""
    altered(CRASHING.format(step=step), *command)


def tree(random_: random.Random, prepared: Path) -> None:
    """What packer has made, in some of the places, and foreign things in and around them."""
    shutil.copytree(prepared / "in", "in")
    shutil.copytree(prepared / "source", "source")
    made = {
        "out": ("source", "killed30", "killed50"),
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
                killed(command, random_.randrange(1, 150))
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
