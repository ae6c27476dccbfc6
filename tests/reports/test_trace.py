"""`packer trace`: the documents of a step, and the steps of a document, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import showing
from altered import unaltered
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from showing import IN_ORDER
from support import assert_error, jsonl, pack, packer

from packer_cli.errors import DataError
from packer_cli.options.run_options import Loop
from packer_cli.result.opening import Joined, open_packed
from packer_cli.steps.schedule import Order
from packer_cli.trace import Steps

pytestmark = pytest.mark.usefixtures("folder")
TEXTS = [*showing.TEXTS, "5", "the sixth one"]


def traced(*arguments: object, directory: str = "out") -> str:
    result = packer("trace", directory, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return str(result.stdout)


def traced_json(*arguments: object, directory: str = "out") -> list[dict[str, Any]]:
    text = traced(*arguments, "--json", directory=directory)
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def packed(folder: Path) -> Path:
    """Rows of 16 bytes: first + second | third | a longer one | its end + 5 | the sixth one."""
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    pack("a.jsonl", "-l", 16, *IN_ORDER)
    return folder / "out"


@pytest.fixture
def many_rows(folder: Path) -> Path:
    """Some 250 rows in several shards, each of whose documents may be cut."""
    for name in "abc":
        random = np.random.default_rng(ord(name))
        texts = (name * int(random.integers(1, 60)) for _ in range(150))
        (folder / f"{name}.jsonl").write_bytes(jsonl(*texts))
    pack("a.jsonl", "b.jsonl", "c.jsonl", "-l", 48, "--unit-bytes", 2000)
    return folder / "out"


def in_rows(directory: str = "out", rows: Iterable[object] = ("0--1",)) -> list[Any]:
    """For each row its segments as `packer show` gives them."""
    shown = packer("show", directory, *rows, "--json")
    assert shown.exit_code == 0
    rows = [json.loads(line)["segments"] for line in shown.stdout.splitlines()]
    return [[_as_place(one) for one in row] for row in rows]


def _as_place(one: dict[str, Any]) -> tuple[Any, ...]:
    names = ("source", "file", "position", "start", "tokens", "tokenized", "document")
    return tuple(one.get(name) for name in names)


def test_the_last_step_of_an_epoch_is_short_and_what_is_left_over_begins_the_next(
    packed: Path,
) -> None:
    """5 rows for 2 ranks are 2 for each; the fifth is the first of epoch 1."""
    options = ("--ranks", 2, "--batch-size", 3, "--no-shuffle")
    assert [
        (one["place"], one["row"], one["rank"]) for one in traced_json("--step", 0, *options)
    ] == [(0, 0, 0), (2, 2, 0), (1, 1, 1), (3, 3, 1)]
    later = traced_json("--step", 1, *options)
    assert [(one["place"], one["row"], one["rank"]) for one in later] == [
        (4, 4, 0), (6, 1, 0), (8, 3, 0), (5, 0, 1), (7, 2, 1), (9, 4, 1)
    ]  # fmt: skip
    assert {one["epoch"] for one in later} == {1}
    assert "; here the epoch ends\n" in traced("--step", 0, *options)
    assert "epoch ends" not in traced("--step", 1, *options)


def test_json(packed: Path) -> None:
    row = traced_json("--step", 1, "--ranks", 1, "--batch-size", 3, "--no-shuffle")[0]
    assert row == {
        "step": 1, "epoch": 0, "place": 3, "rank": 0, "micro_batch": 0, "result": "out", "row": 3,
        "segments": [
            {"segment": 0, "file": "a.jsonl", "position": 65, "position_unit": "byte", "start": 16,
             "tokens": 5},
            {"segment": 1, "file": "a.jsonl", "position": 98, "position_unit": "byte", "start": 0,
             "tokens": 2},
        ],
    }  # fmt: skip


@pytest.mark.parametrize("options", [[], ["--drop-last"], ["--uneven"], ["--no-shuffle"]])
def test_steps_hold_what_the_order_says(many_rows: Path, options: list[str]) -> None:
    rows = in_rows()
    seed = None if "--no-shuffle" in options else 5
    order = Order(len(rows), seed, 8, 4)
    loop = Loop(3, 4, 2, uneven="--uneven" in options, drop_last="--drop-last" in options)
    steps = Steps(len(rows), loop)
    sizes = ["--ranks", 3, "--batch-size", 4, "--micro-batches", 2, "--block-rows", 8,
             "--window-blocks", 4, *([] if seed is None else ["--seed", 5])]  # fmt: skip
    for number in (0, 1, 9, 10, 11, 25, 1000):
        step = steps.of(number)
        found = traced_json("--step", number, *sizes, *options)
        assert sorted(one["place"] for one in found) == steps.places(step).tolist()
        for one in found:
            (row,) = order.rows_at(one["place"], one["place"] + 1).tolist()
            number_in_rank, rank = divmod(one["place"] - step.begin, 3)
            assert (one["row"], one["rank"], one["micro_batch"]) == (row, rank, number_in_rank // 4)
            assert [_as_place(segment) for segment in one["segments"]] == rows[row]


def test_one_rank(many_rows: Path) -> None:
    options = ("--step", 2, "--ranks", 4, "--batch-size", 2, "--micro-batches", 2)
    every = traced_json(*options)
    assert traced_json(*options, "--rank", 2) == [one for one in every if one["rank"] == 2]
    assert [one["rank"] for one in every] == [rank for rank in range(4) for _ in range(4)]
    assert [one["micro_batch"] for one in every] == [0, 0, 1, 1] * 4
    assert "tokens on rank 3\n" in traced(*options, "--rank", 3)
    assert_error(packer("trace", "out", *options, "--rank", 4), 2, "--rank: 4 is not between 0")


def test_views_and_recipes_name_first_inputs_and_sources(folder: Path) -> None:
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, max_length=512))
    found = traced_json("--step", 3, "--ranks", 2, "--batch-size", 3)
    assert len(found) == 6
    rows = in_rows(rows=[one["row"] for one in found])
    assert [[_as_place(segment) for segment in one["segments"]] for one in found] == rows
    assert {segment["source"] for one in found for segment in one["segments"]} == {*IN_SHARES}
    view = packer("pack", "mix-tokenized/web", "-l", 512, "--view", "-o", "view", "-q")
    assert view.exit_code == 0
    (row,) = traced_json("--step", 3, "--ranks", 1, directory="view")
    assert [_as_place(one) for one in row["segments"]] == in_rows("view", [row["row"]])[0]
    table = traced("--step", 3, "--ranks", 1, directory="view")
    assert f" (document {row['segments'][0]['document']} of mix-tokenized/web)\n" in table
    Path("mix-tokenized/web").rename("moved")
    assert_error(packer("trace", "view", "--step", 3, "--ranks", 1), 1, "mix-tokenized/web is gone")
    moved = traced_json("--step", 3, "--ranks", 1, "--tokens", "moved", directory="view")
    assert [one["segments"][0]["file"] for one in moved] == [row["segments"][0]["file"]]


def test_joined_results(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / f"{name}.jsonl").write_bytes(jsonl(*(f"{name} {n}" for n in range(40))))
        result = packer("pack", f"{name}.jsonl", "-l", 16, "-t", "bytes", "-q", "-o", f"out-{name}")
        assert result.exit_code == 0
    rows = [("out-one", i) for i in range(len(in_rows("out-one")))]
    rows += [("out-two", i) for i in range(len(in_rows("out-two")))]
    order = Order(len(rows))
    options = ("out-one", "out-two", "--step", 4, "--ranks", 2, "--batch-size", 3)
    result = packer("trace", *options, "--json")
    for line in result.stdout.splitlines():
        one = json.loads(line)
        assert (one["result"], one["row"]) == rows[
            int(order.rows_at(one["place"], one["place"] + 1)[0])
        ]
        assert {segment["file"] for segment in one["segments"]} == {one["result"][4:] + ".jsonl"}
    table = packer("trace", *options).stdout
    assert "row  tokens  result   document\n" in table
    assert "  out-two  two.jsonl byte " in table
    (folder / "x.jsonl").write_bytes(jsonl("x"))
    pack("x.jsonl", "-l", 32)
    assert_error(packer("trace", "out-one", "out", "--step", 0, "--ranks", 1), 1,
                 "out-one and out do not go together: max_length is 16")  # fmt: skip


def test_rows_without_the_column_segments_are_named(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("one", "two"))
    pack("a.jsonl", "-l", 16, "--columns", "input_ids,cu_seqlens")
    result = packer("trace", "out", "--step", 0, "--ranks", 1)
    assert result.stderr == (
        "packer: out: was packed without the column segments: which documents are in rows is "
        "unknown\n"
    )
    assert "   0            0    0       4\n                             4\n" in result.stdout
    assert_error(
        packer("trace", "out", "--find", "a.jsonl:0", "--ranks", 1),
        1,
        "out: was packed without the column segments, by which documents are found",
    )


def test_what_is_not_there(packed: Path) -> None:
    few = packer("trace", "out", "--step", 0, "--ranks", 9)
    assert_error(few, 1, "9 ranks share 5 rows: some would get none")
    packer("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens")
    tokenized = packer("trace", "tokens", "--step", 0, "--ranks", 1)
    assert_error(tokenized, 1, "tokens: holds tokenized documents, not packed rows")
    large = packer("trace", "out", "--step", 0, "--ranks", 2, "--batch-size", 4, "--drop-last")
    assert_error(large, 1, "an epoch has 2 rows for each rank, and a loader that drops batches")


class TestStates:
    """Of a sampler, in a file: made here of what they hold, since samplers need torch."""

    @pytest.fixture
    def state(self, packed: Path) -> dict[str, Any]:
        name = Order(5, 3).name()
        return {"samples": 4, "data": Joined([open_packed("out")]).fingerprint, **name}

    def file(self, state: object) -> str:
        Path("state.json").write_text(json.dumps(state))
        return "state.json"

    def test_alone_it_shows_the_step_that_was_last(self, state: dict[str, Any]) -> None:
        options = ("--ranks", 2)
        last = traced("--state", self.file(state), *options)
        assert "step 1, in epoch 0: places 2 to 3 of the order with seed 3\n" in last
        assert "\nthe state was saved after it\n" in last
        shown = last.partition("\n\n")[2]
        assert shown == traced("--step", 1, "--seed", 3, *options).partition("\n\n")[2]
        middle = traced("--state", self.file(state | {"samples": 5}), *options, "--batch-size", 2)
        assert "the state was saved after 1 of 4 rows\n" in middle

    def test_steps_that_follow_count_from_it(self, state: dict[str, Any]) -> None:
        """Also on other ranks: places 4 and on are shared by three, and the epoch ends at 5."""
        state |= {"samples": 2}
        rows = traced_json("--state", self.file(state), "--step", 0, "--ranks", 3)
        assert [one["place"] for one in rows] == [2, 3, 4]
        assert "step 0 since place 2, in epoch 0" in traced(
            "--state", "state.json", "--step", 0, "--ranks", 3
        )
        row = rows[1]["row"]
        (found,) = traced_json(
            "--state",
            "state.json",
            "--find",
            f"a.jsonl:{rows[1]['segments'][0]['position']}",
            "--ranks",
            3,
        )[:1]
        assert (found["row"], found["step"], found["rank"]) == (row, 0, 1)

    def test_what_is_left_of_an_epoch_may_lack_a_document(self, state: dict[str, Any]) -> None:
        """Of 5 rows one is left; for two ranks it is left over, and begins the next epoch."""
        order = Order(5, 3)
        taken, left = order.rows_at(0, 5)[[0, 4]].tolist()
        at = [row[-1][2] for row in in_rows()]
        options = ("--state", self.file(state), "--ranks", 1, "--find")
        none = traced(*options, f"a.jsonl:{at[taken]}")
        assert none.endswith(
            "\nnone of them is in what is left of epoch 0: --epochs looks further\n"
        )
        assert [one["row"] for one in traced_json(*options, f"a.jsonl:{at[left]}")] == [left]
        two = ("--state", "state.json", "--ranks", 2, "--find")
        rows = [one["place"] for one in traced_json(*two, f"a.jsonl:{at[left]}")]
        assert rows[0] == 4
        assert len(rows) == 2

    def test_one_in_a_checkpoint(self, state: dict[str, Any]) -> None:
        """As the Trainer writes it, or a loop that saves what each rank's sampler says."""
        alone = traced("--state", self.file(state), "--ranks", 2)
        for content in ({"global_step": 2, "callbacks": {"PackedRows": {"sampler": state}}},
                        {"ranks": [state, dict(state)]}):  # fmt: skip
            assert traced("--state", self.file(content), "--ranks", 2) == alone
        differ = {"ranks": [state, state | {"samples": 2}]}
        result = packer("trace", "out", "--state", self.file(differ), "--ranks", 2)
        assert_error(result, 1, "the file holds 2 states of samplers, which differ")

    def test_a_balanced_one_knows_its_sizes(self, state: dict[str, Any]) -> None:
        state |= {"balance": "step", "cost": 8, "dealt": [[0, 2, 2, 1]]}
        last = traced("--state", self.file(state))
        assert "2 ranks with 1 batch of 2 rows each\n" in last
        assert ", balance step\n" in last
        sizes = ("--ranks", 2, "--batch-size", 2, "--balance", "step", "--hidden-size", 8)
        same = traced("--step", 0, "--seed", 3, *sizes)
        assert same.partition("\n\n")[2] == last.partition("\n\n")[2]
        result = packer("trace", "out", "--state", "state.json", "--ranks", 4)
        assert_error(result, 2, "--ranks: 4, and the state has 2")
        result = packer("trace", "out", "--state", "state.json", "--hidden-size", 9)
        assert_error(result, 2, "--hidden-size: 9, and the state has 8")
        resumed = traced_json("--state", "state.json", "--step", 0, "--ranks", 4)
        assert [one["rank"] for one in resumed] == [0, 1, 2, 3]

    def test_one_that_lost_how_rows_were_dealt(self, state: dict[str, Any]) -> None:
        state |= {"balance": "step", "cost": 8, "dealt": [[2, 2, 1, 1]]}
        result = packer("trace", "out", "--state", self.file(state))
        assert result.exit_code == 0
        assert result.stderr.startswith("packer: the run went on at place 2 with other sizes: ")
        assert packer("trace", "out", "--state", "state.json", "--step", 0).stderr == ""

    def test_what_is_no_state_of_these_rows(self, state: dict[str, Any]) -> None:
        for change, message in (
            ({"rows": 6}, "the state has rows 6, the result has 5"),
            ({"data": "x"}, "the state has data x, the result has "),
            ({"samples": -1}, "the state is not one of a PackedSampler: Expected `int` >= 0"),
            ({"samples": 0}, "the state was saved before the first step"),
            ({"dealt": [[1]]}, "the state is not one of a PackedSampler"),
        ):
            result = packer("trace", "out", "--state", self.file(state | change), "--ranks", 2)
            assert_error(result, 1, message)

    def test_what_is_no_state(self, state: dict[str, Any]) -> None:
        for content in ([], 5, {}, {"sampler": {"rows": 5}}, "x"):
            result = packer("trace", "out", "--state", self.file(content), "--ranks", 2)
            assert_error(result, 1, "the state is not one of a PackedSampler")
        Path("state.json").write_text("{")
        result = packer("trace", "out", "--state", "state.json", "--ranks", 2)
        assert_error(result, 1, "state.json: is not JSON")
        result = packer("trace", "out", "--state", "none.json", "--ranks", 2)
        assert_error(result, 1, "none.json: cannot read: No such file")
        result = packer("trace", "out", "--state", self.file(state), "--ranks", 2, "--seed", 4)
        assert_error(result, 2, "--seed: 4, and the state has 3")


