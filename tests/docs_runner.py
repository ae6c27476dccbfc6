"""Runs the pages of docs/ as a reader does, from the first block to the last.

A fenced block whose first line names a file, such as ```toml mix.toml, is written to it. An
indented line that begins with `packer` is run; an indented block directly after one is part of what
it prints. Blocks of Python share their names, and `print(...)  # text` prints that text.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import tiny_tokenizers as tiny
from support import jsonl, packer

ROOT = Path(__file__).parent.parent
_PART = re.compile(
    r"^    packer (?P<command>.*)$"
    r"|^```(?P<language>\w+)(?: (?P<file>\S+))?\n(?P<code>(?:.*\n)*?)```$"
    r"|(?<=\n\n)(?P<shown>(?:    (?!packer ).*\n|\n(?=    (?!packer )))+)",
    re.M,
)


def page(name: str, begin: str = "", end: str = "") -> str:
    """The text of README.md or of a page of docs/, from a heading to another one."""
    text = (ROOT / name).read_text()
    assert begin in text
    assert end in text
    return text[text.index(begin) :].partition(end)[0] if end else text[text.index(begin) :]


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pages name: sample_data/, data/, chats/, my-model with a chat template, a job array."""
    shutil.copytree(ROOT / "sample_data", "sample_data")
    Path("data").mkdir()
    Path("data/a.jsonl").write_bytes(jsonl(*(f"document {n} " * n for n in range(400))))
    shutil.copy("sample_data/documents.jsonl", "data.jsonl")
    Path("chats").mkdir()
    shutil.copy("sample_data/chat.jsonl", "chats")
    template = Path("sample_data/chat.jinja").read_text()
    settings = {"eos_token": tiny.EOS, "chat_template": template}
    tiny.save(Path("my-model"), tiny.byte_level(), tokenizer_config=settings)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "1")


def run(
    text: str, skip: Sequence[str] = (), anew: Sequence[str] = (), python: bool = True,
    names: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run a page, and give the names of its Python.

    Args:
        skip: parts of commands and of blocks of Python that are not run.
        anew: outputs that are removed before a command that writes them and does not update them.
        python: whether Python is run.
        names: what Python has at the beginning.
    """
    names = {"__name__": "page", **(names or {})}
    printed, end, ran = "", 0, 0
    for part in _PART.finditer(text):
        command, file, code = part["command"], part["file"], part["code"]
        if any(word in (command or code or "") for word in skip):
            printed = ""
        elif command:
            for output in anew:
                if f"-o {output}" in command and "--add" not in command:
                    shutil.rmtree(output, ignore_errors=True)
            result = packer(*shlex.split(command, comments=True))
            assert result.exit_code == 0, (command, result.stderr)
            printed, end, ran = indent(result.stdout, "    "), part.end(), ran + 1
        elif file:
            Path(file).write_text(code)
        elif part["language"] == "python" and python:
            _run_python(code, names)
            ran += 1
        elif part["shown"] and printed and not text[end : part.start()].strip():
            assert part["shown"].strip() in printed, printed
    assert ran, "nothing of the page was run"
    return names


def _run_python(code: str, names: dict[str, Any]) -> None:
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "page", "exec", dont_inherit=True), names)  # noqa: S102
    lines = printed.getvalue().splitlines()
    for expected in re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M):
        assert expected in lines, (expected, lines)
