"""The command line itself: help, usage errors, options, signals, and what goes to which stream."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_tokenizers
from altered import unaltered
from showing import stderr_on_terminal
from spoiling import edit
from support import (
    assert_error,
    check_directory,
    heavy,
    jsonl,
    pack,
    packer,
    packer_process,
    packer_script,
    recover_texts,
    started,
    succeeds,
    wait_for,
)
from typer.main import get_command

import packer_cli
from packer_cli.cli.app import app

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def data(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_bytes(jsonl("first", "second"))
    return path


def test_help_names_every_command_and_exit_code() -> None:
    text = packer("--help").stdout
    commands = get_command(app).list_commands(None)  # type: ignore[attr-defined]
    assert commands
    assert all(f"\n  {name} " in text for name in commands)
    assert all(f" {code} " in text for code in (0, 1, 2, 3, 130))


def test_help_imports_no_arrays() -> None:
    """Numpy alone takes as long to import as all of --help."""
    code = """if True:
        import sys
        from contextlib import suppress
        from packer_cli.cli.app import app
        for command in ([], ["pack"], ["show"]):
            with suppress(SystemExit):
                app([*command, "--help"])
        assert not {"numpy", "pyarrow"} & {*sys.modules}
    """
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)


def test_version() -> None:
    assert packer("--version").stdout == f"packer {packer_cli.__version__}\n"
    result = packer_process("--version")
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode() == f"packer {packer_cli.__version__}\n"
    command = [sys.executable, "-m", "packer_cli", "--version"]
    again = subprocess.run(command, capture_output=True, check=True, timeout=300)
    assert again.stdout == result.stdout


NO_TOKENIZER = (
    "packer: warning: no --tokenizer given: using the built-in bytes tokenizer "
    "(UTF-8 bytes as ids)\n"
)


def untimed(stderr: str) -> str:
    """Without how long the run took."""
    return re.sub(r"done in \d+\.\d s$", "done", stderr, flags=re.M)


def test_the_tokenizer_is_announced_on_stderr_and_the_table_on_stdout(data: Path) -> None:
    result = unaltered("pack", "a.jsonl", "--max-length", 16)
    assert result.returncode == 0
    assert untimed(result.stderr) == NO_TOKENIZER + "packer: a-packed-16: done\n"
    shown = result.stdout
    assert shown.startswith("a-packed-16\nmade from    1 input, ")
    assert "\ntokenizer    bytes (built in); 258 ids\n" in shown
    assert "\n\nutilization  " in shown
    assert recover_texts("a-packed-16") == ["first", "second"]


def test_token_ids_need_no_tokenizer(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b'{"input_ids": [1, 2]}\n')
    result = packer("pack", "a.jsonl", "-l", 2, "-o", "out")
    stderr = "packer: input_ids found: no tokenizer needed; padding is id 0\npacker: out: done\n"
    assert untimed(result.stderr) == stderr
    check_directory("out")


def test_quiet_prints_the_table_only(data: Path) -> None:
    result = packer("pack", "a.jsonl", "-l", 16, "-q", "-t", "bytes", "-o", "out")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("out\nmade from ")


@pytest.mark.parametrize("how", [[], ["--json"], ["--add"]])
def test_a_forgotten_tokenizer_is_not_silenced(data: Path, how: list[str]) -> None:
    for _ in range(2 if how == ["--add"] else 1):
        result = packer("pack", "a.jsonl", "-l", 16, "-q", "-o", "out", *how)
        assert (result.exit_code, result.stderr) == (0, NO_TOKENIZER)


def test_json_of_pack_is_that_of_stats(data: Path) -> None:
    result = packer("pack", "a.jsonl", "-l", 16, "-q", "-o", "out", "--json")
    figures = json.loads(result.stdout)
    assert figures == json.loads(packer("stats", "out", "--json").stdout)
    assert (figures["documents"], figures["rows"], figures["tokens"]) == (2, 1, 13)


def test_names_that_are_no_ascii_or_look_like_markup(folder: Path) -> None:
    names = ("naïve[red].jsonl", "line\nend.jsonl")
    for name in names:
        (folder / name).write_bytes(jsonl(name))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    options = ["-l", 16, "-q", "-t", "bytes", "-o", "naïve[red]"]
    result = packer_process("pack", *names, *options, env=environment)
    assert (result.returncode, result.stderr) == (0, b"")
    shown = succeeds("stats", "naïve[red]", "--by", "input").stdout
    assert all(name.split("\n")[0] in shown for name in names)


ESCAPE = "\x1b]0;title\x07\x9b2J\u202e"


def test_no_name_in_a_message_reaches_the_terminal(folder: Path) -> None:
    for name in ("fields", ESCAPE):
        Path(f"{name}.jsonl").write_text(json.dumps({f"{ESCAPE}text": "a"}) + "\n")
    (folder / "good").mkdir()
    (folder / "good" / f"{ESCAPE}.jsonl").write_bytes(jsonl("a"))
    Path("a.csv").write_text(f"{ESCAPE},b\n1,2\n")
    options = ["-l", 16, "-t", "bytes"]
    commands: list[list[object]] = [
        ["pack", "fields.jsonl", *options],
        ["pack", f"{ESCAPE}.jsonl", *options, "--debug"],
        ["pack", "a.csv", *options],
        ["pack", "good", *options, "-o", f"out{ESCAPE}"],
        ["pack", "good", *options, "-o", f"out{ESCAPE}", "--add"],
        ["stats", f"out{ESCAPE}", "--by", "input"],
        ["verify", f"out{ESCAPE}"],
        ["stats", "edited"],
        ["export", f"out{ESCAPE}", "--to", ESCAPE, "-o", "x"],
        [ESCAPE],
    ]
    assert_error(packer("pack", "no\nsuch.jsonl", "-l", 8), 2, "no\\nsuch.jsonl: no such file")
    succeeds("pack", "good", *options, "-o", "edited")
    edit(lambda manifest: manifest["config"].update(strategy=ESCAPE), "edited")
    for command in commands:
        done = packer(*command)
        output = done.stdout + done.stderr
        assert "title" in output, command
        for character in "\x1b\x07\x9b\u202e":
            assert character not in output, command


def test_a_bug_is_reported_as_one(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("packer_cli.run.pipeline.find_inputs", broken)
    result = packer("pack", "a.jsonl", "-l", 8)
    assert_error(result, 3, "KeyError: 'lost'", kind="bug")
    assert "please report it" in result.stderr
    result = packer("pack", "a.jsonl", "-l", 8, "--debug")
    assert result.exit_code == 3
    assert "in broken" in result.stderr


@pytest.mark.parametrize("columns", [80, heavy(120)])
def test_progress_on_a_terminal(data: Path, columns: int) -> None:
    command = ["pack", "a.jsonl", "-l", 16, "-t", "bytes", "-o", "out"]
    output, written = stderr_on_terminal(columns, *command)
    shown = written.split("\r")
    assert output.startswith("out\nmade from ")
    bar = next(one for one in reversed(shown) if "packing: " in one)
    assert bar.startswith("packing: 100%")
    for part in (
        ("B [", "tokens/s]") if columns < 100 else ("B/s, 2 docs, ", "tokens/s, 81.25% used]")
    ):
        assert part in bar
    tokenize = ["tokenize", "a.jsonl", "-t", "bytes", "-o", "tokens"]
    assert "tokenizing: 100%" in stderr_on_terminal(columns, *tokenize)[1]
    assert bar.split("|")[1].count("█") >= 8
    assert re.search(r"packer: out: done in \d+\.\d s\n", "\r".join(shown).replace("\r\n", "\n"))


def test_notes_are_lines_of_their_own_beside_a_bar(data: Path) -> None:
    tiny_tokenizers.save(Path("t"), tiny_tokenizers.unigram())
    _, shown = stderr_on_terminal(80, "pack", "a.jsonl", "-l", 16, "-t", "t", "-o", "out")
    assert re.search(r"[\r\n]packer: using the slower tokenizers engine: [^\r\n]*\r\n", shown)


def test_a_closed_stdout_is_no_error_message(data: Path) -> None:
    pack("a.jsonl", "-l", 16)
    read, write = os.pipe()
    os.close(read)
    command = [packer_script(), "stats", "out"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, timeout=300)
    os.close(write)
    assert result.stderr == b""


def test_a_stdout_that_is_full(data: Path) -> None:
    pack("a.jsonl", "-l", 16)
    command = [packer_script(), "stats", "out"]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, check=False, timeout=300
        )
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: stdout: cannot write: No space left on device\ntip: ")
    assert len(result.stderr.splitlines()) == 2


def test_a_stderr_that_is_full_or_closed_changes_no_exit_code(data: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "wb") as full, open(write, "wb") as closed:
        for name, stream, code in (("a.jsonl", full, 0), ("none.jsonl", closed, 2)):
            command = [packer_script(), "pack", name, "-l", "16", "-t", "bytes", "-o", "out"]
            done = subprocess.run(command, stderr=stream, stdout=subprocess.PIPE, check=False)
            assert (done.returncode, bool(done.stdout)) == (code, code == 0)


def test_interrupted_while_waiting_for_stdin(folder: Path) -> None:
    command = [packer_script(), "pack", "-", "-l", "64", "-t", "bytes", "-q", "-o", "out"]
    with started(*command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        process.stdin.write(jsonl("abcdefgh") * 300_000)  # the first block, and some of the next
        process.stdin.flush()
        assert wait_for(Path("out/.packer").exists)
        time.sleep(0.5)  # until it waits for more
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
        assert process.stderr
        message = process.stderr.read()
    assert (process.returncode, message.splitlines()[:1]) == (130, [b"stopped: interrupted"])
    assert not Path("out").exists()


def closing(which: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    """Run packer with a stream closed: "<&-", ">&-", "2>&-", or several."""
    command = ["sh", "-c", f'exec "$0" "$@" {which}', packer_script(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=300, check=False)


def test_a_closed_stdin_is_no_input(folder: Path) -> None:
    result = closing("<&-", "pack", "-", "-l", 16, "-t", "bytes", "-o", "out")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"error: -: stdin is closed\ntip: ")


@pytest.mark.parametrize("which", ["2>&-", "<&- >&- 2>&-", heavy(">&-")])
def test_closed_outputs_change_nothing(data: Path, which: str) -> None:
    normal = unaltered("pack", "a.jsonl", "-l", 16, "-o", "open")
    result = closing(which, "pack", "a.jsonl", "-l", 16, "-o", "out")
    assert result.returncode == 0
    stdout = normal.stdout.replace("open", "out") if which == "2>&-" else ""
    assert result.stdout.decode() == stdout
    expected = "" if "2>&-" in which else untimed(normal.stderr).replace("open", "out")
    assert untimed(result.stderr.decode()) == expected
    check_directory("out")
    assert recover_texts("out") == ["first", "second"]
