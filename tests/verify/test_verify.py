"""`packer verify`: sound results, and files that do not belong to them or were changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import tiny_tokenizers
from support import assert_error, jsonl, pack, packer, packer_process
from verifying import TEXTS, assert_sound, first, problems

pytestmark = pytest.mark.usefixtures("folder")


def test_a_sound_result(packed: Path) -> None:
    assert assert_sound() == "out: 1 shard, 7 rows: sound\n"
    report = json.loads(packer("verify", "out", "--json").stdout)
    assert report == {
        "directory": "out", "ok": True, "problems": [], "shards": 1, "rows": 7, "tokens": 99,
        "bytes": (packed / first()).stat().st_size,
        "documents_compared": None, "inputs_compared": None,
        "records_drawn": None, "units_packed_again": None,
    }  # fmt: skip


def test_the_script_itself(packed: Path) -> None:
    result = packer_process("verify", "out")
    assert (result.returncode, result.stderr) == (0, b"")
    (packed / first()).unlink()
    result = packer_process("verify", "out")
    assert result.returncode == 1
    assert result.stdout == f"out: {first()}: is missing\n".encode()
    assert result.stderr.startswith(b"error: out: 1 problem\ntip: ")


@pytest.mark.parametrize(
    "options",
    [
        ["--columns", "input_ids,cu_seqlens"],
        ["--columns", "input_ids,cu_seqlens,segments"],
        ["--label-shift", "pre", "--segment-multiple", 4],
        ["--max-segments-per-row", 2, "--balance", "attention"],
        ["--overlong", "truncate", "--truncate-side", "left"],
        ["--overlong", "truncate"],
        ["--overlong", "drop", "--unit-bytes", 100],
        ["--strategy", "wrap"],
        ["--strategy", "wrap", "--segment-multiple", 8],
        ["--shard-bytes", 1, "--unit-bytes", 300, "--workers", 2],
        ["--no-eos"],
    ],
)
def test_every_way_to_pack_is_sound(folder: Path, options: list[object]) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5))
    pack("a.jsonl", "-l", 16, *options)
    assert_sound()
    for sample in ("all", 7):
        result = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert result.exit_code == 0, result.stdout
        if "--columns" not in options:
            count = 40 if sample == "all" else 7
            assert f"; {count} documents of 1 input encoded again: the same" in result.stdout


def test_foreign_files(packed: Path) -> None:
    (packed / "notes.txt").write_text("mine")
    (packed / "shard-00001-000.arrow").write_bytes(b"")
    (packed / "folder").mkdir()
    foreign = "a foreign file: the manifest does not list it"
    names = ("folder", "notes.txt", "shard-00001-000.arrow")
    assert problems() == [f"out: {name}: {foreign}" for name in names]


def test_a_work_folder_that_was_left(packed: Path) -> None:
    """As a power loss leaves it right after the end of a run: the result is whole."""
    (packed / ".packer").mkdir()
    result = packer("verify", "out")
    assert (result.exit_code, result.stdout) == (0, "out: 1 shard, 7 rows: sound\n")
    assert result.stderr.startswith(
        "packer: out/.packer: belongs to a run that is writing here, or"
    )
    assert "the next packer pack to this directory removes it" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_side_files(packed: Path, name: str) -> None:
    data = (packed / name).read_bytes()
    (packed / name).write_bytes(data + b" ")
    (line,) = problems()
    assert line.startswith(f"out: {name}: its sha256 is ")
    assert line.endswith(f", the manifest says {hashlib.sha256(data).hexdigest()}")
    (packed / name).unlink()
    assert problems() == [f"out: {name}: is missing"]


def test_a_tampered_tokenizer(folder: Path) -> None:
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(),
        tokenizer_config={"eos_token": "</s>", "chat_template": "{{ messages }}"},
    )  # fmt: skip
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    assert packer("pack", "a.jsonl", "-l", 16, "-t", "tok", "-q", "-o", "out").exit_code == 0
    assert_sound("--against-inputs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = Path("out", name)
        good = path.read_bytes()
        path.write_bytes(good.replace(b"</s>", b"</x>"))
        (line,) = problems()
        assert line.startswith(f"out: {name}: its sha256 is ")
        path.write_bytes(good)
    assert_sound()


def test_a_tampered_rejected_file(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("good") + b"bad\n")
    pack("a.jsonl", "-l", 16, "--on-error", "skip")
    assert_sound("--against-inputs")
    Path("out/rejected.jsonl").write_bytes(b"")
    (line,) = problems()
    assert line.startswith("out: rejected.jsonl: its sha256 is ")


def test_options_that_cannot_be(packed: Path) -> None:
    assert_error(
        packer("verify", "out", "--sample", "0"),
        2,
        "--sample: '0' is neither a positive number nor all",
    )
    assert_error(
        packer("verify", "out", "--sample", "some"), 2, "--sample: 'some' is not a whole number"
    )
    assert_error(packer("verify", "out", "--seed", "-1"), 2, "--seed: -1 is negative")
    assert_error(packer("verify", "elsewhere"), 2, "elsewhere: no such directory")
