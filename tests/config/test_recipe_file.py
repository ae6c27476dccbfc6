"""Recipes at the command line: what is read of them, what wins, and every mistake in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import assert_error, contents, jsonl, packer

from packer_cli.config.mixture import Amount, Stage
from packer_cli.config.orders import Order, order_of
from packer_cli.config.recipe_tables import Given
from packer_cli.config.run_options import RunOptions

WEB = '[[source]]\nname = "web"\ninputs = "a.jsonl"\n'
CODE = '[[source]]\nname = "code"\ninputs = ["b.jsonl"]\n'


@pytest.fixture(autouse=True)
def _data(folder: Path) -> None:
    for name in "ab":
        (folder / f"{name}.jsonl").write_bytes(jsonl(f"{name} first", f"{name} second"))


def read(text: str, name: str = "mix.toml", **config: Any) -> Order[RunOptions]:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return order_of([name], Given(config), RunOptions)


def refused(text: str, *options: object) -> tuple[str, str]:
    """(error, tip) of a run of a recipe, which must not have begun."""
    Path("mix.toml").write_text(text)
    result = packer("pack", "mix.toml", *options)
    assert_error(result, 2)
    assert sorted(path.name for path in Path().iterdir()) == ["a.jsonl", "b.jsonl", "mix.toml"]
    error, tip = result.stderr.splitlines()
    return error.removeprefix("error: "), tip.removeprefix("tip: ")


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
    assert (order.options.workers, order.output, order.tokenizer) == (2, "out", "bytes")
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


def test_stages() -> None:
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
""")
    assert order.config.mixture is not None
    assert order.config.mixture.stages == (
        Stage(4000, name="first"),
        Stage(10**6, (("web", 0.5), ("code", 0.5))),
    )


def test_documents_are_held_out_by_number() -> None:
    order = read(f"max_length = 16\n{WEB}\n[validation]\ndocuments = 500\n")
    assert order.config.mixture is not None
    assert order.config.mixture.validation_documents == 500


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
    assert (recipe.tokenizer, order.output, recipe.tokenized) == ("r/./tok", "r/out", "r/../kept")
    for name, expected in (("bytes", "bytes"), ("org/model", "org/model"), ("tok", "r/tok")):
        one = read(f'max_length = 16\ninputs = "x"\ntokenizer = "{name}"', "r/mix.toml")
        assert one.tokenizer == expected


def test_a_folder_whose_name_is_no_pattern() -> None:
    Path("r[1]/b").mkdir(parents=True)
    Path("r[1]/a.jsonl").touch()
    order = read('max_length = 16\ninputs = ["a.jsonl", "b", "*.txt"]', "r[1]/mix.toml")
    assert order.inputs == ["r[1]/a.jsonl", "r[1]/b", "r[[]1]/*.txt"]


def test_the_command_line_wins() -> None:
    text = f"""
max_length = 16
seed = 1
train_on = "all"
{WEB}train_on = "assistant"
text_field = "body"
field = {{tools = "functions"}}
{CODE}"""
    given = {"max_length": 32, "train_on": "last-assistant", "fields": (("text", "content"),)}
    order = read(text, **given)
    assert order.recipe is not None
    assert (order.config.max_length, order.config.seed) == (32, 1)
    assert [one.config.train_on for one in order.recipe.sources] == ["last-assistant"] * 2
    assert [one.config.renamed for one in order.recipe.sources] == [
        {"text": "content", "tools": "functions"},
        {"text": "content"},
    ]


def test_what_becomes_of_an_earlier_result_is_said_anew() -> None:
    Path("mix.toml").write_text('max_length = 16\ninputs = "a.jsonl"\noverwrite = true')
    assert order_of(["mix.toml"], Given(), RunOptions).options.overwrite
    order = order_of(["mix.toml"], Given(options={"update": True}), RunOptions)
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


