"""Runs that were killed, interrupted or failed: the same command loses and repeats nothing.

PACKER_KILLS: how many processes are killed at random moments. With 50 or more, others are killed at
every step and not at every eighth.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
from altered import altered, quietly, unaltered
from support import (
    KILLED_WHILE_REPLACING,
    assert_error,
    check_directory,
    contents,
    heavy,
    jsonl,
    packer,
    shard_of,
    work_folder,
)

from packer_cli.run.commits import squared_lengths_name

KILLS = int(os.environ.get("PACKER_KILLS", "10"))
OPTIONS = ["-l", "256", "-t", "bytes", "-q"]
UNITS = 40  # of the inputs below
EACH = 1 if KILLS >= 50 else 8  # of the steps at which a run is killed


@functools.cache
def files() -> dict[str, bytes]:
    """a.jsonl, which several units read, and b.jsonl, which one reads alone."""
    random_, contents = random.Random(0), {}
    for name, documents in (("a.jsonl", 2500), ("b.jsonl", 20)):
        lengths = (random_.randrange(600) for _ in range(documents))
        texts = ("".join(random_.choices("abcdefgh ", k=length)) for length in lengths)
        contents[name] = jsonl(*texts)
    return contents


@pytest.fixture
def inputs(folder: Path) -> Path:
    for name, content in files().items():
        (folder / name).write_bytes(content)
    return folder


def arguments(out: str, *more: str, inputs: tuple[str, ...] = ("a.jsonl", "b.jsonl")) -> list[str]:
    return ["pack", *inputs, *OPTIONS, "--unit-bytes", "20k", *more, "-o", out]


def command_of(kind: str, unit_bytes: int, *more: str) -> list[str]:
    """A command of any kind that writes a result in units, but for --output."""
    if kind == "pack tokens":
        for name in ("a", "b"):
            if not Path(name).exists():
                done = packer("tokenize", f"{name}.jsonl", "-t", "bytes", "-q", "-o", name)
                assert done.exit_code == 0, done.stderr
        tokens = ["pack", "a", "b", "-l", "256", "-q"]
        return [*tokens, "--unit-bytes", str(4 * unit_bytes), *more]  # 4 bytes a token
    options = OPTIONS if kind == "pack" else OPTIONS[2:]
    return [kind, "a.jsonl", "b.jsonl", *options, "--unit-bytes", str(unit_bytes), *more]


KINDS = ["pack", "tokenize", "pack tokens"]


def run(*command: str) -> str:
    """What the command says on stderr. It succeeds."""
    done = unaltered(*command)
    assert done.returncode == 0, done.stderr
    return done.stderr


def records(out: Path) -> dict[str, int]:
    """Which units are packed, and when they were; {} while the run is cleaning up."""
    try:
        return {path.name: path.stat().st_mtime_ns for path in out.glob(".packer/*/unit-*.json")}
    except FileNotFoundError:
        return {}


# A program that is packer, but is killed a while after some units are packed. It looks itself: how
# far it is by then is not a matter of how busy the machine is.
DYING = """
import itertools, os, threading
from packer_cli.cli import app as cli
units, rename = itertools.count(1), os.rename
def die():
    threading.Timer({then}, os.kill, (os.getpid(), 9)).start()
def renamed(a, b, **at):
    rename(a, b, **at)
    if "unit-" in str(b) and next(units) == {units}:
        die()
os.rename = renamed
if not {units}:
    die()
cli.main()
"""


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("pack", "1"), *((kind, "2") for kind in KINDS), *(heavy(kind, "1") for kind in KINDS[1:])],
)
def test_killed_at_random_moments(inputs: Path, kind: str, workers: str) -> None:
    arguments = [*command_of(kind, 20 << 10, "--workers", workers), "-o"]
    run(*arguments, "whole")
    whole, random_, in_the_middle = contents("whole"), random.Random(int(workers)), 0
    for kill in range(KILLS // 2):
        out = Path(f"out{kill}")
        command = [*arguments, str(out)]
        units, then = random_.randrange(UNITS), random_.uniform(0, 0.03)
        altered(DYING.format(units=units, then=then), *command)
        before = records(out)
        in_the_middle += 0 < len(before) < UNITS
        if not (out / "manifest.json").exists():
            process = quietly(*command)
            while process.poll() is None:
                now = records(out)  # what was packed is not packed again
                assert all(now[name] == before[name] for name in now.keys() & before.keys())
                time.sleep(0.01)
            assert process.returncode == 0
        assert {n: c for n, c in contents(out).items() if ".packer" not in n} == whole
    assert in_the_middle > KILLS // 5


CRASHING = """
import os, sys
from pathlib import Path
from packer_cli.cli import app as cli
steps = {step}
def counted(call):
    def count(*arguments, **options):
        global steps
        steps -= 1
        if not steps:
            {failure}
        return call(*arguments, **options)
    return count
