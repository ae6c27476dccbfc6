"""Results at a URL: the bytes of a local one, uploaded whole or not complete, whatever happens."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import faults
import fsspec
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
from packer_cli.run.upload import default_staging

pytestmark = pytest.mark.usefixtures("stores")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is uploaded, and in which order, is the same every time."""
    if "several_threads" not in request.fixturenames:
        monkeypatch.setattr(upload, "_THREADS", 1)


@pytest.fixture
def several_threads() -> None:
    """As runs of users have."""


def undisturbed() -> None:
    Shop.disturb = lambda what, name: None
    Shop.log.clear()
    Shop.read.clear()


def test_the_same_bytes_as_a_local_result() -> None:
    """Marked at first, and the manifest last."""
    for url in (OUT, "memory://bucket/out/", f"file://{Path.cwd()}/deep/out"):
        succeeds(out=url)
        assert there(url) == local()
    names = [name for what, name in Shop.log if what == "write"]
    shards = [name for name in names if name.endswith(".arrow")]
    assert len(shards) > 3
    assert names[:2] == [MARKER, MARKER]
    assert set(names[2 : 2 + len(shards)]) == set(shards)
    assert names[-1] == "manifest.json"
    assert Shop.log[-1] == ("remove", MARKER)


def test_documents_and_rows_of_a_url() -> None:
    """Stats reads them there; all else wants a copy."""
    succeeds()
    local()
    expected = json.loads(packer("stats", "local-a.jsonl", "--json").stdout)
    result = packer("stats", OUT, "--json", "--min-utilization", "0.5")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == expected | {"directory": OUT}
    assert OUT in packer("stats", OUT).stdout
    for command in (("verify", OUT), ("show", OUT), ("stats", OUT, "--deep"),
                    ("export", OUT, "--to", "trl", "-o", "x")):  # fmt: skip
        result = packer(*command)
        assert_error(result, 2, f"{OUT}: a URL, ")
        assert "copy it to a local path" in result.stderr
    assert_error(packer("stats", OUT + "/no"), 2, f"{OUT}/no: no such directory")
    assert_error(packer("stats", "shop://bucket/deep"), 1, "has no manifest.json: not packed")
    tokens = ["tokenize", "a.jsonl", "-t", "bytes", "-o"]
    for said in ("uploaded", "up to date"):
        done = packer(*tokens, "memory://tokens/one")
        assert done.exit_code == 0, done.stderr
        assert said == "uploaded" or f"memory://tokens/one: {said}" in done.stderr
    assert packer(*tokens, "here").exit_code == 0
    assert there("memory://tokens/one") == contents("here")
    for name in ("memory://tokens/one", "memory://tokens/one/manifest.json"):
        done = packer("pack", name, "-l", 64, "-q", "-o", "out")
        assert_error(done, 2, "memory://tokens/one/: a URL, documents are only read from local")


