"""Results at a URL: uploaded whole or not complete, whatever happens meanwhile.

PACKER_KILLS: about twice as many as processes are killed, each at another step.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from altered import altered
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from support import (
    assert_error,
    at_any_moment,
    contents,
    jsonl,
    packer,
    packer_process,
    recover_texts,
    shard_of,
    wait_for,
)

from packer_cli import open_packed, storage
from packer_cli.result.manifest import is_manifest
from packer_cli.result.shards import digest
from packer_cli.run import upload as publish

KILLS = int(os.environ.get("PACKER_KILLS", "16"))
TEXTS = [f"text {i} " + "ab" * (i % 50) for i in range(400)]
OTHERS = [text.replace("text", "TEXT") for text in TEXTS]  # of the same sizes
OPTIONS = ("-l", 64, "-t", "bytes", "--unit-bytes", 6000, "--workers", 1)
OUT = "shop://bucket/deep/out"
MARKER = ".packer/publishing.json"


class Shop(AbstractFileSystem):
    """A store that has no folders, and objects only once they are whole.

    Threads write to it: `(*objects,)` is of one moment.
    """

    protocol = "shop"
    objects: ClassVar[dict[str, bytes]] = {}
    log: ClassVar[list[tuple[str, str]]] = []
    disturb: ClassVar[Callable[[str, str], None]]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("shop://").strip("/")

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in Shop.objects:
            return {"name": path, "size": len(Shop.objects[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in (*Shop.objects,)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if self.info(path)["type"] == "file":
            return [self.info(path)]
        rest = (name[len(path) + 1 :] for name in (*Shop.objects,) if name.startswith(f"{path}/"))
        found = [self.info(f"{path}/{n}") for n in sorted({n.partition("/")[0] for n in rest})]
        return found if detail else [one["name"] for one in found]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            self.info(path)
            return io.BytesIO(Shop.objects[path])
        return _Upload(self, path, mode, **options)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        self.note("remove", path)
        self.info(path)
        del Shop.objects[path]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("it would make a bucket")

    @classmethod
    def note(cls, what: str, path: str) -> None:
        name = path.removeprefix("bucket/deep/out/")
        cls.disturb(what, name)
        cls.log.append((what, name))


class _Upload(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.whole = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.whole += self.buffer.getvalue()
        if final:
            Shop.note("write", self.path)
            Shop.objects[self.path] = self.whole
        return True

    def discard(self) -> None:
        Shop.note("discard", self.path)


@pytest.fixture(autouse=True)
def stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones, inputs in the current directory, and a temporary directory of our own."""
    fsspec.register_implementation("shop", Shop, clobber=True)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    Shop.objects.clear()
    Shop.log.clear()
    Shop.disturb = lambda what, path: None
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    Path("a.jsonl").write_bytes(jsonl(*TEXTS))
    Path("b.jsonl").write_bytes(jsonl(*OTHERS))


def pack(*more: object, source: str = "a.jsonl", out: str = OUT) -> Any:
    return packer("pack", source, *OPTIONS, "-q", "-o", out, *more)


def succeeds(*more: object, **how: str) -> None:
    result = pack(*more, **how)
    assert result.exit_code == 0, result.stderr
    assert os.listdir("tmp") == []


def local(source: str = "a.jsonl") -> dict[str, bytes]:
    """What the same command writes to a local directory."""
    out = f"local-{source}"
    if not Path(out).exists():
        assert pack(source=source, out=out).exit_code == 0
    return contents(out)


def there(url: str = OUT) -> dict[str, bytes]:
    """All objects below a URL."""
    store, root = url_to_fs(url)
    found = {name.removeprefix(root).lstrip("/"): store.cat_file(name) for name in store.find(root)}
    return at_any_moment(found)


def test_the_same_bytes_as_a_local_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_THREADS", 1)
    for url in (OUT, "memory://bucket/out/", f"file://{Path.cwd()}/deep/out"):
        succeeds(out=url)
        assert there(url) == local()
        assert not Path("deep/out/.packer").exists()
    assert len(list(Path("local-a.jsonl").glob("*.arrow"))) > 3
    names = [name for what, name in Shop.log if what == "write"]
    shards = [name for name in names if name.endswith(".arrow")]
    assert names[0] == names[1] == MARKER
    assert set(names[2 : 2 + len(shards)]) == set(shards)
    assert names[-1] == "manifest.json"
    assert Shop.log[-1] == ("remove", MARKER)


