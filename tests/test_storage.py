"""Inputs by URL: the same shards as from local copies, whole errors, few requests."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from fsspec.spec import AbstractBufferedFile
from support import COMPRESSORS, assert_error, jsonl, pack, packer, recover_texts

from packer_cli import storage
from packer_cli.cli.pack import default_output

TEXTS = [f"text {i} " + "ab" * (i % 5) for i in range(400)]
TABLE = pa.table({"text": TEXTS})
QUIET = ("-l", 16, "-t", "bytes", "-q", "-o", "out")


class Shelf(MemoryFileSystem):
    """Objects that are read by requests, as those of real stores; a test can disturb them."""

    protocol = "shelf"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[list[tuple[str, int, int]]] = []
    disturb: ClassVar[Callable[[str, int], None]]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("shelf://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **options)
        return _Object(self, path, mode, **options)


class _Object(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        Shelf.requests.append((self.path, start, end))
        Shelf.disturb(self.path, start)
        return self.fs.cat_file(self.path, start, end)


@pytest.fixture(autouse=True)
def stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones, and the current directory."""
    monkeypatch.setattr(storage, "_FIRST_WAIT", 0.001)
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    for kind in (Shelf, MemoryFileSystem):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    Shelf.requests.clear()
    Shelf.disturb = lambda path, start: None


def upload(protocol: str = "memory") -> None:
    """All files of the current directory, into the bucket."""
    for path in Path().rglob("*"):
        if path.is_file():
            fsspec.filesystem(protocol).pipe_file(f"{protocol}://bucket/{path}", path.read_bytes())


def _stream(path: str, new: Any) -> None:
    with new(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=50)


PLAIN = {
    "jsonl": jsonl(*TEXTS),
    "txt": "\n".join(TEXTS).encode(),
    "csv": b"id,text\n" + b"".join(f'1,"{text}"\r\n'.encode() for text in TEXTS),
}
FORMS: dict[str, Callable[[str], object]] = {
    "a.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=50),
    "a.arrow": lambda path: _stream(path, pa.ipc.new_file),
    "a.ipc": lambda path: _stream(path, pa.ipc.new_stream),
}
FORMS |= {
    f"a.{kind}": lambda path, data=data: Path(path).write_bytes(data)
    for kind, data in PLAIN.items()
}
FORMS |= {
    f"a.jsonl.{ending}": lambda path, compress=compress: Path(path).write_bytes(
        compress(PLAIN["jsonl"])
    )
    for ending, compress in COMPRESSORS.items()
}


def shards(directory: str) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(directory).glob("*.arrow")
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_url_gives_the_same_as_a_local_copy(form: str) -> None:
    FORMS[form](form)
    upload("shelf")
    url = f"shelf://bucket/{form}"
    manifest = pack(url, "-l", 32, "--unit-bytes", 700, "--workers", 4)
    assert recover_texts("out") == TEXTS
    assert manifest["inputs"][0]["path"] == url
    result = packer("pack", form, "-l", 32, "-t", "bytes", "-q", "--unit-bytes", 700, "-o", "local")
    assert result.exit_code == 0, result.stderr
    assert shards("out") == shards("local")
    local = json.loads(Path("local/manifest.json").read_text())
    local["inputs"][0]["path"] = url
    assert manifest | {"sha256": ""} == local | {"sha256": ""}  # its own
    result = packer("verify", "out", "--against-inputs", "--sample", "all", "-q")
    assert result.exit_code == 0, result.stdout + result.stderr


@pytest.mark.parametrize("protocol", ["memory", "shelf"])
def test_folders_and_globs(protocol: str) -> None:
    for name, text in {
        "d/b.jsonl": "2", "d/a.txt.gz": "1", "d/sub/c.jsonl": "3", "d/sub/c.md": "-",
        "d/.hidden.jsonl": "-", "e.jsonl": "0",
    }.items():  # fmt: skip
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        data = jsonl(text) if name.endswith("jsonl") else COMPRESSORS["gz"](text.encode())
        Path(name).write_bytes(data)
    packed = packer("pack", "e.jsonl", "-l", 8, "-t", "bytes", "-q", "-o", "d/packed")
    assert packed.exit_code == 0, packed.stderr
    upload(protocol)
    expected = {
        "bucket/d": "123", "bucket/d/": "123", "bucket": "0123", "bucket/*.jsonl": "0",
        "bucket/**/[a-c].jsonl": "23", "bucket/d/[ab].*": "12",
    }  # fmt: skip
    for number, (name, texts) in enumerate(expected.items()):
        out = f"out-{number}"
        url = f"{protocol}://{name}"
        result = packer("pack", url, "-l", 8, "-t", "bytes", "-o", out)
        assert result.exit_code == 0, result.stderr
        assert "".join(recover_texts(out)) == texts, url
        warned = "d/packed: left out: it holds a result of packer" in result.stderr
        assert warned == (name.rstrip("/") in ("bucket", "bucket/d"))


