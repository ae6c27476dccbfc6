"""Results at a URL: uploaded whole or not complete, whatever happens meanwhile.

PACKER_KILLS: about twice as many as processes are killed, each at another step.
"""

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

import pytest
from altered import altered
from shop import MARKER, OPTIONS, OUT, TEXTS, Shop, fail_at, local, pack, succeeds, there
from support import (
    assert_error,
    contents,
    packer,
    packer_process,
    recover_texts,
    shard_of,
    wait_for,
)

from packer_cli import open_packed, storage
from packer_cli.result.manifest_file import is_manifest
from packer_cli.result.shards import digest
from packer_cli.run import transfer

KILLS = int(os.environ.get("PACKER_KILLS", "10"))
pytestmark = pytest.mark.usefixtures("stores")


def test_an_upload_that_fails_halfway_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_THREADS", 1)
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
    monkeypatch.setattr(transfer, "_THREADS", 1)
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


def test_every_object_is_checked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_THREADS", 1)

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
    monkeypatch.setattr(transfer, "_THREADS", 1)
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
    monkeypatch.setattr(transfer, "_THREADS", 1)  # or another has uploaded it by then
    fail_at(1, OSError("no"))
    assert pack("--staging", "s").exit_code == 1
    Shop.disturb = lambda what, name: None
    shard = shard_of("s/result", 4)
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    result = pack("--staging", "s")
    assert_error(result, 1, f"{shard.name}: has changed since it was packed")
    assert "manifest.json" not in there()
    shard.unlink()  # by whatever cleans up: then all is packed again
    succeeds("--staging", "s")
    assert there() == local()


CRASHING = """
import os, sys
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from packer_cli.cli import app as cli
from packer_cli.run import transfer
transfer._THREADS = 1
steps = {step}
def counted(call):
    def count(*arguments, **options):
        global steps
        steps -= 1
        if not steps:
            os.kill(os.getpid(), 9)
        return call(*arguments, **options)
    return count
for kind, name in ((LocalFileSystem, "open"), (LocalFileSystem, "rm_file"),
                   (LocalFileOpener, "write"), (LocalFileOpener, "close"), (os, "rename")):
    setattr(kind, name, counted(getattr(kind, name)))
if {step} < 0:
    os._exit = lambda code: (print(-1 - steps, file=sys.stderr), sys.stderr.flush(), code)
cli.main()
"""


