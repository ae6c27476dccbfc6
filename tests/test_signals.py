"""Ctrl-C at the worst moments. What a signal leaves behind is tested where it is written."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers
from altered import altered
from support import (
    check_directory,
    children_of,
    jsonl,
    packer_script,
    processor_seconds,
    started,
    succeeds,
    wait_for,
)

# Programs that are packer, but have a Ctrl-C come while a worker is forked, or while an object is
# freed: what is raised there Python only prints.
AMID_A_FORK = """
import os, signal
from packer_cli.cli import app as cli
fork = os.fork
def forked():
    os.kill(os.getpid(), signal.SIGINT)
    return fork()
os.fork = forked
cli.main()
"""
IN_A_DESTRUCTOR = """
import os, signal, time
from packer_cli.cli import app as cli
from packer_cli.options.run_options import RunOptions
check = RunOptions.__post_init__
class Freed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for i in range(1000):
            pass
def checked(self):
    check(self)
    Freed()
    time.sleep(300)  # or the run may be done before the interrupt comes again
RunOptions.__post_init__ = checked
cli.main()
"""
OPTIONS = ["pack", "a.jsonl", "-l", "64", "-t", "bytes", "-q", "-o", "out"]
SMALL_UNITS = ["--unit-bytes", "22", "--workers"]


@pytest.fixture(autouse=True)
def data(folder: Path) -> None:
    Path("a.jsonl").write_bytes(jsonl(*["some text"] * 40))


@pytest.mark.parametrize(
    ("program", "more"),
    [(IN_A_DESTRUCTOR, []), (AMID_A_FORK, [*SMALL_UNITS, "1"]), (AMID_A_FORK, [*SMALL_UNITS, "2"])],
    ids=["in a destructor", "amid a fork, 1 worker", "amid a fork, 2 workers"],
)
def test_interrupted_at_a_bad_moment(program: str, more: list[str]) -> None:
    done = altered(program, *OPTIONS, *more)
    assert (done.returncode, done.stderr[:20]) == (130, "stopped: interrupted"), done.stderr
    assert not Path("out/manifest.json").exists()
    succeeds(*OPTIONS, *more)
    check_directory("out")


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("packer_cli.cli.app", signal.SIGINT), ("typer", signal.SIGTERM), ("numpy", signal.SIGINT),
    ],
)  # fmt: skip
def test_interrupted_before_it_has_begun(folder: Path, module: str, number: signal.Signals) -> None:
    Path("sitecustomize.py").write_text(
        "import os, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [packer_script(), *OPTIONS]
    done = subprocess.run(command, capture_output=True, check=False, timeout=300, env=environment)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines), done.stdout) == (130, 2, b""), done.stderr
    assert lines[0] == b"stopped: interrupted"
    assert lines[1].startswith(b"tip: ")


def processor_seconds_of_ended() -> float:
    """Of all children that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_interrupted_amid_a_text_that_takes_minutes() -> None:
    """Nothing of Python runs in a worker while a library encodes."""
    Path("a.jsonl").write_bytes(jsonl("".join(map(str, range(6_000_000)))))
    tokenizer = str(tiny_tokenizers.save(Path("t"), tiny_tokenizers.byte_level()))
    options = ["--tokenizer-backend", "tokenizers", "-t", tokenizer, "--workers", "2"]
    before = processor_seconds_of_ended()
    with started(packer_script(), *OPTIONS, *options, stderr=subprocess.PIPE) as run:
        assert wait_for(lambda: sum(map(processor_seconds, children_of(run.pid))) > 1)
        used = sum(map(processor_seconds, [run.pid, *children_of(run.pid)]))
        run.send_signal(signal.SIGINT)
        _, message = run.communicate(timeout=300)
    assert run.returncode == 130
    assert processor_seconds_of_ended() - before - used < 2
    assert message.startswith(b"stopped: interrupted\ntip: ")


def test_what_a_shell_has_it_ignore_is_ignored() -> None:
    command = f'trap \'\' INT; exec {sys.executable} -c "$0" "$@"'
    done = subprocess.run(
        ["sh", "-c", command, AMID_A_FORK, *OPTIONS], capture_output=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")
    check_directory("out")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    succeeds(*OPTIONS)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
