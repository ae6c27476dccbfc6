"""Nothing that packer did not make is ever touched. Each case is one that was found."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from owning import OPTIONS, TEXTS
from support import assert_error, contents, jsonl, pack, packer, recover_texts, work_folder

from packer_cli.result.layout import ID
from packer_cli.result.manifest import to_bytes

pytestmark = pytest.mark.usefixtures("folder")


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
        place /= ID
        place.mkdir(parents=True)
    else:
        place.mkdir()
    (place / "manifest.json").write_bytes(manifest)
    journal = {"new": {name: 6}, "old": {name: 4}, "sha256": ""}
    (place / "replacing.json").write_bytes(json.dumps(journal).encode())
    for rank in ([], ["--rank", "0", "--world-size", "1"]):
        packer("pack", "a.jsonl", *OPTIONS, *rank)
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
    assert_error(packer("pack", "set", *OPTIONS), 1, "set/state.json: does not say what the")


# the options with which a run may have a file of that name: only then it is in the way
NAMES_OF_PACKERS: dict[str, list[str]] = {
    "tokenizer.json": [], "chat_template.jinja": [], "special_tokens_map.json": [],
    "shard-99999-999.arrow": [], "rejected.jsonl": ["--on-error", "skip"],
    "manifest.incomplete.json": ["--max-loss", "10%"],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_PACKERS)
def test_a_file_with_a_name_of_packers_stays(data: Path, name: str) -> None:
    pack("a.jsonl", "-l", 16)
    Path("out", name).write_bytes(b"mine")
    pack("a.jsonl", "b.jsonl", "-l", 16, "--add")
    pack("a.jsonl", "-l", 16, "--overwrite")
    if more := NAMES_OF_PACKERS[name]:
        done = packer("pack", "b.jsonl", *OPTIONS, "--overwrite", *more)
        assert_error(
            done, 2, "out: holds files that packer did not make, or that have changed: ", name
        )
    assert Path("out", name).read_bytes() == b"mine"


def test_a_file_of_a_result_that_its_user_changed_stays(data: Path) -> None:
    """Whatever became of its times, as after a backup or a copy."""
    pack("a.jsonl", "-l", 16)
    for name in ("units.jsonl", "state.json"):
        whole = Path("out", name).read_bytes()
        Path("out", name).write_bytes(b"mine")
        shutil.copystat("out/manifest.json", f"out/{name}")
        result = packer("pack", "b.jsonl", *OPTIONS, "--overwrite")
        assert_error(
            result, 2, f"out: holds files that packer did not make, or that have changed: {name}"
        )
        assert Path("out", name).read_bytes() == b"mine"
        Path("out", name).write_bytes(whole)
    assert recover_texts("out") == TEXTS
    shard = next(Path("out").glob("*.arrow"))
    mine = shard.read_bytes() + b"mine"
    shard.write_bytes(mine)
    pack("b.jsonl", "-l", 16, "--overwrite")  # under another name, so nothing is in the way
    assert shard.read_bytes() == mine


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


@pytest.mark.parametrize("how", ["--overwrite", "--add"])
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
