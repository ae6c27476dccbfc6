"""Results at a URL: uploaded whole or not complete, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import faults
import pytest
from altered import faulty
from shop import MARKER, OPTIONS, OUT, TEXTS, Shop, fail_at, local, pack, succeeds, there
from support import (
    assert_error,
    contents,
    jsonl,
    packer,
    recover_texts,
    shard_of,
    wait_for,
    work_folder,
)

from packer_cli import storage
from packer_cli.run import upload

pytestmark = pytest.mark.usefixtures("stores")


def test_an_upload_that_fails_halfway_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_THREADS", 1)
    fail_at(3, PermissionError(errno.EACCES, "Access Denied"))
    result = pack()
    assert_error(result, 1, f"{OUT}/shard-00002-000-", ".arrow: cannot write: Access Denied")
    tip = result.stderr.splitlines()[1]
    assert "write and to delete; 2 of " in tip
    assert tip.endswith("files are uploaded; run the same command again to continue")
    assert "manifest.json" not in there()
    assert MARKER in there()
    assert_error(packer("stats", OUT), 1, "has no manifest.json: the run that writes it has not")
    Shop.log.clear()
    result = packer("pack", "a.jsonl", *OPTIONS, "-o", OUT)
    assert result.exit_code == 0, result.stderr
    assert f"{OUT}: continuing: 2 of " in result.stderr
    written = [name for what, name in Shop.log if what == "write"]
    assert next(name[:11] for name in written if name.startswith("shard")) == "shard-00002"
    assert os.listdir("tmp") == []
    assert there() == local()


def test_an_upload_of_documents_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_THREADS", 1)
    command = ["tokenize", "a.jsonl", "-t", "bytes", "--unit-bytes", 6000, "--workers", 1, "-q"]
    assert packer(*command, "-o", "here").exit_code == 0
    fail_at(4, OSError("no"))
    assert_error(packer(*command, "-o", OUT), 1, f"{OUT}/", ".arrow: cannot write: no")
    shards = {name for name in there() if name.endswith(".arrow")}
    assert len(shards) == 3
    assert {name.partition("-")[0] for name in shards} == {"documents", "index"}
    Shop.disturb = lambda what, name: None
    Shop.log.clear()
    result = packer(*command[:-1], "-o", OUT)
    assert result.exit_code == 0, result.stderr
    assert f"{OUT}: continuing: 3 of " in result.stderr
    assert not shards & {name for what, name in Shop.log if what == "write"}
    assert there() == contents("here")


@pytest.mark.parametrize("earlier", [False, True])
def test_only_a_beginning_of_what_is_uploaded_is_replaced(earlier: bool) -> None:
    how = ["--overwrite"] if earlier else []
    if earlier:
        Path("small.jsonl").write_bytes(jsonl("few"))  # its side files are smaller
        succeeds(source="small.jsonl")
    fail_at(3, OSError("no"))
    assert pack(*how).exit_code == 1
    Shop.disturb = lambda what, name: None
    place, before = "bucket/deep/out/units.jsonl", dict(Shop.objects)
    Shop.objects[place] = b"mine"
    assert_error(pack(*how), 2, "that have changed: units.jsonl")
    assert Shop.objects[place] == b"mine"
    Shop.objects[place] = before.get(place, local()["units.jsonl"][:9])
    succeeds(*how)
    assert there() == local()


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_all_but_the_last_step(overwrite: list[str]) -> None:
    if overwrite:
        succeeds(source="b.jsonl")

    def fail(what: str, name: str) -> None:
        if (what, name) == ("remove", MARKER):
            raise OSError("no")

    Shop.disturb = fail
    assert_error(pack(*overwrite), 1, "cannot remove: no")
    assert MARKER in there()
    Shop.disturb = lambda what, name: None
    Shop.log.clear()
    succeeds()
    assert there() == local()
    assert "write" not in {what for what, _ in Shop.log}


def test_every_object_is_checked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_THREADS", 1)

    def cut(what: str, name: str) -> None:
        if name == "units.jsonl":
            (shard,) = (n for n in Shop.objects if "shard-00001" in n)
            Shop.objects[shard] = b"short"

    Shop.disturb = cut
    result = pack()
    assert_error(result, 1, f"{OUT}/shard-00001-000-", ".arrow: is not what was uploaded")
    assert "manifest.json" not in there()
    Shop.disturb = lambda what, name: None
    succeeds()
    assert there() == local()


def test_another_run_that_writes_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_THREADS", 1)
    whole = local()

    def take_over(what: str, name: str) -> None:
        if name == "units.jsonl":
            made = whole | there()
            files = {n: (len(made[n]), sha256(made[n]).hexdigest()) for n in made}
            content = {"manifest_sha256": "another", "files": files}
            Shop.objects[f"bucket/deep/out/{MARKER}"] = json.dumps(content).encode()

    Shop.disturb = take_over
    assert_error(pack(), 1, f"{OUT}: another run is writing there")
    assert "manifest.json" not in there()
    Shop.disturb = lambda what, name: None
    assert_error(pack(), 2, f"{OUT}: holds an unfinished upload of another result")
    succeeds("--overwrite")
    assert there() == local()


def test_the_earlier_side_files_stay_until_all_shards_are_there() -> None:
    succeeds(source="b.jsonl")
    before = there()
    others = {name for name in local() if name.endswith(".arrow") and "shard-00004" not in name}

    def fail(what: str, name: str) -> None:
        if "shard-00004" in name:
            assert wait_for(lambda: {f"bucket/deep/out/{n}" for n in others} <= {*Shop.objects})
            raise OSError("no")

    Shop.disturb = fail
    assert pack("--overwrite").exit_code == 1
    after = there()
    assert others <= after.keys()
    assert {name: after[name] for name in before} == before
    Shop.disturb = lambda what, name: None
    succeeds("--overwrite")
    assert there() == local()


def test_what_was_uploaded_of_another_result_is_not_taken() -> None:
    """The same names and sizes, other bytes; the staging directory is not there any more."""
    fail_at(4, OSError("no"))
    assert pack("--staging", "s", source="b.jsonl").exit_code == 1
    Shop.disturb = lambda what, name: None
    assert_error(pack(), 2, f"{OUT}: holds an unfinished upload of another result")
    Shop.log.clear()
    succeeds("--overwrite")  # what was packed is uploaded
    assert there() == local()
    assert_error(pack("--staging", "s", source="b.jsonl"), 2, "holds a finished result")
    succeeds("--staging", "s", "--overwrite", source="b.jsonl")
    assert there() == local("b.jsonl")
    assert not Path("s").exists()


def test_a_staged_shard_that_was_damaged_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_THREADS", 1)  # or another has uploaded it by then
    fail_at(1, OSError("no"))
    assert pack("--staging", "s").exit_code == 1
    Shop.disturb = lambda what, name: None
    shard = shard_of(work_folder("s"), 4)
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    result = pack("--staging", "s")
    assert_error(result, 1, f"{shard.name}: has changed since it was packed")
    assert "manifest.json" not in there()
    shard.unlink()  # by whatever cleans up: then all is packed again
    succeeds("--staging", "s")
    assert there() == local()


# Run by a process of its own, which hears signals.
HANGING = f"""
import sys, time
sys.path.insert(0, {str(Path(faults.__file__).parent)!r})
from disk import Object
from packer_cli.cli import app as cli
write = Object.write
def hang(self, data):
    if "shard-00002" in self.path:
        open("hanging", "w").close()
        time.sleep(600)
    return write(self, data)
