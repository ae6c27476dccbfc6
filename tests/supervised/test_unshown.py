"""What chat templates leave out of records: found by what comes out, counted, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import (
    CALL,
    CHATML,
    RESULT,
    REWRITTEN,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    pack_chat,
    pack_marked,
    refused,
    run,
    system,
    user,
    write,
)
from support import assert_error, check_directory, packer
from tokenizers import Tokenizer

from packer_cli.records import UNSHOWN

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


def test_earlier_thoughts(folder: Path) -> None:
    in_tags = chat(*(
        message for i in range(3)
        for message in (user(f"q{i}"), assistant(f"<think>thought {i}</think>a{i}"))
    ))  # fmt: skip
    for record in (THREE, in_tags):
        manifest = pack_chat([record] * 20, template=LAST_THOUGHT)
        # a token is a byte, and the parts of a record are counted as one text
        assert counted(manifest) == {"reasoning": (20, 40, 20 * len("thought 0\nthought 1"))}
        assert manifest["unshown_documents"] == 20
        assert manifest["empty_turns"] == 0


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (chat(system("Be kind."), user("Hi"), assistant("Yes")), {"system": (1, 1, 8)}),
        (chat(user("Hi"), assistant("Yes"), tools=TOOLS), {"tools": (1, 0, 62)}),
        (chat(user("Hi"), assistant("Yes", tool_calls=[CALL])), {"tool_calls": (1, 1, 43)}),
        (chat(user("Hi"), assistant("Yes", tool_calls=[CALL, CALL])), {"tool_calls": (1, 1, 87)}),
        (
            chat(user("Hi"), assistant("Look", tool_calls=[CALL]), RESULT, assistant("No")),
            {"tool_calls": (1, 1, 43), "tool_results": (1, 1, 3)},
        ),
        (chat(user("Hi"), assistant("Yes", thinking="hm")), {"reasoning": (1, 1, 2)}),
        (chat(user("Hi"), assistant("Yes", reasoning="hm")), {"reasoning": (1, 1, 2)}),
        (chat(user("Hi"), {"role": "critic", "content": "so so"}, assistant("Yes")),
         {"content": (1, 1, 5)}),
        (chat(user("Hi"), assistant("Yes", thinking=" \n", tool_calls=[])), {}),
        (chat(user(" Hi "), assistant("")), {}),
    ],
)  # fmt: skip
def test_all_that_a_template_can_leave_out(
    folder: Path, record: Any, expected: dict[str, Any]
) -> None:
    of_two = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
        "<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert counted(pack_chat([record], "--keep-untrained", template=of_two)) == expected


def test_what_is_transformed_is_shown(folder: Path) -> None:
    dumped = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m | tojson | upper }}"
        "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    record = chat(
        system(' "é" \n'), user("a\nb"), assistant('"', thinking="\t?", tool_calls=[CALL]), RESULT,
        assistant("so"), tools=TOOLS,
    )  # fmt: skip
    manifest = pack_chat([record], "--train-on", "all", template=dumped)
    assert counted(manifest) == {}
    assert counted(pack_chat([chat(user("Hi"), assistant("yes"))], template=REWRITTEN)) == {}


def test_only_the_first_call_is_shown(folder: Path) -> None:
    first = TAGS.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].function | tojson }}"
    ).replace("{{ m.tool_calls[0]", "{% if m.tool_calls %}{{ m.tool_calls[0]").replace(
        "tojson }}", "tojson }}{% endif %}"
    )  # fmt: skip
    calls = [CALL, {"type": "function", "function": {"name": "sun", "arguments": "{}"}}]
    manifest = pack_chat([chat(user("?"), assistant("", tool_calls=calls))], template=first)
    assert counted(manifest) == {"tool_calls": (1, 1, len('{"name":"sun","arguments":"{}"}') + 0)}
    assert manifest["empty_turns"] == 0


def test_what_depends_on_what_comes_later(folder: Path) -> None:
    """Surroundings that look alike are told apart by what else there is in the conversation."""
    later = (
        "{% set ns = namespace(final=false) %}{% for m in messages %}"
        "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = true %}{% endif %}"
        "{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content and not ns.final %}{{ m.reasoning_content }}{% endif %}"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    step = [assistant("", thinking="hm", tool_calls=[CALL]), RESULT]
    open_ = [chat(user("?"), *step * n) for n in (1, 2, 3, 4)]
    done = [chat(user("?"), *step * n, assistant("No")) for n in (1, 2, 3, 4)]
    manifest = pack_chat([*open_, *done, *open_], "--train-on", "all", template=later)
    assert counted(manifest)["reasoning"][:2] == (4, 10)


# Turns that are left empty


def test_a_turn_that_the_template_leaves_empty_is_not_trained_on(folder: Path) -> None:
    record = chat(user("Hi"), assistant("", tool_calls=[CALL]), RESULT, assistant("No"))
    [text] = pack_marked([record], template=TAGS)
    expected = "<user>Hi</user><assistant></assistant><tool>wet</tool><assistant>⟦No</assistant>⟧"
    assert text == expected
    manifest = pack_chat([record] * 3, template=TAGS)
    assert manifest["empty_turns"] == 3
    assert manifest["trained_turns"] == 3
    tagged = TAGS.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
        "{% endif %}",
    )
    [text] = pack_marked([record], template=tagged)
    assert text == "<user></user><assistant>!</assistant><tool></tool><assistant>⟦No!⟧</assistant>"
    after = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}</s>" \
        "{% if add_generation_prompt %}<assistant>{% endif %}"  # fmt: skip
    [text] = pack_marked([chat(user("Rain?"), assistant("", tool_calls=[CALL]))],
                         "--keep-untrained", template=after)  # fmt: skip
    assert text == "<user>Rain?<assistant></s>"
    last = chat(user("Hi"), assistant("No"), user("Rain?"), assistant("", tool_calls=[CALL]))
    [text] = pack_marked([last], "--train-on", "last-assistant", "--keep-untrained", template=TAGS)
    assert "⟦" not in text
    macro = "{% macro f(m) %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endmacro %}"
    by_map = macro + "{{ f(messages[0]) }}{% if messages | length > 1 %}{{ f(messages[1]) }}" \
        "{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"  # fmt: skip
    [text] = pack_marked(
        [chat(user("Hi"), assistant("", tool_calls=[CALL]))], "--keep-untrained", template=by_map
    )
    assert text == "<user>Hi</user><assistant></assistant>"


def test_an_empty_answer_of_the_record_is_its_own(folder: Path) -> None:
    [text] = pack_marked([chat(user("Hi"), assistant(""))], template=TAGS)
    assert text == "<user>Hi</user><assistant>⟦</assistant>⟧"
    manifest = pack_chat([chat(user("Hi"), assistant("", thinking="hm"))] * 2,
                         "--keep-untrained", template=TAGS)  # fmt: skip
    assert (manifest["empty_turns"], manifest["trained_tokens"]) == (2, 0)


# What is said


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
    assert packer("verify", "out", "--against-inputs").exit_code == 0
    assert packer("tokenize", "data.jsonl", "-t", "bytes", "-o", "tokens", "--chat-template",
                  "t.jinja").exit_code == 0  # fmt: skip
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
    assert "check --shape, --field, --on-unshown, --overlong and the input" in nothing.stderr
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
    assert "messages.reasoning_contents (3), did you mean reasoning_content?" in line
    assert "chat_template_kwargs.dat (3), did you mean date?" in line
    assert "chat_template_kwargs.enable_thinkin (3), messages.lang (3)," in line  # none is near
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


def test_columns_that_no_option_uses(folder: Path) -> None:
    write([{"instruction": "Add.", "subject": "2 2", "response": "4", "category": "math"}])
    write([chat(user("Hi"), assistant("Yes"), lang="en")], "chat.jsonl")
    Path("t.jinja").write_text(TAGS)
    result = packer("pack", "data.jsonl", "chat.jsonl", "-l", 512, "-t", "bytes", "-o", "out",
                    "--chat-template", "t.jinja")  # fmt: skip
    lines = [one for one in result.stderr.splitlines() if "no option uses" in one]
    assert lines == [
        "packer: data.jsonl: no option uses the columns subject, category; see --field",
        "packer: chat.jsonl: no option uses the column lang; see --field",
    ]
    result = packer("pack", "data.jsonl", "--field", "input=subject", "-l", 512, "-t", "bytes",
                    "-o", "other")  # fmt: skip
    assert "no option uses the column category;" in result.stderr


def test_a_label_that_no_option_uses(folder: Path) -> None:
    """Bad answers would be trained on as good ones: heard with -q, too."""
    talk = [user("Hi"), assistant("Yes")]
    write([{"prompt": "Hi", "completion": "No", "label": False}])
    write([chat(*talk, label=True)], "chat.jsonl")
    write([chat(*talk, chosen=talk, rejected=talk)], "pairs.jsonl")
    Path("t.jinja").write_text(TAGS)
    how = ("-l", 512, "-t", "bytes", "--chat-template", "t.jinja", "--overwrite", "-o", "out")
    for file in ("data.jsonl", "chat.jsonl"):
        assert (
            f"warning: {file}: no option uses the column label; see --field, and --shape "
            "preference if it says which answers are good"
            in packer("pack", file, *how, "-q").stderr
        )
        assert "label" not in packer("pack", file, *how, "--shape", "preference").stderr
    asked = packer("pack", "data.jsonl", *how, "--shape", "prompt-completion").stderr
    assert "label; see --field\n" in asked
    assert "warning: data" not in asked
    pairs = packer("pack", "pairs.jsonl", *how).stderr
    assert "columns chosen, rejected; see --field, and --shape preference for pairs" in pairs


def test_workers_and_resumed_runs_count_the_same(folder: Path) -> None:
    records = [THREE, chat(user("Hi"), assistant("", tool_calls=[CALL]), RESULT, assistant("No"))]
    write(records * 400)
    manifests = []
    for workers in (1, 3):
        how = ("--workers", workers, "--unit-bytes", 20_000)
        result = pack(*how)
        assert result.exit_code == 0, result.stderr
        manifests.append(check_directory("out"))
    assert manifests[0] == manifests[1]
    assert manifests[0]["unshown_documents"] == 800


def test_tokens_are_those_of_the_parts_alone(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", CHATML)
    record = chat(user("Hi"), assistant("Yes", thinking="the thought"))
    manifest = pack_chat([record], template=None, tokenizer=tokenizer)
    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("the thought")
    assert counted(manifest) == {"reasoning": (1, 1, len(own.ids))}


@pytest.mark.parametrize("way", ["{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**10 }}"])
def test_a_template_that_would_fill_memory_names_the_record(folder: Path, way: str) -> None:
    template = TAGS.replace(
        "{% endfor %}", "{% if m.content == 'big' %}" + way + "{% endif %}{% endfor %}", 1
    )
    records = [chat(user("Hi"), assistant("Yes")), chat(user("big"), assistant("Yes"))]
    refused(records, 1, "data.jsonl, line 2 (byte ", "the chat template ", template=template)
    arguments = template + "{% if flag %}{% endif %}"  # read before any of it runs
    refused(records, 1, "data.jsonl, line 2 (byte ", template=arguments,
            options=["--template-arg", "flag=true"])  # fmt: skip
    result = run(records, template=TAGS + way)
    assert_error(result, 1, "the chat template")


def test_templates_that_refuse_probes_are_judged_record_by_record(folder: Path) -> None:
    """One that takes calls of certain tools only: its thoughts are told by their words."""
    template = TAGS.replace(
        "{{ m.content }}",
        "{% for c in m.tool_calls or [] %}{% if c.function.name != 'rain' %}"
        "{{ raise_exception('no such tool') }}{% endif %}{{ c.function | tojson }}{% endfor %}"
        "{{ m.content }}",
    )
    records = [
        chat(user("Rain?"), assistant("", tool_calls=[CALL], reasoning_content=thought), RESULT)
        for thought in ("Rain?", "rather ask", "ask the service")
    ]
    manifest = pack_chat(records, template=template)
    assert counted(manifest)["reasoning"][:2] == (2, 2)