@pytest.mark.parametrize(
    ("text", "error", "tip"),
    [
        ("max_lenght = 16", "mix.toml: there is no key 'max_lenght'", "did you mean max_length?"),
        ("seq_len = 16", "mix.toml: there is no key 'seq_len'", "did you mean max_length?"),
        ("[[sources]]\nname = 'a'", "mix.toml: there is no key 'sources'", "mean [[source]]?"),
        ("[validate]\nshare = 1", "mix.toml: there is no key 'validate'", "mean [validation]?"),
        (WEB + "wieght = 1", "mix.toml, source 'web': there is no key 'wieght'", "weight?"),
        (WEB + "[validation]\nshar = 1", "mix.toml, validation: there is no key 'shar'", "share?"),
        (
            WEB + "weight = 1\n[[stage]]\nname = 'warm'\ntoken = 5",
            "mix.toml, stage warm: there is no key 'token'",
            "did you mean tokens?",
        ),
        ("quiet = true", "mix.toml: quiet: is for one run, not for a recipe", "--quiet"),
        ("world-size = 2", "mix.toml: world-size: is for one run", "--world-size"),
        ("weight = 2", "mix.toml: weight: is for sources", "[[source]]"),
        (
            WEB + "max_length = 16",
            "mix.toml, source 'web': max_length: is an option of rows and runs",
            "move it to the top",
        ),
        (WEB + "workers = 1", "mix.toml, source 'web': workers: is an option of rows and", "top"),
        ("max_length = true", "mix.toml: max_length: found true, expected a whole number", ""),
        ("max_length = 4.5", "mix.toml: max_length: found 4.5, expected a whole number", ""),
        ("max_length = nan", "mix.toml: max_length: found nan, expected a whole number", ""),
        ("max_length = '4x'", "mix.toml: max_length: '4x' is not a whole number", ""),
        ("max_length = 0", "mix.toml: max_length: 0 is not between 1 and 16777216", ""),
        ("view = 'yes'", "mix.toml: view: found the text 'yes', expected true or false", ""),
        ("tokenizer = ['a']", "mix.toml: tokenizer: found a list, expected text in quotes", ""),
        ("inputs = [1]", "mix.toml: inputs: found a list with 1, expected a list of texts", ""),
        ("field = ['a=b']", "mix.toml: field: found a list, expected a table like", ""),
        ("field = {text = 1}", "mix.toml: field: found for text 1, expected the name of", ""),
        ("seed = 2024-01-01", "mix.toml: seed: found the date 2024-01-01, expected a whole", ""),
        ("strategy = 'magic'", "mix.toml: strategy: 'magic' is not one of best-fit", ""),
        ("columns = ['token']", "mix.toml: columns: 'token' is not one of input_ids", ""),
        ("max_length = 8\nmax-length = 9", "mix.toml: max_length: is there twice", "leave one"),
        ("max_length = ", "mix.toml: line 1, column 14: Invalid value", "a recipe is TOML"),
        ("inputs = [\n'a',\n", "mix.toml: line 3, column 1: ", "a recipe is TOML"),
        ("a = 1\na = 2", "mix.toml: line 2, column 6: Cannot overwrite a value", "a recipe is"),
        ("max_length = 16", "mix.toml: has no inputs", "inputs = "),
        ("inputs = []", "mix.toml: has no inputs", "inputs = "),
        ("inputs = ['']", "mix.toml: an input is empty", "inputs = "),
        ("inputs = 'a.jsonl'", "Missing option '--max-length' / '-l'.", "max_length to mix.toml"),
        (WEB, "Missing option '--max-length' / '-l'.", "max_length to mix.toml"),
        ("inputs = 'x'\ntokens = '2B'", "mix.toml: tokens: is for recipes with sources", ""),
        ("inputs = 'x'\n[validation]\nshare = 1", "mix.toml: validation: is for recipes", ""),
        ("inputs = 'x'\n" + WEB, "mix.toml: inputs: are those of sources", "[[source]]"),
        ("source = []", "mix.toml: source: found no tables, expected tables", "brackets"),
        (WEB.replace("[[source]]", "[source]"), "mix.toml: source: found a table, expected", ""),
        ("[[source]]\ninputs = 'x'", "mix.toml, source 1: has no name", "name: What the source"),
        ("[[source]]\nname = 'web'", "mix.toml, source 'web': has no inputs", "inputs: Files"),
        (WEB.replace('"a.jsonl"', "[]"), "mix.toml, source 'web': has no inputs", "inputs = "),
        (WEB.replace("web", "a/b"), "mix.toml, source 'a/b': name: 'a/b' cannot be", "digits"),
        (WEB.replace("web", "..", 1), "mix.toml, source '..': name: '..' cannot be", "digits"),
        (WEB + "weight = -1", "mix.toml, source 'web': weight: -1 is negative", ""),
        (WEB + "weight = 0", "mix.toml: weight: all weights are 0", "more than 0"),
        (WEB + "epochs = 0", "mix.toml, source 'web': epochs is 0, nothing", ""),
        (WEB + "tokens = 0", "mix.toml, source 'web': tokens: 0 is not positive", ""),
        (WEB + "tokens = '2X'", "mix.toml, source 'web': tokens: '2X' is not a number of", ""),
        (WEB + "weight = 1\nepochs = 2", "mix.toml, source 'web': has weight and epochs", "one"),
        (WEB + WEB, "mix.toml, source 'web': 2 sources have this name", "of its own"),
        ("tokens = 5\n" + WEB, "mix.toml: tokens: says how much there is in all, but", "weight"),
        (WEB + "train_on = 'me'", "mix.toml, source 'web': train_on: 'me' is not one of", ""),
        (
            "max_length = 8\n" + WEB + "max_errors = 3",
            "mix.toml, source 'web': max_errors: is for on_error skip",
            "without it",
        ),
        (
            "max_length = 8\nstrategy = 'wrap'\noverlong = 'drop'\n" + WEB,
            "mix.toml: overlong: drop has no meaning with strategy wrap",
            "wrap cuts",
        ),
        (WEB + "[validation]", "mix.toml, validation: has neither share nor documents", "share ="),
        (WEB + "[validation]\nshare = 0", "mix.toml, validation: share: 0 is not between", ""),
        (WEB + "[validation]\nshare = 1", "mix.toml, validation: share: 1 is not between", ""),
        (WEB + "[validation]\ndocuments = 0", "mix.toml, validation: documents: 0 is not pos", ""),
        (
            WEB + "[validation]\nshare = 0.1\ndocuments = 2",
            "mix.toml, validation: has both share and documents",
            "one of them",
        ),
        (
            WEB + "[validation]\nshare = 0.1\nsources = ['wob']",
            "mix.toml, validation: sources: there is no source 'wob'",
            "sources are web",
        ),
        (
            WEB + "weight = 1\n[[stage]]\ntokens = 5\nweights = {wob = 1}",
            "mix.toml, stage 1: there is no source 'wob'",
            "sources are web",
        ),
        (WEB + "[[stage]]\nname = 'a'", "mix.toml, stage a: has no tokens", "tokens: How much"),
        (
            WEB + "epochs = 1\n[[stage]]\ntokens = 5",
            "mix.toml, source 'web': has epochs or tokens, and there are stages",
            "weight",
        ),
        ("inputs = 'mix.toml'", "mix.toml: inputs: 'mix.toml' is the recipe itself", "data only"),
        ("inputs = '*'", "mix.toml: inputs: '*' holds the recipe itself", "data only"),
        (
            "[[source]]\nname = 'all'\ninputs = './'\ninput_format = 'text'",
            "mix.toml, source 'all': inputs: './' holds the recipe itself",
            "data only",
        ),
    ],
)
def test_a_mistake_is_one_clear_error(text: str, error: str, tip: str) -> None:
    found = refused(text)
    assert found[0].startswith(error), found
    assert tip in found[1], found


def test_options_that_clash_with_the_command_line_are_told_in_its_terms() -> None:
    text = 'inputs = "a.jsonl"\nmax_length = 8\nstrategy = "wrap"'
    error, _ = refused(text, "--overlong", "drop")
    assert error == "--overlong: drop has no meaning with --strategy wrap"


def test_a_recipe_stands_alone() -> None:
    error, tip = refused('inputs = "a.jsonl"', "a.jsonl", "-l", 16)
    assert error == "mix.toml: a recipe stands alone, and there are 1 other inputs"
    assert "name them in the recipe" in tip


def test_a_recipe_that_is_not_there_or_not_text() -> None:
    assert_error(packer("pack", "no.toml"), 2, "no.toml: no such recipe")
    Path("bad.toml").write_bytes(b"a = 1\nb = '\xff'\n")
    assert_error(packer("pack", "bad.toml"), 2, "bad.toml: line 2: not UTF-8")
    assert_error(packer("pack", "s3://b/mix.toml"), 2, "s3://b/mix.toml: a URL, which recipes")
    Path("mark.toml").write_bytes(b'\xef\xbb\xbfinputs = "a.jsonl"\nmax_length = 16')
    assert packer("pack", "mark.toml", "-q").exit_code == 0
