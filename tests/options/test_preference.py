"""Preference records are refused, in every form that tools write them, and what the tip says packs
the good answers alone.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from chats import TAGS, assistant, chat, marked, run, user, write
from support import assert_error, packer, succeeds

ASKED, GOOD, BAD = user("2+2="), assistant("4"), assistant("5")
TALK, WRONG = [ASKED, GOOD], [ASKED, BAD]
MARKED, PAIR = "<user>2+2=</user><assistant>⟦4</assistant>⟧", "2+2=⟦4<eos>⟧"
ALPACA = "### Instruction:\n2+2=\n\n### Response:\n⟦4<eos>⟧"
TEXTS, MESSAGES = {"chosen": "4", "rejected": "5"}, {"chosen": [GOOD], "rejected": [BAD]}
ANSWERED = {"prompt": "2+2=", "completion": "4"}
_FROM = [{"from": "human", "value": "2+2="}]
_SAYS = {"chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}}

# record -> the fields that the error names, the option in its tip, how the document ends with it
RECORDS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "TRL": ({"prompt": "2+2="} | TEXTS, "chosen, rejected", "completion=chosen", PAIR),
    "a prompt in both": ({"chosen": TALK, "rejected": WRONG}, "chosen, rejected",
                         "messages=chosen", MARKED),
    "UltraFeedback": ({"prompt": "2+2=", "chosen": TALK, "rejected": WRONG, "messages": TALK,
                       "score_chosen": 8.5}, "chosen, rejected", "messages=chosen", MARKED),
    "JSON text": ({"prompt": json.dumps([ASKED]), "chosen": json.dumps([GOOD]),
                   "rejected": json.dumps([BAD])}, "chosen, rejected", "completion=chosen", MARKED),
    "HH-RLHF": ({"chosen": "Human: 2+2= Assistant: 4", "rejected": "Human: 2+2= Assistant: 5"},
                "chosen, rejected", "text=chosen", "uman: 2+2= Assistant: 4<eos>⟧"),
    "LLaMA-Factory": ({"conversations": _FROM} | _SAYS, "chosen, rejected",
                      "prompt=conversations --field completion=chosen", MARKED),
    "messages in objects": ({"chosen": {"messages": TALK}, "rejected": {"messages": WRONG}},
                            "chosen, rejected", "messages=chosen.messages", MARKED),
    "two texts": ({"text_chosen": "2+2=4", "text_rejected": "2+2=5"},
                  "text_chosen, text_rejected", "text=text_chosen", "2⟦+2=4<eos>⟧"),
    "LLaMA-Factory, alpaca": ({"instruction": "2+2=", "input": ""} | TEXTS, "chosen, rejected",
                              "output=chosen", ALPACA),
    "argilla": ({"instruction": "2+2=", "chosen_response": "4", "rejected_response": "5"},
                "chosen_response, rejected_response", "output=chosen_response", ALPACA),
    "OpenAI": ({"input": {"messages": [ASKED]}, "preferred_output": [GOOD],
                "non_preferred_output": [BAD]}, "preferred_output, non_preferred_output",
               "prompt=input.messages --field completion=preferred_output", MARKED),
    "ms-swift": (chat(*TALK, rejected_response="5"), "rejected_response", "messages=messages",
                 MARKED),
    "ms-swift, older": ({"query": "2+2=", "response": "4", "rejected_response": "5"},
                        "rejected_response", "completion=response", PAIR),
    "no bad answer": ({"prompt": "2+2=", "chosen": "4"}, "chosen", "completion=chosen", PAIR),
    "a bad answer of null": ({"prompt": "2+2=", "chosen": "4", "rejected": None},
                             "chosen, rejected", "completion=chosen", PAIR),
    "KTO": (ANSWERED | {"label": True}, "label is true or false",
            "completion=completion", PAIR),
    "KTO of LLaMA-Factory": ({"instruction": "2+2=", "output": "4", "kto_tag": True},
                             "kto_tag is true or false", "output=output", ALPACA),
}  # fmt: skip
IN_TABLES = (
    "TRL",
    "JSON text",
    "LLaMA-Factory",
    "OpenAI",
    "ms-swift",
    "KTO",
    "KTO of LLaMA-Factory",
)


def options_in(tip: str) -> list[str]:
    """The options that a tip names."""
    match = re.search(
        r"(--(shape|field) \S+ )+--prompt-template chat|(--(shape|field) \S+ ?)+", tip
    )
    assert match, tip
    return shlex.split(match[0])


def in_form(form: str, record: dict[str, Any]) -> Path:
    """A file of three such records."""
    records = [record] * 3
    if form == "jsonl":
        return write(records)
    path, table = Path(f"data.{form}"), pa.Table.from_pylist(records)
    if form == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    return path


@pytest.mark.parametrize(
    ("form", "name"),
    [("jsonl", name) for name in RECORDS]
    + [(form, name) for form in ("parquet", "arrow") for name in IN_TABLES],
)
def test_what_the_tip_says_packs_the_good_answers(folder: Path, form: str, name: str) -> None:
    record, fields, option, text = RECORDS[name]
    data = in_form(form, record)
    refused = run(data, template=None)
    assert_error(refused, 2, f"{data}: preference records ({fields})")
    assert f" --field {option} " in refused.stderr.replace("\n", " ")
    assert not Path("out").exists()
    done = run(data, *options_in(refused.stderr), template=TAGS if text == MARKED else None)
    assert done.exit_code == 0, done.stderr
    made = marked("out")
    assert len(made) == 3
    assert all(one.endswith(text) and "5" not in one for one in made)


@pytest.mark.parametrize("command", ["pack", "tokenize", "plan", "recipe"])
@pytest.mark.parametrize("name", ["TRL", "ms-swift", "KTO"])
def test_every_command_refuses_them(folder: Path, command: str, name: str) -> None:
    record, fields, *_ = RECORDS[name]
    write([record])
    recipe = (
        'max_length = 64\ntokenizer = "bytes"\n[[source]]\nname = "a"\ninputs = ["data.jsonl"]\n'
    )
    Path("mix.toml").write_text(recipe)
    arguments: dict[str, tuple[object, ...]] = {
        "pack": ("pack", "data.jsonl", "-l", 64, "-o", "out"),
        "tokenize": ("tokenize", "data.jsonl", "-o", "out"),
        "plan": ("plan", "data.jsonl", "-l", 64),
        "recipe": ("pack", "mix.toml", "-o", "out"),
    }
    of_bytes = () if command == "recipe" else ("-t", "bytes")
    refused = packer(*arguments[command], *of_bytes, "-q")
    assert refused.exit_code == 2
    assert f"preference records ({fields})" in refused.stderr


@pytest.mark.parametrize("name", ["TRL", "LLaMA-Factory", "OpenAI", "ms-swift"])
def test_the_tip_for_a_source_of_a_recipe_is_its_keys(folder: Path, name: str) -> None:
    """Options of the command line would be for all sources."""
    record, _, _, text = RECORDS[name]
    write([record] * 2, "a.jsonl")
    write([ANSWERED], "b.jsonl")
    Path("t.jinja").write_text(TAGS)
    recipe = (
        'max_length = 256\ntokenizer = "bytes"\n[[source]]\nname = "b"\ninputs = ["b.jsonl"]\n'
        '[[source]]\nname = "a"\ninputs = ["a.jsonl"]\n'
    )
    recipe += 'chat_template = "./t.jinja"\n' * (text == MARKED)
    Path("mix.toml").write_text(recipe)
    refused = packer("pack", "mix.toml", "-o", "out", "-q")
    assert refused.exit_code == 2
    keys = re.search(r"add (.*) in the source to train", refused.stderr)
    assert keys
    Path("mix.toml").write_text(recipe + keys[1] + "\n")
    succeeds("pack", "mix.toml", "-o", "out", "-q")
    assert sorted(marked("out")) == sorted([PAIR, text, text])


@pytest.mark.parametrize(
    "record",
    [
        {"context": [ASKED], "completions": [{"rank": 0, "completion": [GOOD]},
                                             {"rank": 1, "completion": [BAD]}]},
        {"instruction": "2+2=", "completions": [{"response": "4", "overall_score": 9},
                                                {"response": "5", "overall_score": 1}]},
        {"conversation_a": TALK, "conversation_b": WRONG, "winner": "model_a"},
        {"prompt": "2+2=", "response_0": "4", "response_1": "5", "better_response_id": 0},
        {"context": [ASKED], "response1": "4", "response2": "5", "overall_preference": -2},
        {"prompt": "2+2=", "responses": ["4", "5"], "scores": [9, 1]},
        {"messages": [ASKED], "response_a": "4", "response_b": "5"},
        {"messages": [ASKED], "answers": [{"answer": "4", "rank": 1}, {"answer": "5", "rank": 2}]},
    ],
)  # fmt: skip
def test_answers_with_ranks_are_refused_and_no_option_helps(folder: Path, record: Any) -> None:
    refused = run([record], template=None)
    assert_error(refused, 2, "data.jsonl: preference records (")
    assert "tip: write the good answers as" in refused.stderr


def test_a_shape_that_is_asked_for(folder: Path) -> None:
    record = chat(*TALK, chosen=TALK, rejected=WRONG)
    refused = run([record], "--shape", "messages")
    assert_error(refused, 2, "preference records (chosen, rejected)")
    assert "--field messages=chosen " in refused.stderr
    refused = run([{"prompt": "2+2=", "messages": TALK} | TEXTS], "--shape", "messages")
    option = "--shape prompt-completion --field completion=chosen"
    assert f"add {option} --prompt-template chat to" in refused.stderr
    done = run(Path("data.jsonl"), "--shape", "messages", *options_in(refused.stderr))
    assert done.exit_code == 0, done.stderr
    assert marked("out") == [MARKED]


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        (chat(*TALK), chat(*TALK, rejected_response="5"), MARKED),
        (chat(*TALK), chat(*TALK, dispreferred_output="5"), MARKED),
        (chat(*TALK), {"chosen": TALK, "rejected": WRONG, "messages": TALK}, MARKED),
        (ANSWERED, ANSWERED | {"label": True}, PAIR),
    ],
)
def test_records_later_in_a_file(folder: Path, good: Any, bad: Any, text: str) -> None:
    """The records that begin in the first 64 KiB are looked at."""
    records = [good] * 99 + [bad, good]
    refused = run(records)
    assert_error(refused, 2, "data.jsonl: preference records (")
    write([good] * 9, "a.jsonl")  # each file is looked at
    both = packer("pack", "a.jsonl", "data.jsonl", "-l", 64, "-t", "bytes", "-o", "out", "-q")
    assert both.stderr == refused.stderr
    template = TAGS if text == MARKED else None
    assert run(records, *options_in(refused.stderr), template=template).exit_code == 0
    assert marked("out") == [text] * 101


def test_records_later_in_a_file_that_no_option_packs(folder: Path) -> None:
    """The first record has no such field, so that --field is an error."""
    refused = run([ANSWERED] * 3 + [{"prompt": "2+2="} | TEXTS])
    assert_error(refused, 2, "data.jsonl: preference records (chosen, rejected)")
    assert 'write the good answers as {"messages": [...]}' in refused.stderr


@pytest.mark.parametrize(
    ("record", "options"),
    [
        (chat(*TALK, label=3), ()),
        (chat(*TALK, label="arithmetic"), ()),
        (chat(*TALK, label=True), ("--carry", "label:bool")),
        (chat(*TALK, rejected=2, chosen=1), ()),
        ({"text": "2+2=", "label": True}, ()),
        ({"input_ids": [1, 2], "rejected": "5"}, ()),
        ({"prompt_ids": [1], "completion_ids": [2], "rejected": "5"}, ()),
        ({"messages": TALK, "rejected": WRONG}, ("--field", "messages=messages")),
    ],
)
def test_records_that_are_not_of_preference(
    folder: Path, record: dict[str, Any], options: tuple[str, ...]
) -> None:
    assert run([record], *options, template=TAGS if "messages" in record else None).exit_code == 0


def test_records_that_no_option_packs(folder: Path) -> None:
    record = {"context": 1, "chosen": [{"said": "4"}], "rejected": [{"said": "5"}]}
    refused = run([record], template=None)
    assert_error(refused, 2, "preference records (chosen, rejected)")
    assert 'write the good answers as {"messages": [...]}' in refused.stderr
