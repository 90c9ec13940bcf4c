"""A reader of a part of a store: what is not in it comes from another server, and fits in."""

from itertools import pairwise
from typing import NamedTuple

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore import concurrency
from blockstore.errors import AbsentRows, CorruptBlock
from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.io.absent import split_pieces
from blockstore.io.elsewhere import Take
from blockstore.io.reader import BlockReader, make_transit
from blockstore.io.threads import ReadThreads, Task
from blockstore.kernels.rows import RowLayout, list_rows, move_rows
from blockstore.make_part import make_part, plan_part
from blockstore.owners import write_owners
from blockstore.part import Holes
from blockstore.store import Store, open_store, read_rows
from tests.graphs import make_csc
from tests.stores import write_store

SLOT = 4096


class _Case(NamedTuple):
    """An array on disk, and some runs of its pages in memory."""

    layout: RowLayout
    num_rows: int
    owner: np.ndarray  # (shards, bytes): the row of each; -1: none
    pieces: np.ndarray  # ascending, as `read_pieces` takes them
    memory: np.ndarray  # has room for them


def _draw(seed: int) -> _Case:
    rng = np.random.default_rng(seed)
    row_bytes, pages = int(rng.choice([700, 4096, 5000, 12_288])), int(rng.integers(3, 6))
    layout = RowLayout(pages * PAGE_BYTES // row_bytes, row_bytes, pages * PAGE_BYTES, 3)
    num_rows = int(rng.integers(1, 8 * layout.rows_per_block))
    owner = np.full((3, 3 * layout.block_bytes), -1)
    for row in range(num_rows):
        block, inside = divmod(row, layout.rows_per_block)
        shard, at = divmod(block, 3)
        at = at * layout.block_bytes + inside * row_bytes
        owner[shard, at : at + row_bytes] = row
    pieces, place = [], 0
    for shard in range(3):
        cuts = np.unique(rng.integers(0, 3 * pages + 1, 6))
        for low, high in pairwise(cuts.tolist()):
            if rng.random() < 0.7:
                pieces.append((shard, low, high - low, place))
                place += (high - low + int(rng.integers(0, 2))) * PAGE_BYTES
    return _Case(
        layout, num_rows, owner, np.array(pieces, np.int64).reshape(-1, 4),
        rng.integers(0, 256, place).astype(np.uint8),
    )  # fmt: skip


def _there(case: _Case, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a row that lie in the pieces: bytes of memory, bytes of the row."""
    shard = row // case.layout.rows_per_block // 3
    own = np.flatnonzero(case.owner[shard] == row)
    places, bytes_ = [own[:0]], [own[:0]]
    for where, page, pages, place in case.pieces.tolist():
        low = page * PAGE_BYTES
        if where == shard:
            inside = own[(own >= low) & (own < low + pages * PAGE_BYTES)]
            places.append(inside - low + place)
            bytes_.append(inside - own[0])
    return np.concatenate(places), np.concatenate(bytes_)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 9999))
def test_rows_of_pieces_are_those_that_one_finds_byte_by_byte(seed: int):
    case, rng = _draw(seed), np.random.default_rng(seed)
    there = {row: _there(case, row)[0].size for row in range(case.num_rows)}
    out = np.empty(int(case.pieces[:, 2].sum()) * 6 + 2 * len(case.pieces), np.int64)
    some = np.flatnonzero(rng.random(case.num_rows) < 0.5)
    for every, rows in ((True, some[:0]), (False, some), (False, some.astype(np.uint32))):
        count = list_rows(case.pieces, case.layout, case.num_rows, every, rows, out)
        minimum, among = (1, there) if every else (case.layout.row_bytes, some.tolist())
        # a row that two pieces have half of each is not asked for by either
        whole = [r for r in among if there[r] >= minimum and (every or _in_one(case, r))]
        assert out[:count].tolist() == whole


def _in_one(case: _Case, row: int) -> bool:
    places, _ = _there(case, row)
    return any(
        p <= places[0] and places[-1] < p + n * PAGE_BYTES for _, _, n, p in case.pieces.tolist()
    )


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 9999))
def test_rows_are_moved_as_one_moves_them_byte_by_byte(seed: int):
    case, rng = _draw(seed), np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(case.num_rows) < 0.6)
    packed = rng.integers(0, 256, rows.size * case.layout.row_bytes).astype(np.uint8)
    memory, other = case.memory.copy(), packed.copy()
    for i, row in enumerate(rows.tolist()):
        places, at = _there(case, row)
        memory[places] = packed[i * case.layout.row_bytes + at]
        other[i * case.layout.row_bytes + at] = case.memory[places]
    to, source = case.memory.copy(), packed.copy()
    crc = move_rows(source, rows, case.pieces, case.layout, to, True)
    assert crc == google_crc32c.value(source.tobytes())
    assert np.array_equal(to, memory)
    assert np.array_equal(source, packed)
    move_rows(source, rows, case.pieces, case.layout, case.memory, False)
    assert np.array_equal(source, other)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 9999))
def test_pieces_are_cut_where_another_server_begins(seed: int):
    case, rng = _draw(seed), np.random.default_rng(seed)
    per_block = case.layout.block_bytes // PAGE_BYTES
    keepers = rng.integers(0, 3, 9).astype(np.uint16)
    geometry = BlockGeometry(
        case.layout.block_bytes, case.layout.rows_per_block * case.layout.row_bytes, 9, 3,
        case.layout.rows_per_block,
    )  # fmt: skip
    parts = split_pieces(case.pieces, geometry, Holes(1, keepers))
    pages: list[list[tuple[int, ...]]] = [[], []]
    for shard, page, count, place in case.pieces.tolist():
        for i in range(count):
            keeper = int(keepers[3 * shard + (page + i) // per_block])
            found = shard, page + i, place + i * PAGE_BYTES, keeper
            pages[keeper != 1].append(found)
    for part, expected in zip(parts, pages, strict=True):
        assert expected == [
            (p[0], p[1] + i, p[3] + i * PAGE_BYTES, p[4] if p.size == 5 else 1)
            for p in part for i in range(p[2])
        ]  # fmt: skip
        # nothing is cut that could stay together
        assert not any(
            a[0] == b[0] and a[1] + a[2] == b[1] and a[3] + a[2] * PAGE_BYTES == b[3]
            and a[4:] == b[4:] and not _begins(case, b)
            for a, b in pairwise(part.tolist())
        )  # fmt: skip


def _begins(case: _Case, piece: list[int]) -> bool:
    return piece[:2] in case.pieces[:, :2].tolist()


class Others:
    """The other servers: rows of the whole store, which are counted."""

    def __init__(self, store: Store, owner: np.ndarray, maximum: int = 7) -> None:
        self._rows = {
            a.path: read_rows(store, a) for a in store.manifest.types[0].features.values()
        }
        self._owner, self._maximum, self._threads = owner, maximum, ReadThreads(1)
        self.asked: list[int] = []
        self.flip = False

    def put(self, task: Task) -> None:
        self._threads.put(task)

    def num_rows(self, path: str) -> int:
        return len(self._rows[path])

    def max_rows(self, path: str) -> int:
        return self._maximum

    def ask(self, server: int, path: str, rows: np.ndarray, take: Take) -> None:
        assert 0 < rows.size <= self._maximum
        assert (np.diff(rows) > 0).all()
        assert server != 0
        self.asked += rows.tolist()
        found = self._rows[path][rows].view(np.uint8).reshape(-1).copy()
        found[0] ^= self.flip
        assert take(found) == google_crc32c.value(found.tobytes())

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
