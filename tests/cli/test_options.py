"""Options at the command line: declared once, shown in groups, written in many ways."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from altered import unaltered
from support import assert_error, jsonl, packer, packer_process

from packer_cli.cli.declared import other_names
from packer_cli.cli.pack import pack
from packer_cli.config.export_formats import EXPORT_FORMATS
from packer_cli.config.option import GROUPS, options_of
from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import RunOptions
from packer_cli.export import FORMATS

pytestmark = pytest.mark.usefixtures("data")
DECLARED = options_of(PackConfig) | options_of(RunOptions)
# the command gives these values itself
UNDECLARED = {"window_tokens", "mixture", "progress", "rank", "world_size"}


@pytest.fixture
def data(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_bytes(jsonl("first", "second"))
    return path


def packed(*options: object) -> Any:
    """The manifest's config of a run that succeeds."""
    result = packer("pack", "a.jsonl", "-t", "bytes", "-q", "-o", "out", "--overwrite", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(Path("out/manifest.json").read_text())["config"]


def refused(*options: object) -> tuple[str, str]:
    """(error, tip) of a run that is refused as bad usage."""
    result = packer("pack", "a.jsonl", "-t", "bytes", "-o", "out", "-l", 16, *options)
    assert result.exit_code == 2, result.stdout
    error, tip = result.stderr.splitlines()[-2:]
    assert not Path("out").exists()
    return error.removeprefix("error: "), tip.removeprefix("tip: ")


def test_a_field_is_an_option_or_known_to_be_none() -> None:
    every = {one.name for kind in (PackConfig, RunOptions) for one in fields(kind)}
    assert every - DECLARED.keys() == UNDECLARED
    text = packer("pack", "--help").stdout
    assert [name for name, one in DECLARED.items() if f"{one.name(name)} " not in text] == []


def test_formats_of_export_are_named_where_they_cost_nothing() -> None:
    assert tuple(FORMATS) == EXPORT_FORMATS


def sections(text: str) -> dict[str, list[str]]:
    """Title -> the lines of a help text below it."""
    by_title: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line[:-1]
        by_title.setdefault(title, []).append(line)
    return by_title


def test_help_of_pack_is_in_groups_what_is_used_most_first() -> None:
    by_title = sections(packer("pack", "--help").stdout)
    assert [title for title in by_title if title][1:] == list(GROUPS)
    first = [line for line in by_title["Used most"] if re.match("  -", line)]
    assert len(first) == 10
    assert [re.findall("--[a-z-]+", line)[0] for line in first[:3]] == [
        "--max-length",
        "--tokenizer",
        "--output",
    ]


@pytest.mark.parametrize(
    "command",
    ["", "pack", "plan", "stats", "show", "trace", "verify", "export", "finalize", "tokenizer"],
)
def test_help_fits_80_columns_and_is_not_cut(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = packer(*command.split(), "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"[a-z] ?\.\.\.", text)  # a sentence that is cut
    for line in text.splitlines():
        assert not re.search(r"[a-z]-$", line), line  # a name broken at its dash


def test_help_says_what_is_required_and_answers_to_its_short_name() -> None:
    required = {"pack": ["-l, --max-length N"], "export": ["--to FORMAT", "-o, --output OUT"]}
    for command, options in required.items():
        text = packer(command, "-h").stdout
        assert text == packer(command, "--help").stdout
        assert text.count("Required.") == len(options)
        for option in options:
            assert re.search(rf"(?s)  {option} ((?!\n  -).)*Required\.\n", text), option
    assert packer("-h").stdout == packer("--help").stdout
    assert packer("pack", "-h").stdout.startswith("Usage: packer pack [OPTIONS] INPUT...\n")


def test_an_option_that_is_missing_is_described(data: Path) -> None:
    result = packer("pack", "a.jsonl")
    assert_error(result, 2, "Missing option '--max-length' / '-l'.")
    assert result.stderr.endswith(
        "tip: add --max-length N. Tokens in a packed row: 4096, or 4k, which is the same.\n"
    )
    result = packer("export", "out", "-o", "x")
    assert "\ntip: add --to FORMAT. Format to write: trl, llamafactory, " in result.stderr


def test_help_says_choices_their_meaning_and_the_default() -> None:
    text = " ".join(packer("pack", "--help").stdout.split())
    assert "truncate-turns (drop the oldest turns), drop" in text
    assert "Where --overlong truncate cuts: right (keep the beginning)" in text
    assert "Longest line, cell or text document accepted. Default: 256M." in text


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (["-l", "4k"], "max_length", 4096),
        (["-l", "1K"], "max_length", 1024),
        (["-l", "16", "--unit-bytes", "16M"], "unit_bytes", 16 << 20),
        (["-l", "16", "--unit-bytes", "512kb"], "unit_bytes", 512 << 10),
        (["-l", "16", "--unit-bytes", "1Gi"], "unit_bytes", 1 << 30),
        (["-l", "16", "--unit-bytes", "4096B"], "unit_bytes", 4096),
        (["-l", "16", "--shard-bytes", "1.5GiB"], "shard_bytes", 3 << 29),
        (["-l", "16", "--max-loss", "1%"], "max_loss", 0.01),
        (["-l", "16", "--max-loss", "0.01"], "max_loss", 0.01),
        (["-l", "16", "--on-error", "skip", "--max-errors", "2k"], "max_errors", 2048),
        (["-l", "16", "--on-error", "skip", "--max-errors", "5%"], "max_errors", 0.05),
        (["-l", "16", "--max-segments-per-row", "1k"], "max_segments_per_row", 1024),
        (["-l", "16", "--seed", "1M"], "seed", 1 << 20),
        (["-l", "16", "--strategy", "Next_Fit"], "strategy", "next-fit"),
        (["-l", "16", "--input-format", "ndjson"], "input_format", "jsonl"),
        (["-l", "16", "--shape", "pretrain"], "shape", "text"),
        (["-l", "16", "--train-on", "full"], "train_on", "all"),
    ],
)
def test_values_are_written_one_way(options: list[str], name: str, value: object) -> None:
    assert packed(*options)[name] == value


@pytest.mark.parametrize("share", ["50%", "0.5"])
def test_a_share_of_stats_is_written_the_same_way(share: str) -> None:
    packed("-l", "16")
    assert packer("stats", "out", "--min-utilization", share).exit_code == 0
    assert packer("stats", "out", "--min-utilization", "99%").exit_code == 1


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--max-length", "4.5", "--max-length: '4.5' is not a whole number like 4096 or 4k"),
        ("--seed", "one", "--seed: 'one' is not a whole number"),
        ("--workers", "1e999", "--workers: '1e999' is not a whole number"),
        ("--max-loss", "2", "--max-loss: 2 is not between 0 and 1"),
        ("--max-errors", "some", "--max-errors: 'some' is not a share"),
        ("--max-errors", "nan", "--max-errors: 'nan' is not a share"),
        ("--max-errors", "inf%", "--max-errors: 'inf%' is not a share"),
        ("--seed", "1" * 400, f"--seed: '{'1' * 400}' is not a whole number"),
        *(
            ("--unit-bytes", size, f"--unit-bytes: '{size}' is not a size like 256M or 1G")
            for size in ("64I", "64iB", "64BB", "M", "64KM", "64X")
        ),
        ("--unit-bytes", "1" * 400, f"--unit-bytes: '{'1' * 400}' is not a size"),
    ],
)
def test_numbers_that_are_none(option: str, value: str, error: str) -> None:
    assert refused(option, value)[0].startswith(error)


