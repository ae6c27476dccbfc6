"""Changes to a result that no digest shows, each of which `packer verify --against-inputs --sample
all` finds; and those that it cannot find, with the reason why nobody is harmed.

Every change is made by `forging.Result`, so that digests, sums and side files follow from it.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers
from forging import Result
from support import jsonl, packer

from packer_cli.config.options import PackConfig
from packer_cli.records import UInt8
from packer_cli.result.manifest import TOTALS
from packer_cli.tokenization import tokenizer as tokenization

ALL = ("verify", "out", "--against-inputs", "--sample", "all")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Change = Callable[[Result], Any]


def texts(begin: int, end: int) -> list[str]:
    return [f"{i}: " + "naïve café 日本 " * (i % 5) + "x" * (i * 7 % 23) for i in range(begin, end)]


def write_mixed(folder: Path) -> list[object]:
    """Several formats and units, bad and empty records, documents that are cut."""
    bad = b'{"txt": 1}\n{"text": ""}\nnot json\n'
    (folder / "a.jsonl").write_bytes(jsonl(*texts(0, 40)) + bad + jsonl(*texts(40, 60)))
    (folder / "b.jsonl").write_bytes(jsonl(*texts(60, 80)) + bad)
    pq.write_table(pa.table({"text": texts(80, 110)}), folder / "c.parquet", row_group_size=6)
    (folder / "d.txt").write_text("".join(f"{text}\n\n" for text in texts(110, 120)))
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(),
        tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"},
    )  # fmt: skip
    return ["a.jsonl", "b.jsonl", "c.parquet", "d.txt", "-t", "tok", "-l", 32, "--on-error", "skip",
            "--overlong", "truncate", "--unit-bytes", 900]  # fmt: skip


def conversation(i: int) -> dict[str, Any]:
    turns = [
        {"role": role, "content": f"{role} {i} " + "wörter " * (i * 3 % (7 + turn))}
        for turn in range(1 + i % 4) for role in ("user", "assistant")
    ]  # fmt: skip
    if i % 9 == 8:  # nothing to train on
        turns = [turn | {"train": 0} if turn["role"] == "assistant" else turn for turn in turns]
    return {"messages": turns, "tools": [{"name": "f"}] if i % 7 == 6 else None}


def write_chat(folder: Path) -> list[object]:
    """Conversations that are shortened, dropped or untrained; balanced rows of shifted labels."""
    lines = [json.dumps(conversation(i)).encode() + b"\n" for i in range(60)]
    (folder / "a.jsonl").write_bytes(b"".join(lines))
    (folder / "t.jinja").write_text(TEMPLATE)
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(),
        tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"},
    )  # fmt: skip
    return ["a.jsonl", "-t", "tok", "--chat-template", "t.jinja", "-l", 128, "--unit-bytes", 4000,
            "--overlong", "truncate-turns", "--balance", "attention", "--label-shift", "pre",
            "--segment-multiple", 4, "--max-segments-per-row", 2, "--position-ids",
            "--max-loss", 0.9]  # fmt: skip


def write_lossy(folder: Path) -> list[object]:
    (folder / "a.jsonl").write_bytes(jsonl(*texts(0, 20)))
    return ["a.jsonl", "-t", "bytes", "-l", 16, "--overlong", "drop", "--max-loss", 0.01]


RESULTS = {"mixed": write_mixed, "chat": write_chat, "lossy": write_lossy}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of inputs with their result, which tests copy."""
    made = {}
    before = Path.cwd()
    for name, write in RESULTS.items():
        folder = tmp_path_factory.mktemp(name)
        os.chdir(folder)
        try:
            result = packer("pack", *write(folder), "-q", "-o", "out")
            assert result.exit_code == (1 if name == "lossy" else 0), result.stderr
        finally:
            os.chdir(before)
        made[name] = folder
    return made


@pytest.fixture
def copied(folder: Path, results: dict[str, Path]) -> Callable[[str], Result]:
    def copy(name: str) -> Result:
        shutil.copytree(results[name], folder, dirs_exist_ok=True)
        return Result("out")

    return copy


def set_config(name: str, value: object) -> Change:
    return lambda result: result.manifest["config"].update({name: value})


def set_tokenizer(name: str, value: object) -> Change:
    def change(result: Result) -> None:
        result.manifest["tokenizer"][name] = value
        for record in result.records:
            record["tokenizer"][name] = value

    return change


def add(name: str, more: int = 1) -> Change:
    return lambda result: result.add(name, more)


def table_of(result: Result, shard: str) -> Any:
    with pa.ipc.open_stream(result.read(shard)) as reader:
        return reader.read_all().combine_chunks()


def put_table(result: Result, shard: str, table: Any) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    result.write(shard, sink.getvalue().to_pybytes())


