"""Row groups given back when they are copied, and rows that land in pieces."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clients.batch import ArenaReader
from clients.connection.buffers import BufferPool
from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import BadMessage
from loaderd.api.protocol import Blob, BlobArray, RowGroup

SPEC = RowArraySpec("x", "uint8", (4,), 4)
GROUP = RowGroup(session=1, run=3, step=5, group=2, last=True, num_rows=1, blob=Blob((), ()))


class Session:
    """Notes what is released; pieces are given."""

    def __init__(self, run: int = 3, pieces: Any = ()) -> None:
        self.run, self.lost, self.pieces = run, False, pieces
        self.released: list[tuple[int, int, int]] = []
        self.attachment = SimpleNamespace(data=np.arange(200, dtype=np.uint8))

    def release(self, step: int, group: int) -> None:
        self.released.append((self.run, step, group))

    def views(self, _blob: Any, _array: Any) -> Any:
        return iter(self.pieces)


class Later(BufferPool):
    """Memory whose copies end when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []

    def after(self, release: Callable[[], None]) -> None:
        self.waiting.append(release)


def reader(session: Session, pool: Any = None, threads: int = 1) -> ArenaReader:
    return ArenaReader(session, pool or BufferPool(), threads)  # type: ignore[arg-type]


def test_a_group_is_given_back_once_it_is_copied():
    session = Session()
    reader(session)._release(GROUP)
    assert session.released == [(3, 5, 2)]


@pytest.mark.parametrize("lost", [False, True])
def test_a_copy_that_ends_in_another_run_gives_nothing_back(lost):
    """The step has the same number in the new run, and another batch."""
    session, pool = Session(), Later()
    reader(session, pool)._release(GROUP)
    assert session.released == []
    session.lost = lost
    session.run += not lost
    pool.waiting.pop()()
    assert session.released == []


def test_rows_land_piece_by_piece():
    rows = np.arange(40, dtype=np.uint8)
    positions = np.array([9, 0, 3, 4, 5, 6, 7, 8, 2, 1], np.uint32)
    for where in (None, positions):
        session = Session(pieces=[(0, rows[:12]), (12, rows[12:])])
        out = np.zeros(40, np.uint8)
        reader(session)._land(SPEC, GROUP.blob, BlobArray("rows:x", "uint8", 0, 40), where, out)
        order = np.arange(10) if where is None else where
        assert out.reshape(10, 4)[order].tolist() == rows.reshape(10, 4).tolist()


def test_a_piece_that_ends_within_a_row_is_an_error():
    session = Session(pieces=[(0, np.zeros(6, np.uint8))])
    places, out = np.zeros(2, np.uint32), np.zeros(8, np.uint8)
    with pytest.raises(BadMessage, match="a piece of rows:x ends within a row"):
        reader(session)._land(SPEC, GROUP.blob, BlobArray("rows:x", "uint8", 0, 8), places, out)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("placed", [False, True])
def test_rows_are_gathered_by_several_threads(monkeypatch, threads, placed):
    monkeypatch.setattr("clients.batch.SPLIT_BYTES", 1)
    session = Session()
    made = reader(session, threads=threads)
    addresses = np.array([7, 100, 3, 44, 0, 60, 61], np.uint64)
    positions = np.array([9, 9, 6, 5, 4, 3, 2, 1, 0], np.uint32) if placed else None
    out = np.zeros(4 * 9, np.uint8)
    made._gather_piece(SPEC, addresses, 2, positions, out)
    made.close()
    found = out.reshape(9, 4)
    for i, address in enumerate(addresses.tolist()):
        place = i + 2 if positions is None else int(positions[i + 2])
        assert found[place].tolist() == list(range(address, address + 4))
