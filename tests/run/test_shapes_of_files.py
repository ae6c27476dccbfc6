"""Inputs whose files have different shapes: each is packed as what it is, by the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from altered import unaltered
from chats import assistant, chat, marked, user, write
from support import assert_error, check_directory, jsonl, packer, succeeds

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
OPTIONS = ["-t", "bytes", "--chat-template", "chat.jinja"]
PACK = [*OPTIONS, "-l", 256]
QUIET = [*PACK, "-q"]
MESSAGES = "sft/messages.jsonl"
NAMES = ["alpaca", "messages", "prompts", "sharegpt"]


@pytest.fixture(autouse=True)
def sft(folder: Path) -> Path:
    Path("chat.jinja").write_text(TEMPLATE)
    (folder / "sft").mkdir()
    count = range(6)
    write([{"instruction": f"do {i}", "input": "x" * i, "output": f"done {i}"} for i in count],
          "sft/alpaca.jsonl")  # fmt: skip
    write([chat(user(f"hi {i}"), assistant(f"yes {i}")) for i in count], "sft/messages.jsonl")
    write([{"question": f"why {i}", "answer": f"so {i}"} for i in count], "sft/prompts.jsonl")
    write([{"conversations": [{"from": "human", "value": f"well {i}"},
                              {"from": "gpt", "value": "no"}]} for i in count],
          "sft/sharegpt.jsonl")  # fmt: skip
    return folder / "sft"


def write_texts() -> None:
    Path("sft/texts.jsonl").write_bytes(jsonl("a text", "another", "t" * 300))


def run(*arguments: object) -> str:
    """What it says on stderr, when it succeeds."""
    done = succeeds(*arguments)
    return done.stderr


def manifest_of(directory: str = "out") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(directory, "manifest.json").read_bytes())
    return content


def shapes(directory: str = "out") -> dict[str, str | None]:
    return {Path(one["path"]).stem: one.get("shape") for one in manifest_of(directory)["inputs"]
            if not one.get("removed")}  # fmt: skip


def verify(directory: str = "out") -> None:
    for sample in ("all", 5):
        succeeds("verify", directory, "--against-inputs", "--sample", sample)


def test_every_file_is_packed_as_what_it_is() -> None:
    said = run("pack", "sft", *PACK, "-o", "out")
    for line in (
        "packer: sft/alpaca.jsonl: alpaca", "packer: sft/messages.jsonl: messages",
        "packer: sft/prompts.jsonl: prompt-completion (prompt=question, completion=answer)",
        "packer: sft/sharegpt.jsonl: conversations",
        "packer: chat template: chat.jinja; trained on: completion or assistant "
        "(found from turn markers)",
    ):  # fmt: skip
        assert line in said.splitlines()
    manifest = check_directory("out")
    assert (manifest["documents"], manifest["rejected_records"]) == (24, 0)
    assert manifest["config"]["shape"] == "mixed"
    assert shapes() == {
        "alpaca": "alpaca", "messages": "messages", "prompts": "prompt-completion",
        "sharegpt": "conversations",
    }  # fmt: skip
    verify()
    again = "pack", "sft", *PACK, "-o", "out"
    assert "packer: out: up to date" in run(*again)
    assert "packer: out: already finished" in run(*again, "--rank", 0, "--world-size", 2)


CHATS = ("messages", "sharegpt")
OF_SOME = {  # options, and the files that have what they are for
    (): (),
    ("--prompt-template", "chat"): ("alpaca", "prompts"),
    ("--train-on", "all"): (*NAMES, "texts"),
    ("--train-on", "final"): CHATS,
    ("--turns", "each"): CHATS,
    ("--no-train-reasoning", "--no-train-tool-calls", "--allow-open-turns"): CHATS,
    ("--turn-end", "\n", "--on-unshown", "error"): CHATS,
}


@pytest.mark.parametrize("options", OF_SOME)
def test_documents_are_those_of_a_run_of_their_own(options: tuple[str, ...]) -> None:
    """Whatever shapes the other files have, which options for one do not concern; as rows, and
    tokenized first.
    """
    write_texts()
    run("pack", "sft", *OPTIONS, *options, "-l", 512, "--overlong", "drop", "-o", "out")
    run("tokenize", "sft", *OPTIONS, *options, "-o", "tokens")
    verify("tokens")
    run("pack", "tokens", "-l", 512, "--overlong", "drop", "-o", "twice")
    together = list[str]()
    for name in [*NAMES, "texts"]:
        given = options if name in OF_SOME[options] else ()
        is_rendered = name in CHATS or "chat" in given
        own = OPTIONS if is_rendered else OPTIONS[:2]
        run("pack", f"sft/{name}.jsonl", *own, *given, "-l", 512, "-o", name)
        together += marked(name)
    assert marked("out") == together
    assert sorted(marked("twice")) == sorted(together)
    assert len(together) == 27


TALKS = [MESSAGES, "sft/sharegpt.jsonl"]
REFUSED = [
    (["sft", "other.jsonl"], 1, "other.jsonl: the records' fields fit none of", "title, body"),
    (["sft", "other.jsonl", "--on-error", "skip"], 1, "other.jsonl: the records' fields fit none"),
    (["sft", "--shape", "messages"], 1, "sft/alpaca.jsonl: the records' fields fit none of: mess"),
    (["sft", "tokens.jsonl"], 1, "tokens.jsonl: holds tokens, sft/alpaca.jsonl holds alpaca"),
    ([*TALKS, "--train-on", "completion"], 2, "completion does not apply to messages or"),
    ([*TALKS, "--prompt-template", "alpaca"], 2, "alpaca does not apply to messages or"),
    (["sft/alpaca.jsonl", "sft/prompts.jsonl"], 2, "--chat-template applies only to records",
     "alpaca or prompt-completion"),
    (["sft/alpaca.jsonl", "--train-on", "all", "--add"], 2, "--train-on was assistant, is now all"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case[0]))
def test_what_does_not_go_together_is_refused(case: Any) -> None:
    write([{"title": "x", "body": "y"}], "other.jsonl")
    write([{"input_ids": [1, 2, 3]}], "tokens.jsonl")
    command, code, *message = case
    if "--add" in command:  # what stays has no use for the option
        run("pack", MESSAGES, *PACK, "-o", "out")
    assert_error(packer("pack", *command, *QUIET, "-o", "out"), code, *message)
    assert Path("out").exists() == ("--add" in command)


def test_a_shape_that_is_named_finds_its_fields_in_each_file() -> None:
    write([{"prompt": f"if {i}", "completion": f"then {i}"} for i in range(6)], "sft/others.jsonl")
    inputs = ["sft/prompts.jsonl", "sft/others.jsonl"]
    run("pack", *inputs, "-t", "bytes", "-l", 64, "--shape", "prompt", "-o", "out")
    assert manifest_of()["config"]["shape"] == "prompt-completion"
    assert manifest_of()["documents"] == 12
    verify()


def test_texts_beside_what_must_stay_whole() -> None:
    write_texts()
    run("pack", "sft", *PACK, "-o", "split")
    split = check_directory("split")
    assert split["config"]["overlong"] == "split-text"
    (texts,) = (one for one in split["inputs"] if one["path"].endswith("sft/texts.jsonl"))
    assert (texts["documents"], texts["dropped_documents"]) == (3, 0)
    run("pack", "sft", *PACK, "--overlong", "drop", "-o", "out")
    manifest = check_directory("out")
    (texts,) = (one for one in manifest["inputs"] if one["path"].endswith("sft/texts.jsonl"))
    assert (texts["documents"], texts["dropped_documents"], texts["dropped_tokens"]) == (2, 1, 301)
    assert texts["shape"] == "text"
    # all of a text is trained on, and its EOS; a chat template ends what it has rendered
    assert "prefix" in manifest["tokenizer"]
    assert "suffix" not in manifest["tokenizer"]
    verify()


def test_eos_that_only_prompts_need_is_missed(folder: Path) -> None:
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(), tokenizer_config={"eos_token": "<none>"}
    )
    options = ["-t", "tok", "--chat-template", "chat.jinja", "-l", 256, "-q", "-o", "out"]
    inputs = ["sft/messages.jsonl", "sft/prompts.jsonl"]
    done = packer("pack", *inputs, *options)
    assert_error(done, 2, "tokenizer tok: its EOS token '<none>' is not in the vocabulary")
    run("pack", *inputs, *options, "--no-eos")


def test_turns_of_conversations_alone_become_documents() -> None:
    write_texts()
    turns = [user("one"), assistant("1"), user("two"), assistant("2")]
    write([chat(*turns)] * 2, "sft/messages.jsonl")
    run("pack", "sft", *PACK, "--turns", "each", "--overlong", "drop", "-o", "out")
    documents = {Path(one["path"]).stem: one["documents"] for one in manifest_of()["inputs"]}
    assert documents == {"alpaca": 6, "messages": 4, "prompts": 6, "sharegpt": 6, "texts": 2}
    verify()
    options = [*PACK, "--turns", "each", "--overlong", "drop", "--json"]
    assert json.loads(packer("plan", "sft", *options).stdout)["outcomes"][0]["segments"] == 24


def test_from_stdin_beside_files() -> None:
    inputs = "-", "sft/alpaca.jsonl", "--input-format", "jsonl"
    done = unaltered("pack", *inputs, *PACK, "-o", "out", stdin=Path(MESSAGES).read_bytes())
    assert done.returncode == 0, done.stderr
    assert [one["shape"] for one in manifest_of()["inputs"]] == ["messages", "alpaca"]
    assert check_directory("out")["documents"] == 12


def test_reports_and_plans_know_the_shapes() -> None:
    """Also of batches that say what is trained on, and others that do not."""
    write_texts()
    command = ["sft", *PACK, "--overlong", "drop"]
    run("pack", *command, "-o", "out")
    text = packer("stats", "out", "--by", "input").stdout
    assert re.search(r"conversations +sft/sharegpt.jsonl$", text, re.M)
    assert "records      alpaca, messages, prompt-completion, conversations, text, prompts" in text
    assert "trained on: completion or assistant" in packer("plan", *command).stdout
    planned = json.loads(packer("plan", *command, "--json").stdout)
    assert planned["shape"] == "mixed"
    for total in ("rows", "trained_tokens"):
        assert planned["outcomes"][0][total] == manifest_of()[total]
    write([{"input_ids": [1, 2, 3]}], "a.jsonl")
    write([{"input_ids": [4, 5, 6], "labels": [-100, -100, 6]}], "b.jsonl")
    done = packer("plan", "a.jsonl", "b.jsonl", "-l", 8, "--json")
    assert json.loads(done.stdout)["outcomes"][0]["trained_tokens"] == 3


NEW = chat(user("new"), assistant("it is"))
ALPACA = "sft/alpaca.jsonl"
SMALL = ["--unit-bytes", 40]
# commands, each with records that are written before it, and documents and shapes at the end
UPDATES: dict[str, tuple[list[Any], int, dict[str, str | None]]] = {
    "a named file has another shape now": (
        [["sft", *SMALL], ({ALPACA: [NEW]}, ["sft", *SMALL, "--add"])], 19,
        {"alpaca": "messages", "messages": "messages", "prompts": "prompt-completion",
         "sharegpt": "conversations"},
    ),
    "files of other shapes are added": (
        [[MESSAGES, *SMALL], [ALPACA, *SMALL, "--add"],
         ["sft/sharegpt.jsonl", "sft/prompts.jsonl", *SMALL, "--add"]], 24,
        {"messages": "messages", "alpaca": "alpaca", "sharegpt": "conversations",
         "prompts": "prompt-completion"},
    ),
    "a kept file whose unit is packed again: its shape is found once more": (
        [["sft/prompts.jsonl", MESSAGES],
         ({"b.jsonl": [{"prompt": "a", "completion": "b"}], MESSAGES: [NEW]},
          ["b.jsonl", MESSAGES, "--add"])], 8,
        {"prompts": "prompt-completion", "messages": "messages", "b": "prompt-completion"},
    ),
    "what only the new files take changes nothing of those that stay": (
        [[MESSAGES], [ALPACA, "--prompt-template", "chat", "--add"]], 12,
        {"messages": "messages", "alpaca": "alpaca"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_updates_of_files_of_several_shapes(name: str) -> None:
    commands, documents, expected = UPDATES[name]
    for one in commands:
        files, command = one if isinstance(one, tuple) else ({}, one)
        for path, records in files.items():
            write(records, path)
        run("pack", *command, *PACK, "-o", "out")
        verify()
    assert (manifest_of()["documents"], shapes()) == (documents, expected)
    if documents == 24:
        run("pack", "sft", *SMALL, *PACK, "-o", "whole")
        assert manifest_of()["config"] == manifest_of("whole")["config"]
