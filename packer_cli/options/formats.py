"""The formats of input files by name. Adding one: CONTRIBUTING.md.

All code that handles input files looks up their format in this table, and finds the reader with
`inputs.formats.reader_for`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from packer_cli import storage
from packer_cli.errors import one_of

# The key in the metadata of Parquet files whose masks are those of the next token.
SHIFTED = "packer.shifted"


class Format(NamedTuple):
    """A format of files, as far as it is known without reading one.

    suffixes    of file names, lower case, with their dot
    reader      "module.Class" in packer_cli.inputs
    counted_in  unit of the position of a record: "byte", "row" or "document"
    cut_by      unit of the start and stop of a slice: "byte" (slices may end anywhere, with the
                record that begins before), "row group" or "document"; "": files are read whole
    streamed    may be compressed, or come through stdin
    beside      the ending of the index file that must lie beside a file, in place of its own
    """

    suffixes: tuple[str, ...]
    reader: str
    counted_in: str
    cut_by: str
    streamed: bool
    beside: str = ""


FORMATS = {
    "jsonl": Format((".jsonl", ".ndjson"), "jsonl.JsonlReader", "byte", "byte", True),
    # files with an array; others are read as jsonl, see inputs/discovery.py
    "json": Format((".json",), "jsonl.JsonArrayReader", "byte", "", True),
    "parquet": Format((".parquet", ".pq"), "columnar.ParquetReader", "row", "row group", False),
    "arrow": Format((".arrow", ".feather", ".ipc"), "columnar.ArrowReader", "row", "", False),
    "text": Format((".txt", ".text"), "text.TextReader", "byte", "", True),
    "csv": Format((".csv",), "text.CsvReader", "byte", "", True),
    "tokenized": Format((), "tokenized.TokenizedReader", "document", "document", False),
    "tsv": Format((".tsv",), "text.TsvReader", "byte", "", True),
    "megatron": Format(
        (".bin",), "indexed_tokens.MegatronReader", "document", "document", False, ".idx"
    ),
}
JSON = "json"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4"}
FILE_FORMATS = tuple(name for name, format_ in FORMATS.items() if format_.suffixes)
SUFFIXES = {suffix: name for name, format_ in FORMATS.items() for suffix in format_.suffixes}


_PROSE = ".adoc .md .markdown .mdx .org .rst .tex"
_SOURCES = (
    ".asm .bash .c .cc .clj .cpp .cs .cu .cuh .cxx .d .dart .el .erl .ex .exs .f90 .fs .go "
    ".groovy .h .hh .hpp .hs .hxx .java .jl .js .jsx .kt .kts .lisp .lua .m .mjs .ml .mli .mm .nim "
    ".php .pl .pm .proto .ps1 .pxd .py .pyi .pyx .r .rb .rs .s .scala .scm .sh .sol .sql .svelte "
    ".swift .tcl .ts .tsx .v .vb .vhd .vim .vue .zig .zsh"
)
_MARKUP = ".cfg .cmake .css .gradle .htm .html .ini .less .scss .tf .toml .xml .yaml .yml"
# Files that are one document each with --sample-by document. Without it they are no inputs: a line
# of a source is no document, and a folder of data often has its README.md.
DOCUMENT_SUFFIXES = frozenset(f"{_PROSE} {_SOURCES} {_MARKUP}".split())


def format_of(path: str, *, documents: bool = False) -> tuple[str | None, str | None]:
    """Return (format, compression) by a file's name, a path or a URL; the format is None if
    unknown.

    `documents`: source code and the like are text, too.
    """
    stem, suffix = os.path.splitext(storage.base_name(path).lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    if documents and suffix in DOCUMENT_SUFFIXES:
        return "text", compression
    return SUFFIXES.get(suffix), compression


def companion(path: str, name: str) -> str | None:
    """Return the file that must lie beside `path`, a file of this format, or None."""
    beside = format_named(name).beside
    return os.path.splitext(path)[0] + beside if beside else None


def belongs_to(path: str) -> str | None:
    """Return the file whose companion `path` is, by its ending, or None."""
    for format_ in FORMATS.values():
        if format_.beside and path.endswith(format_.beside):
            return path[: -len(format_.beside)] + format_.suffixes[0]
    return None


def format_named(name: str) -> Format:
    """Return a format. Raises UsageError for an unknown name."""
    if name not in FORMATS:
        raise one_of("--input-format", name, FORMATS)
    return FORMATS[name]
