"""Runs of recipes: killed and run again, on ranks, updated, and with nothing to tokenize."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from altered import unaltered
from chats import CHATML, assistant, chat, chat_tokenizer, user
from support import assert_error, check_directory, contents, jsonl, packer, random_texts, succeeds

import packer_cli.result.manifest as manifest_module
from packer_cli.errors import DataError
from packer_cli.result.opening import open_packed

RECIPE = """
max_length = 256
tokenizer = "bytes"
{top}

[[source]]
name = "a"
inputs = ["a-1.jsonl", "a-2.jsonl"]
weight = {weight}

[[source]]
name = "b"
inputs = ["b.jsonl"]
weight = 1
max_epochs = 10

[[source]]
name = "c"
inputs = ["c.jsonl"]
epochs = 0.5

[validation]
share = "10%"
"""


def write_recipe(weight: float = 3, top: str = "") -> None:
    Path("mix.toml").write_text(RECIPE.format(weight=weight, top=top))


@pytest.fixture(autouse=True)
def recipe(folder: Path) -> Path:
    for name, documents in (("a-1", 900), ("a-2", 600), ("b", 300), ("c", 100)):
        texts = random_texts(documents, 100, documents, f"{name} ")
        (folder / f"{name}.jsonl").write_bytes(jsonl(*texts))
    write_recipe()
    return folder


def pack(*more: str, out: str = "out") -> str:
    """What the command says on stderr. It succeeds, and every side is sound."""
    done = succeeds("pack", "mix.toml", "--unit-bytes", "20k", *more, "-o", out)
    for side in ("train", "validation"):
        check_directory(f"{out}/{side}")
    return done.stderr


def files_of(folder: str) -> dict[str, bytes]:
    """The files of all sides and sources, but for those that hold times and other files' names."""
    return {
        name: data
        for name, data in contents(folder).items()
        if ".packer" not in name and not name.endswith(("manifest.json", "units.jsonl"))
    }


def test_halves_of_two_runs_are_refused_by_all_that_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What --overwrite of packer 0.2 left when it was ended after train's manifest."""
    monkeypatch.setattr(manifest_module, "_WAITS", 1)
    pack(out="out")
    pack("--seed", "7", out="other")
    shutil.rmtree("out/train")
    shutil.copytree("other/train", "out/train")
    for command in (
        ["stats", "out"], ["stats", "out/train"], ["verify", "out"], ["show", "out/train"],
        ["show", "out/validation"], ["export", "out/train", "--to", "numpy", "-o", "exported"],
    ):  # fmt: skip
        failed = packer(*command)
        assert_error(failed, 1, "come from different runs")
        assert "run the same packer pack again" in failed.stderr
    monkeypatch.chdir("out/train")
    assert_error(packer("stats", "."), 1, ". and ", "come from different runs")
    assert_error(packer("stats", "../validation/"), 1, "come from different runs")
    monkeypatch.chdir("../..")
    with pytest.raises(DataError, match="out/train and out/validation come from different runs"):
        open_packed("out/train")
    shutil.move("out/train", "alone")  # which is a result as any other
    succeeds("verify", "alone", "-q")
    succeeds("verify", "out/validation", "-q")
    pack("--overwrite", out="out")
    manifest = Path("out/train/manifest.json")
    manifest.write_text(manifest.read_text().replace('"run": "', '"run": "0'))
    assert_error(packer("verify", "out/validation"), 1, "come from different runs")


def rank(number: int, size: int, out: str) -> list[str]:
    options = ["--unit-bytes", "20k", "-q", "-o", out]
    return ["pack", "mix.toml", *options, "--rank", str(number), "--world-size", str(size)]


def test_ranks() -> None:
    """One after the other, in any order, or at once."""
    pack(out="whole/out")
    for out, order in (("one", (0, 1, 2)), ("other", (2, 0, 1))):
        for number in order:
            assert not Path(out, "out/train/manifest.json").exists()
            succeeds(*rank(number, 3, f"{out}/out"))
        assert files_of(out) == files_of("whole")
    succeeds(*rank(1, 3, "one/out"))
    with ThreadPoolExecutor(4) as threads:
        many = list(threads.map(lambda number: unaltered(*rank(number, 4, "many/out")), range(4)))
    assert [one.returncode for one in many] == [0] * 4, [one.stderr for one in many]
    assert files_of("many") == files_of("whole")