for name in ("rename", "fsync", "unlink"):
    setattr(os, name, counted(getattr(os, name)))
if {step} < 0:
    os._exit = lambda code: (print(-1 - steps, file=sys.stderr), sys.stderr.flush(), code)
cli.main()
"""


RECIPE = """
max_length = 256
tokenizer = "bytes"
validation = {share = "10%"}
[[source]]
name = "a"
inputs = ["a.jsonl"]
epochs = 1
[[source]]
name = "b"
inputs = ["b.jsonl"]
epochs = 3
"""


def command_that_writes(kind: str) -> list[str]:
    """One of few units and one worker, so that every step has a number, but for --output. An update
    finds a result in start/out.
    """
    if kind == "recipe":
        Path("mix.toml").write_text(RECIPE)
        return ["pack", "mix.toml", "--unit-bytes", "500k", "--workers", "1", "-q"]
    if not kind.startswith("--"):
        return command_of(kind, 500 << 10, "--workers", "1")
    options = [*OPTIONS, "--unit-bytes", "200k", "--workers", "1", "-o", "start/out"]
    assert packer("pack", "a.jsonl", "b.jsonl", *options).exit_code == 0
    Path("c.jsonl").write_bytes(jsonl("of another night"))
    named = ["b.jsonl", "c.jsonl"] if kind == "--prune" else ["c.jsonl"]
    more = ["--update", "--prune"] if kind == "--prune" else ["--add"]
    return ["pack", *named, *options[:-2], *more]


@pytest.mark.parametrize("kind", [*KINDS, "--prune", "--add", "recipe"])
def test_killed_at_every_step_to_the_disk(inputs: Path, kind: str) -> None:
    arguments = command_that_writes(kind)

    def command(folder: str, step: int) -> list[str]:
        if step and Path("start").exists():
            subprocess.run(["cp", "-a", "start", folder], check=True)
        failure = "os.kill(os.getpid(), 9)"
        code = CRASHING.format(step=step, failure=failure)
        return [code, *arguments, "-o", f"{folder}/out"]

    def written(folder: str) -> dict[str, bytes]:
        """But for what names the folder, in the manifests of a recipe's rows, and its times."""
        left_out = (".packer", "units.jsonl", "manifest.json", "input_times.json")
        return {
            name: data for name, data in contents(folder).items()
            if not any(one in name for one in left_out[: 4 if kind == "recipe" else 1])
        }  # fmt: skip

    counted = altered(*command("whole", -1))
    assert counted.returncode == 0, counted.stderr
    steps = int(counted.stderr.split()[-1])
    whole = written("whole")
    assert steps > 20
    for step in range(1, steps + 1, EACH):
        folder = f"at{step}"
        killed = altered(*command(folder, step))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        done = packer(*command(folder, 0)[1:])
        finished = "holds a finished result" in done.stderr  # it was killed while cleaning up
        assert done.exit_code == 0 or finished, (step, done.stderr)
        assert written(folder) == whole, step


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_do_not_depend_on_workers(inputs: Path, kind: str) -> None:
    for workers in ("1", "2", "8"):
        command = command_of(kind, 20 << 10, "--workers", workers)
        run(*command, "-o", f"out{workers}")
    assert contents("out1") == contents("out2") == contents("out8")
    units = len(json.loads(Path("out1/manifest.json").read_text())["units"])
    assert units == UNITS or kind == "pack tokens"
    assert units > 20


def is_fresh() -> bool:
    """Whether the output is what one run makes of the inputs."""
    assert packer(*arguments("fresh")).exit_code == 0
    return contents("out") == contents("fresh")


