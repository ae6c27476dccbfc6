"""What chat templates leave out of records: found by what comes out, counted, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chats import (
    CHATML,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    pack_chat,
    refused,
    run,
    user,
    write,
)
from support import check_directory, packer, succeeds
from tokenizers import Tokenizer

from packer_cli.result.wording import UNSHOWN

TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {}}}]
# All reasoning but that after the last question is left out, as Qwen 3 does.
LAST_THOUGHT = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% set c = m.content.split('</think>')[-1] | trim %}"
    "{% set t = m.reasoning_content or ('</think>' in m.content and "
    "m.content.split('</think>')[0].split('<think>')[-1]) %}"
    "{% if m.role == 'assistant' and t and loop.index0 > ns.last %}<think>{{ t | trim }}</think>"
    "{% endif %}{{ c }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THREE = chat(*(
    message for i in range(3)
    for message in (user(f"q{i}"), assistant(f"a{i}", reasoning_content=f"thought {i}"))
))  # fmt: skip


def counted(manifest: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """(documents, turns, tokens) of each kind that is left out."""
    figures = {
        what: tuple(manifest.get(f"unshown_{what}{of}", 0) for of in ("", "_turns", "_tokens"))
        for what in UNSHOWN
    }
    assert manifest["unshown_tokens"] == sum(tokens for _, _, tokens in figures.values())
    assert manifest["unshown_documents"] == sum(
        one["unshown_documents"] for one in manifest["inputs"]
    )
    return {what: one for what, one in figures.items() if any(one)}


def pack(*options: object, template: str = LAST_THOUGHT) -> Any:
    Path("t.jinja").write_text(template)
    return packer("pack", "data.jsonl", "-l", 512, "-t", "bytes", "-o", "out", "--overwrite",
                  "--chat-template", "t.jinja", *options)  # fmt: skip


def test_one_line_warns_of_it(folder: Path) -> None:
    write([THREE] * 2)
    for quiet in ((), ("-q",)):
        result = pack(*quiet)
        [line] = [one for one in result.stderr.splitlines() if "warning: out" in one]
        assert (
            "of 2 documents the chat template does not show: reasoning (4 turns, 38 tokens)" in line
        )
        assert "--on-unshown error" in line
        assert (
            "use --turns each where only earlier turns lose their reasoning, or a --chat-" in line
        )
    shown = packer("stats", "out").stdout
    assert "reasoning (4 turns, 38 tokens)" in " ".join(shown.split())
    figures = json.loads(packer("stats", "out", "--json").stdout)
    assert (figures["unshown_reasoning"], figures["unshown_reasoning_turns"]) == (2, 4)
    succeeds("verify", "out", "--against-inputs")
    succeeds("tokenize", "data.jsonl", "-t", "bytes", "-o", "tokens", "--chat-template",
                  "t.jinja")  # fmt: skip
    assert "reasoning (4 turns" in " ".join(packer("stats", "tokens").stdout.split())


def test_it_can_end_the_run(folder: Path) -> None:
    fine = chat(user("Hi"), assistant("Yes", reasoning_content="hm"))
    how: Any = {"options": ["--on-unshown", "error"], "template": LAST_THOUGHT}
    what = "does not show the reasoning of message 1: 'thought 0'"
    refused([fine, THREE], 1, "data.jsonl, line 2 (byte ", what, **how)
    how["template"] = TAGS
    refused([chat(user("Hi"), assistant("Yes"), tools=TOOLS)], 1, "does not show its tools", **how)
    write([chat(user("Hi"), assistant("Yes"), tools=TOOLS)])
    nothing = pack("--on-unshown", "error", "--on-error", "skip", template=TAGS)
    assert "the first rejected, data.jsonl, line 1 (byte 0): the chat template " in nothing.stderr
    assert "check --shape, --field, --role, --on-unshown, --overlong and" in nothing.stderr
    manifest = pack_chat([fine, THREE], "--on-unshown", "error", "--on-error", "skip",
                         template=LAST_THOUGHT)  # fmt: skip
    assert (manifest["documents"], manifest["rejected_records"]) == (1, 1)
    assert what in Path("out/rejected.jsonl").read_text()


def test_fields_that_nobody_reads(folder: Path) -> None:
    record = chat(
        user("Hi", lang="en"), assistant("Yes", reasoning_contents="hm", weight=1, name="Ada"),
        chat_template_kwargs={"enable_thinkin": False, "date": "May", "dat": "May"},
    )  # fmt: skip
    write([record] * 3)
    template = TAGS + "{% if date is defined %}{{ date }}{% endif %}"
    result = pack(template=template + "{{ messages[0].colour }}")
    assert result.exit_code == 0, result.stderr
    unread = check_directory("out")["unread"]
    assert unread == {
        "chat_template_kwargs.dat": 3, "chat_template_kwargs.enable_thinkin": 3,
        "messages.lang": 3, "messages.reasoning_contents": 3,
    }  # fmt: skip
    [line] = [one for one in result.stderr.splitlines() if "neither packer nor" in one]
    assert "messages.reasoning_contents (3)" in line
    assert "chat_template_kwargs.dat (3)" in line
    assert "chat_template_kwargs.enable_thinkin (3), messages.lang (3)," in line
    dumps = TAGS.replace("{{ m.content }}", "{{ m | tojson }}")
    pack("--train-on", "all", template=dumps)
    assert [*check_directory("out")["unread"]] == [
        "chat_template_kwargs.dat", "chat_template_kwargs.date",
        "chat_template_kwargs.enable_thinkin",
    ]  # fmt: skip
    write([{"prompt": "a", "completion": "b", "chat_template_kwargs": {"x": 1}}])
    assert run(Path("data.jsonl"), template=None).exit_code == 0
    assert check_directory("out")["unread"] == {"chat_template_kwargs": 1}


def test_many_fields_that_nobody_reads(folder: Path) -> None:
    """Names are data, too: a manifest keeps few of them."""
    records = [chat(user("Hi", **{f"key{i}": 1}), assistant("Yes")) for i in range(300)]
    unread = pack_chat(records)["unread"]
    assert len(unread) <= 51
    assert sum(unread.values()) == 300


def test_a_label_that_no_option_uses(folder: Path) -> None:
    """A label may mark bad answers, so the warning is heard with -q, too."""
    write([{"prompt": "Hi", "completion": "No", "label": 0}])
    how = ("pack", "data.jsonl", "-l", 512, "-t", "bytes", "--overwrite", "-o", "out", "-q")
    warning = "warning: data.jsonl: ignored column: label; see --field. If label marks bad answers"
    assert warning in packer(*how).stderr
    assert "label" not in packer(*how, "--field", "completion=completion").stderr


def test_tokens_are_those_of_the_parts_alone(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", CHATML)
    record = chat(user("Hi"), assistant("Yes", thinking="the thought"))
    manifest = pack_chat([record], template=None, tokenizer=tokenizer)
    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("the thought")
    assert counted(manifest) == {"reasoning": (1, 1, len(own.ids))}
