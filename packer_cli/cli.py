"""The command line. Thin: options to objects, errors to one line, a tip and an exit code.

Heavy modules are imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from packer_cli.errors import InternalError, Interrupted, PackerError, UsageError, from_os_error

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Pack training data for language models into memory-mappable shards.",
    epilog="Exit codes: 0 done; 1 bad data or a missed threshold; 2 bad usage; "
    "3 a bug in packer; 130 interrupted.",
)
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """Entry point of the `packer` command."""
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
    app()


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
    print(f"packer: {message}", file=sys.stderr)


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Turn errors into two lines on stderr and an exit code."""

    def terminate(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
        sys.stdout.flush()
    except PackerError as error:
        problem = error
    except KeyboardInterrupt:
        problem = Interrupted("interrupted", "run the same command again to start over")
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

        traceback.print_exception(problem)
    kind = "bug" if isinstance(problem, InternalError) else "error"
    if isinstance(problem, Interrupted):
        kind = "stopped"
    tip = problem.tip or "see packer --help, and packer COMMAND --help"
    for title, text in ((kind, problem.message), ("tip", tip)):
        # a path or a field name may hold a line end
        print(f"{title}: {text}".replace("\n", "\\n").replace("\r", "\\r"), file=sys.stderr)
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


def _list(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def default_output(inputs: list[str], max_length: int) -> Path:
    """`data-packed-4096` for `some/where/data.jsonl`, in the current directory."""
    from packer_cli.discovery import format_of

    name = Path(inputs[0]).name
    if inputs[0] == "-":
        name = "stdin"
    elif format_of(name)[0]:
        stem = Path(name).stem
        name = Path(stem).stem if format_of(stem)[0] else stem
    stem = "".join(c for c in name if c not in "*?[]") or "data"
    return Path(f"{stem}-packed-{max_length}")


@app.command(no_args_is_help=True)
def pack(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT", help="Files, directories, globs, or - for stdin."),
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
        Path | None,
        typer.Option(
            "--output", "-o", help="Directory to write. Default: INPUT-packed-MAX_LENGTH."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier result in the output.")
    ] = False,
    overlong: Annotated[
        str,
        typer.Option(help="Documents longer than a row: split, truncate, drop or error."),
    ] = "split",
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
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    input_format: Annotated[
        str | None,
        typer.Option(help="jsonl, parquet, arrow, text, csv or tsv. Default: by file name."),
    ] = None,
    sample_by: Annotated[
        str, typer.Option(help="A document of a plain text file: line, paragraph or document.")
    ] = "line",
    eos: Annotated[bool, typer.Option("--eos/--no-eos", help="End each document with EOS.")] = True,
    eos_token: Annotated[
        str | None, typer.Option(help="The EOS, where the tokenizer does not name one.")
    ] = None,
    on_error: Annotated[
        str,
        typer.Option(help="A bad record: fail, or skip it into rejected.jsonl."),
    ] = "fail",
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
    workers: Annotated[int, typer.Option(help="Work units at a time. Default: cores.")] = 0,
    tokenizer_backend: Annotated[
        str, typer.Option(help="auto, gigatoken or tokenizers. Never changes the result.")
    ] = "auto",
    max_line_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Longest line or text document accepted.")
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
    through .gz .zst .bz2 .xz .lz4. Records are {"text": ...} or {"input_ids": [...]}.

    Example: packer pack data.jsonl --max-length 4096 --tokenizer ./my-model
    """
    with _reported(debug):
        # gigatoken gives plain arrays where awkward is missing, which we want anyway; importing
        # it would be a tenth of a small run. Only here: this process is ours alone.
        sys.modules.setdefault("awkward", None)  # type: ignore[arg-type]
        from packer_cli import pipeline
        from packer_cli.config import PackConfig, RunOptions

        config = PackConfig(
            max_length=max_length, strategy=strategy, seed=seed, shuffle=shuffle,
            overlong=overlong, columns=_list(columns), text_field=text_field,
            input_format=input_format, sample_by=sample_by, add_eos=eos, eos_token=eos_token,
            on_error=on_error,
            max_line_bytes=_parse_size("--max-line-bytes", max_line_bytes),
            unit_bytes=None if unit_bytes is None else _parse_size("--unit-bytes", unit_bytes),
            shard_bytes=_parse_size("--shard-bytes", shard_bytes),
        )  # fmt: skip
        options = RunOptions(
            workers=workers, tokenizer_backend=tokenizer_backend, overwrite=overwrite,
            progress=not quiet,
        )  # fmt: skip
        destination = output or default_output(inputs, config.max_length)
        notify = (lambda message: None) if quiet else _say
        manifest = pipeline.pack(inputs, destination, config, options, tokenizer, notify)
        _print_report(destination, manifest, as_json=as_json, detail=False)


@app.command(no_args_is_help=True)
def stats(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A packed directory.")],
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
    """Show how much of each row is real tokens.

    Reads the manifest only, so it is instant on any size; --deep reads every shard.
    """
    with _reported(debug):
        from packer_cli.errors import ThresholdMissed
        from packer_cli.manifest import load

        if by not in (None, "shard", "input"):
            raise UsageError(f"--by: {by!r} is not shard or input")
        if min_utilization is not None and not 0 <= min_utilization <= 1:
            raise UsageError(
                f"--min-utilization: {min_utilization} is not between 0 and 1",
                "95% is 0.95",
            )
        manifest = load(directory)
        if deep:
            from packer_cli.recount import check_recount

            check_recount(directory, manifest)
        _print_report(directory, manifest, as_json=as_json, detail=True, by=by, deep=deep)
        utilization = manifest["utilization"]
        if min_utilization is not None and utilization < min_utilization:
            raise ThresholdMissed(
                f"{directory}: utilization {utilization:.4f} is below --min-utilization "
                f"{min_utilization}",
                "the histograms show whether the data or the packing is the cause",
            )


def _print_report(directory: Path, manifest: dict[str, Any], *, as_json: bool, **how: Any) -> None:
    if as_json:
        from packer_cli.report import as_json as render

        print(render(directory, manifest, by=how.get("by")))
    else:
        from packer_cli.report_table import print_report

        print_report(directory, manifest, **how)


if __name__ == "__main__":
    main()