# --find

ONE_RANK = ("--ranks", 1, "--no-shuffle")


def found(document: str, *arguments: object, directory: str = "out") -> str:
    return traced("--find", document, *arguments, directory=directory)


def found_json(document: str, *arguments: object, directory: str = "out") -> list[dict[str, Any]]:
    return traced_json("--find", document, *arguments, directory=directory)


def places(rows: Iterable[dict[str, Any]]) -> list[tuple[int, ...]]:
    names = ("step", "epoch", "rank", "micro_batch", "row")
    return [tuple(one[name] for name in names) for one in rows]


@pytest.fixture
def in_folder(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data/a.jsonl").write_bytes(jsonl(*TEXTS))
    pack("data/a.jsonl", "-l", 16, *IN_ORDER)


@pytest.mark.usefixtures("in_folder")
def test_every_piece_of_a_document() -> None:
    options = ("--ranks", 2, "--micro-batches", 2, "--no-shuffle")
    assert found("data/a.jsonl:65", *options) == (
        "data/a.jsonl byte 65: in 2 rows\n"
        "\n"
        "step  epoch  rank  micro-batch  row  tokens  document\n"
        "   0      0     0            1    2      16  data/a.jsonl byte 65\n"
        "   0      0     1            1    3       5  data/a.jsonl byte 65 from its token 16\n"
    )
    for name in ("a.jsonl:65", "a.jsonl byte 65", "/data/a.jsonl:65", "data/a.jsonl byte 65"):
        assert found(name, *options) == found("data/a.jsonl:65", *options)
    rows = found_json("a.jsonl:65", *options, "--epochs", 2)
    assert places(rows) == [(0, 0, 0, 1, 2), (0, 0, 1, 1, 3), (1, 1, 1, 1, 2), (2, 1, 0, 0, 3)]
    assert rows[1]["segments"] == [
        {"segment": 0, "file": "data/a.jsonl", "position": 65, "position_unit": "byte",
         "start": 16, "tokens": 5}
    ]  # fmt: skip


@pytest.mark.usefixtures("in_folder")
def test_a_row_that_is_left_over_begins_the_next_epoch() -> None:
    assert places(found_json("a.jsonl:112", "--ranks", 2, "--no-shuffle")) == [(2, 1, 0, 0, 4)]


@pytest.mark.usefixtures("in_folder")
def test_a_row_whose_batch_the_loader_dropped_is_in_no_step() -> None:
    options = ("--ranks", 1, "--batch-size", 2, "--drop-last", "--no-shuffle")
    (row,) = found_json("a.jsonl:112", *options)
    assert places([row]) == [(None, None, None, None, 4)]
    assert row["place"] == 4
    table = found("a.jsonl:112", *options).splitlines()
    assert table[3].split()[:5] == ["-", "-", "-", "-", "4"]
    assert table[-1] == "- in no step: batches that the loader dropped (1)"


def test_names_that_are_unclear(folder: Path) -> None:
    for name in ("a/x.jsonl", "b/x.jsonl", "b/yy.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(jsonl("text"))
    pack("a", "b", "-l", 16, *IN_ORDER)
    many = packer("trace", "out", "--find", "x.jsonl:0", *ONE_RANK)
    assert_error(many, 2, "--find: 'x.jsonl' may be a/x.jsonl, b/x.jsonl")
    assert "tip: give more of the path" in many.stderr
    assert len(found_json("b/x.jsonl:0", *ONE_RANK)) == 1
    unknown = packer("trace", "out", "--find", "other.txt:0", *ONE_RANK)
    assert_error(unknown, 2, "--find: no input is 'other.txt' or ends with it")
    assert unknown.stderr.endswith("tip: packer stats DIR --by input lists inputs\n")
    part = packer("trace", "out", "--find", "l:0", *ONE_RANK)
    assert_error(part, 2, "--find: no input is 'l'")
    for name in ("x.jsonl", "x.jsonl:", "x.jsonl:-1", ":7", "x.jsonl:²", f"x.jsonl:{2**63}"):
        result = packer("trace", "out", "--find", name, *ONE_RANK)
        assert_error(result, 2, "is not FILE:POSITION")


def test_stdin(folder: Path) -> None:
    result = unaltered("pack", "-", "-l", 8, "-q", "-o", "out", stdin=jsonl("one"))
    assert result.returncode == 0
    assert found("stdin:0", *ONE_RANK) == found("-:0", *ONE_RANK)
    assert "stdin byte 0\n" in found("stdin byte 0", *ONE_RANK)


def absence(document: str, *arguments: object, directory: str = "out") -> tuple[str, str]:
    """(why it is in no row, the tip)."""
    result = packer("trace", directory, "--find", document, *ONE_RANK, *arguments)
    assert_error(result, 1, f"is in no row of {directory}: ")
    error, tip = result.stderr.splitlines()
    return error.partition(f" of {directory}: ")[2], tip.removeprefix("tip: ")


@pytest.mark.usefixtures("in_folder")
def test_a_place_in_the_middle_of_a_document() -> None:
    assert absence("a.jsonl:70") == (
        "every document of this input is in rows, and none begins there",
        "the nearest documents in rows begin at byte 65 and byte 98",
    )
    assert absence("a.jsonl:999")[1] == "the nearest documents in rows begin at byte 112"


def test_what_was_left_out(folder: Path) -> None:
    """A rejected record is named; what was dropped, and what was empty, is counted."""
    lines = [b'{"text": "one"}', b'{"text": 5}', b'{"text": ""}', b'{"text": "longer than 8"}']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    pack("a.jsonl", "-l", 8, "--overlong", "drop", "--on-error", "skip")
    assert absence("a.jsonl:16")[0].startswith("it was rejected: ")
    assert absence("a.jsonl:41")[0] == (
        "left out of its input or source: dropped as longer than a row (1), without tokens (1), "
        "rejected (1)"
    )


def test_what_tokenized_directories_tell(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("one", "longer than 8", "two") + b'\n{"text": 5}')
    tokenized = packer(
        "tokenize", "a.jsonl", "-t", "bytes", "-o", "tokens", "-q", "--on-error", "skip"
    )
    assert tokenized.exit_code == 0, tokenized.stderr
    view = packer("pack", "tokens", "-l", 8, "--overlong", "drop", "--view", "-q", "-o", "out")
    assert view.exit_code == 0, view.stderr
    assert found("a.jsonl:0", *ONE_RANK).startswith("a.jsonl byte 0: in 1 row\n")
    assert places(found_json("tokens:0", *ONE_RANK)) == places(found_json("a.jsonl:0", *ONE_RANK))
    assert found("tokens document 2", *ONE_RANK).startswith("tokens document 2: in 1 row\n")
    for name in ("a.jsonl:16", "tokens:1"):
        assert absence(name)[0] == "it has 14 tokens, and documents longer than a row were dropped"
    rejected = json.loads((folder / "tokens/rejected.jsonl").read_text())["position"]
    assert absence(f"a.jsonl:{rejected}")[0].startswith("it was rejected: ")
    (folder / "tokens").rename(folder / "moved")
    assert found("a.jsonl:0", *ONE_RANK, "--tokens", "moved").startswith("a.jsonl byte 0: in 1 row")


def test_documents_of_recipes(folder: Path) -> None:
    """By the first input; those taken twice are found twice, those held out on the other side."""
    write_sources()
    pack_mixed(recipe_of(IN_SHARES, max_length=512, validation_share=0.1))
    shown = packer("show", "out/train", "0--1", "--json").stdout.splitlines()
    rows: dict[tuple[str, int], list[int]] = {}
    for line in shown:
        row = json.loads(line)
        for one in row["segments"]:
            rows.setdefault((one["file"], one["position"]), []).append(row["row"])
    twice = next(key for key, its in rows.items() if key[0] == "chat.jsonl" and len({*its}) > 1)
    path, position = twice
    its = found_json(f"{path}:{position}", *ONE_RANK, directory="out/train")
    assert sorted(one["row"] for one in its) == sorted({*rows[twice]})
    assert {segment["source"] for one in its for segment in one["segments"]} == {"chat"}
    other = packer("show", "out/validation", "0", "--json").stdout
    held = json.loads(other)["segments"][0]
    name = f"{held['file']}:{held['position']}"
    why, _ = absence(name, directory="out/train")
    assert why.startswith("it is in row 0 of ")
    assert why.endswith("out/validation, the other side of the split")
    in_rows = {position for file, position in rows if file == "code.jsonl"}
    every, at = [], 0
    for line in Path("code.jsonl").read_bytes().splitlines(keepends=True):
        every.append(at)
        at += len(line)
    absent = [one for one in every if one not in in_rows]
    whys = [absence(f"code.jsonl:{one}", directory="out/train")[0] for one in absent[:40]]
    assert {one.partition(" of ")[0].rstrip("0123456789") for one in whys} == {
        "it is in row ",
        "left out",
    }
    assert "not taken, as code has 0.67 epochs" in max(whys, key=len)
    assert absence("code.jsonl:1", directory="out/train") == (
        "no document begins there",
        f"the nearest documents begin at byte 0 and byte {every[1]}",
    )


# Steps: the numbers that count them, against a loop that is written out


def epochs_of(rows: int, loop: Loop, begin: int) -> Iterator[tuple[int, list[list[int]]]]:
    """(epoch, the places of each rank), as a sampler gives them in iteration after iteration."""
    while True:
        epoch = (begin + (0 if loop.uneven else loop.world_size - 1)) // rows
        end = (epoch + 1) * rows
        if not loop.uneven:
            end -= (end - begin) % loop.world_size
        yield epoch, [list(range(begin + r, end, loop.world_size)) for r in range(loop.world_size)]
        begin = end


def batches_of(places: list[int], loop: Loop) -> list[list[int]]:
    """As a DataLoader makes them."""
    size = loop.batch_size
    batches = [places[i : i + size] for i in range(0, len(places), size)]
    return [one for one in batches if len(one) == size or not loop.drop_last]


def steps_of(rows: int, loop: Loop, begin: int) -> Iterator[tuple[int, list[list[list[int]]]]]:
    """(epoch, batches of each rank) of step after step."""
    for epoch, ranks in epochs_of(rows, loop, begin):
        batches = [batches_of(places, loop) for places in ranks]
        size = loop.micro_batches
        if loop.trainer:  # whose steps all have as many rows, but for the last of an epoch
            most = len(batches_of(list(range(rows // loop.world_size)), loop))
            if begin > epoch * rows:
                most -= size * -(
                    -(begin - epoch * rows) // (loop.world_size * loop.batch_size * size)
                )
            batches, begin = [its[: max(most, 0)] for its in batches], 0
        for first in range(0, max(map(len, batches)), size):
            yield epoch, [its[first : first + size] for its in batches]


LOOPS = (
    st.builds(
        dict,
        world_size=st.integers(1, 7),
        batch_size=st.integers(1, 4),
        micro_batches=st.integers(1, 3),
        uneven=st.booleans(),
        drop_last=st.booleans(),
        trainer=st.booleans(),
    )
    .filter(lambda one: not (one["trainer"] and one["uneven"]))
    .map(lambda one: Loop(**one))
)


@settings(max_examples=60)
@given(rows=st.integers(1, 40), loop=LOOPS, begin=st.integers(0, 130))
def test_steps_are_those_of_a_loop(rows: int, loop: Loop, begin: int) -> None:
    try:
        steps = Steps(rows, loop, begin)
    except DataError:
        assert rows // loop.world_size < (loop.batch_size if loop.drop_last else 1)
        return
    taken = set()
    for number, (epoch, ranks) in enumerate(islice(steps_of(rows, loop, begin), 60)):
        step = steps.of(number)
        assert (step.number, step.epoch) == (number, epoch)
        by_row = zip_longest(*(chain.from_iterable(batches) for batches in ranks))
        expected = [place for row in by_row for place in row if place is not None]
        assert steps.places(step).tolist() == expected
        for rank, batches in enumerate(ranks):
            for row, place in enumerate(chain.from_iterable(batches)):
                assert steps.at(place) == step
                assert divmod(place - step.begin, loop.world_size) == (row, rank)
        for place in expected:
            assert steps.last_before(place + 1) == step
        taken |= {*expected}
    for place in {*range(begin, max(taken))} - taken:
        assert loop.drop_last or loop.trainer
        assert steps.at(place) is None
        last = steps.last_before(place + 1)
        assert last is None or last.begin < place
    assert steps.last_before(begin) is None


@given(rows=st.integers(4, 40), loop=LOOPS, number=st.integers(0, 10**12))
def test_steps_far_away_follow_one_another(rows: int, loop: Loop, number: int) -> None:
    try:
        steps = Steps(rows * 4, loop)
    except DataError:
        return
    step, after = steps.of(number), steps.of(number + 1)
    assert after.number == step.number + 1
    if after.epoch == step.epoch:
        assert after.begin == step.end
    else:
        assert after.epoch == step.epoch + 1
        assert after.begin == steps.grid.epoch(step.epoch).end
    assert steps.last_before(after.begin + 1) == after
