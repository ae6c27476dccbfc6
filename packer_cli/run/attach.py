"""`packer tokenize OUT --attach FILES`: the documents of a tokenized directory, written anew with
values that a job wrote for them.

    attachment_of(...) -> Run    of the directory's own inputs, options and units, and the files
    earlier_documents(run)       what a unit reads: its documents as they are in the directory
    Attaching                    adds the values to documents, wherever these come from

The result says what the directory said, of the same inputs and units, so that all that reads a
tokenized directory goes on working; its manifest names the files, too. `packer verify` tokenizes
the inputs again and attaches the values to what that gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli.errors import DataError, UsageError, named
from packer_cli.inputs.attached import WAYS, Attached, AttachedValues, attached_of, matched_by
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.token_columns import batches_of
from packer_cli.inputs.tokenized import opened
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_of
from packer_cli.options.run_options import EncodingOptions
from packer_cli.records import InputFile, Int64, TokenBatch, Values, WorkUnit, offsets_of
from packer_cli.result.carried import check_defaults, default_of, fields_of, row_type, together
from packer_cli.result.counts import Counts
from packer_cli.result.layout import digest
from packer_cli.result.manifest import (
    TOKENIZED,
    Result,
    TokenizedManifest,
    shape_of,
)
from packer_cli.result.tokenized import TokenizedDirectory, Tokens
from packer_cli.result.wording import plural
from packer_cli.run.commits import UnitRecord, counts_of, load_identities, placed_units, rejected_of
from packer_cli.run.identity import Attachment, Chosen, Run, refuse_other_packer

Bool = npt.NDArray[np.bool_]


def settle_attachment(
    file: InputFile,
    found: Sequence[InputFile],
    missing: str,
    config: DocumentConfig,
    chosen: Chosen,
    options: EncodingOptions,
) -> Run:
    """The run that writes the documents of a tokenized directory, which `file` is, anew: of its own
    inputs, options and units, with the values of the files that are `found`.

    `missing`: as --carry-missing says; `config`: as given; `chosen`: the directory's tokenizer.
    Raises UsageError for what cannot be attached to it, DataError where documents lack values that
    may not, or all do.
    """
    directory = opened(file)
    facts, then = directory.facts, directory.facts.packer_version
    _refuse_other_columns(directory, config)
    tip = f"tokenize it again, or attach with packer {then}"
    refuse_other_packer(directory.path, then, tip)
    if other := [one.path for one in found if one.format != "parquet"]:
        raise UsageError(f"--attach: {other[0]} is not Parquet", "write the values as Parquet")
    first = len(facts.inputs)
    files = tuple(replace(one, index=first + 1 + number) for number, one in enumerate(found))
    by, columns = matched_by(files[0], [*config.carried.values()])
    carry = tuple(map(str, columns))
    _refuse_defaults(config)
    attached = attached_of(files, carry, by, directory.has_pairs)
    without = _without(file, attached, missing, options)
    attachment = Attachment(replace(file, index=first), files, carry, by, *without)
    earlier = facts.config
    its = replace(
        earlier,
        carry=(*earlier.carry, *carry),
        carry_default=(*earlier.carry_default, *config.carry_default),
    )
    units = EarlierDocuments(directory).units
    return Run(its, shape_of(facts), _inputs_then(directory), units, chosen, attachment)


def _without(
    file: InputFile, attached: Attached, missing: str, options: EncodingOptions
) -> tuple[int, int]:
    """How many documents of a directory have no values, and how many rows belong to no document.
    Raises DataError where `missing` says so, or no document has any.
    """
    directory = opened(file)
    at = attached.find(attached.keys_in(directory))
    lost, matched = np.flatnonzero(at < 0), np.zeros(len(attached.row), bool)
    matched[at[at >= 0]] = True
    what, there = " and ".join(WAYS[attached.by].columns), len(directory) - len(lost)
    repeated = ""
    if more := attached.rows - len(attached.row):
        repeated = f"; {plural(more, 'row')} of the same content as an earlier one, which counts"
    options.notify(
        f"{directory.path}: {plural(attached.rows, 'row')} in "
        f"{named([one.path for one in attached.files], 3)}, matched by {what}: "
        f"{plural(there, 'document')} of {len(directory):,} found{repeated}"
    )
    if not there or (len(lost) and missing == "error"):
        lack = f"{plural(len(lost), 'document lacks', 'documents lack')} them"
        raise DataError(
            f"{directory.path}, {reader_for(TOKENIZED).describe(file, int(lost[0]))}: has no "
            f"values in the attached files, by {what}; {lack if there else 'nor has any other'}",
            "write values for all documents of this directory: see docs/carried.md",
        )
    return len(lost), attached.rows - int(attached.copies[matched].sum())


def has_attached(
    facts: Result, files: Sequence[InputFile], missing: str, config: DocumentConfig
) -> bool:
    """Whether a result has the values of these files, as these options give them."""
    its = facts.attached if isinstance(facts, TokenizedManifest) else None
    if its is None or [*config.carried] != its.columns:
        return False
    if missing == "error" and its.documents_without:
        return False
    for name, then in facts.config.carried.items():
        now = config.carried.get(name, then)
        if replace(now, of=now.of or then.of) != then:
            return False
    if [one for one in facts.config.carry_default if one[0] in its.columns] != [
        *config.carry_default
    ]:
        return False
    if [one.size for one in files] != [one.size for one in its.files]:
        return False
    return [digest(one.path)[1] for one in files] == [one.sha256 for one in its.files]


def _refuse_other_columns(directory: TokenizedDirectory, config: DocumentConfig) -> None:
    """UsageError for columns that cannot be attached to a tokenized directory."""
    if not config.carry:
        raise UsageError(
            "--attach needs --carry", "name the columns of the files: --carry NAME:TYPE"
        )
    if its := directory.facts.attached:
        raise UsageError(
            f"{directory.path}: has attached values already: {named(its.columns)}",
            "attach all files at once, with -o, to a directory without: the records tokenized "
            "again",
        )
    if both := [name for name in config.carried if name in directory.carried]:
        raise UsageError(
            f"{directory.path}: carries {both[0]} already", "leave it out, or rename the column"
        )


def _refuse_defaults(config: DocumentConfig) -> None:
    """UsageError for defaults that no document can have."""
    check_defaults(config.carried, config.carry_default)
    if config.carry_default and (bare := config.carried.keys() - {*dict(config.carry_default)}):
        raise UsageError(
            f"--carry-default: {named(sorted(bare))} has none, so documents without values would "
            "be left out all the same",
            "give each attached column a default, or none of them",
        )


def _inputs_then(directory: TokenizedDirectory) -> tuple[InputFile, ...]:
    """The inputs of a tokenized directory as they were when it was made; none of them is read."""
    facts, made = directory.facts, list[InputFile]()
    known = {one.index: one for one in load_identities(directory.path, facts.inputs)}
    for index, one in enumerate(facts.inputs):
        its = known.get(index) or InputFile(index, one.path, "", None, one.size, 0)
        kind = one.format_then(facts.config.input_format) or "jsonl"
        kind = "" if one.removed else kind
        made.append(replace(its, format=kind, compression=format_of(one.path)[1], shape=one.shape))
    return tuple(made)


class EarlierDocuments:
    """The documents of a tokenized directory, by the units that made them. Threads may share it."""

    def __init__(self, directory: TokenizedDirectory) -> None:
        self._directory = directory
        self._tokens = Tokens({0: directory}, directory.carried.values())
        records = placed_units(directory.path, directory.facts)
        self._records = {record.unit: record for record in records}

    @property
    def units(self) -> tuple[WorkUnit, ...]:
        return tuple(record.work_unit for record in self._records.values())

    @cached_property
    def firsts(self) -> dict[int, int]:
        """The number of the first document of each unit."""
        return firsts_of(self._records.values())

    def counts(self, unit: int) -> Counts:
        """The counts of a unit, but for those of documents, which are counted as they are read."""
        counts = counts_of(self._records[unit])
        counts.encoded_tokens -= counts.tokens
        counts.documents = counts.tokens = 0
        counts.document_length[:] = 0
        for totals in counts.files.values():
            totals.documents = totals.tokens = 0
        return counts

    def rejected(self, unit: int) -> bytes:
        """The lines of bad records of a unit."""
        return rejected_of(self._directory.path, self._records[unit])

    def read(self, unit: int) -> Iterator[TokenBatch]:
        """The documents of a unit, in their order, with what they carry."""
        first, count = self.firsts[unit], self._records[unit].counts.get("documents", 0)
        lengths = self._directory.lengths[first : first + count]
        file, position = self._directory.places(np.arange(first, first + count))
        chosen = self._directory.chosen if self._directory.has_pairs else None
        for begin, end in batches_of(lengths):
            number, length = np.arange(first + begin, first + end), lengths[begin:end]
            start = np.zeros_like(length)
            yield TokenBatch(
                self._tokens.gather(np.zeros_like(number), number, start, length),
                offsets_of(length),
                self._tokens.trained_of(number, start, length),
                file[begin:end].astype(np.int32),
                position[begin:end],
                None if chosen is None else chosen[number],
                carried=self._tokens.carried_of(number, start, length),
            )


def firsts_of(records: Iterable[UnitRecord]) -> dict[int, int]:
    """The number of the first document of each unit, as they were before any was left out."""
    firsts, number = dict[int, int](), 0
    for record in records:
        firsts[record.unit] = number
        number += record.counts.get("documents", 0) + record.counts.get("dropped_documents", 0)
    return firsts


@dataclass(frozen=True)
class Attaching:
    """Adds values to the documents of units, wherever these come from.

    attached  finds the values
    config    with all that documents carry
    firsts    the number of the first document of each unit
    """

    attached: Attached
    config: DocumentConfig
    firsts: Mapping[int, int]

    def of_unit(self, unit: int) -> UnitValues:
        return UnitValues(self, self.firsts[unit])

    @cached_property
    def defaults(self) -> dict[str, Any] | None:
        """The value of each column that documents without a match have; None: they are left out."""
        names, given = self.attached.names, dict(self.config.carry_default)
        if not given.keys() >= {*names}:
            return None
        return {name: default_of(self.config.carried[name], given[name]) for name in names}


class UnitValues:
    """Adds values to the documents of a unit, batch after batch; for one thread."""

    def __init__(self, attaching: Attaching, first: int) -> None:
        self._attaching, self._next = attaching, first
        self._values = AttachedValues(attaching.attached)

    def parts(self, batch: TokenBatch) -> Iterator[tuple[TokenBatch, Bool]]:
        """The documents of a batch with their values, some at a time, and bool[n] which of these
        stay: all but those that have no values, and no defaults.

        Raises DataError as `AttachedValues.of`.
        """
        attached, lengths = self._attaching.attached, np.diff(batch.offsets)
        there = lengths > 0  # others have no number
        numbers = self._next + np.cumsum(there) - 1
        self._next += int(there.sum())
        found = attached.find(attached.keys_of(batch, numbers))
        found[~there] = -1
        width = row_type([*self._attaching.config.carried.values()]).itemsize
        for begin, end in batches_of(lengths, width):
            part = _part(batch, begin, end)
            its = found[begin:end]
            carried = self._carried(part, its)
            stays = (its >= 0) | ~there[begin:end] | (self._attaching.defaults is not None)
            yield replace(part, carried=carried), stays

    def _carried(self, part: TokenBatch, found: Int64) -> Values | None:
        """What follows the tokens of documents, with what did so before."""
        columns, attached = self._attaching.config.carried, self._attaching.attached
        if not attached.names:
            return part.carried
        lengths = np.diff(part.offsets)
        values = self._values.of(found, lengths)
        if self._attaching.defaults is not None:
            lacks = np.repeat(found < 0, lengths)
            for name, default in self._attaching.defaults.items():
                values[name][lacks] = default
        if part.carried is None:
            return together(values)
        before = [one for name, one in columns.items() if name not in attached.names]
        earlier = fields_of(part.carried, before)
        every = np.empty(len(values), row_type([*columns.values()]))
        for name in columns:
            every[name] = values[name] if name in attached.names else earlier[name]
        return together(every)


def _part(batch: TokenBatch, begin: int, end: int) -> TokenBatch:
    """Some documents of a batch. What is trained on is told of each token, so that documents are
    the same bytes whatever others are read with them.
    """
    tokens = slice(batch.offsets[begin], batch.offsets[end])
    ids = batch.ids[tokens]
    return replace(
        batch,
        ids=ids,
        offsets=batch.offsets[begin : end + 1] - batch.offsets[begin],
        trained=np.ones(len(ids), np.uint8) if batch.trained is None else batch.trained[tokens],
        file=batch.file[begin:end],
        position=batch.position[begin:end],
        chosen=None if batch.chosen is None else batch.chosen[begin:end],
        carried=None if batch.carried is None else batch.carried[tokens],
    )
