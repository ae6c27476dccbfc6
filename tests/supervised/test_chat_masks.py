"""What is trained on: the right characters of a conversation, and the right tokens of those."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from chats import (
    CHATML,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    pack_chat,
    pack_marked,
    positions,
    refused,
    run,
    system,
    user,
    write,
)
from support import contents, packer, packer_script, recover_documents
from tokenizers import Tokenizer, models, pre_tokenizers

TWO = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
TWO_MARKED = (
    "<user>Hi</user><assistant>⟦Hello</assistant>⟧<user>Bye</user><assistant>⟦Ciao</assistant>⟧"
)
GENERATION = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}!{% endgeneration %}</s>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


# Which characters


def test_generation_tags_say_what_is_trained_on(folder: Path) -> None:
    expected = "<user>Hi<assistant>⟦Hello!⟧</s><user>Bye<assistant>⟦Ciao!⟧</s>"
    assert pack_marked([TWO], template=GENERATION) == [expected]
    last = expected.replace("⟦Hello!⟧", "Hello!")
    assert pack_marked([TWO], "--train-on", "last-assistant", template=GENERATION) == [last]


def test_without_tags_the_header_is_not_trained_and_the_end_is(folder: Path) -> None:
    assert pack_marked([TWO]) == [TWO_MARKED]
    assert pack_marked([chat(user("Hi"), assistant("Hello"))], template=CHATML) == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>\n⟧"
    ]


def test_which_way_was_taken_is_said(folder: Path) -> None:
    for template, told in ((TAGS, "its turns"), (GENERATION, "its {% generation %} tags")):
        Path("t.jinja").write_text(template)
        options = ["--chat-template", "t.jinja"]
        command = ("pack", write([TWO]), "-l", 512, "-t", "bytes", "-o", "out", "--overwrite")
        result = packer(*command, *options)
        line = f"packer: chat template: t.jinja; trained on: assistant, told by {told}"
        assert line in result.stderr.splitlines()


def test_train_on(folder: Path) -> None:
    [last] = pack_marked([TWO], "--train-on", "last-assistant")
    assert last == TWO_MARKED.replace("⟦Hello</assistant>⟧", "Hello</assistant>")
    [everything] = pack_marked([TWO], "--train-on", "all")
    plain = TWO_MARKED.replace("⟦", "").replace("⟧", "")
    assert everything == f"<⟦{plain[1:]}⟧"


def test_the_last_assistant_need_not_be_the_last_message(folder: Path) -> None:
    record = chat(assistant("A"), user("B"), assistant("C"), user("D"))
    [found] = pack_marked([record], "--train-on", "last-assistant")
    assert found == (
        "<assistant>A</assistant><user>B</user><assistant>⟦C</assistant>⟧<user>D</user>"
    )


@pytest.mark.parametrize(
    "flags", [{"weight": 0}, {"train": False}, {"train": 0}, {"weight": 0.0}, {"weight": False}]
)
@pytest.mark.parametrize("template", [TAGS, GENERATION])
def test_messages_that_are_not_to_be_trained_on(
    folder: Path, flags: dict[str, Any], template: str
) -> None:
    record = chat(user("Hi"), assistant("Hello", **flags), user("Bye"), assistant("Ciao"))
    [found] = pack_marked([record], template=template)
    assert "⟦Hello" not in found
    assert "⟦Ciao" in found
    assert found.count("⟦") == 1


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        ({"weight": 1}, True),
        ({"train": True}, True),
        ({"weight": 1, "train": False}, False),
        ({"weight": 0, "train": True}, False),
        ({"weight": None}, True),
    ],
)
def test_weight_and_train_together(folder: Path, flags: dict[str, Any], trained: bool) -> None:
    record = chat(user("Hi"), assistant("Hello", **flags), user("Bye"), assistant("Ciao"))
    assert ("⟦Hello" in pack_marked([record])[0]) == trained


def test_weights_of_others_do_not_make_them_trained(folder: Path) -> None:
    record = chat(system("S"), user("Hi", weight=1), assistant("Hello"))
    assert pack_marked([record]) == [
        "<system>S</system><user>Hi</user><assistant>⟦Hello</assistant>⟧"
    ]


def test_the_last_of_the_assistant_without_weight(folder: Path) -> None:
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao", weight=0))
    manifest = pack_chat([record], "--train-on", "last-assistant", "--keep-untrained")
    assert manifest["trained_tokens"] == 0


def test_a_system_message_that_the_template_puts_first(folder: Path) -> None:
    """As llama and gemma do: the rest of the loop has another list."""
    template = (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
        "{% endif %}{% for m in rest %}{% if loop.first %}[{{ first }}]{% endif %}"
        "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    record = chat(system("S"), user("Hi"), assistant("Hello"), user("X"), assistant("Y", weight=0))
    assert pack_marked([record], template=template) == [
        "[S]<user>Hi</user><assistant>⟦Hello</assistant>⟧<user>X</user><assistant>Y</assistant>"
    ]


def test_an_answer_that_looks_like_the_template(folder: Path) -> None:
    record = chat(user("Say <assistant> twice"), assistant("<assistant><assistant></assistant>"))
    assert pack_marked([record]) == [
        "<user>Say <assistant> twice</user>"
        "<assistant>⟦<assistant><assistant></assistant></assistant>⟧"
    ]


def test_an_empty_answer_still_teaches_to_stop(folder: Path) -> None:
    record = chat(user("Hi"), assistant(""))
    assert pack_marked([record]) == ["<user>Hi</user><assistant>⟦</assistant>⟧"]


def test_multi_byte_characters_everywhere(folder: Path) -> None:
    record = chat(user("naïve 👍🏽"), assistant("日本語 café"), user("é"), assistant("ß"))
    expected = (
        "<user>naïve 👍🏽</user><assistant>⟦日本語 café</assistant>⟧"
        "<user>é</user><assistant>⟦ß</assistant>⟧"
    )
    assert pack_marked([record]) == [expected]
    tokenizer = chat_tokenizer(folder / "t", TAGS)
    assert pack_marked([record], template=None, tokenizer=tokenizer) == [expected]


# Templates that make it hard

MACRO = (
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LOOP_IN_MACRO = (
    "{% macro all(list) %}{% for m in list %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
    "{% endfor %}{% endmacro %}{{ all(messages) }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BY_NUMBER = (
    "{% for i in range(messages | length) %}<{{ messages[i].role }}>{{ messages[i].content }}"
    "</{{ messages[i].role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


UNSEEN = BY_NUMBER.replace("messages[i]", "messages[i + 0]")  # no loop shows the turns


@pytest.mark.parametrize("template", [MACRO, LOOP_IN_MACRO, BY_NUMBER, UNSEEN])
def test_macros_and_prefixes(folder: Path, template: str) -> None:
    """A loop that calls a macro is a loop; where there is none to see, prefixes are compared."""
    assert pack_marked([TWO], template=template) == [TWO_MARKED]
    weighted = chat(user("Hi"), assistant("Hello", weight=0), user("Bye"), assistant("Ciao"))
    silent = TWO_MARKED.replace("⟦Hello</assistant>⟧", "Hello</assistant>")
    assert pack_marked([weighted], template=template) == [silent]
    assert pack_marked([TWO], "--train-on", "last-assistant", template=template) == [silent]


REWRITTEN = (  # a loop over messages that the template made
    "{% set ns = namespace(pairs=[]) %}{% for m in messages %}"
    "{% set ns.pairs = ns.pairs + [{'role': m.role, 'content': m.content | upper}] %}{% endfor %}"
    "{% for p in ns.pairs %}<{{ p.role }}>{{ p.content }}</{{ p.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_messages_that_the_template_rewrites(folder: Path) -> None:
    upper = TWO_MARKED.replace("Hello", "HELLO").replace("Ciao", "CIAO")
    upper = upper.replace("Hi", "HI").replace("Bye", "BYE")
    assert pack_marked([TWO], template=REWRITTEN) == [upper]


def test_weights_and_a_template_that_rearranges_messages(folder: Path) -> None:
    record = chat(user("Hi"), assistant("Hello", weight=0), user("Bye"), assistant("Ciao"))
    refused(
        [TWO, record], 1, "data.jsonl, line 2 (byte ", "messages have weights", "rearranges",
        template=REWRITTEN,
    )  # fmt: skip
    assert pack_chat([record], "--train-on", "all", template=REWRITTEN)["documents"] == 1


UNDECIDABLE = {
    "earlier turns change": (
        LOOP_IN_MACRO.replace("{{ m.content }}", "{{ m.content }}{{ list | length }}"),
        "renders messages differently later on",
    ),
    "no trace": (
        LOOP_IN_MACRO.replace("<{{ m.role }}>", "").replace("</{{ m.role }}>", "")
        .replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}")
        .replace("<assistant>", ""),
        "leaves no trace",
    ),
    "reversed": (
        "{% for i in range(messages | length) %}{{ messages[-1 - i].content }}{% endfor %}",
        "renders messages differently later on",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDECIDABLE)
def test_what_cannot_be_decided_ends_the_run_or_is_rejected(folder: Path, name: str) -> None:
    template, why = UNDECIDABLE[name]
    record = json.dumps(chat(user("Hi")))
    Path("data.jsonl").write_text(f"{record}\n{json.dumps(TWO)}\n")
    told = "the assistant's part of the text cannot be told"
    place = f"data.jsonl, line 2 (byte {len(record) + 1})"
    refused(Path("data.jsonl"), 1, place, told, why, template=template)
    options = ["--on-error", "skip", "--keep-untrained"]
    manifest = pack_chat(Path("data.jsonl"), *options, template=template)
    assert (manifest["documents"], manifest["rejected_records"]) == (1, 1)
    [rejected] = map(json.loads, Path("out/rejected.jsonl").read_text().splitlines())
    assert rejected["position"] == len(record) + 1
    assert told in rejected["reason"]
    assert why in rejected["reason"]


def test_a_template_that_refuses_every_question(folder: Path) -> None:
    template = TAGS + "{% if messages | length < 3 %}{{ raise_exception('too few') }}{% endif %}"
    result = run([TWO], template=template)
    assert result.exit_code == 1, result.stderr
    assert "refuses a question and its answer" in result.stderr
    assert not Path("out").exists()


RESULTS_INSIDE = (  # results of tools, in the turn of the assistant that called them
    "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}"
    "{% for t in messages[loop.index:] %}{% if t.role != 'tool' %}{% break %}{% endif %}"
    "[{{ t.content }}]{% endfor %}</{{ m.role }}>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_results_of_tools_inside_a_turn_are_not_trained_on(folder: Path) -> None:
    tool = {"role": "tool", "content": "sunny"}
    record = chat(user("Rain?"), assistant("look"), tool, assistant("No."))
    assert pack_marked([record], template=RESULTS_INSIDE) == [
        "<user>Rain?</user><assistant>⟦look⟧[sunny]</assistant><assistant>⟦No.</assistant>⟧"
    ]
    assert pack_marked([TWO], template=RESULTS_INSIDE) == [TWO_MARKED]


def test_the_last_of_tags_that_no_loop_shows(folder: Path) -> None:
    tagged = (
        "{% for i in range(messages | length) %}{% set m = messages[i + 0] %}<{{ m.role }}>"
        "{% if m.role == 'user' or m.name %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    record = chat(*TWO["messages"][:-1], assistant("Ciao", name="untagged"))
    options = ["--train-on", "last-assistant"]
    refused([record], 1, "line 1", "which of its tags", template=tagged, options=options)
    [found] = pack_marked([TWO], *options, template=tagged)
    assert found == "<user>Hi<assistant>Hello<user>Bye<assistant>⟦Ciao⟧"


def test_generation_tags_inside_a_macro(folder: Path) -> None:
    template = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    )
    refused([TWO], 2, "does not compile", "{% generation %} inside a macro", template=template)


def test_a_template_cannot_reach_out_of_its_sandbox(folder: Path) -> None:
    template = TAGS + "{{ ''.__class__.__mro__ }}"
    refused([TWO], 1, template=template)


def test_the_date_is_always_the_same(folder: Path) -> None:
    [found] = pack_marked([TWO], template="{{ strftime_now('%d %b %Y') }}" + TAGS)
    assert found == "01 Jan 2024" + TWO_MARKED


def test_the_template_of_the_tokenizer(folder: Path) -> None:
    named = [
        {"name": "default", "template": TAGS},
        {"name": "loud", "template": TAGS.replace("m.content", "m.content | upper")},
    ]
    tokenizer = chat_tokenizer(folder / "named", None, chat_template=named)
    how = {"template": None, "tokenizer": tokenizer}
    assert pack_marked([TWO], **how) == [TWO_MARKED]
    assert "⟦HELLO" in pack_marked([TWO], "--chat-template", "loud", **how)[0]
    broken = chat_tokenizer(folder / "broken", None, chat_template=[{**named[0], "template": 5}])
    assert "the tokenizer has none" in run([TWO], template=None, tokenizer=broken).stderr
    no_default = chat_tokenizer(folder / "several", None, chat_template=named[1:] * 2)
    result = run([TWO], template=None, tokenizer=no_default)
    assert result.exit_code == 2
    assert "several chat templates: loud" in result.stderr
    (no_default / "chat_template.jinja").write_text(TAGS)  # wins over the configuration
    assert pack_marked([TWO], template=None, tokenizer=no_default) == [TWO_MARKED]
    assert Path("out/chat_template.jinja").read_text() == TAGS


# Which tokens


def pieces(tokenizer: Path) -> list[tuple[str, bool]]:
    """(token, whether it is trained on) of the only document; spaces as Ġ."""
    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    [ids], [labels] = (
        list(recover_documents("out", column).values()) for column in ("input_ids", "labels")
    )
    names = [vocabulary.id_to_token(i) for i in ids.tolist()]
    return list(zip(names, (labels != -100).tolist(), strict=True))


def glued(document: dict[str, Any]) -> dict[str, Any]:
    """Knows ":Hi" and "oo;", so that tokens straddle a span's edges."""
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    new = [["H", "i"], [":", "Hi"], ["o", "o"], ["oo", ";"]]
    for pair in new:
        vocabulary.setdefault("".join(pair), max(vocabulary.values()) + 1)
    document["model"]["merges"] = new + [pair for pair in merges if pair not in new]
    document["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    return document


@pytest.mark.parametrize("backend", ["auto", "tokenizers"])
def test_a_token_with_one_byte_in_a_span_is_trained(folder: Path, backend: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:"
        "{% generation %}{{ m.content }}{% endgeneration %};{% else %}Q:{{ m.content }};"
        "{% endif %}{% endfor %}"
    )
    tokenizer = chat_tokenizer(folder / "t", template, glued(tiny_tokenizers.byte_level()))
    record = chat(user("x"), assistant("Hi zoo"))
    pack_marked([record], "--tokenizer-backend", backend, template=None, tokenizer=tokenizer)
    found = pieces(tokenizer)
    assert (":Hi", True) in found  # one of its bytes is the template's
    assert ("oo;", True) in found
    assert ("A", False) in found
    assert "".join(name for name, _ in found) == "Q:x;A:HiĠzoo;"
    flags = [flag for _, flag in found]
    assert flags == sorted(flags)


@pytest.mark.parametrize("backend", ["auto", "tokenizers"])
def test_a_token_across_an_empty_answer_is_not_trained(folder: Path, backend: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}o"
        "{% generation %}{{ m.content }}{% endgeneration %}o;{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    tokenizer = chat_tokenizer(folder / "t", template, glued(tiny_tokenizers.byte_level()))
    record = chat(user("Q"), assistant(""), user("Q"), assistant("7"))
    how: dict[str, Any] = {"template": None, "tokenizer": tokenizer}
    manifest = pack_chat([record], "--tokenizer-backend", backend, **how)
    found = pieces(tokenizer)
    assert ("oo;", False) in found
    assert [name for name, flag in found if flag] == ["7"]
    assert manifest["trained_turns"] == 1


def test_part_of_a_character_is_enough(folder: Path) -> None:
    """Tokens of a multi-byte character that a span holds are all trained, its neighbours not."""
    template = "{% for m in messages %}{% if m.role == 'assistant' %}é{% generation %}"
    template += "{{ m.content }}{% endgeneration %}é{% else %}q{% endif %}{% endfor %}"
    [found] = pack_marked([chat(user(""), assistant("한👍"))], template=template)
    assert found == "qé⟦한👍⟧é"
    tokenizer = chat_tokenizer(folder / "t", template)
    [found] = pack_marked(
        [chat(user(""), assistant("한👍"))], template=None, tokenizer=tokenizer
    )  # fmt: skip
    assert found == "qé⟦한👍⟧é"


@pytest.mark.parametrize("backend", ["auto", "tokenizers"])
def test_sentencepiece_with_its_space_before_the_text(folder: Path, backend: str) -> None:
    tokenizer = chat_tokenizer(folder / "t", TAGS, tiny_tokenizers.sentencepiece())
    record = chat(user("the fox"), assistant("the dog"), user("日本"), assistant("émoji 👍🏽"))
    pack_chat([record], "--tokenizer-backend", backend, template=None, tokenizer=tokenizer)
    said = [name for name, flag in pieces(tokenizer) if flag]
    text = re.sub("<0x(..)>", lambda byte: chr(int(byte[1], 16)), "".join(said))
    assert text == "the▁dog</assistant>émoji▁👍🏽</assistant>"


def normalizing(document: dict[str, Any]) -> dict[str, Any]:
    """Lengths of tokens do not add up to the text's: characters are composed before."""
    document["normalizer"] = {"type": "NFC"}
    return document


def test_a_text_that_a_normalizer_changes_is_marked_by_the_reference(folder: Path) -> None:
    decomposed = "cafe\u0301"  # one character and two bytes shorter when composed
    record = chat(user(decomposed), assistant(f"un {decomposed}!"), user("x"), assistant("y"))
    tokenizer = chat_tokenizer(folder / "t", TAGS, normalizing(tiny_tokenizers.byte_level()))
    assert pack_marked([record], template=None, tokenizer=tokenizer) == [
        "<user>café</user><assistant>⟦un café!</assistant>⟧<user>x</user><assistant>⟦y</assistant>⟧"
    ]


def test_tokens_that_swallow_white_space_are_marked_by_the_reference(folder: Path) -> None:
    document = tiny_tokenizers.byte_level()
    tokenizer = chat_tokenizer(folder / "t", CHATML, document)
    saved = json.loads((tokenizer / "tokenizer.json").read_text())
    for token in saved["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    (tokenizer / "tokenizer.json").write_text(json.dumps(saved))
    pack_chat([TWO], template=None, tokenizer=tokenizer)
    found = pieces(tokenizer)
    ends = [i for i, (name, _) in enumerate(found) if name == "<|im_end|>"]
    assert [found[i][1] for i in ends] == [False, True, False, True]
    assert all(name != "Ċ" for i in ends for name, _ in found[i + 1 : i + 2])


def test_lengths_that_a_normalizer_changes_may_add_up_by_chance(folder: Path) -> None:
    """One Bengali character becomes three bytes shorter when composed, another three longer."""
    shorter, longer = "\u0995\u09c7\u09be", "\u09dc"
    tokenizer = chat_tokenizer(folder / "t", TAGS, normalizing(tiny_tokenizers.byte_level()))
    pair = {"prompt": shorter, "completion": f"abcdef {longer}"}
    [found] = pack_marked([pair], template=None, tokenizer=tokenizer)
    assert found == "\u0995\u09cb⟦abcdef \u09a1\u09bc</s>⟧"


def test_word_pieces_may_add_up_by_chance(folder: Path) -> None:
    """What "##" adds to the lengths, the spaces that no token has take away."""
    specials = ["[UNK]", "[EOS]"]
    words = [*specials, "a", "b", "play", "##ing"]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.add_special_tokens(specials)
    config = {"eos_token": "[EOS]"}
    document = json.loads(model.to_str())
    tokenizer = tiny_tokenizers.save(folder / "t", document, tokenizer_config=config)
    pack_chat([{"prompt": "playing a", "completion": " b"}], template=None, tokenizer=tokenizer)
    assert pieces(tokenizer) == [
        ("play", False), ("##ing", False), ("a", False), ("b", True), ("[EOS]", True),
    ]  # fmt: skip


def test_unknown_characters_may_add_up_by_chance(folder: Path) -> None:
    """Two of them have four bytes, three have six, and the <unk> for each has five."""
    vocabulary = {"<unk>": 0, "a": 1, "b": 2}
    model = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True))  # noqa: S106
    document, config = json.loads(model.to_str()), {"eos_token": "b"}
    tokenizer = tiny_tokenizers.save(folder / "t", document, tokenizer_config=config)
    pair = {"prompt": "ééa", "completion": "aaééé"}
    pack_chat([pair], template=None, tokenizer=tokenizer)
    assert pieces(tokenizer) == [
        ("<unk>", False), ("a", False), ("a", True), ("a", True), ("<unk>", True), ("b", True),
    ]  # fmt: skip


