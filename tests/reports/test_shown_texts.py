"""`packer show`: texts come back, nothing hostile reaches the terminal, and colours only there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from showing import IN_ORDER, rewrite, show, show_json, texts_of, write_ids
from support import assert_error, jsonl, pack, packer, packer_process, packer_script
from tokenizers import Tokenizer

pytestmark = pytest.mark.usefixtures("folder")


def pack_with(document: tiny_tokenizers.Json, name: str, length: int = 64, **files: Any) -> None:
    tokenizer = tiny_tokenizers.save(
        Path("tok"), document, tokenizer_config={"eos_token": "</s>"}, **files
    )
    result = packer("pack", name, "-l", length, "-t", tokenizer, "-q", "-o", "out", *IN_ORDER)
    assert result.exit_code == 0, result.stderr


NASTY = "The quick  brown fox\n\n  naïve café, Привет 你好 👍🏽 don't"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram"])
def test_texts_come_back(folder: Path, kind: str) -> None:
    document = getattr(tiny_tokenizers, kind)()
    if kind != "byte_level":
        document["decoder"] = {
            "sentencepiece": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "unigram": {
                "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True,
            },
        }[kind]  # fmt: skip
    text = NASTY if kind != "unigram" else "The quick brown fox jumps."
    (folder / "a.jsonl").write_bytes(jsonl(text, text))
    pack_with(document, "a.jsonl", 400)
    assert texts_of() == [text + "</s>"] * 2
    first, rest = show_json()[0]["segments"][0]["spans"]
    assert first["trained"] is False
    assert rest["trained"] is True
    assert first["text"] + rest["text"] == text + "</s>"  # no space was lost between them


def test_only_cut_characters_are_unreadable(folder: Path) -> None:
    """Also where the tokens of a whole text are bytes: the library would give up all of them."""
    (folder / "a.jsonl").write_bytes(jsonl("ᐅᕝᕙᓗ"))
    fallback = tiny_tokenizers.sentencepiece()
    fallback["normalizer"] = None
    fallback["decoder"] = {"type": "ByteFallback"}
    pack_with(fallback, "a.jsonl")
    assert show().splitlines()[4] == "�⟦��ᕝᕙᓗ</s>⟧"
    assert texts_of() == ["ᐅᕝᕙᓗ</s>"]


@pytest.fixture
def any_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let packer pack ids that the tokenizer does not have, as other versions may have done."""
    monkeypatch.setattr(
        "packer_cli.tokenization.encoding._refuse_ids_above", lambda *arguments: None
    )


@pytest.mark.usefixtures("any_ids")
def test_special_and_unknown_tokens(folder: Path) -> None:
    document = tiny_tokenizers.byte_level()
    document = tiny_tokenizers.with_added_token(document, "<|im_start|>", 500)
    tokenizer = Tokenizer.from_str(json.dumps(document))
    user = tokenizer.encode("user\n").ids
    answer = tokenizer.encode("yes it is").ids
    ids = [0, 500, *user, *answer, 1, 99_999]
    flags = [0] * (2 + len(user)) + [1] * (len(answer) + 1) + [0]
    write_ids(folder / "a.jsonl", (ids, flags))
    pack_with(document, "a.jsonl")
    assert (
        show()
        .split("trained\n")[1]
        .startswith("<s><|im_start|>user\n⟦yes it is</s>⟧<id 99999>\n...")
    )
    (segment,) = show_json()[0]["segments"]
    assert segment["spans"] == [
        {"text": "<s><|im_start|>user\n", "trained": False},
        {"text": "yes it is</s>", "trained": True},
        {"text": "<id 99999>", "trained": False},
    ]


@pytest.mark.usefixtures("any_ids")
def test_an_unknown_id_with_the_bytes_tokenizer(folder: Path) -> None:
    write_ids(folder / "a.jsonl", ([97, 257, 300, 98], [0, 1, 1, 1]))
    pack("a.jsonl", "-l", 4)
    assert show().endswith("\na⟦<pad><id 300>b⟧\n")


