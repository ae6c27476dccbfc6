"""`--carry`: value i stays with token i, by recomputing what each token of a row carries from the
token, its place in its record, and the record.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import assistant, chat, chat_tokenizer, user
from spoiling import rewrite, tokenize
from support import assert_error, check_directory, packer, succeeds

from packer_cli import open_packed
from packer_cli.options.value_columns import value_columns_of
from packer_cli.result.columns import stored

pytestmark = pytest.mark.usefixtures("folder")

OF_TOKENS: dict[str, Callable[[int, int, int], Any]] = {  # of a token, its place and its record
    "at:int32": lambda token, place, record: 1000 * record + place,
    "half:float16": lambda token, place, record: token % 7 / 8,
    "brain:bfloat16": lambda token, place, record: place,
    "long:int64": lambda token, place, record: token << 40,
    "word:uint16": lambda token, place, record: token * 65,
    "small:uint8": lambda token, place, record: token % 251,
    "flag:bool": lambda token, place, record: token % 3 == 0,
    "top:int32[3]": lambda token, place, record: [token, place, record],
}
OF_RECORDS: dict[str, Callable[[int], Any]] = {
    "number:float32": lambda record: record,
    "both:float32[2]": lambda record: [record / 2, -record],
}
CARRY = [option for name in (*OF_TOKENS, *OF_RECORDS) for option in ("--carry", name)]


def records(count: int = 60, longest: int = 70) -> list[dict[str, Any]]:
    """Every third is padded in front, every fifth not trained on throughout."""
    chance, made = random.Random(count), list[dict[str, Any]]()
    for record in range(count):
        ids = [chance.randrange(1, 1000) for _ in range(chance.randrange(1, longest))]
        one: dict[str, Any] = {"input_ids": ids}
        for text, value in OF_TOKENS.items():
            values = [value(token, place, record) for place, token in enumerate(ids)]
            one[text.partition(":")[0]] = values
        one |= {text.partition(":")[0]: value(record) for text, value in OF_RECORDS.items()}
        one["attention_mask"] = [1] * len(ids)
        if record % 3 == 0:
            one["attention_mask"] = [0] * 2 + one["attention_mask"]
            for text in ("input_ids:", *OF_TOKENS):
                name = text.partition(":")[0]
                one[name] = [one[name][0]] * 2 + one[name]
        made.append(one)
    return made


def write(form: str, made: list[dict[str, Any]]) -> str:
    path = Path(f"data.{form}")
    if form == "jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in made))
        return str(path)
    table = pa.Table.from_pylist(made)
    if form == "parquet":
        pq.write_table(table, path, row_group_size=17)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=13)
    return str(path)


def assert_carried(directory: str, made: list[dict[str, Any]]) -> int:
    """Hold every row to the records; how many tokens it has."""
    packed, seen = open_packed(directory), 0
    check_directory(directory) if not packed.facts.config.view else None
    columns = value_columns_of(tuple(packed.facts.config.carry))
    own = [int(sum(one["attention_mask"])) for one in made]
    tokens = [
        one["input_ids"][len(one["input_ids"]) - n :] for one, n in zip(made, own, strict=True)
    ]
    found = packed.gather(np.arange(len(packed)), packed.facts.config.columns)
    places = found.get("cu_seqlens_padded", found["cu_seqlens"])
    for row in range(len(packed)):
        real = np.zeros(packed.max_length, bool)
        segments = pairwise(found["cu_seqlens"][row].tolist())
        for number, (first, end) in enumerate(segments):
            begin, start = places[row][number], found["start"][row][number]
            record = int(found["number"][row][number])
            span, its = slice(begin, begin + end - first), slice(start, start + end - first)
            real[span] = True
            assert found["input_ids"][row][span].tolist() == tokens[record][its]
            for text, value in OF_TOKENS.items():
                column = columns[text.partition(":")[0]]
                wanted = [value(token, place, record) for place, token in enumerate(tokens[record])]
                wanted = stored(column, np.array(wanted))[its]
                assert found[column.name][row][span].tolist() == wanted.tolist()
            for text, of_record in OF_RECORDS.items():
                name = text.partition(":")[0]
                value = np.atleast_1d(of_record(record)).tolist()
                assert np.atleast_1d(found[name][row][number]).tolist() == value
            seen += end - first
        for text in OF_TOKENS:
            assert not found[text.partition(":")[0]][row][~real].any()
    return seen


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("jsonl", "-l 64"),
        ("parquet", "-l 16 --segment-multiple 4 --workers 3 --unit-bytes 5k"),
        ("arrow", "-l 32 --strategy wrap --seed 3"),
        ("jsonl", "-l 48 --strategy next-fit"),
        ("jsonl", "-l 32 --overlong truncate --truncate-side left --balance attention"),
        (
            "parquet",
            "-l 40 --overlong drop --strategy mffd --columns input_ids,cu_seqlens,segments",
        ),
    ],
)
def test_values_stay_with_their_tokens(form: str, options: str) -> None:
    """Packed at once, through a tokenized directory, and as a view of it."""
    made = records()
    path, given = write(form, made), options.split()
    whole = sum(sum(one["attention_mask"]) for one in made)
    succeeds("pack", path, *given, *CARRY, "-q", "-o", "out")
    seen = assert_carried("out", made)
    assert seen == whole or "truncate" in options or "drop" in options
    succeeds("verify", "out", "--against-inputs")
    succeeds("tokenize", path, *CARRY, "-q", "-o", "tokenized")
    succeeds("verify", "tokenized", "--against-inputs")
    for view in ([], ["--view"]):
        succeeds("pack", "tokenized", *given, *view, "-q", "-o", f"o{view}")
        assert assert_carried(f"o{view}", made) == seen
        succeeds("verify", f"o{view}")
    planned = json.loads(packer("plan", "tokenized", *given, "--json").stdout)
    packed = json.loads(packer("stats", "o[]", "--json").stdout)
    assert planned["outcomes"][0]["bytes"] == packed["bytes"]


def test_updates_carry_the_same_columns() -> None:
    made, command = records(), ["-l", 64, *CARRY, "--unit-bytes", "5k", "-q", "-o", "out"]
    path = write("jsonl", made[:40])
    succeeds("pack", path, *command)
    write("jsonl", made)
    succeeds("pack", path, *command, "--add")
    assert_carried("out", made)
    other = packer("pack", path, *command, "--carry", "more:int32", "--carry-default", "more=0")
    assert_error(other, 2, "--carry was", "more:int32")


def test_files_without_a_column_join_those_that_told_what_has_its_values() -> None:
    command = ["-l", 8, "--carry", "at:int32", "--carry-default", "at=9", "-q", "-o", "out"]
    path = write("jsonl", [{"input_ids": [3, 4, 5], "at": [6, 7, 8]}])
    succeeds("pack", path, *command)
    Path("bare.jsonl").write_text('{"input_ids": [1, 2]}\n')
    succeeds("pack", "bare.jsonl", *command, "--add")
    at = open_packed("out").gather(np.arange(2), ["at"])["at"]
    assert sorted(at.tolist()) == [[6, 7, 8, 0, 0, 0, 0, 0], [9, 9, 0, 0, 0, 0, 0, 0]]


TALK = chat(user("hi"), assistant("hello", weight=0.5), user("more"), assistant("yes", weight=0.25))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", [0.5, 0.25]),
        ("--turns each", [0.5, 0.25]),
        ("--train-on last-assistant", [0.25]),
        ("--eos --bos", [0.5, 0.25]),
        ("--overlong truncate-turns -l 30", [0.25]),
        ("--tokenizer-backend tokenizers", [0.5, 0.25]),
    ],
)
def test_messages_carry_values_to_their_trained_tokens(options: str, expected: list[float]) -> None:
    """A weight of 0.3 is no 0, and a weight of 0 trains on nothing."""
    silent = chat(user("x"), assistant("y", weight=0), user("x"), assistant("z", weight=0.3))
    lines = [one | {"reward": number} for number, one in enumerate((TALK, silent))]
    Path("chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    carry = ["--carry", "weight:float32", "--carry", "reward:float16"]
    tokenizer = chat_tokenizer(Path("tokenizer"))
    given = ["-l", 256, "-t", tokenizer, *carry, *options.split(), "-q", "-o", "out"]
    succeeds("pack", "chat.jsonl", *given)
    succeeds("verify", "out", "--against-inputs")
    names = ["labels", "weight", "reward", "cu_seqlens"]
    found, of_record = open_packed("out").gather(np.arange(len(open_packed("out"))), names), {}
    for row in range(len(found["labels"])):
        trained = found["labels"][row] != -100
        for number, (first, end) in enumerate(pairwise(found["cu_seqlens"][row].tolist())):
            own = of_record.setdefault(int(found["reward"][row][number]), set())
            own |= {*found["weight"][row][first:end][trained[first:end]].tolist()}
    assert of_record[0] == {*expected}
    assert {round(one, 5) for one in of_record.get(1, {0.3})} == {0.3}


ONE_EACH = "of int32, one for each token"
BAD = {
    "too few": ({"input_ids": [1, 2], "at": [1]}, f"at has 1 value, expected 2 {ONE_EACH}"),
    "none": ({"input_ids": [1, 2]}, f"no value of 'at', expected 2 {ONE_EACH}"),
    "no list": ({"input_ids": [1, 2], "at": 5}, f"at has no list, expected 2 {ONE_EACH}"),
    "not whole": ({"input_ids": [1, 2], "at": [1, 2.5]}, "at holds 2.5, expected whole numbers"),
    "too large": (
        {"input_ids": [1, 2], "at": [1, 1 << 40]},
        "at holds 1099511627776, which no int",
    ),
    "unlike": ({"input_ids": [1], "at": [[1]]}, f"at has 1 x 1 values, expected 1 {ONE_EACH}"),
}


# a column of Parquet has one type
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("jsonl", name) for name in BAD),
        *(("parquet", n) for n in ("too few", "none", "too large")),
    ],
)
def test_values_that_cannot_be_carried(form: str, name: str) -> None:
    record, reason = BAD[name]
    good = {"input_ids": [3, 4, 5], "at": [6, 7, 8]}
    path = write(form, [good, record, good])
    command = ["pack", path, "-l", 8, "--carry", "at:int32", "-q", "-o", "out"]
    assert_error(packer(*command), 1, reason, kind="error")
    succeeds(*command, "--on-error", "skip")
    assert reason in json.loads(Path("out/rejected.jsonl").read_text())["reason"]
    at = open_packed("out").gather(np.arange(1), ["at"])["at"]
    assert at.tolist() == [[6, 7, 8, 6, 7, 8, 0, 0]]


def test_a_damaged_directory_with_another_number_of_values() -> None:
    path = write("jsonl", [{"input_ids": [3, 4, 5], "at": [6, 7, 8]}] * 2)
    tokenize(path, "--carry", "at:int32", "-o", "tokens")
    rewrite("documents", lambda columns: columns["at"].__setitem__(1, [1]), "tokens")
    packed = packer("pack", "tokens", "-l", 8, "-q", "-o", "out")
    assert_error(packed, 1, "its document 1 has 1 values of at, its index says 3")


@pytest.mark.parametrize(
    ("lines", "options", "parts"),
    [
        (
            '{"text": "b", "r": 1}\n{"text": "a", "r": NaN}',
            "r:float32",
            ("NaN is not a JSON value",),
        ),
        ('{"text": "a", "r": 1}', "text:float32", ("'text' is a column that rows have",)),
        ('{"prompt": "a", "completion": "b"}', "prompt:int32", ("'prompt' is what documents are",)),
        (
            '{"prompt": "a", "completion": "b"}',
            "r:int32/message",
            ("r:int32/message is of messages",),
        ),
        (json.dumps(TALK), "adv:int32 --carry-default adv=1", ("no record at the beginning",)),
        ('{"text": "a", "r": [1, 2]}', "r:float32", ("r is a list, and the records are text",)),
    ],
)
def test_what_cannot_be_told_is_refused(lines: str, options: str, parts: tuple[str, ...]) -> None:
    Path("a.jsonl").write_text(lines + "\n")
    command = ["pack", "a.jsonl", "-l", 64, "-t", chat_tokenizer(Path("tokenizer")), "-o", "out"]
    result = packer(*command, "--carry", *options.split(), "-q")
    assert_error(result, 1 if "JSON" in parts[0] else 2, *parts)


def test_a_record_has_the_value_that_it_has_alone() -> None:
    """Whatever is read with it: integers beside fractions, and defaults."""
    values = [1152921573326323713, 0.5, None, 3]
    for names in (["a"], ["b"], ["a", "b"]):
        for name in names:
            lines = [{"text": "x", **({} if value is None else {"r": value})} for value in values]
            some = lines if len(names) > 1 else lines[:1] if name == "a" else lines[1:]
            Path(f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
        command = ["pack", *(f"{name}.jsonl" for name in names), "-l", 64, "-t", "bytes"]
        carry = ["--carry", "r:bfloat16", "--carry-default", "r=9"]
        succeeds(*command, *carry, "-q", "-o", "".join(names))
    found = [
        open_packed(one).gather(np.arange(1), ["r"])["r"].values.tolist()
        for one in ("a", "b", "ab")
    ]
    assert sorted(2 * (found[0] + found[1])) == sorted(found[2])


def test_cells_of_csv_are_carried() -> None:
    Path("a.csv").write_text("text,r,ok\na,0.5,True\nb,,False\n")
    command = ["pack", "a.csv", "-l", 8, "-t", "bytes", "-q", "-o", "out"]
    carry = ["--carry", "r:float32", "--carry-default", "r=2", "--carry", "ok:bool"]
    succeeds(*command, *carry)
    found = open_packed("out").gather(np.arange(1), ["r", "ok"])
    assert {*zip(found["r"].values.tolist(), found["ok"].values.tolist(), strict=True)} == {
        (0.5, 1), (2.0, 0),
    }  # fmt: skip
    Path("a.csv").write_text("text,r,ok\na,high,True\n")
    assert_error(packer(*command, *carry, "--overwrite"), 1, "r holds 'high', expected numbers")


def test_templates_see_what_is_carried() -> None:
    """A key of messages that the template shows is shown, carried or not."""
    shown = "<{{ m.role }} {{ m.step }}>{{ m.content }}</{{ m.role }}>"
    Path("a.jinja").write_text("{% for m in messages %}" + shown + "{% endfor %}")
    talk = chat(user("q", step=3), assistant("a", step=4))
    Path("a.jsonl").write_text(json.dumps(talk) + "\n")
    command = ["pack", "a.jsonl", "-l", 64, "-t", "bytes", "--chat-template", "a.jinja", "-q"]
    succeeds(*command, "-o", "out")
    succeeds(*command, "--carry", "step:int32", "-o", "carried")
    ids = [
        open_packed(one).gather(np.arange(1), ["input_ids"])["input_ids"]
        for one in ("out", "carried")
    ]
    assert ids[0].tolist() == ids[1].tolist()


def test_a_recipe_of_talks_and_texts_carries_weights() -> None:
    """Of messages in one source, and the default in the other."""
    Path("talks.jsonl").write_text(json.dumps(TALK) + "\n")
    Path("texts.jsonl").write_text('{"text": "abc"}\n')
    tokenizer = chat_tokenizer(Path("tokenizer"))
    Path("mix.toml").write_text(
        f'max_length = 256\ntokenizer = "{tokenizer}"\ncarry = ["weight:float32"]\n'
        'carry_default = {weight = 2}\n[[source]]\nname = "talks"\ninputs = ["talks.jsonl"]\n'
        '[[source]]\nname = "texts"\ninputs = ["texts.jsonl"]\n'
    )
    succeeds("pack", "mix.toml", "-q", "-o", "out")
    weights = open_packed("out").gather(np.arange(1), ["weight"])["weight"]
    assert {*weights.reshape(-1).tolist()} == {0.0, 0.25, 0.5, 2.0}
    recipe = Path("mix.toml").read_text()  # and where one source alone carries it
    carry = 'carry = ["weight:float32"]\n'
    recipe = recipe.replace(carry, "", 1).replace('name = "talks"\n', f'name = "talks"\n{carry}')
    Path("other.toml").write_text(recipe)
    succeeds("pack", "other.toml", "--view", "-q", "-o", "other")
    again = open_packed("other").gather(np.arange(1), ["weight"])["weight"]
    assert again.tolist() == weights.tolist()


def test_a_source_without_a_column_has_the_default() -> None:
    Path("with.jsonl").write_text('{"text": "a", "weight": 0.5}\n')
    Path("without.jsonl").write_text('{"text": "b"}\n')
    tokenize = ["-t", "bytes", "-q", "-o"]
    succeeds("tokenize", "with.jsonl", "--carry", "weight:float32", *tokenize, "with")
    succeeds("tokenize", "without.jsonl", *tokenize, "without")
    command = ["pack", "with", "without", "-l", 8, "-q", "-o", "out"]
    assert_error(packer(*command), 2, "with carries weight, without does not")
    succeeds(*command, "--carry-default", "weight=2")
    weights = open_packed("out").gather(np.arange(1), ["weight"])["weight"]
    assert sorted(weights.values.tolist()) == [0.5, 2.0]
