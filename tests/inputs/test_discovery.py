"""From what the user names to files and work units: folders, globs, lists, stdin, sources."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import unaltered
from support import (
    COMPRESSORS,
    assert_error,
    check_directory,
    inputs_of,
    jsonl,
    line_limit,
    pack,
    packer,
    recover_documents,
    recover_texts,
    succeeds,
)

from packer_cli.inputs import byte_streams
from packer_cli.result.layout import ID

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ("-l", 16, "-t", "bytes", "-q")


def save(files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def named(*names: str) -> None:
    """Files of one text each, which is the file's name."""
    save({name: jsonl(name) for name in names})


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_compressed_data_larger_than_its_blocks(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(byte_streams, "BLOCK_BYTES", 1 << 16)
    texts = [f"{i} " + "word " * 4000 for i in range(30)]
    save({f"a.jsonl.{ending}": COMPRESSORS[ending](jsonl(*texts))})
    pack(f"a.jsonl.{ending}", "-l", 4096, "--no-eos", "--columns", "input_ids,cu_seqlens,segments")
    documents = recover_documents("out").values()
    assert [bytes(tokens.astype("u1")).decode() for tokens in documents] == texts


# what is named -> the files that are read, in this order
FILES = ["x1.jsonl", "x2.jsonl", "a[1].jsonl", "b c.jsonl", "#g.jsonl", "@h.jsonl", "d/e.jsonl",
         "d/f.jsonl", "d/sub/x3.jsonl", "d/.hidden.jsonl", "d/.git/x.jsonl"]  # fmt: skip
NAMED: dict[str, list[str]] = {
    "d": ["d/e.jsonl", "d/f.jsonl", "d/sub/x3.jsonl"],
    "x2.jsonl x1.jsonl": ["x2.jsonl", "x1.jsonl"],
    "x*.jsonl": ["x1.jsonl", "x2.jsonl"],
    "**/x*.jsonl": ["d/sub/x3.jsonl", "x1.jsonl", "x2.jsonl"],
    "a[1].jsonl": ["a[1].jsonl"],
    "file://HERE/x*.jsonl": ["x1.jsonl", "x2.jsonl"],
}


@pytest.mark.parametrize("inputs", NAMED)
def test_what_is_named(folder: Path, inputs: str) -> None:
    named(*FILES)
    save({"d/notes.docx": "not an input"})
    manifest = pack(*inputs.replace("HERE", str(folder)).split(), "-l", 16)
    assert recover_texts("out") == NAMED[inputs]
    if "HERE" not in inputs:
        assert inputs_of(manifest) == NAMED[inputs]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_list_names_whatever_the_command_line_does(folder: Path, mark: str, end: str) -> None:
    named(*FILES)
    lines = ["# some", "", "d", "  b c.jsonl\t", "./#g.jsonl", "./@h.jsonl", "x*.jsonl"]
    save({"lists/l.txt": mark + end.join(lines), "two.txt": "a[1].jsonl\n"})
    pack("@lists/l.txt", f"@file://{folder}/two.txt", "-l", 16)
    names = [*NAMED["d"], "b c.jsonl", "#g.jsonl", "@h.jsonl", *NAMED["x*.jsonl"], "a[1].jsonl"]
    assert recover_texts("out") == names


def test_add_goes_by_the_inputs_not_by_the_list_and_other_commands_take_lists() -> None:
    named("a.jsonl", "d/e.jsonl", "d/f.jsonl")
    save({"one.txt": "a.jsonl\nd/e.jsonl\n", "two.txt": "d/f.jsonl\na.jsonl\n", "all.txt": "tok\n"})
    pack("@one.txt", "-l", 16)
    pack("@two.txt", "-l", 16, "--add")
    assert sorted(recover_texts("out")) == ["a.jsonl", "d/e.jsonl", "d/f.jsonl"]
    succeeds("plan", "@one.txt", "-l", "16", "-t", "bytes")
    succeeds("tokenize", "@one.txt", "-t", "bytes", "-q", "-o", "tok")
    succeeds("pack", "@all.txt", "-l", 16, "-q", "-o", "packed")
    assert sorted(recover_texts("packed")) == ["a.jsonl", "d/e.jsonl"]


# id: (files, what is named, exit code, message, what of the tip)
LISTED: dict[str, Any] = {"a.jsonl": "a", "d/e.jsonl": "a", "x.bin2": b""}
REFUSED: dict[str, tuple[dict[str, Any], str, int, str, str]] = {
    "missing": ({}, "no.jsonl", 2, "no.jsonl: no such file or directory", "check the spelling"),
    "no match": ({}, "no*.jsonl", 2, "no*.jsonl: no file matches this pattern", "patterns start"),
    "unknown ending": ({"a.foo": b"x"}, "a.foo", 2, "a.foo: cannot tell the format", "--input-fo"),
    "empty directory": ({"d/x.foo": b""}, "d", 2, "d: no input files in this directory", ".jsonl"),
    "twice": ({"a.jsonl": "a"}, "a.jsonl ./a.jsonl", 2,
              "./a.jsonl: the same file as a.jsonl; it would be packed twice", ""),
    "several splits": ({"d/dataset_dict.json": b'{"splits": ["train", "test"]}'}, "d", 2,
                       "d: a dataset with several splits", "name the folder of the one"),
    "a result": ({"d/manifest.json": b'{"format_version": 1, "packer_version": ""}'}, "d", 2,
                 "d: is a result of packer", "name the original data"),
    "compressed Parquet": ({"a.parquet.gz": b""}, "a.parquet.gz", 2,
                           "parquet files are not read through gzip", "decompress it"),
    "Parquet from stdin": ({}, "- --input-format parquet", 2,
                           "-: parquet cannot be read from stdin", ""),
    "device": ({}, "/dev/null --input-format jsonl", 2, "/dev/null: not a regular file", "stdin"),
    "text among ids": ({"a.jsonl": b'{"input_ids": [1]}', "b.txt": b"b"}, "a.jsonl b.txt", 1,
                       "b.txt: holds text, a.jsonl holds tokens", "two commands"),
    "no list": ({}, "@no.txt", 2, "@no.txt: no such file", "./@no.txt"),
    "a source": ({"a.py": b"x"}, "a.py", 2, "a.py: cannot tell the format", "--sample-by document"),
    # lists: errors name the list and its line
    **{
        f"list: {name}": (LISTED | {"l.txt": content}, "@l.txt", code, f"l.txt{message}", "")
        for name, content, code, message in (
            ("missing", b"# x\n\nno.jsonl\n", 2, ", line 3: no.jsonl: no such file or directory"),
            ("unknown format", b"a.jsonl\nl.txt\nx.bin2\n", 2, ", line 3: x.bin2: cannot tell the"),
            ("twice", b"a.jsonl\nd\n./a.jsonl\n", 2,
             ", line 3: ./a.jsonl: the same file as a.jsonl"),
            ("nested", b"@other.txt\n", 2, ", line 1: '@other.txt': expected a file, folder"),
            ("stdin", b"a.jsonl\n-\n", 2, ", line 2: '-': expected a file, folder, glob or URL"),
            ("empty", b"\n# nothing\n", 2, ": lists no inputs"),
            ("not UTF-8", b"a.jsonl\ncaf\xe9\n", 1, ", line 2: invalid UTF-8 at byte 3"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_inputs(case: str) -> None:
    files, inputs, code, message, tip = REFUSED[case]
    save({name: jsonl("a") if data == "a" else data for name, data in files.items()})
    result = packer("pack", *inputs.split(), *QUIET, "-o", "out")
    assert_error(result, code, message)
    assert tip in result.stderr.splitlines()[1]
    assert not Path("out").exists()


@pytest.mark.parametrize("inputs", ["d", "d/*.jsonl", "d/**"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_cannot_be_read_is_named_by_directory_and_pattern(kind: str, inputs: str) -> None:
    named("d/a.jsonl")
    if kind == "link":
        os.symlink("nowhere", "d/b.jsonl")
    else:
        os.mkfifo("d/b.jsonl")
    code, message = {"link": (1, "No such file"), "pipe": (2, "not a regular file")}[kind]
    result = packer("pack", inputs, *QUIET, "-o", "out")
    assert_error(result, code, "d/b.jsonl: ", message)


def test_only_results_are_left_out_and_that_is_said(folder: Path) -> None:
    save({f"data/web/{name}.json": jsonl(name) for name in ("a", "manifest", "state")})
    save({f"data/running/.packer/{ID}/lock": b"", "data/running/sub/b.json": jsonl("b")})
    save({"data/running/rejected.json": b"-"})
    succeeds("pack", "data/web", *QUIET, "-o", "data/done")
    assert Path("data/done/units.jsonl").exists()
    for number, root in enumerate(("data", "data/**/*.json", f"file://{folder}/data/**/*.json")):
        result = succeeds("pack", root, "-l", 16, "-t", "bytes", "-o", f"out-{number}")
        below = ["b"] * bool(number)  # a folder of a result is left out with all that is in it
        assert recover_texts(f"out-{number}") == [*below, "a", "manifest", "state"]
        at = root.removesuffix("/**/*.json")
        assert result.stderr.splitlines()[:2] == [
            f"packer: {at}/{name}: left out: it holds a result of packer"
            for name in ("done", "running")
        ]
    result = packer("pack", "data/done/*.jsonl", *QUIET, "-o", "no")
    assert_error(result, 2, "data/done/*.jsonl: matches only results of packer")
    (folder / "data" / "done").rename(folder / "done")
    os.chdir("done")
    result = packer("pack", "*.jsonl", *QUIET, "-o", "../no")
    assert_error(result, 2, "*.jsonl: matches only results of packer")


def test_folders_of_datasets_and_links(folder: Path) -> None:
    """What `Dataset.save_to_disk` makes gives its shards, without caches and its own files."""
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    save({"data/a.jsonl": jsonl("a"), "data/saved/cache-1234.arrow": b"not an input"})
    for name in names:
        table = pa.table({"text": [name]})
        with pa.ipc.new_stream(f"data/saved/{name}", table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    save({"data/saved/state.json": json.dumps(state), "data/saved/dataset_info.json": "{}"})
    named("more/b.jsonl")
    (folder / "data/up").symlink_to(folder / "data")
    (folder / "data/w").symlink_to(folder / "more")
    pq.write_table(pa.table({"text": ["z"]}), "data/w/z.parquet")
    for out in ("data/packed", "out"):  # which is no input then
        succeeds("pack", "data", *QUIET, "-o", out)
        assert recover_texts(out) == ["a", *names, "more/b.jsonl", "z"]


def test_input_format_overrides_names() -> None:
    save({"data/part-0": jsonl("a"), "data/part-1.txt": jsonl("b")})
    pack("data", "-l", 16, "--input-format", "jsonl")
    assert recover_texts("out") == ["a", "b"]


def test_two_names_of_a_file() -> None:
    named("a.jsonl", "d/x.jsonl")
    os.link("a.jsonl", "b.jsonl")
    os.symlink("a.jsonl", "c.jsonl")
    for inputs in (["a.jsonl", "b.jsonl"], ["a.jsonl", "c.jsonl"], ["*.jsonl"]):
        other = inputs[-1].replace("*", "b")
        result = packer("pack", *inputs, *QUIET, "-o", "out")
        assert_error(result, 2, f"{other}: the same file as a.jsonl")
    succeeds("pack", "b.jsonl", "d", *QUIET, "-o", "out")


def test_a_name_that_is_not_utf8() -> None:
    named(os.fsdecode(b"caf\xe9.jsonl".replace(b"\xe9", b"e")))
    Path("cafe.jsonl").rename(os.fsdecode(b"caf\xe9.jsonl"))
    assert_error(packer("pack", ".", *QUIET, "-o", "out"), 2, "caf\\xe9.jsonl")


def test_stdin_and_its_bad_lines() -> None:
    texts = [f"text {i} " + "ab" * (i % 5) for i in range(40)]
    result = unaltered("pack", "-", *QUIET, "-o", "out", stdin=jsonl(*texts))
    assert (result.returncode, result.stderr) == (0, "")
    assert [one["path"] for one in check_directory("out")["inputs"]] == ["-"]
    assert recover_texts("out") == texts
    result = unaltered("pack", "-", *QUIET, "-o", "no", stdin=jsonl("good") + b"{bad\n")
    assert result.returncode == 1
    assert result.stderr.startswith("error: -, byte 17: not valid JSON")
    assert not Path("no").exists()


# --- files that are one document each: prose, sources and the like, with --sample-by document

WHOLE = ("--sample-by", "document")
SOURCES: dict[str, str | bytes] = {  # in the order in which they are read
    "src/README.md": "# Title\n\nText\n",
    "src/a.py": "def f():\n\treturn '\u2028'\n",
    "src/z.rst": "z\n=\n",
    "src/lib/b.rs": "fn main() {}",
    "src/lib/c.H": "int c;\r\n\r\nint d;\r\n",
    "src/lib/d.test.ts": "const d = 1\n",
}


def test_a_folder_of_sources() -> None:
    save(SOURCES | {"src/.git/x.py": "no", "src/logo.png": b"\x89PNG", "src/lib/.e.py": "no"})
    manifest = pack("src", "-l", 16, *WHOLE)
    assert inputs_of(manifest) == list(SOURCES)
    assert recover_texts("out") == list(SOURCES.values())
    assert {position for _, position in recover_documents("out")} == {0}
    shown = json.loads(packer("show", "out", "0", "--json").stdout.splitlines()[0])
    assert shown["segments"][0]["file"].startswith("src/")
    succeeds("tokenize", "src", "-t", "bytes", "-q", "-o", "tokens", *WHOLE)
    for name in ("out", "tokens"):
        succeeds("verify", name, "--against-inputs", "--sample", "all")
    succeeds("plan", "src", "-l", "16", "-t", "bytes", *WHOLE)
    Path("src/a.py").write_text("new")
    pack("src", "-l", 16, *WHOLE, "--add")
    assert sorted(recover_texts("out")) == sorted((SOURCES | {"src/a.py": "new"}).values())


def test_sources_that_are_named_compressed_or_beside_data() -> None:
    save(SOURCES | {"list.txt": "src/a.py\n", "data/README.md": "about"})
    named("data/a.jsonl")
    for name in ("src/*.py", "src/a.py", "@list.txt"):
        pack(name, "-l", 16, *WHOLE, "--overwrite")
        assert recover_texts("out") == [SOURCES["src/a.py"]]
    pack("data", "-l", 16, "--overwrite")
    assert recover_texts("out") == ["data/a.jsonl"]
    save({f"more/a.py.{end}": COMPRESSORS[end](end.encode()) for end in COMPRESSORS})
    pack("more", "-l", 16, *WHOLE, "--overwrite")
    assert recover_texts("out") == sorted(COMPRESSORS)
    save({"any/package.json": "{\n}\n", "any/Makefile": "all:\n", "any/a.py": "a"})
    pack("any", "-l", 16, *WHOLE, "--input-format", "text", "--overwrite")
    assert recover_texts("out") == ["all:\n", "a", "{\n}\n"]
    for name, output in (("src/z.rst", "z-packed-16"), ("@list.txt", "list-packed-16")):
        succeeds("pack", name, *QUIET, *WHOLE)
        assert Path(output).is_dir() or Path("src", output).is_dir()


# id: (a file's content, what is said of it)
NO_TEXTS = {
    "NUL": (b"ab\0c", "not text: a NUL byte at byte 2 of the document"),
    "binary": (b"\x89PNG\r\n", "invalid UTF-8 at byte 0 of the document: 0x89"),
    "UTF-16": (
        "\ufeffa".encode("utf-16-le"),
        "begins with the byte order mark of UTF-16LE, expected UTF-8",
    ),
    "long": (b"x" * 41, "the document is longer than 40 bytes"),
}


@pytest.mark.parametrize("case", NO_TEXTS)
def test_a_file_that_is_no_text_is_a_bad_record(case: str) -> None:
    data, reason = NO_TEXTS[case]
    save({"src/a.py": "good", "src/b.ts": data, "src/c.py": "too"})
    with line_limit(40):
        result = packer("pack", "src", *QUIET, "-o", "out", *WHOLE)
        assert_error(result, 1, f"src/b.ts, line 1 (byte 0): {reason}")
        assert pack("src", "-l", 16, *WHOLE, "--on-error", "skip")["rejected_records"] == 1
    assert recover_texts("out") == ["good", "too"]
    rejected = json.loads(Path("out/rejected.jsonl").read_text())
    assert rejected["file"] == str(Path("src/b.ts").absolute())
    assert rejected["reason"].startswith(reason)
