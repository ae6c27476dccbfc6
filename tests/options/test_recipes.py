"""Recipes: what is read of them, what wins, every mistake in one line, the schema, a first one."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support import assert_error, check_directory, contents, jsonl, packer

from packer_cli import open_packed
from packer_cli.options.options import Amount, Stage
from packer_cli.options.recipe import (
    SOURCE,
    STAGE,
    TOP,
    VALIDATION,
    Order,
    Source,
    keys_of,
    order_of,
    schema,
    schema_text,
)
from packer_cli.options.run_options import RunOptions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent
TEMPLATE = ROOT / "sample_data" / "chat.jinja"
WEB = '[[source]]\nname = "web"\ninputs = "a.jsonl"\n'
CODE = '[[source]]\nname = "code"\ninputs = ["b.jsonl"]\n'


@pytest.fixture(autouse=True)
def _data(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.jsonl").write_bytes(jsonl(f"{name} first", f"{name} second"))


def read(content: str, name: str = "mix.toml", **config: Any) -> Order[RunOptions]:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content)
    return order_of([name], config, RunOptions)


def test_a_recipe_of_sources() -> None:
    order = read(f"""
max-length = "4k"
tokenizer = "bytes"
tokens = "2B"
count = "trained"
dedup = "exact"
mix_within_rows = false
max_epochs = 3
train_on = "all"
seed = 7
workers = 2
view = true
tokenized = "kept"
output = "out"
{WEB}weight = 0.7
{CODE}weight = "20%"
max_epochs = 1.5
text_field = "content"
shape = "pretrain"
[[source]]
name = "chat"
inputs = ["chat.jsonl", "s3://bucket/more/*.jsonl.zst", "-"]
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
    config, recipe = order.config, order.recipe
    assert recipe is not None
    assert (config.max_length, config.seed, config.view, config.train_on) == (4096, 7, True, None)
    assert recipe.config is config
    assert (order.options.workers, order.command.output, order.command.tokenizer) == (
        2,
        "out",
        "bytes",
    )
    assert (recipe.path, recipe.tokenizer, recipe.tokenized) == ("mix.toml", "bytes", "kept")
    mixture = config.mixture
    assert mixture is not None
    assert mixture.sources == (
        Amount("web", weight=0.7, max_epochs=3),
        Amount("code", weight=0.2, max_epochs=1.5, held_out=False),
        Amount("chat", epochs=2.5, max_epochs=3),
        Amount("few", tokens=1_500_000, max_epochs=3, held_out=False),
    )
    assert (mixture.tokens, mixture.count, mixture.dedup) == (2 * 10**9, "trained", "exact")
    assert (mixture.mix_within_rows, mixture.validation_share) == (False, 0.005)
    web, code, chat, few = recipe.sources
    assert [one.inputs for one in (web, code, few)] == [("a.jsonl",), ("b.jsonl",), ("few.txt",)]
    assert chat.inputs == ("chat.jsonl", "s3://bucket/more/*.jsonl.zst", "-")
    assert [one.config.train_on for one in (web, code, chat)] == ["all", "all", "assistant"]
    assert code.config.renamed == {"text": "content"}
    assert code.config.shape == "text"
    assert chat.config.renamed == {"messages": "chosen"}


def test_stages_and_documents_that_are_held_out_by_number() -> None:
    order = read(f"""
max_length = 16
{WEB}weight = 1
{CODE}weight = 0
[[stage]]
name = "first"
tokens = "4k"
[[stage]]
tokens = 1e6
weights = {{web = 0.5, code = "50%"}}
[validation]
documents = 500
""")
    mixture = order.config.mixture
    assert mixture is not None
    assert mixture.validation_documents == 500
    assert mixture.stages == (
        Stage(4000, name="first"),
        Stage(10**6, (("web", 0.5), ("code", 0.5))),
    )


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
    assert (recipe.tokenizer, order.command.output, recipe.tokenized) == (
        "r/./tok",
        "r/out",
        "r/../kept",
    )
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
    assert order_of(["mix.toml"], {}, RunOptions).options.overwrite
    order = order_of(["mix.toml"], {"update": True}, RunOptions)
    assert (order.options.overwrite, order.options.update) == (False, True)


