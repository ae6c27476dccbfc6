"""`--where` against a plain filter in Python, over formats, shapes and the ways to pack."""

from __future__ import annotations

import gzip
import json
import operator
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    assert_error,
    check_directory,
    contents,
    packer,
    recover_documents,
    recover_texts,
    succeeds,
)
from tiny_tokenizers import BOS, EOS, byte_level, save
from tokenizing import texts_in, tokenize

Json = dict[str, Any]
Condition = tuple[str, str, Any]
pytestmark = pytest.mark.usefixtures("folder")
ABSENT = object()
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "in": lambda value, some: any(map(_alike(value), some)),
    "not in": lambda value, some: not any(map(_alike(value), some)),
}  # fmt: skip
FIELDS: dict[str, list[Any]] = {  # as a typed column has them
    "score": [0.0, 0.25, 0.5, 1.0, 2.5, None],
    "n": [-1, 0, 1, 2, None],
    "short": [0.9, 0.1, 1.0, None],
    "lang": ["en", "de", "zh", "", None],
    "ok": [True, False, None],
    "meta": [{"lang": "en", "n": 1}, {"lang": "de", "n": None}, None],
}
ODD = [True, 1, 1.0, 0, "1", "en", [1], {"lang": "en"}, {"lang": 1}, {}, None, ABSENT, 1e300,
       2**53 + 1, -(2**70)]  # fmt: skip
OPERANDS: dict[str, list[Any]] = {
    "score": [0.25, 0.3, 1, 0, -7, 2**60], "n": [0, 1, 1.0, 0.5, 3e9, -1], "lang": ["de", "en", ""],
    "ok": [True, False], "meta.lang": ["de", "en"], "meta.n": [1, 0.5], "none": [1, "a"],
    "short": [0.9, 0.1, 1, "a", 2**60],
}  # fmt: skip


def _alike(value: Any) -> Callable[[Any], bool]:
    return lambda other: _kind(value) == _kind(other) and value == other


def _kind(value: Any) -> Any:
    return float if type(value) is int else type(value)


def holds(record: Json, condition: Condition) -> str:
    """What a plain filter says of a record: "yes", "no", "lacks" or "differs"."""
    name, op, operand = condition
    record = present(record)
    value: Any = record
    for key in [name] if name in record else name.split("."):
        value = value.get(key, ABSENT) if isinstance(value, dict) else ABSENT
    if value is None or value is ABSENT:
        return "lacks"
    if op == "exists":
        return "yes"
    operands = operand if op in ("in", "not in") else [operand]
    if _kind(value) not in [*map(_kind, operands)]:
        return "differs"
    return "yes" if COMPARE[op](value, operand) else "no"


def written(condition: Condition) -> str:
    name, op, operand = condition
    return f"{name} {op}" if op == "exists" else f"{name} {op} {json.dumps(operand)}"


def options(conditions: Sequence[Condition]) -> list[str]:
    return [part for one in conditions for part in ("--where", written(one))]


def conditions_on(fields: dict[str, list[Any]]) -> st.SearchStrategy[list[Condition]]:
    def on(name: str) -> st.SearchStrategy[Condition]:
        values = st.sampled_from(fields[name])
        ordered = ["<", "<=", ">", ">="] if isinstance(fields[name][0], float | str | int) else []
        ordered = [] if fields[name][0] is True else ordered
        one = st.tuples(st.just(name), st.sampled_from(["==", "!=", *ordered]), values)
        some = st.lists(values, min_size=1, max_size=3)
        of_some = st.tuples(st.just(name), st.sampled_from(["in", "not in"]), some)
        return one | of_some | st.just((name, "exists", None))

    return st.lists(st.sampled_from(sorted(fields)).flatmap(on), min_size=1, max_size=3)


records = st.lists(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FIELDS.items()}),
    min_size=1, max_size=30,
)  # fmt: skip
odd_records = st.lists(
    st.fixed_dictionaries({"x": st.sampled_from(ODD), "a.b": st.sampled_from(ODD),
                           "a": st.sampled_from([ABSENT, 1, {}, {"b": 1}, {"b": "1"}])}),
    max_size=30,
)  # fmt: skip
odd_conditions = conditions_on(
    {"x": [1, True, 1.0, "1", [1], {"lang": "en"}, 2**53 + 1], "x.lang": ["en", 1], "a.b": [1]}
).filter(lambda some: not any(one[1][0] in "<>" and not _has_order(one[2]) for one in some))


