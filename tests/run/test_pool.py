"""Forked workers: they share the work, end with the run, and are replaced when they are lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from altered import altered
from chats import TAGS, assistant, chat, many, user, write
from support import (
    assert_error,
    children_of,
    contents,
    heavy,
    jsonl,
    packer,
    packer_script,
    processor_seconds,
    random_texts,
    started,
    succeeds,
    wait_for,
)

from packer_cli.errors import DataError, InternalError
from packer_cli.run.pool import Pool

pytestmark = pytest.mark.forking
SLOW = TAGS + "{% if messages | length > 2 %}{{ 10 ** (messages | length + 10**8) % 7 }}{% endif %}"
OPTIONS = ["-l", 64, "--unit-bytes", 5000, "-o"]
LOST = "was killed by signal 9"


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    before = children_of(os.getpid())
    yield
    servers = children_of(os.getpid()) - before  # of `copies`, for whichever test begins one first
    assert all("copies.py" in Path(f"/proc/{one}/cmdline").read_text() for one in servers)


def mapped(perform: Callable[[Any], Any], items: list[Any], **how: Any) -> list[Any]:
    """The results in the order of the items."""
    with closing(Pool(perform, **how)) as pool:
        return [result for _, result in sorted(pool.map(items))]


def test_workers_share_what_the_parent_has_loaded() -> None:
    loaded = list[int]()
    results = mapped(
        lambda item: (item, loaded[0], os.getpid()),
        [*range(50)],
        workers=3,
        prepare=lambda: loaded.append(os.getpid()),
    )
    assert loaded == [os.getpid()]
    assert [(item, at) for item, at, _ in results] == [(item, os.getpid()) for item in range(50)]
    assert os.getpid() not in {worker for _, _, worker in results}


class Strange(OSError):
    """An error that another process cannot make anew."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.held = lambda: None


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (DataError("no room", "make some"), DataError("no room", "make some")),
        (OSError(errno.ENOSPC, "No space"), OSError(errno.ENOSPC, "No space")),
        (ValueError("riddle"), InternalError("ValueError: riddle")),
        (EOFError("cut"), InternalError("EOFError: cut")),
        (Strange(errno.EIO, "lost"), OSError(errno.EIO, "lost")),
        (KeyboardInterrupt(), InternalError("KeyboardInterrupt: ")),
    ],
)
def test_an_error_ends_the_pool(raised: BaseException, expected: Exception) -> None:
    def perform(item: int) -> int:
        if item == 1:
            raise raised
        time.sleep(300 if item == 2 else 0)
        return item

    with pytest.raises(type(expected), match=re.escape(str(expected))):
        mapped(perform, [*range(9)], workers=3)


def test_a_worker_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", limited)
    with pytest.raises(DataError, match="a worker cannot begin: Resource temporarily unavailable"):
        mapped(str, [1])


# Whole runs


