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
from altered import faulty
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
    assert json.loads(Path("recipe.schema.json").read_text()) == schema()


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


VALID = [
    'inputs = ["a"]\nmax-length = "4k"\nmax_loss = "0.5%"\nshuffle = false',
    f'max_length = 4096\ntokens = "2B"\n{WEB}weight = 0.7\ntrain-on = "all"\n'
    '[validation]\nshare = "0.5%"\nsources = ["web"]',
    f"{WEB}weight = '70%'\n[[stage]]\ntokens = '4M'\nweights = {{web = 0.5}}",
]
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
    for recipe in (*VALID, *examples):
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
    os.mkfifo("pipe.toml")
    for name in ("pipe.toml", "data", "/dev/null"):
        result = packer("recipe", "data", "-q", "-o", name, "--overwrite")
        assert_error(result, 2, f"{name}: is not a regular file")


@pytest.mark.parametrize("what", [["data"], ["--schema"]])
def test_a_file_is_there_whole_or_not_at_all(mixed: Path, what: list[str]) -> None:
    """Whenever it is killed. Through a link its file is replaced; a `.part` of others stays."""
    command = ["recipe", *what, "-q", "-o", "link.toml", "--overwrite"]
    os.symlink("mix.toml", "link.toml")
    Path("mix.toml").write_text("earlier")
    for step in range(1, 20):
        if faulty(f"at_step({step}, cut_power)", *command).returncode == 0:
            break
        assert Path("mix.toml").read_text() in ("earlier", packer(*command[:-3]).stdout)
    assert step > 3
    assert Path("mix.toml").read_text() == packer(*command[:-3]).stdout
    assert Path("link.toml").is_symlink()
    assert not Path("mix.toml.part").exists()
    Path("mix.toml.part").write_text("mine")
    assert_error(packer(*command), 2, "mix.toml.part: is there, and is not of packer recipe")
    assert Path("mix.toml.part").read_text() == "mine"


def test_shares_by_size_can_be_weights(folder: Path) -> None:
    for name, count in (("a", 3000), ("b", 1000)):
        lines_of(f"{name}.jsonl", *[{"text": "x" * 400, name: n} for n in range(count)])
    assert packer("recipe", "a.jsonl", "b.jsonl", "-o", "mix.toml").exit_code == 0
    text = re.sub("epochs = 1 +# or (weight = .*),.*", r"\1", Path("mix.toml").read_text())
    Path("mix.toml").write_text(text)
    order = order_of(["mix.toml"], {}, RunOptions)
    assert order.config.mixture is not None
    weights = [one.weight for one in order.config.mixture.sources]
    assert weights == pytest.approx([0.75, 0.25], abs=0.01)


def test_a_pipe_is_no_recipe(folder: Path) -> None:
    os.mkfifo("pipe.toml")
    assert_error(packer("pack", "pipe.toml"), 1, "pipe.toml: cannot read: not a regular file")


def test_validation_beside_stages_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(jsonl(*(f"text number {n}" for n in range(400))))
    stages = '[[stage]]\nname = "one"\ntokens = 1000\n[[stage]]\nname = "two"\ntokens = 2000\n'
    top = 'max_length = 64\ntokenizer = "bytes"\n'
    Path("mix.toml").write_text(f'{top}{WEB}weight = 1\n[validation]\nshare = "20%"\n{stages}')
    assert packer("pack", "mix.toml", "-q", "-o", "out").exit_code == 0
    for side in ("train", "validation"):
        result = packer("verify", f"out/{side}", "--against-inputs", "-q")
        assert result.exit_code == 0, result.stderr
