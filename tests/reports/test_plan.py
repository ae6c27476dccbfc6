"""`packer plan`: the figures of what would be packed, and nothing that is written."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import unaltered
from approving import assert_approved
from pages import Page, assert_stands_alone
from planning import assert_planned, planned
from support import (
    ALL_COLUMNS,
    assert_error,
    contents,
    heavy,
    jsonl,
    packer,
    packer_process,
    succeeds,
)

from packer_cli.options.option import options_of
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions, RunOptions

SAMPLES = Path(__file__).parents[2] / "sample_data"
DOCUMENTS = SAMPLES / "documents.jsonl"
CHAT = (SAMPLES / "chat.jsonl", "--chat-template", SAMPLES / "chat.jinja", "-t", "bytes")
pytestmark = pytest.mark.usefixtures("folder")


def lines(*lengths: int) -> bytes:
    """Documents of so many tokens, with EOS."""
    return jsonl(*("x" * (length - 1) for length in lengths))


CASES: dict[str, tuple[Any, list[int], list[str], list[Any]]] = {
    "lengths and strategies": ([DOCUMENTS], [512, 8192], ["best-fit", "next-fit", "wrap"],
                               []),
    "truncated on the left": ([DOCUMENTS], [256, 1024], ["best-fit"],
                              ["--overlong", "truncate", "--truncate-side", "left"]),
    "dropped": ([DOCUMENTS], [256, 1024], ["best-fit"],
                ["--overlong", "drop", "--max-segments-per-row", "2"]),
    "multiples": ([DOCUMENTS], [256, 1024], ["best-fit"],
                  ["--segment-multiple", "8", *ALL_COLUMNS]),
    "balance": ([DOCUMENTS], [256, 1024], ["best-fit"],
                ["--balance", "attention", "--columns", "input_ids,cu_seqlens,segments"]),
    "in order": ([DOCUMENTS], [256, 1024], ["best-fit"],
                 ["--seed", "3", "--no-shuffle"]),
    **{f"chats, {how}": (CHAT, [64, 256], ["best-fit", "next-fit"],
                         ["--overlong", how]) for how in ("drop", "truncate", "truncate-turns")},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_planned_is_what_is_packed(case: str) -> None:
    inputs, lengths, strategies, options = CASES[case]
    options = options if inputs is CHAT else [*options, "-t", "bytes"]
    outcomes = assert_planned(inputs, lengths, strategies, *options)["outcomes"]
    if case in ("chats, drop", "chats, truncate"):
        lost, what = outcomes[1], "dropped" if case.endswith("drop") else "truncated"
        assert lost[f"{what}_tokens"] > lost[f"{what}_trained_tokens"] > 0


def test_units_windows_and_shards(folder: Path) -> None:
    shutil.copy(DOCUMENTS, folder / "a.jsonl")
    (folder / "b.jsonl").write_bytes(b"\n".join(DOCUMENTS.read_bytes().split(b"\n")[7:90]))
    cut = ["--unit-bytes", "30k", "-t", "bytes"]
    plan = assert_planned(["a.jsonl", "b.jsonl"], [256, 600], ["best-fit", "wrap"], *cut)
    assert all(one["units"] > 5 for one in plan["outcomes"])
    (folder / "c.jsonl").write_bytes(DOCUMENTS.read_bytes() * 30)
    plan = assert_planned(["c.jsonl"], [1000], ["best-fit"], "-t", "bytes", "--shard-bytes", "20M")
    assert [(one["units"], one["shards"]) for one in plan["outcomes"]] == [(1, 3)]


def test_tokenized_directories_and_views_of_them() -> None:
    for name, of in (("text", (DOCUMENTS, "-t", "bytes")), ("chats", CHAT)):
        succeeds("tokenize", *of, "-o", name, "-q", "--json")
    ways = ["best-fit", "next-fit", "wrap"]
    assert_planned(["text"], [500, 1024], ways, "--unit-bytes", "100k")
    shown = packer("plan", "text", "-l", 500, "-q").stdout
    assert "\nmade from    1 tokenized directory\n" in shown
    assert_planned(["text"], [500, 1024], ["best-fit", "next-fit"], "--no-shuffle")
    assert_planned(["chats"], [128, 1024], ["best-fit", "next-fit"], "--overlong", "truncate")
    assert_planned(["text", "chats"], [128, 1024], ["best-fit"], "--overlong", "drop")


def test_bytes_of_a_view_are_counted() -> None:
    succeeds("tokenize", DOCUMENTS, "-t", "bytes", "-o", "text", "-q")
    result = succeeds("pack", "text", "-l", 500, "--view", "-o", "view", "-q", "--json")
    (outcome,) = planned("text", "-l", 500, "--view")["outcomes"]
    for name in ("rows", "segments", "tokens", "trained_tokens", "bytes", "shards"):
        assert outcome[name] == json.loads(result.stdout)[name]


def test_the_tokens_of_the_inputs_before_any_is_lost(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines(3, 16, 40, 4) + jsonl(""))
    plan = planned("a.jsonl", "-l", "8,16", "--overlong", "drop", "-t", "bytes")
    assert (plan["documents"], plan["tokens"]) == (4, 63)
    assert plan["document_length"][:6] == [0, 1, 1, 0, 1, 1]
    assert [one["dropped_tokens"] for one in plan["outcomes"]] == [56, 40]


def test_what_attention_costs(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines(16, 8, 8, 16, 16))  # four full rows of 16
    (outcome,) = planned("a.jsonl", "-l", 16, "-t", "bytes")["outcomes"]
    assert (outcome["rows"], outcome["attention_span"]) == (4, (3 * 16**2 + 2 * 8**2) / 64)


def test_nothing_is_written(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines(3, 16, 40, 4) + b"not JSON\n")
    (folder / "here").mkdir()
    before = contents(folder)
    folder.chmod(0o500)
    try:
        own = {name: str(folder / "here") for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME")}
        result = packer_process(
            "plan", folder / "a.jsonl", "-l", "8,16", "-t", "bytes", "--on-error", "skip",
            "--json", cwd=folder / "here", env=os.environ | own,
        )  # fmt: skip
    finally:
        folder.chmod(0o700)
    assert result.returncode == 0, result.stderr
    outcomes = json.loads(result.stdout)["outcomes"]
    assert [one["rejected_records"] for one in outcomes] == [1, 1]
    assert contents(folder) == before
    assert list((folder / "here").iterdir()) == []


def test_inputs_are_read_once_for_all_lengths() -> None:
    arguments = ["-l", "128,1024,32k", "-t", "bytes", "--json", "-q"]
    result = unaltered("plan", "-", *arguments, stdin=DOCUMENTS.read_bytes())
    assert result.returncode == 0, result.stderr
    expected = planned(DOCUMENTS, "-l", "128,1024,32k", "-t", "bytes")
    assert json.loads(result.stdout)["outcomes"] == expected["outcomes"]


def test_stdin_that_would_be_read_twice_is_refused() -> None:
    arguments = [*CHAT[1:], "-l", "128,256", "--overlong", "truncate-turns", "-q"]
    result = unaltered("plan", "-", *arguments, stdin=CHAT[0].read_bytes())
    assert result.returncode == 2
    assert result.stderr.startswith("error: -: stdin can be read once, and these lengths")


SAMPLED = ["large.jsonl", "-l", "256,1024", "-t", "bytes", "--unit-bytes", "128k"]


@pytest.fixture
def large(folder: Path) -> Path:
    """6 MB of documents in seeded order, of which 2 MB are the smallest sample."""
    documents = DOCUMENTS.read_bytes().splitlines(keepends=True) * 30
    random.Random(0).shuffle(documents)
    path = folder / "large.jsonl"
    path.write_bytes(b"".join(documents))
    return path


@pytest.mark.parametrize("seed", [0, heavy(1), heavy(2)])
@pytest.mark.usefixtures("large")
def test_a_sample_is_within_its_stated_error(seed: int) -> None:
    whole = planned(*SAMPLED, "--seed", seed)["outcomes"]
    sample = planned(*SAMPLED, "--seed", seed, "--sample", "40%")
    assert sample["sample"] == 0.4
    for estimated, exact in zip(sample["outcomes"], whole, strict=True):
        assert exact["standard_errors"] == {}
        assert estimated["units_read"] < estimated["units"] == exact["units"]
        assert set(estimated["standard_errors"]) == {"rows", "utilization"}
        for name, error in estimated["standard_errors"].items():
            assert 0 < error < exact[name] / 10
            assert abs(estimated[name] - exact[name]) < 3 * error, name
        assert estimated["rows_over_bound"] == pytest.approx(exact["rows_over_bound"], rel=0.05)


def _bytes_read() -> int:
    """So far, by this process."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture
