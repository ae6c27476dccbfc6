"""Which tokens are trained on: those of the characters that are, and what goes around documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from chats import (
    TAGS,
    TWO,
    TWO_MARKED,
    assistant,
    chat,
    chat_tokenizer,
    pack_chat,
    pack_marked,
    user,
)
from support import recover_documents, succeeds
from tokenizers import Tokenizer, models, pre_tokenizers

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
@pytest.mark.parametrize("earlier", [[], [user("too long"), assistant("for a row")]])
def test_a_token_with_one_byte_in_a_span_is_trained(
    folder: Path, earlier: list[dict[str, Any]], backend: str
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:"
        "{% generation %}{{ m.content }}{% endgeneration %};{% else %}Q:{{ m.content }};"
        "{% endif %}{% endfor %}"
    )
    tokenizer = chat_tokenizer(folder / "t", template, glued(tiny_tokenizers.byte_level()))
    record = chat(*earlier, user("x"), assistant("Hi zoo"))
    options = ["--tokenizer-backend", backend, "-l", 14, "--overlong", "truncate-turns"]
    pack_chat([record], *options, template=None, tokenizer=tokenizer)
    succeeds("verify", "out", "--against-inputs")
    tokens = pieces(tokenizer)
    assert (":Hi", True) in tokens  # one of its bytes is the template's
    assert ("oo;", True) in tokens
    assert ("A", False) in tokens
    assert "".join(name for name, _ in tokens) == "Q:x;A:HiĠzoo;"
    flags = [flag for _, flag in tokens]
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
    tokens = pieces(tokenizer)
    assert ("oo;", False) in tokens
    assert [name for name, flag in tokens if flag] == ["7"]
    assert manifest["trained_turns"] == 1


def test_part_of_a_character_is_enough(folder: Path) -> None:
    """Tokens of a multi-byte character that a span holds are all trained, its neighbours not."""
    template = "{% for m in messages %}{% if m.role == 'assistant' %}é{% generation %}"
    template += "{{ m.content }}{% endgeneration %}é{% else %}q{% endif %}{% endfor %}"
    [text] = pack_marked([chat(user(""), assistant("한👍"))], template=template)
    assert text == "qé⟦한👍⟧é"
    tokenizer = chat_tokenizer(folder / "t", template)
    [text] = pack_marked(
        [chat(user(""), assistant("한👍"))], template=None, tokenizer=tokenizer
    )  # fmt: skip
    assert text == "qé⟦한👍⟧é"


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


def test_eos_of_conversations(folder: Path) -> None:
    assert pack_marked([TWO], "--eos") == [TWO_MARKED[:-1] + "<eos>⟧"]


def test_eos_is_not_trained_after_a_turn_that_is_not(folder: Path) -> None:
    record = chat(assistant("Hello"), user("Hi"))
    [text] = pack_marked([record], "--eos")
    assert text == "<assistant>⟦Hello</assistant>⟧<user>Hi</user><eos>"


def test_eos_that_the_template_wrote_is_not_doubled(folder: Path) -> None:
    template = TAGS.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")  # as phi3
    tokenizer = chat_tokenizer(folder / "t", template)
    how = {"template": None, "tokenizer": tokenizer}
    [plain], [with_eos] = pack_marked([TWO], **how), pack_marked([TWO], "--eos", **how)
    assert plain == with_eos == TWO_MARKED + "</s>"


def test_a_record_whose_only_trained_token_is_its_first(folder: Path) -> None:
    first = {"input_ids": [72, 105, 33], "labels": [72, -100, -100]}
    second = {"input_ids": [72, 105, 33], "labels": [72, 105, -100]}
    manifest = pack_chat([first, second], template=None)
    assert (manifest["documents"], manifest["untrained_documents"]) == (1, 1)
    assert manifest["trained_tokens"] == 1
