"""`packer tokenizer`: describe a tokenizer, and compare it with AutoTokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from packer_cli.errors import DataError, UsageError, one_line
from packer_cli.options.option import option
from packer_cli.options.run_options import Reporting


@dataclass(frozen=True)
class TokenizerOptions(Reporting):
    check: bool = option(False, "Compare with AutoTokenizer from transformers.")


def tokenizer(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Folder, tokenizer.json, or hub name.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT", help="With --check: files whose texts are compared as well."
        ),
    ] = None,
    *,
    options: TokenizerOptions,
) -> None:
    """Describe a tokenizer; with --check, compare its tokens with those of AutoTokenizer.

    Exit 1 when they differ, with the first text that shows it. Special tokens around texts do not
    count.

    Example: packer tokenizer ./my-model --check data.jsonl
    """
    from packer_cli.tokenization.locate import locate

    if inputs and not options.check:
        raise UsageError("inputs are for --check", "packer tokenizer NAME --check INPUT...")
    files = locate(name)
    about = {
        "tokenizer": name, "sha256": files.sha256, "bos": files.bos, "eos": files.eos,
        "pad": files.pad, "added_tokens": len(files.added_tokens),
        "special_tokens": len(files.specials), "warning": files.warning or None,
    }  # fmt: skip
    comparisons = []
    if options.check:
        from packer_cli.tokenizer_check import check as compare

        comparisons = compare(files, inputs or [])
    if options.as_json:
        print(json.dumps(about | {"compared": [one._asdict() for one in comparisons]}, indent=1))
    else:
        for key, value in about.items():
            if value is not None:
                print(one_line(f"{key.replace('_', ' ')}: {value}"))
        for one in comparisons:
            first = f", the first: {one.first!r}" if one.different else ""
            count = f"{one.different:,} of {one.texts:,} texts differ"
            print(one_line(f"{one.source}: {count} from AutoTokenizer{first}"))
    if any(one.different for one in comparisons):
        raise DataError(
            f"tokenizer {name}: AutoTokenizer gives other tokens than its tokenizer.json",
            'train and infer with one of them: "tokenizer_class": "PreTrainedTokenizerFast" in '
            "tokenizer_config.json makes AutoTokenizer load tokenizer.json as it is",
        )
