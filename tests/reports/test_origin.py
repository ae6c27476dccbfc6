"""What reports say that a result was made of and with, before they show any figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from approving import assert_approved
from chats import TAGS, assistant, chat, user, write
from showing import on_terminal
from support import jsonl, packer, succeeds

pytestmark = pytest.mark.usefixtures("folder")
CONFIG = {"eos_token": tiny_tokenizers.EOS, "bos_token": tiny_tokenizers.BOS}


def tokenizer(**more: Any) -> Path:
    config = {"tokenizer_config": CONFIG | more}
    return tiny_tokenizers.save(Path("my-model"), tiny_tokenizers.byte_level(), **config)


def origin(*arguments: object) -> dict[str, str]:
    """What `packer pack` says first, by its titles; `packer stats` says the same."""
    packed = succeeds("pack", *arguments, "-q", "-o", "out", "--overwrite")
    shown = packer("stats", "out").stdout
    assert shown.startswith(packed.stdout)
    origin_text, figures = packed.stdout.split("\n\n", 1)
    directory, *lines = origin_text.splitlines()
    assert directory == "out"
    assert figures.startswith("utilization ")
    return {line[:13].strip(): line[13:] for line in lines}


def as_json() -> Any:
    return json.loads(packer("stats", "out", "--json").stdout)


def test_inputs_tokenizers_and_templates() -> None:
    """Special tokens as they are added, the built-in tokenizer, ids without one, chats."""
    Path("a.jsonl").write_bytes(jsonl("one", "two"))
    Path("b.jsonl").write_bytes(jsonl("three" * 1000))
    Path("ids.jsonl").write_text('{"input_ids": [1, 2]}\n')
    write([chat(user("hello"), assistant("hi"))], "chat.jsonl")
    write([{"instruction": "say", "input": "", "output": "yes"}], "alpaca.jsonl")
    Path("other.jinja").write_text(TAGS)
    model = tokenizer()
    commands: list[tuple[object, ...]] = [
        ("a.jsonl", "b.jsonl", "-t", model),
        ("a.jsonl", "-t", model, "--bos", "--no-eos"),
        ("a.jsonl", "-t", model, "--eos-token", "<s>"),
        ("a.jsonl", "-t", "bytes"),
        ("ids.jsonl",),
        ("alpaca.jsonl", "-l", 512, "-t", "bytes"),
        ("chat.jsonl", "-t", model, "--chat-template", "other.jinja", "--train-on",
         "last-assistant", "--turn-end", "<s>", "--turn-end", "</s>"),
    ]  # fmt: skip
    shown = [origin(*command, *(() if "-l" in command else ("-l", 64))) for command in commands]
    model = tokenizer(chat_template=TAGS)
    no = ("--no-train-reasoning", "--no-train-tool-calls")
    shown.append(origin("chat.jsonl", "-l", 64, "-t", model, *no))
    texts = ["\n".join(f"{name:12} {text}" for name, text in one.items()) for one in shown]
    assert_approved("what a result was made of", *texts)


def test_json_of_what_a_result_was_made_of() -> None:
    write([chat(user("hello"), assistant("hi"))])
    succeeds("pack", "data.jsonl", "-l", 64, "-t", tokenizer(chat_template=TAGS), "-q",
                    "-o", "out")  # fmt: skip
    report, manifest = as_json(), json.loads(Path("out/manifest.json").read_bytes())
    assert list(report)[:5] == ["directory", "inputs", "tokenizer", "chat_template", "config"]
    assert report["inputs"] == {"count": 1, "bytes": Path("data.jsonl").stat().st_size}
    assert (report["config"], report["tokenizer"]) == (manifest["config"], manifest["tokenizer"])
    sha256 = manifest["side_files"]["chat_template.jinja"]
    assert report["chat_template"] == {"source": None, "sha256": sha256}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--seed", 7, "--no-shuffle"], "--seed 7 --overlong split --no-shuffle"),
        (["--strategy", "nf"], "--strategy next-fit --overlong split"),
        (["--columns", "input_ids,cu_seqlens"], "--columns input_ids,cu_seqlens"),
        (["--segment-multiple", 8], "--segment-multiple 8"),
        (["--max-loss", "0"], "--max-loss 0"),
        (["--on-error", "skip", "--max-errors", "0.5"], "--on-error skip --max-errors 0.5"),
        (["--text-field", "my text"], "--field 'text=my text'"),
        (["--special-tokens-in-text", "error"], "--special-tokens-in-text error"),
    ],
)
def test_options_that_are_not_as_by_default(given: list[object], shown: str) -> None:
    Path("a.jsonl").write_text('{"text": "one", "my text": "two"}\n')
    options = origin("a.jsonl", "-l", 32, "-t", "bytes", *given)["options"]
    assert options.startswith("--max-length 32 --strategy ")
    assert options.endswith(shown)


def test_a_terminal_of_80_columns_cuts_nothing_off() -> None:
    deep = Path("a" * 60, "b" * 60)
    deep.mkdir(parents=True)
    (deep / "c.jsonl").write_bytes(jsonl("one"))
    folder = tiny_tokenizers.save(
        deep / "my-model", tiny_tokenizers.byte_level(), tokenizer_config=CONFIG
    )
    options = ["--seed", 7, "--max-loss", 0.5, "--no-shuffle"]
    succeeds("pack", deep / "c.jsonl", "-l", 32, "-q", "-t", folder, "-o", "out", *options)
    for by in ("input", "shard"):
        shown = on_terminal("stats", "out", "--by", by, NO_COLOR="1", TERM="dumb")
        lines = [line for line in shown.splitlines() if not line.endswith("c.jsonl")]
        assert max(map(len, lines)) <= 80  # but for a long name, which stays whole
        whole = "".join(shown.split())
        name = "shard-00000-000" if by == "shard" else str(deep / "c.jsonl")
        for part in (str(folder), "--no-shuffle", "--max-loss0.5", name):
            assert part in whole