def test_nothing_is_tokenized_again_for_other_amounts_and_rows() -> None:
    first = pack()
    assert first.count("-tokenized/") == 3
    again = pack()
    assert [f"{one}: up to date" in again for one in ("out/train", "out/validation")] == [True] * 2
    before = {path: path.stat().st_mtime_ns for path in Path("mix-tokenized").rglob("*.arrow")}
    assert before
    write_recipe(weight=2)
    again = packer("pack", "mix.toml", "--unit-bytes", "20k", "-q", "-o", "out")
    assert again.stderr.splitlines() == [
        'error: out/train: its recipe has changed: source "a": weight 2, was 3',
        "tip: add --overwrite to pack it again, or choose another --output",
    ]
    for more in (["--overwrite"], ["--add", "--seed", "3"], ["--overwrite", "-l", "128"],
                 ["--overwrite", "--view"]):  # fmt: skip
        told = pack(*more)
        assert told.count("-tokenized/a: up to date") == 1
        now = {path: path.stat().st_mtime_ns for path in Path("mix-tokenized").rglob("*.arrow")}
        assert now == before


def test_a_run_that_is_refused_leaves_the_documents(recipe: Path) -> None:
    """Views refer to them."""
    pack("--view")
    before = files_of("mix-tokenized")
    with Path("b.jsonl").open("ab") as file:
        file.write(jsonl("one more"))
    done = packer("pack", "mix.toml", "--view", "--unit-bytes", "20k", "-q", "-o", "out")
    differs = "mix-tokenized/b: holds a finished result that differs: b.jsonl has changed"
    assert_error(done, 2, "source 'b'", differs)
    assert "--add" in done.stderr
    assert files_of("mix-tokenized") == before
    assert len(open_packed("out/train").take(np.arange(1)))


def test_an_update_packs_again_what_changed_and_nothing_else() -> None:
    pack()
    assert pack("--add").count(": up to date") == 5
    with Path("b.jsonl").open("ab") as file:
        file.write(jsonl("one more", "and another"))
    assert pack("--add").count(": up to date") == 2
    pack(out="anew/out")
    assert files_of("out") == files_of("anew/out")
    write_recipe(top="eos = false")
    again = packer("pack", "mix.toml", "-q", "--unit-bytes", "20k", "-o", "out", "--add")
    assert_error(again, 2, "source 'a': mix-tokenized/a: was packed with other options: --eos")
    pack("--overwrite")
    shutil.rmtree("anew")
    pack(out="anew/out")
    assert files_of("out") == files_of("anew/out")


@pytest.mark.parametrize(
    ("how", "lost", "replaced"),
    [
        ("--overwrite", ("validation/*", "train/shard-00000*"), True),
        ("--overwrite", ("validation/*",), True),
        ("--add", ("train/shard-00000*",), True),
        ("--add", ("validation/*", "train/dataset_info.json"), True),
        ("--add", ("validation/*",), False),
    ],
)
def test_what_is_lost_of_a_side_is_packed_again(
    how: str, lost: tuple[str, ...], *, replaced: bool
) -> None:
    pack()
    whole, manifest = files_of("out"), Path("out/train/manifest.json")
    before = manifest.stat()
    for path in (path for names in lost for path in Path("out").glob(names)):
        path.unlink()
    told = pack(how)
    assert ("train: up to date" in told) == (not replaced)
    assert os.path.samestat(manifest.stat(), before) == (not replaced)
    assert files_of("out") == whole
    Path("out/dataset_dict.json").unlink()  # as a killed run leaves it
    next(Path("out/train").glob("shard-*")).unlink()
    done = packer("pack", "mix.toml", "--unit-bytes", "20k", "-q", "-o", "out")
    assert_error(done, 2, "out/train: holds a finished result that differs: shard-", "is missing")