Object.write = hang
cli.main()
"""


def test_ctrl_c_ends_an_upload_that_hangs() -> None:
    command = ["pack", "a.jsonl", *map(str, OPTIONS), "-q", "-o", f"disk://{Path.cwd()}/out"]
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, *command], stderr=subprocess.PIPE, text=True
    ) as process:
        assert wait_for(Path("hanging").exists)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)  # far less than the upload hangs
    assert process.returncode == 130
    stopped, tip = stderr.splitlines()
    assert stopped == "stopped: interrupted"
    assert tip.endswith("files are uploaded; run the same command again to continue")
    assert not Path("out/manifest.json").exists()
    done = faulty("at_step(0, kill)", *command)
    assert done.returncode == 0, done.stderr
    assert contents("out") == local()
    assert recover_texts("out") == TEXTS
    assert os.listdir("tmp") == []


def test_an_object_that_is_not_whole_is_not_committed() -> None:
    def blocks() -> Any:
        yield b"a" * (9 << 20)
        raise OSError("no")

    with pytest.raises(Exception, match="cannot write: no"):
        storage.write(f"{OUT}/x", blocks(), 10 << 20)
    assert there() == {}
    assert ("discard", "x") in Shop.log
    assert storage.part_bytes(1 << 40) * 10_000 > 1 << 40
