"""`packer show`: rows or documents as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli.shared import LOCAL_ONLY, Debug, TokensOf, print_note
from packer_cli.config.option import Option
from packer_cli.errors import UsageError

if TYPE_CHECKING:
    from packer_cli.result.manifest import Result
    from packer_cli.tokenization.decoding import Decoder


def show(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed or tokenized directory.")],
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROW",
            help="Numbers of rows, or documents, over all shards: 7, -1 for the last, 3-5. "
            "Default: 0.",
        ),
    ] = None,
    segment: Annotated[
        int | None, Option("Show only this segment of each row.", metavar="K", value="count")
    ] = None,
    ids: Annotated[bool, Option("Show token ids instead of text.")] = False,
    as_json: Annotated[bool, Option("Print a JSON object for each row.", flag="--json")] = False,
    tokens: TokensOf = (),
    debug: Debug = False,
) -> None:
    """Show rows as text: segments, where they came from, and which tokens are trained on.

    Of a tokenized directory, its documents.

    Trained tokens are green; without color (NO_COLOR, or no terminal) they are in brackets.

    Example: packer show documents-packed-1024 0 -1
    """
    from packer_cli.result.manifest import Manifest
    from packer_cli.result.manifest_file import load_any
    from packer_cli.storage import local

    directory = local(name, LOCAL_ONLY)
    manifest = load_any(directory)
    if not isinstance(manifest, Manifest):
        if segment is not None:
            raise UsageError(
                "--segment: is for rows, and documents have no segments", "leave it out"
            )
        _show_documents(directory, rows or ["0"], ids=ids, as_json=as_json)
        return
    from packer_cli.result.opening import opened
    from packer_cli.result.origins import Origins
    from packer_cli.result.view import View
    from packer_cli.show.rows import parse_rows, pick, read_row, row_as_json

    packed = opened(directory, manifest, tokens)
    wanted = parse_rows(rows or ["0"], len(packed))
    decoder = _decoder(directory, manifest, ids=ids)
    labels = "labels" in packed.facts.config.columns
    if not labels:
        print_note("the labels column was not written: which tokens are trained on is unknown")
    found = packed.directories if isinstance(packed, View) else None
    printer, origins = None, Origins(manifest, found)
    for number in wanted:
        row = read_row(packed, number, origins)
        while origins.notes:
            print_note(origins.notes.pop())
        segments = row.segments if segment is None else [pick(row, segment)]
        if as_json:
            print(row_as_json(row, segments, decoder))
            continue
        if printer is None:
            from packer_cli.show.text import RowPrinter

            printer = RowPrinter(len(packed), decoder, labels=labels)
        printer.print(row, segments, whole=segment is None)


def _show_documents(directory: Path, wanted: list[str], *, ids: bool, as_json: bool) -> None:
    from packer_cli.result.tokenized import open_tokenized
    from packer_cli.show.documents import DocumentReader, document_as_json
    from packer_cli.show.rows import parse_rows
    from packer_cli.show.text import RowPrinter

    tokenized = open_tokenized(directory)
    numbers = parse_rows(wanted, len(tokenized), "document")
    decoder = _decoder(directory, tokenized.facts, ids=ids)
    reader = DocumentReader(tokenized)
    printer = None if as_json else RowPrinter(len(tokenized), decoder, labels=True)
    for number in numbers:
        document = reader.read(number)
        if printer is None:
            print(document_as_json(document, decoder))
        else:
            printer.print_document(document)


def _decoder(directory: Path, manifest: Result, *, ids: bool) -> Decoder | None:
    from packer_cli.tokenization.decoding import load_decoder

    decoder = None if ids else load_decoder(directory, manifest.tokenizer)
    if isinstance(decoder, str):
        print_note(f"showing token ids: {decoder}")
        return None
    return decoder
