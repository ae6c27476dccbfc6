"""`packer pack` of tokenized directories, by the command line: the same rows, from anywhere."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import altered
from chats import CHATML, assistant, chat, chat_tokenizer, user
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import (
    assert_error,
    check_directory,
    contents,
    inputs_of,
    jsonl,
    packer,
    recover_documents,
    succeeds,
    work_folder,
)
from tokenizing import documents_in, tokenize

from packer_cli import open_packed
from packer_cli.options.options import NAMES

pytestmark = pytest.mark.usefixtures("folder")


def text_of(random_: random.Random, most: int) -> str:
    return "".join(random_.choices("abc def", k=random_.randrange(most)))


def write_texts(name: str, count: int, seed: int = 0, most: int = 300) -> list[str]:
    random_ = random.Random(seed)
    texts = [text_of(random_, most) for _ in range(count)]
    Path(name).write_bytes(jsonl(*texts))
    return texts


def pack(*arguments: object, out: str = "out") -> dict[str, Any]:
    succeeds("pack", *arguments, "-q", "-o", out)
    return check_directory(out)


def rows_in(directory: str) -> list[dict[str, Any]]:
    packed = open_packed(directory)
    return [
        row
        for shard in packed.manifest["shards"]
        for batch in packed.batches(shard)
        for row in batch.to_pylist()
    ]


def by_first_input(rows: list[dict[str, Any]], directories: list[str]) -> list[dict[str, Any]]:
    """Rows whose segments name the inputs of the tokenized directory, which is the only one."""
    (directory,) = directories
    documents = documents_in(directory)
    found = []
    for row in rows:
        segments = [
            one | dict(zip(("file", "position"), documents[one["position"]][:2], strict=True))
            for one in row["segments"]
        ]
        found.append(row | {"segments": segments})
    return found


CHOICES = {
    "--strategy": st.sampled_from(sorted(NAMES)),
    "--overlong": st.sampled_from([None, "split", "truncate", "drop"]),
    "--truncate-side": st.sampled_from([None, "left"]),
    "--segment-multiple": st.sampled_from([None, 8]),
    "--seed": st.sampled_from([None, 7]),
}
OPTIONS = st.fixed_dictionaries(CHOICES)


def as_arguments(chosen: dict[str, Any], *, is_chat: bool) -> list[str]:
    """Without what does not go together."""
    if is_chat and chosen["--strategy"] == "wrap":
        chosen = chosen | {"--strategy": None}
    if chosen["--strategy"] == "wrap" or (is_chat and chosen["--overlong"] == "split"):
        chosen = chosen | {"--overlong": None}
    return [str(part) for one in chosen.items() if one[1] is not None for part in one]


@pytest.fixture
def both_kinds(folder: Path) -> Path:
    """texts and chats, raw and tokenized."""
    chat_tokenizer(folder / "tok", CHATML)
    write_texts("texts.jsonl", 150)
    random_ = random.Random(1)
    turns = [
        chat(*(
            who(text_of(random_, 60))
            for _ in range(random_.randrange(1, 4))
            for who in (user, assistant)
        ))
        for _ in range(60)
    ]  # fmt: skip
    turns[3:5] = [chat(user("nobody answers"))] * 2
    Path("chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in turns))
    for name in ("texts", "chats"):
        tokenize(f"{name}.jsonl", "--unit-bytes", "3k", tokenizer="tok", out=name)
    return folder


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPTIONS, st.sampled_from(["texts", "chats"]))
@example(dict.fromkeys(CHOICES) | {"--strategy": "best-fit", "--truncate-side": "left"}, "texts")
def test_rows_are_those_of_the_raw_input(
    both_kinds: Path, chosen: dict[str, Any], name: str
) -> None:
    options = ["-l", 64, "--no-shuffle", *as_arguments(chosen, is_chat=name == "chats")]
    options += ["--unit-bytes", "1G", "--overwrite"]
    raw = pack(f"{name}.jsonl", "-t", "tok", *options, out="raw")
    tokens = pack(name, *options, out="out")
    assert by_first_input(rows_in("out"), [name]) == rows_in("raw")
    same = set(raw) - {"config", "inputs", "units", "shards", "side_files", "side_file_bytes",
                       "sha256"}  # fmt: skip
    counted = same - {  # what only encoding can tell is told where it was encoded
        "empty_documents", "trained_turns", "turns_without_end", "double_bos_documents",
        "empty_turns", "unread", "special_tokens_in_text", "fim_documents",
        "masked_documents", "masked_tokens", "repeated_tokens", "edge_tokens",
        *(name for name in raw if name.startswith("unshown_")),
    }  # fmt: skip
    assert {key: tokens[key] for key in counted} == {key: raw[key] for key in counted}
    kept = [one for one in raw["side_files"] if "token" in one or "template" in one]
    assert {one: tokens["side_files"][one] for one in kept} == {
        one: raw["side_files"][one] for one in kept
    }


@pytest.fixture
def three() -> list[list[str]]:
    """Directories a, b and c with texts of their own."""
    written = []
    for seed, (name, count) in enumerate({"a": 400, "b": 200, "c": 100}.items()):
        written.append(write_texts(f"{name}.jsonl", count, seed))
        tokenize(f"{name}.jsonl", "--unit-bytes", "9k", out=name)
    return written


@pytest.fixture
def one() -> None:
    """Directory a."""
    write_texts("a.jsonl", 100)
    tokenize("a.jsonl", "--unit-bytes", "9k", out="a")


def by_place(names: str) -> dict[tuple[int, int], list[int]]:
    """The documents of directories named by a letter, by what segments call them."""
    return {
        (file, number): ids
        for file, name in enumerate(names)
        for number, (_, _, ids, _) in enumerate(documents_in(name))
    }


UNITS = ["-l", 64, "--unit-bytes", "64k"]


@pytest.mark.parametrize("options", [[], ["--no-shuffle"], ["--strategy", "wrap"]])
def test_every_document_once_and_the_same_bytes_however_they_are_packed(
    three: list[list[str]], options: list[str]
) -> None:
    manifest = pack("a", "b", "c", *UNITS, *options)
    assert len(manifest["units"]) > 3
    assert {place: ids.tolist() for place, ids in recover_documents("out").items()} == by_place(
        "abc"
    )
    assert inputs_of(manifest) == [f"{name}/manifest.json" for name in "abc"]
    command = ["a", "b", "c", *UNITS, *options]
    pack(*command, "--workers", 1, out="one")
    pack(*command, "--workers", 5, out="five")
    for rank in (1, 0):
        succeeds("pack", *command, "-q", "--rank", rank, "--world-size", 2, "-o", "ranks")
    assert contents("one") == contents("five") == contents("ranks")


def test_rows_mix_all_directories(three: list[list[str]]) -> None:
    """In every part of the result they have their shares, as in a hand of well shuffled cards."""
    manifest = pack("a", "b", "c", "-l", 1024, "--unit-bytes", "64k")
    units = len(manifest["units"])
    assert units > 3
    documents: dict[int, set[tuple[int, int]]] = {unit: set() for unit in range(units)}
    packed = open_packed("out")
    mixed = rows = 0
    for shard in manifest["shards"]:
        for batch in packed.batches(shard):
            for segments in batch.column("segments").to_pylist():
                places = {(one["file"], one["position"]) for one in segments}
                documents[shard["unit"]] |= places
                mixed += len({file for file, _ in places}) > 1
                rows += 1
    assert mixed > 0.8 * rows
    lengths = [len(documents_in(name)) for name in "abc"]
    for places in documents.values():
        shares = np.bincount([file for file, _ in places], minlength=3)
        assert np.abs(shares - np.array(lengths) / units).max() <= 1
        numbers = np.array([number for file, number in places if file == 0])
        # those of one directory are from all of it
        assert lengths[0] * 0.3 < numbers.mean() < lengths[0] * 0.7
        assert numbers.max() - numbers.min() > 0.7 * lengths[0]


def texts_of_units(out: str) -> list[list[bytes]]:
    """The documents of each unit, in the order of their content."""
    manifest = json.loads(Path(out, "manifest.json").read_bytes())
    found: list[set[tuple[int, int]]] = [set() for _ in manifest["units"]]
    packed = open_packed(out)
    for shard in manifest["shards"]:
        for batch in packed.batches(shard):
            for segments in batch.column("segments").to_pylist():
                found[shard["unit"]] |= {(one["file"], one["position"]) for one in segments}
    ids = recover_documents(out)
    return [sorted(ids[place].tobytes() for place in places) for places in found]


def test_the_order_is_of_content_and_seed_alone(three: list[list[str]]) -> None:
    """Not of paths, nor of how documents lay in files, or were cut into shards."""
    texts = [text for text in three[0] if text]
    random.Random(9).shuffle(texts)
    Path("x.jsonl").write_bytes(jsonl(*texts[:77]))
    Path("y.jsonl").write_bytes(jsonl(*texts[77:]))
    Path("deep").mkdir()
    tokenize("x.jsonl", "y.jsonl", "--unit-bytes", "3k", out="deep/other")
    pack("a", *UNITS, out="one")
    pack("deep/other", *UNITS, out="other")
    assert len(texts_of_units("one")) > 3
    assert texts_of_units("one") == texts_of_units("other")
    pack("a", *UNITS, "--seed", 5, out="seeded")
    assert texts_of_units("one") != texts_of_units("seeded")


def test_no_tokenizer_is_loaded(both_kinds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of the environment, nor the copy in the directory, nor any library for it."""
    monkeypatch.setenv("PACKER_TOKENIZER", "tok")
    before = pack("texts", "-l", 64, out="before")
    for name in ("tok", "texts.jsonl"):
        path = Path(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    program = """
import os, sys
forbidden = ("tokenizers", "gigatoken", "transformers", "jinja2")
assert not set(forbidden) & set(sys.modules)
class Finder:
    def find_spec(self, name, path=None, target=None):
        assert name not in forbidden, name
sys.meta_path.insert(0, Finder())
from packer_cli.__main__ import main
main()
"""
    command = [sys.executable, "-c", program, "pack", "texts", "-l", "64", "-q", "-o", "out"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert contents("out") == contents("before")
    assert (
        before["tokenizer"]["pad_token_id"]
        == json.loads(Path("texts/manifest.json").read_bytes())["tokenizer"]["pad_token_id"]
    )


LATE = """--tokenizer bytes, --chat-template x, --bos, --no-eos, --shape text,
--text-field x, --train-on all, --input-format text, --sample-by document, --on-error skip,
--special-tokens-in-text error, --prompt-template chat, --overlong truncate-turns"""


def test_options_that_come_too_late(one: None) -> None:
    for options in map(str.split, LATE.split(",")):
        done = packer("pack", "a", "-l", 64, *options, "-q", "-o", "out")
        name = options[0].replace("--no-eos", "--eos").replace("text-field", "field")
        assert_error(done, 2, name, "a is tokenized already")
    assert not Path("out").exists()


def test_texts_and_chats_together(both_kinds: Path) -> None:
    manifest = pack("texts", "chats", "-l", 64)
    assert manifest["config"]["overlong"] == "split-text"
    lengths = [[len(ids) for _, _, ids, _ in documents_in(name)] for name in ("texts", "chats")]
    dropped, untrained = manifest["dropped_documents"], manifest["untrained_documents"]
    assert dropped - untrained == sum(length > 64 for length in lengths[1])
    labels, found = recover_documents("out", "labels"), recover_documents("out")
    assert {place[1]: len(ids) for place, ids in found.items() if place[0] == 0} == dict(
        enumerate(lengths[0])
    )
    assert max(len(ids) for place, ids in found.items() if place[0] == 1) <= 64
    assert max(lengths[0]) > 64
    texts = [place for place in found if place[0] == 0]
    assert texts
    for place in texts:  # all but the first token of each piece
        assert (labels[place] == -100).sum() == -(-len(found[place]) // 64)
    for options in ([], ["--against-inputs"]):
        verified = packer("verify", "out", *options)
        assert (verified.exit_code, verified.stdout.count(": OK")) == (0, 1), verified.stdout
    chats = [place for place in found if place[0] == 1]
    assert chats
    assert all((labels[place] == -100).sum() > 2 for place in chats)


def test_what_does_not_go_together(three: list[list[str]], folder: Path) -> None:
    chat_tokenizer(folder / "tok", CHATML)
    tokenize("a.jsonl", tokenizer="tok", out="other")
    done = packer("pack", "a", "other", "-l", 64, "-o", "out")
    assert_error(done, 2, "a was tokenized with bytes", "other with tok (sha256 ")
    for inputs in (["a", "b.jsonl"], ["b.jsonl", "a"]):
        done = packer("pack", *inputs, "-l", 64, "-q", "-o", "out")
        assert_error(done, 2, "a is tokenized, b.jsonl is not")
    done = packer("pack", "a.jsonl", "-l", 64, "--view", "-q", "-o", "out")
    assert_error(done, 2, "--view: rows can only refer to stored tokens")
    done = packer("pack", "a", "a/", "-l", 64, "-q", "-o", "out")
    assert_error(done, 2, "a: the same file as a; ")
    for inside in ("a", "a/."):
        done = packer("pack", "a", "-l", 64, "-q", "--overwrite", "-o", inside)
        assert_error(done, 2, "lies inside the output directory")
    assert not Path("out").exists()


def test_how_a_directory_is_named(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pack("a", "-l", 64, out="usual")
    for name in ("a", "a/", "a/manifest.json", "./a"):
        succeeds("pack", name, "-l", 64, "-q", "--overwrite")
        assert [path.name for path in Path().glob("*-packed-64")] == ["a-packed-64"]
        assert rows_in("a-packed-64") == rows_in("usual")
    monkeypatch.chdir("a")
    succeeds("pack", "manifest.json", "-l", 64, "-q", "-o", "../out")
    assert rows_in("../out") == rows_in("../usual")


NOT_NAMED = {
    "sets": "sets: no input files in this directory",
    "sets/": "sets/: no input files in this directory",
    "sets/*": "sets/*: no file matches this pattern",
    "sets/**": "sets/**: matches only results of packer",
    "sets/*/*": "sets/*/*: matches only results of packer",
}


def test_tokenized_directories_that_are_not_named(one: None) -> None:
    Path("sets").mkdir()
    Path("a").rename("sets/my a")
    for name, message in NOT_NAMED.items():
        done = packer("pack", name, "-l", 64, "-q", "-o", "out")
        assert_error(done, 2, message)
        assert "tokenized" in done.stderr.splitlines()[-1]
    succeeds("pack", "sets/my a", "-l", 64, "-q", "-o", "out")
    Path("a.jsonl").rename("sets/a.jsonl")  # beside others they are left out, and that is said
    note = "packer: sets/my a: left out: it holds a result of packer; to pack its tokens, name it"
    for name in ("sets", "sets/**"):
        done = packer("pack", name, "-t", "bytes", "-l", 64, "--overwrite", "-o", "out")
        assert done.stderr.splitlines().count(note) == 1
        assert inputs_of(check_directory("out")) == ["sets/a.jsonl"]


def unfinished(folder: Path) -> None:
    """As a run that fails leaves it."""
    shutil.rmtree(folder)
    Path("bad.jsonl").write_bytes(jsonl(*["good"] * 500) + b"{broken")
    command = ["tokenize", "bad.jsonl", "-t", "bytes", "-q", "--unit-bytes", "2k", "--workers", 1]
    assert packer(*command, "-o", folder).exit_code == 1
    assert list(work_folder(folder).glob("unit-*.json"))


def newer(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 7'))


def first(folder: Path, kind: str = "documents") -> Path:
    return next(folder.glob(f"{kind}-00000*"))


DAMAGE: list[tuple[Callable[[Path], object], int, str]] = [
        (newer, 1, "a/manifest.json: format version 7, this packer reads 1"),
        (unfinished, 2, "a: is a result of packer that is not finished"),
        (lambda a: os.truncate(first(a), 1000), 1, ".arrow: has 1000 bytes, the manifest says"),
        (lambda a: first(a).unlink(), 1, ".arrow: is missing"),
        (lambda a: (a / "manifest.json").unlink(), 1, ".arrow: is a part of a tokenized directory"),
]  # fmt: skip


def test_directories_that_are_not_whole(one: None) -> None:
    Path("a").rename("whole")
    for damage, code, message in DAMAGE:
        shutil.copytree("whole", "a")
        damage(Path("a"))
        assert_error(packer("pack", "a", "-l", 64, "-q", "-o", "out"), code, message)
        assert not Path("out/manifest.json").exists()
        shutil.rmtree("a")


def test_a_directory_that_changes_while_it_is_packed(three: list[list[str]]) -> None:
    """What was planned is not what is there: the run fails, or what it writes is of one state."""
    program = """
import shutil
import subprocess
import sys
from packer_cli.cli import app as cli
from packer_cli.run import unit
make, done = unit.pack_unit, []
def change(unit, job):
    result = make(unit, job)
    if not done:
        done.append(1)
        shutil.rmtree("b")
        shutil.copytree("c", "b")
    return result
unit.pack_unit = change
cli.main()
"""
    failed = altered(
        program, "pack", "a", "b", *map(str, UNITS), "--workers", "1", "-q", "-o", "out"
    )
    assert failed.returncode == 1, failed.stderr
    assert "b/manifest.json: changed while it was read" in failed.stderr


def test_adding_to_what_is_packed_from_tokens(three: list[list[str]]) -> None:
    pack("a", "b", *UNITS)
    done = packer("pack", "a", "b", *UNITS, "-o", "out", "--add")
    assert "out: up to date" in done.stderr
    pack("c", *UNITS, "--add")
    assert {p: ids.tolist() for p, ids in recover_documents("out").items()} == by_place("abc")
    Path("b.jsonl").write_bytes(jsonl("new", "texts"))
    tokenize("b.jsonl", "--unit-bytes", "9k", "--add", out="b")
    pack("a", "b", "c", *UNITS, "--add")
    assert {p: ids.tolist() for p, ids in recover_documents("out").items()} == by_place("abc")


def test_a_document_that_is_too_long_is_named_by_its_first_input(three: list[list[str]]) -> None:
    Path("c.jsonl").write_bytes(jsonl("short", "x" * 100))
    tokenize("c.jsonl", "--overwrite", out="c")
    done = packer("pack", "c", "-l", 64, "--overlong", "error", "-q", "-o", "out")
    assert_error(
        done, 1, "c/manifest.json, document 1 (c.jsonl at 18): the document has 101 tokens"
    )