def crashing(step: int, *more: str, out: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    options = [str(option) for option in (*OPTIONS, "--unit-bytes", 20000)]
    command = ["pack", *options, "-q", *more, "-o", f"file://{Path.cwd()}/{out}"]
    return altered(CRASHING.format(step=step), *command, stdin=stdin)


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
def test_killed_at_every_step(overwrite: bool) -> None:
    more = ["a.jsonl", "--overwrite"] if overwrite else ["a.jsonl"]
    assert crashing(0, "b.jsonl", out="other").returncode == 0
    other = contents("other")
    if overwrite:
        assert crashing(0, "b.jsonl", out="whole").returncode == 0
    counted = crashing(-1, *more, out="whole")
    assert counted.returncode == 0, counted.stderr
    steps, whole, middle = int(counted.stderr.split()[-1]), contents("whole"), 0
    assert steps > 20
    for step in range(1 + overwrite, steps + 1, max(1, 4 * steps // KILLS)):
        out = f"out{step}"
        if overwrite:
            for name, data in other.items():
                Path(out).mkdir(exist_ok=True)
                Path(out, name).write_bytes(data)
        killed = crashing(step, *more, out=out)
        assert killed.returncode == -signal.SIGKILL, (step, killed.stderr)
        left = contents(out) if Path(out).exists() else {}
        left = {name: data for name, data in left.items() if not name.startswith(".packer")}
        if is_manifest(Path(out, "manifest.json")):  # one result or the other, whole
            check_shards(out)
            assert left["manifest.json"] in (whole["manifest.json"], other["manifest.json"]), step
        if overwrite and not {n for n in whole if n.endswith(".arrow")} <= left.keys():
            assert all(left[name] == other[name] for name in other), step
        before = other if overwrite else {}
        middle += left != before and left.get("manifest.json") != whole["manifest.json"]
        again = crashing(0, *more, out=out)
        finished = "holds a finished result" in again.stderr
        assert again.returncode == 0 or finished, (step, again.stderr)
        assert contents(out) == whole, step
        assert os.listdir("tmp") == []
    assert middle


@pytest.mark.parametrize("written", [b"", b'{"mani', b'{"manifest_sha256":"","files":{'])
def test_killed_while_the_marker_was_written(written: bytes) -> None:
    Path("out/.packer").mkdir(parents=True)
    Path("out/.packer/publishing.json.part").write_bytes(written)
    assert crashing(0, "a.jsonl", out="out").returncode == 0
    assert crashing(0, "a.jsonl", out="whole").returncode == 0
    assert contents("out") == contents("whole")


@pytest.mark.parametrize("name", ["publishing.json.part", "notes.part"])
def test_a_file_like_that_of_somebody_else(name: str) -> None:
    Path("out/.packer").mkdir(parents=True)
    Path("out/.packer", name).write_bytes(b"mine")
    again = crashing(0, "a.jsonl", out="out")
    assert (again.returncode, "is not empty, and not a result" in again.stderr) == (2, True)
    assert contents("out") == {f".packer/{name}": b"mine"}


def test_files_of_others_in_the_folder_of_an_upload_stay() -> None:
    killed = crashing(20, "a.jsonl", out="out")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    Path("out/.packer/notes.part").write_bytes(b"mine")
    Path("out/.packer/units.jsonl.part").write_bytes(b"half")
    again = crashing(0, "a.jsonl", out="out")
    assert again.returncode == 0, again.stderr
    assert [one.name for one in Path("out/.packer").iterdir()] == ["notes.part"]
    assert Path("out/.packer/notes.part").read_bytes() == b"mine"


def check_shards(out: str) -> None:
    for shard in open_packed(out).manifest["shards"]:
        assert digest(Path(out, shard["file"])) == (shard["bytes"], shard["sha256"])


def test_stdin_is_packed_again_and_then_uploading_goes_on() -> None:
    data = Path("a.jsonl").read_text()
    assert crashing(0, "-", out="whole", stdin=data).returncode == 0
    whole = contents("whole")
    for step in (10, 20):
        killed = crashing(step, "-", out="out", stdin=data)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert crashing(0, "-", out="out", stdin=data).returncode == 0
    assert contents("out") == whole
    assert os.listdir("tmp") == []


HANGING = """
import time
from fsspec.implementations.local import LocalFileOpener
from packer_cli.cli import app as cli
write = LocalFileOpener.write
def hang(self, data):
    if self.path.endswith("-002.arrow") or "shard-00002" in self.path:
        open("hanging", "w").close()
        time.sleep(600)
    return write(self, data)
LocalFileOpener.write = hang
cli.main()
"""


def test_ctrl_c_ends_an_upload_that_hangs() -> None:
    out = f"file://{Path.cwd()}/out"
    command = ["pack", "a.jsonl", *map(str, OPTIONS), "-q", "-o", out]
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
    done = packer_process(*command)
    assert done.returncode == 0, done.stderr
    assert contents("out") == local()
    assert recover_texts("out") == TEXTS
    assert os.listdir("tmp") == []


def test_an_object_that_is_not_whole_is_not_committed() -> None:
    def blocks() -> Any:
        yield b"a" * (9 << 20)
        raise OSError("no")

    with pytest.raises(Exception, match="cannot write: no"):
        storage.write(f"{OUT}/x", blocks(), 10 << 20, f"{OUT}/.packer/x.part")
    assert there() == {}
    assert ("discard", "x") in Shop.log
    assert storage.part_bytes(1 << 40) * 10_000 > 1 << 40
