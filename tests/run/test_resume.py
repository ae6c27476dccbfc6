"""The same command after a run that was killed or has failed: what is reused, done again, refused.

tests/run/test_kills.py kills runs of every kind at every step.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from altered import faulty
from support import (
    assert_error,
    check_directory,
    contents,
    jsonl,
    packer,
    packer_process,
    random_texts,
    shard_of,
    succeeds,
    work_folder,
)

from packer_cli.run.run_plan import sealed, unsealed

OPTIONS = ["-l", "256", "-t", "bytes"]
UNITS, PACKED = 14, 8  # of the inputs below: all, and those of an interrupted run
RECORD = "unit-00003.json"
Change = Callable[[], object]


@pytest.fixture
def inputs(folder: Path) -> Path:
    """a.jsonl, which several units read, and b.jsonl, which one reads alone."""
    for seed, (name, documents) in enumerate((("a.jsonl", 880), ("b.jsonl", 20))):
        texts = random_texts(documents, 600, seed)
        (folder / name).write_bytes(jsonl(*(text.replace("bb", "xx") for text in texts)))
    return folder


def arguments(out: str = "out", *more: str, inputs: str = "a.jsonl b.jsonl") -> list[str]:
    return ["pack", *inputs.split(), *OPTIONS, "--unit-bytes", "20k", *more, "-o", out]


def kill(fault: str, *more: str, act: str = "kill") -> None:
    """Run the command until some file is in its place, and then no more."""
    killed = faulty(f"when_named({fault}, {act})", *arguments("out", *more, "--workers", "1"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.fixture
def interrupted(inputs: Path) -> Path:
    """An output in which a run was killed when some of its units were packed."""
    kill(f"'unit-', {PACKED}")
    assert len(list(work_folder().glob("unit-*.json"))) == PACKED
    return inputs / "out"


def is_fresh(*options: str) -> bool:
    """Whether the output is what one run makes of the inputs."""
    succeeds(*arguments("fresh", *options))
    return contents("out") == contents("fresh")


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Change:
    """Change a file of the work folder, or an input."""

    def write() -> None:
        path = Path(name) if Path(name).exists() else work_folder() / name
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert path.read_bytes() != before

    return write


def damage_units() -> None:
    """Of four units one file each."""
    os.truncate(shard_of(work_folder(), 2), 100)
    (work_folder() / RECORD).write_bytes(b"{}")
    shard_of(work_folder(), 4).unlink()
    (squares,) = work_folder().glob("squared_lengths-00001*")
    os.truncate(squares, 8)


def copy_over(name: str) -> None:
    """Another file of the same content and time."""
    subprocess.run(["cp", "-p", name, "copy"], check=True)
    Path("copy").rename(name)


def of_another_run(data: bytes) -> bytes:
    record = json.loads(unsealed(data))
    return sealed(json.dumps(record | {"run": record["run"][::-1]}).encode())


# what is done between the runs, options of the second, and how many units it does not pack again
GOES_ON: dict[str, tuple[Change, tuple[str, ...], int]] = {
    "nothing": (lambda: None, (), PACKED),
    "with --add": (lambda: None, ("--add",), PACKED),
    "what may be lost shows in no shard": (lambda: None, ("--max-loss", "0.5"), PACKED),
    "an input is copied": (lambda: copy_over("a.jsonl"), (), PACKED),
    "damaged units": (damage_units, (), PACKED - 4),
    "another record": (
        rewrite(RECORD, lambda data: data.replace(b'"documents":', b'"documents":1', 1)), (),
        PACKED - 1,
    ),
    "a record of another run": (rewrite(RECORD, of_another_run), (), PACKED - 1),
    "half a record": (rewrite(RECORD, lambda data: data[: len(data) // 2]), (), PACKED - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", GOES_ON)
def test_it_goes_on(interrupted: Path, name: str) -> None:
    change, options, kept = GOES_ON[name]
    change()
    done = succeeds(*arguments("out", *options))
    assert f"out: continuing: {kept} of {UNITS} units are already packed" in done.stderr
    assert is_fresh(*(one for one in options if one != "--add"))


UNREADABLE = "it is damaged, or of another"
# what is done, the second command's inputs and options, and how the run that is there differs
DIFFERS: dict[str, tuple[Change, str, tuple[str, ...], str]] = {
    "length": (lambda: None, "", ("-l", "128"), "--max-length was 256, is now 128"),
    "with --add": (lambda: None, "", ("--add", "-l", "128"), "--max-length was"),
    "more of an input": (
        rewrite("a.jsonl", lambda data: data + jsonl("more")), "", (), "a.jsonl has changed: ",
    ),
    "a touched input": (lambda: os.utime("a.jsonl", ns=(0, 1)), "", (), "a.jsonl has changed"),
    "another name": (lambda: os.rename("a.jsonl", "c.jsonl"), "c.jsonl b.jsonl", (),
                     "a.jsonl is not named now; c.jsonl is new"),
    "not named": (lambda: None, "b.jsonl", (), "a.jsonl is not named now"),
    "a damaged run": (
        rewrite("run.json", lambda data: data.replace(b'"max_length":256', b'"max_length":0')),
        "", (), UNREADABLE,
    ),
    "a deep run": (rewrite("run.json", lambda data: b"[" * 100_000), "", (), UNREADABLE),
    "another tokenizer": (
        lambda: tiny.save(Path("tok"), tiny.byte_level(), tokenizer_config={"eos_token": "a"}), "",
        ("-t", "tok"), "another tokenizer: tokenizer.json and tokenizer_config.json differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERS)
def test_another_run_is_refused(interrupted: Path, name: str) -> None:
    change, inputs, options, message = DIFFERS[name]
    change()
    command = arguments("out", *options, "-q", inputs=inputs or "a.jsonl b.jsonl")
    before = contents("out")
    refused = packer(*command)
    assert_error(refused, 2, "out: holds an unfinished run that differs: ", message)
    assert "to start over, --overwrite" in refused.stderr
    assert contents("out") == before
    if "--add" not in options:
        succeeds(*command, "--overwrite")
        check_directory("out")


# (input, how its bytes become others while it is packed, the error or "")
CHANGES = [
    ("a.jsonl", "lambda: os.truncate('a.jsonl', 1000)", "a.jsonl: changed while it was read ("),
    ("b.jsonl", "lambda: os.utime('b.jsonl')", "b.jsonl: changed while it was read ("),
    ("a.jsonl", "lambda: (os.link('a.jsonl', 'backup'), os.chmod('b.jsonl', 0o600))", ""),
]


@pytest.mark.parametrize(("name", "change", "error"), CHANGES)
def test_an_input_that_changes_while_it_is_packed(
    inputs: Path, name: str, change: str, error: str
) -> None:
    """Backups make hard links, which change the status alone."""
    done = faulty(f"import os; while_reading({name!r}, {change})", *arguments(), "-q")
    assert (done.returncode, f"error: {error}" in done.stderr) == (int(bool(error)), bool(error))
    if not error:
        succeeds("verify", "out", "-q", "--against-inputs", "--sample", "all")


def test_an_input_that_changes_is_not_to_be_gone_on_with(inputs: Path) -> None:
    """The same command again would be refused: it is another run."""
    change = "import os; when_named('unit-', 5, lambda: os.truncate('a.jsonl', 1000))"
    failed = faulty(change, *arguments("out", "--workers", "1", "-q"))
    assert failed.returncode == 1
    message, tip = failed.stderr.splitlines()
    assert message.startswith("error: a.jsonl: changed while it was read (")
    assert tip.endswith("then run again, with --overwrite")
    assert_error(packer(*arguments("out", "-q")), 2, "a.jsonl has changed")
    succeeds(*arguments("out", "--overwrite", "--on-error", "skip"))


def test_how_bad_records_are_dealt_with_may_change(inputs: Path) -> None:
    """What a failed run has packed is kept, and what was skipped only by who skips."""
    with open("b.jsonl", "ab") as file:
        file.write(b"{broken")
    failed = packer(*arguments("out", "--workers", "1", "-q"))
    assert_error(failed, 1, "b.jsonl, line 21", "not valid JSON")
    assert f"{UNITS - 2} of {UNITS} units are packed and kept" in failed.stderr
    skipping = ("--on-error", "skip")
    succeeds(*arguments("out", *skipping))
    assert is_fresh(*skipping)
    shutil.rmtree("out")
    Path("a.jsonl").write_bytes(Path("a.jsonl").read_bytes().replace(b"\n", b"\n{broken\n", 1))
    kill("'unit-', 8", *skipping)
    refused = packer(*arguments("out", "-q"))
    assert_error(refused, 2, "unfinished run that differs: --on-error was skip, is now fail")
    succeeds(*arguments("out", *skipping))


def test_too_many_bad_records(inputs: Path) -> None:
    lines = Path("a.jsonl").read_bytes().splitlines(keepends=True)
    lines[::40] = [b"[]\n"] * len(lines[::40])
    Path("a.jsonl").write_bytes(b"".join(lines))
    command = arguments("out", "--on-error", "skip", "--workers", "1", "-q")
    assert_error(packer(*command, "--max-errors", 10), 1, "11 records are bad so far; --max-errors")
    assert_error(packer(*command, "--max-errors", "0.5%"), 1, "22 of 900 records are bad")
    assert not Path("out/manifest.json").exists()
    succeeds(*command, "--max-errors", "3%")
    assert json.loads(Path("out/manifest.json").read_bytes())["rejected_records"] == 22


# what is done to a result that is being put in its place, the second command, and its error or ""
REPLACING: dict[str, tuple[Change, list[str], str]] = {
    "nothing": (lambda: None, arguments(), ""),
    "other inputs": (lambda: None, arguments(inputs="b.jsonl"), "a.jsonl is not named now"),
    "another limit": (
        lambda: None, arguments("out", "--max-loss", "0.5"), "--max-loss was not given, is now 0.5",
    ),
    "its manifest is lost": (lambda: os.remove(work_folder() / "manifest.json"), arguments(), ""),
    "its manifest is damaged": (rewrite("manifest.json", lambda data: b"{"), arguments(), ""),
    "its journal is damaged": (rewrite("replacing.json", lambda data: b"{"), arguments(), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACING)
def test_what_was_being_put_in_place(inputs: Path, name: str) -> None:
    """It is put there first, and then it is a finished result like any other."""
    change, command, error = REPLACING[name]
    kill("'replacing.json', 1")
    change()
    done = packer(*command, "-q")
    if error:
        assert_error(done, 2, "out: holds a finished result that differs: ", error)
    assert (done.exit_code == 0) == (not error), done.stderr
    assert not Path("out/.packer").exists()
    assert is_fresh()


def test_a_result_that_takes_the_place_of_an_equal_one(inputs: Path) -> None:
    succeeds(*arguments())
    kill("'replacing.json', 1", "--overwrite")
    succeeds(*arguments())
    assert not Path("out/.packer").exists()
    assert is_fresh()


@pytest.mark.parametrize("kind", ["pack", "tokenize", "pack tokens", "pack bad records"])
def test_the_bytes_do_not_depend_on_workers(inputs: Path, kind: str) -> None:
    named: list[Any] = ["a.jsonl", "b.jsonl", "-t", "bytes"]
    if kind == "pack bad records":
        for name in named[:2]:
            rewrite(name, lambda data: data.replace(b"\n", b"\n{broken\n"))()
        named += ["--on-error", "skip"]
    if kind == "pack tokens":
        succeeds("tokenize", *named, "-q", "-o", "tokens")
        named = ["tokens"]
    length = ["-l", 256] if kind != "tokenize" else []
    for workers in (1, 2, 8):
        command = [*kind.split()[:1], *named, *length, "--unit-bytes", "20k", "-o", f"by{workers}"]
        succeeds(*command, "--workers", workers)
    if kind == "pack":  # nor on the process
        assert packer_process(*command, "--overwrite").returncode == 0
    assert contents("by1") == contents("by2") == contents("by8")
    assert Path("by1/rejected.jsonl").exists() == (kind == "pack bad records")
    assert len(json.loads(Path("by1/manifest.json").read_bytes())["units"]) >= UNITS
