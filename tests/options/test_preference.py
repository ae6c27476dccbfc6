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
from support import assert_error, packer

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