def test_stats_of_a_url() -> None:
    succeeds()
    local()
    expected = json.loads(packer("stats", "local-a.jsonl", "--json").stdout)
    found = packer("stats", OUT, "--json", "--min-utilization", "0.5")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout) == expected | {"directory": OUT}
    assert OUT in packer("stats", OUT).stdout
    for command in (("verify", OUT), ("show", OUT), ("stats", OUT, "--deep"), ("finalize", OUT),
                    ("export", OUT, "--to", "trl", "-o", "x")):  # fmt: skip
        result = packer(*command)
        assert_error(result, 2, f"{OUT}: a URL, ")
        assert "copy it to a local path" in result.stderr
    assert_error(packer("stats", OUT + "/no"), 2, f"{OUT}/no: no such directory")
    assert_error(packer("stats", "shop://bucket/deep"), 1, "has no manifest.json: not packed")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--update"], f"--update: {OUT}: a URL"),
        (["--rank", "0", "--world-size", "2"], f"--rank: {OUT}: a URL"),
        (["-o", "shop://"], "--output: shop://: names no folder"),
        (["-o", "out", "--staging", "s"], "--staging: is for an --output that is a URL"),
        (["-o", "nowhere://a/b"], "nowhere://a/b: unknown protocol"),
        (["-o", ""], "--output: is empty"),
        (["--staging", "shop://a/b"], "--staging: 'shop://a/b' is not a local path"),
        (["--staging", "a.jsonl"], "--staging: a.jsonl: is not a directory"),
        (
            ["--staging", "mine"],
            "--staging: mine: is neither empty nor left by an interrupted upload",
        ),
    ],
)
def test_refused_options(more: list[str], message: str) -> None:
    Path("mine").mkdir()
    Path("mine/notes").write_text("mine")
    assert_error(pack(*more), 2, message)
    assert os.listdir("tmp") == []
    assert contents("mine") == {"notes": b"mine"}
    assert there("shop://bucket") == {}


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
@pytest.mark.parametrize("names", [["notes.txt"], ["manifest.json"], [".packer/run.json"], [""]])
def test_what_is_foreign_is_refused(names: list[str], overwrite: list[str]) -> None:
    for name in names:
        fsspec.filesystem("shop").pipe_file(f"{OUT}/{name}".rstrip("/"), b"mine")
    before = there()
    result = pack(*overwrite)
    assert_error(result, 2, OUT, "not a result of packer" if names != [""] else "not a folder")
    assert there() == before
    assert os.listdir("tmp") == []


def test_inputs_inside_the_output_are_refused() -> None:
    store = fsspec.filesystem("shop")
    store.pipe_file(f"{OUT}/a.jsonl", jsonl("a"))
    assert_error(pack(source=f"{OUT}/a.jsonl"), 2, "lies inside the output")
    Path("out").mkdir()
    Path("out/a.jsonl").write_bytes(jsonl("a"))
    url = f"file://{Path.cwd()}/out"
    for inside, out in (("out", url), (url, "out"), (url, url)):
        result = pack("--overwrite", source=f"{inside}/a.jsonl", out=out)
        assert_error(result, 2, "lies inside the output")


def test_a_finished_result_is_replaced_only_when_asked() -> None:
    succeeds(source="b.jsonl")
    fsspec.filesystem("shop").pipe_file(f"{OUT}/notes.txt", b"mine")
    fsspec.filesystem("shop").pipe_file(f"{OUT}/shard-99999-000.arrow", b"stale")
    before = there()
    assert_error(pack(), 2, f"{OUT}: holds a finished result")
    assert there() == before
    Shop.log.clear()
    succeeds("--overwrite")
    mine = {"notes.txt": b"mine", "shard-99999-000.arrow": b"stale"}
    assert there() == local() | mine
    # reserved, marked; and nothing goes before the manifest is another
    assert Shop.log[:2] == [("write", MARKER), ("write", MARKER)]
    at = Shop.log.index(("write", "manifest.json"))
    assert {what for what, _ in Shop.log[:at]} == {"write"}
    assert {what for what, _ in Shop.log[at + 1 :]} == {"remove"}
    assert Shop.log[-1] == ("remove", MARKER)


