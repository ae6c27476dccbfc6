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
    "text": "11d1000bf3eddfd2de42dd1c11d21c36",
    "text in pieces": "e2d673d3006ac4270c0b4d910c1b2766",
    "code": "76aa3e39b96f9d95b7706a19673fdddd",
    "parquet": "daded081206fbb7102847362f3810cad",
    "csv": "b1183d41cf324fd6b5e54ff32da6a091",
    "chat": "27dc2c8d8f84cc9154701a176634ec3e",
    "chat, last turn, truncated": "f51153dc1947e59e27fa47e82603eed6",
    "prompts": "c0becd23d98e427edf01c1be56c1560e",
    "tokens": "3393431e10b274c47ef4051fc31f9790",
    "segment multiple": "dfe11f4ece9ec5a9b2503e099364ae27",
    "shifted labels": "83597026e8696635a121fe53e55f2bcc",
    "few segments": "50df61492264cc7a1f77bd9298203ef0",
    "separator, dropped": "c94ba75df5d2fae325c77a4d3a3dc56e",
    "small units": "c5a93366789c11712edcbb561f2c42b8",
    "update": "207313ed2776b8c4e94139e11f8d0cc8",
    "ranks": "2978b6b152bd8fdd7593b7191910f8cb",
    "rejected": "d95f71f5c4c79ac83eca6896662c011d",
    "by best-fit": "e2d673d3006ac4270c0b4d910c1b2766",
    "by best-fit-decreasing": "0c61e2f40de993c91da526257c67be94",
    "by first-fit": "79d5edcdb682258c7cf1fc0245d579e3",
    "by online-best-fit": "167ad59279014ffc1ba9830bba37572b",
    "by online-first-fit": "d4da7a2e12f5357935af8363d4010c73",
    "by worst-fit": "238e250521e82fb2177e1925d802df08",
    "by first-fit-shuffle": "c0dbb5a1153bf4a6589e4a4528c0cbca",
    "by next-fit": "1daa7b934fb7cec15261991138bbb9c8",
    "by harmonic": "bbf7d0ccbb031fa6aa82af373dd73438",
    "by mffd": "5b903a2f66c2abb99f31a4d8f6ff0c18",
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
