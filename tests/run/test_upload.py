"""Results at a URL: the bytes of a local one, whole or not complete, whenever an upload ends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support import assert_error, contents, jsonl, packer

from packer_cli import open_packed

TEXTS = [f"text {i} " + "ab" * (i % 50) for i in range(400)]
OPTIONS = ("-l", 64, "-t", "bytes", "--unit-bytes", 9000, "--workers", 1, "-q")
OUT, MARKER = "memory://bucket/deep/out", ".packer/uploading.json"
STORE = fsspec.filesystem("memory")
Disturb = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store, inputs in the current directory, and a temporary directory of our own."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    (folder / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    Path("a.jsonl").write_bytes(jsonl(*TEXTS))
    Path("b.jsonl").write_bytes(jsonl(*[text.replace("text", "TEXT") for text in TEXTS]))


def pack(*more: object, source: str = "a.jsonl", out: str = OUT) -> Any:
    return packer("pack", source, *OPTIONS, "-o", out, *more)


def succeeds(*more: object, **how: str) -> None:
    result = pack(*more, **how)
    assert result.exit_code == 0, result.stderr
    assert os.listdir("tmp") == []


def local(source: str = "a.jsonl") -> dict[str, bytes]:
    """What the same command writes to a local directory, but for times of inputs."""
    out = f"local-{source}"
    if not Path(out).exists():
        assert pack(source=source, out=out).exit_code == 0
    return contents(out)


def there(url: str = OUT) -> dict[str, bytes]:
    """All objects below a URL."""
    root = STORE._strip_protocol(url)
    return {name[len(root) + 1 :]: STORE.cat_file(name) for name in STORE.find(root)}


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Disturb], None]:
    """Have a function called before each change of an object, with what is done and its name."""

    def disturb(call: Disturb) -> None:
        for what, method in (("write", "put_file"), ("write", "pipe_file"), ("remove", "rm_file")):
            own = getattr(MemoryFileSystem, method)

            def changed(
                self: Any, path: str, *more: Any, what: str = what, own: Any = own, **how: Any
            ) -> Any:
                name = more[0] if own.__name__ == "put_file" else path
                call(what, name.removeprefix("/bucket/deep/out/"))
                return own(self, path, *more, **how)

            monkeypatch.setattr(MemoryFileSystem, method, changed)

    return disturb


def test_the_same_bytes_as_a_local_result(disturbed: Callable[[Disturb], None]) -> None:
    """Marked at first, and the manifest last."""
    log = list[tuple[str, str]]()
    disturbed(lambda what, name: log.append((what, name)))
    for url in (OUT, f"{OUT}/other/", f"file://{Path.cwd()}/deep/out"):
        succeeds(out=url)
    assert there(f"{OUT}/other") == contents("deep/out") == local()
    names = [name for what, name in log if what == "write"]
    shards = [name for name in names if name.endswith(".arrow") and "/" not in name]
    assert len(shards) > 2
    assert names[:2] == [MARKER, MARKER]
    assert names[2 : 2 + len(shards)] == shards
    assert log[len(local()) + 1 : len(local()) + 3] == [
        ("write", "manifest.json"), ("remove", MARKER),
    ]  # fmt: skip


def test_documents_and_rows_of_a_url() -> None:
    """Stats reads them there; all else wants a copy."""
    succeeds()
    local()
    expected = json.loads(packer("stats", "local-a.jsonl", "--json").stdout)
    result = packer("stats", OUT, "--json", "--min-utilization", "0.5")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == expected | {"directory": OUT}
    for command in (("verify", OUT), ("show", OUT), ("stats", OUT, "--deep"),
                    ("export", OUT, "--to", "trl", "-o", "x")):  # fmt: skip
        result = packer(*command)
        assert_error(result, 2, f"{OUT}: a URL, ")
        assert "copy it to a local path" in result.stderr
    assert_error(packer("stats", OUT + "/no"), 2, f"{OUT}/no: no such directory")
    assert_error(packer("stats", "memory://bucket/deep"), 1, "has no manifest.json: not packed")
    for out in ("memory://tokens/one", "here"):
        assert packer("tokenize", "a.jsonl", "-t", "bytes", "-o", out).exit_code == 0
    assert there("memory://tokens/one") == contents("here")
    done = packer("pack", "memory://tokens/one", "-l", 64, "-q", "-o", "out")
    assert_error(done, 2, "memory://tokens/one/: a URL, documents are only read from local")


# whether there is a result of b.jsonl, other objects, options, and the error
REFUSED: dict[str, tuple[bool, dict[str, bytes], str, str]] = {
    "to add": (False, {}, "--add", f"--add: {OUT}: a URL"),
    "ranks": (False, {}, "--rank 0 --world-size 2", f"--rank: {OUT}: a URL"),
    "no folder": (False, {}, "-o memory://", "--output: memory://: names no folder"),
    "no protocol": (False, {}, "-o nowhere://a/b", "nowhere://a/b: unknown protocol"),
    "what is only read": (False, {}, "-o https://host/out", "https://host/out: "),
    "an object": (False, {"": b"mine"}, "--overwrite", "not a folder"),
    "objects of others": (False, {"notes": b"mine"}, "--overwrite", "not a result of packer"),
    "another manifest": (False, {"manifest.json": b"mine"}, "", "not a result of packer"),
    "another journal": (False, {MARKER: b"mine"}, "--overwrite", "is not packer's"),
    "another result": (True, {}, "", "holds a finished result that differs: a.jsonl is new"),
    "what is in the way": (
        True, {"rejected.jsonl": b"mine"}, "--overwrite --on-error skip", "rejected.jsonl",
    ),
    "an input in the output": (
        False, {"a.jsonl": jsonl("a")}, f"{OUT}/a.jsonl", "lies inside the output",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_anything_is_packed(name: str) -> None:
    has_result, objects, options, message = REFUSED[name]
    if has_result:
        succeeds(source="b.jsonl")
    for path, content in objects.items():
        STORE.pipe_file(f"{OUT}/{path}".rstrip("/"), content)
    before = there("memory://bucket")
    assert_error(pack(*options.split()), 2, message)
    assert there("memory://bucket") == before


def test_a_shard_that_has_another_size_by_now_is_refused() -> None:
    succeeds(source="b.jsonl")
    (shard,) = (name for name in there() if name.startswith("shard-00001"))
    STORE.pipe_file(f"{OUT}/{shard}", b"mine")
    before = there()
    assert_error(pack("--overwrite", source="b.jsonl"), 2, OUT, shard)
    assert there() == before


def test_inputs_inside_the_output_are_refused() -> None:
    Path("out").mkdir()
    Path("out/a.jsonl").write_bytes(jsonl("a"))
    url = f"file://{Path.cwd()}/out"
    for inside, out in (("out", url), (url, "out"), (url, url)):
        result = pack("--overwrite", source=f"{inside}/a.jsonl", out=out)
        assert_error(result, 2, "lies inside the output")


def test_a_finished_result_is_replaced_only_when_asked(
    disturbed: Callable[[Disturb], None],
) -> None:
    succeeds(source="b.jsonl")
    mine = {"notes.txt": b"mine", "shard-99999-000.arrow": b"stale"}
    for name, content in mine.items():
        STORE.pipe_file(f"{OUT}/{name}", content)
    before, log = there(), list[tuple[str, str]]()
    again = packer("pack", "b.jsonl", *OPTIONS[:-1], "-o", OUT)
    assert (again.exit_code, f"{OUT}: up to date" in again.stderr) == (0, True)
    assert there() == before
    disturbed(lambda what, name: log.append((what, name)))
    succeeds("--overwrite")
    assert there() == local() | mine
    at = log.index(("write", "manifest.json"))
    assert {what for what, _ in log[:at]} == {"write"}
    assert {what for what, _ in log[at + 1 :]} == {"remove"}


def test_another_upload_at_the_same_time(disturbed: Callable[[Disturb], None]) -> None:
    """Nothing of it is removed, and it is not replaced unseen."""
    succeeds(source="b.jsonl")
    shard = re.sub("[0-9]", "7", next(name for name in there() if name.endswith(".arrow")))
    journal = {"new": {shard: 1}, "old": {}, "sha256": ""}
    STORE.pipe_file(f"{OUT}/{MARKER}", json.dumps(journal).encode())
    STORE.pipe_file(f"{OUT}/{shard}", b"being uploaded")
    before = there()
    again = packer("pack", "b.jsonl", *OPTIONS[:-1], "-o", OUT)
    assert (again.exit_code, "another upload into it" in again.stderr) == (0, True)
    assert there() == before
    other = b""

    def replace(what: str, name: str) -> None:
        nonlocal other
        if name.endswith(".arrow") and not other:
            other = there()["manifest.json"].replace(b"{", b"{ ", 1)
            STORE.pipe_file(f"{OUT}/manifest.json", other)

    disturbed(replace)
    assert_error(pack("--overwrite"), 1, f"{OUT}: another run has put its result there meanwhile")


def test_a_store_that_cannot_be_written_to_is_found_before_the_work(
    disturbed: Callable[[Disturb], None],
) -> None:
    Path("a.jsonl").write_bytes(jsonl("one") + b"{not even read\n")
    assert_error(pack(), 1, "a.jsonl")  # a run that fails leaves nothing
    assert there("memory://bucket") == {}
    error: Exception = NotImplementedError()

    def refuse(what: str, name: str) -> None:
        raise error

    disturbed(refuse)
    assert_error(pack(), 2, "cannot write at memory://")
    error = PermissionError(13, "Forbidden")
    assert_error(pack(), 1, "cannot write: Forbidden")
    error = FileNotFoundError("bucket")
    assert_error(pack(), 1, "cannot write: no such bucket or folder")


def test_a_result_that_is_marked_incomplete_is_not_uploaded() -> None:
    result = pack("--overlong", "truncate", "--max-loss", "0.001")
    assert_error(result, 1, f"{OUT}: 0.")
    assert "nothing is uploaded" in result.stderr
    assert there() == {}
    succeeds("--overlong", "truncate", "--max-loss", "0.9")


def rows_of(place: str) -> Any:
    packed = open_packed(place, cache="cache")
    return packed.take(np.arange(len(packed)))


@pytest.mark.parametrize("earlier", [False, True], ids=["new", "overwrite"])
def test_an_upload_that_ends_at_any_step_is_done_again(
    earlier: bool, disturbed: Callable[[Disturb], None]
) -> None:
    """Meanwhile the rows of a result are there, and nothing of others is touched."""
    how = ["--overwrite"] if earlier else []
    stop = steps = 0

    def end(what: str, name: str) -> None:
        nonlocal steps
        steps += 1
        if steps == stop:
            raise OSError("no")

    disturbed(end)
    results = []
    for source in ("a.jsonl", "b.jsonl"):
        succeeds(source=source, out=f"rows-{source}")
        results.append(rows_of(f"rows-{source}"))
    for step in count(1):
        stop = 0
        MemoryFileSystem.store.clear()
        if earlier:
            succeeds(source="b.jsonl")
            STORE.pipe_file(f"{OUT}/notes.txt", b"mine")
        stop, steps = step, 0
        result = pack(*how)
        if steps < stop:
            break
        assert result.exit_code == 1 or "manifest.json" in there()
        if earlier or "manifest.json" in there():
            assert rows_of(OUT) in results
        elif MARKER in there():
            message = "has no manifest.json: the run that writes it has not"
            assert_error(packer("stats", OUT), 1, message)
        stop = 0
        succeeds(*how)
        assert there() == local() | ({"notes.txt": b"mine"} if earlier else {})
    assert step > 12


def test_both_sides_of_a_split(disturbed: Callable[[Disturb], None]) -> None:
    """The first side's manifest comes last."""
    Path("mix.toml").write_text(
        'max_length = 64\ntokenizer = "bytes"\ntokenized = "tokens"\nvalidation = {share = "20%"}\n'
        '[[source]]\nname = "a"\ninputs = ["a.jsonl"]\n'
    )
    log = list[str]()
    disturbed(lambda what, name: log.append(name))
    for out in (OUT, "out"):
        result = packer("pack", "mix.toml", "-q", "-o", out)
        assert result.exit_code == 0, result.stderr
    made = contents("out")
    del made["dataset_dict.json"]
    assert there() == made
    places = [name for name in log if name.endswith("manifest.json")]
    assert places == ["validation/manifest.json", "train/manifest.json"]
