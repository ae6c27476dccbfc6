"""From what the user names to files and work units."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import unaltered
from hypothesis import given
from hypothesis import strategies as st
from support import (
    COMPRESSORS,
    assert_error,
    check_directory,
    jsonl,
    pack,
    packer,
    packer_script,
    recover_documents,
    recover_texts,
)

from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import RunOptions
from packer_cli.inputs import byte_streams
from packer_cli.inputs.work_units import plan_units
from packer_cli.records import InputFile
from packer_cli.run.pipeline import pack as run

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ("-l", 16, "-t", "bytes", "-q")


TEXTS = [f"text {i} " + "ab" * (i % 5) for i in range(40)]
PLAIN = {
    "jsonl": jsonl(*TEXTS),
    "txt": "\n".join(TEXTS).encode(),
    "csv": b"id,text\n" + b"".join(f'1,"{text}"\r\n'.encode() for text in TEXTS),
    "tsv": b"text\tid\n" + b"".join(f"{text}\t1\n".encode() for text in TEXTS),
}


@pytest.mark.parametrize("ending", COMPRESSORS)
@pytest.mark.parametrize("kind", PLAIN)
def test_compressed_files_give_the_same_as_plain_ones(folder: Path, kind: str, ending: str) -> None:
    data, compress = PLAIN[kind], COMPRESSORS[ending]
    cut = len(data) // 2  # members one after the other, cut anywhere, are one file
    (folder / f"a.{kind}.{ending}").write_bytes(compress(data[:cut]) + compress(data[cut:]))
    pack(f"a.{kind}.{ending}", "-l", 16, "--unit-bytes", "50")
    assert recover_texts("out") == TEXTS
    (folder / f"a.{kind}").write_bytes(data)
    result = packer("pack", f"a.{kind}", *QUIET, "-o", "plain")
    assert result.exit_code == 0
    # positions count plain bytes, so the documents are at the same places
    assert list(recover_documents("out")) == list(recover_documents("plain"))


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_compressed_data_larger_than_its_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(byte_streams, "BLOCK_BYTES", 1 << 16)
    texts = [f"{i} " + "word " * 4000 for i in range(30)]
    (folder / f"a.jsonl.{ending}").write_bytes(COMPRESSORS[ending](jsonl(*texts)))
    pack(f"a.jsonl.{ending}", "-l", 4096, "--no-eos", "--columns", "input_ids,cu_seqlens,segments")
    documents = recover_documents("out").values()
    assert [bytes(tokens.astype("u1")).decode() for tokens in documents] == texts


def test_a_directory_gives_all_files_it_knows_sorted(folder: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden.jsonl", ".git/x.jsonl"):
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / name).write_bytes(jsonl(name))
    (folder / "data" / "sub" / "d.parquet").touch()
    pq.write_table(pa.table({"text": ["d.parquet"]}), folder / "data" / "sub" / "d.parquet")
    (folder / "data" / "notes.docx").write_bytes(b"not an input")
    manifest = pack("data", "-l", 16)
    assert [one["path"] for one in manifest["inputs"]] == [
        "data/a.jsonl", "data/b.jsonl", "data/sub/c.jsonl", "data/sub/d.parquet",
    ]  # fmt: skip
    assert recover_texts("out") == ["a.jsonl", "b.jsonl", "sub/c.jsonl", "d.parquet"]


def test_inputs_keep_the_order_of_the_command(folder: Path) -> None:
    for name in ("a", "b", "c"):
        (folder / f"{name}.jsonl").write_bytes(jsonl(name))
    manifest = pack("c.jsonl", "a.jsonl", "b.jsonl", "-l", 16)
    assert [one["path"] for one in manifest["inputs"]] == ["c.jsonl", "a.jsonl", "b.jsonl"]
    assert recover_texts("out") == ["c", "a", "b"]


def test_globs(folder: Path) -> None:
    for name in ("x1.jsonl", "x2.jsonl", "y.jsonl", "sub/x3.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(jsonl(name))
    pack("x*.jsonl", "-l", 16)
    assert recover_texts("out") == ["x1.jsonl", "x2.jsonl"]
    pack("**/x*.jsonl", "-l", 16, "--overwrite")
    assert recover_texts("out") == ["sub/x3.jsonl", "x1.jsonl", "x2.jsonl"]


def test_globs_leave_results_out(folder: Path) -> None:
    save({"data/a.jsonl": jsonl("a"), "data/running/.packer/owner.json": b""})
    save({"data/running/rejected.jsonl": b"-", "data/running/sub/b.jsonl": jsonl("b")})
    assert packer("pack", "data/a.jsonl", *QUIET, "-o", "data/done").exit_code == 0
    assert Path("data/done/units.jsonl").exists()
    for number, root in enumerate(["data", f"file://{folder}/data"]):
        out = f"out-{number}"
        result = packer("pack", f"{root}/**/*.jsonl", "-l", 16, "-t", "bytes", "-o", out)
        assert result.exit_code == 0, result.stderr
        assert recover_texts(out) == ["a", "b"]
        assert result.stderr.splitlines()[:2] == [
            f"packer: {root}/{name}: left out: it holds a result of packer"
            for name in ("done", "running")
        ]
    result = packer("pack", "data/done/*.jsonl", *QUIET, "-o", "no")
    assert_error(result, 2, "data/done/*.jsonl: matches only results of packer")
    (folder / "data" / "done").rename(folder / "done")
    os.chdir("done")
    result = packer("pack", "*.jsonl", *QUIET, "-o", "../no")
    assert_error(result, 2, "*.jsonl: matches only results of packer")


@pytest.mark.parametrize("inputs", ["d", "d/*.jsonl", "d/**/*.jsonl", "d/**", "*/[ab].jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_cannot_be_read_is_named_by_directory_and_pattern(
    folder: Path, kind: str, inputs: str
) -> None:
    save({"d/a.jsonl": jsonl("a")})
    if kind == "link":
        os.symlink("nowhere", "d/b.jsonl")
    else:
        os.mkfifo("d/b.jsonl")
    code, message = {"link": (1, "No such file"), "pipe": (2, "not a regular file")}[kind]
    result = packer("pack", inputs, *QUIET, "-o", "out")
    assert_error(result, code, "d/b.jsonl: ", message)


@pytest.mark.parametrize("inputs", ["d", "d/**/*.jsonl", "d/*/*.jsonl", "d/**"])
def test_a_folder_that_cannot_be_listed_is_named_by_directory_and_pattern(
    folder: Path, inputs: str
) -> None:
    save({"d/a.jsonl": jsonl("a"), "d/c/c.jsonl": jsonl("c"), "d/e/f.jsonl": jsonl("f")})
    (folder / "d/c").chmod(0)
    program = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: by which root may read all
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
    command = [sys.executable, "-c", program, packer_script(), "pack", inputs, *map(str, QUIET)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr.startswith("error: d/c"), done.stderr
    assert ": cannot read: Permission denied\n" in done.stderr
    (folder / "d/c").chmod(0o755)


def test_a_file_with_the_name_of_a_pattern(folder: Path) -> None:
    (folder / "a[1].jsonl").write_bytes(jsonl("yes"))
    pack("a[1].jsonl", "-l", 16)
    assert recover_texts("out") == ["yes"]


def test_datasets_and_results_inside_a_directory(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_bytes(jsonl("a"))
    dataset = folder / "data" / "saved"
    dataset.mkdir()
    table = pa.table({"text": ["from the dataset"]})
    with pa.ipc.new_stream(dataset / "one.arrow", table.schema) as writer:
        writer.write_table(table)
    (dataset / "state.json").write_text('{"_data_files": [{"filename": "one.arrow"}]}')
    (dataset / "dataset_info.json").write_text("{}")
    result = packer("pack", "data", *QUIET, "-o", "data/packed")
    assert result.exit_code == 0, result.stderr
    assert recover_texts("data/packed") == ["a", "from the dataset"]
    pack("data", "-l", 16)  # does not take data/packed for an input
    assert recover_texts("out") == ["a", "from the dataset"]


def test_only_results_are_left_out_and_that_is_said(folder: Path) -> None:
    save({f"data/web/{name}.json": jsonl(name) for name in ("a", "manifest", "state")})
    save({"data/running/.packer/owner.json": b"", "data/running/b.jsonl": jsonl("b")})
    assert packer("pack", "data/web", *QUIET, "-o", "data/done").exit_code == 0
    result = packer("pack", "data", "-l", 16, "-t", "bytes", "-o", "out")
    assert result.exit_code == 0, result.stderr
    assert recover_texts("out") == ["a", "manifest", "state"]
    assert result.stderr.splitlines()[:2] == [
        f"packer: data/{name}: left out: it holds a result of packer"
        for name in ("done", "running")
    ]


def test_a_link_to_a_directory_above_ends(folder: Path) -> None:
    (folder / "data" / "sub").mkdir(parents=True)
    (folder / "data" / "a.jsonl").write_bytes(jsonl("a"))
    (folder / "data" / "sub" / "up").symlink_to(folder / "data")
    (folder / "more").mkdir()
    (folder / "more" / "b.jsonl").write_bytes(jsonl("b"))
    (folder / "data" / "sub" / "more").symlink_to(folder / "more")
    pack("data", "-l", 16)
    assert recover_texts("out") == ["a", "b"]


def test_input_format_overrides_names(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "part-0").write_bytes(jsonl("a"))
    (folder / "data" / "part-1.txt").write_bytes(jsonl("b"))
    pack("data", "-l", 16, "--input-format", "jsonl")
    assert recover_texts("out") == ["a", "b"]


def save(files: dict[str, bytes]) -> None:
    for name, data in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)


REFUSED: dict[str, tuple[dict[str, bytes], list[str], int, str]] = {
    "missing": ({}, ["no.jsonl"], 2, "no.jsonl: no such file or directory"),
    "no match": ({}, ["no*.jsonl"], 2, "no*.jsonl: no file matches this pattern"),
    "only directories match": (
        {"d/a.jsonl": jsonl("a")}, ["d*"], 2, "d*: no file matches this pattern, only directories",
    ),
    "unknown ending": ({"a.foo": b"x"}, ["a.foo"], 2, "a.foo: cannot tell the format"),
    "empty directory": ({"d/x.foo": b""}, ["d"], 2, "d: no input files in this directory"),
    "twice": (
        {"a.jsonl": jsonl("a")}, ["a.jsonl", "./a.jsonl"], 2,
        "./a.jsonl: the same file as a.jsonl; it would be packed twice",
    ),
    "twice by a directory": (
        {"d/a.jsonl": jsonl("a")}, ["d/a.jsonl", "d"], 2, "d/a.jsonl: the same file as d/a.jsonl",
    ),
    "stdin twice": ({}, ["-", "-"], 2, "-: the same file as -"),
    "several splits": (
        {"d/dataset_dict.json": b'{"splits": ["train", "test"]}'}, ["d"], 2,
        "d: a dataset with several splits: train, test",
    ),
    "broken dataset": (
        {"d/state.json": b"{", "d/dataset_info.json": b"{}"}, ["d"], 1,
        "d/state.json: not valid JSON",
    ),
    "a result": (
        {"d/manifest.json": b'{"format_version": 1, "packer_version": ""}'}, ["d"], 2,
        "d: is a result of packer",
    ),
    "a dataset with a damaged state": (
        {"d/state.json": b'{"_data_files": [{}]}', "d/dataset_info.json": b"{}"}, ["d"], 1,
        "d/state.json: damaged: _data_files",
    ),
    "a dataset with a damaged list of splits": (
        {"d/dataset_dict.json": b'{"splits": [1]}'}, ["d"], 1,
        "d/dataset_dict.json: damaged: splits",
    ),
    "compressed Parquet": (
        {"a.parquet.gz": b""}, ["a.parquet.gz"], 2, "parquet files are not read through gzip",
    ),
    "Parquet from stdin": (
        {}, ["-", "--input-format", "parquet"], 2, "-: parquet cannot be read from stdin",
    ),
    "device": ({}, ["/dev/null", "--input-format", "jsonl"], 2, "/dev/null: not a regular file"),
    "text among ids": (
        {"a.jsonl": b'{"input_ids": [1]}', "b.txt": b"b"}, ["a.jsonl", "b.txt"], 1,
        "b.txt: text files hold texts, a.jsonl holds input_ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_inputs(case: str) -> None:
    files, inputs, code, message = REFUSED[case]
    save(files)
    assert_error(packer("pack", *inputs, *QUIET, "-o", "out"), code, message)
    assert not Path("out").exists()


def test_the_tip_for_a_dataset_of_several_splits_can_be_followed(folder: Path) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    result = packer("pack", "d", *QUIET)
    assert result.stderr.splitlines()[1] == "tip: name the one to pack, for example d/train"


def test_two_names_of_a_file(folder: Path) -> None:
    save({"a.jsonl": jsonl("a"), "d/x.jsonl": jsonl("x")})
    os.link("a.jsonl", "b.jsonl")
    os.symlink("a.jsonl", "c.jsonl")
    for inputs in (["a.jsonl", "b.jsonl"], ["a.jsonl", "c.jsonl"], ["*.jsonl"]):
        other = inputs[-1].replace("*", "b")
        assert_error(
            packer("pack", *inputs, *QUIET, "-o", "out"), 2, f"{other}: the same file as a.jsonl"
        )
    assert packer("pack", "b.jsonl", "d", *QUIET, "-o", "out").exit_code == 0


def test_a_name_that_is_not_utf8(folder: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    (folder / name).write_bytes(jsonl("a"))
    assert_error(packer("pack", ".", *QUIET, "-o", "out"), 2, "caf\\xe9.jsonl")


def test_stdin(folder: Path) -> None:
    result = unaltered("pack", "-", *QUIET, "-o", "out", stdin=jsonl(*TEXTS))
    assert (result.returncode, result.stderr) == (0, "")
    manifest = check_directory("out")
    assert [one["path"] for one in manifest["inputs"]] == ["-"]
    assert recover_texts("out") == TEXTS


def test_stdin_larger_than_a_block_as_text_in_small_pieces(folder: Path) -> None:
    """A pipe that gives a little at a time, with a first document longer than a block."""
    writer = "import sys\nsys.stdout.write('a' * 5_000_000 + '\\n' + 'b\\n' * 200_000)"
    options = ["-l", "65536", "-t", "bytes", "-q", "-o", "out", "--columns"]
    columns = "input_ids,cu_seqlens,segments"
    with subprocess.Popen([sys.executable, "-c", writer], stdout=subprocess.PIPE) as source:
        result = subprocess.run(
            [packer_script(), "pack", "-", "--input-format", "text", *options, columns],
            stdin=source.stdout, cwd=folder, capture_output=True, timeout=300, check=False,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    manifest = check_directory("out")
    assert (manifest["documents"], manifest["tokens"]) == (200_001, 5_000_001 + 400_000)


def test_stdin_of_two_runs_in_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        data = jsonl(name * 5)
        Path("data").write_bytes(data)
        with open("data") as file:
            monkeypatch.setattr("sys.stdin", file)
            run(["-"], Path(name), PackConfig(16), RunOptions(progress=False), "bytes")
        told = check_directory(name)["inputs"][0]
        assert (told["size"], told["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_bad_line_of_stdin_names_its_byte(folder: Path) -> None:
    data = jsonl("good") + b"{bad\n"
    result = unaltered("pack", "-", *QUIET, "-o", "out", stdin=data)
    assert result.returncode == 1
    assert result.stderr.startswith("error: -, byte 17: not valid JSON")
    assert not Path("out").exists()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 500), st.booleans()), min_size=1, max_size=8),
    unit_bytes=st.integers(1, 300),
)
def test_units_cover_every_file_once_and_in_order(
    sizes: list[tuple[int, bool]], unit_bytes: int
) -> None:
    files = [
        InputFile(i, f"{i}.jsonl", "jsonl", "gzip" if compressed else None, size, 0)
        for i, (size, compressed) in enumerate(sizes)
    ]
    units = plan_units(files, PackConfig(max_length=8, unit_bytes=unit_bytes))
    assert [unit.index for unit in units] == list(range(len(units)))
    slices = [part for unit in units for part in unit.slices]
    edges: dict[int, list[Any]] = {}
    for part in slices:
        edges.setdefault(part.file, []).append((part.start, part.stop))
    assert list(edges) == [file.index for file in files]
    for file in files:
        parts = edges[file.index]
        assert parts[0][0] == 0
        assert parts[-1][1] in (None, file.size)
        assert all(a[1] == b[0] for a, b in pairwise(parts))
        if file.compression:
            assert parts == [(0, None)]


def test_config_of_the_manifest_is_what_was_asked(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("a"))
    config = pack("a.jsonl", "-l", 16, "--unit-bytes", "2k", "--shard-bytes", "1.5M")["config"]
    assert (config["unit_bytes"], config["shard_bytes"]) == (2048, 1572864)
    assert json.loads(Path("out/manifest.json").read_bytes())["config"] == config
