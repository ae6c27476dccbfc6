"""`packer pack --add` and `--prune`: what becomes of inputs that an update does not name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from altered import altered, unaltered
from support import (
    assert_error,
    check_directory,
    contents,
    jsonl,
    packer,
    recover_texts,
)

OPTIONS = ["-l", 64, "-t", "bytes", "-q", "-o", "out"]
NIGHTS = [[f"night {night}, {i} " + "x" * (i * 7 % 90) for i in range(60)] for night in range(4)]


@pytest.fixture
def nights(folder: Path) -> list[str]:
    """The files that four nights bring; the first two are packed."""
    (folder / "new").mkdir()
    names = [f"new/2024-01-0{night + 1}.jsonl" for night in range(len(NIGHTS))]
    for name, texts in zip(names, NIGHTS, strict=True):
        Path(name).write_bytes(jsonl(*texts))
    assert packer("pack", *names[:2], *OPTIONS).exit_code == 0
    return names


def add(*arguments: object) -> str:
    """What it says on stderr; the result is sound."""
    options = [option for option in OPTIONS if option != "-q"]
    done = packer("pack", *arguments, *options, "--add")
    assert done.exit_code == 0, done.stderr
    check_directory("out")
    verified = packer("verify", "out", "-q")
    assert verified.exit_code == 0, verified.stdout
    return done.stderr


def refused(*arguments: object, message: str, tip: str) -> None:
    """One error, and nothing of the result is touched."""
    before = contents("out")
    done = packer("pack", *arguments, *OPTIONS)
    assert_error(done, 2, message)
    assert tip in done.stderr.splitlines()[1]
    assert contents("out") == before


def packed() -> list[str]:
    return sorted(recover_texts("out"))


def of_nights(*numbers: int) -> list[str]:
    return sorted(text for number in numbers for text in NIGHTS[number])


def test_an_update_that_names_one_new_file_drops_nothing(nights: list[str]) -> None:
    message = (
        "out: the update would drop 120 documents of 2 inputs: new/2024-01-01.jsonl (not named), "
    )
    refused(nights[2], "--update", message=message, tip="--add")
    refused(nights[2], "--update", message="2024-01-02.jsonl (not named)", tip="--prune")
    assert packed() == of_nights(0, 1)


def test_an_input_whose_file_is_gone_is_said_to_be_gone(nights: list[str]) -> None:
    Path(nights[0]).unlink()
    refused("new", "--update", message=f"{nights[0]} (no longer exists)", tip="--prune")


def test_only_the_first_of_many_inputs_are_named(folder: Path) -> None:
    names = [f"{i:02}.jsonl" for i in range(12)]
    for i, name in enumerate(names):
        Path(name).write_bytes(jsonl(f"{i}"))
    assert packer("pack", *names, *OPTIONS).exit_code == 0
    message = (
        "drop 11 documents of 11 inputs: 00.jsonl (not named), 01.jsonl (not named), "
        "02.jsonl (not named) and 8 more"
    )
    refused(names[-1], "--update", message=message, tip="--add")


def test_prune_drops_what_is_not_named(nights: list[str]) -> None:
    assert packer("pack", *nights[1:3], *OPTIONS, "--update", "--prune").exit_code == 0
    check_directory("out")
    assert packed() == of_nights(1, 2)


def test_the_command_of_every_night(folder: Path) -> None:
    """The first night, too; their files may go as soon as they are packed."""
    for night, texts in enumerate(NIGHTS):
        Path("new.jsonl").write_bytes(b"")
        name = f"{night}.jsonl"
        Path(name).write_bytes(jsonl(*texts))
        add(name)
        assert packed() == of_nights(*range(night + 1))
        before = contents("out")
        assert "out: up to date" in add(name)
        assert contents("out") == before
        Path(name).unlink()
    paths = [one["path"] for one in json.loads(Path("out/manifest.json").read_bytes())["inputs"]]
    assert paths == ["0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"]


def test_what_is_kept_is_not_read(nights: list[str]) -> None:
    shards = {path: data for path, data in contents("out").items() if path.endswith(".arrow")}
    Path(nights[0]).write_text("nonsense")
    Path(nights[1]).unlink()
    stderr = add(nights[2])
    assert (
        f"out: keeps 120 documents of 2 inputs: {nights[0]} (not named), {nights[1]} (no" in stderr
    )
    assert packed() == of_nights(0, 1, 2)
    assert contents("out").items() >= shards.items()


def test_what_was_kept_and_is_named_again(nights: list[str]) -> None:
    add(nights[2])
    assert "out: up to date" in add(nights[2], "--checksum")
    Path(nights[2]).write_bytes(jsonl(*NIGHTS[3]))
    add(nights[3])  # the third is kept as it was
    assert packed() == of_nights(0, 1, 2, 3)
    add(nights[2])
    assert packed() == sorted(of_nights(0, 1, 3) + NIGHTS[3])


def test_a_directory_adds_what_is_in_it(nights: list[str]) -> None:
    Path(nights[0]).unlink()
    os.rename(nights[3], "later.jsonl")
    Path("out").rename("before")
    add(*nights[1:3])
    add("later.jsonl")
    Path("new/more.jsonl").write_bytes(jsonl("more"))
    add("new")
    assert packed() == sorted([*of_nights(1, 2, 3), "more"])


# A program that is packer, but is killed when all is packed and recorded.
KILLED = """
import os
from packer_cli.cli import app as cli
from packer_cli.run import pipeline
def killed(*arguments):
    os.kill(os.getpid(), 9)
