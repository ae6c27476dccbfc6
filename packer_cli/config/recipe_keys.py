"""The keys of a recipe, each declared once: what may stand at its top and in its tables.

Options of `packer pack` are keys by the names that they have on the command line.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args

from packer_cli.config.command_options import CommandOptions, TextField
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.mixture import COUNTS, DEDUPS
from packer_cli.config.option import Option, declarations_of, declared_in, plain
from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import RunOptions

# They say which part of a run a process does, and how it reports: no recipe holds them.
OF_ONE_RUN = ("rank", "world_size", "quiet", "json", "debug")

_Inputs = Annotated[
    tuple[str, ...],
    Option("Files, directories, globs and URLs of these. Relative ones begin at the recipe."),
]
_MaxEpochs = Annotated[
    float | None,
    Option("The most of a source that weight or tokens may take. Default: 1.", least=0),
]


@dataclass(frozen=True)
class Inputs:
    """What a recipe without sources packs, at its top."""

    inputs: _Inputs = ()


@dataclass(frozen=True)
class MixtureKeys:
    """What only recipes with sources have at their top; see `Mixture`."""

    tokens: Annotated[
        int | None,
        Option(
            "How much there is in all: 2B, 200M, 500k (500,000). What epochs and tokens of sources "
            "leave of it is shared by weight. Default: the most that needs no source more than "
            "max_epochs times.",
            value="tokens",
            least=1,
        ),
    ] = None
    count: Annotated[str, Option("What amounts count:", choices=plain(COUNTS))] = "tokens"
    max_epochs: _MaxEpochs = None
    dedup: Annotated[
        str,
        Option(
            "Which documents are left out as duplicates:",
            choices={DEDUPS[0]: "", DEDUPS[1]: "all but one of equal ones, whatever their source"},
        ),
    ] = "none"
    mix_within_rows: Annotated[
        bool, Option("Whether a row may hold documents of several sources. Default: true.")
    ] = True
    tokenized: Annotated[
        str | None,
        Option(
            "Directory that holds a tokenized directory for each source, to be used again. "
            "Default: beside the output."
        ),
    ] = None


@dataclass(frozen=True)
class SourceKeys:
    """What a [[source]] has besides options of documents; see `Amount`."""

    name: Annotated[str, Option("What the source is called in all reports.")]
    inputs: _Inputs
    weight: Annotated[
        float | None,
        Option("Its share, against the weights of other sources.", value="share", least=0),
    ] = None
    epochs: Annotated[
        float | None, Option("How often all of it is taken; a fraction chooses documents.", least=0)
    ] = None
    tokens: Annotated[
        int | None,
        Option("How much of it is taken: 2B, 200M, 500k (500,000).", value="tokens", least=1),
    ] = None
    max_epochs: _MaxEpochs = None


@dataclass(frozen=True)
class SourceText:
    """The option of a command that concerns documents."""

    text_field: TextField = None


@dataclass(frozen=True)
class ValidationKeys:
    """What [validation] has: documents that are held out, chosen by their content."""

    share: Annotated[
        float | None, Option("Share of the documents of each source: 0.5%.", value="share")
    ] = None
    documents: Annotated[
        int | None, Option("Or as many documents of each source.", value="count", least=1)
    ] = None
    sources: Annotated[
        tuple[str, ...], Option("Names of the sources that give documents. Default: all.")
    ] = ()


@dataclass(frozen=True)
class StageKeys:
    """What a [[stage]] has; see `Stage`."""

    tokens: Annotated[
        int,
        Option(
            "How much there is in this stage: 2B, 200M, 500k (500,000).", value="tokens", least=1
        ),
    ]
    name: Annotated[str | None, Option("What the stage is called in reports.")] = None
    weights: Annotated[
        tuple[tuple[str, float], ...],
        Option("Weights of sources in this stage, where they differ.", value="weights"),
    ] = ()


@dataclass(frozen=True)
class Key:
    """A key of a table, for a field of the dataclass `owner`. Without a default it is MISSING."""

    name: str
    field: str
    owner: type
    option: Option
    kinds: tuple[Any, ...]
    default: Any

    @property
    def is_list(self) -> bool:
        """Whether it holds several texts."""
        return any(one == tuple[str, ...] for one in self.kinds)


TOP = (Inputs, PackConfig, CommandOptions, RunOptions, MixtureKeys)
SOURCE = (SourceKeys, DocumentConfig, SourceText)
VALIDATION = (ValidationKeys,)
STAGE = (StageKeys,)
# keys at the top that hold tables
TABLES = {
    "source": "Inputs that belong together, with their options and how much of them is taken.",
    "validation": "Documents that are held out: the result is two directories.",
    "stage": "Parts of the training, one after the other, with weights of their own.",
}


@cache
def keys_of(*owners: type) -> dict[str, Key]:
    """Name -> key, of all fields that are declared in these dataclasses."""
    keys = {}
    for owner in owners:
        defaults = {one.name: one.default for one in fields(owner)}
        for name, hint in declarations_of(owner).items():
            option = declared_in(hint)
            spelled = key_name(option, name)
            kinds = _members(get_args(hint)[0])
            keys[spelled] = Key(spelled, name, owner, option, kinds, defaults[name])
    return keys


def key_name(option: Option, field: str) -> str:
    """What the key of a declared field is called."""
    return option.key or normal(option.name(field))


def normal(name: str) -> str:
    """`max_length` for --max-length, max-length and max_length."""
    return name.lstrip("-").replace("-", "_")


def is_required(key: Key) -> bool:
    return key.default is MISSING


def _members(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, type) or getattr(hint, "__origin__", None) is tuple:
        return (hint,)
    return get_args(hint)
