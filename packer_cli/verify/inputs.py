"""`packer verify --against-inputs`: documents read and encoded again, then compared.

    a sample       documents that rows name, and records drawn from the inputs: both must agree
    --sample all   every unit is packed again: documents, plan, counts, rejected records

Readers, templates and policies are those of a run, so an error that they repeat goes unnoticed;
whatever was lost, moved or changed since is noticed. The reference engine's offsets, which a run
hardly uses, show what is trained on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial

import packer_cli
from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape, joined, shape_named
from packer_cli.errors import PackerError, UsageError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.detection import detect_shape
from packer_cli.inputs.formats import documents_of, groups_of
from packer_cli.inputs.input_files import input_file
from packer_cli.mixing.units import work_units
from packer_cli.records import InputFile, Int64, Notify
from packer_cli.result.layout import MANIFEST, REJECTED, TEMPLATE, TOOL_TEMPLATE
from packer_cli.result.manifest import TOKENIZED, Input, Manifest, Result
from packer_cli.result.manifest_check import document_config_of, shape_of
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shards import digest
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.run.encoder import source_again
from packer_cli.run.finalize import tables_of
from packer_cli.run.source import framed_for
from packer_cli.threads import built, run_all
from packer_cli.verify.comparison import Comparison
from packer_cli.verify.drawing import draws, shares
from packer_cli.verify.findings import CHANGED, DIFFERENT, STALE, Findings
from packer_cli.verify.kept_tokenizer import kept_tokenizer, other_tokenizer
from packer_cli.verify.manifest import left_out, unshaped
from packer_cli.verify.reading import Stored, is_file, lines_of, path_of
from packer_cli.verify.tokenized_inputs import TokenizedComparison, changed_shards

_TOO_SLOW = re.compile(
    rb"takes more than ([0-9]{1,6}(?:\.[0-9]{1,9})?) s \(--max-seconds-per-record\)"
)


def compare_inputs(
    stored: PackedDirectory | TokenizedDirectory,
    config: DocumentConfig,
    findings: Findings,
    workers: int,
    sample: int | None,
    seed: int,
    stop: threading.Event,
    notify: Notify,
) -> None:
    """Add to `findings` every input that changed, and every document that differs."""
    manifest = stored.facts
    built(DocumentConfig)  # of tokenized directories, which threads open
    files = _unchanged(stored, config, findings, workers, stop, notify)
    findings.documents_compared, findings.inputs_compared = 0, len(files)
    if not files:
        return
    if isinstance(manifest, Manifest) and isinstance(config, PackConfig) and config.mixture:
        if len(files) < len(manifest.inputs_now):
            return  # what is taken of one source depends on all of them
        _check_units(manifest, config, files, findings)
        if findings.problems:
            return
    else:
        _check_ends(manifest, files, findings)
    documents = sum(manifest.inputs[file].documents for file in files)
    everything = sample is None or sample >= documents
    if isinstance(config, PackConfig) and "segments" not in config.columns and not everything:
        notify(
            "documents are not compared: the column segments was not written, so a sample of them "
            "cannot be found in the rows; --sample all compares whole units"
        )
        return
    if isinstance(stored, PackedDirectory) and _are_tokenized(files):
        again = TokenizedComparison(stored, files, findings, stop)
        if not findings.problems:
            run_all(_tasks(again, manifest, files, sample, seed, everything), workers, stop)
        for index in files if not findings.problems else ():
            numbers = None if everything else again.compared(index)
            _trace(again.directory(index), numbers, findings, workers, stop, notify)
        return

    def tasks(comparison: Comparison) -> Iterator[Callable[[], None]]:
        return _tasks(comparison, manifest, files, sample, seed, everything)

    _encode_again(stored, config, files, findings, workers, stop, tasks, fast=sample is None)


def _are_tokenized(files: dict[int, InputFile]) -> bool:
    return any(file.format == TOKENIZED for file in files.values())


def _tasks(
    comparison: Comparison,
    manifest: Result,
    files: dict[int, InputFile],
    sample: int | None,
    seed: int,
    everything: bool,
) -> Iterator[Callable[[], None]]:
    if everything:
        return comparison.of_everything()
    wanted = shares(manifest, set(files), sample or 0, seed)
    drawn = draws(manifest, set(files), wanted, sample or 0, seed)
    return comparison.of_sample(wanted, drawn, seed)


def _encode_again(
    stored: PackedDirectory | TokenizedDirectory,
    config: DocumentConfig,
    files: dict[int, InputFile],
    findings: Findings,
    workers: int,
    stop: threading.Event,
    tasks: Callable[[Comparison], Iterator[Callable[[], None]]],
    *,
    fast: bool,
) -> None:
    """Run `tasks` with the tokenizer of the result and the reader of its inputs."""
    manifest, tokenizer, info = stored.facts, None, None
    try:
        files, shape = _with_shapes(manifest, files, config, findings)
        tokenizer, tokenizer_files = kept_tokenizer(stored, shape, config, fast=fast)
        if tokenizer:
            info = framed_for(tokenizer, config, shape)[1]
    except PackerError as error:
        findings.add(MANIFEST, f"config: {error.message}", remedy=DIFFERENT)
        return
    findings.add(MANIFEST, *other_tokenizer(manifest, info), remedy=DIFFERENT)
    if findings.problems:
        if tokenizer:
            tokenizer.close()
        return
    with closing(tokenizer) if tokenizer else nullcontext():
        used, limit = _with_its_template(stored, config), _limit_of_time(stored)
        try:
            source = source_again(shape, used, tokenizer, tokenizer_files, limit)
        except UsageError as error:  # its options were never those of a run with this tokenizer
            findings.add(MANIFEST, f"damaged: config: {error.message}", remedy=DIFFERENT)
            return
        comparison = Comparison(stored, config, shape, source.encode, files, findings, stop)
        with closing(source):
            run_all(tasks(comparison), workers, stop, source.stop)
        if tokenizer:
            tokenizer.finish()


def _with_shapes(
    manifest: Result, files: dict[int, InputFile], config: DocumentConfig, findings: Findings
) -> tuple[dict[int, InputFile], Shape]:
    """The files with the shapes of their records, which are compared with those in the manifest."""
    recorded = shape_of(manifest)
    some, shape = detect_shape(list(files.values()), config)
    if not recorded.members:
        findings.add(MANIFEST, *unshaped(config, shape), remedy=DIFFERENT)
        return {file.index: file for file in some}, shape
    if not shape.members:  # all that are left of the files have one shape
        some = [replace(file, shape=shape.described()) for file in some]
        shape = joined({shape.described(): shape})
    for file in some:
        kind, then = shape.of(file.shape).kind, shape_named(manifest.inputs[file.index].shape or "")
        if kind != then.kind:
            text = f"its records are {kind}, {then.kind} in the manifest"
            findings.add(file.path, text, remedy=DIFFERENT)
    return {file.index: file for file in some}, shape


def _trace(
    tokenized: TokenizedDirectory,
    numbers: Int64 | None,
    findings: Findings,
    workers: int,
    stop: threading.Event,
    notify: Notify,
) -> None:
    """Compare documents of a tokenized directory with its own inputs, as far as they are there.

    `numbers`: of the documents, ascending; None: all.
    """
    own, version = Findings(), tokenized.facts.packer_version
    if version != packer_cli.__version__:
        notify(
            f"{tokenized.path}: was tokenized by packer {version}, so its documents are not "
            "compared with its inputs; packer tokenize --overwrite tokenizes them again"
        )
        return
    try:
        config = document_config_of(tokenized.facts)
    except ValueError as error:
        findings.add(str(tokenized.path / MANIFEST), f"damaged: config: {error}", remedy=STALE)
        return
    gone = {i: one.path for i, one in tokenized.facts.inputs_now.items()
            if one.path != STDIN and storage.kind(one.path) is None}  # fmt: skip
    if gone:
        first, more = next(iter(gone.values())), len(gone) - 1
        rest = f" and {more} more inputs are" if more else " is"
        notify(f"{first}{rest} not there: documents of {tokenized.path} are not compared with it")
    files = _unchanged(tokenized, config, own, workers, stop, notify, without=gone)
    if files and not own.problems:

        def tasks(comparison: Comparison) -> Iterator[Callable[[], None]]:
            if numbers is None:
                return comparison.of_everything()
            return comparison.of_numbers(numbers)

        _encode_again(tokenized, config, files, own, workers, stop, tasks, fast=numbers is None)
        findings.count("documents_traced", own.documents_compared or 0)
    for problem in own.problems:
        text = f"{problem.file}: {problem.problem}"
        findings.add(str(tokenized.path), text, remedy=STALE)


def _with_its_template(stored: Stored, config: DocumentConfig) -> DocumentConfig:
    """`config` with the template in the result; where it has two, they are its tokenizer's own."""
    alone = is_file(stored, TEMPLATE) and not is_file(stored, TOOL_TEMPLATE)
    return replace(config, chat_template=str(path_of(stored, TEMPLATE)) if alone else None)


