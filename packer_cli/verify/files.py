"""What a result says of itself: its manifest, its side files and the records of its units, held
against each other and against the files that are there. `Findings`: what was checked, and found.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET, to_builtins
from msgspec.structs import asdict

from packer_cli.errors import DataError, Interrupted, os_errors
from packer_cli.options.formats import format_named
from packer_cli.records import Notify
from packer_cli.result.counts import OF_TRACES, Counts
from packer_cli.result.layout import (
    INCOMPLETE,
    INDEX,
    INFO,
    MANIFEST,
    REJECTED,
    SIDE_FILES,
    STATE,
    TOKENIZER,
    UNITS,
    WORK,
    digest,
    kind_of,
    saved_dataset,
)
from packer_cli.result.manifest import (
    Manifest,
    Result,
    checksum,
    run_of_sides,
)
from packer_cli.result.wording import plural
from packer_cli.run.commits import UnitRecord, counts_of, read_units
from packer_cli.run.finalize import totals_of_documents, totals_of_rows

_SOMETIMES = {
    "unread", "dropped_length", "attention_cost", "incomplete", "dropped_documents",
    "dropped_tokens", *OF_TRACES,
}  # fmt: skip


class Remedy(NamedTuple):
    """A kind of problem, and what to do about it; {} is the command that makes such results."""

    kind: str
    tip: str


DAMAGED = Remedy(
    "a damaged result",
    "copy the directory again, or move what is damaged and {} again with --overwrite",
)
FOREIGN = Remedy(
    "foreign files", "move them elsewhere: trainers may take them for part of the result"
)
CHANGED = Remedy(
    "changed inputs",
    "restore them, or run packer {} --add on the inputs as they are now",
)
DIFFERENT = Remedy(
    "a result that differs from what its inputs and options give",
    "{} again with --overwrite; if that is not sound either, report it as a bug in packer",
)
STALE = Remedy(
    "tokenized documents that are not those of their inputs",
    "restore the inputs, or tokenize them again and pack again, both with --overwrite",
)


class Problem(NamedTuple):
    """A problem, the file that it is in, and what to do about it."""

    file: str
    problem: str
    remedy: Remedy = DAMAGED


class Findings:
    """What was checked, and all that is wrong. Threads add to it under `lock`.

    command  that made the result: pack or tokenize
    stop     set when the check is to end early
    figures  what was checked: shards, their bytes, tokens, and rows or documents. Where units were
             packed again: `documents_compared` and `inputs_compared`, which were encoded or read
             again, `units_packed_again`, and `documents_traced` of tokenized directories, encoded
             again from their own inputs
    """

    def __init__(self, command: str, notify: Notify, stop: threading.Event | None = None) -> None:
        self.command, self.notify = command, notify
        self.stop = stop or threading.Event()
        self.lock = threading.Lock()
        self.problems: list[Problem] = []
        self._held = "document" if command == "tokenize" else "row"
        self.figures: dict[str, int | None] = {
            **dict.fromkeys(("shards", "bytes", f"{self._held}s", "tokens"), 0),
            **dict.fromkeys(("documents_compared", "inputs_compared", "units_packed_again")),
        }
        if command == "tokenize":  # which is never made of tokenized directories
            self.figures["documents_traced"] = None

    def add(self, file: str, *texts: str, remedy: Remedy = DAMAGED) -> None:
        with self.lock:
            self.problems.extend(Problem(file, text, remedy) for text in texts)

    def count(self, figure: str, more: int) -> None:
        with self.lock:
            self.figures[figure] = (self.figures.get(figure) or 0) + more

    def stop_if_asked(self) -> None:
        """Raise Interrupted once `stop` is set."""
        if self.stop.is_set():
            raise Interrupted("stopped")

    def is_as_listed(
        self, name: str, path: Path | str, sha256: str, size: int | None = None,
        remedy: Remedy = DAMAGED,
    ) -> bool:  # fmt: skip
        """Whether a file is there with its digest and size; if not, that is added as a problem."""
        try:
            now = digest(path, self.stop.is_set)
            self.stop_if_asked()
            text = f"its sha256 is {now[1]}, the manifest says {sha256}"
            if size not in (None, now[0]):
                text = f"has {now[0]} bytes, the manifest says {size}"
            elif now[1] == sha256:
                return True
        except DataError as error:
            text = error.message.removeprefix(f"{path}: ")
        self.add(name, text, remedy=remedy)
        return False

    def lines(self, directory: Path) -> list[str]:
        """A line for each problem, or one that says what was checked."""
        if self.problems:
            return [f"{directory}: {one.file}: {one.problem}" for one in sorted(self.problems)]
        figures = {name: value or 0 for name, value in self.figures.items()}
        held, traced = f"{self._held}s", self.figures.get("documents_traced")
        parts = [
            f"{plural(figures['shards'], 'shard')}, {plural(figures[held], self._held)}: sound"
        ]
        if self.figures["documents_compared"] is not None:
            documents = plural(figures["documents_compared"], "document")
            inputs = plural(figures["inputs_compared"], "input")
            read = "encoded again" if traced is None else "read again"
            parts.append(f"{documents} of {inputs} {read}: the same")
        if traced:
            parts.append(
                f"{plural(traced, 'document')} encoded again from what was tokenized: the same"
            )
        if units := figures["units_packed_again"]:
            again = "tokenized" if self.command == "tokenize" else "packed"
            parts.append(f"{plural(units, 'unit')} {again} again: the same {held}")
        return [f"{directory}: {'; '.join(parts)}"]

    def tip(self) -> str:
        """What to do about every kind of problem that there is."""
        remedies = sorted({problem.remedy for problem in self.problems})
        tips = [one.tip.format(self.command) for one in remedies]
        if len(tips) == 1:
            return tips[0]
        return "; ".join(f"{one.kind}: {tip}" for one, tip in zip(remedies, tips, strict=True))

    def as_json(self) -> dict[str, Any]:
        problems = [
            {"file": one.file, "problem": one.problem, "tip": one.remedy.tip.format(self.command)}
            for one in sorted(self.problems)
        ]
        return {"ok": not problems, "problems": problems, **self.figures}


# The manifest


def check_manifest(directory: Path, facts: Result, findings: Findings) -> None:
    """Add what cannot be true, whatever the shards hold."""
    sha256, name = checksum(facts.document), INCOMPLETE if facts.incomplete else MANIFEST
    if sha256 != facts.sha256:
        text = f"was edited: its contents have the sha256 {sha256}, it says {facts.sha256}"
        findings.add(MANIFEST, text)
    if not (directory / name).is_file():
        findings.add(MANIFEST, f"is not named {name}")
    findings.add(MANIFEST, *uncovered(facts, {}))
    if isinstance(facts, Manifest):
        findings.add(MANIFEST, *_wrong_tables(facts))


def _wrong_tables(facts: Manifest) -> Iterator[str]:
    """Sources that are not those of the options, or leave out inputs."""
    amounts = facts.config.mixture.sources if facts.config.mixture else ()
    edges = list(accumulate((one.inputs for one in amounts), initial=0))
    run = run_of_sides(facts.document) if facts.side and facts.run else ""
    listed_sources = [(one.name, one.inputs) for one in facts.sources]
    sources = list(zip((one.name for one in amounts), pairwise(edges), strict=True))
    for name, listed, expected in (
        ("run", facts.run, run),
        ("sources", listed_sources, sources),
        ("inputs of sources", edges[-1], len(facts.inputs) if amounts else 0),
    ):
        if listed != expected:
            yield f"{name}: {listed!r}, {expected!r} by the rest of the manifest"
            return  # others follow from it


def uncovered(facts: Result, ends: Mapping[int, int]) -> list[str]:
    """Inputs that the slices of all units do not cover exactly once, from beginning to end.

    `ends`: how many row groups or documents inputs have, where that is known. Of a source, a
    recipe may take nothing: a small one may have no document on one side of a split.
    """
    is_mixed = isinstance(facts, Manifest) and facts.config.mixture is not None
    slices: dict[int, list[tuple[float, float]]] = {}
    for unit in facts.units:
        for file, start, stop in unit.slices:
            slices.setdefault(file, []).append((start, inf if stop is None else stop))
    wrong = []
    for index, one in enumerate(facts.inputs):
        parts = sorted(slices.get(index, []))
        if is_mixed and not parts and not one.documents:
            continue
        format_ = format_named(one.format_then(facts.config.input_format) or "jsonl")
        cut_by = format_.cut_by or "byte"
        end: float = one.size if cut_by == "byte" else ends.get(index, inf)
        if not parts and end:
            wrong.append(f"the units' slices of {one.name} are missing: no unit reads it")
        elif (at := _gap(parts, end)) is not None:
            text = f"leave out, or read twice, what begins at {cut_by} {at:.0f}"
            wrong.append(f"the units' slices of {one.name} {text}")
    return wrong


def _gap(parts: Iterable[tuple[float, float]], end: float) -> float | None:
    """Where parts first leave something out, or have it twice; None where they never do."""
    reached = 0.0
    for begin, after in parts:
        if begin != reached or after <= begin:
            return min(begin, reached)
        reached = after
    return None if inf in (end, reached) or reached == end else min(reached, end)


# Side files


def check_files(directory: Path, facts: Result, findings: Findings) -> None:
    """Check the names and digests of side files against the manifest."""
    digests, sha256 = dict(facts.side_files), facts.tokenizer_sha256
    for name in sorted(digests.keys() - SIDE_FILES):
        findings.add(MANIFEST, f"lists {name} as a side file, which packer does not write")
    for name in (STATE, INFO, UNITS):
        if name not in digests:
            findings.add(MANIFEST, f"does not list {name}, which every result has")
    if sha256 and digests.setdefault(TOKENIZER, sha256) != sha256:
        findings.add(MANIFEST, f"gives {TOKENIZER} two digests")
    if (REJECTED in digests) != bool(facts.rejected_records):
        listed = "lists" if REJECTED in digests else "does not list"
        text = f"{listed} {REJECTED}, rejected_records is {facts.rejected_records}"
        findings.add(MANIFEST, text)
    for name, expected in digests.items():
        if (directory / name).is_file():
            findings.is_as_listed(
                name, directory / name, expected, facts.side_file_bytes.get(name, 0)
            )
        else:
            findings.add(name, "is missing")
    with os_errors(directory):
        names = set(os.listdir(directory))
    own = INCOMPLETE if facts.incomplete else MANIFEST
    for name in names - {own, *digests, *(one.file for one in facts.shards)}:
        if name == WORK:
            findings.notify(
                f"{directory / name}: belongs to a run that is writing here, or that ended "
                "before it could remove it; the next packer pack to this directory removes it"
            )
        else:
            text = "a foreign file: the manifest does not list it"
            findings.add(name, text, remedy=FOREIGN)


def check_contents(directory: Path, facts: Result, findings: Findings) -> None:
    """Check what side files hold, whose digests are right, against the manifest."""
    try:
        findings.add(UNITS, *_wrong_records(directory, facts))
    except DataError as error:
        findings.add(UNITS, error.message.removeprefix(f"{directory / UNITS}: "))
    except (ValueError, OverflowError) as error:
        findings.add(UNITS, f"has a line that is not the record of a unit: {error}")
    identity = "".join(shard.sha256 for shard in facts.shards)
    files = [shard.file for shard in facts.shards if kind_of(shard.file) != INDEX]
    for name, data in saved_dataset(files, identity).items():
        if facts.side_files.get(name) != hashlib.sha256(data).hexdigest():
            findings.add(name, "is not the one that `datasets` opens the manifest's shards with")


# The records of units


def _wrong_records(directory: Path, facts: Result) -> list[str]:
    """How the records of units, which `--add` relies on, differ from what they make up: the
    units, the shards and every figure of the manifest. Raises ValueError for records that no run
    has written.
    """
    longest = facts.config.max_length if isinstance(facts, Manifest) else 0
    total = Counts(piece_length=np.zeros(longest + 1, np.int64))
    units, shards, rejected, wrong = list[Any](), list[Any](), 0, list[str]()
    for record in read_units(directory, facts):
        counts = counts_of(record)
        if len(counts.piece_length) > longest + 1:
            raise ValueError("pieces that are longer than a row")
        wrong += [f"unit {record.unit}: {text}" for text in _wrong_record(record, facts)]
        total.add(counts)
        units.append((record.unit, [part[:3] for part in record.slices]))
        shards += record.shards
        rejected += record.rejected
    numbers = [number for number, _ in units]
    size = os.path.getsize(directory / REJECTED) if REJECTED in facts.side_files else 0
    are_others = {
        f"its {len(units)} units are not the {len(facts.units)} in the manifest":
            units != [(one.unit, one.slices) for one in facts.units],
        "its units are not in order": sorted({*numbers}) != numbers,
        "its shards are not those in the manifest": shards != facts.shards,
        f"encoded_tokens is {total.encoded_tokens} in all units, other than their sums":
            not total.conserved(),
        f"{rejected} bytes of rejected records in all units, {REJECTED} has {size}":
            rejected != size,
    }  # fmt: skip
    return [
        *wrong,
        *(text for text, is_so in are_others.items() if is_so),
        *(f"{name}: {value} in all units, {listed} in the manifest"
          for name, value, listed in other_figures(facts, total)),
    ]  # fmt: skip


def _wrong_record(record: UnitRecord, facts: Result) -> Iterator[str]:
    """How a record is none of a finished result with these inputs and this tokenizer."""
    if any(part[0] >= len(facts.inputs) for part in record.slices):
        yield "has a slice of an input that is not among the inputs"
    if record.reused or record.rejected_from or record.rejected < 0:
        yield "is not the record of a finished result"
    ours, theirs = record.tokenizer or {}, facts.document["tokenizer"] or {}
    # earlier packers wrote less, and an update keeps their units
    names = ours.keys() & theirs.keys()
    if bool(ours) != bool(theirs) or any(ours[name] != theirs[name] for name in names):
        yield "its tokenizer is not that in the manifest"


def other_figures(
    facts: Result, total: Counts, names: Collection[str] | None = None
) -> Iterator[tuple[str, Any, Any]]:
    """(name, value by the counts, value in the manifest) of every figure that a run writes, or only
    of those with such `names`, where they differ.
    """
    if isinstance(facts, Manifest):
        made = totals_of_rows(facts.config, total)
    else:
        made = totals_of_documents(total)
    histograms = made.pop("histograms")
    values, listed = made | histograms, asdict(facts) | asdict(facts.histograms)
    for name in sorted(values.keys() | _SOMETIMES if names is None else names):
        value, own = values.get(name), listed.get(name)
        own = None if own is UNSET else to_builtins(own)
        is_uncounted = not own and name in histograms  # by an earlier packer
        if (value or None) != (own or None) and not is_uncounted:
            yield name, value, own
    for index, one in enumerate(facts.inputs if names is None or total.files else ()):
        for name in facts.counted_by_input if names is None else ("documents", "tokens"):
            if (value := getattr(total.file(index), name)) != getattr(one, name):
                yield f"{name} of {one.name}", value, getattr(one, name)
