"""`packer verify`: results of every kind are sound, by themselves and by their inputs, and what is
amiss comes with its tip.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers
from altered import unaltered
from forged_changes import change_column, set_config, swap_rows, untrain
from forging import Result
from support import jsonl, pack, packer
from varied_results import ALL, texts, write_chat, write_mixed
from verifying import CHAT, TEXTS, assert_sound, first, problems

from packer_cli.records import UInt8
from packer_cli.tokenization import tokenizer as tokenization

pytestmark = pytest.mark.usefixtures("folder")
EACH = [{"text": text} for text in TEXTS]


def sound(documents: int | None = None) -> None:
    """The result `out` is, by itself, by some of its units and by all."""
    assert_sound()
    for sample in ("all", 7):
        result = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert result.exit_code == 0, result.stdout + result.stderr
        assert " packed again: the same rows" in result.stdout
        if sample == "all" and documents is not None:
            assert f"; {documents} documents of 1 input encoded again: the" in result.stdout


def test_a_sound_result(packed: Path) -> None:
    assert assert_sound() == "out: 1 shard, 7 rows: sound\n"
    report = json.loads(packer("verify", "out", "--json").stdout)
    assert report == {
        "directory": "out", "ok": True, "problems": [], "shards": 1, "rows": 7, "tokens": 99,
        "bytes": (packed / first()).stat().st_size,
        "documents_compared": None, "inputs_compared": None, "units_packed_again": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        ["--columns", "input_ids,cu_seqlens,segments"],
        ["--label-shift", "pre", "--segment-multiple", 4],
        ["--max-segments-per-row", 2, "--balance", "attention"],
        ["--overlong", "truncate", "--truncate-side", "left"],
        ["--overlong", "drop", "--unit-bytes", 100],
        ["--strategy", "wrap", "--segment-multiple", 8],
        ["--shard-bytes", 1, "--unit-bytes", 300, "--workers", 2],
        ["--no-eos"],
    ],
)
def test_every_way_to_pack(folder: Path, options: list[object]) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5))
    pack("a.jsonl", "-l", 16, *options)
    sound(40)


def chats(count: int, turns: int, question: str, answer: str) -> list[dict[str, Any]]:
    """Conversations; `{}` in what is said is their number."""
    said = {"user": question, "assistant": answer}
    return [
        {"messages": [{"role": role, "content": text.format(i)}
                      for role, text in list(said.items()) * turns]}
        for i in range(count)
    ]  # fmt: skip


SHAPES: dict[str, tuple[list[dict[str, Any]], list[object]]] = {
    "another field": ([{"body": text} for text in TEXTS], ["--text-field", "body"]),
    "separator": (EACH, ["--separator", "\n", "--no-eos"]),
    "long messages": (chats(9, 3, "{0}{0}{0}{0}{0}", "{0}{0}{0}{0}{0}"),
                      ["--overlong", "truncate-turns"]),
    "messages wrapped": (chats(9, 3, "{0}{0}{0}{0}{0}", "{0}{0}{0}{0}{0}"),
                         ["--strategy", "wrap", "--force-split", "--keep-untrained"]),
    "messages truncated": (chats(9, 3, "{0}{0}{0}{0}{0}", "{0}{0}{0}{0}{0}"),
                           ["--overlong", "truncate", "--truncate-side", "left"]),
    "messages, the last answer": (chats(30, 1, "q{}", "answer {}"),
                                  ["--train-on", "last-assistant", "--strategy", "next-fit"]),
    "messages cut": (chats(3, 1, "q" * 50, "a" * 50),
                     ["--overlong", "split", "--force-split", "--keep-untrained"]),
    "prompts": ([{"prompt": f"p{i} ", "completion": "c" * i} for i in range(9)],
                ["--label-shift", "pre"]),
    "tokens": ([{"input_ids": [1, 2, 3 + i], "labels": [-100, 2, 3 + i]} for i in range(9)], []),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(folder: Path, shape: str) -> None:
    records, options = SHAPES[shape]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(), tokenizer_config={"eos_token": "</s>"}
    )
    (folder / "t.jinja").write_text(CHAT)
    template = ["--chat-template", "t.jinja"] if "messages" in shape else []
    result = packer(
        "pack", "a.jsonl", "-l", 64, "-t", "tok", *template, *options, "-q", "-o", "out"
    )
    assert result.exit_code == 0, result.stderr
    shutil.rmtree(folder / "tok")  # the directory has all that is needed
    (folder / "t.jinja").unlink()
    sound(len(records))


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


def test_a_result_that_was_added_to(folder: Path) -> None:
    options = write_mixed(folder)
    assert packer("pack", *options, "-q", "-o", "out").exit_code == 0
    (folder / "e.jsonl").write_bytes(jsonl(*texts(200, 230)))
    (folder / "a.jsonl").write_bytes(jsonl(*texts(300, 320)))
    again = packer("pack", "e.jsonl", "a.jsonl", *options[2:], "-q", "-o", "out", "--add")
    assert again.exit_code == 0, again.stderr
    sound()


@pytest.mark.parametrize("columns", ["input_ids,cu_seqlens", "input_ids,labels,cu_seqlens"])
def test_rows_that_do_not_say_where_they_come_from(folder: Path, columns: str) -> None:
    options = (*write_mixed(folder), "--columns", columns, "-q", "-o", "out")
    assert packer("pack", *options).exit_code == 0
    sound()
    for change, problem in (
        (set_config("seed", 1), "expected by the options of the manifest"),
        (set_config("seed", 0), ""),
        (swap_rows, " expected "),
        (swap_rows, ""),
        (change_column("input_ids", lambda ids: ids.__setitem__((0, 0), 9)),
         "input_ids has 9 at place 0 of row 0 of"),
    ):  # fmt: skip
        forged = Result("out")
        change(forged)
        forged.save()
        result = packer(*ALL, "-q")
        assert (result.exit_code, problem in result.stdout) == (1 if problem else 0, True), problem


def test_a_sample_is_of_units_and_first_of_those_that_read_further_inputs(folder: Path) -> None:
    for number, count in enumerate((10, 20, 100, 100)):
        (folder / f"{number}.jsonl").write_bytes(jsonl(*TEXTS[:1] * count))
    pack(*(f"{number}.jsonl" for number in range(4)), "-l", 16, "--unit-bytes", 300)
    units = dict.fromkeys((1, 60, 230, 10000), 0)
    for sample in units:
        options = ("--against-inputs", "--sample", sample, "--seed", 3)
        report = json.loads(packer("verify", "out", *options, "--json").stdout)
        assert min(sample, 230) <= report["documents_compared"] <= min(sample + 20, 230)
        assert report["inputs_compared"] == 4
        units[sample] = report["units_packed_again"]
    assert units[1] == 1
    assert units[230] == units[10_000] == len(Result("out").records)


# What is amiss


def test_files_that_are_changed_gone_or_foreign(packed: Path) -> None:
    for name in ("state.json", "dataset_info.json"):
        data = (packed / name).read_bytes()
        (packed / name).write_bytes(data + b" ")
        (line,) = problems()
        assert line.startswith(f"out: {name}: its sha256 is ")
        assert line.endswith(f", the manifest says {hashlib.sha256(data).hexdigest()}")
        (packed / name).unlink()
        assert problems() == [f"out: {name}: is missing"]
        (packed / name).write_bytes(data)
    (packed / "notes.txt").write_text("mine")
    (packed / "shard-00001-000.arrow").write_bytes(b"")
    (packed / "folder").mkdir()
    foreign = "a foreign file: the manifest does not list it"
    names = ("folder", "notes.txt", "shard-00001-000.arrow")
    assert problems() == [f"out: {name}: {foreign}" for name in names]
    result = packer("verify", "out", "--against-inputs")
    assert result.exit_code == 1
    assert "not compared with the inputs: the result itself has problems" in result.stderr


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


# Inputs that are others


def test_changed_inputs(packed: Path) -> None:
    path = Path("a.jsonl")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"bbb", b"bxb"))
    (line,) = problems("--against-inputs")
    assert line.startswith("out: a.jsonl: its sha256 is ")
    assert line.endswith(f", the manifest says {hashlib.sha256(data).hexdigest()}")
    path.write_bytes(data + b"\n")
    message = f"has {len(data) + 1} bytes, the manifest says {len(data)}"
    assert problems("--against-inputs") == [f"out: a.jsonl: {message}"]
    assert_sound()


def test_inputs_that_are_gone_beside_others(folder: Path) -> None:
    assert packer("pack", *write_mixed(folder), "-q", "-o", "out").exit_code == 0
    (folder / "b.jsonl").unlink()
    result = packer(*ALL, "-q")
    assert result.exit_code == 1
    problem = "out: b.jsonl: cannot read: No such file or directory\n"
    assert result.stdout == problem
    assert result.stderr.splitlines()[1] == (
        "tip: restore them, or run packer pack --add on the inputs as they are now"
    )


def test_stdin_cannot_be_read_again(folder: Path) -> None:
    result = unaltered("pack", "-", "-l", 16, "-q", "-o", "out", stdin=jsonl(*TEXTS))
    assert result.returncode == 0, result.stderr
    result = packer("verify", "out", "--against-inputs")
    assert result.exit_code == 0
    assert "-: came from stdin, which cannot be read again: not compared" in result.stderr
    assert "0 documents of 0 inputs" in result.stdout


def replace_input(path: Path, data: bytes, number: int = 0) -> None:
    """Change an input, and what the manifest says of it."""
    path.write_bytes(data)
    result = Result("out")
    listed = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    result.manifest["inputs"][number].update(listed)
    result.save()


@pytest.mark.parametrize("sample", ["all", "1000"])
def test_documents_that_are_not_those_of_the_inputs(folder: Path, sample: str) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("one", "two", "three"))
    pack("a.jsonl", "-l", 16, "--no-shuffle", "--strategy", "next-fit")
    row = f"row 0 of {first()}"
    for documents, problem in (
        (["one", "twx", "three"], f"{first()}: input_ids has 111 at place 6 of {row}, 120 expected "
         "when encoded again: in segment 1, of 4 tokens of a.jsonl, line 2 (byte 16)"),
        (["one", "twoo", "three"], f"{first()}: segment 1 of {row} is 4 tokens of a.jsonl, line 2 "
         "(byte 16), 5 tokens of a.jsonl, line 2 (byte 16) expected by the options of the "
         "manifest"),
        (["one", "two", "three", "four"], "unit 0: its rows end after 1, its inputs make more"),
        (["one", "two", "", "three"], f"{first()}: segment 2 of {row} is 6 tokens of a.jsonl, line "
         "3 (byte 32), 6 tokens of a.jsonl, line 4 (byte 45) expected by the options of the "
         "manifest"),
        (["one", "two"], f"{first()}: segment 2 of {row} is 6 tokens of a.jsonl, line 3 (byte 32), "
         "none expected by the options of the manifest"),
        (["one", "two", "three", 4], "unit 0: cannot be packed again: a.jsonl, line 4 (byte 50): "),
    ):  # fmt: skip
        lines = [json.dumps({"text": one}) for one in documents]
        replace_input(folder / "a.jsonl", "".join(f"{line}\n" for line in lines).encode())
        (line,) = problems("--against-inputs", "--sample", sample)
        assert line.startswith(f"out: {problem}")


def blank_half(data: bytes) -> bytes:
    """Every second line is spaces, so that the others are where they were."""
    lines = data.splitlines(keepends=True)
    return b"".join(
        line if i % 2 else b" " * (len(line) - 1) + b"\n" for i, line in enumerate(lines)
    )


MANY = [f"{i} " + "x" * (i % 11) for i in range(400)]
HALF = [text if i % 2 else "" for i, text in enumerate(MANY)]
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
        lambda path: pq.write_table(pa.table({"text": HALF}), path, row_group_size=30),
        lambda path: pq.write_table(pa.table({"text": MANY}), path, row_group_size=30),
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_sample_notices_documents_that_rows_lack(folder: Path, name: str) -> None:
    write_half, write_all = LACKING[name]
    write_half(folder / name)
    pack(name, "-t", "bytes", "-l", 64, "--unit-bytes", 10000)
    assert packer("verify", "out", "--against-inputs", "--sample", 40).exit_code == 0
    write_all(folder / name)
    replace_input(folder / name, (folder / name).read_bytes())
    for sample in (40, "all"):
        (line, *_) = problems("--against-inputs", "--sample", sample)
        assert line.startswith("out: shard-0")
        assert " of row 0 of shard-0" in line
        assert f" tokens of {name}, " in line


def test_a_sample_notices_an_input_all_of_whose_documents_are_gone(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*MANY))
    (folder / "b.jsonl").write_bytes(b" " * 50 + b"\n")
    pack("a.jsonl", "b.jsonl", "-t", "bytes", "-l", 64)
    replace_input(folder / "b.jsonl", jsonl("what is gone" * 2), 1)
    (line,) = problems("--against-inputs", "--sample", 5)
    assert " of row 0 of shard-00000" in line


# Labels: held against the reference, not against the code that made them


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
        checked = packer("verify", "out", "--against-inputs", "--sample", sample, "-q")
        assert checked.exit_code == 1, checked.stdout
        assert "labels has -100 at place " in checked.stdout


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
        *ENDS, *AS_TEXT, "--overlong", "truncate-turns", "-l", "150"
    ),
    "prompts through a template": (*ENDS, *AS_TEXT, "--prompt-template", "chat"),
}  # fmt: skip


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
    for file, some in (("a.jsonl", records[:10]), ("b.jsonl", records)):  # the second by --add
        Path("data").mkdir(exist_ok=True)
        (Path("data") / file).write_text("".join(json.dumps(one) + "\n" for one in some))
        options = ["-l", 400] if "-l" not in CONVERSATIONS[name] else []
        packed = packer(
            "pack", "data", "-t", tokenizer, "-o", "out", "-q", "--add", *options,
            *CONVERSATIONS[name],
        )  # fmt: skip
        assert packed.exit_code == 0, packed.stderr
    for sample in ("all", 20):
        checked = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert checked.exit_code == 0, checked.stdout + checked.stderr
    result = Result("out")
    untrain(result)
    result.save()
    for sample in ("all", 50):
        checked = packer("verify", "out", "--against-inputs", "--sample", sample, "-q")
        assert checked.exit_code == 1, checked.stdout
        assert "labels has -100 at place " in checked.stdout