def test_unigram_has_no_lengths_and_works(folder: Path) -> None:
    config = {"chat_template": TAGS, "eos_token": tiny_tokenizers.EOS}
    tokenizer = tiny_tokenizers.save(
        folder / "t", tiny_tokenizers.unigram(), tokenizer_config=config
    )
    pack_chat([TWO], template=None, tokenizer=tokenizer)
    said = "".join(name for name, flag in pieces(tokenizer) if flag).replace("▁", " ")
    assert "Hi" not in said
    assert "Bye" not in said


# What goes around documents


def bos_tokenizer(folder: Path, template: str) -> Path:
    document = tiny_tokenizers.with_template(tiny_tokenizers.byte_level(), "<s>", "A")
    return chat_tokenizer(folder, template, document)


def test_bos_is_never_there_twice(folder: Path) -> None:
    """Neither a template's nor a post-processor's BOS meets another one."""
    with_bos = "{{ bos_token }}" + TAGS
    expected = ["<s>" + TWO_MARKED]
    how = {"template": None, "tokenizer": bos_tokenizer(folder / "a", with_bos)}
    for options in ((), ("--bos",), ("--no-bos",)):
        manifest = pack_chat([TWO], *options, **how)
        assert manifest["double_bos_documents"] == 0
        assert pack_marked([TWO], *options, **how) == expected
    how = {"template": None, "tokenizer": bos_tokenizer(folder / "b", TAGS)}
    assert pack_marked([TWO], **how) == [TWO_MARKED]  # the template decides
    assert pack_marked([TWO], "--bos", **how) == expected


