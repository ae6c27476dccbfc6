"""`packer export`: write a result in the format of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli.shared import LOCAL_ONLY, AsJson, Debug, NoLock, Quiet, TokensOf
from packer_cli.cli.values import refuse_name
from packer_cli.config.export_formats import EXPORT_FORMATS
from packer_cli.config.option import Option, plain
from packer_cli.errors import UsageError, one_line

if TYPE_CHECKING:
    from packer_cli.export.even import EvenSteps


def export(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed or tokenized directory.")],
    to: Annotated[
        str,
        Option("Format to write:", metavar="FORMAT", choices=plain(EXPORT_FORMATS)),
    ],
    output: Annotated[str, Option("A new or empty directory.", short="-o", metavar="OUT")],
    overwrite: Annotated[bool, Option("Replace an earlier export in OUT.")] = False,
    order: Annotated[
        str,
        Option(
            "Of rows:",
            metavar="ORDER",
            choices={
                "stored": "that of the directory",
                "even": "by which trainers that read in order have even steps",
            },
        ),
    ] = "stored",
    ranks: Annotated[
        int | None,
        Option("For --order even: processes that share the rows.", value="count", least=1),
    ] = None,
    micro_batches: Annotated[
        int | None,
        Option("For --order even: micro-batches of a step.", unset="1", value="count", least=1),
    ] = None,
    batch_size: Annotated[
        int | None,
        Option("For --order even: rows of a micro-batch.", unset="1", value="count", least=1),
    ] = None,
    hidden_size: Annotated[
        int | None,
        Option(
            "For --order even: of the model, by which a row's cost is known.",
            value="count",
            least=1,
        ),
    ] = None,
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
        even=_even_steps(order, ranks, micro_batches, batch_size, hidden_size),
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


def _even_steps(
    order: str,
    ranks: int | None,
    micro_batches: int | None,
    batch_size: int | None,
    hidden_size: int | None,
) -> EvenSteps | None:
    from packer_cli.export.even import EvenSteps

    if order == "stored":
        sizes = {
            "--ranks": ranks, "--micro-batches": micro_batches, "--batch-size": batch_size,
            "--hidden-size": hidden_size,
        }  # fmt: skip
        for option, value in sizes.items():
            if value is not None:
                raise UsageError(f"{option}: is only for --order even", "add --order even")
        return None
    if ranks is None or hidden_size is None:
        missing = "--ranks" if ranks is None else "--hidden-size"
        raise UsageError(
            f"--order even: needs {missing}",
            "give the sizes of the training: --ranks 64 --micro-batches 4 --hidden-size 4096",
        )
    return EvenSteps(ranks, hidden_size, batch_size or 1, micro_batches or 1)
