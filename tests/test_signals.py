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
    jsonl,
    packer,
    packer_script,
    processor_seconds,
    started,
    wait_for,
)

from packer_cli.interrupts import as_flag

# Programs that are packer, but have a Ctrl-C come while they hold locks of what other threads do;
# and while an object is freed: what is raised there Python only prints.
AMID_LOCKS = """
import os, signal
from concurrent.futures import _base
from packer_cli.cli import app as cli
enter = _base._AcquireFutures.__enter__
calls = 0
def entered(self):
    global calls
    calls += 1
    if calls != 1:
        return enter(self)
    for future in self.futures:
        future._condition.acquire()
    os.kill(os.getpid(), signal.SIGINT)
    for i in range(1000):
        pass  # by now an exception out of the handler is on its way
_base._AcquireFutures.__enter__ = entered
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
    [(IN_A_DESTRUCTOR, []), (AMID_LOCKS, [*SMALL_UNITS, "1"]), (AMID_LOCKS, [*SMALL_UNITS, "2"])],
    ids=["in a destructor", "amid locks, 1 worker", "amid locks, 2 workers"],
)
def test_interrupted_at_a_bad_moment(program: str, more: list[str]) -> None:
    done = altered(program, *OPTIONS, *more)
    assert (done.returncode, done.stderr[:20]) == (130, "stopped: interrupted"), done.stderr
    assert not Path("out/manifest.json").exists()
    assert packer(*OPTIONS, *more).exit_code == 0
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
    """No thread looks at a flag while a library encodes."""
    Path("a.jsonl").write_bytes(jsonl("".join(map(str, range(6_000_000)))))
    tokenizer = str(tiny_tokenizers.save(Path("t"), tiny_tokenizers.byte_level()))
    options = ["--tokenizer-backend", "tokenizers", "-t", tokenizer, "--workers", "2"]
    before = processor_seconds_of_ended()
    with started(packer_script(), *OPTIONS, *options, stderr=subprocess.PIPE) as run:
        assert wait_for(lambda: processor_seconds(run.pid) > 2)
        used = processor_seconds(run.pid)
        run.send_signal(signal.SIGINT)
        _, message = run.communicate(timeout=300)
    assert run.returncode == 130
    # 1.5 seconds of each thread are waited for, however long they take on a busy machine
    assert processor_seconds_of_ended() - before - used < 1.5 * 3 + 2
    assert message == b"stopped: interrupted\ntip: run the same command again\n"


def test_what_a_shell_has_it_ignore_is_ignored() -> None:
    code = AMID_LOCKS.replace("calls != 3", "calls != 1")
    command = f'trap \'\' INT; exec {sys.executable} -c "$0" "$@"'
    done = subprocess.run(
        ["sh", "-c", command, code, *OPTIONS], capture_output=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")
    check_directory("out")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert packer(*OPTIONS).exit_code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_flag_inside_a_flag() -> None:
    def both() -> None:
        with as_flag() as outer:
            with as_flag() as inner:
                assert (inner(), outer()) == (False, False)
                os.kill(os.getpid(), signal.SIGINT)
                assert (inner(), outer()) == (True, True)
            assert outer()

    with pytest.raises(KeyboardInterrupt):
        both()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
