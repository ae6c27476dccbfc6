"""`packer trace` against loaders: 1,000 steps of random loops hold the documents that it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipes import pack_sources, run, write_sources
from torch.utils.data import DataLoader

from packer_cli.errors import UsageError
from packer_cli.torch import PackedDataset, PackedSampler
from packer_cli.torch.trainer import Batches
from packer_cli.trace import TracedStep, trace

L = 64
Step = list[list[list[list[int]]]]  # of each rank, batches of rows of tokens


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Results by what they are: a packed directory, a view, a recipe, all joined."""
    folder = tmp_path_factory.mktemp("traced")
    files = write_sources(folder, 300)
    some, bytes_ = (files["letters"], files["digits"]), ("-t", "bytes")
    run("pack", *some, *bytes_, "-l", L, "--unit-bytes", "3K", "-o", folder / "plain")
    run("tokenize", files["signs"], files["digits"], *bytes_, "-o", folder / "tokens")
    run("pack", folder / "tokens", "-l", L, "--view", "-o", folder / "view")
    weights = {name: {"weight": float(name != "digits")} for name in files}
    recipe = pack_sources(folder / "recipe", files, weights, max_length=L)
    paths = {"plain": folder / "plain", "view": folder / "view", "recipe": recipe}
    return {name: [path] for name, path in paths.items()} | {"joined": list(paths.values())}


@lru_cache
def document(path: str, position: int) -> list[int]:
    """The tokens of the record at a position of a file."""
    with open(path, "rb") as file:
        file.seek(position)
        return [*json.loads(file.readline())["text"].encode(), 256]


def tokens_of(traced: TracedStep) -> Step:
    """What the loader gives, made of the documents that are said to be in a step."""
    loop = traced.run.loop
    step: Step = [[[] for _ in range(loop.micro_batches)] for _ in range(loop.world_size)]
    for place in traced.rows():
        row = []
        for one in place.row.segments:
            of_it = document(one.origin.file, one.origin.position)
            row += of_it[one.origin.start :][: one.tokens]
        step[place.rank][place.micro_batch].append(row)
    return [[batch for batch in batches if batch] for batches in step]


@dataclass
class Training:
    """A loop on some ranks, in one process."""

    dataset: PackedDataset
    options: dict[str, Any]
    drop_last: bool = False

    def __post_init__(self) -> None:
        sizes = {**self.options}
        self.batch_size, self.micro_batches = sizes.pop("batch_size"), sizes.pop("micro_batches")
        if "balance" in sizes:
            sizes |= {"batch_size": self.batch_size, "micro_batches": self.micro_batches}
        ranks = range(sizes["world_size"])
        self.samplers = [PackedSampler(self.dataset, rank=rank, **sizes) for rank in ranks]

    def loader(self, sampler: PackedSampler) -> DataLoader[Any]:
        return DataLoader(
            self.dataset, self.batch_size, sampler=sampler, drop_last=self.drop_last,
            collate_fn=lambda rows: [_tokens(row) for row in rows],
        )  # fmt: skip

    def steps(self) -> Iterator[Step]:
        """Without end: step after step, epoch after epoch."""
        loaders = [self.loader(sampler) for sampler in self.samplers]
        while True:
            epoch = [iter(loader) for loader in loaders]
            while True:
                step = [list(islice(one, self.micro_batches)) for one in epoch]
                if not any(step):
                    break
                yield step


def _tokens(row: dict[str, Any]) -> list[int]:
    return row["input_ids"][: int(row["cu_seqlens"][-1])].tolist()


