"""Recipes: what is read of them, and what wins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import assert_error, check_directory, contents, jsonl, packer, succeeds

from packer_cli import open_packed
from packer_cli.options.options import Amount
from packer_cli.options.recipe import (
    PackRequest,
    request_of,
)
from packer_cli.options.run_options import RunOptions

WEB = '[[source]]\nname = "web"\ninputs = "a.jsonl"\n'
CODE = '[[source]]\nname = "code"\ninputs = ["b.jsonl"]\n'


@pytest.fixture(autouse=True)
def _data(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.jsonl").write_bytes(jsonl(f"{name} first", f"{name} second"))


def read(content: str, name: str = "mix.toml", **config: Any) -> PackRequest[RunOptions]:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content)
    return request_of([name], config, RunOptions)


def test_a_recipe_of_sources() -> None:
    order = read(f"""
max-length = "4k"
tokens = "2B"
count = "trained"
dedup = "exact"
max_epochs = 3
train_on = "all"
{WEB}weight = 0.7
{CODE}weight = "20%"
max_epochs = 1.5
text_field = "content"
shape = "pretrain"
[[source]]
name = "chat"
inputs = ["chat.jsonl", "s3://b/*.zst", "-"]
field = {{messages = "chosen"}}
train-on = "assistant"
epochs = 2.5
[[source]]
name = "few"
inputs = ["few.txt"]
tokens = "1.5M"
[validation]
share = "0.5%"
sources = ["web", "chat"]
""")
    recipe, mixture = order.recipe, order.config.mixture
    assert recipe is not None
    assert mixture is not None
    assert mixture.sources == (
        Amount("web", weight=0.7, max_epochs=3),
        Amount("code", weight=0.2, max_epochs=1.5, held_out=False),
        Amount("chat", epochs=2.5, max_epochs=3),
        Amount("few", tokens=1_500_000, max_epochs=3, held_out=False),
    )
    assert (mixture.tokens, mixture.count, mixture.dedup) == (2 * 10**9, "trained", "exact")
    assert (mixture.validation_share, mixture.validation_documents) == (0.005, None)
    web, code, chat, _ = recipe.sources
    assert [one.inputs for one in (web, chat)] == [
        ("a.jsonl",),
        ("chat.jsonl", "s3://b/*.zst", "-"),
    ]
    assert [one.config.train_on for one in (web, code, chat)] == ["all", "all", "assistant"]
    assert (code.config.renamed, code.config.shape) == ({"text": "content"}, "text")
    assert chat.config.renamed == {"messages": "chosen"}


def test_paths_begin_at_the_recipe() -> None:
    Path("r/tok").mkdir(parents=True)
    Path("r/own.jinja").touch()
    order = read(
        'max_length = 16\ntokenizer = "./tok"\noutput = "out"\ntokenized = "../kept"\n'
        '[[source]]\nname = "web"\ninputs = ["web/*.gz", "/data/x", "s3://b/x", "-", "@list.txt"]\n'
        'chat_template = "own.jinja"\n[[source]]\nname = "b"\ninputs = "b"\n'
        'chat_template = "tools"',
        "r/mix.toml",
    )
    recipe = order.recipe
    assert recipe is not None
    assert recipe.sources[0].inputs == ("r/web/*.gz", "/data/x", "s3://b/x", "-", "@r/list.txt")
    assert [one.config.chat_template for one in recipe.sources] == ["r/own.jinja", "tools"]
    places = (recipe.tokenizer, order.command.output, recipe.tokenized)
    assert places == ("r/./tok", "r/out", "r/../kept")
    for name, expected in (("bytes", "bytes"), ("org/model", "org/model"), ("tok", "r/tok")):
        one = read(f'max_length = 16\ninputs = "x"\ntokenizer = "{name}"', "r/mix.toml")
        assert one.command.tokenizer == expected


def test_a_folder_whose_name_is_no_pattern() -> None:
    Path("r[1]/b").mkdir(parents=True)
    Path("r[1]/a.jsonl").touch()
    Path("r[1]/c[2].txt").touch()
    order = read('max_length = 16\ninputs = ["a.jsonl", "b", "c[2].txt", "*.md"]', "r[1]/mix.toml")
    assert order.inputs == ["r[1]/a.jsonl", "r[1]/b", "r[1]/c[2].txt", "r[[]1]/*.md"]


def test_the_command_line_wins() -> None:
    content = f"""
