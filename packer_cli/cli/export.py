"""`packer export`: write a result in the format of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packer_cli.cli.shared import LOCAL_ONLY, AsJson, Debug, NoLock, Quiet, TokensOf
from packer_cli.cli.values import refuse_name
from packer_cli.config.export_formats import EXPORT_FORMATS
from packer_cli.config.option import Option, plain
from packer_cli.errors import UsageError, one_line


def export(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed or tokenized directory.")],
    to: Annotated[
        str,
        Option("Format to write:", metavar="FORMAT", choices=plain(EXPORT_FORMATS)),
    ],
    output: Annotated[str, Option("A new or empty directory.", short="-o", metavar="OUT")],
    overwrite: Annotated[bool, Option("Replace an earlier export in OUT.")] = False,
    tokens: TokensOf = (),
    no_lock: NoLock = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a packed directory, or tokenized documents, in the format of another trainer.

    Example: packer export documents-packed-1024 --to trl --output documents-trl
    """
    from packer_cli.export import export as write
    from packer_cli.storage import is_url, local

    if is_url(output):
        raise UsageError(f"--output: {output}: a URL", "write to a directory, then copy it")
    refuse_name("--output", output)
    facts = write(
        local(name, LOCAL_ONLY),
        to,
        Path(output),
        tokens=tokens,
        overwrite=overwrite,
        no_lock=no_lock,
        show_progress=not quiet,
    ).facts
    names = ("rows", "segments", "documents", "tokens")
    counts = {name: getattr(facts, name) for name in names if hasattr(facts, name)}
    if as_json:
        import json

        print(json.dumps({"output": str(output), "format": to} | counts, indent=1))
    else:
        figures = ", ".join(f"{n:,} {key}" for key, n in counts.items())
        print(one_line(f"{output}: {figures}, as {to}"))
