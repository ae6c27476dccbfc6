"""Masks through a whole run, and processes beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from chats import (
    REWRITTEN,
    TAGS,
    chat,
    many,
    pack_chat,
    positions,
    refused,
    run,
    user,
    write,
)
from support import children_of, contents, packer_script, recover_documents


def test_a_run_with_nothing_to_train_on_fails(folder: Path) -> None:
    refused(
        [chat(user("Hi"))] * 2, 1, "nothing to pack", "2 of those dropped have nothing to train"
    )


def test_processes_beside_the_run_change_nothing(folder: Path) -> None:
    records: list[Any] = many(4000)
    for record in records[::2]:
        record["messages"][1]["reasoning_content"] = "which the template does not show"
    records[1234] = {"messages": 5}
    path = write(records)
    assert path.stat().st_size > 1 << 20
    results = []
    for workers in (1, 3):
        options = ("--workers", workers, "--unit-bytes", 300_000, "--on-error", "skip")
        manifest = pack_chat(path, *options)
        assert (manifest["rejected_records"], manifest["unshown_documents"]) == (1, 1999)
        results.append((manifest, Path("out/rejected.jsonl").read_bytes()))
    assert results[0] == results[1]
    assert sum(flags.sum() for flags in trained_flags()) == manifest["trained_tokens"]
    place = f"data.jsonl, line 1235 (byte {positions(records)[1234]}): field 'messages' is"
    assert place in run(path, "--workers", 3).stderr


def test_what_cannot_be_decided_in_another_process(folder: Path) -> None:
    records = many(4000)
    records[3000]["messages"][1]["weight"] = 0
    place = f"data.jsonl, line 3001 (byte {positions(records)[3000]}): "
    refused(records, 1, place, "rearranges", template=REWRITTEN, options=["--workers", 3])


def test_a_template_that_another_process_finds_no_turns_in(folder: Path) -> None:
    template = TAGS + "{% if messages | length < 2 %}{{ raise_exception('too few') }}{% endif %}"
    parts = ("refuses a question and its answer", "too few")
    for workers in (1, 3):  # the same words, whoever finds it out
        refused(many(4000), 1, *parts, template=template, options=["--workers", workers])


@pytest.mark.parametrize("kills", [1, 1000])
def test_a_process_that_is_killed_is_replaced(folder: Path, kills: int) -> None:
    """As the kernel does when the machine runs out of memory, once or again and again."""
    write(many(2_500))
    Path("t.jinja").write_text(TAGS)
    options = ("-l", 512, "-t", "bytes", "--workers", 2, "--chat-template", "t.jinja", "-o")
    command = [packer_script(), "pack", "data.jsonl", *map(str, options)]
    killed = set[int]()
    with subprocess.Popen([*command, "out"], stderr=subprocess.PIPE) as run:
        while run.poll() is None and len(killed) < kills:
            for child in children_of(run.pid) - killed:
                if len(killed) < kills:
                    killed.add(child)
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        _, stderr = run.communicate(timeout=300)
    lost = b"was ended from outside, by signal 9"
    if kills > 1:
        assert (run.returncode, lost + b", 3 times" in stderr) == (1, True), stderr
        assert not Path("out").exists()
    else:
        assert (run.returncode, lost + b"; packing it again" in stderr) == (0, True), stderr
        subprocess.run([*command, "undisturbed"], check=True, capture_output=True)
        assert contents("out") == contents("undisturbed")


def trained_flags() -> list[Any]:
    return [labels != -100 for labels in recover_documents("out", "labels").values()]
