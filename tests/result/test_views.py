"""Views: rows of references that read as the rows that the same command writes without --view."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tiny_tokenizers
from exporting import table_of
from spoiling import edit
from support import (
    ALL_COLUMNS,
    assert_error,
    check_directory,
    contents,
    jsonl,
    packer,
    shard_of,
    succeeds,
)
from varied_results import conversation, texts

from packer_cli import open_packed
from packer_cli.errors import DataError, UsageError


def text_lines(count: int, seed: int = 0) -> bytes:
    return jsonl(*texts(seed, seed + count))


def token_lines(count: int, seed: int = 0) -> bytes:
    """Ids of which some are not trained on, some of whole documents."""
    random = np.random.default_rng(seed)
    lines = []
    for i in range(count):
        ids = random.integers(0, 256, int(random.integers(1, 90)))
        labels = np.where(random.random(len(ids)) < (i % 4) / 3, ids, -100)
        lines.append(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}))
    return "\n".join(lines).encode()


def chat_lines(count: int, seed: int = 0) -> bytes:
    pairs = [
        {"prompt": one["messages"][0]["content"], "completion": one["messages"][1]["content"]}
        for one in map(conversation, range(seed, seed + count))
    ]
    return "\n".join(map(json.dumps, pairs)).encode()


def tokenize(name: str, lines: bytes) -> str:
    """A tokenized directory of that name."""
    Path(f"{name}.jsonl").write_bytes(lines)
    own = [] if b"input_ids" in lines else ["-t", "bytes"]
    succeeds("tokenize", f"{name}.jsonl", *own, "-o", name, "-q")
    return name


def pack(*arguments: object, output: str = "packed") -> dict[str, Any]:
    succeeds("pack", *arguments, "-q", "-o", output)
    return check_directory(output)


def table(directory: str | Path, **how: Any) -> Any:
    packed = open_packed(directory, **how)
    batches = [one for shard in packed.manifest["shards"] for one in packed.batches(shard)]
    return pa.Table.from_batches(batches)


KINDS = {"text": text_lines, "tokens": token_lines, "chat": chat_lines}
OPTIONS: dict[str, tuple[str, list[object]]] = {
    "plain": ("text", ["-l", 64, "--unit-bytes", 1500]),
    "short": ("text", ["-l", 7]),
    "all columns": ("chat", ["-l", 128, *ALL_COLUMNS]),
    "multiple": ("tokens", ["-l", 64, "--segment-multiple", 8, *ALL_COLUMNS]),
    "few columns": (
        "chat",
        ["-l", 128, "--columns", "input_ids,cu_seqlens", "--shard-bytes", 1],
    ),
    "ordered": ("text", ["-l", 64, "--no-shuffle", "--strategy", "next-fit"]),
    "wrapped": ("tokens", ["-l", 64, "--strategy", "wrap"]),
    "truncated": ("tokens", ["-l", 32, "--overlong", "truncate", "--truncate-side", "left"]),
    "units": ("chat", ["-l", 128, "--unit-bytes", 2000, "--max-segments-per-row", 2]),
    "balanced": ("text", ["-l", 64, "--balance", "attention", "--seed", 5]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_view_is_the_packed_directory(folder: Path, name: str) -> None:
    """To readers, and once it is exported."""
    kind, options = OPTIONS[name]
    parts = [tokenize(name, KINDS[kind](30, seed)) for name, seed in (("a", 0), ("b", 50))]
    packed, view = pack(*parts, *options), pack(*parts, *options, "--view", output="view")
    assert table("view").equals(table("packed"), check_metadata=True)
    for total in ("rows", "segments", "tokens", "trained_tokens", "histograms"):
        assert view[total] == packed[total]
    export = "export", "view", "--to", "packed", "-o", "out", "-q"
    succeeds(*export)
    assert contents("out") == contents("packed")
    if "--columns" not in options:
        saved = []
        for directory in ("view", "packed"):
            succeeds("export", directory, "--to", "unpacked", "-o", f"unpacked-{directory}", "-q")
            saved.append(table_of(Path(f"unpacked-{directory}")))
        assert saved[0] == saved[1]
    assert_error(packer(*export, "--overwrite"), 2, "out: holds a finished result")
    assert contents("out") == contents("packed")


@pytest.fixture
def view(folder: Path) -> Path:
    pack(tokenize("a", text_lines(40)), tokenize("b", text_lines(30, 50)), "-l", 64, "--view",
         output="view")  # fmt: skip
    return Path("view")


def test_the_commands_serve_a_view(view: Path) -> None:
    pack("a", "b", "-l", 64)
    for command in (["show", "{}", "0", "-1", "--json"], ["show", "{}", "3-5"]):
        of_view, of_packed = (
            packer(*(part.format(name) for part in command)) for name in ("view", "packed")
        )
        assert of_view.exit_code == 0, of_view.stderr
        names = [shard_of(name).name for name in ("view", "packed")]
        assert of_view.stdout.replace(*names) == of_packed.stdout
    succeeds("stats", "view", "--deep")
    for to in ("numpy", "trl", "megatron"):  # columns, rows, documents
        for name in ("view", "packed"):
            succeeds("export", name, "--to", to, "-o", f"{to}-{name}", "-q")
        for path in Path(f"{to}-packed").rglob("*"):
            if path.is_file() and path.name not in (".packer-export", "state.json"):
                same = Path(f"{to}-view") / path.relative_to(f"{to}-packed")
                assert same.read_bytes() == path.read_bytes(), same


NOWHERE = "a document that its tokenized directories do not have"
REFERENCES = [
    ("file", 2, NOWHERE),
    ("position", 40, NOWHERE),
    ("start", -1, "refers to tokens beyond the end of a document"),
    ("start", 10**6, "refers to tokens beyond the end of a document"),
    ("boundary", 65, "cu_seqlens does not ascend from 0 to 64 at most"),
    ("boundary", 0, "cu_seqlens does not ascend from 0 to 64 at most"),
]


@pytest.mark.parametrize(("field", "value", "problem"), REFERENCES)
def test_references_that_lead_nowhere(view: Path, field: str, value: int, problem: str) -> None:
    shard = shard_of(view)
    assert shard.name not in packer("verify", "view").stdout
    data = bytearray(shard.read_bytes())
    batch = next(pa.ipc.open_stream(bytes(data)).__iter__())
    values, place = batch.column("cu_seqlens").values.to_numpy(), 1
    if field != "boundary":
        parts = batch.column("segments").values
        values = parts.field(field).to_numpy()
        place = int(np.argmax(parts.field("file").to_numpy() == 0))
    at = bytes(data).index(values.tobytes()) + place * values.itemsize
    data[at : at + values.itemsize] = value.to_bytes(values.itemsize, "little", signed=True)
    shard.write_bytes(data)
    with pytest.raises(DataError, match=problem):
        table(view)
    assert "its sha256 is" in packer("verify", "view").stdout
    for command in ("stats view --deep", "export view --to numpy -o n -q",
                    "export view --to packed -o p -q"):  # fmt: skip
        assert_error(packer(*command.split()), 1, shard.name, problem)
    if field == "boundary":  # of the first row
        damaged = f"{shard.name}: row 0: is damaged: {problem}"
        assert_error(packer("show", "view", "0"), 1, damaged)


class TestTokensThatMoved:
    @pytest.mark.parametrize("command", [
        ["show", "view"], ["stats", "view", "--deep"], ["verify", "view", "-q"],
        ["export", "view", "--to", "numpy", "-o", "out", "-q"],
    ], ids=lambda command: command[0])  # fmt: skip
    def test_one_error_says_where_to_point(self, view: Path, command: list[str]) -> None:
        expected = table(view)
        Path("a").rename("elsewhere")
        Path("b").rename("other")
        result = packer(*command)
        assert_error(result, 1, "view: its tokenized directory a is gone", "manifest.json")
        assert "--tokens DIR" in result.stderr
        assert not Path("out").exists()
        result = packer(*command, "--tokens", "other", "--tokens", "elsewhere")
        assert "is gone" not in result.stderr
        assert command[0] == "verify" or result.exit_code == 0, result.stderr
        assert table(view, tokens=["other", Path("elsewhere")]).equals(expected)

    def test_a_directory_that_changed_or_is_none(self, view: Path) -> None:
        expected = open_packed(view).manifest["inputs"][1]["sha256"]
        shutil.rmtree("b")
        tokenize("b", text_lines(31, 50))
        result = packer("show", view)
        assert_error(result, 1, "view: its tokenized directory b has changed", expected)
        assert "--tokens DIR" in result.stderr
        result = packer("show", view, "--tokens", "b")
        problem = "view: its tokenized directory b has changed, and is not b: "
        assert_error(result, 1, problem, expected)
        assert_error(packer("show", view, "--tokens", "nowhere"), 2, "nowhere")
        assert_error(packer("show", view, "--tokens", view), 1, "view: holds packed rows")

    def test_a_view_is_read_from_anywhere_with_its_tokens_beside_or_in_it(
        self, view: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = table(view)
        Path("training").mkdir()
        monkeypatch.chdir("training")
        for named in ("../view", "../view/", f"{folder}/view"):
            assert table(named).equals(expected)
            succeeds("verify", named, "-q")
        for name in "ab":
            shutil.move(f"../{name}", "../view")
        monkeypatch.chdir("/")
        assert table(folder / "view").equals(expected)
        Path(folder, "view/a").rename(folder / "elsewhere")
        result = packer("verify", folder / "view", "-q")
        assert_error(result, 1, "/a is gone: expected its manifest.json")

    def test_a_packed_directory_needs_none(self, view: Path) -> None:
        pack("a", "-l", 64)
        assert_error(packer("show", "packed", "--tokens", "a"), 2, "--tokens: packed is not a view")
        with pytest.raises(UsageError, match="is not a view"):
            open_packed("packed", tokens="a")
        result = packer("export", "packed", "--to", "packed", "-o", "out", "-q")
        assert_error(result, 2, "packed: is packed, and no view")
        assert not Path("out").exists()


def test_a_full_disk_leaves_nothing_of_a_packed_directory(view: Path, small_disk: Path) -> None:
    pack(tokenize("c", text_lines(900)), "-l", 64, "--view", output="large")
    result = packer("export", "large", "--to", "packed", "-q", "-o", small_disk / "out")
    assert_error(result, 1, "disk/out: cannot write: No space left on device")
    assert list(small_disk.iterdir()) == []


def lose_a_segment(manifest: dict[str, Any]) -> None:
    manifest["shards"][0]["segments"] += 1


# what is changed of a view's manifest, files that get other bytes, and the error
DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], None] | None, str, str]] = {
    "a lost segment": (lose_a_segment, "", "segments, the manifest says"),
    "other records": (None, "units.jsonl", "view/units.jsonl: has 3 bytes, the manifest says "),
    "a tokenizer": (None, "tokenizer.json", "view/tokenizer.json: has 3 bytes, the manifest says"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_of_a_view_is_not_taken_over(folder: Path, damage: str) -> None:
    tiny_tokenizers.save(folder / "tok", tiny_tokenizers.byte_level())
    Path("a.jsonl").write_bytes(text_lines(9))
    succeeds("tokenize", "a.jsonl", "-t", "tok", "-q", "-o", "a")
    pack("a", "-l", 64, "--view", output="view")
    change, name, message = DAMAGED[damage]
    if change:
        edit(change, "view")
    if name:
        Path("view", name).write_bytes(b"{}\n")
    for to in ("packed", "numpy") if change is lose_a_segment else ("packed",):
        assert_error(packer("export", "view", "--to", to, "-q", "-o", "out"), 1, message)
        assert not Path("out").exists()
