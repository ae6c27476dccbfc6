"""Results of recipes whose tables of sources and stages were changed, digests and all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forging import Result
from mixed import pack_mixed, recipe_of, write_sources
from support import packer

from packer_cli.options.options import Stage

Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of two sources in two stages."""
    folder = tmp_path_factory.mktemp("forged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_sources()
        stages = Stage(100_000), Stage(100_000, (("web", 0.1), ("code", 0.9)), "late")
        amounts = {"web": {"weight": 0.6}, "code": {"weight": 0.4}}
        pack_mixed(recipe_of(amounts, stages=stages))
    return folder


def later(manifest: Manifest) -> None:
    first, second = manifest["stages"]
    first["rows"] += 1
    second["first_row"] += 1
    second["rows"] -= 1


def all_of_one(manifest: Manifest) -> None:
    manifest["sources"][0]["inputs"], manifest["sources"][1]["inputs"] = [0, 0], [0, 2]


def other_shares(manifest: Manifest) -> None:
    manifest["config"]["mixture"]["stages"][1]["tokens"] = 10**9


BY_ITSELF: dict[str, Callable[[Manifest], Any]] = {
    "another name": lambda manifest: manifest["sources"][0].update(name="other"),
    "inputs of another source": all_of_one,
    "another order": lambda manifest: manifest["sources"].reverse(),
    "no sources": lambda manifest: manifest["sources"].clear(),
    "no stages": lambda manifest: manifest["stages"].clear(),
    "another stage": lambda manifest: manifest["stages"][1].update(name="early"),
    "a stage is longer": lambda manifest: manifest["stages"][1].update(rows=10**6),
    "stages overlap": lambda manifest: manifest["stages"][1].update(first_row=1),
}
BY_INPUTS: dict[str, Callable[[Manifest], Any]] = {
    "taken": lambda manifest: manifest["sources"][0].update(taken=1),
    "asked": lambda manifest: manifest["sources"][0].update(asked=1.0),
    "available": lambda manifest: manifest["sources"][0].update(available=10**6),
    "duplicates": lambda manifest: manifest["sources"][1].update(duplicate_documents=7),
    "held out": lambda manifest: manifest["sources"][1].update(held_out_documents=7),
    "a stage begins elsewhere": later,
    "shares that cannot be": other_shares,
}


@pytest.mark.parametrize("change", [*BY_ITSELF, *BY_INPUTS])
def test_tables_that_are_not_those_of_the_recipe_are_found(
    result: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(result)
    shutil.rmtree("forged", ignore_errors=True)
    shutil.copytree("out", "forged")
    how = ["--against-inputs"] if change in BY_INPUTS else []
    forged = Result("forged")
    forged.save()
    assert packer("verify", "forged", *how).exit_code == 0
    (BY_ITSELF | BY_INPUTS)[change](forged.manifest)
    forged.save()
    done = packer("verify", "forged", *how)
    assert done.exit_code == 1
    assert "manifest.json: " in done.stdout
    assert "1 problem" in done.stderr