REFUSED = [
    (["--update"], f"--update: {OUT}: a URL"),
    (["--rank", "0", "--world-size", "2"], f"--rank: {OUT}: a URL"),
    (["-o", "shop://"], "--output: shop://: names no folder"),
    (["-o", "nowhere://a/b"], "nowhere://a/b: unknown protocol"),
    (["--staging", "shop://a/b"], "--staging: 'shop://a/b' is not a local path"),
    (["--staging", "a.jsonl"], "--staging: a.jsonl: is not a directory"),
    (["--staging", "mine"], "mine: is neither empty nor left by an interrupted upload"),
    (["--staging", "mine2"], "mine2/.packer: is not packer's"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED)
def test_refused_options(more: list[str], message: str) -> None:
    Path("mine").mkdir()
    Path("mine/notes").write_text("mine")
    Path("mine2/.packer").mkdir(parents=True)
    Path("mine2/.packer/notes").write_text("mine")
    assert_error(pack(*more), 2, message)
    assert os.listdir("tmp") == []
    assert contents("mine") == {"notes": b"mine"}
    assert contents("mine2") == {".packer/notes": b"mine"}
    assert there("shop://bucket") == {}


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", ".packer/run.json", ""])
def test_what_is_foreign_is_refused(name: str, overwrite: list[str]) -> None:
    fsspec.filesystem("shop").pipe_file(f"{OUT}/{name}".rstrip("/"), b"mine")
    before = there()
    assert_error(pack(*overwrite), 2, OUT, "not a result of packer" if name else "not a folder")
    assert there() == before
    assert os.listdir("tmp") == []


def test_inputs_inside_the_output_are_refused() -> None:
    fsspec.filesystem("shop").pipe_file(f"{OUT}/a.jsonl", jsonl("a"))
    assert_error(pack(source=f"{OUT}/a.jsonl"), 2, "lies inside the output")
    Path("out").mkdir()
    Path("out/a.jsonl").write_bytes(jsonl("a"))
    url = f"file://{Path.cwd()}/out"
    for inside, out in (("out", url), (url, "out"), (url, url)):
        result = pack("--overwrite", source=f"{inside}/a.jsonl", out=out)
        assert_error(result, 2, "lies inside the output")


def test_a_finished_result_is_replaced_only_when_asked() -> None:
    succeeds(source="b.jsonl")
    mine = {"notes.txt": b"mine", "shard-99999-000.arrow": b"stale"}
    for name, content in mine.items():
        fsspec.filesystem("shop").pipe_file(f"{OUT}/{name}", content)
    before = there()
    assert_error(pack(), 2, f"{OUT}: holds a finished result that differs: a.jsonl is new")
    Shop.log.clear()
    again = packer("pack", "b.jsonl", *OPTIONS, "-o", OUT)
    assert (again.exit_code, f"{OUT}: up to date" in again.stderr) == (0, True)
    assert (there(), Shop.log) == (before, [])
    content = Path("b.jsonl").read_bytes()
    Path("b.jsonl").write_bytes(content[:-4] + b"~" + content[-3:])  # no size or time tells
    assert pack(source="b.jsonl").exit_code == 2
    Path("b.jsonl").write_bytes(content)
    Shop.log.clear()
    succeeds("--overwrite")
    assert there() == local() | mine
    # reserved, marked; and nothing goes before the manifest is another
    assert Shop.log[:2] == [("write", MARKER), ("write", MARKER)]
    at = Shop.log.index(("write", "manifest.json"))
    assert {what for what, _ in Shop.log[:at]} == {"write"}
    assert {what for what, _ in Shop.log[at + 1 :]} == {"remove"}
    assert Shop.log[-1] == ("remove", MARKER)
    undisturbed()
    succeeds("--overwrite")  # what stands is read, and not uploaded
    written = {name for what, name in Shop.log if what == "write"}
    assert written - {"input_times.json"} == {MARKER, "manifest.json"}
    assert {name for name in Shop.read if name.endswith(".arrow")} == {
        name for name in local() if name.endswith(".arrow")
    }


def test_what_was_put_there_after_the_manifest_is_compared() -> None:
    """As locally, before it is said to be up to date."""
    url = "memory://bucket/out"
    succeeds(out=url)
    store = fsspec.filesystem("memory")
    (shard,) = (name for name in there(url) if name.startswith("shard-00001"))
    content = there(url)[shard]
    for changed, said in ((content[:-1] + b"?", f"{shard} is missing or damaged"), (content, "")):
        store.pipe_file(f"{url}/{shard}", changed)
        again = packer("pack", "a.jsonl", *OPTIONS, "-o", url)
        assert (again.exit_code, said in again.stderr) == (2 * bool(said), True), again.stderr
    assert f"{url}: up to date" in again.stderr


def edit(name: str) -> bytes:
    """Change an object, but not its size."""
    (place,) = (one for one in Shop.objects if one.startswith(f"bucket/deep/out/{name}"))
    content = bytearray(Shop.objects[place])
    content[len(content) // 2] ^= 1
    Shop.objects[place] = bytes(content)
    return Shop.objects[place]


@pytest.mark.parametrize("has_versions", [True, False])
@pytest.mark.parametrize("name", ["shard-00001", "units.jsonl", "manifest.json"])
def test_what_somebody_has_changed_is_as_local_files_are(name: str, has_versions: bool) -> None:
    """Neither replaced nor taken as uploaded nor removed; by content, not by name and size."""
    Shop.has_versions = has_versions
    succeeds()
    mine = edit(name)
    before = there()
    for source in ("a.jsonl", "b.jsonl"):
        if (name, source) == ("shard-00001", "b.jsonl"):  # not in the way
            succeeds("--overwrite", source=source)
            assert mine in there().values()
            assert len(there()) == len(local(source)) + 1
        else:
            assert_error(pack("--overwrite", source=source), 2, OUT, name)
            assert there() == before


@pytest.mark.parametrize("when", ["shard-00002", "manifest.json"])
def test_what_is_changed_during_the_upload_stays(when: str) -> None:
    (shard,) = (name for name in local("b.jsonl") if name.startswith("shard-00001"))
    succeeds(source="b.jsonl")
    changed = list[bytes]()

    def disturb(what: str, name: str) -> None:
        if name.startswith(when) and not changed:
            changed.append(edit(shard))

    Shop.disturb = disturb
    succeeds("--overwrite")
    assert there() == local() | {shard: changed[0]}


def test_a_store_that_cannot_be_written_to_is_found_before_the_work() -> None:
    Path("a.jsonl").write_bytes(jsonl("one") + b"{not even read\n")
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
    undisturbed()
    assert_error(pack(), 1, "a.jsonl")  # a run that fails leaves nothing
    assert there("shop://bucket") == {}
    assert os.listdir("tmp") == []


def test_a_result_that_is_marked_incomplete_is_not_uploaded() -> None:
    result = pack("--overlong", "truncate", "--max-loss", "0.001")
    assert result.exit_code == 1
    assert f"{OUT}: 0." in result.stderr
    assert f"not uploaded, but kept in {default_staging(OUT)}" in result.stderr
    assert there() == {}
    succeeds("--overlong", "truncate", "--max-loss", "0.9")
    assert "manifest.json" in there()


def test_a_copy_of_one_that_is_marked_incomplete_is_replaced() -> None:
    result = pack("--overlong", "truncate", "--max-loss", "0.001", out="incomplete")
    assert result.exit_code == 1
    for name, content in contents("incomplete").items():
        Shop.objects[f"bucket/deep/out/{name}"] = content
    Shop.objects["bucket/deep/out/manifest.json"] = b"mine"
    assert_error(pack("--overwrite"), 2, "that have changed: manifest.json")
    assert there()["manifest.json"] == b"mine"
    del Shop.objects["bucket/deep/out/manifest.json"]
    succeeds("--overwrite")
    assert there() == local()


def test_a_staging_directory_of_somebody_else_is_not_used(folder: Path) -> None:
    (folder / "theirs").mkdir()
    default_staging(OUT).symlink_to(folder / "theirs")
    assert_error(pack(), 2, "is not a directory of yours")
    default_staging(OUT).unlink()
    fail_at(1, OSError("no"))
    assert pack().exit_code == 1
    assert default_staging(OUT).stat().st_mode & 0o777 == 0o700


def test_an_upload_that_fails_halfway_goes_on() -> None:
    fail_at(3, PermissionError(errno.EACCES, "Access Denied"))
    result = pack()
    assert_error(result, 1, f"{OUT}/shard-00002-000-", ".arrow: cannot write: Access Denied")
    tip = result.stderr.splitlines()[1]
    assert "check the network, the address and the credentials" in tip
    assert "; 2 of " in tip
    assert tip.endswith("files are uploaded; run the same command again to continue")
    assert "manifest.json" not in there()
    assert MARKER in there()
    assert_error(packer("stats", OUT), 1, "has no manifest.json: the run that writes it has not")
    undisturbed()
    result = packer("pack", "a.jsonl", *OPTIONS, "-o", OUT)
    assert result.exit_code == 0, result.stderr
    assert f"{OUT}: continuing: 2 of " in result.stderr
    written = [name for what, name in Shop.log if what == "write"]
    assert next(name[:11] for name in written if name.startswith("shard")) == "shard-00002"
    assert os.listdir("tmp") == []
    assert there() == local()


@pytest.mark.parametrize("earlier", [False, True])
def test_only_a_beginning_of_what_is_uploaded_is_replaced(earlier: bool) -> None:
    how = ["--overwrite"] if earlier else []
    if earlier:
        Path("small.jsonl").write_bytes(jsonl("few"))  # its side files are smaller
        succeeds(source="small.jsonl")
    fail_at(3, OSError("no"))
    assert pack(*how).exit_code == 1
    undisturbed()
    place, before = "bucket/deep/out/units.jsonl", dict(Shop.objects)
    Shop.objects[place] = b"mine"
    assert_error(pack(*how), 2, "that have changed: units.jsonl")
    assert Shop.objects[place] == b"mine"
    Shop.objects[place] = before.get(place, local()["units.jsonl"][:9])
    succeeds(*how)
    assert there() == local()


def the_last_step_fails(what: str, name: str) -> None:
    if (what, name) == ("remove", MARKER):
        raise OSError("no")


def a_shard_is_cut(what: str, name: str) -> None:
    if name == "units.jsonl":
        (shard,) = (n for n in Shop.objects if "shard-00001" in n)
        Shop.objects[shard] = b"short"


def another_run_writes(what: str, name: str) -> None:
    if name == "units.jsonl":
        made = local() | there()
        files = {n: (len(made[n]), sha256(made[n]).hexdigest()) for n in made}
        content = {"manifest_sha256": "another", "files": files}
        Shop.objects[f"bucket/deep/out/{MARKER}"] = json.dumps(content).encode()


# what happens meanwhile, the error, and how the next command goes on
ACCIDENTS: dict[str, tuple[Callable[[str, str], None], str, list[str]]] = {
    "all but the last step": (the_last_step_fails, "cannot remove: no", []),
    "a cut shard": (a_shard_is_cut, ".arrow: is not what was uploaded", []),
    "another run": (another_run_writes, f"{OUT}: another run is writing there", ["--overwrite"]),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_what_happens_meanwhile_is_noticed(name: str) -> None:
    """Every object is checked at the end."""
    local()
    accident, message, how = ACCIDENTS[name]
    Shop.disturb = accident
    assert_error(pack(), 1, message)
    assert ("manifest.json" in there()) == (name == "all but the last step")
    undisturbed()
    if how:
        assert_error(pack(), 2, f"{OUT}: holds an unfinished upload of another result")
    succeeds(*how)
    assert there() == local()
    assert name != "all but the last step" or "write" not in {what for what, _ in Shop.log}


def test_the_earlier_side_files_stay_until_all_shards_are_there(several_threads: None) -> None:
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
    undisturbed()
    succeeds("--overwrite")
    assert there() == local()


def test_what_is_staged_is_of_one_run_and_one_url() -> None:
    """Nothing of another result is taken: the same names and sizes, other bytes."""
    fail_at(4, OSError("no"))
    assert pack("--staging", "s", source="b.jsonl").exit_code == 1
    undisturbed()
    for more, how, message in (
        (["--seed", 7], {}, "holds an unfinished run that differs: --seed was 0, is now 7"),
        ([], {"out": "shop://bucket/other"}, "--staging: s: holds files for an upload to another"),
    ):
        assert_error(pack("--staging", "s", *more, source="b.jsonl", **how), 2, message)
    content = Path("b.jsonl").read_bytes()
    Path("b.jsonl").write_bytes(content + jsonl("more"))
    assert_error(pack("--staging", "s", source="b.jsonl"), 2, "b.jsonl has changed")
    Path("b.jsonl").write_bytes(content)
    assert_error(pack(), 2, f"{OUT}: holds an unfinished upload of another result")
    succeeds("--overwrite")  # what was packed is uploaded
    assert there() == local()
    assert_error(pack("--staging", "s", source="b.jsonl"), 2, "holds a finished result")
    succeeds("--staging", "s", "--overwrite", source="b.jsonl")
    assert there() == local("b.jsonl")
    assert not Path("s").exists()


def test_a_staged_shard_that_was_damaged_is_not_published() -> None:
    fail_at(1, OSError("no"))
    assert pack("--staging", "s").exit_code == 1
    undisturbed()
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
