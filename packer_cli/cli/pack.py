"""`packer pack`: options to a configuration, then a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packer_cli.cli import startup
from packer_cli.cli.reports import print_packed
from packer_cli.cli.shared import AsJson, Debug, NoLock, Quiet, say
from packer_cli.cli.values import (
    parse_fields,
    parse_list,
    parse_max_errors,
    parse_share,
    parse_size,
    refuse_name,
)
from packer_cli.errors import UsageError


def default_output(inputs: list[str], max_length: int) -> Path:
    """`data-packed-4096` for `some/where/data.jsonl` or a URL, in the current directory."""
    from packer_cli.inputs.discovery import format_of
    from packer_cli.storage import base_name

    name = base_name(inputs[0])
    if inputs[0] == "-":
        name = "stdin"
    elif format_of(name)[0]:
        stem = Path(name).stem
        name = Path(stem).stem if format_of(stem)[0] else stem
    stem = "".join(c for c in name if c not in "*?[]") or "data"
    return Path(f"{stem}-packed-{max_length}")


def pack(
    ctx: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT", help="Files, directories, globs, URLs of these, or - for stdin."
        ),
    ],
    max_length: Annotated[int, typer.Option("--max-length", "-l", help="Tokens in a packed row.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            "-t",
            help="Folder, tokenizer.json, hub name, or bytes. Default: $PACKER_TOKENIZER, "
            "then bytes.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", help="Directory to write, or a URL. Default: INPUT-packed-MAX_LENGTH."
        ),
    ] = None,
    staging: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where a result for a URL is packed first. Default: in the temporary directory.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier result in the output.")
    ] = False,
    no_lock: NoLock = False,
    add: Annotated[
        bool,
        typer.Option(
            "--add",
            help="Add these inputs to the result, if there is one; those that it has already and "
            "that are not named stay as they are packed, even if their files are gone.",
        ),
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Pack only inputs that are new or have changed. All others must be named, too: "
            "see --add and --prune.",
        ),
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="With --update: drop the documents of inputs that are not named."
        ),
    ] = False,
    checksum: Annotated[
        bool,
        typer.Option(
            "--checksum", help="With --update or --add: compare contents, not times of change."
        ),
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME", help="Template for messages. Default: the tokenizer's own."
        ),
    ] = None,
    prompt_template: Annotated[
        str | None,
        typer.Option(help="Prompts as they are (none), or as alpaca or chat. Default: by shape."),
    ] = None,
    train_on: Annotated[
        str | None,
        typer.Option(
            help="assistant, last-assistant, completion or all. Default: assistant for messages, "
            "completion for prompts, all for text."
        ),
    ] = None,
    turn_end: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help="Ends the assistant's turns: trained on where it follows one. May be repeated.",
        ),
    ] = None,
    allow_open_turns: Annotated[
        bool,
        typer.Option(
            "--allow-open-turns", help="Train on turns that the chat template ends in nothing."
        ),
    ] = False,
    keep_untrained: Annotated[
        bool, typer.Option("--keep-untrained", help="Keep documents without a trained token.")
    ] = False,
    overlong: Annotated[
        str | None,
        typer.Option(
            help="Documents longer than a row: split, truncate, truncate-turns (drop the oldest "
            "turns), drop or error. Default: split for text, drop for messages and prompts."
        ),
    ] = None,
    truncate_side: Annotated[
        str, typer.Option(help="Where truncate cuts: right keeps the beginning, left the end.")
    ] = "right",
    force_split: Annotated[
        bool, typer.Option("--force-split", help="Let split cut messages and prompts, too.")
    ] = False,
    max_loss: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Exit 1 when more of the tokens were truncated or dropped: 0.01 or 1%.",
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="best-fit, first-fit, online-best-fit, online-first-fit, worst-fit, "
            "first-fit-shuffle, next-fit, harmonic, mffd or wrap."
        ),
    ] = "best-fit",
    columns: Annotated[
        str,
        typer.Option(help="Columns to write, comma-separated; position_ids is the optional one."),
    ] = "input_ids,labels,attention_mask,cu_seqlens,segments",
    position_ids: Annotated[
        bool, typer.Option("--position-ids", help="Also write the column position_ids.")
    ] = False,
    label_shift: Annotated[
        str,
        typer.Option(help="none: the model shifts labels; pre: shifted here, inside segments."),
    ] = "none",
    max_segments_per_row: Annotated[
        int | None, typer.Option(metavar="K", help="Close a row that has K segments.")
    ] = None,
    segment_multiple: Annotated[
        int,
        typer.Option(
            metavar="N", help="Pad every segment, inside its row, to a multiple of N tokens."
        ),
    ] = 1,
    balance: Annotated[
        str,
        typer.Option(help="attention: even out the rows' sums of squared segment lengths; none."),
    ] = "none",
    text_field: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Field or column that holds the text. Default: text."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="messages, conversations, prompt-completion, alpaca, text or tokens. "
            "Default: by the fields of the first record."
        ),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COLUMN",
            help="Where a field of the shape is: messages=chosen. May be repeated.",
        ),
    ] = None,
    input_format: Annotated[
        str | None,
        typer.Option(help="jsonl, parquet, arrow, text, csv or tsv. Default: by file name."),
    ] = None,
    sample_by: Annotated[
        str, typer.Option(help="A document of a plain text file: line, paragraph or document.")
    ] = "line",
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos", help="Begin each document with BOS. Default: as the tokenizer does."
        ),
    ] = None,
    eos: Annotated[
        bool | None,
        typer.Option(
            "--eos/--no-eos",
            help="End each document with EOS. Default: yes, but chat templates end turns.",
        ),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text after each document, never trained on."),
    ] = None,
    eos_token: Annotated[
        str | None, typer.Option(help="The EOS, where the tokenizer does not name one.")
    ] = None,
    special_tokens_in_text: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Special tokens that a record's content spells out: keep them, make ordinary text "
            "of them, or error: a bad record.",
        ),
    ] = "keep",
    on_error: Annotated[
        str,
        typer.Option(help="A bad record: fail, or skip it into rejected.jsonl."),
    ] = "fail",
    max_errors: Annotated[
        str | None,
        typer.Option(
            metavar="N|SHARE", help="Fail when more records are bad: 100, or 0.01 of all."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of the shuffle of rows, and of segments in a row.")
    ] = 0,
    shuffle: Annotated[
        bool | None,
        typer.Option(
            "--shuffle/--no-shuffle",
            help="Default: on, except for next-fit and wrap, which keep the input order.",
        ),
    ] = None,
    max_seconds_per_record: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Of processor time to render a record; one that needs more is bad.",
        ),
    ] = 60.0,
    workers: Annotated[int, typer.Option(help="Work units at a time. Default: cores.")] = 0,
    engine: Annotated[
        str, typer.Option(help="local, or ray: a task per work unit on a Ray cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Of a running cluster. Default: Ray's own choice.")
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="R|auto",
            help="Pack only every WORLD_SIZE-th unit, from the R-th on; the last rank finishes. "
            "auto: from SLURM and the like.",
        ),
    ] = None,
    world_size: Annotated[
        str | None, typer.Option(metavar="W|auto", help="How many ranks there are.")
    ] = None,
    tokenizer_backend: Annotated[
        str, typer.Option(help="auto, gigatoken or tokenizers. Never changes the result.")
    ] = "auto",
    max_line_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Longest line, cell or text document accepted.")
    ] = "256M",
    unit_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Input bytes in a work unit. Default: by input size."),
    ] = None,
    shard_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Longest shard, about.")] = "1G",
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tokenize and pack data into Arrow shards.

    Reads JSON lines, Parquet, Arrow, text, CSV and Hugging Face dataset directories, also
    through .gz .zst .bz2 .xz .lz4. Records are {"text": ...}, {"messages": [...]} or
    conversations, a prompt and its completion, alpaca instructions, or {"input_ids": [...]}.

    Example: packer pack data.jsonl --max-length 4096 --tokenizer ./my-model
    """
    startup.prepare_run()
    from packer_cli.config.options import PackConfig, RunOptions
    from packer_cli.run import pipeline
    from packer_cli.run.upload import default_staging
    from packer_cli.storage import is_url

    config = PackConfig(
        max_length=max_length, strategy=strategy, seed=seed, shuffle=shuffle,
        overlong=overlong, force_split=force_split, truncate_side=truncate_side,
        max_loss=parse_share("--max-loss", max_loss),
        columns=parse_list(columns) + (("position_ids",) if position_ids else ()),
        label_shift=label_shift, max_segments_per_row=max_segments_per_row,
        segment_multiple=segment_multiple, balance=balance, shape=shape,
        fields=parse_fields(field or [], text_field), chat_template=chat_template,
        prompt_template=prompt_template, train_on=train_on, turn_end=tuple(turn_end or ()),
        allow_open_turns=allow_open_turns, keep_untrained=keep_untrained,
        input_format=input_format, sample_by=sample_by,
        add_bos=bos, add_eos=eos, eos_token=eos_token, separator=separator,
        special_tokens_in_text=special_tokens_in_text,
        on_error=on_error, max_errors=parse_max_errors(max_errors),
        max_line_bytes=parse_size("--max-line-bytes", max_line_bytes),
        unit_bytes=None if unit_bytes is None else parse_size("--unit-bytes", unit_bytes),
        shard_bytes=parse_size("--shard-bytes", shard_bytes),
    )  # fmt: skip
    from packer_cli.run.ranks import find_rank

    options = RunOptions(
        engine=engine, ray_address=ray_address, **find_rank(rank, world_size),
        workers=workers, tokenizer_backend=tokenizer_backend, overwrite=overwrite,
        update=update, add=add, prune=prune, checksum=checksum, no_lock=no_lock,
        progress=not quiet,
        max_seconds_per_record=max_seconds_per_record,
    )  # fmt: skip
    if tokenizer == "":
        raise UsageError("--tokenizer: is empty", "is a variable of your script unset?")
    refuse_name("--output", output)
    refuse_name("--staging", staging)
    destination: Path | str = output or default_output(inputs, config.max_length)
    if staging is not None and (not staging or is_url(staging)):
        raise UsageError(f"--staging: {staging!r} is not a local path", "name a directory")
    folder = None if staging is None else Path(staging)
    if is_url(str(destination)):
        kept = f"not uploaded, but kept in {folder or default_staging(str(destination))}"
    else:
        destination, kept = Path(destination), "kept, marked incomplete"
        if folder:
            raise UsageError("--staging: is for an --output that is a URL", "leave it out")
    notify = (lambda message: None) if quiet else say
    manifest = pipeline.pack(
        inputs, destination, config, options, tokenizer, notify, say, ctx.obj, folder
    )
    if manifest is None:  # there is more for other ranks to do
        return
    print_packed(destination, manifest, as_json=as_json, kept=kept)
