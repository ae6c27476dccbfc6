"""`packer tokenizer`: describe a tokenizer, and compare it with AutoTokenizer of transformers.

Training and inference must see the same tokens, and most inference begins with AutoTokenizer,
which does not always load tokenizer.json as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from packer_cli.errors import DataError, UsageError, one_line
from packer_cli.options.run_options import ReportOptions

if TYPE_CHECKING:
    from packer_cli.tokenization.locate import TokenizerFiles

_TEXTS = 1000  # of each file, at most
_SHOWN = 80  # characters of a text
Name = Annotated[str, Argument(metavar="NAME", help="Folder, tokenizer.json, or hub name.")]
Inputs = Annotated[
    list[str] | None,
    Argument(metavar="INPUT", help="Files whose texts are compared as well: --check."),
]


@dataclass(frozen=True)
class CheckOptions(ReportOptions):
    check: Annotated[bool, Option(help="Compare with AutoTokenizer from transformers.")] = False


def tokenizer(name: Name, inputs: Inputs = None, *, options: CheckOptions) -> None:
    """Describe a tokenizer; with --check, compare its tokens with AutoTokenizer's.

    Exit 1 when they differ, with the first text that shows it. Special tokens around texts do not
    count.

    Example: packer tokenizer ./my-model --check data.jsonl
    """
    from packer_cli.tokenization.locate import locate

    files = locate(name)
    about = {
        "tokenizer": name, "sha256": files.sha256, "bos": files.bos, "eos": files.eos,
        "pad": files.pad, "added_tokens": len(files.added_tokens),
        "special_tokens": len(files.specials), "warning": files.warning or None,
    }  # fmt: skip
    is_checked = options.check or inputs
    compared = [*_compare(files, inputs or [])] if is_checked else []
    if options.as_json:
        print(json.dumps(about | {"compared": compared}, indent=1))
    else:
        shown = {key.replace("_", " "): value for key, value in about.items() if value is not None}
        for result in compared:
            first = f", the first: {result['first']!r}" if result["different"] else ""
            counts = f"{result['different']:,} of {result['texts']:,} texts"
            shown[result["source"]] = f"{counts} differ from AutoTokenizer{first}"
        print(*(one_line(f"{key}: {value}") for key, value in shown.items()), sep="\n")
    if any(comparison["different"] for comparison in compared):
        raise DataError(
            f"tokenizer {name}: AutoTokenizer gives other tokens than its tokenizer.json",
            'train and infer with one of them: "tokenizer_class": "PreTrainedTokenizerFast" in '
            "tokenizer_config.json makes AutoTokenizer load tokenizer.json as it is",
        )


def _compare(files: TokenizerFiles, inputs: list[str]) -> Iterator[dict[str, Any]]:
    """Yield counts of texts, of different ones, and the first such, by source of texts."""
    from packer_cli.tokenization.engines import ReferenceEngine
    from packer_cli.tokenization.trust import built_in_texts

    path, ours = Path(files.source).expanduser(), ReferenceEngine(files.json)
    folder = path.parent if path.is_file() else path if path.is_dir() else files.source
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any kind, with the reason
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"tokenizer {files.source}: AutoTokenizer cannot load it: {why}",
            "--check needs transformers, perhaps a newer one, and all files of the tokenizer",
        ) from error
    texts = {"built-in texts": built_in_texts(files.added_tokens)}
    for source, texts_there in (texts | {name: _texts(name, files) for name in inputs}).items():
        about: dict[str, Any] = {"source": source, "texts": 0, "different": 0, "first": None}
        for text in texts_there:
            about["texts"] += 1
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            if ids != ours.encode([text])[0].tolist():
                about["different"] += 1
                about["first"] = about["first"] or text[:_SHOWN]
        yield about


def _texts(name: str, files: TokenizerFiles) -> Iterator[str]:
    """Yield the first texts of an input; messages as the tokenizer's template renders them."""
    from packer_cli.inputs.discovery import find_inputs
    from packer_cli.options.documents import DocumentConfig
    from packer_cli.options.run_options import EncodingOptions
    from packer_cli.run import pipeline
    from packer_cli.run.pool import Pool, Reporter
    from packer_cli.run.unit import NOWHERE, UnitContext

    config, options = DocumentConfig(), EncodingOptions(workers=1)
    found = find_inputs([name], config)
    run = pipeline.resolve_run(found, config, files.source, options).cut()
    context = UnitContext(run, NOWHERE, options, Reporter())
    slices = [part for unit in run.units for part in unit.slices]
    # a worker, for templates render
    with closing(Pool(context.first_texts, prepare=context.load)) as pool:
        for _, texts in pool.map([(slices, _TEXTS)]):
            yield from texts