@pytest.mark.parametrize(
    ("share", "tip"), [("2", "did you mean 2%?"), ("150", "1% is 0.01"), ("-1", "1% is 0.01")]
)
def test_a_share_without_its_percent_sign(share: str, tip: str) -> None:
    assert refused("--max-loss", share)[1] == tip


@pytest.mark.parametrize(
    ("alias", "shape"), [("sharegpt", "conversations"), ("openai", "messages")]
)
def test_shapes_have_the_names_of_other_tools(data: Path, alias: str, shape: str) -> None:
    talk = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    data.write_text(json.dumps(talk) + "\n")
    Path("t.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}")
    template = ("--chat-template", "t.jinja", "--train-on", "last", "-l", 64)
    config = packed("--shape", alias, *template)
    assert (config["shape"], config["train_on"]) == (shape, "last-assistant")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--max-lenth", "8"], "--max-length"),
        (["--max_length", "8"], "--max-length"),
        (["--MAX-LENGTH", "8"], "--max-length"),
        (["--length", "8"], "--max-length"),
        (["--workres", "8"], "--workers"),
        (["--no-shufle"], "--no-shuffle"),
        (["--chat-templ", "x"], "--chat-template"),
        (["--seq-len", "8"], "--max-length"),
        (["--output-dir", "x"], "--output"),
        (["--text-column", "x"], "--text-field"),
        (["--add-eos", "x"], "--eos"),
        (["--no-reasoning"], "--no-train-reasoning"),
        (["--reasoning"], "--train-reasoning"),
        (["--strategy", "bestfit"], "best-fit"),
        (["--strategy", "FFDD"], "first-fit"),
        (["--train-on", "last_asistant"], "last-assistant"),
        (["--shape", "share-gpt"], "conversations"),
        (["--overlong", "truncat"], "truncate"),
        (["--engine", "Rya"], "ray"),
    ],
)
def test_what_was_meant_is_suggested(given: list[str], meant: str) -> None:
    assert refused(*given)[1] == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("given", "having"),
    [
        (
            ("tokenize", "a.jsonl", "--seed", "3"),
            "packer pack, packer plan, packer trace, packer verify",
        ),
        (("tokenize", "a.jsonl", "-l", "512"), "packer pack, packer plan"),
        (("tokenize", "a.jsonl", "--view"), "packer pack, packer plan"),
        (
            ("plan", "a.jsonl", "-l", "8", "--output", "x"),
            "packer pack, packer tokenize, packer recipe, packer export",
        ),
        (("pack", "tokens", "-l", "8", "--to", "trl"), "packer export"),
        (("verify", "tokens", "--html", "page.html"), "packer plan, packer stats"),
    ],
)
def test_an_option_of_another_command_is_told(given: tuple[str, ...], having: str) -> None:
    result = packer(*given)
    assert_error(result, 2, "No such option: ")
    assert result.stderr.splitlines()[1] == f"tip: it is an option of {having}"


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("statz", "stats"),
        ("pakc", "pack"),
        ("validate", "verify"),
        ("tokenise", "tokenize"),
        ("tokeniser", "tokenizer"),
        ("toknize", "tokenize"),
        ("Verify", "verify"),
        ("exp", "export"),
        ("statistics", "stats"),
        ("plan-rows", "plan"),
        ("tokens", "tokenize"),
        ("preprocess", "pack"),
    ],
)
def test_a_command_that_was_meant_is_suggested(command: str, meant: str) -> None:
    result = packer(command)
    assert_error(result, 2, f"No such command '{command}'")
    assert result.stderr.splitlines()[1] == f"tip: did you mean {meant}?"


