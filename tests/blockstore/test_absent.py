"""A reader of a part of a store: what is not in it comes from another server, and fits in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore import concurrency
from blockstore.errors import AbsentRows, CorruptBlock
from blockstore.format import PAGE_BYTES
from blockstore.io.reader import BlockReader, make_transit
from blockstore.io.threads import ReadThreads, Task
from blockstore.kernels.rows import place_rows
from blockstore.make_part import make_part, plan_part
from blockstore.owners import write_owners
from blockstore.store import Store, open_store, read_rows
from tests.graphs import make_csc
from tests.stores import write_store

SLOT = 4096


@given(st.integers(0, 999), st.integers(1, 9), st.integers(0, 12))
def test_rows_are_placed_as_one_reads(seed: int, row_bytes: int, count: int):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (5, row_bytes)).astype(np.uint8)
    memory = rng.integers(0, 256, 200).astype(np.uint8)
    expected, which = memory.copy(), rng.integers(0, 5, count)
    starts = rng.integers(0, 180, count)
    lows, highs = starts + rng.integers(-9, 9, count), starts + rng.integers(-9, 20, count)
    lows = np.maximum(lows, 0)
    for i in range(count):
        for b in range(row_bytes):
            if lows[i] <= starts[i] + b < highs[i]:
                expected[starts[i] + b] = rows[which[i], b]
    place_rows(rows.reshape(-1), which, starts, lows, highs, row_bytes, memory)
    assert np.array_equal(memory, expected)


class Others:
    """The other servers: rows of the whole store, which are counted."""

    def __init__(self, store: Store, owner: np.ndarray, most: int = 7) -> None:
        self._rows = {
            a.path: read_rows(store, a) for a in store.manifest.types[0].features.values()
        }
        self._owner, self._most, self._threads = owner, most, ReadThreads(1)
        self.asked: list[int] = []
        self.flip = False

    def put(self, task: Task) -> None:
        self._threads.put(task)

    def num_rows(self, path: str) -> int:
        return len(self._rows[path])

    def most_rows(self, path: str) -> int:
        return self._most

    def ask(self, server: int, path: str, rows: np.ndarray) -> np.ndarray:
        assert 0 < rows.size <= self._most
        assert (np.diff(rows) > 0).all()
        assert server != 0
        self.asked += rows.tolist()
        found = self._rows[path][rows].view(np.uint8).reshape(-1).copy()
        found[0] ^= self.flip
        return found

    def close(self) -> None:
        self._threads.close()


@pytest.fixture(scope="module", params=[(24, "ranges"), (300, "ranges"), (24, "mixed")])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Store, Store, np.ndarray]:
    """Whole store, part of server 0, owners; rows of 96 bytes, with gaps, or of 1,200."""
    width, kind = request.param
    folder, nodes = tmp_path_factory.mktemp("absent"), 700
    graph = make_csc([2] * nodes, 1)
    write_store(folder / "whole", graph, [1], width=width)
    rng = np.random.default_rng(5)
    owner = np.repeat(rng.integers(0, 3, nodes), 90 if kind == "ranges" else 25)[:nodes]
    owner[:60] = 1
    store = open_store(folder / "whole")
    write_owners(store, "m", owner, 3, {})
    make_part(store, folder / "part", plan_part(store, "m", 0), lambda _: None)
    return store, open_store(folder / "part"), owner


def test_every_way_to_read_gives_the_pages_of_the_whole_store(
    case: tuple[Store, Store, np.ndarray],
):
    store, part, owner = case
    whole, file = (s.rows(s.manifest.types[0].features["x"]) for s in (store, part))
    assert file.holes is not None
    g = file.geometry
    assert 0 < sum(b - a for a, b in file.holes.present()) < g.num_blocks
    size = g.num_blocks * g.slot_bytes
    memory = np.zeros(3 * size + PAGE_BYTES, np.uint8)
    memory = memory[-memory.ctypes.data % PAGE_BYTES :][: 3 * size]
    expected = np.concatenate([np.fromfile(p, np.uint8, size) for p in whole.shards])[:size]
    others, blocks = Others(store, owner), np.arange(g.num_blocks)
    with BlockReader([file], memory, g.slot_bytes, 2, source=others) as reader:
        reader.read(0, blocks, blocks)
        assert np.array_equal(memory[:size], expected)
        absent = set(np.flatnonzero(file.holes.keepers != 0).tolist())
        assert {r // g.rows_per_block for r in others.asked} == absent
        assert len(set(others.asked)) == len(others.asked)
        # runs of pages that begin and end anywhere, also inside of rows
        rng = np.random.default_rng(1)
        pages = size // PAGE_BYTES
        cuts = np.unique([0, pages, *rng.integers(0, pages, 9)])
        runs = np.stack([np.zeros(cuts.size - 1, np.int64), cuts[:-1], np.diff(cuts)], axis=1)
        memory[:] = 1
        reader.fetch(0, runs, cuts[:-1] * PAGE_BYTES).wait()
        assert np.array_equal(memory[:size], expected)
        # only some rows, in runs of whole blocks
        others.asked.clear()
        wanted = np.unique(rng.integers(0, 700, 40))
        free = make_transit([memory[size : 2 * size]])
        found = np.full((700, file.geometry.chunk_bytes // g.rows_per_block), 255, np.uint8)
        per = g.pages_per_block
        runs = np.stack([np.zeros(g.num_blocks, np.int64), blocks * per, np.full_like(blocks, per)])

        def consume(low: int, high: int, data: np.ndarray) -> None:
            for block in range(low, high):
                held = data[(block - low) * g.slot_bytes :]
                for row in wanted[wanted // g.rows_per_block == block]:
                    at = row % g.rows_per_block * found.shape[1]
                    found[row] = held[at : at + found.shape[1]]

        reader.stream(0, runs.T.copy(), free, consume, rows=wanted).wait()
        rows = read_rows(store, store.manifest.types[0].features["x"])
        assert np.array_equal(found[wanted], rows[wanted].view(np.uint8))
        assert sorted(others.asked) == [r for r in wanted if r // g.rows_per_block in absent]
        others.flip = True
        with pytest.raises(CorruptBlock, match=r"server \d, .* crc32c of the page"):
            reader.read(0, blocks, blocks)
    with (
        BlockReader([file], memory, g.slot_bytes, 2) as reader,
        pytest.raises(AbsentRows, match="serve it with --peers"),
    ):
        reader.read(0, blocks, blocks)
    others.close()


def test_readers_of_the_disk_do_not_wait_for_others(case: tuple[Store, Store, np.ndarray]):
    store, part, owner = case
    file = part.rows(part.manifest.types[0].features["x"])
    assert file.holes is not None
    g, others, go = file.geometry, Others(store, owner), concurrency.Event()
    ask = others.ask
    others.ask = lambda *words: (go.wait(), ask(*words))[1]  # type: ignore[method-assign]
    memory = np.zeros(g.num_blocks * g.slot_bytes + PAGE_BYTES, np.uint8)
    memory = memory[-memory.ctypes.data % PAGE_BYTES :][: g.num_blocks * g.slot_bytes]
    with BlockReader([file], memory, g.slot_bytes, 1, source=others) as reader:
        away = np.flatnonzero(file.holes.keepers != 0)[:1]
        shard, at = g.locate(int(away[0]))
        run = np.array([[shard, at // PAGE_BYTES, g.pages_per_block]])
        waits = reader.fetch(0, run, away * g.slot_bytes)
        here = np.flatnonzero(file.holes.keepers == 0)
        reader.read(0, here, here)  # by the only thread that reads the disk
        go.set()
        waits.wait()
    others.close()
