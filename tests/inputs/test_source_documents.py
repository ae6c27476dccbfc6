"""Files that are one document each: prose, sources and the like, with --sample-by document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import COMPRESSORS, assert_error, jsonl, pack, packer, recover_documents, recover_texts

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
WHOLE = ("--sample-by", "document")
SOURCES = {
    "src/README.md": "# Title\n\nText\n",
    "src/a.py": "def f():\n\treturn '\u2028'\n",
    "src/lib/b.rs": "fn main() {}",
    "src/lib/c.H": "int c;\r\n\r\nint d;\r\n",
    "src/lib/d.test.ts": "const d = 1\n",
    "src/z.rst": "z\n=\n",
}
ORDER = ["src/README.md", "src/a.py", "src/z.rst", "src/lib/b.rs", "src/lib/c.H"]


def save(files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def test_a_folder_of_sources(folder: Path) -> None:
    save(SOURCES | {"src/.git/x.py": "no", "src/logo.png": b"\x89PNG", "src/lib/.e.py": "no"})
    manifest = pack("src", "-l", 16, *WHOLE)
    order = [*ORDER, "src/lib/d.test.ts"]
    assert [one["path"] for one in manifest["inputs"]] == order
    assert recover_texts("out") == [SOURCES[name] for name in order]
    assert {position for _, position in recover_documents("out")} == {0}
    shown = json.loads(packer("show", "out", "0", "--json").stdout.splitlines()[0])
    assert shown["segments"][0]["file"].startswith("src/")
    for command in (("verify", "out", "--against-inputs", "--sample", "all"), ("stats", "out")):
        done = packer(*command)
        assert done.exit_code == 0, done.stderr
    (folder / "src/a.py").write_text("new")
    pack("src", "-l", 16, *WHOLE, "--update")
    assert sorted(recover_texts("out")) == sorted(
        [*(SOURCES[name] for name in order if name != "src/a.py"), "new"]
    )


def test_sources_are_documents_of_tokenized_directories_too(folder: Path) -> None:
    save(SOURCES)
    done = packer("tokenize", "src", "-t", "bytes", "-q", "-o", "tokens", *WHOLE)
    assert done.exit_code == 0, done.stderr
    pack_again = packer("pack", "tokens", "-l", 16, "-q", "-o", "out")
    assert pack_again.exit_code == 0, pack_again.stderr
    done = packer("verify", "out", "--against-inputs", "--sample", "all")
    assert done.exit_code == 0, done.stderr
    assert packer("plan", "src", "-l", "16", "-t", "bytes", *WHOLE).exit_code == 0


@pytest.mark.parametrize("name", ["src/*.py", "src/a.py", "@list.txt"])
def test_named_sources(folder: Path, name: str) -> None:
    save(SOURCES | {"list.txt": "src/a.py\n"})
    pack(name, "-l", 16, *WHOLE)
    assert recover_texts("out") == [SOURCES["src/a.py"]]
    result = packer("pack", name, *QUIET, "--overwrite")
    assert_error(result, 2, "src/a.py: may be one document or one in each line")
    assert "add --sample-by document, or --input-format text" in result.stderr


def test_a_folder_of_nothing_but_sources_says_how_to_pack_it(folder: Path) -> None:
    save(SOURCES)
    result = packer("pack", "src", *QUIET)
    assert_error(result, 2, "src: no data files in this directory, only prose or source code")
    assert "add --sample-by document" in result.stderr


def test_without_the_option_data_is_packed_without_its_readme(folder: Path) -> None:
    save({"data/README.md": "about", "data/a.jsonl": jsonl("a")})
    pack("data", "-l", 16)
    assert recover_texts("out") == ["a"]


def test_compressed_sources(folder: Path) -> None:
    save({f"src/a.py.{end}": COMPRESSORS[end](end.encode()) for end in COMPRESSORS})
    pack("src", "-l", 16, *WHOLE)
    assert recover_texts("out") == sorted(COMPRESSORS)


# id: (a file's content, what is said of it)
NO_TEXTS = {
    "NUL": (b"ab\0c", "not text: a NUL byte at byte 2 of the document"),
    "binary": (b"\x89PNG\r\n", "invalid UTF-8 at byte 0 of the document: 0x89"),
    "UTF-16": ("\ufeffa".encode("utf-16-le"), "the byte order mark of UTF-16LE, expected UTF-8"),
    "long": (b"x" * 41, "the document is longer than 40 bytes"),
}


@pytest.mark.parametrize("case", NO_TEXTS)
def test_a_file_that_is_no_text_is_a_bad_record(folder: Path, case: str) -> None:
    data, reason = NO_TEXTS[case]
    save({"src/a.py": "good", "src/b.ts": data, "src/c.py": "too"})
    options = (*WHOLE, "--max-line-bytes", 40)
    result = packer("pack", "src", *QUIET, *options)
    assert_error(result, 1, f"src/b.ts, line 1 (byte 0): {reason}")
    manifest = pack("src", "-l", 16, *options, "--on-error", "skip")
    assert recover_texts("out") == ["good", "too"]
    assert manifest["rejected_records"] == 1
    rejected = json.loads(Path("out/rejected.jsonl").read_text())
    assert rejected["file"] == "src/b.ts"
    assert rejected["reason"].startswith(reason)


def test_every_file_of_a_folder_is_text_where_that_is_said(folder: Path) -> None:
    save({"src/package.json": "{\n}\n", "src/Makefile": "all:\n", "src/a.py": "a"})
    pack("src", "-l", 16, *WHOLE, "--input-format", "text")
    assert recover_texts("out") == ["all:\n", "a", "{\n}\n"]


def test_the_default_output_has_no_ending(folder: Path) -> None:
    save({"notes.md": "a", "list.txt": "notes.md\n"})
    for name, output in (("notes.md", "notes-packed-16"), ("@list.txt", "list-packed-16")):
        done = packer("pack", name, "-l", 16, "-t", "bytes", "-q", *WHOLE)
        assert done.exit_code == 0, done.stderr
        assert Path(output).is_dir()