def _has_order(value: Any) -> bool:
    return type(value) in (int, float, str)


def present(record: Json) -> Json:
    return {name: value for name, value in record.items() if value is not ABSENT}


def as_lines(rows: Sequence[Json]) -> bytes:
    return b"".join(json.dumps(present(row)).encode() + b"\n" for row in rows)


def table_of(rows: Sequence[Json]) -> Any:
    meta = pa.struct([("lang", pa.string()), ("n", pa.int64())])
    kinds = {"score": pa.float64(), "n": pa.int32(), "lang": pa.string(), "ok": pa.bool_(),
             "short": pa.float32(),
             "meta": meta, "text": pa.string()}  # fmt: skip
    return pa.Table.from_pylist(list(rows), pa.schema([*kinds.items()]))


def write(name: str, rows: Sequence[Json]) -> None:
    if name.endswith(".parquet"):
        pq.write_table(table_of(rows), name, row_group_size=7)
    elif name.endswith(".arrow"):
        pyarrow.feather.write_feather(table_of(rows), name)
    elif name.endswith(".json"):
        Path(name).write_text(json.dumps([present(row) for row in rows], indent=1))
    elif name.endswith(".gz"):
        Path(name).write_bytes(gzip.compress(as_lines(rows)))
    else:
        Path(name).write_bytes(as_lines(rows))


def check(name: str, rows: list[Json], conditions: list[Condition], *more: object) -> None:
    """Pack, and compare what is there, and what is counted, with a plain filter."""
    rows = [{"text": f"{number} page", **row} for number, row in enumerate(rows)]
    said = [[holds(row, one) for one in conditions] for row in rows]
    expected = [row["text"] for row, of_row in zip(rows, said, strict=True) if {*of_row} == {"yes"}]
    write(name, rows)
    command = ("pack", name, "-l", 64, "-t", "bytes", "-q", "-o", "out", "--overwrite", *more)
    result = packer(*command, *options(conditions))
    left_out = len(rows) - len(expected)
    lacking, differing = (sum(what in of_row for of_row in said) for what in ("lacks", "differs"))
    if not expected:
        parts = (f"{left_out} documents left out by --where ({lacking} lack its field, "
                 f"{differing} have another type in it)",)  # fmt: skip
        assert_error(result, 1, *parts if left_out else ("no records",))
        return
    assert result.exit_code == 0, result.stderr
    assert sorted(recover_texts("out")) == sorted(expected)
    facts = check_directory("out")
    assert facts.get("filtered_documents", 0) == left_out
    assert facts.get("filtered_without_field", 0) == lacking
    assert facts.get("filtered_of_other_type", 0) == differing


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz"])
@given(rows=records, conditions=conditions_on(OPERANDS))
@settings(max_examples=25)
def test_all_formats_filter_as_python_does(
    name: str, rows: list[Json], conditions: list[Condition]
) -> None:
    check(name, rows, conditions)


@given(rows=odd_records, conditions=odd_conditions, unit=st.sampled_from(["200", "1M"]))
@settings(max_examples=100)
def test_values_of_any_type(rows: list[Json], conditions: list[Condition], unit: str) -> None:
    """Also names with dots in them, and numbers beyond those that a float has exactly."""
    check("a.jsonl", rows, conditions, "--unit-bytes", unit)


def test_names_with_dots_come_before_objects() -> None:
    """Even if they are null, in lines that are read without Python objects and in others."""
    rows: list[Json] = [
        {"a.b": None, "a": {"b": 1}}, {"a": {"b": 1}}, {"a.b": 1}, {"a.b": 2, "a": {"b": 1}},
    ]  # fmt: skip
    check("a.jsonl", rows, [("a.b", "==", 1)])
    check("a.jsonl", rows, [("a.b", "==", 1)], "--carry", "n:int32", "--carry-default", "n=0")


