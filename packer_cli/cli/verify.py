"""`packer verify`: check a result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from packer_cli.cli.reports import LOCAL_ONLY, Directory, ViewOptions, notes
from packer_cli.errors import DataError, UsageError, one_line
from packer_cli.options.option import COUNT_OR_ALL, whole
from packer_cli.options.run_options import EncodingOptions, ProgressOptions, Workers


@dataclass(frozen=True)
class VerifyOptions(ViewOptions, ProgressOptions):
    against_inputs: Annotated[
        bool, Option(help="Also pack units again from their inputs, and compare.")
    ] = False
    sample: Annotated[
        int,
        COUNT_OR_ALL,
        Option(help="How many documents the units have that are packed again; all: every unit is."),
    ] = 1000
    seed: Annotated[int, whole(0), Option(help="Seed of the sample.")] = 0


def verify(
    name: Directory,
    inputs: Annotated[
        list[str] | None,
        Argument(
            metavar="INPUT",
            help="With --against-inputs: inputs that have moved, or need credentials.",
        ),
    ] = None,
    *,
    options: VerifyOptions,
    pool: Workers,
) -> None:
    """Check a result: digests, rows or documents, figures, files. Exit 1 when anything is wrong.

    Prints a line for each problem: the file, the place in it, what is there, what was expected.
    Of a directory that holds train/ and validation/, checks both. --against-inputs packs units
    again in a directory beside it, which is removed at the end, and compares.

    Example: packer verify data-packed-4096 --against-inputs --sample all
    """
    from packer_cli.result.manifest import splits_of
    from packer_cli.storage import local
    from packer_cli.verify import verify as check

    directory = local(name, LOCAL_ONLY)
    if inputs and not options.against_inputs:
        raise UsageError(
            "inputs are for --against-inputs", "packer verify DIR --against-inputs ..."
        )
    encoding = EncodingOptions(workers=pool.workers, notify=notes(quiet=options.quiet))
    compare = None
    if options.against_inputs:
        from packer_cli.verify.again import compare_inputs  # needs a tokenizer

        compare = partial(
            compare_inputs,
            options=encoding,
            inputs=inputs or (),
            sample=options.sample,
            seed=options.seed,
        )
    places = [Path(part) for part in splits_of(directory)] or [directory]
    findings_of = {
        place: check(
            place, encoding, progress=not options.quiet, tokens=options.tokens, compare=compare
        )
        for place in places
    }
    if options.as_json:
        content = {
            place.name: {"directory": str(place)} | findings.as_json()
            for place, findings in findings_of.items()
        }
        print(json.dumps(content if len(content) > 1 else content.popitem()[1], indent=1))
    for place, findings in findings_of.items():
        for line in [] if options.as_json else findings.lines(place):
            print(one_line(line))
    for place, findings in findings_of.items():
        if problems := len(findings.problems):
            raise DataError(f"{place}: {problems} problem{'s' * (problems != 1)}", findings.tip())