def test_a_name_with_colons_is_a_name() -> None:
    Path("d").mkdir()
    Path("d/a::b #%41 é.jsonl").write_bytes(jsonl("a"))
    pack(f"file://{Path.cwd()}/d", "-l", 8)
    assert recover_texts("out") == ["a"]


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("s3://bucket/some/data.jsonl", "data-packed-8"),
        ("s3://bucket/data.jsonl.gz", "data-packed-8"),
        ("s3://bucket/some/", "some-packed-8"),
        ("s3://bucket", "bucket-packed-8"),
        ("s3://bucket/train-*.parquet", "train--packed-8"),
        ("hf://datasets/someone/corpus", "corpus-packed-8"),
        ("https://host/a/data.jsonl.zst?token=a/b.c", "data-packed-8"),
        ("https://host/", "data-packed-8"),
    ],
)
def test_the_result_of_a_url_is_named_after_it(name: str, output: str) -> None:
    assert str(default_output([name], "packed-8")) == output


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["shelf://bucket/no.jsonl"], "shelf://bucket/no.jsonl: no such file or directory"),
        (["shelf://nothing"], "shelf://nothing: no such file or directory"),
        (["shelf://bucket/no*"], "shelf://bucket/no*: no file matches this pattern"),
        (["shelf://bucket/a.foo"], "shelf://bucket/a.foo: cannot tell the format from the name"),
        (["shelf://bucket/out"], "shelf://bucket/out: is a result of packer"),
        (["nowhere://a/b.jsonl"], "nowhere://a/b.jsonl: unknown protocol nowhere"),
        (["simplecache::shelf://a.jsonl"], "unknown protocol simplecache::shelf"),
        (["shelf://bucket/a.jsonl"] * 2, "it would be packed twice"),
    ],
)  # fmt: skip
def test_refused_urls(urls: list[str], message: str) -> None:
    Path("a.jsonl").write_bytes(jsonl("a"))
    Path("a.foo").write_bytes(b"a")
    packer("pack", "a.jsonl", *QUIET)
    upload("shelf")
    result = packer("pack", *urls, "-l", 16, "-t", "bytes", "-q", "-o", "new")
    assert_error(result, 2, message)
    assert not Path("new").exists()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "no_such_package.Store", "err": "Install no_such_package to read away://"}
    monkeypatch.setitem(known_implementations, "away", missing)
    result = packer("pack", "away://bucket/a.jsonl", *QUIET)
    assert_error(result, 2, "away://bucket/a.jsonl: away:// needs a package that is not installed")
    assert "Install no_such_package" in result.stderr


def test_fsspec_itself_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    result = packer("pack", "memory://bucket/a.jsonl", *QUIET)
    assert_error(result, 2, "fsspec is needed for URLs")
    assert "pip install fsspec" in result.stderr


class NoCredentialsError(Exception):
    """As botocore raises it."""


FAULTS: dict[str, tuple[Exception, str]] = {
    "credentials": (NoCredentialsError("Unable to locate credentials"), "Unable"),
    "forbidden": (PermissionError(errno.EACCES, "Access Denied"), "Access Denied"),
    "timeout": (TimeoutError(), "TimeoutError"),
    "gone": (FileNotFoundError("bucket/a"), "no such file"),
    "changed": (OSError(errno.EBUSY, "expired"), "it changed"),
    "other": (RuntimeError("503 Slow Down\nplease"), "503 Slow Down"),
}


@pytest.mark.parametrize(
    ("form", "fault"),
    [*(("a.jsonl", fault) for fault in FAULTS),
     *((form, "other") for form in ("a.jsonl.gz", "a.jsonl.xz", "a.parquet", "a.arrow"))],
)  # fmt: skip
@pytest.mark.parametrize("halfway", [False, True])
def test_a_failing_read_ends_the_run(form: str, fault: str, halfway: bool) -> None:
    FORMS[form](form)
    upload("shelf")
    error, message = FAULTS[fault]

    def fail(path: str, start: int) -> None:
        if not halfway or len(Shelf.requests) > 1:
            raise error

    Shelf.disturb = fail
    result = packer("pack", f"shelf://bucket/{form}", *QUIET, "--unit-bytes", 700)
    assert_error(result, 1, f"shelf://bucket/{form}: cannot read: {message}")
    waits = "wait until nothing writes" if fault == "changed" else "credentials for shelf://"
    assert waits in result.stderr.splitlines()[1]
    assert not Path("out").exists()