def test_the_tokenizer_is_gone_or_another(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("text"))
    pack_with(tiny_tokenizers.byte_level(), "a.jsonl")
    text = show()
    path = folder / "out" / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content + b"\n")
    assert_error(packer("show", "out"), 1, "out/tokenizer.json: its sha256 is ", "the manifest")
    ids = show("--ids")
    path.unlink()
    result = packer("show", "out")
    assert result.stderr == (
        "packer: showing token ids: out/tokenizer.json: cannot be read: No such file or directory\n"
    )
    assert result.stdout == ids != text


def test_a_tokenizer_that_cannot_be_loaded(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("text"))
    pack_with(tiny_tokenizers.byte_level(), "a.jsonl")
    (folder / "out" / "tokenizer.json").write_bytes(b"{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    rewrite(lambda manifest: manifest["tokenizer"].update(sha256=digest))
    message = "out/tokenizer.json: cannot be loaded: "
    assert_error(packer("show", "out"), 1, message)
    assert "── segment 0: a.jsonl" in show("--ids")


HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\x00\u202e\u2028\ufeff ⟦x⟧ [bold]\ttab \\x1b"


def test_hostile_text_stays_harmless(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(HOSTILE))
    (folder / "a.jsonl").rename(folder / "a\x1b[31m\n.jsonl")
    pack("a\x1b[31m\n.jsonl", "-l", 128)
    text = show()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e\ufeff]", text)
    head, shown = text.splitlines()[3:5]
    assert head.startswith("── segment 0: a\\x1b[31m\\n.jsonl byte 0, ")
    assert shown == (
        r"\x1b⟦[31mred\x1b]0;title\x07\x9b2J\r\x00\u202e\u2028\ufeff \u27e6x\u27e7 [bold]"
        "\ttab \\x1b<eos>⟧"
    )
    raw = packer("show", "out", "--json").stdout
    assert raw.isascii()
    assert raw.isprintable() or raw.count("\n") == 1
    assert texts_of() == [HOSTILE + "<eos>"]


def on_terminal(*arguments: object, **environment: str) -> str:
    """What `packer show` sends to a terminal."""
    terminal, child = pty.openpty()
    base = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    command = [packer_script(), "show", "out", *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=child, env=base | {"TERM": "xterm-256color"} | environment
    )
    os.close(child)
    sent = io.BytesIO()
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # how Linux says that the other side is gone
            break
        if not data:
            break
        sent.write(data)
    os.close(terminal)
    assert process.wait(timeout=300) == 0
    return sent.getvalue().decode().replace("\r\n", "\n")


def test_colours_on_a_terminal(packed: Path) -> None:
    text = on_terminal()
    assert text.startswith("\x1b[32mtrained tokens\x1b[0m\x1b[2m, others, \x1b[0m")
    assert "\n\x1b[2mf\x1b[0m\x1b[32mirst\x1b[0m\x1b[7;32m<eos>\x1b[0m\n" in text
    assert "\x1b[2ms\x1b[0m\x1b[32mecond↵\x1b[0m\n\x1b[7;32m<eos>\x1b[0m\n" in text
    assert "⟦" not in text
    without = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert without.split("\n", 1)[1].replace("↵", "") == show().split("\n", 1)[1].replace(
        "⟦", ""
    ).replace("⟧", "")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_without_colour(packed: Path, environment: dict[str, str]) -> None:
    assert on_terminal(**environment) == show()


def test_pipes(packed: Path) -> None:
    result = packer_process("show", "out", env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert result.stdout.decode() == show()
    (row,) = packer_process("show", "out", "--json").stdout.splitlines()
    assert json.loads(row) == show_json()[0]


def test_an_encoding_without_brackets(packed: Path) -> None:
    result = packer_process("show", "out", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0
    text = result.stdout.decode("ascii")
    assert "\n-- segment 0: a.jsonl byte 0, 6 tokens, 5 trained\nf[[irst<eos>]]\n" in text


def test_a_reader_that_leaves(many_shards: Path) -> None:
    command = f"{packer_script()} show out 0--1 | head -n 1"
    result = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout == "⟦trained tokens⟧, others\n"
    assert result.stderr == ""
