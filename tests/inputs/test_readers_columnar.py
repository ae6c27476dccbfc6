"""Parquet, both Arrow forms, and Hugging Face folders: every row, at its number."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from support import assert_error, pack, packer, recover_documents, recover_texts

from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.inputs import columnar
from packer_cli.inputs.columnar import ParquetReader
from packer_cli.inputs.parquet_pages import pages
from packer_cli.records import InputFile, Slice

pytestmark = pytest.mark.usefixtures("folder")

TEXTS = [f"row {i} naïve \u2028" + "x" * (i % 7) for i in range(50)]


def parquet(path: Path, **options: Any) -> None:
    table = pa.table({"id": range(len(TEXTS)), "text": options.pop("column", TEXTS)})
    pq.write_table(table, path, **options)


def arrow(path: Path, new: Callable[..., Any] = pa.ipc.new_file, **options: Any) -> None:
    table = pa.table({"id": range(len(TEXTS)), "text": options.pop("column", TEXTS)})
    with new(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=7)


def dataset_folder(path: Path) -> None:
    """What `Dataset.save_to_disk` makes."""
    path.mkdir()
    for name, part in (("data-00000-of-00002.arrow", TEXTS[:30]), ("b.arrow", TEXTS[30:])):
        table = pa.table({"text": part})
        with pa.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(table)
    files = [{"filename": "data-00000-of-00002.arrow"}, {"filename": "b.arrow"}]
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (path / "dataset_info.json").write_text("{}")
    (path / "cache-1234.arrow").write_bytes(b"not an input")


FORMS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "parquet": ("a.parquet", parquet),
    "parquet of many row groups": ("a.pq", lambda path: parquet(path, row_group_size=8)),
    "parquet, zstd": ("a.parquet", lambda path: parquet(path, compression="zstd")),
    "parquet, gzip, no dictionary": (
        "a.parquet",
        lambda path: parquet(path, compression="gzip", use_dictionary=False),
    ),
    "parquet of large strings": (
        "a.parquet",
        lambda path: parquet(path, column=pa.array(TEXTS, pa.large_string())),
    ),
    "parquet of a dictionary": (
        "a.parquet",
        lambda path: parquet(path, column=pa.array(TEXTS).dictionary_encode()),
    ),
    "parquet of string views": (
        "a.parquet",
        lambda path: parquet(path, column=pa.array(TEXTS, pa.string_view())),
    ),
    "arrow file": ("a.arrow", arrow),
    "arrow stream": ("a.arrow", lambda path: arrow(path, pa.ipc.new_stream)),
    "arrow file of a dictionary": (
        "a.ipc",
        lambda path: arrow(path, column=pa.array(TEXTS).dictionary_encode(), unify_dictionaries=1),
    ),
    "arrow stream of string views": (
        "a.arrow",
        lambda path: arrow(path, pa.ipc.new_stream, column=pa.array(TEXTS, pa.string_view())),
    ),
    "arrow file, lz4 inside": ("a.arrow", lambda path: arrow(path, compression="lz4")),
    "arrow stream, zstd inside": (
        "a.arrow",
        lambda path: arrow(path, pa.ipc.new_stream, compression="zstd"),
    ),
    "feather": (
        "a.feather",
        lambda path: pyarrow.feather.write_feather(pa.table({"text": TEXTS}), str(path)),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_every_row(folder: Path, form: str) -> None:
    name, write = FORMS[form]
    try:
        write(folder / name)
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this pyarrow cannot write it: {error}")
    pack(name, "-l", 32)
    assert list(recover_documents("out")) == [(0, i) for i in range(len(TEXTS))]
    assert recover_texts("out") == TEXTS


def test_a_dataset_folder_gives_the_files_it_names_in_order(folder: Path) -> None:
    dataset_folder(folder / "data")
    manifest = pack("data", "-l", 32)
    assert [one["path"] for one in manifest["inputs"]] == [
        "data/data-00000-of-00002.arrow",
        "data/b.arrow",
    ]
    assert recover_texts("out") == TEXTS


@pytest.mark.parametrize("unit_bytes", ["1", "300", "1G"])
def test_row_groups_are_the_slices_of_parquet(folder: Path, unit_bytes: str) -> None:
    parquet(folder / "a.parquet", row_group_size=8)
    manifest = pack("a.parquet", "-l", 32, "--unit-bytes", unit_bytes)
    assert recover_texts("out") == TEXTS
    assert len(manifest["units"]) == {"1": 7, "1G": 1}.get(unit_bytes, len(manifest["units"]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, "a.parquet, row group 0, row 3 (row 3 of the file): the text is null"),
        (21, "a.parquet, row group 2, row 5 (row 21 of the file): the text is null"),
    ],
)
def test_a_null_in_parquet_names_row_group_and_row(folder: Path, row: int, message: str) -> None:
    column = [None if i == row else text for i, text in enumerate(TEXTS)]
    parquet(folder / "a.parquet", row_group_size=8, column=column)
    for unit_bytes in ("1", "1G"):
        options = ["-l", 32, "-q", "-t", "bytes", "--unit-bytes", unit_bytes, "-o", unit_bytes]
        assert_error(packer("pack", "a.parquet", *options), 1, message)


def test_null_rows_can_be_skipped(folder: Path) -> None:
    column = [None if i % 10 == 5 else text for i, text in enumerate(TEXTS)]
    parquet(folder / "a.parquet", row_group_size=8, column=column)
    manifest = pack("a.parquet", "-l", 32, "--on-error", "skip", "--unit-bytes", "1")
    assert manifest["rejected_records"] == 5
    assert recover_texts("out") == [text for text in column if text]
    lines = [json.loads(line) for line in Path("out/rejected.jsonl").read_bytes().splitlines()]
    assert lines == [
        {"file": "a.parquet", "position": i, "reason": "the text is null"} for i in range(5, 50, 10)
    ]


def test_a_null_inside_a_dictionary_is_a_null(folder: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array(["a", None]))
    table = pa.table({"text": column})
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert_error(packer("pack", "a.arrow", "-l", 8, "-q", "-t", "bytes"), 1, "a.arrow, row 1")
    pack("a.arrow", "-l", 8, "--on-error", "skip")
    assert recover_texts("out") == ["a", "a"]


def test_invalid_utf8_in_a_column_names_the_row(folder: Path) -> None:
    offsets, data = np.array([0, 2, 6, 7], np.int32), b"okcaf\xe9!"
    column = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(data))
    pq.write_table(pa.table({"text": column}), folder / "a.parquet")
    message = "row group 0, row 1 (row 1 of the file): invalid UTF-8 at byte 3 of the text"
    assert_error(packer("pack", "a.parquet", "-l", 8, "-q", "-t", "bytes"), 1, message)
    pack("a.parquet", "-l", 8, "--on-error", "skip")
    assert recover_texts("out") == ["ok", "!"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"body": ["a"], "id": [1]}, "text, chosen+rejected, input_ids; fields found: body, id"),
        ({"text": [1]}, "column 'text' has type int64, expected a string"),
        ({"text": [b"a"]}, "column 'text' has type binary, expected a string"),
        ({"input_ids": [1]}, "column 'input_ids' has type int64, expected a list of integers"),
        ({"input_ids": [[1.5]]}, "column 'input_ids' has type list<element: double>"),
    ],
)
def test_columns_of_the_wrong_name_or_type(folder: Path, table: Any, message: str) -> None:
    pq.write_table(pa.table(table), folder / "a.parquet")
    assert_error(packer("pack", "a.parquet", "-l", 8, "-q", "-t", "bytes"), 1, "a.parquet", message)


def test_two_columns_of_one_name(folder: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, folder / "a.parquet")
    message = "a.parquet: 2 columns 'text'; columns found: text, text"
    assert_error(packer("pack", "a.parquet", "-l", 8, "-q", "-t", "bytes"), 1, message)


def test_a_column_name_with_a_dot(folder: Path) -> None:
    table = pa.table({"a": ["no"], "a.b": ["yes"], "a.b.c": ["no"]})
    pq.write_table(table, folder / "a.parquet")
    pack("a.parquet", "-l", 8, "--text-field", "a.b")
    assert recover_texts("out") == ["yes"]


def test_a_second_file_without_the_column(folder: Path) -> None:
    parquet(folder / "a.parquet")
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), folder / "b.parquet")
    result = packer("pack", "a.parquet", "b.parquet", "-l", 8, "-q", "-t", "bytes")
    assert_error(result, 1, "b.parquet: the records' fields fit none of", "found: body, id")


@pytest.mark.parametrize("form", FORMS)
def test_a_cell_longer_than_the_limit_is_a_bad_record(folder: Path, form: str) -> None:
    name, write = FORMS[form]
    try:
        write(folder / name)
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this pyarrow cannot write it: {error}")
    limit = len(TEXTS[10].encode())
    fits = [text for text in TEXTS if len(text.encode()) <= limit]
    options = ["-l", 32, "-t", "bytes", "-q", "--max-line-bytes", limit]
    result = packer("pack", name, *options)
    assert_error(result, 1, f"{name}, ", "row 5", f"the text is longer than {limit} bytes")
    manifest = pack(name, *options[:2], "--on-error", "skip", *options[-2:])
    assert recover_texts("out") == fits
    assert manifest["rejected_records"] == len(TEXTS) - len(fits) > 0


def test_a_list_longer_than_the_limit_is_a_bad_record(folder: Path) -> None:
    ids = pa.array([[1, 2], [1, 2, 3], [], [4]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": ids}), folder / "a.parquet")
    options = ["-l", 4, "--max-line-bytes", 8]
    message = "row 1 (row 1 of the file): input_ids is longer than 8 bytes"
    assert_error(packer("pack", "a.parquet", *options, "-q"), 1, message)
    pack("a.parquet", *options, "--on-error", "skip")
    assert [tokens.tolist() for tokens in recover_documents("out").values()] == [[1, 2], [4]]


def test_cells_of_nested_types_have_a_size_too() -> None:
    cells = pa.array([[{"content": "x" * 1000}], None, [{"content": "y"}] * 2])
    sizes = columnar._sizes(cells)
    assert 1000 <= sizes[0] < 1100
    assert sizes[1:].max() < 100


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_headers_of_pages(folder: Path, version: str, dictionary: bool) -> None:
    """Held against what the footer says of the whole column."""
    texts = [f"{i}" * (i % 300) for i in range(5000)]
    pq.write_table(
        pa.table({"text": texts}), "a.parquet", use_dictionary=dictionary, data_page_size=4096,
        data_page_version=version, write_batch_size=16, dictionary_pagesize_limit=40_000,
    )  # fmt: skip
    chunk = pq.read_metadata("a.parquet").row_group(0).column(0)
    every = list(pages("a.parquet", chunk))
    assert len(every) > 100
    assert every[0].is_dictionary == dictionary
    assert sum(page.values for page in every if not page.is_dictionary) == 5000
    headers = chunk.total_uncompressed_size - sum(page.size for page in every)
    assert 0 < headers < 2500 * len(every)  # they hold the least and the greatest text
    data = Path("a.parquet").read_bytes()
    for place in range(4, 40):  # whatever a header holds, it is no crash and no endless loop
        Path("damaged.parquet").write_bytes(data[:place] + b"\xff" * 8 + data[place + 8 :])
        assert len(list(pages("damaged.parquet", chunk))) <= len(data)


def test_long_rows_come_in_small_batches(folder: Path) -> None:
    texts = ["x" * (i % 5 * 50_000) for i in range(400)]
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet")
    file = InputFile(0, "a.parquet", "parquet", None, 1, 0)
    part, shape, config = (
        Slice(0, 0, None, 0),
        Shape("text", {"text": "text"}),
        PackConfig(max_length=8),
    )
    batches = [records.texts for records in ParquetReader().read(file, part, shape, config)]
    assert [text for batch in batches for text in batch] == texts
    assert max(sum(map(len, batch)) for batch in batches) <= (4 << 20) + 200_000


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_an_arrow_file_cut_while_it_is_read(folder: Path, new: Any) -> None:
    table = pa.table({"text": ["x" * 10_000] * 1000})
    with new(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    script = (
        "import os\n"
        "from packer_cli.cli import app as cli\n"
        "from packer_cli.tokenization import encoding\n"
        "encode = encoding.token_batch\n"
        "def cut(*given): os.truncate('a.arrow', 4096); return encode(*given)\n"
        "encoding.token_batch = cut; cli.main()"
    )
    command = [sys.executable, "-c", script, "pack", "a.arrow", "-l", "8", "-t", "bytes", "-q"]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 1  # not SIGBUS
    assert done.stderr.startswith(b"error: a.arrow: ")


def test_a_file_of_many_row_groups_is_opened_once_a_unit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(folder / "a.parquet", row_group_size=1)
    opened = []
    whole = columnar.pq.ParquetFile
    monkeypatch.setattr(
        columnar.pq, "ParquetFile", lambda *a, **k: opened.append(a) or whole(*a, **k)
    )
    manifest = pack("a.parquet", "-l", 32, "--unit-bytes", 600)
    assert recover_texts("out") == TEXTS
    assert len(TEXTS) > len(manifest["units"]) > 2
    assert [len(unit["slices"]) for unit in manifest["units"]] == [1] * len(manifest["units"])
    assert len(opened) <= len(manifest["units"]) + 3  # its names and its footer
