"""`packer verify`: check a result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packer_cli.cli.runs import notes
from packer_cli.cli.shared import LOCAL_ONLY, AsJson, Debug, Quiet, TokensOf
from packer_cli.config.option import Option
from packer_cli.config.values import parse_count
from packer_cli.errors import DataError, UsageError, one_line


def verify(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed or tokenized directory.")],
    against_inputs: Annotated[
        bool, Option("Also compare with documents of the inputs, read and encoded again.")
    ] = False,
    sample: Annotated[
        str,
        Option(
            "How many documents --against-inputs compares; all: every unit is packed again.",
            metavar="N|all",
        ),
    ] = "1000",
    seed: Annotated[int, Option("Seed of the sample.", value="count", least=0)] = 0,
    workers: Annotated[
        int, Option("Units checked at a time. Default: as many as cores.", value="count", least=0)
    ] = 0,
    tokens: TokensOf = (),
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check a result: digests, rows or documents, figures, files. Exit 1 when anything is wrong.

    Prints a line for each problem: the file, the place in it, what is there, what was expected.
    Of a directory that holds train/ and validation/, checks both.

    Example: packer verify data-packed-4096 --against-inputs --sample all
    """
    from packer_cli.config.run_options import RunOptions
    from packer_cli.result.manifest_file import splits_of
    from packer_cli.storage import local
    from packer_cli.verify import verify as check

    directory = local(name, LOCAL_ONLY)
    if sample != "all" and parse_count("--sample", sample) < 1:
        raise UsageError(f"--sample: {sample!r} is neither a positive number nor all")
    found = {
        place: check(
            place,
            workers=RunOptions(workers=workers).workers,
            show_progress=not quiet,
            against_inputs=against_inputs,
            sample=None if sample == "all" else parse_count("--sample", sample),
            seed=seed,
            tokens=tokens,
            notify=notes(quiet=quiet),
        )
        for place in [Path(part) for part in splits_of(directory)] or [directory]
    }
    if as_json:
        import json

        content = {
            place.name: {"directory": str(place)} | findings.as_json()
            for place, findings in found.items()
        }
        print(json.dumps(content if len(content) > 1 else content.popitem()[1], indent=1))
    else:
        for place, findings in found.items():
            for line in findings.lines(place):
                print(one_line(line))
    for place, findings in found.items():
        if count := len(findings.problems):
            raise DataError(f"{place}: {count} problem{'s' * (count != 1)}", findings.tip())
