"""Chunks in every form, copied or used where they lie, and when they are given back."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clients.connection.buffers import BufferPool
from clients.hopwise.batch import HopReader
from loaderd.api.contents import RowArraySpec
from loaderd.api.protocol import ChunkReady

ROWS, BATCH = 50, 9
SPECS = (
    RowArraySpec("sym:0", "float32", (3,), 12), RowArraySpec("sym:1", "float32", (3,), 12),
    RowArraySpec("y", "uint8", (), 1), RowArraySpec("n_id", "uint32", (), 4),
)  # fmt: skip
CHOSEN = np.array([7, 8, 9, 30, 31, 0, 1, 2, 3])  # rows of a batch
RANGES = ((7, 30, 0), (3, 2, 4))


class Session:
    """Arrays of fifty rows in an arena, and chunks of them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.data = np.zeros(1 << 14, np.uint8)
        self.arrays: dict[str, Any] = {}
        self.places: list[int] = []
        at = 64
        for spec in SPECS:
            values = rng.integers(0, 250, (ROWS, *spec.row_shape)).astype(spec.dtype)
            self.data[at : at + values.nbytes] = values.view(np.uint8).reshape(-1)
            self.arrays[spec.name] = values
            self.places.append(at)
            at += -(-values.nbytes // 64) * 64
        self.index = at
        self.data[at : at + 8 * BATCH] = CHOSEN.view(np.uint8)
        self.attached = SimpleNamespace(rows=SPECS)
        self.attachment = SimpleNamespace(data=self.data)
        self.run, self.released, self.form = 1, list[tuple[int, int]](), "ranges"

    def receive(self, _kind: type[ChunkReady], step: int) -> ChunkReady:
        common = {"session": 1, "run": self.run, "epoch": 4, "step": step, "num_rows": BATCH}
        if self.form == "index":
            places = tuple((place,) for place in self.places)
            return ChunkReady(**common, form="index", first=(), counts=(), places=places,
                              index=self.index)  # fmt: skip
        first, counts = ((20,), (BATCH,)) if self.form == "one range" else RANGES
        places = tuple(
            tuple(place + f * spec.row_bytes for f in first)
            for place, spec in zip(self.places, SPECS, strict=True)
        )
        return ChunkReady(**common, form="ranges", first=first, counts=counts, places=places)

    def release(self, step: int, group: int) -> None:
        assert group == 0
        self.released.append((self.run, step))

    def release_soon(self, step: int) -> None:
        self.release(step, 0)

    def rows(self) -> Any:
        return np.arange(20, 20 + BATCH) if self.form == "one range" else CHOSEN


def reader(session: Session, threads: int = 1, views: bool = False) -> Any:
    return HopReader(session, BufferPool(), threads, views)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["ranges", "one range", "index"])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_those_that_are_named(monkeypatch, form, threads):
    monkeypatch.setattr("clients.batch.SPLIT_BYTES", 1)
    session = Session()
    session.form = form
    made = reader(session, threads)
    batch = made.read(3)
    made.close()
    rows, arrays = session.rows(), session.arrays
    for found, name in zip(batch.x, ("sym:0", "sym:1"), strict=True):
        assert found.tolist() == arrays[name][rows].tolist(), name
    assert batch.y.tolist() == arrays["y"][rows].tolist()
    assert batch.n_id.tolist() == arrays["n_id"][rows].tolist()
    assert batch.n_id.dtype == torch.int64
    assert batch.input_id.tolist() == rows.tolist()
    assert (batch.epoch, batch.step) == (4, 3)
    assert session.released == [(1, 3)]


def test_what_is_used_where_it_lies_is_given_back_with_the_next_batch():
    session = Session()
    session.form = "one range"
    made = reader(session, views=True)
    batch = made.read(3)
    assert session.released == []
    session.data[session.places[0] + 20 * 12] ^= 1  # the very memory
    assert batch.x[0].view(torch.uint8)[0, 0] == session.data[session.places[0] + 20 * 12]
    made.read(4)
    assert session.released == [(1, 3)]
    session.form = "ranges"  # of several pieces: copied
    made.read(5)
    assert session.released == [(1, 3), (1, 4), (1, 5)]
    made.read(6)
    assert session.released[3:] == [(1, 6)]


def test_a_batch_of_a_run_that_has_ended_is_not_given_back():
    session = Session()
    session.form = "one range"
    made = reader(session, views=True)
    made.read(3)
    session.run = 2
    made.read(3)
    assert session.released == []
    made.read(4)
    assert session.released == [(2, 3)]
