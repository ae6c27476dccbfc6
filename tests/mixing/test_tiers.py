"""Tiers of sources, against a plain choice in Python, through the command line."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed import documents_in
from planning import planned
from spoiling import rewrite
from support import (
    BYTES_EOS,
    assert_error,
    check_directory,
    contents,
    packer,
    random_texts,
    succeeds,
)
from tokenizing import batches_in, tokenize

from packer_cli.result.row_source import RowSource

pytestmark = pytest.mark.usefixtures("folder")
Json = dict[str, Any]
ABSENT = object()


def write(name: str, records: Sequence[Json]) -> list[Json]:
    lines = ({k: v for k, v in record.items() if v is not ABSENT} for record in records)
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [*records]


def write_web(name: str = "web.jsonl", count: int = 400, seed: int = 0, begin: str = "") -> Any:
    """Documents of different texts, with a quality."""
    random_ = random.Random(seed)
    texts = random_texts(count, 40, seed)
    return write(name, [
        {"text": f"{begin}{number} {text}", "quality": random_.random()}
        for number, text in enumerate(texts)
    ])  # fmt: skip


def recipe(*sources: str, top: str = "") -> None:
    lines = ["max_length = 64", 'tokenizer = "bytes"', 'unit_bytes = "4k"', top]
    Path("mix.toml").write_text("\n".join([*lines, *sources]))


def source(*tiers: str, name: str = "web", inputs: str = "web.jsonl", more: str = "") -> str:
    """A source. `tiers`: the keys of each, with ; between them."""
    table = f'[[source]]\nname = "{name}"\ninputs = "{inputs}"\n{more}\n'
    return table + "".join(f"[[source.tier]]\n{tier.replace(';', chr(10))}\n" for tier in tiers)


GOOD, FAIR = "where = ['quality >= 0.9']", "where = ['quality >= 0.5']"


def pack(*more: str, out: str = "out") -> str:
    """Pack the recipe anew. Gives what is said on stderr."""
    shutil.rmtree(out, ignore_errors=True)
    done = succeeds("pack", "mix.toml", *more, "-o", out)
    if Path(out, "manifest.json").exists():
        check_directory(out)
    return str(done.stderr)


def sources(out: str = "out") -> list[Json]:
    content: list[Json] = json.loads(packer("stats", out, "--json").stdout)["sources"]
    return content


def tiers(out: str = "out") -> list[Json]:
    return [tier for source in sources(out) for tier in source.get("tiers", ())]


def times(out: str = "out") -> Counter[str]:
    """How often each text is in the rows."""
    texts = Counter[str]()
    for ids, number in documents_in(out).items():
        assert ids[-1] == BYTES_EOS
        texts[bytes(ids[:-1]).decode()] += number
    return texts


# Against Python

QUALITIES = [0.0, 0.3, 0.5, 0.9, 1, None, "high", True, ABSENT]
CONDITIONS = {
    "quality >= 0.9": lambda one: _is_number(one) and one["quality"] >= 0.9,
    "quality < 0.5": lambda one: _is_number(one) and one["quality"] < 0.5,
    "quality exists": lambda one: one["quality"] not in (None, ABSENT),
    'lang in ["en", "de"]': lambda one: one["lang"] in ("en", "de"),
    "tokens >= 6": lambda one: len(one["text"]) + 1 >= 6,
}
of_records = st.fixed_dictionaries({
    "text": st.text("ab", max_size=9, min_size=1), "quality": st.sampled_from(QUALITIES),
    "lang": st.sampled_from(["en", "de", "zh"]),
})  # fmt: skip
of_tiers = st.tuples(
    st.lists(st.sampled_from([*CONDITIONS]), max_size=2), st.sampled_from([0.5, 1, 2.25, 3])
)


def _is_number(record: Json) -> bool:
    return type(record["quality"]) in (int, float)


@given(
    rows=st.lists(of_records, min_size=1, max_size=60),
    wanted=st.lists(of_tiers, min_size=1, max_size=4),
    where=st.sampled_from([[], ["tokens >= 4"]]),
    is_exact=st.booleans(),
)
@settings(max_examples=30)
def test_the_choice_is_that_of_python(
    rows: list[Json], wanted: list[tuple[list[str], float]], where: list[str], *, is_exact: bool
) -> None:
    for folder in ("out", "mix-tokenized"):
        shutil.rmtree(folder, ignore_errors=True)
    write("web.jsonl", rows)
    keys = [f"where = {json.dumps(some)};epochs = {epochs}" for some, epochs in wanted]
    recipe(source(*keys, more=f"where = {where}"), top=f'dedup = "{["none", "exact"][is_exact]}"')
    expected, seen = [Counter[str]() for _ in wanted], set[str]()
    left = 0
    for number in range(len(wanted) + 1):
        for row in rows:
            fits = (all(CONDITIONS[one](row) for one in some) for some, _ in wanted)
            first = next((at for at, holds in enumerate(fits) if holds), len(wanted))
            if where and len(row["text"]) + 1 < 4:
                first = len(wanted)
            if first != number:
                continue
            if number == len(wanted):
                left += 1
            elif not (is_exact and row["text"] in seen):
                expected[number][row["text"]] += 1
                seen.add(row["text"])
    done = packer("pack", "mix.toml", "-q", "-o", "out")
    if left == len(rows):
        assert_error(done, 1, "mix.toml, source 'web': nothing to pack", f"{left} documents left")
        return
    if not all(expected):
        number = expected.index(Counter())
        label = " and ".join(wanted[number][0]) or "all others"
        assert_error(done, 2, f"source 'web', tier {number + 1} ({label}): has no tokens to take")
        return
    assert done.exit_code == 0, done.stderr
    check_directory("out")
    taken = times()
    bounds = [Counter[str](), Counter[str]()]
    for of_tier, (_, epochs), stats in zip(expected, wanted, tiers(), strict=True):
        lengths = {text: len(text) + 1 for text in of_tier}
        whole = sum(lengths[text] * number for text, number in of_tier.items())
        assert (stats["documents"], stats["available"]) == (of_tier.total(), whole)
        assert stats["asked"] == epochs * whole
        assert abs(stats["taken"] - stats["asked"]) <= max(lengths.values()) / 2
        for bound, round_ in zip(bounds, (math.floor, math.ceil), strict=True):
            bound.update({text: number * round_(epochs) for text, number in of_tier.items()})
    assert bounds[0] <= taken <= bounds[1]
    assert sum((len(text) + 1) * number for text, number in taken.items()) == sum(
        stats["taken"] for stats in tiers()
    )
    manifest = json.loads(Path("mix-tokenized/web/manifest.json").read_text())
    assert manifest.get("filtered_documents", 0) == left


# Amounts


def test_weights_of_tiers_and_sources_share_what_is_left() -> None:
    write_web(count=3000)
    write_web("code.jsonl", 1500, 1, "c ")
    recipe(
        source(f"{GOOD};weight = 5;max_epochs = 9", f"{FAIR};weight = 3", "where = [];epochs = 0.1",
               more="max_epochs = 2"),
        source(name="code", inputs="code.jsonl", more="weight = 2"),
        top="tokens = 40000",
    )  # fmt: skip
    pack()
    web, code = sources()
    good, fair, others = web["tiers"]
    left = 40000 - others["asked"]
    assert others["asked"] == pytest.approx(others["available"] / 10)
    asked = [one["asked"] for one in (good, fair, code)]
    assert asked == pytest.approx([left * 0.5, left * 0.3, left * 0.2])
    assert good["epochs"] > 1
    for one in (good, fair, others, code):
        assert abs(one["taken"] - one["asked"]) < 45 / 2
        assert one["share_reached"] == pytest.approx(one["share_asked"], abs=0.001)
    for name in ("asked", "taken", "documents", "available", "share_reached"):
        assert web[name] == pytest.approx(sum(tier[name] for tier in web["tiers"]))
    assert (
        json.loads(Path("out/manifest.json").read_text())["tokens"] == web["taken"] + code["taken"]
    )


def test_tokens_of_a_tier_and_the_source_it_is_too_much_for() -> None:
    write_web()
    recipe(source(f"{GOOD};tokens = 3000", FAIR, more="max_epochs = 4"))
    pack()
    good, fair = tiers()
    assert abs(good["taken"] - 3000) < 45 / 2
    assert fair["taken"] == fair["available"]
    recipe(source(f"{GOOD};tokens = 30000", FAIR, more="max_epochs = 4"))
    done = packer("pack", "mix.toml", "-q", "-o", "other")
    assert_error(
        done, 2, "source 'web', tier 1 (quality >= 0.9): too small: 30,000 tokens asked, 4"
    )


def test_a_share_that_whole_documents_miss_names_the_tier() -> None:
    rows = [{"text": "x" * 1000, "quality": 1}] * 3 + [{"text": "short", "quality": 0.6}] * 300
    write("web.jsonl", rows)
    recipe(source(f"{GOOD};tokens = 1500", FAIR))
    assert "source 'web', tier 1 (quality >= 0.9): takes 1,001 of 1,500 tokens" in pack()
    (missed, *_) = json.loads(packer("stats", "out", "--json").stdout)["missed_shares"]
    assert missed.items() >= {"source": "web", "tier": 1, "taken": 1001}.items()
    assert " web, tier 1\n" in packer("stats", "out").stdout


def test_equal_documents_count_for_the_first_tier_of_all_directories() -> None:
    """The better copy is in the second directory."""
    write("a.jsonl", [{"text": f"text {n}", "quality": 0.5} for n in range(30)])
    write("b.jsonl", [{"text": f"text {n}", "quality": 0.9} for n in range(10, 40)])
    for name in "ab":
        tokenize(f"{name}.jsonl", "--carry", "quality:float32", out=name)
    text = source(f"{GOOD};epochs = 2", FAIR).replace('"web.jsonl"', '["a", "b"]')
    recipe(text, top='dedup = "exact"')
    pack()
    assert [(one["documents"], one["duplicate_documents"]) for one in tiers()] == [
        (30, 0),
        (10, 20),
    ]
    assert times() == {f"text {n}": 1 + (n >= 10) for n in range(40)}


# Validation


@pytest.mark.parametrize("key", ['share = "10%"', "documents = 12"])
def test_validation_has_its_part_of_each_tier(key: str) -> None:
    write_web(count=1000)
    write_web("code.jsonl", 300, 1, "c ")
    recipe(
        source(f"{GOOD};epochs = 4", FAIR),
        source(name="code", inputs="code.jsonl"),
        f'[validation]\n{key}\nsources = ["web"]',
    )
    pack()
    train, held = times("out/train"), times("out/validation")
    assert not train.keys() & held.keys()
    assert not any(text.startswith("c ") for text in held)
    for in_train, in_held in zip(tiers("out/train"), tiers("out/validation"), strict=True):
        number = in_held["documents"]
        assert number == in_train["held_out_documents"]
        if "documents" in key:
            assert number == 12
        else:
            assert number / (number + in_train["documents"]) == pytest.approx(0.1, abs=0.03)
    assert held.total() == sum(one["documents"] for one in tiers("out/validation"))
    assert {train[text] for text in train if not text.startswith("c ")} == {1, 4}
    check_directory("out/train")
    check_directory("out/validation")


def test_a_tier_too_small_for_validation_stays_in_train() -> None:
    write("web.jsonl", [{"text": f"{n}", "quality": 0.9 - 0.4 * (n > 0)} for n in range(300)])
    recipe(source(GOOD, FAIR), '[validation]\nshare = "30%"')
    note = "mix.toml, source 'web', tier 1 (quality >= 0.9): too few documents to hold any out"
    assert note in pack()
    assert next(one["documents"] for one in tiers("out/validation")) == 0


# Runs


def shards() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path("mix-tokenized").rglob("*.arrow")}


def test_other_amounts_need_no_tokenizing_and_other_conditions_do() -> None:
    write_web()
    recipe(source(f"{GOOD};epochs = 4", FAIR))
    pack()
    before = shards()
    recipe(source(f"{GOOD};epochs = 2", f"{FAIR};weight = 1"))
    done = packer("pack", "mix.toml", "-q", "-o", "out")
    changes = 'source "web", tier 1: epochs 2, was 4; source "web", tier 2: weight 1, was not given'
    assert_error(done, 2, f"out: its recipe has changed: {changes}")
    assert "mix-tokenized/web: up to date" in pack()
    assert shards() == before
    assert [one["epochs"] for one in tiers()] == [2, 1]
    recipe(source(f"{GOOD};epochs = 2", "where = ['quality >= 0.4', 'tokens > 9']"))
    differs = (
        "tiers was quality >= 0.9,quality >= 0.5, is now quality >= 0.9,quality >= 0.4 and "
        "tokens > 9"
    )
    assert_error(packer("pack", "mix.toml", "-q", "-o", "out"), 2, "source 'web'", differs)
    assert "mix-tokenized/web: done" in pack("--overwrite")
    assert not shards().keys() & before.keys()


def test_new_files_are_added_to_their_tiers() -> None:
    Path("web").mkdir()
    rows = write_web("web/a.jsonl")
    recipe(source(f"{GOOD};epochs = 4", FAIR, inputs="web"))
    pack()
    before = shards()
    rows += write_web("web/b.jsonl", seed=2, begin="b ")
    succeeds("pack", "mix.toml", "-q", "-o", "out", "--add")
    assert before.items() <= shards().items()
    expected = {row["text"]: 4 if row["quality"] >= 0.9 else 1
                for row in rows if row["quality"] >= 0.5}  # fmt: skip
    assert times() == expected
    check_directory("out")


def test_ranks_make_the_same() -> None:
    write_web(count=900)
    recipe(source(f"{GOOD};epochs = 3.5", FAIR))
    pack(out="whole/out")
    for rank in (2, 0, 1):
        options = ("--rank", str(rank), "--world-size", "3")
        packer("pack", "mix.toml", "-q", "-o", "ranks/out", *options)
    files = [{name: data for name, data in contents(folder).items()
              if name.endswith((".arrow", ".npy"))} for folder in ("whole", "ranks")]  # fmt: skip
    assert files[0]
    assert files[0] == files[1]


def test_tokenized_directories_are_divided_by_what_they_keep() -> None:
    """With their own tiers if these are the same, or else by their columns and tokens."""
    rows = write_web()
    recipe(source(f"{GOOD};epochs = 2", FAIR))
    pack()
    expected = times()
    shutil.copytree("mix-tokenized/web", "kept")
    recipe(source(f"{GOOD};epochs = 2", FAIR, inputs="kept"))
    pack()
    assert times() == expected
    tokenize("web.jsonl", "--carry", "quality:float32", out="carried")
    recipe(source(f"{GOOD};epochs = 2", FAIR, inputs="carried"))
    pack()
    assert times() == expected
    assert sources()[0]["filtered_documents"] == sum(row["quality"] < 0.5 for row in rows)
    lines = packer("stats", "out").stdout.split("\n")
    at = lines.index("documents left out")
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["filtered", "source"], [f"{len(rows) - len(expected)}", "web"],
    ]  # fmt: skip
    succeeds("verify", "out", "--against-inputs")
    recipe(source(f"{GOOD};epochs = 2", "where = ['quality < 0.5']", FAIR, inputs="carried"))
    done = packer("pack", "mix.toml", "-q", "-o", "out")
    changes = ('source "web", tier 3 is new; source "web", tier 2: where quality < 0.5, was '
               "quality >= 0.5")  # fmt: skip
    assert_error(done, 2, f"out: its recipe has changed: {changes}")
    recipe(source("where = ['tokens < 20']", "where = []",
                  inputs="carried", more="where = ['trained >= 10', 'quality < 0.5']"))  # fmt: skip
    pack()
    lengths = [len(row["text"]) + 1 for row in rows if row["quality"] < 0.5]
    short = sum(11 <= length < 20 for length in lengths)
    long = sum(length >= 20 for length in lengths)
    assert [one["documents"] for one in tiers()] == [short, long]
    recipe(source(inputs="kept", more="where = ['lang exists']"))
    done = packer("pack", "mix.toml", "-q", "-o", "other")
    assert_error(done, 2, "mix.toml, source 'web': kept: does not keep lang, and conditions")


# What is stored and shown


def test_every_document_stores_its_tier() -> None:
    rows = write_web()
    recipe(source(GOOD, FAIR))
    pack()
    stored = [row["tier"] for batch in batches_in("mix-tokenized/web", "index")
              for row in batch.to_pylist()]  # fmt: skip
    assert stored == [int(row["quality"] < 0.9) for row in rows if row["quality"] >= 0.5]
    succeeds("verify", "mix-tokenized/web", "--against-inputs")
    succeeds("audit", "mix-tokenized/web")
    rewrite("index", lambda columns: columns["tier"].__setitem__(5, 2), "mix-tokenized/web")
    done = packer("verify", "mix-tokenized/web")
    assert "document 5: the index says that it is in tier 2, there are 2 from 0 on" in done.stdout
    done = packer("pack", "mix.toml", "-q", "-o", "other")
    assert_error(done, 1, "mix-tokenized/web: an index holds a tier that there is not")


def test_reports_have_a_line_a_tier_and_sources_once() -> None:
    write_web()
    write_web("code.jsonl", 100, 1, "c ")
    recipe(source(f"{GOOD};epochs = 4", "where = [];epochs = 0.5"),
           source(name="code", inputs="code.jsonl"))  # fmt: skip
    pack("--view")
    good, others = tiers()
    shown = packer("stats", "out", "--by", "source").stdout
    table = shown.split("one epoch of each tier, and tokens asked of it and taken\n")[1]
    for one, label in ((good, "quality >= 0.9"), (others, "all others")):
        line = f"{one['documents']} {one['available']:,} {one['epochs']:.2f} {one['asked']:,.0f}"
        assert f"{line} {one['taken']:,} web, tier {one['tier']} ({label})" in (
            " ".join(table.split())
        )
    content = json.loads(packer("stats", "out", "--by", "source", "--json").stdout)
    assert [one["name"] for one in content["by_source"]] == ["web", "code"]
    assert sum(one["tokens"] for one in content["by_source"]) == content["tokens"]
    assert [good["where"], others["where"]] == [["quality >= 0.9"], []]
    succeeds("stats", "out", "--html", "page.html")
    assert "web, tier 1 (quality &gt;= 0.9)" in Path("page.html").read_text()
    rows = RowSource("out", columns=["input_ids", "source"])
    assert rows.sources == ("web", "code")
    assert {*rows.gather(range(len(rows)))["source"].values.tolist()} == {0, 1}
    (outcome,) = planned("mix.toml", "--view")["outcomes"]
    assert outcome["sources"] == content["sources"]
    assert outcome["rows"] == content["rows"]
    assert "web, tier 2 (all others)" in packer("plan", "mix.toml", "-q").stdout