def remove_unit(result: Result, number: int) -> None:
    """With all that it holds, and everywhere."""
    manifest = result.manifest
    for shard in [one for one in manifest["shards"] if one["unit"] == number]:
        (result.path / shard["file"]).unlink()
        manifest["shards"].remove(shard)
    manifest["units"] = [unit for unit in manifest["units"] if unit["unit"] != number]
    gone = result.record(number)
    if rejected := gone.get("rejected", 0):
        start = sum(one.get("rejected", 0) for one in result.records[: result.records.index(gone)])
        data = result.read("rejected.jsonl")
        result.write("rejected.jsonl", data[:start] + data[start + rejected :])
    result.records.remove(gone)
    result.sum_up()


def double_unit(result: Result, number: int) -> None:
    """Once more, as another unit that reads the same slices."""
    new = max(unit["unit"] for unit in result.manifest["units"]) + 1
    for shard in [one for one in result.manifest["shards"] if one["unit"] == number]:
        name = shard["file"].replace(f"shard-{number:05d}", f"shard-{new:05d}")
        (result.path / name).write_bytes(result.read(shard["file"]))
        result.manifest["shards"].append(shard | {"file": name, "unit": new})
    (unit,) = (one for one in result.manifest["units"] if one["unit"] == number)
    result.manifest["units"].append(unit | {"unit": new})
    result.records.append(json.loads(json.dumps(result.record(number) | {"unit": new})))
    result.sum_up()


def unit_without_rejected(result: Result) -> int:
    """One of JSON lines, in the middle of its input."""
    return next(
        one["unit"] for one in result.records
        if not one.get("rejected") and one["slices"][0][1] and len(one["slices"]) == 1
    )  # fmt: skip


def stretch_over(result: Result) -> None:
    """A unit is gone, and the one before says that it read its slice."""
    number = unit_without_rejected(result)
    stop = result.record(number)["slices"][-1][2]
    remove_unit(result, number)
    (before,) = (unit for unit in result.manifest["units"] if unit["unit"] == number - 1)
    before["slices"][-1][2] = stop
    result.record(number - 1)["slices"][-1][2] = stop


def last_row_groups(result: Result) -> None:
    """Gone, with the units that read them."""
    while True:
        unit = next(u for u in reversed(result.manifest["units"]) if u["slices"][0][0] == 2)
        remove_unit(result, unit["unit"])
        if unit["slices"][0][1]:
            return


def swap_rows(result: Result) -> None:
    shard = result.manifest["shards"][0]["file"]
    table = table_of(result, shard)
    put_table(result, shard, table.take([1, 0, *range(2, table.num_rows)]).combine_chunks())


def exchange_positions(result: Result) -> None:
    """Two documents of the same length say that each is the other."""
    shard = result.manifest["shards"][0]["file"]
    table = table_of(result, shard)
    rows = table["segments"].to_pylist()
    ends = table["cu_seqlens"].to_pylist()
    seen: dict[int, tuple[int, int]] = {}
    for row, segments in enumerate(rows):
        for k in range(len(segments)):
            length = ends[row][k + 1] - ends[row][k]
            if length not in seen:
                seen[length] = (row, k)
                continue
            a, b = seen[length]
            segments[k], rows[a][b] = rows[a][b], segments[k]
            kind = table.schema.field("segments")
            column = pa.array(rows, kind.type)
            put_table(
                result, shard, table.set_column(table.column_names.index("segments"), kind, column)
            )
            return
    raise AssertionError("no two documents are as long")


def change_column(name: str, change: Callable[[Any], Any]) -> Change:
    """`change` gives a column's values, [rows, max_length], from those of input_ids or its own."""

    def apply(result: Result) -> None:
        shard = result.manifest["shards"][0]["file"]
        table = table_of(result, shard)
        at, kind = table.column_names.index(name), table.schema.field(name)
        values = np.array(table[name].to_pylist(), kind.type.value_type.to_pandas_dtype())
        change(values)
        flat = pa.array(values.ravel(), kind.type.value_type)
        column = pa.FixedSizeListArray.from_arrays(flat, type=kind.type)
        put_table(result, shard, table.set_column(at, kind, column))

    return apply


def untrain(result: Result) -> None:
    def change(labels: Any) -> None:
        labels.ravel()[np.flatnonzero(labels.ravel() >= 0)[0]] = -100

    change_column("labels", change)(result)
    result.add("trained_tokens", -1)
    result.manifest["shards"][0]["trained_tokens"] -= 1


def train_more(result: Result) -> None:
    """A token of a question gets a label."""
    shard = result.manifest["shards"][0]["file"]
    ids = np.array(table_of(result, shard)["input_ids"].to_pylist())

    def change(labels: Any) -> None:
        assert labels[0, 1] == -100
        labels[0, 1] = ids[0, 2]

    change_column("labels", change)(result)
    result.add("trained_tokens", 1)
    result.manifest["shards"][0]["trained_tokens"] += 1