def random_loop(random: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """(the sampler's options with the sizes, how they are called for a trace, drop_last)."""
    options: dict[str, Any] = {
        name: int(random.integers(1, most))
        for name, most in (("world_size", 6), ("batch_size", 5), ("micro_batches", 4))
    }
    options |= {"seed": int(random.integers(0, 99)) if random.random() < 0.9 else None,
                "block_rows": 8, "window_blocks": 4}  # fmt: skip
    balance = random.choice(["", "step", "order"])
    if balance:
        options |= {"balance": str(balance), "hidden_size": int(random.integers(1, 9))}
        options |= {"window": 3} if balance == "order" else {}
    named, drop_last = {**options}, bool(random.random() < 0.3)
    if not balance and random.random() < 0.3:
        options["even"], named["uneven"] = False, True
    return options, {**named, "drop_last": drop_last}, drop_last


@pytest.mark.parametrize("kind", ["plain", "view", "recipe", "joined"])
def test_steps_are_those_of_the_loaders(kinds: dict[str, list[Path]], kind: str) -> None:
    random, paths = np.random.default_rng(len(kind)), kinds[kind]
    dataset, checked = PackedDataset(paths), 0
    while checked < 250:
        options, named, drop_last = random_loop(random)
        training = Training(dataset, options, drop_last)
        per_epoch = len(dataset) / options["world_size"] / options["batch_size"]
        last = int(3 * per_epoch / options["micro_batches"]) + 3
        chosen = {*random.integers(0, last, 12).tolist(), 0, last - 1}
        for number, step in enumerate(islice(training.steps(), last)):
            if number in chosen:
                assert tokens_of(trace(paths, step=number, **named)) == step, (number, named)
                checked += 1


@pytest.mark.parametrize("kind", ["plain", "joined"])
def test_a_state_tells_the_step_that_was_last_and_those_that_follow(
    kinds: dict[str, list[Path]], kind: str
) -> None:
    """Also of runs that go on with other sizes."""
    random, paths = np.random.default_rng(7), kinds[kind]
    dataset, checked = PackedDataset(paths), 0
    while checked < 20:
        options, named, drop_last = random_loop(random)
        training = Training(dataset, options, drop_last)
        done = int(random.integers(1, 60))
        *_, step = islice(training.steps(), done)
        state = json.loads(json.dumps(training.samplers[0].state_dict()))
        names = ("world_size", "batch_size", "micro_batches", "uneven", "drop_last")
        sizes = {name: named[name] for name in names if name in named}
        last = trace(paths, state=state, **sizes)
        assert tokens_of(last) == step, (done, named, state)
        assert last.step.number == done - 1
        assert last.taken[0] == last.taken[1]
        assert not last.doubt
        others = {name: int(random.integers(1, 5)) for name in ("world_size", "batch_size")}
        again = Training(dataset, options | others, drop_last)
        for sampler in again.samplers:
            sampler.load_state_dict(state)
        for number, step in enumerate(islice(again.steps(), 12)):
            assert tokens_of(trace(paths, step=number, state=state, **sizes | others)) == step
        resumed = again.samplers[0].state_dict()
        last = trace(paths, state=resumed, **sizes | others)
        if "dealt" in resumed and not last.doubt:
            assert tokens_of(last) == step
        checked += 1


class TrainersLoop(Training):
    """The same with the batches of `PackedTrainerMixin`, in the Trainer's calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.batch_size, self.micro_batches
        self.batches = [Batches(one, *sizes, drop_last=self.drop_last) for one in self.samplers]
        self.done = 0

    @property
    def per_epoch(self) -> int:
        return -(-len(self.batches[0]) // self.micro_batches)

    def resume(self, other: TrainersLoop) -> None:
        """Go on after another one, which has saved a checkpoint."""
        state = json.loads(json.dumps(other.batches[0].state_dict()))
        for one in self.batches:
            one.restore(state, other.done)
        self.done = other.done

    def steps(self) -> Iterator[Step]:
        while True:
            for one in self.batches:
                one.next_epoch()
            epochs, skipped = [iter(one) for one in self.batches], self.done % self.per_epoch
            for one in epochs:
                assert not any(islice(one, skipped * self.micro_batches))
            for _ in range(skipped, self.per_epoch):
                drawn = [list(islice(one, self.micro_batches)) for one in epochs]
                for one in self.batches:
                    one.trained += 1
                self.done += 1
                yield [[[_tokens(self.dataset[row]) for row in rows] for rows in batches]
                       for batches in drawn]  # fmt: skip
            assert not any(map(list, epochs))


@pytest.mark.parametrize("kind", ["plain", "recipe"])
def test_steps_are_those_of_the_trainers_batches(kinds: dict[str, list[Path]], kind: str) -> None:
    """Also of a run that goes on from a checkpoint, on another number of processes."""
    random, paths = np.random.default_rng(len(kind)), kinds[kind]
    dataset, checked, moved = PackedDataset(paths), 0, 0
    while checked < 20:
        options, named, drop_last = random_loop(random)
        if options.pop("even", True) is False:
            continue
        named |= {"trainer": True}
        training = TrainersLoop(dataset, options, drop_last)
        last = 3 * training.per_epoch + 2
        chosen = {*random.integers(0, last, 8).tolist(), training.per_epoch - 1, last - 1}
        # also at the end of an epoch
        stop = int(random.choice([*range(1, last), *[training.per_epoch] * last]))
        for number, step in enumerate(islice(training.steps(), last)):
            if number in chosen:
                assert tokens_of(trace(paths, step=number, **named)) == step, (number, named)
        training = TrainersLoop(dataset, options, drop_last)
        *_, step = islice(training.steps(), stop)
        state = training.batches[0].state_dict()["sampler"]
        sizes = {**named, "seed": options["seed"]}
        assert tokens_of(trace(paths, state=state, **sizes)) == step, (stop, named)
        names = "world_size", "batch_size", "micro_batches"
        others = {a: options[b] for a, b in zip(names, random.permutation(names), strict=True)}
        again = TrainersLoop(dataset, options | others, drop_last)
        sizes |= others
        try:
            again.resume(training)
        except UsageError:
            assert again.per_epoch != training.per_epoch
        else:
            moved += 1
            for number, step in enumerate(islice(again.steps(), 2 * again.per_epoch)):
                found = tokens_of(trace(paths, step=number, state=state, **sizes))
                assert found == step, (stop, number, named, state)
        checked += 1
    assert moved > 10