@pytest.fixture
def data(folder: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(jsonl(*random_texts(3000)))
    return path


def of_chats(template: str, *more: object) -> list[str]:
    Path("t.jinja").write_text(template)
    options = ("-l", 512, "-t", "bytes", "--chat-template", "t.jinja", *more)
    return [packer_script(), "pack", "data.jsonl", *map(str, options)]


def of_texts(*more: object) -> list[str]:
    return [packer_script(), "pack", "data.jsonl", "-t", "bytes", *map(str, [*more, *OPTIONS])]


def of_tagged(*more: object) -> list[str]:
    return of_chats(TAGS, *more, "-o")


@pytest.mark.parametrize(
    ("of", "kills"), [(of_texts, 1), (of_tagged, 1000), heavy(of_texts, 1000), heavy(of_tagged, 1)]
)
def test_killed_workers_of_a_run(data: Path, of: Callable[..., list[str]], kills: int) -> None:
    """As the kernel does when the machine runs out of memory, once or again and again."""
    if of is not of_texts:
        write(many(2_500))
    killed = set[int]()
    with subprocess.Popen([*of("--workers", 2), "out"], stderr=subprocess.PIPE, text=True) as run:
        while run.poll() is None and len(killed) < kills:
            for child in children_of(run.pid) - killed:
                if len(killed) < kills:
                    killed.add(child)
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        _, stderr = run.communicate(timeout=300)
    if kills > 1:
        assert (run.returncode, f"{LOST}, 3 times" in stderr) == (1, True), stderr
        assert not Path("out/manifest.json").exists()
        return
    assert run.returncode == 0, stderr
    assert f"{LOST}; its work is done again, attempt 2 of 3" in stderr
    succeeds(*of("--workers", 1)[1:], "one")
    assert contents("out") == contents("one")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_run(data: Path, number: signal.Signals) -> None:
    with started(*of_texts("--workers", 5, "-q"), "out", stderr=subprocess.PIPE) as run:
        assert wait_for(lambda: len(children_of(run.pid)) == 5)
        children = children_of(run.pid)
        run.send_signal(number)
        run.communicate(timeout=300)
    assert run.returncode in ({-9} if number == signal.SIGKILL else {0, 130})
    assert wait_for(lambda: not any(map(is_alive, children)))
    succeeds(*of_texts("--workers", 3)[1:], "out")
    succeeds(*of_texts("--workers", 1)[1:], "one")
    assert contents("out") == contents("one")


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGINT, 1), (signal.SIGKILL, 2), heavy(signal.SIGTERM, 1)]
)
def test_a_slow_template_ends_with_the_run(
    folder: Path, number: signal.Signals, workers: int
) -> None:
    write([*many(10), chat(user("a"), assistant("b"), user("c"), assistant("d")), *many(10)])
    command = of_chats(SLOW, "-q", "--workers", workers, "-o", "out")
    with started(*command, stderr=subprocess.PIPE) as run:
        assert wait_for(lambda: is_busy(run.pid))
        children = children_of(run.pid)
        run.send_signal(number)
        _, message = run.communicate(timeout=300)
        assert wait_for(lambda: not any(map(is_alive, children)))
    assert run.returncode == (-number if number == signal.SIGKILL else 130)
    assert message.startswith(b"" if number == signal.SIGKILL else b"stopped: interrupted\ntip: ")


def test_a_run_that_is_paused_and_continued(folder: Path) -> None:
    """As a debugger, a cgroup's freezer or a suspended laptop does, but hundreds of times."""
    write(many(800))
    command = of_chats(TAGS, "-q", "--workers", 2, "-o")
    undisturbed = subprocess.run([*command, "undisturbed"], check=True, capture_output=True)
    with subprocess.Popen([*command, "out"], stderr=subprocess.PIPE) as run:
        while run.poll() is None:
            processes = [run.pid, *children_of(run.pid)]
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in processes:
                    with suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(0.003)
        assert run.stderr
        said = undisturbed.stderr.replace(b"undisturbed", b"out")
        assert (run.returncode, run.stderr.read()) == (0, said)
    assert contents("out") == contents("undisturbed")


