"""`packer verify`: a result checked against its manifest and its inputs.

    files     the manifest, names and digests, what side files say
    shards    digests, the rules of every row or document, figures counted again; on threads
    again     units packed again from their inputs, if all of that is sound

Whatever is wrong becomes a `Problem`, one for each rule that a file breaks; only an unusable
manifest raises an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from packer_cli.errors import DataError
from packer_cli.interrupts import run_all
from packer_cli.progress import Progress
from packer_cli.records import Notify
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import (
    Manifest,
    TokenizedManifest,
    load_any,
    replaced,
)
from packer_cli.result.opening import Paths, opened
from packer_cli.result.reader import Stored
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.run.destination import is_replacing
from packer_cli.run.identity import refuse_other_packer
from packer_cli.verify.files import (
    Findings,
    Problem,
    check_contents,
    check_files,
    check_manifest,
)
from packer_cli.verify.shards import Checks, DocumentChecks, RowChecks

__all__ = ["Findings", "Problem", "recount", "verify"]


def verify(
    directory: Path,
    *,
    workers: int,
    show_progress: bool,
    against_inputs: bool = False,
    sample: int | None = None,
    seed: int = 0,
    tokens: Paths | None = None,
    notify: Notify = lambda message: None,
) -> Findings:
    """Check a finished directory, and with `against_inputs` pack its units again.

    `sample`: how many documents these units must have; None packs every unit again. Inputs are only
    compared with a result that is sound by itself. `tokens`: as in `open_packed`. Raises DataError
    when there is no usable manifest, or a view's tokenized directories are not there; UsageError
    with `against_inputs` for a result of another version.
    """
    facts = load_any(directory, incomplete_too=True)
    stored, checks = _opened(directory, facts, tokens)
    if against_inputs:
        then = facts.packer_version
        tip = f"verify it without --against-inputs, or with packer {then}; packer pack --overwrite "
        refuse_other_packer(directory, then, f"{tip}packs it again")
    findings = Findings(facts.command, notify)
    if facts.incomplete:
        notify(f"{directory} is marked incomplete: {facts.incomplete}")
    check_manifest(directory, facts, findings)
    check_files(directory, facts, findings)
    total = sum(shard.bytes for shard in facts.shards)
    with Progress(total, show=show_progress, doing="verifying") as progress:
        check = checks(findings, progress)
        units = (partial(check.check_unit, unit) for unit in facts.shards_of_units())
        run_all(units, workers, findings.stop)
        check.check_totals()
    if not findings.problems:  # or every wrong figure would be reported twice
        check_contents(directory, facts, findings)
    if against_inputs and findings.problems:
        notify("not compared with the inputs: the result itself has problems")
    elif against_inputs:
        from packer_cli.verify.again import compare_inputs  # noqa: PLC0415 needs a tokenizer

        if show_progress and sys.stderr.isatty():  # a full bar looks like the end
            notify("the result itself is sound; packing units of it again")
        compare_inputs(stored, findings, workers, sample, seed)
    if findings.problems:  # which may be those of a mix of two results
        if error := replaced(directory, facts):
            raise error
        if is_replacing(directory):
            raise DataError(
                f"{directory}: another result is being put in its place, or that was interrupted",
                f"run the packer {facts.command} that was interrupted again, then verify",
            )
    return findings


def recount(directory: Path, tokens: Paths | None = None) -> None:
    """Count the figures of a result again from its shards, whose bytes are not compared with their
    digests. Raises DataError that names every rule that is broken, or every figure in which shards
    and manifest differ. `tokens`: as in `open_packed`.
    """
    facts = load_any(directory, incomplete_too=True)
    findings = Findings(facts.command, lambda message: None)
    check = _opened(directory, facts, tokens)[1](findings, Progress(0, show=False), bytes_too=False)
    for unit in facts.shards_of_units():
        check.check_unit(unit)
    check.check_totals()
    if not findings.problems:
        return
    of_shards = [f"{directory / one.file}: {one.problem}" for one in findings.problems]
    texts = "; ".join(one.problem for one in findings.problems)
    if findings.problems[0].file == MANIFEST:
        of_shards = [f"{directory}: the shards and the manifest differ: {texts}"]
    raise DataError("; ".join(of_shards), findings.tip())


def _opened(
    directory: Path, facts: Manifest | TokenizedManifest, tokens: Paths | None
) -> tuple[Stored, Callable[..., Checks]]:
    """The rows or documents of a result, and what checks these."""
    if isinstance(facts, Manifest):
        packed = opened(directory, facts, tokens)
        return packed, partial(RowChecks, packed)
    tokenized = TokenizedDirectory(directory, facts)
    return tokenized, partial(DocumentChecks, tokenized)
