"""`packer stats`: the figures, the thresholds, and finding what does not agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spoiling import edit
from support import assert_error, jsonl, pack, packer, shard_of
from varied_results import write_carried

from packer_cli.result.layout import short_name

pytestmark = pytest.mark.usefixtures("folder")

# Lengths with EOS: 16, 8, 4, 4, 10, 10 -> rows of 16: 16 | 10 + 4 | 10 + 4 | 8
TEXTS = ["a" * 15, "b" * 7, "c" * 3, "d" * 3, "e" * 9, "f" * 9]
FIGURES = {
    "max_length": 16,
    "strategy": "best-fit",
    "rows": 4,
    "documents": 6,
    "segments": 6,
    "tokens": 52,
    "trained_tokens": 46,
    "padding_tokens": 12,
    "truncated_documents": 0,
    "truncated_tokens": 0,
    "dropped_documents": 0,
    "dropped_tokens": 0,
    "empty_documents": 1,
    "rejected_records": 0,
    "utilization": 0.8125,
    "lower_bound_rows": 4,
    "rows_over_bound": 1.0,
    "unpacked_rows": 6,
    "unpacked_ratio": 1.5,
    "shards": 1,
}


@pytest.fixture
def packed(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS[:4], ""))
    (folder / "b.jsonl").write_bytes(jsonl(*TEXTS[4:]))
    pack("a.jsonl", "b.jsonl", "-l", 16)
    return folder / "out"


@pytest.fixture
def many_shards(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5))
    pack("a.jsonl", "-l", 16, "--unit-bytes", 200)
    return folder / "out"


def histogram(buckets: int, **counts: int) -> list[int]:
    return [counts.get(f"at{i}", 0) for i in range(buckets)]


def test_the_figures(packed: Path) -> None:
    result = packer("stats", "out", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    figures = json.loads(result.stdout)
    assert {name: figures[name] for name in FIGURES} == FIGURES
    assert figures["directory"] == "out"
    assert figures["bytes"] == shard_of(packed).stat().st_size
    assert figures["histograms"] == {
        "document_length": histogram(32, at2=2, at3=3, at4=1),
        "row_fill": histogram(21, at10=1, at17=2, at20=1),
        "segments_per_row": histogram(32, at0=2, at1=2),
        "one_length": histogram(21),
        "one_input": histogram(21),
    }


def test_the_table(packed: Path) -> None:
    text = packer("stats", "out").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "utilization 81.25% of all positions hold real tokens",
        "lower bound 4 rows; no packer can do better",
        "unpacked 6 rows if each document were padded alone: 1.5× fewer rows",
        "documents 6 in 6 segments",
        "tokens 52 46 trained on (88.46%)",
        "padding 12 positions without a token",
        "mixed 94.24% of the data's spread of lengths in a row",
        "empty 1 documents without a token, not packed",
        "85-90% 2 " + "█" * 40,
        "full 1 " + "█" * 20,
        "4-7 2 " + "█" * 26 + "▋",
        "16-31 1 " + "█" * 13 + "▍",
        "2-3 2 " + "█" * 40,
    ):
        assert line in lines
    assert "truncated" not in text


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_losses_are_shown(folder: Path, overlong: str) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("a" * 99, "b", "c" * 20) + b"{\n")
    pack("a.jsonl", "-l", 16, "--overlong", overlong, "--on-error", "skip")
    lines = [" ".join(line.split()) for line in packer("stats", "out").stdout.splitlines()]
    lost = "truncated 2 documents, 89 tokens cut off"
    assert (lost if overlong == "truncate" else "dropped 2 documents, 121 tokens") in lines
    assert "rejected 1 bad records, see rejected.jsonl" in lines


def test_min_utilization(packed: Path) -> None:
    for limit in ("0.8125", "0", "0.5"):
        result = packer("stats", "out", "--min-utilization", limit)
        assert (result.exit_code, result.stderr) == (0, "")
    message = "out: utilization 0.8125 is below --min-utilization 0.82"
    result = packer("stats", "out", "--min-utilization", "0.82")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {message}\ntip: ")
    assert "utilization" in result.stdout  # the figures are printed all the same
    result = packer("stats", "out", "--min-utilization", "0.82", "--json")
    assert json.loads(result.stderr)["error"] == message
    assert json.loads(result.stdout)["utilization"] == 0.8125


def test_by_input(packed: Path) -> None:
    lines = [line.split() for line in packer("stats", "out", "--by", "input").stdout.splitlines()]
    sizes = {name: str(Path(name).stat().st_size) for name in ("a.jsonl", "b.jsonl")}
    assert ["documents", "tokens", "empty", "rejected", "bytes", "input"] in lines
    assert ["4", "32", "1", "0", sizes["a.jsonl"], "a.jsonl"] in lines
    assert ["2", "20", "0", "0", sizes["b.jsonl"], "b.jsonl"] in lines
    by_input = json.loads(packer("stats", "out", "--by", "input", "--json").stdout)["by_input"]
    assert [one["documents"] for one in by_input] == [4, 2]


def test_by_shard(many_shards: Path) -> None:
    by_shard = json.loads(packer("stats", "out", "--by", "shard", "--json").stdout)["by_shard"]
    assert len(by_shard) > 1
    lines = packer("stats", "out", "--by", "shard").stdout.splitlines()
    for shard in by_shard:
        (line,) = [line.split() for line in lines if line.endswith(short_name(shard["file"]))]
        share = f"{shard['tokens'] / shard['rows'] / 16:.2%}"
        assert line[:4] == [str(shard[n]) for n in ("rows", "segments", "tokens")] + [share]


@pytest.mark.parametrize(
    "columns",
    [
        "input_ids,cu_seqlens",
        "input_ids,labels,cu_seqlens",
        "input_ids,cu_seqlens,segments",
        "input_ids,labels,attention_mask,cu_seqlens,segments,position_ids",
    ],
)
def test_deep_agrees(folder: Path, columns: str) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5, "g" * 50))
    options = ["-l", 16, "--columns", columns, "--unit-bytes", 200, "--shard-bytes", 1]
    pack("a.jsonl", *options)
    result = packer("stats", "out", "--deep")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("recounted from the shards: all figures agree\n")


def more(name: str) -> Callable[[Path], None]:
    """One more in a total of the manifest, or in the first bucket of a histogram."""

    def change(manifest: dict[str, Any]) -> None:
        if name in manifest:
            manifest[name] += 1
        else:
            manifest["histograms"][name][0] += 1

    return lambda directory: edit(change, directory)


DIFFER = "out: the shards and the manifest differ: "
TOTALS = ("rows", "documents", "segments", "tokens", "trained_tokens", "padding_tokens",
          "utilization", "lower_bound_rows")  # fmt: skip
DEEP = [
    *((more(name), f"{DIFFER}{name}: {FIGURES[name]} in the shards, ") for name in TOTALS),
    *((more(name), f"differ: {name}: ") for name in ("row_fill", "length_squares", "one_length",
                                                     "length_squares_in_rows")),
    (lambda directory: shard_of(directory).unlink(), ".arrow: is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DEEP)
def test_what_deep_finds(packed: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(packed)
    assert_error(packer("stats", "out", "--deep"), 1, message)


def unfinished(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    (directory / ".packer").mkdir()


def edited(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda directory: edit(change, directory)


def written(content: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / "manifest.json").write_bytes(content)


UNUSABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (shutil.rmtree, "out: no such directory"),
    "unfinished": (unfinished, "out: has no manifest.json: the run that writes it has not"),
    "foreign": (lambda directory: (directory / "manifest.json").unlink(),
                "out: has no manifest.json: not packed by packer"),
    "another version": (edited(lambda manifest: manifest.update(format_version=99)),
                        "out/manifest.json: format version 99, this packer reads 1"),
    "of another type": (edited(lambda manifest: manifest.update(rows="many")),
                        "out/manifest.json: damaged: Expected `int`, got `str` - at `$.rows`"),
    "not JSON": (written(b"{"), "out/manifest.json: not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
def test_directories_without_a_usable_result(packed: Path, case: str) -> None:
    damage, message = UNUSABLE[case]
    damage(packed)
    for deep in ([], ["--deep"]):
        code = 2 if case == "missing" else 1
        assert_error(packer("stats", "out", *deep), code, message)


CARRIED = {
    "logprobs": ("float32", None, "token", 5, -2.0, -0.94, 0.3),
    "top": ("int32", 2, "token", 10, 1, 124, 1200),
    "reward": ("bfloat16", None, "record", 2, 0.5, 0.75, 1.0),
}


@pytest.mark.usefixtures("carried")
def test_carried_columns() -> None:
    for name in ("out", "tokens"):
        text = packer("stats", name).stdout
        assert [" ".join(line.split()) for line in text.splitlines()[-5:]] == [
            "carried columns",
            "column type of values minimum mean maximum",
            "logprobs float32 token 5 -2 -0.94 0.3",
            "top int32[2] token 10 1 124 1,200",
            "reward bfloat16 (as uint16) record 2 0.5 0.75 1",
        ]
        told = "--carry logprobs:float32/token --carry 'top:int32[2]/token' --carry reward:bfloat16"
        assert f" {told}/record\n" in text  # and no --columns
        found = json.loads(packer("stats", name, "--json").stdout)["carried"]
        assert found.keys() == CARRIED.keys()
        for column, (*kind, values, low, mean, high) in CARRIED.items():
            one = found[column]
            assert [one["type"], one["count"], one["of"], one["values"]] == [*kind, values]
            assert [one["minimum"], one["mean"], one["maximum"]] == pytest.approx([low, mean, high])
        assert packer("stats", name, "--deep").stdout.endswith("all figures agree\n")
    text = packer("stats", "view").stdout
    assert "\ncarried columns, with their values in tokens\n" in text
    assert text.splitlines()[-1].split() == ["reward", "bfloat16", "(as", "uint16)", "record"]
    reward = json.loads(packer("stats", "view", "--json").stdout)["carried"]["reward"]
    own = {"type": "bfloat16", "count": None, "of": "record", "directories": ["tokens"]}
    assert reward == own
    assert "Carried columns" in packer("stats", "out", "--html", "-").stdout
    assert "with their values in tokens" in packer("stats", "view", "--html", "-").stdout


def test_figures_of_carried_columns_are_the_same_for_any_number_of_workers(folder: Path) -> None:
    made = []
    options = write_carried(folder)
    for workers in (1, 3):
        output = f"out-{workers}"
        assert packer("pack", *options, "-q", "-o", output, "--workers", workers).exit_code == 0
        made.append(Path(output, "manifest.json").read_bytes())
    assert made[0] == made[1]
    assert "carried" in made[0].decode()