def test_a_configuration_file_is_the_same_as_its_options() -> None:
    Path("run.toml").write_text(
        'inputs = ["a.jsonl", "b.jsonl"]\nmax-length = 16\nstrategy = "ff"\nbos = false\n'
        'separator = "#"\ncolumns = ["input_ids", "cu_seqlens"]\nposition_ids = true\nworkers = 1\n'
        'max_loss = "1%"\nunit_bytes = "1K"\ntokenizer = "bytes"\n'
    )
    result = packer("pack", "run.toml", "-q")
    assert result.exit_code == 0, result.stderr
    options = ["--max-length", 16, "--strategy", "ff", "--no-bos", "--separator", "#",
               "--columns", "input_ids,cu_seqlens", "--position-ids", "--workers", 1,
               "--max-loss", "1%", "--unit-bytes", "1K", "-t", "bytes"]  # fmt: skip
    assert packer("pack", "a.jsonl", "b.jsonl", *options, "-q", "-o", "out").exit_code == 0
    assert contents("run-packed-16") == contents("out")
    again = packer("pack", "run.toml", "-q", "-l", 16, "--update", "--json")
    assert again.exit_code == 0, again.stderr
    assert packer("pack", "run.toml", "-l", 8, "-q").exit_code == 0
    assert packer("verify", "run-packed-8").exit_code == 0


# a recipe, with ¶ for line ends | its error, with @ for its path | what the tip holds
MISTAKES = """
max_lenght = 16 | @: there is no key 'max_lenght' | did you mean max_length?
[[sources]]¶name = 'a' | @: there is no key 'sources' | mean [[source]]?
[validate]¶share = 1 | @: there is no key 'validate' | mean [validation]?
WEB wieght = 1 | @, source 'web': there is no key 'wieght' | weight?
WEB [validation]¶shar = 1 | @, validation: there is no key 'shar' | share?
WEB weight = 1¶[[stage]]¶name = 'warm'¶token = 5 | @, stage 'warm': there is no key 'token' | did yo
quiet = true | @: there is no key 'quiet'
weight = 2 | @: there is no key 'weight' | it is a key of [[source]]
WEB max_length = 16 | @, source 'web': there is no key 'max_length' | of the top
max_length = true | @: max_length: true is not a whole number
max_length = 4.5 | @: max_length: 4.5 is not a whole number
max_length = 0 | @: max_length: 0 is not between 1 and 16777216
view = 'yes' | @: view: 'yes' is not true or false
tokenizer = ['a'] | @: tokenizer: ['a'] is not text in quotes
field = ['a=b'] | @: field: ['a=b'] is not a table of texts
strategy = 'magic' | @: strategy: 'magic' is not one of best-fit
max_length = 8¶max-length = 9 | @: max_length: is there twice | leave one
max_length = | @: Invalid value (at  | a recipe is TOML
max_length = 8¶a = ["x", | @: Invalid value (at line 2, column 10, the end) | a recipe is TOML
max_length = 16 | @: has no inputs | inputs =
inputs = [''] | @: an input is empty | inputs =
inputs = 'a.jsonl' | Missing option '--max-length' / '-l'. | max_length to mix.toml
WEB | Missing option '--max-length' / '-l'. | max_length to mix.toml
inputs = 'x'¶tokens = '2B' | @: tokens: is for recipes with sources
inputs = 'x'¶[validation]¶share = 1 | @: validation: is for recipes
inputs = 'x'¶WEB | @: inputs: are those of sources | [[source]]
source = [] | @: source: expected tables that begin with | brackets
[[source]]¶inputs = 'x' | @, source 1: has no name | name: What the source
[[source]]¶name = 'web' | @, source 'web': has no inputs | inputs: Files
[[source]]¶name = "a/b"¶inputs = "a.jsonl" | @, source 'a/b': name: 'a/b' cannot be | digits
WEB weight = -1 | @, source 'web': weight: -1 is negative
WEB weight = 0 | @: weight: all weights are 0 | more than 0
WEB epochs = 0 | @, source 'web': epochs: 0.0 is not positive | leave the source out
WEB weight = 1¶epochs = 2 | @, source 'web': has weight and epochs | one
WEB WEB | @: source 'web': 2 sources have this name | of its own
tokens = 5¶WEB | @: tokens: says how much there is in all, but | weight
WEB train_on = 'me' | @, source 'web': train_on: 'me' is not one of
max_length = 8¶WEB max_errors = 3 | @, source 'web': max_errors needs on_error skip | add on_error
max_length = 8¶strategy = 'wrap'¶overlong = 'drop'¶WEB | @: overlong: drop has no meaning with str
WEB [validation] | @, validation: needs one of share and documents | share =
WEB [validation]¶share = 0 | @, validation: share: 0.0 is not between
WEB [validation]¶share = 0.1¶documents = 2 | @, validation: needs one of share and documents
WEB [validation]¶share = 0.1¶sources = ['wob'] | @, validation: sources: there is no source 'wob'
WEB [validation]¶share = 0.1¶sources = [] | @, validation: sources: names none | leave it out
WEB weight = 1¶[[stage]]¶tokens = 5¶weights = {wob = 1} | @: stage 1: there is no source 'wob' | s
WEB [[stage]]¶name = 'a' | @, stage 'a': has no tokens | tokens: How much
WEB epochs = 1¶[[stage]]¶tokens = 5 | @: source 'web': has epochs or tokens, and there are stages
max_length = 8¶inputs = 'mix.toml' | @: inputs: 'mix.toml' is the recipe itself | data only
max_length = 8¶inputs = './'¶sample_by = 'document' | @: inputs: './' holds the recipe itself
max_length = 8¶ALL ¶input_format = 'text' | @, source 'all': inputs: './' holds | data only
"""
TABLES = {
    "WEB": WEB,
    "ALL": '[[source]]\nname = "all"\ninputs = ["./"]',
    "¶": "\n",
}


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_clear_error(line: str) -> None:
    recipe, error, tip = ([part.strip() for part in line.split(" | ")] + [""])[:3]
    for short, table in TABLES.items():
        recipe = recipe.replace(short, table)
    Path("mix.toml").write_text(recipe)
    result = packer("pack", "mix.toml")
    assert_error(result, 2)
    found = result.stderr.splitlines()
    assert found[0].startswith(f"error: {error.replace('@', 'mix.toml', 1)}"), found
    assert tip in found[1], found
    assert sorted(os.listdir()) == ["a.jsonl", "b.jsonl", "mix.toml"]


