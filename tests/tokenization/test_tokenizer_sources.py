"""Where a tokenizer comes from: option, environment, folder, file, hub cache; and what if not."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from altered import altered, unaltered
from support import (
    assert_error,
    check_directory,
    jsonl,
    packer,
    packer_process,
    recover_documents,
    succeeds,
)
from tiny_tokenizers import EOS
from tokenizers import Tokenizer

from packer_cli.tokenization.locate import locate

PACK = ["pack", "data.jsonl", "-l", "16", "-o", "out", "--tokenizer-backend", "tokenizers"]
CONFIG = {"eos_token": EOS}
NO_TOKENIZER = "t/tokenizer.json: not a tokenizer.json: "


@pytest.fixture(autouse=True)
def data(folder: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(jsonl("the quick brown fox", "naïve café"))
    return path


def test_a_folder_and_its_tokenizer_json_are_the_same(folder: Path) -> None:
    tiny.save(folder / "tok", tiny.byte_level(), tokenizer_config=CONFIG)
    by_folder, by_file = locate("tok"), locate("tok/tokenizer.json")
    assert replace(by_file, source="tok") == by_folder
    assert (by_file.json, by_file.eos) == ((folder / "tok/tokenizer.json").read_bytes(), EOS)
    (folder / "mine.json").write_text(json.dumps(tiny.byte_level()))  # of any name
    assert locate("mine.json").eos == EOS


def test_the_output_holds_the_tokenizer(folder: Path) -> None:
    companions = {"tokenizer_config": CONFIG, "special_tokens_map": {"bos_token": "<s>"}}
    tiny.save(folder / "tok", tiny.byte_level(), **companions)
    (folder / "tok/chat_template.jinja").write_text("{{ messages }}")
    succeeds(*PACK, "-t", "tok", "-q")
    manifest = check_directory("out")
    kept = locate("out")
    assert manifest["tokenizer"]["source"] == "tok"
    assert manifest["tokenizer"]["sha256"] == kept.sha256
    assert kept.json == locate("tok").json
    assert kept.companions == {
        path.name: path.read_bytes()
        for path in (folder / "tok").iterdir()
        if path.name != "tokenizer.json"
    }


START, END = "<|im_start|>", "<|im_end|>"
SIZE = len(tiny.byte_level()["model"]["vocab"])


def decoder(**ids: int) -> tiny.Json:
    special = {"special": True, "normalized": False}
    return {
        "added_tokens_decoder": {
            str(number): {"content": {"start": START, "end": END}[name], **special}
            for name, number in ids.items()
        }
    }


# the files beside a tokenizer.json that lacks both tokens, and the ids that AutoTokenizer gives
NAMED_ELSEWHERE: dict[str, tuple[tiny.Json, list[int]]] = {
    "decoder": (
        {"tokenizer_config": decoder(end=SIZE + 1, start=SIZE), "added_tokens": {"<other>": 9}},
        [SIZE, SIZE + 1],
    ),
    "added_tokens.json": ({"added_tokens": {END: SIZE, START: SIZE + 1}}, [SIZE + 1, SIZE]),
    "with a mark": (
        {"tokenizer_config": {"additional_special_tokens": [START, {"content": END}]}},
        [SIZE, SIZE + 1],
    ),
    "after a padding token": (
        {"special_tokens_map": {"pad_token": "<pad>", "additional_special_tokens": [START, END]}},
        [SIZE + 1, SIZE + 2],
    ),
    "in the vocabulary": ({"tokenizer_config": decoder(start=300, end=SIZE)}, [300, SIZE]),
}


@pytest.mark.parametrize("case", NAMED_ELSEWHERE)
def test_tokens_that_only_other_files_name_are_added(folder: Path, case: str) -> None:
    files, ids = NAMED_ELSEWHERE[case]
    document = tiny.byte_level()
    if ids[0] == 300:
        vocabulary = document["model"]["vocab"]
        old = next(token for token, number in vocabulary.items() if number == 300)
        vocabulary[START] = vocabulary.pop(old)
        merges = document["model"]["merges"]
        document["model"]["merges"] = [one for one in merges if old not in (*one, "".join(one))]
    tiny.save(folder / "tok", document, **files)
    if case == "with a mark":
        for path in (folder / "tok").iterdir():
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (folder / "data.jsonl").write_bytes(jsonl(f"the {START}user{END}"))
    reference = Tokenizer.from_str(locate("tok").json.decode())
    want = reference.encode(f"the {START}user{END}", add_special_tokens=False).ids
    assert [want[want.index(ids[0])], want[-1]] == ids
    for source, output in (("tok", "out"), ("out", "again")):  # a result keeps all of them
        succeeds(*PACK, "-t", source, "-o", output, "--no-eos", "-q")
        check_directory(output)
        assert [one.tolist() for one in recover_documents(output).values()] == [want]


@pytest.mark.parametrize("shape", ["texts", "answers"])
def test_a_text_that_the_tokenizer_cannot_encode_is_a_bad_record(folder: Path, shape: str) -> None:
    """The library panics where its regular expression gives up, and prints so by itself."""
    document = tiny.byte_level()
    slow = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    parts = [slow | {"invert": False}, document["pre_tokenizer"]]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    tiny.save(folder / "tok", document, tokenizer_config=CONFIG)
    texts = ["the quick", "x" * 40, "brown fox"]
    records = [{"text": one} if shape == "texts" else {"prompt": "the", "completion": one}
               for one in texts]  # fmt: skip
    Path("data.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    failed = unaltered(*PACK, "-q", "-t", "tok")
    assert (failed.returncode, len(failed.stderr.splitlines())) == (1, 2), failed.stderr
    assert "data.jsonl, line 2 (byte " in failed.stderr
    assert " cannot be encoded: " in failed.stderr
    skipped = unaltered(*PACK, "-q", "-t", "tok", "--on-error", "skip")
    assert skipped.returncode == 0, skipped.stderr
    assert skipped.stderr.startswith("packer: warning: out: leaves out 1 bad record, ")
    manifest = check_directory("out")
    assert (manifest["documents"], manifest["rejected_records"]) == (2, 1)


def test_a_turn_that_the_tokenizer_cannot_encode_makes_its_record_bad(folder: Path) -> None:
    vocabulary = {"q": 0, "a": 1, "b": 2, "</s>": 3}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "none"}
    document = tiny.byte_level() | {"model": model, "pre_tokenizer": {"type": "Whitespace"}}
    tiny.save(folder / "tok", document, tokenizer_config=CONFIG)
    Path("t.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    talks = [["q", "a", "q", "b"], ["q", "a", "q", "other", "q", "other"], ["q", "b"]]
    roles = ("user", "assistant")
    records = [{"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(one)]}
               for one in talks]  # fmt: skip
    lines = [json.dumps(one) for one in records]
    Path("data.jsonl").write_text("\n".join(lines) + "\n")
    options = ("-t", "tok", "--chat-template", "t.jinja", "--turns", "each", "--allow-open-turns")
    failed = packer(*PACK, "-q", *options)
    assert_error(failed, 1, f"data.jsonl, line 2 (byte {len(lines[0]) + 1})", "cannot be encoded")
    succeeds(*PACK, "-q", *options, "--on-error", "skip")
    manifest = json.loads(Path("out/manifest.json").read_bytes())
    assert (manifest["documents"], manifest["rejected_records"]) == (3, 1)


# (what is named, the content of that file or None, a pattern of the error)
NO_TOKENIZERS: list[tuple[str, Any, str]] = [
    ("/none/tok", None, "no such file or folder"),
    ("a/b/c", None, "no such file or folder"),  # too deep for a hub name
    ("not a hub name", None, "not a hub name"),
    ("t/tokenizer.json", "{", NO_TOKENIZER),
    ("t/tokenizer.json", {"a": 1}, NO_TOKENIZER + ".*`model`"),
    ("t/tokenizer.json", {"model": {}, "added_tokens": [1]}, NO_TOKENIZER + r".*added_tokens\[0\]"),
    ("t/tokenizer.json", {"model": {"type": "Unheard"}}, "tokenizer.json cannot be loaded"),
    ("t/tokenizer_config.json", "{", "t/tokenizer_config.json: not valid JSON"),
    ("t/special_tokens_map.json", [], "a JSON list, not an object"),
    ("t/tokenizer_config.json", {"additional_special_tokens": "<|x|>"}, "expected a list"),
    ("t/tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
    # added tokens of other ids, or of other types
    ("t/tokenizer_config.json", decoder(start=SIZE + 5),
     rf"has the id {SIZE + 5} for '<\|im_start\|>'"),
    ("t/added_tokens.json", {END: 7}, f"gives it {SIZE}"),
    *(("t/tokenizer_config.json", content, "its added tokens: ")
      for content in ({"added_tokens_decoder": {"x": {}}}, {"added_tokens_decoder": []},
                      {"additional_special_tokens": [5]})),
]  # fmt: skip


@pytest.mark.parametrize(("source", "content", "pattern"), NO_TOKENIZERS)
def test_what_is_not_a_tokenizer_is_a_usage_error(source: str, content: Any, pattern: str) -> None:
    if content is not None:
        tiny.save(Path("t"), tiny.byte_level())
        Path(source).write_text(content if isinstance(content, str) else json.dumps(content))
        source = "t"
    result = packer(*PACK[:-2], "-t", source)
    assert_error(result, 2, f"tokenizer {source}")
    assert re.search(pattern, result.stderr)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("option", "variable", "source"),
    [("flagged", "named", "flagged"), (None, "named", "named"), (None, "", "bytes"),
     (None, None, "bytes"), ("bytes", "named", "bytes")],
)  # fmt: skip
def test_the_option_comes_before_the_environment_before_bytes(
    monkeypatch: pytest.MonkeyPatch, option: str | None, variable: str | None, source: str
) -> None:
    for name in ("flagged", "named"):
        tiny.save(Path(name), tiny.byte_level())
    if variable is not None:
        monkeypatch.setenv("PACKER_TOKENIZER", variable)
    result = succeeds(*PACK, *(["-t", option] if option else []))
    assert check_directory("out")["tokenizer"]["source"] == source
    announced = "using the built-in bytes tokenizer" in result.stderr
    assert announced == (source == "bytes" and option is None)
    assert "bytes tokenizer" not in result.stdout


def _hub_cache(home: Path, name: str, commit: str = "c0ffee") -> None:
    """The layout of the hub's own cache, as huggingface_hub leaves it behind."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    tiny.save(repository / "snapshots" / commit, tiny.byte_level(), tokenizer_config=CONFIG)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)


