"""`packer verify`: results of every kind are right by themselves and by their inputs; problems have
tips; changed inputs and results that differ from their inputs are found.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tiny_tokenizers
from altered import unaltered
from spoiling import arrow_file, edit, flip, rewrite, tokenize
from support import assert_error, jsonl, pack, packer, shard_of, succeeds
from varied_results import write_chat, write_mixed
from verifying import CHAT, TEXTS, assert_sound, changed, first, forge, problems

from packer_cli.errors import DataError
from packer_cli.records import UInt8
from packer_cli.tokenization import tokenizer as tokenization
from packer_cli.verify import again

pytestmark = pytest.mark.usefixtures("folder")
AGAINST = ("--against-inputs", "--sample", "all")
ALL = ("verify", "out", *AGAINST)
MANY = [f"{'text' * (i % 7)} number {i}" for i in range(40)]


def write_lines(name: str, *records: object) -> None:
    Path(name).write_text("".join(json.dumps(one) + "\n" for one in records))


# Results that are right: functions that write one to `out`


def of_records(*records: object, options: tuple[object, ...]) -> Callable[[], object]:
    def build() -> None:
        write_lines("a.jsonl", *records)
        files = {"eos_token": "</s>"}
        tiny_tokenizers.save(Path("tok"), tiny_tokenizers.byte_level(), tokenizer_config=files)
        Path("t.jinja").write_text(CHAT)
        succeeds("pack", "a.jsonl", *options, "-q", "-o", "out")
        shutil.rmtree("tok")  # the directory has all that is needed
        Path("t.jinja").unlink()

    return build


def of_texts(*options: object) -> Callable[[], object]:
    texts = [{"text": text} for text in TEXTS * 5]
    return of_records(*texts, options=("-t", "bytes", "-l", 16, *options))


def two_tokenized() -> list[str]:
    """Two directories, one of several units and parts, with an empty document and a bad record."""
    Path("a.jsonl").write_bytes(jsonl(*MANY, "") + b"{broken\n" + jsonl("last"))
    Path("b.jsonl").write_bytes(jsonl(*MANY[::-3], "x" * 300))
    Path("c.jsonl").write_bytes(jsonl("another file"))
    tokenize(
        "a.jsonl", "c.jsonl", "-t", "bytes", "-o", "ta", "--on-error", "skip",
        "--unit-bytes", 400, "--shard-bytes", 200,
    )  # fmt: skip
    tokenize("b.jsonl", "-t", "bytes", "-o", "tb")
    return ["ta", "tb"]


def tokenized_ids() -> list[str]:
    write_lines("a.jsonl", *(
        {"input_ids": list(range(i, 2 * i + 1)),
         "labels": [-100 if k % 3 else k for k in range(i, 2 * i + 1)]} for i in range(1, 40)
    ))  # fmt: skip
    tokenize("a.jsonl", "-o", "ta", "--unit-bytes", 2000)
    return ["ta"]


def of_tokenized(*options: object, of: Callable[[], list[str]] = two_tokenized) -> Any:
    return lambda: succeeds("pack", *of(), "-l", 64, *options, "-q", "-o", "out")


def of_mixed(columns: str) -> Any:
    return lambda: succeeds("pack", *write_mixed(Path()), "--columns", columns, "-q", "-o", "out")


TURNS = [{"role": role, "content": f"{role} "} for role in ("user", "assistant") * 3]
RIGHT: dict[str, Callable[[], object]] = {
    "balance": of_texts("--max-segments-per-row", 2, "--balance", "attention"),
    "multiples": of_texts("--strategy", "wrap", "--segment-multiple", 8),
    "many shards": of_texts("--shard-bytes", 1, "--unit-bytes", 300, "--workers", 2),
    "messages": of_records(
        *[{"messages": TURNS}] * 9,
        options=(
            "-t",
            "tok",
            "-l",
            64,
            "--overlong",
            "truncate-turns",
            "--chat-template",
            "t.jinja",
        ),
    ),
    "prompts": of_records(
        *({"prompt": f"p{i} ", "completion": "c" * i} for i in range(9)),
        options=("-t", "tok", "-l", 64),
    ),
    "ids": of_records(
        *({"input_ids": [1, 2, 3 + i], "labels": [-100, 2, 3 + i]} for i in range(9)),
        options=("-t", "tok", "-l", 64),
    ),
    "ids and boundaries alone": of_mixed("input_ids,cu_seqlens"),
    "rows without segments": of_mixed("input_ids,labels,cu_seqlens"),
    "tokenized texts": lambda: os.rename(two_tokenized()[0], "out"),
    "tokenized texts of one unit": lambda: os.rename(two_tokenized()[1], "out"),
    "tokenized ids": lambda: os.rename(tokenized_ids()[0], "out"),
    "rows of tokenized ids": of_tokenized(of=tokenized_ids),
    "rows of tokenized texts": of_tokenized(),
    "next-fit": of_tokenized("--strategy", "next-fit", "--seed", 3),
    "without segments": of_tokenized("--columns", "input_ids,labels,cu_seqlens"),
    "a view": of_tokenized("--view"),
    "several units": of_tokenized("--unit-bytes", 500, "--seed", 1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_results_are_right_by_themselves_and_by_their_inputs(name: str) -> None:
    RIGHT[name]()
    before, noun = {*os.listdir()}, "document" if name.startswith("tokenized") else "row"
    assert f" {noun}" in assert_sound()
    for sample in ("all", 6):
        text = assert_sound("--against-inputs", "--sample", sample)
        assert f"ized again: the same {noun}s" in text or " packed again: the same rows" in text
    assert {*os.listdir()} == before  # nothing is left


def test_what_it_prints(packed: Path) -> None:
    assert assert_sound() == "out: 1 shard, 7 rows: OK\n"
    report = json.loads(packer("verify", "out", "--json").stdout)
    assert report == {
        "directory": "out", "ok": True, "problems": [], "shards": 1, "rows": 7, "tokens": 99,
        "bytes": (packed / first()).stat().st_size, "units_packed_again": None,
    }  # fmt: skip


def test_a_sample_is_of_units_with_so_many_documents() -> None:
    Path("a.jsonl").write_bytes(jsonl(*TEXTS[:1] * 230))
    pack("a.jsonl", "-l", 16, "--unit-bytes", 300)
    counted = []
    for sample in (1, 60, 230, 10000):
        options = ("--against-inputs", "--sample", sample, "--seed", 3, "--json")
        report = json.loads(packer("verify", "out", *options).stdout)
        counted.append(report["units_packed_again"])
    units = len(Path("out/units.jsonl").read_bytes().splitlines())
    assert counted[0] == 1 < counted[1] < counted[2] == counted[3] == units


# Files of the directory


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


# Changed inputs


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


@pytest.mark.parametrize("sample", ["5", "all"])
def test_tokenized_directories_that_changed(sample: str) -> None:
    of_tokenized()()
    how = ["--against-inputs", "--sample", sample]
    path = arrow_file("documents", "ta")
    flip(path, path.stat().st_size // 2)
    (line,) = problems(*how)
    assert line.startswith(f"out: {path}: its sha256 is ")
    flip(path, path.stat().st_size // 2)
    Path("b.jsonl").write_bytes(Path("b.jsonl").read_bytes().replace(b"number", b"numbex"))
    assert_sound(*how)  # rows are compared with documents, and documents with their inputs
    result = packer("verify", "tb", "--against-inputs")
    assert (result.exit_code, result.stdout.count("b.jsonl: its sha256 is ")) == (1, 1)
    tokenize("b.jsonl", "-t", "bytes", "-o", "tb", "--no-eos", "--overwrite")
    (line,) = problems(*how)
    assert "tb/manifest.json: " in line
    shutil.rmtree("tb")
    (line,) = problems(*how)
    assert line.startswith("out: tb")


def test_inputs_that_have_moved() -> None:
    """Those that are not where they were are named, and recognized by their content."""
    Path("a.jsonl").write_bytes(jsonl(*TEXTS[:4]))
    Path("b.jsonl").write_bytes(jsonl(*TEXTS[4:]))
    pack("a.jsonl", "b.jsonl", "-l", 16, "--unit-bytes", 40)
    Path("b.jsonl").rename("c.jsonl")
    (line,) = problems(*AGAINST)
    assert line == "out: b.jsonl: cannot read: No such file or directory"
    tip = packer(*ALL).stderr
    assert "name them after --against-inputs if they have moved, or need credentials" in tip
    assert "units packed again" in succeeds(*ALL, "c.jsonl").stdout
    Path("other.jsonl").write_bytes(jsonl("other"))
    assert_error(packer(*ALL, "other.jsonl"), 2, "other.jsonl: is not an input of the result")
    assert_error(packer("verify", "out", "c.jsonl"), 2, "inputs are for --against-inputs")


def test_inputs_at_urls() -> None:
    """They are known by size and version, and can be named with credentials."""
    url = "memory://inputs/a.jsonl"
    with fsspec.open(url, "wb") as file:
        file.write(jsonl(*TEXTS))
    pack(url, "-l", 16)
    for more in ([], [url]):
        succeeds(*ALL, *more)
    with fsspec.open(url, "wb") as file:
        file.write(jsonl(*TEXTS, "more"))
    assert problems(*AGAINST) == [f"out: {url}: has another size or version now"]
    fsspec.filesystem("memory").rm("/inputs/a.jsonl")
    (line,) = problems(*AGAINST)
    assert line.startswith(f"out: {url}: ")


def test_stdin_cannot_be_read_again() -> None:
    result = unaltered("pack", "-", "-l", 16, "-q", "-o", "out", stdin=jsonl(*TEXTS))
    assert result.returncode == 0, result.stderr
    result = succeeds("verify", "out", "--against-inputs")
    assert "-: came from stdin, which cannot be read again: not compared" in result.stderr
    assert "0 units packed again" in result.stdout


# Results that differ from what their inputs give


CARRY = [{"text": "ab", "n": 1}, {"text": "cd", "n": 2}]
OTHER_INPUTS: dict[str, tuple[Any, ...]] = {
    "a token": (["one"], ["onx"], "row 0: its inputs give another input_ids"),
    "a document": (["one", "two"], ["one", "", "two"], "row 0: its inputs give another segments"),
    "more rows": (["one"], ["one", "of two rows"], "has 1 rows, its inputs give 2"),
    "a value": (CARRY, [CARRY[0], {"text": "cd", "n": 3}], "row 0: its inputs give another n"),
    "a bad record": (["one"], ["one", 4], "be packed again: a.jsonl, line 2 (byte 16)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_the_first_row_that_differs_is_named(name: str) -> None:
    """As if packer had misread the input: it changes, and what the manifest lists of it."""
    *versions, problem = OTHER_INPUTS[name]
    before, now = (
        [one if isinstance(one, dict) else {"text": one} for one in texts] for texts in versions
    )
    write_lines("a.jsonl", *before)
    carry = ["--carry", "n:int32"] if name == "a value" else []
    pack("a.jsonl", "-l", 12, "--no-shuffle", "--strategy", "next-fit", *carry)
    write_lines("a.jsonl", *now)
    data = Path("a.jsonl").read_bytes()
    listed = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(lambda manifest: manifest["inputs"][0].update(listed))
    (line,) = problems(*AGAINST)
    place = "unit 0" if name == "a bad record" else first()
    assert line.startswith(f"out: {place}: ")
    assert problem in line


def test_a_wrong_seed_wrong_tokens_and_wrong_positions() -> None:
    RIGHT["rows without segments"]()
    edit(lambda manifest: manifest["config"].update(seed=1))
    assert "row 0: its inputs give another input_ids" in "".join(problems(*AGAINST))
    shutil.rmtree("out")
    of_tokenized()()
    path = shard_of()
    data = changed(path.read_bytes(), "input_ids", 3, ord("z"))
    forge(path, changed(data, "labels", 3, ord("z")))
    (line,) = problems(*AGAINST)
    assert ": row 0: its inputs give another input_ids" in line
    shutil.rmtree("out")
    os.rename("tb", "out")

    def change(columns: dict[str, list[Any]]) -> None:
        for number in range(4, len(columns["position"])):
            columns["position"][number] += 1

    rewrite("documents", change)
    assert_sound()
    (line,) = problems("--against-inputs")
    assert ": document 4: its inputs give another position" in line


def test_labels_are_those_of_the_reference_and_not_of_the_code_that_made_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code that marks trained tokens while packing may be wrong: verify does not use it."""
    right = tokenization.mark_trained

    def wrong(*arguments: Any) -> UInt8:
        trained = right(*arguments)
        if trained.any():
            trained[np.flatnonzero(trained)[-1]] = 0
        return trained

    monkeypatch.setattr(tokenization, "mark_trained", wrong)
    succeeds("pack", *write_chat(folder), "-q", "-o", "out")
    assert "its inputs give another labels" in "".join(problems(*AGAINST))


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError("no room", "make some")])
def test_nothing_is_left_beside_the_result(
    packed: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def stop(*_: Any) -> None:
        assert [name for name in os.listdir() if name.startswith("out.verify-")]
        Path("stopped").touch()
        raise error

    monkeypatch.setattr(again, "_compare_unit", stop)
    assert packer(*ALL).exit_code != 0
    assert Path("stopped").exists()
    assert not [name for name in os.listdir() if name.startswith("out.verify-")]
