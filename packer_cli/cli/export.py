"""`packer export`: write a result in the format of another trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from packer_cli.cli.reports import LOCAL_ONLY, Directory, ViewOptions, notes, refuse_name
from packer_cli.errors import UsageError, one_line
from packer_cli.options.option import OptionGroup, choice, refuse
from packer_cli.options.run_options import FormatOptions, Locking, ProgressOptions, StepOptions

EXPORT_FORMATS = (
    "trl", "llamafactory", "axolotl", "automodel", "documents", "olmo", "megatron",
    "megatron-bridge", "numpy", "parquet", "unpacked", "packed",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportOptions(OptionGroup):
    to: Annotated[
        str, choice(EXPORT_FORMATS), Option(metavar="FORMAT", help="Format to write: {}.")
    ]
    output: Annotated[
        str, Option("--output", "-o", metavar="OUT", help="A new or empty directory.")
    ]
    overwrite: Annotated[bool, Option(help="Replace an earlier export in OUT.")] = False
    order: Annotated[
        str,
        choice(
            {
                "stored": "that of the directory",
                "even": "by which trainers that read in order have even steps, with --ranks",
            }
        ),
        Option(metavar="ORDER", help="Of rows: {}."),
    ] = "stored"


def export(
    name: Directory,
    options: ExportOptions,
    form: FormatOptions,
    sizes: StepOptions,
    rows: ViewOptions,
    locks: Locking,
    reporting: ProgressOptions,
) -> None:
    """Write a packed directory, or tokenized documents, in the format of another trainer.

    Example: packer export documents-packed-1024 --to trl --output documents-trl
    """
    from packer_cli.export import export as write
    from packer_cli.storage import local, place

    refuse_name("--output", options.output)
    to, output = options.to, place(options.output)
    if not isinstance(output, Path):
        raise UsageError(f"--output: {output}: a URL", "write to a directory, then copy it")
    is_even, has_sizes = options.order == "even", sizes.ranks is not None
    tip = "name the training: --order even --ranks 64 --micro-batches 4"
    refuse([
        (has_sizes and not is_even, "--ranks needs --order even", tip),
        (is_even and not has_sizes, "--order even needs --ranks", tip),
    ])  # fmt: skip
    facts = write(
        local(name, LOCAL_ONLY),
        to,
        output,
        options=form,
        even=sizes if is_even else None,
        tokens=rows.tokens,
        overwrite=options.overwrite,
        no_lock=locks.no_lock,
        show_progress=not reporting.quiet,
        notify=notes(quiet=reporting.quiet),
    ).facts
    names = ("rows", "segments", "documents", "tokens")
    counts = {name: getattr(facts, name) for name in names if name in facts.document}
    if reporting.as_json:
        import json

        print(json.dumps({"output": str(output), "format": to} | counts, indent=1))
    else:
        figures = ", ".join(f"{n:,} {key}" for key, n in counts.items())
        print(one_line(f"{output}: {figures}, as {to}"))
