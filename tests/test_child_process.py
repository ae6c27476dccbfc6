"""The processes beside a run: they end with it, may be paused, and are replaced when lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import copies
import pytest
from chats import TAGS, assistant, chat, many, user, write
from support import (
    children_of,
    contents,
    heavy,
    packer,
    packer_script,
    processor_seconds,
    started,
    wait_for,
)

from packer_cli import child_process

SLOW = TAGS + "{% if messages | length > 2 %}{{ 10 ** (messages | length + 10**8) % 7 }}{% endif %}"
ANY = "packer_cli.errors:DataError"
PATIENT = ("-o", "out")


@pytest.fixture(autouse=True)
def _children_are_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere but in tests."""
    monkeypatch.setattr(child_process, "spawn", copies.interpreter)


def descendants(process: int) -> set[int]:
    """Its children, and theirs."""
    numbers = children_of(process)
    return numbers.union(*map(descendants, numbers))


def is_busy(run: int) -> bool:
    """Whether a child computes a power, which takes hours, and hears nothing until it is done."""
    return any(processor_seconds(child) > 1 for child in descendants(run))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command(template: str, *more: object) -> list[str]:
    Path("t.jinja").write_text(template)
    options = ("-l", 512, "-t", "bytes", "-q", "--chat-template", "t.jinja", *more)
    return [packer_script(), "pack", "data.jsonl", *map(str, options)]


def test_a_run_that_is_paused_and_continued(folder: Path) -> None:
    """As a debugger, a cgroup's freezer or a suspended laptop does, but hundreds of times."""
    write(many(800))
    how = command(TAGS, "--workers", 2)
    undisturbed = subprocess.run([*how, "-o", "undisturbed"], check=True, capture_output=True)
    with subprocess.Popen([*how, "-o", "out"], stderr=subprocess.PIPE) as run:
        while run.poll() is None:
            processes = [run.pid, *descendants(run.pid)]
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in processes:
                    with suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(0.003)
        assert run.stderr
        said = undisturbed.stderr.replace(b"undisturbed", b"out")
        assert (run.returncode, run.stderr.read()) == (0, said)
    assert contents("out") == contents("undisturbed")


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGINT, 1), (signal.SIGKILL, 2), heavy(signal.SIGTERM, 1)]
)
def test_a_slow_template_ends_with_the_run(
    folder: Path, number: signal.Signals, workers: int
) -> None:
    talk = chat(user("a"), assistant("b"), user("c"), assistant("d"))
    write([*many(10), talk, *many(10)])
    with started(*command(SLOW, "--workers", workers, *PATIENT), stderr=subprocess.PIPE) as run:
        assert wait_for(lambda: is_busy(run.pid))
        children = descendants(run.pid)
        run.send_signal(number)
        _, message = run.communicate(timeout=300)
        assert wait_for(lambda: not any(map(is_alive, children)))
    expected = -number if number == signal.SIGKILL else 130
    assert run.returncode == expected
    assert message.startswith(b"" if number == signal.SIGKILL else b"stopped: interrupted\ntip: ")


def test_a_run_from_stdin_does_not_go_on_without_what_was_lost(folder: Path) -> None:
    """What was read of stdin cannot be read again."""
    data = write([*many(500), chat(user("a"), assistant("b"), user("c"))]).read_bytes()
    how = command(SLOW, *PATIENT)
    how[2] = "-"
    with started(*how, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdin
        run.stdin.write(data)
        run.stdin.close()
        run.stdin = None
        assert wait_for(lambda: is_busy(run.pid))
        for child in descendants(run.pid):
            os.kill(child, signal.SIGKILL)
        _, message = run.communicate(timeout=300)
    assert run.returncode == 1
    lost = b"error: unit 0 (- from 0): the process of LimitedComposer was ended from"
    assert message.startswith(lost)
    assert not Path("out").exists()


def test_a_child_whose_maker_is_gone_before_it_begins(folder: Path) -> None:
    code = (
        "import os; from packer_cli.child_process import Child\n"
        f"print(Child({ANY!r}, 'a')._process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, timeout=300
    )
    assert wait_for(lambda: not is_alive(int(done.stdout)))
    assert done.stderr == b""


def test_modules_in_the_current_directory_are_not_imported(folder: Path) -> None:
    write(many(3))
    for name in ("numpy", "jinja2", "pickle", "packer_cli"):
        Path(f"{name}.py").write_text("raise SystemExit('imported from here')")
    ran = subprocess.run([*command(TAGS), "-o", "out"], capture_output=True, check=True)
    assert ran.stderr == b""


def test_a_child_that_cannot_begin_is_no_problem_of_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(*_: int) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(child_process, "spawn", limited)
    write(many(3))
    error = packer(*command(TAGS, "-o", "out")[1:]).stderr.splitlines()[0]
    began = "error: the process of LimitedComposer cannot begin: "
    assert error == f"{began}Resource temporarily unavailable"
