"""Lists of inputs: @FILE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import assert_error, jsonl, pack, packer, recover_texts

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ("-l", 16, "-t", "bytes", "-q", "-o", "out")


@pytest.fixture(autouse=True)
def _data(folder: Path) -> None:
    for name in ("a.jsonl", "b c.jsonl", "d/e.jsonl", "d/f.jsonl", "#g.jsonl", "@h.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(jsonl(name))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_list_names_whatever_the_command_line_does(folder: Path, mark: str, end: str) -> None:
    lines = ["# some", "", "d", "  b c.jsonl\t", "./#g.jsonl", "./@h.jsonl", "a*.jsonl"]
    (folder / "lists").mkdir()
    (folder / "lists" / "l.txt").write_bytes((mark + end.join(lines)).encode())
    manifest = pack("@lists/l.txt", "-l", 16)
    names = ["d/e.jsonl", "d/f.jsonl", "b c.jsonl", "./#g.jsonl", "./@h.jsonl", "a.jsonl"]
    assert [one["path"] for one in manifest["inputs"]] == names
    assert recover_texts("out") == [name.removeprefix("./") for name in names]


def test_lists_urls_and_other_inputs_together(folder: Path) -> None:
    (folder / "one.txt").write_text(f"file://{folder}/d/*.jsonl\n")
    (folder / "two.txt").write_text("b c.jsonl\n")
    pack("@one.txt", "a.jsonl", f"@file://{folder}/two.txt", "-l", 16)
    assert recover_texts("out") == ["d/e.jsonl", "d/f.jsonl", "a.jsonl", "b c.jsonl"]


def test_an_update_goes_by_the_inputs_not_by_the_list(folder: Path) -> None:
    (folder / "one.txt").write_text("a.jsonl\nd/e.jsonl\n")
    pack("@one.txt", "-l", 16)
    (folder / "two.txt").write_text("d/f.jsonl\na.jsonl\n")
    result = packer("pack", "@two.txt", *QUIET, "--update")
    assert_error(result, 2, "d/e.jsonl")
    pack("@two.txt", "d/e.jsonl", "-l", 16, "--update")
    assert sorted(recover_texts("out")) == ["a.jsonl", "d/e.jsonl", "d/f.jsonl"]
    unchanged = packer("pack", "@one.txt", "d/f.jsonl", *QUIET, "--update", "--json")
    assert json.loads(unchanged.stdout)["documents"] == 3


def test_other_commands_take_lists(folder: Path) -> None:
    (folder / "one.txt").write_text("a.jsonl\nd\n")
    assert packer("plan", "@one.txt", "-l", "16", "-t", "bytes").exit_code == 0
    done = packer("tokenize", "@one.txt", "-t", "bytes", "-q", "-o", "tokens")
    assert done.exit_code == 0, done.stderr
    (folder / "tokens.txt").write_text("tokens\n")
    done = packer("pack", "@tokens.txt", "-l", 16, "-q", "-o", "out")
    assert done.exit_code == 0, done.stderr
    assert sorted(recover_texts("out")) == ["a.jsonl", "d/e.jsonl", "d/f.jsonl"]


# id: (content, code, message)
REFUSED = {
    "missing": (b"# x\n\nno.jsonl\n", 2, "l.txt, line 3: no.jsonl: no such file or directory"),
    "unknown format": (b"a.jsonl\nl.txt\nx.bin2\n", 2, "l.txt, line 3: x.bin2: cannot tell the"),
    "no match": (b"*.parquet", 2, "l.txt, line 1: *.parquet: no file matches this pattern"),
    "twice": (b"a.jsonl\nd\n./a.jsonl\n", 2, "l.txt, line 3: ./a.jsonl: the same file as a.jsonl"),
    "same line twice": (b"a.jsonl\na.jsonl\n", 2, "l.txt, line 2: a.jsonl: the same file as"),
    "nested": (b"@other.txt\n", 2, "l.txt, line 1: @other.txt is a list, expected a file, folder"),
    "stdin": (b"a.jsonl\n-\n", 2, "l.txt, line 2: - is stdin, expected a file, folder, glob"),
    "empty": (b"\n# nothing\n", 2, "l.txt: lists no inputs"),
    "not UTF-8": (b"a.jsonl\ncaf\xe9\n", 1, "l.txt, line 2: invalid UTF-8 at byte 3"),
    "NUL": (b"a\0b\n", 1, "l.txt, line 1: a NUL byte, expected the name of an input"),
    "long": (b"x" * (1 << 17), 1, "l.txt, line 1: a line of 65536 bytes or more"),
    "UTF-16": ("\ufeffa".encode("utf-16-be"), 1, "l.txt: begins with the byte order mark of UTF"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_errors_name_the_list_and_its_line(folder: Path, case: str) -> None:
    content, code, message = REFUSED[case]
    (folder / "l.txt").write_bytes(content)
    (folder / "x.bin2").write_bytes(b"")
    assert_error(packer("pack", "@l.txt", *QUIET), code, message)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("@no.txt", "no.txt: no such file"),
        ("@d", "d: a directory, expected a file that lists inputs"),
        ("@-", "@-: expected a file that lists inputs"),
        ("@", "@: expected a file that lists inputs"),
    ],
)
def test_what_is_no_list(name: str, message: str) -> None:
    assert_error(packer("pack", name, *QUIET), 2, message)
