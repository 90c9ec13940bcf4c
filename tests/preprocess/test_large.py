"""More than 2^31, and 2^32, edges: offsets and counts of 64 bits, by sparse files and headers."""

import os
from pathlib import Path

import numpy as np
import pytest

from blockstore.format import EdgeLayout
from blockstore.pack import GraphPacker
from preprocess.files import buckets as buckets_module
from preprocess.files.array_file import ArrayFile
from preprocess.files.buckets import Buckets
from preprocess.files.npy import NpyFile, NpyWriter
from preprocess.ingest.contents import list_contents
from preprocess.ingest.options import IngestOptions
from preprocess.kernels.edges import (
    Cuts,
    Ends,
    Records,
    cut_ranges,
    expand_edges,
    group_edges,
    split_values,
)
from preprocess.kernels.levels import (
    FOUND,
    STRIDE,
    UNSET,
    advance_columns,
    mark_discovered,
    merge_ranges,
    rename_columns,
)
from preprocess.sources.source import SourceRelation
from preprocess.stages.columns import ColumnFile
from preprocess.stages.csc import WholeColumns, Widths, source_edges
from preprocess.stages.edge_places import EdgePlaces, placed_rows
from tests.preprocess.ingest.test_plan import Headers, plan_ingest
from tests.preprocess.naive import ArraySource
from tests.preprocess.quiet import QUIET

BEYOND = 2**32 + 5
NONE = np.empty(0, np.uint32)


def test_files_of_columns_go_on_behind_two_to_the_32(tmp_path: Path):
    path = tmp_path / "columns"
    with path.open("wb") as f:
        os.truncate(f.fileno(), 4 * BEYOND)
    degrees = np.full(2 * STRIDE + 1, 2**26, np.uint32)
    with ColumnFile.reopen(path, degrees) as file:
        assert file.num_edges == BEYOND
        assert file.starts.tolist() == [0, 2**32, 2**33]
        file.append(WholeColumns(5, np.array([3]), np.array([7, 8, 9], np.uint32), None))
        (found,) = [p.tolist() for p in file.read(BEYOND - 1, 4, 10)]
        assert found == [0, 7, 8, 9]
        assert file.num_edges == BEYOND + 3


def test_columns_begin_behind_two_to_the_32():
    degrees = np.full(70, 2**31 + 1, np.uint32)
    columns = ColumnFile(None, degrees.size)
    columns.degrees = degrees
    columns.finish()
    starts = columns.starts
    assert starts.tolist() == [0, 64 * (2**31 + 1)]
    runs = np.empty((2, 3), np.int64)
    assert merge_ranges(np.array([3, 69], np.uint32), starts, degrees, 1, runs) == 2
    assert runs[:, 1].tolist() == [3 * (2**31 + 1), 69 * (2**31 + 1)]
    assert runs[:, 2].tolist() == [2**31 + 1] * 2


