"""Results keep their bytes: digests of runs and exports of every kind, from before anything moved.

The first digest of a line covers the shards of all manifests, or the files of an export; the second
one the totals of the manifests that are not zero, which may therefore gain keys. Whoever changes
rows on purpose puts new digests here, says so in the changelog, and raises the version, so that
`--add` mixes none of the old with the new. `PYTHONPATH=tests python tests/run/test_golden.py`
prints all of them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import tiny_tokenizers
from chats import CHATML
from support import ALL_COLUMNS, succeeds

from packer_cli.cli.export import EXPORT_FORMATS
from packer_cli.export import MARKER
from packer_cli.options.options import NAMES

WORDS = [
    "the", "of", "lazy dog", "fox", "你好", "café", "1234", "( [1,2] )", "x=y", "\n\t", "don't",
    "naïve", "👍🏽",
]  # fmt: skip
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
    byte_level = tiny_tokenizers.byte_level()
    for number, part in enumerate(("prefix", "suffix", "middle")):
        tiny_tokenizers.with_added_token(byte_level, f"<|fim_{part}|>", 1000 + number)
    tiny_tokenizers.save(
        Path("fim"), byte_level, tokenizer_config={"eos_token": tiny_tokenizers.EOS}
    )
    for size in (20, 30, 30) * 90:
        _text(random_, size)  # the digests of what follows are of data drawn after these
    _lines("shown.jsonl", [{"messages": chat, "note": "left out"} for chat in _reasoned(random_)])
    Path("mix.toml").write_text(RECIPE)


def _reasoned(random_: random.Random) -> list[list[Json]]:
    """Conversations with reasoning, flags and turns that the template does not show."""
    return [
        [
            {"role": "system", "content": _text(random_, 5)},
            {"role": "user", "content": _text(random_, 9)},
            {"role": "assistant", "content": _text(random_, 9), "train": number % 3 > 0},
            {"role": "user", "content": _text(random_, 9)},
            {"role": "assistant", "content": "so", "reasoning_content": _text(random_, 9)},
        ]
        for number in range(60)
    ]


def run(*arguments: object, out: str = "out", command: str = "pack") -> None:
    succeeds(command, *arguments, "-q", "-o", out)


def _bytes(*arguments: object) -> Callable[[], None]:
    return lambda: run(*arguments, "-t", "bytes", "-l", 96)


def _pieces(*arguments: object) -> Callable[[], None]:
    return lambda: run(*arguments, "-t", "pieces", "-l", 64)


def _added() -> None:
    _bytes("text.jsonl", "--unit-bytes", "4k")()
    with open("text.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    _bytes("text.jsonl", "more.jsonl", "--unit-bytes", "4k", "--add")()


def _ranks() -> None:
    for rank in range(3):
        _bytes("text.jsonl", "--unit-bytes", "4k", "--rank", rank, "--world-size", 3)()


def _tokenized(*options: object) -> None:
    """A tokenized directory in which conversations are, with turn ends and what is trained on."""
    run(*CHAT[:3], "-t", "pieces", "--unit-bytes", "8k", *options, out="tok", command="tokenize")


def _packed_again(*options: object) -> None:
    _tokenized()
    run("tok", "-l", 128, *options)


def _exported(form: str) -> Callable[[], None]:
    def export() -> None:
        packed = "prompts.jsonl" if form == "unpacked" else "text.jsonl"
        if form == "packed":
            _tokenized()
            run("tok", "-l", 128, "--view", out="result")
        else:
            run(packed, "-t", "pieces", "-l", 64, "--unit-bytes", "4k", out="result")
        succeeds("export", "result", "--to", form, "-o", "out", "-q")

    return export


RECIPE = """
max_length = 128
tokenizer = "pieces"
seed = 3
unit_bytes = "8k"

[[source]]
name = "words"
inputs = ["text.jsonl", "more.jsonl"]
weight = 3

[[source]]
name = "chats"
inputs = ["chat.jsonl"]
chat_template = "chat.jinja"
weight = 1
max_epochs = 10

[[source]]
name = "ids"
inputs = ["tokens.jsonl"]
epochs = 0.5

