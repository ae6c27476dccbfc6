"""Records of preference through the command line: which answers, with which prompts and labels, lie
in which rows; and what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import assistant, marked_pieces, pack_chat, refused, user, write
from forged_changes import put_table, table_of
from forging import Result
from numpy.random import default_rng
from support import assert_error, check_directory, packer, shard_of

from packer_cli import open_packed
from packer_cli.result.rules import broken_segments

Json = dict[str, Any]
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
PAIR_MARKED = ["2+2=⟦4<eos>⟧", "2+2=⟦5<eos>⟧"]
ASK, GOOD, BAD = user("2+2="), assistant("4"), assistant("5")
CHAT_MARKED = ["<user>2+2=</user><assistant>⟦4</assistant>⟧",
               "<user>2+2=</user><assistant>⟦5</assistant>⟧"]  # fmt: skip
SHAPE = ("--shape", "preference")


def answers(record: Any, *options: Any, **how: Any) -> list[tuple[str, int, int]]:
    """(text, pair, side) of the segments of a record alone."""
    pack_chat([record], *options, **how)
    packed = open_packed("out")
    (batch,) = packed.batches(packed.manifest["shards"][0])
    pair, side = (batch.column(name).to_pylist()[0] for name in ("pair", "side"))
    return list(zip(marked_pieces("out"), pair, side, strict=True))


def columns_of(directory: Path | str = "out") -> dict[str, list[Any]]:
    """Rows of all columns, in the order of the shards."""
    packed = open_packed(directory)
    batches = [b for shard in packed.manifest["shards"] for b in packed.batches(shard)]
    return pa.Table.from_batches(batches).to_pydict()


def test_forms_of_pairs_in_parquet(folder: Path) -> None:
    """Arrow gives messages all fields that any in the column has."""
    records = [{"chosen": [ASK, GOOD], "rejected": [ASK, assistant("5", name="Ada")]}]
    pq.write_table(pa.Table.from_pylist(records), "data.parquet")
    pack_chat(Path("data.parquet"))
    assert marked_pieces("out") == CHAT_MARKED


def test_a_label_changes_nothing_unless_the_shape_is_asked_for(folder: Path) -> None:
    pack_chat([{"prompt": "2+2=", "completion": "4", "label": False}])
    assert "side" not in open_packed("out").manifest["config"]["columns"]


def test_templates_and_fields_by_name(folder: Path) -> None:
    record = {"q": "2+2=", "good": "4", "bad": "5"}
    fields = ("--field", "prompt=q", "--field", "chosen=good", "--field", "rejected=bad")
    assert [one[0] for one in answers(record, *fields)] == PAIR_MARKED
    chat = answers(record, *fields, "--prompt-template", "chat")
    assert [one[0] for one in chat] == CHAT_MARKED
    for one, answer in zip(answers(PAIR, "--prompt-template", "alpaca"), "45", strict=True):
        assert one[0].endswith(f"### Instruction:\n2+2=\n\n### Response:\n⟦{answer}<eos>⟧")
    # as before: the first of two answers is a conversation to train on
    pack_chat([{"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}], "--field", "messages=chosen")
    assert marked_pieces("out") == CHAT_MARKED[:1]


def test_what_is_wrong_ends_the_run(folder: Path) -> None:
    """With one line that names its place; `golden_chats.json` has all that is wrong."""
    text = "'chosen' and 'rejected' are equal"
    refused([PAIR, PAIR | {"rejected": "4"}], 1, "data.jsonl, line 2", text, options=SHAPE)


LABELLED_ONE = {"prompt": "2+2=", "completion": "4", "label": True}
BOTH_FORMS = "pairs and answers with a label cannot lie in one result"


@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("names_of_fields", [LABELLED_ONE.keys(), ["question", "answer", "label"]])
def test_pairs_and_labelled_answers_are_not_mixed(
    folder: Path, names: str, names_of_fields: Sequence[str]
) -> None:
    """Nor is either left out as records that lack the other's fields."""
    labelled = dict(zip(names_of_fields, LABELLED_ONE.values(), strict=True))
    write([PAIR], f"{names[0]}.jsonl")
    write([labelled], f"{names[1]}.jsonl")
    how = ("-t", "bytes", *SHAPE, "-q")
    pack = ("pack", "-l", 64, "-o", "out")
    assert_error(packer(*pack, "a.jsonl", "b.jsonl", *how, "--on-error", "skip"), 2, BOTH_FORMS)
    for name in "ab":
        assert packer("tokenize", f"{name}.jsonl", *how, "-o", name).exit_code == 0
    for view in ([], ["--view"]):
        assert_error(packer(*pack, "a", "b", "-q", *view), 2, BOTH_FORMS)
    Path("recipe.toml").write_text(
        'max_length = 64\ntokenizer = "bytes"\nshape = "preference"\n'
        '[[source]]\nname = "a"\ninputs = ["a.jsonl"]\n'
        '[[source]]\nname = "b"\ninputs = ["b.jsonl"]\n'
    )
    assert_error(packer("pack", "recipe.toml", "-o", "out", "-q"), 2, BOTH_FORMS)
    assert not Path("out").exists()