def test_a_run_from_stdin_does_not_go_on_without_what_was_lost(folder: Path) -> None:
    """What was read of stdin cannot be read again."""
    data = write([*many(500), chat(user("a"), assistant("b"), user("c"))]).read_bytes()
    command = of_chats(SLOW, "-q", "-o", "out")
    command[2] = "-"
    with started(*command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdin
        run.stdin.write(data)
        run.stdin.close()
        run.stdin = None
        assert wait_for(lambda: is_busy(run.pid))
        for child in children_of(run.pid):
            os.kill(child, signal.SIGKILL)
        _, message = run.communicate(timeout=300)
    assert run.returncode == 1
    assert message.startswith(f"error: unit 0 (- from 0): a worker {LOST}\n".encode())
    assert not Path("out").exists()


def test_stdin_is_read_once(data: Path) -> None:
    """Also by the name of a device, and before a file; more of it than is looked at first."""
    command = [packer_script(), "pack", "-t", "bytes", "-q", *map(str, OPTIONS)]
    results, larger = [], ["--unit-bytes", "40k"]
    for workers in ("4", "1"):
        some = [*command, f"by-{workers}", "-", data.name, "--workers", workers, *larger]
        subprocess.run(some, input=data.read_bytes(), check=True, capture_output=True)
        results.append(contents(f"by-{workers}"))
    assert results[0] == results[1]
    inputs = json.loads(results[0]["manifest.json"])["inputs"]
    assert inputs[0]["size"] == inputs[1]["size"] == data.stat().st_size > 1 << 17
    with open(data, "rb") as file:
        whole = [*command, "dev", "/dev/fd/0", "--input-format", "jsonl", "--workers", "2"]
        subprocess.run(whole, stdin=file, check=True, capture_output=True)


def test_bad_records_of_all_workers_are_counted(data: Path) -> None:
    data.write_bytes(data.read_bytes() + b"{}\n" * 30)
    command = of_texts("--workers", 9)[1:]
    assert_error(packer(*command, "other"), 1, "data.jsonl, line 3001 ", "no field 'text'")
    result = packer(*command, "some", "--on-error", "skip", "--max-errors", 7)
    assert_error(result, 1, "records are bad so far; --max-errors is 7")


SIGNALS = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
SIGNALS += "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF]); "


def test_signals_that_another_program_has_set(folder: Path) -> None:
    """They survive the start of packer: children leave no code, and timers do nothing."""
    write([*many(10), chat(user("why?"), assistant("slow"))])
    end = "</{{ m.role }}>"
    slow = "{% if m.content == 'slow' %}{{ 10 ** (messages | length + 10**8) % 7 }}{% endif %}"
    hurried = "from packer_cli.chat import limits; limits.SECONDS_PER_RECORD = 0.2; "
    main = "from packer_cli.__main__ import main; main()"
    done = altered(
        SIGNALS + hurried + main,
        *of_chats(TAGS.replace(end, end + slow), "-q", "--on-error", "skip", "-o", "out")[1:],
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("out/manifest.json").read_bytes())["rejected_records"] == 1


# Threads

WITHOUT_THREADS = """
from packer_cli.run import pool
from packer_cli.__main__ import main
has_threads = pool.has_threads
def looked():
    assert not has_threads()
    return False
pool.has_threads = looked
main()
"""
WITH_A_THREAD = """
import sys, threading
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import RunOptions
from packer_cli.run import pipeline
threading.Thread(target=threading.Event().wait, daemon=True).start()
options = RunOptions(workers=2, progress=False, notify=print, warn=print)
config = PackConfig(max_length=512, chat_template="t.jinja", unit_bytes=4000)
pipeline.pack(sys.argv[1:], "apart", config, options, "bytes")
"""


@pytest.mark.parametrize("of_tokens", [False, True])
def test_a_run_has_one_thread_when_it_forks(folder: Path, of_tokens: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer = str(tiny_tokenizers.save(Path("t"), tiny_tokenizers.byte_level()))
    texts = random_texts(300)  # and a column that nothing uses, whose beginning is looked at
    pq.write_table(pa.table({"text": texts, "more": [text * 9 for text in texts]}), "data.parquet")
    inputs = ["data.parquet"]
    if of_tokens:
        succeeds("tokenize", *inputs, "-t", tokenizer, "-o", "tokens")
        inputs, tokenizer = ["tokens"], ""
    named = ["-t", tokenizer] if tokenizer else []
    done = altered(WITHOUT_THREADS, "pack", *inputs, "-l", "64", *named, "-o", "out")
    assert done.returncode == 0, done.stderr
    for command in (["verify", "out", "--against-inputs"], ["plan", *inputs, "-l", "64", *named]):
        done = altered(WITHOUT_THREADS, *command)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def apart(folder: Path) -> list[str]:
    """A command whose process has a thread, so that another interpreter forks."""
    write(many(300))
    Path("t.jinja").write_text(TAGS)
    for name in ("numpy", "jinja2", "pickle", "packer_cli"):  # are not imported from here
        Path(f"{name}.py").write_text("raise SystemExit('imported from here')")
    return [sys.executable, "-I", "-c", WITH_A_THREAD]


def test_a_program_with_threads(apart: list[str]) -> None:
    done = subprocess.run([*apart, "data.jsonl"], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "chat template: t.jinja" in done.stdout
    command = of_chats(TAGS, "--unit-bytes", 4000, "-o", "out")[1:]
    succeeds(*command)
    assert contents("apart") == contents("out")
    shutil.rmtree("apart")
    write([*many(30), {"messages": 5}])
    done = subprocess.run([*apart, "data.jsonl"], capture_output=True, check=False, text=True)
    assert "field 'messages' is" in done.stderr


def test_what_forks_for_a_program_ends_with_it(apart: list[str]) -> None:
    write([*many(10), chat(user("a"), assistant("b"), user("c"), assistant("d"))])
    Path("t.jinja").write_text(SLOW)
    with started(*apart, "data.jsonl", stdout=subprocess.DEVNULL) as run:
        assert wait_for(lambda: is_busy(run.pid))
        processes = descendants(run.pid)
        run.kill()
        run.wait()
        assert wait_for(lambda: not any(map(is_alive, processes)))


def descendants(process: int) -> set[int]:
    """Its children, and theirs."""
    numbers = children_of(process)
    return numbers.union(*map(descendants, numbers))


def is_busy(run: int) -> bool:
    """Whether a worker computes a power, which takes hours."""
    return any(processor_seconds(child) > 0.5 for child in descendants(run))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