def one_file(folder: Path) -> Callable[[str], Path]:
    """20 MB in one file, which is one work unit: by length, or in seeded order in other formats."""
    draw = random.Random(0)
    texts = [draw.randbytes(int(6 * draw.lognormvariate(4, 1))).hex() for _ in range(17_500)]

    def write(kind: str) -> Path:
        path = folder / f"{kind}.{'parquet' if kind == 'groups' else 'jsonl'}"
        rows = sorted(texts, key=len) if kind == "sorted" else texts
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"text": rows}), path, row_group_size=1000)
        else:
            path.write_bytes(jsonl(*rows))
        if kind != "gz":
            return path
        packed = folder / "gz.jsonl.gz"
        packed.write_bytes(gzip.compress(path.read_bytes(), 1))
        return packed

    return write


@pytest.mark.parametrize("kind", ["sorted", heavy("groups")])
def test_a_sample_is_of_pieces_of_a_file(one_file: Callable[[str], Path], kind: str) -> None:
    path, options = one_file(kind), ["-l", "8k", "-t", "bytes", "--unit-bytes", "1G"]
    exact = planned(path, *options)
    packer("plan", path, *options, "-q", "--sample", "1%")  # whatever is read once is read
    before = _bytes_read()
    sample = planned(path, *options, "--sample", "1%")
    read = _bytes_read() - before
    assert read < path.stat().st_size / 1.6  # 2 MB, and the first blocks of the file several times
    again = planned(path, *options, "--sample", "1%")
    assert again == sample
    for estimated, one in zip(sample["outcomes"], exact["outcomes"], strict=True):
        assert 0.04 < estimated["share_read"] < 0.2
        assert estimated["rows"] == pytest.approx(one["rows"], rel=0.12)
        assert estimated["utilization"] == pytest.approx(one["utilization"], abs=0.02)
        error = estimated["standard_errors"]["rows"]
        if kind == "sorted":
            assert 0 < error < one["rows"] / 10
            assert abs(estimated["rows"] - one["rows"]) < 4 * error
    assert sample["tokens"] == pytest.approx(exact["tokens"], rel=0.12)


