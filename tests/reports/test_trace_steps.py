"""Steps of a loop: the numbers that count them, against a loop that is written out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, zip_longest

from hypothesis import given, settings
from hypothesis import strategies as st

from packer_cli.errors import DataError
from packer_cli.options.run_options import Loop
from packer_cli.trace import Steps


def epochs_of(rows: int, loop: Loop, begin: int) -> Iterator[tuple[int, list[list[int]]]]:
    """(epoch, the places of each rank), as a sampler gives them in iteration after iteration."""
    while True:
        epoch = (begin + (0 if loop.uneven else loop.world_size - 1)) // rows
        end = (epoch + 1) * rows
        if not loop.uneven:
            end -= (end - begin) % loop.world_size
        yield epoch, [list(range(begin + r, end, loop.world_size)) for r in range(loop.world_size)]
        begin = end


def batches_of(places: list[int], loop: Loop) -> list[list[int]]:
    """As a DataLoader makes them."""
    size = loop.batch_size
    batches = [places[i : i + size] for i in range(0, len(places), size)]
    return [one for one in batches if len(one) == size or not loop.drop_last]


def steps_of(rows: int, loop: Loop, begin: int) -> Iterator[tuple[int, list[list[list[int]]]]]:
    """(epoch, batches of each rank) of step after step."""
    for epoch, ranks in epochs_of(rows, loop, begin):
        batches = [batches_of(places, loop) for places in ranks]
        size = loop.micro_batches
        if loop.trainer:  # whose steps all have as many rows, but for the last of an epoch
            most = len(batches_of(list(range(rows // loop.world_size)), loop))
            if begin > epoch * rows:
                most -= size * -(
                    -(begin - epoch * rows) // (loop.world_size * loop.batch_size * size)
                )
            batches, begin = [its[: max(most, 0)] for its in batches], 0
        for first in range(0, max(map(len, batches)), size):
            yield epoch, [its[first : first + size] for its in batches]


LOOPS = (
    st.builds(
        dict,
        world_size=st.integers(1, 7),
        batch_size=st.integers(1, 4),
        micro_batches=st.integers(1, 3),
        uneven=st.booleans(),
        drop_last=st.booleans(),
        trainer=st.booleans(),
    )
    .filter(lambda one: not (one["trainer"] and one["uneven"]))
    .map(lambda one: Loop(**one))
)


@settings(max_examples=60)
@given(rows=st.integers(1, 40), loop=LOOPS, begin=st.integers(0, 130))
def test_steps_are_those_of_a_loop(rows: int, loop: Loop, begin: int) -> None:
    try:
        steps = Steps(rows, loop, begin)
    except DataError:
        assert rows // loop.world_size < (loop.batch_size if loop.drop_last else 1)
        return
    taken = set()
    for number, (epoch, ranks) in enumerate(islice(steps_of(rows, loop, begin), 60)):
        step = steps.of(number)
        assert (step.number, step.epoch) == (number, epoch)
        by_row = zip_longest(*(chain.from_iterable(batches) for batches in ranks))
        expected = [place for row in by_row for place in row if place is not None]
        assert steps.places(step).tolist() == expected
        for rank, batches in enumerate(ranks):
            for row, place in enumerate(chain.from_iterable(batches)):
                assert steps.at(place) == step
                assert divmod(place - step.begin, loop.world_size) == (row, rank)
        for place in expected:
            assert steps.last_before(place + 1) == step
        taken |= {*expected}
    for place in {*range(begin, max(taken))} - taken:
        assert loop.drop_last or loop.trainer
        assert steps.at(place) is None
        last = steps.last_before(place + 1)
        assert last is None or last.begin < place
    assert steps.last_before(begin) is None


@given(rows=st.integers(4, 40), loop=LOOPS, number=st.integers(0, 10**12))
def test_steps_far_away_follow_one_another(rows: int, loop: Loop, number: int) -> None:
    try:
        steps = Steps(rows * 4, loop)
    except DataError:
        return
    step, after = steps.of(number), steps.of(number + 1)
    assert after.number == step.number + 1
    if after.epoch == step.epoch:
        assert after.begin == step.end
    else:
        assert after.epoch == step.epoch + 1
        assert after.begin == steps.grid.epoch(step.epoch).end
    assert steps.last_before(after.begin + 1) == after
