"""Plain text and CSV/TSV: what one document is, and where it begins."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import assert_error, pack, packer, recover_documents, recover_texts

from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.inputs import byte_streams
from packer_cli.inputs.formats import reader_for
from packer_cli.records import InputFile, Slice

pytestmark = pytest.mark.usefixtures("folder")


def read(path: Path, file_format: str, block: int, **options: object) -> tuple[list, list]:
    """([(position, text)], [(position, reason)]) of a whole file read in tiny blocks."""
    file = InputFile(0, str(path), file_format, None, path.stat().st_size, 0)
    config = PackConfig(max_length=8, **options)  # type: ignore[arg-type]
    good, bad = [], []
    with patch.object(byte_streams, "BLOCK_BYTES", block):
        for records in reader_for(file_format).read(
            file, Slice(0, 0, None, 0), Shape("text", {"text": "text"}), config
        ):
            good += zip(records.positions.tolist(), records.texts or [], strict=True)
            bad += [(record.position, record.reason) for record in records.bad]
    return good, bad


TEXT = b"one\r\n\ntwo\nthree\n \nfour"


@pytest.mark.parametrize(
    ("sample_by", "documents", "empty"),
    [
        ("line", {0: "one", 6: "two", 10: "three", 16: " ", 18: "four"}, 1),
        ("paragraph", {0: "one", 6: "two\nthree", 18: "four"}, 0),
        ("document", {0: TEXT.decode()}, 0),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.text"])
def test_documents_of_plain_text(
    folder: Path, name: str, sample_by: str, documents: dict[int, str], empty: int
) -> None:
    (folder / name).write_bytes(TEXT)
    manifest = pack(name, "-l", 16, "--sample-by", sample_by)
    assert [position for _, position in recover_documents("out")] == list(documents)
    assert recover_texts("out") == list(documents.values())
    assert manifest["empty_documents"] == empty


def test_a_text_file_is_split_by_default(folder: Path) -> None:
    (folder / "a.txt").write_text("x" * 100)
    assert pack("a.txt", "-l", 10)["segments"] == 11  # 100 and EOS
    assert recover_texts("out") == ["x" * 100]


@given(
    paragraphs=st.lists(
        st.lists(st.text("aé", min_size=1, max_size=9), min_size=1, max_size=4), max_size=6
    ),
    gap=st.sampled_from(["\n\n", "\n \n", "\n\n\n\n"]),
    ended=st.booleans(),
    block=st.integers(1, 30),
    limit=st.integers(1, 30),
)
def test_paragraphs_are_the_same_in_any_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    paragraphs: list[list[str]],
    gap: str,
    ended: bool,
    block: int,
    limit: int,
) -> None:
    texts = ["\n".join(lines) for lines in paragraphs]
    data = (gap.join(texts) + "\n" * ended).encode()
    path = tmp_path_factory.getbasetemp() / "paragraphs.txt"
    path.write_bytes(data)
    good, bad = read(path, "text", block, sample_by="paragraph", max_line_bytes=limit)
    expected, position = [], 0
    for text in texts:
        expected.append((position, text))
        position += len((text + gap).encode())
    fits = [len(text.encode()) <= limit for text in texts]
    assert good == [one for one, fit in zip(expected, fits, strict=True) if fit]
    assert [at for at, _ in bad] == [
        at for (at, _), fit in zip(expected, fits, strict=True) if not fit
    ]


@pytest.mark.parametrize("block", [1, 4, 1000])
def test_a_whole_document_keeps_every_byte(tmp_path: Path, block: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    assert read(path, "text", block, sample_by="document") == ([(0, TEXT.decode())], [])
    too_long = "the document is longer than 21 bytes"
    limited = read(path, "text", block, sample_by="document", max_line_bytes=21)
    assert limited == ([], [(0, too_long)])


def test_a_document_of_many_lines_is_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    data = "ab\n" * 300_000  # minutes, where each line copies those before it
    path.write_text(data)
    for sample_by, expected in (("document", data), ("paragraph", data.rstrip())):
        good, _ = read(path, "text", 1 << 20, sample_by=sample_by)
        assert [text for _, text in good] == [expected]


@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
def test_a_byte_order_mark_is_no_text(folder: Path, sample_by: str) -> None:
    (folder / "a.txt").write_bytes("\ufeffone\n\n\ufefftwo".encode())
    pack("a.txt", "-l", 16, "--sample-by", sample_by)
    texts = ["one\n\n\ufefftwo"] if sample_by == "document" else ["one", "\ufefftwo"]
    assert recover_texts("out") == texts


def test_invalid_utf8_in_text_names_the_line(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"good\ncaf\xe9\n")
    result = packer("pack", "a.txt", "-l", 8, "-q", "-t", "bytes")
    assert_error(result, 1, "a.txt, line 2 (byte 5): invalid UTF-8 at byte 3 of the line: 0xe9")


ROWS = [
    ["text", "id"],
    ["plain", "1"],
    ['with "quotes", commas', "2"],
    ["two\nlines\r\nthree", "3"],
    ["", "4"],
    ["tab\there; naïve \u2028 end", "5"],
]
TEXTS = [row[0] for row in ROWS[1:] if row[0]]


def written(rows: list[list[str]], delimiter: str, line_end: str) -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter=delimiter, lineterminator=line_end).writerows(rows)
    return buffer.getvalue().encode()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "bom"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_delimited_files(
    folder: Path, name: str, delimiter: str, line_end: str, mark: bytes
) -> None:
    data = mark + written(ROWS, delimiter, line_end)
    (folder / name).write_bytes(data)
    manifest = pack(name, "-l", 32)
    assert recover_texts("out") == TEXTS
    assert manifest["empty_documents"] == 1
    for _, position in recover_documents("out"):
        assert position == 0 or data[position - 1 : position] == b"\n"


def test_a_quoted_header_after_a_byte_order_mark(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b'\xef\xbb\xbf"text","id"\n"yes","1"\n')
    pack("a.csv", "-l", 8)
    assert recover_texts("out") == ["yes"]


def test_delimited_text_field_and_column_order(folder: Path) -> None:
    (folder / "a.csv").write_text("id,body\n1,yes\n\n2,also\n")
    pack("a.csv", "-l", 8, "--text-field", "body")
    assert recover_texts("out") == ["yes", "also"]


@pytest.mark.parametrize("block", [1, 3, 17, 1000])
def test_csv_is_the_same_in_any_blocks(tmp_path: Path, block: int) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(written(ROWS, ",", "\n") + b'short\n"x"y,6\nlast,7\n')
    good, bad = read(path, "csv", block)
    assert [text for _, text in good] == [row[0] for row in ROWS[1:]] + ["last"]
    data = path.read_bytes()
    assert bad == [
        (data.index(b"short"), "1 field, the header has 2"),
        (data.index(b'"x"y'), "not valid CSV: ',' expected after '\"'"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"a,b\n1,2\n",
            "fit none of: messages, conversations, prompt+completion, instruction+output, text, "
            "chosen+rejected; fields found: a, b",
        ),
        (b"text,b\n1\n", "a.csv, line 2 (byte 7): 1 field, the header has 2"),
        (b'text,b\n"1\n2', "a.csv, line 2 (byte 7): not valid CSV: unexpected end of data"),
        (b"text,b\ncaf\xe9,2\n", "a.csv, line 2 (byte 7): invalid UTF-8 at byte 3 of the line"),
        (b'te"xt,b\n"a"b\n', "a.csv: the records' fields fit none of"),
        (b'"text"x\n', "a.csv, line 1 (byte 0): not valid CSV: ',' expected after '\"'"),
        (b"input_ids\n1\n", "output, text, chosen+rejected; fields found: input_ids"),
    ],
)
def test_bad_csv(folder: Path, data: bytes, message: str) -> None:
    (folder / "a.csv").write_bytes(data)
    assert_error(packer("pack", "a.csv", "-l", 8, "-q", "-t", "bytes"), 1, message)


@pytest.mark.parametrize("limit", ["1M", "150000"])
def test_an_open_quote_of_csv_is_never_skipped(folder: Path, limit: str) -> None:
    """It takes in every record that follows, up to the end or to the limit of a field."""
    (folder / "a.csv").write_bytes(b'text,b\nok,1\n"open,2\n' + b"good,3\n" * 30_000)
    options = ["-l", 8, "-q", "-t", "bytes", "--on-error", "skip", "--max-line-bytes", limit]
    result = packer("pack", "a.csv", *options)
    assert_error(result, 1, "a.csv, line 3 (byte 12): not valid CSV: ")
    assert "close the quote" in result.stderr


def test_blank_lines_before_the_header_of_csv(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"\n\r\ntext,b\nyes,1\n")
    pack("a.csv", "-l", 8)
    assert recover_texts("out") == ["yes"]


def test_a_size_beyond_all_integers(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"text\nyes\n")
    pack("a.csv", "-l", 8, "--max-line-bytes", "10000000T")
    assert recover_texts("out") == ["yes"]


def test_an_overlong_line_of_csv(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"text\nok\n" + b"x" * 51 + b"\n")
    options = ["-l", 8, "-q", "-t", "bytes", "--max-line-bytes", "50"]
    result = packer("pack", "a.csv", *options)
    assert_error(result, 1, "a.csv, line 3 (byte 8): the line is longer than 50 bytes")
