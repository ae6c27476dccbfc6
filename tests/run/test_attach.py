"""`packer tokenize OUT --attach FILES`: values that a job wrote are with the tokens that it read,
however the files tell which, and whatever is packed of them.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import assistant, chat, chat_tokenizer, user
from support import assert_error, contents, jsonl, packer, random_texts

from packer_cli import open_packed
from packer_cli.errors import DataError
from packer_cli.inputs.attached import Attached, AttachedValues, pairs_of
from packer_cli.inputs.discovery import input_file
from packer_cli.options.carried import TOKEN, Carried
from packer_cli.options.documents import DocumentConfig
from packer_cli.result.layout import digest
from packer_cli.result.manifest import to_bytes
from packer_cli.result.tokenized import Tokens, open_tokenized

pytestmark = pytest.mark.usefixtures("folder")

K = 3
IDS = pa.list_(pa.list_(pa.uint16()))
LOGPROBS = pa.list_(pa.list_(pa.float16()))
CARRY = ["--carry", f"ids:uint16[{K}]", "--carry", f"logprobs:float16[{K}]"]
WAYS = {
    "input_ids": ["input_ids"],
    "content_hash": ["content_hash"],
    "hexadecimal": ["content_hash"],
    "document": ["document"],
    "place": ["file", "position"],
}


def ids_of(token: int, place: int) -> list[int]:
    return [(257 * token + place + k) % 65536 for k in range(K)]


def logprobs_of(token: int, place: int) -> list[float]:
    return [-(token % 7) / 8 - k - place / 4 for k in range(K)]


def tokenize(name: str = "out", *options: object, seed: int = 0, count: int = 60) -> None:
    """A directory of several units, with documents that are there twice."""
    texts = [one for one in random_texts(count, 70, seed) if one]
    Path(f"{name}.jsonl").write_bytes(jsonl(*texts, *texts[:5]))
    given = ("-t", "bytes", "--unit-bytes", "1k", *options)
    result = packer("tokenize", f"{name}.jsonl", *given, "-q", "-o", name)
    assert result.exit_code == 0, result.stderr


def rows_of(directory: str, way: str = "input_ids") -> list[dict[str, Any]]:
    """A row for each document, as a scoring job would write it."""
    rows = list[dict[str, Any]]()
    for documents, index in zip(
        sorted(Path(directory).glob("documents-*.arrow")),
        sorted(Path(directory).glob("index-*.arrow")),
        strict=True,
    ):
        table = pa.ipc.open_stream(documents).read_all()
        table = table.append_column(
            "content_hash", pa.ipc.open_stream(index).read_all()["content_hash"]
        )
        for row in table.to_pylist():
            row["document"] = len(rows)
            if way == "hexadecimal":
                row["content_hash"] = row["content_hash"].hex()
            tokens = [*enumerate(row["input_ids"])]
            rows.append(
                {name: row[name] for name in WAYS[way]}
                | {
                    "ids": [ids_of(token, place) for place, token in tokens],
                    "logprobs": [[*map(np.float16, logprobs_of(token, place))]
                                 for place, token in tokens],
                }
            )  # fmt: skip
    return rows


def write(rows: list[dict[str, Any]], path: str = "scores.parquet", group: int = 7) -> str:
    kinds = {"ids": IDS, "logprobs": LOGPROBS}
    columns = {name: pa.array([row[name] for row in rows], kinds.get(name)) for name in rows[0]}
    table = pa.table(columns)
    pq.write_table(table, path, row_group_size=group)
    return path


def attach(*files: str, directory: str = "out", more: tuple[str, ...] = ()) -> Any:
    return packer("tokenize", directory, "--attach", *files, *CARRY, *more)


def assert_attached(directory: str) -> int:
    """Hold every value of rows to its token and the place of that; how many tokens there are."""
    packed, seen = open_packed(directory), 0
    found = packed.gather(np.arange(len(packed)), packed.facts.config.columns)
    for row in range(len(packed)):
        real = np.zeros(packed.max_length, bool)
        for number, (begin, end) in enumerate(pairwise(found["cu_seqlens"][row].tolist())):
            real[begin:end] = True
            start = int(found["start"][row][number])
            for place in range(begin, end):
                of = int(found["input_ids"][row][place]), start + place - begin
                assert found["ids"][row][place].tolist() == ids_of(*of)
                assert found["logprobs"][row][place].tolist() == logprobs_of(*of)
            seen += end - begin
        assert not found["ids"][row][~real].any()
    return seen


def carried(directory: str) -> npt.NDArray[Any]:
    """What follows the tokens of all documents, with them."""
    documents = open_tokenized(directory)
    tokens = Tokens({0: documents}, documents.carried.values())
    pieces = np.arange(len(documents)), np.zeros(len(documents), np.int32), documents.lengths
    values = tokens.carried_of(*pieces)
    assert values is not None
    return values


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["as they are", "every third", "shuffled"])
def test_values_are_with_their_tokens(way: str, order: str) -> None:
    """Through any length, seed and view, and a mixture with another directory."""
    for name in ("out", "other"):
        tokenize(name, seed=len(name))
        rows, parts = rows_of(name, way), 1 if order == "as they are" else 3
        random.Random(0).shuffle(rows) if order == "shuffled" else None
        files = [write(rows[part::parts], f"{name}{part}.parquet") for part in range(parts)]
        result = attach(*files, directory=name)
        assert result.exit_code == 0, result.stderr
        names = " and ".join(WAYS[way])
        assert f"matched by {names}: {len(rows)} documents of {len(rows)}" in result.stderr
        assert packer("verify", name, "--against-inputs").exit_code == 0
    whole = open_tokenized("out").facts.tokens
    for number, options in enumerate(("-l 16", "-l 64 --seed 3", "-l 40 --strategy wrap --view")):
        result = packer("pack", "out", *options.split(), "-q", "-o", f"rows{number}")
        assert result.exit_code == 0, result.stderr
        assert assert_attached(f"rows{number}") == whole
    sources = [f'[[source]]\nname = "{one}"\ninputs = ["{one}"]\nepochs = 2\n'
               for one in ("out", "other")]  # fmt: skip
    Path("mix.toml").write_text("max_length = 48\n" + "".join(sources))
    mixed = packer("pack", "mix.toml", "-q", "-o", "mixed")
    assert mixed.exit_code == 0, mixed.stderr
    assert assert_attached("mixed") == 2 * (whole + open_tokenized("other").facts.tokens)


def test_what_documents_had_stays() -> None:
    """What is trained on, what records carry, bad records, and what reports say of the inputs."""
    talks = [
        chat(user("hi"), assistant("ho" * n, weight=0.5)) | {"reward": n} for n in range(1, 30)
    ]
    lines = [json.dumps(one) for one in talks]
    Path("chat.jsonl").write_text("\n".join([*lines[:9], "{", *lines[9:]]) + "\n")
    carry = ["--carry", "weight:float32", "--carry", "reward:float16"]
    tokenizer = chat_tokenizer(Path("tokenizer"))
    given = ["-t", tokenizer, *carry, "--on-error", "skip", "--unit-bytes", "1k"]
    assert packer("tokenize", "chat.jsonl", *given, "-q", "-o", "out").exit_code == 0
    write(rows_of("out"))
    result = attach("scores.parquet", more=("-o", "new"))
    assert result.exit_code == 0, result.stderr
    before, after = (json.loads(Path(f"{one}/manifest.json").read_text()) for one in ("out", "new"))
    same = before.keys() - {"config", "shards", "side_files", "sha256"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    for name in ("rejected.jsonl", "tokenizer.json", "chat_template.jinja"):
        assert contents("new")[name] == contents("out")[name]
    for packed in ("out", "new"):
        assert packer("pack", packed, "-l", 64, "-q", "-o", f"{packed}-rows").exit_code == 0
    names = ["input_ids", "labels", "weight", "reward"]
    old, new = (open_packed(f"{one}-rows").take(np.arange(5), names) for one in ("out", "new"))
    assert old.to_pydict() == new.to_pydict()
    verified = packer("verify", "new", "--against-inputs")
    assert verified.exit_code == 0, verified.stderr
    assert_error(
        packer("tokenize", "chat.jsonl", *given, "--update", "-q", "-o", "new"), 2, "attached"
    )


@pytest.mark.parametrize("way", ["input_ids", "content_hash", "place"])
def test_pairs(way: str) -> None:
    """Their tokens do not tell which side is the chosen one; all else does."""
    sides = {"prompt": "which?", "chosen": "this", "rejected": "that"}
    turned = sides | {"chosen": "that", "rejected": "this"}
    Path("pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (sides, turned)))
    tokenizer = chat_tokenizer(Path("tokenizer"))
    assert packer("tokenize", "pairs.jsonl", "-t", tokenizer, "-q", "-o", "out").exit_code == 0
    write(rows_of("out", way))
    if way == "input_ids":
        assert_error(
            attach("scores.parquet", more=("-q",)), 2, "which side of a pair is the chosen"
        )
        return
    assert attach("scores.parquet").exit_code == 0
    assert packer("verify", "out", "--against-inputs").exit_code == 0
    assert packer("pack", "out", "-l", 64, "-q", "-o", "rows").exit_code == 0
    assert open_packed("rows").facts.config.carry == (
        f"ids:uint16[{K}]/token",
        f"logprobs:float16[{K}]/token",
    )


@pytest.mark.parametrize(
    ("inputs", "options", "then"),
    [
        ("a.jsonl chat.jsonl", "", ""),
        ("chat.jsonl", "--turns each", ""),
        ("a.jsonl b.jsonl", "", "tokenize b.jsonl --update --prune"),
        ("a.jsonl", "", "rm a.jsonl"),
    ],
)
def test_whatever_was_tokenized(inputs: str, options: str, then: str) -> None:
    """Several shapes, several documents of a record, inputs that are gone."""
    talks = [chat(user("hi"), assistant("ho" * n), user("x"), assistant("y")) for n in range(9)]
    Path("chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in talks))
    for seed, name in enumerate(("a", "b")):
        Path(f"{name}.jsonl").write_bytes(jsonl(*random_texts(20, 50, seed, f"{name} ")))
    given = ("-t", chat_tokenizer(Path("tokenizer")), *options.split(), "-q", "-o", "out")
    assert packer("tokenize", *inputs.split(), *given).exit_code == 0
    if then.startswith("rm"):
        Path("a.jsonl").unlink()
    elif then:
        assert packer(*then.split(), *given).exit_code == 0
    rows = rows_of("out", "place")
    write(rows)
    result = attach("scores.parquet")
    assert result.exit_code == 0, result.stderr
    again = () if then.startswith("rm") else ("--against-inputs",)
    for _ in range(2):  # the second time without the files
        verified = packer("verify", "out", *again)
        assert verified.exit_code == 0, verified.stdout
        Path("scores.parquet").unlink(missing_ok=True)
    assert packer("pack", "out", "-l", 64, "--keep-untrained", "-q", "-o", "rows").exit_code == 0
    assert assert_attached("rows") == open_tokenized("out").facts.tokens


def test_documents_without_values() -> None:
    """Left out, unless they have defaults; counted and told, as are rows of no document."""
    tokenize()
    rows = rows_of("out")
    gone = rows[7]["input_ids"]
    write([*(row for row in rows if row["input_ids"] != gone),
           {"input_ids": [1, 2], "ids": [[1] * K] * 2,
            "logprobs": [[np.float16(0)] * K] * 2}])  # fmt: skip
    ended = attach("scores.parquet", more=("--carry-missing", "error", "-q"))
    lost = sum(row["input_ids"] == gone for row in rows)
    assert_error(ended, 1, "out, document 7 (out.jsonl at", f"{lost} document lacks them")
    result = attach("scores.parquet", more=("-o", "new"))
    assert result.exit_code == 0, result.stderr
    text = f"{lost} of {len(rows)} documents have no attached values, and are left out"
    assert text in result.stderr
    assert "1 row with attached values belong" in result.stderr
    said = json.loads(packer("stats", "new", "--json").stdout)
    figures = {name: said[name] for name in ("documents", "dropped_documents", "dropped_tokens")}
    assert figures == {
        "documents": len(rows) - lost, "dropped_documents": lost,
        "dropped_tokens": lost * len(gone),
    }  # fmt: skip
    assert said["attached"]["rows_without"] == 1
    assert [one["about"] for one in said["warnings"]][:2] == ["attached", "rows"]
    assert packer("verify", "new", "--against-inputs").exit_code == 0
    assert packer("pack", "new", "-l", 64, "-q", "-o", "rows").exit_code == 0
    assert_attached("rows")
    defaults = ("--carry-default", "ids=0", "--carry-default", "logprobs=-65504")
    result = attach("scores.parquet", more=defaults)
    assert result.exit_code == 0, result.stderr
    assert "and have those of --carry-default" in result.stderr
    values = carried("out").view([("ids", np.uint16, K), ("logprobs", np.float16, K)])
    assert (values["logprobs"] == -65504).all(1).sum() == lost * len(gone)
    assert packer("verify", "out", "--against-inputs").exit_code == 0


def test_a_damaged_file() -> None:
    """Cannot be left out, as an input can: its documents would go with it."""
    tokenize()
    write(rows_of("out"))
    Path("scores.parquet").write_bytes(Path("scores.parquet").read_bytes()[:-9])
    result = attach("scores.parquet", more=("-q",))
    assert_error(result, 1, "scores.parquet: not a readable parquet file")
    assert "tip: write the file again" in result.stderr
    assert "--on-error" not in result.stderr


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_file_that_loses_rows(is_seen: bool) -> None:
    """After its keys are read, so that a batch of values is not there; whether the row groups that
    are looked at are still those of before or not.
    """
    rows = [{"document": n, "ids": [[n] * K]} for n in range(20)]
    file = input_file(0, write(rows, "s.parquet"), DocumentConfig())
    columns = [Carried("ids", "uint16", K, TOKEN)]
    attached = Attached([file], columns, "document", pairs=False)
    values = AttachedValues(attached)
    one = np.ones(1, np.int64)
    assert values.of(np.array([3]), one)["ids"].tolist() == [[3] * K]
    write(rows[:9], "s.parquet")
    attached.files = [input_file(0, "s.parquet", DocumentConfig())] if is_seen else [file]
    with pytest.raises(DataError, match=r"s.parquet: changed while it was read"):
        AttachedValues(attached).of(np.array([13]), one)


def test_places_are_found_at_once() -> None:
    """Also where all documents are the first of their file: halves of keys tell them apart."""
    keys = pairs_of(np.zeros(1000, np.int64), np.arange(1000))
    assert len(np.unique(keys[:, 0])) == 1000


def test_two_rows_of_one_document() -> None:
    """Of equal content the first counts, as equal documents get unlike values on a GPU."""
    tokenize()
    rows = rows_of("out")
    write([*rows, rows[3] | {"ids": [[9] * K for _ in rows[3]["ids"]]}])
    result = attach("scores.parquet", more=("-o", "new"))
    assert result.exit_code == 0, result.stderr
    more = len(rows) + 1 - len({tuple(row["input_ids"]) for row in rows})
    assert f"{more} rows of the same content as an earlier one, which counts" in result.stderr
    assert packer("pack", "new", "-l", 64, "-q", "-o", "rows").exit_code == 0
    assert assert_attached("rows") > 0
    rows = rows_of("out", "document")
    write([*rows, rows[3]])
    assert_error(
        attach("scores.parquet", more=("-q",)), 1,
        f"(row {len(rows)} of the file): has the document of scores.parquet, row group 0, row 3",
    )  # fmt: skip


CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "too few": (
        lambda rows: rows[8].update(ids=rows[8]["ids"][1:]),
        ("scores.parquet, row group 1, row 1 (row 8 of the file): ids has", "expected"),
    ),
    "another K": (
        lambda rows: rows[9].update(ids=[[1, 2] for _ in rows[9]["ids"]]),
        ("row group 1, row 2 (row 9 of the file): ids has", "x 2 values, expected"),
    ),
    "not finite": (
        lambda rows: rows[10]["logprobs"][0].__setitem__(0, np.float16("inf")),
        ("row 3 (row 10 of the file): logprobs holds inf, which no float16 is",),
    ),
    "no id": (
        lambda rows: rows[8].update(input_ids=[-1]),
        ("row group 1, row 1 (row 8 of the file): its input_ids are not a list of token ids",),
    ),
    "no column": (
        lambda rows: [row.pop("logprobs") for row in rows],
        ("scores.parquet: no column 'logprobs'; columns found: input_ids, ids",),
    ),
    "of others": (
        lambda rows: [row.update(input_ids=[3, *row["input_ids"]]) for row in rows],
        ("out, document 0 (out.jsonl at", "has no values in the attached files", "nor has any"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_files_that_do_not_fit(case: str) -> None:
    """End the run, and leave the directory as it is."""
    tokenize()
    before, rows = contents("out"), rows_of("out")
    change, parts = CASES[case]
    change(rows)
    write(rows)
    assert_error(attach("scores.parquet", more=("-q",)), 1, *parts)
    assert {name: one for name, one in contents("out").items() if ".packer" not in name} == before


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("tokenize out --attach s.parquet", ("--attach needs --carry",)),
        ("tokenize out --carry-missing error", ("--carry-missing needs --attach",)),
        (
            "tokenize a.jsonl --attach s.parquet --carry ids:uint16[3]",
            ("a.jsonl is not a tokenized directory",),
        ),
        ("tokenize out --attach a.jsonl --carry ids:uint16[3]", ("a.jsonl is not Parquet",)),
        ("tokenize out --attach bare.parquet --carry ids:uint16[3]", ("does not tell which",)),
        ("tokenize out --attach s.parquet --carry ids:uint16[3] --bos", ("--bos: out is",)),
        ("tokenize out --attach s.parquet --carry ids:uint16[3] --add", ("not go with --update",)),
        ("tokenize out --attach s.parquet --carry ids:int32[3]/message", ("have no messages",)),
        (
            "tokenize out --attach s.parquet --carry ids:int32[3] -o s3://a/b",
            ("s3://a/b is a URL",),
        ),
        (
            f"tokenize out --attach s.parquet {' '.join(CARRY)} --carry-default ids=0",
            ("--carry-default: logprobs has none",),
        ),
        ("tokenize out", ("is tokenized already",)),
    ],
)
def test_what_cannot_be_attached(command: str, parts: tuple[str, ...]) -> None:
    tokenize()
    rows = rows_of("out")
    write(rows, "s.parquet")
    write([{"ids": row["ids"]} for row in rows], "bare.parquet")
    Path("a.jsonl").write_bytes(jsonl("x"))
    assert_error(packer(*command.split(), "-q"), 2, *parts)


def test_the_same_command_again() -> None:
    """Does nothing; other files, other options and another place are refused."""
    tokenize()
    write(rows_of("out")[5:-5])
    assert attach("scores.parquet").exit_code == 0
    before = contents("out")
    again = attach("scores.parquet")
    assert (again.exit_code, contents("out")) == (0, before)
    assert "out: up to date" in again.stderr
    write(rows_of("out"), "others.parquet", group=3)
    given = ("tokenize", "out", "--attach", "scores.parquet")
    wide = ("--carry", f"ids:int32[{K}]", "--carry", f"logprobs:float16[{K}]")
    for result in (
        attach("others.parquet", more=("-q",)),
        attach("scores.parquet", more=("-q", "-o", "new")),
        attach("scores.parquet", more=("-q", "--carry-missing", "error")),
        attach("scores.parquet", more=("-q", "--carry-default", "ids=0")),
        packer(*given, *wide, "-q"),
    ):
        assert_error(result, 2, "out: has attached values already: ids, logprobs")
    assert not Path("new").exists()


def test_verify_compares_the_files() -> None:
    tokenize()
    rows = rows_of("out")
    write(rows)
    assert attach("scores.parquet").exit_code == 0
    Path("scores.parquet").rename("elsewhere")
    gone = packer("verify", "out", "--against-inputs")
    assert gone.exit_code == 0
    assert "the values of ids, logprobs are not compared" in gone.stderr
    rows[10]["ids"][0][1] += 1
    write(rows)
    changed = packer("verify", "out", "--against-inputs")
    assert (changed.exit_code, "scores.parquet: " in changed.stdout) == (1, True)
    assert "attach the files as they are" in changed.stderr
    manifest = json.loads(Path("out/manifest.json").read_text())
    size, sha256 = digest("scores.parquet")
    manifest["attached"]["files"] = [{"path": "scores.parquet", "size": size, "sha256": sha256}]
    Path("out/manifest.json").write_bytes(to_bytes(manifest))
    forged = packer("verify", "out", "--against-inputs")
    first = rows[10]["ids"][0]
    assert forged.exit_code == 1
    before = [first[0], first[1] - 1, first[2]]
    assert f"ids has {before} at place 0 of document 10" in forged.stdout
    assert f"{first} expected when encoded again: in segment 0, of" in forged.stdout


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"columns": ["ids", "others"]}, "attached: others is not carried"),
        ({"documents_without": 3}, "0 documents are left out, 3 lack attached values"),
        ({"by": "colour"}, "matching regex '^(input_ids|hash|document|place)$'"),
    ],
)
def test_a_manifest_that_says_other_things(change: dict[str, Any], part: str) -> None:
    tokenize()
    write(rows_of("out"))
    assert attach("scores.parquet").exit_code == 0
    manifest = json.loads(Path("out/manifest.json").read_text())
    manifest["attached"] |= change
    Path("out/manifest.json").write_bytes(to_bytes(manifest))
    result = packer("verify", "out")
    assert (result.exit_code, part in result.stdout + result.stderr) == (1, True)