def test_a_recipe_that_begins_with_a_byte_order_mark() -> None:
    Path("mark.toml").write_bytes(b'\xef\xbb\xbfinputs = "a.jsonl"\nmax_length = 16')
    assert packer("pack", "mark.toml", "-q").exit_code == 0


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
        lines_of(f"{name}.jsonl", *({field: f"{name} {n} " * (n % 7 + 1)} for n in range(400)))

    def packed(*options: object, recipe: str = "mix.toml") -> Any:
        result = packer("pack", recipe, "-q", "--json", *options)
        assert result.exit_code == 0, result.stderr
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
    again = packer("pack", "mix.toml", "-o", "both", "-q", "--update").stdout
    assert [one.split("\n")[0] for one in again.split("\n\nboth/")] == ["both/train", "validation"]


# The schema


def problems(recipe: str) -> list[Any]:
    return list(jsonschema.Draft7Validator(schema()).iter_errors(tomllib.loads(recipe)))


def test_the_schema_is_written_for_editors() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    assert json.loads(packer("recipe", "--schema").stdout) == schema()
    assert packer("recipe", "--schema", "-o", "recipe.schema.json").exit_code == 0
    assert Path("recipe.schema.json").read_text() == schema_text()


def test_every_key_is_there_and_described() -> None:
    top = schema()["properties"]
    tables = {
        TOP: top,
        SOURCE: top["source"]["items"]["properties"],
        VALIDATION: top["validation"]["properties"],
        STAGE: top["stage"]["items"]["properties"],
    }
    for owners, properties in tables.items():
        extra = {"source", "validation", "stage"} if owners is TOP else set()
        assert properties.keys() == keys_of(*owners).keys() | extra
        assert all(len(one["description"]) > 10 for one in properties.values())