@pytest.fixture
def interrupted(inputs: Path) -> Path:
    """An output in which a run was killed when some of its units were packed."""
    code = CRASHING.format(step=60, failure="os.kill(os.getpid(), 9)")
    killed = altered(code, *arguments("out", "--workers", "1"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert 3 < len(records(inputs / "out")) < UNITS
    return inputs / "out"


def test_going_on_is_said(interrupted: Path) -> None:
    loud = [argument for argument in arguments("out") if argument != "-q"]
    packed = len(records(interrupted))
    done = packer(*loud)
    assert f"packer: out: continuing: {packed} of {UNITS} units are already packed" in done.stderr


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[], object]:
    """Change a file of the work folder, or an input."""

    def write() -> None:
        path = Path(name) if Path(name).exists() else work_folder() / name
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert path.read_bytes() != before

    return write


UNREADABLE = "out: holds an unfinished run that differs: it is damaged, or of another"
# what is done, options, and how the run that is there differs
DIFFERENT: dict[str, tuple[Callable[[], object], tuple[str, ...], tuple[str, ...]]] = {
    "length": (lambda: None, ("-l", "128"), ("--max-length was 256, is now 128",)),
    "seed": (lambda: None, ("--seed", "5"), ("--seed was 0, is now 5",)),
    "end": (lambda: None, ("--no-eos",), ("--eos was on, is now off",)),
    "columns": (
        lambda: None, ("--columns", "input_ids,cu_seqlens"), ("--columns was input_ids,labels,",),
    ),
    "an update": (lambda: None, ("--update", "-l", "128"), ("run that differs: --max-length was",)),
    "more of an input": (
        rewrite("a.jsonl", lambda data: data + jsonl("more")), (),
        ("a.jsonl has changed: ", " bytes then, "),
    ),
    "another input of equal size and time": (
        lambda: in_place_of("a.jsonl", Path("a.jsonl").read_bytes().replace(b"b", b"B")), (),
        ("a.jsonl has changed",),
    ),
    "another name": (lambda: os.rename("a.jsonl", "c.jsonl"), (),
                     ("a.jsonl is gone; c.jsonl is new",)),
    "not named": (lambda: None, (), ("a.jsonl is not named now",)),
    "a damaged run": (
        rewrite("run.json", lambda data: data.replace(b'"max_length":256', b'"max_length":0')), (),
        (UNREADABLE,),
    ),
    "a deep run": (rewrite("run.json", lambda data: b"[" * 100_000), (), (UNREADABLE,)),
    "an empty run": (rewrite("run.json", lambda data: b""), (), (UNREADABLE,)),
}  # fmt: skip


def in_place_of(name: str, content: bytes) -> None:
    """Another file under that name, of the same time."""
    status = os.stat(name)
    Path("new").write_bytes(content)
    os.utime("new", ns=(0, status.st_mtime_ns))
    os.rename("new", name)
    assert os.stat(name).st_size == status.st_size


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_run_is_refused(interrupted: Path, name: str) -> None:
    change, options, messages = DIFFERENT[name]
    change()
    others = {"another name": ("c.jsonl", "b.jsonl"), "not named": ("b.jsonl",)}
    inputs = others.get(name, ("a.jsonl", "b.jsonl"))
    before, command = contents("out"), arguments("out", *options, inputs=inputs)
    done = packer(*command)
    assert_error(done, 2, "out: holds an unfinished run that differs: ", *messages)
    assert "to start over, --overwrite" in done.stderr
    assert contents("out") == before
    if "--update" not in options:
        assert packer(*command, "--overwrite").exit_code == 0
        check_directory("out")


def damage_shards() -> None:
    os.truncate(shard_of(work_folder(), 2), 100)
    (work_folder() / "unit-00003.json").write_bytes(b"{}")
    shard_of(work_folder(), 4).unlink()
    os.truncate(work_folder() / squared_lengths_name(1), 8)  # as a power loss may leave it


RECORD = "unit-00003.json"
PACKED_AGAIN: dict[str, Callable[[], object]] = {
    "nothing, by an update": lambda: None,
    "the same input, copied": lambda: in_place_of("a.jsonl", Path("a.jsonl").read_bytes()),
    "shards": damage_shards,
    "another record": rewrite(
        RECORD, lambda data: data.replace(b'"documents":', b'"documents":1', 1)
    ),
    "half a record": rewrite(RECORD, lambda data: data[: len(data) // 2]),
    "a deep record": rewrite(RECORD, lambda data: b'{"unit":' + b"[" * 100_000),
}


@pytest.mark.parametrize("name", PACKED_AGAIN)
def test_what_was_damaged_meanwhile_is_packed_again(interrupted: Path, name: str) -> None:
    PACKED_AGAIN[name]()
    how = ["--update"] if name == "nothing, by an update" else []
    assert packer(*arguments("out", *how)).exit_code == 0
    assert is_fresh()


def test_copies_of_inputs_and_units_are_gone_on_with(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine inodes, devices and times of change of status are others."""
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    subprocess.run(["cp", "-a", "a.jsonl", "b.jsonl", "out", copy], check=True)
    monkeypatch.chdir(copy)
    loud = [argument for argument in arguments("out") if argument != "-q"]
    assert "out: continuing: " in packer(*loud).stderr
    assert is_fresh()


CHANGING = """
import os, sys
from packer_cli.cli import app as cli
from packer_cli.run import commits
def now(file):
    if file.path == '{name}' and not done:
        done.append(1)
        {change}
    return check(file)
done, check = [], commits.check_unchanged
commits.check_unchanged = now
cli.main()
"""
IN_PLACE = """
        status = os.stat('{0}')
        open('new', 'wb').write(open('{0}', 'rb').read().replace(b'b', b'B'))
        os.utime('new', ns=(0, status.st_mtime_ns))
        os.rename('new', '{0}')
"""


def changing(name: str, change: str) -> subprocess.CompletedProcess[str]:
    """A run during which `change` is done as soon as a unit has read an input, or some of it."""
    code = CHANGING.format(change=change.strip(), name=name)
    return altered(code, *arguments("out", "--workers", "1"))


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl"])
def test_an_input_that_is_replaced_once_it_is_packed(inputs: Path, name: str) -> None:
    """Of equal size and time: whether one unit reads it or several."""
    failed = changing(name, IN_PLACE.format(name))
    assert failed.returncode == 1, failed.stderr
    assert f"error: {name}: changed while it was read (" in failed.stderr


def test_an_input_that_only_gets_another_name_or_mode_is_packed(inputs: Path) -> None:
    """Backups make hard links, which the time of change of status tells."""
    change = "os.link('a.jsonl', 'backup'); os.chmod('b.jsonl', 0o600)"
    done = changing("a.jsonl", change)
    assert done.returncode == 0, done.stderr
    assert packer("verify", "out", "-q", "--against-inputs", "--sample", "all").exit_code == 0


def test_what_is_written_without_a_trace_is_not_certified(inputs: Path) -> None:
    """Through a mapping, a page that is dirty already is written to, and no time tells.

    The digest in the manifest is of the bytes that were packed.
    """
    before = Path("b.jsonl").read_bytes()
    code = """
        status = os.stat('b.jsonl')
        data = open('b.jsonl', 'rb').read()
        open('b.jsonl', 'r+b').write(data.replace(b'b', b'B'))
        os.utime('b.jsonl', ns=(0, status.st_mtime_ns))
        stat = os.stat
        def forged(path, *more, **how):
            return status if str(path) == 'b.jsonl' else stat(path, *more, **how)
        os.stat = forged
"""
    done = changing("b.jsonl", code)
    assert done.returncode == 0, done.stderr
    sources = {one["path"]: one for one in check_directory("out")["inputs"]}
    assert sources["b.jsonl"]["sha256"] == hashlib.sha256(before).hexdigest()
    assert packer("verify", "out", "-q", "--against-inputs").exit_code == 1


def test_another_tokenizer_is_refused(inputs: Path) -> None:
    tiny.save(inputs / "one", tiny.byte_level())
    tiny.save(inputs / "two", tiny.byte_level(), tokenizer_config={"pad_token": "<pad>"})
    stopping = CRASHING.format(step=60, failure="os.kill(os.getpid(), 9)")
    options = ["--workers", "1", "--no-eos", "--tokenizer-backend", "tokenizers", "-t"]
    killed = altered(stopping, *arguments("out", *options, "one"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = packer(*arguments("out", *options, "two"))
    assert_error(done, 2, "another tokenizer: tokenizer_config.json differ")
    assert packer(*arguments("out", *options, "one")).exit_code == 0


def test_limits_may_be_others(inputs: Path) -> None:
    """What a run may lose or reject does not show in what was packed."""
    with open("b.jsonl", "ab") as file:
        file.write(b"{broken")
    done = packer(*arguments("out", "--workers", "1"))
    assert_error(done, 1, "b.jsonl, line 21", "not valid JSON")
    assert f"39 of {UNITS} units are packed and kept" in done.stderr
    skipping = ["--on-error", "skip", "--max-loss", "0.5"]
    assert packer(*arguments("out", *skipping)).exit_code == 0
    assert packer(*arguments("fresh", *skipping)).exit_code == 0
    assert contents("out") == contents("fresh")


@pytest.mark.parametrize("bad", ["a.jsonl", "b.jsonl"])
def test_what_was_skipped_is_not_kept_by_a_run_that_fails(inputs: Path, bad: str) -> None:
    Path(bad).write_bytes(Path(bad).read_bytes().replace(b"\n", b"\n{broken\n", 1))
    code = CRASHING.format(step=60, failure="os.kill(os.getpid(), 9)")
    killed = altered(code, *arguments("out", "--workers", "1", "--on-error", "skip"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = packer(*arguments("out"))
    if bad == "a.jsonl":  # its first unit is packed, and b.jsonl the last
        assert_error(done, 2, "unfinished run that differs: --on-error was skip, is now fail")
        done = packer(*arguments("out", "--overwrite"))
    assert_error(done, 1, f"{bad}, line 2")
    assert packer(*arguments("out", "--on-error", "skip")).exit_code == 0


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails(inputs: Path, call: str) -> None:
    failure = "raise OSError(5, 'I/O', 'out')"
    for step in (5, 20, 40):
        out = f"out{step}"
        code = CRASHING.format(step=step, failure=failure)
        code = code.replace('("rename", "fsync", "unlink")', f"({call!r},)")
        failed = altered(code, *arguments(out, "--workers", "1"))
        assert failed.returncode == 1, failed.stderr
        assert failed.stderr.startswith("error: out"), failed.stderr
        assert "Input/output error" in failed.stderr
        assert not Path(out, "manifest.json").exists()
        assert packer(*arguments(out)).exit_code == 0
    assert packer(*arguments("fresh")).exit_code == 0
    assert contents("out5") == contents("out20") == contents("out40") == contents("fresh")


def test_too_many_bad_records(inputs: Path) -> None:
    lines = Path("a.jsonl").read_bytes().splitlines(keepends=True)
    lines[::100] = [b"[]\n"] * len(lines[::100])
    Path("a.jsonl").write_bytes(b"".join(lines))
    skipping = ["--on-error", "skip", "--workers", "1", "--max-errors"]
    done = packer(*arguments("out", *skipping, "10"))
    assert_error(done, 1, "11 records are bad so far; --max-errors is 10")
    assert_error(packer(*arguments("out", *skipping, "0.5%")), 1, "25 of 2,520 records are bad")
    assert not Path("out/manifest.json").exists()
    assert packer(*arguments("out", *skipping, "1%")).exit_code == 0  # all is packed already
    assert json.loads(Path("out/manifest.json").read_bytes())["rejected_records"] == 25
    done = packer(*arguments("other", "--max-errors", "3"))
    assert_error(done, 2, "--max-errors needs --on-error skip")


@pytest.fixture
def replacing(inputs: Path) -> Path:
    """An output whose run was killed when all was packed and about to be put in place."""
    killed = altered(KILLED_WHILE_REPLACING, *arguments("out"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (work_folder() / "replacing.json").exists()
    return inputs / "out"


def test_what_was_being_put_in_place_is_not_replaced(replacing: Path) -> None:
    """Nor when it cannot be told any more which run it is of."""
    (work_folder() / "replacing.json").write_bytes(b"{}")
    done = packer("pack", "b.jsonl", *OPTIONS, "-o", "out")
    assert_error(done, 2, "out: holds a finished result")
    assert is_fresh()


def test_a_result_that_takes_the_place_of_an_equal_one(inputs: Path) -> None:
    assert packer(*arguments("out")).exit_code == 0
    killed = altered(KILLED_WHILE_REPLACING, *arguments("out", "--overwrite"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert packer(*arguments("out")).exit_code == 0
    assert not Path("out/.packer").exists()
    assert is_fresh()


@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_a_manifest_that_was_lost_is_made_again(replacing: Path, content: bytes | None) -> None:
    path = work_folder() / "manifest.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    kept = records(replacing)
    assert len(kept) == UNITS
    assert packer(*arguments("out")).exit_code == 0
    assert is_fresh()


def test_an_input_that_changes_is_not_to_be_gone_on_with(inputs: Path) -> None:
    """The same command again would be refused: it is another run."""
    changing = """
import os
from packer_cli.cli import app as cli
rename, left = os.rename, [5]
def renamed(a, b, **at):
    rename(a, b, **at)
    left[0] -= "unit-" in str(b)
    if left == [0]:
        os.truncate("a.jsonl", 1000)
os.rename = renamed
cli.main()
"""
    failed = altered(changing, *arguments("out", "--workers", "1"))
    assert failed.returncode == 1
    message, tip = failed.stderr.splitlines()
    assert message.startswith("error: a.jsonl: changed while it was read (")
    assert tip.endswith("then run again, with --overwrite")
    assert_error(packer(*arguments("out")), 2, "a.jsonl has changed")
    assert packer(*arguments("out", "--overwrite", "--on-error", "skip")).exit_code == 0
