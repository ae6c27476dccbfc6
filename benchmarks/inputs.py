"""The texts that are packed: unpacked once into the cache folder, and ten times as much of them.

Needs the `zstd` files of shared/data. Unpacking takes a second, the tenfold input (670 MB) half
a minute; both are made once and kept, under a name that changes with this file's version.

Only the field "text" is kept: the peers' loader refuses files whose fields differ.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import string
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from measuring import say
from settings import Settings

SOURCES = ("code_python", "text_linux_doc", "multi_udhr", "multi_xquad_contexts")
REPETITIONS = 10
_VERSION = 2
_QUICK_BYTES = 1 << 19
# Each repetition of a document renames this share of its words, and gains a sentence of
# words never seen before: a cache of words seen must keep growing, as it does on real data.
_RENAMED = 20
_NEW_WORDS = 12
_WORD = re.compile(r"[A-Za-z]{5,}")


class _Document(msgspec.Struct):
    text: str


def missing(settings: Settings) -> str:
    """Why the inputs cannot be made, or "" when they can."""
    absent = [name for name in SOURCES if not _packed(settings, name).is_file()]
    if absent:
        return f"{absent[0]}.jsonl.zst is not in --data"
    if not (settings.tokenizer / "tokenizer.json").is_file():
        return "llama3_1 is not in --tokenizers"
    return ""


def missing_file(settings: Settings, name: str, template: Path | None) -> str:
    """Why `unpacked` cannot give this file, or "" when it can."""
    if not _packed(settings, name).is_file():
        return f"{name}.jsonl.zst is not in --data"
    if template and not template.is_file():
        return f"{template.name} is not beside --tokenizers"
    return ""


def unpacked(settings: Settings, name: str) -> Path:
    """One file of shared/data as it is, unpacked into the cache."""
    path = settings.cache / f"{name}.jsonl"
    if not path.is_file():
        settings.cache.mkdir(parents=True, exist_ok=True)
        with pa.input_stream(str(_packed(settings, name)), compression="zstd") as source:
            path.write_bytes(source.read())
    _touch(path)
    return path


def repeated(settings: Settings, name: str, times: int) -> Path:
    """The records of one file of shared/data, each `times` times with a new word in every message,
    or in every field.
    """
    path = settings.cache / f"{name}-times-{times}-{_VERSION}.jsonl"
    if not path.is_file():
        say(f"making the input {path.name}")
        records = [msgspec.json.decode(line) for line in unpacked(settings, name).open("rb")]
        chance = random.Random(name)
        work = path.with_suffix(".part")
        with open(work, "wb") as out:
            for _ in range(times):
                for record in records:
                    out.write(msgspec.json.encode(_with_new_words(record, chance)) + b"\n")
        os.rename(work, path)
    _touch(path)
    return path


def _with_new_words(record: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """In the content of its messages, or else in all of its texts."""
    if "messages" in record:
        messages = [
            message | {"content": _with_new_word(message["content"], chance)}
            if "content" in message
            else message
            for message in record["messages"]
        ]
        return record | {"messages": messages}
    return {name: _with_new_word(value, chance) for name, value in record.items()}


def _with_new_word(text: Any, chance: random.Random) -> Any:
    if not isinstance(text, str) or not text:
        return text
    place = text.find(" ", chance.randrange(len(text))) + 1
    word = _letters(chance, chance.randint(3, 9))
    return f"{text[:place]}{word} {text[place:]}"


def once(settings: Settings) -> list[Path]:
    """The texts, one file per source: 66 MB, or 2 MB when quick."""
    return _made(settings, "once", _copy)


def tenfold(settings: Settings) -> list[Path]:
    """The same, ten times over with small changes: 670 MB, or 20 MB when quick."""
    return _made(settings, "tenfold", _repeat)


def size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _packed(settings: Settings, name: str) -> Path:
    return settings.data / f"{name}.jsonl.zst"


def _made(settings: Settings, kind: str, make: Callable[[Path, Path, int], None]) -> list[Path]:
    limit = _QUICK_BYTES if settings.quick else 1 << 62
    folder = settings.cache / f"{kind}-{'quick-' if settings.quick else ''}{_VERSION}"
    if not folder.is_dir():
        say(f"making the input {folder.name}")
        settings.cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=settings.cache))
        for name in SOURCES:
            make(_packed(settings, name), work / f"{name}.jsonl", limit)
        os.rename(work, folder)
    files = [folder / f"{name}.jsonl" for name in SOURCES]
    for path in files:
        _touch(path)
    return files


def _touch(path: Path) -> None:
    """Read a file, so that what is timed is not this disk's reading."""
    with open(path, "rb", buffering=0) as source:
        while source.read(1 << 24):
            pass


def _texts(packed: Path, limit: int) -> Iterator[str]:
    """The texts of the documents up to `limit` bytes."""
    decode = msgspec.json.Decoder(_Document).decode
    with pa.input_stream(str(packed), compression="zstd") as source:
        for line in source.read().split(b"\n"):
            limit -= len(line)
            if line and limit >= 0:
                yield decode(line).text


def _copy(packed: Path, target: Path, limit: int) -> None:
    with open(target, "wb") as out:
        for text in _texts(packed, limit):
            out.write(msgspec.json.encode(_Document(text)) + b"\n")


def _repeat(packed: Path, target: Path, limit: int) -> None:
    documents = [(text, sorted(set(_WORD.findall(text)))) for text in _texts(packed, limit)]
    chance = random.Random(packed.name)
    with open(target, "wb") as out:
        for _ in range(REPETITIONS):
            for text, words in documents:
                changed = _Document(_changed(text, words, chance))
                out.write(msgspec.json.encode(changed) + b"\n")


def _changed(text: str, words: list[str], chance: random.Random) -> str:
    for word in chance.sample(words, len(words) // _RENAMED):
        text = text.replace(word, word + _letters(chance, 2))
    new = [_letters(chance, chance.randint(4, 10)) for _ in range(_NEW_WORDS)]
    sentence = f"{' '.join(new)} {chance.random()}.\n"
    place = text.find("\n", chance.randrange(len(text) + 1)) + 1
    return text[:place] + sentence + text[place:]


def _letters(chance: random.Random, count: int) -> str:
    return "".join(chance.choices(string.ascii_lowercase, k=count))


class Output:
    """A folder in the cache for one run's result, gone afterwards."""

    def __init__(self, settings: Settings) -> None:
        settings.cache.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="out-", dir=settings.cache)

    def __enter__(self) -> Path:
        return Path(self._folder) / "packed"

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)
