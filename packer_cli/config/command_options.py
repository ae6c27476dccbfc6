"""Options that commands use themselves: which tokenizer, which text, and where the result goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from packer_cli.config.option import DOCUMENTS, INPUT, OUTPUT, RUNNING, Option

TokenizerName = Annotated[
    str | None,
    Option(
        "Folder, tokenizer.json, hub name, or bytes. Default: $PACKER_TOKENIZER, then bytes.",
        DOCUMENTS,
        first=2,
        short="-t",
        metavar="NAME",
        elsewhere=("--model", "--tokenizer-path", "--tokenizer-name", "--tokenizer-model"),
    ),
]
TextField = Annotated[
    str | None,
    Option(
        "Field or column that holds the text. Default: text.",
        INPUT,
        first=4,
        metavar="COLUMN",
        elsewhere=("--text-column", "--text-key", "--json-keys"),
    ),
]
PositionIds = Annotated[bool, Option("Also write the column position_ids.", OUTPUT)]
Staging = Annotated[
    str | None,
    Option(
        "Where to pack a result for a URL first. Default: in the temporary directory.",
        OUTPUT,
        metavar="DIR",
    ),
]
MaxShareError = Annotated[
    float | None,
    Option(
        "Exit 1 when the share of a recipe's source is off by more than this, because documents "
        "stay whole: 1% or 0.01.",
        RUNNING,
        value="share",
        least=0,
        most=1,
    ),
]


def output_option(default: str) -> Option:
    """The declaration of --output."""
    return Option(
        f"Directory to write, or a URL. Default: {default}.",
        OUTPUT,
        first=3,
        short="-o",
        metavar="DIR",
        elsewhere=("--out", "--output-dir", "--save-dir", "--output-path", "--output-prefix"),
    )


@dataclass(frozen=True)
class CommandOptions:
    """Those of `packer pack`, as they are given on the command line or in a recipe."""

    tokenizer: TokenizerName = None
    output: Annotated[str | None, output_option("INPUT-packed-MAX_LENGTH")] = None
    text_field: TextField = None
    position_ids: PositionIds = False
    staging: Staging = None
    max_share_error: MaxShareError = None
