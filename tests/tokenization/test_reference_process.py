"""The reference in a process of its own: it answers, crashes and ends without harm to the run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
from engine_pairs import as_json, as_lists
from support import check_directory, packer_process, packer_script
from tiny_tokenizers import EOS

from packer_cli.errors import InternalError
from packer_cli.tokenization.agreement import BATTERY
from packer_cli.tokenization.engines import ReferenceEngine
from packer_cli.tokenization.reference_process import ReferenceProcess


def test_the_reference_process_answers_like_the_reference_and_ends() -> None:
    content = as_json(tiny.with_template(tiny.byte_level(), "<s>", "A"))
    process, reference = ReferenceProcess(content), ReferenceEngine(content)
    assert as_lists(process.encode(BATTERY)) == as_lists(reference.encode(BATTERY))
    tokens = [EOS, "<none>"]
    assert process.describe(tokens) == reference.describe(tokens)
    process.close()
    assert process._child._process.poll() is not None


def test_modules_in_the_current_directory_are_not_imported(data: Path) -> None:
    for name in ("numpy", "tokenizers", "pickle", "packer_cli"):
        (data / f"{name}.py").write_text("raise SystemExit('imported from here')")
    result = packer_process("pack", "data.jsonl", "-l", "64", "-t", "tok", "-o", "out", "-q")
    assert (result.returncode, result.stderr) == (0, b"")
    check_directory("out")


def test_an_error_inside_the_reference_process_is_told() -> None:
    reference = ReferenceProcess(json.dumps(tiny.byte_level()).encode())
    try:
        with pytest.raises(InternalError, match="TypeError: "):
            reference.encode([7])  # type: ignore[list-item]
        assert len(reference.encode(["it goes on"])[0])
    finally:
        reference.close()


def damaged(case: str) -> tiny.Json:
    document = tiny.byte_level()
    if case == "huge id":
        document["added_tokens"][-1]["id"] = 2**32 - 1
    else:
        document["model"]["continuing_subword_prefix"] = "\N{GRINNING FACE}"
    return document


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("huge id", "has the id 4294967295, at most 16777216 works"),
        ("panic", "tokenizer.json cannot be loaded: "),
    ],
)
def test_a_tokenizer_that_crashes_libraries(data: Path, case: str, message: str) -> None:
    tiny.save(data / "tok", damaged(case))
    result = packer_process(
        "pack", "data.jsonl", "-l", 16, "-t", "tok", "-q", "-o", "out", cwd=data
    )
    error, tip = result.stderr.decode().splitlines()[-2:]  # above them: what Rust says of a panic
    assert (result.returncode, tip[:5]) == (2, "tip: ")
    assert error.startswith("error: tokenizer tok")
    assert message in error


def test_a_closed_stdin_and_a_tokenizer(data: Path) -> None:
    options = ["pack", "data.jsonl", "-l", "16", "-t", "tok", "-q", "-o", "out"]
    command = ["sh", "-c", 'exec "$0" "$@" <&-', packer_script(), *options]
    with subprocess.Popen(command, cwd=data, stderr=subprocess.PIPE) as run:
        try:
            run.wait(timeout=300)
        finally:
            run.kill()
    assert run.returncode == 0
    check_directory(data / "out")