INVALID = """
max_length = 16
inputs = "a"¶max_lenght = 16
inputs = "a"¶max_length = true
inputs = "a"¶max_length = 0
inputs = "a"¶strategy = "magic"
WEB max_length = 16
WEB weight = -1
WEB weight = 1¶epochs = 1
WEB [validation]
WEB [[stage]]¶name = 'a'
[[source]]¶inputs = "a"
"""


def test_what_the_schema_takes_and_refuses() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    examples = re.findall(r"^```toml[^\n]*\n(.*?)^```", page, re.M | re.S)
    assert len(examples) >= 2
    for recipe in examples:
        assert problems(recipe) == [], recipe
    for line in INVALID.strip().splitlines():
        assert problems(line.replace("WEB", WEB).replace("¶", "\n")) != [], line


# A first recipe


def lines_of(path: str, *records: object) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.fixture
def mixed(folder: Path) -> Path:
    """A folder of many shapes."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    text = [{"text": f"number {n} " * 20} for n in range(50)]
    lines_of("data/web/a.jsonl", *text)
    lines_of("data/web/b.jsonl", *text[:9])
    lines_of("data/chat.jsonl", *[{"messages": turns, "id": n} for n in range(30)])
    lines_of("data/code-1.jsonl", *[{"content": f"def f_{n}(): pass"} for n in range(30)])
    lines_of("data/code-2.jsonl", *[{"content": f"def g_{n}(): pass"} for n in range(30)])
    lines_of(
        "data/alpaca.jsonl", *[{"instruction": f"say {n}", "output": str(n)} for n in range(30)]
    )
    lines_of("data/odd.jsonl", {"x": 1, "y": "\x7f\n"})
    lines_of("data/empty.jsonl")
    return folder


def sources_of(path: str) -> tuple[Source, ...]:
    recipe = order_of([path], {}, RunOptions).recipe
    assert recipe is not None
    return recipe.sources


def test_a_source_for_each_group_of_files(mixed: Path) -> None:
    result = packer("recipe", "data", "-q", "--chat-template", TEMPLATE, "-t", "bytes")
    assert result.exit_code == 0, result.stderr
    Path("mix.toml").write_text(result.stdout)
    sources = {one.name: one for one in sources_of("mix.toml")}
    assert {name: list(one.inputs) for name, one in sources.items()} == {
        "alpaca": ["data/alpaca.jsonl"],
        "chat": ["data/chat.jsonl"],
        "code": ["data/code-1.jsonl", "data/code-2.jsonl"],
        "web": ["data/web/a.jsonl", "data/web/b.jsonl"],
    }
    assert sources["code"].config.renamed == {"text": "content"}
    assert "# text; 0.0 MB in 2 files; fields: text\n" in result.stdout
    assert "# left out: no field is known to hold text" in result.stdout


def test_it_is_packed_as_it_is_written_from_any_folder(mixed: Path) -> None:
    assert packer("recipe", "data", "-q", "-o", "mix.toml").exit_code == 0
    assert [one.name for one in sources_of("mix.toml")] == ["alpaca", "code", "web"]
    assert "# left out: messages need a chat template" in Path("mix.toml").read_text()
    Path("recipes").mkdir()
    options = ["-q", "--chat-template", os.path.relpath(TEMPLATE), "-o", "recipes/mix.toml"]
    assert packer("recipe", "data", *options).exit_code == 0
    os.chdir("recipes")
    result = packer("pack", "mix.toml", "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
    manifest = check_directory("out")
    assert len(manifest["config"]["mixture"]["sources"]) == 4


def test_a_file_that_is_there_stays(mixed: Path) -> None:
    Path("mix.toml").write_text("mine")
    assert_error(packer("recipe", "data", "-q", "-o", "mix.toml"), 2, "mix.toml: is there already")
    assert Path("mix.toml").read_text() == "mine"
    assert packer("recipe", "data", "-q", "-o", "mix.toml", "--overwrite").exit_code == 0
    assert Path("mix.toml").read_text().startswith("# Written by packer recipe")
