"""`packer audit`: what is wrong with a set that anyone made, told from its tokens and labels.

    audit(open_set(name))  ->  Audit: findings with counts and examples, and what was not applied

A look at evenly spread rows tells what the set does (`habits.py`); then all rows are read once, a
few hundred thousand tokens at a time, as documents (`batches.py`), and every rule of `rules.py`
looks at them. So memory does not depend on the size of the set, but for 16 bytes for each of the
first eight million rows, which find duplicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packer_cli.audit.batches import TELLING, Batch, Habits, batch_of
from packer_cli.audit.formats import FORMATS, Set, open_set
from packer_cli.audit.habits import look as _look
from packer_cli.audit.rules import (
    FEW,
    MOST_ROWS,
    MUCH,
    RULES,
    Memory,
    Rule,
    Severity,
    View,
    repeated,
)
from packer_cli.audit.tables import even_spans
from packer_cli.errors import DataError
from packer_cli.packing.planning import Planner
from packer_cli.records import Int64
from packer_cli.result.manifest import TokenizerInfo
from packer_cli.result.wording import plural

__all__ = [
    "FORMATS", "RULES", "Audit", "Finding", "Habits", "Set", "audit", "documents_of", "look",
    "open_set",
]  # fmt: skip

_EXAMPLES, _EMPTIEST = 10, 5
_MUCH_PADDING = 0.01  # of rows, beyond what best-fit leaves


@dataclass
class Finding:
    """What a rule found. `rows`: how many have it; `examples`: (row, place in it), the first;
    `more`: words that belong to it.
    """

    rule: str
    severity: Severity
    rows: int = 0
    examples: list[tuple[int, int]] = field(default_factory=list)
    more: str = ""


@dataclass
class Audit:
    """What was read, and what is wrong with it.

    set_         that was read, and what it `habits` are
    rows, documents, tokens   that were read; `of`: rows of the whole set
    findings     errors first
    not_applied  rule -> why
    emptiest     (tokens, row) of the rows with the fewest
    """

    set_: Set
    habits: Habits
    of: int
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    findings: list[Finding] = field(default_factory=list)
    not_applied: dict[str, str] = field(default_factory=dict)
    emptiest: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return all(one.severity == "note" for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        findings = [
            {
                "rule": one.rule,
                "severity": one.severity,
                "rows": one.rows,
                "share": one.rows / max(self.rows, 1),
                "examples": [{"row": row, "place": place} for row, place in one.examples],
            }
            for one in self.findings
        ]
        figures = {"rows": self.rows, "documents": self.documents, "tokens": self.tokens}
        return {"format": self.set_.format, **figures, "findings": findings,
                "not_applied": self.not_applied}  # fmt: skip


def look(set_: Set, tokenizer: TokenizerInfo | None, max_length: int | None) -> Habits:
    """As `habits.look`. Raises DataError also for boundaries that are not in their row."""
    try:
        return _look(set_, tokenizer, max_length)
    except ValueError as error:
        raise DataError(f"{set_.name}: {error}", "write these columns again") from error


def documents_of(set_: Set, habits: Habits, spans: Int64) -> Any:
    """Batches of rows spans[k, 0] <= row < spans[k, 1] as documents. Raises DataError for what
    cannot be read, and boundaries that are not in their row.
    """
    for raw in set_.table.read(spans):
        try:
            yield batch_of(raw, set_, habits)
        except ValueError as error:
            raise DataError(
                f"{set_.name}: rows {raw.first} to {raw.first + raw.rows - 1}: {error}",
                "write these columns again; packer show says what is in a row",
            ) from error


def audit(
    set_: Set,
    tokenizer: TokenizerInfo | None = None,
    *,
    max_length: int | None = None,
    sample: int | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Audit:
    """Read a set, or `sample` rows of it, evenly spread, and apply every rule.

    `tokenizer`: tells EOS, BOS, padding and the vocabulary, in place of what the set says.
    `max_length`: tokens of a full row. Raises DataError for what cannot be read.
    """
    habits = look(set_, tokenizer or set_.tokenizer, max_length)
    spans = even_spans(set_.table.rows, sample or set_.table.rows)
    result, memory = Audit(set_, habits, set_.table.rows), Memory()
    whole = sample is None or sample >= set_.table.rows
    rules: list[Rule] = []
    for name, rule in RULES.items():
        if why := why_not(rule, set_, habits, whole=whole):
            result.not_applied[name] = why
        else:
            rules.append(rule)
    found = {rule.name: Finding(rule.name, _severity(rule, set_)) for rule in rules}
    packed = False
    for batch in documents_of(set_, habits, spans):
        result.rows += batch.rows
        whole_ones = batch.end_with(habits)[0] if habits.flows else batch.begun
        result.documents += int(whole_ones.sum())
        result.tokens += batch.tokens
        least = np.argsort(batch.filled, kind="stable")[:_EMPTIEST]
        rows = zip(batch.filled[least].tolist(), (least + batch.first).tolist(), strict=True)
        result.emptiest = sorted([*result.emptiest, *rows])[:_EMPTIEST]
        packed |= len(batch.begins) > batch.rows
        view, shifted = View(batch, habits, set_, memory, whole), np.empty(0, np.int64)
        for rule in rules:
            places = rule.find(view)
            if rule.name == "labels-shifted":
                shifted = batch.rows_at(places)
            elif len(shifted) and "labels" in rule.needs:  # of a row one place off, all are wrong
                places = places[~np.isin(batch.rows_at(places), shifted)]
            _count(found[rule.name], places, batch)
        progress(batch.rows)
    _settle(found, result, memory, packed=packed, whole=whole)
    order = ("error", "warning", "note")
    result.findings = sorted((one for one in found.values() if one.rows),
                             key=lambda one: order.index(one.severity))  # fmt: skip
    return result


def _severity(rule: Rule, set_: Set) -> Severity:
    return "warning" if rule.name in set_.meaning.weaker else rule.severity


def _count(finding: Finding, places: Int64, batch: Batch) -> None:
    if not len(places):
        return
    rows, first = np.unique(batch.rows_at(places), return_index=True)
    finding.rows += len(rows)
    for row, place in zip(rows.tolist(), places[first].tolist(), strict=True):
        if len(finding.examples) == _EXAMPLES:
            break
        finding.examples.append((batch.first + row, place - int(batch.offsets[row])))


def why_not(rule: Rule, set_: Set, habits: Habits, *, whole: bool) -> str:
    """Why a rule is not applied, by the first of its needs that is not there; or ""."""
    names = set(set_.table.names)
    name_it = "give --tokenizer"
    absent = {
        "EOS": habits.eos is None and f"EOS is not told by the set: {name_it}",
        "BOS": habits.bos is None and f"BOS is not told by the set: {name_it}, if it has one",
        "EOS at ends": habits.ends < FEW
        and f"{habits.ends:.0%} of the documents end with EOS, {habits.eos}",
        "BOS at beginnings": not habits.adds_bos and habits.begins < 0.5
        and f"{habits.begins:.0%} of the documents begin with BOS, {habits.bos}",
        "labels": not set_.says_what_is_trained and "no column says what is trained on",
        "label values": "labels" not in names and "there is no column labels",
        "boundaries": not names & {*TELLING} and "no column tells boundaries",
        "padding": habits.pad is None and not habits.masked
        and not names & {"cu_seqlens", "seq_lens", "position_ids"}
        and "no padding is told, by a column or its place",
        "headers": habits.header is None and "no token is told that begins every turn",
        "conversations": habits.header is None and habits.masks < 0.5
        and "no conversations are told: no token begins every turn, and few documents have a part "
        "that is not trained on",
        "length": habits.length is None and "rows have no length of their own: give --max-length",
        "ends of rows": "documents flow on into the next row" if habits.flows
        else not whole and set_.format == "packer" and "only a sample is read",
        "EOS tells": not set_.meaning.by_eos and "EOS does not tell boundaries in this format",
        "packed": set_.rows_are == "documents" and "rows are documents, not packed yet",
    }  # fmt: skip
    return next((str(absent[need]) for need in rule.needs if absent[need]), "")


def _settle(
    found: dict[str, Finding], result: Audit, memory: Memory, *, packed: bool, whole: bool
) -> None:
    """What only all rows together tell."""
    if (one := found.get("dominant-token")) is not None:
        shares = {token: number / max(memory.tokens, 1) for token, number in memory.common.items()}
        shares = {token: share for token, share in shares.items() if share > MUCH}
        if not shares:
            one.rows = 0
        one.more = ", ".join(f"{share:.1%} are {token}" for token, share in shares.items())
    one = found["duplicate-rows"]
    again = repeated(memory)
    _fill(one, again, np.zeros_like(again))
    if result.rows > MOST_ROWS:
        one.more = f"among the first {MOST_ROWS:,} rows"
    if (one := found.get("cut")) is not None and one.rows:
        places = np.concatenate(memory.cuts, axis=1)
        if memory.cut:
            lost = ~np.isin(np.concatenate(memory.cut), np.concatenate(memory.more))
            places = places[:, lost]
        elif whole and "bos-missing" in found and places.shape[1] == memory.without_bos:
            places = places[:, :0]  # they go on where BOS is not expected
            found["bos-missing"].rows = 0
        _fill(one, *places)
        one.more = plural(places.shape[1], "document")
    for name, why in result.set_.meaning.weaker.items():
        if name in found:
            found[name].more = why
    if (one := found.get("underfilled")) is not None and one.rows:
        _best_fit(one, result, memory, packed=packed)


def _fill(finding: Finding, rows: Int64, places: Int64) -> None:
    """All rows, in ascending order, some more than once, and the place in each."""
    numbers, first = np.unique(rows, return_index=True)
    finding.rows, few = len(numbers), first[:_EXAMPLES]
    finding.examples = list(zip(rows[few].tolist(), places[few].tolist(), strict=True))


def _best_fit(one: Finding, result: Audit, memory: Memory, *, packed: bool) -> None:
    """How many rows best-fit needs for the documents, or for the first million of them."""
    length = int(result.habits.length or 0)
    lengths = np.concatenate(memory.lengths)
    kept = lengths[lengths <= length].astype(np.int32)
    if not packed or not len(kept):
        one.rows = 0
        return
    planned = Planner(length, "best-fit").rows(kept, 0)
    tokens = int(kept.astype(np.int64).sum())
    needed = (len(planned.row_offsets) - 1) * result.tokens / max(tokens, 1)
    saved = result.rows - needed
    if saved <= max(1.0, _MUCH_PADDING * result.rows):
        one.rows = 0
    else:
        one.more = f"best-fit needs {needed:,.0f} rows, {saved / result.rows:.1%} fewer"
