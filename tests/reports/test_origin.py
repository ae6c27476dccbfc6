"""What reports say that a result was made of and with, before they show any figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from chats import TAGS, assistant, chat, user, write
from showing import on_terminal
from support import jsonl, packer

pytestmark = pytest.mark.usefixtures("folder")
CONFIG = {"eos_token": tiny_tokenizers.EOS, "bos_token": tiny_tokenizers.BOS}


def tokenizer(**more: Any) -> Path:
    config = {"tokenizer_config": CONFIG | more}
    return tiny_tokenizers.save(Path("my-model"), tiny_tokenizers.byte_level(), **config)


def origin(*arguments: object) -> dict[str, str]:
    """What `packer pack` says first, by its titles; `packer stats` says the same."""
    packed = packer("pack", *arguments, "-q", "-o", "out", "--overwrite")
    assert packed.exit_code == 0, packed.stderr
    shown = packer("stats", "out").stdout
    assert shown.startswith(packed.stdout)
    origin_text, figures = packed.stdout.split("\n\n", 1)
    directory, *lines = origin_text.splitlines()
    assert directory == "out"
    assert figures.startswith("utilization ")
    return {line[:13].strip(): line[13:] for line in lines}


def as_json() -> Any:
    return json.loads(packer("stats", "out", "--json").stdout)


def test_text_with_a_tokenizer() -> None:
    Path("a.jsonl").write_bytes(jsonl("one", "two"))
    Path("b.jsonl").write_bytes(jsonl("three" * 1000))
    folder = tokenizer()
    lines = origin("a.jsonl", "b.jsonl", "-l", 32, "-t", folder)
    report = as_json()
    digest = report["tokenizer"]["sha256"]
    assert lines == {
        "made from": "2 inputs, 5.0 kB",
        "tokenizer": f"my-model, sha256 {digest[:12]}; 400 ids",
        "EOS": "</s> (1), after every document",
        "BOS": "<s> (0), not added",
        "records": "text; trained on: all",
        "options": "--max-length 32 --strategy best-fit --overlong split",
    }
    assert list(report)[:5] == ["directory", "inputs", "tokenizer", "chat_template", "config"]
    size = Path("a.jsonl").stat().st_size + Path("b.jsonl").stat().st_size
    assert report["inputs"] == {"count": 2, "bytes": size}
    assert report["chat_template"] is None
    assert report["config"] == json.loads(Path("out/manifest.json").read_bytes())["config"]
    assert (report["tokenizer"]["eos_token"], report["tokenizer"]["suffix"]) == ("</s>", [1])


def test_special_tokens_as_they_are_added() -> None:
    Path("a.jsonl").write_bytes(jsonl("one", "two"))
    lines = origin("a.jsonl", "-l", 32, "-t", tokenizer(), "--bos", "--no-eos")
    assert (lines["BOS"], lines["EOS"]) == ("<s> (0), before every document", "</s> (1), not added")
    lines = origin("a.jsonl", "-l", 32, "-t", tokenizer(), "--eos-token", "<s>")
    assert lines["EOS"] == "<s> (0), after every document"
    assert lines["options"].endswith(" --eos-token '<s>'")


def test_the_built_in_tokenizer() -> None:
    Path("a.jsonl").write_bytes(jsonl("one"))
    lines = origin("a.jsonl", "-l", 32)
    assert lines["tokenizer"] == "built-in bytes, as when no --tokenizer is given; 258 ids"
    assert (lines["EOS"], lines["BOS"]) == ("<eos> (256), after every document", "none")
    assert origin("a.jsonl", "-l", 32, "-t", "bytes") == lines


def test_token_ids_that_come_without_a_tokenizer() -> None:
    Path("a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    lines = origin("a.jsonl", "-l", 32)
    assert lines["tokenizer"] == "none: the inputs hold token ids"
    assert lines.keys().isdisjoint({"EOS", "BOS"})
    assert as_json()["tokenizer"] is None


def test_chats_with_their_template() -> None:
    write([chat(user("hello"), assistant("hi"))])
    lines = origin("data.jsonl", "-l", 64, "-t", tokenizer(chat_template=TAGS))
    digest = as_json()["chat_template"]["sha256"]
    assert lines["records"] == "messages; trained on: assistant"
    assert lines["options"] == "--max-length 64 --strategy best-fit --overlong drop"
    assert lines["template"] == f"of the tokenizer, sha256 {digest[:12]}"
    assert lines["EOS"] == "</s> (1), left to the chat template"
    Path("other.jinja").write_text(TAGS)
    lines = origin(
        "data.jsonl", "-l", 64, "-t", tokenizer(), "--chat-template", "other.jinja",
        "--train-on", "last-assistant", "--turn-end", "<s>", "--turn-end", "</s>",
    )  # fmt: skip
    assert lines["options"].endswith(" --turn-end '<s>' --turn-end '</s>'")
    assert lines["template"] == f"other.jinja, sha256 {digest[:12]}"
    assert lines["records"] == "messages; trained on: last-assistant"
    assert as_json()["chat_template"] == {"source": "other.jinja", "sha256": digest}
    no = ("--no-train-reasoning", "--no-train-tool-calls")
    lines = origin("data.jsonl", "-l", 64, "-t", tokenizer(chat_template=TAGS), *no)
    assert lines["options"].endswith(" --no-train-reasoning --no-train-tool-calls")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--seed", 7, "--no-shuffle"], "--seed 7 --overlong split --no-shuffle"),
        (["--strategy", "nf"], "--strategy next-fit --overlong split"),
        (["--overlong", "drop", "--position-ids"], "--overlong drop --position-ids"),
        (["--columns", "input_ids,cu_seqlens"], "--columns input_ids,cu_seqlens"),
        (["--segment-multiple", 8], "--segment-multiple 8"),
        (["--max-loss", "0"], "--max-loss 0"),
        (["--on-error", "skip", "--max-errors", "0.5"], "--on-error skip --max-errors 0.5"),
        (["--separator", " \n"], "--separator ' \\n'"),
        (["--text-field", "my text"], "--field 'text=my text'"),
        (["--label-shift", "pre"], "--label-shift pre"),
        (["--special-tokens-in-text", "text"], "--special-tokens-in-text text"),
    ],
)
def test_options_that_are_not_as_by_default(given: list[object], shown: str) -> None:
    Path("a.jsonl").write_text('{"text": "one", "my text": "two"}\n')
    options = origin("a.jsonl", "-l", 32, "-t", "bytes", *given)["options"]
    assert options.startswith("--max-length 32 --strategy ")
    assert options.endswith(shown)


def test_alpaca_prompts() -> None:
    write([{"instruction": "say", "input": "", "output": "yes"}])
    lines = origin("data.jsonl", "-l", 512, "-t", "bytes")
    assert lines["records"] == "alpaca, prompts as alpaca; trained on: completion"


def test_inputs_that_were_dropped_are_not_counted() -> None:
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_bytes(jsonl(name))
    arguments = ["-l", 32, "-t", "bytes", "-q", "-o", "out"]
    assert packer("pack", "a.jsonl", "b.jsonl", *arguments).exit_code == 0
    assert packer("pack", "b.jsonl", *arguments, "--update", "--prune").exit_code == 0
    assert as_json()["inputs"] == {"count": 1, "bytes": Path("b.jsonl").stat().st_size}


def test_a_terminal_of_80_columns_cuts_nothing_off() -> None:
    deep = Path("a" * 60, "b" * 60)
    deep.mkdir(parents=True)
    (deep / "c.jsonl").write_bytes(jsonl("one"))
    folder = tiny_tokenizers.save(
        deep / "my-model", tiny_tokenizers.byte_level(), tokenizer_config=CONFIG
    )
    options = ["--seed", 7, "--max-loss", 0.5, "--position-ids", "--label-shift", "pre"]
    done = packer("pack", deep / "c.jsonl", "-l", 32, "-q", "-t", folder, "-o", "out", *options)
    assert done.exit_code == 0
    for by in ("input", "shard"):
        shown = on_terminal("stats", "out", "--by", by, NO_COLOR="1", TERM="dumb")
        lines = [line for line in shown.splitlines() if not line.endswith("c.jsonl")]
        assert max(map(len, lines)) <= 80  # but for a long name, which stays whole
        whole = "".join(shown.split())
        name = "shard-00000-000" if by == "shard" else str(deep / "c.jsonl")
        for part in (str(folder), "--position-ids", "--max-loss0.5", name):
            assert part in whole
