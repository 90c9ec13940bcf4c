"""Pieces read by a ring and by `preadv`, against Python's own reads."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.format import PAGE_BYTES
from blockstore.io import ring
from blockstore.io.buffers import aligned_buffer
from blockstore.kernels.crc import page_crcs
from blockstore.kernels.reads import NO_RING, cut_tasks, read_pieces

SHARD_PAGES = 200
SHARDS = 2
NO_CRCS = np.empty(0, np.uint32)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Descriptors of two shards, their bytes, the crcs of their pages."""
    folder = tmp_path_factory.mktemp("pieces")
    raw = np.random.default_rng(0).integers(0, 256, (SHARDS, SHARD_PAGES * PAGE_BYTES))
    raw = raw.astype(np.uint8)
    crcs = np.empty(SHARDS * SHARD_PAGES, np.uint32)
    page_crcs(raw.reshape(-1), crcs.size, crcs)
    fds = np.empty(SHARDS, np.int64)
    for i in range(SHARDS):
        path = folder / str(i)
        path.write_bytes(raw[i].tobytes())
        fds[i] = os.open(path, os.O_RDONLY)
    yield fds, raw, crcs
    for fd in fds.tolist():
        os.close(fd)


@pytest.fixture(scope="module", params=["ring", "preadv"])
def queue(request):
    with ring.QueueOwner() as owner:
        if request.param == "preadv":
            yield owner.queue.without_ring()
        elif owner.queue.fd == NO_RING:
            pytest.skip(owner.refusal)
        else:
            yield owner.queue


def lay_out(runs):
    """Pieces of these runs, in a row in memory."""
    pieces = np.array([(*run, 0) for run in runs], np.int64).reshape(-1, 4)
    pieces[:, 3] = (np.cumsum(pieces[:, 2]) - pieces[:, 2]) * PAGE_BYTES
    return pieces


def content(raw, piece):
    shard, page, pages = piece[:3]
    return raw[shard, page * PAGE_BYTES : (page + pages) * PAGE_BYTES]


RUNS = st.lists(
    st.tuples(st.integers(0, SHARDS - 1), st.integers(0, SHARD_PAGES - 4), st.integers(1, 4)),
    max_size=2 * ring.DEPTH + 5,
)


@settings(deadline=None, max_examples=40)
@given(runs=RUNS, verified=st.booleans(), follows=st.booleans())
def test_pieces_come_whole(disk, queue, runs, verified, follows):
    fds, raw, crcs = disk
    if follows:  # one that begins where the one before ends is read with it
        runs = [r for s, p, n in runs for r in ((s, p, 1), (s, p + 1, n))]
    pieces = lay_out([r for r in runs if r[1] + r[2] <= SHARD_PAGES])
    memory = aligned_buffer(int(pieces[:, 2].sum() + 1) * PAGE_BYTES)
    memory[:] = 0xEE
    made = read_pieces(queue, fds, pieces, memory, crcs if verified else NO_CRCS, SHARD_PAGES)
    breaks = [
        i for i, (s, p, _, _) in enumerate(pieces.tolist())
        if not i or (s, p) != (pieces[i - 1, 0], pieces[i - 1, 1] + pieces[i - 1, 2])
    ]  # fmt: skip
    assert made == len(breaks)
    assert not queue.failed[: len(pieces)].any()
    for piece in pieces.tolist():
        data = memory[piece[3] : piece[3] + piece[2] * PAGE_BYTES]
        assert (data == content(raw, piece)).all()
    assert (memory[-PAGE_BYTES:] == 0xEE).all()


def test_pages_that_follow_each_other_in_two_shards_are_two_reads(disk, queue):
    fds, raw, crcs = disk
    pieces = lay_out([(0, 5, 1), (1, 6, 1), (1, 7, 2)])
    memory = aligned_buffer(4 * PAGE_BYTES)
    assert read_pieces(queue, fds, pieces, memory, crcs, SHARD_PAGES) == 2
    assert not queue.failed[:3].any()
    assert (memory == np.concatenate([content(raw, p) for p in pieces.tolist()])).all()