def test_a_template_that_writes_bos_twice_is_counted(folder: Path) -> None:
    tokenizer = bos_tokenizer(folder / "t", "{{ bos_token }}{{ bos_token }}" + TAGS)
    manifest = pack_chat([TWO, TWO], template=None, tokenizer=tokenizer)
    assert manifest["double_bos_documents"] == 2


def test_eos_and_separator_of_conversations(folder: Path) -> None:
    assert pack_marked([TWO], "--eos") == [TWO_MARKED[:-1] + "<eos>⟧"]
    assert pack_marked([TWO], "--separator", "\n\n") == [TWO_MARKED + "\n\n"]
    both = pack_marked([TWO], "--eos", "--separator", "--")
    assert both == [TWO_MARKED[:-1] + "<eos>⟧--"]


def test_eos_is_not_trained_after_a_turn_that_is_not(folder: Path) -> None:
    record = chat(assistant("Hello"), user("Hi"))
    [found] = pack_marked([record], "--eos")
    assert found == "<assistant>⟦Hello</assistant>⟧<user>Hi</user><eos>"


def test_eos_that_the_template_wrote_is_not_doubled(folder: Path) -> None:
    template = TAGS.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")  # as phi3
    tokenizer = chat_tokenizer(folder / "t", template)
    how = {"template": None, "tokenizer": tokenizer}
    [plain], [with_eos] = pack_marked([TWO], **how), pack_marked([TWO], "--eos", **how)
    assert plain == with_eos == TWO_MARKED + "</s>"


