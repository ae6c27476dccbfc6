"""`packer audit`: what a set was taken to be, what is wrong with it, and examples to look at."""

from __future__ import annotations

import packer_cli
from packer_cli.audit import RULES, Audit, Finding
from packer_cli.reports.report import Fact, Figure, Report, Section, Table, Text
from packer_cli.result.wording import count, percent, plural

_SHOWN = 3  # examples of a finding, in the terminal


def audit_report(audit: Audit) -> Report:
    """What was read and how, a table of findings, and what was not applied."""
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
        sections=[*_findings(audit), *_not_applied(audit)],
    )


def _labels(audit: Audit) -> str:
    own = audit.set_.meaning.shift == "own"
    if not set(audit.set_.table.names) & {"labels", "loss_mask", "completion_mask",
                                          "assistant_masks"}:  # fmt: skip
        return "nothing says what is trained on"
    return f"labels are at {'their own token' if own else 'the token before'}"


def _findings(audit: Audit) -> list[Section]:
    if not audit.findings:
        words = Text("nothing was found", only_page=False)
        return [Section("Findings", [words])]
    head = ["rule", "severity", "rows", "share", "examples: row, place", "means"]
    rows = [
        [one.rule, one.severity, count(one.rows), percent(one.rows / max(audit.rows, 1)),
         _examples(one), _means(one)]
        for one in audit.findings
    ]  # fmt: skip
    table = Table("", head, rows, text=["rule", "severity", head[4], "means"], names_first=True)
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