@pytest.mark.parametrize("command", [["pack", "-l", 64], ["tokenize"]])
@pytest.mark.parametrize("named", [["b.jsonl"], ["b.jsonl", "a.jsonl"]])
@pytest.mark.parametrize("first", [PAIR, LABELLED_ONE])
def test_add_does_not_mix_forms(
    folder: Path, command: list[Any], named: list[str], first: Json
) -> None:
    (other,) = (one for one in (PAIR, LABELLED_ONE) if one is not first)
    how = (*command, "-t", "bytes", *SHAPE, "-q", "-o", "out")
    write([first], "a.jsonl")
    assert packer(*how, "a.jsonl").exit_code == 0
    write([other], "b.jsonl")
    assert_error(packer(*how, *named, "--add"), 2, BOTH_FORMS)
    write([first | {"prompt": "1+3="}], "b.jsonl")
    done = packer(*how, *named, "--add")
    assert done.exit_code == 0, done.stderr
    assert json.loads(Path("out/manifest.json").read_text())["documents"] == 2


def test_add_reads_the_names_of_fields_again(folder: Path) -> None:
    """What the first record calls its prompt is not in the manifest."""
    write([{"question": "2+2=", "chosen": "4", "rejected": "5"}], "b.jsonl")
    how = ("pack", "-t", "bytes", "-l", 64, "-o", "out")
    assert packer(*how, "b.jsonl", "-q").exit_code == 0
    write([{"question": "1+1+2=", "chosen": "4", "rejected": "5"}], "a.jsonl")
    done = packer(*how, "a.jsonl", "b.jsonl", "--add")
    assert done.exit_code == 0, done.stderr
    assert "b.jsonl: preference" not in done.stderr  # two shapes, the second without its prompt
    texts = _texts_in_rows("out")
    assert sorted(texts)[::2] == ["1+1+2=⟦4<eos>⟧", "2+2=⟦4<eos>⟧"]


@pytest.mark.parametrize("bad", [[], [assistant(5)]])
def test_what_is_counted_of_pairs_is_counted_once(folder: Path, bad: list[Json]) -> None:
    """Not of each side, and not of records that are left out."""
    ask, silent = {**ASK, "reasoning_content": "Hm"}, {**assistant("So?"), "train": False}
    own = {"prompt": [ask], "chosen": [silent, GOOD], "rejected": [silent, BAD]}
    others = [{**own, "rejected": bad}] if bad else []
    manifest = pack_chat([own, *others], "--on-error", "skip")
    assert (manifest["documents"], manifest["rejected_records"]) == (1, len(others))
    counted = ("unshown_documents", "unshown_reasoning", "masked_documents")
    assert [manifest[name] for name in counted] == [1, 1, 1]
    assert manifest["trained_turns"] == 2


def random_pairs(count: int, seed: int = 0, longest: int = 30) -> list[Json]:
    rng = default_rng(seed)

    def text(name: str) -> str:
        return name * int(rng.integers(1, longest))

    return [{"prompt": f"{i} {text('q')}", "chosen": text("a"), "rejected": text("b")}
            for i in range(count)]  # fmt: skip


def expected_sides(records: list[Json]) -> list[list[tuple[str, int]]]:
    return [
        [(f"{one['prompt']}⟦{one[name]}<eos>⟧", side) for name, side in
         (("chosen", 1), ("rejected", 0))]
        for one in records
    ]  # fmt: skip


def pairs_in(directory: Path | str = "out") -> list[list[tuple[str, int]]]:
    """The pairs of a result, in the order of the input: (text, side) of each of its segments."""
    found: dict[int, list[tuple[str, int]]] = {}
    texts = iter(_texts_in_rows(directory))
    columns = columns_of(directory)
    for segments, pairs, sides in zip(
        columns["segments"], columns["pair"], columns["side"], strict=True
    ):
        assert len(segments) == len(pairs) == len(sides)
        numbers = list(dict.fromkeys(pairs))
        assert numbers == list(range(len(numbers)))
        for segment, pair, side in zip(segments, pairs, sides, strict=True):
            place = found.setdefault(segment["position"], [])
            place.append((next(texts), side))
            assert pairs.count(pair) == 2
    return [found[place] for place in sorted(found)]


