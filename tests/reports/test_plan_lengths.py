"""`packer plan --lengths`: rows of samples from a table of their lengths, and index.parquet."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from approving import assert_approved
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Page
from support import assert_error, packer, succeeds

from packer_cli import plan_packing
from packer_cli.options.options import NAMES
from packer_cli.options.run_options import StepOptions
from packer_cli.packing.figures import squared_sums
from packer_cli.plan import lengths as module
from packer_cli.steps import even_order

pytestmark = pytest.mark.usefixtures("folder")
Columns = dict[str, list[Any]]
STRATEGIES = [name for name in NAMES if name != "wrap"]


def records(columns: Columns) -> list[dict[str, Any]]:
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def write_parquet(path: Path, columns: Columns) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=7)


def write_arrow(path: Path, columns: Columns) -> None:
    table = pa.table(columns)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_stream(path: Path, columns: Columns) -> None:
    table = pa.table(columns)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_lines(path: Path, columns: Columns) -> None:
    content = "".join(json.dumps(record) + "\n" for record in records(columns)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_array(path: Path, columns: Columns) -> None:
    path.write_text(json.dumps(records(columns)))


def write_csv(path: Path, columns: Columns) -> None:
    plain = path.with_suffix("") if path.suffix in (".gz", ".xz") else path
    with open(plain, "w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if plain.suffix == ".tsv" else ",")
        writer.writerows([columns.keys(), *zip(*columns.values(), strict=True)])
    if plain != path:
        compress = gzip.compress if path.suffix == ".gz" else lzma.compress
        path.write_bytes(compress(plain.read_bytes()))


FORMS: dict[str, Callable[[Path, Columns], None]] = {
    "a.parquet": write_parquet, "a.arrow": write_arrow, "a.ipc": write_stream,
    "a.jsonl": write_lines, "a.jsonl.gz": write_lines, "a.json": write_array,
    "a.csv": write_csv, "a.tsv": write_csv, "a.csv.gz": write_csv, "a.csv.xz": write_csv,
}  # fmt: skip


def table(name: str = "a.parquet", **columns: list[Any]) -> Path:
    FORMS[name](Path(name), columns)
    return Path(name)


def planned(path: object, *options: object, lengths: str = "n") -> list[dict[str, Any]]:
    """The lines of index.parquet."""
    Path("index.parquet").unlink(missing_ok=True)
    succeeds("plan", path, "--lengths", lengths, "-o", "index.parquet", "-q", *options)
    return pq.read_table("index.parquet").to_pylist()


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=200).filter(lambda many: 0 < min(
        (length for length in many if length), default=99) <= 64),
    st.integers(0, 9), st.sampled_from([1, 4]),
    st.sampled_from([None, "--max-segments-per-row", "--balance"]),
)  # fmt: skip
def test_rows_are_those_of_plan_packing(
    strategy: str, lengths: list[int], seed: int, multiple: int, option: str | None
) -> None:
    options: dict[str, Any] = {}
    if option == "--balance" and strategy not in ("next-fit", "harmonic"):
        options = {"balance": "attention"}
    if option == "--max-segments-per-row" and strategy != "mffd":
        options = {"max_segments_per_row": 3}
    ways = chain(*((f"--{name.replace('_', '-')}", value) for name, value in options.items()))
    plan = plan_packing(
        lengths, 64, strategy=strategy, seed=seed, overlong="drop", segment_multiple=multiple,
        **options,
    )  # fmt: skip
    rows = planned(
        table(n=lengths), "-l", 64, "--strategy", strategy, "--seed", seed,
        "--segment-multiple", multiple, *ways,
    )  # fmt: skip
    assert [row["row"] for row in rows] == [*range(len(rows))]
    assert [row["keys"] for row in rows] == plan.rows()
    assert [row["lengths"] for row in rows] == [[lengths[i] for i in row] for row in plan.rows()]
    assert [row["used"] for row in rows] == plan.row_tokens.tolist()
    left_out = [i for i, length in enumerate(lengths) if not 0 < length <= 64]
    assert sorted([*chain(*plan.rows()), *left_out]) == [*range(len(lengths))]


def drawn(count: int = 400, seed: int = 0) -> Columns:
    """Keys and two lengths of samples, in seeded order."""
    draw = random.Random(seed)
    return {
        "id": [f"{n:03d}" for n in draw.sample(range(1000), count)],
        "text": [draw.randrange(60) for _ in range(count)],
        "image": [draw.choice((0, 16, 64)) for _ in range(count)],
        "other": [draw.choice(('a "word"', "two\nlines", "")) for _ in range(count)],
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["id", None, "nr"])
def test_formats_agree_and_keys_follow_samples(form: str, key: str | None) -> None:
    samples = drawn()
    samples["nr"] = [int(name) - 500 for name in samples["id"]]
    rows = planned(table(form, **samples), *(["--key", key] * bool(key)), "-l", 64, lengths="text")
    keys = samples[key] if key else [*range(400)]
    if key == "nr" and form[:5] in ("a.csv", "a.tsv"):  # which has text only
        keys = [*map(str, keys)]
    numbers = plan_packing(samples["text"], 64, seed=0, overlong="drop").rows()
    assert [row["keys"] for row in rows] == [[keys[i] for i in row] for row in numbers]
    assert [row["lengths"] for row in rows] == [
        [samples["text"][i] for i in row] for row in numbers
    ]


@pytest.mark.parametrize("form", FORMS)
def test_several_lengths_are_added_up(form: str) -> None:
    samples = drawn()
    total = [text + image for text, image in zip(samples["text"], samples["image"], strict=True)]
    rows = planned(table(form, **samples), "--key", "id", "-l", 96, lengths="text,image")
    numbers = plan_packing(total, 96, seed=0, overlong="drop").rows()
    place = {key: number for number, key in enumerate(samples["id"])}
    assert [[place[key] for key in row["keys"]] for row in rows] == numbers
    for name, values in {
        "lengths": total,
        "text": samples["text"],
        "image": samples["image"],
    }.items():
        assert [row[name] for row in rows] == [[values[i] for i in row] for row in numbers], name
    assert all(row["used"] == sum(row["text"]) + sum(row["image"]) for row in rows)


def test_a_sum_may_be_longer_than_any_length() -> None:
    """It is dropped, and counted whole."""
    most = (1 << 31) - 1
    rows = planned(table(n=[most, 5], m=[most, 6]), "-l", 64, lengths="n,m")
    assert [row["lengths"] for row in rows] == [[11]]
    command = ("plan", table(n=[most, 5], m=[most, 6]), "--lengths", "n,m", "-l", 64, "--json")
    (outcome,) = json.loads(succeeds(*command, "-q").stdout)["outcomes"]
    assert (outcome["dropped_documents"], outcome["dropped_tokens"]) == (1, 2 * most)


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint32", "int64", "uint64"])
def test_integers_of_every_type_also_in_structs(kind: str) -> None:
    lengths = [7, 0, 120, 64, 3]
    column = pa.array(lengths, kind)
    path = table(n=column, meta=pa.StructArray.from_arrays([column], ["n"]))
    rows = planned(path, "-l", 64)
    assert planned(path, "-l", 64, lengths="meta.n") == rows
    assert sorted(chain(*(row["keys"] for row in rows))) == [0, 3, 4]
    write_lines(Path("b.jsonl"), {"meta": [{"n": length} for length in lengths]})
    assert planned("b.jsonl", "-l", 64, lengths="meta.n") == rows


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([5, 2**63 + 1, 0], pa.uint64()), pa.array([b"\xff", b"", b"b"]),
        pa.array(["b", "a", "b"]).dictionary_encode(), pa.array(["x", "y", "z"], pa.string_view()),
        pa.array(["x", "y", "z"], pa.large_string()), pa.array([0.5, 1.5, 2.5]),
    ],
    ids=lambda keys: str(keys.type),
)  # fmt: skip
def test_keys_of_every_type(keys: Any) -> None:
    write_arrow(Path("a.arrow"), {"n": [3, 4, 5], "k": keys})
    (row,) = planned("a.arrow", "-l", 64, "--key", "k")
    assert dict(zip(row["lengths"], row["keys"], strict=True)) == dict(
        zip([3, 4, 5], keys.to_pylist(), strict=True)
    )


def test_samples_of_several_inputs_are_numbered_one_after_another() -> None:
    table("a.csv", n=[1, 2], k=["a", "b"])
    table("a.parquet", n=[3, 4, 5], k=["c", "d", "e"])
    (row,) = planned("a.csv", "a.parquet", "-l", 64)
    assert dict(zip(row["keys"], row["lengths"], strict=True)) == {i: i + 1 for i in range(5)}


def figures(*options: object) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(succeeds("plan", *options, "--json", "-q").stdout)
    return content


def test_figures_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = drawn(1000, seed=1)
    path = table(**samples)
    shown = figures(path, "--lengths", "text", "-l", "40,64", "--segment-multiple", 8)
    monkeypatch.setattr(module, "_AT_ONCE", 50)
    assert figures(path, "--lengths", "text", "-l", "40,64", "--segment-multiple", 8) == shown
    lengths = samples["text"]
    assert (shown["documents"], shown["tokens"]) == (1000 - lengths.count(0), sum(lengths))
    for max_length, outcome in zip((40, 64), shown["outcomes"], strict=True):
        plan = plan_packing(lengths, max_length, seed=0, overlong="drop", segment_multiple=8)
        for name in (
            "rows", "segments", "tokens", "padding_tokens", "utilization", "lower_bound_rows",
            "dropped_documents", "dropped_tokens",
        ):  # fmt: skip
            assert outcome[name] == getattr(plan.metrics, name), name
        assert outcome["empty_documents"] == lengths.count(0) > 0
        assert outcome["documents"] == outcome["unpacked_rows"] == outcome["segments"]
        histograms = outcome["histograms"]
        assert sum(histograms["row_fill"]) == sum(histograms["segments_per_row"]) == len(plan)
        squares = squared_sums(plan.pieces.length[plan.order], plan.row_offsets)
        assert outcome["attention_span"] == squares.sum() / outcome["tokens"]
    assert shown["outcomes"][0]["dropped_documents"] > 0


def test_rows_of_even_steps() -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(3, 1.2, 4000), 1, 256).astype(int).tolist()
    path = table(n=lengths)
    sizes = ["--ranks", 4, "--micro-batches", 2, "--batch-size", 2]
    rows, even = planned(path, "-l", 256), planned(path, "-l", 256, *sizes)
    squares = np.array([sum(length**2 for length in row["lengths"]) for row in rows])
    order = even_order(squares, 256, StepOptions(4, 2, 2), "")
    assert [row["keys"] for row in even] == [rows[number]["keys"] for number in order]
    assert [row["row"] for row in even] == [*range(len(rows))]
    assert json.loads(pq.read_schema("index.parquet").metadata[b"packer"])["ranks"] == 4
    too_many = ["plan", path, "--lengths", "n", "-l", 256, "--ranks", 999]
    assert_error(packer(*too_many, "-o", "b.parquet", "-q"), 2, "fewer than a step of 999")
    assert not Path("b.parquet").exists()


def test_a_plan_says_how_it_was_made() -> None:
    planned(table(n=[3, 4], m=[1, 1]), "-l", 64, "--strategy", "ffd", "--seed", 3, lengths="n,m")
    schema = pq.read_schema("index.parquet")
    assert schema.remove_metadata() == pa.schema({
        "row": pa.int64(), "keys": pa.list_(pa.int64()), "lengths": pa.list_(pa.int32()),
        "used": pa.int32(), "n": pa.list_(pa.int32()), "m": pa.list_(pa.int32()),
    })  # fmt: skip
    made_with = json.loads(schema.metadata[b"packer"])
    assert made_with.pop("packer_version")
    assert made_with == {
        "kind": "plan", "lengths": ["n", "m"], "key": None, "max_length": 64, "seed": 3,
        "strategy": "first-fit", "overlong": "drop", "max_segments_per_row": None,
        "segment_multiple": 1, "balance": "none",
    }  # fmt: skip


# a table | more options | exit code | what the error says
WRONG: list[tuple[str, Any, str, int, str]] = [
    ("a.parquet", {"n": [1, None]}, "", 1, "a.parquet, row 1, counted from 0: n is null, expected"),
    ("a.parquet", {"n": [1] * 9 + [-4]}, "", 1, "a.parquet, row 9, counted from 0: n is -4"),
    ("a.parquet", {"n": [1.0]}, "", 1, "a.parquet: column 'n' has type double, expected integers"),
    ("a.arrow", {"n": pa.array([1]).dictionary_encode()}, "", 1, "'n' has type dictionary<values"),
    ("a.parquet", {"n": ["1"]}, "", 1, "a.parquet: column 'n' has type string, expected integers"),
    ("a.parquet", {"n": [2**31]}, "", 1, "n is 2147483648, expected a whole number from 0"),
    ("a.arrow", {"n": pa.array([2**64 - 1], pa.uint64())}, "", 1, "n is 18446744073709551615"),
    ("a.parquet", {"n": [{"x": 1}]}, "", 1, "column 'n' has type struct<x: int64>"),
    ("a.parquet", {"n": [1, 2], "k": ["a", None]}, "--key k", 1, "row 1, counted from 0: k is nu"),
    ("a.parquet", {"m": [1]}, "", 2, "a.parquet: no column 'n'; columns found: m"),
    ("a.parquet", {"n": [1]}, "--key k", 2, "a.parquet: no column 'k'; columns found: n"),
    ("a.arrow", {"n": [1] * 9 + [65]}, "--overlong error", 1,
     "a.arrow: sample 9 has 65 tokens, --max-length is 64"),
    ("a.parquet", {"n": [0, 99]}, "", 1, "nothing to pack: 1 empty, 1 dropped"),
    ("a.parquet", {"n": pa.array([], pa.int32())}, "", 1, "nothing to pack: 0 empty, 0 dropped"),
    ("a.jsonl", {"n": [1, 2.5]}, "", 1, "a.jsonl, row 1, counted from 0: n is 2.5, expected a who"),
    ("a.jsonl", {"n": [1, True]}, "", 1, "n is True"),
    ("a.jsonl", {"n": [1, 10**30]}, "", 1, "row 1, counted from 0: n is 1000000000000000"),
    ("a.jsonl", {"n": [1, 2], "k": ["a", 1]}, "--key k", 1, "k is 1, expected a whole number of"),
    ("a.jsonl", {"n": [1], "k": [None]}, "--key k", 1, "k is null, expected a whole number of 64"),
    ("a.jsonl", b'{"n": 1}\n{"m": 1}\n', "", 1, "a.jsonl, line 2 (byte 9): no field 'n'; fields"),
    ("a.jsonl", b'{"n": 1}\n{"n": \n', "", 1, "a.jsonl, line 2 (byte 9): not valid JSON"),
    ("a.jsonl", b'{"m": {"n": 1}}\n', "", 2, "a.jsonl: no column 'n'; columns found: m"),
    ("a.jsonl", b"", "", 1, "nothing to pack"),
    ("a.csv", {"n": ["1", "1.5"]}, "", 1, "a.csv, row 1, counted from 0: n is '1.5', expected"),
    ("a.csv", b"n,k\n1,a\n2\n", "", 1, "a.csv, line 3 (byte 8): 1 field, the header has 2"),
    ("a.csv", b'n,k\n1,"a\n2,b\n', "", 1, "a.csv, line 2 (byte 4): not valid CSV: unexpected end"),
    ("a.csv", b'n,k\n1,"a\n2,"b"\n', "", 1, "a.csv, line 2 (byte 4): not valid CSV: ',' expected"),
    ("a.csv", b"n,n\n1,2\n", "", 2, "a.csv: no column 'n'; columns found: n, n"),
    ("a.csv", b"", "", 1, "nothing to pack"),
    ("a.txt", b"1\n2\n", "", 2, "a.txt: is text, expected a table with a line for each sample"),
    ("a.parquet", b"PAR1", "", 1, "a.parquet: not a readable parquet file"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "options", "code", "message"), WRONG)
def test_what_is_wrong_with_a_table(
    name: str, content: Any, options: str, code: int, message: str
) -> None:
    if isinstance(content, bytes):
        Path(name).write_bytes(content)
    else:
        table(name, **content)
    command = ["plan", name, "--lengths", "n", "-l", 64, "-o", "index.parquet", "-q"]
    result = packer(*command, *options.split())
    assert_error(result, code, message)
    assert "--on-error" not in result.stderr
    assert [path.name for path in Path().iterdir()] == [name]


def test_keys_of_two_types_are_refused() -> None:
    table("a.parquet", n=[1], k=[1])
    table("a.csv", n=[1], k=["1"])
    command = ["plan", "a.parquet", "a.csv", "--lengths", "n", "--key", "k", "-l", 64]
    result = packer(*command, "-o", "index.parquet", "-q")
    assert_error(result, 1, "k: has values of the types int64, string, expected one type")


@pytest.mark.parametrize(
    ("first", "second"),
    [(pa.array(["a"]), pa.array(["b"], pa.large_string())),
     (pa.array(["a"]).dictionary_encode(), pa.array(["b"], pa.string_view())),
     (pa.array([5], pa.int16()), pa.array([6], pa.uint32()))],
)  # fmt: skip
def test_keys_that_several_tools_wrote_are_of_one_type(first: Any, second: Any) -> None:
    table("a.arrow", n=[1], k=first)
    table("a.ipc", n=[2], k=second)
    (row,) = planned("a.arrow", "a.ipc", "-l", 64, "--key", "k")
    keys = dict(zip(row["lengths"], row["keys"], strict=True))
    assert keys == {1: first.to_pylist()[0], 2: second.to_pylist()[0]}


def test_only_an_earlier_plan_is_replaced() -> None:
    command = ["plan", table(n=[3, 4]), "--lengths", "n", "-l", 64, "-q", "-o"]
    succeeds(*command, "index.parquet")
    before = Path("index.parquet").read_bytes()
    assert_error(packer(*command, "index.parquet"), 2, "index.parquet: holds a finished plan")
    succeeds(*command, "index.parquet", "--overwrite", "--seed", 1)
    assert Path("index.parquet").read_bytes() != before
    Path("here").mkdir()
    Path("link.parquet").symlink_to("index.parquet")
    for name in ("a.parquet", "here", "link.parquet"):
        result = packer(*command, name, "--overwrite")
        assert_error(result, 2, f"{name} is there, and is not a plan of packer")
    assert_error(packer(*command, "no/index.parquet"), 2, "no is not a directory")
    assert_error(packer(*command, "s3://bucket/index.parquet"), 2, "a URL")
    assert pq.read_table("a.parquet").to_pydict() == {"n": [3, 4]}


def test_the_table_and_the_page() -> None:
    path = table("a.csv", **drawn())
    command = ["plan", path, "--lengths", "text,image", "-l", 96, "-q"]
    shown = succeeds(*command, "-o", "index.parquet", "--key", "id").stdout
    several = succeeds(*command[:-3], "-l", "64,96", "--strategy", "best-fit,nf", "-q").stdout
    assert_approved("plan of lengths", shown, several)
    succeeds(*command, "--html", "plan.html")
    drawn_page = Page(Path("plan.html").read_bytes())
    assert drawn_page.tables[2][1][:2] == ["96", str(figures(*command[1:])["outcomes"][0]["rows"])]