@pytest.mark.parametrize("command", ["in", "ls", "train", "count", "split", "run", "diff", "x"])
def test_nothing_is_suggested_where_nothing_is_near(command: str) -> None:
    result = packer(command)
    assert_error(result, 2, f"No such command '{command}'")
    assert result.stderr.splitlines()[1] == "tip: see packer --help"


@pytest.mark.parametrize("option", ["--in", "--learning-rate", "--dry-run", "--x", "--gpus"])
def test_no_option_is_suggested_where_none_is_near(option: str) -> None:
    assert refused(option)[1] == "see packer pack --help"


def test_names_of_other_tools_lead_to_options_that_exist() -> None:
    text = packer("pack", "--help").stdout
    names = other_names(pack)
    assert len(names) > 20
    assert [own for own in names.values() if f"{own} " not in text] == []
    assert [name for name in names if f" {name} " in text] == []


@pytest.mark.parametrize(
    "command",
    [
        ["pack", "no", "-l", "8", "-t", "bytes"],
        ["pack", "a.jsonl", "-l", "8", "-t", "./no"],
        ["stats", "no"],
        ["stats", "no", "--deep"],
        ["show", "no"],
        ["trace", "no", "--step", "0", "--ranks", "1"],
        ["verify", "no"],
        ["export", "no", "--to", "trl", "-o", "x"],
        ["finalize", "no"],
        ["tokenizer", "./no"],
    ],
)
def test_a_path_that_does_not_exist_is_bad_usage_everywhere(command: list[str]) -> None:
    assert_error(packer(*command), 2, "no: no such ")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--chat-template", "chatml"], "--chat-template"),
        (["--train-on", "assistant"], "--train-on"),
        (["--turn-end", "x"], "--turn-end"),
        (["--allow-open-turns"], "--allow-open-turns"),
        (["--keep-untrained"], "--keep-untrained"),
        (["--force-split"], "--force-split"),
        (["--prompt-template", "alpaca"], "--prompt-template"),
        (["--overlong", "truncate-turns"], "--overlong"),
    ],
)
def test_options_that_mean_nothing_for_text_are_refused(options: list[str], name: str) -> None:
    error, tip = refused(*options)
    assert error.startswith(f"{name}: ")
    assert tip


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["stats", "no", "--json"], 2),
        (["pack", "a.jsonl", "-l", "8", "--strategy", "bestfit", "--json"], 2),
        (["pack", "a.jsonl", "--json", "--max-lenth", "8"], 2),
        (["stats", "out", "--json", "--min-utilization", "99%"], 1),
    ],
)
def test_with_json_errors_are_json(command: list[str], code: int) -> None:
    packed("-l", 16)
    result = unaltered(*command)
    assert result.returncode == code
    problem = json.loads(result.stderr.splitlines()[-1])
    assert problem.keys() == {"error", "tip", "exit_code"}
    assert problem["exit_code"] == code
    assert problem["error"]


def test_a_length_of_one_and_rows_of_padding_are_pointed_out() -> None:
    run = ("pack", "a.jsonl", "-t", "bytes", "-o", "out", "--overwrite")
    assert "packer: --max-length is 1: " in packer(*run, "-l", 1).stderr
    stderr = packer(*run, "-l", "1k").stderr
    assert "packer: 99% of the rows is padding: a row has 1,024 tokens" in stderr
    assert "--max-length" not in packer(*run, "-l", 16).stderr
    assert packer(*run, "-l", "1k", "-q").stderr == ""


def complete(words: str) -> list[str]:
    """What a shell offers after these words."""
    environment = os.environ | {
        "_PACKER_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    result = packer_process(env=environment)
    return [line.split("\t")[0] for line in result.stdout.decode().splitlines()]


def test_shells_complete_commands_options_and_choices() -> None:
    assert complete("packer st") == ["stats"]
    options = complete("packer pack --max-l")
    assert sorted(options) == ["--max-length", "--max-line-bytes", "--max-loss"]
    assert complete("packer pack --overlong tr") == ["truncate", "truncate-turns"]
    assert complete("packer export out --to mega") == ["megatron", "megatron-bridge"]
    assert "--install-completion" in packer("--help").stdout