def test_a_file_that_cannot_be_entered_is_sampled_from_its_beginning(
    one_file: Callable[[str], Path],
) -> None:
    path, options = one_file("gz"), ["-l", "8k", "-t", "bytes", "--unit-bytes", "1G"]
    before = _bytes_read()
    result = packer("plan", path, *options, "--sample", "1%", "--json")
    assert _bytes_read() - before < path.stat().st_size / 1.5
    assert f"packer: {path}: sampled from the beginning on: compressed files" in result.stderr
    estimated = json.loads(result.stdout)["outcomes"][0]
    assert 0 < estimated["share_read"] < 0.6
    assert estimated["standard_errors"] == {"rows": None, "utilization": None}
    exact = planned(path, *options)["outcomes"][0]
    assert estimated["rows"] == pytest.approx(exact["rows"], rel=0.05)


def test_a_sample_without_a_document_plans_all(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("x" * 12_000_000))
    options = ["a.jsonl", "-l", "64k", "-t", "bytes"]
    assert planned(*options, "--sample", "1%")["outcomes"] == planned(*options)["outcomes"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"no JSON\n", [], "a.jsonl, line 1 (byte 0): not valid JSON"),
        (b"no JSON\n" * 3 + lines(4), ["--on-error", "skip", "--max-errors", 2],
         "3 of 4 records are bad; --max-errors is 2"),
        (lines(30), ["--overlong", "error"], "the document has 30 tokens, --max-length is 8"),
        (lines(30, 40), ["--overlong", "drop"], "nothing to pack: 0 empty, 2 dropped and 0 reje"),
    ],
)  # fmt: skip
def test_what_packing_would_refuse(
    folder: Path, content: bytes, options: list[Any], message: str
) -> None:
    (folder / "a.jsonl").write_bytes(content)
    command = ["a.jsonl", "-l", 8, "-t", "bytes", "-q", *options]
    assert_error(packer("plan", *command), 1, message)
    assert packer("pack", *command, "-o", "out").exit_code == 1


