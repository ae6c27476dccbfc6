"""`packer show`: rows or documents as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli.reports import LOCAL_ONLY, Directory, TokensOf, print_note
from packer_cli.errors import UsageError
from packer_cli.options.option import Whole, option
from packer_cli.options.run_options import Reporting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from packer_cli.reports.show import Shown
    from packer_cli.result.manifest import Result


@dataclass(frozen=True)
class ShowOptions(TokensOf, Reporting):
    segment: Whole | None = option(None, "Show only this segment of each row.", metavar="K")
    ids: bool = option(False, "Show token ids instead of text.")


def show(
    name: Directory,
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROW",
            help="Numbers of rows, or documents, over all shards: 7, -1 for the last, 3-5. "
            "Default: 0.",
        ),
    ] = None,
    *,
    options: ShowOptions,
) -> None:
    """Show rows as text: segments, where they came from, and which tokens are trained on.

    Of a tokenized directory, its documents. With --json, an object for each.

    Trained tokens are green; without color (NO_COLOR, or no terminal) they are in brackets.

    Example: packer show documents-packed-1024 0 -1
    """
    from packer_cli.reports.show import Printer, numbers_of, pick
    from packer_cli.reports.show import as_json as written
    from packer_cli.result.manifest import load_any
    from packer_cli.storage import local
    from packer_cli.tokenization.decoding import load_decoder

    directory, segment = local(name, LOCAL_ONLY), options.segment
    manifest = load_any(directory)
    what, count, labels, read = _reader(directory, manifest, options.tokens)
    if what == "document" and segment is not None:
        raise UsageError("--segment: is for rows, and documents have no segments", "leave it out")
    wanted = numbers_of(rows or ["0"], count, what)
    decoder = None if options.ids else load_decoder(directory, manifest.tokenizer)
    if isinstance(decoder, str):
        print_note(f"showing token ids: {decoder}")
        decoder = None
    if not labels:
        print_note("the labels column was not written: which tokens are trained on is unknown")
    printer = None
    for number in wanted:
        shown = read(number)
        segments = shown.segments if segment is None else pick(shown, segment)
        if options.as_json:
            print(json.dumps(written(shown, segments, decoder)))
            continue
        printer = printer or Printer(count, decoder, labels=labels)
        printer.print(shown, segments)


def _reader(
    directory: Path, manifest: Result, tokens: tuple[str, ...]
) -> tuple[str, int, bool, Callable[[int], Shown]]:
    """(row or document, how many, whether it is known what is trained on, what reads one)."""
    from packer_cli.reports.show import read_document, read_row
    from packer_cli.result.manifest import Manifest
    from packer_cli.result.opening import View, opened
    from packer_cli.result.origins import Origins
    from packer_cli.result.tokenized import Tokens, open_tokenized

    if not isinstance(manifest, Manifest):
        tokenized = open_tokenized(directory)
        read_one = partial(read_document, tokenized, Tokens({0: tokenized}))
        return "document", len(tokenized), True, read_one
    packed = opened(directory, manifest, tokens)
    origins = Origins(manifest, packed.directories if isinstance(packed, View) else None)

    def read(number: int) -> Shown:
        row = read_row(packed, number, origins)
        while origins.notes:
            print_note(origins.notes.pop())
        return row

    return "row", len(packed), "labels" in packed.facts.config.columns, read