def test_ranges_of_columns_count_beyond_two_to_the_32():
    counts = np.full(9, 2**31, np.uint32)
    bounds, sizes = cut_ranges(counts, 12, 16, 3 * (12 * 2**31 + 16))
    assert bounds.tolist() == [0, 3, 6, 9]
    assert sizes.tolist() == [3 * 2**31] * 3


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_buckets_lie_behind_two_to_the_32(tmp_path: Path, monkeypatch, room: int):
    monkeypatch.setattr(buckets_module, "reserve", lambda fd, size, where: None)
    sizes = np.array([2**31, 2**31 + 7, 3], np.int64)
    parts = [(np.uint64, 1), (np.uint32, 2)]
    with Buckets(tmp_path / "b", sizes, parts, False, room) as held:
        keys, ids = np.arange(6, dtype=np.uint64), np.arange(12, dtype=np.uint32)
        held.append_grouped(np.array([0, 2, 5, 6]), [keys, ids])
        held.append_grouped(np.array([0, 0, 1, 3]), [keys + np.uint64(9), ids])
        held.finish()
        assert (tmp_path / "b").stat().st_size > 2**34
        assert held.take(1, 0).tolist() == [2, 3, 4, 9]
        assert held.take(2, 0, 1).tolist() == [10, 11]
        assert held.take(2, 1).tolist() == [10, 11, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == []


def test_edge_ids_beyond_two_to_the_32():
    widths = Widths.of("uint32", 100, "uint64", BEYOND)
    assert (widths.edge_bits, widths.node_bits, widths.too_wide) == (34, 7, False)
    src, dst = np.array([3, 4]), np.array([5, 5])
    out = Records(*(np.empty(4, np.int64) for _ in range(3)))
    count = expand_edges(src, dst, BEYOND - 2, BEYOND, Ends(undirected=True), out)
    assert count == 4
    assert out[2].tolist() == [BEYOND - 2, 2 * BEYOND - 2, BEYOND - 1, 2 * BEYOND - 1]
    keys, ids = np.empty(4, np.uint64), np.empty(4, np.uint64)
    cuts = Cuts(np.array([0, 100]), np.zeros(101, np.uint32), 0)
    group_edges(out, 4, cuts, 7, np.empty(4, np.uint32), np.empty(2, np.int64), keys, ids)
    values = np.sort(keys << np.uint64(34) | ids)
    degrees, sources, edges = np.empty(100, np.int64), np.empty(4, np.uint32), ids.copy()
    assert split_values(values, np.array([0, 4]), 7, 34, 23, False, degrees, sources, edges) == 4
    assert edges.tolist() == [2 * BEYOND - 2, 2 * BEYOND - 1, BEYOND - 2, BEYOND - 1]
    assert degrees[[3, 4, 5]].tolist() == [1, 1, 2]


def test_blocks_count_edges_beyond_two_to_the_32():
    blocks: list[bytes] = []
    layout = EdgeLayout("uint32", 30, 0, 0, 0, 0)
    packer = GraphPacker(4096, layout, 0, lambda b: blocks.append(b.tobytes()))
    packer._packed = 2**32 - 1  # as if so many edges were packed
    degrees = np.array([layout.capacity(4096), 3])
    packer.append(degrees, np.zeros(degrees.sum(), np.uint32))
    packer.close()
    assert packer.first_edges().tolist() == [
        2**32 - 1, 2**32 - 1 + degrees[0], 2**32 - 1 + degrees.sum()
    ]  # fmt: skip


def test_places_of_edges_beyond_two_to_the_32(tmp_path: Path):
    """Places of uint64; those of reverses lie BEYOND edges behind those of the edges."""
    path = tmp_path / "places"
    with path.open("wb") as f:
        os.truncate(f.fileno(), 8 * 2 * BEYOND)
    with ArrayFile(path, np.uint64) as places:
        assert places.size == 2 * BEYOND
        os.pwrite(places._fd, np.array([2**33, 2**64 - 1], np.uint64).tobytes(), 0)
        os.pwrite(places._fd, np.array([2**34, 5], np.uint64).tobytes(), 8 * BEYOND)
        pieces = iter([np.array([[1.5], [2.5]], np.float32)])
        found = [(rows.tolist(), at.tolist()) for rows, at in placed_rows(pieces, places, BEYOND)]
    assert found == [([[1.5]], [2**33]), ([[1.5], [2.5]], [2**34, 5])]


def test_plans_of_graphs_beyond_two_to_the_32():
    source = Headers(10**8, 2**33, 128)
    options = IngestOptions(mem_bytes=8 << 30, edge_ids=True)
    contents = list_contents(source, options)
    assert contents.relations[0].edge_id_dtype == "uint64"
    assert contents.relations[0].place_dtype == "uint64"
    found = plan_ingest(source, options)
    assert found.store_bytes > 2**33 * (27 + 64) // 8 + 10**8 * 512
    assert found.temporary_bytes > 2**33 * 16


def test_npy_files_are_read_behind_two_to_the_32_items(tmp_path: Path):
    """Both ends of the last edges of a list of 2**32 + 5: the file is nearly all hole."""
    path = tmp_path / "edge_index.npy"
    with NpyWriter(path, (2, BEYOND), np.int32) as out:
        out.put(BEYOND - 2, np.array([1, 2]))
        out.put(2 * BEYOND - 2, np.array([3, 4]))
    file = NpyFile(path)
    assert (file.shape, file.size) == ((2, BEYOND), 2 * BEYOND)
    found = [p.tolist() for p in file.flat().pieces(BEYOND - 2, BEYOND + 1, 2)]
    assert found == [[1, 2], [0]]
    assert file.row(1).read(BEYOND - 3, 3).tolist() == [0, 3, 4]


def test_edges_of_a_source_have_ids_beyond_two_to_the_32():
    """The first piece has 2**32 + 3 of them, all one number in memory; the next is looked at."""

    class Late(ArraySource):
        def edges(self, relation, count, span=None):
            none = np.broadcast_to(np.int32(0), BEYOND - 2)  # one number, as often as it takes
            yield none, none
            yield np.array([3, 4]), np.array([5, 6])

    source = Late(9, [])
    relation = SourceRelation("node", "to", "node", BEYOND, "edges")
    *_, last = source_edges(source, relation, Ends(undirected=True), True, 1 << 20, QUIET)
    out = Records(*(np.empty(last.maximum, np.int64) for _ in range(3)))
    found = last.make(last.arrays, out).edge_ids.tolist()
    assert found == [
        BEYOND - 2,
        2 * BEYOND - 2,
        BEYOND - 1,
        2 * BEYOND - 1,
    ]


def test_columns_longer_than_two_to_the_31_are_passed_over():
    degrees = np.array([2**31 + 5, 0, 2**32 - 1, 7], np.uint32)
    assert advance_columns(0, np.int64(0), degrees, 2**31) == (0, 2**31)
    assert advance_columns(0, np.int64(2**31), degrees, 5) == (1, 0)
    assert advance_columns(0, np.int64(9), degrees, 2**31 + 2**32) == (3, 5)
    rank = np.full(4, 2, np.uint32)
    dst, src = np.empty(4, np.int64), np.empty(4, np.int64)
    found = rename_columns(
        2, np.int64(2**32 - 4), degrees, np.zeros(4, np.uint32), rank, 0, dst, src
    )
    assert found == (3, 1)
    rank, touched = np.array([0, UNSET, 1, UNSET], np.uint32), np.zeros(4, np.uint32)
    sources = np.array([1, 1, 3, 3], np.uint32)
    at = mark_discovered(2, np.int64(2**32 - 3), degrees, sources, 0, 2, rank, touched, 0)
    assert at == (3, 2, 1)
    assert rank[1] == FOUND | np.uint32(1)


def test_places_of_the_last_of_many_edges(tmp_path: Path, monkeypatch):
    """2**33 edges, of which the last three are placed: buckets are sparse files."""
    monkeypatch.setattr(buckets_module, "reserve", lambda fd, size, where: None)
    num_ids = 2**33
    with EdgePlaces(num_ids, "uint64", 1 << 40, tmp_path) as places:
        places._done = num_ids - 3  # as if so many had come
        places.append(np.array([num_ids - 1, 5, 2**32 - 1], np.uint64))
        places._buckets.finish()
        taken = [
            (places._buckets.take(b, 0).tolist(), places._buckets.take(b, 1).tolist())
            for b in range(places._num_buckets)
        ]
    assert taken[0] == ([5], [num_ids - 2])
    assert taken[1] == ([0], [num_ids - 1])
    assert taken[2] == ([num_ids - 1 - 2 * (2**32 - 1)], [num_ids - 3])