def test_a_length_that_holds_nothing_is_a_line_of_zeros(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines(30, 40))
    plan = assert_planned(["a.jsonl"], [8, 64], ["best-fit"], "--overlong", "drop", "-t", "bytes")
    assert [one["rows"] for one in plan["outcomes"]] == [0, 2]


def test_losses_beyond_max_loss_are_said_and_fail(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines(30, 4))
    options = ["-t", "bytes", "-q", "--overlong", "drop", "--max-loss", "10%"]
    result = packer("plan", "a.jsonl", "-l", "16,64", *options)
    assert result.exit_code == 1
    assert "--max-length 16: 0.8824 of the tokens were lost" in result.stderr
    assert "utilization" in result.stdout


def test_the_tables(folder: Path) -> None:
    """Of texts, with losses and a sample that reads all; of bad records; of a directory."""
    (folder / "a.jsonl").write_bytes(lines(3, 4) + jsonl("", "") + b"not JSON\n")
    succeeds("tokenize", *CHAT, "-q", "-o", "tokens")
    texts = (DOCUMENTS, "-l", "512,4k", "--strategy", "best-fit,wrap", "--sample", "5%")
    bad = ("a.jsonl", "-l", 8, "--on-error", "skip")
    plans = [packer("plan", *of, "-t", "bytes", "-q") for of in (texts, bad)]
    plans.append(packer("plan", "tokens", "-l", "512", "-q"))
    assert [one.exit_code for one in plans] == [0, 0, 0]
    shown = [one.stdout.partition("\n")[2] for one in plans]  # below the name, a path of ours
    assert_approved("plan", *shown)


def test_options_are_those_of_pack_that_concern_inputs_documents_and_rows() -> None:
    text = packer("plan", "--help").stdout
    for name, option in {**options_of(PackConfig), **options_of(EncodingOptions)}.items():
        assert f"{option.flag} " in text, name
    of_lengths = {"overwrite"}  # which writes a plan
    for name in options_of(RunOptions).keys() - options_of(EncodingOptions).keys() - of_lengths:
        assert f"{options_of(RunOptions)[name].flag} " not in text, name


def test_a_page_with_the_same_figures(folder: Path) -> None:
    options = ["-l", "512,128k", "--strategy", "best-fit,next-fit", "-t", "bytes", "-q"]
    result = packer("plan", DOCUMENTS, *options, "--html", "plan.html")
    assert (result.exit_code, result.stdout) == (0, "wrote plan.html\n"), result.stderr
    content = Path("plan.html").read_bytes()
    assert_stands_alone(content)
    drawn = Page(content)
    outcomes = planned(DOCUMENTS, *options)["outcomes"]
    expected = [[f"{o['max_length']:,}", o["strategy"], f"{o['rows']:,}"] for o in outcomes]
    assert [line[:3] for line in drawn.tables[2][1:]] == expected
    assert packer("plan", DOCUMENTS, *options, "--html", "-").stdout_bytes == content
