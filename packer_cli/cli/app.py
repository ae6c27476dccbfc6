"""The command line. Thin: options to objects, errors to one line, a tip and an exit code.

Heavy modules are imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from packer_cli.early import begin_reference
from packer_cli.errors import (
    InternalError,
    Interrupted,
    PackerError,
    ThresholdMissed,
    UsageError,
    from_os_error,
    one_line,
    visible,
)
from packer_cli.interrupts import handled, sent_again

if TYPE_CHECKING:
    from packer_cli.result.manifest import Manifest

# Of click, or of the click inside newer typers.
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


class _Commands(TyperGroup):
    """Errors of the command line's own look like all others: what is wrong, and what to do."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(*args, standalone_mode=False, **extra)  # type: ignore[misc]
        except _ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(2)
            command = getattr(getattr(error, "ctx", None), "command_path", "packer")
            message = error.format_message().replace("\n", " ")
            _two_lines("error", message, f"see {command} --help")
            sys.exit(2)
        except typer.Abort:
            sys.exit(130)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def _two_lines(kind: str, message: str, tip: str) -> None:
    for title, text in ((kind, message), ("tip", tip)):
        print(one_line(f"{title}: {text}"), file=sys.stderr)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Pack training data for language models into memory-mappable shards.",
    epilog="Exit codes: 0 done; 1 bad data or a missed threshold; 2 bad usage; "
    "3 a bug in packer; 130 interrupted.",
)
_UNREAD = "shards are only read from local directories"
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]
NoLock = Annotated[
    bool,
    typer.Option(
        "--no-lock",
        help="Go on where the file system has no locks; let no other run write there.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """The `packer` command, once this module is imported: see `__main__.py`."""
    # What was closed is opened to nothing, or files of ours would get the numbers 0 to 2, which
    # libraries and children write to.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
        if descriptor == 1:
            sys.stdout = open(1, "w")  # noqa: SIM115
        elif descriptor == 2:
            sys.stderr = open(2, "w")  # noqa: SIM115
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: no name may end a run
    status: object = 0
    try:
        with begin_reference(*_peek(sys.argv)) as early:
            app(obj=early)
    except SystemExit as end:
        status = end.code
    # Nothing is left to do, and freeing the tables of a tokenizer takes a tenth of a second.
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _peek(arguments: list[str]) -> tuple[str | None, str]:
    """(tokenizer, its backend) of a `packer pack` whose arguments are not parsed yet."""
    if arguments[1:2] != ["pack"]:
        return None, "tokenizers"
    found = {"--tokenizer": "", "--tokenizer-backend": "auto"}
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, rest = option.partition("=")
        name = {"-t": "--tokenizer"}.get(name, name)
        if name in found:
            found[name] = rest if equals else value
    return found["--tokenizer"], found["--tokenizer-backend"]


def _version(wanted: bool) -> None:
    if wanted:
        import packer_cli

        print(f"packer {packer_cli.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _say(message: str) -> None:
    print(one_line(f"packer: {message}"), file=sys.stderr)


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Turn errors into two lines on stderr and an exit code."""
    try:
        with handled(signal.default_int_handler), sent_again():
            yield
            sys.stdout.flush()
    except PackerError as error:
        problem = error
    except KeyboardInterrupt:
        problem = Interrupted("interrupted", "run the same command again")
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(1) from None
    except OSError as error:  # errors of other files are PackerErrors by now
        problem = from_os_error(error, error.filename or "stdout", "write")
        with suppress(OSError):
            sys.stdout.close()  # or the interpreter fails at it once more
    except MemoryError as error:
        problem = PackerError(
            f"out of memory: {error}", "use fewer --workers, or a smaller --max-line-bytes"
        )
    except typer.Exit:
        raise
    except Exception as error:
        problem = InternalError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
    else:
        return
    if debug:
        import traceback

        print(visible("".join(traceback.format_exception(problem))), end="", file=sys.stderr)
    kind = "bug" if isinstance(problem, InternalError) else "error"
    if isinstance(problem, Interrupted):
        kind = "stopped"
    tip = problem.tip or "see packer --help, and packer COMMAND --help"
    _two_lines(kind, problem.message, tip)
    raise typer.Exit(problem.exit_code)


_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _parse_size(option: str, text: str) -> int:
    """64M, 1GiB, 512kb or a number of bytes."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _SUFFIXES else ""
    try:
        return round(float(number.removesuffix(unit)) * _SUFFIXES[unit])
    except (ValueError, OverflowError):
        raise UsageError(f"{option}: {text!r} is not a size like 256M or 1G") from None


def _parse_share(option: str, text: str | None) -> float | None:
    """0.01, or 1%."""
    try:
        if text is None:
            return None
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a share", "1% is 0.01") from None


def _parse_max_errors(text: str | None) -> int | float | None:
    """100, or a share of all records."""
    return int(text) if text and text.isdecimal() else _parse_share("--max-errors", text)


def _refuse_name(option: str, name: str | None) -> None:
    """UsageError for what nothing can be written to."""
    if name == "":
        raise UsageError(f"{option}: is empty", "is a variable of your script unset?")
    from packer_cli.storage import refuse_other_than_utf8

    refuse_other_than_utf8(f"{option}: ", name or "")


def _list(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _fields(mapped: list[str], text_field: str | None) -> tuple[tuple[str, str], ...]:
    """NAME=COLUMN options as pairs, in the order of the names."""
    pairs = {} if text_field is None else {"text": text_field}
    for item in mapped:
        own, separator, name = item.partition("=")
        if not (own and separator and name):
            raise UsageError(f"--field: {item!r} is not NAME=COLUMN", "for example messages=chosen")
        pairs[own] = name
    return tuple(sorted(pairs.items()))


def default_output(inputs: list[str], max_length: int) -> Path:
    """`data-packed-4096` for `some/where/data.jsonl` or a URL, in the current directory."""
    from packer_cli.config.formats import format_of
    from packer_cli.storage import base_name

    name = base_name(inputs[0])
    if inputs[0] == "-":
        name = "stdin"
    elif format_of(name)[0]:
        stem = Path(name).stem
        name = Path(stem).stem if format_of(stem)[0] else stem
    stem = "".join(c for c in name if c not in "*?[]") or "data"
    return Path(f"{stem}-packed-{max_length}")


@app.command(no_args_is_help=True)
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tokenize and pack data into Arrow shards.

    Reads JSON lines, Parquet, Arrow, text, CSV and Hugging Face dataset directories, also
    through .gz .zst .bz2 .xz .lz4. Records are {"text": ...}, {"messages": [...]} or
    conversations, a prompt and its completion, alpaca instructions, or {"input_ids": [...]}.

    Example: packer pack data.jsonl --max-length 4096 --tokenizer ./my-model
    """
    with _reported(debug):
        gc.set_threshold(100_000, 50, 50)  # documents by the million, hardly a cycle among them
        # gigatoken gives plain arrays where awkward is missing, which we want anyway; importing
        # it would be a tenth of a small run. Only here: this process is ours alone.
        sys.modules.setdefault("awkward", None)  # type: ignore[arg-type]
        from packer_cli.config.options import PackConfig, RunOptions
        from packer_cli.run import pipeline
        from packer_cli.run.upload import default_staging
        from packer_cli.storage import is_url

        config = PackConfig(
            max_length=max_length, strategy=strategy, seed=seed, shuffle=shuffle,
            overlong=overlong, force_split=force_split, truncate_side=truncate_side,
            max_loss=_parse_share("--max-loss", max_loss),
            columns=_list(columns) + (("position_ids",) if position_ids else ()),
            label_shift=label_shift, max_segments_per_row=max_segments_per_row,
            segment_multiple=segment_multiple, balance=balance, shape=shape,
            fields=_fields(field or [], text_field), chat_template=chat_template,
            prompt_template=prompt_template, train_on=train_on, turn_end=tuple(turn_end or ()),
            allow_open_turns=allow_open_turns, keep_untrained=keep_untrained,
            input_format=input_format, sample_by=sample_by,
            add_bos=bos, add_eos=eos, eos_token=eos_token, separator=separator,
            special_tokens_in_text=special_tokens_in_text,
            on_error=on_error, max_errors=_parse_max_errors(max_errors),
            max_line_bytes=_parse_size("--max-line-bytes", max_line_bytes),
            unit_bytes=None if unit_bytes is None else _parse_size("--unit-bytes", unit_bytes),
            shard_bytes=_parse_size("--shard-bytes", shard_bytes),
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
        _refuse_name("--output", output)
        _refuse_name("--staging", staging)
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
        notify = (lambda message: None) if quiet else _say
        manifest = pipeline.pack(
            inputs, destination, config, options, tokenizer, notify, _say, ctx.obj, folder
        )
        if manifest is None:  # there is more for other ranks to do
            return
        _print_packed(destination, manifest, as_json=as_json, kept=kept)


@app.command(no_args_is_help=True)
def finalize(
    name: Annotated[
        str, typer.Argument(metavar="DIR", help="The --output of ranks that have ended.")
    ],
    no_lock: NoLock = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Finish a result that was packed by ranks, once all of its units are packed.

    The last rank does so itself; this is for when it could not.
    """
    with _reported(debug):
        from packer_cli.run import ranks
        from packer_cli.storage import local

        directory = local(name, "ranks only share local directories")
        _print_packed(directory, ranks.finalize_now(directory, no_lock=no_lock), as_json=as_json)


@app.command(no_args_is_help=True)
def stats(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed directory, or its URL.")],
    min_utilization: Annotated[
        float | None, typer.Option(help="Exit 1 when less than this share of the rows is tokens.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="shard|input", help="Also a line per shard or per input.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Recount from the shards; exit 1 on any difference.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a result was made with, and how much of each row is real tokens.

    Reads the manifest only, so it is instant on any size; --deep reads every shard.
    """
    with _reported(debug):
        from packer_cli.result.manifest import load
        from packer_cli.storage import is_url, local

        if by not in (None, "shard", "input"):
            raise UsageError(f"--by: {by!r} is not shard or input")
        if min_utilization is not None and not 0 <= min_utilization <= 1:
            raise UsageError(
                f"--min-utilization: {min_utilization} is not between 0 and 1",
                "95% is 0.95",
            )
        directory = name if is_url(name) else Path(name)
        _refuse_name("DIR", name)
        if deep:
            local(name, _UNREAD)
        manifest = load(directory, incomplete_too=True)
        if manifest.incomplete:
            _say(f"{directory} is marked incomplete: {manifest.incomplete}")
        if deep:
            from packer_cli.result.recount import check_recount

            check_recount(Path(directory))
        _print_report(directory, manifest, as_json=as_json, detail=True, by=by, deep=deep)
        if min_utilization is not None and manifest.utilization < min_utilization:
            raise ThresholdMissed(
                f"{directory}: utilization {manifest.utilization:.4f} is below --min-utilization "
                f"{min_utilization}",
                "the histograms show whether the data or the packing is the cause",
            )


@app.command(no_args_is_help=True, context_settings={"ignore_unknown_options": True})  # ROW -1
def show(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed directory.")],
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROW",
            help="Row numbers over all shards: 7, -1 for the last, 3-5. Default: 0.",
        ),
    ] = None,
    segment: Annotated[
        int | None, typer.Option(metavar="K", help="Only this segment of each row.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Token ids in the place of text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per row.")] = False,
    debug: Debug = False,
) -> None:
    """Show rows as text: segments, where they came from, and which tokens are trained on.

    Trained tokens are green; without colour (NO_COLOR, or no terminal) they stand in brackets.

    Example: packer show documents-packed-1024 0 -1
    """
    with _reported(debug):
        from packer_cli.result.manifest import load
        from packer_cli.result.reader import PackedDirectory
        from packer_cli.show.rows import parse_rows, pick, read_row, row_as_json
        from packer_cli.storage import local
        from packer_cli.tokenization.decoding import load_decoder

        directory = local(name, _UNREAD)
        packed = PackedDirectory(directory, load(directory))
        wanted = parse_rows(rows or ["0"], len(packed))
        found = None if ids else load_decoder(directory, packed.facts.tokenizer)
        if isinstance(found, str):
            _say(f"showing token ids: {found}")
        decoder = None if isinstance(found, str) else found
        labels = "labels" in packed.facts.config.columns
        if not labels:
            _say("no labels column was written: not known which tokens are trained on")
        printer = None
        for number in wanted:
            row = read_row(packed, number)
            segments = row.segments if segment is None else [pick(row, segment)]
            if as_json:
                print(row_as_json(row, segments, decoder))
                continue
            if printer is None:
                from packer_cli.show.text import RowPrinter

                printer = RowPrinter(len(packed), decoder, labels=labels)
            printer.print(row, segments, whole=segment is None)


@app.command(no_args_is_help=True)
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check a result: digests, rows, figures, files. Exit 1 when anything is wrong.

    Prints a line for each problem: the file, where in it, what was found and expected.

    Example: packer verify data-packed-4096 --against-inputs --sample all
    """
    with _reported(debug):
        from packer_cli.config.options import RunOptions
        from packer_cli.errors import DataError
        from packer_cli.storage import local
        from packer_cli.verify import verify as check

        directory = local(name, _UNREAD)
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
            notify=(lambda message: None) if quiet else _say,
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


@app.command(no_args_is_help=True)
def export(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A packed directory.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="trl, llamafactory, axolotl, megatron, megatron-bridge, nanotron, numpy, parquet "
            "or unpacked.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT", help="A new or empty directory.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export in the output.")
    ] = False,
    no_lock: NoLock = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a packed directory in the format of another trainer.

    Example: packer export documents-packed-1024 --to trl --output documents-trl
    """
    with _reported(debug):
        from packer_cli.export import export as write
        from packer_cli.storage import is_url, local

        if is_url(output):
            raise UsageError(f"--output: {output}: a URL", "write to a directory, then copy it")
        _refuse_name("--output", output)
        facts = write(
            local(name, _UNREAD),
            to,
            Path(output),
            overwrite=overwrite,
            no_lock=no_lock,
            show_progress=not quiet,
        ).facts
        counts = {key: getattr(facts, key) for key in ("rows", "segments", "documents", "tokens")}
        if as_json:
            import json

            print(json.dumps({"output": str(output), "format": to} | counts, indent=1))
        else:
            figures = ", ".join(f"{n:,} {key}" for key, n in counts.items())
            print(one_line(f"{output}: {figures}, as {to}"))


@app.command(no_args_is_help=True)
def tokenizer(
    name: Annotated[
        str, typer.Argument(metavar="DIR", help="As pack's --tokenizer, but for bytes.")
    ],
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="INPUT", help="Compare texts of these, too.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with AutoTokenizer of transformers.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what a tokenizer is; --check: whether AutoTokenizer gives the same tokens.

    Exit 1 when it does not, with what they differ on. Special tokens around texts do not count.

    Example: packer tokenizer ./my-model --check data.jsonl
    """
    with _reported(debug):
        import json

        from packer_cli.errors import DataError
        from packer_cli.tokenization.locate import locate
        from packer_cli.tokenization.rebuilt import rebuilt_otherwise

        if inputs and not check:
            raise UsageError("inputs are for --check", "packer tokenizer DIR --check INPUT...")
        files = locate(name)
        about = {
            "tokenizer": name, "sha256": files.sha256, "bos": files.bos, "eos": files.eos,
            "pad": files.pad, "added_tokens": len(files.added_tokens),
            "special_tokens": len(files.specials), "warning": rebuilt_otherwise(files) or None,
        }  # fmt: skip
        comparisons = []
        if check:
            from packer_cli.tokenizer_check import check as compare

            comparisons = compare(files, inputs or [])
        if as_json:
            print(
                json.dumps(about | {"compared": [one.as_json() for one in comparisons]}, indent=1)
            )
        else:
            for key, value in about.items():
                if value is not None:
                    print(f"{key.replace('_', ' ')}: {value}")
            for one in comparisons:
                first = f", the first: {one.different[0][:80]!r}" if one.different else ""
                count = f"{len(one.different):,} of {one.texts:,} texts differ"
                print(f"{one.source}: {count} from AutoTokenizer{first}")
        if any(one.different for one in comparisons):
            raise DataError(
                f"tokenizer {name}: AutoTokenizer gives other tokens than its tokenizer.json",
                'train and infer with one of them: "tokenizer_class": "PreTrainedTokenizerFast" in '
                "tokenizer_config.json makes AutoTokenizer load tokenizer.json as it is",
            )


def _print_packed(
    directory: Path | str,
    manifest: Manifest,
    *,
    as_json: bool,
    kept: str = "kept, marked incomplete",
) -> None:
    """The report at the end of a run. Raises ThresholdMissed when its result is incomplete."""
    _print_report(directory, manifest, as_json=as_json, detail=False)
    if manifest.incomplete:
        raise ThresholdMissed(
            f"{directory}: {manifest.incomplete}",
            f"the output is {kept}; see --overlong and --max-length",
        )


def _print_report(directory: Path | str, manifest: Manifest, *, as_json: bool, **how: Any) -> None:
    if as_json:
        from packer_cli.stats.report import as_json as render

        print(render(directory, manifest, by=how.get("by")))
    else:
        from packer_cli.stats.table import print_report

        print_report(directory, manifest, **how)
