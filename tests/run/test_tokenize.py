"""`packer tokenize` by the command line: which documents there are, with which tokens; and packing
these once they are damaged, changed, or gone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import unaltered
from support import BYTES_EOS, assert_error, contents, jsonl, packer, random_texts, succeeds
from tokenizing import batches_in, check_tokenized, documents_in, texts_in, tokenize, trained_of

pytestmark = pytest.mark.usefixtures("folder")

TEXTS = ["one", "", "two three", "né" * 40, "x", ""]


@pytest.fixture
def texts() -> list[str]:
    written = random_texts(400, 300, 3)
    Path("a.jsonl").write_bytes(jsonl(*written[:300]))
    Path("b.jsonl").write_bytes(jsonl(*written[300:]))
    return written


@pytest.mark.parametrize("name", ["a.parquet", "-"])
def test_documents_in_their_order(name: str) -> None:
    """Of stdin, too; in a script the path alone, or with --json the figures, are printed."""
    pq.write_table(pa.table({"text": TEXTS}), "a.parquet", row_group_size=2)
    command = ["tokenize", name, "-t", "bytes", "-o", "tokens", "--json", "-q"]
    done = unaltered(*command, stdin=jsonl(*TEXTS))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["documents"] == len([text for text in TEXTS if text])
    assert check_tokenized("tokens")["empty_documents"] == TEXTS.count("")
    assert texts_in("tokens") == [text for text in TEXTS if text]
    if name == "a.parquet":
        assert [place for _, place, *_ in documents_in("tokens")] == [0, 2, 3, 4]
    assert all(ids[-1] == BYTES_EOS for _, _, ids, _ in documents_in("tokens"))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (  # (tokens, what is trained on)
            [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]},
             {"input_ids": []}, {"input_ids": [9], "labels": [-100]}],
            [([5, 6, 7], [0, 3]), ([5, 6, 7, 8], [1, 2, 3, 4]), ([9], [])],
        ),
        ([{"input_ids": [1, 2]}, {"input_ids": [3]}], [([1, 2], None), ([3], None)]),
    ],
    ids=["labels", "tokens alone have null for everything"],
)  # fmt: skip
def test_tokens_and_labels(records: list[Any], expected: list[Any]) -> None:
    Path("a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    manifest = tokenize("a.jsonl", tokenizer=None)
    assert manifest["tokenizer"] is None
    found = [(ids, trained) for *_, ids, trained in documents_in("tokens")]
    assert [(ids, trained_of(ids, trained).tolist()) for ids, trained in found] == [
        (ids, trained_of(ids, trained).tolist()) for ids, trained in expected
    ]
    assert (found[0][1] is None) == (expected[0][1] is None)


def test_a_unit_of_several_shards() -> None:
    """A new one begins after the record batch that fills one."""
    written = [f"{n % 7}" * (200_000 if n % 3 else n) for n in range(90)]
    Path("a.jsonl").write_bytes(jsonl(*written))
    for out, size in (("whole", "1G"), ("parts", "1M")):
        succeeds(
            "tokenize", "a.jsonl", "-t", "bytes", "-q", "--unit-bytes", "1G", "--shard-bytes", size,
            "-o", out,
        )  # fmt: skip
    whole, parts = (
        pa.Table.from_batches(batches_in(out, "documents")) for out in ("whole", "parts")
    )
    assert whole.equals(parts)
    assert texts_in("parts") == [text for text in written if text]
    names = [one["file"].rsplit("-", 1)[0] for one in json.loads(
        Path("parts/manifest.json").read_bytes())["shards"]]  # fmt: skip
    count = len(names) // 2
    assert count > 1
    assert names == [
        f"{kind}-00000-{n:03}" for n in range(count) for kind in ("documents", "index")
    ]


def test_size() -> None:
    """4 bytes a token, and at most 48 bytes a document, with the index and all other files."""
    Path("a.jsonl").write_bytes(jsonl(*(f"{i:x}" for i in range(60_000))))
    manifest = tokenize("a.jsonl")
    size = sum(path.stat().st_size for path in Path("tokens").iterdir())
    assert size <= 4 * manifest["tokens"] + 48 * manifest["documents"]
    assert size > 4 * manifest["tokens"]


def test_the_index_is_of_content_alone(texts: list[str]) -> None:
    Path("c.jsonl").write_bytes(jsonl(*reversed(texts)))
    tokenize("a.jsonl", "b.jsonl", out="one")
    tokenize("c.jsonl", "--unit-bytes", "5k", out="other")
    hashes = [
        [row["content_hash"] for batch in batches_in(out, "index") for row in batch.to_pylist()]
        for out in ("one", "other")
    ]
    assert len(set(hashes[0])) == len({text for text in texts if text})
    assert sorted(hashes[0]) == sorted(hashes[1])
    assert hashes[0] != hashes[1]


def test_adding(texts: list[str]) -> None:
    tokenize("a.jsonl")
    tokenize("b.jsonl", "--add")
    assert texts_in("tokens") == [text for text in texts if text]
    before = {path.name for path in Path("tokens").glob("documents-*")}
    Path("a.jsonl").write_bytes(jsonl("new", "documents"))
    manifest = tokenize("a.jsonl", "--add")
    assert sorted(texts_in("tokens")) == sorted([*filter(None, texts[300:]), "new", "documents"])
    assert before & {one["file"] for one in manifest["shards"]}
    for command in (["tokenize", "--no-eos"], ["pack", "-l", 64]):
        options = [*command[1:], "-t", "bytes", "-q", "-o", "tokens", "--add"]
        done = packer(command[0], "a.jsonl", "b.jsonl", *options)
        assert_error(done, 2, "--eos was on, is" if command[0] != "pack" else "were tokenized")


@pytest.mark.parametrize(("first", "second"), [("pack", "tokenize"), ("tokenize", "pack")])
def test_results_of_the_other_kind_in_the_way(texts: list[str], first: str, second: str) -> None:
    def command(name: str) -> list[object]:
        rows = ["-l", 64] if name == "pack" else []
        return [name, "a.jsonl", "-t", "bytes", "-q", *rows, "-o", "out"]

    succeeds(*command(first))
    before = contents("out")
    assert_error(packer(*command(second)), 2, "out: holds a finished result")
    assert contents("out") == before
    succeeds(*command(second), "--overwrite")
    succeeds(*command(second)[:-1], "fresh")
    assert contents("out") == contents("fresh")


def test_what_is_tokenized_already_is_refused(texts: list[str]) -> None:
    tokenize("a.jsonl")
    for name in ("tokens", "tokens/manifest.json"):
        done = packer("tokenize", name, "-q", "-o", "out")
        assert_error(done, 2, "tokens: is tokenized already")
    (shard,) = Path("tokens").glob("documents-*")
    done = packer("tokenize", shard, "-q", "-o", "out")
    assert_error(done, 1, "is a part of a tokenized directory")


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


@pytest.mark.parametrize(
    ("wrong", "options"), [(-5, ()), (258, ("--no-shuffle",)), (258, ("--strategy", "wrap"))]
)
def test_damaged_ids_are_not_packed(wrong: int, options: tuple[str, ...]) -> None:
    directory = tokenized("a", "one", "xxx", "two" * 30)
    with_id(directory, ord("x"), wrong)
    done = packer("pack", "a", "-l", 16, "-o", "out", "-q", *options)
    assert_error(done, 1, "a: its document", f"holds the id {wrong}", "expected 0 to 257")
    assert not Path("out/manifest.json").exists()


@pytest.mark.parametrize("options", [(), ("--view",)])
def test_a_directory_that_is_kept_need_not_be_there(options: tuple[str, ...]) -> None:
    for name in "abc":
        tokenized(name, *(f"{name} {number}" for number in range(50)))
    given = ("-l", 64, "-o", "out", "-q", *options)
    packer("pack", "a", *given)
    succeeds("pack", "b", *given, "--add")
    manifest = json.loads(Path("out/manifest.json").read_bytes())
    assert [one["format"] for one in manifest["inputs"]] == ["tokenized", "tokenized"]
    succeeds("verify", "out", "--against-inputs")
    shutil.move("a", "elsewhere")
    succeeds("pack", "c", *given, "--add")
    manifest = json.loads(Path("out/manifest.json").read_bytes())
    assert [one["documents"] for one in manifest["inputs"]] == [50, 50, 50]


@pytest.mark.parametrize(
    ("command", "wrong"), [(("pack", "-o", "out"), 2**31 - 1), (("plan",), 76)]
)
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
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "with")
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "--no-eos", "-q", "-o", "without")
    for names, around in ((["with"], True), (["with", "without"], False)):
        succeeds("pack", *names, "-l", 64, "-q", "-o", "out", "--overwrite")
        tokenizer = json.loads(Path("out/manifest.json").read_bytes())["tokenizer"]
        assert ("suffix" in tokenizer) is around
        assert tokenizer["prefix"] == []
