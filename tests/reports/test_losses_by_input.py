"""What was truncated, dropped and left out as untrained, counted for each input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import assistant, chat, pack_chat, user, write
from support import jsonl, pack, packer

from packer_cli.result.manifest import OF_INPUTS

pytestmark = pytest.mark.usefixtures("folder")
LOSSES = [name for name in OF_INPUTS if name.split("_")[0] in ("truncated", "dropped", "untrained")]


def losses(manifest: dict[str, Any]) -> list[dict[str, int]]:
    """Of each input, those that are not 0, after a check that they add up to the totals."""
    for name in LOSSES:
        assert sum(one[name] for one in manifest["inputs"]) == manifest[name], name
    return [{name: one[name] for name in LOSSES if one[name]} for one in manifest["inputs"]]


def read_manifest() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("out/manifest.json").read_bytes())
    return content


def write_texts(folder: Path) -> None:
    """Documents of 16 tokens and less, and with EOS of 21 and 100 in a, of 31 in c."""
    (folder / "a.jsonl").write_bytes(jsonl("a" * 20, "b" * 99, "c"))
    (folder / "b.jsonl").write_bytes(jsonl("d" * 15, "e"))
    (folder / "c.jsonl").write_bytes(jsonl("f" * 30, "g"))


@pytest.mark.parametrize("what", ["truncated", "dropped"])
def test_texts(folder: Path, what: str) -> None:
    write_texts(folder)
    policy = {"truncated": "truncate", "dropped": "drop"}[what]
    manifest = pack("a.jsonl", "b.jsonl", "c.jsonl", "-l", 16, "--overlong", policy)
    left = 16 if what == "truncated" else 0
    assert losses(manifest) == [
        {f"{what}_documents": 2, f"{what}_tokens": 121 - 2 * left},
        {},
        {f"{what}_documents": 1, f"{what}_tokens": 31 - left},
    ]
    assert packer("verify", "out", "--against-inputs", "--sample", "all").exit_code == 0


@pytest.mark.parametrize("options", [[], ["--unit-bytes", 40]])
def test_documents_of_tokenized_directories(folder: Path, options: list[object]) -> None:
    """Whose batches mix documents of several inputs."""
    write_texts(folder)
    for name in ("a", "b", "c"):
        assert packer("tokenize", f"{name}.jsonl", "-t", "bytes", "-o", name).exit_code == 0
        (own,) = json.loads(Path(name, "manifest.json").read_bytes())["inputs"]
        assert not own.keys() & {*LOSSES}
    inputs = "a", "b", "c", "-o", "out"
    assert packer("pack", *inputs, "-l", 16, "--overlong", "drop", *options).exit_code == 0
    manifest = read_manifest()
    assert losses(manifest) == [
        {"dropped_documents": 2, "dropped_tokens": 121}, {},
        {"dropped_documents": 1, "dropped_tokens": 31},
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", ["best-fit", "wrap"])
def test_untrained_documents(folder: Path, strategy: str) -> None:
    write([chat(user("hi"), assistant("yes"))], "a.jsonl")
    write([chat(user("hello")), chat(user("you")), chat(user("hi"), assistant("no"))], "b.jsonl")
    inputs = [folder / "a.jsonl", folder / "b.jsonl"]
    split = ["--force-split"] if strategy == "wrap" else []
    manifest = pack_chat(inputs[0], inputs[1], "-l", 64, "--strategy", strategy, *split)
    first, second = losses(manifest)
    assert first == {}
    assert (second["untrained_documents"], second["dropped_documents"]) == (2, 2)
    assert second["untrained_tokens"] == second["dropped_tokens"] == manifest["dropped_tokens"]


def test_conversations_whose_turns_are_left_out(folder: Path) -> None:
    turns = [user("a" * 9), assistant("b" * 9)]
    write([chat(*turns)], "a.jsonl")
    write([chat(*turns * 20)], "b.jsonl")
    manifest = pack_chat(
        folder / "a.jsonl", folder / "b.jsonl", "-l", 100, "--overlong", "truncate-turns"
    )
    first, second = losses(manifest)
    assert first == {}
    assert second == {
        "truncated_documents": 1, "truncated_tokens": manifest["truncated_tokens"]
    }  # fmt: skip


def test_stats_show_the_inputs_that_lost_something(folder: Path) -> None:
    write_texts(folder)
    pack("a.jsonl", "b.jsonl", "c.jsonl", "-l", 16, "--overlong", "drop")
    lines = packer("stats", "out", "--by", "input").stdout.splitlines()
    first = next(
        i for i, line in enumerate(lines) if line.split() == ["dropped", "their", "tokens", "input"]
    )
    assert [line.split() for line in lines[first + 1 :] if line] == [
        ["2", "121", "a.jsonl"], ["1", "31", "c.jsonl"],
    ]  # fmt: skip
    assert max(map(len, lines[first:])) <= 80
    by_input = json.loads(packer("stats", "out", "--by", "input", "--json").stdout)["by_input"]
    assert [one["dropped_tokens"] for one in by_input] == [121, 0, 31]
