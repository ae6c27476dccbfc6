"""Commands that write results: `packer pack` and `packer tokenize`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument

from packer_cli.cli.reports import notes, print_note, print_results, refuse_name
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import Values
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import PackOptions, RankOptions, RunOptions

Inputs = Annotated[
    list[str],
    Argument(
        metavar="INPUT",
        help="Files, directories, globs, URLs of these, @FILE that lists such, or - for stdin.",
    ),
]


def pack(
    inputs: Inputs,
    given: Annotated[Values, PackConfig, PackOptions, RunOptions],
    process: RankOptions,
) -> None:
    """Tokenize and pack data into Arrow shards.

    Reads JSON lines, Parquet, Arrow, text, CSV and Hugging Face dataset directories, also
    through .gz .zst .bz2 .xz .lz4. Records are {"text": ...}, {"messages": [...]} or
    conversations, a prompt and its completion, alpaca instructions, or
    {"input_ids": [...]}. Directories of packer tokenize are packed without tokenizing them again.
    A recipe, INPUT.toml, says what to pack and how, from one source or from many.

    Example: packer pack data.jsonl --max-length 4096 --tokenizer ./my-model
    """
    from packer_cli.run.pool import tune_process

    tune_process()
    from packer_cli.options.recipe import request_of
    from packer_cli.result.manifest import Manifest

    request = request_of(inputs, given, RunOptions)
    command = request.command
    refuse_name("--tokenizer", command.tokenizer)
    output = command.output
    if output is None:
        output = default_output(inputs, f"packed-{request.config.max_length}")
    place, run = _place_of(output), _of_run(request.options, process)
    manifests: list[tuple[Path | str, object]] = []
    if request.recipe:
        from packer_cli.run.recipe import pack_recipe

        manifests += pack_recipe(request.recipe, place, run)
    else:
        from packer_cli.run import pipeline

        manifest = pipeline.pack(request.inputs, place, request.config, run, command.tokenizer)
        manifests.append((place, manifest))
    # only the last rank has a manifest
    results = [(path, manifest) for path, manifest in manifests if isinstance(manifest, Manifest)]
    print_results(results, as_json=process.as_json)


def tokenize(
    inputs: Inputs,
    config: Annotated[Values, DocumentConfig],
    command: PackOptions,
    options: RunOptions,
    process: RankOptions,
) -> None:
    """Tokenize data once, to pack it at any length and in any mixture.

    Reads what packer pack reads, and gives documents the same tokens. The directory it writes is
    an INPUT of packer pack, packer plan and a view.

    Example: packer tokenize data.jsonl --tokenizer ./my-model --output tokens
    """
    from packer_cli.run.pool import tune_process

    tune_process()
    from packer_cli.options.recipe import with_text_field
    from packer_cli.run import pipeline

    documents = DocumentConfig(**with_text_field(config | {"text_field": command.text_field}))
    refuse_name("--tokenizer", command.tokenizer)
    output = command.output or default_output(inputs, "tokenized")
    place, run = _place_of(output), _of_run(options, process)
    manifest = pipeline.pack(inputs, place, documents, run, command.tokenizer)
    if manifest is not None:  # other ranks have units to tokenize
        print_results([(place, manifest)], as_json=process.as_json)


def default_output(inputs: list[str], ending: str) -> str:
    """Return `data-ENDING` for `some/where/data.jsonl` or a URL, in the current directory."""
    from packer_cli.options.formats import belongs_to, format_of
    from packer_cli.options.recipe import is_recipe
    from packer_cli.result.manifest import as_named
    from packer_cli.storage import base_name

    name = base_name(belongs_to(inputs[0]) or as_named(inputs[0].removeprefix("@")))
    if inputs[0] == "-":
        name = "stdin"
    elif is_recipe(name):
        name = Path(name).stem
    elif format_of(name, documents=True)[0]:
        stem = Path(name).stem
        name = Path(stem).stem if format_of(stem)[0] else stem
    stem = "".join(c for c in name if c not in "*?[]") or "data"
    return f"{stem}-{ending}"


def _place_of(output: str) -> Path | str:
    """Return the place of a result. Raises UsageError for names to which nothing can be written."""
    from packer_cli.storage import place

    refuse_name("--output", output)
    return place(output)


def _of_run(options: RunOptions, process: RankOptions) -> RunOptions:
    """Return the options of a run, with those that only the command line has."""
    from packer_cli.run.pipeline import find_rank

    notify = notes(quiet=process.quiet)
    ranks: Values = dict(find_rank(process.rank, process.world_size, notify))
    return replace(options, progress=not process.quiet, notify=notify, warn=print_note, **ranks)