def _limit_of_time(stored: Stored) -> float | None:
    """The run's --max-seconds-per-record, which only its rejected records show."""
    if REJECTED not in stored.facts.side_files:
        return None
    with suppress(PackerError):
        for line in lines_of(stored, REJECTED):
            if match := _TOO_SLOW.search(line):
                return float(match[1])
    return None


def _unchanged(
    stored: Stored,
    config: DocumentConfig,
    findings: Findings,
    workers: int,
    stop: threading.Event,
    notify: Notify,
    without: Container[int] = (),
) -> dict[int, InputFile]:
    """The inputs that have not changed; the others become problems."""
    files: dict[int, InputFile] = {}

    def check(index: int, packed_then: Input) -> None:
        path = packed_then.path
        try:
            file = input_file(index, path, config)
            size, sha256 = file.size, packed_then.sha256
            if size == packed_then.size:
                size, sha256 = digest(path, stop.is_set)
        except PackerError as error:
            text = f"an input: {error.message.removeprefix(f'{path}: ')}"
            findings.add(path, text, remedy=CHANGED)
            return
        if size != packed_then.size:
            text = f"has {size} bytes, it had {packed_then.size} when it was packed"
        elif sha256 != packed_then.sha256:
            text = f"its sha256 is {sha256}, it was {packed_then.sha256} when it was packed"
        else:
            if file.format == TOKENIZED and changed_shards(file, findings, stop):
                return
            files[index] = file
            return
        findings.add(path, text, remedy=CHANGED)

    inputs = {i: one for i, one in stored.facts.inputs_now.items() if i not in without}
    if any(one.path == STDIN for one in inputs.values()):
        notify("-: came from stdin, which cannot be read again: not compared")
    again = (partial(check, *one) for one in inputs.items() if one[1].path != STDIN)
    run_all(again, workers, stop)
    return dict(sorted(files.items()))


