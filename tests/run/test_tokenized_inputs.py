"""`packer pack` of tokenized directories that are damaged, changed, or gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from chats import chat_tokenizer
from support import assert_error, check_directory, jsonl, packer
from tokenizing import tokenize

pytestmark = pytest.mark.usefixtures("folder")


def tokenized(name: str, *texts: str, tokenizer: str = "bytes") -> Path:
    Path(f"{name}.jsonl").write_bytes(jsonl(*texts))
    tokenize(f"{name}.jsonl", out=name, tokenizer=tokenizer)
    return Path(name)


def with_id(directory: Path, before: int, after: int) -> None:
    """Write another id over the only place of `before`, without another size."""
    (shard,) = directory.glob("documents-*.arrow")
    data = shard.read_bytes()
    old, new = (np.int32(one).tobytes() for one in (before, after))
    assert data.count(old * 3) == 1
    shard.write_bytes(data.replace(old * 3, old + new + old))


@pytest.mark.parametrize("wrong", [-5, 258, 2**31 - 1])
@pytest.mark.parametrize("options", [(), ("--no-shuffle",), ("--strategy", "wrap")])
def test_damaged_ids_are_not_packed(wrong: int, options: tuple[str, ...]) -> None:
    directory = tokenized("a", "one", "xxx", "two" * 30)
    with_id(directory, ord("x"), wrong)
    done = packer("pack", "a", "-l", 16, "-o", "out", "-q", *options)
    assert_error(done, 1, "a: its document", f"holds the id {wrong}", "expected 0 to 257")
    assert not Path("out/manifest.json").exists()


def test_a_damaged_tokenizer_is_not_copied(folder: Path) -> None:
    name = chat_tokenizer(folder / "tok", "{{ messages }}")
    tokenized("a", "one", tokenizer=str(name))
    kept = Path("a/tokenizer.json")
    kept.write_bytes(kept.read_bytes() + b" ")
    done = packer("pack", "a", "-l", 16, "-o", "out", "-q")
    assert_error(done, 1, "a/tokenizer.json: its sha256 is", "the manifest says")
    assert not Path("out").exists()


@pytest.mark.parametrize("options", [(), ("--view",)])
def test_a_directory_that_is_kept_need_not_be_there(options: tuple[str, ...]) -> None:
    for name in "abc":
        tokenized(name, *(f"{name} {number}" for number in range(50)))
    given = ("-l", 64, "-o", "out", "-q", *options)
    packer("pack", "a", *given)
    assert packer("pack", "b", *given, "--add").exit_code == 0
    manifest = json.loads(Path("out/manifest.json").read_bytes())
    assert [one["format"] for one in manifest["inputs"]] == ["tokenized", "tokenized"]
    done = packer("verify", "out", "--against-inputs")
    assert done.exit_code == 0, done.output
    shutil.move("a", "elsewhere")
    done = packer("pack", "c", *given, "--add")
    assert done.exit_code == 0, done.output
    manifest = json.loads(Path("out/manifest.json").read_bytes())
    assert [one["documents"] for one in manifest["inputs"]] == [50, 50, 50]


def test_a_directory_that_is_dropped_is_not_opened() -> None:
    for name in "abc":
        tokenized(name, *(f"{name} {number}" * 9 for number in range(50)))
    given = ("-l", 64, "--no-shuffle", "--unit-bytes", "4k", "-o", "out", "-q")
    assert packer("pack", "a", "b", *given).exit_code == 0
    shutil.rmtree("a")
    done = packer("pack", "b", "c", *given, "--update", "--prune")
    assert done.exit_code == 0, done.output
    assert check_directory("out")["documents"] == 100
    assert packer("verify", "out", "--against-inputs").exit_code == 0


@pytest.mark.parametrize(
    "command", [("pack", "-o", "out"), ("pack", "-o", "out", "--view"), ("plan",)]
)
@pytest.mark.parametrize("wrong", [1, 2**31 - 1])
def test_a_damaged_index_is_not_planned(command: tuple[str, ...], wrong: int) -> None:
    directory = tokenized("a", "one", "x" * 76, "two" * 30)
    (index,) = directory.glob("index-*.arrow")
    data, length = index.read_bytes(), np.int32(77).tobytes()
    assert data.count(length) == 1
    index.write_bytes(data.replace(length, np.int32(wrong).tobytes()))
    done = packer(*command, "a", "-l", 16, "-q")
    assert_error(done, 1, f"a/{index.name}: the sum of length is", "the manifest says 172")
    assert not Path("out/manifest.json").exists()


def test_what_is_around_documents_is_told_where_all_have_it() -> None:
    Path("a.jsonl").write_bytes(jsonl("some text"))
    assert packer("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "with").exit_code == 0
    given = ["tokenize", "a.jsonl", "-t", "bytes", "--no-eos", "-q", "-o", "without"]
    assert packer(*given).exit_code == 0
    for names, around in ((["with"], True), (["with", "without"], False)):
        done = packer("pack", *names, "-l", 64, "-q", "-o", "out", "--overwrite")
        assert done.exit_code == 0, done.stderr
        tokenizer = json.loads(Path("out/manifest.json").read_bytes())["tokenizer"]
        assert ("suffix" in tokenizer) is around
        assert tokenizer["prefix"] == []
