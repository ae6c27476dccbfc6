"""What the command line refuses: each in one line, with one that says what to do, and no output."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import tiny_tokenizers
from altered import unaltered
from chats import TAGS, assistant, chat, user, write
from support import assert_error, jsonl, packer, succeeds

BIG = "1" * 400
EVEN = "--order even --ranks 1"
ASKED = "pack chat.jsonl -l 16 --chat-template ask.jinja --template-arg"
LENGTHS = "plan a.jsonl -l 16 --lengths n -o i.parquet"
# options of `packer pack a.jsonl`, or a whole command | its error | what the tip begins with
REFUSED = f"""
pack a.jsonl                | Missing option '--max-length' / '-l'. | add --max-length N. Tokens in
plan a.jsonl                | Missing option '--max-length' / '-l'. | add --max-length N[,N]. Tokens
export out -o x             | Missing option '--to'. | add --to FORMAT. Format to write: trl, llama
export out --to trl         | Missing option '--output' / '-o'. | add --output OUT.
-l many                     | --max-length: 'many' is not a whole number like 4096 or 4k | Tokens in
-l 0                        | --max-length: 0 is not between 1 and 16777216
--seed {BIG}                | --seed: '{BIG}' is not a whole number
--seed -1                   | --seed: -1 is not between 0 and 9223372036854775807
--workers -1                | --workers: -1 is negative
--max-loss 2                | --max-loss: 2 is not between 0 and 1 | Exit 1 when more
--max-errors some           | --max-errors: 'some' is not a number like 100, or a share like 1%
--max-errors 3              | --max-errors needs --on-error skip | add --on-error skip, or leave
--on-error skip --max-errors 1.5 | --max-errors: 1.5 is neither a number nor a share of records
--unit-bytes 0              | --unit-bytes: 0 is not positive
--unit-bytes 'a lot'        | --unit-bytes: 'a lot' is not a size like 256M or 1G
--strategy magic            | --strategy: 'magic' is not one of best-fit, best-fit-decreasing, first
--strategy bestfit          | --strategy: 'bestfit' is not one of | did you mean best-fit?
--columns input_ids,tokens  | --columns: 'tokens' is not one of input_ids,
--columns labels            | --columns: input_ids and cu_seqlens are needed
--columns input_ids,cu_seqlens,cu_seqlens_padded | 'cu_seqlens_padded' is not one of
--train-on last_asistant    | --train-on: 'last_asistant' is not one of | did you mean last-assistan
--carry w                   | --carry: 'w' is not NAME:TYPE | write NAME:TYPE, such as logprobs
--carry w:float             | --carry: 'w:float': 'float' is not a type | use float32, float16, bfl
--carry labels:float32      | --carry: 'labels' is a column that rows have already
--carry w:int32             | --carry: no record at the beginning of a.jsonl has 'w'
--carry w:int32 --carry-default w=0.5 | --carry-default: w: 0.5 is not a value of int32
--carry w:int32 --carry-default v=0 | --carry-default: nothing carries 'v'
--sample-by file            | --sample-by: 'file' is not one of | did you mean document?
--train-on last             | --train-on: 'last' is not one of | did you mean last-assistant?
--shape share-gpt           | --shape: 'share-gpt' is not one of messages | did you mean conversatio
--balance attention --strategy nf   | --balance does not go with --strategy next-fit
--max-segments-per-row 2 --strategy wrap | --max-segments-per-row does not go with --strategy wrap
--segment-multiple 0        | --segment-multiple: 0 is not positive
--segment-multiple 5        | --max-length 16 is not a multiple of 5 | use 15 tokens a row
--strategy wrap --overlong drop | --overlong drop does not go with --strategy wrap | leave one
--strategy nf --shuffle     | --shuffle does not go with --strategy next-fit
--fim-rate 2                | --fim-rate: 2 is not between 0 and 1
--fim-spm-rate 0.1          | --fim-spm-rate needs --fim-rate | add --fim-rate, or leave
--add --overwrite           | --add does not go with --overwrite
--add --rank 0 --world-size 2 | --rank: does not go with
--add -o memory://out       | --add: memory://out: a URL
--rank 2 --world-size 2     | --rank: 2 is not between 0 and 1
--rank 1                    | --world-size: not given, and none of SLURM_ARRAY_TASK_COUNT
--rank 0 --world-size 2 --overwrite | --rank: does not go with
--rank 0 --world-size 2 -   | does not go with stdin
--engine ray -              | does not go with stdin
-t ./no                     | tokenizer ./no: no such file or folder
-t .                        | tokenizer .: the folder has no tokenizer.json
-t ''                       | --tokenizer: is empty | is a variable of your script unset?
-t bytes --eos-token '</s>' | --eos-token: '</s>' is not used: the bytes tokenizer has its own
--shape chat                | --shape: 'chat' is not one of messages,
--field message=chosen      | --field: 'message' is not one of
--field messages            | --field: 'messages' is not NAME=COLUMN | Where a field of the shape is
--field role=x              | --field applies only to chat records if it names | leave it out, or
--role user                 | --role: 'user' is not NAME=ROLE | Which role a speaker
--role x=user               | --role applies only to chat records; these are text | leave it out
--chat-template chatml      | --chat-template applies only to records that a chat template renders
--train-on assistant        | --train-on assistant does not apply to text records | choose all
--turn-end x                | --turn-end applies only to records that a chat template renders
--prompt-template alpaca    | --prompt-template alpaca does not apply to text records | choose no
--overlong truncate-turns   | --overlong truncate-turns applies only to chat records; these are text
--turns each                | --turns applies only to chat records; these are text
--no-train-reasoning        | --no-train-reasoning applies only to records that a chat template
--template-arg a=1          | --template-arg applies only to records that a chat template renders
pack ask.jsonl -l 16 --turns each              | --turns applies only to chat records
pack ask.jsonl -l 16 --overlong truncate-turns | --overlong truncate-turns applies only to chat
pack ask.jsonl -l 16 --overlong split          | must not be cut
pack chat.jsonl -l 16 --overlong split         | must not be cut
pack chat.jsonl -l 16 --turns each --train-on all | --turns each does not go with --train-on all
pack chat.jsonl -l 16 --no-train-reasoning --train-on all  | --train-on all
{ASKED}=enable_thinking     | 'enable_thinking' is not NAME=VALUE
{ASKED}=enable_thinkin=no   | never reads it; it reads enable_thinking | did you mean enable_t
{ASKED}=date_string=x       | date_string: the chat template never reads it
{ASKED}=messages=[]         | messages: packer passes it
{ASKED}=enable_thinking=False | found False, expected false
{ASKED}=enable_thinking=no  | enable_thinking: found "no", expected true or false
pack chat.jsonl -l 16 --train-on completion      | --train-on completion does not apply to mess
pack chat.jsonl -l 16 --prompt-template alpaca   | --prompt-template alpaca does not apply to mess
pack chat.jsonl -l 16 --chat-template nowhere    | --chat-template: 'nowhere' is not a file
pack chat.jsonl -l 16                            | need a chat template
pack chat.jsonl -l 16 --chat-template bad.jinja  | does not compile
pack no -l 8                | no: no such
export packed -o s3://b/x --to trl | --output: s3://b/x: a URL
export packed -o o --to packed     | packed: is packed, and no view
export packed -o o --to unpacked {EVEN}        | --order even: rows of --to unpacked are not read in
export packed -o o --to trl --ranks 4                      | --ranks needs --order even
export packed -o o --to trl --order even                 | --order even needs --ranks
export packed -o o --to trl --order even --ranks 9 | 9 ranks x 1 micro-batch x 1 row
stats no --min-utilization 95      | --min-utilization: 95 is not between 0 and 1
stats no --html x --by input       | --by does not go with --html without --json
stats packed --ranks 0 --hidden-size 8 | --ranks: 0 is not positive
stats packed --ranks 2             | --ranks needs --hidden-size
stats packed --hidden-size 8       | --hidden-size needs --ranks
show no --step 0 --ranks 1         | no: no such directory
show s3://a/b --step 0 --ranks 1   | s3://a/b: a URL
show packed --step 0               | --step needs --ranks
show packed --ranks 1              | --ranks needs --step
show packed --step -1 --ranks 1    | --step: -1 is not between 0 and
show packed 1 --step 0 --ranks 1   | --step does not go with ROW
show packed --step 0 --ranks 1 --ids           | --step does not go with --ids
show packed --step 0 --ranks 1 --hidden-size 8 | --balance and --hidden-size: each needs the other
show packed --step 0 --ranks 1 --balance x     | --balance: 'x' is not one of step, order
show packed --checkpoint no --ranks 1 --step 0 --seed 3 | --checkpoint does not go with --seed
tokenizer ./no              | tokenizer ./no: no such
tokenizer bytes             | tokenizer bytes: is built into packer, and has no files
tokenizer tok --check       | tokenizer tok: AutoTokenizer cannot load it: | --check needs
pack no.toml                | no.toml: no such recipe
pack bad.toml               | bad.toml: 'utf-8' codec can't decode byte 0xff | a recipe is TOML
pack s3://b/mix.toml        | s3://b/mix.toml: a URL, which recipes
pack run.toml a.jsonl -l 16 | run.toml: a recipe stands alone, and there are 1 other inputs | name t
pack run.toml --overlong drop | --overlong drop does not go with --strategy wrap
verify out --sample some    | --sample: 'some' is not a number like 1000, or all
verify out --seed -1        | --seed: -1 is negative
verify no                   | no: no such directory
--max-lenth 8               | No such option: --max-lenth | did you mean --max-length?
--seq-len 8                 | No such option: --seq-len | did you mean --max-length?
--output-dir x              | No such option: --output-dir | did you mean --output?
--add-eos x                 | No such option: --add-eos | did you mean --eos?
--no-reasoning              | No such option: --no-reasoning | did you mean --no-train-reasoning?
--in                        | No such option: --in | see packer pack --help
--to trl                    | No such option: --to | it is an option of packer export
tokenize a.jsonl --seed 3   | No such option: --seed | it is an option of packer pack, packer plan,
plan a.jsonl -l 16,0        | --max-length: 0 is not between 1 and
plan a.jsonl -l 16,many     | --max-length: 'many' is not a whole number like 4096 or 4k
plan a.jsonl -l 16,,32      | --max-length: '16,,32' is not a list like a,b
plan a.jsonl -l 16 --strategy best-fit,best | --strategy: 'best' is not one | did you mean best-fit?
plan a.jsonl -l 16 --sample some | --sample: 'some' is not a share
plan a.jsonl -l 16 --tokenized kept | --tokenized: is for recipes with sources
plan a.jsonl -l 16 -o i.parquet    | --output needs --lengths
plan a.jsonl -l 16 --key id        | --key needs --output
plan a.jsonl -l 16 --ranks 2 --hidden-size 8 | --ranks needs --output
plan a.jsonl -l 16 --overwrite     | --overwrite needs --output
{LENGTHS} -l 16,32                 | --output: holds the rows of one --max-length and one --strategy
{LENGTHS} --strategy bfd,nf        | --output: holds the rows of one --max-length and one --strategy
{LENGTHS} --strategy wrap          | --strategy wrap does not go with --lengths | samples are not
{LENGTHS} --overlong split         | --overlong split does not go with --lengths | samples are not
{LENGTHS} --overlong truncate      | --overlong truncate does not go with --lengths
{LENGTHS} --tokenizer bytes        | --tokenizer does not go with --lengths | leave one
{LENGTHS} --no-eos                 | --no-eos does not go with --lengths
{LENGTHS} --no-shuffle             | --no-shuffle does not go with --lengths
{LENGTHS} --carry w:int32          | --carry does not go with --lengths
{LENGTHS} --sample 5%              | --sample does not go with --lengths
{LENGTHS} --tokenized kept         | --tokenized does not go with --lengths
{LENGTHS} --lengths n,m,n          | --lengths: the plan would have two columns 'n'
{LENGTHS} --lengths n,used         | --lengths: the plan would have two columns 'used'
{LENGTHS} --lengths ''             | --lengths: is empty
{LENGTHS} -                        | -: tables are not read from stdin
{LENGTHS} run.toml                 | --lengths does not go with a recipe
{LENGTHS} -o ''                    | --output: is empty
verify tokens --html x      | No such option: --html | it is an option of packer plan, packer stats
validate                    | No such command 'validate' | did you mean verify?
tokenise                    | No such command 'tokenise' | did you mean tokenize?
preprocess                  | No such command 'preprocess' | did you mean pack?
"""
# a recipe, with ¶ for line ends | its error, with @ for its path | what the tip holds
MISTAKES = """
max_lenght = 16 | @: there is no key 'max_lenght' | did you mean max_length?
[validate]¶share = 1 | @: there is no key 'validate' | mean [validation]?
quiet = true | @: there is no key 'quiet'
weight = 2 | @: there is no key 'weight' | it is a key of [[source]]
WEB max_length = 16 | @, source 'web': there is no key 'max_length' | of the top
max_length = true | @: max_length: true is not a whole number
max_length = 0 | @: max_length: 0 is not between 1 and 16777216
view = 'yes' | @: view: 'yes' is not true or false
tokenizer = ['a'] | @: tokenizer: ['a'] is not text in quotes
field = ['a=b'] | @: field: ['a=b'] is not a table of texts
strategy = 'magic' | @: strategy: 'magic' is not one of best-fit
max_length = 8¶max-length = 9 | @: max_length: is there twice | leave one
max_length = | @: Invalid value (at  | a recipe is TOML
max_length = 16 | @: has no inputs | inputs =
inputs = [''] | @: an input is empty | inputs =
inputs = 'a.jsonl' | Missing option '--max-length' / '-l'. | max_length to mix.toml
WEB | Missing option '--max-length' / '-l'. | max_length to mix.toml
inputs = 'x'¶tokens = '2B' | @: tokens: is for recipes with sources
inputs = 'x'¶WEB | @: inputs: are those of sources | [[source]]
source = [] | @: source: expected tables that begin with | brackets
[[source]]¶inputs = 'x' | @, source 1: has no name | name: What the source
[[source]]¶name = 'web' | @, source 'web': has no inputs | inputs: Files
[[source]]¶name = "a/b"¶inputs = "a.jsonl" | @, source 'a/b': name: 'a/b' cannot be | digits
WEB weight = -1 | @, source 'web': weight: -1 is negative
WEB weight = 0 | @: weight: all weights are 0 | more than 0
WEB epochs = 0 | @, source 'web': epochs: 0.0 is not positive | leave it out
WEB weight = 1¶epochs = 2 | @, source 'web': has weight and epochs | one
WEB WEB | @: source 'web': 2 have this name | of its own
tokens = 5¶WEB | @: tokens: says how much there is in all, but | weight
WEB train_on = 'me' | @, source 'web': train_on: 'me' is not one of
max_length = 8¶WEB max_errors = 3 | @, source 'web': max_errors needs on_error skip | add on_error
max_length = 8¶strategy = 'wrap'¶overlong = 'drop'¶WEB | @: overlong drop does not go with strategy
WEB [validation] | @, validation: needs one of share and documents | share =
WEB [validation]¶share = 0 | @, validation: share: 0.0 is not between
WEB [validation]¶share = 0.1¶documents = 2 | @, validation: needs one of share and documents
WEB [validation]¶share = 0.1¶sources = ['wob'] | @, validation: sources: there is no source 'wob'
max_length = 8¶inputs = 'mix.toml' | @: inputs: 'mix.toml' is the recipe itself | data only
max_length = 8¶inputs = './'¶sample_by = 'document' | @: inputs: './' holds the recipe itself
max_length = 8¶WEB weight = 1¶epochs = 20000 | @, source 'web': epochs: 20000 is not between
WEB tier = [] | @, source 'web': tier: expected tables that begin with [[source.tier]] | brackets
[[tier]]¶where = [] | @: there is no key 'tier' | mean [[source.tier]]?
WEB [[source.tiers]]¶where = [] | @, source 'web': there is no key 'tiers' | mean [[source.tier]]?
WEB [[source.tier]]¶epochs = 2 | @, source 'web', tier 1: has no where | where: Conditions
TIER TIER carry = ['a:int8'] | @, source 'web', tier 2: there is no key 'carry' | top of the recipe
WEB epochs = 2¶[[source.tier]]¶where = [] | @, source 'web': has epochs and tiers | one
TIER epochs = 2¶tokens = '5k' | @, source 'web', tier 1: has epochs and tokens | one
TIER epochs = -1 | @, source 'web', tier 1: epochs: -1.0 is not positive
TIER weight = 0 | @: weight: all weights are 0 | more than 0
WEB [[source.tier]]¶where = ['n => 1'] | @, source 'web', tier 1: where: 'n => 1': character 3
BYTES tokens = 1000000¶WEB weight = 1 | source 'web': too small: 1,000,000 tokens asked
BYTES WEB tokens = 1000000 | source 'web': too small: 1,000,000 tokens | max_epochs =
BYTES tokens = 10¶WEB weight = 1¶CODE epochs = 1 | tokens: 10 in all, and sources | raise tokens
BYTES WEB [validation]¶share = 1e-9 | the validation split is empty | hold out more
BYTES WEB tokens = 1 | source 'web': none of its documents fits in 1.00 tokens asked | ask for more
"""
TABLES = {
    "BYTES": 'max_length = 4\ntokenizer = "bytes"\n',
    "TIER TIER": "TIER [[source.tier]]¶where = []¶",
    "TIER": "WEB [[source.tier]]¶where = ['n > 1']¶",
    "WEB": '[[source]]\nname = "web"\ninputs = "a.jsonl"\n',
    "CODE": '[[source]]\nname = "code"\ninputs = ["b.jsonl"]\n',
    "ALL": '[[source]]\nname = "all"\ninputs = ["./"]',
    "¶": "\n",
}
LINES = [line for line in REFUSED.splitlines() if line]


@pytest.fixture
def data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in "ab":
        (folder / f"{name}.jsonl").write_bytes(jsonl("first", "second"))
    turns = user("Hi"), assistant("Hello")
    write([chat(*turns)], "chat.jsonl")
    write([{"prompt": [turns[0]], "completion": [turns[1]]}], "pairs.jsonl")
    write([{"prompt": "Hi", "completion": "Hello"}], "ask.jsonl")
    (folder / "bad.jinja").write_text("{% for %}")
    (folder / "ask.jinja").write_text(TAGS + "{% if enable_thinking %}<think>{% endif %}")
    (folder / "bad.toml").write_bytes(b"a = 1\nb = '\xff'\n")
    (folder / "run.toml").write_text('inputs = "a.jsonl"\nmax_length = 8\nstrategy = "wrap"')
    tiny_tokenizers.save(folder / "tok", tiny_tokenizers.byte_level())
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    return folder


@pytest.mark.parametrize("line", LINES)
def test_it_is_refused_in_two_lines(data: Path, line: str) -> None:
    if " packed " in line:
        succeeds("pack", "a.jsonl", "-l", 16, "-t", "bytes", "-q", "-o", "packed")
    before = sorted(os.listdir())
    command, error, tip = ([part.strip() for part in line.split(" | ")] + [""])[:3]
    arguments = shlex.split(command)
    if command.startswith("-"):
        given = {"-l": ["-l", "16"], "-t": ["-t", "bytes"], "-o": ["-o", "out"]}
        rest = [one for name, more in given.items() if name not in arguments for one in more]
        arguments = ["pack", "a.jsonl", *rest, *arguments]
    elif arguments[0] in ("pack", "plan") and arguments[1].endswith(".jsonl"):
        arguments += ["-q", *([] if "-t" in arguments else ["-t", "bytes"])]
    result = packer(*arguments)
    assert_error(result, 2, error)
    assert result.stderr.splitlines()[1].startswith(f"tip: {tip}")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_in_a_recipe_is_one_clear_error(data: Path, line: str) -> None:
    recipe, error, tip = ([part.strip() for part in line.split(" | ")] + [""])[:3]
    for short, table in TABLES.items():
        recipe = recipe.replace(short, table)
    Path("mix.toml").write_text(recipe)
    before = {*os.listdir(), "mix-tokenized"}
    result = packer("pack", "mix.toml", "-q")
    assert_error(result, 2)
    found = result.stderr.splitlines()
    assert found[0].startswith(f"error: {error.replace('@', 'mix.toml', 1)}"), found
    assert tip in found[1], found
    assert {*os.listdir()} <= before


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["pack", "no", "-l", "8", "-t", "bytes", "--json"], 2),
        (["pack", "a.jsonl", "-l", "8", "--strategy", "bestfit", "--json"], 2),
        (["pack", "a.jsonl", "--json", "--max-lenth", "8"], 2),
        (["stats", "out", "--json", "--min-utilization", "99%"], 1),
    ],
)
def test_with_json_errors_are_json(data: Path, command: list[str], code: int) -> None:
    succeeds("pack", "a.jsonl", "-t", "bytes", "-l", 16, "-o", "out")
    result = unaltered(*command)
    assert result.returncode == code
    problem = json.loads(result.stderr.splitlines()[-1])
    assert problem.keys() == {"error", "tip", "exit_code"}
    assert problem["exit_code"] == code
    assert problem["error"]


def test_names_that_are_not_utf8(data: Path) -> None:
    named = os.fsdecode(b"out\xff")
    for command in (
        ["pack", "a.jsonl", "-l", 16, "-o", named],
        ["pack", "a.jsonl", "-l", 16, "-t", named],
        ["pack", "a.jsonl", "-l", 16, "-o", f"memory://{named}"],
        ["export", "data", "--to", "trl", "-o", named],
        ["show", named],
        ["verify", named],
    ):
        result = unaltered(*command)
        assert result.returncode == 2, result.stderr
        assert "out\\xff': the name is not UTF-8\ntip: " in result.stderr
    assert not os.path.exists(named)


@pytest.mark.parametrize("option", ["--eos-token", "--text-field"])
def test_options_that_no_manifest_can_hold(data: Path, option: str) -> None:
    result = unaltered("pack", "a.jsonl", "-l", 16, "-o", "out", option, os.fsdecode(b"\xff"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {option.replace('text-', '')}: ")
    assert " is not UTF-8, so no manifest can hold it\ntip: " in result.stderr
    assert not Path("out").exists()
