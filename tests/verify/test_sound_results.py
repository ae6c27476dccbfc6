"""Results of every kind are sound by their inputs, and what is amiss comes with its tip."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_tokenizers
from forged_changes import change_column, set_config, swap_rows
from forging import Result
from support import heavy, jsonl, packer
from varied_results import ALL, texts, write_chat, write_mixed


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
@pytest.mark.parametrize("tokenizer", ["tok", heavy("bytes")])
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
        "tip: restore them, or run packer pack --update on the inputs as they are now; its --prune "
        "removes documents of inputs that are gone"
    )


def test_each_kind_of_problem_has_its_tip(copied: Callable[[str], Result]) -> None:
    result = copied("mixed")
    (result.path / "notes.txt").write_text("mine")
    checked = packer("verify", "out", "-q")
    assert checked.stderr.splitlines()[1] == (
        "tip: move them elsewhere: trainers may take them for part of the result"
    )
    (result.path / "state.json").unlink()
    checked = packer("verify", "out", "-q", "--json")
    assert json.loads(checked.stderr)["tip"].startswith("a damaged result: copy the directory")
    assert "; foreign files: move them elsewhere" in checked.stderr
    tips = {one["file"]: one["tip"] for one in json.loads(checked.stdout)["problems"]}
    assert tips["state.json"].startswith("copy the directory again")
    assert tips["notes.txt"].startswith("move them elsewhere")


@pytest.mark.parametrize("columns", ["input_ids,cu_seqlens", "input_ids,labels,cu_seqlens"])
def test_rows_that_do_not_say_where_they_come_from(folder: Path, columns: str) -> None:
    options = (*write_mixed(folder), "--columns", columns, "-q", "-o", "out")
    assert packer("pack", *options).exit_code == 0
    result = packer(*ALL)
    assert result.exit_code == 0, result.stdout
    assert "units packed again: the same rows" in result.stdout
    for change, problem in (
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
        assert (result.exit_code, problem in result.stdout) == (1 if problem else 0, True), problem


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