def test_sources_that_are_tokenized_already(folder: Path) -> None:
    for name in ("a-1", "a-2", "b", "c"):
        succeeds("tokenize", f"{name}.jsonl", "-t", "bytes", "-q", "-o", name)
    pack(out="whole/out")
    recipe = (folder / "mix.toml").read_text().replace(".jsonl", "")
    (folder / "mix.toml").write_text(recipe)
    told = pack()
    assert "-tokenized/" not in told
    assert not Path("mix-tokenized").exists()


def test_what_the_sources_records_lacked_is_in_the_report_of_the_mixture() -> None:
    with Path("b.jsonl").open("a") as file:
        file.write('{"other": 1}\n' * 5 + '{"text": ""}\n' * 3)
    write_recipe(top='on_error = "skip"\neos = false')
    told = succeeds("pack", "mix.toml", "-q", "-o", "out")
    lines = ["counted when sources were tokenized, each record once", "count what source",
             "5 rejected b", "3 empty b"]  # fmt: skip
    for report in (told, packer("stats", "out/train"), packer("stats", "out/validation")):
        assert " ".join(lines) in " ".join(report.stdout.split())
    (found,) = (
        one for one in json.loads(packer("stats", "out/train", "--json").stdout)["source_records"]
        if one["name"] == "b"
    )  # fmt: skip
    counted = {"documents": 300, "empty_documents": 3, "rejected_records": 5}
    assert found["totals"].items() >= counted.items()
    packer("stats", "out/train", "--html", "page.html")
    assert lines[0].capitalize() in Path("page.html").read_text()
    succeeds("verify", "out/train", "--against-inputs")


