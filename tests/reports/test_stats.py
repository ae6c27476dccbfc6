"""`packer stats`: the figures, the thresholds, and finding what does not agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from approving import assert_approved
from chats import assistant, chat, pack_chat, user, write
from spoiling import arrow_file, edit, rewrite, tokenize
from support import assert_error, jsonl, pack, packer, shard_of, succeeds
from varied_results import write_carried

from packer_cli.result.counts import SHOWN_TOTALS
from packer_cli.result.manifest import OF_INPUTS
from packer_cli.result.manifest import TOTALS as TOTALS_OF_MANIFESTS

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


def stats(*arguments: object) -> str:
    result = packer("stats", "out", *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return str(result.stdout)


@pytest.fixture
def packed(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS[:4], ""))
    (folder / "b.jsonl").write_bytes(jsonl(*TEXTS[4:]))
    pack("a.jsonl", "b.jsonl", "-l", 16)
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


def test_the_tables(packed: Path) -> None:
    assert_approved("stats", stats(), *(stats("--by", what).partition("segments per row")[2]
                                        for what in ("input", "shard")))  # fmt: skip


def test_every_total_with_a_title_has_a_line(packed: Path) -> None:
    edit(lambda manifest: manifest.update(dict.fromkeys(TOTALS_OF_MANIFESTS, 2)))
    lines = {line.split("  ")[0] for line in stats().splitlines()}
    titles = {total.title for total in SHOWN_TOTALS.values()} - {""}
    assert len(titles) > 15
    assert titles <= lines


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


def test_by_input_and_by_shard(packed: Path) -> None:
    by_input = json.loads(stats("--by", "input", "--json"))["by_input"]
    assert [one["documents"] for one in by_input] == [4, 2]
    pack("a.jsonl", "b.jsonl", "-l", 16, "--unit-bytes", 60, "--overwrite")
    by_shard = json.loads(stats("--by", "shard", "--json"))["by_shard"]
    assert len(by_shard) > 1
    assert sum(one["tokens"] for one in by_shard) == FIGURES["tokens"]


def test_deep_agrees_without_most_columns(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5, "g" * 50))
    pack("a.jsonl", "-l", 16, "--columns", "input_ids,cu_seqlens", "--unit-bytes", 200)
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
TOTALS = ("rows", "documents", "trained_tokens", "utilization")
DEEP = [
    *((more(name), f"{DIFFER}{name}: {FIGURES[name]} in the shards, ") for name in TOTALS),
    *((more(name), f"differ: {name}: ") for name in ("row_fill", "length_squares")),
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
                "out: has no manifest.json: an incomplete copy of a result, or its manifest is"),
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
    shown = {name: packer("stats", name).stdout for name in ("out", "tokens", "view")}
    tables = [text.partition("\ncarried columns")[2] for text in shown.values()]
    assert_approved("stats of carried columns", *tables)
    told = "--carry logprobs:float32/token --carry 'top:int32[2]/token' --carry reward:bfloat16"
    for name in ("out", "tokens"):
        assert f" {told}/record\n" in shown[name]  # and no --columns
        found = json.loads(packer("stats", name, "--json").stdout)["carried"]
        assert found.keys() == CARRIED.keys()
        for column, (*kind, values, low, mean, high) in CARRIED.items():
            one = found[column]
            assert [one["type"], one["count"], one["of"], one["values"]] == [*kind, values]
            assert [one["minimum"], one["mean"], one["maximum"]] == pytest.approx([low, mean, high])
        assert packer("stats", name, "--deep").stdout.endswith("all figures agree\n")
    reward = json.loads(packer("stats", "view", "--json").stdout)["carried"]["reward"]
    own = {"type": "bfloat16", "count": None, "of": "record", "directories": ["tokens"]}
    assert reward == own
    assert "with their values in tokens" in packer("stats", "view", "--html", "-").stdout


def test_figures_of_carried_columns_are_the_same_for_any_number_of_workers(folder: Path) -> None:
    made = []
    options = write_carried(folder)
    for workers in (1, 3):
        output = f"out-{workers}"
        succeeds("pack", *options, "-q", "-o", output, "--workers", workers)
        made.append(Path(output, "manifest.json").read_bytes())
    assert made[0] == made[1]
    assert "carried" in made[0].decode()


# What was truncated, dropped and left out as untrained, counted for each input


LOSSES = [name for name in OF_INPUTS if name.split("_")[0] in ("truncated", "dropped", "untrained")]


def losses(manifest: dict[str, Any]) -> list[dict[str, int]]:
    """Of each input, those that are not 0, after a check that they add up to the totals."""
    for name in LOSSES:
        assert sum(one[name] for one in manifest["inputs"]) == manifest[name], name
    return [{name: one[name] for name in LOSSES if one[name]} for one in manifest["inputs"]]


def write_texts(folder: Path) -> None:
    """Documents of 16 tokens and less, and with EOS of 21 and 100 in a, of 31 in c."""
    (folder / "a.jsonl").write_bytes(jsonl("a" * 20, "b" * 99, "c"))
    (folder / "b.jsonl").write_bytes(jsonl("d" * 15, "e"))
    (folder / "c.jsonl").write_bytes(jsonl("f" * 30, "g"))


@pytest.mark.parametrize("what", ["truncated", "dropped"])
def test_texts(folder: Path, what: str) -> None:
    write_texts(folder)
    policy = {"truncated": "truncate", "dropped": "drop"}[what]
    manifest = pack("a.jsonl", "b.jsonl", "c.jsonl", "-l", 16, "--overlong", policy)
    left = 16 if what == "truncated" else 0
    assert losses(manifest) == [
        {f"{what}_documents": 2, f"{what}_tokens": 121 - 2 * left},
        {},
        {f"{what}_documents": 1, f"{what}_tokens": 31 - left},
    ]
    assert_approved(f"stats of {what} documents", stats("--by", "input"))
    succeeds("verify", "out", "--against-inputs", "--sample", "all")


def test_documents_of_tokenized_directories(folder: Path) -> None:
    """Whose batches mix documents of several inputs."""
    write_texts(folder)
    for name in ("a", "b", "c"):
        succeeds("tokenize", f"{name}.jsonl", "-t", "bytes", "-o", name)
        (own,) = json.loads(Path(name, "manifest.json").read_bytes())["inputs"]
        assert not own.keys() & {*LOSSES}
    succeeds("pack", "a", "b", "c", "-o", "out", "-l", 16, "--overlong", "drop")
    assert losses(json.loads(Path("out/manifest.json").read_bytes())) == [
        {"dropped_documents": 2, "dropped_tokens": 121}, {},
        {"dropped_documents": 1, "dropped_tokens": 31},
    ]  # fmt: skip


def test_untrained_documents(folder: Path) -> None:
    write([chat(user("hi"), assistant("yes"))], "a.jsonl")
    write([chat(user("hello")), chat(user("you")), chat(user("hi"), assistant("no"))], "b.jsonl")
    inputs = [folder / "a.jsonl", folder / "b.jsonl"]
    manifest = pack_chat(inputs[0], inputs[1], "-l", 64)
    first, second = losses(manifest)
    assert first == {}
    assert (second["untrained_documents"], second["dropped_documents"]) == (2, 2)
    assert second["untrained_tokens"] == second["dropped_tokens"] == manifest["dropped_tokens"]


# Tokenized directories


@pytest.fixture
def tokenized(folder: Path) -> None:
    """Documents of 6, 3, 3 and 41 tokens; an empty one and a bad record."""
    (folder / "a.jsonl").write_bytes(jsonl("first", "ab") + b"{no\n" + jsonl("", "cd"))
    (folder / "b.jsonl").write_bytes(jsonl("x" * 40))
    tokenize(
        "a.jsonl", "b.jsonl", "-t", "bytes", "-o", "out", "--on-error", "skip",
        "--unit-bytes", 25,
    )  # fmt: skip


@pytest.mark.usefixtures("tokenized")
def test_the_tables_of_documents() -> None:
    by = [stats("--by", what).partition("tokens (documents)")[2] for what in ("input", "shard")]
    assert_approved("stats of documents", stats(), *by)


@pytest.mark.usefixtures("tokenized")
def test_documents_as_json() -> None:
    content = json.loads(stats("--json", "--by", "input"))
    assert {key: content[key] for key in ("kind", "documents", "tokens", "trained_tokens")} == {
        "kind": "tokenized", "documents": 4, "tokens": 53, "trained_tokens": 49
    }  # fmt: skip
    assert content["tokens_per_document"] == 13.25
    assert content["bytes"] == sum(p.stat().st_size for p in Path("out").glob("*.arrow"))
    assert sum(content["histograms"]["document_length"]) == 4
    assert [one["documents"] for one in content["by_input"]] == [3, 1]


@pytest.mark.usefixtures("tokenized")
def test_deep_recounts_documents() -> None:
    assert stats("--deep").endswith("recounted from the shards: all figures agree\n")
    edit(lambda manifest: manifest.update(trained_tokens=50))
    result = packer("stats", "out", "--deep")
    assert_error(
        result, 1, "out: the shards and the manifest differ: trained_tokens: 49 in the shards, 50"
    )
    rewrite("index", lambda columns: columns["length"].__setitem__(0, 7))
    name = arrow_file("index").name
    assert_error(
        packer("stats", "out", "--deep"), 1,
        f"out/{name}: the sum of length is ",
    )  # fmt: skip


@pytest.mark.usefixtures("tokenized")
def test_documents_have_no_utilization() -> None:
    result = packer("stats", "out", "--min-utilization", 0.9)
    assert_error(result, 2, "--min-utilization: out holds documents, which are not in rows yet")
