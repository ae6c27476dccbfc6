"""Shards keep their bytes: digests of runs of every kind, from before anything was moved.

A digest covers the shards alone; manifests may gain keys. Whoever changes rows on purpose puts new
digests here, says so in the changelog, and raises the version, so that `--update` mixes none of
the old with the new. `python tests/test_golden.py` prints all of them.
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
from conftest import packer

from packer_cli.strategies import NAMES

WORDS = "the of and lazy dog fox 你好 café 1234 ( ) [1,2] x=y \n\t don't naïve 👍🏽".split(" ")
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
    "text": "1ed08087f348a977c4c19f38527f0980",
    "text in pieces": "6db29680c3e0982a91ad79145c553955",
    "code": "8ba2fa864e0b86c17210d27528cf3d21",
    "parquet": "3ecc570f397744e0721743550b01f735",
    "csv": "dd482e015d3026ac24c066201bbc6080",
    "chat": "72b8ded6a2257158f1cedf35a06cb03b",
    "chat, last turn, truncated": "927896da3969b65af8a5bbd3543c8995",
    "prompts": "0cb22c32eebdc97228e08d0ebf0b4bb4",
    "tokens": "21aae33620367c07f717d2b1374869e7",
    "segment multiple": "e489d5bf3ad55b11f05e02e5d0c0611d",
    "shifted labels": "1f31370b479231377d9d5bb1f4e61698",
    "few segments": "5f91bf5a29ee59a99ca73a975fa687cf",
    "separator, dropped": "48ae58ea47ec88e4cda1cb4890d10db9",
    "small units": "bd327fedbb340fdffbb73b1058030fae",
    "update": "ae6c162536109bdbb0489a057f39a9a5",
    "ranks": "9016663315f22dd79189315e289b2f74",
    "rejected": "061a166aaaeda77b0112adfc2051cb35",
    "by best-fit": "6db29680c3e0982a91ad79145c553955",
    "by first-fit": "0e154714e0687c2ab01473fd7c282cab",
    "by online-best-fit": "cfe022dd839579d22b981d3365e15571",
    "by online-first-fit": "2a86186caf9c472bdbce43e25b8418fa",
    "by worst-fit": "75769a3436e331ba551b6c6f976bcc79",
    "by first-fit-shuffle": "36ded20430b0aa1f72258698c91d44fc",
    "by next-fit": "2bd2649adff8f68c27fd5620bc790893",
    "by harmonic": "313003468bf69e0e34a8a04134bd8d5d",
    "by mffd": "5a8f5ac31490df419f88dac599cda791",
    "by wrap": "5618d8cdb41133c4e46f365d1425eec7",
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