def test_other_types_of_parquet() -> None:
    """Numbers in dictionaries, decimals, and times, which are texts; one of nanoseconds is odd."""
    times = pa.array([1_700_000_000 * 10**9 + extra for extra in (0, 1000, 10**9, 1)])
    columns = {
        "text": [f"{number}" for number in range(4)],
        "n": pa.array([1, 2, 1, 1]).dictionary_encode(),
        "d": pa.array([Decimal(1), Decimal("0.5"), None, Decimal(2)], pa.decimal128(5, 2)),
        "t": times.cast(pa.timestamp("ns")),
    }
    pq.write_table(pa.table(columns), "a.parquet")
    command = ("pack", "a.parquet", "-l", 16, "-t", "bytes", "-q", "-o", "out", "--overwrite")
    for condition, kept in (("n == 1", ["0", "2", "3"]), ("d >= 0.5", ["0", "1", "3"])):
        succeeds(*command, "--where", condition)
        assert sorted(recover_texts("out")) == kept
    succeeds(*command, "--where", 't < "2023-11-14T22:13:21"', "--on-error", "skip")
    assert {"0", "1"} <= {*recover_texts("out")} <= {"0", "1", "3"}  # pandas has nanoseconds


def test_csv_has_numbers_and_texts() -> None:
    """A cell that is JSON is what it says, as 1 is; any other is text, as 007 is."""
    Path("a.csv").write_text("text,score,lang\na,0.5,en\nb,1,de\nc,,en\nd,high,en\n")
    succeeds("pack", "a.csv", "-l", 16, "-t", "bytes", "-q", "-o", "out", "--where", "score >= 0.5",
             "--where", 'lang in ["en", "de"]')  # fmt: skip
    facts = check_directory("out")
    assert recover_texts("out") == ["a", "b"]
    assert (facts["filtered_without_field"], facts["filtered_of_other_type"]) == (1, 1)


def test_texts_that_are_not_utf_8_are_bad_records() -> None:
    """But only if a condition needs them."""
    column = pa.array([b"x", b"\xff", b"x"]).view(pa.string())
    pyarrow.feather.write_feather(pa.table({"text": ["a", "b", "c"], "x": column}), "a.arrow")
    command = ("pack", "a.arrow", "-l", 64, "-t", "bytes", "-q", "-o", "out", "--overwrite")
    succeeds(*command, "--where", "tokens > 1")
    command = (*command, "--where", 'x == "x"')
    assert_error(packer(*command), 1, "a.arrow, row 1: invalid UTF-8 at byte 0 of the x")
    succeeds(*command, "--on-error", "skip")
    assert sorted(recover_texts("out")) == ["a", "c"]


FORK = {"nodes": [{"token_ids": [1, 2]}, {"parent": 0, "sampled": True, "token_ids": [3, 4, 5],
                                          "mask": [True] * 3}]}  # fmt: skip