def test_eos_token_by_name(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", None)
    pair = {"prompt": "Say hi.", "completion": " Hello"}
    how = {"template": None, "tokenizer": tokenizer}
    assert pack_marked([pair], **how) == ["Say hi.⟦ Hello</s>⟧"]
    assert pack_marked([pair], "--eos-token", "<|im_end|>", **how) == ["Say hi.⟦ Hello<|im_end|>⟧"]


# Prompts and completions

PAIR = {"prompt": "Say hi.", "completion": "Hello"}


def test_completions(folder: Path) -> None:
    assert pack_marked([PAIR]) == ["Say hi.⟦Hello<eos>⟧"]
    assert pack_marked([PAIR], "--no-eos") == ["Say hi.⟦Hello⟧"]
    assert pack_marked([PAIR], "--train-on", "all") == ["S⟦ay hi.Hello<eos>⟧"]
    assert pack_marked([PAIR], "--separator", "\n") == ["Say hi.⟦Hello<eos>⟧\n"]


def test_prompt_templates(folder: Path) -> None:
    [alpaca] = pack_marked([PAIR], "--prompt-template", "alpaca")
    assert alpaca.startswith("Below is an instruction that describes a task. Write")
    assert alpaca.endswith("### Instruction:\nSay hi.\n\n### Response:\n⟦Hello<eos>⟧")
    [as_chat] = pack_marked([PAIR], "--prompt-template", "chat")
    assert as_chat == "<user>Say hi.</user><assistant>⟦Hello</assistant>⟧"


def test_braces_in_a_prompt_are_only_text(folder: Path) -> None:
    record = {"instruction": "{output} {0} {", "output": "}"}
    [found] = pack_marked([record])
    assert "### Instruction:\n{output} {0} {\n" in found
    assert found.endswith("⟦}<eos>⟧")
    [found] = pack_marked([{"prompt": "{0}", "completion": "x"}], "--prompt-template", "alpaca")
    assert "### Instruction:\n{0}\n" in found


def test_a_prompt_may_be_empty_and_so_may_a_completion(folder: Path) -> None:
    assert pack_marked([{"prompt": "", "completion": "Hello"}]) == ["H⟦ello<eos>⟧"]
    manifest = pack_chat([PAIR, {"prompt": "Say hi.", "completion": ""}])
    assert manifest["documents"] == 1
    assert manifest["untrained_documents"] == 1


# What is counted


def test_turns_and_their_ends_are_counted(folder: Path) -> None:
    record = chat(user("Hi"), assistant("Hello"), user("Hi"), assistant("Hello"))
    tokenizer = chat_tokenizer(folder / "t", CHATML)
    manifest = pack_chat([record, record], template=None, tokenizer=tokenizer)
    assert (manifest["trained_turns"], manifest["turns_without_end"]) == (4, 0)
    manifest = pack_chat([record], template=TAGS, tokenizer=tokenizer)
    assert (manifest["trained_turns"], manifest["turns_without_end"]) == (2, 2)


def test_a_run_with_nothing_to_train_on_fails(folder: Path) -> None:
    refused(
        [chat(user("Hi"))] * 2, 1, "nothing to pack", "2 of those dropped have nothing to train"
    )


# Elsewhere in the pipeline


def many(count: int) -> list[dict[str, Any]]:
    """More than a megabyte, so that conversations are rendered in other processes."""
    return [
        chat(user(f"naïve {i} " + "?" * (i % 300)), assistant(f"{i}! " * (i % 50 + 1)))
        for i in range(count)
    ]


def test_processes_beside_the_run_change_nothing(folder: Path) -> None:
    records: list[Any] = many(4000)
    records[1234] = {"messages": 5}
    path = write(records)
    assert path.stat().st_size > 1 << 20
    results = []
    for workers in (1, 3):
        options = ("--workers", workers, "--unit-bytes", 300_000, "--on-error", "skip")
        manifest = pack_chat(path, *options)
        assert manifest["rejected_records"] == 1
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


def test_a_template_that_another_process_finds_no_turns_in(folder: Path) -> None:
    template = TAGS + "{% if messages | length < 2 %}{{ raise_exception('too few') }}{% endif %}"
    parts = ("refuses a question and its answer", "too few")
    for workers in (1, 3):  # the same words, whoever finds it out
        refused(many(4000), 1, *parts, template=template, options=["--workers", workers])


def test_a_template_that_asks_for_all_memory(folder: Path) -> None:
    template = TAGS + "{{ '%1000000000000d' % 5 }}"
    for workers in (1, 3):  # not a bug either, in whichever process
        refused(many(4000), 1, "out of memory", template=template, options=["--workers", workers])


def children(process: int) -> set[int]:
    """Of all threads of the process."""
    found = set[int]()
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= set(map(int, path.read_text().split()))
    return found


@pytest.mark.parametrize("kills", [1, 1000])
def test_a_process_that_is_killed_is_replaced(folder: Path, kills: int) -> None:
    """As the kernel does when the machine runs out of memory, once or again and again."""
    write(many(20_000))
    Path("t.jinja").write_text(TAGS)
    options = ("-l", 512, "-t", "bytes", "--workers", 2, "--chat-template", "t.jinja", "-o")
    command = [packer_script(), "pack", "data.jsonl", *map(str, options)]
    killed = set[int]()
    with subprocess.Popen([*command, "out"], stderr=subprocess.PIPE) as run:
        while run.poll() is None and len(killed) < kills:
            for child in children(run.pid) - killed:
                if len(killed) < kills:
                    killed.add(child)
                    os.kill(child, signal.SIGKILL)
        _, stderr = run.communicate(timeout=300)
    lost = b"was ended from outside, by signal 9"
    if kills > 1:
        assert (run.returncode, lost + b", 3 times" in stderr) == (1, True), stderr
        assert not Path("out").exists()
    else:
        assert (run.returncode, lost + b"; packing it again" in stderr) == (0, True), stderr
        subprocess.run([*command, "undisturbed"], check=True, capture_output=True)
        assert contents("out") == contents("undisturbed")


def test_wrap_leaves_out_what_has_nothing_to_train_on(folder: Path) -> None:
    records = [TWO, {"messages": TWO["messages"][:1]}, TWO]
    how = ["--strategy", "wrap", "--force-split"]
    manifest = pack_chat(records, *how)
    assert (manifest["untrained_documents"], manifest["dropped_documents"]) == (1, 1)
    assert manifest["documents"] == 2
    assert pack_chat(records, *how, "--keep-untrained", "--overwrite")["documents"] == 3


def trained_flags() -> list[Any]:
    return [labels != -100 for labels in recover_documents("out", "labels").values()]


def test_masks_go_with_the_options_of_rows(folder: Path) -> None:
    records = [TWO, *many(20), TWO]
    expected = pack_marked(records)
    for options in (
        ("--segment-multiple", 8),
        ("--strategy", "next-fit"),
        ("--balance", "attention"),
        ("--unit-bytes", 1000),
        ("--max-segments-per-row", 2, "--position-ids"),
    ):
        assert pack_marked(records, *options) == expected


def test_shifted_labels_train_the_same_tokens(folder: Path) -> None:
    manifest = pack_chat([TWO])
    [flags] = trained_flags()
    shifted = pack_chat([TWO], "--label-shift", "pre")
    [flags_shifted] = trained_flags()
    assert flags_shifted.tolist() == [*flags[1:].tolist(), False]
    assert shifted["trained_tokens"] == manifest["trained_tokens"] > 0
