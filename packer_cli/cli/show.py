"""`packer show`: rows as text."""

from __future__ import annotations

from typing import Annotated

import typer

from packer_cli.cli.shared import LOCAL_ONLY, Debug, TokensOf, print_note
from packer_cli.config.option import Option


def show(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed directory.")],
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROW",
            help="Row numbers over all shards: 7, -1 for the last, 3-5. Default: 0.",
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

    Trained tokens are green; without color (NO_COLOR, or no terminal) they are in brackets.

    Example: packer show documents-packed-1024 0 -1
    """
    from packer_cli.result.manifest import load
    from packer_cli.result.opening import opened
    from packer_cli.show.rows import parse_rows, pick, read_row, row_as_json
    from packer_cli.storage import local
    from packer_cli.tokenization.decoding import load_decoder

    directory = local(name, LOCAL_ONLY)
    packed = opened(directory, load(directory), tokens)
    wanted = parse_rows(rows or ["0"], len(packed))
    decoder = None if ids else load_decoder(directory, packed.facts.tokenizer)
    if isinstance(decoder, str):
        print_note(f"showing token ids: {decoder}")
        decoder = None
    labels = "labels" in packed.facts.config.columns
    if not labels:
        print_note("the labels column was not written: which tokens are trained on is unknown")
    printer = None
    for number in wanted:
        row = read_row(packed, number)
        segments = row.segments if segment is None else [pick(row, segment)]
        if as_json:
            print(row_as_json(row, segments, decoder))
            continue
        if printer is None:
            from packer_cli.show.text import RowPrinter

            printer = RowPrinter(len(packed), decoder, labels=labels)
        printer.print(row, segments, whole=segment is None)
