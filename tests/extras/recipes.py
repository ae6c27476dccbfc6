"""Results for tests of what reads them: of records, and of recipes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from support import packer

from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import Amount, Mixture, PackConfig
from packer_cli.options.recipe import Recipe, RecipeSource
from packer_cli.options.run_options import RunOptions
from packer_cli.run.recipe import pack_recipe

TOKENS_OF = {"letters": "abc", "digits": "0123456789", "signs": "+-*/"}  # of the sources below


def run(*arguments: object) -> None:
    """Run packer, which must succeed."""
    result = packer(*arguments, "-q")
    assert result.exit_code == 0, result.stderr


def pack_records(folder: Path, records: Iterable[Any], length: int, *options: object) -> Path:
    """Pack records into a folder's `out`, by way of its `data.jsonl`."""
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    run("pack", folder / "data.jsonl", "-l", length, "-o", folder / "out", *options)
    return folder / "out"


def write_sources(folder: Path, documents: int = 150, seed: int = 0) -> dict[str, Path]:
    """A file for each source, whose texts are of characters that no other has."""
    random, files = np.random.default_rng(seed), {}
    for name, characters in TOKENS_OF.items():
        texts = ["".join(random.choice(list(characters), random.integers(2, 60)))
                 for _ in range(documents)]  # fmt: skip
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return files


def pack_sources(
    out: Path,
    files: dict[str, Path],
    amounts: dict[str, dict[str, Any]] | None = None,
    mixture: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Pack a recipe of a source for each file; its amounts by the sources' names."""
    shares = tuple(Amount(name, **(amounts or {}).get(name, {})) for name in files)
    of_text = DocumentConfig(shape="text")
    sources = tuple(RecipeSource(name, (str(path),), of_text) for name, path in files.items())
    config = PackConfig(mixture=Mixture(shares, **(mixture or {})), **options)
    recipe = Recipe(str(out.parent / "mix.toml"), "bytes", sources, config)
    pack_recipe(recipe, out, RunOptions(workers=1))
    return out
