"""`packer pack --update`, by the command line: what is new is packed, what stands is kept."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from altered import altered
from forging import Result
from support import (
    assert_error,
    check_directory,
    contents,
    jsonl,
    packer,
    recover_texts,
    shard_of,
)

from packer_cli.inputs.jsonl import JsonlReader
from packer_cli.records import InputFile
from packer_cli.result.layout import INPUT_TIMES, SQUARED_LENGTHS

OPTIONS = ["-l", 64, "-t", "bytes", "-q", "--unit-bytes", "5k"]


def texts(seed: int, count: int = 100) -> list[str]:
    random_ = random.Random(seed)
    return [f"{seed} " + "x" * random_.randrange(200) for _ in range(count)]


@pytest.fixture
def result(folder: Path) -> Path:
    """Of a.jsonl and b.jsonl, several units each."""
    for seed, name in enumerate(("a.jsonl", "b.jsonl")):
        Path(name).write_bytes(jsonl(*texts(seed)))
    assert packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", "out").exit_code == 0
    return folder / "out"


def update(*arguments: object) -> str:
    """What it says on stderr; the result is sound, and as `packer verify` wants it."""
    quiet = [argument for argument in OPTIONS if argument != "-q"]
    done = packer("pack", *arguments, *quiet, "--update", "-o", "out")
    assert done.exit_code == 0, done.stderr
    check_directory("out")
    verified = packer("verify", "out", "-q", "--against-inputs", "--sample", "all")
    assert verified.exit_code == 0, verified.stdout
    return done.stderr


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    statuses = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in statuses.items()}


def shards_of(folder: Path, path: str) -> set[str]:
    """The shards of the units that read an input."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    index = [source["path"] for source in manifest["inputs"]].index(path)
    units = {u["unit"] for u in manifest["units"] if index in {part[0] for part in u["slices"]}}
    return {shard["file"] for shard in manifest["shards"] if shard["unit"] in units}


def test_nothing_new_changes_nothing(result: Path) -> None:
    before = inodes(result)
    assert "out: up to date" in update("a.jsonl", "b.jsonl")
    assert inodes(result) == before


@pytest.mark.parametrize("renamed", [False, True])
def test_only_what_is_new_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    """The earlier result says what the records of the other inputs are."""
    name, field = ("body", ["--text-field", "body"]) if renamed else ("text", [])
    for seed, path in enumerate(("a.jsonl", "b.jsonl", "c.jsonl")):
        lines = [json.dumps({name: text}) + "\n" for text in texts(seed)]
        Path(path).write_text("".join(lines))
    assert packer("pack", "a.jsonl", "b.jsonl", *field, *OPTIONS, "-o", "out").exit_code == 0
    times = json.loads(Path("out", INPUT_TIMES).read_bytes())
    Path("out", INPUT_TIMES).write_text(json.dumps(times | {"racy": []}))  # they are old by now
    read, fields = list[str](), JsonlReader.fields

    def noted(reader: JsonlReader, file: InputFile, config: Any) -> list[str] | None:
        read.append(file.path)
        return fields(reader, file, config)

    monkeypatch.setattr(JsonlReader, "fields", noted)
    files = ("a.jsonl", "b.jsonl", "c.jsonl")
    assert packer("pack", *files, *field, *OPTIONS, "--update", "-o", "out").exit_code == 0
    assert read == ["c.jsonl"]
    assert "up to date" in update(*files, *field)
    assert sorted(recover_texts("out")) == sorted(text for seed in range(3) for text in texts(seed))