def test_a_page_that_is_not_as_it_was_written_fails_its_piece_alone(disk, queue):
    fds, raw, crcs = disk
    pieces = lay_out([(0, 0, 2), (0, 2, 3), (1, 7, 5)])
    memory = aligned_buffer(10 * PAGE_BYTES)
    other = crcs.copy()
    other[3] ^= 1
    assert read_pieces(queue, fds, pieces, memory, other, SHARD_PAGES) == 2
    assert queue.failed[:3].tolist() == [False, True, False]
    other[SHARD_PAGES + 11] ^= 1
    read_pieces(queue, fds, pieces, memory, other, SHARD_PAGES)
    assert queue.failed[:3].tolist() == [False, True, True]
    read_pieces(queue, fds, pieces, memory, NO_CRCS, SHARD_PAGES)
    assert not queue.failed[:3].any()
    assert (memory[2 * PAGE_BYTES :][: 3 * PAGE_BYTES] == content(raw, (0, 2, 3))).all()


@pytest.mark.parametrize("count", [1, 3 * ring.DEPTH])
def test_a_read_that_fails_or_comes_short_is_told_and_the_next_call_is_sound(disk, queue, count):
    fds, raw, crcs = disk
    memory = aligned_buffer(count * PAGE_BYTES)
    bad = lay_out([(i % SHARDS, SHARD_PAGES if i % 3 else 5, 1) for i in range(count)])
    read_pieces(queue, fds, bad, memory, NO_CRCS, SHARD_PAGES)
    assert queue.failed[:count].tolist() == [i % 3 > 0 for i in range(count)]
    closed = np.array([fds[0], 1 << 20], np.int64)
    read_pieces(queue, closed, bad, memory, NO_CRCS, SHARD_PAGES)
    assert queue.failed[:count].tolist() == [i % 3 > 0 or i % 2 > 0 for i in range(count)]
    good = lay_out([(1, i % SHARD_PAGES, 1) for i in range(0, 2 * count, 2)])
    read_pieces(queue, fds, good, memory, crcs, SHARD_PAGES)
    assert not queue.failed[:count].any()
    for piece in good.tolist():
        assert (memory[piece[3] :][:PAGE_BYTES] == content(raw, piece)).all()


def test_a_ring_that_takes_nothing_leaves_the_rest_to_preadv(disk):
    fds, raw, crcs = disk
    pieces = lay_out([(0, i, 1) for i in range(0, 150, 2)])
    memory = aligned_buffer(75 * PAGE_BYTES)
    with ring.QueueOwner() as owner:
        if owner.queue.fd == NO_RING:
            pytest.skip(owner.refusal)
        with Path(os.devnull).open() as other:  # io_uring_enter refuses it
            gone = owner.queue._replace(fd=other.fileno())
            read_pieces(gone, fds, pieces, memory, crcs, SHARD_PAGES)
            assert not gone.failed[:75].any()
        memory[:] = 0
        read_pieces(owner.queue, fds, pieces, memory, crcs, SHARD_PAGES)
        assert not owner.queue.failed[:75].any()
    assert (memory[PAGE_BYTES:][:PAGE_BYTES] == content(raw, (0, 2, 1))).all()


def test_why_there_is_no_ring_is_told(monkeypatch):
    monkeypatch.setattr(ring, "DEPTH", 1 << 30)
    with ring.QueueOwner() as owner:
        assert owner.queue.fd == NO_RING
        assert owner.refusal == "io_uring is refused (Invalid argument)"


def cut(pages, maximum, max_pages):
    """As `cut_tasks`, naively."""
    tasks: list[list[int]] = []
    for i, n in enumerate(pages):
        if (
            not tasks
            or len(tasks[-1]) == maximum
            or sum(pages[k] for k in tasks[-1]) + n > max_pages
        ):
            tasks.append([])
        tasks[-1].append(i)
    return [task[0] for task in tasks]


@given(
    pages=st.lists(st.integers(1, 9), max_size=30),
    maximum=st.integers(1, 6),
    max_pages=st.integers(1, 20),
)
def test_tasks_are_cut_by_runs_and_by_pages(pages, maximum, max_pages):
    runs = np.array([(0, 0, n) for n in pages], np.int64).reshape(-1, 3)
    out = np.full(len(pages) + 1, -1, np.int64)
    expected = cut(pages, maximum, max_pages)
    assert cut_tasks(runs, maximum, max_pages, out) == len(expected)
    assert out[: len(expected) + 1].tolist() == [*expected, len(pages)]
