"""A recipe once it is read: sources with their options, and the options of the rows they make."""

from __future__ import annotations

from dataclasses import dataclass

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig


@dataclass(frozen=True)
class Source:
    """A source of a recipe: what is read, and with which options it is tokenized.

    inputs     as on the command line; relative ones start at the current directory
    inherited  options that all sources have from the recipe's top or the command line: one that
               this source's records have no use for is passed over
    """

    name: str
    inputs: tuple[str, ...]
    config: DocumentConfig
    inherited: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Recipe:
    """Several sources and one result.

    path       of the recipe
    config     of the rows; its `mixture` has an amount for every source, in the same order
    tokenized  the directory that holds a tokenized directory for each source; None: beside the
               output
    """

    path: str
    tokenizer: str | None
    sources: tuple[Source, ...]
    config: PackConfig
    tokenized: str | None = None
