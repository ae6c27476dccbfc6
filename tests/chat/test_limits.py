"""Templates are programs: what rendering a record may take, and the processes that render."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from altered import altered
from chats import (
    REWRITTEN,
    TAGS,
    Json,
    assistant,
    chat,
    many,
    pack_chat,
    positions,
    refused,
    run,
    user,
    write,
)
from support import assert_error, check_directory, heavy, packer, recover_documents, succeeds

pytestmark = pytest.mark.forking
SLOW = "has to be rendered"
LIMIT = "packer_cli.chat.limits.SECONDS_PER_RECORD"
HURRIED = "from packer_cli.chat import limits; limits.SECONDS_PER_RECORD = 0.1\n"
MAIN = "from packer_cli.__main__ import main; main()"
# What a template does with a message that says `SLOW`.
SLOW_WAYS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% set c = a * b %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (messages | length + 10**8) % 7 }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
}
BIG_WAYS = {
    "indent": "{{ messages | tojson(indent=10**10) }}",
    "width of format": "{{ '{:1000000000000}'.format(m.content) }}",
    "times": "{{ 'a' * 10**12 }}",
    "doubled": "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
}


def when_asked(way: str) -> str:
    end = "</{{ m.role }}>"
    assert end in TAGS
    return TAGS.replace(end, end + "{% if m.content == '" + SLOW + "' %}" + way + "{% endif %}")


def records(count: int, *slow: int, times: int = 1) -> list[Any]:
    made = [
        chat(user(f"{i} " + "?" * (i % 300) * times), assistant(f"{i}!" * times))
        for i in range(count)
    ]
    for i in slow:
        made[i] = chat(user("why?"), assistant(SLOW))
    return made


def options(template: str, *more: object) -> tuple[object, ...]:
    Path("t.jinja").write_text(template)
    return ("-l", 512, "-t", "bytes", "-q", "--chat-template", "t.jinja", "-o", "out", *more)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record has a tenth of a second."""
    monkeypatch.setattr(LIMIT, 0.1)


@pytest.mark.parametrize("way", SLOW_WAYS)
def test_a_slow_record_is_a_bad_record(hurried: None, folder: Path, way: str) -> None:
    made = records(30, 7, 19)
    write(made)
    how = options(when_asked(SLOW_WAYS[way]))
    place = f"data.jsonl, line 8 (byte {positions(made)[7]}): "
    reason = "the chat template takes more than 0.1 s"
    assert_error(packer("pack", "data.jsonl", *how), 1, place + reason)
    succeeds("pack", "data.jsonl", *how, "--on-error", "skip")
    manifest = check_directory("out")
    assert (manifest["rejected_records"], manifest["documents"]) == (2, 28)
    lines = [json.loads(line) for line in Path("out/rejected.jsonl").read_text().splitlines()]
    at = [positions(made)[i] for i in (7, 19)]
    assert [(line["position"], line["reason"]) for line in lines] == [(p, reason) for p in at]


