"""Choosing documents of tokenized directories, through what a recipe packs of them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mixed import Documents, documents_in
from support import check_directory, jsonl
from tokenizing import tokenize

from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import Amount, Mixture, PackConfig
from packer_cli.options.recipe import Recipe, RecipeSource
from packer_cli.options.run_options import RunOptions
from packer_cli.result.manifest import Manifest
from packer_cli.run.recipe import pack_recipe

pytestmark = pytest.mark.usefixtures("folder")

NAMES = ("a", "b", "c")


def write_sources(count: int = 200, most: int = 40, *, shared: int = 0) -> None:
    """A tokenized directory for each name; `shared` documents are in all of them, twice."""
    random_ = random.Random(0)

    def some(number: int) -> list[str]:
        return ["".join(random_.choices("abcdefgh ", k=random_.randrange(1, most))) + f"{place}"
                for place in range(number)]  # fmt: skip

    both = [f"shared {number}" for number in range(shared)]
    for name in NAMES:
        texts = [f"{name} {text}" for text in some(count)] + both + both
        random_.shuffle(texts)
        Path(f"{name}.jsonl").write_bytes(jsonl(*texts))
        tokenize(f"{name}.jsonl", "--unit-bytes", "2k", out=name)


def recipe(*amounts: Amount, max_length: int = 64, seed: int = 0, **mixture: Any) -> Recipe:
    sources = tuple(RecipeSource(one.name, (one.name,), DocumentConfig()) for one in amounts)
    config = PackConfig(max_length=max_length, seed=seed, mixture=Mixture(amounts, **mixture))
    return Recipe("mix.toml", None, sources, config)


def pack(what: Recipe, out: str = "out", **options: Any) -> dict[str, Manifest]:
    """The results of a recipe by where they are, each sound."""
    options = {"overwrite": True, "progress": False} | options
    done = pack_recipe(what, Path(out), RunOptions(**options))
    for place, manifest in done:
        assert manifest is not None
        check_directory(place)
    return {str(place): manifest for place, manifest in done if manifest}


def all_of(*names: str) -> Documents:
    directories = [directory_documents(name) for name in names]
    return sum(directories, Counter())


def directory_documents(name: str) -> Documents:
    pack(recipe(Amount(name)), out=f"all-{name}")
    return documents_in(f"all-{name}")


def tokens_of(documents: Documents) -> int:
    return sum(len(one) * times for one, times in documents.items())


def test_an_epoch_has_every_document_once_and_half_of_one_is_in_it() -> None:
    write_sources()
    everything = all_of("a")
    assert set(everything.values()) == {1}
    by_epochs = {}
    for epochs in (0.25, 0.5, 1.0, 1.5, 3.0):
        (manifest,) = pack(recipe(Amount("a", epochs=epochs))).values()
        by_epochs[epochs] = documents_in("out")
        (source,) = manifest.sources
        assert abs(source.taken - epochs * source.available) <= 40 / 2
        assert tokens_of(by_epochs[epochs]) == source.taken
    for fewer, more in pairwise(sorted(by_epochs)):
        assert by_epochs[fewer] <= by_epochs[more]
    assert by_epochs[1.0] == everything
    assert by_epochs[3.0] == Counter(dict.fromkeys(everything, 3))
    assert set(by_epochs[1.5].values()) == {1, 2}


def test_weights_are_reached_to_a_document_and_the_smallest_source_decides() -> None:
    write_sources(count=1500)
    amounts = Amount("a", weight=6), Amount("b", weight=3), Amount("c", weight=1)
    (manifest,) = pack(recipe(*amounts)).values()
    total = sum(one.taken for one in manifest.sources)
    for one, weight in zip(manifest.sources, (0.6, 0.3, 0.1), strict=True):
        assert abs(one.taken / total - weight) < 0.001
    assert manifest.sources[0].epochs == 1
    assert manifest.tokens == total


def test_tokens_in_all_are_what_weights_share_beside_epochs() -> None:
    write_sources(count=1500)
    amounts = Amount("a", weight=0.7), Amount("b", weight=0.2), Amount("c", epochs=0.5)
    (manifest,) = pack(recipe(*amounts, tokens=40000)).values()
    a, b, c = manifest.sources
    left = 40000 - c.asked
    assert c.asked == c.available / 2
    assert (round(a.asked), round(b.asked)) == (round(left * 7 / 9), round(left * 2 / 9))
    assert abs(manifest.tokens - 40000) < 3 * 45 / 2


def test_a_split_is_by_content_and_has_everything_once() -> None:
    write_sources(shared=60)
    everything = all_of("a", "b", "c")
    pack(recipe(Amount("a"), Amount("b"), Amount("c", held_out=False), validation_share=0.2))
    train, held = documents_in("out/train"), documents_in("out/validation")
    assert not train.keys() & held.keys()
    only_c = all_of("c").keys() - all_of("a", "b").keys()
    assert held.keys()
    assert not held.keys() & only_c
    lost = everything - train - held
    assert lost
    assert lost.keys() <= held.keys()
    assert set(lost.values()) == {2}  # what c has of documents that are held out
    assert {held[one] for one in lost} == {4}
    share = len(held) / len((all_of("a") | all_of("b")).keys())
    assert 0.1 < share < 0.3


def test_a_share_for_validation_is_of_what_the_mixture_takes() -> None:
    write_sources(count=1500)
    amounts = Amount("a", weight=1), Amount("b", weight=9), Amount("c", weight=0)
    done = pack(recipe(*amounts, validation_share=0.1))
    train, held = (done[f"out/{side}"].sources for side in ("train", "validation"))
    for one, other in zip(train[:2], held[:2], strict=True):
        assert other.taken / (one.taken + other.taken) == pytest.approx(0.1, abs=0.05)
    assert held[0].documents < 40 < held[1].documents
    assert held[2].documents == 0


@pytest.mark.parametrize("split", [{"validation_documents": 1}, {"validation_share": 1.0}])
def test_a_source_with_too_few_documents_stays_in_train(split: Any) -> None:
    write_sources()
    Path("d.jsonl").write_bytes(jsonl("the only one"))
    tokenize("d.jsonl", out="d")
    done = pack(recipe(Amount("a", epochs=0.5), Amount("d"), **split))
    assert [one.held_out_documents > 0 for one in done["out/train"].sources] == [True, False]
    assert all_of("d") <= documents_in("out/train")


def test_as_many_documents_of_every_source_are_held_out() -> None:
    write_sources()
    done = pack(recipe(Amount("a"), Amount("b"), validation_documents=15))
    assert [one.held_out_documents for one in done["out/validation"].sources] == [15, 15]
    assert [one.documents for one in done["out/validation"].sources] == [15, 15]
    assert documents_in("out/train") + documents_in("out/validation") == all_of("a", "b")


def test_equal_documents_are_taken_once_and_counted() -> None:
    write_sources(shared=30)
    (manifest,) = pack(recipe(Amount("a"), Amount("b"), dedup="exact")).values()
    taken = documents_in("out")
    assert taken.keys() == all_of("a", "b").keys()
    assert set(taken.values()) == {1}
    assert [one.duplicate_documents for one in manifest.sources] == [30, 60]


def test_what_is_not_taken_stands_for_no_equal_document() -> None:
    Path("prompts.jsonl").write_bytes(
        b"".join(b'{"prompt": "shared %d", "completion": "%s"}\n' % (number, answer)
                 for number in range(30) for answer in (b"", b"yes"))
    )  # fmt: skip
    tokenize("prompts.jsonl", out="prompts")
    Path("texts.jsonl").write_bytes(jsonl(*(f"shared {number}" for number in range(30))))
    tokenize("texts.jsonl", out="texts")
    every = all_of("texts")
    assert len(every) == 30
    untrained = recipe(Amount("prompts"), Amount("texts"), dedup="exact")
    (manifest,) = pack(untrained).values()
    assert every <= documents_in("out")
    assert [one.documents for one in manifest.sources] == [30, 30]
    assert [one.duplicate_documents for one in manifest.sources] == [0, 0]
    Path("again.jsonl").write_bytes(Path("texts.jsonl").read_bytes())
    tokenize("again.jsonl", out="again")
    switched_off = recipe(Amount("again", weight=0), Amount("texts", weight=1), dedup="exact")
    pack(switched_off)
    assert documents_in("out") == every


def test_other_files_of_the_same_documents_give_the_same_choice() -> None:
    write_sources()
    amounts = Amount("a", epochs=0.4), Amount("b", epochs=1.3)
    pack(recipe(*amounts))
    before = documents_in("out")
    for name in NAMES:
        lines = Path(f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        Path(f"{name}-1.jsonl").write_bytes(b"".join(lines[50:]))
        Path(f"{name}-2.jsonl").write_bytes(b"".join(reversed(lines[:50])))
        tokenize(f"{name}-2.jsonl", f"{name}-1.jsonl", "--overwrite", out=name)
    pack(recipe(*amounts))
    assert documents_in("out") == before
    pack(recipe(*amounts, seed=1))
    assert documents_in("out") != before


def test_a_source_of_several_directories_is_taken_of_each_as_often() -> None:
    write_sources()
    source = RecipeSource("both", ("a", "b"), DocumentConfig())
    amount = Amount("both", epochs=1.5)
    config = PackConfig(max_length=64, mixture=Mixture((amount,)))
    (manifest,) = pack(Recipe("mix.toml", None, (source,), config)).values()
    assert manifest.sources[0].inputs == (0, 2)
    taken = documents_in("out")
    assert taken.keys() == all_of("a", "b").keys()
    for name in ("a", "b"):
        own = all_of(name)
        twice = sum(len(one) for one in own if taken[one] == 2)
        assert twice / tokens_of(own) == pytest.approx(0.5, abs=0.02)


def test_what_was_chosen_stays_when_documents_are_added() -> None:
    write_sources(count=600)
    amounts = Amount("a", epochs=0.5), Amount("b")
    pack(recipe(*amounts, validation_share=0.1))
    train, held = documents_in("out/train"), documents_in("out/validation")
    with Path("a.jsonl").open("ab") as file:
        file.write(jsonl(*(f"more {number}" for number in range(60))))
    tokenize("a.jsonl", "--add", "--unit-bytes", "2k", out="a")
    pack(recipe(*amounts, validation_share=0.1))
    train_now, held_now = documents_in("out/train"), documents_in("out/validation")
    assert held.keys() <= held_now.keys()
    assert not train.keys() & held_now.keys()
    # half of a had 300 documents, and has some 330 now: a few near the middle come or go
    assert len(train - train_now) < 30
