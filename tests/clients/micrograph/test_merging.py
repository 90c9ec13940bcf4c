"""The search for the number of time steps, with a clock of the test."""

import json

import pytest

from clients.micrograph.training import MergeSearch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def searched(num_ranks: int, epochs: list[float]) -> list[int]:
    """Time steps of each epoch, and of the next one, of so many seconds each."""
    clock = Clock()
    search, found = MergeSearch(num_ranks, clock), []
    for seconds in epochs:
        clock.now += 7  # between two epochs
        search.begin_epoch()
        found.append(search.time_steps)
        clock.now += seconds
        search.end_epoch()
    return [*found, search.time_steps]


@pytest.mark.parametrize(
    ("num_ranks", "epochs", "expected"),
    [
        (4, [10, 9, 9.5, 1, 1], [4, 3, 2, 3, 3, 3]),
        (4, [10, 11, 1, 1], [4, 3, 4, 4, 4]),
        (4, [10, 10, 1], [4, 3, 4, 4]),  # as fast is not faster
        (4, [10, 9, 8, 7, 20, 1], [4, 3, 2, 1, 1, 1, 1]),
        (2, [10, 9, 1, 5], [2, 1, 1, 1, 1]),
        (1, [10, 9, 8], [1, 1, 1, 1]),
    ],
)
def test_time_steps_fall_while_epochs_become_faster(num_ranks, epochs, expected):
    assert searched(num_ranks, epochs) == expected


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("saved", range(5))
def test_a_state_goes_on_with_the_search(part, saved):
    epochs, clock = [10, 9, 9.5, 1, 1], Clock()
    search, found = MergeSearch(4, clock), []
    for number, seconds in enumerate(epochs):
        search.begin_epoch()
        found.append(search.time_steps)
        if number == saved:
            clock.now += part * seconds
            state = json.loads(json.dumps(search.state_dict()))
            clock.now += 1000
            search = MergeSearch(4, clock)
            search.load_state_dict(state)
            clock.now += 50  # until batches come
            search.begin_epoch()
            seconds *= 1 - part
        clock.now += seconds
        search.end_epoch()
    assert found == [4, 3, 2, 3, 3]
    assert search.ended


def test_a_state_of_another_number_of_ranks_begins_from_scratch():
    clock = Clock()
    search = MergeSearch(2, clock)
    search.load_state_dict(MergeSearch(4, clock).state_dict() | {"ended": True})
    assert (search.time_steps, search.ended) == (2, False)