def edit_side_file(name: str, change: Callable[[Any], Any]) -> Change:
    def apply(result: Result) -> None:
        content = json.loads(result.read(name))
        change(content)
        result.write(name, json.dumps(content).encode())

    return apply


def add_side_file(result: Result) -> None:
    result.write("notes.txt", b"mine")
    result.manifest["side_files"]["notes.txt"] = ""


def replace_in(name: str, old: bytes, new: bytes) -> Change:
    def apply(result: Result) -> None:
        data = result.read(name)
        assert old in data
        result.write(name, data.replace(old, new, 1))

    return apply


def in_record(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda result: change(result.records[0])


def in_counts(name: str) -> Change:
    """A figure of a unit, of which another unit has one less: the sum stays."""

    def apply(result: Result) -> None:
        for record, more in zip(result.records[:2], (1, -1), strict=True):
            record["counts"][name] = record["counts"].get(name, 0) + more

    return apply


def swap_inputs(result: Result) -> None:
    """Each says that it is the other, with digests that are right."""
    inputs = result.manifest["inputs"]
    for name in ("path", "size", "sha256"):
        inputs[0][name], inputs[1][name] = inputs[1][name], inputs[0][name]


def move_between_inputs(name: str) -> Change:
    def apply(result: Result) -> None:
        units = [record["unit"] for record in result.records if record["slices"][0][0] == 0]
        result.add_to_input(name, 1, 0, units[0])
        record = next(
            one for one in result.records if any(c[0] == 1 for c in one["counts"]["files"])
        )
        result.add_to_input(name, -1, 1, record["unit"])

    return apply


def add_cost(when: str) -> Change:
    def apply(result: Result) -> None:
        result.manifest["attention_cost"][when]["sum"] += 1
        result.records[0]["counts"][f"attention_{when}"][1] += 1

    return apply


def swap_shards(result: Result) -> None:
    shards = result.manifest["shards"]
    shards[0], shards[1] = shards[1], shards[0]


def unmark(result: Result) -> None:
    del result.manifest["incomplete"]
    (result.path / result.name).unlink()
    result.name = "manifest.json"


def mark(result: Result) -> None:
    result.manifest["incomplete"] = "it lacks something"
    (result.path / result.name).unlink()
    result.name = "manifest.incomplete.json"


def excuse(result: Result) -> None:
    """Nothing was lost, says the manifest."""
    for name in ("dropped_documents", "dropped_tokens", "dropped_trained_tokens"):
        lost = result.manifest[name]
        result.add(name, -lost)
    unmark(result)


def other_eos(result: Result) -> None:
    """In the tokenizer's configuration alone."""
    replace_in("tokenizer_config.json", b'"</s>"', b'"<s>"')(result)


OPTIONS: dict[str, tuple[str, object]] = {  # option -> (result, another value)
    "max_length": ("mixed", 64),
    "strategy": ("mixed", "worst-fit"),
    "seed": ("mixed", 1),
    "shuffle": ("mixed", False),
    "overlong": ("mixed", "drop"),
    "truncate_side": ("mixed", "left"),
    "max_loss": ("mixed", 0.0),
    "columns": ("mixed", ["input_ids", "cu_seqlens", "segments"]),
    "shape": ("mixed", "tokens"),
    "fields": ("mixed", [["text", "txt"]]),
    "input_format": ("mixed", "text"),
    "sample_by": ("mixed", "document"),
    "prompt_template": ("mixed", "chat"),
    "train_on": ("chat", "all"),
    "keep_untrained": ("chat", True),
    "add_bos": ("mixed", True),
    "add_eos": ("mixed", False),
    "separator": ("mixed", "\n"),
    "turn_end": ("chat", ["<s>"]),
    "eos_token": ("mixed", "<s>"),
    "on_error": ("mixed", "fail"),
    "max_errors": ("mixed", 1),
    "max_line_bytes": ("mixed", 64),
    "window_tokens": ("mixed", 64),
    "max_segments_per_row": ("mixed", 1),
    "segment_multiple": ("chat", 8),
    "label_shift": ("chat", "none"),
    "balance": ("chat", "none"),
}
FIGURES = dict.fromkeys(TOTALS, "mixed") | {
    "trained_turns": "chat", "turns_without_end": "chat", "untrained_documents": "chat",
    "untrained_tokens": "chat", "truncated_trained_tokens": "chat", "unshown_tools": "chat",
    "double_bos_documents": "chat", "dropped_documents": "lossy", "dropped_tokens": "lossy",
    "dropped_trained_tokens": "chat",
}  # fmt: skip

CHANGES: dict[str, tuple[str, Change]] = {
    **{f"the option {name}": (result, set_config(name, value))
       for name, (result, value) in OPTIONS.items()},
    **{f"the total {name}": (result, add(name)) for name, result in FIGURES.items()},
    "the strategy harmonic": ("mixed", set_config("strategy", "harmonic")),
    "the last turn only": ("chat", set_config("train_on", "last-assistant")),
    "rows": ("mixed", lambda r: r.manifest.update(rows=r.manifest["rows"] + 1)),
    "padding_tokens": ("mixed", lambda r: r.manifest.update(padding_tokens=1)),
    "utilization": ("mixed", lambda r: r.manifest.update(utilization=1.0)),
    "lower_bound_rows": ("mixed", lambda r: r.manifest.update(lower_bound_rows=1)),
    "a histogram": ("mixed", lambda r: r.manifest["histograms"]["row_fill"].reverse()),
    "the cost before balancing": ("chat", add_cost("before")),
    "the cost after balancing": ("chat", add_cost("after")),
    "empty documents of an input": ("mixed", lambda r: r.add_to_input("empty_documents", 1)),
    "rejected records of an input": ("mixed", lambda r: r.add_to_input("rejected_records", 1)),
    "empty documents moved": ("mixed", move_between_inputs("empty_documents")),
    "documents moved": ("mixed", move_between_inputs("documents")),
    "truncated tokens of two units": ("mixed", in_counts("truncated_tokens")),
    "dropped documents of two units": ("mixed", in_counts("dropped_documents")),
    "trained turns of two units": ("chat", in_counts("trained_turns")),
    "trained tokens of two units": ("mixed", in_counts("trained_tokens")),
    "vocab_size": ("mixed", set_tokenizer("vocab_size", 12345)),
    "eos_token_id": ("mixed", set_tokenizer("eos_token_id", 2)),
    "bos_token_id": ("mixed", set_tokenizer("bos_token_id", None)),
    "pad_token_id": ("mixed", set_tokenizer("pad_token_id", 7)),
    "the tokenizer's sha256": ("mixed", set_tokenizer("sha256", "0" * 64)),
    "the tokenizer's configuration": ("mixed", other_eos),
    "the tokenizer's merges": (
        "mixed", edit_side_file("tokenizer.json", lambda t: t["model"]["merges"].pop(0)),
    ),
    "the chat template": ("chat", replace_in("chat_template.jinja", b"<{{", b"[{{")),
    "marked incomplete": ("mixed", mark),
    "not marked incomplete": ("lossy", unmark),
    "incomplete for another reason": ("lossy", lambda r: r.manifest.update(incomplete="lost")),
    "losses that are not told": ("lossy", excuse),
    "a unit is gone": ("mixed", lambda r: remove_unit(r, unit_without_rejected(r))),
    "a unit with rejected records is gone": ("mixed", lambda r: remove_unit(
        r, next(one["unit"] for one in r.records if one.get("rejected")))),
    "the first unit is gone": ("mixed", lambda r: remove_unit(r, 0)),
    "the last unit is gone": ("mixed", lambda r: remove_unit(r, r.records[-1]["unit"])),
    "the last row groups are gone": ("mixed", last_row_groups),
    "a unit is gone, and its slice is another's": ("mixed", stretch_over),
    "a unit is there twice": ("mixed", lambda r: double_unit(r, unit_without_rejected(r))),
    "the last unit is there twice": ("chat", lambda r: double_unit(r, r.records[-1]["unit"])),
    "a slice that overlaps": ("mixed", lambda r: r.manifest["units"][0]["slices"][0].__setitem__(
        2, r.manifest["units"][0]["slices"][0][2] + 5)),
    "a slice that ends early": ("chat", lambda r: r.manifest["units"][-1]["slices"][0].__setitem__(
        2, r.manifest["units"][-1]["slices"][0][2] - 5)),
    "an input without slices": ("mixed", lambda r: r.manifest["inputs"].append(
        r.manifest["inputs"][0] | dict.fromkeys(
            ("documents", "tokens", "empty_documents", "rejected_records"), 0))),
    "an input said to be removed": (
        "mixed", lambda r: r.manifest["inputs"][0].update(removed=True)),
    "inputs exchanged": ("mixed", swap_inputs),
    "the size of an input": ("mixed", lambda r: r.manifest["inputs"][2].update(size=5)),
    "the sha256 of an input": ("mixed", lambda r: r.manifest["inputs"][0].update(sha256="0" * 64)),
    "the path of an input": ("mixed", lambda r: r.manifest["inputs"][0].update(path="e.jsonl")),
    "shards in another order": ("mixed", swap_shards),
    "rows in another order": ("mixed", swap_rows),
    "documents exchanged": ("mixed", exchange_positions),
    "a token": ("mixed", change_column("input_ids", lambda ids: ids.__setitem__((0, 0), 9))),
    "a token without its label": ("mixed", untrain),
    "an answer without a label": ("chat", untrain),
    "a question with a label": ("chat", train_more),
    "state.json lists one shard": (
        "mixed", edit_side_file("state.json", lambda s: s.update(_data_files=s["_data_files"][:1])),
    ),
    "state.json lists a shard twice": (
        "mixed", edit_side_file("state.json", lambda s: s.update(_data_files=s["_data_files"] * 2)),
    ),
    "the fingerprint of state.json": (
        "mixed", edit_side_file("state.json", lambda s: s.update(_fingerprint="0" * 16)),
    ),
    "a split in state.json": (
        "mixed", edit_side_file("state.json", lambda s: s.update(_split="test")),
    ),
    "features in dataset_info.json": (
        "mixed", edit_side_file("dataset_info.json", lambda s: s.update(features={"a": 1})),
    ),
    "dataset_info.json is not listed": (
        "mixed", lambda r: (r.manifest["side_files"].pop("dataset_info.json"),
                            (r.path / "dataset_info.json").unlink()),
    ),
    "a side file of nobody": (
        "mixed", add_side_file,
    ),
    "rejected.jsonl has another reason": ("mixed", replace_in("rejected.jsonl", b"line", b"LINE")),
    "rejected.jsonl has another position": (
        "mixed", replace_in("rejected.jsonl", b'"position":', b'"position":1')),
    "rejected.jsonl has another file": (
        "mixed", replace_in("rejected.jsonl", b'"a.jsonl"', b'"b.jsonl"')),
    "rejected.jsonl is cut": (
        "mixed", lambda r: r.write("rejected.jsonl", r.read("rejected.jsonl")[:-1] + b" ")),
    "units.jsonl lacks a unit": ("mixed", lambda r: r.records.pop()),
    "units.jsonl has a unit twice": ("mixed", lambda r: r.records.append(r.records[0])),
    "units.jsonl in another order": ("mixed", lambda r: r.records.reverse()),
    "units.jsonl has other slices": (
        "mixed", in_record(lambda one: one["slices"][0].__setitem__(1, 3))),
    "units.jsonl has another tokenizer": (
        "mixed", in_record(lambda one: one.update(tokenizer=None))),
    "units.jsonl has other rejected bytes": (
        "mixed", in_record(lambda one: one.update(rejected=one.get("rejected", 0) + 1))),
    "units.jsonl has a reused unit": ("mixed", in_record(lambda one: one.update(reused=True))),
    "units.jsonl has other pieces": (
        "mixed", in_record(lambda one: one["counts"].pop("piece_length"))),
    "units.jsonl is no JSON": ("mixed", lambda r: r.write("units.jsonl", b"{\n")),
}  # fmt: skip


# By what they are found, so that it is not by a slip in forging them.
FOUND_BY = {
    **dict.fromkeys(
        ("the option strategy", "the option seed", "the option shuffle", "the strategy harmonic",
         "the option window_tokens", "the option balance", "rows in another order"),
        "expected by the options of the manifest"),
    **{f"the total {name}": "when packed again" for name in TOTALS
       if name.startswith(("trunc", "dropped", "untrained", "turns", "double", "trained_turns"))},
    "the total unshown_tools": "when packed again",
    "the cost before balancing": "attention_before differs from what packing again gives",
    "the option max_segments_per_row": "cu_seqlens has more than 1 segments",
    "losses that are not told": "dropped_tokens is 0, 1090 when packed again",
    "a unit is gone, and its slice is another's": "is packed as none of its tokens, 0-6 expected",
    "a question with a label": ", -100 expected when encoded again",
    "rejected.jsonl has another reason": "are not those rejected when packed again",
    "the last row groups are gone": "has 5 row groups, the units' slices end after 4",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_consistent_change_is_found(name: str, copied: Callable[[str], Result]) -> None:
    which, change = CHANGES[name]
    result = copied(which)
    change(result)
    result.save()
    found = packer(*ALL, "-q")
    assert found.exit_code == 1, found.stdout
    assert found.stdout.startswith("out: "), (found.stdout, found.stderr)
    assert FOUND_BY.get(name, "") in found.stdout
    assert found.stderr.splitlines()[1].startswith("tip: ")


# What cannot be told from the inputs, and does no harm: the rows and all figures are as they were.
HARMLESS: dict[str, tuple[str, Change]] = {
    "unit_bytes: how inputs are cut into units, which is there to be seen": (
        "mixed", set_config("unit_bytes", 12345)),
    "shard_bytes: how a unit's rows are cut into shards, the same rows in the same order": (
        "mixed", set_config("shard_bytes", 12345678)),
    "force_split: permits what was not done": ("mixed", set_config("force_split", True)),
    "chat_template: where it came from; the template itself is in the result": (
        "chat", set_config("chat_template", "another.jinja")),
    "the tokenizer's source: where it came from; the tokenizer is in the result": (
        "mixed", set_tokenizer("source", "elsewhere")),
    "packer_version: which packer; rows of others are not compared with its plan": (
        "mixed", lambda r: r.manifest.update(packer_version="0.0.1")),
    "the weights of slices: for progress only": (
        "mixed", in_record(lambda one: one["slices"][0].__setitem__(3, 1))),
    "when inputs were changed: no digest covers it; --update --checksum does without": (
        "mixed", lambda r: (r.path / "input_times.json").write_text("{}")),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_change_that_harms_nobody(name: str, copied: Callable[[str], Result]) -> None:
    which, change = HARMLESS[name]
    result = copied(which)
    change(result)
    result.save()
    found = packer(*ALL, "-q")
    assert found.exit_code == 0, found.stdout


def test_every_option_and_total_is_among_the_changes() -> None:
    options = {field.name for field in dataclasses.fields(PackConfig)}
    assert options == {
        *OPTIONS, "unit_bytes", "shard_bytes", "force_split", "chat_template", "allow_open_turns",
        "special_tokens_in_text",  # no text spells one out
    }  # fmt: skip
    assert {*FIGURES} == {*TOTALS}
    assert len(CHANGES) >= 55


@pytest.mark.parametrize("name", RESULTS)
def test_unchanged_they_are_sound(name: str, copied: Callable[[str], Result]) -> None:
    result = copied(name)
    for once_more in (False, True):
        if once_more:
            result.save()
        for sample in ("all", 5):
            found = packer("verify", "out", "--against-inputs", "--sample", sample)
            assert found.exit_code == 0, found.stdout
            assert ": sound; " in found.stdout
            marked = "packer: out is marked incomplete: " in found.stderr
            assert marked == (name == "lossy")


# --- documents that rows lack


def half(texts: list[str]) -> list[str]:
    return [text if i % 2 else "" for i, text in enumerate(texts)]


def blank_half(data: bytes) -> bytes:
    """Every second line is spaces, so that the others are where they were."""
    lines = data.splitlines(keepends=True)
    return b"".join(
        line if i % 2 else b" " * (len(line) - 1) + b"\n" for i, line in enumerate(lines)
    )


MANY = [f"{i} " + "x" * (i % 11) for i in range(400)]
LACKING: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {  # half, and all
    "a.jsonl": (
        lambda path: path.write_bytes(blank_half(jsonl(*MANY))),
        lambda path: path.write_bytes(jsonl(*MANY)),
    ),
    "a.jsonl.gz": (
        lambda path: path.write_bytes(gzip.compress(blank_half(jsonl(*MANY)))),
        lambda path: path.write_bytes(gzip.compress(jsonl(*MANY))),
    ),
    "a.parquet": (
        lambda path: pq.write_table(pa.table({"text": half(MANY)}), path, row_group_size=30),
        lambda path: pq.write_table(pa.table({"text": MANY}), path, row_group_size=30),
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_sample_notices_documents_that_rows_lack(folder: Path, name: str) -> None:
    write_half, write_all = LACKING[name]
    write_half(folder / name)
    options = ("-t", "bytes", "-l", 64, "--unit-bytes", 10000, "-q", "-o", "out")
    assert packer("pack", name, *options).exit_code == 0
    assert packer("verify", "out", "--against-inputs", "--sample", 40).exit_code == 0
    write_all(folder / name)
    data = (folder / name).read_bytes()
    result = Result("out")
    result.manifest["inputs"][0].update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    result.save()
    for sample in (40, "all"):
        found = packer("verify", "out", "--against-inputs", "--sample", sample, "-q")
        assert found.exit_code == 1
        assert "is packed as none of its tokens, 0-" in found.stdout


def test_a_sample_notices_an_input_all_of_whose_documents_are_gone(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*MANY))
    (folder / "b.jsonl").write_bytes(blank_half(blank_half(jsonl(*MANY))))
    (folder / "b.jsonl").write_bytes(b" " * 50 + b"\n")
    options = ("-t", "bytes", "-l", 64, "-q", "-o", "out")
    assert packer("pack", "a.jsonl", "b.jsonl", *options).exit_code == 0
    (folder / "b.jsonl").write_bytes(jsonl("what is gone" * 2))
    data = (folder / "b.jsonl").read_bytes()
    result = Result("out")
    result.manifest["inputs"][1].update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    result.save()
    found = packer("verify", "out", "--against-inputs", "--sample", 5, "-q")
    assert found.stdout.startswith("out: b.jsonl: line 1 (byte 0): is packed as none of its tokens")


# --- sound results of every kind


def sound(*options: object) -> None:
    """The result `out` is, by every sample."""
    for sample in ("all", 9):
        result = packer("verify", "out", "--against-inputs", "--sample", sample, *options)
        assert result.exit_code == 0, result.stdout
        assert "sound" in result.stdout
        if sample == "all":
            assert " packed again: the same rows" in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--strategy", "wrap", "--force-split"],
        ["--strategy", "wrap", "--force-split", "--keep-untrained"],
        ["--overlong", "truncate", "--truncate-side", "left", "--separator", "\n"],
        ["--overlong", "truncate", "--separator", "</s>", "--eos"],
        ["--overlong", "split", "--force-split", "--strategy", "next-fit"],
        ["--train-on", "all", "--overlong", "drop", "--eos"],
        ["--train-on", "last-assistant", "--strategy", "first-fit-shuffle", "--bos"],
        ["--overlong", "truncate-turns", "--columns", "input_ids,cu_seqlens,segments"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("tokenizer", ["tok", "bytes"])
def test_conversations(folder: Path, options: list[object], tokenizer: str) -> None:
    inputs = write_chat(folder)[0]
    if tokenizer == "bytes" and ("--bos" in options or "</s>" in options):
        options = options[:-3]
    result = packer(
        "pack", inputs, "-t", tokenizer, "--chat-template", "t.jinja", "-l", 128, *options,
        "--unit-bytes", 5000, "-q", "-o", "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    sound()


@pytest.mark.parametrize("tokenizer", ["sentencepiece", "unigram"])
def test_prompts_with_other_tokenizers(folder: Path, tokenizer: str) -> None:
    records = [{"prompt": f"naïve {i}: ", "completion": " don't  panic " * i} for i in range(9)]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    tiny_tokenizers.save(
        folder / "tok", getattr(tiny_tokenizers, tokenizer)(),
        tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"},
    )  # fmt: skip
    result = packer("pack", "a.jsonl", "-t", "tok", "-l", 64, "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
    sound()


def test_an_updated_result_with_removed_inputs(folder: Path) -> None:
    options = write_mixed(folder)
    command = ("pack", *options, "-q", "-o", "out")
    assert packer(*command).exit_code == 0
    (folder / "e.jsonl").write_bytes(jsonl(*texts(200, 230)))
    (folder / "a.jsonl").write_bytes(jsonl(*texts(300, 320)))
    again = ("-q", "-o", "out", "--update", "--prune")
    result = packer("pack", "e.jsonl", "a.jsonl", *options[2:], *again)
    assert result.exit_code == 0, result.stderr
    manifest = Result("out").manifest
    assert [one["path"] for one in manifest["inputs"] if one.get("removed")] == []
    sound()
    result = packer("pack", *options[1:], *again)
    assert result.exit_code == 0, result.stderr
    assert any(one.get("removed") for one in Result("out").manifest["inputs"])
    sound()


def test_the_result_of_ranks(folder: Path) -> None:
    command = ("pack", *write_mixed(folder), "-q", "-o", "out", "--world-size", 2)
    for rank in (0, 1):
        result = packer(*command, "--rank", rank)
        assert result.exit_code == 0, result.stderr
    sound()


def test_inputs_that_cannot_be_read_again_beside_others(folder: Path) -> None:
    options = write_mixed(folder)
    assert packer("pack", *options, "-q", "-o", "out").exit_code == 0
    (folder / "b.jsonl").unlink()
    result = packer(*ALL, "-q")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "out: b.jsonl: an input: cannot read: No such file or directory"
    ]
    tip = result.stderr.splitlines()[1]
    assert tip == (
        "tip: put them back as they were, or run packer pack --update on what there is now; its "
        "--prune drops what is gone"
    )


def test_each_kind_of_problem_has_its_tip(copied: Callable[[str], Result]) -> None:
    result = copied("mixed")
    (result.path / "notes.txt").write_text("mine")
    found = packer("verify", "out", "-q")
    assert found.stderr.splitlines()[1] == (
        "tip: move them elsewhere: trainers may take them for a part of the result"
    )
    (result.path / "state.json").unlink()
    found = packer("verify", "out", "-q", "--json")
    assert json.loads(found.stderr)["tip"].startswith("a damaged result: copy the directory")
    assert "; foreign files: move them elsewhere" in found.stderr
    tips = {one["file"]: one["tip"] for one in json.loads(found.stdout)["problems"]}
    assert tips["state.json"].startswith("copy the directory again")
    assert tips["notes.txt"].startswith("move them elsewhere")


@pytest.mark.parametrize("columns", ["input_ids,cu_seqlens", "input_ids,labels,cu_seqlens"])
def test_rows_that_do_not_say_where_they_come_from(folder: Path, columns: str) -> None:
    options = (*write_mixed(folder), "--columns", columns, "-q", "-o", "out")
    assert packer("pack", *options).exit_code == 0
    result = packer(*ALL)
    assert result.exit_code == 0, result.stdout
    assert "units packed again: the same rows" in result.stdout
    for change, found in (
        (set_config("seed", 1), "expected by the options of the manifest"),
        (set_config("seed", 0), ""),
        (swap_rows, "expected by the options of the manifest"),
        (swap_rows, ""),
        (change_column("input_ids", lambda ids: ids.__setitem__((0, 0), 9)),
         "input_ids has 9 at place 0 of row 0 of"),
    ):  # fmt: skip
        forged = Result("out")
        change(forged)
        forged.save()
        result = packer(*ALL, "-q")
        assert (result.exit_code, found in result.stdout) == (1 if found else 0, True), found


# --- labels


def test_labels_are_those_of_the_reference_and_not_of_the_code_that_made_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever tells trained tokens may be wrong while packing: verify does not ask it."""
    right = tokenization.mark_trained

    def wrong(*arguments: Any) -> UInt8:
        trained = right(*arguments)
        if trained.any():
            trained[np.flatnonzero(trained)[-1]] = 0
        return trained

    monkeypatch.setattr(tokenization, "mark_trained", wrong)
    assert packer("pack", *write_chat(folder), "-q", "-o", "out").exit_code == 0
    for sample in ("all", 50):
        found = packer("verify", "out", "--against-inputs", "--sample", sample, "-q")
        assert found.exit_code == 1, found.stdout
        assert "labels has -100 at place " in found.stdout


def test_results_of_an_older_packer_are_read(folder: Path) -> None:
    """Whose manifest and records say less: packed, shown, verified and added to like others."""
    assert packer("pack", *write_mixed(folder), "-o", "out", "-q").exit_code == 0
    result = Result("out")
    for record in result.records:
        record["counts"].pop("special_tokens_in_text", None)
        for name in ("bos_token", "eos_token", "prefix", "suffix"):
            del record["tokenizer"][name]
    result.save()
    assert packer("verify", "out").exit_code == 0  # as after --add, by records of both
    result = Result("out")
    del result.manifest["special_tokens_in_text"]
    for name in ("turn_end", "allow_open_turns", "special_tokens_in_text"):
        del result.manifest["config"][name]
    for name in ("bos_token", "eos_token", "prefix", "suffix"):
        del result.manifest["tokenizer"][name]
    result.save()
    for command in (("stats",), ("show",), ("verify",)):
        done = packer(*command, "out")
        assert done.exit_code == 0, (command, done.stdout, done.stderr)
    done = packer(*ALL)
    assert done.exit_code == 0, (done.stdout, done.stderr)


TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TURNS
ENDS = ("--turn-end", "<|user|>", "--turn-end", "<|tool|>")
AS_TEXT = ("--special-tokens-in-text", "text")
CONVERSATIONS: dict[str, tuple[str, ...]] = {
    "ends of turns": ENDS,
    "ends of turns, special tokens as text": (*ENDS, *AS_TEXT),
    "open turns, the last answer": ("--allow-open-turns", "--train-on", "last-assistant"),
    "shortened": (*ENDS, "--overlong", "truncate-turns", "-l", "150"),
    "shortened, special tokens as text": (
        *ENDS,
        *AS_TEXT,
        "--overlong",
        "truncate-turns",
        "-l",
        "150",
    ),
    "prompts through a template": (*ENDS, *AS_TEXT, "--prompt-template", "chat"),
}


def spelling_out(number: int) -> dict[str, Any]:
    """With special tokens in all that people say, and tools in every second."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "<|user|>"}}}
    messages = [
        {"role": "user", "content": "one " * (number * 7 % 40)},
        {"role": "assistant", "content": f"a{number} <|im_end|>"},
        {"role": "user", "content": f"two {number}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"<|im_end|>r{number}"},
        {"role": "assistant", "content": f"done {number}"},
    ]
    return {"messages": messages} | ({"tools": [call]} if number % 2 else {})


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_of_every_kind_are_sound_and_a_lost_label_is_found(
    folder: Path, name: str
) -> None:
    named = [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": WITH_TOOLS}]
    document = tiny_tokenizers.byte_level()
    for number, content in enumerate(("<|user|>", "<|assistant|>", "<|tool|>", "<|im_end|>"), 400):
        tiny_tokenizers.with_added_token(document, content, number)
    config = {"eos_token": tiny_tokenizers.EOS, "chat_template": named}
    tokenizer = tiny_tokenizers.save(folder / "tok", document, tokenizer_config=config)
    records = [spelling_out(number) for number in range(20)]
    if "prompts" in name:
        records = [{"prompt": f"q{i}<|im_end|>", "completion": f"a{i}"} for i in range(20)]
    for file, some in (("a.jsonl", records[:10]), ("b.jsonl", records)):  # the second by --update
        Path("data").mkdir(exist_ok=True)
        (Path("data") / file).write_text("".join(json.dumps(one) + "\n" for one in some))
        options = ["-l", 400] if "-l" not in CONVERSATIONS[name] else []
        packed = packer(
            "pack", "data", "-t", tokenizer, "-o", "out", "-q", "--update", *options,
            *CONVERSATIONS[name],
        )  # fmt: skip
        assert packed.exit_code == 0, packed.stderr
    for sample in ("all", 20):
        found = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert found.exit_code == 0, found.stdout + found.stderr
    result = Result("out")
    untrain(result)
    result.save()
    for sample in ("all", 50):
        found = packer("verify", "out", "--against-inputs", "--sample", sample, "-q")
        assert found.exit_code == 1, found.stdout
        assert "labels has -100 at place " in found.stdout
