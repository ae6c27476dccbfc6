"""Changes to a result, each consistent: digests, sums and side files follow from it.

A change takes a `forging.Result`, which the caller saves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from forging import Result

Change = Callable[[Result], Any]


def set_config(name: str, value: object) -> Change:
    return lambda result: result.manifest["config"].update({name: value})


def set_tokenizer(name: str, value: object) -> Change:
    def change(result: Result) -> None:
        result.manifest["tokenizer"][name] = value
        for record in result.records:
            record["tokenizer"][name] = value

    return change


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
        values = np.array(table[name].to_pylist(), str(kind.type.value_type))
        change(values)
        flat = pa.array(values.ravel(), kind.type.value_type)
        column = pa.FixedSizeListArray.from_arrays(flat, type=kind.type)
        put_table(result, shard, table.set_column(at, kind, column))

    return apply


def swap_rewards(result: Result) -> None:
    """The values of the first two records of a row, which are not the same."""
    shard = result.manifest["shards"][0]["file"]
    table = table_of(result, shard)
    at, rows = table.column_names.index("reward"), table["reward"].to_pylist()
    own = next(row for row in rows if len(row) > 1 and row[0] != row[1])
    own[:2] = own[1::-1]
    column = pa.array(rows, table.schema.field(at).type)
    put_table(result, shard, table.set_column(at, table.schema.field(at), column))


def first_file(result: Result) -> int:
    """The input of the first segment."""
    table = table_of(result, result.manifest["shards"][0]["file"])
    file: int = table["segments"][0][0]["file"].as_py()
    return file


def untrain(result: Result) -> None:
    def change(labels: Any) -> None:
        labels.ravel()[np.flatnonzero(labels.ravel() >= 0)[0]] = -100

    change_column("labels", change)(result)
    result.add_to_input("trained_tokens", -1, first_file(result))
    result.manifest["shards"][0]["trained_tokens"] -= 1


def train_more(result: Result) -> None:
    """A token of a question gets a label."""
    shard = result.manifest["shards"][0]["file"]
    ids = np.array(table_of(result, shard)["input_ids"].to_pylist())

    def change(labels: Any) -> None:
        assert labels[0, 1] == -100
        labels[0, 1] = ids[0, 2]

    change_column("labels", change)(result)
    result.add_to_input("trained_tokens", 1, first_file(result))
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
    for name in ("dropped_documents", "dropped_tokens"):
        result.add_to_input(name, -result.manifest[name])
    result.add("dropped_trained_tokens", -result.manifest["dropped_trained_tokens"])
    unmark(result)


def other_eos(result: Result) -> None:
    """In the tokenizer's configuration alone."""
    replace_in("tokenizer_config.json", b'"</s>"', b'"<s>"')(result)