def _texts_in_rows(directory: Path | str) -> list[str]:
    columns, texts = columns_of(directory), []
    places = columns.get("cu_seqlens_padded", columns["cu_seqlens"])
    for ids, labels, begins, edges in zip(
        columns["input_ids"], columns["labels"], places, columns["cu_seqlens"], strict=True
    ):
        for begin, (first, end) in zip(begins, pairwise(edges), strict=False):
            stop = begin + end - first
            flags = [label != -100 for label in labels[begin:stop]]
            at = flags.index(True)
            assert all(flags[at:])
            text = "".join("<eos>" if i == 256 else chr(i) for i in ids[begin:stop])
            texts.append(f"{text[:at]}⟦{text[at:]}⟧")
    return texts


@pytest.mark.parametrize(
    "options",
    [
        (), ("--strategy", "next-fit"), ("--strategy", "first-fit"), ("--strategy", "harmonic"),
        ("--segment-multiple", 8), ("--max-segments-per-row", 5), ("--position-ids",),
        ("--no-shuffle", "--unit-bytes", 2048), ("--label-shift", "none", "--workers", 2),
    ],
)  # fmt: skip
def test_both_sides_of_every_pair_lie_in_one_row(folder: Path, options: Sequence[Any]) -> None:
    records = random_pairs(200)
    manifest = pack_chat(records, "-l", 256, *options)
    assert pairs_in() == expected_sides(records)
    assert (manifest["documents"], manifest["segments"]) == (200, 400)
    assert manifest["dropped_documents"] == 0
    most = max(map(len, columns_of()["side"]))
    assert most <= 4 if "--max-segments-per-row" in options else most > 4
    result = packer("verify", "out", "--against-inputs", "--sample", "all")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("multiple", [1, 16])
