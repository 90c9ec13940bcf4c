"""Pieces in order, made ahead; pieces dealt out, each to one worker."""

from collections.abc import Iterator
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.files.ahead import deal, read_ahead
from preprocess.kernels.levels import advance_columns, rename_columns


def reused(sizes: list[int], closed: list[bool]) -> Iterator[tuple[tuple[np.ndarray, ...], int]]:
    """Pieces of two arrays that the next step overwrites, numbered."""
    left, right = np.empty(9, np.int64), np.empty(9, np.float32)
    try:
        for number, size in enumerate(sizes):
            left[:size], right[:size] = number, -number
            yield (left[:size], right[:size]), number
            left[:], right[:] = 99, 99
    finally:
        closed.append(True)


@given(sizes=st.lists(st.integers(0, 9), max_size=30), workers=st.integers(1, 4))
def test_each_piece_goes_to_one_worker(sizes, workers):
    found: list[dict[int, tuple[list[int], list[float]]]] = [{} for _ in range(workers)]
    closed: list[bool] = []

    def put(held, arrays, number):
        assert number not in held
        held[number] = arrays[0].tolist(), arrays[1].tolist()

    deal(reused(sizes, closed), [lambda a, p, held=held: put(held, a, p[1]) for held in found])
    together = {n: value for held in found for n, value in held.items()}
    assert sum(map(len, found)) == len(sizes)
    assert together == {n: ([n] * s, [-n] * s) for n, s in enumerate(sizes)}
    assert closed == [True] * bool(sizes) or closed == [True]


def test_workers_run_at_the_same_time():
    """Each waits for the other: one alone would not end."""
    both = Barrier(2, timeout=30)
    deal(reused([1, 1], []), [lambda a, p: both.wait()] * 2)


def test_an_error_of_a_worker_stops_all():
    closed: list[bool] = []
    seen: list[int] = []

    def fail(_, piece):
        seen.append(piece[1])
        raise ValueError("of a worker")

    with pytest.raises(ValueError, match="of a worker"):
        deal(reused([1] * 1000, closed), [fail, fail])
    assert closed == [True]
    assert len(seen) < 1000


def test_an_error_of_the_pieces_is_raised():
    def pieces():
        yield (np.zeros(1),), None
        raise ValueError("of a piece")

    with pytest.raises(ValueError, match="of a piece"):
        deal(pieces(), [lambda a, p: None] * 3)


def test_pieces_read_ahead_are_in_order():
    pieces = (arrays for arrays, _ in reused([3, 0, 9, 1], []))
    assert [p[0].tolist() for p in read_ahead(pieces)] == [[0] * 3, [], [2] * 9, [3]]


@given(
    degrees=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    step=st.integers(1, 7),
)
def test_columns_are_found_again_as_renaming_leaves_them(degrees, step):
    """The column that a piece begins in, without looking at its edges."""
    held = np.array(degrees, np.uint32)
    rank = np.arange(held.size, dtype=np.uint32)
    total, node, skip = int(held.sum()), 0, 0
    dst, src = np.empty(step, np.int64), np.empty(step, np.int64)
    targets = np.repeat(np.arange(held.size), held)
    for first in range(0, total, step):
        sources = np.zeros(min(step, total - first), np.uint32)
        size = sources.size
        rename_columns(node, skip, held, sources, rank, 0, dst[:size], src[:size])
        assert dst[:size].tolist() == targets[first : first + size].tolist()
        node, skip = advance_columns(node, skip, held, size)
    assert int(held[:node].sum()) + skip == total
