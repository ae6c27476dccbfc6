"""Options at the command line: declared once, shown in groups, written in many ways."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support import jsonl, packer, packer_process, succeeds
from typer.main import get_command

from packer_cli.cli.app import SECTIONS, app, options_in
from packer_cli.cli.export import EXPORT_FORMATS
from packer_cli.cli.pack import pack
from packer_cli.export import FORMATS
from packer_cli.options.option import options_of
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import RunOptions

pytestmark = pytest.mark.usefixtures("data")
COMMANDS = get_command(app).list_commands(None)  # type: ignore[attr-defined]
DECLARED = options_of(PackConfig) | options_of(RunOptions)
# the command gives these values itself
UNDECLARED = {
    "window_tokens", "mixture", "progress", "rank", "world_size", "notify", "warn",
    "before_switch", "exact", "tiers",
}  # fmt: skip


@pytest.fixture
def data(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_bytes(jsonl("first", "second"))
    return path


def packed(*options: object) -> Any:
    """The manifest's config of a run that succeeds."""
    succeeds("pack", "a.jsonl", "-t", "bytes", "-q", "-o", "out", "--overwrite", *options)
    return json.loads(Path("out/manifest.json").read_text())["config"]


def test_a_field_is_an_option_or_known_to_be_none() -> None:
    every = {one.name for kind in (PackConfig, RunOptions) for one in fields(kind)}
    assert every - DECLARED.keys() == UNDECLARED
    text = packer("pack", "--help").stdout
    assert [name for name, one in DECLARED.items() if f"{one.flag} " not in text] == []


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
    of_pack = [title for title in SECTIONS if title != "Lengths"]
    assert [title for title in by_title if title][1:] == of_pack
    first = [line for line in by_title["Used most"] if re.match("  -", line)]
    assert len(first) == 10
    assert [re.findall("--[a-z-]+", line)[0] for line in first[:3]] == [
        "--max-length",
        "--tokenizer",
        "--output",
    ]


@pytest.mark.parametrize("command", ["", *COMMANDS])
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
    of_show = packer("show", "-h").stdout
    assert of_show.startswith("Usage: packer show [OPTIONS] SET [ROW]...\n")
    assert (
        "  SET                         A folder of datasets, files of Parquet, Arrow or\n"
        in of_show
    )


def test_help_says_choices_their_meaning_and_the_default() -> None:
    text = " ".join(packer("pack", "--help").stdout.split())
    assert "truncate-turns (drop the oldest turns), drop" in text
    assert "Where --overlong truncate cuts: right (keep the beginning)" in text
    assert "What the records are: messages, conversations, prompt-completion, alpaca, text" in text
    assert "Longest shard, about. Default: 1G." in text


# options -> the fields of the configuration that they are
VALUES: dict[str, dict[str, object]] = {
    "-l 4k --unit-bytes 512kb --shard-bytes 1.5GiB --max-loss 1% --max-segments-per-row 1k": {
        "max_length": 4096, "unit_bytes": 512 << 10, "shard_bytes": 3 << 29, "max_loss": 0.01,
        "max_segments_per_row": 1024,
    },
    "-l 1K --unit-bytes 1Gi --max-loss 0.01 --on-error skip --max-errors 2k --seed 1M": {
        "max_length": 1024, "unit_bytes": 1 << 30, "max_loss": 0.01, "max_errors": 2048,
        "seed": 1 << 20,
    },
    "-l 16 --unit-bytes 4096B --on-error skip --max-errors 5% --strategy Next_Fit": {
        "unit_bytes": 4096, "max_errors": 0.05, "strategy": "next-fit",
    },
    "-l 16 --unit-bytes 16M --input-format jsonl --shape pretrain --train-on All": {
        "unit_bytes": 16 << 20, "input_format": "jsonl", "shape": "text", "train_on": "all",
    },
}  # fmt: skip


@pytest.mark.parametrize("options", VALUES)
def test_values_are_written_one_way(options: str) -> None:
    config = packed(*options.split())
    assert {name: config[name] for name in VALUES[options]} == VALUES[options]
    succeeds("stats", "out", "--min-utilization", "0.001%")
    assert packer("stats", "out", "--min-utilization", "100%").exit_code == 1


def test_names_of_other_tools_lead_to_options_that_exist() -> None:
    text = packer("pack", "--help").stdout
    names = {other: one.flag for one in options_in(pack).values() for other in one.names_elsewhere}
    assert len(names) > 20
    assert [own for own in names.values() if f"{own} " not in text] == []
    assert [name for name in names if f" {name} " in text] == []


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
    assert sorted(options) == ["--max-length", "--max-loss"]
    assert complete("packer pack --overlong tr") == ["truncate", "truncate-turns"]
    assert complete("packer export out --to mega") == ["megatron", "megatron-bridge"]
    assert "--install-completion" in packer("--help").stdout
