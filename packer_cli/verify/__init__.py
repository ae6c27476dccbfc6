"""`packer verify`: a result checked against its manifest and its inputs.

    files and manifest     digests, names, figures that must agree, slices that cover the inputs
    shards                 every row once, on threads
    records                what the side files say, if all of that is sound
    inputs                 documents read and encoded again, if that is sound, too

Whatever is wrong becomes a `Problem`, one for each rule that a file breaks; only an unusable
manifest raises an error.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

import packer_cli
from packer_cli.config.documents import DocumentConfig
from packer_cli.errors import DataError, UsageError
from packer_cli.progress import Progress
from packer_cli.records import Notify
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import Manifest, Result
from packer_cli.result.manifest_check import config_of, document_config_of
from packer_cli.result.manifest_file import load_any
from packer_cli.result.opening import Paths, opened
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.run.directory import is_replacing
from packer_cli.threads import run_all
from packer_cli.verify.document_shards import DocumentChecks
from packer_cli.verify.files import check_contents, check_files
from packer_cli.verify.findings import Findings, Problem
from packer_cli.verify.manifest import check_manifest
from packer_cli.verify.reading import Stored
from packer_cli.verify.shards import ShardChecks
from packer_cli.verify.unit_records import check_unit_records

__all__ = ["Findings", "Problem", "verify"]


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
    """Check a finished directory, and with `against_inputs` documents against their inputs.

    `sample`: how many documents to compare; None packs every unit again. Inputs are only
    compared with a result that is sound by itself. `tokens`: as in `open_packed`. Raises DataError
    when there is no usable manifest, or a view's tokenized directories are not there; UsageError
    with `against_inputs` for a result of another version.
    """
    manifest = load_any(directory, incomplete_too=True)
    stored = (
        opened(directory, manifest, tokens)
        if isinstance(manifest, Manifest)
        else TokenizedDirectory(directory, manifest)
    )
    config = _config_of(directory, manifest)
    if against_inputs:
        refuse_other_packer(directory, manifest)
    findings, stop = Findings(), threading.Event()
    if not isinstance(manifest, Manifest):
        findings.command = "tokenize"
    if manifest.incomplete:
        notify(f"{directory} is marked incomplete: {manifest.incomplete}")
    check_manifest(stored, config, findings)
    check_files(stored, findings, notify)
    total = sum(shard.bytes for shard in manifest.shards)
    with Progress(total, show=show_progress, doing="verifying") as progress:
        checks = (
            ShardChecks(stored, config_of(stored.facts), findings, progress, stop)
            if isinstance(stored, PackedDirectory)
            else DocumentChecks(stored, findings, progress, stop)
        )
        run_all(
            (partial(checks.check_unit, unit) for unit in manifest.shards_of_units()), workers, stop
        )
        checks.check_totals()
    if not findings.problems:  # or every wrong figure would be reported twice
        check_contents(stored, findings)
        check_unit_records(stored, findings)
    if against_inputs and findings.problems:
        notify("not compared with the inputs: the result itself has problems")
    elif against_inputs:
        from packer_cli.verify.inputs import compare_inputs  # noqa: PLC0415 needs a tokenizer

        if show_progress and sys.stderr.isatty():  # a full bar looks like the end
            notify("the result itself is sound; encoding documents of its inputs again")
        compare_inputs(stored, config, findings, workers, sample, seed, stop, notify)
    if findings.problems:
        _raise_if_replaced(stored, findings.command)
    return findings


def refuse_other_packer(directory: Path, manifest: Result) -> None:
    """UsageError for a result of another version, which may make others of the same inputs."""
    then, now = manifest.packer_version, str(packer_cli.__version__)
    if then != now:
        raise UsageError(
            f"{directory}: was packed by packer {then}, and packer {now} may make other documents "
            "and rows of the same inputs",
            f"verify it without --against-inputs, or with packer {then}; packer pack --overwrite "
            "packs it again",
        )


def _config_of(directory: Path, manifest: Result) -> DocumentConfig:
    try:
        return (
            config_of(manifest) if isinstance(manifest, Manifest) else document_config_of(manifest)
        )
    except ValueError as error:
        raise DataError(
            f"{directory / MANIFEST}: damaged: config: {error}", "pack the data again"
        ) from error


def _raise_if_replaced(stored: Stored, command: str) -> None:
    """Raise DataError if the problems may be those of a mix of two results."""
    try:
        now = load_any(stored.path, incomplete_too=True, half_too=True).sha256
    except DataError:
        now = stored.facts.sha256
    if now != stored.facts.sha256:
        raise DataError(
            f"{stored.path}: was replaced by another result while it was read", "read it again"
        )
    if is_replacing(stored.path):
        raise DataError(
            f"{stored.path}: another result is being put in its place, or that was interrupted",
            f"run the packer {command} that was interrupted again, then verify",
        )
