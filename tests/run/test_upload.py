"""Results at a URL: the bytes of a local one, and what is refused before anything is uploaded."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import fsspec
import pytest
from shop import MARKER, OPTIONS, OUT, Shop, fail_at, local, pack, succeeds, there
from support import assert_error, contents, jsonl, packer

from packer_cli.run import upload
from packer_cli.run.upload import default_staging

pytestmark = pytest.mark.usefixtures("stores")


def test_the_same_bytes_as_a_local_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_THREADS", 1)
    for url in (OUT, "memory://bucket/out/", f"file://{Path.cwd()}/deep/out"):
        succeeds(out=url)
        assert there(url) == local()
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
    result = packer("stats", OUT, "--json", "--min-utilization", "0.5")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == expected | {"directory": OUT}
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
        (["-o", "out", "--staging", "s"], "--staging needs an --output that is a URL"),
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
    assert_error(pack(), 2, f"{OUT}: holds a finished result that differs: a.jsonl is new")
    assert there() == before
    Shop.log.clear()
    again = packer("pack", "b.jsonl", *OPTIONS, "-o", OUT)
    assert (again.exit_code, f"{OUT}: up to date" in again.stderr) == (0, True)
    assert there() == before
    assert Shop.log == []
    content = Path("b.jsonl").read_bytes()
    Path("b.jsonl").write_bytes(content[:-4] + b"~" + content[-3:])  # no size or time tells
    assert pack(source="b.jsonl").exit_code == 2
    Path("b.jsonl").write_bytes(content)
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


def test_a_staged_run_of_other_options_or_for_another_url_is_refused() -> None:
    fail_at(1, OSError("no"))
    assert pack("--staging", "s").exit_code == 1
    Shop.disturb = lambda what, name: None
    result = pack("--staging", "s", "--seed", 7)
    assert_error(result, 2, "holds an unfinished run that differs: --seed was 0, is now 7")
    result = pack("--staging", "s", out="shop://bucket/other")
    assert_error(result, 2, "--staging: s: holds files for an upload to another URL")
    with open("a.jsonl", "ab") as file:
        file.write(jsonl("more"))
    assert_error(pack("--staging", "s"), 2, "a.jsonl has changed")
    succeeds("--staging", "s", "--overwrite")
    assert there() == local()


def test_a_store_that_cannot_be_written_to_is_found_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: object) -> None:
        raise AssertionError("packs")

    monkeypatch.setattr("packer_cli.run.pipeline._Packing._pack_rest", fail)
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
    assert f"not uploaded, but kept in {default_staging(OUT)}" in result.stderr
    assert there() == {}
    succeeds("--overlong", "truncate", "--max-loss", "0.9")
    assert "manifest.json" in there()


def test_a_staging_directory_of_somebody_else_is_not_used(folder: Path) -> None:
    (folder / "theirs").mkdir()
    default_staging(OUT).symlink_to(folder / "theirs")
    assert_error(pack(), 2, "is not a directory of yours")
    default_staging(OUT).unlink()
    fail_at(1, OSError("no"))
    assert pack().exit_code == 1
    assert default_staging(OUT).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("name", "message"),
    [("notes", "--staging: s: is neither empty"), (".packer/notes", "s/.packer: is not packer's")],
)
def test_a_staging_directory_with_files_of_others(name: str, message: str) -> None:
    Path("s/.packer").mkdir(parents=True)
    Path("s", name).write_bytes(b"mine")
    result = pack("--staging", "s", "--overwrite")
    assert_error(result, 2, message)
    assert "choose another --staging" in result.stderr
    assert contents("s") == {name: b"mine"}


def test_a_damaged_shard_of_the_same_size_is_uploaded_again() -> None:
    succeeds()
    (shard,) = (name for name in Shop.objects if "shard-00001" in name)
    Shop.objects[shard] = Shop.objects[shard][:-1] + b"?"
    succeeds("--overwrite")
    assert there() == local()
