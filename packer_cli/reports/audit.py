"""`packer audit`: what a set was taken to be, what is wrong with it, and examples to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

import packer_cli
from packer_cli.audit import RULES, Audit, Finding, Habits, Set, documents_of
from packer_cli.reports.report import Fact, Figure, Report, Rows, Section, Table, Text
from packer_cli.reports.show import Segment, Shown
from packer_cli.result.wording import count, percent, plural
from packer_cli.storage import base_name

_SHOWN = 3  # examples of a finding, in the terminal
_SAMPLED = 20  # rows on a page, beside the emptiest and the examples


def shown_rows(set_: Set, habits: Habits, rows: Sequence[int]) -> Iterator[Shown]:
    """Rows of any set, in ascending order, as `packer show` has those of packer's. Raises DataError
    for what cannot be read.
    """
    numbers = np.unique(np.array(rows, np.int64))
    spans = np.stack([numbers, numbers + 1], axis=1)
    for b in documents_of(set_, habits, spans):
        for row in range(b.rows):
            documents = range(int(b.of_row[row]), int(b.of_row[row + 1]))
            segments = [
                Segment(number, None, b.ids[b.begins[one] : b.stops[one]],
                        None if b.trained is None else b.trained[b.begins[one] : b.stops[one]])
                for number, one in enumerate(documents)
            ]  # fmt: skip
            length = int(b.offsets[row + 1] - b.offsets[row])
            padding = length - sum(len(one.ids) for one in segments)
            place, inside = set_.table.where(b.first + row)
            yield Shown("row", b.first + row, base_name(place), inside, segments, padding=padding)


def rows_for(audit: Audit) -> dict[int, list[str]]:
    """Rows to look at, with why: the examples of each finding, the emptiest, and evenly spread
    ones.
    """
    chosen: dict[int, list[str]] = {}
    for one in audit.findings:
        for row, place in one.examples:
            chosen.setdefault(row, []).append(f"{one.rule} at {place}")
    for _, row in audit.emptiest:
        chosen.setdefault(row, []).append("one of the emptiest")
    for row in np.linspace(0, audit.of - 1, _SAMPLED).astype(np.int64).tolist():
        chosen.setdefault(row, [])
    return dict(sorted(chosen.items()))


def audit_report(audit: Audit, rows: Rows | None = None) -> Report:
    """What was read and how, a table of findings, and what was not applied; on a page also `rows`,
    to which the examples lead.
    """
    set_, findings = audit.set_, audit.findings
    names = ", ".join(set_.table.names)
    facts = [Fact("format", f"{set_.format}: {set_.meaning.what}, told by {set_.told}"),
             Fact("columns", f"{names}; {_labels(audit)}")]  # fmt: skip
    facts += [Fact(what, how) for what, how in audit.habits.told.items()]
    if audit.habits.length is not None and set_.rows_are != "documents":
        facts.append(Fact("full rows", f"have {audit.habits.length:,} tokens"))
    facts += [Fact("left out", f"column {name}: {kind} is no list of integers", True)
              for name, kind in set_.table.ignored.items()]  # fmt: skip
    sampled = f"of {audit.of:,}, evenly spread" if audit.rows < audit.of else ""
    figures = [
        Figure("rows", count(audit.rows), sampled),
        Figure("documents", count(audit.documents), ""),
        Figure("tokens", count(audit.tokens), "without padding"),
        *(Figure(f"{name}s", count(sum(one.severity == name for one in findings)), "", True)
          for name in ("error", "warning", "note")),
    ]  # fmt: skip
    return Report(
        set_.name,
        facts,
        audit.as_json(),
        f"packer {packer_cli.__version__}, packer audit",
        figures,
        sections=[*_findings(audit, rows), *_not_applied(audit)],
        rows=rows,
    )


def _labels(audit: Audit) -> str:
    own = audit.set_.meaning.shift == "own"
    if not audit.set_.says_what_is_trained:
        return "nothing says what is trained on"
    return f"labels are at {'their own token' if own else 'the token before'}"


def _findings(audit: Audit, shown: Rows | None) -> list[Section]:
    there = {one.number for one in shown.rows} if shown else set[int]()
    if not audit.findings:
        words = Text("nothing was found", only_page=False)
        return [Section("Findings", [words])]
    head = ["rule", "severity", "rows", "share", "examples: row, place", "means"]
    rows = [
        [one.rule, one.severity, count(one.rows), percent(one.rows / max(audit.rows, 1)),
         _examples(one), _means(one)]
        for one in audit.findings
    ]  # fmt: skip
    links = [[row for row, _ in one.examples if row in there] for one in audit.findings]
    table = Table(
        "", head, rows, text=["rule", "severity", head[4], "means"], names_first=True,
        linked="look at row", links=links if there else (),
    )  # fmt: skip
    todo = [[one.rule, RULES[one.rule].todo] for one in audit.findings]
    return [Section("Findings", [table]),
            Section("What to do", [Table("what to do", ["rule", "do"], todo, ["rule", "do"],
                                         names_first=True)])]  # fmt: skip


def _means(one: Finding) -> str:
    means = RULES[one.rule].means
    return f"{means} ({one.more})" if one.more else means


def _examples(one: Finding) -> str:
    places = [f"{row}, {place}" for row, place in one.examples[:_SHOWN]]
    return "; ".join([*places, *["..."] * (one.rows > _SHOWN)])


def _not_applied(audit: Audit) -> list[Section]:
    if not audit.not_applied:
        return []
    names: dict[str, list[str]] = {}
    for name, why in audit.not_applied.items():
        names.setdefault(why, []).append(name)
    rows = [[why, ", ".join(own)] for why, own in names.items()]
    title = f"not applied: {plural(len(audit.not_applied), 'rule')}"
    head = ["because", "rules"]
    return [Section("Not applied", [Table(title, head, rows, head, names_first=True)])]
