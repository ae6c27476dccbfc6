"""`packer audit`: find what is wrong with a set that anyone made, and examples to look at."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from packer_cli.cli.reports import (
    PageOptions,
    ViewOptions,
    check_page,
    print_note,
    refuse_name,
    show_reports,
)
from packer_cli.errors import DataError
from packer_cli.options.option import COUNT_OR_ALL, as_option, whole
from packer_cli.options.run_options import ProgressOptions

if TYPE_CHECKING:
    from packer_cli.audit import Audit, AuditedSet, Finding
    from packer_cli.audit.documents import TokenConventions
    from packer_cli.reports import Cell, PageRows, Report, Section
    from packer_cli.reports.show import Shown
    from packer_cli.result.manifest import Result, TokenizerInfo
    from packer_cli.tokenization.decoding import Decoder

_SHOWN = 3  # examples of a finding, in the terminal
_SAMPLED = 20  # rows on a page, beside the emptiest and the examples
SetName = Annotated[
    str,
    Argument(
        metavar="SET",
        help="A folder of datasets, files of Parquet, Arrow or JSON lines, .bin, .npy, .ds, or a "
        "directory of packer.",
    ),
]


@dataclass(frozen=True)
class SetOptions(PageOptions, ViewOptions):
    """Options for a set that packer has not made."""

    tokenizer: Annotated[
        str | None,
        Option(
            "--tokenizer",
            "-t",
            metavar="NAME",
            help="The tokenizer of a set that packer has not made, for its text, and for what EOS, "
            "BOS and padding are. Default: the set's own, or what is plain from it.",
        ),
    ] = None
    format: Annotated[
        str | None,
        Option(metavar="NAME", help="Format of the set. Default: found from its columns."),
    ] = None
    max_length: Annotated[
        int | None,
        whole(1, 1 << 24),
        Option(
            "--max-length", "-l", help="Tokens of a full row. Default: as many as the longest have."
        ),
    ] = None


@dataclass(frozen=True)
class AuditOptions(SetOptions, ProgressOptions):
    sample: Annotated[
        int | None,
        COUNT_OR_ALL,
        Option(help="How many rows are read, evenly spread. Default: all."),
    ] = None


def audit(name: SetName, options: AuditOptions) -> None:
    """Find what is wrong with a set that anyone made: ends, labels, boundaries, padding.

    Exit 0 when nothing or notes alone were found, 1 for an error or a warning, 2 for a set that
    cannot be read.

    Example: packer audit data/tokenized --tokenizer my-model
    """
    from packer_cli.audit import audit as run
    from packer_cli.audit import open_set
    from packer_cli.reports.page import rows_of_page
    from packer_cli.result.wording import plural

    refuse_name("SET", name)
    check_page(options.html, as_json=options.as_json)
    with unreadable():
        set_ = open_set(name, options.format, options.max_length, options.tokens)
        info = tokenizer_of(options.tokenizer)
        result = run(set_, info, max_length=options.max_length, sample=options.sample)
        rows = None
        if options.html is not None:
            chosen = _rows_for(result)
            shown = shown_rows(set_, result.conventions, list(chosen), options.tokens)
            about = [(row, chosen[row.index]) for row in shown]
            rows = rows_of_page(about, decoder_of(set_, options.tokenizer))
    show_reports({name: _report(result, rows)}, as_json=options.as_json, html=options.html)
    if not result.is_clean:
        kinds = [finding.severity for finding in result.findings]
        counts = [
            plural(kinds.count(severity), severity)
            for severity in ("error", "warning")
            if severity in kinds
        ]
        command = ["packer", "show", name, str(result.findings[0].examples[0][0])]
        of_packer = set_.facts is not None
        for flag in ("tokens",) if of_packer else ("tokenizer", "format", "max_length"):
            value = getattr(options, flag)
            for item in value if flag == "tokens" else [value] * (value is not None):
                command += [as_option(flag), str(item)]
        tip = f"look at the rows: {shlex.join(command)}"
        has_text = of_packer or options.tokenizer is not None
        raise DataError(
            f"{name}: {' and '.join(counts)}",
            tip if has_text else f"{tip}; add --tokenizer NAME to see text",
        )


def shown_rows(
    set_: AuditedSet,
    conventions: TokenConventions,
    rows: Sequence[int],
    tokens: tuple[str, ...] = (),
) -> Iterator[Shown]:
    """Yield rows of any set, in ascending order, like those of results. Raises DataError."""
    from packer_cli.storage import base_name, is_url

    if set_.facts is not None and not is_url(set_.name):  # packer's reader knows more
        *_, read = reader_of(Path(set_.name), set_.facts, tokens)
        yield from map(read, rows)
        return
    import numpy as np

    from packer_cli.audit import DocumentBatch
    from packer_cli.reports.show import Segment, Shown

    numbers = np.unique(np.array(rows, np.int64))
    for raw in set_.read(np.stack([numbers, numbers + 1], axis=1)):
        b = DocumentBatch(raw, set_, conventions)
        for row in range(b.rows):
            spans = [
                slice(b.begins[document], b.stops[document])
                for document in np.flatnonzero(b.row_of == row)
            ]
            trained = b.trained if set_.has_labels else None
            segments = [
                Segment(number, None, b.ids[span], None if trained is None else trained[span])
                for number, span in enumerate(spans)
            ]
            padding = int(b.offsets[row + 1] - b.offsets[row] - b.sizes[b.row_of == row].sum())
            place, inside = set_.where(b.first + row)
            yield Shown("row", b.first + row, base_name(place), inside, segments, padding=padding)


def reader_of(
    directory: Path, manifest: Result, tokens: tuple[str, ...]
) -> tuple[str, int, bool, Callable[[int], Shown]]:
    """Open a result of packer. Returns ("row" or "document", their number, whether it is known what
    is trained on, a function that reads one).
    """
    from packer_cli.reports.show import read_document, read_row
    from packer_cli.result.manifest import Manifest
    from packer_cli.result.opening import Origins, View, opened
    from packer_cli.result.tokenized import Tokens, open_tokenized

    if not isinstance(manifest, Manifest):
        tokenized = open_tokenized(directory)
        tokens_of_it = Tokens({0: tokenized}, tokenized.value_columns.values())
        read_one = partial(read_document, tokenized, tokens_of_it)
        return "document", len(tokenized), True, read_one
    packed = opened(directory, manifest, tokens)
    origins = Origins(manifest, packed.directories if isinstance(packed, View) else None)

    def read(number: int) -> Shown:
        row = read_row(packed, number, origins)
        while origins.notes:
            print_note(origins.notes.pop())
        return row

    return "row", len(packed), "labels" in packed.facts.config.columns, read


def _rows_for(audit: Audit) -> dict[int, list[str]]:
    """Return rows to look at, with reasons: examples of findings, the emptiest, and some others."""
    chosen: dict[int, list[str]] = {}
    for finding in audit.findings:
        for row, place in finding.examples:
            chosen.setdefault(row, []).append(f"{finding.rule} at {place}")
    for _, row in audit.emptiest:
        chosen.setdefault(row, []).append("one of the emptiest")
    for number in range(_SAMPLED):
        chosen.setdefault(number * (audit.of - 1) // (_SAMPLED - 1), [])
    return dict(sorted(chosen.items()))


def _report(audit: Audit, rows: PageRows | None) -> Report:
    """Report what was read and how, findings, and rules that were not applied."""
    import packer_cli
    from packer_cli.reports import Fact, Figure, Report
    from packer_cli.result.wording import count

    set_, severities = audit.set_, [finding.severity for finding in audit.findings]
    at = "their own token" if set_.meaning.shift == "own" else "the token before"
    labels = f"labels are at {at}" if set_.has_labels else "nothing says what is trained"
    facts = [
        Fact("format", f"{set_.format}: {set_.meaning.description}, recognized by {set_.evidence}"),
        Fact("columns", f"{', '.join(set_.names)}; {labels}"),
        *(Fact(label, words) for label, words in audit.conventions.evidence.items()),
        *(Fact("left out", words, True) for words in set_.left_out),
    ]
    if audit.conventions.length is not None and not set_.documents:
        facts.append(Fact("full rows", f"have {audit.conventions.length:,} tokens"))
    sampled = f"of {audit.of:,}, evenly spread" if audit.rows < audit.of else ""
    figures = [
        Figure("rows", count(audit.rows), sampled),
        Figure("documents", count(audit.documents), ""),
        Figure("tokens", count(audit.tokens), "without padding"),
        *(Figure(f"{name}s", count(severities.count(name)), "", True)
          for name in ("error", "warning", "note")),
    ]  # fmt: skip
    made_by, sections = f"packer {packer_cli.__version__}, packer audit", _sections(audit, rows)
    return Report(set_.name, facts, audit.as_json(), made_by, figures, sections=sections, rows=rows)


def _sections(audit: Audit, shown: PageRows | None) -> list[Section]:
    from packer_cli.audit import RULES
    from packer_cli.reports import Section, Table, Text
    from packer_cli.result.wording import plural

    sections = [Section("Findings", [Text("nothing was found", only_page=False)])]
    if audit.findings:
        lines: list[dict[str, Cell]] = [
            {"rule": finding.rule, "severity": finding.severity, "rows": finding.rows,
             "share": finding.rows / max(audit.rows, 1), "examples: row, place": _examples(finding),
             "means": RULES[finding.rule].means + f" ({finding.detail})" * bool(finding.detail)}
            for finding in audit.findings
        ]  # fmt: skip
        there = {row.number for row in shown.rows} if shown else set[int]()
        links = [[row for row, _ in finding.examples if row in there] for finding in audit.findings]
        findings = Table(
            "", lines, names_first=True, linked="look at row", links=links if there else ()
        )
        todo = [
            {"rule": finding.rule, "do": RULES[finding.rule].todo} for finding in audit.findings
        ]
        do = Table("what to do", todo, names_first=True)
        sections = [Section("Findings", [findings]), Section("What to do", [do])]
    if audit.not_applied:
        rules: dict[str, list[str]] = {}
        for rule, reason in audit.not_applied.items():
            rules.setdefault(reason, []).append(rule)
        reasons = [
            {"because": reason, "rules": ", ".join(names)} for reason, names in rules.items()
        ]
        title = f"not applied: {plural(len(audit.not_applied), 'rule')}"
        sections.append(Section("Not applied", [Table(title, reasons, names_first=True)]))
    return sections


def _examples(finding: Finding) -> str:
    places = [f"{row}, {place}" for row, place in finding.examples[:_SHOWN]]
    return "; ".join([*places, *["..."] * (finding.rows > _SHOWN)])


@contextmanager
def unreadable() -> Iterator[None]:
    """Return a context in which a set that cannot be read ends with exit code 2."""
    try:
        yield
    except DataError as error:
        error.exit_code = 2
        raise


def decoder_of(set_: AuditedSet, tokenizer: str | None) -> Decoder | str:
    """Return the decoder of the named tokenizer or of the set's; or why there is none."""
    from packer_cli.storage import is_url
    from packer_cli.tokenization.decoding import BytesDecoder, ReferenceDecoder, load_decoder
    from packer_cli.tokenization.engines import ReferenceEngine
    from packer_cli.tokenization.locate import locate

    if tokenizer == "bytes":
        return BytesDecoder()
    if tokenizer is not None:
        return ReferenceDecoder(ReferenceEngine(locate(tokenizer).json), set())
    if set_.facts is None or set_.facts.tokenizer is None:
        return "no tokenizer is given: --tokenizer"
    if is_url(set_.name):
        return "the set's tokenizer is at a URL: give --tokenizer"
    return load_decoder(Path(set_.name), set_.facts.tokenizer)


def tokenizer_of(name: str | None) -> TokenizerInfo | None:
    """Return the facts of a tokenizer; None without a name. Raises UsageError."""
    from packer_cli.tokenization.locate import locate
    from packer_cli.tokenization.tokenizer import Framing, bytes_tokenizer, load_tokenizer

    if name is None:
        return None
    if name == "bytes":
        return bytes_tokenizer(Framing()).info
    files = locate(name)
    framing = Framing(eos=files.eos is not None)
    return load_tokenizer(files, backend="tokenizers", framing=framing).info
