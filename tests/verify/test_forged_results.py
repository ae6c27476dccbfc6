"""Changes to a result that no digest shows, each of which `packer verify --against-inputs --sample
all` finds; and those that it cannot find, with the reason why nobody is harmed.

Every change is made by `forging.Result`, so that digests, sums and side files follow from it.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forged_changes import (
    Change,
    add_cost,
    add_side_file,
    change_column,
    double_unit,
    edit_side_file,
    exchange_positions,
    excuse,
    in_counts,
    in_record,
    last_row_groups,
    mark,
    move_between_inputs,
    other_eos,
    remove_unit,
    replace_in,
    set_config,
    set_tokenizer,
    stretch_over,
    swap_inputs,
    swap_rewards,
    swap_rows,
    swap_shards,
    train_more,
    unit_without_rejected,
    unmark,
    untrain,
)
from forging import Result
from mixed import pack_mixed, recipe_of, write_sources
from support import packer
from varied_results import ALL, RESULTS

from packer_cli.options.options import PackConfig
from packer_cli.result.manifest import OF_INPUTS, TOTALS

OPTIONS: dict[str, tuple[str, object]] = {  # option -> (result, another value)
    "max_length": ("mixed", 64),
    "strategy": ("mixed", "worst-fit"),
    "seed": ("mixed", 1),
    "shuffle": ("mixed", False),
    "overlong": ("mixed", "drop"),
    "truncate_side": ("mixed", "left"),
    "max_loss": ("mixed", 0.0),
    "columns": ("mixed", ["input_ids", "cu_seqlens", "segments"]),
    "shape": ("mixed", "tokens"),
    "fields": ("mixed", [["text", "txt"]]),
    "input_format": ("mixed", "text"),
    "sample_by": ("mixed", "document"),
    "prompt_template": ("mixed", "chat"),
    "train_on": ("chat", "all"),
    "keep_untrained": ("chat", True),
    "add_bos": ("mixed", True),
    "add_eos": ("mixed", False),
    "separator": ("mixed", "\n"),
    "turn_end": ("chat", ["<s>"]),
    "eos_token": ("mixed", "<s>"),
    "on_error": ("mixed", "fail"),
    "max_line_bytes": ("mixed", 64),
    "window_tokens": ("mixed", 64),
    "max_segments_per_row": ("mixed", 1),
    "segment_multiple": ("chat", 8),
    "label_shift": ("chat", "none"),
    "balance": ("chat", "none"),
    "carry": (
        "carried",
        [
            "logprobs:float32/token",
            "rank:int32/token",
            "top:int32[2]/token",
            "good:uint8/token",
            "weight:bfloat16/token",
            "reward:float16/record",
        ],
    ),
    "carry_default": ("carried", [["reward", "3"]]),
}
CHANGES: dict[str, tuple[str, Change]] = {
    **{f"the option {name}": (result, set_config(name, value))
       for name, (result, value) in OPTIONS.items()},
    "truncated tokens moved": ("mixed", move_between_inputs("truncated_tokens")),
    "dropped tokens of an input": (
        "lossy", lambda r: r.manifest["inputs"][0].update(dropped_tokens=0)),
    "the strategy harmonic": ("mixed", set_config("strategy", "harmonic")),
    "the last turn only": ("chat", set_config("train_on", "last-assistant")),
    "the cost before balancing": ("chat", add_cost("before")),
    "the cost after balancing": ("chat", add_cost("after")),
    "empty documents of an input": ("mixed", lambda r: r.add_to_input("empty_documents", 1)),
    "rejected records of an input": ("mixed", lambda r: r.add_to_input("rejected_records", 1)),
    "empty documents moved": ("mixed", move_between_inputs("empty_documents")),
    "documents moved": ("mixed", move_between_inputs("documents")),
    "truncated tokens of two units": ("mixed", in_counts("truncated_tokens")),
    "dropped documents of two units": ("mixed", in_counts("dropped_documents")),
    "trained turns of two units": ("chat", in_counts("trained_turns")),
    "trained tokens of two units": ("mixed", in_counts("trained_tokens")),
    "vocab_size": ("mixed", set_tokenizer("vocab_size", 12345)),
    "eos_token_id": ("mixed", set_tokenizer("eos_token_id", 2)),
    "bos_token_id": ("mixed", set_tokenizer("bos_token_id", None)),
    "pad_token_id": ("mixed", set_tokenizer("pad_token_id", 7)),
    "the tokenizer's sha256": ("mixed", set_tokenizer("sha256", "0" * 64)),
    "the tokenizer's configuration": ("mixed", other_eos),
    "the tokenizer's merges": (
        "mixed", edit_side_file("tokenizer.json", lambda t: t["model"]["merges"].pop(0)),
    ),
    "the chat template": ("chat", replace_in("chat_template.jinja", b"<{{", b"[{{")),
    "marked incomplete": ("mixed", mark),
    "not marked incomplete": ("lossy", unmark),
    "incomplete for another reason": ("lossy", lambda r: r.manifest.update(incomplete="lost")),
    "losses that are not told": ("lossy", excuse),
    "a unit is gone": ("mixed", lambda r: remove_unit(r, unit_without_rejected(r))),
    "a unit with rejected records is gone": ("mixed", lambda r: remove_unit(
        r, next(one["unit"] for one in r.records if one.get("rejected")))),
    "the first unit is gone": ("mixed", lambda r: remove_unit(r, 0)),
    "the last unit is gone": ("mixed", lambda r: remove_unit(r, r.records[-1]["unit"])),
    "the last row groups are gone": ("mixed", last_row_groups),
    "a unit is gone, and its slice is another's": ("mixed", stretch_over),
    "a unit is there twice": ("mixed", lambda r: double_unit(r, unit_without_rejected(r))),
    "the last unit is there twice": ("chat", lambda r: double_unit(r, r.records[-1]["unit"])),
    "a slice that overlaps": ("mixed", lambda r: r.manifest["units"][0]["slices"][0].__setitem__(
        2, r.manifest["units"][0]["slices"][0][2] + 5)),
    "a slice that ends early": ("chat", lambda r: r.manifest["units"][-1]["slices"][0].__setitem__(
        2, r.manifest["units"][-1]["slices"][0][2] - 5)),
    "an input without slices": ("mixed", lambda r: r.manifest["inputs"].append(
        r.manifest["inputs"][0] | dict.fromkeys(
            ("documents", "tokens", "empty_documents", "rejected_records"), 0))),
    "inputs exchanged": ("mixed", swap_inputs),
    "the size of an input": ("mixed", lambda r: r.manifest["inputs"][2].update(size=5)),
    "the sha256 of an input": ("mixed", lambda r: r.manifest["inputs"][0].update(sha256="0" * 64)),
    "the path of an input": ("mixed", lambda r: r.manifest["inputs"][0].update(path="e.jsonl")),
    "shards in another order": ("mixed", swap_shards),
    "rows in another order": ("mixed", swap_rows),
    "documents exchanged": ("mixed", exchange_positions),
    "a token": ("mixed", change_column("input_ids", lambda ids: ids.__setitem__((0, 0), 9))),
    "carried values exchanged": (
        "carried", change_column("rank", lambda v: v[0].__setitem__([0, 1], v[0, [1, 0]]))),
    "rewards exchanged": ("carried", swap_rewards),
    "a carried value": (
        "carried", change_column("logprobs", lambda values: values.__setitem__((0, 0), 9))),
    "a figure of a carried column": (
        "carried", lambda r: r.manifest["shards"][0]["carried"]["rank"].__setitem__(2, 99)),
    "no figures of carried columns": (
        "carried", lambda r: r.manifest["shards"][0].pop("carried")),
    "a token without its label": ("mixed", untrain),
    "an answer without a label": ("chat", untrain),
    "a question with a label": ("chat", train_more),
    "state.json lists one shard": (
        "mixed", edit_side_file("state.json", lambda s: s.update(_data_files=s["_data_files"][:1])),
    ),
    "state.json lists a shard twice": (
        "mixed", edit_side_file("state.json", lambda s: s.update(_data_files=s["_data_files"] * 2)),
    ),
    "the fingerprint of state.json": (
        "mixed", edit_side_file("state.json", lambda s: s.update(_fingerprint="0" * 16)),
    ),
    "a split in state.json": (
        "mixed", edit_side_file("state.json", lambda s: s.update(_split="test")),
    ),
    "features in dataset_info.json": (
        "mixed", edit_side_file("dataset_info.json", lambda s: s.update(features={"a": 1})),
    ),
    "dataset_info.json is not listed": (
        "mixed", lambda r: (r.manifest["side_files"].pop("dataset_info.json"),
                            (r.path / "dataset_info.json").unlink()),
    ),
    "a side file of nobody": (
        "mixed", add_side_file,
    ),
    "rejected.jsonl has another reason": ("mixed", replace_in("rejected.jsonl", b"line", b"LINE")),
    "rejected.jsonl has another position": (
        "mixed", replace_in("rejected.jsonl", b'"position":', b'"position":1')),
    "rejected.jsonl has another file": (
        "mixed", replace_in("rejected.jsonl", b'/a.jsonl"', b'/b.jsonl"')),
    "rejected.jsonl is cut": (
        "mixed", lambda r: r.write("rejected.jsonl", r.read("rejected.jsonl")[:-1] + b" ")),
    "units.jsonl lacks a unit": ("mixed", lambda r: r.records.pop()),
    "units.jsonl has a unit twice": ("mixed", lambda r: r.records.append(r.records[0])),
    "units.jsonl in another order": ("mixed", lambda r: r.records.reverse()),
    "units.jsonl has other slices": (
        "mixed", in_record(lambda one: one["slices"][0].__setitem__(1, 3))),
    "units.jsonl has another tokenizer": (
        "mixed", in_record(lambda one: one.update(tokenizer=None))),
    "units.jsonl has other rejected bytes": (
        "mixed", in_record(lambda one: one.update(rejected=one.get("rejected", 0) + 1))),
    "units.jsonl has a reused unit": ("mixed", in_record(lambda one: one.update(reused=True))),
    "units.jsonl has other pieces": (
        "mixed", in_record(lambda one: one["counts"].pop("piece_length"))),
    "units.jsonl is no JSON": ("mixed", lambda r: r.write("units.jsonl", b"{\n")),
}  # fmt: skip


# What verify says of it, so that it is not exposed by a slip in forging.
OTHER_PLAN = " expected by the options of the manifest"
EXPOSED_BY = {
    **dict.fromkeys(
        ("the option strategy", "the option seed", "the option shuffle", "the strategy harmonic",
         "the option window_tokens", "rows in another order",
         "a unit is gone, and its slice is another's"),
        OTHER_PLAN),
    "documents exchanged": "segment ",
    "the option balance": "manifest.json: attention_cost: None in the shards, {'before': ",
    "the option max_segments_per_row": "cu_seqlens has more than 1 segments",
    "the cost before balancing": "attention_before is another when packed again",
    "truncated tokens moved": "files is another when packed again",
    "dropped tokens of an input": "a.jsonl: 1090 in all units, 0 in the manifest",
    "losses that are not told": "dropped_tokens is 0, 1090 when packed again",
    "a question with a label": ", -100 expected when encoded again",
    "an answer without a label": "labels has -100 at place ",
    "a token": "input_ids has 9 at place 0 of row 0 of shard-00000-000-",
    "the option carry_default": "reward has 2.0 at place ",
    "carried values exchanged": "rank has 33 at place 0 of row 0 of shard-00000-000-",
    "rewards exchanged": "reward has ",
    "a carried value": " from -",
    "a figure of a carried column": "from 0 to 99 with the sum ",
    "no figures of carried columns": " of good, the manifest says no values",
    "rejected.jsonl has another reason": "are not those rejected when packed again",
    "rejected.jsonl has another file": "are not those rejected when packed again",
    "rejected.jsonl is cut": "are not those rejected when packed again",
    "the last row groups are gone": "read twice, what begins at row group 4",
    "units.jsonl is no JSON": "has a line that is not the record of a unit",
    "units.jsonl has other slices": "units.jsonl: its ",
    "shards in another order": "units.jsonl: its shards are not those in the manifest",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_consistent_change_is_found(name: str, copied: Callable[[str], Result]) -> None:
    which, change = CHANGES[name]
    result = copied(which)
    change(result)
    result.save()
    checked = packer(*ALL, "-q")
    assert checked.exit_code == 1, checked.stdout
    assert checked.stdout.startswith("out: "), (checked.stdout, checked.stderr)
    assert EXPOSED_BY.get(name, "") in checked.stdout
    assert checked.stderr.splitlines()[1].startswith("tip: ")


def add_to_all(result: Result, totals: set[str]) -> None:
    """One more of each, by its unit, its input and in the whole."""
    file = result.record(0)["slices"][0][0]
    for figure in totals:
        if figure in OF_INPUTS and figure.startswith(("trunc", "dropped", "untrained", "unshown")):
            result.add_to_input(figure, 1, file)
        else:
            result.add(figure, 1)
    result.save()


@pytest.mark.parametrize("name", RESULTS)
def test_every_total_is_counted_again(name: str, copied: Callable[[str], Result]) -> None:
    """By the shards, or else by packing again."""
    add_to_all(copied(name), {*TOTALS})
    told = packer("verify", "out", "-q").stdout
    of_shards = {one for one in TOTALS if f"manifest.json: {one}: " in told}
    assert {"documents", "tokens", "trained_tokens", "unpacked_rows"} <= of_shards
    if name != "mixed":
        assert "out: manifest.json: does not list rejected.jsonl, rejected_records is 1" in told
    of_shards |= {"rejected_records"}  # of which rejected.jsonl has the lines
    add_to_all(copied(name), {*TOTALS} - of_shards)
    assert packer("verify", "out", "-q").exit_code == 0
    told = packer(*ALL, "-q").stdout
    assert [one for one in TOTALS if f": {one} is " not in told] == [
        one for one in TOTALS if one in of_shards
    ]


# What cannot be told from the inputs, and does no harm: the rows and all figures are as they were.
HARMLESS: dict[str, tuple[str, Change]] = {
    "unit_bytes: how inputs are cut into units, which is there to be seen": (
        "mixed", set_config("unit_bytes", 12345)),
    "shard_bytes: how a unit's rows are cut into shards, the same rows in the same order": (
        "mixed", set_config("shard_bytes", 12345678)),
    "force_split: permits what was not done": ("mixed", set_config("force_split", True)),
    "chat_template: where it came from; the template itself is in the result": (
        "chat", set_config("chat_template", "another.jinja")),
    "the tokenizer's source: where it came from; the tokenizer is in the result": (
        "mixed", set_tokenizer("source", "elsewhere")),
    "max_errors: the limit of the last run only, --add keeps what earlier ones skipped": (
        "mixed", set_config("max_errors", 1)),
    "the weights of slices: for progress only": (
        "mixed", in_record(lambda one: one["slices"][0].__setitem__(3, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_change_that_harms_nobody(name: str, copied: Callable[[str], Result]) -> None:
    which, change = HARMLESS[name]
    result = copied(which)
    change(result)
    result.save()
    checked = packer(*ALL, "-q")
    assert checked.exit_code == 0, checked.stdout


def test_every_option_is_among_the_changes() -> None:
    options = {field.name for field in dataclasses.fields(PackConfig)}
    assert options == {
        *OPTIONS, "unit_bytes", "shard_bytes", "force_split", "chat_template", "allow_open_turns",
        "max_errors",  # they may have been others when what is kept was packed
        "roles",  # no other speakers are there
        "min_reward", "max_age",  # nor traces: test_traces
        "special_tokens_in_text",  # no text spells one out
        "fim_rate", "fim_spm_rate", "fim_tokens",  # a tokenizer with such tokens is needed
        "template_args", "on_unshown",  # the template reads none, and shows everything
        "turns", "train_reasoning", "train_tool_calls",  # test_each_turn, test_finer_training
        "view", "mixture",  # of tokenized directories only
    }  # fmt: skip
    assert EXPOSED_BY.keys() <= CHANGES.keys()


@pytest.mark.parametrize("name", RESULTS)
def test_unchanged_they_are_sound(name: str, copied: Callable[[str], Result]) -> None:
    result = copied(name)
    for once_more in (False, True):
        if once_more:
            result.save()
        for sample in ("all", 5):
            checked = packer("verify", "out", "--against-inputs", "--sample", sample)
            assert checked.exit_code == 0, checked.stdout
            assert ": sound; " in checked.stdout
            marked = "packer: out is marked incomplete: " in checked.stderr
            assert marked == (name == "lossy")


# Tables of the sources of a recipe


Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of two sources."""
    folder = tmp_path_factory.mktemp("forged")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_sources()
        amounts = {"web": {"weight": 0.6}, "code": {"weight": 0.4}}
        pack_mixed(recipe_of(amounts, tokens=200_000))
    return folder


def all_of_one(manifest: Manifest) -> None:
    manifest["sources"][0]["inputs"], manifest["sources"][1]["inputs"] = [0, 0], [0, 2]


BY_ITSELF: dict[str, Callable[[Manifest], Any]] = {
    "another name": lambda manifest: manifest["sources"][0].update(name="other"),
    "inputs of another source": all_of_one,
    "another order": lambda manifest: manifest["sources"].reverse(),
    "no sources": lambda manifest: manifest["sources"].clear(),
}
BY_INPUTS: dict[str, Callable[[Manifest], Any]] = {
    "taken": lambda manifest: manifest["sources"][0].update(taken=1),
    "asked": lambda manifest: manifest["sources"][0].update(asked=1.0),
    "available": lambda manifest: manifest["sources"][0].update(available=10**6),
    "duplicates": lambda manifest: manifest["sources"][1].update(duplicate_documents=7),
    "held out": lambda manifest: manifest["sources"][1].update(held_out_documents=7),
    "shares that cannot be": (lambda manifest: manifest["config"]["mixture"].update(tokens=10**9)),
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