[validation]
share = "10%"
"""
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
    "tokens": lambda: run("tokens.jsonl", "-l", 64, *ALL_COLUMNS),
    "segment multiple": _bytes("text.jsonl", "--segment-multiple", 16, "--balance", "attention"),
    "few segments": _bytes("text.jsonl", "--max-segments-per-row", 2, "--seed", 7),
    "dropped": _bytes("text.jsonl", "--overlong", "drop"),
    "small units": _bytes("text.jsonl", "--unit-bytes", "2k", "--shard-bytes", "4k"),
    "added to": _added,
    "ranks": _ranks,
    "rejected": _bytes("bad.jsonl", "--on-error", "skip"),
    **{f"by {name}": _pieces("text.jsonl", "--strategy", name) for name in NAMES},
    "each turn": lambda: run(*CHAT, "-t", "pieces", "--turns", "each"),
    "reasoning and flags": lambda: run("shown.jsonl", *CHAT[1:], "-t", "bytes"),
    "fill in the middle": lambda: run("text.jsonl", "-t", "fim", "-l", 64, "--fim-rate", 0.5),
    "tokenized": lambda: run(*CHAT[:3], "-t", "bytes", command="tokenize"),
    "packed again": _packed_again,
    "view": lambda: _packed_again("--view"),
    "view in another order": lambda: _packed_again("--view", "--seed", 5),
    "recipe": lambda: run("mix.toml"),
    "recipe as a view": lambda: run("mix.toml", "--view"),
    **{f"exported to {form}": _exported(form) for form in EXPORT_FORMATS},
}


def digests() -> str:
    """Digests of all shards, or all files of an export, and of the totals of the manifests."""
    data, totals = hashlib.sha256(), []
    for path in sorted(Path("out").rglob("manifest.json")):
        manifest = json.loads(path.read_bytes())
        for shard in manifest.get("shards", []):
            data.update((path.parent / shard["file"]).read_bytes())
        totals.append({key: value for key, value in manifest.items() if _is_total(key, value)})
    if not totals:
        for path in sorted(Path("out").rglob("*")):
            if path.is_file() and path.name != MARKER:
                data.update(_content(path))
    said = json.dumps(totals, sort_keys=True).encode()
    return f"{data.hexdigest()[:32]} {hashlib.sha256(said).hexdigest()[:16]}"


def _is_total(key: str, value: Any) -> bool:
    """Not what templates leave out, token by token of each kind: nobody is told of it."""
    by_kind = key.startswith("unshown_") and key.endswith("_tokens") and key != "unshown_tokens"
    of_totals = isinstance(value, int | float) or key == "histograms"
    return of_totals and bool(value) and not by_kind and key != "format_version"


def _content(path: Path) -> bytes:
    """A Parquet file's rows, and a compressed file's text: bytes depend on the libraries."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix != ".parquet":
        return path.read_bytes()
    return json.dumps(pa.parquet.read_table(path).to_pylist()).encode()


