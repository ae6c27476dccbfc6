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
    heavy,
    jsonl,
    packer,
    packer_script,
    processor_seconds,
    started,
    wait_for,
)

from packer_cli.interrupts import as_flag

# A program that is packer, but has a Ctrl-C come while it holds locks of what other threads do.
AMID_LOCKS = """
import os, signal
from concurrent.futures import _base
from packer_cli.cli import app as cli
enter = _base._AcquireFutures.__enter__
calls = 0
def entered(self):
    global calls
    calls += 1
    if calls != 3:
        return enter(self)
    for future in self.futures:
        future._condition.acquire()
    os.kill(os.getpid(), signal.SIGINT)
    for i in range(1000):
        pass  # by now an exception out of the handler is on its way
_base._AcquireFutures.__enter__ = entered
cli.main()
"""


# Another one, which comes while an object is freed: what is raised there Python only prints.
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


def test_interrupted_in_a_destructor(folder: Path) -> None:
    Path("a.jsonl").write_bytes(jsonl("some text"))
    options = ["pack", "a.jsonl", "-l", "64", "-t", "bytes", "-q", "-o", "out"]
    done = altered(IN_A_DESTRUCTOR, *options)
    assert (done.returncode, done.stderr[:20]) == (130, "stopped: interrupted"), done.stderr
    assert not Path("out/manifest.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_with_locks_taken(folder: Path, workers: int) -> None:
    Path("a.jsonl").write_bytes(jsonl(*["some text"] * 40))
    options = ["a.jsonl", "-l", 64, "-t", "bytes", "-q", "-o", "out", "--unit-bytes", 22]
    options += ["--workers", workers]
    done = altered(AMID_LOCKS, "pack", *map(str, options))
    assert (done.returncode, done.stderr[:20]) == (130, "stopped: interrupted"), done.stderr
    assert packer("pack", *options).exit_code == 0
    check_directory("out")


@pytest.mark.parametrize("module", ["packer_cli.cli.app", "typer", "packer_cli.errors", "numpy"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_before_it_has_begun(folder: Path, module: str, number: signal.Signals) -> None:
    Path("a.jsonl").write_bytes(jsonl("some text"))
    Path("sitecustomize.py").write_text(
        "import os, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    command = [packer_script(), "pack", "a.jsonl", "-l", "64", "-t", "bytes", "-o", "out"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, check=False, timeout=300, env=environment)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines), done.stdout) == (130, 2, b""), done.stderr
    assert lines[0] == b"stopped: interrupted"
    assert lines[1].startswith(b"tip: ")


def processor_seconds_of_ended() -> float:
    """Of all children that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("workers", [heavy(1), 2])
def test_interrupted_amid_a_text_that_takes_minutes(folder: Path, workers: int) -> None:
    """No thread looks at a flag while a library encodes."""
    Path("a.jsonl").write_bytes(jsonl("".join(map(str, range(6_000_000)))))
    tokenizer = tiny_tokenizers.save(Path("t"), tiny_tokenizers.byte_level())
    options = ["a.jsonl", "-l", 64, "-t", tokenizer, "--tokenizer-backend", "tokenizers", "-q"]
    command = [packer_script(), "pack", *map(str, options), "-o", "out"]
    before = processor_seconds_of_ended()
    with started(*command, "--workers", str(workers), stderr=subprocess.PIPE) as run:
        assert wait_for(lambda: processor_seconds(run.pid) > 2)
        used = processor_seconds(run.pid)
        run.send_signal(signal.SIGINT)
        _, message = run.communicate(timeout=300)
    assert run.returncode == 130
    # 1.5 seconds of each thread are waited for, however long they take on a busy machine
    assert processor_seconds_of_ended() - before - used < 1.5 * (workers + 1) + 2
    assert message == b"stopped: interrupted\ntip: run the same command again\n"


def test_what_a_shell_has_it_ignore_is_ignored(folder: Path) -> None:
    Path("a.jsonl").write_bytes(jsonl("some text"))
    code = AMID_LOCKS.replace("calls != 3", "calls != 1")
    command = f'trap \'\' INT; exec {sys.executable} -c "$0" "$@"'
    options = ["pack", "a.jsonl", "-l", "64", "-t", "bytes", "-q", "-o", "out"]
    done = subprocess.run(
        ["sh", "-c", command, code, *options], capture_output=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")
    check_directory("out")


def test_handlers_are_put_back(folder: Path) -> None:
    Path("a.jsonl").write_bytes(jsonl("some text"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert packer("pack", "a.jsonl", "-l", 64, "-t", "bytes", "-o", "out").exit_code == 0
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
