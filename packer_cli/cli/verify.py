"""`packer verify`: check a result."""

from __future__ import annotations

from typing import Annotated

import typer

from packer_cli.cli.shared import UNREAD, AsJson, Debug, Quiet, say
from packer_cli.errors import DataError, UsageError, one_line


def verify(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed directory.")],
    against_inputs: Annotated[
        bool,
        typer.Option(
            "--against-inputs", help="Also read and encode documents of the inputs again."
        ),
    ] = False,
    sample: Annotated[
        str,
        typer.Option(
            metavar="N|all",
            help="How many documents --against-inputs compares; all: packs every unit again.",
        ),
    ] = "1000",
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    workers: Annotated[int, typer.Option(help="Units checked at a time. Default: cores.")] = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check a result: digests, rows, figures, files. Exit 1 when anything is wrong.

    Prints a line for each problem: the file, where in it, what was found and expected.

    Example: packer verify data-packed-4096 --against-inputs --sample all
    """
    from packer_cli.config.options import RunOptions
    from packer_cli.storage import local
    from packer_cli.verify import verify as check

    directory = local(name, UNREAD)
    if sample != "all" and not (sample.isdecimal() and int(sample)):
        raise UsageError(f"--sample: {sample!r} is not a positive number, nor all")
    if seed < 0:
        raise UsageError(f"--seed: {seed} is negative")
    findings = check(
        directory,
        workers=RunOptions(workers=workers).workers,
        show_progress=not quiet,
        against_inputs=against_inputs,
        sample=None if sample == "all" else int(sample),
        seed=seed,
        notify=(lambda message: None) if quiet else say,
    )
    if as_json:
        import json

        print(json.dumps({"directory": str(directory)} | findings.as_json(), indent=1))
    else:
        for line in findings.lines(directory):
            print(one_line(line))
    if findings.problems:
        count = len(findings.problems)
        raise DataError(f"{directory}: {count} problem{'s' * (count != 1)}", findings.tip())
