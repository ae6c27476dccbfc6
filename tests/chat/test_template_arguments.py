"""Arguments of chat templates: --template-arg for all records, chat_template_kwargs for one."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from chats import TAGS, assistant, chat, pack_marked, refused, run, user, write
from support import assert_error, check_directory, contents, packer, succeeds

from packer_cli.chat.syntax import reads_of

# A prompt that ends in a closed thought, as Qwen 3 writes it without thinking.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content | default('') }}"
    "\n</think>\n\n{% endif %}{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
DATED = (
    "{% if not date_string is defined %}{% set date_string = 'no day' %}{% endif %}"
    "[{{ date_string }}]"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = chat(user("Hi"), assistant("Yes"))
THOUGHT = chat(user("Hi"), assistant("Yes", reasoning_content="hm"))
OFF = ("--template-arg", "enable_thinking=false")


@pytest.mark.parametrize(
    "setting",
    [
        "{% if m.content %}{% set kind = 1 %}{% else %}{% set kind = 2 %}{% endif %}{{ kind }}",
        "{% if m.role == 'a' %}{% set kind = 1 %}{% elif m.role == 'b' %}{% set kind = 2 %}"
        "{% else %}{% set kind = 3 %}{% endif %}{% for c in m.content %}{{ kind }}{% endfor %}",
        "{% if m.content %}{% set kind %}x{% endset %}{{ kind }}{% endif %}",
    ],
)
def test_variables_that_a_template_sets_itself_are_no_arguments(folder: Path, setting: str) -> None:
    template = TAGS.replace("{{ m.content }}", "{{ m.content }}" + setting)
    assert setting in template
    how: Any = {"options": ["--template-arg", "kind=7"], "template": template}
    refused([PLAIN], 2, "--template-arg: kind: the chat template never reads it", **how)
    # by another way it is not set: then it is an argument
    at_last = template + "{% if kind is defined %}{{ kind }}{% endif %}"
    [text] = pack_marked([PLAIN], "--template-arg", "kind=7", template=at_last)
    assert text.replace("]", "").endswith("7")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ a }}{% set a = 1 %}", "a"),
        ("{% set a = a | default(1) %}{{ a }}", "a"),
        ("{% if b %}{% set a = 1 %}{% endif %}{{ a }}", "ab"),
        ("{% for b in c if a %}{% else %}{{ d }}{% endfor %}", "acd"),
        ("{% macro f(b, c=d) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}", "ad"),
        ("{% with b = a %}{{ b }}{% endwith %}{{ b }}", "ab"),
        ("{% set a %}{{ b }}{% set c = 1 %}{% endset %}{{ a }}{{ c }}", "bc"),
    ],
)
def test_which_variables_come_from_outside(source: str, names: str) -> None:
    assert reads_of(source).names == set(names)


@pytest.mark.parametrize("part", ["{{ 'a' * 10**8 }}", "{% set b = 'a' | center(10**8) %}"])
def test_constants_are_not_computed_to_see_what_a_template_reads(part: str) -> None:
    tracemalloc.start()
    try:
        assert reads_of(part + "{% if a %}{% endif %}").flags == {"a"}
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


# A run with other arguments is another run


def pack(*options: object) -> Any:
    return packer("pack", "data.jsonl", "-l", 512, "-t", "bytes", "-o", "out", "-q", *options)


def test_arguments_are_part_of_the_run(folder: Path) -> None:
    write([PLAIN, THOUGHT])
    Path("t.jinja").write_text(THINKING)
    own = ("--chat-template", "t.jinja", *OFF)
    assert pack(*own).exit_code == 0
    assert pack(*own, "--add").exit_code == 0
    other = ("--chat-template", "t.jinja", "--template-arg", "enable_thinking=true", "--add")
    assert_error(
        pack(*other), 2, "--template-arg was enable_thinking=false, is now enable_thinking=true"
    )
    succeeds("verify", "out", "--against-inputs", "--sample", "all")
    Path("t.jinja").write_text(THINKING.replace("is false", "is true"))
    assert pack(*own, "--overwrite").exit_code == 0
    one = contents("out")
    succeeds("verify", "out", "--against-inputs", "--sample", "all")
    succeeds("tokenize", "data.jsonl", "-t", "bytes", "-o", "tokens", *own)
    tokenized = json.loads(Path("tokens/manifest.json").read_text())
    assert tokenized["config"]["template_args"] == [["enable_thinking", "false"]]
    assert_error(packer("pack", "tokens", "-l", 512, "-o", "rows", "-q", *OFF), 2, "--template-arg")
    assert pack(*own, "--overwrite", "--workers", 2).exit_code == 0
    assert contents("out") == one


def test_recipes_have_a_table_of_arguments(folder: Path) -> None:
    write([PLAIN])
    Path("t.jinja").write_text(DATED)
    for text, options, day in (
        ('template_args = {date_string = "May"}\n', (), "May"),
        ('template_args = {date_string = "May"}\n', ("--template-arg", "date_string=June"), "June"),
        ("[template_args]\ndate_string = 5\n", (), "5"),
    ):
        Path("mix.toml").write_text('inputs = ["data.jsonl"]\nchat_template = "t.jinja"\n' + text)
        how = ("-l", 512, "-t", "bytes", "-q")
        succeeds("pack", "mix.toml", *how, "-o", "out", "--overwrite", *options)
        assert f"[{day}]<user>" in packer("show", "out", 0).stdout.replace("⟦", "")
    for text, part in (
        ('template_args = "date_string"\n', "template_args: 'date_string' is not a table"),
        ("[template_args]\nday = 1\n", "--template-arg: day: the chat template never reads it"),
        ("[template_args]\ndate_string = 2024-05-01\n", "is not a table of JSON values"),
        ("[template_args]\ndate_string = nan\n", "is not a table of JSON values"),
    ):
        Path("mix.toml").write_text('inputs = ["data.jsonl"]\nchat_template = "t.jinja"\n' + text)
        assert_error(
            packer("pack", "mix.toml", "-l", 512, "-t", "bytes", "-o", "new", "-q"), 2, part
        )


def test_sources_have_arguments_of_their_own(folder: Path) -> None:
    write([PLAIN], "a.jsonl")
    write([PLAIN], "b.jsonl")
    Path("t.jinja").write_text(DATED)
    Path("mix.toml").write_text(
        'chat_template = "t.jinja"\ntokenized = "tokens"\n[template_args]\ndate_string = "May"\n'
        '[[source]]\nname = "a"\ninputs = ["a.jsonl"]\nepochs = 1\n'
        '[[source]]\nname = "b"\ninputs = ["b.jsonl"]\nepochs = 1\n'
        'template_args = {date_string = "June"}\n'
    )
    succeeds("pack", "mix.toml", "-l", 512, "-t", "bytes", "-o", "out")
    days = {name: json.loads(Path(f"tokens/{name}/manifest.json").read_text())["config"]
            ["template_args"] for name in "ab"}  # fmt: skip
    assert days == {"a": [["date_string", '"May"']], "b": [["date_string", '"June"']]}


def test_files_without_templates_beside(folder: Path) -> None:
    """Their units stay in an update, whatever the arguments are."""
    write([PLAIN], "chat.jsonl")
    write([{"text": "Hi"}], "text.jsonl")
    Path("t.jinja").write_text(DATED)
    result = run(Path("text.jsonl"), "chat.jsonl", "--template-arg", "date_string=May",
                 template=DATED)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert check_directory("out")["documents"] == 2