def test_options_of_all_sources_that_one_has_no_use_for(recipe: Path) -> None:
    chat_tokenizer(recipe / "tok", CHATML)
    turns = [chat(user("Hi?" * n), assistant("Yes. " * n)) for n in range(1, 40)]
    Path("b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in turns))
    write_recipe(weight=0.1, top='tokenizer = "./tok"\ntrain_on = "last-assistant"')
    text = Path("mix.toml").read_text().replace('tokenizer = "bytes"\n', "")
    Path("mix.toml").write_text(text.replace("weight = 0.1", "epochs = 1").replace(
        "weight = 1\nmax_epochs = 10", "epochs = 3"))  # fmt: skip
    said = pack().splitlines()
    assert "packer: source 'b': records: messages" in said
    configs = {name: json.loads(Path(f"mix-tokenized/{name}/manifest.json").read_text())["config"]
               for name in "abc"}  # fmt: skip
    assert {name: one["train_on"] for name, one in configs.items()} == {
        "a": "all", "b": "last-assistant", "c": "all",
    }  # fmt: skip
    Path("mix.toml").write_text(Path("mix.toml").read_text().replace(
        'inputs = ["c.jsonl"]', 'inputs = ["c.jsonl"]\ntrain_on = "assistant"'))  # fmt: skip
    failed = packer("pack", "mix.toml", "--unit-bytes", "20k", "-q", "-o", "other")
    assert_error(failed, 2, "mix.toml, source 'c': --train-on assistant does not apply to")


def test_a_source_too_small_for_validation_verifies(recipe: Path) -> None:
    """Its one document stays in train, with a note: the result is sound all the same."""
    Path("c.jsonl").write_bytes(jsonl("one document"))
    write_recipe()
    text = Path("mix.toml").read_text().replace("epochs = 0.5", "epochs = 1").replace("10%", "2%")
    Path("mix.toml").write_text(text)
    done = succeeds("pack", "mix.toml", "-o", "out")
    note = "mix.toml, source 'c': too few documents to hold any out, so all stay in train"
    assert note in done.stderr
    sides = [json.loads(Path("out", side, "manifest.json").read_text())["sources"][2]["documents"]
             for side in ("train", "validation")]  # fmt: skip
    assert sides == [1, 0]
    for how in ((), ("--against-inputs", "--sample", "all")):
        succeeds("verify", "out", *how)


def renamed(name: str) -> None:
    Path("mix.toml").write_text(Path("mix.toml").read_text().replace("b.jsonl", name))


def write_bad(top: str = "") -> None:
    Path("b.jsonl").write_text('{"other": 1}\n' * 5)
    write_recipe(top=top)


def put_rows_in_place_of_tokens() -> None:
    succeeds("pack", "c.jsonl", "-l", 64, "-t", "bytes", "-q", "-o", "mix-tokenized/a")


def put_tokens_of_another_recipe() -> None:
    write_recipe(top='tokenized = "mix-tokenized"')
    succeeds("tokenize", "c.jsonl", "-t", "bytes", "-q", "-o", "mix-tokenized/a")


# what is done, options of the command, and the error
REFUSED: dict[str, tuple[Callable[[], object], list[str], int, tuple[str, ...]]] = {
    "rows where tokens are to be": (
        put_rows_in_place_of_tokens, ["--overwrite"], 2,
        ("source 'a': mix-tokenized/a: holds packed rows",),
    ),
    "tokens of another recipe": (
        put_tokens_of_another_recipe, ["--overwrite"], 2,
        ("source 'a': mix-tokenized/a: holds documents of other inputs", "c.jsonl"),
    ),
    "bad records": (write_bad, [], 1, ("source 'b': b.jsonl", "text")),
    "nothing but bad records": (
        lambda: write_bad('on_error = "skip"'), [], 1, ("source 'b': ",),
    ),
    "no such file": (
        lambda: renamed("d.jsonl"), [], 2,
        ("mix.toml, source 'b': d.jsonl: no such file or directory",),
    ),
    "a file of two sources": (
        lambda: renamed("c.jsonl"), [], 2, ("mix.toml, sources 'b' and 'c': both have c.jsonl",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    change, options, code, parts = REFUSED[name]
    change()
    before = contents(".")
    failed = packer("pack", "mix.toml", "-q", "-o", "out", *options)
    assert_error(failed, code, *parts)
    if name == "no such file":
        assert "patterns start at the recipe's folder" in failed.stderr
    assert not Path("out").exists()
    now = contents(".")
    assert {path: now.get(path) for path in before} == before


LONG = """
max_length = 64
tokenizer = "bytes"
{top}
[[source]]
name = "long"
inputs = ["long.jsonl"]
{long}
[[source]]
name = "short"
inputs = ["short.jsonl"]
{short}
"""
AMOUNTS = {  # of the recipe: how much is asked for
    "by weight": {"top": "tokens = 3000", "long": "weight = 1", "short": "weight = 1"},
    "fixed": {"long": "tokens = 1500", "short": "epochs = 1"},
}  # fmt: skip


@pytest.mark.parametrize("amounts", AMOUNTS)
def test_a_share_that_whole_documents_miss_is_told_and_no_error(folder: Path, amounts: str) -> None:
    """1,500 tokens are asked of a source whose documents have 1,001 each at the end."""
    (folder / "long.jsonl").write_bytes(jsonl(*(f"{number}" * 500 for number in range(10, 15))))
    (folder / "short.jsonl").write_bytes(jsonl(*(f"short {number}" for number in range(300))))
    (folder / "mix.toml").write_text(LONG.format(**({"top": ""} | AMOUNTS[amounts])))
    done = succeeds("pack", "mix.toml", "-o", "out")
    begin = "packer: source 'long': takes 1,001 of 1,500 tokens asked: "
    (line,) = (one for one in done.stderr.splitlines() if one.startswith(begin))
    assert "documents are not split, and its last one has 1,001; its share is " in line
    off = line.split()[-2]
    stats = " ".join(packer("stats", "out").stdout.split())
    title = "shares that are off, in tokens: documents stay whole"
    assert f"{title} asked got share off document at its end source" in stats
    assert f" 1,500 1,001 {off} 1,001 long" in stats
    succeeds("stats", "out", "--html", "page.html")
    assert title.capitalize() in Path("page.html").read_text()
    missed = json.loads(Path("out/manifest.json").read_text())["missed_shares"]
    assert missed[0].items() >= {"source": "long", "asked": 1500, "taken": 1001}.items()
    assert json.loads(packer("stats", "out", "--json").stdout)["missed_shares"] == missed
    plan = json.loads(packer("plan", "mix.toml", "--json", "-q").stdout)
    assert plan["outcomes"][0]["missed_shares"] == missed
    succeeds("verify", "out", "--against-inputs")
