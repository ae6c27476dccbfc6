"""Shards keep their bytes: digests of runs of every kind, from before anything was moved.

A digest covers the shards alone; manifests may gain keys. Whoever changes rows on purpose puts new
digests here, says so in the changelog, and raises the version, so that `--update` mixes none of
the old with the new. `PYTHONPATH=tests python tests/run/test_golden.py` prints all of them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import tiny_tokenizers
from chats import CHATML
from support import packer

from packer_cli.config.strategies import NAMES

WORDS = [
    "the",
    "of",
    "lazy dog",
    "fox",
    "你好",
    "café",
    "1234",
    "( [1,2] )",
    "x=y",
    "\n\t",
    "don't",
    "naïve",
    "👍🏽",
]
Json = dict[str, Any]


def _text(random_: random.Random, most: int) -> str:
    return " ".join(random_.choice(WORDS) for _ in range(random_.randrange(most)))


def _lines(path: str, records: list[Any]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def write_inputs() -> None:
    """Every kind of input, the same on every machine."""
    random_ = random.Random(0)
    texts = [_text(random_, 60) for _ in range(400)]
    _lines("text.jsonl", [{"text": text} for text in texts])
    _lines("more.jsonl", [{"text": text[::-1]} for text in texts[:50]])
    Path("code.txt").write_text("def f(x):\n\treturn {'a': [x]}\n\n" * 150)
    column = pa.table({"text": texts, "number": list(range(len(texts)))})
    pa.parquet.write_table(column, "text.parquet", row_group_size=60)
    rows = "".join(f'{i},"{text}"\n' for i, text in enumerate(texts))
    Path("text.csv").write_text("number,text\n" + rows)
    roles = ("user", "assistant")
    chats = [
        [
            {"role": roles[turn % 2], "content": _text(random_, 12)}
            for turn in range(random_.choice((2, 4, 6)))
        ]
        for _ in range(120)
    ]
    _lines("chat.jsonl", [{"messages": chat} for chat in chats])
    Path("chat.jinja").write_text(CHATML)
    prompts = [(_text(random_, 15), _text(random_, 25) + "!") for _ in range(150)]
    _lines("prompts.jsonl", [{"prompt": one, "completion": two} for one, two in prompts])
    tokens = [[random_.randrange(300) for _ in range(random_.randrange(1, 90))] for _ in range(200)]
    _lines("tokens.jsonl", [{"input_ids": ids} for ids in tokens])
    bad = [{"text": texts[0]}, {"text": 5}, {"txt": "a"}, *({"text": text} for text in texts[:99])]
    _lines("bad.jsonl", bad)
    tiny_tokenizers.save(Path("pieces"), tiny_tokenizers.sentencepiece())


def run(*arguments: object) -> None:
    result = packer("pack", *arguments, "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr


def _bytes(*arguments: object) -> Callable[[], None]:
    return lambda: run(*arguments, "-t", "bytes", "-l", 96)


def _pieces(*arguments: object) -> Callable[[], None]:
    return lambda: run(*arguments, "-t", "pieces", "-l", 64)


def _update() -> None:
    _bytes("text.jsonl", "--unit-bytes", "4k")()
    with open("text.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    _bytes("text.jsonl", "more.jsonl", "--unit-bytes", "4k", "--update")()


def _ranks() -> None:
    for rank in range(3):
        _bytes("text.jsonl", "--unit-bytes", "4k", "--rank", rank, "--world-size", 3)()


CHAT = ("chat.jsonl", "--chat-template", "chat.jinja", "-l", 256)
RUNS: dict[str, Callable[[], None]] = {
    "text": _bytes("text.jsonl"),
    "text in pieces": _pieces("text.jsonl"),
    "code": _pieces("code.txt", "--sample-by", "paragraph"),
    "parquet": _pieces("text.parquet", "--eos-token", "<unk>"),
    "csv": _bytes("text.csv"),
    "chat": lambda: run(*CHAT, "-t", "bytes"),
    "chat, last turn, truncated": lambda: run(
        *CHAT, "-t", "pieces", "--train-on", "last-assistant", "--overlong", "truncate-turns"
    ),
    "prompts": _pieces("prompts.jsonl"),
    "tokens": lambda: run("tokens.jsonl", "-l", 64, "--position-ids"),
    "segment multiple": _bytes("text.jsonl", "--segment-multiple", 16, "--balance", "attention"),
    "shifted labels": _pieces("prompts.jsonl", "--label-shift", "pre"),
    "few segments": _bytes("text.jsonl", "--max-segments-per-row", 2, "--seed", 7),
    "separator, dropped": _bytes("text.jsonl", "--separator", "\n\n", "--overlong", "drop"),
    "small units": _bytes("text.jsonl", "--unit-bytes", "2k", "--shard-bytes", "4k"),
    "update": _update,
    "ranks": _ranks,
    "rejected": _bytes("bad.jsonl", "--on-error", "skip"),
    **{f"by {name}": _pieces("text.jsonl", "--strategy", name) for name in NAMES},
}


def digest() -> str:
    """Of all shards, whatever they are called."""
    sha = hashlib.sha256()
    for shard in json.loads(Path("out/manifest.json").read_bytes())["shards"]:
        sha.update(Path("out", shard["file"]).read_bytes())
    return sha.hexdigest()[:32]


GOLDEN = {
    "text": "31a0ccb0033a43b19384c7f67cc8d170",
    "text in pieces": "afb9a7d15076df6ac33f678be585c35d",
    "code": "8ba2fa864e0b86c17210d27528cf3d21",
    "parquet": "3bc561acca3f098897a4658c57a3381e",
    "csv": "d817736b470fda2e5ed9cf79a541cfc1",
    "chat": "5331698559d2196ef6f7430943c0c350",
    "chat, last turn, truncated": "e8efbf2730da1d25091d72b15fe38196",
    "prompts": "353f0bce2e49e9073e4cb178a7ac546d",
    "tokens": "7beab5e7e16ae8e9687deae3239d5c87",
    "segment multiple": "8749797783ec603ff8550ab2b81b19ce",
    "shifted labels": "35d63a86e63f0816b1025f95e2a44b4c",
    "few segments": "9056b0a96bc18cfa8362656f6a00f89f",
    "separator, dropped": "3824b2f8420ae15eb358d2cea47b0eb7",
    "small units": "6e68d7cb8574a73efadb6a8f171ef4eb",
    "update": "318f6a271c3013f4ee5bb731bbd9b36b",
    "ranks": "c868ef2adbfb3887f18604bd00ffc0e2",
    "rejected": "1937f013701f5c818096e4a34be84b15",
    "by best-fit": "afb9a7d15076df6ac33f678be585c35d",
    "by first-fit": "bd2500451a0c0eb6fcde3f557aea1f56",
    "by online-best-fit": "167ad59279014ffc1ba9830bba37572b",
    "by online-first-fit": "d4da7a2e12f5357935af8363d4010c73",
    "by worst-fit": "238e250521e82fb2177e1925d802df08",
    "by first-fit-shuffle": "c0dbb5a1153bf4a6589e4a4528c0cbca",
    "by next-fit": "1daa7b934fb7cec15261991138bbb9c8",
    "by harmonic": "bbf7d0ccbb031fa6aa82af373dd73438",
    "by mffd": "1f33b1c038b5af52b4a67f3074ddf066",
    "by wrap": "e5e3a5010d4e080272df1c27cae956c7",
}


@pytest.mark.parametrize("name", RUNS)
def test_shards_keep_their_bytes(folder: Path, name: str) -> None:
    write_inputs()
    RUNS[name]()
    assert digest() == GOLDEN[name]


if __name__ == "__main__":
    import os
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for name, packs in RUNS.items():
            write_inputs()
            packs()
            print(f'    "{name}": "{digest()}",')
            shutil.rmtree("out")
