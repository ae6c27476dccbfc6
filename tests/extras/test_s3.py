"""The real command line on s3:// inputs and outputs, with s3fs and a local S3 server."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import s3_server
from support import at_any_moment, check_directory, contents, jsonl, packer_process, recover_texts

TEXTS = [f"text {i} " + "ab" * (i % 50) for i in range(20_000)]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server.server() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty one, which the command finds by its environment."""
    s3_server.point_to(endpoint, folder, monkeypatch)
    with s3_server.empty_bucket() as found:
        yield found


def _parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": TEXTS}), sink, row_group_size=3000)
    return bytes(sink.getvalue())


FORMS: dict[str, Any] = {"a.jsonl.gz": lambda: gzip.compress(jsonl(*TEXTS)), "a.parquet": _parquet}


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of the command; errors are two lines."""
    result = packer_process(*arguments)
    stderr = result.stderr.decode()
    assert result.returncode == code, stderr
    if code:
        assert [line.split(":")[0] for line in stderr.splitlines()] == ["error", "tip"], stderr
    return result.stdout.decode(), stderr


def pack(source: object, out: str, code: int = 0) -> str:
    more = ("-t", "bytes", "-q", "-o", out, "--unit-bytes", 200_000, "--workers", 4)
    return run("pack", source, "-l", 512, *more, code=code)[1]


@pytest.mark.parametrize("form", FORMS)
def test_shards_from_s3_are_those_from_local_copies(bucket: Any, form: str) -> None:
    data = FORMS[form]()
    Path(form).write_bytes(data)
    bucket.put_object(Key=f"some/{form}", Body=data)
    pack(f"s3://bucket/some/{form}", "out")
    pack(form, "local")
    assert recover_texts("out") == TEXTS
    remote, local = check_directory("out"), check_directory("local")
    assert remote["inputs"].pop()["path"] == f"s3://bucket/some/{form}"
    local["inputs"].pop()
    assert remote | {"sha256": ""} == local | {"sha256": ""}
    stdout, _ = run("verify", "out", "--against-inputs", "--sample", "all")
    assert "encoded again: the same" in stdout


def test_folders_and_globs(bucket: Any) -> None:
    for key, text in {"d/b.jsonl": "2", "d/a.jsonl": "1", "d/sub/c.jsonl": "3"}.items():
        bucket.put_object(Key=key, Body=jsonl(text))
    bucket.put_object(Key="d/", Body=b"")  # as consoles make them
    bucket.put_object(Key="d/readme.md", Body=b"-")
    for number, (url, texts) in enumerate(
        {"s3://bucket/d": "123", "s3://bucket/d/": "123", "s3://bucket": "123",
         "s3://bucket/d/*.jsonl": "12", "s3://bucket/**/c.jsonl": "3"}.items()
    ):  # fmt: skip
        pack(url, f"out-{number}")
        assert "".join(recover_texts(f"out-{number}")) == texts, url


ELSEWHERE = [  # where, what is in the environment, and what is said
    ("s3://bucket/a.jsonl", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
     "cannot read: Unable to locate credentials", "the credentials for s3://"),
    ("s3://bucket/a.jsonl", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "cannot read: ",
     "check the network"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "environment", "message", "tip"), ELSEWHERE)
def test_what_cannot_be_reached(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str],
    message: str, tip: str,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    said = pack(url, "out", code=1)
    assert f"{url}: {message}" in said
    assert tip in said


def test_an_edge_that_holds_another_version(
    endpoint: str, bucket: Any, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """It passes over If-Match. Nothing of it is packed."""
    proxy = s3_server.Proxy(endpoint)
    s3_server.point_to(proxy.endpoint, folder, monkeypatch)
    bucket.put_object(Key="a.jsonl", Body=jsonl(*TEXTS))
    asked = itertools.count()
    proxy.disturb = lambda key: "stale" if key == "a.jsonl" and next(asked) > 3 else ""
    said = pack("s3://bucket/a.jsonl", "out", code=1)
    assert "s3://bucket/a.jsonl: cannot read: it changed" in said
    proxy.undisturbed()
    pack("s3://bucket/a.jsonl", "out")
    assert recover_texts("out") == TEXTS
    proxy.close()


RESULT = "s3://bucket/some/out"


def objects(bucket: Any) -> dict[str, bytes]:
    """What is in the result's place, as `at_any_moment`."""
    found = bucket.objects.filter(Prefix="some/out/")
    content = {one.key.removeprefix("some/out/"): one.get()["Body"].read() for one in found}
    return at_any_moment(content)