TALK = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}] * 2
# the fields of records, options, documents of each record, and tokens that are known early
SHAPES: dict[str, tuple[Json, tuple[str, ...], int, int]] = {
    "text": ({"text": "abc"}, ("-t", "bytes"), 1, 0),
    "prompt": ({"prompt": "abc", "completion": "de"}, ("-t", "bytes"), 1, 0),
    "messages": ({"messages": TALK}, ("-t", "bytes", "--chat-template", "chat.jinja"), 1, 0),
    "each turn": (
        {"messages": TALK}, ("-t", "bytes", "--chat-template", "chat.jinja", "--turns", "each"),
        2, 0,
    ),
    "tokens": ({"input_ids": [5, 6, 7]}, (), 1, 3),
    "trace": (FORK, (), 1, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_all_shapes(name: str) -> None:
    """And what is known of the tokens that are left out. The value may be carried, too."""
    fields, more, documents, tokens = SHAPES[name]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    Path("chat.jinja").write_text(template)
    scores = [0.5, 0.1, None, "high", 0.9, 1]
    write("a.jsonl", [fields | {"score": score} for score in scores])
    options = ("-l", 64, "-q", "-o", "out", *more, "--where", "score >= 0.5")
    succeeds("pack", "a.jsonl", *options)
    facts = check_directory("out")
    assert facts["documents"] == 3 * documents
    assert (facts["filtered_documents"], facts.get("filtered_tokens", 0)) == (3, 3 * tokens)
    assert (facts["filtered_without_field"], facts["filtered_of_other_type"]) == (1, 1)
    assert "3  documents left out by conditions" in packer("stats", "out").stdout
    succeeds("verify", "out", "--against-inputs")
    carried = ("--overwrite", "--carry", "score:float32", "--carry-default", "score=0")
    succeeds("pack", "a.jsonl", *options, *carried)
    assert check_directory("out")["documents"] == 3 * documents


@pytest.mark.parametrize(
    ("condition", "kept"),
    [("tokens >= 5", [3, 4]), ("tokens == 5", [3]), ("tokens not in [4, 5.0]", [4]),
     ("trained < 4", [2]), ("record.tokens > 3", [2]), ("tokens exists", [2, 3, 4])],
)  # fmt: skip
def test_tokens_and_trained_tokens_of_documents(condition: str, kept: list[int]) -> None:
    """With BOS and EOS; the first token has nothing that predicts it."""
    save(Path("tok"), byte_level(), tokenizer_config={"bos_token": BOS, "eos_token": EOS})
    write("a.jsonl", [{"text": "z" * size, "tokens": 6 - size} for size in (2, 3, 4)])
    facts = tokenize("a.jsonl", "--bos", "--carry", "tokens:int32/record", tokenizer="tok")
    assert facts["tokens"] == 3 * 2 + 2 + 3 + 4
    of_records = condition.startswith("record")
    for source, own in (("a.jsonl", ("-t", "tok", "--bos")), ("tokens", ())):
        options = ("-l", 16, "-q", "-o", "out", "--overwrite", *own, "--where", condition)
        succeeds("pack", source, *options)
        sizes = sorted(len(one) - 2 for one in recover_documents("out").values())
        assert sizes == kept
        left_out = 0 if of_records and own else sum(size + 2 for size in {2, 3, 4} - {*kept})
        assert check_directory("out").get("filtered_tokens", 0) == left_out


STORED = {"float32": [0.25, 0.9, 0.1], "float16": [0.25, 0.9, 0.1], "bfloat16": [0.25, 0.5, 1.0],
          "int64": [3, 2**53, -1], "uint8": [0, 255, 7], "bool": [True, False, True]}  # fmt: skip


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("view", [(), ("--view",)], ids=["rows", "view"])
def test_carried_columns_of_tokenized_directories(kind: str, view: tuple[str, ...]) -> None:
    """Floats are compared as they are stored: a 0.9 is a 0.9. Several directories, some work units,
    and a recipe of them.
    """
    values = STORED[kind] * 40
    for name in "ab":
        write(f"{name}.jsonl", [{"text": f"{name}{number} {value}", "v": value}
                                for number, value in enumerate(values)])  # fmt: skip
        tokenize(f"{name}.jsonl", "--carry", f"v:{kind}/record", out=name)
    condition = f"v in [{json.dumps(values[1])}, {json.dumps(values[2])}]"
    options = ("-l", 64, "-q", "-o", "out", "--unit-bytes", "1k", *view)
    succeeds("pack", "a", "b", *options, "--where", condition, "--where", "tokens <= 12")
    assert len(check_directory("out")["units"]) > 1
    wanted = tuple(f" {value}" for value in values[1:3])
    texts = [text for name in "ab" for text in texts_in(name) if len(text) < 12]
    expected = [text for text in texts if text.endswith(wanted)]
    assert sorted(recover_texts("out")) == sorted(expected)
    succeeds("verify", "out")


def test_no_tokens_of_a_tokenized_directory_are_read() -> None:
    """To plan one with conditions, its documents may be away."""
    write("a.jsonl", [{"text": "x" * size} for size in range(40)])
    tokenize("a.jsonl")
    for shard in Path("tokens").glob("documents-*"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2 :: 2] = b"\x55" * len(data[len(data) // 2 :: 2])
    result = succeeds("plan", "tokens", "-l", 64, "--json", "-q", "--where", "tokens >= 30")
    assert '"filtered_documents"' in result.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_and_additions_filter_alike(ranks: int) -> None:
    """As one command that packs all at once; without the same conditions nothing is added."""
    rows = [{"text": f"{number} page", "n": number % 5} for number in range(300)]
    write("a.jsonl", rows[:200])
    write("b.jsonl", rows[200:])
    options = ("-l", 64, "-t", "bytes", "-q", "--unit-bytes", "1k", "--where", "n >= 3")
    for rank in range(ranks):
        more = ("--rank", rank, "--world-size", ranks) if ranks > 1 else ()
        succeeds("pack", "a.jsonl", *options, "-o", "out", *more)
    succeeds("pack", "a.jsonl", *options, "-o", "once")
    assert contents("out") == contents("once")
    succeeds("pack", "a.jsonl", "b.jsonl", *options, "-o", "out", "--add")
    assert sorted(recover_texts("out")) == sorted(row["text"] for row in rows if row["n"] >= 3)
    assert check_directory("out")["filtered_documents"] == 180
    other = ("pack", "a.jsonl", "b.jsonl", *options[:-1], "n >= 2", "-o", "out", "--add")
    assert_error(packer(*other), 2, "--where")


def test_recipes_filter_each_source() -> None:
    """A source's own conditions stand for those of all; those typed, for both."""
    for name in "ab":
        write(f"{name}.jsonl", [{"text": f"{name}{number}", "n": number} for number in range(9)])
    recipe = """max_length = 64
where = ["n >= 5"]
[[source]]
name = "a"
inputs = ["a.jsonl"]
[[source]]
name = "b"
inputs = ["b.jsonl"]
where = ["n < 2", "tokens == 3"]
"""
    Path("mix.toml").write_text(recipe)
    options = ("-t", "bytes", "-q", "-o", "out")
    succeeds("pack", "mix.toml", *options)
    assert sorted(recover_texts("out")) == ["a5", "a6", "a7", "a8", "b0", "b1"]
    assert '"filtered_documents": 7' in packer("stats", "out", "--json").stdout
    succeeds("pack", "mix.toml", *options, "--where", "n == 7", "--overwrite")
    assert sorted(recover_texts("out")) == ["a7", "b7"]
    Path("mix.toml").write_text(recipe.replace("n < 2", "n <"))
    assert_error(packer("pack", "mix.toml", *options), 2, "mix.toml, source 'b': where: 'n <':")


WRONG = {
    "score": "character 6: no operator, expected one of ==, !=",
    "score = 1": "character 7: '=' is no operator",
    "a <> 1": "character 3: '<>' is no operator",
    "score >=": "character 9: no value after >=",
    ">= 1": "character 1: no field before >=",
    "lang == en": "character 9: 'en' is not JSON",
    "score >= 1 2": "character 10: '1 2' is not JSON",
    "score == NaN": "character 10: 'NaN' is not JSON",
    "lang in 5": "character 9: 5 is no list of values",
    "lang in []": "character 9: [] is no list of values",
    "x != null": "character 6: null: no condition holds for it",
    "x in [1, null]": "null: no condition holds for it",
    "x < true": "character 5: true has no order",
    'tokens > "5"': 'tokens is a number of tokens, and "5" is none',
    "x exists 5": "no operator",
}  # fmt: skip


@pytest.mark.parametrize("condition", WRONG)
def test_conditions_that_cannot_be_read(condition: str) -> None:
    """Before any input is looked at, and with an example."""
    result = packer("pack", "none.jsonl", "-l", 64, "--where", condition)
    assert_error(result, 2, f"--where: {condition!r}: ", WRONG[condition])
    assert "tip: " in result.stderr


def test_what_a_tokenized_directory_does_not_keep() -> None:
    write("a.jsonl", [{"input_ids": [1, 2], "w": [0.5, 1], "score": 1}])
    carry = ("--carry", "w:float32", "--carry", "score:float32")
    tokenize("a.jsonl", *carry, tokenizer=None)
    for field, said in (("lang", "does not keep lang"), ("w", "has w of tokens")):
        result = packer("pack", "tokens", "-l", 8, "--where", f"{field} == 1")
        assert_error(result, 2, f"tokens: {said}", "can be on tokens, trained, score")
