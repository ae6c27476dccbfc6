"""`packer tokenizer`: describe a tokenizer, and compare it with AutoTokenizer of transformers.

Training and inference must see the same tokens, and most inference begins with AutoTokenizer,
which does not always load tokenizer.json as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from packer_cli.errors import DataError, UsageError, one_line
from packer_cli.options.option import option
from packer_cli.options.run_options import Reporting

if TYPE_CHECKING:
    from packer_cli.tokenization.engines import ReferenceEngine
    from packer_cli.tokenization.locate import TokenizerFiles

_TEXTS = 1000  # of each file, at most
_AT_A_TIME = 64
_SHOWN = 80  # characters of a text


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
    comparisons = list[Comparison]()
    if options.check:
        comparisons = _check(files, inputs or [])
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


class Comparison(NamedTuple):
    """How many texts of a source were compared, how many of them differ, and the first of these."""

    source: str
    texts: int
    different: int
    first: str | None


def _check(files: TokenizerFiles, inputs: list[str]) -> list[Comparison]:
    """Compare on the battery, on every assigned character, and on the first texts of each input.

    Records of messages are rendered with the tokenizer's template. Raises UsageError without
    transformers, or where it cannot load the folder.
    """
    from packer_cli.tokenization.engines import ReferenceEngine
    from packer_cli.tokenization.trust import BATTERY, assigned_characters, in_contexts

    theirs, ours = _auto_tokenizer(files.source), ReferenceEngine(files.json)
    own = [f"a{token}b {token} {token}\n" for token in files.added_tokens]
    known = assigned_characters()
    characters = (in_contexts(known[i : i + _AT_A_TIME]) for i in range(0, len(known), _AT_A_TIME))
    sources: list[tuple[str, Iterator[str]]] = [
        ("the battery", iter(BATTERY)), ("its added tokens", iter(own)), ("characters", characters),
    ]  # fmt: skip
    sources += [(name, islice(_texts(name, files), _TEXTS)) for name in inputs]
    return [_compared(name, texts, theirs, ours) for name, texts in sources]


def _compared(name: str, texts: Iterator[str], theirs: Any, ours: ReferenceEngine) -> Comparison:
    compared, different, first = 0, 0, None
    for text in texts:
        compared += 1
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        if expected != ours.encode([text])[0].tolist():
            different += 1
            first = text[:_SHOWN] if first is None else first
    return Comparison(name, compared, different, first)


def _auto_tokenizer(source: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError("--check: needs transformers", "pip install transformers") from error
    path = Path(source).expanduser()
    folder = path.parent if path.is_file() else path if path.is_dir() else source
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever it raises, it says why
        raise UsageError(
            f"tokenizer {source}: AutoTokenizer cannot load it: "
            f"{(str(error).splitlines() or [type(error).__name__])[0]}",
            "it may need a newer transformers, or files that are not there",
        ) from error


def _texts(name: str, files: TokenizerFiles) -> Iterator[str]:
    from packer_cli.inputs.detection import detect_shape
    from packer_cli.inputs.discovery import find_inputs
    from packer_cli.inputs.formats import reader_for
    from packer_cli.options.options import PackConfig
    from packer_cli.options.shape_rules import by_file_shape, for_shape
    from packer_cli.records import Slice
    from packer_cli.run.source import composer_of

    config = PackConfig(1 << 20)
    inputs = find_inputs([name], config)
    inputs, shape_of_all, _ = detect_shape(inputs, config)
    config = replace(config, overlong="drop")  # of no matter here
    own = by_file_shape(for_shape(config, shape_of_all), shape_of_all)
    for file in inputs:
        shape, config = own[file.shape]
        composer = composer_of(shape, config, files) if shape.is_composed else None
        whole = Slice(file.index, 0, None, 0)
        for records in reader_for(file.format).read(file, whole, shape, config):
            composed = composer.compose(records) if composer else records
            yield from composed.texts or []