@pytest.fixture
def temporary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, where results for URLs are packed."""
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    return folder / "tmp"


@pytest.fixture
def local(bucket: Any, temporary: Path) -> dict[str, bytes]:
    """What is packed from a.jsonl, in shards that are longer than a part."""
    Path("a.jsonl").write_bytes(jsonl(*TEXTS, *TEXTS))
    assert pack_all("local") == ""
    found = contents("local")
    assert max(map(len, found.values())) > 8 << 20
    return found


def pack_all(out: str, *more: str, code: int = 0) -> str:
    options = ("-t", "bytes", "-q", "--unit-bytes", 1_500_000)
    return run("pack", "a.jsonl", "-l", 512, *options, "-o", out, *more, code=code)[1]


def test_a_result_on_s3(bucket: Any, local: dict[str, bytes], temporary: Path) -> None:
    pack_all(RESULT + "/")
    assert objects(bucket) == local
    assert list(temporary.iterdir()) == []
    stdout, _ = run("stats", RESULT, "--json")
    expected = json.loads(run("stats", "local", "--json")[0])
    assert json.loads(stdout) == expected | {"directory": RESULT}
    pack_all(RESULT)  # up to date
    assert f"{RESULT}: holds a finished result" in pack_all(RESULT, "--seed", 2, code=2)
    assert objects(bucket) == local
    bucket.put_object(Key="some/out/shard-99999-000.arrow", Body=b"stale")
    bucket.put_object(Key="some/out/notes.txt", Body=b"mine")
    pack_all(RESULT, "--overwrite", "--seed", "1")
    found = objects(bucket)
    assert found.pop("notes.txt") == b"mine"
    assert found.pop("shard-99999-000.arrow") == b"stale"
    run("pack", "a.jsonl", "-l", 512, "-t", "bytes", "-q", "--unit-bytes", 1_500_000, "--seed", "1",
        "-o", "seeded")  # fmt: skip
    assert found == contents("seeded") != local
    shard = next(name for name in found if name.endswith(".arrow"))
    bucket.put_object(Key=f"some/out/{shard}", Body=found[shard][:-1] + b"?")  # of the same size
    said = pack_all(RESULT, "--overwrite", "--seed", "1", code=2)
    assert f"{RESULT}: holds files that packer did not make, or that have changed: {shard}" in said
    assert objects(bucket)[shard] == found[shard][:-1] + b"?"
    bucket.put_object(Key="other/notes.txt", Body=b"mine")
    assert "not a result of packer" in pack_all("s3://bucket/other", "--overwrite", code=2)


def test_a_bucket_is_not_made(bucket: Any, local: dict[str, bytes], temporary: Path) -> None:
    said = pack_all("s3://no-such-bucket/out", code=1)
    assert "s3://no-such-bucket/out/.packer/publishing.json: cannot write: no such bucket" in said
    assert [one.name for one in boto3.resource("s3").buckets.all()] == ["bucket"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("how", ["SIGINT", "error"])
def test_an_upload_that_ends_halfway_goes_on(
    bucket: Any, local: dict[str, bytes], temporary: Path, how: str
) -> None:
    script = (
        "import os, signal, s3fs.core\n"
        "from packer_cli.cli import app as cli\n"
        "from packer_cli.run import upload as uploading\n"
        "uploading._THREADS = 1; upload = s3fs.core.S3File._upload_chunk\n"
        "def disturbed(self, final=False):\n"
        "    if 'shard-00001' in self.path and final:\n"
        f"        if '{how}' == 'error': raise PermissionError(13, 'Access Denied')\n"
        f"        os.kill(os.getpid(), signal.{how})\n"
        "    return upload(self, final)\n"
        "s3fs.core.S3File._upload_chunk = disturbed; cli.main()"
    ).replace("signal.error", "SIGTERM")
    command = ["pack", "a.jsonl", "-l", "512", "-t", "bytes", "-q", "--unit-bytes", "1500000"]
    done = subprocess.run(
        [sys.executable, "-c", script, *command, "-o", RESULT],
        capture_output=True, timeout=60, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == {"SIGINT": 130, "error": 1}[how], done.stderr
    kind, tip = done.stderr.splitlines()
    assert kind.startswith("stopped: " if how == "SIGINT" else "error: s3://")
    assert "files are uploaded; run the same command again to continue" in tip
    uploads = boto3.client("s3").list_multipart_uploads(Bucket="bucket")
    assert uploads.get("Uploads", []) == []
    before = {one.key: one.last_modified for one in bucket.objects.all()}
    (key,) = (key for key in before if "shard-00000-000" in key)
    assert "some/out/manifest.json" not in before
    pack_all(RESULT)
    assert objects(bucket) == local
    after = {one.key: one.last_modified for one in bucket.objects.all()}
    assert after[key] == before[key]
    assert list(temporary.iterdir()) == []