def test_a_new_input_of_another_shape_beside_those_that_are_not_read(result: Path) -> None:
    answers = [{"prompt": f"What is {n}?", "completion": f" A number, {n}."} for n in range(9)]
    Path("c.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    update("a.jsonl", "b.jsonl", "c.jsonl")
    manifest = json.loads((result / "manifest.json").read_bytes())
    assert [one.get("shape") for one in manifest["inputs"]] == ["text", "text", "prompt-completion"]
    assert "up to date" in update("a.jsonl", "b.jsonl", "c.jsonl")


def test_a_new_input_is_packed_beside_the_others(result: Path) -> None:
    before = {name: how for name, how in inodes(result).items() if name.startswith("shard")}
    Path("c.jsonl").write_bytes(jsonl(*texts(2)))
    update("a.jsonl", "b.jsonl", "c.jsonl")
    assert inodes(result).items() >= before.items()
    names = ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert packer("pack", *names, *OPTIONS, "-o", "fresh").exit_code == 0
    assert contents("fresh") == contents("out")


def test_an_input_between_the_others_gets_a_number_of_its_own(result: Path) -> None:
    Path("aa.jsonl").write_bytes(jsonl(*texts(2)))
    update("a.jsonl", "aa.jsonl", "b.jsonl")
    assert sorted(recover_texts("out")) == sorted(texts(0) + texts(1) + texts(2))


def test_a_changed_input_is_packed_again(result: Path) -> None:
    kept = {name: inodes(result)[name] for name in shards_of(result, "b.jsonl")}
    kept = {n: how for n, how in kept.items() if n not in shards_of(result, "a.jsonl")}
    assert kept
    Path("a.jsonl").write_bytes(jsonl(*texts(3)))
    update("a.jsonl", "b.jsonl")
    assert inodes(result).items() >= kept.items()
    assert sorted(recover_texts("out")) == sorted(texts(1) + texts(3))


def test_inputs_that_go_and_come_back(result: Path) -> None:
    messages = update("b.jsonl", "--prune")
    assert "out: drops 100 documents of 1 input: a.jsonl (not named)\n" in messages
    assert sorted(recover_texts("out")) == sorted(texts(1))
    assert "a.jsonl" not in packer("stats", "out", "--by", "input").stdout
    assert "out: up to date" in update("b.jsonl")
    update("b.jsonl", "a.jsonl")
    assert sorted(recover_texts("out")) == sorted(texts(0) + texts(1))


def test_a_number_that_is_free_is_given_again(result: Path) -> None:
    Path("c.jsonl").write_bytes(jsonl(*texts(2)))
    update("b.jsonl", "--prune")
    update("b.jsonl", "c.jsonl")
    assert sorted(recover_texts("out")) == sorted(texts(1) + texts(2))
    manifest = json.loads((result / "manifest.json").read_bytes())
    assert [source["path"] for source in manifest["inputs"]] == ["c.jsonl", "b.jsonl"]


def test_small_inputs_that_share_a_unit(folder: Path) -> None:
    names = [f"{i:02d}.jsonl" for i in range(20)]
    for seed, name in enumerate(names):
        Path(name).write_bytes(jsonl(*texts(seed, 5)))
    assert packer("pack", *names, *OPTIONS, "-o", "out").exit_code == 0
    Path(names[7]).write_bytes(jsonl("new"))
    Path(names[11]).unlink()
    before = inodes(folder / "out")
    names.pop(11)
    update(*names, "--prune")
    expected = [t for i in range(20) if i not in (7, 11) for t in texts(i, 5)]
    assert sorted(recover_texts("out")) == sorted([*expected, "new"])
    after = inodes(folder / "out")
    assert any(before[n] == after[n] for n in before.keys() & after.keys() if "shard" in n)


def test_rejected_records_of_units_that_stand_are_kept(folder: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        Path(name).write_bytes(jsonl(*texts(1)) + b"{\n" + jsonl(*texts(2)) + b"{broken\n")
    options = [*OPTIONS, "--on-error", "skip"]
    assert packer("pack", "a.jsonl", "b.jsonl", "c.jsonl", *options, "-o", "out").exit_code == 0
    Path("b.jsonl").write_bytes(jsonl(*texts(3)) + b"[]\n")
    arguments = ["pack", "a.jsonl", "b.jsonl", "c.jsonl", *options]
    assert packer(*arguments, "--update", "-o", "out").exit_code == 0
    assert packer(*arguments, "-o", "fresh").exit_code == 0
    lines = [Path(out, "rejected.jsonl").read_text().splitlines() for out in ("out", "fresh")]
    assert sorted(lines[0]) == sorted(lines[1])
    assert len(lines[0]) == 5
    assert packer("verify", "out", "-q").exit_code == 0


def test_what_tells_that_an_input_has_changed(result: Path) -> None:
    status = os.stat("a.jsonl")
    os.utime("a.jsonl", ns=(0, status.st_mtime_ns + 1))
    assert "up to date" in update("a.jsonl", "b.jsonl", "--checksum")
    assert "up to date" not in update("a.jsonl", "b.jsonl")
    content = Path("a.jsonl").read_bytes()
    status = os.stat("a.jsonl")
    Path("a.jsonl").write_bytes(content.replace(b"0 xx", b"0 yy"))
    os.utime("a.jsonl", ns=(0, status.st_mtime_ns))
    assert "up to date" not in update("a.jsonl", "b.jsonl")  # neither size nor time of change
    Path("a.jsonl").chmod(0o600)
    assert "up to date" in update("a.jsonl", "b.jsonl")


def test_another_file_of_equal_size_and_time_in_its_place_is_packed_again(result: Path) -> None:
    status = os.stat("a.jsonl")
    changed = [text.replace("x", "y") for text in texts(0)]
    Path("new.jsonl").write_bytes(jsonl(*changed))
    os.utime("new.jsonl", ns=(0, status.st_mtime_ns))
    os.rename("new.jsonl", "a.jsonl")
    assert os.stat("a.jsonl").st_size == status.st_size
    update("a.jsonl", "b.jsonl")
    assert sorted(recover_texts("out")) == sorted(changed + texts(1))


def test_a_copy_is_what_it_was(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other inodes and times of change of status, perhaps another device: the contents tell."""
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    subprocess.run(["cp", "-a", "a.jsonl", "b.jsonl", "out", copy], check=True)
    monkeypatch.chdir(copy)
    before = inodes(copy / "out")
    assert "out: up to date" in update("a.jsonl", "b.jsonl")
    assert inodes(copy / "out") == before


def test_what_was_written_just_before_is_compared_by_contents(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that ticks rarely: nothing but the contents differ afterwards."""
    stat = os.stat
    still = ("st_mtime_ns", "st_ctime_ns", "st_ino")
    first: dict[str, os.stat_result] = {}

    class Ticking:
        def __init__(self, status: os.stat_result, then: os.stat_result) -> None:
            self._status, self._then = status, then

        def __getattr__(self, name: str) -> Any:
            return getattr(self._then if name in still else self._status, name)

    def ticking(path: Any, *more: Any, **how: Any) -> Any:
        status = stat(path, *more, **how)
        if str(path) != "a.jsonl":
            return status
        return Ticking(status, first.setdefault("a.jsonl", status))

    Path("a.jsonl").write_bytes(jsonl("first"))
    monkeypatch.setattr("packer_cli.storage.os.stat", ticking)
    arguments = ["pack", "a.jsonl", *OPTIONS, "-o", "out"]
    assert packer(*arguments).exit_code == 0
    Path("a.jsonl").write_bytes(jsonl("later"))
    assert packer(*arguments, "--update").exit_code == 0
    assert recover_texts("out") == ["later"]


def test_a_result_of_which_only_times_are_known(result: Path) -> None:
    """As it was written before there were identities."""
    times = [os.stat(name).st_mtime_ns for name in ("a.jsonl", "b.jsonl")]
    Path("out/input_times.json").write_text(json.dumps({"mtime_ns": times}))
    assert "up to date" in update("a.jsonl", "b.jsonl")
    content = Path("a.jsonl").read_bytes()
    Path("a.jsonl").write_bytes(content.replace(b"0 xx", b"0 yy"))
    os.utime("a.jsonl", ns=(0, times[0]))
    assert "up to date" not in update("a.jsonl", "b.jsonl")


def test_other_options_are_refused(result: Path, tmp_path: Path) -> None:
    before = contents("out")
    options = ["-t", "bytes", "--unit-bytes", "5k", "--update", "-o", "out"]
    done = packer("pack", "a.jsonl", "b.jsonl", *options, "-l", 128, "--overlong", "drop")
    assert_error(done, 2, "--max-length was 64, is now 128", "--overlong was split, is now drop")
    assert "--overwrite" in done.stderr
    assert contents("out") == before


def test_a_result_of_another_version_is_refused(
    result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents("out")
    monkeypatch.setattr("packer_cli.__version__", "9.9")
    done = packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "--update", "-o", "out")
    assert_error(done, 2, "out: was packed by packer ", "this is packer 9.9")
    assert "--overwrite" in done.stderr
    assert contents("out") == before
    plain = packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", "out")
    assert_error(plain, 2, "holds a finished result that differs: packer was ", "is now 9.9")
    assert contents("out") == before


@pytest.mark.parametrize("how", [["--update"], ["--update", "--prune"], ["--add"]])
def test_inputs_that_have_moved_keep_their_units(result: Path, how: list[str]) -> None:
    before, texts_before = inodes(result), sorted(recover_texts("out"))
    Path("new").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        Path("new", name).write_bytes(Path(name).read_bytes())  # a copy: at other times
        Path(name).unlink()
    messages = update("new/b.jsonl", "new/a.jsonl", *how)
    said = "out: 2 inputs have moved: b.jsonl is now new/b.jsonl, a.jsonl is now new/a.jsonl\n"
    assert said in messages
    assert sorted(recover_texts("out")) == texts_before
    shards = {name: how for name, how in before.items() if name.startswith("shard")}
    assert inodes(result).items() >= shards.items()
    paths = [one["path"] for one in json.loads((result / "manifest.json").read_bytes())["inputs"]]
    assert paths == ["new/a.jsonl", "new/b.jsonl"]
    before = inodes(result)
    assert "up to date" in update("new", *how)
    assert inodes(result) == before


def test_an_input_that_moves_to_the_name_of_one_that_was_dropped(result: Path) -> None:
    update("b.jsonl", "--prune")
    Path("b.jsonl").rename("a.jsonl")
    update("a.jsonl")
    assert sorted(recover_texts("out")) == sorted(texts(1))


def test_what_was_rejected_of_an_input_that_has_moved(folder: Path) -> None:
    """rejected.jsonl names it as the manifest does."""
    Path("a.jsonl").write_bytes(b"{\n" + jsonl(*texts(1)))
    command = ["--on-error", "skip"]
    assert packer("pack", "a.jsonl", *command, *OPTIONS, "-o", "out").exit_code == 0
    Path("a.jsonl").rename("b.jsonl")
    update("b.jsonl", *command)
    assert '"file":"b.jsonl"' in Path("out/rejected.jsonl").read_text()


def test_equal_bytes_that_are_read_in_another_way_are_other_documents(folder: Path) -> None:
    Path("a.jsonl").write_bytes(jsonl("one"))
    assert packer("pack", "a.jsonl", *OPTIONS, "-o", "out").exit_code == 0
    Path("a.jsonl").rename("a.txt")
    done = packer("pack", "a.txt", *OPTIONS, "--update", "--prune", "-o", "out")
    assert done.exit_code == 0
    assert recover_texts("out") == [jsonl("one").decode().rstrip()]


def test_how_bad_records_are_dealt_with_may_differ_from_night_to_night(folder: Path) -> None:
    for seed, name in enumerate(("a.jsonl", "b.jsonl")):
        Path(name).write_bytes(jsonl(*texts(seed)) + b"{\n" * 3)
    skipping = ["--on-error", "skip"]
    assert packer("pack", "a.jsonl", *skipping, *OPTIONS, "-o", "out").exit_code == 0
    # the limit is for what this run packs
    few = packer("pack", "b.jsonl", *skipping, "--max-errors", 2, *OPTIONS, "--add", "-o", "out")
    assert_error(few, 1, "records are bad", "--max-errors is 2")
    update("b.jsonl", *skipping, "--max-errors", 3, "--add")
    assert len(Path("out/rejected.jsonl").read_bytes().splitlines()) == 6
    Path("c.jsonl").write_bytes(jsonl(*texts(2)))
    update("c.jsonl", "--add")  # with --on-error fail
    result = Path("out/manifest.json")
    assert json.loads(result.read_bytes())["rejected_records"] == 6
    Path("d.jsonl").write_bytes(b"{\n")
    before = result.read_bytes()
    done = packer("pack", "d.jsonl", *OPTIONS, "--add", "-o", "out")
    assert_error(done, 1, "d.jsonl, line 1")
    assert result.read_bytes() == before


def test_options_that_cannot_be_had_together(result: Path) -> None:
    done = packer("pack", "a.jsonl", *OPTIONS, "--update", "--overwrite", "-o", "out")
    assert_error(done, 2, "--update and --overwrite")
    done = packer("pack", "a.jsonl", *OPTIONS, "--checksum", "-o", "out")
    assert_error(done, 2, "--checksum: is for --update")


def test_an_update_of_nothing_packs_everything(result: Path) -> None:
    assert packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "--update", "-o", "new").exit_code == 0
    assert contents("new") == contents("out")


def test_a_lost_shard_is_packed_again(result: Path) -> None:
    shard_of(result, 1).unlink()
    assert "up to date" not in update("a.jsonl", "b.jsonl")
    assert sorted(recover_texts("out")) == sorted(texts(0) + texts(1))


@pytest.mark.parametrize("how", ["--prune", "--add"])
def test_killed_during_an_update(result: Path, how: str) -> None:
    if how == "--prune":
        Path("b.jsonl").unlink()
    Path("c.jsonl").write_bytes(jsonl(*texts(2)))
    subprocess.run(["cp", "-a", "out", "copy"], check=True)
    update("a.jsonl", "c.jsonl", how)
    crash = """
import os
from packer_cli.cli import app as cli
steps, rename = {step}, os.rename
def counted(a, b):
    global steps
    steps -= 1
    if not steps:
        os.kill(os.getpid(), 9)
    rename(a, b)
os.rename = os.replace = counted
cli.main()
"""
    arguments = ["pack", "a.jsonl", "c.jsonl", *map(str, OPTIONS), "--update", how, "-o"]
    for step in (1, 2, 8, 15, 25, 30, 33):
        out = f"out{step}"
        subprocess.run(["cp", "-a", "copy", out], check=True)
        killed = altered(crash.format(step=step), *arguments, out)
        done = packer(*arguments, out)
        assert done.exit_code == 0, (step, done.stderr)
        assert contents(out) == contents("out"), (step, killed.returncode)


def test_a_result_without_squared_lengths_gets_them(result: Path) -> None:
    """An earlier packer has not written them; `check_directory` counts those of kept units, too."""
    earlier = Result("out")
    del earlier.manifest["side_files"][SQUARED_LENGTHS]
    earlier.save()
    Path("out", SQUARED_LENGTHS).unlink()
    kept = shards_of(result, "b.jsonl")
    Path("a.jsonl").write_bytes(jsonl(*texts(2)))
    update("a.jsonl", "b.jsonl")
    assert shards_of(result, "b.jsonl") == kept


def test_squared_lengths_of_a_lost_file_are_counted_again(result: Path) -> None:
    Path("out", SQUARED_LENGTHS).unlink()
    Path("a.jsonl").write_bytes(jsonl(*texts(2)))
    update("a.jsonl", "b.jsonl")


def test_squared_lengths_that_were_changed_are_not_replaced(result: Path) -> None:
    """Like every file that is no longer what packer wrote."""
    path = Path("out", SQUARED_LENGTHS)
    path.write_bytes(path.read_bytes()[:-8])
    Path("a.jsonl").write_bytes(jsonl(*texts(2)))
    before = contents("out")
    done = packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "--update", "-o", "out")
    assert_error(done, 2, "out: holds files that packer did not make, or that have changed")
    assert SQUARED_LENGTHS in done.stderr
    assert contents("out") == before


def test_records_that_are_missing_are_noticed(result: Path) -> None:
    """Their documents would be missing, too, from a result that looks complete."""
    records = Path("out/units.jsonl").read_bytes().splitlines(keepends=True)
    Path("out/units.jsonl").write_bytes(b"".join(records[:-1]))
    Path("c.jsonl").write_bytes(jsonl(*texts(2)))
    before = contents("out")
    done = packer("pack", "a.jsonl", "b.jsonl", "c.jsonl", *OPTIONS, "--update", "-o", "out")
    assert_error(done, 1, "out/units.jsonl: damaged: not what the manifest says")
    assert "--overwrite" in done.stderr
    assert contents("out") == before


@pytest.mark.parametrize(
    "times", ["", "[]", '{"mtime_ns": 5}', '{"mtime_ns": []}', '{"mtime_ns": {}}', "[" * 100_000]
)
def test_damaged_times_are_an_error(result: Path, times: str) -> None:
    Path("out/input_times.json").write_text(times)
    done = packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "--update", "-o", "out")
    assert_error(done, 1, "out/input_times.json: cannot be used: ")
    assert "--checksum" in done.stderr
    assert "up to date" in update("a.jsonl", "b.jsonl", "--checksum")


