"""Results of a recipe to look at: three sources, whose files `write_sources` writes.

pack_mixed(recipe_of({"web": {"weight": 0.6}, "code": {"weight": 0.3}}), "out")
documents_in("out")     how often each document is in the rows, from the shards alone
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support import recover_documents

from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import Amount, Mixture, PackConfig
from packer_cli.options.recipe import Recipe, RecipeSource
from packer_cli.options.run_options import RunOptions
from packer_cli.result.manifest import Manifest, load
from packer_cli.run.recipe import pack_recipe

Documents = Counter[tuple[int, ...]]
IN_SHARES: dict[str, dict[str, Any]] = {
    "web": {"weight": 0.6},
    "code": {"weight": 0.3},
    "chat": {"epochs": 2.0, "max_epochs": 3.0},
}


def write_sources() -> dict[str, list[str]]:
    """Write web/, code.jsonl and chat.jsonl; gives the inputs of every source."""
    Path("web").mkdir()
    for half in ("a", "b"):
        _write(f"web/{half}.jsonl", [f"the web page {half}{i} says {'so ' * (i % 40)}"
                                     for i in range(2000)])  # fmt: skip
    _write("code.jsonl", [f"def f{i}(): return {'x + ' * (i % 30)}{i}" for i in range(3000)])
    _write(
        "chat.jsonl", [f"hello {i % 720}, how are you? {'well, ' * (i % 9)}" for i in range(900)]
    )
    return {"web": ["web"], "code": ["code.jsonl"], "chat": ["chat.jsonl"]}


def _write(name: str, texts: Sequence[str]) -> None:
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def recipe_of(amounts: dict[str, dict[str, Any]], max_length: int = 64, **how: Any) -> Recipe:
    """Of the sources that `write_sources` writes. `how`: of the mixture."""
    inputs = {"web": ("web",), "code": ("code.jsonl",), "chat": ("chat.jsonl",)}
    mixture = Mixture(tuple(Amount(name, **amount) for name, amount in amounts.items()), **how)
    sources = tuple(RecipeSource(name, inputs[name], DocumentConfig()) for name in amounts)
    return Recipe("mix.toml", "bytes", sources, PackConfig(max_length, mixture=mixture))


def pack_mixed(recipe: Recipe, out: str = "out") -> list[Manifest | None]:
    """Pack it; gives the manifest of every side."""
    results = pack_recipe(recipe, Path(out), RunOptions(progress=False))
    return [manifest for _, manifest in results]


def documents_in(directory: str) -> Documents:
    """How often each document is in the rows."""
    return Counter(tuple(one) for one in recover_all(directory))


def recover_all(directory: str) -> Iterator[list[int]]:
    """The tokens of all documents, as often as rows hold them: once in a unit at most."""
    manifest = load(directory)
    for unit in {shard.unit for shard in manifest.shards}:
        yield from recover_documents(directory, unit=unit).values()
