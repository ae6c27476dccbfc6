"""`packer audit`: find what is wrong with a set that anyone made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli.reports import Page, check_page, refuse_name, show_reports
from packer_cli.errors import DataError, UsageError
from packer_cli.options.option import KINDS, Count, option
from packer_cli.options.run_options import Progress

if TYPE_CHECKING:
    from packer_cli.audit import Set
    from packer_cli.result.manifest import TokenizerInfo
    from packer_cli.tokenization.decoding import Decoder

SetName = Annotated[
    str,
    typer.Argument(
        metavar="SET",
        help="A folder of datasets, files of Parquet, Arrow or JSON lines, .bin, .npy, .ds, or a "
        "directory of packer.",
    ),
]


@dataclass(frozen=True)
class AuditOptions(Page, Progress):
    tokenizer: str | None = option(
        None,
        "The tokenizer of the model, which says what EOS, BOS and padding are. Default: the set's "
        "own, or what is plain from it.",
        short="-t",
        metavar="NAME",
    )
    format: str | None = option(
        None, "What columns mean, where it is not to be told from them.", metavar="NAME"
    )
    max_length: Count | None = option(
        None,
        "Tokens of a full row. Default: as many as the longest have.",
        short="-l",
        most=1 << 24,
    )
    sample: str = option("all", "How many rows are read, evenly spread.", metavar="N|all")


def audit(name: SetName, options: AuditOptions) -> None:
    """Find what is wrong with a set that anyone made: ends, labels, boundaries, padding.

    Exit 0 when nothing or notes alone were found, 1 for an error or a warning, 2 for a set that
    cannot be read.

    Example: packer audit data/tokenized --tokenizer my-model
    """
    from packer_cli.audit import audit as run
    from packer_cli.audit import open_set
    from packer_cli.reports.audit import audit_report, rows_for, shown_rows
    from packer_cli.reports.rows import rows_of_page
    from packer_cli.result.wording import plural

    refuse_name("SET", name)
    check_page(options.html, as_json=options.as_json)
    sample = None if options.sample == "all" else KINDS["count"].read(options.sample) or 0
    if sample is not None and sample < 1:
        raise UsageError(f"--sample: {options.sample!r} is neither a positive number nor all")
    with unreadable():
        set_ = open_set(name, options.format, options.max_length)
        info = tokenizer_of(options.tokenizer)
        found = run(set_, info, max_length=options.max_length, sample=sample)
        rows = None
        if options.html is not None:
            chosen = rows_for(found)
            shown = shown_rows(set_, found.habits, list(chosen))
            about = [(one, chosen[one.index]) for one in shown]
            rows = rows_of_page(about, decoder_of(set_, options.tokenizer))
    show_reports({name: audit_report(found, rows)}, as_json=options.as_json, html=options.html)
    if not found.is_sound:
        kinds = [one.severity for one in found.findings]
        counts = [plural(kinds.count(one), one) for one in ("error", "warning") if one in kinds]
        row = found.findings[0].examples[0][0]
        raise DataError(
            f"{name}: {' and '.join(counts)}", f"look at the rows: packer show {name} {row}"
        )


@contextmanager
def unreadable() -> Iterator[None]:
    """A context in which a set that cannot be read ends with the exit code 2."""
    try:
        yield
    except DataError as error:
        error.exit_code = 2
        raise


def decoder_of(set_: Set, tokenizer: str | None) -> Decoder | str:
    """The decoder of the tokenizer that is named, or else of the set's own; or why there is none.
    Raises UsageError.
    """
    from packer_cli.tokenization.decoding import BytesDecoder, ReferenceDecoder, load_decoder
    from packer_cli.tokenization.engines import ReferenceEngine
    from packer_cli.tokenization.locate import locate

    if tokenizer == "bytes":
        return BytesDecoder()
    if tokenizer is not None:
        return ReferenceDecoder(ReferenceEngine(locate(tokenizer).json), set())
    if set_.tokenizer is None:
        return "no tokenizer is given: --tokenizer"
    if set_.folder is None:
        return "the set's tokenizer is at a URL: give --tokenizer"
    return load_decoder(set_.folder, set_.tokenizer)


def tokenizer_of(name: str | None) -> TokenizerInfo | None:
    """What a tokenizer says of itself; None without a name. Raises UsageError."""
    from packer_cli.tokenization.locate import locate
    from packer_cli.tokenization.tokenizer import Framing, bytes_tokenizer, load_tokenizer

    if name is None:
        return None
    if name == "bytes":
        return bytes_tokenizer(Framing()).info
    files = locate(name)
    framing = Framing(eos=files.eos is not None)
    return load_tokenizer(files, backend="tokenizers", framing=framing).info
