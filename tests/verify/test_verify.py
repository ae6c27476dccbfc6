"""`packer verify`: results of every kind are sound, by themselves and by their inputs, and what is
amiss comes with its tip.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tiny_tokenizers
from altered import unaltered
from spoiling import edit
from support import assert_error, jsonl, pack, packer
from varied_results import write_chat, write_mixed
from verifying import CHAT, TEXTS, assert_sound, first, problems

from packer_cli.errors import DataError
from packer_cli.records import UInt8
from packer_cli.tokenization import tokenizer as tokenization
from packer_cli.verify import again

pytestmark = pytest.mark.usefixtures("folder")
AGAINST = ("--against-inputs", "--sample", "all")
ALL = ("verify", "out", *AGAINST)


def sound() -> None:
    """The result `out` is, by itself, by some of its units and by all, and nothing is left."""
    assert_sound()
    before = {*os.listdir()}
    for sample in ("all", 7):
        result = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert result.exit_code == 0, result.stdout + result.stderr
        assert " packed again: the same rows" in result.stdout
    assert {*os.listdir()} == before


def test_a_sound_result(packed: Path) -> None:
    assert assert_sound() == "out: 1 shard, 7 rows: OK\n"
    report = json.loads(packer("verify", "out", "--json").stdout)
    assert report == {
        "directory": "out", "ok": True, "problems": [], "shards": 1, "rows": 7, "tokens": 99,
        "bytes": (packed / first()).stat().st_size, "units_packed_again": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        ["--max-segments-per-row", 2, "--balance", "attention"],
        ["--strategy", "wrap", "--segment-multiple", 8],
        ["--shard-bytes", 1, "--unit-bytes", 300, "--workers", 2],
    ],
)
def test_every_way_to_pack(folder: Path, options: list[object]) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5))
    pack("a.jsonl", "-l", 16, *options)
    sound()


SHAPES: dict[str, tuple[list[dict[str, Any]], list[object]]] = {
    "messages": (
        [{"messages": [{"role": role, "content": f"{role} {i} "} for role in
                       ("user", "assistant") * 3]} for i in range(9)],
        ["--overlong", "truncate-turns", "--chat-template", "t.jinja"],
    ),
    "prompts": ([{"prompt": f"p{i} ", "completion": "c" * i} for i in range(9)], []),
    "tokens": ([{"input_ids": [1, 2, 3 + i], "labels": [-100, 2, 3 + i]} for i in range(9)], []),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(folder: Path, shape: str) -> None:
    records, options = SHAPES[shape]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(), tokenizer_config={"eos_token": "</s>"}
    )
    (folder / "t.jinja").write_text(CHAT)
    result = packer("pack", "a.jsonl", "-l", 64, "-t", "tok", *options, "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
    shutil.rmtree(folder / "tok")  # the directory has all that is needed
    (folder / "t.jinja").unlink()
    sound()


@pytest.mark.parametrize("columns", ["input_ids,cu_seqlens", "input_ids,labels,cu_seqlens"])
def test_rows_that_do_not_say_where_they_come_from(folder: Path, columns: str) -> None:
    options = (*write_mixed(folder), "--columns", columns, "-q", "-o", "out")
    assert packer("pack", *options).exit_code == 0
    sound()
    edit(lambda manifest: manifest["config"].update(seed=1))
    assert "row 0: its inputs give another input_ids" in "".join(problems(*AGAINST))


def test_a_sample_is_of_units_with_so_many_documents(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS[:1] * 230))
    pack("a.jsonl", "-l", 16, "--unit-bytes", 300)
    counted = []
    for sample in (1, 60, 230, 10000):
        options = ("--against-inputs", "--sample", sample, "--seed", 3, "--json")
        report = json.loads(packer("verify", "out", *options).stdout)
        counted.append(report["units_packed_again"])
    units = len(Path("out/units.jsonl").read_bytes().splitlines())
    assert counted[0] == 1 < counted[1] < counted[2] == counted[3] == units


# What is amiss


def test_files_that_are_changed_gone_or_foreign(packed: Path) -> None:
    for name in ("state.json", "dataset_info.json"):
        data = (packed / name).read_bytes()
        (packed / name).write_bytes(data + b" ")
        size = f"has {len(data) + 1} bytes, the manifest says {len(data)}"
        assert problems() == [f"out: {name}: {size}"]
        (packed / name).write_bytes(data[:-1] + b" ")
        (line,) = problems()
        assert line.startswith(f"out: {name}: its sha256 is ")
        assert line.endswith(f", the manifest says {hashlib.sha256(data).hexdigest()}")
        (packed / name).unlink()
        assert problems() == [f"out: {name}: is missing"]
        (packed / name).write_bytes(data)
    (packed / "notes.txt").write_text("mine")
    (packed / "shard-00001-000.arrow").write_bytes(b"")
    (packed / "folder").mkdir()
    foreign = "a foreign file: the manifest does not list it"
    names = ("folder", "notes.txt", "shard-00001-000.arrow")
    assert problems() == [f"out: {name}: {foreign}" for name in names]
    result = packer("verify", "out", "--against-inputs")
    assert result.exit_code == 1
    assert "not compared with the inputs: the result itself has problems" in result.stderr


def test_a_work_folder_that_was_left(packed: Path) -> None:
    """As a power loss leaves it right after the end of a run: the result is whole."""
    (packed / ".packer").mkdir()
    result = packer("verify", "out")
    assert (result.exit_code, result.stdout) == (0, "out: 1 shard, 7 rows: OK\n")
    assert result.stderr.startswith(
        "packer: out/.packer: belongs to a run that is writing here, or"
    )
    assert "the next packer pack to this directory removes it" in result.stderr
    assert result.stderr.count("\n") == 1


def test_each_kind_of_problem_has_its_tip(packed: Path) -> None:
    (packed / "notes.txt").write_text("mine")
    checked = packer("verify", "out", "-q")
    assert checked.stderr.splitlines()[1] == (
        "tip: move them elsewhere: trainers may take them for part of the result"
    )
    (packed / "state.json").unlink()
    checked = packer("verify", "out", "-q", "--json")
    assert json.loads(checked.stderr)["tip"].startswith("a damaged result: copy the directory")
    assert "; foreign files: move them elsewhere" in checked.stderr
    tips = {one["file"]: one["tip"] for one in json.loads(checked.stdout)["problems"]}
    assert tips["state.json"].startswith("copy the directory again")
    assert tips["notes.txt"].startswith("move them elsewhere")


# Inputs that are others


def test_changed_inputs(packed: Path) -> None:
    path = Path("a.jsonl")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"bbb", b"bxb"))
    (line,) = problems(*AGAINST)
    assert line.startswith("out: a.jsonl: its sha256 is ")
    assert line.endswith(f", the manifest says {hashlib.sha256(data).hexdigest()}")
    path.write_bytes(data + b"\n")
    message = f"has {len(data) + 1} bytes, the manifest says {len(data)}"
    assert problems(*AGAINST) == [f"out: a.jsonl: {message}"]
    assert_sound()


def test_inputs_that_have_moved(folder: Path) -> None:
    """Those that are not where they were are named, and found again by what they hold."""
    Path("a.jsonl").write_bytes(jsonl(*TEXTS[:4]))
    Path("b.jsonl").write_bytes(jsonl(*TEXTS[4:]))
    pack("a.jsonl", "b.jsonl", "-l", 16, "--unit-bytes", 40)
    Path("b.jsonl").rename("c.jsonl")
    (line,) = problems(*AGAINST)
    assert line == "out: b.jsonl: cannot read: No such file or directory"
    tip = packer(*ALL).stderr
    assert "name them after --against-inputs if they have moved, or need credentials" in tip
    done = packer(*ALL, "c.jsonl")
    assert (done.exit_code, "units packed again" in done.stdout) == (0, True), done.stdout
    Path("other.jsonl").write_bytes(jsonl("other"))
    assert_error(packer(*ALL, "other.jsonl"), 2, "other.jsonl: is not an input of the result")
    assert_error(packer("verify", "out", "c.jsonl"), 2, "inputs are for --against-inputs")


def test_inputs_at_urls(folder: Path) -> None:
    """They are known by size and version, and can be named with what opens them."""
    url = "memory://inputs/a.jsonl"
    with fsspec.open(url, "wb") as file:
        file.write(jsonl(*TEXTS))
    pack(url, "-l", 16)
    for more in ([], [url]):
        assert packer(*ALL, *more).exit_code == 0
    with fsspec.open(url, "wb") as file:
        file.write(jsonl(*TEXTS, "more"))
    assert problems(*AGAINST) == [f"out: {url}: has another size or version now"]
    fsspec.filesystem("memory").rm("/inputs/a.jsonl")
    (line,) = problems(*AGAINST)
    assert line.startswith(f"out: {url}: ")


def test_stdin_cannot_be_read_again(folder: Path) -> None:
    result = unaltered("pack", "-", "-l", 16, "-q", "-o", "out", stdin=jsonl(*TEXTS))
    assert result.returncode == 0, result.stderr
    result = packer("verify", "out", "--against-inputs")
    assert result.exit_code == 0
    assert "-: came from stdin, which cannot be read again: not compared" in result.stderr
    assert "0 units packed again" in result.stdout


def replace_input(path: Path, data: bytes) -> None:
    """Change the only input, and what the manifest says of it: as if packer had misread it."""
    path.write_bytes(data)
    listed = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(lambda manifest: manifest["inputs"][0].update(listed))


CARRY = [{"text": "ab", "n": 1}, {"text": "cd", "n": 2}]
OTHER_INPUTS: dict[str, tuple[Any, ...]] = {
    "a token": (["one"], ["onx"], "row 0: its inputs give another input_ids"),
    "a document": (["one", "two"], ["one", "", "two"], "row 0: its inputs give another segments"),
    "more rows": (["one"], ["one", "of two rows"], "has 1 rows, its inputs give 2"),
    "a value": (CARRY, [CARRY[0], {"text": "cd", "n": 3}], "row 0: its inputs give another n"),
    "a bad record": (["one"], ["one", 4], "be packed again: a.jsonl, line 2 (byte 16)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_the_first_row_that_differs_is_named(folder: Path, name: str) -> None:
    *versions, problem = OTHER_INPUTS[name]
    before, now = (
        "".join(json.dumps(one if isinstance(one, dict) else {"text": one}) + "\n" for one in texts)
        for texts in versions
    )
    Path("a.jsonl").write_text(before)
    carry = ["--carry", "n:int32"] if name == "a value" else []
    pack("a.jsonl", "-l", 12, "--no-shuffle", "--strategy", "next-fit", *carry)
    replace_input(folder / "a.jsonl", now.encode())
    (line,) = problems(*AGAINST)
    place = "unit 0" if name == "a bad record" else first()
    assert line.startswith(f"out: {place}: ")
    assert problem in line


def test_labels_are_those_of_the_reference_and_not_of_the_code_that_made_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever tells trained tokens may be wrong while packing: verify does not ask it."""
    right = tokenization.mark_trained

    def wrong(*arguments: Any) -> UInt8:
        trained = right(*arguments)
        if trained.any():
            trained[np.flatnonzero(trained)[-1]] = 0
        return trained

    monkeypatch.setattr(tokenization, "mark_trained", wrong)
    assert packer("pack", *write_chat(folder), "-q", "-o", "out").exit_code == 0
    assert "its inputs give another labels" in "".join(problems(*AGAINST))


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError("no room", "make some")])
def test_nothing_is_left_beside_the_result(
    packed: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    seen = list[str]()

    def stop(*_: Any) -> None:
        seen.extend(name for name in os.listdir() if name.startswith("out.verify-"))
        raise error

    monkeypatch.setattr(again, "run_all", lambda tasks, *how: [task() for task in tasks])
    monkeypatch.setattr(again, "_compare_unit", stop)
    assert packer(*ALL).exit_code != 0
    assert len(seen) == 1
    assert not [name for name in os.listdir() if name.startswith("out.verify-")]
