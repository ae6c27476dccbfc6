"""Rows are a sample of the data: work units have about their share of every input."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import (
    check_directory,
    contents,
    jsonl,
    packer,
    random_texts,
    recover_documents,
    recover_texts,
    succeeds,
)

from packer_cli import open_packed
from packer_cli.inputs.text import TextReader
from packer_cli.mixing.units import plan_units
from packer_cli.options.documents import MIB
from packer_cli.options.options import PackConfig
from packer_cli.records import InputFile, WorkUnit
from packer_cli.result.columns import segments_of
from packer_cli.result.rules import segments_in

CORPORA = {"a": 2400, "b": 2800, "c": 230}  # documents
ROW = 512
Float = npt.NDArray[np.float64]


def write_jsonl(name: str, texts: Sequence[str]) -> str:
    Path(f"{name}.jsonl").write_bytes(jsonl(*texts))
    return f"{name}.jsonl"


def write_parquet(name: str, texts: Sequence[str]) -> str:
    pq.write_table(pa.table({"text": texts}), f"{name}.parquet", row_group_size=20)
    return f"{name}.parquet"


def write_files(name: str, texts: Sequence[str]) -> str:
    """A folder of small files, none of which is cut."""
    Path(name).mkdir()
    for first in range(0, len(texts), 20):
        Path(name, f"{first:05d}.jsonl").write_bytes(jsonl(*texts[first : first + 20]))
    return name


def corpora(write: Callable[[str, Sequence[str]], str], longest: int = 200) -> list[str]:
    """The inputs. In one corpus, the documents at the end are of another kind."""
    every = {name: random_texts(count, longest, seed=count, begin=f"{name} ")
             for name, count in CORPORA.items()}  # fmt: skip
    every["a"] = [text.upper() if i > 1200 else text for i, text in enumerate(every["a"])]
    return [write(name, texts) for name, texts in every.items()]


def tokens_by_corpus() -> list[Float]:
    """For each unit: tokens[rows, corpora]."""
    packed, units = open_packed("out"), dict[int, list[Float]]()
    of = np.array([[*CORPORA].index(Path(one.path).relative_to(Path.cwd()).parts[0][0])
                   for one in packed.facts.inputs])  # fmt: skip
    for shard in packed.facts.shards:
        for batch in packed.stored(shard):
            file, _, _, length = segments_in(batch)[:4]
            row = np.repeat(np.arange(len(batch)), np.diff(segments_of(batch)[2]))
            sums = np.bincount(row * 3 + of[file], length, len(batch) * 3)
            units.setdefault(shard.unit, []).append(sums.reshape(len(batch), 3))
    return [np.concatenate(some) for some in units.values()]


def shares(tokens: Float) -> Float:
    result: Float = tokens.sum(axis=0) / tokens.sum()
    return result


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_files])
def test_rows_of_three_corpora_are_a_sample(
    folder: Path, write: Callable[[str, Sequence[str]], str]
) -> None:
    inputs = corpora(write)
    succeeds("pack", *inputs, "-t", "bytes", "-l", ROW, "--unit-bytes", "64k", "-q", "-o", "out")
    check_directory("out")
    units = tokens_by_corpus()
    rows = np.concatenate(units)
    assert len(units) > 5
    whole = shares(rows)
    for some in [*units, rows[: len(rows) // 10], rows[-len(rows) // 10 :]]:
        assert np.abs(shares(some) - whole).max() < 0.1
        assert shares(some)[2] > 0
    # a row has five documents: hardly any row is of one corpus, as few as at random
    alone = (rows.max(axis=1) == rows.sum(axis=1)).mean()
    assert alone < 0.15
    packed = open_packed("out")
    first = next(packed.stored(packed.facts.shards[0]))
    ids = first.column("input_ids").flatten().to_numpy()[: ROW * len(rows) // 10]
    at_the_end = (ids == ord("D")).sum() / np.isin(ids, [*b"Dd"]).sum()
    assert at_the_end == pytest.approx(whole[0] / 2, abs=0.1)


def test_windows_of_one_unit_are_samples(folder: Path) -> None:
    """With units and windows of the usual sizes."""
    inputs = corpora(write_jsonl, longest=3000)
    succeeds("pack", *inputs, "-t", "bytes", "-l", "8k", "-q", "-o", "out")
    (rows,) = tokens_by_corpus()
    assert rows.sum() > 1 << 22  # more than a window
    for tenth in np.array_split(rows, 10):
        assert np.abs(shares(tenth) - shares(rows)).max() < 0.12


def test_records_of_units_of_many_slices_keep_their_names(folder: Path) -> None:
    expected, bad = dict[tuple[str, int], str](), set[tuple[str, int]]()
    for name in "ab":
        lines, at = list[bytes](), 0
        for number, text in enumerate(random_texts(600, seed=ord(name), begin=f"{name} ")):
            if number % 50 == 7:
                bad.add((f"{name}.jsonl", at))
                lines.append(b"{broken\n")
            else:
                expected[f"{name}.jsonl", at] = text
                lines.append(jsonl(text))
            at += len(lines[-1])
        Path(f"{name}.jsonl").write_bytes(b"".join(lines))
    command = ["-t", "bytes", "-l", 64, "--unit-bytes", "32k", "--on-error", "skip", "-o", "out"]
    succeeds("pack", "a.jsonl", "b.jsonl", *command)
    units = check_directory("out")["units"]
    assert min(len(unit["slices"]) for unit in units) >= 4
    rejected = [json.loads(line) for line in Path("out/rejected.jsonl").read_text().splitlines()]
    assert sorted((Path(one["file"]).name, one["position"]) for one in rejected) == sorted(bad)
    inputs = open_packed("out").facts.inputs
    found = {
        (Path(inputs[file].path).name, position): bytes(tokens[:-1].tolist()).decode()
        for (file, position), tokens in recover_documents("out").items()
    }
    assert found == expected
    succeeds("verify", "out", "--against-inputs", "--sample", "all")
    shown = packer("show", "out", "0").stdout.replace("⟦", "")
    segments = re.findall(r"(\w)\.jsonl byte (\d+), .*\n(.*)<eos>", shown)
    assert segments
    for name, byte, text in segments:
        assert expected[f"{name}.jsonl", int(byte)].endswith(text)


def test_what_is_added_is_dealt_among_its_own(folder: Path) -> None:
    options = ["-t", "bytes", "-l", 64, "--unit-bytes", "8k", "-o", "out"]
    for name in "abcd":
        write_jsonl(name, random_texts(300, seed=ord(name), begin=f"{name} "))

    def slices() -> list[set[int]]:
        units = json.loads(Path("out/manifest.json").read_bytes())["units"]
        return [{part[0] for part in unit["slices"]} for unit in units]

    succeeds("pack", "a.jsonl", "b.jsonl", *options)
    before = {*contents("out")}
    succeeds("pack", "c.jsonl", "d.jsonl", "--add", *options)
    assert {name for name in before if "shard" in name} <= {*contents("out")}
    both = slices()
    assert both == sorted(both, key=min)
    assert both[0] == {0, 1}
    assert both[-1] == {2, 3}
    added = {name for name in contents("out") if "shard" in name} - before
    write_jsonl("a", random_texts(300, seed=9, begin="other "))
    succeeds("pack", "a.jsonl", "--add", *options)
    check_directory("out")
    assert added <= {*contents("out")}
    assert not {name for name in before if "shard" in name} & {*contents("out")}
    assert len(recover_texts("out")) == 1200


def test_what_keeps_the_order_of_inputs(folder: Path) -> None:
    inputs = corpora(write_jsonl)
    for command in (["pack", "-l", ROW, "--no-shuffle"], ["pack", "-l", ROW, "--strategy", "nf"],
                    ["pack", "-l", ROW, "--strategy", "wrap"], ["tokenize"]):  # fmt: skip
        succeeds(*command, *inputs, "-t", "bytes", "--unit-bytes", "64k", "-q", "-o", "out",
                      "--overwrite")  # fmt: skip
        units = json.loads(Path("out/manifest.json").read_bytes())["units"]
        slices = [tuple(part) for unit in units for part in unit["slices"]]
        assert len(units) > 5
        assert slices == sorted(slices, key=lambda part: part[:2])


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextReader, "weight", lambda _, file: file.size)


@pytest.mark.usefixtures("any_size")
def test_units_of_any_sizes_have_their_share_of_each_input() -> None:
    drawn = random.Random(0)
    for _ in range(150):
        count = int(2 ** drawn.uniform(0, 9))
        largest = 2 ** drawn.uniform(10, 33)
        files = [
            InputFile(number, f"{number}.{'jsonl' if drawn.random() < 0.8 else 'txt'}",
                      "", None, int(largest ** drawn.uniform(0.5, 1)), 0)
            for number in range(count)
        ]  # fmt: skip
        files = [InputFile(one.index, one.path, "jsonl" if one.path.endswith("l") else "text",
                           None, one.size, 0) for one in files]  # fmt: skip
        check_units(files, PackConfig(max_length=1024, seed=drawn.randrange(9)))


def check_units(files: list[InputFile], config: PackConfig) -> None:
    units = plan_units(files, config)
    assert units == plan_units(files, config)
    parts = sorted(part for unit in units for part in unit.slices)
    assert len({part.file for part in parts}) == len(files)
    for before, part in zip([None, *parts], parts, strict=False):
        if part.start:
            assert before is not None
            assert (before.file, before.stop) == (part.file, part.start)
        else:
            assert before is None or before.stop in (None, files[before.file].size)
    whole = sum(file.size for file in files)
    heaviest = max(part.weight for part in parts)
    target = max(whole / len(units), MIB)
    assert len(parts) <= len(files) + 49 * (whole // (16 * MIB) + 1)
    for unit in units[:-1]:
        assert unit.weight <= 1.3 * target + heaviest
    if len(files) <= 10 and len(units) > 1:
        check_shares(files, units)


def check_shares(files: list[InputFile], units: list[WorkUnit]) -> None:
    """Each unit has a file's share of all that is cut, to about a slice."""
    whole = sum(file.size for file in files if file.format == "jsonl")
    for unit in units:
        cut = [part for part in unit.slices if files[part.file].format == "jsonl"]
        for file in files:
            own = [part.weight for part in cut if part.file == file.index]
            due = file.size / whole * sum(part.weight for part in cut)
            assert abs(sum(own) - due) <= 2 * max(own, default=file.size)