# A program that is packer, and looks up no name.
WITHOUT_NAMES = """
import socket
def refused(*given, **how):
    raise SystemExit(f"looked up {given}")
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = refused
from packer_cli.cli import app as cli
cli.main()
"""
UNREACHABLE = "not a local path, not in the local hub cache, and the hub cannot be reached"


@pytest.mark.parametrize(
    ("name", "error"),
    [("org/model", ""), ("model", ""), ("org/other", f"error: tokenizer org/other: {UNREACHABLE}")],
)
def test_hub_names_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    """What is in the cache works, all else is a clear error, and nothing is looked up."""
    for cached in ("org/model", "model"):
        _hub_cache(folder / "home", cached)
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    done = altered(WITHOUT_NAMES, *PACK, "-q", "-t", name)
    assert (done.returncode, done.stderr.partition("\n")[0]) == (2 if error else 0, error)
    if error:
        assert done.stderr.splitlines()[1].startswith("tip: give a folder with tokenizer.json")
        assert not Path("out").exists()
        return
    tokenizer = check_directory("out")["tokenizer"]
    assert (tokenizer["source"], tokenizer["eos_token_id"]) == (name, tiny.EOS_ID)
    assert Path("out/tokenizer_config.json").read_text() == json.dumps(CONFIG)


def test_a_cached_hub_name_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process, because huggingface_hub reads the environment when it is imported."""
    _hub_cache(folder / "home", "org/model")
    missing = folder / "home/hub/models--org--model/.no_exist/c0ffee"
    missing.mkdir(parents=True)  # the cache remembers what the repository does not have
    for name in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        (missing / name).touch()
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    nowhere = {"HF_HOME": str(folder / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    result = packer_process(*PACK, "-q", "-t", "org/model", env=os.environ | nowhere)
    assert (result.returncode, result.stderr) == (0, b"")
    assert check_directory("out")["tokenizer"]["eos_token_id"] == tiny.EOS_ID