pipeline.finalize = killed
cli.main()
"""


def killed(*command: str) -> None:
    assert altered(KILLED, *command).returncode == -9


def test_an_interrupted_addition_goes_on(nights: list[str]) -> None:
    Path(nights[0]).unlink()
    command = ["pack", nights[2], *map(str, OPTIONS), "--add"]
    killed(*command)
    assert packed() == of_nights(0, 1)
    # nobody would see that the third night was never added
    message = f"out: holds an unfinished run with other inputs: {nights[2]}"
    refused(nights[3], "--add", message=message, tip="remove out/.packer")
    refused(*nights[1:2], "--add", message=message, tip="first run its command again")
    again = unaltered(*(option for option in command if option != "-q"))
    assert again.returncode == 0, again.stderr
    assert "out: continuing: " in again.stderr
    assert packed() == of_nights(0, 1, 2)
    check_directory("out")


def test_an_interrupted_first_night_is_not_forgotten(folder: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_bytes(jsonl(name))
    killed("pack", "a.jsonl", *map(str, OPTIONS), "--add")
    message = "out: holds an unfinished run with other inputs: a.jsonl"
    refused("b.jsonl", "--add", message=message, tip="first run its command again")
    add("a.jsonl")
    add("b.jsonl")
    assert packed() == ["a.jsonl", "b.jsonl"]


def unit_of_small_inputs() -> list[str]:
    """Inputs that share one unit, packed."""
    names = [f"{i}.jsonl" for i in range(4)]
    for i, name in enumerate(names):
        Path(name).write_bytes(jsonl(f"text {i}"))
    assert packer("pack", *names, *OPTIONS).exit_code == 0
    assert len(json.loads(Path("out/manifest.json").read_bytes())["units"]) == 1
    return names


def test_kept_inputs_of_a_unit_that_is_packed_anew(folder: Path) -> None:
    names = unit_of_small_inputs()
    Path(names[1]).write_bytes(jsonl("changed"))
    add(names[1])
    assert packed() == ["changed", "text 0", "text 2", "text 3"]


@pytest.mark.parametrize("checksum", [[], ["--checksum"]])
@pytest.mark.parametrize("shard_lost", [False, True])
def test_kept_inputs_that_cannot_be_packed_anew_are_named(
    folder: Path, checksum: list[str], shard_lost: bool
) -> None:
    names = unit_of_small_inputs()
    if shard_lost:
        next(Path("out").glob("shard-*")).unlink()
    else:
        Path(names[1]).write_bytes(jsonl("changed"))
    Path(names[2]).unlink()
    arguments = [names[1], "--add", *checksum]
    message = f"{names[2]}: is not named, no longer exists, and would have to be packed again"
    refused(*arguments, message=message, tip="restore the file")
    Path(names[2]).write_bytes(jsonl("quite another"))
    message = f"{names[2]}: is not named, has changed, and would have to be packed again"
    refused(*arguments, message=message, tip="to pack it as it is now, name it")
    add(names[1], names[2], *checksum)
    changed = "text 1" if shard_lost else "changed"
    assert packed() == sorted([changed, "quite another", "text 0", "text 3"])


def test_one_file_by_two_names_is_refused_once_it_has_changed(nights: list[str]) -> None:
    Path("link.jsonl").symlink_to(nights[0])
    Path(nights[0]).write_bytes(jsonl("changed"))
    message = f"link.jsonl: is {nights[0]} in the result, by another name"
    for how in ("--add", "--update"):
        refused("link.jsonl", how, message=message, tip="use the name")


def test_content_that_the_result_holds_is_not_added_again(nights: list[str]) -> None:
    """By another name, from another directory, be the file a copy, a link or named as well."""
    before = contents("out")
    Path("copy.jsonl").write_bytes(Path(nights[0]).read_bytes())
    Path("link.jsonl").symlink_to(Path(nights[0]).resolve())
    for name in ("copy.jsonl", "link.jsonl", f"./{nights[0]}", Path(nights[0]).resolve()):
        for more in ([], [nights[0]] if name == "copy.jsonl" else [nights[1]]):
            stderr = add(*more, name)
            assert f"out: has these inputs already: {name} (as {nights[0]})" in stderr
            assert "out: up to date" in stderr
            assert contents("out") == before
    add(nights[2], "copy.jsonl")
    assert packed() == of_nights(0, 1, 2)
    Path(nights[0]).write_bytes(jsonl("changed"))
    add(nights[0], "copy.jsonl")  # whose content the result would not hold any more
    assert packed() == sorted(["changed", *of_nights(0, 1, 2)])


def test_content_that_is_named_twice_is_warned_of(nights: list[str]) -> None:
    Path("copy.jsonl").write_bytes(Path(nights[0]).read_bytes())
    for command in (["pack", nights[0], "copy.jsonl", *OPTIONS, "--overwrite"],
                    ["pack", nights[0], "copy.jsonl", *OPTIONS]):  # fmt: skip
        done = packer(*command)
        assert done.exit_code == 0
        assert done.stderr == (
            "packer: warning: out: 60 documents are there more than once: copy.jsonl has the "
            f"content of {nights[0]}; name one of such files\n"
        )


def test_stdin_does_not_replace_what_came_by_stdin(folder: Path) -> None:
    first = unaltered("pack", "-", *OPTIONS, "--add", stdin=jsonl("one", "two"))
    assert first.returncode == 0, first.stderr
    for how in ("--add", "--update"):
        again = unaltered("pack", "-", *OPTIONS, how, stdin=jsonl("three"))
        assert again.returncode == 2
        assert "-: stdin would replace the documents that came from stdin before" in again.stderr
    Path("a.jsonl").write_bytes(jsonl("three"))
    add("a.jsonl")
    assert packed() == ["one", "three", "two"]
    last = unaltered("pack", "-", *OPTIONS, "--update", "--prune", stdin=jsonl("four"))
    assert last.returncode == 0, last.stderr
    assert packed() == ["four"]


def test_parquet_that_is_kept_needs_no_file(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": NIGHTS[0]})
    pq.write_table(table, "a.parquet", row_group_size=10)
    options = [*OPTIONS, "--unit-bytes", 500]
    assert packer("pack", "a.parquet", *options).exit_code == 0
    assert len(json.loads(Path("out/manifest.json").read_bytes())["units"]) > 1
    Path("a.parquet").unlink()
    Path("b.jsonl").write_bytes(jsonl(*NIGHTS[1]))
    add("b.jsonl", "--unit-bytes", 500)
    assert packed() == of_nights(0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--add", "--prune"], "--add and --prune: "),
        (["--add", "--overwrite"], "--add and --overwrite: "),
        (["--prune"], "--prune: is for --update"),
        (["--add", "--rank", "0", "--world-size", "2"], "--rank: does not go with"),
        (["--add", "-o", "memory://out"], "--add: memory://out: a URL"),
    ],
)
def test_options_that_cannot_be_had_together(
    nights: list[str], options: list[str], message: str
) -> None:
    assert_error(packer("pack", nights[2], *OPTIONS, *options), 2, message)


def test_kept_inputs_without_known_times(nights: list[str]) -> None:
    """They count as changed from then on, unless contents are compared."""
    Path("out/input_times.json").write_text("{}")
    add(nights[2], "--checksum")
    assert packed() == of_nights(0, 1, 2)
    message = f"{nights[1]}: is not named, has changed, and would have to be packed again"
    refused(nights[0], "--add", message=message, tip="--checksum")
    assert "up to date" in add(nights[0], "--checksum")
    add(*nights[:2])
    assert packed() == of_nights(0, 1, 2)