def test_another_tokenizer_without_files_is_refused(folder: Path) -> None:
    """Without one, padding is id 0; the built-in one pads with an id of its own."""
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text('{"input_ids": [1, 2, 3]}\n' * 50)
    assert packer("pack", "a.jsonl", "-l", 64, "-q", "-o", "out").exit_code == 0
    arguments = ["pack", "a.jsonl", "b.jsonl", "-l", 64, "-q", "--update", "-o", "out"]
    done = packer(*arguments, "-t", "bytes")
    assert_error(done, 2, "the tokenizer was not given, is now bytes")
    assert packer(*arguments).exit_code == 0
    assert packer("verify", "out", "-q").exit_code == 0


def test_inputs_that_hang_together_by_their_units(folder: Path) -> None:
    """Every unit reads the end of one input and the beginning of the next: all go, or none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [f"{i}.parquet" for i in range(6)]
    for seed, name in enumerate(names):
        pq.write_table(
            pa.table({"text": texts(seed, 30)}), name, row_group_size=10, compression="none"
        )
    options = ["-l", 64, "-t", "bytes", "--unit-bytes", 2500]
    assert packer("pack", *names, *options, "-o", "out").exit_code == 0
    units = json.loads(Path("out/manifest.json").read_bytes())["units"]
    assert sum(len({part[0] for part in unit["slices"]}) > 1 for unit in units) > 2
    pq.write_table(
        pa.table({"text": texts(9, 30)}), names[-1], row_group_size=10, compression="none"
    )
    assert packer("pack", *names, *options, "--update", "-o", "out").exit_code == 0
    expected = [t for seed in (0, 1, 2, 3, 4, 9) for t in texts(seed, 30)]
    assert sorted(recover_texts("out")) == sorted(expected)
    assert packer("verify", "out", "-q").exit_code == 0