def test_a_store_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*given: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Forbidden")

    monkeypatch.setattr(Shelf, "info", forbidden)
    result = packer("pack", "shelf://bucket/a.jsonl", *QUIET)
    assert_error(result, 1, "shelf://bucket/a.jsonl: cannot read: ", "Forbidden")
    assert "credentials for shelf://" in result.stderr


def test_an_object_that_is_replaced_while_it_is_read() -> None:
    store = fsspec.filesystem("shelf")
    store.pipe_file("shelf://bucket/a.jsonl", PLAIN["jsonl"])

    def replace(path: str, start: int) -> None:
        store.pipe_file(path, PLAIN["jsonl"])  # the same bytes, but a later version

    Shelf.disturb = replace
    result = packer("pack", "shelf://bucket/a.jsonl", *QUIET)
    assert_error(result, 1, "shelf://bucket/a.jsonl: cannot read: it changed")
    Shelf.requests.clear()
    Shelf.disturb = lambda path, start: len(Shelf.requests) > 1 and replace(path, start)
    result = packer("pack", "shelf://bucket/a.jsonl", *QUIET)
    assert_error(result, 1, "shelf://bucket/a.jsonl: changed while it was read")


def test_an_etag_with_and_without_quotes_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As lists and answers about one object have it, of adlfs before 2026.5 and some servers."""
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_bytes(PLAIN["jsonl"])
    upload("shelf")
    info, ls, listed = Shelf.info, Shelf.ls, list[str]()

    def listing(self: Shelf, path: str, **options: Any) -> list[Any]:
        listed.append(path)
        return ls(self, path, **options)

    def asked(self: Shelf, path: str) -> dict[str, Any]:
        return info(self, path) | {"etag": "0x8D" if listed else '"0x8D"'}

    monkeypatch.setattr(Shelf, "ls", listing)
    monkeypatch.setattr(Shelf, "info", asked)
    monkeypatch.setattr(Shelf, "invalidate_cache", lambda self, path=None: listed.clear())
    pack("shelf://bucket", "-l", 32)
    assert sorted(recover_texts("out")) == sorted(TEXTS * 2)


def test_units_of_another_content_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a store says the same of both; whenever it is replaced, a result is of one of them."""
    store, url = fsspec.filesystem("shelf"), "shelf://bucket/a.jsonl"
    before, now = TEXTS, [text.replace("ab", "AB") for text in TEXTS]
    info = Shelf.info
    monkeypatch.setattr(Shelf, "info", lambda self, path: info(self, path) | {"created": 1})
    ends = set()
    for moment in range(1, 60):
        store.pipe_file(url, jsonl(*before))
        Shelf.requests.clear()
        Shelf.disturb = lambda path, start, moment=moment: (
            len(Shelf.requests) == moment and store.pipe_file(path, jsonl(*now))
        )
        command = ("pack", url, *QUIET, "--unit-bytes", 2000, "--workers", 1)
        result = packer(*command)
        ends.add(result.exit_code)
        if result.exit_code:
            assert_error(result, 1, f"{url}: changed while it was read")
            Shelf.disturb = lambda path, start: None
            result = packer(*command)
            assert result.exit_code == 0, result.stderr
        assert recover_texts("out") in (before, now), moment
        is_over = len(Shelf.requests) < moment
        shutil.rmtree("out")
        if is_over:
            break
    assert ends == {0, 1}
    assert is_over


@pytest.mark.parametrize("form", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_an_object_that_is_cut_short_while_it_is_read(form: str) -> None:
    FORMS[form](form)
    upload("shelf")
    store = fsspec.filesystem("shelf")
    Shelf.disturb = lambda path, start: store.pipe_file(path, store.cat_file(path)[:100])
    result = packer("pack", f"shelf://bucket/{form}", *QUIET)
    assert_error(result, 1, f"shelf://bucket/{form}: cannot read: it ends at byte 100 of ")


def test_slices_take_few_requests_and_little_more_than_is_theirs() -> None:
    data = jsonl(*("ab" * 100_000 for _ in range(100)))  # 20 MB
    fsspec.filesystem("shelf").pipe_file("shelf://bucket/a.jsonl", data)
    manifest = pack("shelf://bucket/a.jsonl", "-l", 65_536, "--unit-bytes", "5M")
    assert len(manifest["units"]) == 4
    # the data is fetched twice: to be packed, and to be hashed
    assert len(Shelf.requests) < 30
    assert sum(end - start for _, start, end in Shelf.requests) < 2.5 * len(data)


def test_a_whole_object_takes_few_requests() -> None:
    """A manifest of 42 MB took five thousand, of 8 KiB each."""
    fsspec.filesystem("shelf").pipe_file("shelf://bucket/manifest.json", bytes(1_000_000))
    assert len(storage.read_bytes("shelf://bucket/manifest.json")) == 1_000_000
    assert len(Shelf.requests) <= 2