max_length = 16
seed = 1
train_on = "all"
{WEB}train_on = "assistant"
text_field = "body"
field = {{tools = "functions"}}
{CODE}"""
    given = {"max_length": 32, "train_on": "last-assistant", "fields": (("text", "content"),)}
    order = read(content, **given)
    assert order.recipe is not None
    assert (order.config.max_length, order.config.seed) == (32, 1)
    assert [one.config.train_on for one in order.recipe.sources] == ["last-assistant"] * 2
    assert [one.config.renamed for one in order.recipe.sources] == [
        {"text": "content", "tools": "functions"},
        {"text": "content"},
    ]


def test_what_becomes_of_an_earlier_result_is_said_anew() -> None:
    Path("mix.toml").write_text('max_length = 16\ninputs = "a.jsonl"\noverwrite = true')
    assert request_of(["mix.toml"], {}, RunOptions).options.overwrite
    order = request_of(["mix.toml"], {"add": True}, RunOptions)
    assert (order.options.overwrite, order.options.add) == (False, True)


def test_a_configuration_file_is_the_same_as_its_options() -> None:
    Path("run.toml").write_text(
        'inputs = ["a.jsonl", "b.jsonl"]\nmax-length = 16\nstrategy = "ff"\nbos = false\n'
        'columns = ["input_ids", "cu_seqlens", "position_ids"]\nworkers = 1\n'
        'max_loss = "1%"\nunit_bytes = "1K"\ntokenizer = "bytes"\n'
    )
    succeeds("pack", "run.toml", "-q")
    options = ["--max-length", 16, "--strategy", "ff", "--no-bos",
               "--columns", "input_ids,cu_seqlens,position_ids", "--workers", 1,
               "--max-loss", "1%", "--unit-bytes", "1K", "-t", "bytes"]  # fmt: skip
    succeeds("pack", "a.jsonl", "b.jsonl", *options, "-q", "-o", "out")
    assert contents("run-packed-16") == contents("out")
    succeeds("pack", "run.toml", "-q", "-l", 16, "--add", "--json")
    succeeds("pack", "run.toml", "-l", 8, "-q")
    succeeds("verify", "run-packed-8")


def test_a_recipe_that_begins_with_a_byte_order_mark() -> None:
    Path("mark.toml").write_bytes(b'\xef\xbb\xbfinputs = "a.jsonl"\nmax_length = 16')
    succeeds("pack", "mark.toml", "-q")


MIX = f"""
max_length = 64
tokenizer = "bytes"
{WEB}weight = 0.7
{CODE}weight = 0.3
text_field = "content"
"""
SPLIT = '[validation]\nshare = "20%"\nsources = ["web"]\n'


def test_a_recipe_is_packed_into_one_result_or_one_for_each_side() -> None:
    for name, field in (("a", "text"), ("b", "content")):
        records = [json.dumps({field: f"{name} {n} " * (n % 7 + 1)}) for n in range(400)]
        Path(f"{name}.jsonl").write_text("\n".join(records))

    def packed(*options: object, recipe: str = "mix.toml") -> Any:
        result = succeeds("pack", recipe, "-q", "--json", *options)
        assert result.stderr == ""
        return json.loads(result.stdout)

    Path("mix.toml").write_text(MIX)
    report = packed()
    assert report["directory"] == "mix-packed-64"
    manifest = check_directory("mix-packed-64")
    assert report["tokens"] == manifest["tokens"]
    assert manifest["config"]["mixture"]["sources"][0]["weight"] == 0.7
    packed("-o", "view", "--view")
    rows = [
        json.loads(packer("show", name, "0", "--json").stdout)["segments"]
        for name in ("mix-packed-64", "view")
    ]
    assert [one["text"] for one in rows[0]] == [one["text"] for one in rows[1]] != []
    # what stands beside a recipe wins in every source
    Path("beside.toml").write_text(MIX)
    packed("-o", "out", "-l", "32", "--no-eos", "--seed", 5, recipe="beside.toml")
    config = open_packed("out").manifest["config"]
    assert (config["max_length"], config["seed"]) == (32, 5)
    for name in ("web", "code"):
        kept = json.loads(Path(f"beside-tokenized/{name}/manifest.json").read_text())
        assert kept["config"]["add_eos"] is False
    Path("mix.toml").write_text(MIX + SPLIT)
    reports = packed("-o", "both")
    assert list(reports) == ["train", "validation"]
    for name, report in reports.items():
        manifest = check_directory(f"both/{name}")
        assert (report["directory"], report["rows"]) == (f"both/{name}", manifest["rows"])
    assert packer("pack", "mix.toml", "-o", "both", "-q", "-l", 32).exit_code == 2
    again = packer("pack", "mix.toml", "-o", "both", "-q", "--add").stdout
    assert [one.split("\n")[0] for one in again.split("\n\nboth/")] == ["both/train", "validation"]


@pytest.mark.parametrize("place", ["bytes", "weight", "data.jsonl"])
def test_a_nul_in_a_recipe(folder: Path, place: str) -> None:
    """TOML can write one, and no path, name or option can hold it."""
    recipe = 'tokenizer = "bytes"\n[[source]]\nname = "a"\n"weight" = 1\ninputs = ["data.jsonl"]\n'
    Path("mix.toml").write_text(recipe.replace(place, f"{place[:3]}\\u0000{place[3:]}"))
    assert_error(packer("pack", "mix.toml", "-o", "out"), 2, "mix.toml: holds a NUL")


def test_a_pipe_is_no_recipe(folder: Path) -> None:
    os.mkfifo("pipe.toml")
    assert_error(packer("pack", "pipe.toml"), 1, "pipe.toml: cannot read: not a regular file")