GOLDEN = {
    "text": "11d1000bf3eddfd2de42dd1c11d21c36 454b2c817532ce20",
    "text in pieces": "e2d673d3006ac4270c0b4d910c1b2766 5f21481adbf99997",
    "code": "76aa3e39b96f9d95b7706a19673fdddd 7c7cf88be9b10061",
    "parquet": "daded081206fbb7102847362f3810cad 5f21481adbf99997",
    "csv": "b1183d41cf324fd6b5e54ff32da6a091 454b2c817532ce20",
    "chat": "27dc2c8d8f84cc9154701a176634ec3e d1ae733cb9d2994b",
    "chat, last turn, truncated": "f51153dc1947e59e27fa47e82603eed6 5ba39c0def5a5911",
    "prompts": "c0becd23d98e427edf01c1be56c1560e 7d2d238138cc0886",
    "tokens": "3393431e10b274c47ef4051fc31f9790 b97a0eed8778b161",
    "segment multiple": "dfe11f4ece9ec5a9b2503e099364ae27 643ce3eaede89aae",
    "few segments": "50df61492264cc7a1f77bd9298203ef0 fd42a57ca41bf5e7",
    "dropped": "20bbed6522b809691c002d552974f783 6819649ee88098d4",
    "small units": "a9e88dda7509f7f7837835b0c7998a66 2ea67c34f0695f95",
    "added to": "4bad7c0366abf7548fac79d156512320 381ad8fe8ac7554c",
    "ranks": "8786550b11641e2af0527d4d9b66dd69 b9e99cb3707916b0",
    "rejected": "d95f71f5c4c79ac83eca6896662c011d 6fe2c368d1aee943",
    "by best-fit": "e2d673d3006ac4270c0b4d910c1b2766 5f21481adbf99997",
    "by best-fit-decreasing": "0c61e2f40de993c91da526257c67be94 e6f1cf1039b57975",
    "by first-fit": "79d5edcdb682258c7cf1fc0245d579e3 15b360b32171aacd",
    "by online-best-fit": "167ad59279014ffc1ba9830bba37572b ecd3344f189dc38f",
    "by online-first-fit": "d4da7a2e12f5357935af8363d4010c73 1b25fcb867071c71",
    "by worst-fit": "238e250521e82fb2177e1925d802df08 510ae853e6a0a937",
    "by first-fit-shuffle": "c0dbb5a1153bf4a6589e4a4528c0cbca 60057ccfe9d6b59e",
    "by next-fit": "1daa7b934fb7cec15261991138bbb9c8 165748850403249e",
    "by harmonic": "bbf7d0ccbb031fa6aa82af373dd73438 a3ca5acacc84fc03",
    "by mffd": "5b903a2f66c2abb99f31a4d8f6ff0c18 8a4086cc01821b5b",
    "by wrap": "e5e3a5010d4e080272df1c27cae956c7 15f7e73bf5270694",
    "each turn": "8a0bea1d8619cca1ace7694323913d5f 21cb235a3293c3b2",
    "reasoning and flags": "f31933c839ed9f51ae86aa1e0fd48e3b f827c202f0c7060b",
    "fill in the middle": "3e2dbafecf079b2bccf7895b553a0b28 2d3d02193d65d030",
    "tokenized": "ef5df46760846d85a6f54113c5beba40 d5f7eaf657039c74",
    "packed again": "87d97661369d66c2a8f227edbe90e185 304a7c54e28ca360",
    "view": "7d56cbc76c9a9157c8c7db01679e9224 304a7c54e28ca360",
    "view in another order": "1b784ec7637d5d628b82e1c8b8fc63d2 304a7c54e28ca360",
    "recipe": "9ed92406443c46f4f1abca23c0dcc3fb 400a64356e3ec9de",
    "recipe as a view": "52af849e375c49a319bdcb8aad85147f 400a64356e3ec9de",
    "exported to trl": "3ce598739190f1bd1e50e296a97b239c 4f53cda18c2baa0c",
    "exported to llamafactory": "f03b10caf1fa45c92841528a6ff77541 4f53cda18c2baa0c",
    "exported to axolotl": "b7f75a12e0c4875ac574639f84b04b54 4f53cda18c2baa0c",
    "exported to automodel": "0986fd24dfad63972d273533579e24c6 4f53cda18c2baa0c",
    "exported to documents": "5f61b35da07c8c99a97b0b0a594b32a4 4f53cda18c2baa0c",
    "exported to olmo": "c82977288a8f13a69cf3b2b9e28a6124 4f53cda18c2baa0c",
    "exported to megatron": "51b7e49fb7fab45eb9749cf584c772a8 4f53cda18c2baa0c",
    "exported to megatron-bridge": "57c6db471209ff6d4625b3b30ed08d08 4f53cda18c2baa0c",
    "exported to numpy": "9e80c08e040ebfbb265819b083dcaa49 4f53cda18c2baa0c",
    "exported to parquet": "ff7603eba30f70c059266ec2321cf3b9 4f53cda18c2baa0c",
    "exported to unpacked": "98be644642fc8a71840c58a22f77bbaf 4f53cda18c2baa0c",
    "exported to packed": "87d97661369d66c2a8f227edbe90e185 304a7c54e28ca360",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_inputs()
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_results_keep_their_bytes(folder: Path, inputs: Path, name: str) -> None:
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    RUNS[name]()
    assert digests() == GOLDEN[name]


if __name__ == "__main__":
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for name, packs in RUNS.items():
            write_inputs()
            packs()
            print(f'    "{name}": "{digests()}",', flush=True)
            for made in ("out", "tok", "result"):
                shutil.rmtree(made, ignore_errors=True)
