"""Inputs by URL: shards as from local copies, whole errors, and no secrets of URLs anywhere."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from support import (
    COMPRESSORS,
    assert_error,
    contents,
    jsonl,
    pack,
    packer,
    recover_texts,
    succeeds,
)

from packer_cli import storage

TEXTS = [f"text {i} " + "ab" * (i % 5) for i in range(400)]
TABLE = pa.table({"text": TEXTS})
QUIET = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
URL = "memory://bucket/a.jsonl"


@pytest.fixture(autouse=True)
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty one, and the current directory."""
    monkeypatch.setattr(storage, "_typed", {})
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return fsspec.filesystem("memory")


def upload() -> None:
    """All files of the current directory, into the bucket."""
    for path in Path().rglob("*"):
        if path.is_file():
            fsspec.filesystem("memory").pipe_file(f"memory://bucket/{path}", path.read_bytes())


def _stream(path: str, new: Any) -> None:
    with new(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=50)


FORMS: dict[str, Callable[[str], object]] = {
    "a.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=50),
    "a.arrow": lambda path: _stream(path, pa.ipc.new_file),
    "a.ipc": lambda path: _stream(path, pa.ipc.new_stream),
    "a.jsonl": lambda path: Path(path).write_bytes(jsonl(*TEXTS)),
    "a.txt.xz": lambda path: Path(path).write_bytes(COMPRESSORS["xz"]("\n".join(TEXTS).encode())),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_url_gives_the_same_as_a_local_copy(form: str) -> None:
    FORMS[form](form)
    upload()
    url = f"memory://bucket/{form}"
    manifest = pack(url, "-l", 32, "--unit-bytes", 700, "--workers", 2)
    assert recover_texts("out") == TEXTS
    assert manifest["inputs"][0]["path"] == url
    succeeds("pack", form, "-l", 32, "-t", "bytes", "-q", "--unit-bytes", 700, "-o", "local")
    local = json.loads(Path("local/manifest.json").read_text())
    own = {name: manifest["inputs"][0][name] for name in ("path", "version", "sha256")}
    local["inputs"][0] |= own  # of a URL, its version tells what it is
    assert manifest | {"sha256": ""} == local | {"sha256": ""}  # its own


def test_folders_and_globs() -> None:
    for name, text in {
        "d/b.jsonl": "2", "d/a.txt.gz": "1", "d/sub/c.jsonl": "3", "d/sub/c.md": "-",
        "d/.hidden.jsonl": "-", "e.jsonl": "0",
    }.items():  # fmt: skip
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        data = jsonl(text) if name.endswith("jsonl") else COMPRESSORS["gz"](text.encode())
        Path(name).write_bytes(data)
    succeeds("pack", "e.jsonl", "-l", 8, "-t", "bytes", "-q", "-o", "d/packed")
    upload()
    expected = {
        "bucket/d": "123", "bucket/d/": "123", "bucket": "0123", "bucket/*.jsonl": "0",
        "bucket/**/[a-c].jsonl": "23", "bucket/d/[ab].*": "12",
    }  # fmt: skip
    for number, (name, texts) in enumerate(expected.items()):
        out = f"out-{number}"
        url = f"memory://{name}"
        result = succeeds("pack", url, "-l", 8, "-t", "bytes", "-o", out)
        assert "".join(recover_texts(out)) == texts, url
        warned = "d/packed: left out: it holds a result of packer" in result.stderr
        assert warned == (name.rstrip("/") in ("bucket", "bucket/d"))


def test_a_name_with_colons_is_a_name() -> None:
    Path("d").mkdir()
    Path("d/a::b #%41 é.jsonl").write_bytes(jsonl("a"))
    pack(f"file://{Path.cwd()}/d", "-l", 8)
    assert recover_texts("out") == ["a"]


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["memory://bucket/no.jsonl"], "memory://bucket/no.jsonl: no such file or directory"),
        (["memory://nothing"], "memory://nothing: no such file or directory"),
        (["memory://bucket/no*"], "memory://bucket/no*: no file matches this pattern"),
        (["memory://bucket/a.foo"], "memory://bucket/a.foo: cannot tell the format from the name"),
        (["memory://bucket/out"], "memory://bucket/out: is a result of packer"),
        (["nowhere://a/b.jsonl"], "nowhere://a/b.jsonl: unknown protocol nowhere"),
        (["simplecache::memory://a.jsonl"], "unknown protocol simplecache::memory"),
        (["memory://bucket/a.jsonl"] * 2, "the same file as memory://bucket/a.jsonl"),
    ],
)  # fmt: skip
def test_refused_urls(urls: list[str], message: str) -> None:
    Path("a.jsonl").write_bytes(jsonl("a"))
    Path("a.foo").write_bytes(b"a")
    packer("pack", "a.jsonl", *QUIET)
    upload()
    result = packer("pack", *urls, "-l", 16, "-t", "bytes", "-q", "-o", "new")
    assert_error(result, 2, message)
    assert not Path("new").exists()


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "no_such_package.Store", "err": "Install no_such_package to read away://"}
    monkeypatch.setitem(known_implementations, "away", missing)
    result = packer("pack", "away://bucket/a.jsonl", *QUIET)
    assert_error(result, 2, "away://bucket/a.jsonl: away:// needs a package that is not installed")
    assert "Install no_such_package" in result.stderr
    monkeypatch.setitem(sys.modules, "fsspec", None)
    result = packer("pack", "memory://bucket/a.jsonl", *QUIET)
    assert_error(result, 2, "fsspec is needed for URLs")
    assert "pip install fsspec" in result.stderr


