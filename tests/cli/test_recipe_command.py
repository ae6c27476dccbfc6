"""`packer recipe`: what it writes of what it finds, and that this is packed without an edit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import assert_error, check_directory, packer

from packer_cli.config.orders import order_of
from packer_cli.config.recipe import Recipe
from packer_cli.config.recipe_schema import SCHEMA
from packer_cli.config.recipe_tables import Given
from packer_cli.config.run_options import RunOptions

ROOT = Path(__file__).parent.parent.parent
REAL = ROOT.parent / "shared" / "data"
TEMPLATE = ROOT / "sample_data" / "chat.jinja"


def lines(path: str, *records: object) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.fixture
def mixed(folder: Path) -> Path:
    """A folder of many shapes."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    text = [{"text": f"number {n} " * 20} for n in range(50)]
    lines("data/web/a.jsonl", *text)
    lines("data/web/b.jsonl", *text[:9])
    lines("data/chat.jsonl", *[{"messages": turns, "id": n} for n in range(30)])
    lines("data/code-1.jsonl", *[{"content": f"def f_{n}(): pass"} for n in range(30)])
    lines("data/code-2.jsonl", *[{"content": f"def g_{n}(): pass"} for n in range(30)])
    lines("data/alpaca.jsonl", *[{"instruction": f"say {n}", "output": str(n)} for n in range(30)])
    lines("data/odd.jsonl", {"x": 1, "y": "\x7f\n"})
    lines("data/empty.jsonl")
    return folder


def read(path: str) -> Recipe:
    recipe = order_of([path], Given(), RunOptions).recipe
    assert recipe is not None
    return recipe


def test_a_source_for_each_group_of_files(mixed: Path) -> None:
    result = packer("recipe", "data", "-q", "--chat-template", TEMPLATE, "-t", "bytes")
    assert result.exit_code == 0, result.stderr
    Path("mix.toml").write_text(result.stdout)
    sources = {one.name: one for one in read("mix.toml").sources}
    assert {name: list(one.inputs) for name, one in sources.items()} == {
        "alpaca": ["data/alpaca.jsonl"],
        "chat": ["data/chat.jsonl"],
        "code": ["data/code-1.jsonl", "data/code-2.jsonl"],
        "web": ["data/web/a.jsonl", "data/web/b.jsonl"],
    }
    assert sources["code"].config.renamed == {"text": "content"}
    assert "# text; 0.0 MB in 2 files; fields: text\n" in result.stdout
    assert "# left out: no field is known to hold text" in result.stdout
    texts = [len(f"number {n} " * 20) + 1 for n in [*range(50), *range(9)]]
    tokens = int(result.stdout.split("59 documents and ")[1].split(" tokens")[0].replace(",", ""))
    assert abs(tokens - sum(texts)) < 0.1 * sum(texts)


def test_it_is_packed_as_it_is_written_from_any_folder(mixed: Path) -> None:
    Path("recipes").mkdir()
    options = ["-q", "--chat-template", os.path.relpath(TEMPLATE), "-o", "recipes/mix.toml"]
    assert packer("recipe", "data", *options).exit_code == 0
    os.chdir("recipes")
    result = packer("pack", "mix.toml", "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
    manifest = check_directory("out")
    assert len(manifest["config"]["mixture"]["sources"]) == 4


def test_messages_without_a_template_are_left_out(mixed: Path) -> None:
    assert packer("recipe", "data", "-q", "-o", "mix.toml").exit_code == 0
    assert [one.name for one in read("mix.toml").sources] == ["alpaca", "code", "web"]
    assert "# left out: messages need a chat template" in Path("mix.toml").read_text()


def test_large_sources_have_weights_by_size(folder: Path) -> None:
    for name, count in (("a", 3000), ("b", 1000)):
        lines(f"{name}.jsonl", *[{"text": "x" * 400, name: n} for n in range(count)])
    assert packer("recipe", "a.jsonl", "b.jsonl", "-o", "mix.toml").exit_code == 0
    order = order_of(["mix.toml"], Given(), RunOptions)
    assert order.config.mixture is not None
    weights = [one.weight for one in order.config.mixture.sources]
    assert weights == pytest.approx([0.75, 0.25], abs=0.01)
    assert packer("pack", "mix.toml", "-q", "-o", "out").exit_code == 0


def test_a_file_that_is_there_stays(mixed: Path) -> None:
    Path("mix.toml").write_text("mine")
    assert_error(packer("recipe", "data", "-q", "-o", "mix.toml"), 2, "mix.toml: is there already")
    assert Path("mix.toml").read_text() == "mine"
    assert packer("recipe", "data", "-q", "-o", "mix.toml", "--overwrite").exit_code == 0
    assert Path("mix.toml").read_text().startswith("# Written by packer recipe")


def test_the_schema_is_written_for_editors(folder: Path) -> None:
    assert packer("recipe", "--schema").stdout == SCHEMA.read_text()
    assert packer("recipe", "--schema", "-o", "recipe.schema.json").exit_code == 0
    assert Path("recipe.schema.json").read_text() == SCHEMA.read_text()
    assert_error(packer("recipe", "-"), 2, "-: a recipe names files")


@pytest.mark.skipif(not REAL.exists(), reason=f"needs the real data in {REAL}")
def test_a_mixed_folder_of_real_data(folder: Path) -> None:
    names = [
        "chat_oasst_en100.jsonl.zst",
        "sft_gsm8k_train.jsonl.zst",
        "multi_xquad_contexts.jsonl.zst",
        "text_tinyshakespeare.jsonl.zst",
        "parquet/text_wikitext2_lines_with_nulls.parquet",
    ]
    Path("data").mkdir()
    for name in names:
        shutil.copy(REAL / name, "data")
    result = packer("recipe", "data", "-q", "--chat-template", TEMPLATE, "-o", "mix.toml")
    assert result.exit_code == 0, result.stderr
    assert len(read("mix.toml").sources) >= 4
    packed: Any = packer("pack", "mix.toml", "-q", "-o", "out")
    assert packed.exit_code == 0, packed.stderr
    assert check_directory("out")["documents"] > 10_000