def test_pairs_longer_than_a_row_are_dropped_and_counted(folder: Path, multiple: int) -> None:
    records = random_pairs(100, longest=60)
    manifest = pack_chat(records, "-l", 128, "--segment-multiple", multiple)
    sizes = [[len(text) + 1 - len("⟦⟧<eos>") for text, _ in one] for one in expected_sides(records)]
    room = [sum(-(-size // multiple) * multiple for size in one) for one in sizes]
    kept = [one for one, size in zip(expected_sides(records), room, strict=True) if size <= 128]
    assert 20 < len(kept) < 80
    assert pairs_in() == kept
    assert manifest["dropped_documents"] == 100 - len(kept)
    dropped = sum(sum(one) for one, size in zip(sizes, room, strict=True) if size > 128)
    assert manifest["dropped_tokens"] == dropped
    assert "pairs" in packer("stats", "out").stdout.split("dropped")[1].splitlines()[0]
    at = next(i for i, size in enumerate(room) if size > 128)
    result = packer("pack", "data.jsonl", "-l", 128, "-t", "bytes", "-o", "again", "-q",
                    "--segment-multiple", multiple, "--overlong", "error")  # fmt: skip
    assert_error(result, 1, f"line {at + 1} ", f"the two sides of the pair have {room[at]} tokens")


def test_tokenized_pairs_give_the_same_rows(folder: Path) -> None:
    """Packed at once, from a tokenized directory, and as a view: the same pairs and rows."""
    records = random_pairs(150)
    write(records)
    shown = packer("tokenize", "data.jsonl", "-t", "bytes", "-o", "tokens", "-q")
    assert shown.exit_code == 0, shown.stderr
    for name, more in (("packed", ()), ("view", ["--view"])):
        done = packer("pack", "tokens", "-l", 256, "-o", name, "-q", *more)
        assert done.exit_code == 0, done.stderr
        check_directory(name)
        checked = packer("verify", name, "--against-inputs", "--sample", "all")
        assert checked.exit_code == 0, checked.stderr
    assert columns_of("packed") == columns_of("view")
    sides = chain.from_iterable(columns_of("packed")["side"])
    texts = dict(zip(_texts_in_rows("packed"), sides, strict=True))
    assert texts == dict(chain.from_iterable(expected_sides(records)))
    assert packer("verify", "tokens", "--against-inputs").exit_code == 0
    exported = packer("export", "view", "--to", "packed", "-o", "exported", "-q")
    assert exported.exit_code == 0, exported.stderr
    assert shard_of("exported").read_bytes() == shard_of("packed").read_bytes()
    document = json.loads(packer("show", "tokens", 3, "--json").stdout)
    assert [side["side"] for side in document["sides"]] == ["chosen", "rejected"]
    assert "".join(side["text"] for side in document["sides"]) == document["text"]


def test_labels_tell_equal_answers_apart(folder: Path) -> None:
    """In a recipe that leaves out what is equal, an answer is kept with each of its labels."""
    answer = {"prompt": "2+2=", "completion": "4"}
    write([answer | {"label": label} for label in (True, False, True)])
    Path("recipe.toml").write_text(
        'max_length = 64\ntokenizer = "bytes"\nshape = "preference"\ndedup = "exact"\n'
        '[[source]]\nname = "a"\ninputs = ["data.jsonl"]\n'
    )
    done = packer("pack", "recipe.toml", "-o", "out", "-q")
    assert done.exit_code == 0, done.stderr
    assert check_directory("out")["documents"] == 2
    assert sorted(chain.from_iterable(columns_of()["side"])) == [0, 1]
    assert packer("verify", "out", "--against-inputs", "--sample", "all").exit_code == 0


def test_sources_of_a_recipe_lie_in_rows_of_pairs(folder: Path) -> None:
    write(random_pairs(800, 1), "a.jsonl")
    write(random_pairs(600, 2), "b.jsonl")
    Path("recipe.toml").write_text(
        'max_length = 256\ntokenizer = "bytes"\n'
        '[[source]]\nname = "a"\ninputs = ["a.jsonl"]\nweight = 1\n'
        '[[source]]\nname = "b"\ninputs = ["b.jsonl"]\nweight = 1\n'
    )
    done = packer("pack", "recipe.toml", "-o", "out", "-q")
    assert done.exit_code == 0, done.stderr
    manifest = check_directory("out")
    assert manifest["segments"] == 2 * manifest["documents"]
    checked = packer("verify", "out", "--against-inputs", "--sample", "all")
    assert checked.exit_code == 0, checked.stderr
    write([{"text": "Hi"}], "text.jsonl")
    Path("recipe.toml").write_text(
        'max_length = 256\ntokenizer = "bytes"\n'
        '[[source]]\nname = "a"\ninputs = ["a.jsonl"]\n'
        '[[source]]\nname = "t"\ninputs = ["text.jsonl"]\n'
    )
    done = packer("pack", "recipe.toml", "-o", "other", "-q")
    assert done.exit_code == 2
    assert "records of preference and of text cannot lie in one result" in done.stderr


def test_show_tells_sides_apart(folder: Path) -> None:
    pack_chat([PAIR])
    text = packer("show", "out", 0).stdout
    assert "segment 0, pair 0 chosen: data.jsonl byte 0, 6 tokens, 2 trained\n2+2=⟦4<eos>⟧" in text
    assert "segment 1, pair 0 rejected: data.jsonl byte 0 from its token 6, 6 tokens" in text
    segments = json.loads(packer("show", "out", 0, "--json").stdout)["segments"]
    assert [(one["pair"], one["side"]) for one in segments] == [(0, "chosen"), (0, "rejected")]
    pack_chat([{"prompt": "2+2=", "completion": "5", "label": False}], *SHAPE)
    assert "segment 0, pair 0 undesirable: data.jsonl" in packer("show", "out", 0).stdout
    stats = packer("stats", "out").stdout
    assert [line.split() for line in stats.splitlines() if line.startswith("answers")] == [
        ["answers", "1", "in", "1", "segment"]
    ]


def test_plans_of_pairs_are_what_is_packed(folder: Path) -> None:
    manifest = pack_chat(random_pairs(200, longest=60), "-l", 200)
    plan = json.loads(packer("plan", "data.jsonl", "-t", "bytes", "-l", 200, "--json").stdout)
    (outcome,) = plan["outcomes"]
    for name in ("rows", "segments", "tokens", "dropped_documents", "lower_bound_rows"):
        assert outcome[name] == manifest[name], name
    assert outcome["cut_documents"] == 0
    assert outcome["bytes"] == sum(shard["bytes"] for shard in manifest["shards"])


@pytest.mark.parametrize("to", ["trl", "llamafactory", "axolotl", "megatron", "megatron-bridge",
                                "unpacked"])  # fmt: skip
def test_exports_that_would_train_on_rejected_answers_are_refused(folder: Path, to: str) -> None:
    pack_chat([PAIR])
    assert packer("tokenize", "data.jsonl", "-t", "bytes", "-o", "tokens", "-q").exit_code == 0
    assert_error(packer("export", "out", "--to", to, "-o", "there"), 2, "records of preference",
                 "rejected")  # fmt: skip
    if to in ("megatron", "unpacked"):
        result = packer("export", "tokens", "--to", to, "-o", "there")
        assert_error(result, 2, "records of preference", "all of them would be trained on")
    assert not Path("there").exists()


def test_exports_of_columns_keep_pairs(folder: Path) -> None:
    pack_chat(random_pairs(100), "-l", 256)
    columns = columns_of()
    assert packer("export", "out", "--to", "parquet", "-o", "p", "-q").exit_code == 0
    assert packer("export", "out", "--to", "numpy", "-o", "n", "-q").exit_code == 0
    table = pq.read_table("p").to_pydict()
    for name in ("pair", "side"):
        assert table[name] == columns[name]
        values, offsets = np.load(f"n/{name}.npy"), np.load(f"n/{name}_offsets.npy")
        rows = [values[a:b].tolist() for a, b in pairwise(offsets.tolist())]
        assert rows == columns[name]


SOUND = {
    "cu_seqlens": [[0, 2, 5, 6], [0, 3]],
    "pair": [[0, 0, 1], [0]],
    "side": [[1, 0, 0], [1]],
    "segments": [[(0, 0, 0), (0, 0, 2), (0, 9, 0)], [(0, 20, 0)]],
}
BROKEN: dict[str, Json] = {
    "pair does not count": {"pair": [[0, 0, 2], [0]]},
    "pair does not count ": {"pair": [[1, 1, 2], [0]]},
    "pair does not count  ": {"pair": [[0, 0, 0], [0]]},
    "side is not 1 and then 0": {"side": [[0, 1, 0], [1]]},
    "side is not 1 and then 0 ": {"side": [[1, 1, 0], [1]]},
    "side is not 1 and then 0  ": {"side": [[1, 0, 2], [1]]},
    "segments of a pair": {"segments": [[(0, 0, 0), (0, 0, 3), (0, 9, 0)], [(0, 20, 0)]]},
    "segments of a pair ": {"segments": [[(0, 0, 0), (0, 7, 2), (0, 9, 0)], [(0, 20, 0)]]},
    "segments of a pair  ": {"segments": [[(0, 0, 0), (0, 0, 2), (0, 9, 4)], [(0, 20, 0)]]},
    "side does not match": {"side": [[1, 0], [1]]},
}


def _batch(columns: Json) -> Any:
    kinds = {"cu_seqlens": pa.int32(), "pair": pa.int32(), "side": pa.int8()}
    parts = [("file", pa.int32()), ("position", pa.int64()), ("start", pa.int32())]
    arrays = {name: pa.array(columns[name], pa.list_(kind)) for name, kind in kinds.items()}
    rows = [[dict(zip(("file", "position", "start"), one, strict=True)) for one in row]
            for row in columns["segments"]]  # fmt: skip
    return pa.record_batch(arrays | {"segments": pa.array(rows, pa.list_(pa.struct(parts)))})


def test_rules_of_sound_pairs() -> None:
    assert broken_segments(_batch(SOUND)) == []


@pytest.mark.parametrize("rule", BROKEN)
def test_rules_of_pairs_are_broken(rule: str) -> None:
    (found, *_) = broken_segments(_batch(SOUND | BROKEN[rule]))
    assert found.rule.startswith(rule.strip())
    assert (found.row, found.rows) == (0, 1)


def _other_side(result: Result) -> None:
    """Label the second answer otherwise; its tokens are the same."""
    shard = result.manifest["shards"][0]["file"]
    table = table_of(result, shard)
    field = table.schema.field("side")
    (sides,) = table["side"].to_pylist()
    sides[1] = 1 - sides[1]
    at = table.column_names.index("side")
    put_table(result, shard, table.set_column(at, field, pa.array([sides], field.type)))


@pytest.mark.parametrize("columns", ["input_ids,cu_seqlens,segments", "input_ids,cu_seqlens"])
def test_a_side_that_is_not_that_of_the_input_is_found(folder: Path, columns: str) -> None:
    answer = {"prompt": "2+2=", "completion": "4", "label": True}
    pack_chat([answer] * 3, *SHAPE, "--columns", columns)
    result = Result("out")
    _other_side(result)
    result.save()
    assert packer("verify", "out").exit_code == 0
    checked = packer("verify", "out", "--against-inputs", "--sample", "all")
    assert checked.exit_code != 0
    assert "side has 0 at place 1 of row 0" in checked.stdout