class NoCredentialsError(Exception):
    """As botocore raises it."""


FAULTS: dict[str, tuple[Exception, str]] = {
    "credentials": (NoCredentialsError("Unable to locate credentials"), "Unable"),
    "forbidden": (PermissionError(errno.EACCES, "Access Denied"), "Access Denied"),
    "timeout": (TimeoutError(), "no answer within 60 seconds"),
    "gone": (FileNotFoundError("bucket/a"), "no such file"),
    "changed": (OSError(errno.EBUSY, "expired"), "it changed"),
    "other": (RuntimeError("503 Slow Down\nplease"), "503 Slow Down"),
}


@pytest.mark.parametrize(
    ("form", "fault", "call"),
    [
        *(("a.jsonl", fault, "open") for fault in FAULTS),
        ("a.parquet", "other", "open"),
        ("a.jsonl", "forbidden", "info"),
    ],
)
def test_a_failing_store_ends_the_run(
    form: str, fault: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMS[form](form)
    upload()
    error, message = FAULTS[fault]

    def fail(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, call, fail)
    result = packer("pack", f"memory://bucket/{form}", *QUIET, "--unit-bytes", 700)
    assert_error(result, 1, f"memory://bucket/{form}: cannot read: {message}")
    waits = "wait until nothing writes" if fault == "changed" else "credentials for memory://"
    assert waits in result.stderr.splitlines()[1]
    assert not Path("out").exists()


def test_an_object_that_is_replaced_while_it_is_read(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pipe_file(URL, jsonl(*TEXTS))
    open_ = MemoryFileSystem.open

    def replace(self: Any, path: str, *how: Any, **more: Any) -> Any:
        with monkeypatch.context() as undone:
            undone.setattr(MemoryFileSystem, "open", open_)
            store.pipe_file(URL, jsonl(*TEXTS))  # the same bytes, but a later version
        return open_(self, path, *how, **more)

    monkeypatch.setattr(MemoryFileSystem, "open", replace)
    assert_error(packer("pack", URL, *QUIET), 1, f"{URL}: changed while it was read")


def test_an_etag_with_and_without_quotes_is_one() -> None:
    """As lists and answers about one object have it, of adlfs before 2026.5 and some servers."""
    info = {"size": 1, "type": "file"}
    quoted, plain = (storage._stat("", info | {"etag": etag}) for etag in ('"0x8D"', "0x8D"))
    assert quoted == plain != storage._stat("", info | {"etag": "0x8E"})


# What opens a URL

PUBLIC = {
    "https://host/a?X-Amz-Signature=x&b=c/d": "https://host/a",
    "https://user:pass@host:80/a/@b/c.jsonl": "https://host:80/a/@b/c.jsonl",
    "HTTPS://token@host/a#fragment": "HTTPS://host/a",
    "@https://user:pass@host/list?plain": "@https://host/list",
    "https://user:pa/ss@host/a": "https://host/a",
    "s3://key:sec/ret@bucket/a": "s3://bucket/a",
    "--output=s3://key:secret@bucket/out": "--output=s3://bucket/out",
    "simplecache::https://user:pass@host/a?sv=1&sig=2": "simplecache::https://host/a",
    "zip://a.jsonl::https://user:pass@host/a.zip?b": "zip://a.jsonl::https://host/a.zip",
    "abfs://container@account/a.jsonl?sv=1&sig=x/y": "abfs://container@account/a.jsonl",
    "ftp://user:pass@host/*/a-?.jsonl": "ftp://host/*/a-?.jsonl",
    "s3://bucket/year=20??/part-?.jsonl": "s3://bucket/year=20??/part-?.jsonl",
    "hf://datasets/owner/name@v1/a.jsonl": "hf://datasets/owner/name@v1/a.jsonl",
    "./a://user:pass@b?c=d": "./a://user:pass@b?c=d",
}


@pytest.mark.parametrize("url", PUBLIC)
def test_what_is_shown_of_a_url(url: str) -> None:
    """And what it is opened as, and names below it."""
    shown = storage.public(url)
    assert shown == PUBLIC[url]
    assert storage.public(shown) == shown
    if "zip" not in url:  # no name that packer opens
        assert storage.typed(shown) == url
    head, mark, query = url.partition("?") if shown != url and "?" not in shown else (url, "", "")
    if "#" not in url and "zip" not in url:
        assert storage.typed(f"{shown}/b") == f"{head}/b{mark}{query}"


SECRETS = ("us3r", "pa55word", "51gnature", "5econd")
STORED = "memory://us3r:pa55word@bucket/{}.jsonl?sig=51gnature&x=/5econd"
COMMANDS = """
0 pack A -l 16 -o skipped --on-error skip --max-errors 100%
0 verify skipped
0 stats skipped --html stats.html
0 show skipped 0 --html show.html
0 tokenize A -o tokens --on-error skip --max-errors 100%
0 pack tokens -l 16 -o out
0 pack list.toml -o mixed
0 pack sources.toml -o sources
0 pack @names -l 16 -o listed
0 plan A -l 16 --on-error skip --max-errors 100%
0 pack a.jsonl -l 16 -o memory://us3r:pa55word@bucket/out
0 stats memory://us3r:pa55word@bucket/out --json
2 pack b.jsonl -l 16 --output=memory://us3r:pa55word@bucket/out
2 show memory://us3r:pa55word@bucket/out
2 pack A A -l 16 -o new
2 pack A -l 16 -o new --resume
2 pack simplecache::A -l 16 -o new
2 pack nowhere://us3r:pa55word@bucket/a.jsonl -l 16
1 pack A -l 16 -o new --debug
2 pack B -l 16 -o new
2 pack bad.toml -o new
2 audit B
"""


def test_what_opens_a_url_is_nowhere_in_what_is_printed_and_written(store: Any) -> None:
    first, missing, good = map(STORED.format, ("a", "b", "c"))
    source = '[[source]]\nname = "a"\n'
    store.pipe_file(first, jsonl("one") + b"{bad\n" + jsonl(*TEXTS))
    store.pipe_file(good, jsonl("good"))
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_bytes(jsonl(name))
    given = {
        "names": good,
        "list.toml": f'max_length = 16\ninputs = ["{good}"]\n',
        "sources.toml": f'max_length = 16\n{source}inputs = ["{good}"]\n',
        "bad.toml": f'max_length = 16\n{source}inputs = ["{missing}"]\n',
    }
    for name, content in given.items():
        Path(name).write_text(content)
    for line in COMMANDS.strip().splitlines():
        code, *command = line.replace(" A", f" {first}").replace("::A", f"::{first}").split()
        command = [missing if one == "B" else one for one in command]
        result = packer(*command)
        assert result.exit_code == int(code), (line, result.stderr)
        for secret in SECRETS:
            assert secret not in result.stdout + result.stderr, line
    made = {name: content for name, content in contents(".").items() if name not in given}
    made |= {name: store.cat_file(name) for name in store.find("/us3r:pa55word@bucket/out")}
    assert len(made) > 30
    for name, content in made.items():
        assert not [secret for secret in SECRETS if secret.encode() in content], name
    assert b"memory://bucket/a.jsonl" in Path("skipped/rejected.jsonl").read_bytes()


def test_what_opens_a_host_is_not_sent_to_it_by_another_scheme() -> None:
    storage.public("https://us3r:pa55word@one.host/a?sig=1")
    assert storage.typed("http://one.host/b") == "http://one.host/b"
    assert storage.typed("s3://one.host/a") == "s3://one.host/a"
    assert storage.typed("https://one.host/b") == "https://us3r:pa55word@one.host/b"


def test_another_signature_goes_on(store: Any) -> None:
    """The second rank finishes what the first has begun, and opens the inputs by its own."""
    for signature in ("one", "two"):
        store.pipe_file(f"{URL}?sig={signature}", jsonl(*TEXTS))
    info = store.store  # of the same file, as a server has it
    info["/bucket/a.jsonl?sig=two"].created = info["/bucket/a.jsonl?sig=one"].created
    for rank, signature in enumerate(("one", "two")):
        ranks = ("--rank", rank, "--world-size", 2, "--unit-bytes", 700)
        succeeds("pack", f"{URL}?sig={signature}", *QUIET, *ranks)
    assert recover_texts("out") == TEXTS
    both = packer("pack", f"{URL}?sig=one", f"{URL}?sig=two", *QUIET)
    assert_error(both, 2, f"{URL}: the same file as {URL}")