def _check_units(
    manifest: Manifest, config: PackConfig, files: dict[int, InputFile], findings: Findings
) -> None:
    """Whether the units of a recipe's result take what the recipe says, and its tables say so."""
    text = "units: are not those that the recipe gives for these tokenized directories"
    try:
        expected = [
            (unit.index, [(part.file, part.start, part.stop) for part in unit.slices])
            for unit in work_units(list(files.values()), config)
        ]
        if expected == [(unit.unit, unit.slices) for unit in manifest.units]:
            tables = tables_of(list(files.values()), config, manifest.shards)
            wrong = [name for name, table in tables.items()  # earlier packers have fewer
                     if name in manifest.document and getattr(manifest, name) != table]  # fmt: skip
            if not wrong:
                return
            text = f"{' and '.join(wrong)}: are not those of what the recipe takes"
    except PackerError as error:
        text = error.message
    findings.add(MANIFEST, text, remedy=DIFFERENT)


def _check_ends(manifest: Result, files: dict[int, InputFile], findings: Findings) -> None:
    """Whether slices that count row groups or documents go on to the last one."""
    for index, file in files.items():
        text = ""
        try:
            if (groups := groups_of(file)) is not None:
                text = left_out(manifest, index, len(groups), "row group")
            elif (documents := documents_of(file)) is not None:
                text = left_out(manifest, index, documents.count, "document")
        except PackerError as error:
            text = "" if manifest.inputs[index].rejected_files else error.message
        findings.add(file.path, *([text] if text else []), remedy=DIFFERENT)
