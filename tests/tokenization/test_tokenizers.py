"""What surrounds a document's tokens: BOS, EOS, padding, and what tokenizer.json must not do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers as tiny
from support import assert_error, check_directory, jsonl, packer, recover_documents, succeeds
from tiny_tokenizers import BOS, BOS_ID, EOS, EOS_ID

from packer_cli import open_packed
from packer_cli.errors import UsageError
from packer_cli.result.columns import rows_of
from packer_cli.tokenization.locate import locate
from packer_cli.tokenization.tokenizer import Framing, Tokenizer, bytes_tokenizer, load_tokenizer

Load = Callable[..., Tokenizer]
ENGINES = ["tokenizers", "gigatoken"]
EOS_CONFIG = {"eos_token": EOS}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(document, engine, companion={...}, option=...): through a folder, as users do."""

    def make(document: tiny.Json, engine: str = "tokenizers", **rest: Any) -> Tokenizer:
        companions = {name: rest.pop(name) for name in list(rest) if isinstance(rest[name], dict)}
        files = locate(str(tiny.save(tmp_path / "tokenizer", document, **companions)))
        return load_tokenizer(files, backend=engine, framing=Framing(**rest))

    return make


def documents(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    ids, offsets, trained = tokenizer.encode(list(texts))
    assert trained is None
    assert ids.dtype == np.uint32
    assert offsets.dtype == np.int64
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


@pytest.mark.parametrize("engine", ENGINES)
def test_truncation_and_padding_saved_in_tokenizer_json_are_switched_off(
    load: Load, engine: str
) -> None:
    document = tiny.byte_level()
    long, short = "the quick brown fox " * 50, "a"
    expected = documents(load(document, engine, tokenizer_config=EOS_CONFIG), long, short)
    document["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    document["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": EOS_ID, "pad_type_id": 0, "pad_token": EOS,
    }  # fmt: skip
    assert documents(load(document, engine, tokenizer_config=EOS_CONFIG), long, short) == expected
    assert len(expected[0]) > 100
    assert len(expected[1]) == 2


def test_dropout_saved_in_tokenizer_json_is_switched_off(load: Load) -> None:
    document = tiny.byte_level()
    text = "the quick brown fox jumps over the lazy dog"
    expected = documents(load(document, tokenizer_config=EOS_CONFIG), text)
    document["model"]["dropout"] = 0.9
    tokenizer = load(document, tokenizer_config=EOS_CONFIG)
    assert [documents(tokenizer, text) for _ in range(5)] == [expected] * 5


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_may_lie_above_the_vocabulary_size(load: Load, engine: str) -> None:
    document = tiny.with_added_token(tiny.byte_level(), "<|high|>", 200_019)
    tokenizer = load(document, engine, tokenizer_config={"eos_token": "<|high|>"})
    assert tokenizer.info.vocab_size == 401
    assert tokenizer.info.eos_token_id == tokenizer.info.pad_token_id == 200_019
    a, b = (document["model"]["vocab"][letter] for letter in "ab")
    assert documents(tokenizer, "a<|high|>b") == [[a, 200_019, b, 200_019]]


TOKEN = {"__type": "AddedToken", "content": BOS, "lstrip": False}
ADDED = 400
# id: (files beside tokenizer.json and how documents are framed, ids of BOS, EOS and padding)
NAMED: dict[str, tuple[dict[str, Any], tuple[int | None, int | None, int]]] = {
    "strings": (
        {"tokenizer_config": {"eos_token": EOS, "bos_token": BOS}}, (BOS_ID, EOS_ID, EOS_ID)),
    "objects": (
        {"tokenizer_config": {"eos_token": TOKEN | {"content": EOS}, "bos_token": TOKEN}},
        (BOS_ID, EOS_ID, EOS_ID)),
    "special_tokens_map": (
        {"special_tokens_map": {"eos_token": EOS, "bos_token": {"content": BOS}}},
        (BOS_ID, EOS_ID, EOS_ID)),
    "config before map": (
        {"tokenizer_config": {"eos_token": EOS, "bos_token": None},
         "special_tokens_map": {"eos_token": "x", "bos_token": BOS}}, (BOS_ID, EOS_ID, EOS_ID)),
    "padding": ({"tokenizer_config": {"eos_token": EOS, "pad_token": BOS}}, (None, EOS_ID, BOS_ID)),
    "no such BOS": (
        {"tokenizer_config": {"eos_token": EOS, "bos_token": "<none>"}}, (None, EOS_ID, EOS_ID)),
    "two candidates for EOS": ({"eos": False}, (None, None, 0)),
    "by option": (
        {"tokenizer_config": EOS_CONFIG, "eos_token": "<|endoftext|>"}, (None, ADDED, ADDED)),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_which_tokens_are_bos_eos_and_padding(load: Load, case: str) -> None:
    rest, expected = NAMED[case]
    document = tiny.with_added_token(tiny.byte_level(), "<|endoftext|>", ADDED)
    tokenizer = load(document, **rest)
    info = tokenizer.info
    assert (info.bos_token_id, info.eos_token_id, info.pad_token_id) == expected
    assert documents(tokenizer, "a")[0][1:] == [expected[1]] * (expected[1] is not None)


X, Y = 2, 3  # of tiny.letters


# id: (what the post-processor makes, how it is framed, the text, its tokens)
FRAMED: dict[str, tuple[tuple[str, ...], dict[str, bool], str, list[int]]] = {
    "EOS appended": ((), {}, "xy", [X, Y, EOS_ID]),
    "EOS in the text already": ((), {}, "xy</s>", [X, Y, EOS_ID]),
    "no EOS": ((), {"eos": False}, "xy", [X, Y]),
    "post-processor EOS": (("A", EOS), {}, "xy", [X, Y, EOS_ID]),
    "no post-processor EOS": (("A", EOS), {"eos": False}, "xy", [X, Y]),
    "BOS": ((BOS, "A"), {}, "xy", [BOS_ID, X, Y, EOS_ID]),
    "BOS in the text already": ((BOS, "A"), {}, "<s>xy", [BOS_ID, X, Y, EOS_ID]),
    "BOS and EOS": ((BOS, "A", EOS), {}, "xy", [BOS_ID, X, Y, EOS_ID]),
    "both in the text already": ((BOS, "A", EOS), {}, "<s>xy</s>", [BOS_ID, X, Y, EOS_ID]),
    "EOS after another suffix": (("A", BOS), {}, "xy", [X, Y, BOS_ID, EOS_ID]),
    "empty text": ((BOS, "A", EOS), {}, "", []),
    "text without a token": ((BOS, "A", EOS), {}, "abc", []),
}


@pytest.mark.parametrize("case", FRAMED)
def test_bos_and_eos_are_there_once(load: Load, case: str) -> None:
    template, options, text, expected = FRAMED[case]
    document = tiny.letters()
    if template:
        document = tiny.with_template(document, *template)
    assert documents(load(document, **options), "x", text, "y")[1] == expected


def test_a_post_processor_that_rewrites_the_text_is_refused(load: Load) -> None:
    document = tiny.with_template(tiny.letters(), "A", EOS, "A")
    with pytest.raises(UsageError, match="post-processor rewrites the text's own tokens"):
        load(document)


@pytest.mark.parametrize(
    ("config", "arguments", "part"),
    [
        ({}, [], "no configuration names its EOS token"),
        ({"eos_token": "<none>"}, [], "'<none>' is not in the vocabulary"),
        ({"eos_token": EOS}, ["--eos-token", "<none>"], "'<none>' is not in the vocabulary"),
        ({"eos_token": EOS}, ["--eos-token", ""], "'' is not in the vocabulary"),
    ],
)
@pytest.mark.parametrize("engine", ["tokenizers", "auto"])
def test_an_unusable_eos_is_an_error_that_names_the_option(
    folder: Path, engine: str, config: tiny.Json, arguments: list[str], part: str
) -> None:
    document = tiny.with_added_token(tiny.byte_level(), "<|endoftext|>", 400)  # two candidates
    tiny.save(folder / "tok", document, tokenizer_config=config)
    Path("data.jsonl").write_bytes(jsonl("a"))
    command = ["pack", "data.jsonl", "-l", "8", "-t", "tok", "--tokenizer-backend", engine]
    result = packer(*command, *arguments)
    assert_error(result, 2, "tokenizer tok: ", part)
    assert "--eos-token" in result.stderr
    assert "--no-eos" in result.stderr
    assert not Path("data-packed-8").exists()
    if not arguments:
        succeeds(*command, "--no-eos", "-q")
        assert [ids.tolist() for ids in recover_documents("data-packed-8").values()] == [
            [document["model"]["vocab"]["a"]]
        ]


def test_padding_is_masked_by_position_not_by_id(folder: Path) -> None:
    """The pad id, here that of EOS, stays a trained token wherever a document holds it."""
    tiny.save(folder / "tok", tiny.letters(), tokenizer_config=EOS_CONFIG)
    Path("data.jsonl").write_bytes(jsonl("x</s>y"))
    succeeds("pack", "data.jsonl", "-l", "6", "-t", "tok", "-o", "out", "-q")
    manifest = check_directory("out")
    assert manifest["tokenizer"]["pad_token_id"] == EOS_ID
    packed = open_packed("out")
    (batch,) = packed.batches(manifest["shards"][0])
    columns = {name: rows_of(batch.column(name)).tolist() for name in batch.schema.names[:3]}
    assert columns == {
        "input_ids": [[X, EOS_ID, Y, EOS_ID, EOS_ID, EOS_ID]],
        "labels": [[-100, EOS_ID, Y, EOS_ID, -100, -100]],
        "attention_mask": [[1, 1, 1, 1, 0, 0]],
    }


def test_texts_without_a_token_are_counted_as_empty(folder: Path) -> None:
    tiny.save(folder / "tok", tiny.with_template(tiny.letters(), BOS, "A", EOS))
    Path("data.jsonl").write_bytes(jsonl("", "abc", "x", "  "))
    succeeds("pack", "data.jsonl", "-l", "6", "-t", "tok", "-q", "-o", "out")
    manifest = check_directory("out")
    assert (manifest["documents"], manifest["empty_documents"]) == (1, 3)
    assert [ids.tolist() for ids in recover_documents("out").values()] == [[BOS_ID, X, EOS_ID]]


def test_bytes_tokenizer() -> None:
    text = "aé\n日🙂"
    assert documents(bytes_tokenizer(Framing()), text, "", "b") == [
        [*text.encode(), 256], [], [98, 256],
    ]  # fmt: skip
    assert documents(bytes_tokenizer(Framing(eos=False)), text, "") == [list(text.encode()), []]
    assert documents(bytes_tokenizer(Framing())) == []
    info = bytes_tokenizer(Framing()).info
    assert (info.vocab_size, info.eos_token_id, info.pad_token_id) == (258, 256, 257)
