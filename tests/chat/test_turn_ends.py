"""Where turns end: in tokens that are named, in nothing, or where the next turn begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from chats import (
    PROMPT,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    marked,
    pack_chat,
    pack_marked,
    refused,
    run,
    user,
)
from conversations import Json

OPEN = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + PROMPT


def test_turns_that_end_in_nothing(folder: Path) -> None:
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    result = run([record], **how)
    assert result.exit_code == 2
    assert "does not end the assistant's turn, where another turn follows" in result.stderr
    assert "--turn-end TOKEN" in result.stderr
    assert "--allow-open-turns" in result.stderr
    assert pack_chat([record], "--train-on", "all", **how)["documents"] == 1
    manifest = pack_chat([record], "--allow-open-turns", **how)
    assert (manifest["trained_turns"], manifest["turns_without_end"]) == (2, 2)
    [text] = marked("out")
    assert text == "<|user|>\nHi<|assistant|>⟦\nHello⟧<|user|>\nBye<|assistant|>⟦\nCiao⟧"


def test_the_token_that_ends_turns_can_be_named(folder: Path) -> None:
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    manifest = pack_chat([record], "--turn-end", "<|user|>", **how)
    [text] = marked("out")
    assert text == ("<|user|>\nHi<|assistant|>⟦\nHello<|user|>⟧\nBye<|assistant|>⟦\nCiao<|user|>⟧")
    assert (manifest["trained_turns"], manifest["turns_without_end"]) == (2, 0)
    assert manifest["config"]["turn_end"] == ["<|user|>"]
    assert run([record], "--turn-end", "", **how).exit_code == 2
    assert run([record], "--turn-end", "x", "--train-on", "all", **how).exit_code == 2


@pytest.mark.parametrize("end", ["<|im_start|>", "<|im_end|>"])
def test_a_named_token_that_follows_no_turn_is_an_error(folder: Path, end: str) -> None:
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"))
    parts = (
        f"--turn-end: {end} does not follow the assistant's turn",
        "where another turn follows",
    )
    refused([record], 2, *parts, options=["--turn-end", end], **how)
    assert pack_chat([record], "--turn-end", end, "--allow-open-turns", **how)["documents"] == 1


def test_a_named_end_that_is_no_token_is_a_warning(folder: Path) -> None:
    tokenizer = chat_tokenizer(folder / "t", None)
    record = chat(user("Hi"), assistant("Hello"))
    template = OPEN.replace("<|{{ m.role }}|>", "<|im_{{ 'start' if m.role == 'user' else 'x' }}|>")
    for end, warned in (("<|im_start|>", False), ("<|im_st", True)):
        result = run([record], "--turn-end", end, template=template, tokenizer=tokenizer)
        assert result.exit_code == 0, result.stderr
        assert ("is not a token of its own" in result.stderr) == warned


def test_prompts_through_a_template_have_ends_of_turns_too(folder: Path) -> None:
    record = {"prompt": "Hi", "completion": "Hello"}
    how: Json = {"template": OPEN, "tokenizer": chat_tokenizer(folder / "t", None)}
    assert run([record], "--prompt-template", "chat", **how).exit_code == 2
    options = ["--prompt-template", "chat", "--turn-end", "<|user|>"]
    expected = "<|user|>\nHi<|assistant|>⟦\nHello<|user|>⟧"
    assert pack_marked([record], *options, **how) == [expected]
    Path("out").rename("kept")
    refused([record], 2, "--turn-end: is for messages", options=["--turn-end", "<|user|>"], **how)


def test_ends_are_found_behind_white_space(folder: Path) -> None:
    """Which is learned, too: it is written before the end."""
    how: Json = {"tokenizer": chat_tokenizer(folder / "t", None)}
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    between = OPEN.replace("{% endfor %}", "{{ '' if loop.last else '\\n' }}{% endfor %}", 1)
    expected = "<|user|>\nHi\n<|assistant|>⟦\nHello\n<|user|>⟧\nBye\n<|assistant|>⟦\nCiao<|user|>⟧"
    assert pack_marked([record], "--turn-end", "<|user|>", template=between, **how) == [expected]


def test_a_special_token_that_the_template_needs(folder: Path) -> None:
    record = chat(user("Hi"), assistant("Hello"))
    for options in ([], ["--train-on", "all"]):
        parts = ("the chat template needs bos_token, and the tokenizer names none",)
        refused([record], 2, *parts, options=options, template="{{ bos_token + '' }}" + TAGS)


def test_a_last_turn_without_an_end(folder: Path) -> None:
    template = TAGS.replace("</{{ m.role }}>", "{% if not loop.last %}</{{ m.role }}>{% endif %}")
    how: Json = {"template": template, "tokenizer": chat_tokenizer(folder / "t", None)}
    result = run([chat(user("Hi"), assistant("Hello"))], **how)
    assert result.exit_code == 2
    assert "turn, the last one" in result.stderr
