"""`packer stats` of tokenized directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spoiling import arrow_file, edit, rewrite, tokenize
from support import assert_error, jsonl, packer

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def tokenized(folder: Path) -> None:
    """Documents of 6, 3, 3 and 41 tokens; an empty one and a bad record."""
    (folder / "a.jsonl").write_bytes(jsonl("first", "ab") + b"{no\n" + jsonl("", "cd"))
    (folder / "b.jsonl").write_bytes(jsonl("x" * 40))
    tokenize(
        "a.jsonl", "b.jsonl", "-t", "bytes", "-o", "out", "--on-error", "skip",
        "--unit-bytes", 25, "--separator", "",
    )  # fmt: skip


def stats(*arguments: object) -> str:
    result = packer("stats", "out", *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return str(result.stdout)


@pytest.mark.usefixtures("tokenized")
def test_the_table() -> None:
    text = stats()
    assert text.splitlines()[0] == "out"
    lines = [" ".join(line.split()) for line in text.splitlines()]
    written = f"{sum(path.stat().st_size for path in Path('out').glob('*.arrow')) / 1e3:.1f} kB"
    for line in (
        "made from 2 inputs, 118 bytes",
        "records text; trained on: all",
        f"documents 4 13.2 tokens each; {written} in 3 shards",
        "tokens 53 49 trained on (92.45%)",
        "empty 1 documents without a token, not packed",
        "rejected 1 bad records, see rejected.jsonl",
        "document length in tokens (documents)",
    ):
        assert line in lines, (line, text)
    assert "--on-error skip" in text
    bars = lines[lines.index("document length in tokens (documents)") + 1 :]
    assert [bar.split()[:2] for bar in bars if bar] == [["2-3", "2"], ["4-7", "1"], ["32-63", "1"]]


@pytest.mark.usefixtures("tokenized")
def test_by_input_and_by_shard() -> None:
    rows = [line.split() for line in stats("--by", "input").splitlines()[-3:]]
    assert rows[0] == ["documents", "tokens", "empty", "rejected", "bytes", "input"]
    assert [row[:4] + row[5:] for row in rows[1:]] == [
        ["3", "12", "1", "1", "a.jsonl"], ["1", "41", "0", "0", "b.jsonl"]
    ]  # fmt: skip
    shards = [line.split() for line in stats("--by", "shard").splitlines()[-4:]]
    assert shards[0] == ["documents", "tokens", "trained", "bytes", "shard"]
    assert sum(int(row[0]) for row in shards[1:]) == 4
    assert sum(int(row[1]) for row in shards[1:]) == 53


@pytest.mark.usefixtures("tokenized")
def test_json() -> None:
    content = json.loads(stats("--json", "--by", "input"))
    assert {key: content[key] for key in ("kind", "documents", "tokens", "trained_tokens")} == {
        "kind": "tokenized", "documents": 4, "tokens": 53, "trained_tokens": 49
    }  # fmt: skip
    assert content["tokens_per_document"] == 13.25
    assert content["bytes"] == sum(p.stat().st_size for p in Path("out").glob("*.arrow"))
    assert sum(content["histograms"]["document_length"]) == 4
    assert [one["documents"] for one in content["by_input"]] == [3, 1]


@pytest.mark.usefixtures("tokenized")
def test_deep_recounts() -> None:
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