@pytest.mark.parametrize("way", BIG_WAYS)
def test_a_record_that_takes_all_memory_is_a_bad_record(
    folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packer_cli.chat.limits._TIMES", 1)  # less, which is filled sooner
    monkeypatch.setattr("packer_cli.chat.limits._ROOM_BYTES", 1 << 27)
    made = records(30, 7)
    write(made)
    how = options(when_asked(BIG_WAYS[way]), "--on-error", "skip")
    succeeds("pack", "data.jsonl", *how)
    assert check_directory("out")["documents"] == 29
    [line] = map(json.loads, Path("out/rejected.jsonl").read_text().splitlines())
    assert line["position"] == positions(made)[7]
    assert "the chat template " in line["reason"]


@pytest.mark.parametrize("workers", [heavy(1), 3])
def test_what_is_around_a_slow_record_is_as_without_it(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third batch that a process has read of a slice, with several slices."""
    monkeypatch.setattr(LIMIT, 0.1)
    monkeypatch.setattr("packer_cli.mixing.units.MIB", 1 << 18)
    monkeypatch.setattr("packer_cli.inputs.byte_streams.BLOCK_BYTES", 1 << 16)
    made = records(1200, 1101, times=7)
    made[1] = {"messages": 5}
    path = write(made)
    assert path.stat().st_size > 1 << 20
    made[1101] = {"messages": 5}
    write(made, "other.jsonl")
    how = options(when_asked(SLOW_WAYS["power"]), "--on-error", "skip", "--workers", workers)
    how = (*how, "-l", 4096)
    results = []
    for name in ("data.jsonl", "other.jsonl"):
        succeeds("pack", name, *how, "--overwrite")
        manifest = check_directory("out")
        assert (manifest["rejected_records"], manifest["documents"]) == (2, 1198)
        results.append([shard["tokens"] for shard in manifest["shards"]])
    assert results[0] == results[1]


def test_a_slow_record_from_stdin(folder: Path) -> None:
    data = write(records(2000, 1000)).read_bytes()
    how = options(when_asked(SLOW_WAYS["power"]), "--on-error", "skip")
    result = altered(HURRIED + MAIN, "pack", "-", *map(str, how), stdin=data)
    assert result.returncode == 0, result.stderr
    assert check_directory("out")["documents"] == 1999


@pytest.mark.parametrize("way", SLOW_WAYS)
def test_a_template_that_is_always_slow(hurried: None, folder: Path, way: str) -> None:
    write(records(5))
    how = options(TAGS + SLOW_WAYS[way], "--on-error", "skip")
    result = packer("pack", "data.jsonl", *how)
    assert_error(result, 2, "the chat template takes more than 0.1 s")
    assert not Path("out").exists()


def test_a_conversation_that_is_slow_once_it_is_shortened(hurried: None, folder: Path) -> None:
    turns = [message for i in range(10) for message in (user("?" * 90), assistant(f"{i}" * 90))]
    write([chat(*turns), chat(user("a"), assistant("b"))])
    # not so in probes, nor in prompts for turns of the whole conversation
    when = "3 < messages | length < 20 and '?' in messages[0].content and not add_generation_prompt"
    slow = TAGS + "{% if " + when + " %}" + SLOW_WAYS["power"] + "{% endif %}"
    how = options(slow, "--overlong", "truncate-turns")
    succeeds("pack", "data.jsonl", *how)
    manifest = check_directory("out")
    assert (manifest["documents"], manifest["truncated_documents"]) == (2, 1)


LOOKS_FOR_A_WORD = (
    "{% for m in messages %}<|{{ m.role }}|>{% if '?' in m.content %}{% endif %}{{ m.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("template", [TAGS, LOOKS_FOR_A_WORD])
def test_a_conversation_of_many_messages_keeps_to_the_limit(
    folder: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time grows with its length, not with the square of it."""
    monkeypatch.setattr(LIMIT, 2.5)
    turns = [(user(f"{i}?"), assistant(f"{i}!")) for i in range(15_000)]
    write([chat(*(message for turn in turns for message in turn))])
    how = options(template, "--overlong", "truncate")
    succeeds("pack", "data.jsonl", *how)


def test_slow_records_keep_no_file_open(folder: Path) -> None:
    """Each has cost a process, whose pipes count against the limit of the shell."""
    made = records(18, *range(15))
    write(made)
    how = options(when_asked(SLOW_WAYS["power"]), "--on-error", "skip", "--workers", 1)
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
    done = altered(HURRIED + few + MAIN, "pack", "data.jsonl", *map(str, how))
    assert done.returncode == 0, done.stderr
    assert check_directory("out")["documents"] == 3


def test_random_text_is_refused(folder: Path) -> None:
    """It would be other text every time."""
    write(records(1))
    result = packer("pack", "data.jsonl", *options(TAGS + "{{ [1, 2, 3] | random }}"))
    assert_error(result, 2, "the chat template does not compile: ", "'random'")
    result = packer("pack", "data.jsonl", *options(TAGS + "{{ lipsum(n=100000) }}"))
    assert_error(result, 1, "'lipsum' is undefined")


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "nested too deeply"),
        ("{% if messages %}" * 100 + "{% endif %}" * 100, "too many levels of indentation"),
        ("{% break %}", "'break' outside loop"),
        ("{{ 1|" + "x" * 9000 + " }}", "No filter named"),
    ],
    ids=["brackets", "ifs", "break", "a long name"],
)
def test_templates_that_python_cannot_compile(folder: Path, way: str, why: str) -> None:
    write(records(1))
    result = packer("pack", "data.jsonl", *options(TAGS + way))
    assert_error(result, 2, "the chat template does not compile: ", why)
    assert len(result.stderr) < 2000


@pytest.mark.parametrize("way", ["'\\ud800'", "raise_exception('x' * 10**6)"])
def test_whatever_a_template_fails_with_is_said_in_a_line(folder: Path, way: str) -> None:
    write(records(1))
    result = packer("pack", "data.jsonl", *options(TAGS + "{{ " + way + " }}"))
    assert_error(result, 1, "the template refuses a question and its answer: the chat template ")
    assert len(result.stderr) < 2000


# Processes beside the run


def test_arguments_that_are_nested_too_deeply(folder: Path) -> None:
    arguments: Json = {}
    for _ in range(480):
        arguments = {"a": arguments}
    call = {"function": {"name": "f", "arguments": arguments}}
    record = chat(user("Hi"), assistant("", tool_calls=[call]))
    write([record, *many(2)])
    result = packer("pack", "data.jsonl", *options(TAGS))
    if result.exit_code:  # CPython 3.12 and later take more
        assert_error(result, 1, "fields of the record are nested too deeply")


def test_processes_beside_the_run_change_nothing(folder: Path) -> None:
    records: list[Any] = many(4000)
    for record in records[::2]:
        record["messages"][1]["reasoning_content"] = "which the template does not show"
    records[1234] = {"messages": 5}
    path = write(records)
    assert path.stat().st_size > 1 << 20
    results = []
    for workers in (1, 3):
        options = ("--workers", workers, "--unit-bytes", 300_000, "--on-error", "skip")
        manifest = pack_chat(path, *options)
        assert (manifest["rejected_records"], manifest["unshown_documents"]) == (1, 1999)
        results.append((manifest, Path("out/rejected.jsonl").read_bytes()))
    assert results[0] == results[1]
    assert sum(flags.sum() for flags in trained_flags()) == manifest["trained_tokens"]
    place = f"data.jsonl, line 1235 (byte {positions(records)[1234]}): field 'messages' is"
    assert place in run(path, "--workers", 3).stderr


def test_what_cannot_be_decided_in_another_process(folder: Path) -> None:
    records = many(4000)
    records[3000]["messages"][1]["weight"] = 0
    place = f"data.jsonl, line 3001 (byte {positions(records)[3000]}): "
    refused(records, 1, place, "rearranges", template=REWRITTEN, options=["--workers", 3])


def trained_flags() -> list[Any]:
    return [labels != -100 for labels in recover_documents("out", "labels").values()]


def test_a_run_with_nothing_to_train_on_fails(folder: Path) -> None:
    refused(
        [chat(user("Hi"))] * 2, 1, "nothing to pack", "2 of those dropped have nothing to train"
    )
