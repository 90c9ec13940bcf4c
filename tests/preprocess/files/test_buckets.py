"""Buckets against lists, whatever the room for buffers; pieces made ahead."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.io.buffers import aligned_buffer
from preprocess.files import buckets as buckets_module
from preprocess.files.ahead import read_ahead
from preprocess.files.buckets import SPARE, Buckets

PARTS = [(np.uint64, 1), (np.uint16, 3)]


@settings(max_examples=40)
@given(
    chunks=st.lists(st.lists(st.integers(0, 4), max_size=3000), max_size=6),
    room=st.sampled_from([0, 120_000, 1 << 20]),
    in_memory=st.booleans(),
    chosen=st.booleans(),
    seed=st.integers(0, 99),
)
def test_buckets_give_back_what_they_were_given(
    tmp_path_factory, chunks, room, in_memory, chosen, seed
):
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("buckets") / "b"
    numbers = [np.repeat(np.array(c, np.int64), 7) for c in chunks]
    sizes = sum((np.bincount(n, minlength=5) for n in numbers), np.ones(5, np.int64))
    expected: list[list[list[int]]] = [[[] for _ in PARTS] for _ in range(5)]
    with Buckets(path, sizes, PARTS, in_memory, room) as held:
        for number in numbers:
            keys = rng.integers(0, 2**63, number.size).astype(np.uint64)
            rows = rng.integers(0, 2**16, (number.size, 3)).astype(np.uint16)
            order = np.argsort(number, kind="stable")
            starts = np.concatenate([[0], np.cumsum(np.bincount(number, minlength=5))])
            if chosen:
                held.append_grouped(starts, [keys, rows], order)
            else:
                held.append_grouped(starts, [keys[order], rows[order].reshape(-1)])
            for b in range(5):
                expected[b][0] += keys[number == b].tolist()
                expected[b][1] += rows[number == b].reshape(-1).tolist()
            keys[:], rows[:] = 1, 1  # they are reused by who gave them
        held.finish()
        for b in range(5):
            assert held.filled(b) == len(expected[b][0])
            assert [held.take(b, part).tolist() for part in range(2)] == expected[b]
            middle = held.filled(b) // 2
            scratch = aligned_buffer(held.scratch_bytes(1, 1))
            if middle:
                one = held.take_into(b, 1, scratch, middle, 1)
                assert one.tolist() == expected[b][1][3 * middle : 3 * middle + 3]
    assert not path.exists()


def test_a_write_that_fails_is_told_at_the_latest_when_all_is_there(tmp_path: Path, monkeypatch):
    def fail(fd, data, offset, where):
        raise OSError("broken")

    monkeypatch.setattr(buckets_module, "write_exact", fail)
    with Buckets(tmp_path / "b", np.array([9]), [(np.uint64, 1)], False, 1 << 20) as held:
        held.append_grouped(np.array([0, 9]), [np.arange(9, dtype=np.uint64)])
        with pytest.raises(OSError, match="broken"):
            held.finish()
    assert list(tmp_path.iterdir()) == []


def pieces(closed: list[int], fail_at: int = -1):
    """Pieces in one array, which is reused."""
    part = np.empty(4, np.int64)
    try:
        for i in range(20):
            if i == fail_at:
                raise ValueError("piece 3")
            part[:] = i
            yield part[: i % 5], part
    finally:
        closed.append(1)


def test_pieces_made_ahead_are_the_same():
    closed: list[int] = []
    found = [(a.tolist(), b.tolist()) for a, b in read_ahead(pieces(closed))]
    assert found == [([i] * min(i % 5, 4), [i] * 4) for i in range(20)]
    assert closed == [1]


def test_what_a_piece_raises_comes_in_its_turn():
    closed: list[int] = []
    ahead = read_ahead(pieces(closed, fail_at=3))
    assert [next(ahead)[1][0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="piece 3"):
        next(ahead)
    assert closed == [1]


def test_what_is_left_early_is_closed():
    closed: list[int] = []
    ahead = read_ahead(pieces(closed))
    next(ahead)
    ahead.close()
    assert closed == [1]


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_a_spare_file_is_used_and_given_back(tmp_path: Path, room: int):
    """What it held does not show, nor that it was longer; who comes second makes a file."""
    spare = tmp_path / SPARE
    spare.write_bytes(b"\xff" * 100_000)
    number = spare.stat().st_ino
    sizes, parts = np.array([5, 3]), [(np.uint64, 1), (np.uint32, 2)]
    keys, ids = np.arange(4, dtype=np.uint64), np.arange(8, dtype=np.uint32)
    with Buckets(tmp_path / "a", sizes, parts, False, room) as first:
        assert (tmp_path / "a").stat().st_ino == number
        with Buckets(tmp_path / "b", sizes, parts, False, room) as second:
            assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
            for each in (first, second):
                each.append_grouped(np.array([0, 3, 4]), [keys, ids])
                each.finish()
                assert each.take(0, 0).tolist() == [0, 1, 2]
                assert each.take(1, 0).tolist() == [3]
                assert each.take(1, 1).tolist() == [6, 7]
        assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in tmp_path.iterdir()] == [SPARE]
    assert spare.stat().st_ino == number