def fail_at(number: int, error: BaseException) -> None:
    """Raise at the so-manieth write of a shard, whichever of the threads does it."""
    writes = itertools.count(1)

    def disturb(what: str, name: str) -> None:
        if what == "write" and name.endswith(".arrow") and next(writes) == number:
            raise error

    Shop.disturb = disturb


def test_an_upload_that_fails_halfway_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_THREADS", 1)
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


def test_every_object_is_checked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_THREADS", 1)

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
    monkeypatch.setattr(publish, "_THREADS", 1)
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


def test_a_staged_run_of_other_options_or_for_another_url_is_refused() -> None:
    fail_at(1, OSError("no"))
    assert pack("--staging", "s").exit_code == 1
    Shop.disturb = lambda what, name: None
    result = pack("--staging", "s", "--seed", 7)
    assert_error(result, 2, "holds an unfinished run for", "--seed was 0, is now 7")
    result = pack("--staging", "s", out="shop://bucket/other")
    assert_error(result, 2, "--staging: s: holds files for an upload to another URL")
    with open("a.jsonl", "ab") as file:
        file.write(jsonl("more"))
    assert_error(pack("--staging", "s"), 2, "a.jsonl was written to")
    succeeds("--staging", "s", "--overwrite")
    assert there() == local()


def test_a_staged_shard_that_was_damaged_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_THREADS", 1)  # or another has uploaded it by then
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


def test_a_store_that_cannot_be_written_to_is_found_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: object) -> None:
        raise AssertionError("packs")

    monkeypatch.setattr("packer_cli.run.pipeline._Job._pack_rest", fail)
    for error, code, message in (
        (NotImplementedError(), 2, "cannot write at shop://"),
        (PermissionError(errno.EACCES, "Forbidden"), 1, "cannot write: Forbidden"),
        (FileNotFoundError("bucket"), 1, "cannot write: no such bucket or folder"),
    ):

        def refuse(what: str, name: str, error: Exception = error) -> None:
            raise error

        Shop.disturb = refuse
        assert_error(pack(), code, message)
        assert os.listdir("tmp") == []


def test_a_run_that_fails_leaves_nothing() -> None:
    Path("a.jsonl").write_bytes(b"no\n")
    result = pack()
    assert_error(result, 1, "a.jsonl")
    assert there("shop://bucket") == {}
    assert os.listdir("tmp") == []


def test_a_result_that_is_marked_incomplete_is_not_uploaded() -> None:
    result = pack("--overlong", "truncate", "--max-loss", "0.001")
    assert result.exit_code == 1
    assert f"{OUT}: 0." in result.stderr
    assert f"not uploaded, but kept in {publish.default_staging(OUT)}" in result.stderr
    assert there() == {}
    succeeds("--overlong", "truncate", "--max-loss", "0.9")
    assert "manifest.json" in there()


def test_a_second_run_is_refused_at_once() -> None:
    def again(what: str, name: str) -> None:
        Shop.disturb = lambda what, name: None
        assert_error(pack(), 1, "another run is writing there")

    Shop.disturb = again
    succeeds()
    assert there() == local()


def test_a_staging_directory_of_somebody_else_is_not_used(folder: Path) -> None:
    (folder / "theirs").mkdir()
    publish.default_staging(OUT).symlink_to(folder / "theirs")
    assert_error(pack(), 2, "is not a directory of yours")
    publish.default_staging(OUT).unlink()
    fail_at(1, OSError("no"))
    assert pack().exit_code == 1
    assert publish.default_staging(OUT).stat().st_mode & 0o777 == 0o700


CRASHING = """
import os, sys
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from packer_cli.cli import app as cli
from packer_cli.run import upload as publish
publish._THREADS = 1
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
        found = contents(out) if Path(out).exists() else {}
        found = {name: data for name, data in found.items() if not name.startswith(".packer")}
        if is_manifest(Path(out, "manifest.json")):  # one result or the other, whole
            check_shards(out)
            assert found["manifest.json"] in (whole["manifest.json"], other["manifest.json"]), step
        if overwrite and not {n for n in whole if n.endswith(".arrow")} <= found.keys():
            assert all(found[name] == other[name] for name in other), step
        before = other if overwrite else {}
        middle += found != before and found.get("manifest.json") != whole["manifest.json"]
        again = crashing(0, *more, out=out)
        finished = "holds a finished result" in again.stderr
        assert again.returncode == 0 or finished, (step, again.stderr)
        assert contents(out) == whole, step
        assert os.listdir("tmp") == []
    assert middle


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
